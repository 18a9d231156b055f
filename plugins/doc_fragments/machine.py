# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Options of every module that reads a machine, and the attributes they share."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  sysroot:
    description:
      - Folder below which C(/proc), C(/sys) and files are read.
      - When it holds a folder C(commands/), the outputs and exit statuses recorded there answer instead of the real programs, so a
        capture from another machine is judged without that machine.
    type: path
    default: /
  timeout:
    description:
      - Limit in seconds for each program that is run. A program that exceeds it is reported as such, never as "no GPU".
    type: float
    default: 30.0
"""

    NVIDIA_SMI = r"""
options:
  nvidia_smi:
    description:
      - The nvidia-smi program to run; a name is looked up in PATH.
    type: str
    default: nvidia-smi
"""

    ATTRIBUTES = r"""
attributes:
  check_mode:
    description: Can run in check_mode and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: none
  platform:
    description: Target OS/families that can be operated against.
    support: full
    platforms: linux
"""
