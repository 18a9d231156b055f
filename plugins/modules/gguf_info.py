#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Read the header of a GGUF model and judge whether the file can be loaded."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gguf_info
short_description: What a GGUF model is, from its header
version_added: 0.1.0
description:
  - Reads the header of a model in GGUF form (versions 2 and 3, either byte order) from a file, a shard set, a saved header, or a URL of which
    only the first megabytes are fetched.
  - Fails when an engine could not load it. A truncated file, a missing, foreign or wrong shard, or a file that is something else (Git LFS
    pointer, web page, JSON error, empty file, raw part, safetensors, archive) is called by its name.
  - Tensor data is not read, so this is quick for any size. It proves that the file is whole by length, not that its content is right;
    compare the SHA-256 for that.
  - Lengths, counts and nesting in the header are checked before they are believed; memory and time stay bounded for hostile files.
author:
  - The volta.llm authors
options:
  model:
    description:
      - Path or http(s) URL of the file. Of a shard set (C(NAME-00001-of-0000M.gguf)) give the first; the others are found by name and checked.
    type: str
    required: true
  tensors:
    description: Whether to return the list of tensors. It is long (some thousand entries for a large model).
    type: bool
    default: false
  save_header:
    description:
      - Path on the target at which to keep the header without tensor data, some hundred KB in size. M(volta.llm.vram_plan) plans from it
        when the model itself is not there.
      - A saved header holds the tensors of all shards; a vocabulary is left out.
    type: path
  http_headers:
    description: Headers for requests, for example C(Authorization) of a gated model. Not sent to another host that a redirect leads to.
    type: dict
  timeout:
    description: Limit in seconds for each answer of a server.
    type: float
    default: 30.0
  ca_file:
    description: File with certificate authorities to trust instead of the system's.
    type: path
extends_documentation_fragment:
  - volta.llm.machine.attributes
notes:
  - URLs appear in results and messages without user, password and query, which can hold secrets.
seealso:
  - module: volta.llm.vram_plan
"""

EXAMPLES = r"""
- name: Refuse a broken download before the service is started
  volta.llm.gguf_info:
    model: /srv/models/Qwen3.8-Flash-Next-UD-Q4_K_XL-00001-of-00004.gguf

- name: Look at a model before a hundred GiB are downloaded, and keep its header
  volta.llm.gguf_info:
    model: https://huggingface.co/unsloth/Qwen3.8-Flash-Next-GGUF/resolve/main/UD-Q4_K_XL/Qwen3.8-Flash-Next-UD-Q4_K_XL-00001-of-00004.gguf
    save_header: /var/lib/volta-llm/qwen3.8-flash-next.header.gguf
  register: model

- name: Show what it is
  ansible.builtin.debug:
    msg: "{{ model.architecture }}, {{ model.parameters }} parameters, {{ (model.tensor_bytes / 2**30) | round(1) }} GiB"
"""

RETURN = r"""
architecture:
  description: Architecture as the engine knows it; null when the header could not be read.
  returned: always
  type: str
  sample: qwen4exp
name:
  description: Name the header gives; null when it gives none.
  returned: always
  type: str
  sample: Qwen3.8 Flash Next
version:
  description: GGUF version.
  returned: always
  type: int
  sample: 3
byte_order:
  description: V(little) or V(big). Engines on common machines load little only.
  returned: always
  type: str
  sample: little
header_only:
  description: Whether this is a saved header without tensor data.
  returned: always
  type: bool
metadata:
  description:
    - All keys of the header. Arrays of more than 1024 elements and strings of more than 1 MiB are given as a dict of C(type) and C(count).
  returned: always
  type: dict
  sample: {general.architecture: qwen4exp, qwen4exp.block_count: 48, tokenizer.ggml.tokens: {type: string, count: 248320}}
parameters:
  description: Number of values in all tensors.
  returned: always
  type: int
  sample: 176000000000
tensor_count:
  description: Number of tensors in all shards.
  returned: always
  type: int
  sample: 1224
