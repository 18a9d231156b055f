#!/usr/bin/env python3
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A stand-in for the NVIDIA driver on a machine that has no GPU.

One file, standard library only, so that it can be copied onto a machine. Its name decides what it is:

``nvidia-smi``
    answers like the real tool: same texts, same exit statuses. The 535 forms were checked against the real
    nvidia-smi 535.261.03 (Debian package) running on a stand-in NVML library, the 580 forms against a live machine
    with two H200.
any other name (``gpu-sim``)
    controls it: ``gpu-sim install --profile v100x4``, ``gpu-sim fault lose-card 2``, ``gpu-sim clear``, ``gpu-sim
    show``, ``gpu-sim fault --help``.

The state is one JSON file: /var/lib/gpu-simulator/state.json, or the file named by GPU_SIMULATOR_STATE. Beside
nvidia-smi's answers it gives a folder that stands for the machine's root (``sysroot``): /proc/driver/nvidia, PCI
devices, module and library versions and the kernel log are simulated there, everything else links to the real
machine. It is written anew at every change of state.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

DEFAULT_STATE = "/var/lib/gpu-simulator/state.json"
DEFAULT_SYSROOT = "/var/lib/gpu-simulator/sysroot"
DEFAULT_DRIVER = "535.261.03"

# Exit statuses of nvidia-smi(1), section RETURN VALUE; 18 is NVML's own number and is what the tool exits with.
RC_OK, RC_ARGUMENT, RC_PERMISSION, RC_NOT_FOUND, RC_NO_DRIVER = 0, 2, 4, 6, 9
RC_NO_LIBRARY, RC_GPU_LOST, RC_MISMATCH, RC_OTHER = 12, 15, 18, 255

NO_DRIVER_TEXT = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n\n"
)
NO_LIBRARY_TEXT = (
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver "
    "is properly installed and present in your system.\nPlease also try adding directory that contains libnvidia-ml.so "
    "to your system PATH.\n"
)
LOST_TEXT = "GPU is lost.  Reboot the system to recover this GPU"

