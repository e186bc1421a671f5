"""Liveness, readiness and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from app.admission.metrics import Metrics
from app.http.access import Access


@dataclass(frozen=True, slots=True)
class Readiness:
    """What readiness depends on.

    Attributes:
        snapshot: whether quotas are loaded.
        store, catalog: ``ok``, or what is wrong; the process decides without either.
    """

    snapshot: bool
    store: str = "ok"
    catalog: str = "ok"
    throttle_factor: float = 1.0
    stopping: bool = False

    @property
    def can_decide(self) -> bool:
        """Whether the process can decide, and is not stopping."""
        return self.snapshot and not self.stopping


_SCRAPED: Final = {
    "schema": {"type": "string"},
    "example": "# HELP quotagate_throttle_factor What scales produce limits.\n"
    "# TYPE quotagate_throttle_factor gauge\nquotagate_throttle_factor 1.0\n",
}


@dataclass(frozen=True, slots=True)
class Health:
    """The health of this process."""

    status: Literal["live", "ready", "starting", "stopping"]
    store: str
    catalog: str
    throttle_factor: float


def router(ready: Callable[[], Readiness], metrics: Metrics, access: Access) -> APIRouter:
    """Return the routes of liveness, readiness and metrics."""
    routes = APIRouter(tags=["Health"])

    @routes.get(
        "/health/live", summary="Whether the process is live", responses={200: _answer("live", "Live.")}
    )
    async def live() -> Health:
        return _health(ready(), "live")

    not_ready: dict[int | str, dict[str, Any]] = {
        200: _answer("ready", "Ready."),
        503: _answer("starting", "Not ready: no quotas are loaded yet, or the process is stopping."),
    }

    @routes.get("/health/ready", summary="Whether the process can decide", responses=not_ready)
    async def is_ready(response: Response) -> Health:
        state = ready()
        if state.can_decide:
            return _health(state, "ready")
        response.status_code = 503
        return _health(state, "stopping" if state.stopping else "starting")

    @routes.get(
        "/metrics",
        summary="Metrics in Prometheus format",
        description="Open to the networks that may ask for decisions without a key. "
        "Others need a key with the scope read.",
        response_class=PlainTextResponse,
        responses={200: {"description": "Metrics.", "content": {"text/plain": _SCRAPED}}},
    )
    async def scrape(request: Request) -> Response:
        if not access.is_open(request.scope):
            access.require(request.scope, "read")
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes


def _answer(status: str, description: str) -> dict[str, Any]:
    example = {"status": status, "store": "ok", "catalog": "ok", "throttle_factor": 1.0}
    schema = {"$ref": "#/components/schemas/Health"}
    content = {"application/json": {"schema": schema, "example": example}}
    return {"model": Health, "description": description, "content": content}


def _health(state: Readiness, status: Literal["live", "ready", "starting", "stopping"]) -> Health:
    return Health(status, state.store, state.catalog, state.throttle_factor)
