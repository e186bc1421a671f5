"""No caller waits for a store that is known to be silent: in iterations of the loop, with fifty callers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import redis

from app.admission.admission import Admission
from app.admission.gathering.gatherer import Gatherer
from app.admission.gathering.patience import Moment
from app.admission.metrics.metrics import Metrics
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask
from app.domain.decision import Decision
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.port import StoreCalls
from app.store.redis import RedisStore
from tests import stores
from tests.charging import decisions_of
from tests.relay import Relay, relaying
from tests.report import say
from tests.stores import Server

CALLERS: Final = 50
ROUNDS: Final = 20
BUDGET_S: Final = 0.05

ITERATIONS: Final = 2
"""The most iterations of the loop between the finding that the store is silent and an answer: one each for
the request and the task that counts."""

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


def late(_: Server, relay: Relay) -> None:
    relay.way = "late"


class Iterations:
    """Counts iterations of the event loop. This keeps the loop busy, so it counts only while needed."""

    def __init__(self) -> None:
        self.now = 0

    def count(self, is_wanted: Callable[[], bool]) -> None:
        """Count as long as the condition holds."""
        if is_wanted():
            self.now += 1
            asyncio.get_running_loop().call_soon(self.count, is_wanted)


class Timed(Gatherer):
    """Records when it found the store silent, and for how long it had been silent."""

    def __init__(self, store: StoreCalls, iterations: Iterations) -> None:
        super().__init__(store, budget_s=BUDGET_S)
        # The node counts as idle, whatever else runs: a busy node would wait long enough for a slow store.
        self._patience.now = lambda at: Moment(at, 0.0)  # type: ignore[method-assign]
        self.iterations = iterations
        self.late_at = 0
        self.without_store = 0
        self.silences: list[float] = []

    def _answer_all_without_store(self) -> None:
        since = self._store.silent_since()
        if since is not None:
            self.silences.append(asyncio.get_running_loop().time() - since)
        self.late_at = self.iterations.now
        super()._answer_all_without_store()
        self.iterations.count(lambda: self.is_late)


async def asked(admission: Admission, gatherer: Timed, caller: int) -> tuple[Decision, int]:
    """Return a decision, and how many iterations it took after the store was known to be silent or away."""
    began = gatherer.iterations.now
    (decision,) = await decisions_of(admission, [Ask({"requests": 1}, principal=f"caller {caller}")])
    gatherer.without_store += decision.source == "fallback"
    return decision, gatherer.iterations.now - max(began, gatherer.late_at)


@pytest.mark.parametrize("way", [hung, paused, killed, swallowed, late])
async def test_no_caller_waits_for_a_store_that_is_known_to_be_silent(
    way: Callable[[Server, Relay], None], tmp_path: Path
):
    with stores.server("valkey") as server, relaying(tmp_path / "relay", server.socket) as relay:
        store = RedisStore(relay.url, timeout_s=0.5)
        admission = Admission(
            store,
            lambda: QUOTAS,
            rules=MatchingRules(),
            secret=lambda: b"s" * 32,
            sequential=False,
            budget_s=BUDGET_S,
            metrics=Metrics(),
        )
        gatherer = admission._gatherer = Timed(admission.circuit, Iterations())
        relay.without_store = lambda: gatherer.without_store
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
    iterations = Counter(took for decision, took in answers if decision.source == "fallback")
    silences = [round(silence * 1000) for silence in gatherer.silences]
    say(f"{dict(sources)}; iterations: {dict(sorted(iterations.items()))}; silent for {silences} ms")
    assert sources["fallback"] >= CALLERS
    assert max(iterations) <= ITERATIONS
    assert min(gatherer.silences, default=BUDGET_S) >= BUDGET_S
