# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the probe says of an endpoint, against an HTTP server that plays llama-server with the answers of 0.5.0."""

from __future__ import annotations

import json
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine
from ansible_collections.volta.llm.plugins.module_utils.serving import ignored
from ansible_collections.volta.llm.plugins.module_utils.serving.catalogue import CATALOGUE
from ansible_collections.volta.llm.plugins.module_utils.serving.probe import (
    Finding,
    Probe,
    Question,
    _read_completion,
    check_address,
    judge_answer,
)
from hypothesis import given
from hypothesis import strategies as st

KEY = "demo-key-that-is-no-secret"
LOADING = (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
REFUSED_KEY = (401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})


@dataclass
class Played:
    """A server: ``health`` is answered in turn, its last entry for ever, and so are ``metrics`` (requests at work,
    requests that wait, steps of computation)."""

    health: list[tuple[int, Any]] = field(default_factory=lambda: [(200, {"status": "ok"})])
    key: str | None = None
    model: str = "demo"
    context: int | None = 8192
    text: str | None = "The river runs to the sea."
    reasoning: str | None = None
    completion: tuple[int, Any] | None = None
    model_path: str | None = None
    metrics: list[tuple[int, int, int]] | None = None
    never_answers: bool = False
    #: One question gets lost; the next is answered.
    loses_first: bool = False
    released: threading.Event = field(default_factory=threading.Event)
    asked: list[dict[str, Any]] = field(default_factory=list)
    #: Paths that a key was presented to.
    shown_keys: list[str] = field(default_factory=list)
    #: Where every path leads to instead.
    moved_to: str = ""

    def answer(self, method: str, path: str, key: str, body: bytes) -> tuple[int, Any]:
        if key:
            self.shown_keys.append(path)
        if self.moved_to:
            return 307, {}
        if path == "/health":
            return self.health.pop(0) if len(self.health) > 1 else self.health[0]
        if self.key and key != f"Bearer {self.key}":
            return REFUSED_KEY
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": self.model, "aliases": [self.model, "second-name"]}]}
        if path == "/props":
            slot = {} if self.context is None else {"n_ctx": self.context}
            return 200, {"default_generation_settings": slot, "total_slots": 2, "model_path": self.model_path}
        if path == "/metrics" and self.metrics is not None:
            processing, waiting, steps = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
            return 200, (
                f"# HELP llamacpp:n_decode_total Number of llama_decode() calls\nllamacpp:n_decode_total {steps}\n"
                f"llamacpp:requests_processing {processing}\nllamacpp:requests_deferred {waiting}\n"
            ).encode()
        if path == "/v1/chat/completions":
            self.asked.append(json.loads(body))
            if self.never_answers or (self.loses_first and len(self.asked) == 1):
                self.released.wait(60)
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
            with suppress(ConnectionError):
                self.send_response(status)
                if played.moved_to:
                    self.send_header("Location", played.moved_to + self.path)
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
        played.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class PlayedSystemd:
    """One unit; ``states`` are reported in turn, the last for ever."""

    states: list[str]
    pid: int = field(default_factory=os.getpid)
    said: str | None = None

    def __call__(self, argv: Sequence[str], timeout: float) -> Completed:
        if argv[0] == "journalctl":
            if self.said is not None:
                return Completed(tuple(argv), 0, stdout=self.said)
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
    played = Played(key=KEY, metrics=[(0, 0, 17)])
    codes, finding, _ = probed(played, api_key=KEY, model="demo", context_per_request=8192, unit="x.service")
    assert codes == []
    assert finding.as_dict() == {
        "state": "ready",
        "ready_s": finding.ready_s,
        "model": "demo",
        "context_per_request": 8192,
        "parallel": 2,
        "processing": 0,
        "waiting": 0,
        "pid": os.getpid(),
        "gpu_resident": None,
        "gpu_memory": {},
        "memory": [],
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


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:8080/v1", "https://llm.example.org", "http://[::1]:8080/v1/", "HTTP://h:1"]
)
def test_addresses_that_can_be_asked(address: str) -> None:
    assert check_address(address) is None


@pytest.mark.parametrize(
    "address",
    [
        *(
            "localhost:8080",
            "h",
            "",
            "ftp://h",
            "http://",
            "http://h:0",
            "http://h:port",
            "http://[::1",
            "http://h /v1",
        ),
        *("http://someone:secretpw@h:8080/v1", "someone:secretpw@h:8080/v1", "http://secretpw@h"),
    ],
)
def test_addresses_that_cannot_be_asked_are_named_without_a_password(address: str) -> None:
    fault = check_address(address)
    assert fault is not None
    assert (fault.code, fault.subject) == ("setting_invalid", "base_url")
    assert "secretpw" not in f"{fault.message} {fault.remedy} {Question(base_url=address).root}"


