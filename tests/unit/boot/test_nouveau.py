# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Nouveau off the cards: file, images, unloading. Names like a18 are rows of public reports."""

from __future__ import annotations

import os

import pytest
from ansible_collections.volta.llm.plugins.module_utils.boot import nouveau
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed

from tests.unit.boot.conftest import NEW, OLD

FILE = "etc/modprobe.d/volta-nouveau.conf"


def codes(outcome):
    return [fault.code for fault in outcome.faults]


def by_kernel(state):
    return {kernel.image.kernel: kernel for kernel in state.kernels}


def test_a_bare_machine_is_brought_off_nouveau_for_every_kernel(machine):
    outcome = nouveau.disable(machine.nouveau())
    assert outcome.changes == [
        "wrote /etc/modprobe.d/volta-nouveau.conf",
        f"rebuilt /boot/initrd.img-{NEW}",
        f"rebuilt /boot/initrd.img-{OLD}",
        "unloaded nouveau",
    ]
    assert (outcome.faults, outcome.reboot_required) == ([], None)
    assert [kernel.resolves_to for kernel in outcome.before.kernels] == [("nouveau",), ("nouveau",)]
    assert [kernel.resolves_to for kernel in outcome.after.kernels] == [(), ()]
    assert [kernel.file_inside for kernel in outcome.after.kernels] == [True, True]
    assert outcome.after.off()
    assert not outcome.before.off()
    assert (machine.root / FILE).read_text().endswith("blacklist nouveau\noptions nouveau modeset=0\n")
    machine.ran.clear()
    again = nouveau.disable(machine)
    assert (again.changes, again.faults, machine.built()) == ([], [], [])


def test_check_mode_says_the_same_and_does_nothing(machine):
    outcome = nouveau.disable(machine.nouveau(), check=True)
    assert len(outcome.changes) == 4
    assert not (machine.root / FILE).exists()
    assert machine.built() == []
    assert (machine.read("/proc/modules") or "").startswith("nouveau")


def test_a18_an_image_without_the_file_is_made_anew_alone(machine):
    nouveau.disable(machine)
    names = machine.read(f"/boot/initrd.img-{OLD}").replace(f"{FILE}\n", "")
    machine.file(f"boot/initrd.img-{OLD}", names)
    machine.ran.clear()
    outcome = nouveau.disable(machine)
    assert outcome.changes == [f"rebuilt /boot/initrd.img-{OLD}"]
    assert machine.built() == [OLD]
    assert nouveau.disable(machine).changes == []


def test_a_run_killed_between_file_and_images_goes_on(machine):
    machine.file(FILE, nouveau.CONTENT)
    machine.pack(NEW)
    outcome = nouveau.disable(machine)
    assert outcome.changes == [f"rebuilt /boot/initrd.img-{OLD}"]


def test_an_image_older_than_the_file_has_its_former_text(machine):
    """Killed after the file was changed: the image has a file of that name, with the text of before."""
    machine.file(FILE, "# nothing\n")
    machine.pack(NEW)
    machine.pack(OLD)
    machine.file(FILE, nouveau.CONTENT)
    image = machine.root / f"boot/initrd.img-{OLD}"
    os.utime(image, (image.stat().st_mtime - 60,) * 2)
    assert nouveau.disable(machine).changes == [f"rebuilt /boot/initrd.img-{OLD}"]


def test_a20_a_package_s_own_blacklist_does_not_replace_ours(machine):
    machine.file("usr/lib/modprobe.d/nvidia-graphics-drivers.conf", "blacklist nouveau\n")
    outcome = nouveau.disable(machine)
    assert outcome.changes[0] == "wrote /etc/modprobe.d/volta-nouveau.conf"
    assert outcome.after.others == ["/usr/lib/modprobe.d/nvidia-graphics-drivers.conf"]
    assert nouveau.disable(machine).changes == []


def test_nouveau_in_use_needs_a_reboot(machine):
    outcome = nouveau.disable(machine.nouveau(users=4))
    assert outcome.reboot_required == "nouveau is loaded and in use (4 users)"
    assert ("rmmod", "nouveau") not in machine.ran
    assert nouveau.disable(machine).changes == []
    assert nouveau.disable(machine).reboot_required


