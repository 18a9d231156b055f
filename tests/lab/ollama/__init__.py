# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ollama for the lab: a stand-in for its server, archives laid out as its releases, a registry with a small model."""

from .archive import Release, make_release
from .registry import RegistryServer, publish_model

__all__ = ["RegistryServer", "Release", "make_release", "publish_model"]
