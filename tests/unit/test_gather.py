"""Asks that are in flight together: what shares a call, in which order, and what a silent store costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from app.admission.gather import MAX_ASKS, MAX_IDS, MAX_PARTS, Gatherer
from app.admission.patience import BUSY_PATIENCE_S, Moment
from app.admission.queue import CallerGoneError, OverloadedError
from app.domain.ask import Mode
from app.domain.caller import Caller
from app.domain.ladder import Applied
from app.domain.quota import Quota
from app.store.port import Answer, Charge, Plan, StoreError

QUOTA = Quota("producer_ids_rate", 5, "producer_ids", "deny")


def plan(name: str, ids: int = 1, mode: Mode = "admit") -> Plan:
    """A plan with so many ids, recognised by its context."""
    found = Applied(QUOTA, "user=*", "user=a", "user=a")
    return Plan(mode, (Charge(found, b"key", ids, "deny", b"\0" * 32 * ids),), context=name.encode())


class SlowStore:
    """A store whose calls wait until they are let go; it answers with the contexts it was given.

    Attributes:
        is_silent: whether it says nothing while a call waits; else something is always there to read.
        most: how many plans of a call it decides.
    """

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.gates: list[asyncio.Future[None]] = []
        self.news: asyncio.Queue[None] = asyncio.Queue()
        self.is_silent = True
        self.most = 1_000
        self.called_at = 0.0
        self.looks = 0

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        self.calls.append([p.context.decode() for p in plans])
        loop = asyncio.get_running_loop()
        gate = loop.create_future()
        self.gates.append(gate)
        self.called_at = loop.time()
        self.news.put_nowait(None)
        await gate
        return [Answer((), kept=p.context) for p in plans[: self.most]]

    def silent_since(self) -> float | None:
        self.looks += 1
        return self.called_at if self.is_silent else None

    def give_up(self) -> None:
        self.gates[-1].set_exception(StoreError("timeout"))

    async def until_called(self, times: int) -> None:
        while len(self.calls) < times:
            await self.news.get()


AMPLE_S = 30.0


def gatherer(
    store: SlowStore, budget_s: float = AMPLE_S, *, timeout_s: float = AMPLE_S, **more: Any
) -> Gatherer:
    """One on a node that is always idle."""
    made = Gatherer(store, budget_s=budget_s, timeout_s=timeout_s, **more)
    made._patience.now = lambda at: Moment(at, 0.0)  # type: ignore[method-assign]
    return made


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  a condition of the loop's own state, which sets no event
        await asyncio.sleep(0)


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
    gathering = gatherer(store)
    told: list[int] = []
    batch = asyncio.create_task(
        gathering.decide([plan(str(n), 0) for n in range(250)], lambda place, _: told.append(place))
    )
    await store.until_called(1)
    gathering._patience.budget_s = 0.001
    store.gates[0].set_result(None)
    await store.until_called(2)
    answers, failure = await batch
    assert (len(answers), failure and failure.reason) == (MAX_ASKS, "budget")
    store.gates[1].set_result(None)
    await gathering.close()
    assert told == list(range(MAX_ASKS, 2 * MAX_ASKS))


async def test_while_a_call_is_overdue_what_waits_and_what_arrives_is_answered_and_never_sent() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.001)
    waiting = [asyncio.create_task(gathering.decide([plan(name)])) for name in "ab"]
    assert [(await each)[1] for each in waiting]
    answers, failure = await gathering.decide([plan("c")])
    assert (answers, failure and failure.reason) == ([], "budget")
    gathering._patience.budget_s = AMPLE_S
    store.gates[0].set_result(None)
    await until(lambda: not gathering.is_late)
    again = asyncio.create_task(gathering.decide([plan("d")]))
    await store.until_called(2)
    store.gates[1].set_result(None)
    assert await again == ([Answer((), kept=b"d")], None)
    assert [name for call in store.calls for name in call] in (["a", "b", "d"], ["a", "d"])


async def test_records_and_refunds_that_were_answered_without_the_store_are_sent_all_the_same() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.001)
    told: list[int] = []
    first = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    plans = [plan("b"), plan("c", mode="record"), plan("d", mode="peek"), plan("e", mode="refund")]
    _, failure = await gathering.decide(plans, lambda place, _: told.append(place))
    assert failure is not None
    await first
    assert gathering.waiting == 2
    gathering._patience.budget_s = AMPLE_S
    store.gates[0].set_result(None)
    await store.until_called(2)
    store.gates[1].set_result(None)
    await gathering.close()
    assert store.calls[1:] == [["c", "e"]]
    assert told == [1, 3]
    assert gathering.waiting == 0


async def test_a_reply_that_lies_unread_is_no_silence() -> None:
    store = SlowStore()
    store.is_silent = False
    gathering = gatherer(store, budget_s=0.0001, timeout_s=0.0002)
    deciding = asyncio.create_task(gathering.decide([plan("a")]))
    await until(lambda: store.looks > 3)
    assert not gathering.is_late
    store.gates[0].set_result(None)
    assert await deciding == ([Answer((), kept=b"a")], None)


async def test_on_a_busy_node_the_store_may_be_silent_for_longer() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.01, timeout_s=0.02)
    gathering._patience.now = lambda at: Moment(at, at)  # type: ignore[method-assign]
    deciding = asyncio.create_task(gathering.decide([plan("a")]))
    await until(lambda: store.looks > 3)  # ten milliseconds apart
    assert not gathering.is_late
    assert not deciding.done()
    store.called_at -= BUSY_PATIENCE_S
    _, failure = await deciding
    assert failure is not None
    assert asyncio.get_running_loop().time() - store.called_at >= BUSY_PATIENCE_S


async def test_a_call_with_more_ids_than_others_may_take_longer() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.01)
    deciding = asyncio.create_task(gathering.decide([plan("a", 1_000)]))
    await store.until_called(1)
    _, failure = await deciding
    assert failure is not None
    assert asyncio.get_running_loop().time() - store.called_at >= 5 * 0.01
    store.gates[0].set_result(None)
    await gathering.close()


async def test_a_store_that_stays_silent_is_given_up() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.001, timeout_s=0.002)
    _, failure = await gathering.decide([plan("a")])
    assert failure is not None
    await until(store.gates[0].done)
    with pytest.raises(StoreError, match="timeout"):
        store.gates[0].result()
    await gathering.close()
    assert not gathering.is_late


# Turns


def caller(turn: str, **more: Any) -> Caller:
    return Caller(turn=turn, **more)


async def test_beside_a_flood_each_other_caller_is_in_the_next_call() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    flood = [
        asyncio.create_task(gathering.decide([plan(f"f{n}", 0)], caller=caller("flood"))) for n in range(90)
    ]
    await store.until_called(1)
    others = [
        asyncio.create_task(gathering.decide([plan(name, 0)], caller=caller(name))) for name in ("a", "b")
    ]
    await asyncio.sleep(0)
    store.gates[0].set_result(None)
    await store.until_called(2)
    assert {"a", "b"} < set(store.calls[1])
    for call in range(1, 5):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
    await asyncio.gather(*flood, *others)
    assert [len(call) for call in store.calls] == [*[MAX_PARTS] * 4, 12]


async def test_within_a_caller_those_it_asks_for_take_turns() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    batch = [plan(f"f{n}", 0) for n in range(1_000)]
    flood = asyncio.create_task(gathering.decide(batch, caller=caller("gateway"), on_behalf_of="flood"))
    await store.until_called(1)
    single = asyncio.create_task(
        gathering.decide([plan("alice", 0)], caller=caller("gateway"), on_behalf_of="alice")
    )
    await asyncio.sleep(0)
    store.gates[0].set_result(None)
    await store.until_called(2)
    assert "alice" in store.calls[1]
    for call in range(1, 11):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
    await asyncio.gather(flood, single)


async def test_ids_weigh_as_much_as_asks() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    held = asyncio.create_task(gathering.decide([plan("held", 0)], caller=caller("z")))
    await store.until_called(1)
    ids = [
        asyncio.create_task(gathering.decide([plan(f"i{n}", 200)], caller=caller("ids"))) for n in range(3)
    ]
    asks = asyncio.create_task(
        gathering.decide([plan(f"a{n}", 0) for n in range(100)], caller=caller("asks"))
    )
    await asyncio.sleep(0)
    for call in range(6):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
        if len([name for names in store.calls for name in names]) == 104:
            break
    await asyncio.gather(held, asks, *ids)
    # Before its second ask with 200 ids, the other caller has its 100 asks.
    assert [name for names in store.calls for name in names].index("i1") > 100


# Shedding


async def test_of_whom_one_waits_too_long_nothing_more_is_taken_in() -> None:
    store = SlowStore()
    gathering = gatherer(store, queue_s=2.0)
    now = asyncio.get_running_loop().time()
    calling = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    old = asyncio.create_task(
        gathering.decide([plan("b", mode="record")], caller=caller("k", came_at=now - 3), on_behalf_of="x")
    )
    with pytest.raises(OverloadedError, match="age"):
        await old  # it has waited too long already, for want of a turn
    waits = asyncio.create_task(
        gathering.decide([plan("c", mode="record")], caller=caller("k", came_at=now), on_behalf_of="x")
    )
    await asyncio.sleep(0)
    gathering._queue.first().since = now - 3
    with pytest.raises(OverloadedError, match="age"):
        await gathering.decide([plan("d")], caller=caller("k"), on_behalf_of="x")
    others = [
        asyncio.create_task(gathering.decide([plan("e")], caller=caller("k"), on_behalf_of="y")),
        asyncio.create_task(gathering.decide([plan("f")], caller=caller("other"), on_behalf_of="x")),
    ]
    await asyncio.sleep(0)
    store.gates[0].set_result(None)
    await store.until_called(2)
    store.gates[1].set_result(None)
    assert [failure for _, failure in await asyncio.gather(calling, waits, *others)] == [None] * 4
    assert sorted(store.calls[1]) == ["c", "e", "f"]


async def test_what_waited_too_long_for_its_turn_is_shed_unsent() -> None:
    store = SlowStore()
    gathering = gatherer(store, queue_s=2.0)
    calling = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    waits = asyncio.create_task(gathering.decide([plan("b")], caller=caller("k")))
    await asyncio.sleep(0)
    gathering._queue.first().since -= 3
    store.gates[0].set_result(None)
    with pytest.raises(OverloadedError, match="age"):
        await waits
    await calling
    assert store.calls == [["a"]]


async def test_a_check_waits_for_less() -> None:
    store = SlowStore()
    gathering = gatherer(store, queue_s=2.0)
    asked = caller("k", came_at=asyncio.get_running_loop().time() - 1)
    with pytest.raises(OverloadedError):
        await gathering.decide([plan("a")], caller=asked, within_s=0.3)
    deciding = asyncio.create_task(gathering.decide([plan("a")], caller=asked))
    await store.until_called(1)
    store.gates[0].set_result(None)
    await deciding


async def test_what_is_asked_by_one_who_left_is_not_sent_but_for_records() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    calling = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    gone = caller("k", is_gone=lambda: True)
    dropped = asyncio.create_task(gathering.decide([plan("b"), plan("c")], caller=gone))
    kept = asyncio.create_task(gathering.decide([plan("d", mode="record")], caller=gone))
    await asyncio.sleep(0)
    store.gates[0].set_result(None)
    await store.until_called(2)
    store.gates[1].set_result(None)
    with pytest.raises(CallerGoneError):
        await dropped
    assert (await kept)[1] is None
    await calling
    assert store.calls == [["a"], ["d"]]
    assert gathering.waiting == 0


async def test_what_a_call_did_not_come_to_goes_with_the_next_in_its_order() -> None:
    store = SlowStore()
    store.most = 30
    gathering = gatherer(store)
    told: list[float] = []
    gathering._queued = lambda _seconds, asks: told.append(asks)
    batch = asyncio.create_task(gathering.decide([plan(str(n), 0) for n in range(250)], caller=caller("k")))
    single = asyncio.create_task(gathering.decide([plan("single", 0)], caller=caller("other")))
    for call in range(9):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
    assert [answer.kept for answer in (await batch)[0]] == [str(n).encode() for n in range(250)]
    assert (await single)[0] == [Answer((), kept=b"single")]
    assert gathering.waiting == 0


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
