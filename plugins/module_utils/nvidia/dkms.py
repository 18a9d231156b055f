# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""``dkms status``, in the form of every release: with commas (dkms 2) and with a slash (dkms 3), with suffixes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..machine import Machine
from .values import version_key

#: Lines of a build's log that go into a message.
_LINES = 12
_LINE = re.compile(
    r"^(?P<name>[^,/\s]+)(?:,\s*|/)(?P<version>[^,:\s]+)"
    r"(?:,\s*(?P<kernel>[^,:\s]+),\s*(?P<arch>[^,:\s]+))?"
    r":\s*(?P<state>[a-z][a-z-]*)(?:\s+(?P<note>.*))?$"
)
#: Names under which distributions register the driver: nvidia, nvidia-current (Debian), nvidia-srv (Ubuntu), ...
_NVIDIA = re.compile(r"^nvidia(?:-|$)(?!fs|peermem)")


@dataclass(frozen=True)
class DkmsEntry:
    """One module for one kernel; ``kernel`` is null where DKMS only has the source (state ``added``)."""

    name: str
    version: str
    kernel: str | None
    arch: str | None
    state: str
    note: str

    @property
    def built(self) -> bool:
        """Only ``installed`` puts the module where modprobe finds it; ``added`` and ``built`` do not."""
        return self.state == "installed"

    @property
    def differs(self) -> bool:
        """The module on disk is not the one that DKMS built."""
        return "diff between built and installed module" in self.note.lower()

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "built": self.built}


@dataclass
class DkmsStatus:
    """The driver's entries, and what dkms had to say besides (errors, warnings)."""

    entries: list[DkmsEntry] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def for_kernel(self, kernel: str) -> list[DkmsEntry]:
        return [entry for entry in self.entries if entry.kernel == kernel]

    def versions(self) -> set[str]:
        return {entry.version for entry in self.entries}


def build_logs(machine: Machine, kernel: str) -> list[str]:
    """Logs of failed builds: DKMS leaves them in the build folder, newest version first."""
    found = []
    for name in machine.listdir("/var/lib/dkms"):
        if not name.startswith("nvidia"):
            continue
        folder = f"/var/lib/dkms/{name}"
        for version in sorted(machine.listdir(folder), key=version_key, reverse=True):
            found += [f"{folder}/{version}/build/make.log", f"{folder}/{version}/{kernel}/x86_64/log/make.log"]
    return [path for path in found if machine.exists(path)]


def what_the_build_said(machine: Machine, kernel: str) -> str:
    """The end of what the last build of the driver's module printed, to go on a message; empty where there is none."""
    for path in build_logs(machine, kernel):
        lines = [line.rstrip() for line in (machine.read(path) or "").splitlines() if line.strip()]
        # The build folder keeps the log of the last build, for whichever kernel that was.
        of = re.search(r" for kernel (\S+)", lines[0]) if lines else None
        if lines and (of is None or of[1] == kernel):
            return f"; the end of {path}:\n    " + "\n    ".join(lines[-_LINES:])
    return ""


def parse(lines: Iterable[str]) -> DkmsStatus:
    """Read ``dkms status``; modules other than the NVIDIA driver's are left out."""
    status = DkmsStatus()
    for line in lines:
        text = line.strip()
        match = _LINE.match(text)
        if match is None:
            if text:
                status.messages.append(text)
            continue
        if _NVIDIA.match(match["name"]):
            status.entries.append(
                DkmsEntry(
                    match["name"],
                    match["version"],
                    match["kernel"],
                    match["arch"],
                    match["state"],
                    (match["note"] or "").strip(),
                )
            )
    return status
