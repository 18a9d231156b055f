# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the packages contain: small files that real programs take for the real thing.

Kernel modules are ELF files with a .modinfo section, so that depmod, modinfo, modprobe and DKMS work on them. Nothing
is compiled: a DKMS module is "built" by a Python program that writes such a file.
"""

from __future__ import annotations

import base64
import inspect
from pathlib import Path

from tests.lab.gpu_simulator import gpu_simulator
from tests.lab.repository.deb import File, link, text

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
#: PCI devices of the drivers: NVIDIA's display (0300) and 3D (0302) controllers. A V100 is a 3D controller.
NVIDIA_ALIASES = ("pci:v000010DEd*sv*sd*bc03sc02i00*", "pci:v000010DEd*sv*sd*bc03sc00i00*")
NOUVEAU_ALIASES = ("pci:v000010DEd*sv*sd*bc03sc*i*", "pci:v000012D2d*sv*sd*bc03sc*i*")
#: The driver's modules with the dependencies that depmod finds, and what modprobe finds them by.
NVIDIA_MODULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nvidia": ((), NVIDIA_ALIASES),
    "nvidia-modeset": (("nvidia",), ()),
    "nvidia-drm": (("nvidia-modeset",), ()),
    "nvidia-uvm": (("nvidia",), ()),
    "nvidia-peermem": (("nvidia",), ()),
}
#: Stands for the signature by the distribution's key. Its last 28 bytes are what the kernel looks for.
SIGNED = b"~Module signature appended~\n"


def module(name: str, version: str, licence: str, kernel: str, *, aliases: tuple[str, ...] = (),
           depends: tuple[str, ...] = ()) -> bytes:  # fmt: skip
    """A module file for one kernel."""
    return gpu_simulator.module_image(
        version, licence, name=name.replace("-", "_"), kernel=kernel, aliases=aliases, depends=depends
    )


def licence(branch_is_open: bool) -> str:
    return "Dual MIT/GPL" if branch_is_open else "NVIDIA"


def kernel_modules(kernel: str) -> dict[str, File]:
    """linux-modules: what a virtual machine needs. Its display driver stands for many."""
    root = f"/lib/modules/{kernel}"
    drm = module("drm", "", "GPL and additional rights", kernel)
    return {
        f"{root}/kernel/drivers/gpu/drm/drm.ko": File(drm),
        f"{root}/modules.order": text("kernel/drivers/gpu/drm/drm.ko\nkernel/drivers/gpu/drm/nouveau/nouveau.ko\n"),
        f"{root}/modules.builtin": text("kernel/fs/ext4/ext4.ko\nkernel/drivers/block/virtio_blk.ko\n"),
        f"{root}/modules.builtin.modinfo": File(b""),
        f"/boot/config-{kernel}": text(kernel_config(kernel)),
        f"/boot/System.map-{kernel}": text("ffffffff81000000 T _text\n", 0o600),
    }


def kernel_extra(kernel: str) -> dict[str, File]:
    """linux-modules-extra: nouveau among others."""
    data = module("nouveau", "", "GPL and additional rights", kernel, aliases=NOUVEAU_ALIASES, depends=("drm",))
    return {f"/lib/modules/{kernel}/kernel/drivers/gpu/drm/nouveau/nouveau.ko": File(data)}


def kernel_image(kernel: str) -> dict[str, File]:
    return {f"/boot/vmlinuz-{kernel}": File(b"MZ" + f"simulated kernel {kernel}\n".encode(), 0o600)}


def kernel_headers(kernel: str, common: str) -> dict[str, File]:
    """linux-headers for one flavour: all that DKMS looks for. The signing program appends the kernel's mark."""
    folder = f"/usr/src/linux-headers-{kernel}"
    return {
        f"{folder}/.config": text(kernel_config(kernel)),
        f"{folder}/Module.symvers": text("0x00000000\tprintk\tvmlinux\tEXPORT_SYMBOL\n"),
        f"{folder}/Makefile": text(f"include /usr/src/{common}/Makefile\n"),
        f"{folder}/include/generated/utsrelease.h": text(f'#define UTS_RELEASE "{kernel}"\n'),
        f"{folder}/include/config/kernel.release": text(f"{kernel}\n"),
        f"{folder}/scripts/sign-file": text(SIGN_FILE, 0o755),
        f"/lib/modules/{kernel}/build": link(folder),
    }


def headers_common(common: str) -> dict[str, File]:
    return {
        f"/usr/src/{common}/Makefile": text("# Nothing is compiled against these headers.\nall:\n\t@:\n"),
        f"/usr/src/{common}/include/linux/version.h": text("/* simulated */\n"),
    }


