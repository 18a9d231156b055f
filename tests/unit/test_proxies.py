# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Networks in no_proxy."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine import sources
from ansible_collections.volta.llm.plugins.module_utils.proxies import in_a_network
from ansible_collections.volta.llm.plugins.module_utils.transfer.http import Session


@pytest.mark.parametrize(
    ("host", "no_proxy", "within"),
    [
        ("10.1.2.3", "localhost, 10.0.0.0/8", True),
        ("192.168.7.1", "192.168.0.0/16,10.0.0.0/8", True),
        ("fd00::1", "fd00::/8", True),
        ("[fd00::1]", "[fd00::]/8", True),
        ("::1", "localhost,[::1]", True),
        ("::1", "0:0::1", True),
        ("::2", "[::1]", False),
        ("::1", "[::1", True),
        ("11.1.2.3", "10.0.0.0/8", False),
        ("10.1.2.3", "fd00::/8, nonsense/x, 10.1.2.4", False),
        ("mirror.lan", "10.0.0.0/8", False),
        ("10.1.2.3", "", False),
    ],
)
def test_what_lies_in_a_network_of_no_proxy(
    monkeypatch: pytest.MonkeyPatch, host: str, no_proxy: str, within: bool
) -> None:
    monkeypatch.setenv("no_proxy", no_proxy)
    assert in_a_network(host) is within


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", f"http://127.0.0.1:{httpd.server_port}/x")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"there")

        def log_message(self, format: str, *args: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


@pytest.mark.parametrize("by", ["address", "a redirect from a name"])
def test_a_mirror_in_the_own_network_is_asked_without_the_proxy(
    server: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The proxy of this test is a port where nobody listens."""
    url = f"{server}/x" if by == "address" else server.replace("127.0.0.1", "localhost") + "/moved"
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.0/8")
    session = Session()
    assert session.get(url, {}).read_small() == b"there"
    session.close()
    with sources._open(url) as answer:
        assert answer.read() == b"there"
