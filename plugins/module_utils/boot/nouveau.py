# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Keeping nouveau off the cards: a file in modprobe.d, every initramfs with that file in it, the module unloaded.

The state is read from the machine alone: a run that was killed after the file was written finds its images stale, by
what they list and by their age, and goes on there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..faults import Catalogue, Fault, FaultKind
from ..files import replace_file
from ..machine import Machine
from . import initramfs, modprobe
from .initramfs import Image, Tools

FAULTS = Catalogue(
    "nouveau (nouveau_state)",
    (
        FaultKind(
            "nouveau_needed_by_display",
            "critical",
            "A display of the machine runs on nouveau; without it the display goes dark.",
            "the console is on nouveau (fb0) and there is no other display device",
        ),
        FaultKind(
            "nouveau_file_not_written",
            "critical",
            "The file that keeps nouveau from loading could not be written.",
            "/etc/modprobe.d/volta-nouveau.conf: Read-only file system",
        ),
        FaultKind(
            "nouveau_loaded_by_name",
            "error",
            "A file of the machine loads nouveau by its name, and a blacklist does not keep that from happening.",
            "/etc/initramfs-tools/modules: names nouveau",
        ),
        FaultKind(
            "initramfs_rebuild_failed",
            "critical",
            "An initramfs could not be made anew, so that kernel boots with the old one.",
            "update-initramfs -u -k 5.15.0-91-generic: exit status 1: No space left on device",
        ),
        FaultKind(
            "initramfs_stale",
            "critical",
            "An initramfs was made anew and still does not carry the file that keeps nouveau from loading.",
            "/boot/initrd.img-5.15.0-91-generic: does not have /etc/modprobe.d/volta-nouveau.conf in it; "
            "update-initramfs said: Not updating initramfs.",
        ),
        FaultKind(
            "initramfs_tool_missing",
            "critical",
            "There are initramfs images and no program that is known to read or make them.",
            "neither update-initramfs nor dracut is installed; images: /boot/initrd.img-6.12.0-1-amd64",
        ),
        FaultKind(
            "initramfs_orphaned",
            "warning",
            "An image belongs to a kernel whose modules are gone, so it cannot be made anew.",
            "/boot/initrd.img-5.4.0-150-generic: there is no /lib/modules/5.4.0-150-generic",
        ),
        FaultKind(
            "initramfs_missing",
            "warning",
            "A kernel has no initramfs although others have; it may not boot.",
            "5.15.0-91-generic: has no image in /boot",
        ),
    ),
)

PATH = "/etc/modprobe.d/volta-nouveau.conf"
CONTENT = """\
# Written by Ansible (volta.llm.nouveau): changes here are overwritten by the next run.
# The NVIDIA driver cannot have cards that nouveau has taken.
blacklist nouveau
options nouveau modeset=0
"""
_DISPLAY_CLASS = "0x03"
#: /boot can be a file system that keeps times in steps of two seconds.
_COARSE_NS = 2_000_000_000


@dataclass(frozen=True)
class KernelState:
    """One kernel. ``stale`` is null where there is no image, ``resolves_to`` where there is no modules.alias.

    ``candidates`` are the modules that know the card, ``resolves_to`` those of them that would be loaded for it.
    """

    image: Image
    file_inside: bool | None
    stale: bool | None
    candidates: tuple[str, ...] | None
    resolves_to: tuple[str, ...] | None

    @property
    def rebuildable(self) -> bool:
        return self.image.has_modules

    def as_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.image.kernel,
            "bootable": self.image.bootable,
            "has_modules": self.image.has_modules,
            "image": self.image.path,
            "image_error": self.image.error,
            "file_inside": self.file_inside,
            "nouveau_inside": self.image.nouveau,
            "stale": self.stale,
            "candidates": None if self.candidates is None else list(self.candidates),
            "resolves_to": None if self.resolves_to is None else list(self.resolves_to),
        }


@dataclass
class State:
    """What was read. ``file`` is the content of our file (null: absent), ``users`` how often nouveau is in use."""

    file: str | None
    others: list[str]
    kernels: list[KernelState]
    loaded: bool
    users: int | None
    display: list[str]
    forced: list[str]
    tools: Tools

    @property
    def stale(self) -> list[KernelState]:
        return [kernel for kernel in self.kernels if kernel.stale]

    def off(self) -> bool:
        """Whether nothing is left to do before a boot."""
        return self.file == CONTENT and not any(kernel.rebuildable for kernel in self.stale)


def read(machine: Machine, modalias: str = modprobe.V100) -> State:
    """Read the machine; lists every image."""
    known = initramfs.tools(machine)
    configured = modprobe.configuration(machine)
    content = machine.read(PATH)
    loaded = modprobe.is_loaded(machine, "nouveau")
    return State(
        file=content,
        others=[path for path in configured.keeps_away("nouveau") if path != PATH],
        kernels=_kernels(machine, known, configured, modalias),
        loaded=loaded,
        users=modprobe.users(machine, "nouveau") if loaded else None,
        display=display_needs(machine) if loaded else [],
        forced=modprobe.forced(machine, "nouveau"),
        tools=known,
    )


