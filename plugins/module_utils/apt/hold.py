# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Holds: which of the installed packages are meant, and one call that brings them about."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..faults import Fault
from ..machine import Completed, Machine
from ..nvidia import dkms, modinfo
from ..nvidia.kernels import Kernels, kernels
from . import kernel_set, status
from .catalogue import CATALOGUE
from .grub import entry_ids
from .kernel_set import KernelSet
from .names import Names, is_plain
from .status import Installed

_RETRY_AFTER = 2.0


@dataclass(frozen=True)
class Wanted:
    """``sets`` of kernel, driver; ``packages`` and ``exclude`` are names and patterns."""

    sets: Sequence[str] = ()
    packages: Sequence[str] = ()
    exclude: Sequence[str] = ()
    held: bool = True


@dataclass
class Resolved:
    """What was meant, by full names; ``missing`` are plain names of which nothing is installed."""

    names: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    kernel: list[str] = field(default_factory=list)
    driver: list[str] = field(default_factory=list)
    kernel_set: KernelSet = field(default_factory=KernelSet)
    blacklist: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    kernels: Kernels = field(default_factory=lambda: Kernels(None, None, None))


def resolve(machine: Machine, installed: Sequence[Installed], wanted: Wanted) -> Resolved:
    """Resolve sets and patterns against what is installed. ``machine`` shows which kernel runs and which boots next."""
    found = Resolved()
    given, exclude = Names(wanted.packages), Names(wanted.exclude)
    names = {package.full_name for package in installed if package.name in given or package.full_name in given}
    known = {package.name for package in installed} | {package.full_name for package in installed}
    found.missing = sorted({word for word in wanted.packages if is_plain(word) and word not in known})
    found.driver = kernel_set.driver_set(installed)
    if "kernel" in wanted.sets:
        found.kernels = kernels(machine)
        found.kernel_set = kernel_set.kernel_set(installed)
        found.kernel, found.faults = _kernel(machine, installed, found, wanted.held)
        found.kernel = sorted({*found.kernel, *kernel_set.prebuilt_set(installed)})
        names |= set(found.kernel)
    if "driver" in wanted.sets:
        names |= set(found.driver)
    else:
        found.driver = []
    found.names = sorted(name for name in names if name not in exclude and name.split(":")[0] not in exclude)
    found.blacklist = _blacklist(found, wanted, exclude)
    return found


def _kernel(
    machine: Machine, installed: Sequence[Installed], found: Resolved, held: bool
) -> tuple[list[str], list[Fault]]:
    """Metas and every release but one without a driver, which is to be taken away again; released is all of it."""
    modules: dict[str, bool] = {}

    def has_module(release: str) -> bool:
        if release not in modules:
            modules[release] = modinfo.on_disk(machine, release) is not None
        return modules[release]

    releases = found.kernel_set.releases
    left_out = (
        set(kernel_set.intruders(found.kernels, found.kernel_set, has_module)) if held and found.driver else set()
    )
    shared = {name for release, names in releases.items() if release not in left_out for name in names}
    faults = (
        kernel_set.judge(
            found.kernels,
            installed,
            has_module,
            bool(found.driver),
            lambda release: entry_ids(machine, release),
            lambda release: dkms.what_the_build_said(machine, release),
        )
        if held
        else []
    )
    return sorted({*found.kernel_set.metas, *shared}), faults


def _blacklist(found: Resolved, wanted: Wanted, exclude: Names) -> list[str]:
    """Expressions for Unattended-Upgrade::Package-Blacklist that cover the sets and everything held besides."""
    prefixes = [*(kernel_set.KERNEL_BLACKLIST if "kernel" in wanted.sets else ())]
    prefixes += kernel_set.DRIVER_BLACKLIST if "driver" in wanted.sets else ()
    others = {name.split(":")[0] for name in found.names if not name.startswith(tuple(prefixes))}
    whole = [name.replace("+", "\\+") + "$" for name in sorted(others)]
    # A prefix that would catch an excluded package gives way to the names it stands for.
    split = [prefix for prefix in prefixes if any(prefix_hits(prefix, word) for word in exclude.given)]
    names = {name.split(":")[0] for name in found.names if name.startswith(tuple(split))} if split else set()
    whole += [name.replace("+", "\\+") + "$" for name in sorted(names)]
    return sorted({*(prefix for prefix in prefixes if prefix not in split), *whole})


def prefix_hits(prefix: str, word: str) -> bool:
    """Whether an excluded name or pattern can lie below a prefix; patterns are judged by their fixed beginning."""
    beginning = word.removeprefix("^")
    for position, sign in enumerate(beginning):
        if sign in "*?[(.\\|{+$":
            beginning = beginning[:position]
            break
    return beginning.startswith(prefix) or prefix.startswith(beginning)


@dataclass
class Outcome:
    """``before`` and ``after`` are the held packages of the whole machine, ``changed`` those that differ."""

    before: list[str]
    after: list[str]
    changed: list[str]
    faults: list[Fault] = field(default_factory=list)


def converge(
    system: Machine,
    installed: Sequence[Installed],
    names: Iterable[str],
    held: bool,
    check: bool,
    patience: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Hold or release exactly these, with one call of apt-mark, and read back whether dpkg took it."""
    wanted = set(names)
    before = sorted(package.full_name for package in installed if package.held)
    changed = sorted(p.full_name for p in installed if p.full_name in wanted and p.held != held)
    after = sorted({*before, *changed} if held else set(before) - set(changed))
    if not changed or check:
        return Outcome(before, after, changed)
    answer = _mark(system, "hold" if held else "unhold", changed, patience, sleep)
    now = status.installed(system) or []
    after = sorted(package.full_name for package in now if package.held)
    # What another program removed meanwhile cannot be held and need not be.
    there = {package.full_name for package in now}
    failed = [name for name in changed if name in there and (name in after) != held]
    done = [name for name in changed if name not in failed]
    if not failed and answer.ok:
        return Outcome(before, after, changed)
    verb = "hold" if held else "unhold"
    fault = CATALOGUE.fault(
        "apt_hold_failed",
        ", ".join(failed[:3]) + (", ..." if len(failed) > 3 else "") or "apt-mark",
        f"apt-mark {verb}: {answer.why}",
        "wait for the other apt or dpkg to end, then run this again"
        if _is_locked(answer)
        else f"apt-mark {verb} {' '.join(failed)}",
    )
    return Outcome(before, after, done, [fault])


def _is_locked(answer: Completed) -> bool:
    return "lock" in (answer.stderr + answer.stdout).lower()


def _mark(
    system: Machine, verb: str, names: Sequence[str], patience: float, sleep: Callable[[float], None]
) -> Completed:
    """dpkg's own lock has no waiting of its own: apt-mark fails at once while another program holds it."""
    waited = 0.0
    while True:
        answer = system.run(["apt-mark", verb, *names])
        if answer.ok or not _is_locked(answer) or waited >= patience:
            return answer
        sleep(_RETRY_AFTER)
        waited += _RETRY_AFTER


def as_results(resolved: Resolved, outcome: Outcome) -> dict[str, Any]:
    """As the module returns it."""
    after = set(outcome.after)
    return {
        "names": resolved.names,
        "held": [name for name in resolved.names if name in after],
        "changed_names": outcome.changed,
        "missing": resolved.missing,
        "others": sorted(after - set(resolved.names)),
        "kernel": resolved.kernel,
        "driver": resolved.driver,
        "metas": list(resolved.kernel_set.metas),
        "kernels": resolved.kernels.as_dict(),
        "blacklist": resolved.blacklist,
    }
