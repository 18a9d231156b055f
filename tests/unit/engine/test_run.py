# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whole runs: real cmake, real ninja, real compiler, on a small source."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine import process, proof, release, run, sources, toolchain
from ansible_collections.volta.llm.plugins.module_utils.engine.catalogue import CATALOGUE
from ansible_collections.volta.llm.plugins.module_utils.engine.gpus import Cards
from ansible_collections.volta.llm.plugins.module_utils.engine.request import Request

from .conftest import MAIN, Bench

ROOT = Path(__file__).resolve().parents[3]


def codes(outcome: run.Outcome) -> list[str]:
    return [fault.code for fault in outcome.faults]


def build(request: Request, **more: object) -> run.Outcome:
    outcome = run.build(request, **more)  # type: ignore[arg-type]
    assert outcome.faults == [], outcome.faults
    return outcome


def test_from_an_archive_to_a_release_in_use(bench: Bench) -> None:
    progress = bench.root / "shared" / "progress.json"
    outcome = build(replace(bench.archive(), progress_file=str(progress)))
    assert outcome.changed
    assert outcome.release == outcome.current
    assert outcome.release is not None
    assert outcome.fingerprint is not None
    assert Path(outcome.release).name == f"1.0-{outcome.fingerprint[:12]}"
    assert (outcome.version, outcome.commit, outcome.jobs) == ("1.0", "abcdef123", 2)
    assert outcome.previous_release is None
    assert outcome.log is not None
    assert "Building CXX object" in Path(outcome.log).read_text()
    assert json.loads(progress.read_text())["phase"] == "install"

    folder = Path(outcome.release)
    assert sorted(path.name for path in (folder / "bin").iterdir()) == ["llama-fit-params", "llama-server"]
    assert [path.name for path in (folder / "lib").iterdir()] == ["libllama.so.0"]
    assert not (folder / "lib/libllama.so.0").is_symlink()
    server = bench.prefix / "current/bin/llama-server"
    assert "commit abcdef123" in subprocess.run([server, "--version"], capture_output=True, text=True).stdout
    manifest = json.loads((folder / "release.json").read_text())
    assert manifest["capabilities"]["flags"] == ["--model", "-m"]
    assert manifest["inputs"]["options"]["GGML_CUDA"] == "OFF"
    # What a build can write to is not what is published.
    for path in [folder, *folder.rglob("*")]:
        found = path.stat()
        assert found.st_uid == os.geteuid()
        assert not stat.S_IMODE(found.st_mode) & 0o022, path
    # Nothing but the result and the caches stays.
    assert list((bench.base).glob("work/*")) == []
    assert [path.name for path in (bench.prefix / "releases").iterdir()] == [folder.name]


def test_a_second_run_does_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    request = bench.archive()
    first = build(request)
    Path(request.url or "").unlink()

    def no(*_args: object, **_more: object) -> None:
        raise AssertionError("a run with nothing to do neither fetches, nor unpacks, nor builds, nor locks")

    for module, name in ((sources, "fetch_archive"), (sources, "unpack"), (run, "Builder"), (run.fcntl, "flock")):
        monkeypatch.setattr(module, name, no)
    second = build(request)
    assert not second.changed
    assert (second.release, second.fingerprint, second.commit) == (first.release, first.fingerprint, first.commit)
    assert second.capabilities == first.capabilities
    assert second.build_s is None


def test_check_mode_says_what_would_happen_and_writes_nothing(bench: Bench) -> None:
    request = replace(bench.archive(), url="http://192.0.2.1/unreachable.tar.gz")
    outcome = build(request, check_mode=True)
    assert outcome.changed
    assert outcome.fingerprint is not None
    assert outcome.release is None
    assert not bench.base.exists()
    assert not bench.prefix.exists()
    real = bench.archive()
    made = build(real)
    again = build(real, check_mode=True)
    assert not again.changed
    assert again.fingerprint == made.fingerprint


def test_check_mode_on_a_bare_machine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SEARCH_PATH", "/nowhere")
    monkeypatch.setattr(toolchain, "find_program", lambda *_names: None)
    request = bench.archive()
    outcome = build(request, check_mode=True)
    assert outcome.changed
    assert outcome.fingerprint is None
    assert len(outcome.notes) == 3
    for_real = run.build(request)
    assert codes(for_real) == ["build_tool_missing"] * 3
    assert not for_real.changed


