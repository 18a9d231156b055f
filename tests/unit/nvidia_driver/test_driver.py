# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The verdict on a machine. Names like a12 are rows of public reports (see docs), each with the input it gives."""

from __future__ import annotations

import gzip
import lzma
import subprocess
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver, modinfo, packages
from ansible_collections.volta.llm.plugins.module_utils.nvidia.kernels import kernels

from tests.lab.gpu_simulator import gpu_simulator
from tests.unit.nvidia_driver.conftest import KERNEL

NEXT = "6.8.0-60-generic"
TRANSACTIONS = Path(__file__).parent.parent / "fixtures/nvidia-driver/transactions"


def codes(judgement: driver.Judgement) -> list[str]:
    return [fault.code for fault in judgement.faults]


def test_healthy_machine_is_ok_and_has_nothing_to_do(machine):
    state, judgement = machine.healthy().judged()
    assert (judgement.verdict, judgement.remedy, judgement.faults) == ("ok", [], [])
    assert state.loaded == driver.Loaded("535.183.01", "proprietary")
    assert state.userland == "535.183.01"


def test_machine_without_a_gpu(machine):
    _, judgement = machine.judged()
    assert judgement.verdict == "no_gpu"
    assert codes(judgement) == ["driver_without_gpu_on_bus"]


def test_root_that_holds_nothing_is_unknown_and_not_without_gpus(tmp_path):
    state = driver.read(Machine(str(tmp_path)))
    judgement = driver.judge(state)
    assert judgement.verdict == "unknown"
    assert codes(judgement)[0] == "driver_state_unknown"
    assert state.unknown == ["PCI bus", "libraries", "kernel", "module on disk"]


def test_parts_that_a_report_does_not_hold_are_not_taken_for_absent(machine):
    machine.gpu(device="2335", bound="nvidia").loaded("580.159.04", "open")
    (machine.root / "usr/lib").rmdir()
    _, judgement = machine.judged()
    assert judgement.verdict == "ok"
    assert judgement.reason == "driver 580.159.04 is loaded; not known: libraries, module on disk"


def test_driver_handed_in_by_the_host(machine):
    """Measured on a live machine with two H200: libraries where ld.so.conf.d says, no /lib/modules at all."""
    machine.gpu(device="2335", bound="nvidia").loaded("580.159.04", "open")
    machine.file("etc/ld.so.conf.d/nvidia.conf", "# driver\n/usr/local/nvidia/lib64\n/usr/local/nvidia/lib\n")
    machine.file("usr/local/nvidia/lib64/libnvidia-ml.so.580.159.04")
    state, judgement = machine.judged()
    assert state.libraries == ("580.159.04",)
    assert judgement.verdict == "ok"
    assert judgement.reason == "driver 580.159.04 is loaded; not known: module on disk"


def test_driver_handed_in_by_the_host_in_another_version(machine):
    machine.gpu(device="2335", bound="nvidia").loaded("580.159.04", "open")
    machine.file("etc/ld.so.conf.d/nvidia.conf", "/usr/local/nvidia/lib64\n")
    machine.file("usr/local/nvidia/lib64/libnvidia-ml.so.580.178.03")
    _, judgement = machine.judged()
    assert judgement.verdict == "reboot_required"


def test_nothing_installed(machine):
    _, judgement = machine.gpu().gpu("0000:1c:00.0").judged()
    assert judgement.verdict == "not_installed"
    assert judgement.reason == "2 NVIDIA GPUs are on the PCI bus, no driver is installed"
    assert judgement.remedy == ["apt-get install --no-install-recommends nvidia-driver-535-server", "reboot"]


@pytest.mark.parametrize(
    ("release", "package"),
    [
        ('ID=debian\nVERSION_ID="12"\n', "nvidia-driver"),
        ('ID=debian\nVERSION_ID="13"\n', "nvidia-tesla-535-driver"),
        ('ID=ubuntu\nVERSION_ID="22.04"\n', "nvidia-driver-535-server"),
    ],
)
def test_the_package_has_the_name_of_the_distribution(machine, release, package):
    _, judgement = machine.gpu().file("etc/os-release", release).judged()
    assert judgement.remedy[0].split()[-1] == package


# -- loaded, on disk, libraries


def test_a12_minor_update_left_the_old_module_loaded(machine):
    """NVRM 550.90.07 with 550.107.02 installed: 90 is less than 107, and a reboot is all it takes."""
    machine.gpu(bound="nvidia").loaded("550.90.07").library("550.107.02").module("550.107.02")
    machine.package("libnvidia-compute-550", "550.107.02-0ubuntu0.24.04.1")
    _, judgement = machine.judged()
    assert judgement.verdict == "reboot_required"
    assert judgement.reason == "loaded 550.90.07, installed 550.107.02"
    assert judgement.remedy == ["reboot"]


@pytest.mark.parametrize(
    ("older", "newer"), [("550.90.07", "550.107.02"), ("535.54.03", "535.183.01"), ("90.1", "107.2")]
)
def test_versions_compare_as_numbers(older, newer):
    assert packages.upstream(older) < packages.upstream(newer)


