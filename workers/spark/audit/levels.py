"""Judges a bucket that is a level, a sampled rate or a token bucket, by replaying its charges as logged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.domain import sampled_rate
from app.domain.ask import Ask, Mode
from app.domain.decision import REQUEST_RATES
from app.domain.ladder import Applied
from app.domain.oracle import Charge, Part, RateBucket, Said, TokensBucket, corrected, said_of
from app.domain.quota import Enforcement
from app.domain.sampled_rate import Samples
from app.domain.token_bucket import Tokens, tokens_at
from workers.spark.audit.admitted import Admitted
from workers.spark.audit.found import Found, spelled
from workers.spark.audit.unsure import EQUAL, Unsure, charges, exceeds, guesses, shows
from workers.spark.buckets import Asked

MODES: Final[tuple[Mode, ...]] = ("admit", "peek", "record", "refund")
ASKS: Final = {
    (mode, recheck): Ask(mode=mode, recheck=recheck) for mode in MODES for recheck in (False, True)
}
"""Of an ask a bucket is told no more than this; the usage stands in the charge."""

MOVED: Final = 2
"""The correction of a bucket that moved back in time, as its clock was set back by more than a window."""

State = Samples | Tokens | None


class Step(NamedTuple):
    """One ask, replayed: what the quota says, the state after it, what it shows, and the bucket's time."""

    said: Said
    after: State
    shown: tuple[float, float]
    now_ms: int


