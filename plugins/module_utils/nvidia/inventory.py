# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The GPUs of a machine from three sources side by side: the PCI bus (sysfs), the driver (/proc), nvidia-smi.

One process of nvidia-smi gives all values: a csv query, or ``-q -x`` where the processes on the GPUs are wanted as
well. A value that is not known is null, and ``unknown`` says why.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..faults import Fault
from ..machine import Machine
from .gpu_faults import GPU
from .products import compute_capability_of, device_id, product_of
from .smi import remedy
from .values import BROKEN_REASONS, all_bits_set, bus_id, clean, count, mib, number, reading, switch

STATES = (
    "ok",
    "degraded",
    "no_pci_device",
    "no_driver",
    "driver_mismatch",
    "no_devices",
    "gpu_lost",
    "timeout",
    "unparsable",
)

#: Bits of clocks_event_reasons.active (nvml.h, nvmlClocksEventReasons); the names are those of the newer drivers.
CLOCK_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}
#: Slow-downs that mean heat or power supply. A power cap or an idle clock is normal work (llm-rig#97).
HARMFUL_CLOCK_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


def clock_reasons(text: str | None) -> tuple[list[str] | None, str | None]:
    """Names of the active reasons of a bit mask (``0x0000000000000004``); unknown bits keep their number."""
    got = reading(text)
    if got.value is None:
        return None, got.reason
    try:
        mask = int(got.value, 16 if got.value.lower().startswith("0x") else 10)
    except ValueError:
        return None, f"unreadable: {got.value[:40]}"
    if all_bits_set(mask):
        return None, "not available"
    names = [name for bit, name in CLOCK_REASONS.items() if mask & bit]
    rest = mask & ~sum(CLOCK_REASONS)
    return ([*names, f"{rest:#x}"] if rest > 0 else names), None


def _text(text: str | None) -> tuple[str | None, str | None]:
    got = reading(text)
    return got.value, got.reason


def _lanes(text: str | None) -> tuple[int | None, str | None]:
    got = reading(text)
    return (None, got.reason) if got.value is None else count(got.value.rstrip("xX"))


def _bus(text: str | None) -> tuple[str | None, str | None]:
    value = bus_id(text)
    return value, None if value else reading(text).reason or "unreadable"


def _pci(text: str | None) -> tuple[str | None, str | None]:
    got = reading(text)
    value = device_id(got.value)
    return (f"10de:{value}", None) if value else (None, got.reason or "unreadable")


_Reader = Callable[[str | None], tuple[Any, str | None]]


@dataclass(frozen=True)
class Field:
    """One value of a GPU.

    ``name`` is its key in results (a dot leads into a nested dict), ``query`` the csv field as drivers from 535 on
    call it, ``older`` its former names, ``header`` other names that the csv header uses, ``xml`` paths in ``-q -x``,
    first match counts. ``every_card``: a card of any kind has it, so an error there is the card's.
    """

    name: str
    query: str
    read: _Reader
    xml: tuple[str, ...]
    older: tuple[str, ...] = ()
    header: tuple[str, ...] = ()


