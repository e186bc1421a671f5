"""How buckets stand after their rows, taken in one by one in the store's order, and said as assertions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from app.domain import sampled_rate
from app.domain.ask import Mode
from app.domain.assertion import Assertion, identity_of
from app.domain.exact_ids import ExactIds
from app.domain.oracle import Bucket, Charge, IdsBucket, RateBucket, TokensBucket, corrected
from app.domain.quota import Layers, Quota
from app.domain.token_bucket import tokens_at
from workers.spark.buckets import Asked

DIGEST_BYTES: Final = 8
SPARE: Final = 2
"""Times of ids that are held no more are dropped when there are so many times as many as are held."""


@dataclass(slots=True)
class WrittenIds(ExactIds):
    """Exact ids, and when each was written last."""

    written: dict[bytes, int] = field(default_factory=dict)

    def move(self, by_ms: int) -> None:
        """Move every time, ages kept: the clock was set back by more than a window."""
        super(WrittenIds, self).move(by_ms)
        self.written = {id_: at + by_ms for id_, at in self.written.items()}

    def write(self, id_: bytes, now_ms: int, layers: Layers, max_ids: int) -> None:
        """Have an id in the open layer, as the log says that it was written, if there is room for it."""
        self.forget(id_)
        if self.remembered(now_ms, layers) < max_ids:
            self.adopt(id_, now_ms, layers)

    def _hold(self, spread: bytes, now_ms: int, layers: Layers) -> None:
        super(WrittenIds, self)._hold(spread, now_ms, layers)
        self.written[spread] = now_ms
        held = sum(map(len, self.held.values()))
        if len(self.written) > SPARE * held + DIGEST_BYTES:
            self.written = {id_: self.written[id_] for ids in self.held.values() for id_ in ids}


class Standing(ABC):
    """One bucket, row by row."""

    def __init__(self, quota: str, bucket: str, identity: str | None) -> None:
        self._says = quota, bucket, identity

    @abstractmethod
    def take(self, row: Asked) -> None:
        """Take in what a decision left."""

    @abstractmethod
    def assertions(self, at_ms: int) -> Iterator[Assertion]:
        """What the bucket holds at a moment that no row is after."""


class Ids(Standing):
    """A principal's producer ids."""

    def __init__(self, quota: str, bucket: str, identity: str | None, max_ids: int) -> None:
        super().__init__(quota, bucket, identity)
        self.state = WrittenIds()
        self._bucket = IdsBucket(max_ids, self.state)
        self._quota: Quota | None = None

    def take(self, row: Asked) -> None:
        if row.mode == "peek":
            return
        self._quota = quota = row.as_quota()
        now_ms = corrected("admit", quota, self._bucket, row.at_ms)
        charged = row.charged_ids or ()
        for id_ in (*(row.refreshed_ids or ()), *charged):
            self.state.write(_bytes(id_), now_ms, quota.layers, self._bucket.max_ids)
        self._charge(len(charged), now_ms, quota)

    def use(self, id_: bytes, at_ms: int, quota: Quota) -> None:
        """Take in one use of an id, where nobody says what was charged: an id that layers do not hold."""
        self._quota = quota
        if self.state.find(id_, at_ms, quota.layers) is None:
            self.state.write(id_, at_ms, quota.layers, self._bucket.max_ids)
            self._charge(1, at_ms, quota)
        else:
            self.state.refresh(id_, at_ms, quota.layers, quota.limit, self._bucket.max_ids)

    def assertions(self, at_ms: int) -> Iterator[Assertion]:
        quota, state = self._quota, self.state
        if quota is None:
            return
        charges = Counter(at for at in state.charges if at_ms - at < quota.window_ms)
        for at in sorted(charges):
            yield Assertion(*self._says, "charge", at, value=float(charges[at]))
        found = [
            (state.written[id_], int.from_bytes(id_, "big", signed=True), state.layers[number])
            for number in state.live_layers(at_ms, quota.layers)
            for id_ in state.held.get(number, ())
        ]
        for written, digest, layer in sorted(found):
            yield Assertion(*self._says, "id", written, digest, layer)

    def _charge(self, ids: int, now_ms: int, quota: Quota) -> None:
        """Charge without a look at which ids: the log, or the layers, have said that they were unseen."""
        if ids:
            self.state.charges += [now_ms] * ids
            self.state.charge((), now_ms, quota.window_ms, quota.layers, quota.limit, self._bucket.max_ids)


class Counted(Standing):
    """A bucket that is no filter: charged, and given back to, as the oracle does it."""

    def __init__(self, quota: str, bucket: str, identity: str | None, counted: Bucket) -> None:
        super().__init__(quota, bucket, identity)
        self._counted = counted
        self._quota: Quota | None = None

    def take(self, row: Asked) -> None:
        if row.mode == "peek":
            return
        quota = row.as_quota()
        mode: Mode = "refund" if row.mode == "refund" else "admit"
        now_ms = corrected(mode, quota, self._counted, row.at_ms)
        charge = Charge(quota, row.usage, "delay", True, now_ms, row.at_ms)
        if row.mode == "refund":
            self._quota = quota
            self._counted.refund(charge)
        elif row.is_refused:  # which charges nothing, but ends a debt
            self._counted.touch(charge)
        else:
            self._quota = quota
            self._counted.charge(charge)


class Rate(Counted):
    """A sampled rate."""

    def __init__(self, quota: str, bucket: str, identity: str | None) -> None:
        self._bucket = RateBucket()
        super().__init__(quota, bucket, identity, self._bucket)

    def assertions(self, at_ms: int) -> Iterator[Assertion]:
        if (quota := self._quota) is None:
            return
        kept = sampled_rate.kept(quota.samples)
        for sample in sampled_rate.live(self._bucket.state, at_ms, kept, quota.sample_ms):
            yield Assertion(
                *self._says, "sample", sample.start_ms, value=float(sample.value), last_ms=sample.last_ms
            )


class Level(Counted):
    """A token bucket."""

    def __init__(self, quota: str, bucket: str, identity: str | None) -> None:
        self._bucket = TokensBucket()
        super().__init__(quota, bucket, identity, self._bucket)

    def assertions(self, at_ms: int) -> Iterator[Assertion]:
        quota, state = self._quota, self._bucket.state
        if quota is None or state is None or tokens_at(state, at_ms, quota.limit, quota.burst) >= quota.burst:
            return
        yield Assertion(*self._says, "tokens", state.at_ms, value=float(state.tokens))


def standing_of(row: Asked, max_ids: int) -> Standing:
    """The bucket of a row, empty yet."""
    says = row.quota, row.bucket, identity_of(row.as_quota())
    if row.algorithm == "producer_ids":
        return Ids(*says, max_ids)
    return Rate(*says) if row.algorithm == "sampled_rate" else Level(*says)


def _bytes(digest: int) -> bytes:
    return digest.to_bytes(DIGEST_BYTES, "big", signed=True)
