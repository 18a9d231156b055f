# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Captures: what the GPU modules read of a machine, to be read again elsewhere (``sysroot``).

The modules' own readers run on a L(Recorder), which keeps every file they look at and every program they run, so a
capture holds what they need and nothing else. Long files are cut down to the lines about GPUs, kernels and drivers;
UUIDs, serial numbers, host names, MAC and IP addresses and home folders are replaced before anything is written.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..machine import Completed, Machine
from . import driver, gpu_report, link_report, modinfo, packages
from .smi import NvidiaSmi

#: A file longer than this (after it was cut down) is left out and named.
_LIMIT = 256 * 1024

#: For people who read a capture, besides what the modules ask.
_EXTRA = ((), ("-L",), ("-q",), ("--help-query-gpu",))


class Recorder(Machine):
    """A machine that remembers what was read of it."""

    def __init__(self, sysroot: str = "/", timeout: float = 30.0) -> None:
        super().__init__(sysroot, timeout)
        self.touched: dict[str, None] = {}
        self.listed: dict[str, list[str]] = {}
        self.ran: dict[tuple[str, ...], Completed] = {}

    def path(self, path: str) -> Path:
        self.touched["/" + path.strip("/")] = None
        return super().path(path)

    def listdir(self, path: str) -> list[str]:
        names = super().listdir(path)
        self.listed["/" + path.strip("/")] = names
        return names

    def run(self, argv: Sequence[str], timeout: float | None = None, env: Mapping[str, str] | None = None) -> Completed:
        completed = super().run(argv, timeout, env)
        # A capture knows programs by name, wherever they were found here.
        key = (Path(argv[0]).name, *argv[1:])
        self.ran[key] = completed
        return completed


@dataclass
class Capture:
    """The content of a capture: files and links by path without the leading slash, and the index of commands.

    ``left_out`` names what was too long; ``replaced`` counts the identities that were replaced, by kind.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    commands: list[Completed] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    replaced: dict[str, int] = field(default_factory=dict)


def take(machine: Recorder, nvidia_smi: str = "nvidia-smi") -> Capture:
    """Run the readers of gpu_inventory, nvlink_topology and driver_state, and keep what they saw, ids replaced."""
    smi = NvidiaSmi(machine, nvidia_smi)
    gpu_report.report(smi, gpu_report.GpuRequest())
    gpu_report.report(smi, gpu_report.GpuRequest(processes=True))
    link_report.report(smi, link_report.LinkRequest(peer_access=True))
    state = driver.read(machine)
    for arguments in _EXTRA:
        smi.ask(*arguments)
    capture = Capture()
    identities = Identities(_host_names(machine))
    identities.learn(completed.stdout for completed in machine.ran.values())
    # The program may have been named by a path; a capture answers to its name.
    for argv, completed in machine.ran.items():
        if completed.missing or argv[0] == "modinfo":
            continue
        name = "nvidia-smi" if argv[0] == Path(nvidia_smi).name else argv[0]
        clean_argv = (name, *(identities.replace(word) for word in argv[1:]))
        capture.commands.append(
            Completed(
                clean_argv,
                completed.rc,
                identities.replace(_cut_output(argv[0], completed.stdout)),
                identities.replace(_cut_output(argv[0], completed.stderr)),
                timed_out=completed.timed_out,
            )
        )
    modules = {item.kernel: item for item in (state.module_running, state.module_next) if item is not None}
    for module in modules.values():
        capture.commands += _modinfo_records(module, identities)
    _keep_files(machine, capture, identities)
    capture.replaced = identities.counts()
    return capture


def _host_names(machine: Machine) -> list[str]:
    names = []
    for path in ("/proc/sys/kernel/hostname", "/etc/hostname"):
        # Not part of the capture: read past the recorder.
        try:
            text = (machine.sysroot / path.lstrip("/")).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if text and text not in names:
            names.append(text)
    return names


def _modinfo_records(module: modinfo.Module, identities: Identities) -> list[Completed]:
    """What modinfo would print, since the module files themselves (50 MB) are not kept."""
    text = f"filename:       {module.path}\nversion:        {module.version}\nlicense:        {module.licence}\n"
    if module.signed:
        text += f"sig_id:         PKCS#7\nsigner:         {module.signer or 'not read'}\n"
    text = identities.replace(text)
    records = []
    for part in modinfo.PARTS:
        missing = part in module.missing
        error = f"modinfo: ERROR: Module {part} not found.\n" if missing else ""
        argv = ("modinfo", "-k", module.kernel, part)
        records.append(Completed(argv, 1 if missing else 0, "" if missing else text, error))
    return records


# ---------------------------------------------------------------------------------------------------------------------
# Cutting down
# ---------------------------------------------------------------------------------------------------------------------

_GPU_LINE = re.compile(
    r"NVRM|nvidia|nouveau|\bXid\b|NVLink|nvswitch|module .*is rejected|unsigned module|module verification", re.I
)
_MODULE_LINE = re.compile(r"nvidia|nouveau", re.I)
_CMDLINE = re.compile(
    r"^(?:(?:BOOT_IMAGE|ro|quiet)(?:=|$)|nouveau|nvidia|modprobe\.blacklist=|module_blacklist=|rd\.driver"
    r"|(?:intel_|amd_)?iommu=|pci=|pcie_|lockdown=|module\.sig)"
)


def _cut_output(program: str, text: str) -> str:
    if program in ("journalctl", "dmesg"):
        return _log_lines(text)
    if program == "lsinitramfs":
        return _lines(text, re.compile(r"nouveau|nvidia|modprobe\.d"))
    return text


def _lines(text: str, wanted: re.Pattern[str]) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if wanted.search(line))


def _log_lines(text: str) -> str:
    """Lines about GPUs; the host's name before ``kernel:`` goes."""
    kept = _lines(text, _GPU_LINE)
    return re.sub(r"^(\S+(?: +\d+ [\d:.]+)?) \S+ (kernel:)", r"\1 host \2", kept, flags=re.MULTILINE)


