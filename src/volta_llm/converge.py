# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Converge: bring the machines of an inventory to their state, and judge what came of it."""

from __future__ import annotations

from collections.abc import Callable

from volta_llm.model import ConvergeResult, RunResult, UsageError
from volta_llm.networks import client_url, notes_on_endpoints, refuse_bad_clients
from volta_llm.runner import Interrupt, Request, read_inventory, run_playbook


def converge(
    request: Request,
    *,
    twice: bool = False,
    show: Callable[[str], None] | None = None,
    after_run: Callable[[RunResult], None] | None = None,
) -> ConvergeResult:
    """Run the playbook, with ``twice`` a second time to prove that nothing is left to change.

    ``show`` gets Ansible's output line by line, ``after_run`` each run's result as soon as it is there. Raises
    UsageError before anything is changed when the request cannot be run. The second run is left out when the first
    did not succeed.
    """
    if twice and request.check:
        raise UsageError("--twice proves a real run and cannot be joined with --check; give one of the two")
    variables = read_inventory(request)
    refuse_bad_clients(variables)
    result = ConvergeResult(str(request.project), request.playbook, list(request.inventories))
    interrupt = Interrupt()
    with interrupt.installed():
        for number in (1, 2) if twice else (1,):
            run, _log = run_playbook(request, number, interrupt, show)
            result.runs.append(run)
            if after_run is not None:
                after_run(run)
            if run.status != "successful":
                break
            if number == 2:
                result.idempotent = run.changed == 0
    result.signal = interrupt.signal
    for run in result.runs:
        for host in run.hosts:
            known = variables.get(host.name, {})
            host.endpoints = [client_url(host.name, known, url) for url in host.endpoints]
    for host in result.runs[-1].hosts:
        result.notes.extend(notes_on_endpoints(host.name, variables.get(host.name, {}), host.endpoints))
    return result
