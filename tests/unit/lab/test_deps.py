# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Missing packages of the operating system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import deps
from tests.lab.errors import LabError


def test_everything_is_missing_on_a_bare_host() -> None:
    absent = deps.missing(has_program=lambda name: False, has_file=lambda path: False)

    assert [need.package for need in absent] == [need.package for need in deps.NEEDS]
    assert {"podman", "crun", "netavark", "iptables", "mmdebstrap", "openssh-client"} <= {n.package for n in absent}


def test_nothing_is_missing_when_all_is_there() -> None:
    assert deps.missing(has_program=lambda name: True, has_file=lambda path: True) == []


def test_a_program_in_another_place_counts() -> None:
    absent = deps.missing(has_program=lambda name: True, has_file=lambda path: path == "/usr/libexec/podman/netavark")

    assert "netavark" not in [need.package for need in absent]
    assert "conmon" in [need.package for need in absent]


def test_a_module_of_this_python_counts() -> None:
    venv = [need for need in deps.DEVELOPMENT if need.package == "python3-venv"]

    assert deps.missing(tuple(venv), has_file=lambda path: False, has_module=lambda name: name == "ensurepip") == []
    assert deps.missing(tuple(venv), has_file=lambda path: False, has_module=lambda name: False) == venv


@pytest.mark.parametrize(
    ("text", "version"), [("podman version 4.3.1", (4, 3)), ("podman version 5.4.2-dev", (5, 4)), ("what", None)]
)
def test_podman_version(text: str, version: tuple[int, int] | None) -> None:
    assert deps.podman_version(text) == version


def test_old_podman_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deps, "missing", lambda: [])
    monkeypatch.setattr(deps, "output", lambda command: "podman version 3.4.4")

    with pytest.raises(LabError, match=r"podman 3\.4 is too old: the lab needs 4\.0"):
        deps.require()


def test_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deps, "missing", lambda: list(deps.NEEDS[:2]))

    with pytest.raises(LabError, match=r"podman \(runs the machines\), crun .*deps --install"):
        deps.require()


def test_the_command_line_starts_on_a_python_with_nothing_installed() -> None:
    code = "import sys; sys.modules['yaml'] = None; from tests.lab.cli import main; sys.exit(main(['deps', '--help']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
