"""Liveness, readiness and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from app.admission.metrics.metrics import Metrics
from app.http.access.access import Access
from app.http.head import head_of

Status = Literal["live", "ready", "starting", "stopping"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """The conditions of readiness.

    Attributes:
        snapshot: whether quotas are loaded.
        store, catalog: ``ok``, or the fault; the process decides without either.
        unknown_settings: the ``QUOTAGATE_`` variables that are no settings.
    """

    snapshot: bool
    store: str = "ok"
    catalog: str = "ok"
    throttle_factor: float = 1.0
    stopping: bool = False
    unknown_settings: Sequence[str] = ()

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

    status: Annotated[
        Status, Field(description="Whether the process serves; `starting` and `stopping` are not ready.")
    ]
    store: Annotated[str, Field(description="`ok`, or what is wrong with the store.")]
    catalog: Annotated[str, Field(description="`ok`, or what is wrong with the catalog.")]
    throttle_factor: Annotated[float, Field(description="The factor for produce limits that is in force.")]
    settings: Annotated[
        Literal["ok", "unknown"],
        Field(description="`unknown`: a variable that begins with `QUOTAGATE_` is no setting."),
    ]
    unknown_settings: Annotated[
        Sequence[str], Field(description="The names of these variables; for callers with the scope `read`.")
    ] = ()


def router(ready: Callable[[], Readiness], metrics: Metrics, access: Access) -> APIRouter:
    """Return the routes of liveness, readiness and metrics."""
    routes = APIRouter(tags=["Health"])

    def answer(request: Request, state: Readiness, status: Status) -> Health:
        unknown = state.unknown_settings
        return Health(
            status,
            state.store,
            state.catalog,
            state.throttle_factor,
            "unknown" if unknown else "ok",
            tuple(unknown) if access.may_read(head_of(request.scope)) else (),
        )

    @routes.get(
        "/health/live",
        summary="Whether the process is live",
        response_model_exclude_defaults=True,
        responses={200: _answer("live", "Live.")},
    )
    async def live(request: Request) -> Health:
        return answer(request, ready(), "live")

    not_ready: dict[int | str, dict[str, Any]] = {
        200: _answer("ready", "Ready."),
        503: _answer("starting", "Not ready: no quotas are loaded yet, or the process is stopping."),
    }

    @routes.get(
        "/health/ready",
        summary="Whether the process can decide",
        response_model_exclude_defaults=True,
        responses=not_ready,
    )
    async def is_ready(request: Request, response: Response) -> Health:
        state = ready()
        if state.can_decide:
            return answer(request, state, "ready")
        response.status_code = 503
        return answer(request, state, "stopping" if state.stopping else "starting")

    @routes.get(
        "/metrics",
        summary="Metrics in Prometheus format",
        description="Open to the networks that may ask for decisions without a key. "
        "Others need a key with the scope read.",
        response_class=PlainTextResponse,
        responses={200: {"description": "Metrics.", "content": {"text/plain": _SCRAPED}}},
    )
    async def scrape(request: Request) -> Response:
        head = head_of(request.scope)
        if not access.is_open(head):
            access.require(head, "read")
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes


def _answer(status: str, description: str) -> dict[str, Any]:
    example = {"status": status, "store": "ok", "catalog": "ok", "throttle_factor": 1.0, "settings": "ok"}
    schema = {"$ref": "#/components/schemas/Health"}
    content = {"application/json": {"schema": schema, "example": example}}
    return {"model": Health, "description": description, "content": content}
