# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Running programs, as root where that is needed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.lab.errors import LabError

#: Lines of a failed program's output that go into the message.
TAIL_LINES = 15


def say(text: str) -> None:
    """Tell the person at the keyboard what is happening; standard output stays free for results."""
    print(f"lab: {text}", file=sys.stderr, flush=True)


def as_root(command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` as root: itself for root, through sudo for anyone else."""
    return list(command) if os.geteuid() == 0 else ["sudo", "--", *command]


def run(
    command: Sequence[str],
    *,
    check: bool = True,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    shown: Sequence[str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program and keep its output.

    With ``check``, a program that cannot be started or ends with another status than 0 is a LabError that quotes the
    last lines it wrote. ``shown`` is the command as the message gives it, where the real one says more than helps.
    """
    try:
        done = subprocess.run(
            list(command),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            env=None if env is None else {**os.environ, **env},
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise LabError(f"{command[0]} is not installed. See: python -m tests.lab deps --install") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{shlex.join(command)} did not end within {timeout:g} s") from error
    if check and done.returncode != 0:
        written = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        tail = "\n  ".join(written[-TAIL_LINES:]) or "(it wrote nothing)"
        raise LabError(f"{shlex.join(shown or command)} ended with status {done.returncode}:\n  {tail}")
    return done


def output(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
    """What a program wrote to standard output, without the line end."""
    return run(command, env=env).stdout.decode(errors="replace").strip()
