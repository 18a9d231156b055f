# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The stage as an operator calls it: real ansible-playbook, no machine, or one that is a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
FIXTURES = ROOT / "tests" / "unit" / "fixtures"
FOUR = 'plan_gpus="4 x V100-SXM2-32GB"'


def plan(*words: str, inventory: str = "localhost,", playbook: str = "playbooks/plan.yml") -> tuple[int, str]:
    """Exit status and output, on one line each what Ansible folds."""
    done = subprocess.run(
        [str(BIN / "ansible-playbook"), playbook, "-i", inventory, *words],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "PWD": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_table_that_a_person_can_read() -> None:
    code, output = plan("-e", FOUR)

    assert code == 0, output
    rows = re.findall(r"^ +([0-3]) Tesla V100-SXM2-32GB .* 32768  fits$", output, re.MULTILINE)
    assert rows == ["0", "1", "2", "3"]
    assert "qwen3.8-flash-next-ud-q4_k_xl (qwen4exp): 1 x 8192 tokens" in output
    assert re.search(r"localhost +: ok=\d+ +changed=0 +unreachable=0 +failed=0", output)


def test_too_much_is_refused_with_the_nearest_that_fits_and_the_nearest_fits() -> None:
    code, output = plan("-e", FOUR, "-e", "parallel=64", "-e", "context_per_request=262144")

    assert code == 2, output
    assert "64 x 262144 tokens" in output
    nearest = re.search(r"\[plan_does_not_fit\].*\n +-> Write (.*)\.$", output, re.MULTILINE)
    assert nearest, output
    words = [word for setting in nearest[1].split() for word in ("-e", setting)]
    given = ["-e", "parallel=64", "-e", "context_per_request=262144", *words]
    code, output = plan("-e", FOUR, *given)
    assert code == 0, output


def test_the_short_names_win_over_the_long_ones() -> None:
    code, output = plan("-e", FOUR, "-e", "plan_parallel=2 parallel=3 plan_context_per_request=4096")

    assert code == 0, output
    assert "3 x 4096 tokens" in output


def test_what_the_engine_refuses_is_refused_together_with_all_else() -> None:
    code, output = plan(
        "-e", FOUR, "-e", "plan_split_mode=tensor plan_tensor_split=1:1:1:1 llama_server_host=0.0.0.0 plan_driver=590"
    )

    assert code == 2, output
    refused = set(re.findall(r"^ +\[(\w+)\]", output, re.MULTILINE))
    assert refused == {"split_mode_unavailable", "tensor_split_invalid", "open_without_key", "driver_without_gpu"}
    assert "architecture=qwen4exp split_mode=tensor" in output


def test_a_saved_header_is_planned_by_its_path() -> None:
    header = FIXTURES / "gguf" / "qwen3moe.header.gguf"

    for path in (str(header), str(header.relative_to(ROOT))):
        code, output = plan("-e", FOUR, "-e", f"plan_model={path}")
        assert code == 0, output
        assert f"{header} (qwen3moe)" in output


def test_without_machine_and_gpus_it_says_what_to_write() -> None:
    code, output = plan()

    assert code == 2
    assert "[plan_no_gpus]" in output
    assert "plan_gpus: 4 x V100-SXM2-32GB" in output


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """An inventory with one machine, which is this one with the hardware of a capture that has no driver."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        f"""
gpu_servers:
  hosts:
    box1:
      ansible_connection: local
      ansible_become: false
      ansible_python_interpreter: {sys.executable}
      __volta_sysroot: {FIXTURES / "captures" / "no-driver"}
      model_name: qwen3.8-flash-next-ud-q4_k_xl
      llama_server_model: {tmp_path}/none.gguf
      llama_server_parallel: 4
      llama_server_context_per_request: 32768
      gpu_verify_driver_branch: "535"
"""
    )
    return str(inventory)


@pytest.mark.parametrize("mode", [(), ("--check", "--diff")])
def test_a_machine_is_planned_for_from_its_own_settings_before_it_has_a_driver(
    machine: str, mode: tuple[str, ...]
) -> None:
    code, output = plan(*mode, inventory=machine)

    assert code == 0, output
    assert "4 x 32768 tokens" in output
    assert len(re.findall(r"Tesla V100-SXM2-32GB .* fits$", output, re.MULTILINE)) == 4
    assert "taken from their PCI ids" in output
    assert re.search(r"box1 +: ok=\d+ +changed=0 +unreachable=0 +failed=0", output)


def test_an_open_address_without_a_key_ends_the_whole_way_at_its_first_stage(machine: str) -> None:
    code, output = plan("-e", "llama_server_host=0.0.0.0", inventory=machine, playbook="site.yml")

    assert code == 2, output
    assert "[open_without_key] llama_server_host: 0.0.0.0" in output
    assert "Set llama_server_api_keys" in output
    assert re.findall(r"^PLAY \[(\w+)", output, re.MULTILINE)[0] == "Plan"
    assert "volta.llm.preflight :" not in output


def test_keys_are_judged_and_never_shown(machine: str) -> None:
    code, output = plan("-vvv", "-e", "llama_server_api_keys=short-Xq7", inventory=machine)

    assert code == 2, output
    assert "[api_key_unusable]" in output
    assert "has 9 of at least 16 characters" in output
    assert "short-Xq7" not in output.replace("llama_server_api_keys=short-Xq7", "")
