# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Switching a service, on a systemd that is played: what a killed run leaves, and the way back.

The molecule scenario and the demo do the same with the real systemd.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed
from ansible_collections.volta.llm.plugins.module_utils.serving.causes import cause
from ansible_collections.volta.llm.plugins.module_utils.serving.service import (
    ONCE_MORE,
    Service,
    Wanted,
    journal_tail,
    status,
)

GUARD = Path(__file__).resolve().parents[3] / "roles/llama_server/files/llama-server-guard"
OLD = "[Service]\nExecStart=/bin/old\n"
NEW = "[Service]\nExecStart=/bin/new\n"
BROKEN = "[Service]\nExecStart=/bin/broken\n"
UNREADABLE = "[Service]\nExecStart=nonsense\n"


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


@dataclass
class PlayedSystemd:
    """Knows one unit; one whose text has 'broken' does not start. ``die_at``: the call before which we are killed."""

    folder: Path
    loaded: str | None = None
    running: str | None = None
    failed: bool = False
    enabled: bool = False
    started: float = 0.0
    restarts: int = 0
    calls: list[str] = field(default_factory=list)
    die_at: int | None = None
    read_drop_ins: list[Path] = field(default_factory=list)
    #: What the process that was stopped last ran, and the unit that systemd knew then, whose ExecStopPost it runs.
    ended: tuple[str | None, str | None] = (None, None)
    #: The first start only loads a module of the kernel; the guard says so and ends it.
    loads_module: bool = False
    #: Its process hangs in the driver: it outlives SIGKILL.
    stuck: bool = False

    @property
    def path(self) -> Path:
        return self.folder / "x.service"

    def __call__(self, argv: Sequence[str], timeout: float) -> Completed:
        if self.die_at is not None and len(self.calls) == self.die_at:
            raise Killed
        self.calls.append(" ".join(argv[:2]))
        words = tuple(argv)
        if argv[0] == "systemd-analyze":
            text = Path(argv[2]).read_text()
            if "neighbour" in text:
                return Completed(words, 1, stderr="snap-x.mount: Unknown section")
            if "nonsense" in text:
                return Completed(words, 1, stderr="x.service: Service has no usable ExecStart=. Refusing.")
            return Completed(words, 0)
        if argv[0] == "journalctl" and self.loads_module:
            self.loads_module = False
            return Completed(words, 0, stdout=f"Starting x.service - x...\nnvidia-uvm was loaded: {ONCE_MORE}\n")
        if argv[0] == "journalctl":
            return Completed(
                words, 0, stdout="Starting x.service - old\nold words\nStarting x.service - x\nout of memory\n"
            )
        return getattr(self, argv[1].replace("-", "_"))(words)

    def show(self, words: tuple[str, ...]) -> Completed:
        active = "active" if self.running else "failed" if self.failed else "inactive"
        since = int((self.started - (time.time() - time.clock_gettime(time.CLOCK_MONOTONIC))) * 1e6)
        values = {
            "ActiveState": active,
            "SubState": "running" if self.running else "dead",
            "Result": "timeout" if self.stuck and not self.running else "exit-code" if self.failed else "success",
            "MainPID": str(os.getpid()) if self.running else "0",
            "UnitFileState": "enabled" if self.enabled and self.path.exists() else "disabled",
            "ExecMainStartTimestampMonotonic": str(since if self.running else 0),
            "NeedDaemonReload": "no" if self._current() == self.loaded else "yes",
            # Of a unit that is not there systemd names none.
            "DropInPaths": " ".join(map(str, self.read_drop_ins)) if self.loaded is not None else "",
            "FragmentPath": str(self.path) if self.path.exists() else "",
        }
        return Completed(words, 0, stdout="\n".join(f"{key}={value}" for key, value in values.items()))

    def _current(self) -> str | None:
        """The unit file, with settings of ours beside it."""
        if not self.path.exists():
            return None
        beside = self.folder / "x.service.d/50-volta.conf"
        return self.path.read_text() + (beside.read_text() if beside.exists() else "")

    def daemon_reload(self, words: tuple[str, ...]) -> Completed:
        self.loaded = self._current()
        self.read_drop_ins = sorted(self.folder.glob("x.service.d/*.conf"))
        return Completed(words, 0)

    def reset_failed(self, words: tuple[str, ...]) -> Completed:
        self.failed = False
        return Completed(words, 0)

    def restart(self, words: tuple[str, ...]) -> Completed:
        self.restarts += 1
        if self.running:
            self.stop(words)
        self.failed = False
        if self.loaded is None or "broken" in self.loaded or self.loads_module:
            self.failed = True
            return Completed(words, 1, stderr="Job for x.service failed.")
        self.running = self.loaded
        # Later than any file written before.
        self.started = time.time() + 0.001
        time.sleep(0.002)
        return Completed(words, 0)

    def stop(self, words: tuple[str, ...]) -> Completed:
        if self.running:
            self.ended = (self.running, self.loaded)
        self.running = None
        return Completed(words, 1 if self.stuck else 0)

    def enable(self, words: tuple[str, ...]) -> Completed:
        self.enabled = True
        return Completed(words, 0)

    def disable(self, words: tuple[str, ...]) -> Completed:
        self.enabled = False
        return Completed(words, 0)


