# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The proof of a build: what its files are, what its programs say, and that they compute on the cards.

Everything runs as the account that compiles, without rights. Each function raises FaultError on the first doubt.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ..faults import Fault, FaultError
from ..machine import Completed
from .capabilities import Capabilities, parse_help
from .catalogue import CATALOGUE
from .gpus import Cards, uncovered
from .libraries import DRIVER_LIBRARY, KEPT, judge_libraries, judge_run_path, libraries_of, run_path_of
from .process import environment, find_program, run_as, scratch_folder
from .request import BENCH, SERVER, Account
from .tiny_model import write_tiny_model

#: Loading the driver's libraries and waking eight cards without persistence mode takes its time.
GPU_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Expected:
    """What a release must show. ``toolkit`` is the root of the CUDA toolkit it was built with, null on a target."""

    version: str | None = None
    commit: str | None = None
    cuda_architectures: Sequence[str] = ()
    model_architecture: str | None = None
    toolkit: str | None = None
    run_paths: Sequence[str] = ()


@dataclass(frozen=True)
class Proof:
    """What the binaries showed: ``version`` and ``commit`` by their own word, and each check with what it saw."""

    version: str | None
    commit: str | None
    capabilities: Capabilities
    checks: list[dict[str, str]] = field(default_factory=list)


def _failed(subject: str, message: str, remedy: str = KEPT) -> FaultError:
    return FaultError(CATALOGUE.fault("proof_failed", subject, message, remedy))


def prove(folder: Path, expected: Expected, account: Account | None) -> Proof:
    """Look at the files of a release and run its server for a moment.

    On a machine without a driver the toolkit's stub of libcuda stands in, for this proof only and from a folder of its
    own: it never gets into a run path.
    """
    with scratch_folder("llama-proof-", None) as scratch:
        scratch.chmod(0o755)
        env = environment()
        stub = driver_stub(expected.toolkit) if expected.toolkit else None
        if stub is not None and libraries_of(folder / "bin" / SERVER, account).get(DRIVER_LIBRARY, "") is None:
            (scratch / DRIVER_LIBRARY).symlink_to(stub)
            env["LD_LIBRARY_PATH"] = str(scratch)
        return _prove(folder, expected, account, env)


def driver_stub(toolkit: str) -> Path | None:
    """The toolkit's libcuda for linking; Debian keeps it with the system's libraries."""
    own = [Path(toolkit, "lib64/stubs"), Path(toolkit, "lib/stubs"), *Path(toolkit).glob("targets/*/lib/stubs")]
    for place in (*own, *Path("/usr/lib").glob("*/stubs")):
        stub = place / "libcuda.so"
        if stub.exists():
            return stub
    return None


def _prove(folder: Path, expected: Expected, account: Account | None, env: Mapping[str, str]) -> Proof:
    checks = [*_prove_libraries(folder, expected, account)]

    server = folder / "bin" / SERVER
    answer = run_as(account, [str(server), "--version"], env)
    said_version, said_commit = parse_version(answer.stdout + answer.stderr)
    _must_run(answer, server)
    if expected.version is not None and said_version != expected.version:
        raise _failed(SERVER, f"--version names {said_version}, expected {expected.version}")
    commit = expected.commit
    if commit is not None and not (said_commit and (commit.startswith(said_commit) or said_commit.startswith(commit))):
        raise _failed(SERVER, f"--version names commit {said_commit}, expected {commit}")
    checks.append({"check": "version", "found": f"{said_version}, commit {said_commit}"})

    answer = run_as(account, [str(server), "--help"], env)
    _must_run(answer, server)
    capabilities = parse_help(answer.stdout + answer.stderr)
    if "--model" not in capabilities.flags:
        raise _failed(SERVER, "--help does not list --model")
    checks.append({"check": "help", "found": f"{len(capabilities.flags)} options"})

    checks += _prove_model_architecture(folder, expected.model_architecture)
    checks += _prove_architectures(folder, expected, account)
    return Proof(said_version, said_commit, capabilities, checks)


def _prove_libraries(folder: Path, expected: Expected, account: Account | None) -> list[dict[str, str]]:
    own = {path.name for path in (folder / "lib").iterdir()}
    for program in sorted((folder / "bin").iterdir()):
        for fault in judge_libraries(program, libraries_of(program, account), own):
            raise FaultError(fault)
    checks = [{"check": "libraries", "found": f"{len(own)} of its own, all from inside the release"}]
    seen = set()
    for file in sorted([*(folder / "bin").iterdir(), *(folder / "lib").iterdir()]):
        folders = run_path_of(file, account)
        if folders is None:
            return [*checks, {"check": "run path", "found": "not looked at: no readelf on this machine"}]
        # A toolkit's own library that came along may name its own folder; it holds no stub.
        for fault in judge_run_path(file, folders, expected.run_paths):
            raise FaultError(fault)
        seen.update(folders)
    return [*checks, {"check": "run path", "found": ", ".join(sorted(seen)) or "none"}]


