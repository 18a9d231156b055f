# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The guard that a unit runs beside the server, as systemd runs it: a process of its own."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GUARD = Path(__file__).parents[3] / "roles/llama_server/files/llama-server-guard"
#: Listens, answers /health with 503 twice and 200 then; prints its port first.
SERVER = """
    import http.server, sys
    answers = [503, 503, 200]
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(answers.pop(0) if len(answers) > 1 else answers[0])
            self.end_headers()
        def log_message(self, *args): pass
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""


def guard(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(GUARD), *words], capture_output=True, text=True, check=False, timeout=60
    )


def ready(port: int, pid: int) -> subprocess.CompletedProcess[str]:
    return guard("ready", "--url", f"http://127.0.0.1:{port}/health", "--port", str(port), "--pid", str(pid))


def test_ready_when_the_process_answers() -> None:
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(SERVER)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        try:
            done = ready(port, server.pid)
        finally:
            server.kill()
    assert (done.returncode, done.stderr) == (0, "")


def test_another_process_that_answers_is_not_the_server() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(SERVER)], stdout=subprocess.PIPE, text=True) as other,
        subprocess.Popen(["sleep", "60"]) as service,
    ):
        assert other.stdout is not None
        port = int(other.stdout.readline())
        try:
            done = ready(port, service.pid)
        finally:
            other.kill()
            service.kill()
    assert done.returncode == 1
    assert "answered by another process" in done.stderr


def test_a_process_that_ended_is_not_waited_for() -> None:
    process = subprocess.Popen(["true"])
    # Not waited for yet: a zombie, as systemd sees it for a moment.
    done = ready(1, process.pid)
    process.wait()
    assert done.returncode == 1
    assert "ended before it was ready" in done.stderr
    assert ready(1, process.pid).returncode == 1


def test_missing_devices_are_named(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").write_text("not a device")
    done = guard("devices", "--count", "4", "--timeout", "0", "--dev", str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path}/nvidiactl" in done.stderr
    assert f"{tmp_path}/nvidia-uvm" in done.stderr
    assert "4 of 4 GPU devices" in done.stderr


# --- device nodes that are made, or come late ------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["nvidia-modprobe", "nvidia-smi"])
def test_missing_nodes_are_made_by_the_driver_s_own_tools(tmp_path: Path, tool: str) -> None:
    """Debian's driver packages bring nvidia-modprobe, others only nvidia-smi, which makes the nodes as it starts."""
    dev, bin_ = tmp_path / "dev", tmp_path / "bin"
    dev.mkdir()
    bin_.mkdir()
    nodes = " ".join(f"{dev}/{name}" for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"))
    # A link to a device counts as one, and may be made by anybody.
    (bin_ / tool).write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nfor n in {nodes}; do /bin/ln -sf /dev/null $n; done\n'
    )
    (bin_ / tool).chmod(0o755)
    done = guard("devices", "--count", "2", "--timeout", "0", "--dev", str(dev), "--path", str(bin_))
    assert (done.returncode, done.stderr) == (0, "")
    called = (tmp_path / "calls").read_text().split("\n")[0]
    assert called == {"nvidia-modprobe": "-u -c 0 -c 1", "nvidia-smi": "-L"}[tool]


def test_a_node_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """At boot the driver may be later than the service."""
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        (tmp_path / name).symlink_to("/dev/null")
    words = ["devices", "--count", "2", "--timeout", "50", "--dev", str(tmp_path), "--path", ""]
    with subprocess.Popen([sys.executable, "-I", str(GUARD), *words], stderr=subprocess.PIPE, text=True) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        (tmp_path / "nvidia1").symlink_to("/dev/null")
        _, said = process.communicate(timeout=50)
    assert (process.returncode, said) == (0, "")


