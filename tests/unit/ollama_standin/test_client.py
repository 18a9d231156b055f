# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The stand-in as Ollama's own Python client sees it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import ollama
import pytest
from openai import OpenAI

from tests.lab.ollama.gguf_file import CONTEXT, small_gguf
from tests.lab.ollama.running import Registry, Standin

NAME = "volta-small:latest"


@pytest.fixture
def pulled(client: ollama.Client) -> ollama.Client:
    client.pull("volta-small")
    return client


def test_nothing_is_there_at_first(client: ollama.Client) -> None:
    assert client.list().models == []
    assert client.ps().models == []


def test_pull_streams_the_statuses_of_the_real_one(client: ollama.Client, registry: Registry) -> None:
    lines = list(client.pull("volta-small", stream=True))
    words = [line.status for line in lines if not (line.status or "").startswith("pulling ") or not line.digest]
    assert words == ["pulling manifest", "verifying sha256 digest", "writing manifest", "success"]
    again = list(client.pull("volta-small", stream=True))
    digest = registry.published["model"]
    first = next(line for line in again if line.digest == f"sha256:{digest}")
    assert first.status == f"pulling {digest[:12]}"
    assert first.total == first.completed == len(small_gguf())


def test_pull_without_a_stream_answers_the_last_status(client: ollama.Client) -> None:
    assert client.pull("volta-small").status == "success"


def test_pull_of_what_no_registry_has_is_an_error_in_the_stream(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="pull model manifest: file does not exist"):
        list(client.pull("nothing-of-that-name", stream=True))


def test_pull_from_a_registry_by_address_needs_insecure(client: ollama.Client, registry: Registry) -> None:
    name = f"{registry.host}/library/volta-small"
    with pytest.raises(ollama.ResponseError, match="server gave HTTP response to HTTPS client"):
        client.pull(name)
    assert client.pull(name, insecure=True).status == "success"
    assert client.list().models[0].model == f"{name}:latest"


def test_list_tells_digest_size_and_details(pulled: ollama.Client, registry: Registry) -> None:
    (model,) = pulled.list().models
    assert model.model == NAME
    assert model.digest == registry.published["manifest"]
    assert model.size is not None
    assert model.size > len(small_gguf())
    assert model.details is not None
    assert (model.details.family, model.details.parameter_size, model.details.quantization_level) == (
        "llama",
        "2.62M",
        "Q4_0",
    )


def test_show_tells_what_the_gguf_says(pulled: ollama.Client) -> None:
    shown = pulled.show("volta-small")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == CONTEXT
    assert shown.modelinfo["general.parameter_count"] == 2623744
    assert shown.modelinfo["tokenizer.ggml.tokens"] == []
    assert shown.capabilities == ["completion"]
    assert shown.parameters is not None
    assert '"</s>"' in shown.parameters
    assert shown.license is not None


def test_show_of_an_unknown_model_is_not_found(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'nothing' not found") as caught:
        client.show("nothing")
    assert caught.value.status_code == 404


def test_generate_and_chat_stream_and_do_not(pulled: ollama.Client) -> None:
    whole = pulled.generate("volta-small", "How are you?", options={"num_predict": 5})
    parts = list(pulled.generate("volta-small", "How are you?", stream=True, options={"num_predict": 5}))
    assert "".join(part.response for part in parts) == whole.response == "the river runs past the"
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 5)
    assert whole.eval_duration is not None
    assert whole.eval_duration > 0
    chat = pulled.chat("volta-small", [{"role": "user", "content": "How are you?"}])
    assert chat.message.content is not None
    assert chat.message.content.startswith("the river")
    assert chat.prompt_eval_count == 4 + 4
    assert chat.done_reason == "stop"
    last = list(pulled.chat("volta-small", [{"role": "user", "content": "x"}], stream=True))[-1]
    assert last.done
    assert last.eval_count


