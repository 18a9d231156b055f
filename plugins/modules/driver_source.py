#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which source file apt needs for the driver, and what contradicts it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_source
short_description: Say which source file apt needs for the driver, and what contradicts it
version_added: 0.1.0
description:
  - Returns the content of the source file that apt needs for the NVIDIA driver, which is the archive that was chosen, or those components of the
    distribution's own that are not in use. The caller writes it; this module changes nothing.
  - Refuses branches and flavours that do not support Volta, entries of one archive that name different keys or options (apt then refuses every
    command), archives with drivers for another distribution, and a key that is not the one asked for.
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
  source:
    description: The distribution's own archive, NVIDIA's, or a mirror with the distribution's package names.
    type: str
    choices: [distro, cuda_repo, mirror]
    default: distro
  repository_url:
    description: Address of the archive with O(source=mirror), and of a copy of NVIDIA's with O(source=cuda_repo).
    type: str
    default: ""
  repository_suite:
    description: Suite of that archive. Empty is a flat one (C(/)).
    type: str
    default: ""
  repository_components:
    description: Components of that archive. Empty is those of the distribution.
    type: list
    elements: str
    default: []
  keyring_file:
    description: File on the machine with the key of that archive. It is named in the source file, and judged where it is there.
    type: str
    default: ""
  fingerprints:
    description: Fingerprints of the keys that may be in that file. Empty skips the check.
    type: list
    elements: str
    default: []
  disable_conflicting_sources:
    description: Whether source files that only hold what contradicts are returned in RV(disable) instead of being faults.
    type: bool
    default: false
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.attributes
  - volta.llm.machine.variables
"""

EXAMPLES = r"""
- name: Ask for the source file of branch 535 from the distribution
  volta.llm.driver_source:
    branch: "535"
  register: source

- name: Write it
  ansible.builtin.copy:
    dest: "{{ item.path }}"
    content: "{{ item.content }}"
    mode: "0644"
  loop: "{{ source.sources }}"
"""

RETURN = r"""
distribution:
  description: ID of /etc/os-release.
  returned: always
  type: str
  sample: ubuntu
release:
  description: VERSION_ID of /etc/os-release.
  returned: always
  type: str
  sample: "22.04"
url:
  description: Address of the archive; empty with O(source=distro).
  returned: always
  type: str
site:
  description: Host of that address.
  returned: always
  type: str
sources:
  description: The source file to write, with C(path) and C(content); none where the archive is in use already.
  returned: always
  type: list
  elements: dict
absent:
  description: Files of ours that are not needed now.
  returned: always
  type: list
  elements: str
disable:
  description: Source files of others to put out of use.
  returned: always
  type: list
  elements: str
faults:
  description:
    - What is wrong, with C(code), C(subject), C(message) and C(remedy). Codes are C(driver_without_gpu), C(open_driver_without_gpu),
      C(driver_branch_unknown), C(apt_key_wrong), C(apt_sources_conflict), C(apt_sources_other_distribution) and
      C(os_without_driver_packages).
  returned: always
  type: list
  elements: dict
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver_plan, driver_source
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "branch": {"type": "str", "default": "535"},
            "flavour": {"type": "str", "choices": ["server", "desktop"], "default": "server"},
            "source": {"type": "str", "choices": ["distro", "cuda_repo", "mirror"], "default": "distro"},
            "repository_url": {"type": "str", "default": ""},
            "repository_suite": {"type": "str", "default": ""},
            "repository_components": {"type": "list", "elements": "str", "default": []},
            "keyring_file": {"type": "str", "default": ""},
            "fingerprints": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "disable_conflicting_sources": {"type": "bool", "default": False},
            **MACHINE,
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    given = module.params
    settings = driver_source.Settings(
        source=given["source"],
        url=given["repository_url"],
        suite=given["repository_suite"],
        components=tuple(given["repository_components"]),
        keyring=given["keyring_file"],
        fingerprints=tuple(given["fingerprints"]),
        disable_conflicting=given["disable_conflicting_sources"],
    )
    faults = driver_plan.refuse_branch(given["branch"], given["flavour"])
    found = driver_source.Sources()
    if not faults:
        found = driver_source.read(Machine(given["sysroot"], given["timeout"]), settings)
    finish(
        module,
        [*faults, *found.faults],
        changed=False,
        distribution=found.distribution,
        release=found.release,
        url=found.url,
        site=found.site,
        sources=found.sources,
        absent=found.absent,
        disable=found.disable,
    )


if __name__ == "__main__":
    main()
