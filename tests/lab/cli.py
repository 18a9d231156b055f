# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The command line: ``python -m tests.lab``."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lab import deps, gpus, image, inventory
from tests.lab.clear import clear
from tests.lab.errors import LabError
from tests.lab.host import detect
from tests.lab.lab import Lab
from tests.lab.paths import Paths
from tests.lab.podman import Podman, is_alive
from tests.lab.record import Record
from tests.lab.repository import claims

DESCRIPTION = """\
Machines for the demo and the tests: containers with systemd as process 1, apt and SSH, each with its own address.
"""
EPILOG = """\
examples:
  python -m tests.lab deps --install        what the lab needs from this host, installed with apt
  python -m tests.lab up demo --gpus v100x4 --inventory inventories/demo/lab.yml
  python -m tests.lab ssh demo 1            log in to the first machine
  python -m tests.lab reset demo            back to the base image in seconds, same address and keys
  python -m tests.lab clear --all           remove everything it ever made

Files are kept below ~/.cache/volta-llm (VOLTA_LAB_CACHE) and ~/.local/state/volta-llm/lab (VOLTA_LAB_STATE).
VOLTA_LAB_IMAGE names a registry image to build machines on, for example ubuntu:22.04. docs/lab.md tells more.
"""


def parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m tests.lab", description=DESCRIPTION, epilog=EPILOG, formatter_class=formatter
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("deps", help="name missing packages of the operating system; --install installs them")
    one.add_argument("--install", action="store_true", help="install them with apt, through sudo where not root")
    one.set_defaults(action=do_deps)

    one = commands.add_parser("image", help="make the base image, or find it made already")
    _image_options(one)
    one.add_argument("--rebuild", action="store_true", help="make it again even when it is there")
    one.set_defaults(action=do_image)

    one = commands.add_parser("up", help="start a lab; one that runs is left as it is")
    one.add_argument("lab", help="name of the lab, for example demo")
    one.add_argument("-n", "--count", type=int, help="machines it should have (default: what it has, or 1)")
    one.add_argument(
        "--gpus", metavar="PROFILE", help="simulated GPUs, for example v100x4, or none (default: what it has)"
    )
    one.add_argument("--inventory", type=Path, metavar="FILE", help="write the connection details for Ansible to FILE")
    one.add_argument(
        "--var",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for the inventory (repeatable; YAML value)",
    )
    _image_options(one)
    one.add_argument(
        "--claims",
        choices=claims.CLAIMS,
        help="machines that claim to be this release and take kernels and drivers from the lab's own archive",
    )
    one.add_argument(
        "--kernel", choices=claims.KERNELS, help="with --claims: the kernel they start with (default: generic)"
    )
    one.add_argument(
        "--driver",
        choices=[gpus.PACKAGES],
        help="the driver is what packages on the machine make of it, not the simulator's own; implied by --claims",
    )
    one.set_defaults(action=do_up)

    one = commands.add_parser("reset", help="make machines again from the base image: same address, same keys")
    one.add_argument("lab")
    one.add_argument("machine", nargs="*", help="names or numbers (default: all)")
    one.set_defaults(action=do_reset)

    one = commands.add_parser("down", help="remove a lab: machines, network, keys, file servers, inventory file")
    one.add_argument("lab")
    one.set_defaults(action=do_down)

    one = commands.add_parser("clear", help="remove all labs, images and keys")
    one.add_argument(
        "--all", action="store_true", help="the caches too (base image, compiled code, downloaded packages)"
    )
    one.set_defaults(action=do_clear)

    one = commands.add_parser("status", help="what was found on this host, and which labs there are")
    one.set_defaults(action=do_status)

    one = commands.add_parser("exec", help="run a command on a machine, as root")
    one.add_argument("lab")
    one.add_argument("machine", help="name or number")
    one.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    one.set_defaults(action=do_exec)

    one = commands.add_parser("ssh", help="log in to a machine, as root")
    one.add_argument("lab")
    one.add_argument("machine", nargs="?", default="1", help="name or number (default: 1)")
    one.set_defaults(action=do_ssh)

    one = commands.add_parser("serve", help="serve a folder by HTTP to the machines of a lab; prints the base URL")
    one.add_argument("lab")
    one.add_argument("dir", type=Path)
    one.set_defaults(action=do_serve)

    one = commands.add_parser("unserve", help="stop serving a folder")
    one.add_argument("lab")
    one.add_argument("dir", type=Path)
    one.set_defaults(action=do_unserve)
    return top


