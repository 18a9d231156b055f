#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Switch a service to another unit file or other settings beside it, and back when it does not become ready."""

from __future__ import annotations

DOCUMENTATION = r"""
module: service_unit
short_description: Switch a service to another unit file, and back when that does not work
version_added: 0.1.0
description:
  - Writes a systemd unit, restarts the service once and waits until it is ready. When it does not become ready, the former unit is put back and
    started again, and the task fails with the last lines of the service's journal.
  - A drop-in that changes what the unit says is refused before anything is done; one that only adds to it is not.
  - A unit that others wrote is left as it is, with settings of ours in a drop-in beside it (O(dropin)). Switching, and going back, are the same.
  - systemd reads the new unit before it replaces the one in use. A unit that never worked is removed again.
  - A process that outlives SIGKILL, as one does that hangs on a broken GPU, is reported; no second one is started beside it.
  - A unit counts as ready when C(systemctl restart) returns, so readiness belongs into the unit (C(ExecStartPost=)).
  - Restarts a running service also when a file it reads at its start is newer than the process or no longer the one that
    the process has mapped, or when it runs another program than the unit names, so that a run that was killed is completed by the next.
author:
  - The volta.llm authors
options:
  name:
    description: Name of the unit, with or without C(.service).
    type: str
    required: true
  content:
    description: Text of the unit file. Needed unless O(state=absent), or where O(dropin) goes beside a unit that is there.
    type: str
  dropin:
    description:
      - Text of a drop-in for the unit. Without O(content) the unit file is not touched.
      - Other drop-ins that set the same things and are read after it are refused.
    type: str
  dropin_name:
    description: Name of the drop-in's file. systemd reads drop-ins in the order of their names.
    type: str
    default: 50-volta.conf
  state:
    description: Whether the service runs. V(absent) stops, disables and removes it.
    type: str
    choices: [started, stopped, absent]
    default: started
  enabled:
    description: Whether the service is started at boot.
    type: bool
    default: true
  start_timeout:
    description:
      - Seconds to wait for a start. Give a little more than the unit's own C(TimeoutStartSec).
    type: float
    default: 660.0
  inputs:
    description: Files that the service reads at its start.
    type: list
    elements: path
    default: []
  executable:
    description: Program that the service runs. Links are followed, so a C(current) link that was switched calls for a restart.
    type: path
extends_documentation_fragment:
  - volta.llm.machine.attributes
attributes:
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Serve with the new settings, or go on with the old ones
  volta.llm.service_unit:
    name: llama-server
    content: "{{ plan.unit }}"
    start_timeout: "{{ plan.load_timeout + 60 }}"
    inputs: [/etc/llama-server/api-keys]
    executable: /opt/llama.cpp/current/bin/llama-server

- name: Give the vendor's service settings of ours
  volta.llm.service_unit:
    name: ollama
    dropin: |
      [Service]
      Environment=OLLAMA_CONTEXT_LENGTH=8192
"""

RETURN = r"""
changes:
  description: What was done, in words; in check mode what would be.
  returned: always
  type: list
  elements: str
  sample: [unit written, drop-in written, restarted]
reasons:
  description: Why a running service was restarted, in words; in check mode why it would be.
  returned: always
  type: list
  elements: str
  sample: [/etc/llama-server/api-keys was written since it started]
restarted:
  description: Whether the service was started or restarted.
  returned: always
  type: bool
rolled_back:
  description: Whether the former unit was put back and runs again.
  returned: always
  type: bool
faults:
  description: What went wrong. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: Stable name of the kind of fault.
      type: str
      sample: service_start_failed
    subject:
      description: The unit.
      type: str
    message:
      description: What happened, with the last lines of the journal.
      type: str
    remedy:
      description: What to do.
      type: str
"""

from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish
from ansible_collections.volta.llm.plugins.module_utils.serving.service import Service, Wanted


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "content": {"type": "str"},
            "dropin": {"type": "str"},
            "dropin_name": {"type": "str", "default": "50-volta.conf"},
            "state": {"type": "str", "choices": ["started", "stopped", "absent"], "default": "started"},
            "enabled": {"type": "bool", "default": True},
            "start_timeout": {"type": "float", "default": 660.0},
            "inputs": {"type": "list", "elements": "path", "default": []},
            "executable": {"type": "path"},
        },
        required_if=[
            ("state", "started", ["content", "dropin"], True),
            ("state", "stopped", ["content", "dropin"], True),
        ],
        supports_check_mode=True,
    )
    given = module.params
    wanted = Wanted(
        name=given["name"],
        content=given["content"] or "",
        started=given["state"] == "started",
        enabled=given["enabled"],
        start_timeout=given["start_timeout"],
        inputs=given["inputs"],
        executable=given["executable"],
        absent=given["state"] == "absent",
        dropin=given["dropin"] or "",
        dropin_name=given["dropin_name"],
    )
    service = Service(wanted)
    try:
        outcome = service.converge(check=module.check_mode)
    except FaultError as exc:
        finish(module, [exc.fault], changed=False, changes=[], reasons=[], restarted=False, rolled_back=False)
    if outcome.reasons and not module.check_mode:
        # In the machine's journal beside what the service says of its end.
        module.log(f"{service.name} was restarted once: {'; '.join(outcome.reasons)}")
    results = {
        "changes": list(outcome.changes),
        "reasons": list(outcome.reasons),
        "restarted": outcome.restarted,
        "rolled_back": outcome.rolled_back,
    }
    texts = (
        (service.path, outcome.before, outcome.after),
        (service.dropin_path, outcome.dropin_before, outcome.dropin_after),
    )
    results["diff"] = [
        {"before": before, "after": after, "before_header": str(path), "after_header": str(path)}
        for path, before, after in texts
        if before != after
    ]
    finish(module, outcome.faults, changed=bool(outcome.changes), **results)


if __name__ == "__main__":
    main()
