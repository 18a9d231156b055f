# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A virtual machine: for what a container cannot show (its own kernel, initramfs, GRUB, reboots, cgroup filters).

qemu runs it, with KVM where KVM works and in software elsewhere. It is reached by SSH on a port of this host's
loopback, and reaches this host's loopback as 10.0.2.2. Each machine has an overlay of the cached disk; ``down`` throws
it away. docs/vm.md tells more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab import deps, image, inventory, ssh, vm_image
from tests.lab import gpus as simulated
from tests.lab.errors import LabError
from tests.lab.files import locked, write_atomic
from tests.lab.lab import NAME, SERVER_START_TIMEOUT, Machine
from tests.lab.paths import Paths
from tests.lab.podman import is_alive, process_identity
from tests.lab.proc import run, say

#: What this host needs beside mmdebstrap and SSH, for the virtual machine alone.
NEEDS = (
    *(need for need in deps.NEEDS if need.package in ("mmdebstrap", "debian-archive-keyring", "openssh-client")),
    deps.Need("qemu-system-x86", "runs the virtual machine", program="qemu-system-x86_64"),
    deps.Need("qemu-utils", "makes its overlay disk", program="qemu-img"),
    deps.Need("e2fsprogs", "makes its file system", program="mke2fs"),
)
LOOPBACK = "127.0.0.1"
#: "kvm" or "tcg" (in software); unset: KVM where a probe shows that it works.
ACCELERATOR = "VOLTA_VM_ACCEL"
MEMORY_MIB = 2048
#: Seconds. In software a start takes half a minute, on a host busy with builds several times that.
READY_TIMEOUT = {"kvm": 90.0, "tcg": 1800.0}
#: Seconds until the firmware has run into its end: one when KVM works, never when it hangs.
PROBE_TIMEOUT = 10.0
#: What SeaBIOS writes to its debug port once it has run through, with nothing to start from.
PROBE_ANSWER = b"No bootable device"
STOP_TIMEOUT = 300.0


@dataclass(frozen=True)
class VirtualMachine(Machine):
    """A machine behind a port of this host's loopback."""

    port: int = 22

    def ssh(self, *, batch: bool = False) -> list[str]:
        """Over one connection that stays open: in software, and beside builds, each handshake takes seconds."""
        command = ssh.command(self.address, self.key, self.known_hosts)
        if batch:
            patience = ["BatchMode=yes", "ConnectTimeout=60", "ServerAliveInterval=15", "ServerAliveCountMax=8"]
            socket_path = str(self.key.with_name("cp"))
            if len(socket_path) <= inventory.SOCKET_ROOM:
                patience += ["ControlMaster=auto", "ControlPersist=600", f"ControlPath={socket_path}"]
            command[1:1] = [word for option in patience for word in ("-o", option)]
        return [*command[:-1], "-p", str(self.port), command[-1]]

    def hang_up(self) -> None:
        """Close that connection: after a restart it would lead nowhere."""
        run(["ssh", "-O", "exit", "-o", f"ControlPath={self.key.with_name('cp')}", "machine"], check=False)


def qemu_command(
    *, accelerator: str, disk: Path, disk_format: str, port: int, folder: Path, processors: int
) -> list[str]:
    """The command line. Only the devices named here exist; the card in slot 0x10 stands for a V100 (vm_image)."""
    return [
        "qemu-system-x86_64",
        "-nodefaults",
        "-no-user-config",
        "-machine",
        "pc",
        "-accel",
        "kvm" if accelerator == "kvm" else "tcg,thread=multi",
        "-cpu",
        # Four levels of page tables are quicker to walk in software than five.
        "host" if accelerator == "kvm" else "max,la57=off",
        "-smp",
        str(processors),
        "-m",
        str(MEMORY_MIB),
        "-display",
        "none",
        "-serial",
        f"file:{folder / 'console.log'}",
        # To look into a machine that hangs: socat - UNIX-CONNECT:monitor
        "-monitor",
        "unix:monitor,server,nowait",
        "-device",
        "virtio-rng-pci",
        # The overlay is thrown away: what a crash of this host would lose is nobody's.
        "-drive",
        f"file={disk},if=virtio,format={disk_format},cache=unsafe,discard=unmap",
        "-netdev",
        f"user,id=user,hostfwd=tcp:{LOOPBACK}:{port}-:22",
        "-device",
        "virtio-net-pci,netdev=user,romfile=",
        "-device",
        "edu,addr=0x10",
        "-fw_cfg",
        f"name={vm_image.IDENTITY},file={folder / 'identity.tar'}",
    ]