def test_a08_unattended_upgrade_is_named_with_its_date(machine):
    machine.gpu(bound="nvidia").loaded("460.56").library("460.73.01").module("460.73.01")
    machine.file(
        "var/log/apt/history.log",
        "Start-Date: 2021-04-28  06:12:41\n"
        "Commandline: /usr/bin/unattended-upgrade\n"
        "Upgrade: libnvidia-common-460:amd64 (460.56-0ubuntu0.20.04.1, 460.73.01-0ubuntu0.20.04.1)\n"
        "End-Date: 2021-04-28  06:12:43\n",
    )
    state, judgement = machine.judged()
    assert judgement.verdict == "reboot_required"
    assert state.upgrade is not None
    assert state.upgrade.unattended
    assert "upgraded on 2021-04-28 06:12:41 by unattended-upgrade: libnvidia-common-460" in judgement.reason


def test_a08_history_in_a_rotated_file(machine):
    machine.gpu(bound="nvidia").loaded("460.56").library("460.73.01").module("460.73.01")
    text = (
        "\nStart-Date: 2021-04-28  06:12:41\nCommandline: apt-get -y dist-upgrade\n"
        "Install: libnvidia-gl-460:amd64 (460.73.01-0ubuntu0.20.04.1, automatic)\nEnd-Date: 2021-04-28  06:12:43\n"
    )
    machine.file("var/log/apt/history.log", "")
    (machine.root / "var/log/apt/history.log.1.gz").write_bytes(gzip.compress(text.encode()))
    state, _ = machine.judged()
    assert state.upgrade is not None
    assert state.upgrade.as_dict() == {
        "date": "2021-04-28 06:12:41",
        "command": "apt-get -y dist-upgrade",
        "unattended": False,
        "packages": [{"name": "libnvidia-gl-460", "from": None, "to": "460.73.01-0ubuntu0.20.04.1"}],
    }


def test_a34_run_file_userland_on_another_module_must_be_reinstalled(machine):
    """570.124.04 libraries on a 570.124.06 module: NVML would say 570.124 for both; the file names tell them apart."""
    machine.gpu(device="2684", bound="nvidia").loaded("570.124.06").library("570.124.04").module("570.124.06")
    machine.file("usr/bin/nvidia-uninstall").file("var/log/nvidia-installer.log")
    _, judgement = machine.judged()
    assert judgement.verdict == "reinstall"
    assert "the module on disk for 5.15.0-91-generic is 570.124.06, the libraries are 570.124.04" in judgement.reason
    assert judgement.remedy[0].startswith("/usr/bin/nvidia-uninstall")
    assert "driver_run_install" in codes(judgement)


def test_b12_both_versions_are_known_where_nvml_shortens_one(machine):
    machine.gpu(device="2684", bound="nvidia").loaded("580.173.02").library("580.178.03").module("580.178.03")
    state, judgement = machine.judged()
    assert judgement.verdict == "reboot_required"
    assert (state.loaded.version, state.userland) == ("580.173.02", "580.178.03")


def test_disk_differs_from_libraries_and_dkms_has_the_source(machine):
    machine.gpu(bound="nvidia").loaded("535.161.08").library("535.183.01").module("535.161.08")
    machine.command(
        ["dkms", "status"],
        f"nvidia/535.161.08, {KERNEL}, x86_64: installed\nnvidia/535.183.01: added\n",
    )
    _, judgement = machine.judged()
    assert judgement.verdict == "rebuild_module"
    assert "a reboot does not help" in judgement.reason
    assert f"dkms install --force -m nvidia -v 535.183.01 -k {KERNEL}" in judgement.remedy


def test_a28_added_is_not_built(machine):
    machine.gpu(bound="nvidia").library("535.288.01")
    machine.command(["dkms", "status"], "nvidia/535.288.01: added\n")
    _, judgement = machine.judged()
    assert judgement.verdict == "rebuild_module"
    assert judgement.reason.endswith("which boots next; dkms: nvidia/535.288.01 is only added")
    assert judgement.remedy[1] == f"dkms install --force -m nvidia -v 535.288.01 -k {KERNEL}"


def test_dkms_says_that_another_module_lies_there(machine):
    machine.healthy("535.261.03")
    machine.command(
        ["dkms", "status"],
        f"nvidia/535.261.03, {KERNEL}, x86_64: installed (WARNING! Diff between built and installed module!)\n",
    )
    _, judgement = machine.judged()
    assert judgement.verdict == "rebuild_module"
    assert codes(judgement) == ["driver_module_stale"]


def test_a26_parts_missing_for_the_kernel_that_boots_next(machine):
    """apt was content, modinfo -k NEXT nvidia_uvm fails: no reboot before that is mended."""
    machine.healthy()
    machine.file(f"boot/vmlinuz-{KERNEL}").file(f"boot/vmlinuz-{NEXT}")
    path = f"/lib/modules/{NEXT}/updates/dkms/nvidia.ko"
    text = f"filename:       {path}\nversion:        535.183.01\nlicense:        NVIDIA\n"
    machine.command(["modinfo", "-k", NEXT, "nvidia"], text)
    machine.command(["modinfo", "-k", NEXT, "nvidia_modeset"], text)
    machine.command(["modinfo", "-k", NEXT, "nvidia_drm"], text)
    machine.command(["modinfo", "-k", NEXT, "nvidia_uvm"], "", rc=1)
    state, judgement = machine.judged()
    assert state.kernels.next == NEXT
    assert judgement.verdict == "rebuild_module"
    assert judgement.reason == f"nvidia_uvm is missing for {NEXT}"


def test_module_missing_for_the_next_kernel_only(machine):
    machine.healthy().file(f"boot/vmlinuz-{KERNEL}").file(f"boot/vmlinuz-{NEXT}")
    _, judgement = machine.judged()
    assert judgement.verdict == "rebuild_module"
    assert f"no nvidia module for {NEXT}, which boots next" in judgement.reason
    assert judgement.remedy[0] == f"apt-get install linux-headers-{NEXT}"


