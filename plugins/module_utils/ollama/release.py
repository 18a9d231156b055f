# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ollama's releases: one pinned version, proved by its SHA-256, laid beside the one in use, run, then switched.

The archives are those that the project publishes with each release. Its install script is never run: it takes the
newest release, overwrites the unit, and may install a driver that does not know Volta.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import platform
import posixpath
import re
import shutil
import stat
import subprocess
import tarfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote, urljoin, urlsplit

from .. import releases
from ..faults import Fault, FaultError, is_fatal
from ..files import replace_file
from ..machine import C_LOCALE, run, run_in
from ..progress import ProgressWriter
from ..serving.catalogue import CATALOGUE as SERVING
from ..serving.service import full_name, journal_tail, status
from ..transfer.checksums import look_up
from ..transfer.deliver import Delivery, Wanted
from ..transfer.engine import Settings, amount
from ..transfer.http import plain, redact, trusting
from ..transfer.sources import check_url, read_checksum_file, source_of
from .catalogue import fault

#: Below it the project's releases, each in a folder named by its tag.
DOWNLOADS = "https://github.com/ollama/ollama/releases/download"
#: The list of a release's SHA-256, in the same folder as its archives.
LIST = "sha256sum.txt"
VERSION = re.compile(r"^(\d+)\.(\d+)\.(\d+)(-rc\.?\d+)?\Z")
#: Before it a release had a bare program and no archive (scripts/build_linux.sh of v0.3.6 and v0.3.7).
FIRST_ARCHIVE = (0, 3, 7)
#: From it on the archives are compressed with zstd, before with gzip; no release has both (v0.13.5 and v0.14.0).
FIRST_ZSTD = (0, 14, 0)
#: What `uname -m` says, and how the project calls it.
MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}

#: SHA-256 and size of archives. Read in public installers that pin this version (for amd64 about ten, for arm64 three),
#: which agree; the release's own list could not be read where this was written.
KNOWN = {
    ("0.24.0", "amd64"): ("15c5f8d66ba06e0d3b4719df8868612dbd66e14e82760929bb3552e1657cdcdb", 1198635318),
    ("0.24.0", "arm64"): ("6e9a3ce5f64e93312902e39c420ec336255f078a368ca25e99b339d08a6dfa4b", 1323731537),
}

PROGRAM = "bin/ollama"
#: The libraries that have code for sm_70; those of CUDA 13 have none.
CUDA = "lib/ollama/cuda_v12"
#: Beside the manifest, once the release has served what the role asked of it.
PASSED = "passed.json"
CHUNK = 1 << 20
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
GZIP_MAGIC = b"\x1f\x8b"
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Where the vendor's script, a distribution's package and snap put the program.
ELSEWHERE = ("/usr/local/bin/ollama", "/usr/bin/ollama", "/snap/bin/ollama")


@dataclass(frozen=True)
class Release(releases.Release):
    """An installed release of Ollama."""

    @property
    def binary(self) -> Path:
        return self.path / PROGRAM

    @property
    def passed(self) -> bool:
        return (self.path / PASSED).exists()


@dataclass(frozen=True)
class Asked:
    """What is asked for; an empty text is no value.

    ``archive`` is a path or an address in place of the project's, ``mirror`` stands for DOWNLOADS and is tried before
    it. ``command`` is the link for shells, empty for none; ``elsewhere`` are the places of other installations. With
    the state C(previous) ``unit`` is restarted, for ``start_timeout`` seconds at most, and ``because`` says why the
    release in use is given up.
    """

    version: str = "0.24.0"
    archive: str = ""
    mirror: str = ""
    sha256: str = ""
    checksums: str = ""
    prefix: str = "/opt/ollama"
    state: str = "present"
    activate: bool = True
    gpu: bool = True
    keep_releases: int = 2
    command: str = "/usr/local/bin/ollama"
    unit: str = ""
    because: str = ""
    start_timeout: float = 300.0
    settings: Settings = field(default_factory=Settings)
    progress_file: str | None = None
    machine: str = field(default_factory=platform.machine)
    elsewhere: tuple[str, ...] = ELSEWHERE