def test_a_new_version_and_the_way_back(bench: Bench) -> None:
    old, new = bench.archive("1.0"), bench.archive("2.0")
    first = build(old)
    second = build(new)
    assert second.changed
    assert second.previous_release == first.release
    assert (bench.prefix / "current").resolve() == Path(second.release or "")
    # Going back builds nothing: the release is still there.
    back = build(old)
    assert back.changed
    assert back.build_s is None
    assert (back.current, back.previous_release) == (first.release, second.release)


def test_an_old_release_is_proven_again_before_it_returns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    old = bench.archive("1.0")
    first = build(old)
    second = build(bench.archive("2.0"))

    def ldd_after_an_upgrade(program: Path, _account: object) -> dict[str, str | None]:
        return {"libssl.so.3": None} if Path(first.release or "") in program.parents else {}

    monkeypatch.setattr(proof, "libraries_of", ldd_after_an_upgrade)
    outcome = run.build(old)
    assert codes(outcome) == ["proof_failed"]
    assert "libssl.so.3 is not found" in outcome.faults[0].message
    assert (bench.prefix / "current").resolve() == Path(second.release or "")


def test_building_without_switching(bench: Bench) -> None:
    first = build(bench.archive("1.0"))
    second = build(replace(bench.archive("2.0"), switch=False))
    assert second.changed
    assert second.current == first.release
    assert second.release != first.release
    assert not build(replace(bench.archive("2.0"), switch=False)).changed
    switched = build(bench.archive("2.0"))
    assert switched.current == second.release
    assert switched.build_s is None


def test_old_releases_go(bench: Bench) -> None:
    names = [Path(build(replace(bench.archive(f"{n}.0"), keep_releases=2)).release or "").name for n in (1, 2)]
    third = build(replace(bench.archive("3.0"), keep_releases=2))
    assert third.removed == [names[0]]


def test_a_damaged_release_is_built_again(bench: Bench) -> None:
    request = bench.archive()
    first = build(request)
    Path(first.release or "", "lib/libllama.so.0").write_bytes(b"rotten")
    second = build(request)
    assert second.changed
    assert second.release == first.release
    assert not build(request).changed


# --- what goes wrong, and what stays as it was ---


@pytest.fixture
def in_use(bench: Bench) -> Path:
    """A release that is in use before the failure."""
    return Path(build(bench.archive("1.0")).release or "")


def unchanged(bench: Bench, in_use: Path) -> bool:
    return (bench.prefix / "current").resolve() == in_use and [
        path.name for path in (bench.prefix / "releases").iterdir()
    ] == [in_use.name]


def test_a_compile_error_is_shown_with_its_log(bench: Bench, in_use: Path) -> None:
    outcome = run.build(bench.archive("2.0", main=MAIN + "this is not C++;\n"))
    assert codes(outcome) == ["build_failed"]
    assert not outcome.changed
    assert "this is not C++;" in outcome.faults[0].message
    assert outcome.log is not None
    assert outcome.log in outcome.faults[0].message
    assert "main.cpp" in Path(outcome.log).read_text()
    assert unchanged(bench, in_use)


def test_a_configure_error_is_shown(bench: Bench, in_use: Path) -> None:
    request = replace(bench.archive("2.0"), cmake_options={"CMAKE_CXX_COMPILER": "/no/such/compiler"})
    outcome = run.build(request)
    assert codes(outcome) == ["configure_failed"]
    assert "/no/such/compiler" in outcome.faults[0].message
    assert unchanged(bench, in_use)


@pytest.mark.parametrize(
    ("change", "code"),
    [({"sha256": "1" * 64}, "source_checksum_mismatch"), ({"url": "/no/such/file.tar.gz"}, "source_not_found")],
)
def test_a_source_that_is_not_the_one(bench: Bench, in_use: Path, change: dict[str, str], code: str) -> None:
    outcome = run.build(replace(bench.archive("2.0"), **change))  # type: ignore[arg-type]
    assert codes(outcome) == [code]
    assert list(bench.base.glob("work/*")) == []
    assert list(bench.base.glob("downloads/*")) == []
    assert unchanged(bench, in_use)


def test_a_source_of_another_version_is_not_compiled(bench: Bench, in_use: Path) -> None:
    outcome = run.build(replace(bench.archive("2.0"), version="3.0"))
    assert codes(outcome) == ["source_version_mismatch"]
    assert "Building" not in Path(outcome.log or "").read_text()
    assert unchanged(bench, in_use)


