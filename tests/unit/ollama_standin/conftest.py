# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The stand-in for Ollama, running, with a registry beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.lab.ollama.running import Registry, Standin


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def make(tmp_path: Path, registry: Registry) -> Iterator[Callable[..., Standin]]:
    """Makes a stand-in that is not started yet; whatever runs at the end is ended."""
    with ExitStack() as stack:

        def one(**options: Any) -> Standin:
            options.setdefault("registry", registry.url)
            standin = Standin(tmp_path / "ollama", **options)
            stack.callback(standin.__exit__, None, None, None)
            return standin

        yield one


@pytest.fixture
def standin(make: Callable[..., Standin]) -> Standin:
    """A running one on a machine without cards."""
    return make().start()


@pytest.fixture
def client(standin: Standin) -> ollama.Client:
    return ollama.Client(standin.url)