def _kernels(machine: Machine, known: Tools, configured: modprobe.Configuration, modalias: str) -> list[KernelState]:
    try:
        written = machine.path(PATH).stat().st_mtime_ns
    except OSError:
        written = None
    found = []
    for image in initramfs.images(machine, known):
        inside = image.carries(PATH)
        stale: bool | None = None
        if image.path is not None:
            # An image older than the file has the file's former text in it, if any.
            older = written is not None and image.written_ns is not None and image.written_ns + _COARSE_NS < written
            stale = inside is not True or older
        known_by = modprobe.candidates(machine, image.kernel, modalias, configured)
        resolved = modprobe.allowed(known_by, configured)
        found.append(
            KernelState(
                image,
                inside,
                stale,
                None if known_by is None else tuple(known_by),
                None if resolved is None else tuple(resolved),
            )
        )
    return found


def display_needs(machine: Machine) -> list[str]:
    """Why the machine's display needs nouveau; empty for a server whose cards drive none."""
    reasons = []
    consoles = [
        name
        for name in machine.listdir("/sys/class/graphics")
        if re.fullmatch(r"fb\d+", name)
        and (machine.read(f"/sys/class/graphics/{name}/name") or "").strip().startswith("nouveau")
    ]
    if consoles and not _other_displays(machine):
        reasons.append(f"the console is on nouveau ({', '.join(consoles)}) and there is no other display device")
    cards = [
        name for name in machine.listdir("/sys/class/drm") if _driver(machine, f"/sys/class/drm/{name}") == "nouveau"
    ]
    nodes = {f"/dev/dri/{name}" for name in cards}
    holders = _holders(machine, nodes) if nodes else []
    if holders:
        reasons.append(f"{', '.join(holders)} {'has' if len(holders) == 1 else 'have'} a device of nouveau open")
    return reasons


def _driver(machine: Machine, folder: str) -> str | None:
    try:
        return os.path.basename(os.readlink(machine.path(f"{folder}/device/driver")))  # noqa: PTH115, PTH119
    except OSError:
        return None


def _other_displays(machine: Machine) -> list[str]:
    """Display devices that are not NVIDIA's, such as a server's management controller."""
    found = []
    for name in machine.listdir("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{name}"
        kind = (machine.read(f"{folder}/class") or "").strip()
        vendor = (machine.read(f"{folder}/vendor") or "").strip()
        if kind.startswith(_DISPLAY_CLASS) and vendor != "0x10de":
            found.append(name)
    return found


def _holders(machine: Machine, nodes: set[str]) -> list[str]:
    """Programs that have one of the device nodes open, such as a display server."""
    found: dict[str, None] = {}
    for pid in filter(str.isdigit, machine.listdir("/proc")):
        for handle in machine.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(machine.path(f"/proc/{pid}/fd/{handle}"))  # noqa: PTH115
            except OSError:
                continue
            if target in nodes:
                name = (machine.read(f"/proc/{pid}/comm") or "").strip() or "a program"
                found[f"{name} (pid {pid})"] = None
                break
    return list(found)


@dataclass
class Outcome:
    """``changes`` in words; ``reboot_required`` says why nouveau goes only with a reboot, null where it need not."""

    before: State
    after: State
    changes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    reboot_required: str | None = None


def report(state: State) -> list[Fault]:
    """What is worth telling of a machine as it is."""
    faults = []
    for kernel in state.kernels:
        image = kernel.image
        if image.path and not image.has_modules:
            faults.append(
                FAULTS.fault(
                    "initramfs_orphaned",
                    image.path,
                    f"there is no /lib/modules/{image.kernel}",
                    f"remove it where the kernel is gone for good: update-initramfs -d -k {image.kernel}",
                )
            )
        elif not image.path and image.bootable and any(other.image.path for other in state.kernels):
            faults.append(
                FAULTS.fault(
                    "initramfs_missing",
                    image.kernel,
                    "has no image in /boot",
                    f"update-initramfs -c -k {image.kernel}, or remove that kernel",
                )
            )
    return faults


def disable(
    machine: Machine,
    modalias: str = modprobe.V100,
    allow_display: bool = False,
    unload: bool = True,
    check: bool = False,
) -> Outcome:
    """Bring the machine to where nouveau does not load. Nothing is touched where a display needs it."""
    before = read(machine, modalias)
    outcome = Outcome(before, before, faults=report(before))
    if before.display and not allow_display:
        outcome.faults.append(
            FAULTS.fault(
                "nouveau_needed_by_display",
                "nouveau",
                "; ".join(before.display),
                "Stop what shows on it, give the machine another display device, or write `allow_display: true` where "
                "the display may go dark. Nothing was changed.",
            )
        )
        return outcome
    for path in before.forced:
        outcome.faults.append(
            FAULTS.fault("nouveau_loaded_by_name", path, "names nouveau", f"Remove that line from {path}.")
        )
    stale = [kernel for kernel in before.kernels if kernel.image.path and kernel.rebuildable and kernel.stale]
    if before.file != CONTENT:
        outcome.changes.append(f"wrote {PATH}")
        # Whatever an image says of the former text, it has not the new one.
        stale = [kernel for kernel in before.kernels if kernel.image.path and kernel.rebuildable]
    if stale and (before.tools.builder is None or before.tools.lister is None):
        outcome.changes.clear()
        wanted = "update-initramfs nor dracut" if before.tools.builder is None else "lsinitramfs nor lsinitrd"
        outcome.faults.append(
            FAULTS.fault(
                "initramfs_tool_missing",
                "initramfs",
                f"neither {wanted} is installed; images: {', '.join(str(kernel.image.path) for kernel in stale)}",
                "apt-get install initramfs-tools, or have the images made by dracut",
            )
        )
        return outcome
    outcome.changes += [f"rebuilt {kernel.image.path}" for kernel in stale]
    if check:
        outcome.reboot_required = _why_reboot(before, unload)
        if before.loaded and outcome.reboot_required is None:
            outcome.changes.append("unloaded nouveau")
        return outcome
    if before.file != CONTENT and not _write(machine, outcome):
        return outcome
    if not _rebuild(machine, before.tools, stale, modalias, outcome):
        return outcome
    _unload(machine, before, unload, outcome)
    outcome.after = read(machine, modalias) if outcome.changes else before
    return outcome


def _write(machine: Machine, outcome: Outcome) -> bool:
    target = machine.path(PATH)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, CONTENT.encode())
    except OSError as exc:
        outcome.changes.clear()
        outcome.faults.append(
            FAULTS.fault(
                "nouveau_file_not_written",
                PATH,
                exc.strerror or str(exc),
                "Run as root on a writable file system.",
            )
        )
        return False
    return True


