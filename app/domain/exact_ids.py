"""Producer ids in exact sets, with the answers of a filter without false positives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from app.domain.producer_ids import IdPlace, ProducerIds
from app.domain.quota import Layers

COMPACT_FROM: Final = 1_024
"""Dead charges are dropped this many at a time, because each drop moves the whole list."""


@dataclass(slots=True)
class ExactIds(ProducerIds):
    """The state of one principal's bucket, which remembers for each id the last layer it was written to.

    It has the methods of ``ProducerIds`` that an ``IdsBucket`` calls. An id may be any 8 or 32 bytes. It has
    no segments: in a filter, a new segment only changes the number of refreshes.

    Attributes:
        held: the ids of each layer; an id is in one layer only.
        dead: how many charges at the start of the list have left the window.
    """

    held: dict[int, set[bytes]] = field(default_factory=dict)
    dead: int = 0

    def find(self, spread: bytes, now_ms: int, layers: Layers) -> IdPlace | None:
        """The newest live layer that holds an id; None for an unseen id."""
        for number in reversed(self.live_layers(now_ms, layers)):
            if spread in self.held.get(number, ()):
                return IdPlace(0, number)
        return None

    def stale(self, spread: bytes, now_ms: int, layers: Layers) -> bool:
        """Whether a seen id is missing from the open layer."""
        number = self._open(now_ms, layers)
        return number is None or spread not in self.held.get(number, ())

    def charged(self, now_ms: int, window_ms: int) -> int:
        """How many ids were charged in the trailing window."""
        return len(self.charges) - self._alive(now_ms, window_ms)

    def wait_for_rate(self, unseen: int, now_ms: int, limit: float, window_ms: int) -> int:
        """The least wait until ``unseen`` ids, at most ``limit``, fit in addition to the charges."""
        leaving = self.charges[len(self.charges) + unseen - int(limit) - 1]
        return leaving + window_ms - now_ms

    def refresh(
        self, spread: bytes, now_ms: int, layers: Layers, limit: float, max_ids: int, *, full: bool = False
    ) -> None:
        """Write a seen id to the open layer, uncharged, unless that layer holds it already."""
        del limit, max_ids, full  # they decide only the size of a filter
        place = self.find(spread, now_ms, layers)
        if place is not None and self.stale(spread, now_ms, layers):
            self.held[place.layer].discard(spread)
            self.adopt(spread, now_ms, layers)

    def charge(
        self,
        spreads: Iterable[bytes],
        now_ms: int,
        window_ms: int,
        layers: Layers,
        limit: float,
        max_ids: int,
        *,
        full: bool = False,
    ) -> None:
        """Charge unseen ids, and remember each of them as long as fewer than ``max_ids`` are remembered."""
        del limit, full
        for spread in spreads:
            if self.remembered(now_ms, layers) < max_ids:
                self.adopt(spread, now_ms, layers)
            self.charges.append(now_ms)
        self.dead = max(self._alive(now_ms, window_ms), len(self.charges) - max_ids)
        if self.dead >= COMPACT_FROM and 2 * self.dead >= len(self.charges):
            del self.charges[: self.dead]
            self.dead = 0

    def adopt(self, spread: bytes, now_ms: int, layers: Layers) -> None:
        """Write an unseen id to the open layer, uncharged."""
        number = self._open(now_ms, layers)
        if number is None:
            newest = max(self.layers, default=0)
            number = self._begin_layer(now_ms)
            live = self.live_layers(now_ms, layers)
            # a filter dies with its newest layer, even if another policy would revive an older layer
            self.held = {
                each: ids for each, ids in self.held.items() if newest in live and each in self.layers
            }
        self.held.setdefault(number, set()).add(spread)

    def forget(self, spread: bytes) -> None:
        """Forget an id."""
        for ids in self.held.values():
            ids.discard(spread)

    def uncharge(self, charges: int) -> None:
        """Remove the newest charges; their ids stay remembered."""
        del self.charges[len(self.charges) - charges :]

    def _alive(self, now_ms: int, window_ms: int) -> int:
        """The index of the first charge in the trailing window; charges are in order of time."""
        return bisect_right(self.charges, now_ms - window_ms, lo=self.dead)

    def _remembered_by(self, layer: int) -> int:
        return len(self.held.get(layer, ()))
