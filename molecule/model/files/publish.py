# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Makes the files of the scenario and serves them to its lab; says what and where in published.json."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from tests.unit.gguf.build import real

lab, folder = sys.argv[1], Path(sys.argv[2])
source, mirror, here = (folder / name for name in ("source", "mirror", "here"))
for place in (source, mirror, here):
    place.mkdir(parents=True, exist_ok=True)


def described(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    return {"name": path.name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


first = real(source / "base.gguf", split_after=2)
shards = sorted(source.glob(f"{first.name.split('-0')[0]}-*.gguf"))
for path in shards:
    (mirror / path.name).write_bytes(path.read_bytes())

# What only the mirror has; what only the control node has; raw parts of one file.
whole = real(mirror / "whole.gguf")
data = whole.read_bytes()
(here / "sent.gguf").write_bytes(data)
for number in range(3):
    cut = data[len(data) * number // 3 : len(data) * (number + 1) // 3]
    (source / f"cut.gguf.{'abc'[number]}").write_bytes(cut)
(mirror / "SHA256SUMS").write_text(f"{described(whole)['sha256']} *whole.gguf\n")


def serve(place: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lab", "serve", lab, str(place)], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.splitlines()[-1].rstrip("/")


published = {
    "shards": [described(path) for path in shards],
    "whole": described(whole),
    "source": serve(source),
    "mirror": serve(mirror),
    "here": str(here),
    "mirror_folder": str(mirror),
}
(folder / "published.json").write_text(json.dumps(published, indent=2))
