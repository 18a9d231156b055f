# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The memory plan: against what the engine itself reported, and what must hold for any settings."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils import catalogue_models, compat
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.gguf import plan, planning, shapes
from ansible_collections.volta.llm.plugins.module_utils.gguf.model import open_model
from ansible_collections.volta.llm.plugins.module_utils.gguf.plan import Settings
from ansible_collections.volta.llm.plugins.module_utils.gguf.reader import Header, Tensor
from ansible_collections.volta.llm.plugins.module_utils.gguf.types import TENSOR_TYPE_BY_NAME
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "unit" / "fixtures" / "gguf"
HEADERS = sorted(path.name.removesuffix(".header.gguf") for path in FIXTURES.glob("*.header.gguf"))
TRUTH = [json.loads(line) for line in (FIXTURES / "engine_truth.jsonl").read_text(encoding="utf-8").splitlines()]
FOUR_V100 = Settings(free_mib=(32768.0,) * 4)
REFERENCE = "qwen3.8-flash-next-ud-q4_k_xl"


@cache
def header(name: str) -> Header:
    """A saved header of the fixtures, or a catalogue model's."""
    known = catalogue_models.find_model(name)
    if known is not None:
        return known.header()
    model = open_model(str(FIXTURES / f"{name}.header.gguf"))
    assert not model.faults
    assert model.header is not None
    return model.header


def settings_of(line: dict[str, Any]) -> Settings:
    return Settings(
        free_mib=(32768.0,) * line["devices"],
        context_per_request=line["context"] // line["slots"],
        parallel=line["slots"],
        cache_type_k=line["cache"],
        cache_type_v=line["cache"],
        ubatch=line["ubatch"],
        kv_unified=bool(line.get("unified")),
        overhead_mib=0.0,
    )


# --- against the engine -----------------------------------------------------------------------------------------------


def test_fixtures_cover_the_architectures_that_are_known() -> None:
    assert {header(name).architecture for name in HEADERS} == set(plan.KNOWN)
    assert {line["model"] for line in TRUTH} == set(HEADERS)
    assert len(TRUTH) >= 400


@pytest.mark.parametrize("name", HEADERS)
def test_plan_is_what_the_engine_allocates(name: str) -> None:
    """Weights, KV cache and state to the rounding of the engine's log; compute buffers and the whole card as stated."""
    for line in (line for line in TRUTH if line["model"] == name):
        made = plan.make_plan(header(name), settings_of(line))
        for gpu in made.per_gpu:
            buffers = line["buffers"][f"NULL{gpu.index}"]
            where = f"{line} GPU {gpu.index}"
            assert gpu.weights_mib == pytest.approx(buffers["model"], abs=0.15), where
            assert gpu.kv_mib == pytest.approx(buffers.get("KV", 0.0), abs=0.15), where
            assert gpu.state_mib == pytest.approx(buffers.get("RS", 0.0), abs=0.15), where
            short, over = buffers["compute"] - gpu.compute_mib, gpu.compute_mib - buffers["compute"]
            assert short <= max(1.5, 0.01 * buffers["compute"]), where
            assert over <= max(4.5, 0.33 * buffers["compute"]), where
            whole = sum(buffers.get(kind, 0.0) for kind in ("model", "KV", "RS", "compute"))
            planned = gpu.total_mib - gpu.overhead_mib
            assert -0.05 < 100 * (planned - whole) / whole < 3, where


@pytest.mark.parametrize("name", HEADERS)
def test_host_is_what_the_engine_maps_and_allocates(name: str) -> None:
    for line in (line for line in TRUTH if line["model"] == name):
        made = plan.make_plan(header(name), settings_of(line))
        buffers = line["buffers"]
        real = buffers["CPU_Mapped"]["model"] + sum(buffers["NULL_Host"].values())
        # The engine maps whole pages with what lies between tensors, and a tied embedding twice.
        assert made.host_mib == pytest.approx(real, rel=0.06, abs=12), line


