# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Link states of ``nvidia-smi nvlink -s`` and what they mean.

The matrix says which GPUs are joined, this output says which links are up: all six links of a Power9 card are active
and yet only two of six pairs are linked, and a card of a full mesh can run on five of six. Both are needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..faults import Fault
from .gpu_faults import GPU
from .products import has_bridges, nvlinks_of
from .topology import Pair
from .values import clean, reading

_GPU = re.compile(r"^\W*GPU\s+(\d+):\s*(.*?)\s*(?:\(UUID:\s*([^)\s]*)\)?)?\s*$")
_LINK = re.compile(r"^\W*Link\s+(\d+):\s*(.+?)\s*$")
_RATE = re.compile(r"^(\d+(?:\.\d+)?)\s*GB/s$", re.IGNORECASE)
_ALL_INACTIVE = re.compile(r"all links are in-?active", re.IGNORECASE)
#: The same glued to the line of a GPU, with or without the words of NVML before it.
_OWN_INACTIVE = re.compile(
    r"(?:[\s:;,<(\[]|NVML:|Unable to retrieve NvLink information as|all links are)+(?<![\w-])in-?active[\s.>)\]]*$",
    re.IGNORECASE,
)
_NOT_SUPPORTED = re.compile(
    r"Unable to retrieve NvLink|NvLink.*not supported|No NvLinks|device does not support NVLink", re.IGNORECASE
)
_ELIDED = re.compile(
    r"^[\s>|#]*[\[<(]?\s*(?:\.{2,}|…|(?:snip|truncated|omitted|output cut).*)\s*[\])>]?\s*$", re.IGNORECASE
)


@dataclass(frozen=True)
class Link:
    """One link. ``active`` is null where not reported; ``rate_gb_s`` is GB/s each way, null unless active."""

    link: int
    active: bool | None
    rate_gb_s: float | None

    def as_dict(self) -> dict[str, object]:
        return {"link": self.link, "active": self.active, "rate_gb_s": self.rate_gb_s}


@dataclass
class GpuLinks:
    """The links of one GPU. ``links`` is null where the GPU has none or the driver does not report them; then
    ``all_inactive`` tells whether the driver at least said that none is up."""

    gpu: int
    product: str | None
    uuid: str | None
    links: list[Link] | None = None
    all_inactive: bool = False

    @property
    def active(self) -> int | None:
        """Number of links that are up, or null."""
        if self.links is None:
            return 0 if self.all_inactive else None
        if any(link.active is None for link in self.links):
            return None
        return sum(1 for link in self.links if link.active)

    @property
    def expected(self) -> int | None:
        """Number of links of the product, where its name decides it."""
        return nvlinks_of(self.product)

    def as_dict(self) -> dict[str, object]:
        return {
            "gpu": self.gpu,
            "product": self.product,
            "uuid": self.uuid,
            "active": self.active,
            "expected": self.expected,
            "links": None if self.links is None else [link.as_dict() for link in self.links],
        }


@dataclass
class Status:
    """The parsed output. ``elided`` tells that somebody cut parts out."""

    gpus: list[GpuLinks] = field(default_factory=list)
    elided: bool = False
    faults: list[Fault] = field(default_factory=list)

    def of(self, gpu: int) -> GpuLinks | None:
        return next((item for item in self.gpus if item.gpu == gpu), None)

    def update(self, later: Status) -> None:
        """Take over what a later answer says of its cards; what was wrong with their earlier lines is void."""
        anew = {item.gpu for item in later.gpus}
        subjects = {f"GPU{gpu}" for gpu in anew}
        kept = [item for item in self.gpus if item.gpu not in anew]
        self.gpus = sorted([*kept, *later.gpus], key=lambda item: item.gpu)
        self.faults = [fault for fault in self.faults if fault.subject not in subjects] + later.faults
        self.elided = self.elided or later.elided


