# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Counting on the real cards before a start, with nvidia-smi and llama-fit-params played by what they print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.catalogue_models import find_model
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine
from ansible_collections.volta.llm.plugins.module_utils.serving import memory
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import Plan, Settings, Surroundings, plan

MODEL = find_model("qwen3-30b-a3b-q4_k_m")
assert MODEL is not None
HEADER = MODEL.header()
#: Out of bus order, as no driver does it, and one card smaller (E14: a mixed machine).
CARDS = """\
00000000:1C:00.0, GPU-11111111-0000-0000-0000-000000000000, Tesla V100-SXM2-16GB, 16384, 7.0
00000000:1A:00.0, GPU-00000000-0000-0000-0000-000000000000, Tesla V100-SXM2-32GB, 32768, 7.0
"""
APPS = """\
00000000:1A:00.0, 4711, /usr/local/bin/ollama runner --model x, 20112
00000000:1C:00.0, 4712, /usr/bin/dcgm, 12
00000000:1C:00.0, 900, /opt/llama.cpp/current/bin/llama-server, 9000
00000000:1C:00.0, 4713, [Not Found], [N/A]
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Answers of nvidia-smi, recorded; processes and their control groups."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "cards").write_text(CARDS)
    (commands / "apps").write_text(APPS)
    form = "--format=csv,noheader,nounits"
    records = [
        {"argv": ["nvidia-smi", "--query-gpu=x", form], "rc": 0, "stdout": "cards"},
        {"argv": ["nvidia-smi", "--query-compute-apps=x", form], "rc": 0, "stdout": "apps"},
    ]
    (commands / "index.json").write_text(json.dumps(records))
    for pid, unit in {900: "llama-server@b.service", 4711: "ollama.service"}.items():
        folder = tmp_path / f"proc/{pid}"
        folder.mkdir(parents=True)
        (folder / "cgroup").write_text(f"0::/system.slice/{unit}\n")
    return Machine(str(tmp_path))


def planned(**settings: Any) -> tuple[Settings, Plan]:
    given = Settings(**{"model": "/srv/m.gguf", **settings})
    return given, plan(given, Surroundings(gpu_bus_ids=("0000:1a:00.0", "0000:1c:00.0"), architecture="qwen3moe"))


def count(
    tmp_path: Path, machine: Machine, said: str | None = None, rc: int = 0, **settings: Any
) -> tuple[memory.Counted, list[tuple[str, ...]]]:
    called: list[tuple[str, ...]] = []

    def runner(argv: Sequence[str], timeout: float) -> Completed:
        called.append(tuple(argv))
        return Completed(tuple(argv), rc, stdout=said or "", stderr="no such model" if rc else "")

    if said is not None:
        (tmp_path / "llama-fit-params").touch()
    given, computed = planned(**settings)
    cards = memory.chosen(memory.cards_of(machine), computed.gpus)
    return memory.count(given, computed, HEADER, cards, str(tmp_path), runner), called


def test_cards_are_in_the_engine_s_order(machine: Machine) -> None:
    """E14 LostRuins/koboldcpp#1023, a machine with V100 of 16 and of 32 GB."""
    first, second = memory.cards_of(machine)
    assert (first.bus_id, first.memory_mib, first.compute_capability) == ("00000000:1A:00.0", 32768, (7, 0))
    assert (second.product, second.memory_mib) == ("Tesla V100-SXM2-16GB", 16384)
    assert memory.chosen([first, second], ["0000:1c:00.0", "1a:00.0"]) == [second, first]


def test_the_plan_counts_each_card_by_what_it_has(tmp_path: Path, machine: Machine) -> None:
    counted, called = count(tmp_path, machine)
    assert counted.faults == []
    assert called == []
    large, small = counted.per_gpu
    # The engine shares out by memory: twice the card, twice the layers.
    assert large["layers"] > small["layers"]
    assert large["counted_mib"] == large["planned_mib"] < large["memory_mib"]
    assert (small["uuid"], small["engine_mib"]) == ("GPU-11111111-0000-0000-0000-000000000000", None)
    assert any("llama-fit-params is not installed" in note for note in counted.notes)


def test_an_even_split_does_not_fit_the_smaller_card(tmp_path: Path, machine: Machine) -> None:
    """E10: what fits in sum can still be too much for one card."""
    counted, _ = count(tmp_path, machine, tensor_split=[1, 1], context_per_request=131072, parallel=2)
    (fault,) = counted.faults
    assert fault.code == "plan_does_not_fit"
    assert "GPU 1" in fault.message
    assert fault.remedy == "Write parallel=1."


