# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The unit of Ollama: our settings are a drop-in, whoever wrote the unit file.

The vendor's script writes /etc/systemd/system/ollama.service anew at each run, and takes along what was edited there.
A drop-in of ours stays. It sets all that decides over the server, so that a unit file of ours, needed where there is
none, says next to nothing. Ollama does not tell systemd when it is ready: the guard sees the version being answered,
which Ollama does after it has looked for GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..serving.clients import NFT, table_name
from ..serving.dropins import Line, lines_of
from ..serving.unit import RESTART_SECONDS, STARTS, hardening, quote, quote_assignment

NAME = "ollama"
SERVICE = "ollama.service"
DROPIN = "50-volta.conf"
#: The first line of every file for systemd that role ollama writes.
MARK = "# Written by Ansible (volta.llm.ollama)"
#: Where the service's key for the registry and its caches are. systemd makes it, for the unit's user.
HOME = "/var/lib/ollama"
#: Looks at the GPUs of up to 30 s for each of the libraries, twice (v0.24.0 discover/runner.go).
START_SECONDS = 180
STOP_SECONDS = 30

#: The vendor's unit, line by line (scripts/install.sh, alike in v0.5.13 to v0.32.15); folders and the PATH differ.
_VENDOR = tuple(
    re.compile(pattern)
    for pattern in (
        r"Description=Ollama Service",
        r"After=network-online\.target",
        r"ExecStart=\S*/ollama serve",
        r"User=ollama",
        r"Group=ollama",
        r"Restart=always",
        r"RestartSec=3",
        r'Environment="PATH=[^"]*"',
        r"WantedBy=(?:default|multi-user)\.target",
    )
)


@dataclass(frozen=True)
class Unit:
    """What the drop-in says.

    ``gpus`` is how many cards must be there before the start, null where that is not known. ``device_timeout`` is how
    many seconds their device nodes are waited for, 0 not at all.
    ``unset`` are variables that it must not have, whoever sets them. ``writable`` are folders that the service writes
    to. ``conflicts`` are units that are stopped when it starts, and stop it when they do. ``ruleset`` is the file that
    nftables reads before each start, empty for none. ``secrets`` is a file of variables that only root reads, empty for
    none.
    """

    binary: str
    user: str
    environment: Mapping[str, str]
    guard: str
    python: str
    root_url: str
    port: int
    cuda: bool = True
    gpus: int | None = None
    device_timeout: int = 60
    unset: Sequence[str] = ()
    writable: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    ruleset: str = ""
    secrets: str = ""

    @property
    def start_seconds(self) -> int:
        """Seconds for a start: the wait for the devices, and Ollama's own look at the GPUs."""
        return START_SECONDS + (self.device_timeout if self.cuda else 0)


