# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The header reader: against the gguf package, and against headers made to break it."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.gguf import reader
from ansible_collections.volta.llm.plugins.module_utils.gguf.reader import Counted, Header, check_data, read_header
from ansible_collections.volta.llm.plugins.module_utils.gguf.source import BytesSource, FileSource
from ansible_collections.volta.llm.plugins.module_utils.gguf.types import TENSOR_TYPES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.gguf.build import header, key, real, tensor, text


def read(content: bytes, size: int | None = None) -> Header:
    return read_header(BytesSource(content, size=size))


def code_of(content: bytes, size: int | None = None) -> str | None:
    """The fault code of a header, null when it is read."""
    try:
        parsed = read(content, size)
        check_data(parsed, "header")
    except FaultError as exc:
        return exc.fault.code
    return None


def compare_with_package(path: Path) -> None:
    theirs = gguf.GGUFReader(path)
    source = FileSource(str(path))
    ours = read_header(source)
    check_data(ours, source.name)
    source.close()
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for name, field in fields.items():
        value, expected = ours.metadata[name], field.contents()
        if isinstance(value, Counted):
            assert value.count == len(expected)
        else:
            assert value == expected, name
    assert ours.alignment == theirs.alignment
    assert [entry.name for entry in ours.tensors] == [entry.name for entry in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert list(mine.shape) == [int(size) for size in other.shape]
        assert mine.type.number == other.tensor_type.value
        assert mine.bytes == other.n_bytes
        assert mine.elements == other.n_elements
        assert ours.data_offset + mine.offset == other.data_offset
    if ours.tensors:
        assert ours.data_offset == theirs.data_offset


def test_tensor_types_are_those_of_the_package() -> None:
    for kind, layout in gguf.GGML_QUANT_SIZES.items():
        ours = TENSOR_TYPES[kind.value]
        assert ours.name.lower() == kind.name.lower()
        # Older packages say 40 bytes for q8_1; it is two halves and 32 bytes (ggml-common.h), and never in a file.
        assert (ours.block, ours.block_bytes) == layout or kind == gguf.GGMLQuantizationType.Q8_1
    # Types that llama.cpp 0.5.0 has and an older package has not.
    assert set(TENSOR_TYPES) - set(gguf.GGML_QUANT_SIZES) <= {40, 41, 42}


@pytest.mark.parametrize("big", [False, True])
def test_whole_file(tmp_path: Path, big: bool) -> None:
    path = real(tmp_path / "small.gguf", big=big)
    compare_with_package(path)
    ours = read(path.read_bytes())
    assert ours.byte_order == ("big" if big else "little")
    assert ours.architecture == "llama"
    assert ours.get("{arch}.block_count") == 2
    assert ours.metadata["tokenizer.ggml.tokens"] == Counted("string", 3000)


def test_version_2(tmp_path: Path) -> None:
    content = bytearray(real(tmp_path / "small.gguf").read_bytes())
    content[4:8] = struct.pack("<I", 2)
    (tmp_path / "v2.gguf").write_bytes(content)
    compare_with_package(tmp_path / "v2.gguf")


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numbers=st.dictionaries(st.text("abcdefgh.", min_size=1, max_size=8), st.integers(0, 2**32 - 1), max_size=6),
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=8),
    kinds=st.randoms(use_true_random=False),
    alignment=st.sampled_from([None, 8, 32, 64, 4096]),
)
def test_what_the_package_writes_is_read_alike(
    tmp_path: Path,
    numbers: dict[str, int],
    shapes: list[list[int]],
    kinds: random.Random,
    alignment: int | None,
) -> None:
    path = tmp_path / "any.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, number in numbers.items():
        writer.add_uint32(f"x.{name}", number)
        writer.add_array(f"y.{name}", [float(number), 0.5])
        writer.add_int64(f"z.{name}", -number)
        writer.add_string(f"s.{name}", name * 3)
    for index, shape in enumerate(shapes):
        kind = kinds.choice([kind for kind in gguf.GGML_QUANT_SIZES if kind != gguf.GGMLQuantizationType.Q8_1])
        rows = [*shape[:-1], shape[-1] * gguf.GGML_QUANT_SIZES[kind][1]]
        raw = np.zeros(rows, dtype=np.uint8)
        writer.add_tensor(f"t.{index}", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    compare_with_package(path)


HUGE = 2**63 - 1
F32, STRING, ARRAY = 6, 8, 9
U32 = 4


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


def nested(depth: int) -> bytes:
    body = array(U32, 1, struct.pack("<I", 7))
    for _ in range(depth - 1):
        body = array(ARRAY, 1, body)
    return body


# What each header claims, and the fault it must end in. Sizes are those of the bytes unless a size is given.
BROKEN: dict[str, tuple[bytes, int | None, str | None]] = {
    "only the magic": (b"GGUF", None, "gguf_truncated"),
    "no counts": (b"GGUF\3\0\0\0", None, "gguf_truncated"),
    "version 0": (header(version=0), None, "gguf_version_unsupported"),
    "version 1": (header(version=1), None, "gguf_version_unsupported"),
    "version 4": (header(version=4), None, "gguf_version_unsupported"),
    "huge number of keys": (header(key_count=HUGE), None, "gguf_header_invalid"),
    "negative number of keys": (header(key_count=-1), None, "gguf_header_invalid"),
    "huge number of tensors": (header(tensor_count=HUGE), None, "gguf_header_invalid"),
    "negative number of tensors": (header(tensor_count=-5), None, "gguf_header_invalid"),
    "many keys announced in a huge file": (header(key_count=1 << 40), 1 << 50, "gguf_header_invalid"),
    "one key more than there are": (header([key("a", U32, b"\1\0\0\0")], key_count=2), 100, "gguf_truncated"),
    "key of huge length": (header([struct.pack("<Q", HUGE) + b"\0" * 64], key_count=1), None, "gguf_header_invalid"),
    "key of negative length": (header([struct.pack("<q", -1) + b"\0" * 64], key_count=1), None, "gguf_header_invalid"),
    "empty key": (header([key("", U32, b"\1\0\0\0")]), None, "gguf_header_invalid"),
    "key twice": (header([key("a", U32, b"\1\0\0\0")] * 2), None, "gguf_header_invalid"),
    "key that is no UTF-8": (header([text(b"\xff\xfe") + struct.pack("<II", U32, 1)]), None, None),
    "value type 13": (header([key("a", 13, b"\0" * 8)]), None, "gguf_header_invalid"),
    "value type 2**32-1": (header([key("a", 2**32 - 1, b"\0" * 8)]), None, "gguf_header_invalid"),
    "string of huge length": (header([key("a", STRING, struct.pack("<Q", HUGE))]), None, "gguf_header_invalid"),
    "string beyond the end": (header([key("a", STRING, struct.pack("<Q", 1000))]), None, "gguf_truncated"),
    "array of huge length": (header([key("a", ARRAY, array(U32, HUGE))]), None, "gguf_header_invalid"),
    "array of 2**64-1 bytes": (header([key("a", ARRAY, array(0, 2**64 - 1))]), None, "gguf_header_invalid"),
    "array of strings of huge length": (header([key("a", ARRAY, array(STRING, 2**60))]), None, "gguf_header_invalid"),
    "array beyond the end": (header([key("a", ARRAY, array(U32, 5000))]), None, "gguf_truncated"),
    "array of unknown type": (header([key("a", ARRAY, array(77, 1))]), None, "gguf_header_invalid"),
    "strings whose second is huge": (
        header([key("a", ARRAY, array(STRING, 2000, text("x") + struct.pack("<Q", HUGE) + b"\0" * 16000))]),
        None,
        "gguf_header_invalid",
    ),
    "strings that run out": (
        header([key("a", ARRAY, array(STRING, 2000, text("x" * 9000) * 2))]),
        None,
        "gguf_truncated",
    ),
    "arrays 4 deep": (header([key("a", ARRAY, nested(4))]), None, None),
    "arrays 5 deep": (header([key("a", ARRAY, nested(5))]), None, "gguf_header_invalid"),
    "arrays 10000 deep": (header([key("a", ARRAY, nested(10000))]), None, "gguf_header_invalid"),
    "wide nested arrays": (
        header([key("a", ARRAY, array(ARRAY, 5_000_000))]),
        1 << 40,
        "gguf_header_invalid",
    ),
    "alignment 0": (header([key("general.alignment", U32, b"\0\0\0\0")]), None, "gguf_header_invalid"),
    "alignment 48": (header([key("general.alignment", U32, b"\x30\0\0\0")]), None, "gguf_header_invalid"),
    "alignment 2**31": (header([key("general.alignment", U32, b"\0\0\0\x80")]), None, "gguf_header_invalid"),
    "alignment as text": (header([key("general.alignment", STRING, text("32"))]), None, "gguf_header_invalid"),
    "tensor name of 64 bytes": (header([], [tensor("n" * 64, [1], 0, 0)]), None, "gguf_header_invalid"),
    "tensor twice": (
        header([], [tensor("a", [8], 0, 0), tensor("a", [8], 0, 32)]) + b"\0" * 256,
        None,
        "gguf_header_invalid",
    ),
    "five dimensions": (header([], [tensor("a", [1] * 5, 0, 0)]), None, "gguf_header_invalid"),
    "2**32-1 dimensions": (
        header([], [text("a") + struct.pack("<I", 2**32 - 1) + b"\0" * 64]),
        None,
        "gguf_header_invalid",
    ),
    "negative size": (header([], [tensor("a", [-4], 0, 0)]), None, "gguf_header_invalid"),
    "product overflows": (header([], [tensor("a", [2**40, 2**40], 0, 0)]), None, "gguf_header_invalid"),
    "type that was removed": (header([], [tensor("a", [32], 4, 0)]), None, "gguf_header_invalid"),
    "type 43": (header([], [tensor("a", [32], 43, 0)]), None, "gguf_header_invalid"),
    "row is no multiple of the block": (header([], [tensor("a", [33], 8, 0)]), None, "gguf_header_invalid"),
    "offset not at zero": (header([], [tensor("a", [8], 0, 32)]), None, "gguf_header_invalid"),
    "offset wraps": (header([], [tensor("a", [8], 0, 2**64 - 32)]), None, "gguf_header_invalid"),
    "gap between tensors": (
        header([], [tensor("a", [8], 0, 0), tensor("b", [8], 0, 64)]),
        None,
        "gguf_header_invalid",
    ),
    "data beyond the end": (header([], [tensor("a", [1 << 30], 0, 0)]), None, "gguf_truncated"),
    "data one byte short": (header([], [tensor("abcdefgh", [8], 0, 0)]) + b"\0" * 31, None, "gguf_truncated"),
    "data complete": (header([], [tensor("abcdefgh", [8], 0, 0)]) + b"\0" * 32, None, None),
    "no tensors": (header(), None, None),
    "scalar without dimensions": (header([], [tensor("a", [], 0, 0)]) + b"\0" * 64, None, None),
    "size zero": (header([], [tensor("a", [0], 0, 0)]) + b"\0" * 64, None, None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_headers_end_in_their_fault(name: str) -> None:
    content, size, expected = BROKEN[name]
    tracemalloc.start()
    try:
        assert code_of(content, size) == expected
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_every_truncation_of_a_real_header_is_told(tmp_path: Path) -> None:
    content = real(tmp_path / "small.gguf").read_bytes()
    whole = read(content)
    last = max(entry.offset + entry.bytes for entry in whole.tensors) + whole.data_offset
    for length in [*range(0, 400, 7), *range(400, last, 997), last - 1]:
        code = code_of(content[:length])
        assert code == ("gguf_wrong_file" if length < 4 else "gguf_truncated"), length
    assert code_of(content[:last]) is None


def test_counted_values_are_skipped_within_memory() -> None:
    strings = 300_000
    content = header([key("tokenizer.ggml.tokens", ARRAY, array(STRING, strings, text("token") * strings))])
    tracemalloc.start()
    try:
        parsed = read(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert parsed.metadata["tokenizer.ggml.tokens"] == Counted("string", strings)
    assert peak < 2 << 20


def test_more_strings_than_any_vocabulary_are_refused_before_they_are_read() -> None:
    content = header([key("a", ARRAY, array(STRING, reader.MAX_STRINGS + 1))])
    assert code_of(content, 1 << 40) == "gguf_header_invalid"


def test_long_string_is_counted_not_kept() -> None:
    content = header([key("a", STRING, text(b"x" * (reader.KEPT_STRING_BYTES + 1)))])
    assert read(content).metadata["a"] == Counted("string", reader.KEPT_STRING_BYTES + 1)


def test_many_long_values_are_kept_up_to_a_limit() -> None:
    body = text(b"x" * reader.KEPT_STRING_BYTES)
    content = header([key(f"a{index}", STRING, body) for index in range(40)])
    kept = [value for value in read(content).metadata.values() if isinstance(value, str)]
    assert sum(len(value) for value in kept) <= reader.KEPT_BYTES


def _seeds() -> list[bytes]:
    return [content for content, _, _ in BROKEN.values() if len(content) < 4096] + [
        header(
            [
                key("general.architecture", STRING, text("llama")),
                key("llama.block_count", U32, struct.pack("<I", 2)),
                key("words", ARRAY, array(STRING, 3, text("a") + text("bb") + text("ccc"))),
                key("numbers", ARRAY, array(F32, 4, struct.pack("<4f", 1, 2, 3, 4))),
            ],
            [tensor("token_embd.weight", [32, 4], 8, 0), tensor("output.weight", [32, 4], 8, 160)],
        )
        + b"\0" * 512
    ]


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_damaged_bytes_raise_nothing_but_faults(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(_seeds())))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(4, max(4, len(content) - 1)))
        if at < len(content):
            content[at] = data.draw(st.sampled_from([0, 1, 2, 8, 9, 127, 128, 255]))
    code_of(bytes(content), data.draw(st.sampled_from([None, 1 << 20, 1 << 45])))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.sampled_from([None, 1 << 40]))
def test_any_bytes_raise_nothing_but_faults(content: bytes, size: int | None) -> None:
    assert code_of(content, size) in {
        "gguf_wrong_file",
        "gguf_truncated",
        "gguf_header_invalid",
        "gguf_version_unsupported",
        None,
    }
    code_of(b"GGUF\3\0\0\0" + content, size)
