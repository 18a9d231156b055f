#!/usr/bin/python
# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Keep a model of Ollama: pulled or made from a local file, verified to the blob; or absent."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ollama_model
short_description: Keep a model of Ollama, verified to the blob
version_added: 0.1.0
description:
  - Sees to it that a model is in Ollama's store, pulled from a registry or made from a local GGUF, or that it is absent.
  - Proves what is on the disk. Every blob that the model's manifest names must be there, have the size that stands there and the SHA-256 that
    is its name. Ollama hashes a blob when it has come and never again, lists a model whose blobs are gone, and does not look at a blob
    that was there before.
  - A stamp (size, mtime, inode, SHA-256) of each blob, in a folder C(.volta-transfer) among the blobs, lets the next run prove within
    milliseconds that nothing changed. Ollama passes that folder over.
  - A pull is followed to its end. Ollama answers 200 before it begins, and errors come in the stream; only its C(success) counts. It repeats how
    far it is whether or not anything comes, so what counts as progress is a new figure, see O(stall_timeout).
  - A disk that is too small is told as soon as Ollama names the size of a blob, before its bytes come.
  - What passes by itself, such as a broken connection, is tried again. Ollama goes on with what it has, and so does the next run when
    this one is killed. Its clean-up at its own start takes partials that are older than an hour, unless E(OLLAMA_NOPRUNE) is set for it.
  - Only one run at a time works on a model; another one waits, showing the first one's progress. Pulls of others on the same server share
    the work, which Ollama itself sees to.
  - "Ollama asks the registry, so its service's own E(HTTPS_PROXY) and E(NO_PROXY) count. This module speaks to the server without a proxy."
  - Run it on the machine of the server, since it reads the store there, as root or as the user of the service.
options:
  name:
    description:
      - The model as C([host/][namespace/]name[:tag]), such as C(qwen3:8b) or C(hf.co/owner/repository-GGUF:Q4_K_M). Without a tag it is C(latest).
        Ollama tells no capitals from small letters.
    type: str
    required: true
  state:
    description:
      - V(present) brings and verifies the model. V(absent) deletes it through Ollama, which keeps blobs that other models need.
    type: str
    choices: [present, absent]
    default: present
  gguf:
    description:
      - A GGUF on the machine to make the model from, in place of a pull. It must be proved, by the stamp that M(volta.llm.model_download) left beside
        it or by O(digest); see O(allow_unverified). One without a stamp is read, and stamped for the next run. It may be removed once the model
        is there.
      - "A model in shards (C(-00001-of-00004.gguf)) is refused. Ollama 0.24.0 knows nothing of shards: it takes each file for a model of its own.
        From 0.30 on its C(create) merges them, which needs the room twice and is not used here, and no release pulls them: Hugging Face refuses
        such a tag. Join them with C(llama-gguf-split --merge), or let llama-server serve them as they are."
    type: path
  allow_unverified:
    description:
      - Whether O(gguf) may be a file that nothing proves.
    type: bool
    default: false
  link:
    description:
      - Whether the store may share the bytes of O(gguf). It is cloned where the file system can (XFS, Btrfs). Else it is linked, which makes it the
        same file under a second name. Then it takes the store's owner and mode 0644, as Ollama needs to own its blobs, and whoever writes into it
        writes into the model, which the next run finds by its stamp. Replacing it by another file, as M(volta.llm.model_download) does, leaves
        the model as it is.
      - A file is linked only where root or the store's user owns it, nobody else may write it, and both lie on one file system. In all other
        cases, and with V(false), it is sent through Ollama and lies there twice.
    type: bool
    default: true
  parameters:
    description:
      - Parameters of a model that is made from O(gguf), as C(PARAMETER) of a Modelfile, such as C(num_ctx). Names and types are those of Ollama 0.24.0,
        which itself only logs what it does not know. Numbers may be written as text.
    type: dict
  template:
    description:
      - Template of the prompt for a model that is made from O(gguf), in Ollama's form. Not given, it is the one in the file.
    type: str
  system:
    description:
      - System prompt for a model that is made from O(gguf).
    type: str
  digest:
    description:
      - What the model must be. 12 to 64 hexadecimal digits of the digest that C(ollama list) shows (the SHA-256 of the manifest), or the whole SHA-256
        of its weights. A model with another digest is pulled anew; a tag that has moved on at the registry is a fault then.
    type: str
  size:
    description:
      - Bytes of all blobs of the model together.
    type: int
  architecture:
    description:
      - Architecture that Ollama must show for it, such as C(qwen3).
    type: str
  parameter_size:
    description:
      - Number of parameters that Ollama must show for it, such as C(8B) or C(8.2B); as exact as it is written, rounded or cut off.
    type: str
  quantization:
    description:
      - Quantisation that Ollama must show for it, such as C(Q4_K_M).
    type: str
  context:
    description:
      - Tokens of context that the model must at least be made for. What a request is granted is the service's E(OLLAMA_CONTEXT_LENGTH) or C(num_ctx).
    type: int
  verify:
    description:
      - V(stamp) trusts stamps that still fit; V(full) hashes every blob again. Without a stamp, or in any doubt, blobs are always hashed.
    type: str
    choices: [stamp, full]
    default: stamp
  repair:
    description:
      - Whether a broken, short or missing blob is removed and brought again, and a manifest that cannot be read replaced. If not, that is a
        fault. A model that is in memory with the broken bytes is unloaded.
      - A blob that comes wrong twice ends the task. With two different hashes memory or disk is suspected.
    type: bool
    default: false
  clean_partials:
    description:
      - Whether what unfinished pulls and uploads of any model have left in the store is removed, see RV(partials). What a pull may be at work on is
        left, with a warning. That is what a process has open (a pull holds the file that it writes, which C(/proc) shows to root), and what
        was written within the last minute. Nothing is removed by a run that failed.
    type: bool
    default: false
  base_url:
    description:
      - Address of the server.
    type: str
    default: http://127.0.0.1:11434
  models_directory:
    description:
      - Folder of the store, what E(OLLAMA_MODELS) is in the service. One that is not the server's is refused before anything is pulled.
    type: path
    default: /var/lib/ollama/models
  insecure:
    description:
      - Whether Ollama may ask the registry over http, for a registry of your own without TLS.
    type: bool
    default: false
  timeout:
    description:
      - Seconds to wait for a connection and for an answer that needs no work.
    type: float
    default: 30.0
  stall_timeout:
    description:
      - Seconds without anything new after which a pull is broken off and tried again. Ollama itself tries a part again after 30 seconds. While
        it hashes it says nothing, and is given a second more for every 20 MB.
    type: float
    default: 120.0
  retries:
    description:
      - How many tries of a pull in a row may bring nothing. Before each but the first it pauses 1, 2, 4 and so on up to 60 seconds.
    type: int
    default: 5
  wait:
    description:
      - Seconds to wait for a server that does not listen yet, as one does that was just started.
    type: float
    default: 10.0
  progress_file:
    description:
      - Where the progress record is written. Set by the action plugin that shows it.
    type: path
