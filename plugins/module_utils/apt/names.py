# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Package names given as names, shell patterns or regular expressions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from ..faults import FaultError
from .catalogue import CATALOGUE


class Names:
    """A set of package names: plain names, shell patterns (``*``, ``?``, ``[...]``), and regular expressions.

    A regular expression begins with ``^`` and must match the whole name.
    """

    def __init__(self, given: Iterable[str]) -> None:
        self.given = tuple(given)
        self._expressions: list[re.Pattern[str]] = []
        for word in self.given:
            try:
                self._expressions.append(re.compile(word if word.startswith("^") else fnmatch.translate(word)))
            except re.error as exc:
                raise FaultError(
                    CATALOGUE.fault(
                        "apt_pattern_invalid",
                        word,
                        f"{word} is no regular expression: {exc}",
                        "write a name, a shell pattern such as nvidia-*, or a regular expression that begins with ^",
                    )
                ) from None

    def __contains__(self, name: str) -> bool:
        return any(expression.fullmatch(name) for expression in self._expressions)


def is_plain(word: str) -> bool:
    """Whether a word is a name and no pattern."""
    return not word.startswith("^") and not any(sign in word for sign in "*?[")
