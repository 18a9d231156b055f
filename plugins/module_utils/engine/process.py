# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Running programs as the build user, with an environment of our own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..machine import C_LOCALE, Completed, end_group, run_in
from .request import Account

#: A sudo or become environment can lack the sbin and local folders; nothing of the caller's PATH is needed here.
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: The work folder of a build, in the environment of all its processes.
BUILD_MARK = "VOLTA_LLM_BUILD"

#: What a build may take over from the caller: the way to the network, for sources that cmake or git fetch.
PASSED_ON = (
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "GIT_SSL_CAINFO",
)


def find_program(name: str, extra: str | None = None) -> str | None:
    """The program's path; ``extra`` is a folder that is searched first."""
    return shutil.which(name, path=f"{extra}:{SEARCH_PATH}" if extra else SEARCH_PATH)


def environment(home: str | None = None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of a child: a build must not depend on who started it."""
    result = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    result.update(C_LOCALE)
    result["PATH"] = SEARCH_PATH
    result["HOME"] = home or "/nonexistent"
    result.update(extra or {})
    return result


def identity(account: Account | None) -> dict[str, Any]:
    """Arguments of subprocess that give up the caller's rights; none where the caller is the build user."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def run_as(
    account: Account | None,
    argv: Sequence[str],
    env: Mapping[str, str],
    timeout: float = 60.0,
    cwd: str = "/",
) -> Completed:
    """Run a short program to its end; its whole group is ended after ``timeout`` seconds."""
    return run_in(argv, timeout, env, cwd=cwd, **identity(account))


def stream_as(
    account: Account | None,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    on_line: Callable[[str], None],
) -> int:
    """Run a long program at low priority and hand on each line of its output as it comes; its exit status.

    The priority is lowered so that a server which runs on the same machine is not starved by the compilers.
    """
    process = subprocess.Popen(
        [*low_priority(), *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(env),
        cwd=cwd,
        start_new_session=True,
        **identity(account),
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            on_line(line.decode("utf-8", "replace"))
        return process.wait()
    finally:
        if process.poll() is None:
            end_group(process, patience=5)


def low_priority() -> list[str]:
    """The words before a command that make it yield to everything else, as far as the machine has them."""
    words: list[str] = []
    if nice := find_program("nice"):
        words += [nice, "-n", "10"]
    if ionice := find_program("ionice"):
        # -t: a container that forbids it must not fail the build for it.
        words += [ionice, "-t", "-c", "3"]
    return words


def processes_in(folder: Path) -> list[int]:
    """Processes of builds below ``folder``: what a killed run left compiling there.

    They are known by the mark that every build gets in its environment, not by their working folder: a shell that an
    operator opened there is not ours to end.
    """
    root = os.path.realpath(folder)
    found = []
    for pid in _pids():
        try:
            env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in env:
            name, _equals, value = entry.partition(b"=")
            if name == BUILD_MARK.encode() and f"{os.fsdecode(value)}/".startswith(f"{root}/"):
                found.append(pid)
    return found


def _pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


@contextlib.contextmanager
def scratch_folder(prefix: str, account: Account | None) -> Iterator[Path]:
    """A temporary folder that belongs to the build user."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        if account is not None:
            os.chown(name, account.uid, account.gid)
        yield Path(name)
