# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The simulator against the real nvidia-smi: see fixtures/gpu-simulator/README.md for what each folder is."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.unit.gpu_simulator.conftest import install

FIXTURES = Path(__file__).parent.parent / "fixtures/gpu-simulator"
REAL = FIXTURES / "nvidia-smi-535.261.03"
LIVE = FIXTURES / "h200x2-live"
PUBLIC = FIXTURES / "public"

#: What the stand-in library behind the real tool could not report (text label, XML tag).
NOT_REPORTED = {
    "GPU Part Number", "Replay Number Rollovers", "Graphics",
    "gpu_part_number", "replay_rollover_counter", "graphics_clock",
}  # fmt: skip
DATE = re.compile(r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}")


def public(name: str) -> str:
    """A public output without its two comment lines."""
    return (PUBLIC / name).read_text().split("\n", 2)[2]


def undated(text: str) -> str:
    return DATE.sub("DATE", text)


def differing_lines(ours: str, theirs: str) -> list[tuple[str, str]]:
    left, right = undated(ours).splitlines(), undated(theirs).splitlines()
    assert len(left) == len(right)
    return [(a, b) for a, b in zip(left, right, strict=True) if a != b]


@pytest.mark.parametrize(
    ("words", "fixture"),
    [
        ((), "plain.txt"),
        (("-L",), "list.txt"),
        (("nvlink", "-s"), "nvlink-s.txt"),
        (("nvlink", "--status"), "nvlink-s.txt"),
        (("topo", "-p2p", "n"), "p2p-n.txt"),
    ],
)
def test_535_prints_the_same_text(machine, words, fixture):
    answer = machine.smi(*words)
    assert answer.rc == 0
    assert undated(answer.out) == undated((REAL / fixture).read_text())


def test_535_full_report_differs_only_in_what_the_library_could_not_say(machine):
    for ours, theirs in differing_lines(machine.smi("-q").out, (REAL / "q.txt").read_text()):
        label = theirs.split(":")[0]
        assert label == ours.split(":")[0]
        assert label.strip() in NOT_REPORTED
        assert theirs.split(":")[1].strip() == "N/A"


@pytest.mark.parametrize("path", sorted(REAL.glob("q-d-*.txt")), ids=lambda path: path.stem)
def test_535_selected_report(machine, path):
    flag = path.stem.removeprefix("q-d-")
    answer = machine.smi("-q", "-i", "1", "-d", flag)
    assert answer.rc == 0
    for ours, theirs in differing_lines(answer.out, path.read_text()):
        assert theirs.split(":")[0].strip() in NOT_REPORTED, (ours, theirs)


def flat(element: ElementTree.Element, path: str = "") -> list[tuple[str, str]]:
    here = f"{path}/{element.tag}"
    found = [(here, (element.text or "").strip())]
    for child in element:
        found += flat(child, here)
    return found


def assert_same_tree(ours: str, theirs: str, may_differ: set[str]) -> None:
    left, right = flat(ElementTree.fromstring(ours)), flat(ElementTree.fromstring(theirs))
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, mine), (_, real) in zip(left, right, strict=True):
        if path.rsplit("/", 1)[1] not in may_differ:
            assert mine == real, path


def test_535_xml(machine):
    answer = machine.smi("-q", "-x")
    real = (REAL / "q-x.xml").read_text()
    assert answer.out.splitlines()[:3] == real.splitlines()[:3]
    assert_same_tree(answer.out, real, NOT_REPORTED | {"timestamp"})
    assert len(answer.out.splitlines()) == len(real.splitlines())


@pytest.mark.parametrize(
    ("fixture", "format_", "more"),
    [("query-all.csv", "csv", ()), ("query-all-nounits.csv", "csv,noheader,nounits", ("-i", "2"))],
)
def test_535_every_property_reads_the_same(machine, fixture, format_, more):
    header = (REAL / "query-all.csv").read_text().splitlines()[0].split(", ")
    names = [re.sub(r" \[.*\]", "", column) for column in header]
    answer = machine.smi(f"--query-gpu={','.join(names)}", f"--format={format_}", *more)
    ours = list(csv.reader(io.StringIO(answer.out), skipinitialspace=True))
    real = list(csv.reader(io.StringIO((REAL / fixture).read_text()), skipinitialspace=True))
    assert len(ours) == len(real)
    for mine, theirs in zip(ours, real, strict=True):
        assert mine[1:] == theirs[1:]  # the first is the timestamp
        assert re.fullmatch(r"timestamp|\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}", mine[0])


