# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A model of Ollama kept as it is to be, against the lab's stand-in for Ollama and for its registry."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.ollama import models, placing
from ansible_collections.volta.llm.plugins.module_utils.ollama.client import Client
from ansible_collections.volta.llm.plugins.module_utils.ollama.models import Keeper, Outcome, Request
from ansible_collections.volta.llm.plugins.module_utils.ollama.names import parse_name
from ansible_collections.volta.llm.plugins.module_utils.ollama.recipe import Expected
from ansible_collections.volta.llm.plugins.module_utils.ollama.store import Store
from ansible_collections.volta.llm.plugins.module_utils.transfer.store import Places, Stamp, read_stamp

from tests.lab.ollama.gguf_file import small_gguf
from tests.lab.ollama.registry import RegistryHandler, publish_model
from tests.lab.ollama.running import Registry, Standin

ROOT = Path(__file__).parents[3]
NAME = "volta-small:latest"
#: Pieces of a few parts, so slow that a test can come in between.
SLOW = {"pull_bytes_per_second": 50_000, "part_bytes": 200_000, "retry_seconds": 0.01}


class Odd(RegistryHandler):
    """A registry that can be told to answer otherwise, by a word in the path: status and body, or a function."""

    odd: dict[str, Any] = {}  # noqa: RUF012 - set by each test anew

    def answer(self, send_body: bool) -> None:
        for word, answer in list(self.odd.items()):
            if word in self.path:
                if callable(answer):
                    answer()
                    continue
                status, body = answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if send_body:
                    self.wfile.write(body)
                return
        super().answer(send_body)


class Bench:
    """A server with its registry, and runs against it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        Odd.odd = {}
        self.registry = Registry(folder / "registry", Odd)
        self.server = Standin(folder / "ollama", registry=self.registry.url)
        self.slept: list[float] = []

    @property
    def published(self) -> dict[str, str]:
        return self.registry.published

    @property
    def weights(self) -> Path:
        return self.server.blob(self.published["model"])

    def request(self, name: str = "volta-small", **options: Any) -> Request:
        there = {"base_url": self.server.url or "http://127.0.0.1:1", "models_directory": str(self.server.store)}
        return Request(**{"name": name, "wait": 0.0, "stall_timeout": 20.0, **there, **options})

    def keep(self, name: str = "volta-small", **options: Any) -> Outcome:
        return Keeper(self.request(name, **options), self.slept.append).run()

    def tree(self) -> dict[str, tuple[int, int, int]]:
        """Everything in the store: inode, size and time by path."""
        return {
            str(path.relative_to(self.server.store)): (s.st_ino, s.st_size, s.st_mtime_ns)
            for path in self.server.store.rglob("*")
            if path.is_file() and (s := path.stat())
        }

    @property
    def reads(self) -> list[str]:
        """What was fetched from the registry."""
        return [path for method, path, _ in self.registry.requests if method == "GET" and path.startswith("/bytes")]

    def listed(self) -> list[str]:
        return [line.split()[0] for line in self.server.command("list").stdout.splitlines()[1:]]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    with made.registry, made.server:
        yield made


def codes(outcome: Outcome) -> list[str]:
    return [fault.code for fault in outcome.faults]


def flip(path: Path) -> None:
    """Another byte in the middle, and the time of before, as a bad disk does it."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def held(bench: Bench, path: Path) -> bool:
    """Whether the server has the file open, as a pull has as long as it receives."""
    assert bench.server.process is not None
    for link in Path(f"/proc/{bench.server.process.pid}/fd").iterdir():
        # It may be closed meanwhile.
        with contextlib.suppress(OSError):
            if link.readlink() == path:
                return True
    return False


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.01)


# -- pulled and verified ----------------------------------------------------------------------------------------------


def test_a_model_is_pulled_and_proved_and_the_second_run_does_nothing(bench: Bench) -> None:
    first = bench.keep()
    assert (codes(first), first.changed, first.action, first.verified) == ([], True, "pulled", True)
    assert (first.digest, first.blobs_hashed) == (bench.published["manifest"], 5)
    assert (
        first.bytes_pulled == first.size == sum(path.stat().st_size for path in bench.server.store.glob("blobs/sha*"))
    )
    assert bench.listed() == [NAME]
    before, fetched = bench.tree(), len(bench.registry.requests)
    second = bench.keep()
    assert (codes(second), second.changed, second.action, second.verified) == ([], False, None, True)
    assert (second.bytes_pulled, second.blobs_hashed, second.digest) == (0, 0, first.digest)
    assert (bench.tree(), len(bench.registry.requests)) == (before, fetched)
    assert second.details == {
        "architecture": "llama",
        "parameter_size": "2.62M",
        "parameter_count": 2623744,
        "quantization": "Q4_0",
        "context": 32768,
    }


