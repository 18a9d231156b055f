# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Packages of a stand-in driver for the virtual machine, with Debian's names.

Its kernel modules are real: DKMS compiles them against the kernel's headers, modprobe and udev load them for the card,
and they say their version in /sys and /proc as the real driver does. They touch no hardware, and its library is only a
file with the right name.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests.lab.repository import deb

MODULE = Path(__file__).with_name("vm_module")
SOURCE = "nvidia-graphics-drivers"
#: What the machine starts with, and what its archive offers beside it.
DRIVER = "535.261.03"
NEWER_DRIVER = "535.288.01"
ARCHIVE = "/srv/lab-archive"
#: Debian's name in DKMS.
DKMS = "nvidia-current"
#: The parts with their place: where Debian's package has DKMS put them.
PARTS = ("nvidia", "nvidia-modeset", "nvidia-drm", "nvidia-uvm")


def revision(version: str) -> str:
    return f"{version}-1~deb12u1"


def archive() -> bytes:
    """A tar archive with the packages of both versions in ARCHIVE."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for version in (DRIVER, NEWER_DRIVER):
            for package in packages(version):
                data = deb.build(package)
                entry = tarfile.TarInfo(f"{ARCHIVE}/{package.file_name}".lstrip("/"))
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def packages(version: str) -> Iterator[deb.Package]:
    """The driver of one version, as nvidia-driver and what it needs."""
    same = f"(= {revision(version)})"
    yield _package(
        "nvidia-kernel-dkms",
        version,
        depends="dkms",
        files={f"/usr/src/{DKMS}-{version}/{name}": file for name, file in _source(version).items()},
        scripts={
            "postinst": '#!/bin/sh\nset -e\n[ "$1" != configure ] || '
            f'/usr/lib/dkms/common.postinst {DKMS} {version} /usr/share/nvidia-current "" "$2"\n',
            "prerm": f"#!/bin/sh\nset -e\ndkms remove -m {DKMS} -v {version} --all || true\n",
        },
    )
    library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so"
    yield _package(
        "libnvidia-ml1",
        version,
        files={
            f"{library}.{version}": deb.text(f"stands for libnvidia-ml {version}\n"),
            f"{library}.1": deb.link(f"libnvidia-ml.so.{version}"),
        },
    )
    yield _package(
        "nvidia-driver",
        version,
        depends=f"nvidia-kernel-dkms {same}, libnvidia-ml1 {same}",
        files={"/usr/lib/modules-load.d/nvidia-lab.conf": deb.text("nvidia\nnvidia-modeset\nnvidia-drm\nnvidia-uvm\n")},
    )


def _package(
    name: str,
    version: str,
    *,
    depends: str = "",
    files: dict[str, deb.File],
    scripts: dict[str, str] | None = None,
) -> deb.Package:
    return deb.Package(
        name=name,
        version=revision(version),
        source=SOURCE,
        section="non-free/libs",
        description=f"stand-in for NVIDIA's driver ({name})",
        relations={"Depends": depends},
        files=files,
        scripts=scripts or {},
    )


def _source(version: str) -> dict[str, deb.File]:
    """What DKMS compiles."""
    files = {path.name: deb.File(path.read_bytes()) for path in MODULE.iterdir() if path.suffix in (".c", ".h")}
    files["Kbuild"] = deb.text((MODULE / "Kbuild").read_text())
    make = f"make -C ${{kernel_source_dir}} M=${{dkms_tree}}/{DKMS}/{version}/build LAB_VERSION={version}"
    lines = [
        f'PACKAGE_NAME="{DKMS}"',
        f'PACKAGE_VERSION="{version}"',
        f'MAKE[0]="{make} modules"',
        f'CLEAN="{make} clean"',
        'AUTOINSTALL="yes"',
    ]
    for number, part in enumerate(PARTS):
        lines += [f'BUILT_MODULE_NAME[{number}]="{part}"', f'DEST_MODULE_LOCATION[{number}]="/updates/dkms"']
    files["dkms.conf"] = deb.text("\n".join(lines) + "\n")
    return files
