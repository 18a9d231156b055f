# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Transactions as the real apt simulated them (fixtures/apt/README.md), read and judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.volta.llm.plugins.module_utils.apt import policy as policies
from ansible_collections.volta.llm.plugins.module_utils.apt import simulation, transaction
from ansible_collections.volta.llm.plugins.module_utils.apt.names import Names
from ansible_collections.volta.llm.plugins.module_utils.apt.policy import Policy
from ansible_collections.volta.llm.plugins.module_utils.apt.transaction import Request
from ansible_collections.volta.llm.plugins.module_utils.faults import Fault, FaultError
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed, Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import packages

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "apt"
V535 = "535.161.08-0ubuntu2.22.04.1"


def simulated(case: str, *names: str, policy: dict[str, Any] | None = None, **request: Any) -> tuple[Any, list[Fault]]:
    machine = Machine(str(FIXTURES / case))
    assert machine.is_capture
    results, faults = simulation.run(machine, Request(packages=names, **request), Policy(**(policy or {})))
    # Every one names what to do.
    assert all(fault.remedy and fault.subject for fault in faults)
    return results, faults


def codes(faults: list[Fault]) -> list[tuple[str, str]]:
    return sorted((fault.code, fault.subject) for fault in faults)


# --- the driver's branch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "names", "branch"),
    [
        ("ubuntu-ga", ["nvidia-driver-535"], "535"),
        ("ubuntu-ga", [f"nvidia-driver-550-server={'550.163.01-0ubuntu0.22.04.1'}"], "550"),
        ("ubuntu-ga", ["linux-modules-nvidia-535-5.15.0-91-generic"], "535"),
        ("ubuntu-ga", ["linux-modules-nvidia-550-5.15.0-91-generic"], "550"),
        ("ubuntu-ga", ["nvidia-driver"], "590"),
        ("ubuntu-ga", ["nvidia-driver-535", "libnvidia-compute-535:i386"], "535"),
        ("debian-bookworm", ["nvidia-driver", "linux-headers-amd64"], "535"),
        ("debian-trixie", ["nvidia-tesla-535-driver"], "535"),
    ],
)
def test_a_transaction_of_one_branch_passes_for_that_branch_and_no_other(
    case: str, names: list[str], branch: str
) -> None:
    results, faults = simulated(case, *names, policy={"driver_branch": branch, "allow_kernel_headers": True})
    assert faults == []
    assert list(results["branches"]) == [branch]
    other = "470"
    _, faults = simulated(case, *names, policy={"driver_branch": other, "allow_kernel_headers": True})
    assert [fault.code for fault in faults] == ["apt_foreign_branch"]
    assert f"of branch {branch}, not {other}" in faults[0].message


def test_companions_of_debian_13_with_other_versions_are_no_other_branch() -> None:
    results, _ = simulated("debian-trixie", "nvidia-tesla-535-driver")
    versions = {one["name"]: (one["to"], one["branch"]) for one in results["install"]}
    assert versions["nvidia-modprobe"] == ("570.133.07-1", None)
    assert versions["nvidia-egl-common"] == ("550.163.01-2", None)
    assert versions["nvidia-persistenced"] == ("550.163.01-1", None)
    assert len(results["branches"]["535"]) == 30


def test_a_package_that_became_a_pointer_to_another_branch() -> None:
    """A02, pop-os/pop#3549: only the revision differs from the real 550."""
    _, faults = simulated("ubuntu-ga", "nvidia-driver-550-server", policy={"driver_branch": "550"})
    assert codes(faults) == [("apt_foreign_branch", "nvidia-driver-550-server")]
    assert "550.163.01-0ubuntu0.22.04.2 is a transitional package of branch 570, not 550" in faults[0].message
    assert "libnvidia-compute-570-server" in faults[0].message


def test_a_pointer_to_another_branch_that_is_there_already() -> None:
    """Nothing of 570 is in the transaction; the name, the version and the source package say 550."""
    results, faults = simulated("ubuntu-550-beside-570", "nvidia-driver-550-server", policy={"driver_branch": "550"})
    assert [one["name"] for one in results["install"]] == ["nvidia-driver-550-server"]
    assert codes(faults) == [("apt_foreign_branch", "nvidia-driver-550-server")]


