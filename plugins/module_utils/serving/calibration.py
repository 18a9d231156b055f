# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a server holds of each GPU against what was counted before its start, and the difference kept for next time.

The plan's overhead of driver and engine is a figure from reports, not one of this machine (see gguf/plan.py). What the
first start shows is written down by server; the next plan adds to each card the most that any server was short there.
A plan that was too high takes nothing off: it counts a full context, which a first question does not fill.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..faults import Fault
from ..files import replace_file
from .catalogue import CATALOGUE

FILE = "/var/lib/volta-llm/calibration.json"
VERSION = 1
#: A difference below both is of no matter: the plan is meant to be this exact.
TOLERANCE_MIB = 512.0
TOLERANCE = 0.10
#: Less than this part of what was counted means that layers lie elsewhere, on another card or on the CPU.
MISSING = 0.5
#: A change below this is noise, such as a kernel that was not loaded yet; the file is not written for it.
NOISE_MIB = 64.0


@dataclass(frozen=True)
class Held:
    """One GPU: what was counted for it, what the process holds (null: nvidia-smi does not tell), in MiB."""

    uuid: str
    bus_id: str
    counted_mib: float
    measured_mib: float | None

    @property
    def deviation_mib(self) -> float | None:
        """Positive where more is held than was counted."""
        return None if self.measured_mib is None else round(self.measured_mib - self.counted_mib, 1)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "deviation_mib": self.deviation_mib}


def compare(counted: Iterable[Mapping[str, Any]], measured: Mapping[str, int | None]) -> list[Held]:
    """``counted``: entries with uuid, bus_id and counted_mib. ``measured``: MiB by UUID; a GPU not in it holds 0."""
    return [
        Held(
            str(entry["uuid"]),
            str(entry.get("bus_id") or ""),
            float(entry["counted_mib"]),
            measured.get(str(entry["uuid"]), 0.0),
        )
        for entry in counted
    ]


def judge(found: Sequence[Held]) -> list[Fault]:
    """At most one fault a GPU; none where a figure is not known."""
    faults = []
    for gpu in found:
        deviation, name = gpu.deviation_mib, gpu.bus_id or gpu.uuid
        if deviation is None or gpu.measured_mib is None:
            continue
        text = f"{gpu.measured_mib:.0f} MiB held, {gpu.counted_mib:.0f} counted"
        if gpu.counted_mib > TOLERANCE_MIB and gpu.measured_mib < MISSING * gpu.counted_mib:
            faults.append(
                CATALOGUE.fault(
                    "gpu_memory_missing",
                    name,
                    f"{text}: part of the model lies on another GPU or on the CPU",
                    "Restart the server; if it stays so, the journal and tensor_split say which layers went where.",
                )
            )
        elif abs(deviation) > max(TOLERANCE_MIB, TOLERANCE * gpu.counted_mib):
            faults.append(
                CATALOGUE.fault(
                    "gpu_memory_deviates",
                    name,
                    f"{text} ({deviation:+.0f})",
                    "Nothing to do; where more is held, the next plan on this machine counts it. "
                    "Lower context_per_request or parallel where little is left.",
                )
            )
    return faults


def keep(path: Path, server: str, settings: Mapping[str, Any], found: Sequence[Held], check: bool = False) -> bool:
    """Write down what ``server`` holds; whether the file was (in check mode: would be) written. OSError as it comes.

    ``settings`` say for what the figures hold. With the same ones and about the same figures nothing is written.
    """
    if not found or any(gpu.measured_mib is None for gpu in found):
        return False
    content = read(path)
    servers: dict[str, Any] = content["servers"]
    known = servers.get(server)
    gpus = [gpu.as_dict() for gpu in found]
    if (
        isinstance(known, dict)
        and known.get("settings") == dict(settings)
        and _alike(kept_gpus(content, server), found)
    ):
        return False
    if not check:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        servers[server] = {"when": when, "settings": dict(settings), "gpus": gpus}
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
    return True


def read(path: Path) -> dict[str, Any]:
    """The file's content; an empty one where there is none, it cannot be read or is of another version."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("version") == VERSION and isinstance(content.get("servers"), dict):
            return content
    return {"version": VERSION, "servers": {}}


def kept_gpus(content: Mapping[str, Any], server: str) -> list[dict[str, Any]]:
    """The GPUs that the file's ``content`` has of a server; what has another form is passed over."""
    known = content["servers"].get(server)
    gpus = known.get("gpus") if isinstance(known, dict) else None
    return [gpu for gpu in gpus if isinstance(gpu, dict) and gpu.get("uuid")] if isinstance(gpus, list) else []


def shortfall(path: Path) -> dict[str, float]:
    """By GPU UUID, the most MiB that a server on this machine held beyond what was counted; only where it did."""
    short: dict[str, float] = {}
    content = read(path)
    for server in content["servers"]:
        for gpu in kept_gpus(content, server):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                more = float(gpu["deviation_mib"])
                if more > 0:
                    short[str(gpu["uuid"])] = max(more, short.get(str(gpu["uuid"]), 0.0))
    return short


def _alike(known: Sequence[Mapping[str, Any]], found: Sequence[Held]) -> bool:
    by_uuid = {gpu["uuid"]: gpu for gpu in known}
    if set(by_uuid) != {gpu.uuid for gpu in found}:
        return False
    return all(
        abs(float(by_uuid[gpu.uuid].get(name) or 0.0) - float(getattr(gpu, name) or 0.0)) <= NOISE_MIB
        for gpu in found
        for name in ("measured_mib", "counted_mib")
    )
