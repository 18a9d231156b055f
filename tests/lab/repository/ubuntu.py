# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is in the archive: the tables first, then how packages are made of them.

Names, sources, versions and relations follow Ubuntu's packages linux, linux-meta, linux-restricted-modules and
nvidia-graphics-drivers-* (the relations of nvidia-driver-550 as printed by ``dpkg-deb --info``; Provides of
linux-modules-nvidia-*-generic as printed by ``apt-cache show``). Packages that no test needs are left out, and with
them the relations to them. i386 is left out: the machines have one architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tests.lab.repository import payload
from tests.lab.repository.archive import Suite, digest_of_packages
from tests.lab.repository.deb import File, Package, text

# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------

#: Pockets, in the order in which they came to be. A machine starts with "base" alone.
BASE, UPDATES, TRANSITION = "base", "updates", "transition"


@dataclass(frozen=True)
class Kernel:
    """One kernel: ``abi`` 5.15.0-139, upload ``.149``; ``hwe`` for the enablement series, built in ``source``."""

    abi: str
    upload: str
    pocket: str
    hwe: bool = False
    source: str = "linux"
    meta: str | None = None

    @property
    def release(self) -> str:
        """What uname -r says."""
        return f"{self.abi}-generic"

    @property
    def version(self) -> str:
        return f"{self.abi}.{self.upload}"

    @property
    def meta_version(self) -> str:
        # linux-meta of the GA series writes 5.15.0.139.135, of later ones 6.8.0-59.61.
        return self.meta or self.version

    @property
    def headers(self) -> str:
        """The package with the headers that all flavours share."""
        infix = "" if self.source == "linux" else self.source.removeprefix("linux") + "-"
        return f"linux{infix or '-'}headers-{self.abi}"


@dataclass(frozen=True)
class Driver:
    """One version of one driver flavour in Ubuntu: ``flavour`` is 535, 535-server, ...; ``revision`` 0ubuntu0.22.04.1.

    ``becomes`` makes every package of it a transitional one to that flavour. ``older`` is kept in the index for a
    downgrade, as a mirror with a history would, but no modules are prebuilt for it.
    """

    flavour: str
    upstream: str
    pocket: str
    revision: str = "0ubuntu0.{release}.1"
    becomes: str | None = None
    older: bool = False

    @property
    def branch(self) -> str:
        return self.flavour.split("-")[0]


@dataclass(frozen=True)
class Release:
    """One release of Ubuntu."""

    codename: str
    number: str
    kernels: tuple[Kernel, ...]

    def version(self, driver: Driver) -> str:
        return f"{driver.upstream}-{driver.revision.format(release=self.number)}"


RELEASES = {
    "jammy": Release(
        "jammy",
        "22.04",
        (
            Kernel("5.15.0-139", "149", BASE, meta="5.15.0.139.135"),
            Kernel("6.8.0-59", "61~22.04.1", BASE, hwe=True, source="linux-hwe-6.8"),
            Kernel("5.15.0-151", "161", UPDATES, meta="5.15.0.151.147"),
            Kernel("6.8.0-60", "63~22.04.1", UPDATES, hwe=True, source="linux-hwe-6.8"),
        ),
    ),
    "noble": Release(
        "noble",
        "24.04",
        (
            Kernel("6.8.0-59", "61", BASE),
            Kernel("6.11.0-26", "26~24.04.1", BASE, hwe=True, source="linux-hwe-6.11"),
            Kernel("6.8.0-60", "63", UPDATES),
            Kernel("6.14.0-24", "24~24.04.3", UPDATES, hwe=True, source="linux-hwe-6.14"),
        ),
    ),
}

