# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the engine itself would allocate, on a machine without a GPU: llama-server over null_backend.cpp.

    python tests/bench/plan/engine_truth.py --bin BUILD/bin --source LC --work DIR --out truth.jsonl [--models a,b]

One JSON line per configuration: the configuration, and every buffer the engine reported, in MiB by device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import models

#: A mapped file is not read in advance: its data is a hole, and reading it would fill the page cache with zeros.
NO_PREFETCH = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
void *mmap(void *a, size_t l, int p, int f, int d, off_t o) {
    return (void *) syscall(SYS_mmap, a, l, p, f & ~MAP_POPULATE, d, o);
}
void *mmap64(void *a, size_t l, int p, int f, int d, off_t o) { return mmap(a, l, p, f, d, o); }
int posix_madvise(void *a, size_t l, int v) { return 0; }
int posix_fadvise(int d, off_t o, off_t l, int v) { return 0; }
"""
_BUFFER = re.compile(
    r"(\w+):\s+(NULL\d+|NULL_Host|CPU\w*)\s+(model|KV|RS|compute|output) buffer size =\s+([0-9.]+) MiB"
)


def build(binaries: Path, source: Path, work: Path) -> None:
    (work / "prefetch.c").write_text(NO_PREFETCH, encoding="utf-8")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "prefetch.c", "-o", "prefetch.so"], cwd=work, check=True)
    subprocess.run(
        [
            *("g++", "-O1", "-shared", "-fPIC", "-std=c++17", str(HERE / "null_backend.cpp"), "-o", "libnull.so"),
            *("-I", str(source / "ggml/include"), "-I", str(source / "ggml/src")),
            *("-L", str(binaries), "-lggml-base", "-lggml-cpu"),
        ],
        cwd=work,
        check=True,
    )


def configurations(names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        for devices, context, slots, ubatch in itertools.product((1, 2, 4), (4096, 32768, 131072), (1, 4), (512, 2048)):
            yield {
                "model": name,
                "devices": devices,
                "context": context,
                "slots": slots,
                "ubatch": ubatch,
                "cache": "f16",
            }
        for devices, context, slots in itertools.product((1, 2), (8192, 65536), (1, 8)):
            yield {
                "model": name,
                "devices": devices,
                "context": context,
                "slots": slots,
                "ubatch": 512,
                "cache": "q8_0",
            }
        for devices, context in itertools.product((1, 2), (16384, 65536)):
            yield {
                **{"model": name, "devices": devices, "context": context, "slots": 4, "ubatch": 512, "cache": "f16"},
                "unified": True,
            }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(config: dict[str, Any], binaries: Path, work: Path, model: Path) -> dict[str, Any]:
    """The buffers of one configuration. ``context`` is the total that the engine is given."""
    names = ",".join(f"NULL{index}" for index in range(config["devices"]))
    argv = [
        *(str(binaries / "llama-server"), "--no-warmup", "-lv", "4", "-m", str(model), "--device", names),
        *("--port", str(free_port()), "-fit", "off", "-c", str(config["context"]), "-np", str(config["slots"])),
        *("-ub", str(config["ubatch"]), "-b", str(max(2048, config["ubatch"]))),
        *("-ctk", config["cache"], "-ctv", config.get("cache_v", config["cache"]), "-fa", "on"),
        *(["--kv-unified"] if config.get("unified") else ["--no-kv-unified"]),
        *(["--tensor-split", ",".join(str(share) for share in config["split"])] if config.get("split") else []),
    ]
    environment = {
        **os.environ,
        "GGML_BACKEND_PATH": str(work / "libnull.so"),
        "LD_PRELOAD": str(work / "prefetch.so"),
        "LD_LIBRARY_PATH": str(binaries),
        "NULL_DEVICES": str(config["devices"]),
        "NULL_MIB": "32768",
        "NULL_CC": str(config.get("compute_capability", 700)),
    }
    log = work / "engine.log"
    with log.open("wb") as handle:
        server = subprocess.Popen(argv, stdout=handle, stderr=handle, env=environment)
    try:
        limit = time.monotonic() + 60
        while time.monotonic() < limit and server.poll() is None:
            text = log.read_text(encoding="utf-8", errors="replace")
            if "reserve took" in text or "failed" in text:
                break
            time.sleep(0.05)
    finally:
        server.kill()
        server.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    if "reserve took" not in text:
        return {**config, "error": text[-600:]}
    buffers: dict[str, dict[str, float]] = {}
    for _, device, kind, size in _BUFFER.findall(text):
        own = buffers.setdefault(device, {})
        own[kind] = round(own.get(kind, 0.0) + float(size), 2)
    copies = re.search(r"sched copies = (\d+)", text)
    return {**config, "copies": int(copies[1]) if copies else None, "buffers": buffers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--bin", type=Path, required=True, help="folder of llama-server")
    parser.add_argument("--source", type=Path, required=True, help="llama.cpp source")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="")
    wanted = parser.parse_args()
    wanted.work.mkdir(parents=True, exist_ok=True)
    build(wanted.bin.resolve(), wanted.source.resolve(), wanted.work)
    names = [name for name in wanted.models.split(",") if name] or list(models.MODELS)
    with wanted.out.open("a", encoding="utf-8") as out:
        for config in configurations(names):
            path = wanted.work / f"{config['model']}.gguf"
            if not path.exists():
                models.write(config["model"], wanted.work)
            print(json.dumps(measure(config, wanted.bin.resolve(), wanted.work, path)), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
