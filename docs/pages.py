# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the generators of pages share: where things are, and writing a page or only comparing it (``--check``)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".collections"))


def publish(name: str, text: str) -> int:
    """Write docs/``name``.md, or with ``--check`` say whether it is current; the exit status."""
    page = ROOT / "docs" / f"{name}.md"
    if "--check" not in sys.argv[1:]:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"docs/{name}.md is out of date: run docs/generate_{name}.py", file=sys.stderr)
    return 1
