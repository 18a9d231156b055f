# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Runs the module with live progress; with C(job_file), joins a download that an earlier task started.

Files on the control node (sources of the type C(controller)) are sent from here when their turn has come: in pieces on
the standard input of C(dd) on the machine, as the user the task runs as, to the file system they belong on. Nothing
lies twice anywhere, and what has arrived stays when it breaks off.
"""

from __future__ import annotations

import posixpath
import shlex
import time
from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible_collections.volta.llm.plugins.module_utils.progress import ProgressRecord
from ansible_collections.volta.llm.plugins.plugin_utils.live import Lines, LiveAction, _host

#: One remote command sends this much: its start costs little against it, and the control node holds it in memory.
PIECE = 64 << 20
#: Faults that no other source can mend.
FINAL = (
    *("bad_argument", "checksum_missing", "dest_not_writable", "disk_full", "file_corrupt", "lock_invalid"),
    *("lock_mismatch", "not_locked", "source_unauthorized"),
)


class ActionModule(LiveAction):
    job_argument = "job_file"

    def joined_progress(self, args: dict[str, Any]) -> str | None:
        """The record that a run keeps beside its lock: under the first name of the set (transfer/store.py)."""
        dest = str(args.get("dest", "")).rstrip("/")
        names = [str(entry.get("name")) for entry in args.get("files") or [] if isinstance(entry, dict)]
        folder, name = (dest, min(names)) if names else posixpath.split(dest)
        return posixpath.join(folder, ".volta-transfer", f"{name}.progress.json") if folder.startswith("/") else None

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        args = dict(self._task.args)
        sources = [entry for entry in args.get("sources") or [] if isinstance(entry, dict)]
        places = [number for number, entry in enumerate(sources) if entry.get("type") == "controller"]
        if not places or self._task.check_mode or self._task.async_val:
            return super().run(tmp, task_vars)
        sent = 0
        passed_over: list[Any] = []
        start = 0
        for number in places:
            result = self._run_with(args, sources[start:number], tmp, task_vars)
            args.pop("job_file", None)
            passed_over += result.get("passed_over") or []
            if not result.get("failed") or not _may_go_on(result):
                return {**result, "passed_over": passed_over, "bytes_sent": sent}
            passed_over += [fault for fault in result["faults"] if fault["code"] != "file_missing"]
            missing = [entry["dest"] for entry in result.get("files") or [] if not entry.get("verified")]
            count, problem = self._send(sources[number], missing, task_vars or {})
            sent += count
            if problem:
                return {"failed": True, "msg": problem, "faults": [], "changed": False, "bytes_sent": sent}
            start = number
        result = self._run_with(args, sources[start:], tmp, task_vars)
        return {**result, "passed_over": passed_over + (result.get("passed_over") or []), "bytes_sent": sent}

    def _run_with(
        self, args: dict[str, Any], sources: list[Any], tmp: str | None, task_vars: dict[str, Any] | None
    ) -> dict[str, Any]:
        self._task.args = {**args, "sources": sources}
        result: dict[str, Any] = super().run(tmp, task_vars)
        return result

    def _send(self, source: dict[str, Any], dests: list[str], task_vars: dict[str, Any]) -> tuple[int, str | None]:
        """Send what the control node has of the files: (bytes sent, why that cannot go on). What it lacks is the
        module's to name."""
        given = Path(self._loader.path_dwim(str(source["controller"])))
        found = []
        for dest in dests:
            name = posixpath.basename(dest)
            path = given / name if given.is_dir() or str(source["controller"]).endswith("/") else given
            if path.is_file():
                found.append((path, dest))
        total = sum(path.stat().st_size for path, _ in found)
        interval = self._interval(task_vars)
        quiet = interval == 0 or self._task.no_log
        lines = Lines(self._label(), _host(task_vars, self._task), interval, Display().display)
        meter = _Meter(total, None if quiet else lines)
        for path, dest in found:
            problem = self._send_file(path, dest, meter)
            if problem:
                return meter.sent, problem
            meter.before += path.stat().st_size
        return meter.sent, None

    def _send_file(self, path: Path, dest: str, meter: _Meter) -> str | None:
        folder, name = posixpath.split(dest)
        incoming = posixpath.join(folder, ".volta-transfer", f"{name}.incoming")
        stat = path.stat()
        identity = f"{stat.st_size} {stat.st_mtime_ns}"
        there = self._shell(
            f'umask 077; if [ "$(cat {_q(incoming)}.from 2>/dev/null)" != {_q(identity)} ]; then '
            f"rm -f {_q(incoming)}; printf %s {_q(identity)} > {_q(incoming)}.from; fi; "
            f": >> {_q(incoming)} && stat -c %s {_q(incoming)} && "
            f"df -PB1 {_q(folder)} | tail -n 1 | tr -s ' ' | cut -d ' ' -f 4"
        )
        words = there["stdout"].split()
        if there["rc"] != 0 or len(words) != 2 or not all(map(str.isdigit, words)):
            return f"{dest}: the machine cannot take the file: {there['stderr'].strip() or there['stdout'].strip()}"
        done, free = map(int, words)
        if stat.st_size - done + (16 << 20) > free:
            return (
                f"[disk_full] {folder}: {stat.st_size - done} bytes are missing, {free} are free\n"
                "  -> Make room on that file system or choose another folder. What has arrived is kept."
            )
        with path.open("rb") as handle:
            handle.seek(done)
            while data := handle.read(PIECE):
                answer = self._shell(
                    f"dd of={_q(incoming)} bs=1048576 iflag=fullblock oflag=seek_bytes seek={done} conv=notrunc "
                    f"status=none && stat -c %s {_q(incoming)}",
                    data,
                )
                done += len(data)
                if answer["rc"] != 0 or answer["stdout"].strip() != str(done):
                    said = answer["stderr"].strip() or answer["stdout"].strip()
                    return f"{dest}: sending {path} broke off at byte {done - len(data)}: {said or 'no answer'}"
                meter.note(len(data), done, name, stat.st_size)
        self._shell(f"rm -f {_q(incoming)}.from")
        return None

    def _shell(self, command: str, data: bytes | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = self._low_level_execute_command(command, in_data=data, sudoable=True)
        return answer


class _Meter:
    """Counts what was sent and shows it at the usual pace."""

    def __init__(self, total: int, lines: Lines | None) -> None:
        self._total, self._lines = total, lines
        self._begun = time.monotonic()
        self.before = 0
        self.sent = 0

    def note(self, count: int, done: int, name: str, size: int) -> None:
        self.sent += count
        now = time.monotonic()
        rate = self.sent / (now - self._begun) if now > self._begun else None
        at = self.before + done
        left = (self._total - at) / rate if rate else None
        subject = name if size == self._total else f"{name} ({100 * done // max(1, size)} %)"
        if self._lines is None:
            return
        self._lines.show(
            ProgressRecord("from the control node", at, self._total, "bytes", rate, left, subject, time.time()), now
        )


def _may_go_on(result: dict[str, Any]) -> bool:
    codes = [fault.get("code") for fault in result.get("faults") or []]
    return bool(codes) and not any(code in FINAL for code in codes)


def _q(text: str) -> str:
    return shlex.quote(text)
