# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Folders, records and processes the lab remembers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.lab import clear, gpus, podman
from tests.lab.cli import main
from tests.lab.errors import LabError
from tests.lab.files import write_atomic
from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.paths import Paths
from tests.lab.record import Record, Server

HOST = Host(cgroups="private", layout="", may_raise_limits=False, open_files=1, processes=1, systemd=False)


def test_folders_from_the_environment() -> None:
    plain = Paths.from_environment({"HOME": "/home/a"})
    assert (plain.cache, plain.state) == (Path("/home/a/.cache/volta-llm"), Path("/home/a/.local/state/volta-llm/lab"))
    xdg = Paths.from_environment({"HOME": "/home/a", "XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s"})
    assert (xdg.cache, xdg.state) == (Path("/c/volta-llm"), Path("/s/volta-llm/lab"))
    own = Paths.from_environment({"HOME": "/home/a", "VOLTA_LAB_CACHE": "/x/volta-lab", "VOLTA_LAB_STATE": "/y"})
    assert (own.cache, own.state) == (Path("/x/volta-lab"), Path("/y"))


def test_two_states_have_two_runtime_folders(tmp_path: Path) -> None:
    assert Paths(tmp_path, tmp_path / "a").runtime != Paths(tmp_path, tmp_path / "b").runtime


def test_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = Record(
        name="demo",
        subnet="10.213.1.0/24",
        network="volta-demo-abc",
        bridge="vlab-1",
        image="localhost/volta-lab:x",
        holder={"pid": 1, "start": 2, "boot": "b"},
        machines=[1, 2],
        gpus="v100x4",
        made={"1": "v100x4"},
        servers=[Server(root="/srv", url="http://10.213.1.1:8800", port=8800, process={"pid": 3})],
    )
    record.save(tmp_path)

    assert Record.load(tmp_path) == record
    assert Record.load(tmp_path / "nowhere") is None


def test_start_time_of_a_process_with_a_difficult_name() -> None:
    fields = ["S", *(str(number) for number in range(4, 53))]
    assert podman.start_time(f"17 (a b) c) {' '.join(fields)}") == 22


def test_an_ended_process_is_not_alive() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # Ended, and still listed: nobody has asked for its status yet.
    assert Path(f"/proc/{process.pid}/stat").exists()
    assert podman.process_identity(process.pid) is None
    process.wait()
    assert podman.process_identity(process.pid) is None


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    identity = podman.process_identity(os.getpid())

    assert podman.is_alive(identity)
    assert identity is not None
    assert not podman.is_alive({**identity, "start": 1})
    assert not podman.is_alive({**identity, "boot": "another"})
    assert not podman.is_alive(None)


def test_call_without_a_holder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="mount namespace is gone"):
        podman.Podman(Paths(tmp_path, tmp_path), HOST).command(["ps"])


def test_call_enters_the_namespace_and_the_group(tmp_path: Path) -> None:
    calls = podman.Podman(Paths(tmp_path, tmp_path), HOST)
    write_atomic(calls.paths.holder, f'{{"pid": {os.getpid()}, "start": 0, "boot": ""}}')
    identity = podman.process_identity(os.getpid())
    assert identity is not None
    write_atomic(calls.paths.holder, str(identity).replace("'", '"'))

    command = calls.command(["start", "demo-1"], group="demo-1")
    assert f"--target={os.getpid()}" in command
    assert f"/sys/fs/cgroup/{calls.paths.runtime.name}/demo-1" in command
    assert command[-3:] == ["podman", "start", "demo-1"]


def test_atomic_write_says_whether_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "new" / "f"

    assert write_atomic(path, "a", mode=0o600)
    assert not write_atomic(path, "a")
    assert write_atomic(path, "b", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["f"]


@pytest.mark.parametrize("name", ["", "Demo", "1x", "a_b", "a/b", "x" * 41])
def test_bad_lab_names(name: str) -> None:
    with pytest.raises(LabError, match="lower case"):
        Lab(name, host=HOST)


def test_a_folder_that_is_not_the_labs_is_not_removed(tmp_path: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()

    with pytest.raises(LabError, match="was not removed"):
        clear.remove(precious)
    assert precious.is_dir()


def test_a_folder_of_the_lab_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "volta-llm" / "lab"
    folder.mkdir(parents=True)
    clear.remove(folder)
    assert not folder.exists()
    clear.remove(folder)


def test_gpus_without_a_simulator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "SIMULATOR", tmp_path / "gone.py")
    with pytest.raises(LabError, match="--gpus none"):
        gpus.require("v100x4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "Bad Name"], "lower case"),
        (["up", "x", "-n", "0"], "1 to 200"),
        (["up", "x", "--gpus", "tpu"], "--gpus tpu: choose one of: none, v100x4"),
        (["up", "x", "--var", "a"], "--var a"),
        (["exec", "x", "1"], "exec needs a command"),
        (["serve", "x", "/nowhere-at-all"], "is not a folder"),
        (["reset", "x"], "There is no lab x"),
        (["ssh", "x"], "There is no lab x"),
    ],
)
def test_one_message_and_status_1(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VOLTA_LAB_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("VOLTA_LAB_CACHE", str(tmp_path / "cache"))

    assert main(arguments) == 1
    written = capsys.readouterr()
    assert written.err.startswith("error: ")
    assert message in written.err
    assert written.out == ""
    assert not list(tmp_path.rglob("lab.json"))
