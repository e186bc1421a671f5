"""The oracle: whole decisions in plain Python, with which the store's script must agree.

It defines the answers and the state of the script, with the same arithmetic in the same order, and without
regard to speed. Time is an argument. One oracle is one store.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from app.domain import sampled_rate, token_bucket
from app.domain.ask import Ask, Mode
from app.domain.bounds import restrict
from app.domain.caller import ANYONE, Caller
from app.domain.decision import (
    BYTE_RATES,
    REQUEST_RATES,
    Decision,
    Outcome,
    Reason,
    Source,
    Verdict,
    combine,
    is_charged,
)
from app.domain.holds import MOST_HOLDS, Hold, Holds, granted_of, held, moved, slice_of, with_hold, without
from app.domain.ladder import AppliedQuota, MatchingRules, Quotas, applied_quotas
from app.domain.producer_ids import FULL_MS, ProducerIds
from app.domain.quota import (
    CONNECTION_CREATION_RATE,
    KEYS,
    MAX_THROTTLE_MS,
    RECHECK_MS,
    Enforcement,
    Quota,
)
from app.domain.retry import RETRY_MS, Content, content_of
from app.domain.undo import Stamp, give_back_sample, give_back_tokens
from app.domain.usage import enforcement_of, spreads_of, usage_of


class Judgement(NamedTuple):
    """The answer of one bucket to one charge."""

    outcome: Outcome
    throttle_ms: int = 0
    reason: Reason | None = None
    largest: float | None = None


ADMIT: Final = Judgement("admit")


@dataclass(frozen=True, slots=True)
class BucketCharge:
    """The charge of an ask to one bucket.

    Attributes:
        usage: in units of the limit; for producer ids, their number.
        spreads: the distinct ids, each spread over 32 bytes, without ``-1``.
        now_ms: the time in the bucket, which never runs backwards; see ``corrected_now``.
        wait_from_ms: the uncorrected time, from which waits are counted.
        later_ms: measure a delay this much later, with the charge recorded now (for KIP-124's sum).
        full: the store has no room for anything new.
    """

    quota: Quota
    usage: float
    enforcement: Enforcement
    recording: bool
    now_ms: int
    wait_from_ms: int
    spreads: tuple[bytes, ...] = ()
    later_ms: int = 0
    full: bool = False

    @property
    def samples(self) -> int:
        """The number of samples to measure over: deny decides one sample as two."""
        return max(self.quota.samples, 2) if self.enforcement == "deny" else self.quota.samples


class Bucket(Protocol):
    """The operations of a bucket of any algorithm."""

    @property
    def newest_ms(self) -> int | None:
        """The time of its last event, refill, layer or charge; None if it is absent."""

    def move(self, by_ms: int) -> None:
        """Shift all its times by the same amount, so that ages stay the same."""

    def judge(self, charge: BucketCharge) -> Judgement:
        """The answer to a charge; writes nothing."""

    def touch(self, charge: BucketCharge) -> None:
        """Make the writes that happen even if the ask is refused."""

    def charge(self, charge: BucketCharge) -> bool:
        """Write the charge; return False if there was nothing to charge."""

    def refund(self, charge: BucketCharge) -> None:
        """Give the usage back."""

    def shows(self, charge: BucketCharge) -> tuple[float, float]:
        """Observed and remaining, in the limit's unit."""


@dataclass(slots=True)
class RateBucket:
    """A bucket of a sampled rate.

    Attributes:
        birth: changes when earlier charges can no longer be undone; 0 before the first undoable charge.
        took: the units that the last charge took.
    """

    state: sampled_rate.Samples = ()
    birth: int = 0
    took: float = 0.0
    holds: Holds = ()

    @property
    def newest_ms(self) -> int | None:
        return self.state[-1].last_ms if self.state else None

    def move(self, by_ms: int) -> None:
        self.state = tuple(
            s._replace(start_ms=s.start_ms + by_ms, last_ms=s.last_ms + by_ms) for s in self.state
        )
        self.birth += self.birth > 0
        self.holds = moved(self.holds, by_ms)

    def reckon(self, charge: BucketCharge) -> Holds:
        quota, before = charge.quota, self.holds
        self.state, self.holds = sampled_rate.reckon(
            self.state, before, charge.now_ms, quota.samples, quota.sample_ms
        )
        return before[: len(before) - len(self.holds)]

    def judge(self, charge: BucketCharge) -> Judgement:
        quota = charge.quota
        if charge.enforcement == "delay":
            return self._delayed(charge)
        if charge.usage == 0:
            return ADMIT
        if sampled_rate.too_large(charge.usage, quota.limit, charge.samples, quota.sample_ms):
            largest = sampled_rate.largest_usage(quota.limit, charge.samples, quota.sample_ms)
            return Judgement("reject", reason="too_large", largest=largest)
        measured, _ = sampled_rate.measure(
            self._with_holds(charge), charge.now_ms, charge.samples, quota.sample_ms
        )
        if measured <= quota.limit:
            return ADMIT
        wait = sampled_rate.wait_ms(
            self.state, charge.usage, charge.now_ms, quota.limit, charge.samples, quota.sample_ms, self.holds
        )
        return Judgement("throttle", min(charge.now_ms - charge.wait_from_ms + wait, MAX_THROTTLE_MS))

    def touch(self, charge: BucketCharge) -> None:
        pass

    def charge(self, charge: BucketCharge) -> bool:
        self.state, self.took = self._recorded(charge, charge.usage), charge.usage
        return True

    def refund(self, charge: BucketCharge) -> None:
        self.state = sampled_rate.refund(self.state, charge.usage)

    def undo(self, _charge: BucketCharge, stamp: Stamp) -> float:
        """Take a charge back; return how much was given back."""
        self.state, given = give_back_sample(self.state, stamp)
        return given

    def capacity(self, charge: BucketCharge) -> float:
        return sampled_rate.largest_usage(charge.quota.limit, charge.samples, charge.quota.sample_ms)

    def hold(self, charge: BucketCharge, lease: bytes, lease_ms: int) -> None:
        self.state = self._recorded(charge, 0.0)
        self.holds = with_hold(self.holds, Hold(lease, charge.usage, charge.now_ms + lease_ms))

    def settle(self, charge: BucketCharge, lease: bytes) -> bool:
        found, self.holds = without(self.holds, lease)
        if found is not None:
            self.state = self._recorded(charge, charge.usage)
        return found is not None

    def shows(self, charge: BucketCharge) -> tuple[float, float]:
        quota = charge.quota
        _, window = sampled_rate.measure(self.state, charge.now_ms, charge.samples, quota.sample_ms)
        alive = sampled_rate.live_samples(self.state, charge.now_ms, charge.samples, quota.sample_ms)
        used = sampled_rate.total(alive) + held(self.holds)
        return used / (window / 1000), quota.limit * (window / 1000) - used

    def _delayed(self, charge: BucketCharge) -> Judgement:
        quota = charge.quota
        at = charge.now_ms + charge.later_ms
        observed, window = sampled_rate.measure(self._with_holds(charge), at, charge.samples, quota.sample_ms)
        delay = sampled_rate.delay_ms(observed, quota.limit, window, quota.longest_delay_ms)
        return Judgement("delay", delay) if delay else ADMIT

    def _with_holds(self, charge: BucketCharge) -> sampled_rate.Samples:
        """The state if the charge, and all units that are held, were recorded now."""
        return self._recorded(charge, charge.usage + held(self.holds))

    def _recorded(self, charge: BucketCharge, usage: float) -> sampled_rate.Samples:
        quota = charge.quota
        return sampled_rate.record(self.state, usage, charge.now_ms, quota.samples, quota.sample_ms)


@dataclass(slots=True)
class TokensBucket:
    """A token bucket.

    Attributes:
        forgiven: the debt that the last write forgave.
        birth, took: as for a sampled rate.
        largest_limit: the largest limit of any write since the bucket was born.
        burst: the burst at the last write.
        lapses: whether leases ended before this ask, so that it writes even if it is refused.
    """

    state: token_bucket.Tokens | None = None
    forgiven: float = 0.0
    birth: int = 0
    took: float = 0.0
    largest_limit: float = 0.0
    burst: float = 0.0
    holds: Holds = ()
    lapses: bool = False

    @property
    def newest_ms(self) -> int | None:
        return self.state.at_ms if self.state else None

    def move(self, by_ms: int) -> None:
        if self.state:
            self.state = self.state._replace(at_ms=self.state.at_ms + by_ms)
            self.birth += self.birth > 0
        self.holds = moved(self.holds, by_ms)

    def reckon(self, charge: BucketCharge) -> Holds:
        quota, before = charge.quota, self.holds
        self.state, self.holds = token_bucket.reckon(
            self.state, before, charge.now_ms, quota.limit, quota.burst
        )
        lapsed = before[: len(before) - len(self.holds)]
        self.lapses = held(lapsed) > 0
        return lapsed

    def judge(self, charge: BucketCharge) -> Judgement:
        quota = charge.quota
        if charge.enforcement == "delay":
            return self._delayed(charge)
        if charge.usage > quota.burst:
            return Judgement("reject", reason="too_large", largest=quota.burst)
        if charge.usage == 0 or self._tokens(charge) >= charge.usage:
            return ADMIT
        state, _ = self._after_forgiving(charge)
        wait = token_bucket.wait_ms(state, charge.usage, charge.now_ms, quota.limit, quota.burst, self.holds)
        return Judgement("throttle", min(charge.now_ms - charge.wait_from_ms + wait, MAX_THROTTLE_MS))

    def touch(self, charge: BucketCharge) -> None:
        """Forgive the debt beyond the longest one, even if the ask is refused."""
        state, self.forgiven = self._after_forgiving(charge)
        if self.forgiven:
            self.state = state
        if self.forgiven or self.lapses:
            self._write(charge)

    def charge(self, charge: BucketCharge) -> bool:
        _, before = self._after_forgiving(charge)
        self.took = self._tokens(charge)
        tokens, now = self._spent(charge)
        self.state, self.forgiven = token_bucket.Tokens(tokens, charge.now_ms), before + now
        self.took -= tokens
        self._write(charge)
        return True

    def refund(self, charge: BucketCharge) -> None:
        self.touch(charge)
        if self.state is not None:
            self.birth += self.birth > 0
            self.state = token_bucket.refund(self.state, charge.usage, self._full(charge))
            self._write(charge)

    def undo(self, charge: BucketCharge, stamp: Stamp) -> float:
        """Take a charge back; return how much was given back."""
        state, self.forgiven = self._after_forgiving(charge)
        if self.state is None:
            return 0.0
        if self.forgiven:
            self.state = state
            self._write(charge)
            return 0.0
        limit = max(self.largest_limit, charge.quota.limit)
        state, given = give_back_tokens(self.state, stamp, charge.now_ms, limit, self._full(charge))
        if given:
            self.state = state
            self._write(charge)
        return given

    def _write(self, charge: BucketCharge) -> None:
        """Update the birth, the largest limit and the burst for a write."""
        self.birth += self.birth > 0 and (charge.quota.burst < self.burst or self.forgiven > 0)
        self.largest_limit = max(self.largest_limit, charge.quota.limit)
        self.burst = charge.quota.burst

    def capacity(self, charge: BucketCharge) -> float:
        return charge.quota.burst

    def hold(self, charge: BucketCharge, lease: bytes, lease_ms: int) -> None:
        self.charge(charge)
        self.holds = with_hold(self.holds, Hold(lease, charge.usage, charge.now_ms + lease_ms))

    def settle(self, charge: BucketCharge, lease: bytes) -> bool:
        found, rest = without(self.holds, lease)
        if found is not None:
            _, self.forgiven = self._after_forgiving(charge)
            tokens, self.holds = self._tokens(charge) + (found.units - charge.usage), rest
            self.state = token_bucket.Tokens(min(self._full(charge), tokens), charge.now_ms)
            self._write(charge)
        return found is not None

    def shows(self, charge: BucketCharge) -> tuple[float, float]:
        tokens = self._tokens(charge)
        return charge.quota.burst - tokens, tokens

    def _delayed(self, charge: BucketCharge) -> Judgement:
        quota = charge.quota
        after = token_bucket.Tokens(self._spent(charge)[0], charge.now_ms)
        tokens = token_bucket.tokens_at(
            after, charge.now_ms + charge.later_ms, quota.limit, self._full(charge)
        )
        delay = token_bucket.delay_ms(tokens, quota.limit, quota.longest_delay_ms)
        return Judgement("delay", delay) if delay else ADMIT

    def _full(self, charge: BucketCharge) -> float:
        """The most tokens while the leases last."""
        return token_bucket.most_tokens(charge.quota.burst, self.holds)

    def _tokens(self, charge: BucketCharge) -> float:
        state, _ = self._after_forgiving(charge)
        return token_bucket.tokens_at(state, charge.now_ms, charge.quota.limit, self._full(charge))

    def _spent(self, charge: BucketCharge) -> tuple[float, float]:
        """The tokens after the charge, and the forgiven debt."""
        return token_bucket.forgive(self._tokens(charge) - charge.usage, charge.quota.max_debt)

    def _after_forgiving(self, charge: BucketCharge) -> tuple[token_bucket.Tokens, float]:
        """The state with at most the longest debt, and the forgiven debt."""
        quota, now_ms = charge.quota, charge.now_ms
        if self.state is None:
            return token_bucket.Tokens(quota.burst, now_ms), 0.0
        level = token_bucket.tokens_at(self.state, now_ms, quota.limit, self._full(charge))
        level, over = token_bucket.forgive(level, quota.max_debt)
        return (token_bucket.Tokens(level, now_ms), over) if over else (self.state, 0.0)


@dataclass(slots=True)
class IdsBucket:
    """The bucket of a principal's producer ids."""

    max_ids: int
    state: ProducerIds = field(default_factory=ProducerIds)

    @property
    def newest_ms(self) -> int | None:
        return self.state.newest_ms

    def move(self, by_ms: int) -> None:
        self.state.move(by_ms)

    def judge(self, charge: BucketCharge) -> Judgement:
        quota, now = charge.quota, charge.now_ms
        unseen = len(self._unseen(charge))
        if unseen == 0:
            return ADMIT
        corrected = now - charge.wait_from_ms
        charged = self.state.charged(now, quota.window_ms)
        if charge.recording:
            if quota.limit == 0:
                return Judgement("delay", quota.window_ms)
            if charged + unseen <= quota.limit:
                return ADMIT
            charges = [*self.state.charges, *[now] * unseen][-self.max_ids :]
            after = ProducerIds(self.state.layers, self.state.segments, charges)
            wait = corrected + after.wait_for_rate(1, now, quota.limit, quota.window_ms)
            return Judgement("delay", min(wait, MAX_THROTTLE_MS))
        largest = min(quota.limit, self.max_ids)
        if unseen > largest:
            return Judgement("reject", reason="too_large", largest=largest)
        rate = capacity = 0
        if charged + unseen > quota.limit:
            rate = corrected + self.state.wait_for_rate(unseen, now, quota.limit, quota.window_ms)
        if self.state.remembered(now, quota.layers) + unseen > self.max_ids:
            capacity = corrected + self.state.wait_for_capacity(now, quota.layers)
        if charge.full and self.newest_ms is not None and self._grows(charge, charged + unseen):
            capacity = max(capacity, FULL_MS)
        if not rate and not capacity:
            return ADMIT
        wait = min(max(rate, capacity), MAX_THROTTLE_MS)
        return Judgement("throttle", wait, "capacity" if capacity > rate else None)

    def touch(self, charge: BucketCharge) -> None:
        now, layers, limit = charge.now_ms, charge.quota.layers, charge.quota.limit
        for spread in self._stale(charge):
            self.state.refresh(spread, now, layers, limit, self.max_ids, full=charge.full)

    def charge(self, charge: BucketCharge) -> bool:
        unseen, now, quota = self._unseen(charge), charge.now_ms, charge.quota
        self.touch(charge)
        if unseen:
            self.state.charge(
                unseen, now, quota.window_ms, quota.layers, quota.limit, self.max_ids, full=charge.full
            )
        return bool(unseen)

    def renew(self, charge: BucketCharge) -> None:
        """Write ids that a node knows, uncharged: refresh seen ids as any ask does, and restore lost ones."""
        unseen, now, quota = self._unseen(charge), charge.now_ms, charge.quota
        self.touch(charge)
        self.state.renew(unseen, now, quota.layers, quota.limit, self.max_ids, full=charge.full)

    def open_ms(self, charge: BucketCharge) -> int:
        """How long the layer that holds all ids of a charge stays open; 0 if no layer holds them all."""
        return self.state.open_ms(charge.spreads, charge.now_ms, charge.quota.layers)

    def refund(self, charge: BucketCharge) -> None:
        raise AssertionError(f"ids cannot be given back, not even {charge.usage}")

    def shows(self, charge: BucketCharge) -> tuple[float, float]:
        quota = charge.quota
        charged = self.state.charged(charge.now_ms, quota.window_ms)
        room = max(self.max_ids - self.state.remembered(charge.now_ms, quota.layers), 0)
        return charged, min(quota.limit - charged, room)

    def _grows(self, charge: BucketCharge, charges: int) -> bool:
        """Whether the bucket must grow to hold the unseen ids and the refreshed ones."""
        written = len(self._unseen(charge)) + len(self._stale(charge))
        return charges > self.state.capacity or self.state.is_short(
            written, charge.now_ms, charge.quota.layers
        )

    def _unseen(self, charge: BucketCharge) -> list[bytes]:
        return [s for s in charge.spreads if self.state.find(s, charge.now_ms, charge.quota.layers) is None]

    def _stale(self, charge: BucketCharge) -> list[bytes]:
        """The seen ids that are missing from the open layer."""
        now, layers = charge.now_ms, charge.quota.layers
        seen = [s for s in charge.spreads if self.state.find(s, now, layers) is not None]
        return [s for s in seen if self.state.stale(s, now, layers)]


HoldingBucket = RateBucket | TokensBucket
"""A bucket that can hold units for leases."""


def holding(bucket: Bucket) -> HoldingBucket:
    """Narrow the type of a bucket that does not count ids."""
    assert isinstance(bucket, HoldingBucket)
    return bucket


@dataclass(slots=True)
class Part:
    """One quota's part of a decision: the quota, its bucket, and the ask's charge to it.

    Attributes:
        lapsed: the holds of leases that ended since the last write; their units are spent now.
    """

    applied: AppliedQuota
    bucket: Bucket
    charge: BucketCharge
    lapsed: Holds = ()


class Leased(NamedTuple):
    """The result of an ask for a lease.

    Attributes:
        granted: the units by usage field; empty if nothing was granted.
    """

    decision: Decision
    granted: dict[str, float]


class Oracle:
    """The buckets and kept answers of one store, and decisions on them.

    Args:
        when_full: the verdict of a quota that needs a new bucket while the store is full.

    Attributes:
        birth: the birth of the state, once a node has read it; empty before.
        resets: the number of the last reset of each bucket that was reset, by its key.
        full: the store is full. It takes no new bucket and no new kept answer, and no bucket of ids grows.
        corrections: how often a bucket's newest time was ahead of the clock.
        births: the newest birth of any bucket, so that no two births are the same.
        history: changes when a replica takes over.
        lapsed: the units of leases that counted as spent because the leases ended unsettled.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        max_ids: int = 1_000_000,
        sequential: bool = False,
        when_full: Callable[[Ask, AppliedQuota], Verdict] | None = None,
    ) -> None:
        self.full = False
        self._when_full = when_full
        self.secret = secret
        self.max_ids = max_ids
        self.sequential = sequential
        self.buckets: dict[tuple[object, ...], Bucket] = {}
        self.answers: dict[Content, tuple[Decision, int]] = {}
        self.birth = b""
        self.resets: dict[tuple[object, ...], int] = {}
        self.corrections = 0
        self.births = 0
        self.history = b"1"
        self.lapsed = 0.0

    def decide(
        self, ask: Ask, quotas: Quotas, rules: MatchingRules, now_ms: int, caller: Caller = ANYONE
    ) -> Decision:
        """Decide an ask, and write to buckets and kept answers.

        Raises:
            OutOfBoundsError: the caller is bound, and the ask would record in, or refund to, a shared bucket.
        """
        applied = list(restrict(ask, applied_quotas(ask, quotas, rules), caller.bound_to))
        retry = content_of(ask, caller.key)
        if retry in self.answers and now_ms - self.answers[retry][1] < RETRY_MS:
            return self.answers[retry][0]
        parts = [self._part(ask, quota, now_ms) for quota in applied]
        verdicts = self._verdicts(ask, parts)
        outcome, throttle_ms, limited_by = combine(verdicts, sequential=self.sequential)
        full = {i for i, verdict in enumerate(verdicts) if verdict.reason == "store_full"}
        written = _write(ask, outcome, [part for i, part in enumerate(parts) if i not in full])
        source: Source = "fallback" if full else "store" if parts else "local"
        charged = is_charged(ask.mode, outcome) and (not full or len(full) < len(parts))
        shown = (verdict if i in full else _shown(verdict, parts[i]) for i, verdict in enumerate(verdicts))
        detail = tuple(shown) if ask.detail else None
        decision = Decision(outcome, throttle_ms, charged, len(parts), source, limited_by, detail)
        if retry is not None and written and not self.full:
            self.answers[retry] = (decision, now_ms)
        return decision

    def renew(self, ask: Ask, applied: AppliedQuota, resets: int, birth: bytes, now_ms: int) -> Outcome:
        """Write known ids that the store may have lost, uncharged.

        Args:
            resets: the number of the last reset that the node knew of.
            birth: the birth of the state that the node knows.

        Returns:
            ``admit`` if the ids were written; ``throttle`` if the state is another; ``reject`` if the bucket
            was reset since.
        """
        part = self._part(replace(ask, mode="record"), applied, now_ms)
        assert isinstance(part.bucket, IdsBucket)
        if not birth or birth != self.birth:
            return "throttle"
        if self.resets.get(key_of(applied), 0) > resets:
            return "reject"
        part.bucket.renew(part.charge)
        return "admit"

    def stamp(self, applied: AppliedQuota, now_ms: int) -> Stamp:
        """The stamp of the last charge to a bucket, which was made now; from now on the bucket has a birth.

        Args:
            now_ms: the time by the clock; the time in the bucket may be later.
        """
        bucket = self.buckets[key_of(applied)]
        assert isinstance(bucket, RateBucket | TokensBucket)
        if not bucket.birth:
            self.births += 1_000_000
            bucket.birth = self.births
            if isinstance(bucket, TokensBucket):
                bucket.largest_limit, bucket.burst = applied.quota.limit, applied.quota.burst
        return Stamp(bucket.birth, max(now_ms, bucket.newest_ms or 0), bucket.took, self.history)

    def undo(self, applied: AppliedQuota, stamp: Stamp, now_ms: int) -> float:
        """Take a charge to a bucket back, if that is still possible; return how much was given back."""
        bucket = self.buckets.get(key_of(applied))
        if not isinstance(bucket, RateBucket | TokensBucket) or bucket.newest_ms is None:
            return 0.0
        if (stamp.birth, stamp.history) != (bucket.birth, self.history):
            return 0.0
        at_ms = max(now_ms, bucket.newest_ms)
        charge = BucketCharge(applied.quota, stamp.taken, "delay", True, at_ms, now_ms)
        before = copy.copy(bucket)
        lapsed = bucket.reckon(charge)
        given = bucket.undo(charge, stamp)
        if given or (isinstance(bucket, TokensBucket) and bucket.forgiven):
            self.lapsed += held(lapsed)
        else:
            self.buckets[key_of(applied)] = before  # nothing was written
        return given

    def lease(
        self,
        ask: Ask,
        quotas: Quotas,
        rules: MatchingRules,
        now_ms: int,
        lease: bytes,
        lease_ms: int,
        caller: Caller = ANYONE,
    ) -> Leased:
        """Hold a part of the wish of an ask, in all its buckets or in none.

        Args:
            ask: in mode record, with the wish as its usage, and without producer ids.
            lease: the name of the lease; no other has it.

        Raises:
            OutOfBoundsError: the caller is bound, and a bucket is shared with others.
        """
        applied = list(restrict(ask, applied_quotas(ask, quotas, rules), caller.bound_to))
        asked = replace(ask, mode="admit", deny=True)
        parts = [self._part(asked, quota, now_ms) for quota in applied]
        slices: dict[str, float] = {}
        verdicts = []
        for part in parts:
            judged, units = judge_lease(part)
            verdicts.append(self._checked_for_room(asked, part, _verdict_of(part, judged)))
            if not part.applied.quota.shadow:
                field_ = KEYS[part.applied.quota.key].usage
                slices[field_] = min(slices.get(field_, units), units)
        outcome, throttle_ms, limited_by = combine(verdicts)
        full = any(verdict.reason == "store_full" for verdict in verdicts)
        grants = outcome == "admit" and not full
        for part in parts:
            field_, bucket = KEYS[part.applied.quota.key].usage, holding(part.bucket)
            charge = replace(part.charge, usage=slices.get(field_, part.charge.usage))
            if grants and charge.usage > 0 and len(bucket.holds) < MOST_HOLDS:
                bucket.hold(charge, lease, lease_ms)
            else:
                bucket.touch(charge)
        source: Source = "fallback" if full else "store" if parts else "local"
        decision = Decision(outcome, throttle_ms, grants and bool(parts), len(parts), source, limited_by)
        return Leased(decision, granted_of(ask.usage, slices) if grants else {})

    def peek_hold(
        self, ask: Ask, quotas: Quotas, rules: MatchingRules, now_ms: int, caller: Caller = ANYONE
    ) -> tuple[float, ...]:
        """The units that each bucket would grant of a wish, shadow quotas too; writes nothing.

        Raises:
            OutOfBoundsError: the caller is bound, and a bucket is shared with others.
        """
        applied = restrict(ask, applied_quotas(ask, quotas, rules), caller.bound_to)
        peeking = replace(ask, mode="peek", deny=True)
        before = self.corrections, self.lapsed
        units = tuple(judge_lease(self._part(peeking, quota, now_ms))[1] for quota in applied)
        self.corrections, self.lapsed = before
        return units

    def settle(self, ask: Ask, quotas: Quotas, rules: MatchingRules, now_ms: int, lease: bytes) -> bool:
        """Charge the spent units of a lease now, and free the rest; return whether any bucket held them.

        Args:
            ask: in mode record, with the spent amounts as its usage.
        """
        parts = [self._part(ask, quota, now_ms) for quota in applied_quotas(ask, quotas, rules)]
        settled = False
        for part in parts:
            if holding(part.bucket).settle(part.charge, lease):
                settled = True
            else:
                part.bucket.touch(part.charge)
        return settled

    def reset(self, applied: AppliedQuota, number: int) -> None:
        """Remove a bucket, and note the number of its reset."""
        self.buckets.pop(key_of(applied), None)
        self.resets[key_of(applied)] = number

    def lose(self) -> None:
        """Lose all state, as an emptied store does."""
        self.buckets.clear()
        self.answers.clear()
        self.resets.clear()
        self.birth = b""

    def _part(self, ask: Ask, applied: AppliedQuota, now_ms: int) -> Part:
        quota = applied.quota
        key = key_of(applied)
        bucket = self.buckets.setdefault(key, self._absent(quota))
        if ask.mode == "peek":
            bucket = copy.deepcopy(bucket)
        self.corrections += bucket.newest_ms is not None and now_ms < bucket.newest_ms
        charge = BucketCharge(
            quota=quota,
            usage=usage_of(ask, quota),
            enforcement=enforcement_of(ask, quota),
            recording=ask.mode == "record",
            now_ms=corrected_now(ask.mode, quota, bucket, now_ms),
            wait_from_ms=now_ms,
            spreads=spreads_of(ask, self.secret) if quota.algorithm == "producer_ids" else (),
            full=self.full and ask.mode != "peek",
        )
        lapsed = () if isinstance(bucket, IdsBucket) else holding(bucket).reckon(charge)
        self.lapsed += held(lapsed)
        return Part(applied, bucket, charge, lapsed)

    def _absent(self, quota: Quota) -> Bucket:
        if quota.algorithm == "sampled_rate":
            return RateBucket()
        return TokensBucket() if quota.algorithm == "token_bucket" else IdsBucket(self.max_ids)

    def _verdicts(self, ask: Ask, parts: list[Part]) -> list[Verdict]:
        verdicts = [self._verdict(ask, part) for part in parts]
        if not self.sequential:
            return verdicts
        byte_delay = max(
            (
                verdict.throttle_ms
                for verdict in verdicts
                if verdict.outcome == "delay"
                and not verdict.shadow
                and verdict.quota in BYTE_RATES
                # a full store's verdict is no measured delay
                and verdict.reason != "store_full"
            ),
            default=0,
        )
        for part in parts:
            if part.applied.quota.key in REQUEST_RATES:
                part.charge = replace(part.charge, later_ms=byte_delay)
        return [self._verdict(ask, part) for part in parts]

    def _verdict(self, ask: Ask, part: Part) -> Verdict:
        return self._checked_for_room(ask, part, _verdict_of(part, judgement_of(ask, part)))

    def _checked_for_room(self, ask: Ask, part: Part, verdict: Verdict) -> Verdict:
        """The verdict; replaced if the quota needs a new bucket in a full store."""
        needs_room = part.bucket.newest_ms is None and ask.mode in {"admit", "record"}
        if part.applied.quota.algorithm == "producer_ids":
            needs_room = needs_room and bool(part.charge.spreads)
        if self._when_full is None or not self.full or not needs_room:
            return verdict
        if verdict.outcome in {"throttle", "reject"} and not verdict.shadow:
            return verdict  # nothing is charged, so it needs no room
        return self._when_full(ask, part.applied)


def key_of(applied: AppliedQuota) -> tuple[object, ...]:
    """The key of the bucket that a quota charges."""
    return applied.quota.key, applied.bucket, applied.quota.identity, applied.quota.epoch


def corrected_now(mode: Mode, quota: Quota, bucket: Bucket, now_ms: int) -> int:
    """The time to use in a bucket: never behind its newest time.

    If the clock is behind by more than a window, the bucket moves back with the clock instead.
    """
    newest = bucket.newest_ms
    if newest is None or now_ms >= newest:
        return now_ms
    if newest - now_ms <= quota.clock_window_ms or mode == "refund":
        return newest
    bucket.move(now_ms - newest)
    return now_ms


def _write(ask: Ask, outcome: Outcome, parts: list[Part]) -> bool:
    """Write the effects of a decision; return whether a bucket was charged or refunded."""
    if ask.mode == "peek":
        return False
    if ask.mode == "refund":
        for part in parts:
            part.bucket.refund(part.charge)
        return bool(parts)
    if outcome in ("throttle", "reject"):
        for part in parts:
            part.bucket.touch(part.charge)
        return False
    charged = [part.bucket.charge(part.charge) for part in parts]
    return any(charged)


def judgement_of(ask: Ask, part: Part) -> Judgement:
    """The answer of a part's bucket, changed as its quota key and the ask's mode require."""
    quota, charge = part.applied.quota, part.charge
    if ask.mode == "refund":
        return ADMIT
    if quota.limit == 0 and charge.usage > 0 and quota.algorithm != "producer_ids":
        if charge.recording:
            return Judgement("delay", quota.longest_delay_ms)
        return Judgement("reject", reason="too_large", largest=0.0)
    judged = part.bucket.judge(charge)
    if judged.outcome != "throttle" or quota.key != CONNECTION_CREATION_RATE:
        return judged
    if ask.recheck:
        return Judgement("reject")
    return Judgement("throttle", min(judged.throttle_ms, RECHECK_MS))


def judge_lease(part: Part) -> tuple[Judgement, float]:
    """The answer of a part's bucket to a wish, and the units that it would grant.

    Without a grant, the answer is the wait until one unit (the wish, if that is less) is free, or until the
    first lease ends if that is sooner: most leases are settled with less than they hold.
    """
    bucket, charge, quota = holding(part.bucket), part.charge, part.applied.quota
    if charge.usage == 0:
        return ADMIT, 0.0
    capacity, least = bucket.capacity(charge) if quota.limit else 0.0, min(charge.usage, 1.0)
    if least > capacity / 2:
        return Judgement("reject", reason="too_large", largest=capacity / 2), 0.0
    longest = RECHECK_MS if quota.key == CONNECTION_CREATION_RATE else MAX_THROTTLE_MS
    if bucket.holds:
        longest = min(longest, bucket.holds[0].ends_ms - charge.wait_from_ms)
    if len(bucket.holds) >= MOST_HOLDS:
        return Judgement("throttle", longest, reason="capacity"), 0.0
    judged = bucket.judge(replace(charge, usage=least))
    if judged.outcome != "admit":
        return judged._replace(throttle_ms=min(judged.throttle_ms, longest)), 0.0
    _, free = bucket.shows(charge)
    units = slice_of(charge.usage, free, capacity, bucket.holds)
    if units > 0:
        return ADMIT, units
    return Judgement("throttle", longest if bucket.holds else 1), 0.0


def _verdict_of(part: Part, judged: Judgement) -> Verdict:
    quota = part.applied.quota
    return Verdict(
        quota=quota.key,
        entity=part.applied.entity,
        bucket=part.applied.bucket,
        limit=quota.limit,
        enforcement=part.charge.enforcement,
        shadow=quota.shadow,
        outcome=judged.outcome,
        throttle_ms=judged.throttle_ms,
        reason=judged.reason,
        largest=judged.largest,
    )


def _shown(verdict: Verdict, part: Part) -> Verdict:
    observed, remaining = part.bucket.shows(part.charge)
    return replace(verdict, observed=observed, remaining=remaining)
