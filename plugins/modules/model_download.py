#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Download large files: resumable, verified while they arrive, atomic."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_download
short_description: Download a large file, or a set of them, resumable and verified
version_added: 0.1.0
description:
  - Fetches a file (or the shards of a model) over several connections, hashes it while it arrives, and gives it its name only when
    size and SHA-256 are right. What an interrupted run fetched is used by the next one, after hashing it.
  - A stamp (size, mtime, inode, SHA-256) beside the file lets the next run prove within milliseconds that nothing changed.
  - Sources are tried in order. With O(files), each is used for the whole set or not at all, and what a source has may differ from what
    the others have (O(sources[].files), O(lock)).
  - Raw parts of one file (C(model.gguf.a), C(model.gguf.b); C(.00), C(.01); C(.part1of2)) that are listed in O(files) are joined while
    they arrive. Shards (C(-00001-of-00004.gguf)) are never joined; one that is listed alone stands for its whole set.
  - Nothing of other tools' caches is used or written; all that is needed is room for the files in O(dest).
  - Only one run at a time works on a file; another one waits, showing the first one's progress, and takes over what it left.
  - "Proxies are taken from the environment (C(http_proxy), C(https_proxy), C(no_proxy))."
  - Partial data lie in C(<dest>.part), everything else in a folder C(.volta-transfer) beside the file.
