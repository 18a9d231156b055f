# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""cmake's options, the fingerprint, jobs, and ninja's progress."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine.compile import fewer
from ansible_collections.volta.llm.plugins.module_utils.engine.plan import (
    build_environment,
    ccache_directory,
    cmake_options,
    configure_command,
    fingerprint,
    fingerprint_inputs,
    ninja_progress,
)
from ansible_collections.volta.llm.plugins.module_utils.engine.request import Request, normalised
from ansible_collections.volta.llm.plugins.module_utils.engine.toolchain import (
    Toolchain,
    automatic_jobs,
    native_instruction_sets,
)
from ansible_collections.volta.llm.plugins.module_utils.engine.toolkit import Cuda, numbers
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed
from hypothesis import given
from hypothesis import strategies as st

REQUEST = Request(
    source_type="pypi_sdist",
    prefix="/opt/llama.cpp",
    build_directory="/var/lib/llama-build",
    package_version="0.3.36",
    sha256="8" * 64,
    commit="0c1e57098bba43ac29e6e3b677cdceebdd22334f",
)
CUDA = Cuda("/usr/local/cuda-12.2", "/usr/local/cuda-12.2/bin/nvcc", "12.2.140", ("70", "80"), None, None)
TOOLS = Toolchain("/usr/bin/cmake", "3.25.1", "/usr/bin/ninja", "/usr/bin/c++", "c++ 12.2.0", "abc", None, None, CUDA)
CPU_TOOLS = replace(TOOLS, cuda=None)


def mark(request: Request, tools: Toolchain = TOOLS) -> str:
    return fingerprint(fingerprint_inputs(normalised(request), tools))


def test_volta_is_built_natively_from_one_toolkit() -> None:
    options = cmake_options(REQUEST, TOOLS)
    assert options["CMAKE_CUDA_ARCHITECTURES"] == "70-real"
    assert options["GGML_CUDA"] == "ON"
    assert options["CMAKE_CUDA_COMPILER"] == "/usr/local/cuda-12.2/bin/nvcc"
    assert options["CUDAToolkit_ROOT"] == "/usr/local/cuda-12.2"
    assert options["CMAKE_INSTALL_RPATH"] == "$ORIGIN/../lib;$ORIGIN;/usr/local/cuda-12.2/lib64"
    assert "stubs" not in options["CMAKE_INSTALL_RPATH"]
    assert options["LLAMA_USE_PREBUILT_UI"] == "OFF"
    # As the binary shows it: nine digits.
    assert options["LLAMA_BUILD_COMMIT"] == "0c1e57098"


def test_compressed_code_is_off_where_the_toolkit_would_compress() -> None:
    # Drivers below 550 cannot read it; toolkits below 12.8 do not know the option.
    assert "GGML_CUDA_COMPRESSION_MODE" not in cmake_options(REQUEST, TOOLS)
    newer = replace(TOOLS, cuda=replace(CUDA, version="12.9.86"))
    assert cmake_options(REQUEST, newer)["GGML_CUDA_COMPRESSION_MODE"] == "none"
    chosen = replace(REQUEST, cmake_options={"GGML_CUDA_COMPRESSION_MODE": "size"})
    assert cmake_options(chosen, newer)["GGML_CUDA_COMPRESSION_MODE"] == "size"


def test_nccl_is_taken_only_when_it_is_asked_for() -> None:
    # The source's own default takes whatever lies on the machine: two builds of one wish would differ.
    assert cmake_options(REQUEST, TOOLS)["GGML_CUDA_NCCL"] == "OFF"
    assert cmake_options(replace(REQUEST, nccl=True), TOOLS)["GGML_CUDA_NCCL"] == "ON"


def test_a_release_to_be_shipped_fits_other_processors_and_needs_no_toolkit() -> None:
    assert cmake_options(REQUEST, TOOLS)["GGML_NATIVE"] == "ON"
    options = cmake_options(replace(REQUEST, portable=True), TOOLS)
    assert options["GGML_NATIVE"] == "OFF"
    assert options["CMAKE_INSTALL_RPATH"] == "$ORIGIN/../lib;$ORIGIN"