# --- readiness (E06 mostlygeek/llama-swap#92, E08 orbi-build/orbi#233) -----------------------------------------------


def test_loading_is_waited_for() -> None:
    codes, finding, _ = probed(Played(health=[LOADING] * 5 + [(200, {"status": "ok"})]))
    assert codes == []
    assert finding.ready_s is not None


def test_loading_for_too_long() -> None:
    codes, finding, text = probed(Played(health=[LOADING]), timeout=0.0)
    assert (codes, finding.ready_s, finding.answer) == (["endpoint_loading_timeout"], None, None)
    assert finding.state == "loading"
    assert "loading" in text


@pytest.mark.parametrize(("timeout", "advice"), [(0.0, "It is starting"), (0.2, "slow disk")])
def test_who_does_not_wait_is_not_told_to_wait_longer(timeout: float, advice: str) -> None:
    with served(Played(health=[LOADING])) as url:
        probe = Probe(Question(base_url=url, timeout=timeout), Machine(), sleep=lambda seconds: None)
        [fault] = probe.examine()
    assert advice in fault.remedy


def test_nothing_listens() -> None:
    with served(Played()) as url:
        pass
    probe = Probe(Question(base_url=url, timeout=0.0), Machine(), sleep=lambda seconds: None)
    assert [fault.code for fault in probe.examine()] == ["endpoint_refused"]
    assert probe.finding.state == "refused"


def test_a_service_that_runs_and_does_not_listen_is_not_told_to_start() -> None:
    """A drop-in with another port, or a start that is not done."""
    with served(Played()) as url:
        pass
    asked = Question(base_url=url, timeout=0.0, unit="x.service")
    runner = PlayedSystemd(["activating/start-post"])
    [fault] = Probe(asked, Machine(), runner=runner, sleep=lambda seconds: None).examine()
    assert fault.code == "endpoint_refused"
    assert "activating (start-post)" in fault.message
    assert "systemctl cat x" in fault.remedy


