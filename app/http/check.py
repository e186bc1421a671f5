"""The route for gateways: the ask in headers and a query, the decision in a status and headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final, NamedTuple

from starlette.types import Receive, Scope

from app.admission.errors import OverloadedError
from app.admission.generations import Generations
from app.admission.plain import ADMITTED, PlainAsk
from app.admission.port import Decider, InFull, Remaining
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision
from app.domain.quota import Quota
from app.http.access import Access, Sender
from app.http.check_question import Callers, CheckQuery, Headers, Sources, read_query
from app.http.hot import (
    SENDER,
    Answer,
    HttpAnswer,
    IsGone,
    PlainRoute,
    ReadyAnswer,
    Result,
    Then,
    caller_of,
    is_gone_of,
    length_line,
    lines_of,
)
from app.http.problems import FieldError, ProblemError, retry_ms
from app.http.ratelimit import admitted_rate_limits, decision_fields, left
from app.http.wire import encode_decision

PATH: Final = "/v1/check"
WITHIN_S: Final = 0.3
"""How long a check may wait in this node: meanwhile the gateway holds a client's request."""

MAX_REMEMBERED: Final = 1_024
"""The longest query that is cached, in bytes; a gateway sends the same few."""


MAX_KNOWN: Final = 1_024
"""The longest check that is kept, in bytes of its query and of the headers that name its caller."""
KNOWN_BYTES: Final = 16 * 1024 * 1024
"""The memory for checks that came before, and what was made of them."""

QUESTION: Final = "quotagate.question"
"""The key in a scope of the ``Question`` of a check, once it was looked for."""
_CONTENT: Final = ((b"content-type", b"application/json"), (b"cache-control", b"no-store"))
"""The fields of any answer to a gateway."""

Question = tuple[bytes, tuple[tuple[bytes, bytes], ...]]
"""What a check says: its query, and the headers that name its caller."""


class AskedCheck(NamedTuple):
    """A check that was read."""

    ask: Ask
    deny_status: int


class KnownCheck(NamedTuple):
    """What was made of a plain check; an admission needs only the numbers of its answer.

    Attributes:
        lines: the fields of an admission, with a place for what is left of each quota.
        body: that of an admission.
    """

    ask: PlainAsk
    deny_status: int
    lines: bytes
    body: bytes

    def admission(self, remaining: Remaining) -> ReadyAnswer:
        """Return the answer if every quota admits."""
        return ReadyAnswer(self.lines % tuple([left(each) for each in remaining]), self.body)


