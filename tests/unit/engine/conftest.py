# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A small source that is built by the real cmake, ninja and compiler as llama.cpp is, within a second."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine.request import Request

CMAKE = """\
cmake_minimum_required(VERSION 3.14)
project(engine CXX)
message(STATUS "llama.cpp version: {version}")
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${{CMAKE_BINARY_DIR}}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${{CMAKE_BINARY_DIR}}/bin)
# Named, so that cmake does not report them as unused.
set(known ${{GGML_CUDA}} ${{GGML_NATIVE}} ${{GGML_CCACHE}} ${{LLAMA_BUILD_TESTS}} ${{LLAMA_BUILD_EXAMPLES}}
  ${{LLAMA_BUILD_APP}} ${{LLAMA_BUILD_UI}} ${{LLAMA_USE_PREBUILT_UI}} ${{LLAMA_OPENSSL}} ${{LLAMA_BUILD_NUMBER}}
  ${{GGML_CUDA_NCCL}} ${{CMAKE_CUDA_COMPILER}} ${{GGML_RPC}} ${{CMAKE_CUDA_HOST_COMPILER}})
add_library(llama SHARED lib.cpp)
set_target_properties(llama PROPERTIES VERSION 0.5.0 SOVERSION 0)
add_custom_command(OUTPUT gate.h COMMAND sh ${{CMAKE_SOURCE_DIR}}/gate.sh COMMAND ${{CMAKE_COMMAND}} -E touch gate.h)
if(GGML_CUDA)
  # C++ in the place of CUDA; the name of the code is what the toolkit's cuobjdump looks for.
  add_library(ggml-cuda SHARED cuda.cpp)
  target_compile_definitions(ggml-cuda PRIVATE CODE="${{CMAKE_CUDA_ARCHITECTURES}}")
  if(EXISTS ${{CUDAToolkit_ROOT}}/link-the-stub)
    target_compile_definitions(ggml-cuda PRIVATE WITH_DRIVER)
    target_link_libraries(ggml-cuda PRIVATE ${{CUDAToolkit_ROOT}}/lib64/stubs/libcuda.so)
  endif()
  if(EXISTS ${{CUDAToolkit_ROOT}}/link-the-runtime)
    target_compile_definitions(ggml-cuda PRIVATE WITH_RUNTIME)
    target_link_libraries(ggml-cuda PRIVATE ${{CUDAToolkit_ROOT}}/lib64/libcudart.so)
  endif()
  target_link_libraries(llama PRIVATE ggml-cuda)
  target_compile_definitions(llama PRIVATE WITH_CUDA)
endif()
foreach(name llama-server llama-fit-params llama-bench ggml-rpc-server)
  add_executable(${{name}} main.cpp gate.h)
  target_compile_definitions(${{name}} PRIVATE VERSION="{says}" COMMIT="${{LLAMA_BUILD_COMMIT}}")
  target_link_libraries(${{name}} PRIVATE llama)
endforeach()
file(GLOB models models/*.cpp)
if(models)
  # As in llama.cpp: cmake writes files that include the sources by their absolute paths, and ccache is asked.
  add_library(models OBJECT ${{models}})
  set_target_properties(models PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 2 POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(llama PRIVATE models)
  if(GGML_CCACHE)
    set_property(GLOBAL PROPERTY RULE_LAUNCH_COMPILE ccache)
  endif()
endif()
"""
#: An assertion names its file, as GGML_ASSERT does: that is how an absolute path gets into the code.
MODEL = """\
#include <cstdlib>
int model_{number}(int x) {{ if (x < 0) {{ static const char *volatile where = __FILE__; abort(); }} return x; }}
"""
LIB = """\
#ifdef WITH_CUDA
int start();
int answer() {{ start(); return 42; }}
#else
int answer() {{ return 42; }}
#endif
// {version}
const char *known[] = {{"qwen4exp"}};
"""
CUDA = """\
extern "C" int cuInit(unsigned), started();
const char *code = "code for sm_" CODE;
int start() {
#ifdef WITH_DRIVER
  return cuInit(0);
#endif
#ifdef WITH_RUNTIME
  return started();
#endif
  return 0;
}
"""
#: ``--list-devices`` shows as many cards as DEVICES says; llama-bench computes on the first COMPUTES of them.
MAIN = """\
#include <cstdio>
#include <cstdlib>
#include <cstring>
int answer();
const int DEVICES = 2, COMPUTES = 2;
int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "--list-devices")) {
    printf("Available devices:\\n");
    for (int i = 0; i < DEVICES; i++) printf("  CUDA%d: Tesla V100-SXM2-32GB (32494 MiB, 32100 MiB free)\\n", i);
  }
  if (argc > 2 && !strcmp(argv[1], "-m")) {
    if (COMPUTES < DEVICES) {
      fprintf(stderr, "CUDA error: no kernel image is available for execution on the device\\n");
      abort();
    }
    FILE *model = fopen(argv[2], "rb");
    char magic[5] = "";
    if (!model || fread(magic, 1, 4, model) != 4 || strcmp(magic, "GGUF")) return 1;
    for (int i = 0; i < COMPUTES; i++)
      printf("%s{\\"devices\\": \\"CUDA%d\\", \\"avg_ts\\": 1000.5}", i ? "," : "[", i);
    printf("]\\n");
  }
  if (argc > 1 && !strcmp(argv[1], "--version")) printf("version: %s (build 0, commit %s)\\n", VERSION, COMMIT);
  if (argc > 1 && !strcmp(argv[1], "--help")) printf("-m,    --model FNAME                    the model\\n");
  return answer() == 42 ? 0 : 1;
}
"""