@dataclass
class Outcome:
    """``release``, ``previous`` and ``binary`` are absolute paths; null is what could not be known.

    ``activated`` says whether ``current`` leads to the release at the end, ``switched`` whether this run made it so,
    ``verified_by`` where the SHA-256 came from: C(sha256) (the option), C(table), C(checksums) (a file that was named),
    C(list) (the one beside the archive). ``passed`` says whether the release has ever served what was asked of it.
    """

    changed: bool = False
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    release: str | None = None
    version: str | None = None
    binary: str | None = None
    sha256: str | None = None
    verified_by: str | None = None
    source: str | None = None
    bytes_fetched: int = 0
    passed_over: list[dict[str, str]] = field(default_factory=list)
    activated: bool = False
    switched: bool = False
    passed: bool = False
    current: str | None = None
    previous: str | None = None
    removed: list[str] = field(default_factory=list)

    def results(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "faults"}


def settle(asked: Asked, check_mode: bool = False) -> Outcome:
    """Bring the machine to what is asked, or say what stands in the way. Never raises for what it finds there."""
    outcome = Outcome()
    outcome.faults = check(asked)
    if outcome.faults:
        return outcome
    # A hardened server's umask of 077 would lock the service's user out of the release.
    umask = os.umask(0o022)
    try:
        _Run(asked, outcome).go(check_mode)
    except FaultError as exc:
        outcome.faults.append(exc.fault)
    except OSError as exc:
        outcome.faults.append(_not_written(exc, asked.prefix))
    finally:
        os.umask(umask)
    if any(is_fatal(item) for item in outcome.faults):
        outcome.changed = outcome.switched
    return outcome


def _not_written(exc: OSError, prefix: str) -> Fault:
    place = str(exc.filename or prefix)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return fault("disk_full", place, "no space left", "Free some space there and run again.")
    return fault(
        "dest_not_writable",
        place,
        f"cannot be read or written: {exc.strerror or exc}",
        "Check owner, mode and mount of the place, or run with become.",
    )


# --- What is asked for ------------------------------------------------------------------------------------------------


def check(asked: Asked) -> list[Fault]:
    """What is wrong with the options."""
    faults: list[Fault] = []

    def bad(subject: str, message: str, remedy: str) -> None:
        faults.append(fault("ollama_release_option_invalid", subject, message, remedy))

    for name in ("prefix", "command"):
        path = getattr(asked, name)
        if (path or name == "prefix") and (not path.startswith("/") or ".." in PurePosixPath(path).parts):
            bad(name, f"{path!r} is not an absolute path", "Write a path that begins with / and has no '..' in it.")
    if asked.keep_releases < 1:
        bad("keep_releases", f"{asked.keep_releases} is too small", "Write 1 or more; the one in use is always kept.")
    if asked.state != "present":
        return faults
    if asked.sha256 and not re.fullmatch(r"[0-9a-f]{64}", _bare(asked.sha256)):
        bad("sha256", f"has {len(_bare(asked.sha256))} characters", "A SHA-256 has 64 hexadecimal digits.")
    if asked.archive and asked.mirror:
        bad("mirror", "is given beside `archive`", "Give one: `archive` is one file, `mirror` has every release.")
    for name in ("archive", "mirror", "checksums"):
        place = getattr(asked, name)
        if place and name != "mirror" and place.startswith("/"):
            continue
        problem = check_url(place) if place else None
        if problem:
            kinds = "an address (http, https)" if name == "mirror" else "an absolute path or an address (http, https)"
            bad(name, f"{redact(place)}: {problem}", f"Write {kinds}.")
    if asked.settings.ca_path:
        try:
            trusting(asked.settings.ca_path)
        except FaultError as exc:
            bad(exc.fault.subject, exc.fault.message, exc.fault.remedy)
    found = check_version(asked.version)
    if found is not None:
        faults.append(found)
    elif not asked.archive and asked.machine not in MACHINES:
        faults.append(
            fault(
                "ollama_machine_unsupported",
                asked.machine,
                "Ollama has archives for x86_64 and aarch64",
                "Build Ollama for this machine and give `archive` and `sha256`, or serve with llama-server.",
            )
        )
    return faults