# CUDA version that the first release of a branch supports (NVIDIA, CUDA compatibility table).
CUDA_OF_BRANCH = {
    390: "9.1", 410: "10.0", 418: "10.1", 440: "10.2", 450: "11.0", 460: "11.2", 470: "11.4", 510: "11.6", 515: "11.7",
    520: "11.8", 525: "12.0", 530: "12.1", 535: "12.2", 545: "12.3", 550: "12.4", 560: "12.6", 565: "12.7", 570: "12.8",
    575: "12.9", 580: "13.0",
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Profiles: machines as they are reported in public
# ---------------------------------------------------------------------------------------------------------------------

V100_SXM2_32: dict[str, Any] = {
    "name": "Tesla V100-SXM2-32GB", "device_id": "1db5", "subsystem_id": "1249", "brand": "Tesla",
    "architecture": "Volta", "compute_cap": "7.0", "memory_mib": 32768, "reserved_mib": 265, "idle_mib": 0,
    "bar1_mib": 32768, "part_number": "900-2G503-0010-000", "gpu_part_number": "1DB5-895-A1",
    "vbios": "88.00.80.00.01", "inforom": ["G503.0203.00.05", "1.1", "5.0", None], "module_id": "N/A",
    "power": {"draw": 43.12, "limit": 300.0, "default": 300.0, "min": 150.0, "max": 300.0},
    "temperature": {"core": 34, "memory": 33, "shutdown": 90, "slowdown": 87, "max_operating": 83, "memory_max": 85},
    "clocks": {"graphics": 135, "sm": 135, "memory": 877, "video": 555},
    "max_clocks": {"graphics": 1530, "sm": 1530, "memory": 877, "video": 1372},
    "application_clocks": {"graphics": 1290, "memory": 877},
    "pcie": {"gen": 3, "max_gen": 3, "width": 16, "max_width": 16},
    "nvlinks": 6, "link_rate": "25.781", "ecc": "legacy",
}  # fmt: skip
V100_SXM2_16 = {
    **V100_SXM2_32, "name": "Tesla V100-SXM2-16GB", "device_id": "1db1", "subsystem_id": "1212", "memory_mib": 16384,
    "bar1_mib": 16384, "reserved_mib": 240, "part_number": "900-2G503-0300-000", "gpu_part_number": "1DB1-895-A1",
}  # fmt: skip
V100_PCIE_32 = {
    **V100_SXM2_32, "name": "Tesla V100-PCIE-32GB", "device_id": "1db6", "subsystem_id": "124a", "nvlinks": 0,
    "power": {"draw": 26.31, "limit": 250.0, "default": 250.0, "min": 100.0, "max": 250.0},
    "part_number": "900-2G500-0010-000", "gpu_part_number": "1DB6-895-A1",
    "clocks": {"graphics": 135, "sm": 135, "memory": 877, "video": 555},
    "max_clocks": {"graphics": 1380, "sm": 1380, "memory": 877, "video": 1237},
    "application_clocks": {"graphics": 1230, "memory": 877},
}  # fmt: skip
H200: dict[str, Any] = {
    "name": "NVIDIA H200", "device_id": "2335", "subsystem_id": "18bf", "brand": "NVIDIA", "architecture": "Hopper",
    "compute_cap": "9.0", "memory_mib": 143771, "reserved_mib": 616, "idle_mib": 0, "bar1_mib": 262144,
    "part_number": "692-2G520-0282-001", "gpu_part_number": "2335-895-A1", "vbios": "96.00.A5.00.1A",
    "inforom": ["G520.0282.02.02", "2.1", "7.16", None], "module_id": "5",
    "power": {"draw": 92.65, "limit": 700.0, "default": 700.0, "min": 200.0, "max": 700.0, "memory_draw": 48.69},
    "temperature": {"core": 34, "memory": 36, "tlimit": 53},
    "clocks": {"graphics": 420, "sm": 420, "memory": 3201, "video": 765},
    "max_clocks": {"graphics": 1980, "sm": 1980, "memory": 3201, "video": 1545},
    "application_clocks": {"graphics": 1980, "memory": 3201},
    "pcie": {"gen": 5, "max_gen": 5, "width": 16, "max_width": 16},
    "nvlinks": 18, "link_rate": "26.562", "ecc": "modern", "fabric": True,
    "supported_clocks": {"memory": [3201, 2201], "graphics": list(range(1980, 330, -15))},
}  # fmt: skip

#: Pairs of a DGX-1 hybrid cube mesh (shared by all eight-card SXM2 V100 boards): NVLinks between card a and card b.
HYBRID_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """A machine: its cards, where they sit, and which pairs are linked (number of NVLinks a pair)."""

    description: str
    cards: tuple[dict[str, Any], ...]
    bus_ids: tuple[str, ...]
    numa: tuple[int, ...]
    cpus: dict[int, str]
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    far: str = "SYS"
    near: str = "NODE"
    driver: str = DEFAULT_DRIVER
    flavour: str = "proprietary"
    arch: str = "x86_64"


def _all_pairs(count: int, links: int) -> dict[tuple[int, int], int]:
    return {(a, b): links for a in range(count) for b in range(a + 1, count)}


PROFILES: dict[str, Profile] = {
    "v100x4": Profile(
        "the reference machine: 4 x V100-SXM2-32GB, NV2 between all pairs",
        (V100_SXM2_32,) * 4,
        ("00000000:1A:00.0", "00000000:1C:00.0", "00000000:1D:00.0", "00000000:1E:00.0"),
        (0, 0, 0, 0),
        {0: "0-39"},
        _all_pairs(4, 2),
    ),
    "v100x8": Profile(
        "8 x V100-SXM2-32GB in a hybrid cube mesh: all links active, the mesh not full",
        (V100_SXM2_32,) * 8,
        tuple(f"00000000:{bus}:00.0" for bus in ("1A", "1B", "3D", "3E", "88", "89", "B1", "B2")),
        (0, 0, 0, 0, 1, 1, 1, 1),
        {0: "0-19,40-59", 1: "20-39,60-79"},
        HYBRID_MESH,
    ),
    "v100x4-pcie": Profile(
        "4 x V100-PCIE-32GB: no NVLink at all",
        (V100_PCIE_32,) * 4,
        ("00000000:3B:00.0", "00000000:5E:00.0", "00000000:86:00.0", "00000000:AF:00.0"),
        (0, 0, 1, 1),
        {0: "0-15,32-47", 1: "16-31,48-63"},
    ),
    "v100x4-ac922": Profile(
        "IBM AC922: two pairs with NV3; the other three links of each card go to its CPU",
        (V100_SXM2_16,) * 4,
        ("00000004:04:00.0", "00000004:05:00.0", "00000035:03:00.0", "00000035:04:00.0"),
        (0, 0, 8, 8),
        {0: "0-63", 8: "64-127"},
        {(0, 1): 3, (2, 3): 3},
        arch="ppc64le",
    ),
    "v100-mixed": Profile(
        "2 x V100-SXM2-16GB and 2 x V100-SXM2-32GB, NV2 between all pairs",
        (V100_SXM2_16, V100_SXM2_16, V100_SXM2_32, V100_SXM2_32),
        ("00000000:1A:00.0", "00000000:1C:00.0", "00000000:1D:00.0", "00000000:1E:00.0"),
        (0, 0, 0, 0),
        {0: "0-39"},
        _all_pairs(4, 2),
    ),
    "h200x2": Profile(
        "two H200 of an NVSwitch machine, passed through to a virtual machine, driver 580",
        (
            H200,
            {
                **H200,
                "module_id": "7",
                "power": {**H200["power"], "draw": 83.06, "memory_draw": 42.26},
                "temperature": {"core": 32, "memory": 35, "tlimit": 55},
                "clocks": {**H200["clocks"], "graphics": 345, "sm": 345},
            },
        ),
        ("00000000:00:06.0", "00000000:00:07.0"),
        (0, 0),
        {0: "0-31"},
        _all_pairs(2, 18),
        driver="580.159.04",
        flavour="open",
    ),
}

#: Which running programs hold GPU memory, by regular expression on the command line, and how much a card.
DEFAULT_ENGINES: list[dict[str, Any]] = [
    {"match": r"(^|/)llama-server(\s|$)", "mib_per_card": 19968},
    {"match": r"(^|/)ollama runner(\s|$)", "mib_per_card": 4096},
]


class UsageError(Exception):
    """A control command that cannot be done; the text says what to write instead."""


def new_state(profile: str, driver: str | None, sysroot: str, kernel: str | None = None) -> dict[str, Any]:
    """The state of a healthy, idle machine of that profile; ``kernel`` null means the real machine's kernels."""
    if profile not in PROFILES:
        raise UsageError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    machine = PROFILES[profile]
    version = driver or machine.driver
    if not re.fullmatch(r"\d{3}\.\d+(\.\d+)?", version):
        raise UsageError(f"driver version {version!r} is not of the form 535.261.03")
    gpus: list[dict[str, Any]] = []
    for index, (card, bus_id) in enumerate(zip(machine.cards, machine.bus_ids, strict=True)):
        gpus.append(
            {
                "index": index,
                "uuid": f"GPU-00000000-0000-4000-8000-{index + 1:012d}",
                "serial": f"{index + 1:013d}",
                "bus_id": bus_id,
                "numa": machine.numa[index],
                "cpus": machine.cpus[machine.numa[index]],
                "persistence": False,
                **json.loads(json.dumps(card)),
            }
        )
    return {
        "profile": profile,
        "driver": version,
        "cuda": cuda_of(version),
        "flavour": machine.flavour,
        "arch": machine.arch,
        "gpus": gpus,
        "links": [[a, b, count] for (a, b), count in machine.links.items()],
        "near": machine.near,
        "far": machine.far,
        "nics": [],
        "engines": DEFAULT_ENGINES,
        "faults": [],
        "sysroot": sysroot,
        "kernel": kernel,
        # What the last boot and modprobe since made of the installed packages; null: the driver is all simulated.
        "boot": None,
    }


def branch(version: str) -> int:
    return int(version.split(".", 1)[0])


def cuda_of(version: str) -> str:
    known = [number for number in CUDA_OF_BRANCH if number <= branch(version)]
    return CUDA_OF_BRANCH[max(known)] if known else "9.0"


# ---------------------------------------------------------------------------------------------------------------------
# State
# ---------------------------------------------------------------------------------------------------------------------


def state_path() -> Path:
    return Path(os.environ.get("GPU_SIMULATOR_STATE") or DEFAULT_STATE)


def load_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if state.setdefault("boot", None) is not None:
        _see_packages(state)
    return state


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    """One change at a time, read within: every tool changes the state, and the persistence daemon does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old state or the new one, never half of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save_state(path: Path, state: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(state, indent=1) + "\n")
    write_sysroot(state)


def faults(state: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [fault for fault in state["faults"] if fault["kind"] == kind]


def fault_of(state: dict[str, Any], kind: str, gpu: int) -> dict[str, Any] | None:
    for fault in faults(state, kind):
        if fault.get("gpu") == gpu:
            return fault
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The machine as it is with its faults
# ---------------------------------------------------------------------------------------------------------------------


def visible_gpus(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The cards that the driver still enumerates, numbered anew, with their faults applied."""
    gpus: list[dict[str, Any]] = []
    for card in state["gpus"]:
        if fault_of(state, "remove-card", card["index"]):
            continue
        gpus.append({**json.loads(json.dumps(card)), "slot": card["index"], "index": len(gpus)})
    for gpu in gpus:
        _apply_faults(state, gpu)
    return gpus


def _apply_faults(state: dict[str, Any], gpu: dict[str, Any]) -> None:
    slot = gpu["slot"]
    gpu["ecc_counts"] = {}
    gpu["reasons"] = set()
    gpu["overrides"] = {}
    gpu["retired"] = {"single": 0, "double": 0, "pending": False}
    gpu["lost"] = None
    gpu["error"] = None
    gpu["ecc_enabled"] = True
    for fault in state["faults"]:
        if fault.get("gpu") != slot:
            continue
        kind = fault["kind"]
        if kind == "lose-card":
            gpu["lost"] = fault["how"]
            if fault["how"] == "fields":
                gpu["error"] = "GPU is lost"
        elif kind == "unreadable":
            gpu["error"] = fault["text"]
        elif kind == "hot":
            gpu["temperature"]["core"] = fault["core"]
            if fault["memory"] is not None:
                gpu["temperature"]["memory"] = fault["memory"]
            if fault["core"] >= gpu["temperature"].get("slowdown", 999):
                gpu["reasons"] |= {"hw_slowdown", "hw_thermal_slowdown"}
        elif kind == "throttle":
            gpu["reasons"] |= set(THROTTLE[fault["reason"]])
        elif kind == "ecc":
            key = (fault["error"], fault["counter"])
            gpu["ecc_counts"][key] = gpu["ecc_counts"].get(key, 0) + fault["count"]
        elif kind == "ecc-off":
            gpu["ecc_enabled"] = False
        elif kind == "retire":
            gpu["retired"]["double"] += fault["pages"]
        elif kind == "pending-retirement":
            gpu["retired"]["pending"] = True
        elif kind == "pcie":
            gpu["pcie"].update({"gen": fault["gen"], "width": fault["width"]})
        elif kind == "field":
            gpu["overrides"][fault["field"]] = fault["value"]
    if gpu["reasons"] & {"hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"}:
        gpu["clocks"]["graphics"] = gpu["clocks"]["sm"] = max(135, gpu["clocks"]["graphics"])


THROTTLE: dict[str, tuple[str, ...]] = {
    "hw-thermal": ("hw_slowdown", "hw_thermal_slowdown"),
    "sw-thermal": ("sw_thermal_slowdown",),
    "sw-power-cap": ("sw_power_cap",),
    "hw-power-brake": ("hw_slowdown", "hw_power_brake_slowdown"),
    "hw-slowdown": ("hw_slowdown",),
}
# nvml.h, nvmlClocksEventReasons: bit of each reason.
REASON_BITS = {
    "gpu_idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}  # fmt: skip


def link_count(state: dict[str, Any], slot_a: int, slot_b: int) -> int:
    """NVLinks between two cards that are up at both ends; 0 where there are none or NVLink is not in use."""
    if slot_a == slot_b or faults(state, "pcie-only"):
        return 0
    down_a, down_b = inactive_links(state, slot_a), inactive_links(state, slot_b)
    return sum(1 for mine, theirs in link_ends(state, slot_a, slot_b) if mine not in down_a and theirs not in down_b)


def link_ends(state: dict[str, Any], slot_a: int, slot_b: int) -> list[tuple[int, int]]:
    """The links of a pair, as link number at card a and at card b: the n-th of one meets the n-th of the other."""
    mine = [link for link in range(state["gpus"][slot_a]["nvlinks"]) if peer_of_link(state, slot_a, link) == slot_b]
    theirs = [link for link in range(state["gpus"][slot_b]["nvlinks"]) if peer_of_link(state, slot_b, link) == slot_a]
    return list(zip(mine, theirs, strict=True))


def peer_of_link(state: dict[str, Any], slot: int, link: int) -> int | None:
    """The card at the other end of a link: links are handed out to peers in order; null for a CPU or a switch."""
    first = 0
    for peer in range(len(state["gpus"])):
        for a, b, count in state["links"]:
            if {a, b} == {slot, peer} and peer != slot:
                if first <= link < first + count:
                    return peer
                first += count
    return None


def inactive_links(state: dict[str, Any], slot: int) -> set[int]:
    if faults(state, "pcie-only"):
        return set(range(state["gpus"][slot]["nvlinks"]))
    return {fault["link"] for fault in faults(state, "link-down") if fault["gpu"] == slot}


def processes(state: dict[str, Any], gpus: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What holds GPU memory: running engines (found in /proc) on every living card, and simulated other programs."""
    found = []
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        if not _of_this_machine(entry):
            continue
        line = " ".join(word.decode("utf-8", "replace") for word in words)
        for engine in state["engines"]:
            # A shell or an editor that merely names the program is not the program.
            if re.search(engine["match"], " ".join(line.split(" ")[:2])) and words[0]:
                if Path(words[0].decode("utf-8", "replace")).name in {"sh", "bash", "sudo", "python3", "timeout"}:
                    continue
                visible = _visible(entry)
                for gpu in gpus:
                    if visible is not None and not visible & {str(gpu["index"]), gpu["uuid"]}:
                        continue
                    found.append(
                        {"gpu": gpu, "pid": int(entry.name), "name": words[0].decode("utf-8", "replace"),
                         "mib": int(engine["mib_per_card"])}
                    )  # fmt: skip
                break
    for fault in faults(state, "process"):
        for gpu in gpus:
            if gpu["slot"] == fault["gpu"]:
                found.append({"gpu": gpu, "pid": fault["pid"], "name": fault["name"], "mib": fault["mib"]})
    return found


def _of_this_machine(process: Path) -> bool:
    """Whether a process has our namespace of processes. On the host of lab machines theirs are in /proc too, and are on
    cards of their own."""
    try:
        return (process / "ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()
    except OSError:
        return True


def _visible(process: Path) -> set[str] | None:
    """What CUDA_VISIBLE_DEVICES of a process names, indexes in bus order or UUIDs; null where it names none."""
    try:
        words = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    given = [word.partition(b"=")[2].decode() for word in words if word.startswith(b"CUDA_VISIBLE_DEVICES=")]
    return {name.strip() for name in given[-1].split(",")} if given else None


@dataclass
class View:
    """What one call of nvidia-smi sees."""

    state: dict[str, Any]
    gpus: list[dict[str, Any]]
    processes: list[dict[str, Any]]

    @property
    def driver(self) -> str:
        return str(self.state["driver"])

    @property
    def branch(self) -> int:
        return branch(self.driver)

    def used(self, gpu: dict[str, Any]) -> int:
        held = sum(process["mib"] for process in self.processes if process["gpu"]["index"] == gpu["index"])
        return int(min(gpu["memory_mib"] - gpu["reserved_mib"], gpu["idle_mib"] + held))

    def free(self, gpu: dict[str, Any]) -> int:
        return int(gpu["memory_mib"] - gpu["reserved_mib"] - self.used(gpu))


def look(state: dict[str, Any]) -> View:
    gpus = visible_gpus(state)
    living = [gpu for gpu in gpus if not gpu["lost"]]
    return View(state, gpus, processes(state, living))


# ---------------------------------------------------------------------------------------------------------------------
# nvidia-smi: fields of --query-gpu
# ---------------------------------------------------------------------------------------------------------------------

Getter = Callable[[View, dict[str, Any]], Any]


@dataclass(frozen=True)
class Field:
    """One property: its name, its other names, unit of its column, first and last branch that know it."""

    name: str
    get: Getter
    unit: str = ""
    aliases: tuple[str, ...] = ()
    since: int = 0
    until: int = 10_000
    help: str = ""

    def column(self, view: View) -> str:
        name = self.name
        if view.branch < 535:
            name = name.replace("clocks_event_reasons", "clocks_throttle_reasons")
        return name


def _watts(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _reason(name: str) -> Getter:
    return lambda view, gpu: "Active" if name in active_reasons(view, gpu) else "Not Active"


def active_reasons(view: View, gpu: dict[str, Any]) -> set[str]:
    reasons: set[str] = set(gpu["reasons"])
    return reasons or {"gpu_idle"}


def _ecc(kind: str, counter: str, place: str) -> Getter:
    """ECC counters; Volta counts by memory structure, newer chips by SRAM and DRAM."""

    def get(view: View, gpu: dict[str, Any]) -> int | None:
        if not gpu["ecc_enabled"]:
            return None
        legacy = gpu["ecc"] == "legacy"
        known = (
            {"device_memory", "register_file", "l1_cache", "l2_cache", "total", "dram"}
            | ({"cbu"} if kind == "uncorrected" else set())
            if legacy
            else {"dram", "sram", "device_memory", "total"}
        )
        if place not in known:
            return None
        count: int = gpu["ecc_counts"].get((kind, counter), 0)
        return count if place in {"device_memory", "dram", "total"} else 0

    return get


def _clock(group: str, name: str) -> Getter:
    return lambda view, gpu: gpu[group].get(name)


def _none(view: View, gpu: dict[str, Any]) -> None:
    return None


def _text(value: str) -> Getter:
    return lambda view, gpu: value


def _now() -> str:
    moment = time.time()
    return time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(moment)) + f".{int(moment * 1000) % 1000:03d}"


def _modern(value: str) -> Getter:
    """A property that chips after Volta have."""
    return lambda view, gpu: None if gpu["ecc"] == "legacy" else value


def _fields() -> list[Field]:
    rows = [
        Field("timestamp", lambda v, g: _now(), help='When the query was made, "YYYY/MM/DD HH:MM:SS.msec".'),
        Field("driver_version", lambda v, g: v.driver, help="Version of the installed display driver."),
        Field("count", lambda v, g: len(v.gpus), help="Number of NVIDIA GPUs in the system."),
        Field("name", lambda v, g: g["name"], aliases=("gpu_name",), help="Product name."),
        Field("serial", lambda v, g: g["serial"], aliases=("gpu_serial",), help="Serial number on the board."),
        Field("uuid", lambda v, g: g["uuid"], aliases=("gpu_uuid",), help="Globally unique identifier."),
        Field("pci.bus_id", lambda v, g: g["bus_id"], aliases=("gpu_bus_id",), help="domain:bus:device.function, hex."),
        Field("pci.domain", lambda v, g: "0x" + g["bus_id"].split(":")[0][-4:], help="PCI domain, in hex."),
        Field("pci.bus", lambda v, g: "0x" + g["bus_id"].split(":")[1], help="PCI bus, in hex."),
        Field("pci.device", lambda v, g: "0x" + g["bus_id"].split(":")[2][:2], help="PCI device, in hex."),
        Field("pci.device_id", lambda v, g: f"0x{g['device_id'].upper()}10DE", help="PCI device and vendor id."),
        Field("pci.sub_device_id", lambda v, g: f"0x{g['subsystem_id'].upper()}10DE", help="PCI subsystem id."),
        Field("pcie.link.gen.current", lambda v, g: g["pcie"]["gen"], help="PCIe generation now."),
        Field("pcie.link.gen.gpucurrent", lambda v, g: g["pcie"]["gen"], since=520, help="PCIe generation now."),
        Field("pcie.link.gen.max", lambda v, g: g["pcie"]["max_gen"], help="Highest generation of card and host."),
        Field("pcie.link.gen.gpumax", lambda v, g: g["pcie"]["max_gen"], since=520, help="Highest of the card."),
        Field("pcie.link.gen.hostmax", _none, since=520, help="Highest of the root port."),
        Field("pcie.link.width.current", lambda v, g: g["pcie"]["width"], help="PCIe lanes now."),
        Field("pcie.link.width.max", lambda v, g: g["pcie"]["max_width"], help="PCIe lanes at most."),
        Field("index", lambda v, g: g["index"], help="Zero based index; can change at each boot."),
        Field("display_mode", _text("Enabled"), help="Whether a display is connected."),
        Field("display_active", _text("Disabled"), help="Whether a display is initialized."),
        Field("persistence_mode", lambda v, g: _enabled(g["persistence"]), help="Enabled or Disabled."),
        Field("addressing_mode", _modern("None"), since=525, help="How memory is addressed."),
        Field("accounting.mode", _text("Disabled"), help="Enabled or Disabled."),
        Field("accounting.buffer_size", _text("4000"), help="Size of the ring of accounted processes."),
        Field("driver_model.current", _none, help="Windows only."),
        Field("driver_model.pending", _none, help="Windows only."),
        Field("vbios_version", lambda v, g: g["vbios"], help="BIOS of the board."),
        Field("inforom.img", lambda v, g: g["inforom"][0], aliases=("inforom.image",), help="Infoforms image."),
        Field("inforom.oem", lambda v, g: g["inforom"][1], help="OEM configuration data."),
        Field("inforom.ecc", lambda v, g: g["inforom"][2], help="ECC recording data."),
        Field("inforom.pwr", lambda v, g: g["inforom"][3], aliases=("inforom.power",), help="Power management data."),
        Field("reset_status.reset_required", _none, since=530, until=560, help="Whether a reset is required."),
        Field("reset_status.drain_and_reset_recommended", _none, since=530, until=560, help="Drain, then reset."),
        Field("gom.current", _none, aliases=("gpu_operation_mode.current",), help="Operation mode."),
        Field("gom.pending", _none, aliases=("gpu_operation_mode.pending",), help="Operation mode after reboot."),
        Field("fan.speed", _none, "%", help="Fan speed; cards without a fan have none."),
        Field("pstate", _text("P0"), help="Performance state."),
        Field(
            "clocks_event_reasons.supported",
            lambda v, g: f"0x{0x1FF:016X}",
            aliases=("clocks_throttle_reasons.supported",),
            help="Bitmask of reasons that can be reported.",
        ),
        Field(
            "clocks_event_reasons.active",
            lambda v, g: f"0x{sum(REASON_BITS[reason] for reason in active_reasons(v, g)):016X}",
            aliases=("clocks_throttle_reasons.active",),
            help="Bitmask of active reasons.",
        ),
    ]
    for reason in (
        "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown",
        "hw_power_brake_slowdown", "sw_thermal_slowdown", "sync_boost",
    ):  # fmt: skip
        rows.append(
            Field(
                f"clocks_event_reasons.{reason}",
                _reason(reason),
                aliases=(f"clocks_throttle_reasons.{reason}",),
                help="Whether this reason lowers the clocks.",
            )
        )
    rows += [
        Field("memory.total", lambda v, g: g["memory_mib"], "MiB", help="Memory of the card."),
        Field("memory.reserved", lambda v, g: g["reserved_mib"], "MiB", since=510, help="Held by the driver."),
        Field("memory.used", lambda v, g: v.used(g), "MiB", help="Allocated by active contexts."),
        Field("memory.free", lambda v, g: v.free(g), "MiB", help="Free memory."),
        Field("compute_mode", _text("Default"), help="Default, Exclusive_Process or Prohibited."),
        Field("compute_cap", lambda v, g: g["compute_cap"], since=510, help="CUDA compute capability, Major.Minor."),
        Field("utilization.gpu", lambda v, g: 0, "%", help="Share of time in which a kernel ran."),
        Field("utilization.memory", lambda v, g: 0, "%", help="Share of time in which memory was read or written."),
        Field("utilization.encoder", lambda v, g: 0, "%", since=535, help="Encoder."),
        Field("utilization.decoder", lambda v, g: 0, "%", since=535, help="Decoder."),
        Field("utilization.jpeg", _modern("0"), "%", since=535, help="JPEG engine."),
        Field("utilization.ofa", _modern("0"), "%", since=535, help="Optical flow engine."),
        Field("encoder.stats.sessionCount", lambda v, g: 0, help="Encoder sessions."),
        Field("encoder.stats.averageFps", lambda v, g: 0, help="Encoder frames a second."),
        Field("encoder.stats.averageLatency", lambda v, g: 0, help="Encoder latency."),
        Field("ecc.mode.current", lambda v, g: _enabled(g["ecc_enabled"]), help="Enabled or Disabled."),
        Field("ecc.mode.pending", lambda v, g: _enabled(g["ecc_enabled"]), help="ECC mode after reboot."),
    ]
    for kind in ("corrected", "uncorrected"):
        for counter in ("volatile", "aggregate"):
            for place in (
                "device_memory", "dram", "register_file", "l1_cache", "l2_cache", "texture_memory", "cbu", "sram",
                "total",
            ):  # fmt: skip
                rows.append(
                    Field(f"ecc.errors.{kind}.{counter}.{place}", _ecc(kind, counter, place), help="Errors counted.")
                )
    rows += [
        Field(
            "retired_pages.single_bit_ecc.count",
            lambda v, g: _volta(g, g["retired"]["single"]),
            aliases=("retired_pages.sbe",),
            help="Pages retired for single bit errors.",
        ),
        Field(
            "retired_pages.double_bit.count",
            lambda v, g: _volta(g, g["retired"]["double"]),
            aliases=("retired_pages.dbe",),
            help="Pages retired for a double bit error.",
        ),
        Field(
            "retired_pages.pending",
            lambda v, g: _volta(g, "Yes" if g["retired"]["pending"] else "No"),
            help="Whether pages wait for the next reboot.",
        ),
        Field("temperature.gpu", lambda v, g: g["temperature"]["core"], help="Core temperature, degrees C."),
        Field("temperature.gpu.tlimit", lambda v, g: g["temperature"].get("tlimit"), since=530, help="Degrees C."),
        Field("temperature.memory", lambda v, g: g["temperature"]["memory"], help="HBM temperature, degrees C."),
        Field("power.management", _text("Enabled"), help="Whether power management is on."),
        Field("power.draw", lambda v, g: _watts(g["power"]["draw"]), "W", help="Power drawn by the board."),
        Field("power.draw.average", lambda v, g: _modern_watts(g), "W", since=530, help="Average power."),
        Field("power.draw.instant", lambda v, g: _modern_watts(g), "W", since=530, help="Power now."),
        Field("power.limit", lambda v, g: _watts(g["power"]["limit"]), "W", help="Limit as requested."),
        Field("enforced.power.limit", lambda v, g: _watts(g["power"]["limit"]), "W", help="Limit that holds."),
        Field("power.default_limit", lambda v, g: _watts(g["power"]["default"]), "W", help="Limit after a reload."),
        Field("power.min_limit", lambda v, g: _watts(g["power"]["min"]), "W", help="Lowest limit."),
        Field("power.max_limit", lambda v, g: _watts(g["power"]["max"]), "W", help="Highest limit."),
    ]
    for name, short in (("graphics", "gr"), ("sm", "sm"), ("memory", "mem"), ("video", "video")):
        rows.append(
            Field(f"clocks.current.{name}", _clock("clocks", name), "MHz", (f"clocks.{short}",), help="Clock now.")
        )
    for group, key in (("applications", "application_clocks"), ("default_applications", "application_clocks")):
        for name, short in (("graphics", "gr"), ("memory", "mem")):
            rows.append(
                Field(
                    f"clocks.{group}.{name}", _clock(key, name), "MHz", (f"clocks.{group}.{short}",), help="Clock set."
                )
            )
    for name, short in (("graphics", "gr"), ("sm", "sm"), ("memory", "mem")):
        aliases = (f"clocks.max.{short}",) if short != name else ()
        rows.append(Field(f"clocks.max.{name}", _clock("max_clocks", name), "MHz", aliases, help="Highest clock."))
    rows += [
        Field("mig.mode.current", _modern("Disabled"), since=450, help="Multi-instance mode."),
        Field("mig.mode.pending", _modern("Disabled"), since=450, help="Multi-instance mode after reset."),
        Field("gsp.mode.current", _modern("Enabled"), since=515, help="Firmware processor."),
        Field("gsp.mode.default", _modern("Enabled"), since=515, help="Firmware processor."),
        Field("protected_memory.total", _modern("0"), "MiB", since=535, help="Confidential compute."),
        Field("protected_memory.used", _modern("0"), "MiB", since=535, help="Confidential compute."),
        Field("protected_memory.free", _modern("0"), "MiB", since=535, help="Confidential compute."),
        Field(
            "fabric.state", lambda v, g: "Completed" if g.get("fabric") else None, since=525, help="NVSwitch fabric."
        ),
        Field("fabric.status", lambda v, g: "Success" if g.get("fabric") else None, since=525, help="NVSwitch fabric."),
    ]
    return rows


def _enabled(value: bool) -> str:
    return "Enabled" if value else "Disabled"


def _volta(gpu: dict[str, Any], value: Any) -> Any:
    """Page retirement: Volta and older; newer chips remap rows instead."""
    return value if gpu["ecc"] == "legacy" else None


def _modern_watts(gpu: dict[str, Any]) -> str | None:
    return None if gpu["ecc"] == "legacy" else _watts(gpu["power"]["draw"])


FIELDS = _fields()


def known_fields(view: View) -> dict[str, Field]:
    """Every accepted spelling on this driver."""
    known = {}
    for row in FIELDS:
        if not row.since <= view.branch <= row.until:
            continue
        for name in (row.name, *row.aliases):
            if name.startswith("clocks_event_reasons") and view.branch < 535:
                continue
            known[name] = row
    return known


def field_value(view: View, gpu: dict[str, Any], row: Field) -> str:
    """A value without its unit, or the bracketed text that stands for none."""
    for name in (row.name, *row.aliases):
        if name in gpu["overrides"]:
            return str(gpu["overrides"][name])
    if gpu["error"] and row.name not in {"index", "count", "driver_version", "timestamp", "name", "uuid"} | {
        "pci.bus_id",
    }:
        return f"[{gpu['error']}]"
    value = row.get(view, gpu)
    if value is None:
        return "[Not Supported]" if view.branch < 450 else "[N/A]"
    return str(value)


# ---------------------------------------------------------------------------------------------------------------------
# nvidia-smi: command line
# ---------------------------------------------------------------------------------------------------------------------


class Exit(Exception):
    """nvidia-smi ends here: text on stdout (it writes errors there too) and an exit status."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text


VALUE_OPTIONS = {
    "-i": "id", "--id": "id", "-f": "filename", "--filename": "filename", "-l": "loop", "--loop": "loop",
    "-lms": "loop-ms", "--loop-ms": "loop-ms", "-d": "display", "--display": "display", "--query-gpu": "query-gpu",
    "--query-compute-apps": "query-compute-apps", "--format": "format", "-pm": "persistence-mode",
    "--persistence-mode": "persistence-mode", "-pl": "power-limit", "--power-limit": "power-limit",
}  # fmt: skip
PLAIN_OPTIONS = {
    "-h": "help", "--help": "help", "-L": "list", "--list-gpus": "list", "-q": "query", "--query": "query",
    "-x": "xml", "--xml-format": "xml", "--help-query-gpu": "help-query-gpu",
    "--help-query-compute-apps": "help-query-compute-apps", "--version": "version", "-eow": "eow",
    "--error-on-warning": "eow",
}  # fmt: skip


def parse_words(words: Sequence[str], driver_branch: int) -> dict[str, str]:
    """Options as the real tool takes them: ``-i 0``, ``-i=0``, ``--id=0``."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in VALUE_OPTIONS:
            key = VALUE_OPTIONS[name]
            if not equals:
                if key == "loop" and (not rest or rest[0].startswith("-")):
                    value = "5"
                elif rest:
                    value = rest.pop(0)
                else:
                    raise Exit(RC_ARGUMENT, f"ERROR: Option {name} requires an argument. {_SEE_HELP}")
            options[key] = value
        elif word in PLAIN_OPTIONS and not (word == "--version" and driver_branch < 550):
            options[PLAIN_OPTIONS[word]] = ""
        else:
            raise Exit(RC_OTHER, f"ERROR: Option {word} is not recognized. Please run 'nvidia-smi -h'.\n\n")
    return options


_SEE_HELP = "Please run 'nvidia-smi -h' for help.\n\n"


def select(view: View, wanted: str | None, command: str = "") -> list[dict[str, Any]]:
    """The cards named by ``-i`` (index, UUID, bus id, serial; several with commas), in the order of the machine."""
    if wanted is None:
        return view.gpus
    names = [name.strip() for name in wanted.split(",")]
    chosen = [gpu for gpu in view.gpus if any(_is_named(gpu, name) for name in names)]
    if not chosen:
        raise Exit(RC_NOT_FOUND, "No devices were found\n")
    return chosen


def _is_named(gpu: dict[str, Any], name: str) -> bool:
    if name.isdigit() and len(name) < 6:
        return int(name) == int(gpu["index"])
    if ":" in name:
        return short_bus_id(name) == short_bus_id(gpu["bus_id"])
    return name in (gpu["uuid"], gpu["serial"])


def short_bus_id(bus_id: str) -> str:
    """Four hex digits of domain, lower case: the form of sysfs."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def refuse_lost(view: View, gpus: Iterable[dict[str, Any]], partial: str = "") -> None:
    """What the real tool does when a card's handle cannot be had: one line of text instead of any table."""
    for gpu in gpus:
        if gpu["lost"] == "handle":
            raise Exit(RC_GPU_LOST, f"{partial}Unable to determine the device handle for {lost_name(view, gpu)}\n\n\n")


def lost_name(view: View, gpu: dict[str, Any]) -> str:
    bus_id = gpu["bus_id"][4:] if gpu["bus_id"].startswith("0000") else gpu["bus_id"]
    glue = "" if view.branch >= 520 else " "
    return f"GPU{glue}{bus_id}: {LOST_TEXT}"


def nvidia_smi(words: Sequence[str]) -> int:
    path = state_path()
    try:
        state = load_state(path)
    except OSError:
        # No simulated driver on this machine: what the real tool says where there is none.
        sys.stdout.write(NO_DRIVER_TEXT)
        return RC_NO_DRIVER
    for fault in faults(state, "slow"):
        time.sleep(fault["seconds"])
    try:
        return _answer(path, state, list(words))
    except Exit as end:
        sys.stdout.write(end.text)
        return end.status


def _answer(path: Path, state: dict[str, Any], words: list[str]) -> int:
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(help_text(state))
        return RC_OK
    view = _seen(state)
    if words[:1] == ["topo"]:
        sys.stdout.write(topo(view, words[1:]))
        return RC_OK
    if words[:1] == ["nvlink"]:
        sys.stdout.write(nvlink(view, words[1:]))
        return RC_OK
    options = parse_words(words, view.branch)
    delay = _delay(options)
    while True:
        text, status = _once(path, view, options)
        if "filename" in options:
            Path(options["filename"]).write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
            sys.stdout.flush()
        if delay is None or status != RC_OK:
            return status
        time.sleep(delay)
        view = _seen(load_state(path))


def _seen(state: dict[str, Any]) -> View:
    """What the driver shows, where it shows anything."""
    if state["boot"] is not None and state["library"] is None:
        raise Exit(RC_NO_LIBRARY, NO_LIBRARY_TEXT)
    if loaded_version(state) is None or (state["boot"] is not None and nouveau_loaded(state)):
        raise Exit(RC_NO_DRIVER, NO_DRIVER_TEXT)
    if faults(state, "mismatch") or (state["boot"] is not None and loaded_version(state) != state["driver"]):
        shortened = ".".join(str(state["driver"]).split(".")[:2])
        second = f"NVML library version: {shortened}\n" if branch(state["driver"]) >= 525 else ""
        raise Exit(RC_MISMATCH, f"Failed to initialize NVML: Driver/library version mismatch\n{second}")
    view = look(state)
    if faults(state, "no-devices"):
        view.gpus.clear()
    if flavour(state) == "open":
        # The open module has no firmware processor to talk to on Volta.
        view.gpus[:] = [gpu for gpu in view.gpus if gpu["architecture"] != "Volta"]
    return view


def _delay(options: dict[str, str]) -> float | None:
    for key, scale in (("loop", 1.0), ("loop-ms", 1000.0)):
        if key in options:
            if not options[key].isdigit() or int(options[key]) == 0:
                raise Exit(RC_ARGUMENT, f"ERROR: Option {options[key]} is invalid for --{key}. {_SEE_HELP}")
            return int(options[key]) / scale
    return None


def _once(path: Path, view: View, options: dict[str, str]) -> tuple[str, int]:
    if "help" in options:
        return help_text(view.state), RC_OK
    if "version" in options:
        return version_text(view), RC_OK
    if "help-query-gpu" in options:
        return help_query_gpu(view), RC_OK
    if "help-query-compute-apps" in options:
        return HELP_COMPUTE_APPS, RC_OK
    if "list" in options:
        if "id" in options:
            raise Exit(RC_ARGUMENT, f"ERROR: Option -i is not valid for this command. {_SEE_HELP}")
        return list_gpus(view), RC_OK
    for query in ("query-gpu", "query-compute-apps"):
        if query in options:
            return csv_query(view, query, options)
    for option, change in (("persistence-mode", set_persistence), ("power-limit", set_power_limit)):
        if option in options:
            with _changing(path):
                view = _seen(load_state(path))
                return change(path, view, _chosen(view, options), options[option])
    chosen = _chosen(view, options)
    refuse_lost(view, chosen)
    if "query" in options or "xml" in options:
        if "xml" in options and "display" in options:
            raise Exit(
                RC_ARGUMENT,
                "Invalid combination of input arguments: --display/-d flags can not be combined with "
                "-x/--xml-format flags.\n",
            )
        if "xml" in options:
            return query_xml(view, chosen), RC_OK
        return query_text(view, chosen, options.get("display")), RC_OK
    return table(view, chosen), RC_OK


def list_gpus(view: View) -> str:
    if not view.gpus:
        return "No devices found.\n"
    lines = ""
    for gpu in view.gpus:
        if gpu["lost"] == "handle":
            name = lost_name(view, gpu).removeprefix("GPU").strip()
            raise Exit(RC_GPU_LOST, f"{lines}Unable to determine the device handle for gpu {name}\n\n\n")
        lines += f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})\n"
    return lines


def csv_query(view: View, query: str, options: dict[str, str]) -> tuple[str, int]:
    if "format" not in options:
        raise Exit(RC_ARGUMENT, f'"--format=" switch is missing. {_SEE_HELP}')
    modifiers = options["format"].split(",")
    if not set(modifiers) <= {"csv", "noheader", "nounits"}:
        raise Exit(RC_ARGUMENT, "Format modifier is not recognized.\n")
    if "csv" not in modifiers:
        raise Exit(RC_ARGUMENT, "Format modifier --format=csv is mandatory.\n")
    header, units = "noheader" not in modifiers, "nounits" not in modifiers
    names = [name for name in options[query].split(",") if name]
    if query == "query-compute-apps":
        return compute_apps(view, names, options.get("id"), header, units), RC_OK
    known = known_fields(view)
    for name in names:
        if name not in known:
            raise Exit(RC_ARGUMENT, f'Field "{name}" is not a valid field to query.\n\n')
    if not view.gpus:
        raise Exit(RC_NOT_FOUND, "No devices were found\n")
    chosen = select(view, options.get("id"))
    refuse_lost(view, chosen)
    rows = [known[name] for name in names]
    lines = []
    if header:
        lines.append(", ".join(row.column(view) + (f" [{row.unit}]" if row.unit and units else "") for row in rows))
    status = RC_OK
    for gpu in chosen:
        if gpu["lost"] == "row":
            bus_id = gpu["bus_id"][4:] if gpu["bus_id"].startswith("0000") else gpu["bus_id"]
            lines.append(f"Unable to determine the device handle for GPU{bus_id}: Unknown Error")
            lines.append(", ".join("[Unknown Error]" for _ in rows))
            status = RC_OTHER
            continue
        cells = []
        for row in rows:
            value = field_value(view, gpu, row)
            number = not value.startswith("[") and row.name not in gpu["overrides"]
            cells.append(f"{value} {row.unit}" if row.unit and units and number else value)
        lines.append(", ".join(cells))
    return "".join(line + "\n" for line in lines), status


COMPUTE_FIELDS = {
    "timestamp": "timestamp", "gpu_name": "gpu_name", "gpu_bus_id": "gpu_bus_id", "gpu_serial": "gpu_serial",
    "gpu_uuid": "gpu_uuid", "pid": "pid", "process_name": "process_name", "name": "process_name",
    "used_gpu_memory": "used_gpu_memory", "used_memory": "used_gpu_memory",
}  # fmt: skip


def compute_apps(view: View, names: Sequence[str], wanted: str | None, header: bool, units: bool) -> str:
    for name in names:
        if name not in COMPUTE_FIELDS:
            raise Exit(RC_ARGUMENT, f'Field "{name}" is not a valid field to query.\n\n')
    if not view.gpus:
        raise Exit(RC_NOT_FOUND, "No devices were found\n")
    chosen = select(view, wanted)
    refuse_lost(view, chosen)
    columns = [COMPUTE_FIELDS[name] for name in names]
    lines = []
    if header:
        lines.append(", ".join(c + (" [MiB]" if c == "used_gpu_memory" and units else "") for c in columns))
    for gpu in chosen:
        for process in view.processes:
            if process["gpu"]["index"] != gpu["index"]:
                continue
            values = {
                "timestamp": _now(), "gpu_name": gpu["name"], "gpu_bus_id": gpu["bus_id"], "gpu_serial": gpu["serial"],
                "gpu_uuid": gpu["uuid"], "pid": process["pid"], "process_name": process["name"],
                "used_gpu_memory": f"{process['mib']} MiB" if units else process["mib"],
            }  # fmt: skip
            lines.append(", ".join(str(values[column]) for column in columns))
    return "".join(line + "\n" for line in lines)


def _chosen(view: View, options: dict[str, str]) -> list[dict[str, Any]]:
    if not view.gpus:
        raise Exit(RC_NOT_FOUND, "No devices were found\n")
    return select(view, options.get("id"))


def is_root() -> bool:
    return os.geteuid() == 0


def set_persistence(path: Path, view: View, gpus: Sequence[dict[str, Any]], value: str) -> tuple[str, int]:
    choices = {"0": False, "1": True, "DISABLED": False, "ENABLED": True}
    if value.upper() not in choices:
        return f"Invalid persistence mode: {value}\nTerminating early due to previous errors.\n", RC_ARGUMENT
    on = choices[value.upper()]
    text = ""
    for gpu in gpus:
        if gpu["lost"] == "handle":
            return f"{text}Unable to determine the device handle for {lost_name(view, gpu)}\n\n\n", RC_GPU_LOST
        if gpu["persistence"] == on:
            text += f"Persistence mode is already {_enabled(on)} for GPU {gpu['bus_id']}.\n"
            continue
        if not is_root():
            text += f"Unable to set persistence mode for GPU {gpu['bus_id']}: Insufficient Permissions\n"
            return text + "Terminating early due to previous errors.\n", RC_PERMISSION
        view.state["gpus"][gpu["slot"]]["persistence"] = on
        text += f"{_enabled(on)} persistence mode for GPU {gpu['bus_id']}.\n"
    if is_root():
        save_state(path, view.state)
    return text + "All done.\n", RC_OK


def set_power_limit(path: Path, view: View, gpus: Sequence[dict[str, Any]], value: str) -> tuple[str, int]:
    if not re.fullmatch(r"\d+(\.\d+)?", value):
        raise Exit(RC_ARGUMENT, f"ERROR: Option {value} is invalid for -pl. {_SEE_HELP}")
    watts = float(value)
    text = ""
    for gpu in gpus:
        power = gpu["power"]
        if gpu["lost"] == "handle":
            return f"{text}Unable to determine the device handle for {lost_name(view, gpu)}\n\n\n", RC_GPU_LOST
        if not power["min"] <= watts <= power["max"]:
            text += (
                f"Provided power limit {watts:.2f} W is not a valid power limit which should be between "
                f"{power['min']:.2f} W and {power['max']:.2f} W for GPU {gpu['bus_id']}\n"
                "Terminating early due to previous errors.\n"
            )
            return text, RC_ARGUMENT
        if not is_root():
            text += f"Failed to set power management limit for GPU {gpu['bus_id']}: Insufficient Permissions\n"
            return text + "Terminating early due to previous errors.\n", RC_PERMISSION
        text += f"Power limit for GPU {gpu['bus_id']} was set to {watts:.2f} W from {power['limit']:.2f} W.\n"
        if not gpu["persistence"]:
            text += (
                f"Warning: persistence mode is disabled on device {gpu['bus_id']}. See the Known Issues section of the "
                "nvidia-smi(1) man page for more information. Run with [--help | -h] switch to get more information on "
                "how to enable persistence mode.\n"
            )
        view.state["gpus"][gpu["slot"]]["power"]["limit"] = watts
    save_state(path, view.state)
    return text + "All done.\n", RC_OK


# ---------------------------------------------------------------------------------------------------------------------
# nvidia-smi: the plain table
# ---------------------------------------------------------------------------------------------------------------------


def _date() -> str:
    return time.strftime("%a %b %e %H:%M:%S %Y")


def table(view: View, gpus: Sequence[dict[str, Any]]) -> str:
    """The summary; branches up to 545 print 89 columns, 550 and newer 91."""
    wide = view.branch >= 550
    bus_width, total = (24, 91) if wide else (22, 89)
    rule = f"+{'-' * 41}+{'-' * bus_width}+{'-' * 22}+"
    lines = [
        f"{_date()}       ",
        f"+{'-' * (total - 2)}+",
        f"| NVIDIA-SMI {view.driver:<23}Driver Version: {view.driver:<{15 if wide else 13}}"
        f"CUDA Version: {view.state['cuda']:<9}|",
        rule if view.branch >= 575 else f"|{rule[1:]}",
        f"| GPU  Name                 Persistence-M | Bus-Id{' ' * (10 if wide else 8)}Disp.A | Volatile Uncorr. ECC |",
        f"| Fan  Temp   Perf          Pwr:Usage/Cap |{'Memory-Usage ':>{bus_width}}| GPU-Util  Compute M. |",
        f"|{' ' * 41}|{' ' * bus_width}|               MIG M. |",
        f"|{'=' * 41}+{'=' * bus_width}+{'=' * 22}|",
    ]
    for gpu in gpus:
        lines += [*_table_rows(view, gpu, wide), rule]
    lines += [
        "" if view.branch >= 575 else " " * total,
        f"+{'-' * (total - 2)}+",
        f"| {'Processes:':<{total - 4}} |",
        f"|  GPU   GI   CI{'PID':>{17 if view.branch >= 565 else 11}}   Type   Process name".ljust(total - 12)
        + "GPU Memory |",
        "|        ID   ID".ljust(total - 12) + "Usage      |",
        f"|{'=' * (total - 2)}|",
    ]
    shown = [process for process in view.processes if any(process["gpu"]["index"] == gpu["index"] for gpu in gpus)]
    pid_width = 16 if view.branch >= 565 else 10
    for process in shown:
        left = f"|{process['gpu']['index']:>5}   N/A  N/A{process['pid']:>{pid_width}}      C   "
        room = total - len(left) - 12
        name = process["name"] if len(process["name"]) <= room - 2 else "..." + process["name"][-(room - 5) :]
        lines.append(f"{left}{name:<{room}}{process['mib']:>7}MiB |")
    if not shown:
        lines.append(f"|  No running processes found{' ' * (total - 30)}|")
    lines.append(f"+{'-' * (total - 2)}+")
    return "".join(line + "\n" for line in lines)


def _table_rows(view: View, gpu: dict[str, Any], wide: bool) -> list[str]:
    width = 24 if wide else 22
    lead = "   " if wide else " "

    def shown(name: str, text: Callable[[str], str] = str) -> str:
        """A cell as the table prints it: ERR! where the field cannot be read."""
        value = field_value(view, gpu, next(row for row in FIELDS if row.name == name))
        if value in ("[N/A]", "[Not Supported]"):
            return "N/A"
        return "ERR!" if value.startswith("[") or value == "ERR!" else text(value)

    name = gpu["name"] if len(gpu["name"]) <= 30 else gpu["name"][:27] + "..."
    first = f"|{gpu['index']:>4}  {name:<30} {'On' if gpu['persistence'] else 'Off':<3} |"
    display = shown("display_active", lambda value: "Off" if value == "Disabled" else "On")
    ecc = shown("ecc.errors.uncorrected.volatile.total") if gpu["ecc_enabled"] else "Off"
    first += f"{lead}{gpu['bus_id']}{display:>4} |{ecc:>21} |"

    fan, temperature = shown("fan.speed", lambda v: f"{v}%"), shown("temperature.gpu", lambda v: f"{v}C")
    state = shown("pstate")
    usage = shown("power.draw", lambda v: f"{round(float(v))}W")
    cap = shown("enforced.power.limit", lambda v: f"{round(float(v))}W")
    left = f"{fan:>4}{temperature:>6}{state:>{6 if state.startswith('P') else 5}}"
    power = f"{usage} / {cap:>{5 if wide else 4}} "
    total = field_value(view, gpu, next(row for row in FIELDS if row.name == "memory.total"))
    if total.startswith("["):
        text = "Not Supported" if total == "[N/A]" else total.strip("[]")
        memory = f" {text:<{width - 1}}"
    elif wide:
        memory = f"{view.used(gpu):>8}MiB / {gpu['memory_mib']:>6}MiB "
    else:
        memory = f"{view.used(gpu):>7}MiB / {gpu['memory_mib']:>5}MiB "
    utilization = shown("utilization.gpu", lambda v: f"{v}%")
    mode, mig = shown("compute_mode"), shown("mig.mode.current")
    second = f"|{left}{power:>{41 - len(left)}}|{memory}|{utilization:>8} {mode:>12} |"
    third = f"|{' ' * 41}|{' ' * width}|{mig:>21} |"
    return [first, second, third]


# ---------------------------------------------------------------------------------------------------------------------
# nvidia-smi: topo and nvlink
# ---------------------------------------------------------------------------------------------------------------------

TOPO_LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
P2P_LEGEND = """
Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""


def pair_cell(view: View, a: dict[str, Any], b: dict[str, Any]) -> str:
    links = link_count(view.state, a["slot"], b["slot"])
    if links:
        return f"NV{links}"
    return str(view.state["near"] if a["numa"] == b["numa"] else view.state["far"])


def topo(view: View, words: Sequence[str]) -> str:
    if list(words) in (["-m"], ["--matrix"]):
        return topo_matrix(view)
    if len(words) == 2 and words[0] in ("-p2p", "--p2pstatus"):
        return topo_p2p(view, words[1])
    return TOPO_HELP


def topo_matrix(view: View) -> str:
    if not view.gpus or any(gpu["lost"] == "handle" for gpu in view.gpus):
        raise Exit(RC_OTHER, "Failed to run topology matrix\n\n")
    nics = view.state["nics"]
    named = view.branch >= 520
    nic_names = [f"NIC{i}" if named else nic["name"] for i, nic in enumerate(nics)]
    tail = ["CPU Affinity"] + (["NUMA Affinity"] if view.branch >= 450 else [])
    tail += ["GPU NUMA ID"] if view.branch >= 525 else []
    names = [f"GPU{gpu['index']}" for gpu in view.gpus]
    header = "\t".join([*names, *nic_names, *tail])
    text = f"\t\x1b[4m{header}\x1b[0m\n" if view.branch >= 525 else f"\t{header}\n"
    for gpu in view.gpus:
        cells = [" X " if peer is gpu else pair_cell(view, gpu, peer) for peer in view.gpus]
        cells += [view.state["near"] if nic["numa"] == gpu["numa"] else view.state["far"] for nic in nics]
        text += f"GPU{gpu['index']}\t" + "\t".join(cells) + f"\t{gpu['cpus']}"
        text += f"\t{gpu['numa']}" if view.branch >= 450 else ""
        text += "\t\tN/A\n" if view.branch >= 525 else "\n"
    for i, nic in enumerate(nics):
        cells = [view.state["near"] if nic["numa"] == gpu["numa"] else view.state["far"] for gpu in view.gpus]
        cells += [" X " if j == i else "PIX" if other["numa"] == nic["numa"] else view.state["far"]
                  for j, other in enumerate(nics)]  # fmt: skip
        text += f"{nic_names[i]}\t" + "\t".join(cells) + "\t" * (4 if view.branch >= 525 else 2) + "\n"
    text += TOPO_LEGEND
    if nics and named:
        text += "\nNIC Legend:\n\n" + "".join(f"  NIC{i}: {nic['name']}\n" for i, nic in enumerate(nics))
    return text


def topo_p2p(view: View, capability: str) -> str:
    if capability not in ("r", "w", "n", "a", "p"):
        raise Exit(RC_ARGUMENT, "Invalid p2p capability index specified at the command-line\n\n")
    if not view.gpus or any(gpu["lost"] == "handle" for gpu in view.gpus):
        raise Exit(RC_OTHER, "Failed to display p2p capability matrix for the specified p2p Index\n\n")
    names = [f"GPU{gpu['index']}" for gpu in view.gpus]
    text = " \t\x1b[4m" + "".join(f"{name}\t" for name in names) + "\x1b[0m\n"
    for gpu, name in zip(view.gpus, names, strict=True):
        text += f" {name}\t"
        for peer in view.gpus:
            linked = link_count(view.state, gpu["slot"], peer["slot"]) > 0
            cell = "X" if peer is gpu else "OK" if linked or capability in ("r", "w") else "NS"
            text += f"{cell}\t"
        text += "\n"
    return text + P2P_LEGEND


def nvlink(view: View, words: Sequence[str]) -> str:
    options: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name in ("-i", "--id", "-l", "--link"):
            if not equals:
                if not rest:
                    raise Exit(RC_ARGUMENT, f"ERROR: Option {name} requires an argument.\n\n")
                value = rest.pop(0)
            options["id" if name in ("-i", "--id") else "link"] = value
        elif name in ("-s", "--status"):
            options["status"] = ""
        else:
            return NVLINK_HELP
    if "status" not in options:
        return NVLINK_HELP
    if not view.gpus:
        raise Exit(RC_NOT_FOUND, "No devices were found\n")
    gpus = select(view, options.get("id"))
    refuse_lost(view, gpus)
    text = ""
    for gpu in gpus:
        if not gpu["nvlinks"] or gpu["error"]:
            continue
        text += f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})\n"
        down = inactive_links(view.state, gpu["slot"])
        for peer in range(len(view.state["gpus"])):
            # A link that was taken down at its other end is down at this one.
            if peer != gpu["slot"]:
                ends = link_ends(view.state, gpu["slot"], peer)
                down |= {mine for mine, theirs in ends if theirs in inactive_links(view.state, peer)}
        if len(down) >= gpu["nvlinks"]:
            text += "NVML: Unable to retrieve NVLink information as all links are inActive\n"
            continue
        for link in range(gpu["nvlinks"]):
            if "link" in options and options["link"] != str(link):
                continue
            rate = "<inactive>" if link in down else f"{gpu['link_rate']} GB/s"
            text += f"\t Link {link}: {rate}\n"
    return text


# ---------------------------------------------------------------------------------------------------------------------
# nvidia-smi -q, as text and as XML: one tree, two ways of printing
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A line or a section of ``-q``. ``label`` null: not in text; ``tag`` null: not in XML.

    ``shown`` names the ``-d`` selections that print it, ``only_selected`` leaves it out of the full report.
    """

    label: str | None
    tag: str | None
    value: Any = None
    children: list[Node] | None = None
    shown: str = ""
    only_selected: bool = False
    raw: str | None = None


def _na(value: Any, unit: str = "") -> str:
    if value is None:
        return "N/A"
    return f"{value} {unit}" if unit else str(value)


def _tree(view: View, gpu: dict[str, Any]) -> list[Node]:
    """The report of one card, in the order of branch 535 (Volta) and 580 (Hopper)."""
    new = view.branch >= 575  # branch 580, checked against a live H200; in between approximately
    mid = view.branch >= 550
    legacy = gpu["ecc"] == "legacy"
    temperature, pcie = gpu["temperature"], gpu["pcie"]

    def section(label: str | None, tag: str, *children: Node, shown: str = "") -> Node:
        return Node(label, tag, children=list(children), shown=shown)

    def leaf(label: str | None, tag: str | None, value: Any, unit: str = "", shown: str = "") -> Node:
        text = gpu["error"] if _broken(gpu, label) and value is not None else _na(value, unit)
        return Node(label, tag, text, shown=shown)

    modern = (lambda value: value) if not legacy else (lambda value: None)
    reasons = active_reasons(view, gpu)

    def reason(label: str, name: str) -> Node:
        return leaf(label, f"clocks_event_reason_{name}", "Active" if name in reasons else "Not Active")

    bus, device = gpu["bus_id"].split(":")[1], gpu["bus_id"].split(":")[2][:2]
    domain = gpu["bus_id"].split(":")[0][-4:]
    nodes = [
        leaf("Product Name", "product_name", gpu["name"]),
        leaf("Product Brand", "product_brand", gpu["brand"]),
        leaf("Product Architecture", "product_architecture", gpu["architecture"]),
        leaf("Display Mode", "display_mode", "Requested functionality has been deprecated" if new else "Enabled"),
    ]
    if new:
        nodes.append(leaf("Display Attached", "display_attached", "Yes"))
    nodes += [
        leaf("Display Active", "display_active", "Disabled"),
        leaf("Persistence Mode", "persistence_mode", _enabled(gpu["persistence"])),
        leaf("Addressing Mode", "addressing_mode", modern("None")),
        section(
            "MIG Mode", "mig_mode",
            leaf("Current", "current_mig", modern("Disabled")), leaf("Pending", "pending_mig", modern("Disabled")),
        ),
        Node(None, "mig_devices", raw="\t\t\tNone\n"),
        leaf("Accounting Mode", "accounting_mode", "Disabled", shown="ACCOUNTING"),
        leaf("Accounting Mode Buffer Size", "accounting_mode_buffer_size", "4000", shown="ACCOUNTING"),
        section("Driver Model", "driver_model",
                leaf("Current", "current_dm", None), leaf("Pending", "pending_dm", None)),
        leaf("Serial Number", "serial", gpu["serial"]),
        leaf("GPU UUID", "uuid", gpu["uuid"]),
    ]  # fmt: skip
    if new:
        nodes.append(leaf("GPU PDI", "pdi", "0x0000000000000000"))
    nodes += [
        leaf("Minor Number", "minor_number", gpu["index"]),
        leaf("VBIOS Version", "vbios_version", gpu["vbios"]),
        leaf("MultiGPU Board", "multigpu_board", "No"),
        leaf("Board ID", "board_id", f"0x{int(domain + bus + device, 16):x}"),
        leaf("Board Part Number", "board_part_number", gpu["part_number"]),
        leaf("GPU Part Number", "gpu_part_number", gpu["gpu_part_number"]),
        leaf("FRU Part Number", "gpu_fru_part_number", None),
    ]
    if new:
        nodes.append(
            section(
                "Platform Info", "platformInfo",
                leaf("Chassis Serial Number", "chassis_serial_number", None), leaf("Slot Number", "slot_number", None),
                leaf("Tray Index", "tray_index", None), leaf("Host ID", "host_id", None),
                leaf("Peer Type", "peer_type", None), leaf("Module Id", "module_id", gpu["module_id"]),
                leaf("GPU Fabric GUID", "gpu_fabric_guid", None),
            )
        )  # fmt: skip
    else:
        nodes.append(leaf("Module ID", "gpu_module_id", gpu["module_id"]))
    inforom = gpu["inforom"]
    nodes += [
        section(
            "Inforom Version", "inforom_version",
            leaf("Image Version", "img_version", inforom[0]), leaf("OEM Object", "oem_object", inforom[1]),
            leaf("ECC Object", "ecc_object", inforom[2]), leaf("Power Management Object", "pwr_object", inforom[3]),
        ),
        section(
            "Inforom BBX Object Flush", "inforom_bbx_flush",
            leaf("Latest Timestamp", "latest_timestamp", None), leaf("Latest Duration", "latest_duration", None),
        ),
        section(
            "GPU Operation Mode", "gpu_operation_mode",
            leaf("Current", "current_gom", None), leaf("Pending", "pending_gom", None),
        ),
    ]  # fmt: skip
    virtualization = section(
        "GPU Virtualization Mode", "gpu_virtualization_mode",
        leaf("Virtualization Mode", "virtualization_mode", "Pass-Through" if gpu.get("fabric") else "None"),
        leaf("Host VGPU Mode", "host_vgpu_mode", None),
        *([leaf("vGPU Heterogeneous Mode", "vgpu_heterogeneous_mode", None)] if mid else []),
    )  # fmt: skip
    gsp = leaf("GSP Firmware Version", "gsp_firmware_version", modern(view.driver))
    reset = section(
        "GPU Reset Status", "gpu_reset_status",
        leaf("Reset Required", "reset_required", None),
        leaf("Drain and Reset Recommended", "drain_and_reset_recommended", None), shown="RESET_STATUS",
    )  # fmt: skip
    if new:
        nodes += [leaf("GPU C2C Mode", "c2c_mode", "Disabled"), virtualization]
        nodes += [leaf("GPU Recovery Action", "gpu_recovery_action", "None"), gsp]
    elif mid:
        nodes += [leaf("GPU C2C Mode", "c2c_mode", None), virtualization, reset, gsp]
    else:
        nodes += [gsp, virtualization, reset]
    nodes.append(section("IBMNPU", "ibmnpu", leaf("Relaxed Ordering Mode", "relaxed_ordering_mode", None)))
    atomic = [
        leaf("Atomic Caps Inbound", "atomic_caps_inbound", None),
        leaf("Atomic Caps Outbound", "atomic_caps_outbound", None),
    ]
    nodes += [
        section(
            "PCI", "pci",
            Node("Bus", "pci_bus", f"0x{bus}", raw=bus), Node("Device", "pci_device", f"0x{device}", raw=device),
            Node("Domain", "pci_domain", f"0x{domain}", raw=domain),
            *([Node("Base Classcode", "pci_base_class", "0x3", raw="3"),
               Node("Sub Classcode", "pci_sub_class", "0x2", raw="2")] if mid else []),
            Node("Device Id", "pci_device_id", f"0x{gpu['device_id'].upper()}10DE",
                 raw=gpu["device_id"].upper() + "10DE"),
            leaf("Bus Id", "pci_bus_id", gpu["bus_id"]),
            Node("Sub System Id", "pci_sub_system_id", f"0x{gpu['subsystem_id'].upper()}10DE",
                 raw=gpu["subsystem_id"].upper() + "10DE"),
            section(
                "GPU Link Info", "pci_gpu_link_info",
                section(
                    "PCIe Generation", "pcie_gen",
                    leaf("Max", "max_link_gen", pcie["max_gen"]), leaf("Current", "current_link_gen", pcie["gen"]),
                    leaf("Device Current", "device_current_link_gen", pcie["gen"]),
                    leaf("Device Max", "max_device_link_gen", pcie["max_gen"]),
                    leaf("Host Max", "max_host_link_gen", None),
                ),
                section(
                    "Link Width", "link_widths",
                    leaf("Max", "max_link_width", f"{pcie['max_width']}x"),
                    leaf("Current", "current_link_width", f"{pcie['width']}x"),
                ),
            ),
            section(
                "Bridge Chip", "pci_bridge_chip",
                leaf("Type", "bridge_chip_type", None), leaf("Firmware", "bridge_chip_fw", None),
            ),
            leaf("Replays Since Reset", "replay_counter", 0),
            leaf("Replay Number Rollovers", "replay_rollover_counter", 0),
            leaf("Tx Throughput", "tx_util", 0, "KB/s"), leaf("Rx Throughput", "rx_util", 0, "KB/s"),
            *(reversed(atomic) if new else atomic),
        ),
        leaf("Fan Speed", "fan_speed", None),
        leaf("Performance State", "performance_state", "P0", shown="PERFORMANCE"),
        section(
            "Clocks Event Reasons" if view.branch >= 535 else "Clocks Throttle Reasons",
            "clocks_event_reasons" if view.branch >= 535 else "clocks_throttle_reasons",
            reason("Idle", "gpu_idle"), reason("Applications Clocks Setting", "applications_clocks_setting"),
            reason("SW Power Cap", "sw_power_cap"), reason("HW Slowdown", "hw_slowdown"),
            reason("    HW Thermal Slowdown", "hw_thermal_slowdown"),
            reason("    HW Power Brake Slowdown", "hw_power_brake_slowdown"),
            reason("Sync Boost", "sync_boost"), reason("SW Thermal Slowdown", "sw_thermal_slowdown"),
            Node("Display Clock Setting", "clocks_event_reason_display_clocks_setting", "Not Active"),
            shown="PERFORMANCE",
        ),
    ]  # fmt: skip
    if gpu["error"]:
        nodes[-1].value, nodes[-1].children = gpu["error"], None
    if new:
        counters = ("sw_power_cap", "sync_boost", "sw_therm_slowdown", "hw_therm_slowdown", "hw_power_brake")
        labels = ("SW Power Capping", "Sync Boost", "SW Thermal Slowdown", "HW Thermal Slowdown", "HW Power Braking")
        nodes.append(
            section(
                "Clocks Event Reasons Counters", "clocks_event_reasons_counters",
                *(leaf(label, f"clocks_event_reasons_counters_{name}", 0, "us")
                  for label, name in zip(labels, counters, strict=True)), shown="PERFORMANCE",
            )
        )  # fmt: skip
    used = view.used(gpu)
    nodes += [
        leaf("Sparse Operation Mode", "sparse_operation_mode", modern("Disabled"), shown="PERFORMANCE"),
        section(
            "FB Memory Usage", "fb_memory_usage",
            leaf("Total", "total", gpu["memory_mib"], "MiB"), leaf("Reserved", "reserved", gpu["reserved_mib"], "MiB"),
            leaf("Used", "used", used, "MiB"),
            leaf("Free", "free", view.free(gpu) + (1 if gpu.get("fabric") else 0), "MiB"),
            shown="MEMORY",
        ),
        section(
            "BAR1 Memory Usage", "bar1_memory_usage",
            leaf("Total", "total", gpu["bar1_mib"], "MiB"), leaf("Used", "used", 1 if gpu.get("fabric") else 2, "MiB"),
            leaf("Free", "free", gpu["bar1_mib"] - (1 if gpu.get("fabric") else 2), "MiB"), shown="MEMORY",
        ),
        section(
            "Conf Compute Protected Memory Usage", "cc_protected_memory_usage",
            *(leaf(label, label.lower(), 0 if mid or not legacy else None, "MiB" if mid or not legacy else "")
              for label in ("Total", "Used", "Free")), shown="MEMORY",
        ),
        leaf("Compute Mode", "compute_mode", "Default", shown="COMPUTE"),
        section(
            "Utilization", "utilization",
            leaf("Gpu", "gpu_util", 0, "%"), leaf("Memory", "memory_util", 0, "%"),
            leaf("Encoder", "encoder_util", 0, "%"), leaf("Decoder", "decoder_util", 0, "%"),
            leaf("JPEG", "jpeg_util", modern("0 %")), leaf("OFA", "ofa_util", modern("0 %")), shown="UTILIZATION",
        ),
        *(_samples(f"{name} Utilization Samples", "UTILIZATION") for name in ("GPU", "Memory", "ENC", "DEC")),
        *(section(label, tag, leaf("Active Sessions", "session_count", 0), leaf("Average FPS", "average_fps", 0),
                  leaf("Average Latency", "average_latency", 0), shown=shown)
          for label, tag, shown in (("Encoder Stats", "encoder_stats", "ENCODER_STATS"),
                                    ("FBC Stats", "fbc_stats", "FBC_STATS"))),
    ]  # fmt: skip
    if new:
        nodes.append(
            section(
                "DRAM Encryption Mode", "dram_encryption_mode",
                leaf("Current", "current_dram_encryption", None), leaf("Pending", "pending_dram_encryption", None),
            )
        )  # fmt: skip
    mode = _enabled(gpu["ecc_enabled"])
    nodes.append(
        section("ECC Mode", "ecc_mode", leaf("Current", "current_ecc", mode), leaf("Pending", "pending_ecc", mode),
                shown="ECC")
    )  # fmt: skip
    nodes.append(_ecc_errors(view, gpu, leaf, section) if legacy else _ecc_errors_modern(gpu, leaf, section))
    nodes.append(_retired(gpu, legacy))
    if legacy:
        nodes.append(leaf("Remapped Rows", "remapped_rows", None, shown="ROW_REMAPPER"))
    else:
        banks = (
            ("Max", "max", 3072),
            ("High", "high", 0),
            ("Partial", "partial", 0),
            ("Low", "low", 0),
            ("None", "none", 0),
        )
        nodes.append(
            section(
                "Remapped Rows", "remapped_rows",
                leaf("Correctable Error", "remapped_row_corr", 0),
                leaf("Correctable Error Inactive", "remapped_row_corr_inactive", 0),
                leaf("Uncorrectable Error", "remapped_row_unc", 0),
                leaf("Uncorrectable Error Inactive", "remapped_row_unc_inactive", 0),
                leaf("Pending", "remapped_row_pending", "No"),
                leaf("Remapping Failure Occurred", "remapped_row_failure", "No"),
                section("Bank Remap Availability Histogram", "row_remapper_histogram",
                        *(leaf(label, f"row_remapper_histogram_{tag}", f"{count} bank(s)")
                          for label, tag, count in banks)),
                shown="ROW_REMAPPER",
            )
        )  # fmt: skip
    if legacy:
        nodes.append(
            section(
                "Temperature", "temperature",
                leaf("GPU Current Temp", "gpu_temp", temperature["core"], "C"),
                leaf("GPU T.Limit Temp", "gpu_temp_tlimit", None),
                leaf("GPU Shutdown Temp", "gpu_temp_max_threshold", temperature["shutdown"], "C"),
                leaf("GPU Slowdown Temp", "gpu_temp_slow_threshold", temperature["slowdown"], "C"),
                leaf("GPU Max Operating Temp", "gpu_temp_max_gpu_threshold", temperature["max_operating"], "C"),
                leaf("GPU Target Temperature", "gpu_target_temperature", None),
                leaf("Memory Current Temp", "memory_temp", temperature["memory"], "C"),
                leaf("Memory Max Operating Temp", "gpu_temp_max_mem_threshold", temperature["memory_max"], "C"),
                shown="TEMPERATURE",
            )
        )  # fmt: skip
    else:
        nodes.append(
            section(
                "Temperature", "temperature",
                leaf("GPU Current Temp", "gpu_temp", temperature["core"], "C"),
                leaf("GPU T.Limit Temp", "gpu_temp_tlimit", temperature["tlimit"], "C"),
                leaf("GPU Shutdown T.Limit Temp", "gpu_temp_max_tlimit_threshold", -8, "C"),
                leaf("GPU Slowdown T.Limit Temp", "gpu_temp_slow_tlimit_threshold", -2, "C"),
                leaf("GPU Max Operating T.Limit Temp", "gpu_temp_max_gpu_tlimit_threshold", 0, "C"),
                leaf("GPU Target Temperature", "gpu_target_temperature", None),
                leaf("Memory Current Temp", "memory_temp", temperature["memory"], "C"),
                leaf("Memory Max Operating T.Limit Temp", "gpu_temp_max_mem_tlimit_threshold", 0, "C"),
                shown="TEMPERATURE",
            )
        )  # fmt: skip
    target = section(
        "Supported GPU_TARGET_TEMP", "supported_gpu_target_temp",
        leaf("Min", "gpu_target_temp_min", None), leaf("Max", "gpu_target_temp_max", None),
        shown="SUPPORTED_GPU_TARGET_TEMP",
    )  # fmt: skip
    target.only_selected = True
    nodes.append(target)
    nodes += _power(gpu, leaf, section, new, modern)
    clocks, top, application = gpu["clocks"], gpu["max_clocks"], gpu["application_clocks"]
    nodes += [
        section(
            "Clocks", "clocks",
            leaf("Graphics", "graphics_clock", clocks["graphics"], "MHz"), leaf("SM", "sm_clock", clocks["sm"], "MHz"),
            leaf("Memory", "mem_clock", clocks["memory"], "MHz"), leaf("Video", "video_clock", clocks["video"], "MHz"),
            shown="CLOCK",
        ),
        *(section(label, tag, leaf("Graphics", "graphics_clock", application["graphics"], "MHz"),
                  leaf("Memory", "mem_clock", application["memory"], "MHz"), shown="CLOCK")
          for label, tag in (("Applications Clocks", "applications_clocks"),
                             ("Default Applications Clocks", "default_applications_clocks"))),
        section("Deferred Clocks", "deferred_clocks", leaf("Memory", "mem_clock", None), shown="CLOCK"),
        section(
            "Max Clocks", "max_clocks",
            leaf("Graphics", "graphics_clock", top["graphics"], "MHz"), leaf("SM", "sm_clock", top["sm"], "MHz"),
            leaf("Memory", "mem_clock", top["memory"], "MHz"), leaf("Video", "video_clock", top["video"], "MHz"),
            shown="CLOCK",
        ),
        section("Max Customer Boost Clocks", "max_customer_boost_clocks",
                leaf("Graphics", "graphics_clock", top["graphics"], "MHz"), shown="CLOCK"),
        *(_samples(f"{name} Clock Samples", "CLOCK") for name in ("SM", "Memory")),
        section("Clock Policy", "clock_policy", leaf("Auto Boost", "auto_boost", None),
                leaf("Auto Boost Default", "auto_boost_default", None), shown="CLOCK"),
    ]  # fmt: skip
    if not new:
        nodes.append(section("Voltage", "voltage", leaf("Graphics", "graphics_volt", None), shown="VOLTAGE"))
    fabric = [
        leaf("State", "state", "Completed" if gpu.get("fabric") else None),
        leaf("Status", "status", "Success" if gpu.get("fabric") else None),
    ]
    if mid:
        fabric += [
            leaf("CliqueId", "cliqueId", 0 if gpu.get("fabric") else None),
            leaf("ClusterUUID", "clusterUuid", "00000000-0000-0000-0000-000000000000" if gpu.get("fabric") else None),
        ]
    if new:
        health = (("Summary", "summary"), ("Bandwidth", "bandwidth"),
                  ("Route Recovery in progress", "route_recovery_in_progress"), ("Route Unhealthy", "route_unhealthy"),
                  ("Access Timeout Recovery", "access_timeout_recovery"),
                  ("Incorrect Configuration", "incorrect_configuration"),
                  ("Partition Assigned", "partition_assigned"))  # fmt: skip
        fabric.append(section("Health", "health", *(leaf(label, tag, None) for label, tag in health)))
    nodes.append(section("Fabric", "fabric", *fabric))
    nodes.append(_supported_clocks(gpu))
    nodes.append(_process_nodes(view, gpu))
    nodes.append(_accounted(new))
    if new:
        nodes.append(section("Capabilities", "capabilities", leaf("EGM", "egm", "disabled")))
    return nodes


def _supported_clocks(gpu: dict[str, Any]) -> Node:
    clocks = gpu.get("supported_clocks")
    node = Node("Supported Clocks", "supported_clocks", "N/A", shown="SUPPORTED_CLOCKS", only_selected=True)
    if clocks:
        node.children = [
            Node(None, "supported_mem_clock", children=[
                Node("Memory", "value", f"{memory} MHz"),
                *(Node("    Graphics", "supported_graphics_clock", f"{core} MHz") for core in clocks["graphics"]),
            ])
            for memory in clocks["memory"]
        ]  # fmt: skip
    return node


def _accounted(new: bool) -> Node:
    node = Node("Accounted Processes", "accounted_processes", "N/A", shown="ACCOUNTING", only_selected=True)
    if new:
        node.children = []
    return node


def _broken(gpu: dict[str, Any], label: str | None) -> bool:
    return bool(gpu["error"]) and label not in {"Product Name", "GPU UUID", "Bus Id", "Persistence Mode"}


def _samples(label: str, shown: str) -> Node:
    rows = [Node(name, None, "N/A") for name in ("Duration", "Number of Samples", "Max", "Min", "Avg")]
    return Node(label, None, children=rows, shown=shown, only_selected=True)


def _ecc_errors(view: View, gpu: dict[str, Any], leaf: Any, section: Any) -> Node:
    places = (
        ("Device Memory", "device_memory", "device_memory"), ("Register File", "register_file", "register_file"),
        ("L1 Cache", "l1_cache", "l1_cache"), ("L2 Cache", "l2_cache", "l2_cache"),
        ("Texture Memory", "texture_memory", ""), ("Texture Shared", "texture_shm", ""), ("CBU", "cbu", "cbu"),
        ("Total", "total", "total"),
    )  # fmt: skip
    groups = []
    for counter in ("volatile", "aggregate"):
        bits = []
        for label, tag, kind in (
            ("Single Bit", "single_bit", "corrected"),
            ("Double Bit", "double_bit", "uncorrected"),
        ):
            rows = [leaf(text, name, _ecc(kind, counter, place)(view, gpu)) for text, name, place in places]
            bits.append(section(f"{label}            ", tag, *rows))
        groups.append(section(counter.capitalize(), counter, *bits))
    node: Node = section("ECC Errors", "ecc_errors", *groups, shown="ECC")
    return node


def _ecc_errors_modern(gpu: dict[str, Any], leaf: Any, section: Any) -> Node:
    def count(kind: str, counter: str) -> int:
        return int(gpu["ecc_counts"].get((kind, counter), 0))

    def group(counter: str, *more: Node) -> Any:
        return section(
            counter.capitalize(), counter,
            leaf("SRAM Correctable", "sram_correctable", 0),
            leaf("SRAM Uncorrectable Parity", "sram_uncorrectable_parity", 0),
            leaf("SRAM Uncorrectable SEC-DED", "sram_uncorrectable_secded", 0),
            leaf("DRAM Correctable", "dram_correctable", count("corrected", counter)),
            leaf("DRAM Uncorrectable", "dram_uncorrectable", count("uncorrected", counter)), *more,
        )  # fmt: skip

    sources = (("SRAM L2", "sram_l2"), ("SRAM SM", "sram_sm"), ("SRAM Microcontroller", "sram_microcontroller"),
               ("SRAM PCIE", "sram_pcie"), ("SRAM Other", "sram_other"))  # fmt: skip
    node: Node = section(
        "ECC Errors", "ecc_errors", group("volatile"),
        group("aggregate", leaf("SRAM Threshold Exceeded", "sram_threshold_exceeded", "No")),
        section("Aggregate Uncorrectable SRAM Sources", "aggregate_uncorrectable_sram_sources",
                *(leaf(label, tag, 0) for label, tag in sources)),
        leaf("Channel Repair Pending", "channel_repair_pending", "No"),
        leaf("TPC Repair Pending", "tpc_repair_pending", "No"),
        leaf("Unrepairable Memory", "unrepairable_memory", "No"),
        shown="ECC",
    )  # fmt: skip
    return node


def _retired(gpu: dict[str, Any], legacy: bool) -> Node:
    """Text names counts and the pending flag; XML nests counts and page lists."""
    retired = gpu["retired"]
    pending = gpu["error"] or ("Yes" if retired["pending"] else "No") if legacy else "N/A"
    rows = []
    for label, tag, key in (("Single Bit ECC", "multiple_single_bit_retirement", "single"),
                            ("Double Bit ECC", "double_bit_retirement", "double")):  # fmt: skip
        count = gpu["error"] or str(retired[key]) if legacy else "N/A"
        pages = [Node(None, "retired_page", f"0x{0x1A2B + n:016x}") for n in range(retired[key])]
        listing = Node(None, "retired_pagelist", children=pages) if legacy else Node(None, "retired_pagelist", "N/A")
        rows.append(Node(None, tag, children=[Node(None, "retired_count", count), listing]))
        rows.append(Node(label, None, count))
    rows += [Node("Pending Page Blacklist", "pending_blacklist", pending), Node(None, "pending_retirement", pending)]
    return Node("Retired Pages", "retired_pages", children=rows, shown="PAGE_RETIREMENT")


def _power(gpu: dict[str, Any], leaf: Any, section: Any, new: bool, modern: Any) -> list[Node]:
    power = gpu["power"]
    limits = (("Current Power Limit", "current_power_limit", "limit"),
              ("Requested Power Limit", "requested_power_limit", "limit"),
              ("Default Power Limit", "default_power_limit", "default"), ("Min Power Limit", "min_power_limit", "min"),
              ("Max Power Limit", "max_power_limit", "max"))  # fmt: skip

    def draw(watts: float | None, instant: float | None) -> list[Node]:
        if new:
            return [leaf("Average Power Draw", "average_power_draw", _watts(watts), "W" if watts is not None else ""),
                    leaf("Instantaneous Power Draw", "instant_power_draw", _watts(instant),
                         "W" if instant is not None else "")]  # fmt: skip
        return [leaf("Power Draw", "power_draw", _watts(watts), "W" if watts is not None else "")]

    state = "P0" if new else None
    nodes = [
        section(
            "GPU Power Readings", "gpu_power_readings", Node(None, "power_state", _na(state)),
            *draw(power["draw"], power["draw"]),
            *(leaf(label, tag, _watts(power[key]), "W") for label, tag, key in limits), shown="POWER",
        ),
        _samples("Power Samples", "POWER"),
    ]  # fmt: skip
    if new:
        nodes.append(section("GPU Memory Power Readings", "gpu_memory_power_readings",
                             *draw(power.get("memory_draw"), None), shown="POWER"))  # fmt: skip
    nodes.append(
        section(
            "Module Power Readings", "module_power_readings", Node(None, "power_state", _na(state)), *draw(None, None),
            *(leaf(label, tag, None) for label, tag, _ in limits), shown="POWER",
        )
    )  # fmt: skip
    if new:
        nodes += [
            leaf("Power Smoothing", "power_smoothing", None),
            section("Workload Power Profiles", "power_profiles",
                    leaf("Requested Profiles", "power_profile_requested_profiles", None),
                    leaf("Enforced Profiles", "power_profile_enforced_profiles", None)),
        ]  # fmt: skip
    return nodes


def _process_nodes(view: View, gpu: dict[str, Any]) -> Node:
    rows = []
    for process in view.processes:
        if process["gpu"]["index"] == gpu["index"]:
            rows.append(
                Node(None, "process_info", children=[
                    Node("GPU instance ID", "gpu_instance_id", "N/A"),
                    Node("Compute instance ID", "compute_instance_id", "N/A"),
                    Node("Process ID", "pid", process["pid"]), Node("    Type", "type", "C"),
                    Node("    Name", "process_name", process["name"]),
                    Node("    Used GPU Memory", "used_memory", f"{process['mib']} MiB"),
                ])
            )  # fmt: skip
    return Node("Processes", "processes", children=rows, shown="PIDS")


DISPLAY_FLAGS = (
    "MEMORY", "UTILIZATION", "ECC", "TEMPERATURE", "POWER", "CLOCK", "COMPUTE", "PIDS", "PERFORMANCE",
    "SUPPORTED_CLOCKS", "PAGE_RETIREMENT", "ACCOUNTING", "ENCODER_STATS", "SUPPORTED_GPU_TARGET_TEMP", "VOLTAGE",
    "FBC_STATS", "ROW_REMAPPER", "RESET_STATUS",
)  # fmt: skip


def query_text(view: View, gpus: Sequence[dict[str, Any]], display: str | None) -> str:
    selected = None
    if display is not None:
        selected = {flag.strip().upper() for flag in display.split(",")}
        if not selected <= set(DISPLAY_FLAGS):
            raise Exit(RC_ARGUMENT, "Failed to parse --display/-d flags\n")
    text = "\n==============NVSMI LOG==============\n\n"
    text += _line("", "Timestamp", _date()) + _line("", "Driver Version", view.driver)
    text += _line("", "CUDA Version", view.state["cuda"]) + "\n" + _line("", "Attached GPUs", len(view.gpus))
    for gpu in gpus:
        text += f"GPU {gpu['bus_id']}\n"
        for node in _tree(view, gpu):
            if (node.only_selected and selected is None) or (selected is not None and node.shown not in selected):
                continue
            text += _as_text(node, 1)
        text += "\n"
    return text


def _line(indent: str, label: str, value: Any) -> str:
    return f"{indent + label:<42}: {value}\n"


def _as_text(node: Node, depth: int) -> str:
    indent = "    " * depth
    if node.children is None:
        return "" if node.label is None or node.value is None else _line(indent, node.label, node.value)
    if node.tag in ("processes", "accounted_processes") and not node.children:
        return _line(indent, str(node.label), "None")
    below = "".join(_as_text(child, depth if node.label is None else depth + 1) for child in node.children)
    if node.label is None:
        # A level that only XML has; its labelled lines belong to the level above, if any have labels.
        return below
    return f"{indent}{node.label}\n{below}"


def query_xml(view: View, gpus: Sequence[dict[str, Any]]) -> str:
    version = 13 if view.branch >= 575 else 12
    text = f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v{version}.dtd">\n<nvidia_smi_log>\n'
    for tag, value in (("timestamp", _date()), ("driver_version", view.driver), ("cuda_version", view.state["cuda"]),
                       ("attached_gpus", len(view.gpus))):  # fmt: skip
        text += f"\t<{tag}>{value}</{tag}>\n"
    for gpu in gpus:
        text += f'\t<gpu id="{gpu["bus_id"]}">\n'
        text += "".join(_as_xml(node, 2) for node in _tree(view, gpu))
        text += "\t</gpu>\n\n"
    return text + "</nvidia_smi_log>\n"


def _as_xml(node: Node, depth: int) -> str:
    if node.tag is None:
        return ""
    indent = "\t" * depth
    if node.tag == "mig_devices":
        return f"{indent}<mig_devices>\n{node.raw}{indent}</mig_devices>\n"
    if node.children is None:
        value = node.value if node.raw is None else node.raw
        escaped = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return f"{indent}<{node.tag}>{escaped}</{node.tag}>\n"
    below = "".join(_as_xml(child, depth + 1) for child in node.children)
    return f"{indent}<{node.tag}>\n{below}{indent}</{node.tag}>\n"


# ---------------------------------------------------------------------------------------------------------------------
# nvidia-smi: help
# ---------------------------------------------------------------------------------------------------------------------

TOPO_HELP = """
    topo -- Display topological information about the system.

    Usage: nvidia-smi topo [options]

    Options that the simulator answers:
    [-m | --matrix]: Display the GPUDirect communication matrix for the system.
    [-p2p | --p2pstatus]: Display the p2p status between the GPUs of a capability: r, w, n, a or p

"""
NVLINK_HELP = """
    nvlink -- Display NvLink information.

    Usage: nvidia-smi nvlink [options]

    Options that the simulator answers:
    [-i | --id]: Enumeration index, PCI bus ID or UUID.
    [-l | --link]: Limit a command to a specific link.
    [-s | --status]: Display link state (active/inactive).

"""
HELP_COMPUTE_APPS = 'List of valid properties to query for the switch "--query-compute-apps":\n\n' + "".join(
    f'"{name}"\n' for name in ("timestamp", "gpu_name", "gpu_bus_id", "gpu_serial", "gpu_uuid", "pid")
) + '"process_name" or "name"\n"used_gpu_memory" or "used_memory"\n'  # fmt: skip


def help_text(state: dict[str, Any]) -> str:
    options = "\n".join(
        f"    {spelling}" for spelling in [*sorted(VALUE_OPTIONS), *sorted(PLAIN_OPTIONS), "topo", "nvlink"]
    )
    return (
        f"NVIDIA System Management Interface -- v{state['driver']}\n\n"
        "(simulated: this machine has no NVIDIA driver)\n\n"
        f"nvidia-smi [OPTION1 [ARG1]] [OPTION2 [ARG2]] ...\n\n{options}\n"
    )


def version_text(view: View) -> str:
    """Branch 550 and newer; 535 does not know --version (checked)."""
    return (
        f"NVIDIA-SMI version  : {view.driver}\nNVML version        : {'.'.join(view.driver.split('.')[:2])}\n"
        f"DRIVER version      : {view.driver}\nCUDA Version        : {view.state['cuda']}\n"
    )


def help_query_gpu(view: View) -> str:
    text = 'List of valid properties to query for the switch "--query-gpu":\n\n'
    for row in FIELDS:
        if row.since <= view.branch <= row.until:
            if row.name.startswith("clocks_event_reasons") and view.branch < 535:
                names: tuple[str, ...] = row.aliases
            else:
                names = (row.name, *row.aliases)
            text += " or ".join(f'"{name}"' for name in names) + f"\n{row.help}\n\n"
    return text


# ---------------------------------------------------------------------------------------------------------------------
# The simulated root
# ---------------------------------------------------------------------------------------------------------------------


def _put(root: Path, path: str, text: str | bytes) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(text, bytes):
        target.write_bytes(text)
    else:
        target.write_text(text, encoding="utf-8")


def _mirror(root: Path, path: str, hidden: Callable[[str], bool]) -> None:
    """Make ``path`` a real folder of links to the real machine's entries, less the hidden ones."""
    folder = root / path
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        names = [entry.name for entry in Path("/", path).iterdir()]
    except OSError:
        return
    for name in names:
        if not hidden(name):
            # What appears twice (a link already there) was put there on purpose.
            with contextlib.suppress(FileExistsError):
                (folder / name).symlink_to(f"/{path}/{name}" if path else f"/{name}")


def write_sysroot(state: dict[str, Any]) -> None:
    """Write the simulated root beside the old one and switch to it by replacing one link."""
    link = Path(state["sysroot"])
    link.parent.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(dir=link.parent, prefix=f".{link.name}-"))
    root.chmod(0o755)
    try:
        _fill_sysroot(root, state)
        old = link.resolve() if link.is_symlink() else None
        fresh = link.parent / f".{link.name}.link-{root.name[-8:]}"
        fresh.symlink_to(root.name)
        fresh.replace(link)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    if old is not None and old.parent == root.parent and old.name.startswith(f".{link.name}-"):
        shutil.rmtree(old, ignore_errors=True)