def kvm_works() -> bool:
    """Whether KVM runs the firmware through. On some hosts /dev/kvm is there and the first instruction never ends."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    command = ["qemu-system-x86_64", "-accel", "kvm", "-cpu", "host", "-nodefaults", "-no-user-config"]
    debug = [
        "-m",
        "64",
        "-display",
        "none",
        "-chardev",
        "stdio,id=debug",
        "-device",
        "isa-debugcon,iobase=0x402,chardev=debug",
    ]
    process = subprocess.Popen(
        [*command, *debug], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    written = b""
    deadline = time.monotonic() + PROBE_TIMEOUT
    try:
        while PROBE_ANSWER not in written and process.poll() is None and time.monotonic() < deadline:
            written += process.stdout.read() or b""
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return PROBE_ANSWER in written


def accelerators(wanted: str | None, probe: Callable[[], bool] = kvm_works) -> list[str]:
    """What to try, in this order: KVM can pass the probe and still hang in the kernel."""
    if wanted in ("kvm", "tcg"):
        return [wanted]
    if wanted:
        raise LabError(f"{ACCELERATOR}={wanted}: use kvm, tcg, or leave it unset")
    return ["kvm", "tcg"] if probe() else ["tcg"]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        port: int = taken.getsockname()[1]
        return port


class Vm:
    """One virtual machine by name. Nothing happens until a method is called; each may be repeated."""

    def __init__(self, name: str, *, paths: Paths | None = None) -> None:
        if not NAME.fullmatch(name):
            raise LabError(f"name {name!r}: use lower case letters, digits and dashes, a letter first, at most 40")
        self.name = name
        self.paths = paths or Paths.from_environment()
        self.folder = self.paths.state / "vm" / name
        self.console = self.folder / "console.log"
        self._file = self.folder / "vm.json"

    @property
    def record(self) -> dict[str, Any]:
        """What is remembered between calls; a LabError when the machine is not up."""
        try:
            found: dict[str, Any] = json.loads(self._file.read_text())
        except FileNotFoundError:
            start = f"python -m tests.lab.vm up {self.name}"
            raise LabError(f"There is no virtual machine {self.name}. Start it: {start}") from None
        return found

    @property
    def machine(self) -> VirtualMachine:
        folder = self.folder
        return VirtualMachine(
            self.name, LOOPBACK, folder / "id_ed25519", folder / "known_hosts", int(self.record["port"])
        )

    @property
    def running(self) -> bool:
        return self._file.exists() and is_alive(self.record["process"])

    # Up and down -----------------------------------------------------------------------------------------------

    def up(
        self,
        *,
        gpus: str = simulated.NONE,
        suite: str = "bookworm",
        inventory_file: Path | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> VirtualMachine:
        """Start it from the cached disk, or from its own where it has one already."""
        simulated.require(gpus)
        require()
        with locked(self.paths.state / f"vm-{self.name}.lock"):
            if not self.running:
                disk = base_disk(self.paths, vm_image.recipe(suite))
                overlay = self.folder / "disk.qcow2"
                self.folder.mkdir(parents=True, exist_ok=True)
                if not overlay.exists():
                    run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(disk), str(overlay)])
                self.start(overlay, "qcow2")
            machine = self.machine
            if gpus != simulated.NONE:
                machine.run("tar", "-x", "-C", "/", stdin=_simulator())
                machine.run(*simulated.install_command(gpus))
        if inventory_file is not None:
            self._write_inventory(machine, inventory_file, gpus, variables)
        return machine

    def start(self, disk: Path, disk_format: str) -> None:
        """Start qemu on a disk and wait until systemd in it has started what it should."""
        key = ssh.ensure_key(self.folder / "id_ed25519", f"volta-vm-{self.name}")
        host_key = self.folder / "host-ed25519"
        public = ssh.ensure_key(host_key, self.name)
        files = {
            "/root/.ssh/authorized_keys": key + "\n",
            "/etc/ssh/ssh_host_ed25519_key": host_key.read_text(),
            "/etc/ssh/ssh_host_ed25519_key.pub": public + "\n",
        }
        (self.folder / "identity.tar").write_bytes(image.tar_of(files, dict.fromkeys(files, 0o600)))
        hangs = self.paths.state / "vm-kvm-hangs"
        host_boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        hung = hangs.exists() and hangs.read_text() == host_boot
        choices = accelerators(os.environ.get(ACCELERATOR), (lambda: False) if hung else kvm_works)
        for accelerator in choices:
            port = free_port()
            ssh.write_known_hosts(self.folder / "known_hosts", {f"[{LOOPBACK}]:{port}": public})
            command = qemu_command(
                accelerator=accelerator,
                disk=disk,
                disk_format=disk_format,
                port=port,
                folder=self.folder,
                processors=max(1, min(4, os.cpu_count() or 1)),
            )
            log = self.folder / "qemu.log"
            with log.open("wb") as handle:
                process = subprocess.Popen(
                    command,
                    # Names of sockets are short: the monitor's is relative.
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=handle,
                    stderr=handle,
                    start_new_session=True,
                )
            record = {"process": process_identity(process.pid), "port": port, "accelerator": accelerator}
            write_atomic(self._file, json.dumps({"inventories": [], "servers": [], **record}))
            failure = self._wait(process, READY_TIMEOUT[accelerator])
            if failure is None:
                say(f"{self.name} runs with {accelerator}, ssh on {LOOPBACK}:{port}, console in {self.console}")
                return
            self.stop()
            say(f"{self.name} did not start with {accelerator}: {failure}")
            if accelerator == "kvm":
                # Until this host is started again, the next machine need not find out anew.
                write_atomic(hangs, host_boot)
        tail = "\n  ".join(_tail(self.console) or _tail(self.folder / "qemu.log"))
        raise LabError(f"{self.name} did not start ({', '.join(choices)}). The end of its console:\n  {tail}")

    def _wait(self, process: subprocess.Popen[bytes], timeout: float) -> str | None:
        """Wait until it is ready. Returns what went wrong."""
        deadline = time.monotonic() + timeout
        last = "no answer"
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return f"qemu ended: {' '.join(_tail(self.folder / 'qemu.log'))}"
            with contextlib.suppress(LabError):
                call = [*self.machine.ssh(batch=True), "systemctl is-system-running --wait"]
                done = run(call, check=False, timeout=max(1.0, deadline - time.monotonic()))
                last = done.stdout.decode().strip() or done.stderr.decode(errors="replace").strip()
                if last in ("running", "degraded"):
                    return None
            time.sleep(0.5)
        return f"not ready after {timeout:g} s: {last}"

    def wait_for_boot(self, former: str, timeout: float = READY_TIMEOUT["tcg"]) -> str:
        """Wait until the boot id is another than ``former`` and systemd has started what it should; the new id."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.machine.hang_up()
            with contextlib.suppress(LabError):
                script = "cat /proc/sys/kernel/random/boot_id; systemctl is-system-running --wait"
                done = run([*self.machine.ssh(batch=True), script], check=False, timeout=timeout)
                boot_id, _, state = done.stdout.decode().strip().partition("\n")
                if boot_id != former and state in ("running", "degraded"):
                    return boot_id
            time.sleep(0.5)
        raise LabError(f"{self.name} did not come back within {timeout:g} s; its console is {self.console}")

    def stop(self) -> None:
        """End qemu by its process id, as pulling the plug."""
        if not self._file.exists():
            return
        self.machine.hang_up()
        identity = self.record["process"]
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not is_alive(identity):
                return
            os.kill(int(identity["pid"]), number)
            deadline = time.monotonic() + 10
            while is_alive(identity) and time.monotonic() < deadline:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(identity["pid"]), os.WNOHANG)
                time.sleep(0.05)

    def down(self) -> bool:
        """Stop it and remove its disk, keys and inventory files. False when there is none."""
        with locked(self.paths.state / f"vm-{self.name}.lock"):
            if not self.folder.is_dir():
                return False
            if self._file.exists():
                self.stop()
                for server in self.record["servers"]:
                    if is_alive(server["process"]):
                        os.kill(int(server["process"]["pid"]), signal.SIGTERM)
                for path in self.record["inventories"]:
                    Path(path).unlink(missing_ok=True)
            shutil.rmtree(self.folder)
        return True

    # Files for the machine -------------------------------------------------------------------------------------

    def serve(self, root: Path) -> str:
        """Serve a folder by HTTP on this host's loopback, which the machine reaches. Returns the URL it uses."""
        root = root.resolve()
        record = self.record
        for server in record["servers"]:
            if server["root"] == str(root) and is_alive(server["process"]):
                return str(server["url"])
        port = free_port()
        log = self.folder / f"serve-{port}.log"
        command = [sys.executable, "-m", "tests.lab.fileserver", "--root", str(root), "--bind", LOOPBACK]
        with log.open("wb") as handle:
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                cwd=Path(__file__).resolve().parents[2],
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + SERVER_START_TIMEOUT
        while f":{port}" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise LabError(f"The file server for {root} did not start:\n  {log.read_text().strip()}")
            time.sleep(0.02)
        url = f"http://{vm_image.HOST}:{port}"
        record["servers"].append({"root": str(root), "url": url, "process": process_identity(process.pid)})
        write_atomic(self._file, json.dumps(record))
        return url

    def _write_inventory(
        self, machine: VirtualMachine, path: Path, gpus: str, variables: Mapping[str, Any] | None
    ) -> None:
        path = path.absolute()
        extra: dict[str, Any] = {"ansible_port": machine.port}
        if gpus != simulated.NONE:
            extra["__volta_sysroot"] = simulated.SYSROOT
        extra.update(variables or {})
        hosts = {machine.name: machine.address}
        text = inventory.render(
            self.name, hosts, key=machine.key, known_hosts=machine.known_hosts, variables=extra
        ).replace("tests.lab ", "tests.lab.vm ")
        write_atomic(path, text, mode=0o600)
        record = self.record
        record["inventories"] = sorted({*record["inventories"], str(path)})
        write_atomic(self._file, json.dumps(record))


