# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a server must know of a model before it starts: a name for it, architecture, context, size of all shards."""

from __future__ import annotations

from dataclasses import dataclass

from ..faults import Fault
from ..gguf.model import open_model
from ..gguf.shards import shard_name


@dataclass(frozen=True)
class ModelFacts:
    """``size`` in bytes of all shards, ``context`` in tokens; null where the file does not say or is not readable."""

    size: int | None = None
    architecture: str | None = None
    context: int | None = None


def stem(path: str) -> str:
    """A name for the model from its path: without folder, shard number and ending."""
    named = shard_name(path)
    return (named.stem if named else path.removesuffix(".gguf")).rpartition("/")[2]


def inspect(path: str) -> tuple[ModelFacts, list[Fault]]:
    """Read the headers of the model and its shards, not their weights; faults as module gguf_info has them."""
    model = open_model(path)
    if model.header is None:
        return ModelFacts(), model.faults
    architecture = model.header.architecture
    context = model.header.get(f"{architecture}.context_length")
    return (
        ModelFacts(model.header.file_bytes, architecture, context if isinstance(context, int) else None),
        model.faults,
    )
