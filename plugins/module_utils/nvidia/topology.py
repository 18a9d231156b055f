# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The matrix of ``nvidia-smi topo -m`` as a graph.

Drivers 390 to 610 print it with tabs; logs, tickets and terminals turn these into spaces, lose the leading one, glue
columns together or indent the whole. The matrix carries its own proof: every row has ``X`` in its own column, and A-B
must say what B-A says. What fails that proof is a fault and never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from ..faults import Fault
from .gpu_faults import GPU
from .values import clean, is_index, reading

#: How a cell of the matrix is called in results; NV# is ``nvlink``.
PATHS = ("nvlink", "pix", "pxb", "phb", "node", "sys", "soc", "self", "unknown")

#: A number as nvidia-smi writes it. One that begins with 0 is what is left of two columns that a damaged line has lost.
_NUMBER = r"(?:0|[1-9]\d*)"
_LINK_WORD = r"NV[1-9]\d*|PIX|PXB|PHB|NODE|SYS|SOC|X"
_PEER_WORD = r"OK|CNS|GNS|TNS|NS|DR|U|X"
_LINK = re.compile(rf"(?:{_LINK_WORD})")
_LINKS = re.compile(rf"(?:{_LINK_WORD})+")
_PEER = re.compile(rf"(?:{_PEER_WORD})")
_GPU_NAME = re.compile(rf"GPU{_NUMBER}")
_AFFINITY_HEADERS = (
    ("cpu", re.compile(r"CPU\s+Affinity", re.IGNORECASE)),
    ("numa", re.compile(r"NUMA\s+Affinity", re.IGNORECASE)),
    ("gpu_numa", re.compile(r"GPU\s+NUMA\s+ID", re.IGNORECASE)),
)
#: A header begins at the first GPU name that is followed by another column or the end of the line.
_HEADER = re.compile(rf"(?<![\w-])GPU{_NUMBER}(?=\s|$|GPU\d|NIC\d|mlx\d|CPU\s)")
_ROW = re.compile(rf"(?<![\w-])(GPU{_NUMBER})(?=\s|$)")
#: Names of network devices that can stand in a header, glued together or not. Nearly all carry a digit; prose does not.
_NIC_NAMES = re.compile(r"NIC\d+|mlx\d+_(?:bond_?)?\d+|[A-Za-z][A-Za-z_.:-]*\d[\w.:-]*")
#: A device that somebody gave a name of his own; believed only in a line that has the affinity columns as well.
_NIC_OWN_NAME = re.compile(r"[A-Za-z][\w.:-]*")
#: What is left of the affinity headers when a line was cut off.
_HEADER_REST = re.compile(r"(?:CPU|NUMA|GPU|ID|A(?:f(?:f(?:i(?:n(?:i(?:ty?)?)?)?)?)?)?)")
_NIC_LEGEND = re.compile(r"(?:^|[^\w\n])(NIC\d+)[ \t]*:[ \t]*(\S+)[ \t]*$", re.MULTILINE)
_BORDER = re.compile(r"[|\u2502\u2503]")
_CPU_LIST = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*,?")


@dataclass(frozen=True)
class Pair:
    """Two GPUs by index, ``a`` < ``b``. ``link`` as printed, null where it is not known."""

    a: int
    b: int
    link: str | None

    @property
    def path(self) -> str:
        return path_of(self.link)

    @property
    def nvlinks(self) -> int | None:
        """Number of NVLinks, 0 for a path without any, null where the link is not known."""
        return nvlinks_of_cell(self.link)

    def as_dict(self) -> dict[str, object]:
        return {"a": self.a, "b": self.b, "link": self.link, "nvlinks": self.nvlinks, "path": self.path}


@dataclass
class Matrix:
    """One parsed matrix.

    ``gpus`` are the indices in the header, ``pairs`` every unordered pair of them. ``nics`` are device names, from
    the legend where there is one. ``cpu_affinity`` (text), ``numa_affinity`` (int, or text for a range) and
    ``gpu_numa_id`` (int) have one item a GPU, null where the cell is blank or N/A. ``faults`` say what is missing or
    contradictory; ``is_peer`` marks a ``topo -p2p`` matrix, whose pairs hold OK, CNS and so on. ``strays`` are
    rows below a header that does not name them: it is then not whole (lines were broken), and no count holds.
    """

    gpus: list[int] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    nics: list[str] = field(default_factory=list)
    cpu_affinity: list[str | None] = field(default_factory=list)
    numa_affinity: list[int | str | None] = field(default_factory=list)
    gpu_numa_id: list[int | None] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    is_peer: bool = False
    strays: list[str] = field(default_factory=list)


