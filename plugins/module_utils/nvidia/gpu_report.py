# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The GPUs of one machine, gathered and judged: what the module gpu_inventory returns."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..faults import Fault, is_fatal
from . import inventory
from .gpu_faults import GPU
from .inventory import FIELDS, Gpu, Listing, PciDevice
from .products import compute_capability_of, device_id, product_of
from .smi import Answer, NvidiaSmi, remedy, unparsable
from .values import BROKEN_REASONS, bus_id

#: Programs of this project; they may be on the cards when a verified machine is verified again.
OWN_PROCESSES = ("llama-server", "ollama")


@dataclass(frozen=True)
class GpuRequest:
    """What is required; null or empty: not judged. Memory in MiB, temperatures in degrees C, waiting in seconds."""

    expected_count: int | None = None
    expected_product: str | None = None
    min_memory_mib: int | None = None
    driver_branch: str | None = None
    persistence: bool | None = None
    persistence_wait: float = 0.0
    max_uncorrected_ecc: int | None = None
    max_temperature: float | None = None
    no_other_processes: bool = False
    allowed_processes: Sequence[str] = OWN_PROCESSES
    processes: bool = False


@dataclass
class GpuReport:
    """Return values of gpu_inventory by name (see the module's RETURN)."""

    state: str = "unparsable"
    gpu_count: int | None = None
    gpus: list[dict[str, Any]] = field(default_factory=list)
    pci_devices: list[dict[str, Any]] = field(default_factory=list)
    driver: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def report(
    smi: NvidiaSmi, request: GpuRequest, sleep: Callable[[float], None] = time.sleep
) -> tuple[GpuReport, list[Fault]]:
    """Read the three sources, put them side by side, judge them."""
    machine = smi.machine
    pci = inventory.pci_devices(machine)
    pci_known = bool(machine.listdir("/sys/bus/pci/devices"))
    loaded = inventory.loaded_version(machine)
    answer, listing = _query(smi, request)
    if answer.lost and not listing.gpus:
        answer, listing = _query_living(smi, request, answer, pci)
    result = GpuReport(
        pci_devices=[device.as_dict() for device in pci],
        driver={
            "loaded_version": loaded,
            "smi_version": listing.driver_version,
            "gpus": inventory.driver_gpus(machine),
        },
    )
    if not listing.gpus:
        result.state, faults = _no_table(answer, listing, pci, pci_known, loaded)
        result.gpu_count = 0 if result.state in {"no_devices", "no_pci_device"} else None
        return result, faults

    gpus = listing.gpus
    _complete(gpus, pci, pci_known, answer.lost)
    faults = [*listing.faults, *answer.faults]
    usable = [gpu for gpu in gpus if gpu.usable and gpu.values.get("bus_id") not in answer.lost]
    result.gpu_count = len(usable)
    faults.extend(_judge_count(request, usable, gpus, pci, answer.lost))
    for gpu in gpus:
        faults.extend(_judge_health(gpu, answer.lost, smi))
    for gpu in usable:
        faults.extend(_judge_card(request, gpu))
    faults.extend(_judge_driver(request, loaded or listing.driver_version))
    faults.extend(_judge_persistence(smi, request, usable, sleep))
    result.gpus = [gpu.as_dict() for gpu in gpus]
    result.state = "degraded" if any(is_fatal(fault) for fault in faults) else "ok"
    return result, faults


# --- asking -----------------------------------------------------------------------------------------------------------


def _query(smi: NvidiaSmi, request: GpuRequest, only: Sequence[str] = ()) -> tuple[Answer, Listing]:
    """One process: a csv query, or the whole description in XML where processes are wanted. A capture may hold only
    one of them. ``only`` limits it to some cards."""
    with_processes = request.processes or request.no_other_processes
    asks = [_query_xml, _query_csv] if with_processes else [_query_csv, _query_xml]
    answer, listing = asks[0](smi, only)
    if answer.completed.missing and smi.machine.is_capture:
        return asks[1](smi, only)
    return answer, listing


def _query_living(
    smi: NvidiaSmi, request: GpuRequest, answer: Answer, pci: Sequence[PciDevice]
) -> tuple[Answer, Listing]:
    """The cards beside a lost one, by name: branch 535 prints nothing but the lost card's line when asked for all.

    One more process for each lost card.
    """
    known = inventory.bus_ids(smi.machine, pci)
    merged = answer
    listing = Listing()
    while True:
        living = [card for card in known if card not in merged.lost]
        if not living or len(living) == len(known):
            return merged, listing
        known = living
        part, listing = _query(smi, request, ("-i", ",".join(living)))
        if part.state is not None:
            # Not in the capture, timed out, or "No devices were found": the lost card remains what is known.
            return merged, Listing()
        merged = merged.joined(part)
        if listing.gpus or not part.lost:
            return merged, listing


