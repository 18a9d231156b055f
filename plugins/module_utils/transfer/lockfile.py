# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The lock of a model: sizes and SHA-256 of its files, by source, as the sources themselves named them once.

Sources differ: one has shards, another a single file; one has an older upload. So what a file must be is kept for each
source, and a set is taken from one of them whole. ::

    version: 1
    model: qwen
    sources:
      - id: huggingface:https://huggingface.co/org/Qwen-GGUF/Q4/
        revision: main
        commit: 5c1f0a7d6c7a7f0d1c6a6b9c5d3e2f1a0b9c8d7e
        files:
          - {name: qwen.gguf, path: Q4/qwen.gguf, size: 12000000000, sha256: 9f86...}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..faults import Fault, FaultError
from .catalogue import fault
from .checksums import checksum_for, look_up
from .engine import Settings, SourceFailed
from .http import Session, Unreachable, plain
from .raw_parts import raw_part
from .sources import (
    HUBS,
    Listed,
    from_hops,
    headers_of,
    hub_of,
    kind_of,
    list_files,
    read_checksum_file,
    read_commit,
    source_id,
    source_of,
)

VERSION = 1
RENEW = "To take the publisher's present files on purpose: playbooks/model_lock.yml -e model_lock_renew=true."


@dataclass(frozen=True)
class LockedFile:
    """What one source has under a name; ``path`` where it lies in a repository, null elsewhere."""

    name: str
    size: int | None = None
    sha256: str | None = None
    path: str | None = None

    def as_dict(self) -> dict[str, Any]:
        named = {"name": self.name, "path": self.path, "size": self.size, "sha256": self.sha256}
        return {key: value for key, value in named.items() if value is not None}


@dataclass(frozen=True)
class LockedSource:
    """What one source has. ``revision`` is what was asked for, ``commit`` what that was; null where there is none."""

    id: str
    files: tuple[LockedFile, ...]
    revision: str | None = None
    commit: str | None = None

    def file(self, name: str) -> LockedFile | None:
        return next((entry for entry in self.files if entry.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        pinned = {"revision": self.revision, "commit": self.commit}
        return {
            "id": self.id,
            **{key: value for key, value in pinned.items() if value is not None},
            "files": [entry.as_dict() for entry in self.files],
        }


@dataclass(frozen=True)
class Lock:
    """A whole lock."""

    sources: tuple[LockedSource, ...]
    model: str = ""

    def source(self, identity: str) -> LockedSource | None:
        return next((entry for entry in self.sources if entry.id == identity), None)

    def any_file(self, name: str) -> LockedFile | None:
        """What the first source that has the file says: what holds for a source that is not in the lock."""
        return next((found for source in self.sources if (found := source.file(name)) is not None), None)

    def as_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "model": self.model, "sources": [source.as_dict() for source in self.sources]}


@dataclass
class Gathered:
    """A lock made from what sources say; ``notes`` for people, ``faults`` of what cannot be locked."""

    lock: Lock
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def read_lock(document: Any) -> Lock:
    """A lock from the parsed file. FaultError: lock_invalid."""
    if not isinstance(document, Mapping) or document.get("version") != VERSION:
        raise _invalid("is not a lock of version 1")
    sources = []
    for entry in _entries(document.get("sources"), "sources"):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("id"), str):
            raise _invalid("has a source without id")
        files = []
        for number, given in enumerate(_entries(entry.get("files"), f"{entry['id']}: files")):
            name = given.get("name") if isinstance(given, Mapping) else None
            size, sha256 = (given.get("size"), given.get("sha256")) if isinstance(given, Mapping) else (None, None)
            if not isinstance(name, str) or not name or "/" in name:
                raise _invalid(f"{entry['id']}: files[{number}] has no plain name")
            if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", str(sha256)):
                raise _invalid(f"{entry['id']}: sha256 of {name} is not 64 hexadecimal digits in lower case")
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
                raise _invalid(f"{entry['id']}: size of {name} is not a number of bytes")
            path = given.get("path")
            if path is not None and not isinstance(path, str):
                raise _invalid(f"{entry['id']}: path of {name} is no text")
            files.append(LockedFile(name, size, str(sha256) if sha256 else None, path))
        # A revision such as 1.0 is a number for YAML.
        pinned = [None if entry.get(key) is None else str(entry[key]) for key in ("revision", "commit")]
        sources.append(LockedSource(entry["id"], tuple(files), *pinned))
    if not any(source.files for source in sources):
        raise _invalid("holds no file")
    return Lock(tuple(sources), str(document.get("model") or ""))


