# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Measures what llama-server really takes of each GPU, for the memory plan to be compared with.

    python3 tests/bench/plan_live.py --build BUILD_DIR --out FILE.jsonl [--seconds 480] [--devices 2] [--full]

Standard library only. Writes two models of full depth (data is a hole in the file), starts the real server in one
configuration after the other, asks it, and writes one JSON line per configuration with the memory that nvidia-smi
shows for each GPU: before, loaded, after a first request, and after as many requests at once as there are slots.
Stops when the time is up; the order is mixed, so that any number of lines covers the range. Every other line is marked
for calibration, the others for the report.

With --full, other configurations are measured, all for validation: the requests at once fill the context of every slot,
or as much of it as the time for one configuration allows. ``filled`` says how many tokens of each slot's ``prompt``
were taken. What the file holds already is not measured again, so a run that was stopped is simply run again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "plan"))

import models

MODELS = ("qwen4exp-small", "qwen3moe-small")
_BUFFER = re.compile(r":\s+(\w+) +(model|KV|RS|compute|output) buffer size = +([0-9.]+) MiB")


def configurations(
    devices: int, names: tuple[str, ...], contexts: tuple[int, ...], seed: int = 1
) -> list[dict[str, Any]]:
    """All configurations in a fixed, mixed order; ``context`` is that of one request."""
    grid = [
        {"model": name, "context": context, "slots": slots, "cache": cache, "ubatch": ubatch, "devices": devices}
        for name, context, slots, cache, ubatch in itertools.product(
            names, contexts, (1, 4, 8), ("f16", "q8_0"), (512, 2048)
        )
    ]
    order = random.Random(seed)
    order.shuffle(grid)
    single = [
        {
            "model": name,
            "context": contexts[len(contexts) // 2],
            "slots": slots,
            "cache": cache,
            "ubatch": 512,
            "devices": 1,
        }
        for name, slots, cache in itertools.product(names, (1, 4), ("f16",))
    ]
    # The single-GPU runs come after enough of the others for both halves.
    mixed = [*grid[:48], *single, *grid[48:]]
    for index, config in enumerate(mixed):
        config["use"] = "calibrate" if index % 2 == 0 else "report"
    return mixed


def full_configurations(devices: int, names: tuple[str, ...], contexts: tuple[int, ...], seconds: float,
                        seed: int = 20261130) -> list[dict[str, Any]]:  # fmt: skip
    """Configurations whose contexts are filled, in blocks that each hold every model with every context once, and for
    each model every number of slots and every micro-batch once. Each block but the first begins with one GPU alone; the
    third has one configuration more, with the time to fill a long context of the slowest kind."""
    draw = random.Random(seed)
    grid: list[dict[str, Any]] = []
    for block in range(6):
        rows: list[dict[str, Any]] = []
        for name in names:
            columns = [list(values) for values in ((1, 2, 3, 6), ("f16", "q8_0") * 2, (256, 512, 1024, 2048))]
            for column in columns:
                draw.shuffle(column)
            for context, slots, cache, ubatch in zip(contexts, *columns, strict=False):
                rows.append({"model": name, "context": context, "slots": slots, "cache": cache, "ubatch": ubatch})
                rows[-1].update(devices=devices, use="validate", fill_seconds=seconds)
        draw.shuffle(rows)
        if block and devices > 1:
            rows.insert(0, {**draw.choice(rows), "model": names[block % len(names)], "devices": 1})
        if block == 2:
            rows.append(
                {**rows[0], "model": names[0], "context": max(contexts), "slots": 1, "cache": "f16", "ubatch": 2048}
            )
            rows[-1].update(devices=devices, fill_seconds=5 * seconds)
        grid += rows
    return list({json.dumps(row): row for row in grid}.values())


class Gpus:
    """nvidia-smi, with the memory in use of every GPU in MiB, by index. UUIDs of real GPUs are replaced by made-up
    ones, in the order in which they are first seen: what is written down names nobody's hardware."""

    def __init__(self, program: str) -> None:
        self.program = program
        self._replaced: dict[str, str] = {}

    def _anonymous(self, cell: str) -> str:
        if not cell.startswith("GPU-"):
            return cell
        return self._replaced.setdefault(cell, f"GPU-00000000-0000-0000-0000-{len(self._replaced):012d}")

    def query(self, fields: str, what: str = "gpu") -> list[list[str]]:
        text = subprocess.run(
            [self.program, f"--query-{what}={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout
        return [
            [self._anonymous(cell.strip()) for cell in line.split(",")] for line in text.splitlines() if line.strip()
        ]

    def used(self) -> list[int]:
        return [int(row[0]) for row in self.query("memory.used")]

    def of_process(self, pid: int) -> dict[str, int]:
        """MiB by GPU UUID of one process; empty where a container hides it."""
        rows = self.query("pid,gpu_uuid,used_memory", "compute-apps")
        return {row[1]: int(row[2]) for row in rows if row[0] == str(pid) and row[2].isdigit()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, tokens: int, timeout: float) -> None:
    # Token ids, not text: the length is exact, and no cache of an earlier slot answers.
    body = {"prompt": [1000 + (i * 7) % 5000 for i in range(tokens)], "n_predict": 8, "cache_prompt": False}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        json.load(answer)


def fill(port: int, slot: int, tokens: int, until: float) -> int:
    """Have a slot take a prompt, and say how many tokens it took when the answer came or the time was up."""
    body = {
        "prompt": [2000 + (i * 11 + slot * 131) % 7000 for i in range(tokens)],
        "n_predict": 8,
        "cache_prompt": False,
        "id_slot": slot,
        "stream": True,
        "return_progress": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    taken = 0
    # The server ends a request whose connection is closed.
    with (
        contextlib.suppress(TimeoutError),
        urllib.request.urlopen(request, timeout=max(0.1, until - time.monotonic())) as answer,
    ):
        for line in answer:
            if line.startswith(b"data: {"):
                part = json.loads(line[6:])
                if "error" in part:
                    raise RuntimeError(str(part["error"])[:300])
                taken = int(part["prompt_progress"]["processed"]) if "prompt_progress" in part else tokens
            if time.monotonic() > until:
                break
    return taken


def healthy(port: int, server: subprocess.Popen[bytes], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and server.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer,
        ):
            if answer.status == 200:
                return True
        time.sleep(0.05)
    return False


def measure(config: dict[str, Any], binary: Path, path: Path, gpus: Gpus, log: Path, limit: float) -> dict[str, Any]:
    began = time.monotonic()
    port = free_port()
    total = config["context"] * config["slots"]
    argv = [
        *(str(binary), "-m", str(path), "--host", "127.0.0.1", "--port", str(port), "-lv", "4"),
        *("-c", str(total), "-np", str(config["slots"]), "-ub", str(config["ubatch"]), "-b", "2048"),
        *("-ctk", config["cache"], "-ctv", config["cache"], "-fa", "on", "-ngl", "999", "-fit", "off"),
        *("--no-kv-unified", "--split-mode", "layer", "--tensor-split", ",".join(["1"] * config["devices"])),
        *("--cache-ram", "0", "--no-webui"),
    ]
    environment = {
        **os.environ,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in range(config["devices"])),
        "LD_LIBRARY_PATH": f"{binary.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    result: dict[str, Any] = {**config, "total_context": total, "before": gpus.used()}
    with log.open("wb") as handle:
        server = subprocess.Popen(argv, stdout=handle, stderr=handle, env=environment)
    try:
        if not healthy(port, server, limit):
            raise RuntimeError("the server did not become ready")
        result["start_s"] = round(time.monotonic() - began, 2)
        result["loaded"] = gpus.used()
        prompt = min(config["context"] - 64, 2 * config["ubatch"] + 100)
        ask(port, prompt, limit)
        result["after_first"] = gpus.used()
        result["process_after_first"] = gpus.of_process(server.pid)
        slots = range(config["slots"])
        with concurrent.futures.ThreadPoolExecutor(len(slots)) as pool:
            if "fill_seconds" in config:
                asked = time.monotonic()
                result["prompt"] = config["context"] - 64
                until = asked + config["fill_seconds"]
                result["filled"] = list(pool.map(lambda slot: fill(port, slot, result["prompt"], until), slots))
                result["fill_s"] = round(time.monotonic() - asked, 2)
            else:
                list(pool.map(lambda _: ask(port, prompt // 2, limit), slots))
        result["after_all"] = gpus.used()
        result["process_after_all"] = gpus.of_process(server.pid)
        if server.poll() is not None:
            raise RuntimeError("the server ended")
    except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as exc:
        result["error"] = f"{type(exc).__name__}: {exc}"
    finally:
        # Not a clean stop: memory is given back all the same, and quicker.
        server.kill()
        server.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    buffers: dict[str, dict[str, float]] = {}
    for device, kind, size in _BUFFER.findall(text):
        own = buffers.setdefault(device, {})
        own[kind] = round(own.get(kind, 0.0) + float(size), 2)
    result["buffers"] = buffers
    if "error" in result:
        result["log_tail"] = text[-1500:]
    result["seconds"] = round(time.monotonic() - began, 2)
    return result


def settle(gpus: Gpus, idle: list[int], seconds: float = 5.0) -> None:
    """Wait until the memory of the last server is given back."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and any(now > then + 20 for now, then in zip(gpus.used(), idle, strict=False)):
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the memory that llama-server takes of each GPU.")
    parser.add_argument("--build", type=Path, required=True, help="build folder that holds bin/llama-server")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--work", type=Path, default=Path("/tmp/volta-plan"), help="where the models are written")
    parser.add_argument("--seconds", type=float, default=480.0, help="stop starting servers after this many seconds")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--each", type=float, default=90.0, help="limit in seconds for one start or one answer")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--contexts", help="context of one request, several with commas")
    parser.add_argument("--full", action="store_true", help="fill the context of every slot")
    parser.add_argument("--fill-seconds", type=float, default=25.0, help="with --full, time to fill all slots")
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    wanted = parser.parse_args()
    began = time.monotonic()
    binary = (wanted.build / "bin" / "llama-server").resolve()
    gpus = Gpus(wanted.nvidia_smi)
    wanted.work.mkdir(parents=True, exist_ok=True)
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    names = tuple(wanted.models.split(","))
    usual = "6144,24576,65536,98304" if wanted.full else "4096,32768,131072"
    contexts = tuple(int(text) for text in (wanted.contexts or usual).split(","))
    if wanted.full:
        grid = full_configurations(wanted.devices, names, contexts, wanted.fill_seconds)
    else:
        grid = configurations(wanted.devices, names, contexts)
    earlier = [json.loads(line) for line in wanted.out.read_text().splitlines()] if wanted.out.exists() else []
    grid = [config for config in grid if not any(config.items() <= line.items() for line in earlier)]
    paths = {name: models.write(name, wanted.work) for name in names}
    idle = gpus.used()
    about = {
        "about": "plan_live; UUIDs of GPUs are replaced",
        "gpus": gpus.query("index,name,uuid,memory.total,memory.used,driver_version"),
        "engine": subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True,
            env={**os.environ, "LD_LIBRARY_PATH": f"{binary.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"},
        ).stderr.strip()[-300:],
    }  # fmt: skip
    failures = done = 0
    with wanted.out.open("a", encoding="utf-8") as out:
        if not earlier:
            print(json.dumps(about), file=out, flush=True)
        for config in grid:
            if time.monotonic() - began > wanted.seconds:
                break
            line = measure(config, binary, paths[config["model"]], gpus, wanted.work / "server.log", wanted.each)
            print(json.dumps(line), file=out, flush=True)
            failures += "error" in line
            done += 1
            print(
                f"{time.monotonic() - began:6.1f} s  {line['model']} {line['context']}x{line['slots']} {line['cache']} "
                f"ub {line['ubatch']}: {line.get('error') or line['after_all']} {line.get('filled', '')}",
                flush=True,
            )
            settle(gpus, idle)
    print(f"{done} configurations, {failures} failed")
    return 1 if failures or not done + len(earlier) else 0


if __name__ == "__main__":
    sys.exit(main())
