# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Preferences that bind a driver to one branch and one archive, and leave everything else alone.

apt gives a version the priority of the first stanza that matches it (apt_preferences(5), apt 2.1.11 and newer for
C(src:)), so the order of the stanzas is their meaning:

1. companions that the driver needs and that come with numbers of another branch, where the distribution has such;
2. whatever carries another branch, or C(-open), in its name: never;
3. packages of the driver, with or without a branch in their names, in the version that was chosen: wanted, also where
   that means to go down;
4. the same packages in any other version of a driver: never.

As long as no version is known, 3 and 4 bind to the branch and to the archive that was chosen. A version is needed:
of two versions with one priority apt takes the newer, also where an older one is asked for by ansible.builtin.apt.

No pattern is as wide as C(nvidia-*): the container toolkit, CUDA and the tools with versions of their own
(nvidia-modprobe, nvidia-persistenced, nvidia-settings) are not touched. Regular expressions are not used for names: apt
compares each with the name of every package that it knows of, for every command (measured: twenty of them made
C(apt-cache policy) take over a minute). Names are written out, and patterns are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Packages of the driver without a branch in their names: Debian's, and NVIDIA's from branch 590 on.
_PLAIN = _words(
    """
    cuda-drivers firmware-nvidia-gsp libcuda1 libcudadebugger1 libegl-nvidia0 libgl1-nvidia-glvnd-glx
    libgles-nvidia1 libgles-nvidia2 libglx-nvidia0 libnvcuvid1 libnvidia-allocator1 libnvidia-cfg1
    libnvidia-common libnvidia-compute libnvidia-decode libnvidia-eglcore libnvidia-encode libnvidia-encode1
    libnvidia-extra libnvidia-fbc1 libnvidia-gl libnvidia-glcore libnvidia-glvkspirv libnvidia-gpucomp
    libnvidia-ml1 libnvidia-ngx1 libnvidia-nscq libnvidia-nvvm4 libnvidia-opticalflow1
    libnvidia-pkcs11-openssl3 libnvidia-ptxjitcompiler1 libnvidia-rtcore libnvidia-sandboxutils libnvoptix1
    nvidia-alternative nvidia-compute-utils nvidia-dkms nvidia-driver nvidia-driver-bin nvidia-driver-cuda
    nvidia-driver-full nvidia-driver-libs nvidia-egl-icd nvidia-fabricmanager nvidia-firmware nvidia-headless
    nvidia-headless-no-dkms nvidia-imex nvidia-kernel-dkms nvidia-kernel-source nvidia-kernel-support
    nvidia-opencl-icd nvidia-powerd nvidia-smi nvidia-utils nvidia-vdpau-driver nvidia-vulkan-icd
    xserver-xorg-video-nvidia
    """
)
#: Packages of the driver that carry the branch at the end of their names, on Ubuntu and in NVIDIA's archive for it.
_NUMBERED = _words(
    """
    cuda-drivers cuda-drivers-fabricmanager libnvidia-cfg1 libnvidia-common libnvidia-compute libnvidia-decode
    libnvidia-encode libnvidia-extra libnvidia-fbc1 libnvidia-gl libnvidia-nscq nvidia-compute-utils
    nvidia-dkms nvidia-driver nvidia-fabricmanager nvidia-fabricmanager-dev nvidia-headless
    nvidia-headless-no-dkms nvidia-imex nvidia-kernel-common nvidia-kernel-source nvidia-utils
    xserver-xorg-video-nvidia
    """
)
#: Of these the package's own revision differs from the driver's.
_APART = ("cuda-drivers", "libnvidia-nscq", "nvidia-fabricmanager", "nvidia-imex")
_HEADER = """\
# Written by the volta.llm role nvidia_driver; changes are overwritten.
# The NVIDIA driver stays on branch {branch}, from one archive. The first stanza that matches counts.
"""


