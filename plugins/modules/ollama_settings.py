#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From the operator's words to the unit of Ollama; refuses what cannot work, and what Ollama would pass over."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ollama_settings
short_description: Judge settings of Ollama and compute its unit
version_added: 0.1.0
description:
  - Turns settings in an operator's words into a systemd drop-in for C(ollama.service), and into a unit file where the machine has none.
    Refuses what cannot work, with the reason and what to write instead, all findings at once, before anything is downloaded or changed.
  - Ollama passes over variables that it does not know and values that it cannot read, and goes to the CPU without a word. So every name is
    compared with the list of what this release reads, every value is read as Ollama reads it, and release, driver, cards and models are
    compared with the table of M(volta.llm.compat_check).
  - Looks at the machine for it, at its GPUs and who holds their memory, who listens on the port, the parents of the models' folder, and the
    files that make up the unit.
  - A drop-in of others that would win over these settings is refused, with file and line. A unit file of the vendor that was edited by hand is
    left as it is, and what was edited is reported as a warning.
  - Changes nothing. Module M(volta.llm.service_unit) puts the drop-in into use.
author:
  - The volta.llm authors
options:
  version:
    description: The release, such as V(0.24.0). A moving name such as V(latest) is refused.
    type: str
    default: 0.24.0
  user:
    description: Account that the service runs as. Root, a person's account and the one that Ansible logs in with are refused.
    type: str
    default: ollama
  models_directory:
    description: Folder of the models. The account must be able to enter every parent.
    type: path
    default: /var/lib/ollama/models
  host:
    description: Address to listen on. Any other than a loopback address needs O(allowed_clients) or O(open_to_network), since Ollama has no key.
    type: str
    default: 127.0.0.1
  port:
    description: TCP port, from 1024.
    type: int
    default: 11434
  allowed_clients:
    description:
      - Networks (CIDR) whose machines may reach the service, beside loopback. A table of its own in nftables enforces them, since systemd's
        filter would also keep the service from the registry.
    type: list
    elements: str
    default: []
  open_to_network:
    description: Whether an address that other machines reach is accepted without O(allowed_clients).
    type: bool
    default: false
  backend:
    description: V(cuda) needs GPUs, V(cpu) uses none.
    type: str
    choices: [cuda, cpu]
    default: cuda
  gpus:
    description: GPUs to use, each by index (as C(nvidia-smi) counts), bus id or UUID. Empty uses all.
    type: list
    elements: str
    default: []
  other_gpus:
    description:
      - GPUs of another engine that runs at the same time, written as O(gpus), or V([all]). They must be others. Empty where no other runs.
    type: list
    elements: str
    default: []
  llm_library:
    description:
      - Folder below C(lib/ollama) whose libraries are used. V(auto) is V(cuda_v12) where a card is older than compute capability 7.5, as V100
        is, and otherwise leaves it to Ollama.
    type: str
    default: auto
  context_length:
    description:
      - Tokens that a request may use, prompt and answer together, where the model or the request says nothing else. Ollama would take 262144
        on large cards.
    type: int
    default: 8192
  num_parallel:
    description: Requests that a model works on at once. Each has a context of its own, so memory grows with both.
    type: int
    default: 1
  keep_alive:
    description: How long a model stays in memory after its last request, such as V(30m). V(-1) keeps it for ever, V(0) unloads it at once.
    type: str
    default: 30m
  load_timeout:
    description: Seconds without progress after which loading a model is given up. V(0) takes it from the size of the largest of O(models).
    type: int
    default: 0
  device_timeout:
    description:
      - Seconds to wait before a start for the device nodes of all GPUs, without which Ollama runs on the CPU. V(0) does not wait, as where GPUs
        are simulated.
    type: int
    default: 60
  max_loaded_models:
    description: Models in memory at once.
    type: int
    default: 1
  max_queue:
    description: Requests that wait before further ones are refused.
    type: int
    default: 512
  flash_attention:
    description: Whether to use flash attention; V(auto) leaves it to Ollama.
    type: str
    choices: [auto, 'on', 'off']
    default: auto
  kv_cache_type:
    description: Type of the KV cache. A quantised one needs O(flash_attention=on).
    type: str
    choices: [f16, q8_0, q4_0]
    default: f16
  origins:
    description: Web pages that may ask Ollama from a browser, such as V(https://chat.example.org), beside those of the machine itself.
    type: list
    elements: str
    default: []
  no_cloud:
    description: Whether models that run at the vendor's cloud, and its web search, are switched off, so that no prompt leaves the machine.
    type: bool
    default: true
  environment:
    description: Further variables of the service. What has an option here is refused, and so is what this release does not read.
    type: dict
    default: {}
  models:
    description:
      - Models that the service is to have, each with C(name), and C(gguf), C(architecture) and C(size) (bytes) as far as they are known. See
        M(volta.llm.ollama_model).
    type: list
    elements: dict
    default: []
  conflicts:
    description: Units that must not run at the same time. Starting one stops the other.
    type: list
    elements: str
    default: []
  state:
    description: V(stopped) does not look at who has the GPUs and the port.
    type: str
    choices: [started, stopped]
    default: started
  prefix:
    description: Folder of the releases, see M(volta.llm.ollama_release).
    type: path
    default: /opt/ollama
  guard:
    description: Program that the unit runs before and after the service's start.
    type: path
    default: /usr/local/lib/volta-llm/llama-server-guard
  sysroot:
    description:
      - Folder below which C(/proc) and C(/sys) are read for the GPUs. Unit, folders and ports are always those of this machine.
    type: path
    default: /
extends_documentation_fragment:
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
"""

EXAMPLES = r"""
- name: See whether this can work, and what would be written
  volta.llm.ollama_settings:
    version: 0.24.0
    context_length: 16384
    gpus: [0, 1]
    environment:
      OLLAMA_SCHED_SPREAD: true
    models:
      - name: qwen3:8b
  register: plan

- name: Show every variable, and the file that it comes from
  ansible.builtin.debug:
    var: plan.effective_environment
"""

RETURN = r"""
version:
  description: The release.
  returned: success
  type: str
unit:
  description: Text of the unit file to write. Null where there is one of others, which stays as it is.
  returned: success
  type: str
dropin:
  description: Text of the drop-in C(50-volta.conf).
  returned: success
  type: str
dropin_path:
  description: Its path.
  returned: success
  type: str
  sample: /etc/systemd/system/ollama.service.d/50-volta.conf
binary:
  description: The program that the unit runs.
  returned: success
  type: str
  sample: /opt/ollama/current/bin/ollama
secrets_file:
  description: File of the variables that hold a login, which the drop-in names and the role writes for root alone. Null where there is none.
  returned: success
  type: str
  sample: /etc/ollama/secrets.env
secret_names:
  description: Their names.
  returned: success
  type: list
  elements: str
  sample: [HTTPS_PROXY]
environment:
  description: Variables that drop-in and RV(secrets_file) set. A login within an address is cut out.
  returned: success
  type: dict
  sample: {OLLAMA_HOST: '127.0.0.1:11434', OLLAMA_CONTEXT_LENGTH: '8192'}
effective_environment:
  description: Variables that the service will have from all files of its unit together.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Name of the variable.
      type: str
      sample: OLLAMA_HOST
    value:
      description: Its value. A login within an address is cut out.
      type: str
    file:
      description: The file that it comes from.
      type: str
      sample: /etc/systemd/system/ollama.service.d/50-volta.conf
    line:
      description: Number of the line in it.
      type: int
files:
  description: Files that belong to the unit, each with C(path) and C(content).
  returned: success
  type: list
  elements: dict
absent_files:
  description: Paths of such files that must not be there any more, once the unit is in use.
  returned: success
  type: list
  elements: str
conflicts:
  description: As O(conflicts).
  returned: success
  type: list
  elements: str
client_filter:
  description: What keeps other clients away, V(nftables). Null where nobody else reaches the address, or everybody may.
  returned: success
  type: str
account_exists:
  description: Whether there is an account O(user).
  returned: success
  type: bool
home:
  description: Folder for the service's key and caches.
  returned: success
  type: str
  sample: /var/lib/ollama
root_url:
  description: Address of Ollama's own API for clients on the machine itself.
  returned: success
  type: str
  sample: http://127.0.0.1:11434
base_url:
  description: Address of the OpenAI-compatible endpoint for clients on the machine itself.
  returned: success
  type: str
  sample: http://127.0.0.1:11434/v1
backend:
  description: As O(backend).
  returned: success
  type: str
gpus:
  description: Bus ids of the GPUs in use. Empty when they are not known, or without GPUs.
  returned: success
  type: list
  elements: str
  sample: ['0000:1a:00.0', '0000:1c:00.0']
gpu_count:
  description: GPUs in use. Null when unknown, or without GPUs.
  returned: success
  type: int
llm_library:
  description: The library that Ollama is told to use. Null where the choice is left to it.
  returned: success
  type: str
  sample: cuda_v12
load_timeout:
  description: Seconds without progress after which loading is given up.
  returned: success
  type: int
  sample: 600
start_timeout:
  description: Seconds to wait for the service to be ready, the wait for devices among them.
  returned: success
  type: int
endpoints:
  description: For each of O(models) what a client needs to know, in the form of RV(volta.llm.llama_server_arguments#module:servers).
  returned: success
  type: list
  elements: dict
notes:
  description: What is worth knowing of the settings and stands against nothing.
  returned: success
  type: list
  elements: str
warnings:
  description: Faults that are warnings, as text; they do not fail the module. Ansible shows them.
  returned: when there are some
  type: list
  elements: str
faults:
  description: What stands against the settings, most serious first. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: Stable name of the kind of fault.
      type: str
      sample: ollama_variable_unknown
    subject:
      description: The option, file or address concerned.
      type: str
      sample: 'environment: OLLAMA_NUM_GPU'
    message:
      description: What was found against what was expected.
      type: str
    remedy:
      description: What to write instead.
      type: str
"""

from typing import Any

from ansible_collections.volta.llm.plugins.module_utils.arguments import SYSROOT, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.faults import as_text, is_fatal
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.ollama.environment import CACHE_TYPES, login, written
from ansible_collections.volta.llm.plugins.module_utils.ollama.settings import (
    BACKENDS,
    FLASH_ATTENTION,
    STATES,
    Options,
    Settings,
    prepare,
)
from ansible_collections.volta.llm.plugins.module_utils.results import as_shown, finish

_LIST: dict[str, Any] = {"type": "list", "elements": "str", "default": []}
SETTINGS: dict[str, dict[str, Any]] = {
    "version": {"type": "str", "default": "0.24.0"},
    "user": {"type": "str", "default": "ollama"},
    "models_directory": {"type": "path", "default": "/var/lib/ollama/models"},
    "host": {"type": "str", "default": "127.0.0.1"},
    "port": {"type": "int", "default": 11434},
    "allowed_clients": _LIST,
    "open_to_network": {"type": "bool", "default": False},
    "backend": {"type": "str", "choices": list(BACKENDS), "default": "cuda"},
    "gpus": _LIST,
    "other_gpus": _LIST,
    "llm_library": {"type": "str", "default": "auto"},
    "context_length": {"type": "int", "default": 8192},
    "num_parallel": {"type": "int", "default": 1},
    "keep_alive": {"type": "str", "default": "30m"},
    "load_timeout": {"type": "int", "default": 0},
    "device_timeout": {"type": "int", "default": 60},
    "max_loaded_models": {"type": "int", "default": 1},
    "max_queue": {"type": "int", "default": 512},
    "flash_attention": {"type": "str", "choices": list(FLASH_ATTENTION), "default": "auto"},
    "kv_cache_type": {"type": "str", "choices": list(CACHE_TYPES), "default": "f16"},
    "origins": _LIST,
    "no_cloud": {"type": "bool", "default": True},
    "environment": {"type": "dict", "default": {}},
    "models": {"type": "list", "elements": "dict", "default": []},
    "conflicts": _LIST,
    "state": {"type": "str", "choices": list(STATES), "default": "started"},
}


def main() -> None:
    module = VoltaModule(
        argument_spec={
            **SETTINGS,
            "prefix": {"type": "path", "default": "/opt/ollama"},
            "guard": {"type": "path", "default": "/usr/local/lib/volta-llm/llama-server-guard"},
            **SYSROOT,
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    given = module.params
    # Of each address in a variable the login alone, and nothing like "true", is what nobody is to see.
    module.no_log_values.update(filter(None, (login(written(value)) for value in given["environment"].values())))
    settings = Settings(**{name: given[name] for name in SETTINGS})
    options = Options(prefix=given["prefix"], guard=given["guard"])
    prepared = prepare(settings, options, Machine(given["sysroot"]))
    for fault in as_shown(module, prepared.faults):
        if not is_fatal(fault):
            module.warn(as_text([fault]))
    # Of settings that are refused only the reasons are told: whole unit files would hide them.
    refused = any(map(is_fatal, prepared.faults))
    finish(module, prepared.faults, changed=False, **({} if refused else prepared.results))


if __name__ == "__main__":
    main()
