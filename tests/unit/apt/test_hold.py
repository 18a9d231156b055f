# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which packages are the kernel's and the driver's, and holding them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.apt import hold, kernel_set, status
from ansible_collections.volta.llm.plugins.module_utils.apt.hold import Wanted
from ansible_collections.volta.llm.plugins.module_utils.apt.status import Record
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "apt"
GA = ["linux-generic", "linux-headers-generic", "linux-image-generic"]
HWE = ["linux-generic-hwe-22.04", "linux-headers-generic-hwe-22.04", "linux-image-generic-hwe-22.04"]
GA_IMAGE = [
    "linux-headers-5.15.0-91",
    "linux-headers-5.15.0-91-generic",
    "linux-image-5.15.0-91-generic",
    "linux-modules-5.15.0-91-generic",
    "linux-modules-extra-5.15.0-91-generic",
]
HWE_IMAGE = [name.replace("5.15.0-91", "6.8.0-45") for name in GA_IMAGE]


class Server:
    """A root with a dpkg status, kernels in /boot and the driver's modules; apt-mark works on the status."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packages: list[tuple[str, str, str, str]] = []
        self.calls: list[tuple[str, ...]] = []
        self.states: dict[str, str] = {}
        self.locked = 0
        self.write("proc/sys/kernel/osrelease", "5.15.0-91-generic\n")
        self.add("dpkg")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def add(self, name: str, depends: str = "", want: str = "install", arch: str = "amd64") -> Server:
        self.packages.append((name, depends, want, arch))
        return self

    def release(self, release: str, module: bool = True) -> Server:
        """An installed kernel as Ubuntu packages it, with a driver module or without."""
        version = release.removesuffix("-generic")
        self.add(f"linux-image-{release}", f"linux-modules-{release}").add(f"linux-modules-{release}")
        self.add(f"linux-headers-{version}", arch="all")
        self.add(f"linux-headers-{release}", f"linux-headers-{version}, libc6 (>= 2.34)")
        self.write(f"boot/vmlinuz-{release}", "")
        self.write(f"lib/modules/{release}/modules.dep", "")
        if module:
            self.write(f"lib/modules/{release}/updates/dkms/nvidia.ko", "")
        return self

    def driver(self) -> Server:
        for name in ("nvidia-driver-535", "libnvidia-compute-535", "nvidia-persistenced", "libcuda1"):
            self.add(name)
        return self.add("nvidia-container-toolkit").add("nvidia-cuda-toolkit").add("libnvidia-compute-535", arch="i386")

    def boots(self, release: str) -> Server:
        self.write("proc/sys/kernel/osrelease", release + "\n")
        return self

    def save(self) -> list[status.Installed]:
        text = "\n".join(
            f"Package: {name}\nStatus: {want} ok {self.states.get(name, 'installed')}\n"
            f"Architecture: {arch}\nVersion: 1\nDepends: {depends}\n"
            for name, depends, want, arch in self.packages
        )
        self.write("var/lib/dpkg/status", text)
        found = status.installed(Machine(str(self.root)))
        assert found is not None
        return found

    def resolve(self, *sets: str, **wanted: Any) -> hold.Resolved:
        return hold.resolve(Machine(str(self.root)), self.save(), Wanted(sets, **wanted))

    def machine(self) -> Machine:
        server = self

        class WithAptMark(Machine):
            def run(self, argv: Any, timeout: float | None = None, env: Any = None) -> Completed:
                return server.apt_mark(tuple(argv))

        return WithAptMark(str(self.root))

    def apt_mark(self, argv: tuple[str, ...]) -> Completed:
        self.calls.append(argv)
        if self.locked:
            self.locked -= 1
            # apt-mark of Debian 12 while another dpkg works.
            text = "dpkg: error: dpkg database is locked by another process\nE: Executing dpkg failed. Are you root?\n"
            return Completed(argv, 100, stderr=text)
        want = {"hold": "hold", "unhold": "install"}[argv[1]]
        self.packages = [
            (name, depends, want if name in argv or f"{name}:{arch}" in argv else before, arch)
            for name, depends, before, arch in self.packages
        ]
        self.save()
        return Completed(argv, 0, stdout="".join(f"{name} set on hold.\n" for name in argv[2:]))

    def converge(self, names: Iterable[str], held: bool = True, check: bool = False, **options: Any) -> hold.Outcome:
        waits: list[float] = []
        outcome = hold.converge(
            self.machine(), self.save(), names, held, check, options.get("patience", 10.0), waits.append
        )
        self.waits = waits
        return outcome


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def recorded(case: str) -> list[status.Installed]:
    found = status.installed(Machine(str(FIXTURES / case)))
    assert found
    return found


# --- the kernel's packages --------------------------------------------------------------------------------------------


def test_metas_are_found_by_what_they_lead_to() -> None:
    """vast-ai/docs#947: on a machine with GA and HWE both sets of metas count, whichever runs."""
    found = kernel_set.kernel_set(recorded("ubuntu-hwe-ga-meta-held"))
    assert list(found.metas) == sorted([*GA, *HWE])
    assert found.releases == {"5.15.0-91-generic": tuple(GA_IMAGE), "6.8.0-45-generic": tuple(HWE_IMAGE)}
    assert found.images == ["6.8.0-45-generic", "5.15.0-91-generic"]


