# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Makes archives laid out as Ollama's releases for Linux, with the stand-in as ``bin/ollama``.

A release is a folder ``v<version>`` with ``ollama-linux-<arch>.tar.zst``, the older ``ollama-linux-<arch>.tgz`` and
``sha256sum.txt`` (``<hash>  ./<file>``). The libraries are files of the right names that hold no code. The bytes are
the same for the same arguments.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STANDIN = Path(__file__).with_name("standin.py")
FORMS = ("tar.zst", "tgz")
LIBRARIES = ("cuda_v12", "cuda_v13")
#: Ways to be broken, each with what a user of the release meets.
BROKEN = {
    "no_binary": "there is no bin/ollama",
    "crash": "the program ends at once, whatever it is asked",
    "crash_at_serve": "the program tells its version and ends at once as a server",
    "abort_in_warmup": "the program serves, and its runner is killed while a model is loaded",
    "wrong_architecture": "the program is one for aarch64",
    "traversal": "a member leads out of the folder",
    "absolute": "a member has an absolute name",
    "link": "a symbolic link leads out of the folder, and a member is written through it",
    "truncated": "the archive ends early; its listed hash is that of the whole one",
    "truncated_listed": "the archive ends early, and its listed hash is that of what is there",
    "wrong_hash": "the listed hash is another file's",
    "not_listed": "the list has no entry for the archive",
}
_MTIME = 1_767_225_600
_EM_X86_64, _EM_AARCH64 = 62, 183


@dataclass(frozen=True)
class Release:
    """What was written: files by form, and the SHA-256 that the list has for each (null: none)."""

    folder: Path
    version: str
    files: dict[str, Path]
    sha256: dict[str, str | None]


def make_release(
    folder: Path,
    version: str,
    forms: Iterable[str] = FORMS,
    *,
    broken: str | None = None,
    arch: str = "amd64",
    libraries: Iterable[str] = LIBRARIES,
) -> Release:
    """Write ``folder/v<version>``. ``broken`` is a key of BROKEN; ``libraries`` are the folders below lib/ollama."""
    if broken is not None and broken not in BROKEN:
        raise ValueError(f"{broken!r} is none of {', '.join(BROKEN)}")
    target = folder / f"v{version}"
    target.mkdir(parents=True, exist_ok=True)
    tar = _tar(version, broken, tuple(libraries))
    files: dict[str, Path] = {}
    hashes: dict[str, str | None] = {}
    for form in forms:
        content = _packed(tar, form)
        listed = hashlib.sha256(content).hexdigest()
        if broken in ("truncated", "truncated_listed"):
            content = content[: len(content) * 2 // 3]
        if broken == "truncated_listed":
            listed = hashlib.sha256(content).hexdigest()
        path = target / f"ollama-linux-{arch}.{form}"
        path.write_bytes(content)
        files[form] = path
        hashes[form] = {"wrong_hash": "0" * 64, "not_listed": None}.get(broken or "", listed)
    lines = [f"{hashes[form]}  ./{path.name}\n" for form, path in files.items() if hashes[form]]
    # A real list names other systems' files too.
    lines.append(f"{hashlib.sha256(version.encode()).hexdigest()}  ./Ollama-darwin.zip\n")
    (target / "sha256sum.txt").write_text("".join(lines), encoding="ascii")
    return Release(target, version, files, hashes)


def program(version: str, broken: str | None = None) -> bytes:
    """The bytes of ``bin/ollama``."""
    if broken == "wrong_architecture":
        return elf(_EM_AARCH64)
    if broken == "crash":
        return b"#!/bin/sh\necho 'ollama: error while loading shared libraries: libggml-base.so.0' >&2\nexit 127\n"
    text = STANDIN.read_text(encoding="utf-8")
    line = 'VERSION = "0.24.0"\n'
    assert text.count(line) == 1, f"{STANDIN} states its version once"
    text = text.replace(line, f'VERSION = "{version}"\n')
    if broken == "crash_at_serve":
        text = text.replace('if switches().get("crash_at_start"):', "if True:", 1)
    if broken == "abort_in_warmup":
        asked = 'told.get("abort_in_warmup")'
        assert asked in text
        text = text.replace(asked, "True")
    return text.encode()


def elf(machine: int) -> bytes:
    """A program for a processor, with a header and nothing behind it."""
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    rest = (2).to_bytes(2, "little") + machine.to_bytes(2, "little") + (1).to_bytes(4, "little")
    return (ident + rest).ljust(64, b"\0")


def _library(name: str) -> bytes:
    return elf(_EM_X86_64) + f"{name}: a file of the lab without code\n".encode()


def _tar(version: str, broken: str | None, libraries: tuple[str, ...]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as archive:

        def member(name: str, content: bytes | None = None, *, link: str | None = None, mode: int = 0o755) -> None:
            info = tarfile.TarInfo(name)
            info.mtime, info.mode = _MTIME, mode
            if link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, link
            elif content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content) if content is not None else None)

        def library(folder: str, name: str) -> None:
            """A library with the links that its version has: libx.so -> libx.so.0 -> libx.so.0.0.0."""
            member(f"{folder}/{name}.0.0.0", _library(name))
            member(f"{folder}/{name}.0", link=f"{name}.0.0.0")
            member(f"{folder}/{name}", link=f"{name}.0")

        member("bin")
        if broken != "no_binary":
            member("bin/ollama", program(version, broken))
        member("lib")
        member("lib/ollama")
        library("lib/ollama", "libggml-base.so")
        for name in ("x64", "sse42", "sandybridge", "haswell", "alderlake", "skylakex", "icelake"):
            member(f"lib/ollama/libggml-cpu-{name}.so", _library(name))
        if tuple(int(word) for word in version.split("-")[0].split(".")[:2]) >= (0, 30):
            member("lib/ollama/llama-server", elf(_EM_X86_64))
        for folder in libraries:
            major = folder.removeprefix("cuda_v")
            member(f"lib/ollama/{folder}")
            member(f"lib/ollama/{folder}/libggml-cuda.so", _library(folder))
            for name in ("libcublas.so", "libcublasLt.so", "libcudart.so"):
                member(f"lib/ollama/{folder}/{name}.{major}", _library(name))
        if broken == "traversal":
            member("lib/../../outside.txt", b"written outside\n", mode=0o644)
        elif broken == "absolute":
            member("/tmp/ollama-outside.txt", b"written outside\n", mode=0o644)
        elif broken == "link":
            member("lib/ollama/out", link="../../../..")
            member("lib/ollama/out/outside.txt", b"written outside\n", mode=0o644)
    return raw.getvalue()


def _packed(tar: bytes, form: str) -> bytes:
    if form == "tgz":
        return gzip.compress(tar, mtime=0)
    if form != "tar.zst":
        raise ValueError(f"{form!r} is none of {', '.join(FORMS)}")
    return subprocess.run(["zstd", "-q", "-c", "-T1"], input=tar, capture_output=True, check=True).stdout
