# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What has to be installed so that a machine has the driver of one branch, and what is in the way of that.

A version is chosen that every package of the driver has and that is no pointer to another branch; then everything of
the same source that it depends on is named with that version, so that nothing is left for apt to choose. What is
installed and of the branch stays as it is, also where the archive has something newer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import compat
from ..apt import kernel_set, pins
from ..apt.archive import Archive, Offer
from ..apt.status import Installed, Record
from ..faults import Catalogue, Fault, FaultKind
from ..machine import Machine
from . import driver, driver_packages, packages
from .driver_packages import BRANCHES, COMPONENTS, ORIGINS, Family, family, header_meta, prebuilt_meta
from .kernels import Kernels
from .values import version_key

PINS_FILE = "/etc/apt/preferences.d/volta-llm-nvidia-driver"

CATALOGUE = Catalogue(
    "driver packages (driver_source, driver_plan)",
    (
        compat.FAULTS.kinds["driver_without_gpu"],
        compat.FAULTS.kinds["open_driver_without_gpu"],
        driver.FAULTS.kinds["driver_packages_broken"],
        FaultKind(
            "driver_branch_unknown",
            "critical",
            "The driver branch is none that this collection is made for.",
            "branch 545 is none of 535, 550, 570, 580",
        ),
        FaultKind(
            "driver_branch_unavailable",
            "critical",
            "The chosen archive does not have the driver branch, or has it no longer.",
            "nvidia-headless-no-dkms-535-server of branch 535 is in no archive of Ubuntu; there are 570, 580",
        ),
        FaultKind(
            "driver_branch_transitional",
            "critical",
            "The archive has turned the packages of the branch into pointers to another one.",
            "nvidia-driver-550-server 550.163.01-0ubuntu0.22.04.2 is a transitional package of branch 570",
        ),
        FaultKind(
            "driver_other_branch_installed",
            "critical",
            "A driver of another branch or flavour is installed, and nothing allows to replace it.",
            "branch 580 is installed (nvidia-driver-580-server 580.95.05-0ubuntu0.22.04.1), 535 is asked for",
        ),
        FaultKind(
            "driver_run_install_in_the_way",
            "critical",
            "A driver was installed by NVIDIA's .run file; packages laid over it would drift apart.",
            "/usr/bin/nvidia-uninstall exists: the driver came from a .run file",
        ),
        FaultKind(
            "driver_headers_missing",
            "critical",
            "A kernel that can boot has no driver, and no archive has the headers to build one for it.",
            "linux-headers-6.1.0-18-amd64 is in no archive, and the kernel has no driver",
        ),
        FaultKind(
            "driver_headers_meta_behind",
            "warning",
            "The archive's meta package of headers is newer than the installed kernel, so it is not installed.",
            "linux-headers-generic 5.15.0.91.88 is in no archive; the next kernel comes without headers",
        ),
        FaultKind(
            "driver_prebuilt_missing",
            "critical",
            "No archive has the prebuilt, signed module for a kernel that can boot.",
            "linux-modules-nvidia-535-server-5.15.0-91-generic is in no archive",
        ),
        FaultKind(
            "fabric_manager_unavailable",
            "critical",
            "The machine has NVSwitch, and no archive has the Fabric Manager of the driver's very version.",
            "nvidia-fabricmanager-535 535.261.03 is in no archive; there is 535.247.01-1",
        ),
    ),
)