def parse(text: str) -> Status:
    """Link states by GPU; empty where the text has none (then the state is unknown, not bad)."""
    status = Status()
    current: GpuLinks | None = None
    unread: dict[int, list[str]] = {}
    for line in clean(text).split("\n"):
        if match := _GPU.match(_OWN_INACTIVE.sub("", line)):
            index, product, uuid = int(match.group(1)), match.group(2), match.group(3)
            if status.of(index) is not None:
                status.faults.append(_truncated(f"GPU{index}", f"GPU {index} stands twice in the answer"))
                current = None
                continue
            current = GpuLinks(index, product or None, uuid or None, all_inactive=bool(_OWN_INACTIVE.search(line)))
            status.gpus.append(current)
        elif (match := _LINK.match(line)) and current is not None:
            number = int(match.group(1))
            if any(known.link == number for known in current.links or []):
                unread.setdefault(current.gpu, []).append(line)
                continue
            link = _link(number, match.group(2))
            if link is None:
                # Neither up nor down: the card then has no number of active links.
                unread.setdefault(current.gpu, []).append(line)
                link = Link(number, None, None)
            current.links = [*(current.links or []), link]
        elif _ALL_INACTIVE.search(line):
            if current is not None:
                current.all_inactive = True
        elif _NOT_SUPPORTED.search(line):
            continue
        elif _ELIDED.match(line):
            status.elided = True
    for index, lines in unread.items():
        rest = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        message = f"the line {lines[0].strip()[:60]!r}{rest} is cut off or not known"
        status.faults.append(_truncated(f"GPU{index}", message))
    for gpu in status.gpus:
        numbers = [link.link for link in gpu.links or []]
        if numbers and sorted(numbers) != list(range(max(numbers) + 1)):
            missing = sorted(set(range(max(numbers))) - set(numbers))
            status.faults.append(
                _truncated(f"GPU{gpu.gpu}", f"no line for link {', '.join(map(str, missing))}"),
            )
    return status


def _link(number: int, text: str) -> Link | None:
    bare = text.replace("&lt;", "<").replace("&gt;", ">").strip("<>[] ").lower()
    if bare in {"inactive", "in-active", "not active", "disabled", "not enabled", "down", "off"}:
        return Link(number, False, None)
    if match := _RATE.match(text):
        rate = float(match.group(1))
        return Link(number, True, rate) if rate > 0 else Link(number, False, None)
    if bare in {"active", "enabled"}:
        return Link(number, True, None)
    # Asleep to save power (NVML_NVLINK_STATE_SLEEP) is no fault, and whether the link works is not known.
    if reading(text).value is None or bare == "sleep":
        return Link(number, None, None)
    return None


def _truncated(subject: str, message: str) -> Fault:
    return GPU.fault(
        "nvlink_status_truncated",
        subject,
        message,
        "run `nvidia-smi nvlink -s` again and give the whole output; a GPU that cannot be read has no link state",
    )


def judge(status: Status, gpus: Sequence[int], pairs: Iterable[Pair], require_active: bool) -> list[Fault]:
    """Faults of the links of ``gpus`` (the subset in use); ``pairs`` are those of the whole machine, or none.

    A link is missed where the matrix shows more links than are up, where another card of the same product has more up
    (of a bridge card: one that the matrix joins to it), or where the product has more and no second card of its kind
    shows that the board wires fewer. Cards that all alike use fewer (half of a hybrid mesh rented out) only give a
    warning, and so do cards of which none has all and each has what the matrix shows. A card without NVLink gives
    nothing.
    """
    if not require_active:
        return []
    machine = list(pairs)
    if not status.gpus:
        if any(pair.nvlinks for pair in machine if pair.a in gpus or pair.b in gpus):
            return [_unknown("nvlink -s", "the matrix shows NVLinks, their state is not reported")]
        return []
    faults: list[Fault] = []
    present = [item for item in status.gpus if item.gpu in set(gpus)]
    said = {fault.subject for fault in status.faults}
    alike: list[GpuLinks] = []
    for item in present:
        # Siblings are witnesses whether they are in use or not.
        siblings = [other for other in status.gpus if other.product == item.product]
        best = _most_active(_witnesses(item, siblings, machine))
        if _is_part_of_a_mesh(item, best, machine):
            best = 0
        wanted = max(best, _wired(item, siblings, machine))
        if item.active is None:
            if wanted and f"GPU{item.gpu}" not in said:
                faults.append(_unknown(f"GPU{item.gpu}", "no link state, although it or its siblings have NVLinks"))
        elif item.active < wanted:
            faults.append(_inactive(item, wanted))
        elif item.expected is not None and item.active < item.expected:
            # A sibling with the same number is a witness for the board's wiring, but not for one without any link.
            if len(siblings) > 1 and item.active > 0:
                alike.append(item)
            else:
                faults.append(_inactive(item, item.expected))
    if alike:
        numbers = " or ".join(map(str, sorted({item.active for item in alike if item.active is not None})))
        faults.append(
            GPU.fault(
                "nvlink_fewer_than_product",
                ", ".join(f"GPU{item.gpu}" for item in alike),
                f"{numbers} of {alike[0].expected} NVLinks are active on all; the board may wire only these",
                "compare with the vendor's documentation; `min_links_per_pair` asks for a number of links between GPUs",
            )
        )
    faults = merged(faults)
    faults.extend(_slow(present))
    faults.extend(status.faults)
    if status.elided:
        faults.append(_truncated("nvlink -s", "parts of the answer were cut out"))
    absent = [gpu for gpu in gpus if status.of(gpu) is None]
    if absent:
        faults.append(_truncated("nvlink -s", "no status for " + ", ".join(f"GPU{gpu}" for gpu in absent)))
    return faults