def service(systemd: PlayedSystemd, content: str = NEW, **more: object) -> Service:
    values = {"started": True, "enabled": True, "start_timeout": 60.0, **more}
    return Service(Wanted("x", content, **values), systemd.folder, systemd)  # type: ignore[arg-type]


@pytest.fixture
def bare(tmp_path: Path) -> PlayedSystemd:
    return PlayedSystemd(tmp_path)


@pytest.fixture
def serving(tmp_path: Path) -> PlayedSystemd:
    """A machine whose service runs the old unit."""
    systemd = PlayedSystemd(tmp_path)
    assert service(systemd, OLD).converge().faults == ()
    systemd.calls.clear()
    systemd.restarts = 0
    return systemd


def names(systemd: PlayedSystemd) -> list[str]:
    return sorted(path.name for path in systemd.folder.iterdir())


def test_a_new_service(bare: PlayedSystemd) -> None:
    outcome = service(bare).converge()
    assert outcome.changes == ("unit written", "enabled", "started")
    assert (bare.running, bare.enabled, bare.restarts) == (NEW, True, 1)
    assert names(bare) == ["x.service"]


def test_the_second_run_asks_once_and_does_nothing(serving: PlayedSystemd) -> None:
    outcome = service(serving, OLD).converge()
    assert (outcome.changes, serving.calls) == ((), ["systemctl show"])


def test_check_mode_says_and_does_nothing(serving: PlayedSystemd) -> None:
    outcome = service(serving).converge(check=True)
    assert outcome.changes == ("unit written", "restarted")
    assert (outcome.before, outcome.after) == (OLD, NEW)
    assert (serving.running, serving.path.read_text(), serving.restarts) == (OLD, OLD, 0)


def test_a_change_restarts_once(serving: PlayedSystemd) -> None:
    outcome = service(serving).converge()
    assert outcome.changes == ("unit written", "restarted")
    assert (serving.running, serving.restarts, names(serving)) == (NEW, 1, ["x.service"])


def test_a_start_that_only_loads_a_module_is_no_failure(serving: PlayedSystemd) -> None:
    """systemd starts the unit again by itself, and says of the first start that it failed all the same."""
    assert ONCE_MORE in GUARD.read_text(encoding="utf-8")
    serving.loads_module = True
    outcome = service(serving).converge()
    assert (outcome.faults, serving.running, serving.restarts) == ((), NEW, 2)
    serving.loads_module = True
    outcome = service(serving, BROKEN).converge()
    assert [fault.code for fault in outcome.faults] == ["service_start_failed"]
    assert (outcome.rolled_back, serving.running) == (True, NEW)


@pytest.mark.parametrize("content", [NEW, BROKEN])
def test_a_service_is_stopped_as_it_was_started(serving: PlayedSystemd, content: str) -> None:
    """By the new unit nobody would take away what only the former one has set, such as a table of nftables."""
    service(serving, content).converge()
    assert serving.ended == (OLD, OLD)
    service(serving, OLD, started=False).converge()
    assert serving.ended[0] == serving.ended[1]


def test_a_service_that_shall_stop_is_stopped_as_it_was_started(serving: PlayedSystemd) -> None:
    service(serving, NEW, started=False).converge()
    assert (serving.ended, serving.loaded) == ((OLD, OLD), NEW)


def test_a_unit_that_does_not_start_gives_way_to_the_former(serving: PlayedSystemd) -> None:
    outcome = service(serving, BROKEN).converge()
    (fault,) = outcome.faults
    assert fault.code == "service_start_failed"
    assert "out of memory" in fault.message
    assert "old words" not in fault.message
    assert outcome.rolled_back
    assert (serving.running, serving.path.read_text(), names(serving)) == (OLD, OLD, ["x.service"])


