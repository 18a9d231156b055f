# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What live progress prints and how it asks the host."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.progress import ProgressRecord
from ansible_collections.volta.llm.plugins.plugin_utils.live import (
    STILL_S,
    Lines,
    cleanup_command,
    duration_text,
    line,
    poll_command,
    read_poll,
    size_text,
)


def record(
    done: int, total: int | None = 1000, unit: str = "bytes", rate: float | None = 10.0, phase: str = ""
) -> ProgressRecord:
    eta = (total - done) / rate if total is not None and rate else None
    return ProgressRecord(phase, done, total, unit, rate, eta, "", 0.0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            ProgressRecord("", 431, 1000, "bytes", 8.12e8, 130.0, "qwen.gguf", 0.0),
            "model_download  node1  qwen.gguf  43.1 % of 1 kB  812 MB/s  2 min 10 s left",
        ),
        (record(120, 216, "steps", 0.5), "model_download  node1  120 of 216 steps  3 min 12 s left"),
        (record(7, None, "steps", None), "model_download  node1  7 steps"),
        (record(5_300_000, None, rate=None), "model_download  node1  5.3 MB"),
        (record(1000, 1000), "model_download  node1  100.0 % of 1 kB"),
        (record(0, 1000, rate=None, phase="verifying"), "model_download  node1  0.0 % of 1 kB  verifying"),
    ],
)
def test_a_line(given: ProgressRecord, text: str) -> None:
    assert line("model_download", "node1", given) == text


def test_sizes_and_durations() -> None:
    assert [size_text(n) for n in (0, 999, 1500, 43_000_000, 812e6, 107e9, 2.5e12)] == [
        "0 B",
        "999 B",
        "2 kB",
        "43.0 MB",
        "812 MB",
        "107 GB",
        "2.50 TB",
    ]
    assert [duration_text(s) for s in (0.2, 59.4, 60, 130, 599.6, 3599, 3600, 7260)] == [
        "1 s",
        "59 s",
        "1 min",
        "2 min 10 s",
        "10 min",
        "59 min",
        "1 h",
        "2 h 1 min",
    ]


def shown(interval: float | None, records: list[tuple[float, ProgressRecord]]) -> list[float]:
    """At which times lines were printed."""
    times: list[float] = []
    now = [0.0]
    lines = Lines("m", "h", interval, lambda text: times.append(now[0]))
    for at, given in records:
        now[0] = at
        lines.show(given, at)
    return times


def test_lines_come_rarer_and_rarer() -> None:
    times = shown(None, [(float(second), record(second)) for second in range(3, 300)])
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 3
    assert pauses[-1] == 10
    assert len(times) < 40


def test_a_set_interval_is_kept() -> None:
    times = shown(30.0, [(float(second), record(second)) for second in range(31, 300)])
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {30.0}


def test_nothing_new_is_not_repeated_but_shows_life() -> None:
    times = shown(None, [(float(second), record(5)) for second in range(3, 130)])
    assert times == [3.0, 3.0 + STILL_S, 3.0 + 2 * STILL_S]


def test_no_record_prints_nothing() -> None:
    lines = Lines("m", "h", None, lambda text: pytest.fail(text))
    lines.show(None, 100.0)
    lines.last(None, failed=False)
    lines.last(record(1), failed=False)


def ask(command: str) -> str:
    return subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True).stdout


def test_a_poll_of_a_running_job(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    job = folder / "j71625384950.77"
    job.write_text('{"started": 1, "finished": 0}')
    progress = folder / "p.progress"
    progress.write_text(json.dumps(asdict(record(3))))
    # As the wrapper's process does, this one carries the job's name among its arguments.
    process = subprocess.Popen(["/bin/sh", "-c", "sleep 30; true", "async_wrapper", "j71625384950"])
    try:
        poll = read_poll(ask(poll_command(str(job), str(progress))))
        assert poll.alive
        assert poll.progress == record(3)
        assert json.loads(poll.job) == {"started": 1, "finished": 0}
    finally:
        process.kill()
        process.wait()
    # The question itself, wrapped as become wraps it, must not be taken for the job.
    wrapped = f"/bin/sh -c {shlex.quote('true; ' + poll_command(str(job), str(progress)))}"
    assert not read_poll(ask(wrapped)).alive


def test_a_poll_of_nothing(tmp_path: Path) -> None:
    poll = read_poll(ask(poll_command(str(tmp_path / "j918273645546.6"), str(tmp_path / "none"))))
    assert poll.progress is None
    assert poll.job == ""
    assert not poll.alive


def test_an_answer_cut_short_is_no_answer(tmp_path: Path) -> None:
    whole = ask(poll_command(str(tmp_path / "j918273645546.6"), None))
    assert read_poll(whole) is not None
    assert read_poll(whole[: whole.rindex("@volta-end@")]) is None
    assert read_poll("") is None


def test_banners_and_carriage_returns_do_no_harm(tmp_path: Path) -> None:
    text = json.dumps(asdict(record(3)))
    output = f"Welcome to node1\r\n{text}\r\n@volta-alive@\r\n/proc/7/cmdline\r\n@volta-job@\r\n{{}}\r\n@volta-end@\r\n"
    poll = read_poll(output)
    assert poll.progress == record(3)
    assert poll.alive
    assert poll.job == "{}"


def test_cleanup_takes_both_files_and_nothing_else(tmp_path: Path) -> None:
    names = ["j918273645546.6", "a b.progress", "j918273645546.66"]
    for name in names:
        (tmp_path / name).write_text("x")
    ask(cleanup_command(str(tmp_path / names[0]), str(tmp_path / names[1])))
    assert [path.name for path in tmp_path.iterdir()] == [names[2]]
    ask(cleanup_command(str(tmp_path / "gone"), None))
