# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The connection details of a lab's machines, as an inventory file for Ansible.

PyYAML is imported where it is used: `make os-packages` runs this package with a Python that has nothing installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.errors import LabError

GROUP = "gpu_servers"
#: Unix socket paths end at 108 bytes; ssh adds up to this many to the folder's name while it makes one.
SOCKET_ROOM = 108 - 32


def render(
    lab: str,
    hosts: Mapping[str, str],
    *,
    key: Path,
    known_hosts: Path,
    sockets: Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The inventory's text. ``hosts``: address by machine name; ``variables`` are added to the group's."""
    import yaml

    group_vars: dict[str, Any] = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": (
            f"-F none -o UserKnownHostsFile={known_hosts} -o GlobalKnownHostsFile=/dev/null"
            " -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes -o UpdateHostKeys=no"
        ),
    }
    if sockets is not None and len(str(sockets)) <= SOCKET_ROOM:
        group_vars["ansible_control_path_dir"] = str(sockets)
    group_vars.update(variables or {})
    content = {
        GROUP: {
            "hosts": {name: {"ansible_host": address} for name, address in hosts.items()},
            "vars": group_vars,
        }
    }
    head = f"---\n# Written by `python -m tests.lab up {lab}`, removed by `python -m tests.lab down {lab}`.\n"
    return head + str(yaml.safe_dump(content, sort_keys=False, width=1000))


def parse_variables(pairs: Sequence[str]) -> dict[str, Any]:
    """``name=value`` pairs as variables; a value is read as YAML, so 2 is a number and true a boolean."""
    import yaml

    variables: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name.isidentifier():
            raise LabError(
                f"--var {pair}: write it as name=value, for example --var model_url=http://10.213.1.1:8800/m"
            )
        try:
            variables[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise LabError(f"--var {name}: the value is not valid YAML: {error}") from error
    return variables
