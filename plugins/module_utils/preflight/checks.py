# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The questions asked of a machine before anything is changed on it. Nothing here changes anything.

Sizes are MiB (2**20 bytes). What cannot be found out is null.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..faults import Fault
from ..machine import Machine
from ..serving.listener import in_the_way, listeners
from .catalogue import CATALOGUE

MIB = 2**20

SYSTEM_PYTHON = "/usr/bin/python3"

#: What the collection's modules are written for.
OLDEST_PYTHON = (3, 10)

#: dpkg's states of a package whose installation began and did not end (dpkg(1), "Package states").
_UNFINISHED = ("half-installed", "unpacked", "half-configured", "triggers-awaited", "triggers-pending")


@dataclass(frozen=True)
class DiskWant:
    """What a folder is to hold.

    ``path`` is absolute. ``size_mib`` is what will lie in it in the end: what lies there now counts, so that a second
    run does not ask for the same space again. ``free_mib`` is to stay free on its file system besides.
    """

    path: str
    size_mib: int = 0
    free_mib: int = 0


@dataclass(frozen=True)
class PortWant:
    """A TCP port that a service is to listen on; ``unit`` is the systemd unit that may hold it already."""

    port: int
    address: str = "127.0.0.1"
    unit: str | None = None


@dataclass
class Findings:
    """Facts by name, as the module returns them, and faults in the order they were found."""

    facts: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def fault(self, code: str, subject: str, message: str, remedy: str) -> None:
        self.faults.append(CATALOGUE.fault(code, subject, message, remedy))


def refused(disks: Iterable[DiskWant], ports: Iterable[PortWant]) -> list[str]:
    """What is wrong with the questions themselves, in words; empty when all can be asked."""
    said = [f"disk_space: path {want.path!r} is not absolute" for want in disks if not want.path.startswith("/")]
    said += [
        f"disk_space: sizes of {want.path} are MiB and not below 0"
        for want in disks
        if min(want.size_mib, want.free_mib) < 0
    ]
    said += [f"ports: {want.port} is no port; write 1 to 65535" for want in ports if not 1 <= want.port <= 65535]
    return said


def check_system(machine: Machine, found: Findings, supported: Sequence[str], architectures: Sequence[str]) -> None:
    """Distribution, architecture, init, package manager. ``supported`` has ``ID-VERSION_ID`` of os-release."""
    release = _os_release(machine)
    name = f"{release['ID']}-{release['VERSION_ID']}" if {"ID", "VERSION_ID"} <= release.keys() else None
    found.facts["os"] = {
        "id": release.get("ID"),
        "version": release.get("VERSION_ID"),
        "name": release.get("PRETTY_NAME"),
    }
    if name not in supported:
        found.fault(
            "os_unsupported",
            name or "/etc/os-release",
            f"this is {release.get('PRETTY_NAME', 'an unknown system')} ({name}); supported: {', '.join(supported)}",
            "use a supported release; to try another one all the same, add it to supported_os",
        )
    uname = machine.run(["uname", "-m"])
    architecture = uname.stdout.strip() if uname.ok else None
    found.facts["architecture"] = architecture
    if architecture not in architectures:
        found.fault(
            "processor_unsupported",
            architecture or "uname -m",
            f"the machine is {architecture or 'of an unknown architecture'}; supported: {', '.join(architectures)}",
            "use a supported machine",
        )
    init = (machine.read("/proc/1/comm") or "").strip() or None
    found.facts["init"] = init
    if init != "systemd":
        found.fault(
            "init_not_systemd",
            "process 1",
            f"process 1 is {init or 'unknown'}",
            "boot the machine (or start the container) with systemd as its first process",
        )