def test_an_empty_prompt_loads_and_keep_alive_zero_unloads(pulled: ollama.Client) -> None:
    assert pulled.generate("volta-small").done_reason == "load"
    (running,) = pulled.ps().models
    assert running.model == NAME
    assert running.size_vram == 0
    assert pulled.generate("volta-small", keep_alive=0).done_reason == "unload"
    assert pulled.ps().models == []


@pytest.mark.parametrize(
    ("keep_alive", "least", "most"),
    [(None, 290, 301), ("10m", 590, 601), (30, 20, 31), (-1, 10**9, 10**10), ("-1s", 10**9, 10**10)],
)
def test_a_model_stays_as_long_as_was_asked(
    pulled: ollama.Client, keep_alive: float | str | None, least: int, most: int
) -> None:
    pulled.generate("volta-small", keep_alive=keep_alive)
    (running,) = pulled.ps().models
    assert running.expires_at is not None
    left = running.expires_at - datetime.now(timezone.utc)
    assert timedelta(seconds=least) < left < timedelta(seconds=most)


def test_a_keep_alive_without_a_unit_is_refused(pulled: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="missing unit in duration") as caught:
        pulled.generate("volta-small", keep_alive="-1")
    assert caught.value.status_code == 400


def test_a_model_is_unloaded_when_its_time_is_over(pulled: ollama.Client, standin: Standin) -> None:
    pulled.generate("volta-small", keep_alive=0.2)
    for _ in range(1000):
        if not pulled.ps().models:
            break
    assert standin.command("ps").stdout.splitlines()[1:] == []


def test_a_prompt_is_cut_at_the_context_without_an_error(make: Callable[..., Standin]) -> None:
    standin = make(environment={"OLLAMA_CONTEXT_LENGTH": "512"}).start()
    client = ollama.Client(standin.url)
    client.pull("volta-small")
    said = "word " * 2000
    assert client.generate("volta-small", said).prompt_eval_count == 512
    assert client.generate("volta-small", said, options={"num_ctx": 4096}).prompt_eval_count == 2004
    openai = OpenAI(base_url=f"{standin.url}/v1", api_key="none")
    told = openai.chat.completions.create(model="volta-small", messages=[{"role": "user", "content": said}])
    assert told.usage is not None
    assert told.usage.prompt_tokens == 512
    assert client.ps().models[0].context_length == 512


def test_older_messages_are_dropped_before_the_last_is_cut(pulled: ollama.Client) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "word " * 3000},
        {"role": "assistant", "content": "word " * 2000},
        {"role": "user", "content": "word " * 100},
    ]
    told = pulled.chat("volta-small", messages, options={"num_ctx": 2000})
    assert told.prompt_eval_count == 2 + 4 + 100 + 4


