"""Judges a sampled rate or a token bucket by replaying its logged charges.

Every verdict is computed again from the state that the logged charges leave. If the bucket showed something
else, the judge looks for the charges that were lost, altered or not logged, counts them, and goes on from
the state that explains what was shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.domain import sampled_rate
from app.domain.ask import Ask, Mode
from app.domain.decision import REQUEST_RATES
from app.domain.holds import MOST_HOLDS, Hold, Holds, ended, held, with_hold, without
from app.domain.ladder import AppliedQuota
from app.domain.oracle import (
    ADMIT,
    BucketCharge,
    Judgement,
    Part,
    RateBucket,
    TokensBucket,
    corrected_now,
    judge_lease,
    judgement_of,
)
from app.domain.sampled_rate import Samples
from app.domain.token_bucket import Tokens, tokens_at
from workers.spark.audit.admitted_amounts import AdmittedAmounts
from workers.spark.audit.bucket_findings import BucketFindings, BucketTally
from workers.spark.audit.uncertain_rate import EQUAL, UncertainRate, exceeds, guesses, observed_units
from workers.spark.buckets import BucketRow

MODES: Final[tuple[Mode, ...]] = ("admit", "peek", "record", "refund")
ASKS: Final = {
    (mode, recheck): Ask(mode=mode, recheck=recheck) for mode in MODES for recheck in (False, True)
}
"""All that a bucket needs to know of an ask but its usage, which is in the charge."""

MOVED: Final = 2
"""The correction of a bucket that moved back in time, as the clock was set back by more than a window."""

State = Samples | Tokens | None


class Step(NamedTuple):
    """One replayed ask.

    Attributes:
        judgement: the exact one.
        after: the state after the ask, and ``shown`` what it shows.
        now_ms: the bucket's time.
        holds: what the bucket then holds for leases.
        lapsed: the leases that had ended, and count as spent.
    """

    judgement: Judgement
    after: State
    shown: tuple[float, float]
    now_ms: int
    holds: Holds = ()
    lapsed: Holds = ()


@dataclass(slots=True)
class LevelJudge:
    """Judges one bucket, row by row.

    Attributes:
        sequential: request delays are measured after byte delays (``QUOTAGATE_COMBINE_DELAYS``).
        is_whole: the bucket was empty before its first row.
        state: what the logged charges leave; None is an empty bucket.
        holds: what the bucket holds for leases, by the log.
        before: the state without the last charge, in case the store lost that.
        uncertain: what is known while the state is not. Only for rates: a token bucket shows all it holds.
        is_guessed: the state is a guess that explains what the bucket shows.
        written: the limit and burst at the last charge.
        is_rounded: the tokens were read from the log, so their last digits may differ.
        excused_until_ms: until then, unlogged charges may come from a load, or from a bucket whose time was
            ahead of the first row.
    """

    sequential: bool = False
    is_whole: bool = False
    state: State = None
    before: State = None
    rows: int = 0
    uncertain: UncertainRate | None = None
    is_guessed: bool = False
    written: tuple[float, float] | None = None
    is_rounded: bool = False
    is_loaded: bool = False
    excused_until_ms: float = -math.inf
    admitted: AdmittedAmounts = field(default_factory=AdmittedAmounts)
    holds: Holds = ()

    def judge(self, row: BucketRow, found: BucketFindings) -> None:
        """Replay one ask, and add what is wrong to the findings."""
        tally = found.begin(row)
        if self.is_loaded or (self.rows == 0 and row.correction):
            self.is_loaded = False
            self.excused_until_ms = row.at_ms + row.as_quota().clock_window_ms
        if self.uncertain is not None and self.uncertain.has_expired(row):
            self.state, self.before, self.uncertain = (), (), None
        step: Step | None
        if self.uncertain is not None:
            step = self._guessed(row, found)
        else:
            step = self._step(self.state, row)
            if self._was_ahead(row):
                step = self._without_times(step, row)
            elif not fits(step, row):
                step = self._dropped(row) or self._explained(step, row, found)
        self._compare(step, row, found)
        if step is not None:
            if row.is_charged:
                if self.is_rounded and isinstance(step.after, Tokens):
                    # exact again if the bucket was full before, or is now in its deepest debt
                    exact = (row.burst - row.usage, -row.as_quota().max_debt)
                    self.is_rounded = step.after.tokens not in exact
                self.before, self.written = self.state, (row.limit, row.burst)
            self.state, self.holds = step.after, step.holds
        else:
            self._follow(row)
        if row.correction == MOVED and row.mode != "peek":
            self.admitted = AdmittedAmounts()
        self._admit(row, step.lapsed if step is not None and row.mode != "peek" else (), tally)
        self.rows += 1

    def reset(self) -> None:
        """An administrator reset the bucket."""
        self.state = self.before = self.uncertain = None
        self.holds = ()
        self.is_rounded = False
        self.admitted = AdmittedAmounts()

    def load(self) -> None:
        """A backfill was loaded into the bucket; the log does not say what."""
        self.is_loaded = True

    def _admit(self, row: BucketRow, lapsed: Holds, tally: BucketTally) -> None:
        """Add up what was admitted: of a lease, what is settled, and all of it if nobody settled it."""
        if not row.shadow:
            for hold in lapsed:
                self.admitted.add(row.as_quota(), hold.units, hold.ends_ms, tally)
        if row.mode == "refund":
            self.admitted.refund(row.usage)
        elif row.shadow or row.how == "lease":
            return
        elif (
            row.outcome == "admit" if row.how == "settlement" else row.mode == "admit" and not row.is_refused
        ):
            self.admitted.add(row.as_quota(), row.usage, row.at_ms, tally)

    def _follow(self, row: BucketRow) -> None:
        """Keep what the bucket holds for leases while its state is not known."""
        _, self.holds = ended(self.holds, row.at_ms)
        if row.how == "lease" and not row.is_refused and row.usage > 0:
            self.holds = with_hold(self.holds, _hold(row, row.at_ms))
        elif row.how == "settlement":
            _, self.holds = without(self.holds, _name(row))

    def _compare(self, step: Step | None, row: BucketRow, found: BucketFindings) -> None:
        """Compare the verdict with the exact one; a difference proves nothing if the state is a guess."""
        is_exact = step is not None and is_as_logged(step.judgement, row)
        if not is_exact and (step is None or self.uncertain is not None or self._may_be_rounding(step, row)):
            found.of(row).unjudged += 1
            return
        found.of(row).judged += 1
        if not is_exact:
            assert step is not None
            found.differs(row, step.judgement)

    def _may_be_rounding(self, step: Step, row: BucketRow) -> bool:
        return self.is_rounded and abs(step.judgement.throttle_ms - row.throttle_ms) <= 1

    def _dropped(self, row: BucketRow) -> Step | None:
        """The ask in an empty bucket, if the store may have dropped it: by its old burst it was full."""
        if not isinstance(self.state, Tokens) or self.written is None or self.holds:
            return None
        limit, burst = self.written
        if tokens_at(self.state, row.at_ms, limit, burst) < burst:
            return None
        step = self._step(None, row)
        return step if fits(step, row) else None

    def _was_ahead(self, row: BucketRow) -> bool:
        """Whether an unlogged call had moved the bucket's time ahead of this row's."""
        newest = _bucket(row, self.state).newest_ms
        return self.rows > 0 and row.correction > 0 and (newest is None or newest <= row.at_ms)

    def _without_times(self, step: Step, row: BucketRow) -> Step | None:
        """Go on without knowing the bucket's times: tokens are in the log, the samples of a rate are not."""
        if row.algorithm == "token_bucket":
            return self._with_logged_tokens(step, row)
        self._doubt(row)
        return None

    def _doubt(self, row: BucketRow) -> None:
        self.uncertain, self.is_guessed = UncertainRate(row.at_ms, row.at_ms), False
        self.uncertain.add(row)

    def _explained(self, step: Step, row: BucketRow, found: BucketFindings) -> Step | None:
        """Explain why the bucket showed something else than the logged charges make, and go on from there.

        Charges were lost if forgetting some explains it, or if the bucket holds less than was charged within
        its span. Otherwise it has charges that the log does not have.
        """
        held = _held(step, row)
        forgotten = (other for other in self._forgotten(row) if fits(other, row))
        explanation = next((other for other in forgotten if exceeds(held, _held(other, row))), None)
        if explanation is None and (altered := self._altered(step, row)) is not None:
            found.of(row).altered += 1
            amount = abs(_held(altered, row) - held)
            found.note("altered", row, _observed(step), amount=amount)
            return altered
        is_lost = explanation is not None or self._lacks_charges(step, row)
        if explanation is None and row.algorithm == "token_bucket":
            explanation = self._with_logged_tokens(step, row)
        elif explanation is None:
            self._doubt(row)
            explanation = None if is_lost else self._guess(step, row)
            self.is_guessed = explanation is not None
        if is_lost:
            shown = observed_units(row)
            left = _held(explanation, row) if explanation else shown.units if shown else 0.0
            found.lost(row, _held(step, row) - left, _observed(step))
            self.admitted = AdmittedAmounts()
        else:
            self._unlogged(step, row, found)
        return explanation

    def _guessed(self, row: BucketRow, found: BucketFindings) -> Step | None:
        """Replay an ask on a guessed state, as long as that explains what the bucket shows."""
        assert self.uncertain is not None
        if self.holds or row.how:  # what it shows includes what it holds
            self._doubt(row)
            return None
        step = self._step(self.state, row) if self.is_guessed else None
        if self.uncertain.has_unlogged_charge(row):
            self._unlogged(step, row, found)
        self.uncertain.add(row)
        for state in self.uncertain.states(row):
            if fits(self._step(state, row, charging=False), row):
                self.state = self.before = state
                self.uncertain = None
                return None
        if step is not None and not fits(step, row):
            step = self._guess(step, row)
            self.is_guessed = step is not None
        return step

    def _guess(self, step: Step, row: BucketRow) -> Step | None:
        """Replay the ask after one unlogged charge, of as much as the bucket shows beyond the logged ones."""
        shown = observed_units(row)
        if shown is None:
            return None
        surplus = shown.units - _held(step, row)
        for state in guesses(self.state or (), surplus, step.now_ms, row):  # type: ignore[arg-type]
            guess = self._step(state, row)
            if fits(guess, row):
                return guess._replace(judgement=_nearer(step.judgement, guess.judgement, row))
        return None

    def _with_logged_tokens(self, step: Step, row: BucketRow) -> Step:
        """Replay the ask with the number of tokens in its log row."""
        assert row.remaining is not None
        self.is_rounded = True
        taken = row.usage if row.is_charged else -row.usage if row.mode == "refund" else 0.0
        if row.how == "settlement":
            settled, _ = without(self.holds, _name(row))
            taken = row.usage - settled.units if settled is not None else 0.0
        other = self._step(Tokens(row.remaining + taken, step.now_ms), row)
        return other._replace(judgement=_nearer(step.judgement, other.judgement, row))

    def _lacks_charges(self, step: Step, row: BucketRow) -> bool:
        """Whether the bucket holds less than it must, wherever its samples begin.

        A charge lives for the span. How much longer depends on when its sample began, which unlogged charges
        may have changed.
        """
        assert row.observed is not None
        shown = observed_units(row)
        if row.algorithm == "token_bucket" or shown is None:
            return row.observed < step.shown[0]
        from_ms = step.now_ms - row.samples * row.sample_ms
        samples: Samples = step.after or ()  # type: ignore[assignment]  # of a rate
        younger = sum(sample.value for sample in samples if sample.start_ms > from_ms)
        return exceeds(younger + held(step.holds), shown.units)

    def _unlogged(self, step: Step | None, row: BucketRow, found: BucketFindings) -> None:
        """Count an unlogged charge, unless it may be older than the log, or come from a load."""
        if (self.rows or self.is_whole) and row.at_ms >= self.excused_until_ms:
            found.unlogged(row, _observed(step) if step else "less")

    def _altered(self, step: Step, row: BucketRow) -> Step | None:
        """Replay the ask with the usage that the bucket shows, if that is less than the row says."""
        shown = observed_units(row)
        shown_units = row.observed if row.algorithm == "token_bucket" else shown.units if shown else None
        is_refund = row.mode == "refund"
        if shown_units is None or not (self.rows or self.is_whole) or not (row.is_charged or is_refund):
            return None
        more = shown_units - _held(step, row)
        usage = row.usage + (-more if is_refund else more)
        if usage < 0 or not exceeds(row.usage, usage):
            return None
        other = self._step(self.state, row._replace(usage=usage))
        return other if fits(other, row) else None

    def _forgotten(self, row: BucketRow) -> Iterator[Step]:
        """Replay the ask without the charges that the store may have lost: its own, the last, or all."""
        if self.rows and row.is_charged:
            yield self._step(self.state, row, charging=False)
        if self.rows:
            yield self._step(self.before, row)
            yield self._step(None, row)

    def _step(self, state: State, row: BucketRow, *, charging: bool = True) -> Step:
        quota = row.as_quota()
        bucket = _bucket(row, state)
        bucket.holds = () if state is None else self.holds
        mode: Mode = row.mode  # type: ignore[assignment]  # as the node checked it
        now_ms = corrected_now(mode, quota, bucket, row.at_ms)
        later_ms = row.byte_delay_ms if self.sequential and quota.key in REQUEST_RATES else 0
        charge = BucketCharge(
            quota, row.usage, quota.enforcement, mode == "record", now_ms, row.at_ms, later_ms=later_ms
        )
        lapsed = bucket.reckon(charge)
        part = Part(AppliedQuota(quota, row.entity, row.bucket, ""), bucket, charge)
        if row.how:
            judgement = _leased(part, row) if charging else ADMIT
            after = bucket.state
            return Step(judgement, after, bucket.shows(charge), now_ms, bucket.holds, lapsed)
        judgement = judgement_of(ASKS[mode, row.recheck], part)
        if mode == "refund":
            bucket.refund(charge)
        elif charging and row.is_charged:
            bucket.charge(charge)
        elif mode != "peek" and row.is_refused:
            bucket.touch(charge)  # which ends a debt that is too deep
        shown = bucket.shows(charge)
        if mode == "peek":
            return Step(judgement, state, shown, now_ms, self.holds, lapsed)
        return Step(judgement, bucket.state, shown, now_ms, bucket.holds, lapsed)


