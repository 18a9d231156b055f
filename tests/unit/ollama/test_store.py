# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ollama's store on the disk: what a model consists of, what is proved of it, what unfinished pulls left."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.ollama import placing
from ansible_collections.volta.llm.plugins.module_utils.ollama import store as store_module
from ansible_collections.volta.llm.plugins.module_utils.ollama.names import parse_name
from ansible_collections.volta.llm.plugins.module_utils.ollama.placing import keep_time, place
from ansible_collections.volta.llm.plugins.module_utils.ollama.store import Image, Layer, Store, open_files
from ansible_collections.volta.llm.plugins.module_utils.transfer.ollama_store import find_blob, find_partials

WEIGHTS = b"GGUF" + bytes(range(256)) * 40
KIND = "application/vnd.ollama.image."


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Shelf:
    """A store with what tests put in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)
        self.store = Store(str(folder))

    def blob(self, content: bytes) -> Path:
        path = self.folder / "blobs" / f"sha256-{sha256(content)}"
        path.write_bytes(content)
        return path

    def model(self, name: str = "m", weights: bytes = WEIGHTS, **others: bytes) -> Image:
        layers = {"model": weights, "license": b"none", **others}
        for content in (*layers.values(), b"{}"):
            self.blob(content)
        manifest = {
            "config": self._entry("application/vnd.docker.container.image.v1+json", b"{}"),
            "layers": [self._entry(KIND + kind, content) for kind, content in layers.items()],
        }
        path = self.folder / parse_name(name).below
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(manifest) + "\n")
        image = self.store.read(parse_name(name))
        assert image is not None
        return image

    @staticmethod
    def _entry(kind: str, content: bytes) -> dict[str, object]:
        return {"mediaType": kind, "digest": f"sha256:{sha256(content)}", "size": len(content)}

    def partial(self, digit: str, *, parts: int = 2, age: float = 7200) -> list[Path]:
        """What a pull has left: a sparse file and the records of its parts, ``age`` seconds ago."""
        base = self.folder / "blobs" / f"sha256-{digit * 64}-partial"
        paths = [base, *(base.with_name(f"{base.name}-{number}") for number in range(parts))]
        with base.open("wb") as handle:
            handle.write(b"x" * 8192)
            handle.truncate(1 << 30)
        for number, path in enumerate(paths[1:]):
            path.write_text(json.dumps({"N": number, "Offset": 0, "Size": 1 << 29, "Completed": 4096}))
        for path in paths:
            os.utime(path, (time.time() - age, time.time() - age))
        return paths


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "models")


# -- models -----------------------------------------------------------------------------------------------------------


def test_a_model_is_what_its_manifest_names(shelf: Shelf) -> None:
    image = shelf.model("team/m:8b")
    assert image.name.shown == "team/m:8b"
    assert image.size == len(WEIGHTS) + len(b"none") + len(b"{}")
    assert image.weights == Layer(f"{KIND}model", sha256(WEIGHTS), len(WEIGHTS))
    assert [layer.shown for layer in image.layers] == ["weights", "license", "configuration"]
    assert shelf.store.read(parse_name("other")) is None
    # Model delivery takes the same blob from it.
    assert find_blob("team/m:8b", str(shelf.folder)).sha256 == sha256(WEIGHTS)


def test_a_digest_is_the_manifest_s_or_that_of_the_weights(shelf: Shelf) -> None:
    image = shelf.model()
    content = image.path.read_bytes()
    assert image.is_digest(sha256(content)[:12])
    # Ollama may leave out the line feed at the end.
    assert image.is_digest(sha256(content.rstrip()))
    assert image.is_digest(sha256(WEIGHTS))
    assert not image.is_digest(sha256(WEIGHTS)[:12])
    assert not image.is_digest("0" * 12)


def test_capitals_do_not_make_another_model(shelf: Shelf) -> None:
    shelf.model("hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M")
    image = shelf.store.read(parse_name("hf.co/qwen/qwen3-8b-gguf:q4_k_m"))
    assert image is not None
    assert image.name.shown == "hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"layers": null}',
        b'{"layers": [{"digest": "sha256:12", "size": 1}]}',
        b'{"layers": [{"digest": "sha256:%s", "size": "1"}]}' % (b"0" * 64),
        b'{"layers": [{"digest": "../../etc/passwd", "size": 1}]}',
        b'{"layers": [7]}',
        b"\xff\xfe",
    ],
)
def test_a_manifest_that_is_none_is_a_fault_of_its_own(shelf: Shelf, content: bytes) -> None:
    image = shelf.model()
    image.path.write_bytes(content)
    with pytest.raises(FaultError) as caught:
        shelf.store.read(image.name)
    assert (caught.value.fault.code, caught.value.fault.subject) == ("manifest_broken", str(image.path))


def test_who_else_needs_a_blob(shelf: Shelf) -> None:
    shelf.model("a")
    shelf.model("b", system=b"be brief")
    broken = shelf.model("c")
    broken.path.write_text("{")
    assert shelf.store.users(sha256(WEIGHTS)) == ["a:latest", "b:latest"]
    assert shelf.store.users(sha256(b"be brief")) == ["b:latest"]


# -- proofs -----------------------------------------------------------------------------------------------------------


def weights_of(image: Image) -> Layer:
    assert image.weights is not None
    return image.weights


def test_a_blob_is_hashed_once_and_then_known_by_its_stamp(shelf: Shelf) -> None:
    layer = weights_of(shelf.model())
    assert not shelf.store.proved(layer)
    first, second = shelf.store.check(layer), shelf.store.check(layer)
    assert (first.problem, first.hashed, second.problem, second.hashed) == ("", True, "", False)
    assert shelf.store.proved(layer)
    assert shelf.store.check(layer, full=True).hashed
    # Ollama's own reader of the store sees nothing but its blobs.
    assert [path.name for path in shelf.store.blobs.iterdir() if path.is_dir()] == [".volta-transfer"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def drop_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "problem"), [(flip, "corrupt"), (drop_a_byte, "short"), (lambda path: path.unlink(), "missing")]
)
@pytest.mark.parametrize("proved_before", [False, True])
def test_a_blob_that_is_not_what_its_name_says(
    shelf: Shelf, harm: Callable[[Path], None], problem: str, proved_before: bool
) -> None:
    layer = weights_of(shelf.model())
    if proved_before:
        shelf.store.check(layer)
    harm(shelf.store.blob(layer.sha256))
    state = shelf.store.check(layer)
    assert state.problem == problem
    assert not shelf.store.proved(layer)
    shelf.store.discard(layer.sha256)
    assert shelf.store.size_of(layer.sha256) is None


def test_another_time_or_another_file_voids_a_stamp(shelf: Shelf) -> None:
    layer = weights_of(shelf.model())
    path = shelf.store.blob(layer.sha256)
    shelf.store.check(layer)
    os.utime(path)
    assert shelf.store.check(layer).hashed
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    copy.replace(path)
    assert shelf.store.check(layer).hashed


def test_two_readings_with_two_hashes_are_no_broken_blob(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = weights_of(shelf.model())
    readings = [("1" * 64, None), ("2" * 64, None), ("3" * 64, None), (layer.sha256, None)]
    monkeypatch.setattr(store_module, "read_hash", lambda path, note=None: readings.pop(0))
    state = shelf.store.check(layer)
    assert (state.problem, state.detail) == ("unstable", f"{'1' * 64}, then {'2' * 64}")
    # One that is right the second time is as bad: the first reading was not.
    assert shelf.store.check(layer).problem == "unstable"
    assert not shelf.store.proved(layer)


def test_a_blob_that_the_disk_does_not_give_back(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = weights_of(shelf.model())
    monkeypatch.setattr(store_module, "read_hash", lambda path, note=None: (None, "Input/output error"))
    state = shelf.store.check(layer)
    assert (state.problem, state.detail) == ("unreadable", "Input/output error")


def test_nothing_is_written_where_nothing_may_be(shelf: Shelf) -> None:
    layer = weights_of(shelf.model())
    Store(str(shelf.folder), keep=False).check(layer)
    assert not (shelf.store.blobs / ".volta-transfer").exists()


def test_a_link_in_place_of_the_folder_for_stamps_is_not_followed(shelf: Shelf, tmp_path: Path) -> None:
    """The store belongs to the service, which is not to lead root elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (shelf.store.blobs / ".volta-transfer").symlink_to(elsewhere)
    layer = weights_of(shelf.model())
    assert shelf.store.check(layer).problem == ""
    assert ".volta-transfer" in shelf.store.unkept
    (elsewhere / "sha256-0.stamp.json").touch()
    shelf.store.forget_gone()
    assert [path.name for path in elsewhere.iterdir()] == ["sha256-0.stamp.json"]


