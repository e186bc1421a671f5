"""Decisions of a node with a fake store: what reaches the caller, the metrics and the other callers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from time import perf_counter

import pytest

from app.admission.admission import Admission
from app.admission.metrics import Metrics
from app.admission.slices import ASK_WEIGHT, STRIDE, Slices
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask
from app.domain.caller import ANYONE
from app.domain.ladder import MatchingRules
from app.store.port import Answer, ChargeResult, Plan, Store, StoreError
from tests.unit.admission.fakes import EVERYONE, RATE, PromptStore

QUOTAS = Snapshot().apply(1, [("request_rate", EVERYONE, RATE)])
ASK = Ask({"requests": 1}, principal="alice")
THROTTLED = ChargeResult("throttle", 700, None, 0, 5.0, 0.0, None, 0, 0.0)


class ThrottlingStore(PromptStore):
    """A fake store that throttles every ask, or fails if the test sets an error."""

    error: StoreError | None = None

    def answers(self, plans: Sequence[Plan]) -> list[Answer]:
        if self.error is not None:
            raise self.error
        return [Answer((THROTTLED,) * len(plan.charges)) for plan in plans]


class RecordedMetrics(Metrics):
    """Remembers what it was asked to count."""

    def __init__(self) -> None:
        super().__init__()
        self.fallbacks: list[str] = []
        self.took: list[tuple[float, int]] = []
        self.observe_decision = lambda seconds, asks: self.took.append((seconds, asks))

    def count_fallback(self, reason: str) -> None:
        self.fallbacks.append(reason)


@pytest.fixture
def store() -> ThrottlingStore:
    return ThrottlingStore()


@pytest.fixture
def metrics() -> RecordedMetrics:
    return RecordedMetrics()


def admission(
    store: Store, metrics: Metrics, snapshot: Snapshot = QUOTAS, slices: Slices | None = None
) -> Admission:
    return Admission(
        store,
        lambda: snapshot,
        rules=MatchingRules(),
        secret=lambda: b"s" * 32,
        sequential=False,
        budget_s=30.0,
        metrics=metrics,
        slices=slices,
    )


async def test_answer_of_the_store_is_the_decision_and_no_fallback(
    store: ThrottlingStore, metrics: RecordedMetrics
):
    (decision,) = await admission(store, metrics).decide([ASK])
    assert (decision.decision, decision.throttle_ms, decision.source) == ("throttle", 700, "store")
    assert metrics.fallbacks == []


async def test_ask_that_the_store_failed_is_counted_as_a_fallback(
    store: ThrottlingStore, metrics: RecordedMetrics
):
    store.error = StoreError("connection")
    (decision,) = await admission(store, metrics).decide([ASK])
    assert (decision.decision, decision.source) == ("admit", "fallback")
    assert metrics.fallbacks == ["connection"]


async def test_time_of_a_decision_is_measured_from_the_ask(store: ThrottlingStore, metrics: RecordedMetrics):
    deciding = admission(store, metrics)
    began = perf_counter()
    await deciding.decide([ASK, ASK])
    [(seconds, asks)] = metrics.took
    assert 0 <= seconds <= perf_counter() - began
    assert asks == 2


def test_asks_with_many_ids_take_more_of_a_step(store: ThrottlingStore, metrics: RecordedMetrics):
    deciding = admission(store, metrics, Snapshot(), Slices())
    asks = [Ask({}, tuple(range(ids))) for ids in (1_000, 10, 10, 190, 1)]
    assert len(list(deciding._planned(asks, ANYONE))) == 2
    assert len(list(deciding._planned([ASK] * (3 * STRIDE // ASK_WEIGHT), ANYONE))) == 3


@pytest.mark.parametrize(("asks", "turns"), [(1, 1), (400, 10)])
async def test_batch_is_planned_in_slices_and_a_single_ask_at_once(
    asks: int, turns: int, store: ThrottlingStore, metrics: RecordedMetrics
):
    slices = Slices(4.0, count(0.0).__next__)  # a turn of the loop does a few steps
    deciding = admission(store, metrics, Snapshot(), slices)  # no quota applies, so the store is not asked
    running = asyncio.create_task(deciding.decide([ASK] * asks))
    took = 0
    while not running.done():
        await asyncio.sleep(0)
        took += 1
    assert len(await running) == asks
    assert took >= turns
    assert took == 1 or turns > 1
