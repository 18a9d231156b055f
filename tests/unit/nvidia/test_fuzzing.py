# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Real outputs, damaged in every way: no exception but our own, no invented GPU, no silent zero."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import (
    gpu_report,
    inventory,
    link_report,
    nvlink,
    topology,
)
from ansible_collections.volta.llm.plugins.module_utils.nvidia.gpu_faults import GPU
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi
from ansible_collections.volta.llm.plugins.module_utils.nvidia.values import bus_id, clean
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.nvidia.expectations import Recorded, load

EVERYTHING = load("topo", "p2p", "nvlink", "csv", "xml", "error", "refused")
MATRICES = [
    recorded
    for recorded in load("topo")
    if recorded.want["gpus"] not in {"null", "1"}
    and not recorded.faults()
    and len(topology.parse(recorded.output)) == 1
]
TABLES = [recorded for recorded in load("csv") if recorded.name.startswith(("csv-rtx3090x2", "73-", "csv-h100-595"))]
NOISE = [
    "",
    "0",
    "N/A",
    "[N/A]",
    "ERR!",
    "[Unknown Error]",
    "[GPU requires reset]",
    "NV2",
    "NV",
    "X",
    "OK",
    "GPU0",
    "GPU17",
    "\t",
    ",",
    ", ",
    "\x1b[4m",
    "\r",
    "\x00",
    "<inactive>",
    "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system to recover this GPU",
    "No devices were found",
    "\u2028",
    "99999999999999999999",
    "-1",
    "nan",
    "1e9",
    "²",
    '<gpu id="00000000:01:00.0">',
    "</gpu>",
]


HOW = ("cut", "drop line", "repeat line", "swap lines", "insert", "replace", "end", "join")


@st.composite
def damaged(draw: st.DrawFn, sources: list[Recorded] = EVERYTHING) -> str:
    """A real output after one to six cuts, swaps, repetitions and insertions."""
    text = draw(st.sampled_from(sources)).output
    for _ in range(draw(st.integers(1, 6))):
        how = draw(
            st.sampled_from(["cut", "drop line", "repeat line", "swap lines", "insert", "replace", "end", "join"])
        )
        lines = text.split("\n")
        line = draw(st.integers(0, len(lines) - 1))
        at = draw(st.integers(0, len(text)))
        if how == "cut":
            text = text[:at] + text[at + draw(st.integers(1, 40)) :]
        elif how == "drop line":
            text = "\n".join(lines[:line] + lines[line + 1 :])
        elif how == "repeat line":
            text = "\n".join(lines[: line + 1] + lines[line:])
        elif how == "swap lines":
            other = draw(st.integers(0, len(lines) - 1))
            lines[line], lines[other] = lines[other], lines[line]
            text = "\n".join(lines)
        elif how == "insert":
            text = text[:at] + draw(st.sampled_from(NOISE) | st.text(max_size=8)) + text[at:]
        elif how == "replace":
            words = list(re.finditer(r"[^\s,]+", text))
            if words:
                word = words[at % len(words)]
                text = text[: word.start()] + draw(st.sampled_from(NOISE)) + text[word.end() :]
        elif how == "end":
            text = text[:at]
        else:
            text += "\n" + draw(st.sampled_from(sources)).output
    return text


class Deaf(Machine):
    """A machine whose nvidia-smi answers one text to everything."""

    def __init__(self, text: str, rc: int) -> None:
        super().__init__("/nonexistent")
        self.text, self.rc = text, rc

    def run(self, argv: Any, timeout: Any = None, env: Any = None) -> Completed:
        self.processes += 1
        return Completed(tuple(argv), self.rc, self.text)


def check_faults(faults: list[Fault]) -> None:
    for fault in faults:
        assert fault.code in GPU.kinds
        assert fault.subject
        assert fault.message
        assert fault.remedy
        assert "\n" not in fault.message + fault.remedy + fault.subject


