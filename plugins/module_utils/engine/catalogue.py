# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The faults of the engine: parameters, tools, sources, build and proof."""

from __future__ import annotations

from ..faults import CMAKE_TOO_OLD, DISK_FULL, SOURCE_UNREACHABLE, Catalogue, FaultKind

CATALOGUE = Catalogue(
    "engine",
    [
        # What was asked for.
        FaultKind(
            "architecture_invalid",
            "error",
            "A CUDA architecture is not written as a number, with -real or -virtual after it where wanted.",
            "cuda_architectures: 'native' is not an architecture",
        ),
        FaultKind(
            "source_invalid",
            "error",
            "The source of the engine is not described completely, or a hash, commit, version or address is malformed.",
            "sha256: 'abc' is not 64 hexadecimal digits",
        ),
        FaultKind(
            "build_option_invalid",
            "error",
            "A build option, target, path or count cannot be used, or belongs to the module itself.",
            "cmake_options: CMAKE_CUDA_ARCHITECTURES is set by cuda_architectures",
        ),
        FaultKind(
            "build_user_unusable",
            "error",
            "The account that compiles is missing, is root, or cannot be taken on by the caller.",
            "llama-build: there is no such user",
        ),
        # What the machine has.
        FaultKind(
            "build_tool_missing",
            "error",
            "A program that the build needs is not installed.",
            "ninja: not found in PATH",
        ),
        CMAKE_TOO_OLD,
        FaultKind(
            "nvcc_missing",
            "error",
            "There is no CUDA compiler, or the build user cannot run it.",
            "nvcc: not found below /usr/local/cuda-12.2/bin",
        ),
        FaultKind(
            "architecture_unsupported",
            "error",
            "The CUDA compiler does not know an architecture that was asked for.",
            "70-real: nvcc 13.0 knows compute_75 and newer",
        ),
        FaultKind(
            "toolkit_mixed",
            "error",
            "The CUDA compiler and the CUDA headers or libraries come from two different toolkits.",
            "CUDA toolkit: the compiler is 12.0.140, the headers are 12.1.66",
        ),
        FaultKind(
            "host_compiler_too_new",
            "error",
            "The host compiler is newer than the CUDA compiler accepts.",
            "host compiler: nvcc accepts gcc up to 12",
        ),
        FaultKind(
            "toolkit_unavailable",
            "error",
            "No CUDA toolkit that compiles for the card can be had in the way that was asked for.",
            "CUDA 12.2: NVIDIA's archive for Ubuntu 24.04 begins with 12.5",
        ),
        FaultKind(
            "toolkit_needs_driver",
            "critical",
            "The distribution's CUDA toolkit brings the libcuda of another driver branch than the one on the machine.",
            "nvidia-cuda-toolkit 12.4: needs the libcuda of driver 550 (Debian 13), and driver 535.274.02 is here",
        ),
        FaultKind(
            "toolkit_incomplete",
            "error",
            "The CUDA toolkit has its compiler, but not a library that the engine links.",
            "CUDA toolkit: has a compiler and no cublas",
        ),
        FaultKind(
            "libcuda_stub_missing",
            "error",
            "Neither the driver's libcuda nor the toolkit's stub of it was found when linking.",
            "libcuda: cannot find -lcuda",
        ),
        FaultKind(
            "https_support_missing",
            "error",
            "The engine was configured without OpenSSL and could not speak HTTPS.",
            "OpenSSL: the development files were not found",
        ),
        # Where the source comes from.
        SOURCE_UNREACHABLE,
        FaultKind(
            "source_not_found",
            "error",
            "The index, the server or the repository does not have what was asked for.",
            "llama-cpp-python 9.9.9: the index lists no source distribution of this version",
        ),
        FaultKind(
            "source_checksum_mismatch",
            "critical",
            "The source archive does not have the SHA-256 that was asked for; nothing of it was unpacked.",
            "llama_cpp_python-0.3.36.tar.gz: SHA-256 is 5f0c..., expected 832d...",
        ),
        FaultKind(
            "source_unsafe",
            "critical",
            "The source archive holds an entry that would be written outside its folder.",
            "../../etc/cron.d/x: leads outside the source folder",
        ),
        FaultKind(
            "source_unusable",
            "error",
            "The archive cannot be read, or holds no llama.cpp source.",
            "llama.tar.gz: no CMakeLists.txt of llama.cpp in it",
        ),
        FaultKind(
            "source_commit_mismatch",
            "critical",
            "The source says it is another commit than the one asked for.",
            "commit: the source is 0c1e57098bba, asked for is 1111111",
        ),
        FaultKind(
            "source_version_mismatch",
            "error",
            "The source says it is another version than the one asked for.",
            "version: the source is 0.5.0-dev, asked for is 0.4.0",
        ),
        # The build.
        FaultKind(
            "build_in_progress",
            "error",
            "Another run builds in the same folder and did not end within the waiting time.",
            "/var/lib/llama-build: process 4711 is building here",
        ),
        FaultKind(
            "configure_failed",
            "error",
            "cmake could not configure the build, for a reason that is not in the table of known ones.",
            "cmake: exit status 1",
        ),
        FaultKind(
            "build_failed",
            "error",
            "Compiling or linking failed, for a reason that is not in the table of known ones.",
            "ninja: exit status 1; ggml/src/ggml.c:1:1: error: expected ';'",
        ),
        FaultKind(
            "build_out_of_memory",
            "error",
            "A compiler was killed for want of memory, also with fewer jobs.",
            "memory: the compiler was killed with 2 jobs and 1.1 GiB available",
        ),
        DISK_FULL,
        FaultKind(
            "library_missing",
            "error",
            "A library that was asked for was not found when configuring.",
            "NCCL: not found by cmake",
        ),
        FaultKind(
            "cmake_option_unused",
            "warning",
            "An option that was passed to cmake means nothing to this source.",
            "LLAMA_CURL: not used by this source",
        ),
        FaultKind(
            "filesystem_error",
            "error",
            "A file or folder could not be read or written.",
            "/opt/llama.cpp: read-only file system",
        ),
        # The proof.
        FaultKind(
            "proof_failed",
            "error",
            "The built engine does not start, does not name its version and commit, or loads libraries from elsewhere.",
            "llama-server: --version names commit unknown, expected 0c1e57098",
        ),
        FaultKind(
            "architecture_missing",
            "error",
            "The built CUDA library holds no native code for an architecture that was asked for.",
            "libggml-cuda: has code for sm_80, sm_90, none for sm_70",
        ),
        FaultKind(
            "model_architecture_unknown",
            "error",
            "The built engine does not know the architecture of the model.",
            "qwen4exp: this engine does not know the architecture",
        ),
        FaultKind(
            "gpu_proof_failed",
            "error",
            "The built engine does not show all GPUs, or does not compute on one of them; it was not put into use.",
            "llama-bench: a small model does not run on CUDA0: no kernel image is available",
        ),
        FaultKind(
            "gpu_busy",
            "error",
            "The built engine could not be tried on the GPUs, because something else fills or holds them.",
            "llama-bench: a small model does not run on CUDA0: out of memory",
        ),
        # Releases that come from elsewhere, and the way back.
        FaultKind(
            "release_damaged",
            "error",
            "A release is not what its manifest or its archive's hash says; nothing of it was put into use.",
            "0.5.0-dev-3f6d0a9c51be: lib/libllama.so.0 has another SHA-256 than its manifest says",
        ),
        FaultKind(
            "release_missing",
            "error",
            "The release that is to be put into use is not on the machine.",
            "/opt/llama.cpp/previous: there is no release to go back to",
        ),
    ],
)
