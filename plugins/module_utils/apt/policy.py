# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a transaction may not do: foreign driver branches, the open flavour, the kernel, removals, held packages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..faults import Fault
from ..nvidia import packages
from . import kernel_set
from .catalogue import CATALOGUE
from .names import Names, is_plain
from .status import Installed, Record
from .transaction import Change, Transaction


@dataclass(frozen=True)
class Policy:
    """``driver_branch`` null: any. The lists hold names and patterns."""

    driver_branch: str | None = None
    allow_open: bool = False
    allow_kernel: bool = False
    allow_kernel_headers: bool = False
    allow_held: bool = False
    allow_remove: Sequence[str] = ()
    forbidden: Sequence[str] = ()
    required: Sequence[str] = ()
    _removable: Names = field(init=False)
    _forbidden: Names = field(init=False)

    def __post_init__(self) -> None:
        # Patterns are read before apt runs, so that a mistake in one is found at once.
        object.__setattr__(self, "_removable", Names(self.allow_remove))
        object.__setattr__(self, "_forbidden", Names(self.forbidden))
        Names(self.required)


def with_branches(transaction: Transaction) -> Transaction:
    """The branch of every driver package that would be installed."""
    transaction.install = [replace(change, branch=branch_of(change)) for change in transaction.install]
    return transaction


def branch_of(change: Change) -> str | None:
    """By version, source and name; a transitional package is of the branch that it leads to."""
    own = packages.candidate_branch(change.name, change.new or "", change.record.source if change.record else None)
    return (transitional_to(change.record, own) if change.record else None) or own


def transitional_to(record: Record, own: str | None) -> str | None:
    """The only branch that the driver packages it depends on have, where that is another than its own.

    An archive turned nvidia-driver-550-server into a pointer to 570 by a mere revision: name, version and source
    package still say 550 (pop-os/pop#3549).
    """
    if own is None:
        return None
    led_to = {branch for name in record.leads_to() if (branch := packages.name_branch(name))}
    return led_to.pop() if len(led_to) == 1 and own not in led_to else None


def judge(
    transaction: Transaction, policy: Policy, before: Sequence[Installed], asked: Sequence[str] = ()
) -> list[Fault]:
    """Everything in the transaction that the policy refuses. ``asked`` are the packages that were asked for."""
    found = _open(transaction.install, policy)
    if policy.driver_branch is not None:
        found += _foreign(transaction.install, policy.driver_branch, asked)
        found += _unknown(transaction.install)
    if not policy.allow_kernel:
        found += _kernel(transaction, policy)
    found += _removed([change for change in transaction.remove if change.name not in policy._removable])
    for change in transaction.changes:
        if change.name in policy._forbidden:
            found.append(
                CATALOGUE.fault(
                    "apt_forbidden_package",
                    change.name,
                    change.text() + _of_branch(change.branch or _branch_before(change)),
                    f"hold it (apt-mark hold {change.name}) or leave out what brings it",
                )
            )
    if not policy.allow_held:
        found += _held(transaction, before)
    return found + _missing(transaction, policy, before)


def moved(names: Iterable[str], policy: Policy) -> list[Fault]:
    """The same for a list of names alone, as unattended-upgrade gives it."""
    found = []
    for name in names:
        forbidden = name in policy._forbidden
        kind = kernel_set.kind_of(name)
        if forbidden or (kind and not policy.allow_kernel and not (kind == "headers" and policy.allow_kernel_headers)):
            found.append(
                CATALOGUE.fault(
                    "apt_forbidden_package" if forbidden else "apt_kernel_touched",
                    name,
                    f"unattended-upgrade would change {name}",
                    f"hold it (apt-mark hold {name}) and name it in Unattended-Upgrade::Package-Blacklist",
                )
            )
    return found


def _parents(changes: Iterable[Change]) -> dict[str, list[str]]:
    """Who brings whom, within the transaction."""
    found: dict[str, list[str]] = {}
    for change in changes:
        for name in change.record.leads_to() if change.record else ():
            found.setdefault(name, []).append(change.name)
    return found


def _branch_before(change: Change) -> str | None:
    source = change.record.source if change.record and change.new is None else None
    return packages.candidate_branch(change.name, change.old or "", source)


def _of_branch(branch: str | None) -> str:
    return f" (branch {branch})" if branch else ""


def _open(changes: Iterable[Change], policy: Policy) -> list[Fault]:
    if policy.allow_open:
        return []
    return [
        CATALOGUE.fault(
            "apt_open_flavour",
            change.name,
            f"{change.name} {change.new}{_of_branch(change.branch)} is the open kernel module, which does not "
            "support Volta",
            "ask for the package without -open",
        )
        for change in changes
        if packages.is_open_flavour(change.name)
        or (change.record is not None and change.record.source.startswith("nvidia-open-"))
    ]


def _foreign(changes: Sequence[Change], wanted: str, asked: Sequence[str]) -> list[Fault]:
    """One fault a branch: the package that brings it, then the others of that branch."""
    parents = _parents(changes)
    bare = {re.split(r"[=/:]", word)[0] for word in asked}
    foreign: dict[str, list[Change]] = {}
    for change in changes:
        if change.branch not in (None, wanted):
            foreign.setdefault(str(change.branch), []).append(change)
    found = []
    for branch, group in sorted(foreign.items()):
        names = {change.name for change in group}

        def rank(change: Change, names: set[str] = names) -> tuple[bool, bool, bool]:
            brought_by = parents.get(change.name, [])
            inside = any(name in names for name in brought_by)
            return (change.name not in bare, inside, not brought_by)

        first = min(group, key=rank)
        others = sorted(names - {first.name})
        text = _why(first, wanted)
        if parents.get(first.name):
            text += f"; {_listed(parents[first.name])} on it"
        if others:
            text += f"; of {branch} too: {', '.join(others)}"
        found.append(
            CATALOGUE.fault(
                "apt_foreign_branch",
                first.name,
                text,
                f"pin every package of the driver to {wanted}, name a version that is of {wanted} "
                f"(apt-cache policy {first.name}), or set the branch to {branch} if that is meant",
            )
        )
    return found


