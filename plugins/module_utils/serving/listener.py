# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Who listens on a TCP port, from /proc alone.

The kernel's socket tables (/proc/net/tcp, tcp6) give address, port and socket inode; /proc/PID/fd tells which process
holds that inode, /proc/PID/comm its name and /proc/PID/cgroup its systemd unit. Other users' processes are visible to
root only; where a process cannot be seen its fields are null, the listener itself is still reported.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..addresses import address_of
from ..machine import Machine

#: State of a listening socket in /proc/net/tcp (TCP_LISTEN in the kernel's include/net/tcp_states.h).
_LISTEN = "0A"
_UNIT = re.compile(r"[^/]+\.(?:service|socket|scope)$")


@dataclass(frozen=True)
class Listener:
    """One listening TCP socket.

    ``address`` is in its usual form (``0.0.0.0``, ``::``). ``pid`` and ``program`` are null where the process cannot
    be seen (another user's process, or one of another PID namespace), ``unit`` also where no systemd unit runs it.
    """

    address: str
    port: int
    pid: int | None = None
    program: str | None = None
    unit: str | None = None

    @property
    def owner(self) -> str:
        """The process in words, for messages."""
        if self.pid is None:
            return "a process that cannot be seen from here"
        name = f"{self.program or 'a process'} (pid {self.pid}"
        return f"{name}, unit {self.unit})" if self.unit else f"{name})"


def listeners(machine: Machine, port: int | None = None) -> list[Listener]:
    """Listening TCP sockets of ``machine``, all or those of one port, ordered by port and address."""
    sockets = [
        entry
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for entry in _listening(machine.read(table) or "")
        if port is None or entry[1] == port
    ]
    pids = _holders(machine, {inode for _, _, inode in sockets})
    found = set()
    for address, number, inode in sockets:
        pid = pids.get(inode)
        if pid is None:
            found.add(Listener(address, number))
        else:
            comm = machine.read(f"/proc/{pid}/comm")
            found.add(Listener(address, number, pid, comm.strip() if comm else None, unit_of(machine, pid)))
    return sorted(found, key=lambda item: (item.port, item.address, item.pid or 0))


def in_the_way(found: Iterable[Listener], host: str) -> list[Listener]:
    """Those listeners that keep a server from binding to ``host`` on their port.

    A wildcard address on either side collides with every address of its family; ``::`` also takes IPv4, unless its
    owner said otherwise, which /proc does not show. A host name collides with all: what it resolves to is not known
    here.
    """
    wanted = address_of(host)
    if wanted is None:
        return list(found)
    hits = []
    for listener in found:
        have = ipaddress.ip_address(listener.address)
        same_family = have.version == wanted.version or 6 in (v.version for v in (have, wanted) if v.is_unspecified)
        if have == wanted or (same_family and (have.is_unspecified or wanted.is_unspecified)):
            hits.append(listener)
    return hits


def foreign(machine: Machine, port: int, pid: int | None) -> tuple[str, str] | None:
    """Address and holder of a port on which another program than the service (main process ``pid``) listens, ready for
    a fault; null where the service has it, or nobody."""
    holders = [item for item in listeners(machine, port) if item.pid is not None]
    if not holders or any(item.pid == pid for item in holders):
        return None
    service = f"the service is pid {pid}" if pid else "the service does not run"
    return f"{holders[0].address}:{port}", f"held by {holders[0].owner}; {service}"


def unit_of(machine: Machine, pid: int) -> str | None:
    """The systemd unit of a process, from its control group; null where there is none."""
    for line in (machine.read(f"/proc/{pid}/cgroup") or "").splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        # cgroup v2 has an empty controller field; hybrid hosts keep systemd's own tree under this name.
        if controllers in ("", "name=systemd"):
            units = [part for part in path.split("/") if _UNIT.match(part)]
            if units:
                return units[-1]
    return None


def _listening(table: str) -> list[tuple[str, int, str]]:
    """(address, port, inode) of each listening socket in the text of /proc/net/tcp or tcp6."""
    rows = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTEN:
            continue
        address, _, port = fields[1].partition(":")
        rows.append((_address(address), int(port, 16), fields[9]))
    return rows


def _address(text: str) -> str:
    """The kernel prints an address as 32-bit words in the machine's byte order (little-endian here and on Power LE)."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _holders(machine: Machine, inodes: set[str]) -> dict[str, int]:
    """Which process holds each socket inode. The lowest pid wins: a parent that hands its socket to children."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    held: dict[str, int] = {}
    if not wanted:
        return held
    for pid in sorted(int(name) for name in machine.listdir("/proc") if name.isdigit()):
        folder = f"/proc/{pid}/fd"
        for name in machine.listdir(folder):
            try:
                target = str(machine.path(f"{folder}/{name}").readlink())
            except OSError:
                continue
            if target in wanted:
                held.setdefault(wanted[target], pid)
    return held