def test_a_server_that_takes_connections_and_says_nothing() -> None:
    """A process that hangs on a GPU: the kernel still accepts for it."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        probe = Probe(
            Question(base_url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.0), Machine(), health_timeout=0.2
        )
        assert [fault.code for fault in probe.examine()] == ["endpoint_unresponsive"]
    assert probe.finding.state == "unresponsive"


@pytest.mark.parametrize(
    ("letter", "seen", "advice"),
    [
        ("T", "stopped by a signal", "kill -CONT 4711"),
        ("t", "stopped by a debugger", "systemctl restart x"),
        ("D", "waits inside the kernel", "reboot"),
        ("S", "", "systemctl restart x"),
    ],
)
def test_what_to_do_with_a_silent_server_follows_from_what_its_process_does(
    tmp_path: Path, letter: str, seen: str, advice: str
) -> None:
    (tmp_path / "proc/4711").mkdir(parents=True)
    (tmp_path / "proc/4711/stat").write_text(f"4711 (llama (x) ) {letter} 1 4711 4711 0 -1\n")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        asked = Question(base_url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.0, unit="x.service")
        systemd = PlayedSystemd(["active/running"], pid=4711)
        [fault] = Probe(asked, Machine(), Machine(str(tmp_path)), runner=systemd, health_timeout=0.2).examine()
    assert fault.code == "endpoint_unresponsive"
    assert seen in fault.message
    assert advice in fault.remedy
    assert "journalctl -u x" in fault.remedy


@pytest.mark.parametrize("state", ["failed/failed", "inactive/dead", "activating/auto-restart"])
def test_a_service_that_ended_is_not_waited_for(state: str) -> None:
    systemd = PlayedSystemd(["activating/start-post", "activating/start-post", state])
    codes, finding, text = probed(Played(health=[LOADING]), systemd, unit="x.service", timeout=1e9)
    assert (codes, finding.state) == (["service_not_running"], "ended")
    assert "CUDA error: out of memory" in text


@pytest.mark.parametrize("health", [(404, {}), (401, {}), (200, b"<html>It works</html>")])
def test_something_else_answers(health: tuple[int, Any]) -> None:
    codes, finding, _ = probed(Played(health=[health]))
    assert (codes, finding.state) == (["endpoint_unexpected"], "unexpected")


def test_ready_and_idle_and_yet_no_answer() -> None:
    codes, finding, text = probed(Played(completion=(500, {"error": {"message": "decode failed"}})))
    assert codes == ["completion_failed"]
    assert "HTTP 500: decode failed" in text
    assert finding.ready_s is not None


@pytest.mark.parametrize(
    ("metrics", "code", "state"),
    [
        # Before the question, and after it was given up: at work, waiting, steps of computation.
        ([(2, 5, 100), (2, 5, 900)], "endpoint_busy", "busy"),
        ([(0, 0, 100), (2, 0, 900)], "endpoint_busy", "busy"),
        # E08: the server says it is ready and idle, and a request never returns.
        ([(0, 0, 100), (0, 0, 100)], "endpoint_stalled", "ready"),
        # Every slot at work, and none gets on: the GPU hangs, and that is not called busy.
        ([(2, 5, 100), (2, 5, 100)], "endpoint_stalled", "busy"),
        # A free slot, and it computes: slow, for a reason that is not known.
        ([(0, 0, 100), (1, 0, 900)], "completion_failed", "ready"),
        (None, "completion_failed", "ready"),
    ],
)
def test_no_answer_in_time_is_busy_or_stalled(
    metrics: list[tuple[int, int, int]] | None, code: str, state: str
) -> None:
    codes, finding, text = probed(
        Played(metrics=list(metrics) if metrics else None, never_answers=True), answer_timeout=0.2
    )
    assert (codes, finding.state) == ([code], state)
    assert finding.answer is None
    assert ("5 requests wait" in text) == (metrics == [(2, 5, 100), (2, 5, 900)])


def test_a_restart_is_advised_after_a_second_question_only() -> None:
    """E08 orbi-build/orbi#233: health is ok, the slot is idle, and the probe fails twice."""
    played = Played(metrics=[(0, 0, 100)], never_answers=True)
    codes, _, text = probed(played, answer_timeout=0.2)
    assert (codes, len(played.asked)) == (["endpoint_stalled"], 2)
    assert "asked twice" in text
    played = Played(metrics=[(0, 0, 100)], loses_first=True)
    codes, finding, _ = probed(played, answer_timeout=0.5)
    assert (codes, finding.answer, len(played.asked)) == ([], "The river runs to the sea.", 2)
    # One that computes, or fails by itself, is asked once.
    played = Played(metrics=[(2, 5, 100), (2, 5, 900)], never_answers=True)
    assert (probed(played, answer_timeout=0.2)[0], len(played.asked)) == (["endpoint_busy"], 1)
    played = Played(metrics=[(0, 0, 100)], completion=(500, {}))
    assert (probed(played)[0], len(played.asked)) == (["completion_failed"], 1)


def test_a_busy_server_that_answers_is_no_fault_and_says_so() -> None:
    codes, finding, _ = probed(Played(metrics=[(2, 1, 100)]))
    assert codes == []
    assert (finding.state, finding.processing, finding.waiting) == ("busy", 2, 1)


def test_busy_is_reported_and_fails_nothing_stalled_fails() -> None:
    """A run on a machine in full use must not fail for it, and must not pass one that hangs."""
    kinds = CATALOGUE.kinds
    assert kinds["endpoint_busy"].severity == "warning"
    assert kinds["endpoint_stalled"].severity == "critical"


# --- what the log says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("warning: no usable GPU found, --gpu-layers option will be ignored", "--gpu-layers"),
        (
            "warning: llama.cpp was compiled without support for GPU offload. Setting the split mode has no effect.",
            "split",
        ),
        (
            "0.00.120.004 W chat template does NOT support it, --reasoning-preserve has no effect",
            "--reasoning-preserve",
        ),
        ("0.01.120.004 W srv  load_model: --cache-idle-slots requires --cache-ram, disabling", "--cache-idle-slots"),
        ("ignoring option 'foo' from preset.ini: not supported by this program", "foo"),
    ],
)
def test_an_option_that_the_server_ignores_is_a_fault(line: str, told: str) -> None:
    systemd = PlayedSystemd(["active/running"], said=f"loading\n{line}\nready\n")
    codes, _, text = probed(Played(), systemd, unit="x.service")
    assert codes == ["option_ignored"]
    assert told in text
    assert "warning:" not in text


