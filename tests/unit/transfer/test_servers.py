# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Every way a server misbehaves: the file comes right, or one clear fault and no file."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import http.client
import random
import re
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.transfer import engine
from ansible_collections.volta.llm.plugins.module_utils.transfer.deliver import Wanted
from ansible_collections.volta.llm.plugins.module_utils.transfer.http import retry_after
from ansible_collections.volta.llm.plugins.module_utils.transfer.sources import Source

from tests.unit.transfer.conftest import CONTENT, SHA256, Desk
from tests.unit.transfer.site import Exchange, Site

HALF = len(CONTENT) // 2
URL = "/model.gguf"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "transfer"


@pytest.fixture
def secure_site() -> Iterator[Site]:
    made = Site({URL: CONTENT})
    made.start((str(FIXTURES / "server.crt"), str(FIXTURES / "server.key")))
    yield made
    made.stop()


def assert_whole(desk: Desk) -> None:
    assert hashlib.sha256(desk.dest.read_bytes()).hexdigest() == SHA256
    assert desk.leftovers == {"model.gguf", "model.gguf.stamp.json"}


def assert_refused(desk: Desk, report, *codes: str) -> None:
    assert [fault.code for fault in report.faults] == list(codes)
    assert not desk.dest.exists()


@pytest.mark.parametrize("connections", [1, 4])
def test_a_good_server(site: Site, desk: Desk, connections: int) -> None:
    report = desk.order(site.url(URL), connections=connections, size=len(CONTENT))
    assert_whole(desk)
    assert report.files[0].fetched == len(CONTENT)
    assert report.files[0].changed
    assert report.faults == []


def test_several_connections_share_the_work(site: Site, desk: Desk) -> None:
    together = threading.Barrier(4, timeout=20)

    def script(exchange: Exchange) -> None:
        # Held until four requests are open at once: fails where they come one after another.
        if exchange.number <= 5 and exchange.number != 1:
            together.wait()
        exchange.proper()

    site.script = script
    # The first answer's size is known; three more connections come while it is read, and one more request follows.
    desk.order(site.url(URL), size=len(CONTENT))
    assert_whole(desk)
    assert len({asked for _, asked in site.asked}) == len(site.asked)


def test_200_to_a_ranged_request_is_taken_whole(site: Site, desk: Desk) -> None:
    def script(exchange: Exchange) -> None:
        exchange.head(200, Content_Length=len(CONTENT))
        exchange.body(CONTENT)

    site.script = script
    desk.order(site.url(URL))
    assert_whole(desk)
    assert len(site.asked) == 1


def test_200_to_a_resumed_range_starts_over(site: Site, desk: Desk) -> None:
    def cut(exchange: Exchange) -> None:
        if exchange.number > 1:
            exchange.status(404)
        else:
            exchange.proper(upto=HALF)

    site.script = cut
    desk.order(site.url(URL), connections=1)
    assert not desk.dest.exists()

    def ignore(exchange: Exchange) -> None:
        exchange.head(200, Content_Length=len(CONTENT))
        exchange.body(CONTENT)

    site.script = ignore
    report = desk.order(site.url(URL))
    assert_whole(desk)
    assert report.files[0].resumed_from == 0


def test_206_without_content_range_is_taken_when_its_length_proves_it(site: Site, desk: Desk) -> None:
    # C16: a mirror that answers so, with the right bytes.
    site.script = lambda exchange: exchange.proper(Content_Range=None)
    report = desk.order(site.url(URL), size=len(CONTENT))
    assert_whole(desk)
    assert len(site.asked) > 1
    # Taken, not asked for once more without a range.
    assert None not in [asked for _, asked in site.asked]
    assert report.files[0].fetched == len(CONTENT)


@pytest.mark.parametrize("length", ["right", "of the whole", "short"])
def test_a_resume_answered_by_206_without_content_range(site: Site, desk: Desk, length: str) -> None:
    # C16: only where the length is what is left of the file; anything else starts from zero.
    desk.dest.with_name("model.gguf.part").write_bytes(CONTENT[:HALF])

    def script(exchange: Exchange) -> None:
        if not exchange.ranged or length == "right":
            exchange.proper(Content_Range=None)
            return
        data = CONTENT if length == "of the whole" else CONTENT[exchange.start : exchange.start + 5000]
        exchange.head(206, Content_Length=len(data))
        exchange.body(data)

    site.script = script
    report = desk.order(site.url(URL), size=len(CONTENT), connections=1)
    assert_whole(desk)
    assert report.files[0].resumed_from == (HALF if length == "right" else 0)
    assert site.asked[-1][1] == (f"bytes={HALF}-{len(CONTENT) - 1}" if length == "right" else None)


def test_206_without_content_range_of_unknown_size_is_asked_for_whole(site: Site, desk: Desk) -> None:
    site.script = lambda exchange: exchange.proper(Content_Range=None)
    desk.order(site.url(URL))
    assert_whole(desk)
    assert site.asked[-1][1] is None


def test_206_without_content_range_and_another_length_starts_over(site: Site, desk: Desk) -> None:
    def script(exchange: Exchange) -> None:
        if exchange.ranged:
            # All bytes, called partial: written at the offset they would ruin the file.
            exchange.head(206, Content_Length=len(CONTENT))
            exchange.body(CONTENT)
        else:
            exchange.proper()

    site.script = script
    desk.order(site.url(URL), size=len(CONTENT))
    assert_whole(desk)


@pytest.mark.parametrize("span", ["bytes 0-{last}/{size}", "bytes nonsense", "bytes 7-{last}/{size}"])
def test_206_with_wrong_content_range(site: Site, desk: Desk, span: str) -> None:
    def script(exchange: Exchange) -> None:
        if exchange.ranged and exchange.start > 0:
            value = span.format(last=exchange.end - 1, size=len(CONTENT))
            exchange.head(206, Content_Range=value, Content_Length=exchange.end - exchange.start)
            exchange.body(CONTENT[: exchange.end - exchange.start])
        else:
            exchange.proper()

    site.script = script
    desk.order(site.url(URL))
    assert_whole(desk)


