# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""NVIDIA GPUs as a machine shows them: nvidia-smi, PCI, driver. Pure parsers and judges, no Ansible inside."""
