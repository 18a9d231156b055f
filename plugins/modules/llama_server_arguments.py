#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From the operator's words to llama-server's arguments and unit; refuses what cannot work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: llama_server_arguments
short_description: Judge settings of llama-server and compute its unit
version_added: 0.1.0
description:
  - Turns settings in an operator's words into the command line and the systemd unit of llama-server. Refuses what cannot work, with the reason
    and what to write instead, all findings at once, before anything is changed.
  - Looks at the machine for it, at the installed engine's options, the model's header and shards, the GPUs, and who listens on the port.
  - The installed engine parses the arguments once, without loading the model.
  - Changes nothing. Module M(volta.llm.service_unit) puts the unit into use.
author:
  - The volta.llm authors
options:
  model:
    description: Path of the model; for a sharded model that of its first shard.
    type: path
    required: true
  alias:
    description: Name under which clients ask for the model. Empty takes it from the file's name.
    type: str
    default: ''
  host:
    description: Address to listen on. Any other than a loopback address needs O(api_keys).
    type: str
    default: 127.0.0.1
  port:
    description: TCP port, from 1024.
    type: int
    default: 8080
  context_per_request:
    description:
      - Tokens each request may use, prompt and answer together, from 512. The total that the engine wants is computed from this and O(parallel).
    type: int
    default: 8192
  parallel:
    description: Requests worked on at once; more wait.
    type: int
    default: 1
  backend:
    description: V(cuda) puts the whole model on the GPUs, V(cpu) uses none.
    type: str
    choices: [cuda, cpu]
    default: cuda
  split_mode:
    description:
      - How a model is split over several GPUs. V(auto) is V(layer).
      - V(row) and V(tensor) are refused where the engine or the model cannot do it.
    type: str
    choices: [auto, none, layer, row, tensor]
    default: auto
  tensor_split:
    description:
      - A list of numbers, the share of each GPU in use. Empty shares evenly. Text such as V(1:1) is refused, since the engine misreads it.
    type: raw
    default: []
  gpus:
    description: GPUs to use, each by index (as C(nvidia-smi) counts), bus id or UUID. Empty uses all.
    type: list
    elements: str
    default: []
  cache_type_k:
    description: Type of the KV cache's keys.
    type: str
    choices: [f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1]
    default: f16
  cache_type_v:
    description: Type of the KV cache's values. A quantised one needs flash attention.
    type: str
    choices: [f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1]
    default: f16
  flash_attention:
    description: Whether to use flash attention; V(auto) leaves it to the engine.
    type: str
    choices: [auto, 'on', 'off']
    default: auto
  threads:
    description: CPU threads. Not given, the engine decides.
    type: int
  ubatch:
    description: Tokens worked on in one step. Less saves GPU memory, more speeds up long prompts. Not given, the engine decides.
    type: int
  api_keys:
    description:
      - Keys that clients may present, each of at least 16 characters. They are judged here, and never part of the result.
    type: list
    elements: str
    default: []
  api_key_file:
    description: File that holds the keys, one a line. The server is told this path, never a key.
    type: path
    default: /etc/llama-server/api-keys
  extra_args:
    description: More arguments, word by word. What has an option here is refused.
    type: list
    elements: str
    default: []
  environment:
    description: Environment variables of the server.
    type: dict
    default: {}
  binary:
    description: The engine's program.
    type: path
    default: /opt/llama.cpp/current/bin/llama-server
  name:
    description: Name of the unit, without its ending.
    type: str
    default: llama-server
  user:
    description:
      - Account that the server runs as. Root, a person's account (user id from 1000) and the one that Ansible logs in with are refused.
    type: str
    default: llama-server
  load_timeout:
    description: Seconds until the model must be loaded. V(0) takes it from the model's size, at 150 MB/s.
    type: int
    default: 0
  guard:
    description: Program that the unit runs before and after the server's start.
    type: path
    default: /usr/local/lib/volta-llm/llama-server-guard
  sysroot:
    description:
      - Folder below which C(/sys) is read for the GPUs. Engine, model and ports are always those of this machine.
    type: path
    default: /
extends_documentation_fragment:
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
attributes:
  check_mode:
    details:
      - In check mode a missing engine or model is no fault, since check mode did not install it; RV(would_verify) is true then.
"""

EXAMPLES = r"""
- name: See what would be run, and whether it can work
  volta.llm.llama_server_arguments:
    model: /srv/models/Qwen3.8-Flash-Next-UD-Q4_K_XL-00001-of-00004.gguf
    alias: qwen3.8-flash-next
    context_per_request: 65536
    parallel: 2
    tensor_split: [1, 1, 1, 1]
  register: plan

- name: Show the command line
  ansible.builtin.debug:
    msg: "{{ plan.argv | join(' ') }}"
