# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The compatibility table: every refusal by a case of its own, and what must hold for any combination."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils import compat
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]


def combo(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


# What is refused, the code, and words the remedy must hold.
REFUSED = [
    ("driver=590 gpu=1db6", "driver_without_gpu", ["driver=580"]),
    ("driver=595.71.05 gpu=V100-SXM2-32GB", "driver_without_gpu", ["driver=580"]),
    ("flavour=open gpu=1db6", "open_driver_without_gpu", ["flavour=proprietary"]),
    ("driver=535-server-open gpu=10de:1db5", "open_driver_without_gpu", ["flavour=proprietary"]),
    ("cuda=13.0 gpu=1db5", "cuda_without_gpu", ["cuda=12.9"]),
    ("cuda=13.0 driver=535", "driver_too_old_for_cuda", ["cuda=12.9", "driver=580"]),
    ("cuda=12.2 driver=470.256.02", "driver_too_old_for_cuda", ["driver=535"]),
    ("cuda=11.8 driver=440", "driver_too_old_for_cuda", ["driver=535"]),
    ("cuda=12.8 driver=535 compression=size", "driver_cannot_decompress", ["compression=none", "driver=580"]),
    ("cuda=11.8 gcc=12", "gcc_too_new_for_cuda", ["gcc=11"]),
    ("cuda=12.2 gcc=13", "gcc_too_new_for_cuda", ["gcc=12"]),
    ("cuda=12.4 gcc=14", "gcc_too_new_for_cuda", ["gcc=13"]),
    ("cuda=12.9 gcc=15.1", "gcc_too_new_for_cuda", ["gcc=14"]),
    ("cuda=12.6 gcc=13.3.0", "gcc_too_new_for_cuda", ["gcc=13.2", "gcc=12"]),
    ("cuda=12.6 gcc=13", "gcc_too_new_for_cuda", ["gcc=13.2"]),
    ("cmake=3.16 llama_cpp=0.5.0", "cmake_too_old", ["cmake=3.18"]),
    ("architecture=qwen4exp llama_cpp=0.3.9", "engine_without_architecture", ["llama_cpp=0.4.0"]),
    ("architecture=qwen4exp llama_cpp=b10621", "engine_without_architecture", ["llama_cpp=b10809"]),
    ("split_mode=row", "split_mode_unavailable", ["split_mode=layer"]),
    ("split_mode=row llama_cpp=0.5.0", "split_mode_unavailable", ["split_mode=layer"]),
    ("split_mode=row llama_cpp=b10524", "split_mode_unavailable", ["split_mode=layer"]),
    ("split_mode=tensor architecture=qwen4exp", "split_mode_unavailable", ["split_mode=layer"]),
    ("split_mode=tensor gpu_count=1", "split_mode_unavailable", ["split_mode=layer"]),
    ("split_mode=tensor flash_attention=off", "split_mode_unavailable", ["flash_attention=on"]),
    ("split_mode=tensor fit=true", "split_mode_unavailable", ["fit=false"]),
    ("cache_type=q8_0 flash_attention=off", "cache_type_unavailable", ["flash_attention=on", "cache_type=f16"]),
    ("cache_type=bf16 gpu=1db5", "cache_type_unavailable", ["cache_type=f16"]),
    ("cache_type=iq4_nl gpu=1db5", "cache_type_unavailable", ["cache_type=q4_0"]),
    ("driver=535 ollama=0.30.5 gpu=1db6", "ollama_ignores_gpu", ["ollama=0.24.0", "driver=580"]),
    ("driver=550.163.01 ollama=0.30.5", "ollama_ignores_gpu", ["driver=580"]),
    ("architecture=qwen4exp ollama=0.24.0", "ollama_without_architecture", ["llama_cpp=0.4.0 instead of ollama"]),
    ("ollama=0.24.0 shards=4", "ollama_sharded_model", ["llama_cpp=0.4.0 instead of ollama"]),
]

ALLOWED = [
    ("driver=535 cuda=12.2 gpu=1db5", {"driver_end_of_life"}),
    ("driver=580 ollama=0.30.5 gpu=1db6", {"ollama_reported_to_abort"}),
    ("driver=535 cuda=12.4 gcc=13.3 gpu=1db5", {"driver_end_of_life", "cuda_newer_than_driver"}),
    ("driver=535 cuda=12.8", {"driver_end_of_life", "cuda_newer_than_driver", "compression_must_be_off"}),
    ("driver=535 cuda=12.8 compression=none", {"driver_end_of_life", "cuda_newer_than_driver"}),
    ("driver=580 cuda=12.2 compression=size", {"compression_has_no_effect"}),
    ("driver=550", {"driver_end_of_life", "driver_is_transitional"}),
    ("driver=560", {"driver_end_of_life", "driver_untested"}),
    ("driver=580 secure_boot=true", {"secure_boot_key"}),
    ("driver=535 ollama=0.27.1", {"driver_end_of_life", "ollama_untested"}),
    ("driver=535 ollama=0.24.0", {"driver_end_of_life"}),
    ("driver=580 ollama=0.34.2 architecture=qwen4exp", {"ollama_untested"}),
    ("cuda=11.8 gcc=11", {"cuda_11_compiles"}),
    ("cuda=11.7", {"cuda_untested"}),
    ("gpu=26b5 driver=590", {"gpu_unknown"}),
    ("gpu=2335 cuda=13.0 driver=590 flavour=open", set()),
    ("architecture=qwen4exp llama_cpp=0.4.0", set()),
    ("architecture=qwen4exp llama_cpp=b10665", set()),
    ("architecture=qwen3moe llama_cpp=0.3.9 split_mode=tensor gpu_count=2", set()),
    ("architecture=qwen5", {"architecture_unknown"}),
    ("split_mode=row llama_cpp=b9000", {"split_mode_row_is_partial"}),
    ("gpu=2335 cache_type=bf16", set()),
    ("", set()),
]


@pytest.mark.parametrize(("text", "code", "remedies"), REFUSED)
def test_refused(text: str, code: str, remedies: list[str]) -> None:
    verdict = compat.judge(combo(text))
    fault = next(fault for fault in verdict.faults if fault.code == code)
    for word in remedies:
        assert word in fault.remedy
    assert fault.source
    assert fault.source in fault.message
    assert verdict.nearest is not None
    assert not compat.judge(verdict.nearest).faults


def test_a_model_in_shards_for_ollama_is_refused_with_the_way_to_join_them() -> None:
    # C28
    (fault,) = compat.judge(combo("ollama=0.24.0 shards=4")).faults
    assert "llama-gguf-split --merge" in fault.message
    assert "twice" in fault.message
    assert not compat.judge(combo("ollama=0.24.0 shards=1")).faults


def test_every_refusing_row_has_a_case() -> None:
    hit: list[compat.Row] = []
    for text, code, _ in REFUSED:
        facts, unreadable = compat.read_facts(combo(text))
        assert not unreadable
        hit += [row for row in compat._applying(facts) if row.refused and row.code == code]
    missing = [row for row in compat.ROWS if row.refused and row not in hit]
    assert not missing


@pytest.mark.parametrize(("text", "notes"), ALLOWED)
def test_allowed(text: str, notes: set[str]) -> None:
    verdict = compat.judge(combo(text))
    assert verdict.faults == []
    assert verdict.nearest is None
    assert {note.code for note in verdict.notes} == notes


def test_every_note_has_a_case() -> None:
    told = set().union(*(notes for _, notes in ALLOWED))
    assert told == {row.code for row in compat.ROWS if not row.refused}


def test_rows_are_complete() -> None:
    for row in compat.ROWS:
        assert row.source
        assert row.why
        if row.refused:
            assert row.code in compat.FAULTS.kinds
            assert row.repairs


def test_535_and_the_flash_next_model_exclude_each_other_in_ollama() -> None:
    verdict = compat.judge(combo("driver=535 ollama=0.34.2 architecture=qwen4exp gpu=1db5"))
    assert [fault.code for fault in verdict.faults] == ["ollama_ignores_gpu"]
    assert verdict.nearest is not None
    assert verdict.nearest["driver"] == "580"
    older = compat.judge(combo("driver=535 ollama=0.24.0 architecture=qwen4exp gpu=1db5"))
    assert older.nearest == combo("gpu=1db5 driver=535 llama_cpp=0.4.0 architecture=qwen4exp")


def test_disputed_rows_are_judged_on_the_safe_side_and_say_so() -> None:
    (fault,) = compat.judge(combo("driver=550 ollama=0.30.5")).faults
    assert "550" in fault.disputed
    assert "570" in fault.disputed
    assert "Sources disagree" in fault.message


def test_several_faults_come_with_one_combination_that_mends_all() -> None:
    verdict = compat.judge(combo("driver=535 cuda=13.0 gpu=1db5 compression=size split_mode=row llama_cpp=0.5.0"))
    assert {fault.code for fault in verdict.faults} == {
        "cuda_without_gpu",
        "driver_too_old_for_cuda",
        "driver_cannot_decompress",
        "split_mode_unavailable",
    }
    assert verdict.nearest is not None
    assert verdict.nearest["driver"] == "535"
    assert compat.combination(verdict.nearest) in verdict.faults[0].remedy


@pytest.mark.parametrize(
    "text",
    [
        "driver=latest",
        "driver=5,35",
        "cuda=12",
        "cuda=twelve",
        "gcc=gcc-12",
        "llama_cpp=newest",
        "ollama=latest",
        "gpu_count=0",
        "gpu_count=-1",
        "shards=0",
        "split_mode=rows",
        "cache_type=q9",
        "compression=zstd",
        "flavour=libre",
        "fit=perhaps",
        "secure_boot=maybe",
    ],
)
def test_unreadable_values_are_faults(text: str) -> None:
    verdict = compat.judge(combo(text))
    assert [fault.code for fault in verdict.faults] == ["invalid_value"]
    assert verdict.faults[0].subject == text.split("=")[0]
    assert verdict.nearest is None


@pytest.mark.parametrize(
    ("text", "pci_id"),
    [
        ("1db6", "1db6"),
        ("10DE:1DB6", "1db6"),
        ("0x10de:0x1db5", "1db5"),
        ("Tesla V100-SXM2-32GB", "1db5"),
        ("NVIDIA Tesla V100-PCIE-16GB", "1db4"),
        ("V100-SXM2", "1db5"),
        ("v100s", "1df6"),
        ("H200", "2335"),
        ("A100-SXM4-80GB", None),
        ("", None),
        ("tesla", None),
    ],
)
def test_find_gpu(text: str, pci_id: str | None) -> None:
    gpu = compat.find_gpu(text)
    assert (gpu.pci_id if gpu else None) == pci_id


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("V100", "Tesla V100-SXM2-16GB"),
        ("V100-PCIE", "Tesla V100-PCIE-16GB"),
        ("V100-SXM2-32GB", None),
        ("V100-SXM2-16GB", None),
        ("v100s", None),
        ("1db6", None),
        ("H200", None),
        ("A100", None),
    ],
)
def test_a_name_of_two_sizes_of_memory(text: str, other: str | None) -> None:
    gpu = compat.other_memory(text)
    assert (gpu.product if gpu else None) == other


