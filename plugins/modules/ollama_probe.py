#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Load a model of Ollama, see where it runs, ask it questions."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ollama_probe
short_description: Prove that Ollama serves a model on the GPUs
version_added: 0.1.0
description:
  - Waits until Ollama answers, loads a model and looks at what became of it. Nothing of the questions or answers is kept or reported.
  - "A model that is on the CPU, or in part, is a failure: by Ollama's own figures (C(size_vram) against C(size) of C(/api/ps)), by its log since
    its start (skipped devices, drivers that are too old, no GPU found) and by the memory that nvidia-smi shows for its processes. The table of
    input embeddings, which is always with the host, is let pass."
  - A prompt of more tokens than O(prompt_tokens_over) must be seen whole by C(/v1/chat/completions). Ollama cuts a longer one without an error.
  - A load that a time limit ended is told apart from a process that crashed.
  - A model that makes vectors (C(capabilities) of C(/api/show)) is asked for one instead of for text, and is sent no long prompt.
  - A model that limits its context itself, since it was made for less or has C(num_ctx) as a parameter, is held to that and is only warned of.
  - Loading a model can unload another one, where O(base_url) has no room for both. With O(proofs) a model that was proved before is not loaded
    while another one is. Apart from that this module changes nothing on the server.
  - Run it on the machine that serves, since it reads C(/proc) and the journal there.
author:
  - The volta.llm authors
options:
  base_url:
    description:
      - Address of Ollama, with or without C(/v1) at the end.
    type: str
    default: http://127.0.0.1:11434
  model:
    description:
      - Name of the model, as C(ollama list) has it.
      - Not given, it is one that is in memory, which is not loaded anew for another context; where none is, the smallest that makes text.
    type: str
  expect_gpu:
    description:
      - Whether all of the model must be on GPUs.
    type: bool
    default: true
  expect_context:
    description:
      - Tokens that the model must at least be loaded with. Not given, any number is right.
    type: int
  keep_alive:
    description:
      - How long the model must stay loaded when nobody asks for a time, as C(OLLAMA_KEEP_ALIVE) has it, such as V(30m), V(-1) for ever or V(0).
        Not given, it is not looked at.
      - With V(0) the model is unloaded and loaded once more.
    type: str
  prompt_tokens_over:
    description:
      - The long prompt has more tokens than this, and more than this must be seen. The default is the context of a release that was told none.
        V(0) sends no long prompt.
    type: int
    default: 4096
  unit:
    description:
      - systemd unit of the service. With it the log, the memory on the GPUs and the listening process are looked at too.
    type: str
  proofs:
    description:
      - File that keeps which models were proved, by their digests. Such a one is left alone where asking it would take a model from those who work
        with it, which is when another model is in memory and this one is not, or this one with more context than is asked for. Log and whatever is
        in memory are looked at all the same.
      - Not given, O(model) is always loaded and asked.
    type: path
  proof_of:
    description:
      - Settings under which what O(proofs) keeps counts, in any words. With others each model is proved again.
    type: str
    default: ""
  timeout:
    description:
      - Seconds to wait until Ollama answers.
    type: float
    default: 60.0
  load_timeout:
    description:
      - Seconds to wait until the model is loaded. It should be longer than C(OLLAMA_LOAD_TIMEOUT), which ends a load that does not get on.
    type: float
    default: 900.0
  answer_timeout:
    description:
      - Seconds to wait for an answer of the loaded model.
    type: float
    default: 300.0
  sysroot:
    description:
      - When it holds a folder C(commands/), the output of nvidia-smi recorded there answers. Processes and journal are always those of this
        machine.
    type: path
    default: /
extends_documentation_fragment:
  - volta.llm.machine.nvidia_smi
  - volta.llm.machine.attributes
attributes:
  check_mode:
    details:
      - In check mode nothing is loaded and nothing asked. A model that is loaded anyway is looked at; otherwise RV(would_verify) is true.
"""

EXAMPLES = r"""
- name: Prove that the model is on the GPUs and sees long prompts
  volta.llm.ollama_probe:
    model: qwen3:8b
    unit: ollama.service
    expect_context: 16384
    keep_alive: 30m
  register: truth

- name: Show where it is and how fast it is
  ansible.builtin.debug:
    msg: "{{ (truth.gpu_share * 100) | round }} % on the GPUs, {{ truth.tokens_per_second }} tokens/s"
"""

RETURN = r"""
would_verify:
  description: Whether this was check mode and there was nothing to look at yet.
  returned: always
  type: bool
model:
  description: Name of the model that was asked. Null when there was none.
  returned: always
  type: str
  sample: qwen3:8b
