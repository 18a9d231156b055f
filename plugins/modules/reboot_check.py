#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether a machine must be rebooted before its NVIDIA driver works, and whether a reboot helped."""

from __future__ import annotations

DOCUMENTATION = r"""
module: reboot_check
short_description: Say whether a machine must be rebooted before its NVIDIA driver works
version_added: 0.1.0
description:
  - Judges the driver as M(volta.llm.driver_state) does. Where the modules are on disk and are not loaded, or only
    nvidia_uvm is not, it loads them first, which can save the reboot.
  - A reboot is required where it mends something, that is where another module, another kernel or the blacklist of nouveau waits for the next
    boot, or where the module cannot be loaded. Every other verdict but V(ok) is a failure with the faults of the driver.
  - Fails with the code C(reboot_required) where a reboot is required and may not be done. It never reboots anything itself.
  - Run again after the reboot with O(former_boot_id), it fails where the machine did not boot anew or the driver is still not in order.
  - In check mode it never fails, since earlier tasks have not done what they would do.
author:
  - The volta.llm authors (@volta-llm)
options:
  allowed:
    description: Whether the machine may be rebooted.
    type: bool
    default: false
  local:
    description: Whether Ansible runs on the machine itself. It is then never rebooted.
    type: bool
    default: false
  controller_boot_id:
    description: Boot id of the control node. Where it is the machine's own, Ansible runs on the machine itself, whatever the connection is.
    type: str
  load_modules:
    description: Whether to load nvidia and nvidia_uvm where they are on disk for the running kernel and not loaded.
    type: bool
    default: true
  newer_kernel:
    description: Whether a kernel that boots next and does not run is a reason for a reboot.
    type: bool
    default: false
  former_boot_id:
    description: Boot id before a reboot that was done.
    type: str
  earlier:
    description: Reasons of the reboots that were done in the same run. One of these again is no reason for another reboot.
    type: list
    elements: str
    default: []
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
seealso:
  - module: volta.llm.driver_state
"""

EXAMPLES = r"""
- name: See whether the machine must be rebooted
  volta.llm.reboot_check:
    allowed: "{{ reboot_gate_allowed | bool }}"
  register: gate

- name: Reboot
  ansible.builtin.reboot:
  when: gate.reboot

- name: Prove that the reboot was one, and that the driver works
  volta.llm.reboot_check:
    former_boot_id: "{{ gate.boot_id }}"
  when: gate.reboot
"""

RETURN = r"""
reason:
  description: Why a reboot is required; null where it is not.
  returned: always
  type: str
  sample: loaded 550.90.07, installed 550.107.02
reboot:
  description: Whether a reboot is required and may be done.
  returned: always
  type: bool
boot_id:
  description: The boot id, null where it cannot be read.
  returned: always
  type: str
  sample: 5c1a2b0e-9d0f-4a53-8d7e-0a4f5f0d8b11
loaded:
  description: Modules that were loaded; in check mode that would be.
  returned: always
  type: list
  elements: str
  sample: [nvidia, nvidia_uvm]
verdict:
  description: The verdict of M(volta.llm.driver_state) in the end.
  returned: always
  type: str
  sample: reboot_required
driver:
  description: The reason of that verdict.
  returned: always
  type: str
  sample: driver 535.261.03 is loaded and installed
kernels:
  description: C(running), C(next), C(next_from) and C(installed), as M(volta.llm.driver_state) has them.
  returned: always
  type: dict
faults:
  description: What is wrong. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code: {description: Stable name of the kind of fault., type: str, sample: reboot_required}
    subject: {description: The verdict or the part concerned., type: str}
    message: {description: What was found., type: str}
    remedy: {description: What to do., type: str}
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.boot import gate
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            **MACHINE,
            **VARIABLES,
            "allowed": {"type": "bool", "default": False},
            "local": {"type": "bool", "default": False},
            "controller_boot_id": {"type": "str"},
            "load_modules": {"type": "bool", "default": True},
            "newer_kernel": {"type": "bool", "default": False},
            "former_boot_id": {"type": "str"},
            "earlier": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    names = ("allowed", "local", "load_modules", "newer_kernel", "earlier")
    request = gate.Request(
        **{name: given[name] for name in names},
        controller_boot_id=(given["controller_boot_id"] or "").strip() or None,
        allow_with=f"{given['variable_prefix']}allowed=true",
        former_boot_id=(given["former_boot_id"] or "").strip() or None,
    )
    decision = gate.decide(Machine(given["sysroot"], given["timeout"]), request, module.check_mode)
    finish(
        module,
        decision.faults,
        changed=bool(decision.loaded),
        reason=decision.reason,
        reboot=decision.reboot,
        boot_id=decision.boot_id,
        loaded=decision.loaded,
        verdict=decision.judgement.verdict,
        driver=decision.judgement.reason,
        kernels=decision.state.kernels.as_dict(),
    )


if __name__ == "__main__":
    main()
