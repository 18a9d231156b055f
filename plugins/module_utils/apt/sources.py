# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where apt gets packages from: the entries of its source files in both formats, and keys that sign archives."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..machine import Machine

FOLDER = "/etc/apt/sources.list.d"
#: What apt fetched of the archives.
LISTS = "/var/lib/apt/lists"
#: The role cuda_toolkit's own file; it writes none where another file names the same archive.
TOOLKIT_FILE = f"{FOLDER}/volta-llm-cuda.sources"


#: What entries of one archive must agree on, or apt refuses every command (measured with apt 2.6).
AGREED = (
    *("allow-downgrade-to-insecure", "allow-insecure", "allow-weak", "check-date", "check-valid-until"),
    *("date-max-future", "inrelease-path", "trusted", "valid-until-max", "valid-until-min"),
)
#: Of these apt 2.6 takes none in deb822 for the same as in the one-line format.
ONE_LINE_ONLY = ("allow-downgrade-to-insecure", "allow-insecure", "allow-weak", "inrelease-path")
#: Options of the one-line format that have another name in deb822; their values are lists (sources.list(5)).
_LIST_OPTIONS = {"arch": "architectures", "lang": "languages", "target": "targets"}
_SIGNS = {"+": "-add", "-": "-remove", "": ""}


@dataclass(frozen=True)
class Entry:
    """One archive: an address with one suite. ``components`` is empty for a flat repository (``suite`` ends in /)."""

    file: str
    kind: str
    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def site(self) -> str:
        return urlsplit(self.uri).hostname or ""

    @property
    def archive(self) -> tuple[str, str]:
        """What apt takes for one archive: its entries must agree on who signs it."""
        return self.uri.rstrip("/") + "/", self.suite

    @property
    def agreed(self) -> dict[str, str]:
        """What another entry of the same archive must say too: who signs it, and the options of AGREED."""
        said = {name: value.strip().lower() for name, value in self.options if name in AGREED}
        words = {name: {"true": "yes", "false": "no"}.get(value, value) for name, value in said.items()}
        return {**words, **({"signed-by": _key(self.signed_by)} if self.signed_by.strip() else {})}


def read(machine: Machine) -> list[Entry]:
    """The entries for binary packages that are in use, in the order in which apt reads them."""
    found = list(parse_lines("/etc/apt/sources.list", machine.read("/etc/apt/sources.list") or ""))
    for name in machine.listdir(FOLDER):
        path = f"{FOLDER}/{name}"
        if re.fullmatch(r"[A-Za-z0-9_.-]+\.list", name):
            found += parse_lines(path, machine.read(path) or "")
        elif re.fullmatch(r"[A-Za-z0-9_.-]+\.sources", name):
            found += parse_stanzas(path, machine.read(path) or "")
    return [entry for entry in found if entry.kind == "deb"]


def parse_lines(file: str, text: str) -> Iterator[Entry]:
    """The one-line format (sources.list(5))."""
    for line in text.splitlines():
        line = line.split("#", 1)[0].strip()
        match = re.match(r"(deb|deb-src)\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<rest>.+)$", line)
        if match is None:
            continue
        options = dict(part.split("=", 1) for part in (match["options"] or "").split() if "=" in part)
        options = {key.lower(): value for key, value in options.items()}
        suite, *components = match["rest"].split()
        signed_by = options.pop("signed-by", "")
        yield Entry(file, match[1], match["uri"], suite, tuple(components), signed_by, tuple(sorted(options.items())))