def test_a_kernel_that_keeps_nouveau_is_believed(machine):
    machine.nouveau()
    machine.answers["rmmod"] = lambda argv: Completed(tuple(argv), 1, stderr="rmmod: ERROR: Module nouveau is in use\n")
    outcome = nouveau.disable(machine)
    assert outcome.reboot_required == "nouveau could not be unloaded: rmmod: ERROR: Module nouveau is in use"
    assert "unloaded nouveau" not in outcome.changes


def test_unloading_can_be_left_out(machine):
    outcome = nouveau.disable(machine.nouveau(), unload=False)
    assert outcome.reboot_required == "nouveau is loaded, and unloading it was not asked for"


def test_leftovers_and_orphans_are_named_and_fail_nothing(machine):
    machine.file("boot/initrd.img-5.4.0-150-generic", ".\nbin/sh\n")
    (machine.root / "lib/modules/5.4.0-150-generic/updates/dkms").mkdir(parents=True)
    for name in (f"initrd.img-{NEW}.new", f"initrd.img-{NEW}.dpkg-bak", "initrd.img", "initrd.img.old"):
        machine.file(f"boot/{name}")
    outcome = nouveau.disable(machine)
    assert codes(outcome) == ["initramfs_orphaned"]
    assert set(machine.built()) == {NEW, OLD}
    assert outcome.after.off()
    assert by_kernel(outcome.after)["5.4.0-150-generic"].stale is True
    assert list(by_kernel(outcome.after)) == [NEW, OLD, "5.4.0-150-generic"]


def test_a_kernel_without_an_image_is_named(machine):
    machine.kernel("5.15.0-120-generic", image=False)
    outcome = nouveau.disable(machine)
    assert codes(outcome) == ["initramfs_missing"]
    assert machine.built() == [NEW, OLD]


def test_a_machine_without_images_has_none_to_make(tmp_path):
    from tests.unit.boot.conftest import Built

    bare = Built(tmp_path)
    outcome = nouveau.disable(bare)
    assert (outcome.changes, outcome.faults) == (["wrote /etc/modprobe.d/volta-nouveau.conf"], [])


def test_a_full_boot_is_a_fault_and_the_next_run_goes_on(machine):
    def full(argv):
        if argv[-1] == OLD:
            return Completed(tuple(argv), 1, stderr="zstd: error 70 : Write error : No space left on device\n")
        return machine._build(argv)

    machine.answers["update-initramfs"] = full
    outcome = nouveau.disable(machine)
    assert codes(outcome) == ["initramfs_rebuild_failed"]
    assert "No space left on device" in outcome.faults[0].message
    assert outcome.changes == ["wrote /etc/modprobe.d/volta-nouveau.conf", f"rebuilt /boot/initrd.img-{NEW}"]
    machine.answers["update-initramfs"] = machine._build
    assert nouveau.disable(machine).changes == [f"rebuilt /boot/initrd.img-{OLD}"]


def test_success_of_the_program_is_not_taken_for_proof(machine):
    """update_initramfs=no, or /boot mounted read-only: update-initramfs does nothing and exits 0."""
    machine.answers["update-initramfs"] = lambda argv: Completed(
        tuple(argv), 0, "update-initramfs: Not updating initramfs.\n"
    )
    outcome = nouveau.disable(machine)
    assert codes(outcome) == ["initramfs_stale", "initramfs_stale"]
    assert "Not updating initramfs." in outcome.faults[0].message
    assert not outcome.after.off()


def test_an_unreadable_image_is_made_anew(machine):
    nouveau.disable(machine)
    machine.file(f"boot/initrd.img-{NEW}", "")
    assert nouveau.read(machine).kernels[0].image.error == "lsinitramfs lists no files"
    assert nouveau.disable(machine).changes == [f"rebuilt /boot/initrd.img-{NEW}"]


def test_a_module_loaded_by_name_in_spite_of_the_blacklist(machine):
    machine.file("etc/initramfs-tools/modules", "nouveau\n")
    outcome = nouveau.disable(machine)
    assert codes(outcome) == ["nouveau_loaded_by_name"]
    assert outcome.faults[0].message == "names nouveau"