def kernel_config(kernel: str) -> str:
    return (
        f"# Linux/x86 {kernel} Kernel Configuration (simulated)\n"
        'CONFIG_CC_VERSION_TEXT="gcc (Ubuntu 12.3.0) 12.3.0"\n'
        "CONFIG_MODULES=y\nCONFIG_MODULE_SIG=y\nCONFIG_MODULE_SIG_ALL=y\nCONFIG_RD_GZIP=y\nCONFIG_RD_ZSTD=y\n"
        "CONFIG_DRM=m\nCONFIG_DRM_NOUVEAU=m\n"
    )


#: scripts/sign-file HASH KEY CERTIFICATE MODULE [DEST]: a real signature, made by openssl.
SIGN_FILE = """\
#!/usr/bin/python3
import subprocess
import sys
import tempfile
from pathlib import Path

algorithm, key, certificate, name = sys.argv[1:5]
data = Path(name).read_bytes()
mark = b"~Module signature appended~\\n"
if not data.endswith(mark):
    # struct module_signature: algo, hash, id_type (2: PKCS#7), signer_len, key_id_len, pad, sig_len (big endian).
    with tempfile.NamedTemporaryFile() as pem:
        subprocess.run(["openssl", "x509", "-inform", "DER", "-in", certificate, "-out", pem.name], check=True)
        signature = subprocess.run(
            ["openssl", "cms", "-sign", "-binary", "-noattr", "-nocerts", "-md", algorithm, "-in", name,
             "-signer", pem.name, "-inkey", key, "-outform", "DER"],
            check=True, stdout=subprocess.PIPE,
        ).stdout
    head = bytes([0, 0, 2, 0, 0, 0, 0, 0]) + len(signature).to_bytes(4, "big")
    data += signature + head + mark
Path(sys.argv[5] if len(sys.argv) > 5 else name).write_bytes(data)
"""


#: A signature (CMS, as scripts/sign-file makes it) by a key that was thrown away; its issuer is named as Canonical's.
#: modinfo prints it; nothing in the lab checks it against the module.
CANONICAL = base64.b64decode(
    "MIIB4wYJKoZIhvcNAQcCoIIB1DCCAdACAQExDTALBglghkgBZQMEAgMwCwYJKoZIhvcNAQcBMYIBrTCCAakCAQEwgYMwazELMAkG"
    "A1UEBhMCR0IxFDASBgNVBAgMC0lzbGUgb2YgTWFuMRcwFQYDVQQKDA5DYW5vbmljYWwgTHRkLjEtMCsGA1UEAwwkQ2Fub25pY2Fs"
    "IEx0ZC4gS2VybmVsIE1vZHVsZSBTaWduaW5nAhQUkBHafqA/J0gStkFnbGo05q1KbjALBglghkgBZQMEAgMwDQYJKoZIhvcNAQEB"
    "BQAEggEAhY2KPERIFIBPoRzz2/WdVGqv6g7/uDO868LxC0fW++IU6tpVdgSAeguraAoGrV1YlFdsLsTOZJdwQkWyIFpdaF/kJ7N6"
    "R8RISzWkv5MHXO4eDPoRPLfuRATItAelfFV/4VqhAM4/MHgiZQUVCfJBPhLhYE2Ec99thq/rOcNXvXLRDgv4Q4PCy7uRJ/RXfDtz"
    "cG9JZlDh8VUYFd+shZis6s+A42AjpHFGDNac3SOsOgqWWkH5P9nwavdmXTSkKo/8lMerMxU9IL3ElnmsOyHuHZw4DhWqDcd0YXWI"
    "JpDNYMl46RqiBcuOZTGS3FNHnfZDMpB2A5FIOmxdPDIS66vllg=="
)


def signature() -> bytes:
    """What is appended to a module signed by the distribution."""
    return CANONICAL + bytes([0, 0, 2, 0, 0, 0, 0, 0]) + len(CANONICAL).to_bytes(4, "big") + SIGNED


def libraries(version: str, names: tuple[str, ...]) -> dict[str, File]:
    """Library files with their links. They hold their version as text; nothing can be linked against them."""
    files: dict[str, File] = {}
    for name in names:
        files[f"{LIBRARIES}/{name}.so.{version}"] = text(f"simulated {name} {version}\n")
        files[f"{LIBRARIES}/{name}.so.1"] = link(f"{name}.so.{version}")
    return files


def nvidia_smi() -> File:
    return text(Path(gpu_simulator.__file__).read_text(), 0o755)


