# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Every module takes exactly the options it documents, with the types, defaults and choices it documents."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from ansible.module_utils.basic import FILE_COMMON_ARGUMENTS

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
MODULES = sorted(path.stem for path in (PLUGINS / "modules").glob("*.py"))
#: What the documentation and the specification of an option both say, and what it means where it is left out.
SAID = {"type": "str", "required": False, "default": None, "choices": None, "elements": None}


class Captured(Exception):
    pass


def declared(module: Any) -> dict[str, Any]:
    """The arguments with which the module calls VoltaModule."""
    with patch.object(module, "VoltaModule", side_effect=Captured) as made, pytest.raises(Captured):
        module.main()
    given: dict[str, Any] = made.call_args.kwargs
    return given


def documented(module: Any) -> dict[str, Any]:
    """The options of DOCUMENTATION and of the collection's fragments that it extends."""
    documentation = yaml.safe_load(module.DOCUMENTATION)
    options = dict(documentation.get("options", {}))
    for name in documentation.get("extends_documentation_fragment", []):
        if name.startswith("volta.llm."):
            file, _, section = name.removeprefix("volta.llm.").partition(".")
            fragment = importlib.import_module(f"ansible_collections.volta.llm.plugins.doc_fragments.{file}")
            text = getattr(fragment.ModuleDocFragment, (section or "documentation").upper())
            shared = yaml.safe_load(text).get("options", {})
            assert not options.keys() & shared.keys(), "an option is documented twice"
            options |= shared
    return options


def as_said(options: dict[str, Any], nested: str) -> dict[str, Any]:
    said = {}
    for name, option in options.items():
        said[name] = {key: option.get(key, default) for key, default in SAID.items()}
        # A list, or a dictionary that explains each.
        said[name]["choices"] = said[name]["choices"] and list(said[name]["choices"])
        if option.get(nested):
            said[name]["options"] = as_said(option[nested], nested)
    return said


@pytest.mark.parametrize("name", MODULES)
def test_the_documented_options_are_those_of_the_module(name: str) -> None:
    module = importlib.import_module(f"ansible_collections.volta.llm.plugins.modules.{name}")
    given = declared(module)
    assert as_said(given["argument_spec"], "options") == as_said(documented(module), "suboptions")
    fragments = yaml.safe_load(module.DOCUMENTATION).get("extends_documentation_fragment", [])
    assert given.get("add_file_common_args", False) == ("ansible.builtin.files" in fragments)
    assert not given.get("add_file_common_args") or not given["argument_spec"].keys() & FILE_COMMON_ARGUMENTS.keys()


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_supports_is_documented(name: str) -> None:
    module = importlib.import_module(f"ansible_collections.volta.llm.plugins.modules.{name}")
    documentation = yaml.safe_load(module.DOCUMENTATION)
    own = documentation.get("attributes", {})
    shared = "volta.llm.machine.attributes" in documentation.get("extends_documentation_fragment", [])
    assert shared or {"check_mode", "diff_mode", "platform"} <= own.keys()
    support = own.get("check_mode", {}).get("support", "full" if shared else "none")
    assert (support == "full") == declared(module)["supports_check_mode"]