def test_a_file_that_cannot_be_written(machine):
    (machine.root / "etc/modprobe.d/fbdev.conf").unlink()
    (machine.root / "etc/modprobe.d").rmdir()
    (machine.root / "etc/modprobe.d").write_text("")
    outcome = nouveau.disable(machine)
    assert codes(outcome) == ["nouveau_file_not_written"]
    assert (outcome.changes, machine.built()) == ([], [])


# -- displays


def on_display(machine, name="nouveaudrmfb"):
    return machine.nouveau(users=2).file("sys/class/graphics/fb0/name", f"{name}\n")


def test_a_console_on_nouveau_is_not_touched_unasked(machine):
    outcome = nouveau.disable(on_display(machine))
    assert codes(outcome) == ["nouveau_needed_by_display"]
    assert "the console is on nouveau (fb0)" in outcome.faults[0].message
    assert "allow_display" in outcome.faults[0].remedy
    assert outcome.changes == []
    assert not (machine.root / FILE).exists()
    assert machine.built() == []


def test_a_console_on_nouveau_may_be_given_up(machine):
    outcome = nouveau.disable(on_display(machine), allow_display=True)
    assert outcome.faults == []
    assert "in use: the console is on nouveau" in str(outcome.reboot_required)
    assert outcome.changes[0] == "wrote /etc/modprobe.d/volta-nouveau.conf"


def test_another_display_device_keeps_the_console(machine):
    """A server's management controller (ASPEED, 1a03:2000) draws the console."""
    on_display(machine)
    machine.file("sys/bus/pci/devices/0000:03:00.0/class", "0x030000\n")
    machine.file("sys/bus/pci/devices/0000:03:00.0/vendor", "0x1a03\n")
    assert nouveau.disable(machine).faults == []


@pytest.mark.parametrize("name", ["astdrmfb", "EFI VGA", "simpledrmdrmfb"])
def test_a_console_on_another_driver_needs_no_nouveau(machine, name):
    assert nouveau.disable(on_display(machine, name)).faults == []


def test_a_display_server_on_a_card_of_nouveau(machine):
    machine.nouveau(users=2).file("proc/812/comm", "Xorg\n")
    for folder in ("proc/812/fd", "sys/class/drm/card0/device", "sys/class/drm/card1/device"):
        (machine.root / folder).mkdir(parents=True)
    (machine.root / "proc/812/fd/9").symlink_to("/dev/dri/card1")
    (machine.root / "sys/class/drm/card0/device/driver").symlink_to("../../../bus/pci/drivers/ast")
    (machine.root / "sys/class/drm/card1/device/driver").symlink_to("../../../bus/pci/drivers/nouveau")
    outcome = nouveau.disable(machine)
    assert codes(outcome) == ["nouveau_needed_by_display"]
    assert outcome.faults[0].message == "Xorg (pid 812) has a device of nouveau open"
    (machine.root / "proc/812/fd/9").unlink()
    (machine.root / "proc/812/fd/9").symlink_to("/dev/dri/card0")
    assert nouveau.disable(machine).faults == []


# -- dracut


def test_dracut_where_initramfs_tools_is_not_installed(machine):
    for program in ("update-initramfs", "lsinitramfs"):
        (machine.root / "usr/sbin" / program).unlink()
        machine.file(f"usr/bin/{'dracut' if program.startswith('u') else 'lsinitrd'}")

    def listing(argv):
        done = machine._list(argv)
        rows = [f"-rw-r--r--   1 root     root          123 Nov 30 07:05 {name}" for name in done.stdout.split()]
        return Completed(done.argv, done.rc, "Image: x: 60M\n====\n" + "\n".join(rows) + "\nlib -> usr/lib\n")

    machine.answers = {"lsinitrd": listing, "dracut": machine._build}
    outcome = nouveau.disable(machine)
    assert ("dracut", "--force", f"/boot/initrd.img-{NEW}", NEW) in machine.ran
    assert outcome.faults == []
    assert nouveau.disable(machine).changes == []


def test_a_machine_whose_images_are_made_by_something_else(machine):
    for program in ("update-initramfs", "lsinitramfs"):
        (machine.root / "usr/sbin" / program).unlink()
    outcome = nouveau.disable(machine)
    assert codes(outcome) == ["initramfs_tool_missing"]
    assert outcome.changes == []
    assert not (machine.root / FILE).exists()
