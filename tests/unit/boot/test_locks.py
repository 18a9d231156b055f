# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Locks of apt and dpkg, held by a real process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ansible_collections.volta.llm.plugins.module_utils.boot import locks
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine

#: As dpkg and apt take theirs: fcntl on the whole file.
HOLD = """
import fcntl, sys
handle = open(sys.argv[1], "w")
fcntl.lockf(handle, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def held(tmp_path):
    path = tmp_path / "var/lib/dpkg/lock-frontend"
    path.parent.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    folder = tmp_path / f"proc/{process.pid}"
    folder.mkdir(parents=True)
    (folder / "comm").write_text("unattended-upgr\n")
    yield process
    let_go(process)


def let_go(process):
    """End the holder; again is no harm."""
    if process.stdin is not None and not process.stdin.closed:
        process.stdin.close()
    process.wait()


def test_nobody_holds_a_lock_that_is_not_there(tmp_path):
    assert locks.wait(Machine(str(tmp_path)), 0) == ([], [], 0.0)


def test_a_held_lock_is_named_with_its_program(tmp_path, held):
    first, faults, _ = locks.wait(Machine(str(tmp_path)), 0)
    assert first == [locks.Holder("/var/lib/dpkg/lock-frontend", held.pid, "unattended-upgr")]
    assert [fault.code for fault in faults] == ["apt_locked"]
    assert f"is held by unattended-upgr (pid {held.pid}) for more than 0 s" in faults[0].message


def test_g10_a_lock_that_is_let_go_is_waited_for(tmp_path, held):
    machine = Machine(str(tmp_path))
    asked = locks.holders

    def let_go_after_the_first_look(of):
        found = asked(of)
        let_go(held)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "holders", let_go_after_the_first_look)
        first, faults, waited = locks.wait(machine, 60, pause=0.01)
    assert [holder.pid for holder in first] == [held.pid]
    assert faults == []
    assert waited > 0


def test_asking_does_not_take_the_lock(tmp_path, held):
    machine = Machine(str(tmp_path))
    locks.holders(machine)
    let_go(held)
    assert locks.holders(machine) == []
