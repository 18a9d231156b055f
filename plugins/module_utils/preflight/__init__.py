# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Is this machine fit for the work: system, memory, disk, ports, interpreter, clock."""
