# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which account a service may have: one of its own, never one that a person or Ansible logs in with."""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Mapping

from ..faults import Fault
from .catalogue import CATALOGUE

#: Debian's policy (9.2.2): from here on accounts are people's; `nobody` is up there as well.
FIRST_PERSON = 1000
#: What systemd and useradd both take for a name; a number would be taken for an id.
_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,30}")


def check_account(
    name: str, environment: Mapping[str, str] = os.environ, example: str = "llama-server"
) -> tuple[bool, list[Fault]]:
    """Whether the account is there, and what stands against using it. One that is there is used as it is."""
    remedy = f"Write a name of its own, as {example}: the role makes the account."
    if not _NAME.fullmatch(name):
        return False, [CATALOGUE.fault("setting_invalid", "user", f"{name!r} cannot name an account", remedy)]
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return False, []
    problem = None
    if entry.pw_uid == 0:
        problem = f"{name} has all rights (uid 0), which the server must not have"
    elif entry.pw_uid >= FIRST_PERSON:
        problem = f"{name} is a person's account (uid {entry.pw_uid})"
    elif name == environment.get("SUDO_USER"):
        problem = f"{name} is the account that Ansible logs in with"
    else:
        try:
            grp.getgrnam(name)
        except KeyError:
            problem = f"{name} is an account without a group of that name, which the unit needs"
    return True, [CATALOGUE.fault("account_unusable", "user", problem, remedy)] if problem else []
