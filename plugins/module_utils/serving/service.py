# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Switching a service to another unit file, and back when the new one does not work.

While a switch is under way the former unit lies beside the new one as ``NAME.service.before``. A run that is killed
leaves it there; the next run goes on, and can still bring the former unit back. What a running process has read is
told by time, as a file that is newer than the process is not what the process runs with, and by what it has mapped.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..faults import Fault, FaultError
from ..files import replace_file
from ..machine import Completed, Runner, run
from .catalogue import CATALOGUE
from .causes import cause
from .dropins import drop_ins, overridden
from .mapped import outdated

UNIT_FOLDER = Path("/etc/systemd/system")
JOURNAL_LINES = 25
#: What the guard says where its unit's first start could only load a module of the kernel.
ONCE_MORE = "starting once more"
#: For systemctl calls that do not wait for the service.
COMMAND_TIMEOUT = 60.0


@dataclass(frozen=True)
class Status:
    """What systemd says of a unit. ``pid`` is null while no main process runs; ``started`` is its start, epoch s.

    ``drop_ins`` are the files beside the unit that systemd has read for it.
    """

    active: str
    sub: str
    result: str
    pid: int | None
    enabled: bool
    started: float | None
    needs_reload: bool
    drop_ins: tuple[str, ...] = ()

    @property
    def running(self) -> bool:
        return self.active == "active" and self.pid is not None

    @property
    def words(self) -> str:
        return f"{self.active} ({self.result if self.active == 'failed' else self.sub})"


def full_name(unit: str) -> str:
    """A service's unit with its ending, which an operator may leave out."""
    return unit if unit.endswith(".service") else f"{unit}.service"


def status(name: str, runner: Runner = run) -> Status:
    """Ask systemd; a unit that does not exist is inactive and not enabled."""
    keys = (
        "ActiveState,SubState,Result,MainPID,UnitFileState,ExecMainStartTimestampMonotonic,NeedDaemonReload,DropInPaths"
    )
    done = runner(["systemctl", "show", name, f"--property={keys}"], COMMAND_TIMEOUT)
    if not done.ok:
        raise FaultError(_control_failed(name, "show", done))
    found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    pid = int(found.get("MainPID") or 0)
    since_boot = int(found.get("ExecMainStartTimestampMonotonic") or 0) / 1e6
    started = time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - since_boot) if pid and since_boot else None
    return Status(
        active=found.get("ActiveState", "unknown"),
        sub=found.get("SubState", "unknown"),
        result=found.get("Result", "unknown"),
        pid=pid or None,
        enabled=found.get("UnitFileState", "") in ("enabled", "enabled-runtime"),
        started=started,
        needs_reload=found.get("NeedDaemonReload") == "yes",
        drop_ins=tuple(found.get("DropInPaths", "").split()),
    )


def journal_tail(name: str, since: float | None = None, lines: int = JOURNAL_LINES, runner: Runner = run) -> str:
    """The last lines of a unit's journal, since a moment (epoch seconds) where one is given; empty where unreadable."""
    argv = ["journalctl", "--unit", name, "--no-pager", "--output", "cat", "--lines", str(lines)]
    if since is not None:
        argv += ["--since", f"@{int(since)}"]
    done = runner(argv, COMMAND_TIMEOUT)
    if not done.ok:
        return ""
    found = done.stdout.strip().splitlines()
    # What was said before the last start belongs to another process.
    # systemd 249 names the description alone.
    starts = [
        at
        for at, line in enumerate(found)
        if line.startswith(f"Starting {name}") or (line.startswith("Starting ") and line.endswith("..."))
    ]
    return "\n".join(found[starts[-1] :] if starts else found)


@dataclass(frozen=True)
class Wanted:
    """How the service shall be; ``absent`` removes it, whatever else is said.

    ``content`` is the unit file's text. ``inputs`` are files the process reads at its start; one that is newer than the
    process calls for a restart. ``executable`` is the program the process must run, links resolved.
    """

    name: str
    content: str
    started: bool
    enabled: bool
    start_timeout: float
    inputs: Sequence[str] = ()
    executable: str | None = None
    absent: bool = False


@dataclass(frozen=True)
class Outcome:
    """``changes`` in words, empty when nothing had to be done; ``before`` and ``after`` are unit file texts.

    ``reasons``: why a running service was or would be restarted.
    """

    changes: tuple[str, ...]
    before: str
    after: str
    faults: tuple[Fault, ...] = ()
    rolled_back: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def restarted(self) -> bool:
        return "started" in self.changes or "restarted" in self.changes


