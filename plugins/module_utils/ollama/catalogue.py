# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The faults of Ollama: its models, its service and settings, its releases."""

from __future__ import annotations

from ..compat import FAULTS as COMPAT
from ..faults import DISK_FULL, PORT_TAKEN, SOURCE_UNREACHABLE, Catalogue, FaultKind
from ..serving.catalogue import CATALOGUE as SERVING
from ..transfer.catalogue import CATALOGUE as TRANSFER

CATALOGUE = Catalogue(
    "Ollama",
    [
        # The server.
        FaultKind(
            "ollama_not_answering",
            "critical",
            "Nothing answers at the address of Ollama, or what answers is not Ollama.",
            "http://127.0.0.1:11434: connection refused",
        ),
        FaultKind(
            "ollama_error",
            "error",
            "Ollama reports an error that has no meaning of its own here; its words are in the message.",
            "qwen3:8b: /api/delete answers 500: internal error",
        ),
        FaultKind(
            "ollama_store_elsewhere",
            "critical",
            "The folder given for Ollama's models is not the one that the running server uses.",
            "/var/lib/ollama/models: the server lists qwen3:8b, and there is no manifest of it here",
        ),
        # Models: what is asked for.
        TRANSFER.kinds["bad_argument"],
        FaultKind(
            "model_name_invalid",
            "error",
            "A name is none that Ollama takes for a model.",
            "qwen3:8b:q4: the tag holds ':'",
        ),
        FaultKind(
            "model_parameter_invalid",
            "error",
            "Ollama has no such parameter for a model, or it takes another type of value.",
            "parameters: num_context is no parameter of Ollama",
        ),
        COMPAT.kinds["ollama_sharded_model"],
        FaultKind(
            "gguf_unproved",
            "error",
            "A local file was to become a model, and nothing proves that it is whole.",
            "/srv/models/m.gguf: was never verified",
        ),
        # Models: bringing them.
        DISK_FULL,
        SOURCE_UNREACHABLE,
        TRANSFER.kinds["source_missing"],
        TRANSFER.kinds["source_unauthorized"],
        FaultKind(
            "ollama_too_old",
            "error",
            "The registry gives the model to newer releases of Ollama only (412).",
            "qwen3.5:35b: the registry asks for a newer Ollama than 0.24.0",
        ),
        FaultKind(
            "registry_not_trusted",
            "error",
            "The certificate of the registry, or of a proxy in front of it, is not trusted by Ollama's service.",
            "qwen3:8b: x509: certificate signed by unknown authority",
        ),
        FaultKind(
            "pull_stalled",
            "error",
            "A pull brought nothing for too long, again and again.",
            "qwen3:8b: no progress for 120 s at 3.1 of 5.2 GB, 4 times",
        ),
        FaultKind(
            "blob_from_source_wrong",
            "error",
            "What the registry sends is not what its manifest names, and it is the same wrong bytes each time.",
            "sha256:9f86...: the registry sent bytes of SHA-256 e3b0..., twice",
        ),
        FaultKind(
            "blob_hash_unstable",
            "critical",
            "The same bytes have another SHA-256 each time they are fetched or read: memory or disk is failing.",
            "/var/lib/ollama/models/blobs/sha256-9f86...: three readings, three hashes",
        ),
        # Models: what is on the disk.
        FaultKind(
            "manifest_broken",
            "error",
            "The manifest of a model cannot be read, so that Ollama neither lists nor removes it.",
            "/var/lib/ollama/models/manifests/registry.ollama.ai/library/qwen3/8b: no JSON",
        ),
        FaultKind(
            "blob_missing",
            "error",
            "A model is listed, and a blob that its manifest names is not there.",
            "qwen3:8b: blobs/sha256-9f86... is missing (weights, 5.2 GB)",
        ),
        FaultKind(
            "blob_short",
            "error",
            "A blob of a model has another size than its manifest names.",
            "blobs/sha256-9f86...: 1024 bytes, the manifest of qwen3:8b names 5225374496",
        ),
        FaultKind(
            "blob_corrupt",
            "error",
            "A blob of a model has the right size and other bytes than its name stands for, or cannot be read.",
            "blobs/sha256-9f86...: its SHA-256 is e3b0...",
        ),
        FaultKind(
            "model_digest_differs",
            "error",
            "The model that the registry has under this name is not the one that was asked for.",
            "qwen3:8b: its digest is 500a1f067a9f, asked for is a3de86cd1c13",
        ),
        FaultKind(
            "model_differs",
            "error",
            "Ollama tells another architecture, size, quantisation or less context of the model than was asked for.",
            "qwen3:8b: quantization is Q4_K_M, asked for is Q8_0",
        ),
        FaultKind(
            "partials_in_use",
            "warning",
            "Partial blobs were to be removed and are left, since a pull may be at work on them.",
            "blobs/sha256-9f86...-partial: ollama (pid 812) has it open",
        ),
        FaultKind(
            "proof_not_kept",
            "warning",
            "What was proved of a model's blobs could not be written down, so that the next run hashes them again.",
            "/var/lib/ollama/models/blobs/.volta-transfer: Permission denied",
        ),
        # Releases: what is asked for, the archive, the program.
        FaultKind(
            "ollama_version_invalid",
            "error",
            "The version is not that of one release, or that release has no archive.",
            "version: 'latest' is not a version; newer releases leave the GPU under a driver older than 550",
        ),
        FaultKind(
            "ollama_release_option_invalid",
            "error",
            "An option of the release has a value that cannot work; nothing was done.",
            "prefix: 'opt/ollama' is not an absolute path",
        ),
        FaultKind(
            "ollama_machine_unsupported",
            "error",
            "Ollama has no archive for the processor of this machine.",
            "ppc64le: Ollama has archives for x86_64 and aarch64",
        ),
        *(TRANSFER.kinds[code] for code in ("checksum_missing", "hash_mismatch", "dest_not_writable")),
        FaultKind(
            "zstd_missing",
            "error",
            "The archive is compressed with zstd, and the machine has no program for that.",
            "zstd: there is no such program on this machine",
        ),
        FaultKind(
            "ollama_archive_unusable",
            "error",
            "The archive cannot be read as one of Ollama, or holds no program.",
            "ollama-linux-amd64.tar.zst: holds no bin/ollama",
        ),
        FaultKind(
            "ollama_archive_unsafe",
            "critical",
            "The archive holds an entry that no release of Ollama has; nothing of it was unpacked.",
            "../../etc/cron.d/x: leads outside the release",
        ),
        FaultKind(
            "ollama_without_cuda_v12",
            "error",
            "The archive has no CUDA 12 libraries, and those of CUDA 13 do not know V100 (sm_70).",
            "ollama-linux-arm64.tar.zst: holds no lib/ollama/cuda_v12",
        ),
        FaultKind(
            "ollama_does_not_run",
            "critical",
            "The program of a release does not run on this machine; the release in use was not touched.",
            "/opt/ollama/releases/.x/bin/ollama: Exec format error",
        ),
        FaultKind(
            "ollama_other_version",
            "error",
            "The program is another version than the one asked for; the release in use was not touched.",
            "bin/ollama: says that it is 0.30.1, asked for is 0.24.0",
        ),
        FaultKind(
            "ollama_release_missing",
            "error",
            "There is no release in use, or none to go back to.",
            "/opt/ollama/previous: there is no release to go back to",
        ),
        FaultKind(
            "ollama_release_damaged",
            "error",
            "Files of a release are not those that were installed; the release in use was not touched.",
            "0.24.0-15c5f8d66ba0: its files are not those that were installed",
        ),
        FaultKind(
            "ollama_in_use",
            "error",
            "A release is to be removed while a program of it runs.",
            "/opt/ollama/releases/0.24.0-15c5f8d66ba0/bin/ollama: is running",
        ),
        FaultKind(
            "ollama_upgrade_rolled_back",
            "critical",
            "A new release did not pass its test; the former one is in use again.",
            "0.30.5: did not pass, 0.24.0 serves again",
        ),
        FaultKind(
            "ollama_foreign_install",
            "warning",
            "The machine has an Ollama that this collection did not install. It was left as it is.",
            "/usr/local/bin/ollama: is a program of another installation",
        ),
        # Settings of the service.
        PORT_TAKEN,
        *(
            SERVING.kinds[code]
            for code in (
                *("setting_invalid", "account_unusable", "gpu_unknown", "gpu_held", "clients_not_enforced"),
                *("unit_overridden", "engine_missing"),
            )
        ),
        # What a model does once it is loaded.
        COMPAT.kinds["ollama_ignores_gpu"],
        *(
            SERVING.kinds[code]
            for code in (
                *("service_not_running", "foreign_listener", "cpu_fallback", "gpu_state_unknown", "option_ignored"),
                *("context_short", "completion_failed", "empty_answer", "garbled_answer"),
            )
        ),
        FaultKind(
            "ollama_model_unknown",
            "error",
            "The model that is to be proved is not one that Ollama lists.",
            "qwen3:8b: is not there; listed: llama3.2:3b",
        ),
        FaultKind(
            "ollama_load_timeout",
            "critical",
            "A model was not loaded in time. Nothing crashed.",
            "qwen3:8b: the server's own time limit ended the load at progress 1.00",
        ),
        FaultKind(
            "ollama_runner_crashed",
            "critical",
            "The process that loads or runs a model ended.",
            "qwen3:8b: the process that loads it ended: llama runner process has terminated: signal: aborted",
        ),
        FaultKind(
            "ollama_partly_on_cpu",
            "error",
            "A part of the model is on the CPU, beside the table of embeddings, which always is.",
            "qwen3:32b: 6081740800 of 21474836480 bytes (28%) are on the CPU",
        ),
        FaultKind(
            "ollama_device_skipped",
            "error",
            "Ollama says in its log that it does not use a GPU of the machine.",
            "ollama.service: a GPU is not used: skipping CUDA device (device Tesla V100-SXM2-32GB, cc 700)",
        ),
        FaultKind(
            "ollama_prompt_cut",
            "error",
            "A long prompt was cut before the model saw it, without an error.",
            "qwen3:8b: of a prompt of more than 4096 tokens the model saw 4096, and the server reported no error",
        ),
        FaultKind(
            "ollama_keep_alive_differs",
            "error",
            "A model stays loaded for another time than the service was told.",
            "qwen3:8b: stays loaded for 300 s instead of for ever",
        ),
        FaultKind(
            "ollama_context_own",
            "warning",
            "A model itself limits its context to less than the service is set to.",
            "nomic-embed-text: is loaded with 2048 tokens instead of 8192: it was made for 2048",
        ),
        FaultKind(
            "ollama_keep_alive_unproved",
            "warning",
            "A model that another request had loaded stays for another time than the service was told.",
            "qwen3:8b: stays loaded for 300 s instead of for ever; another request had loaded it",
        ),
        FaultKind(
            "ollama_variable_unknown",
            "error",
            "The release of Ollama reads no variable of this name, so that the setting would have no effect.",
            "environment: OLLAMA_NUM_GPU: no release of Ollama reads it, and Ollama does not say so",
        ),
        FaultKind(
            "ollama_variable_managed",
            "error",
            "A variable of the environment is set that a setting of its own controls, or that must not be set.",
            "environment: OLLAMA_HOST: `host` says the same",
        ),
        FaultKind(
            "ollama_variable_invalid",
            "error",
            "Ollama would read the value of a variable otherwise than it is meant, or pass over it.",
            "environment: OLLAMA_SCHED_SPREAD: Ollama takes 'no' for true",
        ),
        FaultKind(
            "ollama_open_to_network",
            "error",
            "Ollama would listen on an address that other machines reach, and asks nobody for a key.",
            "host: 0.0.0.0 is reachable from other machines, and Ollama has no API key",
        ),
        FaultKind(
            "ollama_library_unusable",
            "error",
            "The library that Ollama is told to use has no code for the GPUs of the machine.",
            "llm_library: cuda_v13 has no code for compute capability 7.0",
        ),
        FaultKind(
            "ollama_folder_unreachable",
            "critical",
            "The account of the service cannot get to the folder of the models, or not use what is in it.",
            "/home/alice: ollama may not enter it (mode 0750, owner alice)",
        ),
        FaultKind(
            "ollama_folder_hidden",
            "critical",
            "The unit of the service hides the folder of the models or makes it read-only, whatever the modes are.",
            "/home/ollama-models: ProtectHome=yes of /etc/systemd/system/ollama.service.d/zz.conf (line 2) hides it",
        ),
        FaultKind(
            "ollama_unit_edited",
            "warning",
            "The vendor's unit was edited by hand. It is left as it is; what our settings also say is said by them.",
            "/etc/systemd/system/ollama.service: line 12 sets OLLAMA_HOST, which `host` overrides",
        ),
        FaultKind(
            "engines_share_gpu",
            "error",
            "Two engines that are to run at once would use the same GPU.",
            "gpus: 0000:1a:00.0 is used by the other engine as well",
        ),
    ],
)

fault = CATALOGUE.fault
