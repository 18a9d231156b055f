#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Plan the memory of a model on GPUs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vram_plan
short_description: Does this model fit these GPUs, and with what context?
version_added: 0.1.0
description:
  - Says from a model's header alone what weights, KV cache, recurrent state and compute buffers take on each GPU, as llama.cpp places them.
  - Fails when it does not fit, with the GPU that is too small and the nearest settings that fit. Nothing is loaded and nothing is changed.
  - The model can be one of the catalogue, a file, a saved header or a URL; the GPUs those of the machine, or any others by product or size.
  - Exact for the architectures llama, qwen3, qwen3moe, qwen3next, qwen35moe, qwen4exp, gpt-oss, deepseek2 and glm4moe; any other is planned for
    conservatively and RV(notes) says so.
author:
  - The volta.llm authors
options:
  model:
    description:
      - Name in the catalogue (C(docs/models.md)), path or http(s) URL of the GGUF (the first shard of a set), or path of a saved header.
    type: str
    required: true
  gpus:
    description:
      - GPUs by product instead of those of the machine, as V(4 x V100-SXM2-32GB).
      - Mutually exclusive with O(gpus_mib).
    type: str
  gpus_mib:
    description:
      - Memory of each GPU in MiB, in the order of the engine.
    type: list
    elements: float
  context_per_request:
    description: Tokens that every request is granted. The total that the engine wants is computed (RV(engine_arguments)).
    type: int
    default: 8192
  parallel:
    description: Requests served at once.
    type: int
    default: 1
  cache_type_k:
    description: Type of the keys in the KV cache.
    type: str
    choices: [f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1]
    default: f16
  cache_type_v:
    description: Type of the values in the KV cache.
    type: str
    choices: [f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1]
    default: f16
  ubatch:
    description: Tokens in a micro-batch (C(--ubatch-size)). Compute buffers grow with it.
    type: int
    default: 512
  split_mode:
    description:
      - How the model is spread over the GPUs. V(none) uses the first GPU only. V(tensor) is estimated.
      - V(row) is not among the choices; the engine's CUDA backend has lost it.
    type: str
    choices: [layer, none, tensor]
    default: layer
  tensor_split:
    description: Share of each GPU. Without it the engine goes by memory.
    type: list
    elements: float
  kv_unified:
    description: Whether the requests share one cache (C(--kv-unified)) instead of having a part of it each.
    type: bool
    default: false
  overhead_mib:
    description:
      - What driver and engine take of each GPU beside the engine's buffers, in MiB. Default 512.
      - Recalibrate it on the machine, with what C(nvidia-smi) shows less RV(per_gpu) without overhead.
    type: float
  compute_capability:
    description: Compute capability such as V(7.0), where GPUs are given by size. Volta needs more working memory than newer GPUs.
    type: str
  must_fit:
    description: Whether to fail when the model does not fit. With V(false) see RV(fits).
    type: bool
    default: true
  http_headers:
    description: Headers for a URL, for example C(Authorization) of a gated model. Not sent to another host that a redirect leads to.
    type: dict
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.nvidia_smi
  - volta.llm.machine.attributes
notes:
  - The whole memory of a detected GPU counts as free, since the server that may run there now is the one being planned for.
seealso:
  - module: volta.llm.gguf_info
  - module: volta.llm.compat_check
"""

EXAMPLES = r"""
- name: Would the reference model fit four V100, with no machine at hand?
  volta.llm.vram_plan:
    model: qwen3.8-flash-next-ud-q4_k_xl
    gpus: 4 x V100-SXM2-32GB
    context_per_request: 65536
    parallel: 4
  delegate_to: localhost
  register: plan

- name: Show the plan
  ansible.builtin.debug:
    msg: "{{ plan.table }}"

- name: Plan on the real file and the real cards before the service is started
  volta.llm.vram_plan:
    model: /srv/models/Qwen3.8-Flash-Next-UD-Q4_K_XL-00001-of-00004.gguf
    context_per_request: 32768
    parallel: 8
    cache_type_k: q8_0
    cache_type_v: q8_0

- name: Ask what fits without failing
  volta.llm.vram_plan:
    model: qwen3-30b-a3b-q4_k_m
    gpus_mib: [16384]
    must_fit: false
"""

RETURN = r"""
fits:
  description: Whether every GPU is large enough.
  returned: when the model could be planned for
  type: bool
reason:
  description: Why it does not fit; null when it does.
  returned: when the model could be planned for
  type: str
architecture:
  description: Architecture of the model.
  returned: when the model could be planned for
  type: str
per_gpu:
  description: What each GPU takes, in MiB.
  returned: when the model could be planned for
  type: list
  elements: dict
  contains:
    index:
      description: Number of the GPU, in the engine's order.
      type: int
    layers:
      description: Layers of the model on it.
      type: int
    weights_mib:
      description: Weights.
      type: float
    kv_mib:
      description: KV cache, with the keys of an indexer.
      type: float
    state_mib:
      description: State of recurrent layers; it does not grow with the context.
      type: float
    compute_mib:
      description: Buffers of the compute graph.
      type: float
    overhead_mib:
      description: Driver and engine (O(overhead_mib)), and the working memory of CUDA operations.
      type: float
    total_mib:
      description: The sum.
      type: float
    free_mib:
      description: Memory of the GPU.
      type: float
    fits:
      description: Whether the sum is within the memory.
      type: bool
