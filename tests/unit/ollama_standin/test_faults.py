# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Each fault that the stand-in can be told to have."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import httpx
import ollama
import pytest

from tests.lab.ollama.running import Registry, Standin


@pytest.fixture
def gpu(make: Callable[..., Standin]) -> Standin:
    """On four simulated V100 under driver 535, with the model pulled."""
    standin = make(driver="535.261.03").start()
    ollama.Client(standin.url).pull("volta-small")
    return standin


def loaded(standin: Standin) -> ollama.ProcessResponse.Model:
    client = ollama.Client(standin.url)
    client.generate("volta-small")
    return client.ps().models[0]


def test_without_a_fault_the_model_is_whole_on_one_card(gpu: Standin) -> None:
    model = loaded(gpu)
    assert model.size == model.size_vram
    assert gpu.log().count('msg="inference compute"') == 4
    assert "100% GPU" in gpu.command("ps").stdout


def test_cpu_fallback_is_silent(gpu: Standin) -> None:
    start = len(gpu.log())
    assert loaded(gpu).size_vram
    sound = gpu.log()[start:]
    ollama.Client(gpu.url).generate("volta-small", keep_alive=0)
    start = len(gpu.log())
    gpu.switch(cpu_fallback=True)
    assert loaded(gpu).size_vram == 0
    said = [re.findall(r'level=\w+ .*?msg=("[^"]*"|\S+)', text) for text in (sound, gpu.log()[start:])]
    # But for how long it took.
    assert [line for line in said[0] if "seconds" not in line] == [line for line in said[1] if "seconds" not in line]


def test_a_skipped_device_is_logged_and_ps_is_mixed(gpu: Standin) -> None:
    gpu.switch(skip_device=True)
    model = loaded(gpu)
    assert model.size is not None
    assert model.size_vram is not None
    assert 0 < model.size_vram < model.size
    assert (
        'msg="skipping CUDA device — compute capability not in compiled architectures" '
        'device="Tesla V100-SXM2-32GB" cc=700 archs="[750 890 1000 1200]"'
    ) in gpu.log()
    assert re.search(r"\d+%/\d+% CPU/GPU", gpu.command("ps").stdout)


def test_partial_offload_is_what_was_asked_for(gpu: Standin) -> None:
    gpu.switch(partial_offload=0.4)
    model = loaded(gpu)
    assert model.size is not None
    assert model.size_vram is not None
    assert 0 < model.size_vram < model.size


def test_a_runner_that_aborts_is_told_from_one_that_is_slow(gpu: Standin) -> None:
    gpu.switch(abort_in_warmup=True)
    with pytest.raises(ollama.ResponseError, match=r"llama runner process has terminated: signal: aborted") as caught:
        loaded(gpu)
    assert caught.value.status_code == 500
    assert "common_init_from_params" in gpu.log()
    gpu.switch(load_timeout=True)
    with pytest.raises(
        ollama.ResponseError, match=r"timed out waiting for llama runner to start - progress 1\.00 - "
    ) as caught:
        loaded(gpu)
    assert caught.value.status_code == 500
    gpu.switch()
    assert loaded(gpu).size_vram


def test_a_release_can_have_a_runner_that_aborts(make: Callable[..., Standin]) -> None:
    standin = make(version="0.30.5", broken="abort_in_warmup").start()
    ollama.Client(standin.url).pull("volta-small")
    with pytest.raises(ollama.ResponseError, match=r"llama-server process has terminated: signal: aborted"):
        loaded(standin)


def test_a_load_longer_than_the_time_limit_is_given_up(make: Callable[..., Standin]) -> None:
    standin = make(environment={"OLLAMA_LOAD_TIMEOUT": "100ms"}).start()
    ollama.Client(standin.url).pull("volta-small")
    standin.switch(load_seconds=5)
    with pytest.raises(ollama.ResponseError, match=r"timed out waiting for llama runner to start - progress 0\.00"):
        loaded(standin)


