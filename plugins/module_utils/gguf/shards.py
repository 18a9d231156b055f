# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Shard sets: one model in files NAME-00001-of-0000M.gguf, never to be joined, loaded by giving the first.

Naming: llama.cpp 0.5.0-dev, src/llama.cpp llama_split_path ("%s-%05d-of-%05d.gguf", counted from 1); keys split.no
(counted from 0), split.count and split.tensors.count: src/llama-model-loader.cpp:595-674, whose checks are repeated
here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..faults import Fault
from .faults import FAULTS
from .reader import Header

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
#: More shards than any model has.
MAX_SHARDS = 1000


@dataclass(frozen=True)
class ShardName:
    """A shard's place in its set: ``number`` of ``count``, counted from 1; ``stem`` is what the names share."""

    stem: str
    number: int
    count: int

    def of(self, number: int) -> str:
        return f"{self.stem}-{number:05d}-of-{self.count:05d}.gguf"

    @property
    def all(self) -> list[str]:
        return [self.of(number) for number in range(1, self.count + 1)]


def shard_name(path: str) -> ShardName | None:
    """The place that a path or URL names, null where it names none. A query after a URL is kept off."""
    match = _NAME.fullmatch(path)
    if not match:
        return None
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count or count > MAX_SHARDS:
        return None
    return ShardName(match["stem"], number, count)


def check_first(header: Header, path: str) -> tuple[ShardName | None, list[Fault]]:
    """Which set the file that was given begins; a fault where it is not the first, or name and header differ."""
    named = shard_name(path)
    count = header.get("split.count", 0)
    number = header.get("split.no", 0)
    if type(count) is not int or count <= 1:
        if named is not None and named.count > 1:
            message = f"the name says shard {named.number} of {named.count}, the header knows of no set"
            remedy = "Give the file its own name back, or download the whole set again."
            return None, [FAULTS.fault("gguf_shard_mismatch", path, message, remedy)]
        return None, []
    if number != 0:
        first = named.of(1) if named else "the file whose name ends in -00001-of-0000N.gguf"
        shown = number + 1 if type(number) is int else number
        return named, [
            FAULTS.fault("gguf_not_first_shard", path, f"this is shard {shown} of {count}", f"Give {first}.")
        ]
    if named is None or named.count != count or named.number != 1:
        message = f"the header says shard 1 of {count}, the name does not: an engine finds the others by name"
        return None, [
            FAULTS.fault(
                "gguf_shard_mismatch", path, message, f"Name the files NAME-00001-of-{count:05d}.gguf and so on."
            )
        ]
    return named, []


def check_set(name: ShardName, headers: Sequence[Header | None]) -> list[Fault]:
    """Faults of a set whose files were read in order; null stands for a missing one."""
    missing = [number for number, header in enumerate(headers, 1) if header is None]
    faults = []
    if missing:
        listed = ", ".join(name.of(number).rsplit("/", 1)[-1] for number in missing)
        faults.append(
            FAULTS.fault(
                "gguf_shard_missing",
                name.of(1),
                f"{len(missing)} of {name.count} shards are missing: {listed}",
                "Download the missing shards of the same revision.",
            )
        )
    first = headers[0]
    seen: set[str] = set()
    twice: list[str] = []
    for number, header in enumerate(headers, 1):
        if header is None:
            continue
        said, count = header.get("split.no"), header.get("split.count", name.count)
        architecture = header.architecture
        if said != number - 1 or count != name.count:
            shown = said + 1 if type(said) is int else "no shard"
            message = f"by name this is shard {number} of {name.count}, its header says {shown} of {count}"
            faults.append(_mismatch(name.of(number), message))
        elif first is not None and architecture is not None and architecture != first.architecture:
            message = f"architecture {architecture}, while the first shard has {first.architecture}"
            faults.append(_mismatch(name.of(number), message))
        twice += [tensor.name for tensor in header.tensors if tensor.name in seen]
        seen.update(tensor.name for tensor in header.tensors)
    if twice:
        faults.append(_mismatch(name.of(1), f"tensors are in more than one shard: {', '.join(sorted(twice)[:3])}"))
    expected = first.get("split.tensors.count") if first is not None else None
    if not missing and not faults and type(expected) is int and expected != len(seen):
        faults.append(_mismatch(name.of(1), f"the set should hold {expected} tensors and holds {len(seen)}"))
    return faults


def _mismatch(path: str, message: str) -> Fault:
    return FAULTS.fault(
        "gguf_shard_mismatch", path, message, "Download all shards of one revision again; never mix sources."
    )
