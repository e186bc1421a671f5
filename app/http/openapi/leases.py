"""The part of the OpenAPI document about the routes of leases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from app.http.access.access import LEASES
from app.http.bodies import LeaseBody, LeaseRequestBody, SettledBody, SpentBody
from app.http.openapi.schema import (
    Schema,
    access_problems,
    answer_of,
    at_ms_parameter,
    body_of,
    components,
    operation,
    route,
)
from app.http.problems import FieldError, ProblemError, overloaded, unprocessable

COMPONENTS: Final[Mapping[str, Schema]] = components(LeaseBody, LeaseRequestBody, SettledBody, SpentBody)
"""Schemas of the OpenAPI document (``components.schemas``) that no router can add."""

_LEASE: Final = "rQ3lY2pWc0lGq2oT4mJ0Ww"
_LONGEST: Final = 4_096
"""No name of a lease has more characters: it holds five names of up to 512 bytes, in base64."""
_WANTED: Final = {
    "ask": {"principal": "alice", "usage": {"fetch_bytes": 5_000_000}},
    "lease_ms": 500,
    "settle": [{"lease": _LEASE, "usage": {"fetch_bytes": 1_310_720}}],
}
_GRANTED: Final = {
    "lease": "8kqB7n1cT1iXw3Yb0aUoZg",
    "granted": {"fetch_bytes": 2_500_000},
    "lease_ms": 500,
    "renew_ms": 400,
    "decision": "admit",
    "throttle_ms": 0,
    "limited_by": None,
    "source": "store",
    "settled": [{"lease": _LEASE, "ok": True}],
}
_PROBLEMS: Final = (
    ProblemError(400, "The body is not JSON: Input data was truncated."),
    *access_problems("account"),
    ProblemError(413, "The body is larger than 1,048,576 bytes."),
    overloaded(2_000),
)
_TOO_MUCH: Final = "is more than the 1000 granted"

TAKE: Final = route(
    "Take a lease",
    {200: answer_of("Granted or not; and settled or not.", "Lease", _GRANTED)},
    (*_PROBLEMS, unprocessable(FieldError("/settle/0/usage/fetch_bytes", _TOO_MUCH))),
    description="Takes a part of the wished usage from every quota that applies, each decided as deny, so "
    "that the caller can decide alone. The units count as used while the lease lasts. `settle` comes first: "
    "what was spent of a lease becomes a charge of now, and the rest is free again. What nobody settles "
    "counts as spent when the lease ends. Leases of `produce_bytes` last at most 1,000 ms. The caller "
    "counts the time from before it asked.",
    body=body_of("LeaseRequest", _WANTED),
)


def paths(*, timed: bool) -> Schema:
    """Return the paths of leases; ``timed``: under the caller's clock, where they take ``at_ms``."""
    return {
        LEASES: {"post": operation("take_lease", "Leases", "account", TAKE)},
        f"{LEASES}/{{lease}}": {"delete": operation("end_lease", "Leases", "account", _end(timed=timed))},
    }


def _end(*, timed: bool) -> Schema:
    name: Schema = {
        "name": "lease",
        "in": "path",
        "required": True,
        "description": "The name of the lease.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]+$", "maxLength": _LONGEST},
        "example": _LEASE,
    }
    body = body_of("Spent", {"usage": {"fetch_bytes": 1_310_720}})
    return route(
        "End a lease",
        {
            200: answer_of(
                "Settled, or unknown to this key, or over.", "Settled", {"lease": _LEASE, "ok": True}
            )
        },
        (*_PROBLEMS, unprocessable(FieldError("/usage/fetch_bytes", _TOO_MUCH))),
        description="Settles one lease and ends it. Without a body all of it was spent.",
        parameters=[name, *at_ms_parameter(timed=timed)],
        body=body | {"required": False},
    )
