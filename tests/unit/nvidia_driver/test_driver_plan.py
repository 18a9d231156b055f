# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The plan of packages. Names and versions are Ubuntu 22.04's and Debian's; a02 is pop-os/pop#3549."""

from __future__ import annotations

import pytest
from ansible_collections.volta.llm.plugins.module_utils.apt.archive import Archive, Offer, Release
from ansible_collections.volta.llm.plugins.module_utils.apt.status import Installed, Record
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver_plan
from ansible_collections.volta.llm.plugins.module_utils.nvidia.driver_plan import Facts, Plan, Wish
from ansible_collections.volta.llm.plugins.module_utils.nvidia.kernels import Kernels

GA, HWE = "5.15.0-139-generic", "6.8.0-59-generic"
UBUNTU = Release("Ubuntu", "archive.ubuntu.com", "jammy", "jammy-updates")
NVIDIA = Release("NVIDIA", "developer.download.nvidia.com", "", "")
OLD, NEW = "535.183.01-0ubuntu0.22.04.1", "535.261.03-0ubuntu0.22.04.1"


def record(name, version, source, *depends):
    return Record(name, version, "amd64", source, tuple(tuple(group.split("|")) for group in depends))


class Built:
    """An archive and a machine, both made of what a test adds."""

    def __init__(self) -> None:
        self.archive = Archive()
        self.dpkg: list[Installed] = []
        self.facts: dict = {"kernels": Kernels(GA, GA, "grub", (GA,))}

    def offer(self, name, version, *depends, source=None, release=UBUNTU) -> Built:
        """Later ones are older, as apt lists them."""
        made = Offer(name, version, (release,), False, record(name, version, source or name, *depends))
        self.archive.known.setdefault(name, []).append(made)
        return self

    def driver(self, version, flavour="535-server", release=UBUNTU, end=None) -> Built:
        """What Ubuntu builds from one source; ``end`` is the flavour to which transitional packages point."""
        source = f"nvidia-graphics-drivers-{flavour}"

        def one(name, *depends):
            target = [f"{name}-{end}"] if end else [f"{word}-{flavour}" for word in depends]
            self.offer(f"{name}-{flavour}", version, *target, source=source, release=release)

        one("nvidia-headless-no-dkms", "libnvidia-compute", "nvidia-kernel-common")
        one("nvidia-driver", "libnvidia-compute", "libnvidia-gl", "nvidia-dkms")
        one("nvidia-dkms", "nvidia-kernel-common")
        one("nvidia-utils", "libnvidia-compute")
        for name in ("libnvidia-compute", "libnvidia-gl", "nvidia-kernel-common"):
            one(name)
        return self

    def installed(self, name, version, state="installed", source=None, flag="ok") -> Built:
        self.dpkg.append(
            Installed(name, version, "amd64", source or name, (), want="install", flag=flag, state=state, foreign=False)
        )
        for at, offer in enumerate(self.archive.known.get(name, [])):
            if offer.version == version:
                self.archive.known[name][at] = Offer(name, version, offer.releases, True, offer.record)
        return self

    def all_installed(self, version, flavour="535-server") -> Built:
        names = ("nvidia-headless-no-dkms", "nvidia-dkms", "nvidia-utils", "libnvidia-compute", "nvidia-kernel-common")
        for name in names:
            self.installed(f"{name}-{flavour}", version, source=f"nvidia-graphics-drivers-{flavour}")
        return self.installed(f"linux-headers-{GA}", "5.15.0-139.149")

    def plan(self, **wish) -> Plan:
        wanted = {"distribution": "ubuntu", "release": "22.04", **wish}
        return driver_plan.make(Wish(**wanted), self.archive, Facts(dpkg=self.dpkg, **self.facts))


@pytest.fixture
def machine() -> Built:
    return Built()


def codes(plan: Plan) -> list[str]:
    return [fault.code for fault in plan.faults]


def test_everything_is_named_with_one_version_so_that_apt_chooses_nothing(machine):
    plan = machine.driver(NEW).driver(OLD).offer(f"linux-headers-{GA}", "5.15.0-139.149").plan()
    assert plan.faults == []
    assert plan.version == NEW
    assert plan.modules == "dkms"
    assert sorted(plan.install) == [
        f"libnvidia-compute-535-server={NEW}",
        f"linux-headers-{GA}",
        f"nvidia-dkms-535-server={NEW}",
        f"nvidia-headless-no-dkms-535-server={NEW}",
        f"nvidia-kernel-common-535-server={NEW}",
        f"nvidia-utils-535-server={NEW}",
    ]
    assert not plan.complete


def test_what_is_installed_stays_although_there_is_something_newer(machine):
    plan = machine.driver(NEW).driver(OLD).all_installed(OLD).plan()
    assert (plan.version, plan.install, plan.complete, plan.faults) == (OLD, [], True, [])


def test_firmware_of_the_former_version_makes_way_for_that_of_the_new_one(machine):
    """Its name has the version in it, so nothing else of the same name comes in its place."""
    old = "nvidia-firmware-535-server-535.183.01"
    machine.driver(NEW).driver(OLD).all_installed(OLD)
    machine.offer(old, OLD, source="nvidia-graphics-drivers-535-server")
    machine.installed(old, OLD, source="nvidia-graphics-drivers-535-server")
    assert machine.plan(version="535.261.03").purge == [old]
    stays = machine.plan()
    assert (stays.purge, stays.complete) == ([], True)


def test_a_machine_with_everything_is_asked_once(machine):
    """Each question of names that were not asked for before is two runs of apt-cache."""
    machine.driver(NEW).all_installed(OLD).driver(OLD)
    asked: set[str] = set()
    questions = []

    class Counting(Archive):
        def offers(self, names):
            new = set(names) - asked
            if new:
                questions.append(new)
                asked.update(new)
            return super().offers(new | asked)

    machine.archive = Counting(machine.archive.known)
    assert machine.plan().complete
    assert len(questions) == 1


def test_installed_version_that_the_archive_no_longer_has(machine):
    gone = "535.161.08-0ubuntu0.22.04.1"
    for name in ("nvidia-headless-no-dkms", "nvidia-dkms", "nvidia-utils", "libnvidia-compute", "nvidia-kernel-common"):
        machine.offer(f"{name}-535-server", gone, release=Release())
    plan = machine.all_installed(gone).plan()
    assert (plan.version, plan.complete, plan.faults) == (gone, True, [])


def test_one_missing_package_comes_in_the_version_of_the_others(machine):
    machine.driver(NEW).driver(OLD).all_installed(OLD)
    machine.dpkg = [package for package in machine.dpkg if package.name != "nvidia-utils-535-server"]
    assert machine.plan().install == [f"nvidia-utils-535-server={OLD}"]


def test_a08_one_library_that_moved_on_alone_is_brought_into_line(machine):
    machine.driver(NEW).driver(OLD).all_installed(OLD)
    machine.dpkg = [package for package in machine.dpkg if package.name != "libnvidia-compute-535-server"]
    plan = machine.installed("libnvidia-compute-535-server", NEW).plan()
    assert plan.install == [f"libnvidia-compute-535-server={OLD}"]


def test_version_asked_for(machine):
    machine.driver(NEW).driver(OLD).offer(f"linux-headers-{GA}", "1")
    assert machine.plan(version="535.183.01").version == OLD
    assert machine.plan(version=NEW).version == NEW
    plan = machine.plan(version="535.999.01")
    assert codes(plan) == ["driver_branch_unavailable"]
    assert "nvidia-headless-no-dkms-535-server 535.999.01 of branch 535" in plan.faults[0].message


def test_a02_revision_that_points_to_another_branch_is_passed_over(machine):
    machine.driver("550.163.01-0ubuntu0.22.04.2", "550-server", end="570-server")
    machine.driver("550.163.01-0ubuntu0.22.04.1", "550-server").offer(f"linux-headers-{GA}", "1")
    plan = machine.plan(branch="550")
    assert (plan.version, plan.faults) == ("550.163.01-0ubuntu0.22.04.1", [])


def test_a02_nothing_but_pointers_names_package_and_branch(machine):
    plan = machine.driver("550.163.01-0ubuntu0.22.04.2", "550-server", end="570-server").plan(branch="550")
    assert codes(plan) == ["driver_branch_transitional"]
    text = "nvidia-headless-no-dkms-550-server 550.163.01-0ubuntu0.22.04.2 is a transitional package of branch 570"
    assert plan.faults[0].message == f"{text}, not 550"
    assert not plan.available


@pytest.mark.parametrize(("asked", "resolved"), [("535", "580"), ("550", "570"), ("570", "580")])
def test_a04_version_past_the_number_in_the_name(machine, asked, resolved):
    plan = machine.driver(f"{resolved}.95.05-0ubuntu0.22.04.1", f"{asked}-server").plan(branch=asked)
    assert codes(plan) == ["driver_branch_transitional"]
    assert f"of branch {resolved}, although its name promises {asked}" in plan.faults[0].message


