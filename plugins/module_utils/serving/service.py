# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Switching a service to another unit file, and back when the new one does not work.

A unit file of ours is one file; settings for a unit that others wrote are a drop-in beside it (``NAME.service.d/``),
with a unit file of ours only where there is none. While a switch is under way the former file lies beside the new one
as ``NAME.service.before``; where there was no drop-in before, that one is empty. A run that is killed leaves it there;
the next run goes on, and can still bring the former settings back. What a running process has read is told by time, as
a file that is newer than the process is not what the process runs with, and by what it has mapped.
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

    ``drop_ins`` are the files beside the unit that systemd has read for it, ``fragment`` the unit file itself.
    """

    active: str
    sub: str
    result: str
    pid: int | None
    enabled: bool
    started: float | None
    needs_reload: bool
    drop_ins: tuple[str, ...] = ()
    fragment: str = ""

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
        "ActiveState,SubState,Result,MainPID,UnitFileState,ExecMainStartTimestampMonotonic,NeedDaemonReload,DropInPaths,"
        "FragmentPath"
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
        fragment=found.get("FragmentPath", ""),
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

    ``content`` is the unit file's text. With ``dropin``, the text of a file ``dropin_name`` beside it, the unit file
    may be another's: ``content`` is empty then. ``inputs`` are files the process reads at its start; one that is newer
    than the process calls for a restart. ``executable`` is the program the process must run, links resolved.
    """

    name: str
    content: str
    started: bool
    enabled: bool
    start_timeout: float
    inputs: Sequence[str] = ()
    executable: str | None = None
    absent: bool = False
    dropin: str = ""
    dropin_name: str = "50-volta.conf"


@dataclass(frozen=True)
class Outcome:
    """``changes`` in words, empty when nothing had to be done; ``before`` and ``after`` are unit file texts, the
    drop-in's in ``dropin_before`` and ``dropin_after``.

    ``reasons``: why a running service was or would be restarted.
    """

    changes: tuple[str, ...]
    before: str
    after: str
    faults: tuple[Fault, ...] = ()
    rolled_back: bool = False
    reasons: tuple[str, ...] = ()
    dropin_before: str = ""
    dropin_after: str = ""

    @property
    def restarted(self) -> bool:
        return "started" in self.changes or "restarted" in self.changes


@dataclass(frozen=True)
class _File:
    """A file of ours, and where the one before it lies during a switch; ``marked`` where an empty one of these says
    that there was none."""

    path: Path
    content: str
    former: Path
    marked: bool

    @property
    def before(self) -> str | None:
        return _read(self.path)

    @property
    def differs(self) -> bool:
        return self.before != self.content

    def write(self) -> None:
        """Replace the file; the former one is kept until the switch is over."""
        before = self.before
        self.path.parent.mkdir(mode=0o755, exist_ok=True)
        if not self.former.exists() and (before is not None or self.marked):
            replace_file(self.former, (before or "").encode())
        replace_file(self.path, self.content.encode())

    def restore(self) -> bool:
        """Put the former one back; whether there is one to go back to, if only that there was none."""
        former = _read(self.former)
        if former is None:
            return False
        if former or not self.marked:
            replace_file(self.path, former.encode())
        else:
            self.path.unlink(missing_ok=True)
        return True

    def forget(self) -> None:
        self.former.unlink(missing_ok=True)


