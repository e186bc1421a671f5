"""The hot routes: asks in, decisions out, as plain ASGI in front of everything else."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

import structlog
from starlette.types import Receive, Scope, Send

from app.admission.caller_time import CallerTime
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision
from app.domain.grant import Grant
from app.domain.quota import Quota
from app.http.access import Access, caller_of
from app.http.problems import Problem
from app.http.wire import MAX_BODY, Clock, decode_ask, decode_batch, encode_decision, encode_decisions

ONE: Final = "/v1/decisions"
BATCH: Final = "/v1/decisions:batch"

log = structlog.get_logger("quotagate.http")


class Decider(Protocol):
    """Who decides; ``app.admission`` does."""

    async def decide(self, asks: Sequence[Ask], caller: Caller = ANYONE) -> list[Decision]:
        """The decisions, in the order of the asks."""

    async def decide_in_full(self, ask: Ask, caller: Caller = ANYONE) -> tuple[Decision, tuple[Quota, ...]]:
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

    async def decide_in_full(self, ask: Ask, caller: Caller = ANYONE) -> tuple[Decision, tuple[Quota, ...]]:
        """Decide an ask that wants detail and has no id."""
        self.time.begin(ask.at_ms or 0)
        decided = await self._admission.decide_in_full(ask, caller)
        self.time.seen(ask.at_ms or 0)
        return decided


class Decisions:
    """Bodies of asks to bodies of decisions, whatever carries them."""

    def __init__(self, admission: Decider, access: Access, clock: Clock) -> None:
        self._admission = admission
        self._access = access
        self._clock = clock

    async def one(self, body: bytes, grant: Grant, caller: Caller) -> bytes:
        """Decide one ask."""
        ask = decode_ask(body, self._clock)
        ask = self._allowed(ask, grant, "")
        (decision,) = await self._admission.decide((ask,), caller)
        return encode_decision(decision)

    async def batch(self, body: bytes, grant: Grant, caller: Caller) -> bytes:
        """Decide a batch of them, in order, if all of them are allowed."""
        asks = decode_batch(body, self._clock)
        allowed = [self._allowed(ask, grant, f"/asks/{place}") for place, ask in enumerate(asks)]
        return encode_decisions(await self._admission.decide(allowed, caller))

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
    """One path in plain ASGI, from the first byte of a request to the last of its answer."""

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
        except Exception:
            log.exception("a request failed", path=scope["path"])
            await refuse(failure(), scope, receive, send)
            return
        if answer is not None:
            await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            await send({"type": "http.response.body", "body": answer.body})


class HotRoute(PlainRoute):
    """A path that takes POST and answers a body with a body."""

    def __init__(self, answer: Callable[[bytes, Grant, Caller], Awaitable[bytes]], access: Access) -> None:
        self._answer = answer
        self._access = access

    async def answered(self, scope: Scope, receive: Receive) -> Answer | None:
        """The answer to the whole body."""
        grant = self._access.caller(scope)
        if "account" not in grant.scopes:  # which is enough for some asks: their bodies say
            self._access.demand(grant, "decide")
        if scope["method"] != "POST":
            raise Problem(405, "This path takes POST.", headers={"Allow": "POST"})
        body = await _read(scope, receive)
        if body is None:
            return None
        answer = await self._answer(body, grant, caller_of(grant, scope))
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


async def _read(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body, or None if the caller went away.

    Raises:
        Problem: 413 as soon as it is known to be too large.
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
        if not message.get("more_body", False):
            return bytes(body)


def _too_large() -> Problem:
    return Problem(413, f"The body is larger than {MAX_BODY:,} bytes.")
