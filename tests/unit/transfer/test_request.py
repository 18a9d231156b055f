# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From options to wanted files; checksum files; what model hubs tell."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.transfer.checksums import (
    checksum_for,
    look_up,
    parse_checksums,
)
from ansible_collections.volta.llm.plugins.module_utils.transfer.deliver import Delivery, Wanted
from ansible_collections.volta.llm.plugins.module_utils.transfer.http import redact, retry_after
from ansible_collections.volta.llm.plugins.module_utils.transfer.lockfile import gather
from ansible_collections.volta.llm.plugins.module_utils.transfer.request import (
    secrets_in,
    wanted_files,
    with_checksums,
)
from ansible_collections.volta.llm.plugins.module_utils.transfer.sources import _listed, source_of

from tests.unit.transfer.conftest import CONTENT, SHA256, Desk
from tests.unit.transfer.site import Exchange, Site

HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def problems(tmp_path: Path, **options: Any) -> list[str]:
    _, faults = wanted_files({"dest": str(tmp_path / "m"), **options})
    assert {fault.code for fault in faults} <= {"bad_argument"}
    return [f"{fault.subject}: {fault.message}" for fault in faults]


@pytest.mark.parametrize("value", [HASH, HASH.upper(), f"sha256:{HASH}", f" {HASH} "])
def test_a_hash_in_usual_forms(tmp_path: Path, value: str) -> None:
    wanted, faults = wanted_files({"dest": str(tmp_path / "m"), "sha256": value})
    assert faults == []
    assert wanted[0].sha256 == HASH


@pytest.mark.parametrize("value", ["", HASH[:-1], HASH[:-1] + "g", "d41d8cd98f00b204e9800998ecf8427e"])
def test_what_is_no_hash_is_refused(tmp_path: Path, value: str) -> None:
    (problem,) = problems(tmp_path, sha256=value)
    assert "sha256" in problem


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, url="ftp://host/file", sha256="abc", size=-1, sources=[{"type": "huggingface"}])
    assert len(found) == 4


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "host/file", "http://", "http://host:port/file", "http://[::1/file"]
)
def test_addresses_that_cannot_work(tmp_path: Path, url: str) -> None:
    assert len(problems(tmp_path, url=url)) == 1


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    _, faults = wanted_files({"dest": str(tmp_path)})
    assert [fault.subject for fault in faults] == ["dest"]


def test_missing_shards_are_listed_at_once(tmp_path: Path) -> None:
    # C26: the engine wants the first; it must be there, with all others.
    names = ["m-00002-of-00004.gguf", "m-00004-of-00004.gguf"]
    (problem,) = problems(tmp_path, files=[{"name": name, "sha256": HASH} for name in names])
    assert "m-00001-of-00004.gguf, m-00003-of-00004.gguf" in problem


def test_a_set_needs_as_many_mirrors_for_each_file(tmp_path: Path) -> None:
    files = [{"name": "a", "urls": ["http://h/a", "http://i/a"]}, {"name": "b", "url": "http://h/b"}]
    assert len(problems(tmp_path, files=files)) == 1


@pytest.mark.parametrize("name", ["../m", "a/b", "", "..", "m.part"])
def test_names_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    assert len(problems(tmp_path, files=[{"name": name}])) == 1


def test_secrets_within_addresses() -> None:
    found = secrets_in(
        {
            "url": "https://user:password@host/a?X-Amz-Signature=abc",
            "sources": [{"url": "https://host/b?token=secret"}, {"file": "/x"}],
            "files": [{"name": "a", "urls": ["https://host/c?sig=123456"]}],
        }
    )
    assert found == {"password", "X-Amz-Signature=abc", "token=secret", "sig=123456"}
    assert redact("https://user:password@host:8443/a?sig=1#x") == "https://host:8443/a"
    assert redact("http://[::1]:80/a?b") == "http://[::1]:80/a"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("user:hidden@h/p", "h/p"),
        ("user:hid@den@h/p?sig=hidden", "h/p"),
        ("http:user:hidden@h/p", "h/p"),
        ("user:hid?den@h/p", "..."),
        ("http://user:hid?den@[h/p", "..."),
        ("h/p?sig=hidden", "h/p"),
        ("/srv/a@b/m.gguf", "/srv/a@b/m.gguf"),
    ],
)
def test_what_is_no_address_shows_no_login_either(tmp_path: Path, url: str, shown: str) -> None:
    assert redact(url) == shown
    if not url.startswith("/"):
        (problem,) = problems(tmp_path, url=url)
        assert "hid" not in problem
    assert secrets_in({"url": "user:hidden@h/p"}) == {"hidden"}


