# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Will the model fit the cards that it is to run on: counted here, counted by the engine's own tool, the larger rules.

`llama-fit-params -fitp on` loads nothing and prints what each device would hold. It reserves logits for every token of
a micro-batch, where a server computes them for one token a request (LC tools/fit-params, measured); that much is taken
off what it says of the card with the output layer. It cannot know what driver and engine take beside the buffers
either; that is the plan's `overhead`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..faults import Fault, FaultError
from ..gguf import planning
from ..gguf.plan import FAULTS as PLAN
from ..gguf.plan import GpuPlan, read_facts
from ..gguf.plan import Settings as PlanSettings
from ..gguf.reader import Header
from ..machine import Completed, Machine, Runner
from ..nvidia.inventory import driver_gpus
from ..nvidia.values import bus_id
from . import calibration
from .arguments import Plan, Settings, option_of
from .catalogue import CATALOGUE
from .listener import unit_of

MIB = 1 << 20
#: What a process may hold of a card and still leave it to a server: a monitor's context, not a model.
FOREIGN_MIB = 256
#: Micro-batch of the engine where none is set.
UBATCH = 512
FIT_SECONDS = 300.0
#: Options that leave weights or cache in the host's memory, with the number of their values. The plan puts all on the
#: cards; llama-fit-params takes these options as the server does.
OFFLOADING = {
    **dict.fromkeys(("-cmoe", "--cpu-moe", "-nkvo", "--no-kv-offload"), 0),
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe", "-ncffn", "--n-cpu-ffn", "-ot", "--override-tensor"), 1),
}
#: Options that bring further weights, which neither of the two counts.
FURTHER = {
    *("-mm", "--mmproj", "--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"),
    *("-md", "--model-draft", "--spec-draft-model"),
}
#: Variables that decide which devices the engine sees and how it uses them; others may hold secrets.
DEVICE_VARIABLE = re.compile(r"CUDA_|GGML_|NVIDIA_|LD_")


