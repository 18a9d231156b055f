# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Writes the model. Names and shapes follow llama.cpp's src/models/qwen4exp.cpp, sizes are as small as they may be.

The bytes are the same everywhere: random numbers come from a bit generator whose stream NumPy guarantees (PCG64), one
for each tensor, and are turned into weights with single IEEE operations only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from .source import sha256_of

Array = npt.NDArray[np.float32]

ARCHITECTURE = "qwen4exp"
STEM = "volta-demo-qwen4exp-Q8_0"
SHARDS = 2
SEED = 20260827

END_OF_TURN = "<|im_end|>"
LINE_BREAK = "\u010a"  # as byte-level BPE writes it
#: What answers are made of: plain words, so that random ones offend nobody on a demo's screen.
WORDS = tuple(
    """
    the and with from that this when then here there where while under over into about after before between through
    one two three four five six seven eight nine ten many few some more most every each other first last next new old
    long short high low deep wide small large light dark warm cold fast slow open clear quiet bright early late
    river water rain snow wind cloud sun moon star sky earth stone rock sand tree wood forest leaf flower grass garden
    field hill mountain valley island sea lake beach bridge road path way house home door window wall room table chair
    bird fish horse cat dog bread milk salt sugar fruit apple orange lemon rice soup tea coffee cup plate bowl
    red green blue yellow white black silver gold copper iron glass paper ink pen book page letter word line song music
    day night morning evening hour minute week month year spring summer autumn winter season time clock
    walk run swim climb carry hold give take bring send read write draw paint build make find keep turn move rest
    north south east west left right up down near far inside outside above below across around along again always often
    memory model layer token server system engine signal number value level point circle square shape color sound
""".split()  # noqa: SIM905
)
#: Channels of the hidden state that no layer writes to. They carry one fixed fact about the last token to the output:
#: every token has CONSTANT, so that the output can favour words; MAY_END is set by a full stop, so that answers end,
#: and is negative for the line break that comes before an answer, so that none is empty.
CONSTANT, MAY_END, RESERVED = 0, 1, 2


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; in brackets those of Qwen3.8-Flash-Next."""

    layers: int = 8  # (48)
    attention_interval: int = 4  # every fourth layer has attention (4)
    context: int = 262144  # (262144)
    embedding: int = 128  # (2560)
    heads: int = 4  # (24)
    kv_heads: int = 2  # (2)
    head_size: int = 64  # (256)
    indexer_heads: int = 2
    indexer_top_k: int = 256  # (2048)
    compress_ratio: int = 4
    streams: int = 4  # parallel residual streams of the hyper-connections
    stream_rank: int = 32
    experts: int = 32  # (512)
    experts_used: int = 4  # (10)
    expert_ff: int = 64  # (640)
    state_size: int = 32  # of a gated delta net head (128)
    key_heads: int = 2
    value_heads: int = 4
    conv_kernel: int = 4
    ngram: int = 3
    ngram_heads: int = 2  # for each n-gram length
    ngram_rows: int = 32749  # for each head; a prime, as a hash table wants

    @property
    def table_heads(self) -> int:
        return (self.ngram - 1) * self.ngram_heads

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.state_size

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.state_size

    def has_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_interval == 0


@dataclass(frozen=True)
class Vocabulary:
    """The fields of the vocabulary file that the model takes over, and what is known of its tokens."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    pre: str
    chat_template: str

    @property
    def words(self) -> npt.NDArray[np.int64]:
        """Ids of WORDS, each with the space before it."""
        # U+0120 stands for a space in byte-level BPE.
        return np.array([self.tokens.index(f"\u0120{word}") for word in WORDS], dtype=np.int64)


def generate(vocabulary: Path, out: Path, shape: Shape | None = None) -> list[dict[str, str | int]]:
    """Write the shards and manifest.json into ``out``; return the manifest's files (name, size, sha256).

    Files appear under their names only when whole. Of several that write into one folder each waits for the one before.
    """
    shape = shape or Shape()
    words = read_vocabulary(vocabulary)
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        return _generate(vocabulary, out, shape, words)
    finally:
        os.close(folder)


