# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Fetches one file from one address: range connections side by side, hashed in order while it arrives, resumable.

Workers write what they receive in place into ``<name>.part``. One more thread hashes behind the front up to which the
file is whole: from the buffer of the worker that is there, else from the page cache, so that memory stays small however
far the workers are apart. After every few MiB a small state file says which ranges are there: what a killed run leaves
is used by the next one, after hashing it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..faults import Fault, FaultError
from ..headers import whole_number
from .catalogue import fault
from .http import (
    HostRefused,
    Origin,
    ProtocolError,
    Response,
    Session,
    Unreachable,
    host_of,
    plain,
    redact,
    retry_after,
)
from .sniff import lfs_pointer, sniff
from .store import Places, Ranges, State, boot_id, remove

MIB = 1 << 20
#: A worker's buffer: the larger, the fewer turns the threads take. All of them together stay below BUFFERS.
READ_MIN, READ, BUFFERS = 1 * MIB, 4 * MIB, 36 * MIB
#: A worker's request: so large that its round trip is 1/SPAN_TRIPS of its time, else small, so that what is there is
#: soon whole and can be hashed while more comes, and that all end together.
SPAN_MIN, SPAN_FIRST, SPAN_MAX, SPAN_TRIPS = 4 * MIB, 16 * MIB, 256 * MIB, 50
#: The first connection is looked at for a moment before more are opened, and again as long as it is alone. More would
#: only take turns with it where it is fast already (bytes/s), or where the machine is what it waits for: where this
#: share of its time goes into writing and handing on what came.
FAST, BUSY, LOOK_S = 400e6, 0.3, 0.1
#: A connection that was given up because the server would not have it is tried again after this time, then after twice.
RETRY_LOST_S = 15.0
#: After this many bytes the state is written; it bounds what a kill costs (with what is in flight).
STATE_EVERY = 8 * MIB
#: How often written bytes are forced to the disk, which bounds what a power cut costs.
SYNC_EVERY_S = 15.0
WRITE_BACK_S = 0.5
SNIFF = 1024


class SourceFailed(Exception):
    """This source cannot give the file; ``fault`` says why. Others may be tried.

    ``pointer`` is what a Git-LFS pointer that came instead says of the file itself: (SHA-256, size).
    """

    def __init__(self, fault: Fault, pointer: tuple[str | None, int | None] | None = None) -> None:
        super().__init__(fault.message)
        self.fault = fault
        self.pointer = pointer


class Restart(Exception):
    """What was fetched so far is of no use; start from zero."""

    def __init__(self, reason: str, without_ranges: bool = False, code: str = "source_changed") -> None:
        super().__init__(reason)
        self.without_ranges = without_ranges
        self.code = code


class Transient(Exception):
    """A failure that another attempt may not see. ``wait`` is what the server asks for (seconds).

    ``crowded`` means that fewer connections may help; ``code`` is the fault it becomes when it persists.
    """

    def __init__(
        self, reason: str, wait: float | None = None, crowded: bool = False, code: str = "source_unreachable"
    ) -> None:
        super().__init__(reason)
        self.wait = wait
        self.crowded = crowded
        self.code = code


@dataclass(frozen=True)
class Settings:
    """How to fetch. Times in seconds; ``retries`` are consecutive failures without a byte between them.

    ``unreachable`` are hosts that must not be tried, not even when a redirect leads there.
    """

    connections: int = 4
    timeout: float = 30.0
    stall_timeout: float = 30.0
    retries: int = 5
    retry_wait: float = 1.0
    longest_wait: float = 120.0
    headers: Mapping[str, str] = field(default_factory=dict)
    ca_path: str | None = None
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fetched:
    """A whole file in ``.part``. ``fetched`` are body bytes received, ``resumed_from`` those that were there before."""

    size: int
    sha256: str
    fetched: int
    resumed_from: int
    hops: Mapping[str, str]


