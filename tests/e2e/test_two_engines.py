"""llama-server and Ollama (the stand-in) on one machine, through ansible-runner: one has the GPUs, the other stands by.

Scenario switch_engine has the rest: instances, a start by hand, and a switch that is taken back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Bench, Converged
from tests.e2e.test_site import GROUP_VARS, ask

SWITCH = ("--playbook", "playbooks/switch_engine.yml")
VERIFY = ("--playbook", "playbooks/verify.yml")
ON, OFF = ("active", "enabled"), ("inactive", "disabled")


@pytest.fixture(scope="module", autouse=True)
def served(bench: Bench) -> Iterator[None]:
    """The machine serves with llama-server before and after, as test_site.py left it."""
    assert bench.converge().status == 0
    yield
    assert bench.converge("--tags", "serve").status == 0


def states(bench: Bench) -> dict[str, tuple[str, str]]:
    """Of each engine's unit: whether it runs, and whether it is started at boot."""
    return {
        unit: tuple(bench.exec("systemctl", ask, unit, check=False).strip() for ask in ("is-active", "is-enabled"))
        for unit in ("llama-server", "ollama")
    }  # type: ignore[misc]


def on_the_gpus(bench: Bench) -> set[str]:
    """Programs that nvidia-smi, here the simulator, shows on the cards."""
    argv = ("nvidia-smi", "--query-compute-apps=process_name", "--format=csv,noheader")
    return {line.strip().rpartition("/")[2] for line in bench.exec(*argv).splitlines() if line.strip()}


#: Asked on the machine itself: Ollama listens on loopback.
ASK = """
import json, urllib.request
body = json.dumps({"model": "volta-small", "messages": [{"role": "user", "content": "Hello"}]}).encode()
print(urllib.request.urlopen("http://127.0.0.1:11434/v1/chat/completions", body, timeout=60).read().decode())
"""


def answer_of_ollama(bench: Bench) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(bench.exec("python3", "-c", ASK))
    return answer


def test_ollama_becomes_the_primary_engine_by_one_variable(bench: Bench) -> None:
    converged = bench.converge("-e", "volta_primary_engine=ollama")
    assert converged.status == 0, converged.output[-3000:]
    assert states(bench) == {"llama-server": OFF, "ollama": ON}
    assert answer_of_ollama(bench)["choices"][0]["message"]["content"].strip()
    assert on_the_gpus(bench) == {"ollama"}
    assert [endpoint["name"] for endpoint in converged.host["hand_over"]] == ["ollama"]
    again = bench.converge("-e", "volta_primary_engine=ollama")
    assert (again.status, again.host["changed"]) == (0, 0)


def test_verify_takes_the_other_engine_as_standing_by(bench: Bench) -> None:
    converged = bench.converge(*VERIFY)
    assert (converged.status, converged.host["changed"]) == (0, 0), converged.output[-3000:]
    assert "stands by, the other engine has the GPUs" in converged.output
    assert "100% of it on the GPUs" in converged.output


def test_and_back_by_the_same_variable(bench: Bench) -> None:
    converged = bench.converge("-e", "volta_primary_engine=llama_server")
    assert converged.status == 0, converged.output[-3000:]
    assert states(bench) == {"llama-server": ON, "ollama": OFF}
    assert on_the_gpus(bench) == {"llama-server"}
    model = GROUP_VARS["llama_server_alias"]
    messages = [{"role": "user", "content": "Hello"}]
    assert ask(bench, "/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 8})["choices"]
    again = bench.converge()
    assert (again.status, again.host["changed"]) == (0, 0)


def test_a_machine_for_ollama_alone_builds_and_downloads_nothing(bench: Bench) -> None:
    variables = {"volta_engines": ["ollama"], "volta_primary_engine": "ollama"}
    for name in ("model_start", "engine", "model"):
        converged = bench.converge("--playbook", f"playbooks/{name}.yml", variables=variables)
        # The gathering of facts.
        assert (converged.status, converged.host["ok"], converged.host["changed"]) == (0, 1, 0)


def switch(bench: Bench, engine: str) -> Converged:
    return bench.converge(*SWITCH, "-e", f"engine={engine}")


def test_an_engine_is_not_guessed(bench: Bench) -> None:
    for converged in (switch(bench, "vllm"), bench.converge("--tags", "plan,serve", "-e", "volta_primary_engine=vllm")):
        assert converged.status == 1
        assert "llama_server or" in converged.host["failed_task"]["message"]
    assert states(bench) == {"llama-server": ON, "ollama": OFF}


def test_a_variable_that_ollama_does_not_have_is_one_message_before_all_else(bench: Bench) -> None:
    converged = bench.converge(variables={"ollama_environment": {"OLLAMA_NUM_GPU": "4"}})
    assert converged.status == 1
    assert converged.codes == ["ollama_variable_unknown"]
    (fault,) = converged.host["faults"]
    assert fault["subject"] == "ollama_environment: OLLAMA_NUM_GPU"
    assert "ollama_gpus" in fault["remedy"]
    assert "num_gpu" in fault["remedy"]
    assert converged.roles <= {"plan", "(play)"}
