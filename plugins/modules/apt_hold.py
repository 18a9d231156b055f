#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Holds on packages, given by names, patterns and the sets of kernel and driver."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_hold
short_description: Hold packages, or release them
version_added: 0.1.0
description:
  - Resolves names, patterns and sets against what is installed, and holds or releases that with one call of C(apt-mark). What it was not
    asked for stays as it is.
  - The set V(kernel) is what is really installed and running. It has image, modules and headers of the installed releases, and every meta package
    above them, whatever its flavour is called. These are found by their dependencies, since a hold on C(linux-image-generic) keeps nothing
    on a machine with the HWE kernel, and one on the image alone lets its meta package move on. Prebuilt modules of the driver (C(linux-modules-nvidia-*)) are in it too, because each brings the
    image of its kernel. A kernel that came beside the running one, and for
    which the driver has no module, is not held but reported (C(kernel_without_driver)).
  - The set V(driver) is every installed package of the driver, its companions such as nvidia-persistenced, and prebuilt modules
    (C(linux-modules-nvidia-*)). Container and CUDA toolkits are not in it.
  - To change held packages, release them, change them, and hold the sets again, the latter in C(always). A run that was killed in between is
    mended by the next one.
author:
  - The volta.llm authors
options:
  sets:
    description: Sets of packages. With O(state=released), V(kernel) is all that belongs to any kernel.
    type: list
    elements: str
    choices: [kernel, driver]
    default: []
  packages:
    description:
      - Names, shell patterns (C(*), C(?), C([...])), or regular expressions, which begin with C(^) and must match the whole name.
    type: list
    elements: str
    default: []
  exclude:
    description: What is left alone although a set or a pattern has it, in the same forms.
    type: list
    elements: str
    default: []
  state:
    description: Whether the packages are held.
    type: str
    choices: [held, released]
    default: held
  allow_missing:
    description: Whether a name of O(packages) of which nothing is installed is only returned in RV(missing). Otherwise it is a fault.
    type: bool
    default: true
  lock_timeout:
    description: Seconds to wait while another program has dpkg's lock.
    type: float
    default: 120.0
  sysroot:
    description:
      - Folder below which the running kernel, boot menu and kernel modules are read. Packages are always the machine's own.
    type: path
    default: /
  timeout:
    description: Limit in seconds for each program that is run.
    type: float
    default: 60.0
extends_documentation_fragment:
  - volta.llm.machine.attributes
  - volta.llm.machine.variables
attributes:
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Keep kernel and driver as they are
  volta.llm.apt_hold:
    sets: [kernel, driver]
  register: holds

- name: Move the kernel on deliberately
  block:
    - name: Release the kernel
      volta.llm.apt_hold:
        sets: [kernel]
        state: released

    - name: Upgrade its meta packages
      ansible.builtin.apt:
        name: "{{ holds.metas }}"
        state: latest
  always:
    - name: Hold what is there now
      volta.llm.apt_hold:
        sets: [kernel, driver]

- name: Hold two packages and everything of Fabric Manager
  volta.llm.apt_hold:
    packages: [libnccl2, libnccl-dev, 'nvidia-fabricmanager*']
"""

RETURN = r"""
names:
  description: What was meant, of what is installed. Packages of another architecture have it behind a colon.
  returned: always
  type: list
  elements: str
held:
  description: Those of RV(names) that are held now, or would be in check mode.
  returned: always
  type: list
  elements: str
changed_names:
  description: Those of RV(names) that were not as wanted.
  returned: always
  type: list
  elements: str
missing:
  description: Names of O(packages) of which nothing is installed.
  returned: always
  type: list
  elements: str
others:
  description: Packages that are held besides.
  returned: always
  type: list
  elements: str
kernel:
  description: Packages of the set V(kernel); empty unless asked for.
  returned: always
  type: list
  elements: str
driver:
  description: Packages of the set V(driver); empty unless asked for.
  returned: always
  type: list
  elements: str
metas:
  description: Meta packages of the kernel; empty unless the set V(kernel) is asked for.
  returned: always
  type: list
  elements: str
  sample: [linux-generic-hwe-22.04, linux-headers-generic-hwe-22.04, linux-image-generic-hwe-22.04]
kernels:
  description: The C(running) kernel, the C(next) one, how that was found (C(next_from)) and the C(installed) ones, newest first.
  returned: always
  type: dict
blacklist:
  description: Expressions for C(Unattended-Upgrade::Package-Blacklist) that cover what is held.
  returned: always
  type: list
  elements: str
faults:
  description: What went wrong, and what is wrong about the kernels. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
"""

from ansible_collections.volta.llm.plugins.module_utils.apt import hold, status
from ansible_collections.volta.llm.plugins.module_utils.apt.catalogue import CATALOGUE
from ansible_collections.volta.llm.plugins.module_utils.arguments import SYSROOT, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    names = {"type": "list", "elements": "str", "default": []}
    module = VoltaModule(
        argument_spec={
            **SYSROOT,
            **VARIABLES,
            "sets": {"type": "list", "elements": "str", "choices": ["kernel", "driver"], "default": []},
            "packages": names,
            "exclude": names,
            "state": {"type": "str", "choices": ["held", "released"], "default": "held"},
            "allow_missing": {"type": "bool", "default": True},
            "lock_timeout": {"type": "float", "default": 120.0},
            "timeout": {"type": "float", "default": 60.0},
        },
        supports_check_mode=True,
    )
    given = module.params
    system = Machine("/", given["timeout"])
    wanted = hold.Wanted(given["sets"], given["packages"], given["exclude"], given["state"] == "held")
    installed = status.installed(system)
    if installed is None:
        fault = CATALOGUE.fault(
            "apt_missing", "dpkg", "/var/lib/dpkg/status cannot be read", "use a system with dpkg, and become root"
        )
        finish(module, [fault], changed=False, **hold.as_results(hold.Resolved(), hold.Outcome([], [], [])))
    try:
        resolved = hold.resolve(Machine(given["sysroot"], given["timeout"]), installed, wanted)
    except FaultError as exc:
        finish(module, [exc.fault], changed=False, **hold.as_results(hold.Resolved(), hold.Outcome([], [], [])))
    outcome = hold.converge(system, installed, resolved.names, wanted.held, module.check_mode, given["lock_timeout"])
    faults = [*outcome.faults, *resolved.faults]
    if not given["allow_missing"]:
        faults += [
            CATALOGUE.fault("apt_hold_missing", name, f"{name} is not installed", f"apt-get install {name}")
            for name in resolved.missing
        ]
    results = hold.as_results(resolved, outcome)
    if outcome.changed:
        results["diff"] = {
            "before": "".join(f"{name}\n" for name in outcome.before),
            "after": "".join(f"{name}\n" for name in outcome.after),
            "before_header": "held packages",
            "after_header": "held packages",
        }
    finish(module, faults, changed=bool(outcome.changed), **results)


if __name__ == "__main__":
    main()
