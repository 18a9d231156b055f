# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Replaced files that a process still has mapped: a real process, real files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.serving.mapped import all_shards, outdated

HOLD = """
import mmap, sys
files = [open(path, "rb") for path in sys.argv[1:]]
held = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
print("mapped", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(*paths: Path) -> Iterator[int]:
    """The pid of a process that has these files mapped."""
    argv = [sys.executable, "-c", HOLD, *map(str, paths)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        yield process.pid
        process.communicate()


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    paths = [Path(path) for path in all_shards(str(tmp_path / "a model-00001-of-00002.gguf"))]
    for path in paths:
        # Small ones are shorter than a page.
        path.write_bytes(b"GGUF")
    return paths


def test_the_files_on_the_disk(shards: list[Path]) -> None:
    with holding(*shards) as pid:
        assert outdated(pid, [str(path) for path in shards]) == []


@pytest.mark.parametrize("aside", [True, False], ids=["renamed", "deleted"])
def test_a_replaced_shard(shards: list[Path], aside: bool) -> None:
    paths = [str(path) for path in shards]
    with holding(*shards) as pid:
        new = shards[1].with_suffix(".part")
        new.write_bytes(b"GGUF")
        if aside:
            shards[1].rename(f"{shards[1]}.corrupt")
        new.rename(shards[1])
        assert outdated(pid, paths) == [paths[1]]
    with holding(*shards) as pid:
        assert outdated(pid, paths) == []


def test_a_link_that_leads_elsewhere_now(shards: list[Path], tmp_path: Path) -> None:
    """What the process has mapped is then a file of another name, which only its start's time tells."""
    link = tmp_path / "link.gguf"
    link.symlink_to(shards[0])
    with holding(link) as pid:
        assert outdated(pid, [str(link)]) == []


def test_what_is_not_known_is_no_finding(shards: list[Path]) -> None:
    with holding(shards[0]) as pid:
        assert outdated(pid, [str(shards[1])]) == []
        shards[0].unlink()
        assert outdated(pid, [str(shards[0])]) == []
    assert outdated(pid, [str(shards[1])]) == []


def test_the_files_of_a_model() -> None:
    assert all_shards("/m/x.gguf") == ["/m/x.gguf"]
    assert all_shards("/m/x-00001-of-00002.gguf") == ["/m/x-00001-of-00002.gguf", "/m/x-00002-of-00002.gguf"]