def test_206_with_unknown_total_goes_on_to_the_end(site: Site, desk: Desk) -> None:
    def script(exchange: Exchange) -> None:
        if exchange.start >= len(CONTENT):
            exchange.status(416, Content_Range=f"bytes */{len(CONTENT)}")
            return
        exchange.proper(Content_Range=f"bytes {exchange.start}-{exchange.end - 1}/*")

    site.script = script
    desk.order(site.url(URL))
    assert_whole(desk)


def test_416_because_the_part_is_whole(site: Site, desk: Desk) -> None:
    # C06, without a known size: the answer says so, the hash proves it.
    desk.dest.with_name("model.gguf.part").write_bytes(CONTENT)
    report = desk.order(site.url(URL))
    assert_whole(desk)
    assert report.files[0].fetched == 0
    assert report.files[0].resumed_from == len(CONTENT)


def test_a_whole_part_of_known_size_needs_no_request(site: Site, desk: Desk) -> None:
    # C06: compare sizes first.
    desk.dest.with_name("model.gguf.part").write_bytes(CONTENT)
    desk.order(site.url(URL), size=len(CONTENT))
    assert_whole(desk)
    assert site.asked == []


def test_416_because_the_part_is_too_long(site: Site, desk: Desk) -> None:
    desk.dest.with_name("model.gguf.part").write_bytes(CONTENT + b"x" * 100)
    desk.order(site.url(URL))
    assert_whole(desk)


def test_416_because_ranges_are_refused(site: Site, desk: Desk) -> None:
    def script(exchange: Exchange) -> None:
        if exchange.ranged:
            exchange.status(416)
        else:
            exchange.proper()

    site.script = script
    desk.order(site.url(URL))
    assert_whole(desk)


@pytest.mark.parametrize("form", ["chunked", "closing"])
def test_no_length(site: Site, desk: Desk, form: str) -> None:
    # C12: missing length is not size 0.
    def script(exchange: Exchange) -> None:
        if form == "closing":
            exchange.head(200, Connection="close")
            exchange.body(CONTENT)
            exchange.hang_up()
            return
        exchange.head(200, Transfer_Encoding="chunked")
        for start in range(0, len(CONTENT), 1 << 20):
            piece = CONTENT[start : start + (1 << 20)]
            exchange.body(b"%x\r\n%b\r\n" % (len(piece), piece))
        exchange.body(b"0\r\n\r\n")

    site.script = script
    report = desk.order(site.url(URL))
    assert_whole(desk)
    assert report.files[0].size == len(CONTENT)


@pytest.mark.parametrize("connections", [1, 4])
def test_a_short_body_is_gone_on_from(site: Site, desk: Desk, connections: int) -> None:
    def script(exchange: Exchange) -> None:
        if exchange.number <= 3:
            exchange.proper(upto=700_000)
        else:
            exchange.proper()

    site.script = script
    report = desk.order(site.url(URL), connections=connections)
    assert_whole(desk)
    # Nothing twice but what a broken connection swallowed: the bytes it did bring are used.
    assert report.files[0].fetched == len(CONTENT)


def test_drops_at_any_offset(site: Site, desk: Desk) -> None:
    offsets = [1, 3, 511, 4096, 65537, 999_999, 2_000_001]

    def script(exchange: Exchange) -> None:
        exchange.proper(upto=offsets[exchange.number - 1] if exchange.number <= len(offsets) else None)

    site.script = script
    desk.order(site.url(URL), connections=1)
    assert_whole(desk)


def test_a_body_too_long_for_the_known_size(site: Site, desk: Desk) -> None:
    def script(exchange: Exchange) -> None:
        exchange.head(200, Connection="close")
        exchange.body(CONTENT + b"more")
        exchange.hang_up()

    site.script = script
    report = desk.order(site.url(URL), size=len(CONTENT), connections=1)
    assert_refused(desk, report, "size_mismatch")


def test_a_chunked_answer_to_a_range_that_holds_more_than_it_names(site: Site, desk: Desk) -> None:
    def script(exchange: Exchange) -> None:
        span = f"bytes {exchange.start}-{exchange.end - 1}/{len(CONTENT)}"
        exchange.head(206 if exchange.ranged else 200, Content_Range=span, Transfer_Encoding="chunked")
        data = CONTENT[exchange.start : exchange.end + (exchange.number % 2)]
        exchange.body(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))

    site.script = script
    desk.order(site.url(URL), size=len(CONTENT))
    assert_whole(desk)


@pytest.mark.parametrize("length", ["-5", "1_000", "\u00b2", "9" * 5000, "", "7, 8", "7,", ",7"])
def test_a_length_that_is_none(site: Site, desk: Desk, length: str) -> None:
    # int() takes some of them, and isdigit() others.
    def script(exchange: Exchange) -> None:
        exchange.body(b"HTTP/1.1 200 OK\r\nContent-Length: " + length.encode("latin-1") + b"\r\n\r\n" + CONTENT)
        exchange.hang_up()

    site.script = script
    report = desk.order(site.url(URL))
    assert_refused(desk, report, "source_misbehaves")
    assert "Content-Length" in report.faults[0].message


@pytest.mark.parametrize("form", ["{0}, {0}", "{0},{0} , {0}", "{0}\r\nContent-Length: {0}"])
def test_one_length_several_times(site: Site, desk: Desk, form: str) -> None:
    # RFC 9110, 8.6
    def script(exchange: Exchange) -> None:
        data = exchange.content[exchange.start : exchange.end]
        span = f"Content-Range: bytes {exchange.start}-{exchange.end - 1}/{len(CONTENT)}\r\n" if exchange.ranged else ""
        status = "206 Partial Content" if exchange.ranged else "200 OK"
        head = f"HTTP/1.1 {status}\r\n{span}Content-Length: {form.format(len(data))}\r\n\r\n"
        exchange.body(head.encode() + data)

    site.script = script
    desk.order(site.url(URL))
    assert_whole(desk)


