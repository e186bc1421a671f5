"""Buckets for replays: the arithmetic of ``app.domain``, without an object for each charge.

A replay asks hundreds of millions of buckets, so the common case is repeated here in plain loops, as the
store's script repeats it. Rare cases go to the bucket of ``app.domain.oracle``: waits under deny,
leases, undone charges, and ids that are new or due for a refresh. ``tests/jobs/test_buckets.py`` holds the
two to each other.

All buckets have the same methods. ``ask`` gives the answer to an ask and writes nothing; ``charge`` writes an
admitted one, ``touch`` what is written even if the ask is refused, and ``refund`` gives usage back. ``shows``
gives observed and remaining, in the limit's unit. ``move_to`` follows a clock that was set back by more than
a window; a clock that is less behind is corrected within.

An answer is the wait in milliseconds: 0 if the bucket admits, ``REJECT`` if it rejects. Whether a wait is a
delay or a throttle is known from the form of the quota.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from app.domain import sampled_rate, token_bucket
from app.domain.exact_ids import ExactIds
from app.domain.holds import Holds, moved
from app.domain.oracle import BucketCharge, IdsBucket, RateBucket, TokensBucket
from app.domain.quota import Quota
from app.domain.sampled_rate import Sample, Samples
from app.domain.token_bucket import Tokens
from workers.jobs.whatif.quota_form import REJECT, QuotaForm


@dataclass(slots=True, eq=False)
class Rate:
    """A bucket of a sampled rate: the sums of its samples, and when each began and was last written to.

    Attributes:
        before: the plain sum of all samples but the newest, oldest first.
        newest_ms: the time of the last charge; 0 if there was none.
    """

    values: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)
    before: float = 0.0
    newest_ms: int = 0
    holds: Holds = ()

    def ask(
        self, form: QuotaForm, usage: float, at_ms: int, _ids: tuple[bytes, ...] = (), later_ms: int = 0
    ) -> int:
        if form.never and usage > 0:
            return form.longest_ms if form.recording else REJECT
        now_ms = at_ms if at_ms >= self.newest_ms else self.newest_ms  # noqa: FURB136  faster
        if self.holds or later_ms:
            return self._asked(form, usage, now_ms, at_ms, later_ms)
        if form.is_deny:
            if usage == 0:
                return 0
            if usage / (form.full_ms / 1000) > form.limit:
                return REJECT
        lasts = self.lasts
        sample_ms = form.sample_ms
        if not lasts:
            total = 0.0 + usage
            elapsed = 0
        else:
            is_open = now_ms - self.starts[-1] < sample_ms
            horizon = now_ms - form.span_ms
            if lasts[0] > horizon:
                newest = self.values[-1]
                total = self.before + (newest + usage) if is_open else self.before + newest + usage
                elapsed = now_ms - self.starts[0]
            else:
                first, many = 1, len(lasts)
                while first < many and lasts[first] <= horizon:
                    first += 1
                total = 0.0
                for value in self.values[first:-1]:
                    total += value
                if first < many:
                    total = total + (self.values[-1] + usage) if is_open else total + self.values[-1] + usage
                    elapsed = now_ms - self.starts[first]
                else:
                    total, elapsed = 0.0 + usage, 0
        missing = form.samples - 1 - elapsed // sample_ms
        window = elapsed + missing * sample_ms if missing > 0 else elapsed
        observed = total / ((window or 1) / 1000)
        if observed <= form.limit:
            return 0
        if form.is_deny:
            wait = sampled_rate.wait_ms(
                self.state(), usage, now_ms, form.limit, form.samples, sample_ms, self.holds
            )
            return form.throttled(now_ms - at_ms + wait)
        if form.limit == 0:
            return form.longest_ms
        exact = (observed - form.limit) / form.limit * (window or 1)
        return max(1, math.floor(min(exact, float(form.longest_ms)) + 0.5))

    def charge(self, form: QuotaForm, usage: float, at_ms: int, _ids: tuple[bytes, ...] = ()) -> None:
        now_ms = at_ms if at_ms >= self.newest_ms else self.newest_ms  # noqa: FURB136  faster
        if self.holds:
            self._reckon(form, now_ms, at_ms)
        lasts = self.lasts
        if lasts:
            if now_ms - self.starts[-1] < form.sample_ms:
                self.values[-1] += usage
                lasts[-1] = self.newest_ms = now_ms
                return
            horizon = now_ms - form.kept_ms
            if lasts[0] > horizon:
                self.before += self.values[-1]
            else:
                kept = form.kept_ms // form.sample_ms
                self.take(sampled_rate.live_samples(self.state(), now_ms, kept, form.sample_ms))
                self.before = sampled_rate.total(self.state())
        self.values.append(float(usage))
        self.starts.append(now_ms)
        self.lasts.append(now_ms)
        self.newest_ms = now_ms

    def touch(self, _form: QuotaForm, _at_ms: int, _ids: tuple[bytes, ...] = ()) -> None:
        pass  # a refused ask leaves a rate as it is

    def refund(self, form: QuotaForm, usage: float, at_ms: int) -> None:
        if self.holds:
            self._reckon(form, max(at_ms, self.newest_ms), at_ms)
        self.take(sampled_rate.refund(self.state(), usage))

    def shows(self, form: QuotaForm, at_ms: int) -> tuple[float, float]:
        now_ms = max(at_ms, self.newest_ms)
        return self.domain().shows(form.charge(0.0, now_ms, at_ms))

    def shown(self, form: QuotaForm, at_ms: int) -> float:
        """The observed value of the bucket, without leases."""
        now_ms = at_ms if at_ms >= self.newest_ms else self.newest_ms  # noqa: FURB136  faster
        lasts = self.lasts
        horizon = now_ms - form.span_ms
        if not lasts or lasts[-1] <= horizon:
            return 0.0
        first = 0
        total = self.before
        if lasts[0] <= horizon:
            first = 1
            while lasts[first] <= horizon:
                first += 1
            total = 0.0
            for value in self.values[first:-1]:
                total += value
        total += self.values[-1]
        elapsed = now_ms - self.starts[first]
        missing = form.samples - 1 - elapsed // form.sample_ms
        window = elapsed + missing * form.sample_ms if missing > 0 else elapsed
        return total / ((window or 1) / 1000)

    def move_to(self, at_ms: int) -> None:
        by_ms = at_ms - self.newest_ms
        self.starts = [start + by_ms for start in self.starts]
        self.lasts = [last + by_ms for last in self.lasts]
        self.holds = moved(self.holds, by_ms)
        self.newest_ms = at_ms

    def state(self) -> Samples:
        """The samples in the form of the domain."""
        return tuple(map(Sample, self.values, self.starts, self.lasts))

    def take(self, state: Samples) -> None:
        """Adopt samples of the domain."""
        self.values = [float(sample.value) for sample in state]
        self.starts = [sample.start_ms for sample in state]
        self.lasts = [sample.last_ms for sample in state]
        self.before = sampled_rate.total(state[:-1])
        self.newest_ms = self.lasts[-1] if state else self.newest_ms

    def domain(self) -> RateBucket:
        """The bucket of the domain, for rare cases; ``adopt`` takes its state back."""
        return RateBucket(self.state(), holds=self.holds)

    def adopt(self, bucket: RateBucket) -> None:
        """Adopt the state of a bucket of the domain."""
        self.take(bucket.state)
        self.holds = bucket.holds

    def _reckon(self, form: QuotaForm, now_ms: int, at_ms: int) -> None:
        bucket = self.domain()
        bucket.reckon(form.charge(0.0, now_ms, at_ms))
        self.adopt(bucket)

    def _asked(self, form: QuotaForm, usage: float, now_ms: int, at_ms: int, later_ms: int) -> int:
        bucket, charge = self.domain(), form.charge(usage, now_ms, at_ms)
        bucket.reckon(charge)
        return _answer(bucket, form, charge, later_ms)


@dataclass(slots=True, eq=False)
class Level:
    """A token bucket: its tokens, and when they were last written; no tokens are a full bucket."""

    tokens: float | None = None
    newest_ms: int = 0
    holds: Holds = ()

    def ask(
        self, form: QuotaForm, usage: float, at_ms: int, _ids: tuple[bytes, ...] = (), later_ms: int = 0
    ) -> int:
        if form.never and usage > 0:
            return form.longest_ms if form.recording else REJECT
        now_ms = at_ms if at_ms >= self.newest_ms else self.newest_ms  # noqa: FURB136  faster
        is_simple = form.is_deny and not self.holds and usage <= form.quota.burst
        if is_simple and (usage == 0 or self._level(form, now_ms) >= usage):
            return 0
        bucket, charge = self.domain(), form.charge(usage, now_ms, at_ms)
        bucket.reckon(charge)
        return _answer(bucket, form, charge, later_ms)

    def charge(self, form: QuotaForm, usage: float, at_ms: int, _ids: tuple[bytes, ...] = ()) -> None:
        now_ms = at_ms if at_ms >= self.newest_ms else self.newest_ms  # noqa: FURB136  faster
        if self.holds:
            bucket, charge = self.domain(), form.charge(usage, now_ms, at_ms)
            bucket.reckon(charge)
            bucket.charge(charge)
            self.adopt(bucket)
            return
        self.tokens, _ = token_bucket.forgive(self._level(form, now_ms) - usage, form.quota.max_debt)
        self.newest_ms = now_ms

    def touch(self, form: QuotaForm, at_ms: int, _ids: tuple[bytes, ...] = ()) -> None:
        if self.tokens is None or (self.tokens >= 0 and not self.holds):
            return  # no debt to forgive
        bucket, charge = self.domain(), form.charge(0.0, max(at_ms, self.newest_ms), at_ms)
        bucket.reckon(charge)
        bucket.touch(charge)
        if bucket.forgiven or bucket.lapses:
            self.adopt(bucket)

    def refund(self, form: QuotaForm, usage: float, at_ms: int) -> None:
        bucket, charge = self.domain(), form.charge(usage, max(at_ms, self.newest_ms), at_ms)
        bucket.reckon(charge)
        bucket.refund(charge)
        self.adopt(bucket)

    def shows(self, form: QuotaForm, at_ms: int) -> tuple[float, float]:
        now_ms = max(at_ms, self.newest_ms)
        bucket, charge = self.domain(), form.charge(0.0, now_ms, at_ms)
        bucket.reckon(charge)
        return bucket.shows(charge)

    def move_to(self, at_ms: int) -> None:
        self.holds = moved(self.holds, at_ms - self.newest_ms)
        self.newest_ms = at_ms

    def domain(self) -> TokensBucket:
        """The bucket of the domain, for rare cases; ``adopt`` takes its state back."""
        state = None if self.tokens is None else Tokens(self.tokens, self.newest_ms)
        return TokensBucket(state, holds=self.holds)

    def adopt(self, bucket: TokensBucket) -> None:
        """Adopt the state of a bucket of the domain."""
        self.holds = bucket.holds
        if bucket.state is not None:
            self.tokens, self.newest_ms = bucket.state

    def _level(self, form: QuotaForm, now_ms: int) -> float:
        """The tokens now, with at most the longest debt."""
        quota = form.quota
        if self.tokens is None:
            return quota.burst
        tokens = min(quota.burst, self.tokens + quota.limit * ((now_ms - self.newest_ms) / 1000))
        return max(tokens, -quota.max_debt)


@dataclass(slots=True, eq=False)
class Ids:
    """A bucket of producer ids in exact sets.

    Attributes:
        open_ms, open_ids: when the newest layer began, and its ids; most asks name only ids of it.
    """

    max_ids: int
    exact: ExactIds = field(default_factory=ExactIds)
    newest_ms: int = 0
    open_ms: int | None = None
    open_ids: set[bytes] = field(default_factory=set)

    def ask(
        self, form: QuotaForm, usage: float, at_ms: int, ids: tuple[bytes, ...], _later_ms: int = 0
    ) -> int:
        if not ids or self.are_open(form, at_ms, ids):
            return 0
        now_ms = max(at_ms, self.newest_ms)
        return _answer(IdsBucket(self.max_ids, self.exact), form, form.charge(usage, now_ms, at_ms, ids))

    def charge(self, form: QuotaForm, usage: float, at_ms: int, ids: tuple[bytes, ...]) -> None:
        if ids and not self.are_open(form, at_ms, ids):
            charge = form.charge(usage, max(at_ms, self.newest_ms), at_ms, ids)
            IdsBucket(self.max_ids, self.exact).charge(charge)
            self.note()

    def touch(self, form: QuotaForm, at_ms: int, ids: tuple[bytes, ...]) -> None:
        if ids and not self.are_open(form, at_ms, ids):
            charge = form.charge(len(ids), max(at_ms, self.newest_ms), at_ms, ids)
            IdsBucket(self.max_ids, self.exact).touch(charge)
            self.note()

    def refund(self, _form: QuotaForm, _usage: float, _at_ms: int) -> None:
        pass  # ids cannot be given back

    def shows(self, form: QuotaForm, at_ms: int) -> tuple[float, float]:
        charge = form.charge(0.0, max(at_ms, self.newest_ms), at_ms)
        return IdsBucket(self.max_ids, self.exact).shows(charge)

    def unseen(self, form: QuotaForm, at_ms: int, ids: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The ids that the bucket does not know."""
        if self.are_open(form, at_ms, ids):
            return ()
        now_ms, layers = max(at_ms, self.newest_ms), form.quota.layers
        return tuple([each for each in ids if self.exact.find(each, now_ms, layers) is None])

    def move_to(self, at_ms: int) -> None:
        self.exact.move(at_ms - self.newest_ms)
        self.note()

    def note(self) -> None:
        """Note the newest layer, after a change to the exact sets."""
        layers = self.exact.layers
        self.newest_ms = self.exact.newest_ms or 0
        if layers:
            number = next(reversed(layers))
            self.open_ms, self.open_ids = layers[number], self.exact.held.setdefault(number, set())

    def are_open(self, form: QuotaForm, at_ms: int, ids: tuple[bytes, ...]) -> bool:
        """Whether the open layer has all these ids, so that the ask neither writes nor is refused."""
        now_ms = at_ms if at_ms >= self.newest_ms else self.newest_ms  # noqa: FURB136  faster
        if self.open_ms is None or now_ms - self.open_ms >= form.quota.layers.interval_ms:
            return False
        known = self.open_ids
        return ids[0] in known if len(ids) == 1 else known.issuperset(ids)


Bucket = Rate | Level | Ids


def new_bucket(quota: Quota, max_ids: int) -> Bucket:
    """An empty bucket of a quota."""
    if quota.algorithm == "producer_ids":
        return Ids(max_ids)
    return Rate() if quota.algorithm == "sampled_rate" else Level()


def empty(bucket: Bucket) -> None:
    """Empty a bucket in place."""
    fresh: Bucket = Ids(bucket.max_ids) if isinstance(bucket, Ids) else type(bucket)()
    for name in type(bucket).__slots__:
        setattr(bucket, name, getattr(fresh, name))


def _answer(
    bucket: RateBucket | TokensBucket | IdsBucket, form: QuotaForm, charge: BucketCharge, later_ms: int = 0
) -> int:
    """The answer of a bucket of the domain."""
    if later_ms:
        charge = BucketCharge(
            charge.quota,
            charge.usage,
            charge.enforcement,
            charge.recording,
            charge.now_ms,
            charge.wait_from_ms,
            charge.spreads,
            later_ms,
        )
    judged = bucket.judge(charge)
    if judged.outcome == "reject":
        return REJECT
    if judged.outcome == "throttle":
        return form.throttled(judged.throttle_ms)
    return judged.throttle_ms
