# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""gpu_inventory: three sources side by side, requirements, and what each way of being wrong is called."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault, by_severity
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import gpu_report, inventory, products, values
from ansible_collections.volta.llm.plugins.module_utils.nvidia.gpu_report import GpuRequest
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi

Captured = Callable[..., NvidiaSmi]
CARDS = ["0000:1a:00.0", "0000:1c:00.0", "0000:1d:00.0", "0000:1e:00.0"]
PCI = dict.fromkeys(CARDS, "10de:1db5")
QUERY = (
    "index,pci.bus_id,name,driver_version,memory.total,temperature.gpu,temperature.memory,persistence_mode,"
    "ecc.mode.current,ecc.errors.uncorrected.volatile.total,clocks_event_reasons.active,retired_pages.pending,"
    "pcie.link.width.current,pcie.link.width.max"
)
HEADER = QUERY.replace(",", ", ").replace("memory.total,", "memory.total [MiB],")
COMMAND = f"--query-gpu={QUERY} --format=csv"


def row(index: int, **changes: str) -> str:
    """One healthy card, with some cells changed."""
    cells = {
        "index": str(index),
        "bus": "0000" + CARDS[index].upper(),
        "name": "Tesla V100-SXM2-32GB",
        "driver": "535.261.03",
        "memory": "32768 MiB",
        "core": "35",
        "hbm": "34",
        "persistence": "Enabled",
        "ecc": "Enabled",
        "errors": "0",
        "reasons": "0x0000000000000001",
        "pending": "No",
        "width": "16",
        "width_max": "16",
    }
    return ", ".join((cells | changes).values())


def table(*rows: str) -> str:
    return "\n".join((HEADER, *rows)) + "\n"


HEALTHY = table(*(row(index) for index in range(4)))
EVERYTHING = GpuRequest(
    expected_count=4,
    expected_product="Tesla V100-SXM2-32GB",
    min_memory_mib=32000,
    driver_branch="535",
    persistence=True,
    max_uncorrected_ecc=0,
    max_temperature=80,
)


def codes(faults: Sequence[Fault]) -> list[str]:
    return [fault.code for fault in by_severity(faults)]


def test_four_healthy_cards_meet_everything(captured: Captured) -> None:
    got, faults = gpu_report.report(captured({COMMAND: HEALTHY}, pci=PCI, version="535.261.03"), EVERYTHING)
    assert (got.state, got.gpu_count, faults) == ("ok", 4, [])
    assert [gpu["bus_id"] for gpu in got.gpus] == CARDS
    assert all(gpu["on_pci"] for gpu in got.gpus)
    assert {gpu["compute_capability"] for gpu in got.gpus} == {"7.0"}, "from the PCI id where the driver does not say"
    assert got.gpus[0]["clock_reasons"] == ["gpu_idle"]
    assert got.gpus[0]["power_w"] is None
    assert got.gpus[0]["unknown"]["power_w"] == "not reported by this driver"
    assert got.driver["loaded_version"] == "535.261.03"
    assert {device["driver"] for device in got.pci_devices} == {"nvidia"}


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"name": "Tesla V100-SXM2-16GB"}, "gpu_product_mismatch", "expected Tesla V100-SXM2-32GB"),
        ({"memory": "16384 MiB"}, "gpu_memory_too_small", "16384 MiB of memory"),
        ({"core": "88"}, "gpu_too_hot", "the core is at 88"),
        ({"hbm": "91"}, "gpu_too_hot", "the memory is at 91"),
        ({"persistence": "Disabled"}, "persistence_off", "still off"),
        ({"errors": "3"}, "ecc_uncorrected", "3 uncorrected"),
        ({"reasons": "0x0000000000000048"}, "gpu_slowed_down", "hw_slowdown, hw_thermal_slowdown"),
        ({"pending": "Yes"}, "page_retirement_pending", "to be retired"),
        ({"width": "8"}, "pcie_link_degraded", "8 of 16 lanes"),
        ({"core": "[Unknown Error]"}, "gpu_field_unreadable", "temperature_c (unknown error)"),
    ],
)
def test_each_thing_wrong_with_a_card_has_its_code(
    changes: dict[str, str], code: str, says: str, captured: Captured
) -> None:
    text = table(row(0), row(1, **changes), row(2), row(3))
    got, faults = gpu_report.report(captured({COMMAND: text}, pci=PCI, version="535.261.03"), EVERYTHING)
    mine = [fault for fault in faults if fault.code == code]
    assert len(mine) == 1
    assert mine[0].subject == "0000:1c:00.0 (GPU1)"
    assert says in mine[0].message
    assert set(codes(faults)) - {"gpu_value_unknown"} == {code}
    assert got.gpu_count == 4


