# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The engine's parts by themselves: buffers, the hasher, when connections are opened, how much is asked for at once."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import threading
import time
from pathlib import Path

import pytest
from ansible_collections.volta.llm.plugins.module_utils.transfer import engine
from ansible_collections.volta.llm.plugins.module_utils.transfer.engine import Settings, Transfer
from ansible_collections.volta.llm.plugins.module_utils.transfer.store import Places, Ranges

MIB = 1 << 20


@pytest.mark.parametrize("connections", [1, 2, 4, 8, 16, 32])
def test_buffers_take_little_memory_however_many_connections(connections: int) -> None:
    buffers = engine._Buffers(connections)
    taken = [buffers.take() for _ in range(connections + buffers.SPARE)]
    assert sum(map(len, taken)) <= engine.BUFFERS
    assert all(len(buffer) >= engine.READ_MIN for buffer in taken)
    # One more is there only once one is given back.
    threading.Timer(0.05, buffers.give, taken[:1]).start()
    assert buffers.take() is taken[0]


@pytest.mark.parametrize("seed", range(8))
def test_the_hash_is_right_whoever_is_ahead(tmp_path: Path, seed: int) -> None:
    """Pieces are written by two hands in any order; some are offered, and only those that are next are taken."""
    lot = random.Random(seed)
    content = lot.randbytes(3 * MIB + 17)
    base = lot.choice([0, 4096 + 5])
    edges = sorted({0, len(content), *(lot.randrange(len(content)) for _ in range(60))})
    pieces = list(itertools.pairwise(edges))
    # Two hands: one begins in the middle. What is left of their order is up to the lot.
    middle = len(pieces) // 2
    hands = [pieces[:middle], pieces[middle:]]
    done, lock = Ranges(), threading.Lock()

    def front() -> int:
        with lock:
            return done.front

    fd = os.open(tmp_path / "part", os.O_RDWR | os.O_CREAT)
    buffers = engine._Buffers(2)
    hasher = engine._Hasher(fd, front, base, buffers)
    taken = 0
    try:
        hasher.start()
        while any(hands):
            low, high = lot.choice([hand for hand in hands if hand]).pop(0)
            buffer = buffers.take()
            buffer[: high - low] = content[low:high]
            os.pwrite(fd, buffer[: high - low], base + low)
            given = lot.random() < 0.7 and hasher.offer(low, buffer[: high - low], buffer)
            with lock:
                done.add(low, high)
            if given:
                taken += 1
            else:
                buffers.give(buffer)
        while not hasher.reached(len(content)):
            time.sleep(0.001)
        assert hasher.digest() == hashlib.sha256(content).hexdigest()
    finally:
        hasher.stop()
        os.close(fd)
    # Every buffer is back.
    assert all(buffers.take() for _ in range(2 + buffers.SPARE))


def test_a_buffer_that_is_not_next_is_not_taken(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "part", os.O_RDWR | os.O_CREAT)
    hasher = engine._Hasher(fd, lambda: 0, 0, engine._Buffers(1))
    data = memoryview(bytearray(10))
    assert not hasher.offer(10, data, data)
    assert hasher.offer(0, data, data)
    assert not hasher.offer(0, data, data)
    assert hasher.offer(10, data, data)
    os.close(fd)


def test_a_file_cut_short_behind_the_hasher_is_an_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "part", os.O_RDWR | os.O_CREAT)
    hasher = engine._Hasher(fd, lambda: 100, 0, engine._Buffers(1))
    hasher.start()
    hasher._thread.join(20)
    with pytest.raises(OSError, match="shorter"):
        hasher.reached(100)
    data = memoryview(bytearray(10))
    assert not hasher.offer(0, data, data)
    os.close(fd)


def transfer(tmp_path: Path, connections: int = 4) -> Transfer:
    return Transfer(
        "http://models.invalid/m.gguf", Places(tmp_path / "m.gguf"), None, None, Settings(connections=connections)
    )


@pytest.mark.parametrize(
    ("rate", "busy", "opened"),
    [
        (50e6, 0.05, 3),  # the server or the network is what is waited for
        (0.0, 0.0, 3),
        (900e6, 0.2, 0),  # as much as the machine can hash
        (200e6, 0.8, 0),  # the disk is what is waited for
        (300e6, 0.1, 0),  # perhaps, if it stays so
    ],
)
def test_more_connections_only_where_they_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, busy: float, opened: int
) -> None:
    one = transfer(tmp_path)
    started: list[int] = []
    monkeypatch.setattr(one, "_start_worker", lambda number, session: started.append(number))
    one._reserve = 3
    one._reinforce(rate, busy)
    assert len(started) == opened
    # Once it is slow they are opened, and never twice.
    for _ in range(3):
        one._reinforce(300e6, 0.1)
    assert len(started) == 3


@pytest.mark.parametrize(
    ("latency", "rate", "span"),
    [
        (0.0001, 250e6, engine.SPAN_MIN),
        (0.02, 50e6, 47 * MIB),
        (0.2, 50e6, engine.SPAN_MAX),
        (0.1, 100e3, engine.SPAN_MIN),
    ],
)
def test_a_request_is_as_large_as_its_round_trip_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latency: float, rate: float, span: int
) -> None:
    one = transfer(tmp_path)
    assert one._worthwhile() == engine.SPAN_FIRST
    monkeypatch.setattr(engine.time, "monotonic", lambda: 100.0)
    one._begun, one._latency, one._active = 90.0, latency, 2
    one._fetched = int(rate * 10 * 2)
    assert one._worthwhile() == span
