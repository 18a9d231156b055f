# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ollama as it is set up on a machine, read from the machine alone: its unit, its variables, its store.

Only a service that role ollama set up is looked at (it has our drop-in); another one is not this collection's business.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ..machine import Runner, run
from ..serving.arguments import reachable_host
from ..serving.served import Served, judge_state, number, restarts, shown, state_of
from ..serving.service import UNIT_FOLDER
from .store import Store
from .unit import DROPIN, NAME, SERVICE

HOST, PORT, MODELS = "127.0.0.1", 11434, "/var/lib/ollama/models"


def look(folder: Path = UNIT_FOLDER, runner: Runner = run) -> Served | None:
    """The service with what is wrong with it; null where role ollama set none up."""
    if not (folder / f"{SERVICE}.d" / DROPIN).is_file():
        return None
    told = shown(SERVICE, runner, "Environment")
    environment = _variables(told.get("Environment", ""))
    host, port = _address(environment.get("OLLAMA_HOST", ""))
    folder_of_models = environment.get("OLLAMA_MODELS") or MODELS
    parallel = number(environment.get("OLLAMA_NUM_PARALLEL")) or 1
    models = sorted(name.shown for name in Store(folder_of_models, keep=False).names())
    server = {
        "name": NAME,
        "base_url": f"http://{reachable_host(host)}:{port}/v1",
        "root_url": f"http://{reachable_host(host)}:{port}",
        "host": host,
        "port": port,
        "backend": "cpu" if environment.get("CUDA_VISIBLE_DEVICES") == "-1" else "cuda",
        "parallel": parallel,
        "context_per_request": number(environment.get("OLLAMA_CONTEXT_LENGTH")) or 0,
        "has_keys": False,
        "api_key_file": "",
        "models_directory": folder_of_models,
        "models": models,
        "alias": models[0] if models else "",
        **state_of(told, restarts(SERVICE, runner)),
    }
    return Served(server, judge_state(folder / SERVICE, server, told, "ollama_enabled"))


def _variables(text: str) -> dict[str, str]:
    """NAME=value words as `systemctl show` prints them; empty where they cannot be read."""
    try:
        words = shlex.split(text)
    except ValueError:
        return {}
    return dict(word.partition("=")[::2] for word in words)


def _address(text: str) -> tuple[str, int]:
    """Host and port of OLLAMA_HOST as role ollama writes it."""
    host, _, port = text.rpartition(":")
    return host.strip("[]") or HOST, number(port) or PORT
