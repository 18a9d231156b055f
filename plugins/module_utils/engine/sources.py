# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The engine's source: found, fetched, verified, and only then unpacked.

An archive is verified by SHA-256 as a whole before the first byte of it is interpreted. A git source is verified by its
full commit, which is a hash of its content.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import html.parser
import http.client
import json
import lzma
import netrc
import os
import posixpath
import re
import shutil
import ssl
import stat
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit, urlunsplit

from ..faults import Fault, FaultError
from ..headers import whole_number
from ..proxies import in_a_network
from .catalogue import CATALOGUE
from .process import run_as
from .request import Account, Request, redacted

PACKAGE = "llama-cpp-python"
#: Where the package keeps the engine, and where its submodule's commit is written down.
VENDORED = "vendor/llama.cpp"
VENDORED_HEAD = ".git/modules/vendor/llama.cpp/HEAD"

ATTEMPTS = 3
TIMEOUT_S = 60.0
CHUNK = 1 << 20

#: How the other side breaks off within a body; ssl's errors are none of a connection for Python.
BROKEN_OFF = (http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError)

Report = Callable[[int, "int | None"], None]
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Unpacked:
    """What the source says about itself: the full commit where it does, null where it does not."""

    commit: str | None


def _fault(code: str, subject: str, message: str, remedy: str) -> FaultError:
    return FaultError(CATALOGUE.fault(code, subject, message, remedy))


# --- Finding and fetching -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """A file in a package index: its address and, where the index says it, its SHA-256."""

    url: str
    sha256: str | None


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.base: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.links.append(href)
        elif tag == "base" and href:
            self.base = href


def find_in_index(body: str, content_type: str, page_url: str, version: str) -> Listed | None:
    """The package's source distribution in a page of the simple index, JSON or HTML; null when it is not listed."""
    # Both spellings of the file name occur: with underscores since PEP 625, with hyphens in older files.
    wanted = {f"{PACKAGE}-{version}.tar.gz", f"{PACKAGE.replace('-', '_')}-{version}.tar.gz"}
    if "json" in content_type:
        try:
            files = json.loads(body)["files"]
        except (ValueError, KeyError, TypeError):
            return None
        for entry in files:
            if entry.get("filename") in wanted:
                digest = (entry.get("hashes") or {}).get("sha256")
                return Listed(urljoin(page_url, entry["url"]), digest.lower() if digest else None)
        return None
    anchors = _Anchors()
    anchors.feed(body)
    base = urljoin(page_url, anchors.base) if anchors.base else page_url
    for href in anchors.links:
        url, fragment = urldefrag(urljoin(base, href))
        if unquote(posixpath.basename(urlsplit(url).path)) in wanted:
            digest = fragment.partition("sha256=")[2] if fragment.startswith("sha256=") else ""
            return Listed(url, digest.lower() or None)
    return None


def look_up(index_url: str, version: str) -> Listed:
    """What the index says of a version's source distribution. FaultError: source_not_found, source_unreachable."""
    body, content_type, page = _read_page(f"{index_url.rstrip('/')}/{PACKAGE}/")
    listed = find_in_index(body, content_type, page, version)
    if listed is None:
        raise _fault(
            "source_not_found",
            f"{PACKAGE} {version}",
            f"{redacted(page)} lists no source distribution of this version",
            "Check package_version, or use an index that has it (index_url).",
        )
    return listed


def locate_sdist(request: Request) -> str:
    """The address of the source distribution; an index that promises another hash is refused before the download."""
    listed = look_up(request.index_url, request.package_version or "")
    if listed.sha256 is not None and listed.sha256 != request.sha256:
        raise _fault(
            "source_checksum_mismatch",
            posixpath.basename(urlsplit(listed.url).path),
            f"the index states SHA-256 {listed.sha256}, expected {request.sha256}; nothing was downloaded",
            "Check that sha256 belongs to package_version. If so, do not use this index.",
        )
    return listed.url


def _read_page(page: str) -> tuple[str, str, str]:
    """Text, type and final address of a page of the index."""

    def read() -> tuple[str, str, str]:
        with _open(page, accept="application/vnd.pypi.simple.v1+json, text/html;q=0.5") as answer:
            body = answer.read().decode("utf-8", "replace")
            return body, answer.headers.get("Content-Type") or "text/html", answer.geturl() or page

    return _whole(page, read)


