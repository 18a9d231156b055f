# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether the service gets to the folder of its models: modes of every parent, the sandbox of its unit, and room."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from ..faults import Fault
from ..machine import Runner
from ..transfer.engine import amount
from .catalogue import fault
from .unit import Effective, Origin

#: Folders whose contents do not last, or are no files.
_NO_PLACE = ("/tmp", "/var/tmp", "/run", "/dev", "/proc", "/sys", "/boot")
#: What ProtectHome= is about (systemd.exec(5)).
_HOMES = ("/home", "/root", "/run/user")
_TRUE = ("yes", "true", "1", "on")
#: Free bytes below which nothing is started that writes.
LEAST_FREE = 1 << 30


def is_below(path: str, folder: str) -> bool:
    """Whether ``path`` is the folder or lies in it."""
    return PurePosixPath(path).is_relative_to(folder)


def check_place(path: str, prefix: str = "/opt/ollama") -> list[Fault]:
    """Whether a path can be the folder of the models at all; the machine is not looked at."""
    problem = ""
    if not path.startswith("/") or ".." in PurePosixPath(path).parts or any(ord(char) < 32 for char in path):
        problem = "is not a path from the root"
    elif len(PurePosixPath(path).parts) < 3:
        problem = "is a folder of the system"
    elif is_below(path, prefix):
        problem = "is removed together with the releases"
    else:
        problem = next((f"does not last: it is below {folder}" for folder in _NO_PLACE if is_below(path, folder)), "")
    if not problem:
        return []
    remedy = "Write a folder of its own on a disk, such as /var/lib/ollama/models or /srv/ollama/models."
    return [fault("setting_invalid", "models_directory", f"{path} {problem}", remedy)]


class Account:
    """What an account may do with files. One that is still to be made may do what anybody may."""

    def __init__(self, name: str, runner: Runner) -> None:
        self.name = name
        self._run = runner
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            self.uid: int | None = None
            self.gids: frozenset[int] = frozenset()
        else:
            self.uid = entry.pw_uid
            self.gids = frozenset({entry.pw_gid, *(group.gr_gid for group in grp.getgrall() if name in group.gr_mem)})

    def may(self, path: Path, letters: str) -> bool:
        """Whether it may do with ``path`` what ``letters`` (of r, w and x) stand for.

        Tried out as the account where there is one, since lists of access are not in the mode; else by the mode.
        """
        tried = self._tried(path, letters)
        return self._by_mode(path, letters) if tried is None else tried

    def _tried(self, path: Path, letters: str) -> bool | None:
        if self.uid is None:
            return None
        drop = ["setpriv", f"--reuid={self.name}", f"--regid={self.name}", "--init-groups"]
        tests = [done for letter in letters for done in [self._run([*drop, "test", f"-{letter}", str(path)], 10.0)]]
        # `test` says nothing; what is said is that this could not be tried, as it takes root.
        if any(done.rc is None or done.stderr.strip() for done in tests):
            return None
        return all(done.ok for done in tests)

    def _by_mode(self, path: Path, letters: str) -> bool:
        found = path.stat()
        shift = 6 if found.st_uid == self.uid else 3 if found.st_gid in self.gids else 0
        wanted = sum({"r": 4, "w": 2, "x": 1}[letter] for letter in letters)
        return (found.st_mode >> shift) & wanted == wanted


def check_reach(path: str, account: Account) -> list[Fault]:
    """Whether the account enters every parent of the folder, links followed, and can use what is in it.

    The folder itself may still have to be made, and is given to the account by the role.
    """
    real = Path(os.path.realpath(path))
    for parent in reversed(real.parents):
        try:
            found = parent.stat()
        except OSError:
            break
        if not stat.S_ISDIR(found.st_mode):
            return [_unreachable(str(parent), "it is no folder", "Choose another `models_directory`.")]
        if not account.may(parent, "x"):
            return [
                _unreachable(
                    str(parent),
                    f"{account.name} may not enter it ({_owned(parent)}), so that {path} is out of its reach",
                    f"Allow it (setfacl -m u:{account.name}:x {parent}, or chmod o+x {parent}), or choose another "
                    "`models_directory`, such as /var/lib/ollama/models.",
                )
            ]
    if real.exists() and not real.is_dir():
        return [_unreachable(str(real), "it is no folder", "Choose another `models_directory`.")]
    return _check_contents(real, account)


def _check_contents(store: Path, account: Account) -> list[Fault]:
    remedy = f"When no Ollama runs: chown -R {account.name}: {store}"
    for name in ("blobs", "manifests"):
        folder = store / name
        if folder.is_dir() and not account.may(folder, "rwx"):
            message = f"{account.name} may not write to it ({_owned(folder)})"
            return [_unreachable(str(folder), message, remedy)]
    try:
        blobs = sorted((store / "blobs").glob("sha256-*"))
        closed = [blob for blob in blobs if not account._by_mode(blob, "r")]
    except OSError:
        return []
    # An access list may still allow it: each is tried before it is complained of.
    closed = [blob for blob in closed[:3] if not account.may(blob, "r")]
    if closed:
        return [_unreachable(str(closed[0]), f"{account.name} may not read it ({_owned(closed[0])})", remedy)]
    return []