def test_535_help_names_the_same_properties(machine):
    real = [line for line in (REAL / "help-query-gpu-names.txt").read_text().splitlines() if "vgpu" not in line]
    ours = [line for line in machine.smi("--help-query-gpu").out.splitlines() if line.startswith('"')]
    # The real tool lists clocks.max.sm as its own other name.
    assert ours == [line.replace('"clocks.max.sm" or "clocks.max.sm"', '"clocks.max.sm"') for line in real]


def test_535_inactive_link(machine):
    machine.control("fault", "link-down", "1", "3")
    assert machine.smi("nvlink", "-s", "-i", "1").out == "".join(
        (REAL / "nvlink-s-down.txt").read_text().splitlines(keepends=True)[7:14]
    )


@pytest.mark.parametrize(
    ("text", "fixture"), [("GPU is lost", "plain-lost.txt"), ("GPU requires reset", "plain-requires-reset.txt")]
)
def test_535_card_whose_readings_fail_shows_err(machine, text, fixture):
    machine.edit(lambda state: state["gpus"].__delitem__(slice(1, None)) or state.update(links=[]))
    machine.control("fault", "unreadable", "0", text)
    assert undated(machine.smi().out) == undated((REAL / fixture).read_text())
    report = machine.smi("-q").out
    assert f"    GPU Current Temp                  : {text}" in report
    assert f"    Clocks Event Reasons                  : {text}" in report
    rows = machine.smi("--query-gpu=index,temperature.gpu,memory.used", "--format=csv,noheader")
    assert (rows.rc, rows.out) == (0, f"0, [{text}], [{text}]\n")


def test_535_persistence_messages(machine):
    assert machine.smi("-pm", "1").out == (REAL / "pm-already.txt").read_text()
    assert machine.smi("-pm", "0").rc == 0
    assert machine.smi("-pm", "1").out == (REAL / "pm-on.txt").read_text()


SEE_HELP = "Please run 'nvidia-smi -h' for help.\n\n"


# Texts and statuses below were read from the real 535.261.03 in the same way.
@pytest.mark.parametrize(
    ("words", "rc", "text"),
    [
        (("--query-gpu=bogus", "--format=csv"), 2, 'Field "bogus" is not a valid field to query.\n\n'),
        (("--query-gpu=index,bogus,worse", "--format=csv"), 2, 'Field "bogus" is not a valid field to query.\n\n'),
        (("--query-gpu=index",), 2, "\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.\n\n"),
        (("--query-gpu=index", "--format=foo"), 2, "Format modifier is not recognized.\n"),
        (("--query-gpu=index", "--format=noheader"), 2, "Format modifier --format=csv is mandatory.\n"),
        (("--query-gpu=index", "--format=csv", "-i", "7"), 6, "No devices were found\n"),
        (("--query-gpu=index", "--format=csv,noheader", "-i", "1,0"), 0, "0\n1\n"),
        (("--query-gpu=index", "--format=csv,noheader", "--id=1"), 0, "1\n"),
        (("--query-gpu=index", "--format=csv,noheader", "-i=1"), 0, "1\n"),
        (("--query-gpu=index,", "--format=csv,noheader", "-i=1"), 0, "1\n"),
        (("-L", "-i", "0"), 2, f"ERROR: Option -i is not valid for this command. {SEE_HELP}"),
        (("--bogus",), 255, "ERROR: Option --bogus is not recognized. Please run 'nvidia-smi -h'.\n\n"),
        (("--version",), 255, "ERROR: Option --version is not recognized. Please run 'nvidia-smi -h'.\n\n"),
        (("-q", "-d", "BOGUS"), 2, "Failed to parse --display/-d flags\n"),
        (("-q", "-i", "9"), 6, "No devices were found\n"),
        (("-pm", "2"), 2, "Invalid persistence mode: 2\nTerminating early due to previous errors.\n"),
        (("-pl", "abc"), 2, "ERROR: Option abc is invalid for -pl. Please run 'nvidia-smi -h' for help.\n\n"),
        (
            ("-pl", "100"),
            2,
            "Provided power limit 100.00 W is not a valid power limit which should be between 150.00 W and 300.00 W "
            "for GPU 00000000:1A:00.0\nTerminating early due to previous errors.\n",
        ),
        (("topo", "-p2p", "z"), 2, "Invalid p2p capability index specified at the command-line\n\n"),
        (
            ("-q", "-x", "-d", "ECC"),
            2,
            "Invalid combination of input arguments: --display/-d flags can not be combined with "
            "-x/--xml-format flags.\n",
        ),
    ],
)  # fmt: skip
def test_535_messages_and_exit_statuses(machine, words, rc, text):
    answer = machine.smi(*words)
    assert (answer.rc, answer.out) == (rc, text)


