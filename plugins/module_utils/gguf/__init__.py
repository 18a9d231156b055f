# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Model files of the GGUF format: their headers, shard sets, and the memory a model takes."""