@pytest.mark.parametrize("kind", ["missing", "no certificate", "folder", "no path"])
def test_certificates_that_cannot_be_read(desk: Desk, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "ca.pem"
    if kind == "no certificate":
        place.write_text("no certificate")
    elif kind == "folder":
        place.mkdir()
    ca_path = "a\0b" if kind == "no path" else str(place)
    (problem,) = problems(tmp_path, url="https://127.0.0.1:9/m", ca_path=ca_path)
    assert problem.startswith("ca_path: ")
    # Whoever comes by another way is told the same, whatever it was wanted for.
    settings = dataclasses.replace(desk.settings, ca_path=ca_path)
    hub = {"type": "huggingface", "repo": "o/n", "endpoint": "https://127.0.0.1:9"}
    attempts: list[Callable[[], object]] = [
        lambda: Delivery([Wanted(desk.dest, None, None, (source_of(hub, "m", {}),))], settings).run(),
        lambda: gather([{"name": "m"}], [hub], settings, {}),
        lambda: gather([{"name": "m", "url": "https://127.0.0.1:9/m"}], [], settings, {}),
        lambda: with_checksums([Wanted(desk.dest)], "https://127.0.0.1:9/m", settings, {}),
    ]
    for attempt in attempts:
        with pytest.raises(FaultError) as caught:
            attempt()
        assert (caught.value.fault.code, caught.value.fault.subject) == ("bad_argument", "ca_path")


@pytest.mark.parametrize("place", ["option", "environment"])
@pytest.mark.parametrize(
    ("endpoint", "remedy"),
    [("hf-mirror.com", "https://hf-mirror.com"), ("u:hidden@hf-mirror.com/", "https://hf-mirror.com"), ("ftp://h", "")],
)
def test_an_endpoint_without_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, endpoint: str, remedy: str
) -> None:
    spec = {"type": "huggingface", "repo": "o/n"}
    if place == "option":
        spec["endpoint"] = endpoint
    else:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
    _, faults = wanted_files({"dest": str(tmp_path / "m"), "sources": [spec]})
    (fault,) = faults
    assert (fault.code, "o/n" in fault.subject) == ("bad_argument", True)
    assert ("endpoint" if place == "option" else "HF_ENDPOINT") in fault.message
    assert remedy in fault.remedy
    assert "hidden" not in str(fault)


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"url": "http://h/m.gguf"}, False),
        ({"file": "/srv/m.gguf"}, False),
        ({"type": "huggingface", "repo": "o/n", "path": "Q4/m.gguf"}, False),
        ({"type": "modelscope", "repo": "o/n", "path": "Q4/m.gguf"}, False),
        ({"url": "http://h/"}, True),
        ({"url": "http://h/?token=abc"}, True),
        ({"file": "/srv/"}, True),
        ({"type": "huggingface", "repo": "o/n", "path": "Q4/"}, True),
    ],
)
def test_one_place_is_not_several_files(tmp_path: Path, options: dict[str, Any], fits: bool) -> None:
    files: list[dict[str, Any]] = [{"name": "m.gguf", "sha256": HASH}, {"name": "mmproj.gguf"}]
    found = problems(tmp_path, files=files, sources=[options])
    assert len(found) == (0 if fits else 1)
    assert fits or "m.gguf, mmproj.gguf" in found[0]
    # The same bytes under two names are no mistake.
    same = [{**entry, "sha256": HASH} for entry in files]
    assert problems(tmp_path, files=same, sources=[options]) == []


def test_one_address_is_not_several_files(tmp_path: Path) -> None:
    def found(*addresses: str) -> list[str]:
        names = ("m.gguf", "mmproj.gguf")
        return problems(tmp_path, files=[{"name": n, "url": url} for n, url in zip(names, addresses, strict=True)])

    assert len(found("http://h/m.gguf", "http://h/m.gguf")) == 1
    assert found("http://h/get?file=1", "http://h/get?file=2") == []
    parts = [{"name": f"m.gguf.{letter}"} for letter in "ab"]
    assert len(problems(tmp_path, files=parts, sources=[{"url": "http://h/m.gguf.a"}])) == 1
    assert problems(tmp_path, files=[{"name": "m.gguf"}, *parts], sources=[{"url": "http://h/"}]) == []
    mirrors = [{"name": "a", "urls": ["http://h/a", "http://i/b"]}, {"name": "b", "urls": ["http://i/b", "http://h/b"]}]
    assert len(problems(tmp_path, files=mirrors)) == 1


