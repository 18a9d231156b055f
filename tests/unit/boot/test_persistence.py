# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Persistence mode, power limit and PCIe policy on a machine whose systemd and cards are simulated."""

from __future__ import annotations

import os
import re
import time

import pytest
from ansible_collections.volta.llm.plugins.module_utils.boot import aspm
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed
from ansible_collections.volta.llm.plugins.module_utils.nvidia import persistence
from ansible_collections.volta.llm.plugins.module_utils.nvidia.persistence import DROP_IN, Persistence, Wanted

from tests.unit.boot.conftest import Built

#: nvidia-compute-utils-535 of Ubuntu 22.04.
UBUNTU = """\
[Unit]
Description=NVIDIA Persistence Daemon
Wants=syslog.target
StopWhenUnneeded=true
Before=systemd-backlight@backlight:nvidia_0.service

[Service]
Type=forking
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose
ExecStopPost=/bin/rm -rf /var/run/nvidia-persistenced
"""
#: nvidia-persistenced 535.171.04-1~deb12u1 of Debian 12.
DEBIAN = """\
[Unit]
Description=NVIDIA Persistence Daemon
Wants=syslog.target

[Service]
Type=forking
ExecStart=/usr/bin/nvidia-persistenced --user nvpd
ExecStopPost=/bin/rm -rf /var/run/nvidia-persistenced

[Install]
WantedBy=multi-user.target
"""
WANTED = Wanted(engines=("llama-server.service", "ollama.service"), wait=0.0)


