# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""nvlink_topology: the graph, what is required of it, and when a link counts as missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault, by_severity
from ansible_collections.volta.llm.plugins.module_utils.nvidia import link_report, topology
from ansible_collections.volta.llm.plugins.module_utils.nvidia.link_report import LinkRequest
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi

from tests.unit.nvidia.expectations import FIXTURES, read

Captured = Callable[..., NvidiaSmi]


def recorded(name: str) -> str:
    return read(FIXTURES / f"{name}.txt").output


HYBRID = recorded("03-v100x8-32gb-hybrid-mesh-gpunumaid")
FOUR = recorded("01-v100x4-sxm2-32gb-all-nv2")


def matrix(count: int, links: dict[tuple[int, int], str], rest: str = "SYS") -> str:
    """A matrix as the driver prints it."""
    lines = ["\t" + "".join(f"GPU{gpu}\t" for gpu in range(count)) + "CPU Affinity"]
    for a in range(count):
        cells = [" X " if a == b else links.get((min(a, b), max(a, b)), rest) for b in range(count)]
        lines.append("\t".join([f"GPU{a}", *cells, "0-7"]))
    return "\n".join(lines) + "\n"


def states(*cards: Sequence[float | None], product: str = "Tesla V100-SXM2-32GB") -> str:
    """``nvlink -s`` of some cards; null is an inactive link."""
    lines = []
    for gpu, links in enumerate(cards):
        lines.append(f"GPU {gpu}: {product} (UUID: GPU-00000000-0000-0000-0000-0000000000{gpu:02d})")
        lines += [
            f"\t Link {number}: {'<inactive>' if rate is None else f'{rate} GB/s'}" for number, rate in enumerate(links)
        ]
    return "\n".join(lines) + "\n"


UP = 25.781
SIX = [UP] * 6


def codes(faults: Sequence[Fault]) -> list[str]:
    return [fault.code for fault in by_severity(faults)]


def report(
    captured: Captured, topo: str, status: str | None = None, **asked: object
) -> tuple[link_report.LinkReport, list[Fault]]:
    answers = {"topo -m": topo} | ({"nvlink -s": status} if status is not None else {})
    return link_report.report(captured(answers), LinkRequest(**asked))  # type: ignore[arg-type]


# --- what is required of the graph ------------------------------------------------------------------------------------


def test_the_reference_machine_meets_everything(captured: Captured) -> None:
    got, faults = report(captured, FOUR, states(SIX, SIX, SIX, SIX), require="full_mesh", min_links_per_pair=2)
    assert faults == []
    assert (got.gpu_count, got.fully_connected, got.min_links, got.islands) == (4, True, 2, [[0, 1, 2, 3]])
    assert got.links is not None
    assert [card["active"] for card in got.links] == [6, 6, 6, 6]
    assert got.recommended_split_mode == "layer"


@pytest.mark.parametrize(("gpus", "connected"), [("0,1,2,3", True), ("4,5,6,7", True), ("0,1,4,5", False), ("3", None)])
def test_the_subset_in_use_is_judged(gpus: str, connected: bool | None, captured: Captured) -> None:
    status = states(*[SIX] * 8)
    got, faults = report(captured, HYBRID, status, gpus=gpus.split(","), require="full_mesh")
    assert got.fully_connected is connected
    assert codes(faults) == (["nvlink_not_full_mesh"] if connected is False else [])
    assert (got.gpu_count, len(got.pairs)) == (8, 28), "the whole machine is still described"
    assert got.recommended_split_mode == ("none" if connected is None else "layer")
    if connected is False:
        assert "0-5 (SYS), 1-4 (SYS)" in faults[0].message
        assert "0,1,2,3; 4,5,6,7" in faults[0].remedy


def test_islands(captured: Captured) -> None:
    status = states(*[SIX] * 8)
    assert report(captured, HYBRID, status, require="islands", island_size=4)[1] == []
    _, faults = report(captured, HYBRID, status, require="islands", island_size=8)
    assert codes(faults) == ["nvlink_islands_too_small"]
    _, faults = report(captured, matrix(3, {(0, 1): "NV2"}), require="islands", require_active_links=False)
    assert codes(faults) == ["nvlink_islands_too_small"]
    assert "0,1 and 2" in faults[0].message


