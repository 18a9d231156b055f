# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Builds the engine for the GPUs in this machine as the module does, and shows what its proof on them is worth.

    python3 tests/bench/engine_live.py --source ARCHIVE --sha256 HASH --out FILE.json [--folder DIR] [--user nobody]
                                       [--architectures 90-real] [--wrong 80-real]

Standard library only, from a copy of the tree: the code is that of the module, without Ansible around it. It builds for
--architectures with the toolkit in /usr/local/cuda and puts that into use; runs again, with nothing to do; builds for
--wrong, an architecture whose code these GPUs cannot run, and expects it to be refused and the first one to stay; and
asks the wrong one to compute without a look at what the cards are, so that the driver itself says no.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.cuda.collection import importable

importable()

from ansible_collections.volta.llm.plugins.module_utils.engine import proof, run
from ansible_collections.volta.llm.plugins.module_utils.engine.gpus import Cards, read_cards
from ansible_collections.volta.llm.plugins.module_utils.engine.process import find_program
from ansible_collections.volta.llm.plugins.module_utils.engine.request import Request, find_account
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="archive of the engine's source")
    parser.add_argument("--sha256", required=True)
    parser.add_argument("--commit", help="short or full commit that the engine is to name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/volta-engine-live"))
    parser.add_argument("--user", default="nobody", help="account that compiles when this runs as root")
    parser.add_argument("--cuda-root", default="/usr/local/cuda")
    parser.add_argument("--architectures", nargs="+", default=["90-real"])
    parser.add_argument("--wrong", nargs="+", default=["80-real"])
    parser.add_argument("--smi", default="nvidia-smi")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    given.folder.chmod(0o755)
    # What comes back when the time is up is what was measured until then.
    result: dict[str, Any] = {}
    for name, value in steps(given):
        result[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    held = bool(result.get("holds"))
    print("holds" if held else "DOES NOT HOLD", flush=True)
    return 0 if held else 1


def steps(given: argparse.Namespace) -> Any:
    provide_tools()
    request = wish(given)
    cards = read_cards(Machine(), given.smi)
    yield (
        "machine",
        {
            "driver": cards.driver if cards else None,
            "compute_capabilities": list(cards.capabilities) if cards else [],
            "gpus": lines([given.smi, "--query-gpu=name", "--format=csv,noheader"]),
            "nvcc": lines([f"{given.cuda_root}/bin/nvcc", "--version"])[-2:],
            "cores": len(os.sched_getaffinity(0)),
            "openssl": request.cmake_options.get("LLAMA_OPENSSL") is None,
        },
    )
    right, seconds = timed(request)
    yield "built", shown(right, seconds)
    again, seconds = timed(request)
    yield "again", shown(again, seconds)
    # Without flash attention it compiles in a fraction of the time, and its other kernels are as wrong.
    without = {**request.cmake_options, "GGML_CUDA_FA": "OFF"}
    wrong, seconds = timed(replace(request, cuda_architectures=tuple(given.wrong), cmake_options=without))
    yield "wrong", shown(wrong, seconds)
    asked = compute(wrong, cards, given) if wrong.release and cards else None
    yield "wrong_without_a_look_at_the_cards", asked
    yield "current", os.path.realpath(f"{request.prefix}/current")
    yield (
        "holds",
        (
            not right.faults
            and {"devices", "compute"} <= {check["check"] for check in right.proof}
            and not again.changed
            and not again.faults
            and [fault.code for fault in wrong.faults] == ["gpu_proof_failed"]
            and asked is not None
            and asked.get("code") == "gpu_proof_failed"
            and os.path.realpath(f"{request.prefix}/current") == right.release
        ),
    )


def wish(given: argparse.Namespace) -> Request:
    # A machine without OpenSSL's headers is not what is measured here.
    has_openssl = Path("/usr/include/openssl/ssl.h").is_file()
    return Request(
        source_type="archive",
        url=str(Path(given.source).absolute()),
        sha256=given.sha256,
        commit=given.commit,
        prefix=str(given.folder / "opt"),
        build_directory=str(given.folder / "var"),
        build_user=given.user if os.geteuid() == 0 else None,
        cuda_root=given.cuda_root,
        cuda_architectures=tuple(given.architectures),
        targets=("llama-server", "llama-bench"),
        cmake_options={} if has_openssl else {"LLAMA_OPENSSL": "OFF"},
        model_architecture="qwen4exp",
        nvidia_smi=shutil.which(given.smi) or given.smi,
    )


def provide_tools() -> None:
    """cmake and ninja of a Python environment, where the module looks; it searches the system's folders alone."""
    for name in ("cmake", "ninja"):
        path = shutil.which(name)
        if find_program(name) is None and path is not None:
            Path("/usr/local/bin", name).symlink_to(path)


def timed(request: Request) -> tuple[run.Outcome, float]:
    started = time.monotonic()
    outcome = run.build(request)
    return outcome, round(time.monotonic() - started, 2)


def shown(outcome: run.Outcome, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "changed": outcome.changed,
        "release": outcome.release,
        "version": outcome.version,
        "commit": outcome.commit,
        "jobs": outcome.jobs,
        "build_s": outcome.build_s,
        "proof": outcome.proof,
        "notes": outcome.notes,
        "faults": [fault.as_dict() for fault in outcome.faults],
    }


def compute(outcome: run.Outcome, cards: Cards, given: argparse.Namespace) -> dict[str, str]:
    """Let the wrong engine compute, as if the driver did not say what the cards are."""
    blind = Cards(cards.driver, (None,) * cards.count)
    account, _faults = find_account(wish(given))
    try:
        checks = proof.prove_on_gpus(Path(outcome.release or ""), blind, given.wrong, account)
    except FaultError as exc:
        return exc.fault.as_dict()
    return {"code": "", "message": f"it computed: {checks}"}


def lines(argv: list[str]) -> list[str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
