# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which driver, CUDA toolkit, compiler, engine, model architecture and GPU go together: one table, one place.

Everything known is a L(Row): what must hold for it to apply, what follows, who says so, and the changes that mend it.
docs/compatibility.md is generated from these rows. Where sources disagree the row says so (C(disputed)) and is
judged on the safe side.

``LC`` in a source is the llama.cpp source of version 0.5.0-dev, commit 0c1e57098 (vendored in the source distribution
llama-cpp-python 0.3.36).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .faults import CMAKE_TOO_OLD, Catalogue, Fault, FaultKind
from .nvidia.products import PRODUCTS, compute_capability_of, device_id

Version = tuple[int, ...]

FAULTS = Catalogue(
    "compat",
    [
        FaultKind(
            "invalid_value",
            "critical",
            "A value given to compat_check cannot be read.",
            "cuda: '12' names no minor release",
        ),
        FaultKind(
            "driver_without_gpu",
            "critical",
            "The driver branch does not know this GPU any more.",
            "driver 590 does not support Volta; 580 is the last branch that does",
        ),
        FaultKind(
            "open_driver_without_gpu",
            "critical",
            "The open kernel modules do not support this GPU.",
            "the open kernel modules need a GPU with a GSP; Volta has none",
        ),
        FaultKind(
            "driver_too_old_for_cuda",
            "critical",
            "Programs built with this CUDA toolkit do not start under this driver.",
            "CUDA 13.0 needs driver 580 or newer, 535 is given",
        ),
        FaultKind(
            "cuda_without_gpu",
            "critical",
            "The CUDA toolkit cannot compile for this GPU.",
            "CUDA 13 cannot compile for sm_70; 12.9 is the last that can",
        ),
        FaultKind(
            "gcc_too_new_for_cuda",
            "error",
            "nvcc of this toolkit refuses the host compiler.",
            "CUDA 12.2 takes gcc up to 12, 13 is given",
        ),
        CMAKE_TOO_OLD,
        FaultKind(
            "driver_cannot_decompress",
            "error",
            "The driver cannot read compressed device code.",
            "driver 535 cannot read device code compressed by CUDA 12.8",
        ),
        FaultKind(
            "engine_without_architecture",
            "critical",
            "The engine is older than the model's architecture.",
            "llama.cpp 0.3.9 does not know architecture qwen4exp; 0.4.0 does",
        ),
        FaultKind(
            "ollama_ignores_gpu",
            "critical",
            "Ollama skips the GPUs under this driver and runs on the CPU without saying so.",
            "Ollama 0.30.5 needs driver 570 or newer, 535 is given",
        ),
        FaultKind(
            "ollama_without_architecture",
            "critical",
            "Ollama is older than the model's architecture.",
            "Ollama 0.24.0 does not know architecture qwen4exp",
        ),
        FaultKind(
            "ollama_sharded_model",
            "error",
            "Ollama does not load a GGUF that is split into shards.",
            "the model has 4 shards",
        ),
        FaultKind(
            "split_mode_unavailable",
            "error",
            "The engine cannot split the model over the GPUs this way.",
            "split_mode=row is no longer in the engine's CUDA backend",
        ),
        FaultKind(
            "cache_type_unavailable",
            "error",
            "The engine cannot keep the KV cache in this type with these settings.",
            "a quantised KV cache needs flash attention, which is off",
        ),
    ],
)

# --- facts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A GPU by PCI device id: ``compute_capability`` as (major, minor), ``memory_mib`` as nvidia-smi gives it."""

    pci_id: str
    product: str
    compute_capability: tuple[int, int]
    memory_mib: int


VOLTA = (7, 0)
#: Memory in MiB of the GPUs judged: all of compute capability 7.0 that were sold, and those the project is tested on.
_MEMORY_MIB = {
    "1d81": 12288,
    "1db1": 16384,
    "1db2": 16384,
    "1db3": 16384,
    "1db4": 16384,
    "1db5": 32768,
    "1db6": 32768,
    "1db7": 32768,
    "1db8": 32768,
    "1dba": 32768,
    "1df5": 16384,
    "1df6": 32768,
    "2335": 143771,
}


def _gpu(pci_id: str, memory_mib: int) -> Gpu:
    major, minor = (compute_capability_of(pci_id) or "").split(".")
    return Gpu(pci_id, PRODUCTS[pci_id], (int(major), int(minor)), memory_mib)


#: A V100 is recognised by id: an old pci.ids shows nothing but "Device 1db6".
GPUS = tuple(_gpu(pci_id, memory_mib) for pci_id, memory_mib in _MEMORY_MIB.items())

