"""The whole engine, built for sm_70 by the roles unmodified, in lab machines with Debian's own toolkits.

A build takes the better part of an hour on two cores. What was built once is kept by its fingerprint below the lab's
cache; as long as source, options and tools are the same, the next run installs that release, which checks every file of
it, and the role then finds nothing to do. VOLTA_CUDA_REBUILD=1 builds again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab.lab import Lab, Machine
from tests.lab.paths import Paths

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = "main contrib non-free non-free-firmware"


@dataclass
class Bench:
    """A machine of one Debian release, and what the toolkit there must be."""

    suite: str
    toolkit: str
    host_compiler: str
    machine: Machine
    inventory: Path
    cache: Path

    def playbook(self, *options: str) -> subprocess.CompletedProcess[str]:
        argv = ["ansible-playbook", "playbooks/engine.yml", "-i", str(self.inventory), *options]
        done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(done.stdout)
        return done

    def module(self, name: str, /, **options: Any) -> dict[str, Any]:
        argv = [
            "ansible",
            "gpu_servers",
            "-i",
            str(self.inventory),
            "-m",
            f"volta.llm.{name}",
            "-a",
            json.dumps(options),
        ]
        # ansible.cfg has results shown as YAML, which is for people.
        environment = {**os.environ, "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        # One machine: its name, how it ended, and the answer.
        result: dict[str, Any] = json.loads(done.stdout.partition(" => ")[2])
        return result

    def manifest(self) -> dict[str, Any]:
        text = self.machine.output("cat", "/opt/llama.cpp/current/release.json")
        result: dict[str, Any] = json.loads(text)
        return result


@pytest.fixture(
    scope="module", params=[("bookworm", "11.8", "g++-11"), ("trixie", "12.4", "g++-13")], ids=lambda p: p[0]
)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    suite, toolkit, compiler = request.param
    inventory = tmp_path_factory.mktemp(suite) / "lab.yml"
    lab = Lab(f"cuda-{suite}")
    lab.down()
    try:
        up = lab.up(count=1, gpus="none", suite=suite, components=COMPONENTS, inventory_file=inventory)
        cache = Paths.from_environment().cache / "cuda" / suite
        cache.mkdir(parents=True, exist_ok=True)
        yield Bench(suite, toolkit, compiler, up.machines[0], inventory, cache)
    finally:
        lab.down()


@pytest.fixture(scope="module")
def built(bench: Bench) -> Bench:
    """The machine with the engine in use: built by the playbook, or installed from the cache and left so by it."""
    kept = sorted(bench.cache.glob("*.tar.gz"))
    if kept and os.environ.get("VOLTA_CUDA_REBUILD", "") in ("", "0"):
        install(bench, kept[-1])
    done = bench.playbook()
    assert done.returncode == 0, done.stdout[-4000:]
    keep(bench)
    return bench


def install(bench: Bench, archive: Path) -> None:
    """Put a kept release into the machine, unused: whether it is what is asked for, the playbook finds out.

    Its proof needs the toolkit's libraries, so the toolkit comes first, by the same role.
    """
    toolkit = bench.inventory.with_name("toolkit.yml")
    toolkit.write_text(
        "- {hosts: gpu_servers, become: true, gather_facts: false, roles: [{role: volta.llm.cuda_toolkit}]}\n",
        encoding="utf-8",
    )
    argv = ["ansible-playbook", str(toolkit), "-i", str(bench.inventory)]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    hashed = archive.with_name(archive.name + ".sha256").read_text(encoding="ascii").split()[0]
    bench.machine.run(
        "useradd", "--system", "--shell", "/usr/sbin/nologin", "--home", "/var/lib/llama-build", "llama-build"
    )
    done = subprocess.run(
        ["ansible", "gpu_servers", "-i", str(bench.inventory), "-m", "ansible.builtin.copy",
         "-a", json.dumps({"src": str(archive), "dest": f"/var/tmp/{archive.name}", "mode": "0644"})],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    answer = bench.module(
        "llama_cpp_release",
        action="install",
        name=archive.name.removesuffix(".tar.gz"),
        archive=f"/var/tmp/{archive.name}",
        sha256=hashed,
        build_user="llama-build",
        switch=False,
    )
    print(json.dumps(answer.get("faults", []), indent=2))


def keep(bench: Bench) -> None:
    """Copy the release out of the machine, for the next run."""
    name = bench.machine.output("readlink", "/opt/llama.cpp/current").strip().rpartition("/")[2]
    target = bench.cache / f"{name}.tar.gz"
    if target.is_file():
        return
    packed = bench.module(
        "llama_cpp_release", action="pack", name=name, archive=f"/var/cache/volta-lab/cuda-{name}.tar.gz"
    )
    shared = Paths.from_environment().cache / "shared" / f"cuda-{name}.tar.gz"
    for old in bench.cache.iterdir():
        old.unlink()
    shutil.move(shared, target)
    target.with_name(target.name + ".sha256").write_text(f"{packed['sha256']}  {target.name}\n", encoding="ascii")
    shared.with_name(shared.name + ".sha256").unlink(missing_ok=True)


def test_the_engine_is_built_for_volta(built: Bench) -> None:
    manifest = built.manifest()
    release = built.machine.output("readlink", "-f", "/opt/llama.cpp/current").strip()
    listing = built.machine.output("sh", "-c", f"cuobjdump --list-elf {release}/lib/libggml-cuda.so*")
    ptx = built.machine.output("sh", "-c", f"cuobjdump --list-ptx {release}/lib/libggml-cuda.so* 2>/dev/null || true")
    elf = [line for line in listing.splitlines() if line.startswith("ELF file")]
    print(f"release folder: {release}")
    print(f"engine: {manifest['version']} {manifest['commit']}, built in {manifest['build_s']} s")
    print(f"tools: {json.dumps(manifest['inputs']['tools'])}")
    print(f"device code: {len(elf)} entries; the first:")
    print("\n".join(elf[:3]))
    # All of it native code for V100, more than a hundred entries, and nothing a driver would have to compile.
    assert len(elf) > 100
    assert {re.findall(r"\.(sm_\d+\w*)\.", line)[-1] for line in elf} == {"sm_70"}
    assert "PTX file" not in ptx
    assert manifest["cuda_architectures"] == ["70-real"]
    assert manifest["inputs"]["tools"]["nvcc"].startswith(f"{built.toolkit}.")


def test_compiler_headers_and_libraries_are_of_one_release(built: Bench) -> None:
    answer = built.module("cuda_toolkit_info", required=True)
    toolkit = answer["toolkit"]
    assert answer["faults"] == []
    assert (answer["version"], toolkit["headers"]) == (built.toolkit, built.toolkit)
    assert toolkit["runtime"].startswith(f"{built.toolkit}.")
    assert toolkit["host_compiler"] == f"/usr/bin/{built.host_compiler}"


def test_the_stub_is_nowhere_in_the_way(built: Bench) -> None:
    release = built.machine.output("readlink", "-f", "/opt/llama.cpp/current").strip()
    dynamic = built.machine.output("sh", "-c", f"readelf --dynamic {release}/bin/* {release}/lib/*")
    assert "$ORIGIN" in dynamic
    assert "stubs" not in dynamic


def test_the_programs_run_without_a_driver_and_see_no_card(built: Bench) -> None:
    text = built.machine.output("sh", "-c", "/opt/llama.cpp/current/bin/llama-server --version 2>&1")
    assert built.manifest()["version"] in text
    assert built.machine.output("ls", "/opt/llama.cpp/current/bin").split() == [
        "llama-bench",
        "llama-fit-params",
        "llama-gguf-split",
        "llama-server",
    ]


def test_a_second_run_changes_nothing(built: Bench) -> None:
    done = built.playbook()
    assert done.returncode == 0
    assert re.search(r"changed=0 ", done.stdout), done.stdout[-2000:]
