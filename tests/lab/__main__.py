# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""``python -m tests.lab``."""

from __future__ import annotations

import sys

from tests.lab.cli import main

sys.exit(main())
