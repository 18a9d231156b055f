# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the lab remembers of a lab between calls: one JSON file each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.files import write_atomic

FILE = "lab.json"


@dataclass
class Server:
    """A running file server: the folder, its address, and the process that serves it (see podman.process_identity)."""

    root: str
    url: str
    port: int
    process: dict[str, Any] | None = None


@dataclass
class Record:
    """One lab. ``network`` is podman's name for its network; ``holder`` keeps the mount namespace its machines live in,
    None where none is needed.

    ``claims`` is the release that its machines claim to be, ``driver`` what the simulator takes for the driver, null
    for its own; ``kernel`` the kind of kernel that machines with a claim start with.

    ``machines`` are numbers 1, 2, ...; ``gpus`` is a profile of the simulator or "none"; ``made`` gives, by number, the
    profile of each machine that was finished: one that is missing there was interrupted half-way and is made again.
    ``inventories`` are the files written for it.
    """

    name: str
    subnet: str
    network: str
    bridge: str
    image: str
    holder: dict[str, Any] | None = None
    machines: list[int] = field(default_factory=list)
    gpus: str = "none"
    made: dict[str, str] = field(default_factory=dict)
    inventories: list[str] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    claims: str | None = None
    driver: str | None = None
    kernel: str = "generic"
    repository: str | None = None

    @classmethod
    def load(cls, folder: Path) -> Record | None:
        """The record in ``folder``; None when there is no lab."""
        try:
            raw = json.loads((folder / FILE).read_text())
        except FileNotFoundError:
            return None
        raw["servers"] = [Server(**server) for server in raw["servers"]]
        return cls(**raw)

    def save(self, folder: Path) -> None:
        write_atomic(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")
