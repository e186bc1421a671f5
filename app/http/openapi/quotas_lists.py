"""The answers of the routes for many quotas, and their part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from app.domain.entity import TYPES
from app.domain.quota import KEYS
from app.http.bodies import Address, ClientName, Name
from app.http.faults import MUST
from app.http.openapi import quotas as quotas_schema
from app.http.openapi.quotas import (
    ANSWER_EXAMPLE,
    AWAY,
    ENTITY_PATTERN,
    ETAG,
    IF_MATCH,
    IF_NONE_MATCH,
    NOT_HTTP,
    REASON,
    STALE,
    EntityQuotasBody,
)
from app.http.openapi.schema import (
    BODY_PROBLEMS,
    Schema,
    access_problems,
    answer_of,
    at_ms_parameter,
    body_of,
    components,
    or_blank,
    ref,
    request_schema,
    route,
)
from app.http.problems import FieldError, ProblemBody, unprocessable

MAX_ALTERED: Final = 1_000
MAX_APPLIED: Final = 10_000
"""As many as fit a body of 1 MiB; a larger catalog is applied in parts."""


THROTTLE_FACTOR: Final = "throttle_factor"
"""The entity of drills in the history; no real entity has this spelling."""


class AlterationBody(Struct, forbid_unknown_fields=True):
    """The change of one entity's quotas."""

    entity: Annotated[str, Meta(description="The entity, spelled as in a path.")]
    quotas: Annotated[
        dict[str, Any],
        Meta(
            description="By key: a value replaces the whole quota, null deletes it; other keys stay as they "
            "are.",
            extra={MUST: "must be an object of quotas by key"},
        ),
    ]


def _at_most(most: int) -> Meta:
    """Return the description of a list of changes."""
    must = f"must be a list of at most {most:,} entries"
    return Meta(max_length=most, description="The changes, one for each entity.", extra={MUST: must})


DryRun = Annotated[bool, Meta(description="Dry run: return the result without writing.")]


class AlterationsBody(Struct, forbid_unknown_fields=True):
    """Alterations that are made each by itself."""

    alterations: Annotated[list[AlterationBody], _at_most(MAX_ALTERED)]
    validate_only: DryRun = False


class ApplicationBody(Struct, forbid_unknown_fields=True):
    """Alterations that are made together: all, or none."""

    alterations: Annotated[list[AlterationBody], _at_most(MAX_APPLIED)]
    validate_only: DryRun = False


_LIST_ORDER: Final = {
    "alterations": "type items maxItems description",
    "validate_only": "type default description",
}


QuotaKeyName = Annotated[str, Meta(description="The quota key.", extra_json_schema={"enum": list(KEYS)})]
QuotaValue = Annotated[Any, Meta(extra_json_schema={"anyOf": [ref("Quota"), {"type": "null"}]})]
Definitions = Annotated[Any, Meta(extra_json_schema=ref("QuotaDefinitions"))]
NonNegative = Annotated[float, Meta(ge=0)]


class QuotaPageBody(Struct):
    """A page of entities and their quotas."""

    quotas: Annotated[list[EntityQuotasBody], Meta(description="In the order of the entities' spelling.")]
    next_cursor: Annotated[str | None, Meta(description="For the next page; null after the last one.")]


class QuotaResult(Struct):
    """The result of one alteration."""

    entity: Annotated[str, Meta(description="The entity, in canonical spelling if it is valid.")]
    ok: Annotated[bool, Meta(description="Whether it was made, or with `validate_only` could be made.")]
    problem: Annotated[ProblemBody, Meta(description="Why the alteration failed.")] | UnsetType = UNSET


class QuotaResultsBody(Struct):
    """The result of each alteration."""

    results: Annotated[list[QuotaResult], Meta(description="One for each alteration, in the same order.")]