def path_of(link: str | None) -> str:
    """The kind of path that a cell names, one of PATHS."""
    if link is None:
        return "unknown"
    if link.startswith("NV"):
        return "nvlink"
    if link == "X":
        return "self"
    return link.lower() if link.lower() in PATHS else "unknown"


def nvlinks_of_cell(link: str | None) -> int | None:
    """NVLinks that a cell names: 2 for NV2, 0 for a PCIe path, null for a blank or unknown cell."""
    path = path_of(link)
    if link is not None and path == "nvlink":
        return int(link[2:])
    return None if path == "unknown" else 0


# --- parsing ----------------------------------------------------------------------------------------------------------


@dataclass
class _Header:
    prefix: str
    start: int
    line: str
    gpus: list[str]
    nics: list[str]
    affinities: list[str]


def parse(text: str) -> list[Matrix]:
    """Every matrix in ``text``, link matrices and peer matrices, in the order in which they stand there."""
    lines = [_unframed(line) for line in clean(text).split("\n")]
    legend = dict(_NIC_LEGEND.findall("\n".join(lines)))
    matrices = []
    at = 0
    while at < len(lines):
        header = _read_header(lines[at])
        at += 1
        if header is None or not _own_names_have_rows(header, lines[at:]):
            continue
        rows: list[str] = []
        gap = 0
        while at < len(lines) and gap < 3 and not _is_legend(lines[at]):
            if _read_header(lines[at]) is not None:
                break
            if _row_of(lines[at], header) is not None:
                rows.append(lines[at])
                gap = 0
            elif lines[at].strip() and not _is_nic_row(lines[at], header):
                gap += 1
            at += 1
        if not rows:
            continue
        tail = "\n".join(lines[at : at + 24])
        matrices.append(_build(header, rows, legend, tail))
    return matrices


def _unframed(line: str) -> str:
    """A line of a table with drawn borders without them, at the same width."""
    return _BORDER.sub(" ", line) if len(_BORDER.findall(line)) > 2 else line


def _is_legend(line: str) -> bool:
    return bool(re.match(r"^\W*(?:NIC )?Legend:", line))


def _read_header(line: str) -> _Header | None:
    """The columns of a header line, or null for any other line."""
    first = _HEADER.search(line)
    if first is None:
        return None
    body = line[first.start() :].rstrip()
    spans = sorted(
        (match.start(), name) for name, pattern in _AFFINITY_HEADERS for match in [pattern.search(body)] if match
    )
    columns = body[: spans[0][0]] if spans else body
    gpus: list[str] = []
    rest = columns.lstrip()
    while match := _GPU_NAME.match(rest):
        gpus.append(match.group())
        rest = rest[match.end() :].lstrip()
    numbers = [int(name[3:]) for name in gpus]
    if numbers != sorted(set(numbers)):
        return None
    nics: list[str] = []
    for word in rest.split():
        if _HEADER_REST.fullmatch(word):
            continue
        if spans and _NIC_OWN_NAME.fullmatch(word) and not re.search(r"\d", word) and not _is_cell(word):
            nics.append(word)
            continue
        if not _NIC_NAMES.match(word) or _is_cell(word):
            # A row of the matrix, or prose that happens to begin with a GPU's name.
            return None
        nics.extend(_NIC_NAMES.findall(word))
    if len(gpus) < 2 and not nics and not spans and line[: first.start()].strip():
        return None
    return _Header(line[: first.start()], first.start(), line, gpus, nics, [name for _, name in spans])


def _own_names_have_rows(header: _Header, below: Sequence[str]) -> bool:
    """Whether the columns that have a name of somebody's own have a row of this name as well, as devices have."""
    own = [name for name in header.nics if not re.search(r"\d", name)]
    text = "\n".join(below) if own else ""
    return all(re.search(rf"(?<![\w-]){re.escape(name)}\s+(?:{_LINK_WORD}|{_PEER_WORD})\b", text) for name in own)


def _is_cell(word: str) -> bool:
    return bool(_LINKS.fullmatch(word) or _PEER.fullmatch(word))


