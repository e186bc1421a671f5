"""Decisions by the store's answers, by the ids that a node knows, and by policies, in every mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack, structs

from app.admission import answers
from app.admission.answers import (
    ADMITTED,
    ADMITTED_ALONE,
    MOST_CHARGES,
    by_policy_in,
    decided,
    verdicts_of,
    why_by_policy,
    without_call,
    without_store,
)
from app.admission.plan import Knowledge, PlannedAsk, named, plan_of
from app.domain.ask import MODES, Ask, Mode
from app.domain.decision import OUTCOMES, REASONS, Decision, LimitedBy, Outcome, Verdict, combine
from app.domain.quota import KEYS, Quota
from app.store.port import Answer, Charge, ChargeResult, StoreError
from tests.planted import planted
from tests.unit.admission.fakes import ADMITS, IDS, RATE, charge_to, charges_for, ids_result, result, sent

SECRET = b"s" * 32
TOKENS = Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=5)
BYTES = Quota("producer_byte_rate", 100, "sampled_rate", "delay")
ASK = Ask({"requests": 1, "mutations": 1}, (7, "x"), principal="alice")
KNOWN = Knowledge(3_000, 9_000, 4)


def planned_of(ask: Ask = ASK, *quotas: Quota, **more: Any) -> PlannedAsk:
    charges = charges_for(ask, *(quotas or (IDS, RATE, TOKENS)))
    return PlannedAsk(ask, charges, plan_of(ask, charges, SECRET), **more)


def answer_of(*results: ChargeResult, brief: bool = False, **more: Any) -> Answer:
    return structs.replace(sent(Answer(results, at_ms=4_000), brief=brief), **more)


def decision_on(planned: PlannedAsk, *results: ChargeResult, **more: Any) -> Decision:
    return decided(planned, answer_of(*results, **more), sequential=False)[0]


# By the store's answer


@pytest.mark.parametrize("brief", [False, True])
def test_admission_has_the_verdict_of_each_quota(brief: bool) -> None:
    planned = planned_of(replace(ASK, producer_ids=None))
    decision, verdicts = decided(planned, answer_of(ADMITS, ADMITS, brief=brief), sequential=False)
    assert decision == ADMITTED[2] == Decision("admit", 0, True, 2, "store", None)
    assert [each.outcome for each in verdicts] == ["admit", "admit"]


def test_admissions_are_those_that_their_verdicts_make() -> None:
    assert len(ADMITTED) == MOST_CHARGES + 1 == len(KEYS) + 3
    for applied, decision in enumerate(ADMITTED):
        source = "store" if applied else "local"
        assert decision == Decision("admit", 0, True, applied, source, None)  # type: ignore[arg-type]
    assert Decision("admit", 0, True, 1, "local", None) == ADMITTED_ALONE


def test_detail_has_the_verdict_of_each_quota() -> None:
    decision = decision_on(planned_of(replace(ASK, detail=True)), result(observed=3.0), ADMITS, ADMITS)
    assert decision.quotas is not None
    ids, *_ = decision.quotas
    assert (ids.quota, ids.entity, ids.bucket, ids.limit) == ("producer_ids_rate", "user=*", "user=alice", 5)
    assert (ids.enforcement, ids.shadow, ids.outcome, ids.throttle_ms) == ("deny", False, "admit", 0)
    assert (ids.observed, ids.remaining, ids.reason, ids.largest) == (3.0, 2.0, None, None)
    assert decision == replace(ADMITTED[3], quotas=decision.quotas)


@pytest.mark.parametrize(
    ("mode", "charged"), [("admit", True), ("peek", False), ("record", True), ("refund", True)]
)
def test_admission_is_charged_except_in_a_peek(mode: Mode, charged: bool) -> None:
    planned = planned_of(replace(ASK, mode=mode, producer_ids=None))
    decision, verdicts = decided(planned, answer_of(ADMITS, ADMITS), sequential=False)
    assert decision == replace(ADMITTED[2], charged=charged)
    assert len(verdicts) == 2


@pytest.mark.parametrize(("outcome", "charged"), [("delay", True), ("throttle", False), ("reject", False)])
def test_refused_ask_is_not_charged(outcome: Outcome, charged: bool) -> None:
    planned = planned_of()
    decision = decision_on(planned, ADMITS, result(outcome, throttle_ms=70), ADMITS)
    assert decision == Decision(
        outcome, 70, charged, 3, "store", LimitedBy("request_rate", "user=*", "user=alice")
    )


def test_quota_that_decided_says_how_much_an_empty_bucket_could_hold() -> None:
    decision = decision_on(planned_of(), ADMITS, ADMITS, result("reject", reason="too_large", largest=3.0))
    assert decision.limited_by is not None
    assert (decision.limited_by.reason, decision.limited_by.largest) == ("too_large", 3.0)


def test_result_of_ids_has_no_largest_usage() -> None:
    """For ids the script's number is the time until their layer closes, or the negative number of new ids."""
    for fields in ({"open_ms": 5_000}, {"unseen": 2}):
        planned = planned_of(replace(ASK, detail=True))
        decision = decision_on(planned, ids_result("throttle", throttle_ms=9, **fields), ADMITS, ADMITS)
        assert decision.limited_by == LimitedBy("producer_ids_rate", "user=*", "user=alice")


