"""Asks that are in flight together: what shares a call, in which order, and what a silent store costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from app.admission.gather import MAX_ASKS, MAX_IDS, Gatherer
from app.domain.ladder import Applied
from app.domain.quota import Quota
from app.store.port import Answer, Charge, Plan, StoreError

QUOTA = Quota("producer_ids_rate", 5, "producer_ids", "deny")


def plan(name: str, ids: int = 1) -> Plan:
    """A plan with so many ids, recognised by its context."""
    found = Applied(QUOTA, "user=*", "user=a", "user=a")
    return Plan("admit", (Charge(found, b"key", ids, "deny", b"\0" * 32 * ids),), context=name.encode())


class SlowStore:
    """A store whose calls wait until they are let go; it answers with the contexts it was given."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.gates: list[asyncio.Future[None]] = []
        self.news: asyncio.Queue[None] = asyncio.Queue()

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        self.calls.append([p.context.decode() for p in plans])
        gate = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        self.news.put_nowait(None)
        await gate
        return [Answer((), kept=p.context) for p in plans]

    async def until_called(self, times: int) -> None:
        while len(self.calls) < times:
            await self.news.get()


def gatherer(store: SlowStore, budget_s: float = 30.0) -> Gatherer:
    return Gatherer(store, budget_s=budget_s)


async def test_what_waits_during_a_call_leaves_together_in_the_next() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    first = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    others = [asyncio.create_task(gathering.decide([plan(name)])) for name in "bcd"]
    await asyncio.sleep(0)
    store.gates[0].set_result(None)
    await store.until_called(2)
    store.gates[1].set_result(None)
    assert (await first)[0] == [Answer((), kept=b"a")]
    assert [(await other)[0] for other in others] == [[Answer((), kept=n)] for n in (b"b", b"c", b"d")]
    assert store.calls == [["a"], ["b", "c", "d"]]


async def test_a_large_batch_keeps_its_order_and_lets_others_pass() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    batch = asyncio.create_task(gathering.decide([plan(str(n), 0) for n in range(250)]))
    await store.until_called(1)
    single = asyncio.create_task(gathering.decide([plan("single")]))
    await asyncio.sleep(0)
    for call in range(3):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
    assert [answer.kept for answer in (await batch)[0]] == [str(n).encode() for n in range(250)]
    assert (await single)[1] is None
    assert [len(call) for call in store.calls] == [MAX_ASKS, MAX_ASKS, 51]
    assert "single" in store.calls[1] + store.calls[2][:1]


async def test_ids_bound_a_call_and_a_larger_ask_goes_alone() -> None:
    store = SlowStore()
    plans = [plan("a", 150), plan("b", 50), plan("c", 1), plan("huge", 1000), plan("d", 0)]
    deciding = asyncio.create_task(gatherer(store).decide(plans))
    for call in range(4):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
    await deciding
    assert MAX_IDS == 200
    assert store.calls == [["a", "b"], ["c"], ["huge"], ["d"]]


async def test_a_silent_store_costs_the_budget_and_no_late_answer_is_taken_but_told() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.001)
    told: list[tuple[int, Answer]] = []
    answers, failure = await gathering.decide(
        [plan("a"), plan("b")], lambda place, answer: told.append((place, answer))
    )
    assert (answers, failure and failure.reason) == ([], "budget")
    assert not told
    store.gates[0].set_result(None)
    await gathering.close()
    assert answers == []
    assert told == [(0, Answer((), kept=b"a")), (1, Answer((), kept=b"b"))]


async def test_of_a_large_batch_the_late_part_is_told_by_its_places() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.05)
    told: list[int] = []
    batch = asyncio.create_task(
        gathering.decide([plan(str(n), 0) for n in range(250)], lambda place, _: told.append(place))
    )
    await store.until_called(1)
    store.gates[0].set_result(None)
    await store.until_called(2)
    answers, failure = await batch
    assert (len(answers), failure and failure.reason) == (MAX_ASKS, "budget")
    store.gates[1].set_result(None)
    await gathering.close()
    assert told == list(range(MAX_ASKS, 2 * MAX_ASKS))


async def test_what_gave_up_waiting_is_never_sent() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.001)
    await asyncio.gather(gathering.decide([plan("a")]), gathering.decide([plan("b")]))
    late = asyncio.create_task(gathering.decide([plan("c")]))
    await late
    store.gates[0].set_result(None)
    await gathering.close()
    assert [name for call in store.calls for name in call] in (["a"], ["a", "b"])


async def test_a_failure_ends_those_in_the_call_and_the_next_call_is_made() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    first = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    second = asyncio.create_task(gathering.decide([plan("b")]))
    await asyncio.sleep(0)
    store.gates[0].set_exception(StoreError("connection"))
    await store.until_called(2)
    store.gates[1].set_result(None)
    answers, failure = await first
    assert (answers, failure and failure.reason) == ([], "connection")
    assert (await second)[1] is None


@pytest.mark.parametrize("plans", [1, 100, 101])
async def test_every_plan_is_answered_once(plans: int) -> None:
    store = SlowStore()
    gathering = gatherer(store)
    deciding = asyncio.create_task(gathering.decide([plan(str(n), 0) for n in range(plans)]))
    for call in range(-(-plans // MAX_ASKS)):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
    assert len((await deciding)[0]) == plans