def _row_of(line: str, header: _Header) -> tuple[str, str] | None:
    """Label and rest of a GPU row of this matrix, or null."""
    match = _ROW.search(line)
    if match is None:
        return None
    prefix = line[: match.start()].strip()
    # A log puts the same kind of prefix (time, host, stream) before every line; a matrix without one has bare rows.
    if prefix and not header.prefix.strip():
        return None
    return match.group(1), line[match.end() :]


def _is_nic_row(line: str, header: _Header) -> bool:
    words = line[len(header.prefix) if header.prefix.strip() else 0 :].split()
    return bool(words) and any(words[0].startswith(nic) for nic in header.nics)


def _build(header: _Header, rows: Sequence[str], legend: dict[str, str], tail: str) -> Matrix:
    cells: dict[str, list[str | None]] = {}
    affinity: dict[str, dict[str, str | None]] = {}
    faults: list[Fault] = []
    labels: list[str] = []
    peer = _looks_like_peer(header, rows, tail)
    for line in rows:
        found = _row_of(line, header)
        if found is None:
            continue
        label, rest = found
        labels.append(label)
        if label not in header.gpus:
            faults.append(_truncated(label, f"a row {label} stands below a header that names {_names(header.gpus)}"))
            continue
        values, remainder = _link_cells(label, rest, header, peer)
        if label in cells:
            if cells[label] != values:
                faults.append(_contradictory(label, f"two different rows for {label}"))
            continue
        cells[label] = values
        affinity[label] = _affinity_cells(line, remainder, header)
    matrix = Matrix(gpus=[int(name[3:]) for name in header.gpus], is_peer=peer)
    missing = [name for name in header.gpus if name not in cells]
    if missing:
        faults.append(_truncated("topo -m", f"the header names {len(header.gpus)} GPUs, no row for {_names(missing)}"))
    for label, values in cells.items():
        faults.extend(_check_row(label, values, header.gpus))
    for left, right in combinations(range(len(header.gpus)), 2):
        pair, pair_faults = _pair(header.gpus, left, right, cells)
        matrix.pairs.append(pair)
        faults.extend(pair_faults)
    matrix.nics = [legend.get(name, name) for name in header.nics]
    for name in header.gpus:
        cell = affinity.get(name, {})
        cpus = reading(cell.get("cpu")).value
        matrix.cpu_affinity.append(None if cpus is None or _LINKS.fullmatch(cpus) else cpus)
        matrix.numa_affinity.append(_numa(cell.get("numa")))
        node = _numa(cell.get("gpu_numa"))
        matrix.gpu_numa_id.append(node if isinstance(node, int) else None)
    matrix.strays = [label for label in labels if label not in header.gpus]
    matrix.faults = list(dict.fromkeys(faults))
    return matrix


def _looks_like_peer(header: _Header, rows: Sequence[str], tail: str) -> bool:
    """True for ``topo -p2p``: its cells, or for a single GPU (only an X) its legend."""
    words = [word for line in rows for word in line.split()[1:]]
    if any(_LINK.fullmatch(word) and word != "X" for word in words):
        return False
    if any(_PEER.fullmatch(word) and word != "X" for word in words):
        return True
    return not header.affinities and "= Status Ok" in tail


def _link_cells(label: str, rest: str, header: _Header, peer: bool) -> tuple[list[str | None], str]:
    """The cells of the GPU columns (null: blank, absent) and what follows the link columns."""
    word = _PEER_WORD if peer else _LINK_WORD
    one = re.compile(rf"(?:{word})")
    glued = re.compile(rf"(?:{word}){{2,}}")
    wanted = len(header.gpus) + len(header.nics)
    own = header.gpus.index(label)
    scan = _split_cells(rest, one, glued)
    tabbed = "\t" in rest
    kept: list[tuple[str | None, int]] = []
    for at, (text, end) in enumerate(scan):
        if text and not one.fullmatch(text):
            later = [word for word, _ in scan[at + 1 :] if word]
            missing = wanted - sum(cell is not None for cell, _ in kept)
            is_word = reading(text).value is None and missing > 0 and _stands_for_a_link(later, one, header)
            if _CPU_LIST.fullmatch(text) or (reading(text).value is None and not is_word):
                # The affinity columns begin here.
                break
        kept.append((text or None, end))
    solid = [cell for cell in kept if cell[0] is not None]
    # A blank between tabs is a blank cell when cells are missing and the X then stands in its own column; otherwise it
    # is only a doubled tab.
    is_blank_cell = tabbed and len(solid) < wanted and own < len(kept) and kept[own][0] == "X"
    columns = kept if is_blank_cell else solid
    gpu_cells: list[str | None] = [cell for cell, _ in columns[: len(header.gpus)]]
    while len(gpu_cells) < len(header.gpus):
        gpu_cells.append("")
    end = 0
    used = columns[:wanted]
    while used and used[-1][0] is None:
        used = used[:-1]
    if used:
        end = used[-1][1]
    return gpu_cells, rest[end:]


