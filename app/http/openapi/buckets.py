"""The answers of the bucket routes, and their part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from app.domain.quota import KEYS
from app.http.openapi.schema import (
    BODY_PROBLEMS,
    Schema,
    access_problems,
    answer_of,
    at_ms_parameter,
    components,
    ref,
    request_schema,
    route,
)
from app.http.problems import FieldError, away, unprocessable
from app.http.strict import JSON

AWAY: Final = "The store does not answer ({reason}): buckets cannot be shown or reset until it does."

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
    "An IPv6 network must have the prefix length within which addresses share a bucket. `;broker=1` at the "
    "end selects the bucket of that broker, for a quota with the scope broker."
)


def key_fault(text: str) -> str | None:
    """Return why a text is no quota key, or None."""
    return None if text in KEYS else f"is unknown: use {', '.join(KEYS)}"


class LiveLayerBody(Struct):
    """A live layer of a bucket of producer ids."""

    number: Annotated[
        int, Meta(ge=1, description="Counts the layers of the bucket; a layer keeps it while it lives.")
    ]
    began_ms: Annotated[int, Meta(description="When it began (ms since 1970).")]
    ids: Annotated[int, Meta(ge=0, description="The ids whose newest layer it is.")]


class BucketBody(Struct):
    """The state of a bucket for one quota; fields that do not apply to its algorithm are null."""

    bucket: Annotated[str, Meta(description="The bucket in canonical spelling.")]
    quota: Annotated[str, Meta(description="The quota key.", extra_json_schema={"enum": list(KEYS)})]
    observed: Annotated[
        float,
        Meta(
            description="As the detail of a peek shows it: the measured rate, the ids charged in the "
            "trailing window, or the burst minus the tokens."
        ),
    ]
    remaining: Annotated[
        float, Meta(description="What would be admitted now; negative while the bucket is in debt.")
    ]
    tokens: Annotated[
        float | None, Meta(description="Token bucket: its tokens; negative while it is in debt.")
    ]
    layers: Annotated[
        Annotated[int, Meta(ge=0, le=4)] | None, Meta(description="Producer ids: the number of live layers.")
    ]
    live_layers: Annotated[
        Annotated[list[LiveLayerBody], Meta(max_length=4)] | None,
        Meta(
            description="Producer ids: the live layers, oldest first, with consecutive numbers. Their "
            "ids add up to `remembered_ids`."
        ),
    ]
    fill: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Producer ids: how full the newest segment of the newest live layer is, as "
            "`quotagate_filter_fill` shows it; at 1 the layer gets a larger segment."
        ),
    ]
    remembered_ids: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Producer ids: the ids in all live layers.")
    ]
    charged_ids: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Producer ids: the ids charged in the trailing window."),
    ]


class BucketsBody(Struct):
    """A bucket, for each quota that charges it."""

    buckets: Annotated[list[BucketBody], Meta(description="In the order of the quota keys.")]


class BucketResetBody(Struct, forbid_unknown_fields=True):
    """A bucket to reset."""

    bucket: Annotated[str, Meta(min_length=1, description=_HOW_NAMED)]
    quota: Annotated[
        Annotated[str, Meta(extra_json_schema=_KEY)] | None,
        Meta(description="Reset the bucket of this quota only; without it, of every quota."),
    ] = None


COMPONENTS: Final[Mapping[str, Schema]] = {
    **components(BucketsBody),
    "BucketReset": request_schema(
        BucketResetBody, {"bucket": "type minLength description", "quota": "anyOf description"}, {}
    ),
}
"""Schemas of the OpenAPI document (``components.schemas``) that no router can add."""

_SHOWN: Final = {
    "buckets": [
        {
            "bucket": "user=alice",
            "quota": "producer_ids_rate",
            "observed": 3.0,
            "remaining": 2.0,
            "tokens": None,
            "layers": 2,
            "live_layers": [
                {"number": 1, "began_ms": 1763718000000, "ids": 4},
                {"number": 2, "began_ms": 1763719700000, "ids": 3},
            ],
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
            "live_layers": None,
            "fill": None,
            "remembered_ids": None,
            "charged_ids": None,
        },
    ]
}
_UNKNOWN: Final = unprocessable(
    FieldError("/bucket", "user=* is a default, which has no bucket of its own; write %2A for the name *"),
    FieldError("/quota", f"is unknown: use {', '.join(KEYS)}"),
)
_STORE_AWAY: Final = away(AWAY.format(reason="connection"))


def show(*, timed: bool) -> Schema:
    """Return the keyword arguments of the route that shows a bucket; ``timed``: it takes ``at_ms``."""
    parameters: list[Schema] = [
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
            "description": "Show the bucket of this quota only.",
            "schema": _KEY,
            "example": "producer_ids_rate",
        },
    ]
    return route(
        "Show a bucket",
        {200: answer_of("The state of the bucket.", "Buckets", _SHOWN)},
        (*access_problems("read"), _UNKNOWN, _STORE_AWAY),
        description="One entry for each quota in force that charges the bucket, in the order of the quota "
        "keys; without any, an empty list. Reading a bucket changes nothing, not even its expiry. A "
        "bucket that was never charged is shown in its initial state.",
        parameters=parameters + at_ms_parameter(timed=timed),
    )


RESET: Final = route(
    "Reset a bucket",
    {204: answer_of("Bucket reset.")},
    (*access_problems("write"), *BODY_PROBLEMS, _UNKNOWN, _STORE_AWAY),
    description="Deletes the bucket's state at once, for every node: the next ask finds full tokens, an "
    "empty window and no remembered ids. Without `quota`, all quotas in force that charge the bucket are "
    "reset together, or none if the reset fails. A bucket without state, or one that no quota charges, "
    "stays as it is. State of a quota that is no longer in force is kept until it expires; it decides "
    "nothing. Answers kept for retries stay: a retry gets the answer it got before. The decision log "
    "records the reset and who asked for it. The history of quotas does not, since no quota changed.",
    body={
        "required": True,
        "content": {
            JSON: {
                "schema": ref("BucketReset"),
                "examples": {
                    "all quotas": {"value": {"bucket": "user=alice"}},
                    "one quota": {"value": {"bucket": "ip=10.0.0.7", "quota": "connection_creation_rate"}},
                },
            }
        },
    },
)