class Check:
    """Turns headers and a query into an answer, whatever carries them.

    Args:
        now_ms: the time of an ask without ``at_ms``; None under the store's clock, where asks have none.
        shed: called with the cause whenever a request is shed.
        known_bytes: the size of the cache of checks.
    """

    def __init__(
        self,
        admission: Decider,
        sources: Sources,
        now_ms: Callable[[], int] | None,
        shed: Callable[[str], None] = lambda _cause: None,
        known_bytes: int = KNOWN_BYTES,
    ) -> None:
        self._shed = shed
        self._admission = admission
        self._callers = Callers(sources)
        self._now_ms = now_ms
        self._known: Generations[Question, KnownCheck] = Generations(known_bytes)

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
        asked = self._read(query, headers)
        ask = asked.ask if allow is None else allow(asked.ask)
        try:
            decision, quotas = await self._admission.decide_in_full(ask, caller, WITHIN_S)
        except OverloadedError as error:
            return self._shed_answer(error, asked.deny_status)
        return answer_to(decision, quotas, asked.deny_status)

    def question(self, query: bytes, headers: Headers) -> Question:
        """Return what a check says: equal ones are equal asks."""
        return query, self._callers.fields_of(headers)

    def begin(
        self,
        question: Question,
        caller: Caller,
        then: Callable[[ReadyAnswer | InFull | Exception], None],
    ) -> bool:
        """Decide a check that is valid and plain; return False for any other one, and do nothing then.

        ``then`` is called once, perhaps before this returns. ``finish`` makes of what it gets what ``answer``
        would return or raise.

        Raises:
            OverloadedError: instead of the call.
        """
        if self._now_ms is not None:
            return False  # no time comes again
        known = self._known.get(question) or self._plain(question)
        if known is None:
            return False
        edition = self._admission.begin_in_full(known.ask, caller, known.admission, then, WITHIN_S)
        if edition is not known.ask.quotas.edition:
            self._known.remove(question)
        return True

    def finish(self, result: InFull, query: bytes) -> HttpAnswer:
        """Return the answer to a question that was decided by a call."""
        return answer_to(result.decision, result.quotas, self._deny_status(query))

    def refuse(self, error: OverloadedError, query: bytes) -> HttpAnswer:
        """Return the answer to a check that was shed."""
        return self._shed_answer(error, self._deny_status(query))

    def _deny_status(self, query: bytes) -> int:
        return _read(query, timed=self._now_ms is not None).deny_status

    def _plain(self, question: Question) -> KnownCheck | None:
        """Return what is made of a check, and remember it; None if it is not plain, or anything is wrong."""
        query, headers = question
        try:
            asked = self._read(query, headers)
        except ProblemError:
            return None  # ``answer`` says what
        ask = self._admission.plain(asked.ask)
        if ask is None:
            return None
        known = known_check(ask, asked.deny_status)
        size = len(query) + sum([len(name) + len(value) for name, value in headers])
        if size <= MAX_KNOWN:
            self._known.add(question, known, 2 * size + ask.size + len(known.lines))
        return known

    def _shed_answer(self, error: OverloadedError, deny_status: int) -> HttpAnswer:
        """Refuse as a quota would: gateways take a 5xx for an outage, and may let requests through."""
        self._shed(error.cause)
        return answer_to(Decision("throttle", retry_ms(), False, 0, "local", None), (), deny_status)

    def _read(self, query: bytes, headers: Headers) -> AskedCheck:
        """Read a check.

        Raises:
            ProblemError: 400 that names each invalid parameter and header.
        """
        what = _read(query, timed=self._now_ms is not None)
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
        return AskedCheck(ask, what.deny_status)


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

    def begin(self, scope: Scope, body: bytes, sender: Sender, is_gone: IsGone, then: Then) -> bool:  # noqa: ARG002
        """Answer a head by a call, if that is possible."""
        if not sender.grant.is_unrestricted:
            return False

        question = scope.get(QUESTION)
        if question is None:
            question = scope[QUESTION] = self._check.question(scope["query_string"], scope["headers"])
        try:
            return self._check.begin(question, caller_of(sender, is_gone), then)
        except Exception as error:  # noqa: BLE001  it is logged, or is an answer
            then(error)
            return True

    def finish(self, result: Result, scope: Scope) -> Answer | None:
        """Return the answer to a check for which ``begin`` called back; None if its caller has gone."""
        if isinstance(result, ReadyAnswer):
            return result
        if isinstance(result, InFull):
            return self._check.finish(result, scope["query_string"])
        return super().finish(result, scope)

    def _of_error(self, error: Exception, scope: Scope) -> HttpAnswer | None:
        if isinstance(error, OverloadedError):
            return self._check.refuse(error, scope["query_string"])
        return super()._of_error(error, scope)


_read_remembered: Final = lru_cache(256)(read_query)  # at most a quarter of a megabyte of queries


def _read(query: bytes, *, timed: bool) -> CheckQuery:
    """Return what a query says, perhaps as it was read before."""
    return (_read_remembered if len(query) <= MAX_REMEMBERED else read_query)(query, timed=timed)


def known_check(ask: PlainAsk, deny_status: int) -> KnownCheck:
    """Return what all admissions of a plain check have in common, as ``answer_to`` would answer them."""
    matches = ask.planned.matches
    limits = admitted_rate_limits((match.applied.quota, match.applied.entity) for match in matches)
    admitted = ADMITTED[len(matches)]
    body = encode_decision(admitted)
    fields = [*_CONTENT, (b"x-throttle-ms", b"%d" % admitted.throttle_ms), *limits]
    return KnownCheck(ask, deny_status, lines_of(fields) + length_line(body), body)


def answer_to(decision: Decision, quotas: Sequence[Quota], deny_status: int) -> HttpAnswer:
    """Return a detailed decision and its quotas as the answer to a gateway."""
    body = encode_decision(replace(decision, quotas=None))
    headers = [*_CONTENT, *decision_fields(decision, quotas)]
    return HttpAnswer(200 if decision.decision == "admit" else deny_status, headers, body)


def invalid(errors: Sequence[FieldError]) -> ProblemError:
    """Return the 400 that names these parameters and headers."""
    headers = {"X-Throttle-Ms": "0", "Cache-Control": "no-store"}
    return ProblemError(400, "The request is invalid: see errors.", errors, headers)