def test_fewest_links_of_a_pair(captured: Captured) -> None:
    mixed = recorded("topo-v100x4-p3.8xlarge-mixed-nv1-nv2")
    _, faults = report(captured, mixed, require="full_mesh", min_links_per_pair=2, require_active_links=False)
    assert [fault.subject for fault in faults] == ["GPU0-GPU1, GPU0-GPU2, GPU1-GPU3"]
    assert set(codes(faults)) == {"nvlink_too_few_links"}
    assert report(captured, mixed, require="full_mesh", min_links_per_pair=1, require_active_links=False)[1] == []


def test_links_between_islands_are_not_asked_of_islands(captured: Captured) -> None:
    power9 = recorded("07-v100x4-power9-nv3-pairs")
    wanted = {"require": "islands", "island_size": 2, "min_links_per_pair": 3, "require_active_links": False}
    assert report(captured, power9, **wanted)[1] == []
    _, faults = report(captured, power9, require="any", min_links_per_pair=3, require_active_links=False)
    assert [fault.subject for fault in faults] == ["GPU0-GPU2, GPU0-GPU3, GPU1-GPU2, GPU1-GPU3"]


def test_ids_of_a_subset(captured: Captured) -> None:
    status = states(SIX, SIX, SIX, SIX)
    ends = zip(range(4), "ACDE", "abcd", strict=True)
    ids = "".join(f"{gpu}, 00000000:1{end}:00.0, GPU-{name}\n" for gpu, end, name in ends)
    smi = captured(
        {"topo -m": FOUR, "nvlink -s": status, "--query-gpu=index,pci.bus_id,uuid --format=csv,noheader": ids}
    )
    for chosen in (["1", "3"], ["0000:1c:00.0", "1e:00.0"], ["GPU-00000000-0000-0000-0000-000000000001", "GPU-d"]):
        got, faults = link_report.report(smi, LinkRequest(gpus=chosen))
        assert (got.gpus, faults) == ([1, 3], [])
    for unknown in ("7", "0000:ff:00.0", "GPU-nobody"):
        got, faults = link_report.report(smi, LinkRequest(gpus=["0", unknown]))
        assert [(fault.code, fault.subject) for fault in faults] == [("gpu_not_found", unknown)]
        assert got.fully_connected is None


def test_an_id_that_two_cards_share_is_not_taken_for_either(captured: Captured) -> None:
    """The live capture with two H200 has its UUIDs replaced by the same text."""
    smi = captured({"topo -m": recorded("70-h200x2-live-topo"), "nvlink -s": recorded("71-h200x2-live-nvlink")})
    _, faults = link_report.report(smi, LinkRequest(gpus=["GPU-00000000-0000-0000-0000-000000000001"]))
    assert codes(faults) == ["gpu_not_found"]
    assert "several GPUs" in faults[0].message


def test_numbers_that_cannot_be_meant_are_refused() -> None:
    for size in (-3, 0, 1):
        assert f"island_size is {size}: write" in (LinkRequest(island_size=size).refused or "")
    assert "min_links_per_pair is -1: write" in (LinkRequest(min_links_per_pair=-1).refused or "")
    assert LinkRequest(island_size=2, min_links_per_pair=0).refused is None


# --- link states ------------------------------------------------------------------------------------------------------


def test_a_link_down_at_both_ends_names_both_cards(captured: Captured) -> None:
    five = [UP, None, UP, UP, UP, UP]
    topo = matrix(4, {pair: "NV2" for pair in combinations(range(4), 2)} | {(0, 1): "NV1"})
    _, faults = report(captured, topo, states(five, five, SIX, SIX), require="full_mesh")
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU0, GPU1")]
    assert faults[0].message == "5 of 6 NVLinks are active; inactive: 1"


