"""The routes that list quotas by a filter, and the history of their changes."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.catalog.catalog import Catalog, Conditions
from app.domain.entity import Entity
from app.domain.errors import EntityError
from app.domain.matching import Filter
from app.http import quotas_lists_schema as schema
from app.http.access import Access
from app.http.query import Parameters
from app.http.quotas_wire import body_of, conditions_of, etag, refusals, stale
from app.http.strict import answer

MAX_LIMIT: Final = 1_000
LIMIT: Final = 100


def router(catalog: Catalog, access: Access) -> APIRouter:
    """Return the routes; they check access before anything else."""
    routes = APIRouter(tags=["Quotas"], default_response_class=Response)

    @routes.get("/v1/quotas", **schema.LIST)
    async def list_quotas(request: Request) -> Response:
        access.require(request.scope, "read")
        query = Parameters.of(request.scope, "match", "strict", "limit", "cursor")
        wanted = _filter(query)
        limit = query.integer("limit", 1, MAX_LIMIT) or LIMIT
        after = query.one("cursor", _entity_at, blank=True)
        query.check()
        async with refusals():
            page = await catalog.page(wanted, after, limit)
        conditions = conditions_of(request)
        headers = {"ETag": etag(page.version)}
        if not Conditions(match=conditions.match).hold(page.version):
            raise stale(f"the catalog is at version {page.version}")
        if not conditions.hold(page.version):
            return Response(status_code=304, headers=headers)
        cursor = None if page.last is None else _cursor("entity", str(page.last))
        return answer(schema.QuotaPageBody([*map(body_of, page.sets)], cursor), headers=headers)

    @routes.get("/v1/quotas:history", **schema.HISTORY)
    async def quotas_history(request: Request) -> Response:
        access.require(request.scope, "read")
        query = Parameters.of(request.scope, "entity", "limit", "cursor")
        of = query.one("entity", _subject, blank=True)
        limit = query.integer("limit", 1, MAX_LIMIT) or LIMIT
        before = query.one("cursor", _change_at, blank=True)
        query.check()
        async with refusals():
            found = await catalog.history(of, before, limit + 1)
        cursor = _cursor("change", str(found[limit - 1].id)) if len(found) > limit else None
        changes = [
            schema.QuotaChangeBody(past.at_ms, past.who, past.entity, past.before, past.after, past.reason)
            for past in found[:limit]
        ]
        return answer(schema.QuotaHistoryBody(changes, cursor))

    return routes


def _filter(query: Parameters) -> Filter:
    strict = query.flag("strict")
    try:
        return Filter.parse(query.texts("match"), strict=strict)
    except EntityError as error:
        query.wrong("match", str(error))
        return Filter()


def _subject(text: str) -> Entity | str:
    """Return whose history is asked for: an entity's, or the throttle factor's, which records drills."""
    return text if text == schema.THROTTLE_FACTOR else Entity.parse(text)


def _entity_at(cursor: str) -> Entity:
    """Return the entity after which a page begins."""
    try:
        entity = Entity.parse(spelled := _opened("entity", cursor))
    except EntityError:
        raise _invalid_cursor() from None
    if str(entity) != spelled:
        raise _invalid_cursor()
    return entity


def _change_at(cursor: str) -> int:
    """Return the number of the change before which a page begins."""
    number = _opened("change", cursor)
    if not number.isdecimal() or len(number) > 18:
        raise _invalid_cursor()
    return int(number)


def _cursor(of: str, place: str) -> str:
    return urlsafe_b64encode(f"{of} {place}".encode()).decode().rstrip("=")


def _opened(of: str, cursor: str) -> str:
    """Return the place in a cursor of this kind.

    Raises:
        ValueError: it is not one of ours.
    """
    try:
        named, _, place = (
            urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)).decode().partition(" ")
        )
    except ValueError:
        raise _invalid_cursor() from None
    if named != of or _cursor(of, place) != cursor:
        raise _invalid_cursor()
    return place


def _invalid_cursor() -> ValueError:
    return ValueError("must be the next_cursor of an earlier answer")
