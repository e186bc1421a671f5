"""Fast buckets that decide as the domain does: ids with its exact sets, rates with each sum computed once.

Tests compare both with the domain's oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from app.domain import sampled_rate
from app.domain.exact_ids import ExactIds
from app.domain.quota import Quota
from app.domain.sampled_rate import Samples

MAX_IDS: Final = 1_000_000
"""No principal of this traffic comes near this capacity, so `capacity` never occurs as a reason."""


class IdsVerdict(NamedTuple):
    """The verdict of a bucket on an ask's ids, which are unseen or seen."""

    outcome: str
    throttle_ms: int
    reason: str | None
    unseen: list[bytes]
    seen: list[bytes]


def judged(quota: Quota, ids: ExactIds, asked: Sequence[bytes], now_ms: int) -> IdsVerdict:
    """Return the verdict on these ids, without writing anything."""
    unseen: list[bytes] = []
    seen: list[bytes] = []
    for each in asked:
        (unseen if ids.find(each, now_ms, quota.layers) is None else seen).append(each)
    if not unseen or ids.charged(now_ms, quota.window_ms) + len(unseen) <= quota.limit:
        return IdsVerdict("admit", 0, None, unseen, seen)
    if len(unseen) > quota.limit:
        return IdsVerdict("reject", 0, "too_large", unseen, seen)
    wait = ids.wait_for_rate(len(unseen), now_ms, quota.limit, quota.window_ms)
    return IdsVerdict("throttle", wait, None, unseen, seen)


def touched(quota: Quota, ids: ExactIds, seen: Sequence[bytes], now_ms: int) -> list[bytes]:
    """Write seen ids to the open layer; return those that were not in it."""
    stale = [each for each in seen if ids.stale(each, now_ms, quota.layers)]
    for each in stale:
        ids.refresh(each, now_ms, quota.layers, quota.limit, MAX_IDS)
    return stale


def charge(quota: Quota, ids: ExactIds, unseen: Sequence[bytes], now_ms: int) -> None:
    """Charge unseen ids, and remember them."""
    if unseen:
        ids.charge(unseen, now_ms, quota.window_ms, quota.layers, quota.limit, MAX_IDS)


class RateVerdict(NamedTuple):
    """The verdict of a delaying rate, and the bucket and its values as they would be after the charge."""

    throttle_ms: int
    after: Samples
    observed: float
    remaining: float


def delayed(quota: Quota, state: Samples, usage: float, now_ms: int) -> RateVerdict:
    """Return the verdict of a sampled rate that delays, without writing anything."""
    after = sampled_rate.record(state, usage, now_ms, quota.samples, quota.sample_ms)
    observed, window, summed = _measure(quota, after, now_ms)
    delay = sampled_rate.delay_ms(observed, quota.limit, window, quota.longest_delay_ms)
    return RateVerdict(delay, after, observed, quota.limit * (window / 1000) - summed)


def shown(quota: Quota, state: Samples, now_ms: int) -> tuple[float, float]:
    """The observed value of the bucket, and what remains."""
    observed, window, summed = _measure(quota, state, now_ms)
    return observed, quota.limit * (window / 1000) - summed


def _measure(quota: Quota, state: Samples, now_ms: int) -> tuple[float, int, float]:
    alive = sampled_rate.live_samples(state, now_ms, quota.samples, quota.sample_ms)
    elapsed = now_ms - alive[0].start_ms if alive else 0
    window = sampled_rate.window_ms(elapsed, quota.samples, quota.sample_ms)
    summed = sampled_rate.total(alive)
    return summed / (window / 1000), window, summed