def test_reference_model_has_the_reported_sizes() -> None:
    """What people and we measured: docs/facts.md, tmac1973/llama-toolchest#163."""
    facts = plan.read_facts(header(REFERENCE))
    one = plan.make_plan(header(REFERENCE), replace(FOUR_V100, context_per_request=4096, overhead_mib=0))
    two = plan.make_plan(header(REFERENCE), replace(FOUR_V100, context_per_request=8192, overhead_mib=0))
    kv = [sum(gpu.kv_mib for gpu in made.per_gpu) for made in (one, two)]
    assert (kv[1] - kv[0]) * 1024 / 4096 == pytest.approx(27)  # KiB a token at f16
    quantised = replace(FOUR_V100, context_per_request=4096, cache_type_k="q8_0", cache_type_v="q8_0")
    smaller = sum(gpu.kv_mib for gpu in plan.make_plan(header(REFERENCE), quantised).per_gpu)
    assert smaller / kv[0] == pytest.approx(0.53, abs=0.003)
    assert sum(gpu.state_mib for gpu in one.per_gpu) == pytest.approx(112.5, abs=0.6)  # MiB a slot
    assert sum(gpu.state_mib for gpu in two.per_gpu) == sum(gpu.state_mib for gpu in one.per_gpu)
    assert sum(gpu.weights_mib for gpu in one.per_gpu) / 1024 == pytest.approx(76.23, rel=0.002)  # GiB
    assert one.page_cache_mib / 1024 == pytest.approx(27.45, rel=0.002)
    assert len(facts.attention) == 12
    assert len(facts.recurrent) == 36


def test_reference_model_fits_four_v100_and_says_with_what() -> None:
    result = planning.answer(REFERENCE, header(REFERENCE), replace(FOUR_V100, context_per_request=32768, parallel=4))
    assert result.plan.fits
    assert result.fault is None
    assert result.max_context_per_request == 262144
    assert 4 < result.max_parallel < plan.MAX_PARALLEL


def test_too_much_is_refused_with_the_nearest_that_fits() -> None:
    wanted = replace(FOUR_V100, context_per_request=262144, parallel=64)
    result = planning.answer(REFERENCE, header(REFERENCE), wanted)
    assert not result.plan.fits
    assert result.fault is not None
    assert result.fault.code == "plan_does_not_fit"
    assert result.nearest is not None
    assert result.nearest.context_per_request == 262144
    assert f"parallel={result.nearest.parallel}" in result.fault.remedy
    assert plan.make_plan(header(REFERENCE), result.nearest).fits
    assert not plan.make_plan(header(REFERENCE), replace(result.nearest, parallel=result.nearest.parallel + 1)).fits


def test_what_cannot_fit_at_all_has_no_nearest() -> None:
    result = planning.answer(REFERENCE, header(REFERENCE), Settings(free_mib=(16384.0,)))
    assert result.nearest is None
    assert result.max_context_per_request == 0
    assert result.max_parallel == 0
    assert result.fault is not None
    assert "smaller quantisation" in result.fault.remedy


# --- placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "shares", "counts", "output"),
    [
        (48, [1, 1, 1, 1], [13, 12, 12, 11], 3),
        (48, [1, 1], [25, 23], 1),
        (48, [1], [48], 0),
        (48, [0, 0], [25, 23], 1),
        (48, [1, 0, 0, 0], [48, 0, 0, 0], 0),
        (48, [0, 1], [0, 48], 1),
        (36, [3, 1], [28, 8], 1),
        (32, [32768, 16384], [22, 10], 1),
    ],
)
def test_layers_go_where_the_engine_puts_them(layers: int, shares: list[float], counts: list[int], output: int) -> None:
    placed = plan.place_layers(layers, shares)
    assert [placed[:-1].count(gpu) for gpu in range(len(shares))] == counts
    assert placed[-1] == output


@given(st.integers(1, 200), st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=16))
def test_every_layer_has_a_gpu_and_order_is_kept(layers: int, shares: list[float]) -> None:
    placed = plan.place_layers(layers, shares)
    assert len(placed) == layers + 1
    assert placed == sorted(placed)
    assert all(0 <= gpu < len(shares) for gpu in placed)


