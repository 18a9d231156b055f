# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""When a machine is rebooted, and what is proven afterwards. Names like a26 are rows of public reports."""

from __future__ import annotations

import pytest
from ansible_collections.volta.llm.plugins.module_utils.boot import gate
from ansible_collections.volta.llm.plugins.module_utils.boot.gate import Request
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed

from tests.lab.gpu_simulator.gpu_simulator import module_image
from tests.unit.boot.conftest import NEW, OLD, Built

FORMER, CURRENT = "5c1a2b0e-9d0f-4a53-8d7e-0a4f5f0d8b11", "0c2be3c8-6a9d-4a16-a9cf-f4f2c86f3f4e"


class Server(Built):
    """One V100, the driver installed for both kernels, the older one running."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.kernel(OLD).kernel(NEW)
        self.file("etc/modprobe.d/volta-nouveau.conf", "blacklist nouveau\n")
        self.file("proc/sys/kernel/random/boot_id", f"{CURRENT}\n").file("dev/kmsg", "")
        self.file("etc/os-release", 'ID=ubuntu\nVERSION_ID="22.04"\n')
        self.file("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.183.01")
        for name, text in (("vendor", "0x10de"), ("device", "0x1db5"), ("class", "0x030200")):
            self.file(f"sys/bus/pci/devices/0000:1a:00.0/{name}", f"{text}\n")
        for kernel in (OLD, NEW):
            self.driver(kernel)
        self.answers["modprobe"] = self._modprobe

    def driver(self, kernel: str, version: str = "535.183.01") -> None:
        folder = self.root / f"lib/modules/{kernel}/updates/dkms"
        folder.mkdir(parents=True, exist_ok=True)
        for part in ("nvidia", "nvidia-modeset", "nvidia-uvm", "nvidia-drm"):
            (folder / f"{part}.ko").write_bytes(module_image(version, "NVIDIA"))

    def loaded(self, version: str = "535.183.01", modules=("nvidia", "nvidia_uvm")):
        self.file("proc/modules", "".join(f"{name} 1 0 - Live 0x0\n" for name in ("igb", *modules)))
        text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Jul 30 01:33:00 UTC 2024\n"
        return self.file("proc/driver/nvidia/version", text)

    def _modprobe(self, argv):
        self.loaded()
        return Completed(tuple(argv), 0)


@pytest.fixture
def server(tmp_path) -> Server:
    return Server(tmp_path)


def codes(decision):
    return [fault.code for fault in decision.faults]


def test_a_driver_in_order_needs_nothing(server):
    decision = gate.decide(server.loaded(), Request())
    assert (decision.reason, decision.reboot, decision.loaded, decision.faults) == (None, False, [], [])


def test_modules_that_only_have_to_be_loaded_are(server):
    decision = gate.decide(server, Request())
    assert decision.loaded == ["nvidia", "nvidia_uvm"]
    assert (decision.reason, decision.faults) == (None, [])
    assert decision.judgement.verdict == "ok"


def test_check_mode_loads_nothing_and_says_what_it_would(server):
    decision = gate.decide(server, Request(), check=True)
    assert decision.loaded == ["nvidia", "nvidia_uvm"]
    assert decision.faults == []
    assert not [argv for argv in server.ran if argv[0] == "modprobe"]


def test_loading_can_be_left_out(server):
    decision = gate.decide(server, Request(load_modules=False))
    assert codes(decision) == ["reboot_required"]
    assert "is on disk" in decision.reason


def test_nvidia_uvm_alone_is_loaded_too(server):
    server.loaded(modules=["nvidia"])
    decision = gate.decide(server, Request(), check=True)
    assert (decision.loaded, decision.faults) == (["nvidia_uvm"], [])
    assert gate.decide(server, Request(load_modules=False)).loaded == []
    # After a boot that left it out, as one without modules-load.d does.
    decision = gate.decide(server, Request(former_boot_id=FORMER))
    assert (decision.loaded, decision.faults) == (["nvidia_uvm"], [])
    assert [argv for argv in server.ran if argv[0] == "modprobe"] == [("modprobe", "nvidia_uvm")]
    assert gate.decide(server, Request()).loaded == []


def test_nvidia_uvm_is_left_alone_where_another_version_waits_for_the_boot(server):
    decision = gate.decide(server.loaded("535.161.08", modules=["nvidia"]), Request(allowed=True))
    assert (decision.loaded, decision.reboot) == ([], True)


def test_nvidia_uvm_that_does_not_load_is_a_fault_and_no_reason_for_a_reboot(server):
    words = "modprobe: FATAL: Module nvidia_uvm not found in directory /lib/modules/5.15.0-91-generic"
    server.answers["modprobe"] = lambda argv: Completed(tuple(argv), 1, stderr=f"{words}\n")
    decision = gate.decide(server.loaded(modules=["nvidia"]), Request(allowed=True))
    assert codes(decision) == ["driver_uvm_not_loaded"]
    assert words in decision.faults[0].message
    assert (decision.reason, decision.reboot, decision.loaded) == (None, False, [])


def test_a_module_that_does_not_load_is_a_reason(server):
    server.answers["modprobe"] = lambda argv: Completed(tuple(argv), 1, stderr="modprobe: ERROR: No such device\n")
    decision = gate.decide(server, Request(allowed=True))
    assert decision.reason == "the nvidia module does not load: nvidia: modprobe: ERROR: No such device"
    assert decision.reboot
    assert decision.faults == []


def test_not_allowed_says_why_and_how_to_go_on(server):
    decision = gate.decide(server.loaded("535.161.08"), Request(allow_with="reboot_gate_allowed=true"))
    assert codes(decision) == ["reboot_required"]
    assert not decision.reboot
    assert decision.faults[0].message.startswith("loaded 535.161.08, installed 535.183.01")
    assert "-e reboot_gate_allowed=true" in decision.faults[0].remedy


def test_allowed_is_to_be_rebooted(server):
    decision = gate.decide(server.loaded("535.161.08"), Request(allowed=True, controller_boot_id=FORMER))
    assert decision.reboot
    assert decision.boot_id == CURRENT
    assert decision.faults == []


@pytest.mark.parametrize("request_", [Request(True, local=True), Request(True, controller_boot_id=CURRENT)])
def test_the_machine_that_ansible_runs_on_is_never_rebooted(server, request_):
    decision = gate.decide(server.loaded("535.161.08"), request_)
    assert codes(decision) == ["reboot_required"]
    assert not decision.reboot
    assert "Ansible runs on this machine itself" in decision.faults[0].message


def test_check_mode_on_what_is_not_allowed_fails_nothing(server):
    decision = gate.decide(server.loaded("535.161.08"), Request(), check=True)
    assert (decision.reboot, decision.faults) == (False, [])
    assert decision.reason
    assert gate.decide(server, Request(allowed=True), check=True).reboot


def test_a26_a_missing_module_is_a_fault_before_any_reboot(server):
    (server.root / f"lib/modules/{NEW}/updates/dkms/nvidia-uvm.ko").unlink()
    decision = gate.decide(server.loaded(), Request(allowed=True))
    assert codes(decision) == ["driver_module_incomplete"]
    assert not decision.reboot
    server.file("proc/driver/nvidia/version", "")
    for path in (server.root / f"lib/modules/{NEW}/updates/dkms").iterdir():
        path.unlink()
    decision = gate.decide(server, Request(allowed=True))
    assert "driver_module_missing" in codes(decision)
    assert not decision.reboot


def test_check_mode_on_a_bare_machine_fails_nothing(tmp_path):
    bare = Built(tmp_path).kernel(OLD)
    for name, text in (("vendor", "0x10de"), ("device", "0x1db5"), ("class", "0x030200")):
        bare.file(f"sys/bus/pci/devices/0000:1a:00.0/{name}", f"{text}\n")
    assert gate.decide(bare, Request(), check=True).faults == []
    assert "driver_not_installed" in codes(gate.decide(bare, Request()))


def test_a16_nouveau_that_was_loaded_before_its_blacklist_needs_a_boot(server):
    server.nouveau(users=4)
    decision = gate.decide(server, Request(allowed=True))
    assert decision.judgement.verdict == "blacklist_nouveau"
    assert "nouveau_loaded" in codes(decision)
    assert not decision.reboot
    server.pack(NEW)
    decision = gate.decide(server, Request(allowed=True))
    assert decision.judgement.verdict == "reboot_required"
    assert decision.reason == "nouveau is loaded and owns the GPUs; its blacklist came after it was loaded"
    assert decision.reboot


def test_nouveau_on_a_machine_that_boots_without_an_initramfs_needs_a_boot(server):
    for kernel in (OLD, NEW):
        (server.root / f"boot/initrd.img-{kernel}").unlink()
    assert gate.decide(server.nouveau(users=4), Request(allowed=True)).reboot
    (server.root / "etc/modprobe.d/volta-nouveau.conf").unlink()
    assert not gate.decide(server, Request(allowed=True)).reboot


def test_a_newer_kernel_is_a_reason_only_when_asked_for(server):
    server.loaded()
    assert gate.decide(server, Request(allowed=True)).reason is None
    decision = gate.decide(server, Request(allowed=True, newer_kernel=True))
    assert decision.reason == f"kernel {NEW} boots next, {OLD} runs"
    assert decision.reboot


# -- after a reboot


def test_g14_said_to_be_rebooted_and_the_boot_id_is_the_same(server):
    decision = gate.decide(server.loaded(), Request(former_boot_id=CURRENT))
    assert codes(decision) == ["reboot_not_done"]
    assert CURRENT in decision.faults[0].message


def test_after_a_reboot_the_driver_is_in_order(server):
    assert gate.decide(server.loaded(), Request(former_boot_id=FORMER)).faults == []


def test_after_a_reboot_the_same_reason_is_no_reason_for_another(server):
    server.loaded("535.161.08")
    decision = gate.decide(server, Request(allowed=True, former_boot_id=FORMER))
    assert codes(decision) == ["reboot_did_not_help"]
    assert not decision.reboot
    reason = gate.decide(server, Request(allowed=True)).reason
    decision = gate.decide(server, Request(allowed=True, earlier=[reason]))
    assert codes(decision) == ["reboot_did_not_help"]
    assert "loaded 535.161.08" in decision.faults[0].message
    assert not decision.reboot
    assert gate.decide(server, Request(allowed=True, earlier=["another"])).reboot


def test_after_a_reboot_what_is_broken_is_a_fault(server):
    server.loaded().file("dev/kmsg", "3,100,5000000,-;NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.\n")
    assert "gpu_off_the_bus" in codes(gate.decide(server, Request(former_boot_id=FORMER)))


def test_without_a_boot_id_there_is_no_reboot(server):
    (server.root / "proc/sys/kernel/random/boot_id").unlink()
    decision = gate.decide(server.loaded("535.161.08"), Request(allowed=True))
    assert codes(decision) == ["boot_id_unreadable"]
    assert not decision.reboot
