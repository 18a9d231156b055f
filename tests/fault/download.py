# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Kills a download at random moments (kill -9) and lets it go on, again and again.

``python -m tests.fault.download [--kills N] [--seed N] [--size MIB]``. The module runs as Ansible runs it: as a
process of its own. Most kills come when a number of bytes drawn by lot has left the server, the others after the last
byte, within the time that hashing, forcing to disk and renaming take. A file that came whole is taken away,
and the next run begins anew. After each kill:

- nothing stands under the final name, or the right file does;
- bytes fetched twice: what left the server in this run, less what the next run will use of it. Bytes that were under
  way in the kernel's buffers count as fetched.

Judges: at most 64 MiB twice for a kill, no wrong file, and nothing left over at the end. Draws follow from the seed;
what is hit also depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.bench.download.peers import MODULE, ROOT, module_argv, module_environment
from tests.bench.download.servers import Paced, end_well, make_file

sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.volta.llm.plugins.module_utils.transfer.store import Places, State, read_stamp

MIB = 1 << 20
#: Most bytes that one kill may cost.
ALLOWED = 64 * MIB
#: Bytes a second and connection: enough that a kill meets the work under way, whatever the machine.
RATE = 60_000_000
#: The kill after the last byte comes within this time.
AFTERWARDS_S = 0.6
#: So many kills when every byte was there before; then a run may come to its end.
AT_THE_END = 2


@dataclass
class Kill:
    """One kill: what was drawn, what it found, what it cost."""

    moment: str
    before: int
    sent: int
    after: int
    placed: bool

    @property
    def twice(self) -> int:
        return max(0, self.sent - (self.after - self.before))


class Campaign:
    def __init__(self, folder: Path, size: int, seed: int) -> None:
        self.lot = random.Random(seed)
        self.folder = folder
        source = folder / "served.gguf"
        self.size = size
        self.sha256 = make_file(source, size)
        self.server = Paced(source, RATE)
        dest = folder / "models" / "model.gguf"
        dest.parent.mkdir()
        self.dest = dest
        self.places = Places(dest)
        self.kills: list[Kill] = []
        self.whole = 0
        self.at_the_end = 0
        self.wrong: list[str] = []

    def start(self) -> subprocess.Popen[bytes]:
        arguments = {"url": self.server.url("model.gguf"), "dest": str(self.dest), "sha256": self.sha256}
        return subprocess.Popen(
            module_argv(MODULE, arguments, self.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **module_environment()},
        )

    def kept(self) -> int:
        """What the next run will use."""
        if self.placed():
            return self.size
        state = State.read(self.places.state)
        if state is None or not self.places.part.exists():
            return 0
        return state.done.total

    def placed(self) -> bool:
        """Whether the file has its name. One that is not right is noted."""
        if not self.dest.exists():
            return False
        found = hashlib.sha256(self.dest.read_bytes()).hexdigest()
        if found != self.sha256:
            self.wrong.append(f"after kill {len(self.kills) + 1}: {self.dest.name} has {found}")
        return True

    def run_and_kill(self) -> None:
        before, sent = self.kept(), self.server.sent
        left = self.size - before
        afterwards = self.lot.random() < 0.2 or left < self.size // 20
        bytes_drawn = self.lot.randrange(0, self.size // 3)
        delay = self.lot.uniform(0, AFTERWARDS_S if afterwards else 0.05)
        if not left:
            # Nothing is asked of the server any more: the process starts, hashes, and puts the file in place.
            delay *= 4
            self.at_the_end += 1
            if self.at_the_end > AT_THE_END:
                self.finish()
                return
        target = left if afterwards else min(bytes_drawn, left)
        process = self.start()
        while process.poll() is None and self.server.sent - sent < target:
            time.sleep(0.002)
        deadline = time.monotonic() + delay
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        process.kill()
        output, _ = process.communicate()
        if process.returncode == 0:
            self.check_whole()
            return
        if process.returncode != -9:
            raise RuntimeError(f"the module failed by itself: {output.decode('utf-8', 'replace')[-2000:]}")
        # The server may be about to learn of it: what it still puts into the dead connection left it in this run.
        time.sleep(0.1)
        moment = "after the last byte" if afterwards else f"at {bytes_drawn} bytes"
        kill = Kill(moment, before, self.server.sent - sent, self.kept(), self.placed())
        self.kills.append(kill)
        if kill.placed:
            self.check_whole()

    def finish(self) -> None:
        """Let it come to its end."""
        process = self.start()
        output, _ = process.communicate(timeout=600)
        if process.returncode != 0:
            raise RuntimeError(f"the last run failed: {output.decode('utf-8', 'replace')[-2000:]}")
        self.check_whole()

    def check_whole(self) -> None:
        """A whole file: right, with its stamp, and nothing beside it once a run has ended well. Then take it away."""
        if not self.placed():
            self.wrong.append(f"after kill {len(self.kills)}: the run ended well without a file")
        process = self.start()
        output, _ = process.communicate(timeout=600)
        result = json.loads(output)
        if process.returncode != 0 or result["bytes_fetched"]:
            self.wrong.append(f"after kill {len(self.kills)}: the whole file was not taken for it: {result}")
        stamp = read_stamp(self.places.stamp)
        if stamp is None or stamp.sha256 != self.sha256:
            self.wrong.append(f"after kill {len(self.kills)}: the stamp is {stamp}")
        left = {path.name for path in self.dest.parent.rglob("*") if path.is_file()}
        surplus = left - {"model.gguf", "model.gguf.stamp.json", "model.gguf.lock", "storage.json"}
        if surplus:
            self.wrong.append(f"after kill {len(self.kills)}: left over: {', '.join(sorted(surplus))}")
        self.whole += 1
        self.at_the_end = 0
        for path in (self.dest, self.places.stamp):
            path.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--size", type=int, default=512, help="MiB of the file")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    options = parser.parse_args()
    end_well()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-download-", dir=options.folder) as name:
        campaign = Campaign(Path(name), options.size * MIB, options.seed)
        print(f"seed {options.seed}, {options.kills} kills, a file of {options.size} MiB in {name}", flush=True)
        try:
            while len(campaign.kills) < options.kills:
                known = len(campaign.kills)
                campaign.run_and_kill()
                for kill in campaign.kills[known:]:
                    print(
                        f"kill {known + 1:3}: {kill.moment:24} {kill.before >> 20:4} MiB before, "
                        f"{kill.sent >> 20:4} sent, {kill.after >> 20:4} kept, twice {kill.twice / MIB:5.1f} MiB"
                        + (", the file had its name" if kill.placed else ""),
                        flush=True,
                    )
            campaign.finish()
        finally:
            campaign.server.stop()
    costs = [kill.twice for kill in campaign.kills]
    afterwards = sum(kill.moment.startswith("after") for kill in campaign.kills)
    print(f"kills: {len(costs)} ({afterwards} after the last byte); runs that came to their end: {campaign.whole}")
    print(
        f"bytes fetched twice for a kill: median {statistics.median(costs) / MIB:.1f} MiB, "
        f"most {max(costs) / MIB:.1f} MiB (at most {ALLOWED >> 20} allowed)"
    )
    print(f"wrong files: {len(campaign.wrong)}")
    for line in campaign.wrong:
        print(f"  {line}")
    print(f"{time.monotonic() - begun:.0f} s")
    return int(bool(campaign.wrong) or max(costs) > ALLOWED)


if __name__ == "__main__":
    raise SystemExit(main())
