"""What one node may answer alone about producer ids, and until when: pure rules, with time as an argument.

The store remembers an id until the layer that holds it dies. Until then a node that has learned of it may
answer "seen" without the store, unless the bucket was reset, or its layers or its window changed.
While that layer is open the store would not even write; from then on each use has to be written down again,
soon but not at once: that is a *renewal*.

Times are the store's, as the node estimates them (``StoreTime``), in milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from sys import getsizeof
from typing import Final, NamedTuple

from app.domain.ask import NO_PRODUCER_ID
from app.domain.decision import Outcome
from app.domain.ladder import AppliedQuota
from app.domain.quota import Layers, Quota

Id = int | str

REFUSED_MS: Final = 1_000
"""For how long a refusal may be repeated without the store."""

PAUSED_MS: Final = 1_000
"""For how long a bucket's uses are not renewed after the store had no room for one."""

REFUSALS: Final = 256
"""The most refusals that a bucket keeps; then they are forgotten."""

BUCKET_BYTES: Final = 2_000
WAITING_BYTES: Final = 1_200
ID_BYTES: Final = 160
REFUSAL_BYTES: Final = 300
"""Bytes in memory of a bucket, of one that waits, of an id in either, and of a refusal, without their texts:
estimated from above (``tests/unit``)."""

KNOWN_BYTES: Final = 32 * 1024 * 1024
"""The memory for what a node knows: some 200,000 ids."""

FALL_MS: Final = 1_000
"""The most by which the store's clock may be set back; beyond it what is known would live too long."""

RENEWED_WITHIN_MS: Final = 250
"""A use is answered alone only if its renewal has at least this time until the layer dies."""


class StoreTime:
    """The store's time as a node estimates it by its own monotonic clock: the latest and the earliest.

    Wall clocks are not compared. The store's time is read at some moment between sending and receiving.
    Taking it for the time of sending puts the estimate ahead, and taking it for that of receiving behind,
    each by at most the round trip.
    """

    def __init__(self) -> None:
        self._ahead_ms: tuple[float, float] | None = None
        """By how much the store's clock is ahead of the monotonic one, at least and at most."""

    def read(self, store_ms: int, sent_ms: float, received_ms: float) -> float:
        """Note the store's time (its whole milliseconds) from a reply.

        Args:
            sent_ms, received_ms: when the call was sent and its reply received, by the monotonic clock.

        Returns:
            by how much the store's clock was set back, at least, in milliseconds; 0 if it was not.
        """
        least, most, fell_ms = store_ms - received_ms, store_ms + 1 - sent_ms, 0.0
        if self._ahead_ms is not None:
            before_least, before_most = self._ahead_ms
            fell_ms = max(before_least - most, 0.0)
            if not fell_ms and least <= before_most:  # else the clock was set, and only this reading counts
                least, most = max(least, before_least), min(most, before_most)
        self._ahead_ms = least, most
        return fell_ms

    def at_ms(self, monotonic_ms: float) -> int | None:
        """Return the latest that the store's time can be at a moment of the monotonic clock.

        None before the first reading. An id that is alive by this time is alive.
        """
        return None if self._ahead_ms is None else int(monotonic_ms + self._ahead_ms[1])

    def earliest_ms(self, monotonic_ms: float) -> int | None:
        """Return the earliest that the store's time can be. A wait from then on is long enough."""
        return None if self._ahead_ms is None else int(monotonic_ms + self._ahead_ms[0])


@dataclass(slots=True)
class KnownLayer:
    """A layer of the store, as far as the node knows; its ids are in ``KnownBucket``.

    Attributes:
        number: its number in the bucket; that of a newer layer is greater.
        start_ms, closes_ms, dies_ms: when it began, closes and dies, or earlier.
        known, bytes: how many ids it holds, and their size in memory, by estimate.
    """

    number: int
    start_ms: int
    closes_ms: int
    dies_ms: int
    known: int = 0
    bytes: int = 0


