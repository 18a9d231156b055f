# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What goes wrong in the lab, said in one message."""

from __future__ import annotations


class LabError(Exception):
    """A message for the person at the keyboard: what is wrong, where, and what to do about it."""
