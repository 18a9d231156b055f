# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether a release of Ollama, its variables and models go with driver and cards: asked before anything is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..compat import judge
from ..faults import Fault, FaultError
from ..gguf.shards import shard_name
from . import environment as variables
from .catalogue import fault
from .names import parse_name
from .release import check_version


def check_models(models: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """Names that can be names, each once."""
    faults: list[Fault] = []
    seen: set[tuple[str, ...]] = set()
    for number, model in enumerate(models):
        try:
            name = parse_name(str(model.get("name") or ""))
        except FaultError as exc:
            faults.append(Fault(exc.fault.code, f"models[{number}]", exc.fault.message, exc.fault.remedy))
            continue
        if name.key in seen:
            message = f"{name.shown} is there twice"
            faults.append(fault("setting_invalid", f"models[{number}]", message, "Name each model once."))
        seen.add(name.key)
    return faults


def check_compat(
    version: str, driver: str | None, kinds: Iterable[str | None], models: Sequence[Mapping[str, Any]]
) -> tuple[list[Fault], list[str]]:
    """What the compatibility table says of release, driver, each kind of card and each model."""
    if check_version(version) is not None:
        return [], []
    faults: list[Fault] = []
    notes: list[str] = []
    cards = list(dict.fromkeys(kinds)) or [None]
    for model in models or [{}]:
        gguf = model.get("gguf")
        named = shard_name(str(gguf)) if gguf else None
        for kind in cards:
            verdict = judge(
                {
                    "ollama": version,
                    "driver": driver,
                    "gpu": kind,
                    "architecture": model.get("architecture"),
                    "shards": len(named.all) if named else None,
                }
            )
            faults += [Fault(found.code, found.subject, found.message, found.remedy) for found in verdict.faults]
            notes += [f"{note.subject}: {note.message}" for note in verdict.notes]
    return list(dict.fromkeys(faults)), list(dict.fromkeys(notes))


def foresee(
    version: str,
    environment: Mapping[str, Any],
    models: Sequence[Mapping[str, Any]],
    driver: str | None,
    kinds: Iterable[str | None],
) -> tuple[list[Fault], list[str]]:
    """All that can be said with no machine: faults and notes, in the names of module ollama_settings' options."""
    refused = check_version(version)
    faults = [refused] if refused is not None else []
    known = variables.read_version(version) or variables.LAST
    _, variable_faults, notes = variables.check(environment, known, version)
    faults += variable_faults + check_models(models)
    compat_faults, compat_notes = check_compat(version, driver, kinds, models)
    return faults + compat_faults, notes + compat_notes