@pytest.mark.parametrize(("requested", "resolved"), [("495", "510"), ("460", "470")])
def test_packages_that_went_past_the_number_in_their_name(requested: str, resolved: str) -> None:
    """A04, as apt resolves them."""
    _, faults = simulated("ubuntu-ga", f"nvidia-driver-{requested}", policy={"driver_branch": requested})
    assert [fault.code for fault in faults] == ["apt_foreign_branch"]
    assert f"is of branch {resolved}, although its name promises {requested}" in faults[0].message


@pytest.mark.parametrize(
    ("requested", "resolved", "passes"),
    [
        ("495", "510", False),
        ("460", "470", False),
        ("465", "470", False),
        ("455", "460", False),
        ("535", "535", True),
        ("550", "550", True),
        ("535", "545", False),
    ],
)
def test_only_equal_majors_pass(requested: str, resolved: str, passes: bool) -> None:
    """A04: (requested, resolved) pairs of a name and what its version really is."""
    change = transaction.Change(f"libnvidia-compute-{requested}", None, f"{resolved}.1.2-0ubuntu1")
    planned = policies.with_branches(transaction.Transaction(install=[change]))
    assert (policies.judge(planned, Policy(driver_branch=requested), []) == []) is passes


def test_a_tool_that_brings_another_driver() -> None:
    """Syllo/nvtop#118."""
    _, faults = simulated("ubuntu-ga", "nvtop", policy={"driver_branch": "535"})
    assert codes(faults) == [("apt_foreign_branch", "libnvidia-compute-418")]
    assert "branch 418" in faults[0].message
    assert "nvtop depends on it" in faults[0].message


def test_the_pin_of_another_branch_is_of_that_branch() -> None:
    """A06: its version has no branch, its name has."""
    _, faults = simulated(
        "ubuntu-ga", "nvidia-driver-535", "nvidia-driver-pinning-610", policy={"driver_branch": "535"}
    )
    assert codes(faults) == [("apt_foreign_branch", "nvidia-driver-pinning-610")]
    assert "branch 610" in faults[0].message


def test_an_exact_version_of_the_meta_package_alone_does_not_bind_the_others() -> None:
    """A06: apt refuses, and its reason is shown."""
    _, faults = simulated("ubuntu-ga", f"nvidia-driver-535={V535}", policy={"driver_branch": "535"})
    assert codes(faults) == [("apt_unresolvable", f"nvidia-driver-535={V535}")]
    assert (
        f"nvidia-driver-535 depends on nvidia-dkms-535 (= {V535}), but 535.183.01-0ubuntu0.22.04.1 is to be installed"
        in faults[0].message
    )


def test_a_toolkit_that_brings_another_driver_beside_the_one_asked_for() -> None:
    _, faults = simulated(
        "debian-trixie", "nvidia-tesla-535-driver", "nvidia-cuda-toolkit", policy={"driver_branch": "535"}
    )
    assert [fault.code for fault in faults] == ["apt_foreign_branch"]
    assert "libcuda1" in faults[0].message
    assert "of branch 550, not 535" in faults[0].message


def test_a_driver_package_without_any_sign_of_its_branch() -> None:
    _, faults = simulated("ubuntu-ga", "nvidia-helper", policy={"driver_branch": "535"})
    assert codes(faults) == [("apt_branch_unknown", "nvidia-helper")]
    assert simulated("ubuntu-ga", "nvidia-helper")[1] == []


def test_the_open_flavour() -> None:
    _, faults = simulated("ubuntu-ga", "nvidia-driver-535-open", policy={"driver_branch": "535"})
    assert [fault.code for fault in faults] == ["apt_open_flavour"] * 3
    assert "branch 535" in faults[0].message
    allowed = {"driver_branch": "535", "allow_open": True}
    assert simulated("ubuntu-ga", "nvidia-driver-535-open", policy=allowed)[1] == []