def test_prebuilt_modules_are_installed_for_the_other_kernel(machine):
    machine.healthy().file(f"boot/vmlinuz-{KERNEL}").file(f"boot/vmlinuz-{NEXT}")
    machine.package(f"linux-modules-nvidia-535-server-{KERNEL}", "5.15.0-91.101+1")
    _, judgement = machine.judged()
    assert judgement.remedy[0] == f"apt-get install linux-modules-nvidia-535-server-{NEXT}"


def test_driver_only_for_the_next_kernel_needs_a_reboot(machine):
    machine.gpu().library("535.183.01").module("535.183.01", NEXT)
    machine.file(f"boot/vmlinuz-{KERNEL}").file(f"boot/vmlinuz-{NEXT}")
    _, judgement = machine.judged()
    assert judgement.verdict == "reboot_required"
    assert judgement.remedy == ["reboot"]


def test_installed_and_not_loaded(machine):
    _, judgement = machine.gpu().library("535.183.01").module("535.183.01").judged()
    assert judgement.verdict == "load_module"
    assert judgement.remedy[0] == "modprobe nvidia"


def test_module_without_libraries(machine):
    _, judgement = machine.gpu(bound="nvidia").loaded("535.183.01").module("535.183.01").judged()
    assert judgement.verdict == "reinstall"


# -- packages


@pytest.mark.parametrize(
    ("name", "version", "branch", "named"),
    [
        ("nvidia-driver-495", "510.47.03-0ubuntu0.20.04.1", "510", "495"),
        ("nvidia-driver-460", "470.57.02-0ubuntu0.20.04.1", "470", "460"),
        ("nvidia-driver-465", "470.57.02-0ubuntu0.20.04.1", "470", "465"),
        ("nvidia-driver-455", "460.32.03-0ubuntu0.20.04.1", "460", "455"),
    ],
)
def test_a04_packages_upgraded_past_the_branch_in_their_name(machine, name, version, branch, named):
    state, judgement = machine.healthy().package(name, version).judged()
    assert state.packages is not None
    assert (state.packages[0].branch, state.packages[0].named_branch) == (branch, named)
    assert "driver_package_of_other_branch" in codes(judgement)


def test_a02_a_revision_became_a_pointer_to_another_branch(machine):
    """nvidia-driver-550-server 550.163.01-0ubuntu0.22.04.2 brings 570: both branches are then installed."""
    machine.gpu(bound="nvidia").loaded("570.133.20").library("570.133.20").module("570.133.20")
    machine.package("nvidia-driver-550-server", "550.163.01-0ubuntu0.22.04.2")
    machine.package("libnvidia-compute-570-server", "570.133.20-0ubuntu0.22.04.1")
    _, judgement = machine.judged()
    assert judgement.verdict == "mixed_branches"
    assert "550 (nvidia-driver-550-server); 570 (libnvidia-compute-570-server, libnvidia-ml.so.570.133.20)" in (
        judgement.reason
    )
    assert judgement.remedy[-1] == "apt-get purge nvidia-driver-550-server"


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("nvidia-modprobe", "570.133.07-1"),
        ("nvidia-egl-common", "550.163.01-2"),
        ("nvidia-persistenced", "550.163.01-1"),
        ("nvidia-settings", "510.47.03-0ubuntu1"),
        ("libnvidia-egl-wayland1", "1:1.1.10-1"),
        ("nvidia-cuda-toolkit", "12.4.131~12.4.1-2"),
        ("nvidia-container-toolkit", "1.17.8-1"),
        ("nvidia-kernel-common", "20220217+3~deb12u1"),
        ("nvidia-support", "20220217+3~deb12u1"),
    ],
)
def test_companions_with_versions_of_their_own_are_no_other_branch(machine, name, version):
    """Measured on Debian 12 and 13: a plain 535 installation brings these."""
    machine.healthy().package("nvidia-driver", "535.183.01-1~deb12u1").package(name, version)
    _, judgement = machine.judged()
    assert judgement.verdict == "ok"


@pytest.mark.parametrize("path", sorted(TRANSACTIONS.glob("*.txt")), ids=lambda path: path.stem)
def test_real_transactions_are_of_one_branch(machine, path):
    """What apt would really install: the companions in it must not be taken for another branch."""
    _, expected, text = path.read_text().split("\n", 2)
    machine.healthy("535.261.03")
    for line in text.splitlines():
        machine.package(*line.split()[:2])
    state, judgement = machine.judged()
    assert {package.branch for package in state.driver_packages()} == {None, expected.removeprefix("# expect: ")}
    assert judgement.verdict == "ok"


def test_libraries_of_two_branches(machine):
    _, judgement = machine.healthy().library("470.256.02").judged()
    assert judgement.verdict == "mixed_branches"


