# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Package lists are updated where they are old by apt's own stamps, and never believed where they are not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.apt import lists
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine

NOW = 1_000_000.0
DONE = Completed((), 0)


class Server(Machine):
    """A root whose apt-get answers in turn; the last answer stays."""

    def __init__(self, root: Path, *answers: Completed) -> None:
        super().__init__(str(root))
        self.answers = list(answers) or [DONE]
        self.calls: list[tuple[str, ...]] = []
        self.waits: list[float] = []
        self.put("etc/apt/sources.list.d/ubuntu.sources", 0)

    def put(self, path: str, modified: float) -> None:
        file = self.sysroot / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        os.utime(file, (modified, modified))
        # Making a file marks its folder, which counts.
        os.utime(file.parent, (modified, modified))

    def updated(self, ago: float) -> Server:
        self.put("var/lib/apt/lists/archive_InRelease", NOW - ago)
        return self

    def run(self, argv: Any, timeout: float | None = None, env: Any = None) -> Completed:
        self.calls.append(tuple(argv))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def refresh(self, max_age: float = 86400) -> Any:
        return lists.refresh(self, max_age, NOW, self.waits.append)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


@pytest.mark.parametrize(
    ("ago", "max_age", "updates"), [(10, 86400, 0), (90000, 86400, 1), (10, 0, 1), (-10, 86400, 1)]
)
def test_by_age(server: Server, ago: float, max_age: float, updates: int) -> None:
    assert server.updated(ago).refresh(max_age) == (bool(updates), [])
    assert len(server.calls) == updates


def test_the_stamp_of_ubuntu_counts_where_the_lists_themselves_did_not_change(server: Server) -> None:
    server.updated(90000).put("var/lib/apt/periodic/update-success-stamp", NOW - 5)
    assert server.refresh() == (False, [])


def test_a_machine_without_lists(server: Server) -> None:
    for name in ("lock", "partial"):
        server.put(f"var/lib/apt/lists/{name}", NOW)
    assert server.refresh() == (True, [])


@pytest.mark.parametrize("path", ["etc/apt/sources.list", "etc/apt/sources.list.d/cuda.list"])
def test_lists_older_than_a_source(server: Server, path: str) -> None:
    server.updated(100).put(path, NOW - 50)
    assert server.refresh() == (True, [])


def test_lists_that_had_nothing_new_are_fresh_afterwards(server: Server) -> None:
    server.updated(90000).refresh()
    assert lists.age(server) is not None
    assert lists.age(server) < 3600


LOCK = (
    "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 12 (apt-get)\n"
    "E: Unable to lock directory /var/lib/apt/lists/\n"
)
GONE = "E: Failed to fetch http://mirror.invalid/dists/jammy/InRelease  Could not resolve 'mirror.invalid'\n"


@pytest.mark.parametrize("first", [Completed((), 100, stderr=LOCK), Completed((), 100, stderr=GONE)])
def test_another_apt_or_a_mirror_out_of_breath_is_tried_again(tmp_path: Path, first: Completed) -> None:
    server = Server(tmp_path, first, first, DONE)
    assert server.refresh() == (True, [])
    assert (len(server.calls), server.waits) == (3, [10.0, 10.0])


@pytest.mark.parametrize(
    ("answer", "words", "remedy"),
    [
        (Completed((), 100, stderr=LOCK), "held by process 12", "wait for the other apt to end"),
        (Completed((), 100, stderr=GONE), "mirror.invalid", "the source that apt names"),
        # An older apt is content with the lists it has.
        (Completed((), 0, stderr=GONE.replace("E:", "W:")), "mirror.invalid", "the source that apt names"),
        (Completed((), None, timed_out=True), "did not end in time", "the source that apt names"),
    ],
)
def test_lists_that_cannot_be_had_are_a_fault(tmp_path: Path, answer: Completed, words: str, remedy: str) -> None:
    server = Server(tmp_path, answer).updated(90000)
    done, faults = server.refresh()
    assert (done, [fault.code for fault in faults]) == (False, ["apt_lists_failed"])
    assert words in faults[0].message
    assert remedy in faults[0].remedy
    assert len(server.calls) == lists.TRIES
    # What failed is not taken for done the next time.
    assert server.refresh()[1] == faults


def test_a_machine_without_apt_is_not_asked_again(tmp_path: Path) -> None:
    server = Server(tmp_path, Completed((), None, stderr="No such file or directory", missing=True))
    assert [fault.code for fault in server.refresh()[1]] == ["apt_lists_failed"]
    assert len(server.calls) == 1