def test_a_server_that_lies_about_its_version_is_not_put_into_use(bench: Bench, in_use: Path) -> None:
    outcome = run.build(bench.archive("2.0", says="1.9"))
    assert codes(outcome) == ["proof_failed"]
    assert "names 1.9, expected 2.0" in outcome.faults[0].message
    assert unchanged(bench, in_use)


def test_a_server_that_crashes_is_not_put_into_use(bench: Bench, in_use: Path) -> None:
    outcome = run.build(bench.archive("2.0", main=MAIN.replace("answer() == 42", "__builtin_trap(), false")))
    assert codes(outcome) == ["proof_failed"]
    assert unchanged(bench, in_use)


def test_a_target_that_the_source_lacks(bench: Bench, in_use: Path) -> None:
    outcome = run.build(replace(bench.archive("2.0"), targets=("llama-nothing",)))
    assert codes(outcome) == ["build_failed"]
    assert "llama-nothing" in outcome.faults[0].message
    assert unchanged(bench, in_use)


def test_an_option_without_effect_is_a_warning(bench: Bench) -> None:
    outcome = run.build(replace(bench.archive(), cmake_options={"LLAMA_CUBLAST": "ON"}))
    assert codes(outcome) == ["cmake_option_unused"]
    assert outcome.faults[0].subject == "LLAMA_CUBLAST"
    assert outcome.changed
    assert CATALOGUE.kinds["cmake_option_unused"].severity == "warning"


KILLED = "echo 'c++: fatal error: Killed signal terminated program cc1plus'; exit 1\n"


def test_out_of_memory_is_tried_once_more_with_fewer_jobs(bench: Bench) -> None:
    flag = bench.root / "shared" / "once"
    flag.write_text("")
    flag.chmod(0o666)
    outcome = build(replace(bench.archive(gate=f"if [ -e {flag} ]; then rm {flag}; {KILLED.strip()}; fi\n"), jobs=8))
    assert outcome.jobs == 2
    assert outcome.changed


def test_out_of_memory_twice_is_a_fault(bench: Bench) -> None:
    counter = bench.root / "shared" / "tries"
    counter.write_text("")
    counter.chmod(0o666)
    outcome = run.build(bench.archive(gate=f"echo x >> {counter}\n{KILLED}"))
    assert codes(outcome) == ["build_out_of_memory"]
    assert counter.read_text() == "x\nx\n"


def test_a_folder_that_cannot_be_written(bench: Bench) -> None:
    (bench.root / "file").write_text("")
    outcome = run.build(replace(bench.archive(), build_directory=str(bench.root / "file" / "var")))
    assert codes(outcome) == ["filesystem_error"]
    assert str(bench.root / "file") in outcome.faults[0].subject


# --- interruption and company ---


def start(request: Request) -> subprocess.Popen[str]:
    """The same run in a process of its own, which can be killed."""
    program = (
        "import json, sys\n"
        "from ansible_collections.volta.llm.plugins.module_utils.engine import run\n"
        "from ansible_collections.volta.llm.plugins.module_utils.engine.request import Request\n"
        "given = json.loads(sys.argv[1])\n"
        "given.update({name: tuple(given[name]) for name in ('cuda_architectures', 'targets')})\n"
        "outcome = run.build(Request(**given))\n"
        "print(json.dumps([outcome.changed, [fault.message for fault in outcome.faults], outcome.build_s]))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(asdict(request))],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".collections")},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: object, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.05)


def ninja_at_work(bench: Bench) -> bool:
    """Not cmake before it, which ends with the module that it writes to."""
    for pid in process.processes_in(bench.base / "work"):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        if name == "ninja":
            return True
    return False


def slow(bench: Bench) -> tuple[Request, Path]:
    """A build that stops in its middle as long as a file is there."""
    flag = bench.root / "shared" / "slow"
    flag.write_text("")
    flag.chmod(0o666)
    return bench.archive(gate=f"while [ -e {flag} ]; do sleep 0.1; done\n"), flag


def test_a_killed_build_is_continued(bench: Bench) -> None:
    request, flag = slow(bench)
    killed = start(request)

    def compiled() -> list[Path]:
        return list(bench.base.glob("work/*/build/CMakeFiles/llama.dir/lib.cpp.o"))

    wait_for(lambda: compiled() and process.processes_in(bench.base / "work"), "the build to stand still")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert process.processes_in(bench.base / "work"), "ninja outlives the module that was killed"
    assert not (bench.prefix / "current").exists()
    stamp = compiled()[0].stat().st_mtime_ns

    # The gate is still shut: were the old ninja not ended and the new one let through, this would not end.
    opener = threading.Timer(1.0, flag.unlink)
    opener.start()
    seen: list[int] = []
    original = run.Builder.build

    def watch(self: run.Builder) -> int:
        seen.append(compiled()[0].stat().st_mtime_ns)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.Builder, "build", watch)
        outcome = build(request)
    opener.join()
    assert outcome.changed
    assert seen == [stamp], "what was compiled before is not compiled again"
    assert process.processes_in(bench.base) == []
    assert not build(request).changed


