# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What apt's exit status does not say. a22 is lcp/mokutil#69, a24 pop-os/pop#3811, a26 crhy/spaced#22."""

from __future__ import annotations

import pytest
from ansible_collections.volta.llm.plugins.module_utils.apt.status import Installed
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver_proof

from tests.unit.nvidia_driver.conftest import KERNEL

OTHER = "6.8.0-60-generic"
SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
VERSION = "535.183.01-0ubuntu0.22.04.1"


def installed(*names, version=VERSION, state="installed"):
    return [Installed(name, version, "amd64", name, (), state=state) for name in names]


@pytest.fixture
def proved(machine):
    machine.file(f"boot/vmlinuz-{KERNEL}").module("535.183.01")

    def prove(dpkg, wanted=(), without=()):
        return driver_proof.prove(Machine(str(machine.root)), dpkg, "535", wanted, without)

    return machine, prove


def codes(proof):
    return [fault.code for fault in proof.faults]


def test_driver_for_the_only_kernel(proved):
    _, prove = proved
    proof = prove(installed("nvidia-utils-535", "libnvidia-compute-535"), ["nvidia-utils-535"])
    assert (proof.faults, proof.version) == ([], "535.183.01")
    assert [(module["kernel"], module["version"]) for module in proof.modules] == [(KERNEL, "535.183.01")]


def test_package_that_apt_did_not_bring(proved):
    _, prove = proved
    proof = prove(installed("nvidia-utils-535"), ["nvidia-utils-535", "nvidia-dkms-535"])
    assert codes(proof) == ["driver_package_missing"]
    assert proof.faults[0].subject == "nvidia-dkms-535"


def test_package_of_another_branch_is_named(proved):
    _, prove = proved
    foreign = installed("libnvidia-compute-570", version="570.133.07-0ubuntu1")
    companions = installed("nvidia-modprobe", version="590.44.01-1")
    proof = prove(installed("nvidia-utils-535") + foreign + companions)
    assert codes(proof) == ["driver_mixed_branches"]
    assert "of branch 570 are still installed: libnvidia-compute-570; 535 is asked for" in proof.faults[0].message


def test_a24_failed_build_is_shown_with_the_end_of_its_log(proved):
    machine, prove = proved
    machine.file(f"boot/vmlinuz-{OTHER}")
    machine.command(["dkms", "status"], "nvidia-srv/535.183.01: added\n")
    log = "".join(f"line {number}\n" for number in range(40)) + "error: too few arguments to function drm_gem_open\n"
    machine.file("var/lib/dkms/nvidia-srv/535.183.01/build/make.log", log)
    proof = prove(installed("nvidia-dkms-535-server", state="half-configured"))
    assert codes(proof) == ["driver_packages_broken", "driver_module_not_built"]
    message = proof.faults[1].message
    assert (
        f"no nvidia module for {OTHER}; dkms: nvidia-srv/535.183.01 is only added; the end of /var/lib/dkms/" in message
    )
    assert message.endswith("error: too few arguments to function drm_gem_open")
    assert "line 20\n" not in message
    assert codes(prove([], without=[OTHER])) == []


def test_a26_module_of_which_a_part_is_missing(proved):
    machine, prove = proved
    machine.file(f"boot/vmlinuz-{OTHER}")
    path = f"/lib/modules/{OTHER}/updates/dkms/nvidia.ko"
    machine.command(["modinfo", "-k", OTHER, "nvidia"], f"filename: {path}\nversion: 535.183.01\nlicense: NVIDIA\n")
    proof = prove(installed("nvidia-utils-535"))
    assert codes(proof) == ["driver_module_incomplete"]
    assert "nvidia_modeset, nvidia_uvm, nvidia_drm are missing for 6.8.0-60-generic" in proof.faults[0].message


def test_module_of_another_version_than_the_packages(proved):
    _, prove = proved
    proof = prove(installed("nvidia-utils-535", version="535.261.03-0ubuntu1"), ["nvidia-utils-535"])
    assert codes(proof) == ["driver_module_differs"]
    assert "is 535.183.01, the packages are 535.261.03" in proof.faults[0].message


@pytest.mark.parametrize(
    ("on", "signer", "expected"), [(1, None, ["driver_signature_missing"]), (1, "MOK", []), (0, None, [])]
)
def test_a22_signature_counts_where_secure_boot_is_on(machine, on, signer, expected):
    machine.file(f"boot/vmlinuz-{KERNEL}").module("535.183.01", signer=signer)
    machine.file(SECURE_BOOT, f"\x06\x00\x00\x00{chr(on)}")
    proof = driver_proof.prove(Machine(str(machine.root)), installed("nvidia-utils-535"), "535", [])
    assert codes(proof) == expected


def test_open_module_is_the_wrong_one(machine):
    machine.file(f"boot/vmlinuz-{KERNEL}").module("535.183.01", licence="Dual MIT/GPL")
    proof = driver_proof.prove(Machine(str(machine.root)), installed("nvidia-utils-535"), "535", [])
    assert codes(proof) == ["driver_wrong_flavour"]