@pytest.mark.parametrize(
    ("name", "is_open"),
    [
        ("nvidia-dkms-535-server-open", True),
        ("nvidia-open", True),
        ("nvidia-open-570", True),
        ("nvidia-open-kernel-dkms", True),
        ("nvidia-kernel-source-580-open", True),
        ("linux-modules-nvidia-535-server-open-generic", True),
        ("linux-modules-nvidia-550-open-6.8.0-60-generic", True),
        ("nvidia-opencl-icd", False),
        ("nvidia-driver-535", False),
        ("libopenjp2-7", False),
        ("linux-modules-nvidia-535-generic", False),
    ],
)
def test_names_of_the_open_flavour(name: str, is_open: bool) -> None:
    assert packages.is_open_flavour(name) is is_open


@pytest.mark.parametrize(
    ("name", "version", "source", "branch"),
    [
        ("nvidia-driver-535-server", "535.183.01-0ubuntu1", None, "535"),
        ("libnvidia-compute", "590.44.01-1ubuntu1", None, "590"),
        ("linux-modules-nvidia-535-server-5.15.0-105-generic", "5.15.0-105.115+1", "linux-restricted-modules", "535"),
        ("linux-modules-nvidia-570-generic-hwe-22.04", "6.8.0-60.63~22.04.1", None, "570"),
        ("linux-signatures-nvidia-5.15.0-405-generic", "5.15.0-405.1", "linux-restricted-signatures", None),
        ("nvidia-firmware-535-535.183.01", "535.183.01-0ubuntu1", "nvidia-graphics-drivers-535", "535"),
        ("libnvidia-nscq-570", "570.86.15-1", None, "570"),
        ("nvidia-cuda-mps", "550.163.01-2", "nvidia-graphics-drivers", "550"),
        ("firmware-nvidia-gsp", "535.261.03-1", "nvidia-graphics-drivers", "535"),
        ("libcuda1", "550.163.01-2", "nvidia-graphics-drivers", "550"),
        ("libnvidia-ml-dev", "11.8.86~11.8.0-5~deb12u1", "nvidia-cuda-toolkit (11.8.0-5~deb12u1)", None),
        ("cuda-drivers", "580.65.06-1", None, "580"),
        ("some-name", "1.0", "nvidia-graphics-drivers-470 (470.256.02-1)", "470"),
        ("some-name", "1.0", "nvidia-graphics-drivers-470", "470"),
        ("nvidia-container-toolkit", "1.17.8-1", None, None),
        ("nvidia-modprobe", "570.133.07-1", "nvidia-modprobe", None),
        ("nvidia-egl-common", "550.163.01-2", "nvidia-graphics-drivers", None),
        ("libnvidia-egl-wayland1", "1:1.1.18-1", "egl-wayland", None),
        ("nvidia-settings-tesla-535", "535.247.01-2", "nvidia-settings-tesla-535", "535"),
        ("hashcat-nvidia", "20210201", "hashcat-meta", None),
        ("linux-image-5.15.0-535-generic", "5.15.0-535.1", "linux-signed", None),
    ],
)
def test_the_branch_of_a_candidate(name: str, version: str, source: str | None, branch: str | None) -> None:
    assert packages.candidate_branch(name, version, source) == branch


# --- kernel, removals, holds ----------------------------------------------------------------------------------------


def test_an_upgrade_that_moves_the_kernel() -> None:
    _, faults = simulated("ubuntu-ga", action="dist_upgrade")
    assert {fault.code for fault in faults} == {"apt_kernel_touched"}
    subjects = {fault.subject for fault in faults}
    assert {"linux-generic", "linux-image-generic", "linux-image-5.15.0-105-generic"} <= subjects
    assert "linux-image-generic would go from 5.15.0.91.88 to 5.15.0.105.102" in [fault.message for fault in faults]
    _, faults = simulated("ubuntu-ga", action="dist_upgrade", policy={"allow_kernel_headers": True})
    assert {fault.subject for fault in faults} == {name for name in subjects if "headers" not in name}
    assert simulated("ubuntu-ga", action="dist_upgrade", policy={"allow_kernel": True})[1] == []


