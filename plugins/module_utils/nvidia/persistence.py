# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Persistence mode and power limit of the GPUs, on now and after every boot.

The daemon nvidia-persistenced keeps the driver's state while nobody uses a card. Ubuntu's unit starts it with
--no-persistence-mode and stops it again when nothing wants it; Debian's does neither. A drop-in makes both alike. Where
there is no daemon, a unit of our own runs ``nvidia-smi -pm 1`` at boot.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..faults import Catalogue, Fault, FaultError, FaultKind
from ..files import replace_file
from ..machine import Machine
from . import driver
from .gpu_faults import GPU
from .smi import NvidiaSmi, unparsable
from .values import bus_id, number, switch

FAULTS = Catalogue(
    "persistence (gpu_persistence)",
    (
        FaultKind(
            "persistence_without_driver",
            "critical",
            "The driver's module is not loaded, so there is nothing to keep.",
            "the nvidia module is not loaded",
        ),
        FaultKind(
            "persistence_daemon_failed",
            "critical",
            "The unit that switches persistence mode on did not start.",
            "nvidia-persistenced.service: failed; nvidia-persistenced failed to initialize",
        ),
        FaultKind(
            "persistence_not_controlled",
            "critical",
            "systemd could not be told what to do, or a unit file could not be written.",
            "systemctl daemon-reload: Failed to connect to bus",
        ),
        FaultKind(
            "power_limit_out_of_range",
            "error",
            "The power limit is outside of what a GPU takes.",
            "power_limit_w: 400 W is outside of 150 W to 300 W of 0000:1a:00.0",
        ),
        FaultKind(
            "power_limit_not_enforced",
            "error",
            "A GPU works with another power limit than the one that was set.",
            "the enforced power limit is 300 W, 250 W was set",
        ),
    ),
)

DAEMON = "nvidia-persistenced.service"
LEGACY = "volta-nvidia-persistence.service"
POWER = "volta-nvidia-power-limit.service"
UNITS = "/etc/systemd/system"
DROP_IN = f"{UNITS}/{DAEMON}.d/volta-llm.conf"
#: By rank, as systemd looks for them.
UNIT_FOLDERS = (
    UNITS,
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
DAEMON_PROGRAM = "/usr/bin/nvidia-persistenced"
HEAD = "# Written by Ansible (volta.llm.nvidia_persistence): changes here are overwritten by the next run.\n"
#: Watts by which an enforced limit may differ from the one set: drivers print it in steps.
TOLERANCE_W = 1.0
PAUSE_S = 3.0
_QUERY = ("index", "pci.bus_id", "persistence_mode", "enforced.power.limit", "power.min_limit", "power.max_limit",
          "power.default_limit")  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """``engines`` are units that start after persistence mode is on; ``power_limit_w`` null: leave the limit alone."""

    engines: Sequence[str] = ()
    start_timeout: int = 300
    wait: float = 120.0
    power_limit_w: float | None = None
    nvidia_smi: str = "nvidia-smi"


@dataclass(frozen=True)
class Gpu:
    """Values of one card; null where it does not say."""

    index: str
    bus_id: str
    persistence: bool | None
    limit_w: float | None
    min_w: float | None
    max_w: float | None
    default_w: float | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "bus_id": self.bus_id,
            "persistence": self.persistence,
            "power_limit_w": self.limit_w,
            "power_limit_min_w": self.min_w,
            "power_limit_max_w": self.max_w,
            "power_limit_default_w": self.default_w,
        }


@dataclass
class Outcome:
    """``mode`` is daemon or legacy; ``files`` are (path, before, after) of what was or would be written."""

    mode: str | None = None
    changes: list[str] = field(default_factory=list)
    files: list[tuple[str, str, str]] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    would_verify: bool = False


