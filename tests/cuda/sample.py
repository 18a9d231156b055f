# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Configures the pinned engine as the module does, compiles some of its CUDA files, and looks at their device code.

    python3 tests/cuda/sample.py --package-version 0.3.36 --sha256 HASH [--folder DIR] [--architectures 70-real ...]
                                 [--files NAME ...] [--default-architectures] [--ccache DIR]

Standard library only; it runs on the machine that has the toolkit, from a copy of the tree. Prints one JSON object:
toolkit, options that matter, and for each file the seconds of processor time and what cuobjdump lists. The full build
does the same with all of the files: this is what of it fits into minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.cuda.collection import importable

importable()

from ansible_collections.volta.llm.plugins.module_utils.engine import plan, sources, toolchain
from ansible_collections.volta.llm.plugins.module_utils.engine.compile import Builder, Work
from ansible_collections.volta.llm.plugins.module_utils.engine.request import Request, normalised

#: One of each kind that is hard on a compiler: CUB, cooperative groups, tensor cores, quantised products, the backend.
HARD = (
    "cumsum.cu",
    "softmax.cu",
    "fattn-mma-f16-instance-ncols1_8-ncols2_8.cu",
    "mmq-instance-q4_k.cu",
    "ggml-cuda.cu",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--package-version", help="version of llama-cpp-python, from the index that the role names")
    where.add_argument("--source", help="address or path of the archive instead")
    parser.add_argument("--sha256", required=True)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/volta-cuda-sample"))
    parser.add_argument("--architectures", nargs="+", default=["70-real"])
    parser.add_argument("--default-architectures", action="store_true", help="the source's own list in its place")
    parser.add_argument("--files", nargs="+", default=list(HARD))
    parser.add_argument("--ccache", help="folder of a compiler cache; none without it")
    parser.add_argument("--cuda-root")
    parser.add_argument("--threads", type=int, help="architectures of one file that nvcc compiles at a time")
    given = parser.parse_args()
    answer = compile_sample(given)
    print(json.dumps(answer, indent=2))
    return 0 if answer["ok"] else 1


def compile_sample(given: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, str] = {}
    if given.default_architectures:
        options["GGML_NATIVE"] = "OFF"  # else the source's list is what the machine's cards are
    if given.threads:
        options["CMAKE_CUDA_FLAGS"] = f"--threads={given.threads}"
    request = normalised(
        Request(
            "archive" if given.source else "pypi_sdist",
            str(given.folder / "prefix"),
            str(given.folder),
            sha256=given.sha256,
            url=given.source,
            package_version=given.package_version,
            cuda_architectures=tuple(given.architectures),
            cuda_root=given.cuda_root,
            ccache_directory=given.ccache,
            cmake_options=options,
        )
    )
    tools, faults = toolchain.probe(request, None)
    if tools is None or tools.cuda is None:
        return {"ok": False, "faults": [fault.as_dict() for fault in faults]}
    if not given.ccache:
        tools = replace(tools, ccache=None)
    work = prepare(given.folder, request, tools)
    builder = Builder(request, tools, None, work)
    version, findings = builder.configure()
    if given.default_architectures:
        configure_without_architectures(request, tools, work)
    cache = (work.build / "CMakeCache.txt").read_text(encoding="utf-8")
    built = [compile_one(name, tools, request, work) for name in given.files]
    return {
        "ok": all(row["ok"] for row in built),
        "engine": version,
        "cuda": tools.cuda.version,
        "host_compiler": tools.cuda.host_compiler_version or tools.cxx_version,
        "architectures": value(cache, "CMAKE_CUDA_ARCHITECTURES") or using(work.log),
        "toolkit": tools.cuda.root,
        "headers": tools.cuda.headers,
        "findings": [fault.as_dict() for fault in findings],
        "files": built,
        "processor_s": round(sum(row["processor_s"] for row in built), 1),
    }


def prepare(folder: Path, request: Request, tools: toolchain.Toolchain) -> Work:
    work = Work(folder, folder / "source", folder / "build", folder / "home", folder / "sample.log")
    for path in (folder, work.home):
        path.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work.build, ignore_errors=True)
    work.build.mkdir()
    if tools.cuda is not None and tools.cuda.stub:
        stubs = folder / plan.STUBS
        stubs.mkdir(exist_ok=True)
        (stubs / "libcuda.so.1").unlink(missing_ok=True)
        (stubs / "libcuda.so.1").symlink_to(tools.cuda.stub)
    if not (work.source / "CMakeLists.txt").is_file():
        (folder / "downloads").mkdir(exist_ok=True)
        archive = sources.fetch_archive(request, folder / "downloads", lambda _done, _total: None)
        sources.unpack(archive, request.sha256 or "", work.source)
    return work


def configure_without_architectures(request: Request, tools: toolchain.Toolchain, work: Work) -> None:
    """Configure anew with the list of architectures that the source itself would take."""
    shutil.rmtree(work.build)
    work.build.mkdir()
    options = plan.cmake_options(request, tools)
    del options["CMAKE_CUDA_ARCHITECTURES"]
    command = plan.configure_command(options, tools, work.source, work.build)
    env = plan.build_environment(request, tools, work.root, work.home)
    with work.log.open("w", encoding="utf-8") as log:
        subprocess.run(command, env=env, cwd=work.build, stdout=log, stderr=subprocess.STDOUT, check=True)


def using(log: Path) -> str | None:
    found = re.search(r"Using CMAKE_CUDA_ARCHITECTURES=(\S+)", log.read_text(encoding="utf-8", errors="replace"))
    return found.group(1) if found else None


def value(cache: str, name: str) -> str | None:
    found = re.search(rf"(?m)^{name}:\w+=(.*)$", cache)
    return found.group(1) if found else None


def compile_one(name: str, tools: toolchain.Toolchain, request: Request, work: Work) -> dict[str, Any]:
    """Compile one file by ninja; its processor time, and the device code in the object."""
    text = (work.build / "build.ninja").read_text(encoding="utf-8")
    found = re.search(rf"(?m)^build (\S*/{re.escape(name)}\.o): ", text)
    if found is None:
        return {"file": name, "ok": False, "processor_s": 0.0, "error": "no such file in this build"}
    env = plan.build_environment(request, tools, work.root, work.home)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        ["nice", "-n", "10", tools.ninja, "-C", str(work.build), "-j", str(os.cpu_count() or 1), found.group(1)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    row: dict[str, Any] = {
        "file": name,
        "ok": done.returncode == 0,
        "processor_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "wall_s": round(time.monotonic() - started, 1),
    }
    if done.returncode != 0:
        row["error"] = (
            "\n".join(line for line in done.stdout.splitlines() if "error" in line)[:2000] or done.stdout[-2000:]
        )
        return row
    assert tools.cuda is not None
    listed = subprocess.run(
        [tools.cuda.cuobjdump or "cuobjdump", "--list-elf", "--list-ptx", str(work.build / found.group(1))],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    row["elf"] = sorted(set(re.findall(r"ELF file.*?\.(sm_\d+\w*)\.", listed)))
    row["ptx"] = sorted(set(re.findall(r"PTX file.*?\.(sm_\d+\w*)\.", listed)))
    return row


if __name__ == "__main__":
    sys.exit(main())
