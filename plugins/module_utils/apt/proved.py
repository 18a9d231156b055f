# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A simulation that was judged good need not run again while nothing that it depends on is other than it was then.

What it depends on is read anew each time: the question itself, apt's configuration and sources, its package lists, and
what is installed and held. A run that was killed or found something leaves no record, so that the next one runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ..files import replace_file
from ..machine import Machine
from .policy import Policy
from .sources import LISTS
from .transaction import Request

CONFIGURATION = "/etc/apt"
STATES = ("/var/lib/dpkg/status", "/var/lib/apt/extended_states")


def fingerprint(system: Machine, request: Request, policy: Policy) -> str:
    """SHA-256 over all that a simulation depends on.

    Configuration and states count by their content; package lists, some 100 MB, by name, size and time of change.
    """
    digest = hashlib.sha256()
    for asked in (request, policy):
        public = [field.name for field in dataclasses.fields(asked) if not field.name.startswith("_")]
        digest.update(json.dumps({name: getattr(asked, name) for name in public}, sort_keys=True).encode())
    for path in _files(system.path(CONFIGURATION)):
        digest.update(f"\0{path}\0".encode(errors="surrogateescape"))
        digest.update(_content(path))
    for state in STATES:
        digest.update(b"\0" + _content(system.path(state)))
    for path in _files(system.path(LISTS)):
        try:
            found = path.stat()
        except OSError:
            continue
        digest.update(f"\0{path}\0{found.st_size}\0{found.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def holds(record: Path, value: str) -> bool:
    """Whether the record says that this was judged good."""
    try:
        return bool(json.loads(record.read_text(encoding="utf-8"))["fingerprint"] == value)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def keep(record: Path, value: str) -> None:
    """Where it cannot be written there is none, and the next run simulates again."""
    with contextlib.suppress(OSError):
        record.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(record, (json.dumps({"fingerprint": value}) + "\n").encode())


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names) if name != "lock")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
