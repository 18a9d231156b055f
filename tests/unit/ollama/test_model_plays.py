# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Module ollama_model in real plays on this machine, against the lab's stand-in for Ollama."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.ollama.running import Registry, Standin
from tests.unit.action.test_live_plays import Play, Stage

SLOW = {"pull_bytes_per_second": 30_000, "part_bytes": 200_000}


class Table:
    def __init__(self, folder: Path) -> None:
        self.stage = Stage(folder)
        self.registry = Registry(folder / "registry")
        self.server = Standin(folder / "ollama", registry=self.registry.url)

    def task(self, title: str, /, **options: Any) -> dict[str, Any]:
        there = {"base_url": self.server.url, "models_directory": str(self.server.store), "wait": 0}
        return {"name": title, "volta.llm.ollama_model": {"name": "volta-small", **there, **options}}

    def run(self, tasks: list[dict[str, Any]], *options: str, **environment: str) -> Play:
        return self.stage.run(tasks, *options, **environment)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path)
    with made.registry, made.server:
        yield made


def test_a_pull_shows_its_progress_and_a_second_run_nothing(table: Table) -> None:
    table.server.switch(**SLOW)
    play = table.run([table.task("keep"), table.task("again")], VOLTA_PROGRESS_INTERVAL="0.5")
    assert play.rc == 0, play.output
    lines = [line for line in play.output.splitlines() if line.startswith("ollama_model  localhost  ")]
    assert any("volta-small:latest" in line and "% of 1.5 MB" in line for line in lines), play.output
    keep, again = play.results["keep"], play.results["again"]
    assert (keep["changed"], keep["action"], keep["verified"]) == (True, "pulled", True)
    assert (again["changed"], again["bytes_pulled"], again["blobs_hashed"]) == (False, 0, 0)
    assert set(again) >= {"digest", "size", "partials", "details", "faults", "notes", "waited", "would_pull"}
    assert table.stage.leftovers() == []


def test_check_mode_and_diff_tell_what_would_be(table: Table) -> None:
    play = table.run([table.task("keep")], "--check", "--diff")
    assert play.rc == 0, play.output
    assert (play.results["keep"]["changed"], play.results["keep"]["would_pull"]) == (True, True)
    assert "+volta-small:latest  to be brought" in play.output
    assert list(table.server.store.glob("blobs/*")) == []
    done = table.run([table.task("keep"), table.task("gone", state="absent")], "--diff")
    digest = table.registry.published["manifest"]
    assert f"+volta-small:latest  {digest}" in done.output
    assert f"-volta-small:latest  {digest}" in done.output


def test_a_failure_tells_what_to_do(table: Table) -> None:
    play = table.run([table.task("keep", name="volta-small:70b", variable_prefix="ollama_model_")])
    assert play.rc == 2
    assert (
        "[source_missing] volta-small:70b: registry.ollama.ai has no library/volta-small with the tag 70b"
        in play.output
    )
    assert "-> See https://ollama.com/library/volta-small/tags" in play.output


def test_a_server_that_is_not_there_yet_is_no_fault_in_check_mode(table: Table) -> None:
    table.server.stop()
    play = table.run([table.task("keep")], "--check")
    assert play.rc == 0, play.output
    assert (play.results["keep"]["changed"], play.results["keep"]["would_verify"]) == (True, True)
    assert table.run([table.task("keep")]).rc == 2
