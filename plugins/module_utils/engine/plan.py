# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From a request and a toolchain to cmake's options, and the fingerprint that names the result."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from .process import BUILD_MARK, SEARCH_PATH, environment
from .request import Request
from .toolchain import Toolchain
from .toolkit import library_folders, numbers

#: Raised when the layout of a release or the way of building it changes, so that old releases are built anew.
LAYOUT = 1

#: Below the work folder: the toolkit's stub of libcuda by the name that the linker looks for.
STUBS = "stubs"

#: Folders the dynamic loader searches anyway; a toolkit there needs no run path.
SYSTEM_LIBRARIES = ("/usr", "/usr/local", "/")


def cmake_options(request: Request, tools: Toolchain) -> dict[str, str]:
    """The options of the build; ``cmake_options`` of the request win where they are allowed to."""
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "GGML_NATIVE": "OFF" if request.portable else "ON",
        # Off, not only unbuilt: configuring them costs time, and the web assets would be downloaded.
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_APP": "OFF",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_OPENSSL": "ON",
        "LLAMA_BUILD_NUMBER": str(request.build_number),
        # bin/ and lib/ of a release find each other wherever the release lies.
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_INSTALL_RPATH": ";".join(["$ORIGIN/../lib", "$ORIGIN", *run_paths(request, tools)]),
        "GGML_CUDA": "OFF",
    }
    if request.commit:
        options["LLAMA_BUILD_COMMIT"] = request.commit[:9]
    if any("rpc-server" in target for target in request.targets):
        options["GGML_RPC"] = "ON"
    if tools.cuda is not None:
        options["GGML_CUDA"] = "ON"
        # Off, not only left out: on is the source's default, and takes whatever NCCL lies on the machine.
        options["GGML_CUDA_NCCL"] = "ON" if request.nccl else "OFF"
        options["CMAKE_CUDA_ARCHITECTURES"] = ";".join(request.cuda_architectures)
        options["CMAKE_CUDA_COMPILER"] = tools.cuda.nvcc
        options["CUDAToolkit_ROOT"] = tools.cuda.root
        if tools.cuda.host_compiler:
            options["CMAKE_CUDA_HOST_COMPILER"] = tools.cuda.host_compiler
        if numbers(tools.cuda.version)[:2] >= (12, 8):
            # Drivers below 550 cannot read compressed device code; the price is a larger file.
            options["GGML_CUDA_COMPRESSION_MODE"] = "none"
    options.update(request.cmake_options)
    return options


def run_paths(request: Request, tools: Toolchain) -> list[str]:
    """Folders outside the release in which its programs look for libraries: none for one that is shipped."""
    if tools.cuda is None or tools.cuda.root in SYSTEM_LIBRARIES or request.portable:
        return []
    return [f"{tools.cuda.root}/lib64"]


def fingerprint_inputs(request: Request, tools: Toolchain) -> dict[str, Any]:
    """Everything that decides about the binaries, and nothing else: paths, jobs and users do not."""
    options = cmake_options(request, tools)
    identity = tools.identity()
    if options.get("GGML_NATIVE") == "OFF":
        identity["native"] = None
    source = {"type": request.source_type, "sha256": request.sha256}
    if request.source_type == "git":
        source = {"type": "git", "commit": request.commit}
    shipped = {"portable": True} if request.portable else {}
    return {
        **shipped,
        "layout": LAYOUT,
        "source": source,
        "version": request.version,
        "commit": request.commit,
        "backend": request.backend,
        "cuda_architectures": list(request.cuda_architectures),
        "targets": sorted(request.targets),
        "options": dict(sorted(options.items())),
        "tools": identity,
    }


def fingerprint(inputs: dict[str, Any]) -> str:
    """SHA-256 over the inputs, in hexadecimal digits; its first twelve name the release folder."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def short(fingerprint_hex: str) -> str:
    return fingerprint_hex[:12]


def configure_command(options: dict[str, str], tools: Toolchain, source: Path, build: Path) -> list[str]:
    # ccache is left out of the fingerprint: it changes how long a build takes, not what comes out of it.
    launcher = "ON" if tools.ccache else "OFF"
    return [
        tools.cmake,
        "-G",
        "Ninja",
        "-S",
        str(source),
        "-B",
        str(build),
        f"-DCMAKE_MAKE_PROGRAM={tools.ninja}",
        f"-DGGML_CCACHE={launcher}",
        *(f"-D{name}={value}" for name, value in sorted(options.items())),
    ]


def build_environment(request: Request, tools: Toolchain, work: Path, home: Path) -> dict[str, str]:
    """The environment of cmake and ninja.

    ccache gets the work folder as its base, so that its entries hold relative paths: a build below another folder still
    finds what did not change, but for files with absolute paths in their text, such as cmake writes for unity builds.
    For their sake every version is compiled in the same folder.
    """
    extra = {
        BUILD_MARK: os.path.realpath(work),
        "CCACHE_BASEDIR": str(work),
        "CCACHE_NOHASHDIR": "1",
        "NINJA_STATUS": "[%f/%t] ",
        "GIT_TERMINAL_PROMPT": "0",
    }
    cache = ccache_directory(request)
    if cache is not None:
        extra["CCACHE_DIR"] = cache
    if tools.cuda is not None:
        extra["PATH"] = f"{tools.cuda.root}/bin:{SEARCH_PATH}"
        # Programs are linked with a library that needs the toolkit's, and the driver's, in whose place the linker finds
        # the stub. Unlike a run path this is nothing that the programs keep.
        folders = [f"{work}/{STUBS}", *(str(folder) for folder in library_folders(Path(tools.cuda.root)))]
        extra["LDFLAGS"] = f"-Wl,-rpath-link,{':'.join(folders)}"
    return environment(str(home), extra)


def ccache_directory(request: Request, system_config: Path = Path("/etc/ccache.conf")) -> str | None:
    """The cache to use; null leaves it to the machine's own configuration, where that names one."""
    if request.ccache_directory:
        return request.ccache_directory
    with contextlib.suppress(OSError):
        if re.search(r"^\s*cache_dir\s*=\s*\S", system_config.read_text(encoding="utf-8"), re.MULTILINE):
            return None
    return f"{request.build_directory}/ccache"


def ninja_progress(line: str) -> tuple[int, int, str] | None:
    """Steps done, steps in all, and the file at work, from a line of ninja; null for any other line."""
    found = re.match(r"\[(\d+)/(\d+)\] (.*)", line)
    if found is None:
        return None
    words = found.group(3).split()
    return int(found.group(1)), int(found.group(2)), words[-1].rpartition("/")[2] if words else ""
