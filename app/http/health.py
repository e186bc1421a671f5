"""Whether the process lives, whether it can give decisions, and what it has counted."""

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
    """What readiness is judged by.

    Attributes:
        snapshot: there are quotas to decide by.
        store, catalog: ``ok``, or what is wrong; decisions are given without either.
    """

    snapshot: bool
    store: str = "ok"
    catalog: str = "ok"
    throttle_factor: float = 1.0
    stopping: bool = False


_SCRAPED: Final = {
    "schema": {"type": "string"},
    "example": "# HELP quotagate_throttle_factor What scales produce limits.\n"
    "# TYPE quotagate_throttle_factor gauge\nquotagate_throttle_factor 1.0\n",
}


@dataclass(frozen=True, slots=True)
class Health:
    """How this process is."""

    status: Literal["live", "ready", "starting", "stopping"]
    store: str
    catalog: str
    throttle_factor: float


def router(ready: Callable[[], Readiness], metrics: Metrics, access: Access) -> APIRouter:
    """The routes of whoever watches over this process."""
    routes = APIRouter(tags=["Health"])

    @routes.get(
        "/health/live", summary="Whether the process answers", responses={200: _shown("live", "It does.")}
    )
    async def live() -> Health:
        return _health(ready(), "live")

    not_ready: dict[int | str, dict[str, Any]] = {
        200: _shown("ready", "They can."),
        503: _shown("starting", "No quotas were read yet, or the process is stopping."),
    }

    @routes.get("/health/ready", summary="Whether decisions can be given", responses=not_ready)
    async def is_ready(response: Response) -> Health:
        state = ready()
        if state.snapshot and not state.stopping:
            return _health(state, "ready")
        response.status_code = 503
        return _health(state, "stopping" if state.stopping else "starting")

    @routes.get(
        "/metrics",
        summary="Metrics, as Prometheus reads them",
        description="Open to the networks that may ask for decisions; others need a key with the scope read.",
        response_class=PlainTextResponse,
        responses={200: {"description": "Now.", "content": {"text/plain": _SCRAPED}}},
    )
    async def scrape(request: Request) -> Response:
        if not access.is_open(request.scope):
            access.require(request.scope, "read")
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes


def _shown(status: str, description: str) -> dict[str, Any]:
    example = {"status": status, "store": "ok", "catalog": "ok", "throttle_factor": 1.0}
    schema = {"$ref": "#/components/schemas/Health"}
    content = {"application/json": {"schema": schema, "example": example}}
    return {"model": Health, "description": description, "content": content}


def _health(state: Readiness, status: Literal["live", "ready", "starting", "stopping"]) -> Health:
    return Health(status, state.store, state.catalog, state.throttle_factor)
