# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Measures what building for one architecture and keeping compiled objects save, in processor time.

    python -m tests.bench.engine [--suite trixie] [--only architectures|bump-cuda|bump-cpu] [--out FILE.json]

A lab machine with Debian's toolkit. Three questions:

- architectures: the same CUDA files for 70-real and for the source's own list, no compiler cache.
- bump-cuda: the same CUDA files, with an empty compiler cache and with the one that the version before left.
- bump-cpu: the whole server for the processor, likewise, by the module.

The sample holds one file of each kind (SAMPLE); a full build has 144 of them and would take hours for the default list.
Other work on the machine lengthens the wall, hardly the processor time. Prints a table and writes the numbers as JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import yaml

from tests.lab.lab import Lab, Machine

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = "main contrib non-free non-free-firmware"
#: The release of llama-cpp-python before the pinned one.
BEFORE = {"package_version": "0.3.35"}
SAMPLE = (
    "cumsum.cu",
    "softmax.cu",
    "rope.cu",
    "mmvq.cu",
    "fattn-tile-instance-dkq128-dv128.cu",
    "fattn-mma-f16-instance-ncols1_8-ncols2_8.cu",
    "mmq-instance-q4_k.cu",
    "ggml-cuda.cu",
)


class Bench:
    """A lab machine with toolkit, compiler and a copy of what compiles."""

    def __init__(self, suite: str, folder: Path) -> None:
        self.lab = Lab("bench-engine")
        self.inventory = folder / "bench-engine.yml"
        self.pinned = yaml.safe_load((ROOT / "roles/llama_cpp/defaults/main.yml").read_text(encoding="utf-8"))
        up = self.lab.up(count=1, gpus="none", suite=suite, components=COMPONENTS, inventory_file=self.inventory)
        self.machine: Machine = up.machines[0]
        play = folder / "bench-engine-toolkit.yml"
        roles = "[{role: volta.llm.cuda_toolkit}]"
        play.write_text(f"- {{hosts: gpu_servers, gather_facts: false, roles: {roles}}}\n", encoding="utf-8")
        subprocess.run(["ansible-playbook", str(play), "-i", str(self.inventory)], cwd=ROOT, check=True)
        packages = ["ccache", "cmake", "g++", "libssl-dev", "ninja-build"]
        self.machine.run("apt-get", "install", "--yes", "--no-install-recommends", *packages)
        self.machine.run("tar", "-C", "/var/tmp", "-xf", "-", stdin=tree())

    def sample(self, version: str, sha256: str, ccache: str | None = None, default: bool = False) -> dict[str, Any]:
        argv = ["python3", "/var/tmp/tree/tests/cuda/sample.py", "--package-version", version, "--sha256", sha256]
        argv += ["--folder", f"/var/tmp/sample-{version}", "--files", *SAMPLE]
        argv += ["--ccache", ccache] if ccache else []
        argv += ["--default-architectures"] if default else []
        done = self.machine.run(*argv, check=False)
        answer: dict[str, Any] = json.loads(done.stdout)
        if not answer["ok"]:
            raise SystemExit(f"the sample does not compile: {json.dumps(answer, indent=2)}")
        return answer

    def server(self, version: str, sha256: str, ccache: str) -> float:
        """Build the whole server for the processor by the module; processor seconds of the machine meanwhile."""
        options = {
            "package_version": version,
            "sha256": sha256,
            "backend": "cpu",
            "build_user": "nobody",
            "prefix": f"/var/tmp/opt-{version}-{Path(ccache).name}",
            "build_directory": "/var/tmp/llama-build",
            "ccache_directory": ccache,
        }
        argv = ["ansible", "gpu_servers", "-i", str(self.inventory), "-m", "volta.llm.llama_cpp_build"]
        before = self.used()
        subprocess.run([*argv, "-a", json.dumps(options)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return round(self.used() - before, 1)

    def used(self) -> float:
        text = self.machine.output("cat", "/sys/fs/cgroup/cpu.stat")
        return int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6

    def before(self) -> tuple[str, str]:
        """The version before, and its hash as the index says it: nothing is served from it."""
        code = (
            "import sys; sys.path.insert(0, '/var/tmp/tree');"
            "from tests.cuda.collection import importable; importable();"
            "from ansible_collections.volta.llm.plugins.module_utils.engine import sources;"
            "print(sources.look_up(sys.argv[1], sys.argv[2]).sha256)"
        )
        index = self.pinned["llama_cpp_index_url"]
        sha256 = self.machine.output("python3", "-c", code, index, BEFORE["package_version"]).strip()
        return BEFORE["package_version"], sha256


def tree() -> bytes:
    """What sample.py needs of the tree, as an archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("plugins/module_utils", "tests/cuda"):
            tar.add(ROOT / name, f"tree/{name}", filter=lambda info: None if "__pycache__" in info.name else info)
    return out.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="trixie", choices=["bookworm", "trixie"])
    parser.add_argument("--only", choices=["architectures", "bump-cuda", "bump-cpu"])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench-engine.json")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(given.suite, given.out.parent)
    result: dict[str, Any] = {"suite": given.suite, "sample": list(SAMPLE)}
    try:
        measure(bench, given.only, result)
    finally:
        bench.lab.down()
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(bench: Bench, only: str | None, result: dict[str, Any]) -> None:
    pinned = (bench.pinned["llama_cpp_package_version"], bench.pinned["llama_cpp_sha256"])
    if only in (None, "architectures"):
        one = bench.sample(*pinned)
        result.update(cuda=one["cuda"], host_compiler=one["host_compiler"], engine=one["engine"])
        every = bench.sample(*pinned, default=True)
        result["architectures"] = row("70-real", one["processor_s"], every["architectures"], every["processor_s"])
        result["architectures"]["files"] = [
            {"file": a["file"], "one_s": a["processor_s"], "every_s": b["processor_s"], "every": b["elf"] + b["ptx"]}
            for a, b in zip(one["files"], every["files"], strict=True)
        ]
        show("the same CUDA files", result["architectures"])
    if only in (None, "bump-cuda"):
        cold = bench.sample(*pinned, ccache="/var/tmp/ccache-cold")
        bench.sample(*bench.before(), ccache="/var/tmp/ccache-warm")
        warm = bench.sample(*pinned, ccache="/var/tmp/ccache-warm")
        result["bump_cuda"] = row("warm", warm["processor_s"], "cold", cold["processor_s"])
        show("CUDA files of a new version", result["bump_cuda"])
    if only in (None, "bump-cpu"):
        cold_s = bench.server(*pinned, ccache="/var/tmp/ccache-server-cold")
        bench.server(*bench.before(), ccache="/var/tmp/ccache-server-warm")
        warm_s = bench.server(*pinned, ccache="/var/tmp/ccache-server-warm")
        result["bump_cpu"] = row("warm", warm_s, "cold", cold_s)
        show("the server of a new version, for the processor", result["bump_cpu"])


def row(less: str, less_s: float, more: str, more_s: float) -> dict[str, Any]:
    return {
        "less": less,
        "less_s": less_s,
        "more": more,
        "more_s": more_s,
        "ratio": round(more_s / max(less_s, 0.1), 1),
    }


def show(what: str, found: dict[str, Any]) -> None:
    print(
        f"{what}: {found['less']} {found['less_s']} s of processor time, {found['more']} {found['more_s']} s: "
        f"{found['ratio']} x",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
