# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""nvlink_topology on the GPU simulator with cards lost as branch 535 shows it: the living ones are still judged."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import link_report
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi

from tests.unit.nvidia.test_modules_and_role import SIMULATOR

LOST = ("gpu_lost", "0000:1c:00.0")
NO_MATRIX = ("topology_unavailable", "nvidia-smi topo -m")
EACH = [f"nvlink -s -i 0000:{bus}:00.0" for bus in ("1a", "1d", "1e")]


class Simulated:
    """Four simulated V100, and the commands that were asked of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.control("install", "--profile", "v100x4", "--persistence", "--sysroot", str(self.root))
        (folder / "sim").mkdir()
        (folder / "sim" / "nvidia-smi").symlink_to(SIMULATOR)
        self.program = folder / "nvidia-smi"
        self.program.write_text(
            f'#!/bin/sh\necho "$*" >>{folder}/calls\nexec {sys.executable} {folder}/sim/nvidia-smi "$@"\n'
        )
        self.program.chmod(0o755)

    def control(self, *words: str) -> None:
        subprocess.run([sys.executable, str(SIMULATOR), *words], check=True, stdout=subprocess.DEVNULL)

    def fault(self, *faults: str) -> None:
        for fault in faults:
            self.control("fault", *fault.split())

    def report(self, **asked: Any) -> tuple[link_report.LinkReport, list[Fault]]:
        machine = Machine(str(self.root))
        got = link_report.report(NvidiaSmi(machine, str(self.program)), link_report.LinkRequest(**asked))
        assert machine.processes == len(self.calls)
        return got

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulated:
    monkeypatch.setenv("GPU_SIMULATOR_STATE", str(tmp_path / "state.json"))
    return Simulated(tmp_path)


def said(faults: Sequence[Fault]) -> set[tuple[str, str]]:
    assert len(faults) == len({(fault.code, fault.subject) for fault in faults}), "nothing is said twice"
    return {(fault.code, fault.subject) for fault in faults}


def test_a_link_of_a_living_card_beside_a_lost_card(simulated: Simulated) -> None:
    simulated.fault("lose-card 1", "link-down 0 3")
    got, faults = simulated.report(require="full_mesh", min_links_per_pair=1)
    assert said(faults) == {LOST, NO_MATRIX, ("nvlink_inactive", "GPU0"), ("nvlink_inactive", "GPU2")}
    messages = {fault.subject: fault.message for fault in faults}
    assert messages["GPU0"] == "5 of 6 NVLinks are active; inactive: 3"
    assert messages[NO_MATRIX[1]].endswith("; the link states of GPU0, GPU2, GPU3 were read all the same")
    assert got.links is not None
    assert [(card["gpu"], card["active"]) for card in got.links] == [(0, 5), (2, 5), (3, 6)]
    # What only the matrix says stays unknown.
    assert (got.gpu_count, got.pairs, got.fully_connected, got.min_links) == (None, [], None, None)
    assert simulated.calls == ["topo -m", "nvlink -s", *EACH]


def test_a_healthy_machine_is_asked_twice(simulated: Simulated) -> None:
    got, faults = simulated.report(require="full_mesh")
    assert (faults, got.fully_connected) == ([], True)
    assert simulated.calls == ["topo -m", "nvlink -s"]


def test_cards_without_nvlink_are_not_asked_again(simulated: Simulated) -> None:
    simulated.control("install", "--profile", "v100x4-pcie", "--sysroot", str(simulated.root))
    assert simulated.report()[1] == []
    assert simulated.calls == ["topo -m", "nvlink -s"]


def test_two_lost_cards(simulated: Simulated) -> None:
    simulated.fault("lose-card 0", "lose-card 3", "link-down 1 0")
    got, faults = simulated.report()
    lost = {("gpu_lost", "0000:1a:00.0"), ("gpu_lost", "0000:1e:00.0")}
    assert lost <= said(faults)
    assert ("nvlink_inactive", "GPU1") in said(faults)
    assert got.links is not None
    assert [card["gpu"] for card in got.links] == [1, 2]


def test_only_the_living_cards_in_use_are_judged(simulated: Simulated) -> None:
    simulated.fault("lose-card 1", "link-down 0 3")
    for used, inactive in ((["1", "3"], set()), (["GPU-00000000-0000-4000-8000-000000000001", "1e:00.0"], {"GPU0"})):
        _, faults = simulated.report(gpus=used)
        assert said(faults) == {LOST, NO_MATRIX, *(("nvlink_inactive", gpu) for gpu in inactive)}
        (simulated.folder / "calls").unlink()


def test_without_the_bus_the_tool_and_the_request_name_the_cards(simulated: Simulated) -> None:
    """A container may hide /sys and /proc/driver: what is left are `-L`, which stops at the lost card, and `gpus`."""
    simulated.fault("lose-card 1", "link-down 0 3")
    shutil.rmtree(simulated.root / "sys", ignore_errors=True)
    shutil.rmtree(simulated.root / "proc", ignore_errors=True)
    _, faults = simulated.report(gpus=["0", "2", "3"])
    assert said(faults) == {LOST, NO_MATRIX, ("nvlink_inactive", "GPU0"), ("nvlink_inactive", "GPU2")}
    assert simulated.calls == ["topo -m", "nvlink -s", "-L", *(f"nvlink -s -i {gpu}" for gpu in (0, 2, 3))]


def test_links_that_nobody_asked_for_are_not_read(simulated: Simulated) -> None:
    simulated.fault("lose-card 1", "link-down 0 3")
    got, faults = simulated.report(require_active_links=False)
    assert said(faults) == {NO_MATRIX}
    assert (got.links, simulated.calls) == (None, ["topo -m"])


def test_a_card_that_the_answer_left_out_is_asked_by_its_index(simulated: Simulated) -> None:
    """The matrix is whole here; the card answers nothing by itself either, so its state stays unknown."""
    simulated.fault("lose-card 2 fields")
    _, faults = simulated.report()
    assert said(faults) == {("nvlink_status_truncated", "nvlink -s")}
    assert simulated.calls == ["topo -m", "nvlink -s", "nvlink -s -i 2"]
