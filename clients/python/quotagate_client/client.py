"""The client for programs with threads."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar, Unpack, cast

import httpx

from quotagate_client.asks import Ask, Usage
from quotagate_client.check import Check, CheckHeaders
from quotagate_client.dialogues import Dialogue, Dialogues, Outcome, Send, Sleep, carried_out
from quotagate_client.leases import GRANTED, LEASE_MS, Holder, LeasedNames
from quotagate_client.owners import Owned, here, lent
from quotagate_client.proxies import proxies_for
from quotagate_client.results import Decision
from quotagate_client.retries import Retries

P = ParamSpec("P")
T = TypeVar("T")


class Client:
    """Asks Quotagate; threads may share it, and after a fork each process has its own connections and leases.

    Args:
        url: of a node, or of the balancer before several.
        key: an API key with the scope ``decide``, if the nodes need one.
        retry: which failed asks are sent again.
        timeout_s: of one call; a busy node may answer only after its queue's time, by default 2 s.
        jitter: the largest part by which a wait is lengthened; no wait is shortened.
        check_headers: as the service's settings name them.
        http: a client of the caller's own, for certificates or proxies; the caller closes it. A function that
            makes one is called in each process that needs it, and `close` closes its result. Without ``http``
            the environment's proxies are used, but never for a node on this machine.
        clock, sleep, dice: time and randomness, for tests.
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
        http: httpx.Client | Callable[[], httpx.Client] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        dice: random.Random | None = None,
    ) -> None:
        self._dialogues = Dialogues(
            retry or Retries(), jitter, check_headers or CheckHeaders(), clock, dice or random.SystemRandom()
        )
        self._url = url.rstrip("/")
        self._key = {b"Authorization": f"Bearer {key}".encode()} if key else {}
        self._own = not isinstance(http, httpx.Client)
        if isinstance(http, httpx.Client):
            self._http = Owned(lent(http))
        else:
            self._http = Owned(http or functools.partial(httpx.Client, timeout=timeout_s, **proxies_for(url)))
        self._sleep = sleep

    def decide(self, **ask: Unpack[Ask]) -> Decision:
        """Ask once; return the decision, even if it refuses.

        Raises:
            Problem: the ask was refused as an error; ``errors`` names its fields.
            Overloaded: Quotagate was overloaded, even when asked again.
            Unreachable: no answer came.
        """
        return self.carry_out(self._dialogues.decide(ask))

    def decide_batch(self, asks: Iterable[Ask]) -> list[Decision]:
        """Ask for many, in order; a large batch is cut into several calls.

        Raises:
            BatchCutShort: a later call failed; the error has the decisions of the earlier calls.
        """
        return self.carry_out(self._dialogues.decide_batch(asks))

    def check(
        self,
        *,
        principal: str | None = None,
        client_id: str | None = None,
        ip: str | None = None,
        **query: str | float,
    ) -> Check:
        """Ask as a gateway does; ``query`` gives the usage, by default one request."""
        return self.carry_out(self._dialogues.check(principal, client_id, ip, query))

    def acquire(self, *, within_s: float | None = None, **ask: Unpack[Ask]) -> Decision:
        """Ask until the work may be done, sleeping for each answer's ``throttle_ms``.

        The caller must wait out a delay; `acquired` does so itself.

        Raises:
            Rejected: the ask will never pass.
            DeadlinePassed: the ask would pass, but not within ``within_s``; raised without sleeping.
            Overloaded: Quotagate was overloaded at each try, or asked for a wait beyond ``within_s``.
        """
        return self.carry_out(self._dialogues.acquire(ask, within_s))

    @contextmanager
    def acquired(self, *, within_s: float | None = None, **ask: Unpack[Ask]) -> Iterator[Decision]:
        """Do the work inside, once it may be done; leaving waits out a delay."""
        decision = self.acquire(within_s=within_s, **ask)
        decided_s = self._dialogues.clock()
        try:
            yield decision
        except Exception:
            self.carry_out(self._dialogues.hold(decision, decided_s))
            raise
        self.carry_out(self._dialogues.hold(decision, decided_s))

    def limited(
        self, ask: Ask | Callable[..., Ask], *, within_s: float | None = None
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Make each call of a function wait until it is admitted.

        Args:
            ask: the ask, or a function that makes it from the call's arguments.
            within_s: as in `acquire`, for each call.
        """

        def decorate(work: Callable[P, T]) -> Callable[P, T]:
            @functools.wraps(work)
            def limited_work(*args: P.args, **kwargs: P.kwargs) -> T:
                with self.acquired(within_s=within_s, **(ask(*args, **kwargs) if callable(ask) else ask)):
                    return work(*args, **kwargs)

            return limited_work

        return decorate

    def leased(self, *, usage: Usage, lease_ms: int = LEASE_MS, **names: Unpack[LeasedNames]) -> Leased:
        """Decide work without asking for each piece; use it in a ``with``, which gives back unspent units.

        Args:
            usage: of one unit of work, such as ``{"produce_bytes": 1}``; no ``producer_ids``.
            lease_ms: how long a lease lasts; longer ones need fewer calls and are shared more slowly.
            names: the names of an ask, such as ``principal``. The client's key needs the scope ``account``.
        """
        return Leased(self, self._dialogues, names, usage, lease_ms)

    @property
    def throttle_time_avg(self) -> float | None:
        """The mean throttle time of all answers in the last minute, in ms; None without any."""
        return self._dialogues.throttle_times.average_ms()

    @property
    def throttle_time_max(self) -> int | None:
        """The longest throttle time in the last minute, in ms; None without any."""
        return self._dialogues.throttle_times.longest_ms()

    def close(self) -> None:
        """Close the connections, unless they are the caller's."""
        if self._own:
            for http in self._http.made():
                http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def carry_out(self, dialogue: Dialogue[T]) -> T:
        """Carry out a dialogue, and return its result."""
        return carried_out(dialogue, self._step)

    def _step(self, step: Send | Sleep) -> Outcome | None:
        if isinstance(step, Sleep):
            self._sleep(step.seconds)
            return None
        try:
            return self._http[here()].request(
                step.method,
                self._url + step.path,
                content=step.content,
                headers={**self._key, **step.headers},
                params=step.params,
            )
        except httpx.RequestError as error:
            return error


class Leased:
    """Work that is decided in this program, from leases; threads may share it.

    A thread of its own asks for the next lease when 80 % of one are spent. After a fork the child has neither
    the leases nor the thread of its parent, and gets its own when it first decides.
    """

    def __init__(
        self, client: Client, dialogues: Dialogues, names: LeasedNames, usage: Usage, lease_ms: int
    ) -> None:
        self._client = client
        self._is_open = False
        per_unit = cast("Mapping[str, float]", usage)
        self._supply = Owned(
            lambda: _Supply(client, functools.partial(Holder, dialogues, names, per_unit, lease_ms))
        )
        self._supply[here()]  # refuses wrong arguments at once

    @property
    def calls(self) -> int:
        """How many calls to the service this process made for this work."""
        return sum(supply.holder.calls for supply in self._supply.made())

    def take(self, units: float = 1.0) -> bool:
        """Spend units of the lease in hand; False if it has too few, or is over. Never waits."""
        supply = self._supply[here()]
        if supply.holder.take(units):
            return True
        if self._is_open:
            supply.start()
        return False

    def decide(self, units: float = 1.0) -> Decision:
        """Decide on units of work: at once from the lease in hand, else by a call to the service.

        Raises:
            Problem, Unreachable: no lease could be had, and the service could not be asked directly.
        """
        if self.take(units):
            return GRANTED
        supply = self._supply[here()]
        with supply.calling:
            return self._client.carry_out(supply.holder.decide(units))

    def close(self) -> None:
        """Give back the unspent units of this process's leases."""
        self._is_open = False
        for supply in self._supply.made():
            supply.close()

    def __enter__(self) -> Self:
        self._is_open = True
        self._supply[here()].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Supply:
    """The leases of one process, and the thread that renews them."""

    def __init__(self, client: Client, hold: Callable[[Callable[[], None]], Holder]) -> None:
        self._client = client
        self._woken = threading.Event()
        self._starting = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.calling = threading.Lock()
        self.holder = hold(self._woken.set)

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if not self._thread:
            with self._starting:
                if not (self._closed or self._thread):
                    thread = threading.Thread(target=self._renew, name="quotagate leases", daemon=True)
                    with contextlib.suppress(RuntimeError):  # at interpreter exit: no leases, direct asks
                        thread.start()
                        self._thread = thread

    def close(self) -> None:
        """End the thread, and give back the unspent units."""
        with self._starting:
            self._closed = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
        with self.calling:
            self._client.carry_out(self.holder.close())

    def _renew(self) -> None:
        while not self._closed:
            self._woken.wait(self.holder.due_s())
            self._woken.clear()
            if not self._closed:
                with self.calling:
                    self._client.carry_out(self.holder.renew())
