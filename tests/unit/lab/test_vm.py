# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What of the virtual machine needs no machine: what lies before the partition, the command line, the choice of KVM."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.lab import image, vm, vm_image
from tests.lab.errors import LabError
from tests.lab.paths import Paths


def a_recipe(**changed: object) -> vm_image.Recipe:
    parts = {"suite": "bookworm", "base": None, "sources": ("deb http://archive.example/debian bookworm main",)}
    return vm_image.Recipe(image.Recipe(**{**parts, **changed}))  # type: ignore[arg-type]


def test_the_disk_is_named_by_what_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    before = a_recipe().name
    assert before.startswith("vm-bookworm-")
    assert a_recipe().name == before
    assert a_recipe(files={"/etc/x": "y"}).name != before
    monkeypatch.setattr(vm_image, "PACKAGES", (*vm_image.PACKAGES, "htop"))
    assert a_recipe().name != before


def test_the_boot_sector_keeps_grubs_code_and_names_one_active_partition_behind_the_core() -> None:
    boot, core = bytes(range(256)) * 2, b"core" * 1000
    front = vm_image.front(boot, core)
    assert front[:440] == boot[:440]
    assert front[510:512] == b"\x55\xaa"
    state, kind, start, length = struct.unpack("<B3xB3xII", front[446:462])
    assert (state, kind, start) == (0x80, 0x83, 2048)
    assert (start + length) * 512 == vm_image.DISK_SIZE
    assert front[462:510] == bytes(48)
    assert front[512:] == core
    assert len(front) < vm_image.PARTITION_START


def test_a_core_that_reaches_into_the_partition_is_refused() -> None:
    vm_image.front(bytes(512), bytes(vm_image.PARTITION_START - 512))
    with pytest.raises(ValueError, match="does not fit"):
        vm_image.front(bytes(512), bytes(vm_image.PARTITION_START - 511))


@pytest.mark.parametrize(
    ("wanted", "works", "tried"),
    [
        (None, True, ["kvm", "tcg"]),
        (None, False, ["tcg"]),
        ("", False, ["tcg"]),
        ("tcg", True, ["tcg"]),
        ("kvm", False, ["kvm"]),
    ],
)
def test_kvm_is_tried_first_where_it_works_and_software_comes_after_it(
    wanted: str | None, works: bool, tried: list[str]
) -> None:
    assert vm.accelerators(wanted, lambda: works) == tried


def test_an_accelerator_that_is_not_known_is_refused() -> None:
    with pytest.raises(LabError, match="VOLTA_VM_ACCEL=xen: use kvm, tcg"):
        vm.accelerators("xen")


def test_the_command_line_forwards_loopback_only_and_takes_nothing_from_the_host() -> None:
    command = vm.qemu_command(
        accelerator="tcg",
        disk=Path("/d"),
        disk_format="qcow2",
        port=2222,
        folder=Path("/f"),
        processors=2,
    )
    assert "user,id=user,hostfwd=tcp:127.0.0.1:2222-:22" in command
    assert command[command.index("-cpu") + 1] == "max,la57=off"
    assert "-nodefaults" in command
    assert "-no-user-config" in command


def test_ssh_goes_to_the_port_and_the_host_key_is_known_by_it() -> None:
    machine = vm.VirtualMachine("vm", "127.0.0.1", Path("/key"), Path("/known"), 2222)
    command = machine.ssh(batch=True)
    assert command[-3:] == ["-p", "2222", "root@127.0.0.1"]


def test_a_machine_that_was_never_started_says_how_to_start_it(tmp_path: Path) -> None:
    paths = Paths(cache=tmp_path / "cache", state=tmp_path / "state")
    absent = vm.Vm("absent", paths=paths)
    assert not absent.running
    assert absent.down() is False
    with pytest.raises(LabError, match=r"python -m tests\.lab\.vm up absent"):
        _ = absent.machine
