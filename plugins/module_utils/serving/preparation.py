# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Everything that can be judged before a server is started: settings against engine, model, GPUs and port."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.capabilities import parse_help
from ..faults import Fault
from ..machine import Completed, Machine, run
from . import model_file
from .account import check_account
from .arguments import Plan, Settings, Surroundings, plan, reachable_host
from .catalogue import CATALOGUE
from .listener import in_the_way, listeners
from .mapped import all_shards
from .unit import Unit, load_timeout, render

NVIDIA_VENDOR = "0x10de"
#: PCI classes of graphics cards: VGA and 3D controllers.
GPU_CLASSES = ("0x0300", "0x0302")

Runner = Callable[[Sequence[str], float], Completed]


@dataclass(frozen=True)
class UnitOptions:
    """What the unit says beside the command; ``load_timeout`` 0 takes it from the model's size."""

    name: str = "llama-server"
    user: str = "llama-server"
    load_timeout: int = 0
    guard: str = "/usr/local/lib/volta-llm/llama-server-guard"
    python: str = "/usr/bin/python3"


@dataclass(frozen=True)
class Prepared:
    results: dict[str, Any]
    faults: list[Fault]


@dataclass(frozen=True)
class Engine:
    """``flags`` is empty and ``version`` null where the engine does not say; ``missing`` when it is not there."""

    flags: frozenset[str] = frozenset()
    version: str | None = None
    missing: bool = False


def prepare(
    settings: Settings,
    options: UnitOptions,
    gpu_machine: Machine,
    check: bool = False,
    here: Machine | None = None,
    runner: Runner = run,
) -> Prepared:
    """Judge all of it. In check mode engine and model may be missing: nothing installed them.

    ``gpu_machine`` is where GPUs are looked for (a simulator, perhaps), ``here`` where the server will listen.
    """
    faults: list[Fault] = []
    engine, engine_faults = inspect_engine(settings.binary, runner)
    faults += engine_faults
    model, model_faults = model_file.inspect(settings.model)
    faults += model_faults
    absent = ("engine_missing", "gguf_not_found")
    would_verify = check and any(fault.code in absent for fault in faults)
    if check:
        faults = [fault for fault in faults if fault.code not in absent]

    bus_ids, gpu = inspect_gpus(gpu_machine) if settings.backend == "cuda" else ((), None)
    computed = plan(
        settings,
        Surroundings(
            flags=engine.flags,
            engine_version=engine.version,
            architecture=model.architecture,
            model_context=model.context,
            gpu_bus_ids=bus_ids,
            gpu=gpu,
        ),
    )
    faults += computed.faults
    if not computed.faults and not engine.missing:
        faults += parse_by_engine(settings, computed, runner)
    faults += check_port(settings, options.name, here or Machine())
    faults += check_address(settings)
    account_exists, account_faults = check_account(options.user)
    faults += account_faults

    limit = options.load_timeout or load_timeout(model.size)
    text = render(
        Unit(
            description=f"llama-server: {computed.alias} on port {settings.port}",
            user=options.user,
            group=options.user,
            argv=computed.argv,
            environment=computed.environment,
            guard=options.guard,
            python=options.python,
            health_url=f"http://{reachable_host(settings.host)}:{settings.port}/health",
            port=settings.port,
            load_timeout=limit,
            cuda=settings.backend == "cuda",
            gpus=len(bus_ids) or None,
            model=settings.model,
            limit_memlock=any("mlock" in word for word in map(str, settings.extra_args)),
        )
    )
    return Prepared(
        {
            "argv": list(computed.argv),
            "environment": computed.environment,
            "unit": text,
            "account_exists": account_exists,
            "model_files": all_shards(settings.model),
            "alias": computed.alias,
            "base_url": computed.base_url,
            "split_mode": computed.split_mode,
            "gpu_count": computed.gpu_count,
            "context_per_request": computed.context,
            "total_context": computed.total_context,
            "architecture": model.architecture,
            "engine_version": engine.version,
            "load_timeout": limit,
            "notes": list(computed.notes),
            "would_verify": would_verify,
        },
        faults,
    )


