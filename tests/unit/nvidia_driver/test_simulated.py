# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""driver_state on the GPU simulator's root: each driver fault gives its verdict, several are all reported."""

from __future__ import annotations

import itertools

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import SEVERITIES
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


CASES = [
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
]


@pytest.mark.parametrize(("words", "verdict", "code"), CASES)
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


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations([words for words, *_ in CASES], 2)))
def test_what_has_to_be_done_first_stands_first(simulator, one, other):
    simulator.control("fault", *one)
    simulator.control("fault", *other)
    judgement = simulator.judged()
    if judgement.verdict != "ok":
        assert judgement.faults[0].message == judgement.reason


def test_a_consequence_stands_behind_its_cause_and_points_to_it(simulator):
    simulator.control("fault", "secure-boot")
    judgement = simulator.judged()
    assert [fault.code for fault in judgement.faults] == ["driver_module_refused", "driver_not_loaded"]
    assert "mokutil --import" in judgement.faults[0].remedy
    assert "modprobe" not in judgement.faults[1].remedy
    assert "driver_module_refused" in judgement.faults[1].remedy


@pytest.mark.parametrize(("consequence", "causes"), driver.CONSEQUENCES.items())
def test_no_order_by_severity_can_turn_them_round(consequence, causes):
    kinds = driver.FAULTS.kinds
    for cause in causes:
        assert SEVERITIES.index(kinds[cause].severity) <= SEVERITIES.index(kinds[consequence].severity)
