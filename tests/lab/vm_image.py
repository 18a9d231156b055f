# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The disk of the virtual machine: the base image's recipe, a kernel of its own, an initramfs and GRUB.

No loop device is needed: mmdebstrap fills a folder, mke2fs makes a file system of it, and GRUB's boot sector and core
are written in front of it. The disk is then started once, so that GRUB installs itself from inside and writes its own
configuration. The finished disk is kept by the hash of all it is made of; a machine gets an overlay of it.

The machine starts with the newest kernel but one that the archive has, from Debian's own packages: so the archive
really offers a newer one.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.lab import image, vm_packages
from tests.lab.proc import as_root, run, say

#: Raise when the way of building changes in a way the inputs below do not show.
RECIPE = 1
#: What a server with a kernel of its own has beside the base image's packages.
PACKAGES = (
    "apt-utils",
    "dkms",
    "e2fsprogs",
    "grub-pc",
    "initramfs-tools",
    "pciutils",
    "unattended-upgrades",
    "zstd",
)
LABEL = "volta-vm-root"
#: Bytes. The file is sparse: only what is written takes room on the host.
DISK_SIZE = 12 << 30
#: Where the only partition begins: the usual first mebibyte, GRUB's core lies in the gap before it.
PARTITION_START = 1 << 20
SECTOR = 512
#: What GRUB 2.06 (Debian 12) can read; newer versions of mke2fs switch on more than that by themselves.
FEATURES = (
    "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,"
    "dir_nlink,extra_isize,metadata_csum"
)
#: The user network of qemu: fixed addresses, so nothing waits for DHCP. HOST reaches this host's loopback.
HOST = "10.0.2.2"
NETWORK = """\
[Match]
Type=ether

[Network]
Address=10.0.2.15/24
Gateway=10.0.2.2
LinkLocalAddressing=no
IPv6AcceptRA=no
"""
#: The card in slot 0x10 is an `edu` of qemu. udev gives it a V100's modalias, so what udev does at every start for a
#: real V100 (load whatever module claims it) happens here with the real kernel, its real modules and real modprobe.d.
V100_MODALIAS = "pci:v000010DEd00001DB5sv000010DEsd00001249bc03sc02i00"
V100_SLOT = "0000:00:10.0"
#: What a V100 says of itself in /sys, laid over what the `edu` says.
V100_IDENTITY = {
    "vendor": "0x10de",
    "device": "0x1db5",
    "class": "0x030200",
    "subsystem_vendor": "0x10de",
    "subsystem_device": "0x1249",
    "modalias": V100_MODALIAS,
}
V100_FOLDER = "/usr/local/lib/lab-v100"
V100_UNIT = f"""\
[Unit]
Description=The identity of a V100 for the card in slot {V100_SLOT}
DefaultDependencies=no
After=local-fs.target
Before=sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -ec 'for file in {V100_FOLDER}/*; do \
    mount --bind $$file /sys/bus/pci/devices/{V100_SLOT}/$$(basename $$file); done'

[Install]
WantedBy=sysinit.target
"""
#: What makes a machine itself (who may log in, its host key) comes in through qemu's fw_cfg, before sshd starts.
IDENTITY = "opt/volta-lab/identity"
IDENTITY_UNIT = f"""\
[Unit]
Description=Keys of this virtual machine
Before=ssh.service

[Service]
Type=oneshot
ExecStartPre=/sbin/modprobe qemu_fw_cfg
ExecStart=/bin/tar -xf /sys/firmware/qemu_fw_cfg/by_name/{IDENTITY}/raw -C /

[Install]
WantedBy=multi-user.target
"""
V100_RULE = f"""\
ACTION=="add", SUBSYSTEM=="pci", KERNEL=="{V100_SLOT}", ENV{{MODALIAS}}="{V100_MODALIAS}"
"""
FILES = {
    "/etc/fstab": f"LABEL={LABEL} / ext4 defaults 0 0\n",
    "/etc/systemd/network/10-user.network": NETWORK,
    "/etc/systemd/system/lab-identity.service": IDENTITY_UNIT,
    "/etc/systemd/system/lab-v100.service": V100_UNIT,
    **{f"{V100_FOLDER}/{name}": f"{text}\n" for name, text in V100_IDENTITY.items()},
    "/etc/udev/rules.d/70-lab-v100.rules": V100_RULE,
    "/etc/hosts": f"127.0.0.1 localhost\n127.0.1.1 volta-vm\n{HOST} lab-host\n",
    "/etc/hostname": "volta-vm\n",
    # A few modules instead of hundreds: an initramfs is made and loaded in seconds, in software too.
    "/etc/initramfs-tools/conf.d/lab": "MODULES=list\nCOMPRESSLEVEL=1\n",
    "/etc/initramfs-tools/modules": "virtio_pci\nvirtio_blk\next4\ncrc32c_generic\n",
    "/etc/default/grub.d/50-lab.cfg": (
        "GRUB_TIMEOUT=1\n"
        'GRUB_TERMINAL="serial console"\nGRUB_SERIAL_COMMAND="serial --speed=115200"\n'
        'GRUB_CMDLINE_LINUX_DEFAULT=""\nGRUB_CMDLINE_LINUX="console=ttyS0 mitigations=off"\n'
        "GRUB_DISABLE_OS_PROBER=true\n"
    ),
}
#: The newest kernel of the release but one, and the meta package of its version: Debian's where the archive still has
#: it (the stable release beside the security archive), else one of the same shape made here.
KERNEL = r"""
set -e
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
images=$(apt-cache pkgnames linux-image-6 | grep -E '^linux-image-[0-9.]+-[0-9]+-amd64$' | sort -V)
former=
for version in $(apt-cache madison linux-image-amd64 | cut -d'|' -f2 | tr -d ' ' | sort -V | head -n -1); do
    former=$version
done
if [ -n "$former" ]; then
    apt-get install -q --yes --no-install-recommends "linux-image-amd64=$former" "linux-headers-amd64=$former"
else
    package=$(printf '%s\n' $images | tail -n 2 | head -n 1)
    release=${package#linux-image-}
    apt-get install -q --yes --no-install-recommends "$package" "linux-headers-$release"
    version=$(dpkg-query -W -f '${source:Version}' "linux-headers-$release")
    for kind in image headers; do
        mkdir -p /tmp/meta/DEBIAN
        cat > /tmp/meta/DEBIAN/control <<END
Package: linux-$kind-amd64
Source: linux-signed-amd64
Version: $version
Architecture: amd64
Section: kernel
Depends: linux-$kind-$release
Maintainer: The volta.llm authors <root@localhost>
Description: Linux for 64-bit PCs (meta-package, former version, made by the lab)
END
        dpkg-deb --build --root-owner-group /tmp/meta /tmp/meta.deb
        dpkg -i /tmp/meta.deb
        rm -r /tmp/meta /tmp/meta.deb
    done
fi
rm -f /var/cache/apt/archives/*.deb
"""
#: The stand-in driver from an archive on the disk, with labels that unattended-upgrades takes. DKMS compiles it
#: here: on the machine itself, in software, that takes many minutes.
DRIVER = f"""
set -e
export DEBIAN_FRONTEND=noninteractive
cd {vm_packages.ARCHIVE}
apt-ftparchive packages . > Packages
apt-ftparchive -o APT::FTPArchive::Release::Origin=Debian -o APT::FTPArchive::Release::Label=Debian \\
    -o APT::FTPArchive::Release::Codename=bookworm release . > /tmp/Release
mv /tmp/Release Release
echo 'deb [trusted=yes] file:{vm_packages.ARCHIVE} ./' > /etc/apt/sources.list.d/lab.list
apt-get update -q
version={vm_packages.revision(vm_packages.DRIVER)}
apt-get install -q --yes --no-install-recommends \\
    nvidia-driver=$version nvidia-kernel-dkms=$version libnvidia-ml1=$version
dkms status | grep ': installed'
"""
#: GRUB as a boot sector and a core image, before there is a disk it could install itself on.
GRUB = f"""
set -e
systemctl enable systemd-networkd.service lab-identity.service lab-v100.service >/dev/null 2>&1
for unit in e2scrub_all.timer e2scrub_reap.service; do ln -sf /dev/null /etc/systemd/system/$unit; done
mkdir -p /boot/grub
cp -r /usr/lib/grub/i386-pc /boot/grub/
grub-mkimage -O i386-pc -p '(hd0,msdos1)/boot/grub' -o /boot/grub/core.img biosdisk part_msdos ext2
kernel=$(ls /boot/vmlinuz-*)
cat > /boot/grub/grub.cfg <<END
insmod linux
linux $kernel root=LABEL={LABEL} ro console=ttyS0 mitigations=off
initrd $(ls /boot/initrd.img-*)
boot
END
printf 'grub-pc grub-pc/install_devices multiselect /dev/vda\\n' | debconf-set-selections
"""
#: The package lists stay, unlike in the base image. In software, apt takes minutes with the main archive's: where the
#: security archive has the newer kernel, it is the only one from here on. That kernel is downloaded. Names are qemu's.
LISTS = r"""
set -e
apt-get clean
cp /etc/apt/sources.list /etc/apt/sources.list.all
grep -- '-security' /etc/apt/sources.list.all > /etc/apt/sources.list
apt-get update -q
candidate=$(apt-cache policy linux-image-amd64 | sed -n 's/^  Candidate: //p')
if ! dpkg --compare-versions "$candidate" gt "$(dpkg-query -W -f '${Version}' linux-image-amd64)"; then
    cp /etc/apt/sources.list.all /etc/apt/sources.list
    apt-get update -q
fi
apt-get install -q --yes --download-only --no-install-recommends linux-image-amd64
apt-cache policy > /dev/null
echo nameserver 10.0.2.3 > /etc/resolv.conf
"""
#: Run on the first start: GRUB installs itself as it would from a Debian installer. Nobody can log in afterwards.
FIRST_START = """
set -e
grub-install /dev/vda
update-grub
rm -f /etc/ssh/ssh_host_* /root/.ssh/authorized_keys
: > /etc/machine-id
sync
systemctl --no-block poweroff
"""