def _whole(url: str, read: Callable[[], _Read]) -> _Read:
    """What ``read`` makes of an answer; a transfer that breaks off within it is begun again, twice."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return read()
        except BROKEN_OFF as exc:
            if attempt == ATTEMPTS:
                raise unreachable(url, exc) from exc
            time.sleep(attempt)
    raise AssertionError("not reached")


def checksum_mismatch(name: str, actual: str, expected: str) -> FaultError:
    return _fault(
        "source_checksum_mismatch",
        name,
        f"SHA-256 is {actual}, expected {expected}; nothing was unpacked",
        "Check that sha256 belongs to the version asked for. If so, the file was changed on its way: do not use it.",
    )


def fetch_archive(request: Request, downloads: Path, report: Report) -> Path:
    """The verified archive as a local file. Downloads are kept under their hash and verified again when reused."""
    expected = request.sha256 or ""
    url = request.url or ""
    if request.source_type == "archive" and (url.startswith("/") or url.startswith("file:")):
        path = Path(unquote(urlsplit(url).path) if url.startswith("file:") else url)
        if not path.is_file():
            raise _fault(
                "source_not_found", str(path), "there is no such file", "Check url, or copy the archive there."
            )
        actual = sha256_of(path)
        if actual != expected:
            raise checksum_mismatch(str(path), actual, expected)
        return path
    cached = downloads / f"{expected}.tar"
    if cached.is_file():
        if sha256_of(cached) == expected:
            return cached
        cached.unlink()
    if request.source_type == "pypi_sdist":
        url = locate_sdist(request)
    partial = cached.with_suffix(".part")
    try:
        name = posixpath.basename(urlsplit(url).path) or redacted(url)
        actual = _download(url, partial, report)
        if actual != expected:
            raise checksum_mismatch(name, actual, expected)
        partial.replace(cached)
    finally:
        partial.unlink(missing_ok=True)
    return cached


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _download(url: str, target: Path, report: Report) -> str:
    """Write the address's content to ``target``; its SHA-256."""

    def read() -> str:
        with _open(url) as answer, target.open("wb") as handle:
            total = whole_number(answer.headers.get("Content-Length"))
            digest, done = hashlib.sha256(), 0
            while chunk := answer.read(CHUNK):
                handle.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                report(done, total)
            if total is not None and done < total:
                raise http.client.IncompleteRead(b"", total - done)
            return digest.hexdigest()

    return _whole(url, read)


class _Proxies(urllib.request.ProxyHandler):
    """The environment's, but for hosts in a network of no_proxy; a redirect can lead into one and out of it."""

    def proxy_open(self, req: urllib.request.Request, proxy: str, type: str) -> Any:
        if in_a_network(urlsplit(f"//{req.host}").hostname or ""):
            return None
        return super().proxy_open(req, proxy, type)


@contextlib.contextmanager
def _open(url: str, accept: str | None = None) -> Iterator[Any]:
    """Open an address with the environment's proxies and certificates; faults instead of exceptions."""
    headers = {"User-Agent": "volta.llm"}
    if accept:
        headers["Accept"] = accept
    asked = urllib.request.Request(_escaped(url), headers=headers)
    if secret := _netrc_for(urlsplit(url).hostname):
        # Unredirected: a redirect to another host must not carry the password there.
        asked.add_unredirected_header("Authorization", "Basic " + base64.b64encode(secret.encode()).decode())
    opener = urllib.request.build_opener(_Proxies())
    for attempt in range(1, ATTEMPTS + 1):
        try:
            answer = opener.open(asked, timeout=TIMEOUT_S)
            break
        except urllib.error.HTTPError as exc:
            if exc.code in (404, 410):
                raise _fault(
                    "source_not_found",
                    redacted(url),
                    f"the server answers {exc.code}",
                    "Check the address and the version in it.",
                ) from exc
            if exc.code < 500 or attempt == ATTEMPTS:
                raise unreachable(url, exc) from exc
        except (urllib.error.URLError, *BROKEN_OFF) as exc:
            if attempt == ATTEMPTS:
                raise unreachable(url, exc) from exc
        time.sleep(attempt)
    with answer:
        yield answer


def _escaped(url: str) -> str:
    """The address with what is no character of one escaped; urllib refuses it and quotes all of it, secrets too."""
    parts = urlsplit(url)
    path, query = (quote(part, safe="%/:=&?~+!$,;'@()*[]{}|^`") for part in (parts.path, parts.query))
    return urlunsplit((parts.scheme, parts.netloc, path, query, ""))