@dataclass
class Bench:
    """A place to build in: folders that the build user can reach, and archives made to order."""

    root: Path
    build_user: str | None

    @property
    def prefix(self) -> Path:
        return self.root / "opt"

    @property
    def base(self) -> Path:
        return self.root / "var"

    def archive(
        self,
        version: str = "1.0",
        says: str | None = None,
        main: str = MAIN,
        gate: str = "exit 0\n",
        models: int = 0,
    ) -> Request:
        """An archive of version ``version``, whose server names ``says``; ``gate`` is run by sh while building.

        ``models`` files more are compiled two by two, by way of files that cmake writes.
        """
        files = {
            "CMakeLists.txt": CMAKE.format(version=version, says=says or version),
            "lib.cpp": LIB.format(version=version),
            "main.cpp": main,
            "cuda.cpp": CUDA,
            "gate.sh": gate,
            "ggml/CMakeLists.txt": "",
            **{f"models/{number}.cpp": MODEL.format(number=number) for number in range(models)},
        }
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for folder in ("engine", "engine/ggml"):
                info = tarfile.TarInfo(folder)
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(info)
            for name, text in files.items():
                info = tarfile.TarInfo(f"engine/{name}")
                info.size = len(text.encode())
                tar.addfile(info, io.BytesIO(text.encode()))
        digest = hashlib.sha256(out.getvalue()).hexdigest()
        path = self.root / f"{digest[:12]}.tar"
        path.write_bytes(out.getvalue())
        return Request(
            source_type="archive",
            url=str(path),
            sha256=digest,
            version=version,
            commit="abcdef123",
            backend="cpu",
            prefix=str(self.prefix),
            build_directory=str(self.base),
            build_user=self.build_user,
            targets=("llama-server", "llama-fit-params"),
            jobs=2,
        )

    def toolkit(self, release: str = "12.2", link_the_stub: bool = False) -> Path:
        """A CUDA toolkit of scripts: it names its release, lists what it compiles for, and has a stub to link with."""
        major, minor = release.split(".")
        root = self.root / f"cuda-{release}"
        for folder in ("bin", "include", "lib64/stubs"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        known = "".join(f"compute_{name}\\n" for name in ("70", "75", "80", "90") if major == "12" or name != "70")
        script(
            root / "bin/nvcc",
            f"case $1 in\n--version) echo 'Cuda compilation tools, release {release}, V{release}.140';;\n"
            f"--list-gpu-arch) printf '{known}';;\nesac\n",
        )
        script(root / "bin/cuobjdump", "grep -ao 'sm_[0-9]*' \"$2\" | sed 's/.*/ELF file    1: x.1.&.cubin/'\n")
        (root / "include/cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {major}0{minor}0\n")
        for name, version in (("cudart", f"{release}.140"), ("cublas", f"{major}.9.5.8")):
            (root / f"lib64/lib{name}.so.{version}").touch()
            (root / f"lib64/lib{name}.so").unlink(missing_ok=True)
            (root / f"lib64/lib{name}.so").symlink_to(f"lib{name}.so.{version}")
        stub = root / "lib64/stubs/libcuda.so"
        if link_the_stub:
            (root / "link-the-stub").write_text("")
            code = self.root / "stub.c"
            code.write_text("int cuInit(unsigned flags) { return 34; }\n")
            subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", stub, code], check=True)
        elif not stub.exists():
            stub.write_text("")
        return root

    def cards(self, *capabilities: str, driver: str = "535.261.03") -> dict[str, str]:
        """A machine with these cards and a loaded driver, as options of a request."""
        sysroot = self.root / "sysroot"
        (sysroot / "proc/driver/nvidia").mkdir(parents=True, exist_ok=True)
        line = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Thu Jan  1 00:00:00 UTC 2026\n"
        (sysroot / "proc/driver/nvidia/version").write_text(line)
        rows = "".join(f"{driver}, {name}\\n" for name in capabilities)
        script(self.root / "nvidia-smi", f"[ -z \"$1\" ] || printf '{rows}'\n")
        return {"sysroot": str(sysroot), "nvidia_smi": str(self.root / "nvidia-smi")}


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def bench() -> Iterator[Bench]:
    # Not tmp_path: that is closed to other users, and as root the build runs as one.
    root = Path(tempfile.mkdtemp(prefix="volta-engine-"))
    root.chmod(0o755)
    (root / "shared").mkdir()
    (root / "shared").chmod(0o777)
    yield Bench(root, "nobody" if os.geteuid() == 0 else None)
    shutil.rmtree(root, ignore_errors=True)
