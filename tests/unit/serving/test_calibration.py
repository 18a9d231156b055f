# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a server held of each GPU is kept for the next plan, written only when it says something new."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.serving.calibration import (
    Held,
    compare,
    keep,
    read,
    shortfall,
)
from ansible_collections.volta.llm.plugins.module_utils.serving.probe import Probe, Question
from ansible_collections.volta.llm.plugins.modules import llm_probe

SETTINGS = {"model": "/srv/m.gguf", "context_per_request": 8192, "parallel": 2}


def held(*measured: float | None, counted: float = 20000.0) -> list[Held]:
    return [Held(f"GPU-{number}", f"0000:1{number}:00.0", counted, mib) for number, mib in enumerate(measured)]


def test_a_gpu_on_which_the_process_is_not_holds_nothing() -> None:
    found = compare([{"uuid": "GPU-0", "counted_mib": 100}, {"uuid": "GPU-1", "counted_mib": 100}], {"GPU-0": 90})
    assert [(gpu.measured_mib, gpu.deviation_mib) for gpu in found] == [(90, -10.0), (0.0, -100.0)]


def test_written_once_and_again_only_when_it_differs(tmp_path: Path) -> None:
    path = tmp_path / "of" / "calibration.json"
    assert keep(path, "llama-server.service", SETTINGS, held(20300, 19900), check=True)
    assert not path.exists()
    assert keep(path, "llama-server.service", SETTINGS, held(20300, 19900))
    first = path.read_text()
    # A kernel that was loaded since: noise.
    assert not keep(path, "llama-server.service", SETTINGS, held(20340, 19900))
    assert path.read_text() == first
    assert keep(path, "llama-server.service", SETTINGS, held(20500, 19900))
    assert keep(path, "llama-server.service", {**SETTINGS, "parallel": 4}, held(20500, 19900))
    assert keep(path, "llama-server@small.service", SETTINGS, held(20500, 19900))
    kept = json.loads(path.read_text())["servers"]
    assert set(kept) == {"llama-server.service", "llama-server@small.service"}
    assert kept["llama-server.service"]["gpus"][0]["deviation_mib"] == 500.0
    assert kept["llama-server.service"]["settings"]["parallel"] == 4


def test_another_set_of_gpus_is_something_new(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert keep(path, "s", SETTINGS, held(20300, 19900))
    assert keep(path, "s", SETTINGS, held(20300))


@pytest.mark.parametrize("found", [[], held(20300, None)])
def test_what_is_not_known_is_not_kept(tmp_path: Path, found: list[Held]) -> None:
    path = tmp_path / "calibration.json"
    assert not keep(path, "s", SETTINGS, found)
    assert not path.exists()


def test_the_next_plan_counts_what_was_short_and_takes_nothing_off(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert shortfall(path) == {}
    keep(path, "a", SETTINGS, held(20300, 19000))
    keep(path, "b", SETTINGS, held(20700, 19500))
    assert shortfall(path) == {"GPU-0": 700.0}


@pytest.mark.parametrize("unit", ["llama-server", "llama-server.service"])
def test_a_server_is_kept_by_the_full_name_of_its_unit(tmp_path: Path, unit: str) -> None:
    """As served_units looks for it, however the unit was written for llm_probe."""
    path = tmp_path / "calibration.json"
    probe = Probe(Question("http://127.0.0.1:8080", unit=unit), Machine())
    probe.held = held(20300)
    assert llm_probe.keep(str(path), probe, check=False) == (True, [])
    assert list(read(path)["servers"]) == ["llama-server.service"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2, "servers": {}}', '{"version": 1, "servers": {"a": 3}}']
)
def test_a_file_that_says_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    assert shortfall(path) == {}
    assert keep(path, "s", SETTINGS, held(20300))
    assert read(path)["servers"]["s"]["gpus"][0]["measured_mib"] == 20300
