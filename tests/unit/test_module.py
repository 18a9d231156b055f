# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the modules leave in the target's system log: enough to tell what was done, and nothing secret."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from ansible.module_utils import basic
from ansible.module_utils.common.parameters import PASS_VARS
from ansible_collections.volta.llm.plugins.module_utils.module import VoltaModule, loggable

from tests.unit.test_arguments import MODULES, declared

SECRET = "hidden+word/42"
URL = f"https://oper:{SECRET}@files.example/models/a.gguf?token={SECRET}&x=1#{SECRET}"


class Logged(Exception):
    """The module wrote to the log: what it said, and the fields beside it; the module goes no further."""

    def __init__(self, message: str, fields: dict[str, str]) -> None:
        self.message = message
        self.fields = fields


def start(parameters: dict[str, Any], begin: Callable[[], object]) -> Logged:
    """Begin as on a target whose journal takes messages, and end with the first one."""

    def send(MESSAGE: str, **fields: Any) -> None:
        raise Logged(MESSAGE, fields)

    # What the controller sends along; it overrides the no_log that a module gives to AnsibleModule.
    given = {**parameters, "_ansible_no_log": False, "_ansible_module_name": "volta.llm.under_test"}
    with (
        patch.object(basic, "_ANSIBLE_ARGS", json.dumps({"ANSIBLE_MODULE_ARGS": given}).encode()),
        patch.object(basic, "_ANSIBLE_PROFILE", "legacy", create=True),
        patch.object(basic, "has_journal", True),
        patch.object(basic, "journal", SimpleNamespace(send=send), create=True),
        pytest.raises(Logged) as logged,
    ):
        begin()
    return logged.value


def example(option: dict[str, Any]) -> Any:
    """A value with a secret address wherever there is room for one; null where there is none."""
    if option.get("choices"):
        return None
    kind = option.get("type", "str")
    if kind in ("str", "path"):
        return URL
    if kind == "dict":
        return {"Authorization": f"Bearer {SECRET}", "address": URL}
    if kind != "list":
        return None
    if option.get("elements", "str") in ("str", "path"):
        return [URL]
    if option.get("elements") != "dict":
        return None
    inner = {
        name: 1 if own.get("type") == "int" and own.get("required") else example(own)
        for name, own in option.get("options", {}).items()
    }
    inner = {name: value for name, value in inner.items() if value is not None}
    return [inner or {"url": URL, "headers": {"Authorization": f"Bearer {SECRET}"}}]


def least(option: dict[str, Any]) -> Any:
    """A value that the type of a required option accepts."""
    if option.get("type") == "list" and option.get("elements") == "dict":
        inner = option.get("options", {}).items()
        return [{name: least(own) for name, own in inner if own.get("required")}]
    return option["choices"][0] if option.get("choices") else 1 if option.get("type") == "int" else "x"


@pytest.mark.parametrize("name", MODULES)
def test_no_option_brings_a_secret_into_the_log(name: str) -> None:
    module = importlib.import_module(f"ansible_collections.volta.llm.plugins.modules.{name}")
    specification = declared(module)
    options = specification["argument_spec"]
    needed = {key: least(option) for key, option in options.items() if option.get("required")}
    # A fourth element, where there is one, says that one of the names is enough.
    for key, value, names, *_ in specification.get("required_if", []):
        if options[key].get("default") == value:
            needed |= {name: least(options[name]) for name in names}
    tried = 0
    for key, option in options.items():
        value = example(option)
        if value is None:
            continue
        logged = start({**needed, key: value}, module.main)
        everything = logged.message + repr(logged.fields)
        assert "hidden" not in everything, key
        assert logged.message.startswith("ansible-volta.llm.under_test Invoked with "), key
        tried += 1
    assert tried


def test_the_log_still_tells_which_address() -> None:
    specification = {"url": {"type": "str"}, "count": {"type": "int"}, "names": {"type": "list", "elements": "str"}}
    parameters = {"url": URL, "count": 3, "names": ["a", URL]}
    logged = start(parameters, lambda: VoltaModule(argument_spec=specification))
    assert "files.example/models/a.gguf" in logged.message
    assert "count=3" in logged.message
    assert logged.fields["COUNT"] == "3"
    assert logged.fields["NAMES"].startswith("['a', 'https://")


def test_the_results_keep_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    given = json.dumps({"ANSIBLE_MODULE_ARGS": {"url": URL}}).encode()
    with (
        patch.object(basic, "_ANSIBLE_ARGS", given),
        patch.object(basic, "_ANSIBLE_PROFILE", "legacy", create=True),
        patch.object(VoltaModule, "log"),
        pytest.raises(SystemExit),
    ):
        VoltaModule(argument_spec={"url": {"type": "str"}}).exit_json(source="https://files.example/models/a.gguf")
    assert json.loads(capsys.readouterr().out)["source"] == "https://files.example/models/a.gguf"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h.example/a.gguf", "https://h.example/a.gguf"),
        ("https://h.example/a.gguf?sig=abc", "https://h.example/a.gguf?..."),
        ("https://h.example/a.gguf#abc", "https://h.example/a.gguf?..."),
        ("https://token@h.example/a", "https://...@h.example/a"),
        ("https://user:p#?s@h.example/a", "https://...@h.example/a"),
        ("git+ssh://git:word@h.example/a", "git+ssh://...@h.example/a"),
        ("h.example/a.gguf?token=abc", "h.example/a.gguf?..."),
        ("one https://h.example/a?b=c d\nnext line", "one https://h.example/a?...\nnext line"),
        ("/srv/models/a.gguf", "/srv/models/a.gguf"),
        ("what is this? nothing", "what is this? nothing"),
    ],
)
def test_what_is_left_of_an_address(text: str, shown: str) -> None:
    assert loggable(text) == shown


def test_each_part_of_a_secret_that_was_text_is_hidden_from_results(capsys: pytest.CaptureFixture[str]) -> None:
    """ansible-core hides "a,b" as it was given, and -vvv shows the list that it became."""
    spec = {
        "keys": {"type": "list", "elements": "str", "no_log": True},
        "token": {"type": "str", "no_log": True},
        "servers": {
            "type": "list",
            "elements": "dict",
            "options": {"keys": {"type": "list", "elements": "str", "no_log": True}, "name": {"type": "str"}},
        },
    }
    given = {
        "keys": "first-secret,second-secret",
        "servers": [{"name": "plain-name", "keys": "third-secret,fourth-secret"}, {"keys": ["fifth-secret"]}, {}],
        "_ansible_no_log": False,
        "_ansible_module_name": "volta.llm.under_test",
        # ansible-core 2.21 shows the options only where this is asked for; older ones always do, and do not know it.
        **({"_ansible_inject_invocation": True} if "inject_invocation" in PASS_VARS else {}),
    }
    with (
        patch.object(basic, "_ANSIBLE_ARGS", json.dumps({"ANSIBLE_MODULE_ARGS": given}).encode()),
        patch.object(basic, "_ANSIBLE_PROFILE", "legacy", create=True),
        patch.object(VoltaModule, "log"),
        pytest.raises(SystemExit) as ended,
    ):
        VoltaModule(argument_spec=spec).exit_json(said="a fourth-secret in words")
    shown = capsys.readouterr().out
    assert "-secret" not in shown
    # The rest is whole: what the module says of itself where it failed instead, and every other value.
    assert ended.value.code == 0, shown
    result = json.loads(shown)
    assert result["said"] == "a ******** in words"
    assert [server["name"] for server in result["invocation"]["module_args"]["servers"]] == ["plain-name", None, None]
