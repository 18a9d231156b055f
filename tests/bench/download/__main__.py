# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How fast ``model_download`` is beside curl, aria2c and get_url: the same nginx on loopback, the same file.

``python -m tests.bench.download [--size GIB] [--runs N] [--save]``. The programs take turns within each round, so that
whatever else the machine does meets all of them; a ratio is the median of the rounds' ratios. Seconds are of whole
processes, from start to end. Prints only, judges nothing; ``--save`` adds every run to what is kept under
docs/measurements.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench.download import peers
from tests.bench.download.peers import Order, Run
from tests.bench.download.servers import Paced, end_well, find_program, make_file, missing_programs, nginx

GIB = 1 << 30
RAW = peers.ROOT / "docs" / "measurements" / "download.jsonl"
LIMIT = 50_000_000
OURS = "model_download"


def memory_available() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


class Bench:
    def __init__(self, runs: int, folder: Path) -> None:
        self.runs = runs
        self.folder = folder
        self.lines: list[dict[str, object]] = []

    def round_robin(self, title: str, order: Order, programs: dict[str, Callable[[Order, Path], Run]]) -> None:
        """Let the programs take turns and print what came of it, each against ``model_download``."""
        times: dict[str, list[Run]] = {name: [] for name in programs}
        names = list(programs)
        for number in range(self.runs):
            # By lot: who follows whom must not be the same in every round.
            for name in random.Random(number).sample(names, len(names)):
                warm_up(order)
                run = programs[name](order, self.folder)
                size = order.dest.stat().st_size
                if size != order.size:
                    raise RuntimeError(f"{name}: {size} bytes came instead of {order.size}")
                times[name].append(run)
                self.lines.append(
                    {
                        "part": title,
                        "round": number,
                        "program": name,
                        "bytes": order.size,
                        "seconds": round(run.seconds, 3),
                        "processor_seconds": round(run.processor, 3),
                        "peak_mib": round(run.peak_mib, 1),
                        "load": round(os.getloadavg()[0], 2),
                    }
                )
        clear(order.dest)
        print(f"\n{title}: {order.size / GIB:g} GiB, {self.runs} rounds")
        print(f"{'':24}{'median s':>9}{'min':>8}{'max':>8}{'MB/s':>8}{'cpu s':>8}{'MiB':>7}   {OURS} is")
        for name in names:
            seconds = [run.seconds for run in times[name]]
            median = statistics.median(seconds)
            ratios = [run.seconds / own.seconds for run, own in zip(times[name], times[OURS], strict=True)]
            print(
                f"{name:24}{median:9.2f}{min(seconds):8.2f}{max(seconds):8.2f}{order.size / median / 1e6:8.0f}"
                f"{statistics.median(run.processor for run in times[name]):8.2f}"
                f"{max(run.peak_mib for run in times[name]):7.0f}"
                + ("" if name == OURS else f"   {statistics.median(ratios):.2f} x as fast ({_span(ratios)})"),
                flush=True,
            )

    def save(self) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        record = {"when": now, "load": os.getloadavg(), "nice": os.nice(0), **machine()}
        with RAW.open("a", encoding="utf-8") as handle:
            for line in [record, *self.lines]:
                handle.write(json.dumps(line) + "\n")