def test_several_faults_are_all_reported_most_serious_first(captured: Captured) -> None:
    text = table(row(0, core="90", errors="1"), row(1, pending="Yes"), row(3))
    _, faults = gpu_report.report(captured({COMMAND: text}, pci=PCI, version="550.163.01"), EVERYTHING)
    assert codes(faults) == [
        "gpu_missing",
        "page_retirement_pending",
        "ecc_uncorrected",
        "gpu_too_hot",
        "driver_branch_mismatch",
    ]


@pytest.mark.parametrize("word", ["N/A", "[N/A]", "[Not Supported]"])
def test_a_value_that_is_not_there_is_neither_good_nor_bad(word: str, captured: Captured) -> None:
    """B02: null is never 0 and never crosses a threshold."""
    rows = [row(index, core=word, hbm=word, errors=word, memory=word, persistence=word) for index in range(4)]
    got, faults = gpu_report.report(captured({COMMAND: table(*rows)}, pci=PCI, version="535.261.03"), EVERYTHING)
    assert set(codes(faults)) == {"gpu_value_unknown"}
    assert got.state == "ok"
    assert got.gpus[0]["memory_total_mib"] is None
    assert got.gpus[0]["ecc"]["volatile"]["double"] is None


def test_ecc_switched_off_is_said(captured: Captured) -> None:
    rows = [row(index, ecc="Disabled", errors="[N/A]") for index in range(4)]
    _, faults = gpu_report.report(captured({COMMAND: table(*rows)}, pci=PCI), EVERYTHING)
    assert {fault.code for fault in faults} == {"gpu_value_unknown"}
    assert "ECC is switched off" in faults[0].message


# --- numbers of cards -------------------------------------------------------------------------------------------------


def test_a_missing_card_is_named_by_its_bus_id(captured: Captured) -> None:
    text = table(row(0), row(1), row(3))
    got, faults = gpu_report.report(captured({COMMAND: text}, pci=PCI), GpuRequest(expected_count=4))
    assert codes(faults) == ["gpu_missing"]
    assert "3 of 4" in faults[0].message
    assert "0000:1d:00.0 (Tesla V100-SXM2-32GB)" in faults[0].message
    for word in ("reseat", "power", "xid", "reboot"):
        assert word in faults[0].remedy
    assert (got.state, got.gpu_count) == ("degraded", 3)


def test_a_missing_card_is_a_fault_without_any_requirement(captured: Captured) -> None:
    _, faults = gpu_report.report(captured({COMMAND: table(row(0), row(1), row(3))}, pci=PCI), GpuRequest())
    assert [(fault.code, fault.subject) for fault in faults] == [("gpu_missing", "0000:1d:00.0")]


def test_fewer_cards_than_wanted_though_all_answer(captured: Captured) -> None:
    _, faults = gpu_report.report(captured({COMMAND: HEALTHY}, pci=PCI), GpuRequest(expected_count=8))
    assert codes(faults) == ["gpu_missing"]
    assert "4 of 8" in faults[0].message
    assert "the PCI bus shows 4" in faults[0].message
    assert "set expected_count" in faults[0].remedy


def test_more_cards_than_wanted(captured: Captured) -> None:
    _, faults = gpu_report.report(captured({COMMAND: HEALTHY}, pci=PCI), GpuRequest(expected_count=2))
    assert codes(faults) == ["gpu_surplus"]


