"""When a node reads the store's marks, and how it renews the ids that it knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import structs

from app.admission.errors import OverloadedError
from app.admission.known_ids import local
from app.admission.known_ids.local import GATHER_S, IDS_IN_CALL, PAUSE_S, POLL_EVERY_S, LocalAnswers
from app.admission.metrics.metrics import Metrics
from app.admission.plan import Knowledge, PlannedAsk
from app.admission.recorder import Recorder
from app.domain.ask import Ask
from app.domain.quota import Layers, Quota
from app.store.port import Answer, Mark, Plan, StoreError
from tests.unit.admission.fakes import EVERYONE, charges_for, ids_result

IDS = Quota("producer_ids_rate", 5, "producer_ids", "deny", window_ms=3_000, layers=Layers(1_000, 4_000))
QUOTAS = {"producer_ids_rate": {EVERYONE: IDS}}
WRITTEN = Answer((ids_result(open_ms=1_000, remembered=2.0, fill=0.01, layers=1),), at_ms=11_000)
OTHER_STATE = Answer((ids_result("throttle"),), at_ms=11_000)
RESET = Answer((ids_result("reject"),), at_ms=11_000)


class Marked:
    """A store with marks. It gives its answers to renewals in order, and then accepts every renewal."""

    def __init__(self, *answers: Answer | OverloadedError) -> None:
        self.answers = list(answers)
        self.sent: list[list[int]] = []
        self.polls: list[float] = []
        self.slept: list[float] = []
        self.now_s = 0.0

    async def mark(self) -> Mark:
        self.polls.append(self.now_s)
        if len(self.polls) == 3:
            raise StoreError("timeout")
        return Mark(10_000 + int(self.now_s * 1_000), b"born", 0)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
        if len(self.polls) > 5:
            raise EOFError  # to end the task that polls

    async def decide(
        self, plans: Sequence[Plan], _late: Callable[[int, Answer], None]
    ) -> tuple[list[Answer], StoreError | None]:
        self.sent.append([len(plan.charges[0].spreads) // 32 for plan in plans])
        answer = self.answers.pop(0) if self.answers else WRITTEN
        if isinstance(answer, OverloadedError):
            raise answer
        return [answer] * len(plans), None


def node_at(store: Marked, monkeypatch: pytest.MonkeyPatch) -> LocalAnswers:
    """A node whose clock is the store's."""
    monkeypatch.setattr(local, "sleep", store.sleep)
    return LocalAnswers(
        store,  # type: ignore[arg-type]
        store.mark,
        quotas=lambda: QUOTAS,
        secret=lambda: bytes(32),
        away=lambda: False,
        metrics=Metrics(clock=lambda: 0.0),
        now_s=lambda: store.now_s,
    )


async def knowing(store: Marked, monkeypatch: pytest.MonkeyPatch, *, users: str = "a", ids: int = 1) -> Any:
    """A node that knows ids of some users, whose layers have just closed."""
    node = node_at(store, monkeypatch)
    await node._poll()
    for user in users:
        planned = planned_of(user, ids, node.generation)
        node.learn(planned, structs.replace(WRITTEN, at_ms=10_000))
    store.now_s = 1.0
    for user in users:
        planned = planned_of(user, ids)
        assert not node.unknown(planned.ask, planned.charges[0])
    return node


def planned_of(user: str, ids: int, generation: int = 0) -> PlannedAsk:
    ask = Ask({}, tuple(range(ids)), user)
    return PlannedAsk(ask, charges_for(ask, IDS), None, generation=generation)


async def test_marks_are_read_every_250_ms_whatever_one_reading_ends_in(monkeypatch: pytest.MonkeyPatch):
    store = Marked()
    node = node_at(store, monkeypatch)
    await node._poll()
    with pytest.raises(EOFError):
        await node._poll_forever()
    assert POLL_EVERY_S <= 0.25
    assert store.polls == [POLL_EVERY_S * n for n in range(6)]


async def test_uses_of_all_buckets_are_gathered_for_one_call(monkeypatch: pytest.MonkeyPatch):
    store = Marked()
    node = await knowing(store, monkeypatch, users="abc", ids=4)
    await node._renewing
    assert (store.slept, store.sent) == ([GATHER_S], [[4, 4, 4]])
    assert not node.waits


