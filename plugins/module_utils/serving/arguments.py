# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From the operator's words to the engine's command line and environment.

The operator says how much context a request gets and how many requests run at once; the engine wants the total. With
an explicit number of slots it divides the total by them and pads each share to 256 tokens (llama.cpp 0.5.0,
src/llama-context.cpp:292), so each share is padded here first and none comes out short.
"""

from __future__ import annotations

import difflib
import ipaddress
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..addresses import address_of, is_loopback
from ..compat import judge
from ..faults import Fault
from ..nvidia.values import bus_id
from .catalogue import CATALOGUE
from .keys import USABLE
from .model_file import stem

BACKENDS = ("cuda", "cpu")
SPLIT_MODES = ("auto", "none", "layer", "row", "tensor")
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
FLASH_ATTENTION = ("auto", "on", "off")

#: Characters that no line of a unit and no word of a command may hold.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
CONTEXT_STEP = 256
CONTEXT_MINIMUM = 512
#: Batch of the engine where none is set; it takes no larger micro-batch (llama.cpp 0.5.0, common/common.h:453,
#: src/llama-context.cpp:248).
BATCH = 2048
KEY_MINIMUM = 16
#: An explicit number means "all, and do not move any to the CPU"; no model has as many layers.
ALL_LAYERS = "999"

#: What extra_args must not set, and what controls it. Short forms as the engine's help names them.
MANAGED = {
    "model": ("-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo"),
    "alias": ("-a", "--alias"),
    "host": ("--host",),
    "port": ("--port", "--reuse-port"),
    "context_per_request": ("-c", "--ctx-size", "--kv-unified-per-slot"),
    "parallel": ("-np", "--parallel", "-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"),
    "split_mode": ("-sm", "--split-mode"),
    "tensor_split": ("-ts", "--tensor-split"),
    "gpus": ("-dev", "--device", "-ngl", "--gpu-layers", "--n-gpu-layers", "-mg", "--main-gpu", "-fit", "--fit"),
    "cache_type_k": ("-ctk", "--cache-type-k"),
    "cache_type_v": ("-ctv", "--cache-type-v"),
    "flash_attention": ("-fa", "--flash-attn"),
    "threads": ("-t", "--threads"),
    "ubatch": ("-ub", "--ubatch-size"),
    "api_keys": ("--api-key", "--api-key-file"),
    "tls": ("--ssl-key-file", "--ssl-cert-file"),
    "timeout": ("-to", "--timeout"),
}
#: What is always as it is, and why; no setting changes it.
FIXED = {
    "--slots": "it shows other users' prompts",
    "--ui": "the web interface is off",
    "--webui": "the web interface is off",
    "--props": "anyone with a key could change the server for all",
    "--tools": "clients could read files and run programs",
    "--ui-mcp-proxy": "clients could reach other machines through this one",
    "--webui-mcp-proxy": "clients could reach other machines through this one",
    "--metrics": "it is always on where the engine has it",
    "--log-prompts-dir": "it writes prompts to the disk",
    **dict.fromkeys(("-v", "--verbose", "--log-verbose"), "it writes prompts to the journal"),
    "--path": "it serves files of the machine",
    "--api-prefix": "/health, by which the unit is seen to be ready, would be elsewhere",
    **dict.fromkeys(("-hft", "--hf-token"), "anyone on the machine could read it; role model downloads"),
    **dict.fromkeys(
        ("--version", "-h", "--help", "--usage", "--list-devices", "--license", "-cl", "--cache-list"),
        "the engine prints something and ends, and nothing is served",
    ),
    "--completion-bash": "the engine prints something and ends, and nothing is served",
    **dict.fromkeys(
        ("--embedding", "--embeddings", "--rerank", "--reranking"),
        "such a server answers no chat, by which it is proved and warmed up; role ollama serves models of vectors",
    ),
}
#: Options that bring a model with its name, port and context; --spec-default and its kin concern the speed only.
PRESET = re.compile(r"--(?!spec-)[a-z0-9.-]+-default")
#: Whose values nobody is to see, not even in what was refused.
SECRET = ("--api-key", "-hft", "--hf-token")
#: How much the engine logs; from level 5 on each token of a prompt is a line (LC tools/server/server-context.cpp:3133).
VERBOSITY = ("-lv", "--verbosity", "--log-verbosity")
WITHOUT_PROMPTS = ("0", "1", "2", "3", "4")
MANAGED_ENVIRONMENT = {
    "LLAMA_API_KEY": "api_keys",
    "LLAMA_ARG_API_KEY_FILE": "api_keys",
    "CUDA_VISIBLE_DEVICES": "gpus",
    "CUDA_DEVICE_ORDER": "gpus",
}
#: Every option of the engine can be given under such a name as well, unseen by what judges arguments.
OPTION_VARIABLE = "LLAMA_ARG_"
#: Where a unit has its own copy of certificate and key, in memory. LoadCredential= would do the same, but was
#: seen to leave them unreadable to the unit's user (systemd 252: permission denied; why was not found out).
COPIES = "/run/{unit}/{name}"
#: Their names, by the elements of ``tls``.
COPY_NAMES = {"certificate": "tls-certificate", "key": "tls-key"}
#: Options that older releases had and guides still name.
REPLACED = dict.fromkeys(("--mmap", "--no-mmap", "--mlock", "--direct-io", "-dio"), "--load-mode")


@dataclass(frozen=True)
class Settings:
    """What the operator states; see the options of module llama_server_arguments, whose names these are."""

    model: str
    alias: str = ""
    host: str = "127.0.0.1"
    port: int = 8080
    context_per_request: int = 8192
    parallel: int = 1
    backend: str = "cuda"
    split_mode: str = "auto"
    tensor_split: Any = ()
    gpus: Sequence[str] = ()
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: str = "auto"
    threads: int | None = None
    ubatch: int | None = None
    api_keys: Sequence[str] = ()
    api_key_file: str = ""
    tls: Mapping[str, str] = field(default_factory=dict)
    timeout: int | None = None
    allowed_clients: Sequence[str] = ()
    extra_args: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    binary: str = "/opt/llama.cpp/current/bin/llama-server"
    unit: str = "llama-server"


@dataclass(frozen=True)
class Surroundings:
    """What is known of the machine: null or empty means unknown, and nothing is concluded from it.

    ``flags``: options the installed engine has. ``gpu_bus_ids``: the machine's GPUs in bus order, ``gpu_uuids`` their
    UUIDs by bus id as far as the driver tells them. ``gpu``: their PCI device id where all are of one kind.
    ``gpu_others``: why CUDA does not count the others of the bus, by bus id.
    """

    flags: frozenset[str] = frozenset()
    engine_version: str | None = None
    architecture: str | None = None
    model_context: int | None = None
    gpu_bus_ids: tuple[str, ...] = ()
    gpu: str | None = None
    gpu_uuids: Mapping[str, str] = field(default_factory=dict)
    gpu_others: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """``argv`` begins with the program. ``context`` is what a request is granted, ``total_context`` what -c says.

    ``trial`` is the same for the engine to parse only: should it serve all the same, it has no model, on loopback.
    ``gpus`` are the bus ids of the GPUs in use, in the order of the engine; null where they are not known.
    """

    argv: tuple[str, ...]
    trial: tuple[str, ...]
    environment: dict[str, str]
    alias: str
    split_mode: str | None
    gpu_count: int | None
    gpus: tuple[str, ...] | None
    context: int
    total_context: int
    base_url: str
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]


def plan(settings: Settings, around: Surroundings) -> Plan:
    """Judge the settings and compute the command line. Faults do not keep the rest from being computed."""
    settings, faults = cleaned(settings)
    notes: list[str] = []
    alias = settings.alias or stem(settings.model)
    faults += _check_basics(settings, alias, around)
    split, split_faults = _tensor_split(settings.tensor_split)
    faults += split_faults
    visible, used, gpu_faults = visible_gpus(settings.gpus, around)
    faults += gpu_faults
    gpu_count = len(settings.gpus) or len(around.gpu_bus_ids) or None
    if settings.backend == "cpu":
        gpu_count, used = None, ()
        if split or settings.gpus:
            faults.append(_invalid("backend", "cpu uses no GPU, but `gpus` or `tensor_split` is set", "Remove them."))
    elif split and gpu_count is not None and len(split) != gpu_count:
        faults.append(
            CATALOGUE.fault(
                "tensor_split_invalid",
                "tensor_split",
                f"{len(split)} numbers for {gpu_count} GPUs in use",
                f"Write one number for each GPU, as in {[1] * gpu_count}, or leave it out: equal cards share evenly.",
            )
        )
    if split and settings.backend == "cuda" and settings.split_mode == "none":
        message = "`split_mode` none puts everything on one GPU"
        remedy = "Remove it, or write `split_mode` auto."
        faults.append(CATALOGUE.fault("tensor_split_invalid", "tensor_split", message, remedy))
    mode = None
    if settings.backend == "cuda" and settings.split_mode in SPLIT_MODES:
        mode = "layer" if settings.split_mode == "auto" else settings.split_mode
    compat_faults, compat_notes = _compatible(settings, around, mode, gpu_count)
    faults += compat_faults
    notes += compat_notes
    faults += _check_keys(settings)
    faults += _check_extra(settings, around)

    context = _padded(settings.context_per_request)
    wanted = _wanted_arguments(settings, alias, context * settings.parallel, mode, split)
    argv, unknown = _render(settings.binary, wanted, around.flags)
    faults += unknown
    trial, _ = _render(settings.binary, _for_trial(wanted), around.flags)
    extra = _without_secrets([str(word) for word in settings.extra_args])

    environment = {
        str(name): str(value) for name, value in settings.environment.items() if str(name) not in MANAGED_ENVIRONMENT
    }
    if settings.backend == "cuda":
        # The engine numbers cards by speed otherwise, and not as nvidia-smi does.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if visible:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return Plan(
        argv=(*argv, *extra),
        trial=(*trial, *extra),
        environment=environment,
        alias=alias,
        split_mode=mode,
        gpu_count=gpu_count,
        gpus=used,
        context=context,
        total_context=context * settings.parallel,
        base_url=f"{root_url(settings)}/v1",
        faults=tuple(faults),
        notes=tuple(notes),
    )


def printable(subject: str, text: str, faults: list[Fault]) -> str:
    """``text`` with each control character replaced; a fault is added where there was one. It is not shown: it may be a
    secret."""
    if CONTROL.search(text) is None:
        return text
    message = "it holds a line break or another control character"
    faults.append(_invalid(subject, message, "Write it without; look for blanks at its end."))
    return CONTROL.sub("?", text)


def cleaned(settings: Settings) -> tuple[Settings, list[Fault]]:
    """The settings without control characters, of which a line break begins another line of the unit, and a fault for
    each that had some."""
    faults: list[Fault] = []
    words = list(map(str, settings.extra_args))
    texts: dict[str, Any] = {
        name: printable(name, getattr(settings, name), faults)
        for name in ("model", "alias", "host", "api_key_file", "binary", "unit")
    }
    return replace(
        settings,
        **texts,
        tls={str(name): printable("tls", str(value or ""), faults) for name, value in settings.tls.items()},
        extra_args=[printable(f"extra_args[{at}]", word, faults) for at, word in enumerate(words)],
        environment={
            CONTROL.sub("?", str(name)): printable("environment", str(value), faults)
            for name, value in settings.environment.items()
        },
    ), faults


def root_url(settings: Settings) -> str:
    """Where a client on the machine itself reaches the server, without a path."""
    return f"{'https' if settings.tls else 'http'}://{reachable_host(settings.host)}:{settings.port}"


def reachable_host(host: str) -> str:
    """Where a client on the machine itself reaches a server that is bound to ``host``; IPv6 in brackets."""
    address = address_of(host)
    if address is None:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return str(address) if address.version == 4 else f"[{address}]"


def _invalid(subject: str, message: str, remedy: str) -> Fault:
    return CATALOGUE.fault("setting_invalid", subject, message, remedy)


def _padded(tokens: int) -> int:
    return -(-tokens // CONTEXT_STEP) * CONTEXT_STEP


def _check_basics(settings: Settings, alias: str, around: Surroundings) -> list[Fault]:
    faults = []
    if not settings.model.startswith("/"):
        faults.append(_invalid("model", f"{settings.model!r} is not a path from the root", "Write the first shard's."))
    if settings.model.endswith((".gguf.a", ".gguf.b")):
        faults.append(_invalid("model", f"{settings.model} is a raw part of a file", "Join the parts with cat first."))
    if re.search(r"[\x00-\x1f\x7f,]", alias) or alias != alias.strip() or not alias:
        faults.append(
            _invalid("alias", f"{alias!r} cannot name a model", "Write a name without commas or line breaks.")
        )
    for subject, value, choices in (
        ("backend", settings.backend, BACKENDS),
        ("split_mode", settings.split_mode, SPLIT_MODES),
        ("cache_type_k", settings.cache_type_k, CACHE_TYPES),
        ("cache_type_v", settings.cache_type_v, CACHE_TYPES),
        ("flash_attention", settings.flash_attention, FLASH_ATTENTION),
    ):
        if value not in choices:
            faults.append(_invalid(subject, f"{value!r} is unknown", f"Write one of {', '.join(choices)}."))
    for subject, number, low, high in (
        ("port", settings.port, 1024, 65535),
        ("parallel", settings.parallel, 1, 256),
        ("threads", settings.threads, 1, 1024),
        ("ubatch", settings.ubatch, 32, 16384),
        # A proxy that waits shorter than this ends long answers; a day is longer than any.
        ("timeout", settings.timeout, 1, 86400),
        ("context_per_request", settings.context_per_request, CONTEXT_MINIMUM, 1 << 24),
    ):
        if number is not None and not low <= number <= high:
            why = (
                ": below 1024 only root may listen, as which no server runs"
                if subject == "port" and number < low
                else ""
            )
            faults.append(_invalid(subject, f"{number} is out of range{why}", f"Write a number from {low} to {high}."))
    most = _longest_context(settings, around)
    if most is not None and settings.context_per_request > most:
        faults.append(
            CATALOGUE.fault(
                "context_too_large",
                "context_per_request",
                f"{settings.context_per_request} asked for, the model has {most}",
                f"Write {most} or less. A model whose makers allow more is stretched in `extra_args`, as in "
                "[--rope-scaling, yarn, --rope-scale, '4', --yarn-orig-ctx, '32768'].",
            )
        )
    return faults + _check_host(settings)


def _longest_context(settings: Settings, around: Surroundings) -> int | None:
    """What a request of the model may have: its own, or as far as YaRN stretches it; null where it is not known.

    The engine moves its limit for YaRN alone (llama.cpp 0.5.0, src/llama-context.cpp:3891), and cuts all else to it.
    """
    words = list(map(str, settings.extra_args))
    said = {option_of(word): value for word, value in itertools.pairwise(words) if option_of(word)}
    if around.model_context is None or said.get("--rope-scaling") != "yarn":
        return around.model_context
    scale, part, original = (said.get(name, "") for name in ("--rope-scale", "--rope-freq-scale", "--yarn-orig-ctx"))
    if not _is_number(scale) and _is_number(part) and float(part):
        scale = f"{1 / float(part):f}"
    begins = int(original) if re.fullmatch("[0-9]{1,9}", original) and int(original) else around.model_context
    return int(begins * float(scale)) if _is_number(scale) and 0 < float(scale) < 1000 else around.model_context


def _check_host(settings: Settings) -> list[Fault]:
    host = settings.host
    try:
        if host != "localhost":
            ipaddress.ip_address(host)
    except ValueError:
        return [
            _invalid(
                "host",
                f"{host!r} is not an address",
                "Write 127.0.0.1, an address of this machine, or 0.0.0.0 for all of them (IPv6 without brackets).",
            )
        ]
    if not is_loopback(host) and not settings.api_keys:
        return [
            CATALOGUE.fault(
                "open_without_key",
                "host",
                f"{host} is reachable from other machines and no API key is set: anyone could use the model",
                "Set api_keys (openssl rand -hex 24 makes one; keep it in a vault), or write 127.0.0.1.",
            )
        ]
    return []


def _tensor_split(given: Any) -> tuple[list[float], list[Fault]]:
    """The proportions as numbers. Text is refused even where it could be read: what it means is easily mistaken."""

    def refuse(message: str, remedy: str) -> tuple[list[float], list[Fault]]:
        return [], [CATALOGUE.fault("tensor_split_invalid", "tensor_split", message, remedy)]

    if given is None or given == [] or given == () or given == "":
        return [], []
    if isinstance(given, str):
        parts = [part for part in re.split(r"[:,;/\s]+", given.strip("[]() ")) if part]
        example = "[" + ", ".join(parts) + "]" if all(map(_is_number, parts)) else "[1, 1, 1, 1]"
        why = ""
        if ":" in given:
            why = "; the engine splits on commas only and would put everything on the first card"
        return refuse(f"{given!r} is text, not a list of numbers{why}", f"Write {example}.")
    if not isinstance(given, (list, tuple)):
        return refuse(f"{given!r} is not a list of numbers", "Write one number for each GPU, as in [1, 1, 1, 1].")
    numbers = []
    for item in given:
        if isinstance(item, bool) or not _is_number(str(item)) or float(item) < 0:
            return refuse(f"{item!r} in it is not a number of at least 0", "Write numbers, as in [1, 1, 1, 1].")
        numbers.append(float(item))
    if not any(numbers):
        return refuse("all proportions are 0: no GPU would get any part", "Write numbers above 0, as in [1, 1, 1, 1].")
    return numbers, []


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", text.strip()) is not None


def visible_gpus(gpus: Sequence[str], around: Surroundings) -> tuple[list[str], tuple[str, ...] | None, list[Fault]]:
    """CUDA_VISIBLE_DEVICES entries (an index in bus order, or a UUID; bus ids become indexes), and the bus ids they
    mean, null where one of them is not known."""
    all_here = list(around.gpu_bus_ids)
    known = [bus_id(bus) for bus in all_here]
    by_uuid = {uuid.lower(): bus for bus, uuid in around.gpu_uuids.items()}
    visible: list[str] = []
    used: list[str | None] = []
    faults: list[Fault] = []
    for gpu in map(str, gpus):
        if re.fullmatch(r"(GPU|MIG)-[0-9a-fA-F-]{8,}", gpu):
            # CUDA takes the beginning of a UUID as well, where it is that of one card.
            begun = sorted(uuid for uuid in by_uuid if gpu.startswith("GPU-") and uuid.startswith(gpu.lower()))
            bus = by_uuid[begun[0]] if len(begun) == 1 else None
            visible.append(gpu if bus is None or gpu.lower() in by_uuid else around.gpu_uuids[bus])
            used.append(bus)
            named = [f"{at} {around.gpu_uuids[at]}" for at in all_here if at in around.gpu_uuids]
            if len(begun) > 1:
                faults.append(_gpu_unknown(f"{gpu} begins the UUIDs of {len(begun)} GPUs: write it in full", named))
            elif bus is not None and bus in around.gpu_others:
                faults.append(_gpu_unknown(f"{gpu} cannot be used: {around.gpu_others[bus]}", named))
            # With every card's UUID known one that is none of them is a mistake; a MIG device has one of its own.
            elif bus is None and gpu.startswith("GPU-") and all_here and all(at in around.gpu_uuids for at in all_here):
                faults.append(_gpu_unknown(f"{gpu} is no GPU of this machine", named))
        elif re.fullmatch(r"[0-9]{1,2}", gpu):
            visible.append(str(int(gpu)))
            used.append(all_here[int(gpu)] if int(gpu) < len(known) else None)
            if known and int(gpu) >= len(known):
                faults.append(_gpu_unknown(f"{gpu} is not an index of {len(known)} GPUs", all_here))
        elif re.fullmatch(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", gpu):
            other = next((why for at, why in around.gpu_others.items() if bus_id(at) == bus_id(gpu)), None)
            if bus_id(gpu) in known:
                visible.append(str(known.index(bus_id(gpu))))
                used.append(all_here[known.index(bus_id(gpu))])
            elif other is not None:
                faults.append(_gpu_unknown(f"{gpu} cannot be used: {other}", all_here))
            else:
                faults.append(_gpu_unknown(f"{gpu} is no GPU of this machine", all_here))
        else:
            faults.append(_gpu_unknown(f"{gpu!r} names no GPU", all_here))
    cards = [bus or name for bus, name in zip(used, visible, strict=False)]
    if len(set(cards)) != len(cards) or len(set(visible)) != len(visible):
        faults.append(_invalid("gpus", f"a GPU is named twice: {', '.join(map(str, gpus))}", "Name each once."))
    if any(name.isdigit() for name in visible) and not all(name.isdigit() for name in visible):
        # What CUDA makes of indexes and UUIDs in one list is written nowhere.
        named = [around.gpu_uuids.get(bus or "", name) for bus, name in zip(used, visible, strict=False)]
        visible = visible if any(name.isdigit() for name in named) else named
    if not gpus:
        return [], around.gpu_bus_ids or None, faults
    whole = tuple(bus for bus in used if bus is not None)
    return visible, whole if len(whole) == len(gpus) else None, faults


def _gpu_unknown(message: str, known: list[str]) -> Fault:
    have = f" Here: {', '.join(known)}." if known else ""
    return CATALOGUE.fault(
        "gpu_unknown", "gpus", message, f"Write indexes (nvidia-smi's), bus ids or UUIDs of GPUs.{have}"
    )


def _compatible(
    settings: Settings, around: Surroundings, mode: str | None, gpu_count: int | None
) -> tuple[list[Fault], list[str]]:
    """Ask the compatibility table. An explicit row or tensor is judged on any backend: it never works on a CPU."""
    explicit = settings.split_mode if settings.split_mode in ("row", "tensor") else None
    attention = settings.flash_attention if settings.flash_attention in FLASH_ATTENTION else None
    engine = release(around.engine_version)
    verdict = judge(
        {
            "split_mode": mode or explicit,
            "architecture": around.architecture,
            "gpu_count": gpu_count,
            "llama_cpp": engine,
            "flash_attention": attention,
            "fit": "false",
        }
    )
    faults = [Fault(fault.code, fault.subject, fault.message, fault.remedy) for fault in verdict.faults]
    notes = [f"{note.subject}: {note.message}" for note in verdict.notes]
    for subject, cache_type in (("cache_type_k", settings.cache_type_k), ("cache_type_v", settings.cache_type_v)):
        if cache_type not in CACHE_TYPES:
            continue
        gpu = around.gpu if settings.backend == "cuda" else None
        # Flash attention is needed for quantised values only; keys may be quantised without.
        needs = attention if subject == "cache_type_v" else None
        verdict = judge({"cache_type": cache_type, "flash_attention": needs, "gpu": gpu, "llama_cpp": engine})
        # The table knows one type for both; what to write instead concerns this one.
        faults += [
            Fault(fault.code, subject, fault.message, re.sub(r"\bcache_type\b", subject, fault.remedy))
            for fault in verdict.faults
        ]
        notes += [f"{subject}: {note.message}" for note in verdict.notes]
    return list(dict.fromkeys(faults)), list(dict.fromkeys(notes))


def release(version: str | None) -> str | None:
    """0.5.0 of 0.5.0-dev, which is how the compatibility table counts; null for anything else."""
    found = re.match(r"[0-9]+\.[0-9]+(\.[0-9]+)?", version or "")
    return found.group(0) if found else None


def _check_keys(settings: Settings) -> list[Fault]:
    faults = []
    for number, key in enumerate(settings.api_keys):
        text = str(key)
        problem = None
        if not USABLE.fullmatch(text):
            problem = "empty, or holds a space, a line break or a character beyond ASCII"
        elif text.startswith("#"):
            problem = "begins with #, which a key file takes for a comment"
        elif len(text) < KEY_MINIMUM:
            problem = f"has {len(text)} of at least {KEY_MINIMUM} characters"
        if problem:
            # The key itself is never shown, only which one it is.
            remedy = "Make one with: openssl rand -hex 24"
            faults.append(CATALOGUE.fault("api_key_unusable", f"api_keys[{number}]", problem, remedy))
    return faults


def option_of(word: str) -> str:
    """The option that a word of a command line is or begins with, as the engine knows it; empty for a value."""
    if not word.startswith("-") or _is_number(word.lstrip("-")):
        return ""
    flag = re.split(r"[=\s]", word, maxsplit=1)[0]
    # LC common/arg.cpp, common_params_parse_ex: an underscore is a dash.
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _without_secrets(words: Sequence[str]) -> list[str]:
    """``words`` as they may be shown. Options with a secret are refused, so that nothing is started without them."""
    shown, value_of_one = [], False
    for word in words:
        secret = option_of(word) in SECRET
        if not secret and not value_of_one:
            shown.append(word)
        # Where the word is the option alone, its value is the one behind.
        value_of_one = secret and re.search(r"[=\s]", word) is None
    return shown


def _check_extra(settings: Settings, around: Surroundings) -> list[Fault]:
    faults = []
    owners = {flag: setting for setting, flags in MANAGED.items() for flag in flags}
    words = list(map(str, settings.extra_args))
    for word, value in zip(words, [*words[1:], ""], strict=False):
        if word == "":
            faults.append(_invalid("extra_args", "a word of it is empty", "Remove it."))
        flag = option_of(word)
        if not flag:
            continue
        if flag in owners:
            faults.append(_managed("extra_args", flag, owners[flag]))
        elif flag in FIXED:
            faults.append(
                CATALOGUE.fault(
                    "argument_managed", "extra_args", f"{flag} is not to be set: {FIXED[flag]}", "Remove it."
                )
            )
        elif PRESET.fullmatch(flag):
            message = f"{flag} brings a model of its own, and sets name, port and context"
            remedy = "Remove it; bring the model with role model and write its path in `model`."
            faults.append(CATALOGUE.fault("argument_managed", "extra_args", message, remedy))
        elif flag in VERBOSITY and value not in WITHOUT_PROMPTS:
            message = f"{flag} {value} is not to be set: from 5 on it writes prompts to the journal"
            faults.append(CATALOGUE.fault("argument_managed", "extra_args", message, f"Write {flag} 4, or less."))
        elif around.flags and flag not in around.flags:
            faults.append(_unknown_flag(flag, around.flags))
        elif re.match(r"[^=]*\s", word):
            message = f"{flag} and what follows it are one word, of which the engine knows no option"
            faults.append(_invalid("extra_args", message, "Write option and value as two elements."))
        elif (
            flag in ("-b", "--batch-size")
            and settings.ubatch
            and re.fullmatch("[0-9]{1,9}", value)
            and int(value) < settings.ubatch
        ):
            message = f"{settings.ubatch} is more than {flag} {value} in `extra_args`, and the engine takes the smaller"
            faults.append(_invalid("ubatch", message, f"Remove {flag}, or write a smaller `ubatch`."))
    for name in settings.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            faults.append(_invalid("environment", f"{name!r} names no variable", "Remove or rename it."))
        elif str(name) in MANAGED_ENVIRONMENT:
            faults.append(_managed("environment", str(name), MANAGED_ENVIRONMENT[str(name)]))
        elif str(name).startswith(OPTION_VARIABLE):
            message = f"{name} sets an option of the engine, which would be judged by nobody here"
            faults.append(
                CATALOGUE.fault("argument_managed", "environment", message, "Write the option in `extra_args` instead.")
            )
    return faults


def _managed(where: str, name: str, setting: str) -> Fault:
    how = (
        "computed from `context_per_request` and `parallel`"
        if setting == "context_per_request"
        else f"set by `{setting}`"
    )
    return CATALOGUE.fault("argument_managed", where, f"{name} is {how}", f"Use `{setting}` instead.")


def _unknown_flag(flag: str, flags: frozenset[str]) -> Fault:
    near = [REPLACED[flag]] if REPLACED.get(flag) in flags else difflib.get_close_matches(flag, sorted(flags), n=2)
    hint = f" Near it: {', '.join(near)}." if near else ""
    return CATALOGUE.fault(
        "argument_unknown",
        flag,
        "the installed engine has no such option",
        f"See llama-server --help of the installed engine; options move between releases.{hint}",
    )


@dataclass(frozen=True)
class _Wanted:
    """An option under the names it has had, newest first; one that is not ``needed`` may be unknown to the engine."""

    names: tuple[str, ...]
    value: str | None = None
    needed: bool = True


def _wanted_arguments(
    settings: Settings, alias: str, total: int, mode: str | None, split: list[float]
) -> list[_Wanted]:
    wanted = [
        _Wanted(("--model",), settings.model),
        _Wanted(("--alias",), alias),
        _Wanted(("--host",), settings.host),
        _Wanted(("--port",), str(settings.port)),
        _Wanted(("--ctx-size",), str(total)),
        _Wanted(("--parallel",), str(settings.parallel)),
    ]
    if settings.backend == "cuda":
        wanted.append(_Wanted(("--n-gpu-layers", "--gpu-layers"), ALL_LAYERS))
        wanted.append(_Wanted(("--split-mode",), mode))
        if split:
            wanted.append(_Wanted(("--tensor-split",), ",".join(f"{number:g}" for number in split)))
        # What does not fit shall fail, not move to the CPU unseen.
        wanted.append(_Wanted(("--fit",), "off", needed=False))
    if settings.cache_type_k != "f16":
        wanted.append(_Wanted(("--cache-type-k",), settings.cache_type_k))
    if settings.cache_type_v != "f16":
        wanted.append(_Wanted(("--cache-type-v",), settings.cache_type_v))
    if settings.flash_attention != "auto":
        wanted.append(_Wanted(("--flash-attn",), settings.flash_attention))
    if settings.threads is not None:
        wanted.append(_Wanted(("--threads",), str(settings.threads)))
    if settings.ubatch is not None:
        wanted.append(_Wanted(("--ubatch-size",), str(settings.ubatch)))
        if settings.ubatch > BATCH:
            wanted.append(_Wanted(("--batch-size",), str(settings.ubatch)))
    if settings.timeout is not None:
        wanted.append(_Wanted(("--timeout",), str(settings.timeout)))
    if settings.api_keys:
        wanted.append(_Wanted(("--api-key-file",), settings.api_key_file))
    if settings.tls:
        wanted.append(_Wanted(("--ssl-key-file",), COPIES.format(unit=settings.unit, name=COPY_NAMES["key"])))
        wanted.append(_Wanted(("--ssl-cert-file",), COPIES.format(unit=settings.unit, name=COPY_NAMES["certificate"])))
    # The web interface and /slots show other users' prompts.
    wanted.append(_Wanted(("--no-ui", "--no-webui"), needed=False))
    wanted.append(_Wanted(("--no-slots",), needed=False))
    wanted.append(_Wanted(("--metrics",), needed=False))
    # Else every new request waits until all idle slots are copied from the cards to memory. Each has a cache of its own
    # here, and is copied anyway when another prompt takes it over (llama.cpp 0.5.0, server-context.cpp,
    # get_available_slot); docs/measurements/serving.md has the figures. extra_args come after this and win.
    wanted.append(_Wanted(("--no-cache-idle-slots",), needed=False))
    return wanted


def _for_trial(wanted: list[_Wanted]) -> list[_Wanted]:
    # The key file is written later, and parsing would already read it.
    kept = [option for option in wanted if option.names != ("--api-key-file",)]
    harmless: dict[tuple[str, ...], str | None] = {
        ("--model",): "/dev/null",
        ("--host",): "127.0.0.1",
        ("--port",): "0",
    }
    return [replace(option, value=harmless.get(option.names, option.value)) for option in kept]


def _render(binary: str, wanted: list[_Wanted], flags: frozenset[str]) -> tuple[list[str], list[Fault]]:
    """The words of the command line. Where the engine's options are not known, the newest names are used."""
    argv = [binary]
    faults = []
    for option in wanted:
        name = next((name for name in option.names if name in flags), None) if flags else option.names[0]
        if name is None:
            if option.needed:
                faults.append(_unknown_flag(option.names[0], flags))
            continue
        argv.append(name)
        if option.value is not None:
            argv.append(option.value)
    return argv, faults
