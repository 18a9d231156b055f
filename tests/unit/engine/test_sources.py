# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Sources: found in an index, fetched from a real server, verified, and unpacked without harm."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import os
import ssl
import subprocess
import tarfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine import sources
from ansible_collections.volta.llm.plugins.module_utils.engine.process import environment
from ansible_collections.volta.llm.plugins.module_utils.engine.request import Request
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engine"
PINNED = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
COMMIT = "0c1e57098bba43ac29e6e3b677cdceebdd22334f"
PAGE = "https://pypi.org/simple/llama-cpp-python/"

REQUEST = Request(
    source_type="pypi_sdist", prefix="/p", build_directory="/b", package_version="0.3.36", sha256=PINNED, backend="cpu"
)

Members = list[tuple[str, bytes | None, dict[str, object]]]


def tar(members: Members, pax: dict[str, str] | None = None) -> bytes:
    """A gzipped archive of (name, content or null, attributes of TarInfo)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT, pax_headers=pax or {}) as archive:
        for name, content, attributes in members:
            info = tarfile.TarInfo(name)
            for key, value in attributes.items():
                setattr(info, key, value)
            info.size = len(content or b"")
            archive.addfile(info, io.BytesIO(content) if content is not None else None)
    return out.getvalue()


def folder(name: str) -> tuple[str, None, dict[str, object]]:
    return name, None, {"type": tarfile.DIRTYPE, "mode": 0o755}


ENGINE: Members = [
    folder("llama.cpp"),
    folder("llama.cpp/ggml"),
    ("llama.cpp/CMakeLists.txt", b"project(llama.cpp)\n", {}),
    ("llama.cpp/ggml/CMakeLists.txt", b"project(ggml)\n", {}),
    ("llama.cpp/scripts/run.sh", b"#!/bin/sh\n", {"mode": 0o4777}),
]


def save(tmp_path: Path, content: bytes) -> tuple[Path, str]:
    path = tmp_path / "source.tar.gz"
    path.write_bytes(content)
    return path, hashlib.sha256(content).hexdigest()


def unpack(tmp_path: Path, members: Members, pax: dict[str, str] | None = None) -> sources.Unpacked:
    path, digest = save(tmp_path, tar(members, pax))
    return sources.unpack(path, digest, tmp_path / "out")


# --- the index ---


@pytest.mark.parametrize(
    ("name", "kind"), [("simple-index.json", "application/vnd.pypi.simple.v1+json"), ("simple-index.html", "text/html")]
)
def test_the_sdist_is_found_in_both_forms_of_the_index(name: str, kind: str) -> None:
    body = (FIXTURES / name).read_text(encoding="utf-8")
    listed = sources.find_in_index(body, kind, PAGE, "0.3.36")
    assert listed is not None
    assert listed.sha256 == PINNED
    assert listed.url.startswith("https://files.pythonhosted.org/")
    assert listed.url.endswith("/llama_cpp_python-0.3.36.tar.gz")
    assert sources.find_in_index(body, kind, PAGE, "0.3.3") is None


def test_a_mirrors_relative_links_lead_to_the_mirror() -> None:
    body = '<a href="../../packages/aa/llama_cpp_python-0.3.36.tar.gz#sha256=AB">x</a>'
    listed = sources.find_in_index(body, "text/html", "https://mirror.example/pypi/simple/llama-cpp-python/", "0.3.36")
    assert listed == sources.Listed("https://mirror.example/pypi/packages/aa/llama_cpp_python-0.3.36.tar.gz", "ab")
    plain = sources.find_in_index('<a href="llama-cpp-python-0.3.36.tar.gz">x</a>', "text/html", PAGE, "0.3.36")
    assert plain == sources.Listed(PAGE + "llama-cpp-python-0.3.36.tar.gz", None)


def test_a_broken_json_index_lists_nothing() -> None:
    assert sources.find_in_index("{", "application/json", PAGE, "0.3.36") is None
    assert sources.find_in_index("[]", "application/json", PAGE, "0.3.36") is None


# --- fetching ---


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    """A real HTTP server: its address, what it serves by path, and the requests it saw."""
    served: dict[str, bytes] = {}
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            body = served.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            # A path that says so is cut short: the length is promised and not kept.
            extra = 10 if "short" in self.path else 0
            self.send_header("Content-Length", str(len(body) + extra))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr(sources.time, "sleep", lambda _seconds: None)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", served, seen
    httpd.shutdown()
    httpd.server_close()


def quiet(_done: int, _total: int | None) -> None:
    pass


def from_index(base: str, content: bytes) -> Request:
    return replace(REQUEST, index_url=f"{base}/simple", sha256=hashlib.sha256(content).hexdigest())


def test_a_package_comes_through_the_index_and_is_kept(
    server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path
) -> None:
    base, served, seen = server
    content = tar(ENGINE)
    request = from_index(base, content)
    served["/simple/llama-cpp-python/"] = b'<a href="/files/llama_cpp_python-0.3.36.tar.gz">x</a>'
    served["/files/llama_cpp_python-0.3.36.tar.gz"] = content
    steps: list[tuple[int, int | None]] = []
    path = sources.fetch_archive(request, tmp_path, lambda done, total: steps.append((done, total)))
    assert path.read_bytes() == content
    assert steps[-1] == (len(content), len(content))
    requests = len(seen)
    assert sources.fetch_archive(request, tmp_path, quiet) == path
    assert len(seen) == requests
    # A kept file that rotted is fetched again.
    path.write_bytes(b"rotten")
    assert sources.fetch_archive(request, tmp_path, quiet).read_bytes() == content


def test_a_wrong_hash_leaves_nothing(server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path) -> None:
    base, served, _seen = server
    served["/x.tar.gz"] = b"something else"
    request = replace(REQUEST, source_type="archive", url=f"{base}/x.tar.gz")
    with pytest.raises(FaultError) as caught:
        sources.fetch_archive(request, tmp_path, quiet)
    assert caught.value.fault.code == "source_checksum_mismatch"
    assert hashlib.sha256(b"something else").hexdigest() in caught.value.fault.message
    assert PINNED in caught.value.fault.message
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_states_another_hash_is_not_downloaded_from(
    server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path
) -> None:
    base, served, seen = server
    body = f'<a href="/f/llama_cpp_python-0.3.36.tar.gz#sha256={"1" * 64}">x</a>'
    served["/simple/llama-cpp-python/"] = body.encode()
    with pytest.raises(FaultError) as caught:
        sources.fetch_archive(replace(REQUEST, index_url=f"{base}/simple/"), tmp_path, quiet)
    assert caught.value.fault.code == "source_checksum_mismatch"
    assert seen == ["/simple/llama-cpp-python/"]


def test_a_version_that_is_not_listed_is_said(server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path) -> None:
    base, served, _seen = server
    served["/simple/llama-cpp-python/"] = b"<html></html>"
    with pytest.raises(FaultError) as caught:
        sources.fetch_archive(replace(REQUEST, index_url=f"{base}/simple"), tmp_path, quiet)
    assert caught.value.fault.code == "source_not_found"
    assert caught.value.fault.subject == "llama-cpp-python 0.3.36"


@pytest.mark.parametrize(("path", "code"), [("/absent.tar.gz", "source_not_found"), ("/short", "source_unreachable")])
def test_broken_transfers(
    server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path, path: str, code: str
) -> None:
    base, served, seen = server
    served["/short"] = b"x" * 100
    request = replace(REQUEST, source_type="archive", url=f"{base}{path}?sig=geheim")
    served["/short?sig=geheim"] = b"x" * 100
    with pytest.raises(FaultError) as caught:
        sources.fetch_archive(request, tmp_path, quiet)
    assert caught.value.fault.code == code
    assert "geheim" not in str(caught.value.fault)
    assert len(seen) == (sources.ATTEMPTS if path == "/short" else 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b", "模型", "a%20b", "a[1]~"])
def test_an_address_with_other_characters(
    server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path, name: str
) -> None:
    """urllib takes none of them, and quotes the address when it refuses it, with what is secret in it."""
    base, served, seen = server
    content = tar(ENGINE)
    sent = {"a b": "a%20b", "模型": "%E6%A8%A1%E5%9E%8B"}.get(name, name)
    served[f"/{sent}.tar?sig=geheim&n={sent}"] = content
    url = f"{base}/{name}.tar?sig=geheim&n={name}"
    request = replace(REQUEST, source_type="archive", url=url, sha256=hashlib.sha256(content).hexdigest())
    assert sources.fetch_archive(request, tmp_path, quiet).read_bytes() == content
    assert len(seen) == 1


def test_an_index_page_that_breaks_off(server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path) -> None:
    base, served, seen = server
    served["/short/llama-cpp-python/"] = b"<a href="
    with pytest.raises(FaultError) as caught:
        sources.fetch_archive(replace(REQUEST, index_url=f"{base}/short"), tmp_path, quiet)
    assert caught.value.fault.code == "source_unreachable"
    assert caught.value.fault.subject == f"{base}/short/llama-cpp-python/"
    assert len(seen) == sources.ATTEMPTS


@pytest.mark.parametrize(
    "broken",
    [
        TimeoutError("The read operation timed out"),
        ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
        ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] decryption failed or bad record mac"),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
)
@pytest.mark.parametrize("kind", ["pypi_sdist", "archive"])
def test_a_connection_that_breaks_within_the_body(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: Exception, kind: str
) -> None:
    """None of them is a matter of the file system, although Python derives them from its errors."""
    tried: list[str] = []

    class Answer:
        headers: ClassVar[dict[str, str]] = {"Content-Length": "1000"}

        def __enter__(self) -> Answer:
            return self

        def __exit__(self, *_more: object) -> None:
            pass

        def read(self, *_size: int) -> bytes:
            raise broken

    def answer(_opener: object, asked: urllib.request.Request, timeout: float) -> Answer:
        tried.append(asked.full_url)
        return Answer()

    monkeypatch.setattr(sources.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(sources.urllib.request.OpenerDirector, "open", answer)
    with pytest.raises(FaultError) as caught:
        sources.fetch_archive(
            replace(REQUEST, source_type=kind, url="https://mirror.example/x.tar.gz"), tmp_path, quiet
        )
    assert caught.value.fault.code == "source_unreachable"
    assert len(tried) == sources.ATTEMPTS


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources.time, "sleep", lambda _seconds: None)
    monkeypatch.setenv("no_proxy", "*")
    request = replace(REQUEST, source_type="archive", url="http://127.0.0.1:9/x.tar.gz")
    with pytest.raises(FaultError) as caught:
        sources.fetch_archive(request, tmp_path, quiet)
    assert caught.value.fault.code == "source_unreachable"
    assert "refused" in caught.value.fault.message


def test_the_password_of_netrc_goes_to_its_host_only(
    server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("machine mirror.example login me password pw\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources._netrc_for("mirror.example") == "me:pw"
    assert sources._netrc_for("other.example") is None
    assert sources._netrc_for(None) is None


def test_a_local_archive_is_used_in_place(tmp_path: Path) -> None:
    path, digest = save(tmp_path, tar(ENGINE))
    for url in (str(path), path.as_uri()):
        request = replace(REQUEST, source_type="archive", url=url, sha256=digest)
        assert sources.fetch_archive(request, tmp_path / "downloads", quiet) == path
        with pytest.raises(FaultError) as caught:
            sources.fetch_archive(replace(request, sha256=PINNED), tmp_path / "downloads", quiet)
        assert caught.value.fault.code == "source_checksum_mismatch"
    assert path.exists()
    with pytest.raises(FaultError) as caught:
        sources.fetch_archive(replace(REQUEST, source_type="archive", url="/no/such.tar"), tmp_path, quiet)
    assert caught.value.fault.code == "source_not_found"


# --- unpacking ---


def test_an_engine_archive_is_unpacked_without_its_top_folder(tmp_path: Path) -> None:
    assert unpack(tmp_path, ENGINE) == sources.Unpacked(None)
    assert (tmp_path / "out/CMakeLists.txt").read_bytes() == b"project(llama.cpp)\n"
    script = (tmp_path / "out/scripts/run.sh").stat().st_mode & 0o7777
    assert script == 0o755
    assert (tmp_path / "out/CMakeLists.txt").stat().st_mode & 0o7777 == 0o644


def test_git_archives_name_their_commit(tmp_path: Path) -> None:
    assert unpack(tmp_path, ENGINE, {"comment": COMMIT}).commit == COMMIT


def test_of_a_package_only_the_engine_is_unpacked_and_its_commit_read(tmp_path: Path) -> None:
    top = "llama_cpp_python-0.3.36"
    members: Members = [
        (f"{top}/CMakeLists.txt", b"the package's own", {}),
        (f"{top}/setup.py", b"evil()", {}),
        (f"{top}/.git/modules/vendor/llama.cpp/HEAD", COMMIT.encode() + b"\n", {}),
        folder(f"{top}/vendor/llama.cpp/ggml"),
        (f"{top}/vendor/llama.cpp/CMakeLists.txt", b"the engine", {}),
        (f"{top}/vendor/llama.cpp/.git", b"gitdir: ../../.git/modules/vendor/llama.cpp", {}),
        (f"{top}/vendor/llama.cpp/src/llama.cpp", b"int main;", {}),
    ]
    assert unpack(tmp_path, members).commit == COMMIT
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*"))
    assert found == ["CMakeLists.txt", "ggml", "src", "src/llama.cpp"]


def evil(name: str, attributes: dict[str, object] | None = None) -> Members:
    return [*ENGINE, (name, b"x" if not attributes else None, attributes or {})]


def link(name: str, target: str) -> tuple[str, None, dict[str, object]]:
    return name, None, {"type": tarfile.SYMTYPE, "linkname": target}


@pytest.mark.parametrize(
    "members",
    [
        evil("llama.cpp/../../escaped"),
        evil("llama.cpp/a/../../../escaped"),
        [*ENGINE, link("llama.cpp/out", "/etc")],
        [*ENGINE, link("llama.cpp/out", "../..")],
        [*ENGINE, link("llama.cpp/a/out", "../../../x")],
        [*ENGINE, link("llama.cpp/inside", "ggml"), ("llama.cpp/inside/x", b"x", {})],
        evil("llama.cpp/dev", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
        evil("llama.cpp/pipe", {"type": tarfile.FIFOTYPE}),
        evil("llama.cpp/hard", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}),
    ],
)
def test_entries_that_lead_outside_are_refused(tmp_path: Path, members: Members) -> None:
    with pytest.raises(FaultError) as caught:
        unpack(tmp_path, members)
    assert caught.value.fault.code in ("source_unsafe", "source_unusable")
    assert not (tmp_path / "escaped").exists()
    assert not (tmp_path.parent / "escaped").exists()


def test_an_archive_without_entries_for_folders_is_one_too(tmp_path: Path) -> None:
    unpack(tmp_path, [entry for entry in ENGINE if entry[1] is not None])
    assert (tmp_path / "out/ggml/CMakeLists.txt").is_file()


def test_links_inside_are_kept(tmp_path: Path) -> None:
    unpack(tmp_path, [*ENGINE, link("llama.cpp/docs/build.md", "../CMakeLists.txt")])
    assert (tmp_path / "out/docs/build.md").read_bytes() == b"project(llama.cpp)\n"


@pytest.mark.parametrize(
    "entry", [link("llama.cpp/a", ""), link("llama.cpp/a", "b" * 5000), ("llama.cpp/" + "c" * 300, b"x", {})]
)
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, entry: tuple[str, bytes, dict[str, object]]) -> None:
    path, digest = save(tmp_path, tar([*ENGINE, entry]))
    with pytest.raises(FaultError) as caught:
        sources.unpack(path, digest, tmp_path / "out")
    assert caught.value.fault.code == "source_unsafe"


NAMES = st.lists(st.sampled_from(["..", ".", "a", "b", "llama.cpp", "ggml", ""]), min_size=1, max_size=6).map("/".join)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(NAMES, st.one_of(st.none(), NAMES, NAMES.map("/".__add__))), max_size=5))
def test_no_archive_writes_outside(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, str | None]]
) -> None:
    base = tmp_path_factory.mktemp("unpack")
    members: Members = list(ENGINE)
    for name, target in entries:
        path = f"llama.cpp/{name}"
        members.append((path, b"x", {}) if target is None else link(path, target))
    content = tar(members)
    archive = base / "source.tar.gz"
    archive.write_bytes(content)
    with contextlib.suppress(FaultError):
        sources.unpack(archive, hashlib.sha256(content).hexdigest(), base / "out")
    assert sorted(path.name for path in base.iterdir()) in (["out", "source.tar.gz"], ["source.tar.gz"])
    inside = os.path.realpath(base / "out")
    for path in (base / "out").rglob("*"):
        if path.is_symlink():
            where = os.path.normpath(path.parent / path.readlink())
            assert where == inside or where.startswith(inside + "/"), path


@pytest.mark.parametrize(
    "content", [b"", b"not an archive", tar([("x/README", b"no engine", {})]), tar(ENGINE)[:-300] or b"", b"PK\x03\x04"]
)
def test_what_holds_no_engine_is_said(tmp_path: Path, content: bytes) -> None:
    path, digest = save(tmp_path, content)
    with pytest.raises(FaultError) as caught:
        sources.unpack(path, digest, tmp_path / "out")
    assert caught.value.fault.code == "source_unusable"


def test_a_file_that_changed_after_the_check_is_refused(tmp_path: Path) -> None:
    path, digest = save(tmp_path, tar(ENGINE))
    path.write_bytes(tar([*ENGINE, ("llama.cpp/more", b"", {})]))
    with pytest.raises(FaultError) as caught:
        sources.unpack(path, digest, tmp_path / "out")
    assert caught.value.fault.code == "source_checksum_mismatch"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stated", "asked", "refused"),
    [
        (COMMIT, "0c1e57098", False),
        (COMMIT, COMMIT, False),
        (None, "1234567", False),
        (COMMIT, None, False),
        (COMMIT, "1234567", True),
    ],
)
def test_the_stated_commit_must_be_the_asked_one(stated: str | None, asked: str | None, refused: bool) -> None:
    fault = sources.check_commit(sources.Unpacked(stated), asked)
    assert (fault is not None) == refused
    if fault is not None:
        assert fault.code == "source_commit_mismatch"


# --- git ---


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, Callable[..., str]]:
    path = tmp_path / "repo"
    (path / "ggml").mkdir(parents=True)

    def git(*words: str) -> str:
        command = ["git", "-C", str(path), "-c", "user.name=t", "-c", "user.email=t@example", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    (path / "CMakeLists.txt").write_text("project(x)\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    return path, git


def test_git_fetches_exactly_the_asked_commit(repository: tuple[Path, Callable[..., str]], tmp_path: Path) -> None:
    path, git = repository
    first = git("rev-parse", "HEAD")
    (path / "CMakeLists.txt").write_text("project(y)\n")
    git("commit", "--quiet", "-am", "two")
    request = replace(REQUEST, source_type="git", repository=str(path), commit=first)
    env = environment(str(tmp_path), {"GIT_TERMINAL_PROMPT": "0"})
    assert sources.checkout(request, "git", None, tmp_path / "out", env) == sources.Unpacked(first)
    assert (tmp_path / "out/CMakeLists.txt").read_text() == "project(x)\n"


@pytest.mark.parametrize(("where", "commit"), [("repo", "1" * 40), ("nowhere", COMMIT)])
def test_git_says_what_it_could_not_get(
    repository: tuple[Path, Callable[..., str]], tmp_path: Path, where: str, commit: str
) -> None:
    request = replace(REQUEST, source_type="git", repository=str(tmp_path / where), commit=commit)
    with pytest.raises(FaultError) as caught:
        sources.checkout(request, "git", None, tmp_path / "out", environment(str(tmp_path)))
    assert caught.value.fault.code == "source_not_found"
    assert caught.value.fault.subject == str(tmp_path / where)


@pytest.mark.parametrize(
    ("said", "cause", "remedy"),
    [
        (
            "Warning: Permanently added 'git.example' (ED25519) to the list of known hosts.\n"
            "git@git.example: Permission denied (publickey).\nfatal: Could not read from remote repository.\n\n"
            "Please make sure you have the correct access rights\nand the repository exists.\n",
            "git@git.example: Permission denied (publickey).",
            "Check name resolution",
        ),
        (
            "fatal: detected dubious ownership in repository at '/srv/llama.cpp'\n"
            "To add an exception for this directory, call:\n\n"
            "\tgit config --global --add safe.directory /srv/llama.cpp\n"
            "fatal: Could not read from remote repository.\n\nPlease make sure you have the correct access rights\n"
            "and the repository exists.\n",
            "fatal: detected dubious ownership in repository at '/srv/llama.cpp'",
            "git config --system --add safe.directory",
        ),
        (
            "fatal: unable to access 'https://glpat-geheim@git.example/llama.cpp/': "
            "Could not resolve host: git.example\n",
            "fatal: unable to access 'https://git.example/llama.cpp/': Could not resolve host: git.example",
            "Check name resolution",
        ),
        ("fatal: Could not read from remote repository.\n", "fatal: Could not read from remote repository.", "Check"),
    ],
)
def test_git_is_quoted_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, cause: str, remedy: str
) -> None:
    """Its last line is "and the repository exists.", whatever the cause; a token in the address is nobody's to read."""

    def run_as(_account: object, argv: Sequence[str], *_more: object, **_options: object) -> Completed:
        return Completed(tuple(argv), 128 if "fetch" in argv else 0, "", said if "fetch" in argv else "")

    monkeypatch.setattr(sources, "run_as", run_as)
    repository = "https://glpat-geheim@git.example/llama.cpp/"
    request = replace(REQUEST, source_type="git", repository=repository, commit=COMMIT)
    with pytest.raises(FaultError) as caught:
        sources.checkout(request, "git", None, tmp_path / "out", {})
    assert caught.value.fault.code == "source_unreachable"
    assert caught.value.fault.message == cause
    assert remedy in caught.value.fault.remedy
    assert "geheim" not in str(caught.value.fault)