def test_the_engine_s_own_count_decides_where_it_is_the_larger(tmp_path: Path, machine: Machine) -> None:
    counted, (argv,) = count(
        tmp_path, machine, "CUDA0 11000 300 400\nCUDA1 6000 150 15000\nHost 166 0 20\n", parallel=2
    )
    (fault,) = counted.faults
    assert fault.code == "plan_does_not_fit"
    assert "llama-fit-params counts" in fault.message
    assert "GPU 1 (Tesla V100-SXM2-16GB at 00000000:1C:00.0" in fault.message
    _, small = counted.per_gpu
    assert small["counted_mib"] == small["engine_mib"] > small["planned_mib"]
    # What it reserves for logits of a whole micro-batch of 512 tokens, and the server only for one a request.
    logits = (512 - 2) * 151936 * 4 / (1 << 20)
    assert small["overhead_mib"] >= 512
    assert small["engine_mib"] == pytest.approx(6000 + 150 + 15000 - logits + small["overhead_mib"], abs=1)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in argv
    assert argv[argv.index("--ctx-size") + 1] == "16384"
    assert argv[argv.index("--split-mode") + 1] == "layer"
    assert argv[-2:] == ("--split-mode", "layer")


def test_each_card_is_judged_by_its_own_figures(tmp_path: Path, machine: Machine) -> None:
    """E12 ollama/ollama#7047: of two equal shares the first takes 131 MiB more, by its compute buffers."""
    logits = (512 - 1) * 151936 * 4 / (1 << 20)
    counted, _ = count(tmp_path, machine, f"CUDA0 1000 12800 429\nCUDA1 1000 12800 {298 + int(logits)}\n")
    first, second = counted.per_gpu
    assert first["engine_mib"] - second["engine_mib"] == pytest.approx(131, abs=1)
    # The same on both is too much for one of them.
    counted, _ = count(tmp_path, machine, f"CUDA0 3000 12800 429\nCUDA1 3000 12800 {298 + int(logits)}\n")
    (fault,) = counted.faults
    assert "on GPU 1 " in fault.message


def test_an_engine_that_counts_too_much_by_what_is_known_stands_against_nothing(
    tmp_path: Path, machine: Machine
) -> None:
    """The card is full by its own figures and has room once the logits are taken off."""
    logits = (512 - 1) * 151936 * 4 / (1 << 20)
    full = int(16384 - 512 + logits) - 7000
    counted, _ = count(tmp_path, machine, f"CUDA0 11000 300 400\nCUDA1 6000 900 {full}\n")
    assert counted.faults == []


@pytest.mark.parametrize(("said", "rc", "why"), [("Host 17000 0 20\n", 0, "saw no GPU"), ("", 1, "no such model")])
def test_where_the_engine_counts_nothing_a_note_says_so(
    tmp_path: Path, machine: Machine, said: str, rc: int, why: str
) -> None:
    counted, _ = count(tmp_path, machine, said, rc)
    assert counted.faults == []
    assert any(why in note for note in counted.notes)


def test_what_servers_held_beyond_the_count_has_to_fit_as_well(tmp_path: Path, machine: Machine) -> None:
    """A plan that was right by its own figures and short on this machine is not repeated."""
    given, computed = planned()
    cards = memory.cards_of(machine)

    def counted(short: dict[str, float]) -> memory.Counted:
        return memory.count(given, computed, HEADER, cards, None, lambda argv, timeout: Completed((), 0), short)

    plain = counted({})
    assert plain.faults == []
    _, small = plain.per_gpu
    assert small["calibrated_mib"] == small["counted_mib"]
    room = small["memory_mib"] - small["counted_mib"]
    within = counted({small["uuid"]: room - 1})
    assert within.faults == []
    assert within.per_gpu[1]["calibrated_mib"] == pytest.approx(small["memory_mib"] - 1, abs=0.2)
    # What is compared with the next measurement is the count itself: else the difference would be forgotten.
    assert within.per_gpu[1]["counted_mib"] == small["counted_mib"]
    (fault,) = counted({small["uuid"]: room + 10}).faults
    assert fault.code == "plan_does_not_fit"
    assert f"{room + 10:.0f} more than was counted" in fault.message
    assert counted({"GPU-of-another-machine": 9999.0}).faults == []


def test_another_engine_on_the_cards_is_named(machine: Machine) -> None:
    cards, holders = memory.cards_of(machine), memory.holders_of(machine)
    ours = {"llama-server.service", "llama-server@b.service"}
    ollama, unknown = memory.foreign(holders, cards, ours, machine)
    assert ollama.code == "gpu_held"
    assert ollama.message == "ollama (pid 4711, unit ollama.service) holds 20112 MiB of it"
    assert "systemctl disable --now ollama.service" in ollama.remedy
    # Unknown is not nothing; a monitor's 12 MiB are no engine.
    assert "pid 4713" in unknown.message
    # On cards that are not used it may be; and our own server is not in its own way, another's is.
    assert [fault.subject for fault in memory.foreign(holders, cards[1:], ours, machine)] == ["00000000:1C:00.0"]
    assert len(memory.foreign(holders, cards, set(), machine)) == 3


