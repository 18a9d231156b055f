# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What every role keeps to: documented variables, private names of its own, and truth where -e gave a word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if (path / "tasks").is_dir())
#: Python's types of a default by the type that the argument specification gives.
TYPES = {
    "str": str,
    "path": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "list": list,
    "dict": dict,
    "raw": object,
}
#: Options of a module that a role sets itself, or from a variable of another name, and of which no fault is made.
SET_BY_THE_ROLE = {
    "gpu_verify": {"sysroot", "require"},
    "cuda_toolkit": {"forbidden", "install_recommends", "packages", "required", "sysroot"},
    "kernel_hold": {"action", "allow_remove", "forbidden", "proof_file", "sets", "state", "sysroot", "timeout"},
    "llama_cpp": {"action", "archive", "name", "portable", "sha256", "source_type", "sysroot"},
    "llama_server": {"api_key_file", "guard", "name", "sysroot"},
    "model": {"dest", "job_file", "lock"},
    "nouveau": {"state", "sysroot"},
    "ollama": {
        *("because", "gpu", "guard", "state", "sysroot", "unit"),
        # Of each model.
        *("architecture", "base_url", "context", "digest", "gguf", "insecure", "name", "parameter_size", "parameters"),
        *("quantization", "size", "system", "template"),
    },
    "nvidia_driver": {
        *("allow_held", "allow_kernel_headers", "allow_remove", "allow_unavailable", "apt_options", "driver_branch"),
        "install_recommends",
        *("keyring_file", "packages", "repository_site", "require", "sets", "state", "sysroot"),
    },
    "nvidia_persistence": {"sysroot"},
    "plan": set(),
    "preflight": {"clock_reference"},
    "reboot_gate": {"controller_boot_id", "earlier", "former_boot_id", "local", "sysroot"},
}


def load(role: str, path: str) -> Any:
    file = ROOT / "roles" / role / path
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None


def defaults(role: str) -> dict[str, Any]:
    return load(role, "defaults/main.yml") or {}


def tasks(role: str) -> Iterator[dict[str, Any]]:
    """Every task, those in blocks too."""
    waiting = [task for file in sorted((ROOT / "roles" / role / "tasks").glob("*.yml")) for task in read(file)]
    while waiting:
        task = waiting.pop(0)
        yield task
        for part in ("block", "rescue", "always"):
            waiting += task.get(part, [])


def read(file: Path) -> list[dict[str, Any]]:
    return yaml.safe_load(file.read_text(encoding="utf-8")) or []


def source(role: str) -> str:
    """Tasks and variables without their comments."""
    folders = [ROOT / "roles" / role / name for name in ("defaults", "tasks", "vars")]
    files = [file for folder in folders for file in sorted(folder.glob("*.yml"))]
    return "\n".join(re.sub(r"(?m)^\s*#.*$", "", file.read_text(encoding="utf-8")) for file in files)


def test_every_role_is_looked_at() -> None:
    assert set(ROLES) == set(SET_BY_THE_ROLE)


@pytest.mark.parametrize("role", ROLES)
def test_the_argument_specification_is_that_of_the_defaults(role: str) -> None:
    specifications = load(role, "meta/argument_specs.yml")["argument_specs"]
    assert specifications
    for file in (ROOT / "roles" / role / "tasks").glob("*.yml"):
        assert file.stem in specifications or file.stem.startswith("_")
    for specification in specifications.values():
        options = specification["options"]
        assert {name: option["default"] for name, option in options.items()} == defaults(role)
        for name, option in options.items():
            assert option["description"], name
            if "{{" not in str(option["default"]):
                assert isinstance(option["default"], TYPES[option["type"]]), name
                assert (option["type"] == "bool") == isinstance(option["default"], bool), name
                assert "choices" not in option or option["default"] in option["choices"], name


@pytest.mark.parametrize("role", ROLES)
def test_every_variable_is_the_role_s_and_says_what_it_is(role: str) -> None:
    lines = (ROOT / "roles" / role / "defaults" / "main.yml").read_text(encoding="utf-8").splitlines()
    named = [(number, line.split(":")[0]) for number, line in enumerate(lines) if re.match(r"\w+:", line)]
    assert [name for _, name in named] == list(defaults(role))
    for number, name in named:
        assert name.startswith(f"{role}_")
        assert lines[number - 1].startswith("# "), name


