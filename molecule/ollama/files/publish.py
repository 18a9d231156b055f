# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Makes releases and a registry for the scenario and serves them to its lab; says what and where in published.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

lab, folder = sys.argv[1], Path(sys.argv[2])
root = folder / "published"
#: Versions, with the way in which they are broken (tests/lab/ollama/archive.py).
RELEASES = ("0.24.0", "0.24.1", "0.24.2=abort_in_warmup", "0.24.3=crash_at_serve", "0.24.4=traversal")


def output(*argv: str) -> str:
    return subprocess.run([sys.executable, *argv], check=True, stdout=subprocess.PIPE, text=True).stdout


options = [word for release in RELEASES for word in ("--version", release)]
told = json.loads(output("-m", "tests.lab.ollama", "publish", str(root), *options))
url = output("-m", "tests.lab", "serve", lab, str(root)).splitlines()[-1].rstrip("/")
(folder / "published.json").write_text(json.dumps({"url": url, "folder": str(root), **told}, indent=2))
