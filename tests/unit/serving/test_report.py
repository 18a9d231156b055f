# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The summary of a verification: well only when every part says so, the worst first, one thing to do first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.filter.verification import FilterModule, verification
from ansible_collections.volta.llm.plugins.module_utils.serving.report import faults_of

SERVER = {
    "name": "llama-server",
    "alias": "demo",
    "parallel": 2,
    "state": "active (running)",
    "since": "Mon 2026-11-30 12:10:01 UTC",
    "restarts": 3,
    "model_files": ["/srv/a.gguf", "/srv/b.gguf"],
}
DRIVER = {"verdict": "ok", "reason": "", "loaded": {"version": "535.261.03"}, "faults": []}
GPUS = {"gpus": [{"product": "Tesla V100-SXM2-32GB", "temperature_c": 41}] * 4, "faults": []}
SERVED = {"servers": [SERVER], "faults": []}
PROBE = {
    "item": SERVER,
    "state": "ready",
    "answer": "The river.",
    "tokens_per_second": 41.3,
    "processing": 1,
    "waiting": 0,
    "context_per_request": 8192,
    "model": "demo",
    "gpu_memory": {"GPU-a": 20112, "GPU-b": None},
    "faults": [],
}


def fault(code: str, remedy: str = "mend it") -> dict[str, str]:
    return {"code": code, "subject": "part", "message": "is broken", "remedy": remedy}


def summed(driver: Any = None, gpus: Any = None, served: Any = None, probed: Any = None) -> tuple[bool, list[str], str]:
    found = verification(
        {"results": [PROBE]} if probed is None else probed,
        "gpu-1",
        DRIVER if driver is None else driver,
        GPUS if gpus is None else gpus,
        SERVED if served is None else served,
    )
    return found["ok"], [record["code"] for record in found["faults"]], found["text"]


def test_all_is_well() -> None:
    ok, codes, text = summed()
    assert (ok, codes) == (True, [])
    first, *lines = text.splitlines()
    assert first == "gpu-1: all is well"
    for part in (
        "535.261.03 loaded, verdict ok",
        "4 x Tesla V100-SXM2-32GB, hottest 41 degrees C",
        "active (running) since Mon 2026-11-30 12:10:01 UTC, restarted 3 times by itself within a day",
        "ready: answers at 41.3 tokens/s, requests at work: 1, waiting: 0",
        "demo, 8192 tokens a request, 2 at once",
        "20112 MiB, ? MiB",
        "2 model files, as they were verified",
    ):
        assert any(part in line for line in lines), part


@pytest.mark.parametrize("where", ["driver", "gpus", "served", "probed"])
def test_a_fault_anywhere_is_not_well(where: str) -> None:
    given: dict[str, Any] = {
        "driver": {**DRIVER, "faults": [fault("driver_mismatch")]},
        "gpus": {**GPUS, "faults": [fault("gpu_lost")]},
        "served": {**SERVED, "faults": [fault("service_not_running")]},
        "probed": {"results": [{**PROBE, "faults": [fault("cpu_fallback")]}]},
    }
    ok, codes, text = summed(**{where: given[where]})
    assert not ok
    assert len(codes) == 1
    assert f"[{codes[0]}] part: is broken\n  -> mend it" in text
    assert text.endswith("First: mend it")


def test_warnings_are_shown_and_fail_nothing() -> None:
    ok, codes, text = summed(served={**SERVED, "faults": [fault("service_not_enabled")]})
    assert (ok, codes) == (True, ["service_not_enabled"])
    assert text.startswith("gpu-1: 1 warning\n")
    assert "First:" not in text


def test_the_worst_comes_first_and_each_once() -> None:
    served = {**SERVED, "faults": [fault("model_unverified", "b"), fault("service_not_running", "a")]}
    probed = {"results": [{**PROBE, "faults": [fault("service_not_running", "a")]}]}
    _, codes, text = summed(served=served, probed=probed)
    assert codes == ["service_not_running", "model_unverified"]
    assert text.endswith("First: a")
    assert "2 model files, see below" in text


