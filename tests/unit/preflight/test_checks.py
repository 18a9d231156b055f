# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The checks on captures made here: a folder that stands for a machine's root, with recorded program outputs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import is_fatal
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.preflight import checks
from ansible_collections.volta.llm.plugins.module_utils.preflight.checks import DiskWant, Findings, PortWant

OSES = ["ubuntu-22.04", "ubuntu-24.04", "debian-12", "debian-13"]

# The head of /etc/os-release of the four releases and of three that are not supported, as the distributions ship them.
JAMMY = 'PRETTY_NAME="Ubuntu 22.04.4 LTS"\nNAME="Ubuntu"\nVERSION_ID="22.04"\nID=ubuntu\nID_LIKE=debian\n'
NOBLE = 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n'
BOOKWORM = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian GNU/Linux"\nVERSION_ID="12"\nID=debian\n'
TRIXIE = 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nNAME="Debian GNU/Linux"\nVERSION_ID="13"\nID=debian\n'
FOCAL = 'NAME="Ubuntu"\nID=ubuntu\nPRETTY_NAME="Ubuntu 20.04.6 LTS"\nVERSION_ID="20.04"\n'
MINT = 'NAME="Linux Mint"\nID=linuxmint\nID_LIKE="ubuntu debian"\nPRETTY_NAME="Linux Mint 21.3"\nVERSION_ID="21.3"\n'
SID = 'PRETTY_NAME="Debian GNU/Linux trixie/sid"\nNAME="Debian GNU/Linux"\nID=debian\n'

GOOD_PROGRAMS = {("uname", "-m"): "x86_64\n", ("/usr/bin/python3", "--version"): "Python 3.10.12\n"}


