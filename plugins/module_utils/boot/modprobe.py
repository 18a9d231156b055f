# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which kernel modules a device would get, for any installed kernel, as ``modprobe`` decides it.

``modprobe --resolve-alias`` leaves out the blacklist and knows one kernel at a time. Here files are read, so every
kernel is answered below any root: the device's modalias is looked up in ``modules.alias``, what is blacklisted is
taken away (modprobe.d(5), depmod(8)).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ..machine import Machine

#: By rank: a file in an earlier folder hides one of the same name in a later one.
FOLDERS = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d")
#: Tesla V100-SXM2-32GB, as its /sys/bus/pci/devices/.../modalias says.
V100 = "pci:v000010DEd00001DB5sv000010DEsd00001249bc03sc02i00"
#: How much of a modalias the lines that may match are picked by: bus and vendor of a PCI device.
_HEAD = len("pci:v000010DE")


def normal(name: str) -> str:
    """The kernel writes - and _ in module names alike."""
    return name.replace("-", "_")


@dataclass
class Configuration:
    """What modprobe.d says; ``blacklisted`` and ``disabled`` (``install NAME /bin/false``) give files by module."""

    blacklisted: dict[str, list[str]] = field(default_factory=dict)
    disabled: dict[str, list[str]] = field(default_factory=dict)
    aliases: list[tuple[str, str]] = field(default_factory=list)

    def keeps_away(self, module: str) -> list[str]:
        """The files that keep a module from loading for a device."""
        name = normal(module)
        return list(dict.fromkeys([*self.blacklisted.get(name, []), *self.disabled.get(name, [])]))


def configuration(machine: Machine, without: Collection[str] = ()) -> Configuration:
    """Read modprobe.d; ``without`` names files that are taken as absent."""
    found = Configuration()
    seen: set[str] = set()
    for folder in FOLDERS:
        for name in machine.listdir(folder):
            path = f"{folder}/{name}"
            if not name.endswith(".conf") or name in seen or path in without:
                continue
            seen.add(name)
            _read(found, path, machine.read(path) or "")
    return found


def _read(found: Configuration, path: str, text: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split("#", 1)[0].split()
        if words[:1] == ["blacklist"] and len(words) > 1:
            found.blacklisted.setdefault(normal(words[1]), []).append(path)
        elif words[:1] == ["install"] and len(words) > 2 and re.fullmatch(r"(?:/usr)?/bin/(?:false|true)", words[2]):
            found.disabled.setdefault(normal(words[1]), []).append(path)
        elif words[:1] == ["alias"] and len(words) > 2:
            found.aliases.append((words[1], words[2]))


def candidates(machine: Machine, kernel: str, modalias: str, configured: Configuration) -> list[str] | None:
    """Modules of a kernel that know the device, blacklisted or not; null where the kernel has no modules.alias."""
    text = machine.read(f"/lib/modules/{kernel}/modules.alias")
    if text is None:
        return None
    rows: list[tuple[str, str]] = list(configured.aliases)
    # A real kernel has 20,000 lines; matching each would take seconds on a slow machine.
    bus, known = f"alias {modalias.partition(':')[0]}:", f"alias {modalias[:_HEAD]}"
    for line in text.splitlines():
        if not line.startswith((bus, "alias *")):
            continue
        head = line[: len(known)]
        if head == known or any(character in head for character in "*?["):
            words = line.split()
            if len(words) == 3:
                rows.append((words[1], words[2]))
    return list(dict.fromkeys(normal(module) for pattern, module in rows if _matches(modalias, pattern)))


def _matches(modalias: str, pattern: str) -> bool:
    fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return modalias.startswith(fixed) and fnmatchcase(modalias, pattern)


def resolve(machine: Machine, kernel: str, modalias: str, configured: Configuration) -> list[str] | None:
    """The modules that udev would load for the device under a kernel."""
    return allowed(candidates(machine, kernel, modalias, configured), configured)


def allowed(found: Sequence[str] | None, configured: Configuration) -> list[str] | None:
    """Those of ``candidates`` that nothing keeps away."""
    return None if found is None else [module for module in found if not configured.keeps_away(module)]


def forced(machine: Machine, module: str) -> list[str]:
    """Files that load a module by its name; the initramfs does not ask the blacklist about those."""
    paths = ["/etc/initramfs-tools/modules", "/etc/modules"]
    for folder in ("/etc/initramfs-tools/modules.d", "/etc/modules-load.d", "/usr/lib/modules-load.d"):
        paths += [f"{folder}/{name}" for name in machine.listdir(folder)]
    # /etc/modules-load.d/modules.conf is a link to /etc/modules on Debian.
    unique = dict.fromkeys(path for path in paths if not machine.path(path).is_symlink())
    return [path for path in unique if normal(module) in _first_words(machine.read(path) or "")]


def _first_words(text: str) -> Sequence[str]:
    return [normal(line.split()[0]) for line in text.splitlines() if line.split() and line.lstrip()[0] not in "#;"]


def is_loaded(machine: Machine, module: str) -> bool:
    lines = (machine.read("/proc/modules") or "").splitlines()
    return any(line.split(" ", 1)[0] == normal(module) for line in lines)


def users(machine: Machine, module: str) -> int | None:
    """How often a loaded module is in use; null where that is not told."""
    text = (machine.read(f"/sys/module/{normal(module)}/refcnt") or "").strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None
