"""The volume routes: show the throttle factor, push observations, forget brokers, begin and end drills."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog
from fastapi import APIRouter
from msgspec import UNSET
from msgspec.structs import astuple
from starlette.requests import Request
from starlette.responses import Response

from app.admission.factor import ThrottlingStatus
from app.admission.throttle_factor.caller_clock import CallerTime
from app.admission.throttle_factor.throttling import Throttling
from app.catalog.catalog import Catalog
from app.catalog.errors import CatalogUnavailableError
from app.catalog.sql import Origin
from app.domain.errors import UnknownBrokerError, VolumeCountError
from app.domain.quota import MAX_EXACT
from app.domain.quota_value import pointer
from app.domain.volumes import Drill, Observation, Volume, VolumeRules, after_missed_pushes
from app.http.access.access import Access
from app.http.head import head_of
from app.http.openapi import volumes as schema
from app.http.openapi.quotas_lists import THROTTLE_FACTOR
from app.http.openapi.volumes import DrillBody, DrillWantedBody, PushedVolumesBody, VolumeBody, VolumesBody
from app.http.problems import FieldError, ProblemError, away, unprocessable
from app.http.query import Parameters
from app.http.routes.admin import admin_router, needing_store
from app.http.routes.quotas_wire import origin_of
from app.http.strict import answer, read_struct
from app.http.wire import read_name, wrong_name
from app.store.port import StoreError

PATH: Final = "/v1/volumes"
DRILL: Final = "/v1/volumes:drill"
DrillRecord = Mapping[str, Any] | None
"""A drill as the history records it; None is no drill."""

UNSAID: Final = (
    "a push without complete was taken as a part of the cluster: an agent that sees the whole cluster must "
    'send "complete": true, and any other "complete": false'
)
"""The warning about a push that the previous version took as the whole cluster."""

log = structlog.get_logger("quotagate.volumes")


def router(throttling: Throttling, catalog: Catalog, access: Access, callers: CallerTime | None) -> APIRouter:
    """Return the routes.

    Args:
        catalog: records drills in its history.
        callers: the time under the caller's clock; None under the store's.
    """
    routes = admin_router("Volumes", access)
    timed = callers is not None
    warned = False

    async def change(
        make: Callable[[], Awaitable[None]],
        before: Drill | None,
        after: Drill | None,
        origin: Origin,
        fails: str,
    ) -> None:
        """Record a change of the drill in the history and make it; record the opposite if it ``fails``."""
        old, new = (drill and drill._asdict() for drill in (before, after))
        try:
            await catalog.note(THROTTLE_FACTOR, old, new, origin)
        except CatalogUnavailableError as error:
            raise away(schema.UNTOLD) from error
        try:
            await make()
        except StoreError as error:
            await _take_back(catalog, new, old, origin, f"{fails}: {error}")
            raise away(schema.AWAY.format(reason=error.reason)) from error

    @routes.get(PATH, **schema.show(timed=timed))
    async def get_volumes(request: Request) -> Response:
        at_ms = _at_ms(request, timed=timed)
        with suppress(StoreError):  # then show the factor that this node decides by
            await throttling.refresh()
        return await asyncio.to_thread(_answer, throttling.status(at_ms))

    @routes.post(PATH, **schema.push(timed=timed))
    async def push_volumes(request: Request) -> Response:
        nonlocal warned
        seen, says_complete = await read_struct(request, PushedVolumesBody, observation_of)
        at_ms = _at_ms(request, timed=timed)
        _require_pushes(throttling.rules)
        try:
            with needing_store(schema.AWAY):
                await throttling.push(seen, at_ms)
        except VolumeCountError as error:
            why = schema.TOO_MANY.format(count=error.count)
            raise unprocessable(FieldError("/volumes", why)) from error
        if not says_complete and not warned:
            warned = True
            log.warning(UNSAID, who=access.who(head_of(request.scope)))
        if callers is not None and at_ms is not None:
            callers.note(at_ms)
        return await asyncio.to_thread(_answer, throttling.status(at_ms))

    @routes.delete(PATH, **schema.forget(timed=timed))
    async def forget_volumes(request: Request) -> Response:
        query = Parameters(request.scope["query_string"], "broker", *(["at_ms"] if timed else []))
        at_ms = _read_at_ms(query, timed=timed)
        broker = query.one("broker", read_name)
        if not query.texts("broker"):
            query.wrong("broker", "is required: the broker whose volumes are forgotten")
        query.check()
        assert broker is not None
        _require_pushes(throttling.rules)
        try:
            with needing_store(schema.AWAY):
                await throttling.forget(broker, at_ms)
        except UnknownBrokerError as error:
            raise ProblemError(404, schema.NO_BROKER.format(broker=broker)) from error
        if callers is not None and at_ms is not None:
            callers.note(at_ms)
        log.info(
            "the volumes of a broker were forgotten", broker=broker, who=access.who(head_of(request.scope))
        )
        return Response(status_code=204)

    @routes.post(DRILL, **schema.BEGIN)
    async def begin_drill(request: Request) -> Response:
        wanted = await read_struct(request, DrillWantedBody, lambda sent: sent)
        Parameters(request.scope["query_string"]).check()
        with suppress(StoreError):  # to learn the store's time, and whether another drill is running
            await throttling.refresh()
        now = throttling.status()
        origin = origin_of(request, access)
        drill = Drill(wanted.factor, now.now_ms, now.now_ms + wanted.for_ms, origin.who)
        begin = partial(throttling.begin_drill, drill)
        await change(begin, now.drill, drill, origin, "the drill did not begin")
        log.info("a drill began", factor=wanted.factor, for_ms=wanted.for_ms, who=origin.who)
        return await asyncio.to_thread(_answer, throttling.status())

    @routes.delete(DRILL, **schema.END)
    async def end_drill(request: Request) -> Response:
        Parameters(request.scope["query_string"]).check()
        with needing_store(schema.AWAY):
            await throttling.refresh()
        drill = throttling.status().drill
        if drill is None:
            raise ProblemError(404, schema.NO_DRILL)
        origin = origin_of(request, access)
        await change(throttling.end_drill, drill, None, origin, "the drill did not end")
        log.info("a drill was ended", who=origin.who)
        return Response(status_code=204)

    return routes


def observation_of(sent: PushedVolumesBody) -> tuple[Observation, bool]:
    """Return the observation that was pushed, and whether the push says if it is complete.

    Raises:
        ProblemError: 422 that names every error which the types do not show.
    """
    errors: list[FieldError] = []
    found: dict[tuple[str, str], Volume] = {}
    for at, pushed in enumerate(sent.volumes):
        volume = Volume(*astuple(pushed))
        wrong = [*_faults(volume, at)]
        if not wrong and found.setdefault(volume[:2], volume) is not volume:
            wrong = [
                FieldError(pointer("volumes", at), "is duplicated: name each directory of a broker once")
            ]
        errors += wrong
    complete = sent.complete is True
    if not sent.volumes and not complete:
        why = "must not be empty unless complete is true: then the cluster has no volumes"
        errors.append(FieldError("/volumes", why))
    if errors:
        raise unprocessable(*errors)
    return Observation(tuple(found.values()), None if complete else frozenset()), sent.complete is not UNSET


def _faults(volume: Volume, at: int) -> Iterator[FieldError]:
    for field in ("broker", "dir"):
        if why := wrong_name(getattr(volume, field)):
            yield FieldError(pointer("volumes", at, field), why)
    total, available = volume.total_bytes, volume.available_bytes
    if total is not None and available is not None and available > total:
        yield FieldError(pointer("volumes", at, "available_bytes"), "must be at most total_bytes")


def _at_ms(request: Request, *, timed: bool) -> int | None:
    """Return the ``at_ms`` of a request; it is allowed only under the caller's clock.

    Raises:
        ProblemError: 422 for an invalid one, and for any under the store's clock.
    """
    query = Parameters(request.scope["query_string"], *(["at_ms"] if timed else []))
    at_ms = _read_at_ms(query, timed=timed)
    query.check()
    return at_ms


def _read_at_ms(query: Parameters, *, timed: bool) -> int | None:
    return query.integer("at_ms", 0, MAX_EXACT) if timed else None


def _require_pushes(rules: VolumeRules) -> None:
    """Require that volumes come by pushes.

    Raises:
        ProblemError: 409 for another source, and for none.
    """
    if rules.source is None:
        raise ProblemError(409, schema.NO_SOURCE)
    if rules.source != "push":
        raise ProblemError(409, schema.OTHER_SOURCE.format(source=rules.source))


async def _take_back(
    catalog: Catalog, before: DrillRecord, after: DrillRecord, origin: Origin, why: str
) -> None:
    """Record in the history, if it can be reached, that the drill did not begin or end."""
    again = replace(origin, at_ms=time.time_ns() // 1_000_000, reason=why)
    try:
        await catalog.note(THROTTLE_FACTOR, before, after, again)
    except CatalogUnavailableError as error:
        log.warning("the history of a drill is wrong", why=why, error=str(error))


def _answer(now: ThrottlingStatus) -> Response:
    """Return the factor and the volumes, in milliseconds if there are thousands of them."""
    found, state = now.in_force, now.state
    known = after_missed_pushes(state, now.now_ms, now.rules).volumes if state and now.rules.observes else ()
    volumes = [
        VolumeBody(
            volume.broker,
            volume.dir,
            volume.total_bytes,
            volume.available_bytes,
            volume.state(now.now_ms, now.rules),
            volume.observed_ms,
        )
        for volume in known
    ]
    body = VolumesBody(
        found.factor,
        found.since_ms,
        found.valid_until_ms,
        found.reason,
        now.rules.source,
        found.next_check_ms,
        volumes,
        now.rules.limit.min_available_bytes,
        now.rules.limit.min_available_ratio,
        None if now.drill is None else DrillBody(*now.drill),
    )
    return answer(body, headers={"Cache-Control": "no-store"})
