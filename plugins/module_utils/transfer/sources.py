# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where a file can come from: an address, a model hub, or a file that is already on the machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ..faults import Fault, FaultError
from ..gguf.shards import shard_name
from ..headers import sendable, whole_number
from .catalogue import fault
from .engine import Settings, SourceFailed, login_fault
from .http import HostRefused, Origin, ProtocolError, Session, Unreachable, redact, sent_on
from .ollama_store import find_blob

HUGGINGFACE = "https://huggingface.co"
MODELSCOPE = "https://www.modelscope.cn"
HUBS = ("huggingface", "modelscope")
#: An address up to its query, and the rest.
_QUERY = re.compile(r"([^?#]*)(.*)", re.DOTALL)
#: Pages of a listing that are followed; a folder of a model has one.
MAX_PAGES = 20


@dataclass(frozen=True)
class Source:
    """One place one file can be had from: ``url`` or a local ``path``.

    ``size`` and ``sha256`` are what this source's own metadata promise (null: unknown). ``api`` is an address of the
    hub that lists the folder's files. ``use`` is what becomes of a ``path``: C(copy); C(link), a store's own file,
    which must not be written to; C(move), a file that was brought here for this.
    """

    url: str | None = None
    path: str | None = None
    size: int | None = None
    sha256: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    kind: str = "url"
    api: str | None = None
    hub_path: str = ""
    use: str = "copy"
    name: str = ""
    problem: Fault | None = None

    @property
    def label(self) -> str:
        """How it is named in messages and results: without anything secret."""
        return self.name or (redact(self.url) if self.url else str(self.path))


@dataclass(frozen=True)
class Hub:
    """A folder of a repository at a model hub, and the addresses of what is in it."""

    kind: str
    base: str
    repo: str
    revision: str
    folder: str

    def file(self, path: str) -> str:
        """Address of the file at a path of the repository."""
        between = "" if self.kind == "huggingface" else "models/"
        return f"{self.base}/{between}{self.repo}/resolve/{quote(self.revision, safe='')}/{quote(path)}"

    @property
    def listing(self) -> str:
        """Address of the list of the folder's files."""
        revision = quote(self.revision, safe="")
        if self.kind == "huggingface":
            below = f"/{quote(self.folder)}" if self.folder else ""
            return f"{self.base}/api/models/{self.repo}/tree/{revision}{below}"
        below = f"&Root={quote(self.folder)}" if self.folder else ""
        return f"{self.base}/api/v1/models/{self.repo}/repo/files?Revision={revision}{below}"

    @property
    def commit(self) -> str | None:
        """Address that tells which commit the revision is now; null where the hub has none."""
        revision = quote(self.revision, safe="")
        return f"{self.base}/api/models/{self.repo}/revision/{revision}" if self.kind == "huggingface" else None


def kind_of(spec: Mapping[str, Any]) -> str:
    """The type of an entry of the option C(sources), where it is not written."""
    return str(spec.get("type") or ("file" if spec.get("file") else "url"))


def hub_of(spec: Mapping[str, Any], path: str | None = None) -> Hub:
    """The hub of an entry; ``path`` of a file overrides the entry's own."""
    kind = kind_of(spec)
    path = _hub_path(spec) if path is None else path
    endpoint = spec.get("endpoint")
    if kind == "huggingface":
        base, revision = endpoint or os.environ.get("HF_ENDPOINT") or HUGGINGFACE, spec.get("revision") or "main"
    else:
        base, revision = endpoint or MODELSCOPE, spec.get("revision") or "master"
    return Hub(
        kind, str(base).strip().rstrip("/"), str(spec["repo"]).strip("/"), str(revision), path.rpartition("/")[0]
    )


def _hub_path(spec: Mapping[str, Any]) -> str:
    """The path of an entry, without what the hubs' own copied links have behind it."""
    return str(spec.get("path") or "").removesuffix("?download=true")


def source_id(spec: Mapping[str, Any]) -> str:
    """Under which name the lock keeps what this entry has; the same whatever its revision and credentials are."""
    kind = kind_of(spec)
    if kind in HUBS:
        hub = hub_of(spec)
        # A path to one file stands for its folder, as the other shards do.
        return f"{kind}:{hub.base}/{hub.repo}/{hub.folder + '/' if hub.folder else ''}"
    if kind == "ollama":
        return f"ollama:{spec['model']}"
    if kind == "url":
        return f"url:{redact(str(spec['url']))}"
    return f"{kind}:{spec[kind]}"


def headers_of(spec: Mapping[str, Any], headers: Mapping[str, str], token: str | None) -> dict[str, str]:
    """Headers for one source. ``token`` is for Hugging Face alone: a mirror or another hub gets its entry's own."""
    own = {**sendable(headers), **sendable(spec.get("headers"))}
    kind = kind_of(spec)
    if kind in HUBS and "Authorization" not in own:
        bearer = spec.get("token") or (token if kind == "huggingface" and not spec.get("endpoint") else None)
        bearer = str(bearer or "").strip()
        if bearer:
            own["Authorization"] = f"Bearer {bearer}"
    return own


