# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Writing a result down: as text for people, as JSON and JUnit XML for a CI job."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from volta_llm.model import ConvergeResult, Fault, HostResult, RunResult, Task

# XML 1.0 has no way to write these characters.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_CLOSING = {
    "successful": "converged",
    "failed": "failed",
    "not_idempotent": "not idempotent: the second run still changed something",
    "reboot_required": "a reboot is required before the run can go on",
    "error": "Ansible could not run the playbook",
    "interrupted": "interrupted; run it again to go on",
}


def fault_lines(faults: Iterable[Fault]) -> list[str]:
    """One line a fault, and one for what to do about it."""
    lines = []
    for fault in faults:
        lines.append(fault.line)
        if fault.remedy:
            lines.append(f"  -> {fault.remedy}")
    return lines


def times_by_role(run: RunResult) -> str:
    """A table, the longest first; what took less than a tenth of a second all told is left out."""
    rows = sorted(((seconds, role) for role, seconds in run.roles_s.items() if seconds >= 0.1), reverse=True)
    width = max([len(role) for _, role in rows] + [len("whole run")])
    lines = [f"Time by role, run {run.number}"]
    lines += [f"  {role:<{width}} {seconds:8.1f} s" for seconds, role in rows]
    lines.append(f"  {'whole run':<{width}} {run.duration_s:8.1f} s")
    return "\n".join(lines)


def summary(result: ConvergeResult) -> str:
    """How it ended, host by host, and why."""
    last = result.runs[-1]
    lines = []
    for host in last.hosts:
        lines.append(
            f"{host.name}: ok={host.ok} changed={host.changed} failed={host.failed} "
            f"unreachable={host.unreachable} skipped={host.skipped}"
        )
        if host.failed_task is not None:
            task = host.failed_task
            where = f"role {task.role}, " if task.role else ""
            lines.append(f"  {task.status} in {where}task {task.name!r}")
            # The faults say the same in better order; the message is for tasks that have none.
            lines += _indent(fault_lines(host.faults) or (task.message or "").splitlines())
        lines += _indent(fault_lines(host.warnings))
        lines += [f"  endpoint {url}" for url in host.endpoints]
        if result.idempotent is False:
            lines += [f"  changed again: {_label(task)} ({task.path})" for task in host.changed_tasks]
    lines += fault_lines(result.notes)
    if last.error:
        lines.append(last.error)
    closing = _CLOSING[result.status]
    if result.idempotent:
        closing += ", and the second run changed nothing"
    elif result.status == "successful" and last.check:
        closing = f"check mode: {last.changed} change(s) would be made"
    lines.append(f"volta-llm: {closing}")
    return "\n".join(lines)


def write_json(result: ConvergeResult, path: Path) -> None:
    _write(path, json.dumps(result.as_dict(), indent=2, ensure_ascii=False) + "\n")


def write_junit(result: ConvergeResult, path: Path) -> None:
    """JUnit XML: a suite for each play and host of each run, a case for each task."""
    root = ElementTree.Element("testsuites", name="volta-llm converge")
    for run in result.runs:
        proves = run.number == 2
        for host in run.hosts:
            for play in dict.fromkeys(task.play for task in host.tasks):
                tasks = [task for task in host.tasks if task.play == play]
                _suite(root, f"run {run.number} / {play} / {host.name}", run, host, tasks, proves)
        if run.error is not None or not run.hosts:
            suite = ElementTree.SubElement(
                root, "testsuite", name=f"run {run.number}", tests="1", failures="0", errors="1", skipped="0"
            )
            case = ElementTree.SubElement(suite, "testcase", classname="ansible-playbook", name=result.playbook)
            _note(case, "error", run.status, run.error or run.status)
    tree = ElementTree.ElementTree(root)
    ElementTree.indent(tree)
    _write(path, '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n")


def _suite(
    root: ElementTree.Element, name: str, run: RunResult, host: HostResult, tasks: list[Task], proves: bool
) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=_xml(name), hostname=_xml(host.name), timestamp=run.started)
    count = {"failure": 0, "error": 0, "skipped": 0}
    for task in tasks:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml(task.role or "play"), name=_xml(task.name), time=f"{task.duration_s:.3f}"
        )
        text = "\n".join([task.message or "", *fault_lines(task.faults)]).strip()
        kind = None
        if task.status == "failed":
            # A failure that the play itself rescued is part of a good run.
            kind = None if host.good else _note(case, "failure", _codes(task) or "failed", text)
        elif task.status == "unreachable":
            kind = None if host.good else _note(case, "error", "unreachable", text)
        elif task.status == "skipped":
            kind = _note(case, "skipped", None, "")
        elif task.status == "changed" and proves:
            kind = _note(case, "failure", "not_idempotent", f"changed again in run {run.number}: {task.path}")
        if kind is None and text:
            ElementTree.SubElement(case, "system-out").text = _xml(text)
        if kind is not None:
            count[kind] += 1
    suite.set("tests", str(len(tasks)))
    suite.set("failures", str(count["failure"]))
    suite.set("errors", str(count["error"]))
    suite.set("skipped", str(count["skipped"]))
    suite.set("time", f"{sum(task.duration_s for task in tasks):.3f}")


def _note(case: ElementTree.Element, kind: str, type_: str | None, text: str) -> str:
    element = ElementTree.SubElement(case, kind)
    if type_ is not None:
        element.set("type", _xml(type_))
        element.set("message", _xml(text.partition("\n")[0]))
        element.text = _xml(text)
    return kind


def _codes(task: Task) -> str:
    return ",".join(fault.code for fault in task.faults)


def _label(task: Task) -> str:
    return f"{task.role} : {task.name}" if task.role else task.name


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _xml(text: str) -> str:
    return _NOT_XML.sub("�", text)


def _write(path: Path, text: str) -> None:
    """Replace the file whole: a job that is killed here leaves the old one or none, never half of one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp makes it private; a report is read by other steps of the job.
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
