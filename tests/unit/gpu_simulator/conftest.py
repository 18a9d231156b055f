# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A simulated machine per test, without the engines that may really run on this one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.gpu_simulator import gpu_simulator


@dataclass
class Answer:
    """Exit status and standard output."""

    rc: int
    out: str


@dataclass
class Simulated:
    """A simulated machine: its state file, its tools."""

    state: Path
    capsys: pytest.CaptureFixture[str]

    def control(self, *words: str) -> Answer:
        rc = gpu_simulator.control(["--state", str(self.state), *words])
        captured = self.capsys.readouterr()
        return Answer(rc, captured.out + captured.err)

    def smi(self, *words: str) -> Answer:
        rc = gpu_simulator.nvidia_smi(list(words))
        captured = self.capsys.readouterr()
        assert captured.err == "", "the real tool writes everything to standard output"
        return Answer(rc, captured.out)

    def edit(self, change: Callable[[dict], None]) -> None:
        state = json.loads(self.state.read_text())
        change(state)
        self.state.write_text(json.dumps(state))

    @property
    def sysroot(self) -> Path:
        return self.state.parent / "sysroot"


@pytest.fixture
def machine(tmp_path, monkeypatch, capsys) -> Simulated:
    """The reference machine with persistence on, and root's rights (nothing below the state file needs them)."""
    state = tmp_path / "state.json"
    monkeypatch.setenv("GPU_SIMULATOR_STATE", str(state))
    monkeypatch.setattr(gpu_simulator, "is_root", lambda: True)
    simulated = Simulated(state, capsys)
    install(simulated, "v100x4")
    return simulated


def install(simulated: Simulated, profile: str, *more: str) -> None:
    assert simulated.control("install", "--profile", profile, "--persistence", *more).rc == 0
    simulated.edit(lambda state: state.update(engines=[]))
