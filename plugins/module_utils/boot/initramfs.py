# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The initramfs of each kernel: what lies in it, whether it is behind a file it should carry, and making it anew.

Debian and Ubuntu use initramfs-tools; where dracut takes its place its own programs are used.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ..machine import Completed, Machine
from ..nvidia.kernels import kernels
from ..nvidia.values import version_key

#: An image of 200 MB on a slow disk with a slow compression; update-initramfs of a Tesla host took 40 s.
BUILD_TIMEOUT = 900.0
LIST_TIMEOUT = 180.0
_NOUVEAU = re.compile(r"(?:^|/)nouveau\.ko(?:\.\w+)?$")


def carries(names: Collection[str], path: str) -> bool:
    """Whether a file of the machine is among those of an image, whichever of the two has /usr merged."""
    name = path.lstrip("/").removeprefix("usr/")
    return name in names or f"usr/{name}" in names


def has_nouveau(names: Collection[str]) -> bool:
    return any(_NOUVEAU.search(name) for name in names)


@dataclass(frozen=True)
class Image:
    """One kernel and its image.

    ``path`` is null where the kernel has no image; ``bootable`` means /boot has the kernel itself, ``has_modules`` that
    /lib/modules has its modules, without which no image can be made. ``names`` are the files in the image, null where
    it could not be listed (``error`` says why).
    """

    kernel: str
    path: str | None
    bootable: bool
    has_modules: bool
    names: frozenset[str] | None = None
    error: str | None = None
    written_ns: int | None = None

    def carries(self, path: str) -> bool | None:
        """Whether a file of the machine is in the image, under its own path or with /usr merged."""
        return None if self.names is None else carries(self.names, path)

    @property
    def nouveau(self) -> bool | None:
        return None if self.names is None else has_nouveau(self.names)


@dataclass(frozen=True)
class Tools:
    """The programs of this machine; ``lister`` and ``builder`` are null where none is known."""

    lister: str | None
    builder: str | None


def tools(machine: Machine) -> Tools:
    """Which programs there are, by their files, so that nothing is started to find out."""

    def first(*names: str) -> str | None:
        folders = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
        return next((name for name in names if any(machine.exists(f"{folder}/{name}") for folder in folders)), None)

    if machine.is_capture:
        # A capture has outputs, not programs; nothing is built there.
        return Tools("lsinitramfs", None)
    return Tools(first("lsinitramfs", "lsinitrd"), first("update-initramfs", "dracut"))


def images(machine: Machine, known: Tools | None = None) -> list[Image]:
    """Every kernel that has an image, a place in /boot or modules; newest first."""
    known = known or tools(machine)
    bootable = set(kernels(machine).installed)
    with_image = {}
    for name in machine.listdir("/boot"):
        match = re.fullmatch(r"initr(?:d|amfs)(?:\.img)?-(.+?)(?:\.img)?", name)
        # .new of a build that was killed, .bak, .dpkg-bak and .old-dkms copies are of no kernel.
        if match and not re.search(r"\.(?:new|bak|dpkg-bak|old|old-dkms|tmp)$", match[1]):
            with_image[match[1]] = f"/boot/{name}"
    # A removed kernel leaves a folder behind that holds neither (DKMS keeps files below it).
    with_modules = {
        name
        for name in machine.listdir("/lib/modules")
        if any(machine.exists(f"/lib/modules/{name}/{part}") for part in ("modules.dep", "kernel"))
    }
    found = []
    for kernel in sorted(bootable | with_image.keys(), key=version_key, reverse=True):
        path = with_image.get(kernel)
        names, error = listing(machine, known.lister, path) if path else (None, None)
        found.append(
            Image(
                kernel,
                path,
                kernel in bootable,
                kernel in with_modules,
                names,
                error,
                _written(machine, path) if path else None,
            )
        )
    return found


def _written(machine: Machine, path: str) -> int | None:
    try:
        return machine.path(path).stat().st_mtime_ns
    except OSError:
        return None


def listing(machine: Machine, lister: str | None, path: str) -> tuple[frozenset[str] | None, str | None]:
    """The files in an image, or null and why it could not be listed."""
    if lister is None:
        return None, "neither lsinitramfs nor lsinitrd is installed"
    done = machine.run([lister, path], timeout=max(machine.timeout, LIST_TIMEOUT))
    if not done.ok:
        return None, f"{lister}: {done.why}"
    names = frozenset(_name(line, lister) for line in done.stdout.splitlines() if line.strip())
    if len(names) < 2:
        # An empty archive lists "." at most; lsinitramfs says nothing of a compression it does not know.
        return None, f"{lister} lists no files"
    return names, None


def _name(line: str, lister: str) -> str:
    text = line.strip()
    if lister == "lsinitrd":
        # Lines of ls -l; links are followed by " -> target".
        text = text.split(" -> ", 1)[0].split()[-1]
    return text.removeprefix("./").lstrip("/")


def build_command(builder: str, image: Image) -> list[str]:
    """How the image of one kernel is made anew."""
    if builder == "dracut":
        return ["dracut", "--force", image.path or f"/boot/initrd.img-{image.kernel}", image.kernel]
    return [builder, "-u", "-k", image.kernel]


def build(machine: Machine, builder: str, image: Image) -> Completed:
    return machine.run(build_command(builder, image), timeout=BUILD_TIMEOUT)
