"""A layered Bloom filter of the ids that a principal has in use, and the exact count of charged ids.

Layers are slices of time; segments are parts of the filter, each added when its predecessor was full. Here
each layer of each segment is a set of cells; the store packs the same into one string.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final, NamedTuple

from app.domain.quota import Layers
from app.domain.shape import LAYERS, Shape, first_segment, next_segment, next_share

FULL_MS: Final = 1_000
"""How long an ask must wait if a full store has no room for its ids."""


class IdPlace(NamedTuple):
    """The place of an id: the index of its segment, and the number of the newest live layer that holds it."""

    segment: int
    layer: int


@dataclass(slots=True)
class Segment:
    """A part of the filter.

    Attributes:
        cells: by layer number, the (block, cell) pairs that are set.
        counts: by layer number, how many ids have it as their newest layer.
        written: the number of the newest layer that was ever written to.
    """

    shape: Shape
    cells: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    written: int = 0


@dataclass(slots=True)
class ProducerIds:
    """The state of one principal's bucket; a new state is an absent bucket.

    Attributes:
        layers: start times by layer number, at most the four newest; some may be dead.
        charges: the times of charges, oldest first.
        capacity: the number of charges that there is room for; more of them need a larger bucket.
    """

    layers: dict[int, int] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    charges: list[int] = field(default_factory=list)
    capacity: int = 0

    @property
    def newest_ms(self) -> int | None:
        """The time of the last layer or charge; None for an absent bucket."""
        return max([*list(self.layers.values())[-1:], *self.charges[-1:]], default=None)

    def move(self, by_ms: int) -> None:
        """Shift every time so that ages stay the same: the clock was set back by more than a window."""
        self.layers = {number: start + by_ms for number, start in self.layers.items()}
        self.charges = [at + by_ms for at in self.charges]

    def live_layers(self, now_ms: int, layers: Layers) -> list[int]:
        """The numbers of the live layers, oldest first; a layer that began ``ttl_ms`` ago is dead."""
        return [number for number, start in self.layers.items() if now_ms - start < layers.ttl_ms]

    def charged(self, now_ms: int, window_ms: int) -> int:
        """How many ids were charged in the trailing window."""
        return sum(now_ms - at < window_ms for at in self.charges)

    def remembered(self, now_ms: int, layers: Layers) -> int:
        """How many ids the live layers hold."""
        return sum(self._remembered_by(number) for number in self.live_layers(now_ms, layers))

    def fill(self) -> float:
        """How full the newest layer of the newest segment is; at 1 the next id adds a segment."""
        if not self.segments:
            return 0.0
        newest = self.segments[-1]
        return newest.counts.get(max(self.layers), 0) / newest.shape.ids

    def find(self, spread: bytes, now_ms: int, layers: Layers) -> IdPlace | None:
        """The place of an id, searched from the newest segment; None for an unseen id."""
        live = self.live_layers(now_ms, layers)
        for index in range(len(self.segments) - 1, -1, -1):
            segment = self.segments[index]
            block, cells = segment.shape.places(spread)
            for number in reversed(live):
                set_cells = segment.cells.get(number, set())
                if all((block, cell) in set_cells for cell in cells):
                    return IdPlace(index, number)
        return None

    def wait_for_rate(self, unseen: int, now_ms: int, limit: float, window_ms: int) -> int:
        """The least wait until ``unseen`` ids, at most ``limit``, fit in addition to the charges."""
        alive = [at for at in self.charges if now_ms - at < window_ms]
        leaving = alive[len(alive) + unseen - int(limit) - 1]
        return leaving + window_ms - now_ms

    def wait_for_capacity(self, now_ms: int, layers: Layers) -> int:
        """The wait until the oldest live layer that holds ids dies."""
        starts = [self.layers[n] for n in self.live_layers(now_ms, layers) if self._remembered_by(n)]
        return starts[0] + layers.ttl_ms - now_ms

    def stale(self, spread: bytes, now_ms: int, layers: Layers) -> bool:
        """Whether a seen id is missing from the open layer of the newest segment."""
        number = self._open(now_ms, layers)
        return number is None or self.find(spread, now_ms, layers) != IdPlace(len(self.segments) - 1, number)

    def open_ms(self, spreads: Sequence[bytes], now_ms: int, layers: Layers) -> int:
        """How long the layer that holds all these ids stays open; 0 if none does, or without ids."""
        number = self._open(now_ms, layers)
        places = [self.find(spread, now_ms, layers) for spread in spreads]
        if number is None or not places or any(place is None or place.layer != number for place in places):
            return 0
        return self.layers[number] + layers.interval_ms - now_ms

    def is_short(self, ids: int, now_ms: int, layers: Layers) -> bool:
        """Whether this many more ids in the open layer, or in one that begins now, need a new segment."""
        if not self.segments:
            return True
        newest, number = self.segments[-1], self._open(now_ms, layers)
        if number is not None:
            return newest.counts.get(number, 0) + ids > newest.shape.ids
        pushed_out = max(self.layers, default=0) + 1 - LAYERS
        live = [n for n in self.live_layers(now_ms, layers) if n > pushed_out]
        return newest.written not in live or ids > newest.shape.ids

    def room(self, charges: int, limit: float, max_ids: int) -> int:
        """The new capacity for this many charges: a quarter more; beyond the limit, just enough."""
        if charges <= self.capacity:
            return self.capacity
        larger = ceil(self.capacity * 1.25)
        if charges <= limit:
            larger = min(larger, int(limit))
        return min(max(charges, larger), max_ids)

    def refresh(
        self, spread: bytes, now_ms: int, layers: Layers, limit: float, max_ids: int, *, full: bool = False
    ) -> None:
        """Write a seen id to the open layer, uncharged, unless that layer holds it already.

        Args:
            full: the store has no room for a new segment.
        """
        if full and self.is_short(1, now_ms, layers):
            return
        place = self.find(spread, now_ms, layers)
        if place is not None and self.stale(spread, now_ms, layers):
            number = self._open(now_ms, layers)
            self.write_to(number, now_ms, spread, place, now_ms, layers, limit, max_ids)

    def renew(
        self,
        spreads: Iterable[bytes],
        now_ms: int,
        layers: Layers,
        limit: float,
        max_ids: int,
        *,
        full: bool = False,
    ) -> None:
        """Write unseen ids to the open layer, uncharged, as long as fewer than ``max_ids`` are remembered.

        Args:
            full: the store has no room for a new segment.
        """
        for spread in spreads:
            if self.remembered(now_ms, layers) < max_ids and not (full and self.is_short(1, now_ms, layers)):
                number = self._open(now_ms, layers)
                self.write_to(number, now_ms, spread, None, now_ms, layers, limit, max_ids)

    def write_to(
        self,
        number: int | None,
        begins_ms: int,
        spread: bytes,
        place: IdPlace | None,
        now_ms: int,
        layers: Layers,
        limit: float,
        max_ids: int,
    ) -> None:
        """Write an id to a live layer; if ``number`` is None, to one that begins at ``begins_ms``.

        Args:
            place: where the id was found; None for an unseen id.
        """
        if place is not None:
            counts = self.segments[place.segment].counts
            # an unseen id that is taken as seen was never counted
            counts[place.layer] = max(counts[place.layer] - 1, 0)
        if number is None:
            number = self._begin_layer(begins_ms)
            self._drop_dead(now_ms, layers)
        self._put(number, spread, now_ms, layers, limit, max_ids)

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
        """Charge unseen ids, and remember each of them as long as fewer than ``max_ids`` are remembered.

        Args:
            full: the store has no room for a new segment or for more charges.
        """
        for spread in spreads:
            is_closed = full and self.is_short(1, now_ms, layers)
            if self.remembered(now_ms, layers) < max_ids and not is_closed:
                number = self._open(now_ms, layers)
                self.write_to(number, now_ms, spread, None, now_ms, layers, limit, max_ids)
            self.charges.append(now_ms)
        most = self.capacity if full else max_ids
        alive = [at for at in self.charges if now_ms - at < window_ms]
        self.charges = alive[max(len(alive) - most, 0) :]
        self.capacity = self.room(len(self.charges), limit, max_ids)

    def _remembered_by(self, layer: int) -> int:
        return sum(segment.counts.get(layer, 0) for segment in self.segments)

    def _open(self, now_ms: int, layers: Layers) -> int | None:
        newest = max(self.layers, default=None)
        if newest is None or now_ms - self.layers[newest] >= layers.interval_ms:
            return None
        return newest

    def _put(
        self, number: int, spread: bytes, now_ms: int, layers: Layers, limit: float, max_ids: int
    ) -> None:
        """Set an id's cells in a live layer of the newest segment."""
        if not self.segments:
            self._add_segment(first_segment(limit, max_ids))
        elif self.segments[-1].counts.get(number, 0) >= self.segments[-1].shape.ids:
            self._drop_dead(now_ms, layers)
            self._add_segment(next_segment(self.segments[-1].shape.ids, limit, max_ids))
        newest = self.segments[-1]
        block, cells = newest.shape.places(spread)
        newest.cells.setdefault(number, set()).update((block, cell) for cell in cells)
        newest.counts[number] = newest.counts.get(number, 0) + 1
        newest.written = max(newest.written, number)

    def _begin_layer(self, now_ms: int) -> int:
        number = max(self.layers, default=0) + 1
        self.layers[number] = now_ms
        for old in [n for n in self.layers if n <= number - LAYERS]:
            del self.layers[old]
            for segment in self.segments:
                segment.cells.pop(old, None)
                segment.counts.pop(old, None)
        return number

    def _drop_dead(self, now_ms: int, layers: Layers) -> None:
        """Drop the segments whose newest layer is dead: no id can be found in them."""
        live = self.live_layers(now_ms, layers)
        self.segments = [segment for segment in self.segments if segment.written in live]

    def _add_segment(self, ids: int) -> None:
        share = next_share(tuple(segment.shape.share for segment in self.segments))
        self.segments.append(Segment(Shape.of(ids, share)))