def test_a_file_that_is_listed_twice(tmp_path: Path) -> None:
    # The run would wait for its own lock.
    assert len(problems(tmp_path, files=[{"name": "m.gguf"}, {"name": "m.gguf"}], sources=[{"url": "http://h/"}])) == 1


@pytest.mark.parametrize("name", ["m" * 300, "m" * 250, "\u4e2d" * 100, "m\0"])
def test_names_that_no_file_system_has(tmp_path: Path, name: str) -> None:
    assert len(problems(tmp_path, files=[{"name": name}])) == 1
    _, faults = wanted_files({"dest": str(tmp_path / name)})
    assert [fault.code for fault in faults] == ["bad_argument"]
    _, faults = wanted_files({"dest": str(tmp_path / name / ("n" * 300) / "m.gguf")})
    assert [fault.code for fault in faults] == ["bad_argument"]


@pytest.mark.parametrize("kind", ["file", "controller"])
def test_paths_of_sources_that_cannot_be(tmp_path: Path, kind: str) -> None:
    for path in ("/srv/" + "m" * 300, "/srv/m\0", "/" + "a/" * 3000 + "m"):
        assert len(problems(tmp_path, sources=[{"type": kind, kind: path}])) == 1


def test_the_longest_name_is_brought(site: Site, desk: Desk) -> None:
    dest = desk.dest.with_name("m" * 232 + ".gguf")
    desk.order(site.url("/model.gguf"), dest=dest)
    assert dest.read_bytes() == CONTENT


BAD_VALUES = ["hidden\nhidden", "hidden\r\n hidden", "hidden\0hidden", "hidden\u4e2d"]


@pytest.mark.parametrize("value", BAD_VALUES)
@pytest.mark.parametrize("place", ["headers", "token", "source headers", "source token"])
def test_a_token_or_header_that_cannot_be_sent_is_named_and_not_shown(tmp_path: Path, value: str, place: str) -> None:
    given: dict[str, Any] = {"token": value} if "token" in place else {"headers": {"Authorization": f"Bearer {value}"}}
    hub = {"type": "huggingface", "repo": "o/n"}
    options = {"sources": [{**hub, **given}]} if "source" in place else {"sources": [hub], **given}
    (problem,) = problems(tmp_path, **options)
    assert place.rpartition(" ")[2] in problem
    assert "hidden" not in problem


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n\n"])
def test_the_line_end_of_a_token_or_header_is_not_sent(tmp_path: Path, end: str) -> None:
    hub = {"type": "huggingface", "repo": "o/n"}
    given = {"sources": [hub], "token": f"geheim{end}", "headers": {"X-Key": f"schluessel{end}"}}
    wanted, faults = wanted_files({"dest": str(tmp_path / "m"), **given})
    assert faults == []
    assert wanted[0].sources[0].headers == {"X-Key": "schluessel", "Authorization": "Bearer geheim"}
    # As they are sent they must not show either, and the options hide them only as they were given.
    assert secrets_in(given) == {"geheim", "schluessel"}
    assert source_of(hub, "m", {}, end).headers == {}


# -- checksum files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"{HASH}  model.gguf",
        f"{HASH} *model.gguf",
        f"{HASH}  ./folder/model.gguf\r\n",
        f"SHA256 (model.gguf) = {HASH}",
        f"SHA2-256(model.gguf)= {HASH}",
        HASH.upper(),
        f"# sums\n{'0' * 64}  other.gguf\n{HASH.upper()}  model.gguf\n",
        f"\ufeff{HASH}\tmodel.gguf",
    ],
)
def test_checksum_files_in_usual_forms(text: str) -> None:
    # G04
    assert checksum_for(text, "model.gguf") == HASH


def test_a_checksum_of_another_file_is_not_taken() -> None:
    assert checksum_for(f"{HASH}  other.gguf", "model.gguf") is None
    assert checksum_for(f"{HASH}\n{HASH}  other.gguf", "model.gguf") is None
    assert parse_checksums("d41d8cd98f00b204e9800998ecf8427e  model.gguf") == []


