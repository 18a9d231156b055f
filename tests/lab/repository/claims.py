# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What makes a Debian machine of the lab claim to be an Ubuntu server: files, and what the archive brings."""

from __future__ import annotations

from collections.abc import Mapping

from tests.lab.repository.ubuntu import RELEASES

#: --claims: the release's codename.
CLAIMS = {"ubuntu-22.04": "jammy", "ubuntu-24.04": "noble"}
#: --kernel: the meta package, with the release's number.
KERNELS = {"generic": "linux-generic", "hwe": "linux-generic-hwe-{number}", "virtual": "linux-virtual"}

#: From Debian's archive: what an Ubuntu server has, and what the driver's packages need. Nothing of it is simulated.
SERVER_PACKAGES = (
    "adduser",
    "dkms",
    "gpg",
    "grub-common",
    "grub2-common",
    "initramfs-tools",
    "libelf1",
    "lsb-release",
    "mokutil",
    "pciutils",
    "unattended-upgrades",
    "zstd",
)

_UNATTENDED = """\
Unattended-Upgrade::Allowed-Origins {
\t"${distro_id}:${distro_codename}";
\t"${distro_id}:${distro_codename}-security";
\t"${distro_id}ESMApps:${distro_codename}-apps-security";
\t"${distro_id}ESM:${distro_codename}-infra-security";
};
Unattended-Upgrade::Package-Blacklist {
};
Unattended-Upgrade::DevRelease "auto";
"""
#: Debian's archive serves everything but kernels and drivers: of those no package of Debian is ever a candidate.
_NOT_DEBIANS = (
    "linux-image* linux-headers* linux-modules* linux-kbuild* linux-compiler* linux-generic* linux-virtual* "
    "linux-firmware firmware-* intel-microcode amd64-microcode nvidia-* libnvidia-* libcuda* cuda-* xserver-xorg* nvtop"
)
_PREFERENCES = f"Package: {_NOT_DEBIANS}\nPin: release o=Debian\nPin-Priority: -1\n"
#: Ubuntu's initramfs has the display drivers, since plymouth is there.
_FRAMEBUFFER = """\
#!/bin/sh
[ "$1" != prereqs ] || exit 0
. /usr/share/initramfs-tools/hook-functions
copy_modules_dir kernel/drivers/gpu
"""
#: grub-probe cannot find the device of a container's root.
_GRUB_PROBE = """\
#!/bin/sh
# Written by the lab: the answers for a server with its root on one ext4 partition.
case " $* " in
    *" --target=fs_uuid "* | *" -t fs_uuid "*) echo 11111111-2222-4333-8444-555555555555 ;;
    *" --target=partuuid "*) echo 66666666-01 ;;
    *" --target=fs "* | *" -t fs "*) echo ext2 ;;
    *" --target=device "* | *" -t device "*) echo /dev/sda1 ;;
    *" --target=abstraction "*) ;;
    *" --target=partmap "*) echo gpt ;;
    *" --target=compatibility_hint "*) echo hd0,gpt1 ;;
    *" --target=hints_string "*) ;;
    *) echo hd0,gpt1 ;;
esac
"""
_UPDATE_GRUB = """\
#!/bin/sh
# As in Ubuntu, less the look at whether this is a container.
set -e
command -v update-grub >/dev/null || exit 0
set -- $DEB_MAINT_PARAMS
mode="${1#\\'}"
mode="${mode%\\'}"
case $0:$mode in
    */postinst.d/*: | */postinst.d/*:configure | */postrm.d/*: | */postrm.d/*:remove)
        [ ! -e /boot/grub/grub.cfg ] || exec update-grub
        ;;
esac
"""
_REBOOT_NOTICE = """\
#!/bin/sh
# update-notifier's hook: a new kernel wants a reboot.
echo '*** System restart required ***' >/run/reboot-required
echo "linux-image-$1" >>/run/reboot-required.pkgs
"""
_GRUB = """\
GRUB_DEFAULT=0
GRUB_TIMEOUT_STYLE=hidden
GRUB_TIMEOUT=0
GRUB_DISTRIBUTOR=Ubuntu
GRUB_CMDLINE_LINUX_DEFAULT=""
GRUB_CMDLINE_LINUX=""
GRUB_DISABLE_OS_PROBER=true
"""
#: lab-archive WORD ...: what the archive that this machine sees consists of.
_SWITCH = """\
#!/bin/sh
# Written by the lab. lab-archive base|dropped [updates] [transition]: what the archive of this machine has from now on.
set -e
suites=
for word in "$@"; do
    case $word in
        base) suites="$suites CODENAME" ;;
        dropped) suites="$suites CODENAME-dropped" ;;
        updates) suites="$suites CODENAME-updates CODENAME-security" ;;
        transition) suites="$suites CODENAME-transition" ;;
        *)
            echo "lab-archive: $word is none of: base dropped updates transition" >&2
            exit 2
            ;;
    esac
done
[ -z "$suites" ] || sed -i "s|^Suites:.*|Suites:$suites|" /etc/apt/sources.list.d/ubuntu.sources
sed -n 's|^Suites: ||p' /etc/apt/sources.list.d/ubuntu.sources
"""
EXECUTABLE = (
    "/etc/kernel/postinst.d/zz-update-grub",
    "/etc/kernel/postrm.d/zz-update-grub",
    "/etc/kernel/postinst.d/update-notifier",
    "/usr/share/initramfs-tools/hooks/framebuffer",
    "/usr/local/lib/volta-lab/grub-probe",
    "/usr/local/sbin/lab-archive",
)