def _stands_for_a_link(later: Sequence[str], one: re.Pattern[str], header: _Header) -> bool:
    """Whether a word for "no value" is in a link column: links or a CPU list follow, or all the other columns do."""
    return (
        any(one.fullmatch(word) for word in later)
        or len(later) >= len(header.affinities)
        or (bool(later) and bool(_CPU_LIST.fullmatch(later[0])) and not is_index(later[0]))
    )


def _split_cells(rest: str, one: re.Pattern[str], glued: re.Pattern[str]) -> list[tuple[str, int]]:
    """Cells with the position where each ends; a blank between tabs is an empty text."""
    found: list[tuple[str, int]] = []
    start = 1 if rest.startswith("\t") else 0
    if "\t" in rest:
        fields: list[tuple[str, int]] = []
        at = start
        for part in rest[start:].split("\t"):
            words = list(re.finditer(r"\S+", part))
            if not words:
                fields.append(("", at + len(part)))
            fields.extend((word.group(), at + word.end()) for word in words)
            at += len(part) + 1
    else:
        fields = [(word.group(), word.end()) for word in re.finditer(r"\S+", rest)]
    for text, end in fields:
        if glued.fullmatch(text):
            pieces = [match.group() for match in one.finditer(text)]
            for index, piece in enumerate(pieces):
                found.append((piece, end - sum(map(len, pieces[index + 1 :]))))
        else:
            found.append((text, end))
    return found


def _check_row(label: str, values: Sequence[str | None], gpus: Sequence[str]) -> list[Fault]:
    own = gpus.index(label)
    faults = []
    absent = [gpus[index] for index, value in enumerate(values) if value == ""]
    if absent:
        faults.append(_truncated(label, f"the row of {label} ends before the column of {_names(absent)}"))
    if own < len(values) and values[own] not in {"X", ""}:
        faults.append(_contradictory(label, f"the row of {label} has {values[own] or 'a blank'} in its own column"))
    strays = [gpus[index] for index, value in enumerate(values) if value == "X" and index != own]
    if strays:
        faults.append(_contradictory(label, f"the row of {label} has X in the column of {_names(strays)}"))
    return faults


def _pair(gpus: Sequence[str], left: int, right: int, cells: dict[str, list[str | None]]) -> tuple[Pair, list[Fault]]:
    """One pair from both halves of the matrix; unknown when they differ."""
    one = cells[gpus[left]][right] if gpus[left] in cells else ""
    two = cells[gpus[right]][left] if gpus[right] in cells else ""
    a, b = int(gpus[left][3:]), int(gpus[right][3:])
    subject = f"GPU{a}-GPU{b}"
    empty = next((cell for cell in (one, two) if cell and reading(cell).value is None), None)
    if empty is not None:
        return Pair(a, b, None), [_cell_unknown(subject, empty)]
    if one and two and one != two:
        message = f"GPU{a} says {one} of GPU{b}, GPU{b} says {two} of GPU{a}"
        return Pair(a, b, None), [_contradictory(subject, message)]
    value = one or two or None
    if value == "X":
        return Pair(a, b, None), []
    if value is not None and not (_LINK.fullmatch(value) or _PEER.fullmatch(value)):
        return Pair(a, b, None), [_cell_unknown(subject, value)]
    if one is None and two is None:
        return Pair(a, b, None), [_truncated(subject, f"both cells of GPU{a} and GPU{b} are blank")]
    return Pair(a, b, value), []


def _cell_unknown(subject: str, value: str) -> Fault:
    return GPU.fault(
        "topology_cell_unknown",
        subject,
        f"the cell reads {value[:20]!r}, which no known driver prints",
        "run `nvidia-smi topo -m` by hand; if it really prints this, report the output",
    )


