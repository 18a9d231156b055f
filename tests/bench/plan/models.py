# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Model files for measuring: real metadata and tensor lists, data that is a hole in the file.

Standard library only, so that it runs on a borrowed machine. Every weight is zero; that is enough to load, to answer,
and to need the same memory as the real thing.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def _collections() -> Path:
    """Where ansible_collections can be imported from. A copy of the tree may have lost the links of .collections."""
    usual = ROOT / ".collections"
    if (usual / "ansible_collections/volta/llm/plugins/module_utils").is_dir():
        return usual
    folder = Path(tempfile.mkdtemp(prefix="volta-collections-"))
    (folder / "ansible_collections/volta").mkdir(parents=True)
    (folder / "ansible_collections/volta/llm").symlink_to(ROOT, target_is_directory=True)
    return folder


sys.path.insert(0, str(_collections()))

from ansible_collections.volta.llm.plugins.module_utils.gguf.reader import Header
from ansible_collections.volta.llm.plugins.module_utils.gguf.shapes import header_of

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
#: Keys whose arrays the engine reads as 64 bits.
_WIDE = ("ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes")


def _all(kind: str) -> Any:
    return lambda name, shape: "q8_0" if name.startswith(("token_embd", "output.")) else kind


def _q4(name: str, shape: tuple[int, ...]) -> str:
    if name.startswith("per_layer"):
        return "iq4_nl"
    if name.startswith("token_embd") or "hc_" in name:
        return "q8_0"
    return "q6_K" if name.startswith("output.") or name.endswith("attn_v.weight") else "q4_K"


def _mxfp4(name: str, shape: tuple[int, ...]) -> str:
    return "mxfp4" if "exps" in name else "q8_0"


def metadata(architecture: str, **values: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"general.architecture": architecture, "general.name": f"Measured {architecture}"}
    fields.update({f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()})
    return fields


def qwen4exp(layers: int = 48, experts: int = 512, rows: int = 320_001_536) -> dict[str, Any]:
    """Qwen3.8-Flash-Next; fewer experts or table rows make a smaller file of the same depth."""
    heads = 16
    per_head = rows // heads
    return metadata(
        "qwen4exp",
        vocab_size=248320, context_length=262144, block_count=layers, embedding_length=2560, feed_forward_length=640,
        attention__head_count=24, attention__head_count_kv=2, attention__key_length=256, attention__value_length=256,
        attention__layer_norm_rms_epsilon=1e-6,
        attention__indexer__head_count=4, attention__indexer__key_length=128, attention__indexer__top_k=2048,
        attention__compress_ratios=[4 if layer % 4 == 3 else 0 for layer in range(layers)],
        rope__dimension_count=64, rope__dimension_sections=[11, 11, 10, 0], rope__freq_base=1e7,
        full_attention_interval=4,
        ssm__conv_kernel=4, ssm__inner_size=6144, ssm__state_size=128, ssm__time_step_rank=48, ssm__group_count=16,
        hyper_connection__count=4, hyper_connection__low_rank=320,
        ple__layers=[1], ple__ngram_size=3, ple__heads_per_ngram=8, ple__conv_kernel=4, ple__eos_token_id=248044,
        ple__layer_multipliers=[29486546137819, 12691501986567, 26658250333363],
        ple__head_offsets=[head * per_head for head in range(heads)], ple__head_vocab_sizes=[per_head] * heads,
        embedding_length_per_layer_input=160,
        expert_count=experts, expert_used_count=10, expert_feed_forward_length=640,
        expert_shared_feed_forward_length=640,
        volta__table_rows=rows, volta__table_layer=1,
    )  # fmt: skip


def qwen3moe(layers: int = 48, experts: int = 128) -> dict[str, Any]:
    return metadata(
        "qwen3moe",
        vocab_size=151936, context_length=262144, block_count=layers, embedding_length=2048, feed_forward_length=6144,
        attention__head_count=32, attention__head_count_kv=4, attention__key_length=128, attention__value_length=128,
        attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1e7,
        expert_count=experts, expert_used_count=8, expert_feed_forward_length=768,
    )  # fmt: skip


def hybrid(architecture: str, layers: int, vocabulary: int, experts: int, used: int, **more: Any) -> dict[str, Any]:
    return metadata(
        architecture,
        vocab_size=vocabulary, context_length=262144, block_count=layers, embedding_length=2048,
        feed_forward_length=5120, attention__head_count=16, attention__head_count_kv=2, attention__key_length=256,
        attention__value_length=256, attention__layer_norm_rms_epsilon=1e-6,
        rope__dimension_count=64, rope__freq_base=1e7, full_attention_interval=4,
        ssm__conv_kernel=4, ssm__inner_size=4096, ssm__state_size=128, ssm__time_step_rank=32, ssm__group_count=16,
        expert_count=experts, expert_used_count=used, expert_feed_forward_length=512,
        expert_shared_feed_forward_length=512, **more,
    )  # fmt: skip


