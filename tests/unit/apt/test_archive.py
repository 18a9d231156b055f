# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""apt-cache's answers, as printed on Debian 12 with a pinned second archive."""

from __future__ import annotations

import json

from ansible_collections.volta.llm.plugins.module_utils.apt import archive
from ansible_collections.volta.llm.plugins.module_utils.machine import Machine

ASK = ["apt-cache", "-o", "Dir::Etc::preferences=/dev/null", "-o", "Dir::Etc::preferencesparts=/dev/null"]
FILES = """\
Package files:
 100 /var/lib/dpkg/status
     release a=now
 500 http://deb.debian.org/debian bookworm/non-free amd64 Packages
     release v=12.15,o=Debian,a=oldstable,n=bookworm,l=Debian,c=non-free,b=amd64
     origin deb.debian.org
 -10 https://archive.example/cuda/ubuntu2204/x86_64  Packages
     release o=NVIDIA,l=NVIDIA CUDA,c=
     origin archive.example
Pinned packages:
     nvidia-driver -> 550.163.01-2 with priority -1
"""
POLICY = """\
nvidia-smi:
  Installed: 535.183.01-1
  Candidate: 535.261.03-1
  Version table:
     550.163.01-2 -1
        -10 https://archive.example/cuda/ubuntu2204/x86_64  Packages
     535.261.03-1 1001
        500 http://deb.debian.org/debian bookworm/non-free amd64 Packages
 *** 535.183.01-1 100
        100 /var/lib/dpkg/status
nvidia-kernel-535.261.03:
  Installed: (none)
  Candidate: (none)
  Version table:
"""
SHOW = """\
Package: nvidia-smi
Source: nvidia-graphics-drivers
Version: 535.261.03-1
Architecture: amd64
Depends: nvidia-alternative (= 535.261.03-1), libnvidia-ml1 (= 535.261.03-1) | libnvidia-ml.so.1, libc6 (>= 2.34)

"""


def machine(tmp_path, answers):
    (tmp_path / "commands").mkdir()
    records = []
    for number, (argv, text) in enumerate(answers):
        (tmp_path / "commands" / f"{number}.out").write_text(text)
        records.append({"argv": argv, "rc": 0, "stdout": f"{number}.out"})
    (tmp_path / "commands/index.json").write_text(json.dumps(records))
    return Machine(str(tmp_path))


def test_versions_with_their_archives_whatever_the_pins_say(tmp_path):
    names = ["nvidia-smi", "nvidia-kernel-535.261.03"]
    answers = [
        ([*ASK, "policy"], FILES),
        ([*ASK, "show", *names], SHOW),
        ([*ASK, "policy", *names], POLICY),
    ]
    apt = archive.AptArchive(machine(tmp_path, answers))
    offers = apt.offers(names)
    assert offers["nvidia-kernel-535.261.03"] == []
    newest, middle, oldest = offers["nvidia-smi"]
    assert (newest.version, newest.releases) == ("550.163.01-2", (archive.Release("NVIDIA", "archive.example"),))
    assert middle.releases == (archive.Release("Debian", "deb.debian.org", "bookworm", "oldstable"),)
    assert middle.record.depends == (("nvidia-alternative",), ("libnvidia-ml1", "libnvidia-ml.so.1"), ("libc6",))
    assert (oldest.installed, oldest.releases, middle.installed) == (True, (), False)
    assert not apt.empty


def test_machine_without_package_lists(tmp_path):
    text = "Package files:\n 100 /var/lib/dpkg/status\n     release a=now\nPinned packages:\n"
    apt = archive.AptArchive(machine(tmp_path, [([*ASK, "policy"], text)]))
    assert apt.empty
    assert apt.versions("nvidia-smi") == []