def base_disk(paths: Paths, wanted: vm_image.Recipe) -> Path:
    """The cached disk, made unless it is there: filled, then started once so that GRUB installs itself."""
    disk = paths.images / wanted.name
    with locked(paths.cache / "vm-image.lock"):
        if disk.exists():
            return disk
        partial = disk.with_name(disk.name + ".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        vm_image.make(wanted, partial)
        say("starting it once, so that GRUB installs itself")
        first = Vm("first-start", paths=paths)
        first.down()
        first.folder.mkdir(parents=True)
        try:
            first.start(partial, "raw")
            first.machine.run("sh", "-s", stdin=vm_image.FIRST_START.encode())
            deadline = time.monotonic() + STOP_TIMEOUT
            while first.running:
                if time.monotonic() > deadline:
                    raise LabError(f"The virtual machine did not switch itself off within {STOP_TIMEOUT:g} s")
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(first.record["process"]["pid"]), os.WNOHANG)
                time.sleep(0.2)
        finally:
            first.down()
        partial.replace(disk)
    return disk


def require() -> None:
    absent = deps.missing(NEEDS)
    if absent:
        names = ", ".join(f"{need.package} ({need.why})" for need in absent)
        raise LabError(f"Missing on this host: {names}. Install with: python -m tests.lab.vm deps --install")


