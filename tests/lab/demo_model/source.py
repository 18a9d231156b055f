# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where the vocabulary comes from: the llama.cpp source inside the pinned sdist of llama-cpp-python."""

from __future__ import annotations

import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

from ..paths import Paths

#: The engine's source as roles/llama_cpp pins it; the vocabulary file in it decides the model's bytes.
SDIST_NAME = "llama_cpp_python-0.3.36.tar.gz"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
VOCABULARY = "models/ggml-vocab-qwen35.gguf"
VOCABULARY_SHA256 = "63ed952ff338996cf0bdf24a7b10015124273f75c6dc9bb427356aa3f67ec62c"
PYPI = "https://pypi.org/simple"


class SourceError(Exception):
    """The vocabulary cannot be had; the message says what to do."""


def vocabulary_file(source: Path | None) -> Path:
    """Path of the vocabulary GGUF.

    ``source`` is a llama.cpp folder, an unpacked or packed sdist, or null: then the pinned sdist is taken from the
    lab's cache, or fetched into it from the package index that pip is configured for.
    """
    if source is not None and source.is_dir():
        for folder in (source, source / "vendor/llama.cpp"):
            if (folder / VOCABULARY).is_file():
                return _checked(folder / VOCABULARY)
        raise SourceError(f"{source} holds no {VOCABULARY}: give a llama.cpp source folder or the sdist's tar.gz")
    if source is not None and not source.is_file():
        raise SourceError(f"{source} does not exist: give a llama.cpp source folder or {SDIST_NAME}")
    kept = Paths.from_environment().cache / "vocabulary" / VOCABULARY_SHA256[:16] / Path(VOCABULARY).name
    if not kept.is_file():
        _extract(source or _pinned_sdist(), kept)
    return _checked(kept)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _checked(path: Path) -> Path:
    found = sha256_of(path)
    if found != VOCABULARY_SHA256:
        raise SourceError(
            f"{path} has SHA-256 {found}, not {VOCABULARY_SHA256}: it is not the vocabulary of {SDIST_NAME}, and the "
            "model's published hashes would not match. Remove the file, or give the pinned source"
        )
    return path


def _extract(sdist: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with tarfile.open(sdist) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith("/" + VOCABULARY):
                    stream = archive.extractfile(member)
                    assert stream is not None, "a regular member has data"
                    with partial.open("wb") as out:
                        shutil.copyfileobj(stream, out)
                    partial.replace(target)
                    return
    except tarfile.TarError as exc:
        raise SourceError(f"{sdist} is not a readable tar archive ({exc}): give {SDIST_NAME} itself") from exc
    finally:
        partial.unlink(missing_ok=True)
    raise SourceError(f"{sdist} holds no {VOCABULARY}: give {SDIST_NAME} itself")


def _pinned_sdist() -> Path:
    target = Paths.from_environment().cache / "sources" / SDIST_NAME
    if target.is_file() and sha256_of(target) == SDIST_SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    url = _sdist_url()
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, partial.open("wb") as out:
            shutil.copyfileobj(answer, out, 1 << 20)
        found = sha256_of(partial)
        if found != SDIST_SHA256:
            raise SourceError(f"{url} has SHA-256 {found}, not {SDIST_SHA256}: the index serves another file")
        partial.replace(target)
    except OSError as exc:
        raise SourceError(f"{url}: {exc}. Download {SDIST_NAME} by other means and give it with --source") from exc
    finally:
        partial.unlink(missing_ok=True)
    return target


def _sdist_url() -> str:
    """The sdist's address in the index that pip uses here (a mirror, most likely), else in PyPI."""
    index = os.environ.get("PIP_INDEX_URL") or _pip_setting("global.index-url") or PYPI
    page = f"{index.rstrip('/')}/llama-cpp-python/"
    try:
        with urllib.request.urlopen(page, timeout=60) as answer:
            base, text = str(answer.geturl()), answer.read().decode("utf-8", "replace")
    except OSError as exc:
        raise SourceError(f"{page}: {exc}. Download {SDIST_NAME} by other means and give it with --source") from exc
    for target in re.findall(r'href="([^"]+)"', text):
        link = str(urllib.parse.urljoin(base, html.unescape(target))).partition("#")[0]
        if link.rpartition("/")[2] == SDIST_NAME:
            return link
    raise SourceError(f"{page} does not list {SDIST_NAME}: set PIP_INDEX_URL to an index that has it")


def _pip_setting(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", name], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