def test_older_library_of_the_same_branch_is_a_leftover(machine):
    state, judgement = machine.healthy().library("535.54.03").judged()
    assert judgement.verdict == "ok"
    assert codes(judgement) == ["driver_library_leftover"]
    assert state.libraries == ("535.183.01", "535.54.03")


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("install ok half-configured", "half-configured"),
        ("install ok unpacked", "unpacked"),
        ("install reinstreq half-installed", "half-installed"),
    ],
)
def test_a24_half_configured_packages_come_first(machine, status, state):
    machine.gpu().library("535.183.01").package("nvidia-dkms-535", "535.183.01-0ubuntu0.22.04.1", status)
    machine.command(["dkms", "status"], "nvidia/535.183.01: added\n")
    _, judgement = machine.judged()
    assert judgement.verdict == "repair_packages"
    assert judgement.reason == f"nvidia-dkms-535 535.183.01-0ubuntu0.22.04.1 is {state}"
    assert judgement.remedy[0] == "tail -n 30 /var/lib/dkms/nvidia/535.183.01/build/make.log"
    assert "dpkg --configure -a" in judgement.remedy


def test_holds_and_pins_are_read(machine):
    machine.healthy().package("nvidia-driver-535-server", "535.183.01-0ubuntu1", "hold ok installed")
    machine.package("linux-image-generic", "5.15.0.91.88", "hold ok installed")
    machine.file(
        "etc/apt/preferences.d/nvidia",
        "# keep the branch\nPackage: nvidia-* libnvidia-*\n# why\nPin: version 535.*\nPin-Priority: 1001\n\n"
        "Package: firefox\nPin: release a=stable\nPin-Priority: 10\n",
    )
    machine.file("etc/apt/preferences.d/ignored.save", "Package: nvidia-*\nPin: version 1\nPin-Priority: 1\n")
    state, judgement = machine.judged()
    results = driver.as_results(state, judgement)
    assert results["held"] == ["linux-image-generic", "nvidia-driver-535-server"]
    assert results["pins"] == [
        {
            "file": "/etc/apt/preferences.d/nvidia",
            "packages": "nvidia-* libnvidia-*",
            "pin": "version 535.*",
            "priority": 1001,
        }
    ]


def test_a32_run_file_below_packages_is_named(machine):
    machine.healthy().file("usr/bin/nvidia-uninstall")
    machine.package("nvidia-fabricmanager-535", "535.183.01-1")
    state, judgement = machine.judged()
    assert state.run_install == ("/usr/bin/nvidia-uninstall",)
    assert codes(judgement) == ["driver_run_install"]
    assert "nvidia-fabricmanager-535" in judgement.faults[0].message
    assert judgement.faults[0].remedy.startswith("/usr/bin/nvidia-uninstall")


def test_machine_without_dpkg_or_dkms_says_null(machine):
    state, judgement = machine.healthy().judged()
    results = driver.as_results(state, judgement)
    assert results["packages"] is None
    assert results["held"] is None
    assert results["dkms"] is None


# -- every kernel that can be booted


def test_each_kernel_has_its_module_or_is_named(machine):
    machine.healthy().module("535.183.01", NEXT).package("nvidia-driver-535", "535.183.01-0ubuntu1")
    third = "5.15.0-25-generic"
    for kernel in (KERNEL, NEXT, third):
        machine.file(f"boot/vmlinuz-{kernel}").file(f"lib/modules/{kernel}/modules.dep")
    machine.command(
        ["dkms", "status"],
        f"nvidia/535.183.01, {KERNEL}, x86_64: installed\nnvidia/535.183.01, {NEXT}, x86_64: installed\n"
        f"nvidia/535.183.01, {third}, x86_64: built\n",
    )
    state, judgement = machine.judged()
    rows = driver.as_results(state, judgement)["modules"]
    assert [
        (row["kernel"], row["running"], row["next"], row["version"], row["complete"], row["dkms"]) for row in rows
    ] == [
        (NEXT, False, True, "535.183.01", True, "installed"),
        (KERNEL, True, False, "535.183.01", True, "installed"),
        (third, False, False, None, None, "built"),
    ]
    assert judgement.verdict == "ok"
    assert codes(judgement) == ["driver_module_missing_elsewhere"]
    assert judgement.faults[0].message == (
        f"no nvidia module for {third}, which can be booted from the menu; dkms: nvidia/535.183.01 is only built"
    )
    assert f"dkms install --force -m nvidia -v 535.183.01 -k {third}" in judgement.faults[0].remedy


def test_a_kernel_that_a_report_does_not_hold_is_not_judged(machine):
    machine.healthy().file(f"boot/vmlinuz-{KERNEL}").file("boot/vmlinuz-5.15.0-25-generic")
    state, judgement = machine.judged()
    assert (list(state.modules), judgement.faults) == ([KERNEL], [])


# -- flavour, nouveau, Secure Boot

A14 = """NVRM: The NVIDIA GPU 0000:af:00.0 (PCI ID: 10de:1db5)
NVRM: installed in this system is not supported by open
NVRM: nvidia.ko because it does not include the required GPU
NVRM: System Processor (GSP).
"""


def test_a14_open_module_on_a_v100(machine):
    machine.gpu("0000:af:00.0").loaded("570.86.10", "open").library("570.86.10")
    machine.module("570.86.10", licence="Dual MIT/GPL").file("dev/kmsg", A14)
    machine.package("nvidia-kernel-open-570", "570.86.10-0ubuntu1").package(
        "nvidia-driver-570-open", "570.86.10-0ubuntu1"
    )
    _, judgement = machine.judged()
    assert judgement.verdict == "wrong_flavour"
    assert "0000:af:00.0" in judgement.reason
    assert judgement.remedy[0] == "apt-get purge nvidia-driver-570-open nvidia-kernel-open-570"


@pytest.mark.parametrize("device", ["1db1", "1db4", "1db6", "1df6"])
def test_a14_every_volta_card_needs_the_proprietary_module(machine, device):
    machine.gpu(device=device).library("535.183.01").module("535.183.01", licence="Dual MIT/GPL")
    _, judgement = machine.judged()
    assert judgement.verdict == "wrong_flavour"