@settings(max_examples=120, deadline=None)
@given(damaged(), st.sampled_from([0, 1, 2, 6, 9, 15, 255]))
def test_any_answer_ends_in_a_report(text: str, rc: int) -> None:
    machine = Deaf(text, rc)
    smi = NvidiaSmi(machine)
    requirement = gpu_report.GpuRequest(
        expected_count=4,
        expected_product="V100-SXM2",
        min_memory_mib=32000,
        driver_branch="535",
        persistence=True,
        max_uncorrected_ecc=0,
        max_temperature=80,
    )
    got, faults = gpu_report.report(smi, requirement)
    check_faults(faults)
    assert got.state in inventory.STATES
    assert got.gpus or faults, "no GPU and no fault: silence"
    if got.state in {"timeout", "unparsable", "gpu_lost", "no_driver", "driver_mismatch"}:
        assert got.gpu_count is None
    machine.processes = 0
    for processes in (True, False):
        gpu_report.report(smi, gpu_report.GpuRequest(processes=processes, no_other_processes=processes))
    links, link_faults = link_report.report(
        smi, link_report.LinkRequest(require="full_mesh", min_links_per_pair=2, peer_access=True)
    )
    check_faults(link_faults)
    assert links.gpu_count is not None or link_faults, "no matrix and no fault: silence"


@settings(max_examples=120, deadline=None)
@given(damaged(MATRICES))
def test_a_damaged_matrix_is_complete_or_says_so(text: str) -> None:
    for matrix in topology.parse(text):
        plain = clean(text)
        assert all(f"GPU{gpu}" in plain for gpu in matrix.gpus), "invented GPU"
        assert len(matrix.pairs) == len(matrix.gpus) * (len(matrix.gpus) - 1) // 2
        unknown = [pair for pair in matrix.pairs if pair.link is None]
        if unknown:
            assert matrix.faults, "unknown pair without a fault"
            assert all(pair.nvlinks is None and pair.path == "unknown" for pair in unknown)
        for pair in matrix.pairs:
            if pair.nvlinks == 0:
                assert pair.link in {"PIX", "PXB", "PHB", "NODE", "SYS", "SOC"}, "silent zero"
            elif pair.nvlinks is not None:
                assert f"NV{pair.nvlinks}" in plain, "invented links"


def test_numbers_that_damage_has_made_are_none() -> None:
    """Of `GPU0 GPU1 ... GPU7` a lost piece leaves `GPU07`, and of `NV1 ... NV2` perhaps `NV02`."""
    lost_columns = "\tGPU07\tNIC0\tCPU Affinity\nGPU0\t X \tNODE\t0-19\nGPU1\tNV1\tNODE\t0-19\n"
    assert topology.parse(lost_columns) == []
    matrix = topology.parse("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV02\t0-19\nGPU1\tNV02\t X \t0-19\n")[0]
    assert [pair.nvlinks for pair in matrix.pairs] == [None]
    assert matrix.faults


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(MATRICES), st.data())
def test_one_changed_cell_is_never_believed(recorded: Recorded, data: st.DataObject) -> None:
    """Changing one of the two cells of a pair must be a contradiction, and the pair unknown."""
    matrix, _ = topology.link_matrix(recorded.output)
    assert matrix is not None
    pair = data.draw(st.sampled_from(matrix.pairs))
    other = data.draw(st.sampled_from(["SYS", "NV1", "NV2", "NV18", "PIX"]).filter(lambda cell: cell != pair.link))
    lines = clean(recorded.output).split("\n")
    row, column = data.draw(st.sampled_from([(pair.a, pair.b), (pair.b, pair.a)]))
    found = [
        index
        for index, line in enumerate(lines)
        if re.match(rf"[\s*|]*GPU{row}[\s|]+\S", line) and not re.match(rf"[\s*|]*GPU{row}[\s|]*GPU", line)
    ]
    line = lines[found[-1]]
    cells = list(re.finditer(r"(?<![\w-])(?:NV\d+|SYS|NODE|PHB|PXB|PIX|SOC|X)(?![\w-])", line))
    cell = cells[matrix.gpus.index(column)]
    lines[found[-1]] = line[: cell.start()] + other + line[cell.end() :]
    changed, faults = topology.link_matrix("\n".join(lines))
    assert changed is not None
    assert [fault.code for fault in faults] == ["topology_contradictory"]
    assert [p for p in changed.pairs if p.link is None] == [topology.Pair(pair.a, pair.b, None)]
    assert topology.fully_connected(changed.pairs) is not True


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(MATRICES), st.data())
def test_a_missing_row_is_never_overlooked(recorded: Recorded, data: st.DataObject) -> None:
    lines = clean(recorded.output).split("\n")
    row = re.compile(r"[\s*|]*GPU\d+[\s|]+(?:X|NV\d|SYS|P[IXH]|NODE|SOC)")
    rows = [index for index, line in enumerate(lines) if row.match(line)]
    del lines[data.draw(st.sampled_from(rows))]
    _, faults = topology.link_matrix("\n".join(lines))
    assert "topology_truncated" in {fault.code for fault in faults}