@dataclass(frozen=True)
class Stanza:
    """One record of a preferences file; ``why`` becomes its comment."""

    why: str
    packages: tuple[str, ...]
    pin: str
    priority: int

    def text(self) -> str:
        return f"# {self.why}\nPackage: {' '.join(self.packages)}\nPin: {self.pin}\nPin-Priority: {self.priority}\n"


def other_numbers(number: str) -> tuple[str, ...]:
    """Patterns for the numbers of as many digits that are not this one; neither globs nor POSIX expressions negate."""
    parts = []
    for place, digit in enumerate(number):
        others = "".join(other for other in "0123456789" if other != digit)
        parts.append(number[:place] + f"[{others}]" + "[0-9]" * (len(number) - place - 1))
    return tuple(parts)


def driver_packages(branch: str, sources: Iterable[str]) -> tuple[str, ...]:
    """Every package of the driver in both naming forms, by source package and by name.

    The names are for archives whose source packages are called otherwise.
    """
    named = (f"{stem}-{branch}{flavour}" for stem in _NUMBERED for flavour in ("", "-server"))
    return (*(f"src:{name}" for name in sources), *_PLAIN, *named)


def stanzas(
    branch: str,
    sources: Sequence[str],
    origin: str,
    version: str = "",
    companions: Sequence[str] = (),
    companions_pin: str = "",
    other_sources: Sequence[str] = (),
) -> list[Stanza]:
    """The preferences for a branch.

    ``sources`` are the source packages of the driver (patterns), ``origin`` is what comes after C(Pin:) for the chosen
    archive. ``version`` is a whole package version and binds to that alone. ``other_sources`` are
    source packages of the same branch that must not be mixed in.
    """
    others = other_numbers(branch)
    other_versions = f"version /^([0-9]+:)?({'|'.join(others)})[.][0-9]/"
    packages = driver_packages(branch, sources)
    found = []
    if companions:
        found.append(Stanza("Companions of every branch", tuple(companions), companions_pin, 500))
    found.append(
        Stanza(
            "Other branches by name, and the open kernel modules, which do not know Volta",
            (
                # Not *nvidia*: the kernel's own number follows in linux-modules-nvidia-535-5.15.0-101-generic. Those of
                # other branches cannot be installed without packages that are named here.
                *(f"nvidia-*-{number}*" for number in others),
                *(f"lib*nvidia*-{number}*" for number in others),
                "nvidia-*-open",
                "linux-*-nvidia-*-open-*",
                "nvidia-open",
                f"nvidia-open-{branch}",
                "nvidia-kernel-open-dkms",
                *(f"nvidia-open-kernel-{part}" for part in ("dkms", "source", "support")),
            ),
            "version *",
            -1,
        )
    )
    if other_sources:
        found.append(
            Stanza("Another packaging of the driver", tuple(f"src:{name}" for name in other_sources), "version *", -1)
        )
    if version:
        upstream = version.split(":")[-1].split("-")[0]
        apart = tuple(name for name in packages if name.startswith(_APART))
        rest = tuple(name for name in packages if name not in apart)
        found.append(Stanza("The version that was chosen", rest, f"version {version}", 1001))
        found.append(Stanza("The same, of what is packaged apart", apart, f"version {upstream}-*", 1001))
        found.append(Stanza("All other versions", packages, "version /^([0-9]+:)?[0-9][0-9][0-9][.][0-9]/", -1))
        return found
    found.append(Stanza("Other branches by version", packages, other_versions, -1))
    found.append(Stanza("The branch from the chosen archive", packages, origin, 1001))
    found.append(Stanza("The branch from any other archive", packages, f"version /^([0-9]+:)?{branch}[.]/", -1))
    return found


def preferences(branch: str, found: Sequence[Stanza]) -> str:
    """The file, as apt reads it."""
    return _HEADER.format(branch=branch) + "\n" + "\n".join(stanza.text() for stanza in found)
