#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The NVLink matrix of a machine as a graph, judged."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvlink_topology
short_description: Read how the GPUs are linked, and check it
version_added: 0.1.0
description:
  - Reads C(nvidia-smi topo -m) and C(nvidia-smi nvlink -s) of any driver from 390 to 610 and returns the links as data.
  - Judges the GPUs in use (O(gpus)), whether every pair has an NVLink, how many, and whether all links are active.
  - A truncated or contradictory matrix is a fault and never a guess. What cannot be known is V(null), never V(0).
  - Starts two processes of nvidia-smi, one more for O(peer_access), and one more where O(gpus) names bus ids.
  - Where a lost card makes C(nvlink -s) break off, or cards are missing from it, these are asked one by one, with one more process
    each, so that the links of the living cards are judged. C(topo -m) has no such form, so their pairs stay unknown.
  - The module fails once, with every fault it found, most serious first. All results are returned then as well.
author:
  - The volta.llm authors (@volta-llm)
options:
  gpus:
    description:
      - The GPUs in use, by index, PCI bus id or UUID. Only links between them are judged.
      - Empty means all GPUs.
    type: list
    elements: str
    default: []
  require:
    description:
      - V(any) accepts every topology.
      - V(full_mesh) requires an NVLink between every pair of the GPUs in use.
      - V(islands) requires that they fall into fully linked groups of at least O(island_size).
    type: str
    choices: [any, full_mesh, islands]
    default: any
  min_links_per_pair:
    description:
      - The fewest NVLinks that a pair may have, V(0) (any number) or more; V(2) on a board with four Tesla V100-SXM2.
      - With O(require=islands) it counts for pairs that have NVLinks at all.
    type: int
  island_size:
    description: The smallest group that O(require=islands) accepts, V(2) or more; V(2) when not given.
    type: int
  require_active_links:
    description:
      - Whether inactive links are a fault. A link counts as missing when another card of the same product has more links up, or
        when the product has more and no second card shows that the board wires fewer.
    type: bool
    default: true
  peer_access:
    description: Whether to read C(nvidia-smi topo -p2p n) as well.
    type: bool
    default: false
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.nvidia_smi
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
seealso:
  - module: volta.llm.gpu_inventory
"""

EXAMPLES = r"""
- name: Read the topology
  volta.llm.nvlink_topology:
  register: topology

- name: Require a full mesh of two links a pair between the first four GPUs
  volta.llm.nvlink_topology:
    gpus: [0, 1, 2, 3]
    require: full_mesh
    min_links_per_pair: 2

- name: Judge a capture of another machine
  volta.llm.nvlink_topology:
    sysroot: captures/dgx1
    require: islands
    island_size: 4
"""

RETURN = r"""
gpu_count:
  description: Number of GPUs in the matrix; null when there is no matrix.
  returned: always
  type: int
  sample: 4
gpus:
  description: Indices of the GPUs in use, which the judgements are about.
  returned: always
  type: list
  elements: int
  sample: [0, 1, 2, 3]
pairs:
  description: Every unordered pair of all GPUs.
  returned: always
  type: list
  elements: dict
  contains:
    a:
      description: Index of the first GPU.
      type: int
    b:
      description: Index of the second GPU, higher than the first.
      type: int
    link:
      description: The cell as printed, such as V(NV2) or V(SYS); null when it is missing or contradictory.
      type: str
    nvlinks:
      description: Number of NVLinks, 0 for a path without any; null when the link is not known.
      type: int
    path:
      description: One of nvlink, pix, pxb, phb, node, sys, soc, self, unknown.
      type: str
  sample: [{"a": 0, "b": 1, "link": "NV2", "nvlinks": 2, "path": "nvlink"}]
fully_connected:
  description: Whether every pair of the GPUs in use has an NVLink; null for a single GPU and when not known.
  returned: always
  type: bool
islands:
  description:
    - The GPUs in use split into fully linked groups, largest first. A GPU without an NVLink is a group of its own.
  returned: always
  type: list
  elements: list
  sample: [[0, 1, 2, 3], [4, 5, 6, 7]]
min_links:
  description: The fewest NVLinks of any pair of the GPUs in use; null for a single GPU and when not known.
  returned: always
  type: int
nics:
  description: Network devices in the matrix, by device name where the output has a legend.
  returned: always
  type: list
  elements: str
cpu_affinity:
  description: CPU list of every GPU as printed, null where blank.
  returned: always
  type: list
  elements: str
  sample: ["0-23", "0-23", "24-47", "24-47"]
numa_affinity:
  description: NUMA node of every GPU, a string where it is a range, null where blank or not available.
  returned: always
  type: list
  elements: raw
  sample: [0, 0, 1, 1]
gpu_numa_id:
  description: NUMA node that the memory of every GPU is, null where it is none.
  returned: always
  type: list
  elements: int
links:
  description: Links by GPU from C(nvlink -s), without cards that do not answer; null when the driver does not report them or they were not asked for.
  returned: always
  type: list
  elements: dict
  contains:
    gpu:
      description: Index of the GPU.
      type: int
    product:
      description: Product name.
      type: str
    uuid:
      description: UUID of the GPU.
      type: str
    active:
      description: Number of links that are up, null when not known.
      type: int
    expected:
      description: Number of links of the product, null where its name does not decide it.
      type: int
    links:
      description: One item a link with C(link) (number), C(active) (bool or null) and C(rate_gb_s) (GB/s each way or null); null
        where the GPU has no NVLink or the driver does not support it.
      type: list
      elements: dict
peer_access:
  description: Every pair of the GPUs in use with C(a), C(b), C(status) as printed and C(ok); null when not asked or not supported.
  returned: always
  type: list
  elements: dict
recommended_split_mode:
  description: V(none) for one GPU, V(layer) for several; null when the number of GPUs is not known.
  returned: always
  type: str
recommended_split_mode_reason:
  description: Why.
  returned: always
  type: str
faults:
  description: Everything found wrong, most serious first. Codes are listed in docs/faults.md.
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: Stable name of the kind of fault.
      type: str
    subject:
      description: The GPU, pair or command concerned.
      type: str
    message:
      description: What was found against what was expected.
      type: str
    remedy:
      description: What to do.
      type: str
nvidia_smi_processes:
  description: How many processes of nvidia-smi were started.
  returned: always
  type: int
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, NVIDIA_SMI, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.nvidia.link_report import REQUIRE, LinkRequest, report
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            **MACHINE,
            **NVIDIA_SMI,
            **VARIABLES,
            "gpus": {"type": "list", "elements": "str", "default": []},
            "require": {"type": "str", "choices": list(REQUIRE), "default": "any"},
            "min_links_per_pair": {"type": "int"},
            "island_size": {"type": "int"},
            "require_active_links": {"type": "bool", "default": True},
            "peer_access": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    options = module.params
    machine = Machine(options["sysroot"], options["timeout"])
    request = LinkRequest(
        gpus=tuple(options["gpus"]),
        require=options["require"],
        min_links_per_pair=options["min_links_per_pair"],
        island_size=options["island_size"],
        require_active_links=options["require_active_links"],
        peer_access=options["peer_access"],
    )
    if request.refused:
        module.fail_json(msg=request.refused)
    result, faults = report(NvidiaSmi(machine, options["nvidia_smi"]), request)
    finish(module, faults, changed=False, nvidia_smi_processes=machine.processes, **result.as_dict())


if __name__ == "__main__":
    main()
