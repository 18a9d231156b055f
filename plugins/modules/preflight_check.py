#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Judge a machine before anything is changed on it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight_check
short_description: Is this machine fit to become an LLM server?
version_added: 0.1.0
description:
  - Reads distribution, architecture, init, package manager, memory, free disk space, listening ports, Python interpreter and clock, and
    reports everything that is wrong at once.
  - Changes nothing, so check mode and a real run are the same.
  - Seeing which program holds a port needs root; without it the port is still reported as taken.
author:
  - The volta.llm authors
options:
  supported_os:
    description: Accepted systems, each as C(ID-VERSION_ID) of C(/etc/os-release).
    type: list
    elements: str
    default: [ubuntu-22.04, ubuntu-24.04, debian-12, debian-13]
  architectures:
    description: Accepted architectures, as C(uname -m) names them.
    type: list
    elements: str
    default: [x86_64]
  min_memory_mib:
    description:
      - Least memory in MiB, compared with C(MemTotal) of C(/proc/meminfo), which is 2 to 4 percent less than what is plugged in.
    type: int
    default: 0
  disk_space:
    description:
      - What is to be stored where. Wants of folders on one file system are summed.
      - A folder need not exist yet; its nearest existing parent tells the file system.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Folder, as an absolute path.
        type: path
        required: true
      size_mib:
        description:
          - What will lie in the folder in the end, in MiB. What lies there now counts, so a second run does not ask for the space again.
        type: int
        default: 0
      free_mib:
        description: What is to stay free on its file system besides, in MiB.
        type: int
        default: 0
  ports:
    description: TCP ports that services are to listen on.
    type: list
    elements: dict
    default: []
    suboptions:
      port:
        description: Port, 1 to 65535.
        type: int
        required: true
      address:
        description: Address that the service is to bind to.
        type: str
        default: 127.0.0.1
      unit:
        description: Systemd unit that may hold the port already, as V(llama-server.service).
        type: str
  clock_reference:
    description: Time of the controller in seconds since the epoch; without it the clock is not judged.
    type: float
  max_clock_offset_s:
    description: How far the clock may be from O(clock_reference), in seconds.
    type: float
    default: 600.0
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
"""

EXAMPLES = r"""
- name: Judge the machine
  volta.llm.preflight_check:
    min_memory_mib: 30720
    disk_space:
      - path: /srv/models
        size_mib: 108000
      - path: /
        free_mib: 2048
    ports:
      - port: 8080
        address: 0.0.0.0
        unit: llama-server.service
    clock_reference: "{{ now().timestamp() }}"

- name: Judge a capture from another machine
  volta.llm.preflight_check:
    sysroot: /tmp/capture
"""

RETURN = r"""
os:
  description: Distribution from os-release; each value is null where it is not given.
  returned: always
  type: dict
  contains:
    id: {description: C(ID)., type: str, sample: debian}
    version: {description: C(VERSION_ID)., type: str, sample: '12'}
    name: {description: C(PRETTY_NAME)., type: str, sample: Debian GNU/Linux 12 (bookworm)}
architecture:
  description: Machine hardware name; null where unknown.
  returned: always
  type: str
  sample: x86_64
init:
  description: Name of process 1; null where unknown.
  returned: always
  type: str
  sample: systemd
unfinished_packages:
  description: Packages whose installation began and did not end, with their state.
  returned: always
  type: list
  elements: str
  sample: [nvidia-dkms-535 (half-configured)]
memory_mib:
  description: Memory in MiB; null where unknown.
  returned: always
  type: int
  sample: 128630
disks:
  description: Each file system that O(disk_space) touches.
  returned: always
  type: list
  elements: dict
  contains:
    mount: {description: Mount point., type: str, sample: /srv}
    source: {description: Device or source., type: str, sample: /dev/sdb1}
    available_mib: {description: Free space for users in MiB., type: int, sample: 901120}
    need_mib: {description: What is still needed in MiB., type: int, sample: 108000}
    paths:
      description: The folders on it and what each still needs, in MiB.
      type: list
      elements: dict
      sample: [{path: /srv/models, need_mib: 108000}]
ports:
  description: Each port asked about, with the programs that hold it (empty when it is free).
  returned: always
  type: list
  elements: dict
  sample: [{port: 8080, address: 127.0.0.1, holders: ['llama-server (pid 812, unit llama-server.service)']}]
python:
  description: The interpreter in use and its version, and the version of /usr/bin/python3; null where unknown.
  returned: always
  type: dict
  sample: {interpreter: /usr/bin/python3, version: 3.11.2, system_version: 3.11.2}
clock_offset_s:
  description: How far the clock is ahead of O(clock_reference), in seconds; null where it was not given.
  returned: always
  type: float
  sample: 0.4
faults:
  description:
    - Everything that was found wrong, most serious first. The task fails when one is more than a warning.
    - Codes are C(os_unsupported), C(processor_unsupported), C(init_not_systemd), C(apt_missing), C(system_python_too_old),
      C(memory_short), C(disk_short), C(disk_unknown), C(port_taken), C(clock_wrong) and the warnings C(dpkg_unfinished) and
      C(python_not_system).
  returned: always
  type: list
  elements: dict
  sample:
    - code: port_taken
      subject: 127.0.0.1:8080
      message: 127.0.0.1:8080 is taken by nginx (pid 812, unit nginx.service)
      remedy: stop that program, or give the service another port
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.faults import as_text, is_fatal
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.preflight import checks
from ansible_collections.volta.llm.plugins.module_utils.results import as_shown, finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "supported_os": {
                "type": "list",
                "elements": "str",
                "default": ["ubuntu-22.04", "ubuntu-24.04", "debian-12", "debian-13"],
            },
            "architectures": {"type": "list", "elements": "str", "default": ["x86_64"]},
            "min_memory_mib": {"type": "int", "default": 0},
            "disk_space": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "path": {"type": "path", "required": True},
                    "size_mib": {"type": "int", "default": 0},
                    "free_mib": {"type": "int", "default": 0},
                },
            },
            "ports": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "port": {"type": "int", "required": True},
                    "address": {"type": "str", "default": "127.0.0.1"},
                    "unit": {"type": "str"},
                },
            },
            "clock_reference": {"type": "float"},
            "max_clock_offset_s": {"type": "float", "default": 600.0},
            **MACHINE,
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    options = module.params
    disks = [checks.DiskWant(**want) for want in options["disk_space"]]
    ports = [checks.PortWant(**want) for want in options["ports"]]
    refused = checks.refused(disks, ports)
    if refused:
        module.fail_json(msg="; ".join(refused))
    machine = Machine(options["sysroot"], options["timeout"])
    found = checks.Findings()
    checks.check_system(machine, found, options["supported_os"], options["architectures"])
    checks.check_packages(machine, found)
    checks.check_python(machine, found)
    checks.check_memory(machine, found, options["min_memory_mib"])
    checks.check_disks(machine, found, disks)
    checks.check_ports(machine, found, ports)
    checks.check_clock(machine, found, options["clock_reference"], options["max_clock_offset_s"])
    for fault in as_shown(module, found.faults):
        if not is_fatal(fault):
            # A run that succeeds shows no results; a warning that nobody sees is none.
            module.warn(as_text([fault]))
    finish(module, found.faults, changed=False, **found.facts)


if __name__ == "__main__":
    main()
