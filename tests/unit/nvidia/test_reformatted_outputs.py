# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What logs, tickets, terminals and other systems do to an output does not change its reading."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from ansible_collections.volta.llm.plugins.module_utils.nvidia import inventory, nvlink, topology

from tests.unit.nvidia.expectations import Recorded, load

ESC = "\x1b"


def underline_header(text: str) -> str:
    return re.sub(r"^(\s*)(GPU0.*)$", rf"\1{ESC}[4m\2{ESC}[0m", text, count=1, flags=re.MULTILINE)


def colour_everything(text: str) -> str:
    return re.sub(r"(\S+)", rf"{ESC}[1;32m\1{ESC}[0m", text)


def prefixed(prefix: str) -> Callable[[str], str]:
    return lambda text: "".join(prefix + line for line in text.splitlines(keepends=True))


def drawn(text: str) -> str:
    """Cells between bars, as in a table of a ticket; the first column is blank in the header."""
    lines = []
    for line in text.split("\n"):
        cells = re.split(r"\t+| {2,}", line.strip())
        lines.append(f"| {' | '.join(cells)} |" if re.fullmatch(r"(?:GPU|NIC|mlx)\w+", cells[0]) else line)
    return "\n".join(lines)


REFORMATTED: dict[str, Callable[[str], str]] = {
    "windows line ends": lambda text: text.replace("\n", "\r\n"),
    "old mac line ends": lambda text: text.replace("\n", "\r"),
    "byte order mark": lambda text: "\ufeff" + text,
    "indented by four": prefixed("    "),
    "indented by a tab": prefixed("\t"),
    "quoted": prefixed("> "),
    "log prefix": prefixed("2027-04-01T10:00:00Z host-7 gpu[211]: "),
    "underlined header": underline_header,
    "coloured cells": colour_everything,
    "colours without escape character": lambda text: colour_everything(text).replace(ESC, ""),
    "text around": lambda text: f"root@host:~# nvidia-smi topo -m\n{text}\nroot@host:~# uptime\n 10:00 up 3 days\n",
    "drawn as a table": drawn,
    "in a code block": lambda text: f"```\n{text}```\n",
    "trailing blanks": lambda text: text.replace("\n", "   \n"),
    "no-break spaces": lambda text: text.replace(" ", "\xa0"),
    "blank line between lines": lambda text: text.replace("\n", "\n\n"),
    "no final line end": lambda text: text.rstrip("\n"),
}

TOPOLOGIES = [recorded for recorded in load("topo") if recorded.want["gpus"] != "null"]


def by_name(recorded: Recorded) -> str:
    return recorded.name


def reading(text: str) -> tuple[object, ...]:
    matrix, faults = topology.link_matrix(text)
    assert matrix is not None
    return matrix.gpus, matrix.pairs, matrix.nics, [fault.code for fault in faults]


@pytest.mark.parametrize("how", REFORMATTED)
@pytest.mark.parametrize("recorded", TOPOLOGIES, ids=by_name)
def test_topology_reads_the_same(recorded: Recorded, how: str) -> None:
    assert reading(REFORMATTED[how](recorded.output)) == reading(recorded.output)


TABBED = [recorded for recorded in TOPOLOGIES if recorded.output.startswith("\t")]


@pytest.mark.parametrize("recorded", TABBED, ids=by_name)
def test_tabs_shown_as_spaces_read_the_same_with_affinities(recorded: Recorded) -> None:
    raw, _ = topology.link_matrix(recorded.output)
    shown, _ = topology.link_matrix(recorded.output.expandtabs(8))
    assert raw == shown


@pytest.mark.parametrize("recorded", TABBED, ids=by_name)
def test_lost_leading_tab_reads_the_same(recorded: Recorded) -> None:
    raw, _ = topology.link_matrix(recorded.output)
    cut, _ = topology.link_matrix(recorded.output.lstrip("\t"))
    assert raw == cut


@pytest.mark.parametrize("recorded", TABBED, ids=by_name)
def test_glued_cells_read_the_same(recorded: Recorded) -> None:
    """The tab between the first two NVLink or PCIe cells of a row is lost."""
    glued = re.sub(r"\t(NV\d+|SYS|NODE|PHB|PIX)\t(NV\d+|SYS|NODE|PHB|PIX)\t", r"\t\1\2\t", recorded.output, count=1)
    assert reading(glued) == reading(recorded.output)


@pytest.mark.parametrize("recorded", TABBED, ids=by_name)
def test_doubled_tabs_between_cells_read_the_same(recorded: Recorded) -> None:
    doubled = re.sub(r"^(GPU\d+\t.*?)\t(?=NV\d|SYS|NODE|PHB|PIX)", r"\1\t\t", recorded.output, flags=re.MULTILINE)
    assert reading(doubled) == reading(recorded.output)


LINK_STATES = ("windows line ends", "indented by four", "quoted", "coloured cells", "text around", "trailing blanks")


@pytest.mark.parametrize("how", LINK_STATES)
@pytest.mark.parametrize("recorded", load("nvlink"), ids=by_name)
def test_link_states_read_the_same(recorded: Recorded, how: str) -> None:
    assert nvlink.parse(REFORMATTED[how](recorded.output)) == nvlink.parse(recorded.output)


@pytest.mark.parametrize("how", ["windows line ends", "indented by four", "trailing blanks", "byte order mark"])
@pytest.mark.parametrize("recorded", load("csv", "xml"), ids=by_name)
def test_inventory_reads_the_same(recorded: Recorded, how: str) -> None:
    fields = recorded.want.get("fields", "").split(",")

    def gpus(text: str) -> list[inventory.Gpu]:
        return (inventory.parse_xml(text) if recorded.kind == "xml" else inventory.parse_csv(text, fields)).gpus

    assert gpus(REFORMATTED[how](recorded.output)) == gpus(recorded.output)
