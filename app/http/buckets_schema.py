"""What the OpenAPI document says about the routes of buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from app.domain.quota import KEYS
from app.http.problems import FieldError, Problem, unprocessable
from app.http.quotas_schema import Schema, access_problems, answered_with, at_ms_parameter, or_null
from app.http.strict import JSON

AWAY: Final = "The store gives no answer ({reason}): buckets can be neither shown nor reset until it does."

_NAMES: Final = {
    "user": "user=alice",
    "user and client": "user=alice,client-id=etl",
    "client": "client-id=etl",
    "address": "ip=10.0.0.7",
    "IPv6 network of the default": "ip=2001%3Adb8%3A%3A%2F64",
    "broker": "broker=1",
    "listener of a broker": "broker=1,listener=EXTERNAL",
    "listener under the scope broker": "listener=EXTERNAL;broker=1",
}
_BUCKET: Final[Schema] = {"type": "string", "minLength": 1}
_KEY: Final[Schema] = {"type": "string", "enum": list(KEYS)}
_HOW_NAMED: Final = (
    "The name of a bucket as decisions spell it: an entity without defaults, each name percent-encoded. "
    "An IPv6 network is one of the length at which addresses share a bucket; `;broker=1` at the end names "
    "the bucket that a quota of scope broker has for that broker."
)


_COUNT: Final = {"type": "integer", "minimum": 0}
COMPONENTS: Final[Mapping[str, Schema]] = {
    "Bucket": {
        "type": "object",
        "description": "How a bucket stands for one quota; null is what does not fit its algorithm.",
        "required": [
            "bucket",
            "quota",
            "observed",
            "remaining",
            "tokens",
            "layers",
            "fill",
            "remembered_ids",
            "charged_ids",
        ],
        "properties": {
            "bucket": {"type": "string", "description": "Its canonical spelling."},
            "quota": _KEY,
            "observed": {
                "type": "number",
                "description": "The measured rate, ids charged in the trailing window, or burst less tokens: "
                "as the detail of a peek shows it.",
            },
            "remaining": {"type": "number", "description": "What would be admitted now; negative in debt."},
            "tokens": or_null({"type": "number"}, "Of a token bucket; negative in debt."),
            "layers": or_null(_COUNT | {"maximum": 4}, "Of producer ids: how many layers are live."),
            "fill": or_null(
                {"type": "number", "minimum": 0},
                "Of producer ids: how full the newest segment's part of the newest live layer is, "
                "as in `quotagate_filter_fill`; at 1 a larger segment follows.",
            ),
            "remembered_ids": or_null(_COUNT, "Of producer ids: how many the live layers hold."),
            "charged_ids": or_null(_COUNT, "Of producer ids: how many were charged in the trailing window."),
        },
    },
    "Buckets": {
        "type": "object",
        "required": ["buckets"],
        "properties": {"buckets": {"type": "array", "items": {"$ref": "#/components/schemas/Bucket"}}},
    },
    "BucketReset": {
        "type": "object",
        "required": ["bucket"],
        "properties": {
            "bucket": _BUCKET | {"description": _HOW_NAMED},
            "quota": or_null(_KEY, "The one quota whose bucket is meant; without it, every one."),
        },
        "additionalProperties": False,
    },
}
"""For ``components.schemas`` of the document, which a router cannot reach by itself."""

_SHOWN: Final = {
    "buckets": [
        {
            "bucket": "user=alice",
            "quota": "producer_ids_rate",
            "observed": 3.0,
            "remaining": 2.0,
            "tokens": None,
            "layers": 2,
            "fill": 0.09375,
            "remembered_ids": 7,
            "charged_ids": 3,
        },
        {
            "bucket": "user=alice",
            "quota": "controller_mutation_rate",
            "observed": 120.0,
            "remaining": -10.0,
            "tokens": -10.0,
            "layers": None,
            "fill": None,
            "remembered_ids": None,
            "charged_ids": None,
        },
    ]
}
_NO_BUCKET: Final = FieldError(
    "/bucket", "user=* is a default, which has no bucket of its own; %2A is the name *"
)
_NO_KEY: Final = FieldError("/quota", f"is unknown: use {', '.join(KEYS)}")


def _problems(scope: str, *more: Problem) -> dict[int | str, Any]:
    every = [
        *access_problems(scope),
        *more,
        unprocessable(_NO_BUCKET, _NO_KEY),
        Problem(503, AWAY.format(reason="connection"), headers={"Retry-After": "1"}),
    ]
    return {problem.status: answered_with(problem) for problem in every}


def show(*, timed: bool) -> Schema:
    """The keyword arguments of the route that shows; ``timed``: it may be told when."""
    parameters = [
        {
            "name": "bucket",
            "in": "query",
            "required": True,
            "description": _HOW_NAMED,
            "schema": _BUCKET,
            "examples": {title: {"value": name} for title, name in _NAMES.items()},
        },
        {
            "name": "quota",
            "in": "query",
            "description": "Only the bucket of this quota key.",
            "schema": _KEY,
            "example": "producer_ids_rate",
        },
    ]
    parameters += at_ms_parameter(timed=timed)
    content = {JSON: {"schema": {"$ref": "#/components/schemas/Buckets"}, "example": _SHOWN}}
    return {
        "summary": "Show a bucket",
        "description": "One entry for each quota in force that charges the bucket, in the order of quota "
        "keys; none if no quota does, also when it is named. Looking changes nothing, not even an expiry. "
        "A bucket that was never charged is shown as it would begin.",
        "status_code": 200,
        "responses": {200: {"description": "How it stands now.", "content": content}, **_problems("read")},
        "openapi_extra": {"parameters": parameters},
    }


RESET: Final[Schema] = {
    "summary": "Reset a bucket",
    "description": "Its state is gone at once, on every node: the next ask finds full tokens, an empty "
    "window and no id seen or charged. All quotas in force that charge the bucket are reset together, or "
    "none; with `quota`, that one. A bucket without state, and one that no quota charges, is left as it is. "
    "The state of a quota that is no longer in force is not looked for: it decides nothing, and expires. "
    "Answers kept for retries stay, so a retry is answered as before. A reset stands in the log with who "
    "asked for it; the history of quotas does not tell of it, as no quota changed.",
    "status_code": 204,
    "responses": {
        204: {"description": "It is empty."},
        **_problems(
            "write",
            Problem(400, "The body is empty: send JSON."),
            Problem(413, "The body is larger than 1,048,576 bytes."),
            Problem(415, f"The body must be sent as Content-Type: {JSON}."),
        ),
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                JSON: {
                    "schema": {"$ref": "#/components/schemas/BucketReset"},
                    "examples": {
                        "all of it": {"value": {"bucket": "user=alice"}},
                        "one quota": {
                            "value": {"bucket": "ip=10.0.0.7", "quota": "connection_creation_rate"}
                        },
                    },
                }
            },
        }
    },
}
