# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which kernel runs and which one boots next."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..machine import Machine
from .values import is_index, version_key

_ENTRY = re.compile(r"""^\s*(?P<kind>menuentry|submenu)\s+(?P<quote>['"])(?P<title>.*?)(?P=quote)(?P<rest>.*)$""")
_ID = re.compile(r"""(?:\$menuentry_id_option|--id)\s+['"]?(?P<id>[^'"\s{]+)""")
_LINUX = re.compile(r"^\s*linux(?:16|efi)?\s+(?P<path>\S*/)?vmlinu[xz]-(?P<kernel>\S+)", re.MULTILINE)

_COPY = re.compile(r"(?:\.(?:old|bak|orig|save|rpmsave|rpmnew|sig|signed|tmp|new|dpkg-[a-z]+)|~)$")


@dataclass(frozen=True)
class Kernels:
    """``installed`` newest first; ``next_from`` says how the next one was found: ``grub`` (the menu entry that GRUB's
    settings select), ``newest`` (the newest with an image in /boot), ``running`` (no boot images, as in a container).
    """

    running: str | None
    next: str | None
    next_from: str | None
    installed: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "next": self.next,
            "next_from": self.next_from,
            "installed": list(self.installed),
        }


def kernels(machine: Machine) -> Kernels:
    """Running from /proc, next from GRUB's menu and its settings, else the newest image."""
    running = (machine.read("/proc/sys/kernel/osrelease") or "").strip() or None
    images = [
        match[1] for name in machine.listdir("/boot") if (match := re.fullmatch(r"vmlinu[xz]-(.+)", name)) is not None
    ]
    # Packages and people leave copies behind; GRUB passes over most of them too (grub-mkconfig_lib).
    installed = sorted({image for image in images if not _COPY.search(image)}, key=version_key, reverse=True)
    if not installed:
        return Kernels(running, running, "running" if running else None)
    selected = _grub_selection(machine)
    if selected is not None and selected in installed:
        return Kernels(running, selected, "grub", tuple(installed))
    return Kernels(running, installed[0], "newest", tuple(installed))


@dataclass(frozen=True)
class _Entry:
    """A menu entry: its titles from the outermost menu inwards, its ids likewise, its kernel."""

    titles: tuple[str, ...]
    ids: tuple[str, ...]
    position: tuple[int, ...]
    kernel: str | None


def _grub_selection(machine: Machine) -> str | None:
    """The kernel of the entry that boots next, or null where that cannot be told."""
    config = machine.read("/boot/grub/grub.cfg") or machine.read("/boot/grub2/grub.cfg")
    if not config:
        return None
    entries = _entries(config)
    environment = dict(
        line.split("=", 1)
        for line in (machine.read("/boot/grub/grubenv") or machine.read("/boot/grub2/grubenv") or "").splitlines()
        if "=" in line and not line.startswith("#")
    )
    wanted = environment.get("next_entry") or _default(machine)
    if wanted == "saved":
        wanted = environment.get("saved_entry") or "0"
    return _find(entries, wanted)


def _default(machine: Machine) -> str:
    """GRUB_DEFAULT of /etc/default/grub and its drop-ins; the last setting counts."""
    value = "0"
    files = ["/etc/default/grub"]
    files += [f"/etc/default/grub.d/{name}" for name in machine.listdir("/etc/default/grub.d") if name.endswith(".cfg")]
    for path in files:
        for line in (machine.read(path) or "").splitlines():
            match = re.match(r"""\s*GRUB_DEFAULT=(['"]?)(.*?)\1\s*$""", line)
            if match:
                value = match[2]
    return value


def _entries(config: str) -> list[_Entry]:
    """The menu of grub.cfg. Braces decide nesting; ``linux`` lines name the kernel."""
    found: list[_Entry] = []
    stack: list[tuple[str, str, int, int]] = []  # title, id, position, depth at which it was opened
    counters = [0]
    depth = 0
    for line in config.splitlines():
        match = _ENTRY.match(line)
        if match:
            identity = _ID.search(match["rest"])
            stack.append((match["title"], identity["id"] if identity else "", counters[-1], depth))
            counters[-1] += 1
            counters.append(0)
            if match["kind"] == "menuentry":
                found.append(
                    _Entry(
                        tuple(item[0] for item in stack),
                        tuple(item[1] for item in stack),
                        tuple(item[2] for item in stack),
                        None,
                    )
                )
        elif stack and found and (kernel := _LINUX.match(line)) and found[-1].kernel is None:
            last = found[-1]
            found[-1] = _Entry(last.titles, last.ids, last.position, kernel["kernel"])
        quoted = re.sub(r"'[^']*'|\"[^\"]*\"|\$\{[^}]*\}", "", line)
        depth += quoted.count("{") - quoted.count("}")
        while stack and depth <= stack[-1][3]:
            stack.pop()
            counters.pop()
    return found


def _find(entries: list[_Entry], wanted: str) -> str | None:
    """An entry by position (``0``, ``1>2``), title or id, each with ``>`` between levels."""
    parts = tuple(part.strip() for part in wanted.split(">"))
    for entry in entries:
        forms = (tuple(str(number) for number in entry.position), entry.titles, entry.ids)
        if any(parts == form for form in forms):
            return entry.kernel
        # An id names its entry without the menus above it.
        if len(parts) == 1 and parts[0] and parts[0] == entry.ids[-1]:
            return entry.kernel
    if len(parts) == 1 and is_index(parts[0]):
        # A number can name a submenu; GRUB then boots its first entry.
        for entry in entries:
            if entry.position[0] == int(parts[0]):
                return entry.kernel
    return None
