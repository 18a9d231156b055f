# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Removing everything the lab ever made on this host."""

from __future__ import annotations

from pathlib import Path

from tests.lab.errors import LabError
from tests.lab.host import detect
from tests.lab.lab import Lab
from tests.lab.paths import Paths
from tests.lab.podman import Podman
from tests.lab.proc import as_root, run, say
from tests.lab.vm import Vm, all_names


def clear(paths: Paths, *, everything: bool) -> None:
    """Machines, networks, images, keys and records; with ``everything`` also the caches."""
    host = detect()
    podman = Podman(paths, host)
    for folder in sorted(paths.labs.glob("*/lab.json")):
        name = folder.parent.name
        say(f"removing lab {name}")
        Lab(name, paths=paths, host=host).down()
    for name in all_names(paths):
        say(f"removing virtual machine {name}")
        Vm(name, paths=paths).down()
    if paths.podman.is_dir():
        podman.ensure_holder()
        for name in podman.containers():
            podman.remove(name)
        podman.remove_groups()
        podman.end_holder()
    remove(paths.state)
    remove(paths.runtime)
    if everything:
        remove(paths.cache)


def remove(folder: Path) -> None:
    """Remove a folder of the lab; parts of it belong to root."""
    if not folder.exists():
        return
    # The names come from the environment: a mistake there must not remove a home folder.
    if not ({"volta-llm", "volta-lab"} & set(folder.parts) or folder.name.startswith("volta-lab-")):
        raise LabError(
            f"{folder} was not removed: a folder of the lab has volta-llm or volta-lab in its path. Remove it by hand."
        )
    run(as_root(["rm", "-rf", "--one-file-system", str(folder)]))