def test_tied_embedding_counts_on_the_last_gpu() -> None:
    tied = plan.make_plan(header("qwen3-4b"), replace(FOUR_V100, overhead_mib=0))
    embedding = next(t for t in header("qwen3-4b").tensors if t.name == "token_embd.weight")
    assert "output.weight" not in {t.name for t in header("qwen3-4b").tensors}
    assert tied.per_gpu[3].weights_mib > embedding.bytes / plan.MIB
    assert tied.page_cache_mib == pytest.approx(embedding.bytes / plan.MIB, abs=0.1)


def test_layers_of_multi_token_prediction_are_not_loaded() -> None:
    facts = plan.read_facts(header("glm4moe-air"))
    assert facts.unloaded == {46}
    assert 46 not in {layer.layer for layer in facts.attention}


def test_sliding_windows_take_a_window_only() -> None:
    facts = plan.read_facts(header("gpt-oss-20b"))
    assert [layer.window for layer in facts.attention[:4]] == [128, 0, 128, 0]
    short, long = (
        sum(
            gpu.kv_mib
            for gpu in plan.make_plan(header("gpt-oss-20b"), replace(FOUR_V100, context_per_request=n)).per_gpu
        )
        for n in (8192, 16384)
    )
    assert (long - short) * plan.MIB / 8192 == 12 * 2 * 8 * 64 * 2


def test_latent_attention_keeps_one_cache() -> None:
    facts = plan.read_facts(header("deepseek2-lite"))
    assert all(layer.shared and layer.key == 576 and layer.value == 0 for layer in facts.attention)


def test_per_layer_kv_heads_are_followed() -> None:
    base = header("llama-8b")
    heads = [2 if layer % 2 else 8 for layer in range(32)]
    mixed = Header(metadata={**base.metadata, "llama.attention.head_count_kv": heads}, tensors=base.tensors)
    facts = plan.read_facts(mixed)
    assert [layer.key for layer in facts.attention] == [128 * count for count in heads]


def test_split_mode_none_uses_the_first_gpu_only() -> None:
    made = plan.make_plan(header("qwen3-8b"), replace(FOUR_V100, split_mode="none"))
    alone = plan.make_plan(header("qwen3-8b"), Settings(free_mib=(32768.0,)))
    assert made.per_gpu[0] == alone.per_gpu[0]
    assert [gpu.total_mib for gpu in made.per_gpu[1:]] == [0, 0, 0]


def test_unknown_architecture_is_planned_from_above_and_says_so() -> None:
    known = header("qwen3-8b")
    renamed = {key.replace("qwen3.", "novel."): value for key, value in known.metadata.items()}
    other = Header(metadata={**renamed, "general.architecture": "novel"}, tensors=known.tensors)
    ours, theirs = (plan.make_plan(h, replace(FOUR_V100, overhead_mib=0)) for h in (other, known))
    assert any("novel" in note for note in ours.notes)
    for mine, real in zip(ours.per_gpu, theirs.per_gpu, strict=True):
        assert mine.weights_mib >= real.weights_mib
        assert mine.kv_mib >= real.kv_mib
        assert mine.compute_mib >= real.compute_mib


@pytest.mark.parametrize("name", HEADERS)
def test_upper_bound_is_one(name: str) -> None:
    facts = plan.read_facts(header(name))
    measured, known = plan.profile_of(facts)
    assert known
    bound = plan.upper_bound(facts)
    for field in ("base", "base_piped", "attention", "attention_piped", "later"):
        assert getattr(bound, field) >= 0.95 * getattr(measured, field), field


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"free_mib": ()}, "gpus"),
        ({"context_per_request": 0}, "context_per_request"),
        ({"parallel": 0}, "parallel"),
        ({"parallel": 257}, "parallel"),
        ({"ubatch": 0}, "ubatch"),
        ({"split_mode": "row"}, "split_mode"),
        ({"tensor_split": (1.0,)}, "tensor_split"),
        ({"tensor_split": (0.0,) * 4}, "tensor_split"),
        ({"tensor_split": (1.0, 1.0, 1.0, -1.0)}, "tensor_split"),
        ({"cache_type_k": "q9"}, "cache_type_k"),
        ({"cache_type_v": "q4_K"}, "cache_type_v"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], subject: str) -> None:
    with pytest.raises(FaultError) as caught:
        planning.answer("m", header("qwen3-8b"), replace(FOUR_V100, **change))
    assert caught.value.fault.subject == subject
    assert caught.value.fault.remedy


