# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The tools of a build, their versions, and whether they can do what is asked."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from ..faults import Fault
from ..machine import Completed
from .catalogue import CATALOGUE
from .process import environment, find_program, run_as
from .request import Account, Request
from .toolkit import Cuda, first_match, numbers, probe_cuda

#: The source asks for 3.14; CUDA as a language with architectures needs 3.18.
CMAKE_AT_LEAST = {"cpu": (3, 14), "cuda": (3, 18)}

#: Memory that one compile job of this source can take, with room: some CUDA files come near 2 GiB.
BYTES_PER_JOB = 2 * 1024**3


@dataclass(frozen=True)
class Toolchain:
    """Paths and versions. ``native`` is a digest of the instruction sets that -march=native stands for here."""

    cmake: str
    cmake_version: str
    ninja: str
    cxx: str
    cxx_version: str
    native: str | None
    ccache: str | None
    git: str | None
    cuda: Cuda | None

    def identity(self) -> dict[str, str | None]:
        """What of it decides about the binaries, for the fingerprint."""
        return {
            "cmake": self.cmake_version,
            "cxx": self.cxx_version,
            "native": self.native,
            "nvcc": self.cuda.version if self.cuda else None,
            "cuda_host_compiler": self.cuda.host_compiler_version if self.cuda else None,
        }


def probe(request: Request, account: Account | None) -> tuple[Toolchain | None, list[Fault]]:
    """Ask every tool for its version, as the account that will run it."""
    faults: list[Fault] = []
    env = environment()

    def ask(*argv: str) -> Completed:
        return run_as(account, argv, env, timeout=30)

    needed = {"cmake": "cmake", "ninja": "ninja-build", "c++": "g++"}
    if request.source_type == "git":
        needed["git"] = "git"
    paths: dict[str, str] = {}
    for name, package in needed.items():
        path = find_program(name)
        if path is None:
            faults.append(
                CATALOGUE.fault(
                    "build_tool_missing", name, "not found in PATH", f"Install it: apt-get install {package}"
                )
            )
        else:
            paths[name] = path

    cmake_version = ""
    if "cmake" in paths:
        cmake_version = first_match(r"cmake version (\S+)", ask(paths["cmake"], "--version").stdout) or "unknown"
        least = CMAKE_AT_LEAST.get(request.backend, (3, 14))
        if cmake_version != "unknown" and numbers(cmake_version)[:2] < least:
            faults.append(
                CATALOGUE.fault(
                    "cmake_too_old",
                    paths["cmake"],
                    f"version {cmake_version}, at least {least[0]}.{least[1]} is needed",
                    "Install a newer cmake, for example from the distribution's backports or with pip.",
                )
            )
    cuda = None
    if request.backend == "cuda":
        cuda, cuda_faults = probe_cuda(
            request.cuda_root, request.cuda_architectures, request.cuda_host_compiler, account
        )
        faults += cuda_faults
    if faults:
        return None, faults
    cxx = paths["c++"]
    return (
        Toolchain(
            cmake=paths["cmake"],
            cmake_version=cmake_version,
            ninja=paths["ninja"],
            cxx=cxx,
            cxx_version=ask(cxx, "--version").stdout.partition("\n")[0].strip(),
            native=native_instruction_sets(ask(cxx, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null")),
            ccache=find_program("ccache"),
            git=paths.get("git"),
            cuda=cuda,
        ),
        [],
    )


def native_instruction_sets(answer: Completed) -> str | None:
    """A digest of the compiler's predefined macros; null where it does not know -march=native.

    A build for "the machine itself" is another build on another processor. The macros name its instruction sets and,
    unlike the flags in /proc/cpuinfo, do not change with the kernel.
    """
    if not answer.ok:
        return None
    macros = sorted(line for line in answer.stdout.splitlines() if line.startswith("#define"))
    return hashlib.sha256("\n".join(macros).encode()).hexdigest()[:16]


def automatic_jobs(meminfo: str, cgroup_limit: str | None = None, cgroup_used: str | None = None) -> int:
    """As many jobs as there are cores for this process and memory for at 2 GiB a job; at least one.

    ``meminfo`` is the text of /proc/meminfo, the other two those of cgroup v2's memory.max and memory.current.
    """
    cores = len(os.sched_getaffinity(0))
    available = available_memory(meminfo, cgroup_limit, cgroup_used)
    if available is None:
        return cores
    return max(1, min(cores, available // BYTES_PER_JOB))


def available_memory(meminfo: str, cgroup_limit: str | None = None, cgroup_used: str | None = None) -> int | None:
    """Bytes that a build may take without swapping; null where the kernel does not say."""
    kibibytes = first_match(r"(?m)^MemAvailable:\s+(\d+) kB", meminfo)
    available = int(kibibytes) * 1024 if kibibytes else None
    limit, used = (cgroup_limit or "").strip(), (cgroup_used or "").strip()
    if limit.isdigit():
        left = int(limit) - (int(used) if used.isdigit() else 0)
        available = left if available is None else min(available, left)
    return available


def machine_memory() -> tuple[str, str | None, str | None]:
    """The three texts that say how much memory is free for this process."""

    def read(path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="ascii", errors="replace")
        except OSError:
            return None

    return (
        read("/proc/meminfo") or "",
        read("/sys/fs/cgroup/memory.max"),
        read("/sys/fs/cgroup/memory.current"),
    )