@dataclass(frozen=True)
class Recipe:
    """All a disk is made of: the base image's recipe and what this module adds."""

    base: image.Recipe

    @property
    def digest(self) -> str:
        parts = {
            "recipe": RECIPE,
            "base": self.base.digest,
            "packages": PACKAGES,
            "files": FILES,
            "archive": hashlib.sha256(vm_packages.archive()).hexdigest(),
            "scripts": [KERNEL, DRIVER, GRUB, LISTS, FIRST_START],
            "disk": [LABEL, DISK_SIZE, PARTITION_START, FEATURES],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        return f"vm-{self.base.suite}-{self.digest}.raw"


def recipe(suite: str = "bookworm") -> Recipe:
    """The recipe for this host as it is now."""
    return Recipe(image.recipe(suite, None))


def make(wanted: Recipe, disk: Path) -> None:
    """Write the disk. It starts, but GRUB has not yet installed itself from inside."""
    say(f"making the virtual machine's disk from Debian {wanted.base.suite} (a few minutes)")
    with tempfile.TemporaryDirectory(prefix="volta-lab-vm-", dir=disk.parent) as scratch:
        folder = Path(scratch)
        root = folder / "root"
        try:
            _bootstrap(wanted, folder, root)
            boot, core = (_read(root / "boot/grub" / name) for name in ("i386-pc/boot.img", "core.img"))
            with disk.open("wb") as handle:
                handle.truncate(DISK_SIZE)
                handle.write(front(boot, core))
            blocks = (DISK_SIZE - PARTITION_START) // 1024
            options = ["-q", "-F", "-t", "ext4", "-O", FEATURES, "-L", LABEL, "-m", "0"]
            place = ["-E", f"offset={PARTITION_START}", "-d", str(root), str(disk), f"{blocks}k"]
            run(as_root(["mke2fs", *options, *place]))
        finally:
            run(as_root(["rm", "-rf", "--one-file-system", str(root)]))


def _bootstrap(wanted: Recipe, folder: Path, root: Path) -> None:
    files = folder / "files.tar"
    files.write_bytes(image.tar_of({**wanted.base.files}))
    own = folder / "own.tar"
    own.write_bytes(image.tar_of(FILES))
    archive = folder / "archive.tar"
    archive.write_bytes(vm_packages.archive())
    scripts = []
    for number, text in enumerate((KERNEL, DRIVER, GRUB, image.FINISH, LISTS)):
        script = folder / f"script-{number}"
        script.write_text(text)
        scripts.append(f'--customize-hook=chroot "$1" sh < {script}')
    run(
        as_root(
            [
                # Its mounts and its children go with it, also when it is killed.
                *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
                "mmdebstrap",
                "--mode=root",
                "--variant=minbase",
                "--format=directory",
                "--skip=cleanup/apt",
                f"--include={','.join((*image.PACKAGES, *PACKAGES))}",
                f"--setup-hook=tar-in {files} /",
                f"--customize-hook=tar-in {own} /",
                f"--customize-hook=tar-in {archive} /",
                *scripts,
                wanted.base.suite,
                str(root),
                *wanted.base.sources,
            ]
        )
    )


def _read(path: Path) -> bytes:
    return run(as_root(["cat", str(path)])).stdout


def front(boot: bytes, core: bytes) -> bytes:
    """What lies before the partition: GRUB's boot sector with the partition table, then GRUB's core.

    The boot sector loads the sector after it, and that one the sectors after itself: how both are made by default.
    """
    if len(core) > PARTITION_START - SECTOR:
        raise ValueError(f"GRUB's core of {len(core)} bytes does not fit before the partition")
    start, length = PARTITION_START // SECTOR, (DISK_SIZE - PARTITION_START) // SECTOR
    # Active, type Linux; cylinders and heads say "see the sector numbers".
    entry = struct.pack("<B3sB3sII", 0x80, b"\xfe\xff\xff", 0x83, b"\xfe\xff\xff", start, length)
    table = struct.pack("<IH", 0x564F4C54, 0) + entry + bytes(48) + b"\x55\xaa"
    return boot[:440] + table + core