def _rebuild(machine: Machine, known: Tools, stale: Sequence[KernelState], modalias: str, outcome: Outcome) -> bool:
    """Make the images anew and look into them; whether all carry the file now."""
    said = {}
    failed = set()
    builder = known.builder or ""
    for kernel in stale:
        done = initramfs.build(machine, builder, kernel.image)
        said[kernel.image.kernel] = done.why
        if not done.ok:
            failed.add(kernel.image.kernel)
            command = " ".join(initramfs.build_command(builder, kernel.image))
            outcome.changes.remove(f"rebuilt {kernel.image.path}")
            outcome.faults.append(
                FAULTS.fault(
                    "initramfs_rebuild_failed",
                    str(kernel.image.path),
                    f"{command}: {said[kernel.image.kernel]}",
                    "Make room in /boot (df -h /boot) or correct what it names, then run again: only images that are "
                    "still stale are made anew.",
                )
            )
    if not stale:
        return True
    outcome.after = read(machine, modalias)
    for kernel in outcome.after.stale:
        name = kernel.image.kernel
        if name in said and name not in failed:
            outcome.faults.append(
                FAULTS.fault(
                    "initramfs_stale",
                    str(kernel.image.path),
                    f"{_stale_words(kernel)}; {builder} said: {said[name]}",
                    "Look for update_initramfs=no below /etc/initramfs-tools, and for a read-only /boot."
                    if builder != "dracut"
                    else f'Write install_items+=" {PATH} " to a file in /etc/dracut.conf.d.',
                )
            )
            failed.add(name)
    return not failed


def _stale_words(kernel: KernelState) -> str:
    if kernel.image.error:
        return f"cannot be read ({kernel.image.error})"
    return f"does not have {PATH} in it" if not kernel.file_inside else f"is older than {PATH}"


def _why_reboot(state: State, unload: bool) -> str | None:
    if not state.loaded:
        return None
    if state.display:
        return f"nouveau is loaded and in use: {'; '.join(state.display)}"
    if not unload:
        return "nouveau is loaded, and unloading it was not asked for"
    if state.users is not None and state.users > 0:
        return f"nouveau is loaded and in use ({state.users} users)"
    return None


def _unload(machine: Machine, before: State, unload: bool, outcome: Outcome) -> None:
    if not before.loaded:
        return
    outcome.reboot_required = _why_reboot(before, unload)
    if outcome.reboot_required is not None:
        return
    done = machine.run(["rmmod", "nouveau"])
    if modprobe.is_loaded(machine, "nouveau"):
        outcome.reboot_required = f"nouveau could not be unloaded: {done.why}"
    else:
        outcome.changes.append("unloaded nouveau")
