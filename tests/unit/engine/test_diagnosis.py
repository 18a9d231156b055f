# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Known failures in recorded logs: the rows (d) of the public reports, and others of their kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine.catalogue import CATALOGUE
from ansible_collections.volta.llm.plugins.module_utils.engine.diagnosis import (
    LINE_LIMIT,
    SYMPTOMS,
    TAIL_LINES,
    check_configured,
    configured_version,
    explain,
    failure_lines,
    recognise,
    toolkit_note,
    unused_options,
)
from ansible_collections.volta.llm.plugins.module_utils.engine.proof import judge_architectures
from ansible_collections.volta.llm.plugins.module_utils.engine.toolkit import first_match

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engine"
LOG = "/var/lib/llama-build/logs/3f6d0a9c51be.log"


def log(name: str) -> str:
    return (FIXTURES / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "code", "says", "advises"),
    [
        ("d02-detection-text.log", "architecture_unsupported", "compute_No CUDA devices found", "70-real"),
        ("d02-empty.log", "architecture_unsupported", "failed detection", "70-real"),
        ("unsupported-70.log", "architecture_unsupported", "does not know compute_70", "12.9"),
        ("d04-gcc-12.log", "host_compiler_too_new", "up to 12", "/usr/bin/g++-12"),
        ("d04-gcc-13.log", "host_compiler_too_new", "up to 13", "/usr/bin/g++-13"),
        ("d08-no-compiler.log", "nvcc_missing", "not its compiler", "cuda_root"),
        ("d10-killed.log", "build_out_of_memory", "memory", "jobs"),
        ("d10-cc1plus.log", "build_out_of_memory", "memory", "jobs"),
        ("d12-https.log", "https_support_missing", "without HTTPS", "libssl-dev"),
        ("d12-rebuild.log", "https_support_missing", "without HTTPS", "LLAMA_CURL"),
        ("d14-compress-mode.log", "toolkit_mixed", "two toolkits are mixed", "cuda_root"),
        ("disk-full.log", "disk_full", "ran full", "goes on"),
        ("libcuda-stub.log", "libcuda_stub_missing", "stub", "stubs"),
        ("no-cublas.log", "toolkit_incomplete", "no cublas", "same tree as nvcc"),
        ("no-driver-stub.log", "libcuda_stub_missing", "stub", "stubs"),
        ("cmake-old.log", "cmake_too_old", "3.18", "backports"),
        ("network.log", "source_unreachable", "network", "proxy"),
    ],
)
def test_known_failures_are_said_in_one_sentence(name: str, code: str, says: str, advises: str) -> None:
    fault = explain(log(name), LOG, "build", 1)
    assert fault.code == code
    assert says in fault.message
    assert LOG in fault.message
    assert "\n" not in fault.message
    assert advises in fault.remedy
    assert "{1}" not in fault.message + fault.remedy