async def test_full_calls_follow_each_other_without_a_pause(monkeypatch: pytest.MonkeyPatch):
    store = Marked()
    node = await knowing(store, monkeypatch, ids=2 * IDS_IN_CALL + 1)
    await node._renewing
    assert (store.slept, store.sent) == ([GATHER_S, 0, 0], [[IDS_IN_CALL], [IDS_IN_CALL], [1]])
    assert not node.waits


@pytest.mark.parametrize("answer", [OverloadedError("age"), OTHER_STATE])
async def test_renewal_that_was_not_done_is_tried_again_after_a_pause(
    answer: Answer | OverloadedError, monkeypatch: pytest.MonkeyPatch
):
    store = Marked(answer)
    node = await knowing(store, monkeypatch, ids=2)
    await node._renewing
    assert (store.slept, store.sent) == ([GATHER_S, PAUSE_S], [[2], [2]])
    assert not node.waits


async def test_renewal_that_the_store_could_not_decide_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    store = Marked(Answer((), error=StoreError("response", "WRONGTYPE")))
    node = await knowing(store, monkeypatch, ids=2)
    await node._renewing
    assert (store.slept, store.sent) == ([GATHER_S], [[2]])
    assert not node.waits


async def test_node_without_marks_remembers_nothing():
    node = LocalAnswers(
        Marked(),  # type: ignore[arg-type]
        None,
        quotas=lambda: QUOTAS,
        secret=lambda: bytes(32),
        away=lambda: False,
        metrics=Metrics(),
    )
    await node.open()
    planned = planned_of("a", 1)
    node.learn(planned, WRITTEN)
    assert not node.remembers
    assert node.unknown(planned.ask, planned.charges[0]) == (0,)
    assert not node.passes(planned.ask, planned.charges)
    assert node._known.ids == 0
    await node.close()


class HeardRecorder(Recorder):
    """Remembers which ids were written again."""

    def __init__(self) -> None:
        self.heard: list[tuple[PlannedAsk, Answer]] = []

    def renewed(self, planned: PlannedAsk, answer: Answer) -> None:
        self.heard.append((planned, answer))


@pytest.mark.parametrize(("answer", "renewals"), [(WRITTEN, 1), (RESET, 0)])
async def test_renewal_is_logged_with_what_made_the_node_certain(
    answer: Answer, renewals: int, monkeypatch: pytest.MonkeyPatch
):
    store, recorder, metrics = Marked(answer), HeardRecorder(), Metrics(clock=lambda: 0.0)
    node = await knowing(store, monkeypatch, ids=2)
    node._recorder, node._metrics = recorder, metrics
    await node._renewing
    assert (len(recorder.heard), metrics._counts.renewals) == (renewals, renewals)
    for planned, said in recorder.heard:
        assert (planned.ask.principal, planned.ask.producer_ids, said) == ("a", (0, 1), answer)
        assert planned.known == Knowledge(11_000, 10_000 + IDS.layers.ttl_ms, 0)
    assert node._known.ids == 2 * renewals, "a bucket that was reset is forgotten"


async def test_node_knows_by_what_it_is_certain_of_ids(monkeypatch: pytest.MonkeyPatch):
    store = Marked()
    node = await knowing(store, monkeypatch, ids=2)
    planned = planned_of("a", 2)
    known = node.knowledge(planned.ask, planned.charges[0])
    assert known == Knowledge(node.now_ms, 10_000 + IDS.layers.ttl_ms, 0)
    assert node.passes(planned.ask, planned.charges)
    assert not node.passes(planned_of("a", 3).ask, planned.charges)
    await node._renewing


async def test_node_learns_nothing_from_asks_under_the_callers_clock_or_before_a_reset(
    monkeypatch: pytest.MonkeyPatch,
):
    store = Marked()
    node = await knowing(store, monkeypatch, users="")
    ask = Ask({}, (1,), "a", at_ms=10_000)
    node.learn(PlannedAsk(ask, charges_for(ask, IDS), None, generation=node.generation), WRITTEN)
    before = planned_of("a", 1, node.generation)
    node.reset([before.charges[0].key])
    node.learn(before, WRITTEN)
    assert node._known.ids == 0
    node.learn(planned_of("a", 1, node.generation), WRITTEN)
    assert node._known.ids == 1
