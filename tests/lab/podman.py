# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The lab's own podman: storage, networks and names apart from what else podman does on this host.

On a host with hybrid control groups every call has to see the same mounts, so a holder process keeps a private mount
namespace and each call enters it. The holder is recorded with its start time and the boot id: a process id alone may
by now belong to something else.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.errors import LabError
from tests.lab.files import locked, write_atomic
from tests.lab.host import CGROUP_ROOT, Host
from tests.lab.paths import Paths
from tests.lab.proc import as_root, run

#: Runs in the new namespace: mount, say which process this is, then wait for ever with nothing open.
HOLDER_SCRIPT = f"mount -t cgroup2 cgroup2 {CGROUP_ROOT} && echo $$ && exec sleep infinity </dev/null >/dev/null 2>&1"
#: Runs podman in a group of its own: with control groups off, a machine's systemd takes the group podman was started
#: in for its root, and two machines must not share one.
IN_GROUP_SCRIPT = 'mkdir -p "$1" && echo $$ > "$1/cgroup.procs" && shift && exec "$@"'

#: Runs in a new namespace when an earlier one was lost: podman cannot reach what was made there, so end it and let
#: podman find the world as after a reboot. $1: the lab's control group, $2: its storage, $3: its runtime folder.
AFTER_LOSS_SCRIPT = """\
find "$1" -name cgroup.procs -exec cat {} + 2>/dev/null | xargs -r kill -9 2>/dev/null
for bundle in "$2"/overlay-containers/*/userdata; do
    [ -e "$bundle/config.json" ] || continue
    id=${bundle%/userdata}
    grep -o '/run/netns/netns-[0-9a-f-]*' "$bundle/config.json" | xargs -r rm -f
    rm -rf "/run/crun/${id##*/}"
done
rm -rf "$3"
"""


