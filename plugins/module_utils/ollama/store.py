# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ollama's models on the disk: manifests, blobs, what unfinished pulls left; and what was proved of them.

Layout as in transfer/ollama_store.py. Proofs are the stamps of model delivery (transfer/store.py), in a folder
C(.volta-transfer) among the blobs, which Ollama passes over: its clean-up looks at files only (server/images.go).

Ollama hashes a blob once, when it has come, and never again; one that is there already it does not even look at. It
sets the time of a blob anew when a model is created from it (manifest/layer.go, touchLayer): that voids a stamp, and
costs a reading.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..faults import FaultError
from ..transfer.deliver import read_hash
from ..transfer.ollama_store import MODEL_LAYER
from ..transfer.store import Places, Stamp, read_stamp, remove
from .catalogue import fault
from .names import Name, name_at

#: What the last word of a media type is called in messages.
_KINDS = {"model": "weights", "params": "parameters", "json": "configuration", "v1": "configuration"}
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
#: A pull's bytes and its parts; a blob on its way in through the API.
_LEFT = re.compile(r"sha256-(?:([0-9a-f]{64})-partial(?:-\d+)?|(\d{1,20}))")
_HELD = re.compile(r"sha256-([0-9a-f]{64})(?:-partial(-\d+))?")
#: A pull writes the records of its parts before it opens the file that tells that it runs.
YOUNG_SECONDS = 60.0


@dataclass(frozen=True)
class Layer:
    """A blob as a manifest names it: SHA-256 and size in bytes; ``kind`` is its media type."""

    kind: str
    sha256: str
    size: int

    @property
    def shown(self) -> str:
        last = self.kind.rpartition(".")[2].partition("+")[0]
        return _KINDS.get(last, last)


@dataclass(frozen=True)
class Image:
    """A model in the store. ``sha256`` is that of its manifest, which Ollama calls the model's digest."""

    name: Name
    path: Path
    sha256: str
    other_sha256: str
    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def weights(self) -> Layer | None:
        """The blob with the weights, where there is one."""
        return next((layer for layer in self.layers if layer.kind == MODEL_LAYER), None)

    def layer(self, kind: str) -> Layer | None:
        return next((layer for layer in self.layers if layer.kind == f"application/vnd.ollama.image.{kind}"), None)

    def is_digest(self, digest: str) -> bool:
        """Whether a digest, or its beginning, is this model's: of the manifest, or whole, of the weights.

        Ollama may leave the last line feed of a manifest out of its digest (manifest/manifest.go hashes what its reader
        has taken).
        """
        weights = self.weights
        return (
            self.sha256.startswith(digest)
            or self.other_sha256.startswith(digest)
            or (weights is not None and weights.sha256 == digest)
        )


@dataclass(frozen=True)
class BlobState:
    """What was found of a blob.

    ``problem``: empty, C(missing), C(short) (another size), C(corrupt) (another SHA-256), C(unreadable), C(unstable)
    (two readings, two hashes). ``sha256`` and ``found`` (size) are what it has, ``hashed`` whether it was read.
    """

    layer: Layer
    path: Path
    problem: str = ""
    found: int | None = None
    sha256: str | None = None
    hashed: bool = False
    detail: str = ""


@dataclass(frozen=True)
class Leftover:
    """What one unfinished pull or upload has left. ``size``: bytes on the disk. ``in_use``: why it may be at work."""

    paths: tuple[Path, ...]
    size: int
    in_use: str = ""


