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
  - On GPUs it also counts what each of them will hold, by the plan of M(volta.llm.vram_plan) on this file and these cards and by the engine's
    C(llama-fit-params) where it is installed; the larger figure must fit. Another engine on these cards is refused. The tool is asked only
    before a change, since it opens the cards that a server may be at work on.
  - Several servers of one machine (O(instances)) are judged together, since they must not share a port or a GPU.
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
      - The model's own is the limit, or as far as C(--rope-scaling yarn) in O(extra_args) stretches it.
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
    description: GPUs to use, each by index (as C(nvidia-smi) counts), bus id, UUID or the beginning of one. Empty uses all that the NVIDIA
      driver runs.
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
      Above V(2048) the batch is as large.
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
  tls:
    description:
      - Serve HTTPS with C(certificate) and C(key), paths of PEM files on the machine. The key may be readable to root alone.
      - Refused when they do not belong together or the engine was built without OpenSSL.
    type: dict
    default: {}
  timeout:
    description: Seconds after which the server gives up a connection that neither reads nor writes. Not given, the engine decides.
    type: int
  allowed_clients:
    description:
      - Networks (CIDR) whose machines may reach the server, beside loopback. Empty leaves that to the machine's firewall.
      - Not needed on a loopback address.
    type: list
    elements: str
    default: []
  client_filter:
    description:
      - What enforces O(allowed_clients). V(auto) is V(systemd) (C(IPAddressAllow=) of the unit) where a trial shows that it works, else
        V(nftables), a table of its own that is set before each start.
    type: str
    choices: [auto, systemd, nftables]
    default: auto
  extra_args:
    description:
      - More arguments, option and value as words of their own. What has an option here is refused, as are presets of models, options that print
        and end, and C(--embeddings) and C(--reranking), with which no chat is answered.
    type: list
    elements: str
    default: []
  environment:
    description: Environment variables of the server.
    type: dict
    default: {}
  instances:
    description:
      - Further servers beside the default one, as units C(<name>@<instance>). What one does not say is as for the default server, except
        C(alias), C(gpus) and C(tensor_split).
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the instance, in small letters, digits and dashes.
        type: str
        required: true
      port:
        description: As O(port); no two servers share one.
        type: int
        required: true
      model:
        description: As O(model).
        type: path
      alias:
        description: As O(alias).
        type: str
      host:
        description: As O(host).
        type: str
      context_per_request:
        description: As O(context_per_request).
        type: int
      parallel:
        description: As O(parallel).
        type: int
      backend:
        description: As O(backend).
        type: str
        choices: [cuda, cpu]
      split_mode:
        description: As O(split_mode).
        type: str
        choices: [auto, none, layer, row, tensor]
      tensor_split:
        description: As O(tensor_split).
        type: raw
      gpus:
        description: As O(gpus).
        type: list
        elements: str
      cache_type_k:
        description: As O(cache_type_k).
        type: str
        choices: [f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1]
      cache_type_v:
        description: As O(cache_type_v).
        type: str
        choices: [f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1]
      flash_attention:
        description: As O(flash_attention).
        type: str
        choices: [auto, 'on', 'off']
      threads:
        description: As O(threads); V(0) leaves it to the engine.
        type: int
      ubatch:
        description: As O(ubatch); V(0) leaves it to the engine.
        type: int
      api_keys:
        description: As O(api_keys).
        type: list
        elements: str
      tls:
        description: As O(tls).
        type: dict
      timeout:
        description: As O(timeout); V(0) leaves it to the engine.
        type: int
      allowed_clients:
        description: As O(allowed_clients).
        type: list
        elements: str
      extra_args:
        description: As O(extra_args).
        type: list
        elements: str
      environment:
        description: As O(environment).
        type: dict
  allow_unverified_model:
    description:
      - Whether a model is accepted whose files no run of M(volta.llm.model_download) proved by SHA-256, or that changed since.
    type: bool
    default: false
  advertised_host:
    description: Name or address under which clients are told to call the server; judged only.
    type: str
    default: ''
  maintenance_restart:
    description:
      - Time of day (C(HH:MM), in quotes) at which a timer restarts the servers and asks each a first question. Empty for none.
    type: str
    default: ''
  maintenance_patience:
    description: Seconds to wait for running requests to end before the restart of that night is given up.
    type: int
    default: 1800
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
  returned: success
  type: list
  elements: str
  sample: [/opt/llama.cpp/current/bin/llama-server, --model, /srv/models/m.gguf, --ctx-size, '16384', --parallel, '2']
