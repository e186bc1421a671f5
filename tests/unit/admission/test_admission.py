"""Decisions of a node with a fake store: their effects on callers, the metrics and the log."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from time import monotonic, perf_counter
from typing import Any

import pytest
from msgspec import msgpack, structs
from structlog.testing import capture_logs

from app.admission import admission as module
from app.admission.admission import Admission
from app.admission.answers import ADMITTED, ADMITTED_ALONE, decided, remaining_in_buckets, verdicts_of
from app.admission.errors import CallerGoneError, OverloadedError
from app.admission.factor import FactorSource
from app.admission.gathering.slices import STRIDE, Slices
from app.admission.metrics.metrics import Metrics
from app.admission.plan import PlannedAsk, named
from app.catalog.snapshot import Snapshot
from app.decision_log.batch import CHARGED, REFRESHED, SEEN
from app.domain.ask import MODES, Ask, Mode
from app.domain.binding import Binding
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision, LimitedBy
from app.domain.errors import OutOfBoundsError
from app.domain.quota import Quota
from app.domain.usage import spreads_of
from app.store.port import Answer, ChargeResult, Mark, Plan, Store, StoreError
from tests.planted import planted
from tests.unit.admission.fakes import (
    EVERYONE,
    NOW_MS,
    SECRET,
    AnsweringStore,
    ListRecorder,
    ids_result,
    result,
    snapshot_of,
)
from tests.unit.admission.fakes import admission as admission_of
from tests.waiting import until

RATE = Quota("request_rate", 5, "sampled_rate", "delay")
TOKENS = Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=55)
IDS = Quota("producer_ids_rate", 5, "producer_ids", "deny", on_store_failure="throttle")
BYTES = Quota("producer_byte_rate", 100, "sampled_rate", "delay")
SNAPSHOT = snapshot_of(RATE, TOKENS, IDS)
ASK = Ask({"requests": 1}, principal="alice")
ALL = Ask({"requests": 2, "mutations": 1}, (1, "a"), principal="alice")
ONLY_IDS = Ask({}, (1, "a"), principal="alice")
LEARNT = ids_result(open_ms=5_000, remembered=2.0, fill=0.01, layers=1)
"""The store's result for ids that its open layer holds now."""
RATE_BY = LimitedBy("request_rate", "user=*", "user=alice")


class RecordedMetrics(Metrics):
    """Keeps the counted fallbacks and the times of decisions."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)
        self.fallbacks: list[str] = []
        self.took: list[float] = []
        self.observe_decisions = self.took.extend

    def count_fallback(self, reason: str) -> None:
        self.fallbacks.append(reason)


class Factor(FactorSource):
    """A throttle factor."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def on(self, _ask: Ask) -> float:
        return self._factor

    def suspension_ms(self, _at_ms: int | None) -> int:
        return 700


async def birth() -> Mark:
    """The marks of a store that never lost anything."""
    return Mark(NOW_MS, b"birth", 0)


def admission(store: Store, snapshot: Snapshot = SNAPSHOT, **more: Any) -> Admission:
    """A node with some quotas."""
    return admission_of(store, snapshot, **more)


async def knowing(store: AnsweringStore, ask: Ask = ALL, **more: Any) -> Admission:
    """A node that knows the ids of an ask; its other quotas admit from now on."""
    node = admission(store, mark=birth, **more)
    await node.local._poll()
    await node.decide([ask])
    store.results = (result(), result())
    store.plans.clear()
    return node


async def decision_on(node: Admission, ask: Ask, caller: Caller = ANYONE) -> Decision:
    (planned,) = await node.decide([ask], caller)
    assert planned.decision is not None
    return planned.decision


# By the store's answer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("detail", [False, True])
async def test_admissions_are_ready_and_those_of_their_verdicts(mode: Mode, detail: bool) -> None:
    ask = replace(ASK, mode=mode, detail=detail)
    (planned,) = await admission(AnsweringStore(result())).decide([ask])
    assert planned.answer is not None
    by_verdicts, _ = decided(planned, planned.answer, sequential=False)
    assert planned.decision == by_verdicts
    assert (planned.decision is ADMITTED[1]) is (mode == "admit" and not detail)


