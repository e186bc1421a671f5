"""The tries of an ask in its answer, if the order of a batch has the ask decided once more."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from app.admission.cluster.gatherer import AskInProgress
from app.admission.cluster.several_slots import Phase
from app.domain.quota import Quota
from app.store.port import Answer, Plan, StoreError, Undone, UnitsResult
from tests.unit.admission.fakes import charge_to, result, sent

SLOT = 7
KEY = b"qg1:{u}:b"
REFUSED = structs.replace(UnitsResult("admit"), outcome="throttle", throttle_ms=9)


def plan_of(**more: Any) -> Plan:
    quota = Quota("request_rate", 1, "token_bucket", "deny", **more)
    return Plan("admit", (charge_to("user=u", quota, key=KEY),))


def tried(running: AskInProgress, answer: Answer) -> AskInProgress:
    running.begin(Phase.PEEK)
    running.receive([answer])
    return running


def answer_of(running: AskInProgress) -> Answer:
    assert running.answer is not None
    return running.answer


def undone(order: int) -> Undone:
    return Undone(KEY, order, 1_000, 1.0)


def test_answer_keeps_what_each_try_found_and_all_that_was_undone() -> None:
    first = tried(AskInProgress(0, plan_of(), [SLOT]), Answer((REFUSED,), order=1, undone=(undone(1),)))
    second = tried(first.again(), Answer((REFUSED,), order=2, undone=(undone(2),)))
    third = tried(second.again(), Answer((UnitsResult("admit"),), order=3))
    answer = answer_of(third)
    assert [each.order for each in answer.tries] == [3, 2, 1]
    assert answer.undone == (undone(1), undone(2))
    assert third.undone == (), "what others must be decided again for is of this try"
    assert (first.is_refused, second.is_refused, third.is_refused) == (True, True, False)


def test_try_that_finds_the_answer_of_a_twin_keeps_what_it_wrote_itself() -> None:
    first = tried(AskInProgress(0, plan_of(), [SLOT]), Answer((REFUSED,), order=1))
    written = Answer((UnitsResult("admit"),), order=2)
    second = tried(first.again(), Answer((UnitsResult("admit"),), kept=b"it", order=3, earlier=written))
    assert [each.order for each in answer_of(second).tries] == [3, 2, 1]


def test_answer_in_brief_keeps_what_an_earlier_try_found() -> None:
    """Such as a corrected clock, which is counted and logged."""
    first = tried(AskInProgress(0, plan_of(), [SLOT]), sent(Answer((result(correction=1),))))
    answer = answer_of(tried(first.again(), sent(Answer((result(),)), brief=True)))
    assert answer.admits
    assert [each.results[0].correction for each in answer.tries] == [0, 1]


def test_try_that_ends_with_an_error_leaves_the_answer_before_it() -> None:
    first = tried(AskInProgress(0, plan_of(), [SLOT]), Answer((REFUSED,), order=1))
    second = tried(first.again(), Answer((), error=StoreError("response", "wrong type")))
    assert answer_of(second) == answer_of(first)


@pytest.mark.parametrize(
    ("plan", "outcome"),
    [
        (plan_of(shadow=True), "throttle"),
        (structs.replace(plan_of(), mode="settle"), "reject"),
        (structs.replace(plan_of(), mode="refund"), "reject"),
    ],
    ids=["a quota in shadow mode", "a lease that is over", "a refund"],
)
def test_these_are_no_refusals(plan: Plan, outcome: Any) -> None:
    result = structs.replace(UnitsResult("admit"), outcome=outcome)
    assert tried(AskInProgress(0, plan, [SLOT]), Answer((result,))).is_refused is False
