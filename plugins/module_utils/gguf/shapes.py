# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The tensors that a model of a known architecture has, from its metadata alone.

So that a model can be planned for before any of its files is at hand: the catalogue holds metadata, this gives names
and shapes as llama.cpp 0.5.0-dev expects them (src/models/NAME.cpp, load_arch_tensors; names: src/llama-arch.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .reader import Header, Tensor
from .types import TENSOR_TYPE_BY_NAME, TensorType

#: Name and shape, rows first.
Shape = tuple[str, tuple[int, ...]]
#: Chooses the type of a matrix by its name and shape.
Pick = Callable[[str, tuple[int, ...]], str]


class _Dimensions:
    """Metadata of one architecture by short key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.architecture = str(metadata["general.architecture"])
        self._metadata = metadata

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self._metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int):
            raise KeyError(f"{self.architecture}.{key}")
        return value

    @property
    def vocabulary(self) -> int:
        return self("vocab_size")

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, size of a key head, size of a value head."""
        heads = self("attention.head_count")
        size = self("embedding_length") // heads
        key = self("attention.key_length", size)
        return heads, self("attention.head_count_kv", heads), key, self("attention.value_length", size)


def _experts(d: _Dimensions, at: str) -> Iterator[Shape]:
    n, ff, count = d("embedding_length"), d("expert_feed_forward_length"), d("expert_count")
    yield f"{at}ffn_gate_inp.weight", (n, count)
    yield f"{at}ffn_gate_exps.weight", (n, ff, count)
    yield f"{at}ffn_up_exps.weight", (n, ff, count)
    yield f"{at}ffn_down_exps.weight", (ff, n, count)


def _feed_forward(at: str, n: int, ff: int, suffix: str = "") -> Iterator[Shape]:
    yield f"{at}ffn_gate{suffix}.weight", (n, ff)
    yield f"{at}ffn_up{suffix}.weight", (n, ff)
    yield f"{at}ffn_down{suffix}.weight", (ff, n)


def _attention(d: _Dimensions, at: str, gated: bool = False, norms: bool = True) -> Iterator[Shape]:
    n = d("embedding_length")
    heads, kv_heads, key, value = d.heads
    yield f"{at}attn_q.weight", (n, heads * key * (2 if gated else 1))
    yield f"{at}attn_k.weight", (n, kv_heads * key)
    yield f"{at}attn_v.weight", (n, kv_heads * value)
    yield f"{at}attn_output.weight", (heads * value, n)
    if norms:
        yield f"{at}attn_q_norm.weight", (key,)
        yield f"{at}attn_k_norm.weight", (key,)


def _ends(d: _Dimensions, tied: bool) -> Iterator[Shape]:
    n = d("embedding_length")
    yield "token_embd.weight", (n, d.vocabulary)
    yield "output_norm.weight", (n,)
    if not tied:
        yield "output.weight", (n, d.vocabulary)


def _delta_net(d: _Dimensions, at: str, split_gates: bool) -> Iterator[Shape]:
    """A gated-delta-net layer's mixer; ``split_gates``: alpha and beta apart (Qwen3.5 and later)."""
    n, state, inner = d("embedding_length"), d("ssm.state_size"), d("ssm.inner_size")
    keys, values = state * d("ssm.group_count"), d("ssm.time_step_rank")
    yield f"{at}attn_qkv.weight", (n, 2 * keys + inner)
    yield f"{at}attn_gate.weight", (n, inner)
    yield f"{at}ssm_conv1d.weight", (d("ssm.conv_kernel"), 2 * keys + inner)
    yield f"{at}ssm_dt.bias", (values,)
    yield f"{at}ssm_a", (values,)
    if split_gates:
        yield f"{at}ssm_beta.weight", (n, values)
        yield f"{at}ssm_alpha.weight", (n, values)
    else:
        yield f"{at}ssm_ba.weight", (n, 2 * values)
    yield f"{at}ssm_norm.weight", (state,)
    yield f"{at}ssm_out.weight", (inner, n)


def _dense(d: _Dimensions, tied: bool) -> Iterator[Shape]:
    """llama, qwen3: attention and one feed-forward network; qwen3moe: experts instead."""
    n = d("embedding_length")
    yield from _ends(d, tied)
    for layer in range(d("block_count")):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (n,)
        yield from _attention(d, at, norms=d.architecture != "llama")
        yield f"{at}ffn_norm.weight", (n,)
        if d("expert_count", 0):
            yield from _experts(d, at)
        else:
            yield from _feed_forward(at, n, d("feed_forward_length"))


def _hybrid(d: _Dimensions, tied: bool) -> Iterator[Shape]:
    """qwen3next, qwen35moe: full attention in every fourth layer, gated delta nets in the others."""
    n = d("embedding_length")
    yield from _ends(d, tied)
    for layer in range(d("block_count")):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (n,)
        yield f"{at}post_attention_norm.weight", (n,)
        if (layer + 1) % d("full_attention_interval", 4):
            yield from _delta_net(d, at, split_gates=d.architecture != "qwen3next")
        else:
            yield from _attention(d, at, gated=True)
        yield from _experts(d, at)
        yield f"{at}ffn_gate_inp_shexp.weight", (n,)
        yield from _feed_forward(at, n, d("expert_shared_feed_forward_length"), "_shexp")


def _qwen4exp(d: _Dimensions, tied: bool) -> Iterator[Shape]:
    n, streams, rank = d("embedding_length"), d("hyper_connection.count"), d("hyper_connection.low_rank")
    wide = n * streams
    yield "token_embd.weight", (n, d.vocabulary)
    yield "output_hc_norm.weight", (wide,)
    yield "output_hc_down.weight", (wide, rank)
    yield "output_hc_up.weight", (rank, wide)
    if not tied:
        yield "output.weight", (n, d.vocabulary)
    yield "per_layer_token_embd.weight", (d("embedding_length_per_layer_input"), d("volta.table_rows"))
    for layer in range(d("block_count")):
        at = f"blk.{layer}."
        for part in ("attn", "ffn"):
            yield f"{at}hc_{part}_norm.weight", (wide,)
            yield f"{at}hc_{part}_down.weight", (wide, rank)
            yield f"{at}hc_{part}_up.weight", (rank, wide)
            yield f"{at}hc_{part}_inject.weight", (wide, streams)
        if (layer + 1) % d("full_attention_interval", 4):
            yield from _delta_net(d, at, split_gates=True)
        else:
            yield from _attention(d, at, gated=True)
            size = d("attention.indexer.key_length")
            yield f"{at}indexer.q_proj.weight", (n, d("attention.indexer.head_count") * size)
            yield f"{at}indexer.k_proj.weight", (n, size)
            yield f"{at}indexer.q_norm.weight", (size,)
            yield f"{at}indexer.k_norm.weight", (size,)
        if layer == d("volta.table_layer"):
            yield f"{at}ple_key.weight", (n, wide)
            yield f"{at}ple_value.weight", (n, n)
            for part in ("key", "query", "conv"):
                yield f"{at}ple_norm_{part}.weight", (wide,)
            yield f"{at}ple_conv1d.weight", (d("ple.conv_kernel"), wide)
        yield from _experts(d, at)
        yield f"{at}ffn_gate_inp_shexp.weight", (n,)
        yield from _feed_forward(at, n, d("expert_shared_feed_forward_length"), "_shexp")


def _gpt_oss(d: _Dimensions, tied: bool) -> Iterator[Shape]:
    n, ff, count = d("embedding_length"), d("expert_feed_forward_length"), d("expert_count")
    heads, kv_heads, size, _ = d.heads
    yield from _ends(d, tied)
    for layer in range(d("block_count")):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (n,)
        yield f"{at}post_attention_norm.weight", (n,)
        yield from _attention(d, at, norms=False)
        yield f"{at}attn_q.bias", (heads * size,)
        yield f"{at}attn_k.bias", (kv_heads * size,)
        yield f"{at}attn_v.bias", (kv_heads * size,)
        yield f"{at}attn_output.bias", (n,)
        yield f"{at}attn_sinks.weight", (heads,)
        yield from _experts(d, at)
        yield f"{at}ffn_gate_inp.bias", (count,)
        yield f"{at}ffn_gate_exps.bias", (ff, count)
        yield f"{at}ffn_up_exps.bias", (ff, count)
        yield f"{at}ffn_down_exps.bias", (n, count)


def _deepseek2(d: _Dimensions, tied: bool) -> Iterator[Shape]:
    n, heads = d("embedding_length"), d("attention.head_count")
    rank, rotated = d("attention.kv_lora_rank"), d("rope.dimension_count")
    key, value = d("attention.key_length_mla"), d("attention.value_length_mla")
    query_rank = d("attention.q_lora_rank", 0)
    yield from _ends(d, tied)
    for layer in range(d("block_count")):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (n,)
        if query_rank:
            yield f"{at}attn_q_a_norm.weight", (query_rank,)
            yield f"{at}attn_q_a.weight", (n, query_rank)
            yield f"{at}attn_q_b.weight", (query_rank, heads * key)
        else:
            yield f"{at}attn_q.weight", (n, heads * key)
        yield f"{at}attn_kv_a_norm.weight", (rank,)
        yield f"{at}attn_kv_a_mqa.weight", (n, rank + rotated)
        yield f"{at}attn_k_b.weight", (key - rotated, rank, heads)
        yield f"{at}attn_v_b.weight", (rank, value, heads)
        yield f"{at}attn_output.weight", (heads * value, n)
        yield f"{at}ffn_norm.weight", (n,)
        if layer < d("leading_dense_block_count", 0):
            yield from _feed_forward(at, n, d("feed_forward_length"))
        else:
            yield from _experts(d, at)
            shared = d("expert_feed_forward_length") * d("expert_shared_count")
            yield from _feed_forward(at, n, shared, "_shexp")


def _glm4moe(d: _Dimensions, tied: bool) -> Iterator[Shape]:
    n, predicted = d("embedding_length"), d("nextn_predict_layers", 0)
    heads, kv_heads, size, _ = d.heads
    yield from _ends(d, tied)
    for layer in range(d("block_count")):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (n,)
        yield from _attention(d, at, norms=False)
        yield f"{at}attn_q.bias", (heads * size,)
        yield f"{at}attn_k.bias", (kv_heads * size,)
        yield f"{at}attn_v.bias", (kv_heads * size,)
        yield f"{at}post_attention_norm.weight", (n,)
        if layer < d("leading_dense_block_count", 0):
            yield from _feed_forward(at, n, d("feed_forward_length"))
        else:
            yield from _experts(d, at)
            yield f"{at}exp_probs_b.bias", (d("expert_count"),)
            shared = d("expert_feed_forward_length") * d("expert_shared_count")
            yield from _feed_forward(at, n, shared, "_shexp")
        if layer >= d("block_count") - predicted:
            yield f"{at}nextn.eh_proj.weight", (2 * n, n)
            yield f"{at}nextn.enorm.weight", (n,)
            yield f"{at}nextn.hnorm.weight", (n,)
            yield f"{at}nextn.shared_head_norm.weight", (n,)


_BUILDERS: dict[str, Callable[[_Dimensions, bool], Iterator[Shape]]] = {
    "llama": _dense,
    "qwen3": _dense,
    "qwen3moe": _dense,
    "qwen3next": _hybrid,
    "qwen35moe": _hybrid,
    "qwen4exp": _qwen4exp,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4moe,
}

#: What the converter and llama-quantize leave in F32 whatever the type of the others.
_KEPT_WHOLE = (
    "_norm.weight",
    ".bias",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "conv1d.weight",
    "sinks.weight",
)


def _kept_whole(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 or name.endswith(_KEPT_WHOLE) or name.endswith("ssm_a") or "_norm_" in name


def _fitting(kind: TensorType, row: int) -> TensorType:
    """``kind``, or what llama-quantize falls back to where rows are no multiple of its block (src/llama-quant.cpp)."""
    fallback = {"q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0", "q3_K": "iq4_nl", "q2_K": "iq4_nl", "iq3_xxs": "iq4_nl"}
    if row % kind.block == 0:
        return kind
    smaller = TENSOR_TYPE_BY_NAME[fallback.get(kind.name, "f16")]
    return smaller if row % smaller.block == 0 else TENSOR_TYPE_BY_NAME["f16"]


def header_of(metadata: Mapping[str, Any], pick: Pick, tied: bool = False) -> Header:
    """The header that a model with this metadata would have, without data.

    ``{arch}.vocab_size`` is needed; qwen4exp needs ``volta.table_rows`` and ``volta.table_layer`` as well, which its
    files hold in the shape of the table and in ple.layers. KeyError names what is missing.
    """
    d = _Dimensions(metadata)
    tensors: list[Tensor] = []
    offset = 0
    for name, shape in _BUILDERS[d.architecture](d, tied):
        kind = TENSOR_TYPE_BY_NAME["f32" if _kept_whole(name, shape) else pick(name, shape)]
        tensor = Tensor(name, shape, _fitting(kind, shape[0]), offset)
        tensors.append(tensor)
        offset += (tensor.bytes + 31) // 32 * 32
    return Header(metadata=dict(metadata), tensors=tensors, header_only=True)
