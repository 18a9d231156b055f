# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Binary packages in Debian's format (deb(5)), written without dpkg: hundreds a second, by any user."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

#: Every file carries this time, so that the same input gives the same package.
EPOCH = 1_700_000_000
MAINTAINER = "The volta.llm lab <lab@volta.invalid>"


@dataclass(frozen=True)
class File:
    """A regular file; ``link`` makes it a symbolic link instead."""

    data: bytes = b""
    mode: int = 0o644
    link: str | None = None


def text(content: str, mode: int = 0o644) -> File:
    return File(content.encode(), mode)


def link(target: str) -> File:
    return File(link=target)


@dataclass(frozen=True)
class Package:
    """One version of one package. ``relations`` are control fields such as ``Depends``, in the words of dpkg.

    ``files`` are by absolute path, ``scripts`` by maintainer script name; ``conffiles`` names files of ``files``.
    """

    name: str
    version: str
    source: str
    section: str
    description: str
    architecture: str = "amd64"
    relations: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)
    conffiles: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.version, self.architecture

    @property
    def file_name(self) -> str:
        # A colon is not allowed in file names of some systems; apt leaves the epoch out as well.
        return f"{self.name}_{self.version.rpartition(':')[2]}_{self.architecture}.deb"

    def control(self) -> str:
        """The control file."""
        lines = [f"Package: {self.name}"]
        if self.source != self.name:
            lines.append(f"Source: {self.source}")
        lines += [f"Version: {self.version}", f"Architecture: {self.architecture}", f"Maintainer: {MAINTAINER}"]
        lines += [f"{key}: {value}" for key, value in self.relations.items() if value]
        lines += [f"Section: {self.section}", "Priority: optional", f"Description: {self.description}"]
        return "\n".join(lines) + "\n"


def _tar(entries: Mapping[str, File]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        folders = {"."}
        for path in sorted(entries):
            parents = [f"./{parent}" for parent in PurePosixPath(path.lstrip("/")).parents if str(parent) != "."]
            for folder in reversed(parents):
                if folder not in folders:
                    folders.add(folder)
                    entry = tarfile.TarInfo(folder)
                    entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, EPOCH
                    entry.uname = entry.gname = "root"
                    archive.addfile(entry)
            item = entries[path]
            entry = tarfile.TarInfo(f"./{path.lstrip('/')}")
            entry.mtime, entry.uname, entry.gname = EPOCH, "root", "root"
            if item.link is not None:
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, item.link, 0o777
                archive.addfile(entry)
            else:
                entry.size, entry.mode = len(item.data), item.mode
                archive.addfile(entry, io.BytesIO(item.data))
    return gzip.compress(buffer.getvalue(), compresslevel=1, mtime=EPOCH)


def _member(name: str, data: bytes) -> bytes:
    header = f"{name:<16}{EPOCH:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
    return header + data + b"\n" * (len(data) % 2)


def build(package: Package) -> bytes:
    """The .deb file."""
    control = {"control": text(package.control())}
    sums = [
        f"{hashlib.md5(item.data, usedforsecurity=False).hexdigest()}  {path.lstrip('/')}\n"
        for path, item in sorted(package.files.items())
        if item.link is None
    ]
    if sums:
        control["md5sums"] = text("".join(sums))
    if package.conffiles:
        control["conffiles"] = text("".join(f"{path}\n" for path in package.conffiles))
    control.update({name: text(script, 0o755) for name, script in package.scripts.items()})
    return (
        b"!<arch>\n"
        + _member("debian-binary", b"2.0\n")
        + _member("control.tar.gz", _tar(control))
        + _member("data.tar.gz", _tar(package.files))
    )
