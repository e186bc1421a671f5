"""The bodies of the volume routes, and their part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from app.domain.volumes import KNOWN_AT_MOST, Source
from app.http.bodies import NAME_SCHEMA, Name
from app.http.faults import MUST
from app.http.openapi.quotas import REASON
from app.http.openapi.quotas_lists import THROTTLE_FACTOR
from app.http.openapi.schema import (
    BODY_PROBLEMS,
    Schema,
    access_problems,
    answer_of,
    at_ms_parameter,
    body_of,
    components,
    route,
)
from app.http.problems import FieldError, ProblemError, away, unprocessable

AWAY: Final = "The store does not answer ({reason}): the change may or may not be done. See GET /v1/volumes."
UNTOLD: Final = "The catalog is unreachable, and its history must record a drill: nothing was done."
NO_DRILL: Final = "No drill is running."
NO_BROKER: Final = "No volume of the broker {broker} is known."
TOO_MANY: Final = (
    f"would make {{count}} volumes known, and at most {KNOWN_AT_MOST} are kept: forget each broker that is "
    "gone by DELETE /v1/volumes?broker=BROKER, or push all volumes with complete: true"
)
NO_SOURCE: Final = (
    "This deployment observes no volumes: QUOTAGATE_VOLUME_SOURCE is not set to push, or "
    "QUOTAGATE_VOLUME_CHECK_INTERVAL turns the checks off."
)
OTHER_SOURCE: Final = (
    "This deployment observes volumes by the source {source}: QUOTAGATE_VOLUME_SOURCE is not push."
)

MAX_SIZE: Final = 2**63 - 1
MAX_DRILL_MS: Final = 366 * 86_400_000

Size = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_SIZE)] | None,
    Meta(extra={MUST: "must be an integer from 0 to 2^63 - 1, or null for unknown"}),
]
TotalBytes = Annotated[Size, Meta(description="null: unknown, which is neither 0 nor full.")]
AvailableBytes = Annotated[Size, Meta(description="null: unknown.")]
Factor = Annotated[float, Meta(ge=0, le=1, extra={MUST: "must be a number from 0 to 1"})]
Instant = Annotated[int, Meta(ge=0)]


class VolumeBody(Struct):
    """What is known of a volume."""

    broker: Annotated[str, Meta(description="The broker that the volume belongs to.")]
    dir: Annotated[str, Meta(description="The log directory, as the broker names it.")]
    total_bytes: TotalBytes
    available_bytes: AvailableBytes
    state: Annotated[
        Literal["ok", "violating", "unknown"],
        Meta(
            description="unknown: its last observation had no sizes, or no push has renewed them within "
            "their validity. violating lasts until the validity of its sizes ends.",
            extra_json_schema={"type": "string"},
        ),
    ]
    observed_ms: Annotated[Instant | None, Meta(description="When its sizes were observed; null: never.")]


class DrillBody(Struct):
    """A drill: a throttle factor that somebody set for a while."""

    factor: Annotated[Factor, Meta(description="The factor while it lasts.")]
    since_ms: Annotated[Instant, Meta(description="When it began.")]
    until_ms: Annotated[Instant, Meta(description="When it ends by itself.")]
    who: Annotated[str, Meta(description="The name of the API key that began it.")]


class VolumesBody(Struct):
    """The throttle factor, and the volumes that it is computed from."""

    factor: Annotated[Factor, Meta(description="Produce limits are multiplied by it; 0 stops all producers.")]
    since_ms: Annotated[Instant, Meta(description="When it took this value; 0 if nothing was ever observed.")]
    valid_until_ms: Annotated[
        Instant | None,
        Meta(
            description="The last millisecond at which it is valid; then the fallback applies. null if "
            "nothing is observed."
        ),
    ]
    reason: Annotated[
        str,
        Meta(
            description="Why, for people. It begins with start, observed, violation, held, fallback, drill "
            "or off, and a colon."
        ),
    ]
    source: Annotated[
        Annotated[Source, Meta(extra_json_schema={"type": "string"})] | None,
        Meta(description="null: volumes are not observed."),
    ]
    next_check_ms: Annotated[
        Instant | None, Meta(description="When the next observation is due; null if none is.")
    ]
    volumes: Annotated[list[VolumeBody], Meta(description="All known volumes, by broker and directory.")]
    min_available_bytes: Annotated[
        Instant | None,
        Meta(description="The limit: a volume with at most so many bytes left violates. null: not set."),
    ]
    min_available_ratio: Annotated[
        Factor | None,
        Meta(description="The limit as a part of the volume's size. null: not set; at most one of both is."),
    ]
    drill: Annotated[DrillBody | None, Meta(description="null: no drill is running.")]


class PushedVolume(Struct, forbid_unknown_fields=True):
    """A volume as it is pushed."""

    broker: Annotated[Name, Meta(description="The broker that the volume belongs to.")]
    dir: Annotated[Name, Meta(description="The log directory; it names the volume of its broker.")]
    total_bytes: TotalBytes
    available_bytes: AvailableBytes


class PushedVolumesBody(Struct, forbid_unknown_fields=True):
    """An observation of volumes."""

    volumes: Annotated[
        list[PushedVolume],
        Meta(max_length=KNOWN_AT_MOST, description="Each directory of a broker may be named once."),
    ]
    complete: Annotated[
        bool | UnsetType,
        Meta(
            description="true: these are all volumes of the cluster, and any other is forgotten at once. "
            "false: these are some of them, such as those of one broker, and the others stay known.",
            extra_json_schema={"default": False},
        ),
    ] = UNSET


class DrillWantedBody(Struct, forbid_unknown_fields=True):
    """A drill to begin now."""

    factor: Annotated[Factor, Meta(description="The factor for produce limits; 0 stops all producers.")]
    for_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_DRILL_MS,
            description="How long, in milliseconds.",
            extra={MUST: f"must be an integer from 1 to {MAX_DRILL_MS} (a year)"},
        ),
    ]


COMPONENTS: Final[Mapping[str, Schema]] = components(VolumesBody, PushedVolumesBody, DrillWantedBody)
"""Schemas of the OpenAPI document (``components.schemas``) that no router can add."""

_FULL: Final = {"broker": "2", "dir": "/data", "total_bytes": 10_737_418_240, "available_bytes": 104_857_600}
_SHOWN: Final = {
    "factor": 0.0,
    "since_ms": 1_795_000_000_000,
    "valid_until_ms": 1_795_000_300_000,
    "reason": "violation: /data of broker 2 has 104,857,600 of 10,737,418,240 bytes left",
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
    "min_available_bytes": 1_073_741_824,
    "min_available_ratio": None,
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
_NO_TIME: Final = unprocessable(FieldError("/at_ms", "is unknown, as every parameter here"))
_CATALOG_AWAY: Final = away(UNTOLD)


def show(*, timed: bool) -> Schema:
    """Return the keyword arguments of the route that shows volumes; ``timed``: it takes ``at_ms``."""
    return route(
        "Show the throttle factor and the volumes that it is computed from",
        {200: answer_of("The throttle factor and the volumes.", "Volumes", _SHOWN)},
        (*access_problems("read"), _NO_TIME),
        description="This is what every node decides by. While the store is unreachable, it is what this "
        "node uses: the node judges by itself when the validity ends.",
        parameters=at_ms_parameter(timed=timed),
    )


def push(*, timed: bool) -> Schema:
    """Return the keyword arguments of the route that takes observations; ``timed``: it takes ``at_ms``."""
    return route(
        "Push an observation of volumes",
        {200: answer_of("Accepted. The throttle factor and the volumes after it.", "Volumes", _SHOWN)},
        (
            *access_problems("write"),
            *BODY_PROBLEMS,
            ProblemError(409, NO_SOURCE),
            unprocessable(FieldError("/volumes/1", "is duplicated: name each directory of a broker once")),
            away(AWAY.format(reason="connection")),
        ),
        description="One observation, for the source `push`. A volume at or below the limit sets the "
        "factor to 0 at once. An observation without such a volume, in which every volume has sizes, sets "
        "it to 1. If no observation arrives within an interval, that counts as a failed one. Only a complete "
        "observation may be empty: then the cluster has no volumes.\n\nWith one agent for each broker, each "
        "pushes its own volumes, and `complete` is false. A known volume that no push has renewed within its "
        "validity makes observations fail, so that the fallback applies, until a complete observation or "
        "`DELETE /v1/volumes` forgets it. One agent that sees the whole cluster sends `complete: true`.",
        parameters=at_ms_parameter(timed=timed),
        body=body_of("PushedVolumes", {"volumes": [_FULL], "complete": False}),
    )


def forget(*, timed: bool) -> Schema:
    """Return the keyword arguments of the route that forgets a broker; ``timed``: it takes ``at_ms``."""
    broker = {
        "name": "broker",
        "in": "query",
        "required": True,
        "description": "The broker, as pushes name it.",
        "schema": NAME_SCHEMA,
        "example": "2",
    }
    return route(
        "Forget the volumes of a broker",
        {204: answer_of("Forgotten.")},
        (
            *access_problems("write"),
            ProblemError(404, NO_BROKER.format(broker="2")),
            ProblemError(409, NO_SOURCE),
            unprocessable(FieldError("/broker", "is required: the broker whose volumes are forgotten")),
            away(AWAY.format(reason="connection")),
        ),
        description="For a broker that left the cluster or has another name now, with the source `push`. The "
        "last observation is judged again without its volumes, on every node within a second. A broker whose "
        "agent still pushes is known again with its next push.",
        parameters=[broker, *at_ms_parameter(timed=timed)],
    )


BEGIN: Final = route(
    "Begin a drill: set the throttle factor for a while",
    {200: answer_of("Drill begun. The throttle factor and the volumes.", "Volumes", _DRILLED)},
    (
        *access_problems("admin"),
        *BODY_PROBLEMS,
        unprocessable(FieldError("/factor", "must be a number from 0 to 1")),
        _CATALOG_AWAY,
    ),
    description="**The factor of a drill applies whatever the volumes say, also when it is higher than "
    "theirs: a drill of 1 lets everybody produce onto a disk that is running full.** The drill applies on "
    "every node within a second, with or without a source of volumes, and ends by itself. A new drill "
    f"replaces the one that is running. The history records a drill under the entity `{THROTTLE_FACTOR}` "
    "before it begins; if it then cannot begin, the history records the opposite change as well.",
    parameters=[REASON],
    body=body_of("DrillWanted", {"factor": 0.2, "for_ms": 600_000}),
)
END: Final = route(
    "End the drill",
    {204: answer_of("Drill ended.")},
    (*access_problems("admin"), ProblemError(404, NO_DRILL), _NO_TIME, _CATALOG_AWAY),
    description="The factor that the volumes call for applies again, on every node within a second. The "
    "history records the change.",
    parameters=[REASON],
)
