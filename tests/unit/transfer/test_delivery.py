# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is on disk before, during and after: stamps, locks, parts, wrong files, sets, interrupted runs."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import signal
import stat as stat_module
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.progress import read_progress
from ansible_collections.volta.llm.plugins.module_utils.transfer import deliver as deliver_module
from ansible_collections.volta.llm.plugins.module_utils.transfer.deliver import Delivery, Wanted
from ansible_collections.volta.llm.plugins.module_utils.transfer.sources import Source
from ansible_collections.volta.llm.plugins.module_utils.transfer.store import Lock, Places, Ranges, State
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gguf.build import real
from tests.unit.transfer.conftest import CONTENT, SHA256, Desk
from tests.unit.transfer.site import Exchange, Site

URL = "/model.gguf"
ROOT = Path(__file__).parents[3]
MIB = 1 << 20


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# -- a second run ------------------------------------------------------------------------------------------------------


def test_a_second_run_asks_nobody_and_reads_no_content(site: Site, desk: Desk) -> None:
    desk.order(site.url(URL))
    asked = len(site.asked)
    # Bytes changed behind the stamp's back (mtime put back): had they been read, they would be noticed.
    stat = desk.dest.stat()
    with desk.dest.open("r+b") as handle:
        handle.seek(1000)
        handle.write(b"wrong")
    os.utime(desk.dest, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    report = desk.order(site.url(URL))
    assert not report.files[0].changed
    assert report.files[0].sha256 == SHA256
    assert len(site.asked) == asked


def test_full_finds_a_corrupted_byte_keeps_it_aside_and_mends(site: Site, desk: Desk) -> None:
    desk.order(site.url(URL))
    stat = desk.dest.stat()
    with desk.dest.open("r+b") as handle:
        handle.seek(len(CONTENT) - 1)
        handle.write(bytes([CONTENT[-1] ^ 1]))
    os.utime(desk.dest, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    report = desk.order(site.url(URL), full=True)
    assert report.files[0].changed
    assert desk.dest.read_bytes() == CONTENT
    assert report.files[0].set_aside == str(desk.dest) + ".corrupt"
    assert Path(report.files[0].set_aside).read_bytes() != CONTENT


def test_a_touched_file_is_hashed_and_stamped_again(site: Site, desk: Desk) -> None:
    desk.order(site.url(URL))
    asked = len(site.asked)
    os.utime(desk.dest)
    report = desk.order(site.url(URL))
    assert not report.files[0].changed
    assert len(site.asked) == asked
    stamp = json.loads(Places(desk.dest).stamp.read_text())
    assert stamp["mtime_ns"] == desk.dest.stat().st_mtime_ns


def test_another_file_of_the_same_size_and_time_is_not_taken_for_the_one_that_was_verified(
    site: Site, desk: Desk
) -> None:
    desk.order(site.url(URL))
    stat = desk.dest.stat()
    other = desk.dest.with_name("other")
    other.write_bytes(CONTENT[:-1] + b"\0")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(desk.dest)
    assert desk.order(site.url(URL)).files[0].changed
    assert desk.dest.read_bytes() == CONTENT


@pytest.mark.parametrize("stamp", ["", "{}", "[]", '{"size": 1}', "\0\0\0\0"])
def test_a_stamp_that_is_none_means_a_full_hash(site: Site, desk: Desk, stamp: str) -> None:
    desk.order(site.url(URL))
    asked = len(site.asked)
    Places(desk.dest).stamp.write_text(stamp)
    assert not desk.order(site.url(URL)).files[0].changed
    assert len(site.asked) == asked
    assert json.loads(Places(desk.dest).stamp.read_text())["sha256"] == SHA256
    # And a file that is wrong has no stamp to hide behind.
    Places(desk.dest).stamp.write_text(stamp)
    desk.dest.write_bytes(CONTENT[:-1] + b"\0")
    assert desk.order(site.url(URL)).files[0].changed


def test_a_right_file_of_unknown_origin_is_taken_over(site: Site, desk: Desk) -> None:
    desk.dest.write_bytes(CONTENT)
    report = desk.order(site.url(URL))
    assert not report.files[0].changed
    assert report.files[0].source is None
    assert site.asked == []


@pytest.mark.parametrize("content", [b"", CONTENT[: len(CONTENT) // 2], CONTENT[:-1] + b"\0"])
def test_a_wrong_file_under_the_name_is_replaced(site: Site, desk: Desk, content: bytes) -> None:
    desk.dest.write_bytes(content)
    report = desk.order(site.url(URL), size=len(CONTENT))
    assert report.files[0].changed
    assert desk.dest.read_bytes() == CONTENT


def test_a_new_version_replaces_the_old_one_without_a_copy(site: Site, desk: Desk) -> None:
    desk.order(site.url(URL))
    newer = b"GGUF" + bytes(100)
    site.files[URL] = newer
    report = desk.order(site.url(URL), sha256=sha256(newer))
    assert desk.dest.read_bytes() == newer
    assert report.files[0].set_aside is None
    assert desk.leftovers == {"model.gguf", "model.gguf.stamp.json"}


# -- wrong hashes ------------------------------------------------------------------------------------------------------


def test_a_mistyped_hash_leaves_the_good_file_alone(site: Site, desk: Desk) -> None:
    # G02
    desk.order(site.url(URL))
    report = desk.order(site.url(URL), sha256="0" * 64)
    assert [fault.code for fault in report.faults] == ["hash_mismatch"]
    assert SHA256 in report.faults[0].message
    assert "0" * 64 in report.faults[0].message
    assert desk.dest.read_bytes() == CONTENT


def test_a_mismatch_is_fatal_and_the_corrected_hash_needs_no_download(site: Site, desk: Desk) -> None:
    # C24
    report = desk.order(site.url(URL), sha256="0" * 64)
    assert [fault.code for fault in report.faults] == ["hash_mismatch"]
    assert not desk.dest.exists()
    asked = len(site.asked)
    report = desk.order(site.url(URL))
    assert report.files[0].changed
    assert report.files[0].fetched == 0
    assert len(site.asked) == asked
    assert desk.leftovers == {"model.gguf", "model.gguf.stamp.json"}


def test_the_hash_of_an_empty_file_is_known_for_what_it_is(site: Site, desk: Desk) -> None:
    # C20: copied from a tool that had fetched nothing.
    report = desk.order(site.url(URL), sha256=sha256(b""))
    assert [fault.code for fault in report.faults] == ["hash_mismatch"]
    assert "expected e3b0c442" in report.faults[0].message
    assert "that of an empty file" in report.faults[0].message


def test_a_wrong_source_is_passed_over(site: Site, other_site: Site, desk: Desk) -> None:
    other_site.files[URL] = CONTENT[:-1] + b"\0"
    report = desk.order(other_site.url(URL), site.url(URL))
    assert [fault.code for fault in report.passed_over] == ["hash_mismatch"]
    assert report.files[0].source == site.url(URL)
    assert desk.dest.read_bytes() == CONTENT


def test_a_wrong_part_does_not_condemn_the_source(site: Site, desk: Desk) -> None:
    Places(desk.dest).part.write_bytes(b"GGUF" + bytes(MIB))
    report = desk.order(site.url(URL))
    assert report.faults == []
    assert desk.dest.read_bytes() == CONTENT


def test_without_a_hash_the_report_says_what_was_checked(site: Site, desk: Desk, tmp_path: Path) -> None:
    # C24
    whole = site.files[URL] = real(tmp_path / "whole.gguf").read_bytes()
    report = desk.order(site.url(URL), sha256=None, size=len(whole))
    assert [fault.code for fault in report.faults] == ["unverified"]
    assert "only its size" in report.faults[0].message
    assert sha256(whole) in report.faults[0].message


def test_without_a_hash_a_truncated_model_gets_no_name(site: Site, desk: Desk, tmp_path: Path) -> None:
    # C04: the magic is right, the size was not given; the header wants more bytes than came.
    site.files[URL] = real(tmp_path / "whole.gguf").read_bytes()[:-100]
    report = desk.order(site.url(URL), sha256=None)
    assert [fault.code for fault in report.faults] == ["gguf_truncated"]
    assert not desk.dest.exists()


def test_every_source_that_failed_is_named(site: Site, other_site: Site, desk: Desk) -> None:
    site.script = lambda exchange: exchange.status(404)
    other_site.script = lambda exchange: exchange.status(403)
    report = desk.order(site.url(URL), other_site.url(URL))
    assert [fault.code for fault in report.faults] == ["source_missing", "source_refused"]


# -- sets --------------------------------------------------------------------------------------------------------------

NAMES = [f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
SHARDS = {name: b"GGUF" + random.Random(name).randbytes(300_000) for name in NAMES}
#: Raw parts: no header could prove them.
PARTS = {f"model.gguf.{letter}": random.Random(letter).randbytes(300_000) for letter in "abc"}


def shards(desk: Desk, *sites: Site, hashed: bool = True, of: dict[str, bytes] = SHARDS) -> list[Wanted]:
    return [
        Wanted(
            desk.dest.parent / name,
            len(content),
            sha256(content) if hashed else None,
            tuple(Source(url=site.url("/" + name)) for site in sites),
        )
        for name, content in of.items()
    ]


def test_shards_lie_side_by_side_under_their_names(site: Site, desk: Desk) -> None:
    site.files = {"/" + name: content for name, content in SHARDS.items()}
    report = Delivery(shards(desk, site), desk.settings).run()
    assert all(outcome.changed for outcome in report.files)
    assert {path.name: path.read_bytes() for path in desk.dest.parent.glob("*.gguf")} == SHARDS


def test_another_mirror_takes_over_the_whole_set(site: Site, other_site: Site, desk: Desk) -> None:
    # C22: without hashes nothing of the first mirror is kept.
    site.files = {"/model.gguf.a": bytes(300_000)}
    other_site.files = {"/" + name: content for name, content in PARTS.items()}
    report = Delivery(shards(desk, site, other_site, hashed=False, of=PARTS), desk.settings).run()
    assert [fault.code for fault in report.passed_over] == ["source_missing"]
    assert {path.name: path.read_bytes() for path in desk.dest.parent.glob("*.gguf.?")} == PARTS
    assert {outcome.source.rpartition("/")[0] for outcome in report.files} == {other_site.url("")}


def test_an_unproved_set_is_not_put_in_place_by_halves(site: Site, desk: Desk) -> None:
    site.files = {"/" + name: PARTS[name] for name in list(PARTS)[:2]}
    report = Delivery(shards(desk, site, hashed=False, of=PARTS), desk.settings).run()
    assert [fault.code for fault in report.faults] == ["source_missing"]
    assert [path.name for path in desk.dest.parent.glob("*.gguf.?")] == []


def test_only_the_missing_shard_is_fetched(site: Site, desk: Desk) -> None:
    site.files = {"/" + name: content for name, content in SHARDS.items()}
    Delivery(shards(desk, site), desk.settings).run()
    (desk.dest.parent / NAMES[1]).unlink()
    site.asked.clear()
    report = Delivery(shards(desk, site), desk.settings).run()
    assert [outcome.changed for outcome in report.files] == [False, True, False]
    assert {path for path, _ in site.asked} == {"/" + NAMES[1]}


def test_shards_are_hashed_side_by_side(site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files = {"/" + name: content for name, content in SHARDS.items()}
    Delivery(shards(desk, site), desk.settings).run()
    together = threading.Barrier(len(SHARDS), timeout=20)
    hash_file = deliver_module.hash_file

    def at_once(path: Path, note: Callable[[int], None] = lambda count: None) -> str:
        # Passed only by all of them at a time.
        together.wait()
        return hash_file(path, note)

    monkeypatch.setattr(deliver_module, "hash_file", at_once)
    monkeypatch.setattr(os, "cpu_count", lambda: len(SHARDS))
    report = Delivery(shards(desk, site), desk.settings, full=True).run()
    assert [outcome.changed for outcome in report.files] == [False] * len(SHARDS)


def test_all_corrupt_shards_are_named_at_once(site: Site, desk: Desk) -> None:
    site.files = {"/" + name: content for name, content in SHARDS.items()}
    Delivery(shards(desk, site), desk.settings).run()
    for name in (NAMES[0], NAMES[2]):
        (desk.dest.parent / name).write_bytes(SHARDS[name][:-1] + b"\0")
    report = Delivery(shards(desk, site), desk.settings, full=True, refetch=False).run()
    assert [(fault.code, Path(fault.subject).name) for fault in report.faults] == [
        ("file_corrupt", NAMES[0]),
        ("file_corrupt", NAMES[2]),
    ]


def test_all_missing_shards_are_named_at_once(desk: Desk) -> None:
    report = Delivery(shards(desk), desk.settings).run()
    assert [Path(fault.subject).name for fault in report.faults] == NAMES
    assert {fault.code for fault in report.faults} == {"file_missing"}


# -- local sources -----------------------------------------------------------------------------------------------------


def test_from_a_file_on_the_machine(desk: Desk, tmp_path: Path) -> None:
    origin = tmp_path / "usb" / "model.gguf"
    origin.parent.mkdir()
    origin.write_bytes(CONTENT)
    report = desk.order(sources=(Source(path=str(origin)),))
    assert desk.dest.read_bytes() == CONTENT
    assert origin.stat().st_ino != desk.dest.stat().st_ino
    assert report.files[0].fetched == 0


def test_a_missing_local_file_gives_way_to_the_next_source(site: Site, desk: Desk) -> None:
    report = desk.order(sources=(Source(path="/nonexistent/model.gguf"), Source(url=site.url(URL))))
    assert [fault.code for fault in report.passed_over] == ["source_missing"]
    assert desk.dest.read_bytes() == CONTENT


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_too_little_room_is_told_before_anything_is_fetched(site: Site, desk: Desk) -> None:
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL), size=10**18)
    assert caught.value.fault.code == "disk_full"
    assert site.asked == []


CHILD = """
import resource, signal, sys
from pathlib import Path
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.transfer.deliver import Delivery, Wanted
from ansible_collections.volta.llm.plugins.module_utils.transfer.engine import Settings
from ansible_collections.volta.llm.plugins.module_utils.transfer.sources import Source
dest, url, sha256, limit = sys.argv[1:]
if int(limit):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    report = Delivery([Wanted(Path(dest), None, sha256, (Source(url=url),))], Settings()).run()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(report.files[0].fetched, report.files[0].resumed_from, peak.split()[1])
except FaultError as exc:
    print(exc.fault.code, exc.fault.message)
"""


def child(desk: Desk, url: str, limit: int = 0, sha256: str = SHA256) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".collections")}
    argv = [sys.executable, "-c", CHILD, str(desk.dest), url, sha256, str(limit)]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_disk_that_fills_up_midway(site: Site, desk: Desk) -> None:
    # The limit on a file's size stands for the full disk: the same error path (EFBIG beside ENOSPC).
    process = child(desk, site.url(URL), limit=8 * MIB)
    out, _ = process.communicate(timeout=60)
    assert out.startswith("disk_full")
    assert not desk.dest.exists()


def test_memory_does_not_grow_with_the_file(site: Site, desk: Desk) -> None:
    large = b"GGUF" + bytes(320 * MIB)
    site.files[URL] = large
    process = child(desk, site.url(URL), sha256=sha256(large))
    out, _ = process.communicate(timeout=120)
    assert int(out.split()[0]) == len(large)
    assert int(out.split()[-1]) < 100 * 1024


def test_the_bytes_are_on_the_disk_before_they_have_a_name_and_the_name_before_the_end(
    site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.replace

    def forced(fd: int) -> None:
        fsync(fd)
        done.append(("forced", Path(f"/proc/self/fd/{fd}").readlink().name))

    def renamed(self: Path, target: Path) -> Path:
        result = rename(self, target)
        done.append(("named", target.name))
        return result

    monkeypatch.setattr(os, "fsync", forced)
    monkeypatch.setattr(Path, "replace", renamed)
    desk.order(site.url(URL))
    steps = [
        ("forced", "model.gguf.part"),
        ("forced", "model.gguf.stamp.json.new"),
        ("named", "model.gguf.stamp.json"),
        ("named", "model.gguf"),
        ("forced", "models"),
    ]
    assert [step for step in done if step in steps] == steps


def test_a_part_that_cannot_be_opened(site: Site, desk: Desk) -> None:
    desk.dest.with_name("model.gguf.part").mkdir()
    with pytest.raises(FaultError) as error:
        desk.order(site.url("/model.gguf"))
    assert error.value.fault.code == "dest_not_writable"
    assert "directory" in error.value.fault.message.lower()


@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        (errno.EACCES, "dest_not_writable"),
        (errno.EROFS, "dest_not_writable"),
        (errno.EPERM, "dest_not_writable"),
        (errno.ENOSPC, "disk_full"),
        (errno.EDQUOT, "disk_full"),
    ],
)
def test_a_rename_that_fails_is_told_as_what_it_is_and_costs_no_download(
    site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch, trouble: int, code: str
) -> None:
    # C06: the whole file lies there without its name; not a second request, but the reason.
    rename = Path.replace

    def refused(self: Path, target: Path) -> Path:
        if target == desk.dest:
            raise OSError(trouble, os.strerror(trouble), str(self), None, str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL))
    fault = caught.value.fault
    assert (fault.code, fault.subject) == (code, str(desk.dest))
    assert os.strerror(trouble) in fault.message
    assert not desk.dest.exists()
    monkeypatch.undo()
    asked = len(site.asked)
    report = desk.order(site.url(URL), size=len(CONTENT))
    assert (report.files[0].fetched, report.files[0].changed) == (0, True)
    assert len(site.asked) == asked
    assert desk.dest.read_bytes() == CONTENT
    assert desk.leftovers == {"model.gguf", "model.gguf.stamp.json"}


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_under_a_file_s_name(site: Site, desk: Desk, full: bool) -> None:
    desk.dest.mkdir()
    (desk.dest / "kept").write_text("someone's")
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL), full=full)
    assert (caught.value.fault.code, caught.value.fault.subject) == ("dest_not_writable", str(desk.dest))
    assert "folder" in caught.value.fault.message
    assert site.asked == []
    assert (desk.dest / "kept").exists()
    with pytest.raises(FaultError):
        Delivery([Wanted(desk.dest, None, SHA256, ())], desk.settings).predict()


