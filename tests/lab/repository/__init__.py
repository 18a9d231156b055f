# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A signed package archive with Ubuntu's names for kernels and drivers, for lab machines that claim to be Ubuntu.

``ubuntu.py`` says what is in it, ``payload.py`` what is inside the packages, ``archive.py`` writes and signs it.
"""
