"""The ASGI application: hot routes by exact path, static content, and FastAPI for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final

import structlog
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import app
from app.admission.errors import OverloadedError
from app.admission.gathering.slices import Slices
from app.admission.leases.leases import Leases
from app.admission.metrics.metrics import Metrics
from app.admission.port import Decider
from app.admission.throttle_factor.caller_clock import CallerClock, CallerTime
from app.domain.grant import Grant
from app.domain.quota_value import pointer
from app.http import console, document
from app.http.access.access import ADMINISTERED, LEASES, NOBODY, Access, scope_of
from app.http.check_question import Sources
from app.http.head import RequestHead, head_of
from app.http.openapi import pages
from app.http.problems import FieldError, ProblemError, away, overloaded, retry_ms, unprocessable
from app.http.routes import check, decisions, health
from app.http.routes.check import Check, CheckRoute
from app.http.routes.decisions import BatchRoute, DecisionRoute
from app.http.routes.health import Readiness
from app.http.routes.leases import LeaseRoute, LeaseRoutes
from app.http.server.hot import HotRoute, failure, refuse
from app.http.server.hot_protocol import Outbox
from app.http.server.intake import BodyBytes, Intake
from app.http.server.static import IterationLimit, Redirect, StaticPage
from app.http.strict import TAKE
from app.http.wire import Clock

OPEN: Final = frozenset({"/health/live", "/health/ready", "/metrics"})
"""Paths that need no key, or check it themselves. Static content needs no key; all other paths do."""

log = structlog.get_logger("quotagate.http")
Lifespan = Callable[[Any], AbstractAsyncContextManager[None]]


def create_app(
    *,
    admission: Decider,
    access: Access,
    clock: Clock,
    sources: Sources,
    routers: Sequence[APIRouter],
    ready: Callable[[], Readiness],
    metrics: Metrics,
    slices: Slices | None = None,
    intake: Intake | None = None,
    leases: Leases | None = None,
    time: CallerTime | None = None,
    lifespan: Lifespan | None = None,
) -> Front:
    """Return the application of one process; under the caller's clock ``admission`` is a ``CallerClock``.

    Args:
        intake: counts the waiting bodies of all callers, Envoy included.
        leases: grants leases; without it there are no routes of leases.
        time: notes the times of asks for leases, under the caller's clock.
    """
    slices = Slices() if slices is None else slices
    intake = Intake() if intake is None else intake
    now_ms = admission.now_ms if isinstance(admission, CallerClock) else None
    gateways = Check(admission, sources, now_ms)
    api = administration([*routers, health.router(ready, metrics, access)], clock, sources, lifespan)
    routes: dict[str, HotRoute] = {
        decisions.ONE: DecisionRoute(admission, access, metrics.count_shed, intake, clock, slices),
        decisions.BATCH: BatchRoute(admission, access, metrics.count_shed, intake, clock, slices),
        check.PATH: CheckRoute(gateways, access, metrics.count_shed),
    }
    below: dict[str, HotRoute] = {}
    if leases is not None:
        by_lease = LeaseRoutes(leases, access, clock, slices, time)
        routes[LEASES] = LeaseRoute("POST", by_lease.take, access, metrics.count_shed, intake)
        below[LEASES] = LeaseRoute("DELETE", by_lease.end, access, metrics.count_shed, intake)
    return Front(
        routes,
        below,
        static_pages(api),
        api,
        access,
        Outbox(metrics.count_unsent_answer),
        metrics.count_shed,
        metrics.count_handed_over_connection,
        ready,
    )


def administration(
    routers: Sequence[APIRouter], clock: Clock, sources: Sources, lifespan: Lifespan | None = None
) -> FastAPI:
    """Return the FastAPI application; its OpenAPI document also describes the hot routes."""
    api = FastAPI(
        **document.ABOUT, version=app.__version__, lifespan=lifespan, redirect_slashes=False, openapi_url=None
    )
    for router in routers:
        api.include_router(router)
    for kind in (ProblemError, OverloadedError, HTTPException, RequestValidationError, Exception):
        api.add_exception_handler(kind, _answer)
    described = document.document_of(api, clock, sources)
    api.openapi = lambda: described  # type: ignore[method-assign]
    return api


def static_pages(api: FastAPI) -> dict[str, StaticPage]:
    """Return the static content by path."""
    written = json.dumps(api.openapi(), ensure_ascii=False, separators=(",", ":")).encode()
    return {
        pages.OPENAPI: StaticPage(written, "application/json"),
        **pages.pages(),
        console.PATH: console.kept(),
        console.ENTRANCE: console.Entrance(),
        **{f"{path}/": Redirect(f"..{path}") for path in (console.PATH, pages.SWAGGER, pages.REDOC)},
    }


class Front:
    """Sends each request to a hot route, to static content, or to FastAPI, after checking the key.

    Args:
        shed: called with the cause whenever a request is shed.

    Attributes:
        hot: the hot routes by path; the hot protocol answers their ordinary requests.
        below: the hot routes whose paths have one more segment, a name.
        outbox: for answers of the hot protocol.
        handed_over: to be called for each connection that the hot protocol hands over.
        bodies: the waiting bodies of administration. They have bounds of their own, so that callers cannot
            keep administrators out.
        ready: returns the present readiness of the process.
        drained: to be called when the process begins to stop.
        short: to be called with the ``OSError`` when the kernel has no room for a connection.
    """

    def __init__(
        self,
        hot: Mapping[str, HotRoute],
        below: Mapping[str, HotRoute],
        same: Mapping[str, StaticPage],
        rest: FastAPI,
        access: Access,
        outbox: Outbox,
        shed: Callable[[str], None],
        handed_over: Callable[[], None],
        ready: Callable[[], Readiness],
    ) -> None:
        self.hot = hot
        self.below = below
        self.ready = ready
        self.drained: Callable[[], None] = lambda: None
        self.short: Callable[[OSError], None] = lambda _error: None
        self.outbox = outbox
        self.handed_over = handed_over
        self.bodies = Intake()
        self._shed = shed
        self._same = same
        self._rest = rest
        self._access = access
        self._iteration_limit = IterationLimit()

    def document(self) -> dict[str, Any]:
        """The OpenAPI document of all routes."""
        return self._rest.openapi()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
        elif hot := self.hot_route(scope["path"]):
            await hot(scope, receive, send)
        else:
            await self._guarded(scope, receive, send)

    def hot_route(self, path: str) -> HotRoute | None:
        """Return the hot route of a path; None if it has none."""
        if route := self.hot.get(path):
            return route
        above, _, name = path.rpartition("/")
        return self.below.get(above) if name else None

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = head_of(scope)
        try:
            same = self._same.get(scope["path"])
            if same is not None or scope["path"] in OPEN:
                grant = self._grant_where_none_is_needed(head)
            elif scope["path"].startswith(ADMINISTERED):
                grant = self._access.require(head, scope_of(scope["method"], scope["path"]))
            else:
                grant = self._access.require_key(head)
        except ProblemError as problem:
            await refuse(problem, scope, send)
            return
        except OverloadedError:
            await refuse(starting(), scope, send)
            return
        if same is not None:
            await self._iteration_limit.wait()
            await same(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # like GET; the server drops the body
            scope = {**scope, "method": "GET"}
        try:
            sender = self._access.sender(grant, head)
            with self.bodies.request(sender.turn) as taken:
                scope[TAKE] = partial(self._take, taken)
                await self._rest(scope, receive, send)
        except Exception:  # already answered; Starlette raises it again so that it can be logged
            log.exception("a request failed", path=scope["path"])

    def _grant_where_none_is_needed(self, head: RequestHead) -> Grant:
        """Return the grant of a request; a key that is sent must be valid, once keys are known."""
        try:
            return self._access.caller(head)
        except OverloadedError:
            return NOBODY

    def _take(self, taken: BodyBytes, size: int) -> None:
        """Count more bytes of a body of administration.

        Raises:
            ProblemError: 503, if too many are waiting.
        """
        try:
            taken.add(size)
        except OverloadedError as error:
            self._shed(error.cause)
            raise overloaded(retry_ms()) from None


def starting() -> ProblemError:
    """Return the 503 of a node that cannot judge a request yet."""
    return away("The node is starting: it has not read keys and quotas yet.")


async def _answer(request: Request, error: Exception) -> Response:
    return _problem_of(request, error).response()


def _problem_of(request: Request, error: Exception) -> ProblemError:
    """Return an error as a problem; FastAPI's locations begin with ``body``, ``path`` or ``query``."""
    match error:
        case ProblemError():
            return error
        case OverloadedError():
            return starting()
        case HTTPException(status_code=status):
            details = {
                404: "There is nothing at this path.",
                405: f"This path does not take {request.method}.",
            }
            return ProblemError(status, details.get(status, error.detail), headers=error.headers)
        case RequestValidationError():
            if any(fault["type"] == "json_invalid" for fault in error.errors()):
                return ProblemError(400, "The body is not JSON.")
            return unprocessable(*(FieldError(pointer(*f["loc"][1:]), f["msg"]) for f in error.errors()))
    return failure()
