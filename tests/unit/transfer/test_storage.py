# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ollama's store, files that are linked, moved and set aside, and what a disk is like."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.transfer import disk
from ansible_collections.volta.llm.plugins.module_utils.transfer.deliver import Delivery, Wanted
from ansible_collections.volta.llm.plugins.module_utils.transfer.disk import (
    find_orphans,
    judge_mount,
    slow_storage,
    storage_warning,
)
from ansible_collections.volta.llm.plugins.module_utils.transfer.local import link_file
from ansible_collections.volta.llm.plugins.module_utils.transfer.ollama_store import (
    find_blob,
    find_partials,
    manifest_path,
    partials_left,
)
from ansible_collections.volta.llm.plugins.module_utils.transfer.sources import Source, source_of
from ansible_collections.volta.llm.plugins.module_utils.transfer.store import Places

from tests.unit.transfer.conftest import CONTENT, SHA256, Desk
from tests.unit.transfer.site import Site

MODEL = "application/vnd.ollama.image.model"


def store_with(folder: Path, content: bytes = CONTENT, name: str = "library/small/1b", layers: int = 1) -> Path:
    """A store as ollama 0.24.0 lays it out, with one model."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    manifest = folder / "manifests" / "registry.ollama.ai" / name
    manifest.parent.mkdir(parents=True)
    other = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "1" * 64, "size": 3}
    model = {"mediaType": MODEL, "digest": f"sha256:{digest}", "size": len(CONTENT)}
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [other, *[model] * layers]}))
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir()
    blob.write_bytes(content)
    return blob


# -- Ollama's store ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("qwen3:8b", "registry.ollama.ai/library/qwen3/8b"),
        ("qwen3", "registry.ollama.ai/library/qwen3/latest"),
        ("team/qwen3:8b", "registry.ollama.ai/team/qwen3/8b"),
        ("hf.co/org/Qwen3-GGUF:Q4_K_M", "hf.co/org/Qwen3-GGUF/Q4_K_M"),
        ("localhost:5000/team/m:t", "localhost:5000/team/m/t"),
    ],
)
def test_where_a_model_s_manifest_lies(name: str, path: str) -> None:
    assert manifest_path(name) == Path("manifests", path)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "a/b/c/d", "a:b:c", "a b", "a/../b:c"])
def test_what_is_no_model_s_name(name: str) -> None:
    assert manifest_path(name) is None


def ollama(store: Path, name: str = "small:1b") -> Source:
    return source_of({"type": "ollama", "model": name, "store": str(store)}, "model.gguf", {})


def test_a_model_of_ollama_is_linked_not_copied(desk: Desk, tmp_path: Path) -> None:
    blob = store_with(tmp_path / "store")
    report = desk.order(sha256=None, sources=(ollama(tmp_path / "store"),))
    assert report.files[0].changed
    assert desk.dest.read_bytes() == CONTENT
    # One file with two names, or two that share their blocks: either way without room for a second.
    assert desk.dest.stat().st_ino == blob.stat().st_ino or desk.dest.stat().st_nlink == 1
    assert report.notes == []
    assert desk.leftovers == {"model.gguf", "model.gguf.stamp.json"}
    assert not desk.order(sha256=None, sources=(ollama(tmp_path / "store"),)).files[0].changed


def test_a_linked_file_keeps_owner_and_mode(desk: Desk, tmp_path: Path) -> None:
    blob = store_with(tmp_path / "store")
    blob.chmod(0o600)
    touched: list[Path] = []
    wanted = [Wanted(desk.dest, None, SHA256, (ollama(tmp_path / "store"),))]
    report = Delivery(wanted, desk.settings, prepare=touched.append).run()
    if report.files[0].linked:
        assert blob.stat().st_mode & 0o777 == 0o600
        assert touched == []


def test_a_link_that_a_killed_run_left_is_never_written_to(site: Site, desk: Desk, tmp_path: Path) -> None:
    blob = store_with(tmp_path / "store", bytes(len(CONTENT)))
    places = Places(desk.dest)
    places.folder.mkdir()
    os.link(blob, places.linked)
    desk.order(site.url("/model.gguf"))
    assert blob.read_bytes() == bytes(len(CONTENT))
    assert desk.leftovers == {"model.gguf", "model.gguf.stamp.json"}


def test_a_damaged_blob_is_not_taken_and_left_alone(site: Site, desk: Desk, tmp_path: Path) -> None:
    # Ollama does not hash what it has: we do.
    damaged = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    blob = store_with(tmp_path / "store", damaged)
    report = desk.order(
        sha256=None, sources=(ollama(tmp_path / "store"), Source(url=site.url("/model.gguf"), sha256=SHA256))
    )
    assert [fault.code for fault in report.passed_over] == ["hash_mismatch"]
    assert blob.read_bytes() == damaged
    assert desk.dest.read_bytes() == CONTENT


def test_a_store_on_another_file_system_is_copied_and_the_reason_told(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def refuse(*args: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    blob = store_with(tmp_path / "store")
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(
        "ansible_collections.volta.llm.plugins.module_utils.transfer.local.share_blocks", lambda *_: False
    )
    report = desk.order(sha256=None, sources=(ollama(tmp_path / "store"),))
    assert desk.dest.read_bytes() == CONTENT
    assert desk.dest.stat().st_ino != blob.stat().st_ino
    assert "another file system" in report.notes[0]


@pytest.mark.parametrize("trouble", ["no model", "no blob", "two layers", "no json"])
def test_a_store_that_does_not_have_it_gives_way_to_the_next_source(
    site: Site, desk: Desk, tmp_path: Path, trouble: str
) -> None:
    store = tmp_path / "store"
    blob = store_with(store, layers=2 if trouble == "two layers" else 1)
    if trouble == "no blob":
        blob.unlink()
    if trouble == "no json":
        (store / "manifests/registry.ollama.ai/library/small/1b").write_text("{")
    source = ollama(store, "other" if trouble == "no model" else "small:1b")
    report = desk.order(sha256=SHA256, sources=(source, Source(url=site.url("/model.gguf"))))
    assert len(report.passed_over) == 1
    assert report.passed_over[0].code in ("source_missing", "source_misbehaves")
    assert desk.dest.read_bytes() == CONTENT


PARTIALS = ("-partial", "-partial-0", "-partial-12")


def leave_partials(store: Path) -> list[Path]:
    """As `ollama pull` does when it is broken off: the whole length at once, few of the bytes."""
    folder = store / "blobs"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"sha256-{'6' * 64}{ending}" for ending in PARTIALS]
    for path in paths:
        with path.open("wb") as handle:
            handle.truncate(1 << 30)
            handle.write(b"x" * 4096)
    return paths


def test_left_over_partials_are_counted_by_what_they_take(tmp_path: Path) -> None:
    # C30: they are no models, and sparse: their length says nothing.
    blob = store_with(tmp_path)
    paths = leave_partials(tmp_path)
    for no_partial in (f"sha256-{'6' * 63}-partial", f"sha256-{'6' * 64}-partial-x", f"sha256-{'7' * 64}"):
        (blob.parent / no_partial).write_bytes(b"x")
    found = find_partials(str(tmp_path))
    assert found.paths == tuple(sorted(paths))
    assert found.size == sum(path.stat().st_blocks * 512 for path in paths)
    assert 3 * 4096 <= found.size < 1 << 20
    assert find_blob("small:1b", str(tmp_path)).path == blob
    assert find_partials(str(tmp_path / "nothing")).paths == ()


@pytest.mark.parametrize("named", ["by the source", "by the environment", "by nobody"])
def test_left_over_partials_are_told_with_the_way_to_clean_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    # C30: with count, bytes and place; nothing is removed.
    store, other = tmp_path / "store", tmp_path / "other"
    paths = leave_partials(store)
    (other / "blobs").mkdir(parents=True)
    monkeypatch.setenv("OLLAMA_MODELS", str(store) if named == "by the environment" else "")
    spec: dict[str, str] = {"type": "ollama", "model": "small:1b"}
    if named == "by the source":
        spec["store"] = str(store)
    places = [str(other), str(store)] if named == "by nobody" else [str(other)]
    taken = sum(path.stat().st_blocks * 512 for path in paths)
    (fault,) = partials_left([{"url": "http://h/"}, spec, spec], places)
    assert (fault.code, fault.subject) == ("pull_unfinished", str(store / "blobs"))
    assert fault.message == f"3 partial blobs of unfinished pulls take {taken / 1e6:.1f} MB"
    assert f"rm {store}/blobs/sha256-*-partial*" in fault.remedy
    assert "no pull runs" in fault.remedy
    assert all(path.exists() for path in paths)
    assert partials_left([{"url": "http://h/"}, {"file": str(store)}], [str(store)]) == []
    assert partials_left([{**spec, "store": str(other)}], [str(store)]) == []


def test_linking_over_an_old_link(tmp_path: Path) -> None:
    origin, target = tmp_path / "a", tmp_path / "b"
    origin.write_bytes(b"new")
    target.write_bytes(b"old")
    assert link_file(origin, target) in ("link", "clone")
    assert target.read_bytes() == b"new"


# -- from the control node ---------------------------------------------------------------------------------------------


def incoming(desk: Desk, content: bytes | None) -> Source:
    places = Places(desk.dest)
    places.folder.mkdir(exist_ok=True)
    if content is not None:
        places.incoming.write_bytes(content)
    spec = {"type": "controller", "controller": "/models/"}
    return source_of(spec, "model.gguf", {}, incoming=str(places.incoming))


def test_what_the_control_node_sent_is_moved_into_place(desk: Desk) -> None:
    report = desk.order(sources=(incoming(desk, CONTENT),))
    assert desk.dest.read_bytes() == CONTENT
    assert report.files[0].source == "control node:/models/"
    assert desk.leftovers == {"model.gguf", "model.gguf.stamp.json"}


@pytest.mark.parametrize("content", [None, b"", CONTENT[:-5], CONTENT[:-1] + b"\0"])
def test_what_did_not_come_right_gives_way_to_the_next_source(site: Site, desk: Desk, content: bytes | None) -> None:
    source = incoming(desk, content)
    report = desk.order(size=len(CONTENT), sources=(source, Source(url=site.url("/model.gguf"))))
    assert len(report.passed_over) == 1
    assert desk.dest.read_bytes() == CONTENT


# -- files that went wrong ---------------------------------------------------------------------------------------------


def spoil(path: Path) -> None:
    stat = path.stat()
    with path.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_corrupt_file_is_a_fault_where_it_may_not_be_fetched(site: Site, desk: Desk) -> None:
    desk.order(site.url("/model.gguf"))
    spoil(desk.dest)
    wanted = [Wanted(desk.dest, None, SHA256, (Source(url=site.url("/model.gguf")),))]
    asked = len(site.asked)
    report = Delivery(wanted, desk.settings, full=True, refetch=False).run()
    assert [fault.code for fault in report.faults] == ["file_corrupt"]
    assert len(site.asked) == asked
    assert desk.dest.exists()


def test_what_a_mistyped_hash_left_goes_with_the_next_good_run(site: Site, desk: Desk) -> None:
    # G02
    desk.order(site.url("/model.gguf"))
    desk.order(site.url("/model.gguf"), sha256="0" * 64)
    assert "model.gguf.rejected" in desk.leftovers
    desk.order(site.url("/model.gguf"))
    assert desk.leftovers == {"model.gguf", "model.gguf.stamp.json"}


def test_there_is_one_corrupt_file_at_most(site: Site, desk: Desk) -> None:
    for _ in range(3):
        desk.order(site.url("/model.gguf"), full=True)
        spoil(desk.dest)
    desk.order(site.url("/model.gguf"), full=True)
    assert desk.leftovers == {"model.gguf", "model.gguf.corrupt", "model.gguf.stamp.json"}


def test_without_a_hash_the_first_one_holds(site: Site, desk: Desk, tmp_path: Path) -> None:
    from tests.unit.gguf.build import real

    site.files["/model.gguf"] = real(tmp_path / "whole.gguf").read_bytes()
    desk.order(site.url("/model.gguf"), sha256=None)
    spoil(desk.dest)
    report = desk.order(site.url("/model.gguf"), sha256=None, full=True)
    assert report.files[0].changed
    assert report.files[0].set_aside
    assert desk.dest.read_bytes() == site.files["/model.gguf"]


def test_how_much_was_proved_is_still_known_in_the_next_run(site: Site, desk: Desk) -> None:
    # C24
    source = Source(url=site.url("/model.gguf"), sha256=SHA256)
    verdicts = []
    for _ in range(2):
        report = desk.order(sha256=None, sources=(source,))
        verdicts.append(report.files[0].verified(Wanted(desk.dest)))
        assert [fault.code for fault in report.faults] == ["unverified"]
    assert verdicts == ["source", "source"]


# -- disks -------------------------------------------------------------------------------------------------------------

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:47 / /srv/nfs rw,relatime shared:2 - nfs4 nas:/models rw,vers=4.2
41 22 253:0 / /srv/lvm rw,relatime - xfs /dev/mapper/vg-models rw
42 22 0:48 / /srv/ssh rw - fuse.sshfs user@host:/ rw
43 22 259:2 / /srv/fast rw - ext4 /dev/nvme0n1p2 rw
44 22 0:50 / /srv/tmp rw - tmpfs tmpfs rw
"""