@pytest.mark.parametrize("refetch", [True, False])
@pytest.mark.parametrize("known", ["by the settings", "by the source"])
def test_a_file_that_the_disk_no_longer_reads(
    site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch, refetch: bool, known: str
) -> None:
    desk.order(site.url(URL))
    hash_file = deliver_module.hash_file

    def unreadable(path: Path, note: Callable[[int], None] = lambda count: None) -> str:
        if path == desk.dest:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return hash_file(path, note)

    monkeypatch.setattr(deliver_module, "hash_file", unreadable)
    expected = SHA256 if known == "by the settings" else None
    wanted = [Wanted(desk.dest, None, expected, (Source(url=site.url(URL), sha256=SHA256),))]
    assert Delivery(wanted, desk.settings, full=True).predict().files[0].changed
    report = Delivery(wanted, desk.settings, full=True, refetch=refetch).run()
    if refetch:
        assert {fault.code for fault in report.faults} == (set() if expected else {"unverified"})
        assert report.files[0].changed
        assert report.files[0].set_aside == str(desk.dest) + ".corrupt"
        assert desk.dest.read_bytes() == CONTENT
        return
    (fault,) = report.faults
    assert fault.code == "file_corrupt"
    assert "Input/output error" in fault.message
    assert desk.dest.exists()


