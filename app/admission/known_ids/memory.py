"""The producer ids that one node knows, and until when: pure rules, with time as an argument.

The store remembers an id until the layer that holds it dies. Until then a node that learned of the id may
take it as seen without the store, unless the bucket was reset, or its window or its layers changed. While the
layer is open, the store would not even write. Once it is closed, each use is written back: a *renewal*.

Times are the store's, as the node estimates them (``StoreTime``), in milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from sys import getsizeof
from typing import Final, NamedTuple

from app.admission.plan import Knowledge
from app.domain.decision import Outcome
from app.domain.ladder import AppliedQuota
from app.domain.quota import Layers

Id = int | str

BUCKET_BYTES: Final = 1_500
ID_BYTES: Final = 160
"""Bytes in memory of a bucket and of an id, without their texts: estimated from above (``tests/unit``)."""

KNOWN_BYTES: Final = 32 * 1024 * 1024
"""The memory for known ids: some 200,000 of them."""

FALL_MS: Final = 1_000
"""The most by which the store's clock may be set back; beyond it, known ids would live too long."""

RENEWED_WITHIN_MS: Final = 250
"""A use needs no ask only if its renewal has at least this time until the layer dies."""

PAUSED_MS: Final = 1_000
"""A bucket's uses are not renewed for this long after the store had no room for an id."""

NEVER: Final = 2**63


class StoreTime:
    """The store's time as a node estimates it by its own monotonic clock; the estimate is never behind.

    Wall clocks are not compared. The store's time is read at some moment between sending and receiving.
    Taking it for the time of sending puts the estimate ahead by at most the round trip.
    """

    def __init__(self) -> None:
        self._ahead_ms: tuple[float, float] | None = None
        """The least and the most that the store's clock is ahead of the monotonic one."""

    def read(self, store_ms: int, sent_ms: float, received_ms: float) -> bool:
        """Note the store's time (its whole milliseconds) from a reply.

        Args:
            sent_ms, received_ms: when the call was sent and its reply received, by the monotonic clock.

        Returns:
            whether the store's clock was set back by more than ``FALL_MS``.
        """
        least, most = store_ms - received_ms, store_ms + 1 - sent_ms
        before_least, before_most = self._ahead_ms or (least, most)
        fell_ms = before_least - most
        if fell_ms <= 0 and least <= before_most:  # else the clock was set, and only this reading counts
            least, most = max(least, before_least), min(most, before_most)
        self._ahead_ms = least, most
        return fell_ms > FALL_MS

    def at_ms(self, monotonic_ms: float) -> int | None:
        """Return the latest that the store's time can be at a moment; None before the first reading."""
        return None if self._ahead_ms is None else int(monotonic_ms + self._ahead_ms[1])


@dataclass(slots=True)
class KnownBucket:
    """The ids that the node knows of one principal's bucket.

    Attributes:
        applied: the quota whose window and layers its times follow.
        resets: the number of a reset of any bucket; this bucket is known not to be reset after it.
        lives_ms: how long a layer lives after it has closed.
        bytes: its size in memory, by estimate.
        ids: each with the time when its layer closes; one int object for all ids of a layer. Moving an id to
            another layer allocates nothing.
        due: the ids to write to the store, in the same form: used since their layer closed, or lost by the
            store. None of them is in ``ids``.
        oldest_ms: a lower bound of the times in ``ids``.
        newest_ms: the time of the layer that was learned last.
        paused_until_ms: no use is renewed before this time, as the store had no room for one.
        is_lost: whether the store lost its state since; a later reset may then have any number.
    """

    applied: AppliedQuota
    principal: str
    resets: int
    lives_ms: int
    bytes: int
    ids: dict[Id, int] = field(default_factory=dict)
    due: dict[Id, int] = field(default_factory=dict)
    oldest_ms: int = NEVER
    newest_ms: int = 0
    paused_until_ms: int = 0
    is_lost: bool = False

    def closes_ms(self, each: Id) -> int:
        """Return when the layer of an id closes; 0 if the id is not known."""
        return self.ids.get(each) or self.due.get(each, 0)


