# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How much memory a model takes on each GPU, before it is loaded.

What the engine does is repeated here: which layer goes to which GPU, how large weights, KV cache, recurrent state and
compute buffers are. References are to llama.cpp 0.5.0-dev (LC), commit 0c1e57098. Weights, cache and state are exact.
Compute buffers are what the engine's allocator makes of a graph; their parts that grow with the context are computed,
the part that depends on the width of the model alone comes from profiles.py, measured with the engine itself, or from
an upper bound for a model that was never measured.

All sizes are bytes unless a name ends in _mib.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..faults import Catalogue, Fault, FaultKind
from .profiles import PROFILES, Profile
from .reader import Header, Tensor
from .types import TENSOR_TYPE_BY_NAME, TensorType

MIB = 1 << 20

FAULTS = Catalogue(
    "plan",
    [
        FaultKind(
            "plan_invalid",
            "critical",
            "The settings contradict each other or cannot be planned for.",
            "tensor_split has 3 entries for 4 GPUs",
        ),
        FaultKind(
            "plan_no_gpus",
            "critical",
            "It is not known which GPUs to plan for.",
            "no GPU was given and nvidia-smi names none",
        ),
        FaultKind(
            "plan_does_not_fit",
            "critical",
            "The model does not fit the GPUs with these settings.",
            "GPU 2 would need 35120 MiB and has 32768 MiB",
        ),
    ],
)

#: Cells of a cache are padded to this (LC src/llama-context.cpp:290, :296).
CELL_PADDING = 256
#: Alignment of a tensor in a CUDA buffer, and padding of quantised rows (LC ggml/src/ggml-cuda/ggml-cuda.cu:897-920).
ALIGNMENT, ROW_PADDING = 128, 512
#: Copies of a graph's inputs with more than one GPU: pipeline parallelism (LC ggml/src/ggml-backend.cpp
#: GGML_SCHED_MAX_COPIES, enabled at src/llama-context.cpp:430-457).
PIPELINE_COPIES = 4
#: Most requests at once that the engine takes (LC src/llama-cparams.h LLAMA_MAX_SEQ).
MAX_PARALLEL = 256
#: Most layers that the engine takes (LC src/llama-hparams.h LLAMA_MAX_LAYERS).
MAX_LAYERS = 512
#: Largest piece of a top-k sort (LC ggml/src/ggml-cuda/argsort.cu:35).
SORT_CHUNK = 64 * MIB
#: Arrays of four-byte values that a top-k holds for a piece: kept cells (LC ggml/src/ggml-cuda/top-k.cu:243), indices,
#: keys, sorted keys (argsort.cu:52-55), and what CUB's segmented sort keeps of keys and of values once more in its
#: temporary storage (argsort.cu:124; CCCL cub/device/dispatch/dispatch_segmented_sort.cuh, is_overwrite_okay is false).
SORT_ARRAYS = 6
#: The engine's memory pool grows by this (LC ggml/src/ggml-cuda/ggml-cuda.cu:572: the granularity that CUDA tells).
POOL_GRANULARITY = 2 * MIB

#: What the driver and the engine take of a GPU beside the engine's own buffers, in MiB: context, kernels, cuBLAS
#: workspace. Reported as 200 to 500 MiB a card (tmac1973/llama-toolchest#163); recalibrated on the owner's machine.
DEFAULT_OVERHEAD_MIB = 512.0

#: Architectures whose layers, caches and graphs are known here. Others are planned for conservatively.
KNOWN = ("llama", "qwen3", "qwen3moe", "qwen3next", "qwen35moe", "qwen4exp", "gpt-oss", "deepseek2", "glm4moe")
_HYBRID = ("qwen3next", "qwen35moe", "qwen4exp", "qwen35")


@dataclass(frozen=True)
class Settings:
    """What an operator sets. ``free_mib`` lists the GPUs in the order of the engine."""

    free_mib: tuple[float, ...]
    context_per_request: int = 8192
    parallel: int = 1
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    ubatch: int = 512
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    kv_unified: bool = False
    overhead_mib: float = DEFAULT_OVERHEAD_MIB
    compute_capability: tuple[int, int] = (7, 0)


@dataclass(frozen=True)
class Attention:
    """A layer with a KV cache: values in a cell for keys and values. ``window`` is 0 for full attention."""

    layer: int
    key: int
    value: int
    window: int = 0
    shared: bool = False  # values are a view of the keys (multi-head latent attention)


