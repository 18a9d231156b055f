# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""python -m tests.lab.demo_model --out DIR [--source LLAMA_CPP_DIR_OR_SDIST]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .generate import generate
from .source import SDIST_NAME, SourceError, vocabulary_file


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.demo_model", description="Write the demo's model.")
    parser.add_argument(
        "--source",
        type=Path,
        help=f"a llama.cpp source folder, or {SDIST_NAME}; without it the pinned sdist comes from the cache or PyPI",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards and manifest.json")
    arguments = parser.parse_args()
    try:
        files = generate(vocabulary_file(arguments.source), arguments.out)
    except SourceError as exc:
        print(f"demo model: {exc}", file=sys.stderr)
        return 1
    for entry in files:
        print(f"{entry['sha256']}  {entry['size']:>10}  {entry['name']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
