# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Release folders: laid down whole, proven before they are shown, switched by one link.

``<prefix>/releases/<version>-<fingerprint12>/{bin,lib,release.json}``; ``<prefix>/current`` and ``<prefix>/previous``
are links to releases. A folder under ``releases`` that does not begin with a dot has been proven.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..faults import Fault, FaultError
from ..files import sync_folder
from ..machine import Completed
from .capabilities import Capabilities, parse_help
from .catalogue import CATALOGUE
from .process import environment, find_program, programs_below, run_as, scratch_folder
from .request import SERVER, Account

MANIFEST = "release.json"
SCHEMA = 1

#: The driver brings it; on a build host without a driver it is absent and that is right.
DRIVER_LIBRARY = "libcuda.so.1"


@dataclass(frozen=True)
class Release:
    """An installed release and its manifest."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def binary(self) -> Path:
        return self.path / "bin" / SERVER


class Store:
    """The releases below a prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = Path(prefix)
        self.releases = self.prefix / "releases"

    def find(self, fingerprint: str) -> Release | None:
        """The whole and undamaged release of this fingerprint, or null."""
        for path in sorted(self.releases.glob(f"*-{fingerprint[:12]}")):
            release = read_release(path)
            if release is not None and release.manifest["fingerprint"] == fingerprint and is_intact(release):
                return release
        return None

    def link(self, name: str) -> Path | None:
        """The release that ``current`` or ``previous`` points to; null where there is none."""
        try:
            target = (self.prefix / name).readlink()
        except OSError:
            return None
        path = self.prefix / target
        return path if path.is_dir() else None

    def clean_partials(self) -> None:
        """Remove what an interrupted installation left."""
        for path in self.releases.glob(".*"):
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, partial: Path, name: str) -> Path:
        """Give a proven folder its name; a damaged release of that name makes way first."""
        path = self.releases / name
        if path.exists():
            aside = self.releases / f".replaced-{name}"
            path.rename(aside)
            partial.rename(path)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            partial.rename(path)
        sync_folder(self.releases)
        return path

    def switch(self, path: Path) -> None:
        """Point ``current`` to the release, ``previous`` to the one before it; each in one step."""
        before = self.link("current")
        if before == path:
            return
        if before is not None:
            self._set_link("previous", before)
        self._set_link("current", path)
        sync_folder(self.prefix)

    def _set_link(self, name: str, path: Path) -> None:
        fresh = self.prefix / f".{name}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path.relative_to(self.prefix))
        fresh.replace(self.prefix / name)

    def prune(self, keep: int) -> list[str]:
        """Remove the oldest releases beyond ``keep``; never a linked one, nor one that a process runs from."""
        every = [path for path in self.releases.glob("*") if path.is_dir() and not path.name.startswith(".")]
        every.sort(key=lambda path: (path / MANIFEST).stat().st_mtime if (path / MANIFEST).exists() else 0.0)
        excess = len(every) - keep
        if excess <= 0:
            return []
        running = programs_below(self.releases)
        kept = {self.link("current"), self.link("previous")}
        removed: list[str] = []
        for path in every:
            if len(removed) == excess:
                break
            inside = os.path.realpath(path) + "/"
            if path in kept or any(program.startswith(inside) for program in running):
                continue
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
        return removed