def test_two_runs_at_once_build_once(bench: Bench) -> None:
    request, flag = slow(bench)
    one = start(request)
    wait_for(lambda: process.processes_in(bench.base / "work"), "the first run to build")
    two = start(request)
    progress = bench.root / "shared" / "wait.json"
    three = start(replace(request, progress_file=str(progress)))
    wait_for(lambda: progress.exists() and json.loads(progress.read_text())["phase"] == "wait", "a run that waits")
    flag.unlink()
    answers = [json.loads(one_of.communicate()[0]) for one_of in (one, two, three)]
    assert [faults for _changed, faults, _seconds in answers] == [[], [], []]
    assert [changed for changed, _faults, _seconds in answers].count(True) == 1
    assert len([seconds for _changed, _faults, seconds in answers if seconds is not None]) == 1


def test_a_killed_build_gives_way_to_another_version(bench: Bench) -> None:
    request, flag = slow(bench)
    killed = start(request)
    wait_for(lambda: ninja_at_work(bench), "the build to begin")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    left = process.processes_in(bench.base / "work")
    assert left, "ninja outlives the module that was killed"
    other = build(bench.archive("2.0"))
    assert other.version == "2.0"
    assert not set(left) & set(process.processes_in(bench.base)), "what was left writes into nobody's folder"
    assert list(bench.base.glob("work/*")) == []
    flag.unlink()
    assert build(request).version == "1.0"


