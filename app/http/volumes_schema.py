"""What the OpenAPI document says about the routes of volumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from app.http.bodies import Name
from app.http.problems import FieldError, Problem, unprocessable
from app.http.quotas_lists_schema import THROTTLE_FACTOR
from app.http.quotas_schema import (
    REASON,
    Schema,
    access_problems,
    answered_with,
    at_ms_parameter,
    body_of,
    or_null,
    ref,
)
from app.http.strict import JSON
from app.http.volumes_wire import MAX_DRILL_MS, MAX_SIZE, MAX_VOLUMES

AWAY: Final = "The store gives no answer ({reason}): it may or may not have been done. GET /v1/volumes says."
UNTOLD: Final = "The catalog is out of reach, and its history must tell of a drill: nothing was done."
NO_DRILL: Final = "There is no drill."
NO_SOURCE: Final = (
    "No volumes are observed here: QUOTAGATE_VOLUME_SOURCE is not set to push, or "
    "QUOTAGATE_VOLUME_CHECK_INTERVAL turns checking off."
)
OTHER_SOURCE: Final = "Volumes are observed by the source {source} here: QUOTAGATE_VOLUME_SOURCE is not push."

_INSTANT: Final = {"type": "integer", "minimum": 0}
_SIZE: Final = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_SIZE}, {"type": "null"}]}
_SIZES: Final[Schema] = {
    "total_bytes": {**_SIZE, "description": "null: nobody knows, which is neither 0 nor full."},
    "available_bytes": {**_SIZE, "description": "null: nobody knows."},
}
_FACTOR: Final = {"type": "number", "minimum": 0, "maximum": 1}


def _object(properties: Schema, **more: Any) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties, **more}


_NAME: Final = msgspec.json.schema(Name)
COMPONENTS: Final[Mapping[str, Schema]] = {
    "Volumes": _object(
        {
            "factor": {**_FACTOR, "description": "What scales produce limits now; 0 holds whoever produces."},
            "since_ms": {**_INSTANT, "description": "Since when; 0 if nothing was ever observed."},
            "valid_until_ms": or_null(
                _INSTANT, "Up to and including this; then the fallback holds. null if nothing is observed."
            ),
            "reason": {
                "type": "string",
                "description": "Why, for people. It begins with start, observed, violation, held, fallback, "
                "drill or off, and a colon.",
            },
            "source": or_null({"type": "string", "enum": ["kafka", "push", "static"]}, "null: none."),
            "next_check_ms": or_null(_INSTANT, "When the next observation is due; null if none is."),
            "volumes": {"type": "array", "items": ref("Volume")},
            "drill": {"anyOf": [ref("Drill"), {"type": "null"}], "description": "null: none is running."},
        }
    ),
    "Volume": _object(
        {
            "broker": {"type": "string"},
            "dir": {"type": "string"},
            **_SIZES,
            "state": {
                "type": "string",
                "enum": ["ok", "violating", "unknown"],
                "description": "unknown: the last observation did not tell its sizes, and what was told "
                "before does not violate. violating goes on until the validity of what was told ends.",
            },
            "observed_ms": or_null(_INSTANT, "When its sizes were told; null: never."),
        }
    ),
    "Drill": _object(
        {"factor": _FACTOR, "since_ms": _INSTANT, "until_ms": _INSTANT, "who": {"type": "string"}}
    ),
    "PushedVolumes": {
        "type": "object",
        "required": ["volumes"],
        "properties": {
            "volumes": {
                "type": "array",
                "maxItems": MAX_VOLUMES,
                "description": "A broker names each of its directories once.",
                "items": _object({"broker": _NAME, "dir": _NAME, **_SIZES}, additionalProperties=False),
            },
            "complete": {
                "type": "boolean",
                "default": True,
                "description": "true: the whole cluster, and a volume that is not in it is forgotten at "
                "once. false: the others stay until their validity ends.",
            },
        },
        "additionalProperties": False,
    },
    "DrillWanted": _object(
        {"factor": _FACTOR, "for_ms": {"type": "integer", "minimum": 1, "maximum": MAX_DRILL_MS}},
        additionalProperties=False,
    ),
}
"""For ``components.schemas`` of the document, which a router cannot reach by itself."""

_FULL: Final = {"broker": "2", "dir": "/data", "total_bytes": 10_737_418_240, "available_bytes": 104_857_600}
_SHOWN: Final = {
    "factor": 0.0,
    "since_ms": 1_795_000_000_000,
    "valid_until_ms": 1_795_000_300_000,
    "reason": "violation: /data of broker 2 has 104857600 of 10737418240 bytes left",
    "source": "push",
    "next_check_ms": 1_795_000_060_000,
    "volumes": [
        {
            "broker": "1",
            "dir": "/data",
            "total_bytes": None,
            "available_bytes": None,
            "state": "unknown",
            "observed_ms": None,
        },
        {**_FULL, "state": "violating", "observed_ms": 1_795_000_000_000},
    ],
    "drill": None,
}
_DRILLED: Final = {
    **_SHOWN,
    "factor": 0.2,
    "reason": "drill: by admin, until 1795000600000",
    "drill": {
        "factor": 0.2,
        "since_ms": 1_795_000_000_000,
        "until_ms": 1_795_000_600_000,
        "who": "admin",
    },
}
_BODY: Final = (
    Problem(400, "The body is empty: send JSON."),
    Problem(413, "The body is larger than 1,048,576 bytes."),
    Problem(415, f"The body must be sent as Content-Type: {JSON}."),
)
_NO_TIME: Final = FieldError("/at_ms", "is unknown, as every parameter here")
_STORE_AWAY: Final = Problem(503, AWAY.format(reason="connection"), headers={"Retry-After": "1"})
_CATALOG_AWAY: Final = Problem(503, UNTOLD, headers={"Retry-After": "1"})


def show(*, timed: bool) -> Schema:
    """The keyword arguments of the route that shows; ``timed``: it may be told when."""
    return _route(
        "Show the throttle factor and the volumes it is made from",
        "As every node decides by it. Where the store is away it is what this node holds to meanwhile: it "
        "judges by itself when the validity ends.",
        (200, "How they stand now.", _SHOWN),
        "read",
        unprocessable(_NO_TIME),
        parameters=at_ms_parameter(timed=timed),
    )


def push(*, timed: bool) -> Schema:
    """The keyword arguments of the route that takes observations; ``timed``: it may be told when."""
    pushed = {"volumes": [_FULL], "complete": False}
    return _route(
        "Push an observation of volumes",
        "One observation, for the source `push`. A volume at or below the limit sets the factor to 0 at "
        "once; an observation without one, in which every volume has sizes, sets it to 1. An empty complete "
        "one is an observation of no volumes. If none comes within an interval, that is a failed one.",
        (200, "Taken; how they stand now.", _SHOWN),
        "write",
        *_BODY,
        Problem(409, NO_SOURCE),
        unprocessable(FieldError("/volumes/1", "is told twice: a broker has a directory once")),
        _STORE_AWAY,
        parameters=at_ms_parameter(timed=timed),
        requestBody=body_of("PushedVolumes", pushed, JSON),
    )


def _route(
    summary: str,
    description: str,
    answered: tuple[int, str, object],
    scope: str,
    *more: Problem,
    **extra: Any,
) -> Schema:
    """The keyword arguments of a FastAPI route."""
    status, text, example = answered
    content = {} if example is None else {"content": {JSON: {"schema": ref("Volumes"), "example": example}}}
    responses: dict[int | str, Any] = {status: {"description": text, **content}}
    for problem in (*access_problems(scope), *more):
        responses[problem.status] = answered_with(problem)
    return {
        "summary": summary,
        "description": description,
        "status_code": status,
        "responses": responses,
        "openapi_extra": extra,
    }


BEGIN: Final = _route(
    "Begin a drill: set the factor for a while",
    "**The factor of a drill holds whatever the volumes say, also above what they call for: a drill of 1 "
    "lets everybody produce onto a disk that is running full.** That factor for that long, beside any "
    "source, or without one, on every node within a second; it ends by itself. Another drill takes the place "
    f"of one that is running. The history tells of it as of the entity `{THROTTLE_FACTOR}`, before it "
    "begins; one that then could not begin is told of again, turned round.",
    (200, "It has begun; how volumes stand now.", _DRILLED),
    "admin",
    *_BODY,
    unprocessable(FieldError("/factor", "must be a number from 0 to 1")),
    _CATALOG_AWAY,
    parameters=[REASON],
    requestBody=body_of("DrillWanted", {"factor": 0.2, "for_ms": 600_000}, JSON),
)
END: Final = _route(
    "End the drill",
    "What the volumes call for holds again, on every node within a second. The history tells of it.",
    (204, "Ended.", None),
    "admin",
    Problem(404, NO_DRILL),
    unprocessable(_NO_TIME),
    _CATALOG_AWAY,
    parameters=[REASON],
)