def test_a_card_held_by_another_driver_is_not_missing(captured: Captured, tmp_path: Path) -> None:
    smi = captured({COMMAND: table(row(0), row(1), row(3))}, pci=PCI)
    device = tmp_path / "sys/bus/pci/devices/0000:1d:00.0/driver"
    device.unlink()
    device.symlink_to("../../drivers/vfio-pci")
    got, faults = gpu_report.report(smi, GpuRequest())
    assert faults == []
    assert [device["driver"] for device in got.pci_devices] == ["nvidia", "nvidia", "vfio-pci", "nvidia"]


def test_one_lost_card_does_not_hide_the_living(captured: Captured) -> None:
    """Branch 535 prints one line when asked for all; the others answer by name."""
    lost = "Unable to determine the device handle for GPU0000:1D:00.0: GPU is lost.  Reboot the system to recover it\n"
    living = table(row(0), row(1), row(3))
    smi = captured({COMMAND: (15, lost), f"{COMMAND} -i 0000:1a:00.0,0000:1c:00.0,0000:1e:00.0": living}, pci=PCI)
    got, faults = gpu_report.report(smi, EVERYTHING)
    assert [gpu["index"] for gpu in got.gpus] == [0, 1, 3]
    assert (got.state, got.gpu_count) == ("degraded", 3)
    assert codes(faults) == ["gpu_lost", "gpu_missing"]
    assert "still on the PCI bus" in faults[0].message + faults[1].message


def test_a_lost_card_that_left_the_bus_says_so(captured: Captured) -> None:
    lost = "Unable to determine the device handle for GPU 0000:89:00.0: Unknown Error\n"
    text = table(*(row(index) for index in range(4))) + lost
    _, faults = gpu_report.report(captured({COMMAND: (0, text)}, pci=PCI), GpuRequest())
    assert [(fault.code, fault.subject) for fault in faults] == [("gpu_lost", "0000:89:00.0")]
    assert "no longer on the PCI bus" in faults[0].message


# --- conditions of the whole machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "with_cards", "without_cards"),
    [
        ("No devices were found\n", "no_devices", "no_pci_device"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n",
            "no_driver",
            "no_pci_device",
        ),
    ],
)
def test_the_bus_decides_what_no_gpu_means(
    text: str, with_cards: str, without_cards: str, captured: Captured, tmp_path: Path
) -> None:
    smi = captured({COMMAND: (9, text)}, pci=PCI)
    got, faults = gpu_report.report(smi, EVERYTHING)
    assert (got.state, codes(faults)) == (with_cards, [with_cards])
    assert "4 NVIDIA GPUs are on the PCI bus" in faults[0].message
    for card in CARDS:
        (tmp_path / "sys/bus/pci/devices" / card / "vendor").write_text("0x8086\n")
    got, faults = gpu_report.report(smi, EVERYTHING)
    assert (got.state, codes(faults), got.gpu_count) == (without_cards, [without_cards], 0)