class Transfer:
    """One file from one address. ``progress`` is called with (done, total or null) about twice a second.

    ``base`` is where in ``.part`` the file begins: what stands before belongs to parts that are already whole.
    """

    def __init__(
        self,
        url: str,
        places: Places,
        size: int | None,
        sha256: str | None,
        settings: Settings,
        progress: Callable[[int, int | None], None] = lambda done, total: None,
        base: int = 0,
    ) -> None:
        self._base = base
        self._url = url
        self._name = redact(url)
        self._origin = Origin.of(url)
        self._places = places
        self._want_size = size
        self._want_sha256 = sha256
        self._settings = settings
        #: With size and hash known, ETags decide nothing: the nodes of a mirror may each have their own for one file.
        self._proved = size is not None and sha256 is not None
        self._etags_differ = False
        self._progress = progress
        self._fd = -1
        self._cond = threading.Condition()
        self._save_lock = threading.Lock()
        self._state = State()
        self._total: int | None = None
        self._ranged = True
        self._resolved: str | None = None
        self._hops: dict[str, str] = {}
        self._fetched = 0
        self._resumed = self._progress_mark = self._failures = 0
        self._refusals = 0
        self._failed_at = 0.0
        self._begun = time.monotonic()
        #: Time that went into what was received; only meant for the time of one worker.
        self._busy_s = 0.0
        #: The shortest time from a request to its answer's head.
        self._latency: float | None = None
        self._silent_since = time.monotonic()
        self._prepare()

    def _prepare(self) -> None:
        """The part of the state that belongs to one attempt."""
        self._busy: dict[int, tuple[int, int | None]] = {}
        self._sessions: list[Session] = []
        self._workers: list[threading.Thread] = []
        self._active = 0
        #: Connections that may still be opened, and those given up, of which one is tried again after a while.
        self._reserve = 0
        self._slow_looks = 0
        self._lost = 0
        self._lost_at = 0.0
        self._retry_lost_s = RETRY_LOST_S
        self._stop = False
        self._error: BaseException | None = None
        self._unsaved = 0

    # -- the whole --------------------------------------------------------------------------------------------------

    def run(self) -> Fetched:
        """Fetch it. Raises SourceFailed (another source may do better) and FaultError (none will)."""
        try:
            self._fd = os.open(self._places.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise self._disk_error(exc) from exc
        try:
            self._resume()
            restarts = 0
            while True:
                try:
                    digest = self._attempt()
                    if self._etags_differ and digest != self._want_sha256 and not restarts:
                        raise Restart("its ETags differ, and together the bytes are not the file")
                    break
                except Restart as exc:
                    restarts += 1
                    if restarts > 3:
                        raise SourceFailed(
                            self._fault(
                                exc.code,
                                f"{exc}; started over {restarts - 1} times",
                                "Ask whoever publishes the file, or name another source.",
                            )
                        ) from exc
                    self._start_over(ranged=self._ranged and not exc.without_ranges)
            os.fsync(self._fd)
            size = self._state.done.front
            return Fetched(size, digest, self._fetched, self._resumed, dict(self._hops))
        except OSError as exc:
            raise self._disk_error(exc) from exc
        finally:
            nothing = self._base == 0 and os.fstat(self._fd).st_size == 0 and self._state.size != 0
            os.close(self._fd)
            if nothing:
                # No run can go on from it, so it would only look like one.
                with contextlib.suppress(OSError):
                    discard(self._places)

    @property
    def fetched(self) -> int:
        """Body bytes received so far."""
        return self._fetched

    def _resume(self) -> None:
        """Take over what an earlier run left, if it is of the file that is wanted now."""
        state = State.read(self._places.state)
        length = max(0, os.fstat(self._fd).st_size - self._base)
        if state is None and length and self._want_sha256:
            # From another program, or the state was lost. The hash will tell.
            if self._want_size is None or length <= self._want_size:
                state = State(self._want_size, self._want_sha256, done=Ranges([(0, length)]))
        elif state is not None:
            same_hash = state.sha256 == self._want_sha256 if self._want_sha256 else state.source == self._name
            same_size = self._want_size is None or state.size in (None, self._want_size)
            state.done.cut(length)
            if not (same_hash and same_size):
                state = None
            elif state.source != self._name:
                # Another address of the same bytes: its versions have names of their own.
                state.etag = ""
        if state is None:
            self._start_over(ranged=True)
            return
        self._state = state
        self._state.source, self._state.sha256, self._state.boot = self._name, self._want_sha256, boot_id()
        self._total = self._want_size if self._want_size is not None else state.size
        self._resumed = self._progress_mark = state.done.total

    def _start_over(self, ranged: bool) -> None:
        os.ftruncate(self._fd, self._base)
        self._state = State(self._want_size, self._want_sha256, self._name, boot=boot_id())
        self._total = self._want_size
        self._ranged = ranged
        self._resumed = self._progress_mark = self._failures = 0
        self._resolved = None
        self._save()

    def _attempt(self) -> str:
        """Fetch what is missing; the SHA-256 of the whole."""
        self._prepare()
        self._buffers = _Buffers(self._settings.connections)
        hasher = self._hasher = _Hasher(self._fd, self._front, self._base, self._buffers)
        self._forcing = threading.Thread(target=self._force, daemon=True)
        try:
            hasher.start()
            self._forcing.start()
            # Again while something is missing: the last workers may have left it to each other.
            while self._total is None or self._state.done.total < self._total:
                session, span, response = self._first()
                if response is not None:
                    self._preallocate()
                    self._start_workers(session, span, response)
                self._watch()
                if self._error is not None:
                    raise self._error
            self._save()
            while not hasher.reached(self._total):
                self._progress(self._total, self._total)
                time.sleep(0.01)
            return hasher.digest()
        finally:
            self._halt(hasher)

    def _watch(self) -> None:
        """Wait for the workers; write the state, report, open more connections."""
        looked = time.monotonic()
        fetched, busy = self._fetched, self._busy_s
        while True:
            with self._cond:
                if self._error is not None or self._active == 0:
                    break
                if self._unsaved < STATE_EVERY:
                    self._cond.wait(LOOK_S if self._reserve else 0.5)
                if self._error is not None or self._active == 0:
                    break
                save = self._unsaved >= STATE_EVERY
                done = self._state.done.total
            if save:
                self._save()
            passed = time.monotonic() - looked
            if passed >= LOOK_S:
                self._progress(done, self._total)
                self._reinforce((self._fetched - fetched) / passed, (self._busy_s - busy) / passed)
                looked, fetched, busy = looked + passed, self._fetched, self._busy_s
        self._progress(self._state.done.total, self._total)

    def _force(self) -> None:
        """Let the disk begin with what is there, and force it there now and then; a thread of its own, for it waits."""
        synced = time.monotonic()
        try:
            while not self._stop:
                with self._cond:
                    self._cond.wait_for(lambda: self._stop, WRITE_BACK_S)
                    done = Ranges(list(self._state.done.items))
                if self._stop:
                    return
                if _LIBC is not None:
                    # What is forced at the end is short then.
                    _LIBC.sync_file_range(self._fd, 0, 0, _START_WRITING)
                if time.monotonic() - synced > SYNC_EVERY_S:
                    os.fdatasync(self._fd)
                    with self._cond:
                        self._state.durable = done
                    self._save()
                    synced = time.monotonic()
        except OSError as exc:
            with self._cond:
                self._error = self._error or exc
                self._cond.notify_all()

    def _halt(self, hasher: _Hasher) -> None:
        with self._cond:
            self._stop = True
            self._cond.notify_all()
        for session in self._sessions:
            session.abort()
        for worker in self._workers:
            worker.join()
        if self._forcing.is_alive():
            self._forcing.join()
        for session in self._sessions:
            session.close()
        hasher.stop()
        try:
            self._save()
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._give_way()
            self._save()

    def _give_way(self) -> None:
        """On a full disk, give up the end of what is there for the record of what is there."""
        with self._cond:
            done = self._state.done
            end = max(0, done.end - MIB)
            os.ftruncate(self._fd, self._base + end)
            done.cut(end)
            self._state.durable.cut(end)

    # -- requests ---------------------------------------------------------------------------------------------------

    def _session(self) -> Session:
        chosen = self._settings
        session = Session(chosen.timeout, chosen.stall_timeout, chosen.headers, chosen.ca_path, chosen.unreachable)
        self._sessions.append(session)
        return session

    def _first(self) -> tuple[Session, tuple[int, int | None], Response | None]:
        """The first answer, which tells size and abilities. The response is null when all is there already."""
        session = self._session()
        while True:
            span = self._take(0)
            if span is None:
                return session, (0, 0), None
            begun = time.monotonic()
            try:
                response, span = self._request(session, span)
                self._busy[0] = span
                return session, span, response
            except Transient as exc:
                session.close()
                # Else it stays taken, and with the size known nothing would be left to ask for.
                with self._cond:
                    self._busy.pop(0, None)
                self._sleep(self._failed(exc, begun))

    def _request(self, session: Session, span: tuple[int, int | None]) -> tuple[Response, tuple[int, int | None]]:
        """Ask for a span; the answer and the span it really holds."""
        start, end = span
        headers = {}
        if self._ranged and (start > 0 or end is not None):
            headers["Range"] = f"bytes={start}-" + (str(end - 1) if end is not None else "")
            if _strong(self._state.etag) and not self._proved:
                headers["If-Range"] = self._state.etag
        asked = time.monotonic()
        link = self._resolved
        try:
            response = session.get(link or self._url, headers, self._origin)
        except Unreachable as exc:
            with self._cond:
                self._resolved = None
            raise Transient(str(exc), crowded=True) from exc
        except ProtocolError as exc:
            raise Transient(str(exc), code="source_misbehaves") from exc
        except HostRefused as exc:
            raise SourceFailed(
                self._fault(
                    "source_unreachable",
                    f"{exc}, which is declared unreachable",
                    "Name another source or endpoint, or take the host off the list of unreachable ones.",
                )
            ) from exc
        self._hops.update(response.hops)
        if response.status in (200, 206):
            latency = time.monotonic() - asked
            self._latency = latency if self._latency is None else min(self._latency, latency)
            span = self._accept(response, start, end)
            if response.url != self._url:
                with self._cond:
                    self._resolved = response.url
            return response, span
        self._refuse(response, start, stale=link is not None)
        raise AssertionError("unreachable")

    def _accept(self, response: Response, start: int, end: int | None) -> tuple[int, int | None]:
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise SourceFailed(
                self._fault(
                    "source_misbehaves",
                    f"it sends the file compressed ({plain(encoding)}) although asked not to",
                    "A proxy in between may do this: bypass it (no_proxy) or name another source.",
                )
            )
        etag = response.headers.get("etag", "")
        if _strong(etag) and _strong(self._state.etag) and etag != self._state.etag:
            if not self._proved:
                raise Restart(f"its ETag changed from {plain(self._state.etag)} to {plain(etag)}")
            self._etags_differ = True
        if response.status == 200:
            if start > 0 or (self._active and self._ranged and end is not None):
                raise Restart(
                    "the whole file came as the answer to a range", without_ranges=True, code="source_misbehaves"
                )
            # Asked for a range and answered with all: there are no ranges here.
            self._ranged = self._ranged and end is None
            self._know(response.length, etag, response)
            return 0, self._total
        total, low, high = _content_range(response.headers.get("content-range"))
        if low is None or high is None:
            # Without Content-Range only the length can prove that this is what was asked for.
            told = response.headers.get("content-range") is not None
            if told or self._total is None or response.length != (self._total if end is None else end) - start:
                raise Restart(
                    "its 206 answer has no usable Content-Range", without_ranges=True, code="source_misbehaves"
                )
            low, high, total = start, start + response.length - 1, self._total
        if low != start or high < low or (end is not None and high >= end):
            raise Restart(
                f"asked for bytes from {start}, it sent bytes from {low} to {high}",
                without_ranges=True,
                code="source_misbehaves",
            )
        if response.length is not None and response.length != high - low + 1:
            raise Transient(
                f"its Content-Range names {high - low + 1} bytes, its Content-Length {response.length}",
                code="source_misbehaves",
            )
        self._know(total, etag, response if start == 0 else None)
        return start, high + 1

    def _know(self, total: int | None, etag: str, body: Response | None = None) -> None:
        """Compare what the source says about the whole file with what is known.

        ``body`` is an unread answer that begins with the file's first byte: where the size is another one, it tells
        whether this is another file or none at all.
        """
        if total is not None:
            if total == 0 and self._want_size != 0:
                raise SourceFailed(
                    self._fault("empty_file", "the source sent 0 bytes", "Try again later or name another source.")
                )
            if self._want_size is not None and total != self._want_size:
                if body is not None:
                    self._peek(body)
                raise SourceFailed(
                    self._fault(
                        "size_mismatch",
                        f"the source has {total} bytes, expected {self._want_size}",
                        "Check size and address: another revision of the file, or another quantization.",
                    )
                )
            if self._state.size is not None and total != self._state.size:
                raise Restart(f"its size changed from {self._state.size} to {total} bytes")
            self._total = self._state.size = total
        if _strong(etag):
            self._state.etag = etag

    def _peek(self, response: Response) -> None:
        """Judge an answer by its first bytes, as far as they come; nothing of it is kept."""
        head = bytearray()
        room = memoryview(bytearray(SNIFF))
        with contextlib.suppress(TimeoutError, Unreachable):
            while len(head) < SNIFF and (count := response.readinto(room[: SNIFF - len(head)])):
                head += room[:count]
        if head:
            self._look(bytes(head), response)

    def _refuse(self, response: Response, start: int, stale: bool) -> None:
        """Every status that is not a body of the file. ``stale``: what was asked is a link given out some time ago."""
        status = response.status
        elsewhere = response.url != self._url
        where = (f"{redact(response.url)} " if elsewhere else "") + f"answers {status} {response.reason}"
        if status == 416:
            self._unsatisfiable(response, start)
        if not elsewhere or Origin.of(response.url) == self._origin:
            login = login_fault(self._name, where, response, told_only=elsewhere)
            if login is not None:
                raise FaultError(login)
        if elsewhere and status in (400, 401, 403, 404, 410):
            # A signed link lives about an hour: ask the original address for another one.
            with self._cond:
                if self._resolved == response.url or not stale:
                    self._resolved = None
                # Only a link just given out says something about the content server; an old one may have expired, and
                # then all connections learn of it at once.
                self._refusals += 0 if stale else 1
                if self._refusals >= 3:
                    raise SourceFailed(
                        self._fault(
                            "source_refused",
                            f"the content server {host_of(response.url)} refuses the link that {host_of(self._url)} "
                            f"gave out ({status} {response.reason}, {self._refusals} times)",
                            "This is a fault of the content server, not of a token: name another source or endpoint.",
                        )
                    )
            raise Transient(where, wait=0.0 if stale else None, code="source_refused")
        if status in (404, 410, 451):
            raise SourceFailed(self._fault("source_missing", where, "Check repository, revision, path and spelling."))
        if status in (408, 425, 429) or status >= 500:
            wait = retry_after(response.headers)
            if wait is not None and wait > self._settings.longest_wait:
                raise SourceFailed(
                    self._fault(
                        "source_unreachable",
                        f"{where} and asks to wait {wait:.0f} s",
                        "Run again after that time or name another source.",
                    )
                )
            raise Transient(where, wait=wait, crowded=status in (429, 503))
        if status in (403, 407):
            raise SourceFailed(
                self._fault("source_refused", where, "Check token, address and proxy, or name another source.")
            )
        raise SourceFailed(self._fault("source_misbehaves", where, "Check the address or name another source."))

    def _unsatisfiable(self, response: Response, start: int) -> None:
        """416: the part is already whole, or longer than the file, or the server cannot do ranges here."""
        total, _, _ = _content_range(response.headers.get("content-range"))
        if total is not None and total == start and (self._want_size is None or self._want_size == total):
            if total == 0:
                self._know(0, "")
            # Whole already: the hash decides.
            with self._cond:
                self._total = self._state.size = total
            raise Transient("the part is already as long as the file", wait=0.0)
        if total is not None and total < start:
            raise Restart(f"the part is longer than the file ({start} of {total} bytes)")
        raise Restart("it refuses ranges of this file", without_ranges=True, code="source_misbehaves")

    def _fault(self, code: str, message: str, remedy: str) -> Fault:
        return fault(code, self._name, message, remedy)

    # -- workers ----------------------------------------------------------------------------------------------------

    def _start_workers(self, session: Session, span: tuple[int, int | None], response: Response) -> None:
        """Go on with the answer at hand; more connections are opened by _reinforce."""
        count = self._settings.connections if self._ranged and self._total is not None else 1
        left = (self._total or 0) - self._state.done.total
        self._reserve = max(1, min(count, -(-left // SPAN_MIN))) - 1
        self._start_worker(0, session, span, response)

    def _start_worker(
        self,
        number: int,
        session: Session,
        span: tuple[int, int | None] | None = None,
        response: Response | None = None,
    ) -> None:
        with self._cond:
            self._active += 1
        thread = threading.Thread(target=self._work, args=(number, session, span, response), daemon=True)
        self._workers.append(thread)
        thread.start()

    def _reinforce(self, rate: float, busy: float) -> None:
        """Open the other connections, unless the one there is leaves them nothing to win; try a lost one again."""
        now = time.monotonic()
        if self._lost and now - self._lost_at >= self._retry_lost_s:
            self._lost, self._lost_at = self._lost - 1, now
            self._retry_lost_s *= 2
            self._start_worker(len(self._workers), self._session())
        if self._reserve == 0:
            return
        if rate >= FAST or busy >= BUSY:
            self._slow_looks = 0
            return
        self._slow_looks += 1
        if rate >= FAST / 2 and self._slow_looks < 2:
            # Perhaps only a moment.
            return
        first = len(self._workers)
        count, self._reserve = self._reserve, 0
        for number in range(first, first + count):
            self._start_worker(number, self._session())

    def _work(
        self, number: int, session: Session, span: tuple[int, int | None] | None, response: Response | None
    ) -> None:
        retired = False
        try:
            while not self._stop:
                if span is None:
                    span = self._take(number)
                if span is None:
                    return
                begun = time.monotonic()
                try:
                    if response is None:
                        response, span = self._request(session, span)
                    self._receive(response, span)
                except Transient as exc:
                    session.close()
                    if self._stop:
                        return
                    if not self._ranged and self._fetched:
                        raise Restart(f"{exc}, and this server cannot go on from there", True, exc.code) from exc
                    if exc.crowded and self._retire(number):
                        retired = True
                        return
                    self._sleep(self._failed(exc, begun))
                finally:
                    with self._cond:
                        self._busy.pop(number, None)
                    span = response = None
        except BaseException as exc:  # noqa: BLE001 - handed to the thread that waits
            with self._cond:
                # An error that comes of breaking off is not the reason.
                if self._error is None and not self._stop:
                    self._error = exc
        finally:
            with self._cond:
                self._active -= 0 if retired else 1
                self._cond.notify_all()

    def _retire(self, number: int) -> bool:
        """Leave the rest to the other connections, if there are any at work."""
        with self._cond:
            if self._active < 2 or not any(other != number for other in self._busy):
                return False
            self._busy.pop(number, None)
            self._active -= 1
            self._reserve = 0
            self._lost += 1
            self._lost_at = time.monotonic()
            return True

    def _take(self, number: int) -> tuple[int, int | None] | None:
        """The next span to ask for: the first gap that nobody has taken. Null when there is none."""
        with self._cond:
            many = self._settings.connections > 1 and self._ranged
            if self._total is None:
                start = self._state.done.front
                # A whole answer, not a range, where ranges serve nothing; else a bounded one, which leaves the rest
                # to other connections once the size is known.
                span: tuple[int, int | None] = (start, start + SPAN_FIRST if many else None)
                self._busy[number] = span
                return span
            taken = Ranges(list(self._state.done.items))
            for low, high in self._busy.values():
                taken.add(low, self._total if high is None else high)
            gap = next(taken.gaps(self._total), None)
            if gap is None:
                return None
            start, end = gap
            if many:
                share = (self._total - taken.total) // (2 * self._settings.connections)
                end = min(end, start + max(SPAN_MIN, min(self._worthwhile(), share // MIB * MIB)))
            self._busy[number] = (start, end)
            return start, end

    def _worthwhile(self) -> int:
        """How much to ask for at once, by the time that a request has cost and the rate so far."""
        if self._latency is None or not self._fetched:
            return SPAN_FIRST
        rate = self._fetched / max(1e-3, time.monotonic() - self._begun) / max(1, self._active)
        return int(max(SPAN_MIN, min(SPAN_MAX, rate * self._latency * SPAN_TRIPS))) // MIB * MIB

    def _receive(self, response: Response, span: tuple[int, int | None]) -> None:
        """Write the body where it belongs."""
        offset, end = span
        buffer = self._buffers.take()
        try:
            while end is None or offset < end:
                if self._stop:
                    return
                room = buffer if end is None else buffer[: min(len(buffer), end - offset)]
                count = self._read(response, room)
                if offset == 0:
                    count = self._begin(response, room, count, end)
                if count == 0:
                    break
                begun = time.monotonic()
                self._write(room[:count], offset)
                given = self._hasher.offer(offset, room[:count], buffer)
                self._note(offset, count)
                offset += count
                if given:
                    buffer = self._buffers.take()
                self._busy_s += time.monotonic() - begun
            if end is None:
                with self._cond:
                    self._total = self._state.size = offset
                return
            if offset < end:
                raise Transient(f"the body ended {end - offset} bytes early")
            if response.length is None and not self._stop and self._read(response, buffer[:1]):
                if end != self._total:
                    told = f"it sends more than the bytes {span[0]} to {end - 1} that it names"
                    raise Transient(told, code="source_misbehaves")
                raise SourceFailed(
                    self._fault(
                        "size_mismatch",
                        f"the source sends more than the expected {end} bytes",
                        "Check size and address: another revision of the file, or another quantization.",
                    )
                )
        finally:
            self._buffers.give(buffer)

    def _begin(self, response: Response, room: memoryview, count: int, end: int | None) -> int:
        """Look at the first bytes before one is written: they tell a web page from a model. How many are there then."""
        while 0 < count < min(SNIFF, len(room)):
            more = self._read(response, room[count:])
            if more == 0:
                break
            count += more
        if count < min(SNIFF, len(room)) and end is not None:
            # Too little to be judged, and more was announced.
            raise Transient(f"the body ended {end - count} bytes early")
        self._look(bytes(room[: min(SNIFF, count)]), response)
        return count

    def _read(self, response: Response, room: memoryview) -> int:
        try:
            return response.readinto(room)
        except TimeoutError as exc:
            raise Transient(f"no bytes for {self._settings.stall_timeout:g} s") from exc
        except Unreachable as exc:
            raise Transient(str(exc)) from exc

    def _look(self, head: bytes, response: Response) -> None:
        if not head:
            if self._want_size == 0:
                return
            raise SourceFailed(
                self._fault("empty_file", "the source sent 0 bytes", "Try again later or name another source.")
            )
        found = sniff(head, self._places.dest.name, response.headers.get("content-type", ""))
        if found is not None:
            raise SourceFailed(self._fault(*found), lfs_pointer(head))

    def _write(self, data: memoryview, offset: int) -> None:
        offset += self._base
        while data:
            written = os.pwrite(self._fd, data, offset)
            data = data[written:]
            offset += written

    def _note(self, offset: int, count: int) -> None:
        with self._cond:
            self._silent_since = time.monotonic()
            self._state.done.add(offset, offset + count)
            self._fetched += count
            self._unsaved += count
            self._refusals = 0
            if self._unsaved >= STATE_EVERY:
                # Written by the thread that waits, so that the workers need not.
                self._cond.notify_all()

    def _save(self) -> None:
        with self._save_lock:
            with self._cond:
                self._unsaved = 0
                state = self._state
                copy = State(
                    state.size,
                    state.sha256,
                    state.source,
                    state.etag,
                    state.boot,
                    Ranges(list(state.done.items)),
                    Ranges(list(state.durable.items)),
                )
            copy.write(self._places.state)

    def _failed(self, exc: Transient, begun: float) -> float:
        """Count a failure; how long to wait before the next attempt. Raises SourceFailed when there were enough.

        ``begun`` is when the attempt began. What began before the last failure was counted met the same mishap: a
        server that is started again drops all connections, which is one failure and not four.
        """
        with self._cond:
            done = self._state.done.total
            if done > self._progress_mark:
                self._failures = 0
                self._progress_mark = done
            # Whole already (416): no failure, only another look.
            if self._total is not None and done >= self._total:
                return 0.0
            if begun >= self._failed_at or not self._failures:
                self._failures += 1
                self._failed_at = time.monotonic()
            failures = self._failures
            silent = time.monotonic() - self._silent_since
        if failures > self._settings.retries:
            raise SourceFailed(
                self._fault(
                    exc.code,
                    f"{exc} ({failures} attempt{'s' if failures != 1 else ''} in {silent:.0f} s)",
                    "Check network, proxy and address from this host, or name another source. "
                    "Run again: it goes on from what is there.",
                )
            )
        if exc.wait is not None:
            return exc.wait
        return min(self._settings.retry_wait * 2.0 ** (failures - 1), self._settings.longest_wait)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._cond:
            while not self._stop and self._error is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._cond.wait(min(left, 1.0))
                if self._active == 0:
                    self._progress(self._state.done.total, self._total)

    # -- the disk ---------------------------------------------------------------------------------------------------

    def _front(self) -> int:
        return self._state.done.front

    def _preallocate(self) -> None:
        """Claim the blocks, so that a full disk shows now and the file lies in few pieces; the size stays as it is."""
        if self._total is None:
            return
        if self._missing() > _free(self._fd):
            # Said before it is tried: a claim that fails may keep what it got.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if _LIBC is None or filesystem_of(self._fd) in ("tmpfs", "ramfs"):
            # There, claiming a page costs as much as writing it, and nothing is kept in pieces.
            return
        if _LIBC.fallocate(self._fd, _KEEP_SIZE, ctypes.c_longlong(self._base), ctypes.c_longlong(self._total)) != 0:
            code = ctypes.get_errno()
            # Not every file system can; that is no reason to fail.
            if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(code, os.strerror(code))

    def _missing(self) -> int:
        """Bytes that the rest of the file will still take of the disk; what was claimed before is taken already."""
        try:
            claimed = max(0, self._places.part.stat().st_blocks * 512 - self._base)
        except OSError:
            claimed = 0
        return max(0, (self._total or 0) - max(claimed, self._state.done.total))

    def _disk_error(self, exc: OSError) -> FaultError:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            folder = self._places.dest.parent
            wanted = f" of {amount(self._total)}" if self._total is not None else ""
            numbers = f"{amount(self._state.done.total)}{wanted} of {self._places.dest.name} are there"
            with contextlib.suppress(OSError):
                if exc.errno == errno.ENOSPC and self._total is not None:
                    numbers += f", {amount(self._missing())} are missing, {amount(_free(folder))} are free"
            return FaultError(
                fault(
                    "disk_full",
                    str(folder),
                    f"the file system at {mount_of(folder)}: {exc.strerror}; {numbers}",
                    "Make room on that file system or choose another folder; what is there is kept, and the next run "
                    "goes on from it.",
                )
            )
        return FaultError(
            fault(
                "dest_not_writable",
                str(self._places.part),
                f"cannot be written: {exc.strerror or exc}",
                "Check the folder's owner and mode, and that the file system is not read-only.",
            )
        )


class _Buffers:
    """One buffer for each worker, and a few that the hasher may still be busy with. ``size`` is that of each."""

    SPARE = 4

    def __init__(self, workers: int) -> None:
        self._unused: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._unmade = workers + self.SPARE
        self.size = max(READ_MIN, min(READ, BUFFERS // self._unmade // MIB * MIB))
        self._lock = threading.Lock()

    def take(self) -> memoryview:
        """A buffer; waits for the hasher when all are in use."""
        with contextlib.suppress(queue.Empty):
            return self._unused.get_nowait()
        with self._lock:
            self._unmade -= 1
            if self._unmade >= 0:
                return memoryview(bytearray(self.size))
        return self._unused.get()

    def give(self, buffer: memoryview) -> None:
        self._unused.put(buffer)


class _Hasher:
    """Hashes a file in order, up to where it is whole, in a thread of its own.

    What a worker has just written at the end of what is hashed comes from its buffer, the rest from the file.
    """

    def __init__(self, fd: int, front: Callable[[], int], base: int, buffers: _Buffers) -> None:
        self._fd = fd
        self._base = base
        self._front = front
        self._buffers = buffers
        self._digest = hashlib.sha256()
        self._at = 0
        #: Data, its buffer, and behind them where the data offered so far end.
        self._offered: deque[tuple[memoryview, memoryview]] = deque()
        self._expected = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._scratch = memoryview(bytearray(4 * MIB))
        self._stop = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, offset: int, data: memoryview, buffer: memoryview) -> bool:
        """Take over a worker's buffer with the bytes at ``offset``, if they are next; it is given back later."""
        with self._lock:
            if self._stop or self._error is not None or offset != self._expected:
                return False
            self._offered.append((data, buffer))
            self._expected += len(data)
        self._wake.set()
        return True

    def _run(self) -> None:
        try:
            while not self._stop:
                self._wake.clear()
                if not self._hash_offered() and not self._hash_file():
                    self._wake.wait(0.005)
        except OSError as exc:
            self._error = exc
        finally:
            # Nobody may wait for a buffer that never comes.
            with self._lock:
                self._stop = True
            for _, buffer in self._offered:
                self._buffers.give(buffer)

    def _hash_offered(self) -> bool:
        with self._lock:
            if not self._offered:
                return False
            data, buffer = self._offered[0]
        self._digest.update(data)
        self._at += len(data)
        with self._lock:
            self._offered.popleft()
        self._buffers.give(buffer)
        return True

    def _hash_file(self) -> bool:
        with self._lock:
            # Not what is about to be offered: an offer must find its place.
            ready = min(len(self._scratch), self._front() - self._at) if self._expected == self._at else 0
            self._expected += max(0, ready)
        if ready <= 0:
            return False
        read = 0
        while read < ready:
            count = os.preadv(self._fd, [self._scratch[read:ready]], self._base + self._at + read)
            if count == 0:
                raise OSError(errno.EIO, "the part is shorter than its state says")
            read += count
        self._digest.update(self._scratch[:ready])
        self._at += ready
        return True

    def reached(self, size: int) -> bool:
        if self._error is not None:
            raise self._error
        return self._at >= size

    def digest(self) -> str:
        self.stop()
        return self._digest.hexdigest()

    def stop(self) -> None:
        self._stop = True
        if self._thread.is_alive():
            self._thread.join()


def login_fault(name: str, where: str, response: Response, told_only: bool = False) -> Fault | None:
    """What a hub's refusal of whoever asks means; null for every other answer.

    Hugging Face says why in a header of its own. ``told_only``: without that header it is no hub's answer.
    """
    why = response.headers.get("x-error-code", "").strip()
    if why == "GatedRepo" and response.status in (401, 403):
        return fault(
            "source_unauthorized",
            name,
            f"{where}: the repository is gated, and its licence is not accepted by this login",
            "Accept the licence on the repository's web page, wait where its owner must agree, and pass a token of "
            "that account which may read gated repositories.",
        )
    if why == "RepoNotFound" and response.status == 401:
        return fault(
            "source_unauthorized",
            name,
            f"{where}: the repository does not exist or is private",
            "Check owner and name of the repository; for a private one pass a token that may read it.",
        )
    if response.status != 401 or told_only:
        return None
    return fault(
        "source_unauthorized",
        name,
        where,
        "Accept the licence of a gated repository on its web page and pass a token that may read it "
        "(headers: Authorization), or correct the token.",
    )


def discard(places: Places) -> None:
    """Forget a part."""
    remove(places.part, places.state)


def _strong(etag: str) -> bool:
    return bool(etag) and not etag.startswith("W/")


def _content_range(value: str | None) -> tuple[int | None, int | None, int | None]:
    """(total, first, last) of a Content-Range; null for what it does not say."""
    match = re.fullmatch(r"\s*bytes\s+(?:([0-9]+)-([0-9]+)|\*)/([0-9]+|\*)\s*", value or "")
    if match is None:
        return None, None, None
    low, high, total = match.groups()
    return whole_number(total), whole_number(low), whole_number(high)


_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE, linux/falloc.h
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE, linux/fs.h


def amount(size: int) -> str:
    """Bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def mount_of(folder: Path) -> str:
    """Where the file system that a folder lies on is mounted."""
    here = Path(os.path.realpath(folder))
    while not here.is_mount() and here != here.parent:
        here = here.parent
    return str(here)


def _free(place: int | Path) -> int:
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize


def filesystem_of(fd: int) -> str:
    """The type of the file system that an open file lies on, as the kernel names it; empty when not known."""
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    mountinfo = Path("/proc/self/mountinfo")
    with contextlib.suppress(OSError), mountinfo.open(encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            # proc(5): ID, parent, major:minor, ..., a hyphen, the type.
            fields = line.split()
            if fields[2] == name:
                return fields[fields.index("-") + 1]
    return ""


def _libc() -> ctypes.CDLL | None:
    # os.posix_fallocate writes every block where the file system cannot allocate; the system call just says so.
    try:
        library = ctypes.CDLL(None, use_errno=True)
        library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
        library.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint]
        return library
    except (OSError, AttributeError):
        return None


_LIBC = _libc()
