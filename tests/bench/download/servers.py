# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The servers that downloads are measured and broken against, all on loopback, on ports of their own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"nginx": "nginx", "curl": "curl", "aria2c": "aria2"}
SENDFILE = 1 << 20


def find_program(name: str) -> str:
    """Its path (a user's PATH lacks /usr/sbin on Debian); the bare name where there is none."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") or name


def missing_programs(*names: str) -> str | None:
    """What to install, or null when all are there."""
    lacking = [name for name in names if find_program(name) == name]
    if not lacking:
        return None
    packages = " ".join(PACKAGES[name] for name in lacking)
    return f"not installed: {', '.join(lacking)}. Debian and Ubuntu: apt-get install --no-install-recommends {packages}"


def end_well() -> None:
    """Let a request to end (SIGTERM) unwind, so that servers are stopped and folders removed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_file(path: Path, size: int) -> str:
    """Bytes that nothing can compress; their SHA-256."""
    digest = hashlib.sha256()
    source = random.Random(size)
    block = b"GGUF" + source.randbytes((16 << 20) - 4)
    with path.open("wb") as handle:
        for number in range(-(-size // len(block))):
            piece = number.to_bytes(8, "big").join((block[:4], block[12:]))[: size - number * len(block)]
            handle.write(piece)
            digest.update(piece)
    return digest.hexdigest()


@dataclass
class Nginx:
    """``/`` as fast as it goes, ``/limited/`` with limit_rate, ``/two/`` with at most two connections at a time."""

    port: int
    log: Path

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    def bodies(self) -> list[int]:
        """Body bytes of each answer so far. nginx writes an answer's line when the answer has ended."""
        return [int(line.split()[1]) for line in self.log.read_text(encoding="ascii").splitlines()]


CONFIGURATION = """
daemon off;
worker_processes auto;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
{user}
events {{ worker_connections 256; }}
http {{
    access_log off;
    log_format bytes '$status $body_bytes_sent';
    sendfile on;
    tcp_nopush on;
    keepalive_requests 100000;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    limit_conn_zone $server_port zone=few:1m;
    server {{
        listen 127.0.0.1:{port};
        access_log {folder}/access.log bytes;
        location / {{ root {root}; }}
        location /limited/ {{ alias {root}/; limit_rate {rate}; }}
        location /two/ {{ alias {root}/; limit_conn few 2; limit_rate {rate}; }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(root: Path, folder: Path, rate: int) -> Iterator[Nginx]:
    """Serve the files of ``root``; ``rate`` (bytes/s and request) holds for ``/limited/`` and ``/two/``."""
    port = free_port()
    configuration = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""
    configuration.write_text(CONFIGURATION.format(folder=folder, root=root, port=port, rate=rate, user=user))
    process = subprocess.Popen(
        [find_program("nginx"), "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(configuration)]
    )
    try:
        wait_for(port, process)
        yield Nginx(port, folder / "access.log")
    finally:
        process.terminate()
        process.wait(20)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} before it listened")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError("the server does not listen")


class Paced:
    """A file server with a true limit per connection: what a connection did not use is not saved up.

    nginx counts limit_rate from each request's start and lets the first second's bytes go at once, which would make
    many short requests look fast.
    """

    BURST_S = 0.02

    def __init__(self, path: Path, rate: int) -> None:
        self.size = path.stat().st_size
        self.sent = 0
        self._lock = threading.Lock()
        paced = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError), path.open("rb") as content:
                    due = time.monotonic()
                    pending = b""
                    while True:
                        while b"\r\n\r\n" not in pending:
                            more = self.request.recv(65536)
                            if not more:
                                return
                            pending += more
                        head, _, pending = pending.partition(b"\r\n\r\n")
                        due = self.answer(head.decode("latin-1"), content.fileno(), due)

            def answer(self, head: str, content: int, due: float) -> float:
                asked = re.search(r"^range: *bytes=(\d+)-(\d*)", head, re.IGNORECASE | re.MULTILINE)
                start = int(asked[1]) if asked else 0
                end = min(paced.size, int(asked[2]) + 1) if asked and asked[2] else paced.size
                if start >= paced.size:
                    answer = f"HTTP/1.1 416 No\r\nContent-Range: bytes */{paced.size}\r\nContent-Length: 0\r\n\r\n"
                    self.request.sendall(answer.encode())
                    return due
                status = "206 Partial Content" if asked else "200 OK"
                span = f"Content-Range: bytes {start}-{end - 1}/{paced.size}\r\n" if asked else ""
                answer = f'HTTP/1.1 {status}\r\nETag: "1"\r\n{span}Content-Length: {end - start}\r\n\r\n'
                self.request.sendall(answer.encode())
                piece = max(4096, int(rate * paced.BURST_S)) if rate else SENDFILE
                while start < end:
                    if rate:
                        now = time.monotonic()
                        due = max(due, now - paced.BURST_S)
                        if due > now:
                            time.sleep(due - now)
                    count = os.sendfile(self.request.fileno(), content, start, min(piece, end - start))
                    if count == 0:
                        raise OSError("the file ended early")
                    start += count
                    due += count / rate if rate else 0.0
                    with paced._lock:
                        paced.sent += count
                return due

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 64

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/{path}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