class Service:
    """One unit below ``folder``; ``runner`` runs programs (tests pass their own)."""

    def __init__(self, wanted: Wanted, folder: Path = UNIT_FOLDER, runner: Runner = run) -> None:
        self.wanted = wanted
        self.name = full_name(wanted.name)
        self.path = folder / self.name
        self.dropin_path = folder / f"{self.name}.d" / wanted.dropin_name
        self.former = folder / f"{self.name}.before"
        self._unit = _File(self.path, wanted.content, self.former, bool(wanted.dropin))
        self._dropin = _File(
            self.dropin_path, wanted.dropin, self.dropin_path.with_name(f"{wanted.dropin_name}.before"), True
        )
        # The drop-in first: read alone it changes nothing that runs, and the unit file is last to go.
        self._files = [
            *([self._dropin] if wanted.dropin else []),
            *([self._unit] if wanted.content or not wanted.dropin else []),
        ]
        self._run = runner

    def converge(self, check: bool = False) -> Outcome:
        """Bring the service to what is wanted. Raises FaultError where systemd cannot be asked or told."""
        now = status(self.name, self._run)
        if self.wanted.absent:
            return self._remove(now, check)
        texts = self._texts()
        faults = self._overridden(now)
        if faults:
            return Outcome((), texts[0], texts[0], faults, False, (), texts[2], texts[2])
        differing = [file for file in self._files if file.differs]
        changes = []
        reasons: tuple[str, ...] = ()
        if self._unit in differing:
            changes.append("unit written")
        if self._dropin in differing:
            changes.append("drop-in written")
        if self.wanted.enabled != now.enabled:
            changes.append("enabled" if self.wanted.enabled else "disabled")
        if self.wanted.started:
            if not now.running:
                changes.append("started")
            else:
                reasons = (*(["its settings changed"] if differing else []), *self._stale(now))
                if reasons:
                    changes.append("restarted")
        elif now.active not in ("inactive", "failed"):
            changes.append("stopped")

        def outcome(faults: tuple[Fault, ...] = (), back: bool = False) -> Outcome:
            return Outcome(tuple(changes), texts[0], texts[1], faults, back, reasons, texts[2], texts[3])

        under_way = any(file.former.exists() for file in self._files)
        if check or not (changes or under_way or now.needs_reload):
            return outcome()

        if differing:
            self._verify(now)
            for file in differing:
                file.write()
        # Before systemd reads the new unit: what the former one takes away at its end, such as rules for its clients,
        # the new one may know nothing of.
        if "stopped" in changes:
            self._systemctl("stop", self.name, timeout=self.wanted.start_timeout)
        starts = "started" in changes or "restarted" in changes
        fault = self._stop(now) if starts and now.pid is not None else None
        if differing or now.needs_reload:
            self._systemctl("daemon-reload")
        if starts:
            fault, back = self._start(now) if fault is None else (fault, False)
            if fault is not None:
                return outcome((fault,), back)
        if self.wanted.enabled != now.enabled:
            self._systemctl("enable" if self.wanted.enabled else "disable", self.name)
        for file in self._files:
            file.forget()
        return outcome()

    def _texts(self) -> tuple[str, str, str, str]:
        """Texts of unit file and drop-in, each as it is and as it is wanted; of a file that is not ours empty."""
        unit = (self._unit.before or "", self._unit.content) if self._unit in self._files else ("", "")
        dropin = (self._dropin.before or "", self._dropin.content) if self._dropin in self._files else ("", "")
        return *unit, *dropin

    def _remove(self, now: Status, check: bool) -> Outcome:
        """Stop and disable the service, and remove its files. One that cannot be stopped keeps them."""
        texts = self._texts()
        there = [path for file in self._files for path in (file.path, file.former) if path.exists()]
        changes = [
            *(["stopped"] if now.active not in ("inactive", "failed") else []),
            *(["disabled"] if now.enabled else []),
            *(["unit removed"] if there else []),
        ]
        if check or not changes:
            return Outcome(tuple(changes), texts[0], "", dropin_before=texts[2])
        if now.pid is not None:
            stuck = self._stop(now)
            if stuck is not None:
                return Outcome(tuple(changes), texts[0], texts[0], (stuck,), False, (), texts[2], texts[2])
        elif "stopped" in changes:
            self._systemctl("stop", self.name, timeout=self.wanted.start_timeout)
        if now.enabled:
            self._systemctl("disable", self.name)
        for path in there:
            path.unlink(missing_ok=True)
        self._systemctl("daemon-reload")
        self._systemctl("reset-failed", self.name, must=False)
        return Outcome(tuple(changes), texts[0], "", dropin_before=texts[2])

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
        beside = [path for path in drop_ins(self.path, now.drop_ins) if path != str(self.dropin_path)]
        if not self.wanted.dropin:
            return tuple(overridden(self.name, self.wanted.content, beside))
        return tuple(overridden(self.name, self.wanted.dropin, beside, self.wanted.dropin_name, "environment"))

    def _stale(self, now: Status) -> tuple[str, ...]:
        """Why the running process is not what it would be if started now: it began before a file was written that it
        reads, holds former ones, or runs another program. Empty where it is."""
        if now.started is not None:
            for path in (*self._read_for(now), *self.wanted.inputs):
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
            return _other_program(now.pid, now.started, self.wanted.executable)
        return ()

    def _read_for(self, now: Status) -> list[str]:
        """The files that systemd reads for the unit and that count: with a drop-in of ours, those of others too."""
        ours = [str(file.path) for file in self._files]
        others = [now.fragment, *drop_ins(self.path, now.drop_ins)] if self.wanted.dropin else []
        return list(dict.fromkeys([*ours, *filter(None, others)]))

    def _verify(self, now: Status) -> None:
        """Let systemd read the new unit before it replaces the one in use."""
        with tempfile.TemporaryDirectory(prefix="volta-llm-") as folder:
            candidate = Path(folder) / self.name
            unit = self.wanted.content or _read(Path(now.fragment or self.path)) or ""
            candidate.write_text(unit, encoding="utf-8")
            if self.wanted.dropin:
                beside = Path(folder) / f"{self.name}.d" / self.wanted.dropin_name
                beside.parent.mkdir()
                beside.write_text(self.wanted.dropin, encoding="utf-8")
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
        settings = "settings are" if self.wanted.dropin else "unit is"
        if back:
            consequence = f"The former {settings} in place again and running."
        elif self._files[0].path.exists():
            consequence = "The service is stopped."
        elif self.wanted.dropin:
            consequence = "The drop-in was removed again; there was none before."
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
        restored = [file.restore() for file in self._files]
        if not any(restored):
            if not self.wanted.dropin and not now.enabled and now.active in ("inactive", "failed") and now.pid is None:
                # Never worked: a unit that cannot start must not be left to be started at boot.
                self.path.unlink(missing_ok=True)
                self._systemctl("daemon-reload", must=False)
            return False
        self._systemctl("daemon-reload", must=False)
        self._systemctl("reset-failed", self.name, must=False)
        back = False
        if now.running or now.enabled:
            back = self._run(["systemctl", "restart", self.name], self.wanted.start_timeout).ok
        for file in self._files:
            file.forget()
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


def _other_program(pid: int, started: float | None, executable: str) -> tuple[str, ...]:
    """Why a process does not run this program; empty where it does, or where it cannot be told.

    A script's process runs its interpreter: of one it is told by time whether the links to it lead elsewhere now.
    """
    program = os.path.realpath(executable)
    try:
        running = str(Path(f"/proc/{pid}/exe").readlink())
        with Path(program).open("rb") as file:
            script = file.read(2) == b"#!"
    except OSError:
        return ()
    if not script:
        return (f"it runs {running}, not {program}",) if running != program else ()
    links = [path for path in (Path(executable), *Path(executable).parents) if path.is_symlink()]
    if started is not None and any(started < path.lstat().st_mtime <= time.time() for path in links):
        return (f"{executable} leads to {program} since it started",)
    return ()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
