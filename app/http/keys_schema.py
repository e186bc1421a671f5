"""The answers of the key routes, and what the OpenAPI document says about these routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from app.domain.grant import BINDABLE, PERMISSIONS
from app.domain.quota import MAX_EXACT
from app.http.bodies import Count
from app.http.problems import FieldError, ProblemError, away, unprocessable
from app.http.schema import (
    BODY_PROBLEMS,
    Schema,
    access_problems,
    answer_of,
    body_of,
    components,
    or_null,
    route,
)

NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._\-]{0,63}"
NAME_MUST: Final = (
    "must be 1 to 64 letters (A-Z, a-z), digits, dots, underscores or hyphens, "
    "and begin with a letter or a digit"
)
UNREACHABLE: Final = "The catalog is unreachable; the keys loaded last stay in force."
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
"""Whole IPv6 addresses are accepted too."""

_NAMED: Final = "The name of the key, as the history and the log show it."
_SCOPES: Final = "The scopes of the key: what it may do."

Scope = Annotated[str, Meta(extra_json_schema={"enum": list(PERMISSIONS)})]


class KeyBody(Struct):
    """An API key, without its secret."""

    name: Annotated[str, Meta(description=_NAMED)]
    scopes: Annotated[tuple[Scope, ...], Meta(description=_SCOPES)]
    bound_to: Annotated[
        tuple[str, ...], Meta(description="Entities in canonical spelling; empty if the key is not bound.")
    ]
    expires_ms: Annotated[Count | None, Meta(description="When the key expires; null means never.")]
    created_ms: Annotated[Count, Meta(description="When the key was made, in milliseconds since 1970.")]
    rotated_ms: Annotated[Count | None, Meta(description="When the key was last rotated; null means never.")]
    former_until_ms: Annotated[
        Count | None, Meta(description="Until when the key before the last rotation stays valid.")
    ]


class KeyOnceBody(KeyBody):
    """An API key with its secret."""

    key: Annotated[str, Meta(description="The secret. It is never shown again.")]


class KeyListBody(Struct):
    """All API keys."""

    keys: Annotated[list[KeyBody], Meta(description="In the order of their names.")]


def _wanted(scopes: list[str], bound_to: Schema) -> Schema:
    return {
        "required": ["name", "scopes"],
        "properties": {
            "name": {
                "type": "string",
                "pattern": f"^{NAME}$",
                "not": {"const": "admin"},
                "description": _NAMED,
            },
            "scopes": {
                "description": _SCOPES,
                "type": "array",
                "items": {"type": "string", "enum": scopes},
                "minItems": 1,
                "uniqueItems": True,
            },
            "bound_to": bound_to | {"description": "The entities that the key may ask for; empty: all."},
            "expires_ms": or_null(
                {"type": "integer", "minimum": 0, "maximum": MAX_EXACT},
                "When the key expires, in milliseconds since 1970; null means never.",
            ),
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
    **components(KeyOnceBody, KeyListBody),
    "NewKey": {
        "description": "A bound key may ask for its entities only. A `*` at the end of a name matches any "
        "ending. An ask belongs to `user=acme` if that is its principal. In buckets that the key shares with "
        "others, its asks are decided under `deny`, and it may not record or refund.",
        "anyOf": [
            {
                "title": "A key",
                **_wanted(list(PERMISSIONS), {"anyOf": [{"type": "array", "maxItems": 0}, {"type": "null"}]}),
            },
            {
                "title": "A bound key",
                **_wanted([scope for scope in PERMISSIONS if scope in BINDABLE], _ENTITIES),
            },
        ],
    },
    "Rotation": {
        "description": "How a key is rotated.",
        "type": "object",
        "properties": {
            "grace_ms": {
                "type": "integer",
                "minimum": 0,
                "maximum": MAX_GRACE_MS,
                "default": 0,
                "description": "How long the old key stays valid after the rotation.",
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
_ACCESS: Final = access_problems("admin")
_AWAY: Final = away(UNREACHABLE)
_MISSING: Final = ProblemError(404, "There is no key named acme-gateway.")
_NO_PARAMETERS: Final = unprocessable(FieldError("/limit", "is unknown, as every parameter here"))

LIST: Final = route(
    "List keys",
    {200: answer_of("All keys, without their secrets.", "KeyList", {"keys": [_KEY]})},
    (*_ACCESS, _NO_PARAMETERS, _AWAY),
)
CREATE: Final = route(
    "Create a key",
    {201: answer_of("The key with its secret, which is never shown again.", "KeyOnce", _KEY | _SECRET)},
    (
        *_ACCESS,
        *BODY_PROBLEMS,
        ProblemError(
            409, "There is already a key named acme-gateway: revoke it, rotate it, or use another name."
        ),
        unprocessable(FieldError("/scopes/0", f"must be one of {', '.join(PERMISSIONS)}")),
        _AWAY,
    ),
    body=body_of("NewKey", {"name": "acme-gateway", "scopes": ["decide"], "bound_to": ["user=acme-*"]}),
)
ROTATE: Final = route(
    "Rotate a key",
    {200: answer_of("The key with its new secret, which is never shown again.", "KeyOnce", _KEY | _SECRET)},
    (
        *_ACCESS,
        *BODY_PROBLEMS,
        _MISSING,
        ProblemError(409, "The key acme-gateway has expired: revoke it and create another."),
        unprocessable(FieldError("/grace_ms", f"must be an integer from 0 to {MAX_GRACE_MS}")),
        _AWAY,
    ),
    body=body_of("Rotation", {"grace_ms": 3_600_000}) | {"required": False},
)
REVOKE: Final = route(
    "Revoke a key",
    {204: answer_of("Revoked. Every node refuses it within a second.")},
    (*_ACCESS, _MISSING, _NO_PARAMETERS, _AWAY),
)