def check_packages(machine: Machine, found: Findings) -> None:
    """apt and dpkg are there and have finished what they began."""
    for program in ("/usr/bin/apt-get", "/usr/bin/dpkg"):
        if not machine.exists(program):
            found.fault("apt_missing", program, f"{program} does not exist", "use an apt-based system")
    unfinished = _unfinished_packages(machine.read("/var/lib/dpkg/status") or "")
    # Numbered files are dpkg's journal; they remain when it was killed.
    journal = [name for name in machine.listdir("/var/lib/dpkg/updates") if name.isdigit()]
    found.facts["unfinished_packages"] = [f"{name} ({state})" for name, state in unfinished]
    if unfinished or journal:
        states: dict[str, list[str]] = {}
        for name, state in unfinished:
            states.setdefault(state, []).append(name)
        message = "; ".join(f"{state}: {', '.join(names)}" for state, names in states.items())
        found.fault(
            "dpkg_unfinished",
            "dpkg",
            message or "dpkg was interrupted while it installed packages",
            "run: dpkg --configure -a && apt-get --fix-broken install",
        )


def check_memory(machine: Machine, found: Findings, least_mib: int) -> None:
    """MemTotal is what the kernel has to hand out: 2 to 4 percent less than what is plugged in."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", machine.read("/proc/meminfo") or "", re.MULTILINE)
    total = int(match.group(1)) // 1024 if match else None
    found.facts["memory_mib"] = total
    if total is None or total < least_mib:
        found.fault(
            "memory_short",
            "memory",
            f"{'an unknown amount' if total is None else f'{total} MiB'}, {least_mib} MiB are needed",
            "add memory, or lower min_memory_mib if less is known to do",
        )


def check_disks(machine: Machine, found: Findings, wants: Iterable[DiskWant]) -> None:
    """Room for all that is still to come, file system by file system."""
    wants = list(wants)
    parents = {want.path: _existing_parent(machine, want.path) for want in wants}
    systems = _file_systems(machine, list(dict.fromkeys(parents.values())))
    report: dict[str, dict[str, Any]] = {}
    for want in wants:
        system = systems.get(parents[want.path])
        if system is None:
            found.fault(
                "disk_unknown",
                want.path,
                f"df gave no answer for {parents[want.path]}",
                f"see why `df {parents[want.path]}` fails or hangs there; a network file system may be away",
            )
            continue
        missing = max(0, want.size_mib - _used_mib(machine, want.path)) if want.size_mib else 0
        entry = report.setdefault(
            system.key,
            {"mount": system.mount, "source": system.source, "available_mib": system.available_mib, "paths": []},
        )
        entry["paths"].append({"path": want.path, "need_mib": missing + want.free_mib})
    found.facts["disks"] = list(report.values())
    for entry in report.values():
        entry["need_mib"] = sum(part["need_mib"] for part in entry["paths"])
        if entry["available_mib"] < entry["need_mib"]:
            parts = ", ".join(f"{part['need_mib']} MiB for {part['path']}" for part in entry["paths"])
            found.fault(
                "disk_short",
                entry["mount"],
                f"{entry['mount']} ({entry['source']}) has {entry['available_mib']} MiB free, "
                f"{entry['need_mib']} MiB are needed: {parts}",
                "free space there, or name folders on a larger file system",
            )


def check_ports(machine: Machine, found: Findings, wants: Iterable[PortWant]) -> None:
    """Nobody else listens where a service is to listen; its own unit may."""
    wants = list(wants)
    heard = listeners(machine) if wants else []
    found.facts["ports"] = []
    for want in wants:
        holders = in_the_way([item for item in heard if item.port == want.port], want.address)
        found.facts["ports"].append(
            {"port": want.port, "address": want.address, "holders": [item.owner for item in holders]}
        )
        strangers = [item for item in holders if want.unit is None or item.unit != want.unit]
        if strangers:
            owners = ", ".join(dict.fromkeys(item.owner for item in strangers))
            found.fault(
                "port_taken",
                f"{want.address}:{want.port}",
                f"{want.address}:{want.port} is taken by {owners}",
                "stop that program, or give the service another port",
            )


def check_python(machine: Machine, found: Findings) -> None:
    """The interpreter that Ansible uses, and the system's own. Of a capture only the latter can be told."""
    if machine.is_capture:
        found.facts["python"] = {"interpreter": None, "version": None, "system_version": _system_python(machine)}
    else:
        interpreter = sys.executable
        own = Path(interpreter).resolve() == Path(SYSTEM_PYTHON).resolve() and sys.prefix == sys.base_prefix
        version = ".".join(str(part) for part in sys.version_info[:3])
        found.facts["python"] = {
            "interpreter": interpreter,
            "version": version,
            "system_version": version if own else _system_python(machine),
        }
        if not own:
            found.fault(
                "python_not_system",
                interpreter,
                f"the interpreter is {interpreter} (Python {version}), not the system's",
                f"set ansible_python_interpreter: {SYSTEM_PYTHON} for this host",
            )
    system = found.facts["python"]["system_version"]
    if system is None or tuple(int(part) for part in system.split(".")[:2]) < OLDEST_PYTHON:
        wanted = ".".join(str(part) for part in OLDEST_PYTHON)
        found.fault(
            "system_python_too_old",
            SYSTEM_PYTHON,
            f"{SYSTEM_PYTHON} is {f'Python {system}' if system else 'missing or does not run'}; "
            f"{wanted} or newer is needed",
            "use a release that brings it (Ubuntu 22.04, Debian 12 or newer)",
        )