def machine(root: Path) -> Path:
    """A rotating disk with a partition, an NVMe disk with one, and a logical volume over both."""
    for device, parent, name, rotational in (
        ("8:1", "sda", "sda1", "1"),
        ("259:2", "nvme0n1", "nvme0n1p2", "0"),
    ):
        block = root / "sys/devices/pci" / parent
        (block / name / "slaves").mkdir(parents=True)
        (block / "queue").mkdir()
        (block / "queue/rotational").write_text(rotational + "\n")
        (block / name / "partition").write_text("1\n")
        link = root / "sys/dev/block" / device
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(block / name)
    volume = root / "sys/devices/virtual/dm-0"
    (volume / "slaves").mkdir(parents=True)
    for parent, name in (("sda", "sda1"), ("nvme0n1", "nvme0n1p2")):
        (volume / "slaves" / name).symlink_to(root / "sys/devices/pci" / parent / name)
    (root / "sys/dev/block/253:0").symlink_to(volume)
    return root


@pytest.mark.parametrize(
    ("device", "kind", "detail"),
    [
        ("8:1", "rotating", "/dev/sda"),
        ("0:47", "network", "nfs4 from nas:/models"),
        ("0:48", "network", "fuse.sshfs from user@host:/"),
        ("253:0", "rotating", "/dev/sda"),
        ("259:2", "", ""),
        ("0:50", "", ""),
        ("9:9", "", ""),
    ],
)
def test_what_a_folder_lies_on(tmp_path: Path, device: str, kind: str, detail: str) -> None:
    storage = judge_mount(MOUNTS, device, machine(tmp_path))
    assert (storage.kind, storage.detail) == (kind, detail)