def unreachable(url: str, exc: Exception) -> FaultError:
    reason = getattr(exc, "reason", None) or exc
    if isinstance(exc, urllib.error.HTTPError):
        reason = f"the server answers {exc.code} {exc.reason}"
    return _fault(
        "source_unreachable",
        redacted(url),
        str(reason),
        "Check name resolution, proxy (https_proxy) and certificates on this machine, or use a mirror: index_url for "
        "the package index, source_type archive for a file of your own.",
    )


def _netrc_for(host: str | None) -> str | None:
    if host is None:
        return None
    try:
        entry = netrc.netrc().authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    return f"{entry[0]}:{entry[2]}" if entry else None


# --- Unpacking ------------------------------------------------------------------------------------------------------


def unpack(archive: Path, expected_sha256: str, target: Path) -> Unpacked:
    """Unpack llama.cpp's tree out of a verified archive into ``target``, which must not exist yet.

    The hash is taken from the very file handle that is then read. Of a llama-cpp-python archive only the vendored
    engine is unpacked; of any other, what lies below its one top folder.
    """
    with archive.open("rb") as handle:
        digest = hashlib.sha256()
        while chunk := handle.read(CHUNK):
            digest.update(chunk)
        if digest.hexdigest() != expected_sha256:
            raise checksum_mismatch(archive.name, digest.hexdigest(), expected_sha256)
        handle.seek(0)
        try:
            return _unpack_tar(handle, archive.name, target)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as exc:
            raise _unsafe(str(exc.filename), "contradicts another entry of the archive") from exc
        except OSError as exc:
            if exc.errno in IMPOSSIBLE_NAME:
                raise _unsafe(str(exc.filename2 or exc.filename), "has a name or target that no file can have") from exc
            raise
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as exc:
            raise _fault(
                "source_unusable",
                archive.name,
                f"cannot be read as a tar archive: {exc}",
                "Use a tar archive, plain or compressed with gzip, bzip2 or xz.",
            ) from exc


#: What the system says of an empty, endless or circular name; a full disk or a missing right is another matter.
IMPOSSIBLE_NAME = (errno.ENOENT, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP)


def _unpack_tar(handle: IO[bytes], name: str, target: Path) -> Unpacked:
    with tarfile.open(fileobj=handle, mode="r:*") as tar:
        members = tar.getmembers()
        root, commit = _engine_root(tar, members)
        if root is None:
            raise _fault(
                "source_unusable",
                name,
                "holds no CMakeLists.txt of llama.cpp",
                "Use a source archive of llama.cpp or of llama-cpp-python (the sdist, not a wheel).",
            )
        target.mkdir(mode=0o755)
        links: set[PurePosixPath] = set()
        for member in members:
            path = _relative(member.name, root)
            if path is None or path.parts[:1] == (".git",):
                continue
            _extract(tar, member, path, target, links)
    return Unpacked(commit)


def _engine_root(tar: tarfile.TarFile, members: list[tarfile.TarInfo]) -> tuple[PurePosixPath | None, str | None]:
    """The folder of the engine within the archive, and the commit that the archive names."""
    # git archive writes the commit into the archive's global header.
    stated = (tar.pax_headers or {}).get("comment", "")
    commit = stated if re.fullmatch(r"[0-9a-f]{40}", stated) else None
    names = {PurePosixPath(member.name): member for member in members}
    for path in names:
        if str(path).endswith(f"/{VENDORED}/CMakeLists.txt"):
            top = path.parents[2]
            head = names.get(top / VENDORED_HEAD)
            return path.parent, (_head_commit(tar, head) if head is not None else None)
    # Not every archive has entries for its folders.
    folders = {folder for path in names for folder in (path, *path.parents)}
    roots = [path.parent for path in names if path.name == "CMakeLists.txt" and path.parent / "ggml" in folders]
    return (min(roots, key=lambda path: len(path.parts)) if roots else None), commit


