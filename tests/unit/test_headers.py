# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import pytest
from ansible_collections.volta.llm.plugins.module_utils.headers import (
    sendable,
    unfit_header,
    unfit_value,
    whole_number,
)


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


def test_what_stands_around_a_header_is_not_sent() -> None:
    assert sendable({" X-Token ": "secret\r\n", "X-Number": 5}) == {"X-Token": "secret", "X-Number": "5"}
    assert sendable(None) == {}
    assert unfit_header({"Authorization": "Bearer secret\n"}) is None


@pytest.mark.parametrize("value", ["se\ncret", "se\rcret", "se\0cret", "se\x7fcret", "secret\u200b", "secret\u4e2d"])
def test_a_header_that_cannot_be_sent_is_named_without_its_value(value: str) -> None:
    found = unfit_header({"Accept": "*/*", "Authorization": f"Bearer {value}"})
    assert found is not None
    assert found[0] == "headers: Authorization"
    assert "cret" not in str(found)
    assert unfit_value(value) == found[1]


def test_what_is_no_mapping() -> None:
    assert unfit_header("X-Token: secret") == ("headers", "is no mapping of names to values")
    assert sendable("X-Token: secret") == {}
    assert unfit_header(None) is None


@pytest.mark.parametrize("name", ["", "Authorization: Bearer secret", "X-Se\ncret", "X-\u4e2d"])
def test_a_name_that_no_header_can_have_is_not_shown(name: str) -> None:
    found = unfit_header({name: "x"})
    assert found is not None
    assert "secret" not in str(found).lower()
