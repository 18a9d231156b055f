# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ollama as it stands on a machine, read from a drop-in that the role itself renders; and which engine stands by."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed
from ansible_collections.volta.llm.plugins.module_utils.ollama.served import look
from ansible_collections.volta.llm.plugins.module_utils.serving.served import Served, standing_by

ENVIRONMENT = {
    "OLLAMA_HOST": "0.0.0.0:11500",
    "OLLAMA_CONTEXT_LENGTH": "16384",
    "OLLAMA_NUM_PARALLEL": "2",
    "OLLAMA_KEEP_ALIVE": "30m",
}


def systemd(environment: dict[str, str], **changed: str) -> Callable[[Sequence[str], float], Completed]:
    """As `systemctl show` prints it: a variable with a space in quotes."""
    words = " ".join(f'"{k}={v}"' if " " in v else f"{k}={v}" for k, v in environment.items())
    shown = {
        "ActiveState": "active",
        "SubState": "running",
        "UnitFileState": "enabled",
        "NeedDaemonReload": "no",
        "NRestarts": "0",
        "ActiveEnterTimestamp": "Mon 2026-11-30 12:10:01 UTC",
        "Environment": words,
        **changed,
    }

    def runner(argv: Sequence[str], timeout: float) -> Completed:
        if argv[0] == "journalctl":
            assert "UNIT=ollama.service" in argv
            return Completed(tuple(argv), 0)
        assert "ollama.service" in argv
        return Completed(tuple(argv), 0, stdout="\n".join(f"{name}={value}" for name, value in shown.items()))

    return runner


@pytest.fixture
def units(tmp_path: Path) -> Path:
    folder = tmp_path / "units"
    (folder / "ollama.service.d").mkdir(parents=True)
    (folder / "ollama.service.d/50-volta.conf").write_text("[Service]\n")
    return folder


def test_what_clients_need_is_read_from_the_unit(units: Path, tmp_path: Path) -> None:
    store = tmp_path / "the models"
    manifest = store / "manifests/registry.ollama.ai/library/qwen3/8b"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": []}))
    found = look(units, systemd({**ENVIRONMENT, "OLLAMA_MODELS": str(store)}))
    assert found is not None
    assert found.faults == []
    expected = {
        "name": "ollama",
        "base_url": "http://127.0.0.1:11500/v1",
        "root_url": "http://127.0.0.1:11500",
        "host": "0.0.0.0",
        "port": 11500,
        "backend": "cuda",
        "parallel": 2,
        "context_per_request": 16384,
        "has_keys": False,
        "models": ["qwen3:8b"],
        "alias": "qwen3:8b",
        "models_directory": str(store),
        "state": "active (running)",
        "running": True,
        "at_boot": True,
        "stands_by": False,
    }
    assert {name: found.server[name] for name in expected} == expected


@pytest.mark.parametrize(("host", "url"), [("[::1]:11434", "http://[::1]:11434"), ("", "http://127.0.0.1:11434")])
def test_addresses(units: Path, host: str, url: str) -> None:
    found = look(units, systemd({"OLLAMA_HOST": host}))
    assert found is not None
    assert found.server["root_url"] == url


def test_without_gpus(units: Path) -> None:
    found = look(units, systemd({"CUDA_VISIBLE_DEVICES": "-1"}))
    assert found is not None
    assert found.server["backend"] == "cpu"


def test_one_that_others_set_up_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "ollama.service").write_text("[Service]\nExecStart=/usr/local/bin/ollama serve\n")
    assert look(tmp_path, systemd(ENVIRONMENT)) is None


@pytest.mark.parametrize(
    ("shown", "code"),
    [
        ({"ActiveState": "failed", "SubState": "failed"}, "service_not_running"),
        ({"UnitFileState": "disabled"}, "service_not_enabled"),
        ({"NeedDaemonReload": "yes"}, "unit_changed"),
    ],
)
def test_what_systemd_says(units: Path, shown: dict[str, str], code: str) -> None:
    found = look(units, systemd(ENVIRONMENT, **shown))
    assert found is not None
    (fault,) = found.faults
    assert (fault.code, fault.subject) == (code, "ollama.service")


def unit(units: Path, running: bool, at_boot: bool) -> Served:
    found = look(
        units,
        systemd(
            ENVIRONMENT,
            ActiveState="active" if running else "inactive",
            UnitFileState="enabled" if at_boot else "disabled",
            NeedDaemonReload="yes",
        ),
    )
    assert found is not None
    return found


STOPPED = ["service_not_running", "service_not_enabled", "unit_changed"]


@pytest.mark.parametrize(
    ("engine", "other", "codes"),
    [
        # Stopped and not enabled, and the other one serves: as it is to be. What else is wrong is still said.
        ((False, False), (True, True), ["unit_changed"]),
        # The other one has failed and is to be mended: this one still stands by.
        ((False, False), (False, True), ["unit_changed"]),
        # It would come with the next boot, beside the other one.
        ((False, True), (True, True), ["service_not_running", "unit_changed"]),
        ((True, False), (False, False), ["service_not_enabled", "unit_changed"]),
        ((False, False), (False, False), STOPPED),
        ((False, False), None, STOPPED),
    ],
)
def test_which_engine_stands_by(units: Path, engine: Any, other: Any, codes: list[str]) -> None:
    (found,) = standing_by([unit(units, *engine)], [unit(units, *other)] if other else [])
    assert [fault.code for fault in found.faults] == codes
    assert found.server["stands_by"] is (codes == ["unit_changed"] and engine == (False, False))
