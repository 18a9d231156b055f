# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Run the volta.llm collection from Python: converge machines, judge the result.

from pathlib import Path
from volta_llm import Request, converge

project = Path("volta.llm")
result = converge(Request(project, str(project / "site.yml"), (str(project / "inventories/lab"),)), twice=True)
assert result.status == "successful", [fault.code for host in result.runs[-1].hosts for fault in host.faults]
"""

from __future__ import annotations

from volta_llm.converge import converge
from volta_llm.model import ConvergeResult, ExitStatus, Fault, HostResult, RunResult, Task, UsageError
from volta_llm.runner import Request

__all__ = [
    "ConvergeResult",
    "ExitStatus",
    "Fault",
    "HostResult",
    "Request",
    "RunResult",
    "Task",
    "UsageError",
    "converge",
]