def check_version(version: str) -> Fault | None:
    """Why a version cannot be installed: only one that is written out stays the same from run to run."""
    match = VERSION.match(version)
    if match is None:
        meant = version.removeprefix("v")
        remedy = f"Write {meant}." if VERSION.match(meant) else "Write one release, such as 0.24.0."
        message = f"{version!r} is not a version such as 0.24.0"
        if version.lower() in ("latest", "stable", "newest", ""):
            message = (
                f"{version!r} is not one release: it would change from run to run, and releases from 0.30 on run on "
                "the processor under a driver older than 550 without saying so"
            )
        return fault("ollama_version_invalid", "version", message, remedy)
    if _numbers(version) < FIRST_ARCHIVE:
        return fault(
            "ollama_version_invalid",
            "version",
            f"{version} has no archive, only a bare program",
            "Write 0.3.7 or newer; 0.24.0 is the last one reported good on driver 535.",
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("-")[0].split("."))


def _bare(sha256: str) -> str:
    return sha256.strip().lower().removeprefix("sha256:")


def archive_name(version: str, machine: str) -> str:
    """How the project calls the archive of a release for a machine (what C(uname -m) says)."""
    ending = "tar.zst" if _numbers(version) >= FIRST_ZSTD else "tgz"
    return f"ollama-linux-{MACHINES[machine]}.{ending}"


# --- One run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Proof:
    """The SHA-256 that the archive must have, where it came from, and the size where that is known too."""

    sha256: str
    by: str
    size: int | None = None


