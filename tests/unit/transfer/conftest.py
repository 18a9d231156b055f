# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.transfer.deliver import Delivery, Report, Wanted
from ansible_collections.volta.llm.plugins.module_utils.transfer.engine import Settings
from ansible_collections.volta.llm.plugins.module_utils.transfer.sources import Source

from tests.unit.transfer.site import Site

#: Several spans at four connections, so that the seams between them are crossed.
CONTENT = b"GGUF" + random.Random(1).randbytes(22 * 1024 * 1024 + 4321)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site({"/model.gguf": CONTENT})
    made.start()
    yield made
    made.stop()


@pytest.fixture
def other_site() -> Iterator[Site]:
    made = Site({"/model.gguf": CONTENT})
    made.start()
    yield made
    made.stop()


class Desk:
    """Orders one file to a folder, with patience cut short."""

    def __init__(self, folder: Path) -> None:
        self.dest = folder / "model.gguf"
        self.settings = Settings(connections=4, timeout=5, stall_timeout=0.3, retries=3, retry_wait=0.01)

    def order(
        self,
        *urls: str,
        size: int | None = None,
        sha256: str | None = SHA256,
        connections: int | None = None,
        full: bool = False,
        dest: Path | None = None,
        sources: tuple[Source, ...] = (),
        progress_file: str | None = None,
    ) -> Report:
        settings = self.settings
        if connections is not None:
            settings = dataclasses.replace(settings, connections=connections)
        wanted = Wanted(dest or self.dest, size, sha256, (*(Source(url=url) for url in urls), *sources))
        delivery = Delivery([wanted], settings, full, progress_file)
        return delivery.run()

    @property
    def leftovers(self) -> set[str]:
        """What lies in the folder, and beside the file in the folder of its own."""
        folder = self.dest.parent
        return {path.name for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    folder = tmp_path / "models"
    folder.mkdir()
    return Desk(folder)
