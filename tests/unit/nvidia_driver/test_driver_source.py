# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Source files and pins, as the machine's own files make them."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.apt import sources
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine
from ansible_collections.volta.llm.plugins.module_utils.nvidia import driver_source
from ansible_collections.volta.llm.plugins.module_utils.nvidia.driver_source import Settings

UBUNTU = """\
Types: deb
URIs: http://archive.ubuntu.com/ubuntu
Suites: jammy jammy-updates
Components: main restricted
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
"""
DEBIAN = """\
# http://snapshot.debian.org/archive/debian/20250520T000000Z
Types: deb deb-src
URIs: http://deb.debian.org/debian
Suites: bookworm bookworm-updates
Components: main non-free-firmware
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
FIXTURES = Path(__file__).parent.parent / "fixtures/apt"
CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"


class Files:
    def __init__(self, root) -> None:
        self.root = root
        self.system("ubuntu", "22.04", "jammy")

    def system(self, name, release, codename):
        return self.file("etc/os-release", f'ID={name}\nVERSION_ID="{release}"\nVERSION_CODENAME={codename}\n')

    def file(self, path, content) -> Files:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
        return self

    def source(self, name, content) -> Files:
        return self.file(f"etc/apt/sources.list.d/{name}", content)

    def read(self, **settings) -> driver_source.Sources:
        return driver_source.read(Machine(str(self.root)), Settings(**settings))


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)


def codes(found) -> list[str]:
    return [fault.code for fault in found.faults]


def test_archive_that_is_in_use_needs_no_file(files):
    found = files.source("ubuntu.sources", UBUNTU).read()
    assert (found.sources, found.faults, found.disable) == ([], [], [])
    assert len(found.absent) == 3


def test_missing_components_come_in_a_file_of_ours_with_the_key_of_the_others(files):
    files.system("debian", "12", "bookworm").source("debian.sources", DEBIAN)
    files.file("etc/apt/sources.list", "deb http://deb.debian.org/debian-security bookworm-security main # comment\n")
    found = files.read()
    (file,) = found.sources
    assert file["path"] == "/etc/apt/sources.list.d/volta-llm-nvidia-distro.sources"
    ours = list(sources.parse_stanzas(file["path"], file["content"]))
    assert {(entry.uri, entry.suite, entry.components, entry.signed_by) for entry in ours} == {
        (
            "http://deb.debian.org/debian-security",
            "bookworm-security",
            ("contrib", "non-free", "non-free-firmware"),
            "",
        ),
        (
            "http://deb.debian.org/debian",
            "bookworm",
            ("contrib", "non-free"),
            "/usr/share/keyrings/debian-archive-keyring.gpg",
        ),
        (
            "http://deb.debian.org/debian",
            "bookworm-updates",
            ("contrib", "non-free"),
            "/usr/share/keyrings/debian-archive-keyring.gpg",
        ),
    }
    again = files.file(file["path"].lstrip("/"), file["content"]).read()
    assert again.sources == found.sources
    assert again.faults == []


#: What apt 2.6 says of two entries of one archive when only one of them has it: "E: Conflicting values set for option".
BOTH_MUST_HAVE = (
    *("trusted=yes", "allow-insecure=yes", "allow-weak=yes", "check-valid-until=no", "check-date=no"),
    *("date-max-future=10", "valid-until-max=9", "inrelease-path=x"),
)


@pytest.mark.parametrize("option", ["allow-insecure=yes", "allow-weak=yes", "inrelease-path=x"])
def test_options_that_cannot_be_repeated_are_left_to_the_operator(files, option):
    """Measured with apt 2.6: a stanza with the same option contradicts the line all the same."""
    files.system("debian", "12", "bookworm")
    files.file("etc/apt/sources.list", f"deb [{option}] http://mirror.lan/debian bookworm main\n")
    found = files.read()
    assert (codes(found), found.sources) == (["apt_sources_conflict"], [])
    assert "add contrib non-free non-free-firmware to that line" in found.faults[0].remedy


@pytest.mark.parametrize(
    "option",
    [
        *(option for option in BOTH_MUST_HAVE if option.partition("=")[0] not in sources.ONE_LINE_ONLY),
        *("by-hash=no", "arch=amd64,i386", "lang+=de", "arch-=i386"),
    ],
)
def test_missing_components_come_with_the_options_of_the_others(files, option):
    """A local mirror with trusted=yes, a snapshot with check-valid-until=no: without them beside it apt refused all."""
    files.system("debian", "12", "bookworm")
    files.file("etc/apt/sources.list", f"deb [{option}] http://mirror.lan/debian bookworm main\n")
    (file,) = files.read().sources
    (ours,) = sources.parse_stanzas(file["path"], file["content"])
    name, _, value = option.partition("=")
    names = {"arch": "architectures", "lang+": "languages-add", "arch-": "architectures-remove"}
    assert ours.options == ((names.get(name, name), value.replace(",", " ")),)
    # The same in the other format.
    theirs = file["content"].replace("contrib non-free non-free-firmware", "main")
    files.file("etc/apt/sources.list", "").source("debian.sources", theirs)
    (again,) = files.read().sources
    assert [entry.options for entry in sources.parse_stanzas(again["path"], again["content"])] == [ours.options]


@pytest.mark.parametrize("option", BOTH_MUST_HAVE)
def test_options_of_one_archive_that_contradict_are_named(files, option):
    files.file("etc/apt/sources.list", f"deb [{option}] http://apt.example/ubuntu jammy main\n")
    found = files.read(source="mirror", url="http://apt.example/ubuntu", suite="jammy")
    assert codes(found) == ["apt_sources_conflict"]
    name = option.partition("=")[0]
    assert f"has {option} here, {name}=(not set) in" in found.faults[0].message
    files.file("etc/apt/sources.list", "deb [by-hash=no arch=amd64] http://apt.example/ubuntu jammy main\n")
    assert files.read(source="mirror", url="http://apt.example/ubuntu", suite="jammy").faults == []


def test_a_ppa_for_the_same_suite_is_not_the_distribution_s_archive(files):
    """It has no restricted, and apt would say so whenever lists are updated."""
    ppa = "https://ppa.launchpadcontent.net/deadsnakes/ppa/ubuntu"
    files.source("ubuntu.sources", UBUNTU.replace("main restricted", "main"))
    files.source("deadsnakes.list", f"deb {ppa} jammy main\n")
    lists = {
        "archive.ubuntu.com_ubuntu_dists_jammy_InRelease": "Ubuntu",
        "ppa.launchpadcontent.net_deadsnakes_ppa_ubuntu_dists_jammy_InRelease": "LP-PPA-deadsnakes",
    }
    for name, origin in lists.items():
        files.file(
            f"var/lib/apt/lists/{name}", f"-----BEGIN PGP SIGNED MESSAGE-----\n\nOrigin: {origin}\nSuite: jammy\n"
        )
    (file,) = files.read().sources
    assert {entry.uri for entry in sources.parse_stanzas(file["path"], file["content"])} == {
        "http://archive.ubuntu.com/ubuntu"
    }


def test_nvidias_archive_is_flat_and_pinned_by_its_host(files):
    found = files.source("ubuntu.sources", UBUNTU).read(source="cuda_repo", keyring="/etc/apt/keyrings/k.asc")
    assert (
        "URIs: https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2204/x86_64/\nSuites: /\nSigned-By"
        in (found.sources[0]["content"])
    )
    copy = files.read(source="cuda_repo", url="https://mirrors.example.cn/cuda/ubuntu2204/x86_64/")
    assert copy.site == "mirrors.example.cn"


def test_mirror_with_the_distributions_layout(files):
    found = files.read(
        source="mirror", url="http://apt.example/ubuntu", suite="jammy", keyring="/etc/apt/keyrings/k.gpg"
    )
    assert "Suites: jammy\nComponents: main restricted\n" in found.sources[0]["content"]


def test_entries_of_one_archive_with_two_keys_are_named_before_apt_refuses_everything(files):
    files.source("ubuntu.sources", UBUNTU)
    files.source(
        "cuda.list", f"deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] {CUDA}/ubuntu2204/x86_64/ /\n"
    )
    found = files.read(source="cuda_repo", keyring="/etc/apt/keyrings/k.asc")
    assert codes(found) == ["apt_sources_conflict"]
    assert found.faults[0].subject == "/etc/apt/sources.list.d/cuda.list"
    assert "/usr/share/keyrings/cuda-archive-keyring.gpg here, by /etc/apt/keyrings/k.asc in" in found.faults[0].message
    found = files.read(source="cuda_repo", keyring="/etc/apt/keyrings/k.asc", disable_conflicting=True)
    assert (found.faults, found.disable) == ([], ["/etc/apt/sources.list.d/cuda.list"])
    # With another source it is no concern of ours: apt is content with it, and the pins keep its driver away.
    assert files.read().faults == []


def test_two_files_of_others_that_disagree_are_left_to_their_owner(files):
    files.source("ubuntu.sources", UBUNTU)
    files.source("zz.list", "deb [signed-by=/etc/other.gpg] http://archive.ubuntu.com/ubuntu/ jammy main\n")
    found = files.read(disable_conflicting=True)
    assert (codes(found), found.disable) == (["apt_sources_conflict"], [])


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (f"deb {CUDA}/ubuntu2404/x86_64/ /", "ubuntu-24.04"),
        (f"deb {CUDA}/debian12/x86_64/ /", "debian-12"),
        ("deb http://deb.debian.org/debian bookworm main non-free", "debian-12"),
        ("deb http://archive.ubuntu.com/ubuntu noble main restricted", "ubuntu-24.04"),
        ("deb https://ppa.launchpadcontent.net/graphics-drivers/ppa/ubuntu noble main", "ubuntu-24.04"),
    ],
)
def test_archives_with_drivers_for_another_system(files, line, meant):
    found = files.source("ubuntu.sources", UBUNTU).source("other.list", line + "\n").read()
    assert codes(found) == ["apt_sources_other_distribution"]
    assert f"is for {meant}, this is ubuntu-22.04" in found.faults[0].message


@pytest.mark.parametrize(
    "line",
    [
        f"deb {CUDA}/ubuntu2204/x86_64/ /",
        "deb http://deb.debian.org/debian bookworm main",
        "deb https://nvidia.github.io/libnvidia-container/stable/deb/amd64 /",
        "deb http://archive.ubuntu.com/ubuntu jammy-backports main restricted",
        "# deb http://archive.ubuntu.com/ubuntu noble main restricted",
    ],
)
def test_innocent_archives(files, line):
    assert files.source("ubuntu.sources", UBUNTU).source("other.list", line + "\n").read().faults == []


def test_a_file_that_holds_other_things_too_is_not_put_out_of_use(files):
    files.source("ubuntu.sources", UBUNTU)
    files.source("mixed.list", f"deb {CUDA}/ubuntu2404/x86_64/ /\ndeb http://packages.example/apt stable main\n")
    found = files.read(disable_conflicting=True)
    assert (codes(found), found.disable) == (["apt_sources_other_distribution"], [])
    files.file("etc/apt/sources.list", f"deb {CUDA}/ubuntu2404/x86_64/ /\n")
    assert "/etc/apt/sources.list" in [fault.subject for fault in files.read(disable_conflicting=True).faults]


def test_disabled_stanzas_are_passed_over(files):
    files.source("other.sources", f"Enabled: no\nTypes: deb\nURIs: {CUDA}/ubuntu2404/x86_64/\nSuites: /\n")
    assert files.source("ubuntu.sources", UBUNTU).read().faults == []


def test_other_systems_are_named(files):
    found = files.system("fedora", "42", "").read()
    assert codes(found) == ["os_without_driver_packages"]


#: The packet of a version 4 key, as short as one can be.
KEY = bytes([0x98, 6]) + b"\x04\x00\x00\x00\x01\x01"


def armoured(data: bytes) -> bytes:
    text = base64.b64encode(data).decode()
    head, end = (f"-----{word} PGP PUBLIC KEY BLOCK-----" for word in ("BEGIN", "END"))
    return f"{head}\nVersion: GnuPG\n\n{text}\n=AAAA\n{end}\n".encode()


def test_key_is_judged_by_its_fingerprint_in_either_form(files):
    (own,) = sources.fingerprints(KEY)
    assert sources.fingerprints(armoured(KEY)) == [own]
    spaced = " ".join(own[at : at + 4] for at in range(0, 40, 4)).lower()
    settings = {"source": "cuda_repo", "keyring": "/etc/apt/keyrings/k.asc"}
    files.file("etc/apt/keyrings/k.asc", armoured(KEY))
    assert files.read(fingerprints=(spaced,), **settings).faults == []
    found = files.read(fingerprints=("EB693B3035CD5710E231E123A4B469963BF863CC",), **settings)
    assert codes(found) == ["apt_key_wrong"]
    assert own in found.faults[0].message


def test_fingerprint_is_the_one_that_gpg_prints():
    """gpg --show-keys --with-fingerprint; the key has a subkey, whose fingerprint is no key's of an archive."""
    key = (FIXTURES / "fixture-key.asc").read_bytes()
    assert sources.fingerprints(key) == ["358F ED43 9642 41CF 8971  3BEF E1B2 5401 EC52 2DB2".replace(" ", "")]


