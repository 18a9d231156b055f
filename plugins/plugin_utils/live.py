# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Live progress for modules that run long.

A module answers once, when it has ended; a quarter of an hour of silence looks like a hang. The base class here starts
the module through Ansible's own asynchronous wrapper, reads the progress record it writes (module_utils/progress.py)
with one remote command a poll, and prints a line when something changed. The result is the module's own, unchanged.

How often lines are printed: variable C(volta_progress_interval) or environment variable C(VOLTA_PROGRESS_INTERVAL), in
seconds; 0 or C(off) runs the module plainly. By default 2 s at first, growing to 10 s.
"""

from __future__ import annotations

import json
import os
import posixpath
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.volta.llm.plugins.module_utils.progress import ProgressRecord, read_progress

#: A job that runs longer than this is ended by the wrapper; the limit only keeps it from living for ever.
JOB_LIMIT_S = 7 * 24 * 3600
#: How long the connection may be away while the job goes on by itself.
RECONNECT_S = 600
#: The first looks come fast, so that a module with nothing to do costs little; then one every two seconds.
POLLS_S = (0.25, 0.35, 0.5, 0.8, 1.2)
POLL_S = 2.0
#: Nothing is printed for a task that ends within this time.
QUIET_S = 2.0
#: The pace of lines: first pause, growth, longest pause.
PACE = (2.0, 1.3, 10.0)
#: Without any change a line still says that the task is alive, this often.
STILL_S = 60.0

_JOB, _ALIVE, _END = "@volta-job@", "@volta-alive@", "@volta-end@"


@dataclass(frozen=True)
class Poll:
    """One look at a job: its progress record, its result file's text, whether its processes live."""

    progress: ProgressRecord | None
    job: str
    alive: bool


class JobLost(Exception):
    """The job has no result and no process: killed, or the machine was restarted."""


