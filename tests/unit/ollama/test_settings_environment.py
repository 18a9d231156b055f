# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Variables of Ollama: names that a release reads, values as it reads them, and what to write instead of others."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.ollama.environment import (
    FIRST,
    INSTEAD,
    LAST,
    VARIABLES,
    check,
    knows,
    read_version,
    seconds,
)
from ansible_collections.volta.llm.plugins.module_utils.ollama.settings import Settings
from hypothesis import given
from hypothesis import strategies as st


def judged(variables: dict[str, Any], version: str = "0.24.0") -> tuple[dict[str, str], list[tuple[str, str]]]:
    """What is to be set, and code and remedy of each fault."""
    numbers = read_version(version)
    assert numbers is not None
    usable, faults, _ = check(variables, numbers, version)
    return usable, [(fault.code, fault.remedy) for fault in faults]


def test_num_gpu_is_refused_with_what_to_use_instead() -> None:
    """No release has it, many guides name it, and Ollama says nothing of it."""
    usable, ((code, remedy),) = judged({"OLLAMA_NUM_GPU": "4"})
    assert (usable, code) == ({}, "ollama_variable_unknown")
    assert "num_gpu" in remedy
    assert "`gpus`" in remedy
    assert "Did you mean" not in remedy


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("OLLAMA_SCHED_SPRED", "Did you mean OLLAMA_SCHED_SPREAD?"),
        ("ollama_sched_spread", "Did you mean OLLAMA_SCHED_SPREAD?"),
        ("OLAMA_DEBUG", "Did you mean OLLAMA_DEBUG?"),
        ("OLLAMA_KEEPALIVE", "Did you mean OLLAMA_KEEP_ALIVE? That is said by `keep_alive`."),
        ("OLLAMA_NUM_CTX", "The context of all models is `context_length`; of one model it is its parameter num_ctx."),
        ("HTTPS_PROXI", "Did you mean HTTPS_PROXY?"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(name: str, remedy: str) -> None:
    assert judged({name: "1"}) == ({}, [("ollama_variable_unknown", remedy)])


def test_a_name_like_none_is_answered_with_those_that_there_are() -> None:
    _, ((_, remedy),) = judged({"SOMETHING_ELSE": "1"})
    assert "OLLAMA_SCHED_SPREAD" in remedy
    # What settings say is not to be set here.
    assert "OLLAMA_HOST" not in remedy


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("OLLAMA_VULKAN", "0.12.10", "0.12.11 is the first that does"),
        ("OLLAMA_NEW_ENGINE", "0.30.0", "0.24.0 was the last that did"),
        ("LLAMA_ARG_FIT", "0.24.0", "0.30.0 is the first that does"),
        ("OLLAMA_MAX_TRANSFER_STREAMS", "0.23.2", "0.23.3 is the first that does"),
    ],
)
def test_the_pinned_release_decides(name: str, version: str, said: str) -> None:
    numbers = read_version(version)
    assert numbers is not None
    _, (fault,), _ = check({name: "1"}, numbers, version)
    assert said in fault.message


@pytest.mark.parametrize("variable", [v for v in VARIABLES if v.owner], ids=lambda v: v.name)
def test_what_a_setting_says_is_refused_with_its_name(variable: Any) -> None:
    assert variable.owner in Settings.__dataclass_fields__
    version = ".".join(map(str, variable.since or FIRST))
    ((code, remedy),) = judged({variable.name: "1"}, version)[1]
    assert code == "ollama_variable_managed"
    assert f"`{variable.owner}`" in remedy