def _span(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def clear(dest: Path) -> None:
    """Nothing of a run is left, on the disk neither, so that the next does not wait for it.

    But for the record that a rotating disk's speed was tried: that is done once for a folder.
    """
    for path in dest.parent.rglob("*"):
        if path.is_file() and path.name != "storage.json":
            path.unlink()
    os.sync()


def warm_up(order: Order) -> None:
    """Touch as much memory as a run will: a virtual machine may have to ask its host for it, whoever comes first."""
    block = bytes(16 << 20)
    with order.dest.open("wb") as handle:
        for _ in range(-(-order.size // len(block))):
            handle.write(block)
    clear(order.dest)


def machine() -> dict[str, object]:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    flags = Path("/proc/cpuinfo").read_text()
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "sha_instructions": "sha_ni" in flags or " sha2 " in flags,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "programs": {name: first_line(argv) for name, argv in VERSIONS.items()},
    }


VERSIONS = {
    "curl": ["curl", "--version"],
    "aria2c": ["aria2c", "--version"],
    "nginx": [find_program("nginx"), "-v"],
    "ansible": [sys.executable, "-c", "import ansible.release as r; print(r.__version__)"],
}


def first_line(argv: list[str]) -> str:
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout.splitlines()[0] if done.stdout else "?"


def hash_rate() -> float:
    """Bytes a second of SHA-256 on one core."""
    block = memoryview(bytearray(64 << 20))
    best = min(_timed(lambda: hashlib.sha256(block)) for _ in range(5))
    return len(block) / best


def _timed(call: Callable[[], object]) -> float:
    import time

    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rerun(bench: Bench, order: Order, bodies: Callable[[], list[int]], programs: dict[str, peers.Peer]) -> None:
    """A second run on a verified file."""
    clear(order.dest)
    peers.ours(order, bench.folder)
    before = len(bodies())
    own = [peers.ours(order, bench.folder) for _ in range(10)]
    asked = len(bodies()) - before
    within = [json.loads(run.output)["duration_s"] * 1000 for run in own]
    bare = [peers.measured([sys.executable, "-c", "import ansible.module_utils.basic"]) for _ in range(10)]
    theirs = [peers.get_url(order, bench.folder) for _ in range(2)]
    clear(order.dest)
    print(f"\nsecond run on the verified file, {order.size / GIB:g} GiB, 10 runs")
    print(f"  the module's own work: {_ms(within)}; requests to the server: {asked}")
    print(f"  the whole process: {_ms([run.seconds * 1000 for run in own])}")
    print(f"  Python with ansible's module code, doing nothing: {_ms([run.seconds * 1000 for run in bare])}")
    print(f"  get_url, whole process: {_ms([run.seconds * 1000 for run in theirs])}")
    bench.lines.append(
        {
            "part": "second run",
            "bytes": order.size,
            "within_ms": [round(value, 1) for value in within],
            "process_ms": [round(run.seconds * 1000, 1) for run in own],
            "python_ms": [round(run.seconds * 1000, 1) for run in bare],
            "get_url_ms": [round(run.seconds * 1000, 1) for run in theirs],
            "requests": asked,
        }
    )


def _ms(values: list[float]) -> str:
    return f"median {statistics.median(values):.1f} ms ({min(values):.1f} to {max(values):.1f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, help="GiB (default: 4, or 2 where less than 14 GiB of memory are free)")
    parser.add_argument("--limited-size", type=float, default=1.0, help="GiB for the servers with a limit")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--parts", default="tmpfs,disk,limited,rerun", help="which parts, by comma")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder on tmpfs")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder on a disk")
    parser.add_argument("--save", action="store_true", help=f"add all runs to {RAW.relative_to(peers.ROOT)}")
    options = parser.parse_args()
    end_well()
    lacking = missing_programs("nginx", "curl", "aria2c")
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    size = options.size or (4.0 if memory_available() > 14 * GIB else 2.0)
    with (
        tempfile.TemporaryDirectory(prefix="bench-download-", dir=options.memory) as in_memory,
        tempfile.TemporaryDirectory(prefix="bench-download-", dir=options.disk) as on_disk,
    ):
        run_parts(options, int(size * GIB), Path(in_memory), Path(on_disk))
    return 0


def run_parts(options: argparse.Namespace, size: int, in_memory: Path, on_disk: Path) -> None:
    parts = options.parts.split(",")
    root, work, dest, disk_dest = in_memory / "served", in_memory / "work", in_memory / "dest", on_disk / "dest"
    for folder in (root, work, dest, disk_dest):
        folder.mkdir()
    print(json.dumps(machine()))
    print(f"SHA-256 on one core: {hash_rate() / 1e6:.0f} MB/s; load {os.getloadavg()[0]:.1f}")
    bench = Bench(options.runs, work)
    sha256 = make_file(root / "model.gguf", size)
    limited_size = min(size, int(options.limited_size * GIB))
    limited_sha256 = make_file(root / "limited.gguf", limited_size)
    try:
        with nginx(root, work, LIMIT) as server:
            in_tmpfs = Order(server.url("model.gguf"), dest / "model.gguf", size, sha256)
            programs = {OURS: peers.ours, **peers.PEERS}
            if "tmpfs" in parts:
                bench.round_robin(
                    "to tmpfs", in_tmpfs, {name: run for name, run in programs.items() if name != "curl -o, sync"}
                )
            if "rerun" in parts:
                rerun(bench, in_tmpfs, server.bodies, programs)
            if "disk" in parts:
                bench.round_robin(
                    "to disk", Order(server.url("model.gguf"), disk_dest / "model.gguf", size, sha256), programs
                )
            if "limited" in parts:
                one = {
                    OURS: peers.ours,
                    "the same, 1 connection": lambda order, folder: peers.ours(order, folder, connections=1),
                    "curl -o": peers.curl,
                    "aria2c -x4, sha-256": peers.aria2c,
                }
                paced = Paced(root / "limited.gguf", LIMIT)
                try:
                    order = Order(paced.url("limited.gguf"), dest / "limited.gguf", limited_size, limited_sha256)
                    bench.round_robin("50 MB/s a connection", order, one)
                finally:
                    paced.stop()
                order = Order(server.url("limited/limited.gguf"), order.dest, limited_size, limited_sha256)
                bench.round_robin("50 MB/s a request (nginx limit_rate)", order, one)
                order = Order(server.url("two/limited.gguf"), order.dest, limited_size, limited_sha256)
                bench.round_robin(
                    "as before, and never more than two connections",
                    order,
                    {OURS: peers.ours, "curl -o": peers.curl},
                )
    finally:
        # What was measured before a stop is kept too.
        if options.save:
            bench.save()


if __name__ == "__main__":
    raise SystemExit(main())
