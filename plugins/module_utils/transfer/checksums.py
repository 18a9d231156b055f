# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Checksum files in the forms publishers use."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

_HEX = r"[0-9A-Fa-f]{64}"
#: sha256sum: "hash  name" (text) or "hash *name" (binary); a name with odd characters is escaped, after a backslash.
_COREUTILS = re.compile(rf"^\\?({_HEX})[ \t]+\*?(\S.*)$")
#: BSD and openssl: "SHA256 (name) = hash", "SHA2-256(name)= hash".
_BSD = re.compile(rf"^SHA(?:2-)?256 ?\((.+)\) ?= ?({_HEX})$", re.IGNORECASE)
_BARE = re.compile(rf"^(?:sha256:)?({_HEX})$", re.IGNORECASE)


@dataclass(frozen=True)
class Found:
    """What a checksum file has for a name: ``sha256`` in lower case, or null and in ``reason`` why."""

    sha256: str | None
    reason: str = ""


def parse_checksums(text: str) -> list[tuple[str, str]]:
    """(path, SHA-256 in lower case) in order; a bare hash stands under the empty path.

    Lines in other forms (comments, other hashes) are passed over.
    """
    found: list[tuple[str, str]] = []
    for raw in text.lstrip("\ufeff").splitlines():
        line = raw.strip()
        if match := _BARE.match(line):
            found.append(("", match[1].lower()))
        elif match := _COREUTILS.match(line):
            found.append((match[2], match[1].lower()))
        elif match := _BSD.match(line):
            found.append((match[1], match[2].lower()))
    return found


def look_up(text: str, name: str, alone: bool = True) -> Found:
    """The hash a checksum file has for ``name``, whatever folder it names; what could mean another file is none.

    A bare hash, and nothing beside it, is that of the file where ``alone``: no other file is looked up.
    """
    entries = parse_checksums(text)
    named = [(path, sha256) for path, sha256 in entries if path and posixpath.basename(path) == name]
    if len({sha256 for _, sha256 in named}) > 1:
        paths = list(dict.fromkeys(path for path, _ in named))
        return Found(None, f"has {len(named)} lines for {name} that differ ({', '.join(paths[:4])})")
    if named:
        return Found(named[0][1])
    bare = {sha256 for path, sha256 in entries if not path}
    if not bare or len(bare) < len({*entries}):
        return Found(None, f"has no SHA-256 for {name}")
    if len(bare) > 1:
        return Found(None, f"has {len(bare)} SHA-256 without a name, so none is known to be that of {name}")
    if not alone:
        return Found(None, f"has one SHA-256 without a name, and {name} is not the only file that needs one")
    return Found(bare.pop())


def checksum_for(text: str, name: str, alone: bool = True) -> str | None:
    """The hash alone; null when there is none."""
    return look_up(text, name, alone).sha256
