# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the preferences bind, by apt's own rule: the first stanza that matches a version gives its priority.

a06 is NVIDIA/NemoClaw#8207: a version on the meta package binds nothing of what it depends on.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
from ansible_collections.volta.llm.plugins.module_utils.apt import pins


def matches_name(pattern: str, name: str) -> bool:
    """Whether a pattern of the preferences means a package name, as apt reads it; source patterns never do."""
    return not pattern.startswith("src:") and fnmatchcase(name, pattern)


def matches_version(pin: str, version: str, origin: str) -> bool:
    kind, _, data = pin.partition(" ")
    if kind == "release":
        return origin in re.findall(r"o=([^,]+)", data)
    if kind == "origin":
        return data.strip('"') == origin
    if data.startswith("/"):
        return re.search(data.strip("/"), version) is not None
    return data == "*" or (data.endswith("*") and version.startswith(data[:-1])) or version == data


def priority(stanzas, name: str, version: str, origin: str = "Ubuntu", source: str = "") -> int:
    for stanza in stanzas:
        named = any(pattern == f"src:{source}" or matches_name(pattern, name) for pattern in stanza.packages)
        if named and matches_version(stanza.pin, version, origin):
            return stanza.priority
    return 500


def bound(branch="535", **options):
    return pins.stanzas(
        branch, (f"nvidia-graphics-drivers-{branch}-server",), options.pop("origin", "release o=Ubuntu"), **options
    )


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("libnvidia-compute-535-server", "535.261.03-0ubuntu0.22.04.1", 1001),
        # a06: a newer library in the archive, of the same name, of another branch
        ("libnvidia-compute-535-server", "570.133.20-0ubuntu0.22.04.1", -1),
        ("libnvidia-compute-570", "570.133.20-0ubuntu0.22.04.1", -1),
        ("libnvidia-compute-545", "550.120-0ubuntu0.22.04.1", -1),
        ("libnvidia-compute", "590.44.01-1ubuntu1", -1),
        ("nvidia-driver", "590.44.01-1ubuntu1", -1),
        ("nvidia-driver", "535.261.03-1", 1001),
        ("nvidia-driver-570-server", "570.133.20-0ubuntu0.22.04.1", -1),
        ("nvidia-driver-580-open", "580.82.07-0ubuntu0.22.04.1", -1),
        ("nvidia-firmware-570-570.133.07", "570.133.07-0ubuntu0.22.04.1", -1),
        ("nvidia-driver-535-server-open", "535.261.03-0ubuntu0.22.04.1", -1),
        ("linux-modules-nvidia-535-server-open-5.15.0-139-generic", "5.15.0-139.149", -1),
        ("libcuda1", "550.163.01-2", -1),
        ("libnvidia-tesla-470-cuda1", "470.256.02-1", -1),
        # the kernel's own number is no branch
        ("linux-modules-nvidia-535-server-5.15.0-139-generic", "5.15.0-139.149", 500),
        ("linux-signatures-nvidia-5.15.0-139-generic", "5.15.0-139.149", 500),
        # innocent
        ("nvidia-container-toolkit", "1.17.8-1", 500),
        ("libnvidia-container1", "1.17.8-1", 500),
        ("nvidia-cuda-toolkit", "11.5.1-1ubuntu1", 500),
        ("cuda-toolkit-12-2", "12.2.2-1", 500),
        ("nvidia-modprobe", "590.44.01-1", 500),
        ("nvidia-persistenced", "550.163.01-1", 500),
        ("nvidia-settings", "510.47.03-0ubuntu1", 500),
        ("libnvidia-egl-wayland1", "1:1.1.9-1.1", 500),
        ("nvidia-openjdk-8-jre", "9.+8u372", 500),
        ("nvidia-prime", "0.8.17.1", 500),
        ("nvtop", "1.2.2-1", 500),
        ("linux-image-generic", "5.15.0.139.135", 500),
    ],
)
def test_a06_what_is_bound_and_what_is_not(name, version, expected):
    assert priority(bound(), name, version) == expected


def test_same_branch_from_another_archive_is_not_taken():
    stanzas = bound(origin='origin "developer.download.nvidia.com"')
    assert priority(stanzas, "nvidia-driver-535", "535.261.03-0ubuntu1", "developer.download.nvidia.com") == 1001
    assert priority(stanzas, "nvidia-driver-535", "535.288.01-0ubuntu0.22.04.1", "Ubuntu") == -1


def test_one_version_binds_all_others_away():
    """Revisions count: 550.163.01-0ubuntu0.22.04.2 points to another branch, .1 does not (pop-os/pop#3549)."""
    stanzas = bound(version="535.183.01-0ubuntu0.22.04.1")
    assert priority(stanzas, "nvidia-utils-535-server", "535.183.01-0ubuntu0.22.04.1") == 1001
    assert priority(stanzas, "nvidia-utils-535-server", "535.183.01-0ubuntu0.22.04.2") == -1
    assert priority(stanzas, "nvidia-utils-535-server", "535.261.03-0ubuntu0.22.04.1") == -1
    assert priority(stanzas, "nvidia-fabricmanager-535", "535.183.01-1") == 1001
    assert priority(stanzas, "nvidia-fabricmanager-535", "535.261.03-1") == -1
    assert priority(stanzas, "nvidia-driver-570", "570.133.07-0ubuntu0.22.04.1") == -1
    assert priority(stanzas, "nvidia-modprobe", "590.44.01-1") == 500


@pytest.mark.parametrize("branch", ["535", "550", "570", "580"])
def test_every_other_number_is_another_branch(branch):
    patterns = pins.other_numbers(branch)
    for number in range(300, 700):
        hits = [pattern for pattern in patterns if matches_name(pattern, str(number))]
        assert bool(hits) == (str(number) != branch), number


def test_source_packages_bind_what_no_name_lists():
    stanzas = bound()
    source = "nvidia-graphics-drivers-535-server"
    assert priority(stanzas, "libnvidia-new-thing", "570.1", source=source) == -1
    assert priority(stanzas, "libnvidia-new-thing", "535.1", source=source) == 1001


def test_companions_come_first_and_another_packaging_is_shut_out():
    stanzas = bound(companions=("nvidia-egl-common",), companions_pin="release o=Ubuntu", other_sources=("other",))
    assert priority(stanzas, "nvidia-egl-common", "550.163.01-2") == 500
    assert priority(stanzas, "nvidia-smi", "535.216.03-3", source="other") == -1


def test_file_has_no_regular_expression_for_names():
    """apt takes seconds for each of them, for every command (measured)."""
    text = pins.preferences("535", bound())
    names = re.findall(r"(?m)^Package: (.*)$", text)
    assert names
    assert not any("/" in line for line in names)
    assert text.count("*") < 40