def test_half_of_a_mesh_uses_fewer_links_and_that_is_no_fault(captured: Captured) -> None:
    """A p3.8xlarge is half a hybrid mesh: one or two of six links of every card lead to cards that are not there."""
    four, five = [UP, UP, UP, UP, None, None], [UP, UP, UP, UP, UP, None]
    topo = recorded("topo-v100x4-p3.8xlarge-mixed-nv1-nv2")
    _, faults = report(captured, topo, states(four, four, five, five), require="full_mesh")
    assert codes(faults) == ["nvlink_fewer_than_product"]
    assert faults[0].message.startswith("4 or 5 of 6 NVLinks are active")
    _, faults = report(captured, topo, states(four, four, five, four), require="full_mesh")
    assert next((fault.code, fault.subject) for fault in by_severity(faults)) == ("nvlink_inactive", "GPU3")


def test_power9_cards_have_all_links_up_and_yet_no_mesh(captured: Captured) -> None:
    got, faults = report(
        captured,
        recorded("07-v100x4-power9-nv3-pairs"),
        recorded("50-nvlink-status-v100x4-ac922"),
        require="full_mesh",
    )
    assert codes(faults) == ["nvlink_not_full_mesh"]
    assert got.islands == [[0, 1], [2, 3]]


def test_no_link_up_anywhere_on_boards_that_have_them(captured: Captured) -> None:
    none = [None] * 6
    _, faults = report(captured, matrix(4, {}), states(none, none, none, none))
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU0, GPU1, GPU2, GPU3")]
    assert report(captured, matrix(4, {}), states(none, none, none, none), require_active_links=False)[1] == []


def test_cards_without_nvlink_give_nothing(captured: Captured) -> None:
    listed = "GPU 0: Tesla V100-PCIE-32GB (UUID: GPU-0)\nGPU 1: Tesla V100-PCIE-32GB (UUID: GPU-1)\n"
    got, faults = report(captured, matrix(2, {}), listed)
    assert faults == []
    assert got.links is not None
    assert [card["links"] for card in got.links] == [None, None]
    assert report(captured, matrix(2, {}), "")[1] == []


def test_a_bridge_with_a_dead_link(captured: Captured) -> None:
    status = states([UP, UP], [UP, None], product="Quadro RTX 8000")
    _, faults = report(captured, matrix(2, {(0, 1): "NV1"}), status)
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU1")]


def test_a_sibling_that_is_not_in_use_is_a_witness_all_the_same(captured: Captured) -> None:
    status = states([UP, UP], [UP, None], product="Quadro RTX 8000")
    _, faults = report(captured, matrix(2, {(0, 1): "NV1"}), status, gpus=["1"])
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU1")]
    assert report(captured, matrix(2, {(0, 1): "NV1"}), status, gpus=["0"])[1] == []


@pytest.mark.parametrize(
    ("product", "cards", "links"),
    [
        ("Tesla V100-SXM3-32GB", 16, 6),
        ("NVIDIA A100-SXM4-40GB", 8, 12),
        ("NVIDIA A800-SXM4-80GB", 8, 8),
        ("NVIDIA H800", 8, 8),
        ("NVIDIA H20", 8, 18),
        ("NVIDIA H100 80GB HBM3", 8, 18),
        ("NVIDIA H100 80GB HBM3", 4, 18),
        ("NVIDIA B200", 8, 18),
        ("Graphics Device", 8, 10),
        ("Graphics Device", 3, 4),
    ],
)
def test_cards_behind_a_switch_share_their_links(product: str, cards: int, links: int, captured: Captured) -> None:
    """All pairs of such a machine use the same links, so its matrix must not be added up."""
    topo = matrix(cards, {}, f"NV{links}")
    healthy = [[UP] * links for _ in range(cards)]
    for gpus in ([], ["0"], ["0", "1"], ["0", "1", "2"]):
        got, faults = report(captured, topo, states(*healthy, product=product), gpus=gpus, require="full_mesh")
        assert (faults, got.fully_connected) == ([], None if gpus == ["0"] else True)
    one_down = [[None, *[UP] * (links - 1)], *healthy[1:]]
    _, faults = report(captured, topo, states(*one_down, product=product))
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU0")]
    assert faults[0].message == f"{links - 1} of {links} NVLinks are active; inactive: 0"


def test_links_down_on_all_cards_of_a_switch_that_the_matrix_shows(captured: Captured) -> None:
    down = [[*[UP] * 16, None, None]] * 4
    status = states(*down, product="NVIDIA H100 80GB HBM3")
    _, faults = report(captured, matrix(4, {}, "NV18"), status)
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU0, GPU1, GPU2, GPU3")]
    _, faults = report(captured, matrix(4, {}, "NV16"), status)
    assert codes(faults) == ["nvlink_fewer_than_product"]


