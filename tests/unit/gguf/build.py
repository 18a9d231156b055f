# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Makes GGUF bytes field by field, so that tests can also make wrong ones."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def text(value: str | bytes, order: str = "<") -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack(order + "Q", len(raw)) + raw


def key(name: str, number: int, value: bytes, order: str = "<") -> bytes:
    return text(name, order) + struct.pack(order + "I", number) + value


def tensor(name: str, shape: Iterable[int], kind: int, offset: int, order: str = "<") -> bytes:
    sizes = list(shape)
    return (
        text(name, order)
        + struct.pack(f"{order}I{len(sizes)}q", len(sizes), *sizes)
        + struct.pack(order + "IQ", kind, offset)
    )


def header(
    keys: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    version: int = 3,
    order: str = "<",
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    listed, described = list(keys), list(tensors)
    counts = (
        len(described) if tensor_count is None else tensor_count,
        len(listed) if key_count is None else key_count,
    )
    return b"GGUF" + struct.pack(order + "Iqq", version, *counts) + b"".join(listed) + b"".join(described)


def real(path: Path, split_after: int = 0, big: bool = False, keys: dict[str, Any] | None = None) -> Path:
    """A small whole model file, or shard set, written by the gguf package; returns the (first) file."""
    writer = gguf.GGUFWriter(
        path,
        "llama",
        endianess=gguf.GGUFEndian.BIG if big else gguf.GGUFEndian.LITTLE,
        split_max_tensors=split_after,
    )
    writer.add_name("Small")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_array("llama.attention.head_count_kv", [2, 4])
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_token_list([f"token{number}" for number in range(3000)])
    writer.add_array("small.words", ["one", "zwei", "三"])
    for name, value in (keys or {}).items():
        writer.add_uint32(name, value)
    rng = np.random.default_rng(1)
    for name, shape, kind in (
        ("token_embd.weight", (64, 256), gguf.GGMLQuantizationType.Q8_0),
        ("blk.0.attn_norm.weight", (255,), gguf.GGMLQuantizationType.F32),
        ("blk.0.ffn_down_exps.weight", (4, 8, 32), gguf.GGMLQuantizationType.Q4_0),
        ("blk.1.attn_norm.weight", (256,), gguf.GGMLQuantizationType.F16),
    ):
        values = rng.standard_normal(shape).astype(np.float32)
        data = gguf.quants.quantize(values, kind) if kind != gguf.GGMLQuantizationType.F32 else values
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split_after:
        count = -(-4 // split_after)
        return path.with_name(f"{path.stem}-00001-of-{count:05d}.gguf")
    return path