@pytest.mark.parametrize("cause", ["engine_missing", "foreign_listener", "unit_overridden"])
def test_what_keeps_a_service_from_running_is_to_mend_first(cause: str) -> None:
    served = {**SERVED, "faults": [fault("service_not_running", "see the journal")]}
    probed = {"results": [{**PROBE, "faults": [fault(cause, "remove it")]}]}
    assert summed(served=served, probed=probed)[2].endswith("First: remove it")


def test_a_port_that_refuses_follows_from_a_unit_that_is_overridden() -> None:
    served = {**SERVED, "faults": [fault("unit_overridden", "remove the drop-in")]}
    probed = {"results": [{**PROBE, "faults": [fault("endpoint_refused", "start it")]}]}
    assert summed(served=served, probed=probed)[2].endswith("First: remove the drop-in")


def test_an_answer_that_does_not_come_is_not_what_to_mend_first_where_something_else_is_wrong() -> None:
    """A shard that was cut short: the server ends in the middle of the answer, and its journal does not say why."""
    served = {**SERVED, "faults": [fault("model_unverified", "bring the file again")]}
    probed = {"results": [{**PROBE, "faults": [fault("completion_failed", "see the journal")]}]}
    _, codes, text = summed(served=served, probed=probed)
    assert codes == ["completion_failed", "model_unverified"]
    assert text.endswith("First: bring the file again")


def test_of_the_same_severity_the_cause_comes_first() -> None:
    """A machine without a driver and GPUs serves nothing: to serve is not what to do first."""
    given = {
        "driver": {**DRIVER, "faults": [fault("driver_without_gpu_on_bus", "seat the cards")]},
        "gpus": {"gpus": [], "faults": [fault("no_pci_device")]},
        "served": {"servers": [], "faults": [fault("nothing_served", "serve")]},
    }
    _, codes, text = summed(**given, probed={"results": []})
    assert codes == ["driver_without_gpu_on_bus", "no_pci_device", "nothing_served"]
    assert text.endswith("First: seat the cards")


@pytest.mark.parametrize(
    "broken",
    [
        {"failed": True, "msg": "MODULE FAILURE"},
        {"exception": "Traceback", "msg": "MODULE FAILURE"},
        {"failed": False, "failed_when_result": False, "msg": "MODULE FAILURE", "rc": 1},
        {},
    ],
)
def test_a_check_that_broke_is_not_well(broken: dict[str, Any]) -> None:
    """With failed_when: false a task that broke would pass for one that found nothing."""
    for given in ({"driver": broken}, {"gpus": broken}, {"served": broken}, {"probed": {"results": [broken]}}):
        ok, codes, _ = summed(**given)
        assert (ok, codes) == (False, ["check_failed"])


def test_the_same_seen_twice_is_told_once() -> None:
    served = {**SERVED, "faults": [{**fault("service_not_running"), "message": "failed"}]}
    probed = {"results": [{**PROBE, "faults": [{**fault("service_not_running"), "message": "failed, at length"}]}]}
    assert summed(served=served, probed=probed)[1] == ["service_not_running"]


def test_what_one_check_says_of_a_subject_is_all_told() -> None:
    """A hot card: its core and its memory are two messages of one kind."""
    core = {"code": "gpu_temperature_high", "subject": "GPU 1", "message": "the core is at 86", "remedy": "Cool it."}
    both = [core, {**core, "message": "the memory is at 97"}]
    found = faults_of([{"faults": both}, {"faults": [{**core, "message": "hot"}]}])
    assert [fault.message for fault in found] == ["the core is at 86", "the memory is at 97"]


def test_long_words_are_cut() -> None:
    long = {**fault("service_not_running"), "message": "\n".join(f"line {number}" for number in range(40))}
    _, _, text = summed(served={**SERVED, "faults": [long]})
    assert "line 0" in text
    assert "line 39" in text
    assert "line 20" not in text


