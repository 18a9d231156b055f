# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Brings a local GGUF into Ollama's store, without a second copy where that can be done.

A clone (a file of its own that shares the blocks) is best, where the file system makes them. A hard link is the same
file under two names: it takes the owner and the mode that Ollama needs of it, and whoever writes into the one writes
into the other. So a file is linked only where root or the store's own user owns it and nobody else may write it, and
its time, by which model delivery knows it as proved, is set back after Ollama has changed it. Model delivery never
writes into a finished file: it puts another in its place, and the store's name keeps the former bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ..files import sync_folder
from ..transfer.local import share_blocks
from ..transfer.store import remove
from .store import Store

#: What Ollama gives its blobs (manifest/layer.go).
MODE = 0o644


@dataclass(frozen=True)
class Placed:
    """``how``: C(clone), C(link), or empty where the file must be sent through the API, then ``why``."""

    how: str = ""
    why: str = ""


def place(origin: Path, store: Store, sha256: str) -> Placed:
    """Give a file its place in the store. OSError only for what sending it would meet as well (a full disk)."""
    blob = store.blob(sha256)
    try:
        owner = store.blobs.stat()
        there = origin.stat()
    except OSError as exc:
        return Placed(why=f"{exc.filename}: {exc.strerror}")
    try:
        partial = store.own_folder() / f"{blob.name}.clone"
        remove(partial)
    except OSError as exc:
        return Placed(why=f"the store is its owner's to write ({exc.strerror})")
    try:
        with origin.open("rb") as source, partial.open("xb") as made:
            cloned = share_blocks(source.fileno(), made.fileno())
            if cloned:
                os.fchmod(made.fileno(), MODE)
                os.fchown(made.fileno(), owner.st_uid, owner.st_gid)
                os.fsync(made.fileno())
        if cloned:
            partial.replace(blob)
            sync_folder(store.blobs)
            return Placed("clone")
    except PermissionError as exc:
        return Placed(why=f"the store is its owner's to write ({exc.strerror})")
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return Placed(why=f"{exc.filename or partial}: {exc.strerror}")
    finally:
        remove(partial)
    refused = _not_to_link(origin, there, owner)
    if refused:
        return Placed(why=refused)
    try:
        os.link(origin, blob)
    except OSError as exc:
        words = "the file lies on another file system" if exc.errno == errno.EXDEV else str(exc.strerror)
        return Placed(why=words)
    try:
        os.chown(blob, owner.st_uid, owner.st_gid)
        blob.chmod(MODE)
    except OSError as exc:
        remove(blob)
        return Placed(why=f"the file cannot be given to the store's user ({exc.strerror})")
    sync_folder(store.blobs)
    return Placed("link")


def _not_to_link(origin: Path, there: os.stat_result, owner: os.stat_result) -> str:
    """Why a file is not to be shared by a hard link; empty where it may be."""
    if origin.is_symlink():
        return "it is a symbolic link"
    if there.st_uid not in (0, owner.st_uid):
        return f"it belongs to another user (uid {there.st_uid}), who may change it"
    if there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others than its owner may write it"
    return ""


def keep_time(path: Path, before: os.stat_result) -> None:
    """Set back the time that Ollama has given a blob, which is the time of the linked file as well."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
