# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Compare the plan with what was measured, and write docs/measurements/plan.md.

    python tests/bench/plan/report.py [--live LIVE.jsonl] [--truth TRUTH.jsonl]

LIVE comes from plan_live.py (real GPUs), TRUTH from engine_truth.py (the real engine over a backend without GPUs). What
driver and engine take beside their buffers is calibrated on the lines marked for it and judged on the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import models
from ansible_collections.volta.llm.plugins.module_utils.gguf import plan

TARGET = HERE.parents[2] / "docs" / "measurements" / "plan.md"
HEADERS: dict[str, Any] = {}


def header(name: str) -> Any:
    if name not in HEADERS:
        HEADERS[name] = models.header(name)
    return HEADERS[name]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def planned(line: dict[str, Any], context: int, memory: float, capability: tuple[int, int]) -> plan.Plan:
    settings = plan.Settings(
        free_mib=(memory,) * line["devices"],
        context_per_request=context,
        parallel=line["slots"],
        cache_type_k=line["cache"],
        cache_type_v=line["cache"],
        ubatch=line["ubatch"],
        kv_unified=bool(line.get("unified")),
        overhead_mib=0.0,
        compute_capability=capability,
    )
    return plan.make_plan(header(line["model"]), settings)


# --- the engine without GPUs ------------------------------------------------------------------------------------------


def truth_rows(lines: list[dict[str, Any]]) -> list[str]:
    kinds = {"model": "weights_mib", "KV": "kv_mib", "RS": "state_mib", "compute": "compute_mib"}
    worst: dict[str, dict[str, list[float]]] = {}
    counts: dict[str, int] = {}
    totals: dict[str, list[float]] = {}
    for line in lines:
        if "error" in line:
            continue
        made = planned(line, line["context"] // line["slots"], 32768.0, (7, 0))
        counts[line["model"]] = counts.get(line["model"], 0) + 1
        for gpu in made.per_gpu:
            buffers = line["buffers"].get(f"NULL{gpu.index}", {})
            own = worst.setdefault(line["model"], {})
            for kind, name in kinds.items():
                own.setdefault(kind, []).append(getattr(gpu, name) - buffers.get(kind, 0.0))
            real = sum(buffers.get(kind, 0.0) for kind in kinds)
            ours = gpu.total_mib - gpu.overhead_mib
            totals.setdefault(line["model"], []).append(100 * (ours - real) / real)
    rows = [
        "| model | configurations | weights | KV cache | state | compute buffer | whole card |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in worst.items():
        cells = [f"{min(own[kind]):+.1f} to {max(own[kind]):+.1f}" for kind in kinds]
        share = totals[name]
        rows.append(f"| {name} | {counts[name]} | {' | '.join(cells)} | {min(share):+.2f} to {max(share):+.2f} % |")
    return rows


# --- real GPUs --------------------------------------------------------------------------------------------------------


def measured(line: dict[str, Any], moment: str) -> list[float]:
    """MiB that the server took of each GPU: what is in use less what was before it started."""
    return [float(now - before) for now, before in zip(line[moment], line["before"], strict=True)][: line["devices"]]


def without_overhead(line: dict[str, Any], filled: int | None) -> list[float]:
    """Planned MiB of each GPU without overhead, but with the working memory of CUDA operations."""
    made = planned(line, line["context"], 143771.0, (9, 0))
    pool = plan.pool_bytes(header(line["model"]), made.facts, made.settings, filled) / plan.MIB
    return [gpu.total_mib - gpu.overhead_mib + pool for gpu in made.per_gpu]


def live_report(lines: list[dict[str, Any]]) -> list[str]:
    about = [line for line in lines if "about" in line]
    runs = [line for line in lines if "model" in line and "error" not in line]
    failed = [line for line in lines if "model" in line and "error" in line]
    moment = "after_all"
    residuals: dict[bool, list[float]] = {}
    for line in runs:
        if line["use"] != "calibrate":
            continue
        # A first request fills two micro-batches; what it did not touch it did not take.
        filled = min(line["context"], 2 * line["ubatch"] + 256)
        for real, ours in zip(measured(line, moment), without_overhead(line, filled), strict=True):
            residuals.setdefault(line["devices"] > 1, []).append(real - ours)
    overhead = {piped: statistics.median(found) for piped, found in residuals.items()}
    rows, errors = [], []
    for line in runs:
        if line["use"] != "report":
            continue
        filled = min(line["context"], 2 * line["ubatch"] + 256)
        constant = overhead.get(line["devices"] > 1, overhead.get(True, 0.0))
        for gpu, (real, ours) in enumerate(zip(measured(line, moment), without_overhead(line, filled), strict=True)):
            share = 100 * (ours + constant - real) / real
            errors.append(share)
            rows.append(
                f"| {line['model']} | {line['devices']} | {line['context']} | {line['slots']} | {line['cache']} | "
                f"{line['ubatch']} | {gpu} | {ours + constant:.0f} | {real:.0f} | {share:+.2f} |"
            )
    out = []
    if about:
        gpus = about[0].get("gpus") or []
        names = ", ".join(sorted({f"{row[1]}, driver {row[5]}" for row in gpus if len(row) > 5}))
        out.append(f"{len(gpus)} x {names}. Engine: {(about[0].get('engine') or 'not known').splitlines()[0]}.")
    out += [
        "",
        f"{len(runs)} configurations, {len(failed)} failed; {sum(line['use'] == 'report' for line in runs)} of them "
        "were not used for calibration and are shown. Memory is what nvidia-smi shows after as many requests at once "
        "as there are slots, less what it showed before the start.",
        "",
        "Calibrated overhead: "
        + ", ".join(f"{'several GPUs' if piped else 'one GPU'} {size:.0f} MiB" for piped, size in overhead.items())
        + ".",
    ]
    if errors:
        sizes = sorted(abs(error) for error in errors)
        out += [
            "",
            f"Over {len(errors)} GPUs of {len(rows)} rows: median error {statistics.median(sizes):.2f} %, worst "
            f"{sizes[-1]:.2f} %, most short {min(0.0, min(errors)):.2f} %.",
            "",
            "| model | GPUs | context | slots | cache | ubatch | GPU | planned MiB | measured MiB | error % |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the plan with what was measured.")
    parser.add_argument("--live", type=Path)
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--out", type=Path, default=TARGET)
    wanted = parser.parse_args()
    lines = [
        "<!-- Written by tests/bench/plan/report.py. -->",
        "# The memory plan against the engine",
        "",
        "`vram_plan` says from a header what llama-server will take of each GPU. Two comparisons, both repeatable.",
        "",
        "## Against the engine's own figures, without a GPU",
        "",
        "The real llama-server (0.5.0-dev, commit 0c1e57098) over a backend that takes every buffer and stores nothing",
        "(`tests/bench/plan/null_backend.cpp`): 1, 2 and 4 GPUs, 4k to 128k tokens, 1 to 8 slots, f16 and q8_0 cache,",
        "micro-batch 512 and 2048, own and shared caches. Plan less engine, in MiB, smallest to largest difference.",
        "",
    ]
    lines += truth_rows(read(wanted.truth)) if wanted.truth else ["Not run."]
    lines += ["", "## Against real GPUs", ""]
    lines += live_report(read(wanted.live)) if wanted.live else ["Not run yet."]
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    wanted.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(wanted.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
