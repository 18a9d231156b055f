# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Reads the header of a GGUF file: metadata and tensor list, versions 2 and 3, either byte order.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what the engine itself refuses:
llama.cpp 0.5.0-dev, ggml/src/gguf.cpp:405-830. A header comes from strangers: lengths, counts and nesting are checked
before anything is allocated or skipped, so that memory and time stay bounded whatever they say.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .faults import gguf_error
from .identify import LOOKED_AT, identify
from .source import Source
from .types import ARRAY, BOOL, STRING, TENSOR_TYPES, VALUE_TYPES, TensorType

#: More than any model has: the largest today have about 80 keys, 3,000 tensors and 800,000 strings.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_STRINGS = 4_000_000
#: Keys and tensor names; the engine takes tensor names below 64 bytes (GGML_MAX_NAME, ggml/include/ggml.h:229).
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 63
MAX_STRING_BYTES = 64 << 20
MAX_HEADER_BYTES = 512 << 20
#: Values beyond this are counted, not kept.
KEPT_ELEMENTS = 1024
KEPT_STRING_BYTES = 1 << 20
KEPT_BYTES = 16 << 20
#: The format allows arrays of arrays, no engine does.
MAX_NESTING = 4
MAX_DIMENSIONS = 4
_CUT_SHORT = "Finish or repeat the download; playbooks/model.yml does so for the files of role model."
_DAMAGED = "Download the file again and compare its SHA-256."


@dataclass(frozen=True)
class Counted:
    """A value that is too long to keep: element type and number of elements (or bytes, of a string)."""

    type: str
    count: int

    def as_dict(self) -> dict[str, Any]:
        return {"type": self.type, "count": self.count}


