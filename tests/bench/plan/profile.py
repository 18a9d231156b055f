# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Measure what a graph needs for a token whatever the context, and write plugins/module_utils/gguf/profiles.py.

    python tests/bench/plan/profile.py --bin BUILD/bin --source LC --work DIR

The engine runs over null_backend.cpp with models of few layers: the allocator gives a layer's memory to the next one,
so their number does not matter. What plan.py computes (inputs, scores, half-precision copies) is taken off.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import engine_truth
import models
from ansible_collections.volta.llm.plugins.module_utils.gguf import plan
from ansible_collections.volta.llm.plugins.module_utils.gguf.profiles import Profile

TARGET = HERE.parents[2] / "plugins" / "module_utils" / "gguf" / "profiles.py"
HEAD = '''# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the graph of a model needs for each token of a micro-batch, whatever the context. Written by
tests/bench/plan/profile.py from what llama.cpp 0.5.0-dev (commit 0c1e57098) reserves; change nothing here by hand.

The engine's allocator reuses memory as gaps allow, so these figures follow from no simple formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Profile:
    """Bytes for each token of a micro-batch.

    ``base`` is the widest point of a layer, ``attention`` what is alive beside flash attention's half-precision copies
    or an indexer's scores, ``attention_2`` beside flash attention where there is an indexer as well. Those that end in
    ``_piped`` hold with more than one GPU; ``later`` is what GPUs after the first need on top.
    """

    base: int
    attention: int
    base_piped: int
    attention_piped: int
    later: int = 0
    attention_2: int = 0


#: By architecture, width, query heads, key head size, experts used, their feed-forward size, and that of dense layers
#: where there are both.
PROFILES: dict[tuple[Any, ...], Profile] = {
'''