def test_open_module_is_right_for_newer_cards(machine):
    machine.gpu(device="2335", bound="nvidia").loaded("580.159.04", "open").library("580.159.04")
    _, judgement = machine.module("580.159.04", licence="Dual MIT/GPL").judged()
    assert judgement.verdict == "ok"


def test_a16_nouveau_owns_the_cards(machine):
    machine.gpu(bound="nouveau").library("535.183.01").module("535.183.01")
    machine.file("proc/modules", "nouveau 2306048 4 - Live 0x0000000000000000\n")
    machine.file("dev/kmsg", "NVRM: The NVIDIA probe routine was not called for 3 device(s).\n")
    state, judgement = machine.judged()
    assert judgement.verdict == "blacklist_nouveau"
    assert "update-initramfs -u -k all" in judgement.remedy
    assert judgement.remedy[-1] == "reboot"
    assert not any("apt-get" in step for step in judgement.remedy)
    assert state.log is not None
    assert state.log.probe_not_called == 3


def test_a18_blacklist_is_not_in_the_initramfs(machine):
    machine.gpu(bound="nouveau").library("535.183.01").module("535.183.01")
    machine.file("proc/modules", "nouveau 2306048 4 - Live 0x0000000000000000\n")
    machine.file("etc/modprobe.d/nouveau.conf", "blacklist nouveau\noptions nouveau modeset=0\n")
    machine.command(
        ["lsinitramfs", f"/boot/initrd.img-{KERNEL}"],
        f"usr/lib/modules/{KERNEL}/kernel/drivers/gpu/drm/nouveau/nouveau.ko\netc/modprobe.d/amd64-microcode.conf\n",
    )
    state, judgement = machine.judged()
    assert judgement.verdict == "blacklist_nouveau"
    assert state.nouveau.initramfs_blacklist is False
    assert state.nouveau.can_load is True
    assert f"missing from the initramfs of {KERNEL}" in judgement.reason
    assert judgement.remedy == ["update-initramfs -u -k all", "reboot"]


def test_a18_blacklist_in_the_initramfs_needs_only_a_reboot(machine):
    machine.gpu(bound="nouveau").library("535.183.01").module("535.183.01")
    machine.file("proc/modules", "nouveau 2306048 4 - Live 0x0000000000000000\n")
    machine.file("etc/modprobe.d/nouveau.conf", "blacklist nouveau\n")
    machine.command(
        ["lsinitramfs", f"/boot/initrd.img-{KERNEL}"],
        f"usr/lib/modules/{KERNEL}/kernel/drivers/gpu/drm/nouveau/nouveau.ko\netc/modprobe.d/nouveau.conf\n",
    )
    state, judgement = machine.judged()
    assert (state.nouveau.initramfs_blacklist, state.nouveau.can_load) == (True, False)
    assert (judgement.verdict, judgement.remedy) == ("reboot_required", ["reboot"])
    assert codes(judgement) == ["nouveau_loaded"]


def test_a18_an_initramfs_without_nouveau_needs_only_a_reboot(machine):
    machine.gpu(bound="nouveau").library("535.183.01").module("535.183.01")
    machine.file("proc/modules", "nouveau 2306048 4 - Live 0x0000000000000000\n")
    machine.file("etc/modprobe.d/nouveau.conf", "blacklist nouveau\n")
    machine.command(["lsinitramfs", f"/boot/initrd.img-{KERNEL}"], "bin/sh\netc/modprobe.d/dkms.conf\n")
    _, judgement = machine.judged()
    assert judgement.verdict == "reboot_required"
    assert judgement.reason.endswith("its blacklist came after it was loaded")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("etc/modprobe.d/x.conf", "blacklist nouveau\n"),
        ("lib/modprobe.d/nvidia-graphics-drivers.conf", "blacklist nouveau\nblacklist lbm-nouveau\n"),
        ("etc/modprobe.d/x.conf", "install nouveau /bin/false\n"),
        ("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 nouveau.modeset=0\n"),
        ("proc/cmdline", "root=/dev/sda1 modprobe.blacklist=snd,nouveau\n"),
    ],
)
def test_a20_ways_to_keep_nouveau_away(machine, path, text):
    machine.healthy().file(f"lib/modules/{KERNEL}/modules.dep", "kernel/drivers/gpu/drm/nouveau/nouveau.ko: x.ko\n")
    state, _ = machine.file(path, text).judged()
    assert state.nouveau.can_load is False


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("etc/modprobe.d/x.conf", "#blacklist nouveau\n"),
        ("etc/modprobe.d/x.disabled", "blacklist nouveau\n"),
        ("etc/modprobe.d/x.conf", "blacklist nouveaux\n"),
    ],
)
def test_a20_what_does_not_keep_nouveau_away(machine, path, text):
    machine.healthy().file(f"lib/modules/{KERNEL}/modules.dep", "kernel/drivers/gpu/drm/nouveau/nouveau.ko: x.ko\n")
    state, judgement = machine.file(path, text).judged()
    assert state.nouveau.can_load is True
    assert codes(judgement) == ["nouveau_can_load"]
    assert judgement.verdict == "ok"


def secure_boot_on(machine) -> None:
    machine.file("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", "\x06\x00\x00\x00\x01")