class Renewal(NamedTuple):
    """Ids of one bucket to be written to its open layer, uncharged. Without ids it asks about a reset only.

    Attributes:
        resets: as in ``KnownBucket``. If the bucket was reset after that, the store writes nothing.
        generation: the generation of ``KnownIds`` when the renewal was made.
        until_ms: when the first layer that holds any of the ids dies; 0 without ids.
    """

    key: bytes
    applied: AppliedQuota
    principal: str
    resets: int
    ids: tuple[Id, ...]
    generation: int
    until_ms: int = 0


class KnownIds:
    """The producer ids that a node knows, within a bound of bytes: the least recently used buckets go first.

    Ids are not hashed. They are distinct in each call, and ``NO_PRODUCER_ID`` is not among them.

    Args:
        most_bytes: the memory that it may take, by estimate; a bucket may take a quarter.

    Attributes:
        generation: changes at each reset and each loss. Do not learn from a call that was planned in an
            earlier generation.
        birth: the birth of the store's state, which a renewal must name; empty if it is not known.
        due: the buckets with something to write or to ask, in the order of their turns.
        ids: how many ids it knows.
        bytes: the memory that it takes, by estimate.
    """

    def __init__(self, most_bytes: int = KNOWN_BYTES) -> None:
        self._most_bytes = most_bytes
        self._buckets: OrderedDict[bytes, KnownBucket] = OrderedDict()
        self._resets = 0
        self.due: dict[bytes, None] = {}
        self.generation = 0
        self.birth = b""
        self.ids = 0
        self.bytes = 0

    def unknown(self, key: bytes, applied: AppliedQuota, ids: Sequence[Id], now_ms: int) -> Sequence[Id]:
        """Return the ids that the store must be asked about; without any, note the use of all ids.

        If the store must be asked, ids in its open layer are left out: it would neither charge nor write
        them, so the answer is the same.

        Args:
            applied: the quota in force.
        """
        bucket = self._buckets.get(key)
        if bucket is None:
            return ids
        is_checked = bucket.applied.quota is applied.quota and bucket.resets >= self._resets
        if not (is_checked or self._is_valid(key, bucket, applied)):
            return ids
        self._buckets.move_to_end(key)
        left = [each for each in ids if bucket.ids.get(each, 0) <= now_ms]
        if not left:  # nearly always
            return ()
        for each in left:
            if bucket.closes_ms(each) + bucket.lives_ms - now_ms < RENEWED_WITHIN_MS:
                return left
        self._note_use(key, bucket, left, now_ms)
        return ()

    def knows(self, key: bytes, applied: AppliedQuota, ids: Sequence[Id], now_ms: int) -> bool:
        """Return whether all of these ids are known. Their use is not noted."""
        bucket = self._buckets.get(key)
        if bucket is None or not self._is_valid(key, bucket, applied):
            return False
        return all(now_ms < bucket.closes_ms(each) + bucket.lives_ms for each in ids)

    def knowledge(self, key: bytes, ids: Sequence[Id], now_ms: int) -> Knowledge:
        """Return the grounds on which the node answers for ids that it knows."""
        bucket = self._buckets[key]
        closes_ms = min(map(bucket.closes_ms, ids))
        return Knowledge(now_ms, closes_ms + bucket.lives_ms, self._resets)

    def _is_valid(self, key: bytes, bucket: KnownBucket, applied: AppliedQuota) -> bool:
        """Whether the ids of a bucket are valid under the quota in force, and the bucket was not reset."""
        if bucket.applied.quota is not applied.quota:
            if policy_of(bucket.applied) != policy_of(applied):
                self._forget(key)
                return False
            bucket.applied = applied
        if bucket.resets < self._resets:
            if bucket.ids or bucket.due:
                self.due[key] = None  # the store will say whether it was this bucket
            else:
                self._forget(key)
            return False
        return True

    def _note_use(self, key: bytes, bucket: KnownBucket, ids: Sequence[Id], now_ms: int) -> None:
        """Schedule a renewal of known ids whose layer has closed."""
        for each in ids:
            if each in bucket.ids and now_ms >= bucket.paused_until_ms:
                bucket.due[each] = bucket.ids.pop(each)
                self.due[key] = None

    # Answers of the store

    def learn(
        self,
        key: bytes,
        applied: AppliedQuota,
        principal: str,
        ids: Sequence[Id],
        closes_ms: int,
        now_ms: int,
    ) -> None:
        """Remember ids that the open layer of a bucket holds.

        Args:
            closes_ms: when that layer closes, by the store.
        """
        bucket = self._buckets.get(key)
        if bucket is not None and now_ms >= bucket.oldest_ms + bucket.lives_ms:
            self._drop(bucket, now_ms - bucket.lives_ms)
        if bucket is None or not self._is_valid(key, bucket, applied):
            if key in self._buckets:
                return  # until the store has said that the bucket was not reset
            texts = (key, applied.entity, applied.bucket, applied.owner, principal)
            layers, size = applied.quota.layers, BUCKET_BYTES + sum(map(getsizeof, texts))
            bucket = KnownBucket(applied, principal, self._resets, layers.ttl_ms - layers.interval_ms, size)
            self._buckets[key] = bucket
            self.bytes += size
        self._buckets.move_to_end(key)
        if bucket.newest_ms == closes_ms:
            closes_ms = bucket.newest_ms  # one object for all ids of a layer
        bucket.newest_ms = closes_ms
        for each in ids:
            if bucket.due.pop(each, None) is None and each not in bucket.ids:
                size = size_of(each)
                if not self._has_room(bucket, size, closes_ms):
                    continue
                self._add(bucket, 1, size)
            bucket.ids[each] = closes_ms
        bucket.oldest_ms = min(bucket.oldest_ms, closes_ms)
        while self.bytes > self._most_bytes and len(self._buckets) > 1:
            idle = (key for key in self._buckets if key not in self.due)
            self._forget(next(idle, next(iter(self._buckets))))

    def _has_room(self, bucket: KnownBucket, size: int, closes_ms: int) -> bool:
        """Whether a bucket has room for an id, if need be after evicting ids of older layers."""
        while bucket.bytes + size > self._most_bytes // 4:
            if bucket.oldest_ms >= closes_ms:
                return False
            self._drop(bucket, bucket.oldest_ms)
        return True

    def reset(self, keys: Sequence[bytes]) -> None:
        """Forget buckets that this node reset, or may have."""
        self.generation += 1
        for key in keys:
            self._forget(key)

    def forget_all(self) -> None:
        """Forget everything: the remembered times are invalid."""
        self.reset([*self._buckets])

    def compare(self, birth: bytes, resets: int) -> None:
        """Compare the marks of the store with the last ones: a new birth means that it lost its state.

        Args:
            birth: empty if it is not known.
            resets: the number of the last reset of any bucket.
        """
        is_lost = birth not in {b"", self.birth} and self.birth != b""
        if is_lost:
            self._lose(resets)
        self.generation += is_lost or resets != self._resets
        self.birth, self._resets = birth or self.birth, resets

    def _lose(self, resets: int) -> None:
        """Schedule all ids for renewal, except in buckets that may have been reset: the store forgot that.

        Args:
            resets: the number of the last reset now. If it is the same as before, no bucket was reset.
        """
        for key in [key for key, bucket in self._buckets.items() if bucket.resets < self._resets]:
            self._forget(key)
        for bucket in self._buckets.values():
            bucket.resets, bucket.oldest_ms = resets if resets == self._resets else 0, NEVER
            bucket.is_lost = True
            bucket.ids.update(bucket.due)
            bucket.ids, bucket.due = {}, bucket.ids
        self.due = dict.fromkeys(reversed(self._buckets))  # recently used buckets first

    # Renewals

    def renewals(
        self, most_ids: int, now_ms: int, in_force: Callable[[AppliedQuota], AppliedQuota | None]
    ) -> list[Renewal]:
        """Return the renewals of the next call. They stay due until ``renewed`` is called with the answer.

        Args:
            in_force: returns the present form of a quota; None if it was removed, or has another bucket.
        """
        found: list[Renewal] = []
        for key in [*islice(self.due, most_ids)]:
            bucket = self._buckets[key]
            applied = in_force(bucket.applied)
            if applied is None or policy_of(applied) != policy_of(bucket.applied):
                self._forget(key)
                continue
            bucket.applied = applied
            ids = self._due_ids(bucket, most_ids, now_ms)
            if ids or bucket.resets < self._resets:
                closes_ms = min([bucket.due[each] for each in ids], default=-bucket.lives_ms)
                until_ms = closes_ms + bucket.lives_ms
                whose = key, applied, bucket.principal
                resets = 0 if bucket.is_lost else bucket.resets
                found.append(Renewal(*whose, resets, ids, self.generation, until_ms))
                most_ids -= max(len(ids), 1)
            else:
                del self.due[key]
            if most_ids <= 0:
                break
        return found

    def _due_ids(self, bucket: KnownBucket, most: int, now_ms: int) -> tuple[Id, ...]:
        """Return ids of a bucket that are due, and drop the dead ones before them."""
        alive: list[Id] = []
        dead: list[Id] = []
        for each, closes_ms in bucket.due.items():
            if len(alive) == most:
                break
            (alive if now_ms < closes_ms + bucket.lives_ms else dead).append(each)
        for each in dead:
            del bucket.due[each]
            self._add(bucket, -1, -size_of(each))
        return tuple(alive)

    def renewed(self, renewal: Renewal, outcome: Outcome | None, open_ms: int, at_ms: int) -> None:
        """Note the answer to a renewal.

        Args:
            outcome: ``reject`` if the bucket was reset, ``admit`` if not; None if the store could not decide.
            open_ms: how much longer the layer with all of the ids stays open; 0 if they were not written.
            at_ms: the store's time.
        """
        key, ids = renewal.key, renewal.ids
        bucket = self._buckets.get(key)
        if bucket is None or renewal.generation != self.generation:
            return
        if bucket.applied.quota is not renewal.applied.quota:
            return  # the renewal is still due, under a new quota
        if outcome == "reject":
            self._forget(key)
            return
        if outcome is not None:
            bucket.resets, bucket.is_lost = self._resets, False
        if open_ms:
            self.learn(key, renewal.applied, renewal.principal, ids, at_ms + open_ms, at_ms)
        elif ids:
            bucket.paused_until_ms = at_ms + PAUSED_MS
            for each in ids:
                if each in bucket.due:
                    bucket.ids[each] = bucket.due.pop(each)
                    bucket.oldest_ms = min(bucket.oldest_ms, bucket.ids[each])
        self.due.pop(key, None)
        if bucket.due:
            self.due[key] = None  # after all others

    # Room

    def _drop(self, bucket: KnownBucket, until_ms: int) -> None:
        """Drop the ids of layers that had closed by ``until_ms``, except ids that are due."""
        kept = {each: closes_ms for each, closes_ms in bucket.ids.items() if closes_ms > until_ms}
        gone = bucket.ids.keys() - kept.keys()
        bucket.ids = kept
        bucket.oldest_ms = min(kept.values(), default=NEVER)
        self._add(bucket, -len(gone), -sum(map(size_of, gone)))

    def _forget(self, key: bytes) -> None:
        bucket = self._buckets.pop(key, None)
        if bucket is not None:
            self._add(bucket, -len(bucket.ids) - len(bucket.due), -bucket.bytes)
        self.due.pop(key, None)

    def _add(self, bucket: KnownBucket, ids: int, size: int) -> None:
        """Count ids and bytes that a bucket gained."""
        bucket.bytes += size
        self.bytes += size
        self.ids += ids


def policy_of(applied: AppliedQuota) -> tuple[int, Layers]:
    """The window and the layers of a quota; ids learned under others are invalid."""
    return applied.quota.window_ms, applied.quota.layers


def size_of(each: Id) -> int:
    """Estimate the memory that a known id takes, in bytes; the same for equal ids."""
    if isinstance(each, int):
        return ID_BYTES
    return ID_BYTES + (50 + len(each) if each.isascii() else 80 + 8 * len(each))