def test_numbers_that_are_not_known_are_none() -> None:
    unknown = result("delay", throttle_ms=9, observed=math.nan, remaining=math.nan)
    _, verdicts = decided(planned_of(), answer_of(ADMITS, unknown, ADMITS), sequential=False)
    assert [(each.observed, each.remaining) for each in verdicts] == [(1.0, 2.0), (None, None), (1.0, 2.0)]


def test_shadow_quota_does_not_decide_and_stands_in_the_verdicts() -> None:
    planned = planned_of(ASK, IDS, replace(RATE, shadow=True))
    decision, verdicts = decided(
        planned, answer_of(ADMITS, result("throttle", throttle_ms=9)), sequential=False
    )
    assert decision == ADMITTED[2]
    assert [each.outcome for each in verdicts] == ["admit", "throttle"]


def test_answer_of_which_nothing_stayed_charged_is_not_charged() -> None:
    planned = planned_of()
    decision, verdicts = decided(
        planned, answer_of(ADMITS, ADMITS, ADMITS, is_charged=False), sequential=False
    )
    assert decision == replace(ADMITTED[3], charged=False)
    assert len(verdicts) == 3


def test_ids_that_the_node_knows_stand_before_the_verdicts_of_the_store() -> None:
    planned = planned_of(replace(ASK, deny=True), known=KNOWN)
    assert decision_on(planned, ADMITS, ADMITS) == ADMITTED[3]
    decision, verdicts = decided(
        planned, answer_of(result("throttle", throttle_ms=9), ADMITS), sequential=False
    )
    assert [(each.quota, each.outcome, each.observed) for each in verdicts] == [
        ("producer_ids_rate", "admit", None),
        ("request_rate", "throttle", 1.0),
        ("controller_mutation_rate", "admit", 1.0),
    ]
    assert (decision.decision, decision.applied, decision.source) == ("throttle", 3, "store")


# Delays that add up


DELAYED = (
    planned_of(Ask({"requests": 1, "produce_bytes": 5}, principal="alice"), RATE, BYTES),
    (result("delay", throttle_ms=30), result("delay", throttle_ms=70)),
)


def kept_of(planned: PlannedAsk, mode: Mode, *results: ChargeResult, detail: bool = False) -> Answer:
    context = msgpack.encode((mode, detail, [named(charge) for charge in planned.charges]))
    return Answer(results, context, None, 4_000)


def delays_add_up(module: ModuleType | dict[str, Any]) -> bool:
    """Whether delays add up as KIP-124 says with `sequential`, and only then."""
    names = module if isinstance(module, dict) else vars(module)
    planned, results = DELAYED
    found = []
    for answer in (answer_of(*results), kept_of(planned, "admit", *results)):
        for sequential in (False, True):
            decision, _ = names["decided"](planned, answer, sequential=sequential)
            found.append((decision.throttle_ms, decision.limited_by.quota))
    return found == [(70, "producer_byte_rate"), (100, "producer_byte_rate")] * 2


def test_delays_add_up_if_they_are_sequential() -> None:
    assert delays_add_up(answers)