def _query_xml(smi: NvidiaSmi, only: Sequence[str] = ()) -> tuple[Answer, Listing]:
    answer = smi.ask("-q", "-x", *only)
    return answer, inventory.parse_xml(answer.text)


def _query_csv(smi: NvidiaSmi, only: Sequence[str] = ()) -> tuple[Answer, Listing]:
    """The fields by their newest names; where the driver refuses one, those that it says it knows.

    A driver of branch 535 or newer takes the first form. An older one costs two processes more: its list of fields,
    and the query again.
    """
    names = [item.query for item in FIELDS]
    answer, listing = _ask_csv(smi, names, only)
    if not listing.refused:
        return answer, listing
    known = set()
    for line in smi.ask("--help-query-gpu").text.splitlines():
        if line.lstrip().startswith('"'):
            known.update(re.findall(r'"([\w.]+)"', line))
    if known:
        chosen = (next((name for name in (item.query, *item.older) if name in known), None) for item in FIELDS)
        answer, listing = _ask_csv(smi, [name for name in chosen if name], only)
    # A driver that refuses a field and does not list the others names one field a time.
    for _ in range(len(FIELDS)):
        if not listing.refused:
            break
        names = [name for name in _fields_of(answer) if name not in listing.refused]
        if not names or names == _fields_of(answer):
            break
        answer, listing = _ask_csv(smi, names, only)
    return answer, listing


def _ask_csv(smi: NvidiaSmi, names: Sequence[str], only: Sequence[str]) -> tuple[Answer, Listing]:
    answer = smi.ask(f"--query-gpu={','.join(names)}", "--format=csv", *only)
    return answer, inventory.parse_csv(answer.text, _fields_of(answer))


def _fields_of(answer: Answer) -> list[str]:
    """The fields in query order; a recorded answer brings those that were asked when it was recorded."""
    for word in answer.completed.argv:
        if word.startswith("--query-gpu="):
            return [name.strip() for name in word.partition("=")[2].split(",")]
    return []


# --- judging ----------------------------------------------------------------------------------------------------------


def _no_table(
    answer: Answer, listing: Listing, pci: Sequence[PciDevice], pci_known: bool, loaded: str | None
) -> tuple[str, list[Fault]]:
    """State and faults where nvidia-smi lists no GPU at all."""
    state = answer.state
    cards = f"{len(pci)} NVIDIA GPU{'s are' if len(pci) != 1 else ' is'} on the PCI bus"
    if others := sorted({device.driver for device in pci if device.driver not in {None, "nvidia"}}):
        cards += f", bound to {', '.join(str(name) for name in others)}"
    if state in {"no_driver", "no_devices"} and pci_known and not pci:
        return "no_pci_device", [
            GPU.fault(
                "no_pci_device",
                "PCI bus",
                "no NVIDIA display or 3D controller (class 0300 or 0302 of vendor 10de) on the PCI bus",
                remedy("no_pci_device"),
            )
        ]
    if state in {"no_driver", "no_devices"} and pci_known:
        first = answer.faults[0]
        return state, [GPU.fault(first.code, first.subject, f"{first.message.rstrip('.')}; {cards}", first.remedy)]
    if state == "driver_mismatch" and loaded:
        first = answer.faults[0]
        message = f"the loaded kernel module is {loaded}, the libraries are of another version; {first.message}"
        return state, [GPU.fault(first.code, first.subject, message, first.remedy)]
    if state is not None:
        return state, list(answer.faults)
    if answer.lost or any(fault.code == "gpu_lost" for fault in answer.faults):
        return "gpu_lost", [*answer.faults, *listing.faults]
    if listing.faults:
        return "unparsable", [*answer.faults, *listing.faults]
    return "unparsable", [*answer.faults, unparsable(answer)]