"""

RETURN = r"""
argv:
  description: The command line, word by word, beginning with the program.
  returned: always
  type: list
  elements: str
  sample: [/opt/llama.cpp/current/bin/llama-server, --model, /srv/models/m.gguf, --ctx-size, '16384', --parallel, '2']
environment:
  description: Environment of the server.
  returned: always
  type: dict
  sample: {CUDA_DEVICE_ORDER: PCI_BUS_ID}
unit:
  description: Text of the unit file.
  returned: always
  type: str
account_exists:
  description: Whether there is an account O(user).
  returned: always
  type: bool
model_files:
  description: Paths of all shards of the model; of a model in one file that one.
  returned: always
  type: list
  elements: str
  sample: [/srv/models/m-00001-of-00002.gguf, /srv/models/m-00002-of-00002.gguf]
alias:
  description: Name of the model for clients.
  returned: always
  type: str
  sample: qwen3.8-flash-next
base_url:
  description: Address of the endpoint for clients on the machine itself.
  returned: always
  type: str
  sample: http://127.0.0.1:8080/v1
split_mode:
  description: How the model is split; null without GPUs.
  returned: always
  type: str
  sample: layer
gpu_count:
  description: GPUs in use. Null when unknown, or without GPUs.
  returned: always
  type: int
  sample: 4
context_per_request:
  description: Tokens that a request will be granted, O(context_per_request) rounded up to 256.
  returned: always
  type: int
  sample: 65536
total_context:
  description: Tokens in all, the engine's C(--ctx-size).
  returned: always
  type: int
  sample: 131072
architecture:
  description: Architecture of the model. Null when the file could not be read.
  returned: always
  type: str
  sample: qwen4exp
engine_version:
  description: Version of the installed engine. Null when it does not say.
  returned: always
  type: str
  sample: 0.5.0-dev
load_timeout:
  description: Seconds allowed for loading.
  returned: always
  type: int
  sample: 840
notes:
  description: What is worth knowing of the settings and stands against nothing.
  returned: always
  type: list
  elements: str
would_verify:
  description: Whether this was check mode and engine or model were missing, so that they were not judged.
  returned: always
  type: bool
faults:
  description: What stands against the settings, most serious first. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: Stable name of the kind of fault.
      type: str
      sample: tensor_split_invalid
    subject:
      description: The option, file or address concerned.
      type: str
    message:
      description: What was found against what was expected.
      type: str
    remedy:
      description: What to write instead.
      type: str
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import SYSROOT, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import (
    BACKENDS,
    CACHE_TYPES,
    FLASH_ATTENTION,
    SPLIT_MODES,
    Settings,
)
from ansible_collections.volta.llm.plugins.module_utils.serving.preparation import UnitOptions, prepare


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "model": {"type": "path", "required": True},
            "alias": {"type": "str", "default": ""},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "default": 8080},
            "context_per_request": {"type": "int", "default": 8192},
            "parallel": {"type": "int", "default": 1},
            "backend": {"type": "str", "choices": list(BACKENDS), "default": "cuda"},
            "split_mode": {"type": "str", "choices": list(SPLIT_MODES), "default": "auto"},
            "tensor_split": {"type": "raw", "default": []},
            "gpus": {"type": "list", "elements": "str", "default": []},
            "cache_type_k": {"type": "str", "choices": list(CACHE_TYPES), "default": "f16"},
            "cache_type_v": {"type": "str", "choices": list(CACHE_TYPES), "default": "f16"},
            "flash_attention": {"type": "str", "choices": list(FLASH_ATTENTION), "default": "auto"},
            "threads": {"type": "int"},
            "ubatch": {"type": "int"},
            "api_keys": {"type": "list", "elements": "str", "default": [], "no_log": True},
            "api_key_file": {"type": "path", "default": "/etc/llama-server/api-keys", "no_log": False},
            "extra_args": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "binary": {"type": "path", "default": "/opt/llama.cpp/current/bin/llama-server"},
            "name": {"type": "str", "default": "llama-server"},
            "user": {"type": "str", "default": "llama-server"},
            "load_timeout": {"type": "int", "default": 0},
            "guard": {"type": "path", "default": "/usr/local/lib/volta-llm/llama-server-guard"},
            **SYSROOT,
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    given = dict(module.params)
    del given["variable_prefix"]
    machine = Machine(given.pop("sysroot"))
    options = UnitOptions(**{key: given.pop(key) for key in ("name", "user", "load_timeout", "guard")})
    prepared = prepare(Settings(**given), options, machine, check=module.check_mode)
    finish(module, prepared.faults, changed=False, **prepared.results)


if __name__ == "__main__":
    main()
