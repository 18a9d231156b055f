# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Serving a model: who listens where, the engine's arguments, its unit, and what the endpoint really does."""
