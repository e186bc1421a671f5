"""The routes of one entity's quotas: read, replace, patch and remove, with ETags against lost updates."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from app.catalog.catalog import Catalog, Conditions, EntityChange, QuotaSet
from app.domain.entity import Entity
from app.domain.errors import EntityError
from app.domain.ladder import MatchingRules
from app.http import quotas_alter, quotas_effective, quotas_list
from app.http import quotas_schema as schema
from app.http.access import Access
from app.http.methods import sharing
from app.http.problems import FieldError, ProblemError, unprocessable
from app.http.query import Parameters
from app.http.quotas_effective import LimitNow
from app.http.quotas_wire import absent, body_of, conditions_of, etag, origin_of, refusals, stale
from app.http.strict import JSON, MERGE_PATCH, answer, read_json

PATH: Final = "/v1/quotas/{entity:path}"
"""A path converter, because Starlette matches the unescaped path, in which a name may hold a slash."""
METHODS: Final = {PATH: "DELETE, GET, PATCH, PUT"}
COMMON_RULES: Final = MatchingRules()


def router(
    catalog: Catalog,
    access: Access,
    rules: MatchingRules = COMMON_RULES,
    limit_now: LimitNow = lambda quota, _ask: quota.limit,
    *,
    timed: bool = False,
) -> APIRouter:
    """Return all routes of quotas; they check access before anything else.

    Args:
        limit_now: returns a limit for an ask now, after the throttle factor.
        timed: under the caller's clock, where questions may have ``at_ms``.
    """
    routes = APIRouter(tags=["Quotas"], default_response_class=Response, route_class=sharing(METHODS))

    @routes.get(PATH, **schema.GET)
    async def get_quotas(request: Request) -> Response:
        access.require(request.scope, "read")
        entity, conditions = _entity(request.scope), conditions_of(request)
        async with refusals():
            found = await catalog.get(entity)
        if found is None:
            raise absent(f"no quotas are set on {entity}")
        if not Conditions(match=conditions.match).hold(found.version):
            raise stale(f"{entity} is at version {found.version}")
        if not conditions.hold(found.version):
            return Response(status_code=304, headers={"ETag": etag(found.version)})
        return _shown(found, 200)

    @routes.put(PATH, **schema.PUT)
    async def put_quotas(request: Request) -> Response:
        access.require(request.scope, "write")
        values = await read_json(request, JSON)
        entity = _entity(request.scope)
        async with refusals():
            written = await catalog.put(
                entity, _object(values), origin_of(request, access), conditions_of(request)
            )
        return _answer(written)

    @routes.patch(PATH, **schema.PATCH)
    async def patch_quotas(request: Request) -> Response:
        access.require(request.scope, "write")
        patch = await read_json(request, MERGE_PATCH, JSON)
        entity = _entity(request.scope)
        async with refusals():
            written = await catalog.patch(
                entity, _object(patch), origin_of(request, access), conditions_of(request)
            )
        return _answer(written)

    @routes.delete(PATH, **schema.DELETE)
    async def delete_quotas(request: Request) -> Response:
        access.require(request.scope, "write")
        entity = _entity(request.scope)
        async with refusals():
            written = await catalog.delete(entity, origin_of(request, access), conditions_of(request))
        return _answer(written)

    routes.include_router(quotas_list.router(catalog, access))
    routes.include_router(quotas_alter.router(catalog, access))
    routes.include_router(quotas_effective.router(catalog, access, rules, limit_now, timed=timed))
    return routes


def _entity(scope: Scope) -> Entity:
    """Return the entity of the raw path, decoded once, so that ``user=*`` and ``user=%2A`` differ.

    Generated clients escape a whole path segment, also the ``=``: a segment without one is decoded first.
    """
    Parameters.of(scope).check()
    raw = scope["raw_path"].decode("utf-8", "surrogateescape")
    segments = raw.split("/", 3)
    if len(segments) < 4 or "/" in segments[3]:
        raise ProblemError(404, "There is nothing at this path; write a slash in a name as %2F.")
    spelled = segments[3] if "=" in segments[3] else unquote(segments[3], errors="surrogateescape")
    try:
        return Entity.parse(spelled)
    except UnicodeEncodeError:
        raise unprocessable(FieldError("/entity", "must be UTF-8")) from None
    except EntityError as error:
        raise unprocessable(FieldError("/entity", str(error))) from None


def _object(body: Any) -> dict[str, object]:
    if isinstance(body, dict):
        return body
    raise unprocessable(FieldError("", "must be an object of quotas by their key"))


def _answer(written: EntityChange) -> Response:
    if written.after is None:
        return Response(status_code=204)
    return _shown(written.after, 201 if written.before is None else 200)


def _shown(found: QuotaSet, status: int) -> Response:
    headers = {"ETag": etag(found.version)}
    if status == 201:
        headers["Location"] = f"/v1/quotas/{found.entity}"
    return answer(body_of(found), status, headers)