def check_clock(machine: Machine, found: Findings, reference: float | None, limit_s: float) -> None:
    """Against the controller's clock, given as ``reference`` (epoch seconds). A capture has no clock."""
    found.facts["clock_offset_s"] = None
    if reference is None or machine.is_capture:
        return
    offset = round(time.time() - reference, 1)
    found.facts["clock_offset_s"] = offset
    if abs(offset) > limit_s:
        found.fault(
            "clock_wrong",
            "clock",
            f"the clock is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} the controller's",
            "see which of the two is wrong (`timedatectl`) and let it keep time (systemd-timesyncd, chrony)",
        )


@dataclass(frozen=True)
class _FileSystem:
    source: str
    mount: str
    available_mib: int

    @property
    def key(self) -> str:
        """One device mounted twice (bind mounts, subvolumes) has its free space once."""
        return self.source if self.source.startswith("/") else self.mount


def _file_systems(machine: Machine, paths: Sequence[str]) -> dict[str, _FileSystem]:
    """The file system of each path. One ``df`` a path: where one hangs the others still answer."""
    found = {}
    for path in paths:
        answer = machine.run(["df", "-P", "-k", path])
        rows = answer.stdout.splitlines()[1:] if answer.ok else []
        # Filesystem 1024-blocks Used Available Capacity Mounted-on; a mount point may hold blanks.
        fields = rows[0].split(None, 5) if rows else []
        if len(fields) == 6 and fields[3].isdigit():
            found[path] = _FileSystem(fields[0], fields[5], int(fields[3]) // 1024)
    return found


def _existing_parent(machine: Machine, path: str) -> str:
    folder = Path(path)
    while str(folder) != "/" and not machine.exists(str(folder)):
        folder = folder.parent
    return str(folder)


def _used_mib(machine: Machine, path: str) -> int:
    """What a folder holds, in blocks on the disk: a sparse partial file counts for what was written of it."""
    blocks = 0
    seen = set()
    for folder, _folders, files in os.walk(machine.path(path)):
        for name in files:
            try:
                info = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - a walk over thousands of files
            except OSError:
                continue
            if (info.st_dev, info.st_ino) not in seen:
                seen.add((info.st_dev, info.st_ino))
                blocks += info.st_blocks
    return blocks * 512 // MIB


def _os_release(machine: Machine) -> dict[str, str]:
    text = machine.read("/etc/os-release") or machine.read("/usr/lib/os-release") or ""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, value in pairs}


def _unfinished_packages(status: str) -> list[tuple[str, str]]:
    """(package, state) from dpkg's status file where an installation began and did not end."""
    found = []
    name = ""
    for line in status.splitlines():
        if line.startswith("Package: "):
            name = line[9:].strip()
        elif line.startswith("Status: "):
            state = line.split()[-1]
            if state in _UNFINISHED:
                found.append((name, state))
    return found


def _system_python(machine: Machine) -> str | None:
    answer = machine.run([SYSTEM_PYTHON, "--version"])
    match = re.match(r"Python (\d+\.\d+\.\d+)", answer.stdout or answer.stderr)
    return match.group(1) if match else None
