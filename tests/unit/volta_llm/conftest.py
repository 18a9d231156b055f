# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A small checkout in a temporary folder, with a playbook per question; the runs in the tests are real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from volta_llm import ConvergeResult, Request, converge

#: Stands for the collection's modules: fails with the faults it is given, as `finish` does, or hands over an endpoint.
FAULTY = """
import json
from ansible.module_utils.basic import AnsibleModule

def main():
    module = AnsibleModule(argument_spec={
        "codes": {"type": "list", "elements": "str", "default": []},
        "fail": {"type": "bool", "default": True},
        "secret": {"type": "str", "no_log": True},
        "base_url": {"type": "str"},
    })
    faults = [
        {"code": code, "subject": "card 3", "message": f"{code} was found", "remedy": "mend it"}
        for code in module.params["codes"]
    ]
    if faults and module.params["fail"]:
        module.fail_json(msg="faults were found", faults=faults)
    module.exit_json(changed=False, faults=faults, base_url=module.params["base_url"])

main()
"""

HOSTS = f"""
all:
  hosts:
    one:
  vars:
    ansible_connection: local
    ansible_python_interpreter: {sys.executable}
"""


class Checkout:
    """A folder that looks like a checkout; ``play`` writes a playbook of one play, ``converge`` runs it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "ansible.cfg").write_text("[defaults]\nroles_path = roles\ninject_facts_as_vars = false\n")
        (root / "galaxy.yml").write_text("---\nnamespace: volta\nname: llm\n")
        (root / "library").mkdir()
        (root / "library" / "faulty.py").write_text(FAULTY)
        (root / "hosts.yml").write_text(HOSTS)

    def play(self, tasks: str, name: str = "site.yml") -> None:
        lines = "".join(f"    {line}\n" for line in tasks.strip("\n").splitlines())
        (self.root / name).write_text(f"- name: Try\n  hosts: all\n  gather_facts: false\n  tasks:\n{lines}")

    def role(self, name: str, tasks: str) -> None:
        folder = self.root / "roles" / name / "tasks"
        folder.mkdir(parents=True)
        (folder / "main.yml").write_text(tasks)

    def request(self, inventory: str = "hosts.yml", **fields: Any) -> Request:
        return Request(self.root, str(self.root / "site.yml"), (str(self.root / inventory),), **fields)

    def converge(self, inventory: str = "hosts.yml", twice: bool = False, **fields: Any) -> ConvergeResult:
        return converge(self.request(inventory, **fields), twice=twice)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    root.mkdir()
    return Checkout(root)


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Every test ends with nothing left in the folder for temporary files."""
    import tempfile

    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    yield lambda: sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == []
