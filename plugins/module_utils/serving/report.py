# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a verification found, as one summary for somebody who was woken up: is it well, what is wrong, what first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# What is not imported is not known here, and every fault of it would count as an error: these are all that can come up.
from ..faults import Fault, by_severity, is_fatal
from ..nvidia import driver as _driver_faults  # noqa: F401
from ..nvidia import gpu_faults as _gpu_faults  # noqa: F401
from ..ollama import catalogue as _ollama_faults  # noqa: F401
from .catalogue import CATALOGUE

#: Of a message, such as a journal's last lines, so many are shown.
LINES = 8
#: What follows from another fault, where there is one: mending that comes first.
SYMPTOMS = frozenset({"completion_failed", "endpoint_refused"})
#: What keeps a service from running, and how that is seen.
CAUSES = frozenset({"engine_missing", "foreign_listener", "unit_overridden"})
STOPPED = frozenset({"service_not_running", *SYMPTOMS})
_KEYS = ("code", "subject", "message", "remedy")


def faults_of(results: Iterable[Any]) -> list[Fault]:
    """The faults of task results (those of loop items included), most serious first, each once.

    A result that reports no list of faults comes from a check that broke, which is a fault itself: not known is not
    well, and "failed" says nothing where a play goes on regardless.
    """
    # Two checks may see the same, in other words: the first stands, in its place, since causes are looked at first.
    # What one check says of a subject in several messages are several things.
    told: dict[tuple[str, str], list[Fault]] = {}
    for said in _checked(results):
        fresh: dict[tuple[str, str], list[Fault]] = {}
        for fault in said:
            same = fresh.setdefault((fault.code, fault.subject), [])
            if fault not in same:
                same.append(fault)
        for key, same in fresh.items():
            told.setdefault(key, same)
    return by_severity([fault for same in told.values() for fault in same])


def _checked(results: Iterable[Any]) -> Iterator[list[Fault]]:
    """The faults of each check."""
    for result in results:
        if not isinstance(result, Mapping):
            result = {}
        if result.get("skipped"):
            continue
        items = result.get("results")
        if isinstance(items, list):
            yield from _checked(items)
            continue
        records = result.get("faults")
        if isinstance(records, list):
            yield [Fault(*(str(record.get(key) or "") for key in _KEYS)) for record in records]
        else:
            said = str(result.get("msg") or "it says nothing").strip()
            remedy = "Run it again with -v; the check itself broke."
            yield [CATALOGUE.fault("check_failed", "verification", said, remedy)]


def report(
    host: str,
    driver: Mapping[str, Any],
    gpus: Mapping[str, Any],
    served: Mapping[str, Any],
    probed: Any,
    ollama: Any = None,
) -> Any:
    """``{"ok": bool, "faults": [...], "text": lines}`` of one machine.

    ``driver``: result of driver_state. ``gpus``: the fact gpu_verify_result, empty where it is not there. ``served``:
    result of served_units. ``probed``: result of llm_probe in a loop over its servers. ``ollama``: result of
    ollama_probe in a loop over its Ollama.
    """
    faults = faults_of([driver, gpus, served, probed, *([] if ollama is None else [ollama])])
    fatal = [fault for fault in faults if is_fatal(fault)]
    asked = [*_items(probed), *_items(ollama)]
    probes = {str(item["item"]["name"]): item for item in asked if isinstance(item.get("item"), Mapping)}
    rows = [("driver", _driver(driver)), ("GPUs", _gpus(gpus))]
    for server in served.get("servers") or []:
        rows += _server(server, probes.get(str(server["name"]), {}), faults)
    beside = (served.get("engines") or {}).get("ollama") or []
    for server in beside:
        rows += _ollama(server, probes.get(str(server["name"]), {}))
    if not served.get("servers") and not beside:
        rows.append(("serving", "nothing"))
    width = max(len(head) for head, _ in rows)
    verdict = "all is well" if not faults else ", ".join(_counted(fatal, len(faults) - len(fatal)))
    lines = [f"{host}: {verdict}", *(f"  {head:<{width}}  {text}" for head, text in rows)]
    for fault in faults:
        said = [line for line in fault.message.splitlines() if line.strip()]
        if len(said) > LINES:
            said = [said[0], "...", *said[1 - LINES :]]
        lines += [f"[{fault.code}] {fault.subject}: {said[0] if said else ''}", *(f"     {line}" for line in said[1:])]
        lines.append(f"  -> {fault.remedy}")
    if fatal:
        lines.append(f"First: {_first(fatal).remedy}")
    return {"ok": not fatal, "faults": [fault.as_dict() for fault in faults], "text": "\n".join(lines)}


