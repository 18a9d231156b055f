# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""reports.md names for each report the tests that stand for it: no more and no fewer than say so themselves."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
#: Where tests of this table are.
FILES = [
    *sorted(HERE.glob("test_*.py")),
    HERE.parent / "model_role" / "test_lock_plays.py",
    HERE.parent / "test_compat.py",
]


def said() -> dict[str, set[str]]:
    """By row, the tests whose text has its number in a comment."""
    rows: dict[str, set[str]] = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for function in ast.parse(text).body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                for line in lines[function.lineno - 1 : function.end_lineno]:
                    comment = line.partition("#")[2]
                    for row in re.findall(r"\bC\d\d\b", comment):
                        rows.setdefault(row, set()).add(f"{path.stem}::{function.name}")
    return rows


def named() -> dict[str, set[str]]:
    """By row, what the table has."""
    table = (HERE / "reports.md").read_text(encoding="utf-8")
    return {
        row: set(re.findall(r"`(test_\w+::test_\w+)`", tests))
        for row, tests in re.findall(r"^\| (C\d\d) \|[^|]*\|([^|]*)\|$", table, re.MULTILINE)
    }


def test_each_report_has_the_tests_that_the_table_names() -> None:
    rows = named()
    assert rows == said()
    assert len(rows) == 17
