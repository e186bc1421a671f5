"""A limiter that a team writes in an afternoon: FastAPI, pydantic, redis-py, and one GCRA script.

It is written with care: one round trip for each ask, all or nothing over several limits, the store's clock,
hiredis, a script that is sent once, asks of a batch in one pipeline.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import redis.asyncio
from fastapi import FastAPI
from pydantic import BaseModel, Field

from tests.bench.peers.serving import serve

GCRA: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fresh, wait = {}, 0
for i, key in ipairs(KEYS) do
  local interval, burst, cost = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
  local tat = math.max(tonumber(redis.call('GET', key) or now), now) + interval * cost
  wait = math.max(wait, tat - burst * interval - now)
  fresh[i] = tat
end
if wait > 0 then return math.ceil(wait / 1000) end
for i, key in ipairs(KEYS) do
  redis.call('SET', key, string.format('%.3f', fresh[i]), 'PX', math.ceil((fresh[i] - now) / 1000) + 1)
end
return 0
"""
"""KEYS are buckets; ARGV has for each the microseconds of one unit, the burst, and the cost. Returns the wait
in ms, or 0."""

GENEROUS: Final = (1e-3, 1e9)
TIGHT: Final = (60e6, 1.0)
"""Microseconds of one unit, and the burst: a limit that nobody reaches, and one a minute (`fetch_bytes`)."""


class Ask(BaseModel):
    """One question, as far as this program understands it."""

    principal: str = Field(min_length=1, max_length=512)
    usage: dict[Literal["requests", "produce_bytes", "fetch_bytes"], int] = Field(min_length=1)


class Asks(BaseModel):
    """A batch."""

    asks: list[Ask] = Field(min_length=1, max_length=1_000)


class Answer(BaseModel):
    """One decision."""

    decision: Literal["admit", "throttle"]
    throttle_ms: int


class Answers(BaseModel):
    """The decisions on a batch."""

    decisions: list[Answer]


class Limiter:
    """Asks the store."""

    def __init__(self, url: str) -> None:
        self._store = redis.asyncio.Redis.from_url(url)
        self._script = self._store.register_script(GCRA)

    async def decide(self, ask: Ask) -> Answer:
        return _answer(await self._script(*_call(ask)))

    async def decide_all(self, asks: list[Ask]) -> list[Answer]:
        async with self._store.pipeline(transaction=False) as pipe:
            for ask in asks:
                await self._script(*_call(ask), client=pipe)
            return [_answer(wait_ms) for wait_ms in await pipe.execute()]

    async def close(self) -> None:
        await self._store.aclose()


def _call(ask: Ask) -> tuple[list[str], list[Any]]:
    keys = [f"{ask.principal}:{name}" for name in ask.usage]
    limits = [TIGHT if name == "fetch_bytes" else GENEROUS for name in ask.usage]
    costs = zip(limits, ask.usage.values(), strict=True)
    return keys, [part for limit, cost in costs for part in (*limit, cost)]


def _answer(wait_ms: int) -> Answer:
    return Answer(decision="throttle" if wait_ms else "admit", throttle_ms=wait_ms)


def application(url: str) -> FastAPI:
    """The application, for a store."""
    limiter = Limiter(url)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await limiter.close()

    api = FastAPI(lifespan=lifespan)

    @api.post("/v1/decisions")
    async def decide(ask: Ask) -> Answer:
        return await limiter.decide(ask)

    @api.post("/v1/decisions:batch")
    async def decide_all(batch: Asks) -> Answers:
        return Answers(decisions=await limiter.decide_all(batch.asks))

    return api


if __name__ == "__main__":
    serve(application(sys.argv[2]))
