# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Lets an installed engine compute as the proof on GPUs does, on the device that is named.

    python3 tests/cuda/compute.py /opt/llama.cpp/current none

``none`` is the processor. Standard library only; it runs on the machine that has the engine, from a copy of the tree.
Prints tokens a second by device as JSON, or the fault.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.cuda.collection import importable

importable()

from ansible_collections.volta.llm.plugins.module_utils.engine import proof
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError


def main() -> int:
    folder, device = sys.argv[1:]
    try:
        print(json.dumps(proof.compute_on(Path(folder), [device], None)))
    except FaultError as exc:
        print(json.dumps(exc.fault.as_dict()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
