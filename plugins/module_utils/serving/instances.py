# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Several servers on one machine: the default one, and named ones that differ from it in what they say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..faults import Fault
from .arguments import Plan, Settings
from .catalogue import CATALOGUE

#: In a unit's name; no dash at its ends, so that it cannot be read as an option. No underscore either: that is what a
#: dash becomes in a name for nftables, where a-b and a_b would take each other's rules away.
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
#: What another server's value would be wrong for: a port and cards are had by one, a name follows the model.
NOT_INHERITED = ("alias", "gpus", "tensor_split")
#: Numbers of which 0 leaves the choice to the engine, as the role's variables say.
ENGINES_CHOICE = ("threads", "ubatch", "timeout")
#: The first line of every unit that this collection writes.
MARK = "# Written by Ansible (volta.llm.llama_server)"


@dataclass(frozen=True)
class Server:
    """One server. ``instance`` is empty for the default one; ``unit`` has no ending."""

    instance: str
    unit: str
    settings: Settings

    @property
    def service(self) -> str:
        return f"{self.unit}.service"


def key_file(default: str, instance: str) -> str:
    """Where the keys of an instance lie: beside those of the default one, with its name."""
    return f"{default}-{instance}" if instance else default


def servers(base: Settings, instances: Sequence[Mapping[str, Any]]) -> tuple[list[Server], list[Fault]]:
    """The default server and the named ones; a name that is taken or cannot be one is a fault and has no server.

    ``instances`` hold ``name`` and settings; null means that none was given.
    """
    found = [Server("", base.unit, base)]
    faults = []
    inherited = replace(base, **{name: getattr(Settings(""), name) for name in NOT_INHERITED})
    for number, given in enumerate(instances):
        name = str(given.get("name") or "")
        if not NAME.fullmatch(name) or name in [server.instance for server in found]:
            problem = "is there twice" if NAME.fullmatch(name) else "cannot name an instance"
            faults.append(
                CATALOGUE.fault(
                    "setting_invalid",
                    f"instances[{number}]",
                    f"{name!r} {problem}",
                    "Write a name of its own in small letters, digits and dashes.",
                )
            )
            continue
        unit = f"{base.unit}@{name}"
        values: dict[str, Any] = {
            key: None if key in ENGINES_CHOICE and value == 0 else value
            for key, value in given.items()
            if key != "name" and value is not None
        }
        settings = replace(inherited, unit=unit, api_key_file=key_file(base.api_key_file, name), **values)
        found.append(Server(name, unit, settings))
    return found, faults


def named(server: Server, faults: Iterable[Fault]) -> list[Fault]:
    """The faults of a server, with the instance in front of what they concern."""
    if not server.instance:
        return list(faults)
    return [replace(fault, subject=f"instances[{server.instance}]: {fault.subject}") for fault in faults]


def collisions(planned: Sequence[tuple[Server, Plan]]) -> list[Fault]:
    """At most one fault, with everything that two servers would both take."""
    found = []
    for at, (server, plan) in enumerate(planned):
        for other, others in planned[:at]:
            if server.settings.port == other.settings.port:
                found.append(f"{other.unit} and {server.unit} both listen on port {server.settings.port}")
            if "cuda" == server.settings.backend == other.settings.backend:
                mine, theirs = _cards(server, plan), _cards(other, others)
                if mine is None or theirs is None:
                    everything = server if mine is None else other
                    found.append(
                        f"{other.unit} and {server.unit} share cards, since {everything.unit} uses all of them"
                    )
                elif mine & theirs:
                    shared = ", ".join(sorted(mine & theirs))
                    found.append(f"{other.unit} and {server.unit} both use {shared}")
    if not found:
        return []
    remedy = "Give each server a `port` and cards (`gpus`) of its own, as [0, 1] for one and [2, 3] for the next."
    return [CATALOGUE.fault("instances_collide", "instances", "; ".join(found), remedy)]


def _cards(server: Server, plan: Plan) -> set[str] | None:
    """The cards of a server; null stands for all, and where they are not known for what was written."""
    if not server.settings.gpus:
        return None
    return set(plan.gpus if plan.gpus is not None else map(str, server.settings.gpus))


def leftover_units(folder: Path, base: str, wanted: Iterable[str]) -> list[str]:
    """Units of instances that were written here and are not wanted any more, without their ending."""
    keep = set(wanted)
    found = []
    for path in sorted(folder.glob(f"{base}@?*.service")):
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                ours = lines.readline().startswith(MARK)
        except OSError:
            continue
        if ours and path.stem not in keep:
            found.append(path.stem)
    return found
