# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the probe makes of models that are not like the one it was written for, and of models in use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import ollama
import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import is_fatal

from tests.lab.ollama.gguf_file import small_gguf
from tests.lab.ollama.registry import publish_model
from tests.lab.ollama.running import Registry, Standin

from .test_probe import Lab

ONE = {"OLLAMA_CONTEXT_LENGTH": "8192", "OLLAMA_MAX_LOADED_MODELS": "1"}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as server:
        publish_model(server.folder, "volta-other", weights=small_gguf(layers=5))
        publish_model(server.folder, "volta-short", weights=small_gguf(context=2048))
        publish_model(
            server.folder, "all-vectors", weights=small_gguf(context=2048, architecture="bert", embedding=True)
        )
        yield server


@pytest.fixture
def lab(tmp_path: Path, registry: Registry) -> Iterator[Callable[..., Lab]]:
    with ExitStack() as stack:

        def make(*models: str) -> Lab:
            standin = Standin(tmp_path / "o", registry=registry.url, driver="535.261.03", environment=ONE)
            stack.callback(standin.__exit__, None, None, None)
            standin.start()
            for model in models:
                ollama.Client(standin.url).pull(model)
            return Lab(standin)

        yield make


def loaded(made: Lab) -> list[str | None]:
    return [entry.model for entry in ollama.Client(made.standin.url).ps().models]


def test_a_model_of_vectors_is_not_asked_to_write(lab: Callable[..., Lab]) -> None:
    made = lab("all-vectors")
    faults = made.faults(model="all-vectors", expect_context=8192, keep_alive="5m")
    assert [fault.code for fault in faults] == ["ollama_context_own"]
    assert (made.found.kind, made.found.context, made.found.gpu_share) == ("embedding", 2048, 1.0)
    made.standin.switch(cpu_fallback=True)
    ollama.Client(made.standin.url).generate("all-vectors", keep_alive=0)
    assert "cpu_fallback" in made.examine(model="all-vectors")


def test_a_model_of_vectors_that_is_not_kept_is_proved_all_the_same(
    lab: Callable[..., Lab], registry: Registry
) -> None:
    made = lab("all-vectors")
    made.standin.stop()
    made.standin.environment["OLLAMA_KEEP_ALIVE"] = "0"
    made.standin.start()
    assert made.examine(model="all-vectors", keep_alive="0") == []


def test_a_models_own_limit_is_no_failure_of_the_service(lab: Callable[..., Lab]) -> None:
    made = lab("volta-small", "volta-short")
    for model, why in (("volta-short", "was made for 2048"), ("volta-own", "num_ctx 2048")):
        if model == "volta-own":
            ollama.Client(made.standin.url).create(model, from_="volta-small", parameters={"num_ctx": 2048})
        faults = made.faults(model=model, expect_context=8192, prompt_tokens_over=4096)
        assert [fault.code for fault in faults] == ["ollama_context_own"]
        assert not any(map(is_fatal, faults))
        assert why in faults[0].message
        assert made.found.context == 2048
        assert 1536 < (made.found.prompt_tokens or 0) <= 2048
    # Less than its own limit is still the service's fault.
    made.standin.switch(ignores_context=1024)
    ollama.Client(made.standin.url).generate("volta-short", keep_alive=0)
    assert made.examine(model="volta-short", expect_context=8192)[:1] == ["context_short"]


def test_a_model_that_was_proved_pushes_out_none_that_is_in_use(lab: Callable[..., Lab], tmp_path: Path) -> None:
    made = lab("volta-small", "volta-other")
    kept = {"proofs": str(tmp_path / "proofs.json"), "proof_of": "settings 1", "expect_context": 8192}
    for model in ("volta-small", "volta-other"):
        assert made.examine(model=model, **kept) == []
        assert made.found.proved_before is False
    assert loaded(made) == ["volta-other:latest"]
    assert made.examine(model="volta-small", **kept) == []
    assert made.found.proved_before is True
    assert loaded(made) == ["volta-other:latest"]
    # The one that is in memory is asked as ever.
    assert made.examine(model="volta-other", **kept) == []
    assert made.found.proved_before is False
    # Other settings, or a model of other content: what was proved no longer counts.
    assert made.examine(model="volta-small", **{**kept, "proof_of": "settings 2"}) == []
    assert loaded(made) == ["volta-small:latest"]
    ollama.Client(made.standin.url).create("volta-other", from_="volta-small", system="Be short.")
    assert made.examine(model="volta-other", **kept) == []
    assert made.found.proved_before is False


def test_models_of_the_same_weights_share_a_process_and_are_both_proved(
    lab: Callable[..., Lab], tmp_path: Path
) -> None:
    made = lab("volta-small")
    client = ollama.Client(made.standin.url)
    client.create("volta-brief", from_="volta-small", system="Be brief.")
    client.create("volta-long", from_="volta-small", parameters={"num_ctx": 16384})
    client.generate("volta-small")
    assert made.examine(model="volta-brief", expect_context=8192) == []
    assert made.found.gpu_share == 1.0
    assert loaded(made) == ["volta-small:latest"]
    kept = {"proofs": str(tmp_path / "proofs.json"), "expect_context": 8192}
    assert made.examine(model="volta-long", **kept) == []
    assert made.found.context == 16384


def test_what_was_found_wrong_is_no_proof(lab: Callable[..., Lab], tmp_path: Path) -> None:
    made = lab("volta-small", "volta-other")
    kept = {"proofs": str(tmp_path / "proofs.json"), "proof_of": "x"}
    made.standin.switch(cpu_fallback=True)
    assert "cpu_fallback" in made.examine(model="volta-small", **kept)
    ollama.Client(made.standin.url).generate("volta-other")
    assert "cpu_fallback" in made.examine(model="volta-small", **kept)
    assert loaded(made) == ["volta-small:latest"]
    (tmp_path / "proofs.json").write_text("no JSON", encoding="ascii")
    made.standin.switch()
    ollama.Client(made.standin.url).generate("volta-small", keep_alive=0)
    assert made.examine(model="volta-small", **kept) == []
    assert len(json.loads((tmp_path / "proofs.json").read_text(encoding="utf-8"))) == 1


def test_a_context_that_somebody_asked_for_is_left_to_them(lab: Callable[..., Lab], tmp_path: Path) -> None:
    made = lab("volta-small")
    kept = {"proofs": str(tmp_path / "proofs.json"), "expect_context": 8192}
    assert made.examine(**kept) == []
    client = ollama.Client(made.standin.url)
    client.generate("volta-small", options={"num_ctx": 16384})
    assert made.examine(**kept) == []
    assert [entry.context_length for entry in client.ps().models] == [16384]
    assert made.found.proved_before is True
    assert made.found.gpu_share == 1.0


def test_without_a_name_the_model_in_use_is_asked_and_else_the_smallest_that_writes(lab: Callable[..., Lab]) -> None:
    made = lab("all-vectors", "volta-other", "volta-small")
    assert made.examine(model=None) == []
    assert made.found.model == "volta-small:latest"
    ollama.Client(made.standin.url).generate("volta-other", options={"num_ctx": 16384})
    assert made.examine(model=None, expect_context=8192) == []
    assert made.found.model == "volta-other:latest"
    assert loaded(made) == ["volta-other:latest"]
    assert (made.found.context, made.found.kind) == (16384, "completion")


def test_without_a_name_and_without_models(lab: Callable[..., Lab]) -> None:
    made = lab()
    assert made.examine(model=None) == ["ollama_model_unknown"]
    ollama.Client(made.standin.url).pull("all-vectors")
    assert made.examine(model=None) == []
    assert made.found.kind == "embedding"
