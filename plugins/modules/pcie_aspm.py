#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Read the power saving policy of PCIe, and set it now and at every boot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pcie_aspm
short_description: Read and set the power saving policy of PCIe
version_added: 0.1.0
description:
  - Reads the policy of PCIe Active State Power Management from C(/sys/module/pcie_aspm/parameters/policy).
  - With O(policy) sets it now, and at every boot by C(/etc/tmpfiles.d/volta-pcie-aspm.conf). Where the firmware denies it the module fails
    and nothing is left to be tried at boot.
author:
  - The volta.llm authors (@volta-llm)
options:
  policy:
    description: The policy. Without one it is left alone, and a file of this module's is removed; the policy in force then lasts until the next boot.
    type: str
    choices:
      default: What the firmware has set.
      performance: No power saving, so no delay of the first transfer.
      powersave: Power saving states where a device has them.
      powersupersave: The deeper ones too.
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.attributes
attributes:
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Read the policy
  volta.llm.pcie_aspm:
  check_mode: true
  register: aspm

- name: Have no power saving on the links of the cards
  volta.llm.pcie_aspm:
    policy: performance
"""

RETURN = r"""
policy:
  description: The policy in force; null where the kernel has none.
  returned: always
  type: str
  sample: performance
offered:
  description: The policies that the kernel has.
  returned: always
  type: list
  elements: str
  sample: [default, performance, powersave, powersupersave]
changes:
  description: What was done, in words; in check mode what would be.
  returned: always
  type: list
  elements: str
  sample: [wrote /etc/tmpfiles.d/volta-pcie-aspm.conf, policy default -> performance]
faults:
  description: What could not be done. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code: {description: Stable name of the kind of fault., type: str, sample: aspm_denied}
    subject: {description: The file., type: str}
    message: {description: What was found., type: str}
    remedy: {description: What to do., type: str}
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE
from ansible_collections.volta.llm.plugins.module_utils.boot import aspm
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={**MACHINE, "policy": {"type": "str", "choices": list(aspm.POLICIES)}},
        supports_check_mode=True,
    )
    machine = Machine(module.params["sysroot"], module.params["timeout"])
    outcome = aspm.converge(machine, module.params["policy"], module.check_mode)
    results = {"policy": outcome.policy, "offered": outcome.offered, "changes": outcome.changes}
    if outcome.before != outcome.after:
        results["diff"] = {
            "before": outcome.before,
            "after": outcome.after,
            "before_header": aspm.PATH,
            "after_header": aspm.PATH,
        }
    finish(module, outcome.faults, changed=bool(outcome.changes), **results)


if __name__ == "__main__":
    main()