def _must_run(answer: Completed, program: Path) -> None:
    if answer.ok:
        return
    raise _failed(program.name, f"{' '.join(answer.argv[1:])} {ending(answer)}")


def ending(answer: Completed) -> str:
    """How a program failed, in words."""
    if answer.timed_out:
        return "gives no answer in time"
    if answer.missing:
        return f"cannot be started: {answer.stderr}" + _why_not_started(answer)
    if answer.rc == -4:
        return "ends with an illegal instruction: it was built for another processor"
    if answer.rc is not None and answer.rc < 0:
        return f"ends with signal {-answer.rc}"
    return f"ends with exit status {answer.rc}: {answer.stderr.strip().partition(chr(10))[0]}"


def _why_not_started(answer: Completed) -> str:
    """The usual reason of a refusal for a program that was made executable a moment ago."""
    try:
        closed = os.statvfs(answer.argv[0]).f_flag & os.ST_NOEXEC
    except OSError:
        return ""
    return " (its file system is mounted with noexec: choose another prefix, or mount it with exec)" if closed else ""


def parse_version(text: str) -> tuple[str | None, str | None]:
    """Version and commit out of ``--version``; null for what is not said.

    Two forms: ``version: 0.5.0-dev (build 0, commit 0c1e57098)`` and the older ``version: 6123 (0c1e5709)``.
    """
    found = re.search(r"^version: (\S+) \((?:build \d+, commit )?(\w+)\)", text, re.MULTILINE)
    if found is None:
        return None, None
    commit = found.group(2)
    return found.group(1), (None if commit == "unknown" else commit)


def _prove_model_architecture(folder: Path, name: str | None) -> list[dict[str, str]]:
    """Is the model's architecture among those the engine was written for? Their names are texts in libllama."""
    if not name:
        return []
    libraries = sorted((folder / "lib").glob("libllama.so*"))
    if not any(name.encode() + b"\0" in library.read_bytes() for library in libraries):
        raise FaultError(
            CATALOGUE.fault(
                "model_architecture_unknown",
                name,
                "this engine does not know the architecture: it would end with 'unknown model architecture'",
                "Build a newer llama.cpp, or name the architecture of the model that is to be served.",
            )
        )
    return [{"check": "model architecture", "found": f"{name} is known"}]


def _prove_architectures(folder: Path, expected: Expected, account: Account | None) -> list[dict[str, str]]:
    """Native code for every ``-real`` or plain architecture in the CUDA library, as cuobjdump lists it."""
    if not expected.cuda_architectures:
        return []
    wanted = wanted_code(expected.cuda_architectures)
    library = cuda_library(folder)
    if library is None:
        raise FaultError(
            CATALOGUE.fault(
                "architecture_missing", "libggml-cuda", "is not in the release: this build runs on the CPU only", KEPT
            )
        )
    cuobjdump = find_program("cuobjdump", f"{expected.toolkit}/bin" if expected.toolkit else None)
    if cuobjdump is None:
        return [{"check": "architectures", "found": "not looked at: no cuobjdump on this machine"}]
    answer = run_as(account, [cuobjdump, "--list-elf", str(library)], environment(), timeout=120)
    fault = judge_architectures(answer.stdout, wanted)
    if fault is not None:
        raise FaultError(fault)
    counts = ", ".join(f"{answer.stdout.count('.' + name + '.')} x {name}" for name in wanted)
    return [{"check": "architectures", "found": counts}]


def cuda_library(folder: Path) -> Path | None:
    return next(iter(sorted((folder / "lib").glob("libggml-cuda.so*"))), None)


def wanted_code(architectures: Sequence[str]) -> list[str]:
    """``sm_`` names of the native code that these architectures ask for."""
    return sorted({f"sm_{name.partition('-')[0]}" for name in architectures if not name.endswith("-virtual")})