def _affinity_cells(line: str, remainder: str, header: _Header) -> dict[str, str | None]:
    """CPU list, NUMA node and GPU NUMA id of a row, by name; absent or blank ones are left out."""
    names = header.affinities
    if not names or not remainder.strip():
        return {}
    if "\t" in remainder:
        parts = [part.strip() for part in remainder.split("\t")][1:]
        return _by_tabs(parts, names)
    words = [(match.group(), match.start()) for match in re.finditer(r"\S+", remainder)]
    if len(words) >= len(names):
        return {name: word for name, (word, _) in zip(names, words, strict=False)}
    return _by_position(line, len(line) - len(remainder), words, header)


def _by_tabs(parts: list[str], names: list[str]) -> dict[str, str | None]:
    """Raw driver output. Between NUMA affinity and GPU NUMA ID it prints two tabs."""
    if "gpu_numa" in names and len(parts) > len(names) and parts[2] == "":
        parts = parts[:2] + parts[3:]
    # Branch 460 prints two tabs before NUMA affinity as well.
    while len(parts) > len(names) and "" in parts[1:]:
        parts.pop(parts.index("", 1))
    solid = [part for part in parts if part]
    if len(parts) < len(names) and len(solid) == 1 and not _CPU_LIST.fullmatch(solid[0]):
        return {names[-1]: solid[0]}
    return {name: part for name, part in zip(names, parts, strict=False) if part}


