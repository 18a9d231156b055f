# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""reports.md names for each report tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def rows() -> dict[str, list[str]]:
    """By row, what the table names."""
    lines = (HERE / "reports.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|") for line in lines if re.match(r"\| F\d\d ", line)]
    return {row.strip(): re.findall(r"`(\w+::\w+)`", tests) for _, row, _, tests, _ in cells}


def test_every_report_has_tests_and_they_are_there() -> None:
    there = {
        f"{path.stem}::{function.name}"
        for path in HERE.glob("test_*.py")
        for function in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(function, ast.FunctionDef)
    }
    found = rows()
    assert sorted(found) == [f"F{number:02}" for number in range(2, 19, 2)]
    assert all(found.values())
    assert [name for names in found.values() for name in names if name not in there] == []
