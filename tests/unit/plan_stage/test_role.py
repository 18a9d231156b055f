# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the role takes over from other roles falls back to what these do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
TAKEN = re.compile(r"(\w+) \| default\(('[^']*'|\[\]|\d+)\)")


def load(role: str, path: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "roles" / role / path).read_text(encoding="utf-8")) or {}


DEFAULTS = load("plan", "defaults/main.yml")


def owner(variable: str) -> str | None:
    """The role that has the variable, null when it is not there (yet)."""
    for folder in sorted((ROOT / "roles").iterdir()):
        path = folder / "defaults" / "main.yml"
        if path.is_file() and variable in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}):
            return folder.name
    return None


def taken_over() -> list[tuple[str, str]]:
    """(variable, fallback) of other roles' variables in the defaults and the tasks; the inventory's have no role."""
    texts = [str(value) for value in DEFAULTS.values()]
    texts.append((ROOT / "roles/plan/tasks/main.yml").read_text(encoding="utf-8"))
    pairs = {pair for text in texts for pair in TAKEN.findall(text)}
    return sorted((name, fallback) for name, fallback in pairs if not name.startswith(("__", "volta_")))


def test_variables_of_other_roles_are_taken_over() -> None:
    names = {name for name, _ in taken_over()}

    assert {"llama_server_parallel", "llama_server_host", "llama_cpp_version", "model_files"} <= names


@pytest.mark.parametrize(("name", "fallback"), taken_over())
def test_a_fallback_is_the_other_roles_default(name: str, fallback: str) -> None:
    role = owner(name)
    assert role is not None, f"no role has {name}"
    assert yaml.safe_load(fallback) == load(role, "defaults/main.yml")[name]