@pytest.mark.parametrize(
    ("words", "rc", "text"),
    [
        ((), 6, "No devices were found\n"),
        (("-L",), 0, "No devices found.\n"),
        (("-q", "-x"), 6, "No devices were found\n"),
        (("--query-gpu=index", "--format=csv"), 6, "No devices were found\n"),
        (("topo", "-m"), 255, "Failed to run topology matrix\n\n"),
        (("nvlink", "-s"), 6, "No devices were found\n"),
    ],
)
def test_535_no_devices(machine, words, rc, text):
    machine.control("fault", "no-devices")
    answer = machine.smi(*words)
    assert (answer.rc, answer.out) == (rc, text)
    assert text != "No devices were found\n" or text == public("60-err-no-devices.txt")


def test_no_driver_says_what_the_real_tool_says(machine):
    machine.control("fault", "no-driver")
    answer = machine.smi("-L")
    assert (answer.rc, answer.out) == (9, public("61-err-no-driver.txt") + "\n")


def test_version_mismatch_prints_two_lines_and_a_shortened_version(machine):
    install(machine, "v100x4", "--driver", "570.124.06")
    machine.control("fault", "mismatch", "570.124.04")
    answer = machine.smi()
    assert (answer.rc, answer.out) == (18, public("62-err-version-mismatch.txt"))


def test_lost_card_text_of_an_old_driver(machine):
    install(machine, "v100x4", "--driver", "470.57.02")
    machine.edit(lambda state: state["gpus"][1].update(bus_id="00000000:02:00.0"))
    machine.control("fault", "lose-card", "1")
    answer = machine.smi()
    assert answer.rc == 15
    assert answer.out.strip() == public("64-err-gpu-lost.txt").strip()


def test_failed_card_between_living_ones(machine):
    machine.edit(lambda state: state["gpus"][1].update(bus_id="00000000:02:00.0"))
    machine.control("fault", "lose-card", "1", "row")
    answer = machine.smi("--query-gpu=index,name,temperature.gpu", "--format=csv,noheader")
    theirs = public("67-err-csv-one-gpu-failed.txt").splitlines()
    ours = answer.out.splitlines()
    assert answer.rc != 0
    assert len(ours) == len(theirs) + 1  # four cards here, three there
    assert ours[1] == theirs[1]
    assert set(ours[2].split(", ")) == set(theirs[2].split(", ")) == {"[Unknown Error]"}


def test_single_fields_that_cannot_be_read(machine):
    """The form of 69-err-csv-field-unknown-error.txt: the text stands alone, without a unit."""
    machine.control("fault", "field", "0", "power.draw", "[Unknown Error]")
    theirs = public("69-err-csv-field-unknown-error.txt").splitlines()[0].split(", ")
    answer = machine.smi("--query-gpu=index,power.draw,power.limit", "--format=csv,noheader", "-i", "0")
    assert answer.out == "0, [Unknown Error], 300.00 W\n"
    assert answer.out.strip().split(", ")[1:] == theirs[5:7]


@pytest.mark.parametrize(
    ("words", "fixture"),
    [(("topo", "-m"), "topo-m.txt"), (("nvlink", "-s"), "nvlink-s.txt"), (("topo", "-p2p", "n"), "p2p-n.txt")],
)
def test_580_h200_prints_the_same_text(machine, words, fixture):
    install(machine, "h200x2")
    machine.edit(lambda state: [gpu.update(uuid="GPU-00000000-0000-0000-0000-000000000001") for gpu in state["gpus"]])
    assert machine.smi(*words).out == (LIVE / fixture).read_text()


def test_580_h200_table(machine):
    install(machine, "h200x2")

    def at_that_moment(state):
        for gpu, watts, degrees in zip(state["gpus"], (120.0, 108.0), (34, 33), strict=True):
            gpu["power"]["draw"] = watts
            gpu["temperature"]["core"] = degrees

    machine.edit(at_that_moment)
    assert undated(machine.smi().out) == undated((LIVE / "plain.txt").read_text())


def test_580_h200_csv(machine):
    install(machine, "h200x2")
    machine.edit(lambda state: [gpu.update(uuid="GPU-00000000-0000-0000-0000-000000000001") for gpu in state["gpus"]])
    real = (LIVE / "query.csv").read_text()
    names = ",".join(re.sub(r" \[.*\]", "", name) for name in real.splitlines()[0].split(", "))
    assert machine.smi(f"--query-gpu={names}", "--format=csv").out == real