@pytest.mark.parametrize(
    ("flavour", "release"),
    [
        ("generic", "5.15.0-91-generic"),
        ("virtual", "5.15.0-91-generic"),
        ("lowlatency-hwe-22.04", "6.8.0-45-lowlatency"),
        ("aws", "6.5.0-1014-aws"),
        ("oem-22.04d", "6.5.0-1014-oem"),
        ("amd64", "6.1.0-37-amd64"),
        ("cloud-amd64", "6.1.0-37-cloud-amd64"),
        ("rt-amd64", "6.12.30+deb13-rt-amd64"),
        ("ein-eigener", "6.9.1-ein-eigener"),
    ],
)
def test_metas_of_every_flavour(server: Server, flavour: str, release: str) -> None:
    server.add(f"linux-image-{release}").add(f"linux-image-{flavour}", f"linux-image-{release} (= 1), linux-firmware")
    server.add(f"linux-{flavour}", f"linux-image-{flavour} (= 1)").add("linux-firmware").add("linux-base")
    server.add("linux-libc-dev").add("linux-tools-generic", "linux-tools-5.15.0-91-generic")
    server.boots(release)
    found = server.resolve("kernel")
    assert found.kernel == sorted({f"linux-image-{release}", f"linux-image-{flavour}", f"linux-{flavour}"})
    assert found.names == found.kernel


def test_debian_s_shared_headers_belong_to_their_release(server: Server) -> None:
    server.add("linux-headers-6.1.0-37-common").add("linux-kbuild-6.1").add("linux-image-6.1.0-37-amd64")
    server.add("linux-headers-6.1.0-37-amd64", "linux-headers-6.1.0-37-common (= 1), linux-kbuild-6.1 (>= 1)")
    found = server.resolve("kernel")
    assert found.kernel == [
        "linux-headers-6.1.0-37-amd64",
        "linux-headers-6.1.0-37-common",
        "linux-image-6.1.0-37-amd64",
    ]


def test_what_only_can_use_a_kernel_is_none_of_it(server: Server) -> None:
    """DKMS packages name headers as an alternative; tools and debug symbols have a release in their name."""
    server.release("5.15.0-91-generic")
    server.add("nvidia-dkms-535", "linux-headers-generic | linux-headers").add("dkms", "linux-headers-generic")
    server.add("linux-tools-5.15.0-91-generic", "linux-tools-5.15.0-91")
    server.add("linux-image-5.15.0-91-generic-dbg").add("zfs-dkms", "dkms")
    names = server.resolve("kernel").kernel
    assert set(names) == {*GA_IMAGE} - {"linux-modules-extra-5.15.0-91-generic"}


