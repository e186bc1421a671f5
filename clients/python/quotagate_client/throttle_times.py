"""Average and longest throttle time, as KIP-124 has clients report them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SAMPLES: Final = 2
SAMPLE_S: Final = 30.0


@dataclass(slots=True)
class _Sample:
    start_s: float
    last_s: float
    count: int = 0
    total_ms: int = 0
    longest_ms: int = 0


class ThrottleTimes:
    """Throttle times over two samples of 30 s, as in Kafka's ``produce-throttle-time-avg`` and ``-max``.

    As there, every answer counts, most of them with 0. A sample expires when its last event is a whole window
    ago.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: list[_Sample] = []
        self._turn = threading.Lock()

    def record(self, throttle_ms: int) -> None:
        """Count one answer."""
        with self._turn:
            now = self._clock()
            if not self._samples or now - self._samples[-1].start_s >= SAMPLE_S:
                self._samples = [*self._live(now), _Sample(now, now)]
            newest = self._samples[-1]
            newest.last_s = now
            newest.count += 1
            newest.total_ms += throttle_ms
            newest.longest_ms = max(newest.longest_ms, throttle_ms)

    def average_ms(self) -> float | None:
        """The mean; None when nothing was answered."""
        with self._turn:
            live = self._live(self._clock())
            count = sum(sample.count for sample in live)
            return sum(sample.total_ms for sample in live) / count if count else None

    def longest_ms(self) -> int | None:
        """The longest; None when nothing was answered."""
        with self._turn:
            return max((sample.longest_ms for sample in self._live(self._clock())), default=None)

    def _live(self, now: float) -> list[_Sample]:
        return [sample for sample in self._samples if now - sample.last_s < SAMPLES * SAMPLE_S]
