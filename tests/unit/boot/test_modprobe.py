# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which module a device gets, per kernel."""

from __future__ import annotations

import pytest
from ansible_collections.volta.llm.plugins.module_utils.boot import modprobe

from tests.unit.boot.conftest import NEW


def resolved(machine, kernel=NEW, modalias=modprobe.V100, without=()):
    return modprobe.resolve(machine, kernel, modalias, modprobe.configuration(machine, without))


def test_a_card_gets_nouveau_until_it_is_blacklisted(machine):
    assert resolved(machine) == ["nouveau"]
    machine.file("etc/modprobe.d/x.conf", "blacklist nouveau\n")
    assert resolved(machine) == []
    assert resolved(machine, without=["/etc/modprobe.d/x.conf"]) == ["nouveau"]


@pytest.mark.parametrize(
    "text",
    [
        "  blacklist   nouveau # comment\n",
        "blacklist \\\nnouveau\n",
        "install nouveau /bin/false\n",
        "install nouveau /usr/bin/true\n",
        "blacklist x\nblacklist nouveau",
    ],
)
def test_ways_to_keep_a_module_away(machine, text):
    machine.file("usr/lib/modprobe.d/x.conf", text)
    assert modprobe.configuration(machine).keeps_away("nouveau") == ["/usr/lib/modprobe.d/x.conf"]
    assert resolved(machine) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.conf", "# blacklist nouveau\n"),
        ("x.conf", "blacklist nouveau_x\n"),
        ("x.conf.dpkg-old", "blacklist nouveau\n"),
        ("x.conf", "options nouveau modeset=0\n"),
        ("x.conf", "install nouveau /sbin/modprobe --ignore-install nouveau\n"),
    ],
)
def test_what_does_not_keep_it_away(machine, name, text):
    machine.file(f"etc/modprobe.d/{name}", text)
    assert resolved(machine) == ["nouveau"]


def test_a_file_in_etc_hides_one_of_the_same_name(machine):
    machine.file("usr/lib/modprobe.d/nvidia.conf", "blacklist nouveau\n").file("etc/modprobe.d/nvidia.conf", "")
    assert resolved(machine) == ["nouveau"]


def test_the_installed_driver_is_what_remains(machine):
    with_driver = (
        "alias pci:v000010DEd*sv*sd*bc03sc00i00* nvidia\nalias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia-current\n"
        "alias pci:v000010DEd*sv*sd*bc03sc*i* nouveau\n"
    )
    machine.file(f"lib/modules/{NEW}/modules.alias", with_driver)
    assert resolved(machine) == ["nvidia_current", "nouveau"]
    machine.file("etc/modprobe.d/x.conf", "blacklist nouveau\nalias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia\n")
    assert resolved(machine) == ["nvidia", "nvidia_current"]


def test_other_devices_do_not_match(machine):
    assert resolved(machine, modalias="pci:v00008086d00001533sv00000000sd00000000bc02sc00i00") == ["igb"]
    assert resolved(machine, modalias="pci:v00001002d0000738Csv00000000sd00000000bc03sc80i00") == []


@pytest.mark.parametrize("pattern", ["*", "pci:v*d*sv*", "pci:v0000[0-9]*", "pci:v000010D?d*"])
def test_a_wildcard_before_the_vendor_matches_too(machine, pattern):
    machine.file(f"lib/modules/{NEW}/modules.alias", f"alias {pattern} any\nalias usb:v*p* other\n")
    assert resolved(machine) == ["any"]


def test_a_kernel_without_an_index_is_unknown(machine):
    assert resolved(machine, kernel="6.8.0-60-generic") is None


def test_modules_loaded_by_name(machine):
    machine.file("etc/initramfs-tools/modules", "# List of modules\nnouveau modeset=1\n")
    machine.file("etc/modules", "loop\n").file("etc/modules-load.d/x.conf", ";nouveau\nnvidia-uvm\n")
    (machine.root / "etc/modules-load.d/modules.conf").symlink_to("../modules")
    assert modprobe.forced(machine, "nouveau") == ["/etc/initramfs-tools/modules"]
    assert modprobe.forced(machine, "nvidia_uvm") == ["/etc/modules-load.d/x.conf"]
    assert modprobe.forced(machine, "loop") == ["/etc/modules"]
