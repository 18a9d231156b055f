#!/usr/bin/env python3
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A stand-in for Ollama on machines where Ollama itself cannot be installed: ``bin/ollama`` of the lab's archives.

One file, standard library only. It speaks Ollama's HTTP API and keeps its store (manifests, blobs, partials) as release
0.24.0 does by its documentation and sources; it was never compared with the real program. It computes nothing: an
answer is a row of words, a token is a word or a sign, and speeds are made up.

What it decides as the real one does: which libraries below ``lib/ollama`` a card and its driver can use (a V100 needs
``cuda_v12``; from 0.30 on a driver older than 550 means the CPU), how large a model is in memory and on which cards it
fits, what is cut from a prompt that is longer than the context, when a model is unloaded. Cards are those that
``nvidia-smi`` names. A loaded model is a process ``ollama runner`` (from 0.30 on ``llama-server``), whose memory the
lab's GPU simulator shows.

Faults and the lab's settings are a JSON object in the file that OLLAMA_STANDIN names, else in /etc/ollama-standin.json,
read anew at each request:

``registry``             address that stands for https://registry.ollama.ai (also: OLLAMA_STANDIN_REGISTRY)
``not_ready``            true: connections are taken and nothing is answered while this is set
``crash_at_start``       true: serve ends with status 1 before it listens
``cpu_fallback``         true: models are loaded on the CPU, and nothing is logged about it
``skip_device``          true: a card is skipped at load with a log line, and a part of the model is on the CPU
``partial_offload``      0 to 1: this share of a model's layers is on the cards
``abort_in_warmup``      true: the runner is killed by SIGABRT while a model is loaded
``load_seconds``         seconds that a load takes without progress; OLLAMA_LOAD_TIMEOUT ends it
``load_timeout``         true: a load ends as one that OLLAMA_LOAD_TIMEOUT has ended at progress 1.00
``ignores_context``      true or a number of tokens: every model is loaded with that context (true: 4096)
``ignores_keep_alive``   true: models are unloaded after five minutes, whatever was asked
``silent``               true: answers are empty
``error_in_stream``      text: a pull ends with this error after its first layer, with HTTP status 200
``pull_bytes_per_second``  most that a part of a blob is fetched with
``part_bytes``           size of a blob's parts (real: 100 MB at least)
``retry_seconds``        seconds before the first retry of a part, doubled each time (real: 1)
``blob_flip``            "write": a byte of each pulled blob of weights is broken before it is verified; "later": after
                         the pull has succeeded, as a bad disk does
``different_hash_each_time``  true: as ``blob_flip: write``, another byte each time
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn, cast

VERSION = "0.24.0"

DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG = "registry.ollama.ai", "library", "latest"
SWITCHES = "/etc/ollama-standin.json"
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.ollama.image."
FOREVER = 2**63 - 1  # nanoseconds, about 292 years
MIB, GIB = 1 << 20, 1 << 30
PRUNE_GRACE_S = 3600
PARTS = 16
LEAST_PART, MOST_PART = 100_000_000, 1_000_000_000
MAX_TRIES = 6
TICK_S = 0.06
#: What a card must have free beside a model, and what computing takes of a card and of the host.
CARD_MINIMUM, CARD_GRAPH, HOST_GRAPH = 457 * MIB, 96 * MIB, 4 * MIB
TOKENS_PER_S = {"gpu": 80, "cpu": 6}

MISMATCH = "digest mismatch, file must be downloaded again"
NOT_GGUF = "supplied file was not in GGUF format"


def release() -> tuple[int, int]:
    major, minor = VERSION.split(".")[:2]
    return int(major), int(minor)


#: From 0.30 on models are run by llama-server.
NEW_RUNNER = release() >= (0, 30)


def switches() -> dict[str, Any]:
    """The faults that are set now."""
    try:
        found = json.loads(Path(os.environ.get("OLLAMA_STANDIN") or SWITCHES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------------------------------------------------------------
# How Go writes things
# ---------------------------------------------------------------------------------------------------------------------


def go_json(value: Any) -> str:
    """As Go's encoding/json: no spaces, text as UTF-8, and what HTML could take amiss escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def go_time(moment: datetime) -> str:
    text = moment.isoformat()
    return text.replace("+00:00", "Z")


def now() -> datetime:
    return datetime.now(timezone.utc)


class DurationError(Exception):
    pass


_UNITS = {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9, "h": 3600e9}


def parse_duration(text: str) -> int:
    """Nanoseconds of a duration such as 5m or 1h30m. DurationError for what is none."""
    rest = text[1:] if text[:1] in "+-" else text
    if rest == "0":
        return 0
    if not rest:
        raise DurationError(f'time: invalid duration "{text}"')
    total = 0.0
    while rest:
        found = re.match(r"(\d+(?:\.\d*)?|\.\d+)([a-zµ]*)", rest)
        if not found:
            raise DurationError(f'time: invalid duration "{text}"')
        if not found[2]:
            raise DurationError(f'time: missing unit in duration "{text}"')
        if found[2] not in _UNITS:
            raise DurationError(f'time: unknown unit "{found[2]}" in duration "{text}"')
        total += float(found[1]) * _UNITS[found[2]]
        rest = rest[found.end() :]
    return int(-total if text[:1] == "-" else total)


def keep_alive_of(value: Any) -> int | None:
    """Nanoseconds that ``keep_alive`` of a request asks for; null when it asks for nothing. Negative: for ever."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise DurationError(f"Unsupported type: '{type(value).__name__}'")
    span = parse_duration(value) if isinstance(value, str) else int(value * 1e9)
    return FOREVER if span < 0 else span


def human_bytes(size: float) -> str:
    for unit, amount in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= amount:
            value = size / amount
            return f"{value:.1f} {unit}" if value < 10 and value != int(value) else f"{int(value)} {unit}"
    return f"{int(size)} B"


def human_bytes2(size: float) -> str:
    for unit, amount in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if size >= amount:
            return f"{size / amount:.1f} {unit}"
    return f"{int(size)} B"


def human_number(count: int) -> str:
    for unit, amount, digits in (("B", 10**9, 1), ("M", 10**6, 2)):
        if count >= amount:
            value = count / amount
            return f"{value:.0f}{unit}" if value == int(value) else f"{value:.{digits}f}{unit}"
    return f"{count / 1000:.0f}K" if count >= 1000 else str(count)


def human_duration(span: timedelta) -> str:
    seconds = int(span.total_seconds())
    if seconds < 60:
        return ("Less than a second", "1 second")[seconds] if seconds < 2 else f"{seconds} seconds"
    minutes = seconds // 60
    if minutes < 60:
        return "About a minute" if minutes == 1 else f"{minutes} minutes"
    hours = round(seconds / 3600)
    for most, unit, size in ((48, "hours", 1), (336, "days", 24), (1440, "weeks", 168), (17520, "months", 720)):
        if hours < most:
            return "About an hour" if hours == 1 else f"{hours // size} {unit}"
    return f"{seconds // 3600 // 24 // 365} years"


def human_time(moment: datetime) -> str:
    span = moment - now()
    if span > timedelta(days=365 * 20):
        return "Forever"
    return f"{human_duration(span)} from now" if span > timedelta() else f"{human_duration(-span)} ago"


# ---------------------------------------------------------------------------------------------------------------------
# Settings and the log
# ---------------------------------------------------------------------------------------------------------------------


def variable(name: str) -> str:
    return os.environ.get(name, "").strip().strip("\"'")


def flag(name: str, default: bool = False) -> bool:
    text = variable(name)
    if not text:
        return default
    return text not in ("0", "f", "F", "false", "FALSE", "False")


def number(name: str, default: int) -> int:
    text = variable(name)
    if text and not text.isascii():
        return default
    if text and not text.isdigit():
        log("WARN", "config.go:285", "invalid environment variable, using default", key=name, value=text)
        return default
    return int(text) if text else default


def span_of(name: str, default: int) -> int:
    """Nanoseconds; a plain number is seconds."""
    text = variable(name)
    if not text:
        return default
    try:
        return parse_duration(text)
    except DurationError:
        return int(text) * 10**9 if re.fullmatch(r"-?\d+", text) else default


def keep_alive_default() -> int:
    span = span_of("OLLAMA_KEEP_ALIVE", 300 * 10**9)
    return FOREVER if span < 0 else span


def load_timeout() -> int:
    span = span_of("OLLAMA_LOAD_TIMEOUT", 300 * 10**9)
    return FOREVER if span <= 0 else span


def log_level() -> int:
    """-4 debug, -8 trace, 0 all others."""
    text = variable("OLLAMA_DEBUG")
    if not text or text in ("0", "false"):
        return 0
    if text.lower() in ("1", "t", "true"):
        return -4
    return -4 * int(text) if re.fullmatch(r"-?\d+", text) else 0


def host_and_port() -> tuple[str, int]:
    text = variable("OLLAMA_HOST")
    scheme, found, rest = text.partition("://")
    rest, default = (rest, {"http": 80, "https": 443}.get(scheme, 11434)) if found else (text, 11434)
    rest = rest.partition("/")[0]
    # A bare IPv6 address has several colons and no port.
    at = re.fullmatch(r"\[(.*)\](?::(\d*))?|([^:]*)(?::(\d*))?", rest)
    if at is None:
        return rest.strip("[]") or "127.0.0.1", default
    host = at[1] if at[1] is not None else at[3]
    port = at[2] or at[4]
    if port and int(port) > 65535:
        port = None
    # ":11434" is every address; nothing at all is loopback.
    return (host or ("" if ":" in rest else "127.0.0.1")), int(port) if port else default


def models_folder() -> Path:
    text = variable("OLLAMA_MODELS")
    return Path(text) if text else Path(os.environ["HOME"], ".ollama", "models")


def go_span(span: int) -> str:
    """As Go prints a duration."""
    hours, rest = divmod(span, 3600 * 10**9)
    minutes, rest = divmod(rest, 60 * 10**9)
    seconds = f"{rest / 1e9:.9f}".rstrip("0").rstrip(".") + "s"
    return (f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else "") + seconds


def configuration() -> dict[str, str]:
    """What the line `server config` says."""
    host, port = host_and_port()
    level = {0: "INFO", -4: "DEBUG"}.get(log_level(), f"DEBUG{log_level() + 4}")
    told = {
        "OLLAMA_DEBUG": level,
        "OLLAMA_DEBUG_LOG_REQUESTS": str(flag("OLLAMA_DEBUG_LOG_REQUESTS")).lower(),
        "OLLAMA_FLASH_ATTENTION": str(flag("OLLAMA_FLASH_ATTENTION")).lower(),
        "OLLAMA_GPU_OVERHEAD": str(number("OLLAMA_GPU_OVERHEAD", 0)),
        "OLLAMA_HOST": f"http://{f'[{host}]' if ':' in host else host}:{port}",
        "OLLAMA_KEEP_ALIVE": go_span(keep_alive_default()),
        "OLLAMA_LOAD_TIMEOUT": go_span(load_timeout()),
        "OLLAMA_MAX_LOADED_MODELS": str(number("OLLAMA_MAX_LOADED_MODELS", 0)),
        "OLLAMA_MAX_QUEUE": str(number("OLLAMA_MAX_QUEUE", 512)),
        "OLLAMA_MAX_TRANSFER_STREAMS": str(number("OLLAMA_MAX_TRANSFER_STREAMS", 4)),
        "OLLAMA_MODELS": str(models_folder()),
        "OLLAMA_NUM_PARALLEL": str(number("OLLAMA_NUM_PARALLEL", 1)),
        "OLLAMA_CONTEXT_LENGTH": str(number("OLLAMA_CONTEXT_LENGTH", 0)),
        "OLLAMA_ORIGINS": "[" + variable("OLLAMA_ORIGINS").replace(",", " ") + "]",
        "OLLAMA_REMOTES": "[" + (variable("OLLAMA_REMOTES") or "ollama.com").replace(",", " ") + "]",
    }
    for name in ("MULTIUSER_CACHE", "NEW_ENGINE", "NOHISTORY", "NOPRUNE", "NO_CLOUD", "SCHED_SPREAD", "VULKAN"):
        told[f"OLLAMA_{name}"] = str(flag(f"OLLAMA_{name}")).lower()
    for name in ("OLLAMA_EDITOR", "OLLAMA_KV_CACHE_TYPE", "OLLAMA_LLM_LIBRARY", "CUDA_VISIBLE_DEVICES",
                 "GGML_VK_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION",
                 "ROCR_VISIBLE_DEVICES", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy",
                 "no_proxy"):  # fmt: skip
        told[name] = variable(name)
    return told


def quoted(value: object) -> str:
    text = str(value)
    plain = bool(text) and all(sign.isprintable() and sign not in ' ="' for sign in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


_writing = threading.Lock()


def log(level: str, source: str, message: str, **more: object) -> None:
    if {"DEBUG": -4, "TRACE": -8}.get(level, 0) < log_level():
        return
    stamp = datetime.now().astimezone().isoformat(timespec="milliseconds")
    line = f"time={stamp} level={level} source={source} msg={quoted(message)}"
    for key, value in more.items():
        line += f" {quoted(key)}={quoted(value)}"
    with _writing:
        print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# GGUF
# ---------------------------------------------------------------------------------------------------------------------


class GgufError(Exception):
    pass


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: Weights in a block and bytes of a block, by tensor type.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
_TYPE_NAMES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K",
               12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 30: "BF16", 39: "MXFP4"}  # fmt: skip
_FILE_TYPES = {1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "MXFP4", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
               12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
               21: "Q2_K_S", 32: "BF16"}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        weights, size = _BLOCKS.get(self.kind, (1, 4))
        return self.elements * size // weights


@dataclass
class Gguf:
    """Header of a GGUF file."""

    values: dict[str, Any]
    tensors: list[Tensor]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", "unknown"))

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def file_type(self) -> str:
        return _FILE_TYPES.get(int(self.values.get("general.file_type", 1024)), "unknown")

    def number(self, key: str, default: int = 0) -> int:
        value = self.values.get(f"{self.architecture}.{key}", default)
        return int(max(value) if isinstance(value, list) else value)


def read_gguf(path: Path) -> Gguf:
    """GgufError, OSError."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size

        def take(form: str) -> Any:
            raw = stream.read(struct.calcsize("<" + form))
            try:
                return struct.unpack("<" + form, raw)[0]
            except struct.error:
                raise GgufError("unexpected EOF") from None

        def text() -> str:
            length = take("Q")
            raw = stream.read(min(length, size))
            if len(raw) != length:
                raise GgufError("unexpected EOF")
            return raw.decode("utf-8", "replace")

        def value(kind: int) -> Any:
            if kind in _SCALARS:
                return take(_SCALARS[kind])
            if kind == 8:
                return text()
            if kind == 9:
                of, count = take("I"), take("Q")
                return [value(of) for _ in range(count)]
            raise GgufError(f"invalid type: {kind}")

        if stream.read(4) != b"GGUF":
            raise GgufError("invalid file magic")
        take("I")
        tensors, keys = take("Q"), take("Q")
        values = {}
        for _ in range(keys):
            key = text()
            values[key] = value(take("I"))
        found = []
        for _ in range(tensors):
            name = text()
            shape = tuple(take("Q") for _ in range(take("I")))
            found.append(Tensor(name, take("I"), shape, take("Q")))
        alignment = int(values.get("general.alignment", 32))
        start = stream.tell() + -stream.tell() % alignment
    for tensor in found:
        end = start + tensor.offset + tensor.size
        if end > size:
            raise GgufError(f'tensor "{tensor.name}" offset+size ({end}) exceeds file size ({size})')
    return Gguf(values, found)


# ---------------------------------------------------------------------------------------------------------------------
# Names and the store
# ---------------------------------------------------------------------------------------------------------------------


class NotFound(Exception):
    pass


class ApiError(Exception):
    """An answer with an error; ``status`` counts only before the first line of a stream is sent."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Name:
    host: str
    namespace: str
    model: str
    tag: str
    scheme: str = "https"

    @property
    def valid(self) -> bool:
        word = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"
        return bool(
            re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}", self.host)
            and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}", self.namespace)
            and re.fullmatch(word, self.model)
            and re.fullmatch(word, self.tag)
        )

    @property
    def path(self) -> Path:
        return Path(self.host, self.namespace, self.model, self.tag)

    @property
    def shortest(self) -> str:
        if self.host.lower() != DEFAULT_HOST:
            return f"{self.host}/{self.namespace}/{self.model}:{self.tag}"
        if self.namespace.lower() != DEFAULT_NAMESPACE:
            return f"{self.namespace}/{self.model}:{self.tag}"
        return f"{self.model}:{self.tag}"