@pytest.mark.parametrize(
    "line",
    [
        "common_sampler: backend sampling is not compatible with grammar, disabling",
        "srv  ignoring client-provided stream field in instance, streaming is not supported in predict route",
        "model has unused tensor blk.0.nextn.weight (size = 12 bytes) -- ignoring",
        "ggml_cuda_init: found 4 CUDA devices",
    ],
)
def test_other_lines_are_none(line: str) -> None:
    codes, _, text = probed(Played(), PlayedSystemd(["active/running"], said=f"{line}\n"), unit="x.service")
    assert (codes, text) == ([], "")


def test_the_log_is_that_of_this_process_since_its_start() -> None:
    """A pid comes again, and what an earlier start said is over."""
    asked: list[tuple[str, ...]] = []

    def runner(argv: Sequence[str], timeout: float) -> Completed:
        asked.append(tuple(argv))
        return Completed(tuple(argv), 1)

    assert ignored.start_lines("x", 4711, 1700000000.9, runner) == []
    assert {"_SYSTEMD_UNIT=x.service", "_PID=4711", "--since=@1700000000"} <= set(asked[0])


def test_a_journalctl_that_cannot_search() -> None:
    """Built without PCRE2 it refuses --grep; then the lines are read."""

    def runner(argv: Sequence[str], timeout: float) -> Completed:
        if any(word.startswith("--grep") for word in argv):
            return Completed(tuple(argv), 1, stderr="Compiled without pattern matching support\n")
        return Completed(tuple(argv), 0, stdout="hello\nwarning: no usable GPU found, -ngl option will be ignored\n")

    assert ignored.ignored(ignored.start_lines("x", 1, None, runner)) == [
        "no usable GPU found, -ngl option will be ignored"
    ]


# --- whose process, which model (E22 ggml-org/llama.cpp#26822) -------------------------------------------------------


def test_another_process_on_the_port() -> None:
    codes, _, text = probed(Played(), PlayedSystemd(["active/running"], pid=1), unit="x.service")
    assert codes == ["foreign_listener"]
    assert f"(pid {os.getpid()}" in text
    assert "the service is pid 1" in text


@pytest.mark.parametrize(
    ("base_url", "port"),
    [("http://[::1]:8081/v1", 8081), ("http://h/v1", 80), ("https://h/v1", 443), ("https://h:8443", 8443)],
)
def test_the_port_of_an_address(base_url: str, port: int) -> None:
    assert Question(base_url).port == port


@pytest.mark.parametrize(("model", "codes"), [("demo", []), ("second-name", []), ("other", ["wrong_model"])])
def test_id_and_aliases(model: str, codes: list[str]) -> None:
    assert probed(Played(), model=model)[0] == codes


def test_the_file_behind_the_alias(tmp_path: Path) -> None:
    """An alias can stand for any file."""
    shard, other = tmp_path / "m-00001-of-00002.gguf", tmp_path / "other.gguf"
    shard.write_bytes(b"GGUF")
    link = tmp_path / "link.gguf"
    link.symlink_to(shard)
    asked = {"model_files": [str(shard)], "model": "demo"}
    assert probed(Played(model_path=str(link)), **asked)[0] == []
    assert probed(Played(model_path=None), **asked)[0] == []
    codes, _, text = probed(Played(model_path=str(other)), **asked)
    assert codes == ["wrong_model"]
    assert f"has loaded {other}" in text


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_key", [None, "another"])
def test_a_key_that_is_refused(given_key: str | None) -> None:
    codes, _, text = probed(Played(key=KEY), api_key=given_key)
    assert codes == ["wrong_key"]
    assert "401" in text
    assert KEY not in text


def test_a_program_that_is_no_server_on_the_port_is_named() -> None:
    """The service cannot have its port: what answers is somebody's web server."""
    systemd = PlayedSystemd(["active/running"], pid=1)
    codes, finding, text = probed(Played(health=[(404, {})]), systemd, unit="x.service")
    assert (codes, finding.state) == (["foreign_listener"], "unexpected")
    assert f"(pid {os.getpid()}" in text
    assert "/health answers 404" in text


def test_no_key_is_shown_to_another_process() -> None:
    played = Played(key=KEY)
    codes, _, _ = probed(played, PlayedSystemd(["active/running"], pid=1), unit="x.service", api_key=KEY)
    assert (codes, played.shown_keys) == (["foreign_listener"], [])
    # One that has none to lose goes on.
    assert probed(Played(), PlayedSystemd(["active/running"], pid=1), unit="x.service", model="other")[0] == [
        "foreign_listener",
        "wrong_model",
    ]


