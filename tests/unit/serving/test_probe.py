# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the probe says of an endpoint, against an HTTP server that plays llama-server with the answers of 0.5.0."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine
from ansible_collections.volta.llm.plugins.module_utils.serving.probe import Finding, Probe, Question, judge_answer
from hypothesis import given
from hypothesis import strategies as st

KEY = "demo-key-that-is-no-secret"
LOADING = (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
REFUSED_KEY = (401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})


@dataclass
class Played:
    """A server: ``health`` is answered in turn, its last entry for ever."""

    health: list[tuple[int, Any]] = field(default_factory=lambda: [(200, {"status": "ok"})])
    key: str | None = None
    model: str = "demo"
    context: int | None = 8192
    text: str | None = "The river runs to the sea."
    reasoning: str | None = None
    completion: tuple[int, Any] | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, method: str, path: str, key: str, body: bytes) -> tuple[int, Any]:
        if path == "/health":
            return self.health.pop(0) if len(self.health) > 1 else self.health[0]
        if self.key and key != f"Bearer {self.key}":
            return REFUSED_KEY
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": self.model, "aliases": [self.model, "second-name"]}]}
        if path == "/props":
            slot = {} if self.context is None else {"n_ctx": self.context}
            return 200, {"default_generation_settings": slot, "total_slots": 2}
        if path == "/v1/chat/completions":
            self.asked.append(json.loads(body))
            if self.completion:
                return self.completion
            message = {"role": "assistant", "content": self.text}
            if self.reasoning is not None:
                message["reasoning_content"] = self.reasoning
            return 200, {
                "choices": [{"finish_reason": "stop", "index": 0, "message": message}],
                "usage": {"completion_tokens": 9, "prompt_tokens": 21, "total_tokens": 30},
                "timings": {"predicted_per_second": 41.256},
            }
        return 404, {"error": {"message": "File Not Found"}}


@contextmanager
def served(played: Played) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, content = played.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = respond

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class PlayedSystemd:
    """One unit; ``states`` are reported in turn, the last for ever."""

    states: list[str]
    pid: int = field(default_factory=os.getpid)

    def __call__(self, argv: Sequence[str], timeout: float) -> Completed:
        if argv[0] == "journalctl":
            return Completed(tuple(argv), 0, stdout="loading\nCUDA error: out of memory\n")
        active, _, sub = (self.states.pop(0) if len(self.states) > 1 else self.states[0]).partition("/")
        pid = self.pid if active == "active" else 0
        lines = [f"ActiveState={active}", f"SubState={sub}", "Result=exit-code", f"MainPID={pid}"]
        return Completed(tuple(argv), 0, stdout="\n".join(lines))


def probed(
    played: Played, systemd: PlayedSystemd | None = None, sysroot: str = "/", **question: Any
) -> tuple[list[str], Finding, str]:
    """Codes of the faults, the finding, and all messages."""
    with served(played) as url:
        runner = systemd or PlayedSystemd(["active/running"])
        asked = Question(**{"base_url": url, "timeout": 5.0, **question})
        probe = Probe(asked, Machine(sysroot), runner=runner, sleep=lambda seconds: None)
        faults = probe.examine()
    return [fault.code for fault in faults], probe.finding, "\n".join(f"{f.subject}: {f.message}" for f in faults)


def test_a_sound_endpoint() -> None:
    played = Played(key=KEY)
    codes, finding, _ = probed(played, api_key=KEY, model="demo", context_per_request=8192, unit="x.service")
    assert codes == []
    assert finding.as_dict() == {
        "ready_s": finding.ready_s,
        "model": "demo",
        "context_per_request": 8192,
        "parallel": 2,
        "pid": os.getpid(),
        "gpu_resident": None,
        "gpu_memory": {},
        "answer": "The river runs to the sea.",
        "completion_tokens": 9,
        "tokens_per_second": 41.26,
    }
    assert played.asked[0]["temperature"] == 0


