# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A folder's reports.md: reports by row, and the tests that stand for each."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def check(folder: Path, letter: str, last: int) -> None:
    """Every even row of the letter up to the last is there, names tests, and these are in the folder."""
    lines = (folder / "reports.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|") for line in lines if re.match(rf"\| {letter}\d\d ", line)]
    found = {row.strip(): re.findall(r"`(\w+::\w+)`", tests) for _, row, _, tests, _ in cells}
    there = {
        f"{path.stem}::{function.name}"
        for path in folder.glob("test_*.py")
        for function in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(function, ast.FunctionDef)
    }
    assert sorted(found) == [f"{letter}{number:02}" for number in range(2, last + 1, 2)]
    assert all(found.values())
    assert [name for names in found.values() for name in names if name not in there] == []
