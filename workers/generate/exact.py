"""Buckets that decide as the domain does, fast: ids by its exact sets, rates with each sum taken once.

The tests hold both to the domain's oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from app.domain import sampled_rate
from app.domain.exact_ids import ExactIds
from app.domain.quota import Quota
from app.domain.sampled_rate import Samples

MAX_IDS: Final = 1_000_000
"""Nobody in this traffic comes near it, so capacity is no reason here."""


class IdsVerdict(NamedTuple):
    """What a bucket says of an ask's ids, which are unseen or seen."""

    outcome: str
    throttle_ms: int
    reason: str | None
    unseen: list[bytes]
    seen: list[bytes]


def judged(quota: Quota, ids: ExactIds, asked: Sequence[bytes], now_ms: int) -> IdsVerdict:
    """Whether these ids pass, nothing written."""
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
    """Write seen ids to the open layer; gives back those that were not there."""
    stale = [each for each in seen if ids.stale(each, now_ms, quota.layers)]
    for each in stale:
        ids.refresh(each, now_ms, quota.layers, quota.limit, MAX_IDS)
    return stale


def charge(quota: Quota, ids: ExactIds, unseen: Sequence[bytes], now_ms: int) -> None:
    """Charge unseen ids, and remember them."""
    if unseen:
        ids.charge(unseen, now_ms, quota.window_ms, quota.layers, quota.limit, MAX_IDS)


class RateVerdict(NamedTuple):
    """What a delaying rate says, the bucket as it would be with the charge, and what it would show."""

    throttle_ms: int
    after: Samples
    observed: float
    remaining: float


def delayed(quota: Quota, state: Samples, usage: float, now_ms: int) -> RateVerdict:
    """The verdict of a sampled rate that delays, nothing written."""
    after = sampled_rate.record(state, usage, now_ms, quota.samples, quota.sample_ms)
    observed, window, summed = _measure(quota, after, now_ms)
    delay = sampled_rate.delay_ms(observed, quota.limit, window, quota.longest_delay_ms)
    return RateVerdict(delay, after, observed, quota.limit * (window / 1000) - summed)


def shown(quota: Quota, state: Samples, now_ms: int) -> tuple[float, float]:
    """Observed and remaining, as they stand."""
    observed, window, summed = _measure(quota, state, now_ms)
    return observed, quota.limit * (window / 1000) - summed


def _measure(quota: Quota, state: Samples, now_ms: int) -> tuple[float, int, float]:
    alive = sampled_rate.live(state, now_ms, quota.samples, quota.sample_ms)
    elapsed = now_ms - alive[0].start_ms if alive else 0
    window = sampled_rate.window_ms(elapsed, quota.samples, quota.sample_ms)
    summed = sampled_rate.total(alive)
    return summed / (window / 1000), window, summed
