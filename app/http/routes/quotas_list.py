"""The routes that read many quotas: list them, their history, and which of them limit a caller."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Final, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.catalog.catalog import Catalog
from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.errors import EntityError
from app.domain.ladder import ExplainedQuota, MatchingRules, explained_quotas
from app.domain.matching import Filter
from app.domain.quota import KEYS, MAX_EXACT, Quota
from app.http.openapi import quotas_lists as schema
from app.http.query import Parameters
from app.http.routes.quotas_wire import body_of, etag, refusals, unchanged
from app.http.strict import answer
from app.http.wire import read_address, read_name

T = TypeVar("T")

MAX_LIMIT: Final = 1_000
LIMIT: Final = 100
NAMES: Final = ("principal", "client_id", "ip", "broker", "listener")
EVERY_USAGE: Final = {key.usage: 0.0 for key in KEYS.values() if key.usage != "producer_ids"}

LimitNow = Callable[[Quota, Ask], float]
"""Returns the limit of a quota for an ask now, after the throttle factor."""


def add_lists(routes: APIRouter, catalog: Catalog) -> None:
    """Add the routes of the list and of the history."""

    @routes.get("/v1/quotas", **schema.LIST)
    async def list_quotas(request: Request) -> Response:
        query = Parameters(request.scope["query_string"], "match", "strict", "limit", "cursor")
        wanted = _filter(query)
        limit = query.integer("limit", 1, MAX_LIMIT) or LIMIT
        after = _place(query, "entity", Entity.parse)
        query.check()
        async with refusals():
            page = await catalog.page(wanted, after, limit)
        if same := unchanged(request, page.version, "the catalog"):
            return same
        cursor = None if page.last is None else _cursor("entity", str(page.last))
        body = schema.QuotaPageBody([*map(body_of, page.sets)], cursor)
        return answer(body, headers={"ETag": etag(page.version)})

    @routes.get("/v1/quotas:history", **schema.HISTORY)
    async def quotas_history(request: Request) -> Response:
        query = Parameters(request.scope["query_string"], "entity", "limit", "cursor")
        of = query.one("entity", _subject, blank=True)
        limit = query.integer("limit", 1, MAX_LIMIT) or LIMIT
        before = _place(query, "change", _change)
        query.check()
        async with refusals():
            found = await catalog.history(of, before, limit + 1)
        cursor = _cursor("change", str(found[limit - 1].id)) if len(found) > limit else None
        changes = [
            schema.QuotaChangeBody(past.at_ms, past.who, past.entity, past.before, past.after, past.reason)
            for past in found[:limit]
        ]
        return answer(schema.QuotaHistoryBody(changes, cursor))


def add_effective(
    routes: APIRouter, catalog: Catalog, rules: MatchingRules, limit_now: LimitNow, *, timed: bool
) -> None:
    """Add the route of effective limits; ``timed``: it takes ``at_ms``, as under the caller's clock."""

    @routes.get("/v1/quotas:effective", **schema.effective(timed=timed))
    async def effective_quotas(request: Request) -> Response:
        query = Parameters(request.scope["query_string"], *NAMES, *(["at_ms"] if timed else []))
        ask = _ask(query)
        query.check()
        found = explained_quotas(ask, catalog.snapshot.quotas, rules)
        return answer(
            schema.EffectiveQuotasBody([_body(each, limit_now(each.applied.quota, ask)) for each in found])
        )


def _filter(query: Parameters) -> Filter:
    strict = query.flag("strict")
    try:
        return Filter.parse(query.texts("match"), strict=strict)
    except EntityError as error:
        query.wrong("match", str(error))
        return Filter()


def _subject(text: str) -> Entity | str:
    """Return the subject of a history: an entity, or the throttle factor, whose history records drills."""
    return text if text == schema.THROTTLE_FACTOR else Entity.parse(text)


def _cursor(of: str, place: str) -> str:
    return urlsafe_b64encode(f"{of} {place}".encode()).decode().rstrip("=")


def _place(query: Parameters, of: str, read: Callable[[str], T]) -> T | None:
    """Return the place after which a page begins, from the ``cursor`` of an earlier answer of this kind."""

    def opened(cursor: str) -> T:
        try:
            spelled = urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)).decode()
            place = read(spelled.removeprefix(f"{of} "))
        except ValueError:
            place = None
        if place is None or _cursor(of, str(place)) != cursor:
            raise ValueError("must be the next_cursor of an earlier answer")
        return place

    return query.one("cursor", opened, blank=True)


def _change(number: str) -> int:
    """Return the number of a change; it is at least 0 and has at most 18 digits."""
    return abs(int(number[:18]))


def _ask(query: Parameters) -> Ask:
    """Return an ask of this caller with every kind of usage."""
    return Ask(
        usage=EVERY_USAGE,
        producer_ids=(),
        principal=query.one("principal", read_name),
        client_id=query.one("client_id", lambda text: read_name(text) if text else text),
        ip=query.one("ip", read_address, blank=True),
        broker=query.one("broker", read_name, blank=True),
        listener=query.one("listener", read_name, blank=True),
        at_ms=query.integer("at_ms", 0, MAX_EXACT),
    )


def _body(found: ExplainedQuota, limit_now: float) -> schema.EffectiveQuota:
    applied = found.applied
    ladder = [schema.Rung(entity, limit) for entity, limit in found.ladder]
    return schema.EffectiveQuota(
        applied.quota.key, applied.entity, applied.bucket, applied.quota.limit, limit_now, ladder
    )
