#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a machine serves, read from its units."""

from __future__ import annotations

DOCUMENTATION = r"""
module: served_units
short_description: Read from a machine what llama-server and Ollama serve there
version_added: 0.1.0
description:
  - Reads the unit of llama-server and its instances, and that of Ollama where role C(ollama) has set it up, what systemd says of them, and the
    stamps of the model's files. An engine that stands by, stopped while the other one serves, is no fault. The settings of a run are
    not needed, so it works for whoever only has access to the machine.
  - Reports faults and does not fail for them, so that a play can go on to M(volta.llm.llm_probe). It changes nothing.
author:
  - The volta.llm authors
options:
  name:
    description: Name of the default unit, without C(.service); instances are C(NAME@*).
    type: str
    default: llama-server
extends_documentation_fragment:
  - volta.llm.machine.attributes
"""

EXAMPLES = r"""
- name: See what is served
  volta.llm.served_units:
  register: served

- name: Prove each of them
  volta.llm.llm_probe:
    base_url: "{{ item.base_url }}"
    api_key_file: "{{ item.has_keys | ternary(item.api_key_file, omit) }}"
    unit: "{{ item.name }}.service"
    timeout: 0
  loop: "{{ served.servers }}"
"""

RETURN = r"""
servers:
  description: The units, the default one first.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: Unit without its ending.
      type: str
      sample: llama-server
    base_url:
      description: Where a client on the machine itself reaches it, ending in C(/v1).
      type: str
      sample: http://127.0.0.1:8080/v1
    host:
      description: Address it listens on.
      type: str
    port:
      description: TCP port.
      type: int
    alias:
      description: Name of the model for clients.
      type: str
    backend:
      description: V(cuda) where layers are put on GPUs, else V(cpu).
      type: str
    parallel:
      description: Requests at once.
      type: int
    context_per_request:
      description: Tokens of one request, by the command line; 0 where it does not say.
      type: int
    has_keys:
      description: Whether it asks for an API key.
      type: bool
    api_key_file:
      description: File with the keys; empty where there are none.
      type: str
    model_files:
      description: The model's files, all shards.
      type: list
      elements: str
    load_timeout:
      description: Seconds that the unit allows for loading.
      type: int
    memory:
      description: What it held of each GPU when it was proved, as the option of the same name of M(volta.llm.llm_probe) takes it.
      type: list
      elements: dict
    state:
      description: What systemd says of it.
      type: str
      sample: active (running)
    since:
      description: When it last became ready. Null when it never did.
      type: str
      sample: Mon 2026-11-30 12:10:01 UTC
    restarts:
      description: How often systemd has started it again by itself within a day. Null when that is not known.
      type: int
    status_text:
      description: What the unit says of itself, such as the cause of a failed start.
      type: str
    running:
      description: Whether it runs, or is on its way.
      type: bool
    at_boot:
      description: Whether it is started at boot.
      type: bool
    stands_by:
      description: Whether it is stopped and not enabled, as it is to be while the other engine serves.
      type: bool
engines:
  description: All units by engine.
  returned: always
  type: dict
  contains:
    llama_server:
      description: As RV(servers).
      type: list
      elements: dict
    ollama:
      description: Ollama, where role C(ollama) has set it up; empty elsewhere.
      type: list
      elements: dict
      contains:
        name:
          description: Unit without its ending.
          type: str
        base_url:
          description: Where a client on the machine itself reaches it, ending in C(/v1).
          type: str
        root_url:
          description: The same without C(/v1), for Ollama's own API.
          type: str
        host:
          description: Address it listens on.
          type: str
        port:
          description: TCP port.
          type: int
        backend:
          description: V(cuda) or V(cpu).
          type: str
        parallel:
          description: Requests at once.
          type: int
        context_per_request:
          description: Tokens of one request.
          type: int
        has_keys:
          description: Always false, Ollama has none.
          type: bool
        api_key_file:
          description: Always empty.
          type: str
        models_directory:
          description: Folder of its models.
          type: str
        alias:
          description: The first of C(models) for clients to ask for; empty where there is none.
          type: str
        models:
          description: Names of the models in it.
          type: list
          elements: str
        state:
          description: What systemd says of it.
          type: str
        running:
          description: Whether it runs, or is on its way.
          type: bool
        since:
          description: When it last became ready. Null when it never did.
          type: str
        restarts:
          description: How often systemd has started it again by itself within a day. Null when that is not known.
          type: int
        status_text:
          description: What the unit says of itself.
          type: str
        at_boot:
          description: Whether it is started at boot.
          type: bool
        stands_by:
          description: Whether it is stopped and not enabled, as it is to be while the other engine serves.
          type: bool
faults:
  description: What is wrong with units and files, most serious first. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: Stable name of the kind of fault.
      type: str
      sample: service_not_running
    subject:
      description: What it concerns.
      type: str
    message:
      description: What was found against what was expected.
      type: str
    remedy:
      description: What to do.
      type: str
"""

from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.ollama import served as ollama
from ansible_collections.volta.llm.plugins.module_utils.results import as_shown
from ansible_collections.volta.llm.plugins.module_utils.serving import served


def main() -> None:
    module = VoltaModule(argument_spec={"name": {"type": "str", "default": "llama-server"}}, supports_check_mode=True)
    name = module.params["name"]
    servers = served.look(name)
    beside = ollama.look()
    others = [beside] if beside else []
    found, others = served.standing_by(servers, others), served.standing_by(others, servers)
    faults = [fault for unit in [*found, *others] for fault in unit.faults]
    module.exit_json(
        changed=False,
        servers=[unit.server for unit in found],
        engines={"llama_server": [unit.server for unit in found], "ollama": [unit.server for unit in others]},
        faults=[fault.as_dict() for fault in as_shown(module, faults if found or others else [served.missing(name)])],
    )


if __name__ == "__main__":
    main()