def test_an_error_in_the_stream_comes_with_status_200(standin: Standin) -> None:
    standin.switch(error_in_stream="write blob: no space left on device")
    answer = httpx.post(f"{standin.url}/api/pull", json={"model": "volta-small"})
    assert answer.status_code == 200
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[0] == {"status": "pulling manifest"}
    assert lines[-1] == {"error": "write blob: no space left on device"}
    assert not any(line.get("status") == "success" for line in lines)
    once = httpx.post(f"{standin.url}/api/pull", json={"model": "volta-small", "stream": False})
    assert (once.status_code, once.json()) == (500, {"error": "write blob: no space left on device"})


def test_a_byte_broken_on_write_is_found_by_the_pull(
    standin: Standin, client: ollama.Client, registry: Registry
) -> None:
    standin.switch(blob_flip="write")
    wanted = registry.published["model"]
    found = set()
    for _ in range(2):
        with pytest.raises(ollama.ResponseError, match="digest mismatch, file must be downloaded again") as caught:
            list(client.pull("volta-small", stream=True))
        found.add(str(caught.value).rpartition("got sha256:")[2])
        assert f"want sha256:{wanted}" in str(caught.value)
        assert not standin.blob(wanted).exists()
    assert len(found) == 1
    assert client.list().models == []


def test_another_hash_each_time(standin: Standin, client: ollama.Client) -> None:
    standin.switch(different_hash_each_time=True)
    found = set()
    for _ in range(3):
        with pytest.raises(ollama.ResponseError, match="digest mismatch") as caught:
            list(client.pull("volta-small", stream=True))
        found.add(str(caught.value).rpartition("got sha256:")[2])
    assert len(found) == 3


def test_a_byte_broken_later_is_found_by_nobody(standin: Standin, client: ollama.Client, registry: Registry) -> None:
    standin.switch(blob_flip="later")
    assert client.pull("volta-small").status == "success"
    blob = standin.blob(registry.published["model"])
    assert hashlib.sha256(blob.read_bytes()).hexdigest() != registry.published["model"]
    assert client.list().models
    assert client.generate("volta-small", "hello").done


def test_the_context_that_was_asked_for_is_ignored(make: Callable[..., Standin]) -> None:
    standin = make(environment={"OLLAMA_CONTEXT_LENGTH": "16384"}).start()
    client = ollama.Client(standin.url)
    client.pull("volta-small")
    said = "word " * 6000
    assert client.generate("volta-small", said).prompt_eval_count == 6004
    standin.switch(ignores_context=True)
    assert client.generate("volta-small", said).prompt_eval_count == 4096
    assert client.ps().models[0].context_length == 4096


def test_the_keep_alive_that_was_asked_for_is_ignored(standin: Standin, client: ollama.Client) -> None:
    client.pull("volta-small")
    standin.switch(ignores_keep_alive=True)
    client.generate("volta-small", keep_alive=-1)
    expires = client.ps().models[0].expires_at
    assert expires is not None
    assert expires - datetime.now(timezone.utc) < timedelta(minutes=6)


def test_silent_answers_are_empty(standin: Standin, client: ollama.Client) -> None:
    client.pull("volta-small")
    standin.switch(silent=True)
    told = client.generate("volta-small", "hello")
    assert (told.response, told.eval_count) == ("", None)


def test_not_ready_takes_connections_and_says_nothing(standin: Standin) -> None:
    standin.switch(not_ready=True)
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(standin.url, timeout=0.3)
    standin.switch()
    assert httpx.get(standin.url).text == "Ollama is running"


def test_a_crash_at_start(make: Callable[..., Standin]) -> None:
    standin = make()
    standin.switch(crash_at_start=True)
    ended = standin.command("serve")
    assert ended.returncode == 2
    assert "panic" in ended.stderr


def test_an_unreadable_file_of_faults_is_no_fault(standin: Standin) -> None:
    (standin.folder / "switches.json").write_text('{"not_ready": tr')
    assert httpx.get(standin.url).text == "Ollama is running"
