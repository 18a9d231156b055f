# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Models as files, shard sets, saved headers and URLs; what else a file can be; the module."""

from __future__ import annotations

import http.server
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.gguf import source
from ansible_collections.volta.llm.plugins.module_utils.gguf.identify import identify
from ansible_collections.volta.llm.plugins.module_utils.gguf.model import Model, open_model, plain_metadata
from ansible_collections.volta.llm.plugins.module_utils.gguf.saved import keep_header, render
from ansible_collections.volta.llm.plugins.module_utils.gguf.shards import shard_name

from tests.unit.gguf.build import real

ROOT = Path(__file__).resolve().parents[3]


def codes(model: Model) -> list[str]:
    return [fault.code for fault in model.faults]


# --- what a file is ---------------------------------------------------------------------------------------------------

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4cac73fe137e4a1e9cf3f8ed6f8a4d8b1d7cf3ad6f4a4c5ff6a1c7d9c7a5b0e1\nsize 30482301184\n"
)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty"),
        (POINTER, "git_lfs_pointer"),
        (b"<!DOCTYPE html><html><head><title>Sign in</title>", "html"),
        (b"\n\n  <html lang='en'>", "html"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "html"),
        (b'{"error":"Repository not found"}', "json"),
        (b"[]", "json"),
        (struct.pack("<Q", 50) + b'{"__metadata__":{"format":"pt"}}' + b" " * 40, "safetensors"),
        (b"PK\x03\x04" + b"\0" * 100, "zip"),
        (b"\x1f\x8b\x08\0" + b"\0" * 100, "gzip"),
        (b"\x28\xb5\x2f\xfd" + b"\1" * 100, "zstd"),
        (b"\xfd7zXZ\0\0\4" + b"\1" * 100, "xz"),
        (b"BZh91AY&SY" + b"\1" * 100, "bzip2"),
        (b"tjgg\1\0\0\0", "ggml"),
        (b"FUGG\0\0\0\3", "byte_swapped"),
        (b"\0" * 1000, "zeros"),
        (b"GGU", "unknown"),
        (b"\x93NUMPY\1\0", "unknown"),
    ],
)
def test_wrong_files_are_called_by_their_name(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    model = open_model(str(path))
    assert codes(model) == ["gguf_wrong_file"]
    assert model.header is None
    assert model.wrong is not None
    assert model.wrong.kind == kind
    assert model.wrong.words == model.faults[0].message
    assert model.faults[0].remedy


def test_lfs_pointer_tells_what_it_stands_for(tmp_path: Path) -> None:
    wrong = identify(POINTER, len(POINTER))
    assert wrong is not None
    assert wrong.size == 30482301184
    assert wrong.oid is not None
    assert wrong.oid.startswith("4cac73fe")


@pytest.mark.parametrize(
    ("ending", "content", "command"),
    [
        ("gz", b"\x1f\x8b\x08\0", "gunzip"),
        ("xz", b"\xfd7zXZ\0", "unxz"),
        ("zst", b"\x28\xb5\x2f\xfd", "unzstd"),
        ("bz2", b"BZh9", "bunzip2"),
    ],
)
def test_a_compressed_model_is_no_raw_part(tmp_path: Path, ending: str, content: bytes, command: str) -> None:
    path = tmp_path / f"model.gguf.{ending}"
    path.write_bytes(content + b"\1" * 100)
    model = open_model(str(path))
    assert codes(model) == ["gguf_wrong_file"]
    assert "compressed" in model.faults[0].message
    assert command in model.faults[0].remedy


@pytest.mark.parametrize(
    "name",
    [
        "m.gguf.a",
        "m.gguf.ab",
        "m.gguf.part1of3",
        "m.gguf.part-a",
        "m.gguf.001",
        "m.gguf-split-a",
        "m.gguf-part-b",
        "m.gguf.part-00001-of-00002",
        "m.gguf.0001",
        "m.gguf.part_1",
    ],
)
def test_raw_part_is_told_although_it_begins_like_a_gguf(tmp_path: Path, name: str) -> None:
    path = real(tmp_path / "m.gguf").rename(tmp_path / name)
    model = open_model(str(path))
    assert model.wrong is not None
    assert model.wrong.kind == "raw_split_part"
    assert "cat" in model.faults[0].remedy


def test_json_error_text_is_shown() -> None:
    wrong = identify(b'{"error": "Access to model x is\\n restricted"}', 46)
    assert wrong is not None
    assert "Access to model x is restricted" in wrong.words


def test_missing_folder_and_unreadable(tmp_path: Path) -> None:
    assert codes(open_model(str(tmp_path / "none.gguf"))) == ["gguf_not_found"]
    assert codes(open_model(str(tmp_path))) == ["gguf_unreadable"]
    os.mkfifo(tmp_path / "pipe.gguf")
    assert codes(open_model(str(tmp_path / "pipe.gguf"))) == ["gguf_unreadable"]
    assert codes(open_model("nul\0byte")) == ["gguf_not_found"]


def test_whole_file(tmp_path: Path) -> None:
    path = real(tmp_path / "small.gguf")
    model = open_model(str(path))
    assert model.faults == []
    assert model.header is not None
    assert model.header.architecture == "llama"
    assert model.parameters == 64 * 256 + 255 + 4 * 8 * 32 + 256
    assert model.tensor_types == {"f16": 1, "f32": 1, "q4_0": 1, "q8_0": 1}
    assert model.tensor_bytes == 64 * 8 * 34 + 255 * 4 + 32 * 18 + 256 * 2
    assert [entry.bytes for entry in model.files] == [path.stat().st_size]
    assert plain_metadata(model.header)["tokenizer.ggml.tokens"] == {"type": "string", "count": 3000}


def test_truncated_tail_is_told(tmp_path: Path) -> None:
    path = real(tmp_path / "small.gguf")
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size - 200)
    model = open_model(str(path))
    assert codes(model) == ["gguf_truncated"]
    assert "blk.1.attn_norm.weight" in model.faults[0].message
    assert model.header is not None  # what could be read is shown


