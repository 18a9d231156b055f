# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A CUDA toolkit on the machine: found, looked at part by part, and judged before anything is compiled.

Compiler, headers and libraries must come from one tree. A compiler that does not know the card, a header of another
release or a library that is not there cost half an hour when only the build finds them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..compat import highest_gcc
from ..faults import Fault
from ..machine import Completed
from .catalogue import CATALOGUE
from .process import SEARCH_PATH, environment, find_program, run_as
from .request import Account, unfit_in_path

#: Where toolkits are looked for when no root is given, before PATH: the machine's choice, then each release.
PREFERRED = "/usr/local/cuda"

#: The oldest gcc that compiles the engine (C++17 with its library).
OLDEST_GCC = 9

REMEDY = "Install the CUDA toolkit (12.x for V100; 13 no longer compiles for it), or name its folder in cuda_root."


@dataclass(frozen=True)
class Cuda:
    """A toolkit. ``host_compiler`` is null where nvcc takes the system's own; other nulls are parts not found.

    ``headers`` is the release that cuda_runtime_api.h states, ``runtime`` the version in the name of libcudart.
    """

    root: str
    nvcc: str
    version: str
    architectures: tuple[str, ...]
    host_compiler: str | None
    host_compiler_version: str | None
    cuobjdump: str | None = None
    headers: str | None = None
    runtime: str | None = None
    cublas: str | None = None
    stub: str | None = None


Ask = Callable[..., Completed]


def _asker(account: Account | None, folder: str) -> Ask:
    env = environment(extra={"PATH": f"{folder}:{SEARCH_PATH}"})

    def ask(*argv: str) -> Completed:
        return run_as(account, argv, env, timeout=30)

    return ask


def probe_cuda(
    cuda_root: str | None, wanted: Sequence[str], host_compiler: str | None, account: Account | None
) -> tuple[Cuda | None, list[Fault]]:
    """The toolkit at ``cuda_root``, or the first one on the machine that compiles for ``wanted``."""
    first: list[Fault] | None = None
    for nvcc in _candidates(cuda_root):
        cuda, faults = _look_at(nvcc, cuda_root, wanted, host_compiler, account)
        if cuda is not None and not faults:
            return cuda, []
        first = faults if first is None else first
    if first is not None:
        return None, first
    where = f"below {cuda_root}/bin" if cuda_root else f"in PATH or below {PREFERRED}/bin"
    return None, [CATALOGUE.fault("nvcc_missing", "nvcc", f"not found {where}", REMEDY)]


def _candidates(cuda_root: str | None) -> Iterator[str]:
    if cuda_root:
        nvcc = f"{cuda_root}/bin/nvcc"
        if os.path.lexists(nvcc):
            yield nvcc
        return
    seen = set()
    # Newest first: 12.10 after 12.9 as numbers, not as text.
    others = sorted(Path(PREFERRED).parent.glob("cuda-*"), key=lambda path: numbers(path.name), reverse=True)
    for path in [Path(PREFERRED), *others]:
        nvcc = f"{path}/bin/nvcc"
        if os.path.lexists(nvcc) and os.path.realpath(nvcc) not in seen:
            seen.add(os.path.realpath(nvcc))
            yield nvcc
    in_path = find_program("nvcc")
    if in_path is not None and os.path.realpath(in_path) not in seen:
        yield in_path