def test_dropped_branch_names_what_there_is_and_the_variable(machine):
    plan = machine.driver("580.82.07-0ubuntu0.22.04.1", "580-server").plan()
    assert codes(plan) == ["driver_branch_unavailable"]
    assert plan.faults[0].message.endswith("of branch 535 is in no archive of Ubuntu; there is 580")
    assert "`fallback`" in plan.faults[0].remedy


@pytest.mark.parametrize(
    ("branch", "code"),
    [
        ("590", "driver_without_gpu"),
        ("600", "driver_without_gpu"),
        ("535-open", "open_driver_without_gpu"),
        ("580-server-open", "open_driver_without_gpu"),
        ("545", "driver_branch_unknown"),
        ("", "driver_branch_unknown"),
        ("535.183.01", "driver_branch_unknown"),
    ],
)
def test_branches_that_cannot_be_meant(machine, branch, code):
    plan = machine.plan(branch=branch)
    assert codes(plan) == [code]
    assert branch in plan.faults[0].subject + plan.faults[0].message


def test_other_archive_with_the_same_names_is_not_taken(machine):
    machine.driver("535.288.01-0ubuntu1", "535-server", release=NVIDIA).driver(NEW).offer(f"linux-headers-{GA}", "1")
    assert machine.plan().version == NEW


def test_nvidias_archive_has_no_server_packaging_and_binds_by_host(machine):
    machine.driver("535.261.03-0ubuntu1", "535", release=NVIDIA).offer(f"linux-headers-{GA}", "1")
    plan = machine.plan(source="cuda_repo", site="developer.download.nvidia.com")
    assert f"nvidia-utils-535={plan.version}" in plan.install
    assert codes(machine.plan(source="cuda_repo", site="mirror.example")) == ["driver_branch_unavailable"]


def test_other_branch_is_replaced_only_when_allowed(machine):
    machine.driver(NEW).driver("580.82.07-0ubuntu0.22.04.1", "580-server").all_installed(
        "580.82.07-0ubuntu0.22.04.1", "580-server"
    )
    plan = machine.plan()
    assert codes(plan) == ["driver_other_branch_installed"]
    assert "branch 580 is installed (nvidia-headless-no-dkms-580-server 580.82.07" in plan.faults[0].message
    plan = machine.plan(allow_branch_change=True)
    assert plan.faults == []
    assert f"nvidia-dkms-535-server={NEW}" in plan.install
    assert "nvidia-dkms-580-server" in plan.purge
    back = machine.plan(branch="580")
    assert (back.complete, back.purge) == (True, [])


def test_other_flavour_and_open_packages_count_as_another_driver(machine):
    machine.driver(NEW).driver(NEW, "535").all_installed(NEW, "535")
    plan = machine.plan()
    assert codes(plan) == ["driver_other_branch_installed"]
    assert "branch 535 (desktop) is installed" in plan.faults[0].message
    machine.dpkg = []
    machine.driver(NEW).all_installed(NEW).installed("nvidia-dkms-535-server-open", NEW)
    plan = machine.plan(allow_branch_change=True)
    assert plan.purge == ["nvidia-dkms-535-server-open"]


def test_headers_for_every_kernel_and_the_metas_that_match(machine):
    machine.facts["kernels"] = Kernels(GA, HWE, "grub", (HWE, GA))
    machine.driver(NEW).offer(f"linux-headers-{GA}", "1").offer(f"linux-headers-{HWE}", "1")
    machine.installed("linux-image-generic-hwe-22.04", "6.8.0.59.61~22.04.1").installed(f"linux-image-{HWE}", "1")
    machine.offer("linux-headers-generic-hwe-22.04", "6.8.0.59.61~22.04.1")
    plan = machine.plan()
    assert [word for word in plan.install if "headers" in word] == [
        f"linux-headers-{HWE}",
        f"linux-headers-{GA}",
        "linux-headers-generic-hwe-22.04=6.8.0.59.61~22.04.1",
    ]


def test_newer_header_meta_would_bring_headers_of_a_kernel_that_is_not_there(machine):
    machine.driver(NEW).offer(f"linux-headers-{GA}", "1").installed("linux-image-generic", "5.15.0.139.135")
    plan = machine.offer("linux-headers-generic", "5.15.0.151.147").plan()
    assert codes(plan) == ["driver_headers_meta_behind"]
    assert not any("linux-headers-generic" in word for word in plan.install)