host_mib:
  description: What the server maps and allocates on the host, in MiB.
  returned: when the model could be planned for
  type: float
page_cache_mib:
  description: The part of RV(host_mib) that is pages of the file, read when needed and given back under pressure.
  returned: when the model could be planned for
  type: float
max_context_per_request:
  description: Most tokens a request can be granted with everything else as it is, 0 when not even 256 fit.
  returned: when the model could be planned for
  type: int
max_parallel:
  description: Most requests at once with everything else as it is, 0 when not even one fits.
  returned: when the model could be planned for
  type: int
total_context:
  description: Tokens of all requests together, as C(--ctx-size) wants it; requests are padded to 256.
  returned: when the model could be planned for
  type: int
nearest:
  description: Settings that fit and differ least; null when it fits or nothing does.
  returned: when the model could be planned for
  type: dict
  sample: {context_per_request: 262144, parallel: 4, cache_type_k: f16, cache_type_v: f16}
engine_arguments:
  description: Arguments of llama-server for these settings.
  returned: when the model could be planned for
  type: list
  elements: str
table:
  description: The plan as lines for people.
  returned: when the model could be planned for
  type: list
  elements: str
notes:
  description: What to know about the plan, as that it is an upper bound.
  returned: when the model could be planned for
  type: list
  elements: str
gpus:
  description: The GPUs planned for.
  returned: when the model could be planned for
  type: list
  elements: dict
  sample: [{product: Tesla V100-SXM2-32GB, memory_mib: 32768.0}]
faults:
  description: What is wrong, most serious first. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
"""

import re

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, NVIDIA_SMI
from ansible_collections.volta.llm.plugins.module_utils.compat import CACHE_TYPES
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.gguf import planning
from ansible_collections.volta.llm.plugins.module_utils.gguf.plan import engine_arguments, total_context
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def gpus_of(module: VoltaModule) -> list[planning.Gpu]:
    wanted = module.params
    if wanted["gpus"]:
        gpus = planning.named_gpus(wanted["gpus"])
    elif wanted["gpus_mib"]:
        gpus = [planning.Gpu("GPU", size, (7, 0)) for size in wanted["gpus_mib"]]
    else:
        gpus = planning.detected_gpus(Machine(wanted["sysroot"], wanted["timeout"]), wanted["nvidia_smi"])
    capability = re.fullmatch(r"(\d+)\.(\d+)", wanted["compute_capability"] or "")
    if capability:
        found = (int(capability[1]), int(capability[2]))
        gpus = [planning.Gpu(gpu.product, gpu.memory_mib, found) for gpu in gpus]
    return gpus


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "model": {"type": "str", "required": True},
            "gpus": {"type": "str"},
            "gpus_mib": {"type": "list", "elements": "float"},
            "context_per_request": {"type": "int", "default": 8192},
            "parallel": {"type": "int", "default": 1},
            "cache_type_k": {"type": "str", "choices": list(CACHE_TYPES), "default": "f16"},
            "cache_type_v": {"type": "str", "choices": list(CACHE_TYPES), "default": "f16"},
            "ubatch": {"type": "int", "default": 512},
            "split_mode": {"type": "str", "choices": ["layer", "none", "tensor"], "default": "layer"},
            "tensor_split": {"type": "list", "elements": "float"},
            "kv_unified": {"type": "bool", "default": False},
            "overhead_mib": {"type": "float"},
            "compute_capability": {"type": "str"},
            "must_fit": {"type": "bool", "default": True},
            "http_headers": {"type": "dict", "no_log": True},
            **MACHINE,
            **NVIDIA_SMI,
        },
        mutually_exclusive=[("gpus", "gpus_mib")],
        supports_check_mode=True,
    )
    wanted = module.params
    headers = {str(name): str(value) for name, value in (wanted["http_headers"] or {}).items()}
    try:
        gpus = gpus_of(module)
        name, header = planning.load_header(wanted["model"], headers, wanted["timeout"])
        result = planning.answer(name, header, planning.settings_of(wanted, gpus))
    except FaultError as exc:
        finish(module, [exc.fault], changed=False)
    made, settings, nearest = result.plan, result.plan.settings, result.nearest
    taken = planning.named_notes(wanted["gpus"] or "")
    refusal = result.fault if wanted["must_fit"] else None
    finish(
        module,
        [refusal] if refusal else [],
        changed=False,
        fits=made.fits,
        reason=made.reason,
        architecture=made.facts.architecture,
        per_gpu=[gpu.as_dict() for gpu in made.per_gpu],
        host_mib=made.host_mib,
        page_cache_mib=made.page_cache_mib,
        max_context_per_request=result.max_context_per_request,
        max_parallel=result.max_parallel,
        total_context=total_context(settings),
        nearest=None
        if nearest is None
        else {
            "context_per_request": nearest.context_per_request,
            "parallel": nearest.parallel,
            "cache_type_k": nearest.cache_type_k,
            "cache_type_v": nearest.cache_type_v,
        },
        engine_arguments=engine_arguments(settings),
        table=[*planning.table(result, gpus), *(f"note: {note}" for note in taken)],
        notes=[*made.notes, *taken],
        gpus=[{"product": gpu.product, "memory_mib": gpu.memory_mib} for gpu in gpus],
    )


if __name__ == "__main__":
    main()
