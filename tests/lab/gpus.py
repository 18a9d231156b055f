# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Simulated GPUs on a machine: a program that answers as nvidia-smi, and files that stand in for /proc and /sys."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.lab.errors import LabError

SIMULATOR = Path(__file__).with_name("gpu_simulator") / "gpu_simulator.py"
INSTALLED = "/usr/local/lib/gpu-simulator/gpu_simulator.py"
#: The program decides by the name it is called by.
LINKS = {"/usr/bin/nvidia-smi": INSTALLED, "/usr/local/sbin/gpu-sim": INSTALLED}
#: The word for a driver that comes from packages; nvidia-smi is then one of them.
PACKAGES = "packages"
PACKAGES_LINKS = {"/usr/local/sbin/gpu-sim": INSTALLED}
#: What an inventory passes to the roles as ``sysroot``.
SYSROOT = "/var/lib/gpu-simulator/sysroot"
NONE = "none"


def simulator_text() -> str:
    """The simulator's source."""
    try:
        return SIMULATOR.read_text()
    except FileNotFoundError as error:
        raise LabError(
            f"The GPU simulator is not in this checkout: {SIMULATOR} does not exist. Use --gpus none."
        ) from error


def require(profile: str) -> None:
    """Refuse a profile that cannot be installed, before a machine is made for it."""
    if profile == NONE:
        return
    simulator_text()
    profiles = import_module("tests.lab.gpu_simulator.gpu_simulator").PROFILES
    if profile not in profiles:
        raise LabError(f"--gpus {profile}: choose one of: {NONE}, {', '.join(profiles)}")


def install_command(profile: str, driver: str | None = None) -> list[str]:
    """What is run on the machine once the simulator is there."""
    return ["gpu-sim", "install", "--profile", profile, *([] if driver is None else ["--driver", driver])]
