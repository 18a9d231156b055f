# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Releases from archives laid out as the project's, with the stand-in as the program, and every way to be broken."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.ollama.release import Asked, Outcome, settle

from tests.lab.ollama.archive import BROKEN, FORMS, make_release

#: The faults of each. The last two are not seen before the release serves, which is what the role's rollback is for.
MEANS = {
    "no_binary": ["ollama_archive_unusable"],
    "crash": ["ollama_does_not_run"],
    "wrong_architecture": ["ollama_does_not_run"],
    "traversal": ["ollama_archive_unsafe"],
    "absolute": ["ollama_archive_unsafe"],
    "link": ["ollama_archive_unsafe"],
    "truncated": ["hash_mismatch"],
    "truncated_listed": ["ollama_archive_unusable"],
    "wrong_hash": ["hash_mismatch"],
    "not_listed": ["checksum_missing"],
    "crash_at_serve": [],
    "abort_in_warmup": [],
}


def install(tmp_path: Path, archive: Path, version: str) -> Outcome:
    """From an archive on the machine, proved by the list beside it."""
    # 0.24.0 has a SHA-256 in the collection, which the stand-in's archive does not have: the list is named.
    return settle(
        Asked(
            version=version,
            archive=str(archive),
            checksums=str(archive.with_name("sha256sum.txt")),
            prefix=str(tmp_path / "opt"),
            command=str(tmp_path / "bin/ollama"),
            elsewhere=(),
        )
    )


def test_every_way_to_be_broken_is_looked_at() -> None:
    assert set(MEANS) == set(BROKEN)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("broken", sorted(MEANS))
def test_a_broken_release_never_takes_the_place_of_a_good_one(tmp_path: Path, broken: str, form: str) -> None:
    good = make_release(tmp_path / "srv", "0.24.0", (form,))
    assert install(tmp_path, good.files[form], "0.24.0").faults == []
    bad = make_release(tmp_path / "srv", "0.24.1", (form,), broken=broken)
    outcome = install(tmp_path, bad.files[form], "0.24.1")
    assert [fault.code for fault in outcome.faults] == MEANS[broken]
    in_use = "0.24.1" if not MEANS[broken] else "0.24.0"
    shown = subprocess.run([tmp_path / "bin/ollama", "--version"], capture_output=True, text=True, check=True).stdout
    assert f"version is {in_use}" in shown
    assert not list(tmp_path.rglob("*outside*"))
    assert not list((tmp_path / "opt/releases").glob(".*"))


def test_a_release_for_newer_cards_only_is_refused(tmp_path: Path) -> None:
    made = make_release(tmp_path / "srv", "0.24.0", ("tar.zst",), libraries=("cuda_v13",))
    outcome = install(tmp_path, made.files["tar.zst"], "0.24.0")
    assert [fault.code for fault in outcome.faults] == ["ollama_without_cuda_v12"]
