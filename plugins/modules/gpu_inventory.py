#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The GPUs of a machine from three sources, judged."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_inventory
short_description: Read the GPUs from the PCI bus, the driver and nvidia-smi, and check them
version_added: 0.1.0
description:
  - Puts side by side what the PCI bus (sysfs, by vendor and class), the loaded driver (C(/proc/driver/nvidia)) and nvidia-smi say.
  - Names every way in which cards can be fewer than, or less healthy than, they should be, and what to do about it.
  - A value that is not known is V(null) and RV(gpus[].unknown) says why. It never counts as 0 and never meets or breaks a limit.
  - Starts one process of nvidia-smi. A driver older than branch 535 costs two more, since it does not know all fields; a wait for
    persistence mode costs one for every five seconds.
  - The module fails once, with every fault it found, most serious first. All results are returned then as well.
author:
  - The volta.llm authors (@volta-llm)
options:
  expected_count:
    description: The number of GPUs that must answer, neither fewer nor more.
    type: int
  expected_product:
    description:
      - Product that every GPU must be, by name or by PCI id (V(10de:1db5)).
      - A part of the name will do when it is made of whole words, so V(V100-SXM2) accepts V(Tesla V100-SXM2-32GB).
    type: str
  min_memory_mib:
    description: Memory in MiB that every GPU must have.
    type: int
  driver_branch:
    description: Branch of the loaded driver, such as V(535). A longer version (V(535.261.03)) is compared as far as it goes.
    type: str
  persistence:
    description: Whether persistence mode must be on (or off).
    type: bool
  persistence_wait:
    description: How long in seconds to wait for O(persistence). Just after boot the daemon has not reached every GPU yet.
    type: float
    default: 0.0
  max_uncorrected_ecc:
    description: The highest number of uncorrected memory errors since the driver was loaded.
    type: int
  max_temperature:
    description: The highest temperature in degrees C of the core and of the memory.
    type: float
  no_other_processes:
    description: Whether compute processes other than O(allowed_processes) are a fault. Implies O(processes).
    type: bool
    default: false
  allowed_processes:
    description: Program names (without folder) that O(no_other_processes) lets pass.
    type: list
    elements: str
    default: [llama-server, ollama]
  processes:
    description: Whether to read the processes on each GPU. Uses C(nvidia-smi -q -x), which takes longer than the csv query.
    type: bool
    default: false
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.nvidia_smi
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
seealso:
  - module: volta.llm.nvlink_topology
"""

EXAMPLES = r"""
- name: Read the GPUs
  volta.llm.gpu_inventory:
  register: gpus

- name: Require four healthy V100-SXM2-32GB on driver 535
  volta.llm.gpu_inventory:
    expected_count: 4
    expected_product: Tesla V100-SXM2-32GB
    driver_branch: "535"
    max_uncorrected_ecc: 0
    max_temperature: 80

- name: Judge a capture of another machine
  volta.llm.gpu_inventory:
    sysroot: captures/one-card-lost
    expected_count: 4
"""

RETURN = r"""
state:
  description:
    - V(ok), or V(degraded) when GPUs answer and a fault was found.
    - Otherwise what keeps nvidia-smi from listing any GPU, one of V(no_pci_device), V(no_driver) (or its tools are missing),
      V(driver_mismatch), V(no_devices), V(gpu_lost), V(timeout), V(unparsable).
  returned: always
  type: str
  sample: ok
gpu_count:
  description: Number of GPUs that answer; null when it is not known (no driver, time-out, ...).
  returned: always
  type: int
  sample: 4