def test_kernel_without_headers_is_named_unless_it_has_a_driver_or_may_go_without(machine):
    old = "5.15.0-25-generic"
    machine.facts["kernels"] = Kernels(GA, GA, "grub", (GA, old))
    machine.driver(NEW).offer(f"linux-headers-{GA}", "1")
    plan = machine.plan()
    assert codes(plan) == ["driver_headers_missing"]
    assert plan.faults[0].subject == f"linux-headers-{old}"
    assert machine.plan(kernels_without_driver=(old,)).faults == []
    machine.facts["with_module"] = (old,)
    assert machine.plan().faults == []


def test_secure_boot_takes_the_signed_modules_where_they_can_be_had(machine):
    machine.facts["secure_boot"] = True
    machine.driver(NEW).offer(f"linux-headers-{GA}", "1")
    assert machine.plan().modules == "dkms"
    name = f"linux-modules-nvidia-535-server-{GA}"
    machine.installed("linux-image-generic", "5.15.0.139.135")
    machine.offer(name, "5.15.0-139.149+1", source="linux-restricted-modules")
    machine.offer(
        "linux-modules-nvidia-535-server-generic",
        "5.15.0-151.161+1",
        "linux-modules-nvidia-535-server-5.15.0-151-generic",
    )
    machine.offer("linux-modules-nvidia-535-server-generic", "5.15.0-139.149+1", name)
    plan = machine.plan()
    assert plan.modules == "prebuilt"
    assert [word for word in plan.install if word.startswith("linux")] == [
        name,
        "linux-modules-nvidia-535-server-generic=5.15.0-139.149+1",
    ]
    assert not any("dkms-535" in word.replace("no-dkms", "") for word in plan.install)
    assert machine.plan(modules="dkms").modules == "dkms"


def test_prebuilt_module_that_is_missing_for_one_kernel(machine):
    machine.facts["kernels"] = Kernels(GA, GA, "grub", (HWE, GA))
    machine.driver(NEW).offer(f"linux-modules-nvidia-535-server-{GA}", "1")
    plan = machine.plan(modules="prebuilt")
    assert codes(plan) == ["driver_prebuilt_missing"]
    assert plan.faults[0].subject == f"linux-modules-nvidia-535-server-{HWE}"


def test_a32_run_install(machine):
    machine.facts["run_install"] = ("/usr/bin/nvidia-uninstall",)
    machine.driver(NEW).offer(f"linux-headers-{GA}", "1")
    assert codes(machine.plan()) == ["driver_run_install_in_the_way"]
    allowed = machine.plan(allow_run_removal=True)
    assert (allowed.faults, allowed.remove_run_install, allowed.complete) == ([], True, False)


def test_a24_half_configured_packages_of_the_driver_are_finished_and_those_of_others_only_when_allowed(machine):
    machine.driver(NEW).all_installed(NEW)
    machine.dpkg = [package for package in machine.dpkg if package.name != "nvidia-dkms-535-server"]
    machine.installed("nvidia-dkms-535-server", NEW, state="half-configured")
    plan = machine.plan()
    assert (plan.repair, plan.install, plan.faults) == (
        ["nvidia-dkms-535-server"],
        [f"nvidia-dkms-535-server={NEW}"],
        [],
    )
    machine.installed("mariadb-server", "1.0", state="unpacked")
    plan = machine.plan()
    assert plan.repair == []
    assert [(fault.code, fault.subject) for fault in plan.faults] == [
        ("driver_packages_broken", "nvidia-dkms-535-server"),
        ("driver_packages_broken", "mariadb-server"),
    ]
    assert machine.plan(allow_repair=True).repair == ["nvidia-dkms-535-server", "mariadb-server"]


def test_unfinished_database_of_dpkg_is_finished(machine):
    machine.facts["interrupted"] = True
    plan = machine.driver(NEW).all_installed(NEW).plan()
    assert (plan.repair, plan.complete) == (["dpkg"], False)


def test_a30_fabric_manager_of_the_very_same_version(machine):
    machine.facts["nvswitches"] = 6
    machine.driver(NEW).offer(f"linux-headers-{GA}", "1")
    plan = machine.offer("nvidia-fabricmanager-535", "535.247.01-1").plan()
    assert codes(plan) == ["fabric_manager_unavailable"]
    assert "nvidia-fabricmanager-535 535.261.3 is in no archive; there is 535.247.01-1" in plan.faults[0].message
    plan = machine.offer("nvidia-fabricmanager-535", "535.261.03-1").plan()
    assert "nvidia-fabricmanager-535=535.261.03-1" in plan.install


