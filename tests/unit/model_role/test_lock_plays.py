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

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Bench:
    """An inventory of its own with this machine in it."""

    folder: Path

    @property
    def lock(self) -> Path:
        return self.folder / "inventory" / "group_vars" / "model-lock" / "small.yml"

    def play(self, playbook: str, variables: dict[str, Any], *options: str) -> tuple[int, str]:
        """Return code and output of a playbook of the collection."""
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
                f"playbooks/{playbook}.yml",
                f"--inventory={self.folder / 'inventory'}",
                f"--extra-vars={json.dumps(given)}",
                *options,
            ],
            cwd=ROOT,
            env={
                **{key: value for key, value in os.environ.items() if "proxy" not in key.lower()},
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
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
    code, said = bench.play("model_lock", settings)
    assert code == 2
    assert "[lock_mismatch]" in said


def test_without_any_hash_the_role_refuses(bench: Bench, site: Site, content: bytes) -> None:
    site.files = {"/m.gguf": content}
    settings = {"model_files": [{"name": "m.gguf", "size": len(content)}], "model_sources": [{"url": site.url("/")}]}
    code, said = bench.play("model", settings)
    assert code == 2
    assert "[not_locked]" in said
    assert not (bench.folder / "srv" / "small").exists()
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
