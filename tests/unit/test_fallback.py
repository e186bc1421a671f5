"""What an ask is told without the store: the one failure policy, in every mode."""

from __future__ import annotations

from typing import Any

import pytest

from app.admission.fallback import without_store
from app.admission.plan import Match
from app.domain.ask import Ask, Mode
from app.domain.ladder import Applied
from app.domain.quota import Quota


def match(key: str = "request_rate", limit: float = 5, **said: Any) -> Match:
    algorithm = said.pop("algorithm", "sampled_rate")
    quota = Quota(key, limit, algorithm, said.pop("enforcement", "delay"), **said)
    return Match(Applied(quota, "user=*", "user=a", "user=a"), b"key")


def told(mode: Mode, *matches: Match, usage: float = 1) -> tuple[str, int, str | None]:
    ask = Ask({"requests": usage}, (1,), "a", mode=mode)
    decision, verdicts = without_store(ask, matches)
    assert (decision.source, decision.charged, decision.applied) == ("fallback", False, len(matches))
    assert len(verdicts) == len(matches)
    by = decision.limited_by
    return decision.decision, decision.throttle_ms, by.reason if by else None


OPEN, SHUT, NONE = match(), match(on_store_failure="throttle"), match(limit=0)
IDS = match("producer_ids_rate", 0, algorithm="producer_ids", window_ms=60_000)


@pytest.mark.parametrize("mode", ["admit", "peek"])
def test_who_asks_first(mode: Mode):
    assert told(mode, OPEN) == ("admit", 0, None)
    assert told(mode, SHUT) == ("throttle", 1000, "store_failure")
    assert told(mode, OPEN, SHUT) == ("throttle", 1000, "store_failure")
    assert told(mode, NONE) == ("reject", 0, "too_large")
    assert told(mode, SHUT, NONE) == ("reject", 0, "too_large")
    assert told(mode, NONE, usage=0) == ("admit", 0, None)
    assert told(mode, IDS) == ("reject", 0, "too_large")


def test_work_that_is_done_is_delayed():
    assert told("record", OPEN) == ("admit", 0, None)
    assert told("record", SHUT) == ("delay", 1000, "store_failure")
    assert told("record", NONE) == ("delay", 1000, None)
    assert told("record", IDS) == ("delay", 60_000, None)


def test_a_refund_is_admitted():
    assert told("refund", SHUT, NONE) == ("admit", 0, None)


def test_a_shadow_quota_refuses_nobody():
    assert told("admit", match(on_store_failure="throttle", shadow=True), match(limit=0, shadow=True)) == (
        "admit",
        0,
        None,
    )
