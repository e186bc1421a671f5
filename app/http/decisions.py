"""The hot routes: asks in, decisions out, as plain ASGI in front of everything else."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

import structlog
from starlette.types import Receive, Scope, Send

from app.admission.caller_time import CallerTime
from app.admission.queue import CallerGoneError, OverloadedError
from app.admission.slices import Slices, Work, step
from app.domain.ask import Ask
from app.domain.bounds import OutOfBounds
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision
from app.domain.grant import Grant
from app.domain.quota import Quota
from app.http.access import Access, turn_of
from app.http.intake import Intake, Taken
from app.http.problems import Problem, overloaded, retry_ms
from app.http.wire import MAX_BODY, Clock, decode_ask, decode_batch, encode_decision, encode_decisions

ONE: Final = "/v1/decisions"
BATCH: Final = "/v1/decisions:batch"

IS_GONE: Final = "quotagate.is_gone"
"""Where a scope has what says whether the caller has hung up; ``app.http.protocol`` puts it there."""

log = structlog.get_logger("quotagate.http")


class Decider(Protocol):
    """Who decides; ``app.admission`` does."""

    async def decide(self, asks: Sequence[Ask], caller: Caller = ANYONE) -> list[Decision]:
        """The decisions, in the order of the asks."""

    async def decide_in_full(
        self, ask: Ask, caller: Caller = ANYONE, within_s: float | None = None
    ) -> tuple[Decision, tuple[Quota, ...]]:
        """The decision on an ask that wants detail and has no id; and the quotas, as its verdicts stand."""


class CallerClock:
    """Admission under the caller's clock, which stands at the newest time that any caller told.

    Args:
        time: takes note of it.
    """

    def __init__(self, admission: Decider, time: CallerTime | None = None) -> None:
        self._admission = admission
        self.time = time or CallerTime()

    def now_ms(self) -> int:
        """The newest time seen; 0 before there was any."""
        return self.time.newest_ms

    async def decide(self, asks: Sequence[Ask], caller: Caller = ANYONE) -> list[Decision]:
        """Decide asks in order."""
        self.time.begin(asks[0].at_ms or 0)
        decisions = await self._admission.decide(asks, caller)
        self.time.seen(max(ask.at_ms or 0 for ask in asks))
        return decisions

    async def decide_in_full(
        self, ask: Ask, caller: Caller = ANYONE, within_s: float | None = None
    ) -> tuple[Decision, tuple[Quota, ...]]:
        """Decide an ask that wants detail and has no id."""
        self.time.begin(ask.at_ms or 0)
        decided = await self._admission.decide_in_full(ask, caller, within_s)
        self.time.seen(ask.at_ms or 0)
        return decided


class Decisions:
    """Bodies of asks to bodies of decisions, whatever carries them.

    Args:
        slices: does what would hold the event loop for long.
    """

    def __init__(self, admission: Decider, access: Access, clock: Clock, slices: Slices) -> None:
        self._admission = admission
        self._access = access
        self._clock = clock
        self._slices = slices

    async def one(self, body: bytes, grant: Grant, caller: Caller) -> bytes:
        """Decide one ask."""
        ask = await self._slices.run(caller.turn, step(lambda: decode_ask(body, self._clock)))
        try:
            (decision,) = await self._admission.decide((self._allowed(ask, grant, ""),), caller)
        except OutOfBounds as outside:
            raise self._access.shared(grant, outside) from None
        return encode_decision(decision)

    async def batch(self, body: bytes, grant: Grant, caller: Caller) -> bytes:
        """Decide a batch of them, in order, if all of them are allowed."""
        asks = await self._slices.run(caller.turn, self._allowed_batch(body, grant))
        try:
            decisions = await self._admission.decide(asks, caller)
        except OutOfBounds as outside:
            raise self._access.shared(grant, outside, f"/asks/{outside.place}") from None
        return await self._slices.run(caller.turn, encode_decisions(decisions))

    def _allowed_batch(self, body: bytes, grant: Grant) -> Work[list[Ask]]:
        asks = yield from decode_batch(body, self._clock)
        return [self._allowed(ask, grant, f"/asks/{place}") for place, ask in enumerate(asks)]

    def _allowed(self, ask: Ask, grant: Grant, field: str) -> Ask:
        accounts = ask.cluster_action or ask.mode in ("record", "refund")
        self._access.demand(grant, "account" if accounts else "decide")
        return ask if grant.is_plain else self._access.confine(grant, ask, field)


class Answer(NamedTuple):
    """An answer that is no problem."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class PlainRoute(abc.ABC):
    """One path in plain ASGI, from the first byte of a request to the last of its answer.

    Args:
        shed: is told why, whenever a request is not taken in.
    """

    def __init__(self, access: Access, shed: Callable[[str], None]) -> None:
        self._access = access
        self._shed = shed

    @abc.abstractmethod
    async def answered(self, scope: Scope, receive: Receive) -> Answer | None:
        """The answer, or None if the caller went away before the question was out.

        Raises:
            Problem: what is answered instead.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self.answered(scope, receive)
        except Problem as problem:
            await refuse(problem, scope, receive, send)
            return
        except OverloadedError as error:
            self._shed(error.cause)
            await refuse(overloaded(retry_ms()), scope, receive, send)
            return
        except CallerGoneError:
            return
        except Exception:
            log.exception("a request failed", path=scope["path"])
            await refuse(failure(), scope, receive, send)
            return
        if answer is not None:
            await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            await send({"type": "http.response.body", "body": answer.body})


class HotRoute(PlainRoute):
    """A path that takes POST and answers a body with a body."""

    def __init__(
        self,
        answer: Callable[[bytes, Grant, Caller], Awaitable[bytes]],
        access: Access,
        shed: Callable[[str], None],
        intake: Intake,
    ) -> None:
        super().__init__(access, shed)
        self._answer = answer
        self._intake = intake

    async def answered(self, scope: Scope, receive: Receive) -> Answer | None:
        """The answer to the whole body."""
        grant = self._access.asker(scope)
        if "account" not in grant.scopes:  # which is enough for some asks: their bodies say
            self._access.demand(grant, "decide")
        if scope["method"] != "POST":
            raise Problem(405, "This path takes POST.", headers={"Allow": "POST"})
        turn = turn_of(grant, scope)
        with self._intake.request(turn) as taken:
            body = await _read(scope, receive, taken)
            if body is None:
                return None
            answer = await self._answer(body, grant, sender(grant, turn, scope))
        length = b"%d" % len(answer)
        return Answer(200, [(b"content-type", b"application/json"), (b"content-length", length)], answer)


async def refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a problem, perhaps before the body was read.

    The server throws away what still comes of that body, so the connection stays good; but a caller that
    waits for ``100 Continue`` may or may not send it now, and only closing ends the doubt.
    """
    if problem.wait_s:
        await asyncio.sleep(problem.wait_s)
    response = problem.response()
    if any(name == b"expect" for name, _ in scope["headers"]):
        response.headers["connection"] = "close"
    await response(scope, receive, send)


def failure() -> Problem:
    """What a caller is told of an error of ours."""
    return Problem(500, "The request failed for a reason that is in the log.")


def sender(grant: Grant, turn: str, scope: Scope) -> Caller:
    """The sender of a request that has come whole."""
    is_gone = scope.get(IS_GONE, _is_there)
    return Caller(grant.name, turn, grant.bound_to, asyncio.get_running_loop().time(), is_gone)


def _is_there() -> bool:
    """Nobody knows whether the sender has gone, so it has not."""
    return False


async def _read(scope: Scope, receive: Receive, taken: Taken) -> bytes | None:
    """The whole body, or None if the caller went away.

    Raises:
        Problem: 413 as soon as it is known to be too large.
        OverloadedError: too many bytes wait already.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > MAX_BODY:
            raise _too_large()
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message["body"]
        if len(body) > MAX_BODY:
            raise _too_large()
        taken.add(len(message["body"]))
        if not message.get("more_body", False):
            return bytes(body)


def _too_large() -> Problem:
    return Problem(413, f"The body is larger than {MAX_BODY:,} bytes.")
