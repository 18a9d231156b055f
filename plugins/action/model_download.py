# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Runs the module with live progress; with C(job_file), joins a download that an earlier task started."""

from __future__ import annotations

import posixpath
from typing import Any

from ansible_collections.volta.llm.plugins.plugin_utils.live import LiveAction


class ActionModule(LiveAction):
    job_argument = "job_file"

    def joined_progress(self, args: dict[str, Any]) -> str | None:
        """The record that a run keeps beside its lock: under the first name of the set (transfer/store.py)."""
        dest = str(args.get("dest", "")).rstrip("/")
        names = [str(entry.get("name")) for entry in args.get("files") or [] if isinstance(entry, dict)]
        folder, name = (dest, min(names)) if names else posixpath.split(dest)
        return posixpath.join(folder, ".volta-transfer", f"{name}.progress.json") if folder.startswith("/") else None