def test_two_lengths(site: Site, desk: Desk) -> None:
    def script(exchange: Exchange) -> None:
        exchange.body(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nGGUF12")
        exchange.hang_up()

    site.script = script
    assert_refused(desk, desk.order(site.url(URL)), "source_misbehaves")


def test_a_length_that_contradicts_the_range(site: Site, desk: Desk) -> None:
    def script(exchange: Exchange) -> None:
        if exchange.number <= 2 and exchange.ranged:
            span = f"bytes {exchange.start}-{exchange.end - 1}/{len(CONTENT)}"
            exchange.head(206, Content_Range=span, Content_Length=exchange.end - exchange.start - 1)
            exchange.body(CONTENT[exchange.start : exchange.end - 1])
        else:
            exchange.proper()

    site.script = script
    desk.order(site.url(URL), size=len(CONTENT))
    assert_whole(desk)


@pytest.mark.parametrize("connections", [1, 4])
def test_resets_at_any_offset(site: Site, desk: Desk, connections: int) -> None:
    # Not the end of a connection but its loss: what the kernel already has may be gone with it.
    offsets = random.Random(3)

    def script(exchange: Exchange) -> None:
        if exchange.number > 8:
            exchange.proper()
            return
        exchange.proper(upto=offsets.randrange(1, 3_000_000))
        exchange.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    site.script = script
    desk.settings = dataclasses.replace(desk.settings, retries=20)
    desk.order(site.url(URL), connections=connections)
    assert_whole(desk)


def test_another_size_than_expected_costs_no_download(site: Site, desk: Desk) -> None:
    report = desk.order(site.url(URL), size=len(CONTENT) - 1)
    assert_refused(desk, report, "size_mismatch")
    assert report.files[0].fetched == 0
    assert str(len(CONTENT) - 1) in report.faults[0].message


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("form", ["absolute", "relative", "other host"])
def test_redirects(site: Site, other_site: Site, desk: Desk, status: int, form: str) -> None:
    # C14: the query string goes along.
    place = {"absolute": site.url("/there?key=value"), "relative": "there?key=value"}.get(
        form, other_site.url("/there?key=value")
    )
    target = other_site if form == "other host" else site
    target.files["/there"] = CONTENT

    def script(exchange: Exchange) -> None:
        if exchange.path == "/there":
            exchange.proper()
        else:
            exchange.status(status, Location=place)

    site.script = script
    report = desk.order(site.url(URL))
    assert_whole(desk)
    assert any(path == "/there?key=value" for path, _ in target.asked)
    assert report.files[0].source == site.url(URL)


@pytest.mark.parametrize("form", ["absolute", "relative"])
@pytest.mark.parametrize("escaped", [True, False])
def test_a_redirect_to_a_name_that_is_not_ascii(site: Site, desk: Desk, form: str, escaped: bool) -> None:
    # nginx sends the bytes of the name as they are; http.client reads them as Latin-1.
    there = "/%E6%A8%A1%E5%9E%8B-%C3%A9.gguf?name=%E6%A8%A1"
    site.files[there.partition("?")[0]] = CONTENT
    location = there if escaped else unquote(there)
    if form == "absolute":
        location = site.url(location)

    def script(exchange: Exchange) -> None:
        if exchange.path != URL:
            exchange.proper()
            return
        exchange.body(f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode())

    site.script = script
    desk.order(site.url(URL))
    assert_whole(desk)
    assert {path for path, _ in site.asked} == {URL, there}


def test_redirects_without_end(site: Site, desk: Desk) -> None:
    site.script = lambda exchange: exchange.status(302, Location="/again")
    assert_refused(desk, desk.order(site.url(URL)), "source_misbehaves")


def test_headers_for_one_host_are_not_sent_to_another(site: Site, other_site: Site, desk: Desk) -> None:
    other_site.files["/there"] = CONTENT
    site.script = lambda exchange: exchange.status(302, Location=other_site.url("/there"))
    desk.order(sources=(Source(url=site.url(URL), headers={"Authorization": "Bearer secret-token"}),))
    assert_whole(desk)
    assert all(seen["Authorization"] == "Bearer secret-token" for seen in site.seen)
    assert all("Authorization" not in seen for seen in other_site.seen)


@pytest.mark.parametrize("port", ["same", "other"])
def test_headers_are_not_sent_along_to_another_scheme_or_port(
    secure_site: Site, other_site: Site, desk: Desk, port: str
) -> None:
    # From https to http of one host: whoever listens in would have the token.
    other_site.files["/there"] = CONTENT
    secure_site.script = lambda exchange: exchange.status(302, Location=other_site.url("/there"))
    desk.settings = dataclasses.replace(desk.settings, ca_path=str(FIXTURES / "server.crt"))
    name = "Authorization" if port == "same" else "X-Api-Key"
    desk.order(sources=(Source(url=secure_site.url(URL), headers={name: "secret-token"}),))
    assert_whole(desk)
    assert other_site.seen
    assert "secret-token" not in str(other_site.seen)


@pytest.mark.parametrize("value", ["Bearer secret-token\n\tx", "Bearer secret-token\u4e2d", "Bearer secret-token\0"])
def test_a_header_that_cannot_be_sent_is_not_quoted(site: Site, desk: Desk, value: str) -> None:
    # http.client quotes it in its error, or blames the address.
    desk.settings = dataclasses.replace(desk.settings, retries=0)
    report = desk.order(sources=(Source(url=site.url(URL), headers={"Authorization": value}),))
    assert_refused(desk, report, "source_misbehaves")
    assert "headers: Authorization" in report.faults[0].message
    assert "secret-token" not in str(report)
    assert site.asked == []


def test_a_header_with_a_line_end_is_sent_without_it(site: Site, desk: Desk) -> None:
    desk.order(sources=(Source(url=site.url(URL), headers={"Authorization": "Bearer secret-token\r\n"}),))
    assert_whole(desk)
    assert all(seen["Authorization"] == "Bearer secret-token" for seen in site.seen)


def test_a_redirect_back_to_the_first_host_may_have_its_headers(site: Site, other_site: Site, desk: Desk) -> None:
    site.files["/there"] = CONTENT
    other_site.script = lambda exchange: exchange.status(307, Location=site.url("/there"))

    def script(exchange: Exchange) -> None:
        if exchange.path == "/there":
            exchange.proper()
        else:
            exchange.status(308, Location=other_site.url("/back"))

    site.script = script
    desk.order(sources=(Source(url=site.url(URL), headers={"Authorization": "Bearer secret-token"}),))
    assert_whole(desk)
    assert "secret-token" not in str(other_site.seen)


@pytest.mark.parametrize("location", [None, "", "ftp://127.0.0.1/model.gguf", "http://[broken", "http://host:port/"])
def test_a_redirect_to_nowhere(site: Site, desk: Desk, location: str | None) -> None:
    site.script = lambda exchange: exchange.status(302, Location=location)
    assert_refused(desk, desk.order(site.url(URL)), "source_misbehaves")


def test_an_expired_signature_is_renewed(site: Site, desk: Desk) -> None:
    site.files["/signed"] = CONTENT
    uses = {"old": 0, "new": 0}

    def script(exchange: Exchange) -> None:
        if exchange.path == "/signed":
            name = exchange.query.removeprefix("sig=")
            uses[name] += 1
            if name == "old" and uses["old"] > 2:
                exchange.status(403)
            else:
                exchange.proper()
        else:
            exchange.status(302, Location=f"/signed?sig={'old' if uses['old'] <= 2 else 'new'}")

    site.script = script
    report = desk.order(site.url(URL), connections=2)
    assert_whole(desk)
    assert uses["new"] > 0
    assert report.files[0].fetched == len(CONTENT)


def test_a_content_server_that_rejects_its_own_signature(site: Site, other_site: Site, desk: Desk) -> None:
    # C10: to the next mirror; the message blames the content server, and shows no signature.
    def script(exchange: Exchange) -> None:
        if exchange.path == "/cdn":
            exchange.status(403)
        else:
            exchange.status(302, Location="/cdn?Signature=very-secret")

    site.script = script
    report = desk.order(site.url(URL), other_site.url(URL))
    assert_whole(desk)
    assert report.files[0].source == other_site.url(URL)
    (passed,) = report.passed_over
    assert passed.code == "source_refused"
    assert "content server" in passed.message
    assert "not of a token" in passed.remedy
    assert "very-secret" not in str(passed)


def test_a_link_that_expires_for_all_connections_at_once(site: Site, desk: Desk) -> None:
    # Four connections learn of it in the same moment; that is one expiry, not a content server that refuses its links.
    site.files["/signed"] = CONTENT
    expired = threading.Event()
    together = threading.Barrier(4, timeout=20)

    def script(exchange: Exchange) -> None:
        if exchange.path == URL:
            exchange.status(302, Location="/signed?sig=" + ("new" if expired.is_set() else "old"))
        elif exchange.query == "sig=new" or not exchange.start:
            exchange.proper()
        else:
            together.wait()
            expired.set()
            exchange.status(403)

    site.script = script
    report = desk.order(site.url(URL), size=len(CONTENT))
    assert_whole(desk)
    assert report.files[0].fetched == len(CONTENT)


def test_a_server_that_is_started_again_drops_all_connections_once(site: Site, desk: Desk) -> None:
    # More connections than retries: counted one by one, the first drop would already be too many.
    away = threading.Event()
    together = threading.Barrier(4, timeout=20)

    def script(exchange: Exchange) -> None:
        if exchange.start == 0 or away.is_set():
            exchange.proper()
            return
        together.wait()
        away.set()
        exchange.proper(upto=10)

    site.script = script
    desk.settings = dataclasses.replace(desk.settings, retries=1)
    report = desk.order(site.url(URL), size=len(CONTENT))
    assert_whole(desk)
    assert report.files[0].fetched == len(CONTENT)


def test_a_lost_connection_is_tried_again(site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # A server that was overloaded for a moment gets its connections back.
    monkeypatch.setattr(engine, "RETRY_LOST_S", 0.1)
    refused = threading.Semaphore(3)
    open_now = threading.Barrier(2, timeout=20)

    def script(exchange: Exchange) -> None:
        if exchange.start and refused.acquire(blocking=False):
            exchange.status(503)
            return
        if exchange.start:
            # Passed only by two at a time.
            with contextlib.suppress(threading.BrokenBarrierError):
                open_now.wait()
                open_now.abort()
        exchange.proper()

    site.script = script
    desk.order(site.url(URL), size=len(CONTENT))
    assert_whole(desk)
    assert refused._value == 0


@pytest.mark.parametrize("status", [500, 502, 504, 408])
def test_a_passing_fault_of_the_server(site: Site, desk: Desk, status: int) -> None:
    site.script = lambda exchange: exchange.status(status) if exchange.number <= 2 else exchange.proper()
    desk.order(site.url(URL))
    assert_whole(desk)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 3 ", 3.0),
        ("Sun, 06 Nov 1994 08:50:37 GMT", 60.0),
        ("Sun, 06 Nov 1994 08:49:00 GMT", 0.0),
        ("-1", None),
        ("\u00b2", None),
        ("9" * 5000, None),
        ("soon", None),
        ("", None),
    ],
)
def test_what_retry_after_means(value: str, seconds: float | None) -> None:
    # RFC 9110 10.2.3; the date is that of its section 5.6.7, a minute later.
    assert retry_after({"retry-after": value}, now=784111777.0) == seconds