def _leased(part: Part, row: BucketRow) -> Judgement:
    """Hold what a lease was granted, or settle one; the exact judgement on that.

    A bucket that grants a wish in part would grant that part as a whole wish.
    """
    bucket, charge = part.bucket, part.charge
    assert isinstance(bucket, RateBucket | TokensBucket)
    if row.how == "settlement":
        if bucket.settle(charge, _name(row)):
            return ADMIT
        bucket.touch(charge)
        return Judgement("reject")
    judgement, units = judge_lease(part)
    if row.is_refused or row.usage == 0 or len(bucket.holds) >= MOST_HOLDS:
        bucket.touch(charge)
    else:
        if not row.shadow and units < row.usage:
            judgement = Judgement("throttle", 1, "too_large", units)
        bucket.hold(charge, _name(row), row.lease_ms or 0)
    return judgement


def _name(row: BucketRow) -> bytes:
    return (row.lease or "").encode()


def _hold(row: BucketRow, now_ms: int) -> Hold:
    return Hold(_name(row), row.usage, now_ms + (row.lease_ms or 0))


def is_as_logged(exact: Judgement, row: BucketRow) -> bool:
    """Whether the logged verdict is the exact one."""
    return (exact.outcome, exact.throttle_ms, exact.reason) == (row.outcome, row.throttle_ms, row.reason)