ANSWERS: dict[str, tuple[tuple[ChargeResult, ...], Decision]] = {
    "admitted": ((LEARNT, result(), result()), ADMITTED[3]),
    "delayed": (
        (LEARNT, result("delay", throttle_ms=7), result()),
        Decision("delay", 7, True, 3, "store", RATE_BY),
    ),
    "throttled": (
        (ids_result("throttle", throttle_ms=9, unseen=2), result(), result()),
        Decision("throttle", 9, False, 3, "store", LimitedBy("producer_ids_rate", "user=*", "user=alice")),
    ),
    "rejected": (
        (LEARNT, result(), result("reject", reason="too_large", largest=3.0)),
        Decision(
            *("reject", 0, False, 3, "store"),
            LimitedBy("controller_mutation_rate", "user=*", "user=alice", "too_large", 3.0),
        ),
    ),
    "no room": (
        (result(reason="store_full"), result(), result()),
        Decision(
            *("throttle", 1_000, False, 3, "fallback"),
            LimitedBy("producer_ids_rate", "user=*", "user=alice", "store_full"),
        ),
    ),
    "clock behind": ((LEARNT, result(correction=1), result()), ADMITTED[3]),
    "debt forgiven": ((LEARNT, result(), result(forgiven=2.5)), ADMITTED[3]),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("ask", [ALL, replace(ALL, detail=True)], ids=["", "detail"])
@pytest.mark.parametrize("batch", [1, 3])
async def test_answer_is_decided_counted_and_logged_alone_and_in_a_batch(
    answer: str, ask: Ask, batch: int
) -> None:
    results, expected = ANSWERS[answer]
    recorder, metrics = ListRecorder(), RecordedMetrics()
    node = admission(AnsweringStore(*results), recorder=recorder, metrics=metrics)
    found = await node.decide([ask] * batch)
    for planned in found:
        decision = planned.decision
        assert decision is not None
        assert replace(decision, quotas=None) == expected
        assert (decision.quotas is not None) is ask.detail
    assert len(recorder.heard) == batch
    for (logged, got, verdicts, why), planned in zip(recorder.heard, found, strict=True):
        assert logged is planned
        assert got is not None
        assert (got.results, got.order) == (results, 1_280)
        assert verdicts in ((), verdicts_of(planned, got)), "what a refusal says is what was decided"
        assert (len(verdicts) == 0) is (answer in ("admitted", *ADMITS_MORE) and not ask.detail)
        assert why == ("store_full" if answer == "no room" else None)
    by = expected.limited_by
    labels = (expected.decision, by.quota if by else "", expected.source)
    counts = metrics._counts
    assert counts.decisions == {labels: batch}
    assert (counts.corrections, counts.forgiven) == (
        batch * (answer == "clock behind"),
        2.5 * batch * (answer == "debt forgiven"),
    )
    assert metrics.fallbacks == ["store_full"] * batch * (answer == "no room")


ADMITS_MORE = ("clock behind", "debt forgiven")


async def test_batch_is_decided_in_order_and_asks_the_store_where_it_must() -> None:
    store, recorder = AnsweringStore(result()), ListRecorder()
    node = admission(store, recorder=recorder)
    asks = [ASK, replace(ASK, mode="peek"), Ask({"fetch_bytes": 1}), replace(ASK, id="x"), ASK]
    found = await node.decide(asks)
    assert [planned.ask for planned in found] == asks
    decisions = [planned.decision for planned in found]
    assert [each and (each.applied, each.charged, each.source) for each in decisions] == [
        *((1, True, "store"), (1, False, "store"), (0, True, "local"), (1, True, "store"), (1, True, "store"))
    ]
    assert [plan.mode for plan in store.plans] == ["admit", "peek", "admit", "admit"]
    assert [planned.ask for planned, *_ in recorder.heard] == asks


async def test_ask_that_no_quota_limits_needs_no_store() -> None:
    store, metrics = AnsweringStore(), RecordedMetrics()
    ask = Ask({"fetch_bytes": 1}, principal="alice")
    assert await decision_on(admission(store, metrics=metrics), ask) is ADMITTED[0]
    assert store.plans == []
    assert metrics._counts.unmatched == 1


async def test_kept_answer_is_the_decision_and_no_new_one() -> None:
    store = AnsweringStore(ids_result(), result("delay", throttle_ms=30), result())
    recorder, metrics = ListRecorder(), RecordedMetrics()
    node = admission(store, recorder=recorder, metrics=metrics, mark=birth)
    await node.local._poll()
    once = replace(ALL, id="once")
    first = await decision_on(node, once)
    (plan,) = store.plans
    assert plan.retry is not None
    store.more["kept"] = plan.context
    again = await decision_on(node, replace(once, detail=True))
    assert again == first
    assert [answer and answer.kept for _, answer, *_ in recorder.heard] == [None, plan.context]
    assert metrics._counts.decisions == {("delay", "request_rate", "store"): 2}
    assert node.local._known.ids == 0, "an old answer teaches nothing"


async def test_answer_that_cannot_be_read_is_decided_by_policy() -> None:
    """The store decides the other asks of the batch."""

    class Broken(AnsweringStore):
        def answers(self, plans: Sequence[Plan]) -> list[Answer]:
            _, *others = super().answers(plans)
            return [Answer((), error=StoreError("response", "WRONGTYPE")), *others]

    recorder, metrics = ListRecorder(), RecordedMetrics()
    found = await admission(Broken(result()), recorder=recorder, metrics=metrics).decide([ASK, ASK])
    assert [planned.decision and planned.decision.source for planned in found] == ["fallback", "store"]
    assert [(answer is None, why) for _, answer, _, why in recorder.heard] == [
        (True, "response"),
        (False, None),
    ]
    assert metrics.fallbacks == ["response"]


async def test_lapsed_lease_is_counted_and_logged_unless_it_is_a_peek() -> None:
    for mode, expected in (("admit", [3.5]), ("peek", [])):
        recorder = ListRecorder()
        node = admission(AnsweringStore(result(lapsed=3.5)), recorder=recorder)
        await node.decide([replace(ASK, mode=mode)])  # type: ignore[arg-type]
        assert recorder.ended == expected


# Delays that add up

BOTH = Ask({"requests": 1, "produce_bytes": 5}, principal="alice")


async def throttle_ms(of: Any = Admission, *, sequential: bool = True) -> int:
    store = AnsweringStore(result("delay", throttle_ms=30), result("delay", throttle_ms=70))
    node = admission(store, snapshot_of(RATE, BYTES), sequential=sequential, of=of)
    return (await decision_on(node, BOTH)).throttle_ms


async def test_delays_add_up_if_they_are_sequential() -> None:
    assert [await throttle_ms(sequential=sequential) for sequential in (False, True)] == [70, 100]


async def test_planted_fault_of_sequential_delays_is_found() -> None:
    right = "planned.decision, verdicts = decision_by(planned, answer, sequential=self._sequential)"
    wrong = right.replace("self._sequential", "False")
    assert await throttle_ms(planted(module, right, wrong)["Admission"]) != 100


# Producer ids that the node knows


async def test_known_ids_are_not_sent_and_without_other_quotas_nothing_is() -> None:
    store, recorder, metrics = AnsweringStore(LEARNT, result(), result()), ListRecorder(), RecordedMetrics()
    node = await knowing(store, recorder=recorder, metrics=metrics)
    assert await decision_on(node, ALL) is ADMITTED[3]
    assert await decision_on(node, ONLY_IDS) is ADMITTED_ALONE
    (plan,) = store.plans
    assert [charge.quota.key for charge in plan.charges] == ["request_rate", "controller_mutation_rate"]
    first, second, third = recorder.heard
    assert [planned.alone for planned, *_ in recorder.heard] == [0, 1, 1]
    for planned, *_ in (second, third):
        assert planned.known is not None
        assert NOW_MS <= planned.known.at_ms <= NOW_MS + 1
        assert planned.known[1:] == (NOW_MS + 5_000 + IDS.layers.ttl_ms - IDS.layers.interval_ms, 0)
    assert first[1] is not None
    assert third[1] is None
    assert metrics._counts.local_ids == 4
    assert metrics._counts.decisions == {("admit", "", "store"): 2, ("admit", "", "local"): 1}


async def test_refusal_beside_known_ids_has_the_verdicts_of_all_quotas() -> None:
    store, recorder = AnsweringStore(LEARNT, result(), result()), ListRecorder()
    node = await knowing(store, recorder=recorder)
    store.results = (result("throttle", throttle_ms=9), result())
    decision = await decision_on(node, replace(ALL, deny=True))
    assert decision == Decision("throttle", 9, False, 3, "store", RATE_BY)
    *_, (_, _, verdicts, _) = recorder.heard
    assert [(each.quota, each.outcome, each.observed) for each in verdicts] == [
        *(("producer_ids_rate", "admit", None), ("request_rate", "throttle", 1.0)),
        ("controller_mutation_rate", "admit", 1.0),
    ]


async def test_ids_that_the_node_does_not_know_are_sent_alone_and_logged_with_the_others() -> None:
    store, recorder = AnsweringStore(LEARNT, result(), result()), ListRecorder()
    node = await knowing(store, recorder=recorder)
    store.results, store.more["id_outcomes"] = (LEARNT, result(), result()), bytes([CHARGED])
    more = replace(ALL, producer_ids=("a", 9, 1))
    assert await decision_on(node, more) is ADMITTED[3]
    (plan,) = store.plans
    assert (plan.charges[0].usage, plan.charges[0].spreads) == (1, spreads_of(more, SECRET)[1])
    *_, (planned, answer, *_) = recorder.heard
    assert planned.ask == more
    assert answer is not None
    assert answer.id_outcomes == bytes([SEEN, CHARGED, SEEN])
    assert node.local._known.ids == 3


@pytest.mark.parametrize(
    "ask",
    [
        replace(ONLY_IDS, detail=True),
        replace(ONLY_IDS, id="once"),
        replace(ONLY_IDS, mode="peek"),
        replace(ONLY_IDS, at_ms=NOW_MS),
        replace(ONLY_IDS, principal="bob"),
    ],
)
async def test_store_decides_asks_that_the_node_may_not_answer_alone(ask: Ask) -> None:
    node = await knowing(store := AnsweringStore(LEARNT, result(), result()))
    assert (await decision_on(node, ask)).source == "store"
    (plan,) = store.plans
    assert plan.ids == 2


async def test_ids_are_learnt_with_detail_too() -> None:
    node = await knowing(AnsweringStore(LEARNT), replace(ONLY_IDS, detail=True))
    assert await decision_on(node, ONLY_IDS) is ADMITTED_ALONE


async def test_known_ids_pass_while_the_store_fails() -> None:
    store = AnsweringStore(LEARNT, result(), result())
    node = await knowing(store)
    store.error = StoreError("timeout")
    for _ in range(2):  # the failed call, then the open circuit
        decision = await decision_on(node, ALL)
        assert (decision.decision, decision.source, decision.applied) == ("admit", "fallback", 3)
    assert await decision_on(node, ONLY_IDS) is ADMITTED_ALONE
    other = await decision_on(node, replace(ALL, producer_ids=(77,)))
    assert (other.decision, other.source) == ("throttle", "fallback")


async def test_answer_that_was_planned_before_the_node_forgot_something_teaches_nothing() -> None:
    node = admission(store := AnsweringStore(LEARNT), mark=birth)
    await node.local._poll()
    answers = store.answers

    def reset_meanwhile(plans: Sequence[Plan]) -> list[Answer]:
        node.local.reset([plans[0].charges[0].key])
        return answers(plans)

    store.answers = reset_meanwhile  # type: ignore[method-assign]
    await node.decide([ONLY_IDS])
    assert node.local._known.ids == 0


async def test_node_without_marks_remembers_nothing() -> None:
    node = admission(store := AnsweringStore(LEARNT))
    for _ in range(2):
        assert (await decision_on(node, ONLY_IDS)).source == "store"
    assert [plan.ids for plan in store.plans] == [2, 2]


# Late answers


async def test_late_answer_is_logged_with_all_that_it_says() -> None:
    recorder = ListRecorder()
    node = admission(AnsweringStore(LEARNT, result(), result()), recorder=recorder, mark=birth)
    await node.local._poll()
    for results, decision in (ANSWERS["throttled"], ANSWERS["admitted"]):
        late = Answer(results, at_ms=NOW_MS, order=9, id_outcomes=bytes([CHARGED, REFRESHED]))
        planned = node._planned(ALL, ANYONE)
        node._log_late((planned,), 0, late)
        logged, answer, verdicts = recorder.heard_late.pop()
        assert (logged.ask, logged.decision, answer) == (ALL, decision, late)
        assert list(verdicts) in ([], list(verdicts_of(planned, late)))
        assert planned.decision is None, "the decision that was given stays as it is"
    assert node.local._known.ids == 2, "it teaches as any other"


async def test_late_answer_of_an_ask_whose_ids_are_known_is_logged_beside_them() -> None:
    recorder = ListRecorder()
    node = await knowing(AnsweringStore(LEARNT, result(), result()), recorder=recorder)
    node._log_late((node._planned(ALL, ANYONE),), 0, Answer((result(), result("delay", throttle_ms=5))))
    ((planned, _, verdicts),) = recorder.heard_late
    assert planned.alone == 1
    assert [each.observed for each in verdicts] == [None, 1.0, 1.0]


async def test_late_answer_that_decided_nothing_is_not_logged() -> None:
    recorder = ListRecorder()
    node = admission(AnsweringStore(), recorder=recorder)
    planned = node._planned(ALL, ANYONE)
    node._log_late((planned,), 0, Answer((), error=StoreError("response")))
    node._log_late((planned,), 0, Answer((), kept=b"\x93"))
    node._log_late((structs.replace(planned, is_suspended=True),), 0, Answer(()))
    assert recorder.heard_late == []


# Without the store


@pytest.mark.parametrize("ask", [ASK, ALL, Ask({"fetch_bytes": 1}, principal="alice")])
async def test_policies_decide_when_the_store_fails_and_while_it_is_away(ask: Ask) -> None:
    recorder, metrics = ListRecorder(), RecordedMetrics()
    store = AnsweringStore(error=StoreError("timeout"))
    node = admission(store, recorder=recorder, metrics=metrics)
    expected = {1: ("admit", "fallback"), 3: ("throttle", "fallback"), 0: ("admit", "local")}
    for calls in (1, 1):  # the failed call, then the open circuit
        decision = await decision_on(node, ask)
        assert (decision.decision, decision.source) == expected[decision.applied]
        assert len(store.plans) == calls * (decision.applied > 0)
    reasons = ["timeout", "timeout"] if ask.usage != {"fetch_bytes": 1} else [None, None]
    assert [why for *_, why in recorder.heard] == reasons
    assert metrics.fallbacks == [why for why in reasons if why]


RESULTS: dict[str, tuple[ChargeResult, ...]] = {
    "admitted": (result(), result(remaining=-3.0)),
    "throttled": (result("throttle", throttle_ms=9), result()),
    "one by policy in a full store": (result(reason="store_full"), result()),
    "one by policy of a slot that fails": (result(), result(reason="store_failure")),
    "numbers not known": (result(observed=math.nan, remaining=math.nan), result()),
    "no answer": (),
}


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("name", RESULTS)
async def test_what_remains_is_known_without_detail(name: str, factor: float) -> None:
    """A gateway gets the same numbers whether verdicts are made or not."""
    results = RESULTS[name]
    ask = Ask({"requests": 1, "produce_bytes": 1}, principal="alice", deny=True)
    found: list[list[float | None]] = []
    for detail in (True, False):
        store = AnsweringStore(*results, error=None if results else StoreError("timeout"))
        node = admission(store, snapshot_of(RATE, BYTES), factor=Factor(factor))
        (planned,) = await node.decide([replace(ask, detail=detail)])
        assert planned.decision is not None
        if detail:
            found.append([each.remaining for each in planned.decision.quotas or ()])
        found.append(remaining_in_buckets(planned))
    assert found == [found[0]] * 3
    assert len(found[0]) == 2


# Changes of quotas, and the throttle factor


async def test_changed_quotas_are_in_force_for_the_next_ask() -> None:
    node = admission(store := AnsweringStore(result()))
    snapshots = [SNAPSHOT, SNAPSHOT.apply(2, [("request_rate", EVERYONE, replace(RATE, limit=7))])]
    node._snapshot = lambda: snapshots[0]
    await node.decide([ASK])
    del snapshots[0]
    await node.decide([ASK])
    assert [plan.charges[0].quota.limit for plan in store.plans] == [5, 7]


async def test_throttle_factor_scales_asks_to_produce_alone() -> None:
    node = admission(store := AnsweringStore(result()), snapshot_of(RATE, BYTES), factor=Factor(0.5))
    produce = Ask({"produce_bytes": 1}, principal="alice")
    await node.decide([produce])
    await node.decide([ASK])
    assert [plan.charges[0].quota.limit for plan in store.plans] == [50, 5]


async def test_factor_of_0_holds_asks_to_produce() -> None:
    recorder = ListRecorder()
    node = admission(
        store := AnsweringStore(result()), snapshot_of(RATE, BYTES, IDS), factor=Factor(0), recorder=recorder
    )
    produce = Ask({"produce_bytes": 1}, (1,), principal="alice")
    decision = await decision_on(node, produce)
    factor = LimitedBy("throttle_factor", None, None)
    assert decision == Decision("throttle", 700, False, 2, "local", factor)
    await node._refresher.close()
    assert [(plan.mode, plan.ids) for plan in store.plans] == [("refresh", 1)], "ids in use are refreshed"
    assert [(planned.is_suspended, len(verdicts)) for planned, _, verdicts, _ in recorder.heard] == [
        (True, 2)
    ]


async def test_retry_of_a_held_ask_gets_the_kept_answer() -> None:
    store = AnsweringStore(result())
    once = Ask({"produce_bytes": 1}, principal="alice", id="once")
    (before,) = await admission(store, snapshot_of(BYTES)).decide([once])
    node = admission(store, snapshot_of(BYTES), factor=Factor(0))
    assert (await decision_on(node, once)).throttle_ms == 700
    assert store.plans[-1].charges == ()
    assert store.plans[-1].retry == store.plans[0].retry
    assert before.plan is not None
    context = msgpack.encode(("admit", False, [named(charge) for charge in before.charges]))
    node = admission(KeptStore(context), snapshot_of(BYTES), factor=Factor(0))
    assert await decision_on(node, once) == Decision("admit", 0, True, 1, "store", None)


class KeptStore(AnsweringStore):
    """A fake store that kept an answer."""

    def __init__(self, context: bytes) -> None:
        super().__init__()
        self._context = context

    def answers(self, plans: Sequence[Plan]) -> list[Answer]:
        return [Answer((result(),), self._context) for _ in plans]


async def test_bound_caller_spends_under_deny_and_may_not_account() -> None:
    node = admission(store := AnsweringStore(result()))
    bound = Caller("key", bound_to=(Binding.parse("client-id=etl"),))
    await node.decide([ASK], bound)
    assert store.plans[0].charges[0].enforcement == "deny"
    with pytest.raises(OutOfBoundsError) as outside:
        await node.decide([ASK, replace(ASK, mode="record")], bound)
    assert outside.value.place == 1
    with pytest.raises(OutOfBoundsError):
        node.begin(replace(ASK, mode="refund"), bound, lambda _: None)
    assert len(store.plans) == 1, "nothing was charged"


# Callers


async def test_answer_of_a_single_ask_is_given_by_a_call() -> None:
    node = admission(AnsweringStore(result()))
    made: asyncio.Future[PlannedAsk | Exception] = asyncio.get_running_loop().create_future()
    node.begin(ASK, ANYONE, made.set_result)
    planned = await made
    assert isinstance(planned, PlannedAsk)
    assert planned.decision is ADMITTED[1]
    at_once: list[object] = []
    assert node.begin(Ask({"fetch_bytes": 1}), ANYONE, at_once.append) is None
    assert len(at_once) == 1


async def test_caller_that_left_gets_an_error_and_charges_nothing() -> None:
    node = admission(store := AnsweringStore(result()))
    gone: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    node.begin(ASK, Caller(is_gone=lambda: True), gone.set_result)
    assert isinstance(await gone, CallerGoneError)
    assert store.plans == []


async def test_caller_that_waited_for_longer_than_it_may_is_shed() -> None:
    node = admission(AnsweringStore(result()))
    with pytest.raises(OverloadedError):
        await node.decide([ASK], Caller(came_at=monotonic() - 0.5), 0.3)


def fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("asks", [1, 2])
async def test_unexpected_error_of_a_decision_reaches_its_caller(
    asks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "decided", fail)
    with pytest.raises(ZeroDivisionError):
        await admission(AnsweringStore(result("delay", throttle_ms=7))).decide([ASK] * asks)


@pytest.mark.parametrize("ask", [ASK, Ask({"fetch_bytes": 1})])
async def test_decision_that_cannot_be_counted_is_given_once(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = admission(AnsweringStore(result()))
    monkeypatch.setattr(node._metrics, "count", fail)
    given: list[PlannedAsk | Exception] = []
    with capture_logs() as lines:
        node.begin(ask, ANYONE, given.append)
        await until(lambda: bool(lines), every_s=0)
    (planned,) = given
    assert isinstance(planned, PlannedAsk)
    assert planned.decision in ADMITTED
    assert [line["event"] for line in lines] == ["a decision could not be counted or logged"]


@pytest.mark.parametrize("ask", [ASK, Ask({"fetch_bytes": 1})])
async def test_decision_that_cannot_be_given_is_counted_and_logged(ask: Ask) -> None:
    """The charge stays charged."""
    recorder, metrics = ListRecorder(), RecordedMetrics()
    node = admission(AnsweringStore(result()), recorder=recorder, metrics=metrics)
    with capture_logs():
        with suppress(ZeroDivisionError):
            node.begin(ask, ANYONE, fail)
        await until(lambda: bool(recorder.heard), every_s=0)
    assert sum(metrics._counts.decisions.values()) == len(recorder.heard) == 1


async def test_time_of_a_decision_is_measured_from_the_ask() -> None:
    metrics = RecordedMetrics()
    deciding = admission(AnsweringStore(result()), metrics=metrics)
    began = perf_counter()
    await deciding.decide([ASK, ASK])
    first, second = metrics.took
    assert 0 <= first == second <= perf_counter() - began


def test_asks_with_many_ids_take_more_of_a_step() -> None:
    deciding = admission(AnsweringStore(), Snapshot(), slices=Slices())
    asks = [Ask({}, tuple(range(ids))) for ids in (1_000, 10, 10, 190, 1)]
    assert len(list(deciding._planned_all(asks, ANYONE))) == 2
    assert len(list(deciding._planned_all([ASK] * (3 * STRIDE), ANYONE))) == 3


@pytest.mark.parametrize(("asks", "turns"), [(1, 1), (2_000, 10)])
async def test_batch_is_planned_in_slices_and_a_single_ask_at_once(asks: int, turns: int) -> None:
    slices = Slices(4.0, count(0.0).__next__)  # a iteration of the loop does a few steps
    deciding = admission(AnsweringStore(), Snapshot(), slices=slices)  # no quota: the store is not asked
    running = asyncio.create_task(deciding.decide([ASK] * asks))
    took = 0
    while not running.done():
        await asyncio.sleep(0)
        took += 1
    assert len(await running) == asks
    assert took >= turns
    assert took == 1 or turns > 1
