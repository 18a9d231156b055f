# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A file server on loopback that can be made to misbehave: a script decides what each request gets."""

from __future__ import annotations

import http.server
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Exchange:
    """One request and the means to answer it: ``number`` counts from 1, ``start`` and ``end`` are the asked range."""

    handler: http.server.BaseHTTPRequestHandler
    number: int
    path: str
    query: str
    content: bytes
    start: int
    end: int
    ranged: bool

    @property
    def headers(self):
        return self.handler.headers

    def head(self, status: int, **headers: object) -> None:
        """Status line and headers; underscores stand for hyphens."""
        self.handler.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.handler.send_header(name.replace("_", "-"), str(value))
        self.handler.end_headers()

    def body(self, data: bytes) -> None:
        self.handler.wfile.write(data)

    def hang_up(self) -> None:
        self.handler.close_connection = True

    def proper(self, etag: str = '"1"', upto: int | None = None, **extra: object) -> None:
        """As a good server does; ``upto`` cuts the body off after so many bytes and hangs up."""
        if self.ranged and self.start >= len(self.content):
            self.head(416, Content_Range=f"bytes */{len(self.content)}", Content_Length=0)
            return
        data = self.content[self.start : self.end]
        status = 206 if self.ranged else 200
        span = f"bytes {self.start}-{self.end - 1}/{len(self.content)}" if self.ranged else None
        self.head(status, **{"Content_Length": len(data), "Content_Range": span, "ETag": etag, **extra})
        self.body(data if upto is None else data[:upto])
        if upto is not None:
            self.hang_up()

    def status(self, status: int, **headers: object) -> None:
        self.head(status, Content_Length=0, **headers)


Script = Callable[[Exchange], None]


@dataclass
class Site:
    """The server: ``files`` by path, ``script`` for what a request gets, ``asked`` what came: (path, Range)."""

    files: dict[str, bytes] = field(default_factory=dict)
    script: Script = Exchange.proper
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    seen: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0

    def start(self, certificate: tuple[str, str] | None = None) -> None:
        """Listen on a port of its own; with ``certificate`` (file, key file) by HTTPS."""
        site = self
        lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                asked = self.headers.get("Range")
                with lock:
                    site.asked.append((self.path, asked))
                    site.seen.append(dict(self.headers))
                    number = len(site.asked)
                content = site.files.get(path, b"")
                match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
                start = int(match[1]) if match else 0
                end = min(len(content), int(match[2]) + 1) if match and match[2] else len(content)
                exchange = Exchange(self, number, path, query, content, start, end, match is not None)
                try:
                    if path not in site.files and site.script is Exchange.proper:
                        exchange.status(404)
                    else:
                        site.script(exchange)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, *args: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._scheme = "https"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def url(self, path: str) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}{path}"

    @property
    def port(self) -> int:
        return self._server.server_address[1]
