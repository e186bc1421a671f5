"""The protocol with Quotagate, step by step and without I/O: both clients carry out these steps.

A dialogue is a generator. It yields a request to send or a time to sleep, receives the outcome, and
returns its result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import httpx

from quotagate_client import asks, check, results, retries
from quotagate_client.asks import Ask
from quotagate_client.check import Check, CheckHeaders
from quotagate_client.errors import (
    BatchCutShort,
    DeadlinePassed,
    QuotagateError,
    Rejected,
    Unreachable,
    overloaded_for_s,
    problem,
)
from quotagate_client.owners import Owned, here
from quotagate_client.results import Decision, Grant
from quotagate_client.retries import Retries
from quotagate_client.throttle_times import ThrottleTimes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Send:
    """A request to send; its outcome is a response or an error."""

    method: str
    path: str
    content: bytes | None = None
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sleep:
    """A time to sleep."""

    seconds: float


Outcome = httpx.Response | httpx.RequestError
Dialogue = Generator[Send | Sleep, Outcome | None, T]


def carried_out(dialogue: Dialogue[T], do: Callable[[Send | Sleep], Outcome | None]) -> T:
    """Carry out a dialogue, and return its result.

    Args:
        do: carries out one step, and returns its outcome.
    """
    outcome: Outcome | None = None
    while True:
        try:
            step = dialogue.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result
        outcome = do(step)


JSON: Final = {b"Content-Type": b"application/json"}


class Dialogues:
    """The dialogues of one client, and the throttle times of their answers."""

    def __init__(
        self,
        retry: Retries,
        jitter: float,
        check_headers: CheckHeaders,
        clock: Callable[[], float],
        dice: random.Random,
    ) -> None:
        if jitter < 0 or not math.isfinite(jitter):
            raise ValueError("jitter must be 0 or more: who asks too early is refused again")
        self.clock = clock
        self._throttle_times = Owned(lambda: ThrottleTimes(clock))
        self._retry = retry
        self._jitter = jitter
        self._check_headers = check_headers
        self._dice = dice
        self._made_in = here()

    @property
    def throttle_times(self) -> ThrottleTimes:
        """The throttle times of the answers that this process got."""
        return self._throttle_times[here()]

    def decide(self, ask: Ask, give_up: float = math.inf) -> Dialogue[Decision]:
        """Ask once, with retries if the ask is shed or lost, but never sleep past ``give_up``."""
        ask = self._with_id(ask)
        sent = Send("POST", "/v1/decisions", asks.encode(ask), JSON)
        answer = yield from self._call(sent, safe=_once(ask), give_up=give_up)
        if answer.status_code != httpx.codes.OK:
            raise problem(answer)
        return self._counted(results.one(answer), ask)

    def decide_batch(self, many: Iterable[Ask]) -> Dialogue[list[Decision]]:
        """Ask for all in order, in as many calls as the size limits require."""
        wanted = [self._with_id(ask) for ask in many]
        safe = all(_once(ask) for ask in wanted)
        decided: list[Decision] = []
        for batch in asks.batches(wanted):
            sent = Send("POST", "/v1/decisions:batch", asks.joined(batch), JSON)
            try:
                answer = yield from self._call(sent, safe=safe)
                if answer.status_code != httpx.codes.OK:
                    raise problem(answer, len(decided))
                found = results.many(answer, len(batch))
            except QuotagateError as error:
                if not decided:
                    raise
                raise BatchCutShort(decided, error) from error
            for decision in found:
                self._counted(decision, wanted[len(decided)])
                decided.append(decision)
        return decided

    def check(
        self,
        principal: str | None,
        client_id: str | None,
        ip: str | None,
        query: Mapping[str, str | float],
    ) -> Dialogue[Check]:
        """Ask as a gateway does; there is no id, so only a call that was never sent is repeated."""
        headers = self._check_headers.of(principal, client_id, ip)
        params = {name: str(value) for name, value in query.items()}
        answer = yield from self._call(Send("GET", "/v1/check", None, headers, params), safe=False)
        if answer.status_code not in (httpx.codes.OK, check.REFUSED):
            raise problem(answer)
        checked = check.read(answer)
        self.throttle_times.record(checked.decision.throttle_ms)
        return checked

    def acquire(self, ask: Ask, within_s: float | None) -> Dialogue[Decision]:
        """Ask, sleep, and ask again, until the work may be done; do not sleep past the deadline."""
        give_up = math.inf if within_s is None else self.clock() + within_s
        while True:
            decision = yield from self.decide(ask, give_up)
            if decision.may_go_ahead:
                return decision
            if decision.decision == "reject":
                raise Rejected(decision)
            wait = self.jittered(decision.throttle_ms / 1000)
            if self.clock() + wait > give_up:
                raise DeadlinePassed(decision)
            yield Sleep(wait)

    def lease(self, body: bytes) -> Dialogue[Grant]:
        """Ask for a lease, and settle others; a call that fails is not repeated."""
        sent = Send("POST", "/v1/leases", body, JSON)
        answer = yield from self._call(sent, safe=False, give_up=self.clock())
        if answer.status_code != httpx.codes.OK:
            raise problem(answer)
        grant = results.grant(answer)
        self.throttle_times.record(grant.decision.throttle_ms)
        return grant

    def hold(self, decision: Decision, decided_s: float) -> Dialogue[None]:
        """After the work, wait out the rest of a delay, which counts from the decision."""
        if decision.decision == "delay":
            left = self.jittered(decision.throttle_ms / 1000) - (self.clock() - decided_s)
            if left > 0:
                yield Sleep(left)

    def _call(self, sent: Send, *, safe: bool, give_up: float = math.inf) -> Dialogue[httpx.Response]:
        """Send a call, and repeat it if allowed, but never sleep past ``give_up``."""
        began = self.clock()
        failed = 0
        maybe_charged = False
        while True:
            outcome = yield sent
            assert outcome is not None
            failed += 1
            now = self.clock()
            after_s = overloaded_for_s(outcome) if isinstance(outcome, httpx.Response) else None
            if after_s is not None:  # nothing was charged, so it needs no id
                wait = self.jittered(after_s)
                if self._retry.may_wait(failed, now - began, wait) and now + wait <= give_up:
                    yield Sleep(wait)
                    continue
                assert isinstance(outcome, httpx.Response)
                return outcome
            maybe_charged |= not isinstance(outcome, retries.NEVER_SENT)
            if retries.may_repeat(outcome, safe=safe):
                pause = self._retry.wait_s(failed, now - began, self._dice)
                if pause is not None and now + pause <= give_up:
                    yield Sleep(pause)
                    continue
            if isinstance(outcome, httpx.Response):
                return outcome
            raise Unreachable(outcome, maybe_charged=maybe_charged) from outcome

    def _with_id(self, ask: Ask) -> Ask:
        """Return the ask with an id, so that it can be sent again."""
        if self._retry.times == 0 or "id" in ask or ask.get("mode") == "peek":
            return ask
        # A child of a fork that drew its parent's id would get its parent's decision, and charge nothing.
        dice = self._dice if here() is self._made_in else random.SystemRandom()
        return {**ask, "id": f"{dice.getrandbits(128):032x}"}

    def _counted(self, decision: Decision, ask: Ask) -> Decision:
        if ask.get("mode") != "peek":
            self.throttle_times.record(decision.throttle_ms)
        return decision

    def jittered(self, seconds: float, jitter: float | None = None) -> float:
        """Return a wait of at least this long, plus jitter, so that callers do not all return at once."""
        return seconds * (1 + (self._jitter if jitter is None else jitter) * self._dice.random())


def _once(ask: Ask) -> bool:
    """Whether an ask is charged at most once however often it is sent."""
    return "id" in ask or ask.get("mode") == "peek"
