"""One virtual machine for all tests here: real kernels, a real initramfs, GRUB, and reboots. See docs/vm.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.vm import Vm

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "test-vm"
PLAYBOOK = str(Path(sys.executable).with_name("ansible-playbook"))
RECAP = re.compile(rf"^{NAME}\s*: (.*)$", re.MULTILINE)


@dataclass
class Played:
    """What a play said: exit status, printed output, and the recap's counts."""

    status: int
    output: str
    counts: dict[str, int] = field(default_factory=dict)


def took(begun: float, what: str) -> None:
    """Name what takes long: in software the machine's time is what a run costs."""
    if (seconds := time.monotonic() - begun) > 10:
        print(f"[{seconds:.0f} s] {what[:100]}")


@dataclass
class Bench:
    """The machine and how to work on it."""

    vm: Vm
    folder: Path
    inventory: Path

    def play(self, *roles: str, variables: dict[str, Any] | None = None, options: tuple[str, ...] = ()) -> Played:
        """Run roles of the collection, in this order, as a playbook of one play."""
        playbook = self.folder / "play.yml"
        names = [{"role": f"volta.llm.{role}"} for role in roles]
        playbook.write_text(
            yaml.safe_dump([{"hosts": "gpu_servers", "gather_subset": ["!all", "min"], "roles": names}]),
            encoding="utf-8",
        )
        return self.playbook(playbook, variables=variables, options=options)

    def playbook(
        self, playbook: Path, variables: dict[str, Any] | None = None, options: tuple[str, ...] = ()
    ) -> Played:
        extra = ["-e", json.dumps(variables)] if variables else []
        begun = time.monotonic()
        done = subprocess.run(
            [PLAYBOOK, str(playbook), "-i", str(self.inventory), *extra, *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(done.stdout)
        took(begun, f"ansible-playbook {playbook.name}")
        recap = RECAP.search(done.stdout)
        pairs = (word.split("=") for word in recap[1].split()) if recap else ()
        return Played(done.returncode, done.stdout, {key: int(value) for key, value in pairs})

    def sh(self, script: str, *, check: bool = True) -> str:
        """What a script wrote to standard output and standard error, run as root on the machine."""
        begun = time.monotonic()
        done = self.vm.machine.run("sh", "-c", f"export LC_ALL=C; exec 2>&1; {script}", check=check)
        took(begun, script)
        return done.stdout.decode(errors="replace").strip()

    def succeeds(self, script: str) -> bool:
        done = self.vm.machine.run("sh", "-c", f"exec 2>&1; {script}", check=False)
        print(f"$ {script}\n{done.stdout.decode(errors='replace').strip()} [{done.returncode}]")
        return done.returncode == 0

    @property
    def boot_id(self) -> str:
        return self.sh("cat /proc/sys/kernel/random/boot_id")

    @property
    def kernel(self) -> str:
        return self.sh("uname -r")

    @property
    def images(self) -> list[str]:
        """The kernels in /boot, the oldest first."""
        return self.sh("cd /boot; ls vmlinuz-* | sed s/vmlinuz-// | sort -V").split()

    def reboot(self) -> str:
        """By hand, as nobody's role does it. Returns the new boot id."""
        former = self.boot_id
        begun = time.monotonic()
        # The connection may end before the command does.
        self.vm.machine.run("systemctl", "reboot", check=False)
        boot_id = self.vm.wait_for_boot(former)
        print(f"rebooted in {time.monotonic() - begun:.0f} s: boot id {former} -> {boot_id}, kernel {self.kernel}")
        return boot_id


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A fresh machine; removed at the end. VOLTA_VM_KEEP=1 takes the one there is and leaves it, to look around in."""
    folder = tmp_path_factory.mktemp("vm")
    vm = Vm(NAME)
    keep = os.environ.get("VOLTA_VM_KEEP") == "1"
    if not keep:
        vm.down()
    inventory = folder / "inventory.yml"
    try:
        vm.up(inventory_file=inventory)
        yield Bench(vm, folder, inventory)
    finally:
        if not keep:
            vm.down()
