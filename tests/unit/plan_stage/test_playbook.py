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


@pytest.mark.parametrize(
    "given", ["parallel=5 context_per_request=262144", "plan_parallel=64", "llama_server_parallel=300000 parallel=5"]
)
def test_what_a_remedy_says_can_be_given_as_it_is_written(given: str) -> None:
    words = ["-e", FOUR, "-e", "plan_context_per_request=262144", "-e", given]
    code, output = plan(*words)
    assert code == 2, output
    nearest = re.search(r"\[plan_does_not_fit\].*\n +-> Write (.*)\.$", output, re.MULTILINE)
    assert nearest, output
    shown = re.search(r"does not fit: .*\n +-> Write (.*)\.$", output, re.MULTILINE)
    assert shown
    assert shown[1] == nearest[1]

    code, output = plan(*words, *(word for setting in nearest[1].split() for word in ("-e", setting)))
    assert code == 0, output


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("split_mode=row", "Write split_mode=layer."),
        ("plan_split_mode=row", "Write plan_split_mode=layer."),
        ("llama_server_split_mode=row", "Write llama_server_split_mode=layer."),
        ("cache_type_k=iq4_nl", "Write cache_type_k=q4_0 or cache_type_k=q8_0."),
        ("nvidia_driver_branch=590", "Write nvidia_driver_branch=580 or nvidia_driver_branch=535."),
        ("plan_driver=590", "Write plan_driver=580 or plan_driver=535."),
        (
            "cuda_toolkit_version=13.0 nvidia_driver_branch=580",
            "Write cuda_toolkit_version=12.9 or cuda_toolkit_version=12.2.",
        ),
        ("plan_cuda=13.0 plan_driver=580", "Write plan_cuda=12.9 or plan_cuda=12.2."),
        (
            "volta_primary_engine=ollama ollama_version=0.30.5",
            "Write ollama_version=0.24.0 or nvidia_driver_branch=580.",
        ),
    ],
)
def test_a_remedy_names_the_variable_that_decides(given: str, remedy: str) -> None:
    code, output = plan("-e", FOUR, "-e", given)

    assert code == 2, output
    assert re.findall(r"^ +-> (.*)$", output, re.MULTILINE)[-1] == remedy


def test_a_setting_that_is_no_number_is_one_fault_with_its_variable_s_name() -> None:
    code, output = plan(
        *("-e", FOUR, "-e", "llama_server_context_per_request=abc llama_server_parallel=1.5 plan_ubatch=many"),
        *("-e", "plan_overhead_mib=some llama_server_port=web"),
    )

    assert code == 2, output
    told = re.findall(r"^ +(\[setting_invalid\] .*)\n +-> (.*)$", output, re.MULTILINE)
    assert set(told) == {
        (
            "[setting_invalid] llama_server_context_per_request: 'abc' is no whole number",
            "Write a whole number, as 8192.",
        ),
        ("[setting_invalid] llama_server_parallel: '1.5' is no whole number", "Write a whole number, as 4."),
        ("[setting_invalid] plan_ubatch: 'many' is no whole number", "Write a whole number, as 512."),
        ("[setting_invalid] plan_overhead_mib: 'some' is no number of MiB", "Write a number of MiB, as 900."),
        ("[setting_invalid] llama_server_port: 'web' is no whole number", "Write a whole number, as 8080."),
    }
    assert "argument_spec_data" not in output
    assert "memory is not planned: wrong settings: context_per_request, overhead_mib, parallel, ubatch" in output


def test_one_engine_may_be_given_as_text() -> None:
    code, output = plan("-e", FOUR, "-e", "volta_engines=llama_server")
    assert code == 0, output

    code, output = plan("-e", FOUR, "-e", "volta_engines=ollama ollama_version=0.30.5")
    assert code == 2, output
    assert "[ollama_ignores_gpu]" in output


def test_an_engine_that_is_none_is_named_by_its_variable() -> None:
    code, output = plan("-e", FOUR, "-e", "volta_primary_engine=olama volta_engines=lama")

    assert code == 2, output
    assert "[setting_invalid] volta_primary_engine: 'olama' is no engine" in output
    assert "[setting_invalid] volta_engines: 'lama' is no engine" in output


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


def test_cards_that_can_be_two_are_noted_and_unknown_ones_told_the_known() -> None:
    code, output = plan("-e", 'plan_gpus="4 x V100"')
    assert code == 0, output
    assert re.search(r"note: V100 is taken for Tesla V100-SXM2-32GB .* Tesla V100-SXM2-16GB", output)

    code, output = plan("-e", 'plan_gpus="4 x A100"')
    assert code == 2, output
    assert re.search(r"\[plan_no_gpus\] GPUs: '4 x A100' .*\n +-> .*V100-SXM2-16GB.*docs/compatibility.md", output)


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


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("llama_server_parallel=64 llama_server_context_per_request=262144", "llama_server_parallel=4"),
        ("plan_parallel=64 llama_server_context_per_request=262144", "plan_parallel=4"),
        ("parallel=64 llama_server_context_per_request=262144", "parallel=4"),
        ("nvidia_driver_branch=590", "nvidia_driver_branch=580 or nvidia_driver_branch=535"),
    ],
)
def test_on_a_machine_a_remedy_names_the_variable_that_decides(machine: str, given: str, remedy: str) -> None:
    code, output = plan("-e", given, inventory=machine)

    assert code == 2, output
    assert re.findall(r"^ +-> Write (.*)\.$", output, re.MULTILINE)[-1] == remedy


def test_keys_are_judged_and_never_shown(machine: str) -> None:
    code, output = plan("-vvv", "-e", "llama_server_api_keys=short-Xq7", inventory=machine)

    assert code == 2, output
    assert "[api_key_unusable]" in output
    assert "has 9 of at least 16 characters" in output
    assert "short-Xq7" not in output.replace("llama_server_api_keys=short-Xq7", "")