def test_a22_unsigned_module_under_secure_boot(machine):
    """apt returned 0, the module has no signature: that is no proof that it loads."""
    secure_boot_on(machine)
    state, judgement = machine.gpu().library("535.183.01").module("535.183.01").judged()
    assert state.secure_boot is True
    assert judgement.verdict == "enroll_key"
    assert judgement.remedy[0] == "mokutil --import /var/lib/dkms/mok.pub"


def test_a22_signed_with_a_key_that_is_not_enrolled(machine):
    secure_boot_on(machine)
    machine.gpu().library("535.183.01").module("535.183.01", signer="host DKMS Secure Boot Module Signature key")
    machine.file("dev/kmsg", "4,1,5000000,-;Loading of module with unavailable key is rejected\n")
    _, judgement = machine.judged()
    assert judgement.verdict == "enroll_key"
    assert "signed with a key that is not trusted" in judgement.reason


def test_a_reboot_into_an_unsigned_module_is_no_remedy(machine):
    """A newer module waits for the boot, and Secure Boot would refuse it there."""
    secure_boot_on(machine)
    _, judgement = machine.gpu(bound="nvidia").loaded("535.183.01").library("535.261.03").module("535.261.03").judged()
    assert judgement.verdict == "enroll_key"
    assert codes(judgement) == ["driver_module_refused", "reboot_required"]
    assert "mokutil" in judgement.faults[0].remedy
    assert judgement.faults[1].remedy != "reboot"


def test_signed_and_loaded_under_secure_boot_is_ok(machine):
    secure_boot_on(machine)
    machine.gpu(bound="nvidia").loaded("535.183.01").library("535.183.01")
    _, judgement = machine.module("535.183.01", signer="Canonical Ltd. Kernel Module Signing").judged()
    assert judgement.verdict == "ok"


@pytest.mark.parametrize(
    ("value", "expected"), [("\x06\x00\x00\x00\x01", True), ("\x06\x00\x00\x00\x00", False), (None, None)]
)
def test_secure_boot_reading(machine, value, expected):
    machine.file("sys/firmware/efi/runtime", "0x0\n")
    if value is not None:
        machine.file("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", value)
    state, _ = machine.judged()
    assert state.secure_boot is expected


def test_legacy_bios_has_no_secure_boot(machine):
    state, _ = machine.judged()
    assert state.secure_boot is False


# -- Fabric Manager, kernel log


def nvswitch(machine, device: str = "1ac2") -> None:
    machine.file("sys/bus/pci/devices/0000:36:00.0/vendor", "0x10de\n")
    machine.file("sys/bus/pci/devices/0000:36:00.0/device", f"0x{device}\n")
    machine.file("sys/bus/pci/devices/0000:36:00.0/class", "0x068000\n")


def test_a30_fabric_manager_of_another_version(machine):
    nvswitch(machine)
    machine.healthy("530.41.03").package("nvidia-fabricmanager-530", "530.30.02-1")
    _, judgement = machine.judged()
    assert judgement.verdict == "fix_fabric_manager"
    assert judgement.reason == "Fabric Manager is 530.30.02, the driver is 530.41.03"


def test_a30_fabric_manager_of_the_same_version(machine):
    nvswitch(machine)
    _, judgement = machine.healthy("530.41.03").package("nvidia-fabricmanager-530", "530.41.03-1").judged()
    assert judgement.verdict == "ok"


def test_a30_fabric_manager_missing_on_an_nvswitch_machine(machine):
    nvswitch(machine, "1af1")
    _, judgement = machine.healthy().judged()
    assert codes(judgement) == ["fabric_manager_missing"]


def test_no_nvswitch_needs_no_fabric_manager(machine):
    state, judgement = machine.healthy().judged()
    assert (state.nvswitches, judgement.verdict) == (0, "ok")


def test_b08_card_lost_without_an_xid(machine):
    machine.healthy().file(
        "dev/kmsg",
        "NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.\n",
    )
    _, judgement = machine.judged()
    assert judgement.verdict == "replace_hardware"
    assert judgement.reason == "0000:b3:00.0 has fallen off the bus (no Xid was written)"
    assert "poweroff" in judgement.remedy[0]


def test_b08_the_same_alarm_with_an_xid(machine):
    machine.healthy().file("dev/kmsg", "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus\n")
    _, judgement = machine.judged()
    assert judgement.verdict == "replace_hardware"
    assert codes(judgement) == ["gpu_off_the_bus"]


@pytest.mark.parametrize(
    ("number", "verdict", "code"),
    [
        (64, "replace_hardware", "gpu_xid_hardware"),
        (48, "reset_gpu", "gpu_xid_hardware"),
        (62, "reset_gpu", "gpu_xid_hardware"),
        (74, "reset_gpu", "gpu_xid_hardware"),
        (31, "ok", "gpu_xid_other"),
        (13, "ok", "gpu_xid_other"),
        (43, "ok", "gpu_xid_other"),
        (45, "ok", "gpu_xid_other"),
        (63, "ok", "gpu_xid_other"),
        (92, "ok", "gpu_xid_other"),
    ],
)
def test_xid_leads_to_what_it_asks_for(machine, number, verdict, code):
    machine.healthy().file("dev/kmsg", f"NVRM: Xid (PCI:0000:1a:00): {number}, pid=1, name=x, text\n")
    _, judgement = machine.judged()
    assert (judgement.verdict, codes(judgement)) == (verdict, [code])