class Refusal(NamedTuple):
    """The store's answer to an ask for one unseen id.

    Attributes:
        quota: the quota that refused; any change of it ends the refusal, even one that is taken back.
        passes_ms: when the wait ends; 0 without a wait.
        until_ms: until when it may be repeated.
    """

    quota: Quota
    outcome: Outcome
    passes_ms: int
    until_ms: int
    largest: float | None


@dataclass(slots=True)
class KnownBucket:
    """What the node knows of one principal's bucket.

    Attributes:
        applied: the quota under which it knows that; another window or other layers end the knowledge.
        resets: the number of the last reset of any bucket when this one was known not to be reset.
        birth: the state of the store that holds what the node knows.
        bytes: its size in memory, by estimate.
        ids: all that it holds, each with the number of the layer that holds it. One table, so that what moves
            to another layer takes no more memory; and one of plain values, which the garbage collector skips.
        layers: oldest first.
        dies_ms: when the first of the layers dies; 0 without layers.
        quiet_until_ms: until when no refusal is kept, because this node recorded ids.
        paused_until_ms: until when no use is renewed, because the store could not write one.
        refused_bytes: the size in memory of its refusals, by estimate.
    """

    applied: AppliedQuota
    principal: str
    resets: int
    birth: bytes
    bytes: int
    ids: dict[Id, int] = field(default_factory=dict)
    layers: list[KnownLayer] = field(default_factory=list)
    dies_ms: int = 0
    refusals: dict[Id, Refusal] = field(default_factory=dict)
    refused_bytes: int = 0
    quiet_until_ms: int = 0
    paused_until_ms: int = 0

    @property
    def policy(self) -> tuple[int, Layers]:
        """The window and the layers under which its times are right."""
        return policy_of(self.applied)

    @property
    def known(self) -> int:
        """How many ids it holds."""
        return len(self.ids)

    def drop_dead(self, now_ms: int) -> None:
        """Drop the layers that the store no longer has."""
        self._keep([layer for layer in self.layers if now_ms < layer.dies_ms])

    def _keep(self, layers: list[KnownLayer]) -> None:
        """Keep only some of the layers, and what they hold."""
        self.bytes += sum(layer.bytes for layer in layers) - sum(layer.bytes for layer in self.layers)
        known = sum(layer.known for layer in layers)
        if not known:
            self.ids = {}
        elif known < len(self.ids):
            kept = {layer.number for layer in layers}
            self.ids = {each: number for each, number in self.ids.items() if number in kept}
        self.layers = layers
        self.dies_ms = min((layer.dies_ms for layer in layers), default=0)

    def refuse(self, each: Id, refusal: Refusal) -> None:
        """Keep a refusal of an id."""
        if len(self.refusals) >= REFUSALS:
            self.drop_refusals()
        if each not in self.refusals:
            size = REFUSAL_BYTES + size_of(each)
            self.refused_bytes += size
            self.bytes += size
        self.refusals[each] = refusal

    def drop_refusals(self) -> None:
        """Drop all refusals."""
        self.refusals.clear()
        self.bytes -= self.refused_bytes
        self.refused_bytes = 0

    def knows(self, ids: Sequence[Id]) -> bool:
        """Whether the layers hold all of these ids, and any of them is to be counted."""
        is_any, held = False, self.ids
        for each in ids:
            if each in held:
                is_any = True
            elif each != NO_PRODUCER_ID:
                return False
        return is_any

    def closed(self, ids: Iterable[Id], now_ms: int) -> list[tuple[Id, int]]:
        """Return those of the ids that no open layer holds, so that their use has to be renewed.

        Returns:
            each with the time when the layer dies that holds it.
        """
        dies = {layer.number: layer.dies_ms for layer in self.layers if now_ms >= layer.closes_ms}
        numbers = [(each, self.ids.get(each)) for each in ids]
        return [(each, dies[number]) for each, number in numbers if number is not None and number in dies]

    def put(self, ids: Sequence[Id], closes_ms: int, most_bytes: int) -> None:
        """Note that a layer which closes at this time holds these ids.

        Args:
            most_bytes: what the bucket may take. For more ids the oldest layers are dropped, but not the
                open one: the rest of its ids are asked for.
        """
        newest = self.layers[-1] if self.layers else None
        if newest is None or newest.closes_ms != closes_ms:
            newest = self._opened(newest, closes_ms)
        held, is_in = self.ids, newest.number
        for each in ids:
            was_in = held.get(each)
            if was_in == is_in or each == NO_PRODUCER_ID:
                continue
            size = size_of(each)
            if was_in is None:
                while self.bytes + size > most_bytes and self.layers[0] is not newest:
                    self._keep(self.layers[1:])
                    held = self.ids
                if self.bytes + size > most_bytes:
                    continue
                self.bytes += size
            else:
                (before,) = [layer for layer in self.layers if layer.number == was_in]
                before.known -= 1
                before.bytes -= size
            held[each] = is_in
            newest.known += 1
            newest.bytes += size

    def _opened(self, newest: KnownLayer | None, closes_ms: int) -> KnownLayer:
        """Return the layer that closes at this time; the newest one if that is the same by another clock."""
        of = self.applied.quota.layers
        start_ms = closes_ms - of.interval_ms
        if newest is None or start_ms >= newest.closes_ms:
            number = 0 if newest is None else newest.number + 1
            newest = KnownLayer(number, start_ms, closes_ms, start_ms + of.ttl_ms)
            self.layers.append(newest)
        elif start_ms < newest.start_ms:
            # the same layer by a corrected clock, or one of another state: the earlier times are safe
            newest.start_ms, newest.closes_ms, newest.dies_ms = start_ms, closes_ms, start_ms + of.ttl_ms
        self.dies_ms = min(layer.dies_ms for layer in self.layers)
        return newest


