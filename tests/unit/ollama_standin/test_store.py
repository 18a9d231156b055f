# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the stand-in keeps on the disk: manifests, blobs, partials, and what a restart does with them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, ClassVar

import ollama
import pytest

from tests.lab.fileserver import FileServer, Range
from tests.lab.ollama import standin as program
from tests.lab.ollama.gguf_file import small_gguf
from tests.lab.ollama.registry import RegistryHandler, publish_model
from tests.lab.ollama.running import Registry, Standin

MANIFEST = Path("manifests/registry.ollama.ai/library/volta-small/latest")


def aged(path: Path) -> Path:
    """Older than what a start spares."""
    os.utime(path, (time.time() - 4000,) * 2)
    return path


def test_a_manifest_is_kept_as_the_registry_sent_it(
    client: ollama.Client, standin: Standin, registry: Registry
) -> None:
    client.pull("volta-small")
    kept = (standin.store / MANIFEST).read_bytes()
    assert kept == (registry.folder / "v2/library/volta-small/manifests/latest").read_bytes()
    content = json.loads(kept)
    names = {path.name for path in (standin.store / "blobs").iterdir()}
    layers = [*content["layers"], content["config"]]
    assert names == {layer["digest"].replace(":", "-") for layer in layers}
    for layer in layers:
        path = standin.blob(layer["digest"])
        assert path.stat().st_size == layer["size"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == layer["digest"].removeprefix("sha256:")
        assert path.stat().st_mode & 0o777 == 0o644


def test_what_is_created_is_written_as_go_writes_json(client: ollama.Client, standin: Standin) -> None:
    client.pull("volta-small")
    client.create("own", from_="volta-small", parameters={"stop": ["<end>"], "num_ctx": 512})
    raw = (standin.store / "manifests/registry.ollama.ai/library/own/latest").read_text()
    assert raw.startswith(
        '{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json",'
        '"config":{"mediaType":"application/vnd.docker.container.image.v1+json","digest":"sha256:'
    )
    assert raw.endswith("}\n")
    params = next(layer for layer in json.loads(raw)["layers"] if layer["mediaType"].endswith("params"))
    # Keys in order, signs that HTML knows escaped, a line break at the end.
    assert standin.blob(params["digest"]).read_bytes() == b'{"num_ctx":512,"stop":["\\u003cend\\u003e"]}\n'


def test_blobs_that_are_there_are_neither_fetched_nor_looked_at(
    client: ollama.Client, standin: Standin, registry: Registry
) -> None:
    client.pull("volta-small")
    blob = standin.blob(registry.published["model"])
    program.flip(blob, 5000)
    registry.requests.clear()
    assert client.pull("volta-small").status == "success"
    assert [path for _, path, _ in registry.requests] == ["/v2/library/volta-small/manifests/latest"]
    assert hashlib.sha256(blob.read_bytes()).hexdigest() != registry.published["model"]
    assert len(client.list().models) == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_pull_leaves_partials_and_goes_on(
    make: Callable[..., Standin], registry: Registry, how: signal.Signals
) -> None:
    standin = make().start()
    standin.switch(pull_bytes_per_second=400_000, part_bytes=1_000_000)
    client = ollama.Client(standin.url)
    size = len(small_gguf())
    for line in client.pull("volta-small", stream=True):
        if line.total == size and (line.completed or 0) > 200_000:
            break
    else:
        pytest.fail("the pull ended before it was interrupted")
    if how is signal.SIGKILL:
        standin.stop(how)
    else:
        assert standin.stop(how) == 0
    blob = standin.blob(registry.published["model"])
    partial = blob.with_name(f"{blob.name}-partial")
    assert not blob.exists()
    assert partial.stat().st_size == size
    records = [json.loads(partial.with_name(f"{partial.name}-{at}").read_text()) for at in range(2)]
    assert [(one["N"], one["Offset"], one["Size"]) for one in records] == [
        (0, 0, 1_000_000),
        (1, 1_000_000, size - 1_000_000),
    ]
    done = sum(one["Completed"] for one in records)
    # A server that is killed has not written down what it had.
    assert done > 0 or how is signal.SIGKILL
    standin.switch()
    registry.requests.clear()
    standin.start()
    client = ollama.Client(standin.url)
    assert client.pull("volta-small").status == "success"
    ranges = [part for method, path, part in registry.requests if path.endswith(registry.published["model"]) and part]
    fetched = 0
    for part in ranges:
        first, _, last = part.removeprefix("bytes=").partition("-")
        fetched += int(last) - int(first) + 1
    assert fetched == size - done
    assert hashlib.sha256(blob.read_bytes()).hexdigest() == registry.published["model"]
    assert list(blob.parent.glob("*-partial*")) == []


def test_a_client_that_goes_away_stops_the_pull(client: ollama.Client, standin: Standin, registry: Registry) -> None:
    standin.switch(pull_bytes_per_second=100_000)
    stream = client.pull("volta-small", stream=True)
    for line in stream:
        if line.completed:
            break
    stream.close()  # type: ignore[attr-defined]
    record = standin.blob(registry.published["model"]).with_name(f"sha256-{registry.published['model']}-partial-0")
    for _ in range(500):
        completed = json.loads(record.read_text() or "{}").get("Completed", 0)
        if completed:
            break
        time.sleep(0.02)
    assert completed
    assert client.list().models == []


def test_partials_are_sparse(client: ollama.Client, standin: Standin, registry: Registry) -> None:
    standin.switch(pull_bytes_per_second=50_000)
    stream = client.pull("volta-small", stream=True)
    next(line for line in stream if line.completed)
    partial = standin.blob(registry.published["model"]).with_name(f"sha256-{registry.published['model']}-partial")
    found = partial.stat()
    stream.close()  # type: ignore[attr-defined]
    assert found.st_size == len(small_gguf())
    assert found.st_blocks * 512 < found.st_size / 2


def test_a_start_removes_old_partials_and_blobs_of_no_manifest(make: Callable[..., Standin]) -> None:
    standin = make().start()
    ollama.Client(standin.url).pull("volta-small")
    standin.stop()
    blobs = standin.store / "blobs"
    kept = {aged(path).name for path in blobs.iterdir()}
    old = [blobs / ("sha256-" + "a" * 64), blobs / ("sha256-" + "b" * 64 + "-partial"), blobs / "sha256-123456"]
    fresh = blobs / ("sha256-" + "c" * 64 + "-partial")
    for path in [*old, fresh]:
        path.write_bytes(b"x")
    for path in old:
        aged(path)
    standin.start()
    assert {path.name for path in blobs.iterdir()} == kept | {fresh.name}
    assert "total unused blobs removed: 1" in standin.log()


def test_noprune_keeps_them(make: Callable[..., Standin]) -> None:
    standin = make(environment={"OLLAMA_NOPRUNE": "1"})
    blobs = standin.store / "blobs"
    blobs.mkdir(parents=True)
    old = blobs / ("sha256-" + "b" * 64 + "-partial")
    old.write_bytes(b"x")
    aged(old)
    standin.start()
    assert old.exists()
    assert "total blobs" not in standin.log()


def test_a_broken_manifest_stops_the_pruning(make: Callable[..., Standin]) -> None:
    standin = make()
    manifest = standin.store / MANIFEST
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"schemaVersion":2,')
    blobs = standin.store / "blobs"
    blobs.mkdir()
    old = blobs / ("sha256-" + "b" * 64 + "-partial")
    old.write_bytes(b"x")
    aged(old)
    standin.start()
    assert old.exists()
    assert "corrupt manifests detected, skipping prune operation" in standin.log()
    assert ollama.Client(standin.url).list().models == []


def test_a_new_version_of_a_model_removes_the_layers_that_it_no_longer_has(
    tmp_path: Path, make: Callable[..., Standin]
) -> None:
    with Registry(tmp_path / "other") as registry:
        standin = make(registry=registry.url).start()
        client = ollama.Client(standin.url)
        client.pull("volta-small")
        former = standin.blob(registry.published["model"])
        fresh = publish_model(registry.folder, weights=small_gguf(layers=2))
        statuses = [line.status for line in client.pull("volta-small", stream=True)]
        assert statuses[-2:] == ["removing unused layers", "success"]
        assert not former.exists()
        assert standin.blob(fresh["model"]).is_file()
        assert client.list().models[0].digest == fresh["manifest"]


def test_a_missing_home_or_store_that_cannot_be_made_ends_the_start(make: Callable[..., Standin]) -> None:
    standin = make()
    blocked = standin.folder / "file"
    blocked.write_text("")
    standin.environment["OLLAMA_MODELS"] = str(blocked / "models")
    ended = standin.command("serve")
    assert ended.returncode == 1
    assert "ensure path elements are traversable" in ended.stderr
    del standin.environment["HOME"]
    ended = standin.command("serve")
    assert (ended.returncode, ended.stderr) == (1, "Error: $HOME is not defined\n")


def test_a_taken_port_ends_the_second_server(standin: Standin) -> None:
    ended = standin.command("serve")
    assert ended.returncode == 1
    assert "bind: address already in use" in ended.stderr


def test_a_connection_that_breaks_is_taken_up_where_it_broke(tmp_path: Path, make: Callable[..., Standin]) -> None:
    class Cut(RegistryHandler):
        """Ends the first answers of each blob of weights in the middle."""

        cuts: ClassVar[list[int]] = [0]

        def send_body(self, handle: BinaryIO, part: Range) -> None:
            if part.length > 100_000 and self.command == "GET" and self.headers.get("Range") and self.cuts[0] < 3:
                self.cuts[0] += 1
                handle.seek(part.start)
                self.wfile.write(handle.read(100_000))
                self.close_connection = True
                return
            super().send_body(handle, part)

    with Registry(tmp_path / "cut", Cut) as registry:
        standin = make(registry=registry.url).start()
        standin.switch(retry_seconds=0)
        assert ollama.Client(standin.url).pull("volta-small").status == "success"
        ranges = [part for _, path, part in registry.requests if path.endswith(registry.published["model"]) and part]
        assert [part.partition("=")[2].partition("-")[0] for part in ranges] == ["0", "100000", "200000", "300000"]
        assert "attempt 2 failed: unexpected EOF" in standin.log()


def test_a_registry_that_never_delivers_is_given_up(tmp_path: Path, make: Callable[..., Standin]) -> None:
    class Empty(RegistryHandler):
        def send_body(self, handle: BinaryIO, part: Range) -> None:
            if part.length > 100_000 and self.headers.get("Range"):
                self.close_connection = True
                return
            super().send_body(handle, part)

    with Registry(tmp_path / "empty", Empty) as registry:
        standin = make(registry=registry.url).start()
        standin.switch(retry_seconds=0)
        with pytest.raises(ollama.ResponseError, match="max retries exceeded: unexpected EOF"):
            ollama.Client(standin.url).pull("volta-small")


def test_a_plain_file_server_will_do_as_the_registry_and_not_by_its_address(
    make: Callable[..., Standin], registry: Registry
) -> None:
    server = FileServer(("127.0.0.1", 0), registry.folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        standin = make(registry=server.url).start()
        client = ollama.Client(standin.url)
        assert client.pull("volta-small").status == "success"
        client.delete("volta-small")
        name = server.url.removeprefix("http://") + "/library/volta-small"
        with pytest.raises(ollama.ResponseError, match="http: no Location header in response"):
            client.pull(name, insecure=True)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_registry_can_be_named_in_the_file_of_faults(make: Callable[..., Standin], registry: Registry) -> None:
    standin = make(registry=None).start()
    standin.switch(registry=registry.url)
    assert ollama.Client(standin.url).pull("volta-small").status == "success"


def test_an_end_does_not_wait_for_a_load(make: Callable[..., Standin]) -> None:
    standin = make().start()
    client = ollama.Client(standin.url)
    client.pull("volta-small")
    standin.switch(load_seconds=1000)
    asking = threading.Thread(target=lambda: standin.command("run", "volta-small", "hello"), daemon=True)
    asking.start()
    while "waiting for llama runner" not in standin.log():
        time.sleep(0.01)
    # Meanwhile it answers.
    assert client.ps().models == []
    assert standin.stop() == 0
    asking.join()
