# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Models that are known to suit a Volta server: where they come from, what runs them, and enough of their header to
plan for them before a byte is downloaded.

To add one: give it a name, its files with sizes (and SHA-256 where published), the architecture's metadata (the keys of
``gguf_info``; long arrays are not needed) and the types of its tensors as rules, first match wins. Only architectures
of gguf/shapes.py can be described so; of any other keep a saved header (``gguf_info`` with ``save_header``) and give
vram_plan its path. The test compares the sum of the tensors with the size of the files. docs/models.md is generated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .gguf.reader import Header
from .gguf.shapes import header_of


@dataclass(frozen=True)
class ModelFile:
    """One file: path below the source's folder, size in bytes, SHA-256 where known."""

    path: str
    bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class CatalogueModel:
    """One model in one quantisation.

    ``llama_cpp`` and ``ollama`` are the first releases that load it (null: not in that engine, or not confirmed),
    ``ollama_tag`` its name in Ollama's library. ``driver_535`` says with which engine it runs under driver 535.
    ``types`` are (pattern, type) pairs for tensor names. ``source`` names where figures come from.
    """

    name: str
    title: str
    repository: str
    revision: str
    files: tuple[ModelFile, ...]
    licence: str
    metadata: Mapping[str, Any]
    types: tuple[tuple[str, str], ...]
    source: str
    llama_cpp: str | None = None
    ollama: str | None = None
    ollama_tag: str | None = None
    driver_535: str = "llama_cpp"
    tied: bool = False
    remarks: str = ""
    tags: tuple[str, ...] = field(default=())

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def bytes(self) -> int | None:
        """Bytes to download; null where a size is not known."""
        sizes = [entry.bytes for entry in self.files]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    @property
    def shards(self) -> int:
        return len(self.files)

    def header(self) -> Header:
        """The header as described; tensor types that differ by layer are as close as the rules are."""
        rules = [(re.compile(pattern), kind) for pattern, kind in self.types]

        def pick(name: str, shape: tuple[int, ...]) -> str:
            return next(kind for pattern, kind in rules if pattern.search(name))

        return header_of({"general.name": self.title, **self.metadata}, pick, self.tied)


def _keys(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in values.items()}}


_FLASH_NEXT = _keys(
    "qwen4exp",
    {
        "vocab_size": 248320,
        "context_length": 262144,
        "block_count": 48,
        "embedding_length": 2560,
        "attention.head_count": 24,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
        "attention.compress_ratios": [0, 0, 0, 4] * 12,
        "rope.dimension_count": 64,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 6144,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 48,
        "ssm.group_count": 16,
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": 320,
        "ple.layers": [1],
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 8,
        "ple.conv_kernel": 4,
        "embedding_length_per_layer_input": 160,
        "expert_count": 512,
        "expert_used_count": 10,
        "expert_feed_forward_length": 640,
        "expert_shared_feed_forward_length": 640,
        "volta.table_rows": 320_001_536,
        "volta.table_layer": 1,
    },
)
_FLASH_NEXT_SOURCE = (
    "sizes and hashes of the repository at its revision; dimensions ggml-org/llama.cpp#27742; loaded sizes "
    "tmac1973/llama-toolchest#163. Types by layer are set so that these sums come out"
)


def _shards(folder: str, stem: str, sizes: tuple[tuple[int, str], ...]) -> tuple[ModelFile, ...]:
    count = len(sizes)
    return tuple(
        ModelFile(f"{folder}/{stem}-{number:05d}-of-{count:05d}.gguf", size, digest)
        for number, (size, digest) in enumerate(sizes, 1)
    )


def _dense(
    architecture: str, layers: int, n: int, heads: int, kv: int, ff: int, vocabulary: int, head: int = 128
) -> Any:
    return _keys(
        architecture,
        {
            "vocab_size": vocabulary,
            "context_length": 40960 if architecture == "qwen3" else 131072,
            "block_count": layers,
            "embedding_length": n,
            "feed_forward_length": ff,
            "attention.head_count": heads,
            "attention.head_count_kv": kv,
            "attention.key_length": head,
            "attention.value_length": head,
        },
    )


def _more_bits(layers: int) -> str:
    """Layers that a Q4_K_M mix gives more bits, as a pattern (LC src/llama-quant.cpp use_more_bits)."""
    eighth = layers // 8
    chosen = [i for i in range(layers) if i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2]
    return "|".join(str(layer) for layer in chosen)


