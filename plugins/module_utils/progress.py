# Copyright: The volta.llm authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Progress of a long task, written by the module on the target and shown by its action plugin.

The record is one small JSON object in a file, replaced atomically, so that whoever reads it sees a whole one:
``{"phase": str, "done": int, "total": int | null, "unit": "bytes" | "steps", "rate": float | null (units per second),
"eta_s": float | null, "subject": str, "time": float (epoch seconds)}``.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProgressRecord:
    phase: str
    done: int
    total: int | None
    unit: str
    rate: float | None
    eta_s: float | None
    subject: str
    time: float


class ProgressWriter:
    """Writes the record at most once per ``interval`` seconds; does nothing when ``path`` is null.

    The rate of bytes is that of the last ``window`` seconds: on a slow link the mean since the start says nothing about
    now. The rate of steps is the mean since their phase began: one compiler run can take longer than any window.
    """

    def __init__(self, path: str | None, unit: str, interval: float = 1.0, window: float = 30.0) -> None:
        self._path = Path(path) if path else None
        self._unit = unit
        self._interval = interval
        self._window = window
        self._last_write = 0.0
        self._phase: str | None = None
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, phase: str, done: int, total: int | None = None, subject: str = "", force: bool = False) -> None:
        if self._path is None:
            return
        now = time.monotonic()
        if not force and now - self._last_write < self._interval:
            return
        self._last_write = now
        if phase != self._phase:
            self._phase = phase
            self._samples.clear()
        self._samples.append((now, done))
        while self._unit == "bytes" and len(self._samples) > 2 and now - self._samples[0][0] > self._window:
            self._samples.popleft()
        rate = self._rate()
        eta = (total - done) / rate if total is not None and rate else None
        record = ProgressRecord(phase, done, total, self._unit, rate, eta, subject, time.time())
        partial = self._path.with_name(self._path.name + ".new")
        try:
            partial.write_text(json.dumps(asdict(record)), encoding="utf-8")
            partial.replace(self._path)
        except OSError:
            # Progress is a courtesy: a full disk must fail the work itself, with its own message.
            return

    def _rate(self) -> float | None:
        (t0, d0), (t1, d1) = self._samples[0], self._samples[-1]
        return (d1 - d0) / (t1 - t0) if t1 > t0 and d1 > d0 else None


def read_progress(text: str) -> ProgressRecord | None:
    """The record in ``text``, or null where there is none (yet)."""
    try:
        fields = json.loads(text)
        return ProgressRecord(**fields)
    except (ValueError, TypeError):
        return None
