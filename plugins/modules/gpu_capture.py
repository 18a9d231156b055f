#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A report of a machine's GPUs that can be judged elsewhere."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_capture
short_description: Collect what the GPU modules read of a machine, with identities replaced
version_added: 0.1.0
description:
  - Runs the readers of M(volta.llm.gpu_inventory), M(volta.llm.nvlink_topology) and M(volta.llm.driver_state), and keeps the files that
    they read and the outputs and exit statuses of the programs that they ran.
  - The result is an archive (tar, gzip). Unpacked, it is a folder that those modules take as their O(sysroot), so that a report from
    somebody else's machine is judged without the machine.
  - UUIDs, serial numbers, host names, MAC and IPv4 addresses and home folders are replaced on the machine itself, the same one by the
    same stand-in. Long files (the package database, logs, boot menu) are cut down to the lines about GPUs, drivers and kernels.
author:
  - The volta.llm authors (@volta-llm)
options:
  dest:
    description: File to write the archive to, on the machine. It is replaced as a whole.
    type: path
    required: true
extends_documentation_fragment:
  - volta.llm.machine
  - volta.llm.machine.nvidia_smi
  - volta.llm.machine.attributes
seealso:
  - module: volta.llm.gpu_inventory
  - module: volta.llm.nvlink_topology
  - module: volta.llm.driver_state
notes:
  - The playbook C(volta.llm.gpu_capture) fetches and unpacks the archive.
  - Look through a capture before you pass it on. What is replaced is what these texts are known to hold.
"""

EXAMPLES = r"""
- name: Collect what the GPU modules read
  volta.llm.gpu_capture:
    dest: /var/tmp/gpu-capture.tar.gz
"""

RETURN = r"""
dest:
  description: The archive.
  returned: always
  type: str
  sample: /var/tmp/gpu-capture.tar.gz
commands:
  description: The recorded commands with their exit statuses, null for one that did not end in time.
  returned: always
  type: list
  elements: dict
  sample: [{argv: [nvidia-smi, topo, -m], rc: 0}]
files:
  description: Number of recorded files.
  returned: always
  type: int
  sample: 96
left_out:
  description: Files that were too long even when cut down.
  returned: always
  type: list
  elements: str
  sample: []
replaced:
  description: How many identities were replaced, by kind (C(uuid), C(serial), C(mac), C(address), C(host)).
  returned: always
  type: dict
  sample: {uuid: 4, serial: 4, mac: 0, address: 0, host: 1}
"""

from pathlib import Path

from ansible_collections.volta.llm.plugins.module_utils.arguments import MACHINE, NVIDIA_SMI
from ansible_collections.volta.llm.plugins.module_utils.files import replace_file
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.nvidia import capture


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "dest": {"type": "path", "required": True},
            **MACHINE,
            **NVIDIA_SMI,
        },
        supports_check_mode=True,
    )
    dest = Path(module.params["dest"])
    taken = capture.take(
        capture.Recorder(module.params["sysroot"], module.params["timeout"]), module.params["nvidia_smi"]
    )
    if not module.check_mode:
        try:
            replace_file(dest, capture.archive(taken), 0o600)
        except OSError as exc:
            module.fail_json(msg=f"{dest} cannot be written: {exc.strerror}; name a file in a folder that exists")
    module.exit_json(
        changed=True,
        dest=str(dest),
        commands=[{"argv": list(item.argv), "rc": item.rc} for item in taken.commands],
        files=len(taken.files),
        left_out=taken.left_out,
        replaced=taken.replaced,
    )


if __name__ == "__main__":
    main()
