#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Can this ever work: settings, combination and memory judged before anything is changed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: plan_check
short_description: Can this ever work?
version_added: 0.1.0
description:
  - Asks at once what M(volta.llm.compat_check), M(volta.llm.vram_plan) and the settings check of M(volta.llm.llama_server_arguments) know, before a
    model is downloaded, an engine built or a driver installed. Fails with all faults of all three, most serious first.
  - Needs neither engine nor model nor driver. The model's header is read from its file, from the address it will come from (a few MB), or taken
    from the catalogue; GPUs are those named, those that C(nvidia-smi) shows, or, without a driver, those whose PCI ids are known.
  - What is not known is not judged, and RV(notes) says so. Changes nothing.
author:
  - The volta.llm authors
options:
  model:
    description:
      - Name in the catalogue (C(docs/models.md)), path or http(s) URL of the GGUF (the first shard of a set), or path of a saved header. It must
        be readable.
      - Without it the header is looked for at O(model_path), in the catalogue under O(model_name), and where the first of O(files) comes from.
    type: str
    default: ''
  model_path:
    description: Path at which the server will find the model. Empty where none is set up.
    type: str
    default: ''
  model_name:
    description: Name of the model; one of the catalogue is planned with the catalogue's figures until its file is there.
    type: str
    default: ''
  files:
    description: The model's files as M(volta.llm.model_download) takes them; the first is looked at.
    type: list
    elements: dict
    default: []
  sources:
    description: Places that have all files, as M(volta.llm.model_download) takes them.
    type: list
    elements: dict
    default: []
  token:
    description: Access token for the model hubs; sent to no other address.
    type: str
  gpus:
    description: GPUs by product, as V(4 x V100-SXM2-32GB). Empty looks at the machine.
    type: str
    default: ''
  read_machine:
    description: Whether to look for GPUs, driver and model on the machine. With V(false) O(gpus) is required.
    type: bool
    default: true
  driver:
    description: Driver branch or version that will be installed. Empty takes the loaded one.
    type: str
    default: ''
  flavour:
    description: Kernel modules of the driver, V(proprietary) or V(open).
    type: str
    default: ''
  cuda:
    description: CUDA toolkit that compiles the engine, as V(12.2).
    type: str
    default: ''
  engine:
    description: llama.cpp by release (V(0.5.0)) or build number (V(b10809)).
    type: str
    default: ''
  primary_engine:
    description: The engine that serves, V(llama_server) or V(ollama). Empty is not judged.
    type: str
    default: ''
  engines:
    description: Engines that the machine is to have, V(llama_server) or V(ollama).
    type: list
    elements: str
    default: []
  ollama:
    description: Release of Ollama that will be beside it, as V(0.24.0). Empty judges no combination with it.
    type: str
    default: ''
  ollama_environment:
    description: Its variables, as M(volta.llm.ollama_settings) takes them. Judged also where O(ollama) is empty.
    type: dict
    default: {}
  ollama_models:
    description: Its models, as M(volta.llm.ollama_settings) takes them.
    type: list
    elements: dict
    default: []
  overhead_mib:
    description: What driver and engine take of each GPU beside the engine's buffers. See M(volta.llm.vram_plan).
    type: raw
  alias:
    description: Name under which clients ask for the model.
    type: str
    default: ''
  host:
    description: Address to listen on. Any other than a loopback address needs O(api_keys).
    type: str
    default: 127.0.0.1
  port:
    description: TCP port, from 1024. Whether it is free is not asked here.
    type: raw
    default: 8080
  context_per_request:
    description:
      - Tokens each request may use, prompt and answer together.
      - What is no number is a fault among the others, here and with the other numbers.
    type: raw
    default: 8192
  parallel:
    description: Requests worked on at once.
    type: raw
    default: 1
  backend:
    description: V(cuda), or V(cpu) for a server that uses no GPU; then memory on GPUs is shown and decides nothing.
    type: str
    default: cuda
  split_mode:
    description: V(auto), V(none), V(layer), V(row) or V(tensor). Anything else is a fault among the others.
    type: str
    default: auto
  tensor_split:
    description: A list of numbers, the share of each GPU in use. Text is refused, since the engine misreads it.
    type: raw
    default: []
  gpu_selection:
    description: GPUs that the server may use, each by index, bus id or UUID. Empty uses all.
    type: list
    elements: str
    default: []
  cache_type_k:
    description: Type of the KV cache's keys, as V(f16) or V(q8_0).
    type: str
    default: f16
  cache_type_v:
    description: Type of the KV cache's values.
    type: str
    default: f16
  flash_attention:
    description: V(auto), V(on) or V(off).
    type: str
    default: auto
  threads:
    description: CPU threads of the engine.
    type: raw
  ubatch:
    description: Tokens in a micro-batch; the engine's own is 512.
    type: raw
  api_keys:
    description: Keys that clients may present. They are judged here, and never part of the result.
    type: list
    elements: str
    default: []
  extra_args:
    description: More arguments of the engine. What has an option here is refused.
    type: list
    elements: str
    default: []
  environment:
    description: Environment variables of the server.
    type: dict
    default: {}
  variable_names:
    description:
      - Variables by which options are set that are not called by O(variable_prefix), by option. Also those behind the words of the
        compatibility table, as V(nvidia_driver_branch) for C(driver). Used where O(variable_prefix) is given.
    type: dict
    default: {}
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.nvidia_smi
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
seealso:
  - module: volta.llm.compat_check
  - module: volta.llm.vram_plan
  - module: volta.llm.llama_server_arguments
