# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""HTTP for large files: one request at a time, redirects followed in sight, bytes read into the caller's buffer.

Built on http.client because a download needs what urllib hides: the hops of a redirect (their headers carry size and
hash at Hugging Face), connection reuse for ranges, and reads that return what has arrived.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import errno
import http.client
import io
import os
import re
import selectors
import socket
import ssl
import struct
import time
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from ..faults import FaultError
from ..headers import sendable, unfit_header, whole_number
from ..proxies import in_a_network
from .catalogue import fault

REDIRECTS = (301, 302, 303, 307, 308)
MAX_REDIRECTS = 10
#: After this pause the next address is tried as well (RFC 8305 recommends 250 ms): an IPv6 route that swallows
#: packets must not cost a whole time-out.
NEXT_ADDRESS_S = 0.25
#: Headers on the way that tell what the file is (huggingface_hub reads the same ones).
HOP_HEADERS = ("x-linked-size", "x-linked-etag", "x-repo-commit")
USER_AGENT = "volta.llm model_download"


class Unreachable(Exception):
    """No connection, no answer in time, or the connection broke."""


class ProtocolError(Exception):
    """The other side does not speak HTTP as it should."""


class HostRefused(Exception):
    """The way leads to a host that the operator declared unreachable; ``host`` names it."""

    def __init__(self, host: str, sent_by: str | None) -> None:
        super().__init__(f"{sent_by} sends on to {host}" if sent_by else host)
        self.host = host


def redact(url: str) -> str:
    """The URL without what may be secret: user, password, query, fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return _without_login(url)
    if not parts.netloc and not url.startswith("/"):
        return _without_login(url)
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    if port:
        host = f"{host}:{port}"
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def _without_login(text: str) -> str:
    """What tells which entry is meant where it is no address: a login can stand in any part of it."""
    head = re.split("[?#]", text, maxsplit=1)[0]
    if "@" in text[len(head) :]:
        # Of a password with such a character in it, or only of the query: nobody can tell.
        return "..."
    return head.rpartition("@")[2][:80]


def plain(text: str, limit: int = 120) -> str:
    """Text that another machine sent, fit for a message: printable ASCII, the rest escaped, cut to ``limit``."""
    shown = "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def sent_on(base: str, link: str) -> str:
    """The address that a header names, relative to ``base``. Raises ValueError for what is none.

    http.client reads headers as Latin-1; the bytes of an address that was sent without escapes are UTF-8, and stay so.
    """
    return urljoin(base, quote(link.encode("latin-1", "replace"), safe="%/:=&?~#+!$,;'@()*[]"))


def host_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)


@dataclass(frozen=True)
class Origin:
    """Who is spoken to: scheme, host, port."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        try:
            parts = urlsplit(url)
        except ValueError as exc:
            raise ProtocolError(f"{redact(url)!r} is not an address ({exc})") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ProtocolError(f"{redact(url)!r} is not an http or https address")
        try:
            port = parts.port
        except ValueError:
            raise ProtocolError(f"{parts.hostname}: the port is not a number") from None
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80))


