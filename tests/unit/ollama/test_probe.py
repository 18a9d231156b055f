# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the probe says of an Ollama, against the lab's stand-in on simulated cards.

systemd and journal are played: the unit's main process is the stand-in, its journal is what the stand-in has written.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault, is_fatal
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine
from ansible_collections.volta.llm.plugins.module_utils.ollama import probe as probing
from ansible_collections.volta.llm.plugins.module_utils.ollama.probe import Probe, Question, long_prompt, remaining

from tests.lab.ollama.running import Registry, Standin

UNIT = "ollama.service"
CONTEXT = {"OLLAMA_CONTEXT_LENGTH": "8192"}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


class Host(Machine):
    """This machine, but for its control groups: processes of the stand-in are those of the unit."""

    def __init__(self, standin: Standin) -> None:
        super().__init__()
        self._standin = standin

    def read(self, path: str) -> str | None:
        found = re.fullmatch(r"/proc/(\d+)/cgroup", path)
        if found is None:
            return super().read(path)
        words = (super().read(f"/proc/{found[1]}/cmdline") or "").split("\0")
        own = any(word.startswith(str(self._standin.folder)) for word in words)
        return f"0::/system.slice/{UNIT}\n" if own else "0::/user.slice\n"


class Cards(Machine):
    """The simulated machine's nvidia-smi."""

    def __init__(self, standin: Standin) -> None:
        super().__init__()
        self._standin = standin

    def run(self, argv: Sequence[str], *_: Any, **__: Any) -> Completed:
        program = self._standin.folder / "tools" / argv[0]
        done = subprocess.run(
            [program, *argv[1:]], env=self._standin.environment, capture_output=True, text=True, check=False
        )
        return Completed(tuple(argv), done.returncode, done.stdout, done.stderr)


class Lab:
    """A stand-in as a service, with a model, and the probe of it."""

    def __init__(self, standin: Standin) -> None:
        self.standin = standin
        self.state = ("active", "running", "success")
        self.probe: Probe | None = None
        self.commands: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], timeout: float) -> Completed:
        self.commands.append(tuple(argv))
        words = " ".join(argv)
        process = self.standin.process
        if argv[0] == "systemctl":
            active, sub, result = self.state
            pid = process.pid if process and process.poll() is None else 0
            out = (
                f"ActiveState={active}\nSubState={sub}\nResult={result}\nMainPID={pid}\nInvocationID=abc\n"
                "ExecMainStartTimestampMonotonic=1\n"
            )
            return Completed(tuple(argv), 0, out)
        assert argv[0] == "journalctl"
        lines = self.standin.log().splitlines()
        search = re.search(r"--grep=(.*) --case-sensitive", words)
        if search:
            lines = [line for line in lines if re.search(search[1], line)]
        return Completed(tuple(argv), 0 if lines else 1, "\n".join(lines))

    def examine(self, **asked: Any) -> list[str]:
        """Codes of the faults."""
        return [fault.code for fault in self.faults(**asked)]

    def faults(self, patience: float = 20.0, **asked: Any) -> list[Fault]:
        asked = {"model": "volta-small", "unit": UNIT, "timeout": 0.3, **asked}
        question = Question(base_url=asked.pop("base_url", self.standin.url), **asked)
        self.probe = Probe(
            question, Cards(self.standin), Host(self.standin), self.run, sleep=lambda _: None, patience=patience
        )
        return self.probe.examine()

    @property
    def found(self) -> probing.Finding:
        assert self.probe is not None
        return self.probe.finding


@pytest.fixture
def lab(tmp_path: Path, registry: Registry) -> Iterator[Callable[..., Lab]]:
    with ExitStack() as stack:

        def make(pull: bool = True, **options: Any) -> Lab:
            options = {"driver": "535.261.03", "environment": CONTEXT, **options}
            standin = Standin(tmp_path / "o", registry=registry.url, **options)
            stack.callback(standin.__exit__, None, None, None)
            standin.start()
            if pull:
                assert standin.command("pull", "volta-small").returncode == 0
            return Lab(standin)

        yield make


def test_a_model_that_is_served_as_it_should_be_has_no_fault(lab: Callable[..., Lab]) -> None:
    made = lab()
    assert made.examine(keep_alive="5m", expect_context=8192) == []
    found = made.found
    assert (found.version, found.gpu_share, found.context) == ("0.24.0", 1.0, 8192)
    assert found.size == found.size_vram
    assert found.prompt_tokens is not None
    assert found.prompt_tokens > 4096
    assert found.tokens_per_second == 80.0
    assert list(found.gpu_memory.values()) == [4096]
    assert found.loaded_before is False
    assert made.standin.process is not None
    assert found.pid == made.standin.process.pid


