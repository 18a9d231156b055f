# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a server's key file holds: the keys of its instance, or those of the default server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..faults import FaultError
from .catalogue import CATALOGUE

#: What a key may consist of: a header of HTTP takes no more.
USABLE = re.compile(r"[\x21-\x7e]+")


def first_key(path: str) -> str:
    """The first key of a key file; FaultError, without the key, where there is none that can be presented."""
    try:
        # What is no UTF-8 is no key, whatever it is.
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as exc:
        problem = exc.strerror or str(exc)
    else:
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if keys and USABLE.fullmatch(keys[0]):
            return keys[0]
        problem = "its first key holds a space or a character beyond ASCII" if keys else "holds no key"
    raise FaultError(CATALOGUE.fault("wrong_key", path, problem, "Correct api_key_file, or give api_key."))


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