def test_the_wait_that_is_asked_for_is_kept(site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(engine.Transfer, "_sleep", lambda self, seconds: waits.append(seconds))
    site.script = lambda exchange: exchange.status(429, Retry_After="17") if exchange.number == 1 else exchange.proper()
    desk.order(site.url(URL))
    assert_whole(desk)
    assert waits[0] == 17.0


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("form", ["seconds", "date", "none"])
def test_overloaded_with_retry_after(site: Site, desk: Desk, status: int, form: str) -> None:
    after = {"seconds": "0", "date": formatdate(time.time() - 5, usegmt=True), "none": None}[form]

    def script(exchange: Exchange) -> None:
        if exchange.number <= 2:
            exchange.status(status, Retry_After=after)
        else:
            exchange.proper()

    site.script = script
    desk.order(site.url(URL))
    assert_whole(desk)


def test_a_wait_of_an_hour_is_not_waited(site: Site, desk: Desk) -> None:
    site.script = lambda exchange: exchange.status(429, Retry_After="3600")
    report = desk.order(site.url(URL))
    assert_refused(desk, report, "source_unreachable")
    assert "3600" in report.faults[0].message


class Delayed:
    """Lets a head through, and a body once a sign is given and a while has passed."""

    def __init__(self, file: BinaryIO, sign: threading.Event) -> None:
        self._file, self._sign = file, sign

    def write(self, data: bytes) -> int:
        if len(data) > 4096:
            self._file.write(data[:4096])
            self._sign.wait(20)
            time.sleep(0.3)
            data = data[4096:]
        return self._file.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def test_refused_connections_leave_the_work_to_the_others(
    site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RETRY_LOST_S", 600.0)
    open_now = threading.Semaphore(1)
    refused = 0
    lock = threading.Lock()
    all_refused = threading.Event()

    def script(exchange: Exchange) -> None:
        nonlocal refused
        if not open_now.acquire(blocking=False):
            with lock:
                refused += 1
                if refused >= 3:
                    all_refused.set()
            exchange.status(503)
            return
        try:
            # The one that is let in has not ended when the others come, nor, for a while, when they would come again.
            exchange.handler.wfile = Delayed(exchange.handler.wfile, all_refused)
            exchange.proper()
        finally:
            open_now.release()

    site.script = script
    desk.settings = dataclasses.replace(desk.settings, stall_timeout=20)
    report = desk.order(site.url(URL), size=len(CONTENT))
    assert_whole(desk)
    assert report.files[0].fetched == len(CONTENT)
    # Each once: the download goes on with fewer connections.
    assert refused == 3


@pytest.mark.parametrize(
    ("query", "sent"),
    [
        ("token=geheim&name=my model.gguf", "token=geheim&name=my%20model.gguf"),
        ("token=geheim&name=模型", "token=geheim&name=%E6%A8%A1%E5%9E%8B"),
        # What is escaped stays, and so does what signatures are made of.
        ("X-Amz-Signature=a%2Fb~c&k=[1]|{2}:@/?", "X-Amz-Signature=a%2Fb~c&k=[1]|{2}:@/?"),
    ],
)
def test_a_query_is_sent_as_browsers_send_it(site: Site, desk: Desk, query: str, sent: str) -> None:
    desk.order(f"{site.url(URL)}?{query}", size=len(CONTENT))
    assert_whole(desk)
    assert {path for path, _ in site.asked} == {f"{URL}?{sent}"}


def test_an_address_that_python_refuses_is_not_quoted(site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def request(_connection: object, _method: str, url: str, **_more: object) -> None:
        raise http.client.InvalidURL(f"URL can't contain control characters. {url!r} (found at least ' ')")

    monkeypatch.setattr(http.client.HTTPConnection, "request", request)
    desk.settings = dataclasses.replace(desk.settings, retries=0)
    report = desk.order(f"{site.url(URL)}?token=geheim", size=len(CONTENT))
    assert [fault.code for fault in report.faults] == ["source_misbehaves"]
    assert "geheim" not in str(report.faults)


def test_gated_stops_at_once(site: Site, other_site: Site, desk: Desk) -> None:
    # C34: no retry, no other mirror, the body is not the model.
    def script(exchange: Exchange) -> None:
        body = b'{"error":"Access to model is restricted"}'
        exchange.head(401, Content_Length=len(body), Content_Type="application/json")
        exchange.body(body)

    site.script = script
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL), other_site.url(URL))
    assert caught.value.fault.code == "source_unauthorized"
    assert len(site.asked) == 1
    assert other_site.asked == []
    assert not desk.dest.exists()


@pytest.mark.parametrize(
    ("status", "why", "word"),
    [
        (403, "GatedRepo", "licence is not accepted"),
        (401, "GatedRepo", "licence is not accepted"),
        (401, "RepoNotFound", "does not exist or is private"),
    ],
)
@pytest.mark.parametrize("moved", [True, False])
def test_a_hub_says_why_it_refuses(
    site: Site, other_site: Site, desk: Desk, status: int, why: str, word: str, moved: bool
) -> None:
    # C34: also after the redirect of a repository that was renamed.
    def script(exchange: Exchange) -> None:
        if moved and exchange.path == URL:
            exchange.status(307, Location="/renamed")
        else:
            exchange.status(status, X_Error_Code=why)

    site.script = script
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL), other_site.url(URL))
    assert caught.value.fault.code == "source_unauthorized"
    assert word in caught.value.fault.message
    assert other_site.asked == []


