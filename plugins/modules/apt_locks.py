#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Wait until no program holds a lock of apt or dpkg."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_locks
short_description: Wait until no program holds a lock of apt or dpkg
version_added: 0.1.0
description:
  - Asks the kernel who holds C(/var/lib/dpkg/lock-frontend), C(/var/lib/dpkg/lock), C(/var/lib/apt/lists/lock) and
    C(/var/cache/apt/archives/lock), and waits until nobody does. After a boot apt's own timers often run first.
  - The locks are never taken, so asking holds nobody up.
author:
  - The volta.llm authors (@volta-llm)
options:
  wait:
    description: Seconds to wait. 0 only looks.
    type: float
    default: 600.0
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.attributes
"""

EXAMPLES = r"""
- name: Let apt's timers finish
  volta.llm.apt_locks:
    wait: 600
"""

RETURN = r"""
holders:
  description: Who held which lock when it was first looked at, each with C(path), C(pid) and C(program) (null where not told).
  returned: always
  type: list
  elements: dict
  sample: [{path: /var/lib/dpkg/lock-frontend, pid: 1234, program: unattended-upgr}]
waited:
  description: Seconds that were waited.
  returned: always
  type: float
  sample: 12.1
faults:
  description: Locks that are still held. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  contains:
    code: {description: Stable name of the kind of fault., type: str, sample: apt_locked}
    subject: {description: The lock., type: str}
    message: {description: Who holds it., type: str}
    remedy: {description: What to do., type: str}
"""

from dataclasses import asdict

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE
from ansible_collections.volta.llm.plugins.module_utils.boot import locks
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={**MACHINE, "wait": {"type": "float", "default": 600.0}},
        supports_check_mode=True,
    )
    machine = Machine(module.params["sysroot"], module.params["timeout"])
    first, faults, waited = locks.wait(machine, module.params["wait"])
    finish(module, faults, changed=False, holders=[asdict(holder) for holder in first], waited=round(waited, 1))


if __name__ == "__main__":
    main()