def _entries(given: Any, where: str) -> list[Any]:
    if given is not None and not isinstance(given, list):
        raise _invalid(f"{where} is no list")
    return given or []


def _invalid(message: str) -> FaultError:
    return FaultError(fault("lock_invalid", "lock file", message, "Restore it from version control. " + RENEW))


def gather(
    entries: Sequence[Mapping[str, Any]],
    specs: Sequence[Mapping[str, Any]],
    settings: Settings,
    headers: Mapping[str, str],
    token: str | None = None,
    checksums: str | None = None,
    model: str = "",
) -> Gathered:
    """Ask every source what it has under the names. FaultError where one wants a login (401).

    A source that does not answer, or has no such files, is left out with a note; without any the faults say why.
    """
    gathered = Gathered(Lock((), model))
    names = [str(entry["name"]) for entry in entries]
    text = read_checksum_file(checksums, settings, headers) if checksums else ""
    locked: list[LockedSource] = []
    urls = _from_urls(entries, text, settings, headers, gathered)
    if urls is not None:
        locked.append(urls)
    for spec in specs:
        identity = source_id(spec)
        own = [str(entry["name"]) for entry in spec.get("files") or []] or names
        try:
            found = _ask(spec, own, text, settings, headers, token)
        except SourceFailed as exc:
            gathered.notes.append(f"{identity}: {exc.fault.message}")
            gathered.faults.append(exc.fault)
            continue
        missing = [name for name in own if found.file(name) is None]
        if missing:
            message = f"has no {', '.join(missing)}"
            gathered.notes.append(f"{identity}: {message}")
            gathered.faults.append(
                fault("source_missing", identity, message, "Check repository, revision, path and spelling.")
            )
            continue
        unproved = [entry.name for entry in found.files if entry.sha256 is None]
        if unproved and kind_of(spec) in ("url", "file", "controller"):
            # Nothing is told by a plain address or folder: what another source says holds for it as well.
            gathered.notes.append(f"{identity}: names no SHA-256; it must have what another source has")
            continue
        if unproved:
            gathered.notes.append(f"{identity}: no SHA-256 for {', '.join(unproved)}: only the size can be verified")
        locked.append(found)
    first = locked[0] if locked else None
    for other in locked[1:]:
        differ = [
            entry.name
            for entry in other.files
            if first is not None
            and (same := first.file(entry.name)) is not None
            and same.sha256 != entry.sha256
            and entry.sha256
        ]
        if differ:
            gathered.notes.append(f"{other.id}: has other bytes under {', '.join(differ)} than {locked[0].id}")
    gathered.lock = Lock(tuple(locked), model)
    if locked:
        gathered.faults = []
    elif not gathered.faults:
        gathered.faults.append(
            fault(
                "not_locked",
                model or "files",
                f"no source names a SHA-256 for {', '.join(names)}",
                "Write sha256 and size that the publisher states, or the address of his checksum file.",
            )
        )
    return gathered


def _from_urls(
    entries: Sequence[Mapping[str, Any]],
    text: str,
    settings: Settings,
    headers: Mapping[str, str],
    gathered: Gathered,
) -> LockedSource | None:
    """What the files' own addresses and the checksum file say; null where that leaves a file without a hash."""
    files = []
    alone = sum(not entry.get("sha256") for entry in entries) == 1
    for entry in entries:
        size, sha256 = entry.get("size"), entry.get("sha256")
        if not sha256:
            found = look_up(text, str(entry["name"]), alone)
            sha256 = found.sha256
            if sha256 is None and text:
                gathered.notes.append(f"The checksum file {plain(found.reason, 400)}")
        sha256 = str(sha256).lower() if sha256 else None
        url = entry.get("url") or next(iter(entry.get("urls") or []), None)
        if url and sha256 is None:
            told_size, sha256 = _probe(str(url), settings, headers)
            size = size if size is not None else told_size
        files.append(LockedFile(str(entry["name"]), size, sha256))
    if any(item.sha256 is None for item in files):
        return None
    return LockedSource("files", tuple(files))