DRIVERS = (
    Driver("535", "535.183.01", BASE, older=True),
    Driver("535", "535.261.03", BASE),
    Driver("535", "535.288.01", UPDATES),
    Driver("535-server", "535.183.01", BASE, older=True),
    Driver("535-server", "535.261.03", BASE),
    Driver("535-server", "535.288.01", UPDATES),
    Driver("550", "550.120", BASE),
    Driver("550", "550.144.03", UPDATES),
    Driver("550-server", "550.163.01", BASE),
    # pop-os/pop#3549: the same version with the next revision points to 570.
    Driver("550-server", "550.163.01", UPDATES, revision="0ubuntu0.{release}.2", becomes="570-server"),
    Driver("570", "570.133.07", BASE),
    Driver("570", "570.211.01", UPDATES),
    Driver("570-server", "570.133.20", BASE),
    Driver("570-server", "570.211.01", UPDATES),
    Driver("580", "580.82.07", BASE),
    Driver("580", "580.126.09", UPDATES),
    Driver("580-server", "580.82.07", BASE),
    Driver("580-server", "580.126.09", UPDATES),
    Driver("590", "590.44.01", BASE),
    Driver("590", "590.48.01", UPDATES),
    # Older branches that have long become transitional, as 530 did (version and source are those of the target).
    Driver("530", "535.261.03", BASE, becomes="535"),
    Driver("545", "550.120", BASE, becomes="550"),
    # Not in any suite of a machine's own: what happens on the day 535 is given up.
    Driver("535", "535.288.01", TRANSITION, revision="0ubuntu0.{release}.2", becomes="580"),
    Driver("535-server", "535.288.01", TRANSITION, revision="0ubuntu0.{release}.2", becomes="580-server"),
)

#: Branches that also come with the open kernel module.
OPEN_BRANCHES = ("535", "550", "570", "580", "590")

#: NVIDIA's own archive ("cuda repo"): (branch, version, pocket). From 590 on names carry no branch.
NVIDIA_DRIVERS = (
    ("535", "535.183.01", BASE),
    ("535", "535.261.03", BASE),
    ("535", "535.288.01", UPDATES),
    ("550", "550.163.01", BASE),
    ("570", "570.211.01", BASE),
    ("580", "580.82.07", BASE),
    ("580", "580.126.09", UPDATES),
    ("", "590.44.01", BASE),
    ("", "590.48.01", UPDATES),
)

#: Packages beside the driver: name, version, source, section, architecture, relations.
COMPANIONS = (
    ("nvidia-settings", "510.47.03-0ubuntu1", "nvidia-settings", "libs", {"Recommends": "libnvidia-cfg1"}),
    ("nvidia-prime", "0.8.17.1", "nvidia-prime", "utils", {}),
    ("nvidia-modprobe", "470.42.01-1", "nvidia-modprobe", "multiverse/x11", {}),
    ("linux-firmware", "20220329.git681281e4-0ubuntu3.36", "linux-firmware", "misc", {}),
    ("intel-microcode", "3.20250211.0ubuntu0", "intel-microcode", "restricted/admin", {}),
    ("amd64-microcode", "3.20191218.1ubuntu2.3", "amd64-microcode", "admin", {}),
    ("xserver-xorg-core", "2:21.1.4-2ubuntu1.7~22.04.14", "xorg-server", "x11", {"Provides": "xorg-video-abi-25"}),
    ("shim-signed", "1.51.4+15.8-0ubuntu1", "shim-signed", "utils", {"Depends": "openssl"}),
    # Syllo/nvtop#51, #68, #118: Ubuntu's build depends on the library package of one branch, here a transitional one.
    ("nvtop", "1.2.2-1", "nvtop", "universe/utils", {"Depends": "libc6, libnvidia-compute-545"}),
)


# ---------------------------------------------------------------------------------------------------------------------
# Suites
# ---------------------------------------------------------------------------------------------------------------------

COMPONENTS = ("main", "restricted", "universe", "multiverse")
UBUNTU_KEY, NVIDIA_KEY = "ubuntu", "nvidia"


def suites(codenames: Iterable[str] = tuple(RELEASES)) -> list[Suite]:
    """Every suite: for each release CODENAME, -updates, -security (the same as -updates), -transition and -dropped
    (as CODENAME, without 535), and NVIDIA's archive as it is and as it will be.
    """
    found: list[Suite] = []
    for codename in codenames:
        release = RELEASES[codename]
        pockets = {pocket: list(packages(release, pocket)) for pocket in (BASE, UPDATES, TRANSITION)}
        contents = {
            "": pockets[BASE],
            "-updates": pockets[UPDATES],
            "-security": pockets[UPDATES],
            "-transition": pockets[TRANSITION],
            "-dropped": [package for package in pockets[BASE] if "-535" not in package.name],
        }
        for suffix, content in contents.items():
            name = f"{codename}{suffix}"
            fields = {"Origin": "Ubuntu", "Label": "Ubuntu", "Suite": name, "Version": release.number,
                      "Codename": codename, "Description": f"Ubuntu {name} (simulated)"}  # fmt: skip
            found.append(Suite(f"ubuntu/dists/{name}", UBUNTU_KEY, fields, content, COMPONENTS))
        number = release.number.replace(".", "")
        fields = {"Origin": "NVIDIA", "Label": "NVIDIA CUDA"}
        theirs = {pocket: list(nvidia_packages(release, pocket)) for pocket in (BASE, UPDATES)}
        found.append(Suite(f"cuda/ubuntu{number}/x86_64", NVIDIA_KEY, fields, theirs[BASE]))
        later = [*theirs[BASE], *theirs[UPDATES]]
        found.append(Suite(f"cuda-updates/ubuntu{number}/x86_64", NVIDIA_KEY, fields, [replace(p) for p in later]))
    return found


