"""How long the machine keeps programs waiting: so much later may a promise in seconds come true."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final, Self

PAUSE_S: Final = 0.005
HAND_OVERS: Final = 4
"""To the node, to its store or catalog, back, and back to the test: each may wait for a processor."""


class Heartbeat:
    """While it is entered, a thread that wants to run again and again; it measures how late it gets to."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._late_s = 0.0
        self._thread = threading.Thread(target=self._beat)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    @property
    def slack_s(self) -> float:
        """How late an answer may be without a fault of the program: on an idle machine, milliseconds."""
        return HAND_OVERS * self._late_s

    def _beat(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self._over.wait(PAUSE_S)
            self._late_s = max(self._late_s, time.monotonic() - began - PAUSE_S)
