"""The routes of volumes: how they and the throttle factor stand, observations that are pushed, and drills."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import structlog
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.admission.caller_time import CallerTime
from app.admission.throttling import Standing, Throttling
from app.catalog.catalog import Catalog
from app.catalog.port import CatalogAway
from app.catalog.sql import Origin
from app.domain.quota import MAX_EXACT
from app.domain.volumes import Drill, Known, Rules, lapsed
from app.http import volumes_schema as schema
from app.http.access import Access
from app.http.methods import sharing
from app.http.problems import Problem, away
from app.http.query import Query
from app.http.quotas_lists_schema import THROTTLE_FACTOR
from app.http.quotas_wire import origin_of
from app.http.strict import JSON, answer, read_json
from app.http.volumes_wire import drill_of, observation_of
from app.store.port import StoreError

PATH: Final = "/v1/volumes"
DRILL: Final = "/v1/volumes:drill"
METHODS: Final = {PATH: "GET, POST", DRILL: "DELETE, POST"}
Told = Mapping[str, Any] | None
"""A drill as it is told of; None is no drill."""

log = structlog.get_logger("quotagate.volumes")


def router(throttling: Throttling, catalog: Catalog, access: Access, callers: CallerTime | None) -> APIRouter:
    """The routes.

    Args:
        catalog: has the history, which tells of drills.
        callers: the time under the caller's clock; None under the store's, where none may say.
    """
    routes = APIRouter(tags=["Volumes"], default_response_class=Response, route_class=sharing(METHODS))
    timed = callers is not None

    @routes.get(PATH, **schema.show(timed=timed))
    async def get_volumes(request: Request) -> Response:
        access.require(request.scope, "read")
        at_ms = _at_ms(request, timed=timed)
        with suppress(StoreError):  # what this node holds to is what it decides by
            await throttling.refresh()
        return _shown(throttling.standing(at_ms))

    @routes.post(PATH, **schema.push(timed=timed))
    async def push_volumes(request: Request) -> Response:
        access.require(request.scope, "write")
        seen = observation_of(await read_json(request, JSON))
        at_ms = _at_ms(request, timed=timed)
        _must_be_pushed(throttling.rules)
        try:
            await throttling.push(seen, at_ms)
        except StoreError as error:
            raise away(schema.AWAY.format(reason=error.reason)) from error
        if callers is not None and at_ms is not None:
            callers.seen(at_ms)
        return _shown(throttling.standing(at_ms))

    @routes.post(DRILL, **schema.BEGIN)
    async def begin_drill(request: Request) -> Response:
        access.require(request.scope, "admin")
        factor, for_ms = drill_of(await read_json(request, JSON))
        Query.of(request.scope).check()
        with suppress(StoreError):  # for its time, and whether another drill runs
            await throttling.refresh()
        now = throttling.standing()
        origin = origin_of(request, access)
        drill = Drill(factor, now.now_ms, now.now_ms + for_ms, origin.who)
        before, after = _told(now.drill), _told(drill)
        await _note(catalog, before, after, origin)
        try:
            await throttling.begin_drill(drill)
        except StoreError as error:
            await _take_back(catalog, after, before, origin, f"the drill did not begin: {error}")
            raise away(schema.AWAY.format(reason=error.reason)) from error
        log.info("a drill began", factor=factor, for_ms=for_ms, who=origin.who)
        return _shown(throttling.standing())

    @routes.delete(DRILL, **schema.END)
    async def end_drill(request: Request) -> Response:
        access.require(request.scope, "admin")
        Query.of(request.scope).check()
        try:
            await throttling.refresh()
        except StoreError as error:
            raise away(schema.AWAY.format(reason=error.reason)) from error
        before = _told(throttling.standing().drill)
        if before is None:
            raise Problem(404, schema.NO_DRILL)
        origin = origin_of(request, access)
        await _note(catalog, before, None, origin)
        try:
            await throttling.end_drill()
        except StoreError as error:
            await _take_back(catalog, None, before, origin, f"the drill did not end: {error}")
            raise away(schema.AWAY.format(reason=error.reason)) from error
        log.info("a drill was ended", who=origin.who)
        return Response(status_code=204)

    return routes


def _at_ms(request: Request, *, timed: bool) -> int | None:
    """The time that a request tells, under the caller's clock.

    Raises:
        Problem: 422 for a wrong one, and for one under the store's clock.
    """
    query = Query.of(request.scope, *(["at_ms"] if timed else []))
    at_ms = query.integer("at_ms", 0, MAX_EXACT) if timed else None
    query.check()
    return at_ms


def _must_be_pushed(rules: Rules) -> None:
    """Refuse what nobody waits for.

    Raises:
        Problem: 409 that says why.
    """
    if rules.source is None:
        raise Problem(409, schema.NO_SOURCE)
    if rules.source != "push":
        raise Problem(409, schema.OTHER_SOURCE.format(source=rules.source))


async def _note(catalog: Catalog, before: Told, after: Told, origin: Origin) -> None:
    """Have the history tell of a drill, before there is one.

    Raises:
        Problem: 503, as the catalog is away.
    """
    try:
        await catalog.note(THROTTLE_FACTOR, before, after, origin)
    except CatalogAway as error:
        raise away(schema.UNTOLD) from error


async def _take_back(catalog: Catalog, before: Told, after: Told, origin: Origin, why: str) -> None:
    """Have the history tell that it did not come to that, as well as it can."""
    again = replace(origin, at_ms=time.time_ns() // 1_000_000, reason=why)
    try:
        await catalog.note(THROTTLE_FACTOR, before, after, again)
    except CatalogAway as error:
        log.warning("the history tells wrongly of a drill", why=why, error=str(error))


def _shown(now: Standing) -> Response:
    """How volumes stand, as every route here answers."""
    found, state = now.in_force, now.state
    known = lapsed(state, now.now_ms, now.rules).volumes if state and now.rules.observes else ()
    document = {
        "factor": found.factor,
        "since_ms": found.since_ms,
        "valid_until_ms": found.valid_until_ms,
        "reason": found.reason,
        "source": now.rules.source,
        "next_check_ms": found.next_check_ms,
        "volumes": [_volume(volume, now) for volume in known],
        "drill": _told(now.drill),
    }
    return answer(document, headers={"Cache-Control": "no-store"})


def _volume(volume: Known, now: Standing) -> dict[str, object]:
    return {
        "broker": volume.broker,
        "dir": volume.dir,
        "total_bytes": volume.total_bytes,
        "available_bytes": volume.available_bytes,
        "state": volume.state(now.now_ms, now.rules),
        "observed_ms": volume.observed_ms,
    }


def _told(drill: Drill | None) -> Told:
    return None if drill is None else drill._asdict()
