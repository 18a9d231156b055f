# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Faults: what is wrong, where, and what to do, as data.

Every module of the collection reports trouble as a list of L(Fault) records and fails once, with all of them. The
C(code) is stable and documented in docs/faults.md, which is generated from the catalogues registered here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

#: Order in which faults are shown: the one that explains the others comes first.
SEVERITIES = ("critical", "error", "warning")


@dataclass(frozen=True)
class FaultKind:
    """One row of the catalogue.

    ``severity`` is one of SEVERITIES, ``meaning`` one sentence for docs/faults.md, ``example`` a message as a user
    would see it.
    """

    code: str
    severity: str
    meaning: str
    example: str


#: Kinds that more than one catalogue has: whatever part reports them, a code means one thing.
CMAKE_TOO_OLD = FaultKind(
    "cmake_too_old",
    "error",
    "cmake is older than the engine's source or the CUDA language support requires.",
    "cmake: version 3.16.3, at least 3.18 is needed",
)
DISK_FULL = FaultKind(
    "disk_full",
    "critical",
    "A file system has no room for what is still to be written.",
    "/srv/models: 107 GB are missing, 80.1 GB are free",
)
DRIVER_PACKAGES_BROKEN = FaultKind(
    "driver_packages_broken",
    "critical",
    "dpkg stopped in the middle of a driver or kernel package; every later apt run fails.",
    "nvidia-dkms-535 535.183.01-0ubuntu1 is half-configured",
)
PORT_TAKEN = FaultKind(
    "port_taken",
    "critical",
    "Another program listens where a service is to listen.",
    "127.0.0.1:8080: taken by nginx (pid 812, unit nginx.service)",
)
SOURCE_UNREACHABLE = FaultKind(
    "source_unreachable",
    "error",
    "A source did not answer: name resolution, connection, TLS, no bytes for too long, or an overloaded server.",
    "https://pypi.org/simple/llama-cpp-python/: [Errno -3] Temporary failure in name resolution",
)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    ``code`` names the kind, ``subject`` the part concerned (a bus id, a path, a port, a package), ``message`` what was
    found against what was expected, ``remedy`` what to do about it.
    """

    code: str
    subject: str
    message: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


class Catalogue:
    """The fault kinds of one area, and the only way to make their faults."""

    def __init__(self, area: str, kinds: Iterable[FaultKind]) -> None:
        self.area = area
        self.kinds: dict[str, FaultKind] = {}
        for kind in kinds:
            if kind.severity not in SEVERITIES:
                raise ValueError(f"fault {kind.code}: unknown severity {kind.severity!r}")
            if kind.code in self.kinds:
                raise ValueError(f"fault {kind.code} is declared twice in {area}")
            if _KINDS.setdefault(kind.code, kind) != kind:
                raise ValueError(f"fault {kind.code} of {area} has another meaning elsewhere")
            self.kinds[kind.code] = kind

    def fault(self, code: str, subject: str, message: str, remedy: str) -> Fault:
        """Make a fault of a declared kind; an undeclared code is a programming error (KeyError)."""
        return Fault(self.kinds[code].code, subject, message, remedy)


class FaultError(Exception):
    """Raised where a single fault ends the work at hand; carries the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


#: Every declared kind by code; where a code is in several catalogues it is the same kind.
_KINDS: dict[str, FaultKind] = {}


def _severity(fault: Fault) -> str:
    return _KINDS[fault.code].severity if fault.code in _KINDS else "error"


def by_severity(faults: Iterable[Fault]) -> list[Fault]:
    """Most serious first; within one severity the order in which they were found. Duplicates are dropped."""
    unique = list(dict.fromkeys(faults))
    return sorted(unique, key=lambda fault: SEVERITIES.index(_severity(fault)))


def is_fatal(fault: Fault) -> bool:
    """True unless the kind is declared a warning."""
    return _severity(fault) != "warning"


def in_variables(
    faults: Iterable[Fault], prefix: str, options: Iterable[str], names: Mapping[str, str] | None = None
) -> list[Fault]:
    """The faults with the names of a module's options as a role's variables: ``api_keys`` as C(llama_server_api_keys).

    A subject is renamed where it is an option or an element of one. In texts a bare word is renamed only where it holds
    an underscore, since ``host`` and ``parallel`` are words of the language too; in backticks any option is. ``names``
    are variables that are not called by the prefix; these words are renamed in assignments too (see assigned).
    """
    words = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    called = names or {}
    if not words or not (prefix or called):
        return list(faults)
    subject = re.compile(rf"^(?:{words})(?=$|\[|: )")
    text = re.compile(rf"(?<=`)(?:{words})(?=`)|(?<![\w./$-])(?=\w+_)(?:{words})(?!\w|[./-]\w)")

    def variable(match: re.Match[str]) -> str:
        return called.get(match[0], prefix + match[0])

    return [
        replace(
            fault,
            subject=subject.sub(variable, fault.subject),
            message=text.sub(variable, fault.message),
            remedy=text.sub(variable, assigned(fault.remedy, called)),
        )
        for fault in faults
    ]


def assigned(remedy: str, names: Mapping[str, str]) -> str:
    """What to write, with the variables' names: ``driver=580`` as C(nvidia_driver_branch=580)."""
    return re.sub(r"(?<![\w./$-])\w+(?==\S)", lambda match: names.get(match[0], match[0]), remedy)


def as_text(faults: Iterable[Fault]) -> str:
    """The faults as an operator reads them in a failed task: one line each, then what to do."""
    lines = []
    for fault in faults:
        lines.append(f"[{fault.code}] {fault.subject}: {fault.message}")
        if fault.remedy:
            lines.append(f"  -> {fault.remedy}")
    return "\n".join(lines)