@pytest.mark.parametrize(
    ("name", "depends", "kind"),
    [
        ("linux-image-5.15.0-91-generic", "", "kernel"),
        ("linux-image-unsigned-5.15.0-91-generic", "", "kernel"),
        ("linux-modules-extra-6.5.0-1014-aws", "", "kernel"),
        ("linux-generic-hwe-22.04", "", "kernel"),
        ("linux-image-amd64", "", "kernel"),
        ("linux-virtual", "", "kernel"),
        ("linux-headers-generic", "", "headers"),
        ("linux-headers-6.1.0-37-common", "", "headers"),
        ("linux-hwe-6.8-headers-6.8.0-60", "", "headers"),
        ("linux-of-ours", "linux-image-6.9.1-ours", "kernel"),
        ("linux-build-needs", "linux-headers-generic", "headers"),
        ("linux-of-ours", "libc6", None),
        ("linux-libc-dev", "", None),
        ("linux-firmware", "", None),
        ("linux-base", "", None),
        ("linux-tools-generic", "", None),
        ("linux-kbuild-6.1", "", None),
        ("linux-modules-nvidia-535-generic", "linux-image-5.15.0-91-generic", None),
        ("nvidia-driver-535", "", None),
        ("bash", "", None),
    ],
)
def test_what_counts_as_the_kernel_in_a_transaction(name: str, depends: str, kind: str | None) -> None:
    record = Record(name, "1", "amd64", name, status.dependencies(depends))
    assert kernel_set.kind_of(name, record) == kind


# --- the driver's packages --------------------------------------------------------------------------------------------


def test_the_driver_s_set(server: Server) -> None:
    """Its companions and prebuilt modules are in it, what only uses a driver is not."""
    server.driver().add("linux-modules-nvidia-535-5.15.0-91-generic", "linux-image-5.15.0-91-generic")
    server.add("nvidia-modprobe").add("nvidia-kernel-common").add("nvidia-fabricmanager-535").add("nvtop").add(
        "libcudart12"
    )
    found = server.resolve("driver")
    assert found.names == sorted(
        [
            *("libcuda1", "libnvidia-compute-535", "libnvidia-compute-535:i386", "nvidia-driver-535"),
            *("linux-modules-nvidia-535-5.15.0-91-generic", "nvidia-fabricmanager-535", "nvidia-kernel-common"),
            *("nvidia-modprobe", "nvidia-persistenced"),
        ]
    )
    assert found.kernel == []
    assert found.faults == []


# --- the kernels beside -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False])
def test_prebuilt_modules_are_the_kernel_s_too(server: Server, held: bool) -> None:
    """Their meta package brings the image that its next modules need: found by molecule/kernel_hold."""
    server.release("5.15.0-91-generic").driver()
    prebuilt = [
        "linux-modules-nvidia-535-5.15.0-91-generic",
        "linux-modules-nvidia-535-generic",
        "linux-objects-nvidia-535-5.15.0-91-generic",
        "linux-signatures-nvidia-5.15.0-91-generic",
    ]
    for name in prebuilt:
        server.add(name)
    found = server.resolve("kernel", held=held)
    assert set(prebuilt) <= set(found.names)
    assert set(prebuilt) <= set(found.kernel)
    assert found.driver == []
    assert not [name for name in found.names if name.startswith(("nvidia-", "libnvidia-"))]
    assert all(covered(found.blacklist, name) for name in prebuilt)


def test_a_kernel_that_was_slipped_in_is_not_held_and_is_named(server: Server) -> None:
    server.release("5.15.0-91-generic").release("5.15.0-105-generic", module=False).driver()
    for _ in range(2):  # it stays a fault until it is mended
        found = server.resolve("kernel", "driver")
        assert [(fault.code, fault.subject) for fault in found.faults] == [
            ("kernel_without_driver", "linux-image-5.15.0-105-generic")
        ]
        assert "5.15.0-91-generic runs, 5.15.0-105-generic boots next" in found.faults[0].message
        assert "dkms autoinstall -k 5.15.0-105-generic" in found.faults[0].remedy
        assert "apt-get remove linux-headers-5.15.0-105 linux-headers-5.15.0-105-generic" in found.faults[0].remedy
        assert [name for name in found.names if "105" in name] == []
        assert "linux-image-5.15.0-91-generic" in found.names
        server.converge(found.names)


