# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a machine serves, read from the machine alone: its units, their command lines, their files.

The settings of a run are not needed for it, nor a vault: what is judged is what was installed. Whether that is what the
settings say now is another question (site.yml --check --diff).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..faults import Fault, in_variables
from ..machine import Runner, run
from . import calibration
from .arguments import reachable_host
from .catalogue import CATALOGUE
from .dropins import drop_ins, overridden
from .mapped import all_shards
from .model_file import unverified
from .service import COMMAND_TIMEOUT, UNIT_FOLDER

#: Options of the server that are read here, by the names they have had.
_OPTIONS = {
    "model": ("--model", "-m"),
    "alias": ("--alias", "-a"),
    "host": ("--host",),
    "port": ("--port",),
    "total": ("--ctx-size", "-c"),
    "parallel": ("--parallel", "-np"),
    "key_file": ("--api-key-file",),
    "certificate": ("--ssl-cert-file",),
    "layers": ("--n-gpu-layers", "--gpu-layers", "-ngl"),
}
_SHOWN = "ActiveState,SubState,UnitFileState,NeedDaemonReload,Result,ActiveEnterTimestamp,StatusText,DropInPaths"
#: What systemd writes where it starts a unit again by itself (sd-messages.h: SD_MESSAGE_UNIT_RESTART_SCHEDULED).
_RESTARTED = "MESSAGE_ID=5eb03494b6584870a536b337290809b3"
#: So many restarts within a day are worth a warning: one may have had a cause that is over.
MANY_RESTARTS = 3

NOT_RUNNING, NOT_ENABLED = "service_not_running", "service_not_enabled"


@dataclass(frozen=True)
class Served:
    """One unit. ``server`` has the keys of module llama_server_arguments that llm_probe and the hand-over need."""

    server: dict[str, Any]
    faults: list[Fault]


def look(
    base: str = "llama-server",
    folder: Path = UNIT_FOLDER,
    runner: Runner = run,
    calibrated: Path = Path(calibration.FILE),
) -> list[Served]:
    """The default unit first, then its instances by name; empty where there is none."""
    paths = [folder / f"{base}.service", *sorted(folder.glob(f"{base}@?*.service"))]
    return [_look(path, runner, calibrated) for path in paths if path.is_file()]


def missing(base: str) -> Fault:
    """For a machine that serves nothing."""
    return CATALOGUE.fault(
        "nothing_served",
        f"{base}.service",
        "there is no such unit on this machine, and no instance of it",
        "Run playbooks/serve.yml.",
    )


