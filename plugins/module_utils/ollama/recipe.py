# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a model is made with besides its weights, and what it is expected to be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..faults import Fault
from .catalogue import fault
from .store import Image, Store

#: Parameters of Ollama 0.24.0 by type (api/types.go, Options). It takes any other and only logs that it has none such.
_INTEGERS = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "seed", "num_predict", "top_k"),
    "repeat_last_n",
)
_NUMBERS = (*("top_p", "min_p", "typical_p", "temperature", "repeat_penalty", "presence_penalty", "frequency_penalty"),)
_SWITCHES = ("use_mmap",)
_LISTS = ("stop",)
_KNOWN = (*_INTEGERS, *_NUMBERS, *_SWITCHES, *_LISTS)
_WORDS = {"true": True, "yes": True, "false": False, "no": False}
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Recipe:
    """What C(/api/create) is given; null leaves it to Ollama, which takes what the file itself brings."""

    parameters: Mapping[str, Any]
    template: str | None = None
    system: str | None = None

    def as_request(self) -> dict[str, Any]:
        request: dict[str, Any] = {}
        if self.parameters:
            request["parameters"] = dict(self.parameters)
        if self.template is not None:
            request["template"] = self.template
        if self.system is not None:
            request["system"] = self.system
        return request

    def fits(self, image: Image, store: Store) -> bool:
        """Whether a model in the store was made so."""
        try:
            kept = json.loads(store.content(image.layer("params")) or b"{}")
        except ValueError:
            return False
        # Ollama adds stop words of its own for some architectures.
        others = set(kept) - set(self.parameters) - {"stop"}
        if others or any(kept.get(key) != value for key, value in self.parameters.items()):
            return False
        for kind, text in (("template", self.template), ("system", self.system)):
            if text is not None and store.content(image.layer(kind)) != text.encode():
                return False
        # A template may be the file's own; a system prompt never is.
        return self.system is not None or image.layer("system") is None


def read_parameters(given: Mapping[str, Any] | None, subject: str) -> tuple[dict[str, Any], list[Fault]]:
    """Parameters in the types that Ollama wants: a template of Ansible makes text of a number."""
    parameters: dict[str, Any] = {}
    faults = []
    for key, value in (given or {}).items():
        if key not in _KNOWN:
            remedy = f"Write one of {', '.join(sorted(_KNOWN))}."
            if key in ("num_context", "context", "ctx", "context_length", "n_ctx"):
                remedy = "Write num_ctx."
            message = f"parameters: {key} is no parameter of Ollama, which would only log that"
            faults.append(fault("model_parameter_invalid", subject, message, remedy))
            continue
        try:
            parameters[key] = _typed(key, value)
        except (TypeError, ValueError):
            kind = "an integer" if key in _INTEGERS else "a number" if key in _NUMBERS else "true or false"
            kind = "a list of texts" if key in _LISTS else kind
            message = f"parameters: {key} is {value!r}, not {kind}"
            faults.append(fault("model_parameter_invalid", subject, message, f"Write {kind}."))
    return parameters, faults


def _typed(key: str, value: Any) -> Any:
    if key in _LISTS:
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            raise TypeError
        return items
    if key in _SWITCHES:
        text = str(value).lower()
        if text not in _WORDS:
            raise ValueError
        return _WORDS[text]
    if isinstance(value, bool):
        raise TypeError
    if key in _INTEGERS:
        number = float(value)
        if number != int(number):
            raise ValueError
        return int(number)
    return float(value)


@dataclass(frozen=True)
class Expected:
    """What the model must be; null asks for nothing. ``context`` in tokens, ``size`` of all blobs in bytes."""

    architecture: str | None = None
    parameter_size: str | None = None
    quantization: str | None = None
    context: int | None = None
    size: int | None = None


def details_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What C(/api/show) tells of a model; null is unknown."""
    details = answer.get("details") if isinstance(answer.get("details"), Mapping) else {}
    info = answer.get("model_info") if isinstance(answer.get("model_info"), Mapping) else {}
    assert isinstance(details, Mapping)
    assert isinstance(info, Mapping)
    architecture = info.get("general.architecture") or details.get("family")
    context = info.get(f"{architecture}.context_length")
    count = info.get("general.parameter_count")
    return {
        "architecture": str(architecture) if architecture else None,
        "parameter_size": str(details.get("parameter_size") or "") or None,
        "parameter_count": int(count) if isinstance(count, (int, float)) else None,
        "quantization": str(details.get("quantization_level") or "") or None,
        "context": int(context) if isinstance(context, (int, float)) else None,
    }


def compare(subject: str, expected: Expected, details: Mapping[str, Any], size: int | None) -> list[Fault]:
    """Where the model is not what was asked for. What Ollama does not tell cannot be compared, and is a fault too."""
    wrong = []
    for key in ("architecture", "quantization"):
        asked, told = getattr(expected, key), details[key]
        if asked is not None and (told is None or asked.lower() != told.lower()):
            wrong.append((key, told, asked))
    asked = expected.parameter_size
    if asked is not None and not _same_size(asked, details["parameter_size"], details["parameter_count"]):
        wrong.append(("parameter_size", details["parameter_size"], asked))
    if expected.context is not None and (details["context"] is None or details["context"] < expected.context):
        wrong.append(("context", details["context"], f"at least {expected.context}"))
    if expected.size is not None and size is not None and size != expected.size:
        wrong.append(("size", size, expected.size))
    return [
        fault(
            "model_differs",
            subject,
            f"{key} is {'not told by Ollama' if told is None else told}, asked for is {asked}",
            "Name the tag that has what is asked for, or correct what is asked for.",
        )
        for key, told, asked in wrong
    ]


def number_of(text: str) -> tuple[float, int] | None:
    """``8.2B`` as (8.2e9, 1): the number and its decimals; null for what is none."""
    match = re.fullmatch(r"\s*(\d+)(?:\.(\d+))?\s*([KMBT]?)\s*", text, re.IGNORECASE)
    if match is None:
        return None
    value = float(f"{match[1]}.{match[2] or 0}") * _UNITS[match[3].upper()]
    return value, len(match[2] or "")


def _same_size(asked: str, told: str | None, count: int | None) -> bool:
    """``8B`` is what 7.6B and 8.2B are called: as exact as it was written, rounded or cut off."""
    wanted = number_of(asked)
    has = (float(count), 0) if count is not None else number_of(told or "")
    if wanted is None or has is None:
        return told is not None and asked.strip().lower() == told.strip().lower()
    unit = next((scale for scale in (1e12, 1e9, 1e6, 1e3, 1.0) if wanted[0] >= scale), 1.0)
    value, step = has[0] / unit, 10.0 ** -wanted[1]
    return abs(value - wanted[0] / unit) < step
