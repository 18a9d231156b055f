# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which versions of a package apt knows of, and which archives have them, whatever the preferences say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..machine import Machine
from .status import Record, parse_records

#: Preferences do not matter here, and matching their patterns takes most of apt's time (measured: 0.6 of 0.65 s).
_APT_CACHE = ("apt-cache", "-o", "Dir::Etc::preferences=/dev/null", "-o", "Dir::Etc::preferencesparts=/dev/null")
_STATUS_FILE = "/var/lib/dpkg/status"


@dataclass(frozen=True)
class Release:
    """What an archive says of itself, and the host it is on (empty for a folder)."""

    origin: str = ""
    site: str = ""
    codename: str = ""
    suite: str = ""


@dataclass(frozen=True)
class Offer:
    """One version of a package. ``record`` is null where apt shows none."""

    name: str
    version: str
    releases: tuple[Release, ...] = ()
    installed: bool = False
    record: Record | None = None


@dataclass
class Archive:
    """Everything that was asked for so far, by name; versions newest first, as apt lists them."""

    known: dict[str, list[Offer]] = field(default_factory=dict)

    def offers(self, names: Iterable[str]) -> dict[str, list[Offer]]:
        return {name: self.known.get(name, []) for name in names}

    def versions(self, name: str) -> list[Offer]:
        return self.offers([name])[name]


class AptArchive(Archive):
    """Asks apt, each name once."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._files: dict[str, Release] | None = None

    def offers(self, names: Iterable[str]) -> dict[str, list[Offer]]:
        wanted = list(dict.fromkeys(names))
        new = [name for name in wanted if name not in self.known]
        if new:
            if self._files is None:
                self._files = parse_files(self._machine.run([*_APT_CACHE, "policy"]).stdout)
            records = parse_records(self._machine.run([*_APT_CACHE, "show", *new]).stdout)
            by_version = {(record.name, record.version): record for record in records}
            answer = self._machine.run([*_APT_CACHE, "policy", *new])
            self.known.update({name: [] for name in new})
            self.known.update(parse_policy(answer.stdout, self._files, by_version))
        return {name: self.known.get(name, []) for name in wanted}

    @property
    def empty(self) -> bool:
        """Whether apt has no lists of any archive, as on a machine just made."""
        if self._files is None:
            self._files = parse_files(self._machine.run([*_APT_CACHE, "policy"]).stdout)
        return not self._files


def parse_files(text: str) -> dict[str, Release]:
    """C(apt-cache policy) without a name: the archives by the words with which a package's table names them."""
    found: dict[str, Release] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"^\s*-?\d+ (?P<name>\S.*Packages)\s*$", line):
            # A flat archive has two spaces where others have suite and component.
            name = " ".join(match["name"].split())
            found[name] = Release()
        elif name and (match := re.match(r"^\s+release (?P<fields>.*)$", line)):
            fields = dict(part.split("=", 1) for part in match["fields"].split(",") if "=" in part)
            found[name] = Release(fields.get("o", ""), found[name].site, fields.get("n", ""), fields.get("a", ""))
        elif name and (match := re.match(r"^\s+origin (?P<site>\S*)\s*$", line)):
            known = found[name]
            found[name] = Release(known.origin, match["site"], known.codename, known.suite)
        elif not line.startswith(" "):
            name = ""
    return found


def parse_policy(
    text: str, files: dict[str, Release], records: dict[tuple[str, str], Record]
) -> dict[str, list[Offer]]:
    """C(apt-cache policy NAME ...)."""
    found: dict[str, list[Offer]] = {}
    name, version, installed = "", "", False
    releases: list[Release] = []

    def close() -> None:
        if name and version:
            record = records.get((name, version))
            found.setdefault(name, []).append(Offer(name, version, tuple(releases), installed, record))

    for line in text.splitlines():
        if match := re.match(r"^(?P<name>[a-z0-9][^\s:]*)(?::\S+)?:$", line):
            close()
            name, version, installed, releases = match["name"], "", False, []
        elif match := re.match(r"^ (?P<mark>\*\*\*|   ) (?P<version>\S+) -?\d+", line):
            close()
            version, installed, releases = match["version"], match["mark"] == "***", []
        elif match := re.match(r"^\s+-?\d+ (?P<file>\S.*)$", line):
            file = " ".join(match["file"].split())
            if file != _STATUS_FILE and file in files:
                releases.append(files[file])
    close()
    return found
