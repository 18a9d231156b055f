# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Tells from its first bytes that something is not the file that was asked for."""

from __future__ import annotations

import re

from ..gguf.identify import identify
from .http import plain

GGUF_MAGIC = b"GGUF"
LFS_HEAD = b"version https://git-lfs.github.com/spec/"


def lfs_pointer(head: bytes) -> tuple[str | None, int | None] | None:
    """(SHA-256, size) that a Git-LFS pointer names, or null when this is none."""
    if not head.startswith(LFS_HEAD):
        return None
    oid = re.search(rb"^oid sha256:([0-9a-f]{64})\s*$", head, re.MULTILINE)
    size = re.search(rb"^size ([0-9]{1,18})\s*$", head, re.MULTILINE)
    return (oid.group(1).decode() if oid else None, int(size.group(1)) if size else None)


def sniff(head: bytes, name: str, content_type: str = "") -> tuple[str, str, str] | None:
    """(fault code, message, remedy) for a wrong file, or null when nothing speaks against it.

    ``head`` are the first bytes (a KiB is enough), ``name`` the file's name: a ``.gguf`` must begin with its magic; a
    raw part such as ``.gguf.b`` has none and is judged only by what it must not be.
    """
    pointer = lfs_pointer(head)
    if pointer is not None:
        sha256, size = pointer
        return (
            "lfs_pointer",
            "the source sent a Git-LFS pointer instead of the file "
            f"(the file itself has {size} bytes, SHA-256 {sha256})",
            "Use the address that delivers the file (at Hugging Face /resolve/, not /raw/), or fetch it with git lfs.",
        )
    is_gguf = name.lower().endswith(".gguf")
    if is_gguf and head.startswith(GGUF_MAGIC):
        return None
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    found = None
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")) and not name.lower().endswith((".html", ".xml")):
        found = "a web page"
    elif (
        text.startswith(b"{") and (is_gguf or "json" in content_type) and not name.lower().endswith((".json", ".jsonl"))
    ):
        found = f"a JSON answer ({_excerpt(head)})"
    elif is_gguf:
        # Its length is not known here, and only serves to tell one format that begins with a length of its own.
        known = identify(head, 1 << 62)
        found = f"something else ({known.words if known else plain(repr(head[:4]))})"
    if found is None:
        return None
    return (
        "not_the_file",
        f"the source sent {found} instead of {name}",
        "Check the address in a browser: a login page, an error page, or the page about the file in place of the file.",
    )


def _excerpt(head: bytes) -> str:
    return plain(" ".join(head[:120].decode("utf-8", "replace").split()))
