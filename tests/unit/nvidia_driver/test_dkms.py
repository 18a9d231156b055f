# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""``dkms status`` from public reports, each read as its second line says."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.nvidia import dkms
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = sorted((Path(__file__).parent.parent / "fixtures/nvidia-driver/dkms").glob("*.txt"))


def reading(status: dkms.DkmsStatus) -> str:
    parts = []
    for entry in status.entries:
        words = [entry.name, entry.version, entry.kernel or "-", entry.state, "built" if entry.built else "-"]
        parts.append(" ".join(words + (["differs"] if entry.differs else [])))
    if status.messages:
        parts.append(f"messages={len(status.messages)}")
    return "; ".join(parts)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_public_status_is_read_as_its_second_line_says(path):
    _, expected, text = path.read_text().split("\n", 2)
    assert reading(dkms.parse(text.splitlines())) == expected.removeprefix("# expect:").strip()


def test_other_drivers_of_nvidia_are_not_the_gpu_driver():
    status = dkms.parse(["nvidia-fs/2.17.5, 5.15.0-91-generic, x86_64: installed", "nvidia-peermem/1.3: added"])
    assert status.entries == []


@given(st.lists(st.text()))
def test_any_text_is_read_without_an_exception(lines):
    for entry in dkms.parse(lines).entries:
        assert entry.name.startswith("nvidia")
