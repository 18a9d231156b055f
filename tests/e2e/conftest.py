"""One lab machine for the end-to-end tests, with the demo's inventory and a served model."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import demo

ROOT = Path(__file__).resolve().parent.parent.parent
LAB = "e2e"
MACHINE = "e2e-1"


@dataclass
class Converged:
    """What ``volta-llm converge`` said: exit status, result document, printed output."""

    status: int
    document: dict[str, Any]
    output: str

    @property
    def host(self) -> dict[str, Any]:
        host: dict[str, Any] = self.document["runs"][-1]["hosts"][0]
        return host

    @property
    def codes(self) -> list[str]:
        return [fault["code"] for fault in self.host["faults"]]

    @property
    def roles(self) -> set[str]:
        """The roles of which at least one task ran."""
        return {name.rsplit(".", 1)[-1] for name in self.host["roles_s"]}


@dataclass
class Bench:
    """The machine and how to work on it."""

    folder: Path
    inventory: Path
    environment: dict[str, str] = field(default_factory=lambda: {**os.environ, "PYTHONUNBUFFERED": "1"})

    def converge(self, *options: str, variables: dict[str, Any] | None = None) -> Converged:
        document = self.folder / "result.json"
        document.unlink(missing_ok=True)
        extra = ["-e", json.dumps(variables)] if variables else []
        argv = ["volta-llm", "converge", "-i", str(self.inventory), "--json", str(document), *extra, *options]
        done = subprocess.run(
            argv,
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(done.stdout)
        result = json.loads(document.read_text(encoding="utf-8")) if document.is_file() else {}
        return Converged(done.returncode, result, done.stdout)

    def exec(self, *command: str, check: bool = True) -> str:
        """Run a command on the machine, as root."""
        argv = [sys.executable, "-m", "tests.lab", "exec", LAB, MACHINE, "--", *command]
        done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=check)
        return done.stdout

    @property
    def variables(self) -> dict[str, Any]:
        """The group of the lab's machines as `up` wrote it: hosts and vars."""
        document = yaml.safe_load((self.inventory / "lab.yml").read_text(encoding="utf-8"))
        group: dict[str, Any] = document["gpu_servers"]
        return group

    @property
    def address(self) -> str:
        return str(self.variables["hosts"][MACHINE]["ansible_host"])

    def put(self, path: Path) -> tuple[str, str]:
        """Copy a file to the machine; its path there and its SHA-256."""
        content = path.read_bytes()
        there = f"/var/tmp/{path.name}"
        argv = [sys.executable, "-m", "tests.lab", "exec", LAB, MACHINE, "--", "sh", "-c", f"cat > {there}"]
        subprocess.run(argv, cwd=ROOT, input=content, check=True)
        return there, hashlib.sha256(content).hexdigest()

    def reset(self) -> None:
        subprocess.run([sys.executable, "-m", "tests.lab", "reset", LAB], cwd=ROOT, check=True)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A bare machine; removed at the end, also when tests failed (`make demo` is there to look around in)."""
    folder = tmp_path_factory.mktemp("e2e")
    inventory = folder / "inventory"
    inventory.mkdir()
    (inventory / "group_vars").symlink_to(ROOT / "inventories" / "demo" / "group_vars")
    try:
        demo.prepare(LAB, inventory / "lab.yml")
        yield Bench(folder, inventory)
    finally:
        subprocess.run([sys.executable, "-m", "tests.lab", "down", LAB], cwd=ROOT, check=False)


@pytest.fixture(scope="session")
def broken_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive shaped like llama.cpp's whose llama-server does not compile."""
    folder = tmp_path_factory.mktemp("broken")
    files = {
        "llama.cpp/CMakeLists.txt": (
            "cmake_minimum_required(VERSION 3.18)\nproject(llama.cpp CXX)\nadd_executable(llama-server server.cpp)\n"
        ),
        "llama.cpp/ggml/CMakeLists.txt": "",
        "llama.cpp/server.cpp": "#error this line does not compile\n",
    }
    archive = folder / "llama.cpp-broken.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return archive
