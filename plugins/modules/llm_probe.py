#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Wait for an endpoint, ask it one question, check what it runs on."""

from __future__ import annotations

DOCUMENTATION = r"""
module: llm_probe
short_description: Prove that an OpenAI-compatible endpoint serves
version_added: 0.1.0
description:
  - Waits until llama-server is ready and asks it one question. An answer that is empty, made of control characters or one token repeated is a
    failure, although its HTTP status is 200.
  - Tells apart a refused connection, a model that is still loading, a server that is busy with others, one that hangs and a service that has
    ended; see RV(state). A service that has ended fails at once, with its last lines.
  - Checks that the listening process is the service's, that model and file are the expected ones, how much context a request is granted, that
    the process holds memory on a GPU, and that the service said of none of its options at its start that it has no effect.
  - With O(memory) it compares what the process holds of each GPU with what was counted before. With O(calibration_file) that is kept, and the
    next plan on the machine counts what was short. Without it this module changes nothing.
  - Run it on the machine that serves, since it reads C(/proc) there.
author:
  - The volta.llm authors
options:
  base_url:
    description:
      - Address of the endpoint, with or without C(/v1) at the end.
    type: str
    default: http://127.0.0.1:8080/v1
  api_key:
    description:
      - Key to present. Excludes O(api_key_file).
    type: str
  api_key_file:
    description:
      - File on the target that holds keys, one a line; the first is presented. Excludes O(api_key).
    type: path
  validate_certs:
    description:
      - Whether the certificate of an C(https) endpoint must be trusted and name its address. A certificate rarely names C(127.0.0.1).
    type: bool
    default: true
  model:
    description:
      - Expected model, by id or alias. Not given, any model is right.
    type: str
  timeout:
    description:
      - Seconds to wait until the endpoint is ready.
    type: float
    default: 600.0
  answer_timeout:
    description:
      - Seconds to wait for the answer once the endpoint is ready. An endpoint that computes nothing in that time is asked once more.
    type: float
    default: 120.0
  expect_context_per_request:
    description:
      - Tokens that a request must at least be granted.
    type: int
  expect_gpu:
    description:
      - Whether the service must hold memory on a GPU. V(true) needs O(unit). V(false) and not given look at no GPU.
    type: bool
  unit:
    description:
      - systemd unit of the service. Its main process must be the one that listens.
    type: str
  model_files:
    description:
      - Files of the model. One that was replaced since the main process of O(unit) mapped it is a fault; without O(unit) they are not looked at.
    type: list
    elements: path
    default: []
  memory:
    description:
      - What was counted for each GPU before the start, as RV(volta.llm.llama_server_arguments#module:servers[].memory) has it. Of each entry
        C(uuid), C(bus_id) and C(counted_mib) are read. Looked at with O(expect_gpu) only.
    type: list
    elements: dict
    default: []
  calibration_file:
    description:
      - File on the target to keep the difference in, by O(unit). It is written when it is new or differs by more than 64 MiB from what is kept.
    type: path
  prompt:
    description:
      - The question. It is sent with temperature 0, so that the same server gives the same answer.
    type: str
    default: Reply with one short sentence.
  max_tokens:
    description:
      - Longest answer in tokens.
    type: int
    default: 48
  sysroot:
    description:
      - When it holds a folder C(commands/), the output of nvidia-smi recorded there answers. Processes are always those of this machine.
    type: path
    default: /
extends_documentation_fragment:
  - volta.llm.machine.nvidia_smi
  - volta.llm.machine.attributes
attributes:
  check_mode:
    details:
      - In check mode an endpoint that is not ready is not waited for and is no fault, since check mode did not start it; RV(would_verify) is
        true then.
"""

EXAMPLES = r"""
- name: Prove that the endpoint serves the model with the context asked for
  volta.llm.llm_probe:
    base_url: http://127.0.0.1:8080/v1
    api_key_file: /etc/llama-server/api-keys
    model: qwen3.8-flash-next
    unit: llama-server.service
    expect_context_per_request: 65536
    expect_gpu: true
  register: endpoint

- name: Show the answer and the speed
  ansible.builtin.debug:
    msg: "{{ endpoint.answer }} ({{ endpoint.tokens_per_second }} tokens/s)"
"""

