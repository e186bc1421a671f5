"""Asks in flight: which asks share a call, in which order, and how long callers wait for a silent store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from app.admission.errors import CallerGoneError, OverloadedError
from app.admission.gathering.gatherer import MAX_ASKS, MAX_IDS, MAX_PARTS, Gatherer, give_answers
from app.admission.gathering.patience import BUSY_PATIENCE_S, Moment
from app.admission.gathering.queue import DoneCallback, Group
from app.domain.ask import Mode
from app.domain.caller import Caller
from app.store.port import NONE_KNOWN, Answer, AnswersCallback, LiveLayer, Plan, StoreError
from tests.unit.admission.fakes import IDS, charge_to
from tests.waiting import until


def plan(name: str, ids: int = 1, mode: Mode = "admit") -> Plan:
    """A plan with this many ids, recognised by its context."""
    charge = charge_to("user=a", IDS, usage=ids, spreads=b"\0" * 32 * ids)
    return Plan(mode, (charge,), context=name.encode())


def named(name: str) -> Answer:
    """The answer of ``SlowStore`` to the plan of this name."""
    return Answer((), packed=name.encode())


class SlowStore:
    """A fake store whose calls wait for their gate; it answers with the contexts it was given.

    Attributes:
        is_silent: whether it sends nothing during a call; otherwise a reply is always waiting to be read.
        most: how many plans of a call it decides.
    """

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.gates: list[asyncio.Future[None]] = []
        self.news: asyncio.Queue[None] = asyncio.Queue()
        self.is_silent = True
        self.most = 1_000
        self.called_at = 0.0
        self.checks = 0

    def ask(self, plans: Sequence[Plan], done: AnswersCallback) -> None:
        self.calls.append([p.context.decode() for p in plans])
        loop = asyncio.get_running_loop()
        gate: asyncio.Future[None] = loop.create_future()
        self.gates.append(gate)
        self.called_at = loop.time()
        self.news.put_nowait(None)

        def opened(gate: asyncio.Future[None]) -> None:
            done(gate.exception() or [named(p.context.decode()) for p in plans[: self.most]])  # type: ignore[arg-type]

        gate.add_done_callback(opened)

    def silent_since(self) -> float | None:
        self.checks += 1
        return self.called_at if self.is_silent else None

    def give_up(self, error: StoreError) -> None:
        self.gates[-1].set_exception(error)

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> int | None:
        raise AssertionError(keys)

    async def live_layers(self, key: bytes, now_ms: int, ttl_ms: int) -> list[LiveLayer]:
        raise AssertionError((key, now_ms, ttl_ms))

    async def until_called(self, times: int) -> None:
        while len(self.calls) < times:
            await self.news.get()


AMPLE_S = 30.0


def gatherer(
    store: SlowStore, budget_s: float = AMPLE_S, *, timeout_s: float = AMPLE_S, **more: Any
) -> Gatherer:
    """A gatherer on a node that is always idle."""
    made = Gatherer(store, budget_s=budget_s, timeout_s=timeout_s, **more)
    made._patience.now = lambda at: Moment(at, 0.0)  # type: ignore[method-assign]
    return made


async def test_asks_that_wait_during_a_call_share_the_next_one() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    first = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    others = [asyncio.create_task(gathering.decide([plan(name)])) for name in "bcd"]
    await asyncio.sleep(0)
    store.gates[0].set_result(None)
    await store.until_called(2)
    store.gates[1].set_result(None)
    assert (await first)[0] == [named("a")]
    assert [(await other)[0] for other in others] == [[named(name)] for name in "bcd"]
    assert store.calls == [["a"], ["b", "c", "d"]]


async def test_large_batch_keeps_its_order_and_lets_others_pass() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    batch = asyncio.create_task(gathering.decide([plan(str(n), 0) for n in range(250)]))
    await store.until_called(1)
    single = asyncio.create_task(gathering.decide([plan("single")]))
    await asyncio.sleep(0)
    for call in range(3):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
    assert [answer.packed for answer in (await batch)[0]] == [str(n).encode() for n in range(250)]
    assert (await single)[1] is None
    assert [len(call) for call in store.calls] == [MAX_ASKS, MAX_ASKS, 51]
    assert "single" in store.calls[1] + store.calls[2][:1]


async def test_call_takes_limited_ids_and_a_larger_ask_is_sent_alone() -> None:
    store = SlowStore()
    plans = [plan("a", 150), plan("b", 50), plan("c", 1), plan("huge", 1000), plan("d", 0)]
    deciding = asyncio.create_task(gatherer(store).decide(plans))
    for call in range(4):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
    await deciding
    assert MAX_IDS == 200
    assert store.calls == [["a", "b"], ["c"], ["huge"], ["d"]]


async def test_call_ends_at_the_first_ask_that_does_not_fit_so_that_no_caller_overtakes_it() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    first = asyncio.create_task(gathering.decide([plan("first", 0)]))
    await store.until_called(1)
    others = [
        asyncio.create_task(gathering.decide([plan(name, ids)], caller=caller(name)))
        for name, ids in (("a", 150), ("b", 100), ("c", 0))
    ]
    await asyncio.sleep(0)
    for call in range(3):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
    await asyncio.gather(first, *others)
    assert store.calls == [["first"], ["a"], ["b", "c"]]


async def test_answers_after_the_budget_are_reported_late_and_not_returned() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.001)
    reported: list[tuple[int, Answer]] = []
    answers, failure = await gathering.decide(
        [plan("a"), plan("b")], lambda place, answer: reported.append((place, answer))
    )
    assert (answers, failure and failure.reason) == ([], "budget")
    assert not reported
    store.gates[0].set_result(None)
    await gathering.close()
    assert answers == []
    assert reported == [(0, named("a")), (1, named("b"))]


async def test_late_answers_of_a_large_batch_are_reported_by_index() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    reported: list[int] = []
    batch = asyncio.create_task(
        gathering.decide([plan(str(n), 0) for n in range(250)], lambda place, _: reported.append(place))
    )
    await store.until_called(1)
    gathering._patience.budget_s = 0.001
    store.gates[0].set_result(None)
    await store.until_called(2)
    answers, failure = await batch
    assert (len(answers), failure and failure.reason) == (MAX_ASKS, "budget")
    store.gates[1].set_result(None)
    await gathering.close()
    assert reported == list(range(MAX_ASKS, 2 * MAX_ASKS))


async def test_asks_during_an_overdue_call_are_answered_and_never_sent() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.001)
    waiting = [asyncio.create_task(gathering.decide([plan(name)])) for name in "ab"]
    assert [(await each)[1] for each in waiting]
    answers, failure = await gathering.decide([plan("c")])
    assert (answers, failure and failure.reason) == ([], "budget")
    gathering._patience.budget_s = AMPLE_S
    store.gates[0].set_result(None)
    await until(lambda: not gathering.is_late, every_s=0)
    again = asyncio.create_task(gathering.decide([plan("d")]))
    await store.until_called(2)
    store.gates[1].set_result(None)
    assert await again == ([named("d")], None)
    assert [name for call in store.calls for name in call] in (["a", "b", "d"], ["a", "d"])


async def test_records_and_refunds_are_sent_even_after_they_were_answered_without_the_store() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.001)
    reported: list[int] = []
    first = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    plans = [plan("b"), plan("c", mode="record"), plan("d", mode="peek"), plan("e", mode="refund")]
    _, failure = await gathering.decide(plans, lambda place, _: reported.append(place))
    assert failure is not None
    await first
    assert gathering.waiting == 2
    gathering._patience.budget_s = AMPLE_S
    store.gates[0].set_result(None)
    await store.until_called(2)
    store.gates[1].set_result(None)
    await gathering.close()
    assert store.calls[1:] == [["c", "e"]]
    assert reported == [1, 3]
    assert gathering.waiting == 0


async def test_unread_reply_is_no_silence() -> None:
    store = SlowStore()
    store.is_silent = False
    gathering = gatherer(store, budget_s=0.0001, timeout_s=0.0002)
    deciding = asyncio.create_task(gathering.decide([plan("a")]))
    await until(lambda: store.checks > 3, every_s=0)
    assert not gathering.is_late
    store.gates[0].set_result(None)
    assert await deciding == ([named("a")], None)


async def test_store_may_be_silent_for_longer_on_a_busy_node() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.01, timeout_s=0.02)
    gathering._patience.now = lambda at: Moment(at, at)  # type: ignore[method-assign]
    deciding = asyncio.create_task(gathering.decide([plan("a")]))
    await until(lambda: store.checks > 3, every_s=0)  # ten milliseconds apart
    assert not gathering.is_late
    assert not deciding.done()
    store.called_at -= BUSY_PATIENCE_S
    _, failure = await deciding
    assert failure is not None
    assert asyncio.get_running_loop().time() - store.called_at >= BUSY_PATIENCE_S


async def paused_during_a_call() -> tuple[
    SlowStore, Gatherer, asyncio.Task[tuple[list[Answer], StoreError | None]]
]:
    """A call during which the machine paused, after the first check."""
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.01)
    deciding = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    time.sleep(0.2)  # noqa: ASYNC251  neither the loop nor the store runs
    await until(lambda: store.checks == 1, every_s=0)
    return store, gathering, deciding


async def test_pause_of_the_machine_says_nothing_about_the_store() -> None:
    store, gathering, deciding = await paused_during_a_call()
    assert not gathering.is_late
    store.gates[0].set_result(None)
    assert await deciding == ([named("a")], None)


async def test_silent_store_is_noticed_on_a_machine_that_pauses_again_and_again() -> None:
    store, gathering, deciding = await paused_during_a_call()
    time.sleep(0.2)  # noqa: ASYNC251  it pauses again before the next check
    _, failure = await deciding
    assert failure is not None
    store.gates[0].set_result(None)
    await gathering.close()


async def test_call_with_many_ids_may_take_longer() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.01)
    deciding = asyncio.create_task(gathering.decide([plan("a", 1_000)]))
    await store.until_called(1)
    _, failure = await deciding
    assert failure is not None
    assert asyncio.get_running_loop().time() - store.called_at >= 5 * 0.01
    store.gates[0].set_result(None)
    await gathering.close()


async def test_call_is_given_up_when_the_store_stays_silent() -> None:
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.001, timeout_s=0.002)
    _, failure = await gathering.decide([plan("a")])
    assert failure is not None
    await until(store.gates[0].done, every_s=0)
    with pytest.raises(StoreError, match="it does not reply") as given_up:
        store.gates[0].result()
    assert given_up.value.reason == "timeout"
    await gathering.close()
    assert not gathering.is_late


async def test_request_that_nobody_waits_for_any_more_is_not_sent() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    first = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    left = asyncio.create_task(gathering.decide([plan("b")]))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    store.gates[0].set_result(None)
    await first
    await gathering.close()
    assert store.calls == [["a"]]


def group(name: str, done: DoneCallback) -> Group:
    return Group.of([plan(name)], done, since=time.monotonic())


async def test_answer_that_cannot_be_given_leaves_the_others_theirs() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    finished: list[Exception | None] = []

    def fails(_: Group, __: Exception | None) -> None:
        raise ZeroDivisionError

    def late(_: Group, __: int, ___: Answer) -> None:
        raise ZeroDivisionError

    unwanted = Group.of([plan("b")], fails, late)
    unwanted.is_done = True
    gathering.submit(group("a", fails))
    gathering.submit(group("c", lambda _, error: finished.append(error)))
    await store.until_called(1)
    give_answers(unwanted, 0, [named("")])
    store.gates[0].set_result(None)
    await gathering.close()
    assert finished == [None]


async def test_next_call_leaves_before_the_answers_are_given() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    calls: list[int] = []
    gathering.submit(group("a", lambda _, __: calls.append(len(store.calls))))
    await store.until_called(1)
    gathering.submit(group("b", lambda _, __: None))
    store.gates[0].set_result(None)
    await store.until_called(2)
    assert calls == [2]
    store.gates[1].set_result(None)
    await gathering.close()


async def test_silent_store_is_logged_and_given_up_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch):
    store = SlowStore()
    gathering = gatherer(store, budget_s=0.01, timeout_s=AMPLE_S)
    loop = asyncio.get_running_loop()
    checks: list[float] = []
    call_at = loop.call_at

    def noted(when: float, *rest: Any, **more: Any) -> asyncio.TimerHandle:
        checks.append(when)
        return call_at(when, *rest, **more)

    monkeypatch.setattr(loop, "call_at", noted)
    with capture_logs() as logged:
        _, failure = await gathering.decide([plan("a")])
    assert failure is not None
    (line,) = logged
    assert line["patience_ms"] == 10
    assert line["silent_ms"] >= 10
    assert store.called_at + AMPLE_S <= checks[-1] <= loop.time() + AMPLE_S, (
        "the next check is at the timeout"
    )
    store.gates[0].set_result(None)
    await gathering.close()


async def test_time_in_the_queue_counts_from_the_arrival_of_the_request() -> None:
    store = SlowStore()
    waited: list[float] = []
    gathering = gatherer(store, queued=waited.extend)
    came_at = asyncio.get_running_loop().time() - 1.5
    deciding = asyncio.create_task(
        gathering.decide([plan("a"), plan("b")], caller=caller("k", came_at=came_at))
    )
    await store.until_called(1)
    first, second = waited
    assert 1.5 <= first == second <= store.called_at - came_at
    store.gates[0].set_result(None)
    await deciding


# Turns


def caller(turn: str, **more: Any) -> Caller:
    return Caller(turn=turn, **more)


async def test_other_callers_are_in_the_next_call_during_a_flood() -> None:
    store = SlowStore()
    gathering = gatherer(store)
    flood = [
        asyncio.create_task(gathering.decide([plan(f"f{n}", 0)], caller=caller("flood")))
        for n in range(4 * MAX_PARTS + 20)
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
    assert [len(call) for call in store.calls] == [*[MAX_PARTS] * 4, 22]


async def test_principals_of_one_caller_take_turns() -> None:
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
    # The 100 asks of the other caller come before the second ask with 200 ids.
    assert [name for names in store.calls for name in names].index("i1") > 100


# Shedding


async def test_principal_whose_ask_waits_too_long_is_shed_and_others_are_not() -> None:
    store = SlowStore()
    gathering = gatherer(store, queue_s=2.0)
    now = asyncio.get_running_loop().time()
    calling = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    old = asyncio.create_task(
        gathering.decide([plan("b", mode="record")], caller=caller("k", came_at=now - 3), on_behalf_of="x")
    )
    with pytest.raises(OverloadedError, match="age"):
        await old  # it waited too long for its turn
    waits = asyncio.create_task(
        gathering.decide([plan("c", mode="record")], caller=caller("k", came_at=now), on_behalf_of="x")
    )
    await asyncio.sleep(0)
    gathering._line_up().first().since = now - 3
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


async def test_ask_that_waited_too_long_is_shed_unsent() -> None:
    store = SlowStore()
    gathering = gatherer(store, queue_s=2.0)
    calling = asyncio.create_task(gathering.decide([plan("a")]))
    await store.until_called(1)
    waits = asyncio.create_task(gathering.decide([plan("b")], caller=caller("k")))
    await asyncio.sleep(0)
    gathering._arrived[0].since -= 3
    store.gates[0].set_result(None)
    with pytest.raises(OverloadedError, match="age"):
        await waits
    await calling
    assert store.calls == [["a"]]


async def test_check_waits_for_less() -> None:
    store = SlowStore()
    gathering = gatherer(store, queue_s=2.0)
    asked = caller("k", came_at=asyncio.get_running_loop().time() - 1)
    with pytest.raises(OverloadedError):
        await gathering.decide([plan("a")], caller=asked, within_s=0.3)
    deciding = asyncio.create_task(gathering.decide([plan("a")], caller=asked))
    await store.until_called(1)
    store.gates[0].set_result(None)
    await deciding


async def test_asks_of_a_disconnected_caller_are_not_sent_except_records() -> None:
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


async def test_undecided_asks_of_a_call_go_with_the_next_in_order() -> None:
    store = SlowStore()
    store.most = 30
    gathering = gatherer(store)
    reported: list[float] = []
    gathering._queued = lambda seconds: reported.append(len(seconds))
    batch = asyncio.create_task(gathering.decide([plan(str(n), 0) for n in range(250)], caller=caller("k")))
    single = asyncio.create_task(gathering.decide([plan("single", 0)], caller=caller("other")))
    for call in range(9):
        await store.until_called(call + 1)
        store.gates[call].set_result(None)
    assert [answer.packed for answer in (await batch)[0]] == [str(n).encode() for n in range(250)]
    assert (await single)[0] == [named("single")]
    assert gathering.waiting == 0


async def test_failed_call_fails_only_its_own_asks() -> None:
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
