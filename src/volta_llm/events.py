# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The events of a run: what is kept of them, and how they are selected.

ansible-runner hands over every result whole, with the module's arguments and everything it read. Kept is only what a
judgement needs (KEPT_OF_RESULT), so that a secret in an argument cannot find its way into a report.
"""

from __future__ import annotations

from typing import Any

import jmespath

Event = dict[str, Any]

_KEPT_OF_DATA = (
    "play", "play_uuid", "task", "task_uuid", "task_path", "role", "host", "ignore_errors", "duration", "name", "uuid",
    "ok", "changed", "failures", "dark", "skipped", "rescued", "ignored", "processed",
)  # fmt: skip

#: Keys of a module's result that are kept; everything else, ``invocation`` first of all, is dropped on arrival.
KEPT_OF_RESULT = ("changed", "failed", "unreachable", "msg", "faults", "base_url", "rc", "censored")

#: The facts of roles llama_server and ollama with what clients have to know; no key is in them.
ENDPOINTS = ("llama_server_endpoints", "ollama_endpoints")


class EventLog:
    """The events of one run, in order, as far as they are kept."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, raw: Event) -> None:
        """Keep what is needed of an event as ansible-runner delivers it."""
        if raw.get("event") == "EOF":
            return
        data = raw.get("event_data") or {}
        kept = {key: data[key] for key in _KEPT_OF_DATA if data.get(key) is not None}
        if isinstance(data.get("res"), dict):
            kept["res"] = _of_result(data["res"])
        self.events.append({"event": raw.get("event"), "created": raw.get("created"), "data": kept})

    def select(self, expression: str) -> Any:
        """Select from the list of events by a JMESPath expression.

        An event is ``{"event": name, "created": ISO time, "data": {host, play, task, role, duration, res, ...}}``;
        names are ansible-runner's (``runner_on_ok``, ``runner_on_failed``, ``playbook_on_stats`` ...). For instance
        ``"[?event=='runner_on_failed'].data.host"``.
        """
        return jmespath.search(expression, self.events)


def _of_result(result: dict[str, Any]) -> dict[str, Any]:
    kept = {key: result[key] for key in KEPT_OF_RESULT if key in result}
    if "exception" in result:
        # Newer cores no longer say "failed" in the items of a loop; of their exception only that there is one is kept.
        kept["failed"] = True
    facts = result.get("ansible_facts")
    if isinstance(facts, dict):
        handed = {name: facts[name] for name in ENDPOINTS if isinstance(facts.get(name), list)}
        if handed:
            kept["hand_over"] = {
                name: [endpoint for endpoint in endpoints if isinstance(endpoint, dict)]
                for name, endpoints in handed.items()
            }
    if isinstance(result.get("results"), list):
        kept["results"] = [_of_result(item) for item in result["results"] if isinstance(item, dict)]
    return kept
