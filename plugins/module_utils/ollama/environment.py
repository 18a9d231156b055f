# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Variables of the environment that a release of Ollama reads, and what each takes.

Ollama passes over what it does not know, and over a value that it cannot read, without a word: a variable with a wrong
name is a setting that is not there. So a name is judged by what the pinned release reads.

Names and releases: envconfig/config.go of the tags v0.5.13 to v0.32.15, each with the release before it; what other
files read is named with the file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..faults import Fault
from .catalogue import fault

Version = tuple[int, int, int]

#: Before it a release has no OLLAMA_CONTEXT_LENGTH, so that the context cannot be set for all models.
FIRST: Version = (0, 5, 13)
#: The newest release whose list was read.
LAST: Version = (0, 32, 15)

#: Choices of OLLAMA_KV_CACHE_TYPE (v0.24.0 fs/ggml/ggml.go, SupportsKVCacheType); of another one only the log tells.
CACHE_TYPES = ("f16", "q8_0", "q4_0")

CONFIG = "envconfig/config.go"


@dataclass(frozen=True)
class Variable:
    """One variable. ``since`` and ``until`` are the first and the last release that read it, null where that is outside
    of what was looked at.

    ``kind`` is one of bool, number, duration, level (how much is logged), cache and text. ``owner`` is the setting
    that says the same, empty where there is none. ``fixed`` is why it must not be set at all. ``note`` is what to know
    of it.
    """

    name: str
    kind: str
    since: Version | None = None
    until: Version | None = None
    owner: str = ""
    fixed: str = ""
    note: str = ""
    source: str = CONFIG

    def known_to(self, version: Version) -> bool:
        return (self.since is None or version >= self.since) and (self.until is None or version <= self.until)


#: What a prompt must not end up in without somebody having meant it.
_PROMPTS = "it writes prompts to the disk or the journal"

