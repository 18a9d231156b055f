# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What an engine can do, read from its own help text.

Options move between releases of llama.cpp. The serving role renders what the installed binary knows.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Capabilities:
    """``flags``: every option, sorted. ``split_modes`` and ``load_modes``: accepted values, empty where unknown."""

    flags: list[str] = field(default_factory=list)
    split_modes: list[str] = field(default_factory=list)
    load_modes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, list[str]]:
        return asdict(self)


def parse_help(text: str) -> Capabilities:
    """Read the output of ``llama-server --help``."""
    flags: set[str] = set()
    for line in text.splitlines():
        # An option starts at the margin; its description is indented or follows after two spaces.
        if line.startswith("-") and not line.startswith("-----"):
            head = re.split(r"\s{2,}(?=[^\s-])", line)[0]
            flags.update(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", head))
    return Capabilities(sorted(flags), _choices(text, "--split-mode"), _choices(text, "--load-mode"))


def _choices(text: str, flag: str) -> list[str]:
    """The values of an option: ``{a,b}`` behind it, or the list ``- a: ...`` in its description."""
    block = re.search(rf"^-.*(?<![\w-]){re.escape(flag)}(?![\w-]).*\n(?:\s+.*\n)*", text, re.MULTILINE)
    if block is None:
        return []
    braces = re.search(r"\{([^}]+)\}", block.group(0).partition("\n")[0])
    if braces:
        return braces.group(1).split(",")
    return re.findall(r"^\s+- ([\w+]+)(?: \(default\))?:", block.group(0), re.MULTILINE)
