"""The question of gateways, asked in headers and a query; the answer in a status and in headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from starlette.types import Receive, Scope

from app.admission.queue import OverloadedError
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision
from app.domain.quota import Quota
from app.http.access import Access, turn_of
from app.http.check_question import Callers, Headers, Sources, read_query
from app.http.decisions import Answer, Decider, PlainRoute, sender
from app.http.problems import FieldError, Problem, retry_ms
from app.http.ratelimit import rate_limits, retry_after_s
from app.http.wire import encode_decision

PATH: Final = "/v1/check"
WITHIN_S: Final = 0.3
"""How long a check may wait in this node: a gateway holds a request of somebody else's meanwhile."""

MAX_REMEMBERED: Final = 1_024
"""Bytes of a query that is remembered; a gateway sends the same few."""

_read_remembered: Final = lru_cache(256)(read_query)  # at most a quarter of a megabyte of queries


class Check:
    """Headers and a query to an answer, whatever carries them.

    Args:
        now_ms: the time of an ask that does not say; None under the store's clock, where none may say.
        shed: is told why, whenever a request is not taken in.
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
    ) -> Answer:
        """Decide what a request asks for, every quota as deny.

        Args:
            allow: gives the ask as this caller asks it, or raises a problem.

        Raises:
            Problem: 400, naming each parameter and header that cannot be understood; what allow raises.
        """
        read = _read_remembered if len(query) <= MAX_REMEMBERED else read_query
        what = read(query, timed=self._now_ms is not None)
        errors = list(what.errors)
        who = self._callers.of(headers, errors)
        if errors:
            raise not_understood(errors)
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
            # As a quota would refuse it: gateways take a 5xx for an outage, and may open.
            decision, quotas = Decision("throttle", retry_ms(), False, 0, "local", None), ()
        return said(decision, quotas, what.deny_status)


class CheckRoute(PlainRoute):
    """The path of the check: any method, and no body is read."""

    def __init__(self, check: Check, access: Access, shed: Callable[[str], None]) -> None:
        super().__init__(access, shed)
        self._check = check

    async def answered(self, scope: Scope, receive: Receive) -> Answer:  # noqa: ARG002  nothing is received
        """The answer to the head of a request."""
        grant = self._access.require(scope, "decide")
        allow = partial(self._access.confine, grant) if not grant.is_plain else None
        caller = sender(grant, turn_of(grant, scope), scope)
        answer = await self._check.answer(scope["query_string"], scope["headers"], allow, caller)
        if any(name == b"expect" for name, _ in scope["headers"]):
            # The body may or may not come now (RFC 9110, 10.1.1), and only closing ends the doubt.
            answer.headers.append((b"connection", b"close"))
        return answer


def said(decision: Decision, quotas: Sequence[Quota], deny_status: int) -> Answer:
    """A decision in detail, and its quotas, as the answer to a gateway."""
    body = encode_decision(replace(decision, quotas=None))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
        (b"x-throttle-ms", b"%d" % decision.throttle_ms),
        *rate_limits(decision, quotas),
    ]
    if wait_s := retry_after_s(decision):
        headers.append((b"retry-after", b"%d" % wait_s))
    return Answer(200 if decision.decision == "admit" else deny_status, headers, body)


def not_understood(errors: Sequence[FieldError]) -> Problem:
    """400 for these parameters and headers."""
    headers = {"X-Throttle-Ms": "0", "Cache-Control": "no-store"}
    return Problem(400, "The request cannot be understood: see errors.", errors, headers)
