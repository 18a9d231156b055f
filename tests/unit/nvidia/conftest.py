# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Machines for tests: captures on disk, so that the code under test reads them as it reads a real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi

Answers = Mapping[str, Any]


def write_capture(
    root: Path, answers: Answers, pci: Mapping[str, str] | None = None, version: str | None = None
) -> None:
    """A capture: ``answers`` by command line without the program, each a text, (rc, text), or None for a time-out.

    ``pci`` maps bus ids to PCI ids, bound to the driver nvidia; ``version`` is that of the loaded kernel module.
    """
    commands = root / "commands"
    commands.mkdir(parents=True, exist_ok=True)
    index = []
    for number, (line, answer) in enumerate(answers.items()):
        record: dict[str, Any] = {"argv": ["nvidia-smi", *line.split(" ")]}
        if answer is None:
            record |= {"rc": None, "timed_out": True}
        else:
            rc, text = answer if isinstance(answer, tuple) else (0, answer)
            (commands / f"{number}.out").write_bytes(text.encode("utf-8"))
            record |= {"rc": rc, "stdout": f"{number}.out"}
        index.append(record)
    (commands / "index.json").write_text(json.dumps(index), encoding="utf-8")
    for bus, pci_id in (pci or {}).items():
        device = root / "sys/bus/pci/devices" / bus
        device.mkdir(parents=True)
        vendor, number_text = pci_id.split(":")
        (device / "vendor").write_text(f"0x{vendor}\n")
        (device / "device").write_text(f"0x{number_text}\n")
        (device / "class").write_text("0x030200\n")
        (device / "numa_node").write_text("-1\n")
        drivers = root / "sys/bus/pci/drivers/nvidia"
        drivers.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to("../../drivers/nvidia")
    if version is not None:
        proc = root / "proc/driver/nvidia"
        proc.mkdir(parents=True)
        (proc / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Apr 1 2027\n")


@pytest.fixture
def captured(tmp_path: Path) -> Callable[..., NvidiaSmi]:
    """``captured({"topo -m": text}, pci=..., version=...)`` as an nvidia-smi that answers from a capture."""

    def make(answers: Answers, **parts: Any) -> NvidiaSmi:
        write_capture(tmp_path, answers, **parts)
        return NvidiaSmi(Machine(str(tmp_path)))

    return make