def _head_commit(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str | None:
    stream = tar.extractfile(member) if member.isfile() and member.size < 200 else None
    text = stream.read().decode("ascii", "replace").strip() if stream else ""
    return text if re.fullmatch(r"[0-9a-f]{40}", text) else None


def _relative(name: str, root: PurePosixPath) -> PurePosixPath | None:
    """The path below ``root``, or null for what lies elsewhere in the archive."""
    path = PurePosixPath(name)
    try:
        return path.relative_to(root)
    except ValueError:
        return None


def _unsafe(name: str, why: str) -> FaultError:
    return _fault("source_unsafe", name, why, "Do not use this archive: no release of llama.cpp holds such an entry.")


def _extract(
    tar: tarfile.TarFile, member: tarfile.TarInfo, path: PurePosixPath, target: Path, links: set[PurePosixPath]
) -> None:
    """Write one entry. Python 3.10 does not surely have tarfile's filters, so the rules are here."""
    if path.is_absolute() or ".." in path.parts:
        raise _unsafe(member.name, "leads outside the source folder")
    if any(parent in links for parent in path.parents):
        raise _unsafe(member.name, "lies behind a symbolic link")
    place = target / path
    if member.isdir():
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        return
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if member.issym():
        goal = posixpath.normpath(posixpath.join(str(path.parent), member.linkname))
        if member.linkname.startswith("/") or goal == ".." or goal.startswith("../"):
            raise _unsafe(member.name, f"links to {member.linkname}, outside the source folder")
        links.add(path)
        place.unlink(missing_ok=True)
        place.symlink_to(member.linkname)
        return
    if not member.isfile():
        raise _unsafe(member.name, "is neither a file, a folder nor a symbolic link")
    content = tar.extractfile(member)
    assert content is not None
    mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
    place.unlink(missing_ok=True)
    # Exclusive and not following links: a repeated or linked entry cannot redirect the write.
    handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(handle, "wb") as out:
        shutil.copyfileobj(content, out, CHUNK)
        os.fchmod(out.fileno(), mode)
    os.utime(place, (member.mtime, member.mtime))


# --- git ------------------------------------------------------------------------------------------------------------


def checkout(request: Request, git: str, account: Account | None, target: Path, env: dict[str, str]) -> Unpacked:
    """Fetch exactly the asked commit into ``target`` and check that it is the one."""
    commit = request.commit or ""
    repository = request.repository or ""
    target.mkdir(mode=0o755)
    if account is not None:
        os.chown(target, account.uid, account.gid)

    def run(*words: str, timeout: float = 60.0) -> tuple[bool, str, str]:
        answer = run_as(account, [git, "-c", "core.hooksPath=/dev/null", *words], env, timeout, cwd=str(target))
        said = "no answer in time" if answer.timed_out else answer.stderr.strip()
        return answer.ok, answer.stdout.strip(), said

    run("init", "--quiet")
    # --depth 1: the history is not needed, and the commit is checked below in any case.
    fetched, _out, said = run("fetch", "--quiet", "--depth", "1", repository, commit, timeout=1800.0)
    if not fetched:
        reason = _cause(said, repository)
        missing = re.search(
            r"not our ref|couldn't find remote ref|unadvertised object|does not (?:exist|appear)|not found", said
        )
        raise _fault(
            "source_not_found" if missing else "source_unreachable",
            redacted(repository),
            reason,
            f"Let the build user own it, or as root: git config --system --add safe.directory {redacted(repository)}"
            if "dubious ownership" in said
            else "Check repository and commit."
            if missing
            else "Check name resolution, proxy and certificates on this machine.",
        )
    run("checkout", "--quiet", "--detach", "FETCH_HEAD")
    _ok, head, _said = run("rev-parse", "HEAD")
    if head != commit:
        raise commit_mismatch(head or "unknown", commit)
    clean, changes, said = run("status", "--porcelain")
    if not clean or changes or not (target / "CMakeLists.txt").is_file():
        raise _fault(
            "source_unusable",
            redacted(repository),
            "the checkout is incomplete" if not said else said.splitlines()[-1],
            "Run again; if it stays so, check that the repository is llama.cpp's.",
        )
    return Unpacked(head)


#: What git says around the cause.
_GIT_FRAME = re.compile(
    r"(?i)(warning|hint): |fatal: Could not read from remote repository|Please make sure|and the repository exists|$"
)


def _cause(said: str, repository: str) -> str:
    """The line that names the cause, without what may be secret: git's last ones only repeat that it could not read."""
    lines = [line.strip() for line in said.splitlines()]
    told = next((line for line in lines if not _GIT_FRAME.match(line)), said.strip() or "git fetch failed")
    return told.replace(repository, redacted(repository))


def commit_mismatch(actual: str, expected: str) -> FaultError:
    return _fault(
        "source_commit_mismatch",
        "commit",
        f"the source is {actual}, asked for is {expected}",
        "Check that commit and source belong together.",
    )


def check_commit(unpacked: Unpacked, asked: str | None) -> Fault | None:
    """Does the source say it is another commit? Silence is accepted: the archive's hash already binds the content."""
    if asked is None or unpacked.commit is None or unpacked.commit.startswith(asked):
        return None
    return commit_mismatch(unpacked.commit, asked).fault
