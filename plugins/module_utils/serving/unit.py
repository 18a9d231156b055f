# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The systemd unit of a server: own user, only the devices it needs, active means ready.

The server does not tell systemd when it is ready (no sd_notify). So the unit counts as started when its guard, run in
ExecStartPost, has seen /health answer from the unit's own process; TimeoutStartSec is then the time for loading. The
guard's last step clears the start counter: deaths before readiness are counted and end in "failed" after three,
deaths of a server that was ready are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .arguments import COPIES
from .clients import NFT, table_name
from .instances import MARK

#: Reading a model from a disk of 150 MB/s, the slowest worth using, and the start of CUDA beside it.
SLOW_DISK_BYTES_PER_S = 150_000_000
START_SECONDS = 60
STARTS = 3
RESTART_SECONDS = 5

#: Major device names the driver registers; the first two are one device under two names, by driver branch.
NVIDIA_DEVICES = ("char-nvidia-frontend", "char-nvidia", "char-nvidia-uvm", "char-nvidia-caps")


@dataclass(frozen=True)
class Unit:
    """What the unit says beside its command. ``load_timeout`` and ``stop_timeout`` in seconds.

    ``name`` has no ending. ``paths`` are those that the server goes through. ``copies`` are files by the name
    of the copy that the server reads (see COPIES). ``admitted`` are the networks that systemd lets through, null where
    it filters nothing; ``ruleset`` is the file that nftables reads before each start instead.
    """

    name: str
    description: str
    user: str
    group: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    guard: str
    python: str
    health_url: str
    port: int
    load_timeout: int
    gpus: int | None = None
    cuda: bool = False
    stop_timeout: int = 30
    paths: Sequence[str] = ()
    limit_memlock: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    admitted: Sequence[str] | None = None
    ruleset: str = ""


def load_timeout(size: int | None) -> int:
    """Seconds to allow for loading ``size`` bytes, rounded up to whole minutes; ten minutes where it is unknown."""
    if size is None:
        return 600
    return -(-(START_SECONDS + size // SLOW_DISK_BYTES_PER_S) // 60) * 60 + 60


def quote(word: str) -> str:
    """One word of an Exec line: systemd expands %, $ and backslashes, and splits at spaces."""
    text = word.replace("%", "%%").replace("$", "$$")
    if text and not any(char in text for char in " \t\"'\\;"):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def quote_assignment(name: str, value: str) -> str:
    """``NAME=value`` for an Environment line, where $ is not special."""
    text = f"{name}={value}".replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"'


def render(unit: Unit) -> str:
    """The text of the unit file."""
    lines = [
        f"{MARK}: changes here are overwritten by the next run.",
        "[Unit]",
        f"Description={unit.description.replace('%', '%%')}",
        "After=network-online.target nvidia-persistenced.service",
        "Wants=network-online.target",
        # Longer than that many failing starts take, or the limit would never be reached.
        f"StartLimitIntervalSec={STARTS * (unit.load_timeout + unit.stop_timeout + RESTART_SECONDS) + 60}",
        f"StartLimitBurst={STARTS}",
        "",
        "[Service]",
        "Type=exec",
        # For the text that the guard sets in the unit's status; systemd waits for no message.
        "NotifyAccess=all",
        f"User={unit.user}",
        f"Group={unit.group}",
        *(f"Environment={quote_assignment(name, value)}" for name, value in sorted(unit.environment.items())),
    ]
    if unit.copies:
        # The key stays readable to root alone; the server has a copy in memory, which ends with it.
        lines += [f"RuntimeDirectory={unit.name}", "RuntimeDirectoryMode=0700"]
        owner = f"--owner={unit.user} --group={unit.group} --mode=0400"
        lines += [
            f"ExecStartPre=+/usr/bin/install {owner} {quote(path)} {quote(COPIES.format(unit=unit.name, name=name))}"
            for name, path in sorted(unit.copies.items())
        ]
    if unit.ruleset:
        lines.append(f"ExecStartPre=+{NFT} -f {quote(unit.ruleset)}")
    guard = f"{unit.python} -I {quote(unit.guard)}"
    if unit.cuda:
        count = f" --count {unit.gpus}" if unit.gpus else ""
        # "+": the device nodes are made by a setuid helper, which NoNewPrivileges would keep from working.
        lines.append(f"ExecStartPre=+{guard} devices{count} --timeout 60")
    lines += [
        f"ExecStart={' '.join(map(quote, unit.argv))}",
        f"ExecStartPost={guard} ready --url {quote(unit.health_url)} --port {unit.port} --pid $MAINPID",
        "ExecStartPost=+-/usr/bin/systemctl reset-failed %n",
        f"ExecStopPost=+-{guard} why",
        *([f"ExecStopPost=+-{NFT} delete table inet {table_name(unit.name)}"] if unit.ruleset else []),
        f"TimeoutStartSec={unit.load_timeout}",
        f"TimeoutStopSec={unit.stop_timeout}",
        "Restart=on-failure",
        f"RestartSec={RESTART_SECONDS}",
        "",
        *hardening(unit.cuda, unit.paths),
        *(["LimitMEMLOCK=infinity"] if unit.limit_memlock else []),
        *_filtered(unit.admitted),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    return "\n".join(lines)


def hardening(cuda: bool, paths: Sequence[str], families: str = "AF_INET AF_INET6 AF_UNIX") -> list[str]:
    """What keeps a server in its place; ``cuda`` leaves it the cards. ``paths`` are those that it goes through."""
    # What hides folders from the server must not hide what it uses there.
    home = "read-only" if any(path.startswith(("/home/", "/root/", "/run/user/")) for path in paths) else "yes"
    tmp = "no" if any(path.startswith(("/tmp/", "/var/tmp/")) for path in paths) else "yes"
    lines = [
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
        f"ProtectHome={home}",
        f"PrivateTmp={tmp}",
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelLogs=yes",
        "ProtectControlGroups=yes",
        "ProtectClock=yes",
        "ProtectHostname=yes",
        "ProtectProc=invisible",
        "LockPersonality=yes",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        f"RestrictAddressFamilies={families}",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        "SystemCallFilter=~@privileged",
        "SystemCallErrorNumber=EPERM",
        "RemoveIPC=yes",
        "KeyringMode=private",
        "UMask=0077",
        # A crash with 100 GiB of weights mapped would fill the disk.
        "LimitCORE=0",
        "DevicePolicy=closed",
    ]
    if cuda:
        # No PrivateDevices: it hides the cards. No MemoryDenyWriteExecute: the CUDA driver compiles kernels.
        lines += [f"DeviceAllow={device} rw" for device in NVIDIA_DEVICES]
    else:
        lines += ["PrivateDevices=yes", "MemoryDenyWriteExecute=yes"]
    return lines


def _filtered(admitted: Sequence[str] | None) -> list[str]:
    if admitted is None:
        return []
    return ["IPAddressDeny=any", "IPAddressAllow=localhost", *(f"IPAddressAllow={network}" for network in admitted)]
