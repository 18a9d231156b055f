# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Numbers in what another machine sent: they may be anything."""

from __future__ import annotations

import re

#: More is no size of a file (2 to the power of 63 has 19 digits).
_WHOLE = re.compile(r"\s*([0-9]{1,18})\s*", re.ASCII)


def whole_number(text: object) -> int | None:
    """The number that a header or a listing means by its text; null for everything else.

    ``int`` takes signs, underscores and digits of other scripts, and refuses very long ones; ``str.isdigit`` is true
    for superscripts, which ``int`` then does not take.
    """
    match = _WHOLE.fullmatch(text) if isinstance(text, str) else None
    return None if match is None else int(match[1])
