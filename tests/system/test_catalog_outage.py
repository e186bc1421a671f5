"""While the catalog's database is away, decisions continue, and administration is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import pytest

from app.catalog.serial import POLL_S
from app.catalog.sql import ANSWER_S
from tests.line import line
from tests.polls import AT_MOST, follows_within_a_second
from tests.postgres import Postgres, started
from tests.report import say
from tests.service import ADMIN_KEY, Service, running
from tests.waiting import until

CALLERS: Final = 20
BURST: Final = 200
TOKENS: Final = {"limit": 1e-9, "algorithm": "token_bucket", "burst": BURST, "enforcement": "deny"}
"""No token is refilled within a day: of all asks of one principal, exactly the burst is admitted."""
BETWEEN_S: Final = 0.005
"""The pause between two asks of a caller, and between two checks of a condition."""
SLACK_S: Final = 10.0
"""The time that a busy machine may add to a bound."""
WRITES: Final[dict[str, Any]] = {
    "PUT": {"json": {"request_rate": 6}},
    "PATCH": {"json": {"request_rate": 7}},
    "DELETE": {},
}


@dataclass
class Callers:
    """Callers that ask a node continuously as a principal named after the phase, and the answers by phase."""

    node: Service
    phase: str = "before"
    answers: defaultdict[str, Counter[tuple[int, str, str]]] = field(
        default_factory=lambda: defaultdict(Counter)
    )

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[Callers]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._call()) for _ in range(CALLERS)]
            yield self
            for task in tasks:
                task.cancel()

    async def exact(self, phase: str) -> None:
        """Begin a phase, and wait until enough asks show that exactly the burst is admitted."""
        self.phase = phase
        answers = self.answers[phase]
        await until(lambda: sum(answers.values()) >= 2 * BURST, every_s=BETWEEN_S)
        assert answers[200, "admit", "store"] == BURST
        assert answers.keys() == {(200, "admit", "store"), (200, "throttle", "store")}

    async def _call(self) -> None:
        async with line(self.node.address) as own:
            while True:
                phase = self.phase
                status, body = await own.ask({"principal": phase, "usage": {"mutations": 1}})
                self.answers[phase][status, body.get("decision", "none"), body.get("source", "none")] += 1
                await asyncio.sleep(BETWEEN_S)


@contextlib.asynccontextmanager
async def administration(node: Service) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=node.url, headers=headers, timeout=60, trust_env=False) as http:
        yield http


async def health(http: httpx.AsyncClient) -> tuple[int, str]:
    """The HTTP status of readiness, and the state of the catalog in it."""
    answer = await http.get("/health/ready")
    return answer.status_code, answer.json()["catalog"]


async def healthy(http: httpx.AsyncClient, catalog: str, within_s: float = 60.0) -> float:
    """Wait until readiness, always 200, shows this state of the catalog; return the seconds it took."""
    began = time.monotonic()
    async with asyncio.timeout(within_s):
        while (found := await health(http)) != (200, catalog):
            assert found[0] == 200
            await asyncio.sleep(BETWEEN_S)
    return time.monotonic() - began


async def refused(http: httpx.AsyncClient, *methods: str) -> dict[str, float]:
    """Send requests at once, each of which must get 503 with Retry-After; return the seconds of each."""

    async def one(method: str) -> float:
        began = time.monotonic()
        answer = await http.request(method, "/v1/quotas/user=late", **WRITES.get(method, {}))
        took = time.monotonic() - began
        assert answer.status_code == 503, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["status"] == 503
        return took

    return dict(zip(methods, await asyncio.gather(*map(one, methods)), strict=True))


async def changed(by: httpx.AsyncClient, seen_by: httpx.AsyncClient, limit: int) -> int:
    """Change a quota at one node; return the polls from the answer until it is in force at the other."""
    answer = await by.put("/v1/quotas/user=moved", json={"request_rate": limit})
    assert answer.is_success, answer.text
    ask = {"principal": "moved", "usage": {"requests": 0}, "mode": "peek", "detail": True}
    for polls in range(1, AT_MOST + 1):
        await asyncio.sleep(POLL_S)  # the polls that are counted
        decision = (await seen_by.post("/v1/decisions", json=ask)).json()
        if limit in [quota["limit"] for quota in decision["quotas"] if quota["quota"] == "request_rate"]:
            return polls
    raise AssertionError(f"it did not come true within {AT_MOST} polls")


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for one test, which may kill it."""
    server = started()
    yield server
    server.remove()


async def test_decisions_continue_while_postgresql_hangs_or_is_killed(postgres: Postgres):
    """Two nodes, with callers at one of them throughout."""
    url = postgres.database()
    with (
        running(database_url=url) as node,
        running(database_url=url, store_url=node.store_url) as second,
    ):
        node.put("user=*", controller_mutation_rate=TOKENS)
        async with (
            administration(node) as http,
            administration(second) as other,
            Callers(node).calling() as callers,
        ):
            for client in (http, other):
                await healthy(client, "ok")
            await callers.exact("before")

            held = postgres.hold()
            try:
                hung = await refused(http, "GET", *WRITES)
                await healthy(http, "away")
                await callers.exact("hangs")
            finally:
                for pid in held:
                    os.kill(pid, signal.SIGCONT)
            thawed = await healthy(http, "ok")
            await healthy(other, "ok")
            followed = [await changed(other, http, 10)]
            await callers.exact("went on")

            postgres.kill()
            killed = await refused(http, "GET", *WRITES)
            await healthy(http, "away")
            await callers.exact("killed")
            postgres.start()
            back = await healthy(http, "ok")
            await healthy(other, "ok")
            followed += [await changed(other, http, 11), await changed(http, other, 12)]
            await callers.exact("back")
            late = await http.get("/v1/quotas/user=late")
        assert node.process.poll() is None
        assert "Traceback" not in node.logged()
    say(f"hangs: {shown(hung)}; killed: {shown(killed)}; back after {thawed:.2f} and {back:.2f} s")
    assert late.status_code == 404, "refused changes are not made later"
    assert max(hung.values()) < ANSWER_S + SLACK_S
    follows_within_a_second("a change is in force at the other node", followed)


def shown(seconds: dict[str, float]) -> str:
    return ", ".join(f"{method} 503 in {took:.2f} s" for method, took in seconds.items())


async def test_locked_sqlite_file_is_waited_for_at_most_a_bounded_time():
    with running() as node:
        node.put("user=*", controller_mutation_rate=TOKENS)
        async with administration(node) as http, Callers(node).calling() as callers:
            await callers.exact("before")
            file = node.database_url.removeprefix("sqlite:///")
            with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as locking:
                locking.execute("BEGIN EXCLUSIVE")
                locked = await refused(http, *WRITES)
                assert (await http.get("/v1/quotas/user=*")).status_code == 200, "reads are possible"
                await callers.exact("locked")
                locking.execute("ROLLBACK")
            await healthy(http, "ok")
            assert (await http.get("/v1/quotas/user=late")).status_code == 404
            await changed(http, http, 10)
            await callers.exact("free")
        assert "Traceback" not in node.logged()
    say(f"locked: {shown(locked)}")
    assert max(locked.values()) < ANSWER_S + SLACK_S
