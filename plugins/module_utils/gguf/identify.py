# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a file is that should be a GGUF and is not."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from ..transfer.raw_parts import raw_part

#: How many bytes from the beginning are looked at.
LOOKED_AT = 4096
#: How files begin that are compressed, with what, and how they are unpacked.
_COMPRESSED = [
    (b"\x1f\x8b", "gzip", "gunzip NAME.gguf.gz"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd NAME.gguf.zst"),
    (b"\xfd7zXZ\0", "xz", "unxz NAME.gguf.xz"),
    (b"BZh", "bzip2", "bunzip2 NAME.gguf.bz2"),
]


@dataclass(frozen=True)
class WrongFile:
    """``kind`` is stable, ``words`` are for people; ``oid`` (SHA-256) and ``size`` (bytes) of the file an LFS pointer
    stands for, null elsewhere."""

    kind: str
    words: str
    remedy: str
    oid: str | None = None
    size: int | None = None

    def as_dict(self) -> dict[str, str | int | None]:
        return asdict(self)


_AGAIN = "Download the file again."


def identify(head: bytes, size: int, name: str = "") -> WrongFile | None:
    """What the file is, by its first bytes, length and name; null for something that begins like a GGUF.

    A GGUF that is a raw part by its name (``.gguf.a``, to be joined with the others) is told as such: it begins like a
    whole file.
    """
    if size == 0:
        return WrongFile("empty", "the file is empty", _AGAIN)
    if raw_part(name) is not None:
        return WrongFile(
            "raw_split_part",
            "this is one part of a file that was cut into pieces",
            "Join all parts in order (cat NAME.gguf.* > NAME.gguf) and give the result.",
        )
    if head.startswith(b"GGUF"):
        return None
    if head.startswith(b"FUGG"):
        return WrongFile("byte_swapped", "the magic is byte-swapped: a tool wrote it wrongly", _AGAIN)
    if head.startswith(b"version https://git-lfs"):
        text = head.decode("ascii", "replace")
        oid = re.search(r"^oid sha256:([0-9a-f]{64})$", text, re.MULTILINE)
        length = re.search(r"^size (\d+)$", text, re.MULTILINE)
        stands_for = f" (a file of {int(length[1])} bytes)" if length else ""
        return WrongFile(
            "git_lfs_pointer",
            f"this is a Git LFS pointer, not the file it stands for{stands_for}",
            "Fetch the file itself: git lfs pull, or download it from its resolve URL.",
            oid[1] if oid else None,
            int(length[1]) if length else None,
        )
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")):
        return WrongFile(
            "html",
            "this is a web page, not a model: a login page or an error page",
            "Check the URL; a gated model needs an accepted licence and a token.",
        )
    if start.startswith((b"{", b"[")):
        detail = _json_error(head, size)
        return WrongFile("json", f"this is JSON text, not a model{detail}", "Check the URL and the token.")
    if len(head) >= 9 and int.from_bytes(head[:8], "little") < size and head[8:9] == b"{":
        return WrongFile(
            "safetensors",
            "this is a safetensors file",
            "Take the GGUF version of the model, or convert it with llama.cpp's convert_hf_to_gguf.py.",
        )
    if head.startswith(b"PK\x03\x04"):
        return WrongFile("zip", "this is a zip archive or a PyTorch checkpoint", "Take the GGUF version of the model.")
    for magic, kind, command in _COMPRESSED:
        if head.startswith(magic):
            return WrongFile(
                kind, f"this is compressed with {kind}", f"Unpack it first ({command}) and give the result."
            )
    if head.startswith((b"ggml", b"lmgg", b"ggjt", b"tjgg", b"ggla", b"fmgg")):
        return WrongFile(
            "ggml", "this is a model of the formats before GGUF", "Take a GGUF version: engines no longer read this."
        )
    if not head.strip(b"\0"):
        return WrongFile("zeros", "the file begins with zeros: it was allocated and never written", _AGAIN)
    shown = head[:4].decode("ascii", "replace")
    shown = "".join(character if character.isprintable() else "?" for character in shown)
    return WrongFile("unknown", f"the file begins with {shown!r} instead of 'GGUF'", "Give the GGUF file.")


def _json_error(head: bytes, size: int) -> str:
    """What an error document says, in so far as it is short and plain."""
    if size > len(head):
        return ""
    try:
        document = json.loads(head)
    except ValueError:
        return ""
    if isinstance(document, dict) and isinstance(document.get("error"), str):
        text = " ".join(document["error"].split())
        return f" (it says: {text[:120]})"
    return ""
