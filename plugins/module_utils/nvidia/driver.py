# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The state of the NVIDIA driver on a machine, and one verdict with the commands that mend it.

Three versions matter: the loaded module, the module on disk for the kernel that boots next, the libraries. Loaded
differs from disk: a reboot helps. Disk differs from the libraries: it does not, the module must be built anew.
Everything here only reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..apt import kernel_set, status
from ..boot import initramfs, modprobe
from ..faults import DRIVER_PACKAGES_BROKEN, Catalogue, Fault, FaultKind, by_severity
from ..machine import Machine
from . import dkms, kernel_log, modinfo, packages
from .inventory import pci_devices
from .kernels import Kernels, kernels
from .packages import Package, Pin, Upgrade
from .products import compute_capability_of
from .values import version_key

#: The role reboot_gate reports it too, for whatever needs a boot.
REBOOT_REQUIRED = FaultKind(
    "reboot_required",
    "critical",
    "What is installed takes effect with the next boot only: another module than the loaded one, another kernel, a "
    "blacklist that came after nouveau was loaded.",
    "loaded 550.90.07, installed 550.107.02 (upgraded on 2024-08-01 06:11:05 by unattended-upgrade)",
)

FAULTS = Catalogue(
    "driver (driver_state)",
    (
        FaultKind(
            "driver_without_gpu_on_bus",
            "critical",
            "The PCI bus shows no NVIDIA GPU, so no driver can help.",
            "no NVIDIA GPU (class 0300 or 0302 of vendor 10de) is on the PCI bus",
        ),
        FaultKind(
            "driver_state_unknown",
            "critical",
            "Nothing that tells about the driver could be read, so there is nothing to judge.",
            "neither /sys/bus/pci/devices nor /proc/driver/nvidia can be read below /tmp/empty",
        ),
        DRIVER_PACKAGES_BROKEN,
        FaultKind(
            "driver_wrong_flavour",
            "critical",
            "The open kernel module does not support this GPU.",
            "the loaded module 535.261.03 is the open flavour, which does not support Volta (0000:af:00.0, 10de:1db5)",
        ),
        FaultKind(
            "driver_not_installed",
            "critical",
            "No part of the NVIDIA driver is on the machine.",
            "4 NVIDIA GPUs are on the PCI bus, no driver is installed",
        ),
        FaultKind(
            "driver_mixed_branches",
            "critical",
            "Packages or libraries of different driver branches are installed side by side.",
            "installed branches: 535 (libnvidia-compute-535), 570 (nvidia-utils-570)",
        ),
        FaultKind(
            "driver_package_of_other_branch",
            "warning",
            "A package whose name promises one driver branch brings another: it has become a transitional package.",
            "nvidia-driver-495 510.47.03-0ubuntu0.20.04.1 is of branch 510",
        ),
        FaultKind(
            "nouveau_loaded",
            "critical",
            "The nouveau driver is loaded and owns the GPUs; the NVIDIA driver cannot have them.",
            "nouveau is loaded; its blacklist is missing from the initramfs of 5.15.0-91-generic",
        ),
        FaultKind(
            "nouveau_can_load",
            "warning",
            "Nothing keeps nouveau from taking the GPUs at the next boot.",
            "nouveau is not blacklisted and its module is on disk",
        ),
        FaultKind(
            "driver_module_refused",
            "critical",
            "Secure Boot is on and the kernel refuses the module, whose signature is missing or not trusted.",
            "Secure Boot is on and the nvidia module of 6.1.0-37-amd64 is not signed",
        ),
        FaultKind(
            "driver_module_unsigned",
            "warning",
            "Secure Boot is on and the module that boots next carries no signature.",
            "Secure Boot is on; the module for 6.1.0-38-amd64 is not signed, so it will not load there",
        ),
        FaultKind(
            "driver_module_missing",
            "critical",
            "The libraries are installed, the kernel that boots next has no module for them.",
            "no nvidia module for 6.8.0-60-generic, which boots next; dkms: nvidia/535.288.01 is only added",
        ),
        FaultKind(
            "driver_module_incomplete",
            "critical",
            "Parts of the driver's modules are missing for the kernel that boots next.",
            "nvidia_uvm is missing for 6.8.0-60-generic",
        ),
        FaultKind(
            "driver_module_differs",
            "critical",
            "The module on disk is of another version than the libraries; a reboot does not help.",
            "the module on disk is 570.124.06, the libraries are 570.124.04",
        ),
        FaultKind(
            "driver_module_missing_elsewhere",
            "warning",
            "A kernel that can be booted, though not the next one, has no module of the driver.",
            "no nvidia module for 5.15.0-91-generic, which can be booted from the menu",
        ),
        FaultKind(
            "driver_module_stale",
            "critical",
            "DKMS says that the installed module is not the one it built.",
            "nvidia/535.261.03 for 6.1.0-37-amd64: installed (WARNING! Diff between built and installed module!)",
        ),
        REBOOT_REQUIRED,
        FaultKind(
            "driver_not_loaded",
            "critical",
            "The driver is installed for the running kernel and is not loaded.",
            "module 535.261.03 is on disk for 6.1.0-37-amd64 and not loaded",
        ),
        FaultKind(
            "driver_run_install",
            "warning",
            "The driver came from NVIDIA's .run file; packages laid over it drift apart at the next upgrade.",
            "/usr/bin/nvidia-uninstall exists although driver packages are installed (nvidia-fabricmanager-535)",
        ),
        FaultKind(
            "driver_library_leftover",
            "warning",
            "Libraries of an earlier driver version are still on disk.",
            "libnvidia-ml.so of 470.57.02 beside 535.261.03",
        ),
        FaultKind(
            "fabric_manager_differs",
            "critical",
            "Fabric Manager must be of the very version of the driver on a machine with NVSwitch.",
            "Fabric Manager is 530.30.02, the driver is 530.41.03",
        ),
        FaultKind(
            "fabric_manager_missing",
            "critical",
            "The machine has NVSwitch and no Fabric Manager; CUDA does not start there.",
            "6 NVSwitch devices are on the PCI bus, nvidia-fabricmanager is not installed",
        ),
        FaultKind(
            "gpu_off_the_bus",
            "critical",
            "The kernel log says that a GPU fell off the bus.",
            "0000:b3:00.0 has fallen off the bus (no Xid was written)",
        ),
        FaultKind(
            "gpu_init_failed",
            "error",
            "The driver could not initialize a GPU.",
            "0000:07:00.0: RmInitAdapter failed",
        ),
        FaultKind(
            "gpu_xid_hardware",
            "error",
            "The kernel log has Xid numbers that point to hardware or call for a reset.",
            "Xid 48 (double bit ECC error) on 0000:1a:00.0, 2 times since boot",
        ),
        FaultKind(
            "gpu_xid_other",
            "warning",
            "The kernel log has Xid numbers that mostly come from programs, or that only inform.",
            "Xid 31 (GPU memory page fault) on 0000:1a:00.0, once since boot, program python3 (4242)",
        ),
        FaultKind(
            "kernel_log_unreadable",
            "warning",
            "The kernel log could not be read, so nothing is known about Xid errors.",
            "neither journalctl -k nor dmesg could be read: Operation not permitted",
        ),
    ),
)

