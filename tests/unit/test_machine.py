# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Programs are run to their end or ended, and never raise."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ansible_collections.volta.llm.plugins.module_utils.machine import run, run_in


def lives(pid: str) -> bool:
    """Whether the process is there and is no zombie, which a child is until somebody waits for it."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_program_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    done = run(["sh", "-c", f"sleep 600 & echo $! $$ >{pids}; wait"], timeout=2)
    assert (done.rc, done.timed_out, done.ok, done.missing) == (None, True, False, False)
    # SIGKILL is sent when run() returns; that it has taken effect can be a moment later.
    until = time.monotonic() + 30
    while (left := [pid for pid in pids.read_text().split() if lives(pid)]) and time.monotonic() < until:
        time.sleep(0.01)
    assert left == []


def test_a_program_that_is_not_there_is_said_to_be_missing() -> None:
    done = run(["/nonexistent/nvidia-smi", "-L"], timeout=5)
    assert (done.rc, done.missing, done.timed_out) == (None, True, False)
    assert done.stderr == "No such file or directory"


def test_answers_come_in_the_c_locale_and_otherwise_with_this_environment() -> None:
    done = run(["sh", "-c", 'echo "$LC_ALL $HOME $MORE"; echo problem >&2; exit 3'], timeout=30, env={"MORE": "more"})
    assert (done.stdout, done.stderr, done.rc) == (f"C {os.environ['HOME']} more\n", "problem\n", 3)


def test_a_whole_environment_is_the_only_one(tmp_path: Path) -> None:
    done = run_in(["/usr/bin/env"], 30, {"ONLY": "this"}, cwd=str(tmp_path))
    assert done.stdout == "ONLY=this\n"
    assert run_in(["/bin/pwd"], 30, {}, cwd=str(tmp_path)).stdout == f"{tmp_path}\n"