class PlannedChange(Struct):
    """What happens to one quota."""

    entity: Annotated[str, Meta(description="The entity that the quota is set on.")]
    quota: QuotaKeyName
    change: Annotated[
        Literal["added", "changed", "removed"],
        Meta(description="What happens to the quota.", extra_json_schema={"type": "string"}),
    ]
    before: Annotated[QuotaValue, Meta(description="The quota before; null: none was set.")]
    after: Annotated[QuotaValue, Meta(description="The quota after; null: none is set.")]
    buckets: Annotated[
        Literal["kept", "emptied"],
        Meta(description="Whether existing counts are kept or reset.", extra_json_schema={"type": "string"}),
    ]


class QuotaPlanBody(Struct):
    """The changes that were made, or with ``validate_only`` would be made."""

    version: Annotated[
        int,
        Meta(
            ge=0,
            description="The catalog's version after the change; with `validate_only`, the current one.",
        ),
    ]
    changes: Annotated[list[PlannedChange], Meta(description="No-op alterations are omitted.")]


class Rung(Struct):
    """One entity of a ladder."""

    entity: Annotated[str, Meta(description="The entity, or its default.")]
    limit: Annotated[float | None, Meta(description="null if no quota is set on it.")]


class EffectiveQuota(Struct):
    """A quota that applies to a caller."""

    quota: QuotaKeyName
    entity: Annotated[str, Meta(description="The entity that the quota is set on.")]
    bucket: Annotated[str, Meta(description="The bucket that is charged.")]
    limit: Annotated[NonNegative, Meta(description="The limit as it is set.")]
    limit_now: Annotated[NonNegative, Meta(description="The limit after the throttle factor of volumes.")]
    ladder: Annotated[
        list[Rung], Meta(description="The most specific entity first; the first limit that is set decides.")
    ]


class EffectiveQuotasBody(Struct):
    """The quotas that apply to a caller."""

    quotas: Annotated[list[EffectiveQuota], Meta(description="In the order in which a decision shows them.")]


class QuotaChangeBody(Struct):
    """One change in the history."""

    at_ms: Annotated[int, Meta(description="When, in milliseconds since 1970.")]
    who: Annotated[str, Meta(description="The name of the API key; admin for the admin key.")]
    entity: Annotated[str, Meta(description=f"An entity, or {THROTTLE_FACTOR} for drills.")]
    before: Annotated[Definitions, Meta(description="What was set before; null: nothing.")]
    after: Annotated[Definitions, Meta(description="What is set since; null: nothing.")]
    reason: Annotated[str | None, Meta(description="From X-Reason.")]


class QuotaHistoryBody(Struct):
    """Changes, newest first."""

    changes: Annotated[list[QuotaChangeBody], Meta(description="Newest first.")]
    next_cursor: Annotated[str | None, Meta(description="For older changes; null after the oldest one.")]


COMPONENTS: Final[Mapping[str, Schema]] = {
    **components(QuotaPageBody, QuotaResultsBody, QuotaPlanBody, EffectiveQuotasBody, QuotaHistoryBody),
    **quotas_schema.COMPONENTS,
    "QuotaAlterations": {
        **request_schema(AlterationsBody, _LIST_ORDER, {"alterations": {"items": ref("QuotaAlteration")}}),
        "description": "An invalid alteration has its errors in its result and does not affect the others.",
    },
    "QuotaAlteration": request_schema(
        AlterationBody, {"entity": "type description", "quotas": "type description"}, {}
    ),
    "QuotaApplication": request_schema(
        ApplicationBody, _LIST_ORDER, {"alterations": {"items": ref("QuotaSetting")}}
    ),
    "QuotaSetting": request_schema(
        AlterationBody,
        {
            "entity": "type pattern description",
            "quotas": "type properties additionalProperties description",
        },
        {
            "entity": {"pattern": ENTITY_PATTERN},
            "quotas": {
                "properties": {
                    key: {"anyOf": [*schema["anyOf"], {"type": "null"}], "description": schema["description"]}
                    for key, schema in quotas_schema.COMPONENTS["QuotaSet"]["properties"].items()
                },
                "additionalProperties": False,
            },
        },
    ),
    "QuotaDefinitions": {
        "description": "All quotas of an entity, or a drill; null for no quotas, or no drill.",
        "anyOf": [
            {"type": "object", "additionalProperties": ref("Quota")},
            ref("Drill"),
            {"type": "null"},
        ],
    },
}

