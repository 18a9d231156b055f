# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What dpkg and apt know about the driver: packages and their branch, states, holds, pins, history. All read only."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..machine import Machine
from .values import version_key

_DRIVER = re.compile(
    r"^(?:lib)?nvidia[-+.a-z0-9]*$|^xserver-xorg-video-nvidia[-a-z0-9]*$|^libcuda1$|^lib(?:egl|gles?|glx|cud|gl1)[-a-z0-9]*-nvidia"
    r"|^linux-(?:modules|objects|signatures)-nvidia-|^cuda-drivers|^libnvcuvid1$|^libxnvctrl0$|^libnvoptix1$"
    r"|^libcudadebugger1$|^firmware-nvidia-(?:[a-z0-9-]+-)?gsp$"
)
_KERNEL = re.compile(r"^linux-(?:image|headers|modules|generic|virtual)")
#: Packages with "nvidia" in their name whose versions follow no driver branch (measured on Debian 12 and 13): tools
#: with a source package of their own (modprobe, persistenced, settings, prime), data of which one version serves all
#: branches (nvidia-egl-common, nvidia-vulkan-common, nvidia-suspend-common), and what only uses a driver (containers,
#: CUDA, cuDNN, nsight).
_OWN_VERSIONS = re.compile(
    r"^(?:nvidia-(?:modprobe|persistenced|settings|xconfig|support|installer-cleanup|kernel-common|legacy-check|detect|prime"
    r"|cuda-(?!mps)|cudnn|container|docker|egl-|vaapi|profiler|visual-|nsight|firmware-|driver-pinning|open-gpu-|smi-exporter"
    r"|primus|[a-z]+-common|texture)|libnvidia-(?:container|egl-|ptxjitcompiler-cuda)|libxnvctrl0"
    r"|nvidia-egl-common|nvidia-fs|nvidia-gds|nvidia-imex|libnvidia-nscq|libnvidia-api1$|linux-)"
)
_BRANCH_VERSION = re.compile(r"^(?:\d+:)?(\d{3})\.\d+")
_NAME_BRANCH = re.compile(r"-(\d{3})(?:-|$)")
#: The branch in the name of a driver package; the numbers of a kernel (5.15.0-105) come later in the name.
_DRIVER_NAME_BRANCH = re.compile(r"(?:nvidia|cuda-drivers)(?:-[a-z]+\d*)*?-([3-9]\d{2})(?=-|$)")
_DRIVER_SOURCE = re.compile(
    r"^(?:nvidia-graphics-drivers|nvidia-open|linux-restricted-(?:modules|signatures)|cuda-drivers|fabric-manager"
    r"|nvidia-fabric-?manager|libnvidia-nscq|nvidia-imex)"
)
#: Packages that depend on a driver, of whichever branch: no part of what is kept together with the module.
_USERS = re.compile(
    r"^(?:lib)?nvidia-(?:container|docker|cuda-(?!mps)|cudnn|vaapi|profiler|visual-|nsight|texture|cg-|smi-exporter|fs|gds|ml-dev)"
)
#: Of these Ubuntu has one package a branch, which serves its server and its desktop packaging.
_ONE_FLAVOUR = re.compile(r"^(?:nvidia-(?:fabricmanager|imex)|libnvidia-nscq|cuda-drivers-fabricmanager)(?:-|$)")
_OPEN = re.compile(
    r"^(?:nvidia|cuda-drivers)[a-z0-9.-]*-open(?:-|$)|^nvidia-open(?:-|$)|^linux-(?:modules|objects|signatures)-nvidia-.*open(?:-|$)"
)
_PIN_TARGET = re.compile(r"nvidia|cuda|linux-(?:image|headers|generic|\*)", re.IGNORECASE)


