# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which installed packages are the kernel's: images, modules and headers of each release, and the metas above them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..faults import Fault
from ..nvidia import packages
from ..nvidia.kernels import Kernels
from ..nvidia.values import version_key
from .catalogue import CATALOGUE
from .status import Installed, Record

#: Packages of one kernel release. Debug symbols come to nobody unasked.
_VERSIONED = re.compile(
    r"^linux-(?P<part>image|modules|headers|buildinfo)-(?:unsigned-|extra-|uc-|ipu6-|iwlwifi-)*(?P<release>\d[^:]*?)(?:-unsigned)?$"
)
#: Headers that several flavours of a kernel share: linux-headers-5.15.0-91, linux-hwe-6.8-headers-6.8.0-60.
_HEADERS = re.compile(r"^linux-(?:[a-z0-9.-]+-)?headers-\d")
#: Meta packages as the distributions name them, for what is not installed, so that its dependencies are not at hand.
_META = re.compile(
    r"^linux-(?:(?P<part>image|headers|modules-extra|modules)-)?(?:generic|virtual|lowlatency|cloud|aws|azure|gcp|gke|gkeop"
    r"|oracle|ibm|kvm|oem|nvidia|intel|raspi|lowlatency|rt|amd64|arm64|686|hwe|signed|realtime|server)(?:-[a-z0-9.+-]+)?$"
)
#: Prebuilt modules of the driver. Each needs the image of its release, so that their meta packages bring kernels too.
_PREBUILT = re.compile(r"^linux-(?:modules|objects|signatures)-nvidia-")
#: What else is built from a kernel's source: libraries and tools for programs, firmware, documentation.
_OTHERS = re.compile(
    r"^linux-(?:libc-dev|tools|cloud-tools|base|firmware|doc|source|perf|cpupower|kbuild|compiler|config|support"
    r"|crashdump|sound-base|sysctl-defaults|bpf-dev|manual|debug)"
)
#: For unattended-upgrades: beginnings of names (it matches from the start, and a plain prefix is cheapest for it).
KERNEL_BLACKLIST = (
    "linux-headers-",
    "linux-image-",
    "linux-modules-",
    "linux-objects-nvidia-",
    "linux-signatures-nvidia-",
    "linux-generic",
    "linux-virtual",
    "linux-lowlatency",
)
DRIVER_BLACKLIST = (
    "cuda-",
    "firmware-nvidia-",
    "libcuda1",
    "libcudadebugger1",
    "libegl-nvidia",
    "libgl1-nvidia",
    "libgles-nvidia",
    "libglx-nvidia",
    "libnvcuvid1",
    "libnvidia-",
    "libnvoptix1",
    "libxnvctrl0",
    "linux-modules-nvidia-",
    "linux-objects-nvidia-",
    "linux-signatures-nvidia-",
    "nvidia-",
    "xserver-xorg-video-nvidia",
)


def release_of(name: str) -> str | None:
    """The kernel release of a versioned package: ``5.15.0-91-generic``."""
    match = _VERSIONED.match(name)
    if not match or packages.is_driver(name) or match["release"].endswith(("-dbg", "-dbgsym")):
        return None
    return match["release"]


def _is_versioned(name: str) -> bool:
    return release_of(name) is not None or bool(_HEADERS.match(name))


def kind_of(name: str, record: Record | None = None) -> str | None:
    """``kernel``, ``headers`` or null: by name, and where its record is known by what it leads to."""
    if not name.startswith("linux-") or packages.is_driver(name) or _OTHERS.match(name):
        return None
    if _HEADERS.match(name):
        return "headers"
    if release_of(name):
        return "headers" if name.startswith("linux-headers-") else "kernel"
    meta = _META.match(name)
    if meta:
        return "headers" if meta["part"] == "headers" else "kernel"
    led_to = {kind_of(other) for other in (record.leads_to() if record else ())}
    return "kernel" if "kernel" in led_to else "headers" if "headers" in led_to else None


@dataclass(frozen=True)
class KernelSet:
    """``metas`` and ``releases`` (release to packages) of what is installed, with their full names."""

    metas: tuple[str, ...] = ()
    releases: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def images(self) -> list[str]:
        """Releases whose image is installed, newest first."""
        found = [
            release
            for release, names in self.releases.items()
            if any(name.startswith("linux-image-") and release_of(name.split(":")[0]) == release for name in names)
        ]
        return sorted(found, key=version_key, reverse=True)