@pytest.mark.parametrize("active", [4, 5])
def test_all_cards_with_fewer_links_up_than_the_matrix_shows(active: int, captured: Captured) -> None:
    links = [UP] * active + [None] * (6 - active)
    _, faults = report(captured, FOUR, states(links, links, links, links))
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU0, GPU1, GPU2, GPU3")]
    assert faults[0].message.startswith(f"{active} of 6 NVLinks are active")


def test_a_card_without_the_bridge_that_its_siblings_have(captured: Captured) -> None:
    four, none = [14.062] * 4, [None] * 4
    status = states(four, four, none, product="NVIDIA RTX A6000")
    assert report(captured, matrix(3, {(0, 1): "NV4"}, "NODE"), status)[1] == []
    assert report(captured, "", status, require_active_links=True)[1][0].code == "topology_unavailable"
    assert "nvlink_inactive" not in codes(report(captured, "", status)[1])
    one_down = states(four, [14.062, 14.062, 14.062, None], none, product="NVIDIA RTX A6000")
    _, faults = report(captured, matrix(3, {(0, 1): "NV3"}, "NODE"), one_down)
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU1")]


def test_pairs_of_bridge_cards_can_have_different_numbers_of_bridges(captured: Captured) -> None:
    status = states([UP] * 12, [UP] * 12, [UP] * 4 + [None] * 8, [UP] * 4 + [None] * 8, product="NVIDIA A100 80GB PCIe")
    assert report(captured, matrix(4, {(0, 1): "NV12", (2, 3): "NV4"}), status)[1] == []


def test_a_slow_link(captured: Captured) -> None:
    status = states([UP] * 5 + [12.891], SIX, SIX, SIX)
    _, faults = report(captured, FOUR, status)
    assert codes(faults) == ["nvlink_slow"]
    assert "link 5 runs at 12.891 GB/s, the others at 25.781 GB/s" in faults[0].message


@pytest.mark.parametrize("down", ["0 GB/s", "0.000 GB/s", "<not active>", "off", "<disabled>"])
def test_a_link_without_a_rate_or_with_a_word_for_it_is_down(down: str, captured: Captured) -> None:
    status = states(SIX, SIX, SIX, [UP, UP, UP, None, UP, UP]).replace("<inactive>", down)
    got, faults = report(captured, FOUR, status)
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU3")]
    assert faults[0].message == "5 of 6 NVLinks are active; inactive: 3"
    assert got.links is not None
    assert got.links[3]["links"][3] == {"link": 3, "active": False, "rate_gb_s": None}


def test_all_links_at_rate_zero(captured: Captured) -> None:
    zero = states(*[[0.0] * 6] * 4)
    _, faults = report(captured, FOUR, zero)
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU0, GPU1, GPU2, GPU3")]


@pytest.mark.parametrize("text", ["25.781 GBps", "25781 MB/s", "25,781 GB/s", "25.781 GB/s (degraded)", "25.7"])
def test_a_link_that_cannot_be_read_is_neither_up_nor_down(text: str, captured: Captured) -> None:
    status = states(SIX, SIX, SIX, [UP, UP, None, None, UP, UP]).replace("<inactive>", text)
    got, faults = report(captured, FOUR, status)
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_status_truncated", "GPU3")]
    assert f"Link 2: {text}" in faults[0].message
    assert "(and 1 more)" in faults[0].message
    assert got.links is not None
    assert got.links[3]["active"] is None
    assert got.links[3]["links"][3] == {"link": 3, "active": None, "rate_gb_s": None}


def test_sleeping_links_are_not_judged(captured: Captured) -> None:
    status = states(*[[None] * 6] * 4).replace("inactive", "sleep")
    got, faults = report(captured, FOUR, status)
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_status_unknown", "GPU0, GPU1, GPU2, GPU3")]
    assert got.links is not None
    assert [card["active"] for card in got.links] == [None] * 4