"""

EXAMPLES = r"""
- name: Could four V100 serve the reference model to 64 people at once?
  volta.llm.plan_check:
    model: qwen3.8-flash-next-ud-q4_k_xl
    gpus: 4 x V100-SXM2-32GB
    read_machine: false
    driver: "535"
    engine: 0.5.0
    parallel: 64
    context_per_request: 262144
  delegate_to: localhost

- name: Refuse what cannot work on this machine before it costs an hour
  volta.llm.plan_check:
    model_path: /srv/models/qwen3-8b/Qwen3-8B-Q4_K_M.gguf
    files:
      - name: Qwen3-8B-Q4_K_M.gguf
        url: https://huggingface.co/Qwen/Qwen3-8B-GGUF/resolve/main/Qwen3-8B-Q4_K_M.gguf
    driver: "535"
    cuda: "12.2"
    host: 0.0.0.0
    api_keys: ["{{ vault_key }}"]
"""

RETURN = r"""
table:
  description: The whole verdict as lines for people.
  returned: always
  type: list
  elements: str
model:
  description: What was planned, the catalogue's name, path or URL; null when no header was found.
  returned: always
  type: str
architecture:
  description: Architecture of the model; null when no header was found.
  returned: always
  type: str
  sample: qwen4exp
gpus:
  description: The GPUs in use; empty when they are not known.
  returned: always
  type: list
  elements: dict
  sample: [{product: Tesla V100-SXM2-32GB, memory_mib: 32768.0}]
fits:
  description: Whether the model fits these GPUs; null when memory could not be planned.
  returned: always
  type: bool
per_gpu:
  description: What each GPU takes in MiB, as M(volta.llm.vram_plan) returns it; null when memory could not be planned.
  returned: always
  type: list
  elements: dict
max_context_per_request:
  description: Most tokens a request can be granted with everything else as it is; null when memory could not be planned.
  returned: always
  type: int
max_parallel:
  description: Most requests at once with everything else as it is; null when memory could not be planned.
  returned: always
  type: int
nearest:
  description: Settings that fit and differ least; null when it fits, nothing does, or memory could not be planned.
  returned: always
  type: dict
  sample: {context_per_request: 262144, parallel: 4, cache_type_k: f16, cache_type_v: f16}
notes:
  description: What to know although nothing stands against it, and what could not be judged.
  returned: always
  type: list
  elements: str
faults:
  description: What is wrong, most serious first. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  sample:
    - code: open_without_key
      subject: host
      message: "0.0.0.0 is reachable from other machines and no API key is set: anyone could use the model"
      remedy: Set api_keys (openssl rand -hex 24 makes one; keep it in a vault), or write 127.0.0.1.
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, NVIDIA_SMI, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.faults import assigned
from ansible_collections.volta.llm.plugins.module_utils.feasibility import NUMBERS, Request, consider, read_numbers
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.ollama.environment import login, written
from ansible_collections.volta.llm.plugins.module_utils.results import finish, names_of
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import Settings

