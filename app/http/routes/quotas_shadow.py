"""The route that shows what the shadow quotas of an entity would have done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.catalog.catalog import Catalog, QuotaSet
from app.domain.entity import Entity
from app.http.access.access import Access
from app.http.openapi import quotas_shadow as schema
from app.http.query import Parameters
from app.http.routes.admin import admin_router, needing_store
from app.http.routes.quotas_wire import absent, refusals
from app.http.strict import answer
from app.store.compiled_quota import ShadowPeriod

PATH: Final = "/v1/quotas:shadow"
MISSING: Final = "is required: name an entity, such as user=alice"


class CountSource(Protocol):
    """The source of counts, such as ``app.store.shadow_counts.ShadowCounts``."""

    async def read(self, periods: Sequence[ShadowPeriod]) -> tuple[int, list[list[int]]]:
        """Return the store's time (ms), and the counts of each quota; raise ``StoreError``."""


def router(catalog: Catalog, access: Access, counts: CountSource) -> APIRouter:
    """Return the route."""
    routes = admin_router("Quotas", access)

    @routes.get(PATH, **schema.SHOW)
    async def shadow_quotas(request: Request) -> Response:
        query = Parameters(request.scope["query_string"], "entity")
        if not query.texts("entity"):
            query.wrong("entity", MISSING)
        entity = query.one("entity", Entity.parse)
        query.check()
        assert entity is not None
        async with refusals():
            found = await catalog.get(entity)
        if found is None:
            raise absent(f"no quotas are set on {entity}")
        periods = [*_periods(found)]
        with needing_store(schema.STORE_AWAY):
            now_ms, counted = await counts.read(periods)
        shadows = [_body(found, period, each) for period, each in zip(periods, counted, strict=True)]
        return answer(
            schema.ShadowQuotasBody(str(entity), found.version, now_ms, shadows),
            headers={"Cache-Control": "no-store"},
        )

    return routes


def _periods(found: QuotaSet) -> Iterator[ShadowPeriod]:
    """The shadow quotas of an entity."""
    for key, quota in found.quotas.items():
        if quota.shadow:
            yield ShadowPeriod(key, str(found.entity), quota.since_ms)


def _body(found: QuotaSet, period: ShadowPeriod, counts: Sequence[int]) -> schema.ShadowQuotaBody:
    quota = found.quotas[period.quota]
    _, window_ms = quota.bound
    return schema.ShadowQuotaBody(
        period.quota, quota.limit, quota.enforcement, period.since_ms or None, window_ms, *counts
    )