FIELDS: tuple[Field, ...] = (
    Field("index", "index", count, ()),
    Field("uuid", "uuid", _text, ("uuid",), header=("gpu_uuid",)),
    Field("bus_id", "pci.bus_id", _bus, ("pci/pci_bus_id",), header=("gpu_bus_id", "pci.bus_id")),
    Field("pci_id", "pci.device_id", _pci, ("pci/pci_device_id",)),
    Field("product", "name", _text, ("product_name",), header=("gpu_name",)),
    Field("driver_version", "driver_version", _text, ()),
    Field("compute_capability", "compute_cap", _text, ("compute_capability",)),
    Field("memory_total_mib", "memory.total", mib, ("fb_memory_usage/total",)),
    Field("memory_used_mib", "memory.used", mib, ("fb_memory_usage/used",)),
    Field("memory_free_mib", "memory.free", mib, ("fb_memory_usage/free",)),
    Field("temperature_c", "temperature.gpu", number, ("temperature/gpu_temp",)),
    Field("memory_temperature_c", "temperature.memory", number, ("temperature/memory_temp",)),
    Field(
        "power_w",
        "power.draw",
        number,
        (
            "gpu_power_readings/power_draw",
            "gpu_power_readings/instant_power_draw",
            "gpu_power_readings/average_power_draw",
            "power_readings/power_draw",
        ),
    ),
    Field(
        "power_limit_requested_w",
        "power.limit",
        number,
        ("gpu_power_readings/requested_power_limit", "power_readings/power_limit", "gpu_power_readings/power_limit"),
    ),
    Field(
        "power_limit_w",
        "enforced.power.limit",
        number,
        ("gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"),
    ),
    Field(
        "power_limit_default_w",
        "power.default_limit",
        number,
        ("gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
    ),
    Field(
        "power_limit_max_w",
        "power.max_limit",
        number,
        ("gpu_power_readings/max_power_limit", "power_readings/max_power_limit"),
    ),
    Field("clock_sm_mhz", "clocks.current.sm", number, ("clocks/sm_clock",), header=("clocks.sm",)),
    Field("clock_memory_mhz", "clocks.current.memory", number, ("clocks/mem_clock",), header=("clocks.mem",)),
    Field("clock_sm_max_mhz", "clocks.max.sm", number, ("max_clocks/sm_clock",)),
    Field("clock_memory_max_mhz", "clocks.max.memory", number, ("max_clocks/mem_clock",), header=("clocks.max.mem",)),
    Field(
        "clock_reasons",
        "clocks_event_reasons.active",
        clock_reasons,
        (),
        older=("clocks_throttle_reasons.active",),
    ),
    Field("performance_state", "pstate", _text, ("performance_state",)),
    Field("utilization_percent", "utilization.gpu", number, ("utilization/gpu_util",)),
    Field("persistence", "persistence_mode", switch, ("persistence_mode",)),
    Field("ecc.mode", "ecc.mode.current", switch, ("ecc_mode/current_ecc",)),
    Field("ecc.mode_pending", "ecc.mode.pending", switch, ("ecc_mode/pending_ecc",)),
    Field(
        "ecc.volatile.single",
        "ecc.errors.corrected.volatile.total",
        count,
        ("ecc_errors/volatile/single_bit/total",),
    ),
    Field(
        "ecc.volatile.double",
        "ecc.errors.uncorrected.volatile.total",
        count,
        ("ecc_errors/volatile/double_bit/total",),
    ),
    Field(
        "ecc.aggregate.single",
        "ecc.errors.corrected.aggregate.total",
        count,
        ("ecc_errors/aggregate/single_bit/total",),
    ),
    Field(
        "ecc.aggregate.double",
        "ecc.errors.uncorrected.aggregate.total",
        count,
        ("ecc_errors/aggregate/double_bit/total",),
    ),
    Field(
        "retired_pages.single_bit",
        "retired_pages.single_bit_ecc.count",
        count,
        ("retired_pages/multiple_single_bit_retirement/retired_count",),
        header=("retired_pages.sbe",),
    ),
    Field(
        "retired_pages.double_bit",
        "retired_pages.double_bit.count",
        count,
        ("retired_pages/double_bit_retirement/retired_count",),
        header=("retired_pages.dbe",),
    ),
    Field(
        "retired_pages.pending",
        "retired_pages.pending",
        switch,
        ("retired_pages/pending_blacklist", "retired_pages/pending_retirement"),
    ),
    Field("pcie.generation", "pcie.link.gen.current", count, ("pci/pci_gpu_link_info/pcie_gen/current_link_gen",)),
    Field("pcie.generation_max", "pcie.link.gen.max", count, ("pci/pci_gpu_link_info/pcie_gen/max_link_gen",)),
    Field("pcie.width", "pcie.link.width.current", _lanes, ("pci/pci_gpu_link_info/link_widths/current_link_width",)),
    Field("pcie.width_max", "pcie.link.width.max", _lanes, ("pci/pci_gpu_link_info/link_widths/max_link_width",)),
)
_BY_QUERY = {alias: item for item in FIELDS for alias in (item.query, *item.older, *item.header)}
#: Values of which any working card has one; when none of these can be read, the card is not usable.
_VITAL = ("memory_total_mib", "memory_used_mib", "temperature_c")
#: Sums over the memories of a chip, where drivers print no total (Ampere and newer: SRAM and DRAM apart).
_ECC_PARTS = {
    "single": ("sram_correctable", "dram_correctable"),
    "double": ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable"),
}


@dataclass
class PciDevice:
    """An NVIDIA GPU on the PCI bus. ``driver`` is the kernel driver bound to it, null for none."""

    bus_id: str
    pci_id: str
    product: str | None
    compute_capability: str | None
    driver: str | None
    numa_node: int | None
    pcie_width: int | None
    pcie_width_max: int | None

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Gpu:
    """A GPU as nvidia-smi lists it: ``values`` by the names of FIELDS, ``unknown`` says why a value is null.

    ``order`` is its place in the answer, ``processes`` null where they were not asked for.
    """

    order: int
    values: dict[str, Any]
    unknown: dict[str, str]
    processes: list[dict[str, Any]] | None = None
    on_pci: bool | None = None

    @property
    def label(self) -> str:
        """Name in faults: the bus id, with the index where it is known."""
        index, card = self.values.get("index"), self.values.get("bus_id")
        if card is None:
            return f"GPU{self.order if index is None else index}"
        return card if index is None else f"{card} (GPU{index})"

    @property
    def identity(self) -> tuple[str, Any] | None:
        """What tells this card from others. The bus id first: UUIDs are made alike in captures that are given away."""
        return next(
            ((name, got) for name in ("bus_id", "uuid", "index") if (got := self.values.get(name)) is not None), None
        )

    @property
    def readable(self) -> bool:
        """False when not one of the values that every card has could be read because of an error."""
        return any(self.values.get(name) is not None for name in _VITAL) or not any(
            self.unknown.get(name) in BROKEN_REASONS for name in _VITAL
        )

    @property
    def usable(self) -> bool:
        """False when the card cannot do work: unreadable, lost, or waiting for a reset."""
        stopped = {"the GPU requires a reset", "the GPU is lost"}
        return self.readable and not stopped & set(self.unknown.values())

    def as_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for item in FIELDS:
            if item.name == "driver_version":
                continue
            place = result
            *path, last = item.name.split(".")
            for step in path:
                place = place.setdefault(step, {})
            place[last] = self.values.get(item.name)
        return {**result, "processes": self.processes, "on_pci": self.on_pci, "unknown": dict(self.unknown)}


@dataclass
class Listing:
    """The GPUs in an answer of nvidia-smi. ``recognised`` is false where the text had no table at all."""

    gpus: list[Gpu] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    driver_version: str | None = None
    recognised: bool = False
    refused: tuple[str, ...] = ()

    def add(self, gpu: Gpu) -> bool:
        """Take a card in, unless it is listed already: the same bus id, or without one the same UUID or index."""
        name = gpu.identity
        if name is not None and any(known.identity == name for known in self.gpus):
            return False
        self.gpus.append(gpu)
        return True


# --- nvidia-smi, csv --------------------------------------------------------------------------------------------------

_REFUSED = re.compile(r"Field \"?([\w.]+)\"? is not a valid field to query", re.IGNORECASE)
_HEADER_UNIT = re.compile(r"\s*\[[^\]]*\]\s*$")


def parse_csv(text: str, asked: Sequence[str] = ()) -> Listing:
    """GPUs of a ``--query-gpu`` answer, by its header; without a header by ``asked``, the fields in query order.

    A row with another number of cells than the header is no row: it is never shifted into place. Lines of text
    between rows (a card that cannot be reached) are left to the caller, who reads them in the whole answer.
    """
    listing = Listing()
    columns: list[Field | None] | None = None
    twice: list[str] = []
    lines = clean(text).split("\n")
    listing.refused = tuple(dict.fromkeys(match for line in lines for match in _REFUSED.findall(line)))
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        header = _header_columns(cells)
        if header is not None:
            columns = header
            listing.recognised = True
            continue
        fields = columns if columns is not None else [_BY_QUERY.get(name) for name in asked]
        if not line.strip() or not fields:
            continue
        if len(cells) != len(fields):
            if len(cells) > 1 and len(cells) >= len(fields) // 2:
                listing.faults.append(_bad_row(line, len(cells), len(fields)))
            continue
        if len(cells) == 1 and not _plausible_single(cells[0]):
            continue
        gpu = _gpu_of_cells(len(listing.gpus), cells, fields)
        if gpu is None:
            continue
        listing.recognised = True
        if not _has_plausible_ids(gpu):
            listing.faults.append(_row_without_ids(line))
            continue
        if not listing.add(gpu):
            twice.append(gpu.label)
            continue
        listing.driver_version = listing.driver_version or gpu.values.get("driver_version")
    _restore_indices(listing.gpus)
    listing.faults.extend(_listed_twice("--query-gpu", twice))
    return listing


def _header_columns(cells: Sequence[str]) -> list[Field | None] | None:
    names = [_HEADER_UNIT.sub("", cell).strip() for cell in cells]
    known = [_BY_QUERY.get(name) for name in names]
    hits = sum(1 for item in known if item is not None)
    # A header is made of field names only; unknown ones (another query in a capture) keep their column.
    if hits and all(re.fullmatch(r"[a-z][\w.]*", name) for name in names):
        return known
    return None


def _plausible_single(cell: str) -> bool:
    """Whether a line of one cell can be a row of a one-field query and not a line of text."""
    return len(cell.split()) <= 2 or reading(cell).value is None


def _gpu_of_cells(order: int, cells: Sequence[str], fields: Sequence[Field | None]) -> Gpu | None:
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for cell, item in zip(cells, fields, strict=True):
        if item is None:
            continue
        values[item.name], reason = item.read(cell)
        if reason is not None:
            unknown[item.name] = reason
    identity = [name for name in ("index", "uuid", "bus_id", "product") if name in values]
    named = any(values[name] is not None for name in identity)
    dead = bool(unknown) and all(unknown.get(name) in BROKEN_REASONS for name in values)
    if not named and not dead:
        return None
    if values.get("index") is None and "index" in unknown and unknown["index"].startswith("unreadable"):
        return None
    return Gpu(order, values, unknown)


def _has_plausible_ids(gpu: Gpu) -> bool:
    """Whether a row has the ids of a GPU, as far as they were asked for: values, or words for no value."""
    uuid = gpu.values.get("uuid")
    if uuid is not None and re.match(r"(?:GPU|MIG)-", uuid, re.IGNORECASE):
        return True
    if "bus_id" in gpu.values:
        return not gpu.unknown.get("bus_id", "").startswith("unreadable")
    return uuid is None


def _row_without_ids(line: str) -> Fault:
    begin = " ".join(line.split())[:60]
    return GPU.fault(
        "nvidia_smi_unparsable",
        "--query-gpu",
        f"a row without the bus id or the UUID of a GPU was not used; it begins with: {begin}",
        remedy("nvidia_smi_unparsable"),
    )


def _listed_twice(subject: str, labels: Sequence[str]) -> list[Fault]:
    if not labels:
        return []
    names = ", ".join(dict.fromkeys(labels))
    return [
        GPU.fault(
            "gpu_listed_twice",
            subject,
            f"listed more than once and counted once, with the values that came first: {names}",
            "let nvidia-smi answer once: no `-l` in a wrapper or a capture, and one answer a file",
        )
    ]


def _restore_indices(gpus: Sequence[Gpu]) -> None:
    """Give a dead card between living ones its index: nvidia-smi lists cards in order, one row each."""
    for place, gpu in enumerate(gpus):
        if gpu.values.get("index") is None and "index" in gpu.unknown:
            before = gpus[place - 1].values.get("index") if place else -1
            after = gpus[place + 1].values.get("index") if place + 1 < len(gpus) else None
            if before is not None and (after is None or after == before + 2):
                gpu.values["index"] = before + 1


def _bad_row(line: str, have: int, want: int) -> Fault:
    begin = " ".join(line.split())[:60]
    return GPU.fault(
        "nvidia_smi_unparsable",
        "--query-gpu",
        f"a row of {have} instead of {want} cells was not used; it begins with: {begin}",
        remedy("nvidia_smi_unparsable"),
    )


# --- nvidia-smi, xml --------------------------------------------------------------------------------------------------

_GPU_BLOCK = re.compile(r"<gpu id=\"([^\"]*)\">(.*?)(</gpu>|(?=<gpu id=)|\Z)", re.DOTALL)
_PROCESSES = re.compile(r"<processes>.*</processes>", re.DOTALL)
_REASON_ELEMENT = re.compile(r"clocks_(?:throttle|event)_reason_(\w+)")


def parse_xml(text: str) -> Listing:
    """GPUs of ``nvidia-smi -q -x``. Each card's block is read alone: a broken one does not cost the others."""
    listing = Listing()
    text = clean(text)
    if match := re.search(r"<driver_version>([^<]+)</driver_version>", text):
        listing.driver_version = reading(match.group(1)).value
    listing.recognised = "<nvidia_smi_log>" in text
    twice: list[str] = []
    attached = re.search(r"<attached_gpus>\s*(\d+)\s*</attached_gpus>", text)
    for match in _GPU_BLOCK.finditer(text):
        listing.recognised = True
        card = bus_id(match.group(1))
        root = _element(match.group(0)) if match.group(3) == "</gpu>" else None
        if root is None:
            listing.faults.append(
                GPU.fault(
                    "nvidia_smi_unparsable",
                    card or match.group(1) or "GPU",
                    "the description of this GPU in `nvidia-smi -q -x` is cut off or not well-formed",
                    remedy("nvidia_smi_unparsable"),
                )
            )
            continue
        gpu = _gpu_of_xml(len(listing.gpus), card, root)
        if not listing.add(gpu):
            twice.append(gpu.values["bus_id"] or gpu.label)
    seen = len(listing.gpus) + len(listing.faults)
    if attached and int(attached.group(1)) > seen and listing.recognised:
        listing.faults.append(
            GPU.fault(
                "nvidia_smi_unparsable",
                "nvidia-smi -q -x",
                f"it counts {attached.group(1)} attached GPUs and describes {seen}",
                remedy("nvidia_smi_unparsable"),
            )
        )
    listing.faults.extend(_listed_twice("nvidia-smi -q -x", twice))
    return listing


def _element(block: str) -> ET.Element | None:
    """A card's block; without its processes where these make it not well-formed: their names come as they are."""
    for text in (block, _PROCESSES.sub("", block)):
        try:
            return ET.fromstring(text)
        except ET.ParseError:
            continue
    return None


def _gpu_of_xml(order: int, card: str | None, root: ET.Element) -> Gpu:
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for item in FIELDS:
        if item.name in {"index", "driver_version"}:
            continue
        texts = [root.findtext(path) for path in item.xml]
        value, reason = item.read(next((t for t in texts if t is not None and reading(t).value is not None), None))
        if value is None and any(t is not None for t in texts):
            value, reason = item.read(next(t for t in texts if t is not None))
        values[item.name] = value
        if reason is not None:
            unknown[item.name] = reason
    # The processes of -q -x are listed by minor number nowhere; cards stand in index order.
    values["index"] = order
    values["bus_id"] = values.get("bus_id") or card
    if values["bus_id"]:
        unknown.pop("bus_id", None)
    for scope in ("volatile", "aggregate"):
        for kind, parts in _ECC_PARTS.items():
            name = f"ecc.{scope}.{kind}"
            if values[name] is None:
                values[name], reason = _ecc_sum(root.find(f"ecc_errors/{scope}"), parts, unknown.get(name))
                if reason is None:
                    unknown.pop(name, None)
                else:
                    unknown[name] = reason
    values["clock_reasons"], reason = _xml_clock_reasons(root)
    unknown.pop("clock_reasons", None)
    if reason is not None:
        unknown["clock_reasons"] = reason
    if values["compute_capability"] is None:
        unknown["compute_capability"] = "not reported by this driver"
    if root.find("processes") is None:
        unknown["processes"] = "not reported, or unreadable: the name of a process is not well-formed XML"
    return Gpu(order, values, unknown, _xml_processes(root))


def _ecc_sum(scope: ET.Element | None, parts: Iterable[str], reason: str | None) -> tuple[int | None, str | None]:
    if scope is None:
        return None, reason
    known = [count(scope.findtext(part)) for part in parts if scope.find(part) is not None]
    numbers = [value for value, _ in known if value is not None]
    if not numbers or len(numbers) < len(known):
        return None, next((why for _, why in known if why), reason)
    return sum(numbers), None


def _xml_clock_reasons(root: ET.Element) -> tuple[list[str] | None, str | None]:
    """Active reasons; both headings, old and new. The block of counters has the same names and is not looked at."""
    for heading in ("clocks_event_reasons", "clocks_throttle_reasons"):
        block = root.find(heading)
        if block is None:
            continue
        states = {}
        for element in block:
            if match := _REASON_ELEMENT.fullmatch(element.tag):
                states[match.group(1)] = switch(element.text)
        if not states:
            return None, reading(block.text).reason or "not reported by this driver"
        if all(value is None for value, _ in states.values()):
            return None, next(iter(states.values()))[1]
        return [name for name, (value, _) in states.items() if value], None
    return None, "not reported by this driver"


def _xml_processes(root: ET.Element) -> list[dict[str, Any]] | None:
    block = root.find("processes")
    if block is None or reading(block.text or "x").reason in {"not available", "not supported"}:
        return None
    found = []
    for element in block.findall("process_info"):
        memory, _ = mib(element.findtext("used_memory"))
        pid, _ = count(element.findtext("pid"))
        found.append(
            {
                "pid": pid,
                "type": reading(element.findtext("type")).value,
                "name": reading(element.findtext("process_name")).value,
                "memory_mib": memory,
            }
        )
    return found


# --- PCI and driver ---------------------------------------------------------------------------------------------------


def pci_devices(machine: Machine) -> list[PciDevice]:
    """NVIDIA GPUs on the PCI bus, by class (VGA 0300, 3D controller 0302) and vendor (10de), never by text."""
    base = "/sys/bus/pci/devices"
    found = []
    for name in machine.listdir(base):
        card = bus_id(name)
        vendor = (machine.read(f"{base}/{name}/vendor") or "").strip().lower()
        kind = (machine.read(f"{base}/{name}/class") or "").strip().lower().removeprefix("0x")[:4]
        device = device_id(machine.read(f"{base}/{name}/device"))
        if card is None or vendor != "0x10de" or kind not in {"0300", "0302"} or device is None:
            continue
        pci_id = f"10de:{device}"
        link = machine.path(f"{base}/{name}/driver")
        node, _ = number(machine.read(f"{base}/{name}/numa_node"))
        width, _ = count(machine.read(f"{base}/{name}/current_link_width"))
        width_max, _ = count(machine.read(f"{base}/{name}/max_link_width"))
        found.append(
            PciDevice(
                bus_id=card,
                pci_id=pci_id,
                product=product_of(pci_id),
                compute_capability=compute_capability_of(pci_id),
                driver=_link_name(link),
                # The kernel writes -1 for "no node".
                numa_node=int(node) if node is not None and node >= 0 else None,
                pcie_width=width or None,
                pcie_width_max=width_max or None,
            )
        )
    return found


def _link_name(link: Any) -> str | None:
    try:
        return str(link.readlink().name)
    except OSError:
        return None


_KERNEL_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)*)")