def _cut_status(text: str) -> str:
    return "\n".join(
        f"Package: {package.name}\nStatus: {package.want} {package.flag} {package.state}\nVersion: {package.version}\n"
        for package in packages.parse_status(text)
    )


def _cut_history(text: str) -> str:
    parts = []
    for upgrade in packages.parse_history(text):
        parts.append(f"Start-Date: {upgrade.date}\nCommandline: {upgrade.command}\n")
        fresh = [f"{name} ({new})" for name, old, new in upgrade.packages if old is None]
        changed = [f"{name} ({old}, {new})" for name, old, new in upgrade.packages if old is not None]
        parts[-1] += f"Install: {', '.join(fresh)}\n" if fresh else ""
        parts[-1] += f"Upgrade: {', '.join(changed)}\n" if changed else ""
    return "\n".join(parts)


def _cut_grub(text: str) -> str:
    """Menu entries and kernel names: the file can hold password hashes and file system ids."""
    kept = []
    for line in text.splitlines():
        if re.match(r"\s*(?:menuentry|submenu)\s", line) or line.strip() == "}":
            kept.append(line)
        elif match := re.match(r"(\s*linux(?:16|efi)?\s+\S+)", line):
            kept.append(match[1])
    return "\n".join(kept) + "\n"


def _cut_preferences(text: str) -> str:
    stanzas = [
        part for part in re.split(r"\n\s*\n", text) if re.search(r"^Package:.*(?:nvidia|cuda|linux)", part, re.M)
    ]
    return re.sub(r"origin \S+", "origin host", "\n\n".join(stanzas)) + "\n"