def test_latent_attention_wants_one_cache_type() -> None:
    with pytest.raises(FaultError) as caught:
        planning.answer("m", header("deepseek2-lite"), replace(FOUR_V100, cache_type_k="q8_0"))
    assert caught.value.fault.subject == "cache_type_v"


def test_header_without_layers_is_refused() -> None:
    with pytest.raises(FaultError) as caught:
        planning.answer("m", Header(metadata={"general.architecture": "clip"}), FOUR_V100)
    assert caught.value.fault.code == "plan_invalid"


@pytest.mark.parametrize(
    ("context", "parallel", "unified", "total", "each"),
    [
        (2048, 4, False, 8192, 2048),
        (2000, 4, False, 8192, 2048),
        (1, 1, False, 256, 256),
        (2000, 4, True, 8192, 8192),
        (1025, 2, True, 2304, 2304),
    ],
)
def test_total_context_is_what_the_engine_wants(
    context: int, parallel: int, unified: bool, total: int, each: int
) -> None:
    wanted = replace(FOUR_V100, context_per_request=context, parallel=parallel, kv_unified=unified)
    assert plan.total_context(wanted) == total
    assert plan.count_cells(wanted).each == each


def test_engine_arguments() -> None:
    wanted = replace(FOUR_V100, context_per_request=2048, parallel=4, tensor_split=(2.0, 1.0, 1.0, 0.5))
    arguments = plan.engine_arguments(wanted)
    at = dict(itertools.pairwise(arguments))
    assert at["--ctx-size"] == "8192"
    assert at["--parallel"] == "4"
    assert at["--tensor-split"] == "2,1,1,0.5"
    assert at["--fit"] == "off"
    assert "--no-kv-unified" in arguments
    assert "--tensor-split" not in plan.engine_arguments(replace(wanted, split_mode="none"))


def test_volta_needs_more_working_memory_than_newer_gpus() -> None:
    facts = plan.read_facts(header("qwen3-8b"))
    volta, newer = (
        plan.pool_bytes(header("qwen3-8b"), facts, replace(FOUR_V100, compute_capability=capability))
        for capability in ((7, 0), (9, 0))
    )
    # The largest matrix that is multiplied with a whole micro-batch, and its activations, in half precision.
    # The pool grows by 2 MiB.
    exact = 2 * 12288 * 4096 + 2 * 512 * (4096 + 12288)
    assert 0 <= volta - exact < 2 * plan.MIB
    assert volta % (2 * plan.MIB) == 0
    assert newer < volta / 8


@pytest.mark.parametrize("ubatch", [512, 2048])
def test_working_memory_of_a_sort_is_bounded_by_its_pieces(ubatch: int) -> None:
    facts = plan.read_facts(header("qwen4exp"))
    wanted = replace(FOUR_V100, context_per_request=262144, ubatch=ubatch, compute_capability=(9, 0))
    sizes = [plan.pool_bytes(header("qwen4exp"), facts, wanted, cells) for cells in (4096, 32768, 262144, None)]
    assert sizes == sorted(sizes)
    # Six arrays of one piece of 64 MiB, and at most one step of the pool for what lies beside them.
    assert 6 * 64 * plan.MIB <= sizes[-1] <= (6 * 64 + 2) * plan.MIB