@dataclass
class Facts:
    """What of a header decides over memory."""

    architecture: str
    known: bool
    layers: int  # all, with those of multi-token prediction
    width: int
    vocabulary: int
    trained_context: int
    attention: list[Attention] = field(default_factory=list)
    recurrent: dict[int, int] = field(default_factory=dict)  # layer to float32 values of one slot
    indexer: int = 0  # values of an indexer key in a cell
    top_k: int = 0  # cells that a query keeps
    ratio: int = 1  # cells in a block of the indexer
    indexer_heads: int = 0
    streams: int = 1  # parallel residual streams (hyper-connections)
    heads: int = 0
    head_key: int = 0
    head_value: int = 0
    gated: bool = False
    experts: int = 0
    used: int = 0
    expert_ff: int = 0
    ff: int = 0
    unloaded: frozenset[int] = frozenset()  # layers whose tensors are not loaded (multi-token prediction)
    notes: list[str] = field(default_factory=list)


class _Metadata:
    """Values of one architecture by short key, for a layer where they are lists."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = header.architecture or ""

    def number(self, key: str, default: int = 0, layer: int | None = None) -> int:
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            if layer is None:
                return max((int(item) for item in value if isinstance(item, (int, float))), default=default)
            value = value[layer] if layer < len(value) else default
        return int(value) if isinstance(value, (int, float)) else default

    def flags(self, key: str, layers: int) -> list[bool] | None:
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        return [bool(item) for item in value] if isinstance(value, list) and len(value) >= layers else None


def read_facts(header: Header) -> Facts:
    """ValueError for a header that describes no text model."""
    m = _Metadata(header)
    layers = m.number("block_count")
    if not 0 < layers <= MAX_LAYERS:
        raise ValueError(f"the header names {layers} layers: this is no text model")
    by_name = {tensor.name: tensor for tensor in header.tensors}
    embedding = by_name.get("token_embd.weight")
    predicted = m.number("nextn_predict_layers")
    facts = Facts(
        architecture=m.architecture,
        known=m.architecture in KNOWN,
        layers=layers,
        width=m.number("embedding_length"),
        vocabulary=embedding.shape[1] if embedding and len(embedding.shape) > 1 else m.number("vocab_size"),
        trained_context=m.number("context_length"),
        heads=m.number("attention.head_count"),
        experts=m.number("expert_count"),
        used=m.number("expert_used_count"),
        expert_ff=m.number("expert_feed_forward_length"),
        ff=m.number("feed_forward_length"),
        unloaded=frozenset(range(layers - predicted, layers)),
    )
    default = facts.width // facts.heads if facts.heads else 0
    facts.head_key = m.number("attention.key_length", default)
    facts.head_value = m.number("attention.value_length", default)
    facts.gated = m.architecture in _HYBRID
    _layers(m, header, facts)
    if m.architecture == "qwen4exp":
        facts.indexer = m.number("attention.indexer.key_length")
        facts.indexer_heads = m.number("attention.indexer.head_count")
        facts.top_k = m.number("attention.indexer.top_k")
        facts.ratio = max(1, m.number("attention.compress_ratios", 4))
        facts.streams = max(1, m.number("hyper_connection.count", 1))
    if not facts.known:
        facts.notes.append(
            f"architecture {m.architecture} is not known here: caches are taken from its metadata, compute buffers "
            "from an upper bound, and a reserve is added"
        )
    return facts


def _layers(m: _Metadata, header: Header, facts: Facts) -> None:
    """Which layers have a KV cache and which a recurrent state."""
    layers, served = facts.layers, facts.layers - len(facts.unloaded)
    recurrent: Callable[[int], bool]
    given = m.flags("attention.recurrent_layers", layers)
    with_state = {_layer_of(t.name) for t in header.tensors if ".ssm_" in t.name or ".time_mix_" in t.name}
    with_keys = {_layer_of(t.name) for t in header.tensors if ".attn_k." in t.name or ".attn_kv" in t.name}
    interval = max(1, m.number("full_attention_interval", 4))
    if m.architecture in _HYBRID:
        # LC src/models/qwen4exp.cpp:128-136 and its siblings
        recurrent = (
            (lambda layer: given[layer]) if given else (lambda layer: layer < served and (layer + 1) % interval != 0)
        )
    elif facts.known:
        recurrent = lambda layer: False  # noqa: E731
    else:
        recurrent = lambda layer: layer in with_state  # noqa: E731
    # n_embd_r and n_embd_s, LC src/llama-hparams.cpp:208-258; float32, one row for a slot
    inner, state, groups = m.number("ssm.inner_size"), m.number("ssm.state_size"), m.number("ssm.group_count")
    values = inner * state + max(0, m.number("ssm.conv_kernel") - 1) * (inner + 2 * groups * state)
    window = m.number("attention.sliding_window") if m.architecture == "gpt-oss" else 0
    pattern = m.number("attention.sliding_window_pattern", 2) if window else 0
    listed = m.flags("attention.sliding_window_pattern", layers) if window else None
    latent = m.number("attention.key_length_mla") and m.number("attention.value_length_mla")
    for layer in range(layers):
        # Layers of multi-token prediction have no cache in the main context (LC src/llama-hparams.cpp has_kv).
        if layer in facts.unloaded:
            continue
        if recurrent(layer):
            facts.recurrent[layer] = values
            continue
        if not facts.known and layer not in with_keys and header.tensors and with_keys:
            continue
        kv_heads = m.number("attention.head_count_kv", facts.heads, layer)
        if not kv_heads:
            continue
        local = bool(window) and (listed[layer] if listed else layer % pattern < pattern - 1)
        facts.attention.append(
            Attention(
                layer,
                kv_heads * facts.head_key,
                0 if latent else kv_heads * facts.head_value,
                window if local else 0,
                bool(latent),
            )
        )
    for layer in _table_layers(m):
        # The n-gram table's convolution keeps a history of its own: ple_conv_state, LC src/llama-hparams.cpp:268.
        history = max(0, m.number("ple.conv_kernel") - 1) * m.number("ple.ngram_size")
        history *= max(1, m.number("hyper_connection.count", 1)) * facts.width
        if layer in facts.recurrent:
            facts.recurrent[layer] += history


def _table_layers(m: _Metadata) -> list[int]:
    if m.architecture != "qwen4exp":
        return []
    listed = m.header.metadata.get("qwen4exp.ple.layers")
    return [int(layer) for layer in listed] if isinstance(listed, list) else []


def _layer_of(name: str) -> int:
    """The layer a tensor belongs to, -1 for none."""
    parts = name.split(".", 2)
    return int(parts[1]) if len(parts) > 2 and parts[0] == "blk" and parts[1].isdigit() else -1


# --- where things go --------------------------------------------------------------------------------------------------


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def place_layers(layers: int, shares: Sequence[float]) -> list[int]:
    """The GPU of every layer, and of the output layer as the last entry (LC src/llama-model.cpp:1556-1614).

    ``shares`` are free memory or tensor_split. The engine computes in single precision, and so does this.
    """
    if not any(shares):
        shares = [1.0] * len(shares)
    points, total = [], 0.0
    for share in shares:
        total = _float32(total + _float32(share))
        points.append(total)
    points = [_float32(point / total) for point in points]
    count = layers + 1
    placed = []
    for layer in range(count):
        position = _float32(layer / count)
        placed.append(min(sum(1 for point in points if point <= position), len(points) - 1))
    return placed


def _on_gpu(tensor: Tensor) -> int:
    """Bytes of a tensor in a CUDA buffer."""
    size = tensor.bytes
    row = tensor.shape[0] if tensor.shape else 1
    if tensor.type.quantised and row % ROW_PADDING:
        missing = ROW_PADDING - row % ROW_PADDING
        size += math.ceil(missing / tensor.type.block) * tensor.type.block_bytes
    return _pad(size, ALIGNMENT)


def _pad(size: int, to: int) -> int:
    return (size + to - 1) // to * to


#: Read from the disk on demand: they stay in the file (LC src/models/qwen4exp.cpp:211, --lazy-mode auto).
_LAZY = ("per_layer_token_embd.weight",)
#: The input layer stays on the host (LC src/llama-model.cpp:1604).
_INPUT = ("token_embd.weight", "token_types.weight", "position_embd.weight", "token_embd_norm.weight")


@dataclass
class _Weights:
    per_gpu: list[int]
    host: int = 0
    lazy: int = 0


def _weights(header: Header, facts: Facts, placed: Sequence[int], gpus: int) -> _Weights:
    weights = _Weights([0] * gpus)
    names = {tensor.name for tensor in header.tensors}
    for tensor in header.tensors:
        layer = _layer_of(tensor.name)
        if layer in facts.unloaded:
            continue
        if tensor.name in _LAZY:
            weights.lazy += tensor.bytes
        elif tensor.name in _INPUT:
            weights.host += tensor.bytes
            if tensor.name == "token_embd.weight" and "output.weight" not in names:
                # Tied: the engine loads the embedding once more as the output layer.
                weights.per_gpu[placed[-1]] += _on_gpu(tensor)
        elif tensor.name.startswith("rope_f"):
            for gpu in set(placed[:-1]):
                weights.per_gpu[gpu] += _on_gpu(tensor)
        elif 0 <= layer < len(placed) - 1:
            weights.per_gpu[placed[layer]] += _on_gpu(tensor)
        else:
            weights.per_gpu[placed[-1]] += _on_gpu(tensor)
    return weights


# --- caches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cells:
    """Cells of the KV cache.

    ``total`` over all requests, ``each`` as one of ``streams`` streams sees them, ``window`` those of a layer with a
    sliding window in one stream.
    """

    total: int
    each: int
    streams: int
    window: int = 0


def count_cells(settings: Settings, window: int = 0) -> Cells:
    """LC src/llama-context.cpp:289-306 and, for sliding windows, src/llama-kv-cache-iswa.cpp:72."""
    if settings.kv_unified:
        total = each = _pad(settings.context_per_request * settings.parallel, CELL_PADDING)
        streams = 1
    else:
        each = _pad(settings.context_per_request, CELL_PADDING)
        total, streams = each * settings.parallel, settings.parallel
    sliding = 0
    if window:
        wanted = window * (settings.parallel if settings.kv_unified else 1) + settings.ubatch
        sliding = _pad(min(each, wanted), CELL_PADDING)
    return Cells(total, each, streams, sliding)


def total_context(settings: Settings) -> int:
    """What ``--ctx-size`` must be so that every request is granted ``context_per_request``."""
    return count_cells(settings).total


def _cache_types(settings: Settings) -> tuple[TensorType, TensorType]:
    return TENSOR_TYPE_BY_NAME[settings.cache_type_k], TENSOR_TYPE_BY_NAME[settings.cache_type_v]


def _caches(facts: Facts, settings: Settings, placed: Sequence[int], gpus: int) -> tuple[list[int], list[int]]:
    """Bytes of KV cache and of recurrent state on each GPU (LC src/llama-kv-cache.cpp:233,
    src/llama-memory-recurrent.cpp:96)."""
    key_type, value_type = _cache_types(settings)
    kv, state = [0] * gpus, [0] * gpus
    for layer in facts.attention:
        cells = count_cells(settings, layer.window)
        count = cells.window * cells.streams if layer.window else cells.total
        kv[placed[layer.layer]] += _pad(key_type.row_bytes(layer.key) * count, ALIGNMENT)
        kv[placed[layer.layer]] += _pad(value_type.row_bytes(layer.value) * count, ALIGNMENT)
        if facts.indexer:
            kv[placed[layer.layer]] += _pad(key_type.row_bytes(facts.indexer) * count, ALIGNMENT)
    for index, values in facts.recurrent.items():
        state[placed[index]] += _pad(values * 4 * settings.parallel, ALIGNMENT)
    return kv, state


# --- compute buffers --------------------------------------------------------------------------------------------------


def signature(facts: Facts) -> tuple[Any, ...]:
    """What the context-free part of a graph depends on: the key of a measured profile."""
    ff = facts.expert_ff if facts.experts else facts.ff
    dense = facts.ff if facts.experts and facts.architecture in ("deepseek2", "glm4moe") else 0
    return (facts.architecture, facts.width, facts.heads, facts.head_key, facts.used, ff, dense)


def profile_of(facts: Facts) -> tuple[Profile, bool]:
    """The measured profile, or an upper bound; the flag says whether it was measured."""
    measured = PROFILES.get(signature(facts))
    if measured is not None:
        return measured, True
    return upper_bound(facts), False


def upper_bound(facts: Facts) -> Profile:
    """Bytes a token for a model that was never measured, from above: everything that may be alive at once."""
    width = 4 * facts.width
    query = 4 * facts.heads * max(facts.head_key, facts.head_value) * (2 if facts.gated else 1)
    experts = facts.used * (2 * width + 3 * 4 * facts.expert_ff) if facts.experts else 0
    dense = 3 * 4 * facts.ff if not facts.experts or facts.architecture in ("deepseek2", "glm4moe") else 0
    base = (
        max(experts, dense)
        + 3 * width
        + query
        + 3 * 4 * facts.experts
        + 2 * facts.streams * width * (facts.streams > 1)
    )
    attention = 4 * width * facts.streams + 7 * query
    piped = 4 * width * facts.streams
    later = 6 * width * facts.streams if facts.streams > 1 else 0
    reserve = 1.0 if facts.known else 1.5
    return Profile(
        base=int(reserve * base),
        attention=int(reserve * attention),
        base_piped=int(reserve * (base + piped)),
        attention_piped=int(reserve * (attention + piped)),
        later=int(reserve * later),
        attention_2=int(reserve * attention),
    )


def _half_copies(facts: Facts, settings: Settings, layers: Sequence[Attention]) -> int:
    """Half-precision copies of a quantised cache that the matrix kernels of flash attention make, of the largest layer
    (LC ggml/src/ggml-cuda/fattn.cu:722-756, fattn-common.cuh:53-85)."""
    largest = 0
    for layer in layers:
        cells = count_cells(settings, layer.window)
        count = cells.window * cells.streams if layer.window else cells.total
        size = 0
        if settings.cache_type_k != "f16":
            size += layer.key * count * 2
        if settings.cache_type_v != "f16" and not layer.shared:
            size += layer.value * count * 2
        largest = max(largest, size)
    return largest


def _rotations(facts: Facts, settings: Settings) -> list[int]:
    """Rows of the matrices, inputs in single precision, by which keys and values of a quantised cache are rotated (LC
    src/llama-kv-cache.cpp:321-339, :1447-1480)."""
    key_type, value_type = _cache_types(settings)
    sizes = []
    if key_type.quantised and facts.head_key and facts.head_key % 64 == 0:
        sizes.append(facts.head_key & -facts.head_key)  # the largest power of two that divides it
    if value_type.quantised and facts.head_value and facts.head_value % 64 == 0:
        sizes.append(64)
    return sizes


def _indexer_keys(facts: Facts, cells: Cells) -> int:
    """Keys of an indexer while they are averaged: those of all cells, the sum and one summand of a block, in single
    precision (LC src/models/qwen4exp.cpp:615-628)."""
    return 4 * facts.indexer * (cells.total + 2 * (cells.total // facts.ratio))


def _compute(facts: Facts, settings: Settings, placed: Sequence[int], gpus: int) -> tuple[list[int], int]:
    """Compute buffers on each GPU, and on the host."""
    profile, _ = profile_of(facts)
    piped = gpus > 1 and settings.split_mode == "layer"
    copies = PIPELINE_COPIES if piped else 1
    cells = count_cells(settings)
    tokens = _pad(min(settings.ubatch, cells.total), settings.parallel)
    pairs = cells.each * tokens  # cells that a token may attend to, over all tokens of a micro-batch
    inputs = 2 * pairs  # attention mask in half precision
    windows = {layer.window for layer in facts.attention if layer.window}
    for window in windows:
        inputs += 2 * count_cells(settings, window).window * tokens
    rotated = _rotations(facts, settings)
    inputs += sum(4 * size * size for size in rotated)
    scores_per_pair = attention_per_pair = query = 0
    if facts.indexer:
        # LC src/models/qwen4exp.cpp:558-618: block bias, cell lists; scores, their sum, their expansion and the mask
        # in single precision; then the mask of the kept cells and its sum with the whole mask, in half precision
        # (:735-761).
        inputs += pairs * 4 // facts.ratio + 12 * cells.total
        scores_per_pair = 8 + facts.indexer_heads * 4 // (2 * facts.ratio)
        attention_per_pair = 4
        # Beside the scores, a query that was rotated is one more tensor (:711-718); the allocator may find a gap for
        # it, so this is from above.
        query = 4 * facts.heads * facts.head_key * tokens if rotated else 0
    base = (profile.base_piped if piped else profile.base) * tokens
    attention = (profile.attention_piped if piped else profile.attention) * tokens
    if settings.cache_type_k != settings.cache_type_v:
        # Profiles were taken with equal types; of different ones the engine was seen to need up to this.
        attention = max(attention, base * 21 // 20)
    attention_2 = profile.attention_2 * tokens + (
        (profile.attention_piped - profile.attention) * tokens if piped else 0
    )
    sizes = []
    first = placed[0]
    for gpu in range(gpus):
        own = [layer for layer in facts.attention if placed[layer.layer] == gpu]
        if gpu not in placed:
            sizes.append(0)
            continue
        phases = [base]
        if own:
            phases.append(
                attention
                + query
                + max(scores_per_pair * pairs, _indexer_keys(facts, cells))
                + (0 if facts.indexer else _half_copies(facts, settings, own))
            )
            if facts.indexer:
                phases.append(attention_2 + attention_per_pair * pairs + _half_copies(facts, settings, own))
        kept = len(own) * min(cells.each, facts.top_k + facts.ratio - 1) * 4 * tokens if facts.indexer else 0
        later = profile.later * tokens if piped and gpu != first else 0
        sizes.append(copies * inputs + kept + max(phases) + later)
    # The host holds the inputs once more, and what the input layer computes.
    host = (
        copies * inputs + (1 + copies) * 4 * facts.width * tokens + (4 * facts.width * tokens if facts.indexer else 0)
    )
    return sizes, host


def pool_bytes(header: Header, facts: Facts, settings: Settings, used_cells: int | None = None) -> int:
    """What CUDA operations take from the engine's memory pool beside the compute buffer, at most.

    Volta multiplies batches of 64 tokens and more through cuBLAS, which needs the weights and activations in half
    precision (LC ggml/src/ggml-cuda/mmq.cu:386, ggml-cuda.cu:1425-1492), and experts sorted by token
    (ggml-cuda.cu:1969); newer GPUs only quantise activations (mmq.cu:180-190). A top-k sorts in pieces
    (top-k.cu:235-264); with a CUDA toolkit whose CUB has a top-k of its own it takes less. ``used_cells`` is how far
    the context is filled; the whole when null.
    """
    tokens = settings.ubatch
    largest = 0
    halves = settings.compute_capability < (7, 5)
    for tensor in header.tensors:
        if len(tensor.shape) < 2 or tensor.name in _LAZY + _INPUT or _layer_of(tensor.name) < 0:
            continue
        rows, columns = tensor.shape[1], tensor.shape[0]
        expert = len(tensor.shape) > 2 and "exps" in tensor.name
        count = tokens * facts.used if expert else tokens
        if halves and tensor.type.quantised:
            size = 2 * rows * columns + 2 * count * columns + 2 * count * rows
            if expert:
                size = 2 * rows * columns + 4 * tokens * facts.used * (rows + columns) + 4 * tokens * (rows + columns)
        else:
            size = count * _pad(columns, ROW_PADDING) * 9 // 8
        largest = max(largest, size)
    if facts.indexer:
        cells = count_cells(settings)
        seen = cells.each if used_cells is None else min(cells.each, _pad(used_cells, CELL_PADDING))
        rows = min(tokens, max(1, SORT_CHUNK // (4 * seen)))
        piece = 4 * seen * rows
        if used_cells is None and rows < tokens:
            # As many rows as go into a piece: one that is just filled comes before the last, which may have room left.
            piece, rows = max(SORT_CHUNK, 4 * seen), tokens
        # Beside the arrays: bounds of the rows, and the lists of rows by length that CUB makes.
        largest = max(largest, SORT_ARRAYS * piece + 16 * (rows + 1))
    return _pad(largest, POOL_GRANULARITY)


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuPlan:
    """One GPU, in MiB."""

    index: int
    layers: int
    weights_mib: float
    kv_mib: float
    state_mib: float
    compute_mib: float
    overhead_mib: float
    total_mib: float
    free_mib: float

    @property
    def fits(self) -> bool:
        return self.total_mib <= self.free_mib

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


@dataclass
class Plan:
    """What was planned, with the settings it holds for.

    ``host_mib`` is what the server maps and allocates on the host, ``page_cache_mib`` the part of it that is pages of
    the file, which can be dropped and read again (a lazily read table, the embedding).
    """

    settings: Settings
    facts: Facts
    per_gpu: list[GpuPlan]
    host_mib: float
    page_cache_mib: float
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return all(gpu.fits for gpu in self.per_gpu)

    @property
    def reason(self) -> str | None:
        """Why it does not fit, null when it does."""
        short = [gpu for gpu in self.per_gpu if not gpu.fits]
        if not short:
            return None
        worst = max(short, key=lambda gpu: gpu.total_mib - gpu.free_mib)
        many = f"{len(short)} of {len(self.per_gpu)} GPUs are too small; " if len(self.per_gpu) > 1 else ""
        return (
            f"{many}GPU {worst.index} would need {worst.total_mib:.0f} MiB (weights {worst.weights_mib:.0f}, KV cache "
            f"{worst.kv_mib:.0f}, state {worst.state_mib:.0f}, compute {worst.compute_mib:.0f}, overhead "
            f"{worst.overhead_mib:.0f}) and has {worst.free_mib:.0f} MiB"
        )


def check_settings(facts: Facts, settings: Settings) -> list[Fault]:
    """Combinations that the engine refuses, or that cannot be planned for."""
    wrong: list[tuple[str, str, str]] = []
    if not settings.free_mib:
        return [FAULTS.fault("plan_no_gpus", "gpus", "no GPU is given and none was found", "Give gpus_mib or gpus.")]
    if settings.context_per_request < 1:
        wrong.append(("context_per_request", "less than one token", "Write a number of tokens, for example 8192."))
    if not 1 <= settings.parallel <= MAX_PARALLEL:
        wrong.append(
            ("parallel", f"{settings.parallel} is outside 1 to {MAX_PARALLEL}", "Write a number in that range.")
        )
    if settings.ubatch < 1:
        wrong.append(("ubatch", "less than one token", "Write a number of tokens, for example 512."))
    if settings.split_mode not in ("layer", "none", "tensor"):
        wrong.append(("split_mode", f"{settings.split_mode} cannot be planned for", "Write layer, none or tensor."))
    split = settings.tensor_split
    if split and (len(split) != len(settings.free_mib) or min(split) < 0 or not any(split)):
        wrong.append(
            (
                "tensor_split",
                f"{len(split)} shares for {len(settings.free_mib)} GPUs, or none above zero",
                "Write one number for each GPU, for example [1, 1, 1, 1], or leave it out.",
            )
        )
    heads = {"cache_type_k": facts.head_key, "cache_type_v": facts.head_value}
    for name, size in heads.items():
        kind = TENSOR_TYPE_BY_NAME.get(getattr(settings, name))
        if kind is None:
            wrong.append((name, f"{getattr(settings, name)} is no type of a KV cache", "Write f16, q8_0 or q4_0."))
        elif size % kind.block:
            # LC src/llama-context.cpp:3852-3870
            wrong.append((name, f"a head of {size} values is no multiple of {kind.block}", "Write f16."))
    latent = any(layer.shared for layer in facts.attention)
    if latent and settings.cache_type_k != settings.cache_type_v:
        # LC src/llama-context.cpp:3835
        wrong.append(
            ("cache_type_v", "this model keeps keys and values in one cache", "Write the type of cache_type_k.")
        )
    return [FAULTS.fault("plan_invalid", subject, message, remedy) for subject, message, remedy in wrong]


def make_plan(header: Header, settings: Settings, facts: Facts | None = None) -> Plan:
    """The plan for settings that check_settings found nothing wrong with."""
    facts = facts or read_facts(header)
    gpus = len(settings.free_mib)
    shares = list(settings.tensor_split or settings.free_mib)
    if settings.split_mode == "none":
        shares = [1.0] + [0.0] * (gpus - 1)
    placed = place_layers(facts.layers, shares)
    weights = _weights(header, facts, placed, gpus)
    kv, state = _caches(facts, settings, placed, gpus)
    compute, host_compute = _compute(facts, settings, placed, 1 if settings.split_mode == "none" else gpus)
    compute += [0] * (gpus - len(compute))
    pool = pool_bytes(header, facts, settings) / MIB
    notes = list(facts.notes)
    if facts.known and not profile_of(facts)[1]:
        notes.append("compute buffers of these dimensions were never measured: an upper bound is used")
    if settings.split_mode == "tensor":
        # Every tensor is cut by rows over all GPUs; what cannot be cut is there on each.
        share = max(shares) / sum(shares) if settings.tensor_split else 1 / gpus
        weights.per_gpu = [int(sum(weights.per_gpu) * share * 1.02)] * gpus
        kv, state = [int(sum(kv) * share)] * gpus, [int(sum(state) * share)] * gpus
        compute = [max(compute)] * gpus
        notes.append("split_mode=tensor is estimated: the engine's own split was not followed")
    reserve = 1.0 if facts.known else 1.05
    per_gpu = []
    for gpu in range(gpus):
        idle = settings.split_mode == "none" and gpu > 0
        own = GpuPlan(
            index=gpu,
            layers=placed[:-1].count(gpu) if settings.split_mode != "tensor" else facts.layers,
            weights_mib=round(weights.per_gpu[gpu] / MIB * reserve, 1),
            kv_mib=round(kv[gpu] / MIB * reserve, 1),
            state_mib=round(state[gpu] / MIB * reserve, 1),
            compute_mib=round(compute[gpu] / MIB, 1),
            overhead_mib=0.0 if idle else round(settings.overhead_mib + pool, 1),
            total_mib=0.0,
            free_mib=round(settings.free_mib[gpu], 1),
        )
        total = own.weights_mib + own.kv_mib + own.state_mib + own.compute_mib + own.overhead_mib
        per_gpu.append(replace(own, total_mib=round(total, 1)))
    output = facts.vocabulary * 4 * settings.parallel
    mapped = weights.host + weights.lazy
    return Plan(
        settings,
        facts,
        per_gpu,
        host_mib=round((mapped + host_compute + output) / MIB, 1),
        page_cache_mib=round(mapped / MIB, 1),
        notes=notes,
    )


def largest_context(header: Header, settings: Settings, facts: Facts) -> int:
    """The largest context a request can have with everything else as it is, in steps of 256 and up to what the model
    was trained for; 0 when none fits."""
    limit = max(CELL_PADDING, facts.trained_context or 1 << 20)
    low, high = 0, limit // CELL_PADDING
    while low < high:
        middle = (low + high + 1) // 2
        candidate = replace(settings, context_per_request=middle * CELL_PADDING)
        low, high = (middle, high) if make_plan(header, candidate, facts).fits else (low, middle - 1)
    return low * CELL_PADDING


def largest_parallel(header: Header, settings: Settings, facts: Facts) -> int:
    """The largest number of requests at once with everything else as it is, 0 when not even one fits."""
    low, high = 0, MAX_PARALLEL
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if make_plan(header, replace(settings, parallel=middle), facts).fits else (low, middle - 1)
        )
    return low


def nearest_that_fits(header: Header, settings: Settings, facts: Facts) -> Settings | None:
    """Settings that fit and differ least, tried in this order: a q8_0 cache, fewer requests at once, a shorter context,
    both shorter and fewer; null when not even the smallest fits."""
    smaller = settings
    if (
        "f16" in (settings.cache_type_k, settings.cache_type_v)
        and not facts.head_key % 32
        and not facts.head_value % 32
    ):
        smaller = replace(settings, cache_type_k="q8_0", cache_type_v="q8_0")
        if make_plan(header, smaller, facts).fits:
            return smaller
    for base in dict.fromkeys((settings, smaller)):
        fewer = largest_parallel(header, base, facts)
        if fewer:
            return replace(base, parallel=fewer)
    for base in dict.fromkeys((settings, smaller)):
        shorter = largest_context(header, base, facts)
        if shorter:
            return replace(base, context_per_request=shorter)
    for base in dict.fromkeys((settings, smaller)):
        alone = replace(base, parallel=1)
        shorter = largest_context(header, alone, facts)
        if shorter:
            return replace(alone, context_per_request=shorter)
    return None


def engine_arguments(settings: Settings) -> list[str]:
    """llama-server's arguments for these settings (LC common/arg.cpp). The engine must not change them: --fit off."""
    arguments = [
        *("--ctx-size", str(total_context(settings)), "--parallel", str(settings.parallel)),
        "--kv-unified" if settings.kv_unified else "--no-kv-unified",
        *("--cache-type-k", settings.cache_type_k, "--cache-type-v", settings.cache_type_v),
        *("--ubatch-size", str(settings.ubatch), "--batch-size", str(max(2048, settings.ubatch))),
        *("--n-gpu-layers", "999", "--split-mode", settings.split_mode, "--flash-attn", "on", "--fit", "off"),
    ]
    if len(settings.free_mib) > 1 and settings.split_mode != "none":
        # Commas: a colon is taken for one number, and all goes to the first GPU (LC common/arg.cpp:2831).
        shares = settings.tensor_split or settings.free_mib
        arguments += ["--tensor-split", ",".join(f"{share:g}" for share in shares)]
    return arguments