def _image_options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--suite",
        default="bookworm",
        choices=image.SUITES,
        help="Debian release of the base image (default: %(default)s)",
    )
    one.add_argument(
        "--components",
        default="main",
        help="components of Debian's archive, for example 'main contrib non-free' (default: %(default)s)",
    )
    one.add_argument(
        "--image",
        default=os.environ.get("VOLTA_LAB_IMAGE") or None,
        metavar="NAME",
        help="build on this registry image instead, for example ubuntu:22.04 (default: VOLTA_LAB_IMAGE)",
    )


def do_deps(options: argparse.Namespace) -> int:
    absent = deps.missing((*deps.NEEDS, *deps.DEVELOPMENT))
    if absent and options.install:
        deps.install(absent)
        absent = deps.missing((*deps.NEEDS, *deps.DEVELOPMENT))
    for need in absent:
        print(f"{need.package}: {need.why}")
    if not absent:
        deps.require()
    return 1 if absent else 0


def do_image(options: argparse.Namespace) -> int:
    deps.require()
    podman = Podman(Paths.from_environment(), detect())
    podman.ensure_holder()
    print(image.ensure(podman, image.recipe(options.suite, options.image, options.components), rebuild=options.rebuild))
    return 0


def do_up(options: argparse.Namespace) -> int:
    result = Lab(options.lab).up(
        count=options.count,
        gpus=options.gpus,
        suite=options.suite,
        base=options.image,
        components=options.components,
        claims=options.claims,
        kernel=options.kernel,
        driver=options.driver,
        inventory_file=options.inventory,
        variables=inventory.parse_variables(options.var),
    )
    for machine in result.machines:
        print(f"{machine.name} {machine.address} {'started' if machine.name in result.changed else 'unchanged'}")
    return 0


def do_reset(options: argparse.Namespace) -> int:
    for name in Lab(options.lab).reset(options.machine).changed:
        print(f"{name} reset")
    return 0


def do_down(options: argparse.Namespace) -> int:
    print(f"lab {options.lab} {'removed' if Lab(options.lab).down() else 'was not there'}")
    return 0


def do_clear(options: argparse.Namespace) -> int:
    clear(Paths.from_environment(), everything=options.all)
    return 0


def do_status(options: argparse.Namespace) -> int:
    paths = Paths.from_environment()
    host = detect()
    podman = Podman(paths, host)
    print(host.describe())
    print(f"cache: {paths.cache}\nstate: {paths.state}")
    absent = deps.missing()
    if absent:
        print(f"missing packages: {' '.join(need.package for need in absent)}")
    reachable = podman.holder_alive() and paths.podman.is_dir()
    states = podman.containers() if reachable and not absent else {}
    folders = sorted(path.parent for path in paths.labs.glob("*/lab.json"))
    if not folders:
        print("no labs")
    for folder in folders:
        lab = Lab(folder.name, paths=paths, host=host)
        record = Record.load(folder)
        if record is None:
            continue
        print(f"lab {record.name}: {record.subnet}, image {record.image}, gpus {record.gpus}")
        for machine in lab.machines():
            print(f"  {machine.name} {machine.address} {states.get(machine.name, 'lost')}")
        for server in record.servers:
            print(f"  {server.url} {server.root} {'serving' if is_alive(server.process) else 'stopped'}")
    return 0


def do_exec(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        raise LabError("exec needs a command: python -m tests.lab exec LAB MACHINE -- COMMAND ...")
    return subprocess.call([*Lab(options.lab).machine(options.machine).ssh(batch=True), shlex.join(argv)])


def do_ssh(options: argparse.Namespace) -> int:
    return subprocess.call(Lab(options.lab).machine(options.machine).ssh())


def do_serve(options: argparse.Namespace) -> int:
    print(Lab(options.lab).serve(options.dir))
    return 0


def do_unserve(options: argparse.Namespace) -> int:
    print(f"{options.dir} {'no longer served' if Lab(options.lab).unserve(options.dir) else 'was not served'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0 on success, 1 with one message on standard error when something is wrong, 2 for a wrong call."""
    options = parser().parse_args(arguments)
    try:
        status: int = options.action(options)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return status