def test_no_key_is_taken_to_another_address() -> None:
    elsewhere = Played(key=KEY)
    with served(elsewhere) as url:
        codes, _, text = probed(Played(moved_to=url), api_key=KEY)
    assert (codes, elsewhere.shown_keys) == (["endpoint_unexpected"], [])
    assert "answers 307" in text


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
        ("Hello" + "!" * 60, "garbled_answer"),
        ("The river" + " week" * 40, "garbled_answer"),
        ("@@@@ @@@ @@@@ @@ @@@@@", "garbled_answer"),
        ("\u200b\u200b\ufeff", "empty_answer"),
        ("<think>\n\n</think>\n\n", "empty_answer"),
        ("<think>\n\n</think>\n\nHello!", None),
        ("Here is a list that ends in a line: --------", None),
        ("Sure, let me count: one, two, three, and so on and so on.", None),
        ("Hello!!!", None),
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


@pytest.mark.parametrize(
    "choices", [[None], [[]], ["text"], None, [{"message": None}], [{"message": {"content": {}}}], {"0": 1}]
)
def test_answers_of_other_shapes_are_empty(choices: Any) -> None:
    # json reads NaN and Infinity as numbers.
    numbers = json.loads('{"usage": {"completion_tokens": Infinity}, "timings": {"predicted_per_second": NaN}}')
    assert _read_completion({"choices": choices, **numbers}) == (None, None, None)


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


def test_the_cause_of_a_cpu_fallback_is_told(tmp_path: Path) -> None:
    said = "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected\n"
    systemd = PlayedSystemd(["active/running"], said=said)
    codes, _, text = probed(Played(), systemd, capture(tmp_path, ""), unit="x.service", expect_gpu=True)
    assert codes == ["cpu_fallback"]
    assert "no CUDA-capable device is detected" in text


COUNTED = [
    {"uuid": "GPU-a", "bus_id": "0000:1a:00.0", "counted_mib": 20000.0, "layers": 24},
    {"uuid": "GPU-b", "bus_id": "0000:1c:00.0", "counted_mib": 20000.0, "layers": 24},
]


@pytest.mark.parametrize(
    ("held", "codes", "deviations"),
    [
        ((20300, 19800), [], [300.0, -200.0]),
        ((23000, 20000), ["gpu_memory_deviates"], [3000.0, 0.0]),
        # A micro-batch that was never filled: less than counted is reported, and no failure.
        ((17000, 20000), ["gpu_memory_deviates"], [-3000.0, 0.0]),
        # E10, `--tensor-split 1:1`: everything on one card.
        ((39000, 529), ["gpu_memory_deviates", "gpu_memory_missing"], [19000.0, -19471.0]),
        ((39000, None), ["gpu_memory_deviates", "gpu_memory_missing"], [19000.0, -20000.0]),
    ],
)
def test_memory_of_each_gpu_against_what_was_counted(
    tmp_path: Path, held: tuple[int, int | None], codes: list[str], deviations: list[float]
) -> None:
    """None: the process is not on that card at all."""
    rows = "".join(
        f"{uuid}, {os.getpid()}, {mib}\n" for uuid, mib in zip(("GPU-a", "GPU-b"), held, strict=True) if mib is not None
    )
    asked = {"unit": "x.service", "expect_gpu": True, "memory": COUNTED}
    found, finding, text = probed(Played(), sysroot=capture(tmp_path, rows), **asked)
    assert found == codes
    assert [gpu["deviation_mib"] for gpu in finding.memory] == deviations
    if codes:
        assert "0000:1" in text


def test_a_figure_that_nvidia_smi_does_not_give_is_not_judged(tmp_path: Path) -> None:
    rows = f"GPU-a, {os.getpid()}, [N/A]\nGPU-b, {os.getpid()}, 20000\n"
    asked = {"unit": "x.service", "expect_gpu": True, "memory": COUNTED}
    found, finding, _ = probed(Played(), sysroot=capture(tmp_path, rows), **asked)
    assert found == []
    assert [gpu["measured_mib"] for gpu in finding.memory] == [None, 20000]


@pytest.mark.parametrize("expect", [None, False])
def test_gpus_are_not_looked_at_unasked(tmp_path: Path, expect: bool | None) -> None:
    found, finding, _ = probed(Played(), sysroot=capture(tmp_path, ""), unit="x.service", expect_gpu=expect)
    assert (found, finding.gpu_resident) == ([], None)
