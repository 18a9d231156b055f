# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Labs: sets of machines that belong together, share a network and a key, and come and go together."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from tests.lab import deps, image, inventory, network, ssh
from tests.lab import gpus as simulated
from tests.lab.errors import LabError
from tests.lab.files import locked, write_atomic
from tests.lab.host import Host, detect
from tests.lab.paths import Paths
from tests.lab.podman import Podman, is_alive, process_identity
from tests.lab.proc import as_root, output, run, say
from tests.lab.record import Record, Server
from tests.lab.repository import claims as repository
from tests.lab.repository.archive import ensure as ensure_archive
from tests.lab.repository.ubuntu import kernel_stamp as archive_of_kernels
from tests.lab.repository.ubuntu import suites

#: Lab and machine names become host names, network names and file names.
NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
#: What systemd and a server's services use beyond podman's default set: mounts for units' sandboxes, priorities, locked
#: memory, addresses. Not CAP_SYS_MODULE: the machine shares this host's kernel.
CAPABILITIES = "AUDIT_WRITE,IPC_LOCK,MKNOD,NET_ADMIN,NET_RAW,SYS_ADMIN,SYS_NICE,SYS_PTRACE"
#: This host's own cards and drivers, which a machine must not find.
HIDDEN = (
    "/proc/driver/nvidia",
    "/sys/bus/pci/devices",
    "/sys/bus/pci/drivers/nvidia",
    "/sys/class/drm",
    "/sys/module/nouveau",
    "/sys/module/nvidia",
    "/sys/module/nvidia_drm",
    "/sys/module/nvidia_modeset",
    "/sys/module/nvidia_uvm",
)
#: Where machines find the folder they share with this host.
SHARED = "/var/cache/volta-lab"
#: Seconds; a machine takes two, unless the host is busy with builds.
READY_TIMEOUT = 180
#: First port a file server takes on the lab's gateway address.
FIRST_PORT = 8800
SERVER_START_TIMEOUT = 20


