# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Who holds the locks of apt and dpkg. They are asked about (F_GETLK), never taken, so nobody is held up by asking."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import dataclass

from ..faults import Catalogue, Fault, FaultKind
from ..machine import Machine

FAULTS = Catalogue(
    "locks (apt_locks)",
    (
        FaultKind(
            "apt_locked",
            "critical",
            "Another program holds a lock of apt or dpkg for longer than was to be waited.",
            "/var/lib/dpkg/lock-frontend: is held by unattended-upgr (pid 1234) for more than 600 s",
        ),
    ),
)

PATHS = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
)
#: struct flock of Linux on 64-bit machines: type, whence, start, length, pid.
_FLOCK = "hhqqi"
PAUSE_S = 2.0


@dataclass(frozen=True)
class Holder:
    """``pid`` is null where the lock belongs to a process of another namespace."""

    path: str
    pid: int | None
    program: str | None

    @property
    def words(self) -> str:
        return f"{self.program or 'another program'}{f' (pid {self.pid})' if self.pid else ''}"


def holders(machine: Machine) -> list[Holder]:
    """The locks that are held now."""
    found = []
    for path in PATHS:
        try:
            handle = os.open(machine.path(path), os.O_RDONLY)
        except OSError:
            # Made by the first program that takes it.
            continue
        try:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(handle, fcntl.F_GETLK, asked))
        finally:
            os.close(handle)
        if kind != fcntl.F_UNLCK:
            name = (machine.read(f"/proc/{pid}/comm") or "").strip() if pid > 0 else ""
            found.append(Holder(path, pid if pid > 0 else None, name or None))
    return found


def wait(machine: Machine, seconds: float, pause: float = PAUSE_S) -> tuple[list[Holder], list[Fault], float]:
    """Wait until no lock is held. Returns who held one when it was first looked at, faults, and the seconds waited."""
    begun = time.monotonic()
    first = now = holders(machine)
    while now and time.monotonic() - begun < seconds:
        time.sleep(min(pause, max(0.0, seconds - (time.monotonic() - begun))))
        now = holders(machine)
    waited = time.monotonic() - begun if first else 0.0
    faults = [
        FAULTS.fault(
            "apt_locked",
            holder.path,
            f"is held by {holder.words} for more than {seconds:.0f} s",
            f"See what it does: systemctl status {holder.pid}" if holder.pid else "See: fuser -v " + holder.path,
        )
        for holder in now
    ]
    return first, faults, waited