def source_of(
    spec: Mapping[str, Any],
    name: str,
    headers: Mapping[str, str],
    token: str | None = None,
    locked: Mapping[str, Any] | None = None,
    incoming: str | None = None,
) -> Source:
    """A source from an entry of the option C(sources).

    ``name`` is the file's name; it is appended where the entry names a folder (a URL or path that ends in "/", a
    repository without a path to a file), and stands for the entry's own where that is another shard of the same set.
    ``locked`` is what this source itself has for the file: C(size), C(sha256), C(path), C(revision). ``incoming`` is
    where the control node's copy of the file is put by the action plugin.
    """
    locked = locked or {}
    own = headers_of(spec, headers, token)
    size = locked.get("size", spec.get("size"))
    sha256 = locked.get("sha256", spec.get("sha256"))
    sha256 = sha256.lower() if sha256 else None
    kind = kind_of(spec)
    if kind == "ollama":
        try:
            blob = find_blob(str(spec["model"]), spec.get("store"))
        except FaultError as exc:
            return Source(path="", kind=kind, use="link", name=f"ollama {spec['model']}", problem=exc.fault)
        return Source(path=str(blob.path), size=blob.size, sha256=blob.sha256, kind=kind, use="link")
    if kind == "controller":
        named = f"control node:{spec['controller']}"
        problem = None
        if incoming is None or not Path(incoming).is_file():
            problem = fault(
                "source_missing",
                named,
                f"{name} did not come from there",
                "Check the path on the control node. Only a task that runs in the foreground can send it.",
            )
        return Source(None, incoming or "", size, sha256, kind=kind, use="move", name=named, problem=problem)
    if kind == "file":
        path = str(spec["file"])
        # A folder stands for the file of the same name in it.
        folder = path.endswith("/") or Path(path).is_dir()
        path = str(Path(path) / name) if folder else _for_shard(path, name)
        return Source(path=path, size=size, sha256=sha256, kind=kind)
    if kind == "url":
        # What is asked for stands before the query, which belongs to every file of the set.
        path, query = _QUERY.fullmatch(str(spec["url"]).strip()).groups()  # type: ignore[union-attr]
        url = (path + quote(name) if path.endswith("/") else _for_shard(path, name, escaped=True)) + query
        return Source(url=url, size=size, sha256=sha256, headers=own)
    path = str(locked.get("path") or _hub_path(spec))
    path = path + name if not path or path.endswith("/") else _for_shard(path, name)
    hub = hub_of({**spec, **({"revision": locked["revision"]} if locked.get("revision") else {})}, path)
    return Source(hub.file(path), None, size, sha256, own, kind, hub.listing, path)


def _for_shard(path: str, name: str, escaped: bool = False) -> str:
    """The path of the shard ``name`` where ``path`` is that of another shard of its set; else the path as it is.

    ``escaped``: the path is that of an address.
    """
    folder, slash, last = path.rpartition("/")
    there, asked = shard_name(unquote(last) if escaped else last), shard_name(name)
    if there is None or asked is None or (there.stem, there.count) != (asked.stem, asked.count):
        return path
    return f"{folder}{slash}{quote(name) if escaped else name}"


def from_hops(hops: Mapping[str, str]) -> tuple[int | None, str | None]:
    """(size, SHA-256) that Hugging Face sends along with its redirect; null for what is not there."""
    etag = hops.get("x-linked-etag", "").strip('W/"').lower()
    return (
        whole_number(hops.get("x-linked-size")),
        etag if re.fullmatch(r"[0-9a-f]{64}", etag) else None,
    )


@dataclass(frozen=True)
class Listed:
    """A file as a hub lists it: path in the repository, size in bytes, SHA-256; null for what it does not say."""

    path: str
    size: int | None
    sha256: str | None


def list_files(kind: str, address: str, settings: Settings, headers: Mapping[str, str]) -> list[Listed]:
    """A hub's list of a folder's files. Raises SourceFailed on no usable answer, FaultError on 401."""
    found: list[Listed] = []
    for _ in range(MAX_PAGES):
        listing, following = _json(address, settings, headers)
        found += _listed(kind, listing)
        if following is None:
            break
        address = following
    return found


