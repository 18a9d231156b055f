# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import pytest
from ansible_collections.volta.llm.plugins.module_utils.headers import whole_number


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("42", 42), (" 7\t", 7), ("9" * 18, 10**18 - 1)])
def test_a_number(text: str, number: int) -> None:
    assert whole_number(text) == number


#: What int takes although it is no number in a header, what isdigit takes although int does not, what neither takes.
TEXTS = ["+5", "-5", "1_000", "\u0663", "\uff11", "\u00b2", "5\u00b9", "", " ", "5 5", "0x10", "1e3", "9" * 19]


@pytest.mark.parametrize("value", [*TEXTS, None, 5])
def test_not_a_number(value: object) -> None:
    assert whole_number(value) is None


def test_as_many_digits_as_int_refuses() -> None:
    assert whole_number("9" * 5000) is None