def test_a_first_unit_that_does_not_start_is_removed(bare: PlayedSystemd) -> None:
    outcome = service(bare, BROKEN).converge()
    assert [fault.code for fault in outcome.faults] == ["service_start_failed"]
    assert (outcome.rolled_back, names(bare), bare.enabled) == (False, [], False)


def test_a_unit_that_systemd_cannot_read_is_not_written(serving: PlayedSystemd) -> None:
    with pytest.raises(FaultError) as caught:
        service(serving, UNREADABLE).converge()
    assert caught.value.fault.code == "unit_invalid"
    assert "no usable ExecStart" in caught.value.fault.message
    assert (serving.running, serving.path.read_text(), serving.restarts) == (OLD, OLD, 0)


def test_what_is_wrong_with_other_units_does_not_matter(serving: PlayedSystemd) -> None:
    assert service(serving, f"# neighbour\n{NEW}").converge().faults == ()
    assert serving.restarts == 1


@pytest.mark.parametrize("content", [NEW, BROKEN])
def test_a_run_killed_anywhere_is_completed_by_the_next(tmp_path: Path, content: str) -> None:
    """Every call to systemd is a place to die; the next run ends as an undisturbed one would."""
    for at in range(50):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        systemd = PlayedSystemd(folder)
        service(systemd, OLD).converge()
        systemd.calls.clear()
        systemd.die_at = at
        try:
            service(systemd, content).converge()
        except Killed:
            systemd.die_at = None
            outcome = service(systemd, content).converge()
        else:
            assert at > 4
            break
        if content == NEW:
            assert (systemd.running, names(systemd), outcome.faults) == (NEW, ["x.service"], ()), f"killed at {at}"
        else:
            assert [fault.code for fault in outcome.faults] == ["service_start_failed"], f"killed at {at}"
            assert (systemd.running, names(systemd)) == (OLD, ["x.service"]), f"killed at {at}"
        service(systemd, content if content == NEW else OLD).converge()
        assert service(systemd, content if content == NEW else OLD).converge().changes == ()
    else:
        pytest.fail("the run never came to its end")


def test_a_newer_key_file_calls_for_a_restart(serving: PlayedSystemd, tmp_path: Path) -> None:
    key = tmp_path / "keys"
    key.write_text("one\n")
    written = time.time()
    os.utime(key, (written, written))
    # The unit itself is older than the process.
    os.utime(serving.path, (written - 2, written - 2))
    serving.started = written - 1
    assert service(serving, OLD).converge().changes == ()
    assert service(serving, OLD, inputs=[str(key)]).converge().changes == ("restarted",)
    assert service(serving, OLD, inputs=[str(key)]).converge().changes == ()


def test_a_replaced_file_calls_for_a_restart_whatever_its_time(serving: PlayedSystemd, tmp_path: Path) -> None:
    """The played process is this one."""
    shard = tmp_path / "m-00002-of-00002.gguf"
    shard.write_bytes(b"GGUF")
    os.utime(shard, (1, 1))
    with shard.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert service(serving, OLD, inputs=[str(shard)]).converge().changes == ()
        shard.rename(f"{shard}.corrupt")
        shard.write_bytes(b"GGUF")
        os.utime(shard, (1, 1))
        assert service(serving, OLD, inputs=[str(shard)]).converge().changes == ("restarted",)


def test_a_file_from_the_future_says_nothing(serving: PlayedSystemd, tmp_path: Path) -> None:
    key = tmp_path / "keys"
    key.write_text("one\n")
    os.utime(key, (time.time() + 3600, time.time() + 3600))
    assert service(serving, OLD, inputs=[str(key), "/no/such/file"]).converge().changes == ()


def test_another_program_calls_for_a_restart(serving: PlayedSystemd, tmp_path: Path) -> None:
    """The played process is this one; a `current` link that leads elsewhere has been switched."""
    (tmp_path / "current").symlink_to("/bin/sh")
    same = os.path.realpath(f"/proc/{os.getpid()}/exe")
    assert service(serving, OLD, executable=same).converge().changes == ()
    assert service(serving, OLD, executable=str(tmp_path / "current")).converge().changes == ("restarted",)