def test_the_stub_is_for_the_linker_alone(tmp_path: Path) -> None:
    env = build_environment(REQUEST, TOOLS, tmp_path / "work", tmp_path / "home")
    toolkit = "/usr/local/cuda-12.2"
    assert env["LDFLAGS"] == f"-Wl,-rpath-link,{tmp_path}/work/stubs:{toolkit}/lib64:{toolkit}/lib"
    assert "LDFLAGS" not in build_environment(REQUEST, CPU_TOOLS, tmp_path / "work", tmp_path / "home")


def test_a_build_for_the_cpu_names_no_toolkit() -> None:
    options = cmake_options(replace(REQUEST, backend="cpu"), CPU_TOOLS)
    assert options["GGML_CUDA"] == "OFF"
    assert not [name for name in options if "CUDA" in name and name != "GGML_CUDA"]
    assert options["CMAKE_INSTALL_RPATH"] == "$ORIGIN/../lib;$ORIGIN"


def test_the_rpc_server_brings_its_option() -> None:
    assert "GGML_RPC" not in cmake_options(REQUEST, TOOLS)
    assert cmake_options(replace(REQUEST, targets=("ggml-rpc-server",)), TOOLS)["GGML_RPC"] == "ON"


def test_a_system_toolkit_needs_no_run_path() -> None:
    debian = replace(TOOLS, cuda=replace(CUDA, root="/usr"))
    assert cmake_options(REQUEST, debian)["CMAKE_INSTALL_RPATH"] == "$ORIGIN/../lib;$ORIGIN"


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "9" * 64},
        {"commit": "1" * 40},
        {"version": "0.5.0"},
        {"build_number": 7},
        {"cuda_architectures": ("70-real", "80-real")},
        {"targets": ("llama-server",)},
        {"cmake_options": {"GGML_CUDA_FA": "OFF"}},
        {"nccl": True},
        {"portable": True},
    ],
)
def test_what_changes_the_binaries_changes_the_fingerprint(change: dict[str, object]) -> None:
    assert mark(replace(REQUEST, **change)) != mark(REQUEST)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tools",
    [
        replace(TOOLS, cxx_version="c++ 13.3.0"),
        replace(TOOLS, cmake_version="3.31.6"),
        replace(TOOLS, native="def"),
        replace(TOOLS, cuda=replace(CUDA, version="12.4.131")),
        replace(TOOLS, cuda=replace(CUDA, host_compiler="/usr/bin/g++-11", host_compiler_version="g++-11 11.3.0")),
    ],
)
def test_other_tools_make_another_fingerprint(tools: Toolchain) -> None:
    assert mark(REQUEST, tools) != mark(REQUEST)


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": "/srv/llama"},
        {"build_directory": "/scratch"},
        {"jobs": 7},
        {"build_user": "llama-build"},
        {"keep_releases": 9},
        {"switch": False},
        {"progress_file": "/run/x.json"},
        {"ccache_directory": "/scratch/ccache"},
        # The same bytes from elsewhere.
        {"index_url": "https://mirror.example/simple"},
        {"package_version": "0.3.36.post0"},
        # Another spelling of the same wish.
        {"sha256": "8" * 64, "targets": ("llama-gguf-split", "llama-bench", "llama-fit-params", "llama-server")},
    ],
)
def test_what_does_not_change_the_binaries_does_not_change_the_fingerprint(change: dict[str, object]) -> None:
    assert mark(replace(REQUEST, **change)) == mark(REQUEST)  # type: ignore[arg-type]


def test_ccache_does_not_change_the_fingerprint_and_is_used_when_there() -> None:
    cached = replace(TOOLS, ccache="/usr/bin/ccache")
    assert mark(REQUEST, cached) == mark(REQUEST)
    options = cmake_options(REQUEST, TOOLS)
    assert "-DGGML_CCACHE=ON" in configure_command(options, cached, Path("/s"), Path("/b"))
    assert "-DGGML_CCACHE=OFF" in configure_command(options, TOOLS, Path("/s"), Path("/b"))


