# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Headers of HTTP: what may be sent in them, and numbers in what another machine sent, which may be anything."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: More is no size of a file (2 to the power of 63 has 19 digits).
_WHOLE = re.compile(r"\s*([0-9]{1,18})\s*", re.ASCII)
#: RFC 9110, 5.6.2: a token.
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def whole_number(text: object) -> int | None:
    """The number that a header or a listing means by its text; null for everything else.

    ``int`` takes signs, underscores and digits of other scripts, and refuses very long ones; ``str.isdigit`` is true
    for superscripts, which ``int`` then does not take.
    """
    match = _WHOLE.fullmatch(text) if isinstance(text, str) else None
    return None if match is None else int(match[1])


def sendable(headers: object) -> dict[str, str]:
    """Headers as they can be sent: without the space and line ends that block scalars and files leave around them."""
    given = headers if isinstance(headers, Mapping) else {}
    return {str(name).strip(): str(value).strip() for name, value in given.items()}


def unfit_header(headers: object) -> tuple[str, str] | None:
    """(header, what is wrong with it) of the first one that cannot be sent, without its value; null when all can.

    http.client refuses them as well, but in its words the value is quoted, which may be a token.
    """
    if headers is not None and not isinstance(headers, Mapping):
        return "headers", "is no mapping of names to values"
    for name, value in sendable(headers).items():
        if not _NAME.fullmatch(name):
            # Perhaps the whole line was written as the name.
            return "headers", "a name has characters in it that no header's name can have"
        problem = unfit_value(value)
        if problem:
            return f"headers: {name}", problem
    return None


def unfit_value(value: str) -> str | None:
    """What is wrong with a header's value, in words that do not hold it; null when it can be sent."""
    if "\n" in value or "\r" in value:
        return "has a line break within its value"
    if any((char < " " and char != "\t") or char == "\x7f" for char in value):
        return "has a control character in its value"
    if any(char > "\xff" for char in value):
        return "has a character in its value that no header can have (not Latin-1)"
    return None
