# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Can this ever work? Settings, combinations and memory asked about together, before anything is there.

Nothing here is judged a second way: settings are judged by serving/arguments.py, combinations by compat.py, memory by
gguf/planning.py. What is added is where the header comes from and which GPUs are meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .catalogue_models import find_model
from .compat import Note, find_gpu, judge
from .faults import Fault, FaultError, in_variables
from .gguf import planning
from .gguf.plan import FAULTS
from .gguf.planning import Answer, Gpu
from .gguf.reader import Header
from .machine import Machine
from .nvidia.inventory import pci_devices
from .ollama.environment import VARIABLES
from .ollama.together import foresee
from .serving.arguments import SPLIT_MODES, Settings, Surroundings, release
from .serving.arguments import plan as plan_server
from .serving.catalogue import CATALOGUE as SETTINGS
from .serving.memory import plan_settings
from .serving.model_file import context_of
from .transfer.sources import HUGGINGFACE, Source, source_of

#: Seconds for an answer of a place that may have the model; the next place is asked then.
ANSWER_LIMIT = 10.0
#: Settings without which memory cannot be planned when they are wrong.
NEEDED = ("parallel", "context_per_request", "ubatch", "cache_type_k", "cache_type_v", "backend", "overhead_mib")
#: Settings that are numbers, each with one to show.
NUMBERS = {
    "context_per_request": "8192",
    "parallel": "4",
    "port": "8080",
    "threads": "16",
    "ubatch": "512",
    "overhead_mib": "900",
}
ENGINES = ("llama_server", "ollama")
#: The release whose variables are known where none is named: role ollama's default.
OLLAMA = "0.24.0"
OLLAMA_OPTIONS = ("version", "environment", "models", "gpus", *sorted({v.owner for v in VARIABLES if v.owner}))
NO_GPUS = "Write the GPUs, as in plan_gpus: 4 x V100-SXM2-32GB."


@dataclass(frozen=True)
class Request:
    """What is planned; empty means not given, and is not judged.

    ``model`` is what the operator names: catalogue name, path or URL. Without it the header is looked for at
    ``server.model``, where the model will lie, then where the first of ``files`` comes from (``files``, ``sources`` and
    ``token`` as model_download takes them), then in the catalogue under ``model_name``. ``primary_engine`` serves,
    ``engines`` are all of the machine. ``ollama`` is the release of Ollama beside it; its variables are judged also
    without. ``gpus`` are products as vram_plan takes them. ``read_machine`` says whether GPUs, driver and model may be
    looked for on the machine. ``unread`` are settings that could not be read; ``server`` has their default.
    """

    server: Settings
    unread: Sequence[Fault] = ()
    model: str = ""
    model_name: str = ""
    files: Sequence[Mapping[str, Any]] = ()
    sources: Sequence[Mapping[str, Any]] = ()
    token: str | None = field(default=None, repr=False)
    gpus: str = ""
    driver: str = ""
    flavour: str = ""
    cuda: str = ""
    engine: str = ""
    overhead_mib: float | None = None
    primary_engine: str = ""
    engines: Sequence[str] = ()
    ollama: str = ""
    ollama_environment: Mapping[str, Any] = field(default_factory=dict)
    ollama_models: Sequence[Mapping[str, Any]] = ()
    read_machine: bool = True
    nvidia_smi: str = "nvidia-smi"


@dataclass
class Found:
    """A header and the name to show for it, or why there is none; ``notes`` are for people."""

    name: str = ""
    header: Header | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Cards:
    """GPUs to plan for; ``pci_id`` where all are of one known kind, ``bus_ids`` where the machine has them."""

    gpus: list[Gpu] = field(default_factory=list)
    bus_ids: tuple[str, ...] = ()
    pci_id: str | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """``answer`` is the memory plan, null where there was nothing to plan with; ``lines`` are the whole for people."""

    lines: list[str]
    faults: list[Fault]
    notes: list[str]
    model: str | None
    architecture: str | None
    gpus: list[Gpu]
    answer: Answer | None


