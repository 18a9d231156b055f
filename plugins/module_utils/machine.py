# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Reading a machine: its files and its programs, live or from a capture.

A capture is a folder that stands for the root of a machine (``sysroot``). Files are read below it. When it holds
``commands/index.json``, the outputs recorded there answer instead of real programs, so that a report from somebody
else's machine, a test fixture and a simulated machine are read by the same code.

``commands/index.json`` is a list of records ``{"argv": [...], "rc": int | null, "stdout": FILE, "stderr": FILE,
"timed_out": bool}``; FILE is a name in the same folder, absent where that stream was empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Program output is parsed; a translated message or a decimal comma would be misread.
C_LOCALE = {"LC_ALL": "C", "LANGUAGE": "C", "LANG": "C"}


@dataclass(frozen=True)
class Completed:
    """How a program ended.

    ``rc`` is null when it never ran or did not end in time; ``missing`` means there is no such program,
    ``timed_out`` that it was stopped after the time limit.
    """

    argv: tuple[str, ...]
    rc: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    missing: bool = False

    @property
    def ok(self) -> bool:
        return self.rc == 0

    @property
    def why(self) -> str:
        """Why it did not do what was asked, in one line: its last words, or how it ended."""
        if self.missing:
            return "cannot be run"
        if self.timed_out:
            return "did not end in time"
        lines = [line.strip() for line in (self.stderr.strip() or self.stdout).splitlines() if line.strip()]
        return "; ".join(lines[-3:])[:300] or f"exit status {self.rc}"


#: Runs a program with a time limit in seconds, as `run` does; tests pass their own.
Runner = Callable[[Sequence[str], float], Completed]


class Machine:
    """One machine as seen through its files and programs.

    ``timeout`` is the limit in seconds for one program. ``processes`` counts the programs that were started.
    """

    def __init__(self, sysroot: str = "/", timeout: float = 30.0) -> None:
        self.sysroot = Path(sysroot)
        self.timeout = timeout
        self.processes = 0
        self._recorded = _read_records(self.sysroot / "commands")

    @property
    def is_capture(self) -> bool:
        """True when recorded outputs answer and no program is started."""
        return self._recorded is not None

    def path(self, path: str) -> Path:
        """Where an absolute path of the machine lies for this process."""
        return self.sysroot / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """The text of a file, or null where it is absent or may not be read."""
        try:
            return self.path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def listdir(self, path: str) -> list[str]:
        """Sorted names in a folder; empty where there is none."""
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.path(path))

    def run(self, argv: Sequence[str], timeout: float | None = None, env: Mapping[str, str] | None = None) -> Completed:
        """Run a program in the C locale with a time limit; never raises for what the program does."""
        if self._recorded is not None:
            return _recorded_answer(self._recorded, tuple(argv))
        self.processes += 1
        return run(argv, self.timeout if timeout is None else timeout, env)


def run(argv: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> Completed:
    """Run one program in the C locale; ``env`` is added to this process's own environment."""
    return run_in(argv, timeout, {**os.environ, **C_LOCALE, **(env or {})})


def run_in(argv: Sequence[str], timeout: float, environment: Mapping[str, str], **options: Any) -> Completed:
    """Run one program with this environment and further ``options`` of Popen; never raises for what it does.

    A time-out ends its whole process group (nvidia-smi can leave children in D state).
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
            **options,
        )
    except OSError as exc:
        return Completed(tuple(argv), None, stderr=exc.strerror or str(exc), missing=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_group(process, patience=1)
        return Completed(tuple(argv), None, timed_out=True)
    return Completed(tuple(argv), process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def end_group(process: subprocess.Popen[bytes], patience: float) -> None:
    """Kill a program that leads its session, with all it started, and wait ``patience`` seconds for it to be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process in uninterruptible sleep does not die; waiting for it would hang this module as well.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=patience)


def _read_records(folder: Path) -> list[Completed] | None:
    if not folder.is_dir():
        return None
    index = folder / "index.json"
    if not index.is_file():
        return []
    records = []
    for record in json.loads(index.read_text(encoding="utf-8")):
        streams = {
            name: (folder / record[name]).read_text(encoding="utf-8", errors="replace") if record.get(name) else ""
            for name in ("stdout", "stderr")
        }
        records.append(
            Completed(
                tuple(record["argv"]),
                record.get("rc"),
                streams["stdout"],
                streams["stderr"],
                timed_out=bool(record.get("timed_out", False)),
            )
        )
    return records


def _recorded_answer(records: list[Completed], argv: tuple[str, ...]) -> Completed:
    """The record of the same command; option values may differ (a capture can list other query fields)."""
    wanted = (Path(argv[0]).name, *argv[1:])
    shape = tuple(word.split("=", 1)[0] for word in wanted)
    loose = None
    for record in records:
        have = (Path(record.argv[0]).name, *record.argv[1:])
        if have == wanted:
            return record
        if loose is None and tuple(word.split("=", 1)[0] for word in have) == shape:
            loose = record
    return loose or Completed(argv, None, stderr="not in this capture", missing=True)
