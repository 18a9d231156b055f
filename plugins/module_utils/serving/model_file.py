# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the server must know of a model before it starts: that all shards are there, architecture and context."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..faults import Fault
from .catalogue import CATALOGUE

SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

#: Sizes in bytes of GGUF's fixed-size value types, by their number (ggml's docs/gguf.md).
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
#: No sane header has longer texts or more fields; a larger count means that this is no GGUF file.
_LIMIT = 1 << 28


@dataclass(frozen=True)
class ModelFile:
    """``architecture`` and ``context`` (tokens) are null where the file is not readable or does not say."""

    size: int | None
    architecture: str | None
    context: int | None


def stem(path: str) -> str:
    """A name for the model from its path: without folder, shard number and ending."""
    name = path.rpartition("/")[2]
    found = SHARD.match(name)
    return found["stem"] if found else name.removesuffix(".gguf")


def shards(path: str) -> list[str]:
    """Paths of all files of the set that ``path`` is the first of; just ``path`` where it is no shard."""
    folder, slash, name = path.rpartition("/")
    found = SHARD.match(name)
    if not found:
        return [path]
    count = int(found["count"])
    return [f"{folder}{slash}{found['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def inspect(path: str) -> tuple[ModelFile, list[Fault]]:
    """Look at the model and its shards without reading weights."""
    found = SHARD.match(path.rpartition("/")[2])
    if found and int(found["number"]) != 1:
        first = shards(path)[0] if int(found["count"]) else path
        message = f"{path} is shard {int(found['number'])}; the engine loads a set by its first"
        return ModelFile(None, None, None), [
            CATALOGUE.fault("model_not_first_shard", "model", message, f"Write {first}.")
        ]
    faults = []
    size = 0
    for shard in shards(path):
        try:
            bytes_here = Path(shard).stat().st_size
        except OSError as exc:
            faults.append(_missing(shard, "there is no such file" if isinstance(exc, FileNotFoundError) else str(exc)))
            continue
        if bytes_here == 0:
            faults.append(_missing(shard, "the file is empty"))
        size += bytes_here
    if faults:
        return ModelFile(None, None, None), faults
    try:
        with Path(path).open("rb") as stream:
            architecture, context = _read_header(stream)
    except (OSError, ValueError, struct.error) as exc:
        remedy = "Download the model again; role model verifies it."
        return ModelFile(size, None, None), [CATALOGUE.fault("model_unreadable", path, str(exc), remedy)]
    return ModelFile(size, architecture, context), []


def _missing(path: str, what: str) -> Fault:
    return CATALOGUE.fault(
        "model_missing", path, what, "Download it with role model, or correct the path of the first shard in model."
    )


def _read_header(stream: BinaryIO) -> tuple[str | None, int | None]:
    if stream.read(4) != b"GGUF":
        raise ValueError("does not begin with the GGUF magic")
    _, _, fields = struct.unpack("<IQQ", stream.read(20))
    architecture: str | None = None
    contexts: dict[str, int] = {}
    for _ in range(min(fields, 4096)):
        key = _text(stream)
        (kind,) = struct.unpack("<I", stream.read(4))
        if key == "general.architecture" and kind == _STRING:
            architecture = _text(stream)
        elif key.endswith(".context_length") and kind == _UINT32:
            (contexts[key],) = struct.unpack("<I", stream.read(4))
        elif key.startswith("tokenizer."):
            # The vocabulary is most of a header, and comes after the fields looked for.
            break
        else:
            _skip(stream, kind)
        if architecture and f"{architecture}.context_length" in contexts:
            break
    return architecture, contexts.get(f"{architecture}.context_length")


def _text(stream: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > _LIMIT:
        raise ValueError("the GGUF header is damaged: a text of impossible length")
    return stream.read(length).decode("utf-8", "replace")


def _skip(stream: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _text(stream)
    elif kind == _ARRAY:
        inner, count = struct.unpack("<IQ", stream.read(12))
        if count > _LIMIT:
            raise ValueError("the GGUF header is damaged: a list of impossible length")
        if inner in _SIZES:
            stream.seek(_SIZES[inner] * count, 1)
        else:
            for _ in range(count):
                _skip(stream, inner)
    elif kind in _SIZES:
        stream.seek(_SIZES[kind], 1)
    else:
        raise ValueError(f"the GGUF header is damaged: unknown value type {kind}")
