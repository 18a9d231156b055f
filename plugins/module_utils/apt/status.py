# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Every installed package by dpkg's own file, and the records of packages that apt knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..machine import Machine
from ..nvidia.packages import stanzas

#: Groups of alternatives: ``a | b, c`` is ((a, b), (c,)).
Dependencies = tuple[tuple[str, ...], ...]


def dependencies(*fields: str) -> Dependencies:
    """Names only: versions and architectures do not matter to which package leads to which."""
    groups = []
    for text in fields:
        for group in text.split(","):
            names = tuple(re.split(r"[\s:(\[<]", name.strip(), maxsplit=1)[0] for name in group.split("|"))
            if any(names):
                groups.append(tuple(filter(None, names)))
    return tuple(groups)


@dataclass(frozen=True)
class Record:
    """A package as an archive or dpkg describes it."""

    name: str
    version: str
    architecture: str
    source: str
    depends: Dependencies

    def leads_to(self) -> tuple[str, ...]:
        """What it depends on, of alternatives the first."""
        return tuple(group[0] for group in self.depends)


@dataclass(frozen=True)
class Installed(Record):
    """A package that dpkg has; ``want``, ``flag`` and ``state`` are its three status words."""

    want: str = "install"
    flag: str = "ok"
    state: str = "installed"
    foreign: bool = False

    @property
    def held(self) -> bool:
        return self.want == "hold"

    @property
    def unfinished(self) -> bool:
        """dpkg stopped in the middle of it: unpacked, half-configured, half-installed or marked for reinstallation."""
        return self.state in ("unpacked", "half-configured", "half-installed") or "reinst" in self.flag

    @property
    def full_name(self) -> str:
        """As apt-mark takes it: with the architecture where that is not the machine's own."""
        return f"{self.name}:{self.architecture}" if self.foreign else self.name


def _record(fields: Mapping[str, str]) -> Record:
    return Record(
        fields["Package"],
        fields.get("Version", ""),
        fields.get("Architecture", ""),
        fields.get("Source", "") or fields["Package"],
        dependencies(fields.get("Pre-Depends", ""), fields.get("Depends", "")),
    )


def parse_records(text: str) -> list[Record]:
    """The output of ``apt-cache show``."""
    return [_record(fields) for fields in stanzas(text) if fields.get("Package")]


def parse_status(text: str) -> list[Installed]:
    """What is installed, or was and is broken now; sorted by name. What is only configured or remembered is not."""
    found = []
    for fields in stanzas(text):
        words = fields.get("Status", "").split()
        if len(words) != 3 or words[2] in ("not-installed", "config-files"):
            continue
        found.append((_record(fields), words))
    # dpkg is of the machine's own architecture.
    native = next((record.architecture for record, _ in found if record.name == "dpkg"), None)
    return sorted(
        (
            Installed(
                **vars(record),
                want=words[0],
                flag=words[1],
                state=words[2],
                foreign=native is not None and record.architecture not in (native, "all"),
            )
            for record, words in found
        ),
        key=lambda package: (package.name, package.architecture),
    )


def installed(system: Machine) -> list[Installed] | None:
    """Null on a machine without dpkg."""
    text = system.read("/var/lib/dpkg/status")
    return None if text is None else parse_status(text)
