# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""docs/faults.md is what the catalogues say, and no declared kind of fault is dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate_faults.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_every_kind_on_the_page_is_reported_by_some_code() -> None:
    """A kind is declared once and named at least once more, where the fault is made."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "plugins").rglob("*.py")))
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    codes = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert len(codes) > 50
    assert [code for code in codes if sources.count(f'"{code}"') < 2] == []