def _look_at(
    nvcc: str, cuda_root: str | None, wanted: Sequence[str], host_compiler: str | None, account: Account | None
) -> tuple[Cuda | None, list[Fault]]:
    # One spelling, whatever links lead there: the path is part of what is built.
    root = os.path.realpath(cuda_root) if cuda_root else str(Path(os.path.realpath(nvcc)).parent.parent)
    if unfit := unfit_in_path(root):
        remedy = "Give the folder another name."
        return None, [CATALOGUE.fault("build_option_invalid", root, f"its path {unfit}", remedy)]
    if os.path.lexists(f"{root}/bin/nvcc"):
        nvcc = f"{root}/bin/nvcc"
    ask = _asker(account, f"{root}/bin")
    answer = ask(nvcc, "--version")
    version = first_match(r"\bV(\d+(?:\.\d+)+)", answer.stdout)
    if not answer.ok or version is None:
        who = account.name if account else "the caller"
        said = (answer.stderr or answer.stdout).strip().partition("\n")[0] or f"exit status {answer.rc}"
        return None, [CATALOGUE.fault("nvcc_missing", nvcc, f"cannot be run as {who}: {said}", REMEDY)]
    known = tuple(re.findall(r"compute_(\w+)", ask(nvcc, "--list-gpu-arch").stdout))
    faults = [
        architecture_unsupported(architecture, version, known)
        for architecture in wanted
        if known and re.sub(r"-(real|virtual)$", "", architecture) not in known
    ]
    compiler, compiler_version, compiler_faults = _host_compiler(host_compiler, version, ask)
    cuda = Cuda(
        root=root,
        nvcc=nvcc,
        version=version,
        architectures=known,
        host_compiler=compiler,
        host_compiler_version=compiler_version,
        cuobjdump=find_program("cuobjdump", f"{root}/bin"),
        headers=_header_release(Path(root)),
        runtime=_library_version(Path(root), "libcudart.so"),
        cublas=_library_version(Path(root), "libcublas.so"),
        stub=_stub(Path(root)),
    )
    return cuda, [*faults, *compiler_faults, *judge_parts(cuda)]


def architecture_unsupported(architecture: str, version: str, known: Sequence[str]) -> Fault:
    oldest = min(known, key=lambda name: numbers(name)[:1]) if known else "?"
    return CATALOGUE.fault(
        "architecture_unsupported",
        architecture,
        f"nvcc {version} does not compile for it; the oldest it knows is compute_{oldest}",
        "Use a toolkit that knows the card: for V100 (70) CUDA 12.9 is the last.",
    )


def _host_compiler(given: str | None, cuda: str, ask: Ask) -> tuple[str | None, str | None, list[Fault]]:
    """The compiler for nvcc: the one given, the system's own where the toolkit takes it, or one installed beside it."""
    limit = highest_gcc(cuda)
    if given is not None:
        answer = ask(given, "--version")
        if not answer.ok:
            return (
                None,
                None,
                [
                    CATALOGUE.fault(
                        "build_tool_missing", given, "cannot be run", "Install it, or name another cuda_host_compiler."
                    )
                ],
            )
        version = answer.stdout.partition("\n")[0].strip()
        return given, version, [*_too_new(given, gcc_major(answer.stdout), limit, cuda)]
    own = find_program("g++")
    major = gcc_major(ask(own, "--version").stdout) if own else None
    if limit is None or major is None or major <= limit:
        return None, None, []
    for number in range(limit, OLDEST_GCC - 1, -1):
        beside = find_program(f"g++-{number}")
        if beside is not None:
            return beside, ask(beside, "--version").stdout.partition("\n")[0].strip(), []
    return None, None, [*_too_new("g++", major, limit, cuda)]


def _too_new(name: str, major: int | None, limit: int | None, cuda: str) -> Iterator[Fault]:
    if major is not None and limit is not None and major > limit:
        yield CATALOGUE.fault(
            "host_compiler_too_new",
            name,
            f"is gcc {major}; CUDA {'.'.join(cuda.split('.')[:2])} takes gcc up to {limit}",
            f"Install g++-{limit} beside it: apt-get install g++-{limit}. The system's default can stay as it is.",
        )


def gcc_major(text: str) -> int | None:
    """The major version in the first line of ``g++ --version``; null for another compiler."""
    found = re.match(r"\S*(?:g\+\+|gcc|c\+\+)\S* \(.*\) (\d+)\.", text)
    return int(found.group(1)) if found else None