def _complete(gpus: Sequence[Gpu], pci: Sequence[PciDevice], pci_known: bool, lost: Sequence[str]) -> None:
    """Fill in what another source knows, and say for each card whether the PCI bus shows it."""
    dead = [gpu for gpu in gpus if not gpu.readable and gpu.values.get("bus_id") is None]
    listed = {gpu.values.get("bus_id") for gpu in gpus}
    unlisted = [card for card in lost if card not in listed]
    if len(dead) == len(unlisted):
        # The line of text beside a row without values names the card of that row.
        for gpu, card in zip(dead, unlisted, strict=True):
            gpu.values["bus_id"] = card
            gpu.unknown.pop("bus_id", None)
    on_bus = {device.bus_id: device for device in pci}
    for gpu in gpus:
        place: str | None = gpu.values.get("bus_id")
        device = on_bus.get(place) if place else None
        gpu.on_pci = device is not None if place and pci_known else None
        if gpu.values.get("pci_id") is None and device is not None:
            _fill(gpu, "pci_id", device.pci_id)
        if gpu.values.get("product") is None:
            _fill(gpu, "product", product_of(gpu.values.get("pci_id")))
        if gpu.values.get("compute_capability") is None:
            _fill(gpu, "compute_capability", compute_capability_of(gpu.values.get("pci_id")))
        for item in FIELDS:
            if gpu.values.get(item.name) is None:
                gpu.unknown.setdefault(item.name, "not reported by this driver")


def _fill(gpu: Gpu, name: str, value: Any) -> None:
    if value is not None:
        gpu.values[name] = value
        gpu.unknown.pop(name, None)


def _judge_count(
    request: GpuRequest, usable: Sequence[Gpu], listed: Sequence[Gpu], pci: Sequence[PciDevice], lost: Sequence[str]
) -> list[Fault]:
    """Cards that are missing: against the number expected, and against the PCI bus in any case."""
    answering = {gpu.values.get("bus_id") for gpu in usable}
    known = None not in answering
    # Cards that another driver holds (vfio-pci for a virtual machine) are not missing.
    silent = [d for d in pci if d.bus_id not in answering and d.driver in {None, "nvidia"}] if known else []
    named = ", ".join(f"{device.bus_id} ({device.product or device.pci_id})" for device in silent)
    expected = request.expected_count
    advice = (
        "look for Xid errors (`journalctl -k -b | grep -iE 'xid|nvrm'`), reboot (a card that fell off the bus: switch "
        "the machine off and on); if it stays away, reseat the card, check its power and try another slot"
    )
    if expected is not None and len(usable) < expected:
        if silent:
            where = f"on the PCI bus but not answering: {named}"
        elif pci:
            where = f"the PCI bus shows {len(pci)}"
        else:
            where = "the PCI bus could not be compared"
        # A card that is on the bus is a card of the machine.
        fewer = "" if silent else f"; if the machine has {len(usable)} GPUs, set expected_count to that"
        return [
            GPU.fault(
                "gpu_missing",
                "nvidia-smi",
                f"{len(usable)} of {expected} expected GPUs answer; {where}",
                f"{advice}{fewer}",
            )
        ]
    faults = []
    if expected is not None and len(usable) > expected:
        faults.append(
            GPU.fault(
                "gpu_surplus",
                "nvidia-smi",
                f"{len(usable)} GPUs answer, {expected} expected",
                f"set expected_count to {len(usable)}, and let the server use only the GPUs that are meant",
            )
        )
    named_elsewhere = {*lost, *(gpu.values.get("bus_id") for gpu in listed)}
    faults.extend(
        GPU.fault(
            "gpu_missing",
            device.bus_id,
            f"{device.product or device.pci_id} is on the PCI bus but nvidia-smi does not list it",
            f"{advice}; inside a container, give it all devices",
        )
        for device in silent
        if device.bus_id not in named_elsewhere
    )
    return faults


