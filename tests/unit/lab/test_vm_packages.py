# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The stand-in driver's packages: names and versions of Debian, and what DKMS is given."""

from __future__ import annotations

import re

from tests.lab import vm_packages

VERSION = "535.261.03"
PACKAGES = {package.name: package for package in vm_packages.packages(VERSION)}


def test_what_the_driver_needs_is_of_its_own_version() -> None:
    assert set(PACKAGES) == {"nvidia-driver", "nvidia-kernel-dkms", "libnvidia-ml1"}
    assert {package.version for package in PACKAGES.values()} == {"535.261.03-1~deb12u1"}
    wanted = PACKAGES["nvidia-driver"].relations["Depends"]
    assert re.findall(r"(\S+) \(= ([^)]+)\)", wanted) == [
        ("nvidia-kernel-dkms", "535.261.03-1~deb12u1"),
        ("libnvidia-ml1", "535.261.03-1~deb12u1"),
    ]


def test_dkms_gets_the_sources_of_every_module_it_is_to_build() -> None:
    folder = f"/usr/src/nvidia-current-{VERSION}"
    files = {
        path.removeprefix(f"{folder}/"): file.data.decode()
        for path, file in PACKAGES["nvidia-kernel-dkms"].files.items()
    }
    modules = re.findall(r'^BUILT_MODULE_NAME\[\d+\]="(.+)"$', files["dkms.conf"], re.MULTILINE)
    assert modules == ["nvidia", "nvidia-modeset", "nvidia-drm", "nvidia-uvm"]
    for module in modules:
        assert f"{module}.c" in files
        assert f"{module}.o" in files["Kbuild"]
    assert f"LAB_VERSION={VERSION}" in files["dkms.conf"]


def test_two_versions_do_not_share_a_file_but_for_links_and_the_list_of_modules() -> None:
    other = {package.name: package for package in vm_packages.packages("535.288.01")}
    source = set(PACKAGES["nvidia-kernel-dkms"].files) & set(other["nvidia-kernel-dkms"].files)
    assert source == set()
