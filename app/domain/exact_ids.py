"""Producer ids by exact sets: what a filter would say that never takes a stranger as seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from app.domain.producer_ids import Place, ProducerIds
from app.domain.quota import Layers

COMPACT_FROM: Final = 1_024
"""So many dead charges are dropped at once: one at a time would move the whole list for each."""


@dataclass(slots=True)
class ExactIds(ProducerIds):
    """The state of one principal's bucket, where an id is remembered as the last layer it was written to.

    The same calls as of ``ProducerIds``, which an ``IdsBucket`` makes; of ids any 8 or 32 bytes will do. It
    knows no segments: when a filter adds one, only the number of refreshes changes.

    Attributes:
        held: the ids of each layer; an id stands in one alone.
        dead: how many charges at the head of the list have left the window.
    """

    held: dict[int, set[bytes]] = field(default_factory=dict)
    dead: int = 0

    def find(self, spread: bytes, now_ms: int, layers: Layers) -> Place | None:
        """The newest live layer that holds an id; None for an unseen one."""
        for number in reversed(self.live_layers(now_ms, layers)):
            if spread in self.held.get(number, ()):
                return Place(0, number)
        return None

    def stale(self, spread: bytes, now_ms: int, layers: Layers) -> bool:
        """Whether a seen id is missing from the open layer."""
        number = self._open(now_ms, layers)
        return number is None or spread not in self.held.get(number, ())

    def charged(self, now_ms: int, window_ms: int) -> int:
        """How many ids were charged in the trailing window."""
        return len(self.charges) - self._alive(now_ms, window_ms)

    def wait_for_rate(self, unseen: int, now_ms: int, limit: float, window_ms: int) -> int:
        """The least d at which so many unseen ids, at most ``limit``, fit beside the charges."""
        leaving = self.charges[len(self.charges) + unseen - int(limit) - 1]
        return leaving + window_ms - now_ms

    def refresh(
        self, spread: bytes, now_ms: int, layers: Layers, limit: float, max_ids: int, *, full: bool = False
    ) -> None:
        """Write a seen id to the open layer, uncharged; nothing if it is there by now."""
        del limit, max_ids, full  # a filter's size is all that they decide
        place = self.find(spread, now_ms, layers)
        if place is not None and self.stale(spread, now_ms, layers):
            self.held[place.layer].discard(spread)
            self._hold(spread, now_ms, layers)

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
        """Charge unseen ids, and remember each while fewer than ``max_ids`` are."""
        del limit, full
        for spread in spreads:
            if self.remembered(now_ms, layers) < max_ids:
                self._hold(spread, now_ms, layers)
            self.charges.append(now_ms)
        self.dead = max(self._alive(now_ms, window_ms), len(self.charges) - max_ids)
        if self.dead >= COMPACT_FROM and 2 * self.dead >= len(self.charges):
            del self.charges[: self.dead]
            self.dead = 0

    def adopt(self, spread: bytes, now_ms: int, layers: Layers) -> None:
        """Hold an unseen id as if it had been seen: uncharged, in the open layer."""
        self._hold(spread, now_ms, layers)

    def forget(self, spread: bytes) -> None:
        """Hold an id no longer."""
        for ids in self.held.values():
            ids.discard(spread)

    def uncharge(self, charges: int) -> None:
        """Take the newest charges back; what they remembered stays."""
        del self.charges[len(self.charges) - charges :]

    def _alive(self, now_ms: int, window_ms: int) -> int:
        """Where the charges in the trailing window begin; they are in order of time."""
        return bisect_right(self.charges, now_ms - window_ms, lo=self.dead)

    def _remembered_by(self, layer: int) -> int:
        return len(self.held.get(layer, ()))

    def _hold(self, spread: bytes, now_ms: int, layers: Layers) -> None:
        number = self._open(now_ms, layers)
        if number is None:
            newest = max(self.layers, default=0)
            number = self._begin_layer(now_ms)
            live = self.live_layers(now_ms, layers)
            # with its newest layer all of a filter is gone, even if another policy would revive an older
            self.held = {
                each: ids for each, ids in self.held.items() if newest in live and each in self.layers
            }
        self.held.setdefault(number, set()).add(spread)
