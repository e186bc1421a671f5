"""The part of the OpenAPI document about the routes of one entity's quotas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from app.domain.quota import KEYS, LAYER_POLICIES, MAX_EXACT, QuotaKey
from app.domain.quota_value import CHOICES, FIELDS, MAX_LAYERS, MAX_WINDOW_MS, MIN_LAYER_MS, RANGES
from app.http.openapi.schema import (
    BODY_PROBLEMS,
    Schema,
    access_problems,
    answer_of,
    body_of,
    components,
    or_null,
    ref,
    route,
)
from app.http.problems import FieldError, ProblemBody, ProblemError, away, unprocessable
from app.http.strict import JSON, MERGE_PATCH


def _number(low: float, high: float, *, whole: bool, **more: Any) -> Schema:
    return {"type": "integer" if whole else "number", "minimum": low, "maximum": int(high), **more}


def _limit(row: QuotaKey) -> Schema:
    return _number(0, row.max_limit, whole=row.integer_limit, description="0 rejects every usage above 0.")


_LAYER_MS: Final = {
    "interval_ms": _number(
        MIN_LAYER_MS, MAX_WINDOW_MS, whole=True, description="How long a layer takes new ids."
    ),
    "ttl_ms": _number(
        MIN_LAYER_MS,
        MAX_LAYERS * MAX_WINDOW_MS,
        whole=True,
        description=f"How long a layer lives: 1 to {MAX_LAYERS} intervals.",
    ),
}
_ABOUT: Final = {
    "enforcement": "`deny`: work beyond the limit is refused until it fits. `delay`: it is done, and its "
    "answer is held.",
    "scope": "`cluster`: one bucket for all brokers. `broker`: one for each.",
    "on_store_failure": "What an ask gets while the store cannot be asked.",
    "algorithm": "How usage is measured: as Kafka's sampled rate, or by a token bucket.",
    "samples": "How many samples the measured window has.",
    "sample_ms": "The length of a sample, in milliseconds.",
    "window_ms": "The window in which new ids are counted, in milliseconds.",
}
"""The meaning of the fields of a quota, except for those with a schema of their own."""

_LIMITED: Final = {
    "producer_ids_rate": "New producer ids in a window (KIP-936).",
    "request_rate": "Requests per second (KIP-124's first proposal).",
    "request_percentage": "Percent of one thread's time: 10 ms of a second are 1 (KIP-124).",
    "producer_byte_rate": "Bytes produced per second.",
    "consumer_byte_rate": "Bytes fetched per second.",
    "controller_mutation_rate": "Partitions created or deleted per second (KIP-599).",
    "connection_creation_rate": "New connections per second from an address (KIP-612).",
    "max_connection_creation_rate": "New connections per second to a broker or listener (KIP-612).",
}
"""The work that each quota key limits."""

_LAYERS: Final[Schema] = {
    "description": "How long ids are remembered: a policy by its name, or its two times.",
    "anyOf": [
        {"type": "string", "enum": list(LAYER_POLICIES)},
        {
            "type": "object",
            "required": list(_LAYER_MS),
            "properties": _LAYER_MS,
            "additionalProperties": False,
        },
    ],
}


def _field(row: QuotaKey, field: str) -> Schema:
    if field == "limit":
        return _limit(row)
    if field in CHOICES:
        choices = ["deny"] if field == "enforcement" and row.algorithm == "producer_ids" else CHOICES[field]
        return {"type": "string", "enum": list(choices), "description": _ABOUT[field]}
    if field in RANGES:
        return _number(*RANGES[field], whole=True, description=_ABOUT[field])
    others: dict[str, Schema] = {
        "shadow": {"type": "boolean", "description": "Charge the bucket, but never change a decision."},
        "burst": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": MAX_EXACT,
            "description": "The most tokens that the bucket holds; by default `limit` times the seconds of "
            "all samples.",
        },
        "layers": _LAYERS,
    }
    return others[field]


def _object(row: QuotaKey, fields: tuple[str, ...], title: str, **narrowed: Schema) -> Schema:
    """Return the schema of an object of these fields.

    ``narrowed`` restricts some of them; a field whose default it excludes is required.
    """
    properties = {field: {**_field(row, field), **narrowed.get(field, {})} for field in fields}
    defaults = {"enforcement": row.enforcement, "algorithm": row.algorithm}
    needed = [
        field
        for field, default in defaults.items()
        if default not in properties.get(field, {}).get("enum", [default])
    ]
    return {
        "type": "object",
        "title": title,
        "required": ["limit", *needed],
        "properties": properties,
        "additionalProperties": False,
    }


def _value(row: QuotaKey) -> Schema:
    """Return the schema of a quota: its limit, or an object; a sampled rate under deny has at least two."""
    if row.algorithm == "producer_ids":
        objects = [_object(row, FIELDS["producer_ids"], "Producer ids")]
    else:
        sampled, token = {"enum": ["sampled_rate"]}, {"enum": ["token_bucket"]}
        several = {"minimum": 2}
        rate = FIELDS["sampled_rate"]
        objects = [
            _object(row, rate, "Sampled rate, delay", algorithm=sampled, enforcement={"enum": ["delay"]}),
            _object(
                row,
                rate,
                "Sampled rate, deny",
                algorithm=sampled,
                enforcement={"enum": ["deny"]},
                samples=several,
            ),
            _object(row, FIELDS["token_bucket"], "Token bucket", algorithm=token),
        ]
    return {"title": row.name, "description": _LIMITED[row.name], "anyOf": [_limit(row), *objects]}


def _patch(row: QuotaKey) -> Schema:
    """Return the schema of a quota's merge patch; a schema cannot say that its result must be a quota."""
    fields = FIELDS["producer_ids"] if row.algorithm == "producer_ids" else FIELDS["token_bucket"]
    properties = {f: _or_default(_field(row, f)) if f != "limit" else _limit(row) for f in fields}
    layer_ms = {name: _or_default(schema) for name, schema in _LAYER_MS.items()}
    if "layers" in properties:
        properties["layers"]["anyOf"].append(
            {"type": "object", "properties": layer_ms, "additionalProperties": False}
        )
    change = {
        "type": "object",
        "title": "Merge patch",
        "properties": properties,
        "additionalProperties": False,
    }
    about = f"{_LIMITED[row.name]} null deletes the quota."
    return {"title": row.name, "description": about, "anyOf": [_limit(row), change, {"type": "null"}]}


