# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What was proved stays proved only while everything that the proof depends on is as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.apt import proved
from ansible_collections.volta.llm.plugins.module_utils.apt.policy import Policy
from ansible_collections.volta.llm.plugins.module_utils.apt.transaction import Request
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine

REQUEST = Request(action="unattended_upgrade")
POLICY = Policy(forbidden=["linux-image-generic"])


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, "etc/apt/apt.conf.d/52hold", 'Unattended-Upgrade::Package-Blacklist { "linux-"; };\n')
    put(tmp_path, "etc/apt/preferences.d/driver", "Package: nvidia-*\n")
    put(tmp_path, "var/lib/apt/lists/archive_InRelease", "Date: today\n")
    put(tmp_path, "var/lib/dpkg/status", "Package: linux-image-generic\nStatus: hold ok installed\n")
    return tmp_path


def value(root: Path, request: Request = REQUEST, policy: Policy = POLICY) -> str:
    return proved.fingerprint(Machine(str(root)), request, policy)


def test_the_same_question_on_the_same_machine_has_the_same_answer(root: Path, tmp_path: Path) -> None:
    record = tmp_path / "var/lib/volta-llm/proof.json"
    assert not proved.holds(record, value(root))
    proved.keep(record, value(root))
    # Objects made anew, and a lock that apt takes for every look.
    put(root, "var/lib/apt/lists/lock", "")
    assert proved.holds(
        record, value(root, Request(action="unattended_upgrade"), Policy(forbidden=["linux-image-generic"]))
    )


def renew(root: Path) -> None:
    os.utime(root / "var/lib/apt/lists/archive_InRelease", (1, 1))


CHANGES: dict[str, Callable[[Path], None]] = {
    "a hold released": lambda root: put(root, "var/lib/dpkg/status", "Status: install ok installed\n"),
    "the blacklist edited": lambda root: put(root, "etc/apt/apt.conf.d/52hold", "\n"),
    "a setting more": lambda root: put(root, "etc/apt/apt.conf.d/99local", "APT::Get::Assume-Yes true;\n"),
    "a pin gone": lambda root: (root / "etc/apt/preferences.d/driver").unlink(),
    "other package lists": lambda root: put(root, "var/lib/apt/lists/archive_InRelease", "Date: tomorrow\n"),
    "package lists of the same size": renew,
    "one list more": lambda root: put(root, "var/lib/apt/lists/other_InRelease", ""),
    "marked as automatic": lambda root: put(root, "var/lib/apt/extended_states", "Package: innocent\n"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_anything_else_on_the_machine_asks_again(root: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    record = tmp_path / "proof.json"
    proved.keep(record, value(root))
    change(root)
    assert not proved.holds(record, value(root))


def test_another_question_asks_again(root: Path) -> None:
    values = {
        value(root),
        value(root, replace(REQUEST, action="dist_upgrade")),
        value(root, policy=Policy(forbidden=["linux-image-generic", "nvidia-driver-535"])),
        value(root, policy=Policy(forbidden=["linux-image-generic"], allow_held=True)),
    }
    assert len(values) == 4


@pytest.mark.parametrize("text", ["", "[]", '{"fingerprint": null}', "{"])
def test_a_record_that_says_nothing_proves_nothing(root: Path, tmp_path: Path, text: str) -> None:
    record = tmp_path / "proof.json"
    record.write_text(text, encoding="utf-8")
    assert not proved.holds(record, value(root))


def test_where_no_record_can_be_written_there_is_none(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    proved.keep(tmp_path / "file" / "proof.json", value(root))
    assert (tmp_path / "file").read_text() == ""
