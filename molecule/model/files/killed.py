# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Runs a playbook and kills it, with all its processes, while it shows the progress of a download.

``python killed.py PLAYBOOK INVENTORY VARIABLES`` (a JSON object). Prints what it had printed; fails when it ended by
itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

playbook, inventory, variables = sys.argv[1:]


def children(parent: int) -> list[int]:
    """All below a process: workers have sessions of their own, so that no signal to a group reaches them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            # proc(5): the command in parentheses, the state, the parent.
            above = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if entry.name.isdigit() else -1
        except OSError:
            continue
        if above == parent:
            found += [int(entry.name), *children(int(entry.name))]
    return found


argv = [str(Path(sys.executable).with_name("ansible-playbook")), playbook, f"--inventory={inventory}", "-e", variables]
# What it shows while it runs is what tells that the download is under way.
process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
assert process.stdout is not None
for line in process.stdout:
    print(line, end="")
    if line.startswith("model_download  ") and "% of" in line:
        break
else:
    sys.exit(f"the play ended by itself ({process.wait()})")
# The parent first: it would tell of its dead workers, and end in an orderly way.
for pid in [process.pid, *children(process.pid)]:
    os.kill(pid, signal.SIGKILL)
process.wait()
print(f"killed: {process.returncode}")
