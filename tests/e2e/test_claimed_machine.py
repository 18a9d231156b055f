# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A lab machine that claims to be Ubuntu 22.04 and gets its driver by hand, with nothing of the collection."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.lab import gpus
from tests.lab.lab import Lab, Machine

BOOT_ID = f"{gpus.SYSROOT}/proc/sys/kernel/random/boot_id"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    lab = Lab("e2e-ubuntu")
    lab.down()
    yield lab.up(count=1, gpus="v100x4", claims="ubuntu-22.04").machines[0]
    lab.down()


def reboot(machine: Machine) -> None:
    before = machine.output("cat", BOOT_ID)
    machine.run("systemctl", "reboot", check=False)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        seen = machine.run("cat", BOOT_ID, check=False).stdout.decode().strip()
        if seen not in ("", before):
            machine.run("systemctl", "is-system-running", "--wait", check=False)
            return
        time.sleep(0.3)
    raise AssertionError("the machine did not come back with another boot id")


def loaded(machine: Machine) -> set[str]:
    return {line.split()[0] for line in machine.output("lsmod").splitlines()[1:]}


def install(machine: Machine, *packages: str) -> None:
    machine.run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "--yes", *packages)


def test_bare_then_driver_then_updates(machine: Machine) -> None:
    assert machine.output("uname", "-r") == "5.15.0-139-generic"
    assert loaded(machine) == {"nouveau"}
    assert machine.run("which", "nvidia-smi", check=False).returncode == 1

    machine.run("apt-get", "update")
    install(machine, "nvidia-headless-535-server", "nvidia-utils-535-server")
    assert machine.output("dkms", "status") == "nvidia-srv/535.261.03, 5.15.0-139-generic, x86_64: installed"
    assert machine.run("nvidia-smi", check=False).returncode == 9

    reboot(machine)
    assert loaded(machine) == {"nvidia", "nvidia_modeset", "nvidia_drm"}
    assert machine.output("nvidia-smi", "-L").count("Tesla V100") == 4

    machine.run("lab-archive", "base", "updates")
    machine.run("apt-get", "update")
    machine.run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "dist-upgrade", "--yes")
    assert machine.run("nvidia-smi", check=False).returncode == 18
    built = machine.output("dkms", "status").splitlines()
    assert built == [f"nvidia-srv/535.288.01, 5.15.0-{abi}-generic, x86_64: installed" for abi in (139, 151)]

    reboot(machine)
    assert machine.output("uname", "-r") == "5.15.0-151-generic"
    version = machine.output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")
    assert version == "535.288.01"


def test_a_blacklist_that_only_one_image_has(machine: Machine) -> None:
    """Each kernel boots by what its own initramfs has, whatever is on disk."""
    Lab("e2e-ubuntu").reset()
    machine.run("lab-archive", "base", "updates")
    machine.run("apt-get", "update")
    install(machine, "linux-generic")
    machine.run(
        "sh", "-c", "echo blacklist nouveau >/etc/modprobe.d/own.conf && update-initramfs -u -k 5.15.0-151-generic"
    )
    reboot(machine)
    assert loaded(machine) == set()

    machine.run("grub-reboot", "Advanced options for Ubuntu>Ubuntu, with Linux 5.15.0-139-generic")
    reboot(machine)
    assert machine.output("uname", "-r") == "5.15.0-139-generic"
    assert loaded(machine) == {"nouveau"}

    reboot(machine)
    assert machine.output("uname", "-r") == "5.15.0-151-generic"


def test_it_is_ubuntu_to_those_who_ask(machine: Machine) -> None:
    assert machine.output("lsb_release", "-ds") == "Ubuntu 22.04 LTS"
    origins = machine.output("unattended-upgrade", "--dry-run", "-v")
    assert "o=Ubuntu,a=jammy-security" in origins
    shown = machine.output("apt-cache", "policy", "linux-image-amd64", "nvidia-driver")
    assert shown.count("Candidate: (none)") == shown.count("Candidate:")
