# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The lab's archive: what apt makes of it, with Ubuntu's traps where Ubuntu has them."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.nvidia import modinfo

from tests.lab.paths import Paths
from tests.lab.repository import archive, claims, deb, payload, ubuntu

#: Packages of Debian's archive that the lab's packages name, as a server has them.
PRESENT = {"adduser": "3.134", "coreutils": "9.1", "dkms": "3.0.10", "kmod": "30", "libc6": "2.36", "libelf1": "0.188",
           "linux-base": "4.9", "openssl": "3.0", "initramfs-tools": "0.142"}  # fmt: skip
needs_apt = pytest.mark.skipif(
    shutil.which("apt-get") is None or shutil.which("gpg") is None, reason="apt-get and gpg are not on this machine"
)


@dataclasses.dataclass
class Apt:
    """apt with a root of its own: a server on which nothing of the archive is installed but what ``have`` names."""

    root: Path
    archive: archive.Archive

    def use(self, *suites: str, cuda: str | None = None) -> Apt:
        lines = [
            f"deb [signed-by={self.key('ubuntu')} arch=amd64] file:{self.archive.root}/ubuntu {suite} "
            f"{' '.join(ubuntu.COMPONENTS)}\n"
            for suite in suites
        ]
        if cuda:
            lines.append(f"deb [signed-by={self.key('nvidia')} arch=amd64] file:{self.archive.root}/{cuda} /\n")
        (self.root / "sources.list").write_text("".join(lines))
        self.have()
        self.call("update")
        return self

    def key(self, name: str) -> Path:
        return self.archive.root / f"keys/{name}.gpg"

    def have(self, *installed: str) -> None:
        """Pretend that packages are installed, with the control data of the suites in use (the first that has them)."""
        text = "".join(
            f"Package: {name}\nStatus: install ok installed\nVersion: {version}\nArchitecture: amd64\n"
            f"Maintainer: x\nDescription: x\n\n"
            for name, version in PRESENT.items()
        )
        for name in installed:
            package, _, version = name.partition("=")
            shown = self.call("show", name, program="apt-cache").split("\n\n")[0]
            assert f"Package: {package}\n" in shown
            assert not version or f"Version: {version}\n" in shown
            kept = [line for line in shown.splitlines() if not re.match(r"(Filename|Size|SHA256):", line)]
            text += "\n".join([kept[0], "Status: install ok installed", *kept[1:]]) + "\n\n"
        (self.root / "status").write_text(text)

    def call(self, *words: str, program: str = "apt-get") -> str:
        options = {
            "Dir::State": self.root / "state", "Dir::State::status": self.root / "status",
            "Dir::Cache": self.root / "cache", "Dir::Etc": self.root / "etc",
            "Dir::Etc::sourcelist": self.root / "sources.list", "Dir::Etc::sourceparts": "-",
            "Dir::Log": self.root, "APT::Architecture": "amd64", "APT::Architectures::": "amd64",
            "APT::Sandbox::User": "", "Acquire::Languages": "none", "Debug::NoLocking": "true",
        }  # fmt: skip
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        done = subprocess.run(
            [program, *given, *words], capture_output=True, text=True, check=False,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "W:" not in done.stderr, done.stderr
        return done.stdout

    def simulate(self, *words: str) -> tuple[dict[str, str], set[str]]:
        """(version by installed package, removed packages)."""
        out = self.call("--simulate", "--no-install-recommends", *words)
        installed = dict(re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", out, re.M))
        return installed, set(re.findall(r"^Remv (\S+)", out, re.M))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> archive.Archive:
    # The whole name of a socket of gpg must be short.
    folder = tmp_path_factory.mktemp("lab")
    return archive.ensure(Paths(folder / "cache", folder / "state"), ubuntu.suites())


@pytest.fixture
def apt(finished, tmp_path) -> Apt:
    for name in ("state/lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d"):
        (tmp_path / name).mkdir(parents=True)
    return Apt(tmp_path, finished)


def branches(names: dict[str, str]) -> set[str]:
    """Driver branches by the names of packages."""
    return {match[1] for name in names if (match := re.search(r"nvidia-\S*?-(\d{3})\b", name))}


FLAVOURS = sorted({driver.flavour for driver in ubuntu.DRIVERS if driver.becomes is None})


@needs_apt
@pytest.mark.parametrize("codename", sorted(ubuntu.RELEASES))
def test_every_driver_and_kernel_installs(apt, codename):
    for suites in ([codename], [codename, f"{codename}-updates", f"{codename}-security"]):
        apt.use(*suites)
        updated = len(suites) > 1
        for flavour in FLAVOURS:
            if updated and flavour == "550-server":
                continue
            for wanted in (
                [f"nvidia-driver-{flavour}"],
                [f"nvidia-driver-{flavour}-open"],
                [f"nvidia-headless-{flavour}", f"nvidia-utils-{flavour}"],
            ):
                installed, removed = apt.simulate("install", *wanted)
                assert branches(installed) == {flavour.split("-")[0]}
                assert removed == set()
        for name in ("linux-generic", "linux-virtual", f"linux-generic-hwe-{ubuntu.RELEASES[codename].number}"):
            installed, _ = apt.simulate("install", name)
            assert [name for name in installed if name.startswith("linux-image-") and name.endswith("-generic")]
            extra = any(name.startswith("linux-modules-extra") for name in installed)
            assert extra is (name != "linux-virtual")


@needs_apt
def test_a_revision_of_550_server_brings_570(apt):
    installed, _ = apt.use("jammy").simulate("install", "nvidia-driver-550-server")
    assert (installed["nvidia-driver-550-server"], branches(installed)) == ("550.163.01-0ubuntu0.22.04.1", {"550"})

    installed, _ = apt.use("jammy", "jammy-updates").simulate("install", "nvidia-driver-550-server")
    assert installed["nvidia-driver-550-server"] == "550.163.01-0ubuntu0.22.04.2"
    assert branches(installed) == {"550", "570"}
    # The older revision is still there for who asks for it by version.
    pinned = "0ubuntu0.22.04.1"
    names = [
        name for name in apt.use("jammy").simulate("install", "nvidia-driver-550-server")[0] if "-550-server" in name
    ]
    apt.use("jammy", "jammy-updates")
    installed, _ = apt.simulate("install", *(f"{name}=550.163.01-{pinned}" for name in names if "firmware" not in name))
    assert branches(installed) == {"550"}


@needs_apt
def test_an_older_revision_of_535_is_in_the_index(apt):
    shown = apt.use("jammy", "jammy-updates").call("madison", "nvidia-driver-535-server", program="apt-cache")
    versions = re.findall(r"\| (\S+)-0ubuntu0.22.04.1 \|", shown)
    assert versions == ["535.288.01", "535.261.03", "535.183.01"]


@needs_apt
def test_the_day_535_is_given_up(apt):
    installed, _ = apt.use("jammy", "jammy-updates", "jammy-transition").simulate(
        "install", "nvidia-headless-535-server"
    )
    assert branches(installed) == {"535", "580"}

    apt.use("jammy-dropped")
    assert apt.call("pkgnames", "nvidia-driver-535", program="apt-cache") == ""
    assert branches(apt.simulate("install", "nvidia-driver-550")[0]) == {"550"}


@needs_apt
def test_nvtop_swaps_the_library(apt):
    apt.use("jammy")
    apt.have(*apt.simulate("install", "nvidia-headless-535", "nvidia-utils-535")[0])

    installed, removed = apt.simulate("install", "nvtop")

    assert set(installed) == {"nvtop", "libnvidia-compute-545", "libnvidia-compute-550"}
    assert {"libnvidia-compute-535", "nvidia-utils-535", "nvidia-headless-535"} <= removed


@needs_apt
def test_prebuilt_modules_stand_for_dkms_when_they_are_named_together(apt):
    apt.use("jammy")
    headless = ["nvidia-headless-535-server", "nvidia-utils-535-server"]
    assert "nvidia-dkms-535-server" in apt.simulate("install", *headless)[0]

    installed, _ = apt.simulate("install", *headless, "linux-modules-nvidia-535-server-generic")

    assert "nvidia-dkms-535-server" not in installed
    assert "linux-modules-nvidia-535-server-5.15.0-139-generic" in installed


@needs_apt
def test_held_kernels_keep_modules_of_the_newer_driver(apt):
    """The modules of a kernel that is older than the driver were built again for it."""
    apt.use("jammy", "jammy-updates")
    installed, _ = apt.simulate("install", "linux-modules-nvidia-535-server-5.15.0-139-generic")
    assert installed["linux-modules-nvidia-535-server-5.15.0-139-generic"] == "5.15.0-139.149+1"
    assert installed["nvidia-kernel-common-535-server"] == "535.288.01-0ubuntu0.22.04.1"


@needs_apt
def test_updates_move_kernel_and_driver(apt):
    apt.use("jammy")
    before = {**apt.simulate("install", "linux-generic")[0], **apt.simulate("install", "nvidia-driver-535")[0]}
    apt.use("jammy", "jammy-updates", "jammy-security")
    apt.have(*(f"{name}={version}" for name, version in before.items()))

    installed, removed = apt.simulate("dist-upgrade")

    assert "linux-image-5.15.0-151-generic" in installed
    assert installed["linux-generic"] == "5.15.0.151.147"
    assert installed["libnvidia-compute-535"] == "535.288.01-0ubuntu0.22.04.1"
    # The name of the firmware's package has the version in it.
    assert removed <= {"nvidia-firmware-535-535.261.03"}


@needs_apt
def test_nvidias_archive(apt):
    apt.use("jammy", cuda="cuda/ubuntu2204/x86_64")
    installed, _ = apt.simulate("install", "cuda-drivers-535")
    assert installed["nvidia-driver-535"] == "535.261.03-0ubuntu1"

    installed, _ = apt.simulate("install", "cuda-drivers")
    assert installed["libnvidia-compute"] == "590.44.01-1ubuntu1"
    assert "nvidia-driver" in installed
    assert branches(installed) == set()


@needs_apt
def test_two_archives_with_the_same_names(apt):
    """What Ubuntu's archive installed, an upgrade takes from NVIDIA's: its versions are higher."""
    before = apt.use("jammy").simulate("install", "nvidia-driver-535")[0]
    apt.use("jammy", cuda="cuda/ubuntu2204/x86_64")
    apt.have(*(f"{name}={version}" for name, version in before.items()))

    installed, removed = apt.simulate("dist-upgrade")

    assert (installed["libnvidia-compute-535"], removed) == ("535.261.03-0ubuntu1", set())


@needs_apt
def test_a_changed_index_is_not_trusted(apt):
    apt.use("jammy")
    copy = apt.root / "copy"
    shutil.copytree(apt.archive.root, copy)
    release = copy / "ubuntu/dists/jammy/InRelease"
    release.write_text(release.read_text().replace("Origin: Ubuntu", "Origin: Ubuntv"))
    broken = Apt(apt.root, dataclasses.replace(apt.archive, root=copy))
    with pytest.raises(AssertionError, match=r"invalid|BADSIG"):
        broken.use("jammy")


def test_source_packages_tell_the_branch():
    """The branch of a transitional package is that of its source, as in Ubuntu (nvidia-dkms-530 of ...-535)."""
    found = {package.name: package for package in ubuntu.packages(ubuntu.RELEASES["jammy"], ubuntu.BASE)}
    assert found["nvidia-dkms-530"].source == "nvidia-graphics-drivers-535"
    assert found["nvidia-dkms-535-server-open"].source == "nvidia-graphics-drivers-535-server"
    assert found["linux-image-5.15.0-139-generic"].source == "linux-signed (5.15.0-139.149)"
    assert found["linux-headers-6.8.0-59-generic"].relations["Depends"].startswith("linux-hwe-6.8-headers-6.8.0-59,")


def test_no_package_is_in_a_suite_twice():
    for suite in ubuntu.suites():
        keys = [package.key for package in suite.packages]
        assert len(keys) == len(set(keys)), suite.path


def test_the_same_input_has_the_same_digest_and_bytes():
    release = ubuntu.RELEASES["jammy"]
    first, second = (list(ubuntu.kernels(release, ubuntu.BASE)) for _ in range(2))
    assert archive.digest_of_packages(first) == archive.digest_of_packages(second)
    assert [deb.build(package) for package in first] == [deb.build(package) for package in second]
    changed = dataclasses.replace(first[0], scripts={"postinst": "#!/bin/sh\n"})
    assert archive.digest_of_packages([changed, *first[1:]]) != archive.digest_of_packages(first)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not on this machine")
def test_dpkg_reads_the_packages(tmp_path):
    package = deb.Package(
        "a-b", "1:2-3", "src", "restricted/libs", "words", relations={"Depends": "c"}, conffiles=("/etc/a",),
        files={"/usr/bin/x": deb.text("#!/bin/sh\n", 0o4755), "/usr/lib/l.so.1": deb.link("l.so"),
               "/etc/a": deb.text("1\n")},
        scripts={"postinst": "#!/bin/sh\n"},
    )  # fmt: skip
    path = tmp_path / package.file_name
    path.write_bytes(deb.build(package))
    fields = subprocess.run(["dpkg-deb", "--field", path], capture_output=True, text=True, check=True).stdout
    assert fields.startswith("Package: a-b\nSource: src\nVersion: 1:2-3\n")
    assert "Section: restricted/libs" in fields
    subprocess.run(["dpkg-deb", "--extract", path, tmp_path / "x"], check=True)
    assert (tmp_path / "x/usr/bin/x").stat().st_mode & 0o7777 == 0o4755
    assert (tmp_path / "x/usr/lib/l.so.1").readlink() == Path("l.so")
    listed = subprocess.run(["dpkg-deb", "--contents", path], capture_output=True, text=True, check=True).stdout
    assert listed.splitlines()[0].endswith(" ./etc/")
    assert "root/root" in listed


def test_a_module_says_what_the_plugins_read(tmp_path):
    data = payload.module("nvidia-uvm", "535.261.03", "NVIDIA", "5.15.0-139-generic", depends=("nvidia",))
    found = modinfo.parse_image(data + payload.signature())
    assert (found["version"], found["license"], found["depends"]) == ("535.261.03", "NVIDIA", "nvidia")
    assert (found["signed"], found["vermagic"].split()[0]) == ("yes", "5.15.0-139-generic")
    assert found["signer"] == "Canonical Ltd. Kernel Module Signing"
    unsigned = modinfo.parse_image(data)
    assert (unsigned["signed"], "signer" in unsigned) == ("", False)


def test_the_build_step_writes_the_modules_of_its_kernel(tmp_path):
    for path, item in payload.dkms_source("nvidia-srv", "535.183.01", False).items():
        (tmp_path / Path(path).name).write_bytes(item.data)
    build = ["python3", "build.py"]
    done = subprocess.run([*build, "5.15.0-139-generic"], cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert modinfo.read_file(tmp_path / "nvidia-drm.ko")["version"] == "535.183.01"
    assert {path.stem for path in tmp_path.glob("*.ko")} == set(payload.NVIDIA_MODULES)

    done = subprocess.run([*build, "6.14.0-24-generic"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error:" in done.stdout


@pytest.mark.parametrize("claim", sorted(claims.CLAIMS))
def test_a_claim_is_one_release_everywhere(claim):
    files = claims.files(claim)
    release = ubuntu.RELEASES[claims.CLAIMS[claim]]
    assert f'VERSION_ID="{release.number}"' in files["/etc/os-release"]
    assert f"DISTRIB_CODENAME={release.codename}" in files["/etc/lsb-release"]
    assert f"Suites: {release.codename}\n" in claims.sources(claim, "http://x")
    assert set(claims.EXECUTABLE) <= set(files)
    for path in claims.EXECUTABLE:
        done = subprocess.run(["sh", "-n"], input=files[path], text=True, capture_output=True, check=False)
        assert done.returncode == 0, (path, done.stderr)
