# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where a header is read from: a file, a URL by ranged requests, or bytes at hand."""

from __future__ import annotations

import base64
import http.client
import os
import re
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

from ..faults import FaultError
from ..headers import sendable, unfit_header, whole_number
from ..transfer.http import trusting
from .faults import gguf_error

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
#: A URL is read in blocks of this many bytes.
BLOCK = 1 << 20
#: Most bytes of a URL that are fetched for one header. The largest vocabularies make headers of 10 to 20 MB.
URL_LIMIT = 48 << 20


class Source(Protocol):
    """Bytes with random access. ``name`` is fit for messages, ``size`` the whole length."""

    name: str
    size: int

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes; fewer only at the end."""

    def close(self) -> None: ...


class BytesSource:
    """A header at hand; ``size`` may say how long the whole file is."""

    def __init__(self, content: bytes, name: str = "header", size: int | None = None) -> None:
        self.name = name
        self._content = content
        self.size = len(content) if size is None else size

    def read(self, offset: int, count: int) -> bytes:
        return self._content[offset : offset + count]

    def close(self) -> None:
        return None


class FileSource:
    """A regular file. FaultError: gguf_not_found, gguf_unreadable."""

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            # Not blocking: opening a pipe would otherwise wait for its other end.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            raise gguf_error(
                "gguf_not_found", path, "there is no file of that name", "Give the path of the GGUF file."
            ) from None
        except OSError as exc:
            raise gguf_error(
                "gguf_unreadable", path, exc.strerror or str(exc), "Give a file that this user may read."
            ) from None
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise gguf_error("gguf_unreadable", path, f"this is {kind}", "Give the path of the GGUF file itself.")

    def read(self, offset: int, count: int) -> bytes:
        parts = []
        while count > 0:
            try:
                part = os.pread(self._descriptor, count, offset)
            except OSError as exc:
                raise gguf_error(
                    "gguf_unreadable", self.name, f"at byte {offset}: {exc.strerror}", "Check the disk and the file."
                ) from None
            if not part:
                break
            parts.append(part)
            offset += len(part)
            count -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        os.close(self._descriptor)


class _SameHostRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but hands credentials to no other host: mirrors sign their targets."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            for header in [name for name in request.headers if name.lower() in ("authorization", "cookie")]:
                request.remove_header(header)
        return request


def public_url(url: str) -> str:
    """A URL fit for messages: without user, password, query and fragment, which can hold secrets."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        raise gguf_error(
            "gguf_url_failed",
            re.split("[@?#]", url)[-1][:80] if "@" in url else re.split("[?#]", url)[0],
            "this is no address",
            "Check the URL.",
        ) from None
    # As it is written: the port may be none.
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))


def _without_credentials(url: str) -> tuple[str, dict[str, str]]:
    """A URL that urllib can open, and the header that stands for the user and password it held."""
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    token = base64.b64encode(urllib.parse.unquote(user).encode()).decode("ascii")
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {token}"}


class UrlSource:
    """A file behind HTTP, read block by block with ranged requests; never more than ``limit`` bytes of it.

    Every block is asked of the original URL again, so an expired signature of a redirect's target does no harm.
    ``fetched`` counts the bytes received. FaultError: gguf_url_failed.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        limit: int = URL_LIMIT,
        attempts: int = 3,
        ca_file: str | None = None,
    ) -> None:
        self.name = public_url(url)
        self.fetched = 0
        self._url, credentials = _without_credentials(url)
        self._headers = {**credentials, **sendable(headers)}
        unfit = unfit_header(self._headers)
        if unfit is not None:
            raise gguf_error(
                "gguf_url_failed", f"http_{unfit[0]}", unfit[1], "Write it on one line, as it was given out."
            )
        self._timeout = timeout
        self._limit = limit
        self._attempts = attempts
        try:
            context = trusting(ca_file)
        except FaultError as exc:
            raise gguf_error("gguf_url_failed", "ca_file", exc.fault.message, exc.fault.remedy) from None
        self._opener = urllib.request.build_opener(_SameHostRedirects, urllib.request.HTTPSHandler(context=context))
        self._blocks: dict[int, bytes] = {}
        self.size = 0
        self._blocks[0] = self._fetch(0)

    def read(self, offset: int, count: int) -> bytes:
        end = min(offset + count, self.size)
        parts = []
        while offset < end:
            index = offset // BLOCK
            if index not in self._blocks:
                self._blocks[index] = self._fetch(index)
            block = self._blocks[index]
            part = block[offset - index * BLOCK : end - index * BLOCK]
            if not part:
                break
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._blocks.clear()

    def _failed(self, message: str, remedy: str) -> Exception:
        return gguf_error("gguf_url_failed", self.name, message, remedy)

    def _fetch(self, index: int) -> bytes:
        start = index * BLOCK
        stop = start + BLOCK if not self.size else min(start + BLOCK, self.size)
        if self.fetched + (stop - start) > self._limit:
            raise self._failed(
                f"the header is longer than {self._limit} bytes", "Download the file and give its path instead."
            )
        for attempt in range(1, self._attempts + 1):
            try:
                return self._request(start, stop)
            except urllib.error.HTTPError as exc:
                exc.close()
                if exc.code == 416:
                    raise self._failed("the file is empty or shorter than its own header", "Check the URL.") from None
                if exc.code < 500 and exc.code not in (408, 429):
                    hint = (
                        "The file needs an account: accept its licence and give http_headers with a token."
                        if exc.code in (401, 403)
                        else "Check the URL."
                    )
                    raise self._failed(f"HTTP status {exc.code}", hint) from None
                reason = f"HTTP status {exc.code}"
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, OSError) as exc:
                # The text of an exception can hold the signed target of a redirect: only its kind is told.
                cause = exc.reason if isinstance(exc, urllib.error.URLError) else exc
                reason = (
                    (cause.strerror or type(cause).__name__) if isinstance(cause, OSError) else type(cause).__name__
                )
            except ValueError:
                raise self._failed(
                    "the address has characters in it that no address can have", "Check the URL."
                ) from None
            if attempt < self._attempts:
                time.sleep(0.5 * attempt)
        raise self._failed(f"{reason}, {self._attempts} times", "Check the network and the URL, then run it again.")

    def _request(self, start: int, stop: int) -> bytes:
        request = urllib.request.Request(
            self._url,
            headers={"Accept-Encoding": "identity", **self._headers, "Range": f"bytes={start}-{stop - 1}"},
        )
        with self._opener.open(request, timeout=self._timeout) as answer:
            if answer.status == 200:
                # The server ignores ranges. The beginning is still good for telling what the file is.
                self.size = self.size or whole_number(answer.headers.get("Content-Length")) or 0
                content = bytes(answer.read(stop - start))
                self.fetched += len(content)
                if start or not content.startswith(b"GGUF"):
                    self.size = self.size or len(content)
                    return content if not start else b""
                raise self._failed(
                    "the server does not answer ranged requests", "Use another mirror, or download the file first."
                )
            match = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
            if answer.status != 206 or not match or int(match[1]) != start:
                raise self._failed(
                    "the answer to a ranged request names no range or another one", "Use another mirror."
                )
            total = int(match[3])
            if self.size and total != self.size:
                raise self._failed("the file changed while its header was read", "Run it again.")
            self.size = total
            expected = int(match[2]) - start + 1
            content = bytes(answer.read(min(expected, stop - start)))
            self.fetched += len(content)
            if len(content) != min(expected, stop - start):
                raise http.client.IncompleteRead(content)
            return content


def is_url(location: str) -> bool:
    return location.lower().startswith(("http://", "https://"))