@pytest.mark.parametrize(
    "tail",
    [
        " NVML: Unable to retrieve NvLink information as all links are inActive",
        ": all links are inActive",
        " inActive",
        " <inactive>",
    ],
)
def test_no_link_up_said_on_the_line_of_the_card(tail: str, captured: Captured) -> None:
    lines = [f"GPU {gpu}: Tesla V100-SXM2-32GB (UUID: GPU-{gpu}){tail}" for gpu in range(2)]
    got, faults = report(captured, matrix(2, {}), "\n".join(lines) + "\n")
    assert got.links is not None
    assert [(card["active"], card["product"], card["uuid"]) for card in got.links] == [
        (0, "Tesla V100-SXM2-32GB", f"GPU-{gpu}") for gpu in range(2)
    ]
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU0, GPU1")]


def test_a_name_that_only_looks_like_an_index_is_not_found(captured: Captured) -> None:
    _, faults = report(captured, FOUR, states(SIX, SIX, SIX, SIX), gpus=["\u00b2"])
    assert [(fault.code, fault.subject) for fault in faults] == [("gpu_not_found", "\u00b2")]
    assert "topology_unavailable" in codes(report(captured, "", states(SIX, SIX), gpus=["\u00b2"])[1])


@pytest.mark.parametrize("status", ["", "Usage: nvidia-smi nvlink\n", FOUR])
def test_a_driver_that_does_not_report_states_leaves_them_unknown(status: str, captured: Captured) -> None:
    got, faults = report(captured, FOUR, status, require="full_mesh")
    assert codes(faults) == ["nvlink_status_unknown"]
    assert got.links is None
    assert got.fully_connected is True


def test_states_that_stop_before_the_last_card(captured: Captured) -> None:
    _, faults = report(captured, FOUR, states(SIX, SIX))
    assert codes(faults) == ["nvlink_status_truncated"]
    assert "GPU2, GPU3" in faults[0].message
    _, faults = report(captured, FOUR, states(SIX, SIX, SIX, [UP, UP]))
    assert codes(faults) == ["nvlink_inactive"], "four lines fewer than the siblings have"


def test_a_time_out_of_the_second_call(captured: Captured) -> None:
    smi = captured({"topo -m": FOUR, "nvlink -s": None})
    _, faults = link_report.report(smi, LinkRequest())
    assert codes(faults) == ["nvidia_smi_timeout", "nvlink_status_unknown"]


def test_a_single_card_with_a_dead_link(captured: Captured) -> None:
    topo = recorded("29-single-gpu-wsl-blank-affinity")
    got, faults = report(captured, topo, states([UP, UP, UP, None, UP, UP]))
    assert codes(faults) == ["nvlink_inactive"]
    assert (got.fully_connected, got.min_links, got.recommended_split_mode) == (None, None, "none")


def test_an_answer_that_breaks_off_is_completed_card_by_card(captured: Captured) -> None:
    """The section before the error is cut off, one card hangs: what the single answers say counts."""
    lost = "Unable to determine the device handle for GPU0000:1D:00.0: GPU is lost.  Reboot the system to recover it\n"
    cards = states(SIX, SIX, SIX, [UP, None, UP, UP, UP, UP]).split("GPU ")[1:]
    alone = {f"nvlink -s -i 0000:{bus}:00.0": f"GPU {cards[gpu]}" for gpu, bus in ((0, "1a"), (3, "1e"))}
    smi = captured(
        {"topo -m": (255, "Failed to run topology matrix\n"), "nvlink -s": (15, states(SIX[:4]) + lost)}
        | alone
        | {"nvlink -s -i 0000:1c:00.0": None},
        pci={f"0000:{bus}:00.0": "10de:1db5" for bus in ("1a", "1c", "1d", "1e")},
    )
    got, faults = link_report.report(smi, LinkRequest())
    assert [(fault.code, fault.subject) for fault in by_severity(faults)] == [
        ("topology_unavailable", "nvidia-smi topo -m"),
        ("gpu_lost", "0000:1d:00.0"),
        ("nvidia_smi_timeout", "nvidia-smi nvlink -s -i 0000:1c:00.0"),
        ("nvlink_inactive", "GPU3"),
    ]
    assert got.links is not None
    assert [(card["gpu"], card["active"]) for card in got.links] == [(0, 6), (3, 5)]


