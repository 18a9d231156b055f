# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is refused before anything is looked at, and how one wish gets one spelling."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace

import pytest
from ansible_collections.volta.llm.plugins.module_utils.engine.request import (
    Request,
    check,
    find_account,
    normalised,
    redacted,
)

SHA = "a" * 64
GOOD = Request(
    source_type="pypi_sdist",
    prefix="/opt/llama.cpp",
    build_directory="/var/lib/llama-build",
    package_version="0.3.36",
    sha256=SHA,
)


def test_a_complete_request_is_accepted() -> None:
    assert check(GOOD) == []


@pytest.mark.parametrize("good", ["70", "70-real", "70-virtual", "90a-real", "120"])
def test_architectures_in_numbers_are_accepted(good: str) -> None:
    assert check(replace(GOOD, cuda_architectures=(good,))) == []


@pytest.mark.parametrize(
    "bad",
    ["native", "all", "all-major", "compute_70", "sm_70", "70-Real", "", "No CUDA devices found.", "70;80", "70\n"],
)
def test_anything_else_is_no_architecture(bad: str) -> None:
    # Report D02: the text of a failed detection became the architecture.
    faults = check(replace(GOOD, cuda_architectures=(bad,)))
    assert [fault.code for fault in faults] == ["architecture_invalid"]
    assert "70-real" in faults[0].remedy


@pytest.mark.parametrize(
    ("change", "code", "subject"),
    [
        ({"source_type": "svn"}, "source_invalid", "source_type"),
        ({"sha256": None}, "source_invalid", "sha256"),
        ({"sha256": "xyz"}, "source_invalid", "sha256"),
        ({"package_version": None}, "source_invalid", "package_version"),
        ({"package_version": "../x"}, "source_invalid", "package_version"),
        ({"index_url": "ftp://pypi.org/simple"}, "source_invalid", "index_url"),
        ({"index_url": "https://"}, "source_invalid", "index_url"),
        ({"commit": "main"}, "source_invalid", "commit"),
        ({"version": "a b"}, "source_invalid", "version"),
        ({"source_type": "archive"}, "source_invalid", "url"),
        ({"source_type": "archive", "url": "relative.tar.gz"}, "source_invalid", "url"),
        ({"source_type": "git", "commit": "0" * 40}, "source_invalid", "repository"),
        ({"source_type": "git", "repository": "https://x/y.git"}, "source_invalid", "commit"),
        ({"source_type": "git", "repository": "https://x/y.git", "commit": "v1.0"}, "source_invalid", "commit"),
        ({"source_type": "git", "repository": "--upload-pack=x", "commit": "0" * 40}, "source_invalid", "repository"),
        ({"cuda_architectures": ()}, "architecture_invalid", "cuda_architectures"),
        ({"backend": "rocm"}, "build_option_invalid", "backend"),
        ({"prefix": "opt"}, "build_option_invalid", "prefix"),
        ({"prefix": "/opt/../etc"}, "build_option_invalid", "prefix"),
        ({"prefix": "/"}, "build_option_invalid", "prefix"),
        *(
            ({name: path}, "build_option_invalid", name)
            for name in ("prefix", "build_directory", "cuda_root", "cuda_host_compiler", "ccache_directory")
            for path in ("/srv/my files/x", "/srv/a:b", "/srv/a;b", "/srv/$HOME", '/srv/"x"')
        ),
        ({"build_directory": "/opt/llama.cpp"}, "build_option_invalid", "build_directory"),
        ({"targets": ("a;b",)}, "build_option_invalid", "targets"),
        ({"targets": ("-t",)}, "build_option_invalid", "targets"),
        ({"cmake_options": {"-DX": "1"}}, "build_option_invalid", "cmake_options"),
        ({"cmake_options": {"CMAKE_CUDA_ARCHITECTURES": "native"}}, "build_option_invalid", "cmake_options"),
        ({"cmake_options": {"GGML_CUDA": "OFF"}}, "build_option_invalid", "cmake_options"),
        ({"jobs": -1}, "build_option_invalid", "jobs"),
        ({"keep_releases": 0}, "build_option_invalid", "keep_releases"),
        ({"build_number": -1}, "build_option_invalid", "build_number"),
    ],
)
def test_each_mistake_has_its_fault(change: dict[str, object], code: str, subject: str) -> None:
    faults = check(replace(GOOD, **change))  # type: ignore[arg-type]
    assert [(fault.code, fault.subject) for fault in faults] == [(code, subject)]
    assert faults[0].remedy


def test_all_mistakes_are_said_at_once() -> None:
    faults = check(replace(GOOD, sha256="x", cuda_architectures=("native",), jobs=-1, keep_releases=0))
    assert [fault.subject for fault in faults] == ["sha256", "cuda_architectures", "jobs", "keep_releases"]


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    faults = check(replace(GOOD, index_url="https://me:geheim@mirror.example/simple?token=geheim"))
    assert [fault.code for fault in faults] == ["source_invalid"]
    assert "geheim" not in faults[0].message + faults[0].remedy


def test_redacted_keeps_host_and_path_only() -> None:
    assert redacted("https://u:p@h.example:8443/a/b?sig=1#x") == "https://h.example:8443/a/b"
    assert redacted("/srv/llama.tar.gz") == "/srv/llama.tar.gz"


def test_cpu_builds_do_not_ask_for_architectures() -> None:
    request = replace(GOOD, backend="cpu", cuda_architectures=("native",))
    assert check(request) == []
    assert normalised(request).cuda_architectures == ()


def test_one_wish_has_one_spelling() -> None:
    spelled = normalised(
        replace(
            GOOD,
            sha256="A" * 64,
            commit="0C1E57098",
            targets=("llama-bench", "llama-bench"),
            cmake_options={"GGML_NCCL": True, "N": 3},
        )
    )
    assert spelled.sha256 == SHA
    assert spelled.commit == "0c1e57098"
    assert spelled.targets == ("llama-server", "llama-bench")
    assert dict(spelled.cmake_options) == {"GGML_NCCL": "ON", "N": "3"}


def test_root_never_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for user in (None, "root"):
        account, faults = find_account(replace(GOOD, build_user=user))
        assert account is None
        assert [fault.code for fault in faults] == ["build_user_unusable"]


def test_an_account_that_does_not_exist_is_named() -> None:
    _account, faults = find_account(replace(GOOD, build_user="no-such-user-here"))
    assert [(fault.code, fault.subject) for fault in faults] == [("build_user_unusable", "no-such-user-here")]


def test_only_root_can_become_another_account(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = pwd.getpwnam("nobody")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    account, faults = find_account(replace(GOOD, build_user="nobody"))
    assert not faults
    assert account is not None
    assert (account.uid, account.gid) == (nobody.pw_uid, nobody.pw_gid)
    monkeypatch.setattr(os, "geteuid", lambda: nobody.pw_uid + 1)
    account, faults = find_account(replace(GOOD, build_user="nobody"))
    assert account is None
    assert [fault.code for fault in faults] == ["build_user_unusable"]
    monkeypatch.setattr(os, "geteuid", lambda: nobody.pw_uid)
    assert find_account(replace(GOOD, build_user="nobody")) == (None, [])
