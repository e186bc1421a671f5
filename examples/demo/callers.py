"""The callers of the demo and their answers; every number on the screen is counted here."""
# ruff: noqa: INP001  an example is files to read and run, not a package

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import httpx

from examples.demo.arrangement import ADDRESS, GUESTS, PASSWORD, Arrangement

REMEMBERED_S: Final = 13
RATE_OVER_S: Final = 2.0


class Answer(NamedTuple):
    """The outcome ``admitted``, ``throttled`` or ``failed``, its text, and the source of the decision."""

    outcome: str
    words: str
    source: str


Ask = Callable[[], Awaitable[Answer]]


@dataclass(slots=True)
class Caller:
    """A caller that asks at a constant rate, whatever the answers are."""

    name: str
    does: str
    asks_per_s: float
    ask: Ask
    counts: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    recent: deque[tuple[float, Answer]] = field(default_factory=deque)

    @property
    def source(self) -> str | None:
        """The source of the last answer."""
        return self.recent[-1][1].source if self.recent else None

    def rate(self, now: float) -> float:
        """The recent number of answers per second."""
        return sum(at > now - RATE_OVER_S for at, _ in self.recent) / RATE_OVER_S

    async def keep_asking(self) -> None:
        due = time.monotonic()
        while True:
            try:
                answer = await self.ask()
            except httpx.HTTPError as error:
                answer = Answer("failed", type(error).__name__, "none")
            self.take(now := time.monotonic(), answer)
            due = max(due + 1 / self.asks_per_s, now - 1)  # catches up after a slow answer
            await asyncio.sleep(max(0.0, due - now))

    def take(self, now: float, answer: Answer) -> None:
        """Count an answer."""
        self.counts[answer.outcome] += 1
        self.sources[answer.source] += 1
        self.recent.append((now, answer))
        while self.recent[0][0] < now - REMEMBERED_S:
            self.recent.popleft()


async def gather(stack: AsyncExitStack, there: Arrangement) -> list[Caller]:
    """All callers, each with its own connections."""

    async def client(address: str = "127.0.0.1") -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(local_address=address if there.nginx else None)
        return await stack.enter_async_context(httpx.AsyncClient(transport=transport, timeout=10))

    return [
        Caller("alice", "a person", 10, person(await client(), there, "alice")),
        Caller("bob", "larger quota", 10, person(await client(), there, "bob")),
        Caller("mallory", "hammers", 40, person(await client(), there, "mallory")),
        Caller(ADDRESS, "three names", 6, person(await client(ADDRESS), there, *GUESTS, address=ADDRESS)),
        Caller("etl", "Kafka client", 4, producer(await client(), there)),
    ]


def person(http: httpx.AsyncClient, there: Arrangement, *names: str, address: str = "127.0.0.1") -> Ask:
    """Somebody at the site, under one name or several in turn; without nginx we ask as nginx would."""
    name = itertools.cycle(names)

    async def ask() -> Answer:
        if there.nginx:
            return understood(await http.get(there.nginx, auth=(next(name), PASSWORD)))
        who = {"X-Quotagate-Principal": next(name), "X-Quotagate-IP": address}
        return understood(await http.get(f"{there.quotagate}/v1/check", headers=who))

    return ask


def understood(reply: httpx.Response) -> Answer:
    """The answer in a status and its headers; a fallback answer has no remaining amounts."""
    left = [int(number) for number in re.findall(r"r=(\d+)", reply.headers.get("RateLimit", ""))]
    source = "none" if "X-Throttle-Ms" not in reply.headers else "store" if left else "fallback"
    match reply.status_code:
        case 200:
            return Answer("admitted", f"200, {min(left)} left" if left else "200", source)
        case 429:
            return Answer("throttled", f"429, wait {reply.headers.get('Retry-After')} s", source)
        case status:
            return Answer("failed", str(status), source)


def producer(http: httpx.AsyncClient, there: Arrangement) -> Ask:
    """A broker's question for a Kafka client that comes with a new producer id each time."""
    ids = itertools.count(4711)

    async def ask() -> Answer:
        question = {"principal": "etl", "usage": {"producer_ids": [next(ids)]}}
        reply = await http.post(f"{there.quotagate}/v1/decisions", json=question)
        decision = reply.raise_for_status().json()
        if decision["decision"] == "admit":
            return Answer("admitted", "admit", decision["source"])
        return Answer("throttled", f"wait {decision['throttle_ms']} ms", decision["source"])

    return ask