def _fill_sysroot(root: Path, state: dict[str, Any]) -> None:
    if state["boot"] is not None:
        _mirror(root, "", lambda name: name in {"proc", "sys", "dev", "commands"})
        _write_boot(root, state)
    else:
        overlaid = {"proc", "sys", "dev", "lib", "usr", "commands"}
        _mirror(root, "", lambda name: name in overlaid)
        for path in ("lib", "usr"):
            _mirror(root, path, lambda name: name in {"modules", "lib64"})
        if state["kernel"]:
            _write_kernel(root, state)
        else:
            _mirror(root, "lib/modules", lambda name: False)
        _mirror(root, "usr/lib64", lambda name: False)
    _mirror(root, "proc", lambda name: name.isdigit() or name in {"modules", "driver"})
    _mirror(root, "proc/driver", lambda name: name == "nvidia")
    _mirror(root, "sys", lambda name: name in {"bus", "module", "firmware"})
    _mirror(root, "sys/bus", lambda name: name == "pci")
    _mirror(root, "sys/bus/pci", lambda name: name == "devices")
    _mirror(root, "sys/bus/pci/devices", _is_real_nvidia)
    # Only the GPU's part of these is there: the rest is long, and nothing of ours reads it.
    for path in ("sys/module", "sys/firmware", "dev"):
        (root / path).mkdir(exist_ok=True)
    _write_driver(root, state)
    _write_devices(root, state)
    _put(root, "dev/kmsg", kernel_log(state))


