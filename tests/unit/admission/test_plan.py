"""Plans for the store and decisions from its answers: which charge has ids, and what a full store decides."""

from __future__ import annotations

import pytest

from app.admission.plan import Match, decision_of, plan_of
from app.domain.ask import Ask
from app.domain.decision import Outcome, Reason
from app.domain.quota import Quota
from app.store.port import Answer, ChargeResult
from tests.unit.admission.fakes import IDS, RATE, matches_for

SECRET = b"s" * 32
TOKENS = Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=5)
ASK = Ask({"requests": 1, "mutations": 1}, (7, "x"), principal="alice")


def matches(ask: Ask = ASK) -> tuple[Match, ...]:
    return matches_for(ask, IDS, RATE, TOKENS)


def result(outcome: Outcome, throttle_ms: int = 0, reason: Reason | None = None) -> ChargeResult:
    return ChargeResult(outcome, throttle_ms, reason, 0, 1.0, 2.0, None, 0, 0.0)


def test_only_quotas_that_count_ids_are_charged_for_them():
    plan = plan_of(ASK, matches(), SECRET)
    assert plan is not None
    ids = {charge.applied.quota.key: len(charge.spreads) // 32 for charge in plan.charges}
    assert ids == {"producer_ids_rate": 2, "request_rate": 0, "controller_mutation_rate": 0}
    assert plan.ids == 2


@pytest.mark.parametrize(("outcome", "charged"), [("admit", True), ("throttle", False), ("reject", False)])
def test_refused_ask_is_not_charged(outcome: Outcome, charged: bool):
    ask = Ask({"requests": 1}, principal="alice")
    plan = plan_of(ask, matches(ask), SECRET)
    decision, _ = decision_of(ask, plan, Answer((result(outcome),)), sequential=False)
    assert (decision.decision, decision.charged) == (outcome, charged)


def test_quotas_that_the_full_store_judged_keep_their_verdicts():
    plan = plan_of(ASK, matches(), SECRET)
    said = (result("admit", reason="store_full"), result("admit"), result("reject", reason="too_large"))
    decision, verdicts = decision_of(ASK, plan, Answer(said), sequential=False)
    assert [(verdict.outcome, verdict.reason) for verdict in verdicts] == [
        ("admit", "store_full"),
        ("admit", None),
        ("reject", "too_large"),
    ]
    assert (decision.decision, decision.source) == ("reject", "fallback")