def test_a_small_file_that_the_disk_does_not_take_is_a_fault(site: Site, desk: Desk) -> None:
    desk.order(site.url(URL))
    os.utime(desk.dest)
    stamp = Places(desk.dest).stamp
    in_the_way = stamp.with_name(stamp.name + ".new")
    in_the_way.mkdir()
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL))
    assert (caught.value.fault.code, caught.value.fault.subject) == ("dest_not_writable", str(in_the_way))
    assert desk.dest.read_bytes() == CONTENT


def test_a_folder_that_cannot_be_made(site: Site, desk: Desk) -> None:
    (desk.dest.parent / "file").write_text("in the way")
    with pytest.raises(FaultError) as caught:
        desk.order(site.url(URL), dest=desk.dest.parent / "file" / "model.gguf")
    assert caught.value.fault.code == "dest_not_writable"


# -- interrupted and concurrent runs -----------------------------------------------------------------------------------


class Slowly:
    """About 30 MB/s a connection, so that a kill finds the transfer under way; ``sent`` counts what has left."""

    def __init__(self) -> None:
        self.sent = 0
        self._lock = threading.Lock()

    def __call__(self, exchange: Exchange) -> None:
        data = exchange.content[exchange.start : exchange.end]
        span = f"bytes {exchange.start}-{exchange.end - 1}/{len(exchange.content)}"
        ranged = exchange.ranged
        exchange.head(206 if ranged else 200, Content_Length=len(data), Content_Range=span if ranged else None)
        for at in range(0, len(data), 256 * 1024):
            piece = data[at : at + 256 * 1024]
            exchange.body(piece)
            with self._lock:
                self.sent += len(piece)
            time.sleep(0.008)


