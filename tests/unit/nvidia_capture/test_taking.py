# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Taking a capture: it reads as the machine did, it holds only what was read, and no identities."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import capture, driver, gpu_report, link_report
from ansible_collections.volta.llm.plugins.module_utils.nvidia.smi import NvidiaSmi
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.gpu_simulator import gpu_simulator


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """A simulated machine; ``program`` is its nvidia-smi."""
    state = tmp_path / "state.json"
    monkeypatch.setenv("GPU_SIMULATOR_STATE", str(state))
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/linked/nvidia-smi "$@"\n')
    program.chmod(0o755)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/nvidia-smi").symlink_to(gpu_simulator.__file__)

    class Simulated:
        sysroot = str(tmp_path / "sysroot")
        smi = str(program)

        def control(self, *words: str) -> None:
            assert gpu_simulator.control(["--state", str(state), *words]) == 0

        def quiet(self) -> None:
            data = json.loads(state.read_text())
            data["engines"] = []
            state.write_text(json.dumps(data))

    machine = Simulated()
    machine.control("install", "--kernel", "6.1.0-37-amd64")
    machine.quiet()
    return machine


def unpacked(taken: capture.Capture, where: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(capture.archive(taken)), mode="r:gz") as tar:
        for entry in tar.getmembers():
            assert not entry.name.startswith(("/", ".."))
            assert (entry.uid, entry.gid, entry.mtime) == (0, 0, 0)
        # Python 3.13 warns where no filter is named, and the oldest ones have none.
        tar.extractall(where, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return where


def read_all(machine: Machine, smi: str) -> tuple[object, ...]:
    """What the three modules make of a machine."""
    gpus, gpu_faults = gpu_report.report(NvidiaSmi(machine, smi), gpu_report.GpuRequest(expected_count=4))
    links, link_faults = link_report.report(NvidiaSmi(machine, smi), link_report.LinkRequest(require="full_mesh"))
    judgement = driver.judge(driver.read(machine))
    return (
        gpus.state,
        gpus.gpu_count,
        gpu_faults,
        [{**gpu, "uuid": None} for gpu in gpus.gpus],
        links.pairs,
        link_faults,
        judgement,
    )


@pytest.mark.parametrize(
    "fault",
    [None, ("lose-card", "2"), ("link-down", "1", "3"), ("mismatch",), ("no-driver", "unbuilt"), ("nouveau",)],
    ids=lambda fault: "healthy" if fault is None else fault[0],
)
def test_the_capture_reads_as_the_machine_did(simulated, tmp_path, fault):
    if fault is not None:
        simulated.control("fault", *fault)
        simulated.quiet()
    live = read_all(Machine(simulated.sysroot), simulated.smi)
    taken = capture.take(capture.Recorder(simulated.sysroot), simulated.smi)
    folder = unpacked(taken, tmp_path / "capture")
    copy = Machine(str(folder))
    assert copy.is_capture
    assert read_all(copy, "nvidia-smi") == live
    assert copy.processes == 0


def test_the_same_capture_is_the_same_bytes(simulated):
    taken = capture.take(capture.Recorder(simulated.sysroot), simulated.smi)
    assert capture.archive(taken) == capture.archive(taken)


def test_only_what_was_read_is_kept(simulated):
    taken = capture.take(capture.Recorder(simulated.sysroot), simulated.smi)
    tops = {path.split("/")[0] for path in (*taken.files, *taken.links)}
    assert tops <= {"boot", "dev", "etc", "lib", "proc", "sys", "usr", "var"}
    assert not any(path.startswith("etc/") and "release" not in path and "apt" not in path and "modprobe" not in path
                   and "grub" not in path for path in taken.files)  # fmt: skip
    assert taken.files["lib/modules/6.1.0-37-amd64/updates/dkms/nvidia.ko"] == b""
    assert taken.left_out == []


def test_a_program_that_did_not_end_is_recorded_as_such(simulated, tmp_path):
    simulated.control("fault", "slow", "60")
    simulated.quiet()
    taken = capture.take(capture.Recorder(simulated.sysroot, timeout=0.2), simulated.smi)
    folder = unpacked(taken, tmp_path / "capture")
    records = json.loads((folder / "commands/index.json").read_text())
    assert all(record["timed_out"] and record["rc"] is None for record in records if record["argv"][0] == "nvidia-smi")
    report, _ = gpu_report.report(NvidiaSmi(Machine(str(folder))), gpu_report.GpuRequest())
    assert report.state == "timeout"


HOST = ["gpubox7.example.org"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "GPU 0: Tesla V100 (UUID: GPU-f3bbf1a0-ec50-caa0-d5ab-180afe8207e3)",
            "GPU 0: Tesla V100 (UUID: GPU-00000000-0000-0000-0000-000000000001)",
        ),
        ("eth0 at 3c:ec:ef:12:34:56 up", "eth0 at 00:00:00:00:00:01 up"),
        ("from 10.20.30.40 port 22", "from 192.0.2.1 port 22"),
        ("/home/alice/bin/python", "/home/user/bin/python"),
        ("signer: gpubox7 Secure Boot Module Signature key", "signer: host Secure Boot Module Signature key"),
        ("gpubox7.example.org said", "host said"),
        # What looks alike and must stay.
        ("vbios 88.00.80.00.01", "vbios 88.00.80.00.01"),
        ("Driver Version: 535.261.03  CUDA 12.2", "Driver Version: 535.261.03  CUDA 12.2"),
        ("pci 0000:1a:00.0 and 00000000:1A:00.0", "pci 0000:1a:00.0 and 00000000:1A:00.0"),
        ("kernel 5.15.0-91-generic", "kernel 5.15.0-91-generic"),
        ("gpubox77 is another", "gpubox77 is another"),
    ],
)
def test_identities_are_replaced_and_look_alikes_are_not(text, expected):
    assert capture.Identities(HOST).replace(text) == expected