def _or_default(schema: Schema) -> Schema:
    """Return the schema of a field in a merge patch, where null means its default."""
    undescribed = {name: value for name, value in schema.items() if name != "description"}
    return or_null(undescribed, f"{schema['description']} null: the default.")


def _by_key(schemas: Mapping[str, Schema], **more: Any) -> Schema:
    return {"type": "object", "properties": dict(schemas), "additionalProperties": False, **more}


def _each_once(schemas: Iterable[Schema]) -> list[Schema]:
    found: list[Schema] = []
    for schema in schemas:
        if schema not in found:
            found.append(schema)
    return found


_BOUND: Final = {
    "type": "object",
    "description": "By how much admitted usage may exceed the limit in a window.",
    "required": ["ratio", "window_ms", "text"],
    "properties": {
        "ratio": {
            "anyOf": [{"type": "number"}, {"type": "null"}],
            "description": "The largest ratio of admitted usage to the limit in any such window; "
            "null if it is not bounded.",
        },
        "window_ms": {
            "type": "integer",
            "minimum": 0,
            "description": "The length of the window, in milliseconds.",
        },
        "text": {"type": "string", "description": "The bound in a sentence."},
    },
}


_QUOTAS: Final = _by_key(
    {key: ref("Quota") | {"description": _LIMITED[key]} for key in KEYS}, minProperties=1
)
_BOUNDS: Final = _by_key(dict.fromkeys(KEYS, _BOUND), minProperties=1)


class EntityQuotasBody(Struct):
    """The quotas that are set on an entity."""

    entity: Annotated[str, Meta(description="The entity in canonical spelling.")]
    quotas: Annotated[dict[str, Any], Meta(description="The quotas, by key.", extra_json_schema=_QUOTAS)]
    bounds: Annotated[
        dict[str, Any],
        Meta(description="How far each limit can be exceeded, by key.", extra_json_schema=_BOUNDS),
    ]
    version: Annotated[
        int,
        Meta(ge=1, le=MAX_EXACT, description="The version of the entity's quotas: their ETag."),
    ]


COMPONENTS: Final[Mapping[str, Schema]] = {
    "Quota": {
        "description": "A quota as it is returned: always an object.",
        "anyOf": _each_once(schema for row in KEYS.values() for schema in _value(row)["anyOf"][1:]),
    },
    "QuotaSet": _by_key(
        {row.name: _value(row) for row in KEYS.values()},
        minProperties=1,
        description="Quotas by key. A number is short for an object with that limit. A key must fit the "
        "entity.",
    ),
    "QuotaPatch": _by_key(
        {row.name: _patch(row) for row in KEYS.values()},
        description="A merge patch (RFC 7396): null deletes a quota, a number changes its limit only.",
    ),
    **components(EntityQuotasBody, ProblemBody),
}
"""Schemas of the OpenAPI document (``components.schemas``) that no router can add."""