def _by_position(line: str, offset: int, words: list[tuple[str, int]], header: _Header) -> dict[str, str | None]:
    """Fewer words than columns between spaces: a blank column. Decided by alignment with the header or by tab stops."""
    starts = {}
    for name, pattern in _AFFINITY_HEADERS:
        match = pattern.search(header.line)
        if match:
            starts[match.start()] = name
    result: dict[str, str | None] = {}
    stops = offset
    index = 0
    for word, at in words:
        column = offset + at
        if column in starts:
            result[starts[column]] = word
            index = header.affinities.index(starts[column]) + 1
        else:
            # One tab stop (8 columns) a cell, as a terminal expands them.
            index += max(0, column // 8 - stops // 8 - 1)
            if index >= len(header.affinities):
                index = len(header.affinities) - 1
            name = header.affinities[index]
            if name == "cpu" and not _CPU_LIST.fullmatch(word) and reading(word).value is None and len(words) == 1:
                name = header.affinities[-1]
            result.setdefault(name, word)
            index += 1
        stops = column + len(word)
    return result


def _numa(text: str | None) -> int | str | None:
    value = reading(text).value if text is not None else None
    if value is None or not _CPU_LIST.fullmatch(value):
        return None
    return int(value) if is_index(value) else value


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def _truncated(subject: str, message: str) -> Fault:
    return GPU.fault("topology_truncated", subject, message, "run `nvidia-smi topo -m` again and give the whole output")


def _contradictory(subject: str, message: str) -> Fault:
    return GPU.fault(
        "topology_contradictory",
        subject,
        message,
        "run `nvidia-smi topo -m` again; if it says the same, the output was altered or the driver is at fault: reboot",
    )


def link_matrix(text: str) -> tuple[Matrix | None, list[Fault]]:
    """The link matrix of ``topo -m``, or null and the fault that says what stands there instead (none: nothing).

    A matrix whose header is not whole is none: how many GPUs there are cannot be known.
    Where a text holds several link matrices that differ, none is chosen: which one holds cannot be known.
    """
    matrices = parse(text)
    links = [matrix for matrix in matrices if not matrix.is_peer]
    if not links:
        if matrices:
            return None, [
                GPU.fault(
                    "topology_not_links",
                    "topo -m",
                    "the answer is a peer-to-peer matrix (OK, CNS, ...), not a link matrix",
                    "give the output of `nvidia-smi topo -m`",
                )
            ]
        return None, []
    first = links[0]
    if broken := next((matrix for matrix in links if matrix.strays), None):
        named = _names(f"GPU{gpu}" for gpu in broken.gpus)
        rows = _names(dict.fromkeys(broken.strays))
        return None, [
            _truncated("topo -m", f"rows for {rows} stand below a header that names {named}: it is not whole")
        ]
    if any((other.gpus, other.pairs) != (first.gpus, first.pairs) for other in links[1:]):
        fault = _contradictory("topo -m", f"{len(links)} matrices in one answer that differ")
        first.pairs = [Pair(pair.a, pair.b, None) for pair in first.pairs]
        first.faults.append(fault)
    return first, list(first.faults)


def peer_matrix(text: str) -> Matrix | None:
    """The matrix of ``topo -p2p``, or null."""
    return next((matrix for matrix in parse(text) if matrix.is_peer), None)


# --- the graph --------------------------------------------------------------------------------------------------------


def subset_pairs(pairs: Iterable[Pair], gpus: Iterable[int]) -> list[Pair]:
    """The pairs whose two ends are both in ``gpus``."""
    chosen = set(gpus)
    return [pair for pair in pairs if pair.a in chosen and pair.b in chosen]


def fully_connected(pairs: Sequence[Pair]) -> bool | None:
    """True when every pair has an NVLink; null for a single card (no pairs) and where a missing cell decides."""
    if not pairs:
        return None
    links = [pair.nvlinks for pair in pairs]
    if any(link == 0 for link in links):
        return False
    return None if any(link is None for link in links) else True


def min_links(pairs: Sequence[Pair]) -> int | None:
    """The fewest NVLinks of any pair; null for a single card or where a cell is not known."""
    links = [pair.nvlinks for pair in pairs]
    known = [link for link in links if link is not None]
    return min(known) if known and len(known) == len(links) else None


def islands(gpus: Sequence[int], pairs: Iterable[Pair]) -> list[list[int]]:
    """The GPUs split into groups in which every pair has an NVLink, the largest group taken first.

    Of several groups of the same size, the one with the most links comes first, then the one with the lowest indices.
    A GPU without a partner is a group of its own. Unknown pairs count as not linked.
    """
    linked: dict[int, dict[int, int]] = {gpu: {} for gpu in gpus}
    for pair in pairs:
        if pair.nvlinks and pair.a in linked and pair.b in linked:
            linked[pair.a][pair.b] = linked[pair.b][pair.a] = pair.nvlinks
    left = set(gpus)
    groups: list[list[int]] = []
    while left:
        cliques = _cliques(left, linked)
        best = max(cliques, key=lambda group: (len(group), _weight(group, linked), [-gpu for gpu in group]))
        groups.append(best)
        left -= set(best)
    return sorted(groups, key=lambda group: (-len(group), group))


def _weight(group: Sequence[int], linked: dict[int, dict[int, int]]) -> int:
    return sum(linked[a][b] for a, b in combinations(group, 2))


def _cliques(nodes: set[int], linked: dict[int, dict[int, int]]) -> list[list[int]]:
    """Maximal cliques (Bron-Kerbosch with a pivot)."""
    found: list[list[int]] = []

    def grow(clique: set[int], candidates: set[int], done: set[int]) -> None:
        if not candidates and not done:
            found.append(sorted(clique))
            return
        pivot = max(sorted(candidates | done), key=lambda node: len(candidates & linked[node].keys()))
        for node in sorted(candidates - linked[pivot].keys()):
            near = linked[node].keys()
            grow(clique | {node}, candidates & near, done & near)
            candidates = candidates - {node}
            done = done | {node}

    grow(set(), set(nodes), set())
    return found


def recommend_split_mode(gpus: Sequence[int], pairs: Sequence[Pair]) -> tuple[str | None, str]:
    """How llama-server should split a model over these GPUs, and why.

    ``none`` for one card, otherwise ``layer``: it works for every architecture and needs little traffic between the
    cards. On a full NVLink mesh the reason names ``tensor`` as an option for many parallel requests (measured on
    2 x H200, 30B-A3B Q4_K: 1007 against 910 tokens/s at 8 requests, but 212 against 275 at one). ``row`` is never
    recommended: the engine's CUDA backend no longer has it. Null when the number of GPUs is not known.
    """
    if not gpus:
        return None, "the number of GPUs is not known"
    if len(gpus) == 1:
        return "none", "a single GPU: nothing to split"
    state = fully_connected(pairs)
    if state:
        return "layer", (
            "NVLink joins every pair. layer works for every model architecture and is fastest for single requests; "
            "tensor can give more tokens per second in all for many requests at once, where the architecture allows it"
        )
    if state is None:
        return "layer", "the links are not all known; layer needs the least traffic between GPUs"
    return "layer", (
        "not every pair has an NVLink, so tensor would wait for the slowest path; layer needs the least traffic "
        "between GPUs"
    )
