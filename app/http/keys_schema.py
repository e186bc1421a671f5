"""What the OpenAPI document says about the routes of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from app.domain.grant import BINDABLE, PERMISSIONS
from app.domain.quota import MAX_EXACT
from app.http.problems import PROBLEM_JSON, FieldError, Problem, unprocessable
from app.http.strict import JSON

Schema = dict[str, Any]

NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._\-]{0,63}"
NAME_MUST: Final = (
    "must be 1 to 64 of the letters A-Z and a-z, digits, dots, underscores and hyphens, "
    "and begin with a letter or a digit"
)
MAX_BOUND_TO: Final = 100
MAX_GRACE_MS: Final = 30 * 24 * 3_600_000

_CHARACTER: Final = "(?:[A-Za-z0-9._~-]|%(?:[2-6][0-9A-F]|7[0-9A-E]))"
_ONE: Final = rf"(?:{_CHARACTER}+\*?|\*)"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
BINDING_PATTERN: Final = (
    f"^(?:user={_ONE}(?:,client-id={_ONE})?|client-id={_ONE}(?:,user={_ONE})?"
    rf"|ip=(?:{_BYTE}(?:\.{_BYTE}){{3}}|(?:[0-9a-f.:]|%3A)*\*)"
    f"|broker={_ONE}(?:,listener={_ONE})?|listener={_ONE}(?:,broker={_ONE})?)$"
)
"""IPv6 addresses are taken too, whole."""

_INSTANT: Final = {"type": "integer", "minimum": 0, "maximum": MAX_EXACT}
_MAYBE_INSTANT: Final = {"anyOf": [_INSTANT, {"type": "null"}]}
_SHOWN: Final[Schema] = {
    "name": {"type": "string"},
    "scopes": {"type": "array", "items": {"type": "string", "enum": list(PERMISSIONS)}},
    "bound_to": {
        "type": "array",
        "items": {"type": "string"},
        "description": "Entities in canonical spelling; none: it is not bound.",
    },
    "expires_ms": {**_MAYBE_INSTANT, "description": "The instant from which it is not valid; null is never."},
    "created_ms": _INSTANT,
    "rotated_ms": _MAYBE_INSTANT,
    "former_until_ms": {
        **_MAYBE_INSTANT,
        "description": "Until when the key before the last rotation is valid as well.",
    },
}


def _wanted(scopes: list[str], bound_to: Schema) -> Schema:
    return {
        "required": ["name", "scopes"],
        "properties": {
            "name": {"type": "string", "pattern": f"^{NAME}$", "not": {"const": "admin"}},
            "scopes": {
                "type": "array",
                "items": {"type": "string", "enum": scopes},
                "minItems": 1,
                "uniqueItems": True,
            },
            "bound_to": bound_to,
            "expires_ms": {
                **_MAYBE_INSTANT,
                "description": "An instant, the end of the key; null is never.",
            },
        },
        "type": "object",
        "additionalProperties": False,
    }


_ENTITIES: Final = {
    "type": "array",
    "items": {"type": "string", "pattern": BINDING_PATTERN},
    "minItems": 1,
    "maxItems": MAX_BOUND_TO,
}
COMPONENTS: Final[Mapping[str, Schema]] = {
    "NewKey": {
        "description": "A key that is bound may ask for the entities it is bound to, and for nothing else; a "
        "`*` at the end of a name is any end. An ask is within `user=acme` when that is its principal. In "
        "buckets that others share it is decided as deny, and may neither record nor give back.",
        "anyOf": [
            {
                "title": "A key",
                **_wanted(list(PERMISSIONS), {"anyOf": [{"type": "array", "maxItems": 0}, {"type": "null"}]}),
            },
            {
                "title": "A key that is bound",
                **_wanted([scope for scope in PERMISSIONS if scope in BINDABLE], _ENTITIES),
            },
        ],
    },
    "Key": {"type": "object", "required": list(_SHOWN), "properties": _SHOWN},
    "KeyOnce": {
        "type": "object",
        "required": [*_SHOWN, "key"],
        "properties": {**_SHOWN, "key": {"type": "string", "description": "Shown here and never again."}},
    },
    "KeyList": {
        "type": "object",
        "required": ["keys"],
        "properties": {"keys": {"type": "array", "items": {"$ref": "#/components/schemas/Key"}}},
    },
    "Rotation": {
        "type": "object",
        "properties": {
            "grace_ms": {
                "type": "integer",
                "minimum": 0,
                "maximum": MAX_GRACE_MS,
                "default": 0,
                "description": "How long the old key is valid beside the new one.",
            }
        },
        "additionalProperties": False,
    },
}

_KEY: Final = {
    "name": "acme-gateway",
    "scopes": ["decide"],
    "bound_to": ["user=acme-*"],
    "expires_ms": None,
    "created_ms": 1_795_000_000_000,
    "rotated_ms": None,
    "former_until_ms": None,
}
_SECRET: Final = {"key": "qg_Iv5m1Qz0Jt9o3XkB2h7WqkU4nY8sR6cE1aD0fGpL5xM"}
_NEW: Final = {"name": "acme-gateway", "scopes": ["decide"], "bound_to": ["user=acme-*"]}
_PROBLEMS: Final = {
    400: Problem(400, "The body is not JSON: Expecting value: line 1 column 18 (char 17)."),
    401: Problem(401, "This needs a key with the scope admin: send Authorization: Bearer KEY."),
    403: Problem(403, "The key lacks the scope admin."),
    404: Problem(404, "There is no key named acme-gateway."),
    409: Problem(409, "There is a key named acme-gateway: revoke or rotate it, or choose another."),
    413: Problem(413, "The body is larger than 1,048,576 bytes."),
    415: Problem(415, "The body must be sent as Content-Type: application/json."),
    422: unprocessable(FieldError("/scopes/0", f"must be one of {', '.join(PERMISSIONS)}")),
    503: Problem(503, "The catalog is out of reach; the keys known last stay in force."),
}
_EXPIRED: Final = Problem(409, "The key acme-gateway has expired: revoke it and create another.")
_NO_GRACE: Final = unprocessable(FieldError("/grace_ms", f"must be an integer from 0 to {MAX_GRACE_MS}"))


def _content(name: str, example: object) -> Schema:
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}, "example": example}}


def _route(
    summary: str, answer: tuple[int, str, Schema], problems: tuple[int, ...], *others: Problem, **extra: Any
) -> dict[str, Any]:
    """The keyword arguments of a FastAPI route."""
    status, text, content = answer
    responses: dict[int | str, Any] = {
        status: {"description": text, **({"content": content} if content else {})}
    }
    for problem in (*(_PROBLEMS[number] for number in problems), *others):
        shown = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": problem.document()}
        title = str(problem.document()["title"])
        responses[problem.status] = {"description": title, "content": {PROBLEM_JSON: shown}}
    return {"summary": summary, "status_code": status, "responses": responses, "openapi_extra": extra}


LIST: Final = _route(
    "List keys",
    (200, "Every key, without what it is sent as.", _content("KeyList", {"keys": [_KEY]})),
    (401, 403, 503),
)
CREATE: Final = _route(
    "Create a key",
    (201, "The key: shown here and never again.", _content("KeyOnce", _KEY | _SECRET)),
    (400, 401, 403, 409, 413, 415, 422, 503),
    requestBody={"required": True, "content": _content("NewKey", _NEW)},
)
ROTATE: Final = _route(
    "Put a new key in the place of another",
    (200, "The new key: shown here and never again.", _content("KeyOnce", _KEY | _SECRET)),
    (400, 401, 403, 404, 413, 415, 503),
    _EXPIRED,
    _NO_GRACE,
    requestBody={"required": False, "content": _content("Rotation", {"grace_ms": 3_600_000})},
)
REVOKE: Final = _route(
    "Revoke a key",
    (204, "Revoked; every node knows within a second.", {}),
    (401, 403, 404, 503),
)
