# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a key file holds, however the keys were written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.volta.llm.plugins.filter.hand_over import FilterModule
from ansible_collections.volta.llm.plugins.module_utils.faults import FaultError
from ansible_collections.volta.llm.plugins.module_utils.serving.keys import first_key

ROLE = Path(__file__).resolve().parents[3] / "roles/llama_server"
ONE, TWO = "0123456789abcdef0", "0123456789abcdef1"

lines = FilterModule().filters()["api_key_lines"]


class FromVault:
    """As ansible-core before 2.19 has an inline vault: text to Jinja's eyes, no str, and a sequence of letters."""

    def __str__(self) -> str:
        return ONE

    def __len__(self) -> int:
        return len(ONE)

    def __getitem__(self, at: int) -> str:
        return ONE[at]


@pytest.mark.parametrize("written", [[ONE], ONE, FromVault()], ids=["list", "text", "vault"])
def test_one_key_is_one_line(written: Any) -> None:
    """A key of every letter would let in whoever tries one letter."""
    assert lines("", written) == f"{ONE}\n"
    assert lines("b", [TWO], [{"name": "b", "api_keys": written}]) == f"{ONE}\n"


@pytest.mark.parametrize("written", [[ONE, TWO], f"{ONE},{TWO}"], ids=["list", "text"])
def test_old_and_new_are_two_lines(written: Any) -> None:
    assert lines("", written) == lines("b", [], [{"name": "b", "api_keys": written}]) == f"{ONE}\n{TWO}\n"


def test_an_instance_has_the_default_server_s_keys_unless_it_says_otherwise() -> None:
    others = [
        {"name": "a", "api_keys": [TWO]},
        {"name": "b"},
        {"name": "c", "api_keys": None},
        {"name": "d", "api_keys": []},
    ]
    assert [lines(name, [ONE], others) for name in "abcd"] == [f"{TWO}\n", f"{ONE}\n", f"{ONE}\n", ""]
    assert lines("", [ONE], others) == f"{ONE}\n"
    assert lines("", []) == ""


def test_what_the_former_unit_reads_is_there_until_the_new_one_works() -> None:
    """With an emptied key file it would serve anyone, without its rules it would not start."""
    tasks = yaml.safe_load((ROLE / "tasks/main.yml").read_text(encoding="utf-8"))
    names = [next(word for word in task if "." in word) for task in tasks]
    # The last of them serves, those before remove instances.
    serves = max(at for at, name in enumerate(names) if name == "volta.llm.service_unit")
    keyed = {at: str(task["vars"]) for at, task in enumerate(tasks) if task.get("ansible.builtin.include_tasks")}
    (first, later) = keyed
    assert first < serves < later
    assert "selectattr('has_keys')" in keyed[first]
    assert "rejectattr('has_keys')" in keyed[later]
    removing = [at for at, task in enumerate(tasks) if "absent" in task.get("volta.llm.text_files", {})]
    assert len(removing) == 1
    assert removing[0] > serves
    # A key file that is emptied then is newer than the process, which does not read it.
    assert "item.has_keys | ternary([item.api_key_file], [])" in tasks[serves]["volta.llm.service_unit"]["inputs"]


def test_the_first_key_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n{ONE}\n{TWO}\n")
    assert first_key(str(path)) == ONE


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b"# none\n\n", "holds no key"),
        # Written with an editor of Windows, or with a password in it: no header of HTTP takes these.
        ("\ufeff0123456789abcdef\n".encode(), "beyond ASCII"),
        ("schl\u00fcssel-0123456789\n".encode("latin-1"), "beyond ASCII"),
        ("\u5bc6\u94a5-0123456789abcdef\n".encode(), "beyond ASCII"),
        (b"01234567 89abcdef\n", "space"),
    ],
)
def test_a_file_without_a_key_that_can_be_presented(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FaultError) as raised:
        first_key(str(path))
    fault = raised.value.fault
    assert (fault.code, fault.subject) == ("wrong_key", str(path))
    assert problem in fault.message
    assert "0123" not in fault.message