class Service:
    """One unit below ``folder``; ``runner`` runs programs (tests pass their own)."""

    def __init__(self, wanted: Wanted, folder: Path = UNIT_FOLDER, runner: Runner = run) -> None:
        self.wanted = wanted
        self.name = full_name(wanted.name)
        self.path = folder / self.name
        self.former = folder / f"{self.name}.before"
        self._run = runner

    def converge(self, check: bool = False) -> Outcome:
        """Bring the service to what is wanted. Raises FaultError where systemd cannot be asked or told."""
        before = _read(self.path)
        now = status(self.name, self._run)
        if self.wanted.absent:
            return self._remove(before, now, check)
        faults = self._overridden(now)
        if faults:
            return Outcome((), before or "", before or "", faults)
        file_differs = before != self.wanted.content
        changes = []
        reasons: tuple[str, ...] = ()
        if file_differs:
            changes.append("unit written")
        if self.wanted.enabled != now.enabled:
            changes.append("enabled" if self.wanted.enabled else "disabled")
        if self.wanted.started:
            if not now.running:
                changes.append("started")
            else:
                reasons = (*(["its settings changed"] if file_differs else []), *self._stale(now))
                if reasons:
                    changes.append("restarted")
        elif now.active not in ("inactive", "failed"):
            changes.append("stopped")
        if check or not (changes or self.former.exists() or now.needs_reload):
            return Outcome(tuple(changes), before or "", self.wanted.content, reasons=reasons)

        if file_differs:
            self._verify()
            if before is not None and not self.former.exists():
                replace_file(self.former, before.encode())
            replace_file(self.path, self.wanted.content.encode())
        # Before systemd reads the new unit: what the former one takes away at its end, such as rules for its clients,
        # the new one may know nothing of.
        if "stopped" in changes:
            self._systemctl("stop", self.name, timeout=self.wanted.start_timeout)
        starts = "started" in changes or "restarted" in changes
        fault = self._stop(now) if starts and now.pid is not None else None
        if file_differs or now.needs_reload:
            self._systemctl("daemon-reload")
        if starts:
            fault, back = self._start(now) if fault is None else (fault, False)
            if fault is not None:
                return Outcome(tuple(changes), before or "", self.wanted.content, (fault,), back, reasons)
        if self.wanted.enabled != now.enabled:
            self._systemctl("enable" if self.wanted.enabled else "disable", self.name)
        self.former.unlink(missing_ok=True)
        return Outcome(tuple(changes), before or "", self.wanted.content, reasons=reasons)

    def _remove(self, before: str | None, now: Status, check: bool) -> Outcome:
        """Stop and disable the service, and remove its files. One that cannot be stopped keeps them."""
        there = [path for path in (self.path, self.former) if path.exists()]
        changes = [
            *(["stopped"] if now.active not in ("inactive", "failed") else []),
            *(["disabled"] if now.enabled else []),
            *(["unit removed"] if there else []),
        ]
        if check or not changes:
            return Outcome(tuple(changes), before or "", "")
        if now.pid is not None:
            stuck = self._stop(now)
            if stuck is not None:
                return Outcome(tuple(changes), before or "", before or "", (stuck,))
        elif "stopped" in changes:
            self._systemctl("stop", self.name, timeout=self.wanted.start_timeout)
        if now.enabled:
            self._systemctl("disable", self.name)
        for path in there:
            path.unlink(missing_ok=True)
        self._systemctl("daemon-reload")
        self._systemctl("reset-failed", self.name, must=False)
        return Outcome(tuple(changes), before or "", "")

    def _stop(self, now: Status) -> Fault | None:
        """Stop a running service; a fault where its process outlives even SIGKILL, as one does that hangs on a GPU."""
        self._systemctl("reset-failed", self.name, must=False)
        self._systemctl("stop", self.name, timeout=self.wanted.start_timeout, must=False)
        # systemd gives up on such a process, and would start a second one beside it.
        if status(self.name, self._run).result != "timeout" or not _alive(now.pid):
            return None
        return CATALOGUE.fault(
            "service_stuck",
            self.name,
            f"pid {now.pid} is still there in state {_state(now.pid)} after SIGKILL; no second one was started",
            "Reboot the machine; see `journalctl -k --grep NVRM` for what the driver says.",
        )

    def _overridden(self, now: Status) -> tuple[Fault, ...]:
        """What other files make of the unit; of no matter for a service that shall not run."""
        if not self.wanted.started:
            return ()
        return tuple(overridden(self.name, self.wanted.content, drop_ins(self.path, now.drop_ins)))

    def _stale(self, now: Status) -> tuple[str, ...]:
        """Why the running process is not what it would be if started now: it began before a file was written that it
        reads, holds former ones, or runs another program. Empty where it is."""
        if now.started is not None:
            for path in (str(self.path), *self.wanted.inputs):
                try:
                    written = Path(path).stat().st_mtime
                except OSError:
                    continue
                # A time in the future comes from a clock that was set back, and says nothing.
                if now.started < written <= time.time():
                    return (f"{path} was written since it started",)
        if now.pid is not None:
            held = outdated(now.pid, self.wanted.inputs)
            if held:
                return (f"{held[0]} was replaced since it was loaded",)
        if self.wanted.executable and now.pid is not None:
            try:
                running = Path(f"/proc/{now.pid}/exe").readlink()
            except OSError:
                return ()
            program = os.path.realpath(self.wanted.executable)
            if str(running) != program:
                return (f"it runs {running}, not {program}",)
        return ()

    def _verify(self) -> None:
        """Let systemd read the new unit before it replaces the one in use."""
        with tempfile.TemporaryDirectory(prefix="volta-llm-") as folder:
            candidate = Path(folder) / self.name
            candidate.write_text(self.wanted.content, encoding="utf-8")
            done = self._run(["systemd-analyze", "verify", str(candidate)], COMMAND_TIMEOUT)
        # Units that this one refers to are judged along with it; what is wrong with those is not ours to refuse.
        complaints = [line.replace(f"{folder}/", "") for line in done.stderr.splitlines() if self.name in line]
        if done.ok or not complaints:
            return
        message = "; ".join(complaints)
        remedy = "Correct the settings named; the unit in use was not touched."
        raise FaultError(CATALOGUE.fault("unit_invalid", self.name, message, remedy))

    def _start(self, now: Status) -> tuple[Fault | None, bool]:
        """Start; on failure put the former unit back. Returns the fault, and whether the former one runs."""
        begun = time.time()
        self._systemctl("reset-failed", self.name, must=False)
        for again in (False, True):
            done = self._run(["systemctl", "restart", self.name], self.wanted.start_timeout)
            if done.ok:
                return None, False
            tail = journal_tail(self.name, begun, runner=self._run)
            # systemd starts it anew by itself after that, but has told us that it failed.
            if again or ONCE_MORE not in tail:
                break
        failed = status(self.name, self._run)
        why = f"did not become ready within {self.wanted.start_timeout:.0f} s"
        if not done.timed_out and failed.result not in ("timeout", "success"):
            why = "ended before it was ready"
        back = self._restore(now)
        if back:
            consequence = "The former unit is in place again and running."
        elif self.path.exists():
            consequence = "The service is stopped."
        else:
            consequence = "The unit was removed again; there was none before."
        lines = f" Its last lines:\n{tail}\n" if tail else " "
        known = cause(tail)
        if known:
            why = f"{why}: {known}"
        return (
            CATALOGUE.fault(
                "service_start_failed",
                self.name,
                f"{why}.{lines}{consequence}",
                f"Correct the cause and run again; the whole log: journalctl -u {self.name}",
            ),
            back,
        )

    def _restore(self, now: Status) -> bool:
        """Stop what failed and go back to the former unit, if there is one; whether it runs again."""
        self._systemctl("stop", self.name, timeout=self.wanted.start_timeout, must=False)
        former = _read(self.former)
        if former is None:
            if not now.enabled and now.active in ("inactive", "failed") and now.pid is None:
                # Never worked: a unit that cannot start must not be left to be started at boot.
                self.path.unlink(missing_ok=True)
                self._systemctl("daemon-reload", must=False)
            return False
        replace_file(self.path, former.encode())
        self._systemctl("daemon-reload", must=False)
        self._systemctl("reset-failed", self.name, must=False)
        back = False
        if now.running or now.enabled:
            back = self._run(["systemctl", "restart", self.name], self.wanted.start_timeout).ok
        self.former.unlink(missing_ok=True)
        return back

    def _systemctl(self, *words: str, timeout: float = COMMAND_TIMEOUT, must: bool = True) -> None:
        done = self._run(["systemctl", *words], timeout)
        if must and not done.ok:
            raise FaultError(_control_failed(self.name, words[0], done))


def _control_failed(name: str, verb: str, done: Completed) -> Fault:
    if done.missing:
        what, remedy = "there is no systemctl", "This needs a machine that systemd runs."
    elif done.timed_out:
        what, remedy = f"systemctl {verb} did not end in time", f"See: systemctl status {name}"
    else:
        what = f"systemctl {verb}: {done.stderr.strip() or f'exit status {done.rc}'}"
        remedy = f"See: systemctl status {name}"
    return CATALOGUE.fault("service_control_failed", name, what, remedy)


def _state(pid: int | None) -> str:
    """The letter by which the kernel tells what a process does; Z, a zombie, where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "Z"
    return text.rpartition(")")[2].split()[0]


def _alive(pid: int | None) -> bool:
    return _state(pid) not in ("Z", "X")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