@pytest.mark.parametrize("name", ["HOME", "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "OLLAMA_LIBRARY_PATH"])
def test_what_must_not_be_set(name: str) -> None:
    assert judged({name: "/x"})[1] == [("ollama_variable_managed", "Remove it.")]


@pytest.mark.parametrize(
    ("name", "value", "written"),
    [
        ("OLLAMA_SCHED_SPREAD", True, "true"),
        ("OLLAMA_SCHED_SPREAD", False, "false"),
        ("OLLAMA_SCHED_SPREAD", 1, "1"),
        ("OLLAMA_GPU_OVERHEAD", 536870912, "536870912"),
        ("OLLAMA_DEBUG", 2, "2"),
        ("HTTPS_PROXY", "http://proxy:3128", "http://proxy:3128"),
        ("OLLAMA_NOPRUNE", "true", "true"),
    ],
)
def test_values_as_ollama_reads_them(name: str, value: Any, written: str) -> None:
    assert judged({name: value}) == ({name: written}, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # Ollama takes any word that it does not know for true.
        ("OLLAMA_SCHED_SPREAD", "no"),
        ("OLLAMA_SCHED_SPREAD", "off"),
        ("OLLAMA_SCHED_SPREAD", ""),
        ("OLLAMA_GPU_OVERHEAD", "512MB"),
        ("OLLAMA_GPU_OVERHEAD", "-1"),
        ("OLLAMA_DEBUG", "yes"),
        ("HTTPS_PROXY", "http://proxy\nEvil=1"),
    ],
)
def test_values_that_ollama_would_read_otherwise(name: str, value: str) -> None:
    assert [code for code, _ in judged({name: value})[1]] == ["ollama_variable_invalid"]


def test_all_findings_come_at_once() -> None:
    usable, faults = judged({"OLLAMA_NUM_GPU": 4, "OLLAMA_HOST": "x", "OLLAMA_NOPRUNE": "off", "TZ": "Asia/Shanghai"})
    assert usable == {"TZ": "Asia/Shanghai"}
    assert [code.removeprefix("ollama_variable_") for code, _ in faults] == ["unknown", "managed", "invalid"]


def test_what_writes_prompts_down_is_told() -> None:
    _, faults, notes = check({"OLLAMA_DEBUG_LOG_REQUESTS": True}, (0, 24, 0), "0.24.0")
    assert (faults, len(notes)) == ([], 1)
    assert "prompts" in notes[0]


def test_a_newer_release_than_the_lists_is_said() -> None:
    _, ((_, remedy),) = judged({"OLLAMA_OF_TOMORROW": "1"}, "0.99.0")
    assert ".".join(map(str, LAST)) in remedy


def test_the_table_is_sound() -> None:
    names = [variable.name for variable in VARIABLES]
    assert len(set(names)) == len(names)
    assert not set(INSTEAD) & {v.name for v in VARIABLES if v.known_to((0, 24, 0))}
    for variable in VARIABLES:
        assert variable.kind in ("bool", "number", "duration", "level", "cache", "text")
        assert variable.since is None or variable.until is None or variable.since <= variable.until
    # Those that the fact sheet of 0.24.0 names.
    known = "HOST MODELS KEEP_ALIVE LOAD_TIMEOUT NUM_PARALLEL MAX_LOADED_MODELS MAX_QUEUE SCHED_SPREAD CONTEXT_LENGTH"
    for name in [*known.split(), "FLASH_ATTENTION", "KV_CACHE_TYPE", "ORIGINS", "NOPRUNE", "NO_CLOUD", "GPU_OVERHEAD"]:
        assert knows((0, 24, 0), f"OLLAMA_{name}")
    assert not knows((0, 24, 0), "OLLAMA_NUM_GPU")


@pytest.mark.parametrize(
    ("text", "value"),
    [("30m", 1800), ("1h30m", 5400), ("300", 300), ("-1", -1), ("-1s", -1), ("0", 0), ("1.5h", 5400), ("100ms", 0.1)],
)
def test_times(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["1d", "30 m", "30min", "five", "", "m", "1h 30m", "30M"])
def test_no_times(text: str) -> None:
    assert seconds(text) is None


@given(st.text())
def test_any_text_is_judged(text: str) -> None:
    usable, faults, _ = check({text: text}, (0, 24, 0), "0.24.0")
    assert len(usable) + len(faults) == 1
    assert not any(char in value for value in usable.values() for char in "\n\r\0")