@dataclass(frozen=True)
class Tensor:
    """One tensor. ``shape`` is as the file has it, rows first (the engine's ne); ``offset`` from the data section."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int = 0

    @property
    def elements(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def bytes(self) -> int:
        return self.type.row_bytes(self.elements)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shape": list(self.shape),
            "type": self.type.name,
            "bytes": self.bytes,
            "offset": self.offset,
        }


@dataclass
class Header:
    """A header as read.

    ``data_offset`` is where tensor data begins in the file, ``file_bytes`` its length. ``header_only`` says that the
    data was cut off on purpose (a saved header).
    """

    version: int = 3
    byte_order: str = "little"
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    alignment: int = 32
    data_offset: int = 0
    file_bytes: int = 0
    header_only: bool = False

    @property
    def architecture(self) -> str | None:
        name = self.metadata.get("general.architecture")
        return name if isinstance(name, str) else None

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data, with the padding between tensors."""
        return max((tensor.offset + tensor.bytes for tensor in self.tensors), default=0)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; ``{arch}.`` in front stands for the architecture."""
        return self.metadata.get(key.replace("{arch}", self.architecture or ""), default)


class _Cursor:
    """Reads forward through a source, remembering where it is for messages."""

    CHUNK = 1 << 18

    def __init__(self, source: Source) -> None:
        self.source = source
        self.position = 0
        self.order = "<"
        self._buffer = b""
        self._start = 0

    def invalid(self, message: str) -> Exception:
        return gguf_error("gguf_header_invalid", self.source.name, f"at byte {self.position}: {message}", _DAMAGED)

    def need(self, count: int, what: str) -> None:
        """Fail unless ``count`` more bytes are there: before they are read or skipped."""
        if self.position + count > min(self.source.size, MAX_HEADER_BYTES):
            if self.position + count > MAX_HEADER_BYTES:
                raise self.invalid(f"{what} would reach beyond {MAX_HEADER_BYTES} bytes of header")
            raise gguf_error(
                "gguf_truncated",
                self.source.name,
                f"the header ends at byte {self.source.size}, in the middle of {what}",
                _CUT_SHORT,
            )

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        begin = self.position - self._start
        if begin < 0 or begin + count > len(self._buffer):
            self._buffer = self.source.read(self.position, max(count, self.CHUNK))
            self._start = self.position
            begin = 0
            if len(self._buffer) < count:
                raise gguf_error(
                    "gguf_truncated",
                    self.source.name,
                    f"only {self.position + len(self._buffer)} bytes could be read, in the middle of {what}",
                    _CUT_SHORT,
                )
        self.position += count
        return self._buffer[begin : begin + count]

    def skip(self, count: int, what: str) -> None:
        self.need(count, what)
        self.position += count

    def skip_strings(self, count: int, what: str) -> None:
        """Skip strings that follow each other. A vocabulary has hundreds of thousands: this walks the buffer itself."""
        length_at = struct.Struct(self.order + "Q").unpack_from
        while count:
            # Whatever begins within the buffer is skipped there; its end is checked once, below.
            self.need(8, what)
            if not self._start <= self.position <= self._start + len(self._buffer) - 8:
                self.take(8, what)
                self.position -= 8
            start, last = self._start, len(self._buffer) - 8
            at = self.position - start
            buffer = self._buffer
            while count and at <= last:
                (length,) = length_at(buffer, at)
                if length > MAX_STRING_BYTES:
                    self.position = start + at
                    raise self.invalid(f"{what} holds a string of {length} bytes")
                at += 8 + length
                count -= 1
            self.skip(start + at - self.position, what)

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(self.order + form, self.take(struct.calcsize(form), what))[0]

    def string(self, limit: int, what: str) -> str:
        length = int(self.number("Q", what))
        if length > limit:
            raise self.invalid(f"{what} is {length} bytes long, more than {limit}")
        return self.take(length, what).decode("utf-8", "replace")


class _Reader:
    def __init__(self, source: Source) -> None:
        self.cursor = _Cursor(source)
        self.source = source
        self.strings = 0
        self.kept = 0

    def read(self) -> Header:
        cursor = self.cursor
        head = self.source.read(0, LOOKED_AT)
        wrong = identify(head, self.source.size, self.source.name)
        if wrong is not None:
            raise gguf_error("gguf_wrong_file", self.source.name, wrong.words, wrong.remedy)
        cursor.skip(4, "the magic")
        header = Header(file_bytes=self.source.size)
        version = cursor.number("I", "the version")
        if version & 0xFFFF == 0 and version:
            # ggml/src/gguf.cpp:447: a version with empty low half was written in the other byte order.
            cursor.order = ">"
            header.byte_order = "big"
            version = struct.unpack(">I", struct.pack("<I", version))[0]
        header.version = version
        if version not in (2, 3):
            raise gguf_error(
                "gguf_version_unsupported",
                self.source.name,
                f"GGUF version {version}; versions 2 and 3 are read",
                "Take a newer conversion of the model.",
            )
        tensor_count = cursor.number("q", "the number of tensors")
        key_count = cursor.number("q", "the number of keys")
        # A key takes at least 13 bytes, a tensor at least 25: counts that cannot be true are told before reading.
        for count, limit, least, what in (
            (tensor_count, MAX_TENSORS, 25, "tensors"),
            (key_count, MAX_KEYS, 13, "keys"),
        ):
            if not 0 <= count <= limit:
                raise cursor.invalid(f"{count} {what} are announced")
            cursor.need(count * least, f"the {count} {what} that are announced")
        for index in range(key_count):
            key = cursor.string(MAX_KEY_BYTES, f"key {index}")
            if not key or key in header.metadata:
                raise cursor.invalid(f"key {index} {key!r} is {'there twice' if key else 'empty'}")
            header.metadata[key] = self._value(cursor.number("I", f"the type of {key!r}"), key, 0)
        header.alignment = self._alignment(header)
        header.tensors = list(self._tensors(tensor_count, header.alignment))
        header.data_offset = _padded(cursor.position, header.alignment)
        header.header_only = header.metadata.get("volta.header_only") is True
        return header

    def _alignment(self, header: Header) -> int:
        alignment = header.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self.cursor.invalid(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def _value(self, number: int, key: str, depth: int) -> Any:
        cursor = self.cursor
        if number not in VALUE_TYPES:
            raise cursor.invalid(f"{key!r} has type {number}, which does not exist")
        if number == STRING:
            return self._string(key)
        if number == ARRAY:
            return self._array(key, depth + 1)
        value = cursor.number(VALUE_TYPES[number][1], repr(key))
        return bool(value) if number == BOOL else value

    def _string(self, key: str) -> str | Counted:
        cursor = self.cursor
        length = int(cursor.number("Q", repr(key)))
        if length > MAX_STRING_BYTES:
            raise cursor.invalid(f"{key!r} is a string of {length} bytes")
        if length > KEPT_STRING_BYTES or self.kept + length > KEPT_BYTES:
            cursor.skip(length, repr(key))
            return Counted("string", length)
        self.kept += length
        return cursor.take(length, repr(key)).decode("utf-8", "replace")

    def _array(self, key: str, depth: int) -> list[Any] | Counted:
        cursor = self.cursor
        if depth > MAX_NESTING:
            raise cursor.invalid(f"{key!r} holds arrays within arrays, more than {MAX_NESTING} deep")
        number = cursor.number("I", f"the element type of {key!r}")
        count = cursor.number("Q", f"the length of {key!r}")
        if number not in VALUE_TYPES:
            raise cursor.invalid(f"{key!r} has elements of type {number}, which does not exist")
        name, form = VALUE_TYPES[number]
        kept = count <= KEPT_ELEMENTS and self.kept < KEPT_BYTES
        if form:
            size = struct.calcsize(form) * count
            if not kept:
                cursor.skip(size, repr(key))
                return Counted(name, count)
            self.kept += size
            values = list(struct.unpack(f"{cursor.order}{count}{form}", cursor.take(size, repr(key))))
            return [bool(value) for value in values] if number == BOOL else values
        # Every element has a length or a type and a length in front: 8 or 12 bytes.
        cursor.need(count * 8, repr(key))
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise cursor.invalid(f"more than {MAX_STRINGS} strings, in {key!r}")
        if kept:
            return [self._value(number, key, depth) for _ in range(count)]
        if number == STRING:
            cursor.skip_strings(count, repr(key))
        else:
            for _ in range(count):
                self._value(number, key, depth)
        return Counted(name, count)

    def _tensors(self, count: int, alignment: int) -> Iterator[Tensor]:
        cursor = self.cursor
        seen: set[str] = set()
        expected = 0
        for index in range(count):
            name = cursor.string(MAX_NAME_BYTES, f"the name of tensor {index}")
            if name in seen:
                raise cursor.invalid(f"tensor {name!r} is there twice")
            seen.add(name)
            dimensions = cursor.number("I", f"tensor {name!r}")
            if dimensions > MAX_DIMENSIONS:
                raise cursor.invalid(f"tensor {name!r} has {dimensions} dimensions, more than {MAX_DIMENSIONS}")
            shape = tuple(cursor.number("q", f"tensor {name!r}") for _ in range(dimensions))
            kind = TENSOR_TYPES.get(cursor.number("I", f"tensor {name!r}"))
            offset = cursor.number("Q", f"tensor {name!r}")
            if kind is None:
                raise cursor.invalid(f"tensor {name!r} has a type that does not exist or was removed")
            tensor = Tensor(name, shape, kind, offset)
            if any(size < 0 for size in shape) or tensor.elements >= 1 << 63:
                raise cursor.invalid(f"tensor {name!r} has an impossible shape")
            if (shape[0] if shape else 1) % kind.block:
                raise cursor.invalid(
                    f"tensor {name!r}: rows of {shape[:1]} are no multiple of {kind.block} ({kind.name})"
                )
            if offset != expected:
                # The engine refuses it, too: ggml/src/gguf.cpp:770.
                raise cursor.invalid(f"tensor {name!r} begins at {offset} of the data, expected {expected}")
            expected = _padded(offset + tensor.bytes, alignment)
            yield tensor


def _padded(size: int, alignment: int) -> int:
    return (size + alignment - 1) // alignment * alignment


def read_header(source: Source) -> Header:
    """The header of one file. FaultError with a gguf_* fault for whatever is wrong; nothing else is raised."""
    return _Reader(source).read()


def check_data(header: Header, name: str) -> None:
    """FaultError gguf_truncated when tensor data reaches beyond the end of the file."""
    if header.header_only:
        return
    for tensor in header.tensors:
        end = header.data_offset + tensor.offset + tensor.bytes
        if end > header.file_bytes:
            raise gguf_error(
                "gguf_truncated",
                name,
                f"the file has {header.file_bytes} bytes, tensor {tensor.name} ends at byte {end}",
                _CUT_SHORT,
            )
