"""Hot routes: paths in front of FastAPI, whose answers are bytes that a protocol can send.

The head of a request identifies its sender; the answer is made when all of the request is there. Both
protocols call the same methods: the hot one itself (``hot_protocol.py``), uvicorn's as ASGI.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final

import structlog
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from app.admission.errors import CallerGoneError, OverloadedError
from app.admission.plan import PlannedAsk
from app.http.access.access import Access, IsGone, Sender
from app.http.head import EXPECT, RequestHead, head_of
from app.http.problems import PROBLEM_JSON, ProblemError, overloaded, retry_ms
from app.http.server.intake import BodyBytes, Intake
from app.http.wire import MAX_BODY

IS_GONE: Final = "quotagate.is_gone"
"""The key in a scope of the function that returns whether the caller has gone (``protocol.py``)."""

log = structlog.get_logger("quotagate.http")

Fields = Sequence[tuple[bytes, bytes]]

UNCOUNTED: Final = 1_024
"""Bodies up to this size, when answered synchronously, are not counted as waiting; there must still be room
for them. A connection takes more memory than such a body, and has one at a time."""


class HttpAnswer(Struct, gc=False):
    """An answer, still without the fields that a server adds."""

    status: int
    headers: Fields
    body: bytes


Result = PlannedAsk | HttpAnswer | Exception
"""The result of a request; ``HotRoute.finish`` makes the answer of it."""
Then = Callable[[Result], None]


JSON: Final[Fields] = ((b"content-type", b"application/json"),)


class HotRoute(abc.ABC):
    """A hot route, served as ASGI.

    Args:
        shed: called with the cause whenever a request is shed.
        ordinary: the methods of requests that the hot protocol may answer, and the largest body of each.

    Attributes:
        access: identifies the senders.
    """

    def __init__(self, access: Access, shed: Callable[[str], None], ordinary: Mapping[bytes, int]) -> None:
        self.access = access
        self.ordinary = ordinary
        self._shed = shed

    @abc.abstractmethod
    def identify(self, head: RequestHead) -> Sender:
        """Return the sender of a request, by its head.

        Raises:
            ProblemError: the head alone is reason enough to refuse the request.
        """

    @abc.abstractmethod
    async def respond(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone) -> HttpAnswer:
        """Answer a whole request.

        Raises:
            ProblemError: the error to answer with.
            OverloadedError, CallerGoneError: nothing was charged.
        """

    @abc.abstractmethod
    async def answered(self, scope: Scope, receive: Receive) -> HttpAnswer | None:
        """Return the answer, or None if the caller disconnected before the request was complete.

        Raises:
            ProblemError, OverloadedError, CallerGoneError: as ``identify`` and ``respond``.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self.reply(scope, receive)
        if answer is not None:
            await _send(answer, send)

    async def reply(self, scope: Scope, receive: Receive) -> HttpAnswer | None:
        """Return the answer, which may report an error; None if the caller has gone."""
        return await self._caught(self.answered(scope, receive), head_of(scope))

    async def reply_whole(
        self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone
    ) -> HttpAnswer | None:
        """Return the answer to a whole request of a known sender; None if the caller has gone."""
        return await self._caught(self.respond(head, body, sender, is_gone), head)

    def begin(
        self,
        head: RequestHead,  # noqa: ARG002
        body: bytes,  # noqa: ARG002
        sender: Sender,  # noqa: ARG002
        is_gone: IsGone,  # noqa: ARG002
        then: Then,  # noqa: ARG002
    ) -> bool:
        """Answer a whole request without a coroutine; if it needs one, do nothing and return False.

        ``then`` is called once, perhaps before this returns; ``finish`` makes the answer from its argument.
        """
        return False

    def finish(self, result: Result, head: RequestHead) -> HttpAnswer | None:
        """Return the answer to a request for which ``begin`` called back; None if its caller has gone."""
        if isinstance(result, Exception):
            return self._of_error(result, head)
        assert isinstance(result, HttpAnswer), "only the route of decisions is called back with a planned ask"
        return result

    async def _caught(self, answered: Awaitable[HttpAnswer | None], head: RequestHead) -> HttpAnswer | None:
        try:
            return await answered
        except Exception as error:  # noqa: BLE001  it is logged, or is an answer
            return await self.failed(error, head)

    async def failed(self, error: Exception, head: RequestHead) -> HttpAnswer | None:
        """Return the answer to a request that met an error, when it is due; None if its caller has gone."""
        if isinstance(error, ProblemError) and error.wait_s:
            await asyncio.sleep(error.wait_s)
        return self._of_error(error, head)

    def _of_error(self, error: Exception, head: RequestHead) -> HttpAnswer | None:
        """Return the answer to a request that met an error; None if its caller has gone."""
        if isinstance(error, ProblemError):
            return problem_answer(error, closes=EXPECT in head.fields)
        if isinstance(error, OverloadedError):
            self._shed(error.cause)
            return problem_answer(overloaded(retry_ms()), closes=EXPECT in head.fields)
        if isinstance(error, CallerGoneError):
            return None
        log.error("a request failed", path=head.path, exc_info=error)
        return problem_answer(failure(), closes=EXPECT in head.fields)


