# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Release folders: laid down whole, proven before they are shown, switched by one link.

``<prefix>/releases/<version>-<fingerprint12>/{bin,lib,release.json}``; ``<prefix>/current`` and ``<prefix>/previous``
are links to releases. A folder under ``releases`` that does not begin with a dot has been proven.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..faults import FaultError
from ..files import replace_file, sync_folder
from .catalogue import CATALOGUE
from .libraries import TOOLKIT_LIBRARY, libraries_of
from .process import programs_below
from .request import SERVER, Account

MANIFEST = "release.json"
SCHEMA = 1

#: Beside the manifest: under which driver the release has computed on this machine's cards, and what it showed.
GPU_PROOF = "gpu-proof.json"


@dataclass(frozen=True)
class Release:
    """An installed release and its manifest."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def binary(self) -> Path:
        return self.path / "bin" / SERVER

    @property
    def gpu_proof(self) -> Mapping[str, Any] | None:
        """What the release showed on this machine's cards; null where it was never tried."""
        try:
            content = json.loads((self.path / GPU_PROOF).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def keep_gpu_proof(self, driver: str, checks: Sequence[Mapping[str, str]]) -> None:
        text = json.dumps({"driver": driver, "checks": list(checks)}, indent=2, sort_keys=True) + "\n"
        replace_file(self.path / GPU_PROOF, text.encode(), 0o644)


class Store:
    """The releases below a prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = Path(prefix)
        self.releases = self.prefix / "releases"

    def find(self, fingerprint: str) -> Release | None:
        """The whole and undamaged release of this fingerprint, or null."""
        for path in sorted(self.releases.glob(f"*-{fingerprint[:12]}")):
            release = read_release(path)
            if release is not None and release.manifest["fingerprint"] == fingerprint and is_intact(release):
                return release
        return None

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
        every = [path for path in self.releases.glob("*") if path.is_dir() and not path.name.startswith(".")]
        every.sort(key=lambda path: (path / MANIFEST).stat().st_mtime if (path / MANIFEST).exists() else 0.0)
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


def read_release(path: Path) -> Release | None:
    """The release in a folder, or null where its manifest is absent or not ours."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA or "fingerprint" not in manifest:
        return None
    return Release(path, manifest)


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
    return True


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# --- Laying down ----------------------------------------------------------------------------------------------------


def lay_down(
    build: Path,
    targets: Mapping[str, str],
    partial: Path,
    account: Account | None,
    toolkit_folders: Sequence[Path] = (),
) -> None:
    """Copy the programs and the libraries they need from the build tree into ``partial``.

    ``targets`` are the names that programs get in the release, with their names in the build. The build tree belongs to
    the build user. Only regular files of that user are taken, never what a link there points to elsewhere: otherwise
    the build could publish any file that root can read. From ``toolkit_folders`` the toolkit's own libraries are taken
    along, for machines that have no toolkit.
    """
    output = build / "bin"
    (partial / "bin").mkdir(parents=True)
    (partial / "lib").mkdir()
    for folder in (partial, partial / "bin", partial / "lib"):
        folder.chmod(0o755)
    owner = account.uid if account else os.geteuid()
    libraries: dict[str, Path] = {}
    from_toolkit: dict[str, Path] = {}
    for name, target in targets.items():
        program = output / target
        if not program.is_file():
            raise _proof_failed(target, "the build ended well and left no such program", "Check targets.")
        _copy(program, partial / "bin" / name, owner, 0o755)
        for library, found in libraries_of(program, account, toolkit_folders).items():
            if found is None:
                continue
            if found.startswith(f"{output}/"):
                libraries[library] = Path(found)
            elif toolkit_folders and TOOLKIT_LIBRARY.match(library):
                from_toolkit[library] = _in_toolkit(Path(found), toolkit_folders)
    for library, path in libraries.items():
        _copy(_within(path, output), partial / "lib" / library, owner, 0o644)
    for library, path in from_toolkit.items():
        _copy(path, partial / "lib" / library, path.stat().st_uid, 0o644)


def _in_toolkit(path: Path, folders: Sequence[Path]) -> Path:
    """The file that a library of the toolkit is; refused when it lies elsewhere, since the build chose the name."""
    real = Path(os.path.realpath(path))
    if real.parent not in {Path(os.path.realpath(folder)) for folder in folders}:
        raise _proof_failed(str(path), "is loaded from outside the toolkit", "Name the toolkit in cuda_root.")
    return real


def _proof_failed(subject: str, message: str, remedy: str) -> FaultError:
    return FaultError(CATALOGUE.fault("proof_failed", subject, message, remedy))


def _within(path: Path, folder: Path) -> Path:
    """Follow the version links of a library inside one folder (libx.so.0 to libx.so.0.25.3)."""
    for _ in range(8):
        if not path.is_symlink():
            return path
        target = path.readlink()
        if len(target.parts) != 1:
            raise _proof_failed(str(path), f"is a link to {target}", "Remove the build folder and run again.")
        path = folder / target
    raise _proof_failed(str(path), "is a circle of links", "Remove the build folder and run again.")


def _copy(source: Path, target: Path, owner: int, mode: int) -> None:
    handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as content:
        found = os.fstat(content.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise _proof_failed(
                str(source), "is not a file of the build user", "Remove the build folder and run again."
            )
        with target.open("xb") as out:
            shutil.copyfileobj(content, out, 1 << 20)
            out.flush()
            os.fchmod(out.fileno(), mode)
            os.fsync(out.fileno())


def write_manifest(partial: Path, content: Mapping[str, Any]) -> None:
    """Write release.json with the list of files; the last thing before a release gets its name."""
    files = []
    for path in sorted(partial.glob("*/*")):
        found = path.stat()
        files.append(
            {
                "path": str(path.relative_to(partial)),
                "size": found.st_size,
                "mtime_ns": found.st_mtime_ns,
                "sha256": hash_file(path),
            }
        )
    with (partial / MANIFEST).open("x", encoding="utf-8") as out:
        json.dump({"schema": SCHEMA, **content, "files": files}, out, indent=2, sort_keys=True)
        out.write("\n")
        out.flush()
        os.fchmod(out.fileno(), 0o644)
        os.fsync(out.fileno())
    for folder in (partial / "bin", partial / "lib", partial):
        sync_folder(folder)
