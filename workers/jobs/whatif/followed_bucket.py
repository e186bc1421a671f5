"""A bucket as a log leaves it, which may show more or less than the logged charges give.

If the log shows another state of a bucket, the bucket goes on from that state:

- the tokens of a token bucket are shown, so they are exact again but for the last digit;
- the number of charged ids is shown, but not when each of the surplus was charged: the bucket is in doubt
  until these and the unknown ids have expired;
- of a sampled rate only the sum and the window are shown: the bucket is in doubt until the logged charges
  alone explain what it shows, or it has shown what was expected for its whole span.

While a bucket is in doubt, its differences have the cause of the doubt.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.domain import sampled_rate
from app.domain.quota import Quota
from workers.jobs.whatif.buckets import Bucket, Ids, Level, Rate, empty
from workers.jobs.whatif.causes import EARLY_MS, Cause
from workers.jobs.whatif.quota_form import QuotaForm, QuotaForms
from workers.jobs.whatif.rows import VerdictOfAsk

EQUAL: Final = 1e-9
"""The allowed relative difference of numbers that went through the store as text."""


def is_equal(shown: float, expected: float) -> bool:
    """Whether a bucket shows what was expected, but for the last digits."""
    return abs(shown - expected) <= EQUAL * max(1.0, abs(expected))


class Surplus(NamedTuple):
    """By how much the log shows more in a bucket than the replay does, in units of the limit.

    Attributes:
        units: below 0 if the log shows less.
        rounding: how much of it may come from rounding.
    """

    units: float
    rounding: float = 0.0


MORE: Final = Surplus(math.ulp(0.0))
LESS: Final = Surplus(-math.ulp(0.0))
"""The amount is not known."""

UNEXPLAINED: Final = Surplus(math.nan)
"""No charge or refund explains the difference."""


@dataclass(slots=True, eq=False)
class FollowedBucket:
    """The state of a bucket that follows from the rows read so far.

    Attributes:
        is_seen: the log has had an ask for it.
        doubt: why its state does not follow from the log; None if it does.
        doubt_ms: since when, or when the bucket last differed.
        charges: of a rate in doubt, its logged charges of the last span.
        late_ms: when an ask for it was last answered without the store: the store may have charged it
            nevertheless. Up to ``EARLY_MS`` in the future.
        late_charges, late_refunds: the usage of these asks, as far as no row of kind ``late`` has it.
        is_awaited: the store has answered nothing for the bucket since; until then it may have been hung.
        limit, burst: of the last ask.
    """

    bucket: Bucket
    is_seen: bool = False
    doubt: Cause | None = None
    doubt_ms: int = 0
    charges: deque[tuple[int, float]] = field(default_factory=deque)
    late_ms: float = -math.inf
    late_charges: float = 0.0
    late_refunds: float = 0.0
    is_awaited: bool = False
    limit: float = 0.0
    burst: float = 0.0

    def reset(self, at_ms: int) -> None:
        """Follow a reset."""
        empty(self.bucket)
        self.is_seen, self.doubt, self.doubt_ms = True, "reset", at_ms

    def forget(self) -> None:
        """Know nothing of it but ids, which every log names."""
        if not isinstance(self.bucket, Ids):
            empty(self.bucket)
        self.is_seen, self.doubt = False, None
        self.charges.clear()

    def begin_doubt(self, cause: Cause, at_ms: int) -> None:
        """Mark the state as not following from the log; the cause of an earlier mark is kept."""
        if self.doubt is None:
            self.doubt = cause
            self.charges.clear()
        self.doubt_ms = at_ms

    def note_charge(self, at_ms: int, usage: float) -> None:
        """Note a logged charge, which may explain what a rate in doubt shows."""
        if self.doubt is not None:
            self.charges.append((at_ms, usage))

    def expect(self, form: QuotaForm, usage: float, at_ms: int, mode: str) -> None:
        """Expect the charge or refund of an ask that was answered without the store."""
        if not self._is_late(form, at_ms - EARLY_MS):
            self.late_charges = self.late_refunds = 0.0
        self._expect(usage, mode)
        if not usage and isinstance(self.bucket, Rate):  # it does not show, but samples expire at other times
            self.late_charges = self.late_refunds = math.inf
        self.late_ms, self.is_awaited = max(self.late_ms, at_ms), True

    def note_late(self, usage: float, mode: str) -> None:
        """Expect no longer what a row of kind ``late`` has."""
        self._expect(-usage, mode)

    def note_answer(self, at_ms: int) -> None:
        """Note an answer of the store: calls from before it are carried out at about this time, or never."""
        if at_ms > self.late_ms:
            self.late_ms, self.is_awaited = at_ms, False

    def explains_late(self, form: QuotaForm, at_ms: int, surplus: Surplus) -> bool:
        """Whether asks that were answered without the store explain the contents of the bucket."""
        least, most = -self.late_refunds - surplus.rounding, self.late_charges + surplus.rounding
        return least <= surplus.units <= most and self._is_late(form, at_ms)

    def _expect(self, usage: float, mode: str) -> None:
        if mode == "refund":
            self.late_refunds += usage
        else:
            self.late_charges += usage

    def _is_late(self, form: QuotaForm, at_ms: int) -> bool:
        """Whether the bucket may hold what such an ask charged."""
        lasts_ms = form.quota.window_ms if form.counts_ids else form.kept_ms
        return self.is_awaited or at_ms - self.late_ms < lasts_ms

    def surplus(
        self, form: QuotaForm, verdict: VerdictOfAsk, shown: float, at_ms: int, own: float = 0.0
    ) -> Surplus:
        """Compare what the log and the bucket show.

        If a rate has another window, its samples expired at other times, since a charge begins a sample or
        prolongs one. Then the units are not compared.

        Args:
            own: the usage of the ask, if only the log has charged it yet.
        """
        bucket = self.bucket
        if isinstance(bucket, Level):
            units = shown - (verdict.remaining or 0.0)
            return Surplus(units, EQUAL * max(1.0, abs(shown)))
        observed = verdict.observed or 0.0
        if isinstance(bucket, Ids):
            return Surplus(observed - shown)
        now_ms = max(at_ms, bucket.newest_ms)
        _, window_ms = sampled_rate.measure(bucket.state(), now_ms, form.samples, form.sample_ms)
        if (_window(form, observed, verdict.remaining) or window_ms) != window_ms:
            return Surplus(0.0)
        units = (observed - shown) * (window_ms / 1000) - own
        rounding = EQUAL * max(1.0, observed * (window_ms / 1000))
        return Surplus(units, rounding) if abs(units) > rounding else UNEXPLAINED

    def settle(self, form: QuotaForm, at_ms: int) -> None:
        """The bucket showed what was expected: end the doubt once it has done so long enough."""
        quota, bucket = form.quota, self.bucket
        if isinstance(bucket, Ids):
            is_over = at_ms - self.doubt_ms >= max(quota.layers.ttl_ms, quota.window_ms)
        else:
            is_long = isinstance(bucket, Level) or at_ms - self.doubt_ms >= form.kept_ms
            is_over = is_long and not bucket.holds
        if is_over:
            self.doubt = None
            self.charges.clear()

    def resume(self, form: QuotaForm, verdict: VerdictOfAsk, shown: float, at_ms: int) -> None:
        """Go on from the state that the verdict shows, in place of the state here."""
        bucket = self.bucket
        now_ms = max(at_ms, bucket.newest_ms)
        if isinstance(bucket, Level):
            if verdict.remaining is not None:
                bucket.tokens, bucket.newest_ms = verdict.remaining, now_ms
        elif verdict.observed is None:
            pass
        elif isinstance(bucket, Ids):
            surplus = round(verdict.observed - shown)
            if surplus > 0:
                bucket.exact.charges.extend([now_ms] * surplus)
            else:
                bucket.exact.uncharge(-surplus)
            bucket.note()
        elif (window_ms := _window(form, verdict.observed, verdict.remaining)) is not None:
            self._resume_rate(bucket, form, verdict.observed, window_ms, at_ms)

    def _resume_rate(
        self, bucket: Rate, form: QuotaForm, observed: float, window_ms: int, at_ms: int
    ) -> None:
        """Go on from the sum and the window that a rate showed.

        If the logged charges since the doubt began explain them, the state is known again. Otherwise the
        surplus is one charge in the oldest sample; a deficit is taken from the newest ones.
        """
        now_ms = max(at_ms, bucket.newest_ms)
        charges = self.charges
        while charges and now_ms - charges[0][0] > form.kept_ms + 2 * form.sample_ms:
            charges.popleft()
        for missing in range(form.samples):
            start_ms = now_ms - (window_ms - missing * form.sample_ms)
            if not any(charge_ms == start_ms for charge_ms, _ in charges):
                continue
            other = Rate()
            for charge_ms, usage in charges:
                if charge_ms >= start_ms:
                    other.charge(form, usage, charge_ms)
            if is_equal(other.shown(form, at_ms), observed):
                bucket.take(other.state())
                self.doubt = None
                return
        state = sampled_rate.live_samples(bucket.state(), now_ms, form.samples, form.sample_ms)
        _, our_window_ms = sampled_rate.measure(state, now_ms, form.samples, form.sample_ms)
        surplus = observed * (window_ms / 1000) - bucket.shown(form, at_ms) * (our_window_ms / 1000)
        if surplus < 0:
            bucket.take(sampled_rate.refund(state, -surplus))
            return
        start_ms = max(now_ms - window_ms, now_ms - form.span_ms + 1)
        if state:
            oldest, *later = state
            start_ms = min(oldest.start_ms, start_ms)
            bucket.take((oldest._replace(value=oldest.value + surplus, start_ms=start_ms), *later))
        elif surplus > 0:
            bucket.take((sampled_rate.Sample(surplus, start_ms, start_ms),))


class FollowedQuota:
    """The bucket of a logged quota, and the quota's forms."""

    __slots__ = ("followed", "form", "forms", "shadow")

    def __init__(self, followed: FollowedBucket, quota: Quota) -> None:
        self.followed = followed
        self.shadow = quota.shadow
        forms = QuotaForms(quota)
        self.forms, self.form = forms.forms, forms.form


def _window(form: QuotaForm, observed: float, remaining: float | None) -> int | None:
    """The window over which a rate was measured; None if it does not follow from the shown numbers."""
    if remaining is None:
        return None
    spare = form.limit - observed
    if abs(spare) <= EQUAL * form.limit:
        return None
    return round(remaining * 1000 / spare)
