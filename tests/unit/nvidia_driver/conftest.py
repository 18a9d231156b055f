# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A machine built from files, to be read as a capture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver

KERNEL = "5.15.0-91-generic"


class Built:
    """A folder that stands for the root of a machine; every method adds something to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.records: list[dict] = []
        self.stanzas: list[str] = []
        (root / "commands").mkdir()
        for folder in ("sys/firmware", "sys/bus/pci/devices", "usr/lib"):
            (root / folder).mkdir(parents=True)
        self.file("proc/sys/kernel/osrelease", f"{KERNEL}\n")
        self.file("etc/os-release", 'ID=ubuntu\nVERSION_ID="22.04"\n')
        self.file("dev/kmsg", "")

    def file(self, path: str, text: str = "") -> Built:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return self

    def command(self, argv: Sequence[str], stdout: str = "", rc: int = 0) -> Built:
        name = f"{len(self.records)}.out"
        (self.root / "commands" / name).write_text(stdout)
        self.records.append({"argv": list(argv), "rc": rc, "stdout": name})
        (self.root / "commands/index.json").write_text(json.dumps(self.records))
        return self

    def gpu(self, bus_id: str = "0000:1a:00.0", device: str = "1db5", bound: str | None = None) -> Built:
        folder = f"sys/bus/pci/devices/{bus_id}"
        self.file(f"{folder}/vendor", "0x10de\n").file(f"{folder}/device", f"0x{device}\n")
        self.file(f"{folder}/class", "0x030200\n")
        if bound:
            (self.root / folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{bound}")
        return self

    def loaded(self, version: str, flavour: str = "proprietary") -> Built:
        words = "NVIDIA UNIX x86_64 Kernel Module" if flavour == "proprietary" else (
            "NVIDIA UNIX Open Kernel Module for x86_64"
        )  # fmt: skip
        self.file("proc/driver/nvidia/version", f"NVRM version: {words}  {version}  Tue Jul 30 01:33:00 UTC 2024\n")
        return self.file("proc/modules", "nvidia 56807424 2 nvidia_uvm,nvidia_modeset, Live 0x0000000000000000 (POE)\n")

    def library(self, version: str) -> Built:
        return self.file(f"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{version}")

    def module(self, version: str, kernel: str = KERNEL, licence: str = "NVIDIA", signer: str | None = None) -> Built:
        """What modinfo says of the module for a kernel, with its three companions."""
        path = f"/lib/modules/{kernel}/updates/dkms/nvidia.ko"
        text = f"filename:       {path}\nversion:        {version}\nlicense:        {licence}\n"
        if signer:
            text += f"sig_id:         PKCS#7\nsigner:         {signer}\n"
        self.command(["modinfo", "-k", kernel, "nvidia"], text)
        for part in ("nvidia_modeset", "nvidia_uvm", "nvidia_drm"):
            self.command(["modinfo", "-k", kernel, part], text)
        return self

    def package(self, name: str, version: str, status: str = "install ok installed") -> Built:
        self.stanzas.append(f"Package: {name}\nStatus: {status}\nVersion: {version}\nArchitecture: amd64\n")
        return self.file("var/lib/dpkg/status", "\n".join(self.stanzas))

    def healthy(self, version: str = "535.183.01") -> Built:
        return self.gpu(bound="nvidia").loaded(version).library(version).module(version)

    def judged(self) -> tuple[driver.DriverState, driver.Judgement]:
        if not self.records:
            self.command(["true"])
        state = driver.read(Machine(str(self.root)))
        return state, driver.judge(state)


@pytest.fixture
def machine(tmp_path) -> Built:
    return Built(tmp_path)
