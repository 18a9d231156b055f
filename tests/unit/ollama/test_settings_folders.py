# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether the service gets to the folder of its models, on folders of the test and an account that is not there."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.machine import Completed
from ansible_collections.volta.llm.plugins.module_utils.ollama import folders
from ansible_collections.volta.llm.plugins.module_utils.ollama.unit import Effective, effective


def nobody_answers(argv: Sequence[str], timeout: float) -> Completed:
    return Completed(tuple(argv), None, missing=True)


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    """A folder that anybody may get to, as those of pytest are not."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    return tmp_path


def nobody() -> folders.Account:
    return folders.Account("no-such-account", nobody_answers)


def reach(path: Path, account: folders.Account | None = None) -> list[tuple[str, str]]:
    return [(fault.code, fault.subject) for fault in folders.check_reach(str(path), account or nobody())]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("models", "not a path from the root"),
        ("/srv/../etc/x", "not a path from the root"),
        ("/", "a folder of the system"),
        ("/srv", "a folder of the system"),
        ("/opt/ollama/models", "removed together with the releases"),
        ("/tmp/models", "does not last"),
        ("/run/ollama/models", "does not last"),
        ("/srv/models", ""),
        ("/opt/ollama-models/x", ""),
        ("/home/ollama_models", ""),
    ],
)
def test_places(path: str, said: str) -> None:
    faults = folders.check_place(path)
    assert [fault.code for fault in faults] == (["setting_invalid"] if said else [])
    assert all(said in fault.message for fault in faults)


def test_every_parent_must_let_it_in(open_path: Path) -> None:
    models = open_path / "a/b/models"
    assert reach(models) == []
    models.mkdir(parents=True)
    for folder in (open_path / "a", open_path / "a/b", models):
        folder.chmod(0o755)
    assert reach(models) == []
    (open_path / "a").chmod(0o750)
    assert reach(models) == [("ollama_folder_unreachable", str(open_path / "a"))]
    (fault,) = folders.check_reach(str(models), nobody())
    assert "mode 0750" in fault.message
    assert "setfacl -m u:no-such-account:x" in fault.remedy
    (open_path / "a").chmod(0o755)


def test_links_are_followed(open_path: Path) -> None:
    (open_path / "closed/models").mkdir(parents=True)
    (open_path / "closed").chmod(0o700)
    (open_path / "models").symlink_to("closed/models")
    assert reach(open_path / "models") == [("ollama_folder_unreachable", str(open_path / "closed"))]
    (open_path / "closed").chmod(0o755)


def test_the_folder_itself_is_given_to_it_by_the_role(open_path: Path) -> None:
    (open_path / "models").mkdir(mode=0o700)
    assert reach(open_path / "models") == []


@pytest.mark.parametrize("below", ["", "models"])
def test_a_file_is_no_folder(open_path: Path, below: str) -> None:
    (open_path / "file").write_text("")
    assert reach(open_path / "file" / below) == [("ollama_folder_unreachable", str(open_path / "file"))]


def test_what_is_in_it_must_be_its_own(open_path: Path) -> None:
    """A store that was copied by root."""
    store = open_path / "models"
    for name in ("blobs", "manifests"):
        (store / name).mkdir(parents=True)
        (store / name).chmod(0o777)
    blob = store / "blobs/sha256-00"
    blob.write_text("")
    blob.chmod(0o644)
    assert reach(store) == []
    blob.chmod(0o600)
    assert reach(store) == [("ollama_folder_unreachable", str(blob))]
    blob.chmod(0o644)
    (store / "manifests").chmod(0o755)
    (fault,) = folders.check_reach(str(store), nobody())
    assert (fault.subject, fault.remedy) == (
        str(store / "manifests"),
        f"When no Ollama runs: chown -R no-such-account: {store}",
    )


def test_an_account_that_is_there_is_tried_out(open_path: Path) -> None:
    """What an access list allows is not in the mode."""
    closed = open_path / "closed"
    closed.mkdir(mode=0o700)
    asked: list[tuple[str, ...]] = []

    def answers(rc: int, stderr: str = "") -> folders.Account:
        def run(argv: Sequence[str], timeout: float) -> Completed:
            asked.append(tuple(argv))
            return Completed(tuple(argv), rc, stderr=stderr)

        return folders.Account(getpass.getuser(), run)

    assert answers(0).may(closed, "x")
    assert asked[0][0] == "setpriv"
    assert asked[0][-3:] == ("test", "-x", str(closed))
    assert not answers(1).may(closed, "x")
    # Not tried at all, as without root: the mode counts, and this account owns the folder.
    assert answers(127, "setpriv: setresuid failed: Operation not permitted").may(closed, "rwx")


# --- the sandbox of the unit ------------------------------------------------------------------------------------------

OURS = "ProtectSystem=strict\nProtectHome={home}\nStateDirectory=ollama\nReadWritePaths={path}\n"


def unit(path: str, *later: str, home: str = "read-only") -> Effective:
    texts = [("/etc/50-volta.conf", OURS.format(path=path, home=home))]
    return effective(texts + [(f"/etc/6{n}.conf", text) for n, text in enumerate(later)])


@pytest.mark.parametrize("path", ["/home/ollama_models", "/srv/models", "/var/lib/ollama/models"])
def test_ours_leaves_the_folder(path: str) -> None:
    assert folders.check_sandbox(path, unit(path), "50-volta.conf") == []


@pytest.mark.parametrize(
    ("path", "later", "said"),
    [
        # F08 ollama/ollama#10672, #2701: modes are right, and it is denied.
        ("/home/ollama_models", "ProtectHome=yes\n", "ProtectHome=yes of /etc/60.conf (line 1) hides it"),
        ("/home/ollama_models", "\nProtectHome=tmpfs\n", "ProtectHome=tmpfs of /etc/60.conf (line 2) hides it"),
        ("/srv/m/x", "InaccessiblePaths=-/srv/m\n", "InaccessiblePaths=/srv/m of /etc/60.conf (line 1) hides it"),
        ("/srv/m", "TemporaryFileSystem=/srv:ro\n", "TemporaryFileSystem=/srv of /etc/60.conf (line 1) hides it"),
        ("/srv/m", "ReadOnlyPaths=/srv/m\n", "ReadOnlyPaths=/srv/m of /etc/60.conf (line 1) makes it read-only"),
        ("/srv/m", "ReadWritePaths=\n", "ProtectSystem=strict of /etc/50-volta.conf (line 1) makes it read-only"),
        ("/srv/m", "RootDirectory=/chroot\n", "RootDirectory=/chroot of /etc/60.conf (line 1) hides it"),
    ],
)
def test_a_later_file_takes_it_away(path: str, later: str, said: str) -> None:
    (fault,) = folders.check_sandbox(path, unit(path, later), "50-volta.conf")
    assert (fault.code, fault.subject) == ("ollama_folder_hidden", path)
    assert said in fault.message


@pytest.mark.parametrize("later", ["ProtectHome=yes\n", "InaccessiblePaths=/home\n", "ReadOnlyPaths=/srv\n"])
def test_what_does_not_concern_the_folder(later: str) -> None:
    assert folders.check_sandbox("/srv/models", unit("/srv/models", later), "50-volta.conf") == []


# --- room -------------------------------------------------------------------------------------------------------------


def test_room(tmp_path: Path) -> None:
    gib = 1 << 30

    def free(count: int) -> list[str]:
        found = folders.check_room(str(tmp_path / "a/models"), 5 * gib, lambda place: (0, 0, count))
        return [fault.code for fault in found]

    assert free(6 * gib) == []
    assert free(6 * gib - 1) == ["disk_full"]


def test_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    assert folders.existing(str(tmp_path / "a/b")) == tmp_path
    (tmp_path / "file").write_text("")
    assert folders.same_file_system(str(tmp_path / "a"), [str(tmp_path / "file"), "/no/such", "/proc/self/stat"]) == [
        True,
        False,
        False,
    ]
