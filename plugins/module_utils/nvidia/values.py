# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Single values as nvidia-smi and sysfs print them: numbers with units, switches, bus ids, and the many ways to say
"no value". Unknown is null with a reason, never 0: a threshold must not pass because a sensor is silent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Colours and underlines: newer drivers underline the header of ``topo -m`` even when writing to a pipe.
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
#: The same sequences where a copy through an editor or a ticket has swallowed the escape character itself.
_ANSI_REST = re.compile(r"(?:\^\[|␛|\\x1b|\\e|\\033|\\u001b)?\[\d{1,3}(?:;\d{1,3})*m", re.IGNORECASE)
#: Control characters but tab and line feed; XML may not hold them, and program names can.
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), 127, 0xFFFE, 0xFFFF])
_INVISIBLE = dict.fromkeys(map(ord, "\ufeff\u200b\u200c\u200d\u2060\x00"))

#: Cells that carry no value, without their brackets. Drivers changed the words (i3pystatus#776) and the brackets.
_NO_VALUE = {
    "": "blank",
    "n/a": "not available",
    "not available": "not available",
    "not supported": "not supported",
    "not found": "not found",
    "unknown error": "unknown error",
    "err!": "read error (ERR!)",
    "err": "read error (ERR!)",
    "gpu requires reset": "the GPU requires a reset",
    "gpu is lost": "the GPU is lost",
    "insufficient permissions": "insufficient permissions",
    "no permission": "insufficient permissions",
    "function not found": "not supported",
    "unknown": "unknown",
    "-": "blank",
}
#: Reasons that mean the card (not its kind) is the trouble.
BROKEN_REASONS = frozenset({"unknown error", "read error (ERR!)", "the GPU requires a reset", "the GPU is lost"})

_NUMBER = re.compile(r"^([+-]?\d+(?:\.\d+)?)\s*([A-Za-z%/]+)?$")
_BUS_ID = re.compile(
    r"(?<![0-9A-Fa-f:.])(?:([0-9A-Fa-f]{3,8}):)?([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.([0-9A-Fa-f])(?![0-9A-Fa-f])"
)
#: Factors to MiB; nvidia-smi prints MiB, older drivers MB with the same meaning.
_TO_MIB = {"mib": 1.0, "mb": 1.0, "kib": 1 / 1024, "kb": 1 / 1024, "gib": 1024.0, "gb": 1024.0}
#: NVML marks an unavailable value with all bits set (32 or 64 of them); some drivers print it as a number. Memory is
#: counted in bytes and printed in MiB, power in mW and printed in W.
_ALL_BITS_32 = (2**32 - 1, 4294967.29, 4294967.295, 4294967.3)
_ALL_BITS_64 = 2**63 - 1
_ALL_BITS_64_MIB = 2**43 - 1


@dataclass(frozen=True)
class Reading:
    """One value: ``value`` is null where there is none, and ``reason`` then says why."""

    value: str | None
    reason: str | None = None


def clean(text: str) -> str:
    """Text without escape sequences, control and invisible characters; no-break spaces become spaces."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_INVISIBLE).replace("\xa0", " ")
    return _ANSI_REST.sub("", _ANSI.sub("", text)).translate(_CONTROL)


def reading(text: str | None) -> Reading:
    """A cell or element text as a value or as the reason why there is none."""
    if text is None:
        return Reading(None, "not reported by this driver")
    stripped = " ".join(text.split())
    bare = stripped[1:-1].strip() if stripped.startswith("[") and stripped.endswith("]") else stripped
    reason = _NO_VALUE.get(bare.lower())
    if reason is None and bare is not stripped:
        # Whatever else stands in brackets is a note of the tool, not a value.
        reason = bare.lower()
    if reason is None and bare.lower() == "requested functionality has been deprecated":
        reason = "not supported"
    return Reading(None, reason) if reason is not None else Reading(stripped)


def all_bits_set(value: float) -> bool:
    """Whether a number is the mark of a value that is not available."""
    return value in _ALL_BITS_32 or value >= _ALL_BITS_64


def number(text: str | None) -> tuple[float | None, str | None]:
    """A number whatever its unit, or null and the reason."""
    got = reading(text)
    if got.value is None:
        return None, got.reason
    match = _NUMBER.match(got.value)
    if match is None:
        return None, f"unreadable: {got.value[:40]}"
    value = float(match.group(1))
    return (None, "not available") if all_bits_set(value) else (value, None)


def mib(text: str | None) -> tuple[int | None, str | None]:
    """A memory size in MiB, or null and the reason. A bare number is MiB (``nounits``)."""
    got = reading(text)
    if got.value is None:
        return None, got.reason
    match = _NUMBER.match(got.value)
    factor = _TO_MIB.get((match.group(2) or "MiB").lower()) if match else None
    if match is None or factor is None or float(match.group(1)) < 0:
        return None, f"unreadable: {got.value[:40]}"
    value = float(match.group(1))
    if all_bits_set(value) or value * factor >= _ALL_BITS_64_MIB:
        return None, "not available"
    return round(value * factor), None


def count(text: str | None) -> tuple[int | None, str | None]:
    """A counter (errors, pages, lanes), or null and the reason."""
    value, reason = number(text)
    if value is None:
        return None, reason
    if value < 0 or value != int(value):
        return None, f"unreadable: {(text or '').strip()[:40]}"
    return int(value), None


def switch(text: str | None) -> tuple[bool | None, str | None]:
    """Enabled/Disabled, Yes/No, On/Off, Active/Not Active as a bool, or null and the reason."""
    got = reading(text)
    if got.value is None:
        return None, got.reason
    word = got.value.lower()
    if word in {"enabled", "yes", "on", "active", "1", "true"}:
        return True, None
    if word in {"disabled", "no", "off", "not active", "0", "false"}:
        return False, None
    return None, f"unreadable: {got.value[:40]}"


def bus_id(text: str | None) -> str | None:
    """The first PCI bus id in ``text`` as sysfs writes it (``0000:3b:00.0``), or null.

    nvidia-smi writes eight digits of domain, logs write four, error texts have been seen with three or none, and glued
    to the word GPU.
    """
    if not text:
        return None
    match = _BUS_ID.search(text.replace("GPU", " ").replace("PCI:", " "))
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}".lower()


def is_index(text: str) -> bool:
    """Whether a text is a whole number as programs write it; ``isdigit`` also takes what ``int`` does not (\u00b2)."""
    return re.fullmatch("[0-9]+", text) is not None


def version_key(version: str) -> tuple[int, ...]:
    """A driver version as numbers: 550.90.07 is older than 550.107.02."""
    return tuple(int(part) for part in re.findall(r"\d+", version))
