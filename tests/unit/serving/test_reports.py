# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""reports.md names for each report tests that are there."""

from __future__ import annotations

from pathlib import Path

from tests.unit import reports_table


def test_every_report_has_tests_and_they_are_there() -> None:
    reports_table.check(Path(__file__).parent, "E", last=26)
