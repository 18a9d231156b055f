# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where the driver's packages come from: the files that apt needs for it, and sources of others that contradict them.

Files of others are read and never written. What they contradict is named; a file that holds nothing else can be put out
of use, which gives it a name that apt passes over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ..apt import sources
from ..apt.sources import Entry
from ..faults import Catalogue, Fault, FaultKind
from ..machine import Machine
from .driver_packages import CODENAMES, COMPONENTS, NVIDIA_SITE, ORIGINS

#: One file for each source, so that a fallback does not write over what was tried first.
SOURCE_FILES = {
    name: f"/etc/apt/sources.list.d/volta-llm-nvidia-{name.replace('_', '-')}.sources"
    for name in ("distro", "cuda_repo", "mirror")
}

CATALOGUE = Catalogue(
    "sources of the driver (driver_source)",
    (
        FaultKind(
            "apt_key_wrong",
            "critical",
            "The key of an archive is not the one that was asked for, or no key at all.",
            "/etc/apt/keyrings/volta-llm-nvidia.asc: its fingerprint is 1F89...7936, EB69...63CC is asked for",
        ),
        FaultKind(
            "apt_sources_conflict",
            "critical",
            "Entries of one archive name different keys or options; apt then refuses every command.",
            "/etc/apt/sources.list.d/cuda.list: https://archive.example/ is signed by /etc/a.gpg here and by "
            "/etc/b.gpg in /etc/apt/sources.list.d/volta-llm-nvidia-cuda-repo.sources",
        ),
        FaultKind(
            "apt_sources_other_distribution",
            "critical",
            "An archive with drivers for another distribution or release is in use.",
            "/etc/apt/sources.list.d/cuda.list: https://archive.example/cuda/repos/ubuntu2404 is for ubuntu-24.04, "
            "this is ubuntu-22.04",
        ),
        FaultKind(
            "os_without_driver_packages",
            "critical",
            "The distribution is none whose driver packages are known.",
            "fedora 42 is none of ubuntu-22.04, ubuntu-24.04, debian-12, debian-13",
        ),
    ),
)


@dataclass(frozen=True)
class Settings:
    """The options of the module."""

    source: str = "distro"
    url: str = ""
    suite: str = ""
    components: tuple[str, ...] = ()
    keyring: str = ""
    fingerprints: tuple[str, ...] = ()
    disable_conflicting: bool = False


