# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which files beside a unit stand against its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.serving.dropins import overridden

UNIT = "[Unit]\nAfter=a.service\n[Service]\nUser=x\nExecStart=/bin/new\nNoNewPrivileges=yes\n"


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("[Service]\nExecStart=\nExecStart=/bin/sleep inf\n", "ExecStart"),
        ("[Service]\n  NoNewPrivileges = no\n", "NoNewPrivileges"),
        # The unit sets none, and the engine reads LLAMA_ARG_...
        ("[Service]\nEnvironment=LLAMA_ARG_CTX_SIZE=1\nUser=root\n", "Environment, User"),
        ("[Service]\nExecStartPre=/bin/false \\\n  --more\n", "ExecStartPre"),
    ],
)
def test_what_changes_the_unit(tmp_path: Path, text: str, keys: str) -> None:
    path = tmp_path / "x.service.d/override.conf"
    path.parent.mkdir()
    path.write_text(text)
    (fault,) = overridden("x.service", UNIT, [str(path)])
    assert (fault.code, fault.subject) == ("unit_overridden", str(path))
    assert fault.message.startswith(f"sets {keys} of x.service")


@pytest.mark.parametrize(
    "text",
    ["", "[Service]\nLimitNOFILE=1\n# User=root\n; User=root\n", "[Unit]\nAfter=b.service\n", "Nice=1 \\\nUser=root\n"],
)
def test_what_only_adds(tmp_path: Path, text: str) -> None:
    path = tmp_path / "10.conf"
    path.write_text(text)
    assert overridden("x.service", UNIT, [str(path), "/no/such/file"]) == []


def test_a_container_may_relax_the_hardening_of_all_services(tmp_path: Path) -> None:
    path = tmp_path / "service.d/zzz-lxc-service.conf"
    path.parent.mkdir()
    path.write_text("[Service]\nNoNewPrivileges=no\n")
    assert overridden("x.service", UNIT, [str(path)]) == []
    path.write_text("[Service]\nExecStart=/bin/sleep inf\n")
    assert len(overridden("x.service", UNIT, [str(path)])) == 1