@pytest.mark.parametrize("status", [404, 410])
def test_missing_goes_to_the_next_source(site: Site, other_site: Site, desk: Desk, status: int) -> None:
    site.script = lambda exchange: exchange.status(status)
    report = desk.order(site.url(URL), other_site.url(URL))
    assert_whole(desk)
    assert [fault.code for fault in report.passed_over] == ["source_missing"]


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_stall_is_broken_off_and_gone_on_from(site: Site, desk: Desk, where: str) -> None:
    release = threading.Event()

    def script(exchange: Exchange) -> None:
        if exchange.number == 1:
            if where == "body":
                exchange.head(200, Content_Length=len(CONTENT), ETag='"1"')
                exchange.body(CONTENT[:HALF])
            release.wait(20)
            exchange.hang_up()
        else:
            release.set()
            exchange.proper()

    site.script = script
    desk.settings = dataclasses.replace(desk.settings, timeout=0.4)
    report = desk.order(site.url(URL), connections=1)
    assert_whole(desk)
    assert report.files[0].fetched == len(CONTENT)


def test_a_stall_for_good_names_the_time(site: Site, desk: Desk) -> None:
    release = threading.Event()

    def script(exchange: Exchange) -> None:
        exchange.head(200, Content_Length=len(CONTENT))
        release.wait(20)

    site.script = script
    try:
        report = desk.order(site.url(URL))
    finally:
        release.set()
    assert_refused(desk, report, "source_unreachable")
    assert "no bytes for 0.3 s" in report.faults[0].message