def read_numbers(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """The numbers among settings, and a fault for each that is none. What is null is not given.

    A module that declared them as numbers would end at the first, and in the names of its own options.
    """
    read: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, example in NUMBERS.items():
        value = given.get(name)
        if value is None:
            continue
        memory = name == "overhead_mib"
        try:
            # As text, so that true is none.
            number = float(str(value))
        except ValueError:
            number = math.nan
        if math.isfinite(number) if memory else number.is_integer():
            read[name] = number if memory else int(number)
        else:
            kind = "number of MiB" if memory else "whole number"
            message = f"{value!r} is no {kind}"
            faults.append(SETTINGS.fault("setting_invalid", name, message, f"Write a {kind}, as {example}."))
    return read, faults


def consider(request: Request, machine: Machine, timeout: float = 30.0) -> Verdict:
    """Judge all of it; the faults of one part do not keep the others from being judged."""
    server = request.server
    found = find_header(request, timeout)
    cards = find_cards(request, machine)
    cuda = server.backend == "cuda"
    in_use = _in_use(cards.gpus, server.gpus)
    architecture = found.header.architecture if found.header else None
    driver = request.driver or (_loaded_driver(machine) if request.read_machine else "")

    compat_faults, compat_notes = _combination(request, driver, cards, len(in_use), architecture)
    computed = plan_server(
        # Where no server is set up yet its model has no place either.
        replace(server, model=server.model or "/model.gguf"),
        Surroundings(
            engine_version=request.engine,
            architecture=architecture,
            model_context=context_of(found.header) if found.header else None,
            gpu_bus_ids=cards.bus_ids if cuda else (),
            gpu=cards.pci_id if cuda else None,
        ),
    )
    known = {fault.code for fault in compat_faults}
    # The server's own check asks the same table with less.
    setting_faults = [*request.unread, *(fault for fault in computed.faults if fault.code not in known)]
    faults = found.faults + (cards.faults if cuda or request.gpus else []) + compat_faults + setting_faults

    named = [("volta_primary_engine", request.primary_engine)] if request.primary_engine else []
    faults += [
        SETTINGS.fault("setting_invalid", variable, f"{name!r} is no engine", "Write llama_server or ollama.")
        for variable, name in dict.fromkeys([*named, *(("volta_engines", str(name)) for name in request.engines)])
        if name not in ENGINES
    ]
    beside, beside_notes = _ollama(request, driver, cards)
    # Where driver and card alone are at fault both ask the same.
    told = {(fault.code, fault.subject) for fault in compat_faults}
    beside = [fault for fault in beside if (fault.code, fault.subject) not in told]
    # In the names of role ollama's variables: this module's options are those of the server.
    faults += in_variables(beside, "ollama_", OLLAMA_OPTIONS)

    notes = found.notes + cards.notes + [f"{note.subject}: {note.message}" for note in compat_notes] + beside_notes
    answer = None
    wrong = {fault.subject for fault in setting_faults}
    if found.header is not None and in_use and not wrong.intersection(NEEDED):
        try:
            answer = _memory(request, found, in_use, split_wrong="tensor_split" in wrong)
        except FaultError as exc:
            faults.append(exc.fault)
        if answer is not None and answer.fault is not None and cuda:
            faults.append(answer.fault)
    if answer is not None and not cuda:
        notes.append("backend cpu uses no GPU: the table says what the model would take, and decides nothing")

    lines = planning.table(answer, in_use) if answer else [_unplanned(found, cards, wrong, cuda)]
    parts = {
        "driver": driver,
        "CUDA": request.cuda if cuda else "",
        "llama.cpp": request.engine,
        "Ollama": request.ollama,
        "model": architecture or "",
        "GPU": ", ".join(dict.fromkeys(gpu.product for gpu in in_use)),
    }
    judged = ", ".join(f"{name} {value}" for name, value in parts.items() if value)
    verdict = "REFUSED" if compat_faults or beside else "nothing stands against it"
    lines.append(f"together: {judged or 'nothing given'}: {verdict}")
    lines += [f"note: {note}" for note in dict.fromkeys(notes)]
    planned_notes = answer.plan.notes if answer else []
    return Verdict(
        lines=lines,
        faults=faults,
        notes=list(dict.fromkeys([*notes, *planned_notes])),
        model=found.name or None,
        architecture=architecture,
        gpus=in_use,
        answer=answer,
    )


def find_header(request: Request, timeout: float = 30.0) -> Found:
    """The header, from the first place that has one.

    What the operator names must be readable. Other places may fail as long as one answers, since the download mends a
    broken or missing file; but when every answer was a wrong file, the download could only bring wrong files too.
    """
    if request.model:
        try:
            name, header = planning.load_header(request.model, _authorization(request), min(timeout, ANSWER_LIMIT))
        except FaultError as exc:
            return Found(request.model, faults=[exc.fault])
        return Found(name, header)

    failed: list[Fault] = []
    for place in _places(request):
        location = place.path or place.url or ""
        try:
            name, header = planning.load_header(location, place.headers, min(timeout, ANSWER_LIMIT))
        except FaultError as exc:
            if place.path is None or exc.fault.code != "gguf_not_found":
                failed.append(exc.fault)
            continue
        return Found(name, header)
    known = find_model(request.model_name)
    if known is not None:
        note = f"planned from the catalogue's figures of {known.name}, since the model is not there yet"
        return Found(known.name, known.header(), notes=[note])
    decisive = [fault for fault in failed if fault.code not in ("gguf_url_failed", "gguf_shard_missing")]
    remote = [fault for fault in decisive if fault.subject.startswith(("http://", "https://"))]
    if remote and len(remote) == len(failed):
        return Found(faults=remote[:1])
    return Found(notes=[f"{fault.subject}: {fault.message}" for fault in failed])


def _places(request: Request) -> list[Source]:
    """Where the first file of the model may be read, nearest first."""
    places = [Source(path=request.server.model)] if request.read_machine and request.server.model else []
    if not request.files:
        return places
    first = request.files[0]
    name = str(first.get("name") or "")
    urls = [*([first["url"]] if first.get("url") else []), *(first.get("urls") or ())]
    specs: list[Mapping[str, Any]] = [{"url": url} for url in urls]
    for spec in [*specs, *request.sources]:
        try:
            place = source_of(spec, name, first.get("headers") or {}, request.token)
        except (KeyError, TypeError, AttributeError):
            continue  # The download names what is wrong with the entry.
        if place.path is None or request.read_machine:
            places.append(place)
    # A catalogue entry is as good as what a hub says, and costs no request.
    if find_model(request.model_name) is not None:
        places = [place for place in places if place.path is not None]
    return places


def _authorization(request: Request) -> dict[str, str]:
    """The token, for the hub it is for; a source with an endpoint of its own brings its own token."""
    hubs = {HUGGINGFACE: request.token}
    hubs.update(
        {str(spec["endpoint"]): str(spec.get("token") or "") for spec in request.sources if spec.get("endpoint")}
    )
    for hub, token in hubs.items():
        if token and request.model.startswith(hub.rstrip("/") + "/"):
            return {"Authorization": f"Bearer {token}"}
    return {}


def find_cards(request: Request, machine: Machine) -> Cards:
    """The GPUs as named, else as nvidia-smi shows them, else, before there is a driver, by their PCI ids."""
    if request.gpus:
        try:
            gpus = planning.named_gpus(request.gpus)
        except FaultError as exc:
            remedy = f"{NO_GPUS} {planning.known_products()}"
            return Cards(faults=[replace(exc.fault, subject="GPUs", remedy=remedy)])
        return Cards(gpus, pci_id=_one_kind(gpus), notes=planning.named_notes(request.gpus))
    if not request.read_machine:
        return Cards(faults=[FAULTS.fault("plan_no_gpus", "GPUs", "none is named and no machine is read", NO_GPUS)])
    devices = pci_devices(machine)
    bus_ids = tuple(device.bus_id for device in devices)
    try:
        gpus = planning.detected_gpus(machine, request.nvidia_smi)
    except FaultError:
        pass
    else:
        return Cards(gpus, bus_ids if len(bus_ids) == len(gpus) else (), _one_kind(gpus))
    gpus, unknown = [], []
    for device in devices:
        known = find_gpu(device.pci_id)
        if known is None:
            unknown.append(f"{device.bus_id} (PCI id {device.pci_id.removeprefix('10de:')})")
        else:
            gpus.append(Gpu(known.product, float(known.memory_mib), known.compute_capability))
    if unknown:
        note = f"memory of {', '.join(unknown)} is unknown until the driver is there: name the GPUs in plan_gpus"
        return Cards(notes=[note])
    if not gpus:
        note = "no GPU is visible on this machine: memory is planned when plan_gpus names them"
        return Cards(notes=[note] if request.server.backend == "cuda" else [])
    note = "nvidia-smi does not say what GPUs there are: they are taken from their PCI ids"
    return Cards(gpus, bus_ids, _one_kind(gpus), notes=[note])


def _one_kind(gpus: Sequence[Gpu]) -> str | None:
    kinds = {gpu.product for gpu in gpus}
    known = find_gpu(kinds.pop()) if len(kinds) == 1 else None
    return known.pci_id if known else None


def _in_use(gpus: Sequence[Gpu], chosen: Sequence[str]) -> list[Gpu]:
    """The GPUs that the server may use, by index. Bus ids and UUIDs only say how many: exact for equal cards."""
    names = [str(name) for name in chosen]
    if not names:
        return list(gpus)
    if all(re.fullmatch(r"\d{1,2}", name) and int(name) < len(gpus) for name in names):
        return [gpus[int(name)] for name in names]
    return list(gpus[: len(names)])


def _combination(
    request: Request, driver: str, cards: Cards, gpu_count: int, architecture: str | None
) -> tuple[list[Fault], list[Note]]:
    server = request.server
    cuda = server.backend == "cuda"
    mode = "layer" if server.split_mode == "auto" else server.split_mode
    faults: list[Fault] = []
    notes: list[Note] = []
    # A machine with GPUs of several kinds needs a combination that suits each.
    products: list[str | None] = list(dict.fromkeys(gpu.product for gpu in cards.gpus))
    for product in products or [None]:
        verdict = judge(
            {
                "driver": driver,
                "flavour": request.flavour,
                "gpu": product,
                "gpu_count": gpu_count or None if cuda else None,
                "cuda": request.cuda if cuda else None,
                "llama_cpp": release(request.engine) or request.engine,
                "architecture": architecture,
                "split_mode": mode if cuda and server.split_mode in SPLIT_MODES else None,
                # auto is never refused, and would only lengthen what is shown.
                "flash_attention": server.flash_attention if server.flash_attention in ("on", "off") else None,
            }
        )
        faults += verdict.faults
        notes += verdict.notes
    # Two kinds of GPU can be refused for one and the same reason; plain records also sort with all others.
    return list(dict.fromkeys(Fault(f.code, f.subject, f.message, f.remedy) for f in faults)), notes


def _ollama(request: Request, driver: str, cards: Cards) -> tuple[list[Fault], list[str]]:
    if not (request.ollama or request.ollama_environment):
        return [], []
    return foresee(
        request.ollama or OLLAMA,
        request.ollama_environment,
        request.ollama_models if request.ollama else (),
        driver if request.ollama else None,
        [gpu.product for gpu in cards.gpus] if request.ollama else [],
    )


def _memory(request: Request, found: Found, gpus: Sequence[Gpu], split_wrong: bool) -> Answer:
    assert found.header is not None
    server = replace(request.server, tensor_split=()) if split_wrong else request.server
    return planning.answer(found.name, found.header, plan_settings(server, gpus, request.overhead_mib))


def _unplanned(found: Found, cards: Cards, wrong: set[str], cuda: bool) -> str:
    """Why there is no table."""
    if found.header is None:
        why = (
            "no header could be read"
            if found.faults or found.notes
            else "no model is named: set plan_model or model_files"
        )
    elif not cards.gpus:
        why = "the GPUs are not known" if cuda else "backend cpu uses no GPU, and none is known"
    else:
        why = f"wrong settings: {', '.join(sorted(wrong.intersection(NEEDED)))}" if wrong else "see the faults"
    return f"memory is not planned: {why}"


def _loaded_driver(machine: Machine) -> str:
    return (machine.read("/sys/module/nvidia/version") or "").strip()
