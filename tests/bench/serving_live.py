# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Measures the role's rendered settings against the engine's defaults and against the settings guides recommend.

    python3 tests/bench/serving_live.py --build BUILD_DIR --out FILE.jsonl [--seconds 500]

Standard library only, for a machine with NVIDIA GPUs. Three ways to start the same llama-server on the same file:

- ``role``: the command line that roles/llama_server renders (module_utils/serving/arguments.py), used as it is
- ``defaults``: the file, an address, and nothing else
- ``notes``: ``-ngl 999 --split-mode row --tensor-split 1:1 -c 8192 -np 4``, and, since row does not start, the same
  without row (``notes-no-row``)

For each of them 1, 4 and 8 clients ask at once. Prompts are token ids, random for every request, so no cache answers.
One JSON line for each round: prompt and generated tokens per second over all clients, time to the first token of each
client, requests refused, memory in MiB by GPU. Rounds alternate, so that a drift of the machine meets all settings.
Models have random embeddings and routers (the experts in use differ by token) and zeros in all other weights: speed is
that of the real shape, text means nothing.
"""

from __future__ import annotations

import argparse
import array
import concurrent.futures
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

# First: it makes the collection importable.
from plan_live import Gpus, free_port, healthy, models, settle  # isort: split

from ansible_collections.volta.llm.plugins.module_utils.engine.capabilities import parse_help
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import Settings, Surroundings
from ansible_collections.volta.llm.plugins.module_utils.serving.arguments import plan as serving_plan

MODELS = ("qwen4exp-mid", "qwen3moe")
CLIENTS = (1, 4, 8)
SETTINGS = ("role", "defaults", "notes", "notes-no-row")
#: What the operator states for ``role``: eight requests of 8192 tokens.
CONTEXT, PARALLEL = 8192, 8


def randomize(path: Path, name: str) -> None:
    """Random token embeddings and routers, written into the file's holes."""
    header = models.header(name)
    size = path.stat().st_size
    start = size - (header.data_bytes + 31) // 32 * 32
    draw = random.Random(7)
    with path.open("r+b") as handle:
        for tensor in header.tensors:
            if tensor.name == "token_embd.weight":
                blocks = 1 << 16
                chunk = bytearray(draw.randbytes(34 * blocks))
                # A block of q8_0 is a 16-bit scale (here 2^-7) and 32 signed bytes.
                chunk[0::34] = b"\x00" * blocks
                chunk[1::34] = b"\x20" * blocks
            elif tensor.name.endswith("ffn_gate_inp.weight"):
                chunk = bytearray(array.array("f", [draw.uniform(-1, 1) for _ in range(1 << 17)]).tobytes())
            else:
                continue
            handle.seek(start + tensor.offset)
            left = tensor.bytes
            while left > 0:
                handle.write(chunk[:left])
                left -= len(chunk)


def role_arguments(
    binary: Path, path: Path, architecture: str | None, port: int, devices: int, environment: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """(argv, environment) as the role renders them for this engine, model and number of GPUs."""
    text = subprocess.run([str(binary), "--help"], capture_output=True, text=True, env=environment, check=True).stdout
    settings = Settings(
        model=str(path), alias="measured", port=port, context_per_request=CONTEXT, parallel=PARALLEL, binary=str(binary)
    )
    around = Surroundings(
        flags=frozenset(parse_help(text).flags),
        architecture=architecture,
        gpu_bus_ids=tuple(f"0000:{index + 1:02x}:00.0" for index in range(devices)),
    )
    computed = serving_plan(settings, around)
    if computed.faults:
        raise SystemExit(f"the role refuses these settings: {computed.faults}")
    return list(computed.argv), computed.environment


def command(
    kind: str, binary: Path, path: Path, architecture: str | None, port: int, devices: int, base: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """(argv, environment) of one way to start the server."""
    address = ["--host", "127.0.0.1", "--port", str(port)]
    split = ":".join(["1"] * devices)
    if kind == "role":
        argv, own = role_arguments(binary, path, architecture, port, devices, base)
        return argv, {**base, **own}
    argv = [str(binary), "-m", str(path), *address]
    if kind.startswith("notes"):
        argv += ["-ngl", "999", "--tensor-split", split, "-c", "8192", "-np", "4"]
        argv += ["--split-mode", "row"] if kind == "notes" else []
    return argv, base


def ask(port: int, prompt: list[int], generate: int, timeout: float) -> dict[str, Any]:
    """One request: seconds to the first token, to the last, and how many tokens came; or the refusal."""
    body = {"prompt": prompt, "n_predict": generate, "ignore_eos": True, "cache_prompt": False, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    began = time.monotonic()
    first = last = None
    tokens = 0
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line[6:])
                if "error" in part:
                    return {"refused": str(part["error"])[:200]}
                last = time.monotonic()
                first = first or last
                tokens = int(part.get("tokens_predicted") or tokens + 1)
    except urllib.error.HTTPError as exc:
        return {"refused": f"HTTP {exc.code}: {exc.read()[:200].decode(errors='replace')}"}
    except OSError as exc:
        return {"refused": str(exc)}
    if first is None or last is None:
        return {"refused": "no token came"}
    return {"first_s": first - began, "last_s": last - began, "tokens": tokens}


def round_of(port: int, clients: int, prompt: int, generate: int, seed: int, timeout: float) -> dict[str, Any]:
    draw = random.Random(seed)
    prompts = [[1000 + draw.randrange(90000) for _ in range(prompt)] for _ in range(clients)]
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda words: ask(port, words, generate, timeout), prompts))
    seconds = time.monotonic() - began
    good = [answer for answer in answers if "refused" not in answer]
    refused = [answer["refused"] for answer in answers if "refused" in answer]
    line: dict[str, Any] = {"clients": clients, "prompt": prompt, "seconds": round(seconds, 3), "answered": len(good)}
    if refused:
        line["refused"] = refused[0]
    if good:
        line["first_token_s"] = [round(answer["first_s"], 4) for answer in sorted(good, key=lambda a: a["first_s"])]
        line["generated_per_s"] = round(sum(answer["tokens"] for answer in good) / seconds, 1)
        # Speed of generating alone, of one client: tokens after its first over the time they took.
        line["each_per_s"] = round(
            statistics.median((a["tokens"] - 1) / max(1e-6, a["last_s"] - a["first_s"]) for a in good), 1
        )
    return line


