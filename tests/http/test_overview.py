"""Answers of the overview: shared until the store is read again, and none for callers that have left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from app.admission.overview.overview import DeploymentOverview
from app.admission.overview.series import LONG_MS, MINUTE_MS
from app.http.access.access import Access
from app.http.routes import overview as routes
from app.http.routes.overview import PATH, ShownStore, router
from app.store.samples import COUNTED, NewSamples, ProcessSample, ThrottledBucket, TimedSample
from tests.http.application import KEY, app_with

MINUTE = 29_395_328
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


class Store:
    """Half an hour in which a bucket was throttled, and its clock, which tests move by hand.

    Attributes:
        minute: the newest that has ended.
    """

    def __init__(self) -> None:
        self.minute = MINUTE
        self.clock_s = 0.0
        self._read = MINUTE - LONG_MS // MINUTE_MS - 1

    def clock(self) -> float:
        return self.clock_s

    async def read(self) -> NewSamples:
        busy = [ThrottledBucket("request_rate", "user=alice", 1, 5)]
        counts = [0] * len(COUNTED)
        minutes = [
            TimedSample(at, at * MINUTE_MS, ProcessSample("a", "1", False, False, 0, counts, [0] * 11, busy))
            for at in range(self._read + 1, self.minute + 1)
        ]
        self._read = self.minute
        return NewSamples(self.minute * MINUTE_MS + 10_000, [], minutes, is_all=True)

    def rewind(self) -> None:
        raise AssertionError("the clock did not go back")


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def faults() -> list[str]:
    """The faults of the store."""
    return []


@pytest.fixture
def app(store: Store, faults: list[str], monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    monkeypatch.setattr(routes, "PAUSE_FACTOR", 0.0)
    overview = DeploymentOverview(store, clock=store.clock)

    def stores() -> list[ShownStore]:
        return [ShownStore("a:1", 1, 2, [*faults])]

    return app_with(router(overview, Access(KEY, ()), stores, lambda: 1.0))


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(
        transport=ASGITransport(app), base_url="http://quotagate", headers=AUTHORIZED
    ) as one:
        yield one


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the costly functions were called."""
    found: Counter[str] = Counter()

    def counting(name: str) -> None:
        work = getattr(routes, name)

        def counted(*arguments: Any) -> Any:
            found[name] += 1
            return work(*arguments)

        monkeypatch.setattr(routes, name, counted)

    counting("_document")
    counting("throttled_long")
    return found


async def test_callers_of_the_same_entries_share_an_answer_until_the_store_is_read_again(
    http: AsyncClient, store: Store, calls: Counter[str]
):
    query = f"{PATH}?resolution=minute"
    since_ms = (MINUTE - 3) * MINUTE_MS
    answers = await asyncio.gather(
        *(http.get(query) for _ in range(20)),
        *(http.get(f"{query}&since_ms={since_ms + more}") for more in range(20)),
    )
    assert len({answer.content for answer in answers[:20]}) == 1
    assert {len(answer.json()["series"]) for answer in answers[20:]} == {3}
    assert calls["_document"] == 2
    store.clock_s, store.minute = 1.0, MINUTE + 1
    assert (await http.get(query)).json()["series"][-1]["at_ms"] == (MINUTE + 1) * MINUTE_MS
    assert calls["_document"] == 3


async def test_a_bounded_number_of_answers_is_kept(http: AsyncClient, calls: Counter[str]):
    for _ in range(2):
        for place in range(2 * routes.MOST_KEPT):
            await http.get(f"{PATH}?since_ms={1_000 * place}")
    assert calls["_document"] == 4 * routes.MOST_KEPT


async def test_an_answer_is_not_kept_on_while_the_store_is_not_read(
    http: AsyncClient, faults: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(routes, "KEPT_S", 0.05)
    assert (await http.get(PATH)).json()["stores"][0]["faults"] == []
    faults.append("away")
    async with asyncio.timeout(60):
        shown: list[str] = []
        while not shown:
            await asyncio.sleep(0.01)  # the polling interval
            shown = (await http.get(PATH)).json()["stores"][0]["faults"]


async def test_buckets_throttled_for_long_are_sought_once_a_minute(
    http: AsyncClient, store: Store, calls: Counter[str]
):
    for second in range(30):
        store.clock_s = 2.0 * second
        store.minute = MINUTE + second // 15
        answer = await http.get(f"{PATH}?since_ms={1_000 * second}")
        assert [each["bucket"] for each in answer.json()["throttled_long"]] == ["user=alice"]
    assert calls == {"_document": 30, "throttled_long": 2}


async def test_nothing_is_made_for_a_caller_that_has_left(app: FastAPI, calls: Counter[str]):
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "GET",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in AUTHORIZED.items()],
    }
    await app(scope, receive, send)
    assert not calls
