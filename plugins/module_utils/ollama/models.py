# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Keeps one model of Ollama as it is to be: pulled or made from a local file, and proved to the last blob; or absent.

Ollama takes a blob that is there for granted, lists a model whose blobs are gone, and says 200 before it begins. So
what counts here is what lies on the disk, against what name and manifest say.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..compat import judge
from ..faults import Fault, FaultError, is_fatal
from ..gguf.model import open_model
from ..gguf.shards import shard_name
from ..transfer.deliver import Progress, read_hash
from ..transfer.engine import amount
from ..transfer.ollama_store import MODEL_LAYER
from ..transfer.store import Lock, Places, Stamp, read_stamp, remove
from .catalogue import fault
from .client import ApiError, Client, Watch
from .errors import Trouble, explain, not_answering, sharded
from .names import Name, parse_name
from .placing import keep_time, place
from .recipe import Expected, Recipe, compare, details_of, read_parameters
from .store import BlobState, Image, Layer, Store

_DIGEST = re.compile(r"(?:sha256[:-])?([0-9a-f]{12,64})", re.IGNORECASE)
#: More tries than any pull has use for, however little each brings.
MOST_TRIES = 200
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class Request:
    """What is asked for. ``wait``: seconds for a server that has just been started. ``retries``: how many tries in a
    row may bring nothing.
    """

    name: str
    state: str = "present"
    base_url: str = "http://127.0.0.1:11434"
    models_directory: str = "/var/lib/ollama/models"
    gguf: str | None = None
    allow_unverified: bool = False
    link: bool = True
    parameters: Mapping[str, Any] | None = None
    template: str | None = None
    system: str | None = None
    digest: str | None = None
    expected: Expected = field(default_factory=Expected)
    full: bool = False
    repair: bool = False
    clean_partials: bool = False
    insecure: bool = False
    timeout: float = 30.0
    stall_timeout: float = 120.0
    retries: int = 5
    wait: float = 10.0
    check: bool = False
    progress_file: str | None = None


@dataclass
class Outcome:
    """How it went. ``verified``: every blob has the bytes of its name. ``action``: what was done, or would be in check
    mode: C(pulled), C(created), C(deleted), C(repaired); null for nothing.
    """

    name: str = ""
    changed: bool = False
    action: str | None = None
    digest: str | None = None
    size: int | None = None
    verified: bool | None = None
    bytes_pulled: int = 0
    blobs_hashed: int = 0
    placed: str | None = None
    details: dict[str, Any] | None = None
    partials: dict[str, Any] = field(default_factory=lambda: {"count": 0, "files": 0, "size": 0, "removed": 0})
    would_pull: bool = False
    would_create: bool = False
    would_delete: bool = False
    would_verify: bool = False
    waited: bool = False
    notes: list[str] = field(default_factory=list)
    before: str | None = None
    faults: list[Fault] = field(default_factory=list)


class Stalled(Exception):
    """A stream that goes nowhere."""