def test_nouveau_is_named(captured: Captured, tmp_path: Path) -> None:
    smi = captured(
        {COMMAND: (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")}, pci=PCI
    )
    for card in CARDS:
        link = tmp_path / "sys/bus/pci/devices" / card / "driver"
        link.unlink()
        link.symlink_to("../../drivers/nouveau")
    _, faults = gpu_report.report(smi, GpuRequest())
    assert faults[0].message.endswith("bound to nouveau")


def test_a_version_mismatch_shows_both_versions(captured: Captured) -> None:
    """B12: two lines of text instead of a table; never "no GPU"."""
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.178\n"
    got, faults = gpu_report.report(captured({COMMAND: (18, text)}, pci=PCI, version="580.173.02"), EVERYTHING)
    assert (got.state, got.gpu_count, codes(faults)) == ("driver_mismatch", None, ["driver_mismatch"])
    assert "580.173.02" in faults[0].message
    assert "580.178" in faults[0].message
    assert got.driver["loaded_version"] == "580.173.02"


def test_a_time_out_says_nothing_about_the_number_of_cards(captured: Captured) -> None:
    """B20."""
    got, faults = gpu_report.report(captured({COMMAND: None}, pci=PCI), EVERYTHING)
    assert (got.state, got.gpu_count, codes(faults)) == ("timeout", None, ["nvidia_smi_timeout"])


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    got, faults = gpu_report.report(NvidiaSmi(Machine(str(tmp_path)), "/no/such/nvidia-smi"), EVERYTHING)
    assert (got.state, codes(faults)) == ("no_driver", ["nvidia_smi_missing"])
    assert faults[0].subject == "/no/such/nvidia-smi"


def test_a_capture_with_the_description_only_is_read(captured: Captured) -> None:
    xml = (
        '<nvidia_smi_log><driver_version>535.261.03</driver_version><gpu id="00000000:1A:00.0"><product_name>Tesla '
        "V100-SXM2-32GB</product_name><fb_memory_usage><total>32768 MiB</total></fb_memory_usage></gpu>"
        "</nvidia_smi_log>"
    )
    got, faults = gpu_report.report(captured({"-q -x": xml}), GpuRequest(expected_count=1))
    assert (got.state, faults, got.gpus[0]["product"]) == ("ok", [], "Tesla V100-SXM2-32GB")


# --- older drivers ----------------------------------------------------------------------------------------------------


class Stand(Machine):
    """A machine whose nvidia-smi is a function of its arguments."""

    def __init__(self, root: Path, answer: str, timeout: float = 10.0) -> None:
        super().__init__(str(root), timeout)
        script = root / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n{answer}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self.smi = NvidiaSmi(self, str(script))


def test_an_older_driver_is_asked_for_what_it_knows(tmp_path: Path) -> None:
    """B04: one unknown field must not lose the whole query. The stand-in is a driver 390 in this respect."""
    machine = Stand(
        tmp_path,
        """case "$1" in
--help-query-gpu) printf '"name" or "gpu_name"\\nthe name\\n\\n"index"\\n"pci.bus_id" or "gpu_bus_id"\\n'
    printf '"clocks_throttle_reasons.active"\\n"pci.device_id"\\n';;
*compute_cap*|*clocks_event*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2;;
*) echo "$1" | tr -d '\\n' >"$0.asked"
    echo 'index, pci.bus_id, pci.device_id, name, clocks_throttle_reasons.active'
    echo '0, 00000000:1A:00.0, 0x1DB510DE, Tesla V100-SXM2-32GB, 0x0000000000000004';;
esac""",
    )
    got, faults = gpu_report.report(machine.smi, GpuRequest(expected_count=1))
    asked = (tmp_path / "nvidia-smi.asked").read_text()
    assert asked == "--query-gpu=index,pci.bus_id,pci.device_id,name,clocks_throttle_reasons.active"
    assert (got.state, faults, machine.processes) == ("ok", [], 3)
    assert got.gpus[0]["clock_reasons"] == ["sw_power_cap"]
    assert got.gpus[0]["compute_capability"] == "7.0"
    assert got.gpus[0]["unknown"]["power_w"] == "not reported by this driver"


def test_a_driver_that_lists_no_fields_loses_only_those_that_it_refuses(tmp_path: Path) -> None:
    machine = Stand(
        tmp_path,
        """case "$1" in
--help-query-gpu) echo 'ERROR: Option --help-query-gpu is not recognized. Please run nvidia-smi -h.'; exit 2;;
*compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2;;
*temperature.memory*) echo 'Field "temperature.memory" is not a valid field to query.'; exit 2;;
*) echo 'index, pci.bus_id, name'; echo '0, 00000000:1A:00.0, Tesla V100-SXM2-32GB';;
esac""",
    )
    got, faults = gpu_report.report(machine.smi, GpuRequest())
    assert (got.state, faults, len(got.gpus), machine.processes) == ("ok", [], 1, 4)


def test_a_time_out_of_a_real_process(tmp_path: Path) -> None:
    machine = Stand(tmp_path, "sleep 30 & wait", timeout=0.3)
    got, faults = gpu_report.report(machine.smi, GpuRequest(expected_count=4))
    assert (got.state, codes(faults)) == ("timeout", ["nvidia_smi_timeout"])
    assert "0.3 s" in faults[0].message
    assert faults[0].subject == "nvidia-smi --query-gpu --format"


# --- persistence ------------------------------------------------------------------------------------------------------


def test_persistence_is_waited_for_and_only_the_cards_still_off_are_named(tmp_path: Path) -> None:
    """B16: just after boot it is off on some cards, a little later on for all."""
    rows = "\n".join(f"echo '{row(index, persistence='Disabled' if index % 2 else 'Enabled')}'" for index in range(4))
    machine = Stand(
        tmp_path,
        f"""case "$1" in
*=index,pci.bus_id,persistence_mode) n=$(cat "$0.n" 2>/dev/null || echo 0); echo $((n + 1)) >"$0.n"
    echo 'index, pci.bus_id, persistence_mode'
    echo "1, 00000000:1C:00.0, $([ "$n" -ge 1 ] && echo Enabled || echo Disabled)"
    echo '3, 00000000:1E:00.0, Disabled';;
*) echo '{HEADER}'
{rows};;
esac""",
    )
    slept: list[float] = []
    request = GpuRequest(persistence=True, persistence_wait=12)
    got, faults = gpu_report.report(machine.smi, request, sleep=slept.append)
    assert slept == [5.0, 5.0, 2.0]
    assert [(fault.code, fault.subject) for fault in faults] == [("persistence_off", "0000:1e:00.0 (GPU3)")]
    assert "after 12 s" in faults[0].message
    assert [gpu["persistence"] for gpu in got.gpus] == [True, True, True, False]


def test_persistence_that_is_on_is_not_waited_for(captured: Captured) -> None:
    def never(seconds: float) -> None:
        raise AssertionError(seconds)

    _, faults = gpu_report.report(
        captured({COMMAND: HEALTHY}), GpuRequest(persistence=True, persistence_wait=60), sleep=never
    )
    assert faults == []


# --- processes and reasons --------------------------------------------------------------------------------------------


def description(processes: str, reasons: str = "") -> str:
    return (
        '<nvidia_smi_log><attached_gpus>1</attached_gpus><gpu id="00000000:1A:00.0">'
        "<product_name>Tesla V100</product_name>"
        f"<temperature><gpu_temp>40 C</gpu_temp></temperature>{reasons}{processes}</gpu></nvidia_smi_log>"
    )


def process(pid: int, kind: str, name: str) -> str:
    return (
        f"<process_info><pid>{pid}</pid><type>{kind}</type><process_name>{name}</process_name>"
        "<used_memory>2048 MiB</used_memory></process_info>"
    )


def test_only_foreign_compute_processes_are_in_the_way(captured: Captured) -> None:
    listed = (
        process(10, "C", "/opt/llama.cpp/bin/llama-server")
        + process(11, "G", "/usr/lib/xorg/Xorg")
        + process(12, "C", "python3")
        + process(13, "M+C", "/usr/bin/vllm serve")
    )
    smi = captured({"-q -x": description(f"<processes>{listed}</processes>")})
    got, faults = gpu_report.report(smi, GpuRequest(no_other_processes=True))
    assert [fault.code for fault in faults] == ["gpu_in_use", "gpu_in_use"]
    assert "python3 (pid 12) holds 2048 MiB" in faults[0].message
    assert "vllm (pid 13)" in faults[1].message
    assert [item["pid"] for item in got.gpus[0]["processes"]] == [10, 11, 12, 13]


def test_processes_that_a_driver_does_not_list_are_unknown(captured: Captured) -> None:
    got, faults = gpu_report.report(
        captured({"-q -x": description("<processes>N/A</processes>")}), GpuRequest(no_other_processes=True)
    )
    assert got.gpus[0]["processes"] is None
    assert codes(faults) == ["gpu_value_unknown"]


@pytest.mark.parametrize("word", ["throttle", "event"])
def test_both_headings_of_clock_reasons_and_no_counter_for_a_flag(word: str, captured: Captured) -> None:
    """B06: the section was renamed, and a block of counters with the same names was added."""
    name = f"clocks_{word}_reason"
    reasons = (
        f"<{name}s><{name}_gpu_idle>Not Active</{name}_gpu_idle>"
        f"<{name}_hw_thermal_slowdown>Active</{name}_hw_thermal_slowdown>"
        f"<{name}_sw_thermal_slowdown>Not Active</{name}_sw_thermal_slowdown></{name}s>"
        f"<{name}s_counters><{name}s_counters_sw_thermal_slowdown>903158 us</{name}s_counters_sw_thermal_slowdown>"
        f"</{name}s_counters>"
    )
    got, faults = gpu_report.report(captured({"-q -x": description("", reasons)}), GpuRequest(processes=True))
    assert got.gpus[0]["clock_reasons"] == ["hw_thermal_slowdown"]
    assert codes(faults) == ["gpu_slowed_down"]


def test_a_power_cap_alone_is_normal_work(captured: Captured) -> None:
    """B14."""
    text = table(*(row(index, reasons="0x0000000000000004") for index in range(4)))
    got, faults = gpu_report.report(captured({COMMAND: text}, pci=PCI), EVERYTHING)
    assert faults == []
    assert got.gpus[0]["clock_reasons"] == ["sw_power_cap"]


# --- single values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:AF:00.0", "0000:af:00.0"),
        ("000:BA:80.0", "0000:ba:80.0"),
        ("GPU0000:02:00.0", "0000:02:00.0"),
        ("GPU3: 0000:5F:00.0: Unknown Error", "0000:5f:00.0"),
        ("02:00.0", "0000:02:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("NVRM: Xid (PCI:0000:44:00.0): 79", "0000:44:00.0"),
        ("2027-04-01T10:00:00.0", None),
        ("none", None),
        ("", None),
    ],
)
def test_bus_ids_of_any_width(text: str, want: str | None) -> None:
    assert values.bus_id(text) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("32768 MiB", 32768),
        ("32768", 32768),
        ("32 GiB", 32768),
        ("1048576 KiB", 1024),
        ("-1 MiB", None),
        ("7 bananas", None),
    ],
)
def test_memory_sizes(text: str, want: int | None) -> None:
    value, reason = values.mib(text)
    assert value == want
    assert (reason is None) == (want is not None)


