"""Decisions without the store, in every mode."""

from __future__ import annotations

from typing import Any

import pytest

from app.admission.fallback import without_store
from app.domain.ask import Ask, Mode
from app.domain.ladder import AppliedQuota
from app.domain.quota import Quota


def applied(key: str = "request_rate", limit: float = 5, **said: Any) -> AppliedQuota:
    algorithm = said.pop("algorithm", "sampled_rate")
    quota = Quota(key, limit, algorithm, said.pop("enforcement", "delay"), **said)
    return AppliedQuota(quota, "user=*", "user=a", "user=a")


def decided(mode: Mode, *quotas: AppliedQuota, usage: float = 1) -> tuple[str, int, str | None]:
    ask = Ask({"requests": usage}, (1,), "a", mode=mode)
    decision, verdicts = without_store(ask, quotas)
    assert (decision.source, decision.charged, decision.applied) == ("fallback", False, len(quotas))
    assert len(verdicts) == len(quotas)
    by = decision.limited_by
    return decision.decision, decision.throttle_ms, by.reason if by else None


OPEN, SHUT, NONE = applied(), applied(on_store_failure="throttle"), applied(limit=0)
IDS = applied("producer_ids_rate", 0, algorithm="producer_ids", window_ms=60_000)


@pytest.mark.parametrize("mode", ["admit", "peek"])
def test_asks_are_answered_by_the_policy_of_their_quotas(mode: Mode):
    assert decided(mode, OPEN) == ("admit", 0, None)
    assert decided(mode, SHUT) == ("throttle", 1000, "store_failure")
    assert decided(mode, OPEN, SHUT) == ("throttle", 1000, "store_failure")
    assert decided(mode, NONE) == ("reject", 0, "too_large")
    assert decided(mode, SHUT, NONE) == ("reject", 0, "too_large")
    assert decided(mode, NONE, usage=0) == ("admit", 0, None)
    assert decided(mode, IDS) == ("reject", 0, "too_large")


def test_record_is_delayed_but_never_refused():
    assert decided("record", OPEN) == ("admit", 0, None)
    assert decided("record", SHUT) == ("delay", 1000, "store_failure")
    assert decided("record", NONE) == ("delay", 1000, None)
    assert decided("record", IDS) == ("delay", 60_000, None)


def test_refund_is_admitted():
    assert decided("refund", SHUT, NONE) == ("admit", 0, None)


def test_shadow_quota_never_refuses():
    assert decided(
        "admit", applied(on_store_failure="throttle", shadow=True), applied(limit=0, shadow=True)
    ) == (
        "admit",
        0,
        None,
    )