def test_a_kernel_that_boots_later_is_judged_too(server: Server) -> None:
    """GRUB is told to stay with the running one; the newer one is one menu entry away."""
    server.release("5.15.0-91-generic").release("5.15.0-105-generic", module=False).driver()
    server.write("etc/default/grub", "GRUB_DEFAULT=1\n")
    server.write(
        "boot/grub/grub.cfg",
        "menuentry 'a' {\n\tlinux /boot/vmlinuz-5.15.0-105-generic root=x\n}\n"
        "menuentry 'b' {\n\tlinux /boot/vmlinuz-5.15.0-91-generic root=x\n}\n",
    )
    found = server.resolve("kernel")
    assert found.kernels.next == "5.15.0-91-generic"
    assert [fault.code for fault in found.faults] == ["kernel_without_driver"]
    assert "5.15.0-105-generic is installed beside it" in found.faults[0].message


def broken_upgrade(server: Server) -> Server:
    """As an upgrade leaves it whose DKMS hook failed: the new kernel half configured, the held metas wait for it."""
    server.release("5.15.0-91-generic").release("5.15.0-105-generic", module=False).driver().add("nvidia-dkms-535")
    server.add(
        "linux-modules-extra-5.15.0-105-generic",
        "linux-image-5.15.0-105-generic | linux-image-unsigned-5.15.0-105-generic",
    )
    server.add("linux-image-generic", "linux-image-5.15.0-105-generic, linux-modules-extra-5.15.0-105-generic", "hold")
    server.add("linux-headers-generic", "linux-headers-5.15.0-105-generic", "hold")
    server.add("linux-generic", "linux-image-generic (= 1), linux-headers-generic (= 1)", "hold")
    server.states.update(
        {name: "half-configured" for name in ("linux-image-5.15.0-105-generic", "linux-headers-5.15.0-105-generic")}
    )
    server.states.update({name: "unpacked" for name in (*GA, "linux-modules-extra-5.15.0-105-generic")})
    return server


def test_what_a_failed_upgrade_left_is_named_with_what_mends_it(server: Server) -> None:
    server.write(
        "var/lib/dkms/nvidia-srv/535.1/build/make.log",
        "DKMS make.log for nvidia-srv-535.1 for kernel 5.15.0-105-generic (x86_64)\nerror: too few arguments\n",
    )
    faults = broken_upgrade(server).resolve("kernel", "driver").faults
    assert [(fault.code, fault.subject) for fault in faults] == [
        ("kernel_without_driver", "linux-image-5.15.0-105-generic"),
        ("driver_packages_broken", "linux-image-5.15.0-105-generic"),
    ]
    assert faults[0].message.endswith("error: too few arguments")
    assert faults[1].message == (
        "half-configured: linux-headers-5.15.0-105-generic 1, linux-image-5.15.0-105-generic 1; unpacked: "
        "linux-generic 1, linux-headers-generic 1, linux-image-generic 1, linux-modules-extra-5.15.0-105-generic 1"
    )
    # apt would not run before the half-configured ones are finished, nor remove what others need, or what is held.
    remedy = faults[0].remedy
    assert "apt-get install" not in remedy
    assert "then: dpkg --configure -a;" in remedy
    words = re.search(r"(apt-get remove [^;]*);", remedy)
    assert words
    assert words[1].split()[2] == "--allow-change-held-packages"
    assert set(words[1].split()[3:]) == {*GA, *(name.replace("91", "105") for name in GA_IMAGE)}
    assert remedy.endswith(
        "; install linux-headers-generic, linux-image-generic, linux-generic again when a kernel has a driver"
    )
    assert faults[1].remedy == "as above, which finishes them too"


def test_the_log_of_another_kernel_s_build_is_not_shown(server: Server) -> None:
    server.write(
        "var/lib/dkms/nvidia/1/build/make.log", "DKMS make.log for nvidia-1 for kernel 5.15.0-91-generic (x86_64)\nx\n"
    )
    assert "make.log:" not in broken_upgrade(server).resolve("kernel", "driver").faults[0].message


