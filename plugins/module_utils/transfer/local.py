# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Bytes that are already on the machine: sharing blocks, linking, appending, hashing a range."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..faults import FaultError
from .catalogue import fault
from .engine import Fetched, SourceFailed
from .sources import Source
from .store import remove

MIB = 1 << 20
#: linux/fs.h: share the blocks of another file, where the file system can.
_FICLONE = 0x40049409


def share_blocks(origin: int, target: int) -> bool:
    """Make one open file a copy of another that takes no room; false where the file system cannot."""
    try:
        fcntl.ioctl(target, _FICLONE, origin)
    except OSError:
        return False
    return True


def link_file(origin: Path, target: Path) -> str:
    """Give a file a second place without a second copy: C(clone), C(link), or C(copy) when neither can be done.

    A clone is preferred: it is a file of its own. A hard link is the same file, with the owner and mode it has.
    """
    remove(target)
    try:
        with origin.open("rb") as source, target.open("xb") as made:
            if share_blocks(source.fileno(), made.fileno()):
                os.fsync(made.fileno())
                return "clone"
        remove(target)
        os.link(origin, target)
    except OSError as exc:
        remove(target)
        if exc.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            return "copy"
        raise FaultError(
            fault(
                "dest_not_writable",
                str(target),
                f"cannot be linked to {origin}: {exc.strerror}",
                "Check the folder's owner and mode, and that the file system is not read-only.",
            )
        ) from exc
    return "link"


def append_file(
    source: Source,
    part: Path,
    base: int,
    size: int | None,
    progress: Callable[[int, int | None], None],
) -> Fetched:
    """A local file written into ``part`` from ``base`` on, hashed on the way."""
    digest = hashlib.sha256()
    done = 0
    try:
        origin = Path(source.path or "").open("rb", buffering=0)  # noqa: SIM115 - closed below
    except OSError as exc:
        raise SourceFailed(
            fault("source_missing", source.label, f"cannot be read: {exc.strerror}", "Check path and permissions.")
        ) from exc
    try:
        length = os.fstat(origin.fileno()).st_size
        if size is not None and length != size:
            raise SourceFailed(
                fault(
                    "size_mismatch",
                    source.label,
                    f"the file has {length} bytes, expected {size}",
                    "Check path and size.",
                )
            )
        buffer = memoryview(bytearray(4 * MIB))
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while count := origin.readinto(buffer):
                digest.update(buffer[:count])
                data = buffer[:count]
                while data:
                    written = os.pwrite(fd, data, base + done)
                    data = data[written:]
                    done += written
                progress(done, length)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        code = "disk_full" if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "dest_not_writable"
        raise FaultError(
            fault(code, str(part), f"cannot be written: {exc.strerror}", "Make room or check permissions.")
        ) from exc
    finally:
        origin.close()
    return Fetched(done, digest.hexdigest(), 0, 0, {})


def cut_off(path: Path, size: int) -> None:
    """Take away what stands behind ``size`` bytes, where there is a file."""
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)


def add_range(digest: Any, path: Path, start: int, size: int) -> None:
    """Go on with a hash over a range of a file."""
    buffer = memoryview(bytearray(4 * MIB))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < size:
            count = os.preadv(fd, [buffer[: min(len(buffer), size - done)]], start + done)
            if count == 0:
                raise OSError(errno.EIO, "the part is shorter than what was written")
            digest.update(buffer[:count])
            done += count
    finally:
        os.close(fd)