class Stream:
    """Reads a body off its socket in pieces that are worth their cost: as much as is there, at best a whole buffer.

    A read that returns with a few packets costs as much as one that returns with a MiB, and the threads of a download
    take turns in the interpreter. So where bytes come fast, a plain socket is told to fill the buffer, and records of
    TLS (16 KiB at most) are gathered while more of them are there.
    """

    #: What counts as fast: so many bytes, within this time of asking.
    FAST_BYTES, FAST_S = 1 << 17, 0.05
    #: The longest that a read may hold back bytes that are there.
    FILL_S = 1.0

    def __init__(self, raw: http.client.HTTPResponse, sock: socket.socket, timeout: float) -> None:
        self._raw = raw
        self._sock = sock
        self._timeout = timeout
        sock.settimeout(timeout)
        self._secure = isinstance(sock, ssl.SSLSocket)
        self._direct = False
        self._fast = False
        self._filling = False

    def readinto(self, buffer: memoryview) -> int:
        """At least one byte, 0 at the end. Raises TimeoutError when none came in time."""
        if not self._direct:
            # The head was read through a file object, which may have kept some of the body. A read of more than it can
            # keep leaves nothing in it.
            count: int = self._raw.fp.readinto1(buffer)
            self._direct = len(buffer) > io.DEFAULT_BUFFER_SIZE
            return count
        begun = time.monotonic()
        if self._secure:
            return self._records(buffer)
        filled = self._fill(buffer) if self._fast else None
        if filled is None:
            self._set_filling(False)
            filled = self._sock.recv_into(buffer)
        self._fast = filled >= self.FAST_BYTES and time.monotonic() - begun < self.FAST_S
        return filled

    def _fill(self, buffer: memoryview) -> int | None:
        """Wait for the whole buffer, but not long; null when nothing came by then."""
        self._set_filling(True)
        try:
            return self._sock.recv_into(buffer, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            return None

    def _set_filling(self, filling: bool) -> None:
        if filling == self._filling:
            return
        self._filling = filling
        if filling:
            # The kernel's own time limit: with Python's the socket does not block, and cannot wait for more.
            self._sock.settimeout(None)
            limit = min(self.FILL_S, self._timeout)
            packed = struct.pack("@ll", int(limit), int(limit % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        else:
            self._sock.settimeout(self._timeout)

    def _records(self, buffer: memoryview) -> int:
        count = self._sock.recv_into(buffer)
        if 0 < count < len(buffer):
            self._sock.settimeout(0.0)
            try:
                while count < len(buffer):
                    more = self._sock.recv_into(buffer[count:])
                    if not more:
                        break
                    count += more
            except OSError:
                # Nothing more is there now, or the connection broke: then the next read says so. What came counts.
                pass
            finally:
                self._sock.settimeout(self._timeout)
        return count


@dataclass
class Response:
    """An answer whose body has not been read.

    ``url`` is where it finally came from, ``hops`` the HOP_HEADERS seen on the way, ``length`` the body's announced
    length in bytes (null when not announced). ``redirected`` is true when it came from elsewhere than asked.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    url: str
    redirected: bool
    hops: dict[str, str]
    length: int | None
    _raw: http.client.HTTPResponse
    _stream: Stream
    _left: int | None = field(default=None)

    def __post_init__(self) -> None:
        self._left = self.length

    def readinto(self, buffer: memoryview) -> int:
        """Read what has arrived, at most the buffer; 0 at the end. Raises Unreachable when the connection breaks."""
        try:
            if self._left is None:
                data = self._raw.read1(len(buffer))
                buffer[: len(data)] = data
                return len(data)
            if self._left == 0:
                return 0
            count = self._stream.readinto(buffer[: self._left] if self._left < len(buffer) else buffer)
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as exc:
            raise Unreachable(_reason(exc)) from exc
        self._left -= count
        if self._left == 0:
            # Frees the connection for the next request; http.client did not see these reads.
            self._raw.close()
        return count

    def read_small(self, limit: int = 1 << 20) -> bytes:
        """A short body in one piece, at most ``limit`` bytes."""
        out = bytearray()
        buffer = memoryview(bytearray(min(limit, 1 << 16)))
        while len(out) < limit:
            count = self.readinto(buffer)
            if count == 0:
                break
            out += buffer[:count]
        return bytes(out[:limit])

    @property
    def consumed(self) -> bool:
        return self._left == 0


class Session:
    """One connection at a time, kept open between requests to the same place.

    ``timeout`` is for connecting, ``stall_timeout`` for silence within a body, in seconds; the answer's head must come
    within the shorter of both.
    ``headers`` go to the place first asked and to no other (they may hold a token). ``ca_path`` is a file of
    certificates to trust in place of the system's. ``unreachable`` are hosts that are not even tried, with all below
    them in the name (``example.org`` stands for ``cdn.example.org`` too).
    """

    def __init__(
        self,
        timeout: float = 30.0,
        stall_timeout: float = 30.0,
        headers: Mapping[str, str] | None = None,
        ca_path: str | None = None,
        unreachable: Collection[str] = (),
    ) -> None:
        self._unreachable = tuple(unreachable)
        self._timeout = timeout
        self._head_timeout = min(timeout, stall_timeout)
        self._stall_timeout = stall_timeout
        self._headers = sendable(headers)
        self._ca_path = ca_path
        self._connection: http.client.HTTPConnection | None = None
        self._connected_to: Origin | None = None
        self._open: Response | None = None
        self._sock: socket.socket | None = None
        self._aborted = False

    def get(self, url: str, headers: Mapping[str, str], origin: Origin | None = None) -> Response:
        """GET, redirects followed. ``origin`` is who may see the session's headers (default: the URL's own)."""
        unfit = unfit_header(self._headers)
        if unfit is not None:
            raise ProtocolError(" ".join(unfit))
        first = origin or Origin.of(url)
        hops: dict[str, str] = {}
        here = url
        for _ in range(MAX_REDIRECTS + 1):
            host = Origin.of(here).host.lower()
            if any(host == name or host.endswith("." + name) for name in self._unreachable):
                raise HostRefused(host, None if here == url else host_of(url))
            own = self._headers if Origin.of(here) == first else {}
            raw = self._request(here, {**own, **headers})
            for name in HOP_HEADERS:
                if raw.headers.get(name):
                    hops.setdefault(name, raw.headers[name])
            location = raw.headers.get("location")
            if raw.status not in REDIRECTS or not location:
                self._check_length(raw)
                redirected = here != url or origin not in (None, Origin.of(url))
                stream = Stream(raw, cast(socket.socket, self._sock), self._stall_timeout)
                self._open = _response(raw, here, redirected, hops, stream)
                return self._open
            # A short body is read so that the connection can be used again; a long one is not worth it.
            try:
                if raw.length is None or raw.length > 1 << 16:
                    self.close()
                else:
                    raw.read()
            except (OSError, http.client.HTTPException):
                self.close()
            try:
                here = sent_on(here, location)
            except ValueError as exc:
                raise ProtocolError(f"it redirects to {plain(redact(location))!r}, which is no address") from exc
        raise ProtocolError(f"{redact(url)}: more than {MAX_REDIRECTS} redirects")

    def _check_length(self, raw: http.client.HTTPResponse) -> None:
        """Raises ProtocolError where the body's end is not clear.

        http.client takes what int takes, and the first of several. One number several times is one (RFC 9110, 8.6).
        """
        lines = raw.headers.get_all("content-length", [])
        if raw.chunked or not lines:
            return
        told = {whole_number(word) for line in lines for word in line.split(",")}
        length = told.pop()
        if told or length is None:
            self.close()
            raise ProtocolError(f"its Content-Length is {plain(', '.join(sorted(set(lines))))}")
        if raw.status not in (204, 304):
            raw.length = length

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._connected_to, self._open = None, None, None

    def abort(self) -> None:
        """Break off from another thread: a read that waits returns at once."""
        self._aborted = True
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _request(self, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        origin = Origin.of(url)
        if self._open is not None and not self._open.consumed:
            self.close()
        reused = self._connection is not None and self._connected_to == origin
        try:
            return self._send(origin, url, headers)
        except (Unreachable, ProtocolError):
            if not reused or self._aborted:
                raise
            # A kept connection may have been closed by the other side meanwhile: that is no failure.
            return self._send(origin, url, headers)

    def _send(self, origin: Origin, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        proxy = _proxy_for(origin)
        if self._connection is None or self._connected_to != origin:
            self.close()
            self._connection = self._connect(origin, proxy)
            self._connected_to = origin
        parts = urlsplit(url)
        # As browsers and curl do it: what is no character of an address is escaped, what is escaped stays.
        target = quote(parts.path or "/", safe="%/:=&~+!$,;'@()*")
        if parts.query:
            target += "?" + quote(parts.query, safe="%/:=&?~+!$,;'@()*[]{}|^`")
        sent = {"User-Agent": USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity", **headers}
        if parts.username is not None and "Authorization" not in sent:
            sent["Authorization"] = _basic(unquote(parts.username), unquote(parts.password or ""))
        if proxy and origin.scheme == "http":
            target = urlunsplit((origin.scheme, parts.netloc.rpartition("@")[2], target, "", ""))
            credentials = _proxy_credentials(proxy)
            if credentials:
                sent["Proxy-Authorization"] = credentials
        missing = f"no connection within {self._timeout:g} s"
        try:
            if self._connection.sock is None:
                self._connection.connect()
            missing = f"no answer within {self._head_timeout:g} s"
            self._connection.sock.settimeout(self._head_timeout)
            self._connection.request("GET", target, headers=sent)
            # Kept, for http.client forgets the socket of an answer that ends with the connection.
            self._sock = self._connection.sock
            return self._connection.getresponse()
        except TimeoutError as exc:
            self.close()
            raise Unreachable(missing) from exc
        except ssl.SSLError as exc:
            self.close()
            raise Unreachable(_reason(exc)) from exc
        except (OSError, http.client.RemoteDisconnected, http.client.IncompleteRead) as exc:
            self.close()
            raise Unreachable(_reason(exc)) from exc
        except (http.client.HTTPException, ValueError) as exc:
            self.close()
            raise ProtocolError(_reason(exc)) from exc

    def _connect(self, origin: Origin, proxy: str | None) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        peer = Origin.of(proxy) if proxy else origin
        if origin.scheme == "https":
            context = trusting(self._ca_path)
            connection = http.client.HTTPSConnection(peer.host, peer.port, timeout=self._timeout, context=context)
            if proxy:
                credentials = _proxy_credentials(proxy)
                tunnel = {"Proxy-Authorization": credentials} if credentials else {}
                connection.set_tunnel(origin.host, origin.port, headers=tunnel)
        else:
            connection = http.client.HTTPConnection(peer.host, peer.port, timeout=self._timeout)
        connection._create_connection = _connect_any  # type: ignore[attr-defined]
        return connection


def trusting(ca_path: str | None) -> ssl.SSLContext:
    """What certificates are checked with: those of the file, or the system's. FaultError: bad_argument."""
    try:
        return ssl.create_default_context(cafile=ca_path)
    except (OSError, ValueError) as exc:
        # ssl's own errors are OSErrors too, with a text only OpenSSL's authors understand.
        text = None if isinstance(exc, (ssl.SSLError, ValueError)) else exc.strerror
        raise FaultError(
            fault(
                "bad_argument",
                "ca_path",
                f"{plain(str(ca_path))}: {text or 'holds no certificates in PEM'}",
                "Give a file that can be read with certificates in PEM (-----BEGIN CERTIFICATE-----), or leave it out.",
            )
        ) from None


def _response(
    raw: http.client.HTTPResponse, url: str, redirected: bool, hops: dict[str, str], stream: Stream
) -> Response:
    # http.client leaves length null for chunked bodies and for those that end with the connection.
    headers = cast(Mapping[str, str], raw.headers)
    return Response(raw.status, plain(raw.reason), headers, url, redirected, hops, raw.length, raw, stream)


def _connect_any(
    address: tuple[str, int], timeout: float = 30.0, source_address: object = None, **_: object
) -> socket.socket:
    """Connect to whichever address of the host answers first, each tried NEXT_ADDRESS_S after the one before."""
    host, port = address
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise OSError(f"the name {host} does not resolve ({exc.strerror or exc})") from exc
    waiting = _interleaved(infos)
    deadline = time.monotonic() + timeout
    last: OSError = TimeoutError(f"no connection within {timeout:g} s")
    selector = selectors.DefaultSelector()
    winner: socket.socket | None = None
    try:
        while winner is None and (waiting or selector.get_map()):
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(f"no connection within {timeout:g} s")
            if waiting:
                family, kind, proto, _, sockaddr = waiting.pop(0)
                try:
                    sock = socket.socket(family, kind, proto)
                except OSError as exc:
                    last = exc
                    continue
                sock.setblocking(False)
                code = sock.connect_ex(sockaddr)
                # In progress: the selector says when it is decided.
                if code in (0, errno.EINPROGRESS):
                    selector.register(sock, selectors.EVENT_WRITE)
                else:
                    sock.close()
                    last = OSError(code, os.strerror(code))
                    continue
            pause = NEXT_ADDRESS_S if waiting else deadline - now
            for key, _mask in selector.select(min(pause, deadline - now)):
                sock = key.fileobj  # type: ignore[assignment]
                selector.unregister(sock)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0 and winner is None:
                    winner = sock
                else:
                    sock.close()
                    last = OSError(code, os.strerror(code))
    finally:
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        selector.close()
    if winner is None:
        raise last
    winner.setblocking(True)
    winner.settimeout(timeout)
    return winner


def _interleaved(infos: list[tuple]) -> list[tuple]:  # type: ignore[type-arg]
    """Addresses in the system's order of preference, the two families taking turns."""
    if not infos:
        return []
    first = [info for info in infos if info[0] == infos[0][0]]
    other = [info for info in infos if info[0] != infos[0][0]]
    mixed = []
    while first or other:
        if first:
            mixed.append(first.pop(0))
        if other:
            mixed.append(other.pop(0))
    return mixed


def _proxy_for(origin: Origin) -> str | None:
    """The proxy the environment names (http_proxy, https_proxy, all_proxy, no_proxy), or null."""
    if in_a_network(origin.host) or urllib.request.proxy_bypass_environment(  # type: ignore[attr-defined]
        f"{origin.host}:{origin.port}"
    ):
        return None
    proxies = urllib.request.getproxies_environment()
    proxy = proxies.get(origin.scheme) or proxies.get("all")
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    if proxy and not proxy.lower().startswith("http://"):
        raise ProtocolError(f"the proxy that the environment names is not spoken to by http: {redact(proxy)}")
    return proxy or None


def _proxy_credentials(proxy: str) -> str | None:
    parts = urlsplit(proxy)
    return None if parts.username is None else _basic(unquote(parts.username), unquote(parts.password or ""))


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _reason(exc: BaseException) -> str:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({exc.verify_message})"
    if isinstance(exc, (http.client.InvalidURL, UnicodeError)):
        # Their texts hold the address, with what may be secret in it.
        return "the address has characters in it that no address can have"
    if isinstance(exc, ValueError):
        # Among them those of http.client, which quote a header.
        return f"the request cannot be made of this address and these headers ({type(exc).__name__})"
    if isinstance(exc, http.client.RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return plain(str(exc)) or type(exc).__name__


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds the server asks to wait (Retry-After as seconds or as a date), or null."""
    value = (headers.get("retry-after") or "").strip()
    if not value:
        return None
    seconds = whole_number(value)
    if seconds is not None:
        return float(seconds)
    try:
        when = email.utils.parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, when - (time.time() if now is None else now))
