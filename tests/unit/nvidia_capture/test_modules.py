# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The modules driver_state and gpu_capture as Ansible calls them, and the playbook that fetches a capture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver

from tests.lab.gpu_simulator import gpu_simulator

ROOT = Path(__file__).resolve().parents[3]
CAPTURES = Path(__file__).parent.parent / "fixtures/captures"
BIN = Path(sys.executable).parent


def run_module(name: str, **arguments: Any) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", f"ansible_collections.volta.llm.plugins.modules.{name}"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        capture_output=True,
        text=True,
        cwd=ROOT / ".collections",
    )
    return done.returncode, json.loads(done.stdout)


def test_driver_state_only_reports_unless_asked_to_fail():
    code, result = run_module("driver_state", sysroot=str(CAPTURES / "version-mismatch"))
    assert code == 0
    assert (result["changed"], result["verdict"], result["remedy"]) == (False, "reboot_required", ["reboot"])
    assert [fault["code"] for fault in result["faults"]] == ["reboot_required"]


def test_driver_state_fails_once_with_all_faults():
    code, result = run_module("driver_state", sysroot=str(CAPTURES / "version-mismatch"), require_ok=True)
    assert code == 1
    assert result["msg"] == ("[reboot_required] nvidia module: loaded 535.247.01, installed 535.261.03\n  -> reboot")
    assert result["verdict"] == "reboot_required"


def test_driver_state_of_a_healthy_machine_passes():
    code, result = run_module("driver_state", sysroot=str(CAPTURES / "healthy-v100x4"), require_ok=True)
    assert (code, result["verdict"], result["faults"]) == (0, "ok", [])
    assert result["loaded"] == {"version": "535.261.03", "flavour": "proprietary"}
    assert result["kernels"]["next"] == "6.1.0-37-amd64"


def test_driver_state_names_what_it_returns():
    """Every key is documented, every documented key is returned."""
    import yaml
    from ansible_collections.volta.llm.plugins.modules import driver_state

    _, result = run_module("driver_state", sysroot=str(CAPTURES / "healthy-v100x4"))
    documented = set(yaml.safe_load(driver_state.RETURN))
    assert documented == set(result) - {"changed", "invocation"}
    log = yaml.safe_load(driver_state.RETURN)["kernel_log"]["contains"]
    assert set(log) == set(result["kernel_log"])
    for verdict in driver.VERDICTS:
        assert f"V({verdict})" in driver_state.RETURN


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """A simulated machine with an inactive link: its sysroot, its nvidia-smi."""
    state = tmp_path / "state.json"
    monkeypatch.setenv("GPU_SIMULATOR_STATE", str(state))
    for words in (["install", "--kernel", "6.1.0-37-amd64"], ["fault", "link-down", "1", "3"]):
        assert gpu_simulator.control(["--state", str(state), *words]) == 0
    data = json.loads(state.read_text())
    data["engines"] = []
    state.write_text(json.dumps(data))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/nvidia-smi").symlink_to(gpu_simulator.__file__)
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/linked/nvidia-smi "$@"\n')
    program.chmod(0o755)
    return tmp_path / "sysroot", program


def test_gpu_capture_writes_an_archive(simulated, tmp_path):
    sysroot, program = simulated
    dest = tmp_path / "capture.tar.gz"
    code, result = run_module("gpu_capture", dest=str(dest), sysroot=str(sysroot), nvidia_smi=str(program))
    assert code == 0
    assert (result["changed"], result["left_out"], result["replaced"]["serial"]) == (True, [], 4)
    assert {"argv": ["nvidia-smi", "topo", "-m"], "rc": 0} in result["commands"]
    with tarfile.open(dest) as tar:
        assert "commands/index.json" in tar.getnames()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".capture")] == []


def test_gpu_capture_in_check_mode_writes_nothing(simulated, tmp_path):
    sysroot, program = simulated
    dest = tmp_path / "capture.tar.gz"
    code, result = run_module(
        "gpu_capture", dest=str(dest), sysroot=str(sysroot), nvidia_smi=str(program), _ansible_check_mode=True
    )
    assert (code, result["changed"], dest.exists()) == (0, True, False)


def test_gpu_capture_says_where_it_cannot_write(simulated, tmp_path):
    sysroot, program = simulated
    dest = tmp_path / "none/capture.tar.gz"
    code, result = run_module("gpu_capture", dest=str(dest), sysroot=str(sysroot), nvidia_smi=str(program))
    assert code == 1
    assert result["msg"] == f"{dest} cannot be written: No such file or directory; name a file in a folder that exists"


def play(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "ansible-playbook"), "playbooks/gpu_capture.yml", *words],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_playbook_leaves_a_folder_that_modules_accept_and_nothing_on_the_machine(simulated, tmp_path):
    sysroot, program = simulated
    leftovers = set(Path("/tmp").glob("volta-capture-*"))
    words = [
        "-i", "box1,", "-c", "local", "-e", "gpu_capture_hosts=box1", "-e", "ansible_become=false",
        "-e", f"ansible_python_interpreter={sys.executable}", "-e", f"__volta_sysroot={sysroot}",
        "-e", f"gpu_capture_nvidia_smi={program}", "-e", f"gpu_capture_dest={tmp_path}/captures",
    ]  # fmt: skip
    checked = play(*words, "--check", "--diff")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not (tmp_path / "captures").exists()
    done = play(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "captures/box1"
    machine = Machine(str(folder))
    assert machine.is_capture
    assert driver.judge(driver.read(machine)).verdict == "ok"
    code, result = run_module("nvlink_topology", sysroot=str(folder))
    assert code == 1
    assert {fault["code"] for fault in result["faults"]} == {"nvlink_inactive"}
    assert sorted(path.name for path in (tmp_path / "captures").iterdir()) == ["box1"]
    assert set(Path("/tmp").glob("volta-capture-*")) == leftovers
