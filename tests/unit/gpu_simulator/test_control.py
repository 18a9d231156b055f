# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Faults, state and the simulated root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine

from tests.lab.gpu_simulator import gpu_simulator
from tests.unit.gpu_simulator.conftest import install

PROGRAM = Path(gpu_simulator.__file__)
BUS = "sys/bus/pci/devices"


def nvidia_devices(sysroot: Path) -> list[str]:
    folder = sysroot / BUS
    return sorted(
        entry.name for entry in folder.iterdir() if (entry / "vendor").read_text().strip() == "0x10de"
    )  # fmt: skip


def test_every_profile_answers_everything(machine):
    for profile in gpu_simulator.PROFILES:
        install(machine, profile)
        count = len(json.loads(machine.state.read_text())["gpus"])
        assert len(machine.smi("-L").out.splitlines()) == count
        for words in ((), ("-q",), ("-q", "-x"), ("topo", "-m"), ("topo", "-p2p", "r"), ("nvlink", "-s")):
            assert machine.smi(*words).rc == 0, (profile, words)
        assert len(nvidia_devices(machine.sysroot)) == count


def test_pcie_cards_have_no_links_to_speak_of(machine):
    """The real tool prints nothing at all for a card without NVLink, and exits 0."""
    install(machine, "v100x4-pcie")
    answer = machine.smi("nvlink", "-s")
    assert (answer.rc, answer.out) == (0, "")
    assert "NV2" not in machine.smi("topo", "-m").out


def test_lost_card_leaves_the_others_readable(machine):
    machine.control("fault", "lose-card", "2")
    whole = machine.smi("--query-gpu=index", "--format=csv,noheader")
    assert whole.rc == 15
    assert whole.out.startswith("Unable to determine the device handle for GPU0000:1D:00.0: GPU is lost.")
    others = machine.smi("--query-gpu=index", "--format=csv,noheader", "-i", "0,1,3")
    assert (others.rc, others.out) == (0, "0\n1\n3\n")
    listing = machine.smi("-L")
    assert listing.rc == 15
    assert listing.out.count("Tesla V100") == 2
    assert machine.smi("topo", "-m").rc == 255
    device = machine.sysroot / BUS / "0000:1d:00.0"
    assert (device / "config").read_bytes() == b"\xff" * 64
    assert (
        "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus" in (machine.sysroot / "dev/kmsg").read_text()
    )


def test_lost_card_whose_fields_say_so(machine):
    machine.control("fault", "lose-card", "2", "fields")
    answer = machine.smi("--query-gpu=index,temperature.gpu", "--format=csv,noheader")
    assert (answer.rc, answer.out) == (0, "0, 34\n1, 34\n2, [GPU is lost]\n3, 34\n")


def test_removed_card_is_gone_from_pci_too(machine):
    machine.control("fault", "remove-card", "1")
    assert nvidia_devices(machine.sysroot) == ["0000:1a:00.0", "0000:1d:00.0", "0000:1e:00.0"]
    rows = machine.smi("--query-gpu=index,pci.bus_id", "--format=csv,noheader").out
    assert rows == "0, 00000000:1A:00.0\n1, 00000000:1D:00.0\n2, 00000000:1E:00.0\n"
    assert machine.smi("topo", "-m").out.splitlines()[1].split("\t")[:4] == ["GPU0", " X ", "NV2", "NV2"]


def test_inactive_link_is_inactive_at_both_ends_and_missing_in_the_matrix(machine):
    machine.control("fault", "link-down", "0", "0")
    status = machine.smi("nvlink", "-s").out
    assert status.count("<inactive>") == 2
    assert machine.smi("topo", "-m").out.splitlines()[1].split("\t")[1:5] == [" X ", "NV1", "NV2", "NV2"]


def test_several_faults_add_up_and_are_cleared_one_kind_at_a_time(machine):
    machine.control("fault", "hot", "0", "91", "99")
    machine.control("fault", "throttle", "1", "sw-power-cap")
    machine.control("fault", "ecc", "2", "volatile", "5")
    machine.control("fault", "ecc", "2", "aggregate", "7", "corrected")
    machine.control("fault", "pending-retirement", "3")
    machine.control("fault", "retire", "3", "2")
    machine.control("fault", "pcie", "3", "1", "4")
    fields = (
        "temperature.gpu,temperature.memory,clocks_throttle_reasons.hw_thermal_slowdown,"
        "clocks_event_reasons.sw_power_cap,ecc.errors.uncorrected.volatile.total,ecc.errors.corrected.aggregate.total,"
        "retired_pages.pending,retired_pages.dbe,pcie.link.gen.current,pcie.link.width.current"
    )
    assert machine.smi(f"--query-gpu={fields}", "--format=csv,noheader").out.splitlines() == [
        "91, 99, Active, Not Active, 0, 0, No, 0, 3, 16",
        "34, 33, Not Active, Active, 0, 0, No, 0, 3, 16",
        "34, 33, Not Active, Not Active, 5, 7, No, 0, 3, 16",
        "34, 33, Not Active, Not Active, 0, 0, Yes, 2, 1, 4",
    ]
    machine.control("clear", "hot")
    assert machine.smi(f"--query-gpu={fields}", "--format=csv,noheader").out.startswith("34, 33, Not Active")
    machine.control("clear")
    healthy = "34, 33, Not Active, Not Active, 0, 0, No, 0, 3, 16\n"
    assert machine.smi(f"--query-gpu={fields}", "--format=csv,noheader").out == healthy * 4


