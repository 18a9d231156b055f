# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""One boot of another installed kernel than the one that GRUB would take."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..faults import Fault, FaultError
from ..machine import Machine
from ..nvidia import modinfo
from ..nvidia.kernels import Kernels, kernels
from .catalogue import CATALOGUE
from .grub import entry_ids


@dataclass
class Outcome:
    """``kernel`` is what boots next; null where nothing is to be done."""

    kernel: str | None
    entry: str | None = None
    changed: bool = False
    before: Kernels = field(default_factory=lambda: Kernels(None, None, None))
    faults: list[Fault] = field(default_factory=list)


def choose(machine: Machine, found: Kernels, wanted: str | None, require: bool = True) -> str | None:
    """The kernel to boot: the one asked for, else the former one. Null where the next boot is right as it is.

    Without ``require`` it is right too where no kernel has a driver.
    """
    if wanted:
        if wanted not in found.installed:
            raise FaultError(
                CATALOGUE.fault(
                    "grub_entry_missing",
                    wanted,
                    f"{wanted} is not installed; installed: {', '.join(found.installed) or 'none'}",
                    "name an installed kernel",
                )
            )
        return wanted if wanted != found.next else None
    having = [release for release in found.installed if modinfo.on_disk(machine, release) is not None]
    if found.next in having:
        return None
    if found.running in having:
        return found.running
    if having:
        return having[0]
    if not require:
        return None
    raise FaultError(
        CATALOGUE.fault(
            "no_kernel_with_driver",
            "kernels",
            f"none of the installed kernels has an nvidia module: {', '.join(found.installed) or 'no kernel'}",
            "build it: dkms autoinstall -k KERNEL, after apt-get install linux-headers-KERNEL",
        )
    )


def boot_once(system: Machine, machine: Machine, wanted: str | None, check: bool, require: bool = True) -> Outcome:
    """Tell GRUB to boot it once; ``machine`` is read, ``system`` runs grub-reboot."""
    found = kernels(machine)
    outcome = Outcome(None, before=found)
    try:
        outcome.kernel = choose(machine, found, wanted, require)
        if outcome.kernel is None:
            return outcome
        outcome.entry = entry_ids(machine, outcome.kernel)
        if outcome.entry is None:
            raise FaultError(
                CATALOGUE.fault(
                    "grub_entry_missing",
                    outcome.kernel,
                    f"GRUB's menu has no entry for {outcome.kernel}",
                    "run update-grub; without GRUB choose the kernel in the machine's own boot menu",
                )
            )
    except FaultError as exc:
        outcome.faults.append(exc.fault)
        return outcome
    outcome.changed = True
    if check:
        return outcome
    answer = system.run(["grub-reboot", outcome.entry])
    after = kernels(machine).next
    if not answer.ok or after != outcome.kernel:
        text = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
        because = text[-1] if text else f"{after} would still boot next"
        outcome.changed = False
        outcome.faults.append(
            CATALOGUE.fault(
                "grub_boot_failed",
                outcome.kernel,
                f"grub-reboot '{outcome.entry}': {because}",
                "choose the kernel in GRUB's menu at the console",
            )
        )
    return outcome
