#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Thin: documentation, arguments, and the call into module_utils.engine."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cuda_toolkit_info
short_description: Where a CUDA toolkit for the engine comes from, and whether the one on the machine can compile it
version_added: 0.1.0
description:
  - Says which packages bring the toolkit that was asked for on this distribution, and which of them are missing. Refuses a source that cannot
    serve there, such as a toolkit whose libcuda belongs to another driver branch than the one on the machine.
  - Looks at the toolkit that is there. C(nvcc) must run and list every architecture of O(architectures), headers and libraries must be of the
    compiler's release and in its tree, and there must be a compiler that C(nvcc) accepts, a libcuda to link with and C(cuobjdump).
  - Changes nothing.
author:
  - The volta.llm authors (@volta-llm)
options:
  source:
    description:
      - V(distro) is Debian's C(nvidia-cuda-toolkit), 11.8 in Debian 12 and 12.4 in Debian 13.
      - V(cuda_repo) is NVIDIA's archive, of which compiler, headers, runtime, cuBLAS and stubs are taken.
      - V(existing) is the toolkit in O(root).
      - V(auto) is V(existing) with O(root), V(distro) where that has O(version), and otherwise V(cuda_repo).
    type: str
    choices: [auto, distro, cuda_repo, existing]
    default: auto
  version:
    description: Release of CUDA, such as V(12.2). Empty takes the one that the source has for this distribution.
    type: str
    default: ""
  root:
    description: Folder of the toolkit, with O(source=existing).
    type: str
    default: ""
  architectures:
    description: Architectures that the compiler must know, as M(volta.llm.llama_cpp_build) takes them.
    type: list
    elements: str
    default: [70-real]
  host_compiler:
    description: C++ compiler for C(nvcc). Empty chooses one that the toolkit accepts.
    type: str
    default: ""
  archive_url:
    description: Address of NVIDIA's archive for this distribution, or of a mirror of it. Empty takes NVIDIA's.
    type: str
    default: ""
  required:
    description: Whether the toolkit must be there by now. With V(false), it is looked at only when no package is missing.
    type: bool
    default: false
  build_user:
    description: The account that is to compile, and so must be able to run the compiler. Left out, the caller.
    type: str
extends_documentation_fragment:
  - volta.llm.machine.sysroot
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
"""

EXAMPLES = r"""
- name: See what the machine lacks to compile for V100
  volta.llm.cuda_toolkit_info:
    source: cuda_repo
    version: "12.2"
  register: toolkit

- name: Make sure that the toolkit in a folder can compile the engine
  volta.llm.cuda_toolkit_info:
    source: existing
    root: /opt/cuda-12.4
    required: true
"""

RETURN = r"""
source:
  description: Where the toolkit comes from; V(auto) is resolved.
  returned: always
  type: str
  sample: cuda_repo
version:
  description: The release of CUDA that will be there, or is; null where O(root) decides and was not looked at.
  returned: always
  type: str
  sample: "12.2"
root:
  description: The folder of the toolkit; null where it was not found yet.
  returned: always
  type: str
  sample: /usr/local/cuda-12.2
packages:
  description: The packages that bring it, with a host compiler where the system's own is too new.
  returned: always
  type: list
  elements: str
missing:
  description: Those of RV(packages) that are not installed.
  returned: always
  type: list
  elements: str
archive_url:
  description: Address of the archive with O(source=cuda_repo); null otherwise.
  returned: always
  type: str
archive_file:
  description:
    - A source file of others that names that archive already, as the role P(volta.llm.nvidia_driver#role) and NVIDIA's package C(cuda-keyring) have
      one; null where none does. A second entry with another key would stop every apt.
  returned: always
  type: str
driver_branch:
  description: The driver branch whose libcuda the packages bring; null where they bring none.
  returned: always
  type: str
gcc:
  description: Major version of the host compiler that C(nvcc) will be given; null where that is not known.
  returned: always
  type: int
toolkit:
  description:
    - The toolkit on the machine, with C(root), C(nvcc), C(version), C(architectures), C(host_compiler) and its version, C(cuobjdump), C(headers),
      C(runtime), C(cublas) and C(stub). Null where packages are missing or something is wrong with it.
  returned: always
  type: dict
would_verify:
  description: True in check mode when O(required) could not be asked because packages are missing.
  returned: always
  type: bool
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
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import SYSROOT, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.engine.request import Request, find_account
from ansible_collections.volta.llm.plugins.module_utils.engine.supply import SOURCES, Wish, look
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "source": {"type": "str", "choices": list(SOURCES), "default": "auto"},
            "version": {"type": "str", "default": ""},
            "root": {"type": "str", "default": ""},
            "architectures": {"type": "list", "elements": "str", "default": ["70-real"]},
            "host_compiler": {"type": "str", "default": ""},
            "archive_url": {"type": "str", "default": ""},
            "required": {"type": "bool", "default": False},
            "build_user": {"type": "str"},
            **SYSROOT,
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    given = module.params
    wish = Wish(
        given["source"],
        given["version"],
        given["root"].rstrip("/"),
        tuple(given["architectures"]),
        given["host_compiler"],
        given["archive_url"],
    )
    account = None
    if given["build_user"]:
        # One that is not there yet is made by the role that compiles.
        account, _faults = find_account(Request("archive", "/", "/", build_user=given["build_user"]))
    supply = look(wish, Machine(given["sysroot"]), account, given["required"] and not module.check_mode)
    would_verify = bool(given["required"] and module.check_mode and supply.missing)
    finish(module, supply.faults, changed=False, would_verify=would_verify, **supply.results())


if __name__ == "__main__":
    main()
