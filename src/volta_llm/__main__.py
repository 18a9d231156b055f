# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""``python -m volta_llm``."""

from __future__ import annotations

import sys

from volta_llm.cli import main

if __name__ == "__main__":
    sys.exit(main())