def files(claim: str) -> Mapping[str, str]:
    """The files of the image, by path."""
    release = RELEASES[CLAIMS[claim]]
    title = f"Ubuntu {release.number} LTS"
    codename = release.codename
    return {
        "/etc/os-release": (
            f'PRETTY_NAME="{title}"\nNAME="Ubuntu"\nVERSION_ID="{release.number}"\n'
            f'VERSION="{release.number} LTS ({codename.capitalize()})"\nVERSION_CODENAME={codename}\n'
            f"ID=ubuntu\nID_LIKE=debian\nUBUNTU_CODENAME={codename}\n"
        ),
        "/etc/lsb-release": (
            f"DISTRIB_ID=Ubuntu\nDISTRIB_RELEASE={release.number}\nDISTRIB_CODENAME={codename}\n"
            f'DISTRIB_DESCRIPTION="{title}"\n'
        ),
        "/etc/apt/preferences.d/00volta-lab": _PREFERENCES,
        "/etc/apt/apt.conf.d/50unattended-upgrades": _UNATTENDED,
        "/etc/apt/apt.conf.d/20auto-upgrades": (
            'APT::Periodic::Update-Package-Lists "1";\nAPT::Periodic::Unattended-Upgrade "1";\n'
        ),
        "/etc/default/grub": _GRUB,
        "/etc/kernel/postinst.d/zz-update-grub": _UPDATE_GRUB,
        "/etc/kernel/postrm.d/zz-update-grub": _UPDATE_GRUB,
        "/etc/kernel/postinst.d/update-notifier": _REBOOT_NOTICE,
        "/usr/share/initramfs-tools/hooks/framebuffer": _FRAMEBUFFER,
        "/usr/local/lib/volta-lab/grub-probe": _GRUB_PROBE,
        "/usr/local/sbin/lab-archive": _SWITCH.replace("CODENAME", codename),
    }


def sources(claim: str, url: str) -> str:
    """The machine's entry for Ubuntu's archive, in the deb822 form."""
    return (
        "# Written by the lab; lab-archive changes the suites.\n"
        f"Types: deb\nURIs: {url}/ubuntu\nSuites: {CLAIMS[claim]}\n"
        "Components: main restricted universe multiverse\nSigned-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n"
    )


def finish(claim: str, kernel: str) -> str:
    """The script that ends the making of the image: installs the kernel from the archive at /volta-archive."""
    release = RELEASES[CLAIMS[claim]]
    meta = KERNELS[kernel].format(number=release.number)
    return f"""\
set -e
cp /volta-archive/keys/ubuntu.gpg /usr/share/keyrings/ubuntu-archive-keyring.gpg
dpkg-divert --quiet --local --rename --divert /usr/sbin/grub-probe.distrib --add /usr/sbin/grub-probe
ln -s /usr/local/lib/volta-lab/grub-probe /usr/sbin/grub-probe
sed 's|^URIs:.*|URIs: file:/volta-archive/ubuntu|' >/tmp/ubuntu.sources <<'EOF'
{sources(claim, "")}EOF
mkdir -p /boot/grub
grub-editenv /boot/grub/grubenv create
cp /tmp/ubuntu.sources /etc/apt/sources.list.d/ubuntu.sources
options="-o Dir::Etc::sourcelist=/dev/null -o APT::Sandbox::User=root"
apt-get $options -qq update
DEBIAN_FRONTEND=noninteractive apt-get $options -qq install --yes --no-install-recommends {meta} shim-signed >/dev/null
update-grub 2>/dev/null
rm -rf /var/lib/apt/lists/* /tmp/ubuntu.sources /etc/apt/sources.list.d/ubuntu.sources /run/reboot-required*
rm -f /var/log/apt/history.log /var/log/apt/term.log
"""