def all_names(paths: Paths) -> list[str]:
    return sorted(path.name for path in (paths.state / "vm").glob("*") if path.is_dir())


def _simulator() -> bytes:
    files = {simulated.INSTALLED: simulated.simulator_text()}
    return image.tar_of(files, {simulated.INSTALLED: 0o755}, simulated.LINKS)


def _tail(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-15:] if path.exists() else []


# The command line ----------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.lab.vm", description=(__doc__ or "").partition("\n")[0])
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("deps", help="name missing packages of the operating system")
    one.add_argument("--install", action="store_true", help="install them with apt, through sudo where not root")
    one = commands.add_parser("up", help="start a virtual machine; one that runs is left as it is")
    one.add_argument("name")
    one.add_argument("--gpus", metavar="PROFILE", default=simulated.NONE, help="simulated GPUs, for example v100x4")
    one.add_argument("--inventory", type=Path, metavar="FILE", help="write the connection details for Ansible to FILE")
    one = commands.add_parser("down", help="stop it and remove its disk, keys and inventory files")
    one.add_argument("name")
    one = commands.add_parser("exec", help="run a command on it, as root")
    one.add_argument("name")
    one.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    one = commands.add_parser("ssh", help="log in, as root")
    one.add_argument("name")
    commands.add_parser("status", help="which virtual machines there are")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """0 on success, 1 with one message on standard error when something is wrong, 2 for a wrong call."""
    options = parser().parse_args(arguments)
    try:
        return _command(options)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _command(options: argparse.Namespace) -> int:
    if options.command == "deps":
        absent = deps.missing(NEEDS)
        if absent and options.install:
            deps.install(absent)
            absent = deps.missing(NEEDS)
        for need in absent:
            print(f"{need.package}: {need.why}")
        return 1 if absent else 0
    if options.command == "status":
        paths = Paths.from_environment()
        for name in all_names(paths):
            vm = Vm(name, paths=paths)
            print(f"{name} {'runs' if vm.running else 'stopped'}, console in {vm.console}")
        return 0
    vm = Vm(options.name)
    if options.command == "up":
        machine = vm.up(gpus=options.gpus, inventory_file=options.inventory)
        print(f"{machine.name} {machine.address}:{machine.port} {vm.record['accelerator']}")
    elif options.command == "down":
        print(f"virtual machine {vm.name} {'removed' if vm.down() else 'was not there'}")
    elif options.command == "ssh":
        return subprocess.call(vm.machine.ssh())
    else:
        argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
        if not argv:
            raise LabError("exec needs a command: python -m tests.lab.vm exec NAME -- COMMAND ...")
        return subprocess.call([*vm.machine.ssh(batch=True), shlex.join(argv)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
