# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From what an operator says to a plan: which model, which GPUs, does it fit, and what would."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..catalogue_models import find_model, nearest_name
from ..compat import GPUS, find_gpu, other_memory
from ..faults import Fault, FaultError
from ..machine import Machine
from . import plan
from .faults import gguf_error
from .model import open_model
from .plan import FAULTS, Facts, Plan, Settings
from .reader import Header

#: A part of named GPUs: how many, and the product.
_NAMED = re.compile(r"\s*(?:(\d{1,3})\s*[x×*]\s*)?(\S.*?)\s*")


@dataclass(frozen=True)
class Gpu:
    """A GPU to plan for: name, memory in MiB, compute capability."""

    product: str
    memory_mib: float
    compute_capability: tuple[int, int]


def _no_gpus(message: str, remedy: str) -> FaultError:
    return FaultError(FAULTS.fault("plan_no_gpus", "gpus", message, remedy))


def named_gpus(text: str) -> list[Gpu]:
    """GPUs by product, as ``4 x V100-SXM2-32GB`` or ``V100-SXM2-32GB, H200``. FaultError plan_no_gpus."""
    found: list[Gpu] = []
    for part in text.split(","):
        match = _NAMED.fullmatch(part)
        gpu = find_gpu(match[2]) if match else None
        if match is None or gpu is None:
            raise _no_gpus(
                f"{part.strip()!r} names no GPU whose memory is known",
                f"Write a number and a product, for example 4 x V100-SXM2-32GB, or give gpus_mib. {known_products()}",
            )
        found += [Gpu(gpu.product, float(gpu.memory_mib), gpu.compute_capability)] * int(match[1] or 1)
    if not 0 < len(found) <= 64:
        raise _no_gpus(f"{len(found)} GPUs are named", "Name between 1 and 64 GPUs.")
    return found


def known_products() -> str:
    """The names that can be given, for a remedy."""
    names = dict.fromkeys(gpu.product.removeprefix("Tesla ").removeprefix("NVIDIA ") for gpu in GPUS)
    return f"Known are {', '.join(names)} (docs/compatibility.md)."


def named_notes(text: str) -> list[str]:
    """What of ``text`` was taken for one of two cards that differ in memory."""
    notes = []
    for part in text.split(","):
        match = _NAMED.fullmatch(part)
        taken, other = (find_gpu(match[2]), other_memory(match[2])) if match else (None, None)
        if match and taken and other:
            notes.append(
                f"{match[2]} is taken for {taken.product} ({taken.memory_mib} MiB); where it is {other.product} "
                f"({other.memory_mib} MiB), write that"
            )
    return list(dict.fromkeys(notes))


