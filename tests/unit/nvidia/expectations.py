# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Recorded outputs of nvidia-smi and the reading that their second line gives.

A fixture begins with two lines that are not part of the output::

    # source: where it comes from
    # expect: KIND; key=value; key=value

KIND is topo, p2p, nvlink, csv, xml, error, refused or help. ``null`` stands for "not known", ``none`` for an empty
list.

topo: ``gpus`` count; ``pairs`` list of ``A-B:LINK``, where ``all:LINK`` and ``rest:LINK`` stand for pairs not named;
``pair A-B``; ``full`` yes, no, single or unknown; ``min`` links; ``islands`` as ``0,1 2,3``; ``nics``; ``cpu``
separated by ``|`` (``-``: blank); ``numa`` and ``gpu_numa`` separated by ``,``; ``subset A,B,C`` with the values of
``full``. p2p: ``gpus``, ``pairs``, ``denied`` pairs. nvlink: ``gpus`` indices, ``active`` and ``expected`` numbers of
links, ``inactive`` as ``GPU:LINK,LINK``, ``rate`` of every active link in GB/s. csv and xml: ``fields`` of the query
where the output has no header, ``gpus`` indices, ``usable`` GPUs, ``driver``, ``gpuN.NAME`` a value of GPU N (by index,
by place where there is no index column), numbers as such, yes/no for switches. error: ``state`` of gpu_inventory,
``subject`` of the first fault. refused: ``fields``. help: no key. All: ``faults`` codes, most serious
first; ``none`` when the key is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures" / "nvidia-smi"

#: Keys that a kind may use; anything else is a mistake in the fixture.
KEYS = {
    "topo": {"gpus", "pairs", "full", "min", "islands", "nics", "cpu", "numa", "gpu_numa", "faults"},
    "p2p": {"gpus", "pairs", "denied", "faults"},
    "nvlink": {"gpus", "active", "expected", "inactive", "rate", "faults"},
    "csv": {"fields", "gpus", "usable", "driver", "faults"},
    "xml": {"gpus", "usable", "driver", "faults"},
    "error": {"state", "subject", "faults"},
    "refused": {"fields"},
    "help": set(),
}
#: Keys with a name in them, by kind.
OPEN_KEYS = {"topo": ("subset ", "pair "), "csv": ("gpu",), "xml": ("gpu",)}


@dataclass(frozen=True)
class Recorded:
    """One fixture: ``want`` the parsed expectation, ``output`` the text of the tool."""

    name: str
    source: str
    kind: str
    want: dict[str, str]
    output: str

    def faults(self) -> list[str]:
        return items(self.want.get("faults", "none"))


def items(text: str) -> list[str]:
    """``a,b`` as a list; ``none`` is empty."""
    return [] if text == "none" else text.split(",")


def read(path: Path) -> Recorded:
    """Parse a fixture; a key that its kind does not have is an error: no expectation is lost to a typing slip."""
    source, expect, output = path.read_bytes().decode("utf-8").split("\n", 2)
    assert source.startswith("# source: "), path
    assert expect.startswith("# expect: "), path
    kind, *pairs = expect.removeprefix("# expect: ").split("; ")
    want = {}
    for pair in pairs:
        # "subset 0,1=yes" has a comma, not an equals sign, in its key.
        key, mark, value = pair.partition("=")
        assert mark, f"{path.name}: {pair!r} is not key=value"
        assert key in KEYS[kind] or key.startswith(OPEN_KEYS.get(kind, ("\n",))), f"{path.name}: unknown key {key!r}"
        assert key not in want, f"{path.name}: {key!r} twice"
        want[key] = value
    return Recorded(path.stem, source.removeprefix("# source: "), kind, want, output)


def load(*kinds: str) -> list[Recorded]:
    """All fixtures of these kinds."""
    return [recorded for recorded in map(read, sorted(FIXTURES.glob("*.txt"))) if recorded.kind in kinds]


def expand_pairs(text: str, gpus: int) -> dict[tuple[int, int], str]:
    """Every pair with its cell; ``all:`` and ``rest:`` fill those that are not named."""
    named: dict[tuple[int, int], str] = {}
    rest = None
    for item in [] if text == "none" else text.split(" "):
        ends, _, link = item.partition(":")
        if ends in {"all", "rest"}:
            rest = link
        else:
            a, b = map(int, ends.split("-"))
            named[a, b] = link
    for pair in combinations(range(gpus), 2):
        if pair not in named:
            assert rest is not None, f"{text}: pair {pair} has no expectation"
            named[pair] = rest
    return named


def connected(value: bool | None, gpus: int) -> str:
    """fully_connected in the words of the grammar."""
    if gpus == 1:
        assert value is None
        return "single"
    return {True: "yes", False: "no", None: "unknown"}[value]
