"""The host stage where it counts: real kernels, real initramfs, real reboots, real apt.

The tests build on each other in the order they stand in. The driver is a stand-in that DKMS has compiled and the kernel
really loads (docs/vm.md). The archive offers a newer kernel and a newer driver all the way through.
"""

from __future__ import annotations

import re

import pytest
import yaml

from tests.lab import vm_image, vm_packages
from tests.vm.conftest import Bench

DROP_IN = "volta-nouveau.conf"
#: The dry run of unattended-upgrades takes minutes in software, and containers show it as well (molecule/kernel_hold).
QUICK = {"kernel_hold_unattended_proof": False}
KERNEL = r"linux-(?:image|headers)-\S+"
STACK = r"nvidia-\S+|libnvidia-\S+"


def loaded(bench: Bench) -> set[str]:
    return {line.split()[0] for line in bench.sh("cat /proc/modules").splitlines()}


def offered(bench: Bench, name: str) -> list[str]:
    """What a dist-upgrade would install of kernel or driver, by ``name`` a regular expression."""
    simulated = bench.sh("apt-get -s dist-upgrade")
    return re.findall(rf"^Inst ({name}) ", simulated, re.MULTILINE)


@pytest.fixture(scope="module")
def newer(bench: Bench) -> str:
    """The release of the kernel that the archive offers."""
    depends = bench.sh("apt-cache show --no-all-versions linux-image-amd64")
    found = re.search(r"^Depends: linux-image-(\S+)", depends, re.MULTILINE)
    assert found is not None
    return found[1]


def test_udev_gives_a_v100_nouveau_as_long_as_nobody_forbids_it(bench: Bench) -> None:
    assert "nouveau" in loaded(bench)
    resolved = bench.sh(f"modprobe -R '{vm_image.V100_MODALIAS}'").split()
    print(f"a V100 leads to {resolved}")
    assert "nouveau" in resolved


def test_without_holds_the_archive_moves_kernel_and_driver(bench: Bench) -> None:
    """The control for what follows: there is something to hold."""
    kernel, driver = offered(bench, KERNEL), offered(bench, STACK)
    print(f"offered by dist-upgrade: {kernel} {driver}")
    assert "linux-image-amd64" in kernel
    assert "nvidia-driver" in driver


def test_the_gate_reboots_after_nouveau_is_off_and_the_kernel_held(bench: Bench) -> None:
    former = bench.boot_id
    # The order of the stage host; unloading nouveau live would save the reboot that is wanted here.
    variables = {**QUICK, "nouveau_unload": False, "reboot_gate_allowed": True}
    played = bench.play("nouveau", "kernel_hold", "reboot_gate", variables=variables)
    boot_id = bench.boot_id
    print(f"boot id {former} -> {boot_id}")
    assert played.status == 0
    assert boot_id != former


def test_our_file_is_in_every_initramfs(bench: Bench) -> None:
    for kernel in bench.images:
        inside = bench.sh(f"lsinitramfs /boot/initrd.img-{kernel}").splitlines()
        print(f"initrd.img-{kernel}: {[name for name in inside if DROP_IN in name]}")
        assert any(name.endswith(f"/modprobe.d/{DROP_IN}") for name in inside)


def test_the_driver_comes_up_instead_of_nouveau(bench: Bench) -> None:
    modules = loaded(bench)
    version = bench.sh("cat /sys/module/nvidia/version")
    print(f"loaded: {sorted(name for name in modules if name.startswith(('nouveau', 'nvidia')))}, {version}")
    assert "nouveau" not in modules
    assert {"nvidia", "nvidia_uvm"} <= modules
    assert version == vm_packages.DRIVER
    assert "nouveau" not in bench.sh(f"modprobe -n -v -b '{vm_image.V100_MODALIAS}'")


def test_a_dist_upgrade_leaves_kernel_and_driver_alone(bench: Bench) -> None:
    held = bench.sh("apt-mark showhold").split()
    moved = offered(bench, rf"{KERNEL}|{STACK}")
    print(f"held: {held}\noffered by dist-upgrade of kernel and driver: {moved}")
    assert moved == []
    assert {"linux-image-amd64", f"linux-image-{bench.kernel}", "nvidia-driver"} <= set(held)


def test_a_kernel_slipped_in_by_hand_is_noticed_on_the_next_run(bench: Bench, newer: str) -> None:
    running = bench.kernel
    # Its name was never installed, so no hold is in its way; without headers DKMS has nothing to compile against.
    bench.sh(f"DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends linux-image-{newer}")
    played = bench.play("kernel_hold", variables=QUICK)
    print(f"running {running}, in /boot {bench.images}, dkms: {bench.sh('dkms status')}")
    assert played.status != 0
    assert "kernel_without_driver" in played.output
    assert newer in played.output
    assert f"linux-image-{newer}" not in bench.sh("apt-mark showhold").split()


def test_our_file_is_in_the_initramfs_of_the_slipped_in_kernel_too(bench: Bench, newer: str) -> None:
    assert DROP_IN in bench.sh(f"lsinitramfs /boot/initrd.img-{newer}")


def test_grub_boots_the_former_kernel_once_where_the_new_one_has_no_driver(bench: Bench, newer: str) -> None:
    former = bench.kernel
    playbook = bench.folder / "boot_former.yml"
    role = {"name": "volta.llm.kernel_hold", "tasks_from": "boot_former"}
    tasks = [{"name": "Boot the former kernel once", "ansible.builtin.import_role": role}]
    playbook.write_text(
        yaml.safe_dump([{"hosts": "gpu_servers", "gather_facts": False, "tasks": tasks}]), encoding="utf-8"
    )
    assert bench.playbook(playbook).status == 0
    print(bench.sh("grub-editenv list"))
    assert "next_entry=" in bench.sh("grub-editenv list")
    bench.reboot()
    left = bench.sh("grub-editenv list")
    print(f"GRUB booted {bench.kernel}, the newest is {newer}; grubenv now: {left or '(empty)'}")
    assert bench.kernel == former
    assert "nvidia" in loaded(bench)
    assert not re.search(r"next_entry=\S", left), "once, and never again"
