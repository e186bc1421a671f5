"""The route that shows the whole deployment.

Callers with the scope read may ask in a loop. One answer is made at a time, in a thread, and a pause of
three times as long follows, so making them takes at most a quarter of a processor. Callers that have the same
entries already share an answer, until the node reads the store again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, cast

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.admission.overview.overview import KEPT_S, STEP_MS, DeploymentOverview, Resolution, View
from app.admission.overview.series import (
    Point,
    Sums,
    add_throttled,
    most_throttled,
    present,
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
MOST_KEPT: Final = 8
"""The most answers that are kept; the largest has a day by the minute, some 400 KiB."""

LongThrottled = Mapping[tuple[str, str], int]
"""Since when buckets have throttled asks, in ms, by quota and name."""


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
    answers = _Answers(overview, stores, factor)

    @routes.get(PATH, **schema.SHOW)
    async def get_overview(request: Request) -> Response:
        query = Parameters(request.scope["query_string"], "resolution", "since_ms")
        resolution = query.one("resolution", _resolution) or "second"
        since_ms = query.integer("since_ms", 0, MAX_EXACT)
        query.check()
        await overview.refresh()
        body = await answers.get(request, resolution, since_ms)
        return Response(body, 200, {"Cache-Control": "no-store"}, JSON)

    return routes


class _Kept(NamedTuple):
    """An answer, the read of the store that it shows, and until when it is kept by the loop's clock."""

    body: bytes
    read_at: float
    until: float


class _Answers:
    """Makes answers, and keeps them until the node reads the store again, for a second at most."""

    def __init__(
        self,
        overview: DeploymentOverview,
        stores: Callable[[], Sequence[ShownStore]],
        factor: Callable[[], float],
    ) -> None:
        self._overview = overview
        self._stores = stores
        self._factor = factor
        self._making = asyncio.Lock()
        self._pauses_until = 0.0
        self._kept: dict[tuple[Resolution, int], _Kept] = {}
        """By the resolution and the newest entry that the caller has; oldest first."""
        self._newest: list[Point] = []
        self._long: LongThrottled = {}
        """The buckets throttled for long, as of ``_newest``."""

    async def get(self, request: Request, resolution: Resolution, since_ms: int | None) -> bytes:
        """Return an answer; nothing if the caller has left."""
        wanted = resolution, -1 if since_ms is None else since_ms // STEP_MS[resolution]
        if (found := self._found(wanted)) is not None:
            return found
        async with self._making:
            if (found := self._found(wanted)) is not None:
                return found
            if await request.is_disconnected():
                return b""
            loop = asyncio.get_running_loop()
            if (pause_s := self._pauses_until - loop.time()) > 0:
                await asyncio.sleep(pause_s)
            began, read_at = loop.time(), self._overview.read_at
            view = self._overview.view(resolution, since_ms)
            body = await asyncio.to_thread(self._made, view, resolution, self._stores(), self._factor())
            self._pauses_until = loop.time() + PAUSE_FACTOR * (loop.time() - began)
            self._kept.pop(wanted, None)
            self._kept[wanted] = _Kept(body, read_at, began + KEPT_S)
            if len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            return body

    def _found(self, wanted: tuple[Resolution, int]) -> bytes | None:
        """Return the kept answer, unless it is too old."""
        found = self._kept.get(wanted)
        if found is None or found.read_at != self._overview.read_at:
            return None
        return found.body if asyncio.get_running_loop().time() < found.until else None

    def _made(self, view: View, resolution: Resolution, stores: Sequence[ShownStore], factor: float) -> bytes:
        newest = present(view.minutes, view.now_ms)
        if newest != self._newest:
            self._newest, self._long = newest, throttled_long(view.minutes, newest)
        return _document(view, resolution, self._long, stores, factor)


def _resolution(text: str) -> Resolution:
    """Return a resolution.

    Raises:
        ValueError: the text is another word.
    """
    if text not in schema.RESOLUTIONS:
        raise ValueError("must be second or minute")
    return cast("Resolution", text)


def _document(
    view: View,
    resolution: Resolution,
    long: LongThrottled,
    stores: Sequence[ShownStore],
    factor: float,
) -> bytes:
    """Return the answer, in some milliseconds."""
    step_ms = STEP_MS[resolution]
    throttled: Sums = {}
    for point in view.points:
        add_throttled(throttled, point.throttled)
    busiest = most_throttled(throttled, schema.MOST_SHOWN)
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
            throttled_long=[schema.OverviewLongThrottledBody(*name, at_ms) for name, at_ms in long.items()],
            stores=[schema.OverviewStoreBody(*store[:3], list(store.faults)) for store in stores],
            throttle_factor=factor,
        )
    )
