# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The modules and the role gpu_verify as Ansible runs them, on stand-ins for nvidia-smi and on the GPU simulator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.nvidia.conftest import write_capture
from tests.unit.nvidia.expectations import FIXTURES, read

ROOT = Path(__file__).resolve().parents[3]
SIMULATOR = ROOT / "tests" / "lab" / "gpu_simulator" / "gpu_simulator.py"
BIN = Path(sys.executable).parent


def run(argv: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    # YAML for people, JSON for tests; a user's own configuration must not decide.
    settings = {"ANSIBLE_CALLBACK_RESULT_FORMAT": "json", "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "false"}
    return subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **settings, **environment}, capture_output=True, text=True, timeout=180
    )


def ad_hoc(module: str, **options: Any) -> dict[str, Any]:
    """The result of a module by ``ansible localhost``."""
    words = json.dumps(options)
    done = run([str(BIN / "ansible"), "localhost", "-m", f"volta.llm.{module}", "-a", words])
    match = re.search(r"^localhost \| (?:SUCCESS|FAILED!) => (\{.*\})", done.stdout, re.DOTALL | re.MULTILINE)
    assert match, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(match.group(1))
    return result


def stand_in(folder: Path, name: str) -> str:
    """A program that prints one recorded output whatever it is asked, as a first stand-in does."""
    output = folder / "output"
    output.write_text(read(FIXTURES / f"{name}.txt").output, encoding="utf-8")
    program = folder / "stand-in"
    program.write_text(f'#!/bin/sh\necho x >>"$0.calls"\ncat {output}\n')
    program.chmod(0o755)
    return str(program)


def test_a_topology_from_a_stand_in_that_always_says_the_same(tmp_path: Path) -> None:
    got = ad_hoc("nvlink_topology", nvidia_smi=stand_in(tmp_path, "07-v100x4-power9-nv3-pairs"))
    assert (got["gpu_count"], got["fully_connected"], got["islands"]) == (4, False, [[0, 1], [2, 3]])
    assert got["numa_affinity"] == [0, 0, 8, 8]
    assert [fault["code"] for fault in got["faults"]] == ["nvlink_status_unknown"]
    assert got["changed"] is False
    assert got["nvidia_smi_processes"] == len((tmp_path / "stand-in.calls").read_text().splitlines()) == 2


def test_an_error_text_fails_once_with_remedy(tmp_path: Path) -> None:
    got = ad_hoc("nvlink_topology", nvidia_smi=stand_in(tmp_path, "62-err-version-mismatch"))
    assert [fault["code"] for fault in got["faults"]] == ["driver_mismatch"]
    assert got["msg"].startswith("[driver_mismatch] driver: ")
    assert "\n  -> reboot" in got["msg"]
    assert got["gpu_count"] is None


def test_the_module_refuses_numbers_that_cannot_be_meant(tmp_path: Path) -> None:
    program = stand_in(tmp_path, "01-v100x4-sxm2-32gb-all-nv2")
    assert "write the number of GPUs" in ad_hoc("nvlink_topology", nvidia_smi=program, island_size=-3)["msg"]
    assert not (tmp_path / "stand-in.calls").exists()


def test_an_inventory_from_a_capture(tmp_path: Path) -> None:
    csv = read(FIXTURES / "73-h200x2-live-query.txt").output
    write_capture(tmp_path, {"--query-gpu=index --format=csv": csv}, version="580.159.04")
    got = ad_hoc("gpu_inventory", sysroot=str(tmp_path), expected_count=4, expected_product="H200")
    assert [fault["code"] for fault in got["faults"]] == ["gpu_missing"]
    assert (got["state"], got["gpu_count"], got["nvidia_smi_processes"]) == ("degraded", 2, 0)
    assert got["gpus"][1]["power_w"] == 83.06


# --- the role ---------------------------------------------------------------------------------------------------------