def _q4_k_m(layers: int) -> tuple[tuple[str, str], ...]:
    return (
        (r"^output\.", "q6_K"),
        (rf"^blk\.({_more_bits(layers)})\.(attn_v|ffn_down)", "q6_K"),
        (r"", "q4_K"),
    )


MODELS: tuple[CatalogueModel, ...] = (
    CatalogueModel(
        name="qwen3.8-flash-next-ud-q4_k_xl",
        title="Qwen3.8 Flash Next, UD-Q4_K_XL",
        repository="unsloth/Qwen3.8-Flash-Next-GGUF",
        revision="38bb39ee97821de2c9009abb7e93950eec396e66",
        files=_shards(
            "UD-Q4_K_XL",
            "Qwen3.8-Flash-Next-UD-Q4_K_XL",
            (
                (10_946_624, "4448186216b3af4cc558bbce2c3213f01608f8f8b2e5267a9767971dd3ec8082"),
                (49_859_583_136, "3f342f1c1580473f1ee94ddd5b28206e8c07a70fa1a366f59d1d6c922919a6c9"),
                (49_376_141_504, "56758f40269cad5cd9b0d3d6fbae0f40f6d5be6de49e4ab392dbe83157d9cbd3"),
                (12_087_983_520, "753bda48b98ba4f1636134a90a967de1b2d3908a236c026e464777342e53510a"),
            ),
        ),
        licence="Qwen Community License 1.0",
        metadata=_FLASH_NEXT,
        types=(
            (r"^per_layer", "iq4_nl"),
            (r"^blk\.(0|1|2|45|46|47)\.ffn_down_exps", "q8_0"),
            (r"ffn_down_exps", "q5_1"),
            (r"_exps", "q4_K"),
            (r"", "q8_0"),
        ),
        source=_FLASH_NEXT_SOURCE,
        llama_cpp="0.4.0",
        remarks="The reference model. 28.8 GB of it are an n-gram table that stays on the disk and is read on demand. "
        "Split into shards, so not for Ollama.",
        tags=("reference",),
    ),
    CatalogueModel(
        name="qwen3.8-flash-next-ud-q2_k_xl",
        title="Qwen3.8 Flash Next, UD-Q2_K_XL",
        repository="unsloth/Qwen3.8-Flash-Next-GGUF",
        revision="main",
        files=_shards(
            "UD-Q2_K_XL",
            "Qwen3.8-Flash-Next-UD-Q2_K_XL",
            (
                (10_946_624, "a4f3b21e77353999829f2f767e9ac21ce9c71d29a74f2cc9eda48c9bf23c8b86"),
                (49_979_779_296, "2e3bf1ee7d2a04e261e9f342a2d968f696cce5941d082b0e434deb9b1edc12c6"),
                (28_878_402_944, "ec8c106759fdf4f463039c34c0707718d7d8908d53d892bd4f002e71620803f9"),
            ),
        ),
        licence="Qwen Community License 1.0",
        metadata=_FLASH_NEXT,
        types=(
            (r"^per_layer", "iq4_nl"),
            (r"ffn_down_exps", "iq4_nl"),
            (r"^blk\.2\.ffn_(gate|up)_exps", "iq3_xxs"),
            (r"_exps", "iq2_xs"),
            (r"^(token_embd|output\.)|attn_|ssm_|hc_", "q6_K"),
            (r"", "q8_0"),
        ),
        source=_FLASH_NEXT_SOURCE,
        llama_cpp="0.4.0",
        remarks="The same model for half of the memory: two cards of 32 GB, or more room for context on four.",
    ),
    CatalogueModel(
        name="qwen3-30b-a3b-q4_k_m",
        title="Qwen3 30B A3B, Q4_K_M",
        repository="Qwen/Qwen3-30B-A3B-GGUF",
        revision="main",
        files=(ModelFile("Qwen3-30B-A3B-Q4_K_M.gguf"),),
        licence="Apache-2.0",
        metadata=_keys(
            "qwen3moe",
            {
                "vocab_size": 151936,
                "context_length": 40960,
                "block_count": 48,
                "embedding_length": 2048,
                "attention.head_count": 32,
                "attention.head_count_kv": 4,
                "attention.key_length": 128,
                "attention.value_length": 128,
                "expert_count": 128,
                "expert_used_count": 8,
                "expert_feed_forward_length": 768,
            },
        ),
        types=_q4_k_m(48),
        source="configuration of Qwen/Qwen3-30B-A3B; Ollama library qwen3:30b-a3b",
        llama_cpp="0.1.0",
        ollama="0.6.6",
        ollama_tag="qwen3:30b-a3b",
        driver_535="llama_cpp, ollama 0.24.0",
        remarks="Runs on one card of 32 GB, under driver 535 with Ollama 0.24.0 as well.",
        tags=("ollama-535",),
    ),
    CatalogueModel(
        name="gpt-oss-20b-mxfp4",
        title="gpt-oss 20B, MXFP4",
        repository="ggml-org/gpt-oss-20b-GGUF",
        revision="main",
        files=(ModelFile("gpt-oss-20b-mxfp4.gguf"),),
        licence="Apache-2.0",
        metadata=_keys(
            "gpt-oss",
            {
                "vocab_size": 201088,
                "context_length": 131072,
                "block_count": 24,
                "embedding_length": 2880,
                "attention.head_count": 64,
                "attention.head_count_kv": 8,
                "attention.key_length": 64,
                "attention.value_length": 64,
                "attention.sliding_window": 128,
                "expert_count": 32,
                "expert_used_count": 4,
                "expert_feed_forward_length": 2880,
            },
        ),
        types=((r"_exps\.weight", "mxfp4"), (r"", "q8_0")),
        source="configuration of openai/gpt-oss-20b; Ollama library gpt-oss:20b",
        llama_cpp="0.1.0",
        ollama="0.11.0",
        ollama_tag="gpt-oss:20b",
        driver_535="llama_cpp, ollama 0.24.0",
        tags=("ollama-535",),
    ),
    CatalogueModel(
        name="qwen3-8b-q4_k_m",
        title="Qwen3 8B, Q4_K_M",
        repository="Qwen/Qwen3-8B-GGUF",
        revision="main",
        files=(ModelFile("Qwen3-8B-Q4_K_M.gguf"),),
        licence="Apache-2.0",
        metadata=_dense("qwen3", 36, 4096, 32, 8, 12288, 151936),
        types=_q4_k_m(36),
        source="configuration of Qwen/Qwen3-8B; Ollama library qwen3:8b",
        llama_cpp="0.1.0",
        ollama="0.6.6",
        ollama_tag="qwen3:8b",
        driver_535="llama_cpp, ollama 0.24.0",
        tags=("ollama-535",),
    ),
    CatalogueModel(
        name="llama-3.1-8b-q4_k_m",
        title="Llama 3.1 8B Instruct, Q4_K_M",
        repository="bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
        revision="main",
        files=(ModelFile("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"),),
        licence="Llama 3.1 Community License",
        metadata=_dense("llama", 32, 4096, 32, 8, 14336, 128256),
        types=_q4_k_m(32),
        source="configuration of meta-llama/Llama-3.1-8B-Instruct; Ollama library llama3.1:8b",
        llama_cpp="0.1.0",
        ollama="0.3.0",
        ollama_tag="llama3.1:8b",
        driver_535="llama_cpp, ollama 0.24.0",
        tags=("ollama-535",),
    ),
    CatalogueModel(
        name="qwen3-0.6b-q8_0",
        title="Qwen3 0.6B, Q8_0",
        repository="Qwen/Qwen3-0.6B-GGUF",
        revision="main",
        files=(ModelFile("Qwen3-0.6B-Q8_0.gguf"),),
        licence="Apache-2.0",
        metadata=_dense("qwen3", 28, 1024, 16, 8, 3072, 151936),
        types=((r"", "q8_0"),),
        source="configuration of Qwen/Qwen3-0.6B; Ollama library qwen3:0.6b",
        llama_cpp="0.1.0",
        ollama="0.6.6",
        ollama_tag="qwen3:0.6b",
        driver_535="llama_cpp, ollama 0.24.0",
        tied=True,
        remarks="For trials: less than a GB, and it runs on any card.",
        tags=("trial", "ollama-535"),
    ),
)

BY_NAME: dict[str, CatalogueModel] = {model.name: model for model in MODELS}


def find_model(name: str) -> CatalogueModel | None:
    """The model of a catalogue name (case does not matter), null for any other text."""
    return BY_NAME.get(name.strip().lower())


def nearest_name(name: str) -> str:
    """The catalogue's name that is most like ``name``; the reference model's where none is."""
    asked = name.strip().lower()
    begins = [known for known in BY_NAME if asked and known.startswith(asked)]
    return (begins or difflib.get_close_matches(asked, BY_NAME, n=1) or list(BY_NAME))[0]