VERDICTS = (
    "no_gpu",
    "repair_packages",
    "wrong_flavour",
    "not_installed",
    "mixed_branches",
    "blacklist_nouveau",
    "enroll_key",
    "rebuild_module",
    "reinstall",
    "reboot_required",
    "load_module",
    "fix_fabric_manager",
    "replace_hardware",
    "reset_gpu",
    "unknown",
    "ok",
)

#: What follows from other faults, by code: where one of these was found too, the remedy is theirs.
CONSEQUENCES = {
    "driver_not_loaded": ("driver_wrong_flavour", "driver_module_refused"),
    "reboot_required": ("driver_wrong_flavour", "driver_module_refused"),
    "gpu_init_failed": ("driver_wrong_flavour",),
}

_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/powerpc64le-linux-gnu",
    "/usr/lib/powerpc64le-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)
_LIBRARY = re.compile(r"^libnvidia-ml\.so\.(\d{3}\.\d+(?:\.\d+)?)$")
_NVRM = re.compile(r"NVRM version:\s*(?P<text>.*?)\s+(?P<version>\d{3}\.\d+(?:\.\d+)?)\b")
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
#: NVSwitch devices by PCI id (pci.ids); class 0680.
_NVSWITCHES = {"1ac0", "1ac1", "1ac2", "1af1", "22a3", "22a4", "22a8"}


@dataclass(frozen=True)
class Loaded:
    """The loaded nvidia module; ``flavour`` is open, proprietary, or null where it does not say."""

    version: str | None
    flavour: str | None


@dataclass(frozen=True)
class Nouveau:
    """``blacklisted_by`` names files and kernel arguments; ``initramfs`` whether the next kernel's image carries the
    blacklist and the module (null: not looked at, or not to be told).
    """

    loaded: bool
    on_disk: bool | None
    blacklisted_by: tuple[str, ...]
    initramfs_blacklist: bool | None = None
    initramfs_module: bool | None = None

    @property
    def can_load(self) -> bool | None:
        """Whether it would load at the next boot; null where that is not known."""
        if self.on_disk is False and not self.initramfs_module:
            return False
        if not self.blacklisted_by:
            return True if self.on_disk else None
        return self.initramfs_blacklist is False and bool(self.initramfs_module)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "blacklisted_by": list(self.blacklisted_by), "can_load": self.can_load}


@dataclass
class DriverState:
    """Everything that was read; see the module's RETURN for the meaning of each part."""

    gpus: list[dict[str, Any]] = field(default_factory=list)
    loaded: Loaded = field(default_factory=lambda: Loaded(None, None))
    kernels: Kernels = field(default_factory=lambda: Kernels(None, None, None))
    module_running: modinfo.Module | None = None
    module_next: modinfo.Module | None = None
    modules: dict[str, modinfo.Module | None] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    packages: list[Package] | None = None
    installed: list[status.Installed] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)
    dkms: dkms.DkmsStatus | None = None
    nouveau: Nouveau = field(default_factory=lambda: Nouveau(False, None, ()))
    secure_boot: bool | None = None
    run_install: tuple[str, ...] = ()
    nvswitches: int = 0
    fabric_manager: str | None = None
    upgrade: Upgrade | None = None
    log: kernel_log.KernelLog | None = None
    log_source: str | None = None
    log_error: str | None = None
    distribution: str = ""
    unknown: list[str] = field(default_factory=list)

    @property
    def userland(self) -> str | None:
        """Version of the libraries: of libnvidia-ml on disk (never of NVML's own shortened words), newest first."""
        return self.libraries[0] if self.libraries else None

    @property
    def volta(self) -> list[str]:
        return [gpu["bus_id"] for gpu in self.gpus if compute_capability_of(gpu["pci_id"]) == "7.0"]

    def driver_packages(self) -> list[Package]:
        return [package for package in self.packages or [] if not packages.is_kernel(package)]


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def read(machine: Machine, look_into_initramfs: bool | None = None) -> DriverState:
    """Read the machine. The initramfs is listed when asked, or (null) when nouveau is loaded: that takes seconds."""
    state = DriverState()
    state.gpus = [
        {"bus_id": device.bus_id, "pci_id": device.pci_id, "driver": device.driver} for device in pci_devices(machine)
    ]
    state.loaded = loaded(machine)
    state.kernels = kernels(machine)
    if state.kernels.running:
        state.module_running = modinfo.on_disk(machine, state.kernels.running)
    if state.kernels.next == state.kernels.running:
        state.module_next = state.module_running
    elif state.kernels.next:
        state.module_next = modinfo.on_disk(machine, state.kernels.next)
    read_already = {state.kernels.running: state.module_running, state.kernels.next: state.module_next}
    for kernel in state.kernels.installed:
        # Of a kernel without its folder (a report of a part of a machine) nothing is known.
        if kernel in read_already or machine.exists(f"/lib/modules/{kernel}"):
            known = kernel in read_already
            state.modules[kernel] = read_already[kernel] if known else modinfo.on_disk(machine, kernel)
    state.libraries = libraries(machine)
    # A report can hold a part of a machine only: what was not looked at is not absent.
    for what, folders in (
        ("PCI bus", ("/sys/bus/pci/devices",)),
        ("libraries", _LIBRARY_FOLDERS),
        ("kernel", ("/proc/sys/kernel/osrelease",)),
    ):
        if not any(machine.exists(folder) for folder in folders):
            state.unknown.append(what)
    # A container, or a machine that is booted from outside, has no kernel of its own, hence no module on disk.
    own_kernel = any(machine.exists(f"/lib/modules/{name}") for name in (state.kernels.running, state.kernels.next))
    if state.module_running is None and state.module_next is None and not own_kernel:
        state.unknown.append("module on disk")
    state.packages = packages.installed_packages(machine)
    state.installed = status.installed(machine) or []
    state.pins = packages.pins(machine)
    answer = machine.run(["dkms", "status"])
    if not answer.missing and not answer.timed_out:
        state.dkms = dkms.parse((answer.stdout + "\n" + answer.stderr).splitlines())
    state.secure_boot = secure_boot(machine)
    state.nouveau = nouveau(machine, state.kernels.next, look_into_initramfs)
    state.run_install = run_install(machine)
    state.nvswitches = nvswitches(machine)
    for package in state.packages or []:
        if package.installed and package.name.startswith("nvidia-fabricmanager"):
            state.fabric_manager = ".".join(re.findall(r"\d+", re.sub(r"^\d+:|[-+~].*$", "", package.version)))
    state.distribution = _distribution(machine)
    _read_log(machine, state)
    if state.loaded.version and state.userland and not _same(state.loaded.version, state.userland):
        state.upgrade = packages.change_to(packages.history(machine), state.userland)
    return state


def loaded(machine: Machine) -> Loaded:
    """Version and flavour of the loaded module, by what it says of itself in /proc."""
    text = machine.read("/proc/driver/nvidia/version") or ""
    match = _NVRM.search(text)
    if match:
        return Loaded(match["version"], "open" if "open kernel module" in match["text"].lower() else "proprietary")
    version = (machine.read("/sys/module/nvidia/version") or "").strip()
    return Loaded(version or None, None)


def library_folders(machine: Machine) -> tuple[str, ...]:
    """Where libraries lie: the usual folders and those of the dynamic linker's configuration.

    Machines whose host hands in the driver keep it elsewhere (measured: /usr/local/nvidia/lib64, named by
    /etc/ld.so.conf.d).
    """
    named = []
    files = ["/etc/ld.so.conf", *(f"/etc/ld.so.conf.d/{name}" for name in machine.listdir("/etc/ld.so.conf.d"))]
    for path in files:
        for line in (machine.read(path) or "").splitlines():
            folder = line.split("#", 1)[0].strip()
            if folder.startswith("/") and machine.exists(folder):
                named.append(folder.rstrip("/"))
    return tuple(dict.fromkeys((*_LIBRARY_FOLDERS, *named)))


def libraries(machine: Machine) -> tuple[str, ...]:
    """Versions of libnvidia-ml on disk, newest first; links like libnvidia-ml.so.1 do not count."""
    found = set()
    for folder in library_folders(machine):
        for name in machine.listdir(folder):
            match = _LIBRARY.match(name)
            if match:
                found.add(match[1])
    return tuple(sorted(found, key=version_key, reverse=True))


def secure_boot(machine: Machine) -> bool | None:
    """Whether Secure Boot is on: from the firmware's variable; false on a machine without UEFI."""
    if not machine.exists("/sys/firmware/efi"):
        return False if machine.exists("/sys/firmware") else None
    value = machine.read(_SECURE_BOOT)
    if value:
        # Four bytes of attributes, then 0 or 1.
        return value[-1] == "\x01"
    answer = machine.run(["mokutil", "--sb-state"])
    if answer.ok:
        return "enabled" in answer.stdout.lower()
    return None


