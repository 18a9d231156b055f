# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the engine's own help text says it can do."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.volta.llm.plugins.module_utils.engine.capabilities import parse_help

HELP = Path(__file__).parents[1] / "fixtures" / "engine" / "llama-server-0.5.0-dev-help.txt"


def test_the_pinned_engine() -> None:
    found = parse_help(HELP.read_text(encoding="utf-8"))
    assert found.split_modes == ["none", "layer", "row", "tensor"]
    assert found.load_modes == ["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"]
    for flag in (
        "--model",
        "-m",
        "--ctx-size",
        "--parallel",
        "-np",
        "--api-key-file",
        "--metrics",
        "--no-webui",
        "-kvu",
    ):
        assert (flag in found.flags) == (flag in HELP.read_text(encoding="utf-8")), flag
    # Gone from this version; a unit that still has them would not start.
    for flag in ("--no-mmap", "--mlock", "--direct-io"):
        assert flag not in found.flags, flag
    assert found.flags == sorted(set(found.flags))


def test_values_and_prose_are_no_flags() -> None:
    text = (
        "-sm,   --split-mode {none,layer}        how to split, see --tensor-split for more\n"
        "                                        - none: use one\n"
        "-c,    --ctx-size N                     size; -1 is unlimited\n"
        "----- common params -----\n"
        "-fit,  --fit [on|off]                   adjust\n"
    )
    found = parse_help(text)
    assert found.flags == ["--ctx-size", "--fit", "--split-mode", "-c", "-fit", "-sm"]
    assert found.split_modes == ["none", "layer"]
    assert found.load_modes == []


def test_no_help_is_no_capability() -> None:
    found = parse_help("Illegal instruction\n")
    assert (found.flags, found.split_modes, found.load_modes) == ([], [], [])
