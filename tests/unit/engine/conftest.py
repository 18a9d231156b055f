# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A small source that is built by the real cmake, ninja and compiler as llama.cpp is, within a second."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
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
  ${{LLAMA_BUILD_APP}} ${{LLAMA_BUILD_UI}} ${{LLAMA_USE_PREBUILT_UI}} ${{LLAMA_OPENSSL}} ${{LLAMA_BUILD_NUMBER}})
add_library(llama SHARED lib.cpp)
set_target_properties(llama PROPERTIES VERSION 0.5.0 SOVERSION 0)
add_custom_command(OUTPUT gate.h COMMAND sh ${{CMAKE_SOURCE_DIR}}/gate.sh COMMAND ${{CMAKE_COMMAND}} -E touch gate.h)
foreach(name llama-server llama-fit-params)
  add_executable(${{name}} main.cpp gate.h)
  target_compile_definitions(${{name}} PRIVATE VERSION="{says}" COMMIT="${{LLAMA_BUILD_COMMIT}}")
  target_link_libraries(${{name}} PRIVATE llama)
endforeach()
"""
LIB = "int answer() {{ return 42; }} // {version}\n"
MAIN = """\
#include <cstdio>
#include <cstring>
int answer();
int main(int argc, char **argv) {
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
        self, version: str = "1.0", says: str | None = None, main: str = MAIN, gate: str = "exit 0\n"
    ) -> Request:
        """An archive of version ``version``, whose server names ``says``; ``gate`` is run by sh while building."""
        files = {
            "CMakeLists.txt": CMAKE.format(version=version, says=says or version),
            "lib.cpp": LIB.format(version=version),
            "main.cpp": main,
            "gate.sh": gate,
            "ggml/CMakeLists.txt": "",
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


@pytest.fixture
def bench() -> Iterator[Bench]:
    # Not tmp_path: that is closed to other users, and as root the build runs as one.
    root = Path(tempfile.mkdtemp(prefix="volta-engine-"))
    root.chmod(0o755)
    (root / "shared").mkdir()
    (root / "shared").chmod(0o777)
    yield Bench(root, "nobody" if os.geteuid() == 0 else None)
    shutil.rmtree(root, ignore_errors=True)
