"""The routes of one entity's quotas: read, replace, patch and remove, with ETags against lost updates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from app.catalog.catalog import Catalog, EntityChange, QuotaSet
from app.domain.entity import Entity
from app.domain.errors import EntityError
from app.domain.ladder import MatchingRules
from app.http.access.access import Access
from app.http.openapi import quotas as schema
from app.http.problems import FieldError, ProblemError, unprocessable
from app.http.query import Parameters
from app.http.routes import quotas_alter, quotas_list
from app.http.routes.admin import admin_router
from app.http.routes.quotas_list import LimitNow
from app.http.routes.quotas_wire import absent, body_of, conditions_of, etag, origin_of, refusals, unchanged
from app.http.strict import JSON, MERGE_PATCH, answer, read_json

PATH: Final = "/v1/quotas/{entity:path}"
"""A path converter, because Starlette matches the unescaped path, in which a name may hold a slash."""
COMMON_RULES: Final = MatchingRules()

Write = Callable[..., Awaitable[EntityChange]]
"""Changes an entity's quotas: takes the entity, the body if there is one, the origin and the conditions."""


def router(
    catalog: Catalog,
    access: Access,
    rules: MatchingRules = COMMON_RULES,
    limit_now: LimitNow = lambda quota, _ask: quota.limit,
    *,
    timed: bool = False,
) -> APIRouter:
    """Return all routes of quotas.

    Args:
        limit_now: returns a limit for an ask now, after the throttle factor.
        timed: under the caller's clock, where questions may have ``at_ms``.
    """
    routes = admin_router("Quotas", access)

    async def change(request: Request, write: Write, *types: str) -> Response:
        """Make one change of an entity's quotas; it has a body if there are media types for it."""
        bodies = [await read_json(request, *types, of=_object)] if types else []
        entity = _entity(request.scope)
        async with refusals():
            written = await write(entity, *bodies, origin_of(request, access), conditions_of(request))
        if written.after is None:
            return Response(status_code=204)
        return _shown(written.after, 201 if written.before is None else 200)

    @routes.get(PATH, **schema.GET)
    async def get_quotas(request: Request) -> Response:
        entity = _entity(request.scope)
        async with refusals():
            found = await catalog.get(entity)
        if found is None:
            raise absent(f"no quotas are set on {entity}")
        return unchanged(request, found.version, str(entity)) or _shown(found, 200)

    @routes.put(PATH, **schema.PUT)
    async def put_quotas(request: Request) -> Response:
        return await change(request, catalog.put, JSON)

    @routes.patch(PATH, **schema.PATCH)
    async def patch_quotas(request: Request) -> Response:
        return await change(request, catalog.patch, MERGE_PATCH, JSON)

    @routes.delete(PATH, **schema.DELETE)
    async def delete_quotas(request: Request) -> Response:
        return await change(request, catalog.delete)

    quotas_list.add_lists(routes, catalog)
    quotas_alter.add_routes(routes, catalog, access)
    quotas_list.add_effective(routes, catalog, rules, limit_now, timed=timed)
    return routes


def _entity(scope: Scope) -> Entity:
    """Return the entity of the raw path, decoded once, so that ``user=*`` and ``user=%2A`` differ.

    Generated clients escape the ``=`` too: a segment without one is decoded first.
    """
    Parameters(scope["query_string"]).check()
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


def _shown(found: QuotaSet, status: int) -> Response:
    headers = {"ETag": etag(found.version)}
    if status == 201:
        headers["Location"] = str(found.entity)  # relative, since a proxy may have removed a prefix
    return answer(body_of(found), status, headers)