class Simulated:
    """A simulated machine with four V100, and the role run on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"GPU_SIMULATOR_STATE": str(folder / "state.json")}
        self.control("install", "--profile", "v100x4", "--persistence", "--sysroot", str(folder / "root"))
        self.program = folder / "nvidia-smi"
        (folder / "sim").mkdir()
        (folder / "sim" / "nvidia-smi").symlink_to(SIMULATOR)
        self.program.write_text(
            f'#!/bin/sh\necho "$*" >>{folder}/calls\nexec {sys.executable} {folder}/sim/nvidia-smi "$@"\n'
        )
        self.program.chmod(0o755)
        self.play = folder / "play.yml"
        self.play.write_text(
            "- hosts: localhost\n  gather_facts: false\n  roles: [{role: volta.llm.gpu_verify}]\n"
            "  post_tasks:\n    - ansible.builtin.copy:\n        content: '{{ gpu_verify_result | to_json }}'\n"
            f"        dest: {folder}/result.json\n        mode: '0600'\n      check_mode: false\n"
        )

    def control(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, str(SIMULATOR), *words],
            check=True,
            env={**os.environ, **self.environment},
            stdout=subprocess.DEVNULL,
        )

    def verify(self, *words: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        given = {"gpu_verify_nvidia_smi": str(self.program), "__volta_sysroot": str(self.folder / "root")} | variables
        extra = ["-e", json.dumps(given), *words]
        return run([str(BIN / "ansible-playbook"), str(self.play), *extra], **self.environment)

    @property
    def result(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return loaded


@pytest.fixture
def simulated(tmp_path: Path) -> Simulated:
    return Simulated(tmp_path)


def shown_codes(output: str) -> list[str]:
    """Codes in the result of the failed task; Ansible shows the same message once more, above it."""
    match = re.search(r"FAILED! => (\{.*\})\s*$", output.split("PLAY RECAP")[0], re.DOTALL)
    assert match, output
    return re.findall(r"^\[(\w+)\]", json.loads(match.group(1))["msg"], re.MULTILINE)


def test_a_healthy_simulated_machine_needs_three_processes(simulated: Simulated) -> None:
    done = simulated.verify("-e", "gpu_verify_persistence=true", "-e", "gpu_verify_expected_count=4")
    assert done.returncode == 0, done.stdout
    calls = (simulated.folder / "calls").read_text().splitlines()
    assert [call.split("=")[0].split(" ")[0] for call in calls] == ["--query-gpu", "topo", "nvlink"]
    got = simulated.result
    assert (got["state"], got["gpu_count"], got["faults"], got["would_verify"]) == ("ok", 4, [], False)
    assert got["topology"]["fully_connected"] is True
    assert "changed=1 " in done.stdout, "only this test's own copy task"


def test_several_faults_of_both_modules_are_one_failure_on_the_simulator(simulated: Simulated) -> None:
    simulated.control("fault", "hot", "1")
    simulated.control("fault", "link-down", "0", "1")
    simulated.control("fault", "ecc", "2")
    done = simulated.verify("-e", "gpu_verify_expected_count=8", "-e", "gpu_verify_min_links_per_pair=2")
    assert done.returncode == 2
    assert shown_codes(done.stdout) == [
        "gpu_missing",
        "gpu_too_hot",
        "gpu_too_hot",
        "ecc_uncorrected",
        "nvlink_too_few_links",
        "nvlink_inactive",
    ]
    assert done.stdout.count("fatal: [localhost]") == 1
    failure = done.stdout.split("PLAY RECAP")[0].split("FAILED! => ")[-1]
    for variable in ("gpu_verify_expected_count", "`gpu_verify_min_links_per_pair`"):
        assert variable in failure, "what to set is named as the operator of the role knows it"


def test_a_lost_card_is_said_once_on_the_simulator(simulated: Simulated) -> None:
    simulated.control("fault", "lose-card", "2")
    done = simulated.verify()
    assert done.returncode == 2
    codes = shown_codes(done.stdout)
    assert codes.count("gpu_lost") == 1
    assert "gpu_missing" in codes


def test_a_link_of_a_living_card_beside_a_lost_card_on_the_simulator(simulated: Simulated) -> None:
    simulated.control("fault", "lose-card", "1")
    simulated.control("fault", "link-down", "0", "3")
    done = simulated.verify()
    assert done.returncode == 2
    codes = shown_codes(done.stdout)
    assert sorted(codes) == ["gpu_lost", "gpu_missing", "nvlink_inactive", "nvlink_inactive", "topology_unavailable"]
    links = [
        call for call in (simulated.folder / "calls").read_text().splitlines() if call.startswith(("topo", "nvlink"))
    ]
    assert len(links) == 5, "the usual two, and one for each living card"


def test_check_mode_without_a_driver_says_what_it_would_verify_on_the_simulator(simulated: Simulated) -> None:
    simulated.control("fault", "no-driver", "absent")
    done = simulated.verify("--check")
    assert done.returncode == 0, done.stdout
    assert "would_verify: " in done.stdout
    assert simulated.result["would_verify"] is True
    strict = simulated.verify("--check", "-e", "gpu_verify_driver_expected_in_check_mode=true")
    assert strict.returncode == 2
    assert shown_codes(strict.stdout) == ["no_driver"]


def test_settings_that_cannot_be_meant_are_refused_before_anything_runs(simulated: Simulated) -> None:
    wrong = (
        "gpu_verify_expected_count=0",
        "gpu_verify_max_temperature=300",
        "gpu_verify_driver_branch=latest",
        "gpu_verify_island_size=0",
        "gpu_verify_min_links_per_pair=-1",
    )
    done = simulated.verify(*(word for setting in wrong for word in ("-e", setting)))
    assert done.returncode == 2
    for says in (
        "write the number of GPUs, 1 to 64",
        "write degrees C, 30 to 110",
        "write a branch such as 535",
        "gpu_verify_island_size is 0: write the GPUs of a group, 2 or more",
        "gpu_verify_min_links_per_pair is -1: write 0 (any) or more",
    ):
        assert says in done.stdout
    assert not (simulated.folder / "calls").exists()