@pytest.mark.parametrize("content", [OLD, NEW])
@pytest.mark.parametrize("read", [True, False], ids=["in force", "not read by systemd yet"])
def test_a_drop_in_that_runs_another_program(serving: PlayedSystemd, content: str, read: bool) -> None:
    drop_in = serving.folder / "x.service.d/override.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nExecStart=\nExecStart=/bin/sleep inf\n")
    if read:
        serving.daemon_reload(())
    outcome = service(serving, content).converge()
    (fault,) = outcome.faults
    assert (fault.code, fault.subject) == ("unit_overridden", str(drop_in))
    assert (outcome.changes, serving.path.read_text(), serving.restarts) == ((), OLD, 0)
    # To stop the service is always possible.
    assert service(serving, OLD, started=False).converge().changes == ("stopped",)


def test_a_drop_in_that_waits_for_a_first_unit(bare: PlayedSystemd) -> None:
    drop_in = bare.folder / "x.service.d/override.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nUser=root\n")
    outcome = service(bare).converge()
    assert [fault.code for fault in outcome.faults] == ["unit_overridden"]
    assert (outcome.changes, names(bare), bare.restarts, bare.enabled) == ((), ["x.service.d"], 0, False)


def test_stopping_and_disabling(serving: PlayedSystemd) -> None:
    outcome = service(serving, OLD, started=False, enabled=False).converge()
    assert outcome.changes == ("disabled", "stopped")
    assert (serving.running, serving.enabled) == (None, False)
    assert service(serving, OLD, started=False, enabled=False).converge().changes == ()


def test_no_systemd_is_said() -> None:
    with pytest.raises(FaultError) as caught:
        status("x.service", lambda argv, timeout: Completed(tuple(argv), None, missing=True))
    assert caught.value.fault.code == "service_control_failed"
    assert "no systemctl" in caught.value.fault.message


@pytest.mark.parametrize("said", ["Starting x.service - what it is...", "Starting what it is..."])
def test_words_of_an_earlier_start_are_not_shown(said: str) -> None:
    """The second is how systemd 249 (Ubuntu 22.04) says it, without the unit's name."""
    lines = f"{said}\nold words\n{said}\n0.00.120 I Starting the http server\nnew words\n"
    tail = journal_tail("x.service", runner=lambda argv, timeout: Completed(tuple(argv), 0, stdout=lines))
    assert tail.splitlines() == [said, "0.00.120 I Starting the http server", "new words"]


def test_a_journal_that_cannot_be_read_is_empty() -> None:
    assert journal_tail("x.service", runner=lambda argv, timeout: Completed(tuple(argv), 1)) == ""


# --- what hangs, what leaves, and why something is restarted ----------------------------------------------------------


def test_a_process_that_cannot_be_killed_gets_no_second_one_beside_it(serving: PlayedSystemd) -> None:
    """E24 NVIDIA/nvidia-docker#1553: state D on a failed GPU; only a reboot helps."""
    serving.stuck = True
    outcome = service(serving).converge()
    (fault,) = outcome.faults
    assert (fault.code, serving.restarts, outcome.rolled_back) == ("service_stuck", 0, False)
    assert str(os.getpid()) in fault.message
    assert "Reboot" in fault.remedy