def read_gpus(smi: NvidiaSmi) -> list[Gpu]:
    """Every card that answers. Raises FaultError with what nvidia-smi says where it does not list any."""
    answer = smi.ask(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
    if not answer.usable:
        raise FaultError(answer.faults[0])
    found = []
    for line in answer.completed.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        card = bus_id(cells[1]) if len(cells) == len(_QUERY) else None
        if card is None:
            continue
        watts = [_watts(cell) for cell in cells[3:]]
        found.append(Gpu(cells[0], card, switch(cells[2])[0], *watts))
    if not found:
        raise FaultError(answer.faults[0] if answer.faults else unparsable(answer))
    return found


def _watts(cell: str) -> float | None:
    value = number(cell)[0]
    return None if value is None else float(value)


class Persistence:
    """One machine. Units are written below its root, so that a simulated one and a real one are the same."""

    def __init__(self, machine: Machine, wanted: Wanted) -> None:
        self.machine = machine
        self.wanted = wanted
        self.smi = NvidiaSmi(machine, wanted.nvidia_smi)

    def converge(self, check: bool = False) -> Outcome:
        """Bring the machine to what is wanted; in check mode only say what would be done."""
        outcome = Outcome()
        loaded = driver.loaded(self.machine).version is not None
        if not loaded and not check:
            outcome.faults.append(
                FAULTS.fault(
                    "persistence_without_driver",
                    "nvidia module",
                    "the nvidia module is not loaded",
                    "Run the roles nvidia_driver and reboot_gate first; volta.llm.driver_state says what is missing.",
                )
            )
            return outcome
        unit = self._packaged_unit()
        installed = self.machine.exists(_exec_start(unit).split()[0].lstrip("-@:+!"))
        # Before there is a driver, check mode takes it that the driver's packages will bring the daemon.
        outcome.mode = "daemon" if installed or not loaded else "legacy"
        outcome.would_verify = not loaded
        try:
            if loaded:
                outcome.gpus = read_gpus(self.smi)
                outcome.faults = self._range(outcome.gpus)
                if outcome.faults:
                    return outcome
            self._converge(outcome, unit, check)
        except FaultError as exc:
            outcome.faults.append(exc.fault)
        return outcome

    def _converge(self, outcome: Outcome, unit: str | None, check: bool) -> None:
        files = self._files(outcome.mode or "daemon", unit)
        had_limit = self.machine.exists(f"{UNITS}/{POWER}")
        for path, content in files.items():
            before = self.machine.read(path)
            if before != content and not (before is None and content is None):
                outcome.files.append((path, before or "", content or ""))
                outcome.changes.append(f"{'removed' if content is None else 'wrote'} {path}")
        if not check:
            self._write(outcome, files)
        touched = {path for path, _, _ in outcome.files}
        if outcome.mode == "daemon":
            fresh = self._start(outcome, DAEMON, {DROP_IN, f"{UNITS}/{DAEMON}"} & touched, check)
        else:
            off = any(gpu.persistence is False for gpu in outcome.gpus)
            fresh = self._start(outcome, LEGACY, {f"{UNITS}/{LEGACY}"} & touched, check, again=off)
        if not check:
            self._wait(outcome, fresh)
        if not outcome.faults:
            self._limit(outcome, f"{UNITS}/{POWER}" in touched, had_limit, check)

    # -- files

    def _packaged_unit(self) -> str | None:
        """The daemon's unit as it was packaged or put there; ours does not count."""
        for folder in UNIT_FOLDERS:
            text = self.machine.read(f"{folder}/{DAEMON}")
            if text is not None and not text.startswith(HEAD):
                return text
        return None

    def _files(self, mode: str, unit: str | None) -> dict[str, str | None]:
        """Every file of ours: its text, or null where it shall not be."""
        own_unit = mode == "daemon" and unit is None and self.machine.exists(DAEMON_PROGRAM)
        limit = self.wanted.power_limit_w
        return {
            f"{UNITS}/{DAEMON}": self._own_daemon_unit() if own_unit else self._foreign(f"{UNITS}/{DAEMON}"),
            DROP_IN: self._drop_in(unit) if mode == "daemon" else None,
            f"{UNITS}/{LEGACY}": self._oneshot("NVIDIA persistence mode", "-pm 1") if mode == "legacy" else None,
            f"{UNITS}/{POWER}": None
            if limit is None
            else self._oneshot("NVIDIA power limit", f"-pl {limit:g}", after=(DAEMON, LEGACY)),
        }

    def _foreign(self, path: str) -> str | None:
        """A file of somebody else's stays as it is."""
        text = self.machine.read(path)
        return None if text is None or text.startswith(HEAD) else text

    def _loaded_condition(self) -> str:
        return f"ConditionPathExists={self.machine.path('/proc/driver/nvidia/version')}"

    def _before(self) -> list[str]:
        return [f"Before={' '.join(self.wanted.engines)}"] if self.wanted.engines else []

    def _drop_in(self, unit: str | None) -> str:
        lines = [
            "[Unit]",
            "# Started when the module is there, kept when nothing wants it, and before the engines.",
            "After=systemd-modules-load.service",
            *self._before(),
            self._loaded_condition(),
            "StopWhenUnneeded=no",
            "",
            "[Service]",
            "ExecStart=",
            f"ExecStart={_with_persistence(_exec_start(unit))}",
            "# Registering eight cards takes 20 s and more; being stopped in the middle leaves none.",
            f"TimeoutStartSec={self.wanted.start_timeout}",
            "Restart=on-failure",
            "RestartSec=5",
            "",
        ]
        return HEAD + "\n".join(lines)

    def _own_daemon_unit(self) -> str:
        """For a daemon that came without a unit, as NVIDIA's installer leaves it."""
        lines = [
            "[Unit]",
            "Description=NVIDIA Persistence Daemon",
            "",
            "[Service]",
            "Type=forking",
            f"ExecStart={DAEMON_PROGRAM} --verbose",
            "ExecStopPost=/bin/rm -rf /run/nvidia-persistenced",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
        return HEAD + "\n".join(lines)

    def _oneshot(self, description: str, arguments: str, after: Sequence[str] = ()) -> str:
        program = shutil.which(self.wanted.nvidia_smi) or f"/usr/bin/{Path(self.wanted.nvidia_smi).name}"
        lines = [
            "[Unit]",
            f"Description={description} (volta.llm)",
            f"After={' '.join(['systemd-modules-load.service', *after])}",
            *self._before(),
            self._loaded_condition(),
            "",
            "[Service]",
            "Type=oneshot",
            "RemainAfterExit=yes",
            f"ExecStart={program} {arguments}",
            f"TimeoutStartSec={self.wanted.start_timeout}",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
        return HEAD + "\n".join(lines)

    def _write(self, outcome: Outcome, files: dict[str, str | None]) -> None:
        for path, before, _ in outcome.files:
            target = self.machine.path(path)
            content = files[path]
            try:
                if content is None:
                    if before and path.endswith((LEGACY, POWER)):
                        self._systemctl("disable", "--now", Path(path).name)
                    target.unlink()
                    if path == DROP_IN:
                        # The daemon is gone; what wanted it at boot was ours.
                        self.machine.path(f"{UNITS}/multi-user.target.wants/{DAEMON}").unlink(missing_ok=True)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    replace_file(target, content.encode())
            except OSError as exc:
                raise FaultError(_not_controlled(path, exc.strerror or str(exc))) from exc
        if outcome.files:
            self._systemctl("daemon-reload")

    # -- units

    def _start(self, outcome: Outcome, unit: str, touched: set[str], check: bool, again: bool = False) -> bool:
        """Have a unit wanted at boot and running with its text as it is now; whether it was (or would be) started."""
        if not self._wanted_at_boot(unit):
            outcome.changes.append(f"enabled {unit}")
            if not check:
                self._systemctl("add-wants", "multi-user.target", unit)
        state = self._show(unit)
        active = state.get("ActiveState") == "active"
        # Killed between writing and telling systemd.
        reload = state.get("NeedDaemonReload") == "yes"
        if reload and not check:
            self._systemctl("daemon-reload")
        if active and not (touched or again or reload or self._older(unit, state)):
            return False
        outcome.changes.append(f"{'restarted' if active else 'started'} {unit}")
        if not check:
            self._restart(unit)
        return True

    def _restart(self, unit: str) -> None:
        self._systemctl("reset-failed", unit, must=False)
        done = self.machine.run(["systemctl", "restart", unit], timeout=self.wanted.start_timeout + 60)
        if not done.ok:
            tail = self.machine.run(["journalctl", "--unit", unit, "--no-pager", "--output", "cat", "--lines", "5"])
            said = "; ".join(line.strip() for line in tail.stdout.splitlines() if line.strip())
            state = self._show(unit).get("ActiveState", "unknown")
            raise FaultError(
                FAULTS.fault(
                    "persistence_daemon_failed",
                    unit,
                    f"{state}{f'; {said[-400:]}' if said else ''}",
                    f"See: journalctl -u {unit}; and volta.llm.driver_state for the driver",
                )
            )

    def _show(self, unit: str) -> dict[str, str]:
        keys = "ActiveState,ActiveEnterTimestampMonotonic,NeedDaemonReload"
        done = self.machine.run(["systemctl", "show", unit, f"--property={keys}"])
        return dict(line.partition("=")[::2] for line in done.stdout.splitlines())

    def _older(self, unit: str, state: dict[str, str]) -> bool:
        """Whether it was started before our files were written: a run was killed in between."""
        text = state.get("ActiveEnterTimestampMonotonic", "")
        if not text.isdigit() or int(text) == 0:
            return False
        started = time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - int(text) / 1e6)
        for path in (DROP_IN, f"{UNITS}/{unit}"):
            try:
                written = self.machine.path(path).stat().st_mtime
            except OSError:
                continue
            # A time in the future comes from a clock that was set back, and says nothing.
            if started + 1 < written <= time.time():
                return True
        return False

    def _wanted_at_boot(self, unit: str) -> bool:
        return self.machine.exists(f"{UNITS}/multi-user.target.wants/{unit}")

    def _systemctl(self, *words: str, must: bool = True) -> None:
        done = self.machine.run(["systemctl", *words], timeout=max(self.machine.timeout, 90.0))
        if must and not done.ok:
            raise FaultError(_not_controlled(words[-1], f"systemctl {' '.join(words)}: {done.why}"))

    # -- GPUs

    def _wait(self, outcome: Outcome, fresh: bool) -> None:
        """Until persistence mode is on for every card; a daemon that ran already is started again once."""
        unit = DAEMON if outcome.mode == "daemon" else LEGACY
        for attempt in range(2):
            begun = time.monotonic()
            while True:
                outcome.gpus = read_gpus(self.smi)
                off = [gpu for gpu in outcome.gpus if gpu.persistence is not True]
                if not off:
                    return
                if time.monotonic() - begun >= self.wanted.wait:
                    break
                time.sleep(min(PAUSE_S, max(0.0, self.wanted.wait - (time.monotonic() - begun))))
            if attempt or fresh:
                break
            outcome.changes.append(f"restarted {unit}")
            self._restart(unit)
        outcome.faults += [
            GPU.fault(
                "persistence_off",
                gpu.bus_id,
                f"persistence mode is still off after {self.wanted.wait:g} s",
                f"See: journalctl -u {unit}",
            )
            for gpu in off
        ]

    def _range(self, gpus: Sequence[Gpu]) -> list[Fault]:
        limit = self.wanted.power_limit_w
        return [
            FAULTS.fault(
                "power_limit_out_of_range",
                "power_limit_w",
                f"{limit:g} W is outside of {gpu.min_w:g} W to {gpu.max_w:g} W of {gpu.bus_id}",
                f"Write power_limit_w from {gpu.min_w:g} to {gpu.max_w:g}, or 0 to leave the limit alone.",
            )
            for gpu in gpus
            if limit is not None
            and gpu.min_w is not None
            and gpu.max_w is not None
            and not gpu.min_w <= limit <= gpu.max_w
        ]

    def _limit(self, outcome: Outcome, touched: bool, had_limit: bool, check: bool) -> None:
        limit = self.wanted.power_limit_w
        if limit is None:
            if had_limit and touched:
                self._back_to_default(outcome, check)
            return
        differs = any(gpu.limit_w is not None and abs(gpu.limit_w - limit) > TOLERANCE_W for gpu in outcome.gpus)
        self._start(outcome, POWER, {POWER} if touched else set(), check, again=differs)
        if check:
            return
        outcome.gpus = read_gpus(self.smi)
        outcome.faults += [
            FAULTS.fault(
                "power_limit_not_enforced",
                gpu.bus_id,
                f"the enforced power limit is {'not told' if gpu.limit_w is None else f'{gpu.limit_w:g} W'}, "
                f"{limit:g} W was set",
                f"See: journalctl -u {POWER}; a limit of the machine's own (its BMC) can be lower.",
            )
            for gpu in outcome.gpus
            if gpu.limit_w is None or abs(gpu.limit_w - limit) > TOLERANCE_W
        ]

    def _back_to_default(self, outcome: Outcome, check: bool) -> None:
        """The limit that was ours goes with our unit."""
        for gpu in outcome.gpus:
            if gpu.default_w is None or gpu.limit_w is None or abs(gpu.limit_w - gpu.default_w) <= TOLERANCE_W:
                continue
            outcome.changes.append(f"power limit of {gpu.bus_id} back to {gpu.default_w:g} W")
            if not check:
                self.smi.ask("-i", gpu.bus_id, "-pl", f"{gpu.default_w:g}")
        if not check:
            outcome.gpus = read_gpus(self.smi)


def _exec_start(unit: str | None) -> str:
    """The command of the packaged unit; the last assignment counts, an empty one clears."""
    command = ""
    for line in re.sub(r"\\\n", " ", unit or "").splitlines():
        key, equals, value = line.strip().partition("=")
        if equals and key.strip() == "ExecStart":
            command = value.strip()
    return command or f"{DAEMON_PROGRAM} --verbose"


def _with_persistence(command: str) -> str:
    """The same command with persistence mode on."""
    program, _, rest = re.sub(r"\s+--(?:no-)?persistence-mode(?=\s|$)", "", command).partition(" ")
    return f"{program} --persistence-mode {rest.strip()}".rstrip()


def _not_controlled(subject: str, message: str) -> Fault:
    return FAULTS.fault("persistence_not_controlled", subject, message, "Run as root on a machine that systemd runs.")