def test_a_counter_with_all_bits_set_is_not_available() -> None:
    assert values.count("18446744073709551615") == (None, "not available")
    assert values.count("0") == (0, None)


@pytest.mark.parametrize(
    ("version", "branch", "fits"),
    [
        ("535.261.03", "535", True),
        ("535.261.03", "535.261", True),
        ("535.261.03", "535.26", False),
        ("550.90.07", "550.107.02", False),
        ("5350.1.1", "535", False),
        ("535.261.03", "550", False),
    ],
)
def test_driver_branches_compare_as_numbers(version: str, branch: str, fits: bool, captured: Captured) -> None:
    _, faults = gpu_report.report(captured({COMMAND: HEALTHY}, version=version), GpuRequest(driver_branch=branch))
    assert codes(faults) == ([] if fits else ["driver_branch_mismatch"])


@pytest.mark.parametrize(
    ("expected", "product", "pci_id", "fits"),
    [
        ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-32GB", "10de:1db5", True),
        ("NVIDIA V100-SXM2-32GB", "Tesla V100-SXM2-32GB", None, True),
        ("V100-SXM2", "Tesla V100-SXM2-32GB", None, True),
        ("v100", "Tesla V100-SXM2-32GB", None, True),
        ("10de:1db5", "something renamed", "10de:1db5", True),
        ("0x1DB5", "something renamed", "10de:1db5", True),
        ("10de:1db1", "Tesla V100-SXM2-32GB", "10de:1db5", False),
        ("A10", "NVIDIA A100-SXM4-40GB", None, False),
        ("V100-SXM2-32GB", "Tesla V100-SXM2-16GB", "10de:1db1", False),
        ("V100", None, None, False),
    ],
)
def test_products_match_by_whole_words_or_pci_id(
    expected: str, product: str | None, pci_id: str | None, fits: bool
) -> None:
    have: dict[str, Any] = {"product": product, "pci_id": pci_id}
    assert gpu_report.matches_product(expected, have) is fits


