# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A model as one thing: its header, read from a file, a shard set, a saved header, or a URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..faults import Fault, FaultError
from .faults import FAULTS
from .identify import LOOKED_AT, WrongFile, identify
from .reader import Counted, Header, check_data, read_header
from .shards import ShardName, check_first, check_set
from .source import FileSource, Source, UrlSource, is_url


@dataclass(frozen=True)
class ModelFile:
    """One file of a model; ``bytes`` is its length, ``tensors`` how many tensors it holds. Null where it is missing."""

    path: str
    bytes: int | None
    tensors: int | None

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, "bytes": self.bytes, "tensors": self.tensors}


@dataclass
class Model:
    """What was read.

    ``header`` holds the tensors of all shards (offsets within their own files) and the metadata of the first; null when
    nothing could be read. ``wrong`` says what the file is instead of a GGUF.
    """

    location: str
    header: Header | None = None
    files: list[ModelFile] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    wrong: WrongFile | None = None
    bytes_fetched: int = 0

    @property
    def parameters(self) -> int | None:
        """Number of values in all tensors; null when nothing could be read."""
        return sum(tensor.elements for tensor in self.header.tensors) if self.header else None

    @property
    def tensor_bytes(self) -> int | None:
        return sum(tensor.bytes for tensor in self.header.tensors) if self.header else None

    @property
    def tensor_types(self) -> dict[str, int]:
        """How many tensors there are of each type."""
        counts: dict[str, int] = {}
        for tensor in self.header.tensors if self.header else []:
            counts[tensor.type.name] = counts.get(tensor.type.name, 0) + 1
        return dict(sorted(counts.items()))


def plain_metadata(header: Header) -> dict[str, Any]:
    """Metadata fit for a result: what was too long to keep is shown as ``{type, count}``."""
    return {
        key: value.as_dict() if isinstance(value, Counted) else value for key, value in sorted(header.metadata.items())
    }


def open_model(
    location: str,
    http_headers: Mapping[str, str] | None = None,
    timeout: float = 30.0,
    ca_file: str | None = None,
    open_source: Callable[[str], Source] | None = None,
) -> Model:
    """Read the model at a path or URL; whatever is wrong is in ``faults``.

    Of a shard set the first must be given; the others are found by name and checked. ``open_source`` replaces how a
    location is opened.
    """

    def opener(place: str) -> Source:
        if open_source is not None:
            return open_source(place)
        return UrlSource(place, http_headers, timeout, ca_file=ca_file) if is_url(place) else FileSource(place)

    model = Model(location)
    header = _read(model, location, opener)
    if header is None:
        return model
    model.header = header
    if header.byte_order == "big":
        message, remedy = (
            "the file is big-endian, which this engine does not load",
            "Take the usual, little-endian file.",
        )
        model.faults.append(FAULTS.fault("gguf_foreign_byte_order", model.files[0].path, message, remedy))
    # A query (a token, a revision) belongs to every file of the set.
    path, _, query = location.partition("?") if is_url(location) else (location, "", "")
    name, faults = check_first(header, path)
    model.faults += faults
    if name is None or faults:
        return model
    headers: list[Header | None] = [header]
    for number in range(2, name.count + 1):
        headers.append(_read_sibling(model, name, number, query, opener))
    broken = {fault.subject for fault in model.faults}
    model.faults += [fault for fault in check_set(name, headers) if fault.code != "gguf_shard_missing" or not broken]
    model.header = Header(
        version=header.version,
        byte_order=header.byte_order,
        metadata=header.metadata,
        tensors=[tensor for shard in headers if shard is not None for tensor in shard.tensors],
        alignment=header.alignment,
        data_offset=header.data_offset,
        file_bytes=sum(shard.file_bytes for shard in headers if shard is not None),
    )
    return model


def _read_sibling(
    model: Model, name: ShardName, number: int, query: str, opener: Callable[[str], Source]
) -> Header | None:
    place = name.of(number) + (f"?{query}" if query else "")
    before = len(model.faults)
    header = _read(model, place, opener)
    if header is None and [fault.code for fault in model.faults[before:]] == ["gguf_not_found"]:
        del model.faults[before:]  # told once for the whole set
    return header


def _read(model: Model, place: str, opener: Callable[[str], Source]) -> Header | None:
    """The header of one file, noted in ``model`` with its faults; null when there is none to work with."""
    try:
        source = opener(place)
    except FaultError as exc:
        model.files.append(ModelFile(exc.fault.subject, None, None))
        model.faults.append(exc.fault)
        return None
    header = None
    try:
        header = read_header(source)
        check_data(header, source.name)
    except FaultError as exc:
        model.faults.append(exc.fault)
        if exc.fault.code == "gguf_wrong_file" and model.wrong is None:
            model.wrong = identify(source.read(0, LOOKED_AT), source.size, source.name)
    finally:
        model.bytes_fetched += getattr(source, "fetched", 0)
        source.close()
    model.files.append(ModelFile(source.name, source.size, len(header.tensors) if header else None))
    return header