class LiveAction(ActionBase):  # type: ignore[misc]
    """Runs its module in the background of the target and shows its progress.

    ``job_argument`` names an argument that holds the C(results_file) of a job started earlier by a task with C(async)
    and C(poll=0); that job is then followed instead, and its result returned.
    """

    _supports_check_mode = True
    _supports_async = True
    job_argument: str | None = None

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, task_vars)
        args = dict(self._task.args)
        job_file = args.pop(self.job_argument, None) if self.job_argument else None
        interval = self._interval(task_vars)
        if (
            self._task.async_val
            or self._task.check_mode
            or interval == 0
            or self._task.no_log
            or self._connection.has_native_async
            or self._connection.always_pipeline_modules
        ):
            # `async:` on the task: the executor does the waiting. no_log: nothing may be shown or left in a job file.
            in_background = bool(self._task.async_val) and not self._connection.has_native_async
            result.update(self._execute_module(module_args=args, task_vars=task_vars, wrap_async=in_background))
            return result
        lines = Lines(self._label(), _host(task_vars, self._task), interval, Display().display)
        if job_file:
            try:
                result.update(
                    self._follow(job_file, args.get("progress_file") or self.joined_progress(args), lines, task_vars)
                )
                return result
            except JobLost:
                # What it fetched is on disk: the run below goes on from there.
                Display().vv(f"{self._label()}: job {posixpath.basename(job_file)} is gone, running the module again")
        result.update(self._run_live(args, task_vars, lines))
        return result

    def joined_progress(self, args: dict[str, Any]) -> str | None:
        """Where a job started without ``progress_file`` reports; null when it does not."""
        return None

    def _run_live(self, args: dict[str, Any], task_vars: dict[str, Any], lines: Lines) -> dict[str, Any]:
        progress = args.get("progress_file")
        if not progress:
            # Beside the job's own file: private to the user the module runs as, whoever that is.
            folder = self.get_shell_option("async_dir", default="~/.ansible_async")
            args["progress_file"] = posixpath.join(folder, f"volta-{secrets.token_hex(8)}.progress")
        started = self._start(args, task_vars)
        if "ansible_job_id" not in started or started.get("failed"):
            # Nothing ran: a user without a home has no place for the job, or the connection's own trouble, which a
            # plain run reports in its own words.
            Display().vv(f"{self._label()}: runs without progress: {started.get('msg', 'no job was started')}")
            plain = {key: value for key, value in args.items() if key != "progress_file" or progress}
            answer: dict[str, Any] = self._execute_module(module_args=plain, task_vars=task_vars)
            return answer
        job_file = started["results_file"]
        if not progress:
            progress = posixpath.join(posixpath.dirname(job_file), posixpath.basename(args["progress_file"]))
        try:
            result = self._follow(job_file, progress, lines, task_vars)
        except JobLost:
            result = {
                "failed": True,
                "msg": f"{self._label()}: its process on the host is gone without a result (killed, out of memory, or "
                "the machine was restarted). Run the playbook again: it goes on from what is there.",
                "faults": [],
            }
        for key in ("ansible_facts", "warnings", "deprecations"):
            # Interpreter discovery reports with the first module of a play, here with the start.
            if started.get(key) and not result.get(key):
                result[key] = started[key]
        return result

    def _start(self, args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        self._task.async_val = JOB_LIMIT_S
        try:
            started: dict[str, Any] = self._execute_module(module_args=args, task_vars=task_vars, wrap_async=True)
            return started
        finally:
            # Left set, the executor would take our result for a job to wait for.
            self._task.async_val = 0

    def _follow(self, job_file: str, progress: str | None, lines: Lines, task_vars: dict[str, Any]) -> dict[str, Any]:
        """Wait for the job, printing lines; its result. Raises JobLost."""
        command = poll_command(job_file, progress)
        begun = seen = time.monotonic()
        missing = polls = 0
        while True:
            time.sleep(POLLS_S[polls] if polls < len(POLLS_S) else POLL_S)
            polls += 1
            try:
                poll = read_poll(self._low_level_execute_command(command)["stdout"])
            except AnsibleError:
                if time.monotonic() - seen > RECONNECT_S:
                    raise
                self._reset_connection()
                continue
            now = time.monotonic()
            if poll is None:
                if now - seen > RECONNECT_S:
                    raise AnsibleError(
                        f"{self._label()}: the host no longer answers about job {posixpath.basename(job_file)}"
                    )
                continue
            seen = now
            result = self._job_result(job_file, poll.job, task_vars)
            if result is not None:
                self._low_level_execute_command(cleanup_command(job_file, progress))
                if now - begun > QUIET_S:
                    lines.last(poll.progress, bool(result.get("failed")))
                return result
            # Twice: between the end of the processes and the result in the file there is a moment.
            missing = 0 if poll.alive else missing + 1
            if missing > 2:
                self._low_level_execute_command(cleanup_command(job_file, progress))
                raise JobLost(job_file)
            if now - begun > QUIET_S:
                lines.show(poll.progress, now)

    def _job_result(self, job_file: str, text: str, task_vars: dict[str, Any]) -> dict[str, Any] | None:
        """The module's result in the job's file, or null while it runs."""
        try:
            raw = json.loads(text)
        except ValueError:
            return None
        if not isinstance(raw, dict) or ("started" in raw and "finished" in raw and not raw["finished"]):
            return None
        if (
            raw.get("failed")
            and "outdata" not in raw
            and str(raw.get("msg", "")).startswith("Traceback")
            and "data" in raw
        ):
            detail = (raw.get("stderr") or raw.get("data") or "").strip()[-2000:]
            return {
                "failed": True,
                "msg": f"{self._label()}: the module was ended on the host before it could answer "
                "(killed or out of memory). Run the playbook again: it goes on from what is there."
                + (f"\n{detail}" if detail else ""),
                "faults": [],
            }
        if "__ansible_type" in text or not raw.keys().isdisjoint(("warnings", "deprecations", "exception")):
            # Typed or special values: Ansible's own module reads them as this release means them.
            folder, job = posixpath.split(job_file)
            data: dict[str, Any] = self._execute_module(
                module_name="ansible.legacy.async_status",
                module_args={"jid": job, "_async_dir": folder, "mode": "status"},
                task_vars=task_vars,
            )
            for key in ("started", "finished", "ansible_job_id", "results_file"):
                data.pop(key, None)
            return data
        return {key: value for key, value in raw.items() if not key.startswith("_ansible_")}

    def _reset_connection(self) -> None:
        try:
            self._connection.reset()
        except (AttributeError, AnsibleError):
            return

    def _interval(self, task_vars: dict[str, Any]) -> float | None:
        """Seconds between lines; null for the growing default, 0 for none."""
        value = task_vars.get("volta_progress_interval")
        value = os.environ.get("VOLTA_PROGRESS_INTERVAL", "") if value is None else self._templar.template(value)
        text = str(value).strip().lower()
        if text in ("", "auto", "true"):
            return None
        if text in ("off", "no", "false"):
            return 0.0
        try:
            return max(0.0, float(text))
        except ValueError:
            raise AnsibleError(
                f"volta_progress_interval is {text!r}: write seconds between progress lines, 0 or off for none, "
                "auto for the default"
            ) from None

    def _label(self) -> str:
        return str(self._task.action).rsplit(".", 1)[-1]


class Lines:
    """Prints progress lines at a pace a person can read and a CI log can bear."""

    def __init__(self, label: str, host: str, interval: float | None, display: Callable[[str], None]) -> None:
        self._label, self._host, self._display = label, host, display
        self._pause = interval if interval is not None else PACE[0]
        self._grows = interval is None
        self._shown: tuple[str, int, int | None, str] | None = None
        self._at = 0.0

    def show(self, record: ProgressRecord | None, now: float) -> None:
        """Print a line if it is time for one and the record says something new."""
        if record is None or now - self._at < self._pause:
            return
        state = (record.phase, record.done, record.total, record.subject)
        if state == self._shown and now - self._at < STILL_S:
            return
        if self._shown is not None and self._grows:
            self._pause = min(self._pause * PACE[1], PACE[2])
        self._shown, self._at = state, now
        self._display(line(self._label, self._host, record))

    def last(self, record: ProgressRecord | None, failed: bool) -> None:
        """The closing line of a task that has shown lines; a failure speaks for itself."""
        if (
            record is None
            or failed
            or self._shown is None
            or self._shown[:3] == (record.phase, record.done, record.total)
        ):
            return
        self._display(line(self._label, self._host, record))


def _host(task_vars: dict[str, Any], task: Any) -> str:
    host = str(task_vars.get("inventory_hostname", "localhost"))
    return f"{host} -> {task.delegate_to}" if task.delegate_to and task.delegate_to != host else host


def line(label: str, host: str, record: ProgressRecord) -> str:
    """One line of progress, such as ``model_download  node1  qwen.gguf  43.1 %  812 MB/s  2 min 10 s left``."""
    words = [label, host]
    if record.subject:
        words.append(record.subject)
    if record.unit == "bytes":
        if record.total:
            words.append(f"{100 * record.done / record.total:.1f} % of {size_text(record.total)}")
        else:
            words.append(size_text(record.done))
        if record.rate and record.done != record.total:
            words.append(f"{size_text(record.rate)}/s")
    elif record.total is not None:
        words.append(f"{record.done} of {record.total} {record.unit}")
    else:
        words.append(f"{record.done} {record.unit}")
    if record.phase:
        words.append(record.phase)
    if record.eta_s is not None and record.done != record.total:
        words.append(f"{duration_text(record.eta_s)} left")
    return "  ".join(words)


def size_text(size: float) -> str:
    """Decimal units, as rates and model sizes are quoted: 812 MB, 107 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit in ("B", "kB") or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def duration_text(seconds: float) -> str:
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes < 10 and rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def poll_command(job_file: str, progress: str | None) -> str:
    """One POSIX shell command that prints the progress record, the job's file, and whether its processes live."""
    folder, job = posixpath.split(job_file)
    identity = job.split(".", 1)[0]
    # The job's name must not stand in this command line as it is, or the search among processes would find itself.
    path = f"{shlex.quote(folder)}/{job[0]}''{shlex.quote(job[1:])}"
    pattern = shlex.quote(f"{identity[0]}[{identity[1]}]{identity[2:]}")
    show = f"cat {shlex.quote(progress)} 2>/dev/null; " if progress else ""
    return (
        f"{show}echo; echo {_ALIVE}; grep -lsa {pattern} /proc/[0-9]*/cmdline 2>/dev/null | head -n 1; "
        f"echo {_JOB}; cat {path} 2>/dev/null; echo; echo {_END}"
    )


def cleanup_command(job_file: str, progress: str | None) -> str:
    return f"rm -f {shlex.quote(job_file)}" + (f" {shlex.quote(progress)}" if progress else "")


def read_poll(output: str) -> Poll | None:
    """What poll_command printed, or null when the answer is not whole (a connection that broke midway)."""
    head, found, rest = output.partition(_ALIVE)
    alive, found_job, rest = rest.partition(_JOB)
    job, found_end, _ = rest.partition(_END)
    if not (found and found_job and found_end):
        return None
    # A login banner may stand before the record.
    start = head.find('{"phase"')
    record = read_progress(head[start:]) if start >= 0 else None
    return Poll(record, job.strip(), "/proc/" in alive)
