# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""One simulated run, judged, as the module returns it."""

from __future__ import annotations

from typing import Any

from ..faults import Fault
from ..machine import Machine
from . import policy as policies
from . import status, transaction
from .catalogue import CATALOGUE
from .policy import Policy
from .transaction import Change, Request, Transaction


def nothing() -> dict[str, Any]:
    """The results where there is no transaction."""
    return _results(Transaction(), [], available=True)


def run(system: Machine, request: Request, policy: Policy) -> tuple[dict[str, Any], list[Fault]]:
    """The results and all faults."""
    if request.action == "unattended_upgrade":
        return _unattended(system, policy)
    before = status.installed(system) or []
    planned, faults = transaction.simulate(system, request, {package.name for package in before if package.held})
    if faults:
        missing = any(fault.code == "apt_missing" for fault in faults)
        return _results(planned, [], available=not missing), faults
    policies.with_branches(planned)
    violations = policies.judge(planned, policy, before, request.packages)
    return _results(planned, violations, available=True), violations


def _unattended(system: Machine, policy: Policy) -> tuple[dict[str, Any], list[Fault]]:
    argv = ["unattended-upgrade", "--dry-run", "--verbose"]
    answer = system.run(argv)
    if answer.missing:
        return _results(Transaction(), [], available=False), []
    text = answer.stdout + "\n" + answer.stderr
    for sign in ("Lock file is already taken", "Cache lock can not be acquired"):
        if sign in text:
            fault = CATALOGUE.fault("apt_failed", argv[0], sign, "wait for the other apt to end, then run this again")
            return nothing(), [fault]
    if not answer.ok:
        fault = CATALOGUE.fault("apt_failed", argv[0], f"{argv[0]}: {answer.why}", "run it by hand: " + " ".join(argv))
        return nothing(), [fault]
    names = policies.unattended_names(text)
    violations = policies.moved(names, policy)
    results = _results(Transaction(), violations, available=True)
    blank = {key: None for key in Change("", None, "").as_dict()}
    results["install"] = [{**blank, "name": name} for name in names]
    return results, violations


def _results(planned: Transaction, violations: list[Fault], available: bool) -> dict[str, Any]:
    return {
        "install": [change.as_dict() for change in planned.install],
        "remove": [change.as_dict() for change in planned.remove],
        "kept_back": planned.kept_back,
        "deferred": planned.deferred,
        "downgrades": planned.downgrades,
        "branches": policies.branches(planned.install),
        "available": available,
        "violations": [fault.as_dict() for fault in violations],
    }