# --- parts ------------------------------------------------------------------------------------------------------------


def _header_release(root: Path) -> str | None:
    """``12.2`` out of CUDART_VERSION 12020; null where there are no headers."""
    for folder in (root / "include", *sorted(root.glob("targets/*/include"))):
        try:
            text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found = first_match(r"(?m)^#define CUDART_VERSION\s+(\d+)", text)
        if found is not None:
            return f"{int(found) // 1000}.{int(found) % 1000 // 10}"
    return None


def library_folders(root: Path) -> list[Path]:
    """Where a toolkit keeps its libraries; Debian's lie among the system's."""
    own = [root / "lib64", root / "lib", *sorted(root.glob("targets/*/lib"))]
    return [*own, *sorted(Path("/usr/lib").glob("*-linux-gnu"))] if root == Path("/usr") else own


def _library_version(root: Path, name: str) -> str | None:
    """The version in the name of the file that a linker's ``name`` leads to; null where it leads nowhere."""
    for folder in library_folders(root):
        link = folder / name
        if link.exists():
            found = re.search(r"\.so\.([\d.]+)$", os.path.realpath(link))
            return found.group(1) if found else "unknown"
    return None


def _stub(root: Path) -> str | None:
    """What the engine is linked with in place of the driver's libcuda: the toolkit's stub, or the driver's own."""
    folders = library_folders(root)
    for path in (*(folder / "stubs" / "libcuda.so" for folder in folders), *(Path(p) / "libcuda.so" for p in folders)):
        if path.exists():
            return str(path)
    for folder in sorted(Path("/usr/lib").glob("*-linux-gnu")):
        if (folder / "libcuda.so").exists():
            return str(folder / "libcuda.so")
    return None


def judge_parts(cuda: Cuda) -> list[Fault]:
    """Parts that are missing, and parts of another release than the compiler."""
    faults = []
    release = numbers(cuda.version)[:2]
    short = ".".join(map(str, release))
    one_tree = "Name one toolkit in cuda_root; its nvcc, headers and libraries are then used together."
    for part, version, fields, package in (
        ("headers", cuda.headers, 2, "cuda-cudart-dev"),
        ("libcudart", cuda.runtime, 2, "cuda-cudart-dev"),
        ("libcublas", cuda.cublas, 1, "libcublas-dev"),
    ):
        if version is None:
            faults.append(
                CATALOGUE.fault(
                    "toolkit_incomplete",
                    cuda.root,
                    f"has nvcc {cuda.version} and no {part}",
                    f"Install the development package of the same release ({package}-{short.replace('.', '-')}, or "
                    "Debian's nvidia-cuda-dev).",
                )
            )
        # cuBLAS counts on its own; within a major release any fits.
        elif version != "unknown" and numbers(version)[:fields] != release[:fields]:
            faults.append(
                CATALOGUE.fault("toolkit_mixed", cuda.root, f"nvcc is {cuda.version}, {part} {version}", one_tree)
            )
    if cuda.stub is None:
        faults.append(
            CATALOGUE.fault(
                "libcuda_stub_missing",
                cuda.root,
                "has no stub of libcuda, and the driver's own is not here to link with",
                f"Install cuda-driver-dev-{short.replace('.', '-')} (or Debian's nvidia-cuda-dev), or the driver.",
            )
        )
    if cuda.cuobjdump is None:
        faults.append(
            CATALOGUE.fault(
                "build_tool_missing",
                "cuobjdump",
                f"not found below {cuda.root}/bin or in PATH: the native code of a build could not be proven",
                f"Install cuda-cuobjdump-{short.replace('.', '-')}, or Debian's nvidia-cuda-toolkit.",
            )
        )
    return faults


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, field by field: 3.9 is older than 3.18."""
    return tuple(int(field) for field in re.findall(r"\d+", version))


def first_match(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None
