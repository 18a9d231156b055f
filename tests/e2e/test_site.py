"""The whole way on a lab machine (simulated GPUs), through ansible-runner: killed, resumed, idempotent, and refused.

The tests build on each other in the order they stand in: the machine is bare at first and converged after the second.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import ROOT, Bench

GROUP_VARS = yaml.safe_load((ROOT / "inventories/demo/group_vars/gpu_servers.yml").read_text(encoding="utf-8"))
KEY = GROUP_VARS["llama_server_api_keys"][0]
#: Seconds after which a run is killed: in the host's checks, in package installation, in the build, late in the build.
KILLED_AFTER = (8, 25, 45, 65)


def endpoint(bench: Bench) -> str:
    address = bench.address
    return f"http://{address}:{GROUP_VARS['llama_server_port']}"


def ask(bench: Bench, path: str, body: dict[str, Any] | None = None, key: str = KEY) -> dict[str, Any]:
    request = urllib.request.Request(
        endpoint(bench) + path,
        data=json.dumps(body).encode() if body is not None else None,
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def test_check_mode_on_a_bare_machine_changes_nothing_and_passes(bench: Bench) -> None:
    converged = bench.converge("--check")
    assert converged.status == 0
    assert not bench.exec("ls", "/opt", check=False).strip()
    assert not bench.exec("sh", "-c", "ls -d /srv/models 2>/dev/null", check=False).strip()


def test_a_run_killed_at_any_moment_is_simply_run_again(bench: Bench) -> None:
    for seconds in KILLED_AFTER:
        argv = ["ansible-playbook", "site.yml", "-i", str(bench.inventory)]
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=bench.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    converged = bench.converge("--twice")
    assert converged.status == 0
    assert converged.document["idempotent"] is True
    assert converged.host["changed"] == 0


def test_the_endpoint_answers_a_client_on_another_machine(bench: Bench) -> None:
    answer = ask(
        bench,
        "/v1/chat/completions",
        {
            "model": GROUP_VARS["llama_server_alias"],
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 16,
        },
    )
    assert answer["choices"][0]["message"]["content"].strip()
    assert answer["usage"]["completion_tokens"] > 0
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(bench, "/v1/chat/completions", {"messages": []}, key="not-the-key")


@pytest.mark.parametrize("stage", ["plan", "host", "gpu", "model", "engine", "serve"])
def test_each_stage_runs_alone_by_its_tag(bench: Bench, stage: str) -> None:
    converged = bench.converge("--tags", stage)
    assert converged.status == 0
    assert converged.host["changed"] == 0


def test_check_and_diff_on_a_converged_machine_show_no_change(bench: Bench) -> None:
    converged = bench.converge("--check", "--diff")
    assert converged.status == 0
    assert converged.host["changed"] == 0


def test_too_few_gpus_stop_the_run_before_anything_else(bench: Bench) -> None:
    converged = bench.converge(variables={"gpu_verify_expected_count": 8})
    assert converged.status == 1
    assert "gpu_missing" in converged.codes
    assert all(fault["remedy"] for fault in converged.host["faults"])
    assert not converged.roles & {"llama_cpp", "model", "llama_server"}


def test_a_lost_card_is_named_by_its_bus_id(bench: Bench) -> None:
    bench.exec("gpu-sim", "fault", "lose-card", "2")
    try:
        converged = bench.converge("--tags", "gpu")
    finally:
        bench.exec("gpu-sim", "clear")
    assert converged.status == 1
    assert "gpu_lost" in converged.codes
    assert converged.host["failed_task"]["role"].endswith("gpu_verify")


def model_files(bench: Bench, **changed: Any) -> dict[str, Any]:
    """A model of another name, so that the verified one stays, whose last file has wrong properties."""
    files = [dict(entry) for entry in bench.variables["vars"]["demo_model_files"]]
    files[-1].update(changed)
    return {"model_name": "wrong", "model_files": files}


@pytest.mark.parametrize(
    ("changed", "code"), [({"sha256": "0" * 64}, "hash_mismatch"), ({"size": 4711}, "size_mismatch")]
)
def test_a_model_that_is_not_the_one_asked_for_never_gets_its_name(
    bench: Bench, changed: dict[str, Any], code: str
) -> None:
    variables = model_files(bench, **changed)
    converged = bench.converge("--tags", "model", variables=variables)
    assert converged.status == 1
    assert code in converged.codes
    wrong = variables["model_files"][-1]["name"]
    listing = bench.exec("sh", "-c", "ls /srv/models/wrong 2>/dev/null; true").split()
    assert wrong not in listing
    bench.exec("rm", "-rf", "/srv/models/wrong")


def test_a_port_held_by_another_program_is_named_and_nothing_is_touched(bench: Bench) -> None:
    bench.exec("systemd-run", "--unit=squatter", "python3", "-m", "http.server", "8099")
    try:
        for _ in range(50):
            if ":8099" in bench.exec("ss", "-ltn"):
                break
            time.sleep(0.1)
        converged = bench.converge("--tags", "serve", variables={"llama_server_port": 8099})
    finally:
        bench.exec("systemctl", "stop", "squatter")
    assert converged.status == 1
    assert converged.codes == ["port_taken"]
    assert "python3" in converged.host["faults"][0]["message"]
    assert "squatter" in converged.host["faults"][0]["message"]
    assert ask(bench, "/v1/models")["data"]


@pytest.mark.parametrize(
    ("variables", "code", "says"),
    [
        ({"llama_server_api_keys": []}, "open_without_key", "llama_server_api_keys"),
        ({"llama_server_split_mode": "row", "llama_server_backend": "cuda"}, "split_mode_unavailable", "layer"),
        ({"llama_server_split_mode": "diagonal"}, None, "diagonal"),
        ({"llama_server_tensor_split": "1:1:1:1"}, None, "tensor_split"),
        ({"llama_server_context_per_request": 100}, None, "context_per_request"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(
    bench: Bench, variables: dict[str, Any], code: str | None, says: str
) -> None:
    converged = bench.converge("--tags", "serve", variables=variables)
    assert converged.status == 1
    if code is not None:
        assert code in converged.codes
    assert says in (converged.host["failed_task"]["message"] or "")
    assert ask(bench, "/v1/models")["data"], "the running service must not notice"


def test_an_engine_source_that_does_not_match_its_hash_is_refused(bench: Bench) -> None:
    before = bench.exec("readlink", "/opt/llama.cpp/current")
    converged = bench.converge("--tags", "engine", variables={"llama_cpp_sha256": "0" * 64})
    assert converged.status == 1
    assert "source_checksum_mismatch" in converged.codes
    assert bench.exec("readlink", "/opt/llama.cpp/current") == before


def test_a_compile_error_shows_the_end_of_the_log_and_where_it_lies(bench: Bench, broken_source: Path) -> None:
    before = bench.exec("readlink", "/opt/llama.cpp/current")
    url, sha256 = bench.put(broken_source)
    converged = bench.converge(
        "--tags",
        "engine",
        variables={
            "llama_cpp_source": "archive",
            "llama_cpp_url": url,
            "llama_cpp_sha256": sha256,
            "llama_cpp_version": "",
            "llama_cpp_commit": "",
            "llama_cpp_targets": ["llama-server"],
        },
    )
    assert converged.status == 1
    assert "build_failed" in converged.codes
    message = converged.host["failed_task"]["message"]
    assert "this line does not compile" in message
    assert ".log" in message
    assert bench.exec("readlink", "/opt/llama.cpp/current") == before


def test_an_unreachable_machine_is_ansibles_own_message() -> None:
    done = subprocess.run(
        [
            "ansible-playbook",
            "site.yml",
            "-i",
            "inventories/lab",
            "-e",
            "ansible_host=127.0.0.1",
            "-e",
            "ansible_port=1",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 4
    assert "UNREACHABLE!" in done.stdout
    assert "FAILED!" not in done.stdout
