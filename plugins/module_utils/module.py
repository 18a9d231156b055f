# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The AnsibleModule of this collection: what it writes to the target's system log has no secrets in it.

AnsibleModule logs every option at its start. An address can hold a login or a signature, and neither means helps:
``no_log`` of an option would hide its value in all results, and ``no_log`` of the module is overridden by the task's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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


class VoltaModule(AnsibleModule):  # type: ignore[misc]  # ansible-core has no types
    """AnsibleModule with a log fit to be read by others; results are not touched."""

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
