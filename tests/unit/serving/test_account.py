# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which accounts a server may have; the accounts are played, all else is real."""

from __future__ import annotations

import grp
import pwd

import pytest
from ansible_collections.volta.llm.plugins.module_utils.serving.account import check_account

ACCOUNTS = {"root": 0, "oper": 1000, "nobody": 65534, "admin2": 998, "llama-server": 997, "games": 5}


@pytest.fixture(autouse=True)
def accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_name(name: str) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", ACCOUNTS[name], 1, "", "/home/x", "/bin/bash"))

    def group(name: str) -> grp.struct_group:
        return grp.struct_group((name, "x", {"llama-server": 997, "admin2": 998}[name], []))

    monkeypatch.setattr(pwd, "getpwnam", by_name)
    monkeypatch.setattr(grp, "getgrnam", group)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("root", "account_unusable", "uid 0"),
        ("oper", "account_unusable", "uid 1000"),
        ("nobody", "account_unusable", "uid 65534"),
        ("admin2", "account_unusable", "Ansible logs in"),
        ("games", "account_unusable", "without a group"),
        # systemd would run User=0 as root.
        ("0", "setting_invalid", "'0'"),
        ("", "setting_invalid", "''"),
        ("a\nUser=root", "setting_invalid", "cannot name"),
    ],
)
def test_an_account_of_somebody_else_is_refused(name: str, code: str, words: str) -> None:
    _, (fault,) = check_account(name, {"SUDO_USER": "admin2"})
    assert (fault.code, fault.subject) == (code, "user")
    assert words in fault.message
    assert fault.remedy


def test_an_account_of_its_own() -> None:
    assert check_account("llama-server", {"SUDO_USER": "admin2"}) == (True, [])
    assert check_account("not-there-yet", {}) == (False, [])