def _write_kernel(root: Path, state: dict[str, Any]) -> None:
    """A kernel of the simulated machine's own, in place of those of the real one."""
    kernel = state["kernel"]
    for path, hidden in (("proc/sys", "kernel"), ("proc/sys/kernel", "osrelease")):
        _mirror(root, path, hidden.__eq__)
    _put(root, "proc/sys/kernel/osrelease", f"{kernel}\n")
    (root / "boot").unlink(missing_ok=True)
    _put(root, f"boot/vmlinuz-{kernel}", "")
    nouveau = "kernel/drivers/gpu/drm/nouveau/nouveau.ko:\n" if faults(state, "nouveau") else ""
    _put(root, f"lib/modules/{kernel}/modules.dep", nouveau)


def _write_boot(root: Path, state: dict[str, Any]) -> None:
    """What the running kernel says of itself: release, boot id, command line."""
    boot = state["boot"]
    _mirror(root, "proc/sys", "kernel".__eq__)
    _mirror(root, "proc/sys/kernel", lambda name: name in {"osrelease", "random"})
    _mirror(root, "proc/sys/kernel/random", "boot_id".__eq__)
    _put(root, "proc/sys/kernel/random/boot_id", f"{boot['id']}\n")
    if boot["kernel"]:
        _put(root, "proc/sys/kernel/osrelease", f"{boot['kernel']}\n")
    else:
        (root / "proc/sys/kernel/osrelease").symlink_to("/proc/sys/kernel/osrelease")
    (root / "proc/cmdline").unlink(missing_ok=True)
    _put(root, "proc/cmdline", f"{boot['cmdline']}\n")