@pytest.mark.parametrize("device", ["1d81", *(f"1db{digit}" for digit in "12345678a"), "1df5", "1df6"])
def test_every_volta_card_is_known(device: str) -> None:
    assert products.compute_capability_of(f"10de:{device}") == "7.0"
    assert products.product_of(f"0x{device.upper()}10DE")


@pytest.mark.parametrize(
    ("product", "links"),
    [
        ("Tesla V100-SXM2-32GB", 6),
        ("Tesla V100-SXM3-32GB", 6),
        ("Tesla V100-PCIE-32GB", None),
        ("NVIDIA A100-SXM4-80GB", 12),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA H100 80GB HBM3", 18),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", 18),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        (None, None),
    ],
)
def test_links_of_a_product(product: str | None, links: int | None) -> None:
    assert products.nvlinks_of(product) == links


def test_the_loaded_version_of_both_flavours(captured: Captured, tmp_path: Path) -> None:
    smi = captured({}, version="535.261.03")
    assert inventory.loaded_version(smi.machine) == "535.261.03"
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \n"
    )
    assert inventory.loaded_version(smi.machine) == "580.159.04"


def test_cards_of_the_driver(captured: Captured, tmp_path: Path) -> None:
    smi = captured({COMMAND: HEALTHY})
    card = tmp_path / "proc/driver/nvidia/gpus/0000:1a:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text(
        "Model: \t\t Tesla V100-SXM2-32GB\nIRQ:   \t\t 72\nGPU UUID: \t GPU-????????-????-????-????-????????????\n"
        "Video BIOS: \t ??.??.??.??.??\nBus Type: \t PCIe\nBus Location: \t 0000:1a:00.0\nDevice Minor: \t 0\n"
        "GPU Excluded:\t No\n"
    )
    got, _ = gpu_report.report(smi, GpuRequest())
    assert got.driver["gpus"] == [
        {"bus_id": "0000:1a:00.0", "product": "Tesla V100-SXM2-32GB", "uuid": None, "excluded": False}
    ]


