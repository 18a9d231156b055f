# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The captures in fixtures/captures, read by the three modules without the machine they came from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver, gpu_report, link_report
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi

CAPTURES = Path(__file__).parent.parent / "fixtures/captures"

#: Capture: GPUs expected, state and count of gpu_inventory, a fault among its faults; full mesh of nvlink_topology, a
#: fault among its faults; verdict of driver_state.
EXPECTED = {
    "healthy-v100x4": (4, "ok", 4, None, True, None, "ok"),
    "healthy-v100x8": (8, "ok", 8, None, False, "nvlink_not_full_mesh", "ok"),
    "lost-card": (4, "degraded", 3, "gpu_lost", None, "topology_unavailable", "replace_hardware"),
    "missing-card": (4, "degraded", 3, "gpu_missing", True, None, "ok"),
    "inactive-links": (4, "ok", 4, None, True, "nvlink_inactive", "ok"),
    "version-mismatch": (4, "driver_mismatch", None, "driver_mismatch", None, "driver_mismatch", "reboot_required"),
    "no-driver": (4, "no_driver", None, "no_driver", None, "no_driver", "not_installed"),
    "nouveau": (4, "no_driver", None, "no_driver", None, "no_driver", "blacklist_nouveau"),
    "pcie-only": (4, "ok", 4, None, False, "nvlink_not_full_mesh", "ok"),
    "open-module": (4, "no_devices", 0, "no_devices", None, "topology_unavailable", "wrong_flavour"),
    "hot-slow-clocks-and-ecc": (4, "degraded", 4, "page_retirement_pending", True, None, "reset_gpu"),
    "no-answer": (4, "timeout", None, "nvidia_smi_timeout", None, "nvidia_smi_timeout", "ok"),
    "h200x2-live": (2, "ok", 2, None, True, None, "ok"),
}


def test_every_capture_is_expected_to_read_in_some_way():
    assert {folder.name for folder in CAPTURES.iterdir() if folder.is_dir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_gpu_inventory_reads_the_capture(name):
    count, state, found, code, _, _, _ = EXPECTED[name]
    machine = Machine(str(CAPTURES / name))
    report, faults = gpu_report.report(NvidiaSmi(machine), gpu_report.GpuRequest(expected_count=count))
    assert (report.state, report.gpu_count) == (state, found)
    assert code is None or code in [fault.code for fault in faults]
    assert machine.processes == 0


@pytest.mark.parametrize("name", EXPECTED)
def test_nvlink_topology_reads_the_capture(name):
    _, _, _, _, mesh, code, _ = EXPECTED[name]
    machine = Machine(str(CAPTURES / name))
    report, faults = link_report.report(NvidiaSmi(machine), link_report.LinkRequest(require="full_mesh"))
    codes = [fault.code for fault in faults]
    assert report.fully_connected is mesh
    assert (code in codes) if code else codes == []


@pytest.mark.parametrize("name", EXPECTED)
def test_driver_state_reads_the_capture(name):
    machine = Machine(str(CAPTURES / name))
    assert driver.judge(driver.read(machine)).verdict == EXPECTED[name][6]
    assert machine.processes == 0


def test_what_the_live_capture_does_not_hold_is_unknown():
    state = driver.read(Machine(str(CAPTURES / "h200x2-live")))
    assert state.unknown == ["module on disk"]
    assert state.loaded == driver.Loaded("580.159.04", "open")
    assert state.userland == "580.159.04"
    assert driver.judge(state).reason == "driver 580.159.04 is loaded; not known: module on disk"


@pytest.mark.parametrize("name", EXPECTED)
def test_capture_holds_no_identity(name):
    """Only stand-ins: no UUID, MAC address or home folder but made-up ones."""
    for path in (CAPTURES / name).rglob("*"):
        if not path.is_file() or path.is_symlink():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for uuid in re.findall(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", text, re.IGNORECASE):
            assert uuid.startswith("00000000-0000-"), path
        assert not re.search(r"(?<![\w:])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![\w:])", text, re.IGNORECASE), path
        assert not re.search(r"/home/(?!user\b)", text), path
        for serial in re.findall(r"<serial>(\w+)</serial>", text):
            assert re.fullmatch(r"0{9}\d{4}|N", serial), path


@pytest.mark.parametrize("name", EXPECTED)
def test_every_record_has_its_files_and_an_exit_status(name):
    folder = CAPTURES / name / "commands"
    for record in json.loads((folder / "index.json").read_text()):
        assert record["argv"][0] in {"nvidia-smi", "modinfo", "dkms", "lsinitramfs", "journalctl", "dmesg", "mokutil"}
        assert isinstance(record["rc"], int) or record["timed_out"]
        for stream in ("stdout", "stderr"):
            assert stream not in record or (folder / record[stream]).is_file()
