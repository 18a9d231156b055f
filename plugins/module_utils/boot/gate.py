# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether a machine has to be rebooted before its driver works, and whether a reboot brought what it was for.

What a boot would bring is read from the machine (nvidia/driver.py). Only what a boot does mend is a reason for one: a
module that is missing, unsigned or of another version stays so, and is a fault here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..faults import Catalogue, Fault, FaultKind
from ..machine import Machine
from ..nvidia import driver
from ..nvidia.driver import REBOOT_REQUIRED, DriverState, Judgement
from . import modprobe

FAULTS = Catalogue(
    "reboot (reboot_check)",
    (
        REBOOT_REQUIRED,
        FaultKind(
            "reboot_not_done",
            "critical",
            "A reboot was asked for, and the machine still runs the boot of before.",
            "the boot id is still 5c1a2b0e-9d0f-4a53-8d7e-0a4f5f0d8b11",
        ),
        FaultKind(
            "reboot_did_not_help",
            "critical",
            "The machine was rebooted in this run for the same reason, so another reboot would not help either.",
            "after a reboot still: the nvidia module does not load: could not insert 'nvidia': No such device",
        ),
        FaultKind(
            "driver_uvm_not_loaded",
            "critical",
            "The driver is in order but for nvidia_uvm, which does not load; CUDA does not start without it.",
            "nvidia_uvm: modprobe: FATAL: Module nvidia_uvm not found in directory /lib/modules/5.15.0-151-generic",
        ),
        FaultKind(
            "boot_id_unreadable",
            "critical",
            "The boot id cannot be read, so a reboot could not be told from none.",
            "/proc/sys/kernel/random/boot_id: cannot be read",
        ),
    ),
)

BOOT_ID = "/proc/sys/kernel/random/boot_id"
MODULES = ("nvidia", "nvidia_uvm")


@dataclass(frozen=True)
class Request:
    """What is wanted of the gate.

    ``local`` means Ansible runs on the machine itself; so does a ``controller_boot_id`` that is the machine's own.
    ``former_boot_id`` is given after a reboot. ``earlier`` are the reasons of earlier reboots in the same run,
    ``allow_with`` is what has to be given with -e to allow one.
    """

    allowed: bool = False
    local: bool = False
    controller_boot_id: str | None = None
    load_modules: bool = True
    newer_kernel: bool = False
    former_boot_id: str | None = None
    earlier: Sequence[str] = ()
    allow_with: str = "allowed=true"


@dataclass
class Decision:
    """``reason`` says why a reboot is required (null: it is not); ``reboot`` whether it may be done now."""

    boot_id: str | None
    state: DriverState
    judgement: Judgement
    reason: str | None = None
    reboot: bool = False
    loaded: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def boot_id(machine: Machine) -> str | None:
    return (machine.read(BOOT_ID) or "").strip() or None


def decide(machine: Machine, request: Request, check: bool = False) -> Decision:
    """Judge the machine, load the modules where that is all it takes, and say whether it must be rebooted.

    In check mode nothing is loaded, and no finding is a fault: earlier roles have not done yet what they would do.
    """
    state = driver.read(machine)
    judgement = driver.judge(state)
    decision = Decision(boot_id(machine), state, judgement)
    refused = None
    missing = _missing(machine, judgement) if request.load_modules else []
    if missing:
        if check:
            decision.loaded = missing
            return decision
        refused = _load(machine, decision, missing)
        decision.state = driver.read(machine)
        decision.judgement = driver.judge(decision.state)
    decision.reason = _reason(decision, request, refused)
    here = request.local or (decision.boot_id is not None and decision.boot_id == request.controller_boot_id)
    decision.reboot = decision.reason is not None and request.allowed and not here and not request.former_boot_id
    if not check:
        decision.faults = _faults(decision, request, here, refused)
        decision.reboot = decision.reboot and not decision.faults
    return decision


def _missing(machine: Machine, judgement: Judgement) -> list[str]:
    """The modules to load: all, or nvidia_uvm where the rest is in order, as after a boot that did not load it."""
    if judgement.verdict == "load_module":
        return list(MODULES)
    if judgement.verdict == "ok" and modprobe.is_loaded(machine, "nvidia"):
        return [name for name in MODULES if not modprobe.is_loaded(machine, name)]
    return []


def _load(machine: Machine, decision: Decision, names: Sequence[str]) -> str | None:
    """Load the modules now; why that failed, or null."""
    for name in names:
        done = machine.run(["modprobe", name])
        if not done.ok:
            return f"{name}: {done.why}"
        decision.loaded.append(name)
    return None


def _reason(decision: Decision, request: Request, refused: str | None) -> str | None:
    verdict, kernels = decision.judgement.verdict, decision.state.kernels
    if verdict == "reboot_required":
        return decision.judgement.reason
    if verdict == "load_module":
        if refused is not None:
            return f"the nvidia module does not load: {refused}"
        return decision.judgement.reason
    if verdict == "ok" and request.newer_kernel and kernels.next and kernels.running != kernels.next:
        return f"kernel {kernels.next} boots next, {kernels.running} runs"
    return None


def _faults(decision: Decision, request: Request, here: bool, refused: str | None) -> list[Fault]:
    former = request.former_boot_id
    if former is not None and decision.boot_id == former:
        return [
            FAULTS.fault(
                "reboot_not_done",
                "boot id",
                f"the boot id is still {former}",
                "Look at the machine's console: it may still be going down, or wait for a process that does not end.",
            )
        ]
    if decision.judgement.verdict == "ok" and refused is not None:
        return [
            FAULTS.fault(
                "driver_uvm_not_loaded",
                "nvidia_uvm",
                refused,
                "modprobe nvidia-uvm; journalctl -k -b | grep -i nvidia",
            )
        ]
    if decision.reason is None:
        return [] if decision.judgement.verdict == "ok" else decision.judgement.faults
    if former is not None or decision.reason in request.earlier:
        return [
            FAULTS.fault(
                "reboot_did_not_help",
                decision.judgement.verdict,
                f"after a reboot still: {decision.reason}",
                "; ".join(decision.judgement.remedy) or "See what driver_state says of the machine.",
            )
        ]
    if decision.boot_id is None:
        return [
            FAULTS.fault(
                "boot_id_unreadable",
                BOOT_ID,
                "cannot be read",
                "Reboot by hand, then run the same command again.",
            )
        ]
    if here:
        return [
            FAULTS.fault(
                "reboot_required",
                decision.judgement.verdict,
                f"{decision.reason}. Ansible runs on this machine itself, so it does not reboot it",
                "systemctl reboot, then run the same command again",
            )
        ]
    if not request.allowed:
        return [
            FAULTS.fault(
                "reboot_required",
                decision.judgement.verdict,
                f"{decision.reason}. Rebooting is not allowed",
                f"run the same command again with -e {request.allow_with}, or reboot the machine by hand (systemctl "
                "reboot) and run the same command again",
            )
        ]
    return []