def start_time(stat: str) -> int | None:
    """A process's start in clock ticks since boot, from the text of /proc/PID/stat; None for one that has ended.

    One that has ended stays listed until its parent asks for its status. The name in parentheses may hold spaces.
    """
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def process_identity(pid: int) -> dict[str, int | str] | None:
    """What tells this process from a later one with the same number; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    start = start_time(stat)
    return None if start is None else {"pid": pid, "start": start, "boot": boot}


def is_alive(identity: dict[str, Any] | None) -> bool:
    """Whether a recorded process still runs."""
    return identity is not None and process_identity(int(identity["pid"])) == identity


class Podman:
    """Calls podman as root with the lab's own storage and, where the host needs it, in the private namespace."""

    def __init__(self, paths: Paths, host: Host) -> None:
        self.paths = paths
        self.host = host

    # The namespace ---------------------------------------------------------------------------------------------

    def recorded_holder(self) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = json.loads(self.paths.holder.read_text())
        except FileNotFoundError:
            return None
        return record

    def holder_alive(self) -> bool:
        """Whether what was started before can still be reached. Where no holder is needed, it always can."""
        return not self.host.private or is_alive(self.recorded_holder())

    def ensure_holder(self) -> bool:
        """Start the holder where one is needed and none runs. True when one was started."""
        with locked(self.paths.state / "holder.lock"):
            self._write_configuration()
            return False if self.holder_alive() else self._start_holder()

    def _start_holder(self) -> bool:
        done = run(
            as_root(["setsid", "--fork", "unshare", "--mount", "--propagation", "private", "sh", "-c", HOLDER_SCRIPT])
        )
        written = done.stdout.decode().split()
        identity = process_identity(int(written[0])) if written else None
        if identity is None:
            raise LabError(
                "A private mount namespace with cgroup v2 could not be made: "
                + (done.stderr.decode(errors="replace").strip() or "unshare said nothing")
            )
        write_atomic(self.paths.holder, json.dumps(identity) + "\n")
        places = [self.group_path(""), str(self.paths.podman / "storage"), str(self.paths.runtime)]
        self._in_namespace(["sh", "-c", AFTER_LOSS_SCRIPT, "sh", *places])
        return True

    def end_holder(self) -> None:
        record = self.recorded_holder()
        if record is not None and is_alive(record):
            run(as_root(["kill", f"-{signal.SIGKILL.value}", str(record["pid"])]))
        self.paths.holder.unlink(missing_ok=True)

    # Calls -----------------------------------------------------------------------------------------------------

    def command(self, arguments: Sequence[str], *, group: str | None = None) -> list[str]:
        """The full command line for one podman call. ``group`` names the machine whose control group it starts in."""
        call = [
            "env",
            f"CONTAINERS_CONF={self.paths.podman / 'containers.conf'}",
            f"CONTAINERS_STORAGE_CONF={self.paths.podman / 'storage.conf'}",
            "NETAVARK_FW=iptables",
            "podman",
            *arguments,
        ]
        if not self.host.private:
            return as_root(call)
        record = self.recorded_holder()
        if record is None or not is_alive(record):
            raise LabError("The lab's mount namespace is gone. `python -m tests.lab up LAB` makes it again.")
        if group is not None:
            call = ["sh", "-c", IN_GROUP_SCRIPT, "sh", self.group_path(group), *call]
        return as_root(["nsenter", "--mount", f"--target={record['pid']}", "--", *call])

    def call(self, *arguments: str, check: bool = True, stdin: bytes | None = None, group: str | None = None) -> str:
        """Run podman and return what it wrote to standard output."""
        done = run(self.command(arguments, group=group), check=check, stdin=stdin, shown=["podman", *arguments])
        return done.stdout.decode(errors="replace").strip()

    def succeeds(self, *arguments: str) -> bool:
        return run(self.command(arguments), check=False).returncode == 0

    def containers(self) -> dict[str, str]:
        """Every machine in the store, by name, with podman's word for its state ("running", "exited", ...)."""
        listed = json.loads(self.call("ps", "--all", "--format", "json") or "[]")
        return {container["Names"][0]: container["State"] for container in listed}

    def remove(self, machine: str) -> None:
        """Remove a machine and its disk. One that is not there is no error.

        A call that was killed leaves its podman running; it may hold the machine for a moment longer.
        """
        for patience in (0.5, 1, 2, 0):
            done = run(self.command(["rm", "--force", "--ignore", "--time=0", machine]), check=patience == 0)
            if done.returncode == 0:
                return
            time.sleep(patience)

    def name_bridge(self, network: str, bridge: str) -> None:
        """Give a network's bridge a name of our choice; ``network create`` can only since podman 4.5."""
        path = self.paths.podman / "networks" / f"{network}.json"
        run(as_root(["sed", "-i", f's/"network_interface": "[^"]*"/"network_interface": "{bridge}"/', str(path)]))

    # Parts -----------------------------------------------------------------------------------------------------

    def group_path(self, machine: str) -> str:
        return f"{CGROUP_ROOT}/{self.paths.runtime.name}/{machine}"

    def remove_group(self, machine: str) -> None:
        """Remove the control group a machine had. Groups are folders that only go when empty, innermost first."""
        if self.host.private and self.holder_alive():
            self._in_namespace(["find", self.group_path(machine), "-depth", "-type", "d", "-exec", "rmdir", "{}", ";"])

    def remove_groups(self) -> None:
        self.remove_group("")

    def _in_namespace(self, command: list[str]) -> None:
        record = self.recorded_holder()
        if record is not None:
            run(as_root(["nsenter", "--mount", f"--target={record['pid']}", "--", *command]), check=False)

    def _write_configuration(self) -> None:
        folder = self.paths.podman
        runtime = self.paths.runtime
        manager = "systemd" if self.host.systemd and not self.host.private else "cgroupfs"
        self.paths.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True)
        write_atomic(
            folder / "containers.conf",
            "# Written by the lab.\n"
            "[containers]\n"
            # A machine's /etc/hosts says nothing of this host's.
            'base_hosts_file = "none"\n'
            "[engine]\n"
            f'cgroup_manager = "{manager}"\n'
            'events_logger = "none"\n'
            'runtime = "crun"\n'
            # Locks in shared memory would be one pool with the host's own podman.
            'lock_type = "file"\n'
            f'static_dir = "{folder}/storage/libpod"\n'
            f'tmp_dir = "{runtime}/libpod"\n'
            f'volume_path = "{folder}/storage/volumes"\n'
            "[network]\n"
            'network_backend = "netavark"\n'
            f'network_config_dir = "{folder}/networks"\n',
        )
        write_atomic(
            folder / "storage.conf",
            "# Written by the lab.\n"
            "[storage]\n"
            'driver = "overlay"\n'
            f'graphroot = "{folder}/storage"\n'
            f'runroot = "{runtime}/storage"\n',
        )
