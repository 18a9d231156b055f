# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a server's key file holds: the keys of its instance, or those of the default server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def key_lines(instance: str, keys: Any, instances: Sequence[Mapping[str, Any]]) -> str:
    """Keys one a line, each with a line break. ``instance`` is empty for the default server, whose are ``keys``.

    An empty list of an instance means none, although the default server has some; null and none given mean the same.
    """
    own = [given.get("api_keys") for given in instances if instance and given.get("name") == instance]
    chosen = keys if not own or own[0] is None else own[0]
    return "".join(f"{key}\n" for key in _listed(chosen))


def _listed(given: Any) -> list[str]:
    """As a module reads an option of type list. Taken letter by letter, text would make a key of every letter.

    Text that comes from an inline vault is no str for ansible-core before 2.19, so it is asked what is a list instead.
    """
    if isinstance(given, (list, tuple)):
        return [str(key) for key in given]
    return str(given).split(",")