def test_kill_9_at_any_moment_costs_little_and_never_leaves_a_wrong_file(site: Site, desk: Desk) -> None:
    # C08: our own range loop goes on where a killed run stopped, without orphans.
    content = site.files[URL] = CONTENT * 4
    slowly = site.script = Slowly()
    moments = random.Random(7)
    kept, kills = 0, 0
    while kept < len(content) // 2 and kills < 20:
        before, sent = kept, slowly.sent
        process = child(desk, site.url(URL), sha256=sha256(content))
        # What is done is recorded every 8 MiB: some kills come before the first record, most between two.
        target = moments.randrange(1, 30 * MIB)
        while process.poll() is None and slowly.sent - sent < target:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, out
        kills += 1
        assert not desk.dest.exists()
        left = State.read(Places(desk.dest).state)
        done = left.done if left is not None else Ranges()
        kept = done.total
        # The record is never ahead of the bytes.
        with contextlib.ExitStack() as stack:
            part = stack.enter_context(Places(desk.dest).part.open("rb")) if done.items else None
            for low, high in done.items:
                part.seek(low)
                assert part.read(high - low) == content[low:high]
        assert slowly.sent - sent - (kept - before) <= 64 * MIB
    assert kills > 1
    assert kept > 0
    site.script = Exchange.proper
    asked = len(site.asked)
    out, _ = child(desk, site.url(URL), sha256=sha256(content)).communicate(timeout=60)
    fetched, resumed, _ = out.split()
    assert (int(fetched), int(resumed)) == (len(content) - kept, kept)
    assert all(span is not None for _, span in site.asked[asked:])
    assert desk.dest.read_bytes() == content
    assert desk.leftovers == {"model.gguf", "model.gguf.stamp.json"}