values = {
    "gpu": ["1db6", "V100-SXM2-32GB", "2335", "what"],
    "gpu_count": ["1", "4"],
    "driver": ["470", "535", "535.288.01", "550", "570", "580", "590", "535-open"],
    "flavour": ["open", "proprietary"],
    "secure_boot": ["true", "false"],
    "cuda": ["11.8", "12.2", "12.4", "12.6", "12.8", "13.0"],
    "gcc": ["11", "12", "13", "13.3", "14.2", "15"],
    "cmake": ["3.16", "3.22"],
    "compression": ["none", "size"],
    "llama_cpp": ["0.3.9", "0.5.0", "b9000", "b10621", "b10809"],
    "ollama": ["0.24.0", "0.30.5", "0.34.2"],
    "architecture": ["qwen4exp", "qwen3moe", "new"],
    "shards": ["1", "4"],
    "split_mode": ["none", "layer", "row", "tensor"],
    "cache_type": ["f16", "bf16", "q8_0", "iq4_nl"],
    "flash_attention": ["auto", "on", "off"],
    "fit": ["true", "false"],
}
combinations = st.fixed_dictionaries({}, optional={name: st.sampled_from(some) for name, some in values.items()})


@given(combinations)
def test_what_is_refused_comes_with_a_combination_that_is_allowed(given_values: dict[str, str]) -> None:
    verdict = compat.judge(given_values)
    if verdict.faults:
        assert verdict.nearest is not None
        assert compat.judge(verdict.nearest).faults == []
    else:
        assert verdict.nearest is None


