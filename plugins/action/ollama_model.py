# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Runs the module with live progress: how much of the model has come, how fast, and the time left."""

from __future__ import annotations

from ansible_collections.volta.llm.plugins.plugin_utils.live import LiveAction


class ActionModule(LiveAction):
    pass
