# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Files beside a unit that change what it says (systemd.unit(5): drop-ins NAME.service.d/*.conf and service.d/*.conf).

One that adds what the unit leaves open, such as LimitNOFILE, is the machine owner's business. One that sets what the
unit sets, or what decides over the program, makes the machine serve otherwise than the settings say.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..faults import Fault
from .catalogue import CATALOGUE

#: What decides over the program, also where the unit does not set it.
_DECISIVE = re.compile(
    r"Exec\w+|Environment|EnvironmentFile|PassEnvironment|UnsetEnvironment|Type|User|Group|DynamicUser|WorkingDirectory"
    r"|RootDirectory|RootImage"
)
#: Variables that decide over an engine; others, such as a proxy, are the machine owner's business.
_DECISIVE_VARIABLE = re.compile(r"(?:OLLAMA|CUDA|NVIDIA|GGML|LLAMA|HIP|ROCR|GPU|LD)_\w+|HOME")
#: Of these one more does not take away the others.
_ADDED = re.compile(r"After|Before|Wants|Requires|BindsTo|PartOf|Documentation|WantedBy|RequiresMountsFor")


def drop_ins(unit: Path, read: Iterable[str]) -> list[str]:
    """The drop-ins of the unit file ``unit``: those that systemd has ``read``, and those of its own folder.

    One that was put there since is in force from the next reload or boot on.
    """
    return list(dict.fromkeys([*read, *sorted(map(str, (unit.parent / f"{unit.name}.d").glob("*.conf")))]))


def overridden(
    name: str, content: str, paths: Iterable[str], ours: str = "", settings: str = "environment, extra_args"
) -> list[Fault]:
    """A fault for each of the files ``paths`` that changes what the unit file's text ``content`` says.

    ``ours`` is the name of the drop-in that ``content`` is the text of, where it is one: systemd reads them in the
    order of their names, whatever folder they lie in, so that what an earlier one sets is set again by ours. Of
    variables only those count then that ours sets or that decide over the engine.
    """
    set_here = list(lines_of(content))
    keys_here = {line.key for line in set_here}
    variables_here = {variable for line in set_here if line.key == "Environment" for variable, _ in line.variables()}
    faults = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            # Removed since systemd read it.
            continue
        # Those for all services come with a distribution or a container, which cannot do some of the hardening.
        for_all = Path(path).parent.name == "service.d"
        earlier = bool(ours) and Path(path).name < ours
        found: dict[str, int] = {}
        for line in lines_of(text):
            if ours and line.key == "Environment":
                for variable, _ in line.variables():
                    here = variable in variables_here
                    if (here and not earlier) or (not here and _DECISIVE_VARIABLE.fullmatch(variable)):
                        found.setdefault(variable, line.number)
                continue
            here = line.key in keys_here
            if earlier and here:
                continue
            if _DECISIVE.fullmatch(line.key) or (here and not for_all and not _ADDED.fullmatch(line.key)):
                found.setdefault(line.key, line.number)
        if found:
            numbers = sorted(set(found.values()))
            where = f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
            faults.append(
                CATALOGUE.fault(
                    "unit_overridden",
                    path,
                    f"sets {', '.join(found)} of {name} otherwise than the settings do ({where})",
                    f"Move what it is for into the settings ({settings}) and remove the file, "
                    f"then: systemctl daemon-reload && systemctl restart {name}",
                )
            )
    return faults


@dataclass(frozen=True)
class Line:
    """What one line of a unit file sets; ``number`` is that of its first line, from 1."""

    number: int
    key: str
    value: str

    def variables(self) -> list[tuple[str, str]]:
        """Names and values that an Environment line assigns (systemd.exec(5), Environment=)."""
        try:
            words = shlex.split(self.value)
        except ValueError:
            # A quote that is not closed: systemd passes over such a line.
            return []
        pairs = [word.partition("=") for word in words]
        return [(variable, value.replace("%%", "%")) for variable, equals, value in pairs if equals]


def lines_of(text: str) -> Iterator[Line]:
    """What a unit file's text sets, in order; a line that ends in a backslash goes on in the next."""
    number = 0
    waiting = text.splitlines()
    while waiting:
        number += 1
        first = number
        line = waiting.pop(0)
        while line.endswith("\\") and waiting:
            number += 1
            line = line[:-1] + " " + waiting.pop(0)
        key, equals, value = line.strip().partition("=")
        if equals and not key.startswith(("#", ";")):
            yield Line(first, key.strip(), value.strip())