@pytest.mark.parametrize("context", [196608, 261888, 262144])
def test_a_little_more_context_needs_no_less_memory_to_sort_in(context: int) -> None:
    """The rows of a piece are whole ones: one more cell, and a row less fits. It was filled on the way there."""
    wanted = Settings(free_mib=(32768.0,), context_per_request=context, parallel=1, ubatch=64)
    before, after = (
        plan.make_plan(header("qwen4exp"), replace(wanted, context_per_request=more)).per_gpu[0].overhead_mib
        for more in (context, context + 256)
    )
    assert after >= before


any_settings = st.builds(
    Settings,
    free_mib=st.lists(st.sampled_from([16384.0, 32768.0, 81920.0]), min_size=1, max_size=8).map(tuple),
    context_per_request=st.integers(1, 300_000),
    parallel=st.integers(1, 64),
    cache_type_k=st.sampled_from(["f16", "q8_0", "q4_0"]),
    cache_type_v=st.sampled_from(["f16", "q8_0"]),
    ubatch=st.sampled_from([64, 512, 2048]),
    kv_unified=st.booleans(),
)
names = st.sampled_from([name for name in HEADERS if not name.startswith("deepseek2")])


def totals(made: plan.Plan) -> list[float]:
    return [gpu.total_mib for gpu in made.per_gpu]


@settings(deadline=None, max_examples=60)
@given(names, any_settings)
def test_more_never_needs_less(name: str, wanted: Settings) -> None:
    made = totals(plan.make_plan(header(name), wanted))
    for more in (
        replace(wanted, context_per_request=wanted.context_per_request + 256),
        replace(wanted, parallel=wanted.parallel * 2),
        replace(wanted, ubatch=wanted.ubatch * 2),
        replace(wanted, overhead_mib=wanted.overhead_mib + 1),
    ):
        # Twice the requests, not one more: the engine rounds a micro-batch up to a multiple of their number.
        for before, after in zip(made, totals(plan.make_plan(header(name), more)), strict=True):
            assert after >= before


@settings(deadline=None, max_examples=30)
@given(names, any_settings)
def test_the_limits_are_limits(name: str, wanted: Settings) -> None:
    result = planning.answer(name, header(name), wanted)
    longest, most = result.max_context_per_request, result.max_parallel
    trained = result.plan.facts.trained_context
    if longest:
        assert plan.make_plan(header(name), replace(wanted, context_per_request=longest)).fits
    if longest + 256 <= trained:
        assert not plan.make_plan(header(name), replace(wanted, context_per_request=longest + 256)).fits
    if most:
        assert plan.make_plan(header(name), replace(wanted, parallel=most)).fits
    if result.nearest is not None:
        assert not result.plan.fits
        assert plan.make_plan(header(name), result.nearest).fits
    for gpu in result.plan.per_gpu:
        parts = gpu.weights_mib + gpu.kv_mib + gpu.state_mib + gpu.compute_mib + gpu.overhead_mib
        assert gpu.total_mib == pytest.approx(parts, abs=0.2)


number = st.one_of(st.integers(-5, 2**40), st.booleans(), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3))


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(HEADERS), st.data())
def test_strange_metadata_is_planned_or_refused(name: str, data: st.DataObject) -> None:
    base = header(name)
    keys = [key for key in base.metadata if key.startswith(f"{base.architecture}.")]
    changed = dict(base.metadata)
    for key in data.draw(st.lists(st.sampled_from(keys), max_size=4)):
        changed[key] = data.draw(number)
    # Whatever is in a header is planned for or refused: nothing else may be raised.
    with contextlib.suppress(FaultError):
        planning.answer(name, Header(metadata=changed, tensors=base.tensors), FOUR_V100)


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("4 x V100-SXM2-32GB", [32768.0] * 4),
        ("4x V100-SXM2-32GB", [32768.0] * 4),
        ("Tesla V100-PCIE-16GB", [16384.0]),
        ("2 x 1db6, H200", [32768.0, 32768.0, 143771.0]),
        ("8 × V100-SXM2-16GB", [16384.0] * 8),
    ],
)
def test_gpus_by_product(text: str, memory: list[float]) -> None:
    assert [gpu.memory_mib for gpu in planning.named_gpus(text)] == memory


