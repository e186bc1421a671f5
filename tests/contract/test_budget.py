"""No answer waits on a store beyond the budget, by the event loop's own clock, under fifty callers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import redis

from app.admission.admission import Admission
from app.admission.gather import GRACE_TURNS, Caller, Gatherer, Group
from app.admission.metrics import Metrics
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask
from app.domain.decision import Decision
from app.domain.entity import ANY, Entity
from app.domain.ladder import Rules
from app.domain.quota import Quota
from app.store.redis import RedisStore
from tests import stores
from tests.relay import Relay, relaying
from tests.said import say
from tests.stores import Server

CALLERS: Final = 50
ROUNDS: Final = 20
BUDGET_S: Final = 0.05

TURNS: Final = GRACE_TURNS + 4
"""Turns of the loop that may lie between the end of the budget and the answer: those in which a reply that
has arrived is read, and one each for the timer, the group, the request and the caller."""

QUOTA: Final = Quota("request_rate", 1e9, "sampled_rate", "delay")
QUOTAS: Final = Snapshot().apply(1, [("request_rate", Entity.of(user=ANY), QUOTA)])


def hung(server: Server, _: Relay) -> None:
    server.hold()


def paused(server: Server, _: Relay) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.client_pause(60_000)


def killed(server: Server, _: Relay) -> None:
    server.kill()


def swallowed(_: Server, relay: Relay) -> None:
    relay.way = "swallow"


def slow(_: Server, relay: Relay) -> None:
    relay.way = "slow"


class Overrun:
    """Counts the turns of the loop from the end of a budget until the answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ends_at: float) -> None:
        self.turns = 0
        self.answered = False
        self._loop = loop
        loop.call_at(ends_at, self._turn)

    def _turn(self) -> None:
        if not self.answered:
            self.turns += 1
            self._loop.call_soon(self._turn)


class Timed(Gatherer):
    """Notes for each caller when its budget ends."""

    def __init__(self, store: Caller, *, budget_s: float) -> None:
        super().__init__(store, budget_s=budget_s)
        self.overruns: dict[asyncio.Task[object] | None, Overrun] = {}

    def _arm(self, group: Group, loop: asyncio.AbstractEventLoop) -> None:
        super()._arm(group, loop)
        assert group.timer is not None
        self.overruns[asyncio.current_task()] = Overrun(loop, group.timer.when())


async def asked(admission: Admission, gatherer: Timed, caller: int) -> tuple[Decision, int]:
    """A decision, and for how many turns it was awaited beyond its budget."""
    (decision,) = await admission.decide([Ask({"requests": 1}, principal=f"caller {caller}")])
    overrun = gatherer.overruns.pop(asyncio.current_task(), None)
    if overrun is None:  # the circuit is open: it never waited
        return decision, 0
    overrun.answered = True
    return decision, overrun.turns


@pytest.mark.parametrize("way", [hung, paused, killed, swallowed, slow])
async def test_no_answer_waits_beyond_the_budget(way: Callable[[Server, Relay], None], tmp_path: Path):
    with stores.server("valkey") as server, relaying(tmp_path / "relay", server.socket) as relay:
        store = RedisStore(relay.url, timeout_s=0.5)
        admission = Admission(
            store,
            lambda: QUOTAS,
            rules=Rules(),
            secret=lambda: b"s" * 32,
            sequential=False,
            budget_s=BUDGET_S,
            metrics=Metrics(),
        )
        gatherer = admission._gatherer = Timed(admission.circuit, budget_s=BUDGET_S)
        await admission.open()
        way(server, relay)
        answers = [
            answer
            for _ in range(ROUNDS)
            for answer in await asyncio.gather(*(asked(admission, gatherer, n) for n in range(CALLERS)))
        ]
        await admission.close()
        await store.close()
    sources = Counter(decision.source for decision, _ in answers)
    turns = Counter(turns for _, turns in answers)
    say(f"{dict(sources)}; turns beyond the budget: {dict(sorted(turns.items()))}")
    assert sources["fallback"] >= CALLERS
    assert max(turns) <= TURNS