def test_slow_storage_is_told_with_the_time_to_expect() -> None:
    fault = slow_storage(disk.Storage("rotating", "/dev/sda"), Path("/srv/models"), 111_000_000_000, 160e6)
    assert fault.message == (
        "lies on a rotating disk (/dev/sda); it reads 160 MB/s, so 111.0 GB take about 12 min to load"
    )
    assert slow_storage(disk.Storage("", ""), Path("/srv"), 1, None) is None
    # A virtual disk calls itself rotating, and is none by what it reads.
    assert slow_storage(disk.Storage("rotating", "/dev/vda"), Path("/srv"), 1, 1400e6) is None
    assert slow_storage(disk.Storage("network", "nfs4 from nas:/"), Path("/srv"), 1, 1400e6) is not None


def test_a_read_rate_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(3 << 20))
    (tmp_path / ".volta-transfer").mkdir()
    monkeypatch.setattr(disk, "storage_of", lambda folder: disk.Storage("network", "nfs4 from nas:/models"))
    ticks = itertools.count()
    rate = disk.read_rate(model, now=lambda: next(ticks) * 0.5)
    assert rate is not None
    assert 0 < rate < 3 << 21
    assert "not known" in storage_warning(tmp_path, model, 3 << 20, measure=False).message
    measured = storage_warning(tmp_path, model, 3 << 20, measure=True)
    monkeypatch.setattr(disk, "read_rate", lambda path: pytest.fail("measured already"))
    assert storage_warning(tmp_path, model, 3 << 20, measure=True) == measured
    assert storage_warning(tmp_path, model, 3 << 20, measure=False) == measured


def test_a_file_too_small_to_tell(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"x")
    assert disk.read_rate(tmp_path / "m") is None
    assert disk.read_rate(tmp_path / "nothing") is None


def test_orphans_are_found_largest_first(tmp_path: Path) -> None:
    # C08: {etag}.{uuid}.incomplete of `hf download`.
    deep = tmp_path / ".cache/huggingface/download/Q4"
    deep.mkdir(parents=True)
    (deep / "9f86.0a1b.incomplete").write_bytes(b"x" * 50_000)
    (tmp_path / "a.gguf.aria2").write_bytes(b"x" * 5_000)
    (tmp_path / "a.gguf").write_bytes(b"x")
    (tmp_path / "a.gguf.part").write_bytes(b"x")
    assert [orphan.path.name for orphan in find_orphans([tmp_path])] == ["9f86.0a1b.incomplete", "a.gguf.aria2"]
    assert find_orphans([tmp_path / "nothing"]) == []


def test_a_manifest_of_a_wrong_name_is_a_fault() -> None:
    with pytest.raises(FaultError) as caught:
        find_blob("../x")
    assert caught.value.fault.code == "bad_argument"
