# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The client against a server that answers in every way that one can."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from ansible_collections.volta.llm.plugins.module_utils.ollama.client import ApiError, Client, Watch
from ansible_collections.volta.llm.plugins.module_utils.ollama.errors import not_answering


class Answers(BaseHTTPRequestHandler):
    """Answers with the next of ``plan``: status and body, or pieces of a stream; null hangs up, a number waits."""

    protocol_version = "HTTP/1.1"
    plan: ClassVar[list[Any]] = []
    seen: ClassVar[list[tuple[str, str, bytes]]] = []
    #: What waits, waits for this.
    over: ClassVar[threading.Event] = threading.Event()

    def handle(self) -> None:
        # A client that has left is none of the server's business.
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """A test's output is no place for it."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((self.command, self.path, body))
        step = self.plan.pop(0)
        if isinstance(step, tuple):
            status, text = step
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in step:
            if piece is None:
                self.close_connection = True
                return
            if piece == "wait":
                self.over.wait(20)
                continue
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_DELETE = _answer


@pytest.fixture
def url() -> Iterator[str]:
    Answers.plan, Answers.seen, Answers.over = [], [], threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Answers.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


def lines(*events: dict[str, Any]) -> list[bytes]:
    return [json.dumps(event).encode() + b"\n" for event in events]


def follow(url: str, patience: float = 5.0) -> list[dict[str, Any]]:
    return list(Client(url, 5).follow("/api/pull", {"model": "m"}, lambda: patience))


def test_questions_and_their_answers(url: str) -> None:
    Answers.plan = [(200, b'{"version":"0.24.0"}'), (200, b'{"models":[{"name":"m"}]}'), (200, b'{"models":null}')]
    client = Client(f"{url}/v1/")
    assert client.version() == "0.24.0"
    assert client.tags() == [{"name": "m"}]
    assert client.loaded() == []
    assert [path for _, path, _ in Answers.seen] == ["/api/version", "/api/tags", "/api/ps"]


def test_deleting_what_is_not_there_is_told(url: str) -> None:
    Answers.plan = [(200, b""), (404, b'{"error":"model \'m\' not found"}'), (500, b'{"error":"broken"}')]
    client = Client(url)
    assert client.delete("m") is True
    assert client.delete("m") is False
    with pytest.raises(ApiError, match="broken") as caught:
        client.delete("m")
    assert caught.value.status == 500
    assert Answers.seen[0] == ("DELETE", "/api/delete", b'{"model": "m"}')


def test_another_server_at_the_address_is_not_ollama(url: str) -> None:
    for answer in ((200, b"<html>"), (200, b'{"other": 1}'), (200, b"[]"), (404, b"no such page")):
        Answers.plan = [answer]
        with pytest.raises(ApiError) as caught:
            Client(url).version()
        assert caught.value.kind == "unexpected"


def test_nothing_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ApiError) as caught:
            Client(f"http://127.0.0.1:{taken.getsockname()[1]}").version()
    assert caught.value.kind == "refused"


def test_what_is_no_address_is_refused() -> None:
    for address in ("127.0.0.1:11434", "ftp://a", "http://", "http://a:port"):
        with pytest.raises(ValueError, match=r"."):
            Client(address)


def test_no_login_of_an_address_is_shown() -> None:
    with pytest.raises(ValueError, match=r"no address") as caught:
        Client("ftp://oper:hidden@a")
    assert "hidden" not in str(caught.value)
    fault = not_answering(ApiError("refused", "connection refused"), "http://oper:hidden@127.0.0.1:11434")
    assert fault.subject == "http://...@127.0.0.1:11434"


def test_an_address_of_the_sixth_version() -> None:
    with pytest.raises(ApiError) as caught:
        Client("http://[::1]:9").version()
    assert caught.value.kind in ("refused", "broken")


def test_no_proxy_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    Answers.plan = [(200, b'{"version":"0.24.0"}')]
    assert Client(url).version() == "0.24.0"


def test_a_stream_is_followed_line_by_line(url: str) -> None:
    whole = lines({"status": "pulling manifest"}, {"status": "success"})
    # A line may come in pieces, and several in one.
    Answers.plan = [[whole[0][:7], whole[0][7:] + whole[1][:3], whole[1][3:], b"\n"]]
    assert [event["status"] for event in follow(url)] == ["pulling manifest", "success"]


def test_an_error_in_the_stream_is_an_error_although_the_status_is_200(url: str) -> None:
    Answers.plan = [
        lines({"status": "pulling manifest"}, {"error": "max retries exceeded: EOF"}, {"status": "success"})
    ]
    with pytest.raises(ApiError, match="max retries exceeded: EOF") as caught:
        follow(url)
    assert (caught.value.kind, caught.value.status) == ("said", 200)


def test_an_error_before_the_stream(url: str) -> None:
    for status, body, said in (
        (400, b'{"error":"invalid model name"}', "invalid model name"),
        (502, b"bad gateway", "bad"),
    ):
        Answers.plan = [(status, body)]
        with pytest.raises(ApiError, match=said) as caught:
            follow(url)
        assert (caught.value.kind, caught.value.status) == ("said", status)


def test_a_connection_that_breaks_ends_without_success(url: str) -> None:
    Answers.plan = [[*lines({"status": "pulling manifest"}), None]]
    assert [event["status"] for event in follow(url)] == ["pulling manifest"]


def test_a_line_that_is_cut_off_or_foreign(url: str) -> None:
    for piece, kind in ((b'{"status": "succ', "broken"), (b"[1]\n", "unexpected")):
        Answers.plan = [[piece]]
        with pytest.raises(ApiError) as caught:
            follow(url)
        assert caught.value.kind == kind


def test_silence_ends_when_patience_does(url: str) -> None:
    Answers.plan = [[*lines({"status": "verifying sha256 digest"}), "wait"]]
    with pytest.raises(ApiError) as caught:
        follow(url, 0.2)
    assert caught.value.kind == "silent"


def test_a_blob_is_sent_whole(url: str) -> None:
    content = bytes(range(256)) * 40_000
    Answers.plan = [(201, b"")]
    counted: list[int] = []
    Client(url).upload("0" * 64, io.BytesIO(content), len(content), 5, counted.append)
    assert Answers.seen == [("POST", f"/api/blobs/sha256:{'0' * 64}", content)]
    assert sum(counted) == len(content)


def test_a_blob_that_is_refused_is_told_in_ollama_s_words(url: str) -> None:
    Answers.plan = [(400, b'{"error":"digest mismatch, expected \\"sha256:0\\", got \\"sha256:1\\""}')]
    with pytest.raises(ApiError, match="digest mismatch, expected"):
        Client(url).upload("0" * 64, io.BytesIO(b"x"), 1, 5)


def test_lines_that_say_nothing_new_are_a_stall() -> None:
    clock = [0.0]
    watch = Watch(30, lambda: clock[0])
    for second in range(31):
        clock[0] = float(second)
        watch.see("pulling 3559f4bf4778", "sha256:35", 100, 1000)
    assert not watch.stalled
    clock[0] = 30.5
    watch.see("pulling 3559f4bf4778", "sha256:35", 100, 1000)
    assert watch.stalled
    # Less than before is news as well: Ollama takes back what a broken part had, and fetches it again.
    watch.see("pulling 3559f4bf4778", "sha256:35", 50, 1000)
    assert not watch.stalled


def test_hashing_may_take_as_long_as_the_slowest_disk_needs() -> None:
    clock = [0.0]
    watch = Watch(30, lambda: clock[0])
    watch.see("pulling 3559f4bf4778", "sha256:35", 40_000_000_000, 40_000_000_000)
    assert watch.patience() == 30
    watch.see("verifying sha256 digest", "", 0, 40_000_000_000)
    assert watch.patience() == 30 + 2000
    clock[0] = 2031.0
    assert watch.stalled