gpus:
  description: Every GPU that nvidia-smi lists, dead ones included. Values that are not known are null.
  returned: always
  type: list
  elements: dict
  contains:
    index: {description: Index of nvidia-smi., type: int}
    uuid: {description: UUID., type: str}
    bus_id: {description: "PCI bus id as sysfs writes it, such as V(0000:3b:00.0).", type: str}
    pci_id: {description: "PCI id, such as V(10de:1db5).", type: str}
    product: {description: Product name., type: str}
    compute_capability: {description: "Compute capability, such as V(7.0); by PCI id where the driver is too old to say.", type: str}
    memory_total_mib: {description: Memory in MiB., type: int}
    memory_used_mib: {description: Memory in use in MiB., type: int}
    memory_free_mib: {description: Free memory in MiB., type: int}
    temperature_c: {description: Temperature of the core in degrees C., type: float}
    memory_temperature_c: {description: Temperature of the memory in degrees C., type: float}
    power_w: {description: Power draw in W., type: float}
    power_limit_requested_w: {description: Power limit that was asked for in W., type: float}
    power_limit_w: {description: Power limit that is enforced in W., type: float}
    power_limit_default_w: {description: Power limit after a reset in W., type: float}
    power_limit_max_w: {description: Highest power limit in W., type: float}
    clock_sm_mhz: {description: Clock of the processors in MHz., type: float}
    clock_memory_mhz: {description: Clock of the memory in MHz., type: float}
    clock_sm_max_mhz: {description: Highest clock of the processors in MHz., type: float}
    clock_memory_max_mhz: {description: Highest clock of the memory in MHz., type: float}
    clock_reasons:
      description:
        - Why the clocks are lower than they could be, by the newer names (gpu_idle, sw_power_cap, hw_slowdown, hw_thermal_slowdown,
          sw_thermal_slowdown, hw_power_brake_slowdown, sync_boost, applications_clocks_setting, display_clocks_setting).
      type: list
      elements: str
    performance_state: {description: "P0 (highest) to P12.", type: str}
    utilization_percent: {description: Share of time in which a kernel ran., type: float}
    persistence: {description: Whether persistence mode is on., type: bool}
    ecc:
      description:
        - C(mode) and C(mode_pending) (bool), C(volatile) (since the driver was loaded) and C(aggregate) (since the card was made),
          each with C(single) (corrected) and C(double) (uncorrected) error counts.
      type: dict
    retired_pages:
      description: C(single_bit) and C(double_bit) counts of retired pages, C(pending) whether more wait for a reboot.
      type: dict
    pcie:
      description: C(generation), C(generation_max), C(width) and C(width_max) of the PCIe link. The generation drops when idle.
      type: dict
    processes:
      description: Processes with C(pid), C(type), C(name) and C(memory_mib); null when they were not asked for.
      type: list
      elements: dict
    on_pci: {description: Whether the PCI bus shows this card; null when it cannot be told., type: bool}
    unknown: {description: "Why values are null, by name (V(ecc.mode)).", type: dict}
pci_devices:
  description: NVIDIA GPUs on the PCI bus, whether a driver runs or not.
  returned: always
  type: list
  elements: dict
  contains:
    bus_id: {description: PCI bus id., type: str}
    pci_id: {description: PCI id., type: str}
    product: {description: Product by PCI id; null when the id is not known., type: str}
    compute_capability: {description: Compute capability by PCI id., type: str}
    driver: {description: "Kernel driver bound to it (V(nvidia), V(nouveau), V(vfio-pci)); null for none.", type: str}
    numa_node: {description: NUMA node., type: int}
    pcie_width: {description: Lanes in use., type: int}
    pcie_width_max: {description: Lanes of the card., type: int}
driver:
  description:
    - C(loaded_version) of the kernel module, C(smi_version) that nvidia-smi reports, and C(gpus) that the kernel module knows
      (C(bus_id), C(product), C(uuid), C(excluded)).
  returned: always
  type: dict
faults:
  description: Everything found wrong, most serious first. Codes are listed in docs/faults.md.
  returned: always
  type: list
  elements: dict
  contains:
    code: {description: Stable name of the kind of fault., type: str}
    subject: {description: The card concerned., type: str}
    message: {description: What was found against what was expected., type: str}
    remedy: {description: What to do., type: str}
nvidia_smi_processes:
  description: How many processes of nvidia-smi were started.
  returned: always
  type: int
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, NVIDIA_SMI, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.nvidia.gpu_report import OWN_PROCESSES, GpuRequest, report
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    requirements = {
        "expected_count": {"type": "int"},
        "expected_product": {"type": "str"},
        "min_memory_mib": {"type": "int"},
        "driver_branch": {"type": "str"},
        "persistence": {"type": "bool"},
        "persistence_wait": {"type": "float", "default": 0.0},
        "max_uncorrected_ecc": {"type": "int"},
        "max_temperature": {"type": "float"},
        "no_other_processes": {"type": "bool", "default": False},
        "allowed_processes": {"type": "list", "elements": "str", "default": list(OWN_PROCESSES)},
        "processes": {"type": "bool", "default": False},
    }
    module = VoltaModule(
        argument_spec={
            **MACHINE,
            **NVIDIA_SMI,
            **VARIABLES,
            **requirements,
        },
        supports_check_mode=True,
    )
    options = module.params
    machine = Machine(options["sysroot"], options["timeout"])
    request = GpuRequest(**{name: options[name] for name in requirements})
    result, faults = report(NvidiaSmi(machine, options["nvidia_smi"]), request)
    finish(module, faults, changed=False, nvidia_smi_processes=machine.processes, **result.as_dict())


if __name__ == "__main__":
    main()
