# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A small GGUF file with all that Ollama tells of a model: architecture, parameters, quantisation, context.

Its tensors have the names and shapes of an architecture ``llama`` model and hold a pattern. Nobody computes with it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_U32, _F32, _STRING, _ARRAY = 4, 6, 8, 9
_Q4_0 = 2
ALIGNMENT = 32
EMBEDDING = 256
FEED_FORWARD = 512
HEADS, KV_HEADS = 8, 4
VOCABULARY = 512
CONTEXT = 32768

Value = str | int | float | Sequence[str]


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(key: str, value: Value) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, float):
        return _text(key) + struct.pack("<If", _F32, value)
    if isinstance(value, int):
        return _text(key) + struct.pack("<II", _U32, value)
    items = b"".join(_text(item) for item in value)
    return _text(key) + struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + items


def _q4_0(columns: int, rows: int) -> bytes:
    scale = struct.pack("<e", 1 / 64)
    blocks = columns // 32 * rows
    return b"".join(scale + bytes((number * 7 + place * 13) & 0xFF for place in range(16)) for number in range(blocks))


def _padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % ALIGNMENT)


def small_gguf(
    *,
    layers: int = 4,
    context: int = CONTEXT,
    architecture: str = "llama",
    name: str = "Volta Small",
    split: int = 0,
    embedding: bool = False,
) -> bytes:
    """The whole file, the same for the same arguments. With ``split`` it says it is the first of so many shards, with
    ``embedding`` that its answers are vectors."""
    values: dict[str, Value] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.size_label": "1M",
        "general.file_type": 2,
        "general.quantization_version": 2,
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": context,
        f"{architecture}.embedding_length": EMBEDDING,
        f"{architecture}.feed_forward_length": FEED_FORWARD,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.dimension_count": EMBEDDING // HEADS,
        f"{architecture}.vocab_size": VOCABULARY,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [f"t{number}" for number in range(VOCABULARY)],
    }
    if embedding:
        values[f"{architecture}.pooling_type"] = 1
    if split:
        values |= {"split.no": 0, "split.count": split}
    head_size = EMBEDDING // HEADS
    shapes: dict[str, tuple[int, int]] = {
        "attn_q": (EMBEDDING, EMBEDDING),
        "attn_k": (EMBEDDING, KV_HEADS * head_size),
        "attn_v": (EMBEDDING, KV_HEADS * head_size),
        "attn_output": (EMBEDDING, EMBEDDING),
        "ffn_gate": (EMBEDDING, FEED_FORWARD),
        "ffn_up": (EMBEDDING, FEED_FORWARD),
        "ffn_down": (FEED_FORWARD, EMBEDDING),
    }
    tensors: list[tuple[str, tuple[int, ...], int, bytes]] = [
        ("token_embd.weight", (EMBEDDING, VOCABULARY), _Q4_0, _q4_0(EMBEDDING, VOCABULARY)),
        ("output_norm.weight", (EMBEDDING,), 0, struct.pack("<f", 1.0) * EMBEDDING),
        ("output.weight", (EMBEDDING, VOCABULARY), _Q4_0, _q4_0(EMBEDDING, VOCABULARY)),
    ]
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            tensors.append((f"blk.{layer}.{norm}.weight", (EMBEDDING,), 0, struct.pack("<f", 1.0) * EMBEDDING))
        for part, shape in shapes.items():
            tensors.append((f"blk.{layer}.{part}.weight", shape, _Q4_0, _q4_0(*shape)))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(_value(key, value) for key, value in values.items())
    offset = 0
    parts = []
    for tensor, dims, kind, content in tensors:
        head += _text(tensor) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        parts.append(_padded(content))
        offset += len(parts[-1])
    return _padded(head) + b"".join(parts)
