# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A file server for machines of a lab: HTTP/1.1 with ranges, entity tags and honest lengths.

Standard library only. Run as ``python -m tests.lab.fileserver --root DIR --bind ADDRESS --port N``. A server that
misbehaves on purpose (a cut connection, a wrong length, a redirect) is a subclass of FileHandler that overrides
``answer`` or ``send_body``.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

#: IP_FREEBIND of Linux: bind to the bridge's address before the bridge is there (it goes when its last machine goes).
IP_FREEBIND = 15
CHUNK = 1 << 20
#: Seconds without a byte moved after which a connection is given up.
IDLE_TIMEOUT = 60


@dataclass(frozen=True)
class Range:
    """Bytes ``start`` to ``end``, both included."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start + 1


class UnsatisfiableRange(Exception):
    """A range that begins behind the end of the file."""


def parse_range(header: str | None, size: int) -> Range | None:
    """The one byte range asked for; None means the whole file (no header, several ranges, or not understood).

    RFC 9110, section 14: a server may ignore a Range header it does not understand, but one that begins at or behind
    the end is answered with 416.
    """
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", (header or "").strip())
    if not found or not (found[1] or found[2]):
        return None
    if not found[1]:
        length = int(found[2])
        if length == 0 or size == 0:
            raise UnsatisfiableRange
        return Range(max(0, size - length), size - 1)
    start = int(found[1])
    end = min(int(found[2]), size - 1) if found[2] else size - 1
    if found[2] and int(found[2]) < start:
        return None
    if start >= size:
        raise UnsatisfiableRange
    return Range(start, end)


def resolve(root: Path, url_path: str) -> Path | None:
    """The file an URL's path names below ``root``; None when there is none, or when it would lead out of ``root``."""
    relative = unquote(urlsplit(url_path).path).lstrip("/")
    if "\0" in relative:
        return None
    candidate = (root / relative).resolve()
    if not candidate.is_relative_to(root.resolve()) or not candidate.is_file():
        return None
    return candidate


class FileHandler(BaseHTTPRequestHandler):
    """GET and HEAD of files below ``root``; folders are not listed."""

    protocol_version = "HTTP/1.1"
    server_version = "volta-lab"
    timeout = IDLE_TIMEOUT
    root = Path()

    def do_GET(self) -> None:
        self.answer(send_body=True)

    def do_HEAD(self) -> None:
        self.answer(send_body=False)

    def answer(self, send_body: bool) -> None:
        """Answer one request."""
        path = resolve(self.root, self.path)
        if path is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with path.open("rb") as handle:
            status = path.stat()
            size = status.st_size
            tag = f'"{status.st_mtime_ns:x}-{size:x}"'
            wanted = self.headers.get("Range")
            # If-Range: a part is only useful while the file is still the one the first part came from.
            if self.headers.get("If-Range") not in (None, tag):
                wanted = None
            try:
                part = parse_range(wanted, size)
            except UnsatisfiableRange:
                self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(HTTPStatus.OK if part is None else HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(size if part is None else part.length))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", tag)
            self.send_header("Last-Modified", formatdate(status.st_mtime, usegmt=True))
            if part is not None:
                self.send_header("Content-Range", f"bytes {part.start}-{part.end}/{size}")
            self.end_headers()
            if send_body:
                self.send_body(handle, part or Range(0, size - 1))

    def send_body(self, handle: BinaryIO, part: Range) -> None:
        """Send the bytes of one range. A client that goes away ends it."""
        handle.seek(part.start)
        left = part.length
        try:
            while left > 0:
                chunk = handle.read(min(CHUNK, left))
                if not chunk:
                    break
                self.wfile.write(chunk)
                left -= len(chunk)
        except (ConnectionError, TimeoutError):
            left = -1
        if left != 0:
            # Fewer bytes than promised: the connection must not be used for another answer.
            self.close_connection = True


class FileServer(ThreadingHTTPServer):
    """Serves the files below ``root`` with ``handler``; each connection in a thread of its own."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], root: Path, handler: type[FileHandler] = FileHandler) -> None:
        bound = type(handler.__name__, (handler,), {"root": root.resolve()})
        super().__init__(address, bound)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        super().server_bind()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.fileserver", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder whose files are served")
    parser.add_argument("--bind", default="127.0.0.1", help="address (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not options.root.is_dir():
        print(f"error: {options.root} is not a folder", file=sys.stderr)
        return 1
    try:
        server = FileServer((options.bind, options.port), options.root)
    except OSError as error:
        print(f"error: {options.bind} port {options.port}: {error.strerror}", file=sys.stderr)
        return 1
    with server:
        print(server.url, flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