def _owned(path: Path) -> str:
    found = path.stat()
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    return f"mode {stat.S_IMODE(found.st_mode):04o}, owner {owner}"


def _unreachable(subject: str, message: str, remedy: str) -> Fault:
    return fault("ollama_folder_unreachable", subject, message, remedy)


def check_sandbox(path: str, unit: Effective, ours: str) -> list[Fault]:
    """Whether the unit as systemd will read it, with the drop-in ``ours`` among its files, leaves the folder writable.

    Ours allows the folder; what is found is what a file that is read after it takes away again.
    """
    real = os.path.realpath(path)
    writable = _paths(unit, "ReadWritePaths")
    allowed = any(is_below(real, folder) for folder, _ in writable)

    def said(key: str) -> tuple[str, Origin | None]:
        found = unit.last(key)
        return (found[0].lower(), found[1]) if found else ("", None)

    problems: list[tuple[str, str, Origin | None]] = []
    home, home_origin = said("ProtectHome")
    if any(is_below(real, folder) for folder in _HOMES):
        if home in _TRUE or home == "tmpfs":
            problems.append((f"ProtectHome={home}", "hides it", home_origin))
        elif home == "read-only" and not allowed:
            problems.append((f"ProtectHome={home}", "makes it read-only", home_origin))
    system, system_origin = said("ProtectSystem")
    if system == "strict" and not allowed and not _of_the_unit(real, unit):
        problems.append(("ProtectSystem=strict", "makes it read-only", system_origin))
    for key, what in (
        ("InaccessiblePaths", "hides it"),
        ("TemporaryFileSystem", "hides it"),
        ("ReadOnlyPaths", "makes it read-only"),
    ):
        for folder, where in _paths(unit, key):
            # Of two that contain it the narrower one counts, as with ReadWritePaths below ReadOnlyPaths.
            within = any(is_below(real, other) and is_below(other, folder) and other != folder for other, _ in writable)
            if is_below(real, folder) and not (key == "ReadOnlyPaths" and within):
                problems.append((f"{key}={folder}", what, where))
    for key in ("RootDirectory", "RootImage"):
        value, origin = said(key)
        if value:
            problems.append((f"{key}={value}", "hides it", origin))
    return [
        fault(
            "ollama_folder_hidden",
            path,
            f"{setting} of {f'{origin.path} (line {origin.line})' if origin else ours} {what}, whatever its mode is",
            "Remove that line, or choose another `models_directory`.",
        )
        for setting, what, origin in problems
    ]


def _paths(unit: Effective, key: str) -> list[tuple[str, Origin]]:
    """The paths of a list, without the marks that a path may begin with and options after a colon."""
    return [
        (word.strip('"').lstrip("-+").partition(":")[0], origin)
        for value, origin in unit.keys.get(key, [])
        for word in value.split()
    ]


def _of_the_unit(path: str, unit: Effective) -> bool:
    """Whether systemd makes the folder for the unit, which may then write to it."""
    return any(is_below(path, f"/var/lib/{folder}") for folder, _ in _paths(unit, "StateDirectory"))


def check_room(path: str, needed: int, usage: Callable[[Path], Sequence[int]] = shutil.disk_usage) -> list[Fault]:
    """Whether the file system can be written to and has room for ``needed`` bytes more, and a little to work with."""
    place = existing(path)
    try:
        free = usage(place)[2]
        read_only = bool(os.statvfs(place).f_flag & os.ST_RDONLY)
    except OSError as exc:
        return [_unreachable(str(place), str(exc.strerror or exc), "Choose another `models_directory`.")]
    if read_only:
        return [_unreachable(str(place), "its file system is read-only", "Mount it for writing, or choose another.")]
    if free >= needed + LEAST_FREE:
        return []
    missing = needed + LEAST_FREE - free
    return [
        fault(
            "disk_full",
            path,
            f"{amount(missing)} are missing, {amount(free)} are free on the file system of {place}",
            "Make room (left-over partials: docs/ollama.md), or choose another `models_directory`.",
        )
    ]


def existing(path: str) -> Path:
    """The folder itself, or the nearest parent that is there."""
    real = Path(os.path.realpath(path))
    return next((place for place in (real, *real.parents) if place.is_dir()), Path("/"))


def same_file_system(path: str, others: Iterable[str]) -> list[bool]:
    """Which of the files ``others`` are on the file system of ``path``."""
    device = existing(path).stat().st_dev
    return [Path(other).exists() and Path(other).stat().st_dev == device for other in others]
