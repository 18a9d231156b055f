# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Files beside a unit that change what it says (systemd.unit(5): drop-ins NAME.service.d/*.conf and service.d/*.conf).

One that adds what the unit leaves open, such as LimitNOFILE, is the machine owner's business. One that sets what the
unit sets, or what decides over the program, makes the machine serve otherwise than the settings say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..faults import Fault
from .catalogue import CATALOGUE

#: What decides over the program, also where the unit does not set it.
_DECISIVE = re.compile(
    r"Exec\w+|Environment|EnvironmentFile|PassEnvironment|UnsetEnvironment|Type|User|Group|DynamicUser|WorkingDirectory"
    r"|RootDirectory|RootImage"
)
#: Of these one more does not take away the others.
_ADDED = re.compile(r"After|Before|Wants|Requires|BindsTo|PartOf|Documentation|WantedBy|RequiresMountsFor")


def drop_ins(unit: Path, read: Iterable[str]) -> list[str]:
    """The drop-ins of the unit file ``unit``: those that systemd has ``read``, and those of its own folder.

    One that was put there since is in force from the next reload or boot on.
    """
    return list(dict.fromkeys([*read, *sorted(map(str, (unit.parent / f"{unit.name}.d").glob("*.conf")))]))


def overridden(name: str, content: str, paths: Iterable[str]) -> list[Fault]:
    """A fault for each of the files ``paths`` that changes what the unit file's text ``content`` says."""
    ours = set(_assignments(content))
    faults = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            # Removed since systemd read it.
            continue
        # Those for all services come with a distribution or a container, which cannot do some of the hardening.
        for_all = Path(path).parent.name == "service.d"
        keys = [
            key
            for key in dict.fromkeys(_assignments(text))
            if _DECISIVE.fullmatch(key) or (key in ours and not for_all and not _ADDED.fullmatch(key))
        ]
        if keys:
            faults.append(
                CATALOGUE.fault(
                    "unit_overridden",
                    path,
                    f"sets {', '.join(keys)} of {name} otherwise than the settings do",
                    "Move what it is for into the settings (environment, extra_args) and remove the file, "
                    f"then: systemctl daemon-reload && systemctl restart {name}",
                )
            )
    return faults


def _assignments(text: str) -> Iterator[str]:
    """The keys that a unit file's text sets, in order; a line that ends in a backslash goes on in the next."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        key, equals, _ = line.strip().partition("=")
        if equals and not key.startswith(("#", ";")):
            yield key.strip()
