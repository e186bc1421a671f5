"""The answers of the key routes, and their part of the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from app.domain.binding import Binding
from app.domain.errors import EntityError
from app.domain.grant import BINDABLE, PERMISSIONS, Permission
from app.http.access.access import ADMIN
from app.http.bodies import Count
from app.http.faults import CHECK, MUST
from app.http.openapi.schema import (
    BODY_PROBLEMS,
    Schema,
    access_problems,
    answer_of,
    body_of,
    components,
    ordered,
    request_schema,
    route,
    schema_of,
)
from app.http.problems import FieldError, ProblemError, away, unprocessable

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


def _name_fault(name: str) -> str | None:
    if name == ADMIN:
        return "must not be admin, the name of the admin key"
    return None if re.fullmatch(NAME, name) else NAME_MUST


def _entity_fault(spelled: str) -> str | None:
    try:
        Binding.parse(spelled)
    except EntityError as error:
        return str(error)
    return None


ShownScope = Annotated[str, Meta(extra_json_schema={"enum": list(PERMISSIONS)})]
Scope = Annotated[Permission, Meta(extra={MUST: f"must be one of {', '.join(PERMISSIONS)}"})]


class KeyBody(Struct):
    """An API key, without its secret."""

    name: Annotated[str, Meta(description=_NAMED)]
    scopes: Annotated[tuple[ShownScope, ...], Meta(description=_SCOPES)]
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


class NewKeyBody(Struct, forbid_unknown_fields=True):
    """A key to create; null counts as missing."""

    name: Annotated[
        str,
        Meta(
            description=_NAMED,
            extra_json_schema={"pattern": f"^{NAME}$", "not": {"const": ADMIN}},
            extra={MUST: NAME_MUST, CHECK: _name_fault},
        ),
    ]
    scopes: Annotated[
        list[Scope],
        Meta(
            min_length=1,
            description=_SCOPES,
            extra_json_schema={"uniqueItems": True},
            extra={MUST: "must be a list of one scope or more"},
        ),
    ]
    bound_to: Annotated[
        Annotated[list[Annotated[str, Meta(extra={CHECK: _entity_fault})]], Meta(max_length=MAX_BOUND_TO)]
        | None,
        Meta(
            description="The entities that the key may ask for; empty: all.",
            extra={MUST: f"must be a list of up to {MAX_BOUND_TO} entities"},
        ),
    ] = None
    expires_ms: Annotated[
        Count | None,
        Meta(
            description="When the key expires, in milliseconds since 1970; null means never.",
            extra={MUST: "must be an instant in milliseconds, an integer from 0 to 2^53 - 1"},
        ),
    ] = None


class RotationBody(Struct, forbid_unknown_fields=True):
    """How a key is rotated."""

    grace_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_GRACE_MS,
            description="How long the old key stays valid after the rotation.",
            extra={MUST: f"must be an integer from 0 to {MAX_GRACE_MS}"},
        ),
    ] = 0


def _variant(title: str, scopes: list[str], bound_to: Schema) -> Schema:
    """Return the schema of a new key that may have these scopes, with these bounds."""
    schema = schema_of(NewKeyBody)
    name, listed, bound, expires = schema["properties"].values()
    return {
        "title": title,
        "required": schema["required"],
        "properties": {
            "name": ordered(name, "type", "pattern", "not", "description"),
            "scopes": ordered(
                listed | {"items": {"type": "string", "enum": scopes}},
                *("description", "type", "items", "minItems", "uniqueItems"),
            ),
            "bound_to": bound_to | {"description": bound["description"]},
            "expires_ms": ordered(expires, "anyOf", "description"),
        },
        **ordered(schema, "type", "additionalProperties"),
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
            _variant(
                "A key", list(PERMISSIONS), {"anyOf": [{"type": "array", "maxItems": 0}, {"type": "null"}]}
            ),
            _variant("A bound key", [scope for scope in PERMISSIONS if scope in BINDABLE], _ENTITIES),
        ],
    },
    "Rotation": request_schema(RotationBody, {"grace_ms": "type minimum maximum default description"}, {}),
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