def test_a_kernel_in_the_middle_that_has_its_module_is_only_to_be_finished(server: Server) -> None:
    server.release("5.15.0-91-generic").release("5.15.0-105-generic").driver()
    server.states["linux-image-5.15.0-105-generic"] = "half-configured"
    fault = server.resolve("kernel", "driver").faults[0]
    assert (fault.code, fault.remedy) == ("driver_packages_broken", "dpkg --configure -a")


def test_what_dpkg_left_of_others_is_not_the_hold_s_concern(server: Server) -> None:
    server.release("5.15.0-91-generic").driver().add("mariadb-server")
    server.states.update({"mariadb-server": "unpacked", "nvidia-driver-535": "half-configured"})
    assert [(fault.code, fault.subject) for fault in server.resolve("kernel", "driver").faults] == [
        ("driver_packages_broken", "nvidia-driver-535")
    ]
    assert server.resolve("driver").faults == []


def test_prebuilt_modules_are_installed_and_not_built(server: Server) -> None:
    server.release("5.15.0-91-generic").release("5.15.0-105-generic", module=False).driver()
    server.add("linux-modules-nvidia-535-server-5.15.0-91-generic", "linux-image-5.15.0-91-generic")
    remedy = server.resolve("kernel").faults[0].remedy
    assert "build it: apt-get install linux-modules-nvidia-535-server-5.15.0-105-generic;" in remedy


MENU = """menuentry 'Ubuntu' --class os $menuentry_id_option 'gnulinux-simple-1' {
\tlinux /boot/vmlinuz-5.15.0-105-generic root=x
}
submenu 'Advanced' $menuentry_id_option 'advanced-1' {
\tmenuentry 'Ubuntu, with Linux 5.15.0-105-generic' $menuentry_id_option 'new-1' {
\t\tlinux /boot/vmlinuz-5.15.0-105-generic root=x
\t}
\tmenuentry 'Ubuntu, with Linux 5.15.0-91-generic' $menuentry_id_option 'old-1' {
\t\tlinux /boot/vmlinuz-5.15.0-91-generic root=x
\t}
}
"""


def test_the_way_back_is_named_as_a_command(server: Server) -> None:
    server.release("5.15.0-91-generic").release("5.15.0-105-generic", module=False).driver()
    server.write("boot/grub/grub.cfg", MENU)
    remedy = server.resolve("kernel").faults[0].remedy
    assert remedy.endswith("until then boot 5.15.0-91-generic once: grub-reboot 'advanced-1>old-1' && systemctl reboot")
    server.write("boot/grub/grubenv", "# GRUB Environment Block\nnext_entry=advanced-1>old-1\n")
    assert "grub-reboot" not in server.resolve("kernel").faults[0].remedy


def test_a_machine_that_already_runs_the_kernel_without_a_driver(server: Server) -> None:
    server.release("5.15.0-91-generic").release("5.15.0-105-generic", module=False).driver().boots("5.15.0-105-generic")
    server.write("boot/grub/grub.cfg", MENU)
    found = server.resolve("kernel", "driver")
    assert [(fault.code, fault.subject) for fault in found.faults] == [
        ("kernel_without_driver", "linux-image-5.15.0-105-generic")
    ]
    assert found.faults[0].message == (
        "5.15.0-105-generic runs, and no nvidia module is on disk for it; 5.15.0-91-generic has one"
    )
    assert "apt-get remove" in found.faults[0].remedy
    assert "grub-reboot 'advanced-1>old-1'" in found.faults[0].remedy


def test_a_newer_kernel_with_a_module_is_held_and_told(server: Server) -> None:
    server.release("5.15.0-91-generic").release("5.15.0-105-generic").driver()
    found = server.resolve("kernel")
    assert [fault.code for fault in found.faults] == ["kernel_changes_at_boot"]
    assert "linux-image-5.15.0-105-generic" in found.names


def test_an_older_kernel_without_a_module_is_kept_as_the_way_back(server: Server) -> None:
    server.release("5.15.0-89-generic", module=False).release("5.15.0-91-generic").driver()
    found = server.resolve("kernel")
    assert found.faults == []
    assert "linux-image-5.15.0-89-generic" in found.names


