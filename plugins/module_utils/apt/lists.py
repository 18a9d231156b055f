# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""apt's package lists: how old they are by apt's own stamps, and bringing them up to date."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable

from ..faults import Fault
from ..machine import Completed, Machine
from .catalogue import CATALOGUE
from .sources import FOLDER, LISTS

#: Written by apt after a successful update where update-notifier is installed, as on Ubuntu.
STAMP = "/var/lib/apt/periodic/update-success-stamp"
_SOURCES = ("/etc/apt/sources.list", FOLDER)
#: apt waits for dpkg's lock and not for the one of its lists.
_LOCKED = re.compile(r"(?:get|lock) (?:lock|directory) /var/lib/apt/lists|/var/lib/apt/lists/lock", re.IGNORECASE)
#: Without Error-Mode (apt before 2.1) a source that does not answer is a warning only, and the old lists stay.
_NOT_FETCHED = re.compile(r"^(?:W|E): (?:Failed to fetch|Some index files failed)", re.MULTILINE)
ARGV = ("apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any")
RETRY_AFTER = 10.0
TRIES = 12


def age(system: Machine, now: float | None = None) -> float | None:
    """Seconds since the last update; null where there was none, or a source file is newer than the lists."""
    if not any(name not in ("lock", "partial", "auxfiles") for name in system.listdir(LISTS)):
        return None
    updated = max(_modified(system, STAMP), _modified(system, LISTS))
    sources = [*_SOURCES, *(f"{FOLDER}/{name}" for name in system.listdir(FOLDER))]
    if any(_modified(system, path) > updated for path in sources):
        return None
    # A clock that was set back makes a future of the past.
    old = (time.time() if now is None else now) - updated
    return old if old >= 0 else None


def _modified(system: Machine, path: str) -> float:
    try:
        return system.path(path).stat().st_mtime
    except OSError:
        return 0.0


def refresh(
    system: Machine, max_age: float, now: float | None = None, sleep: Callable[[float], None] = time.sleep
) -> tuple[bool, list[Fault]]:
    """Update lists that are older than ``max_age`` seconds; whether that was done, and why it failed.

    Another apt at work there, or a mirror out of breath, is tried again for two minutes.
    """
    known = age(system, now)
    if known is not None and known < max_age:
        return False, []
    for attempt in range(TRIES):
        answer = system.run(ARGV)
        if answer.missing or _fetched(answer):
            break
        if attempt < TRIES - 1:
            sleep(RETRY_AFTER)
    if not _fetched(answer):
        text = "\n".join(line for line in answer.stderr.splitlines() if line.startswith(("E: ", "W: ")))
        because = text.replace("\n", "; ")[:600] or answer.why
        remedy = (
            "wait for the other apt to end" if _LOCKED.search(text) else "mend or disable the source that apt names"
        )
        return False, [CATALOGUE.fault("apt_lists_failed", "apt-get update", because, f"{remedy}, then run this again")]
    # Where nothing was newer apt leaves the folder as it was, and it would count as old for ever.
    with contextlib.suppress(OSError):
        os.utime(system.path(LISTS))
    return True, []


def _fetched(answer: Completed) -> bool:
    return answer.ok and not _NOT_FETCHED.search(answer.stderr)