def packages(release: Release, pocket: str) -> Iterator[Package]:
    """All packages of one pocket of Ubuntu's archive."""
    yield from kernels(release, pocket)
    for driver in DRIVERS:
        if driver.pocket == pocket:
            yield from drivers(release, driver)
    if pocket in (BASE, UPDATES):
        yield from prebuilt(release, pocket)
    if pocket == BASE:
        yield from companions()


def kernel_stamp(codename: str) -> str:
    """What a machine's first kernel is made of, as a hash."""
    release = RELEASES[codename]
    return digest_of_packages([*kernels(release, BASE), *companions()])


def companions() -> Iterator[Package]:
    """The packages beside kernels and drivers."""
    for name, version, source, section, relations in COMPANIONS:
        files = {"/usr/bin/nvidia-modprobe": text(payload.MODPROBE, 0o4755)} if name == "nvidia-modprobe" else {}
        if name == "shim-signed":
            files = {"/usr/sbin/update-secureboot-policy": text(payload.SECUREBOOT_POLICY, 0o755)}
        if name == "nvtop":
            files = {"/usr/bin/nvtop": text("#!/bin/sh\necho simulated\n", 0o755)}
        yield Package(name, version, source, section, f"{name} (simulated)", relations=relations, files=files)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


def _hooks(folder: str, kernel: str, action: str) -> str:
    """Run the hooks that make the initramfs, DKMS modules and GRUB's menu, as the real maintainer scripts do."""
    return (
        "#!/bin/sh\nset -e\n"
        f'[ "$1" = {action} ] || exit 0\n'
        f"depmod {kernel}\n"
        "export DEB_MAINT_PARAMS=\"'$1' '$2'\"\n"
        f"if [ -d {folder} ]; then\n"
        f"    run-parts --report --exit-on-error --arg={kernel} --arg=/boot/vmlinuz-{kernel} {folder}\n"
        "fi\n"
    )


def kernels(release: Release, pocket: str) -> Iterator[Package]:
    """Images, modules, headers and metas."""
    for kernel in release.kernels:
        if kernel.pocket != pocket:
            continue
        name, version = kernel.release, kernel.version
        after = f'#!/bin/sh\nset -e\n[ "$1" = configure ] || exit 0\n[ ! -e /boot/vmlinuz-{name} ] || depmod {name}\n'
        yield Package(
            f"linux-modules-{name}", version, kernel.source, "kernel", "Linux kernel modules",
            relations={"Depends": "linux-base"}, files=payload.kernel_modules(name), scripts={"postinst": after},
        )  # fmt: skip
        yield Package(
            f"linux-modules-extra-{name}", version, kernel.source, "kernel", "Linux kernel extra modules",
            relations={"Depends": f"libc6, linux-image-{name} | linux-image-unsigned-{name}"},
            files=payload.kernel_extra(name),
            # In the real package a trigger does this: the image's initramfs now lacks these modules.
            scripts={"postinst": f"{after}[ ! -e /boot/initrd.img-{name} ] || update-initramfs -u -k {name}\n"},
        )  # fmt: skip
        yield Package(
            f"linux-image-{name}", version, f"{kernel.source.replace('linux', 'linux-signed', 1)} ({version})",
            "kernel", "Signed kernel image generic",
            relations={
                "Depends": f"kmod, linux-base (>= 4.5ubuntu1~16.04.1), linux-modules-{name}",
                "Recommends": "initramfs-tools | linux-initramfs-tool",
                "Conflicts": f"linux-image-unsigned-{name}",
                "Provides": "fuse-module, linux-image, wireguard-modules (= 1.0.0), zfs-dkms",
            },
            files=payload.kernel_image(name),
            scripts={
                "postinst": _hooks("/etc/kernel/postinst.d", name, "configure"),
                "prerm": "#!/bin/sh\nset -e\n"
                + f"[ \"$1\" = remove ] || exit 0\nrun-parts --report --arg={name} --arg=/boot/vmlinuz-{name} "
                + "/etc/kernel/prerm.d\n",
                "postrm": "#!/bin/sh\nset -e\n"
                + f"[ \"$1\" = remove ] || exit 0\nrun-parts --report --arg={name} --arg=/boot/vmlinuz-{name} "
                + "/etc/kernel/postrm.d\n",
            },
        )  # fmt: skip
        yield Package(
            kernel.headers, version, kernel.source, "devel", "Header files related to Linux kernel",
            architecture="all", relations={"Depends": "coreutils"}, files=payload.headers_common(kernel.headers),
        )  # fmt: skip
        yield Package(
            f"linux-headers-{name}", version, kernel.source, "devel", "Linux kernel headers",
            relations={"Depends": f"{kernel.headers}, libc6, libelf1", "Provides": "linux-headers, linux-headers-3.0"},
            files=payload.kernel_headers(name, kernel.headers),
            scripts={
                "postinst": "#!/bin/sh\nset -e\n[ \"$1\" = configure ] || exit 0\n"
                f"[ ! -d /etc/kernel/header_postinst.d ] || run-parts --report --exit-on-error --arg={name} "
                "/etc/kernel/header_postinst.d\n"
            },
        )  # fmt: skip
        yield from _metas(release, kernel)


