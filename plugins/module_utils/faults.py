# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Faults: what is wrong, where, and what to do, as data.

Every module of the collection reports trouble as a list of L(Fault) records and fails once, with all of them. The
C(code) is stable and documented in docs/faults.md, which is generated from the catalogues registered here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
            self.kinds[kind.code] = kind
            _SEVERITY_OF[kind.code] = kind.severity

    def fault(self, code: str, subject: str, message: str, remedy: str) -> Fault:
        """Make a fault of a declared kind; an undeclared code is a programming error (KeyError)."""
        return Fault(self.kinds[code].code, subject, message, remedy)


class FaultError(Exception):
    """Raised where a single fault ends the work at hand; carries the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


_SEVERITY_OF: dict[str, str] = {}


def by_severity(faults: Iterable[Fault]) -> list[Fault]:
    """Most serious first; within one severity the order in which they were found. Duplicates are dropped."""
    unique = list(dict.fromkeys(faults))
    return sorted(unique, key=lambda fault: SEVERITIES.index(_SEVERITY_OF.get(fault.code, "error")))


def is_fatal(fault: Fault) -> bool:
    """True unless the kind is declared a warning."""
    return _SEVERITY_OF.get(fault.code, "error") != "warning"


def in_variables(faults: Iterable[Fault], prefix: str, options: Iterable[str]) -> list[Fault]:
    """The faults with the names of a module's options as a role's variables: ``api_keys`` as C(llama_server_api_keys).

    A subject is renamed where it is an option or an element of one. In texts a bare word is renamed only where it holds
    an underscore, since ``host`` and ``parallel`` are words of the language too; in backticks any option is.
    """
    words = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    if not prefix or not words:
        return list(faults)
    subject = re.compile(rf"^(?=(?:{words})(?:$|\[|: ))")
    text = re.compile(rf"(?<=`)(?=(?:{words})`)|(?<![\w./$-])(?=\w+_)(?=(?:{words})(?!\w|[./-]\w))")
    return [
        replace(
            fault,
            subject=subject.sub(prefix, fault.subject),
            message=text.sub(prefix, fault.message),
            remedy=text.sub(prefix, fault.remedy),
        )
        for fault in faults
    ]


def as_text(faults: Iterable[Fault]) -> str:
    """The faults as an operator reads them in a failed task: one line each, then what to do."""
    lines = []
    for fault in faults:
        lines.append(f"[{fault.code}] {fault.subject}: {fault.message}")
        if fault.remedy:
            lines.append(f"  -> {fault.remedy}")
    return "\n".join(lines)