def parse_name(text: str) -> Name:
    rest, tag = text, ""
    if text.rfind(":") > text.rfind("/"):
        rest, _, tag = text.rpartition(":")
    rest, _, model = rest.rpartition("/")
    rest, _, namespace = rest.rpartition("/")
    scheme, found, host = rest.partition("://")
    if not found:
        scheme, host = "", rest
    return Name(host or DEFAULT_HOST, namespace or DEFAULT_NAMESPACE, model, tag or DEFAULT_TAG, scheme or "https")


def valid_name(text: Any) -> Name:
    if not text:
        raise ApiError("model is required", 400)
    name = parse_name(str(text))
    if not name.valid:
        raise ApiError("invalid model name", 400)
    return existing_name(name)


def existing_name(name: Name) -> Name:
    """The name as it is written in the store, where it differs in case."""
    for found in sorted(manifests(), key=lambda entry: str(entry.path)):
        if str(found.path).lower() == str(name.path).lower():
            return Name(found.host, found.namespace, found.model, found.tag, name.scheme)
    return name


def manifests_folder() -> Path:
    folder = models_folder() / "manifests"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return folder


def blobs_folder() -> Path:
    folder = models_folder() / "blobs"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return folder


def blob_path(digest: str) -> Path:
    if not re.fullmatch(r"sha256[:-][0-9a-fA-F]{64}", digest):
        raise ApiError("invalid digest format", 400)
    return blobs_folder() / digest.replace(":", "-")


@dataclass
class Manifest:
    name: Name
    path: Path
    raw: bytes
    content: dict[str, Any]

    @property
    def layers(self) -> list[dict[str, Any]]:
        return self.content.get("layers") or []

    @property
    def config(self) -> dict[str, Any]:
        return self.content.get("config") or {}

    @property
    def all_layers(self) -> list[dict[str, Any]]:
        return [*self.layers, *([self.config] if self.config.get("digest") else [])]

    @property
    def size(self) -> int:
        return sum(int(layer.get("size", 0)) for layer in self.all_layers)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def modified(self) -> datetime:
        return datetime.fromtimestamp(self.path.stat().st_mtime, timezone.utc)


class ManifestError(Exception):
    pass


def read_manifest(name: Name) -> Manifest:
    """NotFound, ManifestError."""
    path = manifests_folder() / name.path
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(str(path)) from None
    except OSError as exc:
        raise ManifestError(go_error("open", path, exc)) from None
    try:
        content = json.loads(raw)
    except ValueError:
        raise ManifestError("unexpected EOF" if not raw.strip() else "invalid character in manifest") from None
    if not isinstance(content, dict):
        raise ManifestError("json: cannot unmarshal into Go value of type manifest.Manifest")
    return Manifest(name, path, raw, content)


def go_error(action: str, path: Path, exc: OSError) -> str:
    return f"{action} {path}: {(exc.strerror or str(exc)).lower()}"


def manifests(strict: bool = False) -> dict[Name, Manifest]:
    """Every manifest. ManifestError with ``strict`` for one that is broken; else such are left out."""
    folder = manifests_folder()
    found = {}
    for path in sorted(folder.glob("*/*/*/*")):
        if path.is_dir():
            continue
        name = Name(*path.relative_to(folder).parts)
        if not name.valid:
            if strict:
                raise ManifestError(f"{path.relative_to(folder)} invalid name")
            log("WARN", "manifest.go:204", "bad manifest name", path=path.relative_to(folder))
            continue
        try:
            found[name] = read_manifest(name)
        except (NotFound, ManifestError) as exc:
            if strict:
                raise ManifestError(f"{name.shortest} {exc}") from None
            log("WARN", "manifest.go:213", "bad manifest", name=name.shortest, error=exc)
    return found


def write_manifest(name: Name, config: dict[str, Any], layers: list[dict[str, Any]]) -> None:
    path = manifests_folder() / name.path
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    content = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": layers}
    path.write_text(go_json(content) + "\n", encoding="utf-8")


def remove_unused(digests: set[str]) -> None:
    used = {layer["digest"] for manifest in manifests().values() for layer in manifest.all_layers}
    for digest in digests - used:
        try:
            blob_path(digest).unlink()
        except OSError as exc:
            log("INFO", "images.go:481", f"couldn't remove file '{blob_path(digest)}': {exc.strerror}")


def prune_folders(folder: Path, top: bool = True) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            prune_folders(entry, False)
    if not top and not any(folder.iterdir()):
        folder.rmdir()


def prune() -> None:
    """At start: partials and blobs of no manifest, older than an hour, go."""
    try:
        manifests(strict=True)
    except ManifestError as exc:
        log("WARN", "routes.go:1817", "corrupt manifests detected, skipping prune operation.  "
            "Re-pull or delete to clear", error=exc)  # fmt: skip
        return
    unused = set()
    for path in sorted(blobs_folder().iterdir()):
        if path.is_dir() or time.time() - path.stat().st_mtime < PRUNE_GRACE_S:
            continue
        if re.fullmatch(r"sha256-[0-9a-fA-F]{64}", path.name):
            unused.add(path.name.replace("-", ":"))
        else:
            path.unlink()
    log("INFO", "images.go:517", f"total blobs: {len(unused)}")
    for manifest in manifests().values():
        unused -= {layer["digest"] for layer in manifest.all_layers}
    remove_unused(unused)
    log("INFO", "images.go:524", f"total unused blobs removed: {len(unused)}")
    prune_folders(manifests_folder())