extends_documentation_fragment:
  - volta.llm.machine.variables
  - volta.llm.machine.attributes
attributes:
  check_mode:
    details:
      - Says what would be done by what the server and the disk tell; the registry is not asked. Blobs without a stamp are read. A server that is not
        up is no fault then, see RV(would_verify).
  diff_mode:
    support: full
notes:
  - "The fault codes are: V(model_name_invalid), V(bad_argument), V(model_parameter_invalid), V(ollama_not_answering), V(ollama_error),
    V(ollama_store_elsewhere), V(ollama_sharded_model), V(gguf_unproved), V(disk_full), V(source_unreachable), V(source_missing),
    V(source_unauthorized), V(ollama_too_old), V(registry_not_trusted), V(pull_stalled), V(blob_from_source_wrong), V(blob_hash_unstable),
    V(manifest_broken), V(blob_missing), V(blob_short), V(blob_corrupt), V(model_digest_differs), V(model_differs), those of
    M(volta.llm.gguf_info) for O(gguf), and as warnings V(partials_in_use) and V(proof_not_kept)."
  - Ollama sets the time of a blob anew when another model is made from it by hand (C(ollama create)); the next run hashes it again then.
author:
  - The volta.llm authors
"""

EXAMPLES = r"""
- name: Keep a model, verified
  volta.llm.ollama_model:
    name: qwen3:8b
    digest: 500a1f067a9f
    architecture: qwen3
    quantization: Q4_K_M
    context: 40960

- name: Make a model from a file that model_download has brought, without a second copy
  volta.llm.ollama_model:
    name: qwen3-8b-local
    gguf: /srv/models/qwen3-8b/qwen3-8b.gguf
    parameters:
      num_ctx: 16384

- name: Hash everything again and bring anew what is broken
  volta.llm.ollama_model:
    name: qwen3:8b
    verify: full
    repair: true

- name: Be rid of a model and of what unfinished pulls have left
  volta.llm.ollama_model:
    name: qwen3:8b
    state: absent
    clean_partials: true
"""

RETURN = r"""
name:
  description: The model as C(ollama list) shows it, with its tag.
  returned: always
  type: str
  sample: qwen3:8b
action:
  description: >-
    What was done, or in check mode would be: V(pulled), V(created), V(repaired), V(deleted); null for nothing.
  returned: always
  type: str
  sample: pulled
digest:
  description: SHA-256 of the model's manifest, whose first 12 digits C(ollama list) shows; null where there is no model.
  returned: always
  type: str
  sample: 500a1f067a9f782620b40bee6f7b0c89e17ae61f686b92c24933e4ca4b2b8b41
size:
  description: Bytes of all blobs of the model by its manifest; null where there is no model.
  returned: always
  type: int
  sample: 5225388164
verified:
  description: Whether every blob was proved to have the bytes that its name stands for, now or by its stamp; null where there is no model.
  returned: always
  type: bool
