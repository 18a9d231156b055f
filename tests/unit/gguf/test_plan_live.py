# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The plan against what two live runs on two H200 measured (docs/measurements/plan_live*.jsonl, not simulated)."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.gguf import plan

ROOT = Path(__file__).resolve().parents[3]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("volta_plan_report", ROOT / "tests/bench/plan/report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


report = _load()
LINES = report.read(ROOT / "docs/measurements/plan_live.jsonl")
RUNS = report.runs_of(LINES)
FULL = report.read(ROOT / "docs/measurements/plan_live_full.jsonl")


def line_of(**wanted: Any) -> dict[str, Any]:
    found: list[dict[str, Any]] = [line for line in RUNS if all(line[key] == value for key, value in wanted.items())]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("moment", [0, 1], ids=report.MOMENTS)
def test_plan_holds_on_configurations_that_were_not_used_for_calibration(moment: int) -> None:
    judged = report.judge(LINES)
    assert len({id(row.line) for row in judged}) >= 20
    assert all(row.line["use"] == "report" for row in judged)
    errors = [row.error(moment) for row in judged]
    assert statistics.median(abs(error) for error in errors) < 2
    assert max(abs(error) for error in errors) < 6
    assert min(errors) > -1


def test_compute_buffers_are_those_that_the_engine_reported() -> None:
    for line in RUNS:
        made = report.planned(line, line["context"], 143771.0, (9, 0))
        for gpu in made.per_gpu:
            real = line["buffers"][f"CUDA{gpu.index}"]["compute"]
            # From above where the allocator finds a gap for a rotated query.
            assert -0.2 < gpu.compute_mib - real < 1 + 0.04 * real, (line, gpu.index)


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_a_sort_takes_more_memory_the_further_a_context_is_filled(cache: str) -> None:
    """A first request fills 4096 or 4352 cells; what the GPU gave differs by the six arrays of the sort."""
    common = {"model": "qwen4exp-small", "slots": 1, "cache": cache, "ubatch": 2048, "devices": 2}
    short, longer = line_of(context=4096, **common), line_of(context=32768, **common)
    header = report.header("qwen4exp-small")
    facts = plan.read_facts(header)
    pools = []
    for line in (short, longer):
        made = report.planned(line, line["context"], 143771.0, (9, 0))
        pools.append(plan.pool_bytes(header, facts, made.settings, min(line["context"], 2 * 2048 + 256)) / plan.MIB)
    for gpu in (0, 1):
        taken = [line["after_first"][gpu] - line["loaded"][gpu] for line in (short, longer)]
        assert pools[1] - pools[0] == taken[1] - taken[0]


def test_plan_for_full_contexts_holds_on_a_run_that_nothing_was_fitted_to() -> None:
    assert {line["use"] for line in report.runs_of(FULL)} == {"validate"}
    judged = report.judge_full(FULL, LINES)
    filled = [row for row in judged if report.has_full(row.line)]
    assert len({id(row.line) for row in filled}) >= 20
    assert {row.line["model"] for row in filled} == {"qwen4exp-small", "qwen3moe-small"}
    for rows in (filled, judged):
        errors = [row.error(1) for row in rows]
        assert statistics.median(abs(error) for error in errors) < 2
        assert max(abs(error) for error in errors) < 6
        assert min(errors) > -1


def test_verdict_names_the_bounds_that_do_not_hold() -> None:
    text = "\n".join(report.verdict([0.1, 1.4, -0.2], [0.1, 7.0, -1.5]))
    assert "once a slot is filled: kept median under 2 %, worst under 6 %, never short by more than 1 %.\n" in text
    assert "not kept worst under 6 %, never short by more than 1 %." in text


def test_second_run_measured_other_configurations_than_the_first() -> None:
    keys = ("model", "context", "slots", "cache", "ubatch", "devices")
    first, second = ([tuple(line[key] for key in keys) for line in report.runs_of(lines)] for lines in (LINES, FULL))
    assert not set(first) & set(second)
    assert len(second) == len(set(second))


def test_filling_a_context_takes_what_the_sort_of_the_fullest_slot_needs() -> None:
    """Only models with an indexer sort; others take no more than another 4 MiB."""
    for line in report.runs_of(FULL):
        for ours, real in report.grown(line):
            assert -4 <= ours - real <= 10, line
            assert (real >= 50) == (line["model"] == "qwen4exp-small"), line


def test_report_lists_every_gpu_of_the_second_run() -> None:
    text = report.full_report(FULL, LINES)
    judged = report.judge_full(FULL, LINES)
    assert len([row for row in text if row.startswith("| qwen")]) == len(judged)
    assert [line for line in text if line.startswith("| every slot filled | ")]