def new_layer(content: bytes, kind: str) -> tuple[dict[str, Any], str]:
    """A layer of those bytes, and the status line about it."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    path = blob_path(digest)
    status = "using existing layer"
    if not path.exists():
        status = "creating new layer"
        store_bytes(iter([content]), path)
    os.utime(path)
    return {"mediaType": LAYER + kind if "/" not in kind else kind, "digest": digest, "size": len(content)}, (
        f"{status} {digest}"
    )


def store_bytes(parts: Iterator[bytes], path: Path) -> None:
    handle, name = tempfile.mkstemp(dir=blobs_folder(), prefix="sha256-")
    try:
        with os.fdopen(handle, "wb") as stream:
            for part in parts:
                stream.write(part)
        Path(name).chmod(0o644)
        Path(name).rename(path)
    finally:
        Path(name).unlink(missing_ok=True)


@dataclass
class Model:
    name: Name
    manifest: Manifest
    config: dict[str, Any]
    weights: Path | None = None
    parent: str = ""
    projectors: list[Path] = field(default_factory=list)
    template: str = "{{ .Prompt }}"
    system: str = ""
    licenses: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def details(self) -> dict[str, Any]:
        return details_of(self.config, self.parent)

    @property
    def capabilities(self) -> list[str]:
        """Empty for a file that is no GGUF: then it can do nothing."""
        try:
            header = read_gguf(cast(Path, self.weights))
        except (GgufError, OSError, AttributeError) as exc:
            log("ERROR", "images.go:102", "couldn't open model file", error=exc)
            return []
        pooled = f"{header.architecture}.pooling_type" in header.values
        found = ["embedding" if pooled else "completion"]
        return found + [word for word, mark in (("tools", ".Tools"), ("insert", ".Suffix")) if mark in self.template]


def details_of(config: dict[str, Any], parent: str = "") -> dict[str, Any]:
    return {
        "parent_model": parent,
        "format": config.get("model_format", ""),
        "family": config.get("model_family", ""),
        "families": config.get("model_families"),
        "parameter_size": config.get("model_type", ""),
        "quantization_level": config.get("file_type", ""),
    }


def read_model(name: Name) -> Model:
    """NotFound for no manifest or a missing small blob, as the real one; ApiError."""
    try:
        manifest = read_manifest(name)
    except ManifestError as exc:
        raise ApiError(str(exc)) from None
    try:
        config = {}
        if manifest.config.get("digest"):
            config = json.loads(blob_path(manifest.config["digest"]).read_bytes())
        model = Model(name, manifest, config)
        for layer in manifest.layers:
            kind = str(layer.get("mediaType", "")).removeprefix(LAYER)
            path = blob_path(layer["digest"])
            if kind == "model":
                model.weights, model.parent = path, layer.get("from", "")
            elif kind == "projector":
                model.projectors.append(path)
            elif kind in ("template", "prompt"):
                model.template = path.read_text(encoding="utf-8")
            elif kind == "system":
                model.system = path.read_text(encoding="utf-8")
            elif kind == "license":
                model.licenses.append(path.read_text(encoding="utf-8"))
            elif kind == "params":
                model.options = json.loads(path.read_bytes())
            elif kind == "messages":
                model.messages = json.loads(path.read_bytes())
    except FileNotFoundError as exc:
        raise NotFound(str(exc)) from None
    except (OSError, ValueError) as exc:
        raise ApiError(str(exc)) from None
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Pulling
# ---------------------------------------------------------------------------------------------------------------------


class Cancelled(Exception):
    pass


class _OwnHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects on one host only, as the real one does when it looks for where a blob really is."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urllib.parse.urlsplit(newurl).hostname != urllib.parse.urlsplit(req.full_url).hostname:
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def registry_of(name: Name, insecure: bool) -> str:
    """Address of the registry that holds a model, without a slash at the end."""
    stand_in = os.environ.get("OLLAMA_STANDIN_REGISTRY") or switches().get("registry")
    if name.host == DEFAULT_HOST and stand_in:
        return str(stand_in).rstrip("/")
    # The scheme of the name is lost on the way, so https it is unless the request says `insecure`.
    return f"{'http' if insecure else 'https'}://{name.host}"


def request(url: str, method: str = "GET", *, follow: bool = True, **headers: str) -> Any:
    """The open answer. ApiError, NotFound."""
    agent = {"User-Agent": f"ollama/{VERSION} (amd64 linux) Go/go1.24.1", **headers}
    opener = urllib.request.build_opener(*([] if follow else [_OwnHost()]))
    try:
        return opener.open(urllib.request.Request(url, method=method, headers=agent), timeout=30)
    except urllib.error.HTTPError as exc:
        if exc.code in (301, 302, 303, 307, 308) and not follow:
            return exc
        if exc.code == 404:
            raise NotFound("file does not exist") from None
        raise ApiError(f"{exc.code}: {exc.read().decode('utf-8', 'replace')}") from None
    except urllib.error.URLError as exc:
        where = urllib.parse.urlsplit(url)
        reason = exc.reason
        if isinstance(reason, ConnectionRefusedError):
            port = where.port or (443 if where.scheme == "https" else 80)
            raise ApiError(
                f'{method.title()} "{url}": dial tcp {where.hostname}:{port}: connect: connection refused'
            ) from None
        if isinstance(reason, socket.gaierror):
            raise ApiError(f'{method.title()} "{url}": dial tcp: lookup {where.hostname}: no such host') from None
        if "WRONG_VERSION_NUMBER" in str(reason) or "RECORD_LAYER" in str(reason):
            raise ApiError(f'{method.title()} "{url}": http: server gave HTTP response to HTTPS client') from None
        raise ApiError(f'{method.title()} "{url}": {reason}') from None
    except (OSError, HTTPException) as exc:
        raise ApiError(f'{method.title()} "{url}": {exc or "EOF"}') from None


@dataclass
class Part:
    number: int
    offset: int
    size: int
    completed: int = 0

    def line(self) -> str:
        return go_json({"N": self.number, "Offset": self.offset, "Size": self.size, "Completed": self.completed}) + "\n"


class Download:
    """One blob on its way. Several pulls may wait for it; when none does any more, it is cancelled."""

    def __init__(self, url: str, digest: str, lenient: bool) -> None:
        self.digest = digest
        # What stands for registry.ollama.ai may be a plain file server.
        self._lenient = lenient
        self.blob = blob_path(digest)
        self.partial = self.blob.with_name(f"{self.blob.name}-partial")
        self.parts: list[Part] = []
        self.seen = 0
        self.error: Exception | None = None
        self.done = threading.Event()
        self.stop = threading.Event()
        self.waiting = 0
        self._lock = threading.Lock()
        self._url = url

    @property
    def total(self) -> int:
        return sum(part.size for part in self.parts)

    def prepare(self) -> None:
        for path in sorted(self.blob.parent.glob(f"{self.partial.name}-*")):
            try:
                told = json.loads(path.read_text(encoding="utf-8"))
                self.parts.append(Part(told["N"], told["Offset"], told["Size"], told["Completed"]))
            except (ValueError, KeyError):
                raise ApiError("unexpected EOF") from None
        self.parts.sort(key=lambda part: part.number)
        if not self.parts:
            with request(self._url, "HEAD") as answer:
                total = int(answer.headers.get("Content-Length") or 0)
            size = int(switches().get("part_bytes") or min(max(total // PARTS, LEAST_PART), MOST_PART))
            for place in range(0, total, size):
                self.parts.append(Part(len(self.parts), place, min(size, total - place)))
                self._write(self.parts[-1])
        self.seen = sum(part.completed for part in self.parts)
        if self.parts:
            each = human_bytes(self.parts[0].size)
            log("INFO", "download.go:179", f"downloading {self.digest[7:19]} in {len(self.parts)} {each} part(s)")

    def run(self) -> None:
        try:
            self._run()
        except (ApiError, NotFound, Cancelled) as exc:
            self.error = exc
        except OSError as exc:
            self.error = ApiError(go_error("write", self.partial, exc))
        finally:
            with _downloads_lock:
                _downloads.pop(self.digest, None)
            self.done.set()

    def _run(self) -> None:
        with self.partial.open("ab"):
            os.truncate(self.partial, self.total)
        self.partial.chmod(0o644)
        target = self._direct()
        problems: list[Exception] = []

        def work(part: Part) -> None:
            try:
                self._fetch(part, target)
            except (ApiError, NotFound, Cancelled, OSError) as exc:
                problems.append(exc)

        todo = [threading.Thread(target=work, args=(part,)) for part in self.parts if part.completed < part.size]
        for at in range(0, len(todo), PARTS):
            for thread in todo[at : at + PARTS]:
                thread.start()
            for thread in todo[at : at + PARTS]:
                thread.join()
        if problems:
            raise problems[0]
        for part in self.parts:
            self._part_path(part).unlink()
        self._break()
        self.partial.rename(self.blob)

    def _direct(self) -> str:
        with request(self._url, follow=False) as answer:
            place = answer.headers.get("Location")
            found = str(answer.geturl())
        if place:
            return str(urllib.parse.urljoin(self._url, place))
        if self._lenient:
            return found
        # The real one wants to be sent elsewhere for the bytes, and fails at a registry that sends them itself.
        raise ApiError("http: no Location header in response")

    def _fetch(self, part: Part, url: str) -> None:
        last: Exception = ApiError("unexpected EOF")
        for attempt in range(MAX_TRIES):
            try:
                return self._chunk(part, url)
            except (ApiError, NotFound, HTTPException, ConnectionError, TimeoutError) as exc:
                last = exc
                wait = float(switches().get("retry_seconds", 1)) * 2**attempt
                log("INFO", "download.go:304", f"{self.digest[7:19]} part {part.number} attempt {attempt} failed: "
                    f"{exc or 'unexpected EOF'}, retrying in {wait:g}s")  # fmt: skip
                if self.stop.wait(wait):
                    raise Cancelled from None
        raise ApiError(f"max retries exceeded: {last or 'unexpected EOF'}")

    def _chunk(self, part: Part, url: str) -> None:
        start, end = part.offset + part.completed, part.offset + part.size
        got = 0
        try:
            with request(url, Range=f"bytes={start}-{end - 1}") as answer, self.partial.open("r+b") as out:
                out.seek(start)
                while start + got < end:
                    speed = switches().get("pull_bytes_per_second")
                    block = answer.read(min(1 << 16 if not speed else max(1, int(speed) // 20), end - start - got))
                    if not block:
                        raise ApiError("unexpected EOF")
                    out.write(block)
                    out.flush()
                    got += len(block)
                    with self._lock:
                        self.seen += len(block)
                    if self.stop.is_set() or (speed and self.stop.wait(len(block) / float(speed))):
                        raise Cancelled
        finally:
            # What was received is written down only when a try ends: a killed server begins the part again.
            part.completed += got
            self._write(part)

    def _break(self) -> None:
        told = switches()
        if self.total < 4096 or (told.get("blob_flip") != "write" and not told.get("different_hash_each_time")):
            return
        flip(self.partial, random.randrange(self.total) if told.get("different_hash_each_time") else self.total // 2)

    def _part_path(self, part: Part) -> Path:
        return self.partial.with_name(f"{self.partial.name}-{part.number}")

    def _write(self, part: Part) -> None:
        self._part_path(part).write_text(part.line(), encoding="ascii")
        self._part_path(part).chmod(0o644)


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 0x01]))


_downloads: dict[str, Download] = {}
_downloads_lock = threading.Lock()


def pull_blob(url: str, digest: str, lenient: bool) -> Generator[dict[str, Any], None, bool]:
    """Lines of progress; returns whether the blob was there already (then nobody looks at its bytes)."""
    status = f"pulling {digest[7:19]}"
    path = blob_path(digest)
    if path.exists():
        size = path.stat().st_size
        yield {"status": status, "digest": digest, "total": size, "completed": size}
        return True
    with _downloads_lock:
        download = _downloads.get(digest)
        if download is None:
            download = Download(url, digest, lenient)
            download.prepare()
            _downloads[digest] = download
            threading.Thread(target=download.run, daemon=True).start()
        download.waiting += 1
    try:
        while not download.done.wait(TICK_S):
            line = {"status": status, "digest": digest, "total": download.total, "completed": download.seen}
            yield {key: value for key, value in line.items() if value}
        if download.error:
            raise ApiError("context canceled") if isinstance(download.error, Cancelled) else download.error
    finally:
        download.waiting -= 1
        if download.waiting == 0 and not download.done.is_set():
            download.stop.set()
            download.done.wait(5)
    return False


def pull(name: Name, insecure: bool) -> Iterator[dict[str, Any]]:
    former: set[str] = set()
    try:
        former = {layer["digest"] for layer in read_manifest(name).all_layers}
    except NotFound:
        pass
    except ManifestError as exc:
        log("WARN", "images.go:608", "pulling model with bad existing manifest", name=name.shortest, error=exc)
    yield {"status": "pulling manifest"}
    base = f"{registry_of(name, insecure)}/v2/{name.namespace}/{name.model}"
    try:
        with request(f"{base}/manifests/{name.tag}", Accept=MANIFEST_TYPE) as answer:
            raw = answer.read()
        content = json.loads(raw)
    except (NotFound, ApiError) as exc:
        raise ApiError(f"pull model manifest: {exc}") from None
    except ValueError as exc:
        raise ApiError(f"pull model manifest: {exc}") from None
    layers = Manifest(name, Path(), raw, content).all_layers
    fresh = []
    for layer in layers:
        try:
            lenient = name.host == DEFAULT_HOST
            if not (yield from pull_blob(f"{base}/blobs/{layer['digest']}", layer["digest"], lenient)):
                fresh.append(layer["digest"])
        except NotFound as exc:
            raise ApiError(str(exc)) from None
        if switches().get("error_in_stream"):
            raise ApiError(str(switches()["error_in_stream"]))
    yield {"status": "verifying sha256 digest"}
    for digest in fresh:
        found = f"sha256:{sha256_of(blob_path(digest))}"
        if found != digest:
            blob_path(digest).unlink(missing_ok=True)
            raise ApiError(f"{MISMATCH}: want {digest}, got {found}")
    yield {"status": "writing manifest"}
    path = manifests_folder() / name.path
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.write_bytes(raw)
    left = former - {layer["digest"] for layer in layers}
    if left and not flag("OLLAMA_NOPRUNE"):
        yield {"status": "removing unused layers"}
        remove_unused(left)
    if switches().get("blob_flip") == "later":
        for layer in layers:
            if layer["digest"] in fresh and layer.get("mediaType") == f"{LAYER}model":
                flip(blob_path(layer["digest"]), int(layer["size"]) // 2)
    yield {"status": "success"}


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Creating
# ---------------------------------------------------------------------------------------------------------------------


def existing_layer(digest: str, kind: str, origin: str) -> tuple[dict[str, Any], str]:
    path = blob_path(digest)
    try:
        size = path.stat().st_size
        os.utime(path)
    except OSError as exc:
        raise ApiError(go_error("stat", path, exc)) from None
    layer = {"mediaType": kind, "digest": digest, "size": size, "from": origin}
    return layer, f"using existing layer {digest}"


def create(body: dict[str, Any], name: Name) -> Iterator[dict[str, Any]]:
    layers: list[tuple[dict[str, Any], str]] = []
    config: dict[str, Any] = {}
    try:
        old: Manifest | None = read_manifest(name)
    except (NotFound, ManifestError):
        old = None
    if body.get("from"):
        source = valid_name(body["from"])
        try:
            manifest = read_manifest(source)
        except NotFound:
            yield from (line for line in pull(source, False) if line["status"] != "success")
            manifest = read_manifest(source)
        except ManifestError as exc:
            raise ApiError(str(exc)) from None
        layers = [existing_layer(layer["digest"], layer["mediaType"], source.shortest) for layer in manifest.layers]
    elif body.get("files") is not None:
        files = body["files"]
        if not files or any(file.endswith(".safetensors") for file in files):
            raise ApiError("unknown type" if not files else "the stand-in does not convert safetensors", 400)
        for digest in files.values():
            yield {"status": "parsing GGUF"}
            path = blob_path(digest)
            try:
                with path.open("rb") as stream:
                    magic = stream.read(4)
            except OSError as exc:
                raise ApiError(go_error("open", path, exc)) from None
            if magic != b"GGUF":
                raise ApiError(NOT_GGUF, 400)
            layers.append(existing_layer(digest, f"{LAYER}model", str(path)))
    else:
        raise ApiError("neither 'from' or 'files' was specified", 400)
    families = []
    for layer, _ in layers:
        if layer["mediaType"] != f"{LAYER}model":
            continue
        try:
            header = read_gguf(blob_path(layer["digest"]))
        except GgufError as exc:
            raise ApiError(str(exc)) from None
        wanted = str(body.get("quantize") or body.get("quantization") or "").upper()
        if wanted and wanted != header.file_type:
            if header.file_type not in ("F16", "BF16", "F32"):
                raise ApiError("quantization is only supported for F16, BF16 and F32 models")
            raise ApiError("the stand-in does not quantize")
        config.setdefault("model_format", "gguf")
        config.setdefault("model_family", header.architecture)
        config.setdefault("model_type", human_number(header.parameters))
        config.setdefault("file_type", header.file_type)
        families.append(header.architecture)

    def replace(kind: str, content: str) -> None:
        layers[:] = [entry for entry in layers if entry[0]["mediaType"] != LAYER + kind]
        layers.append(new_layer(content.encode(), kind))

    if body.get("template"):
        replace("template", body["template"])
    if body.get("system"):
        replace("system", body["system"])
    licenses = body.get("license")
    for text in [licenses] if isinstance(licenses, str) else licenses or []:
        if text:
            layers.append(new_layer(text.encode(), "license"))
    parameters = dict(body.get("parameters") or {})
    for layer, _ in layers:
        if layer["mediaType"] == f"{LAYER}params":
            parameters = {**json.loads(blob_path(layer["digest"]).read_bytes()), **parameters}
    if parameters:
        replace("params", go_json(dict(sorted(parameters.items()))) + "\n")
    if body.get("messages"):
        replace("messages", go_json(body["messages"]) + "\n")
    told = {
        "model_format": config.get("model_format", ""),
        "model_family": config.get("model_family", ""),
        "model_families": families or None,
        "model_type": config.get("model_type", ""),
        "file_type": config.get("file_type", ""),
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer, _ in layers]},
    }
    config_layer, _ = new_layer((go_json(told) + "\n").encode(), CONFIG_TYPE)
    for _, status in layers:
        yield {"status": status}
    yield {"status": "writing manifest"}
    write_manifest(name, config_layer, [layer for layer, _ in layers])
    if old and not flag("OLLAMA_NOPRUNE"):
        remove_unused({layer["digest"] for layer in old.all_layers})
    yield {"status": "success"}


# ---------------------------------------------------------------------------------------------------------------------
# Cards and memory
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Card:
    index: int
    uuid: str
    name: str
    bus_id: str
    total: int
    free: int
    driver: str
    compute: str
    library: str = ""


def installation() -> Path:
    """Folder that holds bin/ and lib/."""
    return Path(__file__).resolve().parent.parent


def libraries() -> list[str]:
    return sorted({path.parent.name for path in (installation() / "lib" / "ollama").glob("*/*ggml-*")})


def cards_of_driver() -> list[Card]:
    """What nvidia-smi names, within CUDA_VISIBLE_DEVICES; none without a driver."""
    program = shutil.which("nvidia-smi") or "/usr/bin/nvidia-smi"
    fields = "index,uuid,name,pci.bus_id,memory.total,memory.free,driver_version,compute_cap"
    try:
        done = subprocess.run(
            [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    cards = []
    for line in done.stdout.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 8 or not words[4].isdigit() or not words[5].isdigit():
            continue
        cards.append(Card(int(words[0]), words[1], words[2], words[3], int(words[4]) * MIB, int(words[5]) * MIB,
                          words[6], words[7]))  # fmt: skip
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return cards
    seen = []
    for word in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
        named = [card for card in cards if word.strip() in (str(card.index), card.uuid)
                 or (word.strip().startswith("GPU-") and card.uuid.startswith(word.strip()))]  # fmt: skip
        if not named:
            # CUDA stops at the first name that is none.
            break
        seen.append(named[0])
    return seen


def usable_cards() -> list[Card]:
    """The cards that a library of this installation can use under this driver."""
    wanted = variable("OLLAMA_LLM_LIBRARY")
    offered = [name for name in libraries() if not wanted or name == wanted]
    usable = []
    for card in cards_of_driver():
        driver = int(card.driver.partition(".")[0])
        compute = float(card.compute)
        if NEW_RUNNER and driver < 550:
            # As reported: without OLLAMA_DEBUG=2 nothing is said about it.
            log("TRACE", "cuda_compat.go:54", "NVIDIA driver too old", device=card.name, compute=card.compute,
                driver=driver, required_driver="550 or newer")  # fmt: skip
            continue
        able = []
        if "cuda_v12" in offered and compute < 12.1:
            able.append("cuda_v12")
        if "cuda_v13" in offered and compute >= 7.5 and driver >= 580:
            able.append("cuda_v13")
        if able:
            card.library = able[-1]
            usable.append(card)
    log("TRACE", "runner.go:174", "supported GPU library combinations before filtering",
        supported="map[" + " ".join(f"{card.library}:{card.uuid}" for card in usable) + "]")  # fmt: skip
    return usable


def log_cards(cards: list[Card]) -> None:
    for card in sorted(cards, key=lambda one: -one.free):
        log("INFO", "types.go:42", "inference compute", id=card.uuid, filter_id="", library="CUDA",
            compute=card.compute, name=f"CUDA{card.index}", description=card.name, libdirs=f"ollama,{card.library}",
            driver=cuda_of(card.driver), pci_id=card.bus_id.lower(), type="discrete", total=human_bytes2(card.total),
            available=human_bytes2(card.free))  # fmt: skip
    if not cards:
        total, free = host_memory()
        log("INFO", "types.go:60", "inference compute", id="cpu", library="cpu", compute="", name="cpu",
            description="cpu", libdirs="ollama", driver="", pci_id="", type="", total=human_bytes2(total),
            available=human_bytes2(free))  # fmt: skip


def cuda_of(driver: str) -> str:
    known = {535: "12.2", 550: "12.4", 570: "12.8", 580: "13.0"}
    return known[max((branch for branch in known if branch <= int(driver.partition(".")[0])), default=535)]


def host_memory() -> tuple[int, int]:
    told = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            told[key] = int(value.split()[0]) * 1024
    return told.get("MemTotal", 0), told.get("MemAvailable", 0)


@dataclass
class Placement:
    """Where a model is: cards, and bytes in all and on the cards as /api/ps tells them."""

    cards: list[Card]
    size: int
    size_vram: int
    layers: int
    layers_on_cards: int


def place(header: Gguf, context: int, cards: list[Card], options: dict[str, Any], told: dict[str, Any]) -> Placement:
    blocks = max(header.number("block_count"), 1)
    inputs = sum(tensor.size for tensor in header.tensors if tensor.name.startswith(("token_embd", "per_layer_token")))
    sizes = [
        sum(tensor.size for tensor in header.tensors if tensor.name.startswith(f"blk.{at}.")) for at in range(blocks)
    ]
    rest = sum(tensor.size for tensor in header.tensors) - inputs - sum(sizes)
    cache = cache_bytes(header, context) // blocks
    # The output layer is the last one, counted as a layer of its own.
    parts = [size + cache for size in sizes] + [rest]
    available = sorted(cards, key=lambda card: -card.free)
    most = len(parts) if options.get("num_gpu", -1) < 0 else min(int(options["num_gpu"]), len(parts))
    share = told.get("partial_offload")
    if told.get("skip_device") and share is None:
        share = 0.5
    if share is not None:
        most = min(most, int(len(parts) * float(share)))
    if told.get("cpu_fallback"):
        most = 0

    def room(card: Card) -> int:
        return card.free - CARD_MINIMUM - CARD_GRAPH - number("OLLAMA_GPU_OVERHEAD", 0)

    counts = range(1, len(available) + 1)
    if flag("OLLAMA_SCHED_SPREAD") and available:
        counts = range(len(available), len(available) + 1)
    chosen, taken = available, 0
    for count in counts:
        chosen, taken = available[:count], 0
        space = [room(card) for card in chosen]
        at = 0
        for size in parts[:most]:
            while at < count and space[at] < size:
                at += 1
            if at == count:
                break
            space[at] -= size
            taken += 1
        if taken == most:
            break
    if not available or taken == 0:
        size = inputs + sum(parts) + HOST_GRAPH
        return Placement([], size, 0, len(parts), 0)
    on_cards = sum(parts[:taken]) + CARD_GRAPH * len(chosen)
    size = inputs + HOST_GRAPH + sum(parts) + CARD_GRAPH * len(chosen)
    if taken == len(parts):
        # With every layer on the cards what always stays with the host is counted as on them.
        on_cards = size
    return Placement(chosen, size, on_cards, len(parts), taken)


def cache_bytes(header: Gguf, context: int) -> int:
    """Bytes of the KV cache of all layers."""
    heads = header.number("attention.head_count", 1) or 1
    head = header.number("embedding_length") // heads
    width = header.number("attention.key_length", head) + header.number("attention.value_length", head)
    kind = variable("OLLAMA_KV_CACHE_TYPE").lower()
    if kind and not flag("OLLAMA_FLASH_ATTENTION", NEW_RUNNER or header.architecture != "llama"):
        log("WARN", "server.go:270", "quantized kv cache requested but flash attention disabled", type=kind)
        kind = ""
    bits = {"q8_0": 8.5, "q4_0": 4.5}.get(kind, 16)
    values = context * width * header.number("attention.head_count_kv", heads) * header.number("block_count", 1)
    return int(values * bits / 8)


# ---------------------------------------------------------------------------------------------------------------------
# Loaded models
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Runner:
    model: Model
    options: dict[str, Any]
    context: int
    placement: Placement
    process: subprocess.Popen[bytes]
    span: int
    users: int = 0
    expires: datetime | None = None
    timer: threading.Timer | None = None


def as_program(arguments: list[str]) -> None:
    """Let /proc show this process as the program that it stands for, not as the interpreter that runs it.

    The arguments are overwritten where the kernel reads them from; what is left over is filled with zeros.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(Path(arguments[0]).name[:15], encoding="ascii")
    told = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    start, end = int(told[45]), int(told[46])
    content = b"\0".join(os.fsencode(word) for word in arguments) + b"\0"
    if len(content) > end - start:
        raise OSError("the command line has no room for the program's name")
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(content.ljust(end - start, b"\0"))