def test_the_reason_of_a_restart_is_told(serving: PlayedSystemd, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("new\n")
    serving.started -= 60
    os.utime(serving.path, (0, 0))
    for check in (True, False):
        outcome = service(serving, OLD, inputs=[str(keys)]).converge(check)
        assert outcome.reasons == (f"{keys} was written since it started",)
        assert outcome.changes == ("restarted",)
    assert service(serving, NEW).converge().reasons == ("its settings changed",)
    assert serving.restarts == 2


def test_an_instance_that_leaves_takes_its_files_along(serving: PlayedSystemd) -> None:
    outcome = service(serving, "", absent=True).converge(check=True)
    assert outcome.changes == ("stopped", "disabled", "unit removed")
    assert (serving.running, names(serving)) == (OLD, ["x.service"])
    assert service(serving, "", absent=True).converge().changes == outcome.changes
    assert (serving.running, serving.enabled, names(serving), serving.loaded) == (None, False, [], None)
    assert service(serving, "", absent=True).converge().changes == ()


def test_an_instance_that_cannot_be_stopped_keeps_its_unit(serving: PlayedSystemd) -> None:
    serving.stuck = True
    outcome = service(serving, "", absent=True).converge()
    assert [fault.code for fault in outcome.faults] == ["service_stuck"]
    assert names(serving) == ["x.service"]


@pytest.mark.parametrize(
    ("lines", "meaning"),
    [
        # E10 ggml-org/llama.cpp#28506: one card of two runs out.
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 14642.00 MiB on device 1: "
            "cudaMalloc failed: out of memory",
            "GPU 1 has no room for 14642.00 MiB more",
        ),
        ("CUDA error: out of memory\n  current device: 3, in function alloc at x.cu:486", "GPU 3 ran out of memory"),
        # E20 StartupHakk/OpenMonoAgent.ai#23.
        ("error: invalid argument: 0.0.0.0", "the engine does not know the argument 0.0.0.0"),
        (
            "missing after 60 s: /dev/nvidia-uvm, 1 of 4 GPU devices (/dev/nvidia0 ...)",
            "/dev/nvidia-uvm, 1 of 4 GPU devices",
        ),
        ("a former server is still there: llama-server (pid 9, state D); it cannot", "must be rebooted"),
        (
            "error loading model: unknown model architecture: 'qwen4exp'",
            "too old for the model's architecture qwen4exp",
        ),
        (
            "tensor 'blk.2.ffn_down.weight' data is not within the file bounds, model is corrupted or incomplete",
            "cut off (blk.2.ffn_down.weight",
        ),
        ("install: cannot stat '/etc/ssl/a.pem': No such file or directory", "/etc/ssl/a.pem is not there"),
        (
            "0.00.054.395 E gguf_init_from_file: failed to open GGUF file '/srv/m-00002-of-00002.gguf' (No such",
            "/srv/m-00002-of-00002.gguf is not there",
        ),
        (
            "0.00.486.425 E llama_adapter_lora_init: failed to open '/srv/a.gguf': No such file",
            "/srv/a.gguf is not there",
        ),
        ("something else", ""),
    ],
)
def test_known_last_words_are_explained(lines: str, meaning: str) -> None:
    assert meaning in cause(f"Starting x\n{lines}\nfailed")
    assert bool(cause(lines)) == bool(meaning)


# --- settings of ours beside a unit that others wrote -----------------------------------------------------------------

SETTINGS = "[Service]\nEnvironment=A=1\n"
OTHER_SETTINGS = "[Service]\nEnvironment=A=2\n"
BROKEN_SETTINGS = "[Service]\nEnvironment=A=broken\n"


def beside(systemd: PlayedSystemd, dropin: str = SETTINGS, content: str = "", **more: object) -> Service:
    return service(systemd, content, dropin=dropin, **more)


def all_names(systemd: PlayedSystemd) -> list[str]:
    return sorted(str(path.relative_to(systemd.folder)) for path in systemd.folder.rglob("*") if path.is_file())


def test_settings_go_beside_a_unit_of_others(serving: PlayedSystemd) -> None:
    outcome = beside(serving).converge()
    assert (outcome.changes, outcome.reasons) == (("drop-in written", "restarted"), ("its settings changed",))
    assert (outcome.before, outcome.after) == ("", "")
    assert (outcome.dropin_before, outcome.dropin_after) == ("", SETTINGS)
    assert (serving.running, serving.path.read_text()) == (OLD + SETTINGS, OLD)
    assert all_names(serving) == ["x.service", "x.service.d/50-volta.conf"]
    assert beside(serving).converge().changes == ()
    assert serving.restarts == 1


def test_a_unit_of_ours_comes_along_where_there_is_none(bare: PlayedSystemd) -> None:
    assert beside(bare, content=OLD).converge(check=True).changes == (
        "unit written",
        "drop-in written",
        "enabled",
        "started",
    )
    assert all_names(bare) == []
    beside(bare, content=OLD).converge()
    assert (bare.running, bare.enabled) == (OLD + SETTINGS, True)
    assert all_names(bare) == ["x.service", "x.service.d/50-volta.conf"]
    assert beside(bare, content=OLD).converge().changes == ()


def test_settings_that_do_not_start_give_way_to_the_former(serving: PlayedSystemd) -> None:
    beside(serving).converge()
    outcome = beside(serving, BROKEN_SETTINGS).converge()
    (fault,) = outcome.faults
    assert (fault.code, outcome.rolled_back, serving.running) == ("service_start_failed", True, OLD + SETTINGS)
    assert "The former settings are in place again and running." in fault.message
    assert all_names(serving) == ["x.service", "x.service.d/50-volta.conf"]


def test_first_settings_that_do_not_start_leave_the_service_as_others_set_it(serving: PlayedSystemd) -> None:
    outcome = beside(serving, BROKEN_SETTINGS).converge()
    assert (outcome.rolled_back, serving.running, serving.loaded) == (True, OLD, OLD)
    assert all_names(serving) == ["x.service"]