def test_silence_from_the_start_is_a_stall_too(site: Site, desk: Desk) -> None:
    # Connecting may take long, and so may a time-out for it be; silence afterwards counts as any other.
    release = threading.Event()

    def script(exchange: Exchange) -> None:
        release.wait(20)
        exchange.hang_up()

    site.script = script
    desk.settings = dataclasses.replace(desk.settings, timeout=600, stall_timeout=0.1, retries=2)
    try:
        report = desk.order(site.url(URL))
    finally:
        release.set()
    assert_refused(desk, report, "source_unreachable")
    # The whole time is said, so that it can be planned with.
    assert re.search(r"no answer within 0\.1 s \(3 attempts in \d+ s\)", report.faults[0].message)
    assert len(site.asked) == 3


@pytest.mark.parametrize("connections", [1, 4])
def test_etag_changed_between_requests(site: Site, desk: Desk, connections: int) -> None:
    newer = b"GGUF" + CONTENT[4:][::-1]

    def script(exchange: Exchange) -> None:
        if exchange.number == 1:
            exchange.proper(etag='"old"', upto=HALF)
        else:
            exchange.content = newer
            exchange.proper(etag='"new"')

    site.script = script
    desk.order(site.url(URL), sha256=hashlib.sha256(newer).hexdigest(), connections=connections)
    assert desk.dest.read_bytes() == newer


@pytest.mark.parametrize("connections", [1, 4])
def test_a_mirror_whose_nodes_name_one_file_differently(site: Site, desk: Desk, connections: int) -> None:
    # Apache makes the ETag of the inode, so each node has its own; with size and hash known the bytes decide.
    def script(exchange: Exchange) -> None:
        etag = f'"node-{exchange.number % 3}"'
        if exchange.headers.get("If-Range", etag) != etag:
            exchange.ranged, exchange.start, exchange.end = False, 0, len(CONTENT)
        exchange.proper(etag=etag, upto=3_000_000)

    site.script = script
    report = desk.order(site.url(URL), size=len(CONTENT), connections=connections)
    assert_whole(desk)
    assert report.files[0].fetched <= len(CONTENT) + 4 * 3_000_000


def test_differing_etags_do_not_hide_another_size(site: Site, desk: Desk) -> None:
    def script(exchange: Exchange) -> None:
        exchange.content = CONTENT + b"x" * (exchange.number > 1)
        exchange.proper(etag=f'"{exchange.number}"', upto=HALF)

    site.script = script
    assert_refused(desk, desk.order(site.url(URL), size=len(CONTENT), connections=1), "size_mismatch")


@pytest.mark.parametrize("comes", [True, False])
def test_a_file_replaced_meanwhile_is_fetched_once_more(site: Site, desk: Desk, comes: bool) -> None:
    # What was mixed of two versions says nothing of the newer one.
    older = b"GGUF" + CONTENT[4:][::-1]

    def script(exchange: Exchange) -> None:
        if exchange.number == 1 or not comes:
            exchange.content = older
        exchange.proper(etag='"old"' if exchange.number == 1 else '"new"', upto=HALF)

    site.script = script
    report = desk.order(site.url(URL), size=len(CONTENT), connections=1)
    if comes:
        assert_whole(desk)
    else:
        assert_refused(desk, report, "hash_mismatch")


def test_changed_according_to_if_range(site: Site, desk: Desk) -> None:
    # What RFC 9110 13.1.5 asks of a server: the whole new file where the old ETag comes with a range.
    newer = b"GGUF" + CONTENT[4:][::-1]

    def script(exchange: Exchange) -> None:
        if exchange.number == 1:
            exchange.proper(etag='"old"', upto=HALF)
            return
        exchange.content = newer
        if exchange.headers.get("If-Range", '"new"') != '"new"':
            exchange.ranged, exchange.start, exchange.end = False, 0, len(newer)
        exchange.proper(etag='"new"')

    site.script = script
    desk.order(site.url(URL), sha256=hashlib.sha256(newer).hexdigest())
    assert desk.dest.read_bytes() == newer
    assert '"old"' in {seen.get("If-Range") for seen in site.seen}


def test_a_weak_etag_proves_nothing(site: Site, desk: Desk) -> None:
    site.script = lambda exchange: exchange.proper(etag=f'W/"{exchange.number}"')
    desk.order(site.url(URL))
    assert_whole(desk)
    assert not any("If-Range" in seen for seen in site.seen)


def test_length_changed_between_requests(site: Site, desk: Desk) -> None:
    newer = CONTENT + b"longer"

    def script(exchange: Exchange) -> None:
        if exchange.number == 1:
            exchange.proper(etag=None, upto=HALF)
        else:
            exchange.content = newer
            exchange.end = len(newer)
            exchange.proper(etag=None)

    site.script = script
    desk.order(site.url(URL), sha256=hashlib.sha256(newer).hexdigest(), connections=1)
    assert desk.dest.read_bytes() == newer


def test_a_file_that_never_stays_the_same(site: Site, desk: Desk) -> None:
    site.script = lambda exchange: exchange.proper(etag=f'"{exchange.number}"', upto=100_000)
    assert_refused(desk, desk.order(site.url(URL), connections=1), "source_changed")


def test_compressed_in_between(site: Site, desk: Desk) -> None:
    packed = gzip.compress(CONTENT[:1000])

    def script(exchange: Exchange) -> None:
        exchange.head(200, Content_Encoding="gzip", Content_Length=len(packed))
        exchange.body(packed)

    site.script = script
    report = desk.order(site.url(URL))
    assert_refused(desk, report, "source_misbehaves")
    assert "gzip" in report.faults[0].message
    assert all(seen["Accept-Encoding"] == "identity" for seen in site.seen)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + SHA256.encode() + b"\nsize 23072997\n"
