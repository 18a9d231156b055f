# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Talks to Ollama's API on this machine.

Ollama answers 200 as soon as it begins to work, and reports what goes wrong afterwards as a line C({"error": ...}) of
the stream; only a line with the status C(success) means that it was done (server/routes.go, streamResponse).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, BinaryIO

MIB = 1 << 20
#: What can hold secrets in an address. Go quotes the addresses of its errors, and the cause comes behind them.
_LOGIN = re.compile(r"(?<=://)[^\s\"'/]*@")
_QUERY = re.compile(r"(://[^\s\"'?#]*)[?#][^\s\"']*")
#: A line of a stream is far shorter; a longer one is no answer of Ollama's.
_LONGEST_LINE = 1 << 20


class ApiError(Exception):
    """An answer that is an error, or none at all.

    ``kind`` is C(refused) (nothing listens), C(broken) (the connection broke), C(silent) (no answer in time),
    C(unexpected) (it is not Ollama's) or C(said): ``text`` is what Ollama says, ``status`` the HTTP status, 200 for one
    in a stream.
    """

    def __init__(self, kind: str, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.kind, self.text, self.status = kind, text, status


class Client:
    """Plain requests to one address, never through a proxy: the server is on this machine.

    ``timeout``: seconds for a connection and for an answer that needs no work. The proxy that a pull goes through is
    the service's own (C(HTTPS_PROXY) in its unit); nothing here can set it.
    """

    def __init__(self, base_url: str, timeout: float = 30.0) -> None:
        # The address of the OpenAI endpoint is the same server's.
        parts = urllib.parse.urlsplit(re.sub(r"(?:/v1)?/*$", "", base_url))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{plain(base_url)} is no address of a server")
        self._parts = parts
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._timeout = timeout

    # -- questions --------------------------------------------------------------------------------------------------

    def version(self) -> str:
        try:
            answer = self._json("GET", "/api/version")
        except ApiError as exc:
            if exc.status in (404, 405, 501):
                raise ApiError("unexpected", f"what answers there is not Ollama: {exc.status} {exc.text}") from None
            raise
        version = answer.get("version") if isinstance(answer, dict) else None
        if not isinstance(version, str):
            raise ApiError("unexpected", "what answers there is not Ollama: it tells no version")
        return version

    def tags(self) -> list[dict[str, Any]]:
        """The models that it lists: ``name``, ``digest`` (of the manifest), ``size`` and more."""
        return self._list("/api/tags")

    def loaded(self) -> list[dict[str, Any]]:
        """The models that are in memory."""
        return self._list("/api/ps")

    def show(self, model: str) -> dict[str, Any]:
        answer = self._json("POST", "/api/show", {"model": model})
        return answer if isinstance(answer, dict) else {}

    def delete(self, model: str) -> bool:
        """Delete a model; false where there was none."""
        try:
            self._json("DELETE", "/api/delete", {"model": model})
        except ApiError as exc:
            if exc.status == 404:
                return False
            raise
        return True

    def unload(self, model: str) -> None:
        self._json("POST", "/api/generate", {"model": model, "keep_alive": 0, "stream": False})

    # -- work -------------------------------------------------------------------------------------------------------

    def follow(
        self, path: str, content: Mapping[str, Any], patience: Callable[[], float]
    ) -> Generator[dict[str, Any], None, None]:
        """The lines of a stream, as they come. Raises ApiError where one is an error, or none comes in time.

        ``patience`` tells how many seconds the server may be silent at this moment; it is asked before each line.
        """
        connection = self._connect(self._timeout)
        try:
            answer = self._request(connection, "POST", path, json.dumps(content).encode(), patience)
            if answer.status != 200:
                raise self._said(answer)
            reader = _Lines(answer, connection)
            while (line := reader.next(patience)) is not None:
                yield self._line(line)
        except (OSError, http.client.HTTPException) as exc:
            raise self._failed(exc) from exc
        finally:
            connection.close()

    def upload(
        self, sha256: str, content: BinaryIO, size: int, patience: float, note: Callable[[int], None] = lambda n: None
    ) -> None:
        """Send a blob. Ollama hashes it on the way and refuses what is not named by its SHA-256."""
        connection = self._connect(patience)

        def pieces() -> Iterator[bytes]:
            while data := content.read(4 * MIB):
                yield data
                note(len(data))

        try:
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            path = f"{self._parts.path}/api/blobs/sha256:{sha256}"
            # It may answer before it has everything; what it says is of more use than that it hung up.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", path, body=pieces(), headers=headers)
            answer = connection.getresponse()
            if answer.status not in (200, 201):
                raise self._said(answer)
            answer.read()
        except (OSError, http.client.HTTPException) as exc:
            raise self._failed(exc) from exc
        finally:
            connection.close()

    # -- the wire ---------------------------------------------------------------------------------------------------

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        host = str(self._parts.hostname)
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, self._port, timeout=timeout, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, self._port, timeout=timeout)

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        patience: Callable[[], float],
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.connect()
        connection.sock.settimeout(max(0.01, patience()))
        connection.request(method, self._parts.path + path, body=body, headers=headers)
        return connection.getresponse()

    def _json(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> Any:
        body = json.dumps(content).encode() if content is not None else None
        connection = self._connect(self._timeout)
        try:
            answer = self._request(connection, method, path, body, lambda: self._timeout)
            if answer.status != 200:
                raise self._said(answer)
            text = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            raise self._failed(exc) from exc
        finally:
            connection.close()
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except ValueError:
            raise ApiError("unexpected", "what answers there is not Ollama: the answer is no JSON") from None

    def _list(self, path: str) -> list[dict[str, Any]]:
        answer = self._json("GET", path)
        models = answer.get("models") if isinstance(answer, dict) else None
        return [entry for entry in models or [] if isinstance(entry, dict)]

    @staticmethod
    def _line(line: bytes) -> dict[str, Any]:
        try:
            event = json.loads(line)
        except ValueError:
            raise ApiError("broken", f"a line of the stream is cut off: {line[:80]!r}") from None
        if not isinstance(event, dict):
            raise ApiError("unexpected", f"a line of the stream is no object: {line[:80]!r}")
        if "error" in event:
            raise ApiError("said", plain(str(event["error"])), 200)
        return event

    @staticmethod
    def _said(answer: http.client.HTTPResponse) -> ApiError:
        text = answer.read(64 << 10)
        try:
            content = json.loads(text)
            said = str(content["error"])
        except (ValueError, KeyError, TypeError):
            said = text.decode("utf-8", "replace").strip() or str(answer.reason)
        return ApiError("said", plain(said), answer.status)

    @staticmethod
    def _failed(exc: BaseException) -> ApiError:
        if isinstance(exc, TimeoutError):
            return ApiError("silent", "no answer in time")
        if isinstance(exc, ConnectionRefusedError):
            return ApiError("refused", "connection refused")
        if isinstance(exc, http.client.IncompleteRead):
            return ApiError("broken", "the connection broke in the middle of an answer")
        return ApiError("broken", str(exc) or type(exc).__name__)


class _Lines:
    """Lines of an answer, waiting for each as long as ``patience`` says when it is asked for."""

    def __init__(self, answer: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> None:
        self._answer = answer
        # An answer that ends with its connection takes the socket over.
        self._sock = connection.sock or getattr(getattr(answer.fp, "raw", None), "_sock", None)

    def next(self, patience: Callable[[], float]) -> bytes | None:
        """The next line that is not empty; null at the end."""
        while True:
            if self._sock is not None:
                self._sock.settimeout(max(0.01, patience()))
            line = self._answer.readline(_LONGEST_LINE)
            if not line:
                return None
            if line.strip():
                return line


class Watch:
    """Whether a stream still gets anywhere.

    Ollama repeats how far it is every 60 ms whether or not bytes come, and says nothing at all while it hashes what it
    has (0.24.0, server/download.go). So lines prove nothing, and silence is given the time that hashing can take.
    """

    #: Bytes a second that the slowest of disks is read with.
    SLOWEST = 20e6

    def __init__(self, stall_timeout: float, now: Callable[[], float] = time.monotonic) -> None:
        self._limit = stall_timeout
        self._now = now
        self._last: tuple[object, ...] | None = None
        self._since = now()
        self._bytes = 0.0
        self._hashing = False

    def see(self, status: str, digest: str, completed: int, total: float) -> None:
        """Note what a line says; ``total`` are the bytes of all blobs so far."""
        state = (status, digest, completed)
        self._hashing = status.startswith("verifying") or not digest
        self._bytes = max(self._bytes, total)
        if state != self._last:
            self._last, self._since = state, self._now()

    @property
    def limit(self) -> float:
        """Seconds that may pass without anything new."""
        return self._limit + (self._bytes / self.SLOWEST if self._hashing else 0.0)

    @property
    def stalled(self) -> bool:
        return self._now() - self._since > self.limit

    def patience(self) -> float:
        """Seconds for the next line."""
        return max(0.05, self._since + self.limit - self._now())


def plain(text: str) -> str:
    """What Ollama says, in one line, with no login or signature of an address in it."""
    return _QUERY.sub(r"\1?...", _LOGIN.sub("...@", " ".join(text.split())))[:600]