def test_all_is_hashed_again_when_asked_for(bench: Bench) -> None:
    bench.keep()
    full = bench.keep(full=True)
    assert (codes(full), full.changed, full.blobs_hashed, full.bytes_pulled) == ([], False, 5, 0)


def test_a_model_that_others_have_pulled_is_verified_once(bench: Bench) -> None:
    bench.server.command("pull", "volta-small")
    first, second = bench.keep(), bench.keep()
    assert (first.changed, first.blobs_hashed, first.bytes_pulled) == (False, 5, 0)
    assert second.blobs_hashed == 0


def test_a_name_with_its_registry_and_http(bench: Bench) -> None:
    name = f"{bench.registry.host}/library/volta-small"
    assert codes(bench.keep(name)) == ["registry_not_trusted"]
    outcome = bench.keep(name, insecure=True)
    assert (codes(outcome), outcome.name, outcome.verified) == ([], f"{name}:latest", True)
    assert (bench.server.store / "manifests" / bench.registry.host / "library" / "volta-small" / "latest").is_file()


def test_capitals_name_the_same_model(bench: Bench) -> None:
    bench.keep()
    again = bench.keep("Volta-Small:LATEST")
    assert (codes(again), again.changed, again.verified) == ([], False, True)


# -- what is asked for ------------------------------------------------------------------------------------------------


def test_what_ollama_shows_is_held_against_what_was_asked_for(bench: Bench) -> None:
    right = Expected("llama", "2.6M", "Q4_0", 32768, None)
    assert codes(bench.keep(expected=right)) == []
    wrong = bench.keep(expected=Expected("qwen3", "8B", "Q8_0", 65536, 1))
    assert codes(wrong) == ["model_differs"] * 5
    assert (wrong.changed, wrong.verified) == (False, True)


def test_a_digest_is_the_one_that_list_shows_or_that_of_the_weights(bench: Bench) -> None:
    for digest in (bench.published["manifest"][:12], f"sha256:{bench.published['manifest']}", bench.published["model"]):
        assert codes(bench.keep(digest=digest)) == []
    assert bench.server.command("list").stdout.splitlines()[1].split()[1] == bench.published["manifest"][:12]


def test_a_tag_that_has_moved_on_is_told(bench: Bench) -> None:
    bench.keep()
    former = bench.published["manifest"]
    publish_model(bench.registry.folder, weights=small_gguf(layers=2))
    # What is here is what was asked for, so the registry is not asked.
    assert bench.keep(digest=former).changed is False
    bench.server.command("pull", "volta-small")
    moved = bench.keep(digest=former)
    assert codes(moved) == ["model_digest_differs"]
    assert former in moved.faults[0].message


def test_another_digest_than_that_of_here_is_pulled(bench: Bench) -> None:
    bench.keep()
    newer = publish_model(bench.registry.folder, weights=small_gguf(layers=2))["manifest"]
    predicted = bench.keep(digest=newer[:12], check=True)
    assert (predicted.would_pull, predicted.changed) == (True, True)
    pulled = bench.keep(digest=newer[:12])
    assert (codes(pulled), pulled.changed, pulled.digest) == ([], True, newer)