@dataclass(frozen=True)
class Card(planning.Gpu):
    """One GPU as nvidia-smi shows it. ``memory_mib`` is the whole memory: what runs there now is to be replaced."""

    bus_id: str
    uuid: str


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a card; ``mib`` is null where nvidia-smi does not tell."""

    bus_id: str
    pid: int
    program: str
    mib: int | None


def cards_of(machine: Machine, nvidia_smi: str = "nvidia-smi") -> list[Card]:
    """The machine's GPUs in bus order; empty where nvidia-smi does not answer, which is not the same as none."""
    fields = "pci.bus_id,uuid,name,memory.total,compute_cap"
    done = machine.run([nvidia_smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    found = []
    for bus, uuid, *shown in _rows(done, 5):
        gpu = planning.shown_gpu(*shown)
        if gpu is not None:
            found.append(Card(gpu.product, gpu.memory_mib, gpu.compute_capability, bus, uuid))
    return sorted(found, key=lambda card: bus_id(card.bus_id) or "")


def holders_of(machine: Machine, nvidia_smi: str = "nvidia-smi") -> list[Holder]:
    """Who holds memory of which card; empty where nvidia-smi does not answer."""
    fields = "gpu_bus_id,pid,process_name,used_memory"
    done = machine.run([nvidia_smi, f"--query-compute-apps={fields}", "--format=csv,noheader,nounits"])
    return [
        Holder(
            row[0],
            int(row[1]),
            Path(row[2].split(" ")[0]).name or "a process",
            int(row[3]) if row[3].isdigit() else None,
        )
        for row in _rows(done, 4)
        if row[1].isdigit()
    ]


def _rows(done: Completed, columns: int) -> list[list[str]]:
    if not done.ok:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == columns]


def chosen(cards: Sequence[Card], used: Sequence[str] | None) -> list[Card]:
    """Those of ``cards`` that have the bus ids ``used``, in that order; all where none are named."""
    if used is None:
        return list(cards)
    by_bus = {bus_id(card.bus_id): card for card in cards}
    return [by_bus[bus_id(name)] for name in used if bus_id(name) in by_bus]


def foreign(holders: Sequence[Holder], used: Sequence[Card], own_units: Collection[str], here: Machine) -> list[Fault]:
    """Another engine on the cards, named. What our own units hold is about to be given back."""
    on = {bus_id(card.bus_id): card for card in used}
    faults = []
    for holder in holders:
        card = on.get(bus_id(holder.bus_id))
        unit = unit_of(here, holder.pid)
        if card is None or unit in own_units or (holder.mib is not None and holder.mib < FOREIGN_MIB):
            continue
        held = "an unknown amount of memory" if holder.mib is None else f"{holder.mib} MiB"
        who = f"{holder.program} (pid {holder.pid}{f', unit {unit}' if unit else ''})"
        stop = f"systemctl disable --now {unit}" if unit and unit.endswith(".service") else f"kill {holder.pid}"
        faults.append(
            CATALOGUE.fault(
                "gpu_held",
                card.bus_id,
                f"{who} holds {held} of it",
                f"Stop that program ({stop}), or choose other cards with `gpus`: two engines never share one.",
            )
        )
    return faults


@dataclass(frozen=True)
class Counted:
    """What each card will hold. ``per_gpu``: one entry a card, ready for a module's result. ``notes`` for people."""

    per_gpu: list[dict[str, Any]]
    faults: list[Fault]
    notes: list[str]


def count(
    settings: Settings,
    computed: Plan,
    header: Header,
    cards: Sequence[Card],
    programs: str | None,
    runner: Runner,
    short: Mapping[str, float] | None = None,
) -> Counted:
    """Plan for ``cards``. Faults when it does not fit.

    ``programs`` is the folder of the engine's programs; null where the engine is not to be asked. ``short``: by UUID,
    MiB that servers on this machine held beyond what was counted (see calibration); they have to fit as well.
    """
    try:
        answer = planning.answer(settings.model, header, plan_settings(settings, cards))
    except FaultError as exc:
        return Counted([], [exc.fault], [])
    faults = [answer.fault] if answer.fault else []
    notes = list(answer.plan.notes)
    moved = offloading(settings)
    notes += [
        f"not counted: {word} of extra_args" for word in map(str, settings.extra_args) if option_of(word) in FURTHER
    ]
    engine, why = ask_engine(settings, computed, programs, runner) if programs is not None else ({}, "")
    if why:
        notes.append(why)
    if moved:
        faults = [fault for fault in faults if fault.code != "plan_does_not_fit"]
        if not engine:
            notes.append(f"{moved[0]} of extra_args leaves memory to the host: what remains on the cards is not known")
    placed = [gpu for gpu in answer.plan.per_gpu if gpu.layers]
    output = placed[-1].index if placed else 0
    logits = (settings.ubatch or UBATCH) - settings.parallel
    excess = max(0, logits) * read_facts(header).vocabulary * 4 / MIB
    per_gpu = []
    for gpu, card in zip(answer.plan.per_gpu, cards, strict=True):
        theirs = engine.get(gpu.index)
        if theirs is not None and gpu.index == output:
            theirs = theirs.with_less_compute(excess)
        said = theirs.total + gpu.overhead_mib if theirs is not None else None
        counted = said if moved and said is not None else max(gpu.total_mib, said or 0.0)
        more = (short or {}).get(card.uuid, 0.0)
        per_gpu.append(_entry(gpu, card, said, counted, more))
        known = said is not None or not moved
        if gpu.layers and known and counted <= card.memory_mib < counted + more:
            faults.append(
                PLAN.fault(
                    "plan_does_not_fit",
                    settings.model,
                    f"GPU {gpu.index} ({card.product} at {card.bus_id}) has {card.memory_mib:.0f} MiB, {counted:.0f} "
                    f"are counted, and a server here has held {more:.0f} more than was counted for it",
                    "Lower `context_per_request` or `parallel`. If that server was another case, remove "
                    f"{calibration.FILE}: it is measured anew.",
                )
            )
        if said is not None and (gpu.fits or moved) and said > card.memory_mib:
            faults.append(
                PLAN.fault(
                    "plan_does_not_fit",
                    settings.model,
                    f"llama-fit-params counts {said:.0f} MiB on GPU {gpu.index} ({card.product} at {card.bus_id}, "
                    f"{gpu.overhead_mib:.0f} for driver and engine among them), the card has {card.memory_mib:.0f}",
                    "Lower `context_per_request` or `parallel`, or write `cache_type_k` and `cache_type_v` q8_0.",
                )
            )
    return Counted(per_gpu, faults, notes)


def offloading(settings: Settings) -> list[str]:
    """The words of ``extra_args`` that leave weights or cache in the host's memory, with their values."""
    words = [str(word) for word in settings.extra_args]
    found: list[str] = []
    for at, word in enumerate(words):
        option = option_of(word)
        if option in OFFLOADING:
            found += words[at : at + 1 + OFFLOADING[option]]
    return found


def plan_settings(settings: Settings, gpus: Sequence[planning.Gpu], overhead_mib: float | None = None) -> PlanSettings:
    """What a server's settings are for the memory plan. ``overhead_mib`` null takes the plan's own figure."""
    return planning.settings_of(
        {
            "context_per_request": settings.context_per_request,
            "parallel": settings.parallel,
            "cache_type_k": settings.cache_type_k,
            "cache_type_v": settings.cache_type_v,
            "ubatch": settings.ubatch or UBATCH,
            # What else can be written is the same as layer, or refused.
            "split_mode": settings.split_mode if settings.split_mode in ("none", "tensor") else "layer",
            "tensor_split": settings.tensor_split,
            "kv_unified": False,
            "overhead_mib": overhead_mib,
        },
        gpus,
    )


def _entry(gpu: GpuPlan, card: Card, said: float | None, counted: float, more: float) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "bus_id": card.bus_id,
        "uuid": card.uuid,
        "product": card.product,
        "layers": gpu.layers,
        "overhead_mib": round(gpu.overhead_mib, 1),
        "planned_mib": round(gpu.total_mib, 1),
        "engine_mib": None if said is None else round(said, 1),
        "counted_mib": round(counted, 1),
        "calibrated_mib": round(counted + more, 1) if gpu.layers else round(counted, 1),
        "memory_mib": card.memory_mib,
    }


