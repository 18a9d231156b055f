# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Several small files of configuration, written or removed in one go."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .faults import Catalogue, Fault, FaultKind
from .files import replace_file

CATALOGUE = Catalogue(
    "files of configuration (text_files)",
    (
        FaultKind(
            "file_not_written",
            "critical",
            "A file of configuration could not be written or removed.",
            "/etc/apt/preferences.d/volta-llm-nvidia-driver: Read-only file system",
        ),
    ),
)


@dataclass
class Outcome:
    """``changes`` as Ansible shows differences; ``written`` and ``removed`` are the paths."""

    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changes: list[dict[str, str]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def converge(files: Sequence[Mapping[str, Any]], absent: Sequence[str], mode: int, check: bool) -> Outcome:
    """Bring ``files`` (path, content) to content, owner and mode; in check mode only say what would change.

    One to ``keep`` is written only where there is none.
    """
    outcome = Outcome()
    # A hardened server's umask of 077 would lock services out of the folders that are made here.
    umask = os.umask(0o022)
    try:
        for file in files:
            if file.get("keep") and os.path.lexists(file["path"]):
                continue
            _act(outcome, file["path"], _write, file["content"].encode(), mode, check)
        for path in absent:
            _act(outcome, path, _remove, check)
    finally:
        os.umask(umask)
    return outcome


def _act(outcome: Outcome, path: str, action: Any, *arguments: Any) -> None:
    try:
        action(outcome, Path(path), *arguments)
    except OSError as exc:
        outcome.faults.append(
            CATALOGUE.fault(
                "file_not_written",
                path,
                f"{path}: {exc.strerror or exc}",
                "become root, on a file system that can be written",
            )
        )


def _write(outcome: Outcome, path: Path, content: bytes, mode: int, check: bool) -> None:
    before = _state(path)
    after = (content, mode, os.geteuid(), os.getegid())
    if before == after:
        return
    if not check:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # A new file, so that a link in its place is replaced and not followed.
        replace_file(path, content, mode)
    outcome.written.append(str(path))
    outcome.changes.append(_change(path, before, after))


def _remove(outcome: Outcome, path: Path, check: bool) -> None:
    if not os.path.lexists(path):
        return
    before = _state(path)
    if not check:
        path.unlink()
    outcome.removed.append(str(path))
    outcome.changes.append(_change(path, before, None))


_State = tuple[bytes, int, int, int]


def _state(path: Path) -> _State | None:
    """Content, mode and owner of a plain file; null for anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return path.read_bytes(), stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid


def _change(path: Path, before: _State | None, after: _State | None) -> dict[str, str]:
    same_text = before is not None and after is not None and before[0] == after[0]

    def shown(state: _State | None) -> str:
        if state is None:
            return ""
        return (
            f"mode {state[1]:04o}, owner {state[2]}:{state[3]}\n" if same_text else state[0].decode("utf-8", "replace")
        )

    return {
        "before": shown(before),
        "after": shown(after),
        "before_header": str(path),
        "after_header": str(path),
    }
