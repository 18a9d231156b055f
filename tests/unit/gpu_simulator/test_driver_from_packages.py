# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The simulator where packages bring the driver: what a boot, modprobe and rmmod make of what is on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.lab.gpu_simulator import gpu_simulator

OLD, NEW = "5.15.0-139-generic", "5.15.0-151-generic"
SIGNED = b"...~Module signature appended~\n"


@dataclasses.dataclass
class Disk:
    """What the machine has on disk. ``modules``: version by (name, kernel)."""

    kernel: str = OLD
    modules: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    library: str | None = None
    initramfs_loads_nouveau: bool = True
    blacklist: bool = False
    cmdline: str = "ro"
    file: bytes = b"module"
    announced: list[tuple[bool, bool]] = dataclasses.field(default_factory=list)

    def install(self, version: str, *kernels: str) -> None:
        """What the driver's packages leave: library, blacklist, a new initramfs, modules for some kernels."""
        self.library, self.blacklist, self.initramfs_loads_nouveau = version, True, False
        for kernel in kernels:
            self.modules.update({(name, kernel): version for name in gpu_simulator.NEEDS})


@pytest.fixture
def disk(machine, monkeypatch, tmp_path) -> Disk:
    found = Disk(modules={("nouveau", OLD): "", ("nouveau", NEW): ""})
    image = tmp_path / "module.ko"

    def module(name: str, kernel: str):
        version = found.modules.get((name, kernel))
        image.write_bytes(found.file)
        return None if version is None else (str(image), version, "proprietary")

    monkeypatch.setattr(gpu_simulator, "install_on_machine", lambda sysroot: None)
    monkeypatch.setattr(gpu_simulator, "announce", lambda *states: found.announced.append(states))
    monkeypatch.setattr(gpu_simulator, "_reload_units", lambda: None)
    monkeypatch.setattr(gpu_simulator, "_module", module)
    monkeypatch.setattr(gpu_simulator, "_modules_load", list)
    monkeypatch.setattr(gpu_simulator, "choose_kernel", lambda: (found.kernel, found.cmdline))
    monkeypatch.setattr(gpu_simulator, "library_on_disk", lambda: found.library)
    monkeypatch.setattr(gpu_simulator, "_nouveau_of_initramfs", lambda kernel: found.initramfs_loads_nouveau)
    monkeypatch.setattr(
        gpu_simulator, "_blacklisted", lambda root, name: found.blacklist if name == "nouveau" else False
    )
    assert machine.control("install", "--driver", "packages").rc == 0
    machine.edit(lambda state: state.update(engines=[]))
    return found


def loaded(machine) -> list[str]:
    return [line.split()[0] for line in machine.control("lsmod").out.splitlines()[1:]]


def driver_links(machine) -> set[str]:
    folders = (machine.sysroot / "sys/bus/pci/devices").iterdir()
    # Links lead to the devices of the machine that the tests run on.
    return {(folder / "driver").readlink().name for folder in folders if not folder.is_symlink()}


def test_a_bare_server_has_nouveau_and_no_driver(machine, disk):
    assert loaded(machine) == ["nouveau"]
    assert driver_links(machine) == {"nouveau"}
    assert (machine.sysroot / "proc/sys/kernel/osrelease").read_text() == f"{OLD}\n"
    assert not (machine.sysroot / "proc/driver/nvidia/version").exists()
    answer = machine.smi("-L")
    assert (answer.rc, answer.out[:22]) == (12, "NVIDIA-SMI couldn't fi")


def test_installed_and_not_yet_booted_then_booted(machine, disk):
    before = (machine.sysroot / "proc/sys/kernel/random/boot_id").read_text()
    disk.install("535.261.03", OLD)
    assert machine.smi("-L").rc == gpu_simulator.RC_NO_DRIVER

    assert machine.control("boot").rc == 0

    # nvidia-uvm is not loaded by udev's rules.
    assert loaded(machine) == ["nvidia_drm", "nvidia_modeset", "nvidia"]
    assert driver_links(machine) == {"nvidia"}
    assert machine.smi("-L").out.count("Tesla V100") == 4
    assert (machine.sysroot / "proc/sys/kernel/random/boot_id").read_text() != before
    assert disk.announced[-1] == (False, True)


def test_a_blacklist_on_disk_alone_does_not_keep_nouveau_out(machine, disk):
    disk.install("535.261.03", OLD)
    disk.initramfs_loads_nouveau = True
    machine.control("boot")
    assert loaded(machine) == ["nouveau"]

    disk.cmdline = "ro modprobe.blacklist=nouveau"
    machine.control("boot")
    assert "nvidia" in loaded(machine)


def test_an_upgrade_shows_as_mismatch_until_the_next_boot(machine, disk):
    disk.install("535.261.03", OLD)
    machine.control("boot")
    disk.install("535.288.01", OLD)

    answer = machine.smi("-L")
    assert (answer.rc, answer.out.splitlines()[1]) == (18, "NVML library version: 535.288")
    assert "535.261.03" in (machine.sysroot / "proc/driver/nvidia/version").read_text()

    machine.control("boot")
    assert machine.smi("--query-gpu=driver_version", "--format=csv,noheader").out.split() == ["535.288.01"] * 4


def test_a_kernel_without_a_module_boots_without_a_driver(machine, disk):
    disk.install("535.261.03", OLD)
    disk.kernel = NEW
    machine.control("boot")
    assert loaded(machine) == []
    assert machine.smi("-L").rc == gpu_simulator.RC_NO_DRIVER
    assert machine.control("modprobe", "nvidia").out == (
        f"modprobe: FATAL: Module nvidia not found in directory /lib/modules/{NEW}\n"
    )


