# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Running Ansible: one playbook through ansible-runner, one question to ansible-inventory.

ansible-runner's folder for private data is a temporary one outside the checkout and is removed afterwards, so neither
artifacts nor a fact cache stay behind.
"""

from __future__ import annotations

import configparser
import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ansible_runner
from pexpect.exceptions import TIMEOUT  # type: ignore[import-untyped]

from volta_llm.events import Event, EventLog
from volta_llm.judge import judge_run
from volta_llm.model import RunResult, UsageError

#: Seconds that ansible-playbook gets after Ctrl-C to stop its workers and to clean up; then it is killed.
STOP_GRACE_S = 15.0

_COLOUR = re.compile(r"\x1b\[[0-9;]*[mK]")


@dataclass(frozen=True)
class Request:
    """What to run.

    ``playbook`` and ``inventories`` are absolute (or a collection's playbook, a list of hosts). ``extra_vars`` are
    values of ``-e`` as Ansible takes them (``key=value``, JSON, ``@/absolute/file``). ``vault`` and ``options`` are
    further arguments of ansible-playbook; those in ``vault`` go to ansible-inventory as well.
    """

    project: Path
    playbook: str
    inventories: tuple[str, ...]
    check: bool = False
    extra_vars: tuple[str, ...] = ()
    vault: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def shared_arguments(self) -> list[str]:
        return [*self.vault, *(word for value in self.extra_vars for word in ("-e", value))]


class Interrupt:
    """Ctrl-C (and SIGTERM) while a playbook runs: what a terminal would do, passed on to ansible-playbook.

    ansible-runner starts ansible-playbook in a session of its own, which a terminal's Ctrl-C does not reach, and would
    kill only its first process; Ansible's workers, and what they run on this machine, would go on.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._count = 0
        self._passed_on = 0
        self._since = 0.0
        #: ansible-runner's private folder of the run at hand; every process of that run has it in its environment.
        self.private = ""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals; in another thread than the main one Python allows no handler, and none is set."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
        self._count += 1

    def must_kill(self) -> bool:
        """ansible-runner asks this about once a second. True: kill now."""
        if not self._count:
            return False
        now = time.monotonic()
        if not self._passed_on:
            self._since = now
        if self._passed_on < self._count:
            self._passed_on = self._count
            _interrupt_children(self.private)
        return now - self._since > STOP_GRACE_S


def run_playbook(
    request: Request, number: int, interrupt: Interrupt, show: Callable[[str], None] | None = None
) -> tuple[RunResult, EventLog]:
    """Run once; ``show`` gets every line of Ansible's output as it comes. ``number`` is 1 or 2, for the result."""
    log = EventLog()
    output: list[str] = []

    def on_event(event: Event) -> bool:
        text = str(event.get("stdout") or "")
        if text and show is not None:
            show(text)
        if event.get("event") == "verbose":
            output.extend(_COLOUR.sub("", text).splitlines())
        log.add(event)
        return False  # nothing is written to disk: results are judged in memory

    started = datetime.datetime.now(datetime.timezone.utc)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="volta-llm-") as private:
        interrupt.private = private
        options = {
            "private_data_dir": private,
            "project_dir": str(request.project),
            "playbook": request.playbook,
            "inventory": list(request.inventories),
            "cmdline": shlex.join(
                [*(["--check"] if request.check else []), *request.shared_arguments, *request.options]
            ),
            "envvars": _environment(request.project),
            "settings": {"pexpect_timeout": 1, "suppress_output_file": True},
            # "jsonfile", the default, would override the checkout's own choice of a fact cache.
            "fact_cache_type": "memory",
            "quiet": True,
            "event_handler": on_event,
            "cancel_callback": interrupt.must_kill,
        }
        rc: int | None = None
        try:
            rc = ansible_runner.run(**options).rc
        except TIMEOUT:
            # After a kill something may still hold the terminal; the play itself is over.
            if interrupt.signal is None:
                raise
    result = judge_run(
        log,
        number=number,
        check=request.check,
        started=started.isoformat(timespec="seconds"),
        duration_s=time.monotonic() - begin,
        rc=rc,
        output=output,
    )
    if interrupt.signal is not None:
        result.status, result.error = "interrupted", None
    return result, log


def read_inventory(request: Request) -> dict[str, dict[str, Any]]:
    """The inventory's variables by host, with ``-e`` applied; UsageError when it cannot be read or names no host.

    Held in memory only: vaulted values are in it in clear.
    """
    argv = [
        "ansible-inventory",
        "--list",
        *(word for source in request.inventories for word in ("-i", source)),
        *request.shared_arguments,
    ]
    environment = {**os.environ, **_environment(request.project), "ANSIBLE_NOCOLOR": "1"}
    named = ", ".join(request.inventories)
    try:
        done = subprocess.run(argv, cwd=request.project, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError("ansible-inventory is not on PATH; install volta-llm with its dependencies") from None
    said = " ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
    if done.returncode != 0:
        raise UsageError(f"inventory {named}: {said or f'ansible-inventory ended with {done.returncode}'}")
    listed: dict[str, Any] = json.loads(done.stdout)
    hosts = {name for group in listed.values() for name in group.get("hosts", []) if isinstance(group, Mapping)}
    if not hosts:
        raise UsageError(f"inventory {named} names no hosts. {said}".rstrip())
    variables: dict[str, dict[str, Any]] = listed.get("_meta", {}).get("hostvars", {})
    return {name: variables.get(name, {}) for name in sorted(hosts)}


def _environment(project: Path) -> dict[str, str]:
    """What Ansible needs to see the checkout as it is when called there by hand."""
    config = os.environ.get("ANSIBLE_CONFIG") or str(project / "ansible.cfg")
    found = {"ANSIBLE_CONFIG": config}
    if "ANSIBLE_HOST_KEY_CHECKING" not in os.environ:
        # ansible-runner switches the check of host keys off unless this says otherwise.
        found["ANSIBLE_HOST_KEY_CHECKING"] = str(_checks_host_keys(Path(config)))
    scripts = sysconfig.get_path("scripts")
    if (Path(scripts) / "ansible-playbook").exists():
        # `.venv/bin/volta-llm` without the environment activated must not meet another Ansible.
        found["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        found["ANSIBLE_NOCOLOR"] = "1"
    return found


def _checks_host_keys(config: Path) -> bool:
    parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=(";",), strict=False)
    parser.read(config, encoding="utf-8")
    return parser.getboolean("defaults", "host_key_checking", fallback=True)


def _interrupt_children(private: str) -> None:
    """SIGINT to the process group of ansible-playbook, which leads the session of its pseudo-terminal."""
    for pid in _session_children(private):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGINT)


def _session_children(private: str) -> Sequence[int]:
    """Children of this process that lead a session and have ``private`` in their environment."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (comm) state ppid pgrp session ...; comm may hold anything, so cut after its last parenthesis.
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            pid = int(stat.parent.name)
            if int(fields[1]) != os.getpid() or int(fields[3]) != pid:
                continue
            # A program that uses this as a library may have children of its own.
            environment = (stat.parent / "environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(private) in environment:
            found.append(pid)
    return found