def _listed(kind: str, listing: Any) -> Iterator[Listed]:
    if kind == "huggingface":
        for entry in listing if isinstance(listing, list) else []:
            if isinstance(entry, dict) and entry.get("type", "file") == "file":
                lfs = entry.get("lfs")
                lfs = lfs if isinstance(lfs, dict) else {}
                size = _size(lfs.get("size"))
                yield Listed(
                    str(entry.get("path")), _size(entry.get("size")) if size is None else size, _hash(lfs.get("oid"))
                )
        return
    data = listing.get("Data") if isinstance(listing, dict) else None
    entries = data.get("Files") if isinstance(data, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("Type", "blob") == "blob":
            yield Listed(str(entry.get("Path")), _size(entry.get("Size")), _hash(entry.get("Sha256")))


def _size(told: Any) -> int | None:
    return told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else None


def _hash(text: Any) -> str | None:
    found = str(text or "").lower().removeprefix("sha256:")
    return found if re.fullmatch(r"[0-9a-f]{64}", found) else None


def read_commit(hub: Hub, settings: Settings, headers: Mapping[str, str]) -> str | None:
    """The commit that the hub's revision is now; null where it does not say."""
    if re.fullmatch(r"[0-9a-f]{40}", hub.revision):
        return hub.revision
    if hub.commit is None:
        return None
    try:
        answer, _ = _json(hub.commit, settings, headers)
    except SourceFailed:
        # Some mirrors pass on the list of files and not this; then the revision stays as it is, and the hash decides.
        return None
    commit = str(answer.get("sha") or "") if isinstance(answer, dict) else ""
    return commit if re.fullmatch(r"[0-9a-f]{40}", commit) else None


def _json(address: str, settings: Settings, headers: Mapping[str, str]) -> tuple[Any, str | None]:
    """An answer in JSON and the address of the next page, if there is one."""
    session = Session(settings.timeout, settings.timeout, headers, settings.ca_path, settings.unreachable)
    try:
        response = session.get(address, {"Accept": "application/json"})
        body = response.read_small(16 << 20)
        login = login_fault(redact(address), f"answers {response.status} {response.reason}", response)
        if login is not None:
            raise FaultError(login)
        if response.status != 200:
            raise ProtocolError(f"it answers {response.status} {response.reason}")
        link = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', response.headers.get("link") or "")
        following = sent_on(address, link[1]) if link else None
        if following is not None and Origin.of(following) != Origin.of(address):
            # The headers may hold a token.
            following = None
        return json.loads(body), following
    except (Unreachable, ProtocolError, HostRefused, TimeoutError, ValueError) as exc:
        declared = " (declared unreachable)" if isinstance(exc, HostRefused) else ""
        raise SourceFailed(
            fault(
                "source_unreachable",
                redact(address),
                f"the list of files cannot be read: {exc}{declared}",
                "Give size and sha256 of the file, then the list is not needed.",
            )
        ) from exc
    finally:
        session.close()


def from_api(source: Source, settings: Settings) -> tuple[int | None, str | None]:
    """(size, SHA-256) from the hub's list of files; nulls where it does not say. Raises SourceFailed on no answer."""
    if source.api is None:
        return None, None
    listed = list_files(source.kind, source.api, settings, source.headers)
    return next(((entry.size, entry.sha256) for entry in listed if entry.path == source.hub_path), (None, None))


def lacking(sources: Sequence[Source], settings: Settings) -> list[bool]:
    """Which of the sources do not have their file; false also for those that do not say. Asks for no content."""
    absent = []
    for number, source in enumerate(sources):
        if source.url is None:
            absent.append(source.problem is None and not Path(source.path or "").is_file())
            continue
        headers = {**settings.headers, **source.headers}
        session = Session(settings.timeout, settings.timeout, headers, settings.ca_path, settings.unreachable)
        try:
            absent.append(session.get(source.url, {"Range": "bytes=0-0"}).status in (404, 410, 451))
        except (Unreachable, ProtocolError, HostRefused, TimeoutError, OSError):
            # One time-out is enough.
            return absent + [False] * (len(sources) - number)
        finally:
            session.close()
    return absent


def read_checksum_file(place: str, settings: Settings, headers: Mapping[str, str]) -> str:
    """The text of a checksum file at an address or path. FaultError: checksum_missing."""
    try:
        if not place.lower().startswith(("http://", "https://")):
            return Path(place).read_text(encoding="utf-8", errors="replace")
        session = Session(settings.timeout, settings.timeout, headers, settings.ca_path, settings.unreachable)
        try:
            response = session.get(place, {})
            if response.status != 200:
                raise ProtocolError(f"answers {response.status} {response.reason}")
            return response.read_small(16 << 20).decode("utf-8", "replace")
        finally:
            session.close()
    except (Unreachable, ProtocolError, HostRefused, OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise FaultError(
            fault(
                "checksum_missing",
                redact(place) if "://" in place else place,
                f"the checksum file cannot be read: {reason}",
                "Check its address, or write the sha256 of each file.",
            )
        ) from exc


def check_url(url: str) -> str | None:
    """What is wrong with an address, or null."""
    try:
        Origin.of(url)
    except (ProtocolError, ValueError) as exc:
        return str(exc)
    return None
