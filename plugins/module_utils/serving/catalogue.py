# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The faults of serving: settings, the unit, and what the endpoint does."""

from __future__ import annotations

from ..faults import PORT_TAKEN, Catalogue, FaultKind

CATALOGUE = Catalogue(
    "serving",
    [
        # Settings, before anything is changed.
        FaultKind(
            "setting_invalid",
            "error",
            "A setting of the server is empty, of the wrong form, or outside its range.",
            "port: 70000 is not a port",
        ),
        FaultKind(
            "tensor_split_invalid",
            "error",
            "tensor_split is not a list of numbers, one for each GPU in use.",
            "tensor_split: '1:1:1:1' is text, and the engine would read it as one number: all on the first card",
        ),
        FaultKind(
            "open_without_key",
            "error",
            "The server would listen on an address that other machines reach, without an API key.",
            "host: 0.0.0.0 is reachable from outside and no API key is set",
        ),
        FaultKind(
            "api_key_unusable",
            "error",
            "An API key is too short, or holds a character that a key file or an HTTP header cannot carry.",
            "api_keys[0]: shorter than 16 characters",
        ),
        FaultKind(
            "argument_managed",
            "error",
            "extra_args or environment sets what a setting of its own controls.",
            "extra_args: --ctx-size is computed from `context_per_request` and `parallel`",
        ),
        FaultKind(
            "argument_unknown",
            "error",
            "The installed engine does not know an argument.",
            "--no-mmap: the installed engine has no such option",
        ),
        FaultKind(
            "argument_refused",
            "error",
            "The installed engine refuses the arguments when asked to parse them.",
            "llama-server: error while handling argument --cache-type-k: Unsupported cache type: q9_0",
        ),
        FaultKind(
            "context_too_large",
            "error",
            "More context per request is asked for than the model was made for.",
            "context_per_request: 300000, the model has 262144",
        ),
        FaultKind(
            "gpu_unknown",
            "error",
            "A GPU that the server should use is not one of this machine's.",
            "gpus: 0000:99:00.0 is none of 0000:1a:00.0, 0000:1c:00.0",
        ),
        FaultKind(
            "engine_missing",
            "error",
            "The engine's program is not there or does not run.",
            "/opt/llama.cpp/current/bin/llama-server: no such program",
        ),
        PORT_TAKEN,
        FaultKind(
            "instances_collide",
            "error",
            "Two servers of one machine would listen on the same port or use the same GPU.",
            "instances: llama-server and llama-server@b both listen on port 8080",
        ),
        FaultKind(
            "gpu_held",
            "error",
            "Another engine holds memory of a GPU that the server is to use.",
            "0000:1a:00.0: ollama (pid 4711, unit ollama.service) holds 20112 MiB of it",
        ),
        FaultKind(
            "model_unverified",
            "error",
            "A file of the model was never proved by its SHA-256, or changed since.",
            "model: m-00002-of-00002.gguf changed since it was verified (size, time or inode)",
        ),
        FaultKind(
            "tls_unusable",
            "error",
            "Certificate and key are missing or do not belong together, or the engine was built without TLS.",
            "tls: /etc/ssl/server.pem is not there",
        ),
        FaultKind(
            "containers_kept_out",
            "warning",
            "allowed_clients leaves out the containers of this machine, where clients such as Dify often run.",
            "allowed_clients: containers on docker0 (172.17.0.0/16) of this machine are not among them",
        ),
        FaultKind(
            "clients_not_enforced",
            "error",
            "Nothing on the machine would keep other clients than the allowed ones from the server.",
            "allowed_clients: systemd on this machine starts units without the address filter that they ask for",
        ),
        FaultKind(
            "account_unusable",
            "error",
            "The account named for the server is root's, a person's or the one that Ansible logs in with.",
            "user: oper is a person's account (uid 1000)",
        ),
        # The unit.
        FaultKind(
            "unit_invalid",
            "error",
            "systemd does not accept the unit file.",
            "llama-server.service: Unknown key name 'Foo' in section 'Service'",
        ),
        FaultKind(
            "unit_overridden",
            "error",
            "A file beside the unit (a drop-in) changes what the unit says.",
            "/etc/systemd/system/llama-server.service.d/override.conf: sets ExecStart of llama-server.service",
        ),
        FaultKind(
            "service_start_failed",
            "critical",
            "The service did not become ready; the former unit, if there was one, is in place again.",
            "llama-server.service: exited before it was ready",
        ),
        FaultKind(
            "service_stuck",
            "critical",
            "A process of the service cannot be killed (it hangs in the driver), so no second one is started.",
            "llama-server.service: pid 900 is still there in state D",
        ),
        FaultKind(
            "service_control_failed",
            "error",
            "systemctl could not do what it was asked for.",
            "llama-server.service: systemctl enable: exit status 1",
        ),
        FaultKind(
            "unit_changed",
            "warning",
            "The unit's file was changed since systemd read it.",
            "llama-server.service: its file was changed since systemd read it; the server runs with the former one",
        ),
        FaultKind(
            "service_not_enabled",
            "warning",
            "The server would not be started at boot.",
            "llama-server.service: it would not come back after a boot",
        ),
        # The endpoint.
        FaultKind(
            "service_not_running",
            "critical",
            "The service has ended or failed while it was waited for.",
            "llama-server.service: failed (exit-code)",
        ),
        FaultKind(
            "service_restarted",
            "warning",
            "The service runs, and has ended several times within a day; systemd started it again each time.",
            "it ended and was started again by systemd 4 times within a day",
        ),
        FaultKind(
            "endpoint_refused",
            "critical",
            "Nothing answers on the address within the time limit.",
            "http://127.0.0.1:8080: connection refused for 60 s",
        ),
        FaultKind(
            "endpoint_loading_timeout",
            "critical",
            "The server was still loading the model at the end of the time limit.",
            "http://127.0.0.1:8080: loading the model for more than 600 s",
        ),
        FaultKind(
            "endpoint_unresponsive",
            "critical",
            "The server accepts connections and does not answer in time.",
            "http://127.0.0.1:8080: no answer to /health within 10 s",
        ),
        FaultKind(
            "endpoint_unexpected",
            "critical",
            "What answers does not speak the server's protocol.",
            "http://127.0.0.1:8080: /health answers 404, this is not llama-server",
        ),
        FaultKind(
            "endpoint_stalled",
            "critical",
            "The server says that it is ready, computes nothing, and does not answer the test question in time, twice.",
            "http://127.0.0.1:8080: says it is ready, is idle; asked twice, no answer within 120 s",
        ),
        FaultKind(
            "endpoint_busy",
            "warning",
            "Every slot of the server works on other requests, so that the test question was not answered in time.",
            "http://127.0.0.1:8080: 2 of 2 slots at work, 5 requests wait; no answer within 120 s",
        ),
        FaultKind(
            "foreign_listener",
            "critical",
            "The process that listens on the port is not the service's.",
            "127.0.0.1:8080: held by python3 (pid 4711), the service is pid 900",
        ),
        FaultKind(
            "wrong_key",
            "error",
            "The server refuses the API key, or the key cannot be read.",
            "http://127.0.0.1:8080: 401 Invalid API Key",
        ),
        FaultKind(
            "key_not_enforced",
            "critical",
            "The server answers requests that carry no API key, although it should ask for one.",
            "http://127.0.0.1:8080: answers requests without the API key",
        ),
        FaultKind(
            "wrong_model",
            "critical",
            "The server offers another model than the one expected.",
            "model: expected qwen3.8-flash-next, the server offers demo",
        ),
        FaultKind(
            "model_replaced",
            "critical",
            "The server still works with a model file that was replaced on the disk since it was loaded.",
            "/srv/models/m-00002-of-00002.gguf: pid 900 has the former file loaded",
        ),
        FaultKind(
            "option_ignored",
            "error",
            "The server says at its start that an option it was given has no effect.",
            "llama-server.service: no usable GPU found, --gpu-layers option will be ignored",
        ),
        FaultKind(
            "context_short",
            "error",
            "A request is granted less context than was asked for.",
            "context_per_request: 2048 granted, 8192 asked for",
        ),
        FaultKind(
            "completion_failed",
            "critical",
            "The server is ready and the test question fails or is not answered in time.",
            "http://127.0.0.1:8080: HTTP 500: decode failed",
        ),
        FaultKind(
            "empty_answer",
            "critical",
            "The answer to the test question is empty.",
            "answer: no text in 48 tokens",
        ),
        FaultKind(
            "garbled_answer",
            "critical",
            "The answer is made of NUL or other control characters, or of one token repeated.",
            "answer: one piece of text repeated 48 times",
        ),
        FaultKind(
            "cpu_fallback",
            "critical",
            "The server should run on the GPUs and holds no memory there.",
            "pid 900: no memory on any GPU",
        ),
        FaultKind(
            "gpu_state_unknown",
            "warning",
            "Whether the server runs on the GPUs could not be found out.",
            "nvidia-smi: not found in PATH",
        ),
        FaultKind(
            "gpu_memory_missing",
            "critical",
            "The server holds less than half of what was counted for a GPU: part of the model lies elsewhere.",
            "0000:1c:00.0: 529 MiB held, 20112 counted",
        ),
        FaultKind(
            "gpu_memory_deviates",
            "warning",
            "The server holds clearly more or less memory of a GPU than was counted before its start.",
            "0000:1a:00.0: 21300 MiB held, 20112 counted (+1188)",
        ),
        FaultKind(
            "calibration_not_kept",
            "warning",
            "What was measured of a server's memory could not be written down for the next plan.",
            "/var/lib/volta-llm/calibration.json: Read-only file system",
        ),
        # The machine as a whole.
        FaultKind(
            "nothing_served",
            "critical",
            "The machine has no unit of the server.",
            "llama-server.service: there is no such unit on this machine, and no instance of it",
        ),
        FaultKind(
            "check_failed",
            "critical",
            "A check of the verification broke, so that what it looks at is not known.",
            "verification: MODULE FAILURE",
        ),
    ],
)
