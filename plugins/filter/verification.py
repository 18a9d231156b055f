# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The filter behind playbooks/verify.yml; the thinking is in module_utils/serving/report.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.volta.llm.plugins.module_utils.serving.report import report


def verification(
    probed: Mapping[str, Any],
    host: str,
    driver: Mapping[str, Any],
    gpus: Mapping[str, Any],
    served: Mapping[str, Any],
    ollama: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """See module_utils.serving.report.report."""
    found: dict[str, Any] = report(str(host), driver, gpus, served, probed, ollama)
    return found


class FilterModule:
    """Registers the filter."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"verification": verification}
