# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where a machine gets its CUDA toolkit from: which packages of which release, and what stands against it.

Only compiler, headers, runtime, cuBLAS and stubs are asked for: the toolkit's meta package brings 5 GB, and NVIDIA's
``cuda`` brings a driver.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..apt import sources
from ..compat import highest_gcc
from ..faults import Fault, is_fatal
from ..machine import Machine
from .catalogue import CATALOGUE
from .gpus import loaded_driver
from .request import ARCHITECTURE, Account, redacted, unfit_in_path
from .toolkit import Cuda, numbers, probe_cuda

SOURCES = ("auto", "distro", "cuda_repo", "existing")
NVIDIA_ARCHIVE = "https://developer.download.nvidia.com/compute/cuda/repos"


@dataclass(frozen=True)
class System:
    """A release of a distribution.

    ``toolkit`` is the CUDA release of its own nvidia-cuda-toolkit, where that can serve, and ``toolkit_driver`` the
    driver branch whose libcuda that package brings. ``archive`` is the folder of NVIDIA's archive for it,
    ``archive_from`` the first toolkit there, ``archive_default`` the one to take. ``gcc`` is its default compiler.
    """

    name: str
    gcc: int
    toolkit: str | None = None
    toolkit_driver: str | None = None
    archive: str | None = None
    archive_from: str | None = None
    archive_default: str | None = None


#: First releases in NVIDIA's archives: for Ubuntu 24.04 Jimver/cuda-toolkit#375 (12.5.0 is there, 12.4.1 is not), for
#: Debian 12 NVIDIA/nvidia-docker#1791. Where 12.2 is not there, 12.9 is the last that compiles for V100.
SYSTEMS = {
    ("debian", "12"): System("Debian 12", 12, "11.8", "535", "debian12", "12.3", "12.9"),
    ("debian", "13"): System("Debian 13", 14, "12.4", "550"),
    ("ubuntu", "22.04"): System("Ubuntu 22.04", 11, None, None, "ubuntu2204", "11.7", "12.2"),
    ("ubuntu", "24.04"): System("Ubuntu 24.04", 13, None, None, "ubuntu2404", "12.5", "12.9"),
}


@dataclass(frozen=True)
class Wish:
    """What is asked for; empty texts leave the choice to the table above."""

    source: str = "auto"
    version: str = ""
    root: str = ""
    architectures: tuple[str, ...] = ("70-real",)
    host_compiler: str = ""
    archive_url: str = ""


@dataclass
class Supply:
    """``packages`` are what the machine needs, ``missing`` those that it lacks; ``toolkit`` is what is there by now.

    ``archive_file`` is a file of others that names the archive already (of the role nvidia_driver, of NVIDIA's package
    cuda-keyring); null where none does.
    """

    source: str | None = None
    version: str | None = None
    root: str | None = None
    packages: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    archive_url: str | None = None
    archive_file: str | None = None
    driver_branch: str | None = None
    gcc: int | None = None
    toolkit: Cuda | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def results(self) -> dict[str, Any]:
        shown = {name: value for name, value in self.__dict__.items() if name not in ("faults", "toolkit")}
        return {**shown, "toolkit": dict(self.toolkit.__dict__) if self.toolkit else None}


