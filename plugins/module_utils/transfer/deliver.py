# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Brings a set of files to their places: proves what is there, fetches what is missing, lets nothing wrong have a name.

A set is what belongs together (the shards of a model). Sources are tried in order, each for the whole set: when one
fails, the next takes over. Files whose SHA-256 is known are put in place one by one; where none is known, only when all
of them came from one source. Sources with other files than the others make sets of their own (``deliver_first``).
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..faults import Fault, FaultError, is_fatal
from ..files import sync_folder
from ..gguf.reader import Header, check_data, read_header
from ..gguf.shards import ShardName, check_first, check_set, shard_name
from ..gguf.source import FileSource
from ..progress import ProgressWriter, read_progress
from .catalogue import fault
from .disk import find_orphans
from .engine import SNIFF, Fetched, Settings, SourceFailed, Transfer, amount, discard
from .http import host_of
from .local import add_range, append_file, cut_off, link_file, share_blocks
from .sniff import lfs_pointer, sniff
from .sources import Source, from_api, from_hops, lacking
from .store import Lock, PartPlaces, Places, Stamp, read_stamp, remove

MIB = 1 << 20
_CHECKED = {"source": "only the one that the source itself names was checked", "size": "only its size was checked"}
EMPTY_SHA256 = hashlib.sha256().hexdigest()


@dataclass(frozen=True)
class Wanted:
    """One file: where it goes, what it must be (null: not known), where it can come from, in order.

    ``parts`` are the raw parts it is joined from, each under its own name at the sources; empty for a file in one
    piece.
    """

    dest: Path
    size: int | None = None
    sha256: str | None = None
    sources: tuple[Source, ...] = ()
    parts: tuple[Wanted, ...] = ()


def proved_by_hash(item: Wanted) -> bool:
    """Whether a SHA-256 is known for all of the file: for the whole, or for each of its parts."""
    return item.sha256 is not None or (bool(item.parts) and all(part.sha256 is not None for part in item.parts))


@dataclass
class Delivered:
    """What became of one file.

    ``verified`` says how much is proved: ``sha256`` (against the expected hash), ``source`` (against the hash that the
    source itself names), ``size`` (only that), ``none``.
    ``fetched`` are body bytes received now, ``resumed_from`` bytes that an earlier run had left.
    """

    dest: Path
    size: int | None = None
    sha256: str | None = None
    source: str | None = None
    fetched: int = 0
    resumed_from: int = 0
    changed: bool = False
    set_aside: str | None = None
    right: bool = False
    by_source: bool = False
    linked: bool = False

    def verified(self, wanted: Wanted) -> str | None:
        """Null when the file is not there or not right."""
        if not self.right:
            return None
        if proved_by_hash(wanted):
            return "sha256"
        if self.by_source:
            return "source"
        return "size" if wanted.size is not None else "none"


@dataclass
class Report:
    """The outcome for a set. ``passed_over`` are the faults of sources that failed before another one did it, ``notes``
    what else is worth saying.
    """

    files: list[Delivered] = field(default_factory=list)
    passed_over: list[Fault] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    waited: bool = False
    notes: list[str] = field(default_factory=list)


class Progress:
    """The set's progress: its own record, and a copy beside the lock for a run that waits."""

    def __init__(self, path: str | None, shared: Path | None) -> None:
        self._writers = [ProgressWriter(path, "bytes")]
        if shared is not None:
            self._writers.append(ProgressWriter(str(shared), "bytes"))
        self.before = 0
        self.base = 0
        self.total: int | None = None
        self.subject = ""
        self.place = ""
        self.phase = ""

    def update(self, done: int, total: int | None = None, force: bool = False) -> None:
        """``done`` bytes of the file at hand; ``total`` its size, used where the set's is not known."""
        whole = self.total if self.total is not None else (None if total is None else self.before + total)
        subject = self.subject
        if self.place:
            # Of several: which one, and how far it is itself.
            share = f", {100 * done // total} %" if total else ""
            subject += f" ({self.place}{share})"
        for writer in self._writers:
            writer.update(self.phase, self.before + self.base + done, whole, subject, force=force)

    def waiting(self, text: str) -> None:
        """Show what the run that has the lock reports."""
        record = read_progress(text)
        phase = "another run is on it"
        if record is None:
            self._writers[0].update(phase, 0, None, self.subject)
        else:
            self._writers[0].update(phase, record.done, record.total, record.subject)


