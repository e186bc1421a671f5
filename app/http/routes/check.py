"""The route for gateways: the ask in headers and a query, the decision in a status and headers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import Struct
from starlette.types import Receive, Scope

from app.admission.answers import remaining_in_buckets
from app.admission.errors import OverloadedError
from app.admission.plan import PlannedAsk
from app.admission.port import Decider
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision
from app.http.access.access import Access, IsGone, Sender
from app.http.check_question import Callers, Sources, invalid, read_query
from app.http.head import EXPECT, HeadFields, RequestHead, head_of
from app.http.problems import retry_ms
from app.http.ratelimit import decision_fields
from app.http.server.hot import HotRoute, HttpAnswer, Then, is_gone_of
from app.http.wire import encode_decision

PATH: Final = "/v1/check"
WITHIN_S: Final = 0.3
"""How long a check may wait in this node: meanwhile the gateway holds a client's request."""

_CONTENT: Final = ((b"content-type", b"application/json"), (b"cache-control", b"no-store"))
"""The fields of any answer to a gateway."""
_ORDINARY: Final = dict.fromkeys((b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE"), 0)
"""Methods whose checks are ordinary without a body; the general protocol answers other methods."""


class AskedCheck(Struct, frozen=True, gc=False):
    """A check that was read."""

    ask: Ask
    deny_status: int


class Check:
    """Turns headers and a query into an answer, for any transport.

    Args:
        now_ms: the time of an ask without ``at_ms``; None under the store's clock, where asks have none.
    """

    def __init__(self, admission: Decider, sources: Sources, now_ms: Callable[[], int] | None) -> None:
        self._admission = admission
        self._callers = Callers(sources)
        self._now_ms = now_ms

    async def answer(
        self,
        query: bytes,
        headers: HeadFields,
        allow: Callable[[Ask], Ask] | None = None,
        caller: Caller = ANYONE,
    ) -> HttpAnswer:
        """Decide a request, with every quota under deny.

        Args:
            allow: confines an ask to the caller's bounds, or raises a problem.

        Raises:
            ProblemError: 400 that names each invalid parameter and header; any problem of ``allow``.
            OverloadedError, CallerGoneError: as ``Admission.decide``.
        """
        asked = self._read(query, headers)
        ask = asked.ask if allow is None else allow(asked.ask)
        (planned,) = await self._admission.decide((ask,), caller, WITHIN_S)
        return answer_to(planned, asked.deny_status)

    def begin(
        self,
        query: bytes,
        headers: HeadFields,
        allow: Callable[[Ask], Ask] | None,
        caller: Caller,
        then: Callable[[HttpAnswer | Exception], None],
    ) -> None:
        """Decide a request as ``answer`` does, and call ``then`` once, perhaps before this returns.

        Raises:
            ProblemError, OverloadedError: instead of the call.
        """
        asked = self._read(query, headers)
        ask = asked.ask if allow is None else allow(asked.ask)
        deny_status = asked.deny_status

        def decided(result: PlannedAsk | Exception) -> None:
            try:
                answer = result if isinstance(result, Exception) else answer_to(result, deny_status)
            except Exception as error:  # noqa: BLE001  nobody else would answer
                answer = error
            then(answer)

        self._admission.begin(ask, caller, decided, WITHIN_S)

    def shed(self, query: bytes) -> HttpAnswer:
        """Refuse as a quota would: gateways take a 5xx for an outage, and may let requests through."""
        decision = Decision("throttle", retry_ms(), False, 0, "local", None)
        deny_status = read_query(query, timed=self._now_ms is not None).deny_status
        return answer_to(PlannedAsk(Ask(), (), None, decision=decision), deny_status)

    def _read(self, query: bytes, headers: HeadFields) -> AskedCheck:
        """Read a check.

        Raises:
            ProblemError: 400 that names each invalid parameter and header.
        """
        what = read_query(query, timed=self._now_ms is not None)
        errors = list(what.errors)
        who = self._callers.of(headers, errors)
        if errors:
            raise invalid(errors)
        at_ms = what.at_ms
        if at_ms is None and self._now_ms is not None:
            at_ms = self._now_ms()
        ask = Ask(
            usage=what.usage,
            principal=who.principal,
            client_id=who.client_id,
            ip=who.ip,
            broker=what.broker,
            listener=what.listener,
            deny=True,
            at_ms=at_ms,
        )
        return AskedCheck(ask, what.deny_status)


class CheckRoute(HotRoute):
    """The route of the check: it takes any method and reads no body."""

    def __init__(self, check: Check, access: Access, shed: Callable[[str], None]) -> None:
        super().__init__(access, shed, _ORDINARY)
        self._check = check

    def identify(self, head: RequestHead) -> Sender:
        """Check the sender."""
        return self.access.sender(self.access.require(head, "decide"), head)

    async def answered(self, scope: Scope, receive: Receive) -> HttpAnswer:  # noqa: ARG002  no body is read
        """Return the answer to the head of a request."""
        head = head_of(scope)
        answer = await self.respond(head, b"", self.identify(head), is_gone_of(scope))
        if EXPECT in head.fields:
            # The body may or may not follow (RFC 9110, 10.1.1); closing is the only safe way out.
            answer.headers = [*answer.headers, (b"connection", b"close")]
        return answer

    async def respond(
        self,
        head: RequestHead,
        body: bytes,  # noqa: ARG002  the head says everything
        sender: Sender,
        is_gone: IsGone,
    ) -> HttpAnswer:
        """Return the answer to a head."""
        return await self._check.answer(head.query, head.fields, self._allow(sender), sender.caller(is_gone))

    def begin(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone, then: Then) -> bool:  # noqa: ARG002  it has no body
        """Answer a head without a coroutine."""
        try:
            self._check.begin(head.query, head.fields, self._allow(sender), sender.caller(is_gone), then)
        except Exception as error:  # noqa: BLE001  it is logged, or is an answer
            then(error)
        return True

    def _of_error(self, error: Exception, head: RequestHead) -> HttpAnswer | None:
        if isinstance(error, OverloadedError):
            self._shed(error.cause)
            return self._check.shed(head.query)
        return super()._of_error(error, head)

    def _allow(self, sender: Sender) -> Callable[[Ask], Ask] | None:
        """Return the function that confines asks to the bounds of a sender; None for a sender without any."""
        grant = sender.grant
        return None if grant.is_unrestricted else partial(self.access.confine, grant)


def answer_to(planned: PlannedAsk, deny_status: int) -> HttpAnswer:
    """Return a decision as the answer to a gateway."""
    decision, charges = planned.decision, planned.charges
    assert decision is not None
    body = encode_decision(decision)
    headers = [*_CONTENT, *decision_fields(decision, charges, remaining_in_buckets(planned))]
    return HttpAnswer(200 if decision.decision == "admit" else deny_status, headers, body)
