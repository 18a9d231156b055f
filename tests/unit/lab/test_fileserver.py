# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The file server, over real sockets."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.fileserver import FileServer, Range, UnsatisfiableRange, main, parse_range, resolve

CONTENT = bytes(range(256)) * 16


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.bin").write_bytes(CONTENT)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path.parent / "secret").write_bytes(b"s")
    with FileServer(("127.0.0.1", 0), tmp_path) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()


@pytest.fixture
def connection(server: FileServer) -> Iterator[http.client.HTTPConnection]:
    made = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    yield made
    made.close()


def ask(
    connection: http.client.HTTPConnection, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    return response, response.read()


def test_whole_file(connection: http.client.HTTPConnection) -> None:
    response, body = ask(connection, "/sub/a%20b.bin?x=1")

    assert (response.status, body) == (200, CONTENT)
    assert response.version == 11
    assert response.headers["Content-Length"] == str(len(CONTENT))
    assert response.headers["Accept-Ranges"] == "bytes"
    assert response.headers["ETag"]


def test_head_and_several_requests_on_one_connection(connection: http.client.HTTPConnection) -> None:
    response, body = ask(connection, "/sub/a%20b.bin", "HEAD")
    assert (response.status, body) == (200, b"")
    assert response.headers["Content-Length"] == str(len(CONTENT))
    again, body = ask(connection, "/sub/a%20b.bin", Range="bytes=100-")
    assert (again.status, body) == (206, CONTENT[100:])
    assert again.headers["Content-Range"] == f"bytes 100-{len(CONTENT) - 1}/{len(CONTENT)}"


def test_range_behind_the_end(connection: http.client.HTTPConnection) -> None:
    response, body = ask(connection, "/sub/a%20b.bin", Range=f"bytes={len(CONTENT)}-")

    assert (response.status, body) == (416, b"")
    assert response.headers["Content-Range"] == f"bytes */{len(CONTENT)}"


def test_a_part_of_a_file_that_changed_is_the_whole_file(
    connection: http.client.HTTPConnection, tmp_path: Path
) -> None:
    first, _ = ask(connection, "/sub/a%20b.bin", "HEAD")
    same, body = ask(connection, "/sub/a%20b.bin", Range="bytes=0-9", If_Range=first.headers["ETag"])
    assert (same.status, body) == (206, CONTENT[:10])

    (tmp_path / "sub" / "a b.bin").write_bytes(b"new content")
    changed, body = ask(connection, "/sub/a%20b.bin", Range="bytes=0-9", If_Range=first.headers["ETag"])
    assert (changed.status, body) == (200, b"new content")


def test_empty_file(connection: http.client.HTTPConnection) -> None:
    response, body = ask(connection, "/empty")
    assert (response.status, response.headers["Content-Length"], body) == (200, "0", b"")


@pytest.mark.parametrize("path", ["/none", "/sub", "/", "/../secret", "/%2e%2e/secret", "/sub/../../secret", "/a%00b"])
def test_what_is_not_served(connection: http.client.HTTPConnection, path: str) -> None:
    response, _ = ask(connection, path)
    assert response.status == 404


def test_a_link_out_of_the_folder_is_not_served(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("s")
    (root / "link").symlink_to(tmp_path / "secret")
    assert resolve(root, "/link") is None


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        (None, None),
        ("bytes=0-", Range(0, 99)),
        ("bytes=5-9", Range(5, 9)),
        ("bytes=90-1000", Range(90, 99)),
        ("bytes=-10", Range(90, 99)),
        ("bytes=-1000", Range(0, 99)),
        ("bytes=9-5", None),
        ("bytes=0-1,5-6", None),
        ("bytes=-", None),
        ("items=0-5", None),
    ],
)
def test_parse_range(header: str | None, wanted: Range | None) -> None:
    assert parse_range(header, 100) == wanted


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=100-", 100), ("bytes=100-200", 100), ("bytes=-0", 100), ("bytes=0-", 0)]
)
def test_parse_range_that_cannot_be_met(header: str, size: int) -> None:
    with pytest.raises(UnsatisfiableRange):
        parse_range(header, size)


def test_wrong_calls_are_one_message(tmp_path: Path, server: FileServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path / "none")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    assert main(["--root", str(tmp_path), "--port", str(server.server_address[1])]) == 1
    assert "in use" in capsys.readouterr().err