def test_what_is_left_of_a_removal_is_not_built_upon(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = bench.root / "shared" / "fails"
    flag.write_text("")
    request = bench.archive(gate=f"[ ! -e {flag} ]\n")
    assert codes(run.build(request)) == ["build_failed"]

    class PowerCut(BaseException):
        pass

    def cut(path: Path, **_options: object) -> None:
        for source in Path(path).rglob("source/lib.cpp"):
            source.unlink()
            raise PowerCut

    other = bench.archive("2.0")
    with monkeypatch.context() as patch:
        patch.setattr(run.shutil, "rmtree", cut)
        with pytest.raises(PowerCut):
            run.build(other)
    flag.unlink()
    assert build(request).changed


def test_two_versions_at_once_are_built_one_after_the_other(bench: Bench) -> None:
    request, flag = slow(bench)
    one = start(request)
    wait_for(lambda: process.processes_in(bench.base / "work"), "the first run to build")
    progress = bench.root / "shared" / "wait.json"
    two = start(replace(bench.archive("2.0"), progress_file=str(progress)))
    wait_for(lambda: progress.exists() and json.loads(progress.read_text())["phase"] == "wait", "a run that waits")
    flag.unlink()
    answers = [json.loads(one_of.communicate()[0]) for one_of in (one, two)]
    assert [(changed, faults) for changed, faults, _seconds in answers] == [(True, []), (True, [])]
    assert sorted(path.name[:4] for path in (bench.prefix / "releases").iterdir()) == ["1.0-", "2.0-"]


def test_another_version_finds_in_the_cache_what_did_not_change(bench: Bench) -> None:
    def counted() -> dict[str, int]:
        shown = subprocess.run(
            ["ccache", "--print-stats"],
            env={**os.environ, "CCACHE_DIR": str(bench.base / "ccache")},
            capture_output=True,
            text=True,
            check=True,
        )
        numbers = dict(line.split("\t") for line in shown.stdout.splitlines())
        return {
            "hits": int(numbers["direct_cache_hit"]) + int(numbers["preprocessed_cache_hit"]),
            "misses": int(numbers["cache_miss"]),
        }

    build(bench.archive("1.0", models=8))
    first = counted()
    build(bench.archive("2.0", models=8))
    second = counted()
    assert first["misses"] >= 7, "four files of two models each, the library and two programs"
    # The programs are told their version; all else is as it was.
    assert second["misses"] - first["misses"] <= 2
    assert second["hits"] - first["hits"] >= 4


def test_waiting_has_an_end(bench: Bench) -> None:
    bench.base.mkdir()
    with (bench.base / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.write("4711\n")
        handle.flush()
        outcome = run.build(bench.archive(), wait_s=0.0)
    assert codes(outcome) == ["build_in_progress"]
    assert "4711" in outcome.faults[0].message


def test_a_shell_in_the_work_folder_is_not_ended(tmp_path: Path) -> None:
    shell = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
    ours = subprocess.Popen(["sleep", "60"], env={process.BUILD_MARK: str(tmp_path / "work" / "a")})
    try:
        wait_for(lambda: process.processes_in(tmp_path / "work") == [ours.pid], "the build's process to be seen")
        assert process.processes_in(tmp_path / "wor") == []
        run.end_leftovers(tmp_path / "work")
        assert ours.wait() == -signal.SIGKILL
        assert shell.poll() is None
    finally:
        for child in (shell, ours):
            child.kill()
            child.wait()


def test_a_strict_umask_locks_nobody_out(bench: Bench) -> None:
    before = os.umask(0o077)
    try:
        outcome = build(bench.archive())
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    for path in [bench.prefix, *bench.prefix.rglob("*")]:
        assert path.name == ".lock" or path.stat().st_mode & 0o004, path
    assert Path(outcome.release or "", "bin/llama-server").stat().st_mode & 0o005 == 0o005


def test_bad_wishes_touch_nothing(bench: Bench) -> None:
    outcome = run.build(replace(bench.archive(), sha256="x", jobs=-1))
    assert codes(outcome) == ["source_invalid", "build_option_invalid"]
    assert not bench.base.exists()
    assert not bench.prefix.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")
def test_as_root_the_build_runs_without_rights(bench: Bench) -> None:
    who = bench.root / "shared" / "who"
    build(bench.archive(gate=f"id -u > {who}; touch {bench.base}/downloads/x 2>/dev/null || echo refused >> {who}\n"))
    uid, refused = who.read_text().split()
    assert int(uid) != 0
    assert refused == "refused"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can build as one account and then as another")
def test_another_account_does_not_stumble_over_what_the_former_left(bench: Bench) -> None:
    """Whoever tries another build_user after a failure: the same build goes on in the same folder."""
    flag = bench.root / "shared" / "fails"
    flag.write_text("")
    request = bench.archive(gate=f"[ ! -e {flag} ]\n")
    assert codes(run.build(request)) == ["build_failed"]
    flag.unlink()
    assert build(replace(request, build_user="daemon")).changed
    assert (bench.base / "ccache").stat().st_uid == pwd.getpwnam("daemon").pw_uid


# --- CUDA: a toolkit of scripts, C++ in the place of CUDA ---


def cuda(bench: Bench, version: str = "1.0", main: str = MAIN, **more: object) -> Request:
    """A build with a toolkit that is not there for real; the machine has no driver unless ``more`` says so."""
    given: dict[str, object] = {"sysroot": str(bench.root / "bare"), "nvidia_smi": "/no/such/nvidia-smi", **more}
    request = replace(bench.archive(version, main=main), backend="cuda", cuda_root=str(bench.toolkit()))
    return replace(request, **given)  # type: ignore[arg-type]


def found(outcome: run.Outcome) -> dict[str, str]:
    return {check["check"]: check["found"] for check in outcome.proof}


def test_a_cuda_build_without_a_driver(bench: Bench) -> None:
    bench.toolkit(link_the_stub=True)
    outcome = build(cuda(bench, model_architecture="qwen4exp"))
    folder = Path(outcome.release or "")
    # llama-bench was not asked for; the proof on GPUs needs it.
    assert sorted(path.name for path in (folder / "bin").iterdir()) == [
        "llama-bench",
        "llama-fit-params",
        "llama-server",
    ]
    assert found(outcome)["architectures"] == "1 x sm_70"
    assert found(outcome)["model architecture"] == "qwen4exp is known"
    assert "compute" not in found(outcome)
    assert any("has not computed on one yet" in note for note in outcome.notes)
    # The stub served for linking and for the proof, and is not in the way of the driver that will come.
    dynamic = subprocess.run(["readelf", "-d", folder / "lib/libggml-cuda.so"], capture_output=True, text=True).stdout
    assert "libcuda.so.1" in dynamic
    assert "stubs" not in dynamic
    assert found(outcome)["run path"] == f"$ORIGIN, $ORIGIN/../lib, {bench.root}/cuda-12.2/lib64"
    assert not build(cuda(bench, model_architecture="qwen4exp")).changed


def test_a_cuda_build_computes_on_the_cards_before_it_is_used(bench: Bench) -> None:
    outcome = build(cuda(bench, **bench.cards("7.0", "7.0")))
    assert found(outcome)["devices"] == "CUDA0, CUDA1"
    assert found(outcome)["compute"] == "CUDA0 1000 tokens/s, CUDA1 1000 tokens/s"
    assert outcome.current == outcome.release


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("COMPUTES = 2", "COMPUTES = 0"), "no kernel image is available"),
        (("DEVICES = 2", "DEVICES = 1"), "--list-devices shows CUDA0, the driver 2 GPUs"),
    ],
)
def test_an_engine_that_does_not_compute_is_not_put_into_use(bench: Bench, change: tuple[str, str], why: str) -> None:
    first = build(cuda(bench, **bench.cards("7.0", "7.0")))
    broken = cuda(bench, "2.0", main=MAIN.replace(*change), **bench.cards("7.0", "7.0"))
    outcome = run.build(broken)
    assert codes(outcome) == ["gpu_proof_failed"]
    assert why in outcome.faults[0].message
    assert not outcome.changed
    assert (bench.prefix / "current").resolve() == Path(first.release or "")
    # It stays so, and nothing is compiled again to find that out.
    again = run.build(broken)
    assert codes(again) == ["gpu_proof_failed"]
    assert again.build_s is None
    assert (bench.prefix / "current").resolve() == Path(first.release or "")