WRONG = {
    "web page": (b"<!DOCTYPE html><html><body>Log in</body></html>", "text/html", "not_the_file", "web page"),
    "json": (b'{"error":"Repository not found"}', "application/json", "not_the_file", "Repository not found"),
    "lfs pointer": (POINTER, "text/plain", "lfs_pointer", SHA256),
    "other format": (b"PK\x03\x04" + bytes(2000), "application/zip", "not_the_file", "zip archive"),
    "nothing": (b"", "application/octet-stream", "empty_file", "0 bytes"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("sha256", [SHA256, None])
def test_something_else_instead_of_the_file(site: Site, desk: Desk, name: str, sha256: str | None) -> None:
    # C02, C20: each is named for what it is, and not stored.
    body, kind, code, word = WRONG[name]

    def script(exchange: Exchange) -> None:
        exchange.head(200, Content_Length=len(body), Content_Type=kind)
        exchange.body(body)

    site.script = script
    report = desk.order(site.url(URL), sha256=sha256)
    assert_refused(desk, report, code)
    assert word in report.faults[0].message
    if code == "lfs_pointer":
        assert "has 23072997 bytes" in report.faults[0].message
    # C20: no file of zero bytes, nor of anything else, is left.
    assert desk.leftovers == set()


@pytest.mark.parametrize("name", ["web page", "json", "lfs pointer", "other format"])
@pytest.mark.parametrize("ranged", [False, True])
def test_something_else_of_a_known_size_is_named_for_what_it_is(
    site: Site, desk: Desk, name: str, ranged: bool
) -> None:
    # C02: its length alone would only say that the size is another one.
    body, kind, code, word = WRONG[name]

    def script(exchange: Exchange) -> None:
        span = f"bytes 0-{len(body) - 1}/{len(body)}" if ranged and exchange.ranged else None
        exchange.head(206 if span else 200, Content_Length=len(body), Content_Type=kind, Content_Range=span)
        exchange.body(body)

    site.script = script
    report = desk.order(site.url(URL), size=len(CONTENT))
    assert_refused(desk, report, code)
    assert word in report.faults[0].message
    assert desk.leftovers == set()


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (b"FUGG\3\0\0\0", "byte-swapped"),
        ((70).to_bytes(8, "little") + b'{"__metadata__":{}}', "safetensors"),
        (b"PK\x03\x04", "zip archive"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"tjgg\3\0\0\0", "before GGUF"),
        (b"", "never written"),
        (b"GGUE", "'GGUE'"),
    ],
)
def test_what_gguf_info_names_is_named_before_it_is_stored(site: Site, desk: Desk, head: bytes, word: str) -> None:
    site.files[URL] = head + bytes(3000)
    report = desk.order(site.url(URL), sha256=None)
    assert_refused(desk, report, "not_the_file")
    assert word in report.faults[0].message
    assert desk.leftovers == set()


@pytest.mark.parametrize("has", ["the file", "another of its size", "another size"])
def test_what_a_pointer_names_is_what_the_next_source_must_have(
    site: Site, other_site: Site, desk: Desk, has: str
) -> None:
    # C02: where nothing else is known of the file.
    site.files[URL] = POINTER.replace(b"23072997", str(len(CONTENT)).encode())
    if has != "the file":
        other_site.files[URL] = CONTENT[:-1] + (b"\0" if has == "another of its size" else b"")
    report = desk.order(site.url(URL), other_site.url(URL), sha256=None)
    if has == "the file":
        assert_whole(desk)
        assert report.files[0].verified(Wanted(desk.dest)) == "source"
        assert [fault.code for fault in report.passed_over] == ["lfs_pointer"]
    else:
        assert_refused(
            desk, report, "lfs_pointer", "hash_mismatch" if has == "another of its size" else "size_mismatch"
        )


def test_a_pointer_on_the_machine_is_named_for_what_it_is(desk: Desk, tmp_path: Path) -> None:
    pointer = tmp_path / "pointer.gguf"
    pointer.write_bytes(POINTER)
    report = desk.order(size=len(CONTENT), sources=(Source(path=str(pointer), kind="file"),))
    assert_refused(desk, report, "lfs_pointer")


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_refusal_leaves_nothing_behind(site: Site, desk: Desk, status: int) -> None:
    site.script = lambda exchange: exchange.status(status)
    desk.order(site.url(URL))
    assert desk.leftovers == set()