def dkms_source(name: str, version: str, is_open: bool) -> dict[str, File]:
    """/usr/src/NAME-VERSION with a dkms.conf whose build step writes the modules."""
    folder = f"/usr/src/{name}-{version}"
    lines = [
        f'PACKAGE_NAME="{name}"',
        f'PACKAGE_VERSION="{version}"',
        'CLEAN="rm -f *.ko"',
        'MAKE[0]="python3 build.py ${kernelver}"',
        'AUTOINSTALL="yes"',
    ]
    for number, built in enumerate(NVIDIA_MODULES):
        lines += [
            f'BUILT_MODULE_NAME[{number}]="{built}"',
            f'DEST_MODULE_LOCATION[{number}]="/kernel/drivers/char/drm"',
            f'STRIP[{number}]="no"',
        ]
    rows = repr({name: (depends, aliases) for name, (depends, aliases) in NVIDIA_MODULES.items()})
    program = BUILD.format(version=version, licence=licence(is_open), modules=rows)
    image = inspect.getsource(gpu_simulator.module_image)
    return {
        f"{folder}/dkms.conf": text("\n".join(lines) + "\n"),
        f"{folder}/build.py": text(f"{program}\n\n{image}\n\nmain()\n", 0o755),
    }


#: "Builds" the modules of one kernel. /etc/volta-lab/dkms-fails names what does not build: lines "VERSION KERNEL" with
#: shell patterns. Driver 535.183.01 does not build on Linux 6.10 and later, as its real sources do not.
BUILD = '''\
#!/usr/bin/python3
"""Writes the simulated NVIDIA modules for one kernel."""
from __future__ import annotations

import fnmatch
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

VERSION = "{version}"
LICENCE = "{licence}"
MODULES = {modules}
TOO_OLD = {{"535.183.01": (6, 10)}}


def refused(kernel):
    number = tuple(int(part) for part in re.findall(r"\\d+", kernel)[:2])
    if VERSION in TOO_OLD and number >= TOO_OLD[VERSION]:
        return True
    path = Path("/etc/volta-lab/dkms-fails")
    lines = path.read_text().splitlines() if path.exists() else []
    words = [line.split() for line in lines if len(line.split()) == 2]
    return any(fnmatch.fnmatch(VERSION, a) and fnmatch.fnmatch(kernel, b) for a, b in words)


def main():
    kernel = sys.argv[1]
    if refused(kernel):
        print("  CC [M]  nvidia-drm/nvidia-drm-drv.o")
        print("nvidia-drm/nvidia-drm-drv.c:263:37: error: 'struct drm_mode_config_funcs' has no member named "
              "'output_poll_changed'")
        print("make[3]: *** [scripts/Makefile.build:243: nvidia-drm/nvidia-drm-drv.o] Error 1")
        sys.exit(2)
    for name, (depends, aliases) in MODULES.items():
        image = module_image(VERSION, LICENCE, name=name.replace("-", "_"), kernel=kernel, aliases=aliases,
                             depends=depends)
        Path(name + ".ko").write_bytes(image)
'''

#: Ubuntu's packages blacklist nouveau themselves, in the package with the udev rules.
BLACKLIST = """\
# This file was installed by nvidia-kernel-common
# Do not edit this file manually

blacklist nouveau
blacklist lbm-nouveau
alias nouveau off
alias lbm-nouveau off
"""

#: Ubuntu's unit; it has no [Install] part: a udev rule starts it. -server packages switch the mode on.
PERSISTENCED_UNIT = """\
[Unit]
Description=NVIDIA Persistence Daemon
Wants=syslog.target
StopWhenUnneeded=true
Before=systemd-backlight@backlight:nvidia_0.service

[Service]
Type=forking
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced {mode} --verbose
ExecStopPost=/bin/rm -rf /var/run/nvidia-persistenced
"""

PERSISTENCED = """\
#!/bin/sh
# The simulated persistence daemon: all of it is in the GPU simulator.
exec /usr/local/sbin/gpu-sim persistenced "$@"
"""

#: shim-signed's program that makes the machine's own key; enrolling it needs somebody at the console.
SECUREBOOT_POLICY = """\\
#!/bin/sh
set -e
[ "$1" = --new-key ] || exit 0
folder=/var/lib/shim-signed/mok
[ ! -e $folder/MOK.priv ] || exit 0
mkdir -p $folder
openssl req -new -x509 -nodes -days 36500 -subj "/CN=$(hostname) Secure Boot Module Signature key" \\
    -newkey rsa:2048 -keyout $folder/MOK.priv -outform DER -out $folder/MOK.der >/dev/null 2>&1
"""

MODPROBE = """\
#!/bin/sh
# nvidia-modprobe loads the driver's modules when they are not loaded. It is setuid root on a real machine.
module=nvidia
for word in "$@"; do
    case $word in
        -u | --unified-memory) module=nvidia-uvm ;;
        -m | --modeset) module=nvidia-modeset ;;
    esac
done
exec /sbin/modprobe "$module"
"""
