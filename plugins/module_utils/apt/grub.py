# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Entries of GRUB's menu by kernel."""

from __future__ import annotations

import re

from ..machine import Machine
from ..nvidia import kernels


def entry_ids(machine: Machine, release: str) -> str | None:
    """The entry of a kernel as grub-reboot takes it: ids from the outermost menu inwards, joined by C(>).

    Recovery entries come after the plain one of their kernel. Null where there is none, or one without an id.
    """
    config = machine.read("/boot/grub/grub.cfg") or ""
    for entry in kernels._entries(config):
        plain = not re.search(r"recovery", entry.ids[-1]) and "(recovery" not in entry.titles[-1]
        # The first entry of all has the newest kernel, whichever that is after the next update.
        if entry.kernel == release and plain and all(entry.ids) and "-simple-" not in entry.ids[-1]:
            return ">".join(entry.ids)
    return None