@given(combinations, st.randoms())
def test_fewer_parameters_never_bring_new_refusals_but_of_row(given_values: dict[str, str], random: object) -> None:
    # Rows only ask what is given, save the one that judges split_mode=row without an engine.
    everything = {fault.code for fault in compat.judge(given_values).faults}
    for name in given_values:
        fewer = {key: value for key, value in given_values.items() if key != name}
        codes = {fault.code for fault in compat.judge(fewer).faults}
        assert codes - everything <= {"split_mode_unavailable"}


words = st.text(alphabet="0123456789.-:abdevx \n", max_size=12)


@given(st.dictionaries(st.sampled_from(compat.PARAMETERS), st.one_of(words, st.integers(), st.none())))
def test_any_value_is_judged_or_named(given_values: dict[str, object]) -> None:
    verdict = compat.judge(given_values)
    assert {fault.subject for fault in verdict.faults if fault.code == "invalid_value"} <= set(given_values)


def test_documentation_is_the_table() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate_compatibility.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def run_module(arguments: str) -> tuple[int, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "ansible_collections.volta.llm.plugins.modules.compat_check"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": combo(arguments)}),
        capture_output=True,
        text=True,
        cwd=ROOT / ".collections",
    )
    return done.returncode, json.loads(done.stdout)


def test_module_fails_once_with_faults_and_nearest() -> None:
    code, result = run_module("driver=535 ollama=0.30.5 gpu=1db6")
    assert code == 1
    assert result["compatible"] is False
    assert "0.24.0" in str(result["msg"])
    assert "driver=580" in str(result["msg"])
    assert result["nearest"] == combo("gpu=1db6 driver=535 ollama=0.24.0")
    assert result["faults"][0]["source"]  # type: ignore[index]


def test_module_allows_with_notes() -> None:
    code, result = run_module("driver=535 cuda=12.2 gpu=1db5")
    assert code == 0
    assert result["compatible"] is True
    assert result["changed"] is False
    assert [note["code"] for note in result["notes"]] == ["driver_end_of_life"]  # type: ignore[index,union-attr,attr-defined]
