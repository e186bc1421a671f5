"""The route that explains which limits apply to a caller on this node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.catalog.catalog import Catalog
from app.domain.ask import Ask
from app.domain.ladder import ExplainedQuota, MatchingRules, explained_quotas
from app.domain.quota import KEYS, MAX_EXACT, Quota
from app.http import quotas_lists_schema as schema
from app.http.access import Access
from app.http.query import Parameters
from app.http.strict import answer
from app.http.wire import read_address, wrong_name

NAMES: Final = ("principal", "client_id", "ip", "broker", "listener")
EVERY_USAGE: Final = {key.usage: 0.0 for key in KEYS.values() if key.usage != "producer_ids"}


LimitNow = Callable[[Quota, Ask], float]
"""Returns the limit of a quota for an ask now, after the throttle factor."""


def router(
    catalog: Catalog, access: Access, rules: MatchingRules, limit_now: LimitNow, *, timed: bool
) -> APIRouter:
    """Return the route; ``timed``: it takes ``at_ms``, as all routes under the caller's clock."""
    routes = APIRouter(tags=["Quotas"], default_response_class=Response)

    @routes.get("/v1/quotas:effective", **schema.effective(timed=timed))
    async def effective_quotas(request: Request) -> Response:
        access.require(request.scope, "read")
        query = Parameters.of(request.scope, *NAMES, *(["at_ms"] if timed else []))
        ask = _ask(query)
        query.check()
        found = explained_quotas(ask, catalog.snapshot.quotas, rules)
        return answer(
            schema.EffectiveQuotasBody([_body(each, limit_now(each.applied.quota, ask)) for each in found])
        )

    return routes


def _ask(query: Parameters) -> Ask:
    """Return an ask of this caller with every kind of usage."""
    return Ask(
        usage=EVERY_USAGE,
        producer_ids=(),
        principal=query.one("principal", _name),
        client_id=query.one("client_id", lambda text: _name(text) if text else text),
        ip=query.one("ip", read_address, blank=True),
        broker=query.one("broker", _name, blank=True),
        listener=query.one("listener", _name, blank=True),
        at_ms=query.integer("at_ms", 0, MAX_EXACT),
    )


def _name(text: str) -> str:
    if wrong := wrong_name(text):
        raise ValueError(wrong)
    return text


def _body(found: ExplainedQuota, limit_now: float) -> schema.EffectiveQuota:
    applied = found.applied
    ladder = [schema.Rung(entity, limit) for entity, limit in found.ladder]
    return schema.EffectiveQuota(
        applied.quota.key, applied.entity, applied.bucket, applied.quota.limit, limit_now, ladder
    )