def _metas(release: Release, kernel: Kernel) -> Iterator[Package]:
    """linux-generic, linux-virtual and their parts, with the suffix of the series."""
    version, name = kernel.meta_version, kernel.release
    suffixes = [f"-hwe-{release.number}"] if kernel.hwe else [""]
    source = kernel.source.replace("linux", "linux-meta", 1)
    full = f"linux-image-{name}, linux-modules-extra-{name}, linux-firmware, intel-microcode, amd64-microcode"
    for suffix in suffixes:
        rows = {
            f"linux-generic{suffix}": f"linux-image-generic{suffix} (= {version}), "
            f"linux-headers-generic{suffix} (= {version})",
            f"linux-image-generic{suffix}": full,
            f"linux-headers-generic{suffix}": f"linux-headers-{name}",
            f"linux-virtual{suffix}": f"linux-image-virtual{suffix} (= {version}), "
            f"linux-headers-virtual{suffix} (= {version})",
            f"linux-image-virtual{suffix}": f"linux-image-{name}",
            f"linux-headers-virtual{suffix}": f"linux-headers-{name}",
        }
        for meta, depends in rows.items():
            yield Package(meta, version, source, "kernel", "Linux kernel meta package", relations={"Depends": depends})


# ---------------------------------------------------------------------------------------------------------------------
# Drivers
# ---------------------------------------------------------------------------------------------------------------------


def _exclusive(name: str, also: str = "") -> dict[str, str]:
    """Only one package with this virtual name can be installed."""
    return {"Provides": f"{name}{', ' + also if also else ''}", "Conflicts": name, "Replaces": name}


def _taking_over(name: str, also: str = "") -> dict[str, str]:
    """A package without a branch in its name is what those with one call themselves: it takes their places."""
    branches = dict.fromkeys(branch for branch, _, _ in NVIDIA_DRIVERS if branch)
    others = ", ".join(f"{name}-{branch}" for branch in branches)
    return {"Provides": also, "Conflicts": others, "Replaces": others}


def drivers(release: Release, driver: Driver) -> Iterator[Package]:
    """Every package of one version of a driver in Ubuntu, its open variant included."""
    version = release.version(driver)
    if driver.becomes is not None:
        yield from _transitional(driver, version)
        return
    yield from driver_set(
        driver.flavour, version, driver.upstream, f"nvidia-graphics-drivers-{driver.flavour}",
        with_open=driver.branch in OPEN_BRANCHES, section="restricted/libs",
    )  # fmt: skip
    if driver.flavour.endswith("-server"):
        yield fabric_manager(driver.branch, version, f"fabric-manager-{driver.branch}", "multiverse/libs")


#: Packages of a driver that have the flavour at the end of their names; -open has the second list only.
SET = (
    "libnvidia-cfg1", "libnvidia-common", "libnvidia-compute", "libnvidia-decode", "libnvidia-encode",
    "libnvidia-extra", "libnvidia-fbc1", "libnvidia-gl", "nvidia-compute-utils", "nvidia-kernel-common",
    "nvidia-utils", "xserver-xorg-video-nvidia",
)  # fmt: skip
KERNEL_SET = ("nvidia-dkms", "nvidia-driver", "nvidia-headless", "nvidia-headless-no-dkms", "nvidia-kernel-source")