environment:
  description: Environment of the server.
  returned: success
  type: dict
  sample: {CUDA_DEVICE_ORDER: PCI_BUS_ID}
unit:
  description: Text of the default server's unit file.
  returned: success
  type: str
units:
  description: Text of each server's unit file, by its name without its ending.
  returned: success
  type: dict
servers:
  description:
    - All servers, the default one first; each with the values below of its own, the unit's C(name) without its ending and the C(instance) that it
      is, empty for the default one.
    - Also C(host), C(port), C(backend), C(parallel), C(api_key_file) and C(context_wanted), as its settings say.
  returned: success
  type: list
  elements: dict
  sample: [{name: llama-server, instance: '', port: 8080}, {name: llama-server@b, instance: b, port: 8081}]
leftover_units:
  description: Units of instances that this collection wrote and that O(instances) does not have any more, without their ending.
  returned: success
  type: list
  elements: str
  sample: [llama-server@old]
files:
  description: Files that belong to the units, each with C(path) and C(content); none holds a secret.
  returned: success
  type: list
  elements: dict
absent_files:
  description: Paths of such files that must not be there any more, once the units are in use.
  returned: success
  type: list
  elements: str
maintenance_timer:
  description: Unit of the timer of O(maintenance_restart).
  returned: success
  type: str
  sample: llama-server-maintenance.timer
maintenance_installed:
  description: Whether that timer is there now.
  returned: success
  type: bool
memory:
  description:
    - What each GPU in use will hold, in the engine's order; empty without GPUs, and where C(nvidia-smi) or the model do not answer.
  returned: success
  type: list
  elements: dict
  contains:
    index:
      description: Number of the GPU for the engine.
      type: int
    bus_id:
      description: Its bus id.
      type: str
    uuid:
      description: Its UUID.
      type: str
    product:
      description: Its name.
      type: str
    layers:
      description: Layers of the model on it.
      type: int
    overhead_mib:
      description: MiB that driver and engine take beside the engine's buffers; in all three sums.
      type: float
    planned_mib:
      description: MiB by the plan.
      type: float
    engine_mib:
      description: MiB by C(llama-fit-params), less what it is known to count too much; null where it said nothing or was not asked.
      type: float
    counted_mib:
      description: The larger of the two.
      type: float
    calibrated_mib:
      description: The same, and what servers on this machine have held of the card beyond what was counted for them.
      type: float
    memory_mib:
      description: MiB that the card has.
      type: float
client_filter:
  description: What keeps other clients away, V(systemd) or V(nftables). Null where O(allowed_clients) is empty or nobody else reaches the address.
  returned: success
  type: str
  sample: systemd
client_rules:
  description: Rules for C(nft -f), which the unit reads before each start; empty unless RV(client_filter) is V(nftables).
  returned: success
  type: str
account_exists:
  description: Whether there is an account O(user).
  returned: success
  type: bool
argument_files:
  description: Files that O(extra_args) names, which the server reads at its start.
  returned: success
  type: list
  elements: str
tls_files:
  description: Files of O(tls), which the server reads at its start.
  returned: success
  type: list
  elements: str
has_keys:
  description: Whether clients must present an API key.
  returned: success
  type: bool
metrics:
  description: Whether the server has C(/metrics).
  returned: success
  type: bool
model_files:
  description: Paths of all shards of the model; of a model in one file that one.
  returned: success
  type: list
  elements: str
  sample: [/srv/models/m-00001-of-00002.gguf, /srv/models/m-00002-of-00002.gguf]
alias:
  description: Name of the model for clients.
  returned: success
  type: str
  sample: qwen3.8-flash-next
base_url:
  description: Address of the endpoint for clients on the machine itself.
  returned: success
  type: str
  sample: http://127.0.0.1:8080/v1