def test_a_machine_whose_nvidia_smi_is_silent_has_no_cards(tmp_path: Path) -> None:
    (tmp_path / "commands").mkdir()
    silent = Machine(str(tmp_path))
    assert memory.cards_of(silent) == []
    assert memory.holders_of(silent) == []


def test_uuids_come_from_the_loaded_driver(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:1a:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(
        "Model: \t\t Tesla V100\nGPU UUID: \t GPU-00000000-0000-0000-0000-00000000000a\n"
    )
    other = folder.with_name("0000:1c:00.0")
    other.mkdir()
    (other / "information").write_text("GPU UUID: \t GPU-????????-????-????-????-????????????\n")
    assert memory.uuids_of(Machine(str(tmp_path))) == {"0000:1a:00.0": "GPU-00000000-0000-0000-0000-00000000000a"}


def test_lines_that_are_no_counts_are_passed_over() -> None:
    text = "printing estimated memory in MiB\nCUDA0 17218 0 432 \nCUDA11 1 2 3\nHost 166 0 8 \n"
    assert memory.read_fit(text) == {0: memory.Buffers(17218, 0, 432), 11: memory.Buffers(1, 2, 3)}


def test_settings_reach_the_engine_s_tool(tmp_path: Path, machine: Machine) -> None:
    _, (argv,) = count(
        tmp_path, machine, "CUDA0 1 1 1\n", cache_type_k="q8_0", cache_type_v="q8_0", ubatch=256, tensor_split=[2, 1]
    )
    words = " ".join(argv)
    for wanted in ("--cache-type-k q8_0", "--cache-type-v q8_0", "--ubatch-size 256", "--tensor-split 2,1"):
        assert wanted in words


def test_no_secret_reaches_the_command_line_of_the_engine_s_tool(tmp_path: Path, machine: Machine) -> None:
    """Everybody on a machine reads the arguments of its processes."""
    variables = {"HF_TOKEN": "hf_demo", "GGML_CUDA_FORCE_MMQ": "1"}
    _, (argv,) = count(tmp_path, machine, "CUDA0 1 1 1\n", environment=variables)
    assert "GGML_CUDA_FORCE_MMQ=1" in argv
    assert not any("hf_demo" in word for word in argv)


TOO_MUCH = {"context_per_request": 40960, "parallel": 8}


@pytest.mark.parametrize(
    "words", [["--cpu-moe"], ["--cpu_moe"], ["-ot", "exps=CPU"], ["--n-cpu-moe", "20"], ["--no-kv-offload"]]
)
def test_what_is_left_to_the_host_is_not_counted_on_the_cards(
    tmp_path: Path, machine: Machine, words: list[str]
) -> None:
    plain, _ = count(tmp_path, machine, **TOO_MUCH)
    assert [fault.code for fault in plain.faults] == ["plan_does_not_fit"]
    unknown, _ = count(tmp_path, machine, extra_args=words, **TOO_MUCH)
    assert unknown.faults == []
    assert any(f"{words[0]} of extra_args leaves memory to the host" in note for note in unknown.notes)
    told, (argv,) = count(tmp_path, machine, "CUDA0 900 300 400\nCUDA1 900 300 400\n", extra_args=words, **TOO_MUCH)
    assert told.faults == []
    assert list(argv[-len(words) :]) == words
    assert told.per_gpu[0]["counted_mib"] == told.per_gpu[0]["engine_mib"] < told.per_gpu[0]["planned_mib"]


def test_what_is_left_to_the_host_may_still_be_too_little(tmp_path: Path, machine: Machine) -> None:
    said = "CUDA0 90000 300 400\nCUDA1 900 300 400\n"
    counted, _ = count(tmp_path, machine, said, extra_args=["--n-cpu-moe", "1"], **TOO_MUCH)
    (fault,) = counted.faults
    assert fault.code == "plan_does_not_fit"
    assert "llama-fit-params counts" in fault.message


def test_further_weights_are_said_not_to_be_counted(tmp_path: Path, machine: Machine) -> None:
    counted, _ = count(tmp_path, machine, extra_args=["--mmproj", "/srv/p.gguf"])
    assert counted.faults == []
    assert "not counted: --mmproj of extra_args" in counted.notes


def test_no_logits_are_taken_off_another_card(tmp_path: Path, machine: Machine) -> None:
    counted, _ = count(tmp_path, machine, "CUDA0 1000 0 30000\nCUDA1 100 0 100\n")
    large = counted.per_gpu[0]
    assert large["engine_mib"] == pytest.approx(1000 + 30000 + large["overhead_mib"])


def test_a_header_that_no_plan_can_be_made_for_is_a_fault(tmp_path: Path, machine: Machine) -> None:
    given, computed = planned()
    empty = replace(HEADER, metadata={**HEADER.metadata, "qwen3moe.block_count": 0})
    counted = memory.count(given, computed, empty, memory.cards_of(machine), str(tmp_path), lambda *_: Completed((), 1))
    assert [fault.code for fault in counted.faults] == ["plan_invalid"]
