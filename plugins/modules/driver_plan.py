#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which packages are missing for a driver of one branch, in exact versions."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_plan
short_description: Plan the packages of the NVIDIA driver, in exact versions
version_added: 0.1.0
description:
  - Chooses a version that every package of the driver has in the archive, and that is no pointer to another branch, and names all packages
    of the driver with it, the headers of every installed kernel, and on a machine with NVSwitch the Fabric Manager of the very same version.
  - What is installed and of the branch stays as it is, also where the archive has something newer. RV(complete) is then true.
  - Names what is in the way, such as another branch, a C(.run) installation, packages that dpkg left in the middle, or an archive that
    dropped the branch. Changes nothing.
author:
  - The volta.llm authors (@volta-llm)
options:
  branch:
    description: Driver branch, one of V(535), V(550), V(570), V(580).
    type: str
    default: "535"
  flavour:
    description: On Ubuntu, which of its packagings.
    type: str
    choices: [server, desktop]
    default: server
  headless:
    description: Whether the driver comes without what only displays need.
    type: bool
    default: true
  source:
    description: The archive that the packages are to come from.
    type: str
    choices: [distro, cuda_repo, mirror]
    default: distro
  repository_site:
    description: Host of that archive, with O(source=cuda_repo) and O(source=mirror).
    type: str
    default: ""
  version:
    description: The one version to have, such as V(535.261.03) or a whole package version. Empty is the newest, or what is there.
    type: str
    default: ""
  modules:
    description:
      - Whether the kernel module is built by DKMS or comes prebuilt and signed (Ubuntu). V(auto) is prebuilt where Secure Boot is on and
        the archive has it, and what is there already where a driver is installed.
    type: str
    choices: [auto, dkms, prebuilt]
    default: auto
  kernels_without_driver:
    description: Installed kernels that may go without a driver.
    type: list
    elements: str
    default: []
  allow_branch_change:
    description: Whether packages of another branch or flavour may be replaced.
    type: bool
    default: false
  repair_packages:
    description: Whether packages of others that dpkg left in the middle may be configured. The driver's own always are.
    type: bool
    default: false
  remove_run_install:
    description: Whether a driver from a C(.run) file may be uninstalled.
    type: bool
    default: false
  require:
    description: Whether faults fail the task. Without it they are only returned, for a plan before the package lists are fresh.
    type: bool
    default: true
  allow_unavailable:
    description: Whether an archive without the branch is only returned (RV(available)), because something else can be tried.
    type: bool
    default: false
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.attributes
  - volta.llm.machine.variables
notes:
  - Packages and archives are always those of the machine itself; kernels and hardware are read below O(sysroot).
"""

EXAMPLES = r"""
- name: Plan branch 535
  volta.llm.driver_plan:
    branch: "535"
  register: plan

- name: Install it in one transaction
  ansible.builtin.apt:
    name: "{{ plan.install }}"
    install_recommends: false
  when: plan.install | length > 0
"""

RETURN = r"""
branch:
  description: The branch that was planned.
  returned: always
  type: str
  sample: "535"
source:
  description: The source that was planned.
  returned: always
  type: str
  sample: distro
complete:
  description: Whether there is nothing to do.
  returned: always
  type: bool
available:
  description: Whether the archive has the branch, as far as the package lists say.
  returned: always
  type: bool
version:
  description: The version of all packages of the driver; null where none can be had.
  returned: always
  type: str
  sample: 535.261.03-0ubuntu0.22.04.1
modules:
  description: V(dkms) or V(prebuilt).
  returned: always
  type: str
packages:
  description: All packages of the driver that must be there in that version.
  returned: always
  type: list
  elements: str
install:
  description: What is missing, as words for apt.
  returned: always
  type: list
  elements: str
  sample: [nvidia-utils-535-server=535.261.03-0ubuntu0.22.04.1, linux-headers-5.15.0-139-generic]
purge:
  description: Installed packages of another branch or flavour, and those with another version in their name (firmware).
  returned: always
  type: list
  elements: str
