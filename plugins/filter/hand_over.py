# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters around what clients need, endpoints and keys; the thinking is in module_utils/serving (handover, keys)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.volta.llm.plugins.module_utils.serving import handover, keys


def endpoint_records(
    results: Iterable[Mapping[str, Any]], known_as: str = "", advertised: str = ""
) -> list[dict[str, Any]]:
    """A record (see handover.record) for each result of a loop of llm_probe over servers that found one ready."""
    for fault in handover.check_advertised(str(advertised or "")):
        raise AnsibleFilterError(f"{fault.subject}: {fault.message}. {fault.remedy}")
    return [
        handover.record(result["item"], result, str(known_as or ""), str(advertised or ""))
        for result in results
        if result.get("ready_s") is not None and not result.get("skipped")
    ]


def endpoint_cards(endpoints: Iterable[Mapping[str, Any]], known_as: str = "") -> str:
    """The records as text to read, one card below the other."""
    return "\n\n".join(handover.card(endpoint, str(known_as or "")) for endpoint in endpoints)


def api_key_lines(instance: str, default: Any, instances: Sequence[Mapping[str, Any]] = ()) -> str:
    """Contents of the key file of a server (see keys.key_lines)."""
    return keys.key_lines(str(instance), default, instances)


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "api_key_lines": api_key_lines,
            "endpoint_records": endpoint_records,
            "endpoint_cards": endpoint_cards,
        }
