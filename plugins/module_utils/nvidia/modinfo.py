# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Kernel module files on disk: version, licence, signature.

A module says of itself in the ELF section C(.modinfo) what ``modinfo`` prints, and a signature is appended to the file.
Reading the file works below any root; only Zstandard-compressed modules, which the standard library cannot read before
Python 3.14, need the ``modinfo`` program.
"""

from __future__ import annotations

import gzip
import lzma
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..machine import Machine
from .values import is_index

#: The four parts of the driver that CUDA programs and displays need (spaced#22).
PARTS = ("nvidia", "nvidia_modeset", "nvidia_uvm", "nvidia_drm")
#: Written at the very end of a signed module file (Linux, Documentation/admin-guide/module-signing.rst).
_SIGNED = b"~Module signature appended~\n"
#: Object identifier 2.5.4.3 of X.500, as DER writes it.
_COMMON_NAME = b"\x55\x04\x03"
#: Folders below /lib/modules/KERNEL where drivers are put: DKMS, other builds, Ubuntu's prebuilt modules.
_FOLDERS = ("updates/dkms", "updates", "extra", "weak-updates", "kernel/drivers/video", "kernel/drivers/char/drm")
_FILE = re.compile(r"^(?P<name>nvidia(?:[-_][a-z0-9-_]+?)?)\.ko(?:\.(?P<packing>gz|xz|zst))?$")


@dataclass(frozen=True)
class Module:
    """The nvidia module for one kernel, as it lies on disk.

    ``flavour`` is ``open`` or ``proprietary`` by licence, null where that could not be read; ``signed`` whether a
    signature is attached; ``missing`` names the PARTS that are not there.
    """

    kernel: str
    path: str | None
    version: str | None
    licence: str | None
    signed: bool | None
    signer: str | None
    missing: tuple[str, ...] = ()

    @property
    def flavour(self) -> str | None:
        return flavour_of(self.licence)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "missing": list(self.missing), "flavour": self.flavour}


def flavour_of(licence: str | None) -> str | None:
    """``Dual MIT/GPL`` is the open kernel module, ``NVIDIA`` the proprietary one."""
    if not licence:
        return None
    return "open" if "GPL" in licence else "proprietary"


def parse_text(text: str) -> dict[str, str]:
    """The first value of each field of ``modinfo``'s output."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key and not key[0].isspace():
            found.setdefault(key.strip(), value.strip())
    return found


def parse_image(data: bytes) -> dict[str, str]:
    """The fields of C(.modinfo) of an ELF image; ``signed`` is added. Empty when it is no ELF file."""
    if data[:4] != b"\x7fELF" or len(data) < 64:
        return {}
    wide, order = data[4] == 2, "<" if data[5] == 1 else ">"
    try:
        section = _section(data, wide, order)
    except (struct.error, IndexError, ValueError):
        return {}
    found: dict[str, str] = {}
    for item in section.split(b"\0"):
        key, equals, value = item.decode("utf-8", "replace").partition("=")
        if equals:
            found.setdefault(key, value)
    if found:
        found["signed"] = "yes" if data.endswith(_SIGNED) else ""
        signer = _signer(data) if found["signed"] else None
        if signer:
            found["signer"] = signer
    return found


def _signer(data: bytes) -> str | None:
    """Who signed, as modinfo names it: the common name of the issuer in the signature; null where it has none."""
    try:
        end = len(data) - len(_SIGNED)
        signer_length, key_length, length = struct.unpack(">3xBB3xI", data[end - 12 : end])
        if signer_length:
            # Before Linux 4.3 the name is plain text.
            start = end - 12 - length - key_length - signer_length
            return data[start : start + signer_length].decode("utf-8", "replace")
        return _issuer(data[end - 12 - length : end - 12])
    except (struct.error, IndexError, ValueError):
        return None


def _issuer(message: bytes) -> str | None:
    """The issuer's common name in the first SignerInfo of a SignedData (RFC 5652, 5.1 to 5.3)."""
    (content,) = _values(message)
    signed = _values(_values(content[1])[1][1])[0]
    # The set of SignerInfo is the last part; a SignerInfo is version, issuer with serial number, and more.
    signer = _values(_values(signed[1])[-1][1])[0]
    tag, identity = _values(signer[1])[1]
    if tag != 0x30:
        return None  # it is named by its key
    for _, group in _values(_values(identity)[0][1]):
        for _, attribute in _values(group):
            kind, value = _values(attribute)[:2]
            if kind[1] == _COMMON_NAME:
                return value[1].decode("utf-16-be" if value[0] == 0x1E else "utf-8", "replace")
    return None


