# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Every recorded output is read as its second line says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import by_severity
from ansible_collections.volta.llm.plugins.module_utils.nvidia import (
    gpu_report,
    inventory,
    link_report,
    nvlink,
    topology,
)
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi

from tests.unit.nvidia.expectations import Recorded, connected, expand_pairs, items, load

Captured = Callable[..., NvidiaSmi]
TOPOLOGY_ONLY = link_report.LinkRequest(require_active_links=False)


def by_name(recorded: Recorded) -> str:
    return recorded.name


def codes(faults: Any) -> list[str]:
    return [fault.code for fault in by_severity(faults)]


def test_there_are_enough_outputs_of_each_kind() -> None:
    everything = load("topo", "p2p", "nvlink", "csv", "xml", "error", "refused")
    assert len([recorded for recorded in everything if not recorded.name[0].isdigit()]) >= 40
    assert all(len(recorded.source) > 10 for recorded in everything)


@pytest.mark.parametrize("recorded", load("topo"), ids=by_name)
def test_topology(recorded: Recorded, captured: Captured) -> None:
    smi = captured({"topo -m": recorded.output})
    got, faults = link_report.report(smi, TOPOLOGY_ONLY)
    assert codes(faults) == recorded.faults()
    for key, value in recorded.want.items():
        check_topology(key, value, got, smi)


def check_topology(key: str, value: str, got: link_report.LinkReport, smi: NvidiaSmi) -> None:
    if key == "gpus":
        assert got.gpu_count == (None if value == "null" else int(value))
    elif key == "pairs":
        cells = {(pair["a"], pair["b"]): pair["link"] for pair in got.pairs}
        assert cells == expand_pairs(value, got.gpu_count or 0)
        for pair in got.pairs:
            is_nvlink = pair["link"].startswith("NV")
            assert pair["nvlinks"] == (int(pair["link"][2:]) if is_nvlink else 0)
            assert pair["path"] == ("nvlink" if is_nvlink else pair["link"].lower())
    elif key.startswith("pair "):
        a, b = map(int, key.removeprefix("pair ").split("-"))
        link = next(pair["link"] for pair in got.pairs if (pair["a"], pair["b"]) == (a, b))
        assert link == (None if value == "null" else value)
    elif key == "full":
        assert connected(got.fully_connected, got.gpu_count or 0) == value
    elif key == "min":
        assert got.min_links == (None if value == "null" else int(value))
    elif key == "islands":
        assert got.islands == [list(map(int, group.split(","))) for group in value.split(" ")]
    elif key == "nics":
        assert got.nics == items(value)
    elif key == "cpu":
        assert got.cpu_affinity == [None if cell == "-" else cell for cell in value.split("|")]
    elif key == "numa":
        assert ["-" if cell is None else str(cell) for cell in got.numa_affinity] == value.split(",")
    elif key == "gpu_numa":
        assert ["-" if cell is None else str(cell) for cell in got.gpu_numa_id] == value.split(",")
    elif key.startswith("subset "):
        chosen = key.removeprefix("subset ").split(",")
        part, faults = link_report.report(smi, link_report.LinkRequest(gpus=chosen, require_active_links=False))
        assert faults == []
        assert connected(part.fully_connected, len(chosen)) == value
    else:
        assert key == "faults", key


@pytest.mark.parametrize("recorded", load("p2p"), ids=by_name)
def test_peer_matrix_is_read_and_never_taken_for_links(recorded: Recorded, captured: Captured) -> None:
    matrix = topology.peer_matrix(recorded.output)
    assert matrix is not None
    assert len(matrix.gpus) == int(recorded.want["gpus"])
    assert codes(matrix.faults) == recorded.faults()
    cells = {(pair.a, pair.b): pair.link for pair in matrix.pairs}
    assert cells == expand_pairs(recorded.want["pairs"], len(matrix.gpus))
    assert {topology.path_of(cell) for cell in cells.values()} == {"unknown"}
    links = "\n".join(f"GPU{a}\t" + "\t".join(" X " if a == b else "NV2" for b in matrix.gpus) for a in matrix.gpus)
    header = "\t" + "\t".join(f"GPU{gpu}" for gpu in matrix.gpus) + "\n"
    smi = captured({"topo -m": header + links, "topo -p2p n": recorded.output})
    got, faults = link_report.report(smi, link_report.LinkRequest(require_active_links=False, peer_access=True))
    assert got.peer_access is not None
    denied = [f"{pair['a']}-{pair['b']}" for pair in got.peer_access if not pair["ok"]]
    assert denied == items(recorded.want.get("denied", "none"))
    assert codes(faults) == (["peer_access_missing"] if denied else [])


@pytest.mark.parametrize("recorded", [item for item in load("p2p") if "NV" not in item.output], ids=by_name)
def test_peer_matrix_in_place_of_links_is_a_fault(recorded: Recorded, captured: Captured) -> None:
    got, faults = link_report.report(captured({"topo -m": recorded.output}), TOPOLOGY_ONLY)
    assert codes(faults) == ["topology_not_links"]
    assert (got.gpu_count, got.pairs, got.fully_connected) == (None, [], None)