CURSOR_EXAMPLE: Final = "ZW50aXR5IHVzZXI9YWxpY2U"
_LIMIT: Final = {
    "name": "limit",
    "in": "query",
    "description": "The most entries to return.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 1_000, "default": 100},
}
_NEXT: Final = {
    "name": "cursor",
    "in": "query",
    "description": "The `next_cursor` of the previous page. It stays valid while quotas change.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]*$"},
}
_MATCH: Final = {
    "name": "match",
    "in": "query",
    "description": "TYPE=NAME matches this name, TYPE=* the default, and TYPE any name and the default. If "
    "there are several, all must match. Percent-encode a name as in a path, and then the whole value as part "
    "of a query.",
    "schema": {
        "type": "array",
        "uniqueItems": True,
        "items": {"type": "string", "pattern": f"^(?:{'|'.join(TYPES)})$|{ENTITY_PATTERN}"},
    },
    "examples": {
        "one user's": {"value": ["user=alice"]},
        "every client of a user": {"value": ["user=alice", "client-id"]},
        "the default user": {"value": ["user=*"]},
    },
}
_STRICT: Final = {
    "name": "strict",
    "in": "query",
    "description": "Only entities that have exactly the types in `match`.",
    "schema": {"type": "boolean", "default": False},
}
LIST: Final = route(
    "List quotas",
    {
        200: answer_of(
            "A page of quotas.",
            "QuotaPage",
            {"quotas": [ANSWER_EXAMPLE], "next_cursor": CURSOR_EXAMPLE},
            ETAG,
        ),
        304: answer_of("Not modified."),
    },
    (
        *access_problems("read"),
        NOT_HTTP,
        STALE,
        unprocessable(FieldError("/match", "ip is matched twice")),
        AWAY,
    ),
    description="Pages are in the order of the entities' spelling. The ETag is the version of the whole "
    "catalog that the page shows; `quotas:apply` takes it in If-Match.",
    parameters=[_MATCH, _STRICT, _LIMIT, _NEXT, IF_MATCH, IF_NONE_MATCH],
)
HISTORY: Final = route(
    "Read who changed quotas, when and why",
    {
        200: answer_of(
            "Changes.",
            "QuotaHistory",
            {
                "changes": [
                    {
                        "at_ms": 1_764_000_000_000,
                        "who": "admin",
                        "entity": "user=alice",
                        "before": None,
                        "after": {"producer_ids_rate": {"limit": 5}},
                        "reason": "launch week",
                    }
                ],
                "next_cursor": None,
            },
        )
    },
    (
        *access_problems("read"),
        NOT_HTTP,
        unprocessable(FieldError("/limit", "must be an integer from 1 to 1000")),
        AWAY,
    ),
    description="Newest first: the changes of one entity, of drills, or all. With "
    "QUOTAGATE_HISTORY_RETENTION older changes are gone, except the newest of each entity. To undo the "
    "newest change of an entity, compare its `after` with the entity's quotas, and PUT its `before` with "
    "their version in If-Match; DELETE if it is null.",
    parameters=[
        {
            "name": "entity",
            "in": "query",
            "description": "Spelled as in a path, then encoded as part of a query; or "
            f"{THROTTLE_FACTOR}, for the drills of volumes.",
            "schema": {"type": "string", "pattern": f"^$|^{THROTTLE_FACTOR}$|{ENTITY_PATTERN}"},
            "example": "user=alice",
        },
        _LIMIT,
        _NEXT,
    ],
)
_BAD_LIMIT: Final = FieldError(
    "/alterations/1/quotas/request_rate/limit", "must be from 0 to 9007199254740991"
)
_WRITE: Final = [
    {**IF_MATCH, "description": "Change only if the whole catalog is at this version (the list's ETag)."},
    REASON,
]
_WRITE_PROBLEMS: Final = (*access_problems("write"), *BODY_PROBLEMS, STALE, AWAY)
ALTER: Final = route(
    "Alter the quotas of many entities independently",
    {
        200: answer_of(
            "The result of each alteration.",
            "QuotaResults",
            {
                "results": [
                    {"entity": "user=alice", "ok": True},
                    {"entity": "user=bob", "ok": False, "problem": unprocessable(_BAD_LIMIT).document()},
                ]
            },
        )
    },
    (*_WRITE_PROBLEMS, unprocessable(FieldError("/alterations", "is required"))),
    description=f"At most {MAX_ALTERED:,} alterations. Each is applied atomically, and an invalid "
    "alteration does not affect the others. If an entity is named more than once, all its alterations fail.",
    parameters=_WRITE,
    body=body_of(
        "QuotaAlterations",
        {
            "alterations": [
                {"entity": "user=alice", "quotas": {"producer_ids_rate": 5, "request_rate": None}},
                {"entity": "user=bob", "quotas": {"request_rate": {"limit": -1}}},
            ],
            "validate_only": False,
        },
    ),
)
APPLY: Final = route(
    "Apply a set of quotas, all or nothing",
    {
        200: answer_of(
            "The changes.",
            "QuotaPlan",
            {
                "version": 18,
                "changes": [
                    {
                        "entity": "user=alice",
                        "quota": "producer_ids_rate",
                        "change": "changed",
                        "before": {"limit": 4},
                        "after": {"limit": 5},
                        "buckets": "kept",
                    }
                ],
            },
        )
    },
    (*_WRITE_PROBLEMS, unprocessable(_BAD_LIMIT)),
    description=f"At most {MAX_APPLIED:,} alterations, in one transaction. With `validate_only` the answer "
    "is the plan. To apply exactly this plan, send its version in If-Match.",
    parameters=_WRITE,
    body=body_of(
        "QuotaApplication",
        {
            "alterations": [
                {"entity": "user=alice", "quotas": {"producer_ids_rate": 5, "request_rate": None}}
            ],
            "validate_only": False,
        },
    ),
)
# An empty value counts as absent, except for the principal, which cannot be empty, and the client, which can.
_WHO: Final = {
    "principal": ("The principal.", Name, "alice"),
    "client_id": ("The client id; it may be empty.", ClientName, "etl"),
    "ip": ("The client's address.", Address, "10.0.0.7"),
    "broker": ("The broker.", ClientName, "1"),
    "listener": ("The listener of the broker.", ClientName, "EXTERNAL"),
}