WORDS_WITHOUT_A_VALUE = [
    "N/A",
    "[N/A]",
    "[Not Supported]",
    "[Unknown Error]",
    "[GPU requires reset]",
    "[Insufficient Permissions]",
    "[Requested functionality has been deprecated]",
    "ERR!",
    "",
    "[something new in 2031]",
    "banana",
    "12 bananas extra",
]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(TABLES), st.sampled_from(WORDS_WITHOUT_A_VALUE), st.data())
def test_a_cell_without_a_value_is_null_with_a_reason_and_moves_nothing(
    recorded: Recorded, word: str, data: st.DataObject
) -> None:
    lines = recorded.output.rstrip("\n").split("\n")
    header = next(index for index, line in enumerate(lines) if line.startswith("index"))
    names = [re.sub(r" \[.*", "", name).strip() for name in lines[header].split(",")]
    numeric = [name for name in names if re.match(r"memory|temperature|power|utilization\.gpu|ecc|pcie", name)]
    name = data.draw(st.sampled_from(numeric))
    row = header + 1
    cells = lines[row].split(", ")
    cells[names.index(name)] = word
    before = inventory.parse_csv("\n".join(lines)).gpus[0]
    lines[row] = ", ".join(cells)
    after = inventory.parse_csv("\n".join(lines)).gpus[0]
    field = next((item for item in inventory.FIELDS if name in (item.query, *item.header)), None)
    if field is None:
        assert after == before
        return
    assert after.values[field.name] is None
    assert after.unknown[field.name]
    others = {key: value for key, value in before.values.items() if key != field.name}
    assert {key: value for key, value in after.values.items() if key != field.name} == others


@settings(max_examples=120, deadline=None)
@given(damaged(load("csv")))
def test_no_gpu_is_invented_in_a_table(text: str) -> None:
    plain = clean(text)
    for gpu in inventory.parse_csv(text, ["index", "name", "uuid", "pci.bus_id", "memory.total"]).gpus:
        for name in ("uuid", "product"):
            value = gpu.values.get(name)
            assert value is None or value in " ".join(plain.split())
        if gpu.values.get("bus_id"):
            assert any(bus_id(cell) == gpu.values["bus_id"] for cell in re.split(r"[,\n]", plain))


@settings(max_examples=80, deadline=None)
@given(damaged(load("nvlink")))
def test_damaged_link_states_never_become_active_links(text: str) -> None:
    status = nvlink.parse(text)
    plain = clean(text)
    rates = len(re.findall(r"GB/s", plain, re.IGNORECASE)) + len(
        re.findall(r"\bactive\b|\benabled\b", plain, re.IGNORECASE)
    )
    assert sum(link.active is True for gpu in status.gpus for link in gpu.links or []) <= rates
    for gpu in status.gpus:
        assert re.search(rf"GPU\s+0*{gpu.gpu}:", plain), "invented GPU"
        for link in gpu.links or []:
            assert link.rate_gb_s is None or link.active


@pytest.mark.parametrize("text", ["", "\n", "\x00", "GPU0", "\tGPU0\n", "GPU0\nGPU0", '<gpu id="">', "index\n"])
def test_nearly_nothing_is_a_fault(text: str) -> None:
    smi = NvidiaSmi(Deaf(text, 0))
    got, faults = gpu_report.report(smi, gpu_report.GpuRequest())
    assert (got.state, [fault.code for fault in faults]) == ("unparsable", ["nvidia_smi_unparsable"])
    links, link_faults = link_report.report(smi, link_report.LinkRequest())
    assert links.gpu_count is None
    assert [fault.code for fault in link_faults] == ["topology_unavailable"]