def test_a_tool_that_hangs_or_is_broken_does_not_end_the_wait_with_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "nvidia-modprobe").write_text("no program")
    (tmp_path / "nvidia-modprobe").chmod(0o755)
    done = guard("devices", "--count", "1", "--timeout", "0", "--dev", str(tmp_path), "--path", str(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "missing after" in done.stderr
    assert "NVRM" in done.stderr


def test_a_server_that_cannot_be_killed_keeps_the_next_from_starting(tmp_path: Path) -> None:
    """E24 NVIDIA/nvidia-docker#1553: a process in D state outlives SIGKILL; a second one would hang beside it."""
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        (tmp_path / name).symlink_to("/dev/null")
    words = ["devices", "--count", "1", "--timeout", "0", "--dev", str(tmp_path), "--cgroup", str(tmp_path)]
    with subprocess.Popen(["sleep", "60"]) as former:
        (tmp_path / "cgroup.procs").write_text(f"{former.pid}\n")
        try:
            done = guard(*words)
        finally:
            former.kill()
    assert done.returncode == 1
    assert f"sleep (pid {former.pid}, state S)" in done.stderr
    assert "reboot" in done.stderr
    # It is gone now.
    assert guard(*words).returncode == 0


# --- why a start failed, in the unit's status ------------------------------------------------------------------------

LORA = """\
warning: no usable GPU found, --gpu-layers option will be ignored
0.00.004.783 I srv    load_model: loading model '/srv/m.gguf'
0.00.372.080 W load: control-looking token was not control-type; this is probably an error in the model
0.00.486.425 E llama_adapter_lora_init: failed to open '/srv/a.gguf': No such file or directory
0.00.487.037 E srv  llama_server: exiting due to model loading error
the server ended before it was ready
"""


def status_after(tmp_path: Path, lines: str, result: str, **ended: str) -> str:
    """What the guard puts into the status after these lines; ``ended`` is what else systemd says of the end."""
    (tmp_path / "lines").write_text(lines)
    journalctl = tmp_path / "journalctl"
    journalctl.write_text(
        f'#!/bin/sh\ncase "$1" in --sync) ;; _SYSTEMD_INVOCATION_ID=abc) cat {tmp_path}/lines;; esac\n'
    )
    journalctl.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        done = subprocess.run(
            [sys.executable, "-I", str(GUARD), "why", "--journalctl", str(journalctl)],
            env={"SERVICE_RESULT": result, "INVOCATION_ID": "abc", "NOTIFY_SOCKET": str(tmp_path / "notify"), **ended},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        try:
            return receiver.recv(4096).decode()
        except BlockingIOError:
            return ""


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (LORA, "E llama_adapter_lora_init: failed to open '/srv/a.gguf': No such file or directory"),
        ("error: invalid argument: 0.0.0.0\n", "error: invalid argument: 0.0.0.0"),
        ("missing after 60 s: /dev/nvidia-uvm\nsee what the driver says\n", "missing after 60 s: /dev/nvidia-uvm"),
        ("Segmentation\nlast words\n", "last words"),
        ("", "it said nothing"),
    ],
)
def test_the_status_says_why_a_start_failed(tmp_path: Path, lines: str, told: str) -> None:
    said = status_after(tmp_path, lines, "exit-code")
    assert said.startswith("STATUS=exit-code: ")
    assert said.endswith(told)


@pytest.mark.parametrize(
    ("result", "code", "status", "told"),
    [
        ("signal", "killed", "KILL", "signal, by SIGKILL (out of memory? journalctl -k --grep oom): it said nothing"),
        (
            "oom-kill",
            "killed",
            "KILL",
            "oom-kill, by SIGKILL (out of memory? journalctl -k --grep oom): it said nothing",
        ),
        ("core-dump", "dumped", "SEGV", "core-dump, by SIGSEGV: it said nothing"),
        ("exit-code", "exited", "1", "exit-code: it said nothing"),
    ],
)
def test_one_that_is_killed_has_no_last_words(tmp_path: Path, result: str, code: str, status: str, told: str) -> None:
    assert status_after(tmp_path, "", result, EXIT_CODE=code, EXIT_STATUS=status) == f"STATUS={told}"


def test_a_clean_end_needs_no_reason(tmp_path: Path) -> None:
    assert status_after(tmp_path, LORA, "success") == ""


# --- the nightly restart ---------------------------------------------------------------------------------------------

KEY = "a-key-that-is-never-shown"


class Played(http.server.ThreadingHTTPServer):
    """A server whose metrics name ``busy`` requests, the first ``busy_for`` times it is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.busy = 1
        self.busy_for = 0
        self.metrics = 200
        self.completion = 200
        self.questions: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(http.server.BaseHTTPRequestHandler):
    server: Played

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        busy = self.server.busy if self.server.busy_for > 0 else 0
        self.server.busy_for -= 1
        self.reply(
            self.server.metrics,
            f"# HELP llamacpp:requests_processing x\nllamacpp:requests_processing {busy}\n"
            "llamacpp:requests_deferred 0\n",
        )

    def do_POST(self) -> None:
        self.server.questions.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.reply(self.server.completion, "{}")

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Played]:
    with Played() as played:
        threading.Thread(target=played.serve_forever, daemon=True).start()
        yield played
        played.shutdown()


def maintain(
    tmp_path: Path, server: Played, patience: float = 0.0, active: int = 0, restart: int = 0
) -> tuple[str, int, str]:
    """Run it with a systemctl that is played. Output, exit status, and what systemctl was told."""
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        f"case $1 in is-active) exit {active};; restart) exit {restart};; esac\n"
    )
    systemctl.chmod(0o755)
    (tmp_path / "keys").write_text(f"# the new one\n{KEY}\nolder-key-0123456\n")
    entry = {"unit": "x.service", "url": server.url, "model": "demo", "key_file": str(tmp_path / "keys")}
    config = tmp_path / "maintenance.json"
    config.write_text(json.dumps({"patience": patience, "servers": [entry]}))
    done = guard("maintain", str(config), "--systemctl", str(systemctl))
    assert KEY not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.returncode, (tmp_path / "calls").read_text()


def test_an_idle_server_is_restarted_and_warmed_up(tmp_path: Path, server: Played) -> None:
    said, rc, told = maintain(tmp_path, server)
    assert rc == 0
    assert told.splitlines() == ["is-active --quiet x.service", "restart x.service"]
    assert server.questions[0]["model"] == "demo"
    assert server.keys == {f"Bearer {KEY}"}
    assert "x.service restarted" in said
    assert "answered its first question" in said
    # No prompt in the journal, not even our own.
    assert server.questions[0]["messages"][0]["content"] not in said


def test_requests_that_end_in_time_are_waited_for(tmp_path: Path, server: Played) -> None:
    server.busy_for = 3
    said, rc, told = maintain(tmp_path, server, patience=30)
    assert (rc, "restart x.service" in told) == (0, True)
    assert server.busy_for < 0
    assert "is not restarted" not in said


def test_a_server_that_stays_busy_is_left_alone(tmp_path: Path, server: Played) -> None:
    server.busy, server.busy_for = 2, 1000
    said, rc, told = maintain(tmp_path, server, patience=1)
    assert rc == 0
    assert "restart" not in told
    assert said == "<4>x.service is not restarted: 2 requests ran for 1 s\n"
    assert server.questions == []


@pytest.mark.parametrize("status", [401, 404, 501])
def test_what_cannot_be_told_is_not_idle(tmp_path: Path, server: Played, status: int) -> None:
    server.metrics = status
    said, _, told = maintain(tmp_path, server)
    assert "restart" not in told
    assert f"cannot be told (/metrics answers {status})" in said


def test_a_stopped_server_stays_stopped(tmp_path: Path, server: Played) -> None:
    said, rc, told = maintain(tmp_path, server, active=3)
    assert (rc, told) == (0, "is-active --quiet x.service\n")
    assert "does not run" in said


@pytest.mark.parametrize(("restart", "completion"), [(1, 200), (0, 500)])
def test_a_restart_that_failed_fails_the_unit(tmp_path: Path, server: Played, restart: int, completion: int) -> None:
    server.completion = completion
    said, rc, _ = maintain(tmp_path, server, restart=restart)
    assert rc == 1
    assert said.splitlines()[-1].startswith("<3>x.service")
