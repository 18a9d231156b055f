# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether a process works with the files that are on the disk, or still with ones that were replaced since.

A file that is replaced (a new one under its name) lives on for a process that has mapped it. The kernel's table
/proc/PID/maps gives device, inode and path of each mapping; the path follows a rename, and ends in " (deleted)" where
the file has no name any more. Its device numbers differ from stat's on btrfs and overlayfs, so what is on the disk is
mapped here and looked up in our own table.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from ..gguf.shards import shard_name

#: Device ("fd:00") and inode as /proc/PID/maps shows them.
Identity = tuple[str, str]


def all_shards(model: str) -> list[str]:
    """The files of a model by the path of its first."""
    named = shard_name(model)
    return named.all if named else [model]


def outdated(pid: int, paths: Sequence[str]) -> list[str]:
    """Those of ``paths`` of which the process has another file mapped than the one there now.

    A file that is not mapped at all says nothing: a model on GPUs is unmapped again after loading.
    """
    # An input may be a link; a mapping has the path of the file itself.
    real = {path: os.path.realpath(path) for path in paths}
    mapped = _mappings(str(pid))
    found = []
    for path, name in real.items():
        # Role model sets a broken file aside as NAME.corrupt.
        held = {
            identity for identity, at in mapped if at in (name, f"{name} (deleted)") or at.startswith(f"{name}.corrupt")
        }
        if held:
            now = _identity(name)
            if now is not None and held != {now}:
                found.append(path)
    return found


def _mappings(pid: str) -> set[tuple[Identity, str]]:
    """The files a process has mapped; empty where that may not be read or there is no such process."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            # address permissions offset device inode path; the path may hold spaces.
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[4] != "0":
                found.add(((fields[3], fields[4]), fields[5]))
    return found


def _identity(path: str) -> Identity | None:
    """What a mapping of the file on the disk looks like; null where it cannot be mapped."""
    # ValueError: an empty file.
    with (
        contextlib.suppress(OSError, ValueError),
        Path(path).open("rb") as file,
        mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ),
    ):
        return next((identity for identity, at in _mappings("self") if at == path), None)
    return None
