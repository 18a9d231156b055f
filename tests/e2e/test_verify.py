"""playbooks/verify.yml on a served machine: well, busy, broken in several places at once, and never a change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Bench, Converged
from tests.e2e.test_site import GROUP_VARS, KEY
from tests.fault.serving import Load

VERIFY = ("--playbook", "playbooks/verify.yml")
UNIT = "llama-server"


@pytest.fixture(scope="module", autouse=True)
def served(bench: Bench) -> None:
    """The machine serves its model: as test_site.py left it, or, where this file runs alone, from now on."""
    assert bench.converge().status == 0


@pytest.fixture(autouse=True)
def as_it_was(bench: Bench) -> Iterator[None]:
    yield
    bench.exec("gpu-sim", "clear")
    bench.exec("systemctl", "kill", "--signal=CONT", UNIT, check=False)
    bench.exec("sh", "-c", f"systemctl reset-failed {UNIT}; systemctl start {UNIT}")


def verify(bench: Bench, *options: str) -> Converged:
    converged = bench.converge(*VERIFY, *options)
    assert converged.host["changed"] == 0
    assert KEY not in converged.output
    return converged


@pytest.mark.parametrize("options", [(), ("--check",)])
def test_a_machine_that_is_well(bench: Bench, options: tuple[str, ...]) -> None:
    converged = verify(bench, *options)
    assert converged.status == 0
    assert "all is well" in converged.output
    assert "as they were verified" in converged.output
    [endpoint] = converged.host["hand_over"]
    assert endpoint["base_url"] == f"http://{bench.address}:8080/v1"


def test_a_server_in_full_use_is_busy_and_not_broken(bench: Bench) -> None:
    """Far more clients than slots: the question waits longer than it may on any machine, which fails nothing."""
    port, model = int(GROUP_VARS["llama_server_port"]), GROUP_VARS["llama_server_alias"]
    with Load(bench.address, port, KEY, model, clients=64):
        converged = verify(bench, "-e", "verify_answer=0.3")
    assert converged.status == 0, converged.output[-3000:]
    assert [fault["code"] for fault in converged.host["warnings"]] == ["endpoint_busy"]
    assert "busy: no answer" in converged.output


def test_several_things_broken_are_one_summary(bench: Bench) -> None:
    bench.exec("gpu-sim", "fault", "lose-card", "2")
    bench.exec("systemctl", "stop", UNIT)
    converged = verify(bench)
    assert converged.status == 1
    message = converged.host["failed_task"]["message"]
    for said in ("[gpu_lost]", "[service_not_running]", "inactive (dead)", "First: "):
        assert said in message


def test_a_server_that_hangs_is_told_from_one_that_is_gone(bench: Bench) -> None:
    bench.exec("systemctl", "kill", "--signal=STOP", UNIT)
    converged = verify(bench)
    assert converged.status == 1
    assert "[endpoint_unresponsive]" in converged.host["failed_task"]["message"]


def test_a_file_that_was_touched_since_it_was_verified(bench: Bench) -> None:
    bench.exec("sh", "-c", "touch /srv/models/volta-demo/*-00002-of-00002.gguf")
    try:
        converged = verify(bench)
        assert converged.status == 1
        assert "[model_unverified]" in converged.host["failed_task"]["message"]
    finally:
        # Reads it again, finds it right, and is content.
        assert bench.converge("--tags", "model").status == 0
    assert verify(bench).status == 0


def test_an_option_that_the_engine_ignores_fails_the_run_although_it_answers(bench: Bench) -> None:
    """The engine is built for the CPU: it says so of every option about GPUs, and serves all the same."""
    try:
        converged = bench.converge(
            "--tags", "serve", variables={"llama_server_extra_args": ["--gpu-layers-draft", "5"]}
        )
        assert converged.status == 1
        assert converged.codes == ["option_ignored"]
        assert "--gpu-layers-draft option will be ignored" in converged.host["failed_task"]["message"]
    finally:
        assert bench.converge("--tags", "serve").status == 0
    assert verify(bench).status == 0