class Scheduler:
    """Loads models, one at a time, and unloads them when their time is over."""

    def __init__(self) -> None:
        self.cards: list[Card] = []
        self.default_context = 4096
        #: Set when the server ends, so that a load does not keep it.
        self.ended = threading.Event()
        self._loaded: dict[str, Runner] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def start(self) -> None:
        log("INFO", "runner.go:67", "discovering available GPUs...")
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"):
            if variable(name):
                log("WARN", "runner.go:536", "user overrode visible devices", **{name: variable(name)})
        self.cards = usable_cards()
        log_cards(self.cards)
        total = sum(card.total - number("OLLAMA_GPU_OVERHEAD", 0) for card in self.cards)
        self.default_context = 262144 if total >= 47 * GIB else 32768 if total >= 23 * GIB else 4096
        log("INFO", "routes.go:1914", "vram-based default context", total_vram=human_bytes2(total),
            default_num_ctx=self.default_context)  # fmt: skip

    @contextlib.contextmanager
    def use(self, model: Model, options: dict[str, Any], span: int | None) -> Iterator[Runner]:
        """A loaded model, kept while it is used."""
        runner = self._acquire(model, options, span)
        try:
            yield runner
        finally:
            self._release(runner)

    def _context(self, model: Model, options: dict[str, Any], header: Gguf) -> int:
        told = switches().get("ignores_context")
        if told:
            return 4096 if told is True else int(told)
        asked = options.get("num_ctx") or model.options.get("num_ctx") or number("OLLAMA_CONTEXT_LENGTH", 0)
        context = max(int(asked or self.default_context), 4)
        trained = header.number("context_length")
        if trained and context > trained:
            log("WARN", "server.go:169", "requested context size too large for model", num_ctx=context,
                n_ctx_train=trained)  # fmt: skip
            context = trained
        return context

    def _acquire(self, model: Model, options: dict[str, Any], span: int | None) -> Runner:
        key = str(model.weights)
        try:
            header = read_gguf(cast(Path, model.weights))
        except GgufError as exc:
            log("INFO", "sched.go:433", "failed to load model metadata", model=key, error=exc)
            raise ApiError(str(exc)) from None
        except OSError as exc:
            raise ApiError(go_error("stat", cast(Path, model.weights), exc)) from None
        context = self._context(model, options, header)
        wanted: dict[str, Any] = {
            name: options[name] for name in ("num_gpu", "main_gpu", "num_batch") if name in options
        }
        with self._changed:
            while True:
                runner = self._loaded.get(key)
                if runner and runner.process.poll() is not None:
                    del self._loaded[key]
                    continue
                if runner and (runner.context != context or runner.options != wanted):
                    if runner.users:
                        self._changed.wait(0.1)
                        continue
                    self._unload(key)
                    continue
                if runner:
                    break
                limit = number("OLLAMA_MAX_LOADED_MODELS", 0) or 3 * max(len(self.cards), 1)
                if len(self._loaded) < limit:
                    runner = self._load(model, header, context, wanted)
                    self._loaded[key] = runner
                    log("INFO", "sched.go:537", "loaded runners", count=len(self._loaded))
                    break
                idle = [name for name, one in self._loaded.items() if not one.users]
                if idle:
                    self._unload(min(idle, key=lambda name: self._loaded[name].expires or now()))
                else:
                    self._changed.wait(0.1)
            runner.users += 1
            if runner.timer:
                runner.timer.cancel()
                runner.timer = None
            if switches().get("ignores_keep_alive"):
                runner.span = 300 * 10**9
            elif span is not None:
                runner.span = span
            return runner

    def _release(self, runner: Runner) -> None:
        with self._changed:
            runner.users -= 1
            key = str(runner.model.weights)
            if runner.users == 0 and self._loaded.get(key) is runner:
                if runner.span <= 0:
                    self._unload(key)
                else:
                    runner.expires = now() + timedelta(microseconds=runner.span // 1000)
                    runner.timer = threading.Timer(
                        min(runner.span / 1e9, threading.TIMEOUT_MAX), self._expire, [runner]
                    )
                    runner.timer.daemon = True
                    runner.timer.start()
            self._changed.notify_all()

    def _expire(self, runner: Runner) -> None:
        with self._changed:
            key = str(runner.model.weights)
            if self._loaded.get(key) is runner and not runner.users and runner.timer is not None:
                self._unload(key)

    def expire(self, model: Model) -> None:
        """Unload as soon as nobody uses it."""
        with self._changed:
            key = str(model.weights)
            runner = self._loaded.get(key)
            if runner:
                runner.span = 0
                if not runner.users:
                    self._unload(key)

    def _unload(self, key: str) -> None:
        runner = self._loaded.pop(key)
        if runner.timer:
            runner.timer.cancel()
            runner.timer = None
        end_process(runner.process)
        self._changed.notify_all()

    def unload_all(self) -> None:
        with self._changed:
            for key in list(self._loaded):
                self._unload(key)

    def running(self) -> list[dict[str, Any]]:
        # Without the lock: a load holds it, and the question is answered meanwhile.
        rows = []
        for runner in list(self._loaded.values()):
            moment = runner.expires or now() + timedelta(microseconds=runner.span // 1000)
            rows.append((moment, runner))
        rows.sort(key=lambda row: row[0], reverse=True)
        return [
            {
                "name": runner.model.name.shortest,
                "model": runner.model.name.shortest,
                "size": runner.placement.size,
                "digest": runner.model.manifest.digest,
                "details": runner.model.details,
                "expires_at": go_time(moment),
                "size_vram": runner.placement.size_vram,
                "context_length": runner.context,
            }
            for moment, runner in rows
        ]

    def _load(self, model: Model, header: Gguf, context: int, options: dict[str, Any]) -> Runner:
        told = switches()
        began = time.monotonic()
        parallel = max(number("OLLAMA_NUM_PARALLEL", 1), 1)
        fresh = {card.uuid: card.free for card in cards_of_driver()}
        for card in self.cards:
            card.free = fresh.get(card.uuid, card.free)
        total, free = host_memory()
        log("INFO", "sched.go:470", "system memory", total=human_bytes2(total), free=human_bytes2(free))
        overhead = human_bytes2(number("OLLAMA_GPU_OVERHEAD", 0))
        for card in self.cards:
            log("INFO", "sched.go:477", "gpu memory", id=card.uuid, library="CUDA",
                available=human_bytes2(max(card.free - CARD_MINIMUM, 0)), free=human_bytes2(card.free),
                minimum=human_bytes2(CARD_MINIMUM), overhead=overhead)  # fmt: skip
        if told.get("skip_device"):
            for card in self.cards[:1] or [Card(0, "", "Tesla V100-SXM2-32GB", "", 0, 0, "", "7.0")]:
                log("INFO", "llama_server.go:299", "skipping CUDA device — compute capability not in compiled "
                    "architectures", device=card.name, cc=int(float(card.compute) * 100),
                    archs="[750 890 1000 1200]", libDirs="[ollama cuda_v13]")  # fmt: skip
        placed = place(header, context * parallel, self.cards, options, told)
        log("INFO", "server.go:792", "loading model", **{"model layers": placed.layers,
            "requested": options.get("num_gpu", -1)})  # fmt: skip
        process = start_runner(model, placed, context * parallel, abort=bool(told.get("abort_in_warmup")))
        name = "llama-server" if NEW_RUNNER else "llama runner"
        log("INFO", "server.go:1385", f"waiting for {name} to start responding")
        allowed = load_timeout() / 1e9
        takes = float(told.get("load_seconds") or 0)
        if told.get("load_timeout") or takes > allowed:
            self.ended.wait(0 if told.get("load_timeout") else allowed)
            end_process(process)
            progress = "" if NEW_RUNNER else f"progress {1 if told.get('load_timeout') else 0:.2f} - "
            raise self._failed(f"timed out waiting for {name} to start - {progress}")
        if self.ended.wait(takes):
            end_process(process)
            raise self._failed(f"timed out waiting for {name} to start: context canceled")
        if told.get("abort_in_warmup"):
            process.wait(timeout=30)
        if process.poll() is not None:
            ended = "signal: aborted (core dumped)" if process.returncode == -signal.SIGABRT else (
                f"exit status {process.returncode}")  # fmt: skip
            if process.stdin:
                process.stdin.close()
            raise self._failed(f"{name} process has terminated: {ended}")
        spent = time.monotonic() - began
        log("INFO", "server.go:1432", f"{name} started in {spent:.2f} seconds")
        return Runner(model, options, context, placed, process, keep_alive_default())

    def _failed(self, message: str) -> ApiError:
        log("ERROR", "sched.go:543", "error loading llama server", error=message)
        return ApiError(message)


def start_runner(model: Model, placed: Placement, context: int, *, abort: bool) -> subprocess.Popen[bytes]:
    """The process that holds a loaded model. It ends with this one, however this one ends."""
    program = installation() / "lib/ollama/llama-server" if NEW_RUNNER else Path(__file__).resolve()
    words = [] if NEW_RUNNER else ["runner", "--ollama-engine"]
    words += ["--model", str(model.weights), "--port", str(random.randint(32768, 60999))]
    words += ["--ctx-size", str(context)] if NEW_RUNNER else []
    # One that sees no card must be told so; unset would mean all of them.
    visible = ",".join(card.uuid for card in placed.cards)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    log("INFO", "server.go:433", "starting runner", cmd=" ".join([str(program), *words]))
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "@abort" if abort else "@hold", str(program), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    # Until then it does not look like what it stands for.
    assert process.stdout is not None, "it was asked for"
    process.stdout.readline()
    process.stdout.close()
    return process


def end_process(process: subprocess.Popen[bytes]) -> None:
    if process.stdin:
        process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def hold(words: list[str], abort: bool) -> NoReturn:
    """What a runner does: nothing, until its server is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    as_program(words)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if abort:
        for frame in ("libggml-base.so(ggml_abort+0x11c)", "libllama.so(llama_decode+0x10)",
                      "libllama-common.so(common_init_from_params+0x5d2)"):  # fmt: skip
            print(f"{words[0]}: {frame}", file=sys.stderr)
        sys.stderr.flush()
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        # No core file of it is wanted.
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    while sys.stdin.buffer.read(1 << 16):
        pass
    sys.exit(0)


# ---------------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------------

SENTENCE = "the river runs past the old stone bridge while rain falls on the wide green field and birds rest in a tree"
WORDS = SENTENCE.split()
MESSAGE_OVERHEAD = 4


def tokens_of(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def message_tokens(message: dict[str, Any]) -> int:
    return tokens_of(str(message.get("content") or "")) + MESSAGE_OVERHEAD


def prompt_tokens(messages: list[dict[str, Any]], context: int) -> int:
    """Tokens that the model sees: older messages go first, and what is still too long is cut, without an error."""
    kept = 0
    for first in range(len(messages)):
        system = [one for one in messages[:first] if one.get("role") == "system"]
        kept = sum(map(message_tokens, [*system, *messages[first:]]))
        if kept <= context:
            return kept
    limit = context - 1 if NEW_RUNNER else context
    log("WARN", "runner.go:187", "truncating input prompt", limit=context, prompt=kept, keep=4, new=limit)
    return limit


@dataclass
class Answer:
    words: list[str]
    prompt: int
    reason: str
    prompt_ns: int
    eval_ns: int

    def metrics(self, began: float, loaded: float) -> dict[str, int]:
        spent = int((time.monotonic() - began) * 1e9) + self.prompt_ns + self.eval_ns
        told = {"total_duration": spent, "load_duration": max(int((loaded - began) * 1e9), 1),
                "prompt_eval_count": self.prompt, "prompt_eval_duration": self.prompt_ns,
                "eval_count": len(self.words), "eval_duration": self.eval_ns}  # fmt: skip
        return {key: value for key, value in told.items() if value}


def answer(runner: Runner, messages: list[dict[str, Any]], options: dict[str, Any]) -> Answer:
    seen = prompt_tokens(messages, runner.context)
    most = options.get("num_predict", runner.model.options.get("num_predict", -1))
    count = int(most) if int(most) >= 0 else len(WORDS)
    # A real model ends by itself.
    spoken = min(count, len(WORDS)) if not switches().get("silent") else 0
    speed = TOKENS_PER_S["gpu" if runner.placement.size_vram else "cpu"]
    words = [("" if at == 0 else " ") + WORDS[at] for at in range(spoken)]
    ended = "length" if 0 <= int(most) <= len(WORDS) and spoken == count else "stop"
    return Answer(words, seen, ended, int(seen * 1e9 / (speed * 20)), int(spoken * 1e9 / speed))


# ---------------------------------------------------------------------------------------------------------------------
# HTTP
# ---------------------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.scheduler = Scheduler()
        super().__init__((host, port), Handler)

    def handle_error(self, *_: object) -> None:
        """A client that went away is nothing to report; anything else is a fault of the stand-in."""
        kind = sys.exc_info()[1]
        if not isinstance(kind, ConnectionError | TimeoutError):
            log("ERROR", "standin.py:1", f"stand-in: {type(kind).__name__}: {kind}")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def version_string(self) -> str:
        return "ollama"

    def log_message(self, *_: object) -> None:
        """Requests are logged as gin logs them, when they are answered."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_DELETE = do_PUT = do_GET

    def _answer(self) -> None:
        began = time.monotonic()
        self._status = 200
        while switches().get("not_ready"):
            time.sleep(0.05)
        path = urllib.parse.urlsplit(self.path).path
        try:
            self._route(path)
        except ApiError as exc:
            self._error(exc.status, str(exc))
        except DurationError as exc:
            self._error(400, str(exc))
        with _writing:
            stamp = datetime.now().strftime("%Y/%m/%d - %H:%M:%S")
            spent = f"{(time.monotonic() - began) * 1000:.3f}ms"
            print(f"[GIN] {stamp} | {self._status} | {spent:>12} | {self.client_address[0]:>15} | "
                  f'{self.command:<7}  "{path}"', flush=True)  # fmt: skip

    def _route(self, path: str) -> None:
        read = "GET" if self.command == "HEAD" else self.command
        blob = re.fullmatch(r"/api/blobs/([^/]+)", path)
        if blob:
            if self.command == "HEAD":
                return self._head_blob(blob[1])
            if self.command == "POST":
                return self._post_blob(blob[1])
        named = re.fullmatch(r"/v1/models/(.+)", path)
        if named and read == "GET":
            return self._one_openai_model(urllib.parse.unquote(named[1]))
        known: dict[str, tuple[str, Callable[[], None]]] = {
            "/": ("GET", lambda: self._text(200, "Ollama is running")),
            "/api/version": ("GET", lambda: self._json(200, {"version": VERSION})),
            "/api/status": ("GET", lambda: self._json(200, {"cloud": {"disabled": flag("OLLAMA_NO_CLOUD"),
                                                                      "source": "none"}})),
            "/api/tags": ("GET", lambda: self._json(200, {"models": self._models()})),
            "/api/ps": ("GET", lambda: self._json(200, {"models": self.server.scheduler.running()})),
            "/api/show": ("POST", self._show),
            "/api/pull": ("POST", self._pull),
            "/api/create": ("POST", self._create),
            "/api/copy": ("POST", self._copy),
            "/api/delete": ("DELETE", self._delete),
            "/api/generate": ("POST", self._generate),
            "/api/chat": ("POST", self._chat),
            "/api/embed": ("POST", self._embed),
            "/v1/models": ("GET", self._openai_models),
            "/v1/chat/completions": ("POST", self._openai_chat),
        }  # fmt: skip
        if path not in known:
            self.close_connection = True
            return self._text(404, "404 page not found")
        method, act = known[path]
        if read != method:
            self.close_connection = True
            return self._text(405, "405 method not allowed")
        act()

    # Bodies and answers

    def _body(self) -> dict[str, Any]:
        raw = b"".join(self._content())
        if not raw.strip():
            raise ApiError("missing request body", 400)
        try:
            body = json.loads(raw)
        except ValueError:
            raise ApiError("invalid character in JSON", 400) from None
        if not isinstance(body, dict):
            raise ApiError("json: cannot unmarshal into Go value", 400)
        return body

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self._status = status
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _text(self, status: int, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8" if status == 200 else "text/plain", text.encode())

    def _json(self, status: int, value: Any) -> None:
        self._send(status, "application/json; charset=utf-8", go_json(value).encode())

    def _error(self, status: int, message: str) -> None:
        if self.path.startswith("/v1/"):
            kind = {400: "invalid_request_error", 404: "not_found_error"}.get(status, "api_error")
            error = {"message": message, "type": kind, "param": None, "code": None}
            return self._json(status, {"error": error})
        self._json(status, {"error": message})

    def _lines(self, lines: Iterator[dict[str, Any]]) -> None:
        """A stream of JSON lines. An error before the first line has a status of its own; later it is a line."""
        self._stream(lines, lambda line: go_json(line).encode() + b"\n", "application/x-ndjson")

    def _stream(self, lines: Iterator[dict[str, Any]], write: Callable[[dict[str, Any]], bytes], kind: str) -> None:
        begun = False

        def send(content: bytes) -> None:
            nonlocal begun
            if not begun:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                begun = True
            self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

        try:
            for line in lines:
                send(write(line))
        except ApiError as exc:
            if not begun:
                raise
            send(go_json({"error": str(exc)}).encode() + b"\n")
        finally:
            if isinstance(lines, Generator):
                lines.close()
        self.wfile.write(b"0\r\n\r\n")

    def _progress(self, body: dict[str, Any], lines: Iterator[dict[str, Any]]) -> None:
        if body.get("stream", True) is not False:
            return self._lines(lines)
        last: dict[str, Any] = {}
        for line in lines:
            last = line
        self._json(200, last)

    # The store

    def _models(self) -> list[dict[str, Any]]:
        rows = []
        for name, manifest in manifests().items():
            config = {}
            if manifest.config.get("digest"):
                try:
                    config = json.loads(blob_path(manifest.config["digest"]).read_bytes())
                except (OSError, ValueError) as exc:
                    log("WARN", "routes.go:1421", "bad manifest filepath", name=name.shortest, error=exc)
                    continue
            rows.append((manifest.modified, name, manifest, config))
        rows.sort(key=lambda row: row[0], reverse=True)
        return [
            {
                "name": name.shortest,
                "model": name.shortest,
                "modified_at": go_time(modified),
                "size": manifest.size,
                "digest": manifest.digest,
                "details": details_of(config),
            }
            for modified, name, manifest, config in rows
        ]

    def _show(self) -> None:
        body = self._body()
        asked = body.get("model") or body.get("name")
        name = valid_name(asked)
        try:
            model = read_model(name)
            header = read_gguf(cast(Path, model.weights))
        except (NotFound, FileNotFoundError, AttributeError):
            raise ApiError(f"model '{asked}' not found", 404) from None
        except GgufError as exc:
            raise ApiError(str(exc)) from None
        verbose = bool(body.get("verbose"))
        info = {key: value for key, value in header.values.items()
                if key not in ("general.name", "tokenizer.chat_template")}  # fmt: skip
        info["general.parameter_count"] = header.parameters
        if not verbose:
            info = {key: [] if isinstance(value, list) and len(value) > 5 else value for key, value in info.items()}
        parameters = "\n".join(
            f"{key:<30} {json.dumps(item)}"
            for key, value in sorted(model.options.items())
            for item in (value if isinstance(value, list) else [value])
        )
        modelfile = (
            '# Modelfile generated by "ollama show"\n# To build a new Modelfile based on this, replace FROM with:\n'
            f"# FROM {name.shortest}\n\nFROM {model.weights}\nTEMPLATE {json.dumps(model.template)}\n"
        )
        told = {
            "license": "\n".join(model.licenses),
            "modelfile": modelfile,
            "parameters": parameters,
            "template": model.template,
            "system": body.get("system") or model.system,
            "details": model.details,
            "messages": model.messages,
            "model_info": dict(sorted(info.items())),
            "tensors": [
                {"name": tensor.name, "type": _TYPE_NAMES.get(tensor.kind, "unknown"), "shape": list(tensor.shape)}
                for tensor in header.tensors
            ],
            "capabilities": model.capabilities,
            "modified_at": go_time(model.manifest.modified),
        }
        self._json(200, {key: value for key, value in told.items() if value or key in ("model_info", "details")})

    def _pull(self) -> None:
        body = self._body()
        asked = str(body.get("model") or body.get("name") or "")
        name = parse_name(asked)
        if not asked or not name.valid:
            raise ApiError("invalid model name", 400)
        self._progress(body, pull(existing_name(name), bool(body.get("insecure"))))

    def _create(self) -> None:
        body = self._body()
        name = parse_name(str(body.get("model") or body.get("name") or ""))
        if not name.valid:
            raise ApiError("invalid model name", 400)
        for file, digest in (body.get("files") or {}).items():
            if file.startswith("/") or ".." in file.split("/"):
                raise ApiError("file path must be relative", 400)
            if not digest:
                raise ApiError("invalid digest format", 400)
        self._progress(body, create(body, existing_name(name)))

    def _copy(self) -> None:
        body = self._body()
        names = []
        for key in ("source", "destination"):
            name = parse_name(str(body.get(key) or ""))
            if not name.valid:
                raise ApiError(f'{key} "{body.get(key, "")}" is invalid', 400)
            names.append(existing_name(name))
        source, target = (manifests_folder() / name.path for name in names)
        if not source.is_file():
            raise ApiError(f'model "{body["source"]}" not found', 404)
        if source != target:
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        self._send(200, "text/plain", b"")

    def _delete(self) -> None:
        body = self._body()
        asked = body.get("model") or body.get("name") or ""
        name = parse_name(str(asked))
        if not name.valid:
            raise ApiError(f'name "{asked}" is invalid', 400)
        try:
            manifest = read_manifest(existing_name(name))
        except NotFound:
            raise ApiError(f"model '{asked}' not found", 404) from None
        except ManifestError as exc:
            raise ApiError(str(exc)) from None
        manifest.path.unlink()
        prune_folders(manifests_folder())
        used = {layer["digest"] for other in manifests().values() for layer in other.all_layers}
        for layer in manifest.all_layers:
            if layer["digest"] not in used:
                blob_path(layer["digest"]).unlink(missing_ok=True)
        self._send(200, "text/plain", b"")

    def _head_blob(self, digest: str) -> None:
        if not blob_path(digest).exists():
            raise ApiError(f'blob "{digest}" not found', 404)
        self._send(200, "text/plain", b"")

    def _post_blob(self, digest: str) -> None:
        path = blob_path(digest)
        if path.exists():
            # Its bytes are not looked at, and what the client sends is not read.
            self.close_connection = True
            return self._send(200, "text/plain", b"")
        found = hashlib.sha256()

        def parts() -> Iterator[bytes]:
            for block in self._content():
                found.update(block)
                yield block

        handle, name = tempfile.mkstemp(dir=blobs_folder(), prefix="sha256-")
        os.close(handle)
        arrived = Path(name)
        try:
            store_bytes(parts(), arrived)
            real = f"sha256:{found.hexdigest()}"
            # Under its own name, also when that is not the one that was said.
            arrived.rename(blob_path(real))
        finally:
            arrived.unlink(missing_ok=True)
        if real != digest:
            raise ApiError(f'digest mismatch, expected "{digest}", got "{real}"', 400)
        self._send(201, "text/plain", b"")

    def _content(self) -> Iterator[bytes]:
        """The body of a request, with a length or in chunks."""
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left and (block := self.rfile.read(min(left, 1 << 20))):
            left -= len(block)
            yield block

    # Inference

    def _model(self, asked: Any) -> Model:
        name = valid_name(asked)
        try:
            return read_model(name)
        except NotFound:
            raise ApiError(f"model '{asked}' not found", 404) from None

    def _generate(self) -> None:
        body = self._body()
        span = keep_alive_of(body.get("keep_alive"))
        model = self._model(body.get("model"))
        prompt = str(body.get("prompt") or "")
        empty = {"model": body["model"], "created_at": go_time(now()), "response": "", "done": True}
        if not prompt and span == 0:
            self.server.scheduler.expire(model)
            return self._json(200, {**empty, "done_reason": "unload"})
        if "completion" not in model.capabilities:
            raise ApiError(f'"{body["model"]}" does not support generate', 400)
        messages = [{"role": "user", "content": prompt}]
        system = body.get("system") or model.system
        if system:
            messages.insert(0, {"role": "system", "content": system})

        def line(word: str) -> dict[str, Any]:
            return {"response": word}

        self._infer(body, model, span, messages if prompt else [], line, {**empty, "done_reason": "load"})

    def _chat(self) -> None:
        body = self._body()
        span = keep_alive_of(body.get("keep_alive"))
        model = self._model(body.get("model"))
        messages = body.get("messages") or []
        empty = {"model": body["model"], "created_at": go_time(now()), "message": {"role": "assistant", "content": ""},
                 "done": True}  # fmt: skip
        if not messages and span == 0:
            self.server.scheduler.expire(model)
            return self._json(200, {**empty, "done_reason": "unload"})
        if "completion" not in model.capabilities:
            raise ApiError(f'"{body["model"]}" does not support chat', 400)
        if messages and model.system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": model.system}, *messages]

        def line(word: str) -> dict[str, Any]:
            return {"message": {"role": "assistant", "content": word}}

        self._infer(body, model, span, messages, line, {**empty, "done_reason": "load"})

    def _embed(self) -> None:
        """Without input it only loads the model. One that makes text is loaded all the same."""
        body = self._body()
        span = keep_alive_of(body.get("keep_alive"))
        model = self._model(body.get("model"))
        given = body.get("input")
        texts = [str(text) for text in (given if isinstance(given, list) else [given]) if text]
        with self.server.scheduler.use(model, body.get("options") or {}, span):
            if texts and "embedding" not in model.capabilities:
                raise ApiError("this model does not support embeddings", 501)
            size = read_gguf(cast(Path, model.weights)).number("embedding_length")
            vectors = [[round(1 / (size or 1) ** 0.5, 6)] * size for _ in texts]
            self._json(200, {"model": body["model"], "embeddings": vectors,
                             "prompt_eval_count": sum(len(text.split()) for text in texts)})  # fmt: skip

    def _infer(
        self,
        body: dict[str, Any],
        model: Model,
        span: int | None,
        messages: list[dict[str, Any]],
        line: Callable[[str], dict[str, Any]],
        loaded_only: dict[str, Any],
    ) -> None:
        began = time.monotonic()
        options = body.get("options") or {}
        with self.server.scheduler.use(model, options, span) as runner:
            loaded = time.monotonic()
            if not messages:
                return self._json(200, loaded_only)
            told = answer(runner, messages, options)

            def record(word: str, done: bool) -> dict[str, Any]:
                stamp = {"model": body["model"], "created_at": go_time(now())}
                if not done:
                    return {**stamp, **line(word), "done": False}
                last = {**stamp, **line(word), "done": True, "done_reason": told.reason}
                return {**last, **told.metrics(began, loaded)}

            if body.get("stream", True) is False:
                return self._json(200, record("".join(told.words), True))

            def lines() -> Iterator[dict[str, Any]]:
                for word in told.words:
                    yield record(word, False)
                yield record("", True)

            self._lines(lines())

    # The part that is OpenAI's

    def _openai_models(self) -> None:
        rows = [self._openai_row(row) for row in self._models()]
        self._json(200, {"object": "list", "data": rows or None})

    def _openai_row(self, row: dict[str, Any]) -> dict[str, Any]:
        created = int(datetime.fromisoformat(row["modified_at"].replace("Z", "+00:00")).timestamp())
        return {"id": row["name"], "object": "model", "created": created, "owned_by": parse_name(row["name"]).namespace}

    def _one_openai_model(self, asked: str) -> None:
        name = valid_name(asked)
        rows = [row for row in self._models() if parse_name(row["name"]).path == name.path]
        if not rows:
            raise ApiError(f"model '{asked}' not found", 404)
        self._json(200, {**self._openai_row(rows[0]), "id": asked})

    def _openai_chat(self) -> None:
        body = self._body()
        if not body.get("messages"):
            raise ApiError("[] is too short - 'messages'", 400)
        model = self._model(body.get("model"))
        if "completion" not in model.capabilities:
            raise ApiError(f'"{body["model"]}" does not support chat', 400)
        messages = [{"role": one.get("role"), "content": plain(one.get("content"))} for one in body["messages"]]
        if model.system and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": model.system})
        # num_ctx cannot be asked for here: the server's or the model's own context holds.
        options = {"num_predict": body["max_tokens"]} if body.get("max_tokens") is not None else {}
        with self.server.scheduler.use(model, options, None) as runner:
            told = answer(runner, messages, options)
            stamp = {"id": f"chatcmpl-{random.randint(0, 998)}", "object": "chat.completion",
                     "created": int(time.time()), "model": body["model"],
                     "system_fingerprint": "fp_ollama"}  # fmt: skip
            usage = {"prompt_tokens": told.prompt, "completion_tokens": len(told.words),
                     "total_tokens": told.prompt + len(told.words)}  # fmt: skip
            if not body.get("stream"):
                message = {"role": "assistant", "content": "".join(told.words)}
                choice = {"index": 0, "message": message, "finish_reason": told.reason}
                return self._json(200, {**stamp, "choices": [choice], "usage": usage})
            self._stream(self._chunks(stamp, told, usage, body), lambda line: line["text"], "text/event-stream")

    def _chunks(
        self, stamp: dict[str, Any], told: Answer, usage: dict[str, int], body: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        stamp = {**stamp, "object": "chat.completion.chunk"}

        def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
            return {"text": f"data: {go_json({**stamp, 'choices': choices, **more})}\n\n".encode()}

        for word in told.words:
            delta = {"role": "assistant", "content": word}
            yield chunk([{"index": 0, "delta": delta, "finish_reason": None}])
        last = {"role": "assistant", "content": ""}
        yield chunk([{"index": 0, "delta": last, "finish_reason": told.reason}])
        if (body.get("stream_options") or {}).get("include_usage"):
            yield chunk([], usage=usage)
        yield {"text": b"data: [DONE]\n\n"}


def plain(content: Any) -> str:
    """The text of a message that may be a list of parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def fail(message: str) -> NoReturn:
    print(f"Error: {message}", file=sys.stderr)
    sys.exit(1)


def serve() -> None:
    if switches().get("crash_at_start"):
        print("panic: runtime error: invalid memory address or nil pointer dereference", file=sys.stderr)
        sys.exit(2)
    home = os.environ.get("HOME")
    if not home:
        fail("$HOME is not defined")
    key = Path(home, ".ollama", "id_ed25519")
    try:
        if not key.exists():
            print(f"Couldn't find '{key}'. Generating new private key.", flush=True)
            key.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            key.write_text("The stand-in has no key.\n", encoding="ascii")
            key.chmod(0o600)
    except OSError as exc:
        fail(f"could not create directory {go_error('mkdir', key.parent, exc)}")
    host, port = host_and_port()
    shown = f"[{host}]" if ":" in host else host
    try:
        server = Server(host, port)
    except OSError as exc:
        fail(f"listen tcp {shown}:{port}: bind: {(exc.strerror or str(exc)).lower()}")
    port = int(server.server_address[1])
    log("INFO", "routes.go:1802", "server config",
        env="map[" + " ".join(f"{key}:{value}" for key, value in sorted(configuration().items())) + "]")  # fmt: skip
    log("INFO", "routes.go:1804", f"Ollama cloud disabled: {str(flag('OLLAMA_NO_CLOUD')).lower()}")
    try:
        blobs_folder()
        if not flag("OLLAMA_NOPRUNE"):
            prune()
    except OSError as exc:
        fail(f"mkdir {exc.filename}: {(exc.strerror or '').lower()}: ensure path elements are traversable")
    log("INFO", "routes.go:1864", f"Listening on {shown}:{port} (version {VERSION})")
    server.scheduler.start()

    def end(*_: object) -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    server.serve_forever(poll_interval=0.05)
    server.server_close()
    server.scheduler.ended.set()
    with _downloads_lock:
        waiting = list(_downloads.values())
    for download in waiting:
        download.stop.set()
    for download in waiting:
        download.done.wait(5)
    server.scheduler.unload_all()


def call(method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """The answer's lines. Ends the program when there is no server or the answer is an error."""
    host, port = host_and_port()
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data=data, method=method), timeout=600) as answer:
            for raw in answer:
                if raw.strip():
                    line = json.loads(raw)
                    if "error" in line:
                        fail(line["error"])
                    yield line
    except urllib.error.HTTPError as exc:
        text = exc.read().decode("utf-8", "replace")
        try:
            text = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            text = text or f"{exc.code}"
        raise ApiError(text, exc.code) from None
    except (urllib.error.URLError, ConnectionError):
        raise ConnectionError from None


def table(headings: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[at]) for row in [headings, *rows]) for at in range(len(headings))]
    for row in [headings, *rows]:
        print("    ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)))


def share_of(row: dict[str, Any]) -> str:
    size, vram = row["size"], row["size_vram"]
    if vram == 0:
        return "100% CPU"
    if vram == size:
        return "100% GPU"
    if vram > size or not size:
        return "Unknown"
    host = round((size - vram) / size * 100)
    return f"{host}%/{100 - host}% CPU/GPU"


def moment_of(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def show_version() -> None:
    try:
        running = next(call("GET", "/api/version"))["version"]
        print(f"ollama version is {running}")
    except (ConnectionError, ApiError):
        running = ""
        print("Warning: could not connect to a running Ollama instance")
    if running != VERSION:
        print(f"Warning: client version is {VERSION}")


def command_list(words: list[str]) -> None:
    rows = next(call("GET", "/api/tags"))["models"]
    table(["NAME", "ID", "SIZE", "MODIFIED"], [
        [row["name"], row["digest"][:12], human_bytes(row["size"]), human_time(moment_of(row["modified_at"]))]
        for row in rows if not words or row["name"].lower().startswith(words[0].lower())
    ])  # fmt: skip


def command_ps(words: list[str]) -> None:
    rows = next(call("GET", "/api/ps"))["models"]
    table(["NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"], [
        [row["name"], row["digest"][:12], human_bytes(row["size"]), share_of(row), str(row["context_length"]),
         "Stopping..." if moment_of(row["expires_at"]) < now() else human_time(moment_of(row["expires_at"]))]
        for row in rows if not words or row["name"].startswith(words[0])
    ])  # fmt: skip


def command_pull(words: list[str]) -> None:
    names = [word for word in words if not word.startswith("-")]
    if not names:
        fail("accepts 1 arg(s), received 0")
    seen = ""
    for line in call("POST", "/api/pull", {"model": names[0], "insecure": "--insecure" in words}):
        if line["status"] != seen:
            seen = line["status"]
            print(seen, file=sys.stderr, flush=True)


def command_rm(words: list[str]) -> None:
    for word in words:
        with contextlib.suppress(ApiError):
            list(call("POST", "/api/generate", {"model": word, "keep_alive": 0}))
        list(call("DELETE", "/api/delete", {"model": word}))
        print(f"deleted '{word}'")


def command_cp(words: list[str]) -> None:
    list(call("POST", "/api/copy", {"source": words[0], "destination": words[1]}))
    print(f"copied '{words[0]}' to '{words[1]}'")


def command_stop(words: list[str]) -> None:
    try:
        list(call("POST", "/api/generate", {"model": words[0], "keep_alive": 0}))
    except ApiError as exc:
        if "not found" in str(exc):
            fail(f'couldn\'t find model "{words[0]}" to stop')
        raise


def command_show(words: list[str]) -> None:
    told = next(call("POST", "/api/show", {"model": words[0]}))
    for option, key in (("--modelfile", "modelfile"), ("--parameters", "parameters"), ("--template", "template"),
                        ("--system", "system"), ("--license", "license")):  # fmt: skip
        if option in words:
            print(told.get(key, ""))
            return
    info, details = told["model_info"], told["details"]
    architecture = info.get("general.architecture", "")
    print("  Model")
    for label, value in (
        ("architecture", architecture),
        ("parameters", details["parameter_size"]),
        ("context length", info.get(f"{architecture}.context_length")),
        ("embedding length", info.get(f"{architecture}.embedding_length")),
        ("quantization", details["quantization_level"]),
    ):
        if value not in (None, ""):
            print(f"    {label:<20}{value}")
    print("\n  Capabilities")
    for word in told.get("capabilities", []):
        print(f"    {word}")
    if told.get("parameters"):
        print("\n  Parameters")
        for line in told["parameters"].splitlines():
            print("    " + re.sub(r"\s+", "    ", line, count=1))
    print()


def command_run(words: list[str]) -> None:
    body = {"model": words[0], "prompt": " ".join(words[1:])}
    for line in call("POST", "/api/generate", body):
        print(line.get("response", ""), end="", flush=True)
    print()


def main(words: list[str]) -> None:
    if words[:1] in (["@hold"], ["@abort"]):
        hold(words[1:], words[0] == "@abort")
    if "--version" in words[:1] or "-v" in words[:1]:
        return show_version()
    commands: dict[str, Callable[[list[str]], None]] = {
        "list": command_list, "ls": command_list, "ps": command_ps, "pull": command_pull, "rm": command_rm,
        "cp": command_cp, "show": command_show, "stop": command_stop, "run": command_run,
    }  # fmt: skip
    if words[:1] in (["serve"], ["start"]):
        with contextlib.suppress(OSError):
            as_program([sys.argv[0], *words])
        return serve()
    if not words or words[0] not in commands:
        print("Usage:\n  ollama [flags]\n  ollama [command]")
        if words and words[0] not in ("-h", "--help", "help"):
            fail(f'unknown command "{words[0]}" for "ollama"')
        return
    try:
        commands[words[0]](words[1:])
    except ConnectionError:
        fail("could not connect to ollama server, run 'ollama serve' to start it")
    except ApiError as exc:
        fail(str(exc))
    except IndexError:
        fail("accepts 1 arg(s), received 0")


if __name__ == "__main__":
    main(sys.argv[1:])
