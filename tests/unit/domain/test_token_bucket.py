"""The token bucket: refill, least waits, debts, refunds."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from app.domain import token_bucket
from app.domain.quota import MAX_THROTTLE_MS
from app.domain.token_bucket import Tokens

LIMITS = st.one_of(st.integers(1, 1_000), st.sampled_from((0.7, 3.3, 1 / 3, 12.5)))
PARTS = st.floats(0, 1)


@given(LIMITS, st.integers(1, 5_000), PARTS, PARTS, st.integers(0, 3_000))
def test_deny_wait_is_the_least_that_passes(
    limit: float, refill_ms: int, held: float, wanted: float, since: int
):
    burst = limit * refill_ms / 1000
    state, cost, now = Tokens((2 * held - 1) * burst, 1_000), wanted * burst, 1_000 + since
    assume(cost > 0)
    wait = token_bucket.wait_ms(state, cost, now, limit, burst)
    least = next(d for d in range(1, 20_000) if token_bucket.tokens_at(state, now + d, limit, burst) >= cost)
    assert wait == least


def test_wait_is_at_most_the_longest_throttle():
    assert token_bucket.wait_ms(Tokens(0.0, 0), 1, 0, 1e-9, 1) == MAX_THROTTLE_MS


@given(st.floats(-1e9, 1e3), st.floats(1e-3, 1e9), st.integers(1, MAX_THROTTLE_MS))
def test_delay_is_the_time_to_refill_a_debt_rounded_half_up(tokens: float, limit: float, longest: int):
    delay = token_bucket.delay_ms(tokens, limit, longest)
    if tokens >= 0:
        assert delay == 0
        return
    assert 1 <= delay <= longest
    exact = -tokens / limit * 1000
    assert delay == (max(1, math.floor(exact + 0.5)) if exact < longest else longest)


def test_delay_rounds_halves_up():
    assert [token_bucket.delay_ms(-debt, 1000) for debt in (0.1, 0.5, 1.5, 2.49, 2.5)] == [1, 1, 2, 2, 3]


@given(st.floats(-1e3, 1e3), st.floats(0, 1e6), st.floats(1, 1e3), st.integers(0, 100_000))
def test_refund_fills_up_to_the_burst_and_keeps_the_time(tokens: float, cost: float, burst: float, at: int):
    before = Tokens(min(tokens, burst), at)
    after = token_bucket.refund(before, cost, burst)
    assert after is not None
    assert before.tokens <= after.tokens <= burst
    assert after.at_ms == at
    assert token_bucket.refund(None, cost, burst) is None, "an absent bucket is full"


@given(LIMITS, st.integers(0, 10_000), st.floats(0, 100), st.integers(0, 10_000))
def test_tokens_never_exceed_the_burst_and_never_fall(limit: float, at: int, burst: float, later: int):
    state = Tokens(-burst, at)
    assert state.tokens <= token_bucket.tokens_at(state, at + later, limit, burst) <= burst
    assert token_bucket.tokens_at(None, at, limit, burst) == burst, "an absent bucket is full"
