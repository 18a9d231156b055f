# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Kills a ready llama-server under load, again and again, and looks at what comes back and what was lost.

    python -m tests.fault.serving [--kills 20] [--seed N] [--clients 4] [--lab NAME]

A lab machine is brought to a served model by site.yml (or one that serves already is named). Clients ask it without a
pause. At random moments the server's main process gets SIGKILL. After each kill:

- systemd starts it again, once; it answers within RestartSec and the time that this very start took to load, by
  systemd's own clock, plus GRACE_S for the unit's clean-up;
- only requests that were under way at the kill are lost. A request that is refused while the server is away, or told
  "Loading model", is known to its client at once and is not lost; it is counted as turned away.

Then three deaths in a row before readiness, twice: by SIGKILL as soon as the process is there, and by a model that has
gone. The unit must stop for good after three starts, and `systemctl status` must say why. At the end it serves again.
The container and this process share a clock (CLOCK_MONOTONIC), so moments are compared without allowance.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests import demo
from tests.lab.lab import Lab, Machine

ROOT = Path(__file__).resolve().parents[2]
LAB = "fault-serving"
SETTINGS = yaml.safe_load((ROOT / "inventories/demo/group_vars/gpu_servers.yml").read_text(encoding="utf-8"))
UNIT = "llama-server"
#: For what systemd does between a death and its wait: noticing, and the unit's ExecStopPost, on a busy machine.
GRACE_S = 3.0
#: The kernel takes connections for a killed process until it has torn it down.
DYING_S = 1.0
#: A server that is not back by then does not come back.
PATIENCE_S = 180.0
STARTS = 3
KILLED = "killed while it loads"
#: Runs on the machine: kills a process and says when (before and after).
KILL = "import os, sys, time; a = time.monotonic(); os.kill(int(sys.argv[1]), 9); print(a, time.monotonic())"
#: Kills the unit's next processes as soon as each is there, so many of them.
KILL_NEXT = """
import os, subprocess, sys, time
unit, wanted, last, end = sys.argv[1], int(sys.argv[2]), 0, time.monotonic() + 120
while wanted and time.monotonic() < end:
    show = ["systemctl", "show", unit, "--property=MainPID", "--value"]
    pid = int(subprocess.run(show, stdout=subprocess.PIPE, check=True).stdout)
    if pid not in (0, last):
        os.kill(pid, 9)
        last, wanted = pid, wanted - 1
    time.sleep(0.05)
"""


@dataclass(frozen=True)
class Asked:
    """One request: moments by the monotonic clock, and how it ended: answered, turned away or lost (and why)."""

    begun: float
    ended: float
    outcome: str
    why: str = ""