def parse_stanzas(file: str, text: str) -> Iterator[Entry]:
    """The deb822 format; a key within the stanza stays as it is written there."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for block in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line[:1] in (" ", "\t"):
                fields[key] = f"{fields.get(key, '')}\n{line}"
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if fields.get("enabled", "yes").strip().lower() in ("no", "false", "0", "off", "disable", "without"):
            continue
        signed_by = fields.get("signed-by", "").strip("\n") if "\n" in fields.get("signed-by", "") else fields.get(
            "signed-by", ""
        ).strip()  # fmt: skip
        known = {"types", "uris", "suites", "components", "signed-by", "enabled"}
        options = tuple(sorted((name, value) for name, value in fields.items() if name not in known))
        for kind in fields.get("types", "").split():
            for uri in fields.get("uris", "").split():
                for suite in fields.get("suites", "").split():
                    components = tuple(fields.get("components", "").split())
                    yield Entry(file, kind, uri, suite, components, signed_by, options)


def origin(machine: Machine, entry: Entry) -> str | None:
    """Whose archive it is, by the Release file that apt fetched; null where there is none, or it does not say."""
    place = entry.uri.partition("://")[2].rpartition("@")[2].rstrip("/")
    quoted = re.sub(r"[^\w.:/+-]|_", lambda match: f"%{ord(match[0]):02x}", f"{place}/dists/{entry.suite}")
    name = quoted.replace("/", "_")
    for kind in ("InRelease", "Release"):
        match = re.search(r"(?m)^Origin:[ \t]*(.*)$", machine.read(f"{LISTS}/{name}_{kind}") or "")
        if match:
            return match[1].strip()
    return None


def stanza(
    uris: Iterable[str],
    suites: Iterable[str],
    components: Iterable[str],
    signed_by: str,
    options: Iterable[tuple[str, str]] = (),
) -> str:
    """One archive in the deb822 format; ``options`` are those of an entry in either format."""
    lines = ["Types: deb", f"URIs: {' '.join(uris)}", f"Suites: {' '.join(suites)}"]
    named = list(components)
    if named:
        lines.append(f"Components: {' '.join(named)}")
    for option, value in options:
        name = option.rstrip("+-")
        if name.startswith("x-"):
            continue
        text = value.replace(",", " ") if name in _LIST_OPTIONS else value
        lines.append(f"{(_LIST_OPTIONS.get(name, name) + _SIGNS.get(option[len(name) :], '')).title()}: {text}")
    if signed_by:
        lines.append(f"Signed-By:{signed_by if signed_by.startswith(chr(10)) else ' ' + signed_by}")
    return "\n".join(lines) + "\n"


def disagreements(entries: Iterable[Entry]) -> list[tuple[Entry, Entry]]:
    """Entries of one archive that contradict each other, as by different keys: apt then refuses to work at all."""
    first: dict[tuple[str, str], Entry] = {}
    found = []
    for entry in entries:
        known = first.setdefault(entry.archive, entry)
        if known.agreed != entry.agreed:
            found.append((known, entry))
    return found


def _key(signed_by: str) -> str:
    return "\n".join(line.strip() for line in signed_by.strip().splitlines())


def fingerprints(keyring: bytes) -> list[str]:
    """Fingerprints of the primary keys in a keyring, armoured or not. ValueError when it is none.

    A version 4 key's fingerprint is the SHA-1 of its packet (RFC 4880, 12.2); apt's own keys are all of that version.
    """
    found = []
    for tag, body in _packets(_unarmoured(keyring)):
        if tag == 6:
            if body[:1] != b"\x04":
                raise ValueError(f"a key of version {body[0] if body else '?'} is not supported")
            packet = b"\x99" + len(body).to_bytes(2, "big") + body
            found.append(hashlib.sha1(packet, usedforsecurity=False).hexdigest().upper())
    if not found:
        raise ValueError("no public key is in it")
    return found


def _unarmoured(data: bytes) -> bytes:
    if b"-----BEGIN PGP PUBLIC KEY BLOCK-----" not in data:
        return data
    found = b""
    blocks = re.findall(
        rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(.*?)-----END PGP PUBLIC KEY BLOCK-----", data, re.DOTALL
    )
    for block in blocks:
        # Headers end with an empty line; the last line, which starts with =, is a checksum.
        body = re.split(rb"\r?\n[ \t]*\r?\n", block, maxsplit=1)[-1] if b": " in block else block
        lines = [line.strip() for line in body.splitlines() if line.strip() and not line.startswith(b"=")]
        try:
            found += base64.b64decode(b"".join(lines), validate=True)
        except binascii.Error as exc:
            raise ValueError(f"the armour is damaged: {exc}") from exc
    return found


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(data):
        head = data[place]
        place += 1
        if not head & 0x80:
            raise ValueError("it is no OpenPGP keyring")
        try:
            if head & 0x40:
                tag, size = head & 0x3F, data[place]
                place += 1
                if 192 <= size < 224:
                    size = ((size - 192) << 8) + data[place] + 192
                    place += 1
                elif size == 255:
                    size = int.from_bytes(data[place : place + 4], "big")
                    place += 4
                elif size >= 224:
                    raise ValueError("it is no OpenPGP keyring")
            else:
                tag, width = (head >> 2) & 0xF, (1, 2, 4, 0)[head & 3]
                size = int.from_bytes(data[place : place + width], "big") if width else len(data) - place
                place += width
        except IndexError:
            raise ValueError("the keyring ends in the middle") from None
        if place + size > len(data):
            raise ValueError("the keyring ends in the middle")
        yield tag, data[place : place + size]
        place += size