def test_living_cards_that_do_not_answer_by_name_leave_the_lost_one(captured: Captured) -> None:
    """``-i`` with cards that the driver does not use prints "No devices were found" and exits 6 (measured, 580)."""
    lost = "Unable to determine the device handle for GPU0000:1D:00.0: Unknown Error\n"
    others = f"{COMMAND} -i 0000:1a:00.0,0000:1c:00.0,0000:1e:00.0"
    got, faults = gpu_report.report(
        captured({COMMAND: (6, lost), others: (6, "No devices were found\n")}, pci=PCI), EVERYTHING
    )
    assert (got.state, got.gpu_count, codes(faults)) == ("gpu_lost", None, ["gpu_lost"])


@pytest.mark.parametrize("name", ["a < b", "a & b", "\x01\x08\x1f", "<", "</process_name>", "&#1;"])
def test_the_name_of_a_process_does_not_cost_a_card(name: str, captured: Captured) -> None:
    listed = f"<process_info><pid>7</pid><type>C</type><process_name>{name}</process_name></process_info>"
    smi = captured({"-q -x": description(f"<processes>{listed}</processes>")})
    got, faults = gpu_report.report(smi, GpuRequest(no_other_processes=True))
    assert (got.gpu_count, got.gpus[0]["temperature_c"]) == (1, 40)
    if name.isprintable():
        assert got.gpus[0]["processes"] is None
        assert codes(faults) == ["gpu_value_unknown"]
        assert "not well-formed" in faults[0].message
    else:
        assert codes(faults) == ["gpu_in_use"]