def look(wish: Wish, machine: Machine, account: Account | None, required: bool = False) -> Supply:
    """Where the toolkit comes from, what is missing, and whether what is there can compile the engine."""
    supply = Supply()
    supply.faults = _check(wish)
    if supply.faults:
        return supply
    text = machine.read("/etc/os-release") or machine.read("/usr/lib/os-release") or ""
    packaged = machine
    if not text and not machine.is_capture:
        # A root that holds the GPUs alone: packages are those of the system itself.
        packaged = Machine()
        text = packaged.read("/etc/os-release") or ""
    system, name = identify(text)
    _choose(wish, system, name, supply)
    if supply.faults:
        return supply
    supply.archive_file = _named_by(packaged, supply.archive_url)
    _judge_driver(system, machine, supply)
    installed = _installed(machine, supply.packages)
    supply.missing = [package for package in supply.packages if package not in installed]
    if supply.missing and not required:
        return supply
    cuda, faults = probe_cuda(supply.root, wish.architectures, wish.host_compiler or None, account)
    supply.toolkit = cuda
    supply.faults += faults
    if cuda is not None and supply.source != "existing" and numbers(cuda.version)[:2] != numbers(supply.version or ""):
        supply.faults.append(
            CATALOGUE.fault(
                "toolkit_mixed",
                cuda.nvcc,
                f"is CUDA {cuda.version}, and the packages are those of {supply.version}",
                "Name the folder of the toolkit in `root`, or remove the other one.",
            )
        )
    if cuda is not None:
        supply.version = ".".join(cuda.version.split(".")[:2])
        supply.root = cuda.root
    if any(is_fatal(fault) for fault in faults):
        supply.toolkit = None
    return supply


def _check(wish: Wish) -> list[Fault]:
    faults: list[Fault] = []

    def bad(subject: str, message: str, remedy: str) -> None:
        faults.append(CATALOGUE.fault("build_option_invalid", subject, message, remedy))

    if wish.source not in SOURCES:
        bad("source", f"{wish.source!r} is not known", f"Write one of: {', '.join(SOURCES)}.")
    if wish.version and not re.fullmatch(r"\d+\.\d+", wish.version):
        bad("version", f"{wish.version!r} is not a release of CUDA", "Write it as in 12.2.")
    if wish.source == "existing" and not wish.root.startswith("/"):
        bad("root", "is not given" if not wish.root else f"{wish.root!r} is not an absolute path",
            "Write the folder that holds bin/nvcc, for example /usr/local/cuda-12.2.")  # fmt: skip
    if unfit := unfit_in_path(wish.root):
        bad("root", f"{wish.root!r} {unfit}", "Write a path without it.")
    if wish.source in ("distro", "cuda_repo") and wish.root:
        bad(
            "root",
            f"is {wish.root}, and the packages have a folder of their own",
            "Leave it out, or set source to existing.",
        )
    if wish.archive_url:
        try:
            parts = urlsplit(wish.archive_url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https", "file") or parts.password or " " in wish.archive_url:
            bad("archive_url", f"{redacted(wish.archive_url)!r} is not an address without a password",
                "Write the address of the archive for this distribution.")  # fmt: skip
    if not wish.architectures:
        faults.append(CATALOGUE.fault("architecture_invalid", "architectures", "is empty", "Write [70-real] for V100."))
    for name in wish.architectures:
        if not ARCHITECTURE.match(name):
            faults.append(
                CATALOGUE.fault(
                    "architecture_invalid",
                    "architectures",
                    f"{name!r} is not an architecture",
                    "Write numbers as in 70-real.",
                )
            )
    return faults


def identify(os_release: str) -> tuple[System | None, str]:
    """The distribution in the table, and its name for messages."""
    found = dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', os_release))
    system = SYSTEMS.get((found.get("ID", ""), found.get("VERSION_ID", "")))
    return system, system.name if system else found.get("PRETTY_NAME") or "this system"


def _choose(wish: Wish, system: System | None, name: str, supply: Supply) -> None:
    def refuse(subject: str, message: str, remedy: str) -> None:
        supply.faults.append(CATALOGUE.fault("toolkit_unavailable", subject, message, remedy))

    source = wish.source
    if source == "auto":
        if wish.root:
            source = "existing"
        elif system is not None and system.toolkit and wish.version in ("", system.toolkit):
            source = "distro"
        else:
            source = "cuda_repo"
    supply.source = source
    existing = "Install a toolkit of CUDA 12.x by hand, set source to existing and name its folder in `root`."
    if source == "existing":
        supply.root = wish.root or None
        supply.version = wish.version or None
        return
    if system is None:
        refuse(name, "no toolkit is known for it", existing)
        return
    if source == "distro":
        if system.toolkit is None:
            refuse(name, "its own packages hold no toolkit that serves here", "Set source to cuda_repo.")
        elif wish.version not in ("", system.toolkit):
            refuse(
                f"CUDA {wish.version}",
                f"{name} has {system.toolkit}",
                f"Write {system.toolkit}, or set source to cuda_repo or existing.",
            )
        supply.version, supply.root = system.toolkit, "/usr"
        supply.driver_branch = system.toolkit_driver
        packages = ["nvidia-cuda-toolkit"]
    else:
        version = wish.version or system.archive_default or ""
        if system.archive is None:
            refuse(name, "NVIDIA's archive for it has no toolkit that compiles for V100", existing)
        elif numbers(version) < numbers(system.archive_from or ""):
            refuse(
                f"CUDA {version}",
                f"NVIDIA's archive for {name} begins with {system.archive_from}",
                f"Write {system.archive_default}: native code of any 12.x runs under driver 535.",
            )
        supply.version, supply.root = version, f"/usr/local/cuda-{version}"
        supply.archive_url = (wish.archive_url or f"{NVIDIA_ARCHIVE}/{system.archive}/x86_64").rstrip("/")
        dashed = version.replace(".", "-")
        packages = [
            f"{package}-{dashed}"
            for package in (
                "cuda-nvcc",
                "cuda-cudart-dev",
                "cuda-cccl",
                "cuda-driver-dev",
                "libcublas-dev",
                "cuda-cuobjdump",
            )
        ]
    if supply.faults:
        return
    limit = highest_gcc(supply.version or "")
    supply.gcc = min(system.gcc, limit) if limit else system.gcc
    if limit is not None and system.gcc > limit and not wish.host_compiler:
        packages.append(f"g++-{limit}")
    supply.packages = packages


def _named_by(machine: Machine, archive_url: str | None) -> str | None:
    """The file of others that names the archive; null for none.

    A second entry with another key beside it would stop every apt on the machine ("Conflicting values set for option
    Signed-By").
    """
    if archive_url is None:
        return None
    there = (f"{archive_url}/", "/")
    return next((e.file for e in sources.read(machine) if e.archive == there and e.file != sources.TOOLKIT_FILE), None)


def _judge_driver(system: System | None, machine: Machine, supply: Supply) -> None:
    """Debian's toolkit brings the libcuda of one branch; another driver would be left without its own."""
    if supply.source != "distro" or supply.driver_branch is None or system is None:
        return
    there = loaded_driver(machine) or _driver_packages(machine)
    branch = there.partition(".")[0] if there else None
    if branch is not None and branch != supply.driver_branch:
        supply.faults.append(
            CATALOGUE.fault(
                "toolkit_needs_driver",
                f"nvidia-cuda-toolkit {system.toolkit}",
                f"needs the libcuda of driver {supply.driver_branch} ({system.name}), and driver {there} is here",
                f"Build on a host without a driver (llama_cpp_build_host), take driver {supply.driver_branch}, or name "
                "another toolkit.",
            )
        )


#: The packages that hold a driver's libcuda: Debian's, Debian's for one branch, Ubuntu's.
_LIBCUDA = re.compile(r"^(?:libcuda1|libnvidia-.*cuda1|libnvidia-compute-\d+.*)$")


def _driver_packages(machine: Machine) -> str | None:
    """The version of an installed libcuda by dpkg; null for none."""
    names = ["libcuda1", "libnvidia-*cuda1", "libnvidia-compute-*"]
    answer = machine.run(["dpkg-query", "-W", "-f", "${db:Status-Status} ${binary:Package} ${Version}\n", *names])
    for line in answer.stdout.splitlines():
        status, _space, rest = line.partition(" ")
        package, _space, version = rest.partition(" ")
        if status == "installed" and _LIBCUDA.match(package.partition(":")[0]):
            return version.partition(":")[2].partition("-")[0] if ":" in version else version.partition("-")[0]
    return None


def _installed(machine: Machine, packages: Sequence[str]) -> set[str]:
    if not packages:
        return set()
    answer = machine.run(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *packages])
    return {line.split(" ")[1] for line in answer.stdout.splitlines() if line.startswith("installed ")}
