"""The client for programs with threads."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar, Unpack

import httpx

from quotagate_client.asks import Ask
from quotagate_client.check import Check, CheckHeaders
from quotagate_client.dialogues import Dialogue, Dialogues, Outcome, Send, Sleep
from quotagate_client.proxies import proxies_for
from quotagate_client.results import Decision
from quotagate_client.retries import Retries

P = ParamSpec("P")
T = TypeVar("T")


class Client:
    """Asks Quotagate; threads may share it.

    Args:
        url: of a node, or of the balancer before several.
        key: with the scope ``decide``, where one is needed.
        retry: which failed asks are sent again.
        timeout_s: of one call; a busy node answers late, after up to its queue's 2 s by default.
        jitter: a wait is made longer by up to this part of it, never shorter.
        check_headers: as the service's settings name them.
        http: a client of the caller's own, for certificates or proxies; the caller closes it. Without it the
            environment's proxies are used, but never for a node on this machine.
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
        http: httpx.Client | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        dice: random.Random | None = None,
    ) -> None:
        self._dialogues = Dialogues(
            retry or Retries(), jitter, check_headers or CheckHeaders(), clock, dice or random.SystemRandom()
        )
        self._url = url.rstrip("/")
        self._key = {b"Authorization": f"Bearer {key}".encode()} if key else {}
        self._own = http is None
        self._http = http or httpx.Client(timeout=timeout_s, **proxies_for(url))
        self._sleep = sleep

    def decide(self, **ask: Unpack[Ask]) -> Decision:
        """Ask once, whatever the answer says.

        Raises:
            Problem: the ask was refused as an error; ``errors`` names its fields.
            Overloaded: Quotagate had too much to do, and still had when it was asked again.
            Unreachable: no answer came.
        """
        return self._carry_out(self._dialogues.decide(ask))

    def decide_batch(self, asks: Iterable[Ask]) -> list[Decision]:
        """Ask for many, in order; more than one call takes are cut into several.

        Raises:
            BatchCutShort: a later call failed; the error has the decisions of the earlier ones.
        """
        return self._carry_out(self._dialogues.decide_batch(asks))

    def check(
        self,
        *,
        principal: str | None = None,
        client_id: str | None = None,
        ip: str | None = None,
        **query: str | float,
    ) -> Check:
        """Ask as a gateway does; ``query`` says what is used, one request if nothing."""
        return self._carry_out(self._dialogues.check(principal, client_id, ip, query))

    def acquire(self, *, within_s: float | None = None, **ask: Unpack[Ask]) -> Decision:
        """Ask until the work may be done, sleeping as long as each answer says.

        A delay is the caller's to hold: `acquired` does that by itself.

        Raises:
            Rejected: it will never pass.
            DeadlinePassed: it would, but not within ``within_s``; raised without sleeping.
            Overloaded: Quotagate had too much to do each time, or until later than ``within_s``.
        """
        return self._carry_out(self._dialogues.acquire(ask, within_s))

    @contextmanager
    def acquired(self, *, within_s: float | None = None, **ask: Unpack[Ask]) -> Iterator[Decision]:
        """Do the work inside, once it may be done; leaving waits out a delay."""
        decision = self.acquire(within_s=within_s, **ask)
        decided_s = self._dialogues.clock()
        try:
            yield decision
        except Exception:
            self._carry_out(self._dialogues.hold(decision, decided_s))
            raise
        self._carry_out(self._dialogues.hold(decision, decided_s))

    def limited(
        self, ask: Ask | Callable[..., Ask], *, within_s: float | None = None
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Let each call of a function be work that is asked for.

        Args:
            ask: the ask, or what makes it from the arguments of the call.
            within_s: as `acquire` has it, for each call.
        """

        def decorate(work: Callable[P, T]) -> Callable[P, T]:
            @functools.wraps(work)
            def limited_work(*args: P.args, **kwargs: P.kwargs) -> T:
                with self.acquired(within_s=within_s, **(ask(*args, **kwargs) if callable(ask) else ask)):
                    return work(*args, **kwargs)

            return limited_work

        return decorate

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
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _carry_out(self, dialogue: Dialogue[T]) -> T:
        outcome: Outcome | None = None
        while True:
            try:
                step = dialogue.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = self._step(step)

    def _step(self, step: Send | Sleep) -> Outcome | None:
        if isinstance(step, Sleep):
            self._sleep(step.seconds)
            return None
        try:
            return self._http.request(
                step.method,
                self._url + step.path,
                content=step.content,
                headers={**self._key, **step.headers},
                params=step.params,
            )
        except httpx.RequestError as error:
            return error
