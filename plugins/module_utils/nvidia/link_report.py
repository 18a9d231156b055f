# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The links of one machine, gathered and judged: what the module nvlink_topology returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..faults import Fault
from . import inventory, nvlink, topology
from .gpu_faults import GPU
from .smi import Answer, NvidiaSmi, unparsable
from .values import bus_id, clean, is_index

REQUIRE = ("any", "full_mesh", "islands")


@dataclass(frozen=True)
class LinkRequest:
    """What is asked. ``gpus`` empty means all; items are indices, bus ids or UUIDs."""

    gpus: Sequence[str] = ()
    require: str = "any"
    min_links_per_pair: int | None = None
    island_size: int | None = None
    require_active_links: bool = True
    peer_access: bool = False

    @property
    def refused(self) -> str | None:
        """What cannot be meant and what to write instead, or null."""
        if self.island_size is not None and self.island_size < 2:
            return f"island_size is {self.island_size}: write the number of GPUs in a group, 2 or more"
        if self.min_links_per_pair is not None and self.min_links_per_pair < 0:
            return f"min_links_per_pair is {self.min_links_per_pair}: write a number of links, 0 (any) or more"
        return None


@dataclass
class LinkReport:
    """Return values of nvlink_topology by name (see the module's RETURN)."""

    gpu_count: int | None = None
    gpus: list[int] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    fully_connected: bool | None = None
    islands: list[list[int]] = field(default_factory=list)
    min_links: int | None = None
    nics: list[str] = field(default_factory=list)
    cpu_affinity: list[str | None] = field(default_factory=list)
    numa_affinity: list[int | str | None] = field(default_factory=list)
    gpu_numa_id: list[int | None] = field(default_factory=list)
    links: list[dict[str, Any]] | None = None
    peer_access: list[dict[str, Any]] | None = None
    recommended_split_mode: str | None = None
    recommended_split_mode_reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def report(smi: NvidiaSmi, request: LinkRequest) -> tuple[LinkReport, list[Fault]]:
    """Ask nvidia-smi (``topo -m``, ``nvlink -s``, and only where needed more) and judge the GPUs in use."""
    faults: list[Fault] = []
    result = LinkReport()
    answer = smi.ask("topo", "-m")
    matrix, matrix_faults = topology.link_matrix(answer.text)
    # A text with a whole matrix in it is judged by the matrix; what else stands around it is a shell's noise.
    if matrix is None:
        faults.extend(answer.faults)
        if answer.state is not None:
            result.recommended_split_mode_reason = "the number of GPUs is not known"
            return result, faults
        if matrix_faults or not answer.lost:
            faults.extend(matrix_faults or [unparsable(answer, "topology_unavailable", "link matrix")])
    else:
        faults.extend(fault for fault in answer.faults if answer.usable)
        faults.extend(matrix_faults)
    states = _States()
    if request.require_active_links or request.gpus:
        # One card has no pairs, but it can have links; and UUIDs stand only here.
        states = _link_states(smi, request, matrix)
        _add(faults, states.faults)
    status = states.status
    result.links = [item.as_dict() for item in status.gpus] if status.gpus else None
    if matrix is None:
        result.recommended_split_mode_reason = "the links between the GPUs are not known"
        faults = [_with_links_read(fault, status) for fault in faults]
        faults.extend(nvlink.judge(status, _living_in_use(request.gpus, states), (), request.require_active_links))
        return result, faults

    result.gpu_count = len(matrix.gpus)
    result.nics = matrix.nics
    result.cpu_affinity = matrix.cpu_affinity
    result.numa_affinity = matrix.numa_affinity
    result.gpu_numa_id = matrix.gpu_numa_id
    result.pairs = [pair.as_dict() for pair in matrix.pairs]
    used, selection_faults = _select(smi, request.gpus, matrix.gpus, status)
    faults.extend(selection_faults)
    if selection_faults:
        return result, faults
    pairs = topology.subset_pairs(matrix.pairs, used)
    result.gpus = used
    result.fully_connected = topology.fully_connected(pairs)
    result.islands = topology.islands(used, pairs)
    result.min_links = topology.min_links(pairs)
    result.recommended_split_mode, result.recommended_split_mode_reason = topology.recommend_split_mode(used, pairs)
    on_machine = topology.islands(matrix.gpus, matrix.pairs)
    faults.extend(_judge_mesh(request, used, pairs, result.islands, on_machine))
    faults.extend(nvlink.judge(status, used, matrix.pairs, request.require_active_links))
    if request.peer_access:
        result.peer_access, peer_faults = _peer_access(smi, used)
        faults.extend(peer_faults)
    return result, faults


@dataclass
class _States:
    """Link states, the faults found while asking for them, the bus ids of lost cards, and indices by bus id where a
    card was asked by it."""

    status: nvlink.Status = field(default_factory=nvlink.Status)
    faults: list[Fault] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    places: dict[str, int] = field(default_factory=dict)