class _Run:
    """One run; fills the outcome as it goes."""

    def __init__(self, asked: Asked, outcome: Outcome) -> None:
        self.asked = asked
        self.outcome = outcome
        self.store = releases.Store(asked.prefix, Release)
        self.downloads = self.store.prefix / "downloads"

    def go(self, check_mode: bool) -> None:
        try:
            {
                "present": self._present,
                "passed": self._passed,
                "previous": self._previous,
                "absent": self._absent,
            }[self.asked.state](check_mode)
        finally:
            current, previous = self.store.link("current"), self.store.link("previous")
            self.outcome.current = str(current) if current else None
            self.outcome.previous = str(previous) if previous else None
            self.outcome.activated = current is not None and str(current) == self.outcome.release

    # -- present --

    def _present(self, check_mode: bool) -> None:
        found = self._installed()
        if check_mode:
            if found is not None:
                self._describe(found)
            self.outcome.changed = found is None or self._to_switch(found)
            self._command(check_mode)
            return
        if found is None or self._to_switch(found):
            with self.store.locked():
                # Another run may have brought it while this one waited.
                found = self._installed()
                if found is None:
                    found = self._install()
                    self.outcome.changed = True
                elif self._to_switch(found):
                    # It ran when it was installed; what it needs of the system may have gone since.
                    prove(found.binary, self.asked.version)
                if self._to_switch(found):
                    self.store.switch(found.path)
                    self.outcome.changed = self.outcome.switched = True
                if self.asked.activate:
                    self.outcome.removed = self.store.prune(self.asked.keep_releases)
        self._describe(found)
        self._command(check_mode)

    def _to_switch(self, found: Release) -> bool:
        return self.asked.activate and self.store.link("current") != found.path

    def _stated(self) -> _Proof | None:
        """The SHA-256 as far as it is known without asking anyone."""
        if self.asked.sha256:
            return _Proof(_bare(self.asked.sha256), "sha256")
        known = KNOWN.get((self.asked.version, MACHINES.get(self.asked.machine, "")))
        if self.asked.checksums or known is None:
            return None
        return _Proof(known[0], "table", known[1])

    def _installed(self) -> Release | None:
        """The release that is asked for, where it is there whole.

        Where no SHA-256 is stated, one of this version that was proved by a list counts, and the list is not read
        again: a published archive does not change, and a run with nothing to do needs no network.
        """
        stated = self._stated()
        if stated is not None:
            return self.store.find(stated.sha256)
        current = self.store.link("current")
        for path in sorted(self.store.every(), key=lambda path: path != current):
            found = self.store.read(path)
            if (
                found is not None
                and found.manifest.get("version") == self.asked.version
                and found.manifest.get("verified_by") in ("checksums", "list")
                and releases.is_intact(found)
            ):
                return found
        return None

    def _describe(self, found: Release) -> None:
        self.outcome.release, self.outcome.binary = str(found.path), str(found.binary)
        self.outcome.sha256, self.outcome.passed = found.manifest["fingerprint"], found.passed
        for name in ("version", "verified_by", "source"):
            setattr(self.outcome, name, found.manifest.get(name))

    def _install(self) -> Release:
        asked = self.asked
        self.store.releases.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.store.clean_partials()
        archive, proof, source = self._archive()
        partial = self.store.releases / f".{proof.sha256[:12]}.{os.getpid()}"
        progress = ProgressWriter(asked.progress_file, "bytes")
        try:
            hashes = unpack(archive, proof.sha256, partial, source, asked.gpu, progress)
            prove(partial / PROGRAM, asked.version)
            releases.write_manifest(
                partial,
                {
                    "fingerprint": proof.sha256,
                    "version": asked.version,
                    "verified_by": proof.by,
                    "source": source,
                    "installed_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                },
                hashes,
            )
            path = self.store.commit(partial, f"{asked.version}-{proof.sha256[:12]}")
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        # The release is the result; an archive of a gigabyte would only fill the disk.
        shutil.rmtree(self.downloads, ignore_errors=True)
        made = self.store.read(path)
        assert made is not None
        return made

    # -- the archive --

    def _archive(self) -> tuple[Path, _Proof, str]:
        """The archive as a local file, what must prove it, and how its origin is named."""
        asked = self.asked
        if asked.archive.startswith("/"):
            local = Path(asked.archive)
            if not local.is_file():
                raise FaultError(
                    fault("source_missing", str(local), "there is no such file", "Check `archive`, or copy it there.")
                )
            return local, self._proof(local.name, [str(local.parent / LIST)]), str(local)
        if asked.archive:
            name = unquote(posixpath.basename(urlsplit(asked.archive).path)) or "archive"
            addresses, lists = [asked.archive], [urljoin(asked.archive, LIST)]
        else:
            name = archive_name(asked.version, asked.machine)
            folders = [f"{base.rstrip('/')}/v{asked.version}" for base in (asked.mirror, DOWNLOADS) if base]
            addresses = [f"{folder}/{name}" for folder in folders]
            lists = [f"{folder}/{LIST}" for folder in folders]
        proof = self._proof(name, lists)
        self.downloads.mkdir(mode=0o700, parents=True, exist_ok=True)
        dest = self.downloads / f"{proof.sha256[:12]}-{name}"
        sources = tuple(source_of({"url": address}, name, {}) for address in addresses)
        wanted = Wanted(dest, proof.size, proof.sha256, sources)
        report = Delivery([wanted], asked.settings, progress_file=asked.progress_file).run()
        self.outcome.bytes_fetched = sum(item.fetched for item in report.files)
        self.outcome.notes += report.notes
        self.outcome.passed_over = [item.as_dict() for item in report.passed_over]
        fatal = [item for item in report.faults if is_fatal(item)]
        if fatal:
            self.outcome.faults += report.faults[:-1]
            raise FaultError(report.faults[-1])
        return dest, proof, report.files[0].source or redact(addresses[0])

    def _proof(self, name: str, lists: Sequence[str]) -> _Proof:
        """What the archive must have: as stated, else from the file of checksums that is named or lies beside it."""
        stated = self._stated()
        if stated is not None:
            return stated
        places, by = ([self.asked.checksums], "checksums") if self.asked.checksums else (list(lists), "list")
        failures: list[str] = []
        for place in places:
            shown = redact(place) if "://" in place else place
            try:
                listed = look_up(read_checksum_file(place, self.asked.settings, {}), name)
            except FaultError as exc:
                failures.append(f"{shown}: {exc.fault.message}")
                continue
            found = listed.sha256
            if found is None:
                failures.append(f"{shown} {plain(listed.reason, 400)}")
                continue
            if by == "list":
                self.outcome.notes.append(
                    f"The SHA-256 of {name} comes from the list beside it ({shown}): that proves the transfer, not "
                    f"who made it. Write sha256: {found} to pin it."
                )
            return _Proof(found, by)
        raise FaultError(
            fault(
                "checksum_missing",
                name,
                f"no SHA-256 is known for it: {'; '.join(failures)}",
                f"Write `sha256` (the release's {LIST} on GitHub has it), or name a copy of that list in `checksums`.",
            )
        )

    # -- passed, previous, absent --

    def _passed(self, check_mode: bool) -> None:
        """Note that the release in use has passed: from then on trouble is not taken for the upgrade's."""
        current = self.store.link("current")
        found = self.store.read(current) if current is not None else None
        if found is None:
            if check_mode:
                return
            raise FaultError(_missing(f"{self.asked.prefix}/current", "there is no release in use"))
        if not found.passed and not check_mode:
            said = json.dumps({"passed_at": datetime.now(timezone.utc).isoformat(timespec="seconds")}) + "\n"
            replace_file(found.path / PASSED, said.encode(), 0o644)
        self._describe(found)

    def _previous(self, check_mode: bool) -> None:
        path = self.store.link("previous")
        found = self.store.read(path) if path is not None else None
        if found is None:
            raise FaultError(_missing(f"{self.asked.prefix}/previous", "there is no release to go back to"))
        if not releases.is_intact(found):
            raise FaultError(
                fault(
                    "ollama_release_damaged",
                    found.path.name,
                    "its files are not those that were installed",
                    "Install that version again: ollama_version.",
                )
            )
        self.outcome.changed = True
        self._describe(found)
        if check_mode:
            return
        current = self.store.link("current")
        given_up = self.store.read(current) if current is not None else None
        version = str(found.manifest.get("version"))
        prove(found.binary, version)
        with self.store.locked():
            self.store.switch(found.path)
        self.outcome.switched = True
        self._command(check_mode)
        trouble = self._restart() if self.asked.unit else None
        if self.asked.because:
            self.outcome.faults.append(
                fault(
                    "ollama_upgrade_rolled_back",
                    str(given_up.manifest.get("version")) if given_up is not None else "release",
                    f"did not pass ({self.asked.because}); {version} is in use again"
                    + (f", but {trouble}" if trouble else f" and {self.asked.unit} runs" if self.asked.unit else ""),
                    f"Stay with {version} (ollama_version), or look into what the other one said: it still lies in "
                    f"{given_up.path if given_up is not None else self.store.releases}.",
                )
            )
        elif trouble:
            remedy = f"Look into it: journalctl -u {self.asked.unit}."
            self.outcome.faults.append(
                SERVING.fault("service_start_failed", full_name(self.asked.unit), trouble, remedy)
            )

    def _restart(self) -> str | None:
        """Restart the unit, which reads the link at its start; what is wrong with it then, or null."""
        name = full_name(self.asked.unit)
        began = time.time()
        # What failed as often as systemd allows would be refused a start.
        run(["systemctl", "reset-failed", name], 60.0)
        done = run(["systemctl", "restart", name], self.asked.start_timeout)
        now = status(name)
        if done.ok and now.running:
            return None
        words = now.words if done.ok or not done.timed_out else "still starting"
        said = journal_tail(name, since=began)
        return f"{name} is {words}" + (f": {said}" if said else f": {done.why}" if not done.ok else "")

    def _absent(self, check_mode: bool) -> None:
        running = sorted(releases.programs_below(self.store.releases))
        if running:
            raise FaultError(
                fault("ollama_in_use", running[0], "is running", "Stop the service first: systemctl stop ollama.")
            )
        links = [self.store.prefix / name for name in ("current", "previous")]
        command = Path(self.asked.command or "/nonexistent")
        ours = [command] if self._is_ours(command) else []
        present = [path for path in (*links, *ours, self.store.releases, self.downloads) if os.path.lexists(path)]
        self.outcome.changed = bool(present)
        self.outcome.removed = [path.name for path in self.store.every()]
        if check_mode:
            return
        for path in present:
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
        with contextlib.suppress(OSError):
            # The role's probe keeps there what it proved.
            (self.store.prefix / "proofs.json").unlink(missing_ok=True)
            (self.store.prefix / ".lock").unlink(missing_ok=True)
            # Models or notes that someone keeps there stay.
            self.store.prefix.rmdir()

    # -- the command for shells --

    def _is_ours(self, command: Path) -> bool:
        try:
            return str(command.readlink()).startswith(f"{self.store.prefix}/")
        except OSError:
            return False

    def _command(self, check_mode: bool) -> None:
        """A link for shells where nothing stands in its place; other installations are reported and left alone."""
        target = self.store.prefix / "current" / PROGRAM
        command = Path(self.asked.command) if self.asked.command else None
        if command is not None and (self._is_ours(command) or not os.path.lexists(command)):
            there = self._is_ours(command) and command.readlink() == target
            will_be = self.store.link("current") is not None or (check_mode and self.asked.activate)
            if not there and will_be:
                self.outcome.changed = True
                if not check_mode:
                    command.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                    fresh = command.with_name(f".{command.name}.new")
                    fresh.unlink(missing_ok=True)
                    fresh.symlink_to(target)
                    fresh.replace(command)
        for place in dict.fromkeys((*([self.asked.command] if self.asked.command else []), *self.asked.elsewhere)):
            path = Path(place)
            if os.path.lexists(path) and not self._is_ours(path):
                self.outcome.faults.append(_foreign(place, target))


def _missing(subject: str, message: str) -> Fault:
    return fault("ollama_release_missing", subject, message, "Install the version that is wanted: ollama_version.")


def _foreign(place: str, target: Path) -> Fault:
    if place.startswith("/snap/"):
        how = "sudo snap remove ollama"
    elif place.startswith("/usr/local/"):
        how = f"sudo rm {place} && sudo rm -r /usr/local/lib/ollama"
    else:
        how = f"`dpkg -S {place}` names its package, if it has one; otherwise sudo rm {place} and /usr/lib/ollama"
    return fault(
        "ollama_foreign_install",
        place,
        "is a program of another installation and was left as it is; shells may find it before "
        f"{target}, which the service runs",
        f"To have one Ollama only, stop what runs it and remove it: {how}. Its models are not touched by that.",
    )


# --- The program ------------------------------------------------------------------------------------------------------


def prove(binary: Path, version: str) -> None:
    """Run the program and compare the version that it names. FaultError: ollama_does_not_run, ollama_other_version."""
    environment = {
        **C_LOCALE,
        "PATH": SEARCH_PATH,
        "HOME": "/nonexistent",
        # Nothing answers there: a server that runs would be asked for its own version.
        "OLLAMA_HOST": "127.0.0.1:1",
    }
    answer = run_in([str(binary), "--version"], 60.0, environment, cwd="/")
    if not answer.ok:
        raise FaultError(
            fault(
                "ollama_does_not_run",
                str(binary),
                f"`--version`: {answer.stderr if answer.missing else answer.why}",
                "Check that the archive is for this machine, and that its folder is not mounted with noexec.",
            )
        )
    said = answer.stdout + answer.stderr
    named = re.search(r"client version is (\S+)", said) or re.search(r"ollama version is (\S+)", said)
    shown = named[1].removeprefix("v") if named else None
    if shown != version:
        told = f"says that it is {shown}" if shown else "names no version"
        raise FaultError(
            fault(
                "ollama_other_version",
                PROGRAM,
                f"{told}, asked for is {version}",
                "Check that `version` and the archive belong together.",
            )
        )


# --- Unpacking --------------------------------------------------------------------------------------------------------


def unpack(
    archive: Path, sha256: str, target: Path, source: str, gpu: bool, progress: ProgressWriter
) -> dict[str, str]:
    """Unpack a verified archive into ``target``, which must not exist yet; the SHA-256 of its files by their paths.

    The hash is taken from the very file that is then read. The archive is read twice: first all its entries are judged
    and their sizes summed up, so that nothing is written of one that is unsafe or does not fit.
    """
    with archive.open("rb", buffering=0) as handle:
        digest = hashlib.sha256()
        size, done = os.fstat(handle.fileno()).st_size, 0
        while chunk := handle.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress.update("verifying", done, size, archive.name)
        if digest.hexdigest() != sha256:
            raise FaultError(
                fault(
                    "hash_mismatch",
                    source,
                    f"SHA-256 is {digest.hexdigest()}, expected {sha256}; nothing was unpacked",
                    "Copy the file again. If it is an archive of your own, write its hash as `sha256`.",
                )
            )
        try:
            total = _survey(handle, archive.name, gpu)
            _check_room(target.parent, total)
            return _write(handle, archive.name, target, total, progress)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as exc:
            raise _unusable(archive.name, f"cannot be read: {exc}") from exc


def _unusable(name: str, message: str) -> FaultError:
    return FaultError(
        fault(
            "ollama_archive_unusable",
            name,
            message,
            "Take the archive that the release has for Linux: ollama-linux-amd64.tar.zst, before 0.14.0 "
            "ollama-linux-amd64.tgz.",
        )
    )


def _unsafe(name: str, why: str) -> FaultError:
    return FaultError(
        fault("ollama_archive_unsafe", name, why, "Do not use this archive: no release of Ollama holds such an entry.")
    )


@contextlib.contextmanager
def _opened(handle: IO[bytes], name: str) -> Iterator[tarfile.TarFile]:
    """The archive from its beginning, as a stream; its form is told by its first bytes, whatever its name."""
    handle.seek(0)
    magic = handle.read(4)
    handle.seek(0)
    if magic.startswith(GZIP_MAGIC):
        with tarfile.open(fileobj=handle, mode="r|gz") as tar:
            yield tar
        return
    if magic != ZSTD_MAGIC:
        raise _unusable(name, "is compressed neither with zstd nor with gzip")
    program = shutil.which("zstd", path=SEARCH_PATH)
    if program is None:
        raise FaultError(
            fault("zstd_missing", "zstd", "there is no such program on this machine", "Install the package zstd.")
        )
    # Python before 3.14 cannot read zstd. The program is given the file itself: what was hashed is what it reads.
    process = subprocess.Popen(
        [program, "-dcq"],
        stdin=handle,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**C_LOCALE, "PATH": SEARCH_PATH},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                yield tar
            while process.stdout.read(CHUNK):
                pass
        except (tarfile.TarError, EOFError) as exc:
            process.stdout.close()
            said = process.stderr.read().decode("utf-8", "replace").strip()
            raise _unusable(name, f"cannot be read: {said or exc}") from exc
        said = process.stderr.read().decode("utf-8", "replace").strip()
        if process.wait() != 0:
            raise _unusable(name, f"cannot be read: {said or 'zstd failed'}")
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
        process.wait()


def _place(member: tarfile.TarInfo) -> PurePosixPath | None:
    """Where an entry belongs in the release; null for its root."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise _unsafe(member.name, "leads outside the release")
    if str(path) == releases.MANIFEST:
        raise _unsafe(member.name, "has the name of the release's own manifest")
    return path if path.parts else None


def _within(base: PurePosixPath, goal: str, member: tarfile.TarInfo) -> PurePosixPath:
    """What a link leads to, by its path in the release."""
    joined = posixpath.normpath(posixpath.join(str(base), goal))
    if goal.startswith("/") or joined == ".." or joined.startswith("../"):
        raise _unsafe(member.name, f"links to {goal}, outside the release")
    return PurePosixPath(joined)


def _survey(handle: IO[bytes], name: str, gpu: bool) -> int:
    """Judge every entry; the bytes that the release will take."""
    total = 0
    files: set[PurePosixPath] = set()
    links: dict[PurePosixPath, PurePosixPath] = {}
    folders: set[PurePosixPath] = set()
    with _opened(handle, name) as tar:
        for member in tar:
            path = _place(member)
            if path is None:
                continue
            if any(parent in links or parent in files for parent in path.parents):
                raise _unsafe(member.name, "lies behind a link or a file")
            if path in files or path in links or (path in folders and not member.isdir()):
                raise _unsafe(member.name, "is there twice")
            folders.update(path.parents)
            if member.isdir():
                folders.add(path)
            elif member.issym():
                links[path] = _within(path.parent, member.linkname, member)
            elif member.islnk():
                if _within(PurePosixPath("."), member.linkname, member) not in files:
                    raise _unsafe(member.name, f"is a hard link to {member.linkname}, which is no file before it")
                files.add(path)
            elif member.isfile():
                files.add(path)
                total += member.size
            else:
                raise _unsafe(member.name, "is neither a file, a folder nor a link")
    for path, goal in links.items():
        if any(place in links for place in (goal, *goal.parents)) and not _chain_ends(goal, links):
            raise _unsafe(str(path), "is a circle of links, or leads through another one")
    if PurePosixPath(PROGRAM) not in files:
        raise _unusable(name, f"holds no {PROGRAM}")
    if gpu and not any(PurePosixPath(CUDA) in path.parents for path in files):
        raise FaultError(
            fault(
                "ollama_without_cuda_v12",
                name,
                f"holds no {CUDA}: this archive cannot run on V100 (sm_70)",
                "Take the project's archive for amd64, of 0.24.0; or serve on the processor (`ollama_backend`: cpu).",
            )
        )
    return total


def _chain_ends(goal: PurePosixPath, links: dict[PurePosixPath, PurePosixPath]) -> bool:
    """Whether links that lead to links (libx.so to libx.so.1 to libx.so.1.2) end, none through a linked folder."""
    for _ in range(8):
        if any(parent in links for parent in goal.parents):
            return False
        if goal not in links:
            return True
        goal = links[goal]
    return False


def _check_room(folder: Path, total: int) -> None:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    margin = max(64 << 20, total // 100)
    if free < total + margin:
        raise FaultError(
            fault(
                "disk_full",
                str(folder),
                f"the release takes {amount(total)} (and {amount(margin)} of margin), {amount(free)} are free",
                "Make room on that file system and run again: the archive is kept.",
            )
        )


def _write(handle: IO[bytes], name: str, target: Path, total: int, progress: ProgressWriter) -> dict[str, str]:
    """Write all entries, which the survey has judged; the SHA-256 of the files."""
    hashes: dict[str, str] = {}
    done = 0
    target.mkdir(mode=0o755)
    with _opened(handle, name) as tar:
        for member in tar:
            path = _place(member)
            if path is None:
                continue
            place = target / path
            if member.isdir():
                place.mkdir(mode=0o755, parents=True, exist_ok=True)
                continue
            place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            if member.issym():
                place.symlink_to(member.linkname)
                continue
            if member.islnk():
                origin = PurePosixPath(posixpath.normpath(member.linkname))
                os.link(target / origin, place)
                hashes[str(path)] = hashes[str(origin)]
                continue
            content = tar.extractfile(member)
            assert content is not None
            mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
            digest = hashlib.sha256()
            # Exclusive and not following links, should the archive have changed between the two readings.
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            with os.fdopen(descriptor, "wb") as out:
                while chunk := content.read(CHUNK):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress.update("unpacking", done, total, name)
                out.flush()
                os.fchmod(out.fileno(), mode)
                os.fsync(out.fileno())
            hashes[str(path)] = digest.hexdigest()
    return hashes