def _transitional(driver: Driver, version: str) -> Iterator[Package]:
    source = (
        f"nvidia-graphics-drivers-{driver.becomes if driver.upstream[:3] in str(driver.becomes) else driver.flavour}"
    )
    for name in (*SET, *KERNEL_SET):
        target = f"{name}-{driver.becomes}"
        yield Package(
            f"{name}-{driver.flavour}", version, source, "restricted/oldlibs", f"Transitional package for {target}",
            relations={"Depends": target},
        )  # fmt: skip


def driver_set(
    flavour: str, version: str, upstream: str, source: str, *, with_open: bool, section: str
) -> Iterator[Package]:
    """The packages of one driver. ``flavour`` is empty for NVIDIA's packages from 590 on, which carry none."""
    end = f"-{flavour}" if flavour else ""
    server = flavour.endswith("-server")
    same = f"(= {version})"
    firmware = f"nvidia-firmware{end}-{upstream}" if flavour else "nvidia-firmware"

    def make(
        name: str, relations: dict[str, str], files: dict[str, File] | None = None, *, architecture: str = "amd64",
        scripts: dict[str, str] | None = None,
    ) -> Package:  # fmt: skip
        return Package(
            name, version, source, section, f"NVIDIA {name} (simulated)", architecture=architecture,
            relations=relations, files=files or {}, scripts=scripts or {},
        )  # fmt: skip

    def exclusive(name: str, also: str = "") -> dict[str, str]:
        return _exclusive(name, also) if flavour else _taking_over(name, also)

    cuda = f"libcuda.so.1 (= {upstream}), libcuda1, libnvidia-ml.so.1 (= {upstream}), libnvidia-ml1"
    yield make(f"libnvidia-common{end}", exclusive("libnvidia-common"), architecture="all")
    yield make(
        f"libnvidia-compute{end}",
        {"Depends": "libc6 (>= 2.27)", **exclusive("libnvidia-compute", cuda)},
        payload.libraries(upstream, ("libnvidia-ml", "libcuda", "libnvidia-ptxjitcompiler")),
    )
    yield make(
        f"libnvidia-cfg1{end}", {"Depends": "libc6", **exclusive("libnvidia-cfg1", "libnvidia-cfg1-any")},
        payload.libraries(upstream, ("libnvidia-cfg",)),
    )  # fmt: skip
    yield make(f"libnvidia-extra{end}", {"Depends": "libc6", **exclusive("libnvidia-extra")})
    yield make(
        f"libnvidia-decode{end}", {"Depends": f"libnvidia-compute{end} {same}", **exclusive("libnvidia-decode")},
        payload.libraries(upstream, ("libnvcuvid",)),
    )  # fmt: skip
    yield make(
        f"libnvidia-encode{end}", {"Depends": f"libnvidia-decode{end} {same}", **exclusive("libnvidia-encode")},
        payload.libraries(upstream, ("libnvidia-encode",)),
    )  # fmt: skip
    yield make(
        f"libnvidia-gl{end}", {"Depends": f"libnvidia-common{end} {same}", **exclusive("libnvidia-gl")},
        payload.libraries(upstream, ("libnvidia-glcore",)),
    )  # fmt: skip
    yield make(
        f"libnvidia-fbc1{end}", {"Depends": f"libnvidia-gl{end} {same}", **exclusive("libnvidia-fbc1")},
        payload.libraries(upstream, ("libnvidia-fbc",)),
    )  # fmt: skip
    yield make(
        f"nvidia-utils{end}",
        {"Depends": f"libnvidia-compute{end} {same}", **exclusive("nvidia-utils", "nvidia-smi")},
        {"/usr/bin/nvidia-smi": payload.nvidia_smi()},
    )
    mode = "--persistence-mode" if server else "--no-persistence-mode"
    yield make(
        f"nvidia-compute-utils{end}",
        {
            "Depends": f"libnvidia-compute{end} {same}, libnvidia-cfg1{end} {same}, adduser",
            **exclusive("nvidia-compute-utils", "nvidia-persistenced"),
            **({"Conflicts": "nvidia-compute-utils, nvidia-persistenced"} if flavour else {}),
        },
        {
            "/usr/bin/nvidia-persistenced": text(payload.PERSISTENCED, 0o755),
            "/lib/systemd/system/nvidia-persistenced.service": text(payload.PERSISTENCED_UNIT.format(mode=mode)),
        },
        scripts={
            "postinst": '#!/bin/sh\nset -e\n[ "$1" = configure ] || exit 0\n'
            "getent passwd nvidia-persistenced >/dev/null || adduser --system --group --no-create-home --quiet "
            "--home /nonexistent --gecos 'NVIDIA Persistence Daemon,,,' nvidia-persistenced\n"
            "[ ! -d /run/systemd/system ] || systemctl daemon-reload\n",
            "prerm": "#!/bin/sh\nset -e\n[ ! -d /run/systemd/system ] || systemctl stop nvidia-persistenced || true\n",
        },
    )
    yield make(
        firmware, _exclusive("nvidia-firmware") if flavour else {},
        {f"/lib/firmware/nvidia/{upstream}/gsp_tu10x.bin": File(b"simulated")},
    )  # fmt: skip
    yield make(
        f"nvidia-kernel-common{end}",
        {"Depends": f"adduser, kmod, {firmware}", **exclusive("nvidia-kernel-common")},
        {"/lib/modprobe.d/nvidia-graphics-drivers.conf": text(payload.BLACKLIST)},
        scripts={
            # Only the newest kernel's image, as update-initramfs does when it is not told which.
            "postinst": '#!/bin/sh\nset -e\n[ "$1" = configure ] || exit 0\n'
            "! command -v update-initramfs >/dev/null || update-initramfs -u\n",
            "postrm": '#!/bin/sh\nset -e\n[ "$1" = remove ] || exit 0\n'
            "! command -v update-initramfs >/dev/null || update-initramfs -u\n",
        },
    )
    yield make(
        f"xserver-xorg-video-nvidia{end}",
        {
            "Depends": f"libnvidia-cfg1{end} {same}, xserver-xorg-core (>= 2:1.19.6-1ubuntu2~)",
            **(
                _exclusive("xorg-driver-binary", "xorg-driver-video")
                if flavour
                else _taking_over("xserver-xorg-video-nvidia", "xorg-driver-binary, xorg-driver-video")
            ),
        },
    )
    for is_open in (False, True) if with_open else (False,):
        yield from _kernel_set(make, flavour, version, upstream, server, is_open)


