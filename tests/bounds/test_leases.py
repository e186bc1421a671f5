"""Leases keep the bounds that quotas state, use nearly the whole limit, and are shared equally."""

from __future__ import annotations

import pytest

from app.domain.quota import Algorithm, Quota
from tests.bounds.leases import ChargingLessor, OracleLessor, worst
from tests.bounds.steady import shares
from tests.report import say

FAST, LONG = 220, 4_000
QUOTAS = {
    "sampled rate, 1 sample": ("sampled_rate", 1, 0.0),
    "sampled rate, 2 samples": ("sampled_rate", 2, 0.0),
    "sampled rate, 3 samples": ("sampled_rate", 3, 0.0),
    "sampled rate, 11 samples": ("sampled_rate", 11, 0.0),
    "token bucket": ("token_bucket", 11, 1_100.0),
}
tries = pytest.mark.parametrize("tries", [FAST, pytest.param(LONG, marks=pytest.mark.prove, id="long")])
each = pytest.mark.parametrize("name", QUOTAS)


def quota_of(name: str, *, sample_ms: int = 100, limit: int = 1_000) -> Quota:
    algorithm: Algorithm
    algorithm, samples, burst = QUOTAS[name]  # type: ignore[assignment]
    debt = 2.0 * limit
    return Quota(
        "consumer_byte_rate",
        limit,
        algorithm,
        "deny",
        samples=samples,
        sample_ms=sample_ms,
        burst=burst * limit * sample_ms / 100_000,
        max_debt=debt,
    )


@tries
@each
def test_leases_keep_the_bound(name: str, tries: int):
    """1,100 plans: late spenders, dead holders, direct asks, lowered limits, clocks set back."""
    quota = quota_of(name)
    stated, _ = quota.bound
    ratio = worst(OracleLessor, quota, tries)
    say(f"leases of a {name}: {ratio:.4f} of at most {stated:.4f} in {tries:,} plans")
    assert stated is not None
    assert 1.0 < ratio <= stated


@each
def test_clock_set_ahead_costs_at_most_what_holders_had_left(name: str):
    quota = quota_of(name)
    stated, _ = quota.bound
    assert stated is not None
    assert worst(OracleLessor, quota, FAST // 2, ahead=True) <= stated


@pytest.mark.parametrize("name", ["sampled rate, 3 samples", "sampled rate, 11 samples", "token bucket"])
def test_search_finds_that_leases_which_only_charge_break_the_bound(name: str):
    quota = quota_of(name)
    stated, _ = quota.bound
    assert stated is not None
    assert worst(ChargingLessor, quota, FAST) > stated


@pytest.mark.parametrize("holders", [1, 4])
@pytest.mark.parametrize("name", ["sampled rate, 11 samples", "token bucket"])
def test_equal_holders_use_what_there_is_and_share_it_equally(name: str, holders: int):
    """With a demand of twice the limit, and leases of a tenth of the window."""
    quota = quota_of(name, sample_ms=500)
    run_ms = 10 * quota.bound[1]
    them = shares(quota, holders, lease_ms=quota.bound[1] // 10, run_ms=run_ms)
    used = [holder.used for holder in them]
    part = sum(used) / (quota.limit * run_ms / 1000)
    mean = sum(used) / holders
    say(
        f"{holders} holders, {name}: {part:.1%} used, shares {min(used) / mean:.3f} to {max(used) / mean:.3f}"
    )
    assert part >= 0.95
    assert max(used) <= 1.1 * mean
    assert min(used) >= 0.9 * mean