_NAME: Final = r"(?:\*|(?:[A-Za-z0-9._~-]|%(?:[2-6][0-9A-F]|7[0-9A-E]))+)"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX, _COLON = "[0-9A-Fa-f]{1,4}", "(?::|%3A)"
_IPV6: Final = "|".join(
    [
        f"(?:{_HEX}{_COLON}){{7}}{_HEX}",
        *(f"(?:{_HEX}{_COLON}){{1,{k}}}(?:{_COLON}{_HEX}){{1,{7 - k}}}" for k in range(1, 7)),
        f"(?:{_HEX}{_COLON}){{1,7}}{_COLON}",
        f"{_COLON}(?:(?:{_COLON}{_HEX}){{1,7}}|{_COLON})",
    ]
)
_NO_DEFAULT: Final = _NAME.replace(r"\*|", "")
ENTITY_PATTERN: Final = (
    f"^(?:user={_NAME}(?:,client-id={_NAME})?|client-id={_NAME}(?:,user={_NAME})?"
    rf"|ip=(?:\*|{_BYTE}(?:\.{_BYTE}){{3}}|{_IPV6})"
    f"|broker={_NAME}|listener={_NAME}|broker={_NO_DEFAULT},listener={_NO_DEFAULT}"
    f"|listener={_NO_DEFAULT},broker={_NO_DEFAULT})$"
)

_ENTITY: Final[Schema] = {
    "name": "entity",
    "in": "path",
    "required": True,
    "description": "TYPE=NAME, or two of them with a comma. The types are user, client-id, user and "
    "client-id, ip, broker, listener, or broker and listener. A name is percent-encoded; * is the default, "
    "and %2A is the name *. A slash is %2F.",
    "schema": {"type": "string", "pattern": ENTITY_PATTERN},
    "examples": {
        "user": {"value": "user=alice"},
        "default user": {"value": "user=*"},
        "pair": {"value": "user=alice,client-id=etl"},
        "address": {"value": "ip=10.0.0.7"},
        "listener of a broker": {"value": "broker=1,listener=EXTERNAL"},
    },
}
IF_MATCH: Final[Schema] = {
    "name": "If-Match",
    "in": "header",
    "description": "Change only if the ETag is one of these, or with * if any quotas are set; otherwise 412.",
    "schema": {"type": "string"},
    "example": '"17"',
}
IF_NONE_MATCH: Final[Schema] = {
    "name": "If-None-Match",
    "in": "header",
    "description": "With *, create only; otherwise 412. On GET, 304 if the ETag is one of these.",
    "schema": {"type": "string"},
    "example": "*",
}
REASON: Final[Schema] = {
    "name": "X-Reason",
    "in": "header",
    "description": "Why; recorded in the history. At most 1,024 bytes of UTF-8 without control characters.",
    "schema": {"type": "string", "maxLength": 1024},
    "example": "launch week",
}
ETAG: Final = {"ETag": {"description": "The version as a strong ETag.", "schema": {"type": "string"}}}

ANSWER_EXAMPLE: Final = {
    "entity": "user=alice",
    "quotas": {"producer_ids_rate": {"limit": 5}},
    "bounds": {
        "producer_ids_rate": {"ratio": 1.0, "window_ms": 3_600_000, "text": "never more than 5 in any 3600 s"}
    },
    "version": 17,
}
AWAY: Final = away("The catalog is unreachable; the quotas loaded last stay in force.")
NOT_HTTP: Final = ProblemError(400, "This is not an HTTP/1.1 request.")
STALE: Final = ProblemError(412, "A condition does not hold: user=alice is at version 18.")

_NO_ENTITY: Final = FieldError("/entity", "empty name for user: write user=NAME, or user=* for the default")
_ABSENT: Final = ProblemError(404, "No quotas are set on user=alice.")
_WRITE: Final = [_ENTITY, IF_MATCH, IF_NONE_MATCH, REASON]
_WITH_BODY: Final = (
    *access_problems("write"),
    *BODY_PROBLEMS,
    _ABSENT,
    STALE,
    unprocessable(FieldError("/request_rate", "must be from 0 to 9007199254740991")),
    AWAY,
)


def _answer(description: str) -> Schema:
    return answer_of(description, "EntityQuotas", ANSWER_EXAMPLE, ETAG)


GET: Final = route(
    "Read an entity's quotas",
    {200: _answer("The quotas set on the entity."), 304: answer_of("Not modified.")},
    (*access_problems("read"), NOT_HTTP, _ABSENT, STALE, unprocessable(_NO_ENTITY), AWAY),
    parameters=[_ENTITY, IF_MATCH, IF_NONE_MATCH],
)
PUT: Final = route(
    "Replace an entity's quotas",
    {200: _answer("Replaced."), 201: _answer("Created.")},
    _WITH_BODY,
    parameters=_WRITE,
    body=body_of("QuotaSet", {"producer_ids_rate": 5, "request_rate": {"limit": 100, "enforcement": "deny"}}),
)
PATCH: Final = route(
    "Change some of an entity's quotas",
    {
        200: _answer("Changed."),
        201: _answer("Created."),
        204: answer_of("The last quota was deleted: the entity has none now."),
    },
    _WITH_BODY,
    parameters=_WRITE,
    body=body_of("QuotaPatch", {"request_rate": 200, "producer_ids_rate": None}, MERGE_PATCH, JSON),
)
DELETE: Final = route(
    "Delete an entity's quotas",
    {204: answer_of("Deleted.")},
    (*access_problems("write"), NOT_HTTP, _ABSENT, STALE, unprocessable(_NO_ENTITY), AWAY),
    parameters=_WRITE,
)