def base() -> str:
    """The unit file for a machine that has none."""
    return "\n".join(
        [
            f"{MARK}: its settings are in {SERVICE}.d/{DROPIN}.",
            "[Unit]",
            "Description=Ollama",
            "",
            "[Service]",
            "ExecStart=/opt/ollama/current/bin/ollama serve",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
    )


def drop_in(unit: Unit) -> str:
    """The text of the drop-in. What a unit file of others may say as well is emptied first."""
    guard = f"{unit.python} -I {quote(unit.guard)}"
    real = [os.path.realpath(path) for path in unit.writable]
    before = "network-online.target nvidia-persistenced.service"
    lines = [
        f"{MARK}: changes here are overwritten by the next run.",
        "[Unit]",
        f"Wants={before}",
        f"After={before}",
        # Longer than that many failing starts take, or the limit would never be reached.
        f"StartLimitIntervalSec={STARTS * (unit.start_seconds + STOP_SECONDS + RESTART_SECONDS) + 60}",
        f"StartLimitBurst={STARTS}",
    ]
    if unit.conflicts:
        # After: their end is waited for, so that the cards are free.
        lines += [f"Conflicts={' '.join(unit.conflicts)}", f"After={' '.join(unit.conflicts)}"]
    lines += [
        "",
        "[Service]",
        "Type=exec",
        # For the text that the guard sets in the unit's status; systemd waits for no message.
        "NotifyAccess=all",
        f"User={unit.user}",
        f"Group={unit.user}",
        # Files of variables would win over what is said here.
        "EnvironmentFile=",
        *([f"EnvironmentFile={unit.secrets.replace('%', '%%')}"] if unit.secrets else []),
        *(f"Environment={quote_assignment(name, value)}" for name, value in sorted(unit.environment.items())),
        *([f"UnsetEnvironment={' '.join(unit.unset)}"] if unit.unset else []),
        f"StateDirectory={NAME}",
        "StateDirectoryMode=0755",
        f"WorkingDirectory={HOME}",
        "ExecStartPre=",
    ]
    if unit.ruleset:
        lines.append(f"ExecStartPre=+{NFT} -f {quote(unit.ruleset)}")
    if unit.cuda and unit.device_timeout:
        count = f" --count {unit.gpus}" if unit.gpus else ""
        # "+": the device nodes are made by a setuid helper, which NoNewPrivileges would keep from working.
        lines.append(f"ExecStartPre=+{guard} devices{count} --timeout {unit.device_timeout}")
    lines += [
        "ExecStart=",
        f"ExecStart={quote(unit.binary)} serve",
        "ExecStartPost=",
        f"ExecStartPost={guard} ready --url {unit.root_url}/api/version --port {unit.port} --pid $MAINPID",
        "ExecStartPost=+-/usr/bin/systemctl reset-failed %n",
        "ExecStopPost=",
        f"ExecStopPost=+-{guard} why",
        *([f"ExecStopPost=+-{NFT} delete table inet {table_name(NAME)}"] if unit.ruleset else []),
        f"TimeoutStartSec={unit.start_seconds}",
        f"TimeoutStopSec={STOP_SECONDS}",
        "Restart=on-failure",
        f"RestartSec={RESTART_SECONDS}",
        "",
        # AF_NETLINK: Ollama asks for the machine's addresses, to tell whether a request names one of them.
        *hardening(unit.cuda, real, "AF_INET AF_INET6 AF_NETLINK AF_UNIX"),
        # Lists of a unit file of others, which could hide what is used here.
        "InaccessiblePaths=",
        "TemporaryFileSystem=",
        "ReadOnlyPaths=",
        *(f"ReadWritePaths={quote_path(path)}" for path in real),
        "",
    ]
    return "\n".join(lines)


def quote_path(path: str) -> str:
    """One path of a list of paths, where % begins a specifier and words are split at spaces."""
    text = path.replace("%", "%%")
    if not re.search(r"[\s\"'\\]", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True)
class Origin:
    """Where a unit gets something from: ``path`` and line of a file."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass
class Effective:
    """What systemd makes of a unit's files together: variables, and the values of each key (lists have more than one),
    each with its origin."""

    environment: dict[str, tuple[str, Origin]] = field(default_factory=dict)
    keys: dict[str, list[tuple[str, Origin]]] = field(default_factory=dict)

    def last(self, key: str) -> tuple[str, Origin] | None:
        values = self.keys.get(key)
        return values[-1] if values else None


def effective(texts: Iterable[tuple[str, str]]) -> Effective:
    """Read files as (path, text), the unit file first, then its drop-ins in the order in which systemd reads them.

    An empty value takes away what was said before. UnsetEnvironment is applied at the end, as systemd does; variables
    of an EnvironmentFile are not looked up.
    """
    found = Effective()
    for path, text in texts:
        for line in lines_of(text):
            origin = Origin(path, line.number)
            if line.key == "Environment":
                if not line.value:
                    found.environment.clear()
                for variable, value in line.variables():
                    found.environment[variable] = (value, origin)
            elif not line.value:
                found.keys.pop(line.key, None)
            else:
                found.keys.setdefault(line.key, []).append((line.value, origin))
    for value, _ in found.keys.get("UnsetEnvironment", []):
        for name in value.split():
            found.environment.pop(name, None)
    return found


def in_order(fragment: str, drop_ins: Iterable[str]) -> list[str]:
    """The files of a unit as systemd reads them: drop-ins by their names, whatever folder they lie in."""
    return [*([fragment] if fragment else []), *sorted(drop_ins, key=lambda path: (Path(path).name, path))]


def edited(text: str) -> list[Line]:
    """The lines of a unit file that are not the vendor's. One that role ollama wrote has none."""
    if text.startswith(MARK):
        return []
    return [line for line in lines_of(text) if not any(p.fullmatch(f"{line.key}={line.value}") for p in _VENDOR)]