def test_openai_lists_models_and_answers(pulled: ollama.Client, standin: Standin) -> None:
    openai = OpenAI(base_url=f"{standin.url}/v1", api_key="none")
    assert [model.id for model in openai.models.list()] == [NAME]
    assert openai.models.retrieve("volta-small").owned_by == "library"
    stream = openai.chat.completions.create(
        model="volta-small",
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        max_tokens=3,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "the river runs"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 3
    with pytest.raises(Exception, match="model 'nothing' not found"):
        openai.chat.completions.create(model="nothing", messages=[{"role": "user", "content": "x"}])


def test_copy_and_delete_keep_shared_blobs_until_the_last_name_is_gone(
    pulled: ollama.Client, standin: Standin, registry: Registry
) -> None:
    pulled.copy("volta-small", "kept")
    assert {model.model for model in pulled.list().models} == {NAME, "kept:latest"}
    pulled.delete("volta-small")
    assert standin.blob(registry.published["model"]).is_file()
    pulled.delete("kept")
    assert list((standin.store / "blobs").iterdir()) == []
    assert not (standin.store / "manifests" / "registry.ollama.ai").exists()
    with pytest.raises(ollama.ResponseError, match="not found"):
        pulled.delete("kept")


def test_a_blob_is_uploaded_and_a_model_created_from_it(
    client: ollama.Client, standin: Standin, tmp_path: Path
) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(small_gguf(context=8192, name="Own"))
    digest = client.create_blob(file)
    assert digest == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    statuses = [
        line.status
        for line in client.create(
            "own", files={"own.gguf": digest}, parameters={"num_ctx": 2048}, system="Be brief.", stream=True
        )
    ]
    assert statuses[0] == "parsing GGUF"
    assert f"using existing layer {digest}" in statuses
    assert statuses[-2:] == ["writing manifest", "success"]
    shown = client.show("own")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 8192
    assert shown.parameters is not None
    assert "num_ctx" in shown.parameters
    client.generate("own", "x" + " x" * 5000)
    assert client.ps().models[0].context_length == 2048
    manifest = json.loads((standin.store / "manifests/registry.ollama.ai/library/own/latest").read_text())
    weights = next(layer for layer in manifest["layers"] if layer["mediaType"].endswith("image.model"))
    assert weights == {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": digest,
        "size": file.stat().st_size,
        "from": str(standin.blob(digest)),
    }


def test_create_from_a_model_keeps_its_weights(pulled: ollama.Client, registry: Registry, standin: Standin) -> None:
    assert pulled.create("short", from_="volta-small", parameters={"num_ctx": 1024}).status == "success"
    manifest = json.loads((standin.store / "manifests/registry.ollama.ai/library/short/latest").read_text())
    weights = manifest["layers"][0]
    assert (weights["digest"], weights["from"]) == (f"sha256:{registry.published['model']}", NAME)
    shown = pulled.show("short")
    assert shown.parameters is not None
    assert {"num_ctx", "stop"} <= {line.split()[0] for line in shown.parameters.splitlines()}


def test_what_is_no_gguf_is_refused(client: ollama.Client, standin: Standin, tmp_path: Path) -> None:
    file = tmp_path / "page.gguf"
    file.write_text("<html>" + "x" * 5000)
    digest = client.create_blob(file)
    with pytest.raises(ollama.ResponseError, match="supplied file was not in GGUF format"):
        client.create("page", files={"page.gguf": digest})
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small_gguf()[:-4096])
    digest = client.create_blob(cut)
    with pytest.raises(ollama.ResponseError, match="exceeds file size"):
        client.create("cut", files={"cut.gguf": digest})
    assert client.list().models == []


def test_a_blob_under_a_wrong_name_is_refused(standin: Standin) -> None:
    import httpx

    name = "sha256:" + "0" * 64
    answer = httpx.post(f"{standin.url}/api/blobs/{name}", content=b"other bytes")
    assert answer.status_code == 400
    assert "digest mismatch, expected" in answer.json()["error"]
    assert httpx.head(f"{standin.url}/api/blobs/{name}").status_code == 404


def test_the_command_line_says_what_operators_read(make: Callable[..., Standin]) -> None:
    standin = make(version="0.24.1")
    assert standin.command("--version").stdout == (
        "Warning: could not connect to a running Ollama instance\nWarning: client version is 0.24.1\n"
    )
    standin.start()
    assert standin.command("-v").stdout == "ollama version is 0.24.1\n"
    assert standin.command("pull", "volta-small").returncode == 0
    assert standin.command("list").stdout.splitlines()[1].split()[0] == NAME
    assert "the river" in standin.command("run", "volta-small", "hello").stdout
    assert "100% CPU" in standin.command("ps").stdout
    assert "quantization        Q4_0" in standin.command("show", "volta-small").stdout
    assert standin.command("stop", "volta-small").returncode == 0
    assert standin.command("rm", "volta-small").stdout == "deleted 'volta-small'\n"
    gone = standin.command("pull", "nothing")
    assert (gone.returncode, gone.stderr.splitlines()[-1]) == (
        1,
        "Error: pull model manifest: file does not exist",
    )