bytes_pulled:
  description: Bytes that pulls have brought into the store in this run, by what lies there afterwards.
  returned: always
  type: int
  sample: 5225388164
blobs_hashed:
  description: Blobs that were read to verify them.
  returned: always
  type: int
  sample: 5
placed:
  description: >-
    How O(gguf) came into the store in this run: V(clone), V(link), V(upload); null where it was not brought.
  returned: always
  type: str
details:
  description: What Ollama shows of the model; null where it was not asked. A value that it does not tell is null.
  returned: always
  type: dict
  contains:
    architecture:
      description: Architecture.
      type: str
      sample: qwen3
    parameter_size:
      description: Number of parameters as it is shown.
      type: str
      sample: 8.2B
    parameter_count:
      description: Number of parameters.
      type: int
    quantization:
      description: Quantisation.
      type: str
      sample: Q4_K_M
    context:
      description: Tokens of context that the model was made for.
      type: int
      sample: 40960
partials:
  description: What unfinished pulls and uploads, of any model, have left in the store.
  returned: always
  type: dict
  contains:
    count:
      description: How many pulls and uploads.
      type: int
    files:
      description: How many files.
      type: int
    size:
      description: Bytes that they take on the disk. The files are sparse, so that their length says nothing.
      type: int
    removed:
      description: Bytes on the disk that were removed, in check mode would be, with O(clean_partials).
      type: int
would_pull:
  description: Whether this was check mode and the model would be pulled.
  returned: always
  type: bool
would_create:
  description: Whether this was check mode and the model would be made from O(gguf).
  returned: always
  type: bool
would_delete:
  description: Whether this was check mode and the model would be deleted.
  returned: always
  type: bool
would_verify:
  description: Whether this was check mode and something could not be judged yet, because the model is not there or the server not up.
  returned: always
  type: bool
waited:
  description: Whether another run was at work on the model and was waited for.
  returned: always
  type: bool
notes:
  description: What else is worth knowing, such as what was repaired and why a file was copied.
  returned: always
  type: list
  elements: str
faults:
  description: What is wrong, as records with C(code), C(subject), C(message), C(remedy), most serious first.
  returned: always
  type: list
  elements: dict
"""

from dataclasses import asdict

from ansible_collections.volta.llm.plugins.module_utils.arguments import VARIABLES
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule
from ansible_collections.volta.llm.plugins.module_utils.ollama.models import Keeper, Request
from ansible_collections.volta.llm.plugins.module_utils.ollama.recipe import Expected
from ansible_collections.volta.llm.plugins.module_utils.results import finish

#: Options that a request has under their own names.
SAME = (
    *("name", "state", "base_url", "models_directory", "gguf", "allow_unverified", "link", "parameters", "template"),
    *("system", "digest", "repair", "clean_partials", "insecure", "timeout", "stall_timeout", "retries", "wait"),
    "progress_file",
)
EXPECTED = ("architecture", "parameter_size", "quantization", "context", "size")


def main() -> None:
    module = VoltaModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "gguf": {"type": "path"},
            "allow_unverified": {"type": "bool", "default": False},
            "link": {"type": "bool", "default": True},
            "parameters": {"type": "dict"},
            "template": {"type": "str"},
            "system": {"type": "str"},
            "digest": {"type": "str"},
            "size": {"type": "int"},
            "architecture": {"type": "str"},
            "parameter_size": {"type": "str"},
            "quantization": {"type": "str"},
            "context": {"type": "int"},
            "verify": {"type": "str", "choices": ["stamp", "full"], "default": "stamp"},
            "repair": {"type": "bool", "default": False},
            "clean_partials": {"type": "bool", "default": False},
            "base_url": {"type": "str", "default": "http://127.0.0.1:11434"},
            "models_directory": {"type": "path", "default": "/var/lib/ollama/models"},
            "insecure": {"type": "bool", "default": False},
            "timeout": {"type": "float", "default": 30.0},
            "stall_timeout": {"type": "float", "default": 120.0},
            "retries": {"type": "int", "default": 5},
            "wait": {"type": "float", "default": 10.0},
            "progress_file": {"type": "path", "no_log": False},
            **VARIABLES,
        },
        supports_check_mode=True,
    )
    given = module.params
    request = Request(
        **{option: given[option] for option in SAME},
        expected=Expected(**{option: given[option] for option in EXPECTED}),
        full=given["verify"] == "full",
        check=module.check_mode,
    )
    outcome = Keeper(request).run()
    results = asdict(outcome)
    faults, before = outcome.faults, results.pop("before")
    del results["faults"]
    if module._diff and outcome.changed:
        gone = outcome.action == "deleted"
        after = "" if gone else f"{outcome.name}  {'to be brought' if module.check_mode else outcome.digest}\n"
        results["diff"] = {"before": f"{outcome.name}  {before}\n" if before else "", "after": after}
    finish(module, faults, **results)


if __name__ == "__main__":
    main()
