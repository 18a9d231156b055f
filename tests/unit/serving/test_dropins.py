# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which files beside a unit stand against its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.serving.dropins import lines_of, overridden

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


# --- settings that are a drop-in themselves ---------------------------------------------------------------------------

OURS = '[Unit]\nAfter=a.service\n[Service]\nUser=x\nEnvironment="OLLAMA_HOST=127.0.0.1:11434" CUDA_VISIBLE_DEVICES=0\n'


def against_ours(path: Path, text: str) -> list[str]:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return [fault.message for fault in overridden("x.service", OURS, [str(path)], ours="50-volta.conf")]


def test_a_forgotten_line_in_a_later_file_wins_and_is_named(tmp_path: Path) -> None:
    """F12 ollama/ollama#9722."""
    text = '[Service]\n# of last year\nEnvironment="HTTPS_PROXY=http://p:1" "CUDA_VISIBLE_DEVICES=1"\n'
    (message,) = against_ours(tmp_path / "override.conf", text)
    assert message == "sets CUDA_VISIBLE_DEVICES of x.service otherwise than the settings do (line 3)"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        # What an earlier file sets is set again by ours.
        ("10-local.conf", "[Service]\nUser=root\nEnvironment=OLLAMA_HOST=0.0.0.0\n", ""),
        ("10-local.conf", "[Service]\nEnvironment=OLLAMA_NUM_GPU=4\n", "OLLAMA_NUM_GPU"),
        ("10-local.conf", "[Service]\nEnvironmentFile=/etc/default/x\n", "EnvironmentFile"),
        ("override.conf", "[Service]\nUser=root\n", "User"),
        ("override.conf", "[Service]\nEnvironment=HTTPS_PROXY=http://p:1 \\\n  OLLAMA_HOST=0.0.0.0\n", "OLLAMA_HOST"),
        # A proxy is the owner's business, and a quote that is not closed is nothing to systemd.
        ("override.conf", '[Service]\nEnvironment=HTTPS_PROXY=http://p:1\nEnvironment="OLLAMA_HOST=1\n', ""),
        ("override.conf", "[Unit]\nAfter=b.service\n", ""),
    ],
)
def test_the_order_of_names_decides(tmp_path: Path, name: str, text: str, found: str) -> None:
    messages = against_ours(tmp_path / name, text)
    assert [message.split(" of ")[0] for message in messages] == ([f"sets {found}"] if found else [])


def test_a_line_that_goes_on_has_the_number_of_its_first() -> None:
    lines = list(lines_of("[Service]\nA=1 \\\n  2\n\n# C=3\nB = 4\n"))
    assert [(line.number, line.key, line.value) for line in lines] == [(2, "A", "1    2"), (6, "B", "4")]