RETURN = r"""
state:
  description:
    - What the endpoint is. Null when it was not asked, such as for want of a key.
    - V(refused) nothing listens; V(unresponsive) it takes connections and does not answer; V(unexpected) something else answers; V(ended) the
      service has ended; V(loading) the model is being loaded; V(ready); V(busy) ready, and every slot works on a request of others.
  returned: always
  type: str
  sample: ready
processing:
  description: Requests of others that were worked on when the question was asked. Null when the server does not say (C(/metrics)).
  returned: always
  type: int
  sample: 0
waiting:
  description: Requests of others that waited for a slot. Null when the server does not say.
  returned: always
  type: int
  sample: 0
memory:
  description: Each GPU of O(memory) against what the process holds of it.
  returned: always
  type: list
  elements: dict
  contains:
    uuid:
      description: UUID of the GPU.
      type: str
    bus_id:
      description: Bus id of the GPU.
      type: str
    counted_mib:
      description: MiB counted before the start.
      type: float
      sample: 20112.0
    measured_mib:
      description: MiB held. Null when nvidia-smi does not say.
      type: float
      sample: 20344.0
    deviation_mib:
      description: MiB held less MiB counted.
      type: float
      sample: 232.0
would_verify:
  description: Whether this was check mode and the endpoint was not ready, so that nothing was judged.
  returned: always
  type: bool
base_url:
  description: Address of the endpoint as a client writes it, ending in C(/v1).
  returned: always
  type: str
  sample: http://127.0.0.1:8080/v1
address:
  description: Address of this machine towards others, that of its default route. Null when there is none.
  returned: always
  type: str
  sample: 192.168.10.20
ready_s:
  description: Seconds waited until the endpoint was ready. Null when it did not become ready.
  returned: always
  type: float
  sample: 12.5
model:
  description: Id of the model that the endpoint offers.
  returned: always
  type: str
  sample: qwen3.8-flash-next
context_per_request:
  description: Tokens that the server grants one request, prompt and answer together. Null when it does not say.
  returned: always
  type: int
  sample: 65536
parallel:
  description: Requests that the server works on at once. Null when it does not say.
  returned: always
  type: int
  sample: 2
pid:
  description: Main process of O(unit). Null when no unit was given or it does not run.
  returned: always
  type: int
  sample: 4711
gpu_resident:
  description: Whether that process holds memory on a GPU. Null when it was not asked for, or could not be found out.
  returned: always
  type: bool
gpu_memory:
  description: MiB that the process holds on each GPU, by the GPU's UUID; null for a figure that nvidia-smi does not give.
  returned: always
  type: dict
  sample: {GPU-6d8f1c2e-0000-0000-0000-000000000001: 20112}
answer:
  description: The answer to the question.
  returned: always
  type: str
  sample: The river runs to the sea.
completion_tokens:
  description: Tokens in the answer.
  returned: always
  type: int
  sample: 9
tokens_per_second:
  description: Speed of the answer's generation, by the server's own clock where it tells it.
  returned: always
  type: float
  sample: 41.3
faults:
  description: What is wrong, most serious first. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: Stable name of the kind of fault.
      type: str
      sample: context_short
    subject:
      description: What it concerns, an address, a unit or an option.
      type: str
    message:
      description: What was found against what was expected.
      type: str
    remedy:
      description: What to do.
      type: str
"""

from pathlib import Path
from typing import Any

from ansible_collections.volta.llm.plugins.module_utils.arguments import NVIDIA_SMI, SYSROOT
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault, FaultError, is_fatal
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish
from ansible_collections.volta.llm.plugins.module_utils.serving import calibration
from ansible_collections.volta.llm.plugins.module_utils.serving.catalogue import CATALOGUE
from ansible_collections.volta.llm.plugins.module_utils.serving.keys import USABLE, first_key
from ansible_collections.volta.llm.plugins.module_utils.serving.probe import Probe, Question, check_address, own_address
from ansible_collections.volta.llm.plugins.module_utils.serving.service import full_name

