# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Kernel logs from public reports, each read as its second line says."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.nvidia import kernel_log
from ansible_collections.volta.llm.plugins.module_utils.nvidia.xid import KINDS, XIDS, explain
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = sorted((Path(__file__).parent.parent / "fixtures/nvidia-driver/kernel-log").glob("*.txt"))


def reading(log: kernel_log.KernelLog) -> str:
    """The form of the second line of a fixture."""
    parts = []
    if log.lost:
        parts.append(f"lost={','.join(log.lost)}")
    if log.lost_without_xid:
        parts.append(f"lost_without_xid={','.join(log.lost_without_xid)}")
    if log.mismatch:
        parts.append(f"mismatch={','.join(log.mismatch)}")
    if log.init_failed:
        parts.append(f"init_failed={','.join(log.init_failed)}")
    if log.unsupported_by_open:
        parts.append(f"unsupported_by_open={','.join(log.unsupported_by_open)}")
    if log.probe_not_called is not None:
        parts.append(f"probe_not_called={log.probe_not_called}")
    if log.xids:
        words = [f"{e.number}@{e.bus_id}" + (f"x{e.count}" if e.count > 1 else "") for e in log.xids]
        parts.append(f"xids={','.join(words)}")
    return "; ".join(parts)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_public_log_is_read_as_its_second_line_says(path):
    _, expected, text = path.read_text().split("\n", 2)
    assert reading(kernel_log.parse(text)) == expected.removeprefix("# expect:").strip()


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_the_same_log_from_kmsg_reads_the_same(path):
    """/dev/kmsg carries the texts with another prefix, and line breaks inside a message as an escape."""
    _, expected, text = path.read_text().split("\n", 2)
    lines = [kernel_log._prefix(line).text.strip() for line in text.splitlines()]
    kmsg = "".join(f"4,{n},{n * 1000},-;{line}\n" for n, line in enumerate(lines, 1)).replace("#012", "\\x0a")
    log = kernel_log.parse(kmsg)
    assert reading(log) == expected.removeprefix("# expect:").strip()
    assert all(event.first.seconds is not None for event in log.xids)


def test_process_and_times_of_an_event():
    log = kernel_log.parse(
        "[  100.5] NVRM: Xid (PCI:0000:1a:00): 31, pid=4242, name=python3, Ch 00000008, intr 10000000. MMU Fault\n"
        "[  200.5] NVRM: Xid (PCI:0000:1a:00): 31, pid=4243, name=python3, Ch 00000008, intr 10000000. MMU Fault\n"
    )
    event = log.xids[0].as_dict()
    assert (event["count"], event["process"], event["first_s"], event["last_s"]) == (2, "python3 (4242)", 100.5, 200.5)
    assert event["kind"] == "program"


def test_unknown_process_is_null_not_a_name():
    log = kernel_log.parse("NVRM: Xid (PCI:0000:1a:00): 48, pid='<unknown>', name=<unknown>, DBE (double bit error)\n")
    assert log.xids[0].process is None


def test_a_lost_card_is_counted_once_whatever_says_so():
    log = kernel_log.parse(
        "NVRM: Xid (PCI:0000:1d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "NVRM: GPU 0000:1d:00.0: GPU has fallen off the bus.\n"
        "NVRM: GPU 0000:1d:00.0: GPU is on Board 0000000000000.\n"
    )
    assert log.lost == ["0000:1d:00.0"]
    assert log.lost_without_xid == []


@pytest.mark.parametrize(
    ("line", "rejected"),
    [
        ("[    5.1] Loading of module with unavailable key is rejected", True),
        ("[    5.1] Loading of unsigned module is rejected", True),
        ("[    5.1] Lockdown: modprobe: unsigned module loading is restricted; see man kernel_lockdown.7", False),
        ("nvidia: module verification failed: signature and/or required key missing - tainting kernel", False),
    ],
)  # fmt: skip
def test_refused_modules(line, rejected):
    """A failed verification only taints the kernel; the lockdown message names no module."""
    assert kernel_log.parse(line).module_rejected is rejected


def test_every_number_of_the_issue_has_a_row():
    wanted = {13, 31, 32, 38, 43, 45, 48, 56, 57, 61, 62, 63, 64, 68, 69, 74, 79, 92, 94, 95, 119}
    assert wanted <= set(XIDS)
    for row in XIDS.values():
        assert row.kind in KINDS
        assert row.meaning
        assert row.cause
        assert row.remedy.endswith(".")
        assert row.source


@pytest.mark.parametrize(
    ("number", "action"), [(79, "replace"), (64, "replace"), (48, "reset"), (62, "reset"), (31, "look"), (45, "look")]
)
def test_what_a_number_asks_for(number, action):
    assert explain(number).action == action


def test_a_number_that_is_not_known_says_so():
    assert explain(777).meaning == "not in our table"
    assert explain(777).action == "look"


@given(st.lists(st.sampled_from([path.read_text().split("\n", 2)[2] for path in FIXTURES]), max_size=4), st.integers())
def test_cut_and_mixed_logs_never_raise(texts, at):
    text = "".join(texts)
    log = kernel_log.parse(text[: at % (len(text) + 1)])
    for event in log.xids:
        assert event.count >= 1
        assert f"{event.number}" in text


@given(st.text())
def test_any_text_is_read_without_an_exception(text):
    kernel_log.parse(text)
    kernel_log.parse(f"NVRM: {text}\nNVRM: Xid (PCI:{text}): {text}")
