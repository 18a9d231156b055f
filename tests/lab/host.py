# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What this host can do: control groups, capabilities, limits.

Two kinds of host are known. ``native``: one cgroup v2 tree at /sys/fs/cgroup, which podman uses as it is. ``private``:
hybrid or version 1 control groups, or no right to raise limits (crun raises the one on locked memory before it sets up
a group); there the lab mounts the cgroup v2 tree over /sys/fs/cgroup in a mount namespace of its own and gives each
machine a group in it, with no controllers. systemd needs the tree, not the controllers.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from tests.lab.errors import LabError

CGROUP_ROOT = "/sys/fs/cgroup"
#: Bit of CAP_SYS_RESOURCE in /proc/self/status; without it limits can be lowered but not raised.
CAP_SYS_RESOURCE = 24
#: Open files a machine may have where the host sets no lower limit; podman's own default for root.
OPEN_FILES = 1048576
#: Processes a user of a machine may have. podman lowers its own limit to kernel.pid_max (32768) first, and cannot
#: raise it again without CAP_SYS_RESOURCE.
PROCESSES = 16384


@dataclass(frozen=True)
class Host:
    """``cgroups``: native or private. ``layout``: what /sys/fs/cgroup is, in words. Limits are counts."""

    cgroups: str
    layout: str
    may_raise_limits: bool
    open_files: int
    processes: int
    systemd: bool

    @property
    def private(self) -> bool:
        return self.cgroups == "private"

    def describe(self) -> str:
        """One line for ``status``."""
        way = (
            "podman uses them as they are"
            if not self.private
            else "the lab mounts cgroup v2 in a mount namespace of its own"
        )
        limits = "limits can be raised" if self.may_raise_limits else "limits cannot be raised"
        return (
            f"control groups: {self.layout}; {way}. {limits}; "
            f"a machine gets {self.open_files} open files and {self.processes} processes a user"
        )


def cgroup_layout(mounts: str) -> str:
    """``unified``, ``hybrid``, ``legacy`` or ``none``, from the text of /proc/mounts.

    The last mount at a place is the one that is seen.
    """
    root_type = None
    has_v2 = False
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        _, target, kind = fields[:3]
        if target == CGROUP_ROOT:
            root_type = kind
        elif target.startswith(CGROUP_ROOT + "/") and kind == "cgroup2":
            has_v2 = True
    if root_type is None:
        return "none"
    if root_type == "cgroup2":
        return "unified"
    return "hybrid" if has_v2 else "legacy"


def own_cgroup_v2(cgroup: str) -> str | None:
    """This process's group in the cgroup v2 tree, from the text of /proc/self/cgroup; None where there is no tree."""
    for line in cgroup.splitlines():
        if line.startswith("0::"):
            return line[3:]
    return None


def has_capability(status: str, bit: int) -> bool:
    """Whether root may have a capability here, from the text of /proc/self/status.

    The bounding set counts: it is what sudo can give, and what root was left with.
    """
    for line in status.splitlines():
        if line.startswith("CapBnd:"):
            return bool(int(line.split()[1], 16) >> bit & 1)
    return False


def knows_filesystem(filesystems: str, name: str) -> bool:
    """Whether the kernel can mount it, from the text of /proc/filesystems."""
    return any(line.split()[-1:] == [name] for line in filesystems.splitlines())


def decide(
    *,
    mounts: str,
    cgroup: str,
    filesystems: str,
    status: str,
    hard_open_files: int,
    hard_processes: int,
    systemd: bool,
) -> Host:
    """The host, from captured texts."""
    layout = cgroup_layout(mounts)
    if not knows_filesystem(filesystems, "cgroup2"):
        raise LabError(
            "This kernel has no cgroup v2 file system, which systemd in a machine needs. Use Linux 4.15 or newer."
        )
    may_raise = has_capability(status, CAP_SYS_RESOURCE)
    native = layout == "unified" and own_cgroup_v2(cgroup) is not None and may_raise
    return Host(
        cgroups="native" if native else "private",
        layout={"unified": "v2", "hybrid": "hybrid v1 and v2", "legacy": "v1", "none": "not mounted"}[layout],
        may_raise_limits=may_raise,
        open_files=OPEN_FILES if may_raise else min(OPEN_FILES, _count(hard_open_files, OPEN_FILES)),
        processes=PROCESSES if may_raise else min(PROCESSES, _count(hard_processes, PROCESSES)),
        systemd=systemd,
    )


def _count(limit: int, unlimited: int) -> int:
    return unlimited if limit == resource.RLIM_INFINITY else limit


def detect() -> Host:
    """Look at the host this runs on."""
    return decide(
        mounts=Path("/proc/self/mounts").read_text(),
        cgroup=Path("/proc/self/cgroup").read_text(),
        filesystems=Path("/proc/filesystems").read_text(),
        status=Path("/proc/self/status").read_text(),
        hard_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        hard_processes=resource.getrlimit(resource.RLIMIT_NPROC)[1],
        systemd=Path("/run/systemd/system").is_dir(),
    )
