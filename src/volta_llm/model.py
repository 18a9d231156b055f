# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a run came to, as data: the result objects that a CI job reads.

All durations are seconds of wall time. ``as_dict`` of each object is what ``--json`` writes.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any

#: Version of the JSON document; raised when a key changes its meaning or goes away, not when one is added.
SCHEMA_VERSION = 1

REBOOT_REQUIRED = "reboot_required"


class ExitStatus(enum.IntEnum):
    """Exit statuses of ``volta-llm``; one stopped by a signal exits with 128 + its number (130 for Ctrl-C)."""

    OK = 0
    FAILED = 1
    NOT_IDEMPOTENT = 2
    USAGE = 3
    REBOOT_REQUIRED = 4
    INTERRUPTED = 130


class UsageError(Exception):
    """What was asked for cannot be run: a path, an option or a value is wrong. The message says which."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, as the collection's modules report it."""

    code: str
    subject: str
    message: str
    remedy: str

    @property
    def line(self) -> str:
        """As the modules write it in a message."""
        return f"[{self.code}] {self.subject}: {self.message}"

    @classmethod
    def from_result(cls, record: dict[str, Any]) -> Fault:
        """From a record of a module's ``faults``; a key that is absent reads as empty text."""
        return cls(*(str(record.get(key) or "") for key in ("code", "subject", "message", "remedy")))


@dataclass(frozen=True)
class Task:
    """One task on one host.

    ``status`` is ``ok``, ``changed``, ``skipped``, ``failed``, ``ignored`` (failed, and the play says to go on) or
    ``unreachable``. ``role`` is null for a task of the play itself. ``path`` is ``file:line``. ``message`` is null
    unless the task failed. ``faults`` are those of its result, those of a loop's items included.
    """

    play: str
    name: str
    role: str | None
    path: str
    status: str
    duration_s: float
    message: str | None = None
    faults: list[Fault] = field(default_factory=list)


@dataclass
class HostResult:
    """One host in one run.

    The counts are those of Ansible's recap (``ok`` includes ``changed``). ``failed_task`` is the task that ended the
    host's run. ``faults`` are what its failed tasks reported, ``warnings`` what tasks reported that did not fail.
    ``endpoints`` are the base URLs of the run as clients call them, ``hand_over`` all that clients have to know of
    them (docs/clients.md).
    """

    name: str
    ok: int = 0
    changed: int = 0
    failed: int = 0
    unreachable: int = 0
    skipped: int = 0
    rescued: int = 0
    ignored: int = 0
    duration_s: float = 0.0
    roles_s: dict[str, float] = field(default_factory=dict)
    failed_task: Task | None = None
    changed_tasks: list[Task] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)
    hand_over: list[dict[str, Any]] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list, repr=False)

    @property
    def good(self) -> bool:
        return not self.failed and not self.unreachable

    def as_dict(self) -> dict[str, Any]:
        """Without the list of all tasks: that is what the JUnit file is for."""
        record = asdict(self)
        del record["tasks"]
        return record


@dataclass
class RunResult:
    """One run of the playbook.

    ``status`` is ``successful``, ``failed`` (a host failed or could not be reached), ``error`` (Ansible could not run
    the playbook; ``error`` has its message) or ``interrupted``. ``roles_s`` is wall time by role over all hosts: hosts
    that work at the same time count once.
    """

    number: int
    check: bool
    status: str
    started: str
    duration_s: float
    hosts: list[HostResult]
    roles_s: dict[str, float]
    error: str | None = None

    @property
    def changed(self) -> int:
        return sum(host.changed for host in self.hosts)

    def as_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _RUN_KEYS}, "hosts": [host.as_dict() for host in self.hosts]}


_RUN_KEYS = ("number", "check", "status", "started", "duration_s", "roles_s", "error")


@dataclass
class ConvergeResult:
    """What ``converge`` found.

    ``status`` is ``successful``, ``failed``, ``not_idempotent``, ``reboot_required``, ``error`` or ``interrupted``.
    ``idempotent`` is null unless two runs were asked for and both succeeded. ``notes`` are judgements of the result
    as a whole, such as an endpoint that nobody else can reach.
    """

    project: str
    playbook: str
    inventories: list[str]
    runs: list[RunResult] = field(default_factory=list)
    idempotent: bool | None = None
    notes: list[Fault] = field(default_factory=list)
    signal: int | None = None

    @property
    def status(self) -> str:
        if self.signal is not None:
            return "interrupted"
        last = self.runs[-1]
        if last.status == "failed":
            bad = [host for host in last.hosts if not host.good]
            waits = bad and all(any(fault.code == REBOOT_REQUIRED for fault in host.faults) for host in bad)
            return "reboot_required" if waits else "failed"
        if last.status == "successful" and self.idempotent is False:
            return "not_idempotent"
        return last.status

    @property
    def exit_status(self) -> int:
        if self.signal is not None:
            return 128 + self.signal
        return {
            "successful": ExitStatus.OK,
            "not_idempotent": ExitStatus.NOT_IDEMPOTENT,
            "reboot_required": ExitStatus.REBOOT_REQUIRED,
        }.get(self.status, ExitStatus.FAILED)

    def as_dict(self) -> dict[str, Any]:
        """The JSON document; docs/ci.md describes it."""
        return {
            "version": SCHEMA_VERSION,
            "status": self.status,
            "exit_status": int(self.exit_status),
            "idempotent": self.idempotent,
            "project": self.project,
            "playbook": self.playbook,
            "inventories": self.inventories,
            "notes": [asdict(note) for note in self.notes],
            "runs": [run.as_dict() for run in self.runs],
        }
