"""The ASGI application: hot routes by exact path, static content, and FastAPI for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import structlog
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import app
from app.admission.caller_clock import CallerClock
from app.admission.metrics import Metrics
from app.admission.port import Decider
from app.admission.slices import Slices
from app.domain.quota_value import pointer
from app.http import check, console, decisions, documents, health, openapi
from app.http.access import ADMINISTERED, Access, scope_of
from app.http.check import Check, CheckRoute
from app.http.check_question import Sources
from app.http.decisions import DecisionRoutes
from app.http.health import Readiness
from app.http.hot import HotRoute, PlainRoute, failure, refuse
from app.http.intake import Intake
from app.http.outbox import Outbox
from app.http.problems import FieldError, ProblemError, unprocessable
from app.http.static import StaticPage, Turnstile
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
    lifespan: Lifespan | None = None,
) -> Front:
    """Return the application of one process; under the caller's clock ``admission`` is a ``CallerClock``."""
    hot = DecisionRoutes(admission, access, clock, Slices() if slices is None else slices)
    intake = Intake()
    now_ms = admission.now_ms if isinstance(admission, CallerClock) else None
    gateways = Check(admission, sources, now_ms, metrics.count_shed)
    api = administration([*routers, health.router(ready, metrics, access)], clock, sources, lifespan)
    return Front(
        {
            decisions.ONE: HotRoute(hot.one, access, metrics.count_shed, intake, hot.begin),
            decisions.BATCH: HotRoute(hot.batch, access, metrics.count_shed, intake),
            check.PATH: CheckRoute(gateways, access, metrics.count_shed),
        },
        static_pages(api),
        api,
        access,
        Outbox(metrics.count_unsent_answer),
    )


def administration(
    routers: Sequence[APIRouter], clock: Clock, sources: Sources, lifespan: Lifespan | None = None
) -> FastAPI:
    """Return the FastAPI application; its OpenAPI document also describes the hot routes."""
    api = FastAPI(
        **openapi.ABOUT, version=app.__version__, lifespan=lifespan, redirect_slashes=False, openapi_url=None
    )
    for router in routers:
        api.include_router(router)
    for kind in (ProblemError, HTTPException, RequestValidationError, Exception):
        api.add_exception_handler(kind, _answer)
    document = openapi.document_of(api, clock, sources)
    api.openapi = lambda: document  # type: ignore[method-assign]
    return api


def static_pages(api: FastAPI) -> dict[str, StaticPage]:
    """Return the static content by path."""
    document = json.dumps(api.openapi(), ensure_ascii=False, separators=(",", ":")).encode()
    return {
        documents.OPENAPI: StaticPage(document, "application/json"),
        **documents.pages(),
        console.PATH: console.kept(),
        console.ENTRANCE: console.Entrance(),
    }


class Front:
    """Sends each request to a hot route, to static content, or to FastAPI, after checking the key.

    Attributes:
        hot: the hot routes by path; the lane answers their ordinary requests itself.
        outbox: for these answers.
    """

    def __init__(
        self,
        hot: Mapping[str, PlainRoute],
        same: Mapping[str, StaticPage],
        rest: FastAPI,
        access: Access,
        outbox: Outbox,
    ) -> None:
        self.hot = hot
        self.outbox = outbox
        self._same = same
        self._rest = rest
        self._access = access
        self._turnstile = Turnstile()

    def document(self) -> dict[str, Any]:
        """The OpenAPI document of all routes."""
        return self._rest.openapi()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
        elif hot := self.hot.get(scope["path"]):
            await hot(scope, receive, send)
        else:
            await self._guarded(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            same = self._same.get(scope["path"])
            if same is not None or scope["path"] in OPEN:
                self._access.caller(scope)  # a key that is sent must be valid, even if none is needed
            elif scope["path"].startswith(ADMINISTERED):
                self._access.require(scope, scope_of(scope["method"], scope["path"]))
            else:
                self._access.require_key(scope)
        except ProblemError as problem:
            await refuse(problem, scope, send)
            return
        if same is not None:
            await self._turnstile.wait()
            await same(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # like GET; the server drops the body
            scope = {**scope, "method": "GET"}
        try:
            await self._rest(scope, receive, send)
        except Exception:  # already answered; Starlette raises it again so that it can be logged
            log.exception("a request failed", path=scope["path"])


async def _answer(request: Request, error: Exception) -> Response:
    return _problem_of(request, error).response()


def _problem_of(request: Request, error: Exception) -> ProblemError:
    """Return an error as a problem; the locations of FastAPI's begin with ``body``, ``path`` or ``query``."""
    match error:
        case ProblemError():
            return error
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
