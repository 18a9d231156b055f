# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a download keeps on disk beside the file itself.

For a destination ``/srv/models/m/a.gguf``::

    /srv/models/m/a.gguf.part                 bytes so far, written in place
    /srv/models/m/.volta-transfer/a.gguf.state.json     which bytes those are, and of what
    /srv/models/m/.volta-transfer/a.gguf.stamp.json     the finished file: size, mtime, inode, SHA-256, when
    /srv/models/m/.volta-transfer/a.gguf.lock           held (flock) by whoever works on it
    /srv/models/m/.volta-transfer/a.gguf.progress.json  that run's progress, for one that waits
    /srv/models/m/.volta-transfer/a.gguf.rejected       whole, but with another SHA-256 than asked for
    /srv/models/m/.volta-transfer/a.gguf.probe           empty, for a moment: whether owner and mode can be given
    /srv/models/m/.volta-transfer/a.gguf.linked         a hard link to a store's blob, for a moment
    /srv/models/m/.volta-transfer/a.gguf.incoming       bytes so far from the control node

A file that comes in raw parts (``a.gguf.a``, ``a.gguf.b``) has one ``.part``, and a state file for each of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = ".volta-transfer"


@dataclass(frozen=True)
class Places:
    """Where the parts of one download lie."""

    dest: Path

    @property
    def part(self) -> Path:
        return self.dest.with_name(self.dest.name + ".part")

    @property
    def folder(self) -> Path:
        return self.dest.parent / FOLDER

    def _own(self, ending: str) -> Path:
        return self.folder / f"{self.dest.name}.{ending}"

    @property
    def state(self) -> Path:
        return self._own("state.json")

    @property
    def stamp(self) -> Path:
        return self._own("stamp.json")

    @property
    def lock(self) -> Path:
        return self._own("lock")

    @property
    def progress(self) -> Path:
        return self._own("progress.json")

    @property
    def rejected(self) -> Path:
        return self._own("rejected")

    @property
    def probe(self) -> Path:
        """Empty, for a moment: what can be done with it can be done with the file."""
        return self._own("probe")

    @property
    def linked(self) -> Path:
        """Never ``.part``: what is written there must not reach a store's own blob."""
        return self._own("linked")

    @property
    def incoming(self) -> Path:
        return self._own("incoming")

    @property
    def corrupt(self) -> Path:
        """Where a file goes that was under the final name and turned out wrong."""
        return self.dest.with_name(self.dest.name + ".corrupt")


@dataclass(frozen=True)
class PartPlaces(Places):
    """A raw part: it has a state of its own and lies within the ``.part`` of the whole file."""

    whole: Places | None = None

    @property
    def part(self) -> Path:
        return self.whole.part if self.whole is not None else super().part


def write_json(path: Path, content: dict[str, Any], durable: bool = False) -> None:
    """Replace a small file in one step."""
    partial = path.with_name(path.name + ".new")
    with partial.open("w", encoding="utf-8") as handle:
        json.dump(content, handle)
        if durable:
            handle.flush()
            os.fsync(handle.fileno())
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; null where there is none or it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Stamp:
    """Proof that a file was hashed and is untouched since: size and mtime (ns) and inode still hold.

    ``sha256`` is what its bytes had, ``when`` (epoch seconds) when they were hashed, ``source`` where they came from,
    ``proved`` by what they were proved then: C(sha256), C(source) or empty (see deliver.Delivered).
    """

    size: int
    mtime_ns: int
    inode: int
    sha256: str
    when: float
    source: str = ""
    proved: str = ""

    @classmethod
    def of(cls, stat: os.stat_result, sha256: str, source: str, proved: str = "") -> Stamp:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino, sha256, time.time(), source, proved)

    def fits(self, stat: os.stat_result) -> bool:
        return (self.size, self.mtime_ns, self.inode) == (stat.st_size, stat.st_mtime_ns, stat.st_ino)

    def write(self, path: Path) -> None:
        write_json(path, asdict(self), durable=True)


def read_stamp(path: Path) -> Stamp | None:
    content = read_json(path)
    try:
        return Stamp(**content) if content else None
    except TypeError:
        return None


@dataclass
class Ranges:
    """A set of byte offsets as sorted, disjoint, half-open ranges."""

    items: list[tuple[int, int]] = field(default_factory=list)

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        merged: list[tuple[int, int]] = []
        for low, high in self.items:
            if high < start or low > end:
                merged.append((low, high))
            else:
                start, end = min(low, start), max(high, end)
        merged.append((start, end))
        self.items = sorted(merged)

    @property
    def front(self) -> int:
        """How far it reaches from 0 without a gap."""
        return self.items[0][1] if self.items and self.items[0][0] == 0 else 0

    def cut(self, end: int) -> None:
        """Forget what lies at ``end`` and behind it."""
        self.items = [(low, min(high, end)) for low, high in self.items if low < end]

    @property
    def end(self) -> int:
        """Where the last range ends; 0 when there is none."""
        return self.items[-1][1] if self.items else 0

    @property
    def total(self) -> int:
        return sum(high - low for low, high in self.items)

    def gaps(self, end: int) -> Iterator[tuple[int, int]]:
        """What is missing below ``end``, in order."""
        at = 0
        for low, high in self.items:
            if at < low:
                yield at, min(low, end)
            at = max(at, high)
            if at >= end:
                return
        if at < end:
            yield at, end


@dataclass
class State:
    """What ``.part`` holds.

    ``done`` are the ranges written (they outlive a killed process), ``durable`` those known to be on the disk itself
    (they outlive a power cut: after another boot only they count). ``sha256`` is the expected hash, ``etag`` the
    version at ``source``.
    """

    size: int | None = None
    sha256: str | None = None
    source: str = ""
    etag: str = ""
    boot: str = ""
    done: Ranges = field(default_factory=Ranges)
    durable: Ranges = field(default_factory=Ranges)

    def write(self, path: Path) -> None:
        content = asdict(self)
        content["done"], content["durable"] = self.done.items, self.durable.items
        write_json(path, content)

    @classmethod
    def read(cls, path: Path) -> State | None:
        content = read_json(path)
        if content is None:
            return None
        try:
            for key in ("done", "durable"):
                content[key] = Ranges([(int(low), int(high)) for low, high in content[key]])
            state = cls(**content)
        except (TypeError, ValueError, KeyError):
            return None
        if state.boot != boot_id():
            state.done = Ranges(list(state.durable.items))
        return state


class Lock:
    """One run at a time for one destination; the kernel frees it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, waiting: Callable[[], None], pause: float = 0.5) -> bool:
        """Take the lock, calling ``waiting`` while another process has it; true if it had to wait."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        waited = False
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waited = True
                    waiting()
                    time.sleep(pause)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return waited

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
