# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The policy of PCIe Active State Power Management: read, set now, and set at every boot by systemd-tmpfiles."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..faults import Catalogue, Fault, FaultKind
from ..files import replace_file
from ..machine import Machine

FAULTS = Catalogue(
    "power saving of PCIe (pcie_aspm)",
    (
        FaultKind(
            "aspm_unavailable",
            "error",
            "The kernel has no PCIe Active State Power Management, or not the policy asked for.",
            "/sys/module/pcie_aspm/parameters/policy: is not there; performance is asked for",
        ),
        FaultKind(
            "aspm_denied",
            "error",
            "The firmware keeps power saving of PCIe to itself, so the policy cannot be set.",
            "performance: Operation not permitted; the policy is still default",
        ),
        FaultKind(
            "aspm_not_written",
            "error",
            "The file that sets the policy at every boot could not be written.",
            "/etc/tmpfiles.d/volta-pcie-aspm.conf: Read-only file system",
        ),
    ),
)

POLICIES = ("default", "performance", "powersave", "powersupersave")
POLICY = "/sys/module/pcie_aspm/parameters/policy"
PATH = "/etc/tmpfiles.d/volta-pcie-aspm.conf"


@dataclass
class Outcome:
    """``policy`` in force (null: the kernel has none), ``offered`` what it could be, ``before`` and ``after`` texts."""

    policy: str | None
    offered: list[str]
    changes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    before: str = ""
    after: str = ""


def read(machine: Machine) -> tuple[str | None, list[str]]:
    """The policy in force and all that are offered: ``[default] performance powersave``."""
    text = machine.read(POLICY) or ""
    current = re.search(r"\[(\w+)\]", text)
    return current[1] if current else None, re.findall(r"\w+", text)


def content(policy: str) -> str:
    return (
        "# Written by Ansible (volta.llm.nvidia_persistence): changes here are overwritten by the next run.\n"
        f"w {POLICY} - - - - {policy}\n"
    )


def converge(machine: Machine, policy: str | None, check: bool = False) -> Outcome:
    """Set the policy now and for every boot; with null leave the kernel alone and take our file away."""
    current, offered = read(machine)
    before = machine.read(PATH)
    wanted = None if policy is None else content(policy)
    outcome = Outcome(current, offered, before=before or "", after=wanted or "")
    if policy is not None and policy not in offered:
        outcome.after = outcome.before
        has = f"offers {', '.join(offered)}" if offered else "is not there"
        outcome.faults.append(
            FAULTS.fault(
                "aspm_unavailable",
                POLICY,
                f"{has}; {policy} is asked for",
                "Leave the policy alone, or boot without pcie_aspm=off and with a kernel that has CONFIG_PCIEASPM.",
            )
        )
        return outcome
    if before != wanted:
        outcome.changes.append(f"{'removed' if wanted is None else 'wrote'} {PATH}")
    if policy is not None and current != policy:
        outcome.changes.append(f"policy {current} -> {policy}")
    if check:
        return outcome
    if policy is not None and current != policy and not _set(machine, policy, outcome):
        return outcome
    _write(machine, before, wanted, outcome)
    return outcome


def _set(machine: Machine, policy: str, outcome: Outcome) -> bool:
    """Set it now; whether the kernel took it. A policy that the firmware denies must not be tried at every boot."""
    why = "the kernel did not take it"
    try:
        with machine.path(POLICY).open("w", encoding="ascii") as target:
            target.write(policy)
    except OSError as exc:
        why = exc.strerror or str(exc)
    outcome.policy, _ = read(machine)
    if outcome.policy == policy:
        return True
    outcome.changes.clear()
    outcome.after = outcome.before
    outcome.faults.append(
        FAULTS.fault(
            "aspm_denied",
            POLICY,
            f"{policy}: {why}; the policy is still {outcome.policy}",
            "Let the operating system control ASPM in the firmware's setup, or leave the policy alone.",
        )
    )
    return False


def _write(machine: Machine, before: str | None, wanted: str | None, outcome: Outcome) -> None:
    target = machine.path(PATH)
    try:
        if wanted is None:
            target.unlink(missing_ok=True)
        elif before != wanted:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, wanted.encode())
    except OSError as exc:
        outcome.faults.append(
            FAULTS.fault("aspm_not_written", PATH, exc.strerror or str(exc), "Run as root on a writable file system.")
        )