@pytest.mark.parametrize("value", ["[N/A]", "[Unknown Error]", "[GPU requires reset]", "ERR!"])
def test_a_single_field_can_be_unreadable(machine, value):
    machine.control("fault", "field", "1", "temperature.gpu", value)
    answer = machine.smi("--query-gpu=temperature.gpu", "--format=csv,noheader")
    assert answer.out == f"34\n{value}\n34\n34\n"


def test_slow_answer_waits(machine, monkeypatch):
    waited = []
    monkeypatch.setattr(gpu_simulator.time, "sleep", waited.append)
    machine.control("fault", "slow", "42.5")
    assert machine.smi("-L").rc == 0
    assert waited == [42.5]


def test_loop_repeats_until_ended(machine):
    program = machine.state.parent / "nvidia-smi"
    program.symlink_to(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(program), "--query-gpu=index", "--format=csv,noheader", "-lms", "10"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(9)]
    # What runs in the background of a shell inherits SIGINT as ignored; SIGTERM ends it there as well.
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert seen == [f"{n % 4}\n" for n in range(9)]


def test_power_limit_and_persistence_stay(machine):
    answer = machine.smi("-pl", "200", "-i", "1")
    assert answer.out == "Power limit for GPU 00000000:1C:00.0 was set to 200.00 W from 300.00 W.\nAll done.\n"
    assert machine.smi("--query-gpu=power.limit", "--format=csv,noheader,nounits").out.split() == [
        "300.00", "200.00", "300.00", "300.00",
    ]  # fmt: skip
    assert machine.smi("-pm", "0", "-i", "3").out == "Disabled persistence mode for GPU 00000000:1E:00.0.\nAll done.\n"
    assert machine.smi("--query-gpu=persistence_mode", "--format=csv,noheader").out.split() == ["Enabled"] * 3 + [
        "Disabled"
    ]


def test_a_change_made_meanwhile_is_kept(machine, monkeypatch):
    machine.control("fault", "slow", "1")

    def meanwhile(_seconds: float) -> None:
        monkeypatch.setattr(gpu_simulator.time, "sleep", lambda _: None)
        assert machine.smi("-pl", "200", "-i", "1").rc == 0

    monkeypatch.setattr(gpu_simulator.time, "sleep", meanwhile)
    machine.smi("-pm", "0", "-i", "3")
    assert _settings(machine) == [("Enabled", 300), ("Enabled", 200), ("Enabled", 300), ("Disabled", 300)]


