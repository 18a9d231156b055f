# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where a file can come from: an address, a model hub, or a file that is already on the machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..faults import FaultError
from .catalogue import fault
from .engine import Settings, SourceFailed
from .http import Origin, ProtocolError, Session, Unreachable, redact

HUGGINGFACE = "https://huggingface.co"
MODELSCOPE = "https://www.modelscope.cn"


@dataclass(frozen=True)
class Source:
    """One place one file can be had from: ``url`` or a local ``path``.

    ``size`` and ``sha256`` are what this source's own metadata promise (null: unknown). ``api`` is an address of the
    hub that lists the folder's files.
    """

    url: str | None = None
    path: str | None = None
    size: int | None = None
    sha256: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    kind: str = "url"
    api: str | None = None
    hub_path: str = ""

    @property
    def label(self) -> str:
        """How it is named in messages and results: without anything secret."""
        return redact(self.url) if self.url else str(self.path)


def source_of(spec: Mapping[str, Any], name: str, headers: Mapping[str, str], token: str | None = None) -> Source:
    """A source from an entry of the option C(sources).

    ``name`` is the file's name; it is appended where the entry names a folder (a URL or path that ends in "/", a
    repository without a path to a file). ``token`` goes as a bearer token to model hubs.
    """
    own = {**headers, **(spec.get("headers") or {})}
    size, sha256 = spec.get("size"), spec.get("sha256")
    sha256 = sha256.lower() if sha256 else None
    kind = spec.get("type") or ("file" if spec.get("file") else "url")
    if kind == "file":
        path = str(spec["file"])
        # A folder stands for the file of the same name in it.
        if path.endswith("/") or Path(path).is_dir():
            path = str(Path(path) / name)
        return Source(path=path, size=size, sha256=sha256, kind=kind)
    if kind == "url":
        url = str(spec["url"])
        return Source(url=url + quote(name) if url.endswith("/") else url, size=size, sha256=sha256, headers=own)
    if token and "Authorization" not in own:
        own["Authorization"] = f"Bearer {token}"
    repo = str(spec["repo"]).strip("/")
    path = str(spec.get("path") or "")
    if not path or path.endswith("/"):
        path += name
    folder = path.rpartition("/")[0]
    if kind == "huggingface":
        base = (spec.get("endpoint") or os.environ.get("HF_ENDPOINT") or HUGGINGFACE).rstrip("/")
        revision = quote(spec.get("revision") or "main", safe="")
        url = f"{base}/{repo}/resolve/{revision}/{quote(path)}"
        api = f"{base}/api/models/{repo}/tree/{revision}" + (f"/{quote(folder)}" if folder else "")
    else:
        base = (spec.get("endpoint") or MODELSCOPE).rstrip("/")
        revision = quote(spec.get("revision") or "master", safe="")
        url = f"{base}/models/{repo}/resolve/{revision}/{quote(path)}"
        api = f"{base}/api/v1/models/{repo}/repo/files?Revision={revision}" + (
            f"&Root={quote(folder)}" if folder else ""
        )
    return Source(url, None, size, sha256, own, kind, api, path)


def from_hops(hops: Mapping[str, str]) -> tuple[int | None, str | None]:
    """(size, SHA-256) that Hugging Face sends along with its redirect; null for what is not there."""
    size = hops.get("x-linked-size", "")
    etag = hops.get("x-linked-etag", "").strip('W/"').lower()
    return (
        int(size) if size.isdigit() else None,
        etag if re.fullmatch(r"[0-9a-f]{64}", etag) else None,
    )


def from_api(source: Source, timeout: float, ca_path: str | None) -> tuple[int | None, str | None]:
    """(size, SHA-256) from the hub's list of files; nulls where it does not say. Raises SourceFailed on no answer."""
    if source.api is None:
        return None, None
    session = Session(timeout, timeout, source.headers, ca_path)
    try:
        response = session.get(source.api, {"Accept": "application/json"})
        body = response.read_small(16 << 20)
        if response.status != 200:
            raise ProtocolError(f"it answers {response.status} {response.reason}")
        listing = json.loads(body)
    except (Unreachable, ProtocolError, TimeoutError, ValueError) as exc:
        raise SourceFailed(
            fault(
                "source_unreachable",
                redact(source.api),
                f"the list of files cannot be read: {exc}",
                "Give size and sha256 of the file, then the list is not needed.",
            )
        ) from exc
    finally:
        session.close()
    if source.kind == "huggingface":
        for entry in listing if isinstance(listing, list) else []:
            if entry.get("path") == source.hub_path:
                lfs = entry.get("lfs") or {}
                return lfs.get("size") or entry.get("size"), lfs.get("oid")
    else:
        data = listing.get("Data") if isinstance(listing, dict) else None
        for entry in (data or {}).get("Files") or []:
            if entry.get("Path") == source.hub_path:
                return entry.get("Size"), (entry.get("Sha256") or "").lower() or None
    return None, None


def read_checksum_file(place: str, settings: Settings, headers: Mapping[str, str]) -> str:
    """The text of a checksum file at an address or path. FaultError: checksum_missing."""
    try:
        if not place.startswith(("http://", "https://")):
            return Path(place).read_text(encoding="utf-8", errors="replace")
        session = Session(settings.timeout, settings.timeout, headers, settings.ca_path)
        try:
            response = session.get(place, {})
            if response.status != 200:
                raise ProtocolError(f"answers {response.status} {response.reason}")
            return response.read_small(16 << 20).decode("utf-8", "replace")
        finally:
            session.close()
    except (Unreachable, ProtocolError, OSError) as exc:
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
