"""The host stage where it counts: real kernels, real initramfs, real reboots, real apt.

The tests build on each other in the order they stand in. The driver is a stand-in whose modules DKMS compiles and
the kernel really loads (docs/vm.md), and the archive offers a newer kernel and a newer driver all the way through.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Mapping

import pytest
import yaml

from tests.lab import vm_image, vm_packages
from tests.lab.repository import deb
from tests.vm.conftest import ROOT, Bench

DRIVER = "535.261.03"
NEWER_DRIVER = "535.288.01"
ARCHIVE = "/srv/lab-archive"
DROP_IN = "volta-nouveau.conf"


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def loaded(bench: Bench) -> set[str]:
    return {line.split()[0] for line in bench.sh("cat /proc/modules").splitlines()}


def offered(bench: Bench, name: str) -> list[str]:
    """What a dist-upgrade would install of kernel or driver, by ``name`` a regular expression."""
    simulated = bench.sh("apt-get -s dist-upgrade")
    return re.findall(rf"^Inst ({name}) ", simulated, re.MULTILINE)


def unattended(bench: Bench) -> set[str]:
    """What unattended-upgrades would take."""
    dry = bench.sh("unattended-upgrade --dry-run --debug")
    print("\n".join(dry.splitlines()[-40:]))
    found = re.search(r"^Packages that will be upgraded:(.*)$", dry, re.MULTILINE)
    return set(found[1].split()) if found else set()


@pytest.fixture(scope="module")
def newer(bench: Bench) -> str:
    """The release of the kernel that the archive offers."""
    depends = bench.sh("apt-cache show --no-all-versions linux-image-amd64")
    found = re.search(r"^Depends: linux-image-(\S+)", depends, re.MULTILINE)
    assert found is not None
    return found[1]


#: In software, and beside builds, the dry run of unattended-upgrades can take long.
PATIENT = {"kernel_hold_unattended_timeout": 7200}
KERNEL = r"linux-(?:image|headers)-\S+"
STACK = r"nvidia-\S+|libnvidia-\S+"


@pytest.fixture(scope="module", autouse=True)
def archive(bench: Bench) -> None:
    """A local archive with two versions of the driver, labelled as Debian: unattended-upgrades takes it."""
    bench.sh("apt-get update")
    packages = [package for version in (DRIVER, NEWER_DRIVER) for package in vm_packages.packages(version)]
    files = {f"{ARCHIVE}/{package.file_name}": deb.build(package) for package in packages}
    bench.vm.machine.run("tar", "-x", "-C", "/", stdin=_tar(files))
    labels = " ".join(
        f"-o APT::FTPArchive::Release::{key}={value}"
        for key, value in {"Origin": "Debian", "Label": "Debian", "Codename": "bookworm"}.items()
    )
    bench.sh(
        f"set -e; cd {ARCHIVE}; apt-ftparchive packages . > Packages; apt-ftparchive {labels} release . > Release.new;"
        f" mv Release.new Release; echo 'deb [trusted=yes] file:{ARCHIVE} ./' > /etc/apt/sources.list.d/lab.list;"
        " apt-get update"
    )


def test_udev_gives_a_v100_nouveau_as_long_as_nobody_forbids_it(bench: Bench) -> None:
    assert "nouveau" in loaded(bench)
    resolved = bench.sh(f"modprobe -R '{vm_image.V100_MODALIAS}'").split()
    print(f"a V100 leads to {resolved}")
    assert "nouveau" in resolved


def test_our_file_is_in_every_initramfs(bench: Bench) -> None:
    played = bench.play("nouveau", variables={"nouveau_unload": False})
    assert played.status == 0
    for kernel in bench.images:
        inside = bench.sh(f"lsinitramfs /boot/initrd.img-{kernel}").splitlines()
        print(f"initrd.img-{kernel}: {[name for name in inside if DROP_IN in name]}")
        assert any(name.endswith(f"/modprobe.d/{DROP_IN}") for name in inside)
    assert bench.sh(f"modprobe -n -v -b '{vm_image.V100_MODALIAS}'") == ""
    assert "nouveau" in loaded(bench), "asked to leave the loaded one alone"
    again = bench.play("nouveau", variables={"nouveau_unload": False})
    assert (again.status, again.counts["changed"]) == (0, 0)


def test_dkms_compiles_the_driver_for_the_kernel(bench: Bench) -> None:
    version = vm_packages.revision(DRIVER)
    names = " ".join(f"{package.name}={version}" for package in vm_packages.packages(DRIVER))
    print(bench.sh(f"DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends {names}"))
    status = bench.sh("dkms status")
    print(status)
    assert f"{DRIVER}, {bench.kernel}, x86_64: installed" in status


def test_a_reboot_that_is_not_allowed_is_a_fault_and_does_not_happen(bench: Bench) -> None:
    former = bench.boot_id
    played = bench.play("reboot_gate")
    assert played.status != 0
    assert "reboot_required" in played.output
    assert bench.boot_id == former


def test_the_gate_reboots_and_the_driver_comes_up_instead_of_nouveau(bench: Bench) -> None:
    former = bench.boot_id
    played = bench.play("reboot_gate", variables={"reboot_gate_allowed": True})
    modules = loaded(bench)
    version = bench.sh("cat /sys/module/nvidia/version")
    print(
        f"boot id {former} -> {bench.boot_id}; loaded: {sorted(name for name in modules if 'n' in name[:2])}; {version}"
    )
    assert played.status == 0
    assert bench.boot_id != former
    assert "nouveau" not in modules
    assert {"nvidia", "nvidia_uvm"} <= modules
    assert version == DRIVER


def test_the_gate_leaves_a_machine_in_order_alone(bench: Bench) -> None:
    former = bench.boot_id
    played = bench.play("reboot_gate", variables={"reboot_gate_allowed": True})
    assert (played.status, played.counts["changed"]) == (0, 0)
    assert bench.boot_id == former


def test_without_holds_the_archive_moves_kernel_and_driver(bench: Bench) -> None:
    """The control for the next test: there is something to hold."""
    kernel, driver = offered(bench, KERNEL), offered(bench, STACK)
    print(f"offered by dist-upgrade: {kernel} {driver}")
    assert "linux-image-amd64" in kernel
    assert "nvidia-driver" in driver
    taken = unattended(bench)
    print(f"taken by unattended-upgrade: {taken}")
    assert {"linux-image-amd64", "nvidia-driver"} <= taken


def test_after_kernel_hold_nothing_moves_kernel_or_driver(bench: Bench) -> None:
    played = bench.play("kernel_hold", variables=PATIENT)
    assert played.status == 0
    held = bench.sh("apt-mark showhold").split()
    kernel, driver = offered(bench, KERNEL), offered(bench, STACK)
    print(f"held: {held}\noffered by dist-upgrade: {kernel + driver}")
    assert kernel + driver == []
    assert {"linux-image-amd64", f"linux-image-{bench.kernel}", "nvidia-driver"} <= set(held)
    taken = unattended(bench)
    print(f"taken by unattended-upgrade: {taken}")
    assert not [name for name in taken if re.fullmatch(f"{KERNEL}|{STACK}", name)]
    again = bench.play("kernel_hold", variables=PATIENT)
    assert (again.status, again.counts["changed"]) == (0, 0)


def test_a_kernel_slipped_in_by_hand_is_noticed_on_the_next_run(bench: Bench, newer: str) -> None:
    running = bench.kernel
    # Its name was never installed, so no hold is in its way; without headers DKMS has nothing to compile against.
    bench.sh(f"DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends linux-image-{newer}")
    played = bench.play("kernel_hold", variables=PATIENT)
    print(f"running {running}, in /boot {bench.images}, dkms: {bench.sh('dkms status')}")
    assert played.status != 0
    assert "kernel_without_driver" in played.output
    assert newer in played.output
    assert f"linux-image-{newer}" not in bench.sh("apt-mark showhold").split()


def test_our_file_is_in_the_initramfs_of_the_slipped_in_kernel_too(bench: Bench, newer: str) -> None:
    assert DROP_IN in bench.sh(f"lsinitramfs /boot/initrd.img-{newer}")
    played = bench.play("nouveau")
    assert (played.status, played.counts["changed"]) == (0, 0)


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


def test_the_kernel_is_moved_on_deliberately_with_a_driver_compiled_for_it(bench: Bench, newer: str) -> None:
    former, boot_id = bench.kernel, bench.boot_id
    # What the fault says: give the kernel its driver, or take it away.
    bench.sh(f"DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends linux-headers-{newer}")
    variables = {**PATIENT, "reboot_gate_allowed": True}
    played = bench.playbook(ROOT / "playbooks" / "kernel_upgrade.yml", variables=variables)
    held = bench.sh("apt-mark showhold").split()
    print(f"kernel {former} -> {bench.kernel}, boot id {boot_id} -> {bench.boot_id}, held {held}")
    print(bench.sh("dkms status"))
    assert played.status == 0
    assert bench.kernel == newer
    assert bench.boot_id != boot_id
    assert bench.sh("cat /sys/module/nvidia/version") == DRIVER
    assert "nouveau" not in loaded(bench)
    assert {"linux-image-amd64", f"linux-image-{newer}", "nvidia-driver"} <= set(held)
