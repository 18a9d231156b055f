# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The guard that a unit runs beside the server, as systemd runs it: a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

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
