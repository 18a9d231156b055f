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
    ("qwen4exp", 2560, 24, 256, 10, 640, 0): Profile(390263, 176168, 472480, 265636, 245760, 193105),  # qwen4exp
    ("qwen3moe", 2048, 32, 128, 8, 768, 0): Profile(172052, 123064, 196690, 148173, 0, 0),  # qwen3moe
    ("qwen3next", 2048, 16, 256, 10, 512, 0): Profile(256102, 113295, 288932, 147763, 0, 0),  # qwen3next
    ("qwen35moe", 2048, 16, 256, 8, 512, 0): Profile(207974, 110223, 240845, 144712, 0, 0),  # qwen35moe
    ("qwen3", 4096, 32, 128, 0, 12288, 0): Profile(196628, 65720, 262226, 131789, 0, 0),  # qwen3-8b
    ("qwen3", 2560, 32, 128, 0, 9728, 0): Profile(153620, 53432, 194642, 94925, 0, 0),  # qwen3-4b
    ("llama", 4096, 32, 128, 0, 14336, 0): Profile(221204, 65720, 286802, 131789, 0, 0),  # llama-8b
    ("gpt-oss", 2880, 64, 64, 4, 2880, 0): Profile(177705, 55972, 223887, 102543, 0, 0),  # gpt-oss-20b
    ("deepseek2", 2048, 16, 576, 6, 1408, 10944): Profile(155914, 156447, 180531, 189256, 0, 0),  # deepseek2-lite
    ("glm4moe", 4096, 96, 128, 8, 1408, 10944): Profile(434196, 366838, 397394, 432927, 0, 0),  # glm4moe-air
    ("qwen3", 1024, 16, 128, 0, 3072, 0): Profile(53268, 24760, 65618, 45773, 0, 0),  # qwen3-1024-16
    ("qwen3", 2048, 16, 128, 0, 6144, 0): Profile(98324, 32952, 131154, 66253, 0, 0),  # qwen3-2048-16
    ("qwen3", 5120, 40, 128, 0, 17408, 0): Profile(270356, 82104, 352338, 164557, 0, 0),  # qwen3-5120-40
    ("qwen3", 5120, 64, 128, 0, 25600, 0): Profile(380948, 106680, 462930, 189133, 0, 0),  # qwen3-5120-64
    ("llama", 3072, 24, 128, 0, 8192, 0): Profile(135188, 49336, 184402, 99021, 0, 0),  # llama-3072-24
    ("llama", 8192, 64, 128, 0, 28672, 0): Profile(442388, 131256, 573522, 262861, 0, 0),  # llama-8192-64
    ("qwen3moe", 4096, 64, 128, 8, 1536, 0): Profile(344084, 245944, 393298, 295629, 0, 0),  # qwen3moe-235b
    ("glm4moe", 5120, 96, 128, 8, 1536, 12288): Profile(565268, 162550, 626770, 245023, 0, 0),  # glm4moe-4.5
    ("deepseek2", 7168, 128, 576, 8, 2048, 18432): Profile(778260, 1039401, 921641, 1154130, 0, 0),  # deepseek2-v3
}
