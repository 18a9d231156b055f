# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Xid numbers: what the driver writes to the kernel log when something goes wrong on a GPU.

Meanings and actions follow NVIDIA's "Xid Errors" guide (docs.nvidia.com/deploy/xid-errors, the catalogue for Volta and
older and the one for Ampere and newer) and "Dynamic Page Retirement" (docs.nvidia.com/deploy/dynamic-page-retirement);
wording is ours. Where a public report adds to that, it is named in ``source``.
"""

from __future__ import annotations

from dataclasses import dataclass

GUIDE = "docs.nvidia.com/deploy/xid-errors"
RETIREMENT = "docs.nvidia.com/deploy/dynamic-page-retirement"

#: What an Xid says about: the card itself, its links, the driver, or the program that ran on the card.
KINDS = ("hardware", "link", "driver", "program", "information")


@dataclass(frozen=True)
class Xid:
    """One number: ``kind`` is one of KINDS; then ``meaning``, usual ``cause``, ``remedy`` (what to do), ``source``."""

    number: int
    kind: str
    meaning: str
    cause: str
    remedy: str
    source: str = GUIDE

    @property
    def action(self) -> str:
        """What an operator has to do: ``replace`` (power-cycle, reseat, replace), ``reset``, or ``look``."""
        if self.number in _REPLACE:
            return "replace"
        return "reset" if self.number in _RESET_NEEDED else "look"


_REPLACE = frozenset({64, 79, 143})
_RESET_NEEDED = frozenset({38, 48, 56, 57, 58, 61, 62, 74, 95, 119, 120, 136, 137, 140, *range(144, 151)})


_POWER_CYCLE = (
    "Power the machine off and on (a warm reboot does not reset a card that is off the bus), reseat the card and its "
    "power cables; if it comes back, swap slots to tell card from slot, then replace it."
)
_RESET = (
    "Stop the programs on the GPU and reset it (nvidia-smi --gpu-reset -i GPU) or reboot; report it if it comes back."
)
_PROGRAM = "Look for the fault in the program named in the log first; run it on another GPU to tell it from the card."

XIDS: dict[int, Xid] = {
    row.number: row
    for row in (
        Xid(
            13,
            "program",
            "graphics or compute engine exception",
            "a program read or wrote out of bounds; rarely the card or its memory",
            _PROGRAM,
        ),
        Xid(
            31,
            "program",
            "GPU memory page fault",
            "a program accessed an address that it has not mapped; rarely the driver or the card",
            _PROGRAM,
        ),
        Xid(
            32,
            "driver",
            "invalid or corrupted push buffer stream",
            "a fault on the PCIe bus, a driver bug, rarely the card",
            "Check the PCIe link (generation, width, replays), reseat the card; update within the driver branch.",
        ),
        Xid(
            38,
            "driver",
            "driver firmware error",
            "a driver bug or the card",
            _RESET,
        ),
        Xid(
            43,
            "program",
            "GPU stopped processing",
            "a program of the user met a fault of its own; the card stays usable",
            _PROGRAM,
        ),
        Xid(
            45,
            "information",
            "preemptive clean-up after an earlier error",
            "follows another Xid, or the program was killed",
            "Look at the Xid before it; on its own, when a program was stopped, it needs nothing.",
        ),
        Xid(
            48,
            "hardware",
            "double bit ECC error",
            "memory of the card failed in a way that cannot be corrected",
            "Reboot so that the page is retired (Xid 63 confirms it); more than a few, or Xid 64: replace the card.",
            RETIREMENT,
        ),
        Xid(
            56,
            "hardware",
            "display engine error",
            "the card or the driver",
            _RESET,
        ),
        Xid(
            57,
            "hardware",
            "error programming the video memory interface",
            "the card or the driver",
            _RESET,
        ),
        Xid(
            58,
            "hardware",
            "unstable video memory interface detected, or EDC error",
            "memory of the card, or its clocks were raised",
            _RESET,
        ),
        Xid(
            61,
            "driver",
            "internal micro-controller breakpoint or warning",
            "firmware of the card met a state that it does not know",
            _RESET,
        ),
        Xid(
            62,
            "hardware",
            "internal micro-controller halt",
            "firmware of the card stopped: the card, its power or heat",
            _RESET,
        ),
        Xid(
            63,
            "information",
            "memory page retired (Volta and older) or row marked for remapping (Ampere and newer)",
            "an ECC error was contained as intended",
            "Reload the driver or reboot when convenient, so that the page or row is no longer used.",
            RETIREMENT,
        ),
        Xid(
            64,
            "hardware",
            "retiring a memory page or remapping a row failed",
            "the table of retired pages is full or cannot be written",
            "Replace the card.",
            RETIREMENT,
        ),
        Xid(
            68,
            "driver",
            "video processor exception",
            "a program or the driver",
            _RESET,
        ),
        Xid(
            69,
            "program",
            "graphics or compute engine class error",
            "a program or the driver sent a command that the engine refused",
            _PROGRAM,
        ),
        Xid(
            74,
            "link",
            "NVLink error",
            "a link to another card or a switch failed: seating, dirt, the card at either end",
            "Check nvidia-smi nvlink --status and --errorcounters, reseat the cards, reboot; the same link again: "
            "replace the card that stays with it after swapping.",
        ),
        Xid(
            79,
            "hardware",
            "GPU has fallen off the bus",
            "the card cannot be reached over PCIe: power, heat, seating, riser, the card",
            _POWER_CYCLE,
        ),
        Xid(
            92,
            "hardware",
            "high rate of single bit ECC errors",
            "memory of the card is wearing out",
            "Watch the retired pages; when they grow week by week, replace the card.",
        ),
        Xid(
            94,
            "hardware",
            "contained memory error",
            "an uncorrectable error was kept to one program (Ampere and newer)",
            "Restart the program; reset the GPU when convenient.",
        ),
        Xid(
            95,
            "hardware",
            "uncontained memory error",
            "an uncorrectable error may have reached several programs (Ampere and newer)",
            "Stop all programs on the GPU and reset it or reboot; repeated: replace the card.",
        ),
        Xid(
            109,
            "driver",
            "context switch time-out",
            "a program kept the engine, or the driver",
            _RESET,
        ),
        Xid(
            119,
            "driver",
            "time-out waiting for the GPU's system processor (GSP)",
            "firmware of the card does not answer (Turing and newer; Volta has no GSP)",
            "Power-cycle the machine; repeated: update within the driver branch, or run without GSP firmware.",
        ),
        Xid(
            120,
            "driver",
            "error on the GPU's system processor (GSP)",
            "firmware of the card failed (Turing and newer)",
            _RESET,
        ),
        Xid(
            121,
            "link",
            "chip-to-chip link error was corrected",
            "Grace Hopper only",
            "Watch it; reset when convenient.",
        ),
        Xid(
            136,
            "link",
            "link training failed",
            "a link did not come up",
            _RESET,
        ),
        Xid(
            137,
            "link",
            "NVLink privilege error",
            "a peer access to memory that is not mapped, usually after another Xid",
            _RESET,
        ),
        Xid(
            140,
            "hardware",
            "unrecovered ECC error",
            "memory of the card",
            _RESET,
        ),
        Xid(
            143,
            "hardware",
            "GPU initialization failed",
            "the card did not start",
            _POWER_CYCLE,
        ),
        *(
            Xid(
                number,
                "link",
                f"NVLink error ({unit})",
                "the link, a switch, or the card at its other end (Blackwell and newer)",
                "Look at the sub-code in NVIDIA's catalogue; reset the GPU; repeated: check both ends of the link.",
                f"{GUIDE}; open-gpu-kernel-modules#1150, gpud#1174",
            )
            for number, unit in (
                (144, "SAW"),
                (145, "RLW"),
                (146, "TLW"),
                (147, "TREX"),
                (148, "NVLPW_CTRL"),
                (149, "NETIR"),
                (150, "MSE"),
            )
        ),
        Xid(
            154,
            "information",
            "recovery action of the GPU changed",
            "names what the card needs after the Xid before it",
            "Do what the line names (None, GPU Reset Required, Node Reboot Required, Drain and Reset).",
        ),
    )
}


def explain(number: int) -> Xid:
    """The row of a number; numbers that the table does not have get an honest one."""
    return XIDS.get(number) or Xid(
        number,
        "driver",
        "not in our table",
        "unknown",
        f"Look the number up in NVIDIA's catalogue ({GUIDE}).",
    )
