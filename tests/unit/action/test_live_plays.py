# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Live progress in real plays against this machine, with this environment's ansible-core."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit.transfer.site import Exchange, Site

ROOT = Path(__file__).parents[3]
CONTENT = b"GGUF" + bytes(range(256)) * 40_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
URL = "/model.gguf"


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site({URL: CONTENT})
    made.start()
    yield made
    made.stop()


@dataclass
class Play:
    """How a play ended: its output, its return code, and each task's result by the task's name."""

    output: str
    rc: int
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        return [text for text in self.output.splitlines() if text.startswith("model_download  ")]


@dataclass
class Stage:
    """Runs plays with everything Ansible keeps in a folder of the test's own."""

    folder: Path

    @property
    def dest(self) -> Path:
        return self.folder / "srv" / "model.gguf"

    @property
    def jobs(self) -> Path:
        return self.folder / "async"

    def start(self, tasks: list[dict[str, Any]], *options: str, **environment: str) -> subprocess.Popen:
        book = self.folder / "play.json"
        saves = []
        for task in tasks:
            saves.append({**task, "register": "result"} if "register" not in task else task)
            name = task.get("register", "result")
            saves.append(
                {
                    "name": "save",
                    "ansible.builtin.copy": {
                        "content": "{{ " + name + " | to_json }}",
                        "dest": str(self.folder / f"{task['name']}.json"),
                    },
                    "check_mode": False,
                    "when": "not (" + name + " is skipped)",
                }
            )
        book.write_text(
            json.dumps([{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": saves}])
        )
        settings = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_LOCAL_TEMP": str(self.folder / "tmp"),
            "ANSIBLE_REMOTE_TEMP": str(self.folder / "tmp"),
            "ANSIBLE_ASYNC_DIR": str(self.jobs),
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "ANSIBLE_INVENTORY_UNPARSED_WARNING": "false",
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "NO_COLOR": "1",
            **environment,
        }
        settings.pop("ANSIBLE_FORCE_COLOR", None)
        command = [sys.executable, "-m", "ansible", "playbook", str(book), *options]
        return subprocess.Popen(
            command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def run(self, tasks: list[dict[str, Any]], *options: str, **environment: str) -> Play:
        process = self.start(tasks, *options, **environment)
        output, _ = process.communicate(timeout=120)
        play = Play(output, process.returncode)
        for task in tasks:
            saved = self.folder / f"{task['name']}.json"
            if saved.exists():
                play.results[task["name"]] = json.loads(saved.read_text())
        return play

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.jobs.iterdir()) if self.jobs.exists() else []


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def download(stage: Stage, url: str, name: str = "download", sha256: str = SHA256, **more: Any) -> dict[str, Any]:
    options = {"dest": str(stage.dest), "url": url, "sha256": sha256, "stall_timeout": 60, **more.pop("options", {})}
    return {"name": name, "volta.llm.model_download": options, **more}


class Gate:
    """Sends the first half, and the rest once it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def __call__(self, exchange: Exchange) -> None:
        data = exchange.content[exchange.start : exchange.end]
        span = f"bytes {exchange.start}-{exchange.end - 1}/{len(exchange.content)}" if exchange.ranged else None
        exchange.head(206 if span else 200, Content_Length=len(data), Content_Range=span)
        exchange.body(data[: len(data) // 2])
        self._open.wait(60)
        exchange.body(data[len(data) // 2 :])


def read_until(process: subprocess.Popen, text: str) -> str:
    """The output up to the first line that holds ``text``."""
    seen = ""
    for got in process.stdout:
        seen += got
        if text in got:
            return seen
    raise AssertionError(f"the play ended without {text!r}:\n{seen}")


@pytest.mark.parametrize("pipelining", ["true", "false"])
def test_a_long_task_shows_lines_and_returns_its_own_result(site: Site, stage: Stage, pipelining: str) -> None:
    gate = site.script = Gate()
    process = stage.start([download(stage, site.url(URL))], ANSIBLE_PIPELINING=pipelining)
    head = read_until(process, "model_download  localhost")
    gate.open()
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0, rest
    (text,) = [text for text in head.splitlines() if text.startswith("model_download  ")]
    assert "model.gguf" in text
    assert "% of 10.2 MB" in text
    result = json.loads((stage.folder / "download.json").read_text())
    assert result["changed"] is True
    assert result["sha256"] == SHA256
    assert "ansible_job_id" not in result
    assert stage.leftovers() == []


def test_a_short_task_shows_nothing(site: Site, stage: Stage) -> None:
    play = stage.run([download(stage, site.url(URL)), download(stage, site.url(URL), "again")])
    assert play.rc == 0
    assert play.lines == []
    assert play.results["download"]["changed"] is True
    assert play.results["again"]["changed"] is False
    assert stage.leftovers() == []


def test_a_failure_is_the_modules_own(site: Site, stage: Stage) -> None:
    play = stage.run([download(stage, site.url(URL), sha256="0" * 64, ignore_errors=True)])
    result = play.results["download"]
    assert result["failed"] is True
    assert [fault["code"] for fault in result["faults"]] == ["hash_mismatch"]
    assert result["msg"].startswith("[hash_mismatch]")
    assert stage.leftovers() == []


@pytest.mark.parametrize("option", ["--diff", "--check"])
def test_a_folder_under_a_file_s_name_is_refused_and_left_as_it_is(site: Site, stage: Stage, option: str) -> None:
    in_the_way = stage.dest.parent / "model.gguf"
    in_the_way.mkdir(parents=True, mode=0o751)
    files = [{"name": "model.gguf", "url": site.url(URL), "sha256": SHA256}]
    options = {"dest": str(stage.dest.parent), "files": files, "mode": "0640"}
    play = stage.run([{"name": "download", "volta.llm.model_download": options, "ignore_errors": True}], option)
    assert [fault["code"] for fault in play.results["download"]["faults"]] == ["dest_not_writable"]
    assert in_the_way.stat().st_mode & 0o777 == 0o751


def test_check_mode_runs_plainly(site: Site, stage: Stage) -> None:
    play = stage.run([download(stage, site.url(URL))], "--check")
    assert play.rc == 0
    assert play.results["download"]["changed"] is True
    assert not stage.dest.exists()
    assert site.asked == []
    assert not stage.jobs.exists()


@pytest.mark.parametrize("value", ["0", "off"])
def test_progress_switched_off(site: Site, stage: Stage, value: str) -> None:
    play = stage.run([download(stage, site.url(URL))], VOLTA_PROGRESS_INTERVAL=value)
    assert play.results["download"]["changed"] is True
    assert not stage.jobs.exists()


def test_the_variable_wins_and_nonsense_is_named(site: Site, stage: Stage) -> None:
    play = stage.run([download(stage, site.url(URL))], "-e", "volta_progress_interval=soon")
    assert play.rc != 0
    # Wrapped and quoted as the callback of each release likes it.
    assert "volta_progress_interval is 'soon'" in " ".join(play.output.replace("''", "'").split())


def test_no_log_leaves_nothing_in_the_output(site: Site, stage: Stage) -> None:
    task = download(stage, site.url(URL), no_log=True, options={"token": "hidden-token"})
    play = stage.run([task], "-vvv")
    assert play.rc == 0
    assert play.lines == []
    assert "hidden-token" not in play.output
    assert not stage.jobs.exists()


def test_a_signed_query_shows_nowhere(site: Site, stage: Stage) -> None:
    task = download(stage, site.url(URL) + "?X-Amz-Signature=hidden-signature")
    play = stage.run([task])
    assert play.rc == 0
    assert "hidden-signature" not in json.dumps(play.results)


def start_task(stage: Stage, url: str, **more: Any) -> dict[str, Any]:
    return download(stage, url, "start", **{"async": 600, "poll": 0, "register": "job", "changed_when": False, **more})


def join_task(stage: Stage, url: str, **more: Any) -> dict[str, Any]:
    return download(stage, url, "join", options={"job_file": "{{ job.results_file }}"}, **more)


def test_start_returns_at_once_and_join_brings_the_result(site: Site, stage: Stage) -> None:
    gate = site.script = Gate()
    process = stage.start([start_task(stage, site.url(URL)), join_task(stage, site.url(URL))])
    # The first task has ended although the file cannot be whole: its end is held back.
    head = read_until(process, "model_download  localhost")
    assert "TASK [join]" in head
    gate.open()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    result = json.loads((stage.folder / "join.json").read_text())
    assert result["changed"] is True
    assert result["bytes_fetched"] == len(CONTENT)
    assert json.loads((stage.folder / "start.json").read_text())["changed"] is False
    assert stage.leftovers() == []


def test_a_failure_in_the_background_shows_at_the_join(site: Site, stage: Stage) -> None:
    site.script = lambda exchange: exchange.status(404)
    play = stage.run([start_task(stage, site.url(URL)), join_task(stage, site.url(URL), ignore_errors=True)])
    assert play.results["start"].get("failed") is not True
    assert [fault["code"] for fault in play.results["join"]["faults"]] == ["source_missing"]
    # It is the job's failure, not that of a second attempt.
    assert len(site.asked) == 1


def test_a_download_that_outlives_its_play_is_adopted(site: Site, stage: Stage) -> None:
    gate = site.script = Gate()
    process = stage.start([download(stage, site.url(URL))])
    read_until(process, "model_download  localhost")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    second = stage.start([download(stage, site.url(URL))])
    seen = read_until(second, "another run is on it")
    gate.open()
    rest, _ = second.communicate(timeout=120)
    assert second.returncode == 0, seen + rest
    result = json.loads((stage.folder / "download.json").read_text())
    assert result["waited"] is True
    assert result["changed"] is False
    assert result["sha256"] == SHA256
    assert len(site.asked) == 1


def test_a_killed_job_is_told_and_the_next_run_goes_on(site: Site, stage: Stage) -> None:
    gate = site.script = Gate()
    process = stage.start([download(stage, site.url(URL), ignore_errors=True)])
    read_until(process, "model_download  localhost")
    (job,) = [path for path in stage.jobs.iterdir() if path.name.startswith("j")]
    for pid in processes_of(job.name.partition(".")[0]):
        os.kill(pid, signal.SIGKILL)
    for pid in processes_of("AnsiballZ_model_download"):
        os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    result = json.loads((stage.folder / "download.json").read_text())
    assert result["failed"] is True
    assert "Run the playbook again" in result["msg"], output
    gate.open()
    play = stage.run([download(stage, site.url(URL))])
    assert play.results["download"]["changed"] is True


def processes_of(word: str) -> list[int]:
    """Our own processes with ``word`` among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                argv = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if word.encode() in argv and b"sh\0-c" not in argv:
                found.append(int(entry.name))
    return found


def test_a_user_without_a_place_for_jobs_runs_plainly(site: Site, stage: Stage) -> None:
    stage.jobs.write_text("a file where the folder would be made")
    play = stage.run([download(stage, site.url(URL))], ANSIBLE_ASYNC_DIR=str(stage.jobs / "async"))
    assert play.rc == 0, play.output
    assert play.results["download"]["changed"] is True
