# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Types of tensors and of metadata values.

Numbers, names and block layouts: llama.cpp 0.5.0-dev, ggml/include/ggml.h (enum ggml_type, removed types left out) and
ggml/src/ggml-common.h (the block structures); values: ggml/include/gguf.h (enum gguf_type).
"""

from __future__ import annotations

from dataclasses import dataclass

_K = 256  # elements in a super-block, ggml/src/ggml-common.h QK_K


@dataclass(frozen=True)
class TensorType:
    """A tensor type: ``block`` elements are stored in ``block_bytes`` bytes."""

    number: int
    name: str
    block: int
    block_bytes: int

    @property
    def quantised(self) -> bool:
        return self.block > 1

    def row_bytes(self, elements: int) -> int:
        """Bytes of ``elements`` values in one row; their number must be a multiple of ``block``."""
        return elements // self.block * self.block_bytes


_TYPES = (
    TensorType(0, "f32", 1, 4),
    TensorType(1, "f16", 1, 2),
    TensorType(2, "q4_0", 32, 2 + 16),
    TensorType(3, "q4_1", 32, 2 + 2 + 16),
    TensorType(6, "q5_0", 32, 2 + 4 + 16),
    TensorType(7, "q5_1", 32, 2 + 2 + 4 + 16),
    TensorType(8, "q8_0", 32, 2 + 32),
    TensorType(9, "q8_1", 32, 2 + 2 + 32),
    TensorType(10, "q2_K", _K, 2 + 2 + _K // 16 + _K // 4),
    TensorType(11, "q3_K", _K, 2 + _K // 4 + _K // 8 + 12),
    TensorType(12, "q4_K", _K, 2 + 2 + _K // 2 + 12),
    TensorType(13, "q5_K", _K, 2 + 2 + _K // 2 + _K // 8 + 12),
    TensorType(14, "q6_K", _K, 2 + _K // 2 + _K // 4 + _K // 16),
    TensorType(15, "q8_K", _K, 4 + _K + _K // 8),
    TensorType(16, "iq2_xxs", _K, 2 + _K // 4),
    TensorType(17, "iq2_xs", _K, 2 + _K // 4 + _K // 32),
    TensorType(18, "iq3_xxs", _K, 2 + _K // 4 + _K // 8),
    TensorType(19, "iq1_s", _K, 2 + _K // 8 + _K // 16),
    TensorType(20, "iq4_nl", 32, 2 + 16),
    TensorType(21, "iq3_s", _K, 2 + _K // 4 + _K // 8 + _K // 32 + 4),
    TensorType(22, "iq2_s", _K, 2 + _K // 4 + _K // 16),
    TensorType(23, "iq4_xs", _K, 2 + 2 + _K // 2 + _K // 64),
    TensorType(24, "i8", 1, 1),
    TensorType(25, "i16", 1, 2),
    TensorType(26, "i32", 1, 4),
    TensorType(27, "i64", 1, 8),
    TensorType(28, "f64", 1, 8),
    TensorType(29, "iq1_m", _K, _K // 8 + _K // 16 + _K // 32),
    TensorType(30, "bf16", 1, 2),
    TensorType(34, "tq1_0", _K, 2 + 4 * 13),
    TensorType(35, "tq2_0", _K, 2 + 64),
    TensorType(39, "mxfp4", 32, 1 + 16),
    TensorType(40, "nvfp4", 64, 4 + 32),
    TensorType(41, "q1_0", 128, 2 + 16),
    TensorType(42, "q2_0", 64, 2 + 16),
)
TENSOR_TYPES: dict[int, TensorType] = {kind.number: kind for kind in _TYPES}
TENSOR_TYPE_BY_NAME: dict[str, TensorType] = {kind.name: kind for kind in _TYPES}

#: Metadata value types: number to (name, struct format). Strings and arrays have no fixed size.
VALUE_TYPES: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "B"),
    8: ("string", ""),
    9: ("array", ""),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
STRING, ARRAY, BOOL = 8, 9, 7