def test_a_state_of_another_boot_trusts_only_what_was_synced(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    State(100, SHA256, "u", "", "another boot", Ranges([(0, 90)]), Ranges([(0, 40)])).write(path)
    assert State.read(path).done.items == [(0, 40)]


def test_a_second_run_waits_for_the_first_and_takes_its_file(site: Site, desk: Desk, tmp_path: Path) -> None:
    hold = threading.Event()
    arrived = threading.Event()

    def script(exchange: Exchange) -> None:
        arrived.set()
        hold.wait(30)
        exchange.proper()

    site.script = script
    first = child(desk, site.url(URL))
    assert arrived.wait(30)
    progress = tmp_path / "progress.json"
    reports = []
    second = threading.Thread(
        target=lambda: reports.append(desk.order(site.url(URL), progress_file=str(progress))), daemon=True
    )
    second.start()
    deadline = time.monotonic() + 30
    while not progress.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    record = read_progress(progress.read_text())
    assert record.phase == "another run is on it"
    hold.set()
    first.communicate(timeout=60)
    second.join(60)
    (report,) = reports
    assert report.waited
    assert report.files[0].fetched == 0
    assert not report.files[0].changed
    assert desk.dest.read_bytes() == CONTENT


def test_the_lock_of_a_killed_run_is_free(site: Site, desk: Desk) -> None:
    site.script = Slowly()
    process = child(desk, site.url(URL))
    while not Places(desk.dest).part.exists():
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert not Lock(Places(desk.dest).lock).acquire(lambda: pytest.fail("nobody holds it"))


# -- prediction and progress -------------------------------------------------------------------------------------------


def test_an_owner_that_cannot_be_given_costs_no_download(site: Site, desk: Desk) -> None:
    """NFS with root_squash refuses it, and a group may not exist: known before 100 GB have come, not after them."""
    tried: list[tuple[str, int]] = []

    def prepare(path: Path) -> None:
        tried.append((path.name, path.stat().st_size))
        # As AnsibleModule.fail_json ends: "chown failed".
        raise SystemExit(1)

    wanted = Wanted(desk.dest, len(CONTENT), SHA256, (Source(url=site.url(URL)),))
    with pytest.raises(SystemExit):
        Delivery([wanted], desk.settings, prepare=prepare).run()
    assert site.asked == []
    assert tried == [("model.gguf.probe", 0)]
    assert desk.leftovers == set()


def test_a_file_system_that_cannot_force_names_to_the_disk_will_do(
    site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFS and some of FUSE answer EINVAL to fsync of a folder; the file is there all the same."""
    real_fsync = os.fsync

    def fsync(handle: int) -> None:
        if stat_module.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real_fsync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    report = desk.order(site.url(URL), size=len(CONTENT))
    assert report.faults == []
    assert report.files[0].changed
    assert sha256(desk.dest.read_bytes()) == SHA256


def test_prediction_changes_nothing(site: Site, desk: Desk) -> None:
    wanted = [Wanted(desk.dest, len(CONTENT), SHA256, (Source(url=site.url(URL)),))]
    report = Delivery(wanted, desk.settings).predict()
    assert report.files[0].changed
    assert list(desk.dest.parent.iterdir()) == []
    desk.order(site.url(URL))
    report = Delivery(wanted, desk.settings).predict()
    assert not report.files[0].changed
    os.utime(desk.dest)
    stamp = Places(desk.dest).stamp.read_text()
    report = Delivery(wanted, desk.settings).predict()
    assert not report.files[0].changed
    assert Places(desk.dest).stamp.read_text() == stamp


def test_progress_counts_the_whole_set(site: Site, desk: Desk, tmp_path: Path) -> None:
    site.files = {"/" + name: content for name, content in SHARDS.items()}
    progress = tmp_path / "progress.json"
    Delivery(shards(desk, site), desk.settings, progress_file=str(progress)).run()
    record = read_progress(progress.read_text())
    assert record.total == sum(len(content) for content in SHARDS.values())
    assert record.unit == "bytes"
    assert record.subject.startswith("model-0000")


def test_progress_names_source_and_file_and_how_far_each_is(
    site: Site, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, int, int | None, str]] = []

    class Recorder:
        def __init__(self, path: str | None, unit: str) -> None:
            assert unit == "bytes"

        def update(self, phase: str, done: int, total: int | None, subject: str, force: bool = False) -> None:
            shown.append((phase, done, total, subject))

    monkeypatch.setattr(deliver_module, "ProgressWriter", Recorder)
    site.files = {"/" + name: content for name, content in SHARDS.items()}
    Delivery(shards(desk, site), desk.settings).run()
    whole = sum(len(content) for content in SHARDS.values())
    assert {(phase, total) for phase, _, total, _ in shown} == {(f"from 127.0.0.1:{site.port}", whole)}
    for number, name in enumerate(NAMES, 1):
        # Whole of this file, and with those before it a part of all.
        before = sum(len(SHARDS[earlier]) for earlier in NAMES[:number])
        assert before in [done for _, done, _, subject in shown if subject == f"{name} ({number} of 3, 100 %)"]


# -- ranges ------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))), st.integers(1, 60))
def test_ranges_are_the_set_of_offsets(pairs: list[tuple[int, int]], end: int) -> None:
    ranges = Ranges()
    offsets: set[int] = set()
    for start, stop in pairs:
        ranges.add(start, stop)
        offsets |= set(range(start, stop))
    assert {offset for low, high in ranges.items for offset in range(low, high)} == offsets
    assert ranges.items == sorted(ranges.items)
    assert all(high < low for (_, high), (low, _) in zip(ranges.items, ranges.items[1:], strict=False))
    assert ranges.total == len(offsets)
    assert ranges.end == max(offsets, default=-1) + 1
    cut = Ranges(list(ranges.items))
    cut.cut(end)
    assert {offset for low, high in cut.items for offset in range(low, high)} == {at for at in offsets if at < end}
    missing = {offset for low, high in ranges.gaps(end) for offset in range(low, high)}
    assert missing == set(range(end)) - offsets
    assert ranges.front == next(offset for offset in range(100) if offset not in offsets)