def judge_architectures(listing: str, wanted: Sequence[str]) -> Fault | None:
    """A fault when ``cuobjdump --list-elf`` shows no code for one of ``wanted`` (sm_70, ...)."""
    have = sorted(set(re.findall(r"\bsm_\d+[a-z]?\b", listing.replace(".", " "))))
    missing = [name for name in wanted if name not in have]
    if not missing:
        return None
    return CATALOGUE.fault(
        "architecture_missing",
        "libggml-cuda",
        f"has code for {', '.join(have) or 'no card at all'}, none for {', '.join(missing)}",
        "Build with cuda_architectures of the cards in this machine; a prebuilt library often leaves old ones out.",
    )


# --- On the cards -----------------------------------------------------------------------------------------------------


def prove_on_gpus(
    folder: Path, cards: Cards, architectures: Sequence[str], account: Account | None
) -> list[dict[str, str]]:
    """The engine lists every card, and computes on each of them by itself."""
    have = wanted_code(architectures)
    virtual = any("-real" not in name for name in architectures)
    strange = sorted({name for name in cards.capabilities if name and uncovered(name, have)})
    if strange and not virtual:
        raise FaultError(
            CATALOGUE.fault(
                "gpu_proof_failed",
                "libggml-cuda",
                f"has native code for {', '.join(have)} alone, and a card here is sm_{strange[0]}",
                f"Write cuda_architectures as [{', '.join(f'{name}-real' for name in strange)}].",
            )
        )
    answer = _on_gpu(folder / "bin" / SERVER, account, "--list-devices")
    devices = parse_devices(answer.stdout)
    if not answer.ok or len(devices) != cards.count:
        seen = ", ".join(devices) or "none"
        raise _gpu_failed(SERVER, f"--list-devices shows {seen}, the driver {cards.count} GPUs", answer)
    speeds = compute_on(folder, devices, account)
    shown = ", ".join(f"{name} {speed:.0f} tokens/s" for name, speed in speeds.items())
    return [{"check": "devices", "found": ", ".join(devices)}, {"check": "compute", "found": shown}]


def compute_on(folder: Path, devices: Sequence[str], account: Account | None) -> dict[str, float]:
    """Let the engine compute on each device by itself, as it names them; tokens a second. ``none`` is the processor."""
    with scratch_folder("llama-proof-", None) as scratch:
        scratch.chmod(0o755)
        model = write_tiny_model(scratch / "proof.gguf", layers=2)
        where = {"-m": str(model), "-ngl": "99", "-dev": ",".join(devices)}
        what = {"-p": "64", "-n": "8", "-r": "1", "-o": "json"}
        answer = _on_gpu(folder / "bin" / BENCH, account, *chain(*where.items(), *what.items()))
    speeds = parse_bench(answer.stdout) if answer.ok else {}
    silent = [name for name in devices if name not in speeds]
    if silent:
        raise _gpu_failed(BENCH, f"a small model does not run on {', '.join(silent)}", answer)
    return speeds


def _on_gpu(program: Path, account: Account | None, *words: str) -> Completed:
    return run_as(account, [str(program), *words], environment(), timeout=GPU_TIMEOUT_S)


def parse_devices(text: str) -> list[str]:
    """Names of the CUDA devices in the answer to ``--list-devices``."""
    return re.findall(r"^\s+(CUDA\d+): ", text, re.MULTILINE)


def parse_bench(text: str) -> dict[str, float]:
    """Tokens a second by device, the slowest test of each, from ``llama-bench -o json``."""
    try:
        tests = json.loads(text)
    except ValueError:
        return {}
    speeds: dict[str, float] = {}
    for test in tests if isinstance(tests, list) else []:
        name, speed = str(test.get("devices", "")), float(test.get("avg_ts") or 0)
        if name and speed > 0:
            speeds[name] = min(speed, speeds.get(name, speed))
    return speeds


def _gpu_failed(program: str, message: str, answer: Completed) -> FaultError:
    said = answer.stderr + answer.stdout
    busy = re.search(r"out of memory|devices? (?:are|is) busy or unavailable|unable to allocate CUDA", said)
    if busy:
        return FaultError(
            CATALOGUE.fault(
                "gpu_busy",
                program,
                f"{message}: {busy.group(0)}",
                "Leave 1 GiB free on every card while the engine is switched, or stop for the moment what runs there.",
            )
        )
    kernel = re.search(r"no kernel image is available[^\n]*|no device code compatible[^\n]*|CUDA error[^\n]*", said)
    how = kernel.group(0) if kernel else "" if answer.ok else ending(answer)
    remedy = KEPT
    if kernel and "CUDA error" not in kernel.group(0):
        remedy = "Build with cuda_architectures of the cards in this machine. " + KEPT
    return FaultError(CATALOGUE.fault("gpu_proof_failed", program, message + (f": {how}" if how else ""), remedy))
