# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ctrl-C: the play and what it runs on this machine stop, the reports are written, the status is 130."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.volta_llm.conftest import Checkout


def _until(what: str, condition: object, seconds: float = 300.0) -> None:
    """Wait for something that will come; the limit only ends a test that would hang."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about in {seconds} s"
        time.sleep(0.1)


def test_interrupt_stops_the_play_and_its_children(checkout: Checkout, tmp_path: Path) -> None:
    checkout.play(
        "- name: Take long\n  ansible.builtin.command:\n"
        "    argv: [/bin/sh, -c, 'echo $$ > {{ playbook_dir }}/pid; exec sleep 600']\n  changed_when: false\n"
    )
    source = Path(__file__).resolve().parents[3] / "src"
    process = subprocess.Popen(
        [sys.executable, "-m", "volta_llm", "converge", "-i", "hosts.yml", "--json", "out.json"],
        cwd=checkout.root,
        env={**os.environ, "PYTHONPATH": str(source), "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    pid_file = checkout.root / "pid"
    _until("the task's process", lambda: pid_file.exists() and pid_file.read_text().strip())
    sleeper = Path("/proc") / pid_file.read_text().strip()
    assert sleeper.exists()

    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=300)

    assert process.returncode == 130, shown
    assert "interrupted; run it again to go on" in shown
    assert json.loads((checkout.root / "out.json").read_text())["status"] == "interrupted"
    _until("the end of the task's process", lambda: not sleeper.exists())
