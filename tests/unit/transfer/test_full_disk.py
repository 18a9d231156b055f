# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A real file system that is full: a small one in memory, filled by someone else while the download runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.transfer import engine
from ansible_collections.volta.llm.plugins.module_utils.transfer.store import Places

from tests.unit.transfer.conftest import CONTENT, SHA256, Desk
from tests.unit.transfer.site import Exchange, Site

URL = "/model.gguf"
MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """The mount point of a file system of 28 MiB: the file of 22 MiB fits, with little room to spare."""
    folder = tmp_path / "small"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=28m", "tmpfs", str(folder)]
    mounted = subprocess.run(argv, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a file system can be mounted by root only: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the room that is left."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as handle, contextlib.suppress(OSError):
        while True:
            handle.write(bytes(64 * 1024))
    return filler


def test_full_midway_names_the_file_system_and_what_is_missing_and_goes_on_once_there_is_room(
    site: Site, small: Path
) -> None:
    desk = Desk(small / "models")
    desk.dest.parent.mkdir()

    def script(exchange: Exchange) -> None:
        # The room goes to someone else while the body is on its way.
        if exchange.number > 1:
            fill(small)
        exchange.proper(upto=9 * MIB if exchange.number == 1 else None)

    site.script = script
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL), connections=1)
    fault = caught.value.fault
    assert fault.code == "disk_full"
    assert fault.subject == str(small / "models")
    assert f"the file system at {small}: No space left on device" in fault.message
    assert "are missing" in fault.message
    assert "MB are free" in fault.message
    assert not desk.dest.exists()
    part = Places(desk.dest).part
    kept = part.stat().st_size
    # The last MiB made room for the record of the others.
    assert kept == 8 * MIB

    # Still full: told again, nothing lost.
    site.script = Exchange.proper
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL), connections=1)
    assert caught.value.fault.code == "disk_full"
    assert part.stat().st_size == kept

    (small / "filler").unlink()
    report = desk.order(site.url(URL))
    assert report.files[0].resumed_from > 0
    assert report.files[0].fetched == len(CONTENT) - report.files[0].resumed_from
    assert report.files[0].sha256 == SHA256
    assert desk.leftovers == {"model.gguf", "model.gguf.stamp.json"}


def test_full_from_the_start_fetches_nothing_where_only_the_answer_tells_the_size(site: Site, small: Path) -> None:
    desk = Desk(small / "models")
    desk.dest.parent.mkdir()
    (small / "other").write_bytes(bytes(20 * MIB))
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL))
    assert caught.value.fault.code == "disk_full"
    assert "23.1 MB are missing" in caught.value.fault.message
    assert len(site.asked) == 1
    assert not desk.dest.exists()


def test_what_a_failed_claim_would_keep_is_not_claimed(site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # ext4 keeps the blocks that it found before a claim failed; so room is looked at before.
    monkeypatch.setattr(engine, "_free", lambda place: len(CONTENT) - 1)
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL))
    assert caught.value.fault.code == "disk_full"
    part = Places(desk.dest).part
    assert not part.exists() or part.stat().st_blocks * 512 < MIB


def test_room_that_the_part_has_already_is_not_asked_for_again(
    site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.script = lambda exchange: exchange.proper(upto=15 * MIB) if exchange.number == 1 else exchange.status(404)
    desk.order(site.url(URL), connections=1)
    monkeypatch.setattr(engine, "_free", lambda place: 0)
    claimed = Places(desk.dest).part.stat().st_blocks * 512
    site.script = Exchange.proper
    if claimed >= len(CONTENT):
        # The whole was claimed by the first run.
        assert desk.order(site.url(URL)).files[0].changed
    else:
        with pytest.raises(FaultError) as caught:
            desk.order(site.url(URL))
        assert f"{(len(CONTENT) - claimed) / 1e6:.1f} MB are missing" in caught.value.fault.message


def test_where_a_folder_is_mounted(small: Path) -> None:
    (small / "a" / "b").mkdir(parents=True)
    assert engine.mount_of(small / "a" / "b") == str(small)
    assert engine.mount_of(Path("/proc/self")) == "/proc"
    assert engine.mount_of(Path("/")) == "/"


def test_the_type_of_a_file_system(small: Path) -> None:
    fd = os.open(small / "file", os.O_CREAT | os.O_RDWR)
    try:
        assert engine.filesystem_of(fd) == "tmpfs"
    finally:
        os.close(fd)
