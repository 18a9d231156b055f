# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Release folders: whole, proven, switched in one step, and cleared with care."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine import release
from ansible_collections.volta.llm.plugins.module_utils.engine.process import programs_below
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError


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


# --- the proof ---

LDD = """\
\tlinux-vdso.so.1 (0x00007f7ff9419000)
\tlibllama.so.0 => /opt/r/lib/libllama.so.0 (0x00007f7ff8000000)
\tlibcuda.so.1 => not found
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f7ff8e1e000)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f7ff941b000)
"""


def test_ldd_is_read() -> None:
    assert release.parse_ldd(LDD) == {
        "libllama.so.0": "/opt/r/lib/libllama.so.0",
        "libcuda.so.1": None,
        "libc.so.6": "/lib/x86_64-linux-gnu/libc.so.6",
    }
    assert release.parse_ldd("\tnot a dynamic executable\n") == {}


@pytest.mark.parametrize(
    ("libraries", "why"),
    [
        ({"libllama.so.0": "/opt/r/lib/libllama.so.0", "libc.so.6": "/lib/libc.so.6"}, None),
        ({"libllama.so.0": "/opt/r/bin/../lib/libllama.so.0"}, None),
        # A build host without a driver.
        ({"libcuda.so.1": None}, None),
        ({"libcudart.so.12": None}, "libcudart.so.12 is not found"),
        ({"libllama.so.0": "/usr/lib/libllama.so.0"}, "not from the release"),
        ({"libcuda.so.1": "/usr/local/cuda/lib64/stubs/libcuda.so.1"}, "stub"),
    ],
)
def test_libraries_come_from_the_release(libraries: dict[str, str | None], why: str | None) -> None:
    faults = release.judge_libraries(Path("/opt/r/bin/llama-server"), libraries, {"libllama.so.0"})
    if why is None:
        assert faults == []
    else:
        assert len(faults) == 1
        assert why in faults[0].message


@pytest.mark.parametrize(
    ("text", "version", "commit"),
    [
        ("version: 0.5.0-dev (build 0, commit 0c1e57098)\nbuilt with GNU 12.2.0\n", "0.5.0-dev", "0c1e57098"),
        ("ggml_cuda_init: found 4\nversion: 6123 (79c1160b)\nbuilt with\n", "6123", "79c1160b"),
        ("version: 0.5.0-dev (build 0, commit unknown)\n", "0.5.0-dev", None),
        ("version: 0 (unknown)\n", "0", None),
        ("Segmentation fault\n", None, None),
    ],
)
def test_what_the_server_says_of_itself(text: str, version: str | None, commit: str | None) -> None:
    assert release.parse_version(text) == (version, commit)


def fake(folder: Path, version_rc: str = "exit 0", says: str = "version: 1.0 (build 0, commit abcdef123)") -> Path:
    """A release whose server is a script; libraries are looked at by ldd as ever."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    server = folder / "bin/llama-server"
    server.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"print({says!r} if '--version' in sys.argv else '-m,    --model FNAME   the model')\n"
        f"{version_rc if version_rc != 'exit 0' else ''}\n"
    )
    server.chmod(0o755)
    return folder


def prove(folder: Path, version: str | None = "1.0", commit: str | None = "abcdef123") -> release.Proof:
    return release.prove(folder, version, commit, [], None)


def test_a_server_that_names_version_and_commit_is_proven(tmp_path: Path) -> None:
    proof = prove(fake(tmp_path / "r"))
    assert (proof.version, proof.commit) == ("1.0", "abcdef123")
    assert [check["check"] for check in proof.checks] == ["libraries", "version", "help"]
    assert "--model" in proof.capabilities.flags


@pytest.mark.parametrize(
    ("says", "how", "why"),
    [
        ("version: 2.0 (build 0, commit abcdef123)", "exit 0", "names 2.0, expected 1.0"),
        ("version: 1.0 (build 0, commit 999999999)", "exit 0", "commit 999999999"),
        ("version: 1.0 (build 0, commit unknown)", "exit 0", "commit None"),
        ("", "sys.exit(3)", "exit status 3"),
        ("", "os.kill(os.getpid(), 4)", "another processor"),
        ("", "os.kill(os.getpid(), 11)", "signal 11"),
    ],
)
def test_doubt_is_a_refusal(tmp_path: Path, says: str, how: str, why: str) -> None:
    with pytest.raises(FaultError) as caught:
        prove(fake(tmp_path / "r", how, says))
    assert caught.value.fault.code == "proof_failed"
    assert why in caught.value.fault.message


def test_a_cuda_build_without_a_cuda_library_is_refused(tmp_path: Path) -> None:
    # "Works", and runs on the CPU.
    with pytest.raises(FaultError) as caught:
        release.prove(fake(tmp_path / "r"), "1.0", None, ["70-real"], None)
    assert caught.value.fault.code == "architecture_missing"
    assert "CPU only" in caught.value.fault.message
