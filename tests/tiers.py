"""Runs the test tiers and closes with one plain line, ``N passed, N failed``.

Usage: python -m tests.tiers TIER [TIER ...]; ``test`` is what CI runs, ``full`` adds the heavy ones.

A tier is a list of steps; a step is a command. pytest steps count their tests, other steps count as one. Output is
kept in build/tests/<step>.log and passed through as it comes; steps that run side by side (two, for every one has a lab
of its own and mostly waits for it) show theirs when they end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "tests"


@dataclass
class Step:
    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    step: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def pytest_step(name: str, *paths: str, python: str = sys.executable) -> Step:
    report = LOGS / f"{name}.xml"
    return Step(name, [python, "-m", "pytest", "-q", f"--junit-xml={report}", *paths])


def lint() -> Iterator[Step]:
    yield Step("ruff-check", ["ruff", "check", "."])
    yield Step("ruff-format", ["ruff", "format", "--check", "."])
    yield Step("mypy", ["mypy"])
    yield Step("yamllint", ["yamllint", "--strict", "."])
    yield Step("ansible-lint", ["ansible-lint", "--nocolor"])
    yield Step("shellcheck", ["shellcheck", ".ci/run"])
    yield Step("changelog", ["antsibull-changelog", "lint"])


def unit() -> Iterator[Step]:
    yield pytest_step("unit", "tests/unit")


def cores() -> Iterator[Step]:
    for python in ("3.10", "3.13"):
        yield Step(f"core-on-python{python}", [sys.executable, "-m", "tests.cores", python])


#: Scenarios that cost what `make test` cannot spend, and what of.
HEAVY_SCENARIOS = {
    "nvidia_driver_debian12": "compiles NVIDIA's module with DKMS for a real kernel",
}


def scenarios(heavy: bool) -> Iterator[Step]:
    for scenario in sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml")):
        if (scenario in HEAVY_SCENARIOS) == heavy:
            yield Step(f"molecule-{scenario}", ["molecule", "test", "-s", scenario])


def molecule() -> Iterator[Step]:
    return scenarios(heavy=False)


def packages() -> Iterator[Step]:
    """Debian's real driver packages."""
    return scenarios(heavy=True)


#: Builds the engine twice more.
WAY_BACK = "tests/e2e/test_way_back.py"


def way_back() -> Iterator[Step]:
    yield pytest_step("way-back", WAY_BACK)


def e2e() -> Iterator[Step]:
    yield pytest_step("e2e", "tests/e2e", f"--ignore={WAY_BACK}")


def cuda() -> Iterator[Step]:
    """The whole engine for sm_70, by the roles, with Debian's two toolkits: an hour each where it is not kept."""
    yield pytest_step("cuda", "-s", "tests/cuda")


def vm() -> Iterator[Step]:
    yield Step("vm-packages", [sys.executable, "-m", "tests.lab.vm", "deps", "--install"])
    yield pytest_step("vm", "-s", "tests/vm")


def faults() -> Iterator[Step]:
    for campaign in ("host", "download", "serving"):
        yield Step(f"fault-{campaign}", [sys.executable, "-m", f"tests.fault.{campaign}"])


TIERS = {"lint": lint, "unit": unit, "cores": cores, "molecule": molecule, "e2e": e2e,
         "way-back": way_back, "packages": packages, "vm": vm, "cuda": cuda, "faults": faults}  # fmt: skip
#: Tiers whose steps run side by side. Not the cores: their tests look at processes of the whole machine.
SIDE_BY_SIDE = {"molecule"}
SETS = {"test": ["lint", "unit", "cores", "molecule", "e2e"], "full": list(TIERS)}


_OUTPUT = threading.Lock()


def run_step(step: Step, beside_others: bool = False) -> Outcome:
    with _OUTPUT:
        print(f"\n=== {step.name}: {' '.join(step.argv)}", flush=True)
    start = time.monotonic()
    if shutil.which(step.argv[0]) is None:
        print(f"{step.argv[0]} is not installed; `make os-packages dev` installs it", flush=True)
        return Outcome(step.name, 0, 1, 0, 0.0)
    with (LOGS / f"{step.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            step.argv,
            cwd=ROOT,
            env={**os.environ, **step.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if not beside_others:
                sys.stdout.write(line)
                sys.stdout.flush()
            log.write(line)
        status = process.wait()
    seconds = time.monotonic() - start
    if beside_others:
        with _OUTPUT:
            print(f"\n=== {step.name} ended with status {status} after {seconds:.0f} s; its output:", flush=True)
            print((LOGS / f"{step.name}.log").read_text(encoding="utf-8"), flush=True)
    counted = count_tests(step)
    if counted is None:
        return Outcome(step.name, int(status == 0), int(status != 0), 0, seconds)
    passed, failed, skipped = counted
    # A run that breaks outside of its tests (collection, fixtures at exit) has failed even if none of its tests has.
    return Outcome(step.name, passed, max(failed, int(status != 0)), skipped, seconds)


def count_tests(step: Step) -> tuple[int, int, int] | None:
    """(passed, failed, skipped) from the JUnit report that the step was asked for; null where it wrote none."""
    reports = [Path(word.split("=", 1)[1]) for word in step.argv if word.startswith("--junit-xml=")]
    if not reports or not reports[0].is_file():
        return None
    suites = list(ET.parse(reports[0]).getroot().iter("testsuite"))
    total, failed, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites for key in keys)
        for keys in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return total - failed - skipped, failed, skipped


def main(names: list[str]) -> int:
    tiers = [tier for name in names for tier in SETS.get(name, [name])]
    unknown = [tier for tier in tiers if tier not in TIERS]
    if unknown or not tiers:
        print(f"unknown tier {unknown}: choose from {', '.join([*SETS, *TIERS])}", file=sys.stderr)
        return 2
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    outcomes: list[Outcome] = []
    for tier in tiers:
        if tier in SIDE_BY_SIDE:
            with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
                outcomes += pool.map(lambda step: run_step(step, beside_others=True), TIERS[tier]())
        else:
            outcomes += map(run_step, TIERS[tier]())
    print("\n=== what ran")
    for outcome in outcomes:
        skipped = f", {outcome.skipped} skipped (reasons above)" if outcome.skipped else ""
        print(f"{outcome.step:24} {outcome.passed} passed, {outcome.failed} failed{skipped}  [{outcome.seconds:.0f} s]")
    if "test" in names:
        print("not in this set, see `make test-full`: " + ", ".join(tier for tier in TIERS if tier not in tiers))
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"\n{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