def _is_real_nvidia(name: str) -> bool:
    """The host's own NVIDIA cards: a lab machine must not see them."""
    try:
        vendor = Path("/sys/bus/pci/devices", name, "vendor").read_text(encoding="ascii").strip()
    except OSError:
        return False
    return vendor == "0x10de"


def loaded_version(state: dict[str, Any]) -> str | None:
    """Version of the loaded nvidia module; null where none is loaded."""
    if state["boot"] is not None:
        if faults(state, "no-driver") or "nvidia" not in state["boot"]["modules"]:
            return None
        return next((str(fault["loaded"]) for fault in faults(state, "mismatch")), str(state["boot"]["nvidia"]))
    if faults(state, "no-driver") or faults(state, "nouveau") or faults(state, "secure-boot"):
        return None
    for fault in faults(state, "mismatch"):
        return str(fault["loaded"])
    return str(state["driver"])


def nouveau_loaded(state: dict[str, Any]) -> bool:
    if state["boot"] is not None:
        return "nouveau" in state["boot"]["modules"]
    return bool(faults(state, "nouveau"))


def flavour(state: dict[str, Any]) -> str:
    return "open" if faults(state, "open-module") else str(state["flavour"])


def nvrm_version(state: dict[str, Any], version: str) -> str:
    """The first line of /proc/driver/nvidia/version, as both flavours print it."""
    arch = state["arch"]
    if flavour(state) == "open":
        return f"NVRM version: NVIDIA UNIX Open Kernel Module for {arch}  {version}  Release Build  (nixbld@)  \n"
    return f"NVRM version: NVIDIA UNIX {arch} Kernel Module  {version}  Thu Jun 26 02:17:40 UTC 2025\n"


