# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Kills the preparation of a host at random moments, runs it again, and looks at what is there then.

    python -m tests.fault.host [--kills 20] [--seed N]

Every time a lab machine that claims to be Ubuntu 22.04 begins bare. playbooks/host.yml is started and killed (SIGKILL)
at a moment drawn from the length of an undisturbed run: every other time the play alone, as when the operator's laptop
goes, and every other time with every process it has on the machine, dpkg in the middle of a package included, as when
the power goes. Then the play runs once to its end. It must end well, and the machine must be what the undisturbed run
made of it: no package half configured, the same packages and versions, the same holds, our files with the same text,
the driver loaded. Machines work side by side; the GPU is simulated, apt, dpkg, DKMS and the initramfs are real.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.lab import Lab, Machine

ROOT = Path(__file__).resolve().parents[2]
LAB = "fault-host"
#: What the machine is compared by: name, and the shell command whose output says it.
TRUTH = {
    "packages": "dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\\n'",
    "holds": "apt-mark showhold",
    "files": "sha256sum $(ls /etc/modprobe.d/*volta* /etc/modules-load.d/*volta* /etc/apt/preferences.d/*volta* "
    "/etc/apt/apt.conf.d/*volta-llm* /etc/systemd/system/*volta* /etc/systemd/system/nvidia-persistenced.service.d/* "
    "2>/dev/null)",
    "dkms": "dkms status",
    "loaded": "lsmod | awk 'NR > 1 {print $1}' | sort",
    "persistence": "nvidia-smi --query-gpu=persistence_mode --format=csv,noheader",
}
#: Kills all that the play has started on the machine: Ansible's own programs, then what they run.
KILL_THERE = (
    "pkill -KILL -f ansible-tmp; pkill -KILL -x 'apt-get|apt|dpkg|dpkg-deb|dkms|update-initramf|mkinitramfs'; true"
)


@dataclass
class Tally:
    kills: int = 0
    runs: int = 0
    converged: int = 0
    failures: list[str] = field(default_factory=list)


def playbook(inventory: Path, log: Path) -> subprocess.Popen[bytes]:
    argv = ["ansible-playbook", "playbooks/host.yml", "-i", str(inventory), "-e", "reboot_gate_allowed=true"]
    with log.open("wb") as handle:
        return subprocess.Popen(argv, cwd=ROOT, stdout=handle, stderr=handle, start_new_session=True)


def truth(machine: Machine) -> dict[str, str]:
    return {name: machine.run("sh", "-c", command, check=False).stdout.decode() for name, command in TRUTH.items()}


def differences(machine: Machine, wanted: dict[str, str]) -> list[str]:
    """What is not as the undisturbed run left it, each in a line."""
    found = []
    audit = machine.output("dpkg", "--audit")
    if audit:
        found.append(f"dpkg --audit: {audit.splitlines()[0]}")
    for name, have in truth(machine).items():
        if have != wanted[name]:
            lines = sorted(set(have.splitlines()) ^ set(wanted[name].splitlines()))
            found.append(f"{name}: {'; '.join(lines[:5]) or 'order differs'}")
    return found


class Campaign:
    def __init__(self, labs: list[Lab], folder: Path) -> None:
        self._labs = {lab.machine_name(1): lab for lab in labs}
        self._folder = folder
        self._lock = threading.Lock()
        self._resets = threading.Lock()
        self.tally = Tally()

    def say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)

    def reset(self, machine: Machine) -> None:
        with self._resets:
            self._labs[machine.name].reset()

    def undisturbed(self, machine: Machine, inventory: Path) -> tuple[float, dict[str, str]]:
        began = time.monotonic()
        log = self._folder / "undisturbed.log"
        if playbook(inventory, log).wait() != 0:
            raise SystemExit(f"the undisturbed run failed:\n{log.read_text(errors='replace')[-3000:]}")
        return time.monotonic() - began, truth(machine)

    def one(self, number: int, moment: float, machine: Machine, inventory: Path, wanted: dict[str, str]) -> None:
        hard = number % 2 == 1
        self.reset(machine)
        log = self._folder / f"{number}-killed.log"
        play = playbook(inventory, log)
        try:
            play.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            os.killpg(play.pid, signal.SIGKILL)
            play.wait()
            killed = True
        else:
            killed = False
        if hard and killed:
            machine.run("sh", "-c", KILL_THERE, check=False)
        tasks = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("TASK [")]
        where = tasks[-1].split("]", 1)[0].removeprefix("TASK [") if tasks else "before the first task"
        again = self._folder / f"{number}-again.log"
        status = playbook(inventory, again).wait()
        found = differences(machine, wanted) if status == 0 else [f"the second run failed, see {again}"]
        with self._lock:
            self.tally.kills += killed
            self.tally.runs += 2
            self.tally.converged += not found
            self.tally.failures += [f"kill {number} at {moment:.1f} s, {where}: {text}" for text in found]
        what = "play and its processes on the machine" if hard else "play"
        verdict = "; ".join(found) or "converged"
        self.say(
            f"{number:3}  {moment:6.1f} s  {what if killed else 'not killed, it had ended'}  in: {where}  {verdict}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill the preparation of a host, run it again, look at the machine.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--machines", type=int, default=2, help="machines that work side by side")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    # A lab for each machine: making one anew closes the connections of its whole lab.
    labs = [Lab(f"{LAB}-{number}") for number in range(1, options.machines + 1)]
    folder = Path(tempfile.mkdtemp(prefix="volta-fault-host-"))
    inventories, machines = [], []
    try:
        for lab in labs:
            lab.down()
            place = folder / lab.name
            place.mkdir()
            (place / "group_vars").symlink_to(ROOT / "inventories" / "demo" / "group_vars")
            up = lab.up(count=1, gpus="v100x4", claims="ubuntu-22.04", inventory_file=place / "lab.yml")
            machines += up.machines
            inventories.append(place)
        campaign = Campaign(labs, folder)
        length, wanted = campaign.undisturbed(machines[0], inventories[0])
        print(f"undisturbed: {length:.1f} s, {len(wanted['holds'].split())} holds", flush=True)
        draw = random.Random(options.seed)
        work: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        for number in range(options.kills):
            # Two at once take longer than one alone; the last moments would else never be drawn.
            work.put((number, draw.uniform(1.0, length * (1.0 if options.machines == 1 else 1.5))))

        def lane(machine: Machine, inventory: Path) -> None:
            while True:
                try:
                    number, moment = work.get_nowait()
                except queue.Empty:
                    return
                campaign.one(number, moment, machine, inventory, wanted)

        lanes = [threading.Thread(target=lane, args=pair) for pair in zip(machines, inventories, strict=True)]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
        tally = campaign.tally
        print(f"runs {tally.runs}, kills {tally.kills}, converged {tally.converged} of {options.kills}")
        for text in tally.failures:
            print(f"  {text}")
        return 0 if tally.converged == options.kills else 1
    finally:
        for lab in labs:
            lab.down()


if __name__ == "__main__":
    sys.exit(main())
