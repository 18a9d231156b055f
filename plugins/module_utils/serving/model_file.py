# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a server must know of a model before it starts: a name for it, architecture, context, size of all shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..faults import Fault
from ..gguf.model import open_model
from ..gguf.reader import Header
from ..gguf.shards import shard_name
from ..transfer.store import Places, read_stamp
from .catalogue import CATALOGUE


@dataclass(frozen=True)
class ModelFacts:
    """``size`` in bytes of all shards, ``context`` in tokens; null where the file does not say or is not readable.

    ``header`` is that of the whole model.
    """

    size: int | None = None
    architecture: str | None = None
    context: int | None = None
    header: Header | None = None


def stem(path: str) -> str:
    """A name for the model from its path: without folder, shard number and ending."""
    named = shard_name(path)
    return (named.stem if named else path.removesuffix(".gguf")).rpartition("/")[2]


def inspect(path: str) -> tuple[ModelFacts, list[Fault]]:
    """Read the headers of the model and its shards, not their weights; faults as module gguf_info has them."""
    model = open_model(path)
    if model.header is None:
        return ModelFacts(), model.faults
    header = model.header
    return ModelFacts(header.file_bytes, header.architecture, context_of(header), header), model.faults


def context_of(header: Header) -> int | None:
    """Tokens that the model was made for; null where the header does not say."""
    value = header.get(f"{header.architecture}.context_length")
    return value if isinstance(value, int) else None


def unverified(paths: Sequence[str]) -> list[Fault]:
    """At most one fault: files that no run proved by SHA-256, or that changed since. No contents are read."""
    problems = []
    for path in paths:
        name = Path(path).name
        stamp = read_stamp(Places(Path(path)).stamp)
        try:
            stat = Path(path).stat()
        except OSError:
            continue
        if stamp is None:
            problems.append(f"{name} was never verified")
        elif not stamp.fits(stat):
            problems.append(f"{name} changed since it was verified (size, time or inode)")
        elif not stamp.proved:
            problems.append(f"{name} was taken with nothing to verify it by")
    if not problems:
        return []
    return [
        CATALOGUE.fault(
            "model_unverified",
            "model",
            "; ".join(problems),
            "Let role model bring or check the file with its sha256 (playbooks/model.yml), or accept it: "
            "`allow_unverified_model`: true.",
        )
    ]