kind:
  description: What it makes, C(completion) or C(embedding). Null when that was not asked.
  returned: always
  type: str
  sample: completion
proved_before:
  description: Whether it was asked nothing, so that a model in use stays in memory; see O(proofs).
  returned: always
  type: bool
version:
  description: Release of Ollama that answers. Null when none does.
  returned: always
  type: str
  sample: 0.24.0
ready_s:
  description: Seconds waited until it answered. Null when it did not.
  returned: always
  type: float
  sample: 0.02
load_s:
  description: Seconds that the load took, next to nothing for a model that was loaded before. Null when it was not loaded.
  returned: always
  type: float
  sample: 7.4
loaded_before:
  description: Whether the model was loaded already. Null when that was not asked.
  returned: always
  type: bool
pid:
  description: Main process of O(unit). Null when no unit was given or it does not run.
  returned: always
  type: int
  sample: 4711
size:
  description: Bytes that the model takes in memory, by Ollama's figures. Null when it is not loaded.
  returned: always
  type: int
  sample: 6654289920
size_vram:
  description: Bytes of it that are on GPUs.
  returned: always
  type: int
  sample: 6654289920
gpu_share:
  description: The part of it that is on GPUs, 0 to 1.
  returned: always
  type: float
  sample: 1.0
gpu_memory:
  description: MiB that processes of O(unit) hold on each GPU, by the GPU's UUID; null for a figure that nvidia-smi does not give.
  returned: always
  type: dict
  sample: {GPU-6d8f1c2e-0000-0000-0000-000000000001: 6478}
context:
  description: Tokens that the model is loaded with. Null when the release does not tell.
  returned: always
  type: int
  sample: 16384
prompt_tokens:
  description: Tokens of the long prompt that the model saw. Null when none was sent.
  returned: always
  type: int
  sample: 4750
tokens_per_second:
  description: Speed of an answer's generation, by Ollama's own clock.
  returned: always
  type: float
  sample: 71.2
expires_at:
  description: When the model is unloaded if nobody asks it anything.
  returned: always
  type: str
  sample: "2026-11-30T16:05:12.123456789+01:00"
faults:
  description: What is wrong, most serious first. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: Stable name of the kind of fault.
      type: str
      sample: ollama_partly_on_cpu
    subject:
      description: What it concerns, an address, a unit or a model.
      type: str
    message:
      description: What was found against what was expected.
      type: str
    remedy:
      description: What to do.
      type: str
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import NVIDIA_SMI, SYSROOT
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault, FaultError
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.ollama.catalogue import fault
from ansible_collections.volta.llm.plugins.module_utils.ollama.probe import Finding, Probe, Question
from ansible_collections.volta.llm.plugins.module_utils.results import finish

#: What means "not there yet" and is therefore no fault in check mode.
NOT_THERE = ("ollama_not_answering", "service_not_running", "ollama_model_unknown")


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "base_url": {"type": "str", "default": "http://127.0.0.1:11434"},
            "model": {"type": "str"},
            "expect_gpu": {"type": "bool", "default": True},
            "expect_context": {"type": "int"},
            "keep_alive": {"type": "str"},
            "prompt_tokens_over": {"type": "int", "default": 4096, "no_log": False},
            "unit": {"type": "str"},
            "proofs": {"type": "path"},
            "proof_of": {"type": "str", "default": ""},
            "timeout": {"type": "float", "default": 60.0},
            "load_timeout": {"type": "float", "default": 900.0},
            "answer_timeout": {"type": "float", "default": 300.0},
            **NVIDIA_SMI,
            **SYSROOT,
        },
        supports_check_mode=True,
    )
    given = {name: value for name, value in module.params.items() if name != "sysroot"}
    check = module.check_mode
    faults: list[Fault] = []
    finding, judged = Finding(), False
    try:
        question = Question(**{**given, "load": not check, "timeout": 0.0 if check else given["timeout"]})
        probe = Probe(question, Machine(module.params["sysroot"]))
        faults = probe.examine()
        finding, judged = probe.finding, probe.judged
    except FaultError as exc:
        faults = [exc.fault]
    except ValueError as exc:
        faults = [fault("setting_invalid", "base_url", str(exc), "Write it like http://127.0.0.1:11434.")]
    missing = any(one.code in NOT_THERE for one in faults)
    finish(
        module,
        [one for one in faults if not (check and one.code in NOT_THERE)],
        changed=False,
        would_verify=check and (missing or not (judged or faults)),
        **finding.as_dict(),
    )


if __name__ == "__main__":
    main()
