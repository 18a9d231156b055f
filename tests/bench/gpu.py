# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How many processes a gpu_verify run starts, and how much time its modules take beside them.

Runs what the role runs (gpu_inventory and nvlink_topology with the role's defaults) against the GPU simulator on a
healthy machine with four V100. A wrapper counts and times every nvidia-smi process. Two figures of module time are
printed: in one process that has the code loaded (what reading and judging costs), and as a new Python process from
start to end, imports included (what a target pays, without Ansible's own transfer); for that one the processor time as
well, which does not grow when the machine is busy with other work.

``python -m tests.bench.gpu [--runs N]``; prints only, judges nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIMULATOR = ROOT / "tests" / "lab" / "gpu_simulator" / "gpu_simulator.py"
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.volta.llm.plugins.module_utils.faults import Fault
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import gpu_report, link_report
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi

GPUS = gpu_report.GpuRequest(
    expected_count=4,
    expected_product="Tesla V100-SXM2-32GB",
    min_memory_mib=32000,
    driver_branch="535",
    persistence=True,
    max_uncorrected_ecc=0,
    max_temperature=80,
)
LINKS = link_report.LinkRequest(require="full_mesh", min_links_per_pair=1)

CHILD = """
import json, sys, time
sys.path[:0] = [{collections!r}, {root!r}]
from tests.bench.gpu import one_run
print(json.dumps(one_run({sysroot!r}, {program!r}) | {{"cpu": time.process_time()}}))
"""


class TimedMachine(Machine):
    """Adds up the time spent waiting for programs."""

    waited = 0.0

    def run(self, *arguments: Any, **named: Any) -> Completed:
        start = time.perf_counter()
        try:
            return super().run(*arguments, **named)
        finally:
            self.waited += time.perf_counter() - start


def one_run(sysroot: str, program: str) -> dict[str, Any]:
    """Both modules' work once: processes, seconds in all, seconds waiting for them, faults."""
    start = time.perf_counter()
    machine = TimedMachine(sysroot)
    smi = NvidiaSmi(machine, program)
    faults: list[Fault] = []
    state, found = gpu_report.report(smi, GPUS)
    faults += found
    links, found = link_report.report(smi, LINKS)
    faults += found
    seconds = time.perf_counter() - start
    return {
        "processes": machine.processes,
        "seconds": seconds,
        "waited": machine.waited,
        "own": seconds - machine.waited,
        "state": state.state,
        "mesh": links.fully_connected,
        "faults": [fault.code for fault in faults],
    }


def simulated(folder: Path) -> tuple[str, str]:
    """A healthy simulated machine: its root and its nvidia-smi."""
    os.environ["GPU_SIMULATOR_STATE"] = str(folder / "state.json")
    install = [sys.executable, str(SIMULATOR), "install", "--profile", "v100x4", "--persistence"]
    subprocess.run([*install, "--sysroot", str(folder / "root")], check=True, stdout=subprocess.DEVNULL)
    program = folder / "nvidia-smi"
    program.symlink_to(SIMULATOR)
    return str(folder / "root"), str(program)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        sysroot, program = simulated(Path(name))
        loaded = [one_run(sysroot, program) for _ in range(runs)]
        code = CHILD.format(collections=str(ROOT / ".collections"), root=str(ROOT), sysroot=sysroot, program=program)
        whole, processor = [], []
        for _ in range(runs):
            start = time.perf_counter()
            child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
            told = json.loads(child.stdout)
            whole.append(time.perf_counter() - start - told["waited"])
            processor.append(told["cpu"])
    first = loaded[0]
    print(f"machine: simulated 4 x V100, state {first['state']}, full mesh {first['mesh']}, faults {first['faults']}")
    print(f"nvidia-smi processes a run: {max(run['processes'] for run in loaded)} (at most 3 wanted)")
    print(f"waiting for them: {_ms(run['waited'] for run in loaded)} (the simulator's own start-up)")
    print(f"reading and judging: {_ms(run['own'] for run in loaded)} (under 150 ms wanted)")
    print(f"as a new process, imports included: {_ms(whole)} (under 150 ms wanted)")
    print(f"processor time of that process: {_ms(processor)}")
    return 0


def _ms(values: Any) -> str:
    numbers = sorted(value * 1000 for value in values)
    return (
        f"median {statistics.median(numbers):.1f} ms, {numbers[0]:.1f} to {numbers[-1]:.1f} ms of {len(numbers)} runs"
    )


if __name__ == "__main__":
    raise SystemExit(main())