@pytest.mark.parametrize(
    "code", ["nvlink_slow", "gpu_lost", "driver_module_unsigned", "model_unverified", "endpoint_busy"]
)
def test_how_serious_a_fault_of_any_part_is_is_known(code: str) -> None:
    """A filter runs on the controller, where no module has registered its faults: a warning must stay one."""
    ok, _, _ = summed(gpus={**GPUS, "faults": [fault(code)]})
    page = (Path(__file__).parents[3] / "docs" / "faults.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{code}` |")]
    assert ok == ("| warning |" in row)


def test_a_machine_that_serves_nothing() -> None:
    served = {"servers": [], "faults": [fault("nothing_served", "Run playbooks/serve.yml.")]}
    ok, codes, text = summed(served=served, probed={"results": [], "skipped": True})
    assert (ok, codes) == (False, ["nothing_served"])
    assert "serving" in text


def test_a_server_without_a_card_says_what_it_runs_on() -> None:
    server = {**SERVER, "backend": "cpu"}
    probed = {"results": [{**PROBE, "item": server, "gpu_memory": {}}]}
    assert "on the processor, as its settings say" in summed(served={**SERVED, "servers": [server]}, probed=probed)[2]


def test_a_server_that_does_not_answer_shows_what_it_is() -> None:
    probe = {"item": SERVER, "state": "loading", "faults": [fault("endpoint_loading_timeout")], "failed": True}
    _, _, text = summed(probed={"results": [probe]})
    assert "loading: no answer" in text
    assert "context unknown" in text


def test_the_filter_is_there() -> None:
    assert set(FilterModule().filters()) == {"verification"}


OLLAMA = {
    "name": "ollama",
    "state": "active (running)",
    "since": "Mon 2026-11-30 12:10:01 UTC",
    "models": ["qwen3:8b", "b:latest", "c:latest", "d:latest"],
    "context_per_request": 16384,
    "parallel": 1,
}


def test_ollama_serves_and_llama_server_stands_by() -> None:
    served = {"servers": [{**SERVER, "stands_by": True}], "engines": {"ollama": [OLLAMA]}, "faults": []}
    probe = {"item": OLLAMA, "tokens_per_second": 71.2, "gpu_share": 1.0, "faults": []}
    found = verification({"results": []}, "gpu-1", DRIVER, GPUS, served, {"results": [probe]})
    assert found["ok"]
    for part in (
        "llama-server  stands by, the other engine has the GPUs",
        "ollama        active (running) since Mon 2026-11-30 12:10:01 UTC",
        "qwen3:8b, b:latest, c:latest and 1 more, 16384 tokens a request, 1 at once",
        "qwen3:8b answers at 71.2 tokens/s",
        "100% of it on the GPUs",
    ):
        assert part in found["text"]
    assert "model files" not in found["text"]


def test_what_is_wrong_with_ollama_counts() -> None:
    probe = {"item": OLLAMA, "tokens_per_second": None, "gpu_share": 0.5, "faults": [fault("ollama_partly_on_cpu")]}
    served = {"servers": [], "engines": {"ollama": [OLLAMA]}, "faults": []}
    found = verification({"results": []}, "gpu-1", DRIVER, GPUS, served, {"results": [probe]})
    assert not found["ok"]
    assert "50% of it on the GPUs" in found["text"]
    assert "[ollama_partly_on_cpu]" in found["text"]


def test_ollama_without_a_model_is_not_nothing() -> None:
    served = {"servers": [], "engines": {"ollama": [{**OLLAMA, "models": []}]}, "faults": []}
    found = verification({"results": []}, "gpu-1", DRIVER, GPUS, served, {"results": []})
    assert found["ok"]
    assert "no model yet" in found["text"]
    assert "serving" not in found["text"]