def dense(
    architecture: str, layers: int, n: int, heads: int, kv_heads: int, ff: int, vocabulary: int
) -> dict[str, Any]:
    return metadata(
        architecture,
        vocab_size=vocabulary, context_length=131072, block_count=layers, embedding_length=n, feed_forward_length=ff,
        attention__head_count=heads, attention__head_count_kv=kv_heads, attention__key_length=128,
        attention__value_length=128, attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1e6,
        rope__dimension_count=128,
    )  # fmt: skip


MODELS: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "qwen4exp": (qwen4exp(), _q4, False),
    "qwen4exp-small": (qwen4exp(experts=32), _q4, False),
    "qwen4exp-mid": (qwen4exp(experts=128, rows=16_000_000), _q4, False),
    "qwen4exp-tiny": (qwen4exp(layers=4, experts=16, rows=16_000), _q4, False),
    "qwen3moe": (qwen3moe(), _q4, False),
    "qwen3moe-small": (qwen3moe(experts=32), _q4, False),
    "qwen3next": (hybrid("qwen3next", 48, 151936, 512, 10), _q4, False),
    "qwen35moe": (hybrid("qwen35moe", 40, 248320, 256, 8, rope__dimension_sections=[11, 11, 10, 0]), _q4, False),
    "qwen3-8b": (dense("qwen3", 36, 4096, 32, 8, 12288, 151936), _q4, False),
    "qwen3-4b": (dense("qwen3", 36, 2560, 32, 8, 9728, 151936), _q4, True),
    "llama-8b": (dense("llama", 32, 4096, 32, 8, 14336, 128256), _q4, False),
    "gpt-oss-20b": (
        metadata(
            "gpt-oss",
            vocab_size=201088, context_length=131072, block_count=24, embedding_length=2880, feed_forward_length=2880,
            attention__head_count=64, attention__head_count_kv=8, attention__key_length=64, attention__value_length=64,
            attention__layer_norm_rms_epsilon=1e-5, attention__sliding_window=128, rope__freq_base=150000.0,
            rope__dimension_count=64,
            expert_count=32, expert_used_count=4, expert_feed_forward_length=2880,
        ), _mxfp4, False,
    ),
    "deepseek2-lite": (
        metadata(
            "deepseek2",
            vocab_size=102400, context_length=163840, block_count=27, embedding_length=2048, feed_forward_length=10944,
            attention__head_count=16, attention__head_count_kv=1,
            attention__key_length=576, attention__value_length=512,
            attention__key_length_mla=192, attention__value_length_mla=128, attention__kv_lora_rank=512,
            attention__layer_norm_rms_epsilon=1e-6, rope__dimension_count=64, rope__freq_base=10000.0,
            leading_dense_block_count=1, expert_count=64, expert_used_count=6, expert_shared_count=2,
            expert_feed_forward_length=1408, expert_weights_scale=1.0,
        ), _q4, False,
    ),
    "glm4moe-air": (
        metadata(
            "glm4moe",
            vocab_size=151552, context_length=131072, block_count=47, embedding_length=4096, feed_forward_length=10944,
            attention__head_count=96, attention__head_count_kv=8,
            attention__key_length=128, attention__value_length=128,
            attention__layer_norm_rms_epsilon=1e-5, rope__dimension_count=64, rope__freq_base=1e6,
            nextn_predict_layers=1, leading_dense_block_count=1, expert_count=128, expert_used_count=8,
            expert_shared_count=1, expert_feed_forward_length=1408, expert_weights_scale=1.0, expert_weights_norm=True,
        ), _q4, False,
    ),
}  # fmt: skip


def header(name: str) -> Header:
    fields, pick, tied = MODELS[name]
    return header_of(fields, pick, tied)


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(_text(item) for item in value)
    wide = key.endswith(_WIDE)
    form = "Q" if wide else "i"
    return struct.pack(f"<IIQ{len(value)}{form}", ARRAY, U64 if wide else I32, len(value), *value)


def _tokenizer(size: int) -> dict[str, Any]:
    """A byte-level vocabulary that can write any text, and as many further tokens as the real one has."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = [*letters, *(f"token{number}" for number in range(size - len(letters) - 1)), "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (size - 1) + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def write(name: str, folder: Path) -> Path:
    """Write the file of one of MODELS; its data is a hole, so it takes some megabytes of disk."""
    model = header(name)
    architecture = model.architecture
    fields = {key: value for key, value in model.metadata.items() if ".volta." not in key}
    fields.update(_tokenizer(model.metadata[f"{architecture}.vocab_size"]))
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(model.tensors), len(fields))]
    parts += [_text(key) + _value(key, value) for key, value in fields.items()]
    for tensor in model.tensors:
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        parts.append(_text(tensor.name) + shape + struct.pack("<IQ", tensor.type.number, tensor.offset))
    content = b"".join(parts)
    path = folder / f"{name}.gguf"
    with path.open("wb") as handle:
        handle.write(content)
        start = (len(content) + 31) // 32 * 32
        os.truncate(handle.fileno(), start + (model.data_bytes + 31) // 32 * 32)
    return path


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for wanted in sys.argv[2:] or MODELS:
        print(write(wanted, target))