FABRIC_MANAGER_UNIT = """\
[Unit]
Description=NVIDIA fabric manager service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true

[Install]
WantedBy=multi-user.target
"""


def fabric_manager(branch: str, version: str, source: str, section: str) -> Package:
    """For machines with NVSwitch: it must be of the driver's very version."""
    name = f"nvidia-fabricmanager-{branch}" if branch else "nvidia-fabricmanager"
    relations = _exclusive("nvidia-fabricmanager") if branch else {}
    return Package(
        name, version, source, section, "Fabric Manager for NVSwitch based systems", relations=relations,
        files={"/lib/systemd/system/nvidia-fabricmanager.service": text(FABRIC_MANAGER_UNIT)},
    )  # fmt: skip


def _kernel_set(
    make: Callable[..., Package], flavour: str, version: str, upstream: str, server: bool, is_open: bool
) -> Iterator[Package]:
    """The packages around the kernel module, which exist twice: proprietary and open."""
    end = f"-{flavour}" if flavour else ""
    variant = f"{end}-open" if is_open else end
    same = f"(= {version})"
    dkms = "nvidia-srv" if server else "nvidia"

    def span(name: str) -> str:
        # Wide enough for modules that were prebuilt for another revision.
        return f"{name} (<= {upstream}-1), {name} (>= {upstream})" if flavour else f"{name} {same}"

    forget = (
        "#!/bin/sh\nset -e\ncase $1 in remove|upgrade|deconfigure) ;; *) exit 0 ;; esac\n"
        f"[ ! -d /var/lib/dkms/{dkms}/{upstream} ] || dkms remove -m {dkms} -v {upstream} --all\n"
    )
    yield make(
        f"nvidia-kernel-source{variant}",
        _exclusive("nvidia-kernel-source") if flavour else _taking_over("nvidia-kernel-source"),
        payload.dkms_source(dkms, upstream, is_open),
        # Once the sources are gone, DKMS can neither build nor remove what it made of them.
        scripts={"prerm": forget},
    )  # fmt: skip
    yield make(
        f"nvidia-dkms{variant}",
        {
            "Depends": f"nvidia-kernel-source{variant}, nvidia-kernel-common{end} {same}, dkms",
            **(_exclusive("nvidia-dkms-kernel") if flavour else _taking_over("nvidia-dkms", "nvidia-dkms-kernel")),
        },
        scripts={
            "postinst": "#!/bin/sh\nset -e\n[ \"$1\" = configure ] || exit 0\n"
            f"/usr/lib/dkms/common.postinst {dkms} {upstream} /usr/share/nvidia \"\" \"$2\"\n",
            "prerm": forget,
        },
    )  # fmt: skip
    parts = [
        f"nvidia-compute-utils{end} {same}", f"libnvidia-cfg1{end} {same}", f"libnvidia-compute{end} {same}",
        span(f"nvidia-kernel-common{end}"), f"nvidia-kernel-source{variant} {same}",
    ]  # fmt: skip
    headless = ", ".join([*parts, f"libnvidia-decode{end} {same}"])
    yield make(f"nvidia-headless-no-dkms{variant}", {"Depends": headless})
    yield make(
        f"nvidia-headless{variant}",
        {"Depends": f"nvidia-headless-no-dkms{variant} {same}, {span(f'nvidia-dkms{variant}')}"},
    )
    desktop = [
        f"libnvidia-gl{end} {same}", span(f"nvidia-dkms{variant}"), *parts,
        *(f"{name}{end} {same}" for name in ("libnvidia-extra", "libnvidia-decode", "libnvidia-encode", "nvidia-utils",
                                             "xserver-xorg-video-nvidia", "libnvidia-fbc1")),
    ]  # fmt: skip
    yield make(
        f"nvidia-driver{variant}",
        {
            "Depends": ", ".join(desktop),
            "Recommends": "nvidia-settings, nvidia-prime (>= 0.8)",
            "Provides": "nvidia-driver-binary",
        },
    )


