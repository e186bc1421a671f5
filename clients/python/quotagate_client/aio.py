"""The client for programs with an event loop; it behaves like `Client`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar, Unpack, cast

import httpx

from quotagate_client.asks import Ask, Usage
from quotagate_client.check import Check, CheckHeaders
from quotagate_client.dialogues import Dialogue, Dialogues, Outcome, Send, Sleep
from quotagate_client.leases import GRANTED, LEASE_MS, Holder, LeasedNames
from quotagate_client.owners import Owned, lent, loop_here
from quotagate_client.proxies import proxies_for
from quotagate_client.results import Decision
from quotagate_client.retries import Retries

P = ParamSpec("P")
T = TypeVar("T")


class AsyncClient:
    """Asks Quotagate; tasks may share it. It takes the arguments of `Client`.

    Each event loop, and after a fork each process, has its own connections and leases. A function that is
    passed as ``http`` is called for each of them.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        key: str | None = None,
        retry: Retries | None = None,
        timeout_s: float = 5.0,
        jitter: float = 0.1,
        check_headers: CheckHeaders | None = None,
        http: httpx.AsyncClient | Callable[[], httpx.AsyncClient] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        dice: random.Random | None = None,
    ) -> None:
        self._dialogues = Dialogues(
            retry or Retries(), jitter, check_headers or CheckHeaders(), clock, dice or random.SystemRandom()
        )
        self._url = url.rstrip("/")
        self._key = {b"Authorization": f"Bearer {key}".encode()} if key else {}
        self._own = not isinstance(http, httpx.AsyncClient)
        if isinstance(http, httpx.AsyncClient):
            self._connections = Owned(functools.partial(_Connections, lent(http)))
        else:
            own = http or functools.partial(httpx.AsyncClient, timeout=timeout_s, **proxies_for(url))
            self._connections = Owned(functools.partial(_Connections, own))
        self._sleep = sleep

    async def decide(self, **ask: Unpack[Ask]) -> Decision:
        """Ask once; return the decision, even if it refuses."""
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
        """Make each call of a coroutine function wait until it is admitted."""

        def decorate(work: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
            @functools.wraps(work)
            async def limited_work(*args: P.args, **kwargs: P.kwargs) -> T:
                wanted = ask(*args, **kwargs) if callable(ask) else ask
                async with self.acquired(within_s=within_s, **wanted):
                    return await work(*args, **kwargs)

            return limited_work

        return decorate

    def leased(self, *, usage: Usage, lease_ms: int = LEASE_MS, **names: Unpack[LeasedNames]) -> AsyncLeased:
        """Decide work without asking for each piece; the arguments are as in `Client.leased`."""
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
        """Close the connections of this event loop, unless they are the caller's."""
        connections = self._connections.get(loop_here())
        if self._own and connections is not None:
            await connections.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def carry_out(self, dialogue: Dialogue[T]) -> T:
        """Carry out a dialogue, and return its result."""
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
        connections = self._connections[loop_here()]
        if self._own:
            await connections.end_with_loop()
        try:
            return await connections.http.request(
                step.method,
                self._url + step.path,
                content=step.content,
                headers={**self._key, **step.headers},
                params=step.params,
            )
        except httpx.RequestError as error:
            return error


class _Connections:
    """The connections of one event loop."""

    def __init__(self, make: Callable[[], httpx.AsyncClient]) -> None:
        self.http = make()
        self._end = self._ending()
        self._is_ending = False

    async def end_with_loop(self) -> None:
        """Have the connections closed with the event loop at the latest: `asyncio.run` closes generators."""
        if not self._is_ending:
            self._is_ending = True
            await anext(self._end)

    async def _ending(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            await self.http.aclose()


class AsyncLeased:
    """Work that is decided in this program, from leases; tasks may share it.

    A task of its own asks for the next lease when 80 % of one are spent. `take` needs no ``await``. Each
    event loop, and after a fork each process, has its own leases and task. Leases of a closed event loop are
    spent no more.
    """

    def __init__(
        self, client: AsyncClient, dialogues: Dialogues, names: LeasedNames, usage: Usage, lease_ms: int
    ) -> None:
        self._client = client
        self._is_open = False
        hold = functools.partial(Holder, dialogues, names, cast("Mapping[str, float]", usage), lease_ms)
        hold()  # refuses wrong arguments at once
        self._supply = Owned(lambda: _AsyncSupply(client, hold))

    @property
    def calls(self) -> int:
        """How many calls to the service this process made for this work, in event loops that are open."""
        return sum(supply.holder.calls for supply in self._supply.made())

    def take(self, units: float = 1.0) -> bool:
        """Spend units of the lease in hand; False if it has too few, or is over. Never waits.

        Outside of an event loop, for instance in a thread, the leases of the newest loop are spent.
        """
        try:
            supply = self._supply[loop_here()]
        except RuntimeError:
            return any(supply.take_from_thread(units) for supply in self._supply.made()[:1])
        if supply.holder.take(units):
            return True
        if self._is_open:
            supply.start()
        return False

    async def decide(self, units: float = 1.0) -> Decision:
        """Decide on units of work: at once from the lease in hand, else by a call to the service."""
        if self.take(units):
            return GRANTED
        supply = self._supply[loop_here()]
        async with supply.calling:
            return await self._client.carry_out(supply.holder.decide(units))

    async def aclose(self) -> None:
        """Give back the unspent units of this event loop's leases."""
        self._is_open = False
        supply = self._supply.get(loop_here())
        if supply is not None:
            await supply.aclose()

    async def __aenter__(self) -> Self:
        self._is_open = True
        self._supply[loop_here()].start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _AsyncSupply:
    """The leases of one event loop, and the task that renews them."""

    def __init__(self, client: AsyncClient, hold: Callable[..., Holder]) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.calling = asyncio.Lock()
        self.holder = hold(wake=self._wake)

    def start(self) -> None:
        """Start the task, unless it runs already."""
        if self._task is None:
            self._task = self._loop.create_task(self._renew(), name="quotagate leases")

    def take_from_thread(self, units: float) -> bool:
        """Spend units of the lease in hand, if the event loop is still open."""
        return not self._loop.is_closed() and self.holder.take(units)

    async def aclose(self) -> None:
        """End the task, and give back the unspent units."""
        async with self.calling:  # so that no answer with a lease is lost
            if self._task is not None:
                self._task.cancel()
            await self._client.carry_out(self.holder.close())

    def _wake(self) -> None:
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:  # `take` was called outside of an event loop
            is_here = False
        if is_here:
            self._woken.set()
        else:
            with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._woken.set)

    async def _renew(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.holder.due_s()):
                    await self._woken.wait()
            self._woken.clear()
            async with self.calling:
                await self._client.carry_out(self.holder.renew())