@dataclass(frozen=True)
class Buffers:
    """What llama-fit-params says of one device, in MiB."""

    model: float
    context: float
    compute: float

    @property
    def total(self) -> float:
        return self.model + self.context + self.compute

    def with_less_compute(self, excess: float) -> Buffers:
        return Buffers(self.model, self.context, max(0.0, self.compute - excess))


def ask_engine(settings: Settings, computed: Plan, programs: str, runner: Runner) -> tuple[dict[int, Buffers], str]:
    """What llama-fit-params counts, by device number; and why it counted nothing, in words, where it did not."""
    program = Path(programs) / "llama-fit-params"
    if not program.is_file():
        return {}, "llama-fit-params is not installed: the memory is what the plan alone says"
    argv = [
        *("env", *(f"{name}={value}" for name, value in computed.environment.items() if DEVICE_VARIABLE.match(name))),
        *(str(program), "--model", settings.model, "--ctx-size", str(computed.total_context)),
        *("--parallel", str(settings.parallel), "--n-gpu-layers", "999", "--fit-print", "on"),
    ]
    for name in ("--split-mode", "--tensor-split", "--cache-type-k", "--cache-type-v", "--flash-attn", "--ubatch-size"):
        if name in computed.argv:
            argv += [name, computed.argv[computed.argv.index(name) + 1]]
    argv += offloading(settings)
    done = runner(argv, FIT_SECONDS)
    if not done.ok:
        return {}, f"llama-fit-params {done.why}: the memory is what the plan alone says"
    found = read_fit(done.stdout)
    if not found:
        return {}, "llama-fit-params saw no GPU: the memory is what the plan alone says"
    return found, ""


def read_fit(text: str) -> dict[int, Buffers]:
    """Lines of device, model, context and compute in MiB, as `CUDA0 17218 0 432`; the host's is not of the cards."""
    rows = re.findall(r"(?m)^[A-Za-z]+(\d+) (\d+) (\d+) (\d+)\s*$", text)
    return {
        int(number): Buffers(float(model), float(context), float(compute)) for number, model, context, compute in rows
    }


def uuids_of(machine: Machine) -> Mapping[str, str]:
    """UUIDs by bus id, from the loaded driver; without it there are none."""
    return {card["bus_id"]: card["uuid"] for card in driver_gpus(machine) if card["bus_id"] and card["uuid"]}
