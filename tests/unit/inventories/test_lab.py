# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The inventory that an operator edits: its variables exist, its instructions work, no placeholder becomes a secret."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
LAB = ROOT / "inventories" / "lab"
VARS = LAB / "group_vars" / "gpu_servers"
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if (path / "defaults" / "main.yml").is_file())


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def uncommented(text: str) -> str:
    """A commented-out block as it reads once the operator took the # away: lines that are YAML, not prose."""
    lines = [line[2:] for line in text.splitlines() if re.match(r"# (vault_\w+:|  - )", line)]
    return "\n".join(lines)


FILES = sorted(path for path in VARS.glob("*.yml") if path.name != "vault.yml")


def test_there_is_one_machine_and_its_address_is_to_be_edited() -> None:
    hosts = load(LAB / "hosts.yml")["gpu_servers"]["hosts"]

    assert list(hosts) == ["v100-1"]
    # Reserved by RFC 2606: it resolves nowhere, so a run before the edit reaches nobody else's machine.
    assert hosts["v100-1"]["ansible_host"].endswith(".invalid")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_variable_is_known_to_its_role(path: Path) -> None:
    for name in load(path):
        if name.startswith("ansible_"):
            continue
        if name.startswith("volta_"):
            # What spans roles is read by the playbooks.
            assert any(name in play.read_text(encoding="utf-8") for play in (ROOT / "playbooks").glob("*.yml")), name
            continue
        owners = [role for role in ROLES if name.startswith(f"{role}_")]
        assert owners, f"{path.name}: no role has {name}"
        assert name in load(ROOT / "roles" / max(owners, key=len) / "defaults" / "main.yml"), name


def test_no_variable_is_set_twice() -> None:
    names = [name for path in FILES for name in load(path)]

    assert sorted(set(names)) == sorted(names)


def test_the_example_vault_sets_nothing_until_it_is_edited() -> None:
    example = VARS / "vault.example.yml"

    assert load(example) == {}
    edited = yaml.safe_load(uncommented(example.read_text(encoding="utf-8")))
    used = set(re.findall(r"\bvault_\w+", "".join(path.read_text() for path in FILES if path != example)))
    assert set(edited) == used


def test_shards_without_hashes_are_refused_before_anything_is_fetched() -> None:
    # The hub is declared unreachable: else the first run would lock what it says.
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            "playbooks/model_start.yml",
            "--inventory=inventories/lab",
            "--extra-vars=ansible_connection=local ansible_become=false",
            f"--extra-vars=ansible_python_interpreter={sys.executable}",
            '--extra-vars={"model_unreachable_hosts": ["huggingface.co"]}',
        ],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    said = " ".join(done.stdout.split())
    assert done.returncode == 2, done.stdout
    assert "[source_unreachable]" in said
    assert "huggingface.co (declared unreachable)" in said
    assert "changed=0" in said
