# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a build log says, in one sentence with the remedy.

The table holds the failures that people report most; each row's pattern comes from a public report. The first row that
matches wins, so causes stand before the failures they lead to: a full disk or a killed compiler also produces the
lines of an ordinary compile error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..faults import Fault
from .catalogue import CATALOGUE
from .toolkit import numbers

#: How much of a log goes into a message; the rest is in the file that the message names.
TAIL_LINES = 20
LINE_LIMIT = 300


@dataclass(frozen=True)
class Symptom:
    """A pattern in a log and what it means; ``{1}`` in message and remedy stands for the pattern's first group."""

    code: str
    subject: str
    pattern: re.Pattern[str]
    message: str
    remedy: str


def _symptom(code: str, subject: str, pattern: str, message: str, remedy: str) -> Symptom:
    return Symptom(code, subject, re.compile(pattern, re.MULTILINE), message, remedy)


#: Straight and typographic quotes: compilers use the latter in a UTF-8 locale.
_Q = "['‘’`\"]"

SYMPTOMS = (
    _symptom(
        "disk_full",
        "build folder",
        r"No space left on device|Disk quota exceeded",
        "the disk ran full while building",
        "Free some space below build_directory, or in /tmp where that is a disk of its own, and run again: the build "
        "goes on where it stopped.",
    ),
    _symptom(
        "build_out_of_memory",
        "memory",
        # nvcc ends with a status of its own when a part of it was killed (NVIDIA/cudf#8018).
        rf"\[code=137\]|Killed signal terminated program|^(?:.*: )?Killed\b|{_Q}\S+ died due to signal 9\b"
        r"|terminated with signal 9\b|virtual memory exhausted|final link failed: memory exhausted"
        r"|terminate called after throwing an instance of 'std::bad_alloc'"
        r"|cc1(?:plus)?: out of memory|Cannot allocate memory|LLVM ERROR: out of memory|exit status 137",
        "a compiler was killed for want of memory",
        "Set jobs lower (about 2 GiB of free memory a job), or add memory or swap; the build goes on where it stopped.",
    ),
    _symptom(
        "toolkit_mixed",
        "CUDA toolkit",
        rf"unrecognized command[- ]line option {_Q}-compress-mode",
        "the compiler was given an option of another toolkit: two toolkits are mixed, or the build folder is stale",
        "Name one toolkit in cuda_root; its nvcc, headers and libraries are then used together.",
    ),
    _symptom(
        "host_compiler_too_new",
        "host compiler",
        r"unsupported GNU version! gcc versions later than (\d+) are not supported",
        "the CUDA compiler accepts gcc up to {1}, and the one in use is newer",
        "Install g++-{1} beside it and set cuda_host_compiler to /usr/bin/g++-{1}; the default can stay as it is.",
    ),
    _symptom(
        "host_compiler_too_new",
        "host compiler",
        r"unsupported clang version! clang version must be less than (\d+)",
        "the CUDA compiler accepts clang below {1}, and the one in use is newer",
        "Set cuda_host_compiler to a gcc that this toolkit accepts.",
    ),
    _symptom(
        "toolkit_unavailable",
        "C library",
        r"exception\s+specification is incompatible with that of previous function\s+\"(?:cospi|sinpi|rsqrt)f?\"",
        "the system's C library (glibc 2.41 or newer) declares functions that this CUDA toolkit declares otherwise",
        "Take the distribution's own toolkit (Debian 13: source distro, CUDA 12.4, patched for it), or build on a "
        "machine with an older release (llama_cpp_build_host).",
    ),
    _symptom(
        "architecture_unsupported",
        "CUDA architecture",
        rf"Unsupported gpu architecture {_Q}(compute_(?:\d+[a-z]?))['’]",
        "the CUDA compiler does not know {1}",
        "Use a toolkit that knows the card: for V100 (compute_70) CUDA 12.9 is the last.",
    ),
    _symptom(
        "architecture_unsupported",
        "CUDA architecture",
        rf"Unsupported gpu architecture {_Q}(compute_[^'’]*)['’]",
        "the text of a failed detection ({1}) was taken for an architecture",
        "State cuda_architectures in numbers, as in 70-real; 'native' asks a driver that may not be loaded.",
    ),
    _symptom(
        "nvcc_missing",
        "nvcc",
        r"No CMAKE_CUDA_COMPILER could be found|Failed to find nvcc|nvcc: (?:command )?not found"
        r"|CMAKE_CUDA_COMPILER:\s*\S*\s*is not a full path|Could not find nvcc",
        "the CUDA toolkit was found, but not its compiler",
        "Install the toolkit's compiler (for V100: CUDA 12.x) and name its folder in cuda_root.",
    ),
    _symptom(
        "libcuda_stub_missing",
        "libcuda",
        r"cannot find -lcuda\b|warning: libcuda\.so\.1, needed by|undefined reference to `cu(?:Mem|Device|Get)[A-Z]"
        r"|links to:?\s+CUDA::cuda_driver\s+but the target was not found",
        "neither the driver's libcuda nor the toolkit's stub of it was found when linking",
        "Install the toolkit's driver stubs (the package with lib64/stubs/libcuda.so), or the driver itself.",
    ),
    _symptom(
        "toolkit_incomplete",
        "CUDA toolkit",
        r"links to:?\s+CUDA::(\w+)\s+but the target was not found",
        "the CUDA toolkit has a compiler and no {1}",
        "Install the toolkit's development package of that library in the same tree as nvcc.",
    ),
    _symptom(
        "cmake_too_old",
        "cmake",
        r"CMake (\d[\d.]*)(?:\.\.\.\S+)? or higher is required\.\s+You are running version",
        "the source needs cmake {1} or newer",
        "Install a newer cmake, for example from the distribution's backports or with pip.",
    ),
    _symptom(
        "build_tool_missing",
        "C++ compiler",
        r"No CMAKE_(?:C|CXX)_COMPILER could be found",
        "there is no C++ compiler",
        "Install it: apt-get install g++",
    ),
    _symptom(
        "https_support_missing",
        "OpenSSL",
        r"OpenSSL not found, HTTPS support disabled|HTTPS is not supported\. Please rebuild"
        rf"|{_Q}https{_Q} scheme is not supported",
        "the engine is built without HTTPS, because OpenSSL's development files were not found",
        "Install libssl-dev and build again. LLAMA_CURL no longer has any effect.",
    ),
    _symptom(
        "source_unreachable",
        "network",
        r"Could not resolve host: ?(\S+)|Failed to connect to (\S+) port|Connection timed out after"
        r"|unable to access |Temporary failure in name resolution|SSL certificate problem",
        "something had to be fetched while building, and the network did not answer",
        "Check name resolution, proxy and certificates of this machine.",
    ),
)


def recognise(log: str) -> Fault | None:
    """The known failure that the log shows, or null."""
    for symptom in SYMPTOMS:
        found = symptom.pattern.search(log)
        if found is None:
            continue
        first = next((group for group in found.groups() if group), "")
        fill = {"{1}": first.rstrip(".'\"")}
        message, remedy = symptom.message, symptom.remedy
        for mark, text in fill.items():
            message, remedy = message.replace(mark, text), remedy.replace(mark, text)
        return CATALOGUE.fault(symptom.code, symptom.subject, message, remedy)
    return None


def explain(log: str, log_path: str, step: str, status: int) -> Fault:
    """The fault of a failed step: ``step`` is "configure" or "build", ``status`` its exit status (negative: a signal).

    A known failure is said in one sentence; of any other the last lines are shown. Both name the log.
    """
    known = recognise(log)
    if known is not None:
        return CATALOGUE.fault(known.code, known.subject, f"{known.message} (log: {log_path})", known.remedy)
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    program = "cmake" if step == "configure" else "ninja"
    shown = "\n".join(f"    {line}" for line in failure_lines(log))
    return CATALOGUE.fault(
        "configure_failed" if step == "configure" else "build_failed",
        program,
        f"{ended}; from the log {log_path}:\n{shown}",
        "Look for the first error in the log. The release in use was not touched.",
    )


