"""Judges a sampled rate or a token bucket by replaying its logged charges.

Every verdict is computed again from the state that the logged charges leave. If the bucket showed another
state, the judge looks for charges that were lost, altered or not logged, and counts them. It goes on from a
state that explains the shown numbers.
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
from app.domain.undo import Stamp, give_back_sample
from workers.jobs.audit.admitted_amounts import AdmittedAmounts
from workers.jobs.audit.bucket_findings import BucketFindings, BucketTally
from workers.jobs.audit.uncertain_rate import EQUAL, UncertainRate, exceeds, guesses, observed_units
from workers.jobs.verdicts import BucketRow

MODES: Final[tuple[Mode, ...]] = ("admit", "peek", "record", "refund")
ASKS: Final = {
    (mode, recheck): Ask(mode=mode, recheck=recheck) for mode in MODES for recheck in (False, True)
}
"""The asks for judgements, by mode and re-check: a bucket reads the usage from the charge."""

MOVED: Final = 2
"""The correction of a bucket that moved back in time, as the clock was set back by more than a window."""

State = Samples | Tokens | None


class Step(NamedTuple):
    """One replayed ask.

    Attributes:
        judgement: the exact judgement.
        after: the state after the ask.
        shown: the observed and remaining amounts of that state.
        now_ms: the bucket's time.
        holds: the bucket's holds after the ask.
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
        state: the state that the logged charges leave; None is an empty bucket.
        holds: the bucket's holds, by the log.
        before: the state without the last charge, in case the store lost that charge.
        uncertain: the partial knowledge of an unknown state. Only for rates: a token bucket shows its whole
            state.
        is_guessed: the state is a guess that explains the shown numbers.
        written: the limit and burst at the last charge.
        is_rounded: the tokens were read from the log, so their last digits may differ.
        excused_until_ms: until then, unlogged charges are not counted: they may come from a load, or from a
            bucket whose time was ahead of the first row.
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
        """Replay one ask, and add its faults to the findings."""
        if row.how in {"undone", "undo"}:
            self._take_back(row)
            return
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
                    # the tokens are exact again after a full bucket, and at the deepest debt
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

    def _take_back(self, row: BucketRow) -> None:
        """Apply a charge that was taken back later, or its undo; neither admits an ask."""
        self.rows += 1
        if self.uncertain is not None:
            self.uncertain, self.is_guessed = UncertainRate(row.at_ms, row.at_ms), False
        elif row.how == "undone":
            self.before, self.written = self.state, (row.limit, row.burst)
            self.state = self._step(self.state, row._replace(how="")).after
        elif isinstance(self.state, Tokens):
            self.state = Tokens(min(self.state.tokens + row.usage, row.burst), self.state.at_ms)
        elif self.state:
            self.state, _ = give_back_sample(self.state, Stamp(0, row.at_ms, row.usage, b""))

    def reset(self) -> None:
        """Apply a reset by an administrator."""
        self.state = self.before = self.uncertain = None
        self.holds = ()
        self.is_rounded = False
        self.admitted = AdmittedAmounts()

    def load(self) -> None:
        """Mark the bucket as loaded by a backfill, whose content is not in the log."""
        self.is_loaded = True

    def _admit(self, row: BucketRow, lapsed: Holds, tally: BucketTally) -> None:
        """Add up the admitted units: of a settled lease the spent ones, of a lapsed lease all."""
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
        """Track the bucket's holds while its state is unknown."""
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
        """Replay the ask in an empty bucket, if the store may have dropped a bucket full by its old burst."""
        if not isinstance(self.state, Tokens) or self.written is None or self.holds:
            return None
        limit, burst = self.written
        if tokens_at(self.state, row.at_ms, limit, burst) < burst:
            return None
        step = self._step(None, row)
        return step if fits(step, row) else None

    def _was_ahead(self, row: BucketRow) -> bool:
        """Whether an unlogged call had moved the bucket's time ahead of this row's time."""
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
        """Explain why the bucket differs from the logged charges, and go on from the explanation.

        Charges were lost if forgetting some explains it, or if the bucket holds less than was charged within
        its span. Otherwise the bucket has charges that the log lacks.
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
        """Replay an ask on a guessed state, as long as the guess explains the shown numbers."""
        assert self.uncertain is not None
        if self.holds or row.how:  # the shown numbers include the holds
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
        """Replay the ask after one unlogged charge of the bucket's surplus over the logged charges."""
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

        A charge lives at least for the span. It may live longer, depending on the start of its sample, which
        unlogged charges may have moved.
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
        """Replay the ask with the usage that the bucket shows, if the row has a larger usage."""
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
        """Replay the ask without charges that the store may have lost: its own, the last one, or all."""
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
            bucket.touch(charge)  # a touch ends a debt that is too deep
        shown = bucket.shows(charge)
        if mode == "peek":
            return Step(judgement, state, shown, now_ms, self.holds, lapsed)
        return Step(judgement, bucket.state, shown, now_ms, bucket.holds, lapsed)


def _leased(part: Part, row: BucketRow) -> Judgement:
    """Apply the grant or the settlement of a lease; return the exact judgement.

    A wish granted in part is logged with that part as its usage: the bucket would grant it as a whole wish.
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
    """Whether the logged verdict equals the exact judgement."""
    return (exact.outcome, exact.throttle_ms, exact.reason) == (row.outcome, row.throttle_ms, row.reason)


def fits(step: Step, row: BucketRow) -> bool:
    """Whether a replayed step shows the same numbers as the bucket."""
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
    """The charged units in the state after a step."""
    if row.algorithm == "token_bucket":
        return step.shown[0]
    samples = sampled_rate.kept_samples(row.samples) if row.enforcement == "deny" else row.samples
    state: Samples = step.after or ()  # type: ignore[assignment]  # of a rate
    alive = sampled_rate.live_samples(state, step.now_ms, samples, row.sample_ms)
    return sampled_rate.total(alive) + held(step.holds)