def test_stamps_of_what_is_gone_are_forgotten(shelf: Shelf) -> None:
    image = shelf.model()
    for layer in image.layers:
        shelf.store.check(layer)
    shelf.store.blob(weights_of(image).sha256).unlink()
    shelf.store.forget_gone()
    stamps = [path.name for path in (shelf.store.blobs / ".volta-transfer").iterdir()]
    assert sorted(stamps) == sorted(f"sha256-{sha256(content)}.stamp.json" for content in (b"none", b"{}"))


# -- what pulls leave -------------------------------------------------------------------------------------------------


def test_what_is_there_of_a_blob(shelf: Shelf) -> None:
    shelf.blob(WEIGHTS)
    shelf.partial("a")
    (shelf.store.blobs / f"sha256-{'b' * 64}-partial-0").write_text("{")
    assert shelf.store.held() == {sha256(WEIGHTS): len(WEIGHTS), "a" * 64: 8192}


def test_left_over_partials_are_counted_by_what_they_take(shelf: Shelf) -> None:
    paths = shelf.partial("a")
    upload = shelf.store.blobs / "sha256-1234567890"
    upload.write_bytes(b"y" * 4096)
    os.utime(upload, (1, 1))
    shelf.model()
    found = {leftover.paths[0].name: leftover for leftover in shelf.store.leftovers()}
    assert sorted(found) == [upload.name, paths[0].name]
    pull = found[paths[0].name]
    assert sorted(pull.paths) == paths
    assert pull.size == sum(path.stat().st_blocks * 512 for path in paths) < 1 << 20
    assert not pull.in_use
    # What model delivery tells of the same store.
    assert find_partials(str(shelf.folder)).paths == tuple(paths)