def test_the_processor_counts_only_in_native_builds() -> None:
    generic = replace(REQUEST, cmake_options={"GGML_NATIVE": "OFF"})
    assert mark(generic) == mark(generic, replace(TOOLS, native="def"))


@given(st.permutations(["70-real", "75-real", "80-real"]))
def test_options_are_in_one_order_on_the_command_line(architectures: list[str]) -> None:
    request = replace(REQUEST, cuda_architectures=tuple(architectures))
    command = configure_command(cmake_options(request, TOOLS), TOOLS, Path("/s"), Path("/b"))
    given_options = [word for word in command if word.startswith("-D")][2:]
    assert given_options == sorted(given_options)
    assert f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}" in command


def test_the_environment_is_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXXFLAGS", "-O0")
    monkeypatch.setenv("LD_PRELOAD", "/tmp/x.so")
    monkeypatch.setenv("HF_TOKEN", "geheim")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    env = build_environment(REQUEST, TOOLS, Path("/w"), Path("/w/home"))
    assert not {"CXXFLAGS", "LD_PRELOAD", "HF_TOKEN"} & set(env)
    assert env["https_proxy"] == "http://proxy.example:3128"
    assert env["PATH"].startswith("/usr/local/cuda-12.2/bin:")
    assert env["CCACHE_BASEDIR"] == "/w"


MEMINFO = "MemTotal:       65774300 kB\nMemFree:  100 kB\nMemAvailable:   {} kB\n"


@pytest.mark.parametrize(
    ("available_gib", "limit", "used", "jobs"),
    [
        (64, None, None, 8),
        (9, None, None, 4),
        (1, None, None, 1),
        (64, "max\n", "123\n", 8),
        (64, str(5 * 1024**3), str(1024**3), 2),
        (64, str(1024**3), str(2 * 1024**3), 1),
    ],
)
def test_jobs_follow_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, available_gib: int, limit: str | None, used: str | None, jobs: int
) -> None:
    # Report D10: a job a core, and the kernel killed the compilers.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert automatic_jobs(MEMINFO.format(available_gib * 1024**2), limit, used) == jobs


def test_without_a_figure_for_memory_the_cores_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    assert automatic_jobs("") == 3


def test_the_second_attempt_has_fewer_jobs() -> None:
    assert [fewer(jobs) for jobs in (64, 3, 2)] == [2, 2, 1]


def test_ninja_progress() -> None:
    line = "[12/216] Building CXX object ggml/src/CMakeFiles/ggml-base.dir/ggml.cpp.o\n"
    assert ninja_progress(line) == (12, 216, "ggml.cpp.o")
    assert ninja_progress("FAILED: x.o\n") is None
    assert ninja_progress("note: [1/2] in the middle") is None


def test_versions_are_compared_by_number() -> None:
    assert numbers("3.9.1") < numbers("3.18.0")


def test_the_native_digest_ignores_order_and_needs_an_answer() -> None:
    one = Completed(("c++",), 0, "#define __AVX2__ 1\n#define __FMA__ 1\n")
    two = Completed(("c++",), 0, "#define __FMA__ 1\n#define __AVX2__ 1\n")
    other = Completed(("c++",), 0, "#define __AVX512F__ 1\n")
    assert native_instruction_sets(one) == native_instruction_sets(two) != native_instruction_sets(other)
    assert native_instruction_sets(Completed(("c++",), 1, "")) is None


def test_the_machines_own_ccache_configuration_is_respected(tmp_path: Path) -> None:
    config = tmp_path / "ccache.conf"
    assert ccache_directory(REQUEST, config) == "/var/lib/llama-build/ccache"
    config.write_text("max_size = 5G\n# cache_dir = /x\n")
    assert ccache_directory(REQUEST, config) == "/var/lib/llama-build/ccache"
    config.write_text("umask = 000\ncache_dir = /srv/ccache\n")
    assert ccache_directory(REQUEST, config) is None
    assert ccache_directory(replace(REQUEST, ccache_directory="/mine"), config) == "/mine"