@pytest.mark.parametrize(
    ("options", "code", "subject"),
    [
        ({"name": "qwen3:8b:q4"}, "model_name_invalid", "qwen3:8b:q4"),
        ({"digest": "12"}, "bad_argument", "m:latest"),
        ({"parameters": {"num_ctx": 1}}, "bad_argument", "m:latest"),
        ({"system": "be brief"}, "bad_argument", "m:latest"),
        ({"gguf": "m.gguf"}, "bad_argument", "m:latest"),
        ({"models_directory": "models"}, "bad_argument", "models_directory"),
        ({"base_url": "localhost:11434"}, "bad_argument", "base_url"),
        ({"stall_timeout": 0}, "bad_argument", "stall_timeout"),
        ({"gguf": "/m.gguf", "parameters": {"num_context": 1}}, "model_parameter_invalid", "m:latest"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything(
    tmp_path: Path, options: dict[str, Any], code: str, subject: str
) -> None:
    outcome = Keeper(Request(**{"name": "m", "models_directory": str(tmp_path), **options})).run()
    assert [(fault.code, fault.subject) for fault in outcome.faults] == [(code, subject)]
    assert list(tmp_path.iterdir()) == []


# -- what goes wrong in a pull ----------------------------------------------------------------------------------------


def test_what_the_registry_lacks_is_told_with_name_and_tag(bench: Bench) -> None:
    outcome = bench.keep("volta-small:70b")
    assert codes(outcome) == ["source_missing"]
    assert "library/volta-small with the tag 70b" in outcome.faults[0].message
    assert bench.slept == []


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (412, b"\nThe model you are attempting to pull requires a newer version of Ollama.\n", "ollama_too_old"),
        (
            400,
            b'{"error":"The specified tag is a sharded GGUF. Ollama does not support this yet."}',
            "ollama_sharded_model",
        ),
        (401, b'{"error":"Invalid username or password."}', "source_unauthorized"),
        (403, b"denied", "source_unauthorized"),
    ],
)
def test_what_the_registry_refuses_is_not_tried_again(bench: Bench, status: int, body: bytes, code: str) -> None:
    Odd.odd = {"/manifests/": (status, body)}
    outcome = bench.keep()
    assert (codes(outcome), outcome.changed, outcome.verified) == ([code], False, None)
    assert bench.slept == []


def test_an_error_in_the_stream_fails_although_the_status_is_200(bench: Bench) -> None:
    bench.server.switch(error_in_stream="write /m/blobs/sha256-29fd-partial: no space left on device")
    outcome = bench.keep()
    assert (codes(outcome), outcome.changed) == (["disk_full"], False)
    assert bench.slept == []


def test_a_disk_that_is_too_small_is_told_before_the_bytes_come(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.server.switch(**SLOW)
    monkeypatch.setattr(models, "free_bytes", lambda folder: 1_000_000)
    outcome = bench.keep()
    assert (codes(outcome), outcome.faults[0].subject) == (["disk_full"], str(bench.server.store / "blobs"))
    assert outcome.faults[0].message == "1.5 MB are still to come, 1.0 MB are free"
    assert not bench.weights.exists()
    # Ollama ends a pull that nobody follows.
    until(lambda: not any("has it open" in leftover.in_use for leftover in leftovers(bench)))


def test_a_file_that_does_not_fit_is_not_sent(bench: Bench, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "free_bytes", lambda folder: 1000)
    outcome = bench.keep("mine", gguf=str(gguf), link=False)
    assert (codes(outcome), outcome.placed, bench.listed()) == (["disk_full"], None, [])


def test_what_may_pass_is_tried_again_with_growing_pauses(bench: Bench) -> None:
    bench.server.switch(error_in_stream="max retries exceeded: EOF")
    outcome = bench.keep(retries=3)
    assert codes(outcome) == ["source_unreachable"]
    # The first try has brought a layer, so three more may bring nothing.
    assert bench.slept == [1.0, 2.0, 4.0]


def test_a_registry_that_comes_back_is_enough(bench: Bench) -> None:
    Odd.odd = {"/manifests/": (503, b"come back later")}

    def come_back(seconds: float) -> None:
        bench.slept.append(seconds)
        Odd.odd = {}

    outcome = Keeper(bench.request(), come_back).run()
    assert (codes(outcome), outcome.verified, len(bench.slept)) == ([], True, 1)


def test_a_pull_that_stands_still_is_broken_off(bench: Bench) -> None:
    """Ollama goes on saying how far it is, so silence is no sign."""
    held = threading.Event()
    Odd.odd = {f"/bytes/v2/library/volta-small/blobs/sha256:{bench.published['model']}": lambda: held.wait(60)}
    outcome = bench.keep(stall_timeout=0.4, retries=1)
    held.set()
    assert codes(outcome) == ["pull_stalled"]
    assert "nothing new for" in outcome.faults[0].message
    assert bench.slept == [1.0]


def coming(bench: Bench) -> bool:
    """Whether bytes of the weights are on their way."""
    partial = bench.weights.with_name(f"{bench.weights.name}-partial")
    return partial.exists() and partial.stat().st_blocks > 0


def test_a_server_that_is_restarted_in_the_middle_costs_only_a_pause(bench: Bench) -> None:
    bench.server.switch(**SLOW)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(0.2)

    keeper = Keeper(bench.request(retries=30), pause)
    thread = threading.Thread(target=keeper.run)
    thread.start()
    until(lambda: coming(bench))
    bench.server.stop(signal.SIGKILL)
    bench.server.switch()
    bench.server.start()
    thread.join(60)
    assert (codes(keeper.out), keeper.out.verified) == ([], True)
    assert keeper.out.bytes_pulled == keeper.out.size
    assert pauses


def test_a_run_that_is_killed_is_gone_on_with(bench: Bench) -> None:
    bench.server.switch(**SLOW)
    process = start(bench)
    until(lambda: coming(bench))
    process.kill()
    process.wait()
    # Ollama ends a pull that nobody follows any more, and writes down what it has.
    until(lambda: not any("has it open" in leftover.in_use for leftover in leftovers(bench)))
    before = Keeper(bench.request())._store.held()[bench.published["model"]]
    assert not bench.weights.exists()
    bench.server.switch()
    outcome = bench.keep()
    assert (codes(outcome), outcome.verified) == ([], True)
    assert outcome.size is not None
    assert before > 0
    assert outcome.bytes_pulled == outcome.size - before


def leftovers(bench: Bench) -> list[Any]:
    return Keeper(bench.request())._store.leftovers()


def start(bench: Bench) -> subprocess.Popen[bytes]:
    """Another run, in a process of its own."""
    code = (
        "import json, sys; "
        "from ansible_collections.volta.llm.plugins.module_utils.ollama.models import Keeper, Request; "
        "out = Keeper(Request(**json.loads(sys.argv[1]))).run(); "
        "print(json.dumps([out.changed, out.waited, out.bytes_pulled, [f.code for f in out.faults]]))"
    )
    options = {
        "name": "volta-small",
        "base_url": bench.server.url,
        "models_directory": str(bench.server.store),
        "progress_file": str(bench.folder / "progress.json"),
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".collections")}
    command = [sys.executable, "-c", code, json.dumps(options)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


def test_of_two_runs_one_waits_and_finds_it_done(bench: Bench) -> None:
    bench.server.switch(**SLOW)
    first = start(bench)
    until(lambda: coming(bench))
    shown = bench.folder / "second.json"
    second = bench.keep(progress_file=str(shown))
    out, _ = first.communicate(timeout=60)
    assert json.loads(out)[0] is True
    assert json.loads(out)[3] == []
    assert (second.waited, second.changed, second.bytes_pulled, second.blobs_hashed, codes(second)) == (
        *(True, False, 0, 0),
        [],
    )


def test_progress_tells_how_much_has_come(bench: Bench) -> None:
    bench.server.switch(**SLOW)
    process = start(bench)
    seen: set[int] = set()

    def enough() -> bool:
        try:
            record = json.loads((bench.folder / "progress.json").read_text())
        except (OSError, ValueError):
            return False
        assert (record["unit"], record["subject"]) == ("bytes", NAME)
        if record["total"] and record["phase"] == "":
            seen.add(record["done"])
        return len(seen) >= 2

    until(enough)
    bench.server.switch()
    process.communicate(timeout=60)
    assert process.returncode == 0


# -- hashes that are wrong --------------------------------------------------------------------------------------------


def test_another_hash_on_every_try_ends_with_memory_and_disk_suspected(bench: Bench) -> None:
    bench.server.switch(different_hash_each_time=True)
    outcome = bench.keep()
    assert codes(outcome) == ["blob_hash_unstable"]
    assert "2 tries to fetch it, 2 wrong hashes" in outcome.faults[0].message
    assert "memtest86+" in outcome.faults[0].remedy
    assert len([path for path in bench.reads if path.endswith(bench.published["model"])]) <= 4


def test_the_same_wrong_hash_twice_is_the_registry_s(bench: Bench) -> None:
    path = bench.registry.folder / "v2/library/volta-small/blobs" / f"sha256:{bench.published['model']}"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    outcome = bench.keep()
    assert codes(outcome) == ["blob_from_source_wrong"]
    assert hashlib.sha256(content).hexdigest() in outcome.faults[0].message


def test_bytes_that_change_once_the_pull_has_succeeded_are_found(bench: Bench) -> None:
    bench.server.switch(blob_flip="later")
    outcome = bench.keep()
    assert codes(outcome)[0] in ("blob_hash_unstable", "blob_from_source_wrong")
    bench.server.switch()
    outcome = bench.keep(repair=True)
    assert (codes(outcome), outcome.verified) == ([], True)


# -- blobs that are wrong ---------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "code"), [(flip, "blob_corrupt"), (cut, "blob_short"), (lambda path: path.unlink(), "blob_missing")]
)
def test_a_listed_model_with_a_broken_blob_is_found_and_on_leave_mended(
    bench: Bench, harm: Callable[[Path], None], code: str
) -> None:
    bench.keep()
    harm(bench.weights)
    assert bench.listed() == [NAME]
    before = bench.tree()
    found = bench.keep()
    assert (codes(found), found.changed, found.verified, found.bytes_pulled) == ([code], False, False, 0)
    assert found.faults[0].subject == str(bench.weights)
    assert "`repair`" in found.faults[0].remedy
    # But for the stamp, which proves no blob any more that was found wrong.
    after = bench.tree()
    assert after.items() <= before.items()
    assert {path.rpartition("/")[2] for path in set(before) - set(after)} <= {f"{bench.weights.name}.stamp.json"}
    predicted = bench.keep(repair=True, check=True)
    assert (codes(predicted), predicted.changed, predicted.action) == ([], True, "repaired")
    assert bench.tree() == after
    mended = bench.keep(repair=True)
    assert (codes(mended), mended.changed, mended.action, mended.verified) == ([], True, "repaired", True)
    assert mended.bytes_pulled == bench.weights.stat().st_size
    again = bench.keep(repair=True)
    assert (again.changed, again.blobs_hashed) == (False, 0)


def test_all_that_is_broken_is_told_at_once(bench: Bench) -> None:
    bench.keep()
    image = Keeper(bench.request())._store.read(parse_name("volta-small"))
    for layer, harm in zip(image.layers, (flip, cut, lambda path: path.unlink()), strict=False):
        harm(bench.server.blob(layer.sha256))
    assert sorted(codes(bench.keep())) == ["blob_corrupt", "blob_missing", "blob_short"]


def test_a_broken_blob_that_was_there_before_a_pull_is_found(bench: Bench) -> None:
    """Ollama takes what lies under a blob's name for the blob."""
    bench.weights.parent.mkdir(parents=True, exist_ok=True)
    source = bench.registry.folder / "v2/library/volta-small/blobs" / f"sha256:{bench.published['model']}"
    shutil.copy(source, bench.weights)
    flip(bench.weights)
    found = bench.keep()
    assert (codes(found), found.verified) == (["blob_corrupt"], False)
    mended = bench.keep(repair=True)
    assert (codes(mended), mended.action, mended.verified) == ([], "repaired", True)


def test_a_broken_blob_that_others_need_too_is_told_so(bench: Bench) -> None:
    bench.keep()
    bench.server.command("cp", "volta-small", "other")
    flip(bench.weights)
    assert "other:latest" in bench.keep().faults[0].remedy
    bench.keep(repair=True)
    other = bench.keep("other")
    assert (codes(other), other.verified, other.blobs_hashed) == ([], True, 0)


def test_a_model_in_memory_is_let_go_when_it_is_mended(bench: Bench) -> None:
    bench.keep()
    bench.server.command("run", "volta-small", "hello")
    assert NAME in bench.server.command("ps").stdout
    flip(bench.weights)
    outcome = bench.keep(repair=True)
    assert any("unloaded" in note for note in outcome.notes)
    until(lambda: NAME not in bench.server.command("ps").stdout)


def test_a_manifest_that_is_broken(bench: Bench) -> None:
    bench.keep()
    manifest = bench.server.store / "manifests/registry.ollama.ai/library/volta-small/latest"
    for content in (b"", b"{"):
        manifest.write_bytes(content)
        found = bench.keep()
        assert (codes(found), found.faults[0].subject) == (["manifest_broken"], str(manifest))
        assert codes(bench.keep(state="absent")) == ["manifest_broken"]
        mended = bench.keep(repair=True)
        assert (codes(mended), mended.changed, mended.verified) == ([], True, True)
    manifest.write_bytes(b"{")
    gone = bench.keep(state="absent", repair=True)
    assert (codes(gone), gone.changed, manifest.exists()) == ([], True, False)


# -- the server and its store -----------------------------------------------------------------------------------------


def test_a_service_that_is_down_is_a_fault_and_in_check_mode_none(bench: Bench) -> None:
    bench.keep()
    bench.server.stop()
    down = bench.keep(wait=1.0)
    assert (codes(down), down.faults[0].subject) == (["ollama_not_answering"], bench.server.url)
    assert "systemctl status ollama" in down.faults[0].remedy
    assert bench.slept == [0.5, 0.5]
    there = bench.keep(check=True, expected=Expected(architecture="qwen3"))
    assert (codes(there), there.changed, there.verified, there.would_verify) == ([], False, True, True)
    other = bench.keep("other", check=True)
    assert (codes(other), other.changed, other.would_pull, other.would_verify) == ([], True, True, True)
    # What is not there needs no server to be absent.
    gone = bench.keep("other", state="absent")
    assert (codes(gone), gone.changed) == ([], False)
    assert codes(bench.keep(state="absent")) == ["ollama_not_answering"]


def test_a_server_that_takes_a_moment_to_start_is_waited_for(bench: Bench) -> None:
    bench.server.stop()

    def begin(seconds: float) -> None:
        if bench.server.process is not None and bench.server.process.poll() is not None:
            bench.server.start()

    outcome = Keeper(bench.request(wait=10.0), begin).run()
    assert (codes(outcome), outcome.verified) == ([], True)


def test_another_folder_than_the_server_s_is_refused_before_anything_is_pulled(bench: Bench, tmp_path: Path) -> None:
    bench.keep()
    asked = len(bench.registry.requests)
    for folder in (tmp_path / "none", tmp_path / "empty"):
        if folder.name == "empty":
            (folder / "blobs").mkdir(parents=True)
        for state in ("present", "absent"):
            outcome = bench.keep("other", models_directory=str(folder), state=state)
            assert codes(outcome) == ["ollama_store_elsewhere"]
            assert "OLLAMA_MODELS" in outcome.faults[0].remedy
            assert f"the server lists {NAME}" in outcome.faults[0].message
            # In check mode the service may be one that is still to be set up anew.
            predicted = bench.keep("other", models_directory=str(folder), state=state, check=True)
            assert (codes(predicted), predicted.would_verify, predicted.would_pull) == ([], True, state == "present")
    assert len(bench.registry.requests) == asked


def test_check_mode_changes_nothing(bench: Bench) -> None:
    before = bench.tree()
    outcome = bench.keep(check=True)
    assert (codes(outcome), outcome.changed, outcome.would_pull, outcome.verified) == ([], True, True, None)
    assert (bench.tree(), bench.registry.requests) == (before, [])
    bench.server.command("pull", "volta-small")
    before = bench.tree()
    outcome = bench.keep(check=True)
    assert (outcome.changed, outcome.verified, outcome.blobs_hashed) == (False, True, 5)
    outcome = bench.keep(check=True, state="absent")
    assert (outcome.changed, outcome.would_delete) == (True, True)
    assert bench.tree() == before


def test_without_the_right_to_write_into_the_store_the_model_is_proved_each_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: Store) -> Path:
        raise PermissionError(13, "Permission denied", str(store.blobs))

    monkeypatch.setattr(Store, "own_folder", refuse)
    first, second = bench.keep(), bench.keep()
    assert (codes(first), first.verified, first.changed) == (["proof_not_kept"], True, True)
    assert (codes(second), second.verified, second.changed, second.blobs_hashed) == (
        *(["proof_not_kept"], True, False),
        5,
    )


