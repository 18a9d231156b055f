#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Persistence mode of the GPUs, and their power limit, now and at every boot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_persistence
short_description: Switch persistence mode on, and set the power limit, for good
version_added: 0.1.0
description:
  - Has C(nvidia-persistenced.service) started at every boot and running now, with persistence mode, before the engines, and only where the
    driver's module is loaded. A drop-in does that, since Ubuntu's unit starts the daemon with C(--no-persistence-mode) and stops it when
    nothing wants it. The account of the daemon stays the package's.
  - Where the daemon does not exist, a unit C(volta-nvidia-persistence.service) runs C(nvidia-smi -pm 1) at every boot. It is removed when
    the daemon comes.
  - Waits until persistence mode is on for every GPU. A daemon that runs and does not get there is started again once.
  - With O(power_limit_w) a unit C(volta-nvidia-power-limit.service) sets the limit at every boot, and the limit that the cards enforce is
    read back. Without it a limit that this module set is taken back to the default.
  - MIG and clocks are not touched.
author:
  - The volta.llm authors (@volta-llm)
options:
  engines:
    description: Units that are started after persistence mode is on, where both are started at boot.
    type: list
    elements: str
    default: [llama-server.service, ollama.service]
  start_timeout:
    description: Seconds that a unit may take to start. Registering eight cards takes 20 s and more.
    type: int
    default: 300
  wait:
    description: Seconds to wait for persistence mode.
    type: float
    default: 120.0
  power_limit_w:
    description: Power limit of every GPU in watts. Refused where it is outside of what a card takes. Without it the limit is left alone.
    type: float
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.nvidia_smi
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
attributes:
  diff_mode:
    support: full
seealso:
  - module: volta.llm.gpu_inventory
"""

EXAMPLES = r"""
- name: Keep persistence mode on
  volta.llm.gpu_persistence:

- name: Limit every card to 250 W as well
  volta.llm.gpu_persistence:
    power_limit_w: 250
"""

RETURN = r"""
mode:
  description: What switches persistence mode on, V(daemon) or V(legacy) (a unit with C(nvidia-smi -pm 1)). Null where there is no driver.
  returned: always
  type: str
  sample: daemon
would_verify:
  description: Whether the GPUs could not be looked at, as in check mode before there is a driver.
  returned: always
  type: bool
changes:
  description: What was done, in words; in check mode what would be.
  returned: always
  type: list
  elements: str
  sample: [wrote /etc/systemd/system/nvidia-persistenced.service.d/volta-llm.conf, restarted nvidia-persistenced.service]
gpus:
  description:
    - Every GPU that answers, with C(bus_id), C(persistence), C(power_limit_w) (the one that is enforced), C(power_limit_min_w),
      C(power_limit_max_w) and C(power_limit_default_w). Values that are not known are null.
  returned: always
  type: list
  elements: dict
  sample:
    - bus_id: "0000:1a:00.0"
      persistence: true
      power_limit_w: 300.0
      power_limit_min_w: 150.0
      power_limit_max_w: 300.0
      power_limit_default_w: 300.0
faults:
  description: What is wrong. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code: {description: Stable name of the kind of fault., type: str, sample: persistence_off}
    subject: {description: The GPU or the unit., type: str}
    message: {description: What was found., type: str}
    remedy: {description: What to do., type: str}
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, NVIDIA_SMI, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.nvidia.persistence import Persistence, Wanted
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            **MACHINE,
            **NVIDIA_SMI,
            **VARIABLES,
            "engines": {"type": "list", "elements": "str", "default": ["llama-server.service", "ollama.service"]},
            "start_timeout": {"type": "int", "default": 300},
            "wait": {"type": "float", "default": 120.0},
            "power_limit_w": {"type": "float"},
        },
        supports_check_mode=True,
    )
    given = module.params
    wanted = Wanted(
        engines=given["engines"],
        start_timeout=given["start_timeout"],
        wait=given["wait"],
        power_limit_w=given["power_limit_w"],
        nvidia_smi=given["nvidia_smi"],
    )
    outcome = Persistence(Machine(given["sysroot"], given["timeout"]), wanted).converge(module.check_mode)
    results = {
        "mode": outcome.mode,
        "would_verify": outcome.would_verify,
        "changes": outcome.changes,
        "gpus": [gpu.as_dict() for gpu in outcome.gpus],
    }
    if outcome.files:
        results["diff"] = [
            {"before_header": path, "after_header": path, "before": before, "after": after}
            for path, before, after in outcome.files
        ]
    finish(module, outcome.faults, changed=bool(outcome.changes), **results)


if __name__ == "__main__":
    main()
