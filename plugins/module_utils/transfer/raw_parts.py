# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Files that a publisher cut into raw pieces (``model.gguf.a``, ``model.gguf.b``): to be joined, unlike shards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: What stands behind the whole's name: C(.a), C(.001), C(.part1of3), C(.part-00001-of-00002), C(-split-a). What is
#: compressed (C(.gz), C(.xz)) is no part of the many letters that it would be.
_NAME = re.compile(
    r"(?P<whole>.+\.gguf)[.-](?:(?P<word>part|split)[._-]?)?(?:"
    r"(?P<digits>[0-9]{1,5})(?:[._-]?of[._-]?(?P<count>[0-9]{1,5}))?"
    r"|(?!(?:gz|xz)$)(?P<letters>[a-z]{1,2}|(?(word)[a-z]{3}|(?!))))",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RawPart:
    """``whole`` is the name of the joined file, ``number`` the place in the order, ``count`` of how many (null: not
    said), ``text`` how the place is written."""

    whole: str
    number: int
    count: int | None
    text: str


def raw_part(name: str) -> RawPart | None:
    """The place of a raw part by its name; null for anything else, shards and whole files included."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    text = (match["letters"] or match["digits"]).lower()
    if text.isdigit():
        number = int(text)
    else:
        number = 0
        for letter in text:
            number = number * 26 + ord(letter) - ord("a")
    return RawPart(match["whole"], number, int(match["count"]) if match["count"] else None, text)


def missing_parts(parts: Sequence[RawPart]) -> str | None:
    """What a set of parts of one file lacks, in words; null when it has no gap. The last one cannot be known by name
    where no count is given; the size of the sum or its hash tells."""
    numbers = sorted(part.number for part in parts)
    widths = {len(part.text) for part in parts if not part.text.isdigit()}
    counts = {part.count for part in parts}
    if len(set(numbers)) != len(numbers):
        return "two parts have the same place"
    if len(widths) > 1 or len({part.text.isdigit() for part in parts}) > 1 or len(counts) > 1:
        return "the parts are numbered in different ways"
    count = counts.pop()
    # Letters begin with a; digits with 0 or 1, and with "of" always with 1.
    first = numbers[0] if parts[0].text.isdigit() and count is None else (1 if count is not None else 0)
    if first > 1:
        return "the parts before the first are missing"
    last = first + count - 1 if count is not None else numbers[-1]
    gaps = [number for number in range(first, last + 1) if number not in numbers]
    if gaps:
        return "missing: " + ", ".join(_written(number, parts[0]) for number in gaps)
    if len(numbers) < 2:
        return "there is only one part"
    return None


def _written(number: int, like: RawPart) -> str:
    if like.text.isdigit():
        return f"part {number}"
    text = ""
    for _ in like.text:
        number, place = divmod(number, 26)
        text = chr(ord("a") + place) + text
    return f"part {text}"
