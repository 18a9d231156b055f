# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Reads Ollama's store: which blob is a model's weights, and what unfinished pulls have left.

Layout (ollama 0.24.0, manifest/paths.go and server/modelpath.go): ``manifests/<host>/<namespace>/<name>/<tag>`` is
JSON with layers of mediaType, digest and size; ``blobs/sha256-<hex>`` are the layers' bytes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..faults import Fault, FaultError
from .catalogue import fault
from .engine import amount

HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
MODEL_LAYER = "application/vnd.ollama.image.model"
#: Where a store usually is: the Linux package's service user, root's own, a container's volume.
STORES = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/models", "/root/.ollama/models")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PARTIAL = re.compile(r"sha256-[0-9a-f]{64}-partial(?:-\d+)?")


@dataclass(frozen=True)
class Blob:
    """A model's weights in the store: size in bytes and SHA-256 as the manifest names them, not as the bytes are."""

    path: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class Partials:
    """What unfinished pulls have left. ``size`` is what they take on the disk, in bytes (they are sparse)."""

    paths: tuple[Path, ...]
    size: int


def manifest_path(model: str) -> Path | None:
    """Where the manifest of ``[host/][namespace/]name[:tag]`` lies below the store; null for what is no such name."""
    parts = split_name(model)
    if len(parts) != 4:
        return None
    # A port is part of a host: localhost:5000/team/model.
    if not re.fullmatch(r"[A-Za-z0-9.-]+(:\d+)?", parts[0]) or not all(map(_WORD.fullmatch, parts[1:])):
        return None
    return Path("manifests", *parts)


def split_name(model: str) -> list[str]:
    """Host, namespace, name and tag, as Ollama takes them where they are left out; more parts where there are too many.
    Whether each can be such a part is not looked at."""
    # A colon before the last slash is a port's.
    rest, _, tag = model.rpartition(":") if model.rfind(":") > model.rfind("/") else (model, "", TAG)
    words = rest.split("/")
    return [*[HOST, NAMESPACE][: max(0, 3 - len(words))], *words, tag]


def find_blob(model: str, store: str | None = None, stores: Iterable[str] = STORES) -> Blob:
    """The weights of a model that was pulled. FaultError: source_missing, source_misbehaves."""
    below = manifest_path(model)
    if below is None:
        raise FaultError(
            fault("bad_argument", f"ollama {model}", "is no name of a model", "Write it as in `ollama list`: name:tag.")
        )
    candidates = _candidates(store, stores)
    folder = next((Path(place) for place in candidates if (Path(place) / below).is_file()), None)
    if folder is None:
        looked = ", ".join(candidates)
        raise FaultError(
            fault(
                "source_missing",
                f"ollama {model}",
                f"no store has a manifest for it (looked in {looked})",
                f"Pull it (ollama pull {model}) or name the store.",
            )
        )
    try:
        manifest = json.loads((folder / below).read_text(encoding="utf-8"))
        layers = [layer for layer in manifest["layers"] if layer["mediaType"] == MODEL_LAYER]
        found = [(_DIGEST.fullmatch(layer["digest"]), int(layer["size"])) for layer in layers]
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise _odd(folder / below, f"cannot be read as a manifest ({type(exc).__name__})") from exc
    if len(found) != 1 or found[0][0] is None:
        raise _odd(folder / below, f"has {len(found)} layers of weights, expected one with a SHA-256")
    digest, size = found[0]
    assert digest is not None
    path = folder / "blobs" / f"sha256-{digest[1]}"
    if not path.is_file():
        raise FaultError(
            fault(
                "source_missing",
                str(path),
                f"the manifest of {model} names it and it is not there",
                f"An unfinished pull: ollama pull {model} completes it.",
            )
        )
    return Blob(path, size, digest[1])


def _candidates(store: str | None, stores: Iterable[str]) -> list[str]:
    """Where a store may be, in order."""
    return [store] if store else [place for place in (os.environ.get("OLLAMA_MODELS") or "", *stores) if place]


def partials_left(specs: Iterable[Mapping[str, Any]], stores: Iterable[str] = STORES) -> list[Fault]:
    """A warning for each store that entries of the option C(sources) name, or leave to be found, and that holds what
    unfinished pulls have left. It is for the operator to remove: a pull that runs needs it.
    """
    named = [
        place for spec in specs if spec.get("type") == "ollama" for place in _candidates(spec.get("store"), stores)
    ]
    faults = []
    for store in dict.fromkeys(named):
        found = find_partials(store)
        if not found.paths:
            continue
        count = len(found.paths)
        blobs = Path(store, "blobs")
        faults.append(
            fault(
                "pull_unfinished",
                str(blobs),
                f"{count} partial blob{'s' if count > 1 else ''} of unfinished pulls take {amount(found.size)}",
                "`ollama pull` of the same model goes on with them. To be rid of them, when no pull runs: "
                f"rm {shlex.quote(str(blobs))}/sha256-*-partial* (a restart of Ollama does the same, unless "
                "OLLAMA_NOPRUNE is set).",
            )
        )
    return faults


def find_partials(store: str) -> Partials:
    """What unfinished pulls left in a store. None of it is a model; a pull that runs needs it."""
    paths = []
    size = 0
    try:
        names = sorted(entry.name for entry in (Path(store) / "blobs").iterdir())
    except OSError:
        names = []
    for name in names:
        if _PARTIAL.fullmatch(name):
            path = Path(store) / "blobs" / name
            try:
                size += path.stat().st_blocks * 512
            except OSError:
                continue
            paths.append(path)
    return Partials(tuple(paths), size)


def _odd(path: Path, message: str) -> FaultError:
    return FaultError(fault("source_misbehaves", str(path), message, "Pull the model again, or name another source."))
