"""Hot routes: paths in front of FastAPI, whose answers are bytes that a server or the lane can send.

The head of a request identifies its sender; the answer is made when all of the request is there. Both ways to
a hot route, plain ASGI and the express lane (``app.http.lane``), call the same methods.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from time import monotonic
from typing import Final, NamedTuple

import structlog
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from app.admission.errors import CallerGoneError, OverloadedError
from app.admission.forms import new_tuple
from app.admission.port import InFull
from app.domain.caller import Caller
from app.domain.decision import Decision
from app.domain.grant import Grant
from app.http.access import Access, Sender
from app.http.intake import BodyBytes, Intake
from app.http.problems import PROBLEM_JSON, ProblemError, overloaded, retry_ms
from app.http.wire import MAX_BODY, READY, encode_decision

IS_GONE: Final = "quotagate.is_gone"
"""The key in a scope of the function that returns whether the caller has gone (``app.http.protocol``)."""
SENDER: Final = "quotagate.sender"
"""The key in a scope of the ``Sender``, once a hot route has identified it."""

log = structlog.get_logger("quotagate.http")

Fields = Sequence[tuple[bytes, bytes]]
IsGone = Callable[[], bool]

UNCOUNTED: Final = 1_024
"""Up to this size a body that is answered by a call is not counted as waiting, but needs room as any other:
its connection takes more memory, and has one such body at a time."""


class HttpAnswer(NamedTuple):
    """An answer, still without the fields that a server adds."""

    status: int
    headers: Fields
    body: bytes


class ReadyAnswer(Struct):
    """A 200 whose own fields are lines already, as the connection sends them.

    Attributes:
        lines: with that of the length of the body.
        sent: all of the answer with the server's fields, once a connection has sent it.
        fields: those fields; they are others each second.
    """

    lines: bytes
    body: bytes
    sent: bytes = b""
    fields: Fields | None = None


Answer = HttpAnswer | ReadyAnswer
Result = Decision | InFull | Answer | Exception
"""What becomes an answer by ``PlainRoute.finish``."""
Then = Callable[[Result], None]
Begin = Callable[[bytes, Grant, Caller, Then], bool]


JSON: Final[Fields] = ((b"content-type", b"application/json"),)
JSON_LINES: Final = b"content-type: application/json\r\n"


def length_line(body: bytes) -> bytes:
    """Return the line of the field with the length of a body."""
    return b"content-length: %d\r\n" % len(body)


READY_ANSWERS: Final = {of: ReadyAnswer(JSON_LINES + length_line(body), body) for of, body in READY.items()}
"""The answers to plain asks that are admitted, by the ``id`` of the decision."""


class PlainRoute(abc.ABC):
    """One path in plain ASGI.

    Args:
        shed: called with the cause whenever a request is shed.

    Attributes:
        access: identifies the senders.
    """

    def __init__(self, access: Access, shed: Callable[[str], None]) -> None:
        self.access = access
        self._shed = shed

    @abc.abstractmethod
    def is_ordinary(self, method: str, size: int) -> bool:
        """Whether the lane may answer a request with this method and size of its body."""

    @abc.abstractmethod
    def identify(self, scope: Scope) -> Sender:
        """Return the sender of a request, by its head.

        Raises:
            ProblemError: the head alone is reason enough to refuse the request.
        """

    @abc.abstractmethod
    async def respond(self, scope: Scope, body: bytes, sender: Sender, is_gone: IsGone) -> HttpAnswer:
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
        """Return the answer of whatever kind; None if the caller has gone."""
        return await self._caught(self.answered(scope, receive), scope)

    async def reply_whole(
        self, scope: Scope, body: bytes, sender: Sender, is_gone: IsGone
    ) -> HttpAnswer | None:
        """Return the answer to a whole request of a known sender; None if the caller has gone."""
        return await self._caught(self.respond(scope, body, sender, is_gone), scope)

    def begin(
        self,
        scope: Scope,  # noqa: ARG002
        body: bytes,  # noqa: ARG002
        sender: Sender,  # noqa: ARG002
        is_gone: IsGone,  # noqa: ARG002
        then: Then,  # noqa: ARG002
    ) -> bool:
        """Answer a whole request without a coroutine; return False if that takes more, and do nothing then.

        ``then`` is called once, perhaps before this returns. What it gets becomes an answer by ``finish``.
        """
        return False

    def finish(self, result: Result, scope: Scope) -> Answer | None:
        """Return the answer to a request for which ``begin`` called back; None if its caller has gone."""
        if isinstance(result, Decision):
            return ready_answer(result)
        if isinstance(result, Exception):
            return self._of_error(result, scope)
        assert not isinstance(result, InFull), "only a check wants it"
        return result

    async def _caught(self, answered: Awaitable[HttpAnswer | None], scope: Scope) -> HttpAnswer | None:
        try:
            return await answered
        except Exception as error:  # noqa: BLE001  it is logged, or is an answer
            return await self.failed(error, scope)

    async def failed(self, error: Exception, scope: Scope) -> HttpAnswer | None:
        """Return the answer to a request that met an error, when it is due; None if its caller has gone."""
        if isinstance(error, ProblemError) and error.wait_s:
            await asyncio.sleep(error.wait_s)
        return self._of_error(error, scope)

    def _of_error(self, error: Exception, scope: Scope) -> HttpAnswer | None:
        """Return the answer to a request that met an error; None if its caller has gone."""
        if isinstance(error, ProblemError):
            return problem_answer(error, scope)
        if isinstance(error, OverloadedError):
            self._shed(error.cause)
            return problem_answer(overloaded(retry_ms()), scope)
        if isinstance(error, CallerGoneError):
            return None
        log.error("a request failed", path=scope["path"], exc_info=error)
        return problem_answer(failure(), scope)


class BodyRoute(PlainRoute):
    """A path that takes one method, with a body that is counted by the intake, and answers with JSON.

    Args:
        method: the method.
        intake: the waiting bodies of all callers.
    """

    def __init__(self, method: str, access: Access, shed: Callable[[str], None], intake: Intake) -> None:
        super().__init__(access, shed)
        self.method = method
        self.intake = intake

    @abc.abstractmethod
    def judge(self, scope: Scope) -> Sender:
        """Return the sender of a request, which may ask here.

        Raises:
            ProblemError: it may not.
        """

    @abc.abstractmethod
    async def reply_to(self, scope: Scope, body: bytes, sender: Sender, is_gone: IsGone) -> bytes:
        """Return the body of the answer to a whole request.

        Raises:
            ProblemError, OverloadedError, CallerGoneError: as ``respond``.
        """

    def is_ordinary(self, method: str, size: int) -> bool:
        """Whether it has the method, and a body that is not too large."""
        return method == self.method and size <= MAX_BODY

    def identify(self, scope: Scope) -> Sender:
        """Check the sender, then the method."""
        sender = self.judge(scope)
        if scope["method"] != self.method:
            detail = f"This path takes {self.method}."
            raise ProblemError(405, detail, headers={"Allow": self.method})
        return sender

    async def answered(self, scope: Scope, receive: Receive) -> HttpAnswer | None:
        """Return the answer to the whole body."""
        sender = scope[SENDER] = self.identify(scope)
        with self.intake.request(sender.turn) as taken:
            body = await _read(scope, receive, taken)
            if body is None:
                return None
            return HttpAnswer(
                HTTPStatus.OK, JSON, await self.reply_to(scope, body, sender, is_gone_of(scope))
            )

    async def respond(self, scope: Scope, body: bytes, sender: Sender, is_gone: IsGone) -> HttpAnswer:
        """Return the answer to a body."""
        with self.intake.request(sender.turn) as taken:
            taken.add(len(body))
            return HttpAnswer(HTTPStatus.OK, JSON, await self.reply_to(scope, body, sender, is_gone))


class HotRoute(BodyRoute):
    """A path that takes POST, with a body that says everything.

    Args:
        answer: returns the answer to a body, or raises an error.
        begin: answers some bodies by a call; returns whether this body is one of them.
    """

    def __init__(
        self,
        answer: Callable[[bytes, Grant, Caller], Awaitable[bytes]],
        access: Access,
        shed: Callable[[str], None],
        intake: Intake,
        begin: Begin | None = None,
    ) -> None:
        super().__init__("POST", access, shed, intake)
        self._answer = answer
        self._begin = begin

    def judge(self, scope: Scope) -> Sender:
        """Return the sender, which may decide or account: the body decides which of them is needed."""
        sender = self.access.asker(scope)
        if "account" not in sender.grant.scopes:
            self.access.demand(sender.grant, "decide")
        return sender

    def begin(
        self,
        scope: Scope,  # noqa: ARG002  the body says everything
        body: bytes,
        sender: Sender,
        is_gone: IsGone,
        then: Then,
    ) -> bool:
        """Answer a small body by a call, if that is possible."""
        if self._begin is None or len(body) > UNCOUNTED:
            return False
        try:
            if self.intake.total:  # else there is room for a small body
                self.intake.require_room(sender.turn, len(body))
            grant = sender.grant
            caller = new_tuple(
                Caller, (grant.name, sender.turn, grant.bound_to, monotonic(), is_gone, grant.created_ms)
            )
            return self._begin(body, grant, caller, then)
        except Exception as error:  # noqa: BLE001  it is an answer; an unexpected one is logged
            then(error)
            return True

    async def reply_to(
        self,
        scope: Scope,  # noqa: ARG002  the body says everything
        body: bytes,
        sender: Sender,
        is_gone: IsGone,
    ) -> bytes:
        """Return the answer to a body."""
        return await self._answer(body, sender.grant, caller_of(sender, is_gone))


async def refuse(problem: ProblemError, scope: Scope, send: Send) -> None:
    """Answer with a problem, perhaps before the body was read."""
    if problem.wait_s:
        await asyncio.sleep(problem.wait_s)
    await _send(problem_answer(problem, scope), send)


def problem_answer(problem: ProblemError, scope: Scope) -> HttpAnswer:
    """Return a problem as an answer, perhaps before the body was read.

    The server discards the rest of the body, so the connection can be reused. But a caller that waits for
    ``100 Continue`` may or may not send the body now, so its connection is closed.
    """
    headers = [
        (name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in problem.headers.items()
    ]
    headers.append((b"content-type", PROBLEM_JSON.encode()))
    if any(name == b"expect" for name, _ in scope["headers"]):
        headers.append((b"connection", b"close"))
    return HttpAnswer(problem.status, headers, problem.body())


def failure() -> ProblemError:
    """Return the 500 for an unexpected error, which says nothing of its cause."""
    return ProblemError(500, "The request failed; the log has the reason.")


def caller_of(sender: Sender, is_gone: IsGone) -> Caller:
    """Return the sender of a request that is complete now."""
    grant = sender.grant
    return Caller(grant.name, sender.turn, grant.bound_to, monotonic(), is_gone, grant.created_ms)


def ready_answer(decision: Decision) -> ReadyAnswer:
    """Return a decision as an answer; that of a plain admission is one object for all of them."""
    ready = READY_ANSWERS.get(id(decision))
    if ready is None:
        body = encode_decision(decision)
        ready = ReadyAnswer(JSON_LINES + length_line(body), body)
    return ready


def sized(answer: HttpAnswer) -> Fields:
    """Return the fields of an answer with the length of its body."""
    return [*answer.headers, (b"content-length", b"%d" % len(answer.body))]


def lines_of(fields: Fields) -> bytes:
    """Return fields as lines."""
    return b"".join([b"%b: %b\r\n" % field for field in fields])


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
