# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where things lie: the checkout, its playbooks, the inventories named on the command line."""

from __future__ import annotations

import re
from pathlib import Path

from volta_llm.model import UsageError

#: The two files that mark a checkout of the collection.
MARKS = ("ansible.cfg", "galaxy.yml")

_COLLECTION_PLAYBOOK = re.compile(r"[a-z_][a-z0-9_]*\.[a-z_][a-z0-9_]*\.[a-z_][a-z0-9_.]*")


def find_project(given: str | None, start: Path) -> Path:
    """The checkout to run: ``given``, or the nearest folder at or above ``start`` that holds MARKS."""
    if given is not None:
        project = (start / given).resolve()
        missing = [name for name in MARKS if not (project / name).is_file()]
        if missing:
            raise UsageError(
                f"--project {given}: no {' and no '.join(missing)} there; name the folder of a checkout of volta.llm"
            )
        return project
    for folder in (start, *start.parents):
        if all((folder / name).is_file() for name in MARKS):
            return folder
    raise UsageError(
        f"no checkout of volta.llm at or above {start} (looked for {' beside '.join(MARKS)}); "
        "change to one, or name it with --project"
    )


def _folders(start: Path, project: Path) -> str:
    return " or ".join(dict.fromkeys([str(start), str(project)]))


def find_playbook(given: str, project: Path, start: Path) -> str:
    """The playbook as an absolute path, or its collection name (``volta.llm.site``) as it stands."""
    found = _first_existing(given, (start, project))
    if found is not None:
        if found.is_dir():
            raise UsageError(f"playbook {given} is a folder; name a file in it, for instance site.yml")
        return str(found)
    if _COLLECTION_PLAYBOOK.fullmatch(given) and not given.endswith((".yml", ".yaml")):
        return given
    raise UsageError(f"playbook {given}: no such file below {_folders(start, project)}")


def find_inventory(given: str, project: Path, start: Path) -> str:
    """The inventory as an absolute path, or a list of hosts (with a comma, as Ansible has it) as it stands."""
    if "," in given:
        return given
    found = _first_existing(given, (start, project))
    if found is None:
        raise UsageError(f"inventory {given}: no such file or folder below {_folders(start, project)}")
    return str(found)


def output_file(option: str, given: str | None, start: Path) -> Path | None:
    """Where a report is to be written; refused before the run, not after an hour of work, when that cannot be."""
    if given is None:
        return None
    path = start / given
    if path.is_dir():
        raise UsageError(f"{option} {given} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {given}: the folder {path.parent} does not exist")
    return path


def _first_existing(given: str, folders: tuple[Path, ...]) -> Path | None:
    for folder in folders:
        path = folder / Path(given).expanduser()
        if path.exists():
            return path.absolute()
    return None
