# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What one architecture and the compiler's cache save, on a machine with many cores: the questions of engine.py.

    python3 tests/bench/engine_ratio_live.py --source ARCHIVE --sha256 HASH --before ARCHIVE --before-sha256 HASH
                                             --out FILE.json [--architecture 90-real] [--files NAME ...]

Standard library only, from a copy of the tree; toolkit in /usr/local/cuda, ccache on the path. Two questions:

- bump: the whole engine of the version before with an empty compiler cache, then the pinned one with what that left,
  both by the module's code; seconds of the wall and of processor time
- architectures: the same CUDA files for --sample-architecture alone and for the source's own list, each file by
  tests/cuda/sample.py in a folder of its own, all at once, no compiler cache; seconds of processor time
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# First: it makes the collection importable.
from tests.bench.engine_live import lines, provide_tools, shown, timed, wish  # isort: split

from tests.cuda.sample import HARD

FILES = (*HARD, "rope.cu", "gated_delta_net.cu", "mmvq.cu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--source", "--sha256", "--before", "--before-sha256"):
        parser.add_argument(name, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/volta-engine-ratio"))
    parser.add_argument("--architecture", default="90-real", help="what the whole engine is built for")
    parser.add_argument("--sample-architecture", default="75-real", help="what the files are compiled for")
    parser.add_argument("--files", nargs="+", default=list(FILES))
    parser.add_argument("--user", default="nobody")
    parser.add_argument("--cuda-root", default="/usr/local/cuda")
    parser.add_argument("--smi", default="nvidia-smi")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    given.folder.chmod(0o755)
    provide_tools()
    # What was measured until the time is up is what comes back.
    result: dict[str, Any] = {
        "nvcc": lines([f"{given.cuda_root}/bin/nvcc", "--version"])[-2:],
        "cores": len(os.sched_getaffinity(0)),
    }
    for name, value in itertools.chain(bump(given), architectures(given)):
        result[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def bump(given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    given.commit, given.architectures = None, [given.architecture]
    pinned = wish(given)
    before = replace(pinned, url=str(Path(given.before).absolute()), sha256=given.before_sha256)
    seconds = {}
    for name, request in (("cold", before), ("warm", pinned)):
        used, started = processor(), time.monotonic()
        outcome, _ = timed(request)
        seconds[name] = round(processor() - used, 1)
        yield (
            f"bump {name}",
            {**shown(outcome, round(time.monotonic() - started, 1)), "processor_s": seconds[name]},
        )
    yield "bump ratio", round(seconds["cold"] / max(seconds["warm"], 0.1), 1)


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def architectures(given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    jobs = [(name, every) for name in given.files for every in (False, True)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = dict(zip(jobs, pool.map(lambda job: sample(given, *job), jobs), strict=True))
    rows = []
    for name in given.files:
        one, every = answers[name, False], answers[name, True]
        row = {"file": name, "one_s": one["processor_s"], "every_s": every["processor_s"]}
        row["every"] = [f"{kind} {code}" for kind in ("elf", "ptx") for code in every["files"][0][kind]]
        rows.append(row)
    yield "architectures", {"list": answers[given.files[0], True]["architectures"], "files": rows}
    one_s, every_s = (sum(row[key] for row in rows) for key in ("one_s", "every_s"))
    yield "architectures ratio", round(every_s / max(one_s, 0.1), 1)


def sample(given: argparse.Namespace, name: str, every: bool) -> dict[str, Any]:
    folder = given.folder / f"{name}-{'every' if every else 'one'}"
    argv = [sys.executable, str(ROOT / "tests/cuda/sample.py"), "--source", str(Path(given.source).absolute())]
    argv += ["--sha256", given.sha256, "--folder", str(folder), "--files", name, "--cuda-root", given.cuda_root]
    argv += ["--architectures", given.sample_architecture]
    argv += ["--default-architectures", "--threads", "8"] if every else []
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"{name}: {done.stdout[-1000:]}{done.stderr[-2000:]}") from None
    if not answer["ok"]:
        raise SystemExit(f"{name} does not compile: {json.dumps(answer, indent=2)}")
    return answer


if __name__ == "__main__":
    sys.exit(main())
