# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a running server said at its start: that it does not do what it was told, and goes on all the same.

The engine answers requests after each of these lines (llama.cpp 0.5.0, common/arg.cpp, common/preset.cpp,
common/common.cpp, tools/server/server-context.cpp). Lines about a single request, such as a sampler that cannot be
joined with a grammar, are none of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..machine import Runner
from .service import full_name

SECONDS = 60.0
#: Lines to read where journalctl cannot search.
LINES = 20000
_IGNORED = re.compile(
    r"option will be ignored"
    r"|Setting (?:the|a) [a-z ]+ has no effect"
    r"|--[a-z-]+ has no effect"
    r"|ignoring option '"
    r"|ignoring --[a-z]"
    r"|(?:KV cache shifting|ctx_shift|cache_reuse|swa_full) is not supported"
    r"|--[a-z-]+ requires --[a-z-]+, disabling"
)
_NO_GPU = re.compile(r"no usable GPU found|failed to initialize CUDA|no CUDA-capable device|ggml_cuda_init: no device")
#: For PCRE and for Python; coarser than the two above, which judge what it finds.
_SEARCH = "ignored|ignoring|no effect|is not supported|disabling|no usable GPU|[Cc][Uu][Dd][Aa]"


def start_lines(unit: str, pid: int, since: float | None, runner: Runner) -> list[str]:
    """What the process said that may be of interest, in order; empty where the journal cannot be read.

    ``since``: its start in epoch seconds, as a pid comes again.
    """
    argv = ["journalctl", "--no-pager", "--output=cat", f"_SYSTEMD_UNIT={full_name(unit)}", f"_PID={pid}"]
    if since is not None:
        argv.append(f"--since=@{int(since)}")
    done = runner([*argv, f"--grep={_SEARCH}", "--case-sensitive=yes"], SECONDS)
    if not done.ok and ("pattern matching" in done.stderr or "unrecognized option" in done.stderr):
        done = runner([*argv, f"--lines={LINES}"], SECONDS)
    # Exit status 1 is what a search that finds nothing ends with.
    return [line.strip() for line in done.stdout.splitlines() if re.search(_SEARCH, line)]


def ignored(lines: Sequence[str]) -> list[str]:
    """Those lines in which the server says that an option is without effect, each once."""
    return list(dict.fromkeys(_plain(line) for line in lines if _IGNORED.search(line)))


def without_gpu(lines: Sequence[str]) -> str:
    """The first line in which the engine says that it has no GPU; empty where there is none."""
    return next((_plain(line) for line in lines if _NO_GPU.search(line)), "")


def _plain(line: str) -> str:
    """Without the engine's time and level, and the word warning."""
    return re.sub(r"^(?:[\d.]+ [A-Z] )?(?:warning:\s*)?", "", line)[:300]
