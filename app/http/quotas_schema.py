"""What the OpenAPI document says about the routes of quotas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from app.domain.quota import KEYS, LAYER_POLICIES, MAX_EXACT, QuotaKey
from app.domain.quota_value import CHOICES, FIELDS, MAX_LAYERS, MAX_WINDOW_MS, MIN_LAYER_MS, RANGES
from app.http.problems import PROBLEM_JSON, FieldError, Problem, unprocessable
from app.http.strict import JSON, MERGE_PATCH

Schema = dict[str, Any]


def _number(low: float, high: float, *, whole: bool, **more: Any) -> Schema:
    return {"type": "integer" if whole else "number", "minimum": low, "maximum": int(high), **more}


def _limit(row: QuotaKey) -> Schema:
    unit = "rejects every usage above 0"
    return _number(0, row.max_limit, whole=row.integer_limit, description=f"0 {unit}.")


_LAYER_MS: Final = {
    "interval_ms": _number(MIN_LAYER_MS, MAX_WINDOW_MS, whole=True, description="How long a layer is open."),
    "ttl_ms": _number(
        MIN_LAYER_MS,
        MAX_LAYERS * MAX_WINDOW_MS,
        whole=True,
        description=f"How long a layer lives: one interval to {MAX_LAYERS} of them.",
    ),
}
_LAYERS: Final[Schema] = {
    "anyOf": [
        {"type": "string", "enum": list(LAYER_POLICIES)},
        {
            "type": "object",
            "required": list(_LAYER_MS),
            "properties": _LAYER_MS,
            "additionalProperties": False,
        },
    ]
}


def _field(row: QuotaKey, field: str) -> Schema:
    if field == "limit":
        return _limit(row)
    if field in CHOICES:
        choices = ["deny"] if field == "enforcement" and row.algorithm == "producer_ids" else CHOICES[field]
        return {"type": "string", "enum": list(choices)}
    if field in RANGES:
        return _number(*RANGES[field], whole=True)
    others: dict[str, Schema] = {
        "shadow": {"type": "boolean", "description": "Charge, but never change a decision."},
        "burst": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_EXACT},
        "layers": _LAYERS,
    }
    return others[field]


def _object(row: QuotaKey, fields: tuple[str, ...], title: str, **said: Schema) -> Schema:
    """An object of these fields; ``said`` narrows some, which must be there if it rules out their default."""
    properties = {field: {**_field(row, field), **said.get(field, {})} for field in fields}
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
    """A quota's value: its limit, or an object; a sampled rate under deny has two samples or more."""
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
    return {"title": row.name, "anyOf": [_limit(row), *objects]}


def _patch(row: QuotaKey) -> Schema:
    """A merge patch of a quota: what it leaves must be a quota, which no schema can say."""
    fields = FIELDS["producer_ids"] if row.algorithm == "producer_ids" else FIELDS["token_bucket"]
    properties = {
        f: {"anyOf": [_field(row, f), {"type": "null"}]} if f != "limit" else _limit(row) for f in fields
    }
    layer_ms = {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in _LAYER_MS.items()}
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
    return {"title": row.name, "anyOf": [_limit(row), change, {"type": "null"}]}


def _by_key(schemas: Mapping[str, Schema], **more: Any) -> Schema:
    return {"type": "object", "properties": dict(schemas), "additionalProperties": False, **more}