#: CUDA version each driver branch brings (NVIDIA, CUDA Toolkit release notes, table "CUDA Toolkit and Corresponding
#: Driver Versions").
DRIVER_CUDA: dict[int, Version] = {
    450: (11, 0),
    470: (11, 4),
    510: (11, 6),
    515: (11, 7),
    520: (11, 8),
    525: (12, 0),
    530: (12, 1),
    535: (12, 2),
    545: (12, 3),
    550: (12, 4),
    555: (12, 5),
    560: (12, 6),
    565: (12, 7),
    570: (12, 8),
    575: (12, 9),
    580: (13, 0),
}

#: Architectures for which LC refuses split mode tensor (LC src/llama-arch.cpp:1139-1177, checked at
#: src/llama-model.cpp:360).
_NO_TENSOR_SPLIT = (
    "grok mpt plamo2 minicpm3 gemma3n mamba mamba2 jamba falcon-h1 olmo2 olmoe deepseek2 deepseek32 hy_v4 dots3note "
    "glm-dsa bitnet t5 nemotron_h nemotron_h_moe granitehybrid minimax-01 minimax-m2 minimax-m3 mistral4 kimi-linear "
    "bailingmoe3 kimi-k3 glm5-next qwen3tts qwen4exp"
)
NO_TENSOR_SPLIT = frozenset(_NO_TENSOR_SPLIT.split())