class Keeper:
    """Does what one request asks for. ``run`` never raises for what the server or the disk do: faults tell."""

    def __init__(self, request: Request, sleep: Callable[[float], None] = time.sleep) -> None:
        self._req = request
        self._sleep = sleep
        self._store = Store(request.models_directory, keep=not request.check)
        self._client: Client
        self._name: Name
        self._version: str | None = None
        self._recipe = Recipe({})
        self._gguf_sha256: str | None = None
        self._progress = Progress(request.progress_file, None)
        #: Hashes that a blob had when it had come, where they were wrong.
        self._wrong: dict[str, list[str]] = {}
        #: Blobs that this run has read.
        self._read: set[str] = set()
        self.out = Outcome(request.name)

    def run(self) -> Outcome:
        out = self.out
        try:
            self._begin()
            if self._req.state == "absent":
                self._absent()
            else:
                self._present()
        except FaultError as exc:
            out.faults.insert(0, exc.fault)
        except ApiError as exc:
            out.faults.insert(0, not_answering(exc, self._req.base_url))
        except OSError as exc:
            out.faults.insert(0, _disk_trouble(exc, self._req.models_directory))
        if out.name != "" and not any(found.code == "model_name_invalid" for found in out.faults):
            self._partials()
        if self._store.unkept:
            remedy = "Run as root or as the store's owner; the model itself is not concerned."
            out.faults.append(fault("proof_not_kept", out.name, self._store.unkept, remedy))
        return out

    # -- before -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        req = self._req
        self._name = parse_name(req.name)
        self.out.name = self._name.shown
        self._progress.subject = self._name.shown
        parameters, faults = read_parameters(req.parameters, self._name.shown)
        faults += _judge_options(req, self._name.shown)
        try:
            self._client = Client(req.base_url, req.timeout)
        except ValueError as exc:
            faults.append(fault("bad_argument", "base_url", str(exc), "Write it as http://127.0.0.1:11434."))
        if faults:
            self.out.faults += faults[:-1]
            raise FaultError(faults[-1])
        self._recipe = Recipe(parameters, req.template, req.system)
        if req.gguf is not None and req.state == "present":
            self._look_at_gguf(req.gguf)
        self._version = self._reach()
        if self._version is not None:
            self._right_store()

    def _reach(self) -> str | None:
        """The version of the server; null where none answers and that is no fault: there is none yet in check mode,
        and a model that is not there needs none to be absent."""
        waited = 0.0
        while True:
            try:
                return self._client.version()
            except ApiError as exc:
                if exc.kind in ("refused", "broken") and not self._req.check and waited < self._req.wait:
                    self._sleep(0.5)
                    waited += 0.5
                    continue
                if exc.kind != "unexpected" and (self._req.check or self._absent_already()):
                    return None
                raise

    def _absent_already(self) -> bool:
        return self._req.state == "absent" and self._store.find(self._name) is None

    def _right_store(self) -> None:
        """That the folder is the server's, before an hour goes into a pull to another place.

        In check mode a server that keeps its models elsewhere may be one that is still to be set up anew.
        """
        folder = self._store.folder
        lost = [str(entry.get("name")) for entry in self._client.tags() if not self._here(str(entry.get("name")))]
        if not lost and self._store.blobs.is_dir():
            return
        message = "it is not there, and the server runs: it keeps its models elsewhere"
        if lost:
            message = f"the server lists {', '.join(sorted(lost)[:3])}, and there is no manifest of it here"
        remedy = (
            "Set `models_directory` to what OLLAMA_MODELS is in the service (systemctl show ollama -p Environment); "
            "where that is not set, it is .ollama/models in the home of the service's user."
        )
        if self._req.check:
            self._version = None
            self.out.would_verify = True
            self.out.notes.append(f"{folder}: {message}")
            return
        raise FaultError(fault("ollama_store_elsewhere", str(folder), message, remedy))

    def _here(self, shown: str) -> bool:
        try:
            return self._store.find(parse_name(shown)) is not None
        except FaultError:
            # A model that runs elsewhere, or a name of a later release.
            return True

    # -- a local file -----------------------------------------------------------------------------------------------

    def _look_at_gguf(self, path: str) -> None:
        """That the file is there, one whole GGUF, and proved. Its absence is no fault where the model is there."""
        if not Path(path).exists() and self._store.find(self._name) is not None:
            self.out.notes.append(f"{path} is not there any more; what the store has was not compared with it")
            return
        if not Path(path).exists() and self._req.check:
            self.out.notes.append(f"{path} is not there yet")
            return
        named = shard_name(path)
        model = open_model(path)
        count = model.header.get("split.count", 0) if model.header is not None else 0
        shards = max(named.count if named else 0, count if type(count) is int else 0)
        if shards > 1:
            told = judge({"ollama": "0.24.0", "shards": shards}).faults
            raise FaultError(sharded(path, f"it is one of {shards} shards. {told[0].message if told else ''}".strip()))
        fatal = [found for found in model.faults if is_fatal(found)]
        if fatal:
            raise FaultError(fatal[0])
        self._gguf_sha256 = self._prove_gguf(Path(path))

    def _prove_gguf(self, path: Path) -> str:
        """The file's SHA-256, by the stamp of its delivery where that still fits."""
        stamp = read_stamp(Places(path).stamp)
        if stamp is not None and stamp.fits(path.stat()) and not self._req.full:
            sha256, proved = stamp.sha256, bool(stamp.proved)
        else:
            self._progress.phase = "hashing"
            size, done = path.stat().st_size, 0

            def note(count: int) -> None:
                nonlocal done
                done += count
                self._progress.update(done, size)

            found, why = read_hash(path, note)
            if found is None:
                remedy = "Check the disk (smartctl, dmesg) and bring the file again."
                raise FaultError(fault("gguf_unproved", str(path), f"cannot be read: {why}", remedy))
            sha256, proved = found, stamp is not None and stamp.sha256 == found and bool(stamp.proved)
        asked = _plain_digest(self._req.digest)
        if asked is not None and len(asked) == 64 and asked == sha256:
            proved = True
        if not self._req.check and (stamp is None or stamp.sha256 == sha256):
            self._keep_proof(path, sha256, stamp, proved)
        if not proved and not self._req.allow_unverified:
            message = "it was never verified by a SHA-256" if stamp is None else "nothing proved it when it was brought"
            if stamp is not None and stamp.sha256 != sha256:
                message = f"its SHA-256 is {sha256}, it was {stamp.sha256} when it was verified"
            if sha256 not in message:
                message += f"; its SHA-256 is {sha256}"
            remedy = "Bring it with module model_download and its sha256, give that as digest, or `allow_unverified`."
            raise FaultError(fault("gguf_unproved", str(path), message, remedy))
        return sha256

    def _keep_proof(self, path: Path, sha256: str, stamp: Stamp | None, proved: bool) -> None:
        """Note what was read of a file, as its delivery would, so that the next run need not read it again."""
        stat = path.stat()
        if stamp is not None and stamp.fits(stat) and bool(stamp.proved) == proved:
            return
        with suppress(OSError):
            Places(path).folder.mkdir(mode=0o755, exist_ok=True)
            source = stamp.source if stamp is not None else ""
            Stamp.of(stat, sha256, source, "sha256" if proved else "").write(Places(path).stamp)

    # -- present ----------------------------------------------------------------------------------------------------

    def _present(self) -> None:
        if self._req.check:
            self._predict()
            return
        image = self._settled()
        if image is None:
            with self._locked():
                image = self._bring()
        if image is None:
            return
        self._tell(image)
        self.out.verified = True
        self._compare(image)

    def _settled(self) -> Image | None:
        """The model where it is there, as asked, and all of it proved before; reads no blobs."""
        try:
            image = self._store.read(self._name)
        except FaultError:
            return None
        if image is None or self._req.full or not self._as_asked(image):
            return None
        return image if all(map(self._store.proved, image.layers)) else None

    def _as_asked(self, image: Image) -> bool:
        """Whether it need not be pulled or made for being another one than asked for."""
        asked = _plain_digest(self._req.digest)
        if asked is not None and not image.is_digest(asked):
            return False
        if self._req.gguf is None:
            return True
        same = self._gguf_sha256 is None or (image.weights is not None and image.weights.sha256 == self._gguf_sha256)
        return same and self._recipe.fits(image, self._store)

    def _bring(self) -> Image | None:
        """See to it that the model is there and right; null where faults tell why it is not."""
        image = self._read_image()
        before = image.sha256 if image is not None else None
        self.out.before = before
        repaired: list[str] = []
        if image is not None and self._as_asked(image):
            broken = self._check(image, self._req.full)
            if not broken:
                return image
            if not self._req.repair:
                self.out.faults += [self._broken(state) for state in broken]
                self._tell(image)
                self.out.verified = False
                return None
            for state in broken:
                self.out.notes.append(f"repaired: {state.path} {self._broken(state).message}")
                self._store.discard(state.layer.sha256)
                repaired.append(state.layer.sha256)
        held = self._store.held()
        image = self._make() if self._req.gguf is not None else self._pull(held)
        if image is None:
            return None
        self.out.changed = image.sha256 != before or bool(repaired)
        if self.out.changed:
            self.out.action = "repaired" if repaired else "created" if self._req.gguf is not None else "pulled"
        if repaired:
            self._unload()
        return image

    def _read_image(self) -> Image | None:
        """What is in the store; a broken manifest counts as none where it may be repaired."""
        try:
            return self._store.read(self._name)
        except FaultError:
            if not self._req.repair:
                raise
            self.out.notes.append("repaired: the manifest could not be read")
            return None

    def _check(self, image: Image, full: bool = False) -> list[BlobState]:
        """Look at every blob: what is wrong. FaultError where readings differ."""
        layers = list(dict.fromkeys(image.layers))
        total = sum(layer.size for layer in layers if full or not self._store.proved(layer))
        done = 0

        def note(count: int) -> None:
            nonlocal done
            done += count
            self._progress.update(done, total)

        self._progress.phase = "verifying"
        broken = []
        for layer in layers:
            state = self._store.check(layer, full and layer.sha256 not in self._read, note)
            if state.hashed:
                self.out.blobs_hashed += 1
                self._read.add(layer.sha256)
            if state.problem == "unstable":
                message = f"two readings of the same bytes have different hashes: {state.detail}"
                raise FaultError(_unstable(str(state.path), message))
            if state.problem:
                broken.append(state)
        return broken

    def _broken(self, state: BlobState) -> Fault:
        """What is wrong with a blob, and what to do."""
        layer, name = state.layer, self._name.shown
        what = f"{layer.shown} of {name}, {amount(layer.size)}"
        again = "pulled again" if self._req.gguf is None else f"brought from {self._req.gguf} again"
        remedy = f"Allow `repair`: the blob is removed and {again}."
        others = [user for user in self._store.users(layer.sha256) if user != name]
        if others:
            remedy += f" It belongs to {', '.join(others)} as well."
        if state.problem == "missing":
            return fault("blob_missing", str(state.path), f"is not there ({what}), though the model is listed", remedy)
        if state.problem == "short":
            message = f"has {state.found} bytes, the manifest names {layer.size} ({what})"
            return fault("blob_short", str(state.path), message, remedy)
        if state.problem == "unreadable":
            message = f"cannot be read: {state.detail} ({what})"
            return fault("blob_corrupt", str(state.path), message, f"Check the disk (smartctl, dmesg). {remedy}")
        message = f"its SHA-256 is {state.sha256}, not that of its name ({what})"
        return fault("blob_corrupt", str(state.path), message, remedy)

    def _note_wrong(self, sha256: str, got: str, path: str) -> None:
        """Note that a blob came wrong; the second time is the last. FaultError then."""
        earlier = self._wrong.setdefault(sha256, [])
        earlier.append(got)
        if len(earlier) < 2:
            return
        if len(set(earlier)) == 1:
            message = f"{len(earlier)} times the bytes of sha256:{sha256} came with the SHA-256 {earlier[0]}"
            remedy = "A proxy or mirror in between changes them, or the registry has them wrong: try another way to it."
            raise FaultError(fault("blob_from_source_wrong", self._name.shown, message, remedy))
        message = f"{len(earlier)} tries to fetch it, {len(set(earlier))} wrong hashes: {', '.join(earlier)}"
        raise FaultError(_unstable(path, message))

    # -- pulling ----------------------------------------------------------------------------------------------------

    def _pull(self, held: dict[str, int]) -> Image | None:
        while True:
            seen: set[str] = set()
            try:
                self._pull_through(seen)
            finally:
                now = self._store.held()
                self.out.bytes_pulled += sum(max(0, now.get(blob, 0) - held.get(blob, 0)) for blob in seen)
            image = self._store.read(self._name)
            if image is None:
                message = f"the server says that it has pulled {self._name.shown}, and there is no manifest of it here"
                remedy = "Set `models_directory` to what OLLAMA_MODELS is in the service."
                raise FaultError(fault("ollama_store_elsewhere", str(self._store.folder), message, remedy))
            more = {layer.sha256 for layer in image.layers} - seen
            self.out.bytes_pulled += sum(max(0, now.get(blob, 0) - held.get(blob, 0)) for blob in more)
            broken = self._check(image)
            if not broken:
                return image
            # Ollama does not look at a blob that was there before, such as another model's.
            if not self._req.repair and any(state.layer.sha256 in held for state in broken):
                self.out.faults += [self._broken(state) for state in broken]
                self._tell(image)
                self.out.verified = False
                return None
            for state in broken:
                if state.layer.sha256 not in held:
                    self._note_wrong(state.layer.sha256, state.sha256 or state.problem, str(state.path))
                self._store.discard(state.layer.sha256)
            held = self._store.held()

    def _pull_through(self, seen: set[str]) -> None:
        """Pull until Ollama says success, trying again what may pass. FaultError."""
        request = {"model": self._name.shown, "insecure": self._req.insecure, "stream": True}
        idle, most = 0, sum(self._store.held().values())
        for number in range(MOST_TRIES):
            trouble = self._follow("/api/pull", request, seen)
            if trouble is None:
                return
            if trouble.wrong is not None:
                # Ollama has removed the blob.
                self._note_wrong(*trouble.wrong, str(self._store.blob(trouble.wrong[0])))
                continue
            have = sum(self._store.held().values())
            idle = 1 if have > most else idle + 1
            most = max(most, have)
            if not trouble.passes or idle > self._req.retries or number + 1 == MOST_TRIES:
                raise FaultError(trouble.fault)
            self._progress.phase = "waiting before the next try"
            self._progress.update(0, force=True)
            self._sleep(min(_LONGEST_PAUSE, 2.0 ** (idle - 1)))

    def _follow(self, path: str, request: Mapping[str, Any], seen: set[str], size: int = 0) -> Trouble | None:
        """Follow a stream to its end; null when that is success. ``size``: bytes that Ollama may read meanwhile."""
        watch = Watch(self._req.stall_timeout)
        done: dict[str, tuple[int, int]] = {}
        status = ""
        try:
            # Closed at once where it is given up: Ollama then ends what nobody follows.
            with closing(self._client.follow(path, request, watch.patience)) as events:
                for event in events:
                    status = str(event.get("status") or "")
                    digest = str(event.get("digest") or "")
                    completed, total = _whole(event.get("completed")), _whole(event.get("total"))
                    if digest:
                        if digest not in done:
                            self._room_for(total - completed)
                        done[digest] = (completed, max(total, completed))
                        seen.add(digest.removeprefix("sha256:"))
                    so_far = sum(entry[0] for entry in done.values())
                    whole = sum(entry[1] for entry in done.values())
                    watch.see(status, digest, completed, max(whole, size))
                    if watch.stalled:
                        raise Stalled
                    self._progress.phase = "" if digest else _short_status(status)
                    self._progress.update(so_far, whole or None)
        except ApiError as exc:
            if exc.kind != "silent":
                return explain(exc, self._name, self._req.base_url, self._version)
            return self._stalled(watch, done)
        except Stalled:
            return self._stalled(watch, done)
        if status == "success":
            return None
        words = f"the stream ended with {status!r}, not with 'success'" if status else "the stream ended with nothing"
        return explain(ApiError("broken", words), self._name, self._req.base_url, self._version)

    def _room_for(self, size: int) -> None:
        """That the disk takes what is still to come, before hours go into it. FaultError: disk_full."""
        free = free_bytes(self._store.blobs)
        if size > free:
            message = f"{amount(size)} are still to come, {amount(free)} are free"
            remedy = "Make room on that file system, and run again: what has come is used."
            raise FaultError(fault("disk_full", str(self._store.blobs), message, remedy))

    def _stalled(self, watch: Watch, done: Mapping[str, tuple[int, int]]) -> Trouble:
        so_far, whole = (sum(entry[part] for entry in done.values()) for part in (0, 1))
        at = f" at {amount(so_far)} of {amount(whole)}" if whole else ""
        remedy = (
            "See journalctl -u ollama, and whether the registry can be reached from the machine. Run again: what has "
            "come is used. On a slow line allow it more time."
        )
        message = f"nothing new for {watch.limit:.0f} s{at}"
        return Trouble(fault("pull_stalled", self._name.shown, message, remedy), True)

    # -- making from a file -----------------------------------------------------------------------------------------

    def _make(self) -> Image | None:
        path = Path(self._req.gguf or "")
        sha256 = self._gguf_sha256
        if sha256 is None:
            remedy = "Bring the file again, or remove the model."
            raise FaultError(fault("gguf_unproved", str(path), "is not there, and the model must be made anew", remedy))
        blob, size = self._store.blob(sha256), path.stat().st_size
        layer = Layer(MODEL_LAYER, sha256, size)
        there = self._store.size_of(sha256) is not None
        if there and (state := self._store.check(layer)).problem:
            self.out.blobs_hashed += state.hashed
            if not self._req.repair:
                raise FaultError(self._broken(state))
            self._store.discard(sha256)
            there = False
        for _ in range(2):
            if not there:
                self._put(path, sha256, size)
            before = blob.stat()
            request = {"model": self._name.shown, "files": {path.name: f"sha256:{sha256}"}, "stream": True}
            trouble = self._follow("/api/create", {**request, **self._recipe.as_request()}, set(), size)
            # Ollama sets the time of a blob that it makes a model from; that of a linked file is model delivery's.
            if self._store.size_of(sha256) is not None:
                keep_time(blob, before)
            if trouble is not None:
                raise FaultError(trouble.fault)
            if self.out.placed in ("clone", "link"):
                self._store.vouch(sha256)
            image = self._store.read(self._name)
            if image is None:
                message = f"the server says that it has made {self._name.shown}, and there is no manifest of it here"
                remedy = "Set `models_directory` to what OLLAMA_MODELS is in the service."
                raise FaultError(fault("ollama_store_elsewhere", str(self._store.folder), message, remedy))
            broken = self._check(image)
            if not broken:
                return image
            for state in broken:
                self._note_wrong(state.layer.sha256, state.sha256 or state.problem, str(state.path))
                self._store.discard(state.layer.sha256)
            there = self._store.size_of(sha256) is not None
        self.out.faults += [self._broken(state) for state in broken]
        return None

    def _put(self, path: Path, sha256: str, size: int) -> None:
        """Bring the file's bytes into the store, without a second copy where that can be done."""
        why = "link is false"
        if self._req.link:
            placed = place(path, self._store, sha256)
            why = placed.why
            if placed.how:
                self.out.placed = placed.how
                if placed.how == "link":
                    self.out.notes.append(f"{path} and {self._store.blob(sha256)} are one file now, the store's")
                return
        self._room_for(size)
        self._progress.phase = "copying"
        done = 0

        def note(count: int) -> None:
            nonlocal done
            done += count
            self._progress.update(done, size)

        try:
            with path.open("rb") as content:
                self._client.upload(sha256, content, size, self._req.stall_timeout, note)
        except ApiError as exc:
            raise FaultError(explain(exc, self._name, self._req.base_url, self._version).fault) from exc
        self.out.placed = "upload"
        self.out.notes.append(f"{path} was copied into the store: {why}")

    # -- comparing --------------------------------------------------------------------------------------------------

    def _tell(self, image: Image) -> None:
        self.out.digest, self.out.size = image.sha256, image.size

    def _compare(self, image: Image) -> None:
        asked = _plain_digest(self._req.digest)
        if asked is not None and not image.is_digest(asked):
            message = f"its digest is {image.sha256}, asked for is {asked}"
            remedy = "The tag has moved on at the registry, or the value is wrong: compare it with `ollama list`."
            self.out.faults.append(fault("model_digest_differs", self._name.shown, message, remedy))
        expected = self._req.expected
        if self._version is None:
            self.out.would_verify = True
            expected = Expected(size=expected.size)
            details = details_of({})
        else:
            try:
                details = details_of(self._client.show(image.name.shown))
            except ApiError as exc:
                if exc.kind != "said":
                    raise
                message = f"Ollama cannot show the model: {exc.text}"
                remedy = "See journalctl -u ollama for what led to it."
                self.out.faults.append(fault("ollama_error", self._name.shown, message, remedy))
                return
            self.out.details = details
        self.out.faults += compare(self._name.shown, expected, details, image.size)

    def _unload(self) -> None:
        """Let go of a repaired model that is in memory: the broken bytes would go on answering."""
        with suppress(ApiError):
            if any(parse_name(str(entry.get("name"))).key == self._name.key for entry in self._client.loaded()):
                self._client.unload(self._name.shown)
                self.out.notes.append("it was in memory with the broken bytes, and was unloaded")

    # -- absent -----------------------------------------------------------------------------------------------------

    def _absent(self) -> None:
        out = self.out
        try:
            image = self._store.read(self._name)
        except FaultError:
            if not self._req.repair:
                raise
            # Ollama cannot delete what it cannot read.
            out.changed, out.action = True, "deleted"
            out.would_delete = self._req.check
            if not self._req.check:
                self._store.drop_manifest(self._name)
            return
        if image is None:
            return
        out.before = image.sha256
        out.changed, out.action = True, "deleted"
        if self._req.check:
            out.would_delete = True
            return
        with self._locked():
            try:
                self._client.delete(image.name.shown)
            except ApiError as exc:
                out.changed, out.action = False, None
                raise FaultError(explain(exc, self._name, self._req.base_url, self._version).fault) from exc
            self._store.forget_gone()
        if self._store.find(self._name) is not None:
            message = "the server says that it has deleted the model, and its manifest is still there"
            remedy = "Set `models_directory` to what OLLAMA_MODELS is in the service."
            raise FaultError(fault("ollama_store_elsewhere", str(self._store.folder), message, remedy))

    # -- check mode -------------------------------------------------------------------------------------------------

    def _predict(self) -> None:
        out = self.out
        image = self._read_image()
        broken: Sequence[BlobState] = ()
        if image is not None and self._as_asked(image):
            self._tell(image)
            out.before = image.sha256
            broken = self._check(image, self._req.full)
            out.verified = not broken
            if not broken:
                self._compare(image)
                return
            if not self._req.repair:
                out.faults += [self._broken(state) for state in broken]
                return
        out.changed = True
        out.would_create, out.would_pull = self._req.gguf is not None, self._req.gguf is None
        out.action = "repaired" if broken else "created" if self._req.gguf is not None else "pulled"
        out.would_verify = True

    # -- around -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One run at a time for a model; another waits, showing how far the first is."""
        key = hashlib.sha256("/".join(self._name.key).encode()).hexdigest()[:32]
        try:
            folder = self._store.own_folder()
            lock, shared = Lock(folder / f"{key}.lock"), folder / f"{key}.progress.json"

            def waiting() -> None:
                try:
                    self._progress.waiting(shared.read_text(encoding="utf-8"))
                except OSError:
                    self._progress.waiting("")

            self.out.waited = lock.acquire(waiting)
        except OSError as exc:
            # Without the right to write there two runs may both pull; Ollama itself fetches a blob once for both.
            self._store.unkept = f"{exc.filename or self._store.blobs}: {exc.strerror or exc}"
            yield
            return
        mine, self._progress = self._progress, Progress(self._req.progress_file, shared)
        self._progress.subject = mine.subject
        try:
            yield
        finally:
            remove(shared)
            lock.release()
            self._progress = mine

    def _partials(self) -> None:
        """Count what unfinished pulls have left, and remove it where that is asked for and nothing failed."""
        found = self._store.leftovers()
        out = self.out
        clean = self._req.clean_partials and not any(map(is_fatal, out.faults))
        removed = 0
        left = []
        for leftover in found:
            if not clean or leftover.in_use:
                left.append(leftover)
                continue
            if not self._req.check:
                remove(*leftover.paths)
            removed += leftover.size
            out.changed = True
        if clean:
            for leftover in left:
                remedy = "Nothing is to be done where a pull runs. Otherwise run again when it has ended."
                out.faults.append(fault("partials_in_use", str(leftover.paths[0]), leftover.in_use, remedy))
        out.partials = {
            "count": len(left),
            "files": sum(len(leftover.paths) for leftover in left),
            "size": sum(leftover.size for leftover in left),
            "removed": removed,
        }


