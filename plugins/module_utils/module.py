# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The AnsibleModule of this collection: what it writes to the target's system log has no secrets in it.

AnsibleModule logs every option at its start. An address can hold a login or a signature, and neither means helps:
``no_log`` of an option would hide its value in all results, and ``no_log`` of the module is overridden by the task's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

_NOT_LOGGED = "NOT_LOGGING_PARAMETER"
#: As far as the last @: a password that was not escaped can hold any character.
_LOGIN = re.compile(r"(?<=://)[^\s'\"]*@")
#: To the end of the line: a secret that was not escaped can hold any character.
_QUERY = re.compile(r"(://[^\s?#]*)[?#].*|\?[\w.~%-]+=.*")


def loggable(text: str) -> str:
    """The text with each address in it cut down to scheme, host and path."""
    return _QUERY.sub(r"\1?...", _LOGIN.sub("...@", text))


def _has_mapping(value: object) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and any(map(_has_mapping, value))


def _secrets(options: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """The values of options with ``no_log``, each element of a list by itself."""
    for name, option in options.items():
        value = given.get(name)
        values = value if isinstance(value, list) else [value]
        if option.get("no_log"):
            yield from (item for item in values if isinstance(item, str) and item)
        if option.get("options"):
            for item in values:
                if isinstance(item, Mapping):
                    yield from _secrets(option["options"], item)


class VoltaModule(AnsibleModule):  # type: ignore[misc]  # ansible-core has no types
    """AnsibleModule with a log fit to be read by others; of results only what ``no_log`` means is hidden."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A list that was given as text, "a,b", is hidden by AnsibleModule as that text alone, not as what it became.
        self.no_log_values.update(_secrets(self.argument_spec, self.params))

    def log(self, msg: str, log_args: dict[str, str] | None = None) -> None:
        """Write to the system log. ``log_args`` are the options, which AnsibleModule gives at its start.

        Options with structure inside are left out: what they hold (headers, sources) is free.
        """
        if log_args:
            log_args = {name: self._shown(name, text) for name, text in log_args.items()}
            msg = "Invoked with " + " ".join(f"{name}={text}" for name, text in log_args.items())
        else:
            msg = loggable(msg)
        super().log(msg, log_args=log_args)

    def _shown(self, name: str, text: Any) -> str:
        value = self.params.get(name)
        if _has_mapping(value):
            return _NOT_LOGGED
        if isinstance(value, list):
            return repr([loggable(item) if isinstance(item, str) else item for item in value])
        return loggable(str(text))
