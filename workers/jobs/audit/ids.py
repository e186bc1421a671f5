"""Judges a bucket of producer ids with exact sets: which ids were new, and the exact verdict.

If a bucket may be older than the log, or the log lacks charges, only certain answers are judged. With the
time to live (TTL) of a layer and the interval at which layers begin: an id that was in the open layer less
than TTL - interval ago is still known. An id that was in no open layer for a whole TTL is new. In between the
store is believed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from app.domain.ask import Mode
from app.domain.exact_ids import ExactIds
from app.domain.oracle import BucketCharge, IdsBucket, Judgement, corrected_now
from app.domain.quota import Layers, Quota
from workers.jobs.audit.admitted_amounts import AdmittedAmounts
from workers.jobs.audit.bucket_findings import BucketFindings
from workers.jobs.audit.levels import is_as_logged
from workers.jobs.verdicts import BucketRow, digests_of

MANY: Final = 1_024
"""Expired ids are dropped once there are this many ids, or twice as many as live ones."""
UNNOTICED_MS: Final = 1_000
"""The longest time until a node notices the writes of others."""
PLAUSIBLE: Final = 2
"""The most new ids of one refused ask that may have been taken as seen by chance."""


@dataclass(slots=True)
class IdsJudge:
    """Judges one bucket, row by row.

    Attributes:
        log_from_ms: when the log begins, as the bucket may be older; None: at the bucket's first row.
        exact: the ids and charges of the bucket, with its own layers if the state is known.
        held: None if the state is known. Otherwise when each id was last certainly in the open layer; layers
            of the bucket and of ``exact`` may then have begun at different times.
        since_ms: since when the log has all ids that a bucket of unknown state remembers.
        opened_ms: when the state last became unknown for a reason that is no finding; for one window after
            that, unlogged charges are no findings either.
        vague: charges whose times are not in the log, each at its latest possible time.
        vague_until_ms: when the last vague charge expires.
        wrote_ms: when an id was last written.
        lasts_ms: until when the store keeps the bucket, by the quota of its last write, ``under``.
        is_reset: whether the bucket was reset since the last row.
        noticed_ms: when every node has noticed the last reset.
        many: the size of ``held`` at which expired ids are dropped from it.
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
    is_reset: bool = False
    noticed_ms: float = -math.inf
    many: int = MANY
    admitted: AdmittedAmounts = field(default_factory=AdmittedAmounts)

    def judge(self, row: BucketRow, found: BucketFindings) -> None:
        """Replay one ask, and add its faults to the findings."""
        if self.is_reset:
            self.is_reset, self.noticed_ms = False, row.at_ms + UNNOTICED_MS
        if row.how == "alone":
            self._judge_alone(row, found)
            return
        tally = found.begin(row)
        newest = self.exact.newest_ms
        is_back = newest is not None and row.at_ms < newest
        if row.mode == "peek" and (is_back or row.correction):
            tally.unjudged += 1  # the store answered from a copy that it moved back in time
            return
        charge = self._charge_of(row, newest)
        self._update_certainty(charge.quota, charge.now_ms)
        if is_back != (row.correction > 0):
            self._lose_times(charge.now_ms, charge.quota)
        self._drop_expired(row, charge)
        if row.how == "renewal":
            self._judge_renewal(row, charge, found)
            self._renew(charge)
            return
        surplus = self._surplus(row, charge, found)
        if row.mode != "peek":
            self._check_ids(row, charge, found)
        judgement = self._judgement(row, charge, surplus, found)
        if judgement is None:
            tally.unjudged += 1
        else:
            tally.judged += 1
            if not is_as_logged(judgement, row):
                self._explain_difference(row, charge, judgement, found)
        if self.wrote_ms == charge.now_ms:
            self._note_lifetime(charge.quota)
        if row.mode == "admit" and not row.is_refused and not row.shadow:
            self.admitted.add(row.as_quota(), len(row.charged_ids or ()), charge.now_ms, tally)

    def _judge_alone(self, row: BucketRow, found: BucketFindings) -> None:
        """Judge an answer that a node gave from known ids, by the latest writes to the bucket.

        A node may not have noticed yet the writes of others in the last second. The answer itself wrote
        nothing; its renewal is a row of its own.
        """
        tally, newest, quota = found.begin(row), self.exact.newest_ms, row.as_quota()
        is_late = newest is not None and row.at_ms < newest - UNNOTICED_MS
        if self.layers != quota.layers or is_late or row.at_ms < self.noticed_ms:
            tally.unjudged += 1
            return
        ids = digests_of(row.ids)
        now_ms = max(row.at_ms, newest or row.at_ms)
        charge = BucketCharge(
            quota, row.usage, quota.enforcement, row.mode == "record", now_ms, row.at_ms, ids
        )
        if row.is_refused:
            judgement = self._bucket().judge(charge)
            is_right = is_as_logged(judgement, row)
            is_wrong = self.held is None and row.at_ms - self.wrote_ms >= UNNOTICED_MS
        else:
            judgement = Judgement("throttle")  # a placeholder: only the store can give the exact verdict
            is_right = all(self._certainty(each, charge)[0] for each in ids)
            earlier = replace(charge, now_ms=now_ms - UNNOTICED_MS)
            is_wrong = any(self._certainty(each, earlier)[1] for each in ids)
        is_vague = row.is_refused and now_ms < self.vague_until_ms
        if is_right or not is_wrong or is_vague:
            tally.judged += is_right
            tally.unjudged += not is_right
        else:
            tally.judged += 1
            found.differs(row, judgement)

    def _judge_renewal(self, row: BucketRow, charge: BucketCharge, found: BucketFindings) -> None:
        """Judge a renewal: its ids must have been known to the store, now or within the last second."""
        earlier = replace(charge, now_ms=charge.now_ms - UNNOTICED_MS)
        is_right = all(self._certainty(each, charge)[0] for each in charge.spreads)
        is_wrong = any(self._certainty(each, earlier)[1] for each in charge.spreads)
        tally = found.of(row)
        tally.judged += is_right or is_wrong
        tally.unjudged += not (is_right or is_wrong)
        if is_wrong:
            tally.differs += 1
            found.note("differs", row, "no renewal: the bucket does not know all of its ids")

    def _renew(self, charge: BucketCharge) -> None:
        """Apply a renewal: a node wrote known ids again, which the store may have lost."""
        self.wrote_ms = charge.now_ms
        for each in charge.spreads:
            self._adopt(each, charge)
        self._bucket().touch(charge)
        if self.held is not None:
            self._hold(charge.spreads, charge)
        self._note_lifetime(charge.quota)

    def reset(self) -> None:
        """Apply a reset by an administrator."""
        self.is_reset = True
        self._empty()
        self.layers, self.log_from_ms, self.vague_until_ms = None, -math.inf, -math.inf
        self.admitted, self.is_loaded = AdmittedAmounts(), False

    def load(self) -> None:
        """Mark the bucket as loaded by a backfill, whose content is not in the log."""
        self.is_loaded = True

    def _empty(self) -> None:
        """Empty the bucket: its state is known then."""
        self.exact, self.held, self.vague = ExactIds(), None, deque()

    def _charge_of(self, row: BucketRow, newest: int | None) -> BucketCharge:
        quota = row.as_quota()
        mode: Mode = row.mode  # type: ignore[assignment]  # as the node checked it
        now_ms = corrected_now(mode, quota, self._bucket(), row.at_ms)
        if newest is not None and now_ms < newest:
            self.admitted = AdmittedAmounts()
            if self.held is not None or self.vague:
                self._lose_times(now_ms, quota)
        ids = digests_of(row.ids)
        return BucketCharge(quota, row.usage, quota.enforcement, mode == "record", now_ms, row.at_ms, ids)

    def _update_certainty(self, quota: Quota, now_ms: int) -> None:
        """Update the knowledge of the state: it is known again once all writes have expired."""
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
            self._empty()

    def _drop_expired(self, row: BucketRow, charge: BucketCharge) -> None:
        """Empty the bucket if the store dropped it because it expired before its quota was widened."""
        now_ms, quota = charge.now_ms, charge.quota
        if now_ms < self.lasts_ms or row.observed is None or self.under is None:
            return
        is_same = (self.under.layers, self.under.window_ms) == (quota.layers, quota.window_ms)
        if is_same or round(row.observed) > len(row.charged_ids or ()):
            return
        known = (self._is_known(each, charge) for each in digests_of(row.charged_ids))
        if self.exact.charged(now_ms, quota.window_ms) or any(known):
            self._empty()
        else:  # the row does not show whether the store dropped it
            self.held, self.since_ms = {}, now_ms

    def _lose_times(self, now_ms: int, quota: Quota) -> None:
        """Forget the bucket's times: it moved back in time, or its newest time is unexpected."""
        self.held, self.since_ms, self.wrote_ms, self.opened_ms = {}, now_ms, now_ms, now_ms
        self.vague = deque(self.exact.charges[self.exact.dead :])
        self.vague_until_ms = now_ms + quota.window_ms

    def _doubt(self, now_ms: float, layers: Layers, *, may_hold_more: bool = True) -> None:
        """Treat the state as unknown from now on; its ids stay known while their layers live."""
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

    def _is_known(self, each: bytes, charge: BucketCharge) -> bool:
        """Whether the exact sets have an id."""
        return self.exact.find(each, charge.now_ms, charge.quota.layers) is not None

    def _surplus(self, row: BucketRow, charge: BucketCharge, found: BucketFindings) -> int:
        """The number of charges that only the bucket has; if there are any, it may hold unlogged ids too."""
        if row.observed is None:
            return 0
        window_ms = charge.quota.window_ms
        logged = self.exact.charged(charge.now_ms, window_ms) + len(row.charged_ids or ())
        surplus = min(round(row.observed), self.max_ids) - min(logged, self.max_ids)
        if surplus <= 0:
            return 0
        if charge.now_ms - self.opened_ms >= window_ms:
            found.unlogged(row, f"observed {logged}", surplus)
        self._doubt(charge.now_ms, charge.quota.layers)
        self.wrote_ms = charge.now_ms
        return surplus

    def _check_ids(self, row: BucketRow, charge: BucketCharge, found: BucketFindings) -> None:
        """Compare the filter's answer for each id with the exact sets, and follow the filter."""
        tally, layers, now_ms = found.of(row), charge.quota.layers, charge.now_ms
        charged, refreshed = set(digests_of(row.charged_ids)), set(digests_of(row.refreshed_ids))
        tally.charged_ids += len(charged)
        if refreshed or not row.is_refused:
            self.wrote_ms = now_ms
        falsely_seen = []
        lookups = 0
        for each in charge.spreads:
            is_held, is_new = self._certainty(each, charge)
            lookups += is_new
            if each in charged:
                if is_held:
                    tally.charged_again += 1
                    found.note("charged_again", row, "seen", digest=_signed(each))
                    self._begin_after_loss(charge)
                self.exact.forget(each)
            elif each in refreshed or not row.is_refused:
                tally.believed += not (is_held or is_new)
                if is_new:
                    falsely_seen.append(each)
                elif self.held is None and each not in refreshed and self.exact.stale(each, now_ms, layers):
                    self._doubt(now_ms, layers)  # it is in a layer that an unlogged write began
                self._adopt(each, charge)
            elif is_held:
                self._adopt(each, charge)
            elif is_new:
                self.exact.forget(each)
        tally.lookups += lookups
        tally.falsely_seen += len(falsely_seen)
        for each in falsely_seen:
            found.note("falsely_seen", row, "new", digest=_signed(each), among=lookups)
        if self.held is not None:
            self._hold(refreshed if row.is_refused else charge.spreads, charge)

    def _certainty(self, each: bytes, charge: BucketCharge) -> tuple[bool, bool]:
        """Whether a bucket certainly holds an id, and whether it certainly lacks it; both may be false."""
        now_ms, layers = charge.now_ms, charge.quota.layers
        if self.held is None:
            is_held = self._is_known(each, charge)
            return is_held, not is_held
        at_ms = self.held.get(each)
        is_held = at_ms is not None and now_ms - at_ms <= layers.ttl_ms - layers.interval_ms
        is_over = at_ms is None or now_ms - at_ms >= layers.ttl_ms
        return is_held, is_over and now_ms - self.since_ms >= layers.ttl_ms

    def _hold(self, spreads: Iterable[bytes], charge: BucketCharge) -> None:
        """Note ids that are now in the open layer, if there was certainly room for them."""
        now_ms, ttl_ms = charge.now_ms, charge.quota.layers.ttl_ms
        assert self.held is not None
        if self.exact.remembered(now_ms, charge.quota.layers) + len(charge.spreads) <= self.max_ids:
            self.held.update(dict.fromkeys(spreads, now_ms))
        else:
            self.since_ms = now_ms
        if len(self.held) > self.many:
            self.held = {each: at_ms for each, at_ms in self.held.items() if now_ms - at_ms < ttl_ms}
            self.many = max(2 * len(self.held), MANY)

    def _note_lifetime(self, quota: Quota) -> None:
        """Note how long the store keeps the bucket: until its newest layer and its newest charge expire."""
        exact = self.exact
        newest = max((exact.layers[number] for number in exact.layers), default=-math.inf)
        last_ms = exact.charges[-1] if exact.charges else -math.inf
        self.under, self.lasts_ms = quota, max(newest + quota.layers.ttl_ms, last_ms + quota.window_ms)

    def _adopt(self, each: bytes, charge: BucketCharge) -> None:
        if not self._is_known(each, charge):
            self.exact.adopt(each, charge.now_ms, charge.quota.layers)

    def _judgement(
        self, row: BucketRow, charge: BucketCharge, surplus: int, found: BucketFindings
    ) -> Judgement | None:
        """The exact judgement, given the store's number of charges; None if it is not determined."""
        exact, now_ms, window_ms = self.exact, charge.now_ms, charge.quota.window_ms
        charged = exact.charged(now_ms, window_ms)
        expected = min(charged + len(row.charged_ids or ()), self.max_ids)
        missing = 0 if row.observed is None or surplus else expected - round(row.observed)
        if missing > 0 and self.vague:
            missing -= self._drop_vague(missing, now_ms - window_ms)
            charged = exact.charged(now_ms, window_ms)
        bucket = self._bucket()
        judgement = bucket.judge(charge)
        if missing > 0 and not is_as_logged(judgement, row):
            # The charges were lost before this ask. A failover loses the newest charges.
            exact.uncharge(min(missing, charged))
            self._lose(row, missing, f"observed {expected}", charge, found)
            judgement, missing = bucket.judge(charge), 0
        elif surplus:
            exact.charges.extend([now_ms] * surplus)
            self.vague.extend([now_ms] * surplus)
            self.vague_until_ms = now_ms + window_ms
        if row.mode != "peek":
            if row.is_refused:
                bucket.touch(charge)
            else:
                bucket.charge(charge)
        if missing > 0:
            exact.uncharge(missing)  # this ask's own charges were lost
            self._lose(row, missing, f"observed {expected}", charge, found)
        if is_as_logged(judgement, row):
            return judgement
        is_vague = now_ms < self.vague_until_ms or now_ms - self.opened_ms < window_ms
        return None if is_vague or self._is_undetermined(row, judgement, charge) else judgement

    def _drop_vague(self, missing: int, since_ms: int) -> int:
        """Drop missing charges from the vague ones, which must be older than assumed; returns how many."""
        charges, dropped, left = self.exact.charges, 0, Counter[int]()
        while self.vague and dropped < missing:
            at_ms = self.vague.popleft()
            place = bisect_left(charges, at_ms, lo=self.exact.dead) + left[at_ms]
            if at_ms > since_ms and place < len(charges) and charges[place] == at_ms:
                left[at_ms] += 1
                dropped += 1
        kept = []
        for at_ms in charges[self.exact.dead :]:
            if left[at_ms]:
                left[at_ms] -= 1
            else:
                kept.append(at_ms)
        charges[self.exact.dead :] = kept
        return dropped

    def _is_undetermined(self, row: BucketRow, judgement: Judgement, charge: BucketCharge) -> bool:
        """Whether the verdict depends on ids, or on a number of ids, that are not certain."""
        if self.held is None:
            return False
        if "capacity" in {row.reason, judgement.reason}:
            return True
        for each in charge.spreads if row.is_refused or row.mode == "peek" else ():
            is_held, is_new = self._certainty(each, charge)
            if is_held == is_new or is_held != self._is_known(each, charge):
                return True
        return False

    def _lose(
        self, row: BucketRow, units: int, exact: str, charge: BucketCharge, found: BucketFindings
    ) -> None:
        found.lost(row, units, exact)
        self._begin_after_loss(charge)

    def _begin_after_loss(self, charge: BucketCharge) -> None:
        """Go on after a loss: layers begin at other times, and a full limit may be admitted again."""
        self._doubt(charge.now_ms, charge.quota.layers, may_hold_more=False)
        self.admitted = AdmittedAmounts()

    def _explain_difference(
        self, row: BucketRow, charge: BucketCharge, judgement: Judgement, found: BucketFindings
    ) -> None:
        """Count a differing verdict as ids falsely seen or lost, if that explains it, else as different.

        A refusal does not name the new ids.
        """
        if row.is_refused or row.mode == "peek":
            seen = [each for each in charge.spreads if self._is_known(each, charge)]
            unseen = [each for each in charge.spreads if each not in seen]
            for passed in range(1, min(len(unseen), PLAUSIBLE) + 1):
                others = tuple(each for each in charge.spreads if each not in unseen[:passed])
                if self._explains(others, charge, row):
                    found.of(row).falsely_seen += passed
                    name = _signed(unseen[0]) if passed == len(unseen) == 1 else None
                    exact = f"{passed} of {len(unseen)} new ids"
                    found.note("falsely_seen", row, exact, digest=name, amount=passed, among=len(unseen))
                    return
            for lost in range(1, len(seen) + 1):
                others = (*unseen, *seen[lost:], *(each + b"?" for each in seen[:lost]))
                if self._explains(others, charge, row):
                    self._lose(row, lost, f"{lost} of {len(seen)} ids known", charge, found)
                    self._drop(seen if lost == len(seen) else ())
                    return
        found.differs(row, judgement)

    def _explains(self, spreads: tuple[bytes, ...], charge: BucketCharge, row: BucketRow) -> bool:
        """Whether the ask would have had this verdict with other ids."""
        return is_as_logged(self._bucket().judge(replace(charge, spreads=spreads)), row)

    def _drop(self, spreads: Iterable[bytes]) -> None:
        """Drop ids that the store lost."""
        assert self.held is not None
        for each in spreads:
            self.exact.forget(each)
            self.held.pop(each, None)


def _signed(each: bytes) -> int:
    return int.from_bytes(each, "big", signed=True)