def test_a_card_left_out_that_answers_alone_is_judged_with_the_matrix(captured: Captured) -> None:
    third = "GPU 2: " + states([], [], [UP, None, UP, UP, UP, UP]).split("GPU 2: ")[1]
    without = states(SIX, SIX, [], SIX).replace("GPU 2: Tesla V100-SXM2-32GB", "Unable to read")
    smi = captured({"topo -m": FOUR, "nvlink -s": (255, without), "nvlink -s -i 2": third})
    _, faults = link_report.report(smi, LinkRequest())
    assert [(fault.code, fault.subject) for fault in faults] == [("nvlink_inactive", "GPU2")]


# --- damaged matrices -------------------------------------------------------------------------------------------------


def test_a_contradiction_leaves_the_pair_unknown(captured: Captured) -> None:
    lines = FOUR.split("\n")
    lines[2] = lines[2].replace("NV2", "SYS", 1)
    got, faults = report(captured, "\n".join(lines), states(SIX, SIX, SIX, SIX), require="full_mesh")
    assert codes(faults) == ["topology_contradictory"]
    assert faults[0].message == "GPU0 says NV2 of GPU1, GPU1 says SYS of GPU0"
    assert got.pairs[0] == {"a": 0, "b": 1, "link": None, "nvlinks": None, "path": "unknown"}
    assert (got.fully_connected, got.min_links) == (None, None)


def test_missing_rows(captured: Captured) -> None:
    got, faults = report(captured, "\n".join(FOUR.split("\n")[:3]), states(SIX, SIX, SIX, SIX))
    assert codes(faults) == ["topology_truncated"]
    assert "GPU2, GPU3" in faults[0].message
    assert (got.gpu_count, got.fully_connected) == (4, None)


def test_a_row_cut_off_within_the_cells(captured: Captured) -> None:
    lines = FOUR.split("\n")
    lines[4] = "GPU3    NV2     NV2"
    _, faults = report(captured, "\n".join(lines[:5]), states(SIX, SIX, SIX, SIX))
    assert set(codes(faults)) == {"topology_truncated"}


def test_a_blank_cell_is_taken_from_the_other_half(captured: Captured) -> None:
    topo = matrix(3, {}, "NV2").replace("GPU1\tNV2\t X \tNV2", "GPU1\tNV2\t X \t")
    got, faults = report(captured, topo, require_active_links=False)
    assert faults == []
    assert got.fully_connected is True
    both = topo.replace("GPU2\tNV2\tNV2\t X ", "GPU2\tNV2\t\t X ")
    got, faults = report(captured, both, require_active_links=False)
    assert codes(faults) == ["topology_truncated"]
    assert got.fully_connected is None


def test_an_unknown_word_in_a_cell(captured: Captured) -> None:
    _, faults = report(captured, matrix(2, {(0, 1): "QPI"}), require_active_links=False)
    assert codes(faults) == ["topology_cell_unknown"]


def test_shifted_cells_are_seen(captured: Captured) -> None:
    topo = matrix(3, {}, "NV2").replace("GPU1\tNV2\t X \tNV2", "GPU1\tNV2\tNV2\t X ")
    _, faults = report(captured, topo, require_active_links=False)
    assert "topology_contradictory" in codes(faults)


def test_two_machines_in_one_text_are_not_mixed(captured: Captured) -> None:
    got, faults = report(captured, FOUR + recorded("20-4gpu-phb"), require_active_links=False)
    assert codes(faults) == ["topology_contradictory"]
    assert got.fully_connected is None
    assert report(captured, FOUR + FOUR, require_active_links=False)[1] == []


