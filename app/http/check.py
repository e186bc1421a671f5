"""The route for gateways: the ask in headers and a query, the decision in a status and headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from starlette.types import Receive, Scope

from app.admission.errors import OverloadedError
from app.admission.port import Decider
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision
from app.domain.quota import Quota
from app.http.access import Access, Sender
from app.http.check_question import Callers, Headers, Sources, read_query
from app.http.hot import SENDER, HttpAnswer, IsGone, PlainRoute, caller_of, is_gone_of
from app.http.problems import FieldError, ProblemError, retry_ms
from app.http.ratelimit import rate_limits, retry_after_s
from app.http.wire import encode_decision

PATH: Final = "/v1/check"
WITHIN_S: Final = 0.3
"""How long a check may wait in this node: meanwhile the gateway holds a client's request."""

MAX_REMEMBERED: Final = 1_024
"""The longest query that is cached, in bytes; a gateway sends the same few."""

_read_remembered: Final = lru_cache(256)(read_query)  # at most a quarter of a megabyte of queries


class Check:
    """Turns headers and a query into an answer, whatever carries them.

    Args:
        now_ms: the time of an ask without ``at_ms``; None under the store's clock, where asks have none.
        shed: called with the cause whenever a request is shed.
    """

    def __init__(
        self,
        admission: Decider,
        sources: Sources,
        now_ms: Callable[[], int] | None,
        shed: Callable[[str], None] = lambda _cause: None,
    ) -> None:
        self._shed = shed
        self._admission = admission
        self._callers = Callers(sources)
        self._now_ms = now_ms

    async def answer(
        self,
        query: bytes,
        headers: Headers,
        allow: Callable[[Ask], Ask] | None = None,
        caller: Caller = ANYONE,
    ) -> HttpAnswer:
        """Decide a request, with every quota under deny.

        Args:
            allow: returns the ask as this caller may ask it, or raises a problem.

        Raises:
            ProblemError: 400 that names each invalid parameter and header; what ``allow`` raises.
        """
        read = _read_remembered if len(query) <= MAX_REMEMBERED else read_query
        what = read(query, timed=self._now_ms is not None)
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
            detail=True,
            at_ms=at_ms,
        )
        if allow is not None:
            ask = allow(ask)
        try:
            decision, quotas = await self._admission.decide_in_full(ask, caller, WITHIN_S)
        except OverloadedError as error:
            self._shed(error.cause)
            # Refuse as a quota would: gateways take a 5xx for an outage, and may let requests through.
            decision, quotas = Decision("throttle", retry_ms(), False, 0, "local", None), ()
        return answer_to(decision, quotas, what.deny_status)


class CheckRoute(PlainRoute):
    """The route of the check: it takes any method and reads no body."""

    def __init__(self, check: Check, access: Access, shed: Callable[[str], None]) -> None:
        super().__init__(access, shed)
        self._check = check

    def is_ordinary(self, method: str, size: int) -> bool:
        """Whether the request has no body, and its answer has one."""
        return method not in ("HEAD", "CONNECT") and size == 0

    def identify(self, scope: Scope) -> Sender:
        """Check the sender."""
        return self.access.sender(self.access.require(scope, "decide"), scope)

    async def answered(self, scope: Scope, receive: Receive) -> HttpAnswer:  # noqa: ARG002  no body is read
        """Return the answer to the head of a request."""
        sender = scope[SENDER] = self.identify(scope)
        answer = await self.respond(scope, b"", sender, is_gone_of(scope))
        if any(name == b"expect" for name, _ in scope["headers"]):
            # The body may or may not follow (RFC 9110, 10.1.1); closing is the only safe way out.
            answer = answer._replace(headers=[*answer.headers, (b"connection", b"close")])
        return answer

    async def respond(
        self,
        scope: Scope,
        body: bytes,  # noqa: ARG002  the head says everything
        sender: Sender,
        is_gone: IsGone,
    ) -> HttpAnswer:
        """Return the answer to a head."""
        grant = sender.grant
        allow = partial(self.access.confine, grant) if not grant.is_unrestricted else None
        caller = caller_of(sender, is_gone)
        return await self._check.answer(scope["query_string"], scope["headers"], allow, caller)


def answer_to(decision: Decision, quotas: Sequence[Quota], deny_status: int) -> HttpAnswer:
    """Return a detailed decision and its quotas as the answer to a gateway."""
    body = encode_decision(replace(decision, quotas=None))
    headers = [
        (b"content-type", b"application/json"),
        (b"cache-control", b"no-store"),
        (b"x-throttle-ms", b"%d" % decision.throttle_ms),
        *rate_limits(decision, quotas),
    ]
    if wait_s := retry_after_s(decision):
        headers.append((b"retry-after", b"%d" % wait_s))
    return HttpAnswer(200 if decision.decision == "admit" else deny_status, headers, body)


def invalid(errors: Sequence[FieldError]) -> ProblemError:
    """Return the 400 that names these parameters and headers."""
    headers = {"X-Throttle-Ms": "0", "Cache-Control": "no-store"}
    return ProblemError(400, "The request is invalid: see errors.", errors, headers)
