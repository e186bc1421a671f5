"""Tests both hand-made clients in one way: a call runs on the blocking client or on the asynchronous one."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from quotagate_client import AsyncClient, Client

Kind = Literal["sync", "async"]


@dataclass
class Time:
    """A clock that only moves when something sleeps."""

    now: float = 1_000.0
    slept: list[float] = field(default_factory=list)
    while_asleep: Callable[[], None] = lambda: None

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.while_asleep()

    async def async_sleep(self, seconds: float) -> None:
        self.sleep(seconds)


class Caller:
    """A client of either kind, with its own `Time` and a seeded random generator."""

    def __init__(self, kind: Kind, runner: asyncio.Runner, url: str, **options: Any) -> None:
        self.time = Time()
        self.kind = kind
        self._runner = runner
        both: dict[str, Any] = {"clock": self.time.clock, "dice": random.Random(7)} | options
        self.client: Client | AsyncClient = (
            Client(url, sleep=self.time.sleep, **both)
            if kind == "sync"
            else AsyncClient(url, sleep=self.time.async_sleep, **both)
        )

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the client."""
        return self.done(getattr(self.client, name)(*args, **kwargs))

    def done(self, made: Any) -> Any:
        """Return a result, after awaiting it if it is awaitable."""
        return self._runner.run(made) if inspect.iscoroutine(made) else made

    def work(self, do: Callable[..., Any], **ask: Any) -> Any:
        """Run a function inside `acquired`."""
        if isinstance(self.client, Client):
            with self.client.acquired(**ask) as decision:
                return do(decision)
        return self._runner.run(_work(self.client, do, ask))

    def limited(self, do: Callable[..., Any], ask: Any, **options: Any) -> Callable[..., Any]:
        """Decorate with `limited`."""
        if isinstance(self.client, Client):
            return self.client.limited(ask, **options)(do)

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return do(*args, **kwargs)

        decorated = self.client.limited(ask, **options)(awaited)
        return lambda *args, **kwargs: self.done(decorated(*args, **kwargs))

    def close(self) -> None:
        self("close" if self.kind == "sync" else "aclose")


async def _work(client: AsyncClient, do: Callable[..., Any], ask: Any) -> Any:
    async with client.acquired(**ask) as decision:
        return do(decision)


@contextmanager
def callers(kind: Kind) -> Iterator[Callable[..., Caller]]:
    """Makes clients of one kind, and closes them."""
    made: list[Caller] = []
    with asyncio.Runner() as runner:

        def make(url: str, **options: Any) -> Caller:
            made.append(Caller(kind, runner, url, **options))
            return made[-1]

        yield make
        for caller in made:
            caller.close()