OTHER = "0" * 64


@pytest.mark.parametrize(
    ("text", "alone", "reason"),
    [
        (f"{HASH}\n{OTHER}", True, "2 SHA-256 without a name"),
        (HASH, False, "not the only file"),
        (f"{HASH}  a/model.gguf\n{OTHER}  b/model.gguf", True, "a/model.gguf, b/model.gguf"),
        (f"{HASH}  model.gguf\nSHA256 (old/model.gguf) = {OTHER}", True, "model.gguf, old/model.gguf"),
        (f"{HASH}\n{OTHER}  other.gguf", True, "no SHA-256 for model.gguf"),
        ("", True, "no SHA-256 for model.gguf"),
    ],
)
def test_a_checksum_that_could_be_another_file_s_is_none(text: str, alone: bool, reason: str) -> None:
    found = look_up(text, "model.gguf", alone)
    assert found.sha256 is None
    assert reason in found.reason


def test_a_checksum_that_is_there_twice(tmp_path: Path) -> None:
    assert checksum_for(f"{HASH}\nsha256:{HASH}", "model.gguf") == HASH
    assert checksum_for(f"{HASH}  a/model.gguf\n{HASH}  b/model.gguf", "model.gguf", alone=False) == HASH


def test_a_bare_hash_is_for_one_file(desk: Desk, tmp_path: Path) -> None:
    sums = tmp_path / "m.sha256"
    sums.write_text(SHA256)
    shards = [Wanted(tmp_path / f"m-{number:05d}-of-00002.gguf") for number in (1, 2)]
    filled, faults = with_checksums(shards, str(sums), desk.settings, {})
    assert [item.sha256 for item in filled] == [None, None]
    assert ["not the only file" in fault.message for fault in faults] == [True, True]
    gathered = gather([{"name": item.dest.name} for item in shards], [], desk.settings, {}, checksums=str(sums))
    assert [fault.code for fault in gathered.faults] == ["not_locked"]
    assert "not the only file" in " ".join(gathered.notes)
    # The other has its own, so it is clear whose this is; of raw parts it is the whole's.
    filled, _ = with_checksums([shards[0], dataclasses.replace(shards[1], sha256=HASH)], str(sums), desk.settings, {})
    assert [item.sha256 for item in filled] == [SHA256, HASH]
    parts = tuple(Wanted(tmp_path / f"m.gguf.{letter}") for letter in "ab")
    (joined,), _ = with_checksums([Wanted(tmp_path / "m.gguf", parts=parts)], str(sums), desk.settings, {})
    assert (joined.sha256, [part.sha256 for part in joined.parts]) == (SHA256, [None, None])


def test_hashes_from_a_checksum_file(site: Site, desk: Desk, tmp_path: Path) -> None:
    site.files["/SHA256SUMS"] = f"{SHA256}  ./model.gguf\n".encode()
    wanted = [Wanted(desk.dest), Wanted(tmp_path / "other.gguf", sha256=HASH)]
    filled, faults = with_checksums(wanted, site.url("/SHA256SUMS"), desk.settings, {})
    assert faults == []
    assert [item.sha256 for item in filled] == [SHA256, HASH]
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"{HASH}  another.gguf\n")
    _, faults = with_checksums(wanted, str(sums), desk.settings, {})
    assert [(fault.code, fault.subject) for fault in faults] == [("checksum_missing", str(sums))]


@pytest.mark.parametrize("place", ["/nonexistent/SHA256SUMS", "http://127.0.0.1:9/SHA256SUMS", "missing"])
def test_a_checksum_file_that_cannot_be_read(site: Site, desk: Desk, place: str) -> None:
    place = site.url("/nothing?sig=hidden") if place == "missing" else place
    with pytest.raises(FaultError) as caught:
        with_checksums([Wanted(desk.dest)], place, desk.settings, {})
    assert caught.value.fault.code == "checksum_missing"
    assert "hidden" not in str(caught.value.fault)


# -- model hubs --------------------------------------------------------------------------------------------------------


def test_hub_addresses() -> None:
    hub = {"type": "huggingface", "repo": "org/name", "revision": "refs/pr/1", "path": "Q4 K/"}
    source = source_of(hub, "m.gguf", {}, "token")
    assert source.url == "https://huggingface.co/org/name/resolve/refs%2Fpr%2F1/Q4%20K/m.gguf"
    assert source.headers == {"Authorization": "Bearer token"}
    assert "token" not in repr(source)
    scope = source_of({"type": "modelscope", "repo": "org/name"}, "m.gguf", {})
    assert scope.url == "https://www.modelscope.cn/models/org/name/resolve/master/m.gguf"


