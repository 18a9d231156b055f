# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Role model in real plays against this machine: the lock is written once and holds; what comes from here arrives."""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.gguf.build import real
from tests.unit.transfer.site import Site
from tests.unit.transfer.test_sets import COMMIT, hub_of
from tests.unit.transfer.test_storage import leave_partials

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Bench:
    """An inventory of its own with this machine in it."""

    folder: Path

    @property
    def lock(self) -> Path:
        return self.folder / "inventory" / "group_vars" / "model-lock" / "small.yml"

    def play(self, playbook: str | list[dict[str, Any]], variables: dict[str, Any], *options: str) -> tuple[int, str]:
        """Return code and output of a playbook of the collection, or of tasks."""
        if not isinstance(playbook, str):
            written = self.folder / "tasks.yml"
            written.write_text(json.dumps([{"hosts": "gpu_servers", "gather_facts": False, "tasks": playbook}]))
        place = self.folder / "srv"
        given = {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_python_interpreter": sys.executable,
            "model_directory": str(place),
            "model_name": "small",
            "model_owner": pwd.getpwuid(os.getuid()).pw_name,
            "model_group": grp.getgrgid(os.getgid()).gr_name,
            **variables,
        }
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("ansible-playbook")),
                f"playbooks/{playbook}.yml" if isinstance(playbook, str) else str(written),
                f"--inventory={self.folder / 'inventory'}",
                # Null leaves a variable to the tasks, which extra variables would win over.
                f"--extra-vars={json.dumps({name: value for name, value in given.items() if value is not None})}",
                *options,
            ],
            cwd=ROOT,
            env={
                **{key: value for key, value in os.environ.items() if "proxy" not in key.lower()},
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                # A playbook that lies elsewhere finds the collection as well.
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_ASYNC_DIR": str(self.folder / "jobs"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout, done.stderr)
        return done.returncode, " ".join(done.stdout.split())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "hosts.yml").write_text("gpu_servers: {hosts: {here: {}}}\n")
    return Bench(tmp_path)


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site({})
    made.start()
    yield made
    made.stop()


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return real(tmp_path / "whole.gguf").read_bytes()


def hub(site: Site) -> dict[str, Any]:
    return {"type": "huggingface", "repo": "org/name", "endpoint": site.url("")}