def _judge_health(gpu: Gpu, lost: Sequence[str], smi: NvidiaSmi) -> list[Fault]:
    """What is wrong with a card whatever was required."""
    card = gpu.values.get("bus_id")
    broken = {name: reason for name, reason in gpu.unknown.items() if reason in BROKEN_REASONS}
    reasons = set(broken.values())
    presence = {True: " (it is still on the PCI bus)", False: " (it is no longer on the PCI bus)", None: ""}[gpu.on_pci]
    if card in lost:
        return []  # said with the line of text that names it
    if "the GPU requires a reset" in reasons:
        message = f"the GPU requires a reset before it accepts work{presence}"
        return [GPU.fault("gpu_requires_reset", gpu.label, message, remedy("gpu_requires_reset"))]
    if "the GPU is lost" in reasons:
        return [GPU.fault("gpu_lost", gpu.label, f"the GPU is lost{presence}", remedy("gpu_lost"))]
    if not gpu.readable:
        return [
            GPU.fault(
                "gpu_unreadable",
                gpu.label,
                f"nvidia-smi lists this GPU but cannot read it: {len(broken)} values are {', '.join(sorted(reasons))}"
                + presence,
                remedy("gpu_lost"),
            )
        ]
    faults = []
    if broken:
        fields = ", ".join(f"{name} ({reason})" for name, reason in sorted(broken.items()))
        faults.append(
            GPU.fault(
                "gpu_field_unreadable",
                gpu.label,
                f"not readable now: {fields}",
                "read `nvidia-smi -q` for this GPU; values that stay away announce a failing card: watch it, reboot",
            )
        )
    if gpu.values.get("retired_pages.pending"):
        faults.append(
            GPU.fault(
                "page_retirement_pending",
                gpu.label,
                "memory pages are to be retired and are still in use",
                "reboot (or reload the driver), then look at the number of retired pages: a card is replaced at 60",
            )
        )
    harmful = [name for name in gpu.values.get("clock_reasons") or [] if name in inventory.HARMFUL_CLOCK_REASONS]
    if harmful:
        faults.append(
            GPU.fault(
                "gpu_slowed_down",
                gpu.label,
                f"clocks are held down now: {', '.join(harmful)}",
                "check air flow, fans and room temperature for a thermal slow-down, power supplies for a power brake",
            )
        )
    width, width_max = gpu.values.get("pcie.width"), gpu.values.get("pcie.width_max")
    if width and width_max and width < width_max:
        faults.append(
            GPU.fault(
                "pcie_link_degraded",
                gpu.label,
                f"PCIe runs on {width} of {width_max} lanes",
                "loading a model takes longer; reseat the card, check the slot's setting and the riser",
            )
        )
    return faults


def _judge_card(request: GpuRequest, gpu: Gpu) -> list[Fault]:
    """Requirements that each card must meet."""
    faults: list[Fault] = []
    values = gpu.values
    if request.expected_product and not matches_product(request.expected_product, values):
        have = f"{values.get('product') or 'a product without a name'} ({values.get('pci_id') or 'PCI id not known'})"
        faults.append(
            GPU.fault(
                "gpu_product_mismatch",
                gpu.label,
                f"{have}, expected {request.expected_product}",
                "use machines with the expected cards, or set expected_product to this name or PCI id",
            )
        )
    total = values.get("memory_total_mib")
    if request.min_memory_mib is not None:
        if total is None:
            faults.append(_not_known(gpu, "memory_total_mib", "memory", f"at least {request.min_memory_mib} MiB"))
        elif total < request.min_memory_mib:
            faults.append(
                GPU.fault(
                    "gpu_memory_too_small",
                    gpu.label,
                    f"{total} MiB of memory, at least {request.min_memory_mib} MiB required",
                    "a V100-32GB shows 32768 MiB (32510 with some drivers): set min_memory_mib below what is shown",
                )
            )
    if request.max_uncorrected_ecc is not None:
        errors = values.get("ecc.volatile.double")
        limit = f"at most {request.max_uncorrected_ecc}"
        if errors is None and values.get("ecc.mode") is False:
            gpu.unknown["ecc.volatile.double"] = "ECC is switched off, so errors are not counted"
        if errors is None:
            faults.append(_not_known(gpu, "ecc.volatile.double", "uncorrected memory errors", limit))
        elif errors > request.max_uncorrected_ecc:
            faults.append(
                GPU.fault(
                    "ecc_uncorrected",
                    gpu.label,
                    f"{errors} uncorrected memory errors since the driver was loaded, {limit} allowed",
                    "reboot, run a memory test (dcgmi diag -r 3); if they return, replace the card",
                )
            )
    if request.max_temperature is not None:
        faults.extend(_judge_temperature(request.max_temperature, gpu))
    if request.no_other_processes:
        faults.extend(_judge_processes(request.allowed_processes, gpu))
    return faults


def _judge_temperature(limit: float, gpu: Gpu) -> Iterable[Fault]:
    core = gpu.values.get("temperature_c")
    if core is None:
        yield _not_known(gpu, "temperature_c", "temperature", f"at most {limit:g} degrees C")
    for part, value in (("core", core), ("memory", gpu.values.get("memory_temperature_c"))):
        if value is not None and value > limit:
            yield GPU.fault(
                "gpu_too_hot",
                gpu.label,
                f"the {part} is at {value:g} degrees C, at most {limit:g} allowed",
                "check fans, filters and air flow; stop the load before the card slows down (V100: core 87, memory 85)",
            )