# ---------------------------------------------------------------------------------------------------------------------
# Prebuilt modules
# ---------------------------------------------------------------------------------------------------------------------


def _current(pocket: str) -> list[Driver]:
    """The drivers that modules are prebuilt for: of each flavour the newest one that is real in this pocket."""
    found: dict[str, Driver] = {}
    for driver in DRIVERS:
        if driver.becomes is None and not driver.older and driver.pocket in (BASE, pocket):
            found[driver.flavour] = driver
    return list(found.values())


def prebuilt(release: Release, pocket: str) -> Iterator[Package]:
    """linux-modules-nvidia-*, linux-objects-nvidia-* and linux-signatures-nvidia-*, for every kernel up to this pocket.

    Kernels that are older than the pocket get theirs built again for its drivers, with +1 at the end of the version.
    """
    for kernel in release.kernels:
        if kernel.pocket not in (BASE, pocket):
            continue
        again = "+1" if pocket != kernel.pocket else ""
        version = f"{kernel.version}{again}"
        source = kernel.source.replace("linux", "linux-restricted-modules", 1)
        signatures: dict[str, File] = {}
        for driver in _current(pocket):
            for is_open in (False, True) if driver.branch in OPEN_BRANCHES else (False,):
                yield from _prebuilt(release, kernel, driver, is_open, again, source, signatures)
        yield Package(
            f"linux-signatures-nvidia-{kernel.release}", version, source, "restricted/kernel",
            "Linux kernel signatures for nvidia modules", files=signatures,
        )  # fmt: skip