def _write_driver(root: Path, state: dict[str, Any]) -> None:
    version = loaded_version(state)
    real = [line for line in _read("/proc/modules").splitlines() if not line.startswith(("nvidia", "nouveau"))]
    loaded = []
    if version:
        loaded = [
            "nvidia_uvm 1540096 0 - Live 0x0000000000000000 (POE)",
            "nvidia_drm 77824 0 - Live 0x0000000000000000 (POE)",
            "nvidia_modeset 1306624 1 nvidia_drm, Live 0x0000000000000000 (POE)",
            "nvidia 56807424 2 nvidia_uvm,nvidia_modeset, Live 0x0000000000000000 (POE)",
        ]
        _put(root, "proc/driver/nvidia/version",
             nvrm_version(state, version) + "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14) \n")  # fmt: skip
        _put(root, "proc/driver/nvidia/params", "EnableMSI: 1\nModifyDeviceFiles: 1\nDeviceFileUID: 0\n")
        (root / "proc/driver/nvidia/gpus").mkdir(parents=True, exist_ok=True)
        _put(root, "sys/module/nvidia/version", version + "\n")
        _put(root, "sys/module/nvidia/taint", "POE\n")
        there = ["nvidia_uvm", "nvidia_drm", "nvidia_modeset"]
        if state["boot"] is not None:
            there = [name for name in there if name in state["boot"]["modules"]]
            loaded = [_as_loaded(line, there) for line in loaded if line.split(" ", 1)[0] in ("nvidia", *there)]
        for name in there:
            _put(root, f"sys/module/{name}/version", version + "\n")
        nodes = {"nvidiactl": "nvidia", "nvidia-uvm": "nvidia_uvm", "nvidia-modeset": "nvidia_modeset"}
        for node, name in nodes.items():
            if name in ("nvidia", *there):
                _put(root, f"dev/{node}", "")
    if nouveau_loaded(state):
        loaded += ["nouveau 2306048 0 - Live 0x0000000000000000"]
        busy = state["boot"] is None or faults(state, "nouveau-busy")
        _put(root, "sys/module/nouveau/refcnt", "4\n" if busy else "0\n")
    _put(root, "proc/modules", "".join(line + "\n" for line in [*loaded, *real]))
    if faults(state, "secure-boot"):
        # Four bytes of attributes, then the value (UEFI specification, efivarfs).
        name = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
        _put(root, f"sys/firmware/efi/efivars/{name}", b"\x06\x00\x00\x00\x01")
    absent = [fault["how"] for fault in faults(state, "no-driver")]
    if "absent" not in absent and state["boot"] is None:
        _write_installed(root, state, built="unbuilt" not in absent)


def _as_loaded(line: str, there: Sequence[str]) -> str:
    """A line of /proc/modules with only those users that are loaded."""
    name, size, _, users, *rest = line.split(" ")
    users = "".join(f"{user}," for user in users.split(",") if user in there)
    return " ".join((name, size, str(users.count(",")), users or "-", *rest))


def _write_installed(root: Path, state: dict[str, Any], built: bool) -> None:
    """Library and module files, where the real machine has none of its own."""
    version = str(state["driver"])
    library = f"libnvidia-ml.so.{version}"
    real = [Path(folder).glob("libnvidia-ml.so.*") for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")]
    if not any(path for found in real for path in found):
        _put(root, f"usr/lib64/{library}", "")
        (root / "usr/lib64/libnvidia-ml.so.1").symlink_to(library)
    if not built:
        return
    image = module_image(version, "Dual MIT/GPL" if flavour(state) == "open" else "NVIDIA")
    kernels = {state["kernel"] or os.uname().release}
    if not state["kernel"]:
        kernels |= {path.name.removeprefix("vmlinuz-") for path in Path("/boot").glob("vmlinuz-*")}
    for kernel in sorted(kernels):
        folder = f"lib/modules/{kernel}"
        if any(Path("/", folder).glob("updates/dkms/nvidia*.ko*")):
            continue
        if not state["kernel"]:
            _mirror(root, folder, lambda name: name == "updates")
        for name in ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm"):
            _put(root, f"{folder}/updates/dkms/{name}.ko", image)


def module_image(
    version: str,
    licence: str,
    *,
    name: str = "nvidia",
    kernel: str = "simulated",
    aliases: Sequence[str] = (),
    depends: Sequence[str] = (),
) -> bytes:
    """The least that is a kernel module file to a reader (depmod and modinfo included): ELF with a .modinfo section."""
    pairs = [("version", version)] if version else []
    pairs += [("license", licence)]
    pairs += [("alias", alias) for alias in aliases]
    pairs += [("depends", ",".join(depends)), ("name", name), ("vermagic", f"{kernel} SMP mod_unload modversions ")]
    info = b"".join(f"{key}={value}".encode() + b"\0" for key, value in pairs)
    names = b"\0.modinfo\0.shstrtab\0"
    start = 64
    sections = start + len(info) + len(names)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01" + b"\0" * 9, 1, 62, 1, 0, 0, sections, 0, 64, 0, 0, 64, 3, 2,
    )  # fmt: skip
    table = struct.pack("<IIQQQQIIQQ", *([0] * 10))
    table += struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, start, len(info), 0, 0, 1, 0)
    table += struct.pack("<IIQQQQIIQQ", 10, 3, 0, 0, start + len(info), len(names), 0, 0, 1, 0)
    return header + info + names + table


SPEED = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}