def test_software_comes_before_hardware(machine):
    """A card that the log calls lost may only need the driver: the reboot comes first, the card is still named."""
    machine.gpu(bound="nvidia").loaded("550.90.07").library("550.107.02").module("550.107.02")
    machine.file("dev/kmsg", "NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus\n")
    _, judgement = machine.judged()
    assert judgement.verdict == "reboot_required"
    assert set(codes(judgement)) == {"reboot_required", "gpu_off_the_bus"}


def test_unreadable_log_is_said_and_not_taken_for_a_clean_one(machine):
    (machine.root / "dev/kmsg").unlink()
    machine.healthy().command(["journalctl", "-k", "-b", "--no-pager", "-o", "short-iso"], "-- No entries --\n")
    machine.command(["dmesg"], "dmesg: read kernel buffer failed: Operation not permitted\n", rc=1)
    state, judgement = machine.judged()
    results = driver.as_results(state, judgement)
    assert results["kernel_log"] is None
    assert "Operation not permitted" in results["kernel_log_error"]
    assert codes(judgement) == ["kernel_log_unreadable"]


# -- kernels

GRUB = """
set default="${saved_entry}"
menuentry 'Ubuntu' --class ubuntu $menuentry_id_option 'gnulinux-simple-1' {
\tlinux\t/boot/vmlinuz-6.8.0-60-generic root=UUID=1 ro quiet
\tinitrd\t/boot/initrd.img-6.8.0-60-generic
}
submenu 'Advanced options for Ubuntu' $menuentry_id_option 'gnulinux-advanced-1' {
\tmenuentry 'Ubuntu, with Linux 6.8.0-60-generic' $menuentry_id_option 'gnulinux-6.8.0-60-generic-advanced-1' {
\t\tif [ x$grub_platform = xxen ]; then insmod xzio; fi
\t\tlinux\t/boot/vmlinuz-6.8.0-60-generic root=UUID=1 ro quiet
\t}
\tmenuentry 'Ubuntu, with Linux 5.15.0-91-generic' $menuentry_id_option 'gnulinux-5.15.0-91-generic-advanced-1' {
\t\tlinux\t/boot/vmlinuz-5.15.0-91-generic root=UUID=1 ro quiet
\t}
}
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {
\tfwsetup
}
"""


@pytest.mark.parametrize(
    ("default", "environment", "expected"),
    [
        ("0", "", NEXT),
        ("1>1", "", KERNEL),
        ("1", "", NEXT),
        ("Advanced options for Ubuntu>Ubuntu, with Linux 5.15.0-91-generic", "", KERNEL),
        ("gnulinux-advanced-1>gnulinux-5.15.0-91-generic-advanced-1", "", KERNEL),
        ("gnulinux-5.15.0-91-generic-advanced-1", "", KERNEL),
        ("saved", "saved_entry=1>1\n", KERNEL),
        ("saved", "", NEXT),
        ("0", "next_entry=1>1\n", KERNEL),
    ],
)
def test_next_kernel_is_the_one_that_grub_selects(machine, default, environment, expected):
    machine.file("boot/grub/grub.cfg", GRUB).file("etc/default/grub", f'GRUB_TIMEOUT=0\nGRUB_DEFAULT="{default}"\n')
    machine.file("boot/grub/grubenv", f"# GRUB Environment Block\n{environment}")
    machine.file(f"boot/vmlinuz-{KERNEL}").file(f"boot/vmlinuz-{NEXT}")
    found = kernels(Machine(str(machine.root)))
    assert (found.next, found.next_from) == (expected, "grub")


def test_newest_image_where_grub_does_not_tell(machine):
    machine.file("boot/vmlinuz-5.15.0-9-generic").file("boot/vmlinuz-5.15.0-91-generic").file(
        "boot/vmlinuz-5.15.0-100-generic"
    )
    machine.file("boot/vmlinuz-5.15.0-101-generic.old")
    found = kernels(Machine(str(machine.root)))
    assert (found.next, found.next_from) == ("5.15.0-100-generic", "newest")


@pytest.mark.parametrize("ending", [".bak", ".orig", ".dpkg-new", ".dpkg-tmp", ".sig", ".efi.signed", "~"])
def test_copies_of_a_kernel_are_no_kernels(machine, ending):
    """As one it would be the newest, boot next, and have neither module nor headers in any archive."""
    machine.file(f"boot/vmlinuz-{NEXT}").file(f"boot/vmlinuz-{NEXT}{ending}")
    found = kernels(Machine(str(machine.root)))
    assert (found.next, found.installed) == (NEXT, (NEXT,))


def test_running_kernel_where_there_are_no_images(machine):
    found = kernels(Machine(str(machine.root)))
    assert (found.next, found.next_from) == (KERNEL, "running")


# -- module files


