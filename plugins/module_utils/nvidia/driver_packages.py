# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which packages make a driver, by distribution, archive, branch and flavour: one table, one place.

Names and dependencies of Debian 12 and 13 are from their archives; those of Ubuntu and of NVIDIA's archive from their
documentation (Ubuntu Server, "NVIDIA drivers installation"; NVIDIA, "Driver Installation Guide").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..apt.pins import Stanza, stanzas

#: What the roles accept. 590 and newer do not know Volta (compat).
BRANCHES = ("535", "550", "570", "580")
#: Components in which the distributions keep the driver and what it needs.
COMPONENTS = {"ubuntu": ("main", "restricted"), "debian": ("main", "contrib", "non-free", "non-free-firmware")}
#: The Origin that the distributions' archives and all their mirrors state.
ORIGINS = {"ubuntu": "Ubuntu", "debian": "Debian"}
CODENAMES = {
    "ubuntu-20.04": "focal",
    "ubuntu-22.04": "jammy",
    "ubuntu-24.04": "noble",
    "debian-11": "bullseye",
    "debian-12": "bookworm",
    "debian-13": "trixie",
}
NVIDIA_SITE = "https://developer.download.nvidia.com/compute/cuda/repos"
#: Packages of Debian's driver sources that serve every branch; Debian 13 needs them in 550 beside 535 (measured).
_SHARED_ON_DEBIAN = ("nvidia-egl-common", "nvidia-legacy-check", "nvidia-opencl-common", "nvidia-vulkan-common")


@dataclass(frozen=True)
class Family:
    """The packages of one branch in one packaging.

    ``lead`` decides the version of all ``packages``; ``dkms`` builds the module, ``prebuilt`` is the beginning of the
    names of the kernels' signed modules (null where there are none). ``companions`` have versions of their own and are
    installed where the archive has them. ``fabric`` names Fabric Manager, the first that is offered counts.
    """

    packages: tuple[str, ...]
    dkms: str
    companions: tuple[str, ...]
    fabric: tuple[str, ...]
    sources: tuple[str, ...]
    prebuilt: str | None = None
    other_sources: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def lead(self) -> str:
        return self.packages[0]


def family(distribution: str, release: str, source: str, branch: str, flavour: str, headless: bool) -> Family | None:
    """Null where the distribution's own archive never had the branch."""
    if distribution == "ubuntu":
        return _ubuntu(source, branch, flavour, headless)
    if source == "cuda_repo" and int(branch) >= 570:
        return _nvidia_for_debian(branch, headless)
    if source != "distro" or (release, branch) in (("12", "535"), ("13", "550")):
        return _debian(release, branch, headless, "")
    if (release, branch) == ("13", "535"):
        return _debian(release, branch, headless, "tesla-535-")
    return None


def _ubuntu(source: str, branch: str, flavour: str, headless: bool) -> Family:
    # NVIDIA's archive has one packaging only.
    end = f"-{branch}-server" if flavour == "server" and source != "cuda_repo" else f"-{branch}"
    first = "nvidia-headless-no-dkms" if headless else "nvidia-driver"
    return Family(
        packages=(f"{first}{end}", f"nvidia-utils{end}"),
        dkms=f"nvidia-dkms{end}",
        companions=("nvidia-modprobe",),
        fabric=(f"nvidia-fabricmanager-{branch}", "nvidia-fabricmanager"),
        sources=(f"nvidia-graphics-drivers-{branch}", f"nvidia-graphics-drivers-{branch}-server"),
        prebuilt=None if source == "cuda_repo" else f"linux-modules-nvidia{end}",
    )


def _debian(release: str, branch: str, headless: bool, tesla: str) -> Family:
    """``tesla`` is what Debian puts into the names of a branch that it keeps beside its main one."""
    library = f"libnvidia-{tesla}"
    cuda = f"{library}cuda1" if tesla else "libcuda1"
    libraries = (cuda, *(f"{library}{part}" for part in ("cfg1", "ml1", "nvvm4", "ptxjitcompiler1")))
    head = f"nvidia-{tesla}"
    sources = ("nvidia-graphics-drivers", "nvidia-graphics-drivers-tesla")
    return Family(
        packages=(
            *(() if headless else (f"{head}driver",)),
            f"{head}smi",
            f"{head}driver-bin",
            *libraries,
        ),
        dkms=f"{head}kernel-dkms",
        companions=("nvidia-modprobe", "nvidia-persistenced"),
        fabric=(f"nvidia-fabricmanager-{branch}", "nvidia-fabricmanager"),
        sources=(*sources, f"nvidia-graphics-drivers-{tesla}".rstrip("-")) if tesla else sources,
        other_sources=() if tesla else (f"nvidia-graphics-drivers-tesla-{branch}",),
        shared=_SHARED_ON_DEBIAN if tesla else (),
    )


def _nvidia_for_debian(branch: str, headless: bool) -> Family:
    """From 560 on NVIDIA's archive for Debian has all that computes in one package."""
    return Family(
        packages=(*(() if headless else ("nvidia-driver",)), "nvidia-driver-cuda"),
        dkms="nvidia-kernel-dkms",
        companions=("nvidia-modprobe", "nvidia-persistenced"),
        fabric=(f"nvidia-fabricmanager-{branch}", "nvidia-fabricmanager"),
        sources=("nvidia-graphics-drivers",),
    )


def pins(
    chosen: Family, distribution: str, codename: str, branch: str, source: str, site: str, version: str
) -> list[Stanza]:
    """The preferences that keep to this family; ``site`` is the host of an archive that is no distribution's."""
    origin = f"release o={ORIGINS[distribution]}" if source == "distro" else f'origin "{site}"'
    return stanzas(
        branch,
        chosen.sources,
        origin,
        version,
        chosen.shared,
        f"release o={ORIGINS[distribution]},n={codename}",
        chosen.other_sources,
    )


#: linux-image-generic-hwe-22.04 is a meta package, linux-image-6.8.0-60-generic is a kernel.
_IMAGE_META = re.compile(r"^linux-image-(?P<flavour>(?!unsigned-)[a-z][a-z0-9.+-]*)$")


def header_meta(image_meta: str) -> str | None:
    """The meta package of the headers that goes with one of images."""
    match = _IMAGE_META.match(image_meta)
    if match is None or match["flavour"].endswith(("-dbg", "-dbgsym")):
        return None
    return f"linux-headers-{match['flavour'].removesuffix('-unsigned')}"


def prebuilt_meta(prebuilt: str, image_meta: str) -> str | None:
    """The meta package of the signed modules that goes with one of images; ``virtual`` kernels use those of generic."""
    match = _IMAGE_META.match(image_meta)
    if match is None:
        return None
    return f"{prebuilt}-{re.sub(r'^virtual(?=-|$)', 'generic', match['flavour'])}"
