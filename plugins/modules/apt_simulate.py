#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What an apt transaction would do, judged before it is done."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_simulate
short_description: Simulate an apt transaction and refuse what it must not do
version_added: 0.1.0
description:
  - Runs C(apt-get -s), or C(unattended-upgrade --dry-run), and returns what would be installed and removed. Changes nothing but, where
    asked for, the package lists; check mode is the same without that.
  - Fails with every violation of the options below. That a name says C(535) proves nothing. Archives turn packages into pointers to
    another branch by a mere revision, so the branch of each package that would be installed is found from its version, its source
    package, its name and what it depends on.
  - Companions have versions of their own and no branch. They are nvidia-modprobe, nvidia-persistenced, nvidia-settings, nvidia-xconfig,
    nvidia-support, nvidia-installer-cleanup, nvidia-kernel-common, nvidia-legacy-check, nvidia-detect, nvidia-prime, C(nvidia-*-common)
    (data that one version of serves all branches), libxnvctrl0, nvidia-egl and libnvidia-egl libraries, nvidia-vaapi-driver, and what only
    uses a driver, which is nvidia-container, nvidia-docker, CUDA, cuDNN, profilers and nsight. One with a branch in its name is no companion.
  - The package lists are used as they are where O(lists_max_age) is not given.
author:
  - The volta.llm authors
options:
  action:
    description:
      - What to simulate. V(unattended_upgrade) lists names only, downloads what it would install, and needs root. Where the program is not
        installed, it finds nothing and RV(available) is false.
    type: str
    choices: [install, dist_upgrade, remove, unattended_upgrade]
    default: install
  packages:
    description:
      - Packages as apt-get takes them, C(name), C(name=version), C(name/release), C(name-) to remove one. V(unattended_upgrade) takes none.
    type: list
    elements: str
    default: []
  install_recommends:
    description: Whether recommended packages come along. Left out, apt's own setting decides.
    type: bool
  target_release:
    description: Release to prefer (C(-t)).
    type: str
  reinstall:
    description: Whether packages that are there already are installed again.
    type: bool
    default: false
  purge:
    description: Whether packages that are removed lose their configuration.
    type: bool
    default: false
  fix_broken:
    description: Whether apt may mend dependencies that are not met now.
    type: bool
    default: false
  apt_options:
    description: Options of apt's configuration, such as C(APT::Default-Release).
    type: dict
    default: {}
  driver_branch:
    description: Branch that every driver package must be of, such as V(535). Left out, any.
    type: str
  allow_open:
    description: Whether packages of the open kernel module may be installed.
    type: bool
    default: false
  allow_kernel:
    description: Whether kernels, their modules, headers and meta packages may be installed, changed or removed.
    type: bool
    default: false
  allow_kernel_headers:
    description: Whether headers and their meta packages may be installed and upgraded all the same, since DKMS needs them.
    type: bool
    default: false
  allow_held:
    description: Whether held packages may change.
    type: bool
    default: false
  allow_remove:
    description:
      - Packages that may be removed, as names, shell patterns, or regular expressions. A regular expression begins with C(^) and must match
        the whole name. V([*]) allows every removal.
    type: list
    elements: str
    default: []
  forbidden:
    description: Packages that may not be installed, changed or removed, in the same forms.
    type: list
    elements: str
    default: []
  required:
    description: Packages of which at least one each must be installed afterwards, in the same forms.
    type: list
    elements: str
    default: []
  lists_max_age:
    description:
      - Seconds that the package lists may be old by apt's own stamps. Older ones are updated first, and so are lists older than a source
        file; another apt at work there is waited for. Not in check mode.
    type: int
  proof_file:
    description:
      - Absolute path of a record that a run without faults leaves. While question, apt's configuration, package lists and packages are as they
        were then, nothing is run and the answer is what a transaction without a change gives. Not written in check mode.
    type: path
  timeout:
    description: Limit in seconds for each program that is run.
    type: float
    default: 300.0
extends_documentation_fragment:
  - volta.llm.machine.attributes
  - volta.llm.machine.variables
"""

EXAMPLES = r"""
- name: See that the driver comes in branch 535 and nothing else moves
  volta.llm.apt_simulate:
    packages: [nvidia-driver-535-server, nvidia-utils-535-server]
    install_recommends: false
    driver_branch: "535"
    allow_kernel_headers: true

- name: Change the branch, which removes the packages of the former one
  volta.llm.apt_simulate:
    packages: [nvidia-driver-550-server]
    driver_branch: "550"
    allow_remove: ['*nvidia*-535*']

- name: See that neither kernel nor driver would move
  volta.llm.apt_simulate:
    action: dist_upgrade
    forbidden: "{{ holds.names }}"
    allow_remove: ['*']