FAULTS = {
    "in a decision": (
        "detail=ask.detail, sequential=sequential, by_policy=",
        "detail=ask.detail, sequential=False, by_policy=",
    ),
    "in a kept answer": (
        "combined(mode, verdicts, detail=detail, sequential=sequential), verdicts",
        "combined(mode, verdicts, detail=detail, sequential=False), verdicts",
    ),
    "where verdicts are combined": ("combine(verdicts, sequential=sequential)", "combine(verdicts)"),
    "always": ("combine(verdicts, sequential=sequential)", "combine(verdicts, sequential=True)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_of_sequential_delays_is_found(fault: str) -> None:
    assert not delays_add_up(planted(answers, *FAULTS[fault]))


# Kept answers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("detail", [False, True])
def test_kept_answer_is_given_again_as_it_was(mode: Mode, detail: bool) -> None:
    """The quotas in force now and the mode and detail of the retry do not matter."""
    before = planned_of(replace(ASK, deny=True), IDS, RATE)
    answer = kept_of(before, mode, ADMITS, result("delay", throttle_ms=5), detail=detail)
    now = planned_of(replace(ASK, mode="record", detail=not detail), TOKENS)
    decision, verdicts = decided(now, answer, sequential=False)
    assert decision == Decision(
        "delay",
        5,
        mode != "peek",
        2,
        "store",
        LimitedBy("request_rate", "user=*", "user=alice"),
        tuple(verdicts) if detail else None,
    )
    assert [(each.quota, each.outcome) for each in verdicts] == [
        ("producer_ids_rate", "admit"),
        ("request_rate", "delay"),
    ]


# By policies


def test_quotas_that_the_full_store_judged_keep_their_verdicts() -> None:
    answer = answer_of(result(reason="store_full"), ADMITS, result("reject", reason="too_large"))
    decision, verdicts = decided(planned_of(), answer, sequential=False)
    assert [(verdict.outcome, verdict.reason) for verdict in verdicts] == [
        ("admit", "store_full"),
        ("admit", None),
        ("reject", "too_large"),
    ]
    assert (decision.decision, decision.source) == ("reject", "fallback")


def test_full_store_leaves_the_verdict_to_the_policy_of_the_quota() -> None:
    closed = replace(RATE, on_store_failure="throttle")
    planned = planned_of(replace(ASK, producer_ids=None), closed, TOKENS)
    decision = decision_on(planned, result(reason="store_full"), ADMITS)
    assert decision == Decision(
        *("throttle", 1_000, False, 2, "fallback"),
        LimitedBy("request_rate", "user=*", "user=alice", "store_full"),
    )


@pytest.mark.parametrize("reason", ["store_full", "store_failure"])
def test_ask_is_charged_unless_policies_gave_all_verdicts(reason: Any) -> None:
    planned = planned_of(replace(ASK, producer_ids=None))
    missing = result(reason=reason)
    for results, charged in (((missing, ADMITS), True), ((missing, missing), False)):
        answer = answer_of(*results)
        assert by_policy_in(answer) == results.count(missing)
        decision, _ = decided(planned, answer, sequential=False)
        assert decision == Decision("admit", 0, charged, 2, "fallback", None)


def test_reason_of_a_policy_is_that_of_the_failure_or_a_full_store() -> None:
    assert why_by_policy(answer_of(result(reason="store_full"))) == "store_full"
    assert why_by_policy(answer_of(failure=StoreError("timeout"))) == "timeout"


results_ = st.builds(
    ChargeResult,
    st.sampled_from(OUTCOMES),
    st.sampled_from(REASONS),
    st.integers(0, 2),
    st.integers(0, 5_000),
    *[st.floats(-1e6, 1e6, allow_nan=False)] * 3,
)
asks = st.builds(
    Ask,
    usage=st.just(ASK.usage),
    producer_ids=st.just(ASK.producer_ids),
    principal=st.just("alice"),
    mode=st.sampled_from(MODES),
    deny=st.booleans(),
    detail=st.booleans(),
)


@given(asks, st.lists(results_, min_size=3, max_size=3), st.booleans(), st.booleans())
def test_any_answer_makes_the_decision_of_its_verdicts(
    ask: Ask, results: Sequence[ChargeResult], is_known: bool, sequential: bool
) -> None:
    planned = planned_of(ask, known=KNOWN if is_known else None)
    answer = answer_of(*results[is_known:])
    decision, verdicts = decided(planned, answer, sequential=sequential)
    readable = verdicts_of(planned, answer)
    assert verdicts in ((), readable)
    outcome, throttle_ms, by = combine(readable, sequential=sequential)
    assert (decision.decision, decision.throttle_ms, decision.limited_by) == (outcome, throttle_ms, by)
    assert decision.applied == len(planned.charges) == len(readable)
    assert decision.quotas == (readable if ask.detail else None)
    for charge, verdict in zip(planned.charges, readable, strict=True):
        assert (verdict.quota, verdict.bucket, verdict.enforcement) == (
            *(charge.quota.key, charge.bucket),
            charge.enforcement,
        )


# Without a call


def test_decision_without_a_call_is_one_object_for_most_asks() -> None:
    nothing, alone = PlannedAsk(ASK, (), None), PlannedAsk(ASK, charges_for(ASK, IDS), None, known=KNOWN)
    assert without_call(nothing, sequential=False) == (ADMITTED[0], ())
    assert without_call(nothing, sequential=False)[0] is ADMITTED[0]
    assert without_call(alone, sequential=False)[0] is ADMITTED_ALONE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("detail", [False, True])
def test_decision_without_a_call_is_an_admission_of_the_node(mode: Mode, detail: bool) -> None:
    ask = replace(ASK, mode=mode, detail=detail)
    decision, verdicts = without_call(PlannedAsk(ask, (), None), sequential=False)
    assert verdicts == ()
    assert decision == Decision("admit", 0, mode != "peek", 0, "local", None, () if detail else None)
    decision, verdicts = without_call(
        PlannedAsk(ask, charges_for(ask, IDS), None, known=KNOWN), sequential=False
    )
    alone = Verdict("producer_ids_rate", "user=*", "user=alice", 5, "deny", False, "admit", 0)
    assert verdicts == (() if mode == "admit" and not detail else (alone,))
    assert decision == Decision("admit", 0, mode != "peek", 1, "local", None, (alone,) if detail else None)


# Without the store


def applied(key: str = "request_rate", limit: float = 5, **said: Any) -> Charge:
    algorithm = said.pop("algorithm", "sampled_rate")
    return charge_to("user=a", Quota(key, limit, algorithm, said.pop("enforcement", "delay"), **said))


def by_policy(mode: Mode, *charges: Charge, usage: float = 1) -> tuple[str, int, str | None]:
    ask = Ask({"requests": usage}, (1,), "a", mode=mode)
    decision, verdicts = without_store(ask, charges)
    assert (decision.source, decision.charged, decision.applied) == ("fallback", False, len(charges))
    assert len(verdicts) == len(charges)
    by = decision.limited_by
    return decision.decision, decision.throttle_ms, by.reason if by else None


OPEN, SHUT, NONE = applied(), applied(on_store_failure="throttle"), applied(limit=0)
NO_IDS = applied("producer_ids_rate", 0, algorithm="producer_ids", window_ms=60_000)


@pytest.mark.parametrize("mode", ["admit", "peek"])
def test_asks_are_answered_by_the_policy_of_their_quotas(mode: Mode) -> None:
    assert by_policy(mode, OPEN) == ("admit", 0, None)
    assert by_policy(mode, SHUT) == ("throttle", 1000, "store_failure")
    assert by_policy(mode, OPEN, SHUT) == ("throttle", 1000, "store_failure")
    assert by_policy(mode, NONE) == ("reject", 0, "too_large")
    assert by_policy(mode, SHUT, NONE) == ("reject", 0, "too_large")
    assert by_policy(mode, NONE, usage=0) == ("admit", 0, None)
    assert by_policy(mode, NO_IDS) == ("reject", 0, "too_large")


def test_record_is_delayed_but_never_refused() -> None:
    assert by_policy("record", OPEN) == ("admit", 0, None)
    assert by_policy("record", SHUT) == ("delay", 1000, "store_failure")
    assert by_policy("record", NONE) == ("delay", 1000, None)
    assert by_policy("record", NO_IDS) == ("delay", 60_000, None)


def test_refund_is_admitted() -> None:
    assert by_policy("refund", SHUT, NONE) == ("admit", 0, None)


def test_shadow_quota_never_refuses() -> None:
    shadows = applied(on_store_failure="throttle", shadow=True), applied(limit=0, shadow=True)
    assert by_policy("admit", *shadows) == ("admit", 0, None)


def test_ids_that_the_node_knows_pass_without_the_store() -> None:
    none = replace(IDS, limit=0, on_store_failure="throttle")
    charges = charges_for(ASK, none, RATE)
    decision, verdicts = without_store(replace(ASK, detail=True), charges, 1)
    assert (decision.decision, decision.quotas) == ("admit", verdicts)
    assert without_store(ASK, charges)[0].decision == "reject"
