"""The client for programs with an event loop; what it does is what `Client` does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar, Unpack, cast

import httpx

from quotagate_client.asks import Ask, Usage
from quotagate_client.check import Check, CheckHeaders
from quotagate_client.dialogues import Dialogue, Dialogues, Outcome, Send, Sleep
from quotagate_client.leases import GRANTED, LEASE_MS, Holder, LeasedNames
from quotagate_client.proxies import proxies_for
from quotagate_client.results import Decision
from quotagate_client.retries import Retries

P = ParamSpec("P")
T = TypeVar("T")


class AsyncClient:
    """Asks Quotagate; the tasks of one event loop may share it. Its arguments are those of `Client`."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        key: str | None = None,
        retry: Retries | None = None,
        timeout_s: float = 5.0,
        jitter: float = 0.1,
        check_headers: CheckHeaders | None = None,
        http: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        dice: random.Random | None = None,
    ) -> None:
        self._dialogues = Dialogues(
            retry or Retries(), jitter, check_headers or CheckHeaders(), clock, dice or random.SystemRandom()
        )
        self._url = url.rstrip("/")
        self._key = {b"Authorization": f"Bearer {key}".encode()} if key else {}
        self._own = http is None
        self._http = http or httpx.AsyncClient(timeout=timeout_s, **proxies_for(url))
        self._sleep = sleep

    async def decide(self, **ask: Unpack[Ask]) -> Decision:
        """Ask once, whatever the answer says."""
        return await self.carry_out(self._dialogues.decide(ask))

    async def decide_batch(self, asks: Iterable[Ask]) -> list[Decision]:
        """Ask for many, in order."""
        return await self.carry_out(self._dialogues.decide_batch(asks))

    async def check(
        self,
        *,
        principal: str | None = None,
        client_id: str | None = None,
        ip: str | None = None,
        **query: str | float,
    ) -> Check:
        """Ask as a gateway does."""
        return await self.carry_out(self._dialogues.check(principal, client_id, ip, query))

    async def acquire(self, *, within_s: float | None = None, **ask: Unpack[Ask]) -> Decision:
        """Ask until the work may be done."""
        return await self.carry_out(self._dialogues.acquire(ask, within_s))

    @asynccontextmanager
    async def acquired(self, *, within_s: float | None = None, **ask: Unpack[Ask]) -> AsyncIterator[Decision]:
        """Do the work inside, once it may be done; leaving waits out a delay."""
        decision = await self.acquire(within_s=within_s, **ask)
        decided_s = self._dialogues.clock()
        try:
            yield decision
        except Exception:
            await self.carry_out(self._dialogues.hold(decision, decided_s))
            raise
        await self.carry_out(self._dialogues.hold(decision, decided_s))

    def limited(
        self, ask: Ask | Callable[..., Ask], *, within_s: float | None = None
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
        """Let each call of a coroutine function be work that is asked for."""

        def decorate(work: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
            @functools.wraps(work)
            async def limited_work(*args: P.args, **kwargs: P.kwargs) -> T:
                wanted = ask(*args, **kwargs) if callable(ask) else ask
                async with self.acquired(within_s=within_s, **wanted):
                    return await work(*args, **kwargs)

            return limited_work

        return decorate

    def leased(self, *, usage: Usage, lease_ms: int = LEASE_MS, **names: Unpack[LeasedNames]) -> AsyncLeased:
        """Decide work without asking for each piece; the arguments are those of `Client.leased`."""
        return AsyncLeased(self, self._dialogues, names, usage, lease_ms)

    @property
    def throttle_time_avg(self) -> float | None:
        """The mean throttle time of all answers in the last minute, in ms; None without any."""
        return self._dialogues.throttle_times.average_ms()

    @property
    def throttle_time_max(self) -> int | None:
        """The longest throttle time in the last minute, in ms; None without any."""
        return self._dialogues.throttle_times.longest_ms()

    async def aclose(self) -> None:
        """Close the connections, unless they are the caller's."""
        if self._own:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def carry_out(self, dialogue: Dialogue[T]) -> T:
        """Do what a dialogue asks for, and return its result."""
        outcome: Outcome | None = None
        while True:
            try:
                step = dialogue.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = await self._step(step)

    async def _step(self, step: Send | Sleep) -> Outcome | None:
        if isinstance(step, Sleep):
            await self._sleep(step.seconds)
            return None
        try:
            return await self._http.request(
                step.method,
                self._url + step.path,
                content=step.content,
                headers={**self._key, **step.headers},
                params=step.params,
            )
        except httpx.RequestError as error:
            return error


class AsyncLeased:
    """Work that is decided in this program, from leases; the tasks of one event loop may share it.

    A task of its own asks for the next lease when 80 % of one are spent. `take` needs no ``await``.
    """

    def __init__(
        self, client: AsyncClient, dialogues: Dialogues, names: LeasedNames, usage: Usage, lease_ms: int
    ) -> None:
        self._client = client
        self._woken = asyncio.Event()
        self._calling = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._holder = Holder(dialogues, names, cast("Mapping[str, float]", usage), lease_ms, self._woken.set)
        self.take = self._holder.take

    @property
    def calls(self) -> int:
        """How many calls to the service were made for this work."""
        return self._holder.calls

    async def decide(self, units: float = 1.0) -> Decision:
        """Decide on units of work: at once from the lease in hand, else by a call to the service."""
        if self.take(units):
            return GRANTED
        async with self._calling:
            return await self._client.carry_out(self._holder.decide(units))

    async def aclose(self) -> None:
        """Give back what is left."""
        async with self._calling:  # so that no answer with a lease is lost
            if self._task is not None:
                self._task.cancel()
            await self._client.carry_out(self._holder.close())

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._renew(), name="quotagate leases")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _renew(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._holder.due_s()):
                    await self._woken.wait()
            self._woken.clear()
            async with self._calling:
                await self._client.carry_out(self._holder.renew())