@pytest.mark.parametrize("flavour", ["server", "desktop"])
@pytest.mark.parametrize("name", ["nvidia-fabricmanager-535", "libnvidia-nscq-535", "nvidia-imex-535"])
def test_a30_fabric_manager_of_a_second_run_is_of_no_other_flavour(machine, name, flavour):
    """Ubuntu has these once a branch, without -server: a DGX-2 would have lost its own in the second run."""
    of = "535-server" if flavour == "server" else "535"
    machine.facts["nvswitches"] = 6
    machine.driver(NEW, flavour=of).all_installed(NEW, flavour=of)
    for each in {"nvidia-fabricmanager-535", name}:
        source = "fabric-manager-535" if "fabric" in each else each
        machine.offer(each, "535.261.03-0ubuntu0.22.04.1", source=source)
        machine.installed(each, "535.261.03-0ubuntu0.22.04.1", source=source)
    plan = machine.plan(flavour=flavour)
    assert (plan.purge, plan.install, codes(plan), plan.complete) == ([], [], [], True)


def debian(machine, release, name, version, *depends, source="nvidia-graphics-drivers"):
    return machine.offer(name, version, *depends, source=source, release=Release("Debian", "deb.debian.org", release))


def test_debian_12_by_its_own_names(machine):
    kernel = "6.1.0-37-amd64"
    machine.facts["kernels"] = Kernels(kernel, kernel, "newest", (kernel,))
    version = "535.261.03-1"
    for name in ("nvidia-smi", "nvidia-driver-bin", "nvidia-kernel-dkms", "libcuda1", "nvidia-alternative"):
        debian(machine, "bookworm", name, version, *(["nvidia-alternative"] if name != "nvidia-alternative" else []))
    for part in ("cfg1", "ml1", "nvvm4", "ptxjitcompiler1"):
        debian(machine, "bookworm", f"libnvidia-{part}", version)
    debian(machine, "bookworm", "nvidia-persistenced", "535.171.04-1~deb12u1", source="nvidia-persistenced")
    machine.offer(f"linux-headers-{kernel}", "1")
    plan = machine.plan(distribution="debian", release="12")
    assert plan.faults == []
    assert f"nvidia-alternative={version}" in plan.install
    assert "nvidia-persistenced" in plan.install
    other = machine.plan(distribution="debian", release="12", branch="580")
    assert codes(other) == ["driver_branch_unavailable"]
    assert other.faults[0].message == "Debian 12 has no branch 580 of its own"


def test_debian_13_keeps_535_beside_its_main_branch(machine):
    kernel = "6.12.0-1-amd64"
    machine.facts["kernels"] = Kernels(kernel, kernel, "newest", (kernel,))
    source, version = "nvidia-graphics-drivers-tesla-535", "535.274.02-1~deb13u1"
    for name in ("nvidia-tesla-535-smi", "nvidia-tesla-535-driver-bin", "nvidia-tesla-535-kernel-dkms"):
        debian(machine, "trixie", name, version, source=source)
    for part in ("cuda1", "cfg1", "ml1", "nvvm4", "ptxjitcompiler1"):
        debian(machine, "trixie", f"libnvidia-tesla-535-{part}", version, source=source)
    machine.offer(f"linux-headers-{kernel}", "1")
    plan = machine.plan(distribution="debian", release="13")
    assert plan.faults == []
    # Without it nvidia-persistenced pulls the library of branch 550 (measured on Debian 13).
    assert f"libnvidia-tesla-535-cfg1={version}" in plan.install


def test_pins_bind_to_the_version_that_was_chosen_and_to_the_archive_until_one_is(machine):
    wish = Wish("ubuntu", "22.04", source="cuda_repo", site="developer.download.nvidia.com")
    (file,) = driver_plan.preferences(wish, "jammy", None)
    assert 'Pin: origin "developer.download.nvidia.com"\nPin-Priority: 1001' in file["content"]
    (file,) = driver_plan.preferences(wish, "jammy", "535.261.03-0ubuntu1")
    assert "Pin: version 535.261.03-0ubuntu1\nPin-Priority: 1001" in file["content"]
    assert "Pin: version 535.261.03-*\nPin-Priority: 1001" in file["content"]
    assert driver_plan.preferences(Wish("debian", "12", branch="580"), "bookworm", None) == []
