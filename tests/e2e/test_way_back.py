"""The engine that served before, one command away."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.e2e.conftest import Bench
from tests.e2e.test_site import GROUP_VARS, KEY

ROLLBACK = ("--playbook", "playbooks/engine_rollback.yml")


@pytest.fixture(scope="module", autouse=True)
def served(bench: Bench) -> None:
    """The machine serves its model: as test_site.py left it, or, where this file runs alone, from now on."""
    assert bench.converge().status == 0


def in_use(bench: Bench) -> str:
    return bench.exec("readlink", "/opt/llama.cpp/current").strip()


def process(bench: Bench) -> str:
    return bench.exec("systemctl", "show", "llama-server", "--property=MainPID", "--value").strip()


def starts(bench: Bench, since: str) -> int:
    journal = bench.exec("journalctl", "--unit", "llama-server", "--no-pager", "--output=cat", f"--since=@{since}")
    return sum(line.startswith("Started ") for line in journal.splitlines())


def answers(bench: Bench) -> bool:
    request = urllib.request.Request(
        f"http://{bench.address}:{GROUP_VARS['llama_server_port']}/v1/models",
        headers={"Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return bool(json.load(response)["data"])


def test_the_engine_before_serves_again_after_one_command(bench: Bench) -> None:
    before = in_use(bench)
    other = bench.converge(variables={"llama_cpp_targets": ["llama-server"]})
    assert other.status == 0
    newer, newer_process = in_use(bench), process(bench)
    assert newer != before

    since = bench.exec("date", "+%s").strip()
    back = bench.converge(*ROLLBACK)
    assert back.status == 0, back.output[-3000:]
    assert in_use(bench) == before
    assert process(bench) != newer_process
    assert starts(bench, since) == 1
    assert answers(bench)
    running = bench.exec("readlink", f"/proc/{process(bench)}/exe").strip()
    assert running.startswith(f"/opt/llama.cpp/{before}/")

    # The settings name the engine that serves again: with them there is nothing to do.
    assert bench.converge("--tags", "engine,serve").document["runs"][-1]["hosts"][0]["changed"] == 0
    # And forward, by the same command.
    assert bench.converge(*ROLLBACK).status == 0
    assert in_use(bench) == newer


def test_an_engine_that_fails_its_proof_is_not_gone_back_to(bench: Bench) -> None:
    now, serving = in_use(bench), process(bench)
    former = bench.exec("readlink", "-f", "/opt/llama.cpp/previous").strip()
    bench.exec("sh", "-c", f"printf x >> {former}/bin/llama-server")
    refused = bench.converge(*ROLLBACK)
    assert refused.status == 1
    assert refused.codes == ["release_damaged"]
    assert (in_use(bench), process(bench)) == (now, serving)
    assert answers(bench)
    # The pinned engine is the damaged one: the next run builds it again.
    healed = bench.converge()
    assert healed.status == 0
    assert in_use(bench) != now
