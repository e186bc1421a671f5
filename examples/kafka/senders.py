"""The two programs of the Kafka demo: one keeps its producer, the other makes a new one for each batch."""
# ruff: noqa: INP001  an example is files to read and run, not a package

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Final

from kafka import KafkaProducer
from kafka.errors import KafkaError

TOPIC: Final = "orders"
BATCH: Final = 5
PAUSE_S: Final = 0.2
CLOSE_WITHIN_S: Final = 5.0
HELD_AFTER_S: Final = 0.5
"""A sender that waits for longer, and was asked to wait, counts as held."""


class Sender(threading.Thread):
    """Sends batch after batch, and counts the acknowledged records.

    Attributes:
        does: its description, in a few words.
        counts: producers made, records acknowledged, errors, and how often it was held.
        trace: its state in each second so far: "sends", "held" or "waits".
        last_s: how long its last batch took.
        held_s: how long it was held in all.
    """

    def __init__(self, name: str, does: str, bootstrap: str, *, loops: bool) -> None:
        super().__init__(name=name, daemon=True)
        self.does = does
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.last_s = self.held_s = 0.0
        self._taken_before = 0
        self._waits_since: float | None = None
        self._brokers = bootstrap
        self._loops = loops
        self._ended = threading.Event()
        self._producer: Any = None

    def run(self) -> None:
        """Send until the end."""
        while not self._ended.is_set():
            if self._producer is None or self._loops:
                self.end_producer()
                self._producer = KafkaProducer(bootstrap_servers=self._brokers, client_id=self.name)
                self.counts["producers"] += 1
            self._send()
            self._ended.wait(PAUSE_S)

    def _send(self) -> None:
        """Send a batch, and wait for the broker."""
        began = self._waits_since = time.monotonic()
        futures = [self._producer.send(TOPIC, b"an order") for _ in range(BATCH)]
        for future in futures:
            while not future.is_done and not self._ended.is_set():
                time.sleep(0.01)
            self.counts["records"] += future.is_done and future.succeeded()
            self.counts["errors"] += future.is_done and future.failed()
        self.last_s = time.monotonic() - began
        if self.is_held:
            self.counts["holds"] += 1
            self.held_s += self.last_s
        self._waits_since = None

    def end_producer(self) -> None:
        """Close the producer at once; its own `close` would wait for pending records, and fail."""
        if self._producer is not None:
            self._producer._sender.force_close()  # noqa: SLF001
            with suppress(KafkaError):
                self._producer.close(timeout=CLOSE_WITHIN_S)

    def end(self) -> None:
        """Send no more."""
        self._ended.set()
        self.join()
        self.end_producer()

    def look(self, age_s: float) -> None:
        """Record the state of this second; with an acknowledged record it is "sends"."""
        if len(self.trace) <= age_s:
            self.trace.append("")
            self._taken_before = self.counts["records"]
        went_on = self.counts["records"] > self._taken_before
        self.trace[-1] = "sends" if went_on else self.state.partition(",")[0]

    @property
    def is_held(self) -> bool:
        """Whether it waits because its client was asked to."""
        since = self._waits_since
        return since is not None and time.monotonic() - since > HELD_AFTER_S and self.asked_ms > 0

    @property
    def asked_ms(self) -> float:
        """The longest throttle time that its producer was asked for, by the client's own metric."""
        groups = self._producer.metrics().values() if self._producer is not None else ()
        found = [value for group in groups for name, value in group.items() if name == "throttle-time-max"]
        return max((value for value in found if value > 0), default=0.0)

    @property
    def state(self) -> str:
        """The current state, in words."""
        since = self._waits_since
        if since is None or time.monotonic() - since < HELD_AFTER_S:
            return "sends"
        return f"{'held' if self.is_held else 'waits'}, {time.monotonic() - since:.0f} s"