repair:
  description: Packages that dpkg left in the middle and that are to be configured; C(dpkg) where its database is unfinished.
  returned: always
  type: list
  elements: str
remove_run_install:
  description: Whether a C(.run) installation is to be uninstalled.
  returned: always
  type: bool
pins:
  description:
    - The file of preferences to write, with C(path) and C(content). It binds every package of the driver, in both naming forms, to
      RV(version), or as long as that is null to the branch and its archive. The container toolkit, CUDA and tools with versions of their own
      are not touched.
  returned: always
  type: list
  elements: dict
lists_empty:
  description: Whether apt has no package lists at all.
  returned: always
  type: bool
faults:
  description: What is in the way, with C(code), C(subject), C(message) and C(remedy). See C(docs/faults.md).
  returned: always
  type: list
  elements: dict
"""

from ansible_collections.volta.llm.plugins.module_utils.apt import status
from ansible_collections.volta.llm.plugins.module_utils.apt.archive import AptArchive
from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.faults import as_text, is_fatal
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver, driver_plan, driver_source, modinfo
from ansible_collections.volta.llm.plugins.module_utils.nvidia.kernels import kernels
from ansible_collections.volta.llm.plugins.module_utils.results import as_shown, finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "branch": {"type": "str", "default": "535"},
            "flavour": {"type": "str", "choices": ["server", "desktop"], "default": "server"},
            "headless": {"type": "bool", "default": True},
            "source": {"type": "str", "choices": ["distro", "cuda_repo", "mirror"], "default": "distro"},
            "repository_site": {"type": "str", "default": ""},
            "version": {"type": "str", "default": ""},
            "modules": {"type": "str", "choices": ["auto", "dkms", "prebuilt"], "default": "auto"},
            "kernels_without_driver": {"type": "list", "elements": "str", "default": []},
            "allow_branch_change": {"type": "bool", "default": False},
            "repair_packages": {"type": "bool", "default": False},
            "remove_run_install": {"type": "bool", "default": False},
            "require": {"type": "bool", "default": True},
            "allow_unavailable": {"type": "bool", "default": False},
            **MACHINE,
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    given = module.params
    machine = Machine(given["sysroot"], given["timeout"])
    here = Machine("/", given["timeout"])
    distribution, release, codename = driver_source.system(machine)
    wish = driver_plan.Wish(
        distribution=distribution,
        release=release,
        branch=given["branch"],
        flavour=given["flavour"],
        headless=given["headless"],
        source=given["source"],
        site=given["repository_site"],
        modules=given["modules"],
        version=given["version"],
        allow_branch_change=given["allow_branch_change"],
        allow_repair=given["repair_packages"],
        allow_run_removal=given["remove_run_install"],
        kernels_without_driver=tuple(given["kernels_without_driver"]),
    )
    found = kernels(machine)
    facts = driver_plan.Facts(
        dpkg=status.installed(here) or [],
        kernels=found,
        with_module=tuple(
            kernel for kernel in (found.installed or (found.running,)) if kernel and modinfo.is_on_disk(machine, kernel)
        ),
        secure_boot=bool(driver.secure_boot(machine)),
        nvswitches=driver.nvswitches(machine),
        run_install=driver.run_install(machine),
        interrupted=driver_plan.interrupted(here),
    )
    archive = AptArchive(here)
    plan = driver_plan.make(wish, archive, facts)
    results = {
        "changed": False,
        "branch": wish.branch,
        "source": wish.source,
        "lists_empty": archive.empty,
        **plan.as_dict(),
    }
    results["pins"] = [] if driver_plan.refuse_branch(wish.branch, wish.flavour) else driver_plan.preferences(
        wish, codename, plan.version
    )  # fmt: skip
    faults = as_shown(module, plan.faults)
    if not given["require"] or (given["allow_unavailable"] and not plan.available):
        module.exit_json(faults=[fault.as_dict() for fault in faults], **results)
    for fault in faults:
        if not is_fatal(fault):
            # A run that succeeds shows no results; a warning that nobody sees is none.
            module.warn(as_text([fault]))
    finish(module, plan.faults, **results)


if __name__ == "__main__":
    main()