def detected_gpus(machine: Machine, nvidia_smi: str = "nvidia-smi") -> list[Gpu]:
    """The GPUs of a machine with their whole memory, in bus order; what runs on them now is taken as about to end.

    FaultError plan_no_gpus when nvidia-smi is missing, fails, or names none.
    """
    answer = machine.run([nvidia_smi, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"])
    if answer.missing or answer.timed_out or not answer.ok:
        how = "is missing" if answer.missing else "did not answer" if answer.timed_out else "failed"
        raise _no_gpus(f"no GPU is given and nvidia-smi {how}", "Install the driver first, or give gpus or gpus_mib.")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    shown = [shown_gpu(*row[:3]) for row in rows if len(row) > 1]
    found = [gpu for gpu in shown if gpu is not None]
    if not found:
        raise _no_gpus("no GPU is given and nvidia-smi names none", "Give gpus or gpus_mib.")
    return found


def shown_gpu(product: str, memory_mib: str, compute_capability: str = "") -> Gpu | None:
    """A GPU by nvidia-smi's name, memory.total and compute_cap, which old drivers lack; null where it has no memory."""
    if not re.fullmatch(r"\d+(\.\d+)?", memory_mib):
        return None
    told = re.fullmatch(r"(\d+)\.(\d+)", compute_capability)
    known = find_gpu(product)
    default = known.compute_capability if known else (7, 0)
    return Gpu(product, float(memory_mib), (int(told[1]), int(told[2])) if told else default)


@dataclass
class Answer:
    """A plan with what else fits. ``model`` is the catalogue's name or the location."""

    model: str
    plan: Plan
    max_context_per_request: int
    max_parallel: int
    nearest: Settings | None

    @property
    def fault(self) -> Fault | None:
        """The refusal, null when the model fits."""
        reason = self.plan.reason
        if reason is None:
            return None
        if self.nearest is None:
            remedy = (
                "Take a smaller quantisation, a smaller model, or more GPUs: not even one request of 256 tokens fits."
            )
        else:
            remedy = f"Write {_changes(self.plan.settings, self.nearest)}."
        return FAULTS.fault("plan_does_not_fit", self.model, reason, remedy)


def _changes(before: Settings, after: Settings) -> str:
    names = ("context_per_request", "parallel", "cache_type_k", "cache_type_v")
    changed = [f"{name}={getattr(after, name)}" for name in names if getattr(after, name) != getattr(before, name)]
    return " ".join(changed)


def load_header(
    location: str, http_headers: Mapping[str, str] | None = None, timeout: float = 30.0
) -> tuple[str, Header]:
    """The header of a catalogue name, path or URL, and the name to show. FaultError says what is wrong with it."""
    known = find_model(location)
    if known is not None:
        return known.name, known.header()
    model = open_model(location, http_headers, timeout)
    fatal = [fault for fault in model.faults if fault.code != "gguf_foreign_byte_order"]
    if fatal:
        # A word that can be neither a path nor a file's name was meant for the catalogue.
        if fatal[0].code == "gguf_not_found" and "/" not in location and not location.lower().endswith(".gguf"):
            raise gguf_error(
                "gguf_not_found",
                location,
                "the catalogue has no model of that name, and there is no such file",
                f"Write a name of docs/models.md, as {nearest_name(location)}, or the path or URL of a GGUF file.",
            )
        raise FaultError(fatal[0])
    assert model.header is not None
    return model.files[0].path, model.header


def answer(name: str, header: Header, settings: Settings) -> Answer:
    """Plan, and say what else would fit. FaultError for settings or a header that cannot be planned for."""
    try:
        facts = plan.read_facts(header)
    except ValueError as exc:
        raise FaultError(FAULTS.fault("plan_invalid", name, str(exc), "Give the GGUF of a text model.")) from None
    wrong = plan.check_settings(facts, settings)
    if wrong:
        raise FaultError(wrong[0])
    made = plan.make_plan(header, settings, facts)
    return Answer(
        name,
        made,
        plan.largest_context(header, settings, facts),
        plan.largest_parallel(header, settings, facts),
        None if made.fits else plan.nearest_that_fits(header, settings, facts),
    )


def settings_of(parameters: Mapping[str, Any], gpus: Sequence[Gpu]) -> Settings:
    """Settings from a module's parameters."""
    base = Settings(free_mib=tuple(gpu.memory_mib for gpu in gpus))
    overhead = parameters.get("overhead_mib")
    return replace(
        base,
        context_per_request=int(parameters["context_per_request"]),
        parallel=int(parameters["parallel"]),
        cache_type_k=str(parameters["cache_type_k"]),
        cache_type_v=str(parameters["cache_type_v"]),
        ubatch=int(parameters["ubatch"]),
        split_mode=str(parameters["split_mode"]),
        tensor_split=tuple(float(share) for share in parameters.get("tensor_split") or ()),
        kv_unified=bool(parameters["kv_unified"]),
        overhead_mib=plan.DEFAULT_OVERHEAD_MIB if overhead is None else float(overhead),
        compute_capability=min((gpu.compute_capability for gpu in gpus), default=(7, 0)),
    )


def table(result: Answer, gpus: Sequence[Gpu]) -> list[str]:
    """The plan as lines a person can read."""
    made, settings = result.plan, result.plan.settings
    facts: Facts = made.facts
    heads = ("GPU", "layers", "weights", "KV cache", "state", "compute", "overhead", "total", "memory", "")
    rows = [
        (
            f"{gpu.index} {gpus[gpu.index].product}",
            str(gpu.layers),
            *(
                f"{size:.0f}"
                for size in (gpu.weights_mib, gpu.kv_mib, gpu.state_mib, gpu.compute_mib, gpu.overhead_mib)
            ),
            f"{gpu.total_mib:.0f}",
            f"{gpu.free_mib:.0f}",
            "fits" if gpu.fits else "TOO SMALL",
        )
        for gpu in made.per_gpu
    ]
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = [
        f"{result.model} ({facts.architecture}): {settings.parallel} x {settings.context_per_request} tokens, cache "
        f"{settings.cache_type_k}/{settings.cache_type_v}, micro-batch {settings.ubatch}; sizes in MiB",
    ]
    for row in (heads, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.append(
        f"host: {made.host_mib:.0f} MiB, of which {made.page_cache_mib:.0f} are pages of the file, read when needed"
    )
    lines.append(
        f"fits up to: {settings.parallel} x {result.max_context_per_request} tokens, or {result.max_parallel} x "
        f"{settings.context_per_request} tokens"
    )
    lines += [f"note: {note}" for note in made.notes]
    refusal = result.fault
    if refusal is not None:
        lines += [f"does not fit: {refusal.message}", f"  -> {refusal.remedy}"]
    return lines
