# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the kernel said about its GPUs since boot.

The NVIDIA driver breaks its messages into several lines ("The NVIDIA GPU 0000:b3:00.0 / (PCI ID: 10de:26b5) installed
in this system has / fallen off the bus and is not responding to commands."), so lines are joined before they are read.
Accepted forms: /dev/kmsg, ``dmesg`` with seconds, dates or nothing, ``journalctl -k`` with short or ISO dates, syslog.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .values import bus_id, clean
from .xid import Xid, explain

_KMSG = re.compile(r"^\d+,\d+,(?P<usec>\d+),[^;]*;(?P<text>.*)$")
_SECONDS = re.compile(r"^(?:<\d+>)?\[\s*(?P<seconds>\d+\.\d+)\]\s?(?P<text>.*)$")
_DATE = re.compile(r"^\[(?P<date>[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ [\d:]{8} \d{4})\]\s?(?P<text>.*)$")
_SYSLOG = re.compile(
    r"^(?P<date>[A-Z][a-z]{2} +\d+ [\d:.]{8,15}|\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d))\s+"
    r"(?:\S+\s+)?kernel:\s?(?P<text>.*)$"
)
_ISO = re.compile(r"^(?P<date>\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d))\s+(?P<text>.*)$")

_BARE = re.compile(r"^(?:[\w.-]+\s+)?kernel:\s?(?P<text>.*)$")

#: Beginnings of messages that the driver prints over several lines.
_OPENER = re.compile(
    r"^(?:The NVIDIA (?:GPU|probe routine|kernel module)|API mismatch|This can occur|Try unloading|This PCI I/O region"
    r"|The system BIOS|loading NVIDIA UNIX|GPU \S+ is (?:already|not))"
)
#: Messages that are complete in one line and start a new one whatever came before.
_SINGLE = re.compile(
    r"^(?:Xid \(|GPU at PCI|GPU \S+: (?:GPU has fallen|RmInitAdapter|rm_init_adapter)|loading NVIDIA|No NVIDIA)"
)
_XID = re.compile(r"Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)\): (?P<number>\d+)(?:,\s*(?P<rest>.*))?$")
_PID = re.compile(r"pid=(?P<pid>\d+)")
_NAME = re.compile(r"\bname='?(?P<name>[^,'<]+)")
_VERSION = r"(\d{3}\.\d+(?:\.\d+)?)"
_MISMATCH = re.compile(
    rf"API mismatch: the client .*?the version {_VERSION},? but.*?this kernel module has\s+the version {_VERSION}"
)
_UNSUPPORTED = re.compile(r"The NVIDIA GPU (\S+) \(PCI ID: \S+\) installed in this system is not supported by (.*)")
_PROBE = re.compile(r"The NVIDIA probe routine was not called for (\d+) device")
_FELL_OFF = re.compile(r"fallen off the bus")
_INIT_FAILED = re.compile(r"(?:RmInitAdapter|rm_init_adapter) failed")
_REJECTED = re.compile(
    r"Loading of (?:unsigned )?module (?:with unavailable key )?is rejected|module verification failed"
    r"|Lockdown: (?:modprobe|insmod|systemd-modules).*unsigned module loading is restricted"
)


@dataclass
class Line:
    """One message: seconds since boot (or null), a date as printed (or null), the text without its prefix."""

    text: str
    seconds: float | None = None
    date: str | None = None


@dataclass
class XidEvent:
    """An Xid on one card: how often, first and last, and the text of the first.

    ``process`` is the program named by the log, null where the driver does not know it.
    """

    number: int
    bus_id: str | None
    first: Line
    last: Line
    detail: str
    process: str | None
    count: int = 1

    @property
    def row(self) -> Xid:
        return explain(self.number)

    def as_dict(self) -> dict[str, Any]:
        row = self.row
        return {
            "xid": self.number,
            "bus_id": self.bus_id,
            "count": self.count,
            "kind": row.kind,
            "meaning": row.meaning,
            "cause": row.cause,
            "remedy": row.remedy,
            "source": row.source,
            "process": self.process,
            "detail": self.detail,
            "first_s": self.first.seconds,
            "last_s": self.last.seconds,
            "first_at": self.first.date,
            "last_at": self.last.date,
        }


@dataclass
class KernelLog:
    """What was found. ``lost`` and ``init_failed`` hold bus ids, ``mismatch`` (client, module) versions."""

    xids: list[XidEvent] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    init_failed: list[str] = field(default_factory=list)
    unsupported_by_open: list[str] = field(default_factory=list)
    mismatch: tuple[str, str] | None = None
    probe_not_called: int | None = None
    module_rejected: bool = False
    messages: list[str] = field(default_factory=list)

    @property
    def lost_without_xid(self) -> list[str]:
        """Cards that fell off the bus although no Xid 79 was written (gpud#1209, NVSentinel#155)."""
        numbered = {event.bus_id for event in self.xids if event.number == 79}
        return [card for card in self.lost if card not in numbered]


def lines_of(text: str) -> Iterator[Line]:
    """Every message with its time; a line break inside a message (``#012`` in syslog, ``\\x0a`` in kmsg) makes two."""
    for raw in clean(text).splitlines():
        line = _prefix(raw)
        for part in re.split(r"#012|\\x0a", line.text):
            yield Line(part.strip(), line.seconds, line.date)


def _prefix(raw: str) -> Line:
    if match := _KMSG.match(raw):
        return Line(match["text"], int(match["usec"]) / 1e6)
    if match := _SECONDS.match(raw):
        return Line(match["text"], float(match["seconds"]))
    if match := _DATE.match(raw) or _SYSLOG.match(raw):
        inner = _SECONDS.match(match["text"])
        if inner:
            return Line(inner["text"], float(inner["seconds"]), match["date"])
        return Line(match["text"], None, match["date"])
    if match := _ISO.match(raw):
        return Line(match["text"], None, match["date"])
    if match := _BARE.match(raw):
        return Line(match["text"])
    return Line(raw)


def join(lines: Iterator[Line]) -> Iterator[Line]:
    """Messages of the NVIDIA driver as it meant them, each without ``NVRM:``; other lines pass as they are."""
    held: Line | None = None
    for line in lines:
        name, mark, text = line.text.partition("NVRM:")
        if not mark or name.strip():
            if held is not None:
                yield held
                held = None
            yield line
            continue
        text = text.strip()
        if held is not None and _continues(held.text, text):
            held.text = f"{held.text} {text}"
            continue
        if held is not None:
            yield held
        held = Line(text, line.seconds, line.date)
    if held is not None:
        yield held


def _continues(before: str, text: str) -> bool:
    """Whether ``text`` carries on a message whose beginning is ``before``."""
    if not text or _SINGLE.match(text) or _SINGLE.match(before):
        return False
    if text[0].islower() or text[0] == "(":
        return True
    # A sentence of a long message can begin with a capital ("System Processor (GSP)."); it ends at its full stop.
    return bool(_OPENER.match(before)) and not before.endswith((".", "!"))


def parse(text: str) -> KernelLog:
    """Read a kernel log; what has nothing to do with a GPU is skipped."""
    log = KernelLog()
    events: dict[tuple[int, str | None], XidEvent] = {}
    for line in join(lines_of(text)):
        message = line.text
        if not message:
            continue
        if _REJECTED.search(message) and ("nvidia" in message.lower() or "is rejected" in message):
            # "module verification failed" only taints the kernel; a rejection keeps the module out.
            log.module_rejected = log.module_rejected or "verification failed" not in message
            log.messages.append(message)
            continue
        if match := _XID.search(message):
            _add_xid(events, match, line)
            if _FELL_OFF.search(message):
                _add(log.lost, _card(match["bus"]))
            continue
        if _FELL_OFF.search(message):
            _add(log.lost, bus_id(message) or "unknown")
        elif match := _UNSUPPORTED.search(message):
            if "open" in match[2]:
                _add(log.unsupported_by_open, bus_id(match[1]) or match[1])
        elif match := _MISMATCH.search(message):
            log.mismatch = (match[1], match[2])
        elif match := _PROBE.search(message):
            log.probe_not_called = int(match[1])
        elif _INIT_FAILED.search(message):
            _add(log.init_failed, bus_id(message) or "unknown")
        else:
            continue
        log.messages.append(message)
    log.xids = sorted(events.values(), key=lambda event: (event.number, event.bus_id or ""))
    return log


def _add(where: list[str], card: str) -> None:
    if card not in where:
        where.append(card)


def _card(text: str) -> str:
    """A bus id as Xid lines write it: often without a function, sometimes without a domain."""
    found = bus_id(text) or bus_id(f"{text}.0")
    return found or text.lower()


def _add_xid(events: dict[tuple[int, str | None], XidEvent], match: re.Match[str], line: Line) -> None:
    number, card = int(match["number"]), _card(match["bus"])
    known = events.get((number, card))
    if known is not None:
        known.count += 1
        known.last = line
        return
    rest = match["rest"] or ""
    name, pid = _NAME.search(rest), _PID.search(rest)
    process = name["name"].strip() if name else None
    if process is not None and pid:
        process = f"{process} ({pid['pid']})"
    events[(number, card)] = XidEvent(number, card, line, line, rest.strip(), process)