class Store:
    """The store in a folder, the one that Ollama's C(OLLAMA_MODELS) names."""

    def __init__(self, folder: str, keep: bool = True) -> None:
        """Without ``keep`` nothing is written, not even what was proved."""
        self.folder = Path(folder)
        self.blobs = self.folder / "blobs"
        self._keep = keep
        #: Why stamps could not be written.
        self.unkept = ""

    # -- models -----------------------------------------------------------------------------------------------------

    def names(self) -> Iterator[Name]:
        root = self.folder / "manifests"
        for path in sorted(root.glob("*/*/*/*")):
            name = name_at(path.relative_to(root))
            if name is not None and path.is_file():
                yield name

    def find(self, name: Name) -> Name | None:
        """The name as the store has it: Ollama takes one for another that differs in capitals only."""
        if (self.folder / name.below).is_file():
            return name
        return next((other for other in self.names() if other.key == name.key), None)

    def read(self, name: Name) -> Image | None:
        """The model of that name, null where there is none. FaultError: manifest_broken."""
        there = self.find(name)
        if there is None:
            return None
        path = self.folder / there.below
        try:
            data = path.read_bytes()
            layers = tuple(_layers(json.loads(data)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else "it is empty" if not data.strip() else "it is none"
            remedy = "Allow `repair`: it is pulled or made anew, and removed where the model is to be absent."
            raise FaultError(
                fault("manifest_broken", str(path), f"cannot be read as a manifest: {why}", remedy)
            ) from exc
        return Image(
            there,
            path,
            hashlib.sha256(data).hexdigest(),
            hashlib.sha256(data.rstrip(b"\n")).hexdigest(),
            layers,
        )

    def users(self, sha256: str) -> list[str]:
        """The models that need a blob. A manifest that is broken is passed over."""
        found = []
        for name in self.names():
            with contextlib.suppress(FaultError):
                image = self.read(name)
                if image is not None and any(layer.sha256 == sha256 for layer in image.layers):
                    found.append(image.name.shown)
        return found

    def drop_manifest(self, name: Name) -> None:
        there = self.find(name)
        if there is not None:
            remove(self.folder / there.below)

    # -- blobs ------------------------------------------------------------------------------------------------------

    def blob(self, sha256: str) -> Path:
        return self.blobs / f"sha256-{sha256}"

    def size_of(self, sha256: str) -> int | None:
        """Bytes of a blob, null where there is none."""
        try:
            return self.blob(sha256).stat().st_size
        except OSError:
            return None

    def content(self, layer: Layer | None) -> bytes | None:
        """The bytes of a small blob, null where they cannot be had."""
        if layer is None or layer.size > 1 << 22:
            return None
        try:
            return self.blob(layer.sha256).read_bytes()
        except OSError:
            return None

    def proved(self, layer: Layer) -> bool:
        """Whether a stamp tells that the blob has the bytes that its name stands for; reads none of them."""
        stamp = read_stamp(Places(self.blob(layer.sha256)).stamp)
        try:
            stat = self.blob(layer.sha256).stat()
        except OSError:
            return False
        return stamp is not None and stamp.fits(stat) and (stamp.sha256, stamp.size) == (layer.sha256, layer.size)

    def check(self, layer: Layer, full: bool = False, note: Callable[[int], None] = lambda count: None) -> BlobState:
        """Look at a blob: there, of the right size, and with the right SHA-256, by its stamp or by reading it.

        A wrong hash is not believed at once: the bytes are read again, from the disk. OSError for what no disk trouble
        is.
        """
        path = self.blob(layer.sha256)
        size = self.size_of(layer.sha256)
        if size is None:
            return BlobState(layer, path, "missing")
        if size != layer.size:
            return BlobState(layer, path, "short", size)
        if not full and self.proved(layer):
            return BlobState(layer, path, found=size, sha256=layer.sha256)
        before = path.stat()
        sha256, why = read_hash(path, note)
        if sha256 == layer.sha256:
            # What changed while it was read was not proved by it.
            self._stamp(path, before, sha256)
            return BlobState(layer, path, "", size, sha256, True)
        self._disown(path)
        if sha256 is None:
            return BlobState(layer, path, "unreadable", size, None, True, why or "")
        _forget_cache(path)
        again, why = read_hash(path)
        if again is None:
            return BlobState(layer, path, "unreadable", size, None, True, why or "")
        if again != sha256:
            return BlobState(layer, path, "unstable", size, again, True, f"{sha256}, then {again}")
        return BlobState(layer, path, "corrupt", size, sha256, True)

    def vouch(self, sha256: str) -> None:
        """Note that a blob is right whose bytes were proved elsewhere: by the file that it is the same as."""
        path = self.blob(sha256)
        self._stamp(path, path.stat(), sha256)

    def _stamp(self, path: Path, stat: os.stat_result, sha256: str) -> None:
        if not self._keep:
            return
        places = Places(path)
        try:
            self.own_folder()
            Stamp.of(stat, sha256, "ollama", "sha256").write(places.stamp)
        except OSError as exc:
            self.unkept = f"{exc.filename or places.folder}: {exc.strerror or exc}"

    def _disown(self, path: Path) -> None:
        """What was found wrong must not pass by an old stamp: a bad disk changes neither size nor time."""
        if self._keep:
            with contextlib.suppress(OSError):
                remove(Places(path).stamp)

    def own_folder(self) -> Path:
        """The folder for stamps and locks; OSError where it cannot be had.

        The store belongs to the service, and this is likely root: what the service could make of the name, a link
        elsewhere, is not followed.
        """
        folder = Places(self.blobs / "x").folder
        folder.mkdir(mode=0o755, exist_ok=True)
        if folder.is_symlink() or not folder.is_dir():
            raise NotADirectoryError(20, "is no folder", str(folder))
        return folder

    def discard(self, sha256: str) -> None:
        """Remove a blob that is broken, so that it is fetched again: one that is there is never fetched."""
        remove(self.blob(sha256), Places(self.blob(sha256)).stamp)

    def forget_gone(self) -> None:
        """Remove the stamps of blobs that are not there any more."""
        folder = Places(self.blobs / "x").folder
        if folder.is_symlink():
            return
        with contextlib.suppress(OSError):
            for path in folder.glob("sha256-*.stamp.json"):
                if not (self.blobs / path.name.removesuffix(".stamp.json")).exists():
                    remove(path)

    # -- what pulls leave -------------------------------------------------------------------------------------------

    def held(self) -> dict[str, int]:
        """Bytes that are there of each blob, by SHA-256; of an unfinished pull by the records of its parts."""
        found: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for path in self.blobs.iterdir():
                match = _HELD.fullmatch(path.name)
                if match is None:
                    continue
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                    if match[2] is None:
                        found[match[1]] = found.get(match[1], 0) + path.stat().st_size
                    else:
                        done = int(json.loads(path.read_text(encoding="utf-8"))["Completed"])
                        found[match[1]] = found.get(match[1], 0) + done
        return found

    def leftovers(self, proc: Path = Path("/proc"), now: Callable[[], float] = time.time) -> list[Leftover]:
        """What lies in the store of pulls and uploads that have not ended, by pull."""
        groups: dict[str, list[tuple[Path, os.stat_result]]] = {}
        with contextlib.suppress(OSError):
            for path in sorted(self.blobs.iterdir()):
                match = _LEFT.fullmatch(path.name)
                if match:
                    with contextlib.suppress(OSError):
                        groups.setdefault(match[1] or match[2], []).append((path, path.stat()))
        if not groups:
            return []
        holders = open_files({(s.st_dev, s.st_ino) for found in groups.values() for _, s in found}, proc)
        result = []
        for found in groups.values():
            reasons = [holders[key] for _, s in found if (key := (s.st_dev, s.st_ino)) in holders]
            newest = max(stat.st_mtime for _, stat in found)
            if not reasons and None in holders:
                reasons = [holders[None]]
            if not reasons and now() - newest < YOUNG_SECONDS:
                reasons = [f"written within the last {YOUNG_SECONDS:.0f} s: a pull may be at its beginning"]
            size = sum(stat.st_blocks * 512 for _, stat in found)
            result.append(Leftover(tuple(path for path, _ in found), size, reasons[0] if reasons else ""))
        return result


def open_files(wanted: set[tuple[int, int]], proc: Path = Path("/proc")) -> dict[tuple[int, int] | None, str]:
    """Who has files open, by device and inode: a pull holds the file it writes as long as it runs.

    The key null stands for all of them, where a process of Ollama does not let this user see what it has open.
    """
    found: dict[tuple[int, int] | None, str] = {}
    try:
        processes = [path for path in proc.iterdir() if path.name.isdigit()]
    except OSError as exc:
        return {None: f"what runs here cannot be seen ({exc.strerror})"}
    for process in processes:
        try:
            descriptors = list((process / "fd").iterdir())
        except PermissionError:
            if "ollama" in _command(process):
                found[None] = f"what {_command(process)} (pid {process.name}) has open cannot be seen: run as root"
            continue
        except OSError:
            continue
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                # By name first: a device is not to be touched for this, and most are of no interest.
                if "sha256-" not in os.readlink(descriptor):  # noqa: PTH115 - a name may be of another namespace
                    continue
                stat = descriptor.stat()
                if (stat.st_dev, stat.st_ino) in wanted:
                    found[(stat.st_dev, stat.st_ino)] = f"{_command(process)} (pid {process.name}) has it open"
    return found


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "a process"


def _layers(manifest: Any) -> Iterator[Layer]:
    config = manifest.get("config") or {}
    for entry in [*manifest["layers"], *([config] if config.get("digest") else [])]:
        digest = _DIGEST.fullmatch(entry["digest"])
        size = entry["size"]
        if digest is None or type(size) is not int or size < 0:
            raise ValueError("a layer has no digest or no size")
        yield Layer(str(entry.get("mediaType") or ""), digest[1].lower(), size)


def _forget_cache(path: Path) -> None:
    """Let the next reading come from the disk, not from memory."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
