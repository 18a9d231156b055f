# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Checksum files in the forms publishers use."""

from __future__ import annotations

import posixpath
import re

_HEX = r"[0-9A-Fa-f]{64}"
#: sha256sum: "hash  name" (text) or "hash *name" (binary); a name with odd characters is escaped, after a backslash.
_COREUTILS = re.compile(rf"^\\?({_HEX})[ \t]+\*?(\S.*)$")
#: BSD and openssl: "SHA256 (name) = hash", "SHA2-256(name)= hash".
_BSD = re.compile(rf"^SHA(?:2-)?256 ?\((.+)\) ?= ?({_HEX})$", re.IGNORECASE)
_BARE = re.compile(rf"^(?:sha256:)?({_HEX})$", re.IGNORECASE)


def parse_checksums(text: str) -> dict[str, str]:
    """SHA-256 (lower case) by file name; a bare hash stands under the empty name.

    Names lose their folder ("./a/model.gguf" is "model.gguf"). Lines in other forms (comments, other hashes) are
    passed over.
    """
    found: dict[str, str] = {}
    for raw in text.lstrip("\ufeff").splitlines():
        line = raw.strip()
        if match := _BARE.match(line):
            found[""] = match[1].lower()
        elif match := _COREUTILS.match(line):
            found[posixpath.basename(match[2])] = match[1].lower()
        elif match := _BSD.match(line):
            found[posixpath.basename(match[1])] = match[2].lower()
    return found


def checksum_for(text: str, name: str) -> str | None:
    """The hash a checksum file has for ``name``, a bare one where it is the only entry; null when there is none."""
    found = parse_checksums(text)
    return found.get(name) or (found.get("") if len(found) == 1 else None)
