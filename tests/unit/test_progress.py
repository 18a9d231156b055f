# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The rate that progress records state."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils import progress
from ansible_collections.volta.llm.plugins.module_utils.progress import ProgressRecord, ProgressWriter, read_progress


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


def shown(path: Path) -> ProgressRecord:
    record = read_progress(path.read_text(encoding="utf-8"))
    assert record is not None
    return record


def test_bytes_go_by_the_last_seconds(tmp_path: Path, clock: Clock) -> None:
    writer = ProgressWriter(str(tmp_path / "p"), "bytes", window=30.0)
    for second in range(100):
        clock.now = 1000.0 + second
        # 1000 bytes a second at first, 10 a second for the last minute.
        writer.update("download", min(second, 40) * 1000 + max(0, second - 40) * 10, 100_000)
    assert shown(tmp_path / "p").rate == pytest.approx(10.0)


def test_steps_go_by_the_whole_phase(tmp_path: Path, clock: Clock) -> None:
    writer = ProgressWriter(str(tmp_path / "p"), "steps", window=30.0)
    writer.update("configure", 1, 1, force=True)
    for minute in range(11):
        clock.now = 2000.0 + 60 * minute
        # Ten steps a minute, then a minute for one: what is left is still a matter of the mean.
        writer.update("build", 10 * min(minute, 9) + max(0, minute - 9), 182)
    record = shown(tmp_path / "p")
    assert record.rate == pytest.approx(91 / 600)
    assert record.eta_s == pytest.approx(600.0)


def test_a_phase_does_not_inherit_the_rate_of_the_one_before(tmp_path: Path, clock: Clock) -> None:
    writer = ProgressWriter(str(tmp_path / "p"), "steps")
    writer.update("build", 0, 10, force=True)
    clock.now += 10
    writer.update("build", 10, 10, force=True)
    writer.update("install", 0, 10, force=True)
    assert shown(tmp_path / "p").rate is None


def test_text_that_is_no_record_is_none() -> None:
    assert read_progress("") is None
    assert read_progress('{"phase": "x"}') is None