def test_code_for_another_card_is_not_put_into_use(bench: Bench) -> None:
    outcome = run.build(cuda(bench, cuda_architectures=("80-real",), **bench.cards("9.0", "9.0")))
    assert codes(outcome) == ["gpu_proof_failed"]
    assert "a card here is sm_90" in outcome.faults[0].message
    assert not (bench.prefix / "current").exists()
    # To be used elsewhere it may be built.
    assert build(cuda(bench, cuda_architectures=("80-real",), switch=False, **bench.cards("9.0", "9.0"))).release


def test_a_release_is_tried_when_the_driver_comes_and_when_it_changes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    original = proof.prove_on_gpus

    def watch(folder: Path, cards: Cards, *more: object) -> list[dict[str, str]]:
        tried.append(cards.driver)
        return original(folder, cards, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(proof, "prove_on_gpus", watch)
    build(cuda(bench))
    assert tried == []
    for driver, times in (("535.261.03", 1), ("535.261.03", 1), ("580.95.05", 2), ("580.95.05", 2)):
        later = build(cuda(bench, **bench.cards("7.0", "7.0", driver=driver)))
        assert not later.changed
        assert "compute" in found(later)
        assert len(tried) == times, driver
    # What no longer computes is said, although nothing was to be done.
    monkeypatch.setattr(proof, "parse_bench", lambda _text: {})
    outcome = run.build(cuda(bench, **bench.cards("7.0", "7.0", driver="590.1")))
    assert codes(outcome) == ["gpu_proof_failed"]


def test_the_card_decides_in_check_mode_nothing(bench: Bench) -> None:
    request = cuda(bench, **bench.cards("7.0", "7.0"))
    made = build(request)
    (Path(made.release or "") / release.GPU_PROOF).unlink()
    again = build(request, check_mode=True)
    assert not again.changed
    assert not (Path(made.release or "") / release.GPU_PROOF).exists()


def test_programs_that_newer_sources_call_otherwise(bench: Bench) -> None:
    outcome = build(replace(bench.archive(), targets=("rpc-server",)))
    assert (Path(outcome.release or "") / "bin/rpc-server").is_file()
    manifest = json.loads((Path(outcome.release or "") / "release.json").read_text())
    assert manifest["inputs"]["options"]["GGML_RPC"] == "ON"


def test_an_engine_that_does_not_know_the_model_is_not_put_into_use(bench: Bench, in_use: Path) -> None:
    outcome = run.build(replace(bench.archive("2.0"), model_architecture="qwen9"))
    assert codes(outcome) == ["model_architecture_unknown"]
    assert unchanged(bench, in_use)