def _generate(vocabulary: Path, out: Path, shape: Shape, words: Vocabulary) -> list[dict[str, str | int]]:
    partial = out / f".{STEM}.partial"
    partial.mkdir(exist_ok=True)
    for leftover in partial.iterdir():
        leftover.unlink()

    tensors = list(_tensors(shape, words))
    # The first shard takes the embeddings and half of the layers; it has the longer list of the two.
    first = next(at for at, (name, _, _) in enumerate(tensors) if name.startswith(f"blk.{shape.layers // 2}."))
    assert len(tensors) <= SHARDS * first, "the second shard must not be longer than the first"
    writer = gguf.GGUFWriter(partial / f"{STEM}.gguf", ARCHITECTURE, split_max_tensors=first)
    _metadata(writer, shape, words)
    for name, kind, make in tensors:
        values = make()
        data = gguf.quants.quantize(values, kind) if kind != gguf.GGMLQuantizationType.F32 else values
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    files: list[dict[str, str | int]] = []
    for path in sorted(partial.iterdir()):
        final = path.replace(out / path.name)
        files.append({"name": final.name, "size": final.stat().st_size, "sha256": sha256_of(final)})
    partial.rmdir()
    manifest = {
        "architecture": ARCHITECTURE,
        "seed": SEED,
        "vocabulary_sha256": sha256_of(vocabulary),
        "files": files,
    }
    (partial.with_suffix(".json")).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    partial.with_suffix(".json").replace(out / "manifest.json")
    return files


def read_vocabulary(path: Path) -> Vocabulary:
    fields = gguf.GGUFReader(path).fields

    def contents(key: str) -> object:
        return fields[f"tokenizer.{key}"].contents()

    tokens, types, merges = (contents(f"ggml.{name}") for name in ("tokens", "token_type", "merges"))
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert isinstance(merges, list)
    return Vocabulary(tokens, types, merges, str(contents("ggml.pre")), str(contents("chat_template")))


