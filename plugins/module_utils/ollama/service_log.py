# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What Ollama's service said since its start of GPUs that it does not use, and of settings that it passes over.

Lines are read by their form (C(time=... level=... source=... msg="...") and fields, logutil/logutil.go), never searched
for words: with debugging on, a line can hold a prompt. Of a line only the named fields are repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..machine import Runner
from ..serving.service import full_name

SECONDS = 60.0
#: Lines to read where journalctl cannot search.
LINES = 50000
#: For PCRE and for Python; coarser than the messages below, which judge what it finds.
_SEARCH = (
    'msg="(skipping CUDA|NVIDIA driver too|inference compute|no compatible|no nvidia|failure during|supported GPU|'
    "invalid |unsupported OLLAMA|OLLAMA_FLASH)"
)
_LINE = re.compile(r'time=\S+ level=[A-Z]+[+-]?\d* (?:source=\S+ )?msg=("(?:[^"\\]|\\.)*"|\S+)(.*)')
_FIELD = re.compile(r'([\w.]+|"[^"]+")=("(?:[^"\\]|\\.)*"|\S*)')
#: Messages about settings of the service that have no effect (0.24.0: envconfig/config.go, llm/server.go).
_IGNORED = (
    "invalid environment variable, using default",
    "invalid port, using default",
    "unsupported OLLAMA_KV_CACHE_TYPE",
    "OLLAMA_FLASH_ATTENTION must be enabled to use a quantized OLLAMA_KV_CACHE_TYPE",
)


@dataclass(frozen=True)
class Said:
    """In the service's words, each once: GPUs skipped, drivers too old, no GPU at all, settings without effect."""

    skipped: tuple[str, ...] = ()
    too_old: tuple[str, ...] = ()
    no_gpu: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def read_log(unit: str, runner: Runner) -> Said:
    """From the journal of the unit's present run; empty where that cannot be read."""
    name = full_name(unit)
    done = runner(["systemctl", "show", name, "--property=InvocationID"], SECONDS)
    run_id = done.stdout.strip().partition("=")[2] if done.ok else ""
    if not run_id:
        return Said()
    argv = ["journalctl", "--no-pager", "--output=cat", f"_SYSTEMD_INVOCATION_ID={run_id}"]
    found = runner([*argv, f"--grep={_SEARCH}", "--case-sensitive=yes"], SECONDS)
    if not found.ok and ("pattern matching" in found.stderr or "unrecognized option" in found.stderr):
        found = runner([*argv, f"--lines={LINES}"], SECONDS)
    # Exit status 1 is what a search that finds nothing ends with.
    return judge_lines(found.stdout)


def judge_lines(text: str) -> Said:
    said: dict[str, list[str]] = {"skipped": [], "too_old": [], "no_gpu": [], "ignored": []}
    cards = False
    for line in text.splitlines():
        read = _LINE.fullmatch(line.strip())
        if not read:
            continue
        message = _unquoted(read[1])
        fields: dict[str, Any] = {_unquoted(key): _unquoted(value) for key, value in _FIELD.findall(read[2])}
        if message.startswith("skipping CUDA device"):
            said["skipped"].append(_told(message, fields, "device", "cc", "archs", "libDirs"))
        elif message == "NVIDIA driver too old":
            said["too_old"].append(_told(message, fields, "device", "compute", "driver", "required_driver"))
        elif message == "inference compute":
            cards = cards or fields.get("library") != "cpu"
            if fields.get("library") == "cpu":
                said["no_gpu"].append(_told(message, fields, "library"))
        elif message.startswith(("no compatible GPUs were discovered", "no nvidia devices detected")):
            said["no_gpu"].append(message)
        elif message.startswith("failure during GPU discovery"):
            said["no_gpu"].append(_told(message, fields, "error"))
        elif message.startswith("supported GPU library combinations") and fields.get("supported") == "map[]":
            said["no_gpu"].append(_told(message, fields, "supported"))
        elif message in _IGNORED:
            said["ignored"].append(_told(message, fields, "key", "value", "port", "type", "default"))
    if cards:
        # One library of several found none; another one did.
        said["no_gpu"] = []
    return Said(**{key: tuple(dict.fromkeys(lines)) for key, lines in said.items()})


def _told(message: str, fields: dict[str, Any], *names: str) -> str:
    more = ", ".join(f"{name} {fields[name]}" for name in names if fields.get(name))
    return f"{message} ({more})"[:400] if more else message[:400]


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] == '"':
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text