class Delivery:
    """Delivers one set.

    ``full`` hashes what is there again. ``prepare`` is called with each file before it gets its name (owner, group,
    mode). Without ``refetch`` a file that was verified and is wrong now is a fault. ``make_room`` is called when the
    disk is too small, and may free some of it.
    """

    def __init__(
        self,
        wanted: Sequence[Wanted],
        settings: Settings,
        full: bool = False,
        progress_file: str | None = None,
        prepare: Callable[[Path], None] = lambda path: None,
        refetch: bool = True,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._refetch = refetch
        self._make_room = make_room
        self._wanted = list(wanted)
        self._settings = settings
        self._full = full
        self._prepare = prepare
        self._progress_file = progress_file
        self._progress = Progress(progress_file, None)
        #: Why files that are there cannot be read, by index.
        self._unreadable: dict[int, str] = {}
        #: SHA-256 and size by Git-LFS pointers that came in place of files, by index.
        self._pointers: dict[int, tuple[str, int]] = {}
        self.report = Report([Delivered(item.dest) for item in wanted])

    # -- looking ----------------------------------------------------------------------------------------------------

    def proved(self) -> bool:
        """True when stamps prove every file; reads no file contents."""
        for item, outcome in zip(self._wanted, self.report.files, strict=True):
            stamp = self._proof(item)
            if stamp is None:
                return False
            outcome.size, outcome.sha256, outcome.source = stamp.size, stamp.sha256, stamp.source or None
            outcome.right, outcome.by_source = True, stamp.proved == "source"
        return True

    def predict(self) -> Report:
        """What a run would do, without doing it: ``changed`` for each file. May read files, writes nothing."""
        self._refuse_folders()
        with self._disk_troubles():
            self._predict()
        return self._finish()

    def _predict(self) -> None:
        if self._full or not self.proved():
            for item, outcome in self._pending():
                if self._full or self._proof(item) is None:
                    digest = read_hash(item.dest)[0] if _size_of(item.dest) is not None else None
                    outcome.sha256, outcome.size = digest, _size_of(item.dest)
                    outcome.right = digest is not None and _right(self._known(item), outcome.size, digest)
                    outcome.changed = not outcome.right
                else:
                    outcome.right = True

    def _proof(self, item: Wanted) -> Stamp | None:
        """The stamp, if it fits the file and the file is what is wanted."""
        stamp = read_stamp(Places(item.dest).stamp)
        try:
            stat = item.dest.stat()
        except OSError:
            return None
        if stamp is None or not stamp.fits(stat) or not _right(item, stamp.size, stamp.sha256):
            return None
        return stamp

    @staticmethod
    def _known(item: Wanted) -> Wanted:
        """The same with the hash that it had when it was verified, where no other is known."""
        if item.sha256:
            return item
        stamp = read_stamp(Places(item.dest).stamp)
        return item if stamp is None else replace(item, sha256=stamp.sha256)

    def _pending(self) -> Iterator[tuple[Wanted, Delivered]]:
        return zip(self._wanted, self.report.files, strict=True)

    # -- doing ------------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        """Deliver. Raises FaultError with the one fault that ends it; several sources' faults are in the report."""
        with self._disk_troubles():
            return self._run()

    @contextmanager
    def _disk_troubles(self) -> Iterator[None]:
        """Whatever the disk would not give or take, of the files or the small ones beside them, as a fault."""
        try:
            yield
        except (TimeoutError, ConnectionError):
            raise
        except OSError as exc:
            place = str(exc.filename or self._wanted[0].dest.parent)
            raise _not_written(place, "cannot be read or written", exc) from exc

    def _run(self) -> Report:
        if not self._full and self.proved():
            self._forget_rejected()
            return self._finish()
        self._refuse_folders()
        self._make_folders()
        with self._locked():
            if not self._full and self.proved():
                return self._finish()
            missing = self._verify_present()
            if missing and not self._kept_corrupt(missing):
                self._try_prepare(missing)
                self._fetch_all(missing)
            if not self.report.faults:
                self._forget_rejected()
        return self._finish()

    def _refuse_folders(self) -> None:
        for item in self._wanted:
            if item.dest.is_dir():
                raise FaultError(
                    fault(
                        "dest_not_writable",
                        str(item.dest),
                        "is a folder, and a file is to have this name",
                        "Move it out of the way, or give the file another name.",
                    )
                )

    def _forget_rejected(self) -> None:
        """What was refused is of no use once the right file is there."""
        for item in self._wanted:
            rejected = Places(item.dest).rejected
            remove(rejected, rejected.with_name(rejected.name + ".json"))

    def _kept_corrupt(self, missing: list[int]) -> bool:
        """Whether files are wrong that must not be fetched again; each is a fault then."""
        if self._refetch:
            return False
        for index in missing:
            item, outcome = self._wanted[index], self.report.files[index]
            stamp = read_stamp(Places(item.dest).stamp)
            unreadable = self._unreadable.get(index)
            if unreadable is None and (stamp is None or outcome.sha256 is None):
                continue
            before = stamp.sha256 if stamp is not None else None
            self.report.faults.append(
                fault(
                    "file_corrupt",
                    str(item.dest),
                    f"cannot be read: {unreadable}"
                    if unreadable is not None
                    else f"its SHA-256 is {outcome.sha256}, it was {before} when it was verified",
                    "Check the disk (smartctl, dmesg), then allow `refetch`: the file is set aside and fetched again.",
                )
            )
        return bool(self.report.faults)

    def _finish(self) -> Report:
        failed = bool(self.report.faults)
        for item, outcome in self._pending():
            if not proved_by_hash(item) and not failed:
                self.report.faults.append(
                    fault(
                        "unverified",
                        str(item.dest),
                        "no SHA-256 is given: "
                        + _CHECKED.get(outcome.verified(item) or "", "nothing about it was checked")
                        + (f"; its SHA-256 is {outcome.sha256}" if outcome.sha256 else ""),
                        "Give the sha256 that the publisher names.",
                    )
                )
        return self.report

    def _make_folders(self) -> None:
        for folder in {Places(item.dest).folder for item in self._wanted}:
            try:
                created = [parent for parent in folder.parents if not parent.exists()]
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir(mode=0o755, exist_ok=True)
            except OSError as exc:
                raise _not_written(str(folder.parent), "cannot be made or written", exc) from exc
            for parent in created:
                self._prepare(parent)

    def _try_prepare(self, missing: Sequence[int]) -> None:
        """See that owner, group and mode can be given before hours go into what they are for: a server that maps root
        to nobody (NFS) refuses that, and a group may not exist."""
        for index in missing:
            if any(source.use == "link" for source in self._wanted[index].sources):
                # What is linked keeps what the store gave it.
                continue
            probe = Places(self._wanted[index].dest).probe
            try:
                probe.touch(mode=0o600)
                self._prepare(probe)
            finally:
                remove(probe)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the locks of all files, taken in one order, so that two sets cannot wait for each other."""
        ordered = sorted(self._wanted, key=lambda item: str(item.dest))
        with ExitStack() as stack:
            for item in ordered:
                places = Places(item.dest)
                lock = Lock(places.lock)
                self._progress.subject = item.dest.name

                of_holder = places.progress

                def waiting(shared: Path = of_holder) -> None:
                    self._progress.waiting(_read_text(shared))

                try:
                    waited = lock.acquire(waiting)
                except OSError as exc:
                    raise _not_written(str(places.lock), "cannot be opened", exc) from exc
                stack.callback(lock.release)
                self.report.waited = self.report.waited or waited
            shared = Places(ordered[0].dest).progress
            stack.callback(remove, shared)
            self._progress = Progress(self._progress_file, shared)
            yield

    def _verify_present(self) -> list[int]:
        """Prove the files that are there by stamp or by hashing them; the indices of those that are not right."""
        to_hash: list[int] = []
        missing: list[int] = []
        for index, (item, outcome) in enumerate(self._pending()):
            stamp = None if self._full else self._proof(item)
            if stamp is not None:
                outcome.size, outcome.sha256, outcome.source = stamp.size, stamp.sha256, stamp.source or None
                outcome.right, outcome.by_source = True, stamp.proved == "source"
            elif _size_of(item.dest) is None or (item.size is not None and _size_of(item.dest) != item.size):
                missing.append(index)
            else:
                to_hash.append(index)
        for index, digest in self._hash_present(to_hash):
            item, outcome = self._wanted[index], self.report.files[index]
            stat = item.dest.stat()
            outcome.size, outcome.sha256 = stat.st_size, digest
            if digest is None:
                missing.append(index)
                continue
            known = self._known(item)
            wrong = _fault_within(item.dest, item.dest.name, str(item.dest), known.sha256)
            if _right(known, stat.st_size, digest) and (known.sha256 or wrong is None):
                stamp = read_stamp(Places(item.dest).stamp)
                same = stamp is not None and stamp.sha256 == digest
                outcome.source = stamp.source or None if stamp is not None and same else None
                outcome.right = True
                outcome.by_source = stamp is not None and same and stamp.proved == "source"
                Stamp.of(stat, digest, outcome.source or "", _proved(item, outcome)).write(Places(item.dest).stamp)
            else:
                missing.append(index)
        return sorted(missing)

    def _hash_present(self, indices: list[int]) -> Iterator[tuple[int, str | None]]:
        """Hash files side by side, one a core; null for one that the disk does not give back."""
        if not indices:
            return
        progress = self._progress
        progress.phase, progress.subject = "verifying", self._wanted[indices[0]].dest.name
        progress.total = sum(_size_of(self._wanted[index].dest) or 0 for index in indices)
        done = 0
        lock = threading.Lock()

        def note(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                progress.update(done)

        with ThreadPoolExecutor(min(len(indices), os.cpu_count() or 1)) as pool:
            found = pool.map(lambda index: read_hash(self._wanted[index].dest, note), indices)
            for index, (digest, problem) in zip(indices, found, strict=True):
                if problem is not None:
                    self._unreadable[index] = problem
                yield index, digest

    def _check_space(self, number: int, missing: list[int]) -> None:
        """Room for what is still missing, with a margin, on the file system it goes to."""
        by_device: dict[int, tuple[Path, int]] = {}
        for index in missing:
            item = self._wanted[index]
            source = item.sources[number] if number < len(item.sources) else Source()
            size = item.size if item.size is not None else source.size
            if size is None or _needs_no_room(source, item.dest.parent):
                continue
            there = 0
            part = Places(item.dest).part
            if part.exists():
                there = min(part.stat().st_blocks * 512, size)
            folder = item.dest.parent
            device = folder.stat().st_dev
            path, needed = by_device.get(device, (folder, 0))
            by_device[device] = (path, needed + size - there)
        for folder, needed in by_device.values():
            margin = min(1024 * MIB, max(16 * MIB, needed // 100)) if needed else 0
            if _free(folder) < needed + margin:
                # What was refused by its hash was kept only in case the hash was the mistake.
                for index in missing:
                    remove(Places(self._wanted[index].dest).rejected)
                self._make_room()
            free = _free(folder)
            if free < needed + margin:
                orphans = [orphan for orphan in find_orphans([folder]) if orphan.size]
                remedy = "Make room on that file system or choose another folder. Nothing was fetched."
                if orphans:
                    held = sum(orphan.size for orphan in orphans)
                    remedy += f" Left of earlier downloads, and needed by nobody ({amount(held)}): " + ", ".join(
                        str(orphan.path) for orphan in orphans[:5]
                    )
                raise FaultError(
                    fault(
                        "disk_full",
                        str(folder),
                        f"{amount(needed)} are missing (and {amount(margin)} of margin), {amount(free)} are free",
                        remedy,
                    )
                )

    def _fetch_all(self, missing: list[int]) -> None:
        """Try the sources in order until every missing file is there."""
        self._forget_kept(missing)
        left = [index for index in missing if not self._adopt_rejected(index)]
        count = max((len(self._wanted[index].sources) for index in left), default=0)
        failures: list[Fault] = []
        for number in range(count):
            if not left:
                break
            try:
                self._fetch_from(number, left)
            except SourceFailed as exc:
                failures.append(exc.fault)
                left = [index for index in left if not self.report.files[index].changed]
            else:
                left = []
        if not left:
            self.report.passed_over = failures
            return
        for index in left:
            item = self._wanted[index]
            if not item.sources:
                failures.append(
                    fault(
                        "file_missing",
                        str(item.dest),
                        "is not there (or is not the right file), and no source is given",
                        "Give a url, or put the file there.",
                    )
                )
        self.report.faults = failures

    def _forget_kept(self, missing: list[int]) -> None:
        total = [self._wanted[index].size for index in missing]
        self._progress.total = None if None in total else sum(size or 0 for size in total)
        self._progress.before = 0

    def _fetch_from(self, number: int, left: list[int]) -> None:
        """Fetch the files from one source. Those without a known hash get their names only when all have come."""
        for index in left:
            item = self._wanted[index]
            if number >= len(item.sources):
                raise SourceFailed(
                    fault(
                        "file_missing",
                        str(item.dest),
                        f"has no source number {number + 1}",
                        "Give every file of a set the same number of sources.",
                    )
                )
            problem = item.sources[number].problem
            if problem is not None:
                raise SourceFailed(problem)
        self._check_space(number, left)
        held: list[tuple[int, Fetched, Path]] = []
        progress = self._progress
        for position, index in enumerate(left):
            item = self._wanted[index]
            source = item.sources[number]
            progress.base = 0
            progress.phase = f"from {host_of(source.url) if source.url else source.label}"
            progress.subject = item.dest.name
            progress.place = f"{position + 1} of {len(left)}" if len(left) > 1 else ""
            try:
                if item.parts:
                    fetched, ready = self._fetch_joined(item, number, self.report.files[index])
                else:
                    expected = self._by_pointer(index, _expected(item, source))
                    fetched, ready = self._fetch_one(item, source, expected, self.report.files[index])
            except SourceFailed as exc:
                sha256, size = exc.pointer or (None, None)
                if sha256 is not None and size is not None:
                    self._pointers[index] = (sha256, size)
                raise self._with_all_missing(exc, number, left[position + 1 :]) from exc
            if proved_by_hash(item):
                self._place(index, fetched, source, ready)
            else:
                held.append((index, fetched, ready))
            progress.before += fetched.size
        self._check_shards({self._wanted[index].dest: ready for index, _, ready in held}, number)
        for index, fetched, ready in held:
            self._place(index, fetched, self._wanted[index].sources[number], ready)

    def _with_all_missing(self, failed: SourceFailed, number: int, others: Sequence[int]) -> SourceFailed:
        """The failure; where a file is not there, with all of the set that are not: the operator is told once."""
        if failed.fault.code != "source_missing" or not others:
            return failed
        names = [self._wanted[index].dest.name for index in others]
        absent = lacking([self._wanted[index].sources[number] for index in others], self._settings)
        lacks = [name for name, missing in zip(names, absent, strict=True) if missing]
        if not lacks:
            return failed
        message = f"{failed.fault.message}; not there either: {', '.join(lacks)}"
        return SourceFailed(replace(failed.fault, message=message))

    def _check_shards(self, ready: dict[Path, Path], number: int) -> None:
        """Shards that no hash proves must be those of one model, as an engine checks when it loads them.

        ``ready`` is where the files lie that have come and have no names yet.
        """
        sets: dict[tuple[Path, str, int], ShardName] = {}
        for dest in ready:
            named = shard_name(dest.name)
            if named is not None and named.count > 1:
                sets[(dest.parent, named.stem, named.count)] = named
        faults: list[Fault] = []
        for (folder, _, _), named in sets.items():
            faults += check_set(named, [_header(ready.get(folder / name, folder / name)) for name in named.all])
        if not faults:
            return
        for dest in ready:
            places = Places(dest)
            discard(places)
            remove(places.linked, places.incoming)
        label = next(item.sources[number].label for item in self._wanted if item.dest in ready)
        told = "; ".join(f"{found.subject}: {found.message}" for found in faults)
        raise SourceFailed(replace(faults[0], subject=label, message=told))

    def _by_pointer(self, index: int, expected: Wanted) -> Wanted:
        """With what a pointer that an earlier source sent names, where no hash is known and no other size."""
        sha256, size = self._pointers.get(index, (None, None))
        if sha256 is None or expected.sha256 is not None or expected.size not in (None, size):
            return expected
        return replace(expected, sha256=sha256, size=size)

    def _fetch_one(self, item: Wanted, source: Source, expected: Wanted, outcome: Delivered) -> tuple[Fetched, Path]:
        """A whole and right file, and where it lies ready to get its name."""
        places = Places(item.dest)
        for attempt in (1, 2):
            ready = places.part
            if source.path is not None and source.use != "copy":
                fetched, ready = self._take_over(places, source, expected, outcome)
            elif source.path is not None:
                fetched = self._copy(places, source, expected)
            else:
                fetched = self._transfer(places, source, expected, outcome)
                expected = self._learn(expected, source, fetched)
            if expected.sha256 in (None, fetched.sha256):
                wrong = _fault_within(ready, item.dest.name, source.label, expected.sha256)
                if wrong is None:
                    outcome.by_source = expected.sha256 is not None and item.sha256 is None
                    return fetched, ready
                pointer = lfs_pointer(_head(ready))
                discard(places)
                raise SourceFailed(wrong, pointer)
            if fetched.resumed_from and attempt == 1:
                # Perhaps what was on disk was wrong, not what the source has.
                discard(places)
                continue
            break
        kept = ready == places.part
        if kept:
            self._reject(places, fetched, source)
        elif source.use == "move":
            remove(ready)
        else:
            remove(places.linked)
        raise SourceFailed(_another_hash(source, item.dest.name, fetched.sha256, expected.sha256, kept))

    def _transfer(self, places: Places, source: Source, expected: Wanted, outcome: Delivered, base: int = 0) -> Fetched:
        settings = replace(self._settings, headers={**self._settings.headers, **source.headers})
        transfer = Transfer(
            source.url or "", places, expected.size, expected.sha256, settings, self._progress.update, base
        )
        try:
            return transfer.run()
        finally:
            outcome.fetched += transfer.fetched

    def _fetch_joined(self, item: Wanted, number: int, outcome: Delivered) -> tuple[Fetched, Path]:
        """Raw parts one after the other into one file, each proved by its own hash, the sum by that of the whole.

        The whole is hashed part by part behind the transfer, from memory as a rule.
        """
        whole = Places(item.dest)
        digest = hashlib.sha256()
        base = resumed = 0
        by_source = True
        label = item.sources[number].label
        with ThreadPoolExecutor(1) as pool:
            hashing: list[Future[None]] = []
            for part in item.parts:
                source = part.sources[number]
                places = PartPlaces(part.dest, whole)
                self._progress.base = base
                expected = _expected(part, source)
                for attempt in (1, 2):
                    if source.path is not None:
                        fetched = append_file(source, whole.part, base, expected.size, self._progress.update)
                    else:
                        fetched = self._transfer(places, source, expected, outcome, base)
                        expected = self._learn(expected, source, fetched, places)
                    if expected.sha256 in (None, fetched.sha256):
                        break
                    cut_off(whole.part, base)
                    remove(places.state)
                    if not (fetched.resumed_from and attempt == 1):
                        raise SourceFailed(
                            _another_hash(source, part.dest.name, fetched.sha256, expected.sha256, False)
                        )
                by_source = by_source and expected.sha256 is not None
                hashing.append(pool.submit(add_range, digest, whole.part, base, fetched.size))
                base += fetched.size
                resumed += fetched.resumed_from
            cut_off(whole.part, base)
            for task in hashing:
                task.result()
        sha256 = digest.hexdigest()
        problem = None
        if item.size not in (None, base):
            problem = fault(
                "size_mismatch",
                label,
                f"the parts of {item.dest.name} have {base} bytes together, expected {item.size}",
                "A part is missing at the end, or belongs to another revision: list all parts of the file.",
            )
        elif item.sha256 not in (None, sha256):
            problem = _another_hash(item.sources[number], item.dest.name, sha256, item.sha256, False)
        else:
            problem = _fault_within(whole.part, item.dest.name, label, sha256 if proved_by_hash(item) else None)
        if problem is not None:
            self._discard_parts(item)
            raise SourceFailed(problem)
        outcome.by_source = by_source and not proved_by_hash(item)
        return Fetched(base, sha256, outcome.fetched, resumed, {}), whole.part

    @staticmethod
    def _discard_parts(item: Wanted) -> None:
        whole = Places(item.dest)
        discard(whole)
        remove(*(PartPlaces(part.dest, whole).state for part in item.parts))

    def _take_over(self, places: Places, source: Source, expected: Wanted, outcome: Delivered) -> tuple[Fetched, Path]:
        """A local file that need not be copied: hashed where it is, then linked or moved.

        Never over ``.part``: a transfer writes there, and a linked file's bytes are the store's.
        """
        path = Path(source.path or "")
        try:
            size = path.stat().st_size
            if expected.size is not None and size != expected.size:
                raise SourceFailed(
                    fault(
                        "size_mismatch",
                        source.label,
                        f"the file has {size} bytes, expected {expected.size}",
                        "An unfinished or damaged file: complete it where it comes from, or name another source.",
                    )
                )
            done = 0

            def note(count: int) -> None:
                nonlocal done
                done += count
                self._progress.update(done, size)

            sha256 = hash_file(path, note)
        except OSError as exc:
            raise SourceFailed(
                fault("source_missing", source.label, f"cannot be read: {exc.strerror}", "Check path and permissions.")
            ) from exc
        fetched = Fetched(size, sha256, 0, 0, {})
        if source.use == "move" or expected.sha256 not in (None, sha256):
            return fetched, path
        how = link_file(path, places.linked)
        if how == "copy":
            self.report.notes.append(
                f"{places.dest} was copied: {path} is on another file system, which no link can cross"
            )
            return self._copy(places, source, expected), places.part
        outcome.linked = how == "link"
        return fetched, places.linked

    def _learn(self, expected: Wanted, source: Source, fetched: Fetched, places: Places | None = None) -> Wanted:
        """The hub's own hash, where no other is known."""
        if expected.sha256 or source.kind == "url":
            return expected
        size, sha256 = from_hops(fetched.hops)
        if sha256 is None:
            size, sha256 = from_api(source, self._settings)
        if size is not None and size != fetched.size:
            discard(places or Places(expected.dest))
            raise SourceFailed(
                fault(
                    "size_mismatch",
                    source.label,
                    f"the hub names {size} bytes, {fetched.size} came",
                    "Try again, or name another source.",
                )
            )
        return replace(expected, sha256=sha256)

    def _copy(self, places: Places, source: Source, expected: Wanted) -> Fetched:
        """From a local file, hashed on the way; blocks are shared where the file system can."""
        path = Path(source.path or "")
        digest = hashlib.sha256()
        done = 0
        try:
            with path.open("rb", buffering=0) as origin:
                size = os.fstat(origin.fileno()).st_size
                if expected.size is not None and size != expected.size:
                    head = origin.read(SNIFF)
                    wrong = sniff(head, places.dest.name)
                    if wrong is not None:
                        raise SourceFailed(fault(wrong[0], source.label, wrong[1], wrong[2]), lfs_pointer(head))
                    raise SourceFailed(
                        fault(
                            "size_mismatch",
                            source.label,
                            f"the file has {size} bytes, expected {expected.size}",
                            "Check path and size.",
                        )
                    )
                remove(places.state)
                with places.part.open("wb", buffering=0) as part:
                    os.fchmod(part.fileno(), 0o600)
                    shared = share_blocks(origin.fileno(), part.fileno())
                    buffer = memoryview(bytearray(4 * MIB))
                    while count := origin.readinto(buffer):
                        digest.update(buffer[:count])
                        data = buffer[:count]
                        while data and not shared:
                            data = data[part.write(data) :]
                        done += count
                        self._progress.update(done, size)
                    os.fsync(part.fileno())
        except OSError as exc:
            discard(places)
            if exc.filename is not None and str(exc.filename) == str(path):
                raise SourceFailed(
                    fault(
                        "source_missing", source.label, f"cannot be read: {exc.strerror}", "Check path and permissions."
                    )
                ) from exc
            raise _not_written(str(places.part), "cannot be written", exc) from exc
        return Fetched(done, digest.hexdigest(), 0, 0, {})

    # -- places -----------------------------------------------------------------------------------------------------

    def _place(self, index: int, fetched: Fetched, source: Source, ready: Path) -> None:
        """Give the verified part its name; the stamp first, so that a kill in between costs nothing."""
        item, outcome = self._wanted[index], self.report.files[index]
        places = Places(item.dest)
        try:
            if not outcome.linked:
                ready.chmod(0o644)
                self._prepare(ready)
            found = "" if index in self._unreadable else outcome.sha256
            outcome.set_aside = self._set_aside(places, item, found)
            stat = ready.stat()
            Stamp.of(stat, fetched.sha256, source.label, _proved(item, outcome)).write(places.stamp)
            ready.replace(item.dest)
            sync_folder(item.dest.parent)
        except OSError as exc:
            raise _not_written(str(item.dest), "the verified file cannot be put there", exc) from exc
        remove(places.state, places.rejected, places.linked)
        remove(*(PartPlaces(part.dest, places).state for part in item.parts))
        if ready != places.part:
            discard(places)
        outcome.size, outcome.sha256, outcome.source = fetched.size, fetched.sha256, source.label
        outcome.resumed_from, outcome.changed, outcome.right = fetched.resumed_from, True, True

    def _set_aside(self, places: Places, item: Wanted, found: str | None) -> str | None:
        """Keep a file that stands under the name but is not known to be an older version of ours. ``found`` is the
        SHA-256 of its bytes, null where they were not read."""
        size = _size_of(places.dest)
        if size is None:
            return None
        stamp = read_stamp(places.stamp)
        ours = stamp is not None and stamp.fits(places.dest.stat()) and found in (None, stamp.sha256)
        if stamp is not None and ours and stamp.sha256 != item.sha256:
            # Ours, verified, and now replaced by another version.
            return None
        if size == 0:
            return None
        places.dest.replace(places.corrupt)
        return str(places.corrupt)

    def _reject(self, places: Places, fetched: Fetched, source: Source) -> None:
        """Whole but with another hash than expected: aside, in case the expectation was the mistake."""
        stamp = places.rejected.with_name(places.rejected.name + ".json")
        Stamp.of(places.part.stat(), fetched.sha256, source.label).write(stamp)
        places.part.replace(places.rejected)
        remove(places.state)

    def _adopt_rejected(self, index: int) -> bool:
        """Take a file that an earlier run refused, when it has the hash that is expected now."""
        item = self._wanted[index]
        places = Places(item.dest)
        record = places.rejected.with_name(places.rejected.name + ".json")
        stamp = read_stamp(record)
        if stamp is None or item.sha256 is None or stamp.sha256 != item.sha256 or not places.rejected.exists():
            return False
        if not stamp.fits(places.rejected.stat()) or not _right(item, stamp.size, stamp.sha256):
            return False
        discard(places)
        places.rejected.replace(places.part)
        remove(record)
        source = Source(path=stamp.source)
        self._place(index, Fetched(stamp.size, stamp.sha256, 0, stamp.size, {}), source, places.part)
        return True


def deliver_first(
    sets: Sequence[Sequence[Wanted]], make: Callable[[Sequence[Wanted], Callable[[], None]], Delivery], check: bool
) -> tuple[Sequence[Wanted], Report]:
    """Deliver the first set that can be had whole; what was delivered and how it went. FaultError as Delivery.run.

    A set that is there is taken whatever its place in the order. What a set that was given up has left is kept for the
    next run until another set is there, or the disk is too small for both.
    """
    given_up: list[tuple[Sequence[Wanted], Report]] = []

    def make_room() -> None:
        for wanted, report in given_up:
            _forget(wanted, report, ())

    if len(sets) > 1:
        for wanted in sets:
            delivery = make(wanted, make_room)
            if delivery.proved():
                return wanted, delivery.predict() if check else delivery.run()
    for wanted in sets:
        delivery = make(wanted, make_room)
        report = delivery.predict() if check else delivery.run()
        if not [fault for fault in report.faults if is_fatal(fault)]:
            kept = {item.dest for item in wanted}
            for other, earlier in given_up:
                report.passed_over = earlier.faults + report.passed_over
                if not check:
                    _forget(other, earlier, kept)
            return wanted, report
        given_up.append((wanted, report))
    wanted, report = given_up[0]
    report.faults = [fault for _, earlier in given_up for fault in earlier.faults]
    return wanted, report


def _forget(wanted: Sequence[Wanted], report: Report, kept: Collection[Path]) -> None:
    """Remove what this run fetched of a set that was given up: parts, and files that another set has no use for."""
    for item, outcome in zip(wanted, report.files, strict=True):
        if item.dest in kept:
            continue
        Delivery._discard_parts(item)
        if outcome.changed:
            remove(item.dest, Places(item.dest).stamp)


def _expected(item: Wanted, source: Source) -> Wanted:
    """What the source's own metadata promise holds as well, but what the operator gave comes first."""
    return replace(
        item,
        size=item.size if item.size is not None else source.size,
        sha256=item.sha256 or source.sha256,
    )


def _proved(item: Wanted, outcome: Delivered) -> str:
    return "sha256" if proved_by_hash(item) else ("source" if outcome.by_source else "")


def _needs_no_room(source: Source, folder: Path) -> bool:
    """Whether the file only gets another name: one that is moved, or linked on the same file system."""
    if source.path is None or source.use == "copy":
        return False
    try:
        return Path(source.path).stat().st_dev == folder.stat().st_dev
    except OSError:
        return False


def _another_hash(source: Source, name: str, sha256: str, expected: str | None, kept: bool) -> Fault:
    return fault(
        "hash_mismatch",
        source.label,
        f"{name}: its SHA-256 is {sha256}, expected {expected}"
        + (" (that of an empty file)" if expected == EMPTY_SHA256 else ""),
        "Compare the expected value with the publisher's. If it is right, the source has another file: name "
        "another source."
        + (" What came is kept aside and taken without a new download once the hash is corrected." if kept else ""),
    )


def _right(item: Wanted, size: int | None, sha256: str | None) -> bool:
    return item.size in (None, size) and item.sha256 in (None, sha256)


def _fault_within(path: Path, name: str, subject: str, sha256: str | None) -> Fault | None:
    """What speaks against a whole file: its first bytes; where no hash speaks for it, also a header that wants more."""
    wrong = sniff(_head(path), name)
    if wrong is not None:
        return fault(wrong[0], subject, wrong[1], wrong[2])
    if sha256 is not None or not name.lower().endswith(".gguf"):
        return None
    try:
        source = FileSource(str(path))
        try:
            header = read_header(source)
            check_data(header, name)
        finally:
            source.close()
    except FaultError as exc:
        return replace(exc.fault, subject=subject)
    # A shard that has the name of a whole file; those with names of shards are judged together.
    faults = check_first(header, name)[1] if shard_name(name) is None else []
    return replace(faults[0], subject=subject) if faults else None


def _header(path: Path) -> Header | None:
    try:
        source = FileSource(str(path))
        try:
            return read_header(source)
        finally:
            source.close()
    except FaultError:
        return None


def _head(path: Path) -> bytes:
    with path.open("rb") as handle:
        return handle.read(SNIFF)


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def hash_file(path: Path, note: Callable[[int], None] = lambda count: None) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(4 * MIB))
    with path.open("rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(buffer[:count])
            note(count)
    return digest.hexdigest()


def read_hash(path: Path, note: Callable[[int], None] = lambda count: None) -> tuple[str | None, str | None]:
    """(SHA-256, null) of a file, or (null, why) where the disk does not give it back. OSError for anything else."""
    try:
        return hash_file(path, note), None
    except OSError as exc:
        if exc.errno not in (errno.EIO, errno.EUCLEAN, errno.ENODATA):
            raise
        return None, exc.strerror


def _not_written(place: str, what: str, exc: OSError) -> FaultError:
    """A disk that is full, or a place that may not be written, as one fault; what has come stays."""
    full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Make room on that file system" if full else "Check owner, mode and mount of the place, or run with become"
    return FaultError(
        fault(
            "disk_full" if full else "dest_not_writable",
            place,
            f"{what}: {exc.strerror or exc}",
            f"{remedy}, and run again: what has been fetched is used.",
        )
    )


def _free(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