"""

RETURN = r"""
install:
  description:
    - What would be installed or changed, in apt's order, with C(name), C(from) (null for new), C(to), C(kind) (install, upgrade,
      downgrade, reinstall), C(origin) (as apt prints it), C(architecture), C(source) (source package) and C(branch) (of the driver, null for
      none). With V(unattended_upgrade) everything but the name is null.
  returned: always
  type: list
  elements: dict
  sample:
    - name: nvidia-utils-570
      from: null
      to: 570.86.15-0ubuntu0.22.04.1
      kind: install
      origin: Ubuntu:22.04/jammy-updates
      architecture: amd64
      source: nvidia-graphics-drivers-570
      branch: "570"
remove:
  description: What would be removed, with C(name), C(from), C(architecture) (null for the machine's own) and C(purge).
  returned: always
  type: list
  elements: dict
kept_back:
  description: Names that an upgrade would leave as they are, held ones among them.
  returned: always
  type: list
  elements: str
deferred:
  description: Names that Ubuntu has not handed out to this machine yet (phased updates).
  returned: always
  type: list
  elements: str
downgrades:
  description: Names that would become older; apt-get then needs C(--allow-downgrades).
  returned: always
  type: list
  elements: str
branches:
  description: Names of the driver packages that would be installed, by branch.
  returned: always
  type: dict
  sample: {"535": [libnvidia-compute-535, nvidia-driver-535]}
lists_updated:
  description: Whether the package lists were updated.
  returned: always
  type: bool
proved_before:
  description: Whether O(proof_file) already said so, and nothing was run.
  returned: always
  type: bool
available:
  description: Whether the program that simulates is installed.
  returned: always
  type: bool
violations:
  description: What the options refuse, with C(code), C(subject) (the package), C(message) (with version and branch) and C(remedy).
  returned: always
  type: list
  elements: dict
faults:
  description: The RV(violations), or why there is no transaction (C(apt_unresolvable) with apt's own reason). See C(docs/faults.md).
  returned: always
  type: list
  elements: dict
"""

from pathlib import Path

from ansible_collections.volta.llm.plugins.module_utils.apt import lists, proved, simulation
from ansible_collections.volta.llm.plugins.module_utils.apt.policy import Policy
from ansible_collections.volta.llm.plugins.module_utils.apt.transaction import Request
from ansible_collections.volta.llm.plugins.module_utils.arguments import VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault, FaultError
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    names = {"type": "list", "elements": "str", "default": []}
    module = VoltaModule(
        argument_spec={
            **VARIABLES,
            "action": {
                "type": "str",
                "choices": ["install", "dist_upgrade", "remove", "unattended_upgrade"],
                "default": "install",
            },
            "packages": names,
            "install_recommends": {"type": "bool"},
            "target_release": {"type": "str"},
            "reinstall": {"type": "bool", "default": False},
            "purge": {"type": "bool", "default": False},
            "fix_broken": {"type": "bool", "default": False},
            "apt_options": {"type": "dict", "default": {}},
            "driver_branch": {"type": "str"},
            "allow_open": {"type": "bool", "default": False},
            "allow_kernel": {"type": "bool", "default": False},
            "allow_kernel_headers": {"type": "bool", "default": False},
            "allow_held": {"type": "bool", "default": False},
            "allow_remove": names,
            "forbidden": names,
            "required": names,
            "lists_max_age": {"type": "int"},
            "proof_file": {"type": "path"},
            "timeout": {"type": "float", "default": 300.0},
        },
        supports_check_mode=True,
    )
    given = module.params
    request = Request(
        action=given["action"],
        packages=tuple(given["packages"]),
        recommends=given["install_recommends"],
        target_release=given["target_release"] or None,
        reinstall=given["reinstall"],
        purge=given["purge"],
        fix_broken=given["fix_broken"],
        options={name: _apt_word(value) for name, value in given["apt_options"].items()},
    )
    updated = known = False
    stale: list[Fault] = []
    try:
        policy = Policy(
            driver_branch=given["driver_branch"] or None,
            allow_open=given["allow_open"],
            allow_kernel=given["allow_kernel"],
            allow_kernel_headers=given["allow_kernel_headers"],
            allow_held=given["allow_held"],
            allow_remove=given["allow_remove"],
            forbidden=given["forbidden"],
            required=given["required"],
        )
        system = Machine("/", given["timeout"])
        if given["lists_max_age"] is not None and not module.check_mode:
            updated, stale = lists.refresh(system, given["lists_max_age"])
        record = Path(given["proof_file"]) if given["proof_file"] else None
        value = proved.fingerprint(system, request, policy) if record else ""
        known = record is not None and not stale and proved.holds(record, value)
        if stale or known:
            results, faults = simulation.nothing(), stale
        else:
            results, faults = simulation.run(system, request, policy)
        if record is not None and results["available"] and not (faults or known or module.check_mode):
            proved.keep(record, value)
    except FaultError as exc:
        results, faults = simulation.nothing(), [exc.fault]
    finish(module, faults, changed=False, lists_updated=updated, proved_before=known, **results)


def _apt_word(value: object) -> str:
    """apt's own words for truth values."""
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    main()