def nouveau(machine: Machine, kernel: str | None, look_into_initramfs: bool | None) -> Nouveau:
    """Whether nouveau is loaded, and what keeps it from loading at the next boot."""
    is_loaded = modprobe.is_loaded(machine, "nouveau")
    by = modprobe.configuration(machine).keeps_away("nouveau")
    arguments = (machine.read("/proc/cmdline") or "").split()
    for argument in arguments:
        key, _, value = argument.partition("=")
        if (key in ("modprobe.blacklist", "module_blacklist") and "nouveau" in value.split(",")) or argument in (
            "nouveau.modeset=0",
            "rd.driver.blacklist=nouveau",
        ):
            by.append(f"kernel argument {argument}")
    # /usr/lib/modprobe.d and /lib/modprobe.d are one folder on a merged system.
    by = list(dict.fromkeys(path.replace("/usr/lib/modprobe.d/", "/lib/modprobe.d/") for path in by))
    on_disk = None
    if kernel:
        dependencies = machine.read(f"/lib/modules/{kernel}/modules.dep")
        if dependencies is not None:
            on_disk = bool(re.search(r"(?:^|/)nouveau\.ko\S*:", dependencies, re.M))
    blacklist = module = None
    if kernel and (look_into_initramfs or (look_into_initramfs is None and is_loaded)):
        blacklist, module = _initramfs(machine, kernel, by)
    return Nouveau(is_loaded, on_disk, tuple(by), blacklist, module)


def _initramfs(machine: Machine, kernel: str, files: Sequence[str]) -> tuple[bool | None, bool | None]:
    """Whether the image for ``kernel`` carries one of the blacklist files, and nouveau itself."""
    image = f"/boot/initrd.img-{kernel}"
    if machine.exists(f"/boot/vmlinuz-{kernel}") and not machine.exists(image) and not machine.is_capture:
        # Booted without an initramfs: the files on disk are what counts. (A capture does not hold the image.)
        return None, False
    names, _ = initramfs.listing(machine, initramfs.tools(machine).lister, image)
    if names is None:
        return None, None
    listed = any(initramfs.carries(names, path) for path in files if path.startswith("/"))
    return listed, initramfs.has_nouveau(names)


def run_install(machine: Machine) -> tuple[str, ...]:
    """Traces of an installation by NVIDIA's .run file; only its uninstaller proves that it is still there."""
    if not machine.exists("/usr/bin/nvidia-uninstall"):
        return ()
    names = ("/usr/bin/nvidia-uninstall", "/usr/bin/nvidia-installer", "/var/log/nvidia-installer.log")
    return tuple(name for name in names if machine.exists(name))


