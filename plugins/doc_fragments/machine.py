# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Options that several modules share (module_utils/arguments.py has their specifications), and their attributes."""

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

    SYSROOT = r"""
options:
  sysroot:
    description:
      - Folder below which C(/proc), C(/sys) and files are read.
      - When it holds a folder C(commands/), the outputs and exit statuses recorded there answer instead of the real programs.
    type: path
    default: /
"""

    NVIDIA_SMI = r"""
options:
  nvidia_smi:
    description:
      - The nvidia-smi program to run; a name is looked up in PATH.
    type: str
    default: nvidia-smi
"""

    VARIABLES = r"""
options:
  variable_prefix:
    description:
      - What a role's variables have before the names of these options, such as C(llama_server_). Faults then name the variables, which
        are what the operator of a role can set. Empty, they name the options.
    type: str
    default: ""
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
