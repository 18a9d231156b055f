# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Release folders of any engine: laid down whole, shown only when proven, switched by one link.

``<prefix>/releases/<version>-<fingerprint12>/{...,release.json}``; ``<prefix>/current`` and ``<prefix>/previous`` are
links to releases. A folder under ``releases`` that does not begin with a dot has been proven. What an engine has beside
that (how its files get there, what proves them) is its own: engine/release.py, ollama/release.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .files import sync_folder

MANIFEST = "release.json"
SCHEMA = 1


@dataclass(frozen=True)
class Release:
    """An installed release and its manifest."""

    path: Path
    manifest: Mapping[str, Any]


R = TypeVar("R", bound=Release)


class Store(Generic[R]):
    """The releases below a prefix; ``kind`` is the engine's own class of them."""

    def __init__(self, prefix: str, kind: type[R]) -> None:
        self.prefix = Path(prefix)
        self.releases = self.prefix / "releases"
        self.kind = kind

    def read(self, path: Path) -> R | None:
        """The release in a folder, or null where its manifest is absent or not ours."""
        manifest = _read_manifest(path)
        return None if manifest is None else self.kind(path, manifest)

    def find(self, fingerprint: str) -> R | None:
        """The whole and undamaged release of this fingerprint, or null."""
        for path in sorted(self.releases.glob(f"*-{fingerprint[:12]}")):
            release = self.read(path)
            if release is not None and release.manifest["fingerprint"] == fingerprint and is_intact(release):
                return release
        return None

    def every(self) -> list[Path]:
        """The folders of all releases, oldest first."""
        found = [path for path in self.releases.glob("*") if path.is_dir() and not path.name.startswith(".")]
        found.sort(key=lambda path: (path / MANIFEST).stat().st_mtime if (path / MANIFEST).exists() else 0.0)
        return found

    def link(self, name: str) -> Path | None:
        """The release that ``current`` or ``previous`` points to; null where there is none."""
        try:
            target = (self.prefix / name).readlink()
        except OSError:
            return None
        path = self.prefix / target
        return path if path.is_dir() else None

    def clean_partials(self) -> None:
        """Remove what an interrupted installation left."""
        for path in self.releases.glob(".*"):
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, partial: Path, name: str) -> Path:
        """Give a proven folder its name; a damaged release of that name makes way first."""
        path = self.releases / name
        if path.exists():
            aside = self.releases / f".replaced-{name}"
            path.rename(aside)
            partial.rename(path)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            partial.rename(path)
        sync_folder(self.releases)
        return path

    def switch(self, path: Path) -> None:
        """Point ``current`` to the release, ``previous`` to the one before it; each in one step."""
        before = self.link("current")
        if before == path:
            return
        if before is not None:
            self._set_link("previous", before)
        self._set_link("current", path)
        sync_folder(self.prefix)

    def _set_link(self, name: str, path: Path) -> None:
        fresh = self.prefix / f".{name}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path.relative_to(self.prefix))
        fresh.replace(self.prefix / name)

    def prune(self, keep: int) -> list[str]:
        """Remove the oldest releases beyond ``keep``; never a linked one, nor one that a process runs from."""
        every = self.every()
        excess = len(every) - keep
        if excess <= 0:
            return []
        running = programs_below(self.releases)
        kept = {self.link("current"), self.link("previous")}
        removed: list[str] = []
        for path in every:
            if len(removed) == excess:
                break
            inside = os.path.realpath(path) + "/"
            if path in kept or any(program.startswith(inside) for program in running):
                continue
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
        return removed

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time below this prefix; another one is waited for, for both switch the same links."""
        self.prefix.mkdir(mode=0o755, parents=True, exist_ok=True)
        with (self.prefix / ".lock").open("a+", encoding="ascii") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _read_manifest(path: Path) -> Mapping[str, Any] | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA or "fingerprint" not in manifest:
        return None
    return manifest


def is_intact(release: Release) -> bool:
    """Are all files there as they were installed? Hashes are computed only where size or time make one doubt."""
    for entry in release.manifest["files"]:
        path = release.path / entry["path"]
        try:
            found = path.lstat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry["size"]:
            return False
        if found.st_mtime_ns != entry["mtime_ns"] and hash_file(path) != entry["sha256"]:
            return False
    for name, target in release.manifest.get("links", {}).items():
        try:
            if str((release.path / name).readlink()) != target:
                return False
        except OSError:
            return False
    return True


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(partial: Path, content: Mapping[str, Any], hashes: Mapping[str, str] | None = None) -> None:
    """Write release.json with the list of files; the last thing before a release gets its name.

    ``hashes`` are SHA-256 by path in the release that were taken while the files were written.
    """
    files: list[dict[str, Any]] = []
    links: dict[str, str] = {}
    folders = [partial]
    for path in sorted(partial.rglob("*")):
        name = str(path.relative_to(partial))
        if path.is_symlink():
            links[name] = str(path.readlink())
        elif path.is_dir():
            folders.append(path)
        else:
            found = path.stat()
            files.append(
                {
                    "path": name,
                    "size": found.st_size,
                    "mtime_ns": found.st_mtime_ns,
                    "sha256": (hashes or {}).get(name) or hash_file(path),
                }
            )
    whole = {"schema": SCHEMA, **content, "files": files, **({"links": links} if links else {})}
    with (partial / MANIFEST).open("x", encoding="utf-8") as out:
        json.dump(whole, out, indent=2, sort_keys=True)
        out.write("\n")
        out.flush()
        os.fchmod(out.fileno(), 0o644)
        os.fsync(out.fileno())
    for folder in reversed(folders):
        sync_folder(folder)


def programs_below(folder: Path) -> set[str]:
    """Paths of running programs that lie below ``folder``."""
    root = os.path.realpath(folder)
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            program = str((entry / "exe").readlink())
        except OSError:
            continue
        if program.startswith(root + "/"):
            found.add(program)
    return found