def measure(kind: str, name: str, binary: Path, path: Path, gpus: Gpus, options: argparse.Namespace, emit: Any) -> None:
    base = {
        **os.environ,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "LD_LIBRARY_PATH": f"{binary.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    port = free_port()
    architecture = models.header(name).architecture
    argv, environment = command(kind, binary, path, architecture, port, options.devices, base)
    shown = [word.replace(str(path), path.name) for word in argv[1:]]
    line: dict[str, Any] = {"model": name, "settings": kind, "arguments": shown}
    log = options.work / "server.log"
    began = time.monotonic()
    with log.open("wb") as handle:
        server = subprocess.Popen(argv, stdout=handle, stderr=handle, env=environment)
    try:
        if not healthy(port, server, options.each):
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-6:]
            emit({**line, "error": "did not become ready", "exit": server.poll(), "log": tail})
            return
        line["start_s"] = round(time.monotonic() - began, 1)
        ask(port, list(range(1000, 1064)), 8, options.each)
        line["memory_mib"] = gpus.used()
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/props"), timeout=30) as answer:
            props = json.load(answer)
        line["slots"] = props.get("total_slots")
        line["context_per_request"] = (props.get("default_generation_settings") or {}).get("n_ctx")
        for repeat in range(options.rounds):
            for clients in CLIENTS:
                result = round_of(port, clients, 1024, 128, repeat * 100 + clients, options.each)
                emit({**line, "round": repeat, **result})
                line.pop("arguments", None)
        # What a client with a long document sees.
        emit({**line, "round": 0, "long": True, **round_of(port, 4, 6000, 32, 77, options.each)})
    finally:
        server.kill()
        server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure llama-server under three ways to start it.")
    parser.add_argument("--build", type=Path, required=True, help="build folder that holds bin/llama-server")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--work", type=Path, default=Path("/tmp/volta-serving"), help="where the models are written")
    parser.add_argument("--seconds", type=float, default=500.0, help="stop starting servers after this many seconds")
    parser.add_argument("--each", type=float, default=120.0, help="limit in seconds for one start or one answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    options = parser.parse_args()
    began = time.monotonic()
    binary = (options.build / "bin" / "llama-server").resolve()
    gpus = Gpus(options.nvidia_smi)
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    idle = gpus.used()
    with options.out.open("a", encoding="utf-8") as out:

        def emit(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=out, flush=True)
            print(f"{time.monotonic() - began:6.1f} s  {json.dumps(line)[:230]}", flush=True)

        emit({"about": "serving_live", "gpus": gpus.query("index,name,memory.total,driver_version")})
        for name in options.models.split(","):
            path = models.write(name, options.work)
            randomize(path, name)
            for kind in SETTINGS:
                if time.monotonic() - began > options.seconds:
                    emit({"model": name, "settings": kind, "error": "not measured: the time was up"})
                    continue
                measure(kind, name, binary, path, gpus, options, emit)
                settle(gpus, idle)
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