def test_580_h200_xml(machine):
    """Every element in the same place; values the same but for those that move from one second to the next."""
    install(machine, "h200x2")
    moving = {
        "timestamp", "serial", "uuid", "replay_counter", "tx_util", "rx_util", "average_power_draw",
        "instant_power_draw",
    }  # fmt: skip
    assert_same_tree(machine.smi("-q", "-x").out, (LIVE / "q-x.xml").read_text(), moving)


def cells(text: str) -> list[list[str]]:
    """The rows of a matrix, whatever stands between the cells."""
    plain = re.sub(r"\x1b\[\d*m", "", text)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*(GPU|NIC|mlx5_)\d", line)]
    return [[cell for cell in row if cell != "N/A"] for row in rows]


def test_hybrid_mesh_matrix_with_a_nic(machine):
    install(machine, "v100x8")
    machine.edit(lambda state: state.update(nics=[{"name": "mlx5_2", "numa": 0}]))
    ours, theirs = machine.smi("topo", "-m").out, public("03-v100x8-32gb-hybrid-mesh-gpunumaid.txt")
    # The public capture lost the terminal's underline sequences in its header, nothing else.
    assert re.sub(r"\x1b\[\d*m", "", ours) == theirs


def test_power9_matrix_of_an_old_driver(machine):
    install(machine, "v100x4-ac922", "--driver", "450.80.02")
    machine.edit(lambda state: state.update(nics=[{"name": f"mlx5_{n}", "numa": 0 if n < 2 else 8} for n in range(4)]))
    assert machine.smi("topo", "-m").out == public("07-v100x4-power9-nv3-pairs.txt")


def test_power9_links_are_all_active_though_the_mesh_is_not_full(machine):
    install(machine, "v100x4-ac922")
    theirs = public("50-nvlink-status-v100x4-ac922.txt")
    ours = machine.smi("nvlink", "-s").out
    without_ids = re.compile(r"GPU-[0-9a-f-]{36}")
    assert without_ids.sub("", ours) == without_ids.sub("", theirs)


def test_inactive_links_read_like_the_public_report(machine):
    machine.control("fault", "link-down", "3", "3")
    machine.control("fault", "link-down", "3", "5")
    theirs = public("51-nvlink-status-v100-inactive.txt").split("....\n")[1]
    ours = machine.smi("nvlink", "-s", "-i", "3").out
    assert ours.splitlines()[1:] == theirs.splitlines()[1:]


def test_full_mesh_cells(machine):
    theirs = [row[:5] for row in cells(public("01-v100x4-sxm2-32gb-all-nv2.txt")) if row[0].startswith("GPU")]
    ours = [row[:5] for row in cells(machine.smi("topo", "-m").out)]
    assert ours[1:] == theirs[1:]


def test_pcie_only_cells(machine):
    machine.control("fault", "pcie-only")
    machine.edit(lambda state: state.update(near="PHB"))
    theirs = [row[:5] for row in cells(public("20-4gpu-phb.txt"))]
    assert [row[:5] for row in cells(machine.smi("topo", "-m").out)] == theirs
    assert machine.smi("topo", "-p2p", "n").out.splitlines()[1] == " GPU0\tX\tNS\tNS\tNS\t"


def test_peer_access_cells(machine):
    install(machine, "v100x8")
    machine.edit(lambda state: state.update(links=[[a, b, 1] for a in range(8) for b in range(a)]))
    machine.edit(lambda state: [gpu.update(nvlinks=7) for gpu in state["gpus"]])
    assert cells(machine.smi("topo", "-p2p", "n").out) == cells(public("40-p2p-8gpu-ok.txt"))


def test_process_row_is_laid_out_as_in_public_535_tables(machine):
    """Row as posted from a V100 under 535.288.01 (github code index, LeNet-5 course notes)."""
    name = "/data/soft/ai/wrap/pytorch-2.9/bin/python"
    machine.control("fault", "process", "0", "594", "1149299", name)
    assert (
        "|    0   N/A  N/A   1149299      C   ...soft/ai/wrap/pytorch-2.9/bin/python      594MiB |"
        in machine.smi().out.splitlines()
    )
    assert (
        "|  GPU   GI   CI        PID   Type   Process name                            GPU Memory |" in machine.smi().out
    )


def test_process_row_of_570(machine):
    """Row as posted from a V100-SXM2-32GB under 570.158.01 (github code index)."""
    install(machine, "v100x4", "--driver", "570.158.01")
    machine.control("fault", "process", "0", "31574", "299381", "python")
    lines = machine.smi().out.splitlines()
    assert "|    0   N/A  N/A          299381      C   python                                31574MiB |" in lines
    assert "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |" in lines