#: Architectures that LC knows (LC src/llama-arch.cpp:10-165). A name outside this list is not refused, since a newer
#: engine may know it, but noted.
_ARCHITECTURES = (
    "llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bert modern-bert nomic-bert "
    "nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert bloom stablelm qwen qwen2 qwen2moe qwen2vl qwen3 "
    "qwen3moe qwen3next qwen3vl qwen3vlmoe qwen35 qwen35moe qwen4exp phi2 phi3 phimoe plamo plamo2 plamo3 codeshell "
    "orion internlm2 minicpm minicpm3 gemma gemma2 gemma3 gemma3n gemma4 gemma4-assistant gemma-embedding starcoder2 "
    "mamba mamba2 maple jamba falcon-h1 xverse command-r cohere2 cohere2moe dbrx olmo olmo2 olmoe muse-glimmer "
    "openelm arctic deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 chatglm glm4 glm4moe glm-dsa bitnet t5 "
    "t5encoder jais jais2 nemotron nemotron_h nemotron_h_moe exaone exaone4 exaone-moe rwkv6 rwkv6qwen2 rwkv7 arwkv7 "
    "granite granitemoe granitehybrid graniteswitch granite_swa chameleon wavtokenizer-dec plm bailingmoe bailingmoe2 "
    "bailingmoe3 dots1 dots3note arcee afmoe laguna ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 "
    "hy_v4 smollm3 gpt-oss lfm2 lfm2moe dream smallthinker llada llada-moe seed_oss grovemoe apertus minimax-01 "
    "hrm_text minimax-m2 minimax-m3 cogvlm rnd1 pangu-embedded mistral3 eagle3 dflash mistral4 paddleocr mimo2 step35 "
    "spark2_5 llama-embed maincoder kimi-linear kimi-k3 glm5-next talkie mellum nanbeige qwen3tts pockettts"
)
ARCHITECTURES = frozenset(_ARCHITECTURES.split())

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")  # LC common/arg.cpp:304
QUANTISED_CACHE_TYPES = ("q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

#: What compat_check takes, in the order in which a combination is shown.
PARAMETERS = (
    "gpu",
    "gpu_count",
    "driver",
    "flavour",
    "secure_boot",
    "cuda",
    "gcc",
    "cmake",
    "compression",
    "llama_cpp",
    "ollama",
    "architecture",
    "shards",
    "split_mode",
    "cache_type",
    "flash_attention",
    "fit",
)


# --- the table --------------------------------------------------------------------------------------------------------

#: (fact, operator, bound). A version is compared in as many fields as the bound has; where the given version has fewer
#: (gcc 13 against 13.3) the condition holds, which is the safe side. ``absent`` and ``present`` ask whether the fact is
#: given.
Condition = tuple[str, str, Any]


@dataclass(frozen=True)
class Row:
    """One thing known about a combination.

    ``refused`` rows make a fault with ``code``, the others a note. ``repairs`` are alternatives, best first, each the
    parameters to change (null: leave the parameter out).
    """

    code: str
    when: tuple[Condition, ...]
    why: str
    source: str
    refused: bool = True
    repairs: tuple[Mapping[str, str | None], ...] = ()
    disputed: str = ""


#: Highest gcc that nvcc takes, by toolkits from the first to the second release.
GCC_LIMITS = (("11.8", "11.8", 11), ("12.0", "12.3", 12), ("12.4", "12.6", 13), ("12.8", "12.9", 14))


def highest_gcc(cuda: str) -> int | None:
    """The newest gcc that a toolkit takes as its host compiler; null for toolkits that the table does not have."""
    release = tuple(int(number) for number in cuda.split(".")[:2])
    for low, high, gcc in GCC_LIMITS:
        first, last = (tuple(int(number) for number in bound.split(".")) for bound in (low, high))
        if first <= release <= last:
            return gcc
    return None


def _gcc_rows() -> Iterator[Row]:
    """Highest host compiler by toolkit."""
    source = "NVIDIA, CUDA Installation Guide for Linux, host compiler support; llama.cpp#9205"
    for low, high, gcc in GCC_LIMITS:
        toolkits = f"CUDA {low}" if low == high else f"CUDA {low} to {high}"
        yield Row(
            "gcc_too_new_for_cuda",
            (("cuda", ">=", low), ("cuda", "<=", high), ("gcc", ">", str(gcc))),
            f"{toolkits} takes gcc up to {gcc}",
            source,
            repairs=({"gcc": str(gcc)}, {"cuda": "12.9"}) if gcc < 14 else ({"gcc": str(gcc)},),
        )


ROWS: tuple[Row, ...] = (
    # driver and GPU
    Row(
        "driver_without_gpu",
        (("volta", "==", True), ("driver", ">=", "590")),
        "580 is the last driver branch that knows Volta (supported to June 2028)",
        "NVIDIA supported drivers page; NVIDIA/gpu-operator#2613; NVIDIA/ansible-role-nvidia-driver#89",
        repairs=({"driver": "580"}, {"driver": "535"}),
    ),
    Row(
        "open_driver_without_gpu",
        (("volta", "==", True), ("flavour", "==", "open")),
        "the open kernel modules need a GPU System Processor, which Volta does not have",
        "NVIDIA/open-gpu-kernel-modules#322",
        repairs=({"flavour": "proprietary"},),
    ),
    Row(
        "driver_end_of_life",
        (("driver", ">=", "535"), ("driver", "<=", "535")),
        "branch 535 ended in June 2026: no more security fixes, and archives may turn its packages into transitional "
        "ones that install another branch; 580 is supported to June 2028",
        "NVIDIA supported drivers page; canonical/snapd#15712",
        refused=False,
    ),
    Row(
        "driver_end_of_life",
        (("driver", "<", "580"), ("driver", "!=", "535")),
        "this driver branch is past its end of support; 580 is supported to June 2028",
        "NVIDIA supported drivers page",
        refused=False,
    ),
    Row(
        "driver_untested",
        (("driver", "not in", ("535", "550", "570", "580", "590")), ("driver", "<", "590")),
        "this project is made for branches 535, 550, 570 and 580; others are untested",
        "this project",
        refused=False,
    ),
    Row(
        "driver_is_transitional",
        (("driver", ">=", "550"), ("driver", "<=", "550")),
        "in Ubuntu's archive nvidia-driver-550-server became a transitional package that installs 570: simulate the "
        "transaction before it is made",
        "pop-os/pop#3549",
        refused=False,
    ),
    Row(
        "secure_boot_key",
        (("secure_boot", "==", True), ("driver", "present", None)),
        "with Secure Boot a DKMS module loads only after its key is enrolled at the console; the other way is the "
        "prebuilt, signed linux-modules-nvidia package of the kernel",
        "Debian wiki, SecureBoot; lcp/mokutil#69",
        refused=False,
    ),
    Row(
        "gpu_unknown",
        (("gpu", "present", None), ("compute_capability", "absent", None)),
        "this GPU is not in the table: rules for Volta were not applied",
        "this project",
        refused=False,
    ),
    # CUDA
    Row(
        "cuda_without_gpu",
        (("volta", "==", True), ("cuda", ">=", "13")),
        "CUDA 13 cannot compile for compute capability 7.0; 12.9 is the last that can",
        "mudler/LocalAI#9948; NVIDIA, CUDA 13.0 release notes, deprecated architectures",
        repairs=({"cuda": "12.9"}, {"cuda": "12.2"}),
    ),
    Row(
        "driver_too_old_for_cuda",
        (("cuda", ">=", "13"), ("driver", "<", "580")),
        "programs of CUDA 13 need driver 580 or newer",
        "NVIDIA, CUDA Compatibility, minor version compatibility",
        repairs=({"cuda": "12.9"}, {"driver": "580"}),
    ),
    Row(
        "driver_too_old_for_cuda",
        (("cuda", ">=", "12"), ("cuda", "<", "13"), ("driver", "<", "525")),
        "programs of CUDA 12 need driver 525.60.13 or newer",
        "NVIDIA, CUDA Compatibility, minor version compatibility",
        repairs=({"driver": "535"}, {"cuda": "11.8"}),
    ),
    Row(
        "driver_too_old_for_cuda",
        (("cuda", ">=", "11"), ("cuda", "<", "12"), ("driver", "<", "450")),
        "programs of CUDA 11 need driver 450.80.02 or newer",
        "NVIDIA, CUDA Compatibility, minor version compatibility",
        repairs=({"driver": "535"},),
    ),
    Row(
        "cuda_newer_than_driver",
        (("driver_cuda_is_older", "==", True),),
        "the toolkit is newer than the driver's CUDA: native code runs, PTX does not compile there; build for 70-real "
        "only. The two version numbers differing is no fault",
        "NVIDIA, CUDA Compatibility, minor version compatibility; Azure/azhpc-images#343",
        refused=False,
    ),
    Row(
        "cuda_untested",
        (("cuda", "<", "11.8"),),
        "toolkits before CUDA 11.8 are untested with this engine",
        "this project",
        refused=False,
    ),
    Row(
        "cuda_11_compiles",
        (("cuda", ">=", "11.8"), ("cuda", "<=", "11.8")),
        "CUDA 11.8 with gcc 11 compiles the hardest CUDA files of llama.cpp 0.5.0-dev for sm_70 (argsort, cumsum, "
        "fattn, gated_delta_net, ggml-cuda, mean, mmq, softmax, solve_tri, top-k) without a fault",
        "measured: Debian 12, nvcc 11.8.89, g++ 11.3.0",
        refused=False,
    ),
    Row(
        "driver_cannot_decompress",
        (("cuda", ">=", "12.8"), ("driver", "<", "550"), ("compression", "in", ("speed", "balance", "size"))),
        "a toolkit of 12.8 or newer compresses device code, which needs driver 550 or newer to be read",
        "llama.cpp ggml/src/ggml-cuda/CMakeLists.txt:207-213; NVIDIA, nvcc documentation, --compress-mode",
        repairs=({"compression": "none"}, {"driver": "580"}),
    ),
    Row(
        "compression_must_be_off",
        (("cuda", ">=", "12.8"), ("driver", "<", "550"), ("compression", "absent", None)),
        "under a driver before 550 build with GGML_CUDA_COMPRESSION_MODE=none (compression=none): the engine's "
        "default compresses device code, which this driver cannot read",
        "llama.cpp ggml/src/ggml-cuda/CMakeLists.txt:207-213",
        refused=False,
    ),
    Row(
        "compression_has_no_effect",
        (("cuda", "<", "12.8"), ("compression", "in", ("speed", "balance", "size"))),
        "the engine's build asks for compression only from CUDA 12.8",
        "llama.cpp ggml/src/ggml-cuda/CMakeLists.txt:207",
        refused=False,
    ),
    # compiler
    *_gcc_rows(),
    Row(
        "gcc_too_new_for_cuda",
        (("cuda", ">=", "12.6"), ("cuda", "<=", "12.6"), ("gcc", ">=", "13.3"), ("gcc", "<", "14")),
        "CUDA 12.6 refused gcc 13.3 in a build log",
        "NVIDIA, CUDA 12.6 Installation Guide, host compiler support (13.2)",
        repairs=({"gcc": "13.2"}, {"gcc": "12"}),
        disputed="the header of 12.4 takes any gcc 13 (13.3 with 12.4.131 was built by this project), the guide of "
        "12.6 names 13.2, and one log shows 12.6 refusing 13.3",
    ),
    Row(
        "cmake_too_old",
        (("cmake", "<", "3.18"), ("llama_cpp", "present", None)),
        "the CUDA build of llama.cpp needs cmake 3.18 or newer",
        "llama.cpp ggml/src/ggml-cuda/CMakeLists.txt:1",
        repairs=({"cmake": "3.18"},),
    ),
    # engine and architecture
    Row(
        "engine_without_architecture",
        (("architecture", "==", "qwen4exp"), ("llama_cpp_release", "<", "0.4.0")),
        "architecture qwen4exp (Qwen3.8-Flash-Next) is in releases of llama.cpp from 0.4.0; older ones end with "
        "\"unknown model architecture: 'qwen4exp'\"",
        "ggml-org/llama.cpp#27742 (merged 2026-08-27)",
        repairs=({"llama_cpp": "0.4.0"},),
        disputed="some builds that call themselves 0.3.0-dev have it (lmstudio-bug-tracker#2345), others do not "
        "(lemonade#3342 shows build 10621 of before the merge under the same name)",
    ),
    Row(
        "engine_without_architecture",
        (("architecture", "==", "qwen4exp"), ("llama_cpp_build", "<", "10665")),
        "architecture qwen4exp (Qwen3.8-Flash-Next) was merged between build 10621 and build 10665, the first one "
        "reported to load it",
        "ggml-org/llama.cpp#27742; omnimind-ai/OmniInfer#228",
        repairs=({"llama_cpp": "b10809"}, {"llama_cpp": "0.4.0"}),
    ),
    Row(
        "architecture_unknown",
        (("architecture", "present", None), ("architecture", "not in", tuple(sorted(ARCHITECTURES)))),
        "no such architecture is known to llama.cpp 0.5.0: a newer engine may know it, or the name is misspelt",
        "llama.cpp src/llama-arch.cpp:10-165",
        refused=False,
    ),
    # how the model is split
    Row(
        "split_mode_unavailable",
        (("split_mode", "==", "row"), ("llama_cpp", "absent", None), ("ollama", "absent", None)),
        "the engine's CUDA backend has no split mode row any more, start-up ends in \"does not support split "
        'buffers"; it never split the expert tensors',
        "llama.cpp src/llama-model.cpp:1163; ggml-org/llama.cpp#24216, #27465",
        repairs=({"split_mode": "layer"},),
    ),
    Row(
        "split_mode_unavailable",
        (("split_mode", "==", "row"), ("llama_cpp_release", ">=", "0.0.1")),
        "the engine's CUDA backend has no split mode row any more, start-up ends in \"does not support split "
        'buffers"; it never split the expert tensors',
        "llama.cpp src/llama-model.cpp:1163; ggml-org/llama.cpp#24216, #27465",
        repairs=({"split_mode": "layer"},),
        disputed="the first release without it is not known: 0.1.2-dev (build 10524) has lost it, build 9890 is "
        "reported with it on other backends",
    ),
    Row(
        "split_mode_unavailable",
        (("split_mode", "==", "row"), ("llama_cpp_build", ">=", "9891")),
        "the engine's CUDA backend has no split mode row any more, start-up ends in \"does not support split "
        'buffers"; it never split the expert tensors',
        "ggml-org/llama.cpp#24216, #27465 (build 10524)",
        repairs=({"split_mode": "layer"},),
        disputed="the first build without it lies between 9890 and 10524",
    ),
    Row(
        "split_mode_row_is_partial",
        (("split_mode", "==", "row"), ("llama_cpp_build", "<", "9891")),
        "split mode row never split the expert tensors of a mixture-of-experts model",
        "ggml-org/llama.cpp#6593",
        refused=False,
    ),
    Row(
        "split_mode_unavailable",
        (("split_mode", "==", "tensor"), ("architecture", "in", tuple(sorted(NO_TENSOR_SPLIT)))),
        "the engine refuses split mode tensor for this architecture",
        "llama.cpp src/llama-arch.cpp:1139-1177, src/llama-model.cpp:360",
        repairs=({"split_mode": "layer"},),
    ),
    Row(
        "split_mode_unavailable",
        (("split_mode", "==", "tensor"), ("gpu_count", "<", 2)),
        "split mode tensor needs at least two GPUs",
        "llama.cpp src/llama-context.cpp:3830",
        repairs=({"split_mode": "layer"},),
    ),
    Row(
        "split_mode_unavailable",
        (("split_mode", "==", "tensor"), ("flash_attention", "==", "off")),
        "split mode tensor needs flash attention",
        "llama.cpp src/llama-context.cpp:3826-3829",
        repairs=({"flash_attention": "on"}, {"split_mode": "layer"}),
    ),
    Row(
        "split_mode_unavailable",
        (("split_mode", "==", "tensor"), ("fit", "==", True)),
        "split mode tensor excludes --fit",
        "llama.cpp common/fit.cpp:183",
        repairs=({"fit": "false"}, {"split_mode": "layer"}),
    ),
    # KV cache
    Row(
        "cache_type_unavailable",
        (("cache_type", "in", QUANTISED_CACHE_TYPES), ("flash_attention", "==", "off")),
        "a quantised V cache needs flash attention",
        "llama.cpp src/llama-context.cpp:3841-3850",
        repairs=({"flash_attention": "on"}, {"cache_type": "f16"}),
    ),
    Row(
        "cache_type_unavailable",
        (("cache_type", "==", "iq4_nl"), ("gpu", "present", None)),
        "the CUDA backend has no attention kernel for an iq4_nl cache: attention would run on the CPU",
        "llama.cpp ggml/src/ggml-cuda/fattn.cu:525-539",
        repairs=({"cache_type": "q4_0"}, {"cache_type": "q8_0"}),
    ),
    Row(
        "cache_type_unavailable",
        (("volta", "==", True), ("cache_type", "==", "bf16")),
        "Volta has no BF16 units: the cache is converted on every use; f16 has the same size",
        "NVIDIA, CUDA C++ Programming Guide, arithmetic instructions by compute capability",
        repairs=({"cache_type": "f16"},),
    ),
    # Ollama
    Row(
        "ollama_ignores_gpu",
        (("ollama", ">=", "0.30"), ("driver", "<", "550")),
        "from 0.30 Ollama skips the GPUs under a driver older than 550 and runs on the CPU, saying so at debug level "
        "only; 0.24.0 is the last reported good on 535",
        "ollama/ollama#16449, #17290 (discover/cuda_compat.go)",
        repairs=({"ollama": "0.24.0"}, {"driver": "580"}),
    ),
    Row(
        "ollama_ignores_gpu",
        (("ollama", ">=", "0.30"), ("driver", ">=", "550"), ("driver", "<", "570")),
        "from 0.30 Ollama may skip the GPUs under a driver older than 570 and run on the CPU",
        "ollama/ollama#17290",
        repairs=({"driver": "580"}, {"ollama": "0.24.0"}),
        disputed="the log names 550 as the minimum, users name 570",
    ),
    Row(
        "ollama_untested",
        (("ollama", ">", "0.24.0"), ("ollama", "<", "0.30"), ("driver", "<", "550")),
        "0.24.0 is the last release reported good under a driver before 550; what lies between it and 0.30 is untested",
        "ollama/ollama#16449",
        refused=False,
    ),
    Row(
        "ollama_reported_to_abort",
        (("ollama", ">=", "0.30.5"), ("volta", "==", True)),
        "0.30.5 was reported to abort in warm-up on a Tesla V100-SXM2-32GB: run the smoke test after an upgrade",
        "ollama/ollama#16533",
        refused=False,
    ),
    Row(
        "ollama_without_architecture",
        (("architecture", "==", "qwen4exp"), ("ollama", "<", "0.33")),
        "architecture qwen4exp (Qwen3.8-Flash-Next) needs a newer Ollama, and that one a driver of 570 or newer: this "
        "model and driver 535 exclude each other in Ollama. llama-server runs it under 535",
        "ollama/ollama#18096 (asked for on 2026-08-28)",
        repairs=({"ollama": None, "llama_cpp": "0.4.0"},),
        disputed="which release of Ollama first loads it on CUDA is not confirmed; one user ran it on 2026-09-05 "
        "(ollama/ollama#18075) without naming the release",
    ),
    Row(
        "ollama_untested",
        (("architecture", "==", "qwen4exp"), ("ollama", ">=", "0.33")),
        "qwen4exp in Ollama is untested by this project, and the library tag is unconfirmed",
        "this project",
        refused=False,
    ),
    Row(
        "ollama_sharded_model",
        (("ollama", "present", None), ("shards", ">=", 2)),
        "Ollama neither pulls nor loads a GGUF that is split into shards; llama-gguf-split --merge joins them, which "
        "needs room for the model twice",
        "ollama/ollama#5245, #8326",
        repairs=({"ollama": None, "llama_cpp": "0.4.0"}, {"shards": "1"}),
        disputed="newer sources of Ollama deal with split files (server/images.go, pruneSplitGGUFLinkDirs); no release "
        "with it is confirmed",
    ),
)


# --- reading what is given --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompatFault(Fault):
    """A refused combination: ``source`` is who says so, ``disputed`` how sources differ, ``nearest`` what to write."""

    source: str = ""
    disputed: str = ""
    nearest: str = ""


@dataclass(frozen=True)
class Note:
    """Something to know about an allowed combination."""

    code: str
    subject: str
    message: str
    source: str
    disputed: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class Verdict:
    """What judge found.

    ``nearest`` is a whole combination that is allowed and differs least from what was given; null when nothing is wrong
    or none was found.
    """

    faults: list[CompatFault] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    judged: dict[str, Any] = field(default_factory=dict)
    nearest: dict[str, str] | None = None


def find_gpu(text: str) -> Gpu | None:
    """The GPU of a PCI device id (``1db6``, ``10de:1db6``, ``0x1db6``) or a product name as nvidia-smi gives it.

    A name without a memory size (``V100-SXM2``) finds the one of the larger memory. Null for what the table lacks.
    """
    word = text.strip().lower()
    device = device_id(word)
    if device:
        return next((gpu for gpu in GPUS if gpu.pci_id == device), None)
    found = _products(word)
    return found[0] if found else None


def other_memory(text: str) -> Gpu | None:
    """The GPU of another memory size that the name says as well as the one found: ``V100-SXM2`` is 32 GB or 16 GB."""
    found = [] if device_id(text.strip().lower()) else _products(text)
    return next((gpu for gpu in found if gpu.memory_mib != found[0].memory_mib), None)


def _products(text: str) -> list[Gpu]:
    """What a product's name can mean, the largest memory first; only what has it whole, where something has."""
    words = _product_words(text)
    exact = [gpu for gpu in GPUS if "".join(_product_words(gpu.product)) == "".join(words)]
    partial = [gpu for gpu in GPUS if words and _product_words(gpu.product)[: len(words)] == words]
    return exact or sorted(partial, key=lambda gpu: -gpu.memory_mib)


def _product_words(text: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word not in ("", "nvidia", "tesla")]


def _version(text: str, at_least: int, example: str) -> Version:
    """Numeric fields of a version; ``at_least`` is how many it must have. ValueError says what to write."""
    match = re.fullmatch(r"v?(\d{1,6}(?:\.\d{1,6}){0,3})(?:[-~+].*)?", text.strip())
    fields = tuple(int(number) for number in match[1].split(".")) if match else ()
    if len(fields) < at_least:
        raise ValueError(f"{text!r} is no version this can judge; write it like {example}")
    return fields


def _choice(text: str, choices: Iterable[str]) -> str:
    word = text.strip().lower()
    if word not in tuple(choices):
        raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
    return word


def _count(value: Any, low: int) -> int:
    try:
        number = int(str(value).strip())
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None
    if number < low:
        raise ValueError(f"{number} is less than {low}")
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _open_by_name(driver: Any) -> re.Match[str] | None:
    return re.fullmatch(r"(.*\d)(?:-server)?-open", str(driver).strip().lower())


def _read_driver(text: str) -> dict[str, Any]:
    match = re.fullmatch(r"(?:nvidia-driver-)?([0-9.]+)(?:-server)?(?:-open)?", text.strip().lower())
    if not match:
        raise ValueError(f"{text!r} is no driver branch or version; write it like 535 or 535.288.01")
    return {"driver": _version(match[1], 1, "535 or 535.288.01")}


def _read_engine(text: str) -> dict[str, Any]:
    build = re.fullmatch(r"b?(\d{3,6})", text.strip().lower())
    if build:
        number = int(build[1])
        return {"llama_cpp": (number,), "llama_cpp_build": (number,)}
    release = _version(text, 2, "0.4.0, or a build number like b10809")
    return {"llama_cpp": release, "llama_cpp_release": release}


def _read_gpu(text: str) -> dict[str, Any]:
    gpu = find_gpu(text)
    if gpu is not None:
        return {"gpu": gpu.pci_id, "compute_capability": gpu.compute_capability}
    if re.search(r"v100|gv100|titan v\b", text.lower()):
        return {"gpu": text.strip(), "compute_capability": VOLTA}
    return {"gpu": text.strip()}


def read_facts(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[CompatFault]]:
    """The facts that conditions speak of, and a fault for each value that cannot be read. Null values are not given."""
    facts: dict[str, Any] = {}
    faults: list[CompatFault] = []
    readers: dict[str, Any] = {
        "gpu": lambda v: _read_gpu(str(v)),
        "gpu_count": lambda v: {"gpu_count": _count(v, 1)},
        "driver": lambda v: _read_driver(str(v)),
        "flavour": lambda v: {"flavour": _choice(str(v), ("proprietary", "open"))},
        "secure_boot": lambda v: {"secure_boot": _flag(v)},
        "cuda": lambda v: {"cuda": _version(str(v), 2, "12.2")},
        "gcc": lambda v: {"gcc": _version(str(v), 1, "12 or 12.3.0")},
        "cmake": lambda v: {"cmake": _version(str(v), 2, "3.22")},
        "compression": lambda v: {"compression": _choice(str(v), ("none", "speed", "balance", "size"))},
        "llama_cpp": lambda v: _read_engine(str(v)),
        "ollama": lambda v: {"ollama": _version(str(v), 2, "0.24.0")},
        "architecture": lambda v: {"architecture": str(v).strip()},
        "shards": lambda v: {"shards": _count(v, 1)},
        "split_mode": lambda v: {"split_mode": _choice(str(v), ("none", "layer", "row", "tensor"))},
        "cache_type": lambda v: {"cache_type": _choice(str(v), CACHE_TYPES)},
        "flash_attention": lambda v: {"flash_attention": _choice(str(v), ("auto", "on", "off"))},
        "fit": lambda v: {"fit": _flag(v)},
    }
    for name in PARAMETERS:
        value = given.get(name)
        if value is None or value == "":
            continue
        try:
            facts.update(readers[name](value))
        except ValueError as exc:
            base = FAULTS.fault("invalid_value", name, str(exc), "Write a value of the form named, or leave it out.")
            faults.append(CompatFault(**asdict(base)))
    capability = facts.get("compute_capability")
    if capability is not None:
        facts["volta"] = capability == VOLTA
    if "driver" in facts and "cuda" in facts:
        brought = [cuda for branch, cuda in DRIVER_CUDA.items() if branch <= facts["driver"][0]]
        facts["driver_cuda_is_older"] = bool(
            brought and brought[-1] < facts["cuda"][:2] and brought[-1][0] == facts["cuda"][0]
        )
    return facts, faults


# --- judging ----------------------------------------------------------------------------------------------------------


def _holds(facts: Mapping[str, Any], condition: Condition) -> bool:
    fact, operator, bound = condition
    value = facts.get(fact)
    if operator == "absent":
        return value is None
    if value is None:
        return False
    if operator == "present":
        return True
    if operator in ("in", "not in"):
        word = str(value[0]) if isinstance(value, tuple) else value
        return (word in bound) == (operator == "in")
    if isinstance(value, tuple) and isinstance(bound, str):
        limit = tuple(int(number) for number in bound.split("."))
        known = value[: len(limit)]
        if known == limit[: len(known)] and len(known) < len(limit):
            return operator != "!="  # not precise enough to tell: the safe side
        return _compare(known, operator, limit)
    return _compare(value, operator, bound)


def _compare(value: Any, operator: str, bound: Any) -> bool:
    if operator == "==":
        return bool(value == bound)
    if operator == "!=":
        return bool(value != bound)
    if operator == "<":
        return bool(value < bound)
    if operator == "<=":
        return bool(value <= bound)
    if operator == ">":
        return bool(value > bound)
    if operator == ">=":
        return bool(value >= bound)
    raise ValueError(f"unknown operator {operator!r}")


def _applying(facts: Mapping[str, Any]) -> list[Row]:
    return [row for row in ROWS if all(_holds(facts, condition) for condition in row.when)]


#: Which given parameter a fact was read from, for messages.
_PARAMETER_OF = {
    "volta": "gpu",
    "compute_capability": "gpu",
    "llama_cpp_release": "llama_cpp",
    "llama_cpp_build": "llama_cpp",
    "driver_cuda_is_older": "cuda",
}


def row_parameters(row: Row) -> list[str]:
    """The parameters a row speaks of, in the order of PARAMETERS."""
    named = {_PARAMETER_OF.get(fact, fact) for fact, operator, _ in row.when if operator != "absent"}
    if any(fact == "driver_cuda_is_older" for fact, _, _ in row.when):
        named.add("driver")
    return [name for name in PARAMETERS if name in named]


def combination(values: Mapping[str, Any]) -> str:
    """A combination as it is written on a command line: ``driver=535 ollama=0.24.0``."""
    return " ".join(f"{name}={_shown(values[name])}" for name in PARAMETERS if values.get(name) not in (None, ""))


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def repair_text(repair: Mapping[str, str | None]) -> str:
    """A repair in words: ``driver=580``, ``llama_cpp=0.4.0 instead of ollama``."""
    text = combination(repair)
    dropped = [name for name, value in repair.items() if value is None]
    return f"{text} instead of {' and '.join(dropped)}" if dropped else text


def judge(given: Mapping[str, Any]) -> Verdict:
    """Judge what is given together. Names are those of PARAMETERS; a null or empty value is not given."""
    values = {name: given[name] for name in PARAMETERS if given.get(name) not in (None, "")}
    named_open = _open_by_name(values.get("driver", ""))
    if named_open:
        # A package name such as nvidia-driver-535-open says the flavour, whatever is written beside it.
        values.update(driver=named_open[1], flavour="open")
    facts, unreadable = read_facts(values)
    verdict = Verdict(faults=unreadable, judged=values)
    rows = _applying(facts)
    refused = [row for row in rows if row.refused]
    if refused and not unreadable:
        verdict.nearest = _nearest(values, refused)
    whole = f" All together: {combination(verdict.nearest)}." if verdict.nearest and len(refused) > 1 else ""
    for row in rows:
        subject = combination({name: values.get(name) for name in row_parameters(row)}) or "what is given"
        if not row.refused:
            verdict.notes.append(Note(row.code, subject, row.why, row.source, row.disputed))
            continue
        choices = " or ".join(repair_text(repair) for repair in row.repairs)
        disputed = f" Sources disagree ({row.disputed}); the safe side is taken." if row.disputed else ""
        base = FAULTS.fault(
            row.code, subject, f"{row.why}. [{row.source}]{disputed}", f"Write {choices}.{whole}" if choices else whole
        )
        verdict.faults.append(CompatFault(**asdict(base), source=row.source, disputed=row.disputed, nearest=choices))
    return verdict


def _nearest(values: Mapping[str, Any], refused: list[Row], depth: int = 4) -> dict[str, str] | None:
    """The allowed combination that differs least: repair every refused row, and what the repairs bring, until none is.

    Breadth first, so the fewest rounds win; within a round the order in which the rows name their repairs.
    """
    frontier: list[tuple[dict[str, Any], list[Row]]] = [(dict(values), refused)]
    seen: set[str] = set()
    for _ in range(depth):
        found: list[tuple[int, dict[str, Any]]] = []
        following: list[tuple[dict[str, Any], list[Row]]] = []
        for current, rows in frontier:
            for repairs in itertools.islice(itertools.product(*(row.repairs for row in rows)), 64):
                candidate = dict(current)
                for repair in repairs:
                    candidate.update(repair)
                candidate = {name: value for name, value in candidate.items() if value is not None}
                key = combination(candidate)
                if key in seen:
                    continue
                seen.add(key)
                facts, unreadable = read_facts(candidate)
                left = [row for row in _applying(facts) if row.refused]
                if unreadable:
                    continue
                if not left:
                    changes = sum(1 for name in PARAMETERS if candidate.get(name) != values.get(name))
                    found.append((changes, candidate))
                elif len(following) < 64:
                    following.append((candidate, left))
        if found:
            best = min(found, key=lambda entry: entry[0])[1]
            return {name: _shown(best[name]) for name in PARAMETERS if name in best}
        frontier = following
    return None