@dataclass(slots=True)
class Levels:
    """One bucket, row by row.

    Attributes:
        sequential: request delays are measured after byte delays (``QUOTAGATE_COMBINE_DELAYS``).
        is_whole: it held nothing before its first row.
        state: as the logged charges leave it; None is an absent bucket.
        before: the state without the last charge, in case the store lost it.
        unsure: while the state is not known, what is. A rate alone can be so: a bucket of tokens shows all.
        is_guessed: the state, though not known, is one that gives what the bucket shows.
        written: the limit and the burst by which tokens were last taken.
        is_rounded: the tokens were taken from the log, and their last digits may be others.
        excused_until_ms: until then may show, and no row tells of it, what a load put into the bucket, or how
            far its time was ahead of the first row.
    """

    sequential: bool = False
    is_whole: bool = False
    state: State = None
    before: State = None
    rows: int = 0
    unsure: Unsure | None = None
    is_guessed: bool = False
    written: tuple[float, float] | None = None
    is_rounded: bool = False
    is_loaded: bool = False
    excused_until_ms: float = -math.inf
    admitted: Admitted = field(default_factory=Admitted)

    def see(self, row: Asked, found: Found) -> None:
        """Replay one ask, and note what is not as it should be."""
        tally = found.of(row)
        tally.verdicts += 1
        tally.corrections += row.correction > 0
        if self.is_loaded or (self.rows == 0 and row.correction):
            self.is_loaded = False
            self.excused_until_ms = row.at_ms + row.as_quota().clock_window_ms
        if self.unsure is not None and self.unsure.has_rested(row):
            self.state, self.before, self.unsure = (), (), None
        step: Step | None
        if self.unsure is not None:
            step = self._guessed(row, found)
        else:
            step = self._step(self.state, row)
            if self._was_ahead(row):
                step = self._timeless(step, row)
            elif not fits(step, row):
                step = self._expired(row) or self._explained(step, row, found)
        self._judge(step, row, found)
        if self.is_rounded and step is not None and isinstance(step.after, Tokens) and charges(row):
            # It is known to the last digit again where it was full before, or is as empty as it may be.
            known = (row.burst - row.usage, -row.as_quota().max_debt)
            self.is_rounded = step.after.tokens not in known
        if step is not None:
            if charges(row):
                self.before, self.written = self.state, (row.limit, row.burst)
            self.state = step.after
        if row.correction == MOVED and row.mode != "peek":
            self.admitted = Admitted()
        if row.mode == "refund":
            self.admitted.give_back(row.usage)
        elif row.mode == "admit" and not row.is_refused and not row.shadow:
            self.admitted.add(row.as_quota(), row.usage, row.at_ms, tally)
        self.rows += 1

    def reset(self) -> None:
        """Begin anew: the bucket was emptied on purpose."""
        self.state = self.before = self.unsure = None
        self.is_rounded = False
        self.admitted = Admitted()

    def load(self) -> None:
        """Something was put into the bucket that the log does not tell of."""
        self.is_loaded = True

    def _judge(self, step: Step | None, row: Asked, found: Found) -> None:
        """Compare the verdict; of a state that is only guessed, one that differs says nothing."""
        tally = found.of(row)
        is_exact = step is not None and is_as_logged(step.said, row)
        if not is_exact and (step is None or self.unsure is not None or self._is_a_hair_off(step, row)):
            tally.unjudged += 1
            return
        tally.judged += 1
        if not is_exact:
            assert step is not None
            tally.differs += 1
            found.note("differs", row, spelled(step.said.outcome, step.said.throttle_ms, step.said.reason))

    def _is_a_hair_off(self, step: Step, row: Asked) -> bool:
        """Whether rounding explains the verdict: no bucket that was full since tells of that any more."""
        return self.is_rounded and abs(step.said.throttle_ms - row.throttle_ms) <= 1

    def _expired(self, row: Asked) -> Step | None:
        """The ask of an absent bucket, if the store may have dropped it: by the burst of then it was full."""
        if not isinstance(self.state, Tokens) or self.written is None:
            return None
        limit, burst = self.written
        if tokens_at(self.state, row.at_ms, limit, burst) < burst:
            return None
        step = self._step(None, row)
        return step if fits(step, row) else None

    def _was_ahead(self, row: Asked) -> bool:
        """Whether a call that no row tells of had moved the bucket's time ahead of this row's."""
        newest = _bucket(row, self.state).newest_ms
        return self.rows > 0 and row.correction > 0 and (newest is None or newest <= row.at_ms)

    def _timeless(self, step: Step, row: Asked) -> Step | None:
        """What follows if the times of a bucket are not known any more: the tokens tell, a rate does not."""
        if row.algorithm == "token_bucket":
            return self._with_tokens(step, row)
        self.unsure, self.is_guessed = Unsure(row.at_ms, row.at_ms), False
        self.unsure.tell(row)
        return None

    def _explained(self, step: Step, row: Asked, found: Found) -> Step | None:
        """The bucket showed something else than the logged charges give: go on from what explains it.

        It has lost charges if that is explained by some that are gone, or if it holds less than what was
        charged within its span; else there are some that no row tells of.
        """
        held = _held(step, row)
        forgotten = (other for other in self._forgotten(row) if fits(other, row))
        explains = next((other for other in forgotten if exceeds(held, _held(other, row))), None)
        if explains is None and (other := self._altered(step, row)) is not None:
            tally = found.of(row)
            tally.altered += 1
            amount = abs(_held(other, row) - held)
            found.note("altered", row, f"observed {step.shown[0]:.12g}", amount=amount)
            return other
        lost = explains is not None or self._misses(step, row)
        if explains is None and row.algorithm == "token_bucket":
            explains = self._with_tokens(step, row)
        elif explains is None:
            self.unsure = Unsure(row.at_ms, row.at_ms)
            self.unsure.tell(row)
            explains = None if lost else self._guess(step, row)
            self.is_guessed = explains is not None
        if lost:
            self._lost(step, explains, row, found)
        else:
            self._unlogged(step, row, found)
        return explains

    def _guessed(self, row: Asked, found: Found) -> Step | None:
        """What follows from a state that is guessed, if it still gives what the bucket shows."""
        assert self.unsure is not None
        step = self._step(self.state, row) if self.is_guessed else None
        if self.unsure.grew(row):
            self._unlogged(step, row, found)
        self.unsure.tell(row)
        for state in self.unsure.states(row):
            if fits(self._step(state, row, charging=False), row):
                self.state = self.before = state
                self.unsure = None
                return None
        if step is not None and not fits(step, row):
            step = self._guess(step, row)
            self.is_guessed = step is not None
        return step

    def _guess(self, step: Step, row: Asked) -> Step | None:
        """The ask after one more charge, of as much as the bucket shows beyond the logged ones."""
        shown = shows(row)
        if shown is None:
            return None
        surplus = shown.units - _held(step, row)
        for state in guesses(self.state or (), surplus, step.now_ms, row):  # type: ignore[arg-type]
            guess = self._step(state, row)
            if fits(guess, row):
                return guess._replace(said=_nearer(step.said, guess.said, row))
        return None

    def _with_tokens(self, step: Step, row: Asked) -> Step:
        """The ask with the tokens that stand in the log."""
        assert row.remaining is not None
        self.is_rounded = True
        taken = row.usage if charges(row) else -row.usage if row.mode == "refund" else 0.0
        found = self._step(Tokens(row.remaining + taken, step.now_ms), row)
        return found._replace(said=_nearer(step.said, found.said, row))

    def _misses(self, step: Step, row: Asked) -> bool:
        """Whether the bucket holds less than it must, wherever its samples begin.

        A charge lives for the span; how much longer depends on when its sample began, and charges that no
        row tells of may have changed that.
        """
        assert row.observed is not None
        shown = shows(row)
        if row.algorithm == "token_bucket" or shown is None:
            return row.observed < step.shown[0]
        from_ms = step.now_ms - row.samples * row.sample_ms
        samples: Samples = step.after or ()  # type: ignore[assignment]  # of a rate
        return exceeds(sum(sample.value for sample in samples if sample.start_ms > from_ms), shown.units)

    def _lost(self, step: Step, explains: Step | None, row: Asked, found: Found) -> None:
        shown = shows(row)
        left = _held(explains, row) if explains else shown.units if shown else 0.0
        tally, units = found.of(row), _held(step, row) - left
        tally.lost += 1
        tally.lost_units += units
        found.note("lost", row, f"observed {step.shown[0]:.12g}", amount=units)
        self.admitted = Admitted()

    def _unlogged(self, step: Step | None, row: Asked, found: Found) -> None:
        """Count a charge that no row tells of, unless it may be older than the log, or a load."""
        if (self.rows or self.is_whole) and row.at_ms >= self.excused_until_ms:
            found.of(row).unlogged += 1
            found.note("unlogged", row, f"observed {step.shown[0]:.12g}" if step else "less")

    def _altered(self, step: Step, row: Asked) -> Step | None:
        """The ask with the usage that the bucket shows, if that is less than its row says."""
        shown = shows(row)
        if not (self.rows or self.is_whole):
            return None
        theirs = row.observed if row.algorithm == "token_bucket" else shown.units if shown else None
        if theirs is None or not (charges(row) or row.mode == "refund"):
            return None
        held = _held(step, row)
        usage = row.usage - (theirs - held if row.mode == "refund" else held - theirs)
        if usage < 0 or not exceeds(row.usage, usage):
            return None
        other = self._step(self.state, row._replace(usage=usage))
        return other if fits(other, row) else None

    def _forgotten(self, row: Asked) -> Iterator[Step]:
        """What the store may have lost: this charge, or the last one, or all of them."""
        if self.rows and charges(row):
            yield self._step(self.state, row, charging=False)
        if self.rows:
            yield self._step(self.before, row)
            yield self._step(None, row)

    def _step(self, state: State, row: Asked, *, charging: bool = True) -> Step:
        quota = row.as_quota()
        bucket = _bucket(row, state)
        mode: Mode = row.mode  # type: ignore[assignment]  # as the node checked it
        enforcement: Enforcement = quota.enforcement
        now = corrected(mode, quota, bucket, row.at_ms)
        later = row.byte_delay_ms if self.sequential and quota.key in REQUEST_RATES else 0
        charge = Charge(quota, row.usage, enforcement, mode == "record", now, row.at_ms, later_ms=later)
        applied = Applied(quota, row.entity, row.bucket, "")
        said = said_of(ASKS[mode, row.recheck], Part(applied, bucket, charge))
        if mode == "refund":
            bucket.refund(charge)
        elif charging and charges(row):
            bucket.charge(charge)
        elif mode != "peek" and row.is_refused:
            bucket.touch(charge)  # which ends a debt that is too deep
        after = state if mode == "peek" else bucket.state
        return Step(said, after, bucket.shows(charge), now)


