# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From the events of a run to its result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from volta_llm.events import Event, EventLog
from volta_llm.model import Fault, HostResult, RunResult, Task

#: Tasks of the play itself, fact gathering first of all, in the times by role.
NO_ROLE = "(play)"

# One result a host and task; results of single loop items (runner_item_*) are repeated in it.
_RESULTS = "[?contains(['runner_on_ok', 'runner_on_failed', 'runner_on_skipped', 'runner_on_unreachable'], event)]"
_STATS = "[?event=='playbook_on_stats'].data | [-1]"
_PLAYS = "[?event=='playbook_on_play_start'].data.name"


def judge_run(
    log: EventLog, *, number: int, check: bool, started: str, duration_s: float, rc: int | None, output: list[str]
) -> RunResult:
    """The result of one run.

    ``rc`` is the exit status of ansible-playbook, ``output`` its lines outside of events; they tell what was wrong when
    it never came to a task.
    """
    results: list[Event] = log.select(_RESULTS) or []
    stats: dict[str, dict[str, int]] = log.select(_STATS) or {}
    names = sorted({*stats.get("processed", {}), *(event["data"]["host"] for event in results)})
    hosts = [_host(name, [event for event in results if event["data"]["host"] == name], stats) for name in names]
    error = None
    if any(not host.good for host in hosts):
        status = "failed"
    elif rc != 0 or not hosts:
        status, error = "error", _error(log, rc, output)
    else:
        status = "successful"
    return RunResult(number, check, status, started, round(duration_s, 3), hosts, _roles_wall(results), error)


def _host(name: str, results: list[Event], stats: dict[str, dict[str, int]]) -> HostResult:
    host = HostResult(name, tasks=_joined([_task(event) for event in results]))
    counts = {"ok": "ok", "changed": "changed", "failed": "failures", "unreachable": "dark"}
    for ours, theirs in {**counts, **{key: key for key in ("skipped", "rescued", "ignored")}}.items():
        setattr(host, ours, int(stats.get(theirs, {}).get(name, 0)))
    if not stats:
        # Stopped before the recap: count what is known.
        _count(host)
    reported: list[Fault] = []
    handed: dict[str, list[dict[str, Any]]] = {}
    for task, event in zip(host.tasks, results, strict=True):
        host.duration_s += task.duration_s
        role = task.role or NO_ROLE
        host.roles_s[role] = round(host.roles_s.get(role, 0.0) + task.duration_s, 3)
        if task.status == "changed":
            host.changed_tasks.append(task)
        if task.status in ("failed", "unreachable"):
            host.failed_task = task
            reported.extend(task.faults)
        else:
            host.warnings.extend(task.faults)
        host.endpoints.extend(_endpoints(event["data"].get("res", {})))
        # The last word of each role counts: one that runs twice hands over twice.
        handed.update(event["data"].get("res", {}).get("hand_over", {}))
    host.hand_over = [endpoint for endpoints in handed.values() for endpoint in endpoints]
    if host.hand_over:
        # Others were only settled: those of an engine that stands by, for instance.
        host.endpoints = [str(endpoint["base_url"]) for endpoint in host.hand_over if endpoint.get("base_url")]
    host.duration_s = round(host.duration_s, 3)
    if host.good:
        # A failure that the play rescued ended nothing; what it reported still deserves to be read.
        host.failed_task = None
        host.warnings.extend(reported)
    else:
        host.faults = list(dict.fromkeys(reported))
    host.warnings = [fault for fault in dict.fromkeys(host.warnings) if fault not in host.faults]
    host.endpoints = list(dict.fromkeys(host.endpoints))
    return host


def _joined(tasks: list[Task]) -> list[Task]:
    """The tasks, with faults that another task failed for.

    A role that asks several modules lets them report, and fails once, in a task of its own, with the faults' text. The
    records then belong to that task.
    """
    reported: list[Fault] = []
    joined = []
    for task in tasks:
        if task.status == "failed" and not task.faults:
            message = task.message or ""
            task = replace(task, faults=[fault for fault in reported if fault.line in message])
        reported.extend(fault for fault in task.faults if fault not in reported)
        joined.append(task)
    return joined


def _count(host: HostResult) -> None:
    for task in host.tasks:
        host.ok += task.status in ("ok", "changed", "ignored")
        host.changed += task.status == "changed"
        host.failed += task.status == "failed"
        host.unreachable += task.status == "unreachable"
        host.skipped += task.status == "skipped"
        host.ignored += task.status == "ignored"


def _task(event: Event) -> Task:
    data = event["data"]
    res = data.get("res", {})
    status = _status(event["event"], data, res)
    bad = status in ("failed", "ignored", "unreachable")
    return Task(
        play=str(data.get("play", "")),
        name=str(data.get("task", "")),
        role=data.get("role"),
        path=str(data.get("task_path", "")),
        status=status,
        duration_s=round(float(data.get("duration") or 0.0), 3),
        message=_message(res) if bad else None,
        faults=_faults(res),
    )


def _status(event: str, data: dict[str, Any], res: dict[str, Any]) -> str:
    if event == "runner_on_failed":
        return "ignored" if data.get("ignore_errors") else "failed"
    if event == "runner_on_unreachable":
        return "unreachable"
    if event == "runner_on_skipped":
        return "skipped"
    return "changed" if res.get("changed") else "ok"


def _message(res: dict[str, Any]) -> str:
    """What the task said; of a loop what its failed items said."""
    items = [_message(item) for item in res.get("results", []) if item.get("failed")]
    if items:
        return "\n".join(items)
    if res.get("censored"):
        return str(res["censored"])
    text = str(res.get("msg") or "").strip()
    return text or (f"exit status {res['rc']}" if "rc" in res else "no message")


def _faults(res: dict[str, Any]) -> list[Fault]:
    records = [record for part in (res, *res.get("results", [])) for record in part.get("faults") or []]
    return list(dict.fromkeys(Fault.from_result(record) for record in records if isinstance(record, dict)))


def _endpoints(res: dict[str, Any]) -> list[str]:
    return [str(part["base_url"]) for part in (res, *res.get("results", [])) if part.get("base_url")]


def _roles_wall(results: list[Event]) -> dict[str, float]:
    """Wall time by role: of the hosts that run a task side by side the slowest counts."""
    slowest: dict[tuple[str, str], float] = {}
    for event in results:
        data = event["data"]
        key = (data.get("role") or NO_ROLE, data.get("task_uuid", ""))
        slowest[key] = max(slowest.get(key, 0.0), float(data.get("duration") or 0.0))
    roles: dict[str, float] = {}
    for (role, _uuid), seconds in slowest.items():
        roles[role] = roles.get(role, 0.0) + seconds
    return {role: round(seconds, 3) for role, seconds in roles.items()}


def _error(log: EventLog, rc: int | None, output: list[str]) -> str:
    """Why nothing was done, in Ansible's words where it has any."""
    lines = [line.strip() for line in output if line.strip()]
    for index, line in enumerate(lines):
        if "ERROR" in line:
            return "\n".join(lines[index : index + 12])
    if rc == 0:
        plays = ", ".join(log.select(_PLAYS) or []) or "none"
        return f"no host was run (plays: {plays}); see whether the inventory, --limit and --tags name any"
    return f"ansible-playbook ended with exit status {rc} before any task ran"
