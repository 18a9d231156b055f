# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The programs that are measured: each fetches one file to one place, as its users start it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
#: A module runs as Ansible runs it on a target: a process of its own that reads its arguments.
MODULE = "ansible_collections.volta.llm.plugins.modules.model_download"
GET_URL = "ansible.modules.get_url"


@dataclass(frozen=True)
class Order:
    """What is to be fetched, and to where."""

    url: str
    dest: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class Run:
    """One process from start to end: seconds, processor seconds, its largest resident memory, its output."""

    seconds: float
    processor: float
    peak_mib: float
    output: str


def measured(argv: Sequence[str], environment: dict[str, str] | None = None) -> Run:
    """Raises RuntimeError with the program's output when it fails."""
    start = time.monotonic()
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
    )
    assert process.stdout is not None
    output, peak = b"", 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(0.1):
                piece = process.stdout.read1(1 << 16)
                if not piece:
                    break
                output += piece
            peak = max(peak, peak_mib(process.pid))
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    text = output.decode("utf-8", "replace")
    if process.returncode != 0:
        raise RuntimeError(f"{argv[0]} failed with {process.returncode}: {text[-2000:]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, peak, text)


def peak_mib(process: int) -> float:
    """The process's largest resident memory so far. (The one in its resource usage counts what it was forked from.)"""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def module_argv(name: str, arguments: dict[str, object], folder: Path) -> list[str]:
    path = folder / f"{name.rpartition('.')[2]}.json"
    path.write_text(json.dumps({"ANSIBLE_MODULE_ARGS": arguments}), encoding="utf-8")
    return [sys.executable, "-m", name, str(path)]


def module_environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT / ".collections")}


def ours(order: Order, folder: Path, **options: object) -> Run:
    """The module. As in a lock file, size and hash are given."""
    arguments = {"url": order.url, "dest": str(order.dest), "sha256": order.sha256, "size": order.size, **options}
    return measured(module_argv(MODULE, arguments, folder), module_environment())


def curl(order: Order, folder: Path) -> Run:
    return measured(["curl", "-sS", "-f", "-o", str(order.dest), order.url])


def curl_and_sync(order: Order, folder: Path) -> Run:
    """As curl, and then on the disk: where the module is when it says that it is done."""
    return measured(["sh", "-c", 'curl -sS -f -o "$1" "$2" && sync "$1"', "sh", str(order.dest), order.url])


def aria2c(order: Order, folder: Path) -> Run:
    checksum = f"--checksum=sha-256={order.sha256}"
    where = [f"--dir={order.dest.parent}", f"--out={order.dest.name}"]
    return measured(["aria2c", "-q", "--no-conf", "-x4", "-s4", checksum, *where, order.url])


def get_url(order: Order, folder: Path) -> Run:
    arguments: dict[str, object] = {
        "url": order.url,
        "dest": str(order.dest),
        "checksum": f"sha256:{order.sha256}",
        # Its own temporary file beside the destination; else it is copied from one file system to the other.
        "tmp_dest": str(order.dest.parent),
    }
    return measured(module_argv(GET_URL, arguments, folder))


Peer = Callable[[Order, Path], Run]
PEERS: dict[str, Peer] = {
    "curl -o": curl,
    "curl -o, sync": curl_and_sync,
    "aria2c -x4, sha-256": aria2c,
    "get_url, sha256": get_url,
}
