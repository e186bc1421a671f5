"""The route that shows the whole deployment.

Callers with the scope read may ask in a loop. One answer is made at a time, in a thread, and a pause of
three times as long follows, so all of them take at most a quarter of a processor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.admission.overview.overview import STEP_MS, DeploymentOverview, Resolution, View
from app.admission.overview.series import (
    Sums,
    add_throttled,
    most_throttled,
    throttled_long,
    throttled_since,
)
from app.domain.quota import MAX_EXACT
from app.http.access.access import Access
from app.http.openapi import overview as schema
from app.http.query import Parameters
from app.http.routes.admin import admin_router
from app.http.strict import JSON
from app.store.samples import COUNTED

PATH: Final = "/v1/overview"
PAUSE_FACTOR: Final = 3.0
"""The pause after an answer was made, as a multiple of the time that it took."""


class ShownStore(NamedTuple):
    """A primary of the store; memory in bytes, None if unknown."""

    primary: str
    memory_bytes: int | None
    max_bytes: int | None
    faults: Sequence[str]


def router(
    overview: DeploymentOverview,
    access: Access,
    stores: Callable[[], Sequence[ShownStore]],
    factor: Callable[[], float],
) -> APIRouter:
    """Return the route.

    Args:
        stores: returns the primaries of the store.
        factor: returns the throttle factor in force.
    """
    routes = admin_router("Overview", access)
    making = asyncio.Lock()
    pauses_until = 0.0

    async def document(resolution: Resolution, since_ms: int | None) -> bytes:
        nonlocal pauses_until
        loop = asyncio.get_running_loop()
        async with making:
            if (pause_s := pauses_until - loop.time()) > 0:
                await asyncio.sleep(pause_s)
            began = loop.time()
            view = overview.view(resolution, since_ms)
            answer = await asyncio.to_thread(_document, view, resolution, stores(), factor())
            pauses_until = loop.time() + PAUSE_FACTOR * (loop.time() - began)
            return answer

    @routes.get(PATH, **schema.SHOW)
    async def get_overview(request: Request) -> Response:
        query = Parameters(request.scope["query_string"], "resolution", "since_ms")
        resolution = query.one("resolution", _resolution) or "second"
        since_ms = query.integer("since_ms", 0, MAX_EXACT)
        query.check()
        await overview.refresh()
        body = await document(resolution, since_ms)
        return Response(body, 200, {"Cache-Control": "no-store"}, JSON)

    return routes


def _resolution(text: str) -> Resolution:
    """Return a resolution.

    Raises:
        ValueError: the text is another word.
    """
    if text not in schema.RESOLUTIONS:
        raise ValueError("must be second or minute")
    return cast("Resolution", text)


def _document(view: View, resolution: Resolution, stores: Sequence[ShownStore], factor: float) -> bytes:
    """Return the answer, in some milliseconds."""
    step_ms = STEP_MS[resolution]
    throttled: Sums = {}
    for point in view.points:
        add_throttled(throttled, point.throttled)
    busiest = most_throttled(throttled, schema.MOST_THROTTLED)
    names = [(each.quota, each.bucket) for each in busiest]
    since_ms = throttled_since([*view.earlier, *view.points], step_ms, names)
    return msgspec.json.encode(
        schema.OverviewBody(
            now_ms=view.now_ms,
            nodes=[schema.OverviewNodeBody(*node) for node in view.nodes],
            series=[
                schema.OverviewPointBody(
                    at_ms=point.at * step_ms,
                    queue_asks=point.queue_asks,
                    latency=point.latency,
                    **dict(zip(COUNTED, point.counts, strict=True)),
                )
                for point in view.points
            ],
            latency_ms=schema.LATENCY_MS,
            throttled=[
                schema.OverviewThrottledBody(*name, each.asks, each.throttle_ms, since_ms[name])
                for name, each in zip(names, busiest, strict=True)
            ],
            throttled_long=[
                schema.OverviewLongThrottledBody(*name, at_ms)
                for name, at_ms in throttled_long(view.minutes, view.now_ms).items()
            ],
            stores=[schema.OverviewStoreBody(*store[:3], list(store.faults)) for store in stores],
            throttle_factor=factor,
        )
    )