class Load:
    """Clients that ask without a pause, and keep what came of it."""

    def __init__(self, address: str, port: int, key: str, model: str, clients: int) -> None:
        self._place = (address, port)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._model = model
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.under_way: dict[int, float] = {}
        self.done: list[Asked] = []
        self._threads = [threading.Thread(target=self._ask_on, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def answered_since(self, moment: float) -> float | None:
        """When the first request that began after ``moment`` was answered."""
        with self._lock:
            ends = [asked.ended for asked in self.done if asked.outcome == "answered" and asked.begun >= moment]
        return min(ends, default=None)

    def busy(self) -> int:
        with self._lock:
            return len(self.under_way)

    def _ask_on(self, number: int) -> None:
        draw = random.Random(number)
        while not self._stop.is_set():
            begun = time.monotonic()
            with self._lock:
                self.under_way[number] = begun
            outcome, why = self._ask(draw.randint(16, 64))
            with self._lock:
                del self.under_way[number]
                self.done.append(Asked(begun, time.monotonic(), outcome, why))
            if outcome != "answered":
                self._stop.wait(0.1)

    def _ask(self, tokens: int) -> tuple[str, str]:
        body = json.dumps(
            {"model": self._model, "max_tokens": tokens, "messages": [{"role": "user", "content": "Hello"}]}
        )
        connection = http.client.HTTPConnection(*self._place, timeout=PATIENCE_S)
        try:
            try:
                connection.connect()
            except ConnectionRefusedError:
                return "turned away", "refused"
            connection.request("POST", "/v1/chat/completions", body, self._headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status == 503:
                return "turned away", "loading"
            if answer.status != 200 or not json.loads(text)["usage"]["completion_tokens"]:
                return "lost", f"HTTP {answer.status}"
        except (OSError, http.client.HTTPException, ValueError, KeyError) as problem:
            return "lost", type(problem).__name__
        finally:
            connection.close()
        return "answered", ""


@dataclass
class Kill:
    """One kill and what came back: seconds until the new process, its loading, and until a client had an answer."""

    moment: float
    under_way: int
    away_s: float = 0.0
    load_s: float = 0.0
    answered_s: float = 0.0
    problem: str = ""


@dataclass
class Tally:
    kills: list[Kill] = field(default_factory=list)
    lost: int = 0
    lost_wrongly: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Unit:
    """The server's unit on the machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def shell(self, command: str) -> str:
        return self._machine.run("sh", "-c", command, check=False).stdout.decode()

    def show(self, *names: str) -> list[str]:
        found = dict(
            line.partition("=")[::2] for line in self.shell(f"systemctl show {UNIT} -p {','.join(names)}").splitlines()
        )
        return [found.get(name, "") for name in names]

    def pid(self) -> int:
        return int(self.show("MainPID")[0] or 0)

    def kill(self, pid: int) -> tuple[float, float]:
        """SIGKILL; the moments just before and just after."""
        before, after = self._machine.output("python3", "-c", KILL, str(pid)).split()
        return float(before), float(after)

    def kill_next(self, count: int) -> None:
        self._machine.run("python3", "-c", KILL_NEXT, UNIT, str(count), check=False)

    def restart_seconds(self) -> float:
        return int(self.shell(f"systemctl show {UNIT} -p RestartUSec --value | tr -dc 0-9") or 0) * 1.0


def wait_for(what: Callable[[], Any], seconds: float = PATIENCE_S, pause: float = 0.2) -> Any:
    """What ``what`` returns once it is true; null where it never is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(pause)
    return None


class Campaign:
    def __init__(self, unit: Unit, load: Load, draw: random.Random) -> None:
        self._unit, self._load, self._draw = unit, load, draw
        self._rest = unit.restart_seconds()
        self.tally = Tally()

    def kill_ready(self, number: int) -> None:
        """Kill the server while it works, and see it come back by itself."""
        time.sleep(self._draw.uniform(0.2, 3.0))
        wait_for(self._load.busy, 10, 0.01)
        pid = self._unit.pid()
        before, after = self._unit.kill(pid)
        with_it = sum(begun <= after for begun in list(self._load.under_way.values()))
        kill = Kill(before, with_it)
        self.tally.kills.append(kill)
        answered = wait_for(lambda: self._load.answered_since(after + DYING_S))
        state, started, active = self._unit.show(
            "ActiveState", "ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic"
        )
        if answered is None or state != "active":
            kill.problem = f"not back after {PATIENCE_S:.0f} s: {state}"
        else:
            kill.away_s = int(started) / 1e6 - before
            kill.load_s = (int(active) - int(started)) / 1e6
            kill.answered_s = answered - before
            if self._unit.pid() == pid:
                kill.problem = "the killed process is still the unit's"
            elif kill.away_s > self._rest + GRACE_S:
                kill.problem = f"started {kill.away_s:.1f} s after the kill, RestartSec is {self._rest:.0f}"
        print(
            f"{number:3}  {kill.under_way} under way  started again after {kill.away_s:5.1f} s  loaded in "
            f"{kill.load_s:4.1f} s  answered after {kill.answered_s:5.1f} s  {kill.problem or 'recovered'}",
            flush=True,
        )

    def settle_requests(self) -> None:
        """Which requests were lost, and whether each of them was under way at a kill."""
        for asked in self._load.done:
            if asked.outcome != "lost":
                continue
            self.tally.lost += 1
            if not any(
                asked.begun <= kill.moment + DYING_S and asked.ended >= kill.moment for kill in self.tally.kills
            ):
                self.tally.lost_wrongly.append(f"{asked.why}, begun {asked.begun:.2f}, ended {asked.ended:.2f}")

    def die_thrice(self, how: str) -> None:
        """Let it die before it is ready until systemd gives up, and read what the operator would read."""
        since = self._unit.shell("date +%s").strip()
        self.tally.kills.append(Kill(self._unit.kill(self._unit.pid())[0], 0))
        if how == KILLED:
            self._unit.kill_next(STARTS)
        state = wait_for(lambda: self._unit.show("ActiveState")[0] == "failed", PATIENCE_S, 0.5)
        # Were there to be a fourth start, it would come after RestartSec.
        time.sleep(self._rest + GRACE_S)
        again = self._unit.show("ActiveState")[0]
        journal = self._unit.shell(f"journalctl --unit {UNIT} --no-pager --output=cat --since=@{since}")
        starts = sum(line.startswith(f"Starting {UNIT}") for line in journal.splitlines())
        shown = self._unit.shell(f"systemctl status {UNIT} --no-pager --lines=0")
        told = next((line.strip() for line in shown.splitlines() if line.strip().startswith("Status:")), "")
        problems = [
            *([] if state and again == "failed" else [f"it is {again}, not failed"]),
            *([] if starts == STARTS else [f"{starts} starts, not {STARTS}"]),
            *([] if told else ["systemctl status does not say why"]),
        ]
        self.tally.stops.append(f"{how}: {starts} starts, then {again}; systemctl status: {told or '(nothing)'}")
        self.tally.failures += [f"{how}: {problem}" for problem in problems]
        print(self.tally.stops[-1], flush=True)

    def serve_again(self, what: str) -> None:
        moment = time.monotonic()
        self._unit.shell(f"systemctl reset-failed {UNIT}; systemctl start {UNIT}")
        if wait_for(lambda: self._load.answered_since(moment)) is None:
            self.tally.failures.append(f"it does not serve again after: {what}")


def served(lab: str, folder: Path) -> Path:
    """A machine that serves the demo's model; the folder of its inventory."""
    inventory = folder / "inventory"
    inventory.mkdir()
    (inventory / "group_vars").symlink_to(ROOT / "inventories" / "demo" / "group_vars")
    demo.prepare(lab, inventory / "lab.yml")
    log = folder / "site.log"
    print(f"site.yml on it, output in {log}", flush=True)
    with log.open("wb") as handle:
        done = subprocess.run(
            ["ansible-playbook", "site.yml", "-i", str(inventory)], cwd=ROOT, stdout=handle, stderr=handle, check=False
        )
    if done.returncode != 0:
        raise SystemExit(f"site.yml failed:\n{log.read_text(errors='replace')[-3000:]}")
    return inventory


def run(machine: Machine, options: argparse.Namespace) -> int:
    unit = Unit(machine)
    model = str(
        next(
            word
            for line in unit.shell(f"cat /etc/systemd/system/{UNIT}.service").splitlines()
            if line.startswith("ExecStart=")
            for word in line.split()
            if word.endswith(".gguf")
        )
    )
    load = Load(
        machine.address,
        int(SETTINGS["llama_server_port"]),
        SETTINGS["llama_server_api_keys"][0],
        SETTINGS["llama_server_alias"],
        options.clients,
    )
    with load:
        if wait_for(lambda: load.answered_since(0.0)) is None:
            raise SystemExit("the machine does not answer before the first kill")
        campaign = Campaign(unit, load, random.Random(options.seed))
        for number in range(1, options.kills + 1):
            campaign.kill_ready(number)
        recoveries = sum(not kill.problem for kill in campaign.tally.kills)
        campaign.die_thrice(KILLED)
        campaign.serve_again("three kills while it loaded")
        unit.shell(f"mv {model} {model}.away")
        try:
            campaign.die_thrice("the model has gone")
        finally:
            unit.shell(f"mv {model}.away {model}")
        campaign.serve_again("the model was gone")
    campaign.settle_requests()
    tally = campaign.tally
    counts = {name: sum(asked.outcome == name for asked in load.done) for name in ("answered", "turned away", "lost")}
    back = [kill for kill in tally.kills if kill.answered_s]
    if back:
        print(
            "seconds from kill to answer: median "
            f"{statistics.median(kill.answered_s for kill in back):.1f}, worst {max(k.answered_s for k in back):.1f}; "
            f"loading took {statistics.median(kill.load_s for kill in back):.1f} (median)"
        )
    print(f"requests: {counts['answered']} answered, {counts['turned away']} turned away while it was down")
    print(
        f"kills {options.kills}, recoveries {recoveries}, lost requests {tally.lost}, "
        f"of them not under way at a kill {len(tally.lost_wrongly)}"
    )
    for text in [*(kill.problem for kill in tally.kills if kill.problem), *tally.lost_wrongly, *tally.failures]:
        print(f"  {text}")
    sound = recoveries == options.kills and not tally.lost_wrongly and not tally.failures
    return 0 if sound else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a ready server under load, look at what comes back.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--clients", type=int, default=4, help="requests at once; the demo's server has 2 slots")
    parser.add_argument("--lab", help="a lab whose machine serves the demo's model already; it is left as it is")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    lab = Lab(options.lab or LAB)
    folder = Path(tempfile.mkdtemp(prefix="volta-fault-serving-"))
    try:
        if not options.lab:
            lab.down()
            served(lab.name, folder)
        return run(lab.machines()[0], options)
    finally:
        if not options.lab:
            lab.down()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