def _look(path: Path, runner: Runner, calibrated: Path) -> Served:
    text = path.read_text(encoding="utf-8", errors="replace")
    command = next((line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStart=")), "")
    words = words_of(command)
    options = {name: _value(words, names) for name, names in _OPTIONS.items()}
    host, port = options["host"] or "127.0.0.1", number(options["port"]) or 8080
    parallel, total = number(options["parallel"]) or 1, number(options["total"])
    model = options["model"] or ""
    told = shown(path.name, runner)
    name = path.name.removesuffix(".service")
    limit = re.search(r"(?m)^TimeoutStartSec=(\d+)$", text)
    scheme = "https" if options["certificate"] else "http"
    server = {
        "name": name,
        "base_url": f"{scheme}://{reachable_host(host)}:{port}/v1",
        "host": host,
        "port": port,
        "alias": options["alias"] or Path(model).name,
        "backend": "cuda" if options["layers"] else "cpu",
        "parallel": parallel,
        "context_per_request": total // parallel if total else 0,
        "has_keys": options["key_file"] is not None,
        "api_key_file": options["key_file"] or "",
        "model_files": all_shards(model) if model else [],
        "load_timeout": int(limit[1]) if limit else 600,
        # What it held of each card when it was first proved stands for what was counted.
        "memory": [
            {**gpu, "counted_mib": gpu["measured_mib"]}
            for gpu in calibration.kept_gpus(calibration.read(calibrated), path.name)
            if gpu.get("measured_mib") is not None
        ],
        **state_of(told, restarts(path.name, runner)),
    }
    return Served(server, _judge(path, text, server, told, words))


def state_of(told: dict[str, str], again: int | None) -> dict[str, Any]:
    """What systemd says of a unit, in the keys of a server; ``again``: see `restarts`."""
    return {
        "state": f"{told.get('ActiveState', 'unknown')} ({told.get('SubState', 'unknown')})",
        "running": told.get("ActiveState") in ("active", "activating", "reloading"),
        "since": told.get("ActiveEnterTimestamp") or None,
        "restarts": again,
        "status_text": told.get("StatusText") or None,
        "at_boot": told.get("UnitFileState") in ("enabled", "enabled-runtime"),
        "stands_by": False,
    }


def _judge(path: Path, text: str, server: dict[str, Any], told: dict[str, str], words: Sequence[str]) -> list[Fault]:
    faults: list[Fault] = []
    absent = [name for name in server["model_files"] if not Path(name).is_file()]
    if absent:
        faults.append(
            CATALOGUE.fault(
                "model_unverified",
                "model",
                f"{', '.join(absent)} is not there; the server cannot start again",
                "Run playbooks/model.yml.",
            )
        )
    if words and not server["running"] and not Path(words[0]).is_file():
        faults.append(
            CATALOGUE.fault(
                "engine_missing", words[0], "no such program", "Run playbooks/engine.yml, then playbooks/serve.yml."
            )
        )
    # As the operator would write it: this module has no such option.
    faults += in_variables(unverified(server["model_files"]), "llama_server_", ["allow_unverified_model"])
    faults += judge_state(path, server, told, "llama_server_enabled")
    return faults + overridden(path.name, text, drop_ins(path, told.get("DropInPaths", "").split()))


def judge_state(path: Path, server: dict[str, Any], told: dict[str, str], enabled: str) -> list[Fault]:
    """What systemd says of a unit that should run and come back; ``enabled`` is the variable that sets the latter."""
    faults: list[Fault] = []
    if not server["running"]:
        # One that was stopped has only former words left.
        said = f"; {server['status_text']}" if server["status_text"] and told.get("ActiveState") == "failed" else ""
        remedy = (
            f"See `systemctl status {server['name']}` and `journalctl -u {server['name']} -n 50`, mend it, then: "
            f"systemctl reset-failed {server['name']}; systemctl start {server['name']}"
        )
        if told.get("ActiveState") == "inactive" and told.get("Result") == "success":
            said = ", it was stopped and did not fail"
            remedy = f"systemctl start {server['name']}, unless it is stopped on purpose"
        faults.append(CATALOGUE.fault(NOT_RUNNING, path.name, f"{server['state']}{said}", remedy))
    if (server["restarts"] or 0) >= MANY_RESTARTS:
        faults.append(
            CATALOGUE.fault(
                "service_restarted",
                path.name,
                f"it ended and was started again by systemd {server['restarts']} times within a day",
                f"See why: journalctl -u {server['name']} --since -24h | grep -A3 'Main process exited', and "
                "`journalctl -k --since -24h --grep 'NVRM|oom'`.",
            )
        )
    if not server["at_boot"]:
        faults.append(
            CATALOGUE.fault(
                NOT_ENABLED,
                path.name,
                "it would not come back after a boot",
                f"systemctl enable {server['name']}, unless {enabled} is false on purpose",
            )
        )
    if told.get("NeedDaemonReload") == "yes":
        faults.append(
            CATALOGUE.fault(
                "unit_changed",
                path.name,
                "its file was changed since systemd read it; the server runs with the former one",
                "Run playbooks/serve.yml, which restarts it with what the settings say.",
            )
        )
    return faults


def standing_by(engine: Sequence[Served], other: Sequence[Served]) -> list[Served]:
    """``engine`` as it is meant: where the other one runs or is to, one that is stopped and not enabled stands by."""
    if any(unit.server["running"] or unit.server["at_boot"] for unit in engine):
        return list(engine)
    if not any(unit.server["running"] or unit.server["at_boot"] for unit in other):
        return list(engine)
    return [
        Served(
            {**unit.server, "stands_by": True},
            [fault for fault in unit.faults if fault.code not in (NOT_RUNNING, NOT_ENABLED)],
        )
        for unit in engine
    ]


def words_of(command: str) -> list[str]:
    """The words of an Exec line as unit.quote wrote them; empty where it cannot be read."""
    try:
        words = shlex.split(command)
    except ValueError:
        return []
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value of an option: that is the one in force."""
    found = None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else words[at + 1] if at + 1 < len(words) else None
    return found


def number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def restarts(unit: str, runner: Runner) -> int | None:
    """How often systemd has started a unit again by itself within a day; null where the journal cannot be asked.

    Its own count (NRestarts) is no help: a start that succeeds sets it back, since the unit clears its failures then.
    """
    words = ["journalctl", f"UNIT={unit}", _RESTARTED, "--since=-24h", "--output=cat", "--no-pager", "--quiet"]
    done = runner(words, COMMAND_TIMEOUT)
    return len([line for line in done.stdout.splitlines() if line.strip()]) if done.ok else None


def shown(unit: str, runner: Runner, *more: str) -> dict[str, str]:
    """Properties of a unit by name; empty where systemd does not answer."""
    names = ",".join([_SHOWN, *more])
    done = runner(["systemctl", "show", unit, f"--property={names}"], COMMAND_TIMEOUT)
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines()) if done.ok else {}