def test_many_changes_at_once_are_all_kept(machine):
    changes = [["-i", str(card), *words] for card in range(4) for words in (["-pm", "0"], ["-pl", str(200 + card)])]
    argv = [sys.executable, "-c", "import sys; from tests.lab.gpu_simulator import gpu_simulator as tool; "
            "tool.is_root = lambda: True; sys.exit(tool.nvidia_smi(sys.argv[1:]))"]  # fmt: skip
    running = [
        subprocess.Popen([*argv, *words], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
        for words in changes
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(changes), said
    assert _settings(machine) == [("Disabled", 200 + card) for card in range(4)]


def _settings(machine) -> list[tuple[str, float]]:
    out = machine.smi("--query-gpu=persistence_mode,power.limit", "--format=csv,noheader,nounits").out
    return [(mode, float(watts)) for mode, watts in (line.split(", ") for line in out.splitlines())]


def test_without_rights_nothing_is_set(machine, monkeypatch):
    monkeypatch.setattr(gpu_simulator, "is_root", lambda: False)
    before = machine.state.read_text()
    persistence = machine.smi("-pm", "0")
    assert persistence.rc == 4
    assert persistence.out == (
        "Unable to set persistence mode for GPU 00000000:1A:00.0: Insufficient Permissions\n"
        "Terminating early due to previous errors.\n"
    )
    assert machine.smi("-pl", "200").rc == 4
    assert machine.state.read_text() == before


def test_memory_is_attributed_to_a_running_engine(machine):
    """A real process named llama-server, found in /proc as on a lab machine."""
    engine = machine.state.parent / "llama-server"
    shutil.copy(shutil.which("sleep"), engine)
    pattern = f"^{engine}( |$)"
    machine.edit(lambda state: state.update(engines=[{"match": pattern, "mib_per_card": 19968}]))
    query = ("--query-compute-apps=pid,process_name,used_memory,gpu_bus_id", "--format=csv,noheader")
    assert machine.smi(*query).out == ""
    process = subprocess.Popen([str(engine), "600"])
    try:
        rows = machine.smi(*query).out.splitlines()
        assert rows[0] == f"{process.pid}, {engine}, 19968 MiB, 00000000:1A:00.0"
        assert len(rows) == 4
        assert machine.smi("--query-gpu=memory.used", "--format=csv,noheader").out == "19968 MiB\n" * 4
    finally:
        process.kill()
        process.wait()
    assert machine.smi(*query).out == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of processes is made by root alone")
def test_an_engine_of_another_machine_is_on_other_cards(machine):
    """On the host of lab machines their processes are seen as well, by a namespace of their own."""
    engine = machine.state.parent / "llama-server"
    shutil.copy(shutil.which("sleep"), engine)
    machine.edit(lambda state: state.update(engines=[{"match": f"^{engine}( |$)", "mib_per_card": 19968}]))
    process = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", str(engine), "600"])
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for _ in range(200):
            names = [Path(f"/proc/{child}/comm").read_text().strip() for child in children.read_text().split()]
            if names == ["llama-server"]:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the engine did not start")
        assert machine.smi("--query-compute-apps=pid", "--format=csv,noheader").out == ""
    finally:
        process.kill()
        process.wait()


def test_an_engine_holds_only_the_cards_that_it_may_see(machine):
    engine = machine.state.parent / "llama-server"
    shutil.copy(shutil.which("sleep"), engine)
    machine.edit(lambda state: state.update(engines=[{"match": f"^{engine}( |$)", "mib_per_card": 19968}]))
    uuids = machine.smi("--query-gpu=uuid", "--format=csv,noheader").out.split()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": f"0,{uuids[3]}"}
    process = subprocess.Popen([str(engine), "600"], env=environment)
    try:
        used = machine.smi("--query-compute-apps=gpu_uuid", "--format=csv,noheader").out.split()
    finally:
        process.kill()
        process.wait()
    assert used == [uuids[0], uuids[3]]


def test_default_engines_match_the_programs_and_not_who_mentions_them():
    import re

    def matches(line: str) -> bool:
        return any(
            re.search(engine["match"], " ".join(line.split(" ")[:2])) for engine in gpu_simulator.DEFAULT_ENGINES
        )

    assert matches("/opt/llama.cpp/current/bin/llama-server --port 8080")
    assert matches("/usr/local/bin/ollama runner --model x")
    assert not matches("/usr/local/bin/ollama serve")
    assert not matches("/usr/bin/tail -f /var/log/llama-server.log")


def test_the_tool_on_a_machine_without_a_simulated_driver(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.symlink_to(PROGRAM)
    environment = {**os.environ, "GPU_SIMULATOR_STATE": str(tmp_path / "none.json")}
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 9
    assert ended.stdout.startswith("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")


def test_simulated_root_is_one_coherent_machine(machine):
    """Read through the collection's own Machine: simulated where it is about the GPU, the real machine elsewhere."""
    seen = Machine(str(machine.sysroot))
    assert not seen.is_capture
    assert "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03" in (
        seen.read("/proc/driver/nvidia/version") or ""
    )
    assert seen.read("/sys/module/nvidia/version") == "535.261.03\n"
    assert (seen.read("/proc/modules") or "").startswith("nvidia_uvm ")
    assert seen.listdir("/proc/driver/nvidia/gpus") == [f"0000:{bus}:00.0" for bus in ("1a", "1c", "1d", "1e")]
    assert "Tesla V100-SXM2-32GB" in (seen.read("/proc/driver/nvidia/gpus/0000:1a:00.0/information") or "")
    assert seen.read("/proc/cmdline") == Path("/proc/cmdline").read_text()
    assert seen.read("/proc/sys/kernel/osrelease") == Path("/proc/sys/kernel/osrelease").read_text()
    assert seen.read("/etc/os-release") == Path("/etc/os-release").read_text()
    assert (seen.read("/proc/meminfo") or "").startswith("MemTotal:")
    assert seen.read("/sys/bus/pci/devices/0000:1a:00.0/device") == "0x1db5\n"
    assert seen.exists("/usr/lib64/libnvidia-ml.so.535.261.03")
    assert seen.exists(f"/lib/modules/{os.uname().release}/updates/dkms/nvidia-uvm.ko")
    assert seen.exists("/dev/nvidia3")
    assert not seen.exists("/dev/nvidia4")


def test_simulated_root_follows_every_change_and_leaves_no_old_one(machine):
    for words in (("fault", "no-driver", "absent"), ("clear",), ("fault", "nouveau"), ("clear",)):
        machine.control(*words)
    leftovers = [entry.name for entry in machine.state.parent.iterdir() if entry.name.startswith(".")]
    assert len(leftovers) == 1
    assert machine.sysroot.resolve().name == leftovers[0]
    assert (machine.sysroot / "proc/driver/nvidia/version").exists()


@pytest.mark.parametrize(
    ("fault", "loaded", "rc"),
    [
        (("mismatch",), "535.247.01", 18),
        (("no-driver",), None, 9),
        (("no-driver", "absent"), None, 9),
        (("nouveau",), None, 9),
        (("secure-boot",), None, 9),
        (("no-devices",), "535.261.03", 6),
    ],
)  # fmt: skip
def test_driver_faults_show_in_the_root_as_in_the_tool(machine, fault, loaded, rc):
    machine.control("fault", *fault)
    seen = Machine(str(machine.sysroot))
    assert machine.smi().rc == rc
    assert (seen.read("/sys/module/nvidia/version") or "").strip() == (loaded or "")
    assert ("nvidia " in (seen.read("/proc/modules") or "")) == (loaded is not None)
    assert ("nouveau" in (seen.read("/proc/modules") or "")) == (fault == ("nouveau",))
    assert seen.exists("/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c") == (
        fault == ("secure-boot",)
    )


def test_open_module_on_volta_says_why_in_the_kernel_log(machine):
    machine.control("fault", "open-module")
    seen = Machine(str(machine.sysroot))
    assert "NVIDIA UNIX Open Kernel Module for x86_64  535.261.03" in (seen.read("/proc/driver/nvidia/version") or "")
    log = seen.read("/dev/kmsg") or ""
    assert "NVRM: The NVIDIA GPU 0000:1a:00.0 (PCI ID: 10de:1db5)" in log
    assert "NVRM: System Processor (GSP)." in log
    assert seen.listdir("/proc/driver/nvidia/gpus") == []
    assert machine.smi().rc == 6


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("fault", "melt", "0"), "unknown fault 'melt'; known: lose-card"),
        (("fault", "lose-card"), "fault lose-card takes gpu [how=handle]: gpu is missing"),
        (("fault", "lose-card", "4"), "there is no card 4; this machine has cards 0 to 3"),
        (("fault", "lose-card", "x"), "gpu is a number, not 'x'"),
        (("fault", "lose-card", "0", "badly"), "how is one of handle, fields, row, not 'badly'"),
        (("fault", "link-down", "0", "6"), "card 0 has 6 NVLinks, numbered from 0; there is no link 6"),
        (("fault", "field", "0", "temperature"), "unknown field 'temperature'"),
        (("fault", "hot", "0", "91", "99", "7"), "fault hot takes gpu [core=86] [memory=97]"),
        (("fault", "mismatch", "new"), "'new' is not a driver version such as 535.247.01"),
        (("clear", "melt"), "unknown fault 'melt'"),
        (("install", "--profile", "v100x5"), "unknown profile 'v100x5'; known: v100x4"),
        (("install", "--driver", "latest"), "driver version 'latest' is not of the form 535.261.03"),
    ],
)  # fmt: skip
def test_bad_control_commands_change_nothing(machine, words, text):
    before = machine.state.read_text()
    answer = machine.control(*words)
    assert answer.rc == 2
    assert text in answer.out
    assert machine.state.read_text() == before


def test_no_state_yet_names_the_command(machine):
    machine.state.unlink()
    answer = machine.control("show")
    assert answer.rc == 2
    assert "run `gpu-sim install` first" in answer.out


def test_older_driver_does_not_know_newer_properties(machine):
    install(machine, "v100x4", "--driver", "470.57.02")
    answer = machine.smi("--query-gpu=compute_cap", "--format=csv")
    assert (answer.rc, answer.out) == (2, 'Field "compute_cap" is not a valid field to query.\n\n')
    assert machine.smi("--query-gpu=clocks_event_reasons.active", "--format=csv").rc == 2
    old = machine.smi("--query-gpu=clocks_throttle_reasons.active", "--format=csv")
    assert old.out.splitlines()[0] == "clocks_throttle_reasons.active"
    assert "clocks_event_reasons" not in machine.smi("--help-query-gpu").out