def test_a_model_that_was_replaced_under_the_server(tmp_path: Path) -> None:
    """The played service is this process."""
    shard = tmp_path / "m-00002-of-00002.gguf"
    shard.write_bytes(b"GGUF")
    asked = {"unit": "x.service", "model_files": [str(shard)]}
    with shard.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert probed(Played(), **asked)[0] == []
        shard.rename(f"{shard}.corrupt")
        shard.write_bytes(b"GGUF")
        codes, _, text = probed(Played(), **asked)
    assert codes == ["model_replaced"]
    assert f"{shard}: pid {os.getpid()}" in text


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_address_with_and_without_v1(tail: str) -> None:
    """E26 langgenius/dify#2448: the path doubled."""
    assert Question(base_url=f"http://h:1{tail}").root == "http://h:1"


# --- readiness (E06 mostlygeek/llama-swap#92, E08 orbi-build/orbi#233) -----------------------------------------------


def test_loading_is_waited_for() -> None:
    codes, finding, _ = probed(Played(health=[LOADING] * 5 + [(200, {"status": "ok"})]))
    assert codes == []
    assert finding.ready_s is not None


def test_loading_for_too_long() -> None:
    codes, finding, text = probed(Played(health=[LOADING]), timeout=0.0)
    assert (codes, finding.ready_s, finding.answer) == (["endpoint_loading_timeout"], None, None)
    assert "loading" in text


def test_nothing_listens() -> None:
    with served(Played()) as url:
        pass
    probe = Probe(Question(base_url=url, timeout=0.0), Machine(), sleep=lambda seconds: None)
    assert [fault.code for fault in probe.examine()] == ["endpoint_refused"]


@pytest.mark.parametrize("state", ["failed/failed", "inactive/dead", "activating/auto-restart"])
def test_a_service_that_ended_is_not_waited_for(state: str) -> None:
    systemd = PlayedSystemd(["activating/start-post", "activating/start-post", state])
    codes, _, text = probed(Played(health=[LOADING]), systemd, unit="x.service", timeout=1e9)
    assert codes == ["service_not_running"]
    assert "CUDA error: out of memory" in text


@pytest.mark.parametrize("health", [(404, {}), (401, {}), (200, b"<html>It works</html>")])
def test_something_else_answers(health: tuple[int, Any]) -> None:
    assert probed(Played(health=[health]))[0] == ["endpoint_unexpected"]


def test_ready_and_idle_and_yet_no_answer() -> None:
    codes, finding, text = probed(Played(completion=(500, {"error": {"message": "decode failed"}})))
    assert codes == ["completion_failed"]
    assert "HTTP 500: decode failed" in text
    assert finding.ready_s is not None


# --- whose process, which model (E22 ggml-org/llama.cpp#26822) -------------------------------------------------------


def test_another_process_on_the_port() -> None:
    codes, _, text = probed(Played(), PlayedSystemd(["active/running"], pid=1), unit="x.service")
    assert codes == ["foreign_listener"]
    assert f"(pid {os.getpid()}" in text
    assert "the service is pid 1" in text


@pytest.mark.parametrize(("model", "codes"), [("demo", []), ("second-name", []), ("other", ["wrong_model"])])
def test_id_and_aliases(model: str, codes: list[str]) -> None:
    assert probed(Played(), model=model)[0] == codes


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_key", [None, "another"])
def test_a_key_that_is_refused(given_key: str | None) -> None:
    codes, _, text = probed(Played(key=KEY), api_key=given_key)
    assert codes == ["wrong_key"]
    assert "401" in text
    assert KEY not in text


def test_a_key_that_is_not_asked_for() -> None:
    assert probed(Played(key=None), api_key=KEY)[0] == ["key_not_enforced"]


