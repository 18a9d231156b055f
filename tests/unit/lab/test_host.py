# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a host can do, from texts captured on real ones."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.lab import host
from tests.lab.errors import LabError

FIXTURES = Path(__file__).parents[1] / "fixtures/lab"
#: /proc/mounts of Debian 12 as installed.
UNIFIED = "sysfs /sys sysfs rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,relatime 0 0\n"
OWN_UNIFIED = "0::/user.slice/user-1000.slice/session-3.scope\n"
ALL_CAPABILITIES = "CapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n"


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text()


def decide(**changes: object) -> host.Host:
    texts: dict[str, object] = {
        "mounts": UNIFIED,
        "cgroup": OWN_UNIFIED,
        "filesystems": fixture("filesystems.txt"),
        "status": ALL_CAPABILITIES,
        "hard_open_files": 524288,
        "hard_processes": 96364,
        "systemd": True,
    }
    return host.decide(**{**texts, **changes})  # type: ignore[arg-type]


def test_cgroup_v2_host_is_used_as_it_is() -> None:
    found = decide()

    assert found.cgroups == "native"
    assert found.may_raise_limits
    assert (found.open_files, found.processes) == (host.OPEN_FILES, host.PROCESSES)


def test_hybrid_host_without_the_right_to_raise_limits() -> None:
    found = decide(
        mounts=fixture("mounts-hybrid.txt"),
        cgroup=fixture("cgroup-hybrid.txt"),
        status=fixture("status-no-sys-resource.txt"),
        hard_open_files=20000,
        systemd=False,
    )

    assert found.cgroups == "private"
    assert not found.may_raise_limits
    assert (found.open_files, found.processes) == (20000, host.PROCESSES)
    assert "hybrid" in found.describe()
    assert "20000 open files" in found.describe()


def test_cgroup_v2_without_the_right_to_raise_limits_is_private() -> None:
    assert decide(status=fixture("status-no-sys-resource.txt")).cgroups == "private"


def test_limits_below_the_usual_ones_are_kept() -> None:
    found = decide(status=fixture("status-no-sys-resource.txt"), hard_open_files=4096, hard_processes=512)

    assert (found.open_files, found.processes) == (4096, 512)


def test_unlimited_is_not_taken_for_a_number() -> None:
    unlimited = resource.RLIM_INFINITY
    found = decide(status=fixture("status-no-sys-resource.txt"), hard_open_files=unlimited, hard_processes=unlimited)

    assert (found.open_files, found.processes) == (host.OPEN_FILES, host.PROCESSES)


@pytest.mark.parametrize(
    ("mounts", "layout"),
    [
        (UNIFIED, "unified"),
        (fixture("mounts-hybrid.txt"), "hybrid"),
        ("tmpfs /sys/fs/cgroup tmpfs ro 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n", "legacy"),
        ("proc /proc proc rw 0 0\n", "none"),
        # The lab's own namespace on a hybrid host: what is mounted last is what is seen.
        (fixture("mounts-hybrid.txt") + "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "unified"),
    ],
)
def test_layout(mounts: str, layout: str) -> None:
    assert host.cgroup_layout(mounts) == layout


def test_kernel_without_cgroup_v2_is_refused() -> None:
    with pytest.raises(LabError, match="no cgroup v2"):
        decide(filesystems="nodev\tcgroup\n\text4\n")


def test_own_group() -> None:
    assert host.own_cgroup_v2(OWN_UNIFIED) == "/user.slice/user-1000.slice/session-3.scope"
    assert host.own_cgroup_v2(fixture("cgroup-hybrid.txt")) == "/"
    assert host.own_cgroup_v2("1:cpu:/\n") is None