#: Folders with files of other software: those with nothing about GPUs in them are not kept.
_OTHERS = re.compile(r"^/etc/apt/preferences|modprobe\.d/|^/etc/ld\.so\.conf")
#: Files that are cut down: by path, to what is needed of them.
_CUTS: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = (
    (re.compile(r"^/var/lib/dpkg/status$"), _cut_status),
    (re.compile(r"^/var/log/apt/history\.log"), _cut_history),
    (re.compile(r"^/lib/modules/[^/]+/modules\.dep$"), lambda text: _lines(text, _MODULE_LINE)),
    # Where the kernel put its modules is nobody's business.
    (
        re.compile(r"^/proc/modules$"),
        lambda text: re.sub(r"0x[0-9a-f]{16}", "0x" + "0" * 16, _lines(text, _MODULE_LINE)),
    ),
    (re.compile(r"^/proc/cmdline$"), lambda text: " ".join(w for w in text.split() if _CMDLINE.match(w)) + "\n"),
    (re.compile(r"^/boot/grub2?/grub\.cfg$"), _cut_grub),
    (re.compile(r"^/boot/grub2?/grubenv$"), lambda text: _lines(text, re.compile(r"^(?:saved_entry|next_entry)="))),
    (re.compile(r"^/etc/default/grub"), lambda text: _lines(text, re.compile(r"^\s*GRUB_DEFAULT="))),
    (_OTHERS, lambda text: _cut_preferences(text) if "Package:" in text else _lines(text, _MODULE_LINE)),
    (re.compile(r"^/dev/kmsg$"), _log_lines),
)
#: In long folders only these names matter.
_NAMES: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...] = (
    (re.compile(r"^/lib/modules/"), re.compile(r"nvidia")),
    (re.compile(r"^/(?:usr|opt)/.*lib|^/lib/"), re.compile(r"^libnvidia-ml\.so")),
    (re.compile(r"^/boot$"), re.compile(r"^vmlinu[xz]-")),
)


def _keep_files(machine: Recorder, capture: Capture, identities: Identities) -> None:
    for path in machine.touched:
        _keep_file(machine.sysroot / path.lstrip("/"), path, capture, identities)
    for folder, names in machine.listed.items():
        wanted = next((names_of for where, names_of in _NAMES if where.search(folder)), None)
        for name in names:
            path = f"{folder}/{name}".lstrip("/")
            if path in capture.files or path in capture.links or (wanted is not None and not wanted.search(name)):
                continue
            if _OTHERS.search(f"{folder}/"):
                continue
            if (machine.sysroot / path).is_dir():
                capture.folders.add(path)
            else:
                # Only that it is there was seen.
                capture.files.setdefault(path, b"")


def _keep_file(source: Path, path: str, capture: Capture, identities: Identities) -> None:
    name = path.lstrip("/")
    if source.is_symlink() and (not source.exists() or source.is_dir()) and Path(path).name == "driver":
        capture.links[name] = str(source.readlink())
        return
    if source.is_dir():
        capture.folders.add(name)
        return
    try:
        data = source.read_bytes() if source.is_file() else None
    except OSError:
        data = None
    if data is None:
        return
    if re.search(r"\.ko(?:\.\w+)?$", path):
        capture.files[name] = b""
        return
    if path.endswith(".gz"):
        try:
            text = gzip.decompress(data).decode("utf-8", "replace")
        except (OSError, EOFError):
            return
        capture.files[name] = gzip.compress(identities.replace(_cut(path, text)).encode(), mtime=0)
        return
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        # PCI configuration space and the like: short, and without names.
        if len(data) <= 4096:
            capture.files[name] = data
        return
    kept = identities.replace(_cut(path, text)).encode()
    if not kept.strip() and _OTHERS.search(path):
        return
    if len(kept) > _LIMIT:
        capture.left_out.append(path)
        return
    capture.files[name] = kept


def _cut(path: str, text: str) -> str:
    for where, cut in _CUTS:
        if where.search(path):
            return cut(text)
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Identities
# ---------------------------------------------------------------------------------------------------------------------

_UUID = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}")
_MAC = re.compile(r"(?<![0-9a-fA-F:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![0-9a-fA-F:])")
_IPV4 = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])")
_HOME = re.compile(r"/home/[^/\s,|]+")
_SERIAL = re.compile(
    r"(?:<(?:serial|chassis_serial_number)>|(?:Serial Number|Chassis Serial Number)\s*:\s*)([A-Za-z0-9]{6,})"
)
_SECRET_HEX = re.compile(r"(<(?:pdi|gpu_fabric_guid)>|GPU (?:PDI|Fabric GUID)\s*:\s*)0x[0-9a-fA-F]+")
#: Words that machines are called and that texts about GPUs are full of.
_COMMON = {"localhost", "host", "nvidia", "gpu", "linux", "debian", "ubuntu", "kernel", "driver", "server", "node"}


