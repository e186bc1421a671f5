"""The answer of the overview, and its part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from app.admission.overview.series import LONG_MS, MINUTE_MS, MOST_THROTTLED
from app.domain.quota import KEYS, MAX_EXACT
from app.http.openapi.schema import Schema, access_problems, answer_of, components, route
from app.http.problems import FieldError, unprocessable
from app.store.samples import LATENCY_S

RESOLUTIONS: Final = ("second", "minute")
LATENCY_MS: Final = [round(bound * 1000) for bound in LATENCY_S]
MOST_SHOWN: Final = 50

Count = Annotated[int, Meta(ge=0)]
Instant = Annotated[int, Meta(ge=0)]


class OverviewNodeBody(Struct):
    """A process that answers asks."""

    node: Annotated[str, Meta(description="Its name, which is another one after each start.")]
    version: Annotated[str, Meta(description="The version of the program.")]
    seen_ms: Annotated[Instant, Meta(description="The end of the second that its newest sample counts.")]


class OverviewPointBody(Struct):
    """The counts of all processes since the entry before."""

    at_ms: Annotated[Instant, Meta(description="The end of the second or minute, in the store's time.")]
    admit: Annotated[Count, Meta(description="Decisions `admit`.")]
    delay: Annotated[Count, Meta(description="Decisions `delay`.")]
    throttle: Annotated[Count, Meta(description="Decisions `throttle`.")]
    reject: Annotated[Count, Meta(description="Decisions `reject`.")]
    local: Annotated[Count, Meta(description="Those of all four whose source is `local`.")]
    fallback: Annotated[Count, Meta(description="Those of all four whose source is `fallback`.")]
    shed: Annotated[Count, Meta(description="Requests that were shed, which are no decisions.")]
    shadow_refused: Annotated[
        Count,
        Meta(
            description="Verdicts `throttle` and `reject` of shadow quotas on asks that were let through, "
            "as `GET /v1/quotas:shadow` counts them."
        ),
    ]
    queue_asks: Annotated[Count, Meta(description="Asks that waited in the nodes at the end.")]
    latency: Annotated[
        list[Count],
        Meta(
            min_length=len(LATENCY_MS) + 1,
            max_length=len(LATENCY_MS) + 1,
            description="Decisions that took longer than the bound before and at most as long as each bound "
            "of `latency_ms`; the last entry is all others.",
        ),
    ]


class OverviewThrottledBody(Struct):
    """A bucket that throttled asks."""

    quota: Annotated[str, Meta(description="The quota key.", extra_json_schema={"enum": list(KEYS)})]
    bucket: Annotated[
        str, Meta(description="The bucket; a name of more than 64 characters is hashed: `#` and a digest.")
    ]
    asks: Annotated[Count, Meta(description="Asks that it delayed or throttled.")]
    throttle_ms: Annotated[Count, Meta(description="Their throttle times together.")]
    since_ms: Annotated[
        Instant,
        Meta(
            description="It has throttled asks since then, with no pause of more than a minute; the oldest "
            "entry that is kept bounds it."
        ),
    ]


class OverviewLongThrottledBody(Struct):
    """A bucket that has throttled asks for long."""

    quota: Annotated[str, Meta(description="The quota key.", extra_json_schema={"enum": list(KEYS)})]
    bucket: Annotated[str, Meta(description="The bucket, as in `throttled`.")]
    since_ms: Annotated[Instant, Meta(description="As in `throttled`, to the minute.")]


class OverviewStoreBody(Struct):
    """A primary of the store, as the node that answers examined it last."""

    primary: Annotated[str, Meta(description="Its address, or the name by which sentinels know it.")]
    memory_bytes: Annotated[Count | None, Meta(description="The memory that it uses; null: not known.")]
    max_bytes: Annotated[Count | None, Meta(description="Its `maxmemory`; 0: it has none; null: not known.")]
    faults: Annotated[
        list[str], Meta(description="Why it does not decide, or its misconfigurations, each in one word.")
    ]


class OverviewBody(Struct):
    """The whole deployment, added up over its nodes."""

    now_ms: Annotated[Instant, Meta(description="The store's time; 0 if this node never read it.")]
    nodes: Annotated[list[OverviewNodeBody], Meta(description="Processes seen in the last 15 s.")]
    series: Annotated[list[OverviewPointBody], Meta(description="Oldest first.")]
    latency_ms: Annotated[list[int], Meta(description="The bounds of `latency`.")]
    throttled: Annotated[
        list[OverviewThrottledBody],
        Meta(max_length=MOST_SHOWN, description="The buckets that throttled most asks in these entries."),
    ]
    throttled_long: Annotated[
        list[OverviewLongThrottledBody],
        Meta(
            max_length=MOST_THROTTLED,
            description="The buckets that have delayed or throttled asks for "
            f"{LONG_MS // MINUTE_MS} minutes or more, with no pause of more than a minute, whatever "
            "`resolution` and `since_ms` are; the longest first.",
        ),
    ]
    stores: Annotated[list[OverviewStoreBody], Meta(description="The primaries of the store.")]
    throttle_factor: Annotated[
        float, Meta(ge=0, le=1, description="The factor for produce limits that is in force.")
    ]


COMPONENTS: Final[Mapping[str, Schema]] = components(OverviewBody)
"""Schemas of the OpenAPI document (``components.schemas``) that no router can add."""


_SHOWN: Final = {
    "now_ms": 1_763_719_742_123,
    "nodes": [{"node": "host-7-5d41402a", "version": "0.1.0", "seen_ms": 1_763_719_742_000}],
    "series": [
        {
            "at_ms": 1_763_719_740_000,
            "admit": 960,
            "delay": 3,
            "throttle": 36,
            "reject": 1,
            "local": 10,
            "fallback": 0,
            "shed": 0,
            "shadow_refused": 0,
            "queue_asks": 4,
            "latency": [981, 12, 7, 0, 0, 0, 0, 0, 0, 0, 0],
        }
    ],
    "latency_ms": LATENCY_MS,
    "throttled": [
        {
            "quota": "request_rate",
            "bucket": "user=alice",
            "asks": 36,
            "throttle_ms": 36_000,
            "since_ms": 1_763_719_620_000,
        }
    ],
    "throttled_long": [{"quota": "producer_ids_rate", "bucket": "user=bob", "since_ms": 1_763_715_000_000}],
    "stores": [
        {"primary": "127.0.0.1:6379", "memory_bytes": 52_428_800, "max_bytes": 1_073_741_824, "faults": []}
    ],
    "throttle_factor": 1.0,
}
_WRONG: Final = unprocessable(
    FieldError("/resolution", "must be second or minute"),
    FieldError("/since_ms", f"must be an integer from 0 to {MAX_EXACT}"),
)

SHOW: Final = route(
    "Show the deployment",
    {200: answer_of("The counts of all processes.", "Overview", _SHOWN)},
    (*access_problems("read"), _WRONG),
    description="Each process publishes its counts every second, and once more when it stops. The series has "
    "an entry for each second of the last 15 minutes, or for each minute of the last day, and ends about two "
    "seconds ago. Each decision is counted once under its outcome; `local` and `fallback` are parts of these "
    "by source, and `shed` is apart. If the sample of a process was lost, that second has no entry, and the "
    "next entry has the counts of both: an entry counts what happened since the one before it. A process "
    "that was lost for more than three seconds, or a minute, has all its counts in the entry in which it "
    "comes back. The last second of a process that was killed is lost. While the store is away, a node "
    "answers with what it has.",
    parameters=[
        {
            "name": "resolution",
            "in": "query",
            "description": "By the second, up to 15 minutes, or by the minute, up to a day.",
            "schema": {"type": "string", "enum": list(RESOLUTIONS), "default": "second"},
            "example": "second",
        },
        {
            "name": "since_ms",
            "in": "query",
            "description": "Only entries with a later `at_ms`; `throttled` covers the same entries. Give "
            "the newest `at_ms` that you have, and you get each entry once.",
            "schema": {"type": "integer", "minimum": 0, "maximum": MAX_EXACT},
            "example": 1_763_719_740_000,
        },
    ],
)