@dataclass(frozen=True)
class Package:
    """A package of the driver or of the kernel; ``want``, ``flag`` and ``state`` are dpkg's three status words."""

    name: str
    version: str
    want: str
    flag: str
    state: str

    @property
    def installed(self) -> bool:
        return self.state in ("installed", "triggers-pending", "triggers-awaited")

    @property
    def held(self) -> bool:
        return self.want == "hold"

    @property
    def branch(self) -> str | None:
        """Driver branch (``535``) by version, null for packages with versions of their own."""
        if _OWN_VERSIONS.match(self.name) or not _DRIVER.match(self.name):
            return None
        match = _BRANCH_VERSION.match(self.version)
        return match[1] if match else None

    @property
    def named_branch(self) -> str | None:
        """Branch that the name promises: transitional packages lead to another one (pop-os/pop#3549)."""
        match = _NAME_BRANCH.search(self.name)
        return match[1] if match else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "branch": self.branch, "held": self.held}


def is_driver(name: str) -> bool:
    """Whether a package is the driver's or one of its companions, by its name."""
    return bool(_DRIVER.match(name))


def is_kept_with_driver(name: str) -> bool:
    """Whether a package has to stay as it is while the driver does: the driver's, and its companions."""
    return is_driver(name) and not _USERS.match(name)


def is_open_flavour(name: str) -> bool:
    """Whether a package is of the open kernel module, which does not know Volta."""
    return bool(_OPEN.match(name))


def has_flavours(name: str) -> bool:
    """Whether Ubuntu has a driver package twice, for servers (``-535-server``) and for desktops (``-535``)."""
    return not _ONE_FLAVOUR.match(name)


def is_companion(name: str) -> bool:
    """Whether a driver package has a version of its own; one with a branch in its name has not."""
    return bool(_OWN_VERSIONS.match(name)) and name_branch(name) is None


def name_branch(name: str) -> str | None:
    """The branch that the name of a driver package promises; null where it promises none."""
    match = _DRIVER_NAME_BRANCH.search(name)
    return match[1] if match and is_driver(name) else None


def candidate_branch(name: str, version: str, source: str | None = None) -> str | None:
    """The branch of a package that could be installed; null for what is no driver package or has no branch.

    The version decides, then the source package (``nvidia-graphics-drivers-535 (535.183.01-0ubuntu1)``), then the name:
    archives have put 510 into nvidia-driver-495, and prebuilt modules have the version of their kernel.
    """
    source_name, _, source_version = (source or "").partition(" ")
    if not is_driver(name) and not _DRIVER_SOURCE.match(source_name):
        return None
    if is_companion(name):
        return None
    for match in (
        None if name.startswith("linux-") else _BRANCH_VERSION.match(version),
        _BRANCH_VERSION.match(source_version.strip("()")) if _DRIVER_SOURCE.match(source_name) else None,
        re.search(r"-([3-9]\d{2})(?=-|$)", source_name) if _DRIVER_SOURCE.match(source_name) else None,
    ):
        if match:
            return match[1]
    return name_branch(name)


def stanzas(text: str) -> Iterator[dict[str, str]]:
    for block in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        for line in block.splitlines():
            if line[:1] not in (" ", "\t"):
                key, _, value = line.partition(":")
                fields[key] = value.strip()
        if fields:
            yield fields


def parse_status(text: str) -> list[Package]:
    """Packages of driver and kernel in dpkg's status file."""
    found = []
    for fields in stanzas(text):
        name, status = fields.get("Package", ""), fields.get("Status", "").split()
        if len(status) != 3 or status[2] in ("not-installed", "config-files"):
            continue
        if _DRIVER.match(name) or _KERNEL.match(name):
            found.append(Package(name, fields.get("Version", ""), status[0], status[1], status[2]))
    return sorted(found, key=lambda package: package.name)


def is_kernel(package: Package) -> bool:
    return bool(_KERNEL.match(package.name)) and not _DRIVER.match(package.name)


def installed_packages(machine: Machine) -> list[Package] | None:
    """Null on a machine without dpkg."""
    text = machine.read("/var/lib/dpkg/status")
    return None if text is None else parse_status(text)