def _prebuilt(
    release: Release, kernel: Kernel, driver: Driver, is_open: bool, again: str, source: str,
    signatures: dict[str, File],
) -> Iterator[Package]:  # fmt: skip
    flavour = f"{driver.flavour}-open" if is_open else driver.flavour
    version = f"{kernel.version}{again}"
    # Folders are short: nvidia-535srv, nvidia-535srv-open.
    short = flavour.replace("-server", "srv")
    folder = f"/lib/modules/{kernel.release}/kernel/nvidia-{short}"
    objects: dict[str, File] = {}
    steps = []
    for name, (depends, aliases) in payload.NVIDIA_MODULES.items():
        image = payload.module(
            name, driver.upstream, payload.licence(is_open), kernel.release, aliases=aliases, depends=depends
        )
        objects[f"{folder}/bits/{name}.o"] = File(image)
        signatures[f"{folder}/bits/{name}.ko.sig"] = File(payload.signature())
        steps.append(f"cat {folder}/bits/{name}.o {folder}/bits/{name}.ko.sig >{folder}/{name}.ko\n")
    yield Package(
        f"linux-objects-nvidia-{flavour}-{kernel.release}", version, source, "restricted/kernel",
        "Linux kernel nvidia modules (objects)", files=objects,
    )  # fmt: skip
    common = f"nvidia-kernel-common-{driver.flavour}"
    span = f"{common} (<= {driver.upstream}-1), {common} (>= {driver.upstream})"
    yield Package(
        f"linux-modules-nvidia-{flavour}-{kernel.release}", version, source, "restricted/kernel",
        "Linux kernel nvidia modules",
        relations={
            "Depends": f"linux-image-{kernel.release} | linux-image-unsigned-{kernel.release}, "
            f"linux-signatures-nvidia-{kernel.release} (= {version}), "
            f"linux-objects-nvidia-{flavour}-{kernel.release} (= {version}), {span}",
        },
        scripts={
            "postinst": f"#!/bin/sh\nset -e\n[ \"$1\" = configure ] || exit 0\n{''.join(steps)}"
            f"depmod {kernel.release}\n",
            "prerm": f"#!/bin/sh\nset -e\nrm -f {folder}/*.ko\n[ ! -e /boot/vmlinuz-{kernel.release} ] || "
            f"depmod {kernel.release}\n",
        },
    )  # fmt: skip
    suffix = f"-hwe-{release.number}" if kernel.hwe else ""
    if again:
        return
    yield Package(
        f"linux-modules-nvidia-{flavour}-generic{suffix}", kernel.meta_version, source, "restricted/kernel",
        "Extra drivers for nvidia for the generic flavour",
        relations={
            "Depends": f"linux-modules-nvidia-{flavour}-{kernel.release} (= {version}), {span}",
            "Provides": f"nvidia-dkms-{flavour} (= {release.version(driver)}), nvidia-prebuilt-kernel",
        },
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# NVIDIA's archive
# ---------------------------------------------------------------------------------------------------------------------


def nvidia_packages(release: Release, pocket: str) -> Iterator[Package]:
    """NVIDIA's own packages. Up to 580 they are named as Ubuntu's, with other versions (535.261.03-0ubuntu1)."""
    for branch, upstream, where in NVIDIA_DRIVERS:
        if where != pocket:
            continue
        version = f"{upstream}-0ubuntu1" if branch else f"{upstream}-1ubuntu1"
        source = f"nvidia-graphics-drivers-{branch}" if branch else "nvidia-graphics-drivers"
        yield from driver_set(branch, version, upstream, source, with_open=bool(branch), section="non-free/libs")
        yield fabric_manager(branch, version, source.replace("graphics-drivers", "fabricmanager"), "multiverse/admin")
        if branch:
            yield Package(
                f"cuda-drivers-{branch}", version, f"cuda-drivers-{branch}", "multiverse/devel", "CUDA Driver meta",
                relations={"Depends": f"nvidia-driver-{branch} (= {version})"},
            )  # fmt: skip
        else:
            yield Package(
                "cuda-drivers", version, "cuda-drivers", "multiverse/devel", "CUDA Driver meta-package",
                relations={"Depends": "nvidia-driver"},
            )  # fmt: skip
            yield Package(
                "nvidia-open", version, "nvidia-open", "multiverse/devel", "NVIDIA open driver meta-package",
                relations={"Depends": "nvidia-driver"},
            )  # fmt: skip
    if pocket == BASE:
        modprobe = {"/usr/bin/nvidia-modprobe": text(payload.MODPROBE, 0o4755)}
        yield Package("nvidia-modprobe", "590.44.01-1ubuntu1", "nvidia-modprobe", "utils", "Load the NVIDIA driver",
                      files=modprobe)  # fmt: skip
        yield Package("nvidia-settings", "590.44.01-1ubuntu1", "nvidia-settings", "utils", "NVIDIA settings tool")
        yield Package(
            "nvidia-driver-pinning-535", "535-1ubuntu1", "nvidia-driver-pinning", "utils", "Pins the driver to 535",
            architecture="all",
            files={"/etc/apt/preferences.d/nvidia-driver-pinning-535": text(
                "Package: src:nvidia-graphics-drivers:any\nPin: version 535*\nPin-Priority: 1000\n")},
            conffiles=("/etc/apt/preferences.d/nvidia-driver-pinning-535",),
        )  # fmt: skip