def shallow(fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same model with few layers and a small vocabulary, which do not change a graph's width."""
    architecture = fields["general.architecture"]
    short = {**fields, f"{architecture}.block_count": layers, f"{architecture}.vocab_size": 4096}
    if architecture == "qwen4exp":
        small = models.qwen4exp(layers=layers, experts=fields["qwen4exp.expert_count"], rows=16_000)
        small["qwen4exp.vocab_size"] = 4096
        return small
    return short


def catalogue() -> dict[str, tuple[dict[str, Any], Any, bool, int]]:
    """Models to measure: name to metadata, types, tied, layers to use."""
    found: dict[str, tuple[dict[str, Any], Any, bool, int]] = {}
    for name, (fields, pick, tied) in models.MODELS.items():
        if name.endswith(("-small", "-tiny")):
            continue
        # deepseek2 tells its lite variants by the number of layers.
        # An indexer's kept cells add up over the layers.
        whole = name.startswith(("deepseek2", "qwen4exp"))
        layers = fields[f"{fields['general.architecture']}.block_count"] if whole else 8
        found[name] = (shallow(fields, layers), pick, tied, layers)
    for name, n, heads, kv_heads, ff in (
        ("qwen3", 1024, 16, 8, 3072),
        ("qwen3", 2048, 16, 8, 6144),
        ("qwen3", 5120, 40, 8, 17408),
        ("qwen3", 5120, 64, 8, 25600),
        ("llama", 3072, 24, 8, 8192),
        ("llama", 8192, 64, 8, 28672),
    ):
        found[f"{name}-{n}-{heads}"] = (models.dense(name, 8, n, heads, kv_heads, ff, 4096), models._q4, False, 8)
    large = shallow(models.MODELS["qwen3moe"][0], 8)
    large.update(
        {
            "qwen3moe.embedding_length": 4096,
            "qwen3moe.attention.head_count": 64,
            "qwen3moe.expert_feed_forward_length": 1536,
        }
    )
    found["qwen3moe-235b"] = (large, models._q4, False, 8)
    glm = shallow(models.MODELS["glm4moe-air"][0], 9)
    glm.update(
        {
            "glm4moe.embedding_length": 5120,
            "glm4moe.feed_forward_length": 12288,
            "glm4moe.expert_feed_forward_length": 1536,
            "glm4moe.expert_count": 160,
        }
    )
    found["glm4moe-4.5"] = (glm, models._q4, False, 9)
    deepseek = {
        **models.MODELS["deepseek2-lite"][0],
        "deepseek2.block_count": 8,
        "deepseek2.vocab_size": 4096,
        "deepseek2.embedding_length": 7168,
        "deepseek2.attention.head_count": 128,
        "deepseek2.attention.q_lora_rank": 1536,
        "deepseek2.feed_forward_length": 18432,
        "deepseek2.leading_dense_block_count": 3,
        "deepseek2.expert_count": 256,
        "deepseek2.expert_used_count": 8,
        "deepseek2.expert_shared_count": 1,
        "deepseek2.expert_feed_forward_length": 2048,
    }
    found["deepseek2-v3"] = (deepseek, models._q4, False, 8)
    return found


class Bench:
    def __init__(self, binaries: Path, source: Path, work: Path) -> None:
        self.binaries, self.work = binaries, work
        work.mkdir(parents=True, exist_ok=True)
        engine_truth.build(binaries, source, work)

    def reserve(
        self, name: str, devices: int, context: int, slots: int, cache: str, phase: str = "attention"
    ) -> list[float]:
        """Bytes that a graph of 512 tokens reserves on each GPU, less what plan.py computes apart from the profile.

        ``phase`` is the one that is widest in this configuration: ``base`` or ``attention``.
        """
        config = {"model": name, "devices": devices, "context": context, "slots": slots, "ubatch": 512, "cache": cache}
        result = engine_truth.measure(config, self.binaries, self.work, self.work / f"{name}.gguf")
        if "error" in result:
            raise RuntimeError(f"{name}: {result['error']}")
        header = models.header(name)
        facts = plan.read_facts(header)
        settings = plan.Settings(
            free_mib=(32768.0,) * devices,
            context_per_request=context // slots,
            parallel=slots,
            cache_type_k=cache,
            cache_type_v=cache,
        )
        # A base that nothing exceeds makes plan.py take that phase.
        least = 1 << 30 if phase == "base" else 0
        nothing = Profile(least, 0, least, 0)
        known = plan.PROFILES.get(plan.signature(facts))
        plan.PROFILES[plan.signature(facts)] = nothing
        try:
            placed = plan.place_layers(facts.layers, settings.free_mib)
            computed, _ = plan._compute(facts, settings, placed, devices)
        finally:
            plan.PROFILES.pop(plan.signature(facts))
            if known is not None:
                plan.PROFILES[plan.signature(facts)] = known
        return [
            result["buffers"][f"NULL{gpu}"]["compute"] * plan.MIB - (size - least * 512)
            for gpu, size in enumerate(computed)
        ]

    def profile(self, name: str) -> tuple[tuple[Any, ...], Profile]:
        facts = plan.read_facts(models.header(name))
        figures: dict[int, tuple[float, float, float, float]] = {}
        for devices in (1, 2):
            base = self.reserve(name, devices, 1024, 1, "f16", "base")
            if facts.indexer:
                # What an indexer keeps moves the gaps about: the larger of a short and a longer context.
                for context in (4096, 6144):
                    base = [
                        max(pair) for pair in zip(base, self.reserve(name, devices, context, 1, "f16"), strict=True)
                    ]
            if facts.indexer:
                attention = self.reserve(name, devices, 131072, 1, "f16")
                second = self.reserve(name, devices, 131072, 8, "q8_0")
            else:
                attention = self.reserve(name, devices, 131072, 1, "q8_0")
                second = [0.0] * devices
            figures[devices] = (base[0], attention[0], second[0], base[-1] - base[0])
        per_token = lambda size: max(0, round(size / 512))  # noqa: E731
        one, two = figures[1], figures[2]
        return plan.signature(facts), Profile(
            base=per_token(one[0]),
            attention=per_token(one[1]),
            base_piped=per_token(two[0]),
            attention_piped=per_token(two[1]),
            later=per_token(two[3]),
            attention_2=per_token(one[2]),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure graph profiles and write them down.")
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    wanted = parser.parse_args()
    bench = Bench(wanted.bin.resolve(), wanted.source.resolve(), wanted.work)
    lines = []
    for name, (fields, pick, tied, _) in catalogue().items():
        models.MODELS[name] = (fields, pick, tied)
        models.write(name, wanted.work)
        key, profile = bench.profile(name)
        print(name, key, profile, flush=True)
        figures = ", ".join(str(getattr(profile, field)) for field in profile.__dataclass_fields__)
        lines.append(f"    {key!r}: Profile({figures}),  # {name}\n".replace("'", '"'))
    TARGET.write_text(HEAD + "".join(lines) + "}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
