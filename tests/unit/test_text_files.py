# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Files of configuration in one go: changed only where something differs, in check mode told only."""

from __future__ import annotations

import os
import stat

import pytest
from ansible_collections.volta.llm.plugins.module_utils import text_files


def converge(path, content="a\n", absent=(), check=False, mode=0o644):
    return text_files.converge([{"path": str(path), "content": content}], [str(item) for item in absent], mode, check)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder/file.conf"


def test_file_is_written_with_its_folder_and_then_left_alone(path):
    first = converge(path)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("a\n", 0o644)
    assert (first.written, first.changes[0]["before"], first.changes[0]["after"]) == ([str(path)], "", "a\n")
    inode = path.stat().st_ino
    again = converge(path)
    assert (again.written, again.changes, path.stat().st_ino) == ([], [], inode)


def test_check_mode_says_what_would_change_and_changes_nothing(path, tmp_path):
    other = tmp_path / "other"
    other.write_text("gone\n")
    found = converge(path, absent=[other], check=True)
    assert (found.written, found.removed) == ([str(path)], [str(other)])
    assert (path.parent.exists(), other.read_text()) == (False, "gone\n")


def test_mode_alone_is_mended_and_shown(path):
    converge(path)
    path.chmod(0o600)
    found = converge(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert found.changes[0]["before"].startswith("mode 0600")
    assert found.changes[0]["after"].startswith("mode 0644")


def test_link_is_replaced_and_what_it_leads_to_is_not_touched(path, tmp_path):
    target = tmp_path / "target"
    target.write_text("a\n")
    path.parent.mkdir()
    path.symlink_to(target)
    found = converge(path, "b\n")
    assert (found.written, path.is_symlink(), path.read_text(), target.read_text()) == (
        [str(path)],
        False,
        "b\n",
        "a\n",
    )


def test_removed_once(path):
    converge(path)
    assert text_files.converge([], [str(path)], 0o644, False).removed == [str(path)]
    assert not path.exists()
    assert text_files.converge([], [str(path)], 0o644, False).removed == []


def test_what_cannot_be_written_or_removed_is_named_and_the_rest_is_done(path, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "dir"
    folder.mkdir()
    files = [{"path": str(tmp_path / "file/x"), "content": ""}, {"path": str(path), "content": "a\n"}]
    found = text_files.converge(files, [str(folder)], 0o644, False)
    assert [(fault.code, fault.subject) for fault in found.faults] == [
        ("file_not_written", str(tmp_path / "file/x")),
        ("file_not_written", str(folder)),
    ]
    assert "Not a directory" in found.faults[0].message
    assert found.written == [str(path)]


def test_a_file_to_keep_is_written_once(path):
    def keep(content):
        return text_files.converge([{"path": str(path), "content": content, "keep": True}], [], 0o644, False)

    assert keep("a\n").written == [str(path)]
    path.write_text("mine\n")
    assert (keep("b\n").written, path.read_text()) == ([], "mine\n")


def test_folders_are_open_whatever_umask_the_caller_has(path):
    umask = os.umask(0o077)
    try:
        found = converge(path)
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(umask)
    assert found.faults == []
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