# -- absent -----------------------------------------------------------------------------------------------------------


def test_an_absent_model_takes_its_blobs_and_stamps_along(bench: Bench) -> None:
    bench.keep()
    first, second = bench.keep(state="absent"), bench.keep(state="absent")
    assert (codes(first), first.changed, first.action) == ([], True, "deleted")
    assert (codes(second), second.changed, second.action) == ([], False, None)
    assert [name for name in bench.tree() if not name.endswith(".lock")] == []


def test_blobs_that_others_need_stay(bench: Bench) -> None:
    bench.keep()
    bench.server.command("cp", "volta-small", "other")
    bench.keep(state="absent")
    other = bench.keep("other")
    assert (codes(other), other.verified, other.blobs_hashed) == ([], True, 0)


# -- made from a file -------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A file as model delivery leaves it: with its stamp."""
    path = tmp_path / "models" / "m.gguf"
    Places(path).folder.mkdir(parents=True)
    path.write_bytes(small_gguf(layers=3))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    Stamp.of(path.stat(), sha256, "https://example.org/m.gguf", "sha256").write(Places(path).stamp)
    return path


@pytest.fixture
def _no_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "share_blocks", lambda origin, target: False)


@pytest.mark.usefixtures("_no_clones")
def test_a_model_is_made_from_a_file_without_a_second_copy_and_without_hashing(bench: Bench, gguf: Path) -> None:
    options = {"gguf": str(gguf), "parameters": {"num_ctx": "8192"}, "system": "Be brief."}
    predicted = bench.keep("mine", check=True, **options)
    assert (codes(predicted), predicted.would_create, predicted.would_pull) == ([], True, False)
    made = bench.keep("mine", **options)
    assert (codes(made), made.changed, made.action, made.placed, made.verified) == ([], True, "created", "link", True)
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
    assert bench.server.blob(sha256).samefile(gguf)
    # Only the small blobs that Ollama has made.
    assert made.blobs_hashed == len(list(bench.server.store.glob("blobs/sha256-*"))) - 1
    stamp = read_stamp(Places(gguf).stamp)
    assert stamp is not None
    assert stamp.fits(gguf.stat())
    shown = Client(bench.server.url).show("mine")
    assert shown["parameters"].split() == ["num_ctx", "8192"]
    assert shown["system"] == "Be brief."
    before = bench.tree()
    again = bench.keep("mine", **options)
    assert (codes(again), again.changed, again.blobs_hashed, bench.tree()) == ([], False, 0, before)