#: What means "not there yet" and is therefore no fault in check mode.
NOT_THERE = ("endpoint_refused", "endpoint_loading_timeout", "service_not_running")


def keep(path: str, probe: Probe, check: bool) -> tuple[bool, list[Fault]]:
    """Whether what was measured is (or would be) written down for the next plan, and why it could not be."""
    found, question = probe.finding, probe.question
    settings: dict[str, Any] = {
        "model": question.model_files[0] if question.model_files else found.model,
        "context_per_request": found.context_per_request,
        "parallel": found.parallel,
    }
    server = full_name(question.unit) if question.unit else question.root
    try:
        return calibration.keep(Path(path), server, settings, probe.held, check), []
    except OSError as exc:
        remedy = "Make the folder writable for root; the server itself is not concerned."
        return False, [CATALOGUE.fault("calibration_not_kept", path, exc.strerror or str(exc), remedy)]


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "base_url": {"type": "str", "default": "http://127.0.0.1:8080/v1"},
            "api_key": {"type": "str", "no_log": True},
            "api_key_file": {"type": "path", "no_log": False},
            "validate_certs": {"type": "bool", "default": True},
            "model": {"type": "str"},
            "timeout": {"type": "float", "default": 600.0},
            "answer_timeout": {"type": "float", "default": 120.0},
            "expect_context_per_request": {"type": "int"},
            "expect_gpu": {"type": "bool"},
            "unit": {"type": "str"},
            "model_files": {"type": "list", "elements": "path", "default": []},
            "memory": {"type": "list", "elements": "dict", "default": []},
            "calibration_file": {"type": "path"},
            "prompt": {"type": "str", "default": "Reply with one short sentence."},
            "max_tokens": {"type": "int", "default": 48, "no_log": False},
            **NVIDIA_SMI,
            **SYSROOT,
        },
        mutually_exclusive=[("api_key", "api_key_file")],
        supports_check_mode=True,
    )
    given = module.params
    wrong = check_address(given["base_url"])
    faults: list[Fault] = [wrong] if wrong else []
    key = given["api_key"]
    if key and not USABLE.fullmatch(key):
        problem = "it holds a space or a character beyond ASCII, which no header of HTTP takes"
        faults.append(CATALOGUE.fault("wrong_key", "api_key", problem, "Give one of the server's keys."))
    if given["api_key_file"]:
        try:
            key = first_key(given["api_key_file"])
        except FaultError as exc:
            # In check mode the file may still have to be written.
            if not module.check_mode:
                faults.append(exc.fault)
    probe = Probe(
        Question(
            base_url=given["base_url"],
            api_key=key,
            validate_certs=given["validate_certs"],
            model=given["model"],
            timeout=0.0 if module.check_mode else given["timeout"],
            answer_timeout=given["answer_timeout"],
            context_per_request=given["expect_context_per_request"],
            unit=given["unit"],
            expect_gpu=given["expect_gpu"],
            prompt=given["prompt"],
            max_tokens=given["max_tokens"],
            nvidia_smi=given["nvidia_smi"],
            # Check mode does not restart a service that has former files.
            model_files=[] if module.check_mode else given["model_files"],
            memory=given["memory"],
        ),
        Machine(given["sysroot"]),
    )
    if not faults:
        faults = probe.examine()
    kept = False
    # What a server with a fault holds is no measure for the next.
    if given["calibration_file"] and not any(map(is_fatal, faults)):
        kept, problems = keep(given["calibration_file"], probe, module.check_mode)
        faults += problems
    would_verify = module.check_mode and any(fault.code in NOT_THERE for fault in faults)
    finish(
        module,
        [] if would_verify else faults,
        changed=kept,
        would_verify=would_verify,
        base_url=f"{probe.question.root}/v1",
        address=own_address(),
        **probe.finding.as_dict(),
    )


if __name__ == "__main__":
    main()