class BodyRoute(HotRoute):
    """A path that takes one method, with a body that is counted by the intake, and answers with JSON.

    Args:
        method: the method.
        intake: the waiting bodies of all callers.
    """

    def __init__(self, method: str, access: Access, shed: Callable[[str], None], intake: Intake) -> None:
        super().__init__(access, shed, {method.encode(): MAX_BODY})
        self.method = method
        self.intake = intake

    @abc.abstractmethod
    async def reply_to(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone) -> bytes:
        """Return the body of the answer to a whole request.

        Raises:
            ProblemError, OverloadedError, CallerGoneError: as ``respond``.
        """

    async def answered(self, scope: Scope, receive: Receive) -> HttpAnswer | None:
        """Read the whole body and return the answer; None if the caller has left."""
        head = head_of(scope)
        sender = self.identify(head)
        if scope["method"] != self.method:
            detail = f"This path takes {self.method}."
            raise ProblemError(405, detail, headers={"Allow": self.method})
        with self.intake.request(sender.turn) as taken:
            body = await _read(scope, receive, taken)
            if body is None:
                return None
            return HttpAnswer(HTTPStatus.OK, JSON, await self.reply_to(head, body, sender, is_gone_of(scope)))

    async def respond(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone) -> HttpAnswer:
        """Return the answer to a body."""
        with self.intake.request(sender.turn) as taken:
            taken.add(len(body))
            return HttpAnswer(HTTPStatus.OK, JSON, await self.reply_to(head, body, sender, is_gone))


async def refuse(problem: ProblemError, scope: Scope, send: Send) -> None:
    """Answer with a problem, perhaps before the body was read."""
    if problem.wait_s:
        await asyncio.sleep(problem.wait_s)
    await _send(problem_answer(problem, closes=EXPECT in head_of(scope).fields), send)


def problem_answer(problem: ProblemError, *, closes: bool) -> HttpAnswer:
    """Return a problem as an answer, perhaps before the body was read.

    Args:
        closes: end the connection. It could be reused, as the server discards the rest of a body; but a
            caller that waits for ``100 Continue`` may or may not send the body now.
    """
    headers = [
        (name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in problem.headers.items()
    ]
    headers.append((b"content-type", PROBLEM_JSON.encode()))
    if closes:
        headers.append((b"connection", b"close"))
    return HttpAnswer(problem.status, headers, problem.body())


def failure() -> ProblemError:
    """Return the 500 for an unexpected error; it does not reveal the cause."""
    return ProblemError(500, "The request failed; the log has the reason.")


def sized(answer: HttpAnswer) -> Fields:
    """Return the fields of an answer with the length of its body."""
    return [*answer.headers, (b"content-length", b"%d" % len(answer.body))]


def is_gone_of(scope: Scope) -> IsGone:
    """Return the function that tells whether the caller of a request has gone."""
    is_gone: IsGone = scope.get(IS_GONE, _is_there)
    return is_gone


def _is_there() -> bool:
    """Return False: a server that does not report disconnects is taken to have none."""
    return False


async def _send(answer: HttpAnswer, send: Send) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": sized(answer)})
    await send({"type": "http.response.body", "body": answer.body})


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