def test_headers_that_the_driver_needs_can_be_allowed() -> None:
    assert simulated("ubuntu-ga", "linux-headers-6.8.0-60-generic")[1] != []
    allowed = {"allow_kernel_headers": True}
    assert simulated("ubuntu-ga", "linux-headers-6.8.0-60-generic", policy=allowed)[1] == []


def test_prebuilt_modules_for_the_running_kernel_touch_no_kernel_and_their_meta_does() -> None:
    policy = {"driver_branch": "535"}
    assert simulated("ubuntu-ga", "linux-modules-nvidia-535-5.15.0-91-generic", policy=policy)[1] == []
    _, faults = simulated("ubuntu-ga", "linux-modules-nvidia-535-generic", policy=policy)
    assert ("apt_kernel_touched", "linux-image-5.15.0-105-generic") in codes(faults)


def test_a_hold_on_the_meta_of_a_kernel_that_does_not_run_holds_nothing() -> None:
    """vast-ai/docs#947."""
    results, faults = simulated("ubuntu-hwe-ga-meta-held", action="dist_upgrade")
    assert "linux-image-generic" in results["kept_back"]
    assert ("apt_kernel_touched", "linux-image-6.8.0-60-generic") in codes(faults)
    assert ("apt_kernel_touched", "linux-image-generic-hwe-22.04") in codes(faults)


def test_a_hold_on_the_image_alone_lets_its_meta_move_on() -> None:
    """aws-parallelcluster#7070."""
    _, faults = simulated("ubuntu-image-held", action="dist_upgrade")
    assert ("apt_kernel_touched", "linux-image-generic") in codes(faults)


def test_kernel_and_driver_held_are_kept_back() -> None:
    results, faults = simulated(
        "ubuntu-held", action="dist_upgrade", policy={"forbidden": ["*nvidia*", "linux-*"], "driver_branch": "535"}
    )
    assert faults == []
    assert [one["name"] for one in results["install"]] == ["bash"]
    assert {"linux-generic-hwe-22.04", "linux-generic", "nvidia-driver-535"} <= set(results["kept_back"])


DRIVER = [
    "libnvidia-compute-535",
    "nvidia-dkms-535",
    "nvidia-driver-535",
    "nvidia-kernel-source-535",
    "nvidia-utils-535",
]


def test_held_packages_that_are_asked_for() -> None:
    _, faults = simulated("ubuntu-held", *DRIVER, policy={"driver_branch": "535"})
    assert codes(faults) == [("apt_held_would_change", name) for name in DRIVER]
    assert all("branch 535" in fault.message for fault in faults)
    policy = {"driver_branch": "535", "allow_held": True}
    assert simulated("ubuntu-held", *DRIVER, policy=policy)[1] == []


def test_held_packages_in_the_way_are_named() -> None:
    _, faults = simulated("ubuntu-held", "nvidia-driver-535")
    assert codes(faults) == [("apt_unresolvable", "nvidia-driver-535")]
    assert "held: libnvidia-compute-535, nvidia-dkms-535, nvidia-driver-535, nvidia-utils-535" in faults[0].message
    assert "apt-mark unhold" in faults[0].remedy


def test_a_held_package_that_would_be_removed() -> None:
    _, faults = simulated("ubuntu-held", "nvidia-driver-535", action="remove")
    assert codes(faults) == [("apt_held_would_change", "nvidia-driver-535"), ("apt_would_remove", "nvidia-driver-535")]


def test_removals() -> None:
    results, faults = simulated("ubuntu-535-newer", "nvidia-utils-535", action="remove", purge=True)
    assert {one["name"]: one["purge"] for one in results["remove"]} == {
        "nvidia-utils-535": True,
        "nvidia-driver-535": True,
    }
    assert [fault.code for fault in faults] == ["apt_would_remove"]
    assert "nvidia-driver-535 535.183.01-0ubuntu0.22.04.1 (branch 535)" in faults[0].message
    case = ("ubuntu-535-newer", "nvidia-utils-535")
    assert simulated(*case, action="remove", purge=True, policy={"allow_remove": ["nvidia-*-535"]})[1] == []
    _, faults = simulated(*case, action="remove", purge=True, policy={"allow_remove": ["nvidia-driver-535"]})
    assert codes(faults) == [("apt_would_remove", "nvidia-utils-535")]


