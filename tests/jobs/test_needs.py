"""The limit that an ask needed is the least one under which nothing is held up until then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.quota import Enforcement, Quota
from workers.jobs.needs import TokenDemand
from workers.jobs.whatif.buckets import Level, Rate
from workers.jobs.whatif.quota_form import QuotaForm

CHARGES = st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 20)), min_size=1, max_size=30)
SPAN_S = 11.0


@given(CHARGES)
def test_a_token_bucket_with_the_default_burst(charges: list[tuple[int, int]]) -> None:
    tokens, at_ms, most = TokenDemand(SPAN_S, 0.0), 1_000, 0.0
    for apart_ms, usage in charges:
        at_ms += apart_ms
        most = max(most, tokens.need(usage, at_ms))
    assert _is_admitted(charges, most * (1 + 1e-9) + 1e-9, burst=None)
    if most > 1e-3:
        assert not _is_admitted(charges, most * 0.999, burst=None)


@given(CHARGES)
def test_a_token_bucket_with_a_burst_of_its_own(charges: list[tuple[int, int]]) -> None:
    tokens, at_ms, most = TokenDemand(0.0, 20.0), 1_000, 0.0
    for apart_ms, usage in charges:
        at_ms += apart_ms
        most = max(most, tokens.need(usage, at_ms))
    if most < 1e6:  # else two charges came at once
        assert _is_admitted(charges, most * (1 + 1e-9) + 1e-9, burst=20.0)
    if most > 1e-3:
        assert not _is_admitted(charges, min(most, 1e9) * 0.999, burst=20.0)


def _is_admitted(charges: list[tuple[int, int]], limit: float, burst: float | None) -> bool:
    """Whether a token bucket of this limit admits all."""
    burst = SPAN_S * limit if burst is None else burst
    form = QuotaForm(Quota("controller_mutation_rate", limit, "token_bucket", "deny", burst=burst), "deny")
    bucket, at_ms = Level(), 1_000
    for apart_ms, usage in charges:
        at_ms += apart_ms
        if bucket.ask(form, usage, at_ms):
            return False
        bucket.charge(form, usage, at_ms)
    return True


@pytest.mark.parametrize("enforcement", ["deny", "delay"])
@given(charges=CHARGES)
def test_a_rate(enforcement: Enforcement, charges: list[tuple[int, int]]) -> None:
    free = Quota("producer_byte_rate", 1e18, "sampled_rate", enforcement, samples=3)
    form, bucket, at_ms = QuotaForm(free, enforcement), Rate(), 1_000
    for apart_ms, usage in charges:
        at_ms += apart_ms
        before = bucket.state()
        bucket.charge(form, usage, at_ms)
        need = bucket.shown(form, at_ms)
        if enforcement == "deny":
            need = max(need, usage / (form.full_ms / 1000)) if usage else 0.0
        for limit, holds in ((need * (1 + 1e-9), False), (need * 0.99, need > 0)):
            other = Rate()
            other.take(before)
            tight = QuotaForm(replace(free, limit=limit), enforcement)
            assert (other.ask(tight, usage, at_ms) != 0) is holds