class Capture:
    """Writes a capture of a machine that has nothing wrong; tests then spoil it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.programs: dict[tuple[str, ...], str] = dict(GOOD_PROGRAMS)
        self.write("etc/os-release", JAMMY)
        self.write("proc/1/comm", "systemd\n")
        self.write("proc/meminfo", "MemTotal:       131716892 kB\nMemFree:        128000000 kB\n")
        self.write("usr/bin/apt-get", "")
        self.write("usr/bin/dpkg", "")
        self.write("var/lib/dpkg/status", "Package: bash\nStatus: install ok installed\nVersion: 5.1\n\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def df(self, path: str, source: str, available_mib: int, mount: str) -> None:
        head = "Filesystem 1024-blocks Used Available Capacity Mounted on\n"
        row = f"{source} 999999999 1024 {available_mib * 1024} 1% {mount}\n"
        self.programs[("df", "-P", "-k", path)] = head + row

    def machine(self) -> Machine:
        folder = self.root / "commands"
        folder.mkdir(exist_ok=True)
        index = []
        for number, (argv, text) in enumerate(self.programs.items()):
            (folder / f"{number}.txt").write_text(text)
            index.append({"argv": list(argv), "rc": 0, "stdout": f"{number}.txt"})
        (folder / "index.json").write_text(json.dumps(index))
        return Machine(str(self.root))


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    return Capture(tmp_path)


def codes(found: Findings) -> list[str]:
    return [fault.code for fault in found.faults]


@pytest.mark.parametrize("release", [JAMMY, NOBLE, BOOKWORM, TRIXIE])
def test_supported_machines_have_no_fault(capture: Capture, release: str) -> None:
    capture.write("etc/os-release", release)
    found = Findings()
    machine = capture.machine()

    checks.check_system(machine, found, OSES, ["x86_64"])
    checks.check_packages(machine, found)
    checks.check_python(machine, found)
    checks.check_memory(machine, found, 30720)
    checks.check_clock(machine, found, time.time() - 1e6, 600)

    assert codes(found) == []
    assert found.facts["memory_mib"] == 128629
    assert found.facts["clock_offset_s"] is None  # a capture has no clock


@pytest.mark.parametrize(
    ("release", "subject"),
    [(FOCAL, "ubuntu-20.04"), (MINT, "linuxmint-21.3"), (SID, "/etc/os-release"), ("", "/etc/os-release")],
)
def test_other_systems_are_refused_by_name(capture: Capture, release: str, subject: str) -> None:
    capture.write("etc/os-release", release)
    found = Findings()

    checks.check_system(capture.machine(), found, OSES, ["x86_64"])

    assert [(fault.code, fault.subject) for fault in found.faults] == [("os_unsupported", subject)]


def test_everything_wrong_comes_at_once(capture: Capture) -> None:
    capture.write("etc/os-release", FOCAL)
    capture.write("proc/1/comm", "sh\n")
    capture.write("proc/meminfo", "MemTotal:        8000000 kB\n")
    (capture.root / "usr/bin/apt-get").unlink()
    capture.programs = {("uname", "-m"): "aarch64\n", ("/usr/bin/python3", "--version"): "Python 3.8.10\n"}
    found = Findings()
    machine = capture.machine()

    checks.check_system(machine, found, OSES, ["x86_64"])
    checks.check_packages(machine, found)
    checks.check_python(machine, found)
    checks.check_memory(machine, found, 30720)
    checks.check_disks(machine, found, [DiskWant("/srv/models", 100)])

    assert codes(found) == [
        "os_unsupported",
        "processor_unsupported",
        "init_not_systemd",
        "apt_missing",
        "system_python_too_old",
        "memory_short",
        "disk_unknown",
    ]
    assert found.faults[5].message == "7812 MiB, 30720 MiB are needed"


def test_unfinished_packages_are_a_warning_that_names_them(capture: Capture) -> None:
    capture.write(
        "var/lib/dpkg/status",
        "Package: nvidia-dkms-535\nStatus: install ok half-configured\n\n"
        "Package: bash\nStatus: install ok installed\n\n"
        "Package: nvidia-driver-535\nStatus: install ok unpacked\n\n"
        "Package: gone\nStatus: deinstall ok config-files\n",
    )
    found = Findings()

    checks.check_packages(capture.machine(), found)

    [fault] = found.faults
    assert (fault.code, is_fatal(fault)) == ("dpkg_unfinished", False)
    assert fault.message == "half-configured: nvidia-dkms-535; unpacked: nvidia-driver-535"


def test_a_killed_dpkg_is_noticed_by_its_journal(capture: Capture) -> None:
    capture.write("var/lib/dpkg/updates/0001", "")
    capture.write("var/lib/dpkg/updates/tmp.i", "")
    found = Findings()

    checks.check_packages(capture.machine(), found)

    assert codes(found) == ["dpkg_unfinished"]


def test_disk_wants_on_one_file_system_are_summed(capture: Capture) -> None:
    (capture.root / "srv").mkdir()
    (capture.root / "data").mkdir()
    capture.df("/srv", "/dev/sdb1", 110_000, "/srv")
    capture.df("/", "/dev/sda2", 6_000, "/")
    # The same device once more under another mount point: its free space is there once.
    capture.df("/data", "/dev/sdb1", 110_000, "/data")
    wants = [DiskWant("/srv/models", 106_000), DiskWant("/data/build", 5_000), DiskWant("/", 0, 5_120)]
    found = Findings()

    checks.check_disks(capture.machine(), found, wants)

    [fault] = found.faults
    assert (fault.code, fault.subject) == ("disk_short", "/srv")
    assert (
        "has 110000 MiB free, 111000 MiB are needed: 106000 MiB for /srv/models, 5000 MiB for /data/build"
        in fault.message
    )
    assert [(disk["mount"], disk["need_mib"]) for disk in found.facts["disks"]] == [("/srv", 111_000), ("/", 5_120)]


def test_what_is_there_already_counts(capture: Capture) -> None:
    models = capture.root / "srv/models/org"
    models.mkdir(parents=True)
    with (models / "model.gguf").open("wb") as file:
        file.write(os.urandom(3 * checks.MIB))
    os.link(models / "model.gguf", models / "again.gguf")  # one file, two names
    with (models / "partial.gguf").open("wb") as file:
        file.truncate(64 * checks.MIB)  # sparse: nothing of it is on the disk yet
    capture.df("/srv/models", "/dev/sdb1", 7, "/srv")
    found = Findings()

    checks.check_disks(capture.machine(), found, [DiskWant("/srv/models", 10)])

    assert codes(found) == []
    [path] = found.facts["disks"][0]["paths"]
    assert path == {"path": "/srv/models", "need_mib": 7}


def test_a_file_system_that_does_not_answer_is_no_empty_one(capture: Capture) -> None:
    (capture.root / "nfs").mkdir()
    capture.df("/", "/dev/sda2", 6_000, "/")
    found = Findings()

    checks.check_disks(capture.machine(), found, [DiskWant("/nfs/models", 10), DiskWant("/", 0, 5_120)])

    assert [(fault.code, fault.subject) for fault in found.faults] == [("disk_unknown", "/nfs/models")]
    assert [disk["mount"] for disk in found.facts["disks"]] == ["/"]


def _socket(capture: Capture, port: int, pid: int, program: str, unit: str, address: str = "0100007F") -> None:
    row = (
        f"   0: {address}:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 {pid}00 1\n"
    )
    capture.write("proc/net/tcp", "  sl  local_address rem_address   st\n" + row)
    capture.write(f"proc/{pid}/comm", program + "\n")
    capture.write(f"proc/{pid}/cgroup", f"0::/system.slice/{unit}\n")
    (capture.root / f"proc/{pid}/fd").mkdir()
    (capture.root / f"proc/{pid}/fd/3").symlink_to(f"socket:[{pid}00]")


@pytest.mark.parametrize(
    ("unit", "want", "expected"),
    [
        ("nginx.service", PortWant(8080, "127.0.0.1", "llama-server.service"), ["port_taken"]),
        ("nginx.service", PortWant(8080, "0.0.0.0", "llama-server.service"), ["port_taken"]),
        ("nginx.service", PortWant(8080), ["port_taken"]),
        ("nginx.service", PortWant(8081), []),
        ("nginx.service", PortWant(8080, "192.168.1.5"), []),
        ("llama-server.service", PortWant(8080, "0.0.0.0", "llama-server.service"), []),
    ],
)
def test_ports(capture: Capture, unit: str, want: PortWant, expected: list[str]) -> None:
    _socket(capture, 8080, 812, "nginx", unit)
    found = Findings()

    checks.check_ports(capture.machine(), found, [want])

    assert codes(found) == expected
    for fault in found.faults:
        assert fault.message == f"{want.address}:8080 is taken by nginx (pid 812, unit nginx.service)"


def test_this_interpreter_is_judged_against_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Findings()
    monkeypatch.setattr("sys.executable", "/home/ops/.venv/bin/python3")
    monkeypatch.setattr("sys.prefix", "/home/ops/.venv")

    checks.check_python(Machine(), found)

    fault = found.faults[0]
    assert (fault.code, is_fatal(fault)) == ("python_not_system", False)
    assert "/home/ops/.venv/bin/python3" in fault.message
    assert "ansible_python_interpreter: /usr/bin/python3" in fault.remedy


@pytest.mark.parametrize(("ahead", "expected"), [(0.0, []), (-7200.0, ["clock_wrong"]), (7200.0, ["clock_wrong"])])
def test_clock(ahead: float, expected: list[str]) -> None:
    found = Findings()

    checks.check_clock(Machine(), found, time.time() - ahead, 600)

    assert codes(found) == expected
    if expected:
        assert ("ahead of" if ahead > 0 else "behind") in found.faults[0].message


def test_questions_that_cannot_be_asked() -> None:
    said = checks.refused(
        [DiskWant("srv/models"), DiskWant("/srv", -1)], [PortWant(0), PortWant(65535), PortWant(70000)]
    )

    assert len(said) == 4
    assert "'srv/models' is not absolute" in said[0]
    assert checks.refused([DiskWant("/srv", 1, 1)], [PortWant(1)]) == []


def test_this_machine_is_read_for_real() -> None:
    found = Findings()
    machine = Machine()

    checks.check_memory(machine, found, 1)
    checks.check_disks(machine, found, [DiskWant("/no/such/folder", 1)])

    facts: dict[str, Any] = found.facts
    assert codes(found) == []
    assert facts["memory_mib"] > 100
    assert facts["disks"][0]["available_mib"] > 1
