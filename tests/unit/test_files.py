# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.files import replace_file


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_is_replaced_with_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "unit"
    path.write_text("old and longer")
    replace_file(path, b"new", mode)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", mode)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fails", ["fsync", "fchmod", "replace"])
def test_what_fails_on_the_way_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "unit"
    path.write_text("old")
    monkeypatch.setattr(Path if fails == "replace" else os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("unit", "old")]