def test_a_first_service_that_does_not_start_leaves_no_file(bare: PlayedSystemd) -> None:
    outcome = beside(bare, BROKEN_SETTINGS, OLD).converge()
    (fault,) = outcome.faults
    assert "The drop-in was removed again; there was none before." in fault.message
    assert (outcome.rolled_back, all_names(bare), bare.enabled, bare.loaded) == (False, [], False, None)


def test_settings_are_read_by_systemd_together_with_the_unit(serving: PlayedSystemd) -> None:
    seen = []

    def run(argv: Sequence[str], timeout: float) -> Completed:
        if argv[0] == "systemd-analyze":
            unit = Path(argv[2])
            seen.append((unit.read_text(), (unit.parent / "x.service.d/50-volta.conf").read_text()))
        return serving(argv, timeout)

    Service(Wanted("x", "", True, True, 60.0, dropin=SETTINGS), serving.folder, run).converge()
    assert seen == [(OLD, SETTINGS)]


@pytest.mark.parametrize("kind", ["new", "first", "first of others"])
@pytest.mark.parametrize("settings", [OTHER_SETTINGS, BROKEN_SETTINGS])
def test_a_killed_run_with_settings_beside_is_completed_by_the_next(tmp_path: Path, kind: str, settings: str) -> None:
    content = OLD if kind == "first" else ""
    for at in range(50):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        systemd = PlayedSystemd(folder)
        if kind != "first":
            service(systemd, OLD).converge()
        if kind == "new":
            beside(systemd).converge()
        before = (systemd.running, all_names(systemd))
        systemd.calls.clear()
        systemd.die_at = at
        try:
            beside(systemd, settings, content).converge()
        except Killed:
            systemd.die_at = None
            outcome = beside(systemd, settings, content).converge()
        else:
            assert at > 4
            break
        if settings == OTHER_SETTINGS:
            assert (systemd.running, outcome.faults) == (OLD + settings, ()), f"killed at {at}"
            assert all_names(systemd) == ["x.service", "x.service.d/50-volta.conf"]
        else:
            assert [fault.code for fault in outcome.faults] == ["service_start_failed"], f"killed at {at}"
            assert (systemd.running, all_names(systemd)) == before, f"killed at {at}"
    else:
        pytest.fail("the run never came to its end")


def test_a_later_drop_in_that_sets_what_ours_sets(serving: PlayedSystemd) -> None:
    stray = serving.folder / "x.service.d/override.conf"
    stray.parent.mkdir()
    stray.write_text("[Service]\nEnvironment=A=3\n")
    outcome = beside(serving).converge()
    (fault,) = outcome.faults
    assert (fault.code, fault.subject) == ("unit_overridden", str(stray))
    assert "sets A of x.service" in fault.message
    assert (outcome.changes, serving.running) == ((), OLD)
    stray.rename(stray.with_name("10-local.conf"))
    assert beside(serving).converge().faults == ()


def test_a_script_is_known_by_the_links_to_it(serving: PlayedSystemd, tmp_path: Path) -> None:
    """Its process runs the interpreter, so that what the process runs says nothing of the release."""
    program = tmp_path / "releases/2/x"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    current = tmp_path / "current"
    current.symlink_to(program.parent)
    serving.started = time.time() + 1
    assert service(serving, OLD, executable=str(current / "x")).converge().changes == ()
    serving.started = current.lstat().st_mtime - 1
    os.utime(serving.path, (0, 0))
    outcome = service(serving, OLD, executable=str(current / "x")).converge()
    assert outcome.reasons == (f"{current}/x leads to {program} since it started",)


@pytest.mark.parametrize(
    ("name", "text"),
    [("x.service", OLD), ("x.service.d/proxy.conf", "[Service]\nEnvironment=HTTPS_PROXY=http://p:1\n")],
)
def test_what_others_wrote_since_the_start_is_in_force_after_the_next_run(
    serving: PlayedSystemd, name: str, text: str
) -> None:
    beside(serving).converge()
    for file in serving.folder.rglob("*.*"):
        os.utime(file, (0, 0))
    path = serving.folder / name
    path.write_text(text)
    serving.started = path.stat().st_mtime - 1
    outcome = beside(serving).converge()
    assert outcome.reasons == (f"{path} was written since it started",)
    assert beside(serving).converge().changes == ()
