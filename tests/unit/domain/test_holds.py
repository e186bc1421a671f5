"""Holds: the units that leases take from buckets, the units that count as spent, and the sizes of grants."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.domain import sampled_rate, token_bucket
from app.domain.ask import Ask
from app.domain.binding import Binding
from app.domain.caller import Caller
from app.domain.decision import Decision
from app.domain.entity import ANY, Entity
from app.domain.errors import OutOfBoundsError
from app.domain.holds import Hold, held, slice_of, with_hold
from app.domain.ladder import MatchingRules
from app.domain.oracle import Leased, Oracle
from app.domain.quota import KEYS, Quota
from app.domain.sampled_rate import Sample
from app.domain.token_bucket import Tokens

ALICE, EACH_IP = Entity.of(user="alice"), Entity.of(ip=ANY)
RULES = MatchingRules()
T = 1_000_000
HOLDS = st.lists(
    st.builds(Hold, st.binary(min_size=1, max_size=2), st.integers(1, 30), st.integers(1, 3_000)), max_size=4
).map(lambda holds: tuple(sorted(holds, key=lambda hold: hold.ends_ms)))


def rate(limit: float = 10, **fields: Any) -> Quota:
    return Quota("consumer_byte_rate", limit, "sampled_rate", "deny", **fields)


def bucket(limit: float = 10, burst: float = 110.0, **fields: Any) -> Quota:
    return Quota("consumer_byte_rate", limit, "token_bucket", "deny", burst=burst, **fields)


class Leasing:
    """An oracle with quotas for alice and an address; times are in milliseconds after T."""

    def __init__(self, *quotas: Quota) -> None:
        self.oracle = Oracle(b"s" * 32)
        self.quotas = {q.key: {ALICE if ("user",) in KEYS[q.key].entities else EACH_IP: q} for q in quotas}

    def change(self, key: str, **changes: Any) -> None:
        self.quotas[key] = {entity: replace(q, **changes) for entity, q in self.quotas[key].items()}

    def take(self, at: int, lease: bytes, lease_ms: int = 1_000, **wish: float) -> Leased:
        ask = Ask(wish, None, "alice", ip="10.0.0.7", mode="record")
        return self.oracle.lease(ask, self.quotas, RULES, T + at, lease, lease_ms)

    def settle(self, at: int, lease: bytes, **spent: float) -> bool:
        ask = Ask(spent, None, "alice", ip="10.0.0.7", mode="record")
        return self.oracle.settle(ask, self.quotas, RULES, T + at, lease)

    def ask(self, at: int, mode: Any = "admit", **usage: float) -> Decision:
        ask = Ask(usage, None, "alice", ip="10.0.0.7", mode=mode, detail=True)
        return self.oracle.decide(ask, self.quotas, RULES, T + at)

    def shows(self, at: int, **usage: float) -> tuple[float | None, float | None]:
        """Observed and remaining."""
        decision = self.ask(at, "peek", **(usage or {"fetch_bytes": 0}))
        assert decision.quotas is not None
        return decision.quotas[0].observed, decision.quotas[0].remaining


# Sizes of grants


@given(st.integers(1, 10_000), st.floats(0, 5_000), st.integers(1, 10_000), HOLDS)
def test_slice_is_the_least_of_four_and_whole(wish: int, free: float, capacity: int, holds: Any):
    units = slice_of(wish, free, capacity, holds)
    share = max(1, free / (len(holds) + 1))
    exact = min(wish, free, share, (capacity - held(holds)) / 2)
    assert units == max(math.floor(exact), 0)


def test_grants_leave_something_for_others():
    take = Leasing(bucket())
    assert [take.take(0, bytes([n]), fetch_bytes=1_000).granted for n in range(4)] == [
        {"fetch_bytes": 55},
        {"fetch_bytes": 27},
        {"fetch_bytes": 9},
        {"fetch_bytes": 4},
    ]
    assert take.shows(0) == (95, 15)


def test_lease_is_taken_from_every_bucket_by_field_or_from_none():
    per_request = Quota("request_rate", 3, "token_bucket", "deny", burst=20.0)
    take = Leasing(rate(), per_request)
    both = take.take(0, b"a", fetch_bytes=1_000, requests=4)
    assert both.granted == {"fetch_bytes": 50, "requests": 4}
    assert take.shows(0, requests=0) == (4, 16)
    take.ask(0, requests=16)
    refused = take.take(0, b"b", fetch_bytes=1_000, requests=4)
    assert refused.granted == {}
    assert refused.decision.limited_by is not None
    assert (refused.decision.limited_by.quota, refused.decision.throttle_ms) == ("request_rate", 334)
    assert take.shows(0) == (5.0, 50.0), "nothing of the other quota is held"


def test_percent_of_a_thread_are_granted_in_milliseconds():
    quota = Quota("request_percentage", 10, "sampled_rate", "delay")
    take = Leasing(quota)
    assert take.take(0, b"a", request_time_ms=4_000).granted == {"request_time_ms": 500}
    assert take.take(0, b"b", request_time_ms=3.3).granted == {"request_time_ms": 3.3}


def test_field_without_a_quota_is_granted_as_wished():
    assert Leasing(rate()).take(0, b"a", requests=7, fetch_bytes=3).granted == {
        "requests": 7,
        "fetch_bytes": 3,
    }
    alone = Leasing(rate()).take(0, b"a", requests=7)
    assert (alone.granted, alone.decision.source) == ({"requests": 7}, "local")


def test_bucket_too_small_to_share_is_never_leased():
    refused = Leasing(bucket(limit=1, burst=1.0)).take(0, b"a", fetch_bytes=5).decision
    assert (refused.decision, refused.limited_by and refused.limited_by.largest) == ("reject", 0.5)
    zero = Leasing(bucket(limit=0, burst=0.0)).take(0, b"a", fetch_bytes=5).decision
    assert (zero.decision, zero.limited_by and zero.limited_by.largest) == ("reject", 0.0)


def test_bucket_has_at_most_64_leases():
    take = Leasing(bucket(limit=100_000, burst=1e6))
    for number in range(64):
        assert take.take(number, bytes([number]), 1_000, fetch_bytes=5).granted
    refused = take.take(64, b"x", fetch_bytes=5).decision
    assert (refused.decision, refused.throttle_ms) == ("throttle", 936)
    assert refused.limited_by is not None
    assert refused.limited_by.reason == "capacity"
    assert take.settle(64, bytes([5]), fetch_bytes=1)
    assert take.take(64, b"x", fetch_bytes=5).granted


def test_refused_holder_waits_at_most_until_the_first_lease_ends():
    take = Leasing(rate())
    take.take(0, b"a", 700, fetch_bytes=50)
    take.ask(0, fetch_bytes=50)
    assert take.ask(0, fetch_bytes=3).throttle_ms == 300, "as the window grows"
    take.ask(0, "record", fetch_bytes=20)
    assert take.take(0, b"b", fetch_bytes=50).decision.throttle_ms == 700
    assert take.ask(0, fetch_bytes=3).throttle_ms == 11_700, "a direct ask waits as if nobody settles"


def test_shadow_quota_holds_and_never_changes_a_grant():
    take = Leasing(rate(), Quota("request_rate", 1, "token_bucket", "deny", True, burst=2.0))
    assert take.take(0, b"a", requests=5, fetch_bytes=2).granted == {"requests": 5, "fetch_bytes": 2}
    assert take.shows(0, requests=0) == (5.0, -3.0)


def test_bound_caller_holds_nothing_in_a_shared_bucket():
    take = Leasing(Quota("connection_creation_rate", 10, "sampled_rate", "deny"))
    ask = Ask({"connections": 1}, None, "alice", ip="10.0.0.7", mode="record")
    bound = Caller("tenant", bound_to=(Binding.parse("user=alice"),))
    with pytest.raises(OutOfBoundsError):
        take.oracle.lease(ask, take.quotas, RULES, T, b"a", 1_000, bound)


# Held, settled and lapsed units


@pytest.mark.parametrize("quota", [rate(), bucket(burst=100.0)])
def test_held_units_count_as_used_until_they_are_settled(quota: Quota):
    take = Leasing(quota)
    take.take(0, b"a", fetch_bytes=40)
    assert take.shows(0)[1] == 60
    assert take.ask(0, fetch_bytes=61).decision == "throttle"
    assert take.settle(0, b"a", fetch_bytes=15)
    assert take.shows(0)[1] == 85
    assert not take.settle(0, b"a", fetch_bytes=15), "it is over"
    assert take.shows(0)[1] == 85


def test_unsettled_lease_counts_as_spent_at_its_end():
    take = Leasing(rate())
    take.take(0, b"a", 1_000, fetch_bytes=40)
    assert not take.settle(1_000, b"a", fetch_bytes=0)
    assert take.oracle.lapsed == 40
    assert take.shows(11_999)[1] == pytest.approx(69.99), "40 in 10,999 ms"
    assert take.shows(12_000)[1] == 100


def test_tokens_fill_up_to_the_burst_less_what_is_held():
    take = Leasing(bucket(limit=10, burst=100.0))
    take.take(0, b"a", 10_000, fetch_bytes=50)
    assert take.shows(9_999) == (50, 50)
    assert take.shows(11_000) == (40, 60), "from 10,000 ms on"


def test_refund_stops_at_the_burst_less_what_is_held():
    take = Leasing(bucket(limit=10, burst=100.0))
    take.take(0, b"a", 10_000, fetch_bytes=50)
    take.ask(0, fetch_bytes=10)
    take.ask(0, "refund", fetch_bytes=30)
    assert take.shows(0) == (50, 50)


def test_lowered_limit_binds_new_grants_at_once():
    take = Leasing(rate(limit=10))
    take.take(0, b"a", fetch_bytes=50)
    take.change("consumer_byte_rate", limit=5)
    assert take.take(0, b"b", fetch_bytes=50).decision.decision == "throttle"
    assert take.settle(10, b"a", fetch_bytes=10)
    assert take.take(10, b"b", fetch_bytes=50).granted == {"fetch_bytes": 25}


def test_leases_move_with_a_clock_that_falls_back():
    take = Leasing(rate())
    take.take(0, b"a", 1_000, fetch_bytes=40)
    take.ask(-500_000, fetch_bytes=1)
    assert take.settle(-500_000 + 999, b"a", fetch_bytes=7)
    assert take.shows(-500_000 + 999)[1] == pytest.approx(101.99), "8 in 10,999 ms"


def test_full_store_keeps_leases_of_the_buckets_it_has():
    take = Leasing(rate())
    take.take(0, b"a", fetch_bytes=40)
    take.oracle.full = True
    assert take.take(0, b"b", fetch_bytes=4).granted
    assert take.settle(0, b"a", fetch_bytes=4)


def test_peek_reckons_nothing_for_others():
    take = Leasing(rate())
    take.take(0, b"a", 1_000, fetch_bytes=40)
    take.shows(5_000)
    (state,) = take.oracle.buckets.values()
    assert state.holds == (Hold(b"a", 40, T + 1_000),)  # type: ignore[attr-defined]


# Waits are the least that pass


@given(HOLDS, st.integers(1, 30), st.integers(0, 60), st.sampled_from(((3, 200), (2, 500), (11, 100))))
def test_wait_of_a_rate_is_the_least_at_which_it_passes(holds: Any, usage: int, used: int, shape: Any):
    samples, sample_ms = shape
    limit, now = 30.0, 400
    state: tuple[Sample, ...] = (Sample(float(used), 0, 300),)
    state, holds = sampled_rate.reckon(state, holds, now, samples, sample_ms)
    assume(not sampled_rate.too_large(usage, limit, samples, sample_ms))

    def passes(at: int) -> bool:
        then, rest = sampled_rate.reckon(state, holds, at, samples, sample_ms)
        after = sampled_rate.record(then, usage + held(rest), at, samples, sample_ms)
        return sampled_rate.measure(after, at, samples, sample_ms)[0] <= limit

    assume(not passes(now))
    wait = sampled_rate.wait_ms(state, usage, now, limit, samples, sample_ms, holds)
    assert wait == next(d for d in range(1, 20_000) if passes(now + d))


@given(HOLDS, st.integers(1, 100), st.integers(-20, 100), st.sampled_from((12.5, 30, 100)))
def test_wait_for_tokens_is_the_least_at_which_they_suffice(holds: Any, cost: int, tokens: int, limit: float):
    burst, now = 100.0, 400
    state, holds = token_bucket.reckon(Tokens(float(tokens), 0), holds, now, limit, burst)
    assert state is not None

    def suffice(at: int) -> bool:
        then, rest = token_bucket.reckon(state, holds, at, limit, burst)
        return token_bucket.tokens_at(then, at, limit, burst - held(rest)) >= cost

    assume(not suffice(now))
    wait = token_bucket.wait_ms(state, cost, now, limit, burst, holds)
    assert wait == next(d for d in range(1, 20_000) if suffice(now + d))


@given(HOLDS, st.floats(0, 100))
def test_tokens_and_held_units_never_exceed_the_burst(holds: Any, tokens: float):
    burst = 200.0
    state, rest = Tokens(min(tokens, burst - held(holds)), 0), holds
    for at in range(0, 4_000, 250):
        state, rest = token_bucket.reckon(state, rest, at, 50.0, burst)  # type: ignore[assignment]
        level = token_bucket.tokens_at(state, at, 50.0, burst - held(rest))
        assert level + held(rest) <= burst + 1e-9


def test_holds_are_ordered_by_their_ends():
    one, two, three = Hold(b"1", 1, 10), Hold(b"2", 1, 20), Hold(b"3", 1, 10)
    assert with_hold(with_hold((two,), one), three) == (one, three, two)
