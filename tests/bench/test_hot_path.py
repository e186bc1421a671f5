"""What a decision costs from body to body, compared with a FastAPI route with pydantic."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from time import process_time
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from app.admission.admission import Admission
from app.admission.metrics import Metrics
from app.admission.slices import Slices
from app.catalog.snapshot import Snapshot
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.http.access import Access
from app.http.decisions import DecisionRoutes
from app.http.hot import HotRoute
from app.http.intake import Intake
from app.store.port import NONE_KNOWN, Answer, Came, ChargeResult, Fault, StoreError
from tests.packed import packed

BODY = b'{"principal": "alice", "client_id": "etl", "usage": {"requests": 1}}'
ROUNDS, REQUESTS = 7, 2_000
ADMIT = ChargeResult("admit", 0, None, 0, 0.1, 99.0, None, 0, 0.0)
ADMITTED = packed(Answer((ADMIT,)))
App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class InstantStore:
    """A store that admits at once: what is measured is everything else."""

    lost: Callable[[StoreError], None]

    def ask(self, plans: Sequence[Any], done: Came) -> None:
        asyncio.get_running_loop().call_soon(done, [ADMITTED] * len(plans))

    def silent_since(self) -> None: ...

    def give_up(self, error: StoreError) -> None:
        raise AssertionError(f"it is never silent, but {error}")

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> None:
        raise AssertionError(f"nobody empties buckets here, not even {keys}")

    async def examine(self) -> tuple[Fault, ...]:
        return ()

    async def close(self) -> None: ...


SNAPSHOT = Snapshot().apply(
    1, [("request_rate", Entity.of(user=ANY), Quota("request_rate", 100, "sampled_rate", "delay"))]
)


class Usage(BaseModel):
    requests: int


class Question(BaseModel):
    principal: str
    client_id: str
    usage: Usage


class Reply(BaseModel):
    decision: str
    throttle_ms: int


def fastapi_route() -> App:
    api = FastAPI()

    @api.post("/v1/decisions")
    async def decide(question: Question) -> Reply:
        return Reply(decision="admit", throttle_ms=question.usage.requests - 1)

    return api


def hot_route() -> App:
    admission = Admission(
        InstantStore(),
        lambda: SNAPSHOT,
        rules=MatchingRules(),
        secret=lambda: b"s" * 32,
        sequential=False,
        budget_s=1.0,
        metrics=Metrics(),
    )
    access = Access("key", ())
    return HotRoute(DecisionRoutes(admission, access, "store", Slices()).one, access, print, Intake())


async def microseconds(app: App) -> float:
    """Processor time for one request, the least of several rounds."""
    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer key")]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/decisions",
        "raw_path": b"/v1/decisions",
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200

    spent = []
    for _ in range(ROUNDS):
        began = process_time()
        for _ in range(REQUESTS):
            await app(dict(scope), receive, send)
        spent.append((process_time() - began) / REQUESTS * 1e6)
    return min(spent)


@pytest.mark.bench
def test_hot_route_compared_with_a_fastapi_route() -> None:
    """A whole decision, short of the store, against a route that decides nothing."""
    ratios = []
    for _ in range(3):
        plain = asyncio.run(microseconds(fastapi_route()))
        hot = asyncio.run(microseconds(hot_route()))
        ratios.append(plain / hot)
        print(f"FastAPI and pydantic, deciding nothing: {plain:.0f} us; a decision: {hot:.0f} us")
    print(f"ratio {median(ratios):.2f}")
    assert median(ratios) > 1
