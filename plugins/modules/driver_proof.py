#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Proof that an installed driver will work after the next boot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_proof
short_description: Prove that an installed NVIDIA driver will work after the next boot
version_added: 0.1.0
description:
  - Judges what apt left on the disk, since its exit status proves nothing. Every package must be there and of the branch, and every kernel
    that can boot must have a module of that version with all its parts (nvidia, nvidia_modeset, nvidia_uvm, nvidia_drm), signed where
    Secure Boot is on.
  - A build that failed is shown with the end of its C(make.log). Changes nothing.
author:
  - The volta.llm authors (@volta-llm)
options:
  branch:
    description: Driver branch that all packages must be of.
    type: str
    required: true
  packages:
    description: Packages that must be there.
    type: list
    elements: str
    default: []
  kernels_without_driver:
    description: Installed kernels that may go without a driver.
    type: list
    elements: str
    default: []
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.attributes
  - volta.llm.machine.variables
"""

EXAMPLES = r"""
- name: Prove the driver before the machine reboots
  volta.llm.driver_proof:
    branch: "535"
    packages: [nvidia-utils-535-server]
"""

RETURN = r"""
version:
  description: The driver's version by its packages; null where none of O(packages) is of the branch.
  returned: always
  type: str
  sample: 535.261.03
kernels:
  description: C(running), C(next), C(next_from) and C(installed), as M(volta.llm.driver_state) returns them.
  returned: always
  type: dict
modules:
  description:
    - The module on disk for each kernel that can boot, with C(kernel), C(version), C(path), C(signed), C(signer), C(missing) (parts) and
      C(dkms) (states).
  returned: always
  type: list
  elements: dict
dkms_status:
  description: The driver's lines of C(dkms status).
  returned: always
  type: list
  elements: str
  sample: ["nvidia-srv/535.261.03, 5.15.0-139-generic, x86_64: installed"]
secure_boot:
  description: Whether Secure Boot is on; null where that cannot be told.
  returned: always
  type: bool
faults:
  description: What is wrong, with C(code), C(subject), C(message) and C(remedy). See C(docs/faults.md).
  returned: always
  type: list
  elements: dict
"""

from ansible_collections.volta.llm.plugins.module_utils.apt import status
from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver_proof
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "branch": {"type": "str", "required": True},
            "packages": {"type": "list", "elements": "str", "default": []},
            "kernels_without_driver": {"type": "list", "elements": "str", "default": []},
            **MACHINE,
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    given = module.params
    proof = driver_proof.prove(
        Machine(given["sysroot"], given["timeout"]),
        status.installed(Machine("/", given["timeout"])) or [],
        given["branch"],
        given["packages"],
        given["kernels_without_driver"],
    )
    finish(module, proof.faults, changed=False, **driver_proof.as_results(proof))


if __name__ == "__main__":
    main()