def effective(*, timed: bool) -> dict[str, Any]:
    """Return the keyword arguments of the route of effective limits; ``timed``: it takes ``at_ms``."""
    parameters: list[Schema] = [
        {
            "name": name,
            "in": "query",
            "description": description,
            "schema": or_blank(msgspec.json.schema(type_)),
            "examples": {"one": {"value": example}},
        }
        for name, (description, type_, example) in _WHO.items()
    ]
    wrong = FieldError("/ip", "must be an IPv4 or IPv6 address, not a host name")
    return route(
        "Explain which limits apply to a caller",
        {
            200: answer_of(
                "The quotas that apply.",
                "EffectiveQuotas",
                {
                    "quotas": [
                        {
                            "quota": "request_rate",
                            "entity": "user=alice",
                            "bucket": "user=alice",
                            "limit": 100,
                            "limit_now": 100,
                            "ladder": [
                                {"entity": "user=alice", "limit": 100},
                                {"entity": "user=*", "limit": 50},
                            ],
                        }
                    ]
                },
            )
        },
        (*access_problems("read"), NOT_HTTP, unprocessable(wrong)),
        description="Lists the quotas in force on this node that would apply to an ask of this caller with "
        "every kind of usage, each with its whole ladder.",
        parameters=parameters + at_ms_parameter(timed=timed),
    )