def kernel_set(installed: Sequence[Installed]) -> KernelSet:
    """Walk from the versioned packages up to the metas, and down to the headers that a release shares."""
    by_name = {package.name: package for package in installed}
    releases: dict[str, list[str]] = {}
    for package in installed:
        release = release_of(package.name)
        if release:
            releases.setdefault(release, []).append(package.full_name)
    for names in releases.values():
        for name in list(names):
            record = by_name.get(name.split(":")[0])
            names += [
                by_name[other].full_name
                for other in (record.leads_to() if record else ())
                if _HEADERS.match(other) and other in by_name and by_name[other].full_name not in names
            ]
    # Headers that several flavours share are no release of their own (linux-headers-5.15.0-91).
    shared = {
        release
        for release, names in releases.items()
        if any(other != release and set(names) < set(more) for other, more in releases.items())
    }
    releases = {release: names for release, names in releases.items() if release not in shared}
    metas: set[str] = set()
    while True:
        more = {
            package.full_name
            for package in installed
            if package.full_name not in metas
            and not _is_versioned(package.name)
            and not packages.is_driver(package.name)
            and not _OTHERS.match(package.name)
            and _leads(package, metas)
        }
        if not more:
            break
        metas |= more
    return KernelSet(tuple(sorted(metas)), {release: tuple(sorted(set(names))) for release, names in releases.items()})


def _leads(package: Installed, metas: Iterable[str]) -> bool:
    """Whether it brings a kernel: by a versioned package it needs, or, named as the kernel's, by another meta."""
    known = set(metas)
    for group in package.depends:
        if len(group) == 1 and _is_versioned(group[0]):
            return True
        if package.name.startswith("linux-") and group[0] in known:
            return True
    return False


def dependents(installed: Sequence[Installed], names: Iterable[str]) -> list[Installed]:
    """What is installed and could not be any more without these, by full names: first the nearest."""
    gone = set(names)
    there = {package.name for package in installed}
    found: list[Installed] = []

    def needs(package: Installed) -> bool:
        return any(
            gone.issuperset(left) for group in package.depends if (left := [name for name in group if name in there])
        )

    while more := [package for package in installed if package.name not in gone and needs(package)]:
        found += more
        gone |= {package.name for package in more}
    return found


def way_out(installed: Sequence[Installed], release: str) -> str:
    """What mends a kernel without a driver, as commands that apt takes in whatever state the packages are.

    apt refuses to remove what others depend on unless they are named too, and what is held without saying so. A kernel
    whose hook could not build the module stays half configured, and apt then configures nothing before it is finished.
    """
    names = [name.split(":")[0] for name in kernel_set(installed).releases.get(release, ())]
    of_release = [package for package in installed if package.name in names]
    along = dependents(installed, names)
    if any(package.unfinished for package in [*of_release, *along]):
        build = "mend what the build says (make.log below /var/lib/dkms), then: dpkg --configure -a"
    elif prebuilt := _prebuilt_stem(installed):
        build = f"build it: apt-get install {prebuilt}-{release}"
    else:
        build = f"build it: apt-get install linux-headers-{release} && dkms autoinstall -k {release}"
    if not names:
        return f"{build}; or take the kernel away: rm /boot/vmlinuz-{release} && update-grub"
    held = any(package.held for package in [*of_release, *along])
    words = ["apt-get", "remove", *(["--allow-change-held-packages"] if held else [])]
    words += [*dict.fromkeys(package.full_name for package in [*of_release, *along])]
    text = f"{build}; or take the kernel away: {' '.join(words)}"
    if along:
        text += f"; install {', '.join(p.name for p in along)} again when a kernel has a driver"
    return text


def _prebuilt_stem(installed: Sequence[Installed]) -> str | None:
    """``linux-modules-nvidia-535-server`` where the driver's modules come prebuilt and not from DKMS."""
    if any("dkms" in package.name and packages.is_driver(package.name) for package in installed):
        return None
    for package in installed:
        if match := re.match(r"(linux-modules-nvidia-.+?)-\d+\.\d+\.\d+-", package.name):
            return match[1]
    return None


@dataclass(frozen=True)
class Unfinished:
    """Packages that dpkg left in the middle: of a kernel ``release`` with what waits for it, or (null) the others."""

    release: str | None
    packages: tuple[Installed, ...]
    remedy: str

    @property
    def subject(self) -> str:
        first = sorted(self.packages, key=lambda package: package.state == "unpacked")[0]
        return f"linux-image-{self.release}" if self.release else first.name

    @property
    def message(self) -> str:
        states: dict[str, list[str]] = {}
        for package in self.packages:
            state = package.state if package.state != "installed" else "to be installed again"
            states.setdefault(state, []).append(f"{package.name} {package.version}")
        return "; ".join(f"{state}: {', '.join(names)}" for state, names in sorted(states.items()))