@pytest.mark.parametrize("text", ["", "4 x", "4 x Voodoo2", "0 x V100-SXM2-32GB", "999 x V100-SXM2-32GB", "x V100,"])
def test_gpus_that_are_not_known(text: str) -> None:
    with pytest.raises(FaultError) as caught:
        planning.named_gpus(text)
    assert caught.value.fault.code == "plan_no_gpus"


def test_a_product_that_is_not_known_is_told_the_known_ones() -> None:
    with pytest.raises(FaultError) as caught:
        planning.named_gpus("4 x A100")
    assert "V100-SXM2-32GB, V100-PCIE-32GB" in caught.value.fault.remedy
    assert "docs/compatibility.md" in caught.value.fault.remedy


def test_a_product_that_has_two_sizes_of_memory_is_noted() -> None:
    (note,) = planning.named_notes("4 x V100, 4 x V100-SXM2-16GB, 2 x V100")
    assert "Tesla V100-SXM2-32GB" in note
    assert "Tesla V100-SXM2-16GB" in note


def capture(folder: Path, stdout: str | None, rc: int | None = 0, timed_out: bool = False) -> Machine:
    commands = folder / "commands"
    commands.mkdir()
    argv = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    record: dict[str, Any] = {"argv": argv, "rc": rc, "timed_out": timed_out}
    if stdout is not None:
        (commands / "out").write_text(stdout, encoding="utf-8")
        record["stdout"] = "out"
    (commands / "index.json").write_text(json.dumps([record] if stdout is not None or timed_out else []))
    return Machine(str(folder))


def test_gpus_of_the_machine(tmp_path: Path) -> None:
    machine = capture(tmp_path, "Tesla V100-SXM2-32GB, 32768, 7.0\n" * 3 + "Tesla V100-SXM2-16GB, 16384, [N/A]\n")
    found = planning.detected_gpus(machine)
    assert [gpu.memory_mib for gpu in found] == [32768.0] * 3 + [16384.0]
    assert {gpu.compute_capability for gpu in found} == {(7, 0)}


@pytest.mark.parametrize(
    ("stdout", "rc", "timed_out", "words"),
    [
        (None, None, False, "is missing"),
        ("", None, True, "did not answer"),
        ("No devices were found\n", 0, False, "names none"),
        ("Tesla V100, [Unknown Error], 7.0\n", 0, False, "names none"),
        ("NVIDIA-SMI has failed\n", 9, False, "failed"),
    ],
)
def test_no_gpus_is_told(tmp_path: Path, stdout: str | None, rc: int | None, timed_out: bool, words: str) -> None:
    with pytest.raises(FaultError) as caught:
        planning.detected_gpus(capture(tmp_path, stdout, rc, timed_out))
    assert caught.value.fault.code == "plan_no_gpus"
    assert words in caught.value.fault.message


# --- the catalogue ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", catalogue_models.MODELS, ids=lambda model: str(model.name))
def test_catalogue_entries_are_whole(model: catalogue_models.CatalogueModel) -> None:
    assert model.name == model.name.lower()
    assert model.licence
    assert model.source
    assert model.architecture in compat.ARCHITECTURES
    if model.bytes is not None:
        tensors = sum(tensor.bytes for tensor in model.header().tensors)
        assert tensors == pytest.approx(model.bytes, rel=0.01)
    for entry in model.files:
        assert entry.sha256 is None or len(bytes.fromhex(entry.sha256)) == 32
        assert entry.path.endswith(".gguf")
    given_parts = {"driver": "535", "gpu": "1db5", "architecture": model.architecture, "shards": model.shards}
    assert not compat.judge({**given_parts, "llama_cpp": "0.5.0", "cuda": "12.2"}).faults
    if "ollama-535" in model.tags:
        assert not compat.judge({**given_parts, "ollama": "0.24.0"}).faults
        assert model.ollama_tag