class Identities:
    """Replaces identities, the same one by the same stand-in wherever it appears."""

    def __init__(self, host_names: Sequence[str]) -> None:
        names = {part for name in host_names for part in (name, name.split(".")[0])}
        chosen = sorted((n for n in names if len(n) > 2 and n.lower() not in _COMMON), key=len, reverse=True)
        self._hosts = (
            re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, chosen)) + r")(?![\w-])") if chosen else None
        )
        self._known: dict[str, dict[str, str]] = {"uuid": {}, "serial": {}, "mac": {}, "address": {}, "host": {}}

    def learn(self, texts: Iterable[str]) -> None:
        """Serial numbers stand without a label in csv; their labelled forms elsewhere tell which they are."""
        for text in texts:
            for match in _SERIAL.finditer(text):
                self._stand_in("serial", match[1], lambda n: f"{n:013d}")

    def _stand_in(self, kind: str, value: str, make: Callable[[int], str]) -> str:
        known = self._known[kind]
        if value not in known:
            known[value] = make(len(known) + 1)
        return known[value]

    def replace(self, text: str) -> str:
        text = _UUID.sub(
            lambda m: self._stand_in("uuid", m[0].lower(), lambda n: f"00000000-0000-0000-0000-{n:012d}"), text
        )
        text = _SECRET_HEX.sub(lambda m: m[1] + "0x0000000000000000", text)
        for serial, stand_in in self._known["serial"].items():
            text = re.sub(rf"(?<![\w.]){re.escape(serial)}(?![\w.])", stand_in, text)
        text = _MAC.sub(lambda m: self._stand_in("mac", m[0].lower(), lambda n: f"00:00:00:00:00:{n % 256:02x}"), text)
        text = _IPV4.sub(lambda m: self._stand_in("address", m[0], lambda n: f"192.0.2.{n % 256}"), text)
        text = _HOME.sub("/home/user", text)
        if self._hosts is not None:
            text = self._hosts.sub(lambda m: self._stand_in("host", m[0], lambda n: "host"), text)
        return text

    def counts(self) -> dict[str, int]:
        return {kind: len(known) for kind, known in self._known.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def archive(capture: Capture) -> bytes:
    """The capture as tar.gz; the same capture always gives the same bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        files = dict(capture.files)
        index = []
        for number, completed in enumerate(capture.commands):
            record: dict[str, object] = {"argv": list(completed.argv), "rc": completed.rc}
            for stream in ("stdout", "stderr"):
                text = getattr(completed, stream)
                if text:
                    name = f"{number:02d}-{_file_name(completed.argv)}.{stream}"
                    files[f"commands/{name}"] = text.encode()
                    record[stream] = name
            if completed.timed_out:
                record["timed_out"] = True
            index.append(record)
        files["commands/index.json"] = (json.dumps(index, indent=1) + "\n").encode()
        for folder in capture.folders:
            if not any(path.startswith(f"{folder}/") for path in (*files, *capture.links)):
                # Version control and some archive tools drop empty folders; that they are there is a fact as well.
                files[f"{folder}/.empty"] = b""
        needed = {str(parent) for path in (*files, *capture.links) for parent in Path(path).parents} | capture.folders
        for folder in sorted(needed - {"."}):
            if folder not in files and folder not in capture.links:
                tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o755))
        for path, data in sorted(files.items()):
            entry = _entry(path, tarfile.REGTYPE, 0o644)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        for path, target in sorted(capture.links.items()):
            entry = _entry(path, tarfile.SYMTYPE, 0o777)
            entry.linkname = target
            tar.addfile(entry)
    return buffer.getvalue()


def _entry(path: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.type, entry.mode, entry.mtime = kind, mode, 0
    return entry


def _file_name(argv: Sequence[str]) -> str:
    """A readable name: ``nvidia-smi-topo--m``; long queries are cut."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", " ".join(argv))[:60].strip("-")