def is_as_logged(said: Said, row: Asked) -> bool:
    """Whether the verdict in the log is the one that should have been."""
    return (said.outcome, said.throttle_ms, said.reason) == (row.outcome, row.throttle_ms, row.reason)


def fits(step: Step, row: Asked) -> bool:
    """Whether the bucket showed what a replayed step shows."""
    if row.observed is None or row.remaining is None:
        return True
    return all(
        math.isclose(mine, theirs, rel_tol=EQUAL, abs_tol=EQUAL)
        for mine, theirs in zip(step.shown, (row.observed, row.remaining), strict=True)
    )


def _bucket(row: Asked, state: State) -> RateBucket | TokensBucket:
    if row.algorithm == "token_bucket":
        return TokensBucket(state)  # type: ignore[arg-type]  # one bucket is of one algorithm
    return RateBucket(state or ())  # type: ignore[arg-type]


def _nearer(before: Said, after: Said, row: Asked) -> Said:
    """A charge that no row tells of was made before an ask, or with it: by which its verdict is nearer."""
    return min(
        before, after, key=lambda one: (one.outcome != row.outcome, abs(one.throttle_ms - row.throttle_ms))
    )


def _held(step: Step, row: Asked) -> float:
    """How many units a step's state shows to be charged."""
    if row.algorithm == "token_bucket":
        return step.shown[0]
    samples = sampled_rate.kept(row.samples) if row.enforcement == "deny" else row.samples
    state: Samples = step.after or ()  # type: ignore[assignment]  # of a rate
    return sampled_rate.total(sampled_rate.live(state, step.now_ms, samples, row.sample_ms))
