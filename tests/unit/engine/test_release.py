# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Release folders: whole, proven, switched in one step, and cleared with care."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine import release
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.releases import programs_below


def make(store: release.Store, version: str, fingerprint: str, age: float = 0.0) -> Path:
    """A release with one program, installed as the module installs it."""
    partial = store.releases / f".{fingerprint[:12]}.1"
    (partial / "bin").mkdir(parents=True)
    (partial / "lib").mkdir()
    (partial / "bin" / "llama-server").write_text(f"program {version}")
    (partial / "lib" / "libllama.so.0").write_text("library")
    release.write_manifest(partial, {"fingerprint": fingerprint, "version": version})
    path = store.commit(partial, f"{version}-{fingerprint[:12]}")
    if age:
        then = (path / release.MANIFEST).stat().st_mtime - age
        os.utime(path / release.MANIFEST, (then, then))
    return path


@pytest.fixture
def store(tmp_path: Path) -> release.Store:
    result = release.Store(str(tmp_path / "opt"))
    result.releases.mkdir(parents=True)
    return result


A, B, C, D = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)


def test_a_release_is_found_by_its_fingerprint(store: release.Store) -> None:
    path = make(store, "0.5.0-dev", A)
    found = store.find(A)
    assert found is not None
    assert found.path == path
    assert found.binary == path / "bin/llama-server"
    assert [entry["path"] for entry in found.manifest["files"]] == ["bin/llama-server", "lib/libllama.so.0"]
    assert store.find(B) is None
    # The folder's name holds twelve digits only; the manifest decides.
    assert store.find("a" * 12 + "0" * 52) is None


def test_damage_is_noticed(store: release.Store) -> None:
    path = make(store, "1", A)
    program = path / "bin/llama-server"
    stamp = program.stat()
    program.write_text("PROGRAM 1")
    assert store.find(A) is None, "same size, other content"
    program.write_text("program 1")
    assert store.find(A) is not None, "another time alone is no damage"
    program.write_text("program")
    os.utime(program, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert store.find(A) is None, "another size"
    program.unlink()
    assert store.find(A) is None, "gone"
    program.symlink_to("/bin/true")
    assert store.find(A) is None, "a link in its place"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema": 99, "fingerprint": "x"}'])
def test_a_manifest_that_is_not_ours_is_no_release(store: release.Store, content: str) -> None:
    path = make(store, "1", A)
    (path / release.MANIFEST).write_text(content)
    assert store.find(A) is None


def test_a_damaged_release_is_replaced_whole(store: release.Store) -> None:
    path = make(store, "1", A)
    store.switch(path)
    (path / "bin/llama-server").write_text("broken")
    assert make(store, "1", A) == path
    assert store.find(A) is not None
    assert store.link("current") == path
    assert sorted(entry.name for entry in store.releases.iterdir()) == [path.name]


def test_switching_keeps_the_way_back(store: release.Store) -> None:
    one, two = make(store, "1", A), make(store, "2", B)
    assert store.link("current") is None
    store.switch(one)
    assert (store.link("current"), store.link("previous")) == (one, None)
    store.switch(two)
    assert (store.link("current"), store.link("previous")) == (two, one)
    store.switch(two)
    assert (store.link("current"), store.link("previous")) == (two, one)
    store.switch(one)
    assert (store.link("current"), store.link("previous")) == (one, two)
    # Relative, so that the prefix can be mounted elsewhere.
    assert not (store.prefix / "current").readlink().is_absolute()
    assert (store.prefix / "current/bin/llama-server").read_text() == "program 1"


def test_a_link_to_a_removed_release_is_none(store: release.Store) -> None:
    one = make(store, "1", A)
    store.switch(one)
    shutil.rmtree(one)
    assert store.link("current") is None


def test_the_oldest_go_and_linked_ones_stay(store: release.Store) -> None:
    one, two, three, four = (make(store, str(i), f * 1, age=100.0 - i) for i, f in enumerate((A, B, C, D)))
    store.switch(one)
    store.switch(two)
    # One is the oldest, and what a rollback would go to.
    assert store.prune(3) == [three.name]
    assert store.prune(3) == []
    assert store.prune(1) == [four.name]
    assert sorted(path.name for path in store.releases.iterdir()) == sorted([one.name, two.name])


def test_a_release_that_runs_stays(store: release.Store) -> None:
    one = make(store, "1", A, age=100)
    two = make(store, "2", B)
    store.switch(two)
    program = one / "bin/llama-server"
    shutil.copy(os.path.realpath(shutil.which("sleep") or "/bin/sleep"), program)
    program.chmod(0o755)
    process = subprocess.Popen([str(program), "60"])
    try:
        assert programs_below(store.releases) == {str(program)}
        assert store.prune(1) == []
    finally:
        process.kill()
        process.wait()
    assert store.prune(1) == [one.name]


def test_what_an_interrupted_installation_left_is_removed(store: release.Store) -> None:
    one = make(store, "1", A)
    (store.releases / ".b.17" / "bin").mkdir(parents=True)
    store.clean_partials()
    assert [path.name for path in store.releases.iterdir()] == [one.name]


# --- what is taken from the build tree ---


def test_only_files_of_the_build_user_are_published(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("geheim")
    (tmp_path / "llama-server").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic"):
        release._copy(tmp_path / "llama-server", tmp_path / "out", os.geteuid(), 0o755)
    with pytest.raises(FaultError) as caught:
        release._copy(secret, tmp_path / "out", os.geteuid() + 1, 0o755)
    assert caught.value.fault.code == "proof_failed"
    assert not (tmp_path / "out").exists()


def test_library_links_are_followed_inside_one_folder_only(tmp_path: Path) -> None:
    (tmp_path / "libx.so.0.25.3").write_text("x")
    (tmp_path / "libx.so.0").symlink_to("libx.so.0.25.3")
    assert release._within(tmp_path / "libx.so.0", tmp_path) == tmp_path / "libx.so.0.25.3"
    (tmp_path / "liby.so.0").symlink_to("/etc/passwd")
    (tmp_path / "libz.so.0").symlink_to("libz.so.0")
    for name in ("liby.so.0", "libz.so.0"):
        with pytest.raises(FaultError):
            release._within(tmp_path / name, tmp_path)