# --- context (E02, E04) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granted", "asked", "codes"),
    [(8192, 8192, []), (8448, 8192, []), (2048, 8192, ["context_short"]), (None, 8192, []), (2048, None, [])],
)
def test_context_granted_against_asked_for(granted: int | None, asked: int | None, codes: list[str]) -> None:
    found, finding, _ = probed(Played(context=granted), context_per_request=asked)
    assert (found, finding.context_per_request) == (codes, granted)


# --- the answer (E16 1CatAI/1Cat-vLLM#23) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "empty_answer"),
        ("", "empty_answer"),
        (" \n\t ", "empty_answer"),
        ("\x00" * 48, "garbled_answer"),
        ("\ufffd" * 20, "garbled_answer"),
        ("a" + "\x00" * 9, "garbled_answer"),
        ("!!!!!!!!!!!!", "garbled_answer"),
        (" week" * 12, "garbled_answer"),
        ("的的的的的的", "garbled_answer"),
        ("no no no no no n", "garbled_answer"),
        ("The river runs to the sea.", None),
        ("Hello!", None),
        ("OK", None),
        ("你好,我很好。", None),
        ("no, no, no", None),
        ("1 2 3 4 5 6 7 8", None),
        (" and and house tree", None),
        ("```\n\n```", None),
    ],
)
def test_what_counts_as_an_answer(text: str | None, code: str | None) -> None:
    fault = judge_answer(text, 48)
    assert (fault.code if fault else None) == code
    assert probed(Played(text=text))[0] == ([code] if code else [])


@given(st.text(min_size=1, max_size=12), st.integers(4, 40))
def test_repetitions_of_anything_are_no_answer(piece: str, times: int) -> None:
    assert judge_answer(piece * times, 48) is not None


@given(st.permutations("abcdefghijklmnop"))
def test_text_without_repetition_is_an_answer(letters: list[str]) -> None:
    assert judge_answer("".join(letters), 16) is None


def test_reasoning_is_an_answer_too() -> None:
    """A model that thinks may spend a short answer on it."""
    codes, finding, _ = probed(Played(text="", reasoning="The user wants a sentence."))
    assert (codes, finding.answer) == ([], "The user wants a sentence.")


# --- GPUs ------------------------------------------------------------------------------------------------------------


def capture(root: Path, rows: str, rc: int = 0) -> str:
    (root / "commands").mkdir()
    argv = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
    (root / "commands/out").write_text(rows)
    (root / "commands/index.json").write_text(json.dumps([{"argv": argv, "rc": rc, "stdout": "out"}]))
    return str(root)


@pytest.mark.parametrize(
    ("rows", "rc", "codes", "resident", "memory"),
    [
        ("GPU-a, {pid}, 20112\nGPU-b, {pid}, 19000\nGPU-a, 1, 5\n", 0, [], True, {"GPU-a": 20112, "GPU-b": 19000}),
        ("GPU-a, {pid}, [N/A]\n", 0, [], True, {"GPU-a": None}),
        ("GPU-a, 1, 20112\n", 0, ["cpu_fallback"], False, {}),
        ("", 0, ["cpu_fallback"], False, {}),
        ("Unable to determine the device handle\n", 15, ["gpu_state_unknown"], None, {}),
    ],
)
def test_memory_on_the_gpus(
    tmp_path: Path, rows: str, rc: int, codes: list[str], resident: bool | None, memory: dict[str, int | None]
) -> None:
    """D16, F06: the server answers and runs on the CPU. Not known is null, not false."""
    sysroot = capture(tmp_path, rows.replace("{pid}", str(os.getpid())), rc)
    found, finding, _ = probed(Played(), sysroot=sysroot, unit="x.service", expect_gpu=True)
    assert (found, finding.gpu_resident, finding.gpu_memory) == (codes, resident, memory)


@pytest.mark.parametrize("expect", [None, False])
def test_gpus_are_not_looked_at_unasked(tmp_path: Path, expect: bool | None) -> None:
    found, finding, _ = probed(Played(), sysroot=capture(tmp_path, ""), unit="x.service", expect_gpu=expect)
    assert (found, finding.gpu_resident) == ([], None)