def test_what_must_not_move_and_what_must_be_there() -> None:
    policy = {"forbidden": ["libnvidia-*"], "required": ["bash", "nvidia-utils-535", "nvidia-nothing", "^linux-x.*"]}
    _, faults = simulated("ubuntu-ga", "nvidia-driver-535", policy=policy)
    assert codes(faults) == [
        ("apt_forbidden_package", "libnvidia-compute-535"),
        ("apt_required_missing", "^linux-x.*"),
        ("apt_required_missing", "nvidia-nothing"),
    ]
    _, faults = simulated(
        "ubuntu-535-newer",
        "nvidia-utils-535",
        action="remove",
        purge=True,
        policy={"allow_remove": ["*"], "required": ["nvidia-utils-535", "libnvidia-compute-535"]},
    )
    assert codes(faults) == [("apt_required_missing", "nvidia-utils-535")]


def test_downgrades_and_reinstallations_are_told_from_upgrades() -> None:
    names = DRIVER
    results, faults = simulated("ubuntu-535-newer", *(f"{name}={V535}" for name in names))
    assert faults == []
    assert {one["name"]: one["kind"] for one in results["install"]} == dict.fromkeys(names, "downgrade")
    assert sorted(results["downgrades"]) == names
    results, _ = simulated("ubuntu-535-newer", "nvidia-driver-535", reinstall=True)
    assert [(one["name"], one["kind"]) for one in results["install"]] == [("nvidia-driver-535", "reinstall")]
    results, _ = simulated("ubuntu-ga", action="dist_upgrade")
    assert next(one for one in results["install"] if one["name"] == "bash") == {
        "name": "bash",
        "from": "5.1-6ubuntu1",
        "to": "5.1-6ubuntu1.1",
        "kind": "upgrade",
        "origin": "localhost",
        "architecture": "amd64",
        "source": "bash",
        "branch": None,
    }


# --- apt that refuses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "because"),
    [
        (["nosuch"], "Unable to locate package nosuch"),
        (["nvidia-driver-535=1.0"], "Version '1.0' for 'nvidia-driver-535' was not found"),
        (
            ["needs-what-is-not-there"],
            "needs-what-is-not-there depends on absent-package (>= 2), but it is not installable; "
            "needs-what-is-not-there depends on nvidia-utils-535 (>= 600), but it is not going to be installed",
        ),
        (
            ["nvidia-driver-535", "nvidia-utils-535-"],
            "nvidia-driver-535 depends on nvidia-utils-535 (= 535.183.01-0ubuntu0.22.04.1), "
            "but it is not going to be installed",
        ),
    ],
)
def test_what_cannot_be_resolved_is_said_in_apt_s_words(names: list[str], because: str) -> None:
    results, faults = simulated("ubuntu-ga", *names)
    assert codes(faults) == [("apt_unresolvable", " ".join(names))]
    assert faults[0].message == because
    assert results["install"] == []
    assert results["violations"] == []