def _values(data: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of the DER values in a row."""
    found, place = [], 0
    while place < len(data):
        tag, length, place = data[place], data[place + 1], place + 2
        if length & 0x80:
            size = length & 0x7F
            length, place = int.from_bytes(data[place : place + size], "big"), place + size
        if place + length > len(data):
            raise ValueError("a value is longer than what holds it")
        found.append((tag, data[place : place + length]))
        place += length
    return found


def _section(data: bytes, wide: bool, order: str) -> bytes:
    if wide:
        table, size, count, names = (
            struct.unpack_from(f"{order}Q", data, 40)[0],
            *struct.unpack_from(f"{order}HHH", data, 58),
        )
        row, name_at, offset_at = f"{order}IIQQQQ", 0, 4
    else:
        table, size, count, names = (
            struct.unpack_from(f"{order}I", data, 32)[0],
            *struct.unpack_from(f"{order}HHH", data, 46),
        )
        row, name_at, offset_at = f"{order}IIIIII", 0, 4
    rows = [struct.unpack_from(row, data, table + n * size) for n in range(count)]
    strings = rows[names]
    texts = data[strings[offset_at] : strings[offset_at] + strings[offset_at + 1]]
    for entry in rows:
        end = texts.find(b"\0", entry[name_at])
        if texts[entry[name_at] : end] == b".modinfo":
            return data[entry[offset_at] : entry[offset_at] + entry[offset_at + 1]]
    return b""


def read_file(path: Path) -> dict[str, str]:
    """Fields of a module file; empty where it cannot be read by us (absent, Zstandard, damaged)."""
    try:
        if path.suffix == ".xz":
            return parse_image(lzma.decompress(path.read_bytes()))
        if path.suffix == ".gz":
            return parse_image(gzip.decompress(path.read_bytes()))
        if path.suffix == ".zst":
            return {}
        return parse_image(path.read_bytes())
    except (OSError, lzma.LZMAError, EOFError):
        return {}


def part_of(file_name: str) -> str | None:
    """Which of PARTS a file is, whatever the distribution calls it (``nvidia-current-uvm.ko`` is ``nvidia_uvm``)."""
    match = _FILE.match(file_name)
    if match is None:
        return None
    words = re.split(r"[-_]", match["name"])[1:]
    kinds = {"modeset", "uvm", "drm"}
    if words and words[-1] in kinds:
        return f"nvidia_{words[-1]}"
    if not words or all(word in {"current", "tesla", "legacy", "srv", "open"} or is_index(word) for word in words):
        return "nvidia"
    return None


def module_files(machine: Machine, kernel: str) -> dict[str, str]:
    """Path of each part for a kernel, by folder listings and by modules.dep."""
    root = f"/lib/modules/{kernel}"
    found: dict[str, str] = {}
    folders = [*_FOLDERS, *(f"kernel/{name}" for name in machine.listdir(f"{root}/kernel") if "nvidia" in name)]
    for folder in folders:
        _collect(found, f"{root}/{folder}", machine.listdir(f"{root}/{folder}"))
    if "nvidia" not in found:
        for line in (machine.read(f"{root}/modules.dep") or "").splitlines():
            path = line.split(":", 1)[0]
            if "nvidia" in path and machine.exists(f"{root}/{path}"):
                folder, _, name = path.rpartition("/")
                _collect(found, f"{root}/{folder}", [name])
    return found


def _collect(found: dict[str, str], folder: str, names: Iterable[str]) -> None:
    for name in names:
        part = part_of(name)
        if part is not None:
            found.setdefault(part, f"{folder}/{name}")


def is_on_disk(machine: Machine, kernel: str) -> bool:
    """Whether ``kernel`` has the nvidia module; no file is read for it, which takes seconds where it is compressed."""
    return "nvidia" in module_files(machine, kernel) or (machine.is_capture and on_disk(machine, kernel) is not None)


def on_disk(machine: Machine, kernel: str) -> Module | None:
    """The nvidia module that ``kernel`` would load, or null where there is none.

    Files are read first; ``modinfo`` is asked where they do not tell (a capture, a compressed module).
    """
    files = module_files(machine, kernel)
    facts: Mapping[str, str] = {}
    if "nvidia" in files:
        facts = read_file(machine.path(files["nvidia"]))
    if not facts and ("nvidia" in files or machine.is_capture):
        for name in ("nvidia", "nvidia-current"):
            answer = machine.run(_modinfo(machine, kernel, name))
            if answer.ok and answer.stdout.strip():
                text = parse_text(answer.stdout)
                facts = {**text, "signed": "yes" if text.get("signer") or text.get("sig_id") else ""}
                break
    if "nvidia" not in files and not facts:
        return None
    missing = []
    for part in PARTS[1:]:
        known = part in files
        if not known and machine.is_capture:
            known = machine.run(_modinfo(machine, kernel, part)).ok
        if not known:
            missing.append(part)
    return Module(
        kernel=kernel,
        path=files.get("nvidia") or facts.get("filename"),
        version=facts.get("version"),
        licence=facts.get("license"),
        signed=bool(facts["signed"]) if "signed" in facts else None,
        signer=facts.get("signer"),
        missing=tuple(missing),
    )


def _modinfo(machine: Machine, kernel: str, name: str) -> list[str]:
    below = [] if machine.is_capture or str(machine.sysroot) == "/" else ["-b", str(machine.sysroot)]
    return ["modinfo", *below, "-k", kernel, name]