def failure_lines(log: str, count: int = TAIL_LINES) -> list[str]:
    """The lines to show: from ninja's first FAILED on, without other jobs' progress; else the last ones.

    ninja lets running jobs end, so the failure is often not at the end of the log.
    """
    lines = [line.rstrip() for line in log.splitlines()]
    start = next((index for index, line in enumerate(lines) if line.startswith("FAILED:")), None)
    if start is not None:
        # The line after FAILED is the whole command, several thousand characters of -I and -D.
        lines = [lines[start], *lines[start + 2 :]]
        lines = [line for line in lines if not re.match(r"\[\d+/\d+\] ", line)][:count]
    else:
        lines = [line for line in lines if line][-count:]
    return [line if len(line) <= LINE_LIMIT else line[: LINE_LIMIT - 3] + "..." for line in lines]


def unused_options(log: str) -> list[str]:
    """Names of options that were given to cmake and mean nothing to this source, as cmake or the source says."""
    found = re.search(r"Manually-specified variables were not used by the project:\s*\n((?:\s*\n|\s+\S+\s*\n)+)", log)
    unused = found.group(1).split() if found else []
    ignored = re.findall(r"^\s*(\w+) is deprecated and will be ignored", log, re.MULTILINE)
    return list(dict.fromkeys([*unused, *ignored]))


def configured_version(log: str) -> str | None:
    """The version of llama.cpp as its own cmake files say it; null for sources that do not."""
    found = re.search(r"^-- llama\.cpp version: (\S+)", log, re.MULTILINE)
    return found.group(1) if found else None


def check_configured(log: str, backend: str, nccl: bool = False) -> list[Fault]:
    """What a configuration that ended well can still have wrong: two toolkits, no OpenSSL, options without effect."""
    faults = []
    if backend == "cuda":
        compiler = re.search(r"The CUDA compiler identification is NVIDIA (\d[\d.]*)", log)
        toolkit = re.search(r"Found CUDAToolkit: (.*?)\s*\((?:found version )?\"?(\d[\d.]*)\"?\)", log)
        if compiler and toolkit and numbers(compiler.group(1))[:2] != numbers(toolkit.group(2))[:2]:
            faults.append(
                CATALOGUE.fault(
                    "toolkit_mixed",
                    "CUDA toolkit",
                    f"the compiler is {compiler.group(1)}, headers and libraries are {toolkit.group(2)} "
                    f"({toolkit.group(1)})",
                    "Name one toolkit in cuda_root; its nvcc, headers and libraries are then used together.",
                )
            )
    if nccl and re.search(r"NCCL not found|Could NOT find NCCL", log):
        faults.append(
            CATALOGUE.fault(
                "library_missing",
                "NCCL",
                "was asked for and not found by cmake",
                "Install libnccl-dev for this toolkit's release, or set nccl to false: layers are split without it.",
            )
        )
    https = recognise(log)
    if https is not None and https.code == "https_support_missing":
        faults.append(https)
    faults += [
        CATALOGUE.fault(
            "cmake_option_unused",
            name,
            "was passed to cmake and is not used by this source",
            "Remove it from cmake_options, or check its spelling against the source's version.",
        )
        for name in unused_options(log)
    ]
    return faults


def toolkit_note(toolkit: str, driver_cuda: str) -> str | None:
    """What to know when the toolkit is newer than the CUDA version that nvidia-smi shows for the driver.

    Within one major version that is supported and no error; the limits are said so that nobody looks for one.
    """
    ours, theirs = numbers(toolkit)[:2], numbers(driver_cuda)[:2]
    if len(ours) < 2 or len(theirs) < 2 or ours <= theirs:
        return None
    if ours[0] != theirs[0]:
        return f"Toolkit {toolkit} is a major version above the driver's CUDA {driver_cuda}: its programs will not run."
    return (
        f"Toolkit {toolkit} is newer than the driver's CUDA {driver_cuda}. That works within {ours[0]}.x for native "
        "code; the driver cannot compile this toolkit's PTX, and below 550 it cannot read compressed device code."
    )
