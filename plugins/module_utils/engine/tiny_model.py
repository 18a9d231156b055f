# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A GGUF file of a few hundred kilobytes that a built engine is tried on: made here, so that nothing has to be fetched.

Architecture ``llama`` without a vocabulary, weights in Q4_0: it takes the engine through quantised matrix products,
attention and sampling sizes, and answers nothing of use.
"""

from __future__ import annotations

import struct
from pathlib import Path

_U32, _F32, _STRING = 4, 6, 8
_Q4_0 = 2
ALIGNMENT = 32

EMBEDDING = 256
HEADS = 4
FEED_FORWARD = 256
VOCABULARY = 64
CONTEXT = 256


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(key: str, value: str | int | float) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", _STRING) + _text(value)
    kind, form = (_F32, "<If") if isinstance(value, float) else (_U32, "<II")
    return _text(key) + struct.pack(form, kind, value)


def _q4_0(columns: int, rows: int) -> bytes:
    """Blocks of 32 weights: a scale of 1/64 as f16, and nibbles that differ from place to place."""
    blocks = columns // 32 * rows
    scale = struct.pack("<e", 1 / 64)
    return b"".join(scale + bytes((number * 7 + place * 13) & 0xFF for place in range(16)) for number in range(blocks))


def tiny_model(layers: int) -> bytes:
    """The whole file; with a layer for each GPU the engine has to compute on all of them."""
    values: dict[str, str | int | float] = {
        "general.architecture": "llama",
        "general.name": "volta.llm proof of a build",
        "general.quantization_version": 2,
        "llama.block_count": layers,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": EMBEDDING,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": EMBEDDING // HEADS,
        "llama.vocab_size": VOCABULARY,
        "tokenizer.ggml.model": "no_vocab",
    }
    ones = struct.pack("<f", 1.0) * EMBEDDING
    square = _q4_0(EMBEDDING, EMBEDDING)
    tensors: list[tuple[str, tuple[int, ...], int, bytes]] = [
        ("token_embd.weight", (EMBEDDING, VOCABULARY), _Q4_0, _q4_0(EMBEDDING, VOCABULARY)),
        ("output_norm.weight", (EMBEDDING,), 0, ones),
        ("output.weight", (EMBEDDING, VOCABULARY), _Q4_0, _q4_0(EMBEDDING, VOCABULARY)),
    ]
    for layer in range(layers):
        tensors += [(f"blk.{layer}.{name}_norm.weight", (EMBEDDING,), 0, ones) for name in ("attn", "ffn")]
        tensors += [
            (f"blk.{layer}.{name}.weight", (EMBEDDING, EMBEDDING), _Q4_0, square)
            for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(_value(key, value) for key, value in values.items())
    offset = 0
    parts = []
    for name, shape, kind, content in tensors:
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)
        parts.append(_padded(content))
        offset += len(parts[-1])
    return _padded(head) + b"".join(parts)


def _padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % ALIGNMENT)


def write_tiny_model(path: Path, layers: int) -> Path:
    path.write_bytes(tiny_model(layers))
    path.chmod(0o644)
    return path