split_mode:
  description: How the model is split; null without GPUs.
  returned: success
  type: str
  sample: layer
gpus:
  description: Bus ids of the GPUs in use, in the engine's order. Empty when they are not known, or without GPUs.
  returned: success
  type: list
  elements: str
  sample: ['0000:1a:00.0', '0000:1c:00.0']
gpu_count:
  description: GPUs in use. Null when unknown, or without GPUs.
  returned: success
  type: int
  sample: 4
context_per_request:
  description: Tokens that a request will be granted, O(context_per_request) rounded up to 256.
  returned: success
  type: int
  sample: 65536
total_context:
  description: Tokens in all, the engine's C(--ctx-size).
  returned: success
  type: int
  sample: 131072
architecture:
  description: Architecture of the model. Null when the file could not be read.
  returned: success
  type: str
  sample: qwen4exp
engine_version:
  description: Version of the installed engine. Null when it does not say.
  returned: success
  type: str
  sample: 0.5.0-dev
load_timeout:
  description: Seconds allowed for loading.
  returned: success
  type: int
  sample: 840
notes:
  description: What is worth knowing of the settings and stands against nothing.
  returned: success
  type: list
  elements: str
would_verify:
  description: Whether this was check mode and engine or model were missing, so that they were not judged.
  returned: success
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

from pathlib import PurePosixPath
from typing import Any

from ansible_collections.volta.llm.plugins.module_utils.arguments import SYSROOT, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.faults import is_fatal
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
from ansible_collections.volta.llm.plugins.module_utils.serving.clients import FILTERS
from ansible_collections.volta.llm.plugins.module_utils.serving.preparation import UnitOptions, prepare

#: What an instance may say otherwise than the default server.
SETTINGS: dict[str, dict[str, Any]] = {
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
    "tls": {"type": "dict", "default": {}},
    "timeout": {"type": "int"},
    "allowed_clients": {"type": "list", "elements": "str", "default": []},
    "extra_args": {"type": "list", "elements": "str", "default": []},
    "environment": {"type": "dict", "default": {}},
}


def of_an_instance() -> dict[str, dict[str, Any]]:
    """The same options without defaults: what is not given is as for the default server."""
    options = {
        name: {key: value for key, value in option.items() if key not in ("default", "required")}
        for name, option in SETTINGS.items()
    }
    return {"name": {"type": "str", "required": True}, **options, "port": {"type": "int", "required": True}}


def main() -> None:
    module = VoltaModule(
        argument_spec={
            **SETTINGS,
            "api_key_file": {"type": "path", "default": "/etc/llama-server/api-keys", "no_log": False},
            "instances": {"type": "list", "elements": "dict", "default": [], "options": of_an_instance()},
            "client_filter": {"type": "str", "choices": list(FILTERS), "default": "auto"},
            "allow_unverified_model": {"type": "bool", "default": False},
            "advertised_host": {"type": "str", "default": ""},
            "maintenance_restart": {"type": "str", "default": ""},
            "maintenance_patience": {"type": "int", "default": 1800},
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
    instances = given.pop("instances")
    options = UnitOptions(
        folder=str(PurePosixPath(given["api_key_file"]).parent),
        **{
            key: given.pop(key)
            for key in (
                *("name", "user", "load_timeout", "guard", "client_filter", "allow_unverified_model"),
                *("advertised_host", "maintenance_restart", "maintenance_patience"),
            )
        },
    )
    settings = Settings(unit=options.name, **given)
    prepared = prepare(settings, options, machine, check=module.check_mode, instances=instances)
    # Of settings that are refused only the reasons are told: a unit of a hundred lines would hide them.
    if any(map(is_fatal, prepared.faults)):
        finish(module, prepared.faults, changed=False)
    servers = [{key: value for key, value in server.items() if key != "unit"} for server in prepared.results["servers"]]
    units = {server["name"]: server["unit"] for server in prepared.results["servers"]}
    finish(module, prepared.faults, changed=False, **{**prepared.results, "servers": servers, "units": units})


if __name__ == "__main__":
    main()