def _link_states(smi: NvidiaSmi, request: LinkRequest, matrix: topology.Matrix | None) -> _States:
    """``nvlink -s``; where it broke off or left cards out, these one by one, so that a lost card hides no other.

    One process on a healthy machine, otherwise one more a card (and ``-L`` where nothing else names the cards).
    """
    answer = smi.ask("nvlink", "-s")
    states = _States(nvlink.parse(answer.text), _status_faults(answer), set(answer.lost))
    if answer.state is not None:
        return states
    for name in _to_ask(smi, request, matrix, answer, states):
        part = smi.ask("nvlink", "-s", "-i", name)
        _add(states.faults, _status_faults(part))
        states.lost.update(part.lost)
        if part.state is not None:
            continue  # not in the capture, no such card, or this card does not answer in time
        found = nvlink.parse(part.text)
        states.status.update(found)
        card = bus_id(name)
        if card and len(found.gpus) == 1:
            states.places[card] = found.gpus[0].gpu
    return states


def _to_ask(
    smi: NvidiaSmi, request: LinkRequest, matrix: topology.Matrix | None, answer: Answer, states: _States
) -> list[str]:
    """What ``-i`` names the cards whose links the answer for all may have left out; empty for a whole answer."""
    broke_off = bool(answer.faults) or not answer.completed.ok
    seen = states.status.gpus
    if matrix is not None:
        # Where it reports no card, without an error or without any NVLink, single cards would say no more.
        if not (seen or answer.faults or (broke_off and any(pair.nvlinks for pair in matrix.pairs))):
            return []
        return [str(gpu) for gpu in matrix.gpus if states.status.of(gpu) is None]
    if not (broke_off or seen):
        return []
    known = inventory.bus_ids(smi.machine, inventory.pci_devices(smi.machine))
    if not broke_off and len(seen) >= len(known):
        return []
    if known:
        # Also the cards that were seen: the section before the error may be cut off.
        return [card for card in known if card not in states.lost]
    listing = smi.ask("-L")
    _add(states.faults, _status_faults(listing))
    states.lost.update(listing.lost)
    listed = nvlink.parse(listing.text).gpus
    names = [str(item.gpu) for item in (*seen, *listed)]
    uuids = {item.uuid.lower() for item in (*seen, *listed) if item.uuid}
    names += [name for name in (item.strip() for item in request.gpus) if name.lower() not in uuids]
    return [name for name in dict.fromkeys(names) if bus_id(name) not in states.lost]


def _status_faults(answer: Answer) -> list[Fault]:
    """Lost cards that only this call names. That there is no link state is judged with the matrix in hand."""
    if answer.completed.timed_out:
        return list(answer.faults)
    return [] if answer.completed.missing or answer.state is not None else list(answer.faults)


def _add(faults: list[Fault], more: Iterable[Fault]) -> None:
    """Append what is new. Each call words a lost card in its own way; the first one is kept."""
    known = {(fault.code, fault.subject) for fault in faults}
    faults.extend(fault for fault in more if (fault.code, fault.subject) not in known)


def _with_links_read(fault: Fault, status: nvlink.Status) -> Fault:
    """``topo -m`` cannot be asked for single cards: say what is known without it."""
    if fault.code != "topology_unavailable" or not status.gpus:
        return fault
    cards = ", ".join(f"GPU{item.gpu}" for item in status.gpus)
    message = f"{fault.message}; the link states of {cards} were read all the same"
    return GPU.fault(fault.code, fault.subject, message, fault.remedy)


def _living_in_use(wanted: Sequence[str], states: _States) -> list[int]:
    """The GPUs in use of those whose links were read without a matrix; all where a name cannot be told."""
    living = [item.gpu for item in states.status.gpus]
    used: set[int] = set()
    for name in (item.strip() for item in wanted):
        card = bus_id(name)
        if is_index(name):
            used.add(int(name))
        elif found := {item.gpu for item in states.status.gpus if (item.uuid or "").lower() == name.lower()}:
            used |= found
        elif card in states.places:
            used.add(states.places[card])
        elif card not in states.lost:
            return living
    return [gpu for gpu in living if gpu in used] if wanted else living


