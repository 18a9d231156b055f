# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The inventory file that `up` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.lab import inventory, ssh
from tests.lab.errors import LabError


def render(**changes: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "key": Path("/s/demo/id_ed25519"),
        "known_hosts": Path("/s/demo/known_hosts"),
        "sockets": Path("/s/demo/cp"),
        **changes,
    }
    text = inventory.render("demo", {"demo-1": "10.213.1.11", "demo-2": "10.213.1.12"}, **arguments)  # type: ignore[arg-type]
    assert text.startswith("---\n# Written by")
    loaded: dict[str, dict[str, object]] = yaml.safe_load(text)
    assert list(loaded) == ["gpu_servers"]
    return loaded["gpu_servers"]


def test_hosts_and_connection() -> None:
    group = render()

    assert group["hosts"] == {"demo-1": {"ansible_host": "10.213.1.11"}, "demo-2": {"ansible_host": "10.213.1.12"}}
    variables = group["vars"]
    assert isinstance(variables, dict)
    assert variables["ansible_user"] == "root"
    assert variables["ansible_ssh_private_key_file"] == "/s/demo/id_ed25519"
    assert "UserKnownHostsFile=/s/demo/known_hosts" in variables["ansible_ssh_common_args"]
    assert "StrictHostKeyChecking=yes" in variables["ansible_ssh_common_args"]
    assert variables["ansible_control_path_dir"] == "/s/demo/cp"


def test_variables_are_added() -> None:
    variables = render(variables={"__volta_sysroot": "/x", "n": 2})["vars"]

    assert isinstance(variables, dict)
    assert variables["__volta_sysroot"] == "/x"
    assert variables["n"] == 2


def test_socket_folder_too_long_for_a_socket_is_left_to_ansible() -> None:
    variables = render(sockets=Path("/" + "x" * 90))["vars"]

    assert isinstance(variables, dict)
    assert "ansible_control_path_dir" not in variables


def test_variables_from_the_command_line() -> None:
    assert inventory.parse_variables(["a=1", "b=true", "c=http://h:1/x?y=z", "d="]) == {
        "a": 1,
        "b": True,
        "c": "http://h:1/x?y=z",
        "d": None,
    }


@pytest.mark.parametrize("pair", ["novalue", "=1", "a-b=1", "x={"])
def test_bad_variables(pair: str) -> None:
    with pytest.raises(LabError, match="--var"):
        inventory.parse_variables([pair])


def test_known_hosts() -> None:
    text = ssh.known_hosts_text({"10.213.1.12": "ssh-ed25519 BBBB two", "10.213.1.11": "ssh-ed25519 AAAA one"})

    assert text == "10.213.1.11 ssh-ed25519 AAAA\n10.213.1.12 ssh-ed25519 BBBB\n"