def merged(faults: Iterable[Fault]) -> list[Fault]:
    """One fault for all cards about which the same is said."""
    subjects: dict[tuple[str, str, str], list[str]] = {}
    for fault in faults:
        subjects.setdefault((fault.code, fault.message, fault.remedy), []).append(fault.subject)
    return [GPU.fault(code, ", ".join(names), message, remedy) for (code, message, remedy), names in subjects.items()]


def _most_active(witnesses: Iterable[GpuLinks]) -> int:
    return max((item.active for item in witnesses if item.active is not None), default=0)


def _witnesses(item: GpuLinks, siblings: Sequence[GpuLinks], pairs: Sequence[Pair]) -> list[GpuLinks]:
    """The cards that must have as many links up. Bridges can be fitted to some cards of a kind and not to others, so
    of bridge cards only the joined ones count; where no matrix says which these are, all but for a card with no link.
    """
    if not has_bridges(item.product):
        return list(siblings)
    if not pairs:
        return [] if item.active == 0 else list(siblings)
    joined = {pair.b if pair.a == item.gpu else pair.a for pair in _joined(item.gpu, pairs)}
    return [other for other in siblings if other.gpu in joined]


def _joined(gpu: int, pairs: Iterable[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.nvlinks and gpu in (pair.a, pair.b)]


def _is_part_of_a_mesh(item: GpuLinks, best: int, pairs: Sequence[Pair]) -> bool:
    """Whether cards of one kind can differ: none has all its links, and this one has those that the matrix shows.

    A p3.8xlarge is half a hybrid mesh: its cards have four or five of six links, the others led to the other half.
    """
    shown = sum(pair.nvlinks or 0 for pair in _joined(item.gpu, pairs))
    return item.expected is not None and best < item.expected and item.active == shown


def _wired(item: GpuLinks, siblings: Sequence[GpuLinks], pairs: Sequence[Pair]) -> int:
    """Links of a card that the matrix shows.

    Between cards that are wired to each other every pair has links of its own, and they add up. Behind NVSwitch all
    pairs share the same links: there the sum is more than a card has, or (for a product whose links are not known) a
    card has just as many up as each of its pairs shows.
    """
    shown = [pair.nvlinks or 0 for pair in _joined(item.gpu, pairs)]
    if not shown:
        return 0
    has = item.expected
    if has is None:
        has = max(len(other.links or []) for other in siblings)
        if len(shown) > 1 and set(shown) == {item.active}:
            return shown[0]
    return sum(shown) if sum(shown) <= has else min(max(shown), has)


def _inactive(item: GpuLinks, wanted: int) -> Fault:
    down = [str(link.link) for link in item.links or [] if link.active is False]
    named = f"; inactive: {', '.join(down)}" if down else ""
    return GPU.fault(
        "nvlink_inactive",
        f"GPU{item.gpu}",
        f"{item.active} of {wanted} NVLinks are active{named}",
        "read `nvidia-smi nvlink -e` and `journalctl -k -b | grep -i nvlink`; reboot; if the link stays down, reseat "
        "the card or its bridge; on machines with NVSwitch check that nvidia-fabricmanager runs",
    )


def _unknown(subject: str, message: str) -> Fault:
    return GPU.fault(
        "nvlink_status_unknown",
        subject,
        message,
        "run `nvidia-smi nvlink -s` by hand; set `require_active_links: false` where the driver does not support it",
    )


def _slow(present: Iterable[GpuLinks]) -> list[Fault]:
    links = [(item, link) for item in present for link in item.links or [] if link.rate_gb_s]
    if not links:
        return []
    usual = Counter(link.rate_gb_s for _, link in links).most_common(1)[0][0]
    return [
        GPU.fault(
            "nvlink_slow",
            f"GPU{item.gpu}",
            f"link {link.link} runs at {link.rate_gb_s:g} GB/s, the others at {usual:g} GB/s",
            "read `nvidia-smi nvlink -e` for errors on this link and reboot",
        )
        for item, link in links
        if link.rate_gb_s is not None and usual is not None and link.rate_gb_s < usual * 0.9
    ]