def test_what_was_just_written_may_be_a_pull_that_begins(shelf: Shelf) -> None:
    shelf.partial("a", age=5)
    assert "may be at its beginning" in shelf.store.leftovers()[0].in_use
    # The records of parts alone: a pull that has not opened its file yet.
    for path in shelf.partial("b", age=5)[:1]:
        path.unlink()
    assert all(leftover.in_use for leftover in shelf.store.leftovers())


def test_what_a_process_has_open_is_in_use_however_old_it_is(shelf: Shelf) -> None:
    paths = shelf.partial("a")
    others = shelf.partial("b")
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; f = open(sys.argv[1]); print(flush=True); sys.stdin.read()", str(paths[0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        found = {leftover.paths[0]: leftover.in_use for leftover in shelf.store.leftovers()}
        assert f"(pid {holder.pid}) has it open" in found[paths[0]]
        assert found[others[0]] == ""
    assert [leftover.in_use for leftover in shelf.store.leftovers()] == ["", ""]


def test_where_it_cannot_be_seen_what_ollama_has_open_everything_is_in_use(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.partial("a")
    proc = tmp_path / "proc"
    (proc / "812").mkdir(parents=True)
    (proc / "812" / "comm").write_text("ollama\n")
    (proc / "813").mkdir()
    (proc / "813" / "comm").write_text("nginx\n")
    looked = Path.iterdir

    def refuse(path: Path) -> object:
        if path.name == "fd":
            raise PermissionError(13, "Permission denied")
        return looked(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert "ollama (pid 812)" in shelf.store.leftovers(proc)[0].in_use
    (proc / "812" / "comm").write_text("bash\n")
    assert shelf.store.leftovers(proc)[0].in_use == ""
    assert open_files({(1, 1)}, tmp_path / "none").keys() == {None}


# -- a file's way into the store ---------------------------------------------------------------------------------------


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(WEIGHTS)
    path.chmod(0o640)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


@pytest.fixture
def no_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "share_blocks", lambda origin, target: False)


def test_a_clone_is_a_file_of_its_own(shelf: Shelf, origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(source: int, target: int) -> bool:
        # What FICLONE does, on file systems that have no such thing.
        os.pwrite(target, os.pread(source, len(WEIGHTS), 0), 0)
        return True

    monkeypatch.setattr(placing, "share_blocks", share)
    assert place(origin, shelf.store, sha256(WEIGHTS)).how == "clone"
    blob = shelf.store.blob(sha256(WEIGHTS))
    assert blob.read_bytes() == WEIGHTS
    assert not blob.samefile(origin)
    assert blob.stat().st_mode & 0o777 == 0o644
    assert origin.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in shelf.store.blobs.rglob("*") if path.is_file()) == [blob.name]


@pytest.mark.usefixtures("no_clones")
def test_a_link_is_the_same_file_readable_for_ollama(shelf: Shelf, origin: Path) -> None:
    assert place(origin, shelf.store, sha256(WEIGHTS)).how == "link"
    blob = shelf.store.blob(sha256(WEIGHTS))
    assert blob.samefile(origin)
    assert blob.stat().st_mode & 0o777 == 0o644
    assert blob.stat().st_uid == shelf.store.blobs.stat().st_uid
    assert sorted(path.name for path in shelf.store.blobs.rglob("*") if path.is_file()) == [blob.name]
    # Another file in its place leaves the blob as it is.
    other = origin.with_name("other")
    other.write_bytes(b"other")
    other.replace(origin)
    assert blob.read_bytes() == WEIGHTS


@pytest.mark.usefixtures("no_clones")
def test_the_time_by_which_delivery_knows_a_linked_file_is_set_back(shelf: Shelf, origin: Path) -> None:
    place(origin, shelf.store, sha256(WEIGHTS))
    before = origin.stat()
    os.utime(shelf.store.blob(sha256(WEIGHTS)))
    assert origin.stat().st_mtime_ns != before.st_mtime_ns
    keep_time(shelf.store.blob(sha256(WEIGHTS)), before)
    assert origin.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.usefixtures("no_clones")
@pytest.mark.parametrize(("mode", "word"), [(0o664, "may write it"), (0o646, "may write it")])
def test_what_others_may_write_is_not_linked(shelf: Shelf, origin: Path, mode: int, word: str) -> None:
    origin.chmod(mode)
    placed = place(origin, shelf.store, sha256(WEIGHTS))
    assert not placed.how
    assert word in placed.why
    assert shelf.store.size_of(sha256(WEIGHTS)) is None


@pytest.mark.usefixtures("no_clones")
def test_a_person_s_file_and_a_symbolic_link_are_not_linked(shelf: Shelf, origin: Path) -> None:
    there = origin.stat()
    person = os.stat_result((there.st_mode, there.st_ino, there.st_dev, 1, 4711, *there[5:]))
    assert "another user (uid 4711)" in placing._not_to_link(origin, person, shelf.store.blobs.stat())
    link = origin.with_name("link.gguf")
    link.symlink_to(origin)
    assert "symbolic link" in place(link, shelf.store, sha256(WEIGHTS)).why


@pytest.mark.usefixtures("no_clones")
def test_a_link_does_not_cross_file_systems(shelf: Shelf, origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def across(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", across)
    assert "another file system" in place(origin, shelf.store, sha256(WEIGHTS)).why


@pytest.mark.usefixtures("no_clones")
def test_a_link_that_cannot_be_given_to_the_store_s_user_is_taken_back(
    shelf: Shelf, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    assert "cannot be given to the store's user" in place(origin, shelf.store, sha256(WEIGHTS)).why
    assert shelf.store.size_of(sha256(WEIGHTS)) is None
    assert origin.stat().st_nlink == 1


def test_a_blob_that_was_found_wrong_is_not_proved_by_its_old_stamp(tmp_path: Path) -> None:
    """A bad disk changes neither size nor time: what a full reading has found, the next look must not forget."""
    shelf = Shelf(tmp_path)
    image = shelf.model()
    layer = next(layer for layer in image.layers if layer.sha256 == sha256(WEIGHTS))
    assert shelf.store.check(layer).problem == ""
    path = shelf.store.blob(layer.sha256)
    before = path.stat()
    path.write_bytes(WEIGHTS[:-1] + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert shelf.store.check(layer).problem == "", "the stamp still fits"
    assert shelf.store.check(layer, full=True).problem == "corrupt"
    assert shelf.store.check(layer).problem == "corrupt"