def test_nothing_of_questions_and_answers_is_told(lab: Callable[..., Lab], capsys: pytest.CaptureFixture[str]) -> None:
    made = lab()
    made.standin.switch(partial_offload=0.5)
    text = repr(made.faults()) + repr(made.found.as_dict())
    # Nor is it handed to a program, whose arguments all can read.
    assert not re.search(r"\b(river|stone|mountain)\b", text + repr(made.commands))
    assert capsys.readouterr().out == ""


def test_silent_cpu_is_found(lab: Callable[..., Lab]) -> None:
    made = lab()
    made.standin.switch(cpu_fallback=True)
    (fault,) = made.faults()
    assert fault.code == "cpu_fallback"
    assert made.found.gpu_share == 0.0
    assert made.examine(expect_gpu=False) == []


def test_a_release_that_leaves_the_cards_is_found(lab: Callable[..., Lab]) -> None:
    made = lab(version="0.30.5")
    (fault,) = made.faults()
    assert fault.code == "cpu_fallback"
    # What the log says at this level is that there is only a processor.
    assert "library cpu" in fault.message


def test_at_the_second_level_of_debug_the_old_driver_is_named(lab: Callable[..., Lab]) -> None:
    made = lab(version="0.30.5", environment={**CONTEXT, "OLLAMA_DEBUG": "2"})
    faults = {fault.code: fault for fault in made.faults()}
    assert set(faults) == {"cpu_fallback", "ollama_ignores_gpu"}
    assert "driver 535, required_driver 550 or newer" in faults["ollama_ignores_gpu"].message


def test_a_skipped_device_is_a_fault_and_so_is_the_mixed_figure(lab: Callable[..., Lab]) -> None:
    made = lab()
    made.standin.switch(skip_device=True)
    faults = {fault.code: fault for fault in made.faults()}
    assert set(faults) == {"ollama_device_skipped", "ollama_partly_on_cpu"}
    assert "cc 700, archs [750 890 1000 1200]" in faults["ollama_device_skipped"].message
    assert made.found.gpu_share is not None
    assert 0 < made.found.gpu_share < 1


def test_without_the_unit_the_figures_still_tell(lab: Callable[..., Lab]) -> None:
    made = lab()
    made.standin.switch(partial_offload=0.6)
    assert made.examine(unit=None) == ["ollama_partly_on_cpu"]
    assert made.commands == []
    assert made.found.gpu_memory == {}


