# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a server's last lines mean: the few ends that have one cause, in words."""

from __future__ import annotations

import re
from collections.abc import Callable

_CAUSES: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (
        r"allocating ([\d.]+) MiB on device (\d+): cudaMalloc failed: out of memory",
        lambda found: (
            f"GPU {found[2]} has no room for {found[1]} MiB more: less context, fewer requests or another split"
        ),
    ),
    (
        r"CUDA error: out of memory[\s\S]*?current device: (\d+)",
        lambda found: f"GPU {found[1]} ran out of memory: less context, fewer requests or another split",
    ),
    (
        r"missing after \d+ s: (.*nvidia.*)",
        lambda found: f"the driver's devices did not come: {found[1]}",
    ),
    (
        r"a former server is still there: ([^;]*)",
        lambda found: f"{found[1]} hangs in the driver and cannot be killed: the machine must be rebooted",
    ),
    (
        r"unknown model architecture: '([^']*)'",
        lambda found: f"this engine is too old for the model's architecture {found[1]}",
    ),
    (r"error: invalid argument: (.*)", lambda found: f"the engine does not know the argument {found[1].strip()}"),
    (
        r"(?i)couldn't bind (?:http )?server socket|address already in use",
        # The engine says the same of a certificate that it cannot use.
        lambda found: "another program took the port in the meantime, or certificate or key cannot be used",
    ),
    (
        r"failed to open (?:GGUF file )?'([^'\n]+)'",
        lambda found: f"{found[1]} is not there, or its mode or a folder's keeps the server's account from it",
    ),
    (
        r"tensor '([^']*)' data is not within the file bounds",
        lambda found: f"the model's file is cut off ({found[1]} lies beyond its end)",
    ),
    (r"install: cannot stat '([^']*)'", lambda found: f"{found[1]} is not there (certificate or key)"),
)


def cause(lines: str) -> str:
    """The cause that the lines tell, one clause without a full stop; empty where none is known."""
    for pattern, words in _CAUSES:
        found = re.search(pattern, lines)
        if found:
            return words(found)
    return ""
