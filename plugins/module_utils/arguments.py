# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Arguments that several modules take, each as its fragment in plugins/doc_fragments/machine.py documents it."""

from __future__ import annotations

from typing import Any

_Arguments = dict[str, dict[str, Any]]

SYSROOT: _Arguments = {"sysroot": {"type": "path", "default": "/"}}
#: A machine to be read (machine.Machine).
MACHINE: _Arguments = {**SYSROOT, "timeout": {"type": "float", "default": 30.0}}
NVIDIA_SMI: _Arguments = {"nvidia_smi": {"type": "str", "default": "nvidia-smi"}}
#: How faults name the options (results.as_shown).
VARIABLES: _Arguments = {"variable_prefix": {"type": "str", "default": ""}}
