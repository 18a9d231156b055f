# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The engine's release folders: what is laid down in one, and what it showed on this machine's cards.

``<prefix>/releases/<version>-<fingerprint12>/{bin,lib,release.json}``; how releases are kept and switched is said in
module_utils/releases.py.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import releases
from ..faults import FaultError
from ..files import replace_file
from ..releases import MANIFEST, SCHEMA, hash_file, is_intact, write_manifest
from .catalogue import CATALOGUE
from .libraries import TOOLKIT_LIBRARY, libraries_of
from .request import SERVER, Account

__all__ = [
    "GPU_PROOF",
    "MANIFEST",
    "SCHEMA",
    "Release",
    "Store",
    "hash_file",
    "is_intact",
    "lay_down",
    "read_release",
    "write_manifest",
]

#: Beside the manifest: under which driver the release has computed on this machine's cards, and what it showed.
GPU_PROOF = "gpu-proof.json"


@dataclass(frozen=True)
class Release(releases.Release):
    """An installed release of the engine."""

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


class Store(releases.Store[Release]):
    """The engine's releases below a prefix."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix, Release)


def read_release(path: Path) -> Release | None:
    """The release in a folder, or null where its manifest is absent or not ours."""
    return Store(str(path.parent.parent)).read(path)


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
