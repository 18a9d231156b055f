# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Saved headers: all metadata and the tensor list of a model (of all its shards), without tensor data.

Some hundred KB stand for a file of 100 GiB, so memory can be planned without it. A saved header is a GGUF of version 3
whose key volta.header_only is true; arrays and strings too long to keep (a vocabulary) are left out and counted in
volta.left_out, the shard keys are dropped since all tensors are in this one list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..faults import Fault
from ..files import replace_file
from .faults import FAULTS
from .reader import Counted, Header, Tensor
from .types import ARRAY, BOOL, STRING, VALUE_TYPES

_NUMBER_OF = {name: number for number, (name, _) in VALUE_TYPES.items()}


def render(metadata: Mapping[str, Any], tensors: Iterable[Tensor], alignment: int = 32) -> bytes:
    """The bytes of a saved header; offsets are set anew, one tensor after the other."""
    kept = {key: value for key, value in metadata.items() if not key.startswith("split.")}
    left_out = [f"{key}:{value.type}:{value.count}" for key, value in kept.items() if isinstance(value, Counted)]
    fields = {key: value for key, value in kept.items() if not isinstance(value, Counted)}
    fields["volta.header_only"] = True
    if left_out:
        fields["volta.left_out"] = left_out
    listed = list(tensors)
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(listed), len(fields))]
    parts += [_string(key) + _typed(value) for key, value in fields.items()]
    offset = 0
    for tensor in listed:
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        parts.append(_string(tensor.name) + shape + struct.pack("<IQ", tensor.type.number, offset))
        offset += (tensor.bytes + alignment - 1) // alignment * alignment
    return b"".join(parts)


def keep_header(header: Header, path: Path, write: bool = True) -> tuple[bool, list[Fault]]:
    """Keep the saved header of a model at ``path``; returns whether that changes the file, and a fault if it fails."""
    content = render(header.metadata, header.tensors, header.alignment)
    try:
        if path.is_file() and path.read_bytes() == content:
            return False, []
        if write:
            replace_file(path, content)
    except OSError as exc:
        message = f"the header cannot be written: {exc.strerror}"
        return False, [FAULTS.fault("gguf_header_not_saved", str(path), message, "Give a path in a writable folder.")]
    return True, []


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        number = _element(value)
        body = b"".join(_plain(item, number) for item in value)
        return struct.pack("<IIQ", ARRAY, number, len(value)) + body
    number = _element([value])
    return struct.pack("<I", number) + _plain(value, number)


def _element(values: list[Any]) -> int:
    """A type that holds all of ``values``. Only this collection reads saved headers, so it need not be the original."""
    if any(isinstance(value, list) for value in values):
        return ARRAY
    if all(isinstance(value, bool) for value in values) and values:
        return BOOL
    if any(isinstance(value, str) for value in values):
        return STRING
    if any(isinstance(value, float) for value in values):
        return _NUMBER_OF["float32"]
    low, high = min(values, default=0), max(values, default=0)
    if low < 0:
        return _NUMBER_OF["int32" if low >= -(1 << 31) and high < 1 << 31 else "int64"]
    return _NUMBER_OF["uint32" if high < 1 << 32 else "uint64"]


def _plain(value: Any, number: int) -> bytes:
    if number == STRING:
        return _string(str(value))
    if number == ARRAY:
        return _typed(value)[4:]
    return struct.pack("<" + VALUE_TYPES[number][1], value)