@pytest.mark.parametrize("role", ROLES)
def test_private_names_are_the_role_s_own(role: str) -> None:
    private = f"__{role}_"
    assert [name for name in load(role, "vars/main.yml") or {} if not name.startswith(private)] == []
    for task in tasks(role):
        assert task.get("register", private).startswith(private)
        for fact in task.get("ansible.builtin.set_fact", {}):
            assert fact.startswith((private, f"{role}_")), fact
    used = set(re.findall(r"\b__\w+", source(role)))
    assert {name for name in used if not name.startswith((private, "__volta_"))} == set()


@pytest.mark.parametrize("role", ROLES)
def test_a_word_for_a_truth_value_is_read_as_one(role: str) -> None:
    """``-e x=false`` is text, and text is true."""
    text = source(role)
    options = load(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    for name in (name for name, option in options.items() if option["type"] == "bool"):
        uses = re.findall(rf"(?m)^(?!{name}:).*?\b{name}\b(.{{0,7}})", text)
        assert uses, f"{name} is used nowhere"
        # With a colon it is what a message tells people to write.
        assert [rest for rest in uses if not rest.startswith((" | bool", ": "))] == [], name


@pytest.mark.parametrize("role", ROLES)
def test_every_role_is_described(role: str) -> None:
    readme = (ROOT / "roles" / role / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("# ")
    assert role in readme.splitlines()[0]
    about = load(role, "meta/main.yml")
    assert about["dependencies"] == []
    assert about["galaxy_info"]["license"] == "GPL-3.0-or-later"
    assert about["galaxy_info"]["min_ansible_version"] == "2.17"
    assert [platform["name"] for platform in about["galaxy_info"]["platforms"]] == ["Ubuntu", "Debian"]


@pytest.mark.parametrize("role", ROLES)
def test_faults_name_the_role_s_variables(role: str) -> None:
    """A module that can call its options by a role's names is told how, and the names it then shows exist."""
    variables = defaults(role)
    for task in tasks(role):
        module, options = next(((key, value) for key, value in task.items() if key.startswith("volta.llm.")), ("", {}))
        file = ROOT / "plugins" / "modules" / f"{module.removeprefix('volta.llm.')}.py"
        if not module or "volta.llm.machine.variables" not in file.read_text(encoding="utf-8"):
            continue
        prefix = options["variable_prefix"]
        if "{{" in prefix:
            continue  # the role judges another role's settings
        assert prefix == f"{role}_"
        passed = {name for name in options if f"{prefix}{name}" not in variables} - {"variable_prefix"}
        assert passed - SET_BY_THE_ROLE[role] == set()
        for name in options.keys() - passed - SET_BY_THE_ROLE[role] - {"variable_prefix"}:
            assert re.search(rf"\b{prefix}{name}\b|\b__{prefix}", str(options[name])), name


def given(mapping: yaml.MappingNode) -> Iterator[str]:
    """The keys of a mapping, those that ``<<`` brings too."""
    for key, value in mapping.value:
        if key.tag != "tag:yaml.org,2002:merge":
            yield key.value
            continue
        for part in [value] if isinstance(value, yaml.MappingNode) else value.value:
            yield from given(part)


def given_twice(node: yaml.Node | None) -> Iterator[str]:
    """``key, line`` of what stands twice in one mapping, in the whole document."""
    if isinstance(node, yaml.MappingNode):
        for name, count in Counter(given(node)).items():
            if count > 1:
                yield f"{name}, line {node.start_mark.line + 1}"
        for _, value in node.value:
            yield from given_twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from given_twice(value)


def test_no_key_is_given_twice() -> None:
    """Ansible warns of such a key at the top of every run, also of one that ``<<`` brings and the task gives anew."""
    assert list(given_twice(yaml.compose("a: {<<: {b: 1, c: 2}, b: 3}"))) == ["b, line 1"]
    files = [file for folder in ("roles", "playbooks", "molecule") for file in (ROOT / folder).rglob("*.yml")]
    assert files
    twice = {
        str(file.relative_to(ROOT)): list(given_twice(yaml.compose(file.read_text(encoding="utf-8")))) for file in files
    }
    assert {file: keys for file, keys in twice.items() if keys} == {}
