# Copyright: The volta.llm authors
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
    ("qwen4exp", 2560, 24, 256, 10, 640, 0): Profile(390263, 176168, 472480, 265636, 245760, 225329),  # qwen4exp
    ("qwen3moe", 2048, 32, 128, 8, 768, 0): Profile(172052, 122904, 196690, 147533, 0, 0),  # qwen3moe
    ("qwen3next", 2048, 16, 256, 10, 512, 0): Profile(256102, 112751, 288932, 145587, 0, 0),  # qwen3next
    ("qwen35moe", 2048, 16, 256, 8, 512, 0): Profile(207974, 109679, 240845, 142536, 0, 0),  # qwen35moe
    ("qwen3", 4096, 32, 128, 0, 12288, 0): Profile(196628, 65560, 262226, 131149, 0, 0),  # qwen3-8b
    ("qwen3", 2560, 32, 128, 0, 9728, 0): Profile(153620, 53272, 194642, 94285, 0, 0),  # qwen3-4b
    ("llama", 4096, 32, 128, 0, 14336, 0): Profile(221204, 65560, 286802, 131149, 0, 0),  # llama-8b
    ("gpt-oss", 2880, 64, 64, 4, 2880, 0): Profile(177705, 55908, 223887, 102287, 0, 0),  # gpt-oss-20b
    ("deepseek2", 2048, 16, 576, 6, 1408, 10944): Profile(155914, 156383, 180531, 189000, 0, 0),  # deepseek2-lite
    ("glm4moe", 4096, 96, 128, 8, 1408, 10944): Profile(434196, 366678, 397394, 432287, 0, 0),  # glm4moe-air
    ("qwen3", 1024, 16, 128, 0, 3072, 0): Profile(53268, 24600, 65618, 45133, 0, 0),  # qwen3-1024-16
    ("qwen3", 2048, 16, 128, 0, 6144, 0): Profile(98324, 32792, 131154, 65613, 0, 0),  # qwen3-2048-16
    ("qwen3", 5120, 40, 128, 0, 17408, 0): Profile(270356, 81944, 352338, 163917, 0, 0),  # qwen3-5120-40
    ("qwen3", 5120, 64, 128, 0, 25600, 0): Profile(380948, 106520, 462930, 188493, 0, 0),  # qwen3-5120-64
    ("llama", 3072, 24, 128, 0, 8192, 0): Profile(135188, 49176, 184402, 98381, 0, 0),  # llama-3072-24
    ("llama", 8192, 64, 128, 0, 28672, 0): Profile(442388, 131096, 573522, 262221, 0, 0),  # llama-8192-64
    ("qwen3moe", 4096, 64, 128, 8, 1536, 0): Profile(344084, 245784, 393298, 294989, 0, 0),  # qwen3moe-235b
    ("glm4moe", 5120, 96, 128, 8, 1536, 12288): Profile(565268, 162390, 626770, 244383, 0, 0),  # glm4moe-4.5
    ("deepseek2", 7168, 128, 576, 8, 2048, 18432): Profile(778260, 1039337, 921641, 1153874, 0, 0),  # deepseek2-v3
}
