# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How a module ends: once, with everything it found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn, Protocol

from .faults import Fault, as_text, by_severity, in_variables, is_fatal

#: The variables behind the words of the compatibility table, in which it says what to write instead.
COMBINED = {
    "driver": "nvidia_driver_branch",
    "cuda": "cuda_toolkit_version",
    "llama_cpp": "llama_cpp_version",
    "ollama": "ollama_version",
}


class ModuleLike(Protocol):
    """What is used of AnsibleModule; unit tests pass their own."""

    params: Mapping[str, Any]

    def exit_json(self, **kwargs: Any) -> NoReturn: ...
    def fail_json(self, msg: str, **kwargs: Any) -> NoReturn: ...


def as_shown(module: ModuleLike, faults: Iterable[Fault], variables: Collection[str] = ()) -> list[Fault]:
    """Most serious first, in the words of the role that called the module (its option C(variable_prefix)).

    ``variables`` are options that have the names of variables as it is.
    """
    own = ("variable_prefix", "variable_names")
    options = [name for name in module.params if name not in own and name not in variables]
    prefix = module.params.get("variable_prefix") or ""
    return in_variables(by_severity(faults), prefix, options, names_of(module))


def names_of(module: ModuleLike) -> dict[str, str]:
    """Variables that are not called by the prefix; none for who called the module without a role."""
    if not module.params.get("variable_prefix"):
        return {}
    return {**COMBINED, **(module.params.get("variable_names") or {})}


def finish(module: ModuleLike, faults: Iterable[Fault], /, variables: Collection[str] = (), **results: Any) -> NoReturn:
    """Exit with ``results`` and ``faults`` (list of dicts); fail when a fault is more than a warning.

    ``variables``: see as_shown.
    """
    ordered = as_shown(module, faults, variables)
    results["faults"] = [fault.as_dict() for fault in ordered]
    fatal = [fault for fault in ordered if is_fatal(fault)]
    if fatal:
        module.fail_json(msg=as_text(fatal), **results)
    module.exit_json(**results)