def _metadata(writer: gguf.GGUFWriter, shape: Shape, vocabulary: Vocabulary) -> None:
    writer.add_name("Volta Demo Qwen4Exp")
    writer.add_description("Random weights: proves that an engine serves this architecture. It knows nothing.")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.embedding)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.expert_ff)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.experts_used)
    writer.add_expert_feed_forward_length(shape.expert_ff)
    writer.add_expert_shared_feed_forward_length(shape.expert_ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000_000.0)
    # A quarter of each head is rotated, in three interleaved sections for time, height and width.
    writer.add_rope_dimension_count(shape.head_size // 4)
    writer.add_rope_dimension_sections([3, 3, 2, 0])
    writer.add_ssm_conv_kernel(shape.conv_kernel)
    writer.add_ssm_state_size(shape.state_size)
    writer.add_ssm_group_count(shape.key_heads)
    writer.add_ssm_time_step_rank(shape.value_heads)
    writer.add_ssm_inner_size(shape.value_dim)

    def own(key: str, value: object, kind: gguf.GGUFValueType, items: gguf.GGUFValueType | None = None) -> None:
        # Keys of this architecture that released versions of the gguf package have no method for.
        writer.add_key_value(f"{ARCHITECTURE}.{key}", value, kind, sub_type=items)

    u32, u64, array = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.UINT64, gguf.GGUFValueType.ARRAY
    ratios = [shape.compress_ratio if shape.has_attention(layer) else 0 for layer in range(shape.layers)]
    own("full_attention_interval", shape.attention_interval, u32)
    own("attention.indexer.head_count", shape.indexer_heads, u32)
    own("attention.indexer.key_length", shape.head_size, u32)
    own("attention.indexer.top_k", shape.indexer_top_k, u32)
    own("attention.compress_ratios", ratios, array, u32)
    own("hyper_connection.count", shape.streams, u32)
    own("hyper_connection.low_rank", shape.stream_rank, u32)
    own("ple.layers", [0], array, u32)
    own("ple.ngram_size", shape.ngram, u32)
    own("ple.heads_per_ngram", shape.ngram_heads, u32)
    own("ple.conv_kernel", shape.conv_kernel, u32)
    own("ple.eos_token_id", vocabulary.tokens.index("<|endoftext|>"), u32)
    own("embedding_length_per_layer_input", shape.embedding // shape.table_heads, u32)
    multipliers = [int(word) >> 19 | 1 for word in _raw("ple.layer_multipliers", shape.ngram)]
    own("ple.layer_multipliers", multipliers, array, u64)
    own("ple.head_offsets", [head * shape.ngram_rows for head in range(shape.table_heads)], array, u64)
    own("ple.head_vocab_sizes", [shape.ngram_rows] * shape.table_heads, array, u64)

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_eos_token_id(vocabulary.tokens.index(END_OF_TURN))
    writer.add_pad_token_id(vocabulary.tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(vocabulary.chat_template)


#: Name, storage type and a function that makes the values (shape as NumPy has it: outermost first).
Tensor = tuple[str, gguf.GGMLQuantizationType, Callable[[], Array]]


def _tensors(shape: Shape, vocabulary: Vocabulary) -> Iterator[Tensor]:
    n, wide = shape.embedding, shape.embedding * shape.streams
    q8, f32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32

    def matrix(name: str, *dims: int) -> Tensor:
        """Random weights that keep the size of what they are applied to."""
        return name, q8, lambda: random_weights(name, dims, 1.0 / dims[-1] ** 0.5)

    def into_residual(name: str, *dims: int) -> Tensor:
        """As ``matrix``, but leaves the reserved channels of the hidden state alone."""

        def make() -> Array:
            values = random_weights(name, dims, 1.0 / dims[-1] ** 0.5)
            values[..., :RESERVED, :] = 0
            return values

        return name, q8, make

    def plain(name: str, *dims: int, scale: float) -> Tensor:
        return name, f32, lambda: random_weights(name, dims, scale)

    def constant(name: str, *dims: int, value: float = 1.0) -> Tensor:
        return name, f32, lambda: np.full(dims, value, dtype=np.float32)

    yield "token_embd.weight", q8, lambda: _embedding(shape, vocabulary)
    yield matrix("per_layer_token_embd.weight", shape.ngram_rows * shape.table_heads, n // shape.table_heads)
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        for part in ("attn", "ffn"):
            yield constant(f"{at}hc_{part}_norm.weight", wide)
            yield matrix(f"{at}hc_{part}_down.weight", shape.stream_rank, wide)
            yield matrix(f"{at}hc_{part}_up.weight", wide, shape.stream_rank)
            yield matrix(f"{at}hc_{part}_inject.weight", shape.streams, wide)
        if shape.has_attention(layer):
            # Query and output gate are interleaved head by head.
            yield matrix(f"{at}attn_q.weight", shape.heads * shape.head_size * 2, n)
            yield matrix(f"{at}attn_k.weight", shape.kv_heads * shape.head_size, n)
            yield matrix(f"{at}attn_v.weight", shape.kv_heads * shape.head_size, n)
            yield constant(f"{at}attn_q_norm.weight", shape.head_size)
            yield constant(f"{at}attn_k_norm.weight", shape.head_size)
            yield into_residual(f"{at}attn_output.weight", n, shape.heads * shape.head_size)
            yield matrix(f"{at}indexer.q_proj.weight", shape.indexer_heads * shape.head_size, n)
            yield matrix(f"{at}indexer.k_proj.weight", shape.head_size, n)
            yield constant(f"{at}indexer.q_norm.weight", shape.head_size)
            yield constant(f"{at}indexer.k_norm.weight", shape.head_size)
        else:
            yield matrix(f"{at}attn_qkv.weight", 2 * shape.key_dim + shape.value_dim, n)
            yield matrix(f"{at}attn_gate.weight", shape.value_dim, n)
            yield plain(f"{at}ssm_conv1d.weight", 2 * shape.key_dim + shape.value_dim, shape.conv_kernel, scale=0.5)
            yield constant(f"{at}ssm_dt.bias", shape.value_heads)
            # -exp(A_log): the state decays, and does so slowly enough to matter.
            yield constant(f"{at}ssm_a", shape.value_heads, value=-0.125)
            yield matrix(f"{at}ssm_beta.weight", shape.value_heads, n)
            yield matrix(f"{at}ssm_alpha.weight", shape.value_heads, n)
            yield constant(f"{at}ssm_norm.weight", shape.state_size)
            yield into_residual(f"{at}ssm_out.weight", n, shape.value_dim)
        if layer == 0:
            yield matrix(f"{at}ple_key.weight", wide, n)
            yield into_residual(f"{at}ple_value.weight", n, n)
            for part in ("key", "query", "conv"):
                yield constant(f"{at}ple_norm_{part}.weight", wide)
            yield plain(f"{at}ple_conv1d.weight", wide, shape.conv_kernel, scale=0.25)
        yield plain(f"{at}ffn_gate_inp.weight", shape.experts, n, scale=n**-0.5)
        yield matrix(f"{at}ffn_gate_exps.weight", shape.experts, shape.expert_ff, n)
        yield matrix(f"{at}ffn_up_exps.weight", shape.experts, shape.expert_ff, n)
        yield into_residual(f"{at}ffn_down_exps.weight", shape.experts, n, shape.expert_ff)
        yield plain(f"{at}ffn_gate_inp_shexp.weight", n, scale=n**-0.5)
        yield matrix(f"{at}ffn_gate_shexp.weight", shape.expert_ff, n)
        yield matrix(f"{at}ffn_up_shexp.weight", shape.expert_ff, n)
        yield into_residual(f"{at}ffn_down_shexp.weight", n, shape.expert_ff)
    yield constant("output_hc_norm.weight", wide)
    yield matrix("output_hc_down.weight", shape.stream_rank, wide)
    yield matrix("output_hc_up.weight", wide, shape.stream_rank)
    yield "output.weight", q8, lambda: _output(shape, vocabulary)


def _embedding(shape: Shape, vocabulary: Vocabulary) -> Array:
    values = random_weights("token_embd.weight", (len(vocabulary.tokens), shape.embedding), 1.0)
    values[:, CONSTANT] = 4.0
    values[:, MAY_END] = 0.0
    values[vocabulary.tokens.index("."), MAY_END] = 4.0
    values[vocabulary.tokens.index(LINE_BREAK), MAY_END] = -4.0
    return values


def _output(shape: Shape, vocabulary: Vocabulary) -> Array:
    """Words and the full stop are likely, in an order that the hidden state decides; nothing else is."""
    values = random_weights("output.weight", (len(vocabulary.tokens), shape.embedding), 1.0)
    speakable = np.append(vocabulary.words, vocabulary.tokens.index("."))
    silent = np.ones(len(vocabulary.tokens), dtype=bool)
    silent[speakable] = False
    values[silent] *= np.float32(0.125)
    values[:, CONSTANT] = np.where(silent, np.float32(-8.0), np.float32(8.0))
    values[:, MAY_END] = 0.0
    # A full stop now and then, in any state; after one, the end.
    stop, end = vocabulary.tokens.index("."), vocabulary.tokens.index(END_OF_TURN)
    values[stop, CONSTANT] = 10.0
    values[stop, MAY_END] = 4.0
    values[end, MAY_END] = 32.0
    return values


def random_weights(name: str, dims: tuple[int, ...], scale: float) -> Array:
    """Values spread evenly over 255 steps around zero, with a standard deviation of ``scale``."""
    count = int(np.prod(dims))
    raw = _raw(name, (count + 7) // 8).view(np.uint8)[:count]
    # 0..255 less 128, the lowest cut off: symmetric. The deviation of -127..127 is 73.6.
    steps = np.maximum(raw.astype(np.int16) - 128, -127).astype(np.float32)
    values: Array = (steps * np.float32(scale / 73.6)).reshape(dims)
    return values


def _raw(name: str, count: int) -> npt.NDArray[np.uint64]:
    """``count`` random words for the tensor or key ``name``: its own stream, so the order of tensors is free."""
    seed = int.from_bytes(hashlib.sha256(f"{SEED}:{name}".encode()).digest()[:16], "little")
    # Little-endian on every machine, since the words are read as bytes.
    return np.random.PCG64(seed).random_raw(count).astype("<u8")
