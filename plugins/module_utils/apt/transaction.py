# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What apt-get would do, from its simulation."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..faults import Fault
from ..machine import Completed, Machine
from .catalogue import CATALOGUE
from .status import Record, parse_records

#: ``Inst name [from] (to origin, origin [arch]) [broken by then]``; other architectures follow the name.
_INST = re.compile(
    r"^Inst (?P<name>[^\s:]+)(?::\S+)?(?: \[(?P<old>[^\]]*)\])? "
    r"\((?P<new>\S+)(?: (?P<origin>.*?))? \[(?P<arch>[^\]]+)\]\)"
)
_REMV = re.compile(r"^(?P<how>Remv|Purg) (?P<name>[^\s:]+)(?::(?P<arch>\S+))? \[(?P<old>[^\]]*)\]")
_SECTIONS = {
    "The following packages have been kept back:": "kept_back",
    "The following held packages will be changed:": "held_changed",
    "The following packages will be DOWNGRADED:": "downgrades",
    # Ubuntu hands updates out in phases; apt 2.4 and 3.0 word it differently.
    "The following upgrades have been deferred due to phasing:": "deferred",
    "Not upgrading yet due to phasing:": "deferred",
}
_UNMET = "The following packages have unmet dependencies:"
_UNMET_LINE = re.compile(r"^ (?P<name>\S+) : (?P<kind>[A-Za-z-]+): (?P<what>.*)$")
_KINDS = {
    "Depends": "depends on",
    "PreDepends": "depends on",
    "Pre-Depends": "depends on",
    "Conflicts": "conflicts with",
    "Breaks": "breaks",
    "Recommends": "recommends",
}
_BROKEN = re.compile(r"Unmet dependencies\. Try|dpkg was interrupted|needs to be reinstalled")
_UNRESOLVABLE = re.compile(
    r"Unable to locate package|Couldn't find any package|has no installation candidate|was not found"
    r"|Unable to correct problems|Unable to satisfy dependencies|Unmet dependencies|no packages found",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Change:
    """A package that would change; ``old`` is null for a new one, ``new`` for one that goes."""

    name: str
    old: str | None
    new: str | None
    architecture: str | None = None
    origin: str | None = None
    purge: bool = False
    downgrade: bool = False
    record: Record | None = None
    branch: str | None = None

    @property
    def kind(self) -> str:
        if self.new is None:
            return "remove"
        if self.old is None:
            return "install"
        if self.old == self.new:
            return "reinstall"
        return "downgrade" if self.downgrade else "upgrade"

    def text(self) -> str:
        """What happens to it, as a part of a sentence."""
        if self.new is None:
            return f"{self.name} {self.old} would be removed"
        if self.old is None:
            return f"{self.name} {self.new} would be installed"
        if self.old == self.new:
            return f"{self.name} {self.new} would be installed again"
        return f"{self.name} would go from {self.old} to {self.new}"

    def as_dict(self) -> dict[str, Any]:
        if self.new is None:
            return {"name": self.name, "from": self.old, "architecture": self.architecture, "purge": self.purge}
        return {
            "name": self.name,
            "from": self.old,
            "to": self.new,
            "kind": self.kind,
            "origin": self.origin,
            "architecture": self.architecture,
            "source": self.record.source if self.record else None,
            "branch": self.branch,
        }


@dataclass
class Transaction:
    """Everything the simulation said. The lists besides hold names."""

    install: list[Change] = field(default_factory=list)
    remove: list[Change] = field(default_factory=list)
    kept_back: list[str] = field(default_factory=list)
    held_changed: list[str] = field(default_factory=list)
    downgrades: list[str] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)

    @property
    def changes(self) -> list[Change]:
        return [*self.install, *self.remove]


def parse(text: str) -> Transaction:
    """The output of ``apt-get -s`` in the C locale."""
    found = Transaction()
    section: list[str] | None = None
    for line in text.splitlines():
        if line.startswith("  ") and section is not None:
            section += [name.rstrip("*") for name in re.sub(r"\([^)]*\)", "", line).split()]
            continue
        attribute = _SECTIONS.get(line.strip())
        section = getattr(found, attribute) if attribute else None
        if match := _INST.match(line):
            found.install.append(
                Change(
                    match["name"], match["old"], match["new"], match["arch"], (match["origin"] or "").strip() or None
                )
            )
        elif match := _REMV.match(line):
            found.remove.append(Change(match["name"], match["old"], None, match["arch"], purge=match["how"] == "Purg"))
    downgraded = {name.split(":")[0] for name in found.downgrades}
    found.install = [replace(change, downgrade=change.name in downgraded) for change in found.install]
    return found


def reason(answer: Completed) -> str:
    """Why apt refused, as one sentence of its own words: the error, or the dependencies that are not met."""
    errors: list[str] = []
    for line in answer.stderr.splitlines():
        if line.startswith("E: "):
            errors.append(line[3:].strip())
        elif errors and line.startswith("   "):  # apt 3 explains an error below it
            errors[-1] += " " + line.strip()
    unmet = _unmet(answer.stdout)
    if unmet:
        return "; ".join(unmet[:3]) + (f" (and {len(unmet) - 3} more)" if len(unmet) > 3 else "")
    return "; ".join(dict.fromkeys(errors)).rstrip(".") or f"apt-get ended with status {answer.rc}"