def nvswitches(machine: Machine) -> int:
    count = 0
    for name in machine.listdir("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{name}"
        if (machine.read(f"{folder}/vendor") or "").strip() == "0x10de":
            device = (machine.read(f"{folder}/device") or "").strip().removeprefix("0x")
            count += device in _NVSWITCHES
    return count


def _distribution(machine: Machine) -> str:
    values = dict(
        line.split("=", 1) for line in (machine.read("/etc/os-release") or "").splitlines() if line.count("=") == 1
    )
    return f"{values.get('ID', '')} {values.get('VERSION_ID', '')}".replace('"', "").strip()


def _read_log(machine: Machine, state: DriverState) -> None:
    """The kernel log: of a simulated or copied root from its /dev/kmsg, live from the journal, else from dmesg."""
    if machine.is_capture or str(machine.sysroot) != "/":
        text = machine.read("/dev/kmsg") if machine.path("/dev/kmsg").is_file() else None
        if text is not None:
            state.log, state.log_source = kernel_log.parse(text), "/dev/kmsg"
            return
        if not machine.is_capture:
            # The log of this machine would be read as the other one's.
            state.log_error = "there is no /dev/kmsg below sysroot"
            return
    errors = []
    for argv in (["journalctl", "-k", "-b", "--no-pager", "-o", "short-iso"], ["dmesg"]):
        answer = machine.run(argv)
        if answer.ok and answer.stdout.strip() and not _no_entries(answer.stdout):
            state.log, state.log_source = kernel_log.parse(answer.stdout), " ".join(argv[:2])
            return
        errors.append(f"{argv[0]}: {_why(answer.stderr or answer.stdout, answer.timed_out, answer.missing)}")
    state.log_error = "; ".join(errors)


def _no_entries(text: str) -> bool:
    return text.strip() in ("-- No entries --", "-- No Entries --")


def _why(text: str, timed_out: bool, missing: bool) -> str:
    if timed_out:
        return "did not end in time"
    if missing:
        return "cannot be run"
    return text.strip().splitlines()[0][:160] if text.strip() else "says nothing"


def _same(a: str | None, b: str | None) -> bool:
    """Versions compare as numbers, field by field: 550.90.07 is not 550.107.02."""
    return a is not None and b is not None and version_key(a) == version_key(b)


# ---------------------------------------------------------------------------------------------------------------------
# Judging
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Judgement:
    """``verdict`` is the first of VERDICTS that applies; ``remedy`` mends that, in order."""

    verdict: str
    reason: str
    remedy: list[str]
    faults: list[Fault]


class _Findings:
    """Collects faults, and for each verdict the first reason and its commands."""

    def __init__(self) -> None:
        self._faults: list[tuple[int, Fault]] = []
        self.verdicts: dict[str, tuple[str, list[str]]] = {}

    def add(self, code: str, subject: str, message: str, commands: Sequence[str], verdict: str | None = None) -> None:
        rank = len(VERDICTS) if verdict is None else VERDICTS.index(verdict)
        self._faults.append((rank, FAULTS.fault(code, subject, message, "; ".join(commands))))
        if verdict is not None and verdict not in self.verdicts:
            self.verdicts[verdict] = (message, list(commands))

    def in_order(self) -> list[Fault]:
        """What has to be done first comes first; what follows from another fault points to it."""
        codes = {fault.code for _, fault in self._faults}
        shown = []
        for _, fault in sorted(self._faults, key=lambda item: item[0]):
            causes = [code for code in CONSEQUENCES.get(fault.code, ()) if code in codes]
            first = f"comes of {' and '.join(causes)}: mend that first, then run this again"
            shown.append(replace(fault, remedy=first) if causes else fault)
        return by_severity(shown)


def judge(state: DriverState) -> Judgement:
    """Every fault, and one verdict: what has to be done first."""
    found = _Findings()
    if "PCI bus" in state.unknown and state.loaded.version is None:
        found.add(
            "driver_state_unknown",
            "sysroot",
            "neither /sys/bus/pci/devices nor /proc/driver/nvidia can be read",
            ["name the root of a machine or of a capture as sysroot"],
            "unknown",
        )
    elif not state.gpus and state.loaded.version is None:
        found.add(
            "driver_without_gpu_on_bus",
            "PCI bus",
            "no NVIDIA GPU (class 0300 or 0302 of vendor 10de) is on the PCI bus",
            ["lspci -nn -d 10de:", "power the machine off; check seating and power of the cards"],
            "no_gpu",
        )
    _judge_packages(state, found)
    _judge_flavour(state, found)
    _judge_nouveau(state, found)
    _judge_versions(state, found)
    _judge_secure_boot(state, found)
    _judge_fabric_manager(state, found)
    _judge_leftovers(state, found)
    _judge_log(state, found)
    for verdict in VERDICTS:
        if verdict in found.verdicts:
            reason, remedy = found.verdicts[verdict]
            return Judgement(verdict, reason, remedy, found.in_order())
    reason = f"driver {state.loaded.version} is loaded and installed"
    if state.unknown:
        reason = f"driver {state.loaded.version} is loaded; not known: {', '.join(state.unknown)}"
    return Judgement("ok", reason, [], found.in_order())


def _judge_packages(state: DriverState, found: _Findings) -> None:
    of_kernels, rest = kernel_set.unfinished(
        state.installed, state.kernels, lambda release: state.modules.get(release) is not None
    )
    for stuck in of_kernels:
        found.add("driver_packages_broken", stuck.subject, stuck.message, [stuck.remedy], "repair_packages")
    # Whatever else dpkg left in the middle is no matter of driver or kernel.
    ours = {package.name for package in state.packages or []}
    for left in rest.packages if rest else ():
        if left.name in ours:
            log = f"/var/lib/dkms/nvidia/{left.version.split('-')[0]}/build/make.log"
            commands = ["dpkg --configure -a", "apt-get -f install"]
            if "dkms" in left.name:
                commands.insert(0, f"tail -n 30 {log}")
            found.add(
                "driver_packages_broken",
                left.name,
                f"{left.name} {left.version} is {left.state}",
                commands,
                "repair_packages",
            )
    for package in state.driver_packages():
        if package.installed and package.branch and package.named_branch not in (None, package.branch):
            found.add(
                "driver_package_of_other_branch",
                package.name,
                f"{package.name} {package.version} is of branch {package.branch}",
                [f"apt-cache policy {package.name}", f"pin {package.name} to a version of {package.named_branch}"],
            )
    branches: dict[str, list[str]] = {}
    for package in state.driver_packages():
        if package.installed and package.branch:
            branches.setdefault(package.branch, []).append(package.name)
    for version in state.libraries:
        branches.setdefault(version.split(".")[0], []).append(f"libnvidia-ml.so.{version}")
    if len(branches) > 1:
        text = "; ".join(
            f"{branch} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for branch, names in sorted(branches.items(), key=lambda item: int(item[0]))
        )
        keep = (state.loaded.version or state.userland or max(branches)).split(".")[0]
        foreign = sorted(
            {
                package.name
                for package in state.driver_packages()
                if package.installed and package.branch not in (None, keep)
            }
        )
        commands = ["apt-mark showhold", "apt-cache policy nvidia-driver-* nvidia-driver"]
        if foreign:
            commands.append(f"apt-get purge {' '.join(foreign)}")
        found.add("driver_mixed_branches", "driver packages", f"installed branches: {text}", commands, "mixed_branches")


def _judge_flavour(state: DriverState, found: _Findings) -> None:
    if not state.volta and not (state.log and state.log.unsupported_by_open):
        return
    cards = ", ".join(state.volta or (state.log.unsupported_by_open if state.log else []))
    where = None
    if state.loaded.flavour == "open":
        where = f"the loaded module {state.loaded.version} is"
    elif state.module_next is not None and state.module_next.flavour == "open":
        where = f"the module {state.module_next.version} on disk for {state.module_next.kernel} is"
    elif state.log is not None and state.log.unsupported_by_open and state.loaded.flavour is None:
        where = "the kernel log says that the module was"
    if where is None:
        return
    open_packages = [
        package.name for package in state.driver_packages() if package.installed and _is_open_name(package.name)
    ]
    commands = [f"apt-get purge {' '.join(open_packages)}"] if open_packages else []
    commands += [_install_command(state), "reboot"]
    found.add(
        "driver_wrong_flavour",
        "nvidia module",
        f"{where} the open flavour, which does not support Volta: it needs a GPU System Processor ({cards})",
        commands,
        "wrong_flavour",
    )


def _is_open_name(name: str) -> bool:
    return name.endswith("-open") or "-open-" in name


def _install_command(state: DriverState) -> str:
    """The proprietary driver 535 under the names of this distribution."""
    if state.distribution.startswith("ubuntu"):
        return "apt-get install --no-install-recommends nvidia-driver-535-server"
    if state.distribution == "debian 13":
        return "apt-get install --no-install-recommends nvidia-tesla-535-driver"
    return "apt-get install --no-install-recommends nvidia-driver"


def _judge_nouveau(state: DriverState, found: _Findings) -> None:
    nouveau_state = state.nouveau
    blacklist = "printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' > /etc/modprobe.d/volta-nouveau.conf"
    rebuild = "update-initramfs -u -k all"
    steps = [] if any(by.startswith("/") for by in nouveau_state.blacklisted_by) else [blacklist]
    if nouveau_state.loaded and state.gpus:
        if not nouveau_state.blacklisted_by:
            why = "it is not blacklisted"
        elif nouveau_state.initramfs_blacklist is False and nouveau_state.initramfs_module:
            why = f"its blacklist is missing from the initramfs of {state.kernels.next}"
        else:
            why = "its blacklist came after it was loaded"
        # The next boot is without it where the image has its blacklist or not the module: nothing else is left to do.
        in_image = nouveau_state.initramfs_module is not False and nouveau_state.initramfs_blacklist is not True
        done = bool(nouveau_state.blacklisted_by) and not in_image
        verdict = "reboot_required" if done else "blacklist_nouveau"
        found.add(
            "nouveau_loaded",
            "nouveau",
            f"nouveau is loaded and owns the GPUs; {why}",
            ["reboot"] if done else [*steps, rebuild, "reboot"],
            verdict if state.userland or state.module_next or state.module_running else None,
        )
    elif nouveau_state.can_load and state.gpus:
        message = (
            "nouveau is not blacklisted and its module is on disk"
            if not nouveau_state.blacklisted_by
            else f"the blacklist of nouveau is missing from the initramfs of {state.kernels.next}"
        )
        found.add("nouveau_can_load", "nouveau", message, [*steps, rebuild])


def _judge_versions(state: DriverState, found: _Findings) -> None:
    """Loaded, on disk and libraries against each other."""
    kernel = state.kernels.next
    module, library, running = state.module_next, state.userland, state.loaded.version
    if "libraries" in state.unknown or ("module on disk" in state.unknown and module is None and library and running):
        _judge_loaded(state, found, module)
        return
    if library is None and module is None and state.module_running is None and running is None:
        if state.gpus:
            found.add(
                "driver_not_installed",
                "NVIDIA driver",
                f"{len(state.gpus)} NVIDIA GPU{'s are' if len(state.gpus) != 1 else ' is'} on the PCI bus, "
                "no driver is installed",
                [_install_command(state), "reboot"],
                "not_installed",
            )
        return
    if library is not None and module is None:
        source = _dkms_word(state, kernel, library)
        found.add(
            "driver_module_missing",
            kernel or "kernel",
            f"libraries {library} are installed, no nvidia module for {kernel}, which boots next{source}",
            _rebuild_commands(state, library, kernel),
            "rebuild_module",
        )
        return
    for other, found_there in state.modules.items():
        if library is not None and found_there is None and other != kernel:
            found.add(
                "driver_module_missing_elsewhere",
                other,
                f"no nvidia module for {other}, which can be booted from the menu{_dkms_word(state, other, library)}",
                _rebuild_commands(state, library, other)[:-1],
            )
    if module is not None and module.missing:
        found.add(
            "driver_module_incomplete",
            module.kernel,
            f"{', '.join(module.missing)} {'is' if len(module.missing) == 1 else 'are'} missing for {module.kernel}",
            _rebuild_commands(state, library or module.version or "", module.kernel),
            "rebuild_module",
        )
    for entry in state.dkms.for_kernel(kernel) if state.dkms and kernel else []:
        if entry.differs:
            found.add(
                "driver_module_stale",
                f"{entry.name}/{entry.version}",
                f"{entry.name}/{entry.version} for {entry.kernel}: {entry.state} {entry.note}",
                [
                    f"dkms uninstall -m {entry.name} -v {entry.version} -k {entry.kernel}",
                    f"dkms install --force -m {entry.name} -v {entry.version} -k {entry.kernel}",
                    f"update-initramfs -u -k {entry.kernel}",
                ],
                "rebuild_module",
            )
    if module is not None and module.version and library and not _same(module.version, library):
        # The source of the libraries' version is at hand with DKMS or prebuilt modules; otherwise one side must go.
        can_rebuild = bool(state.dkms and any(_same(version, library) for version in state.dkms.versions()))
        from_run = bool(state.run_install)
        commands = (
            _rebuild_commands(state, library, module.kernel)
            if can_rebuild and not from_run
            else _reinstall_commands(state, library)
        )
        found.add(
            "driver_module_differs",
            module.kernel,
            f"the module on disk for {module.kernel} is {module.version}, the libraries are {library}; "
            "a reboot does not help",
            commands,
            "rebuild_module" if can_rebuild and not from_run else "reinstall",
        )
        return
    if library is None:
        wanted = module.version if module is not None else None
        found.add(
            "driver_not_installed",
            "libraries",
            f"a kernel module is there ({wanted or running}), libnvidia-ml is not on disk",
            [_install_command(state)],
            "reinstall",
        )
    _judge_loaded(state, found, module)


def _judge_loaded(state: DriverState, found: _Findings, module: modinfo.Module | None) -> None:
    running = state.loaded.version
    installed = module.version if module is not None and module.version else state.userland
    if running is None:
        if state.nouveau.loaded or not state.gpus or installed is None:
            return
        if state.module_running is None and module is not None:
            found.add(
                "reboot_required",
                "kernel",
                f"the driver is built for {module.kernel}, which boots next; {state.kernels.running} runs without it",
                ["reboot"],
                "reboot_required",
            )
        else:
            found.add(
                "driver_not_loaded",
                "nvidia module",
                f"module {installed} is on disk for {state.kernels.running} and not loaded",
                ["modprobe nvidia", "modprobe nvidia-uvm", "journalctl -k -b | grep -i nvrm"],
                "load_module",
            )
        return
    if installed and not _same(running, installed):
        why = ""
        if state.upgrade is not None:
            names = ", ".join(name for name, _, _ in state.upgrade.packages[:2])
            by = "unattended-upgrade" if state.upgrade.unattended else state.upgrade.command or "apt"
            why = f" (upgraded on {state.upgrade.date} by {by}: {names})"
        found.add(
            "reboot_required",
            "nvidia module",
            f"loaded {running}, installed {installed}{why}",
            ["reboot"],
            "reboot_required",
        )


def _dkms_word(state: DriverState, kernel: str | None, library: str) -> str:
    """What DKMS says about the missing module, for the message."""
    if state.dkms is None:
        return ""
    for entry in state.dkms.entries:
        if _same(entry.version, library) and entry.kernel in (None, kernel):
            return f"; dkms: {entry.name}/{entry.version} is only {entry.state}" if not entry.built else ""
    return f"; dkms does not have {library}"


def _rebuild_commands(state: DriverState, version: str, kernel: str | None) -> list[str]:
    prebuilt = [p.name for p in state.packages or [] if p.installed and p.name.startswith("linux-modules-nvidia-")]
    entries = state.dkms.entries if state.dkms else []
    names = [entry.name for entry in entries if _same(entry.version, version)] or [entry.name for entry in entries]
    if not names and prebuilt:
        # linux-modules-nvidia-535-server-5.15.0-91-generic -> the same for the other kernel
        stem = re.sub(r"-\d+\.\d+\.\d+-.*$", "", prebuilt[0])
        return [f"apt-get install {stem}-{kernel}", "reboot"]
    name = names[0] if names else "nvidia-current" if state.distribution.startswith("debian") else "nvidia"
    headers = f"linux-headers-{kernel}"
    commands = [f"apt-get install {headers}"]
    commands.append(f"dkms install --force -m {name} -v {version} -k {kernel}")
    commands += [f"update-initramfs -u -k {kernel}", "reboot"]
    return commands


def _reinstall_commands(state: DriverState, version: str) -> list[str]:
    if state.run_install:
        return ["/usr/bin/nvidia-uninstall --silent", _install_command(state), "reboot"]
    names = sorted(p.name for p in state.driver_packages() if p.installed and p.branch and "dkms" in p.name)
    reinstall = f"apt-get install --reinstall {' '.join(names)}" if names else _install_command(state)
    return [reinstall, "reboot"]


def _judge_secure_boot(state: DriverState, found: _Findings) -> None:
    if not state.secure_boot:
        return
    enroll = [
        "mokutil --import /var/lib/dkms/mok.pub",
        "reboot (and confirm the key at the console: Enroll MOK)",
    ]
    module = state.module_running
    rejected = bool(state.log and state.log.module_rejected)
    if state.loaded.version is None and (rejected or (module is not None and module.signed is False)):
        state_of = (
            "not signed" if module is not None and module.signed is False else "signed with a key that is not trusted"
        )
        found.add(
            "driver_module_refused",
            "nvidia module",
            f"Secure Boot is on and the nvidia module of {state.kernels.running} is {state_of}",
            enroll,
            "enroll_key",
        )
    elif state.module_next is not None and state.module_next.signed is False and "reboot_required" in found.verdicts:
        found.add(
            "driver_module_refused",
            "nvidia module",
            f"Secure Boot is on and the nvidia module for {state.module_next.kernel} is not signed: the next boot "
            "would be without a driver",
            enroll,
            "enroll_key",
        )
    elif state.module_next is not None and state.module_next.signed is False:
        found.add(
            "driver_module_unsigned",
            "nvidia module",
            f"Secure Boot is on; the module for {state.module_next.kernel} is not signed, so it will not load there",
            enroll,
        )


def _judge_fabric_manager(state: DriverState, found: _Findings) -> None:
    if not state.nvswitches:
        return
    driver = state.userland or state.loaded.version
    branch = (driver or "535").split(".")[0]
    if state.fabric_manager is None:
        found.add(
            "fabric_manager_missing",
            "nvidia-fabricmanager",
            f"{state.nvswitches} NVSwitch devices are on the PCI bus, nvidia-fabricmanager is not installed",
            [f"apt-get install nvidia-fabricmanager-{branch}", "systemctl enable --now nvidia-fabricmanager"],
            "fix_fabric_manager",
        )
    elif driver and not _same(state.fabric_manager, driver):
        found.add(
            "fabric_manager_differs",
            "nvidia-fabricmanager",
            f"Fabric Manager is {state.fabric_manager}, the driver is {driver}",
            [f"apt-get install nvidia-fabricmanager-{branch}={driver}-*", "systemctl restart nvidia-fabricmanager"],
            "fix_fabric_manager",
        )


def _judge_leftovers(state: DriverState, found: _Findings) -> None:
    if state.run_install:
        beside = [p.name for p in state.driver_packages() if p.installed and p.branch]
        message = "/usr/bin/nvidia-uninstall exists: the driver came from a .run file"
        if beside:
            message += f", although driver packages are installed ({', '.join(beside[:3])})"
        found.add(
            "driver_run_install",
            "/usr/bin/nvidia-uninstall",
            message,
            ["/usr/bin/nvidia-uninstall", _install_command(state)],
        )
    same_branch = [v for v in state.libraries[1:] if v.split(".")[0] == (state.userland or "").split(".")[0]]
    if same_branch:
        found.add(
            "driver_library_leftover",
            "libnvidia-ml",
            f"libnvidia-ml.so of {', '.join(same_branch)} beside {state.userland}",
            ["dpkg -S /usr/lib/*/libnvidia-ml.so.*", "remove the files that no package owns"],
        )


def _judge_log(state: DriverState, found: _Findings) -> None:
    log = state.log
    if log is None:
        if state.log_error is not None:
            found.add("kernel_log_unreadable", "kernel log", f"the kernel log could not be read: {state.log_error}",
                      ["run as root; below a sysroot the log is read from dev/kmsg"])  # fmt: skip
        return
    numbered = {event.bus_id for event in log.xids if event.number == 79}
    power_cycle = [
        "poweroff (a warm reboot does not reset a card that is off the bus), then switch on again",
        "reseat the card, its riser and its power cables",
        "swap slots to tell card from slot; replace what stays bad",
    ]
    for card in log.lost:
        how = "Xid 79" if card in numbered else "no Xid was written"
        found.add("gpu_off_the_bus", card, f"{card} has fallen off the bus ({how})", power_cycle, "replace_hardware")
    for card in log.init_failed:
        if state.loaded.version is not None and log.mismatch is None:
            found.add("gpu_init_failed", card, f"{card}: RmInitAdapter failed", power_cycle, "replace_hardware")
    for event in log.xids:
        row = event.row
        times = "once" if event.count == 1 else f"{event.count} times"
        by = f", program {event.process}" if event.process else ""
        message = f"Xid {event.number} ({row.meaning}) on {event.bus_id}, {times} since boot{by}"
        if row.action == "replace":
            if event.bus_id not in log.lost:
                found.add("gpu_xid_hardware", event.bus_id or "GPU", message, [row.remedy], "replace_hardware")
        elif row.action == "reset":
            commands = [f"nvidia-smi --gpu-reset -i {event.bus_id}", "reboot where the reset is refused"]
            found.add("gpu_xid_hardware", event.bus_id or "GPU", message, [row.remedy], None)
            found.verdicts.setdefault("reset_gpu", (message, commands))
        else:
            found.add("gpu_xid_other", event.bus_id or "GPU", message, [row.remedy])


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


def _modules(state: DriverState) -> list[dict[str, Any]]:
    """Every kernel that can be booted, with its module and what DKMS says of it."""
    rows = []
    for kernel, module in state.modules.items():
        entries = state.dkms.for_kernel(kernel) if state.dkms else []
        rows.append(
            {
                "kernel": kernel,
                "running": kernel == state.kernels.running,
                "next": kernel == state.kernels.next,
                "version": module.version if module else None,
                "flavour": module.flavour if module else None,
                "signed": module.signed if module else None,
                "complete": None if module is None else not module.missing,
                "dkms": entries[0].state if entries else None,
            }
        )
    return rows


def as_results(state: DriverState, judgement: Judgement) -> dict[str, Any]:
    """What the module returns besides the faults."""
    log = state.log
    return {
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "remedy": judgement.remedy,
        "unknown": state.unknown,
        "gpus": state.gpus,
        "loaded": asdict(state.loaded),
        "kernels": state.kernels.as_dict(),
        "module_running": state.module_running.as_dict() if state.module_running else None,
        "module_next": state.module_next.as_dict() if state.module_next else None,
        "modules": _modules(state),
        "userland": {"version": state.userland, "libraries": list(state.libraries)},
        "packages": None if state.packages is None else [package.as_dict() for package in state.packages],
        "held": None if state.packages is None else sorted(p.name for p in state.packages if p.held),
        "pins": [asdict(pin) for pin in state.pins],
        "dkms": None if state.dkms is None else [entry.as_dict() for entry in state.dkms.entries],
        "dkms_messages": state.dkms.messages if state.dkms else [],
        "nouveau": state.nouveau.as_dict(),
        "secure_boot": state.secure_boot,
        "run_install": list(state.run_install),
        "nvswitches": state.nvswitches,
        "fabric_manager": state.fabric_manager,
        "upgrade": state.upgrade.as_dict() if state.upgrade else None,
        "kernel_log": None
        if log is None
        else {
            "source": state.log_source,
            "xids": [event.as_dict() for event in log.xids],
            "lost": log.lost,
            "lost_without_xid": log.lost_without_xid,
            "init_failed": log.init_failed,
            "unsupported_by_open": log.unsupported_by_open,
            "api_mismatch": None if log.mismatch is None else {"client": log.mismatch[0], "module": log.mismatch[1]},
            "module_rejected": log.module_rejected,
            "messages": log.messages[:50],
        },
        "kernel_log_error": state.log_error,
    }
