"""A store behind sentinels: a node follows a failover under load; outage and lost charges are measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, Final

import pytest

from app.store.client import client_of
from app.store.loading import Loader
from app.store.port import StoreError
from app.store.redis import RedisStore
from tests.line import line
from tests.report import say
from tests.sentinels import NAME, PASSWORD, SENTINEL_PASSWORD, Watched, watched
from tests.service import Service, eventually, running

CALLERS: Final = 20
BURST: Final = 1_000_000
BETWEEN_S: Final = 0.002
ANSWERS: Final = 500

QUOTA: Final = {"limit": 1e-9, "algorithm": "token_bucket", "burst": BURST, "enforcement": "deny"}
"""It never runs out and never refills: missing tokens were charged."""


class Callers:
    """Callers of one principal, until stopped.

    Attributes:
        answers: the source of each answer, and when it came.
    """

    def __init__(self, node: Service) -> None:
        self.node = node
        self.answers: list[tuple[str, float]] = []
        self.stopping = False

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._call())
            try:
                yield
            finally:
                self.stopping = True

    async def _call(self) -> None:
        async with line(self.node.address) as own:
            while not self.stopping:
                status, body = await own.ask({"principal": "alice", "usage": {"requests": 1}})
                if status == 200:
                    self.answers.append((body["source"], time.monotonic()))
                await asyncio.sleep(BETWEEN_S)

    async def more(self, source: str, answers: int = ANSWERS) -> None:
        """Wait until so many more answers came from a source."""
        start, found = len(self.answers), 0
        async with asyncio.timeout(120):
            while found < answers:
                await asyncio.sleep(BETWEEN_S)
                found = sum(each == source for each, _ in self.answers[start:])


def test_failover_is_followed_under_load() -> None:
    with watched() as servers, running(store_url=servers.url) as node:
        node.put("user=alice", request_rate=QUOTA)
        callers = Callers(node)
        asyncio.run(_fail_over(servers, callers))
        charged = sum(source == "store" for source, _ in callers.answers)
        by_policy = sum(source == "fallback" for source, _ in callers.answers)
        (bucket,) = node.http.get("/v1/buckets?bucket=user%3Dalice&quota=request_rate").json()["buckets"]
        kept = BURST - round(bucket["tokens"])
        away_s = _longest_gap([at for source, at in callers.answers if source == "store"])
        say(
            f"failover by sentinel: away for {away_s:.1f} s; {charged:,} asks charged, {by_policy:,} answered"
            f" by policy; {charged - kept:,} charges lost, as their replication was under way"
        )
        assert by_policy > 0
        assert 0 < kept <= charged + by_policy, "a call that was late may be counted once"
        eventually(lambda: node.http.get("/health/ready").json()["store"] == "ok")


async def _fail_over(servers: Watched, callers: Callers) -> None:
    async with callers.calling():
        await callers.more("store")
        servers.stores[0].kill()
        await callers.more("fallback", answers=1)
        await callers.more("store")


def _longest_gap(moments: list[float]) -> float:
    return max(after - before for before, after in pairwise(moments))


def test_every_client_finds_the_primary_and_closes_all_connections() -> None:
    """Also the clients of workers and of the backfill; wrong credentials and names are errors."""
    with watched() as servers:
        asyncio.run(_use(servers.url))
        for wrong in (servers.url.replace(PASSWORD, "wrong"), servers.url.replace(NAME, "another")):
            with pytest.raises(StoreError):
                asyncio.run(_use(wrong))
        with pytest.raises(StoreError):
            asyncio.run(_use(servers.url.replace(SENTINEL_PASSWORD, "wrong")))


async def _use(url: str) -> None:
    store, loader, client = RedisStore(url, logged=True), Loader(url, "test"), client_of(url, 5.0)
    try:
        faults = await store.examine()
        assert faults == ()
        assert await store.forget([b"nothing"]) is not None
        assert await loader.done() == 0
        any_client: Any = client
        assert await any_client.execute_command("ROLE")
    finally:
        await store.close()
        await loader.close()
        await client.aclose()
