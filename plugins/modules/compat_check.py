#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Judge whether driver, toolkit, compiler, engine, model and GPU go together."""

from __future__ import annotations

DOCUMENTATION = r"""
module: compat_check
short_description: May these parts work together?
version_added: 0.1.0
description:
  - Judges driver, CUDA toolkit, compiler, llama.cpp, Ollama, model architecture and GPU against one table of what is known, before anything
    is downloaded or built.
  - Every parameter is optional; what is given is judged together, what is not given is not guessed.
  - A combination that cannot work fails the task with the reason, its source and the nearest combination that works. Where sources disagree
    the safe side is taken and the fault says so.
  - Reads nothing from the machine and changes nothing. The whole table is in C(docs/compatibility.md).
author:
  - The volta.llm authors
options:
  driver:
    description:
      - Driver branch or version, as V(535) or V(535.288.01). A package name such as V(nvidia-driver-535-open) is read as well; its C(-open)
        ending then says the flavour.
    type: str
  flavour:
    description: Which kernel modules of the driver.
    type: str
    choices: [proprietary, open]
  gpu:
    description:
      - PCI device id (V(1db6), V(10de:1db6)) or product as C(nvidia-smi) names it (V(Tesla V100-SXM2-32GB)).
      - A GPU that the table does not know is noted, and no rule for Volta is applied to it.
    type: str
  gpu_count:
    description: Number of GPUs that will be used.
    type: int
  cuda:
    description: CUDA toolkit that compiles the engine, with its minor release, as V(12.2).
    type: str
  gcc:
    description: Host compiler that nvcc is given, as V(12) or V(12.3.0).
    type: str
  cmake:
    description: Version of cmake, as V(3.22).
    type: str
  compression:
    description: C(GGML_CUDA_COMPRESSION_MODE) of the engine's build.
    type: str
    choices: [none, speed, balance, size]
  llama_cpp:
    description: llama.cpp by release (V(0.5.0)) or build number (V(b10809)).
    type: str
  ollama:
    description: Ollama by release, as V(0.24.0).
    type: str
  architecture:
    description: Architecture of the model as its GGUF header names it, as V(qwen4exp).
    type: str
  shards:
    description: Number of files the model is split into.
    type: int
  split_mode:
    description: How the engine splits the model over the GPUs.
    type: str
    choices: [none, layer, row, tensor]
  cache_type:
    description: Type of the KV cache; give the smaller one where keys and values differ.
    type: str
    choices: [f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1]
  flash_attention:
    description: The engine's flash attention setting.
    type: str
    choices: [auto, 'on', 'off']
  fit:
    description: Whether the engine may change unset parameters to fit the memory (C(--fit)).
    type: bool
  secure_boot:
    description: Whether the machine boots with Secure Boot.
    type: bool
extends_documentation_fragment:
  - volta.llm.machine.attributes
"""

EXAMPLES = r"""
- name: Refuse a combination that cannot work before anything is downloaded
  volta.llm.compat_check:
    gpu: Tesla V100-SXM2-32GB
    gpu_count: 4
    driver: "535"
    cuda: "12.2"
    gcc: "12"
    llama_cpp: 0.5.0
    architecture: qwen4exp
    split_mode: layer
    cache_type: q8_0

- name: See what stands against an upgrade of Ollama
  volta.llm.compat_check:
    driver: "535"
    ollama: 0.30.5
    gpu: 1db6
  register: upgrade
  failed_when: false

- name: Show the nearest combination that works
  ansible.builtin.debug:
    var: upgrade.nearest
"""

RETURN = r"""
compatible:
  description: Whether nothing stands against the combination.
  returned: always
  type: bool
judged:
  description: What was given and judged, by parameter name.
  returned: always
  type: dict
  sample: {driver: "535", gpu: 1db6, ollama: 0.30.5}
nearest:
  description:
    - The whole combination that is allowed and differs least from what was given, as parameters of this module.
    - Null when nothing is wrong, when a value could not be read, or when none was found.
  returned: always
  type: dict
  sample: {driver: "535", gpu: 1db6, ollama: 0.24.0}
faults:
  description: What stands against it, most serious first. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: Stable name of the kind of fault.
      type: str
      sample: ollama_ignores_gpu
    subject:
      description: The parameters that do not go together, as given.
      type: str
      sample: driver=535 ollama=0.30.5
    message:
      description: Why, and who says so.
      type: str
    remedy:
      description: What to write instead.
      type: str
    source:
      description: Who says so.
      type: str
      sample: "ollama/ollama#16449, #17290 (discover/cuda_compat.go)"
    disputed:
      description: How sources disagree; empty where they do not.
      type: str
    nearest:
      description: The changes that mend this fault alone, best first.
      type: str
      sample: ollama=0.24.0 or driver=580
notes:
  description: What to know about the combination although it is allowed (end of life, untested, limits).
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: Stable name of the kind of note.
      type: str
      sample: driver_end_of_life
    subject:
      description: The parameters concerned, as given.
      type: str
    message:
      description: What to know.
      type: str
    source:
      description: Who says so.
      type: str
    disputed:
      description: How sources disagree; empty where they do not.
      type: str
"""

from ansible_collections.volta.llm.plugins.module_utils.compat import CACHE_TYPES, judge
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "driver": {"type": "str"},
            "flavour": {"type": "str", "choices": ["proprietary", "open"]},
            "gpu": {"type": "str"},
            "gpu_count": {"type": "int"},
            "cuda": {"type": "str"},
            "gcc": {"type": "str"},
            "cmake": {"type": "str"},
            "compression": {"type": "str", "choices": ["none", "speed", "balance", "size"]},
            "llama_cpp": {"type": "str"},
            "ollama": {"type": "str"},
            "architecture": {"type": "str"},
            "shards": {"type": "int"},
            "split_mode": {"type": "str", "choices": ["none", "layer", "row", "tensor"]},
            "cache_type": {"type": "str", "choices": list(CACHE_TYPES)},
            "flash_attention": {"type": "str", "choices": ["auto", "on", "off"]},
            "fit": {"type": "bool"},
            "secure_boot": {"type": "bool"},
        },
        supports_check_mode=True,
    )
    verdict = judge(module.params)
    finish(
        module,
        verdict.faults,
        changed=False,
        compatible=not verdict.faults,
        judged=verdict.judged,
        nearest=verdict.nearest,
        notes=[note.as_dict() for note in verdict.notes],
    )


if __name__ == "__main__":
    main()