def read_release(path: Path) -> Release | None:
    """The release in a folder, or null where its manifest is absent or not ours."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA or "fingerprint" not in manifest:
        return None
    return Release(path, manifest)


def is_intact(release: Release) -> bool:
    """Are all files there as they were installed? Hashes are computed only where size or time make one doubt."""
    for entry in release.manifest["files"]:
        path = release.path / entry["path"]
        try:
            found = path.lstat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry["size"]:
            return False
        if found.st_mtime_ns != entry["mtime_ns"] and hash_file(path) != entry["sha256"]:
            return False
    return True


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# --- Laying down ----------------------------------------------------------------------------------------------------


def lay_down(build: Path, targets: Sequence[str], partial: Path, account: Account | None) -> None:
    """Copy the programs and the libraries they need from the build tree into ``partial``.

    The build tree belongs to the build user. Only regular files of that user are taken, never what a link there
    points to elsewhere: otherwise the build could publish any file that root can read.
    """
    output = build / "bin"
    (partial / "bin").mkdir(parents=True)
    (partial / "lib").mkdir()
    for folder in (partial, partial / "bin", partial / "lib"):
        folder.chmod(0o755)
    owner = account.uid if account else os.geteuid()
    libraries: dict[str, Path] = {}
    for target in targets:
        program = output / target
        if not program.is_file():
            raise _proof_failed(target, "the build ended well and left no such program", "Check targets.")
        _copy(program, partial / "bin" / target, owner, 0o755)
        for name, found in libraries_of(program, account).items():
            if found is not None and found.startswith(f"{output}/"):
                libraries[name] = Path(found)
    for name, path in libraries.items():
        _copy(_within(path, output), partial / "lib" / name, owner, 0o644)


def _within(path: Path, folder: Path) -> Path:
    """Follow the version links of a library inside one folder (libx.so.0 to libx.so.0.25.3)."""
    for _ in range(8):
        if not path.is_symlink():
            return path
        target = path.readlink()
        if len(target.parts) != 1:
            raise _proof_failed(str(path), f"is a link to {target}", "Remove the build folder and run again.")
        path = folder / target
    raise _proof_failed(str(path), "is a circle of links", "Remove the build folder and run again.")


def _copy(source: Path, target: Path, owner: int, mode: int) -> None:
    handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as content:
        found = os.fstat(content.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise _proof_failed(
                str(source), "is not a file of the build user", "Remove the build folder and run again."
            )
        with target.open("xb") as out:
            shutil.copyfileobj(content, out, 1 << 20)
            out.flush()
            os.fchmod(out.fileno(), mode)
            os.fsync(out.fileno())


def write_manifest(partial: Path, content: Mapping[str, Any]) -> None:
    """Write release.json with the list of files; the last thing before a release gets its name."""
    files = []
    for path in sorted(partial.glob("*/*")):
        found = path.stat()
        files.append(
            {
                "path": str(path.relative_to(partial)),
                "size": found.st_size,
                "mtime_ns": found.st_mtime_ns,
                "sha256": hash_file(path),
            }
        )
    with (partial / MANIFEST).open("x", encoding="utf-8") as out:
        json.dump({"schema": SCHEMA, **content, "files": files}, out, indent=2, sort_keys=True)
        out.write("\n")
        out.flush()
        os.fchmod(out.fileno(), 0o644)
        os.fsync(out.fileno())
    for folder in (partial / "bin", partial / "lib", partial):
        sync_folder(folder)


# --- Proof ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """What the binaries showed: ``version`` and ``commit`` by their own word, and each check with what it saw."""

    version: str | None
    commit: str | None
    capabilities: Capabilities
    checks: list[dict[str, str]]


def _proof_failed(subject: str, message: str, remedy: str) -> FaultError:
    return FaultError(CATALOGUE.fault("proof_failed", subject, message, remedy))


_KEPT = "The release in use was not touched. See the log, and report what was built and where if it stays so."


def prove(
    folder: Path,
    version: str | None,
    commit: str | None,
    architectures: Sequence[str],
    account: Account | None,
    toolkit: str | None = None,
) -> Proof:
    """Run the built programs without privileges and look at what they are; raises FaultError on the first doubt.

    ``toolkit`` is the root of the CUDA toolkit. On a machine without a driver its stub of libcuda stands in, for this
    proof only and from a folder of its own: it never gets into a run path.
    """
    with scratch_folder("llama-proof-", None) as scratch:
        scratch.chmod(0o755)
        env = environment()
        stub = driver_stub(toolkit) if toolkit else None
        if stub is not None and any(
            name == DRIVER_LIBRARY and path is None
            for name, path in libraries_of(folder / "bin" / SERVER, account).items()
        ):
            (scratch / DRIVER_LIBRARY).symlink_to(stub)
            env["LD_LIBRARY_PATH"] = str(scratch)
        return _prove(folder, version, commit, architectures, account, toolkit, env)


def driver_stub(toolkit: str) -> Path | None:
    """The toolkit's libcuda for linking; Debian keeps it with the system's libraries."""
    for place in (Path(toolkit, "lib64/stubs"), Path(toolkit, "lib/stubs"), *Path("/usr/lib").glob("*/stubs")):
        stub = place / "libcuda.so"
        if stub.exists():
            return stub
    return None


def _prove(
    folder: Path,
    version: str | None,
    commit: str | None,
    architectures: Sequence[str],
    account: Account | None,
    toolkit: str | None,
    env: Mapping[str, str],
) -> Proof:
    checks: list[dict[str, str]] = []

    own = {path.name for path in (folder / "lib").iterdir()}
    for program in sorted((folder / "bin").iterdir()):
        for fault in judge_libraries(program, libraries_of(program, account), own):
            raise FaultError(fault)
    checks.append({"check": "libraries", "found": f"{len(own)} of its own, all from inside the release"})

    server = folder / "bin" / SERVER
    answer = run_as(account, [str(server), "--version"], env)
    said_version, said_commit = parse_version(answer.stdout + answer.stderr)
    _must_run(answer, server)
    if version is not None and said_version != version:
        raise _proof_failed(SERVER, f"--version names {said_version}, expected {version}", _KEPT)
    if commit is not None and not (said_commit and (commit.startswith(said_commit) or said_commit.startswith(commit))):
        raise _proof_failed(SERVER, f"--version names commit {said_commit}, expected {commit}", _KEPT)
    checks.append({"check": "version", "found": f"{said_version}, commit {said_commit}"})

    answer = run_as(account, [str(server), "--help"], env)
    _must_run(answer, server)
    capabilities = parse_help(answer.stdout + answer.stderr)
    if "--model" not in capabilities.flags:
        raise _proof_failed(SERVER, "--help does not list --model", _KEPT)
    checks.append({"check": "help", "found": f"{len(capabilities.flags)} options"})

    checks += _prove_architectures(folder, architectures, account, f"{toolkit}/bin" if toolkit else None)
    return Proof(said_version, said_commit, capabilities, checks)


def _must_run(answer: Completed, program: Path) -> None:
    if answer.ok:
        return
    if answer.timed_out:
        how = "gives no answer in time"
    elif answer.rc is not None and answer.rc == -4:
        how = "ends with an illegal instruction: it was built for another processor"
    elif answer.rc is not None and answer.rc < 0:
        how = f"ends with signal {-answer.rc}"
    else:
        how = f"ends with exit status {answer.rc}: {answer.stderr.strip().partition(chr(10))[0]}"
    raise _proof_failed(program.name, f"{' '.join(answer.argv[1:])} {how}", _KEPT)


def parse_version(text: str) -> tuple[str | None, str | None]:
    """Version and commit out of ``--version``; null for what is not said.

    Two forms: ``version: 0.5.0-dev (build 0, commit 0c1e57098)`` and the older ``version: 6123 (0c1e5709)``.
    """
    found = re.search(r"^version: (\S+) \((?:build \d+, commit )?(\w+)\)", text, re.MULTILINE)
    if found is None:
        return None, None
    commit = found.group(2)
    return found.group(1), (None if commit == "unknown" else commit)


def libraries_of(program: Path, account: Account | None) -> dict[str, str | None]:
    """The shared libraries a program loads, by name, with the path found for each or null."""
    ldd = find_program("ldd") or "ldd"
    return parse_ldd(run_as(account, [ldd, str(program)], environment()).stdout)


def parse_ldd(text: str) -> dict[str, str | None]:
    result: dict[str, str | None] = {}
    for line in text.splitlines():
        found = re.match(r"\s*(\S+) => (?:(/\S+) \(0x|not found)", line)
        if found:
            result[found.group(1)] = found.group(2)
    return result


def judge_libraries(program: Path, libraries: Mapping[str, str | None], own: set[str]) -> list[Fault]:
    """Libraries that are missing, come from another build, or are the toolkit's stub instead of the driver."""
    root = program.parent.parent
    faults = []
    for name, path in sorted(libraries.items()):
        if path is None:
            if name == DRIVER_LIBRARY:
                continue
            why = f"{name} is not found"
        elif name in own and os.path.normpath(path) != str(root / "lib" / name):
            why = f"{name} comes from {path}, not from the release"
        elif "/stubs/" in path:
            why = f"{name} comes from {path}: a stub for linking, which cannot run"
        else:
            continue
        faults.append(CATALOGUE.fault("proof_failed", program.name, why, _KEPT))
    return faults


def _prove_architectures(
    folder: Path, architectures: Sequence[str], account: Account | None, toolkit_bin: str | None
) -> list[dict[str, str]]:
    """Native code for every ``-real`` or plain architecture in the CUDA library, as cuobjdump lists it."""
    wanted = sorted({f"sm_{name.partition('-')[0]}" for name in architectures if not name.endswith("-virtual")})
    library = next(iter(sorted((folder / "lib").glob("libggml-cuda.so*"))), None)
    if not architectures:
        return []
    if library is None:
        raise FaultError(
            CATALOGUE.fault(
                "architecture_missing", "libggml-cuda", "is not in the release: this build runs on the CPU only", _KEPT
            )
        )
    cuobjdump = find_program("cuobjdump", toolkit_bin)
    if cuobjdump is None:
        return [{"check": "architectures", "found": "not looked at: no cuobjdump on this machine"}]
    answer = run_as(account, [cuobjdump, "--list-elf", str(library)], environment(), timeout=120)
    fault = judge_architectures(answer.stdout, wanted)
    if fault is not None:
        raise FaultError(fault)
    counts = ", ".join(f"{answer.stdout.count('.' + name + '.')} x {name}" for name in wanted)
    return [{"check": "architectures", "found": counts}]


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
