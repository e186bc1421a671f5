"""The answer of the route of shadow quotas, and its part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from app.domain.quota import KEYS, Enforcement
from app.http.openapi.quotas import AWAY, ENTITY_PATTERN, NOT_HTTP
from app.http.openapi.schema import Schema, access_problems, answer_of, components, route
from app.http.problems import FieldError, ProblemError, away, unprocessable

STORE_AWAY: Final = "The store does not answer ({reason}): the counts of shadow quotas are there."

Count = Annotated[int, Meta(ge=0)]
Instant = Annotated[int, Meta(ge=0)]


class ShadowQuotaBody(Struct):
    """A shadow quota, and its verdicts on all asks that went ahead since its definition last changed."""

    quota: Annotated[str, Meta(description="The quota key.", extra_json_schema={"enum": list(KEYS)})]
    limit: Annotated[float, Meta(ge=0, description="The limit.")]
    enforcement: Annotated[
        Enforcement, Meta(description="What it would do.", extra_json_schema={"type": "string"})
    ]
    since_ms: Annotated[
        Instant | None,
        Meta(description="When its definition last changed; null: before the catalog kept that time."),
    ]
    window_ms: Annotated[
        Annotated[int, Meta(ge=1)],
        Meta(description="Its window. A shorter shadow period says little; ids in use are learnt in one."),
    ]
    admit: Annotated[Count, Meta(description="Asks that it would have admitted too.")]
    delay: Annotated[Count, Meta(description="Asks that it would have delayed.")]
    throttle: Annotated[Count, Meta(description="Asks that it would have refused for a time.")]
    reject: Annotated[Count, Meta(description="Asks that it would have refused for good.")]


class ShadowQuotasBody(Struct):
    """The shadow quotas of an entity."""

    entity: Annotated[str, Meta(description="The entity in canonical spelling.")]
    version: Annotated[int, Meta(ge=1, description="Its version, for If-Match.")]
    now_ms: Annotated[Instant, Meta(description="When the counts were read, in the store's time.")]
    shadows: Annotated[list[ShadowQuotaBody], Meta(description="In the order of the quota keys.")]


COMPONENTS: Final[Mapping[str, Schema]] = components(ShadowQuotasBody)
"""Schemas of the OpenAPI document (``components.schemas``) that no router can add."""

_SHOWN: Final = {
    "entity": "user=*",
    "version": 17,
    "now_ms": 1_763_719_742_123,
    "shadows": [
        {
            "quota": "request_rate",
            "limit": 100,
            "enforcement": "deny",
            "since_ms": 1_763_716_142_000,
            "window_ms": 11_000,
            "admit": 9_950,
            "delay": 0,
            "throttle": 50,
            "reject": 0,
        }
    ],
}

SHOW: Final = route(
    "Show what shadow quotas would have done",
    {200: answer_of("The shadow quotas of an entity.", "ShadowQuotas", _SHOWN)},
    (
        *access_problems("read"),
        NOT_HTTP,
        ProblemError(404, "No quotas are set on user=bob."),
        unprocessable(FieldError("/entity", "is required: name an entity, such as user=alice")),
        AWAY,
        away(STORE_AWAY.format(reason="connection")),
    ),
    description="The counts are of the whole deployment. Each node adds its own every second, and once more "
    "when it stops; the last second of a process that was killed is lost. An ask counts for a shadow quota "
    "if it was let through, by what this quota alone would have said of it. Peeks, leases and answers "
    "without the store do not count. A change of the quota's definition begins the counts anew. They are "
    "kept in the store, for 90 days after the last ask. To make the quota live, send PATCH "
    '/v1/quotas/{entity} with `{"request_rate": {"shadow": null}}` and this version in If-Match.',
    parameters=[
        {
            "name": "entity",
            "in": "query",
            "required": True,
            "description": "Spelled as in a path, then encoded as part of a query.",
            "schema": {"type": "string", "pattern": ENTITY_PATTERN},
            "example": "user=*",
        }
    ],
)
