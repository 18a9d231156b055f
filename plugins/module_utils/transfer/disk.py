# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The file system that models lie on: what kind it is, how fast it reads, what lies around on it that nobody needs."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..faults import Fault
from .catalogue import fault
from .store import FOLDER, read_json, write_json

MIB = 1 << 20
#: File systems that are reached over a network (their names in /proc/self/mountinfo).
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "9p", "afs")
#: The same in user space, behind ``fuse.``.
NETWORK_FUSE = ("sshfs", "glusterfs", "ceph", "s3fs", "rclone", "juicefs", "mfs")
#: The read test ends with the first of both.
TEST_SECONDS, TEST_BYTES = 2.0, 512 * MIB
#: Bytes a second that no rotating disk reads: a virtual disk that calls itself rotating, or many disks together.
NO_SINGLE_DISK = 400e6
#: What other programs leave of a download that did not end: huggingface_hub, aria2, wget-like tools, browsers.
_ORPHAN = re.compile(r".*\.(?:incomplete|aria2|crdownload)$|.*\.corrupt$|.*\.rejected$")


@dataclass(frozen=True)
class Storage:
    """``kind`` is C(rotating), C(network) or empty for neither or not known; ``detail`` says which, for people."""

    kind: str
    detail: str


def storage_of(folder: Path, root: Path = Path("/")) -> Storage:
    """What a folder lies on. ``root`` is where /proc and /sys are (for tests)."""
    try:
        device = folder.stat().st_dev
        text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Storage("", "")
    return judge_mount(text, f"{os.major(device)}:{os.minor(device)}", root)


def judge_mount(mountinfo: str, device: str, root: Path = Path("/")) -> Storage:
    """The same for a device as C(major:minor) and the text of mountinfo (proc_pid_mountinfo(5))."""
    for line in mountinfo.splitlines():
        fields = line.split()
        if len(fields) < 7 or fields[2] != device or "-" not in fields:
            continue
        kind, source = fields[fields.index("-") + 1 :][:2]
        if kind in NETWORK or kind.removeprefix("fuse.") in NETWORK_FUSE:
            return Storage("network", f"{kind} from {source}")
        break
    disks = _disks(root / "sys/dev/block" / device)
    turning = [disk for disk in disks if _read(disk / "queue/rotational") == "1"]
    if turning:
        return Storage("rotating", ", ".join(sorted(f"/dev/{disk.name}" for disk in turning)))
    return Storage("", "")


def _disks(block: Path, depth: int = 0) -> list[Path]:
    """The whole disks below a block device: a partition's parent, the members of LVM, RAID and encryption."""
    try:
        here = block.resolve(strict=True)
    except OSError:
        return []
    if (here / "partition").exists():
        here = here.parent
    try:
        members = sorted((here / "slaves").iterdir())
    except OSError:
        members = []
    if members and depth < 8:
        return [disk for member in members for disk in _disks(member, depth + 1)]
    return [here]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def read_rate(path: Path, now: Callable[[], float] = time.monotonic) -> float | None:
    """Bytes a second that a file is read with, not from memory; null where too little could be read to tell."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        # From the middle on: the beginning may still be in memory, where the download has just been.
        start = max(0, (size - TEST_BYTES) // 2 // MIB * MIB)
        os.fdatasync(fd)
        os.posix_fadvise(fd, start, TEST_BYTES, os.POSIX_FADV_DONTNEED)
        buffer = memoryview(bytearray(4 * MIB))
        begun, done = now(), 0
        while done < TEST_BYTES and now() - begun < TEST_SECONDS:
            count = os.preadv(fd, [buffer], start + done)
            if count == 0:
                break
            done += count
        seconds = now() - begun
        return done / seconds if done >= MIB and seconds > 0 else None
    except OSError:
        return None
    finally:
        os.close(fd)


def slow_storage(storage: Storage, folder: Path, size: int, rate: float | None) -> Fault | None:
    """A warning for storage that makes loading slow; ``size`` of the model in bytes, ``rate`` in bytes a second."""
    if not storage.kind or (storage.kind == "rotating" and rate is not None and rate > NO_SINGLE_DISK):
        return None
    what = "a rotating disk" if storage.kind == "rotating" else "a network file system"
    expect = "how fast it reads is not known"
    if rate:
        expect = f"it reads {rate / 1e6:.0f} MB/s, so {size / 1e9:.1f} GB take about {_duration(size / rate)} to load"
    return fault(
        "slow_storage",
        str(folder),
        f"lies on {what} ({storage.detail}); {expect}",
        "A local SSD loads in a fraction of that.",
    )


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def storage_warning(folder: Path, largest: Path, size: int, measure: bool) -> Fault | None:
    """What is slow about the storage of a model; null when nothing is.

    The rate is measured where ``measure`` allows it, on the largest file, and kept for runs that may not.
    """
    storage = storage_of(folder)
    if not storage.kind:
        return None
    record = folder / FOLDER / "storage.json"
    kept = read_json(record) or {}
    rate = kept.get("rate") if kept.get("detail") == storage.detail else None
    if measure and rate is None:
        rate = read_rate(largest)
        if rate is not None:
            with contextlib.suppress(OSError):
                write_json(record, {"rate": rate, "detail": storage.detail, "when": time.time()})
    return slow_storage(storage, folder, size, rate if isinstance(rate, (int, float)) else None)


@dataclass(frozen=True)
class Orphan:
    """A file that no run needs; ``size`` is what it takes on the disk, in bytes."""

    path: Path
    size: int


def find_orphans(folders: Iterable[Path]) -> list[Orphan]:
    """What unfinished or refused downloads have left in folders, their own subfolders included; largest first."""
    found: dict[Path, int] = {}
    for folder in folders:
        places = [folder, folder / FOLDER]
        # What `hf download --local-dir` has there.
        places += [Path(place) for place, _, _ in os.walk(folder / ".cache" / "huggingface")]
        for path in (Path(place, name) for place in places for name in _names(place) if _ORPHAN.fullmatch(name)):
            try:
                found[path] = path.stat().st_blocks * 512
            except OSError:
                continue
    return sorted((Orphan(path, size) for path, size in found.items()), key=lambda o: (-o.size, str(o.path)))