def fits(step: Step, row: BucketRow) -> bool:
    """Whether a replayed step shows what the bucket showed."""
    if row.observed is None or row.remaining is None:
        return True
    return all(
        math.isclose(mine, theirs, rel_tol=EQUAL, abs_tol=EQUAL)
        for mine, theirs in zip(step.shown, (row.observed, row.remaining), strict=True)
    )


def _observed(step: Step) -> str:
    return f"observed {step.shown[0]:.12g}"


def _bucket(row: BucketRow, state: State) -> RateBucket | TokensBucket:
    if row.algorithm == "token_bucket":
        return TokensBucket(state)  # type: ignore[arg-type]  # a bucket has one algorithm
    return RateBucket(state or ())  # type: ignore[arg-type]


def _nearer(before: Judgement, after: Judgement, row: BucketRow) -> Judgement:
    """The judgement nearer to the verdict: an unlogged charge came before the ask, or with it."""
    return min(
        before, after, key=lambda one: (one.outcome != row.outcome, abs(one.throttle_ms - row.throttle_ms))
    )


def _held(step: Step, row: BucketRow) -> float:
    """How many charged units the state after a step shows."""
    if row.algorithm == "token_bucket":
        return step.shown[0]
    samples = sampled_rate.kept_samples(row.samples) if row.enforcement == "deny" else row.samples
    state: Samples = step.after or ()  # type: ignore[assignment]  # of a rate
    alive = sampled_rate.live_samples(state, step.now_ms, samples, row.sample_ms)
    return sampled_rate.total(alive) + held(step.holds)