def inspect_engine(binary: str, runner: Runner = run) -> tuple[Engine, list[Fault]]:
    """What the installed engine can do: from the manifest of its release, else from its help text."""
    program = Path(binary)
    if not os.access(program, os.X_OK) or not program.is_file():
        remedy = "Build it with role llama_cpp, or correct `binary`."
        return Engine(missing=True), [CATALOGUE.fault("engine_missing", binary, "no such program", remedy)]
    manifest = _manifest(program)
    version = manifest.get("version")
    known = manifest.get("capabilities")
    flags = known.get("flags") if isinstance(known, dict) else None
    if not isinstance(flags, list) or not flags:
        done = runner([binary, "--help"], 60.0)
        if not done.ok:
            what = done.stderr.strip()[-300:] or ("no answer in time" if done.timed_out else f"exit status {done.rc}")
            message = f"does not run: {what}"
            remedy = "Build it again with role llama_cpp."
            return Engine(missing=True), [CATALOGUE.fault("engine_missing", binary, message, remedy)]
        flags = parse_help(done.stdout).flags
    return Engine(frozenset(map(str, flags)), str(version) if version else None), []


def _manifest(program: Path) -> dict[str, Any]:
    """release.json of the release that the program belongs to (bin/ lies beside it); empty where there is none."""
    try:
        content = json.loads((program.resolve().parent.parent / "release.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def inspect_gpus(machine: Machine) -> tuple[tuple[str, ...], str | None]:
    """Bus ids of the NVIDIA GPUs in bus order, which CUDA follows too, and their device id if all are alike."""
    found = {}
    for bus_id in machine.listdir("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{bus_id}"
        if (machine.read(f"{folder}/vendor") or "").strip() != NVIDIA_VENDOR:
            continue
        if (machine.read(f"{folder}/class") or "").strip()[:6] in GPU_CLASSES:
            found[bus_id] = (machine.read(f"{folder}/device") or "").strip().removeprefix("0x")
    kinds = set(found.values())
    return tuple(sorted(found)), kinds.pop() if len(kinds) == 1 else None


def parse_by_engine(settings: Settings, computed: Plan, runner: Runner = run) -> list[Fault]:
    """Let the engine parse the arguments: with --version at the end it stops after that, before loading anything."""
    words = list(computed.argv)
    if settings.api_keys:
        # The file is written later, and parsing would already read it.
        at = words.index("--api-key-file")
        del words[at : at + 2]
    done = runner([*words, "--version"], 60.0)
    if done.ok:
        return []
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()]
    message = lines[0].strip() if lines else done.stderr.strip()[-300:] or f"exit status {done.rc}"
    remedy = "Correct the setting that the engine names; the service was not touched."
    return [CATALOGUE.fault("argument_refused", Path(settings.binary).name, message, remedy)]


def check_address(settings: Settings) -> list[Fault]:
    """Whether the machine has the address, by binding to it; what is no address at all is judged with the settings."""
    host = settings.host
    try:
        # No name is resolved here, so nothing is asked over the network.
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[
            0
        ]
        with socket.socket(family, kind) as probe:
            # Any free port: whether the wanted one is free is told with its holder.
            probe.bind(address)
    except socket.gaierror:
        if "%" not in host:
            return []
        problem = "names a network interface that this machine does not have"
    except OSError as exc:
        problem = f"is no address that this machine can listen on ({exc.strerror})"
    else:
        return []
    remedy = "Write 127.0.0.1, an address that `ip address` shows on the machine, or 0.0.0.0 for all of them."
    return [CATALOGUE.fault("setting_invalid", "host", f"{host} {problem}", remedy)]


def check_port(settings: Settings, unit: str, machine: Machine) -> list[Fault]:
    """Another program on the port, named. The unit's own process is not in its own way."""
    own = unit if unit.endswith(".service") else f"{unit}.service"
    return [
        CATALOGUE.fault(
            "port_taken",
            f"{item.address}:{item.port}",
            f"taken by {item.owner}",
            "Stop that program, or give the server another port.",
        )
        for item in in_the_way(listeners(machine, settings.port), settings.host)
        if item.unit != own
    ]