def test_the_first_run_writes_the_lock_and_nothing_else_is_accepted(bench: Bench, site: Site, content: bytes) -> None:
    # C24: pinned to a commit, by the hub's own hash; a later upload is refused.
    hub_of(site, {"m.gguf": content})
    settings = {"model_files": [{"name": "m.gguf"}], "model_sources": [hub(site)]}
    code, said = bench.play("model", settings)
    assert code == 0
    assert "holds what small must be" in said
    (source,) = yaml.safe_load(bench.lock.read_text())["sources"]
    (locked,) = source["files"]
    assert (locked["size"], locked["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert source["commit"] == COMMIT
    hub_of(site, {"m.gguf": content[:-1] + bytes([content[-1] ^ 1])})
    (bench.folder / "srv" / "small" / "m.gguf").unlink()
    code, said = bench.play("model", settings)
    assert code == 2
    assert "[hash_mismatch]" in said
    assert "model_lock_renew" in said
    assert "changed=0" in said
    before = bench.lock.read_text()
    code, said = bench.play("model_lock", settings)
    assert code == 2
    assert "[lock_mismatch]" in said
    assert bench.lock.read_text() == before
    # Where the new upload is meant, that is said.
    code, _ = bench.play("model_lock", {**settings, "model_lock_renew": True})
    assert code == 0
    (source,) = yaml.safe_load(bench.lock.read_text())["sources"]
    assert source["files"][0]["sha256"] != locked["sha256"]
    assert not (bench.folder / "srv" / "small" / "m.gguf").exists()
    code, _ = bench.play("model", settings)
    assert code == 0


def test_without_any_hash_the_role_refuses(bench: Bench, site: Site, content: bytes) -> None:
    site.files = {"/m.gguf": content}
    settings = {"model_files": [{"name": "m.gguf", "size": len(content)}], "model_sources": [{"url": site.url("/")}]}
    code, said = bench.play("model", settings)
    assert code == 2
    assert "[not_locked]" in said
    assert not (bench.folder / "srv" / "small").exists()
    assert not bench.lock.exists()
    # Allowed, it is told in each run.
    for changed in (1, 0):
        code, said = bench.play("model", {**settings, "model_allow_unverified": True})
        assert code == 0
        assert f"changed={changed}" in said
        assert "no SHA-256 is given: only its size was checked" in said
    assert not bench.lock.exists()


def test_a_file_of_the_control_node_is_sent_and_goes_on(bench: Bench) -> None:
    content = b"GGUF" + random.Random(3).randbytes(70 << 20)
    here = bench.folder / "here"
    here.mkdir()
    (here / "m.gguf").write_bytes(content)
    settings = {
        "model_files": [{"name": "m.gguf", "sha256": hashlib.sha256(content).hexdigest()}],
        "model_sources": [{"type": "controller", "controller": str(here)}],
    }
    # What an earlier run had sent of this very file.
    there = bench.folder / "srv" / "small" / ".volta-transfer"
    there.mkdir(parents=True)
    (there / "m.gguf.incoming").write_bytes(content[: 10 << 20])
    stat = (here / "m.gguf").stat()
    (there / "m.gguf.incoming.from").write_text(f"{stat.st_size} {stat.st_mtime_ns}")
    code, _ = bench.play("model", settings, "--extra-vars=volta_progress_interval=0.01")
    assert code == 0
    assert (bench.folder / "srv" / "small" / "m.gguf").read_bytes() == content
    # What the disk reads is kept there too, where it says that it rotates.
    assert {path.name for path in there.iterdir()} - {"storage.json"} == {"m.gguf.lock", "m.gguf.stamp.json"}


def role(entry: str, variables: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": f"{entry} {variables['model_name']}",
        "ansible.builtin.include_role": {"name": "volta.llm.model", "tasks_from": entry},
        "vars": variables,
        **more,
    }


def model(site: Site, name: str, content: bytes) -> dict[str, Any]:
    site.files[f"/{name}.gguf"] = content
    described = {"name": f"{name}.gguf", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {"model_name": name, "model_files": [described], "model_sources": [{"url": site.url("/")}]}


def test_two_models_of_one_play_are_each_joined_by_its_own_start(bench: Bench, site: Site) -> None:
    one, other = (model(site, name, b"GGUF" + random.Random(name).randbytes(200_000)) for name in ("one", "other"))
    files = {path: content for path, content in site.files.items()}
    results = bench.folder / "results"
    results.mkdir()

    def keep(name: str) -> dict[str, Any]:
        return {
            "name": f"keep {name}",
            "ansible.builtin.copy": {
                "content": "{{ {'result': model_result, 'fetched': __model_files.bytes_fetched} | to_json }}",
                "dest": str(results / name),
            },
        }

    tasks = [
        role("start", one),
        role("start", other),
        role("main", one),
        keep("one"),
        role("main", other),
        keep("other"),
        # A second join of the same finds nothing to wait for.
        role("main", one),
        keep("again"),
    ]
    code, _ = bench.play(tasks, {"model_name": None})
    assert code == 0
    kept = {path.name: json.loads(path.read_text()) for path in results.iterdir()}
    for name in ("one", "other"):
        assert kept[name]["result"]["path"] == str(bench.folder / "srv" / name / f"{name}.gguf")
        # The result is the job's own: a join that lost its job would find the file there and have fetched nothing.
        assert kept[name]["fetched"] == len(files[f"/{name}.gguf"])
    assert kept["again"]["result"] == kept["one"]["result"]
    assert kept["again"]["fetched"] == 0
    assert {path for path, _ in site.asked} == set(files)
    assert list((bench.folder / "jobs").iterdir()) == []


def test_a_model_that_failed_is_the_one_whose_join_fails(bench: Bench, site: Site) -> None:
    good, bad = (model(site, name, b"GGUF" + random.Random(name).randbytes(200_000)) for name in ("good", "bad"))
    del site.files["/bad.gguf"]
    tasks = [role("start", bad), role("start", good), role("main", good), role("main", bad)]
    code, said = bench.play(tasks, {"model_name": None})
    assert code == 2
    assert f"[source_missing] {site.url('/bad.gguf')}" in said
    assert (bench.folder / "srv" / "good" / "good.gguf").exists()
    # The job's failure, not that of a second attempt.
    assert [path for path, _ in site.asked].count("/bad.gguf") == 1


def test_what_unfinished_pulls_left_is_told_in_every_run_and_left_alone(bench: Bench, content: bytes) -> None:
    # C30
    store = bench.folder / "store"
    paths = leave_partials(store)
    (bench.folder / "usb").mkdir()
    (bench.folder / "usb" / "m.gguf").write_bytes(content)
    settings = {
        "model_files": [{"name": "m.gguf", "sha256": hashlib.sha256(content).hexdigest()}],
        "model_sources": [
            {"type": "ollama", "model": "small:1b", "store": str(store)},
            {"file": f"{bench.folder}/usb/"},
        ],
    }
    for changed in (1, 0):
        code, said = bench.play("model", settings)
        assert code == 0
        assert f"{store}/blobs: 3 partial blobs of unfinished pulls take " in said
        assert f"rm {store}/blobs/sha256-*-partial*" in said
        assert f"changed={changed}" in said
    assert all(path.exists() for path in paths)


def test_the_site_starts_the_download_before_the_build_and_joins_it_before_serving() -> None:
    stages = [
        entry["ansible.builtin.import_playbook"] for entry in yaml.safe_load((ROOT / "playbooks/site.yml").read_text())
    ]
    order = [stages.index(f"{stage}.yml") for stage in ("plan", "model_start", "engine", "model", "serve")]
    assert order == sorted(order)
    # What is refused costs no download.
    assert stages.index("gpu.yml") < stages.index("model_start.yml")