def test_the_endpoint_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example.org/")
    source = source_of({"type": "huggingface", "repo": "org/name"}, "m.gguf", {})
    assert source.url == "https://mirror.example.org/org/name/resolve/main/m.gguf"


def hub(site: Site, linked: bool, sha256: str = SHA256) -> None:
    """Answers as Hugging Face does: a redirect with size and hash, or as some mirrors a bare one, and the list."""

    def script(exchange: Exchange) -> None:
        if exchange.path.startswith("/api/"):
            entry = {"path": "model.gguf", "size": 130, "lfs": {"oid": sha256, "size": len(CONTENT)}}
            body = json.dumps([{"path": "README.md", "size": 3}, entry]).encode()
            exchange.head(200, Content_Length=len(body), Content_Type="application/json")
            exchange.body(body)
        elif exchange.path == "/cdn":
            exchange.proper()
        else:
            extra = {"X-Linked-Size": len(CONTENT), "X-Linked-ETag": f'"{sha256}"'} if linked else {}
            exchange.status(308, Location="/cdn?Signature=abc", **extra)

    site.files["/cdn"] = CONTENT
    site.script = script


@pytest.mark.parametrize("linked", [True, False])
def test_the_hubs_own_hash_is_held_against_the_bytes(site: Site, desk: Desk, linked: bool) -> None:
    # C12, C14: where a mirror's redirect tells nothing, the list of files does.
    hub(site, linked)
    source = source_of({"type": "huggingface", "repo": "org/name", "endpoint": site.url("")}, "model.gguf", {})
    report = desk.order(sha256=None, sources=(source,))
    assert desk.dest.read_bytes() == CONTENT
    assert [fault.code for fault in report.faults] == ["unverified"]
    assert "the source itself names" in report.faults[0].message
    hub(site, linked, sha256="0" * 64)
    desk.dest.unlink()
    report = desk.order(sha256=None, sources=(source,))
    assert [fault.code for fault in report.faults] == ["hash_mismatch"]
    assert not desk.dest.exists()


@pytest.mark.parametrize("kind", ["huggingface", "modelscope"])
@pytest.mark.parametrize(
    "listing",
    [
        None,
        "error",
        {"Data": "error"},
        {"Data": [{"Files": []}]},
        {"Data": {"Files": "error"}},
        {"Data": {"Files": ["error", None]}},
        ["error", None, 3],
    ],
)
def test_a_list_that_is_none(kind: str, listing: Any) -> None:
    assert list(_listed(kind, listing)) == []


@pytest.mark.parametrize("size", [True, "12", -1, [1], 1.5])
def test_entries_of_a_list_that_say_nothing(size: Any) -> None:
    (entry,) = _listed("huggingface", [{"path": "m", "lfs": True, "size": size}])
    assert (entry.path, entry.size, entry.sha256) == ("m", None, None)
    (entry,) = _listed("modelscope", {"Data": {"Files": [{"Path": "m", "Size": size, "Sha256": [1]}]}})
    assert (entry.path, entry.size, entry.sha256) == ("m", None, None)


def test_modelscopes_list(site: Site, desk: Desk) -> None:
    def script(exchange: Exchange) -> None:
        if exchange.path.startswith("/api/"):
            entry = {"Path": "model.gguf", "Size": len(CONTENT), "Sha256": "0" * 64}
            body = json.dumps({"Data": {"Files": [entry]}}).encode()
            exchange.head(200, Content_Length=len(body))
            exchange.body(body)
        else:
            exchange.content = CONTENT
            exchange.end = min(exchange.end or len(CONTENT), len(CONTENT))
            exchange.proper()

    site.files["/models/org/name/resolve/master/model.gguf"] = CONTENT
    site.script = script
    source = source_of({"type": "modelscope", "repo": "org/name", "endpoint": site.url("")}, "model.gguf", {})
    report = desk.order(sha256=None, sources=(source,))
    assert [fault.code for fault in report.faults] == ["hash_mismatch"]


def test_retry_after() -> None:
    assert retry_after({"retry-after": "120"}) == 120
    assert retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, now=70.0) == 30
    assert retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, now=700.0) == 0
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None
