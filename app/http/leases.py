"""The routes of leases: parts of quotas that a caller takes, to decide alone for a short time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.admission.caller_clock import CallerTime
from app.admission.errors import CallerGoneError, OverloadedError
from app.admission.leases import LeaseAnswer, Leases, Settlement, lasting_ms
from app.domain.ask import Ask
from app.domain.caller import Caller
from app.domain.errors import OutOfBoundsError
from app.domain.quota import MAX_EXACT
from app.domain.quota_value import pointer
from app.http import leases_schema as schema
from app.http.access import LEASES, Access
from app.http.admin import admin_router
from app.http.bodies import SettledBody
from app.http.hot import caller_of, is_gone_of
from app.http.problems import FieldError, ProblemError, overloaded, retry_ms, unprocessable
from app.http.query import Parameters
from app.http.strict import JSON, read_body
from app.http.wire import Clock, decode_lease, decode_spent, encode_lease, lease_body

RENEW_AFTER: Final = 0.8
"""After this part of a lease its holder should ask for the next one."""


def router(
    leases: Leases,
    access: Access,
    clock: Clock,
    time: CallerTime | None = None,
    shed: Callable[[str], None] = lambda _cause: None,
) -> APIRouter:
    """Return the routes.

    Args:
        time: notes the times of asks, under the caller's clock.
        shed: called with the cause whenever a request is shed.
    """
    routes = admin_router("Leases", access)
    timed = clock == "caller"

    async def take(
        request: Request, wish: Ask, lease_ms: int, settlements: Sequence[Settlement]
    ) -> LeaseAnswer:
        if time is not None and wish.at_ms is not None:
            time.note(wish.at_ms)
        try:
            return await leases.take(wish, lease_ms, settlements, _caller(request, access))
        except OverloadedError as error:
            shed(error.cause)
            raise overloaded(retry_ms()) from None
        except CallerGoneError:
            raise ProblemError(400, "The caller has left.") from None

    @routes.post(LEASES, **schema.TAKE)
    async def take_lease(request: Request) -> Response:
        Parameters(request.scope).check()
        sent = decode_lease(await read_body(request), clock)
        grant = access.caller(request.scope)
        wish = access.confine(grant, sent.wish, "/ask")
        settlements = [
            _settlement(leases, text, spent, grant.name, "settle", place)
            for place, (text, spent) in enumerate(sent.settle)
        ]
        lease_ms = lasting_ms(wish, sent.lease_ms)
        try:
            answer = await take(request, wish, lease_ms, settlements)
        except OutOfBoundsError as outside:
            raise access.shared(grant, outside, "/ask") from None
        renew_ms = max(int(answer.lease_ms * RENEW_AFTER), min(answer.lease_ms, 1))
        body = lease_body(answer.decision, answer.name, answer.granted, answer.lease_ms, renew_ms)
        body.settled = [
            SettledBody(text, ok) for (text, _), ok in zip(sent.settle, answer.settled, strict=True)
        ]
        return Response(encode_lease(body), 200, media_type=JSON)

    @routes.delete(LEASES + "/{lease}", **schema.end(timed=timed))
    async def end_lease(request: Request) -> Response:
        lease = request.path_params["lease"]
        query = Parameters(request.scope, *(["at_ms"] if timed else []))
        at_ms = query.integer("at_ms", 0, MAX_EXACT) if timed else None
        query.check()
        if at_ms is None and time is not None:
            at_ms = time.newest_ms
        body = await read_body(request)
        spent = decode_spent(body) if body.strip() else None
        key = access.caller(request.scope).name
        settlement = _settlement(leases, lease, spent, key)
        answer = await take(request, Ask(at_ms=at_ms), 0, [settlement])
        return Response(encode_lease(SettledBody(lease, answer.settled[0])), 200, media_type=JSON)

    return routes


def _caller(request: Request, access: Access) -> Caller:
    sender = access.sender(access.caller(request.scope), request.scope)
    return caller_of(sender, is_gone_of(request.scope))


def _settlement(
    leases: Leases, text: str, spent: dict[str, float] | None, key: str | None, *at: str | int
) -> Settlement:
    """Return what is settled; without ``spent`` all of it was.

    Args:
        at: where it is in the body.

    Raises:
        ProblemError: 422 if more was spent than granted.
    """
    name = leases.named(text, key)
    if name is None or spent is None:
        return Settlement(name, name.granted if name is not None else {})
    wrong = [
        FieldError(pointer(*at, "usage", field), f"is more than the {name.granted.get(field, 0):g} granted")
        for field, amount in spent.items()
        if amount > name.granted.get(field, 0)
    ]
    if wrong:
        raise unprocessable(*wrong)
    return Settlement(name, spent)