def _ask(
    spec: Mapping[str, Any],
    names: Iterable[str],
    text: str,
    settings: Settings,
    headers: Mapping[str, str],
    token: str | None,
) -> LockedSource:
    """What one source has. Raises SourceFailed."""
    kind = kind_of(spec)
    identity = source_id(spec)
    own = headers_of(spec, headers, token)
    if kind in HUBS:
        hub = hub_of(spec)
        commit = read_commit(hub, settings, own)
        at = {**spec, "revision": commit or hub.revision}
        files = []
        lists: dict[str, dict[str, Listed]] = {}
        for name in names:
            source = source_of(at, name, headers, token)
            folder = source.api or ""
            failure = None
            if folder not in lists:
                try:
                    lists[folder] = {entry.path: entry for entry in list_files(kind, folder, settings, own)}
                except SourceFailed as exc:
                    # Some mirrors have no list; what they send along with the redirect tells as much.
                    failure = exc
            entry = lists.get(folder, {}).get(source.hub_path)
            if entry is None and failure is None:
                continue
            size, sha256 = (entry.size, entry.sha256) if entry is not None else (None, None)
            if sha256 is None and kind == "huggingface":
                told_size, sha256 = _probe(source.url or "", settings, own)
                size = told_size if sha256 else size
            if failure is not None and sha256 is None:
                raise failure
            files.append(LockedFile(name, size, sha256, source.hub_path))
        return LockedSource(identity, tuple(files), hub.revision, commit)
    if kind == "ollama":
        files = []
        for name in names:
            source = source_of(spec, name, headers, token)
            if source.problem is not None:
                raise SourceFailed(source.problem)
            files.append(LockedFile(name, source.size, source.sha256))
        return LockedSource(identity, tuple(files))
    stated = {str(entry["name"]): entry for entry in spec.get("files") or []}
    files = []
    names = list(names)
    alone = sum(not stated.get(name, {}).get("sha256") for name in names) == 1
    for name in names:
        entry_of = stated.get(name, {})
        sha256 = str(entry_of["sha256"]).lower() if entry_of.get("sha256") else checksum_for(text, name, alone)
        size = entry_of.get("size")
        if sha256 is None and kind == "url":
            size, sha256 = _probe(source_of(spec, name, headers, token).url or "", settings, own)
        files.append(LockedFile(name, size, sha256))
    return LockedSource(identity, tuple(files))


def _probe(url: str, settings: Settings, headers: Mapping[str, str]) -> tuple[int | None, str | None]:
    """(size, SHA-256) that an address tells along with its redirect, as Hugging Face and its mirrors do."""
    session = Session(settings.timeout, settings.timeout, headers, settings.ca_path, settings.unreachable)
    try:
        return from_hops(session.get(url, {"Range": "bytes=0-0"}).hops)
    except (Unreachable, TimeoutError):
        return None, None
    except FaultError:
        # An option is wrong.
        raise
    except Exception as exc:  # noqa: BLE001 - a probe only adds what it finds
        del exc
        return None, None
    finally:
        session.close()


def check_against(
    lock: Lock, spec: Mapping[str, Any] | None, entries: Sequence[Mapping[str, Any]]
) -> tuple[LockedSource | None, list[Fault]]:
    """The part of the lock that holds for a source (null: it is not in the lock), and where settings contradict it."""
    locked = lock.source(source_id(spec)) if spec is not None else lock.source("files")
    faults = []
    if locked is not None and spec is not None and kind_of(spec) in HUBS and locked.revision is not None:
        revision = hub_of(spec).revision
        if revision not in (locked.revision, locked.commit):
            faults.append(
                fault(
                    "lock_mismatch",
                    locked.id,
                    f"the lock is of revision {locked.revision}, asked for is {revision}",
                    f"Write the revision of the lock. {RENEW}",
                )
            )
    for entry in entries:
        name = str(entry["name"])
        holds = (locked.file(name) if locked is not None else None) or lock.any_file(name)
        if holds is None:
            part = raw_part(name)
            if part is None or lock.any_file(part.whole) is None:
                faults.append(
                    fault("lock_mismatch", name, "is not in the lock", f"Check its spelling. {RENEW}"),
                )
            continue
        for key in ("size", "sha256"):
            asked, has = entry.get(key), getattr(holds, key)
            asked = str(asked).strip().lower().removeprefix("sha256:") if asked and key == "sha256" else asked
            if asked is not None and has is not None and asked != has:
                faults.append(
                    fault(
                        "lock_mismatch",
                        name,
                        f"the lock has {key} {has}, asked for is {asked}",
                        f"Find out which of the two the publisher states and correct the other. {RENEW}",
                    )
                )
    return locked, faults