@pytest.mark.parametrize(
    "line",
    [
        # NVIDIA/cudf#8018: nvcc's own status is not 137 then.
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "nvcc error   : 'ptxas' died due to signal 9 (Kill signal)",
        "nvcc error   : 'cudafe++' died due to signal 9 (Kill signal)",
        "collect2: fatal error: ld terminated with signal 9 [Killed]",
        "/usr/bin/ld: final link failed: memory exhausted",
        "cc1: out of memory allocating 65536 bytes after a total of 1183744 bytes",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_a_part_of_the_compiler_that_was_killed_is_a_matter_of_memory(line: str) -> None:
    """It decides about the retry with fewer jobs."""
    text = f"FAILED: [code=9] ggml/src/ggml-cuda/fattn.cu.o\n/usr/local/cuda/bin/nvcc -c fattn.cu\n{line}\n"
    assert explain(text, LOG, "build", 1).code == "build_out_of_memory"
    crashed = text.replace("signal 9 (Kill signal)", "signal 11 (Invalid memory reference)")
    if crashed != text:
        assert explain(crashed, LOG, "build", 1).code == "build_failed"


@pytest.mark.parametrize("name", ["cospi", "sinpif", "rsqrt"])
@pytest.mark.parametrize("between", [" ", "\n  "])
def test_a_c_library_that_is_newer_than_the_toolkit(name: str, between: str) -> None:
    """NVIDIA/cuda-samples#378 with 12.9, opencv/opencv#27111 with 12.4 and 12.8; cudafe++ breaks its lines."""
    text = (
        f"/usr/include/x86_64-linux-gnu/bits/mathcalls.h(79): error: exception{between}specification is incompatible "
        f'with that of previous function "{name}"{between}(declared at line 2601 of /usr/local/cuda/include/crt/x.h)\n'
    )
    fault = explain(text, LOG, "build", 1)
    assert (fault.code, fault.subject) == ("toolkit_unavailable", "C library")
    assert "glibc 2.41" in fault.message
    assert "llama_cpp_build_host" in fault.remedy


def test_the_users_default_compiler_is_never_to_be_changed() -> None:
    # Report D04: the thread switched the whole system's compiler with update-alternatives.
    fault = explain(log("d04-gcc-12.log"), LOG, "configure", 1)
    assert "update-alternatives" not in fault.remedy
    assert "-allow-unsupported-compiler" not in fault.remedy


def test_d06_compiler_and_headers_of_two_toolkits() -> None:
    faults = check_configured(log("d06-mixed.log"), "cuda")
    assert [fault.code for fault in faults] == ["toolkit_mixed"]
    for part in ("12.0.140", "12.1.66", "/usr/local/cuda-12.1/"):
        assert part in faults[0].message


def test_one_toolkit_is_no_mixture() -> None:
    assert check_configured(log("no-cublas.log"), "cuda") == []
    same = log("d06-mixed.log").replace("12.0.140", "12.1.105")
    assert check_configured(same, "cuda") == []
    assert check_configured(log("d06-mixed.log"), "cpu") == []


def test_d12_a_configuration_without_openssl_is_refused_and_curl_reported() -> None:
    faults = check_configured(log("configure-no-openssl.log"), "cpu")
    assert [(fault.code, fault.subject) for fault in faults] == [
        ("https_support_missing", "OpenSSL"),
        ("cmake_option_unused", "LLAMA_CUBLAST"),
        ("cmake_option_unused", "LLAMA_CURL"),
    ]


def test_a_good_configuration_gives_no_fault() -> None:
    text = log("configure-cpu.log")
    assert check_configured(text, "cpu") == []
    assert unused_options(text) == []
    assert recognise(text) is None
    assert configured_version(text) == "0.5.0-dev"


def test_d16_a_library_without_the_cards_architecture_is_refused() -> None:
    fault = judge_architectures(log("d16-prebuilt-listing.txt"), ["sm_70"])
    assert fault is not None
    assert fault.code == "architecture_missing"
    assert "sm_75" in fault.message
    assert "none for sm_70" in fault.message
    assert judge_architectures(log("cuobjdump-sm_70.txt"), ["sm_70"]) is None
    # 70 is no part of 170, and an empty listing proves nothing.
    assert judge_architectures("ELF file 1: x.sm_170.cubin", ["sm_70"]) is not None
    assert judge_architectures("", ["sm_70"]) is not None


def test_d18_a_newer_toolkit_within_one_major_version_is_a_note() -> None:
    shown = first_match(r"CUDA Version: (\d+\.\d+)", log("d18-nvidia-smi.txt"))
    assert shown == "12.2"
    note = toolkit_note("12.4.131", shown)
    assert note is not None
    assert "works within 12.x" in note
    assert "PTX" in note
    assert toolkit_note("12.2.140", shown) is None
    assert toolkit_note("11.8.89", shown) is None
    assert "will not run" in (toolkit_note("13.0.88", shown) or "")


def test_an_unknown_failure_shows_its_lines_and_the_log() -> None:
    fault = explain(log("compile-error.log"), LOG, "build", 1)
    assert fault.code == "build_failed"
    assert "error: unknown type name 'this'" in fault.message
    assert LOG in fault.message
    # Neither other jobs' progress nor the compiler's whole command line.
    assert "[10/220]" not in fault.message
    assert "-DGGML_COMMIT" not in fault.message
    assert explain("CMake Error: something new", LOG, "configure", 1).code == "configure_failed"
    assert "signal 15" in explain("", LOG, "build", -15).message


def test_the_shown_part_is_bounded() -> None:
    lines = failure_lines("\n".join(["x" * 5000] * 500))
    assert len(lines) == TAIL_LINES
    assert max(len(line) for line in lines) == LINE_LIMIT
    late = failure_lines("FAILED: a.o\nc++ -c a\na.c:1: error: boom\n" + "[5/9] Building b.o\n" * 300)
    assert late == ["FAILED: a.o", "a.c:1: error: boom"]


def test_causes_are_found_among_their_consequences() -> None:
    # A full disk makes compilers fail in every way; a killed compiler leaves an ordinary FAILED.
    text = log("compile-error.log") + log("disk-full.log")
    assert explain(text, LOG, "build", 1).code == "disk_full"


def test_every_symptom_has_a_declared_fault() -> None:
    assert {symptom.code for symptom in SYMPTOMS} <= set(CATALOGUE.kinds)


def test_nccl_that_was_asked_for_and_is_not_there_is_a_fault() -> None:
    text = (
        log("configure-cpu.log") + "-- Warning: NCCL not found, performance for multiple CUDA GPUs will be suboptimal\n"
    )
    assert [fault.code for fault in check_configured(text, "cuda", nccl=True)] == ["library_missing"]
    assert check_configured(text, "cuda") == []