def _why(change: Change, wanted: str) -> str:
    source = change.record.source if change.record else None
    named = packages.name_branch(change.name)
    what = f"{change.name} {change.new}"
    if packages.candidate_branch(change.name, change.new or "", source) != change.branch:
        return f"{what} is a transitional package of branch {change.branch}, not {wanted}"
    if named not in (None, change.branch):
        return f"{what} is of branch {change.branch}, although its name promises {named}"
    return f"{what} is of branch {change.branch}, not {wanted}"


def _unknown(changes: Iterable[Change]) -> list[Fault]:
    return [
        CATALOGUE.fault(
            "apt_branch_unknown",
            change.name,
            f"{change.name} {change.new} has no branch in version, source package or name",
            f"see apt-cache show {change.name}={change.new}; pin it away, or install it by hand if it is innocent",
        )
        for change in changes
        if change.branch is None and _without_branch(change)
    ]


def _removed(changes: Sequence[Change]) -> list[Fault]:
    if not changes:
        return []
    names = [change.name for change in changes]
    if len(changes) == 1:
        text = changes[0].text() + _of_branch(_branch_before(changes[0]))
    else:
        listed = (f"{change.name} {change.old}{_of_branch(_branch_before(change))}" for change in changes)
        text = f"{len(changes)} packages would be removed: {', '.join(listed)}"
    subject = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return [
        CATALOGUE.fault(
            "apt_would_remove", subject, text, f"keep them, or allow the removal (`allow_remove`: {', '.join(names)})"
        )
    ]


def _without_branch(change: Change) -> bool:
    """Whether it should have a branch: from a driver's source package, and no companion."""
    source = (change.record.source if change.record else "").split(" ")[0]
    return source.startswith(("nvidia-graphics-drivers", "cuda-drivers")) and not packages.is_companion(change.name)


def _listed(names: Sequence[str]) -> str:
    shown = " and ".join([", ".join(names[:2]), f"{len(names) - 2} more"]) if len(names) > 2 else " and ".join(names)
    return f"{shown} {'depend' if len(names) > 1 else 'depends'}"


def _kernel(transaction: Transaction, policy: Policy) -> list[Fault]:
    found = []
    for change in transaction.changes:
        kind = kernel_set.kind_of(change.name, change.record)
        if kind is None or (kind == "headers" and policy.allow_kernel_headers and change.new is not None):
            continue
        found.append(
            CATALOGUE.fault(
                "apt_kernel_touched",
                change.name,
                change.text(),
                "hold the kernel (role kernel_hold); to move on deliberately run playbooks/kernel_upgrade.yml",
            )
        )
    return found


def _held(transaction: Transaction, before: Sequence[Installed]) -> list[Fault]:
    held = {package.name for package in before if package.held} | {
        name.split(":")[0] for name in transaction.held_changed
    }
    return [
        CATALOGUE.fault(
            "apt_held_would_change",
            change.name,
            f"{change.name} is held, and {change.text().removeprefix(change.name).strip()}"
            + _of_branch(change.branch or _branch_before(change)),
            f"leave it, or release it first: apt-mark unhold {change.name}",
        )
        for change in transaction.changes
        if change.name in held and change.old is not None
    ]


def _missing(transaction: Transaction, policy: Policy, before: Sequence[Installed]) -> list[Fault]:
    gone = {change.name for change in transaction.remove}
    after = ({package.name for package in before} | {change.name for change in transaction.install}) - gone
    found = []
    for word in policy.required:
        names = Names([word])
        if not any(name in names for name in after):
            text = (
                f"{word} would not be installed"
                if is_plain(word)
                else f"nothing that matches {word} would be installed"
            )
            found.append(
                CATALOGUE.fault("apt_required_missing", word, text, f"ask for it by name; see apt-cache policy {word}")
            )
    return found


def branches(changes: Iterable[Change]) -> dict[str, list[str]]:
    """Names of the driver packages that would be installed, by branch."""
    found: dict[str, list[str]] = {}
    for change in changes:
        if change.branch:
            found.setdefault(change.branch, []).append(change.name)
    return {branch: sorted(set(found[branch])) for branch in sorted(found)}


_UPGRADED = re.compile(r"Packages that will be upgraded: (?P<names>.*)$", re.MULTILINE)
_UNUSED = re.compile(r"Removing unused kernel packages: (?P<names>.*)$", re.MULTILINE)
_DEB = re.compile(r"/(?P<name>[a-z0-9][a-z0-9+.-]+)_[^/\s_]+_[a-z0-9]+\.deb\b")


def unattended_names(text: str) -> list[str]:
    """Every package that ``unattended-upgrade --dry-run --verbose`` says it would touch.

    It lists what it would upgrade; what comes along as new shows only in the files it would give to dpkg.
    """
    found: list[str] = []
    for expression in (_UPGRADED, _UNUSED):
        for match in expression.finditer(text):
            found += match["names"].split()
    found += [match["name"] for match in _DEB.finditer(text)]
    return sorted(dict.fromkeys(found))