extends_documentation_fragment:
  - ansible.builtin.files
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
options:
  dest:
    description:
      - The file to bring, or with O(files) the folder they go to. Folders are made where missing.
    type: path
    required: true
  url:
    description:
      - Address of the file. Short for a single entry in O(sources).
    type: str
  sources:
    description:
      - Where the file can come from, in order of preference. A URL or file that ends in V(/) stands for the file of the same name
        below it.
    type: list
    elements: dict
    suboptions:
      type:
        description:
          - What the source is. Default is V(file) when O(sources[].file) is given, else V(url).
          - V(controller) is a file on the control node. It is streamed over the connection of Ansible in pieces, straight to the folder it
            goes to, goes on after an interruption, and is hashed when it is there. That needs no room elsewhere, but is slower than a
            server near the machine, and does not work in the background (C(async)).
          - V(ollama) is a model that Ollama has pulled. Its file is not copied but cloned or linked where the file system can. It is one file,
            so a set of several is refused for it; O(sources[].files) names the one. What unfinished pulls have left in the store is a
            warning, and never removed.
        type: str
        choices: [url, file, controller, huggingface, modelscope, ollama]
      url:
        description: Address, http or https.
        type: str
      file:
        description: File or folder that is already on the machine. It is copied; the file system may share the blocks.
        type: path
      controller:
        description: File or folder on the control node, with O(sources[].type=controller).
        type: str
      model:
        description: Name in Ollama's store, as C(ollama list) shows it, with O(sources[].type=ollama).
        type: str
      store:
        description: Folder of Ollama's store. Default are C(OLLAMA_MODELS) of the environment and the usual places.
        type: path
      repo:
        description: Repository at the model hub, as C(owner/name).
        type: str
      revision:
        description: Branch, tag or commit at the hub. A commit is the only one that cannot move.
        type: str
      path:
        description: Path of the file in the repository, or of a folder when it ends in V(/). Default is the file's name.
        type: str
      endpoint:
        description:
          - Address of the hub or of a mirror of it. Default is E(HF_ENDPOINT) or C(https://huggingface.co), and C(https://www.modelscope.cn).
        type: str
      size:
        description: What this source's own listing says about the size, in bytes.
        type: int
      sha256:
        description: What this source's own listing says about the SHA-256.
        type: str
      headers:
        description: HTTP headers for this source, in addition to O(headers).
        type: dict
      token:
        description: Access token for this source alone.
        type: str
      files:
        description:
          - What this source has where that differs from O(files), such as one file in place of shards. Same form.
        type: list
        elements: dict
        suboptions:
          name:
            description: Name of the file in O(dest).
            type: str
            required: true
          size:
            description: Size in bytes.
            type: int
          sha256:
            description: SHA-256, 64 hexadecimal digits.
            type: str
  lock:
    description:
      - What the files must be, by source, as M(volta.llm.model_manifest) gathered it. Options that contradict it are refused.
    type: dict
  allow_unverified:
    description:
      - Whether files are accepted for which no SHA-256 is known. They are then reported with a warning.
    type: bool
    default: true
  unreachable_hosts:
    description:
      - Hosts that are not to be tried, with all below them. A source that is there, or sends on to there, is given up at once.
    type: list
    elements: str
    default: []
  files:
    description:
      - A set of files that belong together, such as the shards of a model in their order. Shards keep their names and lie side by side.
    type: list
    elements: dict
    suboptions:
      name:
        description: Name of the file in O(dest).
        type: str
        required: true
      url:
        description: Address of this file.
        type: str
      urls:
        description: Addresses of this file, one per mirror; all files list the mirrors in the same order.
        type: list
        elements: str
      size:
        description: Size in bytes.
        type: int
      sha256:
        description: SHA-256, 64 hexadecimal digits.
        type: str
  sha256:
    description:
      - SHA-256 the file must have, 64 hexadecimal digits. Without it only the size can be checked, which the result says with
        a warning.
    type: str
  size:
    description:
      - Size the file must have, in bytes.
    type: int
  checksums:
    description:
      - Address or path of a checksum file that holds the SHA-256 of files for which none is given. The forms of C(sha256sum), BSD and
        openssl are understood, and a bare hash where only one file needs one. A hash that could be another file's is none.
      - It is read in each run. A hash that stands in the playbook is the better proof, for it cannot change with the file.
    type: str
  connections:
    description:
      - Range connections side by side, at most. Fewer are used when the server cannot do ranges or refuses, and only one
        as long as that one is so fast that this machine is what it waits for.
    type: int
    default: 4
  headers:
    description:
      - HTTP headers for the address asked first. They are not sent on to other hosts a redirect leads to.
    type: dict
  token:
    description:
      - Access token for Hugging Face, sent as a bearer token to that host (or the one that E(HF_ENDPOINT) names) and no other. For a
        mirror that needs one, and for ModelScope, write O(sources[].token).
    type: str
  timeout:
    description:
      - Seconds to wait for a connection; the head of an answer must come within this and O(stall_timeout).
    type: float
    default: 30.0
  stall_timeout:
    description:
      - Seconds without a byte after which a connection is given up and made anew, from the request on.
    type: float
    default: 30.0
  retries:
    description:
      - How many attempts in a row may bring nothing before the next source is tried. A mishap that all connections meet
        at once counts once.
      - Before each but the first it pauses 1, 2, 4 and so on up to 120 seconds, or for as long as the server asks, up to
        120 seconds. With the defaults a silent source is given up after 6 × 30 + 31 = 211 seconds.
    type: int
    default: 5
  ca_path:
    description:
      - File with certificates to trust in place of the system's.
    type: path
  verify:
    description:
      - V(stamp) trusts the stamp when size, mtime and inode still fit; V(full) hashes the files again, several at a time.
      - Without a stamp, or in any doubt, files are always hashed.
    type: str
    choices: [stamp, full]
    default: stamp
  refetch:
    description:
      - Whether a file that was verified and has other bytes now is fetched again. If not, that is a fault.
    type: bool
    default: true
  remove_corrupt:
    description:
      - Whether files are removed that earlier runs found wrong and set aside as C(<name>.corrupt). There is at most one for each file.
    type: bool
    default: false
  progress_file:
    description:
      - Where the progress record is written. Set by the action plugin that shows it.
    type: path
  job_file:
    description:
      - The C(results_file) that an earlier task with this module, C(async) and C(poll=0) returned. That job is waited for, with
        progress, and its result returned; when it is gone, the module runs as usual. Used by the action plugin only.
    type: path
attributes:
  check_mode:
    details: A file without a stamp is read to predict the result.
  diff_mode:
    support: full
  async:
    description: Supports the C(async) keyword.
    support: full
notes:
  - "The fault codes are: V(bad_argument), V(disk_full), V(dest_not_writable), V(source_unauthorized), V(hash_mismatch), V(size_mismatch),
    V(not_the_file), V(lfs_pointer), V(empty_file), V(source_missing), V(source_refused), V(source_unreachable), V(source_misbehaves),
    V(source_changed), V(checksum_missing), V(file_missing), V(file_corrupt), V(lock_invalid), V(lock_mismatch), V(not_locked), and
    those of M(volta.llm.gguf_info) where no SHA-256 proves a model; as warnings V(unverified), V(slow_storage) and V(pull_unfinished)."
  - When a right hash was written wrong, the whole file that was refused is kept in C(.volta-transfer) and taken without a new download
    once the value is corrected.
author:
  - The volta.llm authors
"""

EXAMPLES = r"""
- name: Bring one file
  volta.llm.model_download:
    dest: /srv/models/small/model.gguf
    url: https://models.example.org/model.gguf
    size: 4831838208
    sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

- name: Bring the shards of a model from a mirror, from the hub where that fails
  volta.llm.model_download:
    dest: /srv/models/qwen
    sources:
      - url: http://mirror.example.org/qwen/
      - type: huggingface
        repo: example/Qwen-GGUF
        revision: 5c1f0a7d6c7a7f0d1c6a6b9c5d3e2f1a0b9c8d7e
        path: UD-Q4_K_XL/
    files:
      - name: qwen-00001-of-00002.gguf
        size: 49000000000
        sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      - name: qwen-00002-of-00002.gguf
        size: 12000000000
        sha256: 60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752
    owner: root
    group: llama-server
    mode: "0640"

- name: Take what Ollama has, without a second copy
  volta.llm.model_download:
    dest: /srv/models/qwen3-8b/qwen3-8b.gguf
    sources:
      - type: ollama
        model: qwen3:8b

- name: Join the raw parts that a mirror has
  volta.llm.model_download:
    dest: /srv/models/qwen
    sources:
      - url: http://mirror.example.org/qwen/
    files:
      - name: qwen.gguf
        sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      - name: qwen.gguf.a
      - name: qwen.gguf.b

- name: Start a download and do something else meanwhile
  volta.llm.model_download:
    dest: /srv/models/small/model.gguf
    url: https://models.example.org/model.gguf
    sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
  async: 604800
  poll: 0
  register: started
  changed_when: false

- name: Join it
  volta.llm.model_download:
    dest: /srv/models/small/model.gguf
    url: https://models.example.org/model.gguf
    sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    job_file: "{{ started.results_file }}"
"""

RETURN = r"""
dest:
  description: The option O(dest).
  returned: always
  type: str
  sample: /srv/models/small/model.gguf
size:
  description: Size of the file in bytes, with O(files) of all of them; null when it is not there.
  returned: always
  type: int
  sample: 4831838208
sha256:
  description: SHA-256 of the file; null with O(files) (see RV(files[].sha256)).
  returned: always
  type: str
  sample: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
source:
  description: Where the file came from, without query string or login; null when it was there and its origin is not known.
  returned: always
  type: str
  sample: https://models.example.org/model.gguf
bytes_fetched:
  description: Bytes of file content received over the network in this run, of all files.
  returned: always
  type: int
  sample: 4831838208
resumed_from:
  description: Bytes that an earlier run had left and this one used, of all files.
  returned: always
  type: int
  sample: 0
verified:
  description: >-
    How much is proved about the least proved file: V(sha256) (it has the expected hash), V(source) (it has the hash that the
    source itself names), V(size) (only the size was given), V(none) (neither was given);
    null when a file is not there or not right.
  returned: always
  type: str
  sample: sha256
waited:
  description: Whether another run was at work on the file and was waited for.
  returned: always
  type: bool
duration_s:
  description: Duration in seconds.
  returned: always
  type: float
files:
  description: The same for each file.
  returned: always
  type: list
  elements: dict
  contains:
    dest:
      description: Path of the file.
      type: str
    size:
      description: Size in bytes.
      type: int
    sha256:
      description: SHA-256 of its bytes.
      type: str
    source:
      description: Where it came from; null when not known.
      type: str
    bytes_fetched:
      description: Bytes received in this run.
      type: int
    resumed_from:
      description: Bytes an earlier run had left.
      type: int
    verified:
      description: V(sha256), V(source), V(size), V(none), or null when it is not there or not right.
      type: str
    changed:
      description: Whether it was put in place by this run (in check mode, would be).
      type: bool
    set_aside:
      description: Where a file was moved that stood under this name and was not right; null when there was none.
      type: str
first:
  description: The file that an engine is given, the first of the set that is there; null when none is.
  returned: always
  type: str
  sample: /srv/models/qwen/qwen-00001-of-00002.gguf
corrupt:
  description: Files set aside by this run or earlier ones, largest first, with what they take on the disk in bytes.
  returned: always
  type: list
  elements: dict
  sample: [{path: /srv/models/qwen/qwen.gguf.corrupt, size: 49000000000}]
orphans:
  description: What other programs' unfinished downloads left beside the files, in the same form. Nobody needs it.
  returned: when something was fetched or is wrong
  type: list
  elements: dict
notes:
  description: What else is worth knowing, such as why a file was copied that should have been linked.
  returned: always
  type: list
  elements: str
bytes_sent:
  description: Bytes sent from the control node in this run.
  returned: when a source of the type controller was used
  type: int
passed_over:
  description: Faults of sources that failed before another one succeeded, as records like those in RV(faults).
  returned: always
  type: list
  elements: dict
faults:
  description: What is wrong, as records with C(code), C(subject), C(message), C(remedy), most serious first.
  returned: always
  type: list
  elements: dict
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ansible_collections.volta.llm.plugins.module_utils.arguments import VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault, FaultError, is_fatal
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.results import finish
from ansible_collections.volta.llm.plugins.module_utils.transfer.deliver import (
    Delivery,
    Report,
    Wanted,
    deliver_first,
)
from ansible_collections.volta.llm.plugins.module_utils.transfer.disk import Orphan, find_orphans, storage_warning
from ansible_collections.volta.llm.plugins.module_utils.transfer.engine import Settings
from ansible_collections.volta.llm.plugins.module_utils.transfer.lockfile import RENEW, read_lock
from ansible_collections.volta.llm.plugins.module_utils.transfer.ollama_store import partials_left
from ansible_collections.volta.llm.plugins.module_utils.transfer.request import (
    secrets_in,
    unproved,
    wanted_sets,
    with_checksums,
)
from ansible_collections.volta.llm.plugins.module_utils.transfer.store import Places

OWN_FILE = {
    "name": {"type": "str", "required": True},
    "size": {"type": "int"},
    "sha256": {"type": "str"},
}
SOURCE = {
    "type": {"type": "str", "choices": ["url", "file", "controller", "huggingface", "modelscope", "ollama"]},
    "url": {"type": "str"},
    "file": {"type": "path"},
    "controller": {"type": "str"},
    "model": {"type": "str"},
    "store": {"type": "path"},
    "token": {"type": "str", "no_log": True},
    "files": {"type": "list", "elements": "dict", "options": OWN_FILE},
    "repo": {"type": "str"},
    "revision": {"type": "str"},
    "path": {"type": "str"},
    "endpoint": {"type": "str"},
    "size": {"type": "int"},
    "sha256": {"type": "str"},
    "headers": {"type": "dict", "no_log": True},
}
FILE = {
    "name": {"type": "str", "required": True},
    "url": {"type": "str"},
    "urls": {"type": "list", "elements": "str"},
    "size": {"type": "int"},
    "sha256": {"type": "str"},
}


def summary(dest: str, wanted: list[Wanted], report: Report, seconds: float) -> dict:
    """The module's results."""
    files = [
        {
            "dest": str(outcome.dest),
            "size": outcome.size,
            "sha256": outcome.sha256,
            "source": outcome.source,
            "bytes_fetched": outcome.fetched,
            "resumed_from": outcome.resumed_from,
            "verified": outcome.verified(item),
            "changed": outcome.changed,
            "set_aside": outcome.set_aside,
        }
        for item, outcome in zip(wanted, report.files, strict=True)
    ]
    sizes = [entry["size"] for entry in files]
    single = files[0] if len(files) == 1 else {}
    sources = {entry["source"].rpartition("/")[0] for entry in files if entry["source"]}
    return {
        "dest": dest,
        "size": None if None in sizes else sum(sizes),
        "sha256": single.get("sha256"),
        "source": single.get("source") if single else (sources.pop() if len(sources) == 1 else None),
        "bytes_fetched": sum(entry["bytes_fetched"] for entry in files),
        "resumed_from": sum(entry["resumed_from"] for entry in files),
        "verified": min((entry["verified"] for entry in files), key=[None, "none", "size", "source", "sha256"].index),
        "waited": report.waited,
        "changed": any(entry["changed"] for entry in files),
        "duration_s": round(seconds, 3),
        "first": next((entry["dest"] for entry in files if entry["verified"]), None),
        "notes": report.notes,
        "passed_over": [fault.as_dict() for fault in report.passed_over],
        "files": files,
    }


def shown(orphans: list[Orphan]) -> list[dict]:
    return [{"path": str(orphan.path), "size": orphan.size} for orphan in orphans]


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "dest": {"type": "path", "required": True},
            "url": {"type": "str"},
            "sources": {"type": "list", "elements": "dict", "options": SOURCE},
            "files": {"type": "list", "elements": "dict", "options": FILE},
            "lock": {"type": "dict"},
            "allow_unverified": {"type": "bool", "default": True},
            "unreachable_hosts": {"type": "list", "elements": "str", "default": []},
            "sha256": {"type": "str"},
            "size": {"type": "int"},
            "checksums": {"type": "str"},
            "connections": {"type": "int", "default": 4},
            "headers": {"type": "dict", "no_log": True},
            "token": {"type": "str", "no_log": True},
            "timeout": {"type": "float", "default": 30.0},
            "stall_timeout": {"type": "float", "default": 30.0},
            "retries": {"type": "int", "default": 5},
            "ca_path": {"type": "path"},
            "verify": {"type": "str", "choices": ["stamp", "full"], "default": "stamp"},
            "refetch": {"type": "bool", "default": True},
            "remove_corrupt": {"type": "bool", "default": False},
            "progress_file": {"type": "path", "no_log": False},
            "job_file": {"type": "path"},
            **VARIABLES,
        },
        add_file_common_args=True,
        mutually_exclusive=[("url", "files")],
        supports_check_mode=True,
    )
    module.no_log_values.update(secrets_in(module.params))
    begun = time.monotonic()
    params = module.params
    if params["files"]:
        # AnsibleModule would put the size of the folder itself over that of the files.
        module.add_path_info = lambda results: results
    settings = Settings(
        connections=max(1, min(32, params["connections"])),
        timeout=params["timeout"],
        stall_timeout=params["stall_timeout"],
        retries=params["retries"],
        headers={},
        ca_path=params["ca_path"],
        unreachable=tuple(host.strip().lower().rstrip(".") for host in params["unreachable_hosts"]),
    )
    try:
        sets, faults = wanted_sets(params, read_lock(params["lock"]) if params["lock"] else None)
        if faults:
            finish(module, faults)
        if params["checksums"]:
            checked = [
                with_checksums(wanted, params["checksums"], settings, params["headers"] or {}) for wanted in sets
            ]
            sets = [wanted for wanted, _ in checked]
            faults = [fault for _, found in checked for fault in found]
    except FaultError as exc:
        faults = [exc.fault]
    if not faults and not params["allow_unverified"]:
        faults = [fault for wanted in sets for fault in unproved(wanted, bool(params["variable_prefix"]))]
    if faults:
        finish(module, faults)

    def prepare(path: Path) -> None:
        arguments = module.load_file_common_arguments(params, path=str(path))
        if path.is_dir():
            # The mode is that of the files; a folder made on the way stays readable for whoever may read them.
            arguments["mode"] = None
        module.set_fs_attributes_if_different(arguments, False)

    made: list[Delivery] = []

    def make(wanted: Sequence[Wanted], make_room: Callable[[], None]) -> Delivery:
        made.append(
            Delivery(
                wanted,
                settings,
                params["verify"] == "full",
                params["progress_file"],
                prepare,
                params["refetch"],
                make_room,
            )
        )
        return made[-1]

    try:
        wanted, report = deliver_first(sets, make, module.check_mode)
    except FaultError as exc:
        report = made[-1].report
        wanted = next(files for files in sets if [item.dest for item in files] == [out.dest for out in report.files])
        report.faults.insert(0, exc.fault)
    results = summary(params["dest"], list(wanted), report, time.monotonic() - begun)
    present = [item.dest for item in wanted if item.dest.is_file()]
    for dest in present:
        if dest.stat().st_nlink > 1:
            # The same file as a store's own: its owner and mode are the store's.
            continue
        arguments = module.load_file_common_arguments(params, path=str(dest))
        results["changed"] = module.set_fs_attributes_if_different(arguments, results["changed"])
    failed = [fault for fault in report.faults if is_fatal(fault)]
    set_aside = [place for item in wanted if (place := Places(item.dest).corrupt).exists()]
    if params["remove_corrupt"] and set_aside and not failed:
        if not module.check_mode:
            for place in set_aside:
                place.unlink()
            set_aside = []
        results["changed"] = True
    results["corrupt"] = shown(sorted((Orphan(p, p.stat().st_blocks * 512) for p in set_aside), key=lambda o: -o.size))
    if results["bytes_fetched"] or failed:
        folders = {item.dest.parent for item in wanted}
        results["orphans"] = shown([found for found in find_orphans(folders) if found.path not in set_aside])
    if present and not failed and results["size"]:
        largest = max(present, key=lambda dest: dest.stat().st_size)
        may_measure = not module.check_mode and (bool(results["changed"]) or params["verify"] == "full")
        slow = storage_warning(largest.parent, largest, results["size"], may_measure)
        report.faults += [slow] if slow is not None else []
    report.faults += partials_left(params["sources"] or [])
    if params["lock"]:
        report.faults = [of_lock(fault) for fault in report.faults]
    if module._diff and results["changed"]:
        changed = [entry for entry in results["files"] if entry["changed"]]
        results["diff"] = {
            "before": "",
            "after": "".join(f"{entry['dest']}  {entry['sha256'] or 'to be fetched'}\n" for entry in changed),
        }
    finish(module, report.faults, **results)


def of_lock(fault: Fault) -> Fault:
    """A mismatch with the words of one whose values stand in the lock."""
    if fault.code not in ("hash_mismatch", "size_mismatch"):
        return fault
    return replace(fault, remedy=f"{fault.remedy} The expected values are those of the lock file. {RENEW}")


if __name__ == "__main__":
    main()