def _write_devices(root: Path, state: dict[str, Any]) -> None:
    version = loaded_version(state)
    for gpu in visible_gpus(state):
        bus_id = short_bus_id(gpu["bus_id"])
        folder = f"sys/bus/pci/devices/{bus_id}"
        pcie = gpu["pcie"]
        lost = bool(gpu["lost"])
        driver = "nouveau" if nouveau_loaded(state) else "nvidia" if version else ""
        values = {
            "vendor": "0x10de", "device": f"0x{gpu['device_id']}", "subsystem_vendor": "0x10de",
            "subsystem_device": f"0x{gpu['subsystem_id']}", "class": "0x030200", "revision": "0xa1",
            "numa_node": str(gpu["numa"]), "local_cpulist": gpu["cpus"], "enable": "1",
            "current_link_speed": "Unknown" if lost else f"{SPEED[pcie['gen']]} GT/s PCIe",
            "current_link_width": "63" if lost else str(pcie["width"]),
            "max_link_speed": f"{SPEED[pcie['max_gen']]} GT/s PCIe", "max_link_width": str(pcie["max_width"]),
            "power_state": "unknown" if lost else "D0", "irq": str(100 + gpu["index"]),
            "uevent": (f"DRIVER={driver}\n" if driver else "")
            + f"PCI_CLASS=30200\nPCI_ID=10DE:{gpu['device_id'].upper()}\n"
            + f"PCI_SUBSYS_ID=10DE:{gpu['subsystem_id'].upper()}\nPCI_SLOT_NAME={bus_id}",
        }  # fmt: skip
        for name, value in values.items():
            _put(root, f"{folder}/{name}", value + "\n")
        config = struct.pack("<HH", 0x10DE, int(gpu["device_id"], 16)) + b"\0" * 60
        # Reads from a device that is off the bus come back as all ones.
        _put(root, f"{folder}/config", b"\xff" * 64 if lost else config)
        if driver:
            (root / folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        driven = flavour(state) == "proprietary" or gpu["architecture"] != "Volta"
        if driver == "nvidia" and driven and not faults(state, "no-devices"):
            _put(
                root,
                f"proc/driver/nvidia/gpus/{bus_id}/information",
                f"Model: \t\t {gpu['name']}\nIRQ:   \t\t {100 + gpu['index']}\nGPU UUID: \t {gpu['uuid']}\n"
                f"Video BIOS: \t {gpu['vbios']}\nBus Type: \t PCIe\nDMA Size: \t 47 bits\n"
                f"DMA Mask: \t 0x7fffffffffff\nBus Location: \t {bus_id}\nDevice Minor: \t {gpu['index']}\n"
                "GPU Excluded:\t No\n",
            )
            _put(root, f"dev/nvidia{gpu['index']}", "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def kernel_log(state: dict[str, Any]) -> str:
    """What the kernel said about its GPUs, as /dev/kmsg has it: priority,sequence,microseconds,flags;text."""
    lines = ["Linux version (simulated)"]
    version = loaded_version(state)
    by_slot = {gpu["slot"]: gpu for gpu in visible_gpus(state)}
    if nouveau_loaded(state) and (state["boot"] is None or version):
        lines += [f"nouveau {short_bus_id(gpu['bus_id'])}: NVIDIA GV100 (140000a1)" for gpu in by_slot.values()]
        lines += [
            f"NVRM: The NVIDIA probe routine was not called for {len(by_slot)} device(s).",
            "NVRM: This can occur when a driver such as: ",
            "NVRM: nouveau, rivafb, nvidiafb or rivatv ",
            "NVRM: was loaded and obtained ownership of the NVIDIA device(s).",
            "NVRM: Try unloading the conflicting kernel module (and/or",
            "NVRM: reconfigure your kernel without the conflicting",
            "NVRM: driver(s)), then try loading the NVIDIA kernel module",
            "NVRM: again.",
            "NVRM: No NVIDIA devices probed.",
        ]
    elif nouveau_loaded(state):
        lines += [f"nouveau {short_bus_id(gpu['bus_id'])}: NVIDIA GV100 (140000a1)" for gpu in by_slot.values()]
    if faults(state, "secure-boot") if state["boot"] is None else state["boot"]["refused"]:
        lines.append("Loading of module with unavailable key is rejected")
    if version:
        lines.append(f"NVRM: loading {nvrm_version(state, version).removeprefix('NVRM version: ').strip()}")
        if flavour(state) == "open":
            for gpu in by_slot.values():
                if gpu["architecture"] == "Volta":
                    lines += [
                        f"NVRM: The NVIDIA GPU {short_bus_id(gpu['bus_id'])} (PCI ID: 10de:{gpu['device_id']})",
                        "NVRM: installed in this system is not supported by open",
                        "NVRM: nvidia.ko because it does not include the required GPU",
                        "NVRM: System Processor (GSP).",
                    ]
    for fault in faults(state, "mismatch"):
        lines += [
            f"NVRM: API mismatch: the client has the version {state['driver']}, but",
            f"NVRM: this kernel module has the version {fault['loaded']}.  Please",
            "NVRM: make sure that this kernel module and all NVIDIA driver",
            "NVRM: components have the same version.",
        ]
    for fault in state["faults"]:
        lines += _log_of(fault, by_slot)
    return "".join(f"4,{n},{5_000_000 + n * 1_000_000},-;{line}\n" for n, line in enumerate(lines, 300))


def _log_of(fault: dict[str, Any], by_slot: dict[int, dict[str, Any]]) -> list[str]:
    gpu = by_slot.get(fault.get("gpu", -1))
    if fault["kind"] == "kernel-line":
        return [str(fault["text"])]
    if gpu is None:
        return []
    long_id = short_bus_id(gpu["bus_id"])
    short_id = long_id.rsplit(".", 1)[0]
    at = f"NVRM: GPU at PCI:{short_id}: {gpu['uuid']}"
    if fault["kind"] == "lose-card":
        return [
            at,
            f"NVRM: Xid (PCI:{short_id}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            f"NVRM: GPU {long_id}: GPU has fallen off the bus.",
        ]
    if fault["kind"] == "xid":
        return [at, f"NVRM: Xid (PCI:{short_id}): {fault['number']}, {fault['text']}"]
    if fault["kind"] == "ecc" and fault["error"] == "uncorrected" and fault["counter"] == "volatile":
        return [
            at,
            f"NVRM: Xid (PCI:{short_id}): 48, pid='<unknown>', name=<unknown>, DBE (double bit error) ECC Error",
        ]
    if fault["kind"] == "retire":
        return [
            f"NVRM: Xid (PCI:{short_id}): 63, pid='<unknown>', name=<unknown>, Dynamic Page Retirement: page retired"
        ]
    return []


# ---------------------------------------------------------------------------------------------------------------------
# Driver from packages: what is on disk is real, what a boot and modprobe make of it is simulated
# ---------------------------------------------------------------------------------------------------------------------

#: Folders of modprobe.d(5), in the order of precedence.
MODPROBE_FOLDERS = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d", "/usr/lib/modprobe.d")
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/x86_64-linux-gnu/nvidia/tesla-535",
)  # fmt: skip
#: What Debian's packages put before the names of the modules.
DEBIAN_MODULES = ("nvidia-current", "nvidia-tesla-535")
#: Programs of Debian's driver packages that need the real driver; this file stands in their places.
DEBIAN_PROGRAMS = (
    "/usr/lib/nvidia/current/nvidia-smi", "/usr/lib/nvidia/tesla-535/nvidia-smi", "/usr/bin/nvidia-persistenced",
)  # fmt: skip
#: The driver's modules, each with what it needs.
NEEDS = {"nvidia": (), "nvidia_modeset": ("nvidia",), "nvidia_drm": ("nvidia_modeset",), "nvidia_uvm": ("nvidia",),
         "nvidia_peermem": ("nvidia",)}  # fmt: skip
#: Programs that would ask or change the host's kernel; they are put aside and a script answers in their place.
DIVERTED = (
    "/sbin/modprobe",
    "/sbin/rmmod",
    "/sbin/lsmod",
    "/sbin/modinfo",
    "/sbin/depmod",
    "/bin/uname",
    "/usr/bin/mokutil",
)
ASIDE = ".distrib"
SCRIPT = """\
#!/bin/sh
# Written by gpu-sim: this machine shares its host's kernel and has a simulated one of its own.
name=${0##*/}
release=$(cat SYSROOT/proc/sys/kernel/osrelease 2>/dev/null)
case $name in
    uname)
        host=$(/usr/bin/uname.distrib -r)
        /usr/bin/uname.distrib "$@" | sed "s|$host|${release:-$host}|"
        exit
        ;;
    lsmod) exec gpu-sim lsmod ;;
    rmmod) exec gpu-sim rmmod "$@" ;;
    mokutil) exec gpu-sim mokutil "$@" ;;
esac
kernel=
query=
mine=
for word in "$@"; do
    case $word in
        -S | -k | --set-version | --set-version=* | -[0-9]*) kernel=given ;;
        -R | -D | -n | -c | -V | --resolve-alias | --show-depends | --dry-run) query=yes ;;
        --showconfig | --show-config | --version) query=yes ;;
        nvidia | nvidia[-_]* | nouveau | pci:v000010DE*) mine=yes ;;
        [0-9]*.*.*) [ "$name" != depmod ] || kernel=given ;;
    esac
done
if [ "$name" = modprobe ] && [ -n "$mine" ] && [ -z "$query" ]; then
    exec gpu-sim modprobe "$@"
fi
real=/usr/local/lib/gpu-simulator/real/$name
[ -z "$kernel" ] && [ -n "$release" ] || exec "$real" "$@"
case $name in
    modprobe) exec "$real" -S "$release" "$@" ;;
    modinfo) exec "$real" -k "$release" "$@" ;;
    depmod) exec "$real" "$@" "$release" ;;
esac
exec "$real" "$@"
"""
UNIT = """\
[Unit]
Description=Boot of the simulated kernel
DefaultDependencies=no
After=local-fs.target systemd-tmpfiles-setup.service
Before=sysinit.target
ConditionPathExists=/var/lib/gpu-simulator/state.json

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/sbin/gpu-sim boot

[Install]
WantedBy=sysinit.target
"""
#: Stands for the devices that udev would announce: units that it wants are needed for as long as it is there.
DEVICE_UNIT = """\
[Unit]
Description=Simulated NVIDIA devices
Wants=nvidia-persistenced.service
ConditionPathExists=SYSROOT/proc/driver/nvidia/version

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
"""
#: Seconds the persistence daemon takes for each card after the first.
SECONDS_A_CARD = 0.3


def _see_packages(state: dict[str, Any]) -> None:
    """Fill in what follows from the files on disk: the version of the libraries, of the tool's answers."""
    state["library"] = library_on_disk()
    state["driver"] = state["library"] or state["boot"]["nvidia"] or PROFILES[state["profile"]].driver
    state["cuda"] = cuda_of(state["driver"])
    state["flavour"] = state["boot"]["flavour"] or PROFILES[state["profile"]].flavour


def library_on_disk() -> str | None:
    """Version of the libnvidia-ml that a program would be given."""
    for folder in LIBRARY_FOLDERS:
        with contextlib.suppress(OSError):
            target = Path(folder, "libnvidia-ml.so.1").resolve(strict=True)
            found = re.fullmatch(r"libnvidia-ml\.so\.(\d{3}\.\d+(?:\.\d+)?)", target.name)
            if found:
                return found[1]
    return None


def version_order(text: str) -> tuple[tuple[int, int | str], ...]:
    """Kernel releases in order: numbers as numbers."""
    return tuple((0, int(part)) if part.isdigit() else (-1, part) for part in re.findall(r"\d+|[a-z]+|~", text))


def choose_kernel() -> tuple[str | None, str]:
    """(release, command line) of what boots: GRUB's choice, else the newest image in /boot."""
    images = sorted(
        (path.name.removeprefix("vmlinuz-") for path in Path("/boot").glob("vmlinuz-*") if path.suffix != ".old"),
        key=version_order,
    )
    config = _read("/boot/grub/grub.cfg")
    if config:
        environment = dict(re.findall(r"^(\w+)=(.*)$", _read("/boot/grub/grubenv"), re.M))
        wanted = environment.get("next_entry") or _grub_default(environment)
        entry = _grub_entry(config, wanted)
        if environment.get("next_entry"):
            # GRUB forgets it as soon as it has read it.
            subprocess.run(["grub-editenv", "/boot/grub/grubenv", "unset", "next_entry"], check=False)
        if entry is not None and entry[0] in images:
            return entry
    setting = re.search(r'^GRUB_CMDLINE_LINUX_DEFAULT="([^"]*)"', _read("/etc/default/grub"), re.M)
    arguments = setting[1] if setting else ""
    if not images:
        return None, _read("/proc/cmdline").strip()
    return images[-1], f"BOOT_IMAGE=/boot/vmlinuz-{images[-1]} ro {arguments}".strip()


def _grub_default(environment: dict[str, str]) -> str:
    value = "0"
    for path in (Path("/etc/default/grub"), *sorted(Path("/etc/default/grub.d").glob("*.cfg"))):
        for found in re.finditer(r"^\s*GRUB_DEFAULT=(['\"]?)(.*?)\1\s*$", _read(str(path)), re.M):
            value = found[2]
    return environment.get("saved_entry") or "0" if value == "saved" else value


def _grub_entry(config: str, wanted: str) -> tuple[str, str] | None:
    """Follow a default like ``0``, ``1>2``, a title or an id through the menu."""
    top: dict[str, Any] = {"names": (), "entries": [], "linux": None}
    stack = [top]
    for line in config.splitlines():
        words = re.match(r"\s*(?:menuentry|submenu)\s+'([^']*)'(.*)\{\s*$", line)
        if words:
            identity = re.search(r"(?:\$menuentry_id_option|--id)\s+'?([^'\s{]+)", words[2])
            item = {"names": (words[1], identity[1] if identity else None), "entries": [], "linux": None}
            stack[-1]["entries"].append(item)
            stack.append(item)
        elif re.match(r"\s*\}\s*$", line) and len(stack) > 1:
            stack.pop()
        else:
            found = re.match(r"\s*linux\s+(\S*/vmlinuz-(\S+))\s*(.*)$", line)
            if found and stack[-1]["linux"] is None:
                stack[-1]["linux"] = (found[2], f"BOOT_IMAGE={found[1]} {found[3]}".strip())
    here = top
    for part in wanted.split(">"):
        following = [
            item
            for number, item in enumerate(here["entries"])
            if part.strip() == str(number) or part.strip() in item["names"]
        ]
        if not following:
            return None
        here = following[0]
    while here["linux"] is None and here["entries"]:
        here = here["entries"][0]
    answer: tuple[str, str] | None = here["linux"]
    return answer


def _blacklisted(root: Path, module: str) -> bool:
    """Whether modprobe's configuration below ``root`` keeps a module from loading for a device."""
    seen: dict[str, Path] = {}
    for folder in MODPROBE_FOLDERS:
        for path in root.joinpath(folder.lstrip("/")).glob("*.conf"):
            # A file of the same name in a folder named earlier hides the later one.
            seen.setdefault(path.name, path)
    pattern = rf"^\s*(?:blacklist\s+{module}|install\s+{module}\s+\S*/(?:true|false))\s*(?:#.*)?$"
    return any(re.search(pattern, _read(str(path)), re.M) for path in seen.values())


def _in_cmdline(cmdline: str) -> bool:
    for word in cmdline.split():
        key, _, value = word.partition("=")
        if key in ("modprobe.blacklist", "module_blacklist", "rd.driver.blacklist") and "nouveau" in value.split(","):
            return True
        if word == "nouveau.modeset=0":
            return True
    return False


def _nouveau_of_initramfs(kernel: str) -> bool:
    """Whether the kernel's initramfs has nouveau and nothing in it keeps nouveau from loading."""
    image = Path(f"/boot/initrd.img-{kernel}")
    if not image.exists():
        return False
    with tempfile.TemporaryDirectory(prefix="gpu-sim-") as folder:
        subprocess.run(["unmkinitramfs", str(image), folder], check=False, stderr=subprocess.DEVNULL)
        # An image with microcode in front is unpacked as early/ and main/.
        root = Path(folder, "main") if Path(folder, "main").is_dir() else Path(folder)
        return any(root.glob(f"usr/lib/modules/{kernel}/**/nouveau.ko*")) and not _blacklisted(root, "nouveau")


def _module(name: str, kernel: str) -> tuple[str, str, str] | None:
    """(file, version, flavour) of a module on disk for a kernel; null where modprobe would not find it."""
    names = [name]
    if name in NEEDS:
        names += [name.replace("nvidia", prefix, 1).replace("_", "-") for prefix in DEBIAN_MODULES]
    for known in names:
        done = subprocess.run([_real("modinfo"), "-k", kernel, known], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            fields = [line.partition(":")[::2] for line in done.stdout.splitlines()]
            found = {key: value.strip() for key, value in reversed(fields)}
            kind = "open" if "GPL" in found.get("license", "") else "proprietary"
            return found["filename"], found.get("version", ""), kind
    return None


def _real(program: str) -> str:
    """kmod decides by the name it is called by, so the real programs are links in a folder of their own."""
    aside = Path("/usr/local/lib/gpu-simulator/real", program)
    return str(aside) if aside.exists() else program


def _refused(state: dict[str, Any], path: str) -> bool:
    """Whether the kernel refuses to load that module file because of Secure Boot."""
    if not state["boot"]["secure"]:
        return False
    data = Path(path).read_bytes()
    if not data.endswith(b"~Module signature appended~\n"):
        return True
    return b"Canonical" not in data[-4096:] and not state.get("enrolled", False)


def boot(state: dict[str, Any]) -> None:
    """What a boot does: choose a kernel, load what its initramfs and then the disk have for the devices."""
    kernel, cmdline = choose_kernel()
    state["boot"] = {
        "id": str(uuid.uuid4()),
        "kernel": kernel,
        "cmdline": cmdline,
        "modules": [],
        "nvidia": None,
        "flavour": None,
        "refused": False,
        "secure": bool(faults(state, "secure-boot")),
    }
    for gpu in state["gpus"]:
        gpu["persistence"] = False
    if kernel is None or not state["gpus"]:
        return
    blocked = _in_cmdline(cmdline)
    of_disk = not _blacklisted(Path("/"), "nouveau") and _module("nouveau", kernel) is not None
    if not blocked and (of_disk or _nouveau_of_initramfs(kernel)):
        state["boot"]["modules"].append("nouveau")
    if not _blacklisted(Path("/"), "nvidia"):
        for name in ("nvidia", "nvidia_modeset", "nvidia_drm"):
            insert(state, name)
    for name in _modules_load():
        insert(state, name)


def _modules_load() -> list[str]:
    """The driver's modules named in modules-load.d(5)."""
    texts = [_read("/etc/modules")]
    for folder in ("/etc/modules-load.d", "/run/modules-load.d", "/usr/lib/modules-load.d"):
        texts += [_read(str(path)) for path in sorted(Path(folder).glob("*.conf"))]
    words = [line.strip().replace("-", "_") for text in texts for line in text.splitlines()]
    return [word for word in words if word in NEEDS or word == "nouveau"]


def insert(state: dict[str, Any], name: str) -> str | None:
    """Load a module with what it needs. Returns the words of modprobe when that fails."""
    boot_state = state["boot"]
    if name in boot_state["modules"]:
        return None
    kernel = boot_state["kernel"] or os.uname().release
    if name == "nouveau" and "nvidia" in boot_state["modules"]:
        return None
    for needed in NEEDS.get(name, ()):
        problem = insert(state, needed)
        if problem:
            return problem
    found = _module(name, kernel)
    if found is None:
        return f"modprobe: FATAL: Module {name} not found in directory /lib/modules/{kernel}"
    path, version, kind = found
    if name != "nouveau":
        if _refused(state, path):
            boot_state["refused"] = True
            return f"modprobe: ERROR: could not insert '{name}': Key was rejected by service"
        if "nouveau" in boot_state["modules"]:
            return f"modprobe: ERROR: could not insert '{name}': No such device"
        if name == "nvidia":
            boot_state["nvidia"], boot_state["flavour"] = version, kind
        elif version != boot_state["nvidia"]:
            return f"modprobe: ERROR: could not insert '{name}': Exec format error"
    boot_state["modules"].append(name)
    return None


def withdraw(state: dict[str, Any], name: str, program: str) -> str | None:
    """Unload a module. Returns the program's words when that fails."""
    modules = state["boot"]["modules"]
    if name not in modules:
        return f"rmmod: ERROR: Module {name} is not currently loaded" if program == "rmmod" else None
    users = [other for other in modules if name in NEEDS.get(other, ())]
    if users:
        words = f"is in use by: {' '.join(users)}"
        return (
            f"rmmod: ERROR: Module {name} {words}"
            if program == "rmmod"
            else f"modprobe: FATAL: Module {name} is in use."
        )
    used = name == "nouveau" and faults(state, "nouveau-busy")
    if name in ("nvidia", "nvidia_uvm"):
        view = look(state)
        used = bool(view.processes) or (name == "nvidia" and _alive(state["boot"].get("daemon")))
    if used:
        return (
            f"rmmod: ERROR: Module {name} is in use"
            if program == "rmmod"
            else f"modprobe: FATAL: Module {name} is in use."
        )
    modules.remove(name)
    if name == "nvidia":
        state["boot"]["nvidia"] = state["boot"]["flavour"] = None
        for gpu in state["gpus"]:
            gpu["persistence"] = False
    if program == "modprobe":
        # What it needed goes too, where nothing else needs it.
        for needed in NEEDS.get(name, ()):
            withdraw(state, needed, program)
    return None


def _alive(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


def modprobe(state: dict[str, Any], program: str, words: Sequence[str]) -> int:
    """The driver's part of modprobe and rmmod; other modules belong to the host's kernel, which is left alone."""
    flags = [word for word in words if word.startswith("-")]
    names = [word.replace("-", "_") for word in words if not word.startswith("-")]
    quiet = any(flag in ("-q", "--quiet") or re.fullmatch(r"-[a-z]*q[a-z]*", flag) for flag in flags)
    remove = program == "rmmod" or any(
        flag in ("-r", "--remove") or re.fullmatch(r"-[a-qs-z]*r[a-z]*", flag) for flag in flags
    )
    everything = remove or any(flag in ("-a", "--all") for flag in flags)
    status = 0
    for name in names if everything else names[:1]:
        if name.startswith("pci:"):
            done = subprocess.run(
                [_real("modprobe"), "-S", state["boot"]["kernel"] or os.uname().release, "-R", name],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            name = next(iter(done.stdout.split()), name).replace("-", "_")
        if name not in NEEDS and name != "nouveau":
            if program == "rmmod":
                print(f"rmmod: ERROR: Module {name} is not currently loaded", file=sys.stderr)
                status = 1
            continue
        problem = withdraw(state, name, program) if remove else insert(state, name)
        if problem:
            status = 1
            if not quiet:
                print(problem, file=sys.stderr)
    return status


def mokutil(state: dict[str, Any], words: Sequence[str]) -> int:
    """What mokutil says about Secure Boot and the machine's own key; importing it needs somebody at the console."""
    if not state["boot"]["secure"] and not faults(state, "secure-boot"):
        print("EFI variables are not supported on this system", file=sys.stderr)
        return 1
    enrolled = bool(state.get("enrolled"))
    if "--sb-state" in words:
        print("SecureBoot enabled")
    elif words[:1] in (["--test-key"], ["-t"]) and len(words) > 1:
        print(f"{words[1]} is {'already' if enrolled else 'not'} enrolled")
        return 1 if enrolled else 0
    elif words[:1] in (["--list-enrolled"], ["-l"]):
        print("[key 1]\nSHA1 Fingerprint: 76:a0:92:06:58:00:bf:37:69:01:c3:72:cd:55:a9:0e:1f:de:d2:e0")
        print("        Subject: C=GB, ST=Isle of Man, L=Douglas, O=Canonical Ltd., CN=Canonical Ltd. Master CA")
        if enrolled:
            print("[key 2]\n        Subject: CN=Secure Boot Module Signature key")
    return 0


def announce(before: bool, after: bool) -> None:
    """Do what udev's rules do when the driver's devices come and go. Nothing waits for it."""
    if before != after and Path("/run/systemd/system").is_dir():
        verb = "start" if after else "stop"
        subprocess.run(["systemctl", "--no-block", verb, "gpu-simulator-devices.service"], check=False)


def install_on_machine(sysroot: str) -> None:
    """Put the units and the answering programs in place. Doing it again changes nothing."""
    for name, unit in (("boot", UNIT), ("devices", DEVICE_UNIT)):
        Path(f"/etc/systemd/system/gpu-simulator-{name}.service").write_text(
            unit.replace("SYSROOT", sysroot), encoding="utf-8"
        )
    wants = Path("/etc/systemd/system/sysinit.target.wants/gpu-simulator-boot.service")
    wants.parent.mkdir(parents=True, exist_ok=True)
    if not wants.is_symlink():
        wants.symlink_to("/etc/systemd/system/gpu-simulator-boot.service")
    real = Path("/usr/local/lib/gpu-simulator/real")
    real.mkdir(parents=True, exist_ok=True)
    script = Path("/usr/local/lib/gpu-simulator/answer")
    script.write_text(SCRIPT.replace("SYSROOT", sysroot), encoding="utf-8")
    script.chmod(0o755)
    for path in map(Path, DIVERTED):
        if os.path.lexists(path):
            _divert(_as_packaged(path), script)
        if path.parent == Path("/sbin") and not (real / path.name).is_symlink():
            (real / path.name).symlink_to("/bin/kmod")
    if re.search(r"^ID=debian$", _read("/etc/os-release"), re.M):
        for path in map(Path, DEBIAN_PROGRAMS):
            path.parent.mkdir(parents=True, exist_ok=True)
            _divert(path, Path(__file__).resolve())


def _as_packaged(path: Path) -> Path:
    """The path by which dpkg knows a program: with /usr in front since Debian 13."""
    merged = Path("/usr", str(path).lstrip("/"))
    lists = ("kmod", "coreutils", "mokutil")
    known = any(f"{merged}\n" in _read(f"/var/lib/dpkg/info/{name}.list") for name in lists)
    return merged if known else path


def _divert(path: Path, answer: Path) -> None:
    """Let ``answer`` stand at ``path``; what packages have there, now or later, is put aside."""
    if path.is_symlink() and path.readlink() == answer:
        return
    aside = path.with_name(path.name + ASIDE)
    command = ["dpkg-divert", "--quiet", "--local", "--rename", "--divert", str(aside), "--add", str(path)]
    subprocess.run(command, check=True)
    path.symlink_to(answer)


def _reload_units() -> None:
    subprocess.run(["systemctl", "daemon-reload"], check=False)


def persistenced(path: Path, words: Sequence[str]) -> int:
    """nvidia-persistenced: goes into the background, then registers one card after the other."""
    state = load_state(path)
    if loaded_version(state) is None or nouveau_loaded(state):
        print(
            "nvidia-persistenced failed to initialize. Check syslog for more details.\n"
            "Failed to query NVIDIA devices. Please ensure that the NVIDIA device files (/dev/nvidia*) exist, and that "
            "user 0 has read and write permissions for those files.",
            file=sys.stderr,
        )
        return 1
    runtime = Path("/run/nvidia-persistenced")
    runtime.mkdir(exist_ok=True)
    if os.fork():
        # The parent of a daemon ends when the daemon can be found.
        for _ in range(100):
            if (runtime / "nvidia-persistenced.pid").exists():
                break
            time.sleep(0.02)
        return 0
    os.setsid()
    for descriptor in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    (runtime / "nvidia-persistenced.pid").write_text(f"{os.getpid()}\n", encoding="ascii")
    with _changing(path):
        state = load_state(path)
        state["boot"]["daemon"] = os.getpid()
        save_state(path, state)
    count = len(state["gpus"])
    try:
        if "--no-persistence-mode" not in words:
            for number in range(count):
                time.sleep(SECONDS_A_CARD)
                _persist(path, number, True)
        while True:
            signal.pause()
    finally:
        for number in range(count):
            _persist(path, number, False)


def _persist(path: Path, number: int, on: bool) -> None:
    with _changing(path):
        state = load_state(path)
        if state["gpus"][number]["persistence"] != on:
            state["gpus"][number]["persistence"] = on
            save_state(path, state)


# ---------------------------------------------------------------------------------------------------------------------
# gpu-sim: the control
# ---------------------------------------------------------------------------------------------------------------------

#: Fault kinds: their arguments in order (name, how it is read, default; no default: must be given), and what happens.
_GPU = ("gpu", "gpu", None)
FAULTS: dict[str, tuple[list[tuple[str, str, Any]], str]] = {
    "lose-card": (
        [_GPU, ("how", "handle|fields|row", "handle")],
        "the card fell off the bus. handle: the tool gives one line of text and exit status 15 whenever it must touch "
        "the card, as branch 535 does; `-i` still reads the others. fields: its cells read [GPU is lost]. row: a line "
        "of text and a row of [Unknown Error] between the living cards",
    ),
    "remove-card": ([_GPU], "the card is gone, from PCI as well"),
    "link-down": ([_GPU, ("link", "int", None)], "an NVLink of the card is inactive, at both ends"),
    "pcie-only": ([], "NVLink is not in use: every pair goes over PCIe"),
    "mismatch": ([("loaded", "version", "535.247.01")], "an older module is loaded than the library on disk"),
    "no-driver": (
        [("how", "loadable|absent|unbuilt", "loadable")],
        "no nvidia module is loaded. loadable: it is on disk; absent: nothing is installed; unbuilt: the library is "
        "there, the module is not",
    ),
    "no-devices": ([], "the driver is loaded and finds no device"),
    "hot": ([_GPU, ("core", "int", 86), ("memory", "int", 97)], "temperatures in degrees C"),
    "throttle": ([_GPU, ("reason", "|".join(THROTTLE), "hw-thermal")], "the clocks are held down"),
    "ecc": (
        [_GPU, ("counter", "volatile|aggregate", "volatile"), ("count", "int", 1),
         ("error", "uncorrected|corrected", "uncorrected")],
        "memory errors were counted",
    ),
    "ecc-off": ([_GPU], "ECC is disabled"),
    "retire": ([_GPU, ("pages", "int", 1)], "pages were retired for double bit errors"),
    "pending-retirement": ([_GPU], "pages wait for a reboot to be retired"),
    "pcie": ([_GPU, ("gen", "int", 1), ("width", "int", 4)], "the PCIe link is slower or narrower than it can be"),
    "slow": ([("seconds", "float", 60.0)], "every answer takes this long"),
    "field": ([_GPU, ("field", "text", None), ("value", "text", "[N/A]")], "one field reads as given, e.g. ERR!"),
    "unreadable": (
        [_GPU, ("text", "text", "Unknown Error")],
        "every reading of the card fails with this text: Unknown Error, GPU requires reset",
    ),
    "nouveau": ([], "nouveau is loaded and owns the cards"),
    "open-module": ([], "the open flavour of the module is loaded"),
    "secure-boot": (
        [],
        "Secure Boot is on and refuses the unsigned module. With --driver packages: from the next boot on, modules "
        "load when they are signed by the distribution, or by the machine's own key after `gpu-sim enroll`",
    ),
    "process": (
        [_GPU, ("mib", "int", 2048), ("pid", "int", 4242), ("name", "text", "python3")],
        "another program holds memory of the card",
    ),
    "xid": ([_GPU, ("number", "int", None), ("text", "text", "pid='<unknown>', name=<unknown>")],
            "a line in the kernel log"),
    "kernel-line": ([("text", "text", None)], "any line in the kernel log"),
}  # fmt: skip

#: Those that mean something with --driver packages only, and that nvidia-smi never shows.
PACKAGES_FAULTS: dict[str, tuple[list[tuple[str, str, Any]], str]] = {
    "nouveau-busy": ([], "nouveau cannot be unloaded, a console uses it"),
}
ALL_FAULTS = {**FAULTS, **PACKAGES_FAULTS}


def make_fault(state: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    kind, *given = words
    if kind not in ALL_FAULTS:
        raise UsageError(f"unknown fault {kind!r}; known: {', '.join(ALL_FAULTS)}")
    parameters, _ = ALL_FAULTS[kind]
    if len(given) > len(parameters):
        raise UsageError(f"fault {kind} takes {_usage(kind)}, not {' '.join(given)!r}")
    fault: dict[str, Any] = {"kind": kind}
    for position, (name, reading, default) in enumerate(parameters):
        if position < len(given):
            fault[name] = _argument(state, kind, name, reading, given[position])
        elif default is None:
            raise UsageError(f"fault {kind} takes {_usage(kind)}: {name} is missing")
        else:
            fault[name] = default
    if kind == "link-down":
        count = state["gpus"][fault["gpu"]]["nvlinks"]
        if fault["link"] >= count:
            raise UsageError(
                f"card {fault['gpu']} has {count} NVLinks, numbered from 0; there is no link {fault['link']}"
            )
    if kind == "field" and fault["field"] not in {name for row in FIELDS for name in (row.name, *row.aliases)}:
        raise UsageError(f"unknown field {fault['field']!r}; nvidia-smi --help-query-gpu lists them")
    return fault


def _usage(kind: str) -> str:
    parameters, _ = ALL_FAULTS[kind]
    return (
        " ".join(name if default is None else f"[{name}={default}]" for name, _, default in parameters) or "no argument"
    )


def _argument(state: dict[str, Any], kind: str, name: str, reading: str, word: str) -> Any:
    if reading == "text":
        return word
    if reading == "version":
        if not re.fullmatch(r"\d{3}\.\d+(\.\d+)?", word):
            raise UsageError(f"fault {kind}: {word!r} is not a driver version such as 535.247.01")
        return word
    if "|" in reading:
        if word not in reading.split("|"):
            raise UsageError(f"fault {kind}: {name} is one of {reading.replace('|', ', ')}, not {word!r}")
        return word
    try:
        number = float(word) if reading == "float" else int(word)
    except ValueError:
        raise UsageError(f"fault {kind}: {name} is a number, not {word!r}") from None
    if number < 0:
        raise UsageError(f"fault {kind}: {name} is not negative")
    if reading == "gpu" and number >= len(state["gpus"]):
        raise UsageError(f"there is no card {word}; this machine has cards 0 to {len(state['gpus']) - 1}")
    return number


def control(arguments: Sequence[str]) -> int:
    words = list(arguments)
    parser = argparse.ArgumentParser(prog="gpu-sim", description="Control the simulated NVIDIA driver of this machine.")
    parser.add_argument("--state", metavar="FILE", help=f"state file (default {DEFAULT_STATE})")
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="a healthy machine of a profile")
    install.add_argument("--profile", default="v100x4", help=", ".join(PROFILES))
    install.add_argument(
        "--driver",
        metavar="VERSION",
        help="driver version (default: the profile's), or packages: what is installed on this machine decides, and "
        "what the last simulated boot loaded of it",
    )
    install.add_argument("--state", metavar="FILE", default=argparse.SUPPRESS, help="state file")
    install.add_argument("--sysroot", metavar="DIR", help=f"simulated root (default {DEFAULT_SYSROOT})")
    install.add_argument("--kernel", metavar="RELEASE", help="kernel release (default: the real machine's)")
    install.add_argument("--persistence", action="store_true", help="persistence mode is on")
    fault = commands.add_parser(
        "fault",
        help="break something; several at once add up",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {kind} {_usage(kind)}\n      {text}" for kind, (_, text) in FAULTS.items())
        + "\n  With --driver packages:\n"
        + "\n".join(f"    {kind} {_usage(kind)}\n      {text}" for kind, (_, text) in PACKAGES_FAULTS.items()),
    )
    fault.add_argument("words", nargs="+", metavar="FAULT", help="kind and its arguments")
    clear = commands.add_parser("clear", help="healthy again")
    clear.add_argument("kind", nargs="?", help="only faults of this kind")
    commands.add_parser("show", help="the state, as JSON")
    commands.add_parser("profiles", help="list the profiles")
    commands.add_parser("boot", help="with --driver packages: what a boot does")
    commands.add_parser("enroll", help="with --driver packages: the machine's own module key is trusted from now on")
    commands.add_parser("lsmod", help="with --driver packages: the loaded modules")
    for name in ("modprobe", "rmmod", "mokutil", "persistenced"):
        one = commands.add_parser(name, help=f"with --driver packages: answer as {name}", add_help=False)
        one.add_argument("words", nargs=argparse.REMAINDER)
    named, rest = (words[1], words[2:]) if words[:1] == ["--state"] else (None, words)
    if rest and rest[0] in ("modprobe", "rmmod", "mokutil", "persistenced"):
        # Their options are theirs: the parser would take some of them for its own.
        options = argparse.Namespace(command=rest[0], words=list(rest[1:]), state=named)
    else:
        options = parser.parse_args(list(words))
    path = Path(options.state) if options.state else state_path()
    try:
        return _control(path, options)
    except UsageError as exc:
        print(f"gpu-sim: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"gpu-sim: {exc}", file=sys.stderr)
        return 1


def _control(path: Path, options: argparse.Namespace) -> int:
    if options.command == "profiles":
        for name, profile in PROFILES.items():
            print(f"{name:<16}{profile.description}")
        return 0
    if options.command == "install":
        # A state file of one's own gets a root of one's own beside it.
        beside = DEFAULT_SYSROOT if path == Path(DEFAULT_STATE) else str(path.resolve().parent / "sysroot")
        from_packages = options.driver == "packages"
        driver = None if from_packages else options.driver
        state = new_state(options.profile, driver, options.sysroot or beside, options.kernel)
        for gpu in state["gpus"]:
            gpu["persistence"] = options.persistence
        with _changing(path):
            if from_packages:
                install_on_machine(state["sysroot"])
                boot(state)
                _see_packages(state)
            save_state(path, state)
        if from_packages:
            _reload_units()
            announce(False, loaded_version(state) is not None)
        return 0
    if not path.exists():
        raise UsageError(f"{path} does not exist: run `gpu-sim install` first")
    if options.command == "persistenced":
        return persistenced(path, options.words)
    with _changing(path):
        return _change(path, options)


def _change(path: Path, options: argparse.Namespace) -> int:
    state = load_state(path)
    if options.command in ("boot", "enroll", "lsmod", "mokutil", "modprobe", "rmmod"):
        return _from_packages(path, state, options)
    if options.command == "show":
        print(json.dumps(state, indent=1))
        return 0
    if options.command == "fault":
        state["faults"].append(make_fault(state, options.words))
    elif options.kind is not None and options.kind not in ALL_FAULTS:
        raise UsageError(f"unknown fault {options.kind!r}; known: {', '.join(ALL_FAULTS)}")
    else:
        state["faults"] = [fault for fault in state["faults"] if options.kind not in (None, fault["kind"])]
    save_state(path, state)
    return 0


def _from_packages(path: Path, state: dict[str, Any], options: argparse.Namespace) -> int:
    if options.command == "boot" and state["boot"] is None:
        return 0
    if state["boot"] is None:
        raise UsageError(f"{options.command} needs a machine made by `gpu-sim install --driver packages`")
    before = loaded_version(state) is not None
    if options.command == "lsmod":
        print("Module                  Size  Used by")
        for line in Path(state["sysroot"], "proc/modules").read_text(encoding="ascii").splitlines():
            name, size, count, users, *_ = line.split()
            print(f"{name:<19} {size:>8}  {count}{'' if users == '-' else ' ' + users.rstrip(',')}".rstrip())
        return 0
    if options.command == "mokutil":
        return mokutil(state, options.words)
    status = 0
    if options.command == "boot":
        boot(state)
        before = False
    elif options.command == "enroll":
        state["enrolled"] = True
    else:
        status = modprobe(state, options.command, options.words)
    _see_packages(state)
    save_state(path, state)
    announce(before, loaded_version(state) is not None)
    return status


def main(argv: Sequence[str]) -> NoReturn:
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        if Path(argv[0]).name == "nvidia-smi":
            sys.exit(nvidia_smi(argv[1:]))
        if Path(argv[0]).name == "nvidia-persistenced":
            sys.exit(control(["persistenced", *argv[1:]]))
        sys.exit(control(argv[1:]))
    sys.exit(RC_OK)


if __name__ == "__main__":
    main(sys.argv)
