# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Configuring and compiling in a work folder, with the log kept and progress reported."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..faults import Fault, FaultError
from ..progress import ProgressWriter
from .diagnosis import check_configured, configured_version, explain
from .plan import build_environment, cmake_options, configure_command, ninja_progress
from .process import stream_as
from .request import Account, Request
from .toolchain import Toolchain, automatic_jobs, machine_memory


@dataclass(frozen=True)
class Work:
    """The folders of one build. The source belongs to the caller, only ``build`` and ``home`` to the build user."""

    root: Path
    source: Path
    build: Path
    home: Path
    log: Path


class Builder:
    """Runs cmake and ninja for one request."""

    def __init__(self, request: Request, tools: Toolchain, account: Account | None, work: Work) -> None:
        self._request = request
        self._tools = tools
        self._account = account
        self._work = work
        self._progress = ProgressWriter(request.progress_file, "steps")
        self._env = build_environment(request, tools, work.root, work.home)

    def configure(self) -> tuple[str | None, list[Fault]]:
        """Run cmake; the source's version as it says it, and warnings. Raises FaultError when it cannot be built."""
        self._progress.update("configure", 0, None, self._request.backend, force=True)
        options = cmake_options(self._request, self._tools)
        command = configure_command(options, self._tools, self._work.source, self._work.build)
        status, text = self._logged(command, append=False)
        if status != 0:
            raise FaultError(explain(text, str(self._work.log), "configure", status))
        return configured_version(text), check_configured(text, self._request.backend, self._request.nccl)

    def build(self) -> int:
        """Run ninja; the number of jobs that it ended with. One retry with fewer jobs where memory ran out."""
        jobs = self._request.jobs or automatic_jobs(*machine_memory())
        status, text = self._ninja(jobs)
        if status != 0:
            fault = explain(text, str(self._work.log), "build", status)
            if fault.code != "build_out_of_memory" or jobs == 1:
                raise FaultError(fault)
            jobs = fewer(jobs)
            status, text = self._ninja(jobs)
            if status != 0:
                raise FaultError(explain(text, str(self._work.log), "build", status))
        return jobs

    def programs(self) -> dict[str, str]:
        """The programs that were asked for, each with the name that this source has for it."""
        text = ""
        with contextlib.suppress(OSError):
            text = (self._work.build / "build.ninja").read_text(encoding="utf-8", errors="replace")
        return {target: named_in(target, text) for target in self._request.targets}

    def _ninja(self, jobs: int) -> tuple[int, str]:
        command = [self._tools.ninja, "-C", str(self._work.build), "-j", str(jobs), *self.programs().values()]
        return self._logged(command, append=True)

    def _logged(self, command: Sequence[str], append: bool) -> tuple[int, str]:
        lines: list[str] = []
        with self._work.log.open("a" if append else "w", encoding="utf-8") as log:
            log.write("$ " + " ".join(command) + "\n")

            def on_line(line: str) -> None:
                log.write(line)
                lines.append(line)
                step = ninja_progress(line)
                if step is not None:
                    done, total, subject = step
                    self._progress.update("build", done, total, subject, force=done == total)

            status = stream_as(self._account, command, self._env, str(self._work.build), on_line)
            log.write(f"(exit status {status})\n")
        return status, "".join(lines)


def named_in(target: str, build_ninja: str) -> str:
    """A program's name in this build: ``rpc-server`` is ``ggml-rpc-server`` in newer sources."""
    renamed = f"ggml-{target}"
    if f"build bin/{renamed}: " in build_ninja and f"build bin/{target}: " not in build_ninja:
        return renamed
    return target


def fewer(jobs: int) -> int:
    """The jobs of the second attempt: two, or one where it were two already."""
    return 2 if jobs > 2 else 1