@pytest.mark.parametrize("content", [b"<html>not found</html>", b"", KEY[:-2], armoured(b"abc"), b"\xc6\xff"])
def test_what_is_no_key_is_said_to_be_none(files, content):
    files.file("etc/apt/keyrings/k.asc", content)
    found = files.read(source="cuda_repo", keyring="/etc/apt/keyrings/k.asc", fingerprints=("AA",))
    assert codes(found) == ["apt_key_wrong"]


def test_key_that_is_not_there_yet_is_no_fault(files):
    assert files.read(source="cuda_repo", keyring="/etc/apt/keyrings/k.asc", fingerprints=("AA",)).faults == []


def test_the_toolkit_s_file_makes_way_for_the_driver_s(files):
    """Both roles name NVIDIA's archive, each with a key file of its own; the toolkit is content with the driver's."""
    files.source(
        "volta-llm-cuda.sources",
        f"Types: deb\nURIs: {CUDA}/ubuntu2204/x86_64/\nSuites: /\nSigned-By: /etc/apt/keyrings/volta-llm-cuda.asc\n",
    )
    found = files.read(source="cuda_repo", keyring="/etc/apt/keyrings/volta-llm-nvidia.asc")
    assert (found.faults, found.disable) == ([], ["/etc/apt/sources.list.d/volta-llm-cuda.sources"])
    found = files.read(source="distro")
    assert (found.faults, found.disable) == ([], [])
