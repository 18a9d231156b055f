#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Several small files of configuration in one task."""

from __future__ import annotations

DOCUMENTATION = r"""
module: text_files
short_description: Write and remove several small files of configuration at once
version_added: 0.1.0
description:
  - Brings files to content, mode and owner (the user that the task runs as), and removes others. Where nothing differs it costs one
    look, whereas M(ansible.builtin.copy) in a loop costs two runs of a module for each file.
  - A file is replaced whole. Folders that are missing are made, a link in place of a file is replaced.
author:
  - The volta.llm authors (@volta-llm)
options:
  files:
    description: Files to write.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Absolute path.
        type: path
        required: true
      content:
        description: The whole content.
        type: str
        required: true
      keep:
        description: Whether a file that is there already stays as it is.
        type: bool
        default: false
  absent:
    description: Paths of files to remove.
    type: list
    elements: path
    default: []
  mode:
    description: Mode of the written files, four octal digits.
    type: str
    default: "0644"
extends_documentation_fragment:
  - volta.llm.machine.attributes
attributes:
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Make apt wait for dpkg's lock, and load a module at boot
  volta.llm.text_files:
    files:
      - path: /etc/apt/apt.conf.d/90local
        content: |
          DPkg::Lock::Timeout "600";
      - path: /etc/modules-load.d/local.conf
        content: |
          nvidia-uvm
    absent: [/etc/modules-load.d/old.conf]
"""

RETURN = r"""
written:
  description: Paths that were written, or would be in check mode.
  returned: always
  type: list
  elements: str
removed:
  description: Paths that were removed, or would be in check mode.
  returned: always
  type: list
  elements: str
faults:
  description: What could not be done, with C(code), C(subject), C(message) and C(remedy). See C(docs/faults.md).
  returned: always
  type: list
  elements: dict
"""

from ansible_collections.volta.llm.plugins.module_utils import text_files
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "files": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "path": {"type": "path", "required": True},
                    "content": {"type": "str", "required": True},
                    "keep": {"type": "bool", "default": False},
                },
            },
            "absent": {"type": "list", "elements": "path", "default": []},
            "mode": {"type": "str", "default": "0644"},
        },
        supports_check_mode=True,
    )
    given = module.params
    if not (given["mode"].isdigit() and set(given["mode"]) <= set("01234567")):
        module.fail_json(msg=f'mode: {given["mode"]!r} is no octal number; write it as "0644"')
    outcome = text_files.converge(given["files"], given["absent"], int(given["mode"], 8), module.check_mode)
    finish(
        module,
        outcome.faults,
        changed=bool(outcome.written or outcome.removed),
        written=outcome.written,
        removed=outcome.removed,
        diff=outcome.changes,
    )


if __name__ == "__main__":
    main()
