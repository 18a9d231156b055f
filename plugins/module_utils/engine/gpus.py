# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The cards that a built engine is to be tried on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..machine import Machine


@dataclass(frozen=True)
class Cards:
    """What the driver shows: its version, and each card's compute capability as digits (``70``; null where unknown)."""

    driver: str
    capabilities: tuple[str | None, ...]

    @property
    def count(self) -> int:
        return len(self.capabilities)


def loaded_driver(machine: Machine) -> str | None:
    """The version of the loaded kernel module, from one file; null where none is loaded."""
    found = re.search(
        r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", machine.read("/proc/driver/nvidia/version") or ""
    )
    return found.group(1) if found else None


def read_cards(machine: Machine, nvidia_smi: str) -> Cards | None:
    """Ask nvidia-smi; null where there is none or it finds no card: then there is nothing to try an engine on."""
    answer = machine.run([nvidia_smi, "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"], timeout=120)
    if not answer.ok:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if "," in line]
    if not rows:
        return None
    shown = [row[1].replace(".", "") for row in rows]
    return Cards(rows[0][0], tuple(name if name.isdigit() else None for name in shown))


def uncovered(capability: str, have: list[str]) -> bool:
    """Does no ``sm_`` code in ``have`` run on such a card? Code runs on its own and on later minor versions."""
    major, minor = int(capability[:-1]), int(capability[-1])
    for name in have:
        digits = name.removeprefix("sm_")
        if digits.isdigit() and int(digits[:-1]) == major and int(digits[-1]) <= minor:
            return False
        if digits in (f"{capability}a", f"{capability}f"):
            return False
    return True
