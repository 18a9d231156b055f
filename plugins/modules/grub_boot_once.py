#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Boot another installed kernel once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: grub_boot_once
short_description: Boot an installed kernel once through GRUB
version_added: 0.1.0
description:
  - Tells GRUB to boot another kernel at the next boot than its default one, with C(grub-reboot). The boot after that is the default's again.
    Where GRUB cannot write its environment block (F(/boot) on LVM, RAID or btrfs) the choice stays until it is taken back.
  - Without O(kernel) it is the way back from a kernel that has no driver. When the kernel that boots next has an nvidia module, nothing is done;
    otherwise the running kernel is taken if it has one, else the newest that has.
  - Never reboots.
author:
  - The volta.llm authors
options:
  kernel:
    description: Release of the kernel, such as V(5.15.0-91-generic).
    type: str
  require_driver:
    description:
      - Whether it is a fault that no installed kernel has an nvidia module (C(no_kernel_with_driver)). Without it nothing is done then.
    type: bool
    default: true
  sysroot:
    description: Folder below which the running kernel, boot menu and kernel modules are read. C(grub-reboot) is the machine's own.
    type: path
    default: /
  timeout:
    description: Limit in seconds for each program that is run.
    type: float
    default: 30.0
extends_documentation_fragment:
  - volta.llm.machine.attributes
attributes:
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Go back to the kernel that has a driver
  volta.llm.grub_boot_once:

- name: Boot this one once
  volta.llm.grub_boot_once:
    kernel: 5.15.0-91-generic
"""

RETURN = r"""
kernel:
  description: The kernel that was chosen, null where the next boot is right as it is.
  returned: always
  type: str
  sample: 5.15.0-91-generic
entry:
  description: Its entry in GRUB's menu, as C(grub-reboot) takes it.
  returned: always
  type: str
kernels:
  description: The C(running) kernel, the C(next) one before any change, how that was found (C(next_from)) and the C(installed) ones.
  returned: always
  type: dict
faults:
  description: What went wrong. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
"""

from ansible_collections.volta.llm.plugins.module_utils.apt.boot_once import boot_once
from ansible_collections.volta.llm.plugins.module_utils.arguments import SYSROOT
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            **SYSROOT,
            "kernel": {"type": "str"},
            "require_driver": {"type": "bool", "default": True},
            "timeout": {"type": "float", "default": 30.0},
        },
        supports_check_mode=True,
    )
    given = module.params
    machine = Machine(given["sysroot"], given["timeout"])
    system = Machine("/", given["timeout"])
    outcome = boot_once(system, machine, given["kernel"] or None, module.check_mode, given["require_driver"])
    results = {"kernel": outcome.kernel, "entry": outcome.entry, "kernels": outcome.before.as_dict()}
    if outcome.changed:
        results["diff"] = {"before": f"{outcome.before.next}\n", "after": f"{outcome.kernel}\n"}
    finish(module, outcome.faults, changed=outcome.changed, **results)


if __name__ == "__main__":
    main()