@pytest.mark.parametrize("driver", [True, False])
def test_a_machine_without_a_driver_has_no_kernel_without_one(server: Server, driver: bool) -> None:
    """Nothing is installed yet, or not built for any kernel: another role's business."""
    server.release("5.15.0-91-generic", module=False).release("5.15.0-105-generic", module=False)
    if driver:
        server.driver()
    found = server.resolve("kernel")
    assert [fault.code for fault in found.faults] == ["kernel_changes_at_boot"]
    assert "linux-image-5.15.0-105-generic" in found.names


def test_a_running_kernel_from_elsewhere(server: Server) -> None:
    server.release("5.15.0-91-generic").boots("6.9.1-custom")
    assert [fault.code for fault in server.resolve("kernel").faults] == [
        "kernel_changes_at_boot",
        "kernel_not_packaged",
    ]


def test_a_machine_without_any_kernel(server: Server) -> None:
    """A container: nothing to hold, nothing wrong."""
    found = server.resolve("kernel", "driver")
    assert (found.names, found.faults, found.kernels.running) == ([], [], "5.15.0-91-generic")


# --- names and what is left alone -------------------------------------------------------------------------------------


def test_names_patterns_and_exclusions(server: Server) -> None:
    server.release("5.15.0-91-generic").driver().add("libnccl2").add("libnccl-dev")
    found = server.resolve(packages=["libnccl*", "^nvidia-(driver|persistenced).*", "absent", "absent-*"])
    assert found.names == ["libnccl-dev", "libnccl2", "nvidia-driver-535", "nvidia-persistenced"]
    assert found.missing == ["absent"]
    found = server.resolve("driver", packages=["libnccl2"], exclude=["nvidia-persistenced", "libnvidia-*"])
    assert found.names == ["libcuda1", "libnccl2", "nvidia-driver-535"]
    assert server.resolve(packages=["libnvidia-compute-535:i386"]).names == ["libnvidia-compute-535:i386"]


def test_release_is_of_everything_the_kernel_has(server: Server) -> None:
    server.release("5.15.0-91-generic").release("5.15.0-105-generic", module=False).driver()
    found = server.resolve("kernel", held=False)
    assert {name for name in found.names if "105" in name and "image" in name} == {"linux-image-5.15.0-105-generic"}
    assert found.faults == []


def covered(blacklist: Iterable[str], name: str) -> bool:
    """As unattended-upgrades matches (is_pkgname_in_blacklist)."""
    return any(re.match(expression, name) for expression in blacklist)


def test_the_blacklist_covers_what_is_held_and_what_could_come(server: Server) -> None:
    """A10, pando85/homelab#4110: and metas of flavours that nobody thought of."""
    server.release("6.5.0-1014-aws").driver().boots("6.5.0-1014-aws").add("libstdc++6").add("bash")
    server.add("linux-aws", "linux-image-6.5.0-1014-aws").add("nvidia-driver-assistant")
    found = server.resolve("kernel", "driver", packages=["libstdc++6"])
    for name in [*found.names, "nvidia-utils-590", "libnvidia-gl-570", "cuda-drivers", "linux-image-6.5.0-1020-aws"]:
        assert covered(found.blacklist, name.split(":")[0]), name
    for name in ("xserver-xorg-video-nvidia-535", "linux-generic-hwe-22.04", "linux-modules-extra-6.8.0-60-generic"):
        assert covered(found.blacklist, name), name
    for name in ("bash", "linux-libc-dev", "linux-firmware", "libc6", "linux-aws-edge", "libstdc++6-dbg"):
        assert not covered(found.blacklist, name), name
    assert found.blacklist == sorted(found.blacklist)
    # apt's pins take these as they are (python_regex_is_posix); anything else makes unattended-upgrades go through
    # all packages.
    assert all(re.match(r"^[-a-zA-Z0-9^$+.:\\]*$", expression) for expression in found.blacklist)