def ref(name: str) -> Schema:
    """A reference to a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def or_null(schema: Schema, description: str) -> Schema:
    """A value that may be null, and what it says."""
    return {"anyOf": [schema, {"type": "null"}], "description": description}


def at_ms_parameter(*, timed: bool) -> list[Schema]:
    """The query parameter by which a caller may tell the time, where callers decide the clock."""
    if not timed:
        return []
    when = "When; without it the newest time of any ask or observation that this process took."
    return [
        {
            "name": "at_ms",
            "in": "query",
            "description": when,
            "schema": {"type": "integer", "minimum": 0, "maximum": MAX_EXACT},
            "example": 1_000_000,
        }
    ]


def access_problems(scope: str) -> list[Problem]:
    """What a route answers without a key of this scope."""
    return [
        Problem(401, f"This needs a key with the scope {scope}: send Authorization: Bearer KEY."),
        Problem(403, f"The key lacks the scope {scope}."),
    ]


def answered_with(problem: Problem) -> Schema:
    """A problem as an answer of a route."""
    document = problem.document()
    content = {PROBLEM_JSON: {"schema": ref("Problem"), "example": document}}
    headers = {
        name: {"description": "Seconds.", "schema": {"type": "string"}, "example": value}
        for name, value in problem.headers.items()
    }
    return {"description": document["title"], "content": content} | ({"headers": headers} if headers else {})


def _each_once(schemas: Iterable[Schema]) -> list[Schema]:
    found: list[Schema] = []
    for schema in schemas:
        if schema not in found:
            found.append(schema)
    return found


_BOUND: Final = {
    "type": "object",
    "required": ["ratio", "window_ms", "text"],
    "properties": {
        "ratio": {
            "anyOf": [{"type": "number"}, {"type": "null"}],
            "description": "The worst ratio of admitted to limit over any such window; null bounds nothing.",
        },
        "window_ms": {"type": "integer", "minimum": 0},
        "text": {"type": "string"},
    },
}

COMPONENTS: Final[Mapping[str, Schema]] = {
    "Quota": {
        "description": "A quota as it is shown: always an object.",
        "anyOf": _each_once(schema for row in KEYS.values() for schema in _value(row)["anyOf"][1:]),
    },
    "QuotaSet": _by_key(
        {row.name: _value(row) for row in KEYS.values()},
        minProperties=1,
        description="Quotas by key, each a number, its limit, or an object. A key must fit the entity.",
    ),
    "QuotaPatch": _by_key(
        {row.name: _patch(row) for row in KEYS.values()},
        description="An RFC 7396 merge patch; null takes a quota away, a number changes its limit alone.",
    ),
    "EntityQuotas": {
        "type": "object",
        "required": ["entity", "quotas", "bounds", "version"],
        "properties": {
            "entity": {"type": "string", "description": "Its canonical spelling."},
            "quotas": _by_key({key: ref("Quota") for key in KEYS}, minProperties=1),
            "bounds": _by_key(dict.fromkeys(KEYS, _BOUND), minProperties=1),
            "version": {"type": "integer", "minimum": 1, "maximum": MAX_EXACT},
        },
    },
    "Problem": {
        "type": "object",
        "description": "RFC 9457.",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer", "minimum": 400, "maximum": 599},
            "detail": {"type": "string"},
            "errors": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["field", "message"],
                    "properties": {
                        "field": {"type": "string", "description": "A JSON pointer; /entity is the path."},
                        "message": {"type": "string"},
                    },
                },
            },
        },
    },
}
"""For ``components.schemas`` of the document, which a router cannot reach by itself."""

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

_ENTITY: Final = {
    "name": "entity",
    "in": "path",
    "required": True,
    "description": "type=name, or two of them: user, client-id, user and client-id, ip, broker, listener, "
    "broker and listener. A name is percent-encoded, * is the default (%2A is the name *). A slash is %2F.",
    "schema": {"type": "string", "pattern": ENTITY_PATTERN},
    "examples": {
        "user": {"value": "user=alice"},
        "default user": {"value": "user=*"},
        "pair": {"value": "user=alice,client-id=etl"},
        "address": {"value": "ip=10.0.0.7"},
        "listener of a broker": {"value": "broker=1,listener=EXTERNAL"},
    },
}
IF_MATCH: Final = {
    "name": "If-Match",
    "in": "header",
    "description": "Go ahead only at one of these ETags, or with * only if there is something; else 412.",
    "schema": {"type": "string"},
    "example": '"17"',
}
IF_NONE_MATCH: Final = {
    "name": "If-None-Match",
    "in": "header",
    "description": "With *, create only (412 otherwise). On GET, 304 at one of these ETags.",
    "schema": {"type": "string"},
    "example": "*",
}
REASON: Final = {
    "name": "X-Reason",
    "in": "header",
    "description": "Why; kept in the history.",
    "schema": {"type": "string"},
    "example": "launch week",
}
ETAG: Final = {"ETag": {"description": "Strong; from the version.", "schema": {"type": "string"}}}

_EXAMPLE: Final = {"producer_ids_rate": 5, "request_rate": {"limit": 100, "enforcement": "deny"}}
_PATCH_EXAMPLE: Final = {"request_rate": 200, "producer_ids_rate": None}
ANSWER_EXAMPLE: Final = {
    "entity": "user=alice",
    "quotas": {"producer_ids_rate": {"limit": 5}},
    "bounds": {
        "producer_ids_rate": {"ratio": 1.0, "window_ms": 3_600_000, "text": "never more than 5 in any 3600 s"}
    },
    "version": 17,
}
_PROBLEMS: Final = {
    400: "Not JSON, or not HTTP.",
    401: "No valid key.",
    403: "The key lacks the scope.",
    404: "Nothing is set on the entity.",
    412: "A condition does not hold.",
    413: "More than 1 MiB of body.",
    415: "Not sent as JSON.",
    422: "Something is wrong with the content; errors names each field.",
    503: "The catalog is out of reach.",
}
_TOLD: Final = {
    400: "The body is not JSON: Expecting value: line 1 column 18 (char 17).",
    401: "This needs a key: send Authorization: Bearer KEY.",
    403: "The key lacks the scope write.",
    404: "No quotas are set on user=alice.",
    412: "A condition does not hold: user=alice is at version 18.",
    413: "The body is larger than 1,048,576 bytes.",
    415: "The body must be sent as Content-Type: application/json.",
    503: "The catalog is out of reach; the last quotas read from it stay in force.",
}
"""What the examples of problems say."""


def problem_responses(statuses: Sequence[int], *wrong: FieldError) -> dict[int | str, Any]:
    """The problems a route may answer with, each with an example; ``wrong`` for the 422."""
    return {
        status: {
            "description": _PROBLEMS[status],
            "content": {
                PROBLEM_JSON: {
                    "schema": ref("Problem"),
                    "example": (
                        unprocessable(*wrong) if status == 422 else Problem(status, _TOLD[status])
                    ).document(),
                }
            },
        }
        for status in statuses
    }


def _route(
    summary: str,
    answers: Mapping[int, str],
    problems: tuple[int, ...],
    parameters: list[Any],
    body: Schema | None = None,
) -> dict[str, Any]:
    """The keyword arguments of a FastAPI route."""
    content = {JSON: {"schema": ref("EntityQuotas"), "example": ANSWER_EXAMPLE}}
    responses: dict[int | str, Any] = {
        status: {
            "description": said,
            **({"headers": ETAG, "content": content} if status in (200, 201) else {}),
        }
        for status, said in answers.items()
    }
    wrong = _NO_NUMBER if body else _NO_ENTITY
    responses |= problem_responses(problems, wrong)
    extra: Schema = {"parameters": [_ENTITY, *parameters]} | ({"requestBody": body} if body else {})
    return {"summary": summary, "status_code": min(answers), "responses": responses, "openapi_extra": extra}


def body_of(name: str, example: object, *types: str) -> Schema:
    """A request body of a named schema."""
    return {"required": True, "content": {t: {"schema": ref(name), "example": example} for t in types}}


_NO_NUMBER: Final = FieldError("/request_rate", "must be from 0 to 9007199254740991")
_NO_ENTITY: Final = FieldError("/entity", "empty name for user: write user=NAME, or user=* for the default")
_WRITE: Final = [IF_MATCH, IF_NONE_MATCH, REASON]
GET: Final = _route(
    "Read an entity's quotas",
    {200: "What is set on it.", 304: "Nothing newer than If-None-Match."},
    (400, 401, 403, 404, 412, 422, 503),
    [IF_MATCH, IF_NONE_MATCH],
)
PUT: Final = _route(
    "Replace an entity's quotas",
    {200: "Replaced.", 201: "Created."},
    (400, 401, 403, 404, 412, 413, 415, 422, 503),
    _WRITE,
    body_of("QuotaSet", _EXAMPLE, JSON),
)
PATCH: Final = _route(
    "Change some of an entity's quotas",
    {200: "Changed.", 201: "Created.", 204: "The last quota went, and the entity with it."},
    (400, 401, 403, 404, 412, 413, 415, 422, 503),
    _WRITE,
    body_of("QuotaPatch", _PATCH_EXAMPLE, MERGE_PATCH, JSON),
)
DELETE: Final = _route(
    "Take away an entity's quotas",
    {204: "Taken away."},
    (400, 401, 403, 404, 412, 422, 503),
    _WRITE,
)
