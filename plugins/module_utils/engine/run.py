# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From a request to a release in use: the order of things, and what happens when something goes wrong on the way.

Nothing that is in use is touched before the new release has been proven. An interrupted run leaves the work folder, in
which the next run of the same fingerprint goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..faults import Fault, FaultError, is_fatal
from ..files import replace_file
from ..machine import Machine
from ..progress import ProgressWriter
from . import plan, proof, release, request, sources, toolchain
from .catalogue import CATALOGUE
from .compile import Builder, Work
from .diagnosis import toolkit_note
from .gpus import loaded_driver, read_cards
from .libraries import DRIVER_LIBRARY
from .process import processes_in
from .request import Account, Request
from .toolchain import Toolchain
from .toolkit import first_match, library_folders

#: How long a run waits for another one in the same folder, in seconds: a build that lost its connection is let end.
WAIT_S = 2 * 3600.0

#: In the work folder: the fingerprint of the build that it holds.
WORK_OF = "fingerprint"


@dataclass
class Outcome:
    """What a run found and did; null is what could not be known.

    ``release``, ``previous_release`` and ``binary`` are absolute paths, ``build_s`` seconds of fetching, compiling and
    proving in this run.
    """

    changed: bool = False
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    release: str | None = None
    previous_release: str | None = None
    current: str | None = None
    binary: str | None = None
    fingerprint: str | None = None
    version: str | None = None
    commit: str | None = None
    cuda_architectures: list[str] = field(default_factory=list)
    capabilities: dict[str, list[str]] | None = None
    proof: list[dict[str, str]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    log: str | None = None
    jobs: int | None = None
    build_s: float | None = None

    def results(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "faults"}


def build(asked: Request, check_mode: bool = False, wait_s: float = WAIT_S) -> Outcome:
    """Bring the machine to the asked release, or say what stands in the way. Never raises for what it finds there."""
    outcome = Outcome()
    outcome.faults = request.check(asked)
    if outcome.faults:
        return outcome
    wanted = request.normalised(asked)
    outcome.cuda_architectures = list(wanted.cuda_architectures)
    # A hardened server's umask of 077 would lock the build user out of the source, and the service out of the release.
    umask = os.umask(0o022)
    try:
        with end_with_faults(outcome.faults):
            _Run(wanted, outcome, wait_s).go(check_mode)
    finally:
        os.umask(umask)
    if any(is_fatal(fault) for fault in outcome.faults):
        # Work folders are the module's own affair; what the machine uses is as it was.
        outcome.changed = False
    return outcome


@contextlib.contextmanager
def end_with_faults(faults: list[Fault]) -> Iterator[None]:
    """What stops the work inside becomes a fault more; an error of the file system is one too."""
    try:
        yield
    except FaultError as exc:
        faults.append(exc.fault)
    except OSError as exc:
        faults.append(_filesystem_fault(exc))


def _filesystem_fault(exc: OSError) -> Fault:
    subject = str(exc.filename or "file system")
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return CATALOGUE.fault("disk_full", subject, "no space left", "Free some space there and run again.")
    return CATALOGUE.fault(
        "filesystem_error",
        subject,
        exc.strerror or str(exc),
        "Check that `prefix` and `build_directory` can be written by the user who runs the module.",
    )


class _Run:
    """One run of the module; fills the outcome as it goes."""

    def __init__(self, wanted: Request, outcome: Outcome, wait_s: float) -> None:
        self.wanted = wanted
        self.outcome = outcome
        self.wait_s = wait_s
        self.store = release.Store(wanted.prefix)
        self.base = Path(wanted.build_directory)
        self.machine = Machine(wanted.sysroot)

    def go(self, check_mode: bool) -> None:
        account, account_faults = request.find_account(self.wanted)
        tools, tool_faults = toolchain.probe(self.wanted, account)
        faults = [*account_faults, *tool_faults]
        self._report_links()
        if faults or tools is None:
            if not (check_mode and all(_may_come(fault) for fault in faults)):
                self.outcome.faults += faults
                return
            # In check mode the packages and the user were not installed a moment ago, as they will be for real.
            self.outcome.changed = True
            self.outcome.notes += [
                f"{fault.subject}: {fault.message}; the build follows once it is there." for fault in faults
            ]
            return
        inputs = plan.fingerprint_inputs(self.wanted, tools)
        self.outcome.fingerprint = plan.fingerprint(inputs)
        settled = self._settled()
        if check_mode:
            return
        if settled is not None:
            self._prove_on_gpus(settled, account)
            return
        started = time.monotonic()
        with self._lock():
            # Another run may have built the very same while this one waited.
            if self._settled() is not None:
                return
            found = self.store.find(self.outcome.fingerprint)
            if found is None:
                found = self._make(tools, account, inputs, started)
                self.outcome.changed = True
            elif self.wanted.switch:
                # Proven when it was made; what it needs of the system may have gone since.
                self._prove(found.path, found.manifest["version"], found.manifest["commit"], tools, account)
            self._describe(found)
            if self.wanted.switch:
                self._prove_on_gpus(found, account)
                self._switch(found)

    def _settled(self) -> release.Release | None:
        """The release when nothing is to be done; otherwise the outcome already says that something will change."""
        found = self.store.find(self.outcome.fingerprint or "")
        if found is not None:
            self._describe(found)
            if not self.wanted.switch or self.store.link("current") == found.path:
                self.outcome.changed = False
                return found
        self.outcome.changed = True
        return None

    def _prove_on_gpus(self, found: release.Release, account: Account | None) -> None:
        """Let the release compute on every card, once under each driver; a machine without a loaded driver is none.

        So a release that was built before the driver came is tried by the first run after that, and again after the
        driver has changed.
        """
        if self.wanted.backend != "cuda" or not self.wanted.switch:
            return
        outcome = prove_on_gpus_once(found, self.machine, self.wanted.nvidia_smi, account)
        if outcome is None:
            self.outcome.notes.append("No GPU with a loaded driver here: the engine has not computed on one yet.")
        else:
            self.outcome.proof = [*self.outcome.proof, *outcome]

    def _describe(self, found: release.Release) -> None:
        manifest = found.manifest
        self.outcome.release = str(found.path)
        self.outcome.binary = str(found.binary)
        self.outcome.version = manifest.get("version")
        self.outcome.commit = manifest.get("commit")
        self.outcome.capabilities = manifest.get("capabilities")
        self.outcome.proof = manifest.get("proof", [])

    def _report_links(self) -> None:
        current, previous = self.store.link("current"), self.store.link("previous")
        self.outcome.current = str(current) if current else None
        self.outcome.previous_release = str(previous) if previous else None

    def _switch(self, found: release.Release) -> None:
        if self.store.link("current") != found.path:
            self.store.switch(found.path)
            self.outcome.changed = True
        self.outcome.removed = self.store.prune(self.wanted.keep_releases)
        self._report_links()

    # --- making a release ---

    def _make(
        self, tools: Toolchain, account: Account | None, inputs: dict[str, Any], started: float
    ) -> release.Release:
        wanted, outcome = self.wanted, self.outcome
        assert outcome.fingerprint is not None
        name = plan.short(outcome.fingerprint)
        work = self._prepare(name, tools, account)
        outcome.log = str(work.log)
        unpacked = self._source(work, tools, account)

        builder = Builder(wanted, tools, account, work)
        version, findings = builder.configure()
        fatal = [fault for fault in findings if is_fatal(fault)]
        if fatal:
            outcome.faults += findings
            raise FaultError(outcome.faults.pop())
        outcome.faults += findings
        if wanted.version is not None and version is not None and version != wanted.version:
            raise FaultError(
                CATALOGUE.fault(
                    "source_version_mismatch",
                    "version",
                    f"the source is {version}, asked for is {wanted.version}",
                    "Write the version that belongs to this source, or leave version out.",
                )
            )
        outcome.jobs = builder.build()

        ProgressWriter(wanted.progress_file, "steps").update("install", 0, None, name, force=True)
        self.store.releases.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.store.clean_partials()
        partial = self.store.releases / f".{name}.{os.getpid()}"
        try:
            folders = library_folders(Path(tools.cuda.root)) if tools.cuda and wanted.portable else ()
            release.lay_down(work.build, builder.programs(), partial, account, folders)
            shown = self._prove(
                partial, version or wanted.version, wanted.commit[:9] if wanted.commit else None, tools, account
            )
            outcome.build_s = round(time.monotonic() - started, 1)
            release.write_manifest(
                partial,
                {
                    "fingerprint": outcome.fingerprint,
                    "inputs": inputs,
                    "version": shown.version,
                    "commit": shown.commit,
                    "full_commit": unpacked.commit,
                    "backend": wanted.backend,
                    "cuda_architectures": list(wanted.cuda_architectures),
                    "portable": wanted.portable,
                    "capabilities": shown.capabilities.as_dict(),
                    "proof": shown.checks,
                    "built_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    "build_s": outcome.build_s,
                },
            )
            label = re.sub(r"[^0-9A-Za-z.+_-]", "_", shown.version or shown.commit or "unnamed")
            path = self.store.commit(partial, f"{label}-{name}")
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        if tools.cuda is not None:
            outcome.notes += self._driver_notes(tools)
        self._clean_up()
        made = release.read_release(path)
        assert made is not None
        return made

    def _prove(
        self, folder: Path, version: str | None, commit: str | None, tools: Toolchain, account: Account | None
    ) -> proof.Proof:
        expected = proof.Expected(
            version,
            commit,
            self.wanted.cuda_architectures,
            self.wanted.model_architecture,
            tools.cuda.root if tools.cuda else None,
            plan.run_paths(self.wanted, tools),
        )
        return proof.prove(folder, expected, account)

    def _driver_notes(self, tools: Toolchain) -> list[str]:
        assert tools.cuda is not None
        shown = self.machine.run([self.wanted.nvidia_smi])
        driver_cuda = first_match(r"CUDA Version: (\d+\.\d+)", shown.stdout)
        note = toolkit_note(tools.cuda.version, driver_cuda) if driver_cuda else None
        return [note] if note else []

    def _clean_up(self) -> None:
        """The release is the result, and ccache keeps what the next build can use again: work folders, also those of
        builds that failed before, and other versions' archives would only fill the disk."""
        self._discard_work()
        for path in (self.base / "downloads").iterdir():
            if path.name != f"{self.wanted.sha256}.tar":
                path.unlink()

    def _discard_work(self) -> None:
        # The record goes first: nobody continues with what an interrupted removal leaves.
        (self.base / "work" / "current" / WORK_OF).unlink(missing_ok=True)
        shutil.rmtree(self.base / "work", ignore_errors=True)

    def _prepare(self, name: str, tools: Toolchain, account: Account | None) -> Work:
        """The folders of this build; what a killed run left running in them is ended first.

        They are called the same for every fingerprint: cmake writes absolute paths into files that it has compiled, and
        ccache would take none of them for another version. The lock keeps others out, and the folder says whose it is:
        a build of the same fingerprint is continued, any other makes way.
        """
        end_leftovers(self.base / "work")
        root = self.base / "work" / "current"
        owner = account.uid if account is not None else os.geteuid()
        if not _is_of(root, name) or _is_of_another(root / "build", owner) or _is_of_another(root / "home", owner):
            self._discard_work()
        work = Work(root, root / "source", root / "build", root / "home", self.base / "logs" / f"{name}.log")
        for folder in (self.base / "downloads", self.base / "logs", root):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(root / WORK_OF, f"{name}\n".encode(), 0o644)
        if tools.cuda is not None and tools.cuda.stub is not None:
            (root / plan.STUBS).mkdir(exist_ok=True)
            link = root / plan.STUBS / DRIVER_LIBRARY
            link.unlink(missing_ok=True)
            link.symlink_to(tools.cuda.stub)
        cache = plan.ccache_directory(self.wanted)
        if cache and not self.wanted.ccache_directory and _is_of_another(Path(cache), owner):
            # Ours, and of no use to this account: ccache would pass it over in silence.
            shutil.rmtree(cache)
        for folder in (work.build, work.home, *([Path(cache)] if cache else [])):
            if not folder.is_dir():
                folder.mkdir(mode=0o755, parents=True)
                if account is not None:
                    os.chown(folder, account.uid, account.gid)
        return work

    def _source(self, work: Work, tools: Toolchain, account: Account | None) -> sources.Unpacked:
        """The source in ``work.source``; one that is there was verified when it was put there."""
        stated = work.root / "source.commit"
        if work.source.is_dir():
            text = stated.read_text(encoding="ascii").strip()
            return sources.Unpacked(text or None)
        fresh = work.root / "source.new"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            if self.wanted.source_type == "git":
                env = plan.build_environment(self.wanted, tools, work.root, work.home)
                unpacked = sources.checkout(self.wanted, tools.git or "git", account, fresh, env)
            else:
                progress = ProgressWriter(self.wanted.progress_file, "bytes")

                def report(done: int, total: int | None) -> None:
                    progress.update("download", done, total, sources.PACKAGE, force=done == total)

                archive = sources.fetch_archive(self.wanted, self.base / "downloads", report)
                unpacked = sources.unpack(archive, self.wanted.sha256 or "", fresh)
            fault = sources.check_commit(unpacked, self.wanted.commit)
            if fault is not None:
                raise FaultError(fault)
            stated.write_text(unpacked.commit or "", encoding="ascii")
            fresh.rename(work.source)
        except BaseException:
            self._discard_work()
            raise
        return unpacked

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the build folder and the prefix for this run alone; the kernel lets go when the process ends."""
        with contextlib.ExitStack() as stack:
            for folder in (self.base, self.store.prefix):
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                handle = stack.enter_context((folder / ".lock").open("a+", encoding="ascii"))
                self._wait_for(handle.fileno(), folder)
                handle.truncate(0)
                handle.write(f"{os.getpid()}\n")
                handle.flush()
            yield

    def _wait_for(self, handle: int, folder: Path) -> None:
        progress = ProgressWriter(self.wanted.progress_file, "steps")
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                if exc.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            else:
                return
            holder = (folder / ".lock").read_text(encoding="ascii").strip() or "unknown"
            if time.monotonic() >= deadline:
                raise FaultError(
                    CATALOGUE.fault(
                        "build_in_progress",
                        str(folder),
                        f"process {holder} is building here and did not end within {self.wait_s:.0f} s",
                        "Let it end, or end it, and run again.",
                    )
                )
            progress.update("wait", 0, None, f"process {holder} is building", force=True)
            time.sleep(min(1.0, max(0.05, self.wait_s)))


def _is_of(root: Path, name: str) -> bool:
    """Does the work folder hold a build of this fingerprint?"""
    try:
        return (root / WORK_OF).read_text(encoding="ascii").strip() == name
    except (OSError, ValueError):
        return False


def _is_of_another(folder: Path, uid: int) -> bool:
    """Was the folder made for another account, as when `build_user` has changed meanwhile?"""
    try:
        return folder.lstat().st_uid != uid
    except OSError:
        return False


def _may_come(fault: Fault) -> bool:
    """Faults that earlier tasks of the same play would have cured, had they not been in check mode as well."""
    return fault.code in (
        "build_tool_missing",
        "build_user_unusable",
        "nvcc_missing",
        "toolkit_incomplete",
        "libcuda_stub_missing",
        "host_compiler_too_new",
    )


def prove_on_gpus_once(
    found: release.Release, machine: Machine, nvidia_smi: str, account: Account | None
) -> list[dict[str, str]] | None:
    """Prove a release on the cards unless it was under this driver; null where no driver is loaded or no card found."""
    driver = loaded_driver(machine)
    kept = found.gpu_proof
    if kept is not None and driver is not None and kept.get("driver") == driver:
        return list(kept.get("checks", []))
    cards = read_cards(machine, nvidia_smi)
    if cards is None:
        return None
    checks = proof.prove_on_gpus(found.path, cards, found.manifest.get("cuda_architectures", []), account)
    found.keep_gpu_proof(driver or cards.driver, checks)
    return checks


def end_leftovers(folder: Path) -> None:
    """End compilers that a killed run left: two of them would write the same object files."""
    for _ in range(50):
        left = processes_in(folder)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