def _select(
    smi: NvidiaSmi, wanted: Sequence[str], known: Sequence[int], status: nvlink.Status
) -> tuple[list[int], list[Fault]]:
    """Indices of the GPUs named in ``wanted``; all where it is empty."""
    if not wanted:
        return list(known), []
    by_name: dict[str, set[int]] = {}
    for item in status.gpus:
        if item.uuid:
            by_name.setdefault(item.uuid.lower(), set()).add(item.gpu)
    if any(not is_index(name.strip()) and name.strip().lower() not in by_name for name in wanted):
        for index, bus, uuid in _identities(smi):
            by_name.setdefault(bus, set()).add(index)
            by_name.setdefault(uuid.lower(), set()).add(index)
    chosen: list[int] = []
    faults = []
    for name in (item.strip() for item in wanted):
        found = {int(name)} if is_index(name) else by_name.get(name.lower()) or by_name.get(bus_id(name) or "") or set()
        found = found & set(known)
        if len(found) != 1:
            have = ", ".join(str(index) for index in known)
            problem = "is the id of several GPUs" if found else "is not on this machine"
            faults.append(
                GPU.fault(
                    "gpu_not_found",
                    name,
                    f"{name} {problem}; the matrix has the GPUs {have}",
                    "use what `nvidia-smi --query-gpu=index,pci.bus_id,uuid --format=csv` lists in one of its columns",
                )
            )
        else:
            chosen.append(found.pop())
    return sorted(set(chosen)), faults


def _identities(smi: NvidiaSmi) -> list[tuple[int, str, str]]:
    """Index, bus id and UUID of every GPU."""
    answer = smi.ask("--query-gpu=index,pci.bus_id,uuid", "--format=csv,noheader")
    found = []
    for line in clean(answer.text).splitlines():
        parts = [part.strip() for part in line.split(",")]
        card = bus_id(parts[1]) if len(parts) == 3 else None
        if card and is_index(parts[0]):
            found.append((int(parts[0]), card, parts[2]))
    return found


def _judge_mesh(
    request: LinkRequest,
    used: Sequence[int],
    pairs: Sequence[topology.Pair],
    groups: Sequence[Sequence[int]],
    on_machine: Sequence[Sequence[int]],
) -> list[Fault]:
    faults = []
    bare = [pair for pair in pairs if pair.nvlinks == 0]
    if request.require == "full_mesh" and bare:
        shown = ", ".join(f"{pair.a}-{pair.b} ({pair.link})" for pair in bare[:12])
        more = f" and {len(bare) - 12} more" if len(bare) > 12 else ""
        groups_text = "; ".join(",".join(map(str, group)) for group in on_machine if len(group) > 1)
        remedy = "check the NVLink bridges or the SXM board, and `nvidia-smi nvlink -s`"
        if groups_text:
            remedy += f"; or use a group that is fully linked: {groups_text}"
        faults.append(
            GPU.fault(
                "nvlink_not_full_mesh",
                "GPU " + ",".join(map(str, used)),
                f"{len(bare)} of {len(pairs)} pairs have no NVLink: {shown}{more}",
                remedy,
            )
        )
    if request.require == "islands":
        size = request.island_size or 2
        small = [group for group in groups if len(group) < size]
        if small:
            faults.append(
                GPU.fault(
                    "nvlink_islands_too_small",
                    "GPU " + ",".join(map(str, used)),
                    f"fully linked groups of at least {size} required, found "
                    + " and ".join(",".join(map(str, group)) for group in groups),
                    "check the links with `nvidia-smi topo -m`, or set `island_size` to what the board has",
                )
            )
    if request.min_links_per_pair:
        weak: list[Fault] = []
        for pair in pairs:
            if pair.nvlinks is None or pair.nvlinks >= request.min_links_per_pair:
                continue
            if pair.nvlinks == 0 and request.require != "any":
                continue  # said above, or allowed between islands
            weak.append(
                GPU.fault(
                    "nvlink_too_few_links",
                    f"GPU{pair.a}-GPU{pair.b}",
                    f"{pair.link}, at least {request.min_links_per_pair} links required",
                    "look for inactive links with `nvidia-smi nvlink -s`; where the board has no more, lower "
                    "`min_links_per_pair`",
                )
            )
        faults.extend(nvlink.merged(weak))
    return faults


def _peer_access(smi: NvidiaSmi, used: Sequence[int]) -> tuple[list[dict[str, Any]] | None, list[Fault]]:
    """Peer access through NVLink for every pair of the GPUs in use; null where the driver does not say."""
    answer = smi.ask("topo", "-p2p", "n")
    matrix = topology.peer_matrix(answer.text)
    if matrix is None:
        return None, list(answer.faults) if answer.state == "timeout" else []
    pairs = topology.subset_pairs(matrix.pairs, used)
    faults = list(matrix.faults)
    denied = [pair for pair in pairs if pair.link not in {None, "OK"}]
    if denied:
        faults.append(
            GPU.fault(
                "peer_access_missing",
                "GPU " + ",".join(map(str, used)),
                "no peer access: " + ", ".join(f"{pair.a}-{pair.b} ({pair.link})" for pair in denied),
                "check the IOMMU and ACS settings, and the links with `nvidia-smi topo -m`",
            )
        )
    return [
        {"a": pair.a, "b": pair.b, "status": pair.link, "ok": None if pair.link is None else pair.link == "OK"}
        for pair in pairs
    ], faults