@dataclass(frozen=True)
class Wish:
    """What is asked for. ``site`` is the host of an archive that is not the distribution's own."""

    distribution: str
    release: str
    branch: str = "535"
    flavour: str = "server"
    headless: bool = True
    source: str = "distro"
    site: str = ""
    modules: str = "auto"
    version: str = ""
    allow_branch_change: bool = False
    allow_repair: bool = False
    allow_run_removal: bool = False
    kernels_without_driver: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The machine: what dpkg has, the kernels, and those of them for which a module is on disk."""

    dpkg: Sequence[Installed]
    kernels: Kernels
    with_module: tuple[str, ...] = ()
    secure_boot: bool = False
    nvswitches: int = 0
    run_install: tuple[str, ...] = ()
    interrupted: bool = False


@dataclass
class Plan:
    """``install`` are words for apt (``name=version``), ``purge`` packages of another branch, flavour or version."""

    version: str | None = None
    modules: str = "dkms"
    packages: list[str] = field(default_factory=list)
    install: list[str] = field(default_factory=list)
    purge: list[str] = field(default_factory=list)
    repair: list[str] = field(default_factory=list)
    remove_run_install: bool = False
    available: bool = True
    faults: list[Fault] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.available and not (self.install or self.purge or self.repair or self.remove_run_install)

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["faults"]
        return {**found, "complete": self.complete}


def refuse_branch(branch: str, flavour: str) -> list[Fault]:
    """Branches that a V100 cannot run, and words that are no branch."""
    word = branch.strip().lower()
    number = re.match(r"\d+", word)
    if "open" in word or "open" in flavour.lower():
        return [
            CATALOGUE.fault(
                "open_driver_without_gpu",
                f"nvidia-driver-{word}" if "open" in word else flavour,
                f"the open kernel modules of branch {number[0] if number else word} need a GPU System Processor, "
                "which Volta does not have",
                "set `branch` to 535, 550, 570 or 580, and `flavour` to server or desktop",
            )
        ]
    if number and int(number[0]) >= 590:
        return [
            CATALOGUE.fault(
                "driver_without_gpu",
                f"nvidia-driver-{word}",
                f"branch {number[0]} does not support Volta; 580 is the last branch that does",
                'set `branch` to "580", or to "535"',
            )
        ]
    if word not in BRANCHES:
        return [
            CATALOGUE.fault(
                "driver_branch_unknown",
                word or "branch",
                f"branch {word!r} is none of {', '.join(BRANCHES)}",
                'set `branch` to "535", 535 being the number before the first dot of the driver\'s version',
            )
        ]
    return []


class _Planner:
    def __init__(self, wish: Wish, archive: Archive, facts: Facts) -> None:
        self.wish, self.archive, self.facts = wish, archive, facts
        self.plan = Plan()
        self.installed = {package.name: package for package in facts.dpkg if not package.foreign}

    def fault(self, code: str, subject: str, message: str, remedy: str) -> None:
        self.plan.faults.append(CATALOGUE.fault(code, subject, message, remedy))

    def has(self, name: str, version: str | None = None) -> bool:
        package = self.installed.get(name)
        whole = package is not None and package.state in ("installed", "triggers-pending", "triggers-awaited")
        return whole and package is not None and version in (None, package.version)

    # -- versions --------------------------------------------------------------------------------------------------

    def branch_of(self, offer: Offer) -> str | None:
        return packages.candidate_branch(offer.name, offer.version, offer.record.source if offer.record else None)

    def acceptable(self, offer: Offer) -> bool:
        """Of the branch, from the chosen archive (or here already), and of the version where one is asked for."""
        wish = self.wish
        if self.branch_of(offer) != wish.branch:
            return False
        wanted = wish.version
        if wanted and offer.version != wanted and packages.upstream(offer.version) != version_key(wanted):
            return False
        if wish.source == "distro":
            from_there = any(release.origin == ORIGINS[wish.distribution] for release in offer.releases)
        else:
            from_there = any(release.site == wish.site for release in offer.releases)
        return from_there or self.has(offer.name, offer.version)

    def offer(self, name: str, version: str) -> Offer | None:
        return next((o for o in self.archive.versions(name) if o.version == version and self.acceptable(o)), None)

    def choose_version(self, names: Sequence[str]) -> str | None:
        self.archive.offers(names)
        versions = [offer.version for offer in self.archive.versions(names[0]) if self.acceptable(offer)]
        here = {self.installed[name].version for name in names if self.has(name)}
        if len(here) == 1:
            versions = [*(here & set(versions)), *versions]
        for version in versions:
            offers = [self.offer(name, version) for name in names]
            if all(o is not None and leads_away(o.record, self.wish.branch) is None for o in offers):
                return version
        return None

    def why_not(self, chosen: Family, names: Sequence[str]) -> None:
        """The fault for a branch of which no version can be had."""
        branch, source = self.wish.branch, self.wish.source
        where = {"distro": f"of {ORIGINS[self.wish.distribution]}"}.get(source, f"at {self.wish.site or 'the mirror'}")
        other_ways = (
            "set `fallback` to a branch (such as 580) or to a source that still has this one (cuda_repo, mirror), or "
            "set `branch` or `source`"
        )
        for name in names:
            for offer in self.archive.versions(name):
                to = leads_away(offer.record, branch)
                own = self.branch_of(offer)
                if own == branch and to is not None:
                    text = f"{name} {offer.version} is a transitional package of branch {to}, not {branch}"
                elif own not in (None, branch) and packages.name_branch(name) == branch:
                    text = f"{name} {offer.version} is of branch {own}, although its name promises {branch}"
                else:
                    continue
                self.fault("driver_branch_transitional", name, text, other_ways)
                return
        there = []
        for other in BRANCHES:
            lead = family(
                self.wish.distribution, self.wish.release, source, other, self.wish.flavour, self.wish.headless
            )
            offers = self.archive.versions(lead.lead) if lead else []
            if other != branch and any(self.branch_of(offer) == other for offer in offers):
                there.append(other)
        missing = next((name for name in names if not any(map(self.acceptable, self.archive.versions(name)))), names[0])
        asked = f" {self.wish.version}" if self.wish.version else ""
        text = f"{missing}{asked} of branch {branch} is in no archive {where}"
        text += f"; there {'is' if len(there) == 1 else 'are'} {', '.join(there)}" if there else ""
        components = " ".join(COMPONENTS[self.wish.distribution])
        self.fault(
            "driver_branch_unavailable",
            missing,
            text,
            f"{other_ways}; see that the archive is used with {components}: apt-cache policy {missing}",
        )

    def closure(self, names: Iterable[str], version: str) -> list[str]:
        """The names and all of the same version that they lead to."""
        found: dict[str, None] = {}
        waiting = list(names)
        while waiting:
            found.update(dict.fromkeys(waiting))
            groups = []
            for name in waiting:
                offer = self.offer(name, version)
                groups += list(offer.record.depends) if offer and offer.record else []
            drivers = [[name for name in group if packages.is_driver(name)] for group in groups]
            self.archive.offers(name for group in drivers for name in group)
            waiting = []
            for group in drivers:
                first = next((name for name in group if self.offer(name, version)), None)
                if first is not None and first not in found and first not in waiting:
                    waiting.append(first)
        return list(found)

    # -- parts -----------------------------------------------------------------------------------------------------

    def driver_here(self) -> list[tuple[Installed, str | None]]:
        """Installed packages of a driver with their branch, without companions."""
        return [
            (package, packages.candidate_branch(package.name, package.version, package.source))
            for package in self.installed.values()
            if packages.is_driver(package.name) and not packages.is_companion(package.name)
        ]

    def others(self) -> list[tuple[Installed, str]]:
        """Installed packages of another branch or flavour, with the word for what they are."""
        branch, found = self.wish.branch, []
        for package, own in self.driver_here():
            of = packages.name_branch(package.name)
            other_flavour = (
                self.wish.distribution == "ubuntu"
                and own == of == branch
                and self.wish.source != "cuda_repo"
                and packages.has_flavours(package.name)
                and (f"-{branch}-server" in package.name) != (self.wish.flavour == "server")
            )
            if packages.is_open_flavour(package.name):
                found.append((package, f"{own or branch} (open)"))
            elif own not in (None, branch):
                found.append((package, str(own)))
            elif other_flavour:
                found.append((package, f"{branch} ({'desktop' if self.wish.flavour == 'server' else 'server'})"))
        return found

    def ask_at_once(self, chosen: Family) -> None:
        """All names that are known beforehand in one question: each costs two runs of apt-cache."""
        names = [
            *chosen.packages,
            chosen.dkms,
            *chosen.companions,
            *(package.name for package, _ in self.driver_here()),
        ]
        if chosen.prebuilt:
            names.append(f"{chosen.prebuilt}-{self.facts.kernels.next}")
        self.archive.offers(names)

    def modules_by(self, chosen: Family) -> str:
        if self.wish.modules != "auto":
            return self.wish.modules
        kernel = self.facts.kernels.next
        if chosen.prebuilt is None or kernel is None:
            return "dkms"
        name = f"{chosen.prebuilt}-{kernel}"
        if self.has(name) and not self.has(chosen.dkms):
            return "prebuilt"
        if self.facts.secure_boot and not self.has(chosen.dkms) and self.archive.versions(name):
            return "prebuilt"
        return "dkms"

    def bootable(self) -> list[str]:
        kernels = self.facts.kernels
        found = [*kernels.installed] or [name for name in (kernels.running,) if name]
        return [name for name in found if name not in self.wish.kernels_without_driver]

    def add_headers(self) -> None:
        wanted = {kernel: f"linux-headers-{kernel}" for kernel in self.bootable()}
        metas = {
            meta: self.installed[name].version
            for name in self.installed
            if self.has(name) and (meta := header_meta(name)) is not None
        }
        self.archive.offers(name for name in (*wanted.values(), *metas) if not self.has(name))
        for kernel, name in wanted.items():
            if self.has(name):
                continue
            if self.archive.versions(name):
                self.plan.install.append(name)
            elif kernel not in self.facts.with_module:
                self.fault(
                    "driver_headers_missing",
                    name,
                    f"{name} is in no archive, and kernel {kernel} has no driver",
                    f"apt-get purge linux-image-{kernel}, or bring its headers, or let it go without "
                    f"(`kernels_without_driver`: [{kernel}])",
                )
        for meta, version in metas.items():
            if self.has(meta) or not self.archive.versions(meta):
                continue
            if any(offer.version == version for offer in self.archive.versions(meta)):
                self.plan.install.append(f"{meta}={version}")
            else:
                newest = self.archive.versions(meta)[0].version
                self.fault(
                    "driver_headers_meta_behind",
                    meta,
                    f"{meta} {version} is in no archive (there is {newest}); the next kernel comes without headers",
                    "move the kernel on with playbooks/kernel_upgrade.yml, which brings them",
                )

    def add_prebuilt(self, prebuilt: str) -> None:
        wanted = [f"{prebuilt}-{kernel}" for kernel in self.bootable()]
        metas = [
            meta for name in self.installed if self.has(name) and (meta := prebuilt_meta(prebuilt, name)) is not None
        ]
        self.archive.offers(name for name in (*wanted, *metas) if not self.has(name))
        for name in wanted:
            if self.has(name):
                continue
            if self.archive.versions(name):
                self.plan.install.append(name)
            else:
                self.fault(
                    "driver_prebuilt_missing",
                    name,
                    f"{name} is in no archive",
                    "set `modules` to dkms (with Secure Boot enroll its key at the console), or remove that kernel",
                )
        for meta in metas:
            # One that leads to a newer kernel would bring that.
            offers = self.archive.versions(meta)
            fits = next((o for o in offers if o.record and set(o.record.leads_to()) & set(wanted)), None)
            if fits and not self.has(meta):
                self.plan.install.append(f"{meta}={fits.version}")

    def add_fabric_manager(self, chosen: Family, version: str) -> None:
        if not self.facts.nvswitches:
            return
        self.archive.offers(chosen.fabric)
        wanted = packages.upstream(version)
        for name in chosen.fabric:
            package = self.installed.get(name)
            if package and self.has(name) and packages.upstream(package.version) == wanted:
                self.plan.packages.append(name)
                return
        for name in chosen.fabric:
            for offer in self.archive.versions(name):
                if packages.upstream(offer.version) == wanted:
                    self.plan.packages.append(name)
                    self.plan.install.append(f"{name}={offer.version}")
                    return
        there = ", ".join(o.version for name in chosen.fabric for o in self.archive.versions(name)) or "none"
        self.fault(
            "fabric_manager_unavailable",
            chosen.fabric[0],
            f"{chosen.fabric[0]} {'.'.join(map(str, wanted))} is in no archive; there is {there}",
            "set `version` to a driver whose Fabric Manager the archive has, or `source` to cuda_repo",
        )

    def look_for_obstacles(self) -> None:
        facts, wish = self.facts, self.wish
        broken = [package for package in facts.dpkg if package.unfinished]
        foreign = [package for package in broken if not _is_ours(package.name)]
        if broken or facts.interrupted:
            self.plan.repair = [package.name for package in broken] or ["dpkg"]
        if foreign and not wish.allow_repair:
            self.plan.repair = []
            of_kernels, rest = kernel_set.unfinished(facts.dpkg, facts.kernels, facts.with_module.__contains__)
            for found in of_kernels:
                self.fault("driver_packages_broken", found.subject, found.message, found.remedy)
            for package in rest.packages if rest else ():
                self.fault(
                    "driver_packages_broken",
                    package.name,
                    f"{package.name} {package.version} is {package.state}",
                    "dpkg --configure -a; apt-get -f install; or let the role do that (`repair_packages`: true)",
                )
        if facts.run_install:
            self.plan.remove_run_install = wish.allow_run_removal
            if not wish.allow_run_removal:
                self.fault(
                    "driver_run_install_in_the_way",
                    facts.run_install[0],
                    f"{facts.run_install[0]} exists: the driver came from a .run file",
                    "/usr/bin/nvidia-uninstall --silent, by hand or by the role (`remove_run_install`: true)",
                )

    def make(self) -> Plan:
        wish, plan = self.wish, self.plan
        plan.faults += refuse_branch(wish.branch, wish.flavour)
        if plan.faults:
            return plan
        self.look_for_obstacles()
        chosen = family(wish.distribution, wish.release, wish.source, wish.branch, wish.flavour, wish.headless)
        if chosen is None:
            plan.available = False
            self.fault(
                "driver_branch_unavailable",
                f"branch {wish.branch}",
                f"{ORIGINS[wish.distribution]} {wish.release} has no branch {wish.branch} of its own",
                "set `source` to cuda_repo or mirror, or `branch` to 535",
            )
            return plan
        self.ask_at_once(chosen)
        plan.modules = self.modules_by(chosen)
        if plan.modules == "prebuilt" and chosen.prebuilt is None:
            self.fault(
                "driver_prebuilt_missing",
                wish.source,
                "prebuilt modules are in Ubuntu's own archive only",
                "set `modules` to dkms, or `source` to distro",
            )
            return plan
        names = [*chosen.packages, *([chosen.dkms] if plan.modules == "dkms" else [])]
        version = self.choose_version(names)
        others = self.others()
        if others:
            plan.purge = [package.name for package, _ in others]
            if not wish.allow_branch_change:
                first, of = others[0]
                listed = ", ".join(f"{package.name} {package.version}" for package, _ in others[:3])
                self.fault(
                    "driver_other_branch_installed",
                    first.name,
                    f"branch {of} is installed ({listed}{', ...' if len(others) > 3 else ''}), {wish.branch} "
                    f"({wish.flavour}) is asked for",
                    f"set `allow_branch_change` to true to replace it, or `branch` to {of.split(' ')[0]} to keep it",
                )
        if version is None:
            plan.available = False
            self.archive.offers(
                found.lead
                for other in BRANCHES
                if (found := family(wish.distribution, wish.release, wish.source, other, wish.flavour, wish.headless))
            )
            self.why_not(chosen, names)
            return plan
        plan.version = version
        plan.packages = self.closure(names, version)
        plan.install += [f"{name}={version}" for name in plan.packages if not self.has(name, version)]
        self.add_rest_of_the_branch(version)
        self.archive.offers(chosen.companions)
        for name in chosen.companions:
            if not self.has(name) and self.archive.versions(name):
                plan.install.append(name)
        self.add_fabric_manager(chosen, version)
        if plan.modules == "dkms":
            self.add_headers()
        elif chosen.prebuilt:
            self.add_prebuilt(chosen.prebuilt)
        return plan

    def add_rest_of_the_branch(self, version: str) -> None:
        """What else is installed of the same driver moves along, or its libraries would differ from the module."""
        for package, own in self.driver_here():
            name = package.name
            if own == self.wish.branch and name not in self.plan.packages and name not in self.plan.purge:
                self.archive.offers([name])
                if package.version != version and self.offer(name, version):
                    self.plan.install.append(f"{name}={version}")
                elif package.version != version and re.search(r"-\d{3}\.\d+(\.\d+)?$", name):
                    # Firmware has the driver's version in its name: that of the new version takes its place.
                    self.plan.purge.append(name)


def leads_away(record: Record | None, branch: str) -> str | None:
    """The branch to which a package points that must be installed with it, where that is another one."""
    for group in record.depends if record else ():
        to = [packages.name_branch(name) for name in group if packages.is_driver(name)]
        if to and len(to) == len(group) and all(number not in (None, branch) for number in to):
            return to[0]
    return None


def _is_ours(name: str) -> bool:
    """Packages that a run of the role may have left in the middle."""
    return (
        packages.is_kept_with_driver(name)
        or name == "dkms"
        or name.startswith(("linux-headers-", "linux-modules-nvidia"))
    )


def make(wish: Wish, archive: Archive, facts: Facts) -> Plan:
    return _Planner(wish, archive, facts).make()


def preferences(wish: Wish, codename: str, version: str | None) -> list[dict[str, str]]:
    """The file that keeps the driver to the version (null: to branch and archive); none for an unknown driver."""
    chosen = family(wish.distribution, wish.release, wish.source, wish.branch, wish.flavour, wish.headless)
    if chosen is None:
        return []
    stanzas = driver_packages.pins(
        chosen, wish.distribution, codename, wish.branch, wish.source, wish.site, version or ""
    )
    return [{"path": PINS_FILE, "content": pins.preferences(wish.branch, stanzas)}]


def interrupted(machine: Machine) -> bool:
    """Whether dpkg was stopped before it wrote its database; every apt-get then asks for dpkg --configure -a."""
    return any(re.fullmatch(r"\d+", name) for name in machine.listdir("/var/lib/dpkg/updates"))
