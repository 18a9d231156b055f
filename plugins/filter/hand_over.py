# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters that tell clients about endpoints; the thinking is in module_utils/serving/handover.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible_collections.volta.llm.plugins.module_utils.serving import handover


def endpoint_records(
    results: Iterable[Mapping[str, Any]], known_as: str = "", advertised: str = ""
) -> list[dict[str, Any]]:
    """A record (see handover.record) for each result of a loop of llm_probe over servers that found one ready."""
    return [
        handover.record(result["item"], result, str(known_as or ""), str(advertised or ""))
        for result in results
        if result.get("ready_s") is not None and not result.get("skipped")
    ]


def endpoint_cards(endpoints: Iterable[Mapping[str, Any]], known_as: str = "") -> str:
    """The records as text to read, one card below the other."""
    return "\n\n".join(handover.card(endpoint, str(known_as or "")) for endpoint in endpoints)


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"endpoint_records": endpoint_records, "endpoint_cards": endpoint_cards}