def test_the_blacklist_leaves_out_what_is_excluded(server: Server) -> None:
    server.release("5.15.0-91-generic").driver()
    found = server.resolve("driver", exclude=["nvidia-persistenced"])
    assert not covered(found.blacklist, "nvidia-persistenced")
    assert covered(found.blacklist, "nvidia-driver-535")
    assert covered(found.blacklist, "libnvidia-gl-570")
    found = server.resolve("driver", exclude=["lib*"])
    assert not covered(found.blacklist, "libnvidia-compute-535")
    assert covered(found.blacklist, "nvidia-utils-590")


# --- holding ----------------------------------------------------------------------------------------------------------


def test_one_call_holds_what_is_not_held_and_a_second_run_does_nothing(server: Server) -> None:
    server.driver().add("other", want="hold").add("nvidia-modprobe", want="hold")
    names = server.resolve("driver").names
    outcome = server.converge(names)
    assert [call[:2] for call in server.calls] == [("apt-mark", "hold")]
    assert "nvidia-modprobe" not in server.calls[0]
    assert "libnvidia-compute-535:i386" in server.calls[0]
    assert outcome.faults == []
    assert outcome.changed == [name for name in names if name != "nvidia-modprobe"]
    assert outcome.before == ["nvidia-modprobe", "other"]
    assert outcome.after == sorted([*names, "other"])
    again = server.converge(server.resolve("driver").names)
    assert (again.changed, len(server.calls)) == ([], 1)


def test_release_leaves_others_held(server: Server) -> None:
    server.add("a", want="hold").add("b", want="hold").add("c")
    outcome = server.converge(["a", "c"], held=False)
    assert server.calls == [("apt-mark", "unhold", "a")]
    assert (outcome.before, outcome.after, outcome.changed) == (["a", "b"], ["b"], ["a"])


def test_check_mode_says_the_same_and_does_nothing(server: Server) -> None:
    server.add("a").add("b", want="hold")
    planned = server.converge(["a", "b"], check=True)
    assert server.calls == []
    done = server.converge(["a", "b"])
    assert (planned.before, planned.after, planned.changed) == (done.before, done.after, done.changed)


def test_it_waits_for_dpkg_s_lock(server: Server) -> None:
    """G10, ansible/ansible#78658: nothing waits by itself here."""
    server.add("a").locked = 2
    outcome = server.converge(["a"])
    assert (outcome.faults, outcome.changed, server.waits) == ([], ["a"], [2.0, 2.0])


def test_a_lock_that_is_not_given_back_is_named(server: Server) -> None:
    server.add("a").locked = 100
    outcome = server.converge(["a"], patience=4.0)
    assert [fault.code for fault in outcome.faults] == ["apt_hold_failed"]
    assert "Executing dpkg failed" in outcome.faults[0].message or "locked" in outcome.faults[0].message
    assert "wait for the other apt or dpkg" in outcome.faults[0].remedy
    assert outcome.changed == []
    assert server.waits == [2.0, 2.0]


def test_apt_mark_that_says_it_did_and_did_not(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("a").add("b")
    monkeypatch.setattr(server, "apt_mark", lambda argv: Completed(argv, 0, stdout="a set on hold.\n"))
    outcome = server.converge(["a", "b"])
    assert [(fault.code, fault.subject) for fault in outcome.faults] == [("apt_hold_failed", "a, b")]
    assert outcome.changed == []


def test_status_words(server: Server) -> None:
    server.add("a", want="hold")
    server.save()
    server.write(
        "var/lib/dpkg/status",
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n"
        "Package: half\nStatus: hold ok half-configured\nArchitecture: amd64\nVersion: 1\n\n"
        "Package: odd\nStatus: install\nVersion: 1\n",
    )
    found = status.installed(Machine(str(server.root)))
    assert [(one.name, one.held, one.state) for one in found or []] == [("half", True, "half-configured")]
    assert status.installed(Machine("/nonexistent")) is None
    assert status.dependencies("a (>= 1) | b:any, c [amd64], d", "e <!nocheck>", "") == (
        ("a", "b"),
        ("c",),
        ("d",),
        ("e",),
    )