class Server(Built):
    """Cards that a running daemon switches on after ``late`` questions, and a systemd that reads the units."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  x\n")
        self.active: set[str] = set()
        self.since = 0.0
        self.late = 0
        self.dead: set[int] = set()
        self.on = [False, False]
        self.limits = [300.0, 300.0]
        self.capped: float | None = None
        self.fails: set[str] = set()
        self.answers["systemctl"] = self._systemctl
        self.answers["nvidia-smi"] = self._smi
        self.answers["journalctl"] = lambda argv: Completed(
            tuple(argv), 0, "nvidia-persistenced failed to initialize\n"
        )

    def daemon(self, unit: str = UBUNTU) -> Server:
        self.file("usr/bin/nvidia-persistenced")
        self.file("lib/systemd/system/nvidia-persistenced.service", unit)
        return self

    def verbs(self) -> list[str]:
        return [" ".join(argv[1:]) for argv in self.ran if argv[0] == "systemctl" and argv[1] != "show"]

    def text(self, path: str) -> str:
        return self.read(path) or ""

    def _systemctl(self, argv):
        verb, unit = argv[1], argv[-1]
        if verb == "show":
            unit = argv[2]
            boot = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
            state = "active" if unit in self.active else "inactive"
            entered = int((self.since - boot) * 1e6) if unit in self.active else 0
            return Completed(
                tuple(argv), 0, f"ActiveState={state}\nActiveEnterTimestampMonotonic={entered}\nNeedDaemonReload=no\n"
            )
        if unit in self.fails and verb == "restart":
            return Completed(tuple(argv), 1, stderr="Job failed")
        if verb == "add-wants":
            self.file(f"etc/systemd/system/multi-user.target.wants/{unit}")
        if verb == "restart":
            self.active.add(unit)
            self.since = time.time()
            self._effect(unit)
        if verb == "disable":
            self.active.discard(unit)
            (self.root / f"etc/systemd/system/multi-user.target.wants/{unit}").unlink(missing_ok=True)
        return Completed(tuple(argv), 0)

    def _effect(self, unit: str) -> None:
        if unit == persistence.POWER:
            watts = re.search(r"-pl ([\d.]+)", self.text(f"/etc/systemd/system/{unit}"))
            assert watts is not None
            self.limits = [min(float(watts[1]), self.capped or 999.0)] * 2
        elif unit == persistence.LEGACY or "--persistence-mode" in self.text(DROP_IN):
            self.on = [number not in self.dead for number in range(2)]

    def _smi(self, argv):
        if "-pl" in argv:
            self.limits[0 if "1a" in argv[2] else 1] = float(argv[-1])
            return Completed(tuple(argv), 0)
        shown = self.on if self.late <= 0 else [self.on[0], False]
        self.late -= 1
        rows = [
            f"{n}, 00000000:{bus}:00.0, {'Enabled' if shown[n] else 'Disabled'}, {self.limits[n]:.2f}, 150.00, 300.00, "
            "300.00"
            for n, bus in enumerate(("1A", "1C"))
        ]
        return Completed(tuple(argv), 0, "\n".join(rows) + "\n")


@pytest.fixture
def server(tmp_path, monkeypatch) -> Server:
    monkeypatch.setattr(persistence, "PAUSE_S", 0.0)
    return Server(tmp_path)


def converge(server, wanted=WANTED, check=False):
    server.ran.clear()
    return Persistence(server, wanted).converge(check)


def codes(outcome):
    return [fault.code for fault in outcome.faults]


def test_ubuntu_s_unit_is_made_to_switch_persistence_on(server):
    outcome = converge(server.daemon())
    assert outcome.faults == []
    assert outcome.mode == "daemon"
    assert outcome.changes == [
        f"wrote {DROP_IN}",
        "enabled nvidia-persistenced.service",
        "started nvidia-persistenced.service",
    ]
    lines = server.text(DROP_IN).splitlines()
    assert "ExecStart=/usr/bin/nvidia-persistenced --persistence-mode --user nvidia-persistenced --verbose" in lines
    assert lines.index("ExecStart=") + 1 == lines.index(
        "ExecStart=/usr/bin/nvidia-persistenced --persistence-mode --user nvidia-persistenced --verbose"
    )
    assert {"StopWhenUnneeded=no", "Before=llama-server.service ollama.service", "TimeoutStartSec=300"} <= set(lines)
    assert f"ConditionPathExists={server.root}/proc/driver/nvidia/version" in lines
    assert [gpu.persistence for gpu in outcome.gpus] == [True, True]
    again = converge(server)
    assert (again.changes, again.faults, server.verbs()) == ([], [], [])


def test_debian_s_daemon_keeps_its_account(server):
    converge(server.daemon(DEBIAN))
    assert "ExecStart=/usr/bin/nvidia-persistenced --persistence-mode --user nvpd\n" in server.text(DROP_IN)


def test_a_running_daemon_without_persistence_is_restarted(server):
    server.daemon().active.add("nvidia-persistenced.service")
    server.since = time.time() - 60
    assert "restarted nvidia-persistenced.service" in converge(server).changes


def test_check_mode_says_the_same_and_does_nothing(server):
    outcome = converge(server.daemon(), check=True)
    assert len(outcome.changes) == 3
    assert server.verbs() == []
    assert not (server.root / DROP_IN.lstrip("/")).exists()
    assert [path for path, _, _ in outcome.files] == [DROP_IN]


def test_without_the_module_nothing_is_started(server):
    (server.root / "proc/driver/nvidia/version").unlink()
    outcome = converge(server.daemon())
    assert codes(outcome) == ["persistence_without_driver"]
    assert (outcome.changes, server.ran) == ([], [])


def test_check_mode_on_a_bare_machine_fails_nothing(tmp_path):
    server = Server(tmp_path)
    (server.root / "proc/driver/nvidia/version").unlink()
    outcome = converge(server, check=True)
    assert (outcome.faults, outcome.would_verify) == ([], True)
    assert outcome.changes[0] == f"wrote {DROP_IN}"
    assert converge(server, Wanted(power_limit_w=250), check=True).faults == []


def test_b16_cards_that_come_late_are_waited_for(server):
    server.daemon().late = 3
    outcome = converge(server, Wanted(wait=30.0))
    assert outcome.faults == []
    assert server.verbs().count("restart nvidia-persistenced.service") == 1
    server.late = 3
    assert converge(server, Wanted(wait=30.0)).changes == []


def test_b16_only_cards_that_are_still_off_are_named(server):
    server.daemon().dead = {1}
    outcome = converge(server)
    assert [(fault.code, fault.subject) for fault in outcome.faults] == [("persistence_off", "0000:1c:00.0")]


def test_b18_a_daemon_that_stopped_half_way_is_started_again_once(server):
    converge(server.daemon())
    server.on = [True, False]
    outcome = converge(server)
    assert outcome.changes == ["restarted nvidia-persistenced.service"]
    assert outcome.faults == []
    server.on, server.dead = [True, False], {1}
    assert codes(converge(server)) == ["persistence_off"]
    assert server.verbs().count("restart nvidia-persistenced.service") == 1


def test_b18_an_active_unit_is_no_proof(server):
    server.daemon().fails = {"nvidia-persistenced.service"}
    outcome = converge(server)
    assert codes(outcome) == ["persistence_daemon_failed"]
    assert "failed to initialize" in outcome.faults[0].message


def test_a_run_killed_after_the_drop_in_restarts_the_daemon(server):
    converge(server.daemon())
    server.since = time.time() - 60
    assert converge(server).changes == ["restarted nvidia-persistenced.service"]
    os.utime(server.root / DROP_IN.lstrip("/"), (time.time() + 3600,) * 2)
    server.since = time.time() - 60
    assert converge(server).changes == []


def test_legacy_unit_only_where_there_is_no_daemon(server):
    outcome = converge(server)
    path = f"/etc/systemd/system/{persistence.LEGACY}"
    assert outcome.mode == "legacy"
    assert outcome.changes == [
        f"wrote {path}",
        f"enabled {persistence.LEGACY}",
        f"started {persistence.LEGACY}",
    ]
    assert "nvidia-smi -pm 1\n" in server.text(path)
    assert "RemainAfterExit=yes\n" in server.text(path)
    assert "Before=llama-server.service ollama.service\n" in server.text(path)
    assert converge(server).changes == []
    server.on = [False, True]
    assert converge(server).changes == [f"restarted {persistence.LEGACY}"]
    outcome = converge(server.daemon())
    assert outcome.changes[:2] == [f"wrote {DROP_IN}", f"removed {path}"]
    assert not (server.root / path.lstrip("/")).exists()
    assert persistence.LEGACY not in server.active
    assert converge(server).changes == []


def test_a_daemon_that_came_without_a_unit_gets_one(server):
    server.file("usr/bin/nvidia-persistenced")
    outcome = converge(server)
    assert outcome.mode == "daemon"
    assert outcome.changes[0] == "wrote /etc/systemd/system/nvidia-persistenced.service"
    assert "Type=forking\n" in server.text("/etc/systemd/system/nvidia-persistenced.service")
    assert converge(server).changes == []
    server.daemon()
    assert converge(server).changes[0] == "removed /etc/systemd/system/nvidia-persistenced.service"


def test_a_unit_of_the_administrator_s_stays(server):
    server.daemon().file("etc/systemd/system/nvidia-persistenced.service", DEBIAN)
    outcome = converge(server)
    assert outcome.changes[0] == f"wrote {DROP_IN}"
    assert server.text("/etc/systemd/system/nvidia-persistenced.service") == DEBIAN


# -- power limit


def test_a_power_limit_is_set_at_boot_and_read_back(server):
    wanted = Wanted(wait=0.0, power_limit_w=250)
    outcome = converge(server.daemon(), wanted)
    assert outcome.faults == []
    assert f"started {persistence.POWER}" in outcome.changes
    assert [gpu.limit_w for gpu in outcome.gpus] == [250.0, 250.0]
    unit = server.text(f"/etc/systemd/system/{persistence.POWER}")
    assert "nvidia-smi -pl 250\n" in unit
    assert f"After=systemd-modules-load.service nvidia-persistenced.service {persistence.LEGACY}\n" in unit
    assert converge(server, wanted).changes == []
    server.limits = [300.0, 250.0]
    assert converge(server, wanted).changes == [f"restarted {persistence.POWER}"]


@pytest.mark.parametrize("watts", [149, 301])
def test_a_power_limit_out_of_range_is_refused_before_anything(server, watts):
    outcome = converge(server.daemon(), Wanted(power_limit_w=watts))
    assert set(codes(outcome)) == {"power_limit_out_of_range"}
    assert "from 150 to 300" in outcome.faults[0].remedy
    assert (outcome.changes, server.verbs()) == ([], [])


def test_the_enforced_limit_counts_not_the_requested_one(server):
    server.daemon().capped = 200.0
    outcome = converge(server, Wanted(wait=0.0, power_limit_w=250))
    assert codes(outcome) == ["power_limit_not_enforced"] * 2
    assert "is 200 W, 250 W was set" in outcome.faults[0].message


def test_a_limit_of_ours_goes_back_to_the_default(server):
    converge(server.daemon(), Wanted(wait=0.0, power_limit_w=250))
    outcome = converge(server, Wanted(wait=0.0))
    assert f"removed /etc/systemd/system/{persistence.POWER}" in outcome.changes
    assert "power limit of 0000:1a:00.0 back to 300 W" in outcome.changes
    assert [gpu.limit_w for gpu in outcome.gpus] == [300.0, 300.0]
    server.limits = [250.0, 250.0]
    assert converge(server, Wanted(wait=0.0)).changes == []


def test_what_nvidia_smi_cannot_say_is_a_fault(server):
    server.daemon().answers["nvidia-smi"] = lambda argv: Completed(
        tuple(argv), 18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.261\n"
    )
    assert codes(converge(server)) == ["driver_mismatch"]


# -- PCIe

POLICY = "sys/module/pcie_aspm/parameters/policy"


def test_the_pcie_policy_is_read_and_left_alone(server):
    server.file(POLICY, "default performance [powersave] powersupersave \n")
    outcome = aspm.converge(server, None)
    assert (outcome.policy, outcome.changes, outcome.faults) == ("powersave", [], [])
    assert outcome.offered == list(aspm.POLICIES)


def test_the_pcie_policy_is_set_now_and_at_boot(server, monkeypatch):
    server.file(POLICY, "[default] performance powersave powersupersave \n")
    monkeypatch.setattr(aspm, "read", kernel_that_takes(server))
    outcome = aspm.converge(server, "performance", check=True)
    assert outcome.changes == [f"wrote {aspm.PATH}", "policy default -> performance"]
    assert server.read(aspm.PATH) is None
    outcome = aspm.converge(server, "performance")
    assert (outcome.policy, outcome.faults) == ("performance", [])
    assert server.text(aspm.PATH).endswith("w /sys/module/pcie_aspm/parameters/policy - - - - performance\n")
    assert aspm.converge(server, "performance").changes == []
    assert aspm.converge(server, None).changes == [f"removed {aspm.PATH}"]
    assert aspm.converge(server, None).changes == []


def kernel_that_takes(server):
    """The kernel answers a written word with the list in which that word is chosen."""

    def read(machine):
        text = server.text(f"/{POLICY}")
        if "[" not in text:
            server.file(POLICY, " ".join(f"[{name}]" if name == text else name for name in aspm.POLICIES) + "\n")
            text = server.text(f"/{POLICY}")
        return re.findall(r"\[(\w+)\]", text)[0], re.findall(r"\w+", text)

    return read


def test_a_policy_that_the_firmware_denies_is_not_left_for_the_next_boot(server, monkeypatch):
    server.file(POLICY, "[default] performance powersave powersupersave \n")
    monkeypatch.setattr(aspm, "read", lambda machine: ("default", list(aspm.POLICIES)))
    outcome = aspm.converge(server, "performance")
    assert codes(outcome) == ["aspm_denied"]
    assert "the policy is still default" in outcome.faults[0].message
    assert (outcome.changes, server.read(aspm.PATH)) == ([], None)


def test_a_kernel_without_the_policy(server):
    outcome = aspm.converge(server, "performance")
    assert codes(outcome) == ["aspm_unavailable"]
    assert (outcome.policy, outcome.changes) == (None, [])
    assert aspm.converge(server, None).faults == []