GARBAGE = {
    "no status line": b"\x00\x01\xff\x1b[31mnot http\x07\r\n\r\n",
    "reason": b"HTTP/1.1 404 Not\x00 \x1b[31mF\xffound\x07\r\nContent-Length: 0\r\n\r\n",
    "endless reason": b"HTTP/1.1 404 " + b"a" * 60000 + b"\r\nContent-Length: 0\r\n\r\n",
    "encoding": b"HTTP/1.1 200 OK\r\nContent-Encoding: g\x1b[31m\xff\r\nContent-Length: 4\r\n\r\nGGUF",
    "json": b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{"error": "\x00\x1b[31m\xff----"}',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_message_is_plain_text_whatever_the_server_sends(site: Site, desk: Desk, name: str) -> None:
    def script(exchange: Exchange) -> None:
        exchange.body(GARBAGE[name])
        exchange.hang_up()

    site.script = script
    report = desk.order(site.url(URL))
    assert len(report.faults) == 1
    message = report.faults[0].message
    assert message.isprintable()
    assert "\xff" not in message
    assert len(message) < 400


def test_a_raw_part_without_magic_is_right(site: Site, desk: Desk) -> None:
    # C18: model.gguf.b continues model.gguf.a and has no magic of its own.
    tail = CONTENT[1000:90000]
    site.files["/model.gguf.b"] = tail
    dest = desk.dest.with_name("model.gguf.b")
    report = desk.order(site.url("/model.gguf.b"), sha256=hashlib.sha256(tail).hexdigest(), dest=dest)
    assert report.faults == []
    assert dest.read_bytes() == tail


def test_nobody_listens(desk: Desk) -> None:
    report = desk.order("http://127.0.0.1:9/model.gguf")
    assert_refused(desk, report, "source_unreachable")
    assert "refused" in report.faults[0].message


def test_a_name_that_does_not_resolve(desk: Desk) -> None:
    report = desk.order("http://no-such-host.invalid/model.gguf")
    assert_refused(desk, report, "source_unreachable")
    assert "no-such-host.invalid" in report.faults[0].message


def test_no_signature_in_any_message(site: Site, desk: Desk) -> None:
    site.script = lambda exchange: exchange.status(404)
    url = site.url(URL).replace("http://", "http://user:hidden-password@") + "?X-Amz-Signature=hidden-signature"
    report = desk.order(url)
    assert_refused(desk, report, "source_missing")
    assert "hidden" not in str(report)


def test_a_proxy_from_the_environment(site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files["http://models.invalid/model.gguf"] = CONTENT
    monkeypatch.setenv("http_proxy", site.url("").replace("http://", "http://user:word@"))
    desk.order("http://models.invalid/model.gguf")
    assert_whole(desk)
    assert {path for path, _ in site.asked} == {"http://models.invalid/model.gguf"}
    assert all(seen["Proxy-Authorization"] == "Basic dXNlcjp3b3Jk" for seen in site.seen)


class Tunnels(socketserver.ThreadingTCPServer):
    """A proxy that opens tunnels (CONNECT); ``heads`` are the requests that it saw."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        self.heads: list[str] = []
        tunnels = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    line = self.rfile.readline()
                    if not line:
                        return
                    head += line
                tunnels.heads.append(head.decode("latin-1"))
                host, _, port = head.split()[1].decode().rpartition(":")
                # The name is the proxy's to resolve.
                with socket.create_connection(("127.0.0.1", int(port))) as target:
                    assert host == "models.invalid"
                    self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    threading.Thread(target=self._pass_on, args=(self.connection, target), daemon=True).start()
                    self._pass_on(target, self.connection)

            @staticmethod
            def _pass_on(source: socket.socket, target: socket.socket) -> None:
                with contextlib.suppress(OSError):
                    while data := source.recv(65536):
                        target.sendall(data)
                    target.shutdown(socket.SHUT_WR)

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


def test_https_goes_through_the_proxy_in_a_tunnel(
    secure_site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunnels = Tunnels()
    try:
        monkeypatch.setenv("https_proxy", f"http://user:word@127.0.0.1:{tunnels.server_address[1]}")
        desk.settings = dataclasses.replace(desk.settings, ca_path=str(FIXTURES / "server.crt"))
        # The certificate is for 127.0.0.1: trusted, and still refused for another name.
        url = f"https://models.invalid:{secure_site.port}{URL}"
        report = desk.order(sources=(Source(url=url, headers={"Authorization": "Bearer secret-token"}),))
    finally:
        tunnels.shutdown()
        tunnels.server_close()
    assert_refused(desk, report, "source_unreachable")
    assert "models.invalid" in report.faults[0].message
    assert all("Proxy-Authorization: Basic dXNlcjp3b3Jk" in head for head in tunnels.heads)
    assert "secret-token" not in str(tunnels.heads)
    assert tunnels.heads


def test_the_scheme_of_a_proxy_in_capitals(site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files["http://models.invalid/model.gguf"] = CONTENT
    monkeypatch.setenv("http_proxy", site.url("").replace("http://", "HTTP://"))
    desk.order("http://models.invalid/model.gguf")
    assert_whole(desk)


def test_a_proxy_that_is_not_spoken_to_by_http(site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5h://user:hidden@127.0.0.1:1080")
    report = desk.order(site.url(URL))
    assert_refused(desk, report, "source_misbehaves")
    assert "proxy" in report.faults[0].message
    assert "hidden" not in report.faults[0].message


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
@pytest.mark.parametrize("value", ["127.0.0.1:{port}", "other.invalid, 127.0.0.1", "*"])
def test_forms_of_no_proxy(site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value.format(port=site.port))
    desk.order(site.url(URL))
    assert_whole(desk)


def test_no_proxy_is_honoured(site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    desk.order(site.url(URL))
    assert_whole(desk)


def test_an_address_that_hangs_does_not_hold_up_the_next(
    site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a name whose IPv6 address leads nowhere: the first address neither accepts nor refuses.
    with socket.socket() as deaf, contextlib.ExitStack() as callers:
        deaf.bind(("127.0.0.2", site.port))
        deaf.listen(0)
        # Fill its queue; from then on it ignores who calls.
        for _ in range(3):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.2", site.port))
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, port, **_: [(*kind, ("127.0.0.2", port)), (*kind, ("127.0.0.1", port))],
        )
        # With such a time-out, waiting for the deaf address would never end.
        desk.settings = dataclasses.replace(desk.settings, timeout=3600)
        desk.order(site.url(URL).replace("127.0.0.1", "two-addresses.invalid"), connections=1)
    assert_whole(desk)


def test_an_own_ca(secure_site: Site, desk: Desk) -> None:
    report = desk.order(secure_site.url(URL))
    assert_refused(desk, report, "source_unreachable")
    assert "certificate is not trusted" in report.faults[0].message
    desk.settings = dataclasses.replace(desk.settings, ca_path=str(FIXTURES / "server.crt"))
    desk.order(secure_site.url(URL))
    assert_whole(desk)


@pytest.mark.parametrize("connections", [1, 4])
def test_drops_within_tls(secure_site: Site, desk: Desk, connections: int) -> None:
    # Records of 16 KiB, gathered into larger reads: what came before the drop counts.
    offsets = [1, 16384, 16385, 700_001, 2_000_003]

    def script(exchange: Exchange) -> None:
        exchange.proper(upto=offsets[exchange.number - 1] if exchange.number <= len(offsets) else None)

    secure_site.script = script
    desk.settings = dataclasses.replace(desk.settings, ca_path=str(FIXTURES / "server.crt"))
    report = desk.order(secure_site.url(URL), connections=connections)
    assert_whole(desk)
    assert report.files[0].fetched == len(CONTENT)


def test_a_stall_within_tls(secure_site: Site, desk: Desk) -> None:
    release = threading.Event()

    def script(exchange: Exchange) -> None:
        if exchange.number == 1:
            exchange.head(200, Content_Length=len(CONTENT), ETag='"1"')
            exchange.body(CONTENT[:HALF])
            release.wait(20)
            exchange.hang_up()
        else:
            release.set()
            exchange.proper()

    secure_site.script = script
    desk.settings = dataclasses.replace(desk.settings, ca_path=str(FIXTURES / "server.crt"))
    report = desk.order(secure_site.url(URL), connections=1)
    assert_whole(desk)
    assert report.files[0].fetched == len(CONTENT)
