"""What the OpenAPI document says about the routes that list and change many quotas at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from app.domain.entity import TYPES
from app.domain.quota import KEYS, MAX_EXACT
from app.http import quotas_schema
from app.http.bodies import Address, ClientName, Name
from app.http.problems import FieldError, unprocessable
from app.http.quotas_schema import (
    ANSWER_EXAMPLE,
    ENTITY_PATTERN,
    ETAG,
    IF_MATCH,
    IF_NONE_MATCH,
    REASON,
    Schema,
    body_of,
    problem_responses,
    ref,
)
from app.http.strict import JSON

MAX_ALTERED: Final = 1_000
MAX_APPLIED: Final = 10_000
"""What fits a body of 1 MiB; a catalog that is larger is applied in parts."""


THROTTLE_FACTOR: Final = "throttle_factor"
"""What the history calls what drills change, which is spelled as no entity is."""


def _list_of(alteration: str, most: int) -> Schema:
    """A body of alterations."""
    return {
        "type": "object",
        "required": ["alterations"],
        "properties": {
            "alterations": {"type": "array", "items": ref(alteration), "maxItems": most},
            "validate_only": {
                "type": "boolean",
                "default": False,
                "description": "Write nothing, and answer as if.",
            },
        },
        "additionalProperties": False,
    }


def _of_entity(entity: Schema, quotas: Schema) -> Schema:
    """One alteration."""
    by_key = "By key: a value replaces the whole quota, null takes it away; keys that are not named stay."
    return {
        "type": "object",
        "required": ["entity", "quotas"],
        "properties": {
            "entity": {**entity, "description": "Spelled as in a path."},
            "quotas": {**quotas, "description": by_key},
        },
        "additionalProperties": False,
    }


_CURSOR: Final[Schema] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
COMPONENTS: Final[Mapping[str, Schema]] = {
    **quotas_schema.COMPONENTS,
    "QuotaPage": {
        "type": "object",
        "required": ["quotas", "next_cursor"],
        "properties": {
            "quotas": {"type": "array", "items": ref("EntityQuotas")},
            "next_cursor": {**_CURSOR, "description": "For the next page; null after the last."},
        },
    },
    "QuotaAlterations": {
        **_list_of("QuotaAlteration", MAX_ALTERED),
        "description": "What is wrong with one alteration is told in its result and fails no other one.",
    },
    "QuotaAlteration": _of_entity({"type": "string"}, {"type": "object"}),
    "QuotaApplication": _list_of("QuotaSetting", MAX_APPLIED),
    "QuotaSetting": _of_entity(
        {"type": "string", "pattern": ENTITY_PATTERN},
        {
            "type": "object",
            "properties": {
                key: {"anyOf": [*schema["anyOf"], {"type": "null"}]}
                for key, schema in quotas_schema.COMPONENTS["QuotaSet"]["properties"].items()
            },
            "additionalProperties": False,
        },
    ),
    "QuotaResults": {
        "type": "object",
        "required": ["results"],
        "properties": {
            "results": {
                "type": "array",
                "description": "One for each alteration, in their order.",
                "items": {
                    "type": "object",
                    "required": ["entity", "ok"],
                    "properties": {
                        "entity": {"type": "string", "description": "Its canonical spelling if it has one."},
                        "ok": {"type": "boolean"},
                        "problem": {**ref("Problem"), "description": "Why not; there when not ok."},
                    },
                },
            }
        },
    },
    "QuotaPlan": {
        "type": "object",
        "required": ["version", "changes"],
        "properties": {
            "version": {
                "type": "integer",
                "minimum": 0,
                "description": "The catalog's after this; with validate_only the one planned for.",
            },
            "changes": {
                "type": "array",
                "description": "Real changes only: what is so already is none.",
                "items": {
                    "type": "object",
                    "required": ["entity", "quota", "change", "before", "after", "buckets"],
                    "properties": {
                        "entity": {"type": "string"},
                        "quota": {"type": "string", "enum": list(KEYS)},
                        "change": {"type": "string", "enum": ["added", "changed", "removed"]},
                        "before": {"anyOf": [ref("Quota"), {"type": "null"}]},
                        "after": {"anyOf": [ref("Quota"), {"type": "null"}]},
                        "buckets": {
                            "type": "string",
                            "enum": ["kept", "emptied"],
                            "description": "What has been counted until now goes on counting, or does not.",
                        },
                    },
                },
            },
        },
    },
    "EffectiveQuotas": {
        "type": "object",
        "required": ["quotas"],
        "properties": {
            "quotas": {
                "type": "array",
                "description": "In the order in which a decision shows them.",
                "items": {
                    "type": "object",
                    "required": ["quota", "entity", "bucket", "limit", "limit_now", "ladder"],
                    "properties": {
                        "quota": {"type": "string", "enum": list(KEYS)},
                        "entity": {"type": "string", "description": "What the quota is set on."},
                        "bucket": {"type": "string", "description": "What is charged."},
                        "limit": {"type": "number", "minimum": 0},
                        "limit_now": {
                            "type": "number",
                            "minimum": 0,
                            "description": "After the throttle factor of volumes.",
                        },
                        "ladder": {
                            "type": "array",
                            "description": "From the most specific rung down; the first limit decides.",
                            "items": {
                                "type": "object",
                                "required": ["entity", "limit"],
                                "properties": {
                                    "entity": {"type": "string"},
                                    "limit": {
                                        "anyOf": [{"type": "number"}, {"type": "null"}],
                                        "description": "null where nothing is set.",
                                    },
                                },
                            },
                        },
                    },
                },
            }
        },
    },
    "QuotaDefinitions": {
        "description": "All that is set on an entity, or a drill; null when nothing is, or none.",
        "anyOf": [
            {"type": "object", "additionalProperties": ref("Quota")},
            ref("Drill"),
            {"type": "null"},
        ],
    },
    "QuotaChange": {
        "type": "object",
        "required": ["at_ms", "who", "entity", "before", "after", "reason"],
        "properties": {
            "at_ms": {"type": "integer"},
            "who": {"type": "string", "description": "The name of the key; admin for the admin key."},
            "entity": {"type": "string", "description": f"An entity, or {THROTTLE_FACTOR} for drills."},
            "before": ref("QuotaDefinitions"),
            "after": ref("QuotaDefinitions"),
            "reason": {
                "anyOf": [{"type": "string"}, {"type": "null"}],
                "description": "From X-Reason.",
            },
        },
    },
    "QuotaHistory": {
        "type": "object",
        "required": ["changes", "next_cursor"],
        "properties": {
            "changes": {"type": "array", "items": ref("QuotaChange")},
            "next_cursor": {**_CURSOR, "description": "For older changes; null after the first one ever."},
        },
    },
}

CURSOR_EXAMPLE: Final = "ZW50aXR5IHVzZXI9YWxpY2U"
_LIMIT: Final = {
    "name": "limit",
    "in": "query",
    "description": "How many at most.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 1_000, "default": 100},
}
_NEXT: Final = {
    "name": "cursor",
    "in": "query",
    "description": "The next_cursor of the page before. It stays good while quotas change.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]*$"},
}
_MATCH: Final = {
    "name": "match",
    "in": "query",
    "description": "TYPE=NAME that very one, TYPE=* the default, TYPE any, the default too. Several match "
    "together: every one must. A name is percent-encoded as in a path, then all of it as part of a query.",
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
    "description": "Entities of exactly the types that are matched, no others beside them.",
    "schema": {"type": "boolean", "default": False},
}
_READ: Final = (400, 401, 403, 412, 422, 503)


def _answer(schema: str, example: object, headers: Schema | None = None) -> dict[int | str, Any]:
    content = {JSON: {"schema": ref(schema), "example": example}}
    return {200: {"description": "What was asked for.", "headers": headers or {}, "content": content}}


LIST: Final[dict[str, Any]] = {
    "summary": "List quotas",
    "description": "Pages in the order of the entities' spelling. The ETag is the version of the whole "
    "catalog, as of which the page is: `quotas:apply` takes it in If-Match.",
    "responses": _answer("QuotaPage", {"quotas": [ANSWER_EXAMPLE], "next_cursor": CURSOR_EXAMPLE}, ETAG)
    | {304: {"description": "Nothing newer than If-None-Match."}}
    | problem_responses(_READ, FieldError("/match", "ip is matched twice")),
    "openapi_extra": {"parameters": [_MATCH, _STRICT, _LIMIT, _NEXT, IF_MATCH, IF_NONE_MATCH]},
}
_CHANGE_EXAMPLE: Final = {
    "at_ms": 1_764_000_000_000,
    "who": "admin",
    "entity": "user=alice",
    "before": None,
    "after": {"producer_ids_rate": {"limit": 5}},
    "reason": "launch week",
}
HISTORY: Final[dict[str, Any]] = {
    "summary": "Read who changed quotas, when and why",
    "description": "Newest first; of one entity, of drills, or of all.",
    "responses": _answer("QuotaHistory", {"changes": [_CHANGE_EXAMPLE], "next_cursor": None})
    | problem_responses((400, 401, 403, 422, 503), FieldError("/limit", "must be an integer from 1 to 1000")),
    "openapi_extra": {
        "parameters": [
            {
                "name": "entity",
                "in": "query",
                "description": "Spelled as in a path, and then encoded as part of a query; or "
                f"{THROTTLE_FACTOR}, for the drills of volumes.",
                "schema": {"type": "string", "pattern": f"^$|^{THROTTLE_FACTOR}$|{ENTITY_PATTERN}"},
                "example": "user=alice",
            },
            _LIMIT,
            _NEXT,
        ]
    },
}
_APPLICATION: Final = {
    "alterations": [{"entity": "user=alice", "quotas": {"producer_ids_rate": 5, "request_rate": None}}],
    "validate_only": False,
}
_ALTERATIONS: Final = {
    "alterations": [
        {"entity": "user=alice", "quotas": {"producer_ids_rate": 5, "request_rate": None}},
        {"entity": "user=bob", "quotas": {"request_rate": {"limit": -1}}},
    ],
    "validate_only": False,
}
_BAD_LIMIT: Final = FieldError(
    "/alterations/1/quotas/request_rate/limit", "must be from 0 to 9007199254740991"
)
_RESULTS: Final = {
    "results": [
        {"entity": "user=alice", "ok": True},
        {"entity": "user=bob", "ok": False, "problem": unprocessable(_BAD_LIMIT).document()},
    ]
}
_PLAN: Final = {
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
}
_CATALOG_IF_MATCH: Final = {
    **IF_MATCH,
    "description": "Go ahead only while the whole catalog is at this version, as the list's ETag has it.",
}
_WRITE: Final = (400, 401, 403, 412, 413, 415, 422, 503)


def _write(
    summary: str,
    description: str,
    body: tuple[str, object],
    answer: tuple[str, object],
    wrong: FieldError,
) -> dict[str, Any]:
    return {
        "summary": summary,
        "description": description,
        "responses": _answer(*answer) | problem_responses(_WRITE, wrong),
        "openapi_extra": {
            "parameters": [_CATALOG_IF_MATCH, REASON],
            "requestBody": body_of(*body, JSON),
        },
    }


ALTER: Final = _write(
    "Alter the quotas of many entities, each by itself",
    f"At most {MAX_ALTERED:,} of them. Each is altered whole or not at all, and a bad one hinders no other; "
    "an entity that is given twice fails in all its places.",
    ("QuotaAlterations", _ALTERATIONS),
    ("QuotaResults", _RESULTS),
    FieldError("/alterations", "is required"),
)
APPLY: Final = _write(
    "Apply a set of quotas, all or nothing",
    f"At most {MAX_APPLIED:,} alterations, in one transaction. With `validate_only` the answer is the plan, "
    "and its version in If-Match makes sure that it is this plan that is applied.",
    ("QuotaApplication", _APPLICATION),
    ("QuotaPlan", _PLAN),
    _BAD_LIMIT,
)
_EFFECTIVE: Final = {
    "quotas": [
        {
            "quota": "request_rate",
            "entity": "user=alice",
            "bucket": "user=alice",
            "limit": 100,
            "limit_now": 100,
            "ladder": [{"entity": "user=alice", "limit": 100}, {"entity": "user=*", "limit": 50}],
        }
    ]
}
# Empty is as absent, but for the principal, whom nobody is, and the client, who may have no name.
_WHO: Final = {
    "principal": ("Who asks.", Name, "alice"),
    "client_id": ("As which client; one may be named by nothing at all.", ClientName, "etl"),
    "ip": ("From which address.", Address, "10.0.0.7"),
    "broker": ("At which broker.", ClientName, "1"),
    "listener": ("On which of its listeners.", ClientName, "EXTERNAL"),
}


def _or_blank(schema: Schema) -> Schema:
    """A schema of alternatives with nothing as one more."""
    return schema | {"anyOf": [*schema["anyOf"], {"maxLength": 0}]} if "anyOf" in schema else schema


def effective(*, timed: bool) -> dict[str, Any]:
    """The route of effective limits; ``timed``: under the caller's clock."""
    parameters = [
        {
            "name": name,
            "in": "query",
            "description": said,
            "schema": _or_blank(msgspec.json.schema(type_)),
            "examples": {"one": {"value": example}},
        }
        for name, (said, type_, example) in _WHO.items()
    ]
    if timed:
        when = {"type": "integer", "minimum": 0, "maximum": MAX_EXACT}
        parameters.append({"name": "at_ms", "in": "query", "description": "When.", "schema": when})
    wrong = FieldError("/ip", "must be an IPv4 or IPv6 address, not a host name")
    return {
        "summary": "Explain which limits hold for a caller",
        "description": "Every quota that applies to a caller who asks for everything, by what is in force on "
        "this node, and the whole ladder.",
        "responses": _answer("EffectiveQuotas", _EFFECTIVE) | problem_responses((400, 401, 403, 422), wrong),
        "openapi_extra": {"parameters": parameters},
    }
