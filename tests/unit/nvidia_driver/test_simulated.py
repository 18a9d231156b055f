# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""driver_state on the GPU simulator's root: each driver fault gives its verdict, several are all reported."""

from __future__ import annotations

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver

from tests.lab.gpu_simulator import gpu_simulator


@pytest.fixture
def simulator(tmp_path):
    """Controls a simulated machine and judges its root."""

    class Simulator:
        def control(self, *words: str) -> None:
            assert gpu_simulator.control(["--state", str(tmp_path / "state.json"), *words]) == 0

        def judged(self) -> driver.Judgement:
            return driver.judge(driver.read(Machine(str(tmp_path / "sysroot"))))

    simulator = Simulator()
    simulator.control("install")
    return simulator


@pytest.mark.parametrize(
    ("words", "verdict", "code"),
    [
        (("mismatch",), "reboot_required", "reboot_required"),
        (("no-driver",), "load_module", "driver_not_loaded"),
        (("no-driver", "absent"), "not_installed", "driver_not_installed"),
        (("no-driver", "unbuilt"), "rebuild_module", "driver_module_missing"),
        (("nouveau",), "blacklist_nouveau", "nouveau_loaded"),
        (("secure-boot",), "enroll_key", "driver_module_refused"),
        (("open-module",), "wrong_flavour", "driver_wrong_flavour"),
        (("lose-card", "2"), "replace_hardware", "gpu_off_the_bus"),
        (("ecc", "1"), "reset_gpu", "gpu_xid_hardware"),
        (("retire", "1"), "ok", "gpu_xid_other"),
        (("xid", "0", "31"), "ok", "gpu_xid_other"),
    ],
)
def test_simulated_fault_gives_its_verdict(simulator, words, verdict, code):
    simulator.control("fault", *words)
    judgement = simulator.judged()
    assert judgement.verdict == verdict
    assert code in [fault.code for fault in judgement.faults]
    simulator.control("clear")
    assert simulator.judged().verdict == "ok"


def test_simulated_faults_are_all_reported(simulator):
    simulator.control("fault", "mismatch")
    simulator.control("fault", "lose-card", "1")
    simulator.control("fault", "xid", "3", "64")
    judgement = simulator.judged()
    assert judgement.verdict == "reboot_required"
    assert [fault.code for fault in judgement.faults] == [
        "reboot_required",
        "gpu_off_the_bus",
        "gpu_xid_hardware",
    ]
