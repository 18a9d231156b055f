# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Releases that come from elsewhere, and the way back to the one before.

A release is packed where it was built, with every file's hash in its manifest and one hash over the archive. Where it
is unpacked, both are checked before anything of it is run, and the release is proven there before it is put into use:
another machine can lack a library, an instruction set, or a card.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..faults import Fault, FaultError, is_fatal
from ..machine import Machine
from . import proof, release
from .catalogue import CATALOGUE
from .request import Account, Request, find_account
from .run import end_with_faults, prove_on_gpus_once

NAME = re.compile(r"^[0-9A-Za-z][0-9A-Za-z.+_-]*-[0-9a-f]{12}\Z")
CHUNK = 1 << 20


@dataclass(frozen=True)
class Shipment:
    """What is asked for: ``action`` is pack, install or previous; paths are absolute."""

    action: str
    prefix: str
    name: str | None = None
    archive: str | None = None
    sha256: str | None = None
    build_user: str | None = None
    model_architecture: str | None = None
    keep_releases: int = 3
    switch: bool = True
    nvidia_smi: str = "nvidia-smi"
    sysroot: str = "/"


@dataclass
class Outcome:
    """``present`` says whether the release is on this machine, whole; null is what could not be known."""

    changed: bool = False
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    present: bool = False
    release: str | None = None
    binary: str | None = None
    current: str | None = None
    previous_release: str | None = None
    fingerprint: str | None = None
    version: str | None = None
    commit: str | None = None
    capabilities: dict[str, list[str]] | None = None
    proof: list[dict[str, str]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    archive: str | None = None
    sha256: str | None = None

    def results(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "faults"}


def ship(asked: Shipment, check_mode: bool = False) -> Outcome:
    """Do what is asked, or say what stands in the way. Never raises for what it finds on the machine."""
    outcome = Outcome()
    outcome.faults = check(asked)
    if not outcome.faults:
        umask = os.umask(0o022)
        try:
            with end_with_faults(outcome.faults):
                _Ship(asked, outcome).go(check_mode)
        finally:
            os.umask(umask)
    if any(is_fatal(fault) for fault in outcome.faults):
        outcome.changed = False
    return outcome


def check(asked: Shipment) -> list[Fault]:
    faults = []

    def bad(subject: str, message: str, remedy: str) -> None:
        faults.append(CATALOGUE.fault("build_option_invalid", subject, message, remedy))

    for name in ("prefix", "archive"):
        path = getattr(asked, name)
        if path is not None and (not path.startswith("/") or ".." in PurePosixPath(path).parts):
            bad(name, f"{path!r} is not an absolute path", "Write a path that begins with / and has no '..' in it.")
    if asked.action in ("pack", "install") and not NAME.match(asked.name or ""):
        bad("name", f"{asked.name!r} is not the name of a release", "Write it as in 0.5.0-dev-3f6d0a9c51be.")
    if asked.action == "pack" and not asked.archive:
        bad("archive", "is not given", "Write the path of the archive that is to be made.")
    if asked.action == "install" and (asked.archive is None) != (asked.sha256 is None):
        bad("sha256", "goes with `archive`", "Give both, or neither to ask whether the release is there.")
    if asked.sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", asked.sha256):
        bad("sha256", f"{asked.sha256!r} is not 64 hexadecimal digits", "Write the SHA-256 of the archive.")
    if asked.keep_releases < 1:
        bad("keep_releases", f"{asked.keep_releases} is too small", "Write 1 or more; the one in use is always kept.")
    return faults


class _Ship:
    def __init__(self, asked: Shipment, outcome: Outcome) -> None:
        self.asked = asked
        self.outcome = outcome
        self.store = release.Store(asked.prefix)
        self.machine = Machine(asked.sysroot)

    def go(self, check_mode: bool) -> None:
        try:
            {"pack": self._pack, "install": self._install, "previous": self._previous}[self.asked.action](check_mode)
        finally:
            self._report_links()

    # --- pack ---

    def _pack(self, check_mode: bool) -> None:
        found = self._named()
        if found is None:
            raise _missing(
                str(self.store.releases / (self.asked.name or "")), "there is no such release, or it is damaged"
            )
        self._describe(found)
        archive = Path(self.asked.archive or "")
        self.outcome.archive = str(archive)
        beside = archive.with_name(archive.name + ".sha256")
        with contextlib.suppress(OSError):
            kept = beside.read_text(encoding="ascii").split()[0]
            if archive.stat().st_mtime_ns <= beside.stat().st_mtime_ns and release.hash_file(archive) == kept:
                self.outcome.sha256 = kept
                return
        self.outcome.changed = True
        if check_mode:
            return
        archive.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # One release at a time is enough: what was shipped before only fills the disk.
        for old in [*archive.parent.glob("*.tar.gz"), *archive.parent.glob("*.tar.gz.sha256")]:
            old.unlink()
        self.outcome.sha256 = pack(found, archive)
        beside.write_text(f"{self.outcome.sha256}  {archive.name}\n", encoding="ascii")

    # --- install ---

    def _install(self, check_mode: bool) -> None:
        found = self._named()
        if found is not None:
            self._describe(found)
            if not self.asked.switch or self.store.link("current") == found.path:
                if not check_mode:
                    self._prove_on_gpus(found, self._account())
                return
            self.outcome.changed = True
            if not check_mode:
                account = self._account()
                self._prove(found, account)
                self._switch(found, account)
            return
        if self.asked.archive is None:
            # Asked only whether it is there; what follows will bring it.
            self.outcome.changed = True
            return
        self.outcome.changed = True
        if check_mode:
            return
        account = self._account()
        with self.store.locked():
            self.store.releases.mkdir(mode=0o755, parents=True, exist_ok=True)
            self.store.clean_partials()
            partial = self.store.releases / f".{(self.asked.name or '')[-12:]}.{os.getpid()}"
            try:
                unpack(Path(self.asked.archive), self.asked.sha256 or "", partial, self.asked.name or "")
                fresh = release.read_release(partial)
                assert fresh is not None
                self._prove(fresh, account)
                path = self.store.commit(partial, self.asked.name or "")
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            made = release.read_release(path)
            assert made is not None
            self._describe(made)
            if self.asked.switch:
                self._switch(made, account)

    # --- back ---

    def _previous(self, check_mode: bool) -> None:
        path = self.store.link("previous")
        found = release.read_release(path) if path is not None else None
        if found is None:
            # With one in use the engine is built: there was never another.
            in_use = self.store.link("current")
            only = f"there is no release to go back to{f' from {in_use.name}, the only one' if in_use else ''}"
            remedy = "Build another version first (`llama_cpp_version`)." if in_use else BUILD
            raise _missing(f"{self.asked.prefix}/previous", only, remedy)
        if not release.is_intact(found):
            raise FaultError(
                CATALOGUE.fault(
                    "release_damaged",
                    found.path.name,
                    "its files are not those that were installed; the release in use was not touched",
                    "Build it again: role llama_cpp with the settings of that version.",
                )
            )
        self._describe(found)
        self.outcome.changed = True
        if not check_mode:
            account = self._account()
            self._prove(found, account)
            with self.store.locked():
                self._switch(found, account, prune=False)

    # --- what they share ---

    def _account(self) -> Account | None:
        request = Request("archive", self.asked.prefix, "/nonexistent", build_user=self.asked.build_user)
        account, faults = find_account(request)
        if faults:
            raise FaultError(faults[0])
        return account

    def _named(self) -> release.Release | None:
        found = release.read_release(self.store.releases / (self.asked.name or ""))
        return found if found is not None and release.is_intact(found) else None

    def _describe(self, found: release.Release) -> None:
        self.outcome.present = True
        self.outcome.release = str(found.path)
        self.outcome.binary = str(found.binary)
        for name in ("fingerprint", "version", "commit", "capabilities"):
            setattr(self.outcome, name, found.manifest.get(name))
        self.outcome.proof = found.manifest.get("proof", [])

    def _report_links(self) -> None:
        current, previous = self.store.link("current"), self.store.link("previous")
        self.outcome.current = str(current) if current else None
        self.outcome.previous_release = str(previous) if previous else None

    def _prove(self, found: release.Release, account: Account | None) -> None:
        manifest = found.manifest
        inputs: Mapping[str, Any] = manifest.get("inputs", {})
        folders = str(inputs.get("options", {}).get("CMAKE_INSTALL_RPATH", "")).split(";")
        expected = proof.Expected(
            manifest.get("version"),
            manifest.get("commit"),
            manifest.get("cuda_architectures", []),
            self.asked.model_architecture,
            None,
            [folder for folder in folders if folder.startswith("/")],
        )
        proof.prove(found.path, expected, account)

    def _prove_on_gpus(self, found: release.Release, account: Account | None) -> None:
        if found.manifest.get("backend") != "cuda":
            return
        checks = prove_on_gpus_once(found, self.machine, self.asked.nvidia_smi, account)
        if checks is None:
            self.outcome.notes.append("No GPU with a loaded driver here: the engine has not computed on one yet.")
        else:
            self.outcome.proof = [*self.outcome.proof, *checks]

    def _switch(self, found: release.Release, account: Account | None, prune: bool = True) -> None:
        self._prove_on_gpus(found, account)
        self.store.switch(found.path)
        if prune:
            self.outcome.removed = self.store.prune(self.asked.keep_releases)


BUILD = "Build the engine with role llama_cpp first."


def _missing(subject: str, message: str, remedy: str = BUILD) -> FaultError:
    return FaultError(CATALOGUE.fault("release_missing", subject, message, remedy))


# --- the archive ------------------------------------------------------------------------------------------------------


def pack(found: release.Release, archive: Path) -> str:
    """Write manifest and files of a release as one archive; its SHA-256. The same release makes the same bytes."""
    fresh = archive.with_name(f".{archive.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as out:
            # No file name and no time in the header; level 1 is limited by the disk, not by the processor.
            with (
                gzip.GzipFile("", "wb", 1, out, 0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
            ):
                manifest = (found.path / release.MANIFEST).read_bytes()
                _add(tar, f"{found.path.name}/{release.MANIFEST}", io.BytesIO(manifest), len(manifest), 0o644)
                for entry in found.manifest["files"]:
                    path = found.path / entry["path"]
                    mode = 0o755 if entry["path"].startswith("bin/") else 0o644
                    with path.open("rb") as content:
                        _add(tar, f"{found.path.name}/{entry['path']}", content, entry["size"], mode)
            out.flush()
            os.fchmod(out.fileno(), 0o644)
            os.fsync(out.fileno())
        fresh.replace(archive)
    finally:
        fresh.unlink(missing_ok=True)
    return release.hash_file(archive)


def _add(tar: tarfile.TarFile, name: str, content: Any, size: int, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, mode
    tar.addfile(info, content)


def _damaged(subject: str, message: str) -> FaultError:
    return FaultError(
        CATALOGUE.fault(
            "release_damaged", subject, f"{message}; nothing of it was put into use", "Ship the release once more."
        )
    )


def unpack(archive: Path, sha256: str, partial: Path, name: str) -> None:
    """Unpack a release that was packed here or elsewhere into ``partial``, every file checked against its manifest."""
    if release.hash_file(archive) != sha256:
        raise _damaged(archive.name, f"the archive's SHA-256 is not {sha256}")
    try:
        with tarfile.open(archive, "r:gz") as tar:
            _unpack(tar, partial, name)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, KeyError, TypeError, ValueError) as exc:
        raise _damaged(archive.name, f"is not the archive of a release ({exc})") from exc


def _unpack(tar: tarfile.TarFile, partial: Path, name: str) -> None:
    first = tar.next()
    stream = tar.extractfile(first) if first is not None and first.name == f"{name}/{release.MANIFEST}" else None
    if stream is None:
        raise _damaged(name, "the archive does not begin with the manifest of this release")
    manifest = json.load(stream)
    if manifest.get("schema") != release.SCHEMA or not name.endswith(f"-{str(manifest.get('fingerprint'))[:12]}"):
        raise _damaged(name, "the manifest is of another release")
    listed = {str(entry["path"]): entry for entry in manifest["files"]}
    for folder in (partial, partial / "bin", partial / "lib"):
        folder.mkdir(mode=0o755, parents=True)
    while (member := tar.next()) is not None:
        path = member.name.removeprefix(f"{name}/")
        entry = listed.pop(path, None)
        # Only what the manifest lists, and only as bin/NAME and lib/NAME: nothing can lead elsewhere.
        if entry is None or not member.isfile() or not re.fullmatch(r"(bin|lib)/[0-9A-Za-z][\w.+-]*", path):
            raise _damaged(name, f"the archive holds {member.name}, which its manifest does not list")
        content = tar.extractfile(member)
        assert content is not None
        target = partial / path
        with target.open("xb") as out:
            shutil.copyfileobj(content, out, CHUNK)
            out.flush()
            os.fchmod(out.fileno(), 0o755 if path.startswith("bin/") else 0o644)
            os.fsync(out.fileno())
        if release.hash_file(target) != entry["sha256"]:
            raise _damaged(name, f"{path} has another SHA-256 than its manifest says")
    if listed:
        raise _damaged(name, f"{next(iter(listed))} is not in the archive")
    del manifest["schema"], manifest["files"]
    release.write_manifest(partial, manifest)
