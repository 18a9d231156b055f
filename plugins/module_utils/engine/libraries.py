# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which shared libraries a built program loads, where from, and which folders it searches for them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..faults import Fault
from .catalogue import CATALOGUE
from .process import environment, find_program, run_as
from .request import Account

#: The driver brings it; on a build host without a driver it is absent and that is right.
DRIVER_LIBRARY = "libcuda.so.1"

#: Libraries of a CUDA toolkit or of NCCL, as the dynamic loader names them.
TOOLKIT_LIBRARY = re.compile(r"^lib(?:cudart|cublas|cublasLt|nccl)\.so\.")

KEPT = "The release in use was not touched. See the log, and report what was built and where if it stays so."


def libraries_of(program: Path, account: Account | None, folders: Sequence[Path] = ()) -> dict[str, str | None]:
    """The shared libraries a program loads, by name, with the path found for each or null.

    ``folders`` are searched as well, before the system's.
    """
    ldd = find_program("ldd") or "ldd"
    extra = {"LD_LIBRARY_PATH": ":".join(map(str, folders))} if folders else {}
    return parse_ldd(run_as(account, [ldd, str(program)], environment(extra=extra)).stdout)


def parse_ldd(text: str) -> dict[str, str | None]:
    result: dict[str, str | None] = {}
    for line in text.splitlines():
        found = re.match(r"\s*(\S+) => (?:(/\S+) \(0x|not found)", line)
        if found:
            result[found.group(1)] = found.group(2)
    return result


def judge_libraries(program: Path, libraries: Mapping[str, str | None], own: Collection[str]) -> list[Fault]:
    """Libraries that are missing, come from another build, or are the toolkit's stub instead of the driver."""
    root = program.parent.parent
    faults = []
    for name, path in sorted(libraries.items()):
        if path is None:
            if name == DRIVER_LIBRARY:
                continue
            why = f"{name} is not found"
        elif name in own and os.path.normpath(path) != str(root / "lib" / name):
            why = f"{name} comes from {path}, not from the release"
        elif "/stubs/" in path:
            why = f"{name} comes from {path}: a stub for linking, which cannot run"
        else:
            continue
        faults.append(CATALOGUE.fault("proof_failed", program.name, why, KEPT))
    return faults


def run_path_of(file: Path, account: Account | None) -> list[str] | None:
    """The folders that an ELF file names for its libraries; null where there is no readelf to ask."""
    readelf = find_program("readelf")
    if readelf is None:
        return None
    return parse_run_path(run_as(account, [readelf, "--dynamic", "--wide", str(file)], environment()).stdout)


def parse_run_path(text: str) -> list[str]:
    found = re.findall(r"\((?:RUNPATH|RPATH)\)\s+Library r(?:un)?path: \[([^\]]*)\]", text)
    return [folder for paths in found for folder in paths.split(":") if folder]


def judge_run_path(file: Path, folders: Sequence[str], allowed: Collection[str]) -> list[Fault]:
    """Folders in the run path that are neither inside the release nor among ``allowed`` (the toolkit's libraries).

    A stub found there would be loaded instead of the driver, and a folder of the build user could be given any content.
    """
    faults = []
    for folder in folders:
        if folder in ("$ORIGIN", "$ORIGIN/../lib") or (folder in allowed and "stubs" not in Path(folder).parts):
            continue
        why = "holds stubs for linking, which cannot run" if "stubs" in Path(folder).parts else "is not the release's"
        faults.append(
            CATALOGUE.fault("proof_failed", file.name, f"searches its libraries in {folder}, which {why}", KEPT)
        )
    return faults
