# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Running nvidia-smi and recognising what it says when something is wrong.

The exit status alone tells little: error texts come with status 0 from some drivers and wrappers, and a table with one
dead card in it comes with a status that is not 0. So the text is always looked at, and usable parts are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..faults import Fault
from ..machine import Completed, Machine
from .gpu_faults import GPU
from .values import bus_id, clean

#: Whole-machine conditions, in the order in which they are looked for: (fault code, state of gpu_inventory, pattern).
_CONDITIONS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("driver_mismatch", "driver_mismatch", re.compile(r"driver/library version mismatch", re.IGNORECASE)),
    (
        "no_driver",
        "no_driver",
        re.compile(
            r"couldn['\u2019]?t communicate with the NVIDIA driver|Failed to initialize NVML: Driver Not Loaded"
            r"|NVIDIA (?:kernel )?driver is not loaded|Driver is not loaded",
            re.IGNORECASE,
        ),
    ),
    ("no_devices", "no_devices", re.compile(r"^\s*No (?:CUDA |NVIDIA )?devices (?:were )?found", re.I | re.M)),
    (
        "nvidia_smi_missing",
        "no_driver",
        re.compile(
            r"nvidia-smi(?:['\u2019\"]|\.exe)?:? (?:command )?not found|nvidia-smi: No such file or directory"
            r"|Command ['\"]nvidia-smi['\"] not found|couldn'?t find libnvidia-ml\.so"
            r"|error while loading shared libraries",
            re.IGNORECASE,
        ),
    ),
    (
        "nvml_unavailable",
        "no_driver",
        re.compile(
            r"Failed to initialize NVML: (?!GPU is lost)|NVML.*insufficient permission|NVIDIA-SMI has failed because",
            re.IGNORECASE,
        ),
    ),
)

#: A card that the driver cannot reach. It may stand alone, before a table, or between the rows of one.
_LOST = re.compile(
    r"Unable to determine the device handle for (?:the )?(?:GPU|gpu)?|(?<!\[)GPU is lost|fallen off the bus"
    r"|Failed to initialize NVML: GPU is lost",
    re.IGNORECASE,
)
#: "GPU3: 0000:5F:00.0" and "GPU2: Unknown Error"; not the bus id glued to the word.
_INDEX = re.compile(r"\bGPU(\d{1,2}):(?![0-9A-Fa-f])", re.IGNORECASE)
_RESET = re.compile(r"requires (?:a )?reset", re.IGNORECASE)
_INFOROM = re.compile(r"infoROM is corrupted", re.IGNORECASE)

_REMEDY = {
    "no_pci_device": "check that the cards sit in their slots and have power; for a virtual machine, that they are "
    "passed through",
    "no_driver": "load it with `modprobe nvidia`; if that fails, read `journalctl -k -b | grep -i nvrm` and run the "
    "module volta.llm.driver_state, which names the cause",
    "nvidia_smi_missing": "install the driver's tools (package nvidia-utils-535 or nvidia-smi), or name the program "
    "with `nvidia_smi`",
    "driver_mismatch": "reboot so that the module on disk is loaded; if it comes back, run volta.llm.driver_state",
    "nvml_unavailable": "run nvidia-smi as root on the host itself; in a container or unit, check access to "
    "/dev/nvidia*",
    "no_devices": "read `journalctl -k -b | grep -i nvrm`: the driver says there why it does not use the cards",
    "nvidia_smi_timeout": "look for a lost GPU (`journalctl -k -b | grep -i xid`), enable persistence mode, or raise "
    "`timeout`",
    "nvidia_smi_unparsable": "run the command by hand; if its output looks right, report it with the output",
    "gpu_lost": "read `journalctl -k -b | grep -i xid`, then switch the machine off and on (a warm reboot does not "
    "reset a card that is off the bus); if it comes back, reseat the card, check its power and cooling, try another "
    "slot, and replace it",
    "gpu_requires_reset": "stop what uses the GPU and run `nvidia-smi --gpu-reset -i INDEX`, or reboot",
    "inforom_corrupt": "the card works on, but ask its vendor: the InfoROM cannot be mended on site",
}


def remedy(code: str) -> str:
    """What to do about a condition of the whole machine or a lost card."""
    return _REMEDY[code]


@dataclass(frozen=True)
class Answer:
    """What nvidia-smi said.

    ``text`` is the cleaned standard output followed by standard error. ``state`` is null, or the condition of the
    whole machine that the text names (``no_driver``, ``driver_mismatch``, ``no_devices``, ``timeout``); ``faults`` are
    the conditions and lost cards found. ``lost`` holds the bus ids of cards that cannot be reached, as far as given.
    """

    completed: Completed
    text: str
    state: str | None
    faults: tuple[Fault, ...]
    lost: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """False when there is nothing to parse because of a condition of the whole machine."""
        return self.state is None

    def joined(self, other: Answer) -> Answer:
        """This answer with the text, faults and lost cards of another, whose state counts."""
        return Answer(
            other.completed,
            f"{self.text}\n{other.text}",
            other.state,
            tuple(dict.fromkeys((*self.faults, *other.faults))),
            tuple(dict.fromkeys((*self.lost, *other.lost))),
        )


