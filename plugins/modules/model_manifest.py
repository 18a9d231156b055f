#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ask a model's sources what its files are, to lock it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_manifest
short_description: Sizes and SHA-256 of a model's files, as its sources name them
version_added: 0.1.0
description:
  - Asks every source for size and SHA-256 of the files, and for the commit that a revision is now. Nothing is downloaded and nothing is
    changed.
  - The result is what O(volta.llm.model_download#module:lock) takes. Kept beside the inventory, nothing else is accepted from then on.
  - Hugging Face, its mirrors and ModelScope are asked for their list of files; where a mirror has none, the headers that come with its
    redirect are read. Ollama's store names a digest. A plain address or a folder names nothing; a checksum file (O(checksums)) does.
  - What a source has is kept for that source, since sources differ. One that does not answer is left out, with a note.
extends_documentation_fragment:
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
options:
  name:
    description:
      - Name of the model, kept in the lock for whoever reads it.
    type: str
    default: ""
  files:
    description:
      - The files, as in M(volta.llm.model_download). What is written there stands.
    type: list
    elements: dict
    required: true
  sources:
    description:
      - Where they can come from, as in M(volta.llm.model_download).
    type: list
    elements: dict
    default: []
  checksums:
    description:
      - Address or path of a checksum file.
    type: str
  headers:
    description:
      - HTTP headers for the address asked first. They are not sent on to other hosts.
    type: dict
  token:
    description:
      - Access token for Hugging Face alone, as in M(volta.llm.model_download).
    type: str
  timeout:
    description:
      - Seconds to wait for a connection and for each answer.
    type: float
    default: 30.0
  ca_path:
    description:
      - File with certificates to trust in place of the system's.
    type: path
  unreachable_hosts:
    description:
      - Hosts that are not to be tried, with all below them.
    type: list
    elements: str
    default: []
notes:
  - "The fault codes are: V(bad_argument), V(source_unauthorized), V(source_missing), V(source_unreachable), V(checksum_missing), V(not_locked)."
seealso:
  - module: volta.llm.model_download
author:
  - The volta.llm authors
"""

EXAMPLES = r"""
- name: Ask the hub what the files are
  volta.llm.model_manifest:
    name: qwen
    files:
      - name: qwen-00001-of-00002.gguf
      - name: qwen-00002-of-00002.gguf
    sources:
      - type: huggingface
        repo: example/Qwen-GGUF
        path: UD-Q4_K_XL/
  register: manifest
"""

RETURN = r"""
lock:
  description: What each source has, in the form of a lock.
  returned: always
  type: dict
  contains:
    version:
      description: Version of the form.
      type: int
    model:
      description: The option O(name).
      type: str
    sources:
      description: One entry for each source that names hashes; C(files) for what stands in O(files) and O(checksums).
      type: list
      elements: dict
      sample:
        - id: huggingface:https://huggingface.co/example/Qwen-GGUF/UD-Q4_K_XL/
          revision: main
          commit: 5c1f0a7d6c7a7f0d1c6a6b9c5d3e2f1a0b9c8d7e
          files:
            - name: qwen-00001-of-00002.gguf
              path: UD-Q4_K_XL/qwen-00001-of-00002.gguf
              size: 49000000000
              sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
notes:
  description: What is worth knowing, such as sources that did not answer or differ from each other.
  returned: always
  type: list
  elements: str
faults:
  description: What is wrong, as records with C(code), C(subject), C(message), C(remedy), most serious first.
  returned: always
  type: list
  elements: dict
"""

from ansible_collections.volta.llm.plugins.module_utils.arguments import VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish
from ansible_collections.volta.llm.plugins.module_utils.transfer.engine import Settings
from ansible_collections.volta.llm.plugins.module_utils.transfer.lockfile import gather
from ansible_collections.volta.llm.plugins.module_utils.transfer.request import (
    secrets_in,
    wanted_sets,
    whole_sets,
)


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "name": {"type": "str", "default": ""},
            "files": {"type": "list", "elements": "dict", "required": True},
            "sources": {"type": "list", "elements": "dict", "default": []},
            "checksums": {"type": "str"},
            "headers": {"type": "dict", "no_log": True},
            "token": {"type": "str", "no_log": True},
            "timeout": {"type": "float", "default": 30.0},
            "ca_path": {"type": "path"},
            "unreachable_hosts": {"type": "list", "elements": "str", "default": []},
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    params = module.params
    module.no_log_values.update(secrets_in(params))
    settings = Settings(
        timeout=params["timeout"],
        ca_path=params["ca_path"],
        unreachable=tuple(host.strip().lower().rstrip(".") for host in params["unreachable_hosts"]),
    )
    _, faults = wanted_sets({**params, "dest": "/"})
    if faults:
        finish(module, faults, lock=None, notes=[])
    try:
        gathered = gather(
            whole_sets(params["files"]),
            params["sources"],
            settings,
            params["headers"] or {},
            params["token"],
            params["checksums"],
            params["name"],
        )
    except FaultError as exc:
        finish(module, [exc.fault], lock=None, notes=[])
    lock = gathered.lock.as_dict() if gathered.lock.sources else None
    finish(module, gathered.faults, changed=False, lock=lock, notes=gathered.notes)


if __name__ == "__main__":
    main()