def test_nouveau_gives_way_and_the_driver_is_loaded_without_a_boot(machine, disk):
    disk.install("535.261.03", OLD)
    refused = machine.control("modprobe", "nvidia")
    assert (refused.rc, refused.out) == (1, "modprobe: ERROR: could not insert 'nvidia': No such device\n")

    assert machine.control("rmmod", "nouveau").rc == 0
    assert machine.control("modprobe", "nvidia-uvm").rc == 0
    assert loaded(machine) == ["nvidia_uvm", "nvidia"]
    assert machine.smi("-L").rc == 0


def test_a_console_keeps_nouveau(machine, disk):
    machine.control("fault", "nouveau-busy")
    for words, text in (
        (("rmmod", "nouveau"), "rmmod: ERROR: Module nouveau is in use\n"),
        (("modprobe", "-r", "nouveau"), "modprobe: FATAL: Module nouveau is in use.\n"),
    ):
        answer = machine.control(*words)
        assert (answer.rc, answer.out) == (1, text)
    assert loaded(machine) == ["nouveau"]


def test_modules_in_use_stay(machine, disk):
    disk.install("535.261.03", OLD)
    machine.control("boot")
    answer = machine.control("rmmod", "nvidia")
    assert (answer.rc, answer.out) == (1, "rmmod: ERROR: Module nvidia is in use by: nvidia_modeset\n")
    assert machine.control("modprobe", "-r", "nvidia_drm").rc == 0
    assert loaded(machine) == []
    assert disk.announced[-1] == (True, False)


@pytest.mark.parametrize(
    ("file", "enrolled", "loads"),
    [
        (b"module", False, False),
        (b"module", True, False),
        (b"key of the machine" + SIGNED, False, False),
        (b"key of the machine" + SIGNED, True, True),
        (b"Canonical" + SIGNED, False, True),
    ],
)
def test_secure_boot_looks_at_the_signature(machine, disk, file, enrolled, loads):
    disk.install("535.261.03", OLD)
    disk.file = file
    machine.control("fault", "secure-boot")
    if enrolled:
        machine.control("enroll")
    machine.control("boot")

    assert ("nvidia" in loaded(machine)) is loads
    rejected = "Loading of module with unavailable key is rejected" in (machine.sysroot / "dev/kmsg").read_text()
    assert rejected is not loads
    assert machine.control("mokutil", "--sb-state").out == "SecureBoot enabled\n"


def test_only_a_machine_with_packages_boots(machine):
    assert machine.control("boot").rc == 0
    answer = machine.control("modprobe", "nvidia")
    assert (answer.rc, "--driver packages" in answer.out) == (2, True)


MENU = """
menuentry 'Ubuntu' --class ubuntu $menuentry_id_option 'gnulinux-simple-1' {
\tif [ x$grub_platform = xxen ]; then insmod xzio; fi
\tlinux\t/boot/vmlinuz-5.15.0-151-generic root=UUID=1 ro quiet
}
submenu 'Advanced options for Ubuntu' $menuentry_id_option 'gnulinux-advanced-1' {
\tmenuentry 'Ubuntu, with Linux 5.15.0-151-generic' $menuentry_id_option 'gnulinux-5.15.0-151-generic-advanced-1' {
\t\tlinux\t/boot/vmlinuz-5.15.0-151-generic root=UUID=1 ro
\t}
\tmenuentry 'Ubuntu, with Linux 5.15.0-139-generic' $menuentry_id_option 'gnulinux-5.15.0-139-generic-advanced-1' {
\t\tlinux\t/boot/vmlinuz-5.15.0-139-generic root=UUID=1 ro
\t}
}
"""


@pytest.mark.parametrize(
    ("wanted", "kernel"),
    [
        ("0", "5.15.0-151-generic"),
        ("1", "5.15.0-151-generic"),
        ("1>1", "5.15.0-139-generic"),
        ("Advanced options for Ubuntu>Ubuntu, with Linux 5.15.0-139-generic", "5.15.0-139-generic"),
        ("gnulinux-advanced-1>gnulinux-5.15.0-139-generic-advanced-1", "5.15.0-139-generic"),
        ("Ubuntu, with Linux 5.4.0-1-generic", None),
    ],
)
def test_the_menu_leads_to_a_kernel(wanted, kernel):
    entry = gpu_simulator._grub_entry(MENU, wanted)
    assert (entry[0] if entry else None) == kernel


def test_the_kernels_arguments_come_from_the_menu():
    assert gpu_simulator._grub_entry(MENU, "0") == (
        "5.15.0-151-generic",
        "BOOT_IMAGE=/boot/vmlinuz-5.15.0-151-generic root=UUID=1 ro quiet",
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"etc/modprobe.d/a.conf": "blacklist nouveau\n"}, True),
        ({"etc/modprobe.d/a.conf": "# blacklist nouveau\nblacklist nouveaux\n"}, False),
        ({"etc/modprobe.d/a": "blacklist nouveau\n"}, False),
        ({"usr/lib/modprobe.d/a.conf": "install nouveau /bin/false\n"}, True),
        # An empty file of the same name in /etc takes the packaged one away.
        ({"usr/lib/modprobe.d/a.conf": "blacklist nouveau\n", "etc/modprobe.d/a.conf": ""}, False),
    ],
)
def test_what_counts_as_a_blacklist(tmp_path: Path, files, expected):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert gpu_simulator._blacklisted(tmp_path, "nouveau") is expected