@dataclass
class Sources:
    """``sources`` are files to write (path, content), ``disable`` files of others to be put out of use."""

    distribution: str = ""
    release: str = ""
    codename: str = ""
    site: str = ""
    url: str = ""
    sources: list[dict[str, str]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    disable: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def fault(self, code: str, subject: str, message: str, remedy: str) -> None:
        self.faults.append(CATALOGUE.fault(code, subject, message, remedy))


def system(machine: Machine) -> tuple[str, str, str]:
    """ID, VERSION_ID and VERSION_CODENAME of /etc/os-release."""
    values = dict(
        line.split("=", 1) for line in (machine.read("/etc/os-release") or "").splitlines() if line.count("=") == 1
    )
    distribution, release, codename = (
        values.get(key, "").strip("\"' ") for key in ("ID", "VERSION_ID", "VERSION_CODENAME")
    )
    return distribution, release, codename or CODENAMES.get(f"{distribution}-{release}", "")


def nvidia_url(distribution: str, release: str) -> str:
    return f"{NVIDIA_SITE}/{distribution}{release.replace('.', '')}/x86_64/"


def read(machine: Machine, settings: Settings) -> Sources:
    found = Sources()
    found.distribution, found.release, found.codename = system(machine)
    name = f"{found.distribution}-{found.release}"
    if found.distribution not in COMPONENTS or name not in CODENAMES:
        known = ", ".join(f"{one}" for one in CODENAMES if one not in ("ubuntu-20.04", "debian-11"))
        found.fault("os_without_driver_packages", name, f"{name} is none of {known}", "use one of these")
        return found
    if settings.source != "distro":
        found.url = settings.url or nvidia_url(found.distribution, found.release)
        found.site = urlsplit(found.url).hostname or ""
        _check_key(machine, settings, found)
    entries = [entry for entry in sources.read(machine) if entry.file not in SOURCE_FILES.values()]
    ours = _our_source(machine, settings, found, entries)
    path = SOURCE_FILES[settings.source]
    if ours:
        found.sources.append({"path": path, "content": ours})
    found.absent = [file for file in SOURCE_FILES.values() if file != path or not ours]
    _compare(settings, found, entries, list(sources.parse_stanzas(path, ours)))
    return found


def _check_key(machine: Machine, settings: Settings, found: Sources) -> None:
    if not settings.keyring or not settings.fingerprints:
        return
    wanted = {re.sub(r"\s", "", word).upper().removeprefix("0X") for word in settings.fingerprints}
    remedy = f"compare with what the archive's owner publishes, then remove {settings.keyring} or mend `fingerprints`"
    try:
        there = sources.fingerprints(machine.path(settings.keyring).read_bytes())
    except FileNotFoundError:
        return  # check mode, before it is there; a real run puts it there first
    except (OSError, ValueError) as exc:
        found.fault("apt_key_wrong", settings.keyring, f"{settings.keyring}: {exc}", remedy)
        return
    foreign = [key for key in there if key not in wanted]
    if foreign:
        found.fault(
            "apt_key_wrong",
            settings.keyring,
            f"{settings.keyring}: its fingerprint is {', '.join(foreign)}, {', '.join(sorted(wanted))} is asked for",
            remedy,
        )


def _our_source(machine: Machine, settings: Settings, found: Sources, entries: Sequence[Entry]) -> str:
    """The file of ours: the chosen archive, or the components of the distribution's own that are not in use."""
    head = "# Written by the volta.llm role nvidia_driver; changes are overwritten.\n"
    if settings.source == "cuda_repo" or (settings.source == "mirror" and (settings.suite or "/").endswith("/")):
        return head + sources.stanza([found.url], [settings.suite or "/"], [], settings.keyring)
    if settings.source == "mirror":
        components = settings.components or COMPONENTS[found.distribution]
        return head + sources.stanza([found.url], [settings.suite], components, settings.keyring)
    suites = re.compile(rf"^{re.escape(found.codename)}(-updates|-security)?(/updates)?$")
    archives: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if suites.match(entry.suite) and entry.components:
            archives.setdefault(entry.archive, []).append(entry)
    stanzas = []
    for same in archives.values():
        used = {component for entry in same for component in entry.components}
        missing = [component for component in COMPONENTS[found.distribution] if component not in used]
        # An archive of others for the same suite (a PPA) does not have what the distribution's has.
        stated = sources.origin(machine, same[0])
        if missing and "main" in used and stated in (None, ORIGINS[found.distribution]):
            first = same[0]
            alone = [name for name, _ in first.options if name in sources.ONE_LINE_ONLY]
            if alone and not first.file.endswith(".sources"):
                found.fault(
                    "apt_sources_conflict",
                    first.file,
                    f"{first.file}: {first.uri} {first.suite} lacks {' '.join(missing)}, and has {', '.join(alone)}, "
                    "with which apt takes no other file beside it",
                    f"add {' '.join(missing)} to that line",
                )
                continue
            # With all its options: without trusted=yes or check-valid-until=no beside it apt would refuse both.
            stanzas.append(sources.stanza([first.uri], [first.suite], missing, first.signed_by, first.options))
    return head + "\n" + "\n".join(stanzas) if stanzas else ""


def _compare(settings: Settings, found: Sources, entries: Sequence[Entry], ours: Sequence[Entry]) -> None:
    """Other files against each other and against ours."""
    bad: dict[str, Fault] = {}
    between_others: set[str] = set()
    for first, second in sources.disagreements([*ours, *entries]):
        if first in ours and second.file == sources.TOOLKIT_FILE:
            if second.file not in found.disable:
                found.disable.append(second.file)
            continue
        if first not in ours:
            # Which of the two is right is not ours to say.
            between_others.add(second.file)
        here, there = _difference(second, first)
        bad.setdefault(
            second.file,
            CATALOGUE.fault(
                "apt_sources_conflict",
                second.file,
                f"{second.file}: {second.uri} {second.suite} {here} here, {there} in {first.file}",
                _remedy(second.file),
            ),
        )
    for entry in entries:
        meant = _meant_for(entry)
        here = f"{found.distribution}-{found.release}"
        if meant is not None and meant != here:
            bad.setdefault(
                entry.file,
                CATALOGUE.fault(
                    "apt_sources_other_distribution",
                    entry.file,
                    f"{entry.file}: {entry.uri} {entry.suite} is for {meant}, this is {here}",
                    _remedy(entry.file),
                ),
            )
    for file, fault in bad.items():
        if settings.disable_conflicting and file not in between_others and _can_be_disabled(file, bad, entries, found):
            found.disable.append(file)
        else:
            found.faults.append(fault)


def _difference(one: Entry, other: Entry) -> tuple[str, str]:
    """What the two say of their archive that does not agree, each as the end of a sentence."""
    names = sorted(name for name in {**one.agreed, **other.agreed} if one.agreed.get(name) != other.agreed.get(name))
    if "signed-by" in names:
        keys = [e.signed_by.strip().splitlines()[0] if e.signed_by.strip() else "no key named" for e in (one, other)]
        return f"is signed by {keys[0]}", f"by {keys[1]}"
    texts = [", ".join(f"{name}={entry.agreed.get(name, '(not set)')}" for name in names) for entry in (one, other)]
    return f"has {texts[0]}", texts[1]


def _remedy(file: str) -> str:
    return f"mv {file} {file}.disabled, or let the role do that (`disable_conflicting_sources`: true)"


def _meant_for(entry: Entry) -> str | None:
    """The distribution that an archive with drivers is for; null for archives that bring none, or do not tell."""
    match = re.search(r"/cuda(?:-updates)?/(?:repos/)?(?P<id>ubuntu|debian)(?P<release>\d+)(?:/|$)", entry.uri)
    if match:
        number = match["release"]
        return f"{match['id']}-{number[:2]}.{number[2:]}" if match["id"] == "ubuntu" else f"debian-{number}"
    if not {"restricted", "non-free", "multiverse"} & set(entry.components) and "graphics-drivers" not in entry.uri:
        return None
    for release, codename in CODENAMES.items():
        if re.match(rf"{codename}(?:[-/]|$)", entry.suite):
            return release
    return None


def _can_be_disabled(file: str, bad: Iterable[str], entries: Sequence[Entry], found: Sources) -> bool:
    """Only files in the folder that hold nothing but what is wrong."""
    if not file.startswith(f"{sources.FOLDER}/"):
        return False
    archives = {entry.archive for entry in entries if entry.file == file}
    wrong = {
        entry.archive
        for entry in entries
        if entry.file == file and (_meant_for(entry) not in (None, f"{found.distribution}-{found.release}"))
    }
    return file in set(bad) and (archives == wrong or len(archives) == 1)
