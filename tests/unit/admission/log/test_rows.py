"""Rows of the decision log: the writer's rows equal the asks, the answers and the decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import msgpack, structs

from app.admission.answers import decided, suspend, verdicts_of, without_call, without_store
from app.admission.atomic_asks import AtomicAsks
from app.admission.compiled import MANNERS, compiled_again, manner_of
from app.admission.log.rows import ChangeEntry, DecisionEntry, IdsEntry, LogPage
from app.admission.plan import Knowledge, PlannedAsk, plan_of, scaled, with_spreads
from app.decision_log.batch import CHARGED, REFRESHED, SEEN, VERSION, Batch, LoggedLimit, Row
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.digest import digest, fingerprint
from app.domain.quota import Quota
from app.domain.usage import ids_of, usage_of
from app.store.port import Answer, ChargeResult, Released, StoreError, Undone
from tests.unit.admission.fakes import ADMITS, IDS, RATE, charges_for, ids_result, result, sent
from workers.decision_log.rows import decode, table

SECRET = b"s" * 32
BYTES = Quota("producer_byte_rate", 100, "sampled_rate", "delay", on_store_failure="throttle")
TOKENS = Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=5)
ALL = (IDS, RATE, BYTES, TOKENS)
ASK = Ask(
    {"requests": 1, "produce_bytes": 20.5, "mutations": 2},
    (7, -1, "x"),
    principal="alice",
    client_id="etl",
    ip="10.0.0.7",
    broker="1",
    listener="EXTERNAL",
)
UNITS = replace(ASK, producer_ids=None)
KNOWN = Knowledge(3_000, 9_000, 4)


def planned_of(ask: Ask, *quotas: Quota, **more: Any) -> PlannedAsk:
    """An ask that is planned for these quotas."""
    charges = charges_for(ask, *(quotas or ALL))
    alone = 1 if more.get("known") else 0
    plan = plan_of(ask, with_spreads(ask, charges[alone:], SECRET), SECRET)
    return PlannedAsk(ask, charges, plan, **more)


def page(*entries: Any, plain_ids: bool = False) -> LogPage:
    made = LogPage(SECRET, plain_ids=plain_ids)
    for entry in entries:
        made.add(entry)
    return made


def batch_of(*entries: Any, plain_ids: bool = False) -> Batch:
    """The batch that the writer decodes from these entries."""
    return decode(page(*entries, plain_ids=plain_ids).batch("n", 7, 5_000))


def answer_of(*results: ChargeResult, brief: bool = False, **more: Any) -> Answer:
    """An answer with these results as the script sends it."""
    return structs.replace(sent(Answer(results, None, None, 4_000, 1_280), brief=brief), **more)


def differing(results: dict[int, ChargeResult], of: int = 4) -> tuple[ChargeResult, ...]:
    """Results that all admit, except for these, by their places."""
    return tuple(results.get(at, result(observed=at, remaining=at + 0.5)) for at in range(of))


def logged(
    planned: PlannedAsk, answer: Answer | None, *, sequential: bool = False, failure: str | None = None
) -> tuple[Batch, Row, Decision]:
    """A decision made as by ``Admission``, with the batch and the row that the writer decodes from it."""
    verdicts: Sequence[Verdict]
    if planned.is_suspended and (answer is None or answer.kept is None):
        decision, verdicts = suspend(planned.ask, planned.charges, 700, away=False)
    elif answer is not None:
        decision, verdicts = decided(planned, answer, sequential=sequential)
    elif failure is not None:
        decision, verdicts = without_store(planned.ask, planned.charges, planned.alone)
    else:
        decision, verdicts = without_call(planned, sequential=sequential)
    done = structs.replace(planned, decision=decision)
    batch = batch_of(DecisionEntry("decision", 4_000, done, answer, verdicts, failure))
    (row,) = batch.rows
    return batch, row, decision


def shown(batch: Batch, row: Row) -> list[tuple[object, ...]]:
    """The verdicts of a row with the names of their quotas."""
    return [
        (
            batch.quotas[each.quota].quota,
            batch.quotas[each.quota].entity,
            batch.quotas[each.quota].bucket,
            batch.quotas[each.quota].limit,
            each.enforcement,
            batch.quotas[each.quota].shadow,
            each.outcome,
            each.throttle_ms,
            each.observed,
            each.remaining,
            each.reason,
        )
        for each in row.verdicts
    ]


def said(verdicts: Sequence[Verdict]) -> list[tuple[object, ...]]:
    """The verdicts of a decision, in the same form."""
    return [
        (
            *(each.quota, each.entity, each.bucket, each.limit, each.enforcement, each.shadow),
            *(each.outcome, each.throttle_ms, each.observed, each.remaining, each.reason),
        )
        for each in verdicts
    ]


THROTTLED = ids_result("throttle", throttle_ms=900, unseen=1, remembered=7, fill=0.25, layers=3)
ANSWERS = {
    "admitted": (ASK, answer_of(*differing({0: ids_result(open_ms=500, remembered=9, fill=0.5, layers=2)}))),
    "admitted briefly": (UNITS, answer_of(*differing({}, 3), brief=True)),
    "delayed": (ASK, answer_of(*differing({1: result("delay", throttle_ms=70)}))),
    "throttled by ids": (ASK, answer_of(*differing({0: THROTTLED}))),
    "throttled by a rate": (UNITS, answer_of(*differing({0: result("throttle", throttle_ms=9)}, 3))),
    "rejected": (ASK, answer_of(*differing({3: result("reject", reason="too_large", largest=3.0)}))),
    "no capacity": (ASK, answer_of(*differing({0: result("throttle", throttle_ms=5, reason="capacity")}))),
    "no room": (ASK, answer_of(*differing({2: result(reason="store_full")}))),
    "clock behind": (ASK, answer_of(*differing({1: result(correction=1), 2: result(correction=2)}))),
    "debt forgiven": (ASK, answer_of(*differing({3: result(forgiven=2.5)}))),
    "ids charged": (ASK, answer_of(*differing({}), id_outcomes=bytes([CHARGED, REFRESHED]))),
    "peeked": (replace(ASK, mode="peek"), answer_of(*differing({1: result("throttle", throttle_ms=8)}))),
    "recorded": (replace(ASK, mode="record"), answer_of(*differing({1: result("delay", throttle_ms=8)}))),
    "refunded": (replace(UNITS, mode="refund"), answer_of(*differing({}, 3), brief=True)),
    "under deny": (replace(ASK, deny=True), answer_of(*differing({2: result("throttle", throttle_ms=8)}))),
    "with detail": (replace(ASK, detail=True), answer_of(*differing({}))),
    "put together": (ASK, Answer(differing({}), at_ms=4_000, order=1_280)),
    "of lost slots": (
        ASK,
        Answer(
            differing({2: result(reason="store_failure")}),
            at_ms=4_000,
            order=1_280,
            failure=StoreError("timeout"),
            orders=(1_280, 1_300, None, 1_290),
        ),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_row_is_what_was_asked_and_what_was_answered(name: str) -> None:
    ask, answer = ANSWERS[name]
    planned = planned_of(ask)
    batch, row, decision = logged(planned, answer, failure="timeout" if answer.failure else None)
    assert (row.kind, row.at_ms, row.order) == ("decision", 4_000, 1_280)
    assert (row.principal, row.client_id, row.ip) == ("alice", "etl", "10.0.0.7")
    assert (row.broker, row.listener, row.mode) == ("1", "EXTERNAL", ask.mode)
    assert (row.deny, row.recheck, row.cluster_action) == (ask.deny, False, False)
    assert row.usage == ask.usage
    assert row.ids == b"".join(digest(SECRET, "alice", each) for each in ids_of(ask))
    assert (row.decision, row.throttle_ms, row.charged, row.applied, row.source) == (
        *(decision.decision, decision.throttle_ms, decision.charged),
        *(decision.applied, decision.source),
    )
    by = decision.limited_by
    assert row.limited_by == (None if by is None else LoggedLimit(by.quota, by.entity, by.bucket, by.reason))
    assert row.failure == ("timeout" if answer.failure else None)
    assert (row.replayed, row.what, row.after) == (False, None, None)
    assert shown(batch, row) == said(verdicts_of(planned, answer))
    assert [each.usage for each in row.verdicts] == [usage_of(ask, each.quota) for each in planned.charges]
    assert [each.correction for each in row.verdicts] == [each.correction for each in answer.results]
    ids = answer.id_outcomes if ask.producer_ids else b""
    assert [each.ids for each in row.verdicts] == [
        ids if each.compiled.counts_ids else b"" for each in planned.charges
    ]
    assert [each.bucket_order for each in row.verdicts] == [*answer.orders] or not answer.orders
    assert len(table([batch])) == 1, "it is a row of a file"


def test_bits_of_an_ask_are_told_apart() -> None:
    bits: tuple[dict[str, Any], ...] = ({"deny": True}, {"recheck": True}, {"cluster_action": True})
    for bit in bits:
        ask = replace(UNITS, **bit)
        _, row, _ = logged(planned_of(ask), answer_of(*differing({}, 3 - ask.cluster_action)))
        found = (row.deny, row.recheck, row.cluster_action, row.charged, row.replayed)
        assert found == (ask.deny, ask.recheck, ask.cluster_action, True, False)


def test_limits_are_those_in_force_after_the_throttle_factor() -> None:
    planned = planned_of(UNITS, BYTES)
    planned.charges = scaled(UNITS, planned.charges, 0.5)
    batch, row, _ = logged(planned, answer_of(ADMITS))
    assert batch.quotas[row.verdicts[0].quota].limit == 50


# Known ids, and decisions without the store


def test_row_says_what_the_node_answered_for_alone_and_by_what() -> None:
    batch, row, decision = logged(planned_of(ASK, known=KNOWN), answer_of(*differing({}, 3), brief=True))
    ids, *others = row.verdicts
    assert (ids.outcome, ids.usage, ids.observed, ids.remaining, ids.ids) == ("admit", 2, None, None, b"")
    assert (ids.known_until_ms, ids.known_resets) == (9_000, 4)
    assert {(each.known_until_ms, each.known_resets) for each in others} == {(None, None)}
    assert [each.observed for each in others] == [0, 1, 2]
    assert (row.order, row.source, decision.applied) == (1_280, "store", 4)
    assert [batch.quotas[each.quota].quota for each in row.verdicts] == [each.key for each in ALL]


def test_refusal_beside_known_ids_has_the_same_columns() -> None:
    answer = answer_of(*differing({1: result("throttle", throttle_ms=50)}, 3))
    _, row, _ = logged(planned_of(replace(ASK, deny=True), known=KNOWN), answer)
    assert [(each.outcome, each.known_until_ms) for each in row.verdicts] == [
        *(("admit", 9_000), ("admit", None), ("throttle", None), ("admit", None))
    ]


def test_known_ids_that_nothing_else_limits_need_no_store_and_have_no_order() -> None:
    ask = Ask({}, (7,), principal="alice")
    planned = PlannedAsk(ask, charges_for(ask, IDS), None, known=KNOWN)
    _, row, _ = logged(planned, None)
    (ids,) = row.verdicts
    assert (row.source, row.decision, row.charged, row.applied, row.order) == (
        *("local", "admit", True, 1, None),
    )
    assert (ids.outcome, ids.known_until_ms, ids.known_resets) == ("admit", 9_000, 4)


def test_known_ids_count_beside_policies() -> None:
    _, row, _ = logged(planned_of(ASK, known=KNOWN), None, failure="timeout")
    assert [(each.outcome, each.reason, each.known_until_ms) for each in row.verdicts] == [
        ("admit", None, 9_000),
        ("admit", None, None),
        ("throttle", "store_failure", None),
        ("admit", None, None),
    ]
    answer = Answer(
        differing({1: result(reason="store_failure")}, 3),
        at_ms=4_000,
        order=9,
        orders=(9, None, 8),
        failure=StoreError("timeout"),
    )
    _, row, _ = logged(planned_of(ASK, known=KNOWN), answer)
    assert [each.bucket_order for each in row.verdicts] == [None, 9, None, 8]
    assert [each.outcome for each in row.verdicts] == ["admit", "admit", "throttle", "admit"]


def test_decision_without_the_store_has_the_verdicts_of_policies_and_no_order() -> None:
    planned = planned_of(ASK)
    batch, row, _ = logged(planned, None, failure="budget")
    assert (row.source, row.order, row.failure, row.charged) == ("fallback", None, "budget", False)
    assert shown(batch, row) == said(without_store(ASK, planned.charges)[1])
    assert {each.observed for each in row.verdicts} == {None}


def test_ask_that_no_quota_limits_has_no_verdicts() -> None:
    ask = Ask({"requests": 1}, principal="alice")
    _, row, _ = logged(PlannedAsk(ask, (), None), None)
    assert (row.decision, row.source, row.applied, row.verdicts) == ("admit", "local", 0, [])


@pytest.mark.parametrize("answer", [None, answer_of()])
def test_held_ask_has_the_verdicts_that_need_no_counter(answer: Answer | None) -> None:
    """With an answer, the ask has an ``id``: the store was asked for a kept answer, and had none."""
    planned = PlannedAsk(ASK, charges_for(ASK, *ALL), None, True)
    batch, row, _ = logged(planned, answer)
    assert (row.decision, row.source) == ("throttle", "local")
    assert row.limited_by == LoggedLimit("throttle_factor", None, None, None)
    assert shown(batch, row) == said(suspend(ASK, planned.charges, 700, away=False)[1])
    assert row.order == (None if answer is None else 1_280)


def test_kept_answer_is_no_new_decision() -> None:
    for is_suspended in (False, True):
        planned = planned_of(ASK)
        assert planned.plan is not None
        context = msgpack.encode(("admit", False, [("q", "e", "b", 5.0, "deny", False)]))
        answer = Answer((result("delay", throttle_ms=30),), context, None, 4_000, 1_280)
        _, row, _ = logged(structs.replace(planned, is_suspended=is_suspended), answer)
        assert (row.replayed, row.verdicts, row.decision, row.throttle_ms) == (True, [], "delay", 30)
        assert (row.at_ms, row.order) == (4_000, 1_280)


# Clusters, leases and atomic asks


def test_clock_that_any_try_corrected_counts() -> None:
    earlier = answer_of(result(correction=2), ADMITS, ADMITS)
    kept = Answer((), b"context", earlier=earlier)
    answer = answer_of(*differing({}, 3), brief=True, earlier=kept)
    _, row, _ = logged(planned_of(UNITS), answer)
    assert [each.correction for each in row.verdicts] == [2, 0, 0]


def test_charge_that_was_taken_back_has_no_place_in_the_row() -> None:
    planned = planned_of(UNITS)
    key = planned.charges[1].key
    answer = Answer(
        differing({2: result("throttle", throttle_ms=9)}, 3),
        at_ms=4_000,
        order=512,
        orders=(384, 512, 400),
        undone=(Undone(key, 512, 3_900, 20.5),),
    )
    _, row, _ = logged(planned, answer)
    assert (row.order, [each.bucket_order for each in row.verdicts]) == (400, [384, None, 400])
    released = structs.replace(answer, undone=(), released=(Released(key, 7.0, 512, 3_900),))
    _, row, _ = logged(planned, released)
    assert (row.order, [each.bucket_order for each in row.verdicts]) == (400, [384, None, 400])


def test_lease_has_its_name_and_how_long_it_lasts() -> None:
    planned = planned_of(UNITS)
    answer = answer_of(*differing({}, 3))
    decision, verdicts = decided(planned, answer, sequential=False)
    done = structs.replace(planned, decision=decision)
    batch = batch_of(DecisionEntry("lease", 4_000, done, answer, verdicts, None, (b"l" * 16, 500)))
    (row,) = batch.rows
    assert (row.kind, row.what, row.before, row.after) == (
        "lease",
        (b"l" * 16).hex(),
        None,
        '{"lease_ms": 500}',
    )


def test_parts_of_a_joint_ask_have_the_charges_that_belong_to_them() -> None:
    asks = [replace(UNITS, deny=True), replace(UNITS, deny=True, usage={"requests": 2})]
    atomic = AtomicAsks(asks, [charges_for(each, RATE, TOKENS) for each in asks], [False, False])
    parts = atomic.decided(answer_of(result(observed=2), result("throttle", throttle_ms=5))).parts
    batch = batch_of(*(DecisionEntry("decision", 4_000, *part, None) for part in parts))
    first, second = batch.rows
    assert (first.decision, first.mode, [each.outcome for each in first.verdicts]) == (
        *("throttle", "admit", ["throttle"]),
    )
    assert (second.decision, second.mode, [each.observed for each in second.verdicts]) == (
        "admit",
        "peek",
        [2],
    )


def test_part_of_a_joint_ask_by_policy_is_a_row() -> None:
    asks = [replace(UNITS, deny=True)]
    atomic = AtomicAsks(asks, [charges_for(asks[0], RATE, BYTES)], [False])
    for outcome in (atomic.without_store(), atomic.decided(answer_of(ADMITS, result(reason="store_full")))):
        (part,) = outcome.parts
        (row,) = batch_of(DecisionEntry("decision", 4_000, *part, "store_full")).rows
        assert [each.outcome for each in row.verdicts] == ["admit", "throttle"]
        assert row.source == "fallback"


# Ids


def test_plain_ids_are_in_a_row_only_if_the_log_keeps_them() -> None:
    planned = structs.replace(planned_of(ASK), decision=Decision("admit", 0, True, 4, "store", None))
    entry = DecisionEntry("decision", 4_000, planned, answer_of(*differing({})), (), None)
    assert b"seven" not in page(entry).batch("n", 1, 0)
    assert [row.plain_ids for row in batch_of(entry).rows] == [None]
    assert [row.plain_ids for row in batch_of(entry, plain_ids=True).rows] == [["7", "x"]]


def test_ids_alone_are_those_that_were_written() -> None:
    planned = planned_of(ASK, IDS)
    answer = answer_of(ADMITS, id_outcomes=bytes([SEEN, CHARGED]))
    batch = batch_of(IdsEntry("ids", 4_000, planned, answer))
    (row,) = batch.rows
    (verdict,) = row.verdicts
    assert (row.kind, row.order, row.principal, row.decision) == ("ids", 1_280, "alice", None)
    assert row.ids == digest(SECRET, "alice", "x")
    assert (verdict.ids, verdict.usage) == (bytes([CHARGED]), 1)
    assert batch.quotas[verdict.quota].bucket == "user=alice"


def test_renewal_says_until_when_the_node_knew_the_ids() -> None:
    planned = structs.replace(planned_of(ASK, IDS), known=KNOWN)
    batch = batch_of(IdsEntry("renewal", 4_000, planned, answer_of(ADMITS, id_outcomes=bytes([2, 2]))))
    (verdict,) = batch.rows[0].verdicts
    assert (verdict.known_until_ms, verdict.known_resets, verdict.ids) == (9_000, 4, bytes([2, 2]))


# Pages


def entry_of(ask: Ask, *quotas: Quota) -> DecisionEntry:
    planned = planned_of(ask, *quotas)
    answer = answer_of(*differing({}, len(planned.charges)), order=2**60, at_ms=2**52)
    planned.decision, _ = decided(planned, answer, sequential=False)
    return DecisionEntry("decision", 2**52, planned, answer, (), None)


def test_batch_has_its_name_its_secret_and_the_newest_version() -> None:
    packed = page(entry_of(UNITS)).batch("n", 7, 5_000)
    assert msgpack.decode(packed)[0] == VERSION
    batch = decode(packed)
    assert (batch.id, batch.node, batch.sent_ms, batch.secret) == (
        *("n-000000000007", "n", 5_000),
        fingerprint(SECRET),
    )


def test_time_and_order_are_the_stores_also_if_they_are_large() -> None:
    (row,) = batch_of(entry_of(UNITS)).rows
    assert (row.at_ms, row.order) == (2**52, 2**60)


def test_page_has_a_quota_once_whoever_asks() -> None:
    charges = charges_for(UNITS, RATE)  # of one snapshot
    entries = []
    for n in range(100):
        ask = replace(UNITS, principal=f"p{n}")
        own_charges = [structs.replace(charge, bucket=f"user=p{n}", owner=f"user=p{n}") for charge in charges]
        planned = PlannedAsk(ask, own_charges, None, decision=Decision("admit", 0, True, 1, "store", None))
        entries.append(DecisionEntry("decision", 4_000, planned, answer_of(ADMITS, brief=True), (), None))
    packed = page(*entries).batch("n", 1, 0)
    assert len(msgpack.decode(packed)[4]) == 1
    assert len(packed) < 100 * 160
    batch = decode(packed)
    assert [batch.quotas[row.verdicts[0].quota].bucket for row in batch.rows] == [
        f"user=p{n}" for n in range(100)
    ]
    assert len(batch.quotas) == 101, "the writer knows each bucket once"


def test_quota_compiled_for_each_ask_is_in_a_page_once() -> None:
    """As under a throttle factor, or for a bound caller."""
    (charge,) = charges_for(UNITS, RATE)
    made = page()
    for _ in range(100):
        again = compiled_again(charge, replace(RATE, limit=2.5), manner_of(UNITS))
        planned = PlannedAsk(UNITS, [again], None, decision=Decision("admit", 0, True, 1, "store", None))
        made.add(DecisionEntry("decision", 4_000, planned, answer_of(ADMITS), (), None))
    assert len(msgpack.decode(made.batch("n", 1, 0))[4]) == 1
    assert len(made._kept_alive) <= MANNERS, "the others are not kept alive"


LONG = "é" * 512
ASKS: dict[str, Callable[[int], Ask]] = {
    "equal": lambda _: Ask({"requests": 1}, principal="alice"),
    "long": lambda n: Ask({"requests": 1}, (n,), f"{n}{LONG}"[:512], LONG, None, LONG, LONG),
    "many ids": lambda n: Ask({"requests": 1}, tuple(range(n, n + 1_000)), "alice"),
    "long ids": lambda n: Ask({"requests": 1}, (f"{n}" * 20,), "alice"),
    "nothing": lambda _: Ask(),
}


@pytest.mark.parametrize("which", ASKS)
@pytest.mark.parametrize("plain_ids", [False, True])
def test_size_of_a_page_is_that_of_its_batch(which: str, plain_ids: bool) -> None:
    made = page(*(entry_of(ASKS[which](n), IDS, RATE) for n in range(50)), plain_ids=plain_ids)
    made.add(ChangeEntry("quota", 0, "user=a" * 50, None, {"limit": 1}))
    head = 400
    assert made.size <= len(made.batch("n", 1, 0)) <= made.size + head
    assert len(made) == 51
    assert made.memory > made.size


@pytest.mark.parametrize("which", [*ASKS, "callers"])
def test_writer_makes_of_a_batch_at_most_some_times_its_bytes(which: str) -> None:
    """The factor is largest for asks that many quotas admit briefly: each bucket gets its quota's columns."""
    made = page()
    for n in range(100):
        if which == "callers":
            ask = replace(UNITS, principal=f"p{n}", client_id=None)
            planned = planned_of(ask)
            answer = answer_of(*differing({}, 3), brief=True)
            planned.decision, _ = decided(planned, answer, sequential=False)
            made.add(DecisionEntry("decision", 4_000, planned, answer, (), None))
        else:
            made.add(entry_of(ASKS[which](n), IDS, RATE))
    packed = made.batch("n", 1, 0)
    batch = decode(packed)
    assert len(msgpack.encode((batch.rows, batch.quotas))) < 4 * len(packed)


def test_rows_of_all_kinds_stay_in_order() -> None:
    made = page()
    for n in range(20):
        made.add(entry_of(Ask({"requests": 1}, principal=f"p{n}"), RATE))
        made.add(ChangeEntry("quota", 0, f"user=p{n}", None, 1))
    rows = decode(made.batch("n", 1, 0)).rows
    assert [row.principal or row.what for row in rows] == [
        name for n in range(20) for name in (f"p{n}", f"user=p{n}")
    ]


def test_row_that_cannot_be_packed_leaves_the_others() -> None:
    made = page(entry_of(UNITS))
    for broken in (ChangeEntry("quota", 0, "user=a", None, object()), entry_of(replace(UNITS, ip="\ud800"))):
        with pytest.raises((TypeError, UnicodeEncodeError)):
            made.add(broken)
    made.add(entry_of(ASK))
    assert [row.principal for row in decode(made.batch("n", 1, 0)).rows] == ["alice", "alice"]
    assert len(made) == 2