@dataclass(frozen=True)
class Machine:
    """How to reach one machine: by SSH as root with ``key``, its host key is in ``known_hosts``."""

    name: str
    address: str
    key: Path
    known_hosts: Path

    def ssh(self, *, batch: bool = False) -> list[str]:
        """The ssh command line, to which a remote command may be added."""
        return ssh.command(self.address, self.key, self.known_hosts, batch=batch)

    def run(self, *command: str, check: bool = True, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run a program on the machine. With ``check``, a status other than 0 is a LabError with its last lines."""
        call = [*self.ssh(batch=True), shlex.join(command)]
        return run(call, check=check, stdin=stdin, shown=["ssh", self.name, *command])

    def output(self, *command: str) -> str:
        """What a program on the machine wrote to standard output."""
        return self.run(*command).stdout.decode(errors="replace").strip()


@dataclass(frozen=True)
class Wishes:
    """What machines shall be made of; see Lab.up."""

    suite: str
    base: str | None
    components: str
    claims: str | None
    kernel: str
    driver: str | None


@dataclass(frozen=True)
class Up:
    """The result of ``up`` and ``reset``: the machines, and the names of those that were made or started now."""

    machines: list[Machine]
    changed: list[str]


class Lab:
    """One lab by name. Nothing happens until a method is called; each may be repeated after it was interrupted."""

    def __init__(self, name: str, *, paths: Paths | None = None, host: Host | None = None) -> None:
        if not NAME.fullmatch(name):
            raise LabError(f"lab name {name!r}: use lower case letters, digits and dashes, a letter first, at most 40")
        self.name = name
        self.paths = paths or Paths.from_environment()
        self.host = host or detect()
        self.podman = Podman(self.paths, self.host)
        self.folder = self.paths.labs / name

    # Names -----------------------------------------------------------------------------------------------------

    @property
    def _lock(self) -> Path:
        return self.paths.state / f"{self.name}.lock"

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def sockets(self) -> Path:
        """Where Ansible keeps its open connections, so that a reset can close them."""
        return self.folder / "cp"

    def machine_name(self, number: int) -> str:
        return f"{self.name}-{number}"

    def record(self) -> Record:
        """The lab's record; a LabError when it is not up."""
        record = Record.load(self.folder)
        if record is None:
            raise LabError(f"There is no lab {self.name}. Start it with: python -m tests.lab up {self.name}")
        return record

    def machines(self) -> list[Machine]:
        record = self.record()
        return [self._machine(record, number) for number in record.machines]

    def machine(self, name: str) -> Machine:
        """One machine, by its name or its number."""
        for machine in self.machines():
            if name in (machine.name, machine.name.removeprefix(f"{self.name}-")):
                return machine
        known = ", ".join(machine.name for machine in self.machines())
        raise LabError(f"Lab {self.name} has no machine {name}. It has: {known}")

    def _machine(self, record: Record, number: int) -> Machine:
        address = network.Addresses(IPv4Network(record.subnet)).machine(number)
        return Machine(self.machine_name(number), address, self.key, self.known_hosts)

    # Up and down -----------------------------------------------------------------------------------------------

    def up(
        self,
        *,
        count: int | None = None,
        gpus: str | None = None,
        suite: str = "bookworm",
        base: str | None = None,
        components: str = "main",
        claims: str | None = None,
        kernel: str | None = None,
        driver: str | None = None,
        inventory_file: Path | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Up:
        """Make what is missing and leave the rest alone.

        ``count`` and ``gpus`` None keep what the lab has, or mean one machine without GPUs for a new lab.
        ``base`` names a registry image to build on, for Debian by mmdebstrap leave it None; ``components`` are those of
        Debian's archive. ``claims`` (ubuntu-22.04) makes machines that claim to be that release, with ``kernel``
        generic, hwe or virtual, and take kernels and drivers from the lab's own archive. ``driver`` "packages" leaves
        the driver to packages, which claims imply. ``variables`` go into the inventory's group.
        """
        if claims is not None and claims not in repository.CLAIMS:
            raise LabError(f"--claims {claims}: choose one of: {', '.join(repository.CLAIMS)}")
        if kernel is not None and (claims is None or kernel not in repository.KERNELS):
            raise LabError(f"--kernel goes with --claims and is one of: {', '.join(repository.KERNELS)}")
        if driver not in (None, simulated.PACKAGES):
            raise LabError(f"--driver {driver}: the only word is {simulated.PACKAGES}")
        if claims is not None:
            driver = simulated.PACKAGES
        if count is not None and not 1 <= count <= network.MOST_MACHINES:
            raise LabError(f"-n {count}: a lab has 1 to {network.MOST_MACHINES} machines")
        if gpus is not None:
            simulated.require(gpus)
        deps.require()
        with locked(self._lock):
            wishes = Wishes(suite, base, components, claims, kernel or "generic", driver)
            record = self._prepared(wishes)
            wanted = list(range(1, count + 1)) if count is not None else record.machines or [1]
            profile = record.gpus if gpus is None else gpus
            states = self.podman.containers()
            surplus = sorted(set(record.machines) - set(wanted))
            remake, start = [], []
            for number in wanted:
                made, state = record.made.get(str(number)), states.get(self.machine_name(number))
                # The simulator leaves with the machine's disk; there is no other way to be rid of it.
                if made is None or state is None or (made != profile and profile == simulated.NONE):
                    remake.append(number)
                elif state != "running":
                    start.append(number)
            install = [number for number in wanted if number not in remake and record.made[str(number)] != profile]
            record.machines, record.gpus = wanted, profile
            for number in {*surplus, *remake, *install}:
                record.made.pop(str(number), None)
            self._write_keys(record, surplus)
            record.save(self.folder)

            self._each(surplus, self._remove)
            self._make(record, remake)
            self._each(start, lambda number: self._start(record, number))
            self._each(install, lambda number: self._install_gpus(record, number))
            record.made = {str(number): profile for number in wanted}
            record.save(self.folder)
            if inventory_file is not None:
                self._write_inventory(record, inventory_file, variables)
            changed = sorted({*remake, *start, *install})
            return Up(self.machines(), [self.machine_name(number) for number in changed])

    def reset(self, names: Sequence[str] = ()) -> Up:
        """Throw machines away and make them again from the image: same name, address and keys. Default: all."""
        chosen = [self.machine(name).name for name in names] or [machine.name for machine in self.machines()]
        deps.require()
        with locked(self._lock):
            record = self.record()
            if self._lost(record):
                raise LabError(
                    f"Lab {self.name} did not survive a restart. Make it again: python -m tests.lab up {self.name}"
                )
            numbers = [number for number in record.machines if self.machine_name(number) in chosen]
            for number in numbers:
                record.made.pop(str(number), None)
            record.save(self.folder)
            self._make(record, numbers)
            record.made.update({str(number): record.gpus for number in numbers})
            record.save(self.folder)
            return Up(self.machines(), chosen)

    def down(self) -> bool:
        """Remove the machines, their network, keys, file servers and inventory files. False when there is no lab."""
        with locked(self._lock):
            record = Record.load(self.folder)
            if record is None:
                return False
            for server in record.servers:
                _stop(server)
            self._close_connections()
            self.podman.ensure_holder()
            self._remove_all(record)
            for path in record.inventories:
                Path(path).unlink(missing_ok=True)
            shutil.rmtree(self.folder)
        self._lock.unlink(missing_ok=True)
        with locked(self.paths.state / "lock"):
            if not any(self.paths.labs.glob("*/lab.json")):
                self.podman.remove_groups()
                self.podman.end_holder()
        return True

    # Files for the machines ------------------------------------------------------------------------------------

    def serve(self, root: Path) -> str:
        """Serve a folder by HTTP on the lab's gateway address, which its machines reach. Returns the base URL.

        A folder that is served already keeps its URL, also after its server had to be started again.
        """
        root = root.resolve()
        if not root.is_dir():
            raise LabError(f"{root} is not a folder")
        with locked(self._lock):
            return self._serve(self.record(), root)

    def _serve(self, record: Record, root: Path) -> str:
        known = next((server for server in record.servers if server.root == str(root)), None)
        if known is not None and is_alive(known.process):
            return known.url
        taken = {server.port for server in record.servers}
        port = known.port if known else next(n for n in range(FIRST_PORT, 65536) if n not in taken)
        server = self._start_server(record, root, port)
        record.servers = [other for other in record.servers if other.root != str(root)] + [server]
        record.save(self.folder)
        return server.url

    def unserve(self, root: Path) -> bool:
        """Stop serving a folder. False when it was not served."""
        with locked(self._lock):
            record = self.record()
            known = [server for server in record.servers if server.root == str(root.resolve())]
            for server in known:
                _stop(server)
            record.servers = [server for server in record.servers if server not in known]
            record.save(self.folder)
            return bool(known)

    def _start_server(self, record: Record, root: Path, port: int) -> Server:
        gateway = network.Addresses(IPv4Network(record.subnet)).gateway
        log = self.folder / f"serve-{port}.log"
        with log.open("wb") as handle:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.lab.fileserver",
                    "--root",
                    str(root),
                    "--bind",
                    gateway,
                    "--port",
                    str(port),
                ],
                cwd=Path(__file__).resolve().parents[2],
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        url = f"http://{gateway}:{port}"
        deadline = time.monotonic() + SERVER_START_TIMEOUT
        while url not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise LabError(f"The file server for {root} did not start:\n  {log.read_text().strip()}")
            time.sleep(0.02)
        return Server(root=str(root), url=url, port=port, process=process_identity(process.pid))

    # Parts -----------------------------------------------------------------------------------------------------

    def _image(self, wishes: Wishes) -> tuple[str, Path | None]:
        """The image's tag, and the archive's folder for machines with a claim."""
        tag = image.ensure(self.podman, image.recipe(wishes.suite, wishes.base, wishes.components))
        if wishes.claims is None:
            return tag, None
        archive = ensure_archive(self.paths, suites((repository.CLAIMS[wishes.claims],)))
        server = image.ensure_layer(self.podman, image.server_layer(tag, repository.SERVER_PACKAGES))
        layer = image.Layer(
            f"{wishes.claims}-{wishes.kernel}",
            server,
            repository.finish(wishes.claims, wishes.kernel),
            repository.files(wishes.claims),
            repository.EXECUTABLE,
            {archive.root: "/volta-archive"},
            # An archive whose drivers change leaves the image as it is.
            archive_of_kernels(repository.CLAIMS[wishes.claims]),
        )
        return image.ensure_layer(self.podman, layer), archive.root

    def _prepared(self, wishes: Wishes) -> Record:
        """The record of this lab with its namespace, image and network in place."""
        with locked(self.paths.state / "lock"):
            self.podman.ensure_holder()
            record = Record.load(self.folder)
            if record is not None and self._lost(record):
                say(
                    f"lab {self.name} did not survive a restart of this host or of its mount namespace; making it again"
                )
                self._remove_all(record)
                record.holder, record.made = self._holder(), {}
                record.subnet, record.network, record.bridge = self._create_network()
                record.save(self.folder)
            if record is None:
                tag, archive = self._image(wishes)
                subnet, name, bridge = self._create_network()
                record = Record(self.name, subnet, network=name, bridge=bridge, image=tag, holder=self._holder())
                record.claims, record.kernel, record.driver = wishes.claims, wishes.kernel, wishes.driver
                record.repository = None if archive is None else str(archive)
                record.save(self.folder)
            elif wishes.claims is not None and record.claims != wishes.claims:
                raise LabError(
                    f"Lab {self.name} is there and its machines claim to be {record.claims or 'what they are'}. Remove "
                    f"it first: python -m tests.lab down {self.name}"
                )
            elif not self.podman.succeeds("image", "exists", record.image):
                record.image, archive = self._image(wishes)
                record.repository = None if archive is None else str(archive)
            if record.repository is not None:
                self._serve(record, Path(record.repository))
            self._make_shared()
            return record

    def _holder(self) -> dict[str, Any] | None:
        return self.podman.recorded_holder() if self.host.private else None

    def _lost(self, record: Record) -> bool:
        """Whether the machines live in a mount namespace that is gone."""
        return record.holder != self._holder() or not self.podman.holder_alive()

    def _other_networks(self) -> list[IPv4Network]:
        """Networks of the other labs, which may not be up now."""
        folders = [path.parent for path in self.paths.labs.glob("*/lab.json") if path.parent != self.folder]
        records = [Record.load(folder) for folder in folders]
        return [IPv4Network(record.subnet) for record in records if record is not None]

    def _create_network(self) -> tuple[str, str, str]:
        """Make the lab's network. Returns its address range, its name, and the name of its bridge.

        Each network has a name of its own: podman remembers addresses by network name until the next boot, also those
        of machines it never saw go.
        """
        seed = f"{self.paths.state} {self.name}"
        subnet = str(network.choose(seed, [*network.host_networks(), *self._other_networks()]))
        name = f"volta-{self.name}-{secrets.token_hex(3)}"
        bridge = network.bridge_name(seed)
        mtu = network.host_mtu()
        options = [] if mtu is None else ["--opt", f"mtu={mtu}"]
        self.podman.call("network", "create", "--disable-dns", "--subnet", subnet, *options, name)
        self.podman.name_bridge(name, bridge)
        return subnet, name, bridge

    def _make_shared(self) -> None:
        """The folders machines mount. Any user in any machine may add to them, nobody removes what is another's."""
        ccache = self.paths.shared / "ccache"
        if not ccache.is_dir():
            ccache.mkdir(parents=True)
            for folder in (self.paths.shared, ccache):
                folder.chmod(0o1777)
        self.paths.apt.mkdir(parents=True, exist_ok=True)

    def _write_keys(self, record: Record, surplus: Sequence[int]) -> None:
        """Keys of the lab and of each machine, and the list of host keys; ``surplus`` machines lose theirs."""
        for number in surplus:
            key = self._host_key(number)
            key.unlink(missing_ok=True)
            key.with_name(key.name + ".pub").unlink(missing_ok=True)
        ssh.ensure_key(self.key, f"volta-lab-{self.name}")
        self.sockets.mkdir(exist_ok=True, mode=0o700)
        entries = {}
        for number in record.machines:
            machine = self._machine(record, number)
            entries[machine.address] = ssh.ensure_key(self._host_key(number), machine.name)
        ssh.write_known_hosts(self.known_hosts, entries)

    def _host_key(self, number: int) -> Path:
        return self.folder / f"host-{number}-ed25519"

    def _make(self, record: Record, numbers: Sequence[int]) -> None:
        """Make machines from the image, whatever was there before."""
        if numbers:
            self._close_connections()
            self._each(numbers, self._remove)
            self._each(numbers, lambda number: self._create(record, number))
            self._each(numbers, lambda number: self._start(record, number))
            self._each(numbers, lambda number: self._install_gpus(record, number))

    def _create(self, record: Record, number: int) -> None:
        name = self.machine_name(number)
        archives = self.paths.apt / name
        addresses = network.Addresses(IPv4Network(record.subnet))
        run(as_root(["sh", "-c", LINK_PACKAGES, "sh", str(self.paths.apt), str(archives)]))
        arguments = [
            "create",
            f"--name={name}",
            f"--hostname={name}",
            f"--network={record.network}",
            f"--ip={addresses.machine(number)}",
            f"--add-host=lab-host:{addresses.gateway}",
            "--systemd=always",
            # A machine that reboots itself comes back, with its disk.
            "--restart=always",
            "--cgroupns=private",
            f"--ulimit=nofile={self.host.open_files}:{self.host.open_files}",
            f"--ulimit=nproc={self.host.processes}:{self.host.processes}",
            f"--cap-add={CAPABILITIES}",
            "--security-opt=label=disable",
            "--security-opt=apparmor=unconfined",
            f"--security-opt=mask={':'.join(HIDDEN)}",
            f"--volume={self.paths.shared}:{SHARED}",
            f"--volume={archives}:/var/cache/apt/archives",
            "--cgroups=disabled" if self.host.private else "--pids-limit=-1",
        ]
        arguments += [
            f"--add-host={self.machine_name(other)}:{addresses.machine(other)}"
            for other in record.machines
            if other != number
        ]
        self.podman.call(*arguments, record.image)
        self.podman.call("cp", "-", f"{name}:/", stdin=self._files(record, number))

    def _files(self, record: Record, number: int) -> bytes:
        """What makes this machine itself, as a tar archive: who may log in, its host key, its machine id."""
        host_key = self._host_key(number)
        files = {
            "/root/.ssh/authorized_keys": self.key.with_name(self.key.name + ".pub").read_text(),
            "/etc/ssh/ssh_host_ed25519_key": host_key.read_text(),
            "/etc/ssh/ssh_host_ed25519_key.pub": host_key.with_name(host_key.name + ".pub").read_text(),
            "/etc/machine-id": image.machine_id(self.machine_name(number)),
        }
        modes = {"/root/.ssh/authorized_keys": 0o600, "/etc/ssh/ssh_host_ed25519_key": 0o600, "/etc/machine-id": 0o444}
        links: dict[str, str] = {}
        if record.gpus != simulated.NONE:
            files[simulated.INSTALLED] = simulated.simulator_text()
            modes[simulated.INSTALLED] = 0o755
            links = simulated.LINKS if record.driver is None else simulated.PACKAGES_LINKS
        if record.claims is not None:
            files["/etc/apt/sources.list.d/ubuntu.sources"] = repository.sources(
                record.claims, self._archive_url(record)
            )
        return image.tar_of(files, modes, links)

    def _archive_url(self, record: Record) -> str:
        return next(server.url for server in record.servers if server.root == record.repository)

    def _start(self, record: Record, number: int) -> None:
        name = self.machine_name(number)
        self.podman.call("start", name, group=name)
        self._wait(record, number)

    def _wait(self, record: Record, number: int) -> None:
        """Wait until the machine takes logins and systemd has started what it should."""
        machine = self._machine(record, number)
        deadline = time.monotonic() + READY_TIMEOUT
        last = ""
        while time.monotonic() < deadline:
            done = machine.run("systemctl", "is-system-running", "--wait", check=False)
            state = done.stdout.decode().strip()
            if state == "running":
                return
            if state == "degraded":
                failed = machine.output("systemctl", "list-units", "--failed", "--plain", "--no-legend")
                say(f"{machine.name}: some units failed to start:\n  {failed}")
                return
            last = state or done.stderr.decode(errors="replace").strip()
            time.sleep(0.1)
        logs = self.podman.call("logs", "--tail", "20", machine.name, check=False)
        raise LabError(f"{machine.name} ({machine.address}) was not ready after {READY_TIMEOUT} s: {last}\n{logs}")

    def _install_gpus(self, record: Record, number: int) -> None:
        if record.gpus == simulated.NONE:
            return
        machine = self._machine(record, number)
        if machine.run("test", "-e", simulated.INSTALLED, check=False).returncode != 0:
            self.podman.call("cp", "-", f"{machine.name}:/", stdin=self._files(record, number))
        machine.run(*simulated.install_command(record.gpus, record.driver))

    def _remove(self, number: int) -> None:
        name = self.machine_name(number)
        self.podman.remove(name)
        self.podman.remove_group(name)

    def _remove_all(self, record: Record) -> None:
        self._each(record.machines, self._remove)
        self.podman.call("network", "rm", "--force", record.network, check=False)
        # What podman could not undo because the machines' namespace was gone is nobody's any more.
        if Path("/sys/class/net", record.bridge).exists():
            run(as_root(["ip", "link", "delete", record.bridge]), check=False)
        for table in ("nat", "filter"):
            for rule in network.rules_of(output(as_root(["iptables", "-t", table, "-S"])), record.subnet):
                run(as_root(["iptables", "-t", table, *rule]), check=False)

    def _write_inventory(self, record: Record, path: Path, variables: Mapping[str, Any] | None) -> None:
        path = path.absolute()
        extra: dict[str, Any] = {}
        if record.gpus != simulated.NONE:
            extra["__volta_sysroot"] = simulated.SYSROOT
        if record.repository is not None:
            extra["lab_repository"] = self._archive_url(record)
        extra.update(variables or {})
        hosts = {machine.name: machine.address for machine in self.machines()}
        text = inventory.render(
            self.name, hosts, key=self.key, known_hosts=self.known_hosts, sockets=self.sockets, variables=extra
        )
        write_atomic(path, text, mode=0o600)
        if str(path) not in record.inventories:
            record.inventories.append(str(path))
            record.save(self.folder)

    def _close_connections(self) -> None:
        """End the connections Ansible keeps open: after a reset they would lead nowhere."""
        if self.sockets.is_dir():
            for socket in self.sockets.iterdir():
                run(["ssh", "-O", "exit", "-o", f"ControlPath={socket}", "machine"], check=False)
                socket.unlink(missing_ok=True)

    @staticmethod
    def _each(numbers: Sequence[int], action: Callable[[int], None]) -> None:
        """Do something for several machines at once."""
        with ThreadPoolExecutor(max_workers=max(1, min(len(numbers), 2 * (os.cpu_count() or 1)))) as pool:
            list(pool.map(action, numbers))


#: Gives a machine's package folder what others have downloaded. Links cost nothing, and apt checks each file anyway.
#: One may be gone by the time it is linked: apt on that machine cleans up as well.
LINK_PACKAGES = """\
mkdir -p "$2" || exit
for package in "$1"/*/*.deb; do
    [ -e "$2/${package##*/}" ] || ln "$package" "$2/" 2>/dev/null || [ ! -e "$package" ] || exit
done
"""


def _stop(server: Server) -> None:
    if server.process is not None and is_alive(server.process):
        os.kill(int(server.process["pid"]), 15)