@pytest.mark.parametrize("packing", ["", ".xz", ".gz"])
@pytest.mark.parametrize("signature", [b"", b"\x00\x01~Module signature appended~\n"])
def test_module_file_is_read_without_a_program(tmp_path, packing, signature):
    image = gpu_simulator.module_image("535.261.03", "NVIDIA") + signature
    data = {"": image, ".xz": lzma.compress(image), ".gz": gzip.compress(image)}[packing]
    folder = tmp_path / f"lib/modules/{KERNEL}/updates/dkms"
    folder.mkdir(parents=True)
    for name in ("nvidia-current", "nvidia-current-modeset", "nvidia-current-uvm"):
        (folder / f"{name}.ko{packing}").write_bytes(data)
    module = modinfo.on_disk(Machine(str(tmp_path)), KERNEL)
    assert module is not None
    assert (module.version, module.flavour, module.signed) == ("535.261.03", "proprietary", bool(signature))
    assert module.missing == ("nvidia_drm",)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvidia.ko", "nvidia"),
        ("nvidia.ko.zst", "nvidia"),
        ("nvidia-uvm.ko", "nvidia_uvm"),
        ("nvidia-current.ko.xz", "nvidia"),
        ("nvidia-current-drm.ko", "nvidia_drm"),
        ("nvidia-tesla-535-modeset.ko", "nvidia_modeset"),
        ("nvidia-peermem.ko", None),
        ("nvidia-fs.ko", None),
        ("nvidiafb.ko", None),
        ("i2c-nvidia-gpu.ko", None),
    ],
)
def test_module_file_names(name, part):
    assert modinfo.part_of(name) == part


@pytest.mark.parametrize("size", [0, 4, 63, 64, 100, 200])
def test_damaged_module_file_is_no_module(size):
    image = gpu_simulator.module_image("535.261.03", "NVIDIA")
    assert modinfo.parse_image(image[:size]).get("version") is None


DKMS_KEY = "host DKMS Secure Boot Module Signature key"


def signed_image(
    tmp_path, *options: str, subject: str = "/O=host/CN=host DKMS Secure Boot Module Signature key"
) -> bytes:
    """A module signed as the kernel's scripts/sign-file does it (Linux, scripts/sign-file.c), by a new key."""
    image = gpu_simulator.module_image("535.261.03", "NVIDIA")
    (tmp_path / "m.ko").write_bytes(image)
    make = [
        "openssl",
        "req",
        "-new",
        "-x509",
        "-nodes",
        "-newkey",
        "rsa:2048",
        "-utf8",
        "-subj",
        f"/O=host/CN={DKMS_KEY}",
    ]
    subprocess.run([*make, "-keyout", "k.pem", "-out", "c.pem"], cwd=tmp_path, check=True, capture_output=True)
    sign = ["openssl", "cms", "-sign", "-binary", "-nosmimecap", "-signer", "c.pem", "-inkey", "k.pem", "-in", "m.ko"]
    done = subprocess.run([*sign, *options, "-outform", "DER"], cwd=tmp_path, check=True, capture_output=True)
    return image + appended(done.stdout)


def appended(signature: bytes, signer: bytes = b"") -> bytes:
    """The signature and the kernel's struct module_signature after it."""
    kind = 1 if signer else 2
    head = bytes([0, 0, kind, len(signer), 0, 0, 0, 0]) + len(signature).to_bytes(4, "big")
    return signer + signature + head + b"~Module signature appended~\n"


@pytest.mark.parametrize("options", [("-noattr", "-nocerts"), ()])
def test_signer_is_read_from_the_module_file(tmp_path, options):
    """modinfo names the issuer's common name; dkms and Ubuntu sign without certificates and attributes."""
    assert modinfo.parse_image(signed_image(tmp_path, *options))["signer"] == DKMS_KEY


def test_signature_that_names_its_key_by_number_has_no_signer(tmp_path):
    found = modinfo.parse_image(signed_image(tmp_path, "-keyid"))
    assert (found["signed"], "signer" in found) == ("yes", False)


def test_signer_of_an_old_signature_is_plain_text():
    found = modinfo.parse_image(gpu_simulator.module_image("1", "GPL") + appended(b"\0" * 20, b"host: key"))
    assert found["signer"] == "host: key"


@pytest.mark.parametrize("signature", [b"", b"\x30", b"\x30\x82\x01", b"\x30\x00", b"\x30\x02\x05\x00", b"x" * 40])
def test_damaged_signature_is_one_without_signer(signature):
    found = modinfo.parse_image(gpu_simulator.module_image("1", "GPL") + appended(signature))
    assert (found["signed"], "signer" in found) == ("yes", False)


def test_ubuntus_prebuilt_module_is_found(tmp_path):
    folder = tmp_path / f"lib/modules/{KERNEL}/kernel/nvidia-535srv"
    folder.mkdir(parents=True)
    (folder / "nvidia.ko").write_bytes(gpu_simulator.module_image("535.183.01", "NVIDIA"))
    module = modinfo.on_disk(Machine(str(tmp_path)), KERNEL)
    assert module is not None
    assert module.path == f"/lib/modules/{KERNEL}/kernel/nvidia-535srv/nvidia.ko"


def test_whether_there_is_a_module_is_told_without_reading_it(tmp_path, machine):
    folder = tmp_path / f"lib/modules/{KERNEL}/updates/dkms"
    folder.mkdir(parents=True)
    here = Machine(str(tmp_path / "other"))
    assert not modinfo.is_on_disk(here, KERNEL)
    (folder / "nvidia-uvm.ko").write_bytes(b"")
    assert not modinfo.is_on_disk(Machine(str(tmp_path)), KERNEL)
    (folder / "nvidia-current.ko.xz").write_bytes(b"no archive of xz")
    assert modinfo.is_on_disk(Machine(str(tmp_path)), KERNEL)
    # A capture has modinfo's answer in place of the file.
    assert modinfo.is_on_disk(Machine(str(machine.module("535.183.01").root)), KERNEL)


def test_every_fault_has_an_example_and_every_verdict_a_place():
    for kind in driver.FAULTS.kinds.values():
        assert kind.meaning.endswith(".")
        assert kind.example
    assert len(set(driver.VERDICTS)) == len(driver.VERDICTS)