VARIABLES = (
    Variable("OLLAMA_HOST", "text", owner="host"),
    Variable("OLLAMA_MODELS", "text", owner="models_directory"),
    Variable("OLLAMA_KEEP_ALIVE", "duration", owner="keep_alive"),
    Variable("OLLAMA_LOAD_TIMEOUT", "duration", owner="load_timeout"),
    Variable("OLLAMA_NUM_PARALLEL", "number", owner="num_parallel"),
    Variable("OLLAMA_MAX_LOADED_MODELS", "number", owner="max_loaded_models"),
    Variable("OLLAMA_MAX_QUEUE", "number", owner="max_queue"),
    Variable("OLLAMA_CONTEXT_LENGTH", "number", owner="context_length", since=FIRST),
    Variable("OLLAMA_FLASH_ATTENTION", "bool", owner="flash_attention"),
    Variable("OLLAMA_KV_CACHE_TYPE", "cache", owner="kv_cache_type"),
    Variable("OLLAMA_ORIGINS", "text", owner="origins"),
    Variable("OLLAMA_NO_CLOUD", "bool", owner="no_cloud", since=(0, 16, 2)),
    Variable("OLLAMA_LLM_LIBRARY", "text", owner="llm_library"),
    Variable("CUDA_VISIBLE_DEVICES", "text", owner="gpus"),
    Variable("CUDA_DEVICE_ORDER", "text", owner="gpus", source="the CUDA driver"),
    Variable("OLLAMA_DEBUG", "level", note=f"from 2 on {_PROMPTS}"),
    Variable("OLLAMA_DEBUG_LOG_REQUESTS", "bool", since=(0, 18, 3), note=_PROMPTS),
    Variable("OLLAMA_GPU_OVERHEAD", "number"),
    Variable("OLLAMA_SCHED_SPREAD", "bool"),
    Variable("OLLAMA_NOPRUNE", "bool"),
    Variable("OLLAMA_MULTIUSER_CACHE", "bool", until=(0, 24, 0)),
    Variable("OLLAMA_NEW_ENGINE", "bool", until=(0, 24, 0)),
    Variable("OLLAMA_NEW_ESTIMATES", "bool", since=(0, 11, 5), until=(0, 11, 10)),
    Variable("OLLAMA_MAX_VRAM", "number", until=(0, 6, 8)),
    Variable("OLLAMA_INTEL_GPU", "bool", until=(0, 12, 10)),
    Variable("OLLAMA_VULKAN", "bool", since=(0, 12, 11)),
    Variable("OLLAMA_AUTH", "bool", since=(0, 8, 0)),
    Variable("OLLAMA_REMOTES", "text", since=(0, 12, 0)),
    Variable("OLLAMA_MAX_TRANSFER_STREAMS", "number", since=(0, 23, 3)),
    Variable(
        "OLLAMA_REGISTRY_MAXSTREAMS", "number", until=(0, 31, 1), source="server/internal/client/ollama/registry.go"
    ),
    Variable("OLLAMA_EXPERIMENT", "text", since=(0, 6, 0), source="server/routes.go"),
    Variable("OLLAMA_GO_TEMPLATE", "bool", since=(0, 30, 0)),
    Variable("OLLAMA_IGPU_ENABLE", "bool", since=(0, 30, 0)),
    Variable("LLAMA_ARG_FIT", "text", since=(0, 30, 0)),
    Variable("LLAMA_ARG_FIT_TARGET", "text", since=(0, 30, 0)),
    Variable("OLLAMA_NOHISTORY", "bool", note="only the command line reads it, not the service"),
    Variable("OLLAMA_EDITOR", "text", since=(0, 16, 0), note="only the command line reads it, not the service"),
    Variable("HIP_VISIBLE_DEVICES", "text"),
    Variable("ROCR_VISIBLE_DEVICES", "text"),
    Variable("GPU_DEVICE_ORDINAL", "text"),
    Variable("HSA_OVERRIDE_GFX_VERSION", "text"),
    Variable("GGML_VK_VISIBLE_DEVICES", "text", since=(0, 12, 6)),
    *(Variable(name, "text") for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")),
    *(Variable(name, "text") for name in ("http_proxy", "https_proxy", "no_proxy")),
    # What any program of its kind reads.
    *(Variable(name, "text", source="the C library") for name in ("TZ", "LANG", "LC_ALL", "TMPDIR")),
    *(Variable(name, "text", source="Go") for name in ("GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT")),
    *(Variable(name, "text", source="Go, crypto/x509") for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")),
    Variable("HOME", "text", fixed="the service has a home of its own, which holds its key for the registry"),
    Variable("PATH", "text", fixed="the unit sets it"),
    Variable(
        "OLLAMA_LIBRARY_PATH",
        "text",
        since=(0, 6, 7),
        fixed="Ollama sets it for its runners",
        source="ml/backend/ggml/ggml/src/ggml.go",
    ),
    *(
        Variable(name, "text", fixed="it puts other libraries before those of the release", source="the C library")
        for name in ("LD_LIBRARY_PATH", "LD_PRELOAD")
    ),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}

_LAYERS = (
    "How many layers go onto the GPUs is num_gpu, an option of a request, or a parameter of a model that is made from "
    "a file (in ollama_models: {gguf: ..., parameters: {num_gpu: 99}}); left out, Ollama puts there what fits. Which "
    "GPUs are used is said by `gpus`."
)
#: Names that guides give and that no release reads: what to write instead.
INSTEAD = {
    "OLLAMA_NUM_GPU": _LAYERS,
    "OLLAMA_NUM_GPUS": _LAYERS,
    "OLLAMA_GPU_LAYERS": _LAYERS,
    "OLLAMA_N_GPU_LAYERS": _LAYERS,
    "OLLAMA_GPUS": "Which GPUs are used is said by `gpus`.",
    "OLLAMA_CUDA_VISIBLE_DEVICES": "Which GPUs are used is said by `gpus`.",
    **dict.fromkeys(
        ("OLLAMA_NUM_CTX", "OLLAMA_CTX_SIZE", "OLLAMA_MAX_CONTEXT", "OLLAMA_CONTEXT_SIZE", "OLLAMA_MAX_CONTEXT_LENGTH"),
        "The context of all models is `context_length`; of one model it is its parameter num_ctx.",
    ),
    **dict.fromkeys(
        ("OLLAMA_NUM_THREAD", "OLLAMA_NUM_THREADS"),
        "Threads are `num_thread`, a parameter of a request or of a model.",
    ),
    "OLLAMA_PORT": "The port is `port`.",
    "OLLAMA_TIMEOUT": "How long a model may take to load is `load_timeout`.",
    "OLLAMA_API_KEY": "Ollama asks nobody for a key. Who reaches it is said by `allowed_clients`.",
    "OLLAMA_TMPDIR": "No release since 0.5.2 reads it; TMPDIR is the folder for temporary files.",
    "OLLAMA_USE_GPU": _LAYERS,
}

#: time.ParseDuration of Go.
_DURATION = re.compile(r"[-+]?(?:0|(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
#: strconv.ParseBool of Go. Ollama takes any other word for true.
_BOOLS = ("1", "t", "T", "TRUE", "true", "True", "0", "f", "F", "FALSE", "false", "False")


def read_version(text: str) -> Version | None:
    """The numbers of a version such as 0.24.0 or 0.24.0-rc1; null for what is none."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:-|\Z)", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def knows(version: Version, name: str) -> bool:
    """Whether a release reads a variable."""
    return name in _BY_NAME and _BY_NAME[name].known_to(version)


def seconds(text: str) -> float | None:
    """A time as Ollama reads it: ``30m``, ``1h30m``, or a number of seconds. Null for what it cannot read."""
    text = text.strip()
    if re.fullmatch(r"[-+]?\d+", text):
        return float(text)
    if not _DURATION.fullmatch(text):
        return None
    found = sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)(ns|us|µs|ms|s|m|h)", text))
    return -found if text.startswith("-") else found


def login(value: str) -> str | None:
    """The login in an address, with the @ after it; null where there is none. A proxy may have no scheme."""
    found = re.search(r"(?<=://).*@|^(?!\w+://)[^\s/@:]+:.*@", value)
    return found[0] if found else None


def written(value: Any) -> str:
    """A value of YAML as Ollama reads it."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check(given: Mapping[str, Any], version: Version, shown: str) -> tuple[dict[str, str], list[Fault], list[str]]:
    """The variables to set, what stands against the ones ``given``, and what to know of them. ``shown`` is the version
    as it is written."""
    usable: dict[str, str] = {}
    faults: list[Fault] = []
    notes: list[str] = []
    for name, raw in given.items():
        name, value = str(name), written(raw)
        variable = _BY_NAME.get(name)
        if variable is None or not variable.known_to(version):
            faults.append(_unknown(name, version, shown))
            continue
        if variable.owner or variable.fixed:
            what = variable.fixed or f"`{variable.owner}` says the same"
            remedy = f"Remove it here and write `{variable.owner}`." if variable.owner else "Remove it."
            faults.append(fault("ollama_variable_managed", f"environment: {name}", what, remedy))
            continue
        problem = _problem(variable.kind, value)
        if problem:
            faults.append(fault("ollama_variable_invalid", f"environment: {name}", *problem))
            continue
        if variable.note:
            notes.append(f"{name}: {variable.note}")
        usable[name] = value
    return usable, faults, notes


def _unknown(name: str, version: Version, shown: str) -> Fault:
    subject = f"environment: {name}"
    variable = _BY_NAME.get(name)
    if variable is not None:
        since, until = variable.since, variable.until
        if since is not None and version < since:
            what = f"Ollama {shown} does not read it; {_dotted(since)} is the first that does"
        else:
            what = f"Ollama {shown} does not read it any more; {_dotted(until or LAST)} was the last that did"
        return fault("ollama_variable_unknown", subject, what, "Remove it.")
    what = "no release of Ollama reads it, and Ollama does not say so"
    if name.upper() in INSTEAD:
        return fault("ollama_variable_unknown", subject, what, INSTEAD[name.upper()])
    known = [variable.name for variable in VARIABLES if variable.known_to(version) and not variable.fixed]
    near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.75)
    if near:
        owner = _BY_NAME[near[0]].owner
        remedy = f"Did you mean {near[0]}? That is said by `{owner}`." if owner else f"Did you mean {near[0]}?"
    else:
        ours = ", ".join(
            sorted(
                v.name
                for v in VARIABLES
                if v.known_to(version) and v.name.startswith("OLLAMA_") and not v.owner and not v.fixed
            )
        )
        remedy = f"Remove it. Ollama {shown} reads, beside what settings say: {ours}."
    if version > LAST:
        remedy += f" (The names known here are those of releases up to {_dotted(LAST)}.)"
    return fault("ollama_variable_unknown", subject, what, remedy)


def _problem(kind: str, value: str) -> tuple[str, str] | None:
    """Why Ollama would not read a value as it is meant, and what to write."""
    if any(ord(char) < 32 for char in value):
        return f"{value!r} holds a line break or another control character", "Write it in one line."
    secret = login(value)
    # net/url of Go takes no others; nor does anything else have to be quoted in a file of variables.
    if secret and not re.fullmatch(r"[A-Za-z0-9._~!$&'()*+,;=:%-]*@", secret):
        return (
            "its login holds characters that an address cannot have, and nothing would go through it",
            "Write such a character as % and its code: @ is %40, / is %2F, a space %20, a backslash %5C.",
        )
    if kind == "bool" and value not in _BOOLS:
        return f"Ollama takes {value!r} for true, as any word that it does not know", "Write true or false."
    if kind == "number" and not re.fullmatch(r"\d{1,18}", value):
        return f"{value!r} is no whole number; Ollama would pass over it", "Write a whole number, 0 or more."
    if kind == "duration" and seconds(value) is None:
        return f"{value!r} is no time; Ollama would pass over it", "Write it like 30m, 1h30m, or seconds as a number."
    if kind == "level" and not re.fullmatch(r"\d|true|false", value):
        return f"{value!r} is no level", "Write 0, 1 (debug) or 2 (trace)."
    if kind == "cache" and value not in CACHE_TYPES:
        return f"{value!r} is no type that Ollama takes", f"Write one of {', '.join(CACHE_TYPES)}."
    return None


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