@dataclass(slots=True)
class Renewal:
    """Ids of one bucket that the node wants written to the open layer again, uncharged.

    Attributes:
        resets: as in ``KnownBucket``: if the bucket was reset after that, the store does not write them.
        birth: the state of the store that the node knows: to another one the ids are not written.
        dies_ms: when the layer dies in which the node knows them; 0 without ids.
    """

    applied: AppliedQuota
    principal: str
    resets: int
    birth: bytes
    ids: tuple[Id, ...]
    dies_ms: int = 0


@dataclass(slots=True)
class _Waiting:
    """The ids of one bucket that wait to be renewed.

    Attributes:
        resets, birth: as in ``KnownBucket``, when the first of them was used.
        bytes: its size in memory, by estimate.
        ids: by the time when the layer dies in which the node knows them; each with the time of its use. What
            is dead is not renewed: what says that the bucket was reset lives no longer.
        has_to_ask: whether the store has to be asked whether the bucket was reset, even without ids.
    """

    applied: AppliedQuota
    principal: str
    resets: int
    birth: bytes
    bytes: int
    ids: dict[int, dict[Id, int]] = field(default_factory=dict)
    has_to_ask: bool = False

    @property
    def known(self) -> int:
        """How many ids wait."""
        return sum(map(len, self.ids.values()))

    @property
    def size(self) -> tuple[int, int]:
        """How many ids wait, and its size in memory in bytes, by estimate."""
        return self.known, self.bytes

    def since_ms(self, each: Id) -> int | None:
        """Return since when an id waits; None if it does not."""
        return next((its[each] for its in self.ids.values() if each in its), None)

    def add(self, each: Id, dies_ms: int, now_ms: int) -> None:
        """Let an id wait that does not."""
        self.ids.setdefault(dies_ms, {})[each] = now_ms
        self.bytes += size_of(each)

    def add_uses(self, uses: Sequence[tuple[Id, int]], now_ms: int, most_ms: int, *, is_full: bool) -> bool:
        """Let ids wait, each with the time when its layer dies; false if one waits too long, or cannot wait.

        Args:
            most_ms: how long one may wait.
            is_full: whether no more may wait.
        """
        for each, dies_ms in uses:
            since_ms = self.since_ms(each)
            if since_ms is None:
                if is_full:
                    return False
                self.add(each, dies_ms, now_ms)
            elif now_ms - since_ms > most_ms:
                return False  # there are more than can be renewed
        return True

    def drop_dead(self, now_ms: int) -> None:
        """Drop the ids of layers that the store no longer has."""
        for dies_ms in [dies_ms for dies_ms in self.ids if now_ms >= dies_ms]:
            self.bytes -= sum(map(size_of, self.ids.pop(dies_ms)))

    def take(self, most: int) -> tuple[tuple[Id, ...], int]:
        """Take some ids of one layer, and return when that dies; no ids and 0 if none wait."""
        if not self.ids:
            return (), 0
        dies_ms, its = next(iter(self.ids.items()))
        ids = tuple(islice(its, most))
        for each in ids:
            del its[each]
        self.bytes -= sum(map(size_of, ids))
        if not its:
            del self.ids[dies_ms]
        return ids, dies_ms