def loaded_version(machine: Machine) -> str | None:
    """Version of the loaded kernel module from /proc/driver/nvidia/version, or null."""
    match = _KERNEL_MODULE.search(machine.read("/proc/driver/nvidia/version") or "")
    return match.group(1) if match else None


def bus_ids(machine: Machine, pci: Sequence[PciDevice]) -> list[str]:
    """Every card that nvidia-smi can be asked for by name: on the PCI bus or known to the loaded driver."""
    known = {device.bus_id: None for device in pci if device.driver in {None, "nvidia"}}
    known |= {card["bus_id"]: None for card in driver_gpus(machine) if card["bus_id"]}
    return list(known)


def cuda_devices(machine: Machine) -> tuple[list[PciDevice], dict[str, str]]:
    """The GPUs that CUDA counts, in bus order, and why it does not count the others of the bus, by bus id.

    CUDA knows those that the loaded driver runs. Before it is loaded nothing tells them apart, and all are counted.
    """
    devices = sorted(pci_devices(machine), key=lambda device: device.bus_id)
    run = {card["bus_id"]: card["excluded"] for card in driver_gpus(machine) if card["bus_id"]}
    if not run:
        return devices, {}
    others = {}
    for device in devices:
        if run.get(device.bus_id, True):
            holder = f"the kernel driver {device.driver} has it" if device.driver else "no kernel driver has it"
            if device.driver == "nvidia":
                holder = "the NVIDIA driver is told to leave it out" if device.bus_id in run else "it did not start it"
            others[device.bus_id] = f"the NVIDIA driver does not run it: {holder}"
    return [device for device in devices if device.bus_id not in others], others


def driver_gpus(machine: Machine) -> list[dict[str, Any]]:
    """Cards that the loaded driver knows: ``bus_id``, ``product``, ``uuid``, ``excluded``; from /proc/driver/nvidia."""
    base = "/proc/driver/nvidia/gpus"
    found = []
    for name in machine.listdir(base):
        text = machine.read(f"{base}/{name}/information") or ""
        lines = dict(part for part in (line.split(":", 1) for line in text.splitlines()) if len(part) == 2)
        facts = {key.strip().lower(): value.strip() for key, value in lines.items()}
        uuid = facts.get("gpu uuid", "")
        found.append(
            {
                "bus_id": bus_id(facts.get("bus location")) or bus_id(name),
                "product": reading(facts.get("model")).value,
                "uuid": uuid if uuid and "?" not in uuid else None,
                "excluded": switch(facts.get("gpu excluded"))[0],
            }
        )
    return found
