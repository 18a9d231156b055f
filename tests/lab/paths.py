# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where the lab keeps things. Nothing is kept anywhere else, so removing these folders removes the lab."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Paths:
    """``cache``: what can be made again and is worth keeping. ``state``: keys, records, the lab's own podman store."""

    cache: Path
    state: Path

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Paths:
        """VOLTA_LAB_CACHE and VOLTA_LAB_STATE, else the XDG folders, else the places XDG names by default."""
        env = os.environ if environ is None else environ
        home = Path(env.get("HOME") or Path.home())
        cache_home = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
        state_home = Path(env.get("XDG_STATE_HOME") or home / ".local/state")
        return cls(
            cache=Path(env.get("VOLTA_LAB_CACHE") or cache_home / "volta-llm").absolute(),
            state=Path(env.get("VOLTA_LAB_STATE") or state_home / "volta-llm/lab").absolute(),
        )

    @property
    def images(self) -> Path:
        """Base images as tar archives, named by the hash of what they are made of."""
        return self.cache / "images"

    @property
    def shared(self) -> Path:
        """The folder every machine mounts at /var/cache/volta-lab."""
        return self.cache / "shared"

    @property
    def apt(self) -> Path:
        """Downloaded packages, a folder a machine: apt locks its archive folder, so machines cannot share one."""
        return self.cache / "apt"

    @property
    def labs(self) -> Path:
        return self.state / "labs"

    @property
    def podman(self) -> Path:
        """Storage, networks and configuration of the lab's own podman, apart from what else podman does here."""
        return self.state / "podman"

    @property
    def holder(self) -> Path:
        """Which process keeps the private mount namespace."""
        return self.state / "holder.json"

    @property
    def runtime(self) -> Path:
        """What must not outlive a reboot. One folder for each state folder, so two users' labs stay apart."""
        digest = hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        return Path("/run") / f"volta-lab-{digest}"