@dataclass(frozen=True)
class Pin:
    """A stanza of apt's preferences that concerns driver or kernel."""

    file: str
    packages: str
    pin: str
    priority: int | None


def pins(machine: Machine) -> list[Pin]:
    """Preferences that name nvidia, cuda or kernel packages."""
    found = []
    files = ["/etc/apt/preferences"]
    files += [
        f"/etc/apt/preferences.d/{name}" for name in machine.listdir("/etc/apt/preferences.d") if _is_preference(name)
    ]
    for path in files:
        text = machine.read(path) or ""
        # A comment line between the fields of a stanza does not end it.
        text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        for fields in stanzas(text):
            lowered = {key.lower(): value for key, value in fields.items()}
            names = lowered.get("package", "")
            if _PIN_TARGET.search(names):
                priority = lowered.get("pin-priority", "")
                found.append(
                    Pin(
                        path, names, lowered.get("pin", ""), int(priority) if re.fullmatch(r"-?\d+", priority) else None
                    )
                )
    return found


def _is_preference(name: str) -> bool:
    """apt reads names without a dot, or ending in .pref (apt_preferences(5))."""
    return re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None and ("." not in name or name.endswith(".pref"))


@dataclass(frozen=True)
class Upgrade:
    """A change of driver packages in apt's history: when, by which command, and (package, from, to)."""

    date: str
    command: str
    packages: tuple[tuple[str, str | None, str], ...]

    @property
    def unattended(self) -> bool:
        return "unattended-upgrade" in self.command

    def as_dict(self) -> dict[str, Any]:
        return {
            "date": self.date,
            "command": self.command,
            "unattended": self.unattended,
            "packages": [{"name": name, "from": old, "to": new} for name, old, new in self.packages],
        }


_CHANGE = re.compile(r"(?P<name>[a-z0-9][-+.a-z0-9]+)(?::[a-z0-9]+)? \((?P<versions>[^)]*)\)")


def parse_history(text: str) -> list[Upgrade]:
    """Changes of driver packages, oldest first."""
    found = []
    for fields in stanzas(text):
        changes: list[tuple[str, str | None, str]] = []
        for key in ("Install", "Upgrade", "Downgrade", "Reinstall"):
            for match in _CHANGE.finditer(fields.get(key, "")):
                if not _DRIVER.match(match["name"]):
                    continue
                versions = [part.strip() for part in match["versions"].split(",") if part.strip() != "automatic"]
                if versions:
                    changes.append((match["name"], versions[0] if len(versions) > 1 else None, versions[-1]))
        if changes:
            date = re.sub(r"\s+", " ", fields.get("Start-Date", ""))
            found.append(Upgrade(date, fields.get("Commandline", ""), tuple(changes)))
    return sorted(found, key=lambda upgrade: upgrade.date)


def history(machine: Machine) -> list[Upgrade]:
    """apt's history with its rotated files."""
    texts = []
    for name in machine.listdir("/var/log/apt"):
        if not name.startswith("history.log"):
            continue
        path = f"/var/log/apt/{name}"
        if name.endswith(".gz"):
            try:
                texts.append(gzip.decompress(machine.path(path).read_bytes()).decode("utf-8", "replace"))
            except (OSError, EOFError):
                continue
        else:
            texts.append(machine.read(path) or "")
    return parse_history("\n\n".join(texts))


def change_to(upgrades: Iterable[Upgrade], version: str) -> Upgrade | None:
    """The newest change that brought a driver of ``version``."""
    wanted = version_key(version)
    for upgrade in reversed(list(upgrades)):
        for _, old, new in upgrade.packages:
            if upstream(new) == wanted and (old is None or upstream(old) != wanted):
                return upgrade
    return None


def upstream(version: str) -> tuple[int, ...]:
    """The driver's own number within a package version: ``460.73.01-0ubuntu0.20.04.1`` is (460, 73, 1)."""
    return version_key(re.sub(r"^\d+:", "", version).split("-", 1)[0])
