"""The bounds that GET /v1/quotas states are exactly the most that an adversary can get."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules
from app.domain.oracle import Oracle
from app.domain.quota import LAYER_POLICIES, Layers, Quota
from tests.bounds.search import Found, Move, Target, most_in_a_window, taken, worst
from tests.report import say

ALICE = Entity.of(user="alice")
FAST, LONG = 400, 20_000


class OracleLimiter:
    """The oracle as a limiter for the usage of one quota; every id is new."""

    def __init__(self, quota: Quota, usage: str) -> None:
        self.oracle = Oracle(b"k" * 32, max_ids=10_000)
        self.quotas = {quota.key: {ALICE: quota}}
        self.usage = usage
        self.ids = itertools.count()

    def admits(self, amount: int, at_ms: int) -> bool:
        ids = tuple(itertools.islice(self.ids, amount)) if self.usage == "producer_ids" else None
        usage = {} if ids is not None else {self.usage: amount}
        ask = Ask(usage, ids, "alice")
        return self.oracle.decide(ask, self.quotas, MatchingRules(), 1_000_000 + at_ms).decision == "admit"


class TwoCells:
    """The planted fault: a counter of fixed windows, which weights the last window's count by its overlap."""

    def __init__(self, limit: int, window_ms: int) -> None:
        self.limit, self.window_ms = limit, window_ms
        self.cells: dict[int, int] = {}

    def admits(self, amount: int, at_ms: int) -> bool:
        cell, into = divmod(at_ms, self.window_ms)
        now, before = self.cells.get(cell, 0), self.cells.get(cell - 1, 0)
        if before * (1 - into / self.window_ms) + now + amount > self.limit:
            return False
        self.cells[cell] = now + amount
        return True


def around(*edges: int) -> tuple[int, ...]:
    return tuple(sorted({max(0, edge + offset) for edge in edges for offset in (-1, 0, 1)}))


def ids_target(policy: str) -> Target:
    window, limit = 360, 12
    layers = Layers.named(policy, window)
    quota = Quota("producer_ids_rate", limit, "producer_ids", "deny", window_ms=window, layers=layers)
    assert quota.bound == (1.0, window)
    gaps = around(0, window, layers.interval_ms, layers.ttl_ms, window // 2)
    return Target(lambda: OracleLimiter(quota, "producer_ids"), limit, window, gaps)


def rate_target(samples: int, sample_ms: int = 100, limit: int = 1_000) -> tuple[Target, float]:
    quota = Quota("consumer_byte_rate", limit, "sampled_rate", "deny", samples=samples, sample_ms=sample_ms)
    ratio, window = quota.bound
    assert ratio is not None
    gaps = around(0, sample_ms, (samples - 1) * sample_ms, window, window + sample_ms)
    return Target(lambda: OracleLimiter(quota, "fetch_bytes"), limit * window // 1000, window, gaps), ratio


def tokens_target(limit: int, burst: int) -> tuple[Target, float]:
    quota = Quota("controller_mutation_rate", limit, "token_bucket", "deny", burst=burst)
    ratio, window = quota.bound
    assert ratio is not None
    target = Target(
        lambda: OracleLimiter(quota, "mutations"),
        limit * window // 1000,
        window,
        around(0, window, window // 2),
    )
    return target, ratio


def two_cells_target() -> Target:
    limit, window = 1_000, 1_000
    return Target(lambda: TwoCells(limit, window), limit, window, around(0, window))


def report(name: str, found: Found) -> None:
    moves = ", ".join(f"+{gap} ms {'all' if most is None else most}" for gap, most in found.plan)
    say(f"{name}: {found.ratio:.4f} in {found.tried:,} plans, by {moves}")


long = pytest.mark.prove
tries = pytest.mark.parametrize("tries", [FAST, pytest.param(LONG, marks=long, id="long")])


@tries
@pytest.mark.parametrize("policy", LAYER_POLICIES)
def test_ids_never_exceed_the_limit(policy: str, tries: int):
    found = worst(ids_target(policy), tries)
    report(f"producer ids, {policy}", found)
    assert found.ratio == 1.0


@pytest.mark.parametrize("policy", LAYER_POLICIES)
def test_ids_stay_within_the_limit_over_a_window_and_a_burst_after_it(policy: str):
    """One id at 0 s and 99 at 899 s of 3,600 (limit 100), then as many as pass from 3,600 s on."""
    quota = Quota("producer_ids_rate", 100, "producer_ids", "deny", layers=Layers.named(policy, 3_600_000))
    target = Target(lambda: OracleLimiter(quota, "producer_ids"), 100, 3_600_000, ())
    singles = (Move(0, 1),) * 100
    plan = (
        Move(0, 1),
        Move(899_000, 1),
        *singles[:98],
        Move(2_701_000, 1),
        *singles[:99],
        Move(899_000, 1),
        *singles,
    )
    got = taken(target.new(), plan, 100)
    assert sum(amount for _, amount in got) == 200, "each id passes when an earlier one leaves the window"
    assert most_in_a_window(target, got) == 100


@tries
@pytest.mark.parametrize("samples", [1, 2, 3, 11])
def test_sampled_rate_exceeds_its_limit_by_at_most_one_sample(samples: int, tries: int):
    target, stated = rate_target(samples)
    found = worst(target, tries)
    report(f"sampled rate, {samples} samples", found)
    decided = max(samples, 2)
    assert stated == (decided + 1) / decided
    assert found.ratio == pytest.approx(stated - 2 / target.window_ms, abs=1 / target.allowance)


@tries
def test_token_bucket_admits_its_burst_and_a_refill(tries: int):
    target, stated = tokens_target(limit=1_000, burst=1_100)
    found = worst(target, tries)
    report("token bucket", found)
    assert stated == 2.0
    assert found.ratio == pytest.approx(stated - 1 / target.window_ms, abs=1 / target.allowance)


@tries
def test_search_finds_the_error_of_a_two_cell_window(tries: int):
    found = worst(two_cells_target(), tries)
    report("two cells (planted)", found)
    assert found.ratio == pytest.approx(2.0, rel=0.01)


def test_quota_without_a_bound_reports_none():
    quota = Quota("consumer_byte_rate", 10, "sampled_rate", "deny")
    assert quota.bound == (12 / 11, 11_000)
    assert replace(quota, enforcement="delay").bound == (None, 11_000)
    assert replace(quota, shadow=True).bound == (None, 11_000)
    assert replace(quota, limit=0).bound == (0.0, 11_000)