@pytest.mark.parametrize("word", ["N/A", "[N/A]", "ERR!", "-"])
@pytest.mark.parametrize("tabs", [True, False])
@pytest.mark.parametrize("column", [0, 2, 3])
def test_a_word_for_no_value_in_a_link_column_is_a_cell(word: str, tabs: bool, column: int, captured: Captured) -> None:
    """It leaves its pair unknown, and moves neither its neighbours nor the affinities."""
    lines = recorded("topo-v100x4-p3.8xlarge-mixed-nv1-nv2").split("\n")
    row = next(index for index, line in enumerate(lines) if line.startswith("GPU1"))
    cells = lines[row].split("\t")
    cells[column + 1] = word
    lines[row] = "\t".join(cells)
    topo = "\n".join(lines)
    got, faults = report(captured, topo if tabs else topo.expandtabs(8), require_active_links=False)
    a, b = sorted((1, column))
    assert [(fault.code, fault.subject) for fault in faults] == [("topology_cell_unknown", f"GPU{a}-GPU{b}")]
    assert repr(word) in faults[0].message
    assert [(pair["a"], pair["b"]) for pair in got.pairs if pair["nvlinks"] is None] == [(a, b)]
    assert got.fully_connected is None
    assert got.cpu_affinity == ["0-31"] * 4
    assert got.numa_affinity == [None] * 4


def wrapped(text: str, width: int) -> str:
    """As a terminal of this width breaks lines."""
    shown = text.expandtabs(8).split("\n")
    return "\n".join(line[at : at + width] for line in shown for at in range(0, max(len(line), 1), width))


@pytest.mark.parametrize("width", [30, 40, 64])
def test_a_header_that_was_broken_is_no_count_of_gpus(width: int, captured: Captured) -> None:
    got, faults = report(captured, wrapped(matrix(8, {}, "NV12"), width), require_active_links=False)
    assert codes(faults) == ["topology_truncated"]
    assert "it is not whole" in faults[0].message
    assert (got.gpu_count, got.fully_connected, got.min_links) == (None, None, None)
    assert (got.islands, got.pairs, got.cpu_affinity) == ([], [], [])


@pytest.mark.parametrize("width", range(16, 100))
def test_broken_lines_are_read_right_or_not_at_all(width: int, captured: Captured) -> None:
    text = matrix(8, {}, "NV12")
    whole, _ = report(captured, text, require_active_links=False)
    got, faults = report(captured, wrapped(text, width), require_active_links=False)
    assert got.gpu_count in ({8} if not faults else {None, 8})
    assert all(cpus in {None, *whole.cpu_affinity} for cpus in got.cpu_affinity)
    if got.fully_connected is not None:
        assert (got.gpu_count, got.min_links) == (8, 12)


@pytest.mark.parametrize("tabs", [True, False])
def test_a_network_device_with_a_name_without_a_number(tabs: bool, captured: Captured) -> None:
    topo = (
        "\tGPU0\tGPU1\troce\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tNV2\tPIX\t0-7\t0\nGPU1\tNV2\t X \tPIX\t0-7\t0\nroce\tPIX\tPIX\t X \n"
    )
    got, faults = report(captured, topo if tabs else topo.expandtabs(8), require_active_links=False)
    assert (faults, got.gpu_count, got.nics, got.numa_affinity) == ([], 2, ["roce"], [0, 0])


# --- the graph --------------------------------------------------------------------------------------------------------


def test_larger_and_better_linked_groups_come_first() -> None:
    pairs = [topology.Pair(a, b, "NV1") for a, b in [(0, 1), (2, 3), (2, 4), (3, 4)]] + [topology.Pair(0, 5, "NV2")]
    others = [
        topology.Pair(a, b, "SYS")
        for a, b in combinations(range(6), 2)
        if (a, b) not in {(pair.a, pair.b) for pair in pairs}
    ]
    assert topology.islands(range(6), [*pairs, *others]) == [[2, 3, 4], [0, 5], [1]]


def test_sixteen_cards_on_a_switch_take_no_time() -> None:
    pairs = [topology.Pair(a, b, "NV6") for a, b in combinations(range(16), 2)]
    assert topology.islands(range(16), pairs) == [list(range(16))]


def test_what_is_recommended() -> None:
    full = [topology.Pair(0, 1, "NV2")]
    slow = [topology.Pair(0, 1, "SYS")]
    unknown = [topology.Pair(0, 1, None)]
    assert topology.recommend_split_mode([], []) == (None, "the number of GPUs is not known")
    assert topology.recommend_split_mode([0], [])[0] == "none"
    for pairs, word in ((full, "NVLink joins every pair"), (slow, "not every pair"), (unknown, "not all known")):
        mode, reason = topology.recommend_split_mode([0, 1], pairs)
        assert mode == "layer"
        assert word in reason
