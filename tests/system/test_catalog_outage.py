"""The catalog's database gone: decisions go on as if nothing were, administration waits and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import pytest

from app.catalog.sql import ANSWER_S
from tests.line import line
from tests.postgres import Postgres, started
from tests.said import say
from tests.service import ADMIN_KEY, Service, running, slowest_but_one

CALLERS: Final = 20
BURST: Final = 200
TOKENS: Final = {"limit": 1e-9, "algorithm": "token_bucket", "burst": BURST, "enforcement": "deny"}
"""None comes back within a day: of all that is asked in one name, exactly the burst is admitted."""
BETWEEN_S: Final = 0.005
"""Between two asks of a caller, and between two looks at what is waited for."""
SLACK_S: Final = 10.0
"""What a busy machine may add to a bound."""
WRITES: Final[dict[str, Any]] = {
    "PUT": {"json": {"request_rate": 6}},
    "PATCH": {"json": {"request_rate": 7}},
    "DELETE": {},
}


@dataclass
class Callers:
    """Callers that ask a node without end, in the name of the present phase; what each phase was told."""

    node: Service
    phase: str = "before"
    told: defaultdict[str, Counter[tuple[int, str, str]]] = field(
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
        """From now on in this phase's name, until it is clear that no more is admitted than was to be."""
        self.phase = phase
        told = self.told[phase]
        await becomes(lambda: sum(told.values()) >= 2 * BURST, within_s=60)
        assert told[200, "admit", "store"] == BURST
        assert told.keys() == {(200, "admit", "store"), (200, "throttle", "store")}

    async def _call(self) -> None:
        async with line(self.node.address) as own:
            while True:
                phase = self.phase
                status, said = await own.ask({"principal": phase, "usage": {"mutations": 1}})
                self.told[phase][status, said.get("decision", "none"), said.get("source", "none")] += 1
                await asyncio.sleep(BETWEEN_S)


async def becomes(true: Callable[[], object], within_s: float = 60.0) -> float:
    """Wait until something is true; the seconds it took."""
    began = time.monotonic()
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - the truth is elsewhere
            await asyncio.sleep(BETWEEN_S)
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def administration(node: Service) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=node.url, headers=headers, timeout=60, trust_env=False) as http:
        yield http


async def health(http: httpx.AsyncClient) -> tuple[int, str]:
    """The status of readiness, and how it finds the catalog."""
    answer = await http.get("/health/ready")
    return answer.status_code, answer.json()["catalog"]


async def healthy(http: httpx.AsyncClient, catalog: str, within_s: float = 60.0) -> float:
    """Wait until readiness says so of the catalog; it is 200 all the time. The seconds it took."""
    began = time.monotonic()
    async with asyncio.timeout(within_s):
        while (found := await health(http)) != (200, catalog):
            assert found[0] == 200
            await asyncio.sleep(BETWEEN_S)
    return time.monotonic() - began


async def refused(http: httpx.AsyncClient, *methods: str) -> dict[str, float]:
    """Several kinds of administration at once, each answered 503 and when to ask again; seconds each took."""

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


async def changed(by: httpx.AsyncClient, seen_by: httpx.AsyncClient, limit: int) -> float:
    """A change made at one node is in force at another; the seconds from its answer until then."""
    answer = await by.put("/v1/quotas/user=moved", json={"request_rate": limit})
    assert answer.is_success, answer.text
    began = time.monotonic()
    ask = {"principal": "moved", "usage": {"requests": 0}, "mode": "peek", "detail": True}
    limits: list[int] = []
    while limit not in limits:
        decision = (await seen_by.post("/v1/decisions", json=ask)).json()
        limits = [quota["limit"] for quota in decision["quotas"] if quota["quota"] == "request_rate"]
        assert time.monotonic() - began < 20
    return time.monotonic() - began


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL of its own, to be killed."""
    server = started()
    yield server
    server.remove()


async def test_decisions_do_not_notice_that_postgresql_hangs_or_is_killed(postgres: Postgres):
    """Two nodes, and all the time callers at one of them."""
    url = postgres.database()
    with (
        running(database_url=url) as node,
        running(database_url=url, store_url=node.store_url) as beside,
    ):
        node.put("user=*", controller_mutation_rate=TOKENS)
        async with (
            administration(node) as http,
            administration(beside) as other,
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
        assert "Traceback" not in node.said()
    say(f"hangs: {shown(hung)}; killed: {shown(killed)}; follows after {max(followed):.2f} s;")
    say(f"back after {thawed:.2f} and {back:.2f} s")
    assert late.status_code == 404, "what was refused was not done later"
    assert max(hung.values()) < ANSWER_S + SLACK_S
    assert slowest_but_one(followed) < 1


def shown(seconds: dict[str, float]) -> str:
    return ", ".join(f"{method} 503 in {took:.2f} s" for method, took in seconds.items())


async def test_a_locked_sqlite_file_is_waited_for_so_long_and_no_longer():
    with running() as node:
        node.put("user=*", controller_mutation_rate=TOKENS)
        async with administration(node) as http, Callers(node).calling() as callers:
            await callers.exact("before")
            file = node.database_url.removeprefix("sqlite:///")
            with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as locking:
                locking.execute("BEGIN EXCLUSIVE")
                locked = await refused(http, *WRITES)
                assert (await http.get("/v1/quotas/user=*")).status_code == 200, "a reader is in no one's way"
                await callers.exact("locked")
                locking.execute("ROLLBACK")
            await healthy(http, "ok")
            assert (await http.get("/v1/quotas/user=late")).status_code == 404
            await changed(http, http, 10)
            await callers.exact("free")
        assert "Traceback" not in node.said()
    say(f"locked: {shown(locked)}")
    assert max(locked.values()) < ANSWER_S + SLACK_S