def test_num_ctx_in_a_model_is_the_context_that_a_request_gets(bench: Bench, gguf: Path) -> None:
    """Row F16: an OpenAI endpoint that ignores num_ctx of a request. That of the model counts."""
    bench.keep("mine", gguf=str(gguf), parameters={"num_ctx": 8192})
    bench.server.command("run", "mine", "hello")
    assert " 8192 " in bench.server.command("ps").stdout


@pytest.mark.usefixtures("_no_clones")
@pytest.mark.parametrize(
    "change",
    [
        {"parameters": {"num_ctx": 4096}},
        {"parameters": None},
        {"system": "Other."},
        {"system": None},
        {"template": "{{ .Prompt }}"},
    ],
)
def test_what_a_model_is_made_with_is_kept_as_it_is_asked_for(bench: Bench, gguf: Path, change: dict[str, Any]) -> None:
    options = {"gguf": str(gguf), "parameters": {"num_ctx": 8192}, "system": "Be brief."}
    first = bench.keep("mine", **options)
    options.update(change)
    changed, again = bench.keep("mine", **options), bench.keep("mine", **options)
    assert (codes(changed), changed.changed, changed.placed) == ([], True, None)
    assert changed.digest != first.digest
    assert (codes(again), again.changed, again.blobs_hashed) == ([], False, 0)


