# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Makes the collection's module_utils importable from a plain copy of the tree, without Ansible."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def importable() -> None:
    """Put the tree's own ``ansible_collections`` first; a copy without it (links lost) gets one made beside it."""
    folder = ROOT / ".collections"
    leaf = folder / "ansible_collections/volta/llm"
    if not (leaf / "plugins/module_utils").is_dir():
        leaf.mkdir(parents=True, exist_ok=True)
        link = leaf / "plugins"
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT / "plugins")
    sys.path.insert(0, str(folder))