def test_the_same_identity_gets_the_same_stand_in():
    identities = capture.Identities([])
    first, second = "f3bbf1a0-ec50-caa0-d5ab-180afe8207e3", "68acf7f1-73a9-a303-c14a-9615d3bd6511"
    text = identities.replace(f"GPU-{first} GPU-{second} GPU-{first.upper()}")
    assert text.split() == [f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in (1, 2, 1)]
    assert identities.counts()["uuid"] == 2


def test_serial_numbers_go_wherever_they_stand():
    identities = capture.Identities([])
    identities.learn(["    Serial Number                         : 0324218203972\n"])
    assert identities.replace("0, Tesla V100, 0324218203972, 34") == "0, Tesla V100, 0000000000001, 34"
    assert identities.replace("<serial>0324218203972</serial>") == "<serial>0000000000001</serial>"
    assert identities.replace("<pdi>0xdeadbeef12345678</pdi>") == "<pdi>0x0000000000000000</pdi>"


def test_host_names_that_are_ordinary_words_do_not_ruin_the_texts():
    assert capture.Identities(["gpu"]).replace("nvidia-smi: gpu 0") == "nvidia-smi: gpu 0"


@given(st.text(alphabet="0123456789abcdef-:. \n", max_size=200))
def test_replacing_twice_changes_nothing_more(text):
    once = capture.Identities(HOST).replace(text)
    assert capture.Identities(HOST).replace(once).count("\n") == once.count("\n")
    for left in capture._UUID.findall(once):
        assert left.startswith("00000000-0000-0000-0000-")


def test_logs_are_cut_to_gpu_lines_without_the_host_name():
    log = (
        "2026-09-14T20:30:26-0400 gpubox7 kernel: usb 1-1: new device\n"
        "2026-09-14T20:30:27-0400 gpubox7 kernel: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"
        "Sep 14 20:30:28 gpubox7 kernel: NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.\n"
    )
    assert capture._cut_output("journalctl", log) == (
        "2026-09-14T20:30:27-0400 host kernel: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"
        "Sep 14 20:30:28 host kernel: NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.\n"
    )


def test_boot_menu_is_cut_to_entries_and_kernels():
    text = (
        'password_pbkdf2 root grub.pbkdf2.sha512.10000.ABCDEF\nmenuentry "Debian" {\n\tinsmod gzio\n'
        "\tlinux\t/boot/vmlinuz-6.1.0-37-amd64 root=UUID=1 ro secret=1\n}\n"
    )
    cut = capture._cut("/boot/grub/grub.cfg", text)
    assert cut == 'menuentry "Debian" {\n\tlinux\t/boot/vmlinuz-6.1.0-37-amd64\n}\n'


def test_kernel_arguments_are_cut_to_those_about_drivers():
    text = (
        "BOOT_IMAGE=/vmlinuz root=/dev/mapper/secret-root ro nouveau.modeset=0 ip=10.0.0.1 modprobe.blacklist=nouveau"
    )
    assert capture._cut("/proc/cmdline", text) == (
        "BOOT_IMAGE=/vmlinuz ro nouveau.modeset=0 modprobe.blacklist=nouveau\n"
    )


def test_package_database_is_cut_to_driver_and_kernel():
    text = (
        "Package: firefox\nStatus: install ok installed\nVersion: 1\n\n"
        "Package: nvidia-smi\nStatus: hold ok installed\nVersion: 535.261.03-1\nMaintainer: someone <a@b.c>\n\n"
    )
    assert capture._cut("/var/lib/dpkg/status", text) == (
        "Package: nvidia-smi\nStatus: hold ok installed\nVersion: 535.261.03-1\n"
    )


def test_rotated_history_stays_readable_and_loses_other_packages_and_people(simulated, tmp_path):
    root = tmp_path / "root"
    (root / "var/log/apt").mkdir(parents=True)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    (root / "usr/lib").mkdir(parents=True)
    (root / "usr/lib/libnvidia-ml.so.460.73.01").touch()
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  460.56  Tue\n")
    history = (
        "Start-Date: 2021-04-28  06:12:41\nCommandline: /usr/bin/unattended-upgrade\nRequested-By: alice (1000)\n"
        "Upgrade: libnvidia-common-460:amd64 (460.56-0ubuntu0.20.04.1, 460.73.01-0ubuntu0.20.04.1), vim:amd64 (1, 2)\n"
        "End-Date: 2021-04-28  06:12:43\n"
    )
    (root / "var/log/apt/history.log.1.gz").write_bytes(gzip.compress(history.encode()))
    taken = capture.take(capture.Recorder(str(root)), simulated.smi)
    text = gzip.decompress(taken.files["var/log/apt/history.log.1.gz"]).decode()
    assert "alice" not in text
    assert "vim" not in text
    state = driver.read(Machine(str(unpacked(taken, tmp_path / "capture"))))
    assert state.upgrade is not None
    assert state.upgrade.unattended