#: Options that are the server's settings by the same name.
SERVER = (
    *("alias", "host", "port", "context_per_request", "parallel", "backend", "split_mode", "tensor_split"),
    *("cache_type_k", "cache_type_v", "flash_attention", "threads", "ubatch", "api_keys", "extra_args", "environment"),
)
#: Options that are the request's by the same name.
REQUEST = (
    *("model", "model_name", "files", "sources", "token", "gpus", "read_machine", "driver", "flavour", "cuda"),
    *("engine", "primary_engine", "engines", "ollama", "ollama_environment", "ollama_models", "nvidia_smi"),
)


def main() -> None:
    text = {"type": "str", "default": ""}
    module = VoltaModule(
        argument_spec={
            "model": text,
            "model_path": text,
            "model_name": text,
            "files": {"type": "list", "elements": "dict", "default": []},
            "sources": {"type": "list", "elements": "dict", "default": []},
            "token": {"type": "str", "no_log": True},
            "gpus": text,
            "read_machine": {"type": "bool", "default": True},
            "driver": text,
            "flavour": text,
            "cuda": text,
            "engine": text,
            "primary_engine": text,
            "engines": {"type": "list", "elements": "str", "default": []},
            "ollama": text,
            "ollama_environment": {"type": "dict", "default": {}},
            "ollama_models": {"type": "list", "elements": "dict", "default": []},
            "overhead_mib": {"type": "raw"},
            "alias": text,
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "raw", "default": 8080},
            "context_per_request": {"type": "raw", "default": 8192},
            "parallel": {"type": "raw", "default": 1},
            "backend": {"type": "str", "default": "cuda"},
            "split_mode": {"type": "str", "default": "auto"},
            "tensor_split": {"type": "raw", "default": []},
            "gpu_selection": {"type": "list", "elements": "str", "default": []},
            "cache_type_k": {"type": "str", "default": "f16"},
            "cache_type_v": {"type": "str", "default": "f16"},
            "flash_attention": {"type": "str", "default": "auto"},
            "threads": {"type": "raw"},
            "ubatch": {"type": "raw"},
            "api_keys": {"type": "list", "elements": "str", "default": [], "no_log": True},
            "extra_args": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "variable_names": {"type": "dict", "default": {}},
            **MACHINE,
            **NVIDIA_SMI,
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    given = module.params
    module.no_log_values.update(filter(None, (login(written(value)) for value in given["ollama_environment"].values())))
    numbers, unread = read_numbers(given)
    settings = {name: given[name] for name in SERVER if name not in NUMBERS}
    settings.update((name, numbers[name]) for name in SERVER if name in numbers)
    request = Request(
        server=Settings(model=given["model_path"], gpus=given["gpu_selection"], **settings),
        unread=unread,
        overhead_mib=numbers.get("overhead_mib"),
        **{name: given[name] for name in REQUEST},
    )
    machine = Machine(given["sysroot"], given["timeout"])
    verdict = consider(request, machine, given["timeout"])
    answer = verdict.answer
    nearest = answer.nearest if answer else None
    names = names_of(module)
    finish(
        module,
        verdict.faults,
        variables=("ollama", "ollama_environment", "ollama_models"),
        changed=False,
        table=[assigned(line, names) if line.startswith("  -> ") else line for line in verdict.lines],
        model=verdict.model,
        architecture=verdict.architecture,
        gpus=[{"product": gpu.product, "memory_mib": gpu.memory_mib} for gpu in verdict.gpus],
        fits=answer.plan.fits if answer else None,
        per_gpu=[gpu.as_dict() for gpu in answer.plan.per_gpu] if answer else None,
        max_context_per_request=answer.max_context_per_request if answer else None,
        max_parallel=answer.max_parallel if answer else None,
        nearest={
            "context_per_request": nearest.context_per_request,
            "parallel": nearest.parallel,
            "cache_type_k": nearest.cache_type_k,
            "cache_type_v": nearest.cache_type_v,
        }
        if nearest
        else None,
        notes=verdict.notes,
    )


if __name__ == "__main__":
    main()
