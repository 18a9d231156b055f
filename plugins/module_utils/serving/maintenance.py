# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A restart by night: what the timer says, and what the guard is told of each server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..faults import Fault
from .catalogue import CATALOGUE
from .instances import MARK
from .service import UNIT_FOLDER

_TIME = re.compile(r"(?:[01][0-9]|2[0-3]):[0-5][0-9]")
#: Longest wait for requests to end: a night, not a day.
MOST_PATIENCE = 6 * 3600


def timer(unit: str) -> str:
    """The unit of the timer, which starts the service of the same name."""
    return f"{unit}-maintenance.timer"


def check(when: str, patience: int, servers: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """What stands against a nightly restart at ``when`` (HH:MM, empty for none)."""
    if not when:
        return []
    faults = []
    if not _TIME.fullmatch(when):
        hint = " YAML reads 03:00 without quotes as a number." if when.isdigit() else ""
        faults.append(
            _invalid("maintenance_restart", f"{when!r} is no time of day.{hint}", 'Write "03:00", in quotes.')
        )
    if not 0 <= patience <= MOST_PATIENCE:
        faults.append(
            _invalid("maintenance_patience", f"{patience} is out of range", f"Write seconds, 0 to {MOST_PATIENCE}.")
        )
    for server in servers:
        if not server["metrics"]:
            message = f"the engine of {server['name']} has no /metrics, by which it is seen whether requests run"
            faults.append(_invalid("maintenance_restart", message, "Leave it empty, or build a newer engine."))
    return faults


def _invalid(subject: str, message: str, remedy: str) -> Fault:
    return CATALOGUE.fault("setting_invalid", subject, message, remedy)


def files(
    when: str, patience: int, unit: str, folder: str, guard: str, python: str, servers: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Contents by path: timer, the unit that it starts, and what that unit is told. ``folder`` holds the last one."""
    config = f"{folder}/maintenance.json"
    told = {
        "patience": patience,
        "servers": [
            {
                "unit": f"{server['name']}.service",
                "url": server["base_url"].removesuffix("/v1"),
                "model": server["alias"],
                "key_file": server["api_key_file"] if server["has_keys"] else None,
            }
            for server in servers
        ],
    }
    clock = [
        f"{MARK}: changes here are overwritten by the next run.",
        "[Unit]",
        f"Description=Nightly restart of {unit}",
        "",
        "[Timer]",
        f"OnCalendar=*-*-* {when}:00",
        "AccuracySec=1min",
        # A machine that was off at that time has just started its server anyway.
        "Persistent=false",
        "",
        "[Install]",
        "WantedBy=timers.target",
        "",
    ]
    service = [
        f"{MARK}: changes here are overwritten by the next run.",
        "[Unit]",
        f"Description=Restart {unit} when nobody uses it",
        "",
        "[Service]",
        "Type=oneshot",
        f"ExecStart={python} -I {guard} maintain {config}",
        # It waits for requests and for models to load; both have limits of their own.
        "TimeoutStartSec=infinity",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=CAP_DAC_READ_SEARCH",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "PrivateTmp=yes",
        "PrivateDevices=yes",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
        "",
    ]
    return {
        config: json.dumps(told, indent=2) + "\n",
        str((UNIT_FOLDER / timer(unit)).with_suffix(".service")): "\n".join(service),
        str(UNIT_FOLDER / timer(unit)): "\n".join(clock),
    }


def paths(unit: str, folder: str) -> list[str]:
    """All files of a nightly restart, to be removed where there is none."""
    return list(files("00:00", 0, unit, folder, "", "", []))