def test_catalogue_has_what_is_promised() -> None:
    assert len(catalogue_models.BY_NAME) == len(catalogue_models.MODELS)
    tags = [tag for model in catalogue_models.MODELS for tag in model.tags]
    assert {"reference", "ollama-535", "trial"} <= set(tags)
    assert catalogue_models.find_model(REFERENCE.upper()) is catalogue_models.BY_NAME[REFERENCE]
    assert catalogue_models.find_model("/srv/m.gguf") is None


def test_shapes_agree_with_real_tensor_counts() -> None:
    # Qwen3.8-Flash-Next's published files hold 1224 tensors.
    assert len(header(REFERENCE).tensors) == 1224
    with pytest.raises(KeyError):
        shapes.header_of({"general.architecture": "llama"}, lambda name, shape: "q8_0")


def test_rows_that_no_block_divides_fall_back() -> None:
    down = next(t for t in header("qwen4exp").tensors if t.name == "blk.0.ffn_down_exps.weight")
    assert (down.shape[0], down.type.name) == (640, "q5_0")


# --- the module -------------------------------------------------------------------------------------------------------


def run_module(**arguments: Any) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "ansible_collections.volta.llm.plugins.modules.vram_plan"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        capture_output=True,
        text=True,
        cwd=ROOT / ".collections",
    )
    return done.returncode, json.loads(done.stdout)


def test_module_plans_without_any_machine() -> None:
    code, result = run_module(
        model=REFERENCE, gpus="4 x V100-SXM2-32GB", context_per_request=32768, parallel=4, cache_type_k="q8_0"
    )
    assert code == 0
    assert result["changed"] is False
    assert result["fits"] is True
    assert result["reason"] is None
    assert len(result["per_gpu"]) == 4
    assert result["total_context"] == 131072
    assert any("fits up to" in line for line in result["table"])
    assert "--ctx-size" in result["engine_arguments"]


def test_module_refuses_and_names_the_nearest() -> None:
    arguments = {"model": REFERENCE, "gpus": "4 x V100-SXM2-32GB", "context_per_request": 262144, "parallel": 64}
    code, result = run_module(**arguments)
    assert code == 1
    assert [fault["code"] for fault in result["faults"]] == ["plan_does_not_fit"]
    assert result["nearest"]["parallel"] >= 1
    assert f"parallel={result['nearest']['parallel']}" in result["msg"]
    code, result = run_module(**arguments, must_fit=False)
    assert code == 0
    assert result["fits"] is False
    assert result["faults"] == []


def test_module_plans_from_a_saved_header_and_sizes() -> None:
    code, result = run_module(model=str(FIXTURES / "qwen3moe.header.gguf"), gpus_mib=[32768], parallel=2)
    assert code == 0
    assert result["architecture"] == "qwen3moe"
    assert result["per_gpu"][0]["layers"] == 48


def test_module_reads_the_machine(tmp_path: Path) -> None:
    capture(tmp_path, "Tesla V100-SXM2-32GB, 32768, 7.0\n" * 4)
    code, result = run_module(model="qwen3-8b-q4_k_m", sysroot=str(tmp_path))
    assert code == 0
    assert [gpu["product"] for gpu in result["gpus"]] == ["Tesla V100-SXM2-32GB"] * 4


def test_module_tells_a_wrong_model_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"<html>")
    code, result = run_module(model=str(tmp_path / "m.gguf"), gpus_mib=[32768])
    assert code == 1
    assert result["faults"][0]["code"] == "gguf_wrong_file"


def test_float32_is_the_engines() -> None:
    assert plan._float32(0.1) == struct.unpack("<f", struct.pack("<f", 0.1))[0]


def test_rows_are_padded_on_the_gpu() -> None:
    tensor = Tensor("blk.0.x.weight", (640, 4), TENSOR_TYPE_BY_NAME["q5_0"])
    assert tensor.bytes == 20 * 22 * 4
    assert plan._on_gpu(tensor) == plan._pad(tensor.bytes + 12 * 22, 128)


def test_models_page_is_the_catalogue() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate_models.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
