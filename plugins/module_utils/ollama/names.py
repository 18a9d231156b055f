# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Names of models: ``[host/][namespace/]name[:tag]``, as Ollama 0.24.0 reads them (types/model/name.go)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..faults import FaultError
from ..transfer.ollama_store import HOST, NAMESPACE, split_name
from .catalogue import fault

#: What each part may hold beside letters, digits and _, in words, and its length. The first is a letter, digit or _.
_PARTS = {
    "host": (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}"), "'-', '.' and ':'"),
    "namespace": (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}"), "'-'"),
    "name": (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"), "'-' and '.'"),
    "tag": (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"), "'-' and '.'"),
}
_FORM = "Write [host/][namespace/]name[:tag], such as qwen3:8b or hf.co/owner/repository-GGUF:Q4_K_M."
#: Hosts under which Hugging Face is a registry of Ollama's kind; the tag is the quantisation there.
HUGGING_FACE = ("hf.co", "huggingface.co")


@dataclass(frozen=True)
class Name:
    """A name with all its parts."""

    host: str
    namespace: str
    model: str
    tag: str

    @property
    def below(self) -> Path:
        """Where its manifest lies below the store."""
        return Path("manifests", self.host, self.namespace, self.model, self.tag)

    @property
    def shown(self) -> str:
        """The name as Ollama's own list has it: without what is the default, always with the tag."""
        words = [self.model]
        if self.host.lower() != HOST:
            words = [self.host, self.namespace, self.model]
        elif self.namespace.lower() != NAMESPACE:
            words = [self.namespace, self.model]
        return f"{'/'.join(words)}:{self.tag}"

    @property
    def key(self) -> tuple[str, ...]:
        """What two names share that Ollama takes for one: it tells no capitals from small letters."""
        return tuple(part.lower() for part in (self.host, self.namespace, self.model, self.tag))


def parse_name(text: str) -> Name:
    """Read a name. FaultError: model_name_invalid."""
    if "://" in text:
        raise _invalid(text, "it is an address", f"{_FORM} A registry without TLS is asked over http with insecure.")
    if "@" in text:
        raise _invalid(text, "it holds a digest", f"{_FORM} What the model must be goes into digest, beside the name.")
    parts = split_name(text)
    if len(parts) != 4:
        raise _invalid(text, f"it has {len(parts) - 1} parts between '/', at most three are possible", _FORM)
    name = Name(*parts)
    for label, part in zip(_PARTS, (name.host, name.namespace, name.model, name.tag), strict=True):
        pattern, others = _PARTS[label]
        if not part:
            raise _invalid(text, f"the {label} is empty", _FORM)
        if not pattern.fullmatch(part):
            longest = 350 if label == "host" else 80
            message = (
                f"the {label} '{part}' may hold letters, digits, '_', {others}, begins with a letter, digit or '_'"
            )
            raise _invalid(text, f"{message}, and has {longest} characters at most", _FORM)
    low = name.tag.lower()
    if low == "local":
        raise _invalid(text, "':local' is no tag: Ollama cuts it off", "Leave it out, or write the tag itself.")
    if low == "cloud" or low.endswith("-cloud"):
        remedy = "Name a tag with weights; this collection runs models on the machine itself."
        raise _invalid(text, "it names a model that runs at Ollama's cloud and has no weights here", remedy)
    return name


def name_at(below: Path) -> Name | None:
    """The name of a manifest by its path below C(manifests); null for what is none of a model."""
    return Name(*below.parts) if len(below.parts) == 4 else None


def _invalid(text: str, message: str, remedy: str) -> FaultError:
    return FaultError(fault("model_name_invalid", text or "model", message if text else "it is empty", remedy))