def _judge_processes(allowed: Sequence[str], gpu: Gpu) -> Iterable[Fault]:
    if gpu.processes is None:
        yield _not_known(gpu, "processes", "processes on the GPU", "none but the allowed ones")
        return
    for process in gpu.processes:
        # Graphics clients (a display server) are shown as G and hold a few MiB.
        if process["type"] not in {None, "C", "C+G", "M+C"}:
            continue
        name = str(process["name"] or "unnamed").split(" ")[0].rsplit("/", 1)[-1]
        if name in allowed:
            continue
        memory = f"{process['memory_mib']} MiB" if process["memory_mib"] is not None else "an unknown amount of memory"
        yield GPU.fault(
            "gpu_in_use",
            gpu.label,
            f"{name} (pid {process['pid']}) holds {memory}",
            "stop it, or name it in allowed_processes",
        )


def _not_known(gpu: Gpu, name: str, what: str, limit: str) -> Fault:
    reason = gpu.unknown.get(name, "not reported by this driver")
    return GPU.fault(
        "gpu_value_unknown",
        gpu.label,
        f"{what}: not known ({reason}), {limit} required",
        "see whether `nvidia-smi -q` shows it; leave this requirement out where the card does not report it",
    )


def matches_product(expected: str, values: dict[str, Any]) -> bool:
    """Whether a card is the expected product: by PCI id, or by words of its name that stand together.

    ``V100-SXM2`` matches ``Tesla V100-SXM2-32GB``; ``A10`` does not match ``NVIDIA A100``.
    """
    wanted_id = device_id(expected)
    if wanted_id is not None and re.search(r"\d", expected):
        have = device_id(values.get("pci_id"))
        if have is not None:
            return have == wanted_id
    wanted = _words(expected)
    have_words = _words(values.get("product") or "")
    return bool(wanted) and any(
        have_words[start : start + len(wanted)] == wanted for start in range(len(have_words) - len(wanted) + 1)
    )


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\s_-]+", name.lower()) if word and word not in {"nvidia", "tesla"}]


def _judge_driver(request: GpuRequest, version: str | None) -> list[Fault]:
    if not request.driver_branch or version is None:
        return []
    # 535 must not match 5350, and 535.261 asks for more than the branch: compare field by field, as numbers.
    wanted = [int(part) for part in re.findall(r"\d+", request.driver_branch)]
    have = [int(part) for part in re.findall(r"\d+", version)]
    if have[: len(wanted)] == wanted:
        return []
    return [
        GPU.fault(
            "driver_branch_mismatch",
            "driver",
            f"driver {version} is loaded, branch {request.driver_branch} expected",
            "install the expected branch and reboot, or set driver_branch to what is meant to run",
        )
    ]


def _judge_persistence(
    smi: NvidiaSmi, request: GpuRequest, gpus: Sequence[Gpu], sleep: Callable[[float], None]
) -> list[Fault]:
    """Persistence as required, after a window: just after boot the daemon is still at work (leptonai/gpud#431)."""
    if request.persistence is None:
        return []
    wanted = request.persistence
    off = [gpu for gpu in gpus if gpu.values.get("persistence") is not None and gpu.values["persistence"] != wanted]
    waited = 0.0
    while off and waited < request.persistence_wait and not smi.machine.is_capture:
        pause = min(5.0, request.persistence_wait - waited)
        sleep(pause)
        waited += pause
        answer = smi.ask("--query-gpu=index,pci.bus_id,persistence_mode", "--format=csv")
        now = {gpu.values.get("bus_id"): gpu.values.get("persistence") for gpu in inventory.parse_csv(answer.text).gpus}
        for gpu in off:
            state = now.get(bus_id(gpu.values.get("bus_id")))
            if state is not None:
                gpu.values["persistence"] = state
        off = [gpu for gpu in off if gpu.values["persistence"] != wanted]
    after = f" after {waited:g} s" if waited else ""
    faults = [
        GPU.fault(
            "persistence_off",
            gpu.label,
            f"persistence mode is still {'off' if wanted else 'on'}{after}",
            "see `systemctl status nvidia-persistenced`; `nvidia-smi -pm 1` sets it until the next boot"
            if wanted
            else "stop nvidia-persistenced and run `nvidia-smi -pm 0`",
        )
        for gpu in off
    ]
    faults.extend(
        _not_known(gpu, "persistence", "persistence mode", "on" if wanted else "off")
        for gpu in gpus
        if gpu.values.get("persistence") is None
    )
    return faults