# --- what is not a GPU, or not another one ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        HEALTHY + HEALTHY,
        HEALTHY + row(2) + "\n",
        HEALTHY + row(1, core="36") + "\n",
        "\n".join(row(index) for index in (0, 1, 2, 3, 0, 1, 2, 3)) + "\n",
    ],
    ids=["two tables", "a row twice", "a later reading", "no header"],
)
def test_a_gpu_that_is_listed_twice_is_one_gpu(text: str, captured: Captured) -> None:
    got, faults = gpu_report.report(captured({COMMAND: text}, pci=PCI), GpuRequest(expected_count=4))
    assert (got.gpu_count, [gpu["bus_id"] for gpu in got.gpus]) == (4, CARDS)
    assert [gpu["temperature_c"] for gpu in got.gpus] == [35] * 4
    assert codes(faults) == ["gpu_listed_twice"]
    _, faults = gpu_report.report(captured({COMMAND: text}), GpuRequest(expected_count=8))
    assert codes(faults) == ["gpu_missing", "gpu_listed_twice"]


def test_a_description_that_stands_twice_is_one_gpu(captured: Captured) -> None:
    text = description("<processes></processes>")
    got, faults = gpu_report.report(captured({"-q -x": text + text}), GpuRequest(processes=True))
    assert (got.gpu_count, codes(faults)) == (1, ["gpu_listed_twice"])


def test_uuids_made_alike_do_not_make_one_gpu_of_two() -> None:
    text = "index, uuid, pci.bus_id\n" + "".join(f"{n}, GPU-0, 00000000:1{n}:00.0\n" for n in range(2))
    assert len(inventory.parse_csv(text).gpus) == 2
    text = "index, uuid\n0, GPU-0\n0, GPU-0\n1, GPU-1\n"
    assert [gpu.values["index"] for gpu in inventory.parse_csv(text).gpus] == [0, 1]


@pytest.mark.parametrize("cell", ["1", "x", "0"])
def test_a_row_without_the_ids_of_a_gpu_is_none(cell: str, captured: Captured) -> None:
    noise = ", ".join([cell] * len(QUERY.split(","))) if cell != "x" else row(3, bus="x")
    text = table(*(row(index) for index in range(3)), noise)
    got, faults = gpu_report.report(captured({COMMAND: text}), GpuRequest(expected_count=4))
    assert got.gpu_count == 3
    assert codes(faults) == ["nvidia_smi_unparsable", "gpu_missing"]


@pytest.mark.parametrize("text", ["4294967295", str(2**64 - 1), str(2**63 - 1), "18446744073709551615 MiB"])
def test_all_bits_set_is_no_value(text: str) -> None:
    readers: tuple[Callable[[str], tuple[object, str | None]], ...] = (values.number, values.mib, values.count)
    for read in readers:
        value, reason = read(text)
        assert value is None
        assert reason


@pytest.mark.parametrize("text", ["17592186044415 MiB", "17592186044416"])
def test_all_bits_set_in_bytes_is_no_memory_size(text: str) -> None:
    assert values.mib(text) == (None, "not available")


def test_all_bits_set_in_other_units() -> None:
    assert values.number("4294967.30 W") == (None, "not available")
    assert inventory.clock_reasons("0xFFFFFFFFFFFFFFFF") == (None, "not available")
    assert values.count("4294967294") == (4294967294, None)
    assert values.mib("183359 MiB") == (183359, None)


def test_a_value_with_all_bits_set_meets_and_breaks_no_limit(captured: Captured) -> None:
    text = table(row(0, core="4294967295", memory=f"{2**64 - 1} MiB"))
    _, faults = gpu_report.report(captured({COMMAND: text}), GpuRequest(max_temperature=80, min_memory_mib=32000))
    assert codes(faults) == ["gpu_value_unknown", "gpu_value_unknown"]
