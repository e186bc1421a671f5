"""Judges a bucket of producer ids by exact sets: which ids were new, and what should have been said.

A bucket that may be older than the log, or of which the log does not tell all, is judged by what is certain.
An id that was in the open layer less than a layer's life ago, less the time that one is open, is known; one
that was not there for a whole life is new. Between the two the store is believed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from app.domain.exact_ids import ExactIds
from app.domain.oracle import Charge, IdsBucket, Said, corrected
from app.domain.quota import Layers, Quota
from workers.spark.audit.admitted import Admitted
from workers.spark.audit.found import Found, spelled
from workers.spark.audit.levels import MODES, is_as_logged
from workers.spark.buckets import Asked

DIGEST_BYTES: Final = 8
MANY: Final = 1_024
"""Of so many ids, or twice those that live, the dead ones are dropped."""
PLAUSIBLE: Final = 2
"""So many ids of one ask may be taken as seen by chance, and go unnamed in a refusal."""


@dataclass(slots=True)
class Ids:
    """One principal's bucket, row by row.

    Attributes:
        log_from_ms: when the log begins; the bucket may be older. None if that is the first row.
        exact: the ids and charges that the bucket holds, in layers that begin as its own do, if it is known.
        held: None if the bucket is known. Else when each id was surely in the open layer, last; its layers
            may have begun at other times than those of ``exact``.
        since_ms: since when, in a bucket that is not known, the log tells of all that it remembers.
        opened_ms: so long ago charges may have been made that the log does not tell of, and nobody's fault.
        vague: charges whose times the log does not tell, each as late as it can have been.
        vague_until_ms: until when those count.
        wrote_ms: when an id was last written.
        lasts_ms: so long the store keeps what was written, by the settings of then, which are ``under``.
        many: how many ids ``held`` may have before the dead ones are dropped.
    """

    max_ids: int = 1_000_000
    log_from_ms: float | None = -math.inf
    exact: ExactIds = field(default_factory=ExactIds)
    held: dict[bytes, int] | None = None
    since_ms: float = -math.inf
    opened_ms: float = -math.inf
    vague: deque[int] = field(default_factory=deque)
    vague_until_ms: float = -math.inf
    wrote_ms: float = -math.inf
    lasts_ms: float = math.inf
    under: Quota | None = None
    layers: Layers | None = None
    is_loaded: bool = False
    many: int = MANY
    admitted: Admitted = field(default_factory=Admitted)

    def see(self, row: Asked, found: Found) -> None:
        """Replay one ask, and note what is not as it should be."""
        tally = found.of(row)
        tally.verdicts += 1
        tally.corrections += row.correction > 0
        newest = self.exact.newest_ms
        is_back = newest is not None and row.at_ms < newest
        if row.mode == "peek" and (is_back or row.correction):
            tally.unjudged += 1  # it was answered from a copy that moved back in time
            return
        charge = self._charge_of(row, newest)
        self._begin(charge.quota, charge.now_ms)
        if is_back != (row.correction > 0):
            self._lose_times(charge.now_ms, charge.quota)
        self._expire(row, charge)
        surplus = self._surplus(row, charge, found)
        if row.mode != "peek":
            self._learn(row, charge, found)
        said = self._counted(row, charge, surplus, found)
        if said is None:
            tally.unjudged += 1
        else:
            tally.judged += 1
            if not is_as_logged(said, row):
                self._differs(row, charge, said, found)
        if self.wrote_ms == charge.now_ms:
            self._written(charge.quota)
        if row.mode == "admit" and not row.is_refused and not row.shadow:
            self.admitted.add(row.as_quota(), len(row.charged_ids or ()), charge.now_ms, tally)

    def reset(self) -> None:
        """Begin anew: the bucket was emptied on purpose."""
        self.exact, self.held, self.layers, self.log_from_ms = ExactIds(), None, None, -math.inf
        self.vague, self.vague_until_ms = deque(), -math.inf
        self.admitted, self.is_loaded = Admitted(), False

    def load(self) -> None:
        """Something was put into the bucket that the log does not tell of."""
        self.is_loaded = True

    def _charge_of(self, row: Asked, newest: int | None) -> Charge:
        quota, bucket = row.as_quota(), self._bucket()
        mode = MODES[MODES.index(row.mode)]
        now = corrected(mode, quota, bucket, row.at_ms)
        if newest is not None and now < newest:
            self.admitted = Admitted()
            if self.held is not None or self.vague:
                self._lose_times(now, quota)
        return Charge(
            quota, row.usage, quota.enforcement, mode == "record", now, row.at_ms, _digests(row.ids)
        )

    def _begin(self, quota: Quota, now_ms: int) -> None:
        """Whether the bucket is known: it is once nothing was written for so long that it is as a new one."""
        if self.layers is None:
            self.layers, self.held = quota.layers, {}
            from_ms = now_ms if self.log_from_ms is None else self.log_from_ms
            self.since_ms = self.opened_ms = self.wrote_ms = from_ms
        if self.is_loaded:
            self._doubt(now_ms, quota.layers)
            self.opened_ms, self.wrote_ms, self.is_loaded = now_ms, now_ms, False
        if self.layers != quota.layers:
            if self.held is not None:
                self.held, self.since_ms = {}, now_ms
            self.layers = quota.layers
        if self.held is not None and now_ms - self.wrote_ms >= max(quota.layers.ttl_ms, quota.window_ms):
            self.exact, self.held, self.vague = ExactIds(), None, deque()

    def _expire(self, row: Asked, charge: Charge) -> None:
        """Let go of what the store dropped: nothing of it lived by its settings, which were widened since."""
        now, quota = charge.now_ms, charge.quota
        if now < self.lasts_ms or row.observed is None or self.under is None:
            return
        is_same = (self.under.layers, self.under.window_ms) == (quota.layers, quota.window_ms)
        if is_same or round(row.observed) > len(row.charged_ids or ()):
            return
        known = (self.exact.find(each, now, quota.layers) for each in _digests(row.charged_ids))
        if self.exact.charged(now, quota.window_ms) or any(known):
            self.exact, self.held, self.vague = ExactIds(), None, deque()
        else:  # nothing tells whether it was dropped
            self.held, self.since_ms = {}, now

    def _lose_times(self, now_ms: int, quota: Quota) -> None:
        """The bucket moved back in time, or its newest time is another: when what came is not known now."""
        self.held, self.since_ms, self.wrote_ms, self.opened_ms = {}, now_ms, now_ms, now_ms
        self.vague = deque(self.exact.charges[self.exact.dead :])
        self.vague_until_ms = now_ms + quota.window_ms

    def _doubt(self, now_ms: float, layers: Layers, *, may_hold_more: bool = True) -> None:
        """The bucket is not known from now on; what it was seen to hold it holds as long as it must."""
        if self.held is None:
            began = self.exact.layers
            self.held = {
                each: began[number] + layers.interval_ms - 1
                for number, ids in self.exact.held.items()
                for each in ids
                if number in began
            }
            self.since_ms = -math.inf
        if may_hold_more:
            self.since_ms = max(self.since_ms, now_ms)

    def _bucket(self) -> IdsBucket:
        return IdsBucket(self.max_ids, self.exact)

    def _surplus(self, row: Asked, charge: Charge, found: Found) -> int:
        """How many charges the bucket shows that no row tells of; then it may hold such ids, too."""
        if row.observed is None:
            return 0
        window_ms = charge.quota.window_ms
        told = self.exact.charged(charge.now_ms, window_ms) + len(row.charged_ids or ())
        surplus = round(row.observed) - min(told, self.max_ids)
        if surplus <= 0:
            return 0
        if charge.now_ms - self.opened_ms >= window_ms:
            found.of(row).unlogged += 1
            found.note("unlogged", row, f"observed {told}", amount=surplus)
        self._doubt(charge.now_ms, charge.quota.layers)
        self.wrote_ms = charge.now_ms
        return surplus

    def _learn(self, row: Asked, charge: Charge, found: Found) -> None:
        """Find ids of which the filter said something else than exact sets, and go on as the filter does."""
        tally, layers, now = found.of(row), charge.quota.layers, charge.now_ms
        charged, refreshed = set(_digests(row.charged_ids)), set(_digests(row.refreshed_ids))
        tally.charged_ids += len(charged)
        if refreshed or not row.is_refused:
            self.wrote_ms = now
        strangers = []
        lookups = 0
        for each in charge.spreads:
            is_held, is_new = self._known(each, charge)
            lookups += is_new
            if each in charged:
                if is_held:
                    tally.charged_again += 1
                    found.note("charged_again", row, "seen", digest=_signed(each))
                    self._begin_anew(charge)
                self.exact.forget(each)
            elif each in refreshed or not row.is_refused:
                tally.believed += not (is_held or is_new)
                if is_new:
                    strangers.append(each)
                elif self.held is None and each not in refreshed and self.exact.stale(each, now, layers):
                    self._doubt(now, layers)  # it is in a layer that began by a write that no row tells of
                self._adopt(each, charge)
            elif is_held:
                self._adopt(each, charge)
            elif is_new:
                self.exact.forget(each)
        tally.lookups += lookups
        tally.falsely_seen += len(strangers)
        for each in strangers:
            found.note("falsely_seen", row, "new", digest=_signed(each), among=lookups)
        if self.held is not None:
            self._hold(refreshed if row.is_refused else charge.spreads, charge)

    def _known(self, each: bytes, charge: Charge) -> tuple[bool, bool]:
        """Whether the bucket must hold an id, and whether it cannot; if it is not known, perhaps neither."""
        now, layers = charge.now_ms, charge.quota.layers
        if self.held is None:
            is_held = self.exact.find(each, now, layers) is not None
            return is_held, not is_held
        at_ms = self.held.get(each)
        is_held = at_ms is not None and now - at_ms <= layers.ttl_ms - layers.interval_ms
        is_over = at_ms is None or now - at_ms >= layers.ttl_ms
        return is_held, is_over and now - self.since_ms >= layers.ttl_ms

    def _hold(self, spreads: Iterable[bytes], charge: Charge) -> None:
        """Ids that are in the open layer now; none is sure to be where there may not have been room."""
        now, ttl_ms = charge.now_ms, charge.quota.layers.ttl_ms
        assert self.held is not None
        if self.exact.remembered(now, charge.quota.layers) + len(charge.spreads) <= self.max_ids:
            self.held.update(dict.fromkeys(spreads, now))
        else:
            self.since_ms = now
        if len(self.held) > self.many:
            self.held = {each: at_ms for each, at_ms in self.held.items() if now - at_ms < ttl_ms}
            self.many = max(2 * len(self.held), MANY)

    def _written(self, quota: Quota) -> None:
        """Note how long the store keeps the bucket: until its newest layer and its newest charge are over."""
        exact = self.exact
        newest = max((exact.layers[number] for number in exact.layers), default=-math.inf)
        last_ms = exact.charges[-1] if exact.charges else -math.inf
        self.under, self.lasts_ms = quota, max(newest + quota.layers.ttl_ms, last_ms + quota.window_ms)

    def _adopt(self, each: bytes, charge: Charge) -> None:
        if self.exact.find(each, charge.now_ms, charge.quota.layers) is None:
            self.exact.adopt(each, charge.now_ms, charge.quota.layers)

    def _counted(self, row: Asked, charge: Charge, surplus: int, found: Found) -> Said | None:
        """What should have been said, once the count of charges is the store's; None if nobody can know."""
        exact, now, window_ms = self.exact, charge.now_ms, charge.quota.window_ms
        charged = exact.charged(now, window_ms)
        expected = min(charged + len(row.charged_ids or ()), self.max_ids)
        missing = 0 if row.observed is None or surplus else expected - round(row.observed)
        if missing > 0 and self.vague:
            missing -= self._let_go(missing, now - window_ms)
            charged = exact.charged(now, window_ms)
        bucket = self._bucket()
        said = bucket.judge(charge)
        if missing > 0 and not is_as_logged(said, row):
            # they were gone before this ask; the newest are what a failover takes
            exact.uncharge(min(missing, charged))
            self._lost(row, missing, f"observed {expected}", charge, found)
            said, missing = bucket.judge(charge), 0
        elif surplus:
            exact.charges.extend([now] * surplus)
            self.vague.extend([now] * surplus)
            self.vague_until_ms = now + window_ms
        self._leave(row, charge)
        if missing > 0:
            exact.uncharge(missing)  # this ask's own charges were never made
            self._lost(row, missing, f"observed {expected}", charge, found)
        if is_as_logged(said, row):
            return said
        is_vague = now < self.vague_until_ms or now - self.opened_ms < window_ms
        return None if is_vague or self._is_open(row, said, charge) else said

    def _let_go(self, missing: int, since_ms: int) -> int:
        """Drop charges whose times are not known, as they were older; how many it were."""
        charges, gone = self.exact.charges, 0
        while self.vague and gone < missing:
            at_ms = self.vague.popleft()
            place = bisect_left(charges, at_ms, lo=self.exact.dead)
            if at_ms > since_ms and place < len(charges) and charges[place] == at_ms:
                del charges[place]
                gone += 1
        return gone

    def _is_open(self, row: Asked, said: Said, charge: Charge) -> bool:
        """Whether nobody can know which ids a verdict was about, or how many the bucket remembers."""
        if self.held is None:
            return False
        if "capacity" in {row.reason, said.reason}:
            return True
        for each in charge.spreads if row.is_refused or row.mode == "peek" else ():
            is_held, is_new = self._known(each, charge)
            seems_held = self.exact.find(each, charge.now_ms, charge.quota.layers) is not None
            if is_held == is_new or is_held != seems_held:
                return True
        return False

    def _leave(self, row: Asked, charge: Charge) -> None:
        if row.mode == "peek":
            return
        if row.is_refused:
            self._bucket().touch(charge)
        else:
            self._bucket().charge(charge)

    def _lost(self, row: Asked, units: int, exact: str, charge: Charge, found: Found) -> None:
        tally = found.of(row)
        tally.lost += 1
        tally.lost_units += units
        found.note("lost", row, exact, amount=units)
        self._begin_anew(charge)

    def _begin_anew(self, charge: Charge) -> None:
        """The store lost something: its layers begin at other times, and so much may pass once more."""
        self._doubt(charge.now_ms, charge.quota.layers, may_hold_more=False)
        self.admitted = Admitted()

    def _differs(self, row: Asked, charge: Charge, said: Said, found: Found) -> None:
        """The verdict is another one; perhaps for ids, not named, that were taken as seen or are lost."""
        if row.is_refused or row.mode == "peek":
            now, layers = charge.now_ms, charge.quota.layers
            seen = [each for each in charge.spreads if self.exact.find(each, now, layers) is not None]
            unseen = [each for each in charge.spreads if each not in seen]
            for passed in range(1, min(len(unseen), PLAUSIBLE) + 1):
                others = tuple(each for each in charge.spreads if each not in unseen[:passed])
                if self._gives(others, charge, row):
                    found.of(row).falsely_seen += passed
                    name = _signed(unseen[0]) if passed == len(unseen) == 1 else None
                    exact = f"{passed} of {len(unseen)} new ids"
                    found.note("falsely_seen", row, exact, digest=name, amount=passed, among=len(unseen))
                    return
            for gone in range(1, len(seen) + 1):
                if self._gives((*unseen, *seen[gone:], *(each + b"?" for each in seen[:gone])), charge, row):
                    self._lost(row, gone, f"{gone} of {len(seen)} ids known", charge, found)
                    self._drop(seen if gone == len(seen) else ())
                    return
        found.of(row).differs += 1
        found.note("differs", row, spelled(said.outcome, said.throttle_ms, said.reason))

    def _gives(self, spreads: tuple[bytes, ...], charge: Charge, row: Asked) -> bool:
        """Whether an ask with these ids would have had the verdict."""
        return is_as_logged(self._bucket().judge(replace(charge, spreads=spreads)), row)

    def _drop(self, spreads: Iterable[bytes]) -> None:
        """The store does not hold these ids any more."""
        assert self.held is not None
        for each in spreads:
            self.exact.forget(each)
            self.held.pop(each, None)


def _digests(ids: list[int] | None) -> tuple[bytes, ...]:
    return tuple(each.to_bytes(DIGEST_BYTES, "big", signed=True) for each in ids or ())


def _signed(each: bytes) -> int:
    return int.from_bytes(each, "big", signed=True)