class NvidiaSmi:
    """nvidia-smi on one machine. ``program`` is a name (looked up in PATH) or a path."""

    def __init__(self, machine: Machine, program: str = "nvidia-smi") -> None:
        self.machine = machine
        self.program = program

    def ask(self, *arguments: str, timeout: float | None = None) -> Answer:
        """Run it with ``arguments``; never raises for what the program does."""
        limit = self.machine.timeout if timeout is None else timeout
        return judge(self.machine.run([self.program, *arguments], timeout=limit), limit, self._on_pci)

    def _on_pci(self, card: str) -> bool | None:
        """Whether the PCI bus still shows a card; null where sysfs is not there to say."""
        devices = self.machine.listdir("/sys/bus/pci/devices")
        return card in {bus_id(name) for name in devices} if devices else None


def _cannot_say(card: str) -> bool | None:
    return None


def judge(completed: Completed, timeout: float = 30.0, on_pci: Callable[[str], bool | None] = _cannot_say) -> Answer:
    """Recognise the conditions in an answer; ``timeout`` is only quoted, ``on_pci`` tells whether a card is there."""
    text = clean("\n".join(part for part in (completed.stdout, completed.stderr) if part))
    command = shown_command(completed)
    if completed.timed_out:
        fault = GPU.fault(
            "nvidia_smi_timeout",
            command,
            f"did not answer within {timeout:g} s; the number of GPUs is not known",
            remedy("nvidia_smi_timeout"),
        )
        return Answer(completed, text, "timeout", (fault,), ())
    if completed.missing:
        fault = GPU.fault(
            "nvidia_smi_missing",
            completed.argv[0],
            f"cannot be started: {completed.stderr or 'no such program'}",
            remedy("nvidia_smi_missing"),
        )
        return Answer(completed, text, "no_driver", (fault,), ())
    for code, state, pattern in _CONDITIONS:
        if match := pattern.search(text):
            line = _line_at(text, match.start())
            extra = re.search(r"NVML library version:\s*([\d.]+)", text) if code == "driver_mismatch" else None
            message = f"nvidia-smi says: {line}" + (f" (libraries: {extra.group(1)})" if extra else "")
            return Answer(completed, text, state, (GPU.fault(code, "driver", message, remedy(code)),), ())
    faults, lost = _card_conditions(text, on_pci)
    return Answer(completed, text, None, tuple(faults), tuple(lost))


#: What follows from a lost card's presence on the PCI bus.
PRESENCE = {
    True: " (it is still on the PCI bus)",
    False: " (it is no longer on the PCI bus: power or slot)",
    None: "",
}


def _card_conditions(text: str, on_pci: Callable[[str], bool | None]) -> tuple[list[Fault], list[str]]:
    """Lost cards and damaged InfoROMs that lines of the text name; one fault a card."""
    faults: list[Fault] = []
    lost: list[str] = []
    for line in text.splitlines():
        if _LOST.search(line):
            card = bus_id(line)
            index = _INDEX.search(line)
            subject = card or (f"GPU{index.group(1)}" if index else "GPU")
            reason = line.strip()
            code = "gpu_requires_reset" if _RESET.search(line) else "gpu_lost"
            if card is not None and card in lost:
                continue
            if card is not None:
                lost.append(card)
            presence = PRESENCE[on_pci(card)] if card else ""
            message = f"nvidia-smi says: {_short(reason)}{presence}"
            faults.append(GPU.fault(code, subject, message, remedy(code)))
        elif _INFOROM.search(line):
            faults.append(
                GPU.fault("inforom_corrupt", bus_id(line) or "GPU", _short(line.strip()), remedy("inforom_corrupt"))
            )
    return list(dict.fromkeys(faults)), lost


def shown_command(completed: Completed) -> str:
    """The command in a message: without the long values of its options."""
    return " ".join((completed.argv[0].rsplit("/", 1)[-1], *(word.split("=", 1)[0] for word in completed.argv[1:])))


def unparsable(answer: Answer, code: str = "nvidia_smi_unparsable", what: str = "GPU table") -> Fault:
    """The fault for an answer in which nothing was recognised."""
    begin = next((line.strip() for line in answer.text.splitlines() if line.strip()), "")
    status = "" if answer.completed.ok else f" (exit status {answer.completed.rc})"
    found = f"it begins with: {_short(begin)}" if begin else "it is empty"
    advice = remedy("nvidia_smi_unparsable")
    if "Failed to run topology matrix" in answer.text:
        advice = "a GPU that is lost makes this command fail: mend that first (`nvidia-smi`, volta.llm.gpu_inventory)"
    return GPU.fault(code, shown_command(answer.completed), f"no {what} in the answer{status}; {found}", advice)


def _line_at(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return _short(text[start : end if end >= 0 else None].strip())


def _short(text: str, limit: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