def _unmet(text: str) -> list[str]:
    """The lines below apt's heading, each as a sentence; continued lines name alternatives."""
    found: list[str] = []
    _, _, rest = text.partition(_UNMET)
    for line in rest.splitlines()[1:]:
        match = _UNMET_LINE.match(line)
        if match:
            what = re.sub(r"\s+but ", ", but ", match["what"].strip(), count=1)
            found.append(f"{match['name']} {_KINDS.get(match['kind'], match['kind'])} {what}")
        elif found and re.match(r"^\s{5,}\S", line):
            kind = re.match(r"^\s+(?P<kind>[A-Z][A-Za-z-]+): (?P<what>.*)$", line)
            if kind:
                name = found[-1].split(" ", 1)[0]
                what = re.sub(r"\s+but ", ", but ", kind["what"].strip(), count=1)
                found.append(f"{name} {_KINDS.get(kind['kind'], kind['kind'])} {what}")
            else:
                found[-1] += " " + line.strip()
        else:
            break
    return found


@dataclass(frozen=True)
class Request:
    """What to simulate. ``options`` are apt's own (``-o``); ``recommends`` null leaves apt's setting."""

    action: str = "install"
    packages: tuple[str, ...] = ()
    recommends: bool | None = None
    target_release: str | None = None
    reinstall: bool = False
    purge: bool = False
    fix_broken: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    def options_argv(self) -> list[str]:
        return [word for name, value in sorted(self.options.items()) for word in ("-o", f"{name}={value}")]

    def argv(self) -> list[str]:
        words = ["apt-get", "-s", "-q", *self.options_argv()]
        if self.recommends is not None:
            words.append("--install-recommends" if self.recommends else "--no-install-recommends")
        if self.target_release:
            words += ["-t", self.target_release]
        words += [flag for flag, wanted in (("--reinstall", self.reinstall), ("--purge", self.purge)) if wanted]
        words += ["--fix-broken"] if self.fix_broken else []
        return [*words, self.action.replace("_", "-"), *self.packages]


def failure(answer: Completed, asked: Sequence[str], held: Collection[str] = ()) -> Fault | None:
    """The fault of an apt-get that did not say what it would do; null where it did. ``held`` are names."""
    if answer.ok:
        return None
    if answer.missing:
        return CATALOGUE.fault(
            "apt_missing", "apt-get", "apt-get cannot be run: " + answer.stderr, "use a system with apt"
        )
    subject = " ".join(asked) or "apt-get"
    if answer.timed_out:
        return CATALOGUE.fault(
            "apt_failed", subject, "apt-get did not end in time", "raise `timeout`, or look for a slow disk or program"
        )
    errors = "\n".join(line for line in answer.stderr.splitlines() if line.startswith("E: "))
    if _BROKEN.search(errors):
        first = errors.splitlines()[0].removeprefix("E: ").rstrip(".")
        return CATALOGUE.fault(
            "apt_broken_packages",
            subject,
            f"apt refuses every change: {first}",
            "dpkg --configure -a && apt-get --fix-broken install",
        )
    if _UNRESOLVABLE.search(errors) or _UNMET in answer.stdout:
        because = reason(answer)
        # apt says "held broken packages" whether anything is held or not.
        in_the_way = sorted(set(re.split(r"[\s:,;()]+", because)) & set(held))
        remedy = "update the package lists; then compare versions with: apt-cache policy " + " ".join(map(_bare, asked))
        if in_the_way:
            because += f" (held: {', '.join(in_the_way)})"
            remedy = f"release what is held first: apt-mark unhold {' '.join(in_the_way)}; or " + remedy
        return CATALOGUE.fault("apt_unresolvable", subject, because, remedy)
    return CATALOGUE.fault(
        "apt_failed", subject, f"apt-get: {reason(answer)}", "mend what apt names, then run: apt-get update"
    )


def _bare(word: str) -> str:
    return re.split(r"[=/]", word.rstrip("+-"))[0]


def simulate(system: Machine, request: Request, held: Collection[str] = ()) -> tuple[Transaction, list[Fault]]:
    """The transaction, with the records of what would change; or why there is none."""
    answer = system.run(request.argv())
    fault = failure(answer, request.packages, held)
    if fault:
        return Transaction(), [fault]
    return with_records(system, request, parse(answer.stdout)), []


def records_argv(request: Request, changes: Sequence[Change]) -> list[str]:
    """Of a version that is installed apt has dpkg's record; a program's arguments have room for thousands."""
    words = [
        f"{change.name}{'' if change.architecture in (None, 'all') else f':{change.architecture}'}"
        f"={change.new or change.old}"
        for change in changes
    ]
    return ["apt-cache", *request.options_argv(), "show", "--no-all-versions", *words]


def with_records(system: Machine, request: Request, transaction: Transaction) -> Transaction:
    """Ask apt once for source package and dependencies of everything that would change."""
    if not transaction.changes:
        return transaction
    answer = system.run(records_argv(request, transaction.changes))
    records = {(record.name, record.version): record for record in parse_records(answer.stdout)}

    def recorded(change: Change) -> Change:
        return replace(change, record=records.get((change.name, change.new or change.old or "")))

    transaction.install = [recorded(change) for change in transaction.install]
    transaction.remove = [recorded(change) for change in transaction.remove]
    return transaction