@pytest.mark.parametrize("request_", [{"action": "install", "packages": ("bash",)}, {"action": "dist_upgrade"}])
def test_packages_that_are_broken_already(request_: dict[str, Any]) -> None:
    machine = Machine(str(FIXTURES / "ubuntu-broken"))
    _, faults = simulation.run(machine, Request(**request_), Policy())
    assert [fault.code for fault in faults] == ["apt_broken_packages"]
    assert "--fix-broken" in faults[0].remedy


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        # Texts of apt 2.6.1 and 3.0, as its source has them.
        (
            Completed(
                (),
                100,
                stderr="E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct "
                "the problem. \n",
            ),
            "apt_broken_packages",
            "dpkg was interrupted",
        ),
        (
            Completed(
                (),
                100,
                stderr="E: Malformed entry 1 in list file /etc/apt/sources.list (Component)\n"
                "E: The list of sources could not be read.\n",
            ),
            "apt_failed",
            "Malformed entry 1 in list file /etc/apt/sources.list (Component); The list of sources could not be read",
        ),
        (
            Completed(
                (),
                100,
                stderr="E: Unable to satisfy dependencies. Reached two conflicting assignments:\n"
                "   1. nvidia-driver-535:amd64 is selected for install\n"
                "   2. but none of the choices are installable\n",
            ),
            "apt_unresolvable",
            "1. nvidia-driver-535:amd64 is selected for install 2. but none",
        ),
        (Completed((), None, timed_out=True), "apt_failed", "did not end in time"),
        (Completed((), None, stderr="No such file or directory", missing=True), "apt_missing", "No such file"),
        (Completed((), 1), "apt_failed", "status 1"),
    ],
)
def test_other_ends_of_apt(answer: Completed, code: str, words: str) -> None:
    fault = transaction.failure(answer, ["nvidia-driver-535"])
    assert fault is not None
    assert fault.code == code
    assert words in fault.message


# --- reading --------------------------------------------------------------------------------------------------------


def test_all_of_apt_s_line_forms() -> None:
    text = """\
The following upgrades have been deferred due to phasing:
  libfoo
Not upgrading yet due to phasing:
  libbar
Inst linux-base (4.12.1~deb12u1 Debian:12.15/oldstable, Debian-Security:12/oldstable-security [all])
Inst libnvidia-compute-535:i386 [535.1-1] (535.2-1 Ubuntu:22.04/jammy-updates [i386])
Inst local-package ( 1.0 )
Inst plain [1.0] (2.0 [amd64]) [other:amd64 ]
Remv old [1.0] [needed-by:amd64 ]
Purg gone:i386 [1.0-1]
Conf linux-base (4.12.1~deb12u1 Debian:12.15/oldstable [all])
"""
    found = transaction.parse(text)
    assert [(one.name, one.old, one.new, one.architecture, one.origin) for one in found.install] == [
        (
            "linux-base",
            None,
            "4.12.1~deb12u1",
            "all",
            "Debian:12.15/oldstable, Debian-Security:12/oldstable-security",
        ),
        ("libnvidia-compute-535", "535.1-1", "535.2-1", "i386", "Ubuntu:22.04/jammy-updates"),
        ("plain", "1.0", "2.0", "amd64", None),
    ]
    assert [(one.name, one.old, one.purge, one.architecture) for one in found.remove] == [
        ("old", "1.0", False, None),
        ("gone", "1.0-1", True, "i386"),
    ]
    assert found.deferred == ["libfoo", "libbar"]