def unfinished(
    installed: Sequence[Installed], kernels: Kernels, has_module: Callable[[str], bool]
) -> tuple[list[Unfinished], Unfinished | None]:
    """What dpkg left in the middle, one for each kernel, then the rest, whatever it belongs to (null: nothing)."""
    stuck = [package for package in installed if package.unfinished]
    found = []
    for release, full_names in kernel_set(installed).releases.items() if stuck else ():
        names = [name.split(":")[0] for name in full_names]
        if not any(package.name in names for package in stuck):
            continue
        names += [package.name for package in dependents(installed, names)]
        here = tuple(package for package in stuck if package.name in names)
        stuck = [package for package in stuck if package not in here]
        remedy = "dpkg --configure -a"
        if release != kernels.running and not has_module(release):
            remedy = way_out(installed, release)
        found.append(Unfinished(release, here, remedy))
    if not stuck:
        return found, None
    built = any("dkms" in package.name for package in stuck)
    log = "mend what the build says (make.log below /var/lib/dkms), then: " if built else ""
    return found, Unfinished(None, tuple(stuck), f"{log}dpkg --configure -a; apt-get -f install")


def judge_unfinished(
    installed: Sequence[Installed], kernels: Kernels, has_module: Callable[[str], bool]
) -> list[Fault]:
    """Those of kernel and driver, as faults."""
    of_kernels, rest = unfinished(installed, kernels, has_module)
    if rest is not None:
        ours = tuple(
            p for p in rest.packages if p.name == "dkms" or kind_of(p.name, p) or packages.is_kept_with_driver(p.name)
        )
        of_kernels += [Unfinished(None, ours, rest.remedy)] if ours else []
    return [
        CATALOGUE.fault("driver_packages_broken", found.subject, found.message, found.remedy) for found in of_kernels
    ]


def driver_set(installed: Sequence[Installed]) -> list[str]:
    """Everything of the driver that is installed, its companions and the prebuilt modules."""
    return sorted(package.full_name for package in installed if packages.is_kept_with_driver(package.name))


def prebuilt_set(installed: Sequence[Installed]) -> list[str]:
    """Prebuilt modules of the driver that are installed, and their meta packages."""
    return sorted(package.full_name for package in installed if _PREBUILT.match(package.name))


def intruders(kernels: Kernels, found: KernelSet, has_module: Callable[[str], bool]) -> list[str]:
    """Installed kernels newer than the running one, or booting next, for which the driver has no module.

    A driver that has none for the running kernel either is no measure for the others.
    """
    running = kernels.running
    if running is None or not has_module(running):
        return []
    candidates = dict.fromkeys([*kernels.installed, *found.images])
    return [
        release
        for release in candidates
        if release != running
        and (release == kernels.next or version_key(release) > version_key(running))
        and not has_module(release)
    ]


def judge(
    kernels: Kernels,
    installed: Sequence[Installed],
    has_module: Callable[[str], bool],
    driver: bool,
    entry_of: Callable[[str], str | None] = lambda _: None,
    said: Callable[[str], str] = lambda _: "",
) -> list[Fault]:
    """What is wrong about the kernels. ``driver``: driver packages are installed; ``entry_of`` a kernel's entry in
    GRUB's menu; ``said`` what the build of the module for a kernel said, to go on a message.
    """
    faults = []
    found = kernel_set(installed)
    running = kernels.running
    without = intruders(kernels, found, has_module) if driver else []
    former = running
    if driver and running and not has_module(running):
        former = next((release for release in kernels.installed if has_module(release)), None)
        if former:
            without = [running]
    for release in without:
        boots = f"{release} boots next"
        if release != kernels.next:
            boots = f"{release} is installed beside it ({kernels.next} boots next)"
        state = f"{running} runs, {boots}, and no nvidia module is on disk for {release}"
        if release == running:
            state = f"{running} runs, and no nvidia module is on disk for it; {former} has one"
        remedy = (
            way_out(installed, release) if release != running else f"boot {former}, then {way_out(installed, release)}"
        )
        entry = entry_of(former) if former and kernels.next != former else None
        if entry:
            remedy += f"; until then boot {former} once: grub-reboot '{entry}' && systemctl reboot"
        faults.append(CATALOGUE.fault("kernel_without_driver", f"linux-image-{release}", state + said(release), remedy))
    subjects = {fault.subject for fault in faults}
    for fault in judge_unfinished(installed, kernels, has_module):
        same = fault.subject in subjects
        faults.append(replace(fault, remedy="as above, which finishes them too") if same else fault)
    if running and kernels.next and kernels.next != running and kernels.next not in without:
        faults.append(
            CATALOGUE.fault(
                "kernel_changes_at_boot",
                f"linux-image-{kernels.next}",
                f"{kernels.next} boots next, {running} runs",
                "reboot when it suits; nothing else is to be done",
            )
        )
    if running and found.releases and running not in found.releases:
        faults.append(
            CATALOGUE.fault(
                "kernel_not_packaged",
                f"linux-image-{running}",
                f"no installed package brings linux-image-{running}, which is the running kernel",
                "reboot into an installed kernel, or ignore this where the kernel comes from elsewhere",
            )
        )
    return faults
