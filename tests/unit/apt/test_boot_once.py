# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Booting the kernel that has a driver once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.apt.boot_once import Outcome, boot_once
from ansible_collections.volta.llm.plugins.module_utils.apt.grub import entry_ids
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia.kernels import kernels

OLD, NEW = "5.15.0-91-generic", "5.15.0-105-generic"
# The form of grub-mkconfig 2.06 (Ubuntu 22.04): the first entry, then a menu with each kernel and its recovery entry.
MENU = """\
menuentry 'Ubuntu' --class gnu-linux $menuentry_id_option 'gnulinux-simple-1234' {{
\tlinux\t/boot/vmlinuz-{new} root=UUID=1234 ro
}}
submenu 'Advanced options for Ubuntu' $menuentry_id_option 'gnulinux-advanced-1234' {{
{entries}}}
"""
ENTRY = """\
\tmenuentry 'Ubuntu, with Linux {0}{2}' --class gnu-linux $menuentry_id_option 'gnulinux-{0}-{1}-1234' {{
\t\tlinux\t/boot/vmlinuz-{0} root=UUID=1234 ro
\t}}
"""


def menu(*releases: str) -> str:
    entries = "".join(
        ENTRY.format(release, "recovery", " (recovery mode)") + ENTRY.format(release, "advanced", "")
        for release in releases
    )
    return MENU.format(new=releases[0], entries=entries)


class Server:
    """Two installed kernels with GRUB's menu; grub-reboot writes the environment."""

    def __init__(self, root: Path, running: str = OLD, having: tuple[str, ...] = (OLD,)) -> None:
        self.root = root
        self.calls: list[tuple[str, ...]] = []
        self.answer = Completed((), 0)
        self.write("proc/sys/kernel/osrelease", running)
        self.write("boot/grub/grub.cfg", menu(NEW, OLD))
        for release in (OLD, NEW):
            self.write(f"boot/vmlinuz-{release}", "")
            self.write(f"lib/modules/{release}/modules.dep", "")
        for release in having:
            self.write(f"lib/modules/{release}/updates/dkms/nvidia.ko", "")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def boot_once(self, wanted: str | None = None, check: bool = False, require: bool = True) -> Any:
        server = self

        class System(Machine):
            def run(self, argv: Any, timeout: float | None = None, env: Any = None) -> Completed:
                server.calls.append(tuple(argv))
                if server.answer.ok:
                    server.write("boot/grub/grubenv", f"# GRUB Environment Block\nnext_entry={argv[1]}\n")
                return server.answer

        return boot_once(System(str(self.root)), Machine(str(self.root)), wanted, check, require)


ENTRY_OLD = f"gnulinux-advanced-1234>gnulinux-{OLD}-advanced-1234"


def test_a_new_kernel_without_a_driver_gives_way_to_the_running_one_once(tmp_path: Path) -> None:
    server = Server(tmp_path)
    planned = server.boot_once(check=True)
    assert (planned.kernel, planned.changed, server.calls) == (OLD, True, [])
    outcome = server.boot_once()
    assert (outcome.kernel, outcome.entry, outcome.changed, outcome.faults) == (OLD, ENTRY_OLD, True, [])
    assert server.calls == [("grub-reboot", ENTRY_OLD)]
    again = server.boot_once()
    assert (again.kernel, again.changed, len(server.calls)) == (None, False, 1)


def test_the_machine_already_runs_the_kernel_without_a_driver(tmp_path: Path) -> None:
    assert Server(tmp_path, running=NEW).boot_once().kernel == OLD


def test_a_next_kernel_with_a_driver_stays(tmp_path: Path) -> None:
    server = Server(tmp_path, having=(OLD, NEW))
    assert (server.boot_once().kernel, server.calls) == (None, [])
    assert server.boot_once(wanted=OLD).kernel == OLD
    assert server.boot_once(wanted=OLD).kernel is None


@pytest.mark.parametrize(
    ("having", "wanted", "menu_of", "answer", "code"),
    [
        ((), None, (NEW, OLD), Completed((), 0), "no_kernel_with_driver"),
        ((OLD,), "6.1.0-1-amd64", (NEW, OLD), Completed((), 0), "grub_entry_missing"),
        ((OLD,), None, (NEW,), Completed((), 0), "grub_entry_missing"),
        ((OLD,), None, (NEW, OLD), Completed((), 1, stderr="grub-editenv: error: cannot open\n"), "grub_boot_failed"),
        ((OLD,), None, (NEW, OLD), Completed((), None, stderr="No such file", missing=True), "grub_boot_failed"),
    ],
)
def test_what_cannot_be_done_is_named(
    tmp_path: Path, having: tuple[str, ...], wanted: str | None, menu_of: tuple[str, ...], answer: Completed, code: str
) -> None:
    server = Server(tmp_path, having=having)
    server.write("boot/grub/grub.cfg", menu(*menu_of))
    server.answer = answer
    outcome = server.boot_once(wanted)
    assert [fault.code for fault in outcome.faults] == [code]
    assert outcome.faults[0].remedy
    assert not outcome.changed


def test_a_machine_without_any_driver_can_be_left_alone(tmp_path: Path) -> None:
    server = Server(tmp_path, having=())
    assert server.boot_once(require=False) == Outcome(None, before=kernels(Machine(str(tmp_path))))
    assert server.calls == []


def test_entries_by_kernel(tmp_path: Path) -> None:
    """Neither the recovery entry nor the first one, which is of another kernel after the next update."""
    server = Server(tmp_path)
    machine = Machine(str(tmp_path))
    assert entry_ids(machine, OLD) == ENTRY_OLD
    assert entry_ids(machine, NEW) == ENTRY_OLD.replace(OLD, NEW)
    assert entry_ids(machine, "6.1.0-1-amd64") is None
    (server.root / "boot/grub/grub.cfg").unlink()
    assert entry_ids(machine, OLD) is None
