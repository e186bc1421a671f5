"""Decisions on asks to produce at factor 0: verdicts that need no counter still count."""

from __future__ import annotations

import pytest

from app.admission.answers import suspend
from app.admission.factor import UNTHROTTLED, is_suspended
from app.domain.ask import Ask
from app.domain.quota import PRODUCER_BYTE_RATE, PRODUCER_IDS_RATE, REQUEST_RATE, Quota
from tests.unit.admission.fakes import charges_for

ASK = Ask({"produce_bytes": 10, "requests": 5}, (1, 2), principal="alice", detail=True)


def decided(*quotas: Quota, away: bool = False, wait_ms: int = 30_000):
    charges = charges_for(ASK, *quotas)
    decision, verdicts = suspend(ASK, charges, wait_ms, away=away)
    assert decision.quotas == verdicts
    assert (decision.applied, decision.charged) == (len(quotas), False)
    by = decision.limited_by
    return decision.decision, decision.throttle_ms, decision.source, by and (by.quota, by.reason)


def rate(limit: float, enforcement: str = "deny", **more: object) -> Quota:
    return Quota(REQUEST_RATE, limit, "sampled_rate", enforcement, **more)  # type: ignore[arg-type]


def test_held_ask_waits_for_the_factor_with_and_without_quotas():
    waits = ("throttle", 30_000, "local", ("throttle_factor", None))
    assert decided() == waits
    assert decided(rate(100), Quota(PRODUCER_BYTE_RATE, 5, "sampled_rate", "delay")) == waits


@pytest.mark.parametrize(
    ("quota", "largest"),
    [
        (rate(0.4), 4.0),
        (rate(0), 0.0),
        (Quota(REQUEST_RATE, 1, "token_bucket", "deny", burst=4), 4.0),
        (rate(0, "delay"), 0.0),
    ],
)
def test_usage_that_no_empty_bucket_could_hold_is_rejected(quota: Quota, largest: float):
    assert decided(quota) == ("reject", 0, "local", (REQUEST_RATE, "too_large"))
    charges = charges_for(ASK, quota)
    by = suspend(ASK, charges, 1_000, away=False)[0].limited_by
    assert by is not None
    assert by.largest == largest


def test_delay_and_id_quotas_never_reject_a_held_ask():
    waits = ("throttle", 30_000, "local", ("throttle_factor", None))
    assert decided(rate(0.4, "delay")) == waits
    assert decided(rate(0.5)) == waits  # exactly as much as it holds
    assert decided(Quota(PRODUCER_IDS_RATE, 0, "producer_ids", "deny")) == waits
    assert decided(rate(0, shadow=True)) == waits


def test_quota_that_throttles_as_long_goes_before_the_factor_without_the_store():
    strict = rate(100, on_store_failure="throttle")
    assert decided(strict, away=True, wait_ms=1_000) == (
        *("throttle", 1_000, "fallback"),
        (REQUEST_RATE, "store_failure"),
    )
    assert decided(strict, away=True) == ("throttle", 30_000, "local", ("throttle_factor", None))
    assert decided(rate(0), away=True) == ("reject", 0, "fallback", (REQUEST_RATE, "too_large"))


def test_only_produce_bytes_are_held_and_only_at_factor_0():
    assert is_suspended(ASK, 0)
    assert not is_suspended(ASK, 0.1)
    assert not is_suspended(Ask({"produce_bytes": 0, "requests": 1}), 0)
    assert not is_suspended(Ask({"fetch_bytes": 5}), 0)


def test_ask_of_1_is_rejected_if_no_empty_bucket_could_hold_it():
    one = Ask({"produce_bytes": 1, "requests": 1}, principal="alice")
    charges = charges_for(one, rate(0.05))
    decision, _ = suspend(one, charges, 1_000, away=False)
    assert decision.decision == "reject"
    assert decision.limited_by is not None
    assert decision.limited_by.largest == 0.5


def test_node_without_volumes_changes_no_limit_and_holds_nothing():
    assert UNTHROTTLED.on(ASK) == 1
    assert UNTHROTTLED.suspension_ms(None) == 0