def test_a_translated_apt_hides_what_is_kept_back_and_is_never_asked_for() -> None:
    """German, recorded: the transaction reads the same, its sections do not; so every program gets the C locale."""
    german = transaction.parse((FIXTURES / "dist-upgrade.de.txt").read_text(encoding="utf-8"))
    results, _ = simulated("ubuntu-held", action="dist_upgrade")
    assert [change.name for change in german.install] == [one["name"] for one in results["install"]] == ["bash"]
    assert german.kept_back == []
    assert len(results["kept_back"]) == 11
    environment = {"LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de", "LANG": "zh_CN.UTF-8"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        said = Machine("/").run(["sh", "-c", "echo $LC_ALL:$LANGUAGE:$LANG"])
    assert said.stdout == "C:C:C\n"


def test_what_is_given_to_apt() -> None:
    request = Request(
        packages=("a", "b-"),
        recommends=False,
        target_release="jammy-updates",
        purge=True,
        fix_broken=True,
        options={"APT::Get::Show-Versions": "true"},
    )
    assert request.argv() == [
        *("apt-get", "-s", "-q", "-o", "APT::Get::Show-Versions=true", "--no-install-recommends"),
        *("-t", "jammy-updates", "--purge", "--fix-broken", "install", "a", "b-"),
    ]
    assert Request("dist_upgrade", recommends=True).argv() == [
        "apt-get",
        "-s",
        "-q",
        "--install-recommends",
        "dist-upgrade",
    ]


# --- unattended-upgrade ---------------------------------------------------------------------------------------------

# Words of unattended-upgrades 2.9.1 (Debian 12), as its source prints them with --dry-run --verbose.
UNATTENDED = """\
Starting unattended upgrades script
Allowed origins are: origin=Debian,codename=bookworm,label=Debian-Security
Initial blacklist: cuda- nvidia-
Initial whitelist (not strict):
Removing unused kernel packages: linux-image-6.1.0-37-amd64
Option --dry-run given, *not* performing real actions
Packages that will be upgraded: bash linux-image-amd64
Writing dpkg log to /var/log/unattended-upgrades/unattended-upgrades-dpkg.log
/usr/bin/dpkg --status-fd 10 --unpack /var/cache/apt/archives/linux-image-6.1.0-57-amd64_6.1.192-3_amd64.deb
All upgrades installed
"""


class Program(Machine):
    """A machine on which each program gives one answer."""

    def __init__(self, answer: Completed) -> None:
        super().__init__("/nonexistent")
        self.answer = answer
        self.asked: list[tuple[str, ...]] = []

    def run(self, argv: Any, timeout: float | None = None, env: Any = None) -> Completed:
        self.asked.append(tuple(argv))
        return self.answer


def test_what_unattended_upgrade_would_touch() -> None:
    machine = Program(Completed((), 0, stdout=UNATTENDED))
    results, faults = simulation.run(machine, Request("unattended_upgrade"), Policy(forbidden=["bash"]))
    assert machine.asked == [("unattended-upgrade", "--dry-run", "--verbose")]
    names = ["bash", "linux-image-6.1.0-37-amd64", "linux-image-6.1.0-57-amd64", "linux-image-amd64"]
    assert [one["name"] for one in results["install"]] == names
    assert codes(faults) == [
        ("apt_forbidden_package", "bash"),
        *(("apt_kernel_touched", name) for name in names[1:]),
    ]


def test_unattended_upgrade_with_nothing_to_do_or_not_there_is_no_fault() -> None:
    nothing = "No packages found that can be upgraded unattended and no pending auto-removals\n"
    results, faults = simulation.run(Program(Completed((), 0, stdout=nothing)), Request("unattended_upgrade"), Policy())
    assert (results["available"], results["install"], faults) == (True, [], [])
    results, faults = simulation.run(
        Program(Completed((), None, missing=True)), Request("unattended_upgrade"), Policy()
    )
    assert (results["available"], faults) == (False, [])


@pytest.mark.parametrize(
    "answer",
    [
        Completed((), 1, stdout="Cache lock can not be acquired, exiting\n"),
        Completed((), 1, stderr="Lock file is already taken, exiting\n"),
        Completed((), 1, stderr="Traceback ...\nKeyError: 'x'\n"),
        Completed((), None, timed_out=True),
    ],
)
def test_unattended_upgrade_that_gives_no_answer_proves_nothing(answer: Completed) -> None:
    _, faults = simulation.run(Program(answer), Request("unattended_upgrade"), Policy())
    assert [fault.code for fault in faults] == ["apt_failed"]


# --- patterns -------------------------------------------------------------------------------------------------------


def test_names_patterns_and_expressions() -> None:
    names = Names(["libcuda1", "nvidia-*-535", "lib[a-c]?", "^linux-(image|headers)-.*"])
    assert "libcuda1" in names
    assert "libcuda11" not in names
    assert "nvidia-driver-535" in names
    assert "xnvidia-driver-535" not in names
    assert "libb1" in names
    assert "linux-headers-generic" in names
    assert "linux-headers" not in names
    assert "g++" in Names(["g++", "linux-generic-hwe-22.04"])
    assert "g++" not in Names(["linux-generic-hwe-22.04"])
    assert "linux-generic-hwe-22x04" not in Names(["linux-generic-hwe-22.04"])


def test_an_expression_that_cannot_be_read_is_a_fault() -> None:
    with pytest.raises(FaultError) as caught:
        Policy(allow_remove=["^nvidia-("])
    assert caught.value.fault.code == "apt_pattern_invalid"
    assert caught.value.fault.subject == "^nvidia-("
