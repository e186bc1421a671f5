"""The hot routes: asks in, decisions out, in plain ASGI."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import structlog
from starlette.types import Receive, Scope, Send

from app.admission.errors import CallerGoneError, OverloadedError
from app.admission.port import Decider
from app.admission.slices import Slices, Work, step
from app.domain.ask import Ask
from app.domain.caller import Caller
from app.domain.errors import OutOfBoundsError
from app.domain.grant import Grant
from app.http.access import Access, turn_of
from app.http.intake import BodyBytes, Intake
from app.http.problems import ProblemError, overloaded, retry_ms
from app.http.wire import MAX_BODY, Clock, decode_ask, decode_batch, encode_decision, encode_decisions

ONE: Final = "/v1/decisions"
BATCH: Final = "/v1/decisions:batch"

IS_GONE: Final = "quotagate.is_gone"
"""The key in a scope of the function that returns whether the caller has gone (``app.http.protocol``)."""

log = structlog.get_logger("quotagate.http")


class DecisionRoutes:
    """Turns bodies of asks into bodies of decisions.

    Args:
        slices: runs long work in slices, so that it does not block the event loop.
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
        except OutOfBoundsError as outside:
            raise self._access.shared(grant, outside) from None
        return encode_decision(decision)

    async def batch(self, body: bytes, grant: Grant, caller: Caller) -> bytes:
        """Decide a batch of asks, in order, if all of them are allowed."""
        asks = await self._slices.run(caller.turn, self._allowed_batch(body, grant))
        try:
            decisions = await self._admission.decide(asks, caller)
        except OutOfBoundsError as outside:
            raise self._access.shared(grant, outside, f"/asks/{outside.place}") from None
        return await self._slices.run(caller.turn, encode_decisions(decisions))

    def _allowed_batch(self, body: bytes, grant: Grant) -> Work[list[Ask]]:
        asks = yield from decode_batch(body, self._clock)
        return [self._allowed(ask, grant, f"/asks/{place}") for place, ask in enumerate(asks)]

    def _allowed(self, ask: Ask, grant: Grant, field: str) -> Ask:
        accounts = ask.cluster_action or ask.mode in ("record", "refund")
        self._access.demand(grant, "account" if accounts else "decide")
        return ask if grant.is_unrestricted else self._access.confine(grant, ask, field)


class HttpAnswer(NamedTuple):
    """An answer that is not a problem."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class PlainRoute(abc.ABC):
    """One path in plain ASGI.

    Args:
        shed: called with the cause whenever a request is shed.
    """

    def __init__(self, access: Access, shed: Callable[[str], None]) -> None:
        self._access = access
        self._shed = shed

    @abc.abstractmethod
    async def answered(self, scope: Scope, receive: Receive) -> HttpAnswer | None:
        """Return the answer, or None if the caller disconnected before the request was complete.

        Raises:
            ProblemError: the error to answer with.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self.answered(scope, receive)
        except ProblemError as problem:
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
    """A path that takes POST, with a body, and answers with a body."""

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

    async def answered(self, scope: Scope, receive: Receive) -> HttpAnswer | None:
        """Return the answer to the whole body."""
        grant = self._access.asker(scope)
        if "account" not in grant.scopes:  # the body decides whether it is needed
            self._access.demand(grant, "decide")
        if scope["method"] != "POST":
            raise ProblemError(405, "This path takes POST.", headers={"Allow": "POST"})
        turn = turn_of(grant, scope)
        with self._intake.request(turn) as taken:
            body = await _read(scope, receive, taken)
            if body is None:
                return None
            answer = await self._answer(body, grant, sender(grant, turn, scope))
        length = b"%d" % len(answer)
        return HttpAnswer(200, [(b"content-type", b"application/json"), (b"content-length", length)], answer)


async def refuse(problem: ProblemError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a problem, perhaps before the body was read.

    The server discards the rest of the body, so the connection can be reused. But a caller that waits for
    ``100 Continue`` may or may not send the body now, so its connection is closed.
    """
    if problem.wait_s:
        await asyncio.sleep(problem.wait_s)
    response = problem.response()
    if any(name == b"expect" for name, _ in scope["headers"]):
        response.headers["connection"] = "close"
    await response(scope, receive, send)


def failure() -> ProblemError:
    """Return the 500 for an unexpected error, which says nothing of its cause."""
    return ProblemError(500, "The request failed; the log has the reason.")


def sender(grant: Grant, turn: str, scope: Scope) -> Caller:
    """Return the sender of a complete request."""
    is_gone = scope.get(IS_GONE, _is_there)
    return Caller(grant.name, turn, grant.bound_to, asyncio.get_running_loop().time(), is_gone)


def _is_there() -> bool:
    """Return False: a server that does not report disconnects is taken to have none."""
    return False


async def _read(scope: Scope, receive: Receive, taken: BodyBytes) -> bytes | None:
    """Return the whole body, or None if the caller disconnected.

    Raises:
        ProblemError: 413 as soon as the body is known to be too large.
        OverloadedError: too many bytes are waiting already.
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


def _too_large() -> ProblemError:
    return ProblemError(413, f"The body is larger than {MAX_BODY:,} bytes.")
