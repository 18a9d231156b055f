#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Thin: documentation, arguments, and the call into module_utils.engine."""

from __future__ import annotations

DOCUMENTATION = r"""
module: llama_cpp_release
short_description: Pack a release of llama.cpp, install one that was built elsewhere, or go back to the one before
version_added: 0.1.0
description:
  - Works on the release folders that M(volta.llm.llama_cpp_build) makes.
  - A release is unpacked only when the archive has the SHA-256 asked for and every file the one in the release's manifest.
  - The link C(<prefix>/current) is switched only after the release has been proven on this machine, as a build is. Its server starts, names
    its version and commit, finds its libraries, and, with a GPU in the machine, computes on every card.
  - The service that runs the engine is not touched. Role llama_server restarts it when C(current) leads to another program.
options:
  action:
    description:
      - V(pack) makes an archive of the release O(name) at O(archive). One that is there already is kept.
      - V(install) unpacks O(archive) and puts the release into use. Without O(archive) it puts the release into use if it is there; RV(present)
        says whether it is.
      - V(previous) puts the release into use that C(<prefix>/previous) points to, and C(previous) then points to the one in use now.
    type: str
    choices: [pack, install, previous]
    required: true
  name:
    description: Name of the release folder, for example V(0.5.0-dev-3f6d0a9c51be). Required with V(pack) and V(install).
    type: str
  archive:
    description: Absolute path of the archive on the machine. Older archives in the same folder are removed by V(pack).
    type: path
  sha256:
    description: SHA-256 of O(archive), 64 lower-case hexadecimal digits. Required with O(archive) to install it.
    type: str
  prefix:
    description: Folder that holds C(releases), C(current) and C(previous).
    type: path
    default: /opt/llama.cpp
  build_user:
    description: The account that runs the proof. Required when the module runs as root and proves something, and then not root itself.
    type: str
  model_architecture:
    description: Architecture of the model that is to be served, as its GGUF header names it. The engine must know it.
    type: str
  keep_releases:
    description: Releases to keep in all, as with M(volta.llm.llama_cpp_build). V(previous) removes none.
    type: int
    default: 3
  switch:
    description: Whether V(install) points C(current) to the release.
    type: bool
    default: true
extends_documentation_fragment:
  - volta.llm.machine.nvidia_smi
  - volta.llm.machine.sysroot
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
attributes:
  diff_mode:
    description: Shows the release in use before and after.
    support: full
author:
  - The volta.llm authors (@volta-llm)
"""

EXAMPLES = r"""
- name: Go back to the engine that was in use before
  volta.llm.llama_cpp_release:
    action: previous
    build_user: llama-build

- name: Pack what was built here
  volta.llm.llama_cpp_release:
    action: pack
    name: 0.5.0-dev-3f6d0a9c51be
    archive: /var/lib/llama-build/export/0.5.0-dev-3f6d0a9c51be.tar.gz
  register: packed

- name: Put it into use on another machine, to which it was copied
  volta.llm.llama_cpp_release:
    action: install
    name: 0.5.0-dev-3f6d0a9c51be
    archive: /var/lib/llama-build/import/0.5.0-dev-3f6d0a9c51be.tar.gz
    sha256: "{{ packed.sha256 }}"
    build_user: llama-build
"""

RETURN = r"""
present:
  description: Whether the release is on this machine, with every file as it was installed.
  returned: always
  type: bool
release:
  description: The release folder; null when it is not there.
  returned: always
  type: str
  sample: /opt/llama.cpp/releases/0.5.0-dev-3f6d0a9c51be
binary:
  description: The server program inside the release; null when it is not there.
  returned: always
  type: str
current:
  description: The release that C(current) points to at the end; null when there is none.
  returned: always
  type: str
previous_release:
  description: The release that C(previous) points to at the end; null when there is none.
  returned: always
  type: str
fingerprint:
  description: SHA-256 over source, options, targets and tools of the release.
  returned: always
  type: str
version:
  description: The version that the server names.
  returned: always
  type: str
commit:
  description: The commit that the server names; null when it names none.
  returned: always
  type: str
capabilities:
  description: What the server's help text lists, as M(volta.llm.llama_cpp_build) returns it.
  returned: always
  type: dict
proof:
  description: The checks that the release passed where it was built, and on this machine's GPUs, each with what was seen.
  returned: always
  type: list
  elements: dict
  sample: [{check: compute, found: "CUDA0 5312 tokens/s, CUDA1 5299 tokens/s"}]
removed:
  description: Names of old releases that were removed.
  returned: always
  type: list
  elements: str
archive:
  description: The archive that V(pack) made or found; null otherwise.
  returned: always
  type: str
sha256:
  description: SHA-256 of RV(archive); null in check mode while it is not there.
  returned: always
  type: str
notes:
  description: What is worth knowing and not wrong.
  returned: always
  type: list
  elements: str
faults:
  description: What is wrong, most serious first. On failure the same list explains it.
  returned: always
  type: list
  elements: dict
  sample:
    - code: release_missing
      subject: /opt/llama.cpp/previous
      message: there is no release to go back to
      remedy: Build the engine with role llama_cpp first.
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import NVIDIA_SMI, SYSROOT, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.engine.release import Store
from ansible_collections.volta.llm.plugins.module_utils.engine.ship import Shipment, ship
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "action": {"type": "str", "choices": ["pack", "install", "previous"], "required": True},
            "name": {"type": "str"},
            "archive": {"type": "path"},
            "sha256": {"type": "str"},
            "prefix": {"type": "path", "default": "/opt/llama.cpp"},
            "build_user": {"type": "str"},
            "model_architecture": {"type": "str"},
            "keep_releases": {"type": "int", "default": 3},
            "switch": {"type": "bool", "default": True},
            **NVIDIA_SMI,
            **SYSROOT,
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    given = dict(module.params)
    del given["variable_prefix"]
    before = Store(given["prefix"]).link("current")
    outcome = ship(Shipment(**given), check_mode=module.check_mode)
    results = outcome.results()
    if outcome.changed and given["action"] != "pack":
        after = results["release"] or given["name"]
        results["diff"] = {"before": f"release: {before or 'none'}\n", "after": f"release: {after}\n"}
    finish(module, outcome.faults, **results)


if __name__ == "__main__":
    main()