tensor_bytes:
  description: Bytes of tensor data in all shards.
  returned: always
  type: int
tensor_types:
  description: Number of tensors by type.
  returned: always
  type: dict
  sample: {f32: 409, q4_K: 300}
tensors:
  description: The tensors, in file order; null unless O(tensors=true).
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: Name.
      type: str
      sample: blk.0.ffn_down_exps.weight
    shape:
      description: Sizes, rows first (the engine's order).
      type: list
      elements: int
      sample: [640, 2560, 512]
    type:
      description: Type.
      type: str
      sample: q4_K
    bytes:
      description: Size of the data in bytes.
      type: int
    offset:
      description: Where the data begins, in bytes from the beginning of the data section of its file.
      type: int
shards:
  description: The files of the model, in order.
  returned: always
  type: list
  elements: dict
  contains:
    path:
      description: Path or URL.
      type: str
    bytes:
      description: Length of the file; null when it is missing.
      type: int
    tensors:
      description: Number of tensors in it; null when its header could not be read.
      type: int
wrong_file:
  description: What the file is when it is no GGUF; null otherwise.
  returned: always
  type: dict
  contains:
    kind:
      description: Stable name, as V(git_lfs_pointer), V(html), V(json), V(empty), V(raw_split_part), V(safetensors), V(zip), V(zeros), V(unknown).
      type: str
    words:
      description: The same for people.
      type: str
    remedy:
      description: What to do.
      type: str
    oid:
      description: SHA-256 of the file that a Git LFS pointer stands for.
      type: str
    size:
      description: Bytes of the file that a Git LFS pointer stands for.
      type: int
bytes_fetched:
  description: Bytes received from a server; 0 for a local file.
  returned: always
  type: int
saved_header:
  description: Path of the saved header; null when none was asked for or nothing could be read.
  returned: always
  type: str
faults:
  description: What is wrong, most serious first. The codes are listed in C(docs/faults.md).
  returned: always
  type: list
  elements: dict
  sample:
    - code: gguf_truncated
      subject: /srv/models/m-00002-of-00004.gguf
      message: the file has 1073741824 bytes, tensor blk.2.ffn_down.weight ends at byte 4294967296
      remedy: Finish or repeat the download; playbooks/model.yml does so for the files of role model.
"""

from pathlib import Path

from ansible_collections.volta.llm.plugins.module_utils.gguf.model import open_model, plain_metadata
from ansible_collections.volta.llm.plugins.module_utils.gguf.saved import keep_header
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "model": {"type": "str", "required": True},
            "tensors": {"type": "bool", "default": False},
            "save_header": {"type": "path"},
            "http_headers": {"type": "dict", "no_log": True},
            "timeout": {"type": "float", "default": 30.0},
            "ca_file": {"type": "path"},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    headers = {str(name): str(value) for name, value in (wanted["http_headers"] or {}).items()}
    model = open_model(wanted["model"], headers, wanted["timeout"], wanted["ca_file"])
    header = model.header
    changed, faults = False, list(model.faults)
    saved = wanted["save_header"] if header and not faults else None
    if saved and header:
        changed, failed = keep_header(header, Path(saved), write=not module.check_mode)
        faults += failed
    finish(
        module,
        faults,
        changed=changed,
        architecture=header.architecture if header else None,
        name=header.get("general.name") if header else None,
        version=header.version if header else None,
        byte_order=header.byte_order if header else None,
        header_only=header.header_only if header else None,
        metadata=plain_metadata(header) if header else None,
        parameters=model.parameters,
        tensor_count=len(header.tensors) if header else None,
        tensor_bytes=model.tensor_bytes,
        tensor_types=model.tensor_types if header else None,
        tensors=[tensor.as_dict() for tensor in header.tensors] if header and wanted["tensors"] else None,
        shards=[entry.as_dict() for entry in model.files],
        wrong_file=model.wrong.as_dict() if model.wrong else None,
        bytes_fetched=model.bytes_fetched,
        saved_header=saved,
    )


if __name__ == "__main__":
    main()