class KnownIds:
    """What a node knows of producer ids, bounded by bytes; the buckets used least lately are forgotten.

    Args:
        most_bytes: the memory that it may take, by estimate.

    Attributes:
        edition: changes whenever the node forgets something: the answer to a call that was planned in another
            one teaches nothing.
        ids: how many ids it knows.
        bytes: the memory that it takes, with what waits to be renewed, by estimate.
        waiting: how many ids wait to be renewed.
    """

    def __init__(self, most_bytes: int = KNOWN_BYTES) -> None:
        self._most_bytes = most_bytes
        self._buckets: OrderedDict[bytes, KnownBucket] = OrderedDict()
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._lost: dict[bytes, list[tuple[int, list[Id]]] | None] = {}
        """Buckets that the store lost, with the ids that are still to be renewed, by the time when their
        layer dies; None before the first."""
        self._waiting_bytes = 0
        self._birth = b""
        self._resets = 0
        self.edition = 0
        self.ids = 0
        self.bytes = 0
        self.waiting = 0

    # Answers

    def answers(self, key: bytes, applied: AppliedQuota, ids: Sequence[Id], now_ms: int) -> bool:
        """Return whether the store would find all of these ids seen; their use is then noted for it.

        An ask that names no id to count is left to the store.
        """
        bucket = self._buckets.get(key)
        if bucket is None:
            return False
        if bucket.applied.quota is applied.quota and bucket.resets == self._resets and bucket.layers and ids:
            newest = bucket.layers[-1]
            if now_ms < newest.closes_ms:
                held, number = bucket.ids, newest.number
                for each in ids:
                    if held.get(each) != number:
                        break
                else:  # nearly always
                    self._buckets.move_to_end(key)
                    return True
        if not self._knows(key, bucket, applied, ids, now_ms) or not self._is_certain(key, bucket):
            return False
        self._buckets.move_to_end(key)
        if closed := bucket.closed(ids, now_ms):
            return now_ms < bucket.paused_until_ms or self._are_renewed(key, bucket, closed, now_ms)
        return True

    def _are_renewed(
        self, key: bytes, bucket: KnownBucket, closed: Sequence[tuple[Id, int]], now_ms: int
    ) -> bool:
        """Let ids wait to be renewed; false if that would be too late, so that the store has to be asked."""
        for _, dies_ms in closed:
            if dies_ms - now_ms < RENEWED_WITHIN_MS:
                return False
        waiting = self._wait(key, bucket)
        if waiting is None:
            return False
        before, most_ms = waiting.size, bucket.applied.quota.layers.interval_ms
        are_waiting = waiting.add_uses(closed, now_ms, most_ms, is_full=self._is_full)
        self._waited(waiting, before)
        if are_waiting:
            self._make_room()
        return are_waiting

    def unknown(
        self, key: bytes, applied: AppliedQuota, ids: Sequence[Id], now_ms: int
    ) -> tuple[Id, ...] | None:
        """Return the ids for which the store has to be asked; None if for all of them.

        The others are in the open layer, so the store would neither charge nor write them.
        """
        bucket = self._buckets.get(key)
        if (
            bucket is None
            or bucket.applied.quota is not applied.quota
            or bucket.resets != self._resets
            or not bucket.layers
            or now_ms >= bucket.layers[-1].closes_ms
        ):
            return None
        held, number = bucket.ids, bucket.layers[-1].number
        rest = tuple([each for each in ids if held.get(each) != number])
        if len(rest) == len(ids) or all(each == NO_PRODUCER_ID for each in rest):
            return None
        self._buckets.move_to_end(key)
        return rest

    def passes(self, key: bytes, applied: AppliedQuota, ids: Sequence[Id], now_ms: int) -> bool:
        """Return whether ids pass while the store is away: it held all of them, and was not reset since."""
        bucket = self._buckets.get(key)
        if bucket is None or not self._knows(key, bucket, applied, ids, now_ms):
            return False
        return self._is_certain(key, bucket)

    def has_refusals(self, key: bytes) -> bool:
        """Whether a bucket keeps any refusal, which may be over."""
        bucket = self._buckets.get(key)
        return bucket is not None and len(bucket.refusals) > 0

    def refusal(self, key: bytes, applied: AppliedQuota, each: Id, now_ms: int) -> Refusal | None:
        """Return the refusal to repeat for one id; None if the store has to be asked."""
        bucket = self._buckets.get(key)
        found = bucket.refusals.get(each) if bucket is not None else None
        if bucket is None or found is None or now_ms >= found.until_ms or found.quota is not applied.quota:
            return None
        return found if (bucket.resets, bucket.birth) == (self._resets, self._birth) else None

    def _knows(
        self, key: bytes, bucket: KnownBucket, applied: AppliedQuota, ids: Sequence[Id], now_ms: int
    ) -> bool:
        """Whether living layers of a bucket hold these ids, by the policy in force."""
        if bucket.applied.quota is not applied.quota:
            if bucket.policy != policy_of(applied):
                self._forget(key)
                return False
            bucket.applied = applied
        if now_ms >= bucket.dies_ms:
            self._drop_dead(bucket, now_ms)
        return bucket.knows(ids)

    # What the store said

    def learn(
        self,
        key: bytes,
        applied: AppliedQuota,
        principal: str,
        ids: Sequence[Id],
        closes_ms: int,
        now_ms: int,
        *,
        wrote: bool = False,
    ) -> None:
        """Note that the open layer of a bucket holds these ids.

        Args:
            closes_ms: when that layer closes, by the store.
            wrote: whether this node wrote them there just now, which ends the bucket's refusals.
        """
        bucket = self._buckets.get(key)
        if bucket is not None and wrote and bucket.refusals:
            self._drop_refusals(bucket)
        if (
            bucket is None
            or bucket.applied.quota is not applied.quota
            or bucket.resets != self._resets
            or bucket.birth != self._birth
        ):
            bucket = self._bucket(key, applied, principal, now_ms)
            if bucket is None:
                return
        else:  # nearly always
            self._buckets.move_to_end(key)
        bytes_, known = bucket.bytes, len(bucket.ids)
        if now_ms >= bucket.dies_ms:
            bucket.drop_dead(now_ms)
        bucket.put(ids, closes_ms, self._most_bytes // 4)
        self.bytes += bucket.bytes - bytes_
        self.ids += len(bucket.ids) - known
        self._make_room()

    def learn_refusal(
        self,
        key: bytes,
        applied: AppliedQuota,
        principal: str,
        each: Id,
        outcome: Outcome,
        throttle_ms: int,
        largest: float | None,
        at_ms: int,
    ) -> None:
        """Note that the store refused one id at a time, which it will do again until its wait is over."""
        bucket = self._bucket(key, applied, principal, at_ms)
        if bucket is None or at_ms < bucket.quiet_until_ms:
            return
        passes_ms = at_ms + throttle_ms if throttle_ms else 0
        until_ms = at_ms + min(REFUSED_MS, throttle_ms or REFUSED_MS)
        self.bytes -= bucket.bytes
        bucket.refuse(each, Refusal(applied.quota, outcome, passes_ms, until_ms, largest))
        self.bytes += bucket.bytes
        self._make_room()

    def wrote(self, key: bytes, now_ms: int, *, quiet: bool = False) -> None:
        """End the refusals of a bucket: this node wrote there, or is about to.

        Args:
            quiet: keep none for a second, as the write is still on its way.
        """
        bucket = self._buckets.get(key)
        if bucket is not None:
            if bucket.refusals:
                self._drop_refusals(bucket)
            if quiet:
                bucket.quiet_until_ms = now_ms + REFUSED_MS

    def reset(self, keys: Iterable[bytes]) -> None:
        """Forget buckets that this node reset, or may have."""
        self.edition += 1
        for key in keys:
            self._forget(key)

    def forget_all(self) -> None:
        """Forget everything: the times that the node remembers are worth nothing."""
        self.edition += 1
        for its in (self._buckets, self._waiting, self._lost):
            its.clear()
        self.ids = self.bytes = self.waiting = self._waiting_bytes = 0

    def look(self, birth: bytes, resets: int) -> None:
        """Note the marks of the store: another birth says that it lost its state.

        Args:
            birth: empty if it is not known.
            resets: the number of the last reset of any bucket.
        """
        before = self._resets
        if resets != self._resets:
            self.edition += 1
            self._resets = resets
        if not birth or birth == self._birth:
            return
        if self._birth:
            self.edition += 1
            self._lose(before)
        else:  # the first look; nothing that is known is older
            for bucket in self._buckets.values():
                bucket.birth = birth
        self._birth = birth

    def _lose(self, before: int) -> None:
        """Have everything renewed, but what may have been reset: the store does not know that any more.

        Args:
            before: the number of the last reset in the state that is lost.
        """
        for key in [key for key, bucket in self._buckets.items() if bucket.resets != before]:
            self._forget(key)
        for key in [key for key, waiting in self._waiting.items() if waiting.resets != before]:
            self._end_wait(key)
        if self._resets == 0:  # no bucket was reset since
            for bucket in self._buckets.values():
                bucket.resets = 0
            for waiting in self._waiting.values():
                waiting.resets = 0
        self._lost = dict.fromkeys(reversed(self._buckets))  # those used lately first

    def _bucket(self, key: bytes, applied: AppliedQuota, principal: str, now_ms: int) -> KnownBucket | None:
        """Return the bucket to add something learned to; None until it is known whether it was reset."""
        bucket = self._buckets.get(key)
        if bucket is not None and bucket.policy != policy_of(applied):
            self._forget(key)
            bucket = None
        if bucket is None:
            own_bytes = BUCKET_BYTES + _texts(key, applied, principal)
            bucket = KnownBucket(applied, principal, self._resets, self._birth, own_bytes)
            self._buckets[key] = bucket
            self.bytes += own_bytes
        self._buckets.move_to_end(key)
        if (bucket.resets, bucket.birth) == (self._resets, self._birth):
            return bucket
        self._drop_dead(bucket, now_ms)
        if not bucket.layers:  # nothing is left that could have been reset or lost
            self._drop_refusals(bucket)
            bucket.resets, bucket.birth = self._resets, self._birth
        return bucket if self._is_certain(key, bucket) else None

    def _is_certain(self, key: bytes, bucket: KnownBucket) -> bool:
        """Whether the marks say that a bucket was not reset; if they do not, the store will be asked."""
        if bucket.resets == self._resets:
            return True
        waiting = self._wait(key, bucket)
        if waiting is not None:
            waiting.has_to_ask = True
        return False

    # Renewals

    @property
    def has_renewals(self) -> bool:
        """Whether something waits to be renewed."""
        return bool(self._waiting or self._lost)

    @property
    def is_restoring(self) -> bool:
        """Whether what the store lost is not written again yet."""
        return bool(self._lost)

    def next_renewal(
        self, most_ids: int, now_ms: int, in_force: Callable[[AppliedQuota], AppliedQuota | None]
    ) -> tuple[bytes, Renewal] | None:
        """Take the next renewal: those after a loss come first. None if nothing waits that is alive.

        Args:
            in_force: returns a quota as it is now; None if it was removed, or has another bucket.
        """
        while self._lost or self._waiting:
            take = self._next_lost if self._lost else self._next_waiting
            taken = take(most_ids, now_ms)
            if taken is None:
                continue
            renewal = taken[1]
            now = in_force(renewal.applied)
            if now is not None and policy_of(now) == policy_of(renewal.applied):
                renewal.applied = now
                return taken
        return None

    def renewed(
        self, key: bytes, renewal: Renewal, edition: int, now_ms: int, *, was_reset: bool, is_written: bool
    ) -> None:
        """Note the answer to a renewal; ``learn`` gets separately what the store holds now.

        Args:
            edition: that in which the renewal was taken.
            is_written: whether the store holds all of the ids. If not, the next try is in a second.
        """
        bucket = self._buckets.get(key)
        if bucket is None:
            return
        if renewal.ids and not is_written:
            bucket.paused_until_ms = now_ms + PAUSED_MS
        if edition != self.edition:
            return
        if was_reset:
            self._forget(key)
        elif key not in self._lost and (bucket.resets == renewal.resets or bucket.birth != self._birth):
            bucket.resets, bucket.birth = self._resets, self._birth  # it is confirmed, or all of it restored

    def put_back(self, key: bytes, renewal: Renewal, edition: int, now_ms: int) -> None:
        """Keep a renewal for later that could not be sent, or that the store's state was not known for.

        Args:
            edition: that in which it was taken. If the node forgot something since, it may have been this.
        """
        if edition != self.edition:
            return
        bucket = self._buckets.get(key)
        birth = self._birth if bucket is None else bucket.birth
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._add_waiting(key, renewal.applied, renewal.principal, renewal.resets, birth)
        before = waiting.size
        for each in renewal.ids:
            if waiting.since_ms(each) is None:
                waiting.add(each, renewal.dies_ms, now_ms)
        self._waited(waiting, before)
        waiting.has_to_ask = waiting.has_to_ask or not renewal.ids

    def _next_lost(self, most_ids: int, now_ms: int) -> tuple[bytes, Renewal] | None:
        key = next(iter(self._lost))
        left, bucket = self._lost[key], self._buckets.get(key)
        if bucket is None:
            del self._lost[key]
            return None
        if left is None:
            of: dict[int, list[Id]] = {layer.number: [] for layer in bucket.layers}
            for each, number in bucket.ids.items():
                of[number].append(each)
            left = self._lost[key] = [
                (layer.dies_ms, of[layer.number]) for layer in bucket.layers if layer.known
            ]
        left[:] = [(dies_ms, its) for dies_ms, its in left if now_ms < dies_ms]
        if not left:
            del self._lost[key]
            return None
        dies_ms, its = left[-1]
        ids = tuple(its[-most_ids:])
        del its[-most_ids:]
        if not its:
            left.pop()
        if not left:
            del self._lost[key]
        # what was reset since the loss was reset since the node learned it
        return key, Renewal(bucket.applied, bucket.principal, 0, self._birth, ids, dies_ms)

    def _next_waiting(self, most_ids: int, now_ms: int) -> tuple[bytes, Renewal] | None:
        key, waiting = next(iter(self._waiting.items()))
        before = waiting.size
        waiting.drop_dead(now_ms)
        ids, dies_ms = waiting.take(most_ids)
        self._waited(waiting, before)
        has_to_ask, waiting.has_to_ask = waiting.has_to_ask and key in self._buckets, False
        if not waiting.ids:
            self._end_wait(key)
        if not ids and not has_to_ask:
            return None
        resets = waiting.resets if waiting.birth == self._birth else 0
        return key, Renewal(waiting.applied, waiting.principal, resets, self._birth, ids, dies_ms)

    def _wait(self, key: bytes, bucket: KnownBucket) -> _Waiting | None:
        """Return what waits of a bucket; None if too much waits for one bucket more."""
        waiting = self._waiting.get(key)
        if waiting is not None or self._is_full:
            return waiting
        return self._add_waiting(key, bucket.applied, bucket.principal, bucket.resets, bucket.birth)

    def _add_waiting(
        self, key: bytes, applied: AppliedQuota, principal: str, resets: int, birth: bytes
    ) -> _Waiting:
        own_bytes = WAITING_BYTES + _texts(key, applied, principal)
        waiting = self._waiting[key] = _Waiting(applied, principal, resets, birth, own_bytes)
        self.bytes += own_bytes
        self._waiting_bytes += own_bytes
        return waiting

    @property
    def _is_full(self) -> bool:
        """Whether what waits takes its share of the memory."""
        return self._waiting_bytes >= self._most_bytes // 4

    def _end_wait(self, key: bytes) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self.waiting -= waiting.known
            self.bytes -= waiting.bytes
            self._waiting_bytes -= waiting.bytes

    def _waited(self, waiting: _Waiting, before: tuple[int, int]) -> None:
        """Add up what waits, of which a part had this size before it changed."""
        known, bytes_ = before
        self.waiting += waiting.known - known
        self.bytes += waiting.bytes - bytes_
        self._waiting_bytes += waiting.bytes - bytes_

    # Room

    def _drop_dead(self, bucket: KnownBucket, now_ms: int) -> None:
        bytes_, known = bucket.bytes, bucket.known
        bucket.drop_dead(now_ms)
        self.bytes += bucket.bytes - bytes_
        self.ids += bucket.known - known

    def _drop_refusals(self, bucket: KnownBucket) -> None:
        self.bytes -= bucket.refused_bytes
        bucket.drop_refusals()

    def _forget(self, key: bytes) -> None:
        bucket = self._buckets.pop(key, None)
        if bucket is not None:
            self.bytes -= bucket.bytes
            self.ids -= bucket.known
        self._end_wait(key)
        self._lost.pop(key, None)

    def _make_room(self) -> None:
        while self.bytes > self._most_bytes and len(self._buckets) > 1:
            _, bucket = self._buckets.popitem(last=False)
            self.bytes -= bucket.bytes
            self.ids -= bucket.known


def policy_of(applied: AppliedQuota) -> tuple[int, Layers]:
    """The window and the layers of a quota: what is known under others is worth nothing."""
    return applied.quota.window_ms, applied.quota.layers


def size_of(each: Id) -> int:
    """Estimate the memory that a known id takes, in bytes; the same for equal ids."""
    if isinstance(each, int):
        return ID_BYTES
    return ID_BYTES + (50 + len(each) if each.isascii() else 80 + 8 * len(each))


def _texts(key: bytes, applied: AppliedQuota, principal: str) -> int:
    """Return the size in bytes of what names a bucket."""
    texts: tuple[object, ...] = (key, applied.entity, applied.bucket, applied.owner, principal)
    return sum(map(getsizeof, texts))