def test_a_file_that_cannot_be_shared_is_sent_and_hashed(bench: Bench, gguf: Path) -> None:
    made = bench.keep("mine", gguf=str(gguf), link=False)
    assert (codes(made), made.placed, made.verified) == ([], "upload", True)
    blob = bench.server.blob(hashlib.sha256(gguf.read_bytes()).hexdigest())
    assert not blob.samefile(gguf)
    assert any("was copied into the store" in note for note in made.notes)
    again = bench.keep("mine", gguf=str(gguf), link=False)
    assert (again.changed, again.blobs_hashed, again.placed) == (False, 0, None)


def test_a_file_that_nothing_proves_is_refused(bench: Bench, gguf: Path) -> None:
    Places(gguf).stamp.unlink()
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
    refused = bench.keep("mine", gguf=str(gguf))
    assert codes(refused) == ["gguf_unproved"]
    assert sha256 in refused.faults[0].message
    assert codes(bench.keep("mine", gguf=str(gguf), digest="0" * 64)) == ["gguf_unproved"]
    assert bench.listed() == []
    assert codes(bench.keep("mine", gguf=str(gguf), digest=sha256)) == []
    assert codes(bench.keep("other", gguf=str(gguf), allow_unverified=True)) == []


def test_a_file_without_a_stamp_is_read_once(bench: Bench, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Places(gguf).stamp.unlink()
    bench.keep("mine", gguf=str(gguf), allow_unverified=True)
    monkeypatch.setattr(models, "read_hash", None)
    again = bench.keep("mine", gguf=str(gguf), allow_unverified=True)
    assert (codes(again), again.changed) == ([], False)
    # Having read it is no proof of what it should be.
    assert codes(bench.keep("mine", gguf=str(gguf))) == ["gguf_unproved"]
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
    assert codes(bench.keep("mine", gguf=str(gguf), digest=sha256)) == []
    assert codes(bench.keep("mine", gguf=str(gguf))) == []


def test_a_file_that_is_still_to_be_brought_is_no_fault_in_check_mode(bench: Bench, tmp_path: Path) -> None:
    predicted = bench.keep("mine", gguf=str(tmp_path / "none.gguf"), check=True)
    assert (codes(predicted), predicted.would_create, predicted.changed) == ([], True, True)


def test_a_file_that_changed_since_it_was_proved_is_refused(bench: Bench, gguf: Path) -> None:
    content = bytearray(gguf.read_bytes())
    content[-1] ^= 1
    gguf.write_bytes(content)
    outcome = bench.keep("mine", gguf=str(gguf))
    assert codes(outcome) == ["gguf_unproved"]
    assert "when it was verified" in outcome.faults[0].message


@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_in_shards_is_refused_with_the_way_to_join_them(bench: Bench, tmp_path: Path, by_name: bool) -> None:
    path = tmp_path / ("m-00001-of-00002.gguf" if by_name else "m.gguf")
    path.write_bytes(small_gguf(split=2))
    outcome = bench.keep("mine", gguf=str(path), allow_unverified=True)
    assert codes(outcome) == ["ollama_sharded_model"]
    assert "one of 2 shards" in outcome.faults[0].message
    assert "llama-gguf-split --merge" in outcome.faults[0].remedy


def test_what_is_no_gguf_is_told_as_what_it_is(bench: Bench, tmp_path: Path) -> None:
    page = tmp_path / "m.gguf"
    page.write_text("<!doctype html>")
    assert codes(bench.keep("mine", gguf=str(page), allow_unverified=True)) == ["gguf_wrong_file"]
    assert codes(bench.keep("mine", gguf=str(tmp_path / "none.gguf"))) == ["gguf_not_found"]


def test_the_file_may_go_once_the_model_is_there(bench: Bench, gguf: Path) -> None:
    bench.keep("mine", gguf=str(gguf))
    gguf.unlink()
    outcome = bench.keep("mine", gguf=str(gguf))
    assert (codes(outcome), outcome.changed, outcome.verified) == ([], False, True)
    assert any("not there any more" in note for note in outcome.notes)


@pytest.mark.usefixtures("_no_clones")
def test_a_broken_blob_of_a_model_from_a_file_is_brought_again(bench: Bench, gguf: Path) -> None:
    bench.keep("mine", gguf=str(gguf), link=False)
    blob = bench.server.blob(hashlib.sha256(gguf.read_bytes()).hexdigest())
    flip(blob)
    assert codes(bench.keep("mine", gguf=str(gguf))) == ["blob_corrupt"]
    mended = bench.keep("mine", gguf=str(gguf), repair=True)
    assert (codes(mended), mended.action, mended.verified, mended.placed) == ([], "repaired", True, "link")


# -- partials ---------------------------------------------------------------------------------------------------------


def age(bench: Bench) -> None:
    for path in bench.server.store.glob("blobs/*-partial*"):
        os.utime(path, (time.time() - 7200, time.time() - 7200))


def test_partials_of_a_pull_that_runs_are_left_and_those_of_one_that_ended_removed_on_request(bench: Bench) -> None:
    """Row C30: orphaned partials of many unfinished pulls."""
    other = publish_model(bench.registry.folder, "other", weights=small_gguf(layers=2))["model"]
    bench.keep()
    bench.server.switch(**SLOW)
    pull = subprocess.Popen(
        [sys.executable, str(bench.server.program), "pull", "other"],
        env=bench.server.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: held(bench, bench.server.blob(other).with_name(f"sha256-{other}-partial")))
        age(bench)
        running = bench.keep(clean_partials=True)
        assert (codes(running), running.changed, running.partials["count"]) == (["partials_in_use"], False, 1)
        assert running.partials["files"] > 1
    finally:
        bench.server.stop(signal.SIGKILL)
        pull.kill()
        pull.wait()
    bench.server.environment["OLLAMA_NOPRUNE"] = "1"
    bench.server.switch()
    bench.server.start()
    age(bench)
    left = bench.keep()
    assert (codes(left), left.changed, left.partials["count"]) == ([], False, 1)
    assert left.partials["removed"] == 0
    predicted = bench.keep(clean_partials=True, check=True)
    assert (predicted.changed, predicted.partials["removed"]) == (True, left.partials["size"])
    assert list(bench.server.store.glob("blobs/*-partial*")) != []
    cleaned = bench.keep(clean_partials=True)
    assert (codes(cleaned), cleaned.changed, cleaned.partials["count"]) == ([], True, 0)
    assert cleaned.partials["removed"] == left.partials["size"]
    assert list(bench.server.store.glob("blobs/*-partial*")) == []
    assert bench.keep(clean_partials=True).changed is False


def test_a_run_that_failed_removes_nothing(bench: Bench) -> None:
    partial = bench.server.store / "blobs" / f"sha256-{'a' * 64}-partial"
    partial.write_bytes(b"x" * 4096)
    age(bench)
    outcome = bench.keep("other", clean_partials=True)
    assert codes(outcome) == ["source_missing"]
    assert (outcome.partials["count"], partial.exists()) == (1, True)
