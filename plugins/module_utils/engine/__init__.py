# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The inference engine: llama.cpp's source, its build, the proof of a build, and the release folders."""