def test_big_endian_is_read_and_warned_of(tmp_path: Path) -> None:
    model = open_model(str(real(tmp_path / "big.gguf", big=True)))
    assert codes(model) == ["gguf_foreign_byte_order"]
    assert model.parameters is not None


# --- shard sets -------------------------------------------------------------------------------------------------------


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first file of a set of four."""
    return real(tmp_path / "small.gguf", split_after=1)


def shard(first: Path, number: int) -> Path:
    return first.with_name(f"small-0000{number}-of-00004.gguf")


def test_set_is_read_as_one(first: Path, tmp_path: Path) -> None:
    whole = open_model(str(real(tmp_path / "whole.gguf")))
    model = open_model(str(first))
    assert model.faults == []
    assert len(model.files) == 4
    assert model.parameters == whole.parameters
    assert model.tensor_types == whole.tensor_types


def test_later_shard_names_the_first(first: Path) -> None:
    model = open_model(str(shard(first, 3)))
    assert codes(model) == ["gguf_not_first_shard"]
    assert str(first) in model.faults[0].remedy


def test_missing_shards_are_told_at_once(first: Path) -> None:
    shard(first, 2).unlink()
    shard(first, 4).unlink()
    model = open_model(str(first))
    assert codes(model) == ["gguf_shard_missing"]
    assert "00002-of-00004" in model.faults[0].message
    assert "00004-of-00004" in model.faults[0].message
    assert [entry.bytes is None for entry in model.files] == [False, True, False, True]


def test_empty_shard_is_told(first: Path) -> None:
    shard(first, 3).write_bytes(b"")
    model = open_model(str(first))
    assert "gguf_wrong_file" in codes(model)
    assert str(shard(first, 3)) in {fault.subject for fault in model.faults}


def test_truncated_shard_is_told(first: Path) -> None:
    content = shard(first, 2).read_bytes()
    shard(first, 2).write_bytes(content[: len(content) // 2])
    model = open_model(str(first))
    assert codes(model) == ["gguf_truncated"]
    assert model.faults[0].subject == str(shard(first, 2))


def test_swapped_shards_are_told(first: Path) -> None:
    two, three = shard(first, 2).read_bytes(), shard(first, 3).read_bytes()
    shard(first, 2).write_bytes(three)
    shard(first, 3).write_bytes(two)
    assert set(codes(open_model(str(first)))) == {"gguf_shard_mismatch"}


def test_shard_of_another_set_is_told(first: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = real(tmp_path / "other" / "small.gguf", split_after=2)
    shard(first, 2).write_bytes(other.with_name("small-00002-of-00002.gguf").read_bytes())
    model = open_model(str(first))
    assert "gguf_shard_mismatch" in codes(model)


def test_same_shard_twice_is_told(first: Path) -> None:
    shard(first, 3).write_bytes(shard(first, 2).read_bytes())
    assert set(codes(open_model(str(first)))) == {"gguf_shard_mismatch"}


def test_renamed_first_shard_is_told(first: Path) -> None:
    renamed = first.rename(first.with_name("model.gguf"))
    model = open_model(str(renamed))
    assert codes(model) == ["gguf_shard_mismatch"]
    assert "by name" in model.faults[0].message


def test_single_file_under_a_shard_name_is_told(tmp_path: Path) -> None:
    path = real(tmp_path / "m.gguf").rename(tmp_path / "m-00001-of-00003.gguf")
    assert codes(open_model(str(path))) == ["gguf_shard_mismatch"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/m-00002-of-00004.gguf", ("a/m", 2, 4)),
        ("m-00005-of-00004.gguf", None),
        ("m-00000-of-00004.gguf", None),
        ("m-00001-of-99999.gguf", None),
        ("m-1-of-4.gguf", None),
        ("m-00001-of-00004.gguf.part", None),
    ],
)
def test_shard_names(name: str, expected: tuple[str, int, int] | None) -> None:
    named = shard_name(name)
    assert (None if named is None else (named.stem, named.number, named.count)) == expected


# --- saved headers ----------------------------------------------------------------------------------------------------


def test_saved_header_holds_all_shards(first: Path, tmp_path: Path) -> None:
    model = open_model(str(first))
    assert model.header is not None
    kept = tmp_path / "kept.gguf"
    assert keep_header(model.header, kept, write=False) == (True, [])
    assert not kept.exists()
    assert keep_header(model.header, kept) == (True, [])
    assert keep_header(model.header, kept) == (False, [])
    again = open_model(str(kept))
    assert again.faults == []
    assert again.header is not None
    assert again.header.header_only
    assert [(t.name, t.shape, t.type) for t in again.header.tensors] == [
        (t.name, t.shape, t.type) for t in model.header.tensors
    ]
    assert again.header.metadata["volta.left_out"] == ["tokenizer.ggml.tokens:string:3000"]
    assert again.header.get("{arch}.attention.head_count_kv") == [2, 4]
    assert again.header.metadata["small.words"] == ["one", "zwei", "三"]
    assert keep_header(model.header, tmp_path / "no" / "folder")[1][0].code == "gguf_header_not_saved"


def test_metadata_survives_being_saved(tmp_path: Path) -> None:
    values = {
        "general.architecture": "x",
        "a.uint64": [2**63, 1],
        "a.negative": -5,
        "a.large_negative": [-(2**40)],
        "a.float": 0.5,
        "a.flags": [True, False],
        "a.empty": [],
        "a.nested": [[1, 2], [3]],
    }
    path = tmp_path / "h.gguf"
    path.write_bytes(render(values, []))
    model = open_model(str(path))
    assert model.header is not None
    assert {key: model.header.metadata[key] for key in values} == values


# --- URLs -------------------------------------------------------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder with ranges, and records what it was asked for."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.ranges = True
        self.length = ""
        self.failures = 0
        self.redirect: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        return None

    def do_GET(self) -> None:
        server = self.server
        server.requests.append((self.path, dict(self.headers)))
        if server.failures:
            server.failures -= 1
            self.send_error(503)
            return
        if server.redirect:
            self.send_response(302)
            self.send_header("Location", server.redirect + self.path.split("?")[0] + "?X-Signature=secret")
            self.end_headers()
            return
        path = server.folder / self.path.split("?")[0].lstrip("/")
        if not path.is_file():
            self.send_error(401 if "gated" in self.path else 404)
            return
        content = path.read_bytes()
        wanted = self.headers.get("Range")
        if wanted and server.ranges:
            start, stop = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
            if start >= len(content):
                self.send_error(416)
                return
            part = content[start : stop + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(content)}")
        else:
            part = content
            self.send_response(200)
        self.send_header("Content-Length", self.server.length or str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "served"
    folder.mkdir()
    running = Server(folder)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()


def test_only_the_beginning_of_a_url_is_fetched(server: Server) -> None:
    path = real(server.folder / "m.gguf")
    with path.open("ab") as handle:
        handle.truncate(50 << 20)
    model = open_model(f"{server.url}/m.gguf?revision=1")
    assert model.faults == []
    assert model.bytes_fetched == source.BLOCK
    assert model.files[0].path == f"{server.url}/m.gguf"
    assert model.files[0].bytes == 50 << 20


def test_shards_of_a_url_are_found_with_the_same_query(server: Server) -> None:
    real(server.folder / "m.gguf", split_after=1)
    model = open_model(f"{server.url}/m-00001-of-00004.gguf?download=true")
    assert model.faults == []
    assert len(model.files) == 4
    assert all(path.endswith("?download=true") for path, _ in server.requests)


def test_missing_shard_of_a_url(server: Server) -> None:
    real(server.folder / "m.gguf", split_after=1)
    (server.folder / "m-00003-of-00004.gguf").unlink()
    model = open_model(f"{server.url}/m-00001-of-00004.gguf")
    assert codes(model)[0] == "gguf_url_failed"
    assert "404" in model.faults[0].message


def test_busy_server_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.time, "sleep", lambda seconds: None)
    real(server.folder / "m.gguf")
    server.failures = 2
    assert open_model(f"{server.url}/m.gguf").faults == []
    server.failures = 99
    model = open_model(f"{server.url}/m.gguf")
    assert codes(model) == ["gguf_url_failed"]
    assert "503" in model.faults[0].message


def test_status_is_told_and_secrets_are_not(server: Server) -> None:
    model = open_model(f"http://user:pass@127.0.0.1:{server.server_address[1]}/gone.gguf?token=secret")
    assert codes(model) == ["gguf_url_failed"]
    assert "404" in model.faults[0].message
    shown = json.dumps([fault.as_dict() for fault in model.faults] + [entry.as_dict() for entry in model.files])
    assert "secret" not in shown
    assert "pass" not in shown
    assert "licence" in open_model(f"{server.url}/gated.gguf").faults[0].remedy


@pytest.mark.parametrize("value", ["Bearer secret\nx", "Bearer secret\0", "Bearer secret\u4e2d"])
def test_a_header_that_cannot_be_sent_is_named_and_not_shown(server: Server, value: str) -> None:
    model = open_model(f"{server.url}/m.gguf", {"Authorization": value})
    assert codes(model) == ["gguf_url_failed"]
    assert model.faults[0].subject == "http_headers: Authorization"
    assert "secret" not in str(model.faults)


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for place in (tmp_path / "ca.pem", tmp_path / "missing.pem", tmp_path):
        model = open_model("https://127.0.0.1:1/m.gguf", ca_file=str(place))
        assert codes(model) == ["gguf_url_failed"]
        assert model.faults[0].subject == "ca_file"


def test_a_header_with_a_line_end_is_sent_without_it(server: Server) -> None:
    real(server.folder / "m.gguf")
    assert open_model(f"{server.url}/m.gguf", {"Authorization": "Bearer hf_x\r\n"}).faults == []
    assert server.requests[0][1]["Authorization"] == "Bearer hf_x"


@pytest.mark.parametrize(
    "url",
    ["http://user:hidden@h:port/m.gguf", "http://user:hidden@[::1/m.gguf", "http://127.0.0.1:1/\u4e2d.gguf?hidden"],
)
def test_an_address_that_is_none(url: str) -> None:
    model = open_model(url)
    assert codes(model) == ["gguf_url_failed"]
    assert "hidden" not in str(model.faults)


def test_redirect_keeps_the_range_and_drops_credentials(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cdn").mkdir()
    other = Server(tmp_path / "cdn")
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        real(other.folder / "m.gguf")
        server.redirect = other.url
        model = open_model(f"{server.url}/m.gguf", {"Authorization": "Bearer hf_x"})
        assert model.faults == []
        assert server.requests[0][1]["Authorization"] == "Bearer hf_x"
        assert "Authorization" not in other.requests[0][1]
        assert other.requests[0][1]["Range"].startswith("bytes=0-")
        assert "secret" not in json.dumps([entry.as_dict() for entry in model.files])
    finally:
        other.shutdown()
        other.server_close()


def test_server_without_ranges(server: Server) -> None:
    server.ranges = False
    real(server.folder / "m.gguf")
    (server.folder / "page.gguf").write_bytes(b"<!doctype html><title>Sign in</title>")
    assert codes(open_model(f"{server.url}/m.gguf")) == ["gguf_url_failed"]
    model = open_model(f"{server.url}/page.gguf")
    assert codes(model) == ["gguf_wrong_file"]
    assert model.wrong is not None
    assert model.wrong.kind == "html"


@pytest.mark.parametrize("length", ["\u00b2", "1_0", "9" * 5000])
def test_a_length_that_is_no_number(server: Server, length: str) -> None:
    server.ranges, server.length = False, length
    (server.folder / "page.gguf").write_bytes(b"<!doctype html><title>Sign in</title>")
    assert codes(open_model(f"{server.url}/page.gguf")) == ["gguf_wrong_file"]


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.time, "sleep", lambda seconds: None)
    model = open_model("http://127.0.0.1:1/m.gguf")
    assert codes(model) == ["gguf_url_failed"]
    assert "refused" in model.faults[0].message


def test_header_longer_than_the_limit_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BLOCK", 4096)
    real(server.folder / "m.gguf")
    url = source.UrlSource(f"{server.url}/m.gguf", limit=8192)
    model = open_model("m", open_source=lambda place: url)
    assert codes(model) == ["gguf_url_failed"]
    assert url.fetched <= 8192


# --- the module -------------------------------------------------------------------------------------------------------


def run_module(**arguments: Any) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "ansible_collections.volta.llm.plugins.modules.gguf_info"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        capture_output=True,
        text=True,
        cwd=ROOT / ".collections",
    )
    return done.returncode, json.loads(done.stdout)


def test_module_returns_what_is_documented(first: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.gguf"
    code, result = run_module(model=str(first), tensors=True, save_header=str(kept))
    assert code == 0
    assert result["changed"] is True
    assert result["architecture"] == "llama"
    assert result["name"] == "Small"
    assert len(result["shards"]) == 4
    assert result["tensor_count"] == len(result["tensors"]) == 4
    assert result["tensors"][2] == {
        "name": "blk.0.ffn_down_exps.weight",
        "shape": [32, 8, 4],
        "type": "q4_0",
        "bytes": 576,
        "offset": 0,
    }
    assert run_module(model=str(first), save_header=str(kept))[1]["changed"] is False
    code, result = run_module(model=str(kept))
    assert code == 0
    assert result["header_only"] is True
    assert result["tensors"] is None


def test_module_fails_once_with_the_fault(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(POINTER)
    code, result = run_module(model=str(path))
    assert code == 1
    assert [fault["code"] for fault in result["faults"]] == ["gguf_wrong_file"]
    assert result["wrong_file"]["size"] == 30482301184
    assert "LFS" in result["msg"]


def test_module_check_mode_writes_nothing(first: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.gguf"
    code, result = run_module(model=str(first), save_header=str(kept), _ansible_check_mode=True)
    assert (code, result["changed"], kept.exists()) == (0, True, False)