def _first(fatal: Sequence[Fault]) -> Fault:
    """What to mend first: the worst, or what it follows from."""
    causes = [fault for fault in fatal if fault.code in CAUSES] if fatal[0].code in STOPPED else []
    return next(iter([*causes, *(fault for fault in fatal if fault.code not in SYMPTOMS)]), fatal[0])


def _counted(fatal: Sequence[Fault], warnings: int) -> list[str]:
    found = [(len(fatal), "fault"), (warnings, "warning")]
    return [f"{count} {word}{'s' if count > 1 else ''}" for count, word in found if count]


def _items(result: Any) -> Sequence[Mapping[str, Any]]:
    items = result.get("results") if isinstance(result, Mapping) else None
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


def _driver(driver: Mapping[str, Any]) -> str:
    loaded = driver.get("loaded") or {}
    version = loaded.get("version") or "none"
    reason = f", {driver['reason']}" if driver.get("reason") and driver.get("verdict") != "ok" else ""
    return f"{version} loaded, verdict {driver.get('verdict') or 'unknown'}{reason}"


def _gpus(gpus: Mapping[str, Any]) -> str:
    cards = gpus.get("gpus") or []
    if not cards:
        return "none that answers" if gpus else "not read"
    products = ", ".join(sorted({str(card.get("product")) for card in cards}))
    hottest = max((card["temperature_c"] for card in cards if _is_number(card.get("temperature_c"))), default=None)
    return f"{len(cards)} x {products}{f', hottest {hottest:.0f} degrees C' if hottest is not None else ''}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _state(server: Mapping[str, Any]) -> str:
    if server.get("stands_by"):
        return "stands by, the other engine has the GPUs"
    restarts = server.get("restarts")
    again = f", restarted {restarts} times by itself within a day" if restarts else ""
    since = f" since {server['since']}" if server.get("since") else ""
    if since and not str(server["state"]).startswith("active"):
        since = f", was ready last{since.replace('since ', 'on ', 1)}"
    return f"{server['state']}{since}{again}"


def _ollama(server: Mapping[str, Any], probe: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(str(server["name"]), _state(server))]
    if server.get("stands_by"):
        return rows
    models = [str(model) for model in server.get("models") or []]
    shown = f"{', '.join(models[:3])}{f' and {len(models) - 3} more' if len(models) > 3 else ''}" or "no model yet"
    rows.append(("", f"{shown}, {server['context_per_request']} tokens a request, {server['parallel']} at once"))
    rate, share = probe.get("tokens_per_second"), probe.get("gpu_share")
    if rate is not None:
        rows.append(("", f"{probe.get('model') or models[0]} answers at {rate} tokens/s"))
    if share is not None:
        what = "it" if rate is not None else str(probe.get("model") or "it")
        rows.append(("", f"{share:.0%} of {what} on the GPUs"))
    return rows


def _server(server: Mapping[str, Any], probe: Mapping[str, Any], faults: Sequence[Fault]) -> list[tuple[str, str]]:
    rows = [(str(server["name"]), _state(server))]
    if server.get("stands_by"):
        return rows
    if probe.get("state"):
        rate = probe.get("tokens_per_second")
        said = f"answers at {rate} tokens/s" if probe.get("answer") and rate is not None else "no answer"
        load = ""
        if probe.get("processing") is not None:
            load = f", requests at work: {probe['processing']}, waiting: {probe.get('waiting') or 0}"
        rows.append(("", f"{probe['state']}: {said}{load}"))
    granted = probe.get("context_per_request")
    context = f"{granted} tokens a request" if granted else "context unknown"
    rows.append(("", f"{probe.get('model') or server['alias']}, {context}, {server['parallel']} at once"))
    memory = probe.get("gpu_memory") or {}
    if memory:
        rows.append(
            ("", "GPU memory: " + ", ".join(f"{mib if mib is not None else '?'} MiB" for mib in memory.values()))
        )
    elif server.get("backend") == "cpu":
        rows.append(("", "on the processor, as its settings say"))
    files = server.get("model_files") or []
    bad = any(fault.code == "model_unverified" for fault in faults)
    rows.append(("", f"{len(files)} model files, {'see below' if bad else 'as they were verified'}"))
    return rows