def free_bytes(folder: Path) -> int:
    """What the service's user can still write there."""
    return shutil.disk_usage(folder).free


def _judge_options(req: Request, shown: str) -> list[Fault]:
    faults = []
    if req.digest is not None and _plain_digest(req.digest) is None:
        message = f"digest: {req.digest!r} is none"
        remedy = "Write 12 to 64 hexadecimal digits, as `ollama list` shows them, or the SHA-256 of a GGUF's bytes."
        faults.append(fault("bad_argument", shown, message, remedy))
    for option in ("parameters", "template", "system"):
        if getattr(req, option) and req.gguf is None:
            message = f"{option}: is for a model that is made from a file, and no gguf is given"
            faults.append(fault("bad_argument", shown, message, "Give the file as gguf, or leave it out."))
    for subject, path in ((shown, req.gguf), ("models_directory", req.models_directory)):
        if path is not None and not path.startswith("/"):
            faults.append(fault("bad_argument", subject, f"{path!r} is no absolute path", "Write it from / on."))
    for option in ("timeout", "stall_timeout"):
        if getattr(req, option) <= 0:
            faults.append(fault("bad_argument", option, "is not above 0", "Write seconds, such as 30."))
    return faults


def _plain_digest(text: str | None) -> str | None:
    """The hexadecimal digits of a digest, null for none."""
    match = _DIGEST.fullmatch(text.strip()) if text else None
    return match[1].lower() if match else None


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0


def _short_status(status: str) -> str:
    return status if len(status) <= 60 else f"{status[:57]}..."


def _unstable(place: str, message: str) -> Fault:
    remedy = (
        "Test memory (memtest86+, dmesg for MCE and EDAC) and disk (smartctl, dmesg) before anything else is brought: "
        "no download can mend that, and other files on the machine may be wrong as well."
    )
    return fault("blob_hash_unstable", place, message, remedy)


def _disk_trouble(exc: OSError, folder: str) -> Fault:
    place = str(exc.filename or folder)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return fault("disk_full", place, exc.strerror or str(exc), "Make room on that file system, and run again.")
    remedy = "Run as root or as the user of the service, and check owner, mode and mount of the place."
    return fault("ollama_error", place, f"cannot be read or written: {exc.strerror or exc}", remedy)