@pytest.mark.parametrize("recorded", load("nvlink"), ids=by_name)
def test_link_states(recorded: Recorded) -> None:
    status = nvlink.parse(recorded.output)
    want = recorded.want
    assert [str(gpu.gpu) for gpu in status.gpus] == items(want["gpus"])
    faults = nvlink.judge(status, [gpu.gpu for gpu in status.gpus], (), require_active=True)
    assert codes(faults) == recorded.faults()
    for name in ("active", "expected"):
        if name in want:
            assert ["null" if getattr(gpu, name) is None else str(getattr(gpu, name)) for gpu in status.gpus] == items(
                want[name]
            )
    rates = {link.rate_gb_s for gpu in status.gpus for link in gpu.links or [] if link.active}
    assert rates == ({float(want["rate"])} if "rate" in want else set())
    if "inactive" in want:
        gpu, _, numbers = want["inactive"].partition(":")
        item = status.of(int(gpu))
        assert item is not None
        assert [str(link.link) for link in item.links or [] if link.active is False] == numbers.split(",")
        assert any(
            fault.subject == f"GPU{gpu}" and fault.message.endswith(f"inactive: {numbers.replace(',', ', ')}")
            for fault in faults
        )


@pytest.mark.parametrize("recorded", load("csv", "xml"), ids=by_name)
def test_inventory(recorded: Recorded, captured: Captured) -> None:
    fields = recorded.want.get("fields")
    if recorded.kind == "xml":
        answers = {"-q -x": recorded.output}
    else:
        answers = {f"--query-gpu={fields or 'index'} --format=csv": recorded.output}
    got, faults = gpu_report.report(captured(answers), gpu_report.GpuRequest(processes=recorded.kind == "xml"))
    assert codes(faults) == recorded.faults()
    for key, value in recorded.want.items():
        check_inventory(key, value, got)


def check_inventory(key: str, value: str, got: gpu_report.GpuReport) -> None:
    cards = {place if gpu["index"] is None else gpu["index"]: gpu for place, gpu in enumerate(got.gpus)}
    if key == "gpus":
        assert ["null" if gpu["index"] is None else str(gpu["index"]) for gpu in got.gpus] == items(value)
    elif key == "usable":
        assert got.gpu_count == len(items(value))
    elif key == "driver":
        assert got.driver["smi_version"] == value
    elif key.startswith("gpu"):
        number, _, name = key.removeprefix("gpu").partition(".")
        have = cards[int(number)]
        for step in name.split("."):
            have = have[step]
        assert shown(have) == value, key
        if value == "null":
            assert cards[int(number)]["unknown"][name]
    else:
        assert key in {"fields", "faults"}, key


def shown(value: Any) -> str:
    """A value in the words of the grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if value == int(value) else str(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ",".join(f"{item['pid']}:{item['type']}:{item['memory_mib']}" for item in value)
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value)


@pytest.mark.parametrize("recorded", load("error"), ids=by_name)
@pytest.mark.parametrize("rc", [0, 1, 9], ids="rc{}".format)
def test_error_text_is_its_own_fault_whatever_the_exit_status(recorded: Recorded, rc: int, captured: Captured) -> None:
    answer = (rc, recorded.output)
    smi = captured({"--query-gpu=index --format=csv": answer, "topo -m": answer, "nvlink -s": answer})
    got, faults = gpu_report.report(smi, gpu_report.GpuRequest(expected_count=4))
    assert got.state == recorded.want["state"]
    assert codes(faults) == recorded.faults()
    assert got.gpus == []
    assert got.gpu_count == (0 if got.state == "no_devices" else None)
    if "subject" in recorded.want:
        assert by_severity(faults)[0].subject == recorded.want["subject"]
    links, link_faults = link_report.report(smi, link_report.LinkRequest())
    assert (links.gpu_count, links.pairs, links.fully_connected, links.min_links) == (None, [], None, None)
    assert codes(link_faults)[0] == (recorded.faults()[0] if got.state != "unparsable" else "topology_unavailable")


@pytest.mark.parametrize("recorded", load("help"), ids=by_name)
def test_a_current_driver_knows_every_field_that_is_asked_for(recorded: Recorded) -> None:
    """So that one process is enough: branches 535 to 610 take the first form of the query."""
    known = set(re.findall(r'"([\w.]+)"', recorded.output))
    assert [item.query for item in inventory.FIELDS if item.query not in known] == []


@pytest.mark.parametrize("recorded", load("refused"), ids=by_name)
def test_refused_field_is_recognised(recorded: Recorded) -> None:
    listing = inventory.parse_csv(recorded.output, ["index", *items(recorded.want["fields"])])
    assert list(listing.refused) == items(recorded.want["fields"])
    assert listing.gpus == []