def test_what_always_stays_with_the_host_is_let_pass(lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    made = lab()
    table = 256 * 512 // 32 * 18

    def share(less: int) -> list[str]:
        entry = Probe._entry

        def counted(self: Probe) -> dict[str, Any] | None:
            found = entry(self)
            return {**found, "size_vram": found["size"] - less} if found else None

        with monkeypatch.context() as patch:
            patch.setattr(Probe, "_entry", counted)
            return made.examine(prompt_tokens_over=0)

    assert share(table) == []
    assert share(table + 1) == ["ollama_partly_on_cpu"]


def test_figures_that_no_process_bears_out_are_a_fault(
    lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lab()
    monkeypatch.setattr(Host, "read", lambda self, path: "0::/user.slice/other.service\n")
    (fault,) = made.faults(prompt_tokens_over=0)
    assert fault.code == "cpu_fallback"
    assert "no process of it holds memory" in fault.message


def test_a_driver_that_does_not_answer_is_a_warning_beside_figures(lab: Callable[..., Lab]) -> None:
    made = lab()
    (made.standin.folder / "tools" / "broken-smi").write_text("#!/bin/sh\necho no driver\nexit 9\n")
    (made.standin.folder / "tools" / "broken-smi").chmod(0o755)
    (fault,) = made.faults(nvidia_smi="broken-smi", prompt_tokens_over=0)
    assert (fault.code, is_fatal(fault)) == ("gpu_state_unknown", False)
    assert "no driver" in fault.message


def test_a_cut_prompt_is_found(lab: Callable[..., Lab]) -> None:
    made = lab()
    made.standin.switch(ignores_context=True)
    faults = {fault.code: fault for fault in made.faults(expect_context=8192)}
    assert set(faults) == {"context_short", "ollama_prompt_cut"}
    assert "loaded with 4096 tokens, 8192 asked for" in faults["context_short"].message
    assert made.found.prompt_tokens == 4096
    assert made.examine(prompt_tokens_over=0, expect_context=4096) == []
    assert made.found.prompt_tokens is None


@pytest.mark.parametrize(
    ("told", "asked", "good"),
    [
        ("-1", "-1", True),
        ("-1", "-5m", True),
        ("-1", "24h", False),
        ("10m", "600", True),
        ("10m", "5m", False),
        ("5m", "-1", False),
        ("0", "0", True),
        ("5m", "0", False),
        ("0", "5m", False),
    ],
)
def test_how_long_a_model_stays_is_compared(lab: Callable[..., Lab], told: str, asked: str, good: bool) -> None:
    made = lab(environment={**CONTEXT, "OLLAMA_KEEP_ALIVE": told})
    assert made.examine(keep_alive=asked) == ([] if good else ["ollama_keep_alive_differs"])
    assert made.found.gpu_share == 1.0


def test_a_model_that_is_about_to_go_is_loaded_for_longer(
    lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to keep nothing, a service still lists the model for a moment; on the cards it may be gone by then."""
    made = lab(environment={**CONTEXT, "OLLAMA_KEEP_ALIVE": "0"})
    usual = Probe._entry
    looks: list[int] = []

    def leaving(self: Probe) -> dict[str, Any] | None:
        looks.append(1)
        # The first look is before the load.
        if len(looks) != 2:
            return usual(self)
        now = datetime.now(timezone.utc).isoformat()
        return {"model": "volta-small:latest", "size": 1, "size_vram": 1, "context_length": 8192, "expires_at": now}

    monkeypatch.setattr(Probe, "_entry", leaving)
    assert made.examine(keep_alive="0") == []
    assert made.found.size is not None
    assert made.found.size > 1


def test_a_time_that_another_request_asked_for_proves_nothing(lab: Callable[..., Lab]) -> None:
    import ollama

    made = lab()
    ollama.Client(made.standin.url).generate("volta-small", keep_alive="3h")
    (fault,) = made.faults(keep_alive="5m")
    assert (fault.code, is_fatal(fault)) == ("ollama_keep_alive_unproved", False)
    assert made.found.loaded_before is True


def test_a_time_that_is_none_is_refused(lab: Callable[..., Lab]) -> None:
    assert lab().examine(keep_alive="soon", prompt_tokens_over=0) == ["setting_invalid"]


def test_a_time_limit_is_told_from_a_crash(lab: Callable[..., Lab]) -> None:
    made = lab()
    made.standin.switch(load_timeout=True)
    (fault,) = made.faults()
    assert fault.code == "ollama_load_timeout"
    assert "progress 1.00" in fault.message
    assert "OLLAMA_LOAD_TIMEOUT" in fault.remedy
    made.standin.switch(abort_in_warmup=True)
    (fault,) = made.faults()
    assert fault.code == "ollama_runner_crashed"
    assert "signal: aborted" in fault.message
    assert made.found.size is None


def test_the_newer_runner_is_told_apart_as_well(lab: Callable[..., Lab]) -> None:
    made = lab(version="0.30.5", driver="570.148.08")
    made.standin.switch(abort_in_warmup=True)
    assert made.examine() == ["ollama_runner_crashed"]
    made.standin.switch(load_timeout=True)
    assert made.examine() == ["ollama_load_timeout"]


def test_a_load_that_outlasts_our_patience_is_no_crash(lab: Callable[..., Lab]) -> None:
    made = lab()
    made.standin.switch(load_seconds=20)
    (fault,) = made.faults(load_timeout=0.3)
    assert fault.code == "ollama_load_timeout"
    assert "still at it" in fault.message
    made.standin.stop(signal.SIGKILL)


def test_a_skipped_device_is_named_when_the_load_fails_too(lab: Callable[..., Lab]) -> None:
    made = lab()
    made.standin.switch(skip_device=True, abort_in_warmup=True)
    assert set(made.examine()) == {"ollama_runner_crashed", "ollama_device_skipped"}


def test_an_empty_answer_is_a_fault(lab: Callable[..., Lab]) -> None:
    made = lab()
    made.standin.switch(silent=True)
    assert made.examine() == ["empty_answer"]
    assert made.found.tokens_per_second is None


def test_a_model_that_is_not_there(lab: Callable[..., Lab]) -> None:
    (fault,) = lab().faults(model="qwen3:8b")
    assert fault.code == "ollama_model_unknown"
    assert "volta-small:latest" in fault.message


def test_a_broken_blob_is_no_crash(lab: Callable[..., Lab], registry: Registry) -> None:
    made = lab()
    blob = made.standin.blob(registry.published["model"])
    blob.write_bytes(b"<html>" + blob.read_bytes()[6:])
    (fault,) = made.faults()
    assert fault.code == "ollama_error"
    assert "does not support generate" in fault.message


def test_a_setting_without_effect_is_a_fault(lab: Callable[..., Lab]) -> None:
    made = lab(environment={**CONTEXT, "OLLAMA_NUM_PARALLEL": "two"})
    faults = made.faults(prompt_tokens_over=0)
    assert [fault.code for fault in faults] == ["option_ignored"]
    assert "key OLLAMA_NUM_PARALLEL, value two" in faults[0].message


def test_a_server_that_hangs_one_that_is_away_and_one_that_ended(lab: Callable[..., Lab]) -> None:
    made = lab(pull=False)
    made.standin.switch(not_ready=True)
    (fault,) = made.faults(patience=0.3)
    assert fault.code == "ollama_not_answering"
    assert "no answer in time" in fault.message
    made.standin.switch()
    made.standin.stop()
    (fault,) = made.faults()
    assert fault.code == "ollama_not_answering"
    assert "connection refused" in fault.message
    made.state = ("failed", "failed", "exit-code")
    (fault,) = made.faults()
    assert fault.code == "service_not_running"
    assert "failed (exit-code)" in fault.message
    assert made.found.ready_s is None


def test_another_program_on_the_port_is_not_taken_for_the_service(lab: Callable[..., Lab]) -> None:
    made = lab()
    process = made.standin.process
    assert process is not None

    class Elsewhere(Lab):
        def run(self, argv: Sequence[str], timeout: float) -> Completed:
            done = super().run(argv, timeout)
            return Completed(
                done.argv, done.rc, done.stdout.replace(f"MainPID={process.pid}", f"MainPID={os.getpid()}")
            )

    other = Elsewhere(made.standin)
    faults = {fault.code: fault for fault in other.faults(prompt_tokens_over=0)}
    assert set(faults) == {"foreign_listener"}
    assert str(process.pid) in faults["foreign_listener"].message


def test_what_answers_and_is_no_ollama(lab: Callable[..., Lab], registry: Registry) -> None:
    (fault,) = lab(pull=False).faults(base_url=registry.url.replace("//", "//oper:hidden-word@"), unit=None)
    assert fault.code == "ollama_not_answering"
    assert "is not Ollama" in fault.message
    assert "hidden-word" not in repr(fault)


def test_without_leave_to_load_only_what_is_loaded_is_judged(lab: Callable[..., Lab]) -> None:
    import ollama

    made = lab()
    assert made.examine(load=False) == []
    assert made.probe is not None
    assert made.probe.judged is False
    assert ollama.Client(made.standin.url).ps().models == []
    made.standin.switch(cpu_fallback=True)
    ollama.Client(made.standin.url).generate("volta-small")
    assert made.examine(load=False) == ["cpu_fallback"]
    assert made.probe.judged is True


def test_the_address_may_end_as_openais(lab: Callable[..., Lab]) -> None:
    made = lab()
    assert made.examine(base_url=f"{made.standin.url}/v1/", prompt_tokens_over=0) == []


def test_the_end_of_a_models_time_is_read_as_go_writes_it() -> None:
    moment = datetime.now(timezone.utc) + timedelta(seconds=100)
    for text in (
        moment.strftime("%Y-%m-%dT%H:%M:%S.123456789Z"),
        moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        (moment + timedelta(hours=8)).strftime("%Y-%m-%dT%H:%M:%S.5+08:00"),
    ):
        left = remaining({"expires_at": text})
        assert left is not None
        assert 90 < left < 101
    assert remaining({"expires_at": "2318-01-01T00:00:00.5Z"}) is not None
    assert remaining({}) is None
    assert remaining({"expires_at": "soon"}) is None


def test_a_long_prompt_has_more_words_than_asked_for_and_is_new_each_time() -> None:
    assert len(long_prompt(4096).split()) > 4096
    assert long_prompt(100)[:200] != long_prompt(100)[:200]
