# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Module ollama_probe as Ansible runs it, against the lab's stand-in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ollama
import pytest
from ansible.module_utils import basic
from ansible_collections.volta.llm.plugins.modules import ollama_probe

from tests.lab.ollama.running import Registry, Standin


@pytest.fixture
def standin(tmp_path: Path) -> Iterator[Standin]:
    """On a machine without cards, with a model."""
    with (
        Registry(tmp_path / "registry") as registry,
        Standin(tmp_path / "o", registry=registry.url, environment={"OLLAMA_CONTEXT_LENGTH": "8192"}) as running,
    ):
        ollama.Client(running.url).pull("volta-small")
        yield running


def run(capsys: pytest.CaptureFixture[str], check: bool = False, **parameters: Any) -> dict[str, Any]:
    given = {"_ansible_check_mode": check, **parameters}
    with (
        patch.object(basic, "_ANSIBLE_ARGS", json.dumps({"ANSIBLE_MODULE_ARGS": given}).encode()),
        patch.object(basic, "_ANSIBLE_PROFILE", "legacy", create=True),
        pytest.raises(SystemExit),
    ):
        ollama_probe.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_holds_is_told(standin: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, base_url=standin.url, model="volta-small", expect_gpu=False, keep_alive=300)
    assert (told["faults"], told["changed"], told["would_verify"]) == ([], False, False)
    assert (told["gpu_share"], told["context"]) == (0.0, 8192)
    assert told["prompt_tokens"] > 4096


def test_what_does_not_hold_fails_once_with_all_of_it(standin: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, base_url=standin.url, model="volta-small", keep_alive="-1")
    assert told["failed"]
    assert [fault["code"] for fault in told["faults"]] == ["cpu_fallback", "ollama_keep_alive_differs"]
    assert told["msg"].count("[") >= 2


def test_check_mode_loads_nothing_and_says_so(standin: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, check=True, base_url=standin.url, model="volta-small")
    assert (told["faults"], told["would_verify"], told["size"]) == ([], True, None)
    assert ollama.Client(standin.url).ps().models == []
    told = run(capsys, check=True, base_url=standin.url, model="not-pulled-yet")
    assert (told["faults"], told["would_verify"]) == ([], True)
    ollama.Client(standin.url).generate("volta-small")
    told = run(capsys, check=True, base_url=standin.url, model="volta-small")
    assert (told["failed"], told["would_verify"]) == (True, False)
    assert [fault["code"] for fault in told["faults"]] == ["cpu_fallback"]


def test_check_mode_before_anything_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 1 of this machine: nothing listens there.
    told = run(capsys, check=True, base_url="http://127.0.0.1:1", model="m")
    assert (told["faults"], told["would_verify"]) == ([], True)
    told = run(capsys, base_url="http://127.0.0.1:1", model="m", timeout=0)
    assert [fault["code"] for fault in told["faults"]] == ["ollama_not_answering"]


@pytest.mark.parametrize(
    ("parameters", "code"),
    [({"model": "a/b/c/d:e:f"}, "model_name_invalid"), ({"model": "m", "base_url": "nowhere"}, "setting_invalid")],
)
def test_what_cannot_be_meant_is_refused(
    parameters: dict[str, Any], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run(capsys, **parameters)
    assert [fault["code"] for fault in told["faults"]] == [code]
