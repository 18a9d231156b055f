# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A registry of models for the stand-in: a folder, and a server that answers as registry.ollama.ai does.

The folder is ``v2/<namespace>/<name>/manifests/<tag>`` and ``v2/<namespace>/<name>/blobs/sha256:<hex>``, so any file
server below whose root it lies can be named as the stand-in's ``registry``. The server here sends a client on to
another name of the same machine for the bytes of a blob, without which Ollama does not take them from a registry.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
import struct
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from ..fileserver import FileHandler, FileServer
from . import standin
from .gguf_file import small_gguf

TEMPLATE = "{{ if .System }}{{ .System }}\n{{ end }}{{ .Prompt }}"
PARAMETERS = {"stop": ["</s>"]}
LICENSE = "The bytes of this model are a pattern. Nobody has rights to them.\n"
#: Below it the server gives out bytes; a client is sent there.
BYTES = "/bytes"


def publish_model(
    folder: Path,
    name: str = "volta-small",
    tag: str = "latest",
    namespace: str = "library",
    weights: bytes | None = None,
) -> dict[str, str]:
    """Put a model into the registry's folder. ``weights`` is a GGUF file's content (default: a small one).

    Returns the digests, without ``sha256:``: ``model`` of the weights, ``manifest`` of the manifest, which is the ID
    that Ollama shows.
    """
    content = small_gguf() if weights is None else weights
    place = folder / "v2" / namespace / name
    (place / "blobs").mkdir(parents=True, exist_ok=True)
    (place / "manifests").mkdir(parents=True, exist_ok=True)

    def layer(kind: str, data: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        (place / "blobs" / digest).write_bytes(data)
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    model = layer(f"{standin.LAYER}model", content)
    layers = [
        model,
        layer(f"{standin.LAYER}template", TEMPLATE.encode()),
        layer(f"{standin.LAYER}license", LICENSE.encode()),
        layer(f"{standin.LAYER}params", standin.go_json(PARAMETERS).encode()),
    ]
    config = {**_described(place / "blobs" / str(model["digest"])), "architecture": "amd64", "os": "linux"}
    config["rootfs"] = {"type": "layers", "diff_ids": [entry["digest"] for entry in layers]}
    manifest = {
        "schemaVersion": 2,
        "mediaType": standin.MANIFEST_TYPE,
        "config": layer(standin.CONFIG_TYPE, standin.go_json(config).encode()),
        "layers": layers,
    }
    raw = standin.go_json(manifest).encode()
    (place / "manifests" / tag).write_bytes(raw)
    return {
        "model": str(model["digest"]).removeprefix("sha256:"),
        "manifest": hashlib.sha256(raw).hexdigest(),
    }


def _described(path: Path) -> dict[str, object]:
    """What a registry says of a model. It takes any bytes, so a file that is no GGUF gets the small model's words."""
    try:
        header = standin.read_gguf(path)
        told = (header.architecture, standin.human_number(header.parameters), header.file_type)
    except (standin.GgufError, struct.error):
        told = ("llama", "1M", "Q4_0")
    return {
        "model_format": "gguf",
        "model_family": told[0],
        "model_families": [told[0]],
        "model_type": told[1],
        "file_type": told[2],
    }


def other_name(host: str) -> str:
    """Another name of a host, since Ollama asks to be sent to one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return socket.gethostbyname(host)
    return "localhost" if address.is_loopback else str(int(address))


class RegistryHandler(FileHandler):
    """The folder as files, and blobs at another place."""

    #: Answer for blobs of weights instead of their bytes, by path: status and body. For tests.
    redirect = True

    def answer(self, send_body: bool) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/v2/") and "/blobs/" in path and self.redirect:
            host, _, port = self.headers.get("Host", "").rpartition(":")
            target = f"http://{other_name(host)}:{port}{BYTES}{path}"
            self.send_response(HTTPStatus.TEMPORARY_REDIRECT)
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.path = self.path.removeprefix(BYTES)
        super().answer(send_body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """As a registry does: JSON."""
        errors = [{"code": "MANIFEST_UNKNOWN", "message": message or HTTPStatus(code).phrase}]
        content = json.dumps({"errors": errors}).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class RegistryServer(FileServer):
    def __init__(self, address: tuple[str, int], root: Path, handler: type[RegistryHandler] = RegistryHandler) -> None:
        super().__init__(address, root, handler)
