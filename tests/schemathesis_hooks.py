"""Mends generated values where JSON Schema is too weak: integers, lengths in bytes, future times."""

from __future__ import annotations

from typing import Any

import schemathesis

from app.domain.entity import MAX_NAME_BYTES
from app.http.bodies import MAX_ID_BYTES, MAX_PRODUCER_ID_BYTES

LIMITS = {"id": MAX_ID_BYTES, "producer_ids": MAX_PRODUCER_ID_BYTES}

IN_THE_YEAR_2100_MS = 4_102_444_800_000


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Turn whole floats into integers, cut strings to length in bytes, and move instants into the future."""
    if case.operation.path.startswith(("/v1/decisions", "/v1/keys", "/v1/volumes", "/v1/leases")):
        case.body = said(case.body, MAX_NAME_BYTES)
    if isinstance(case.body, dict) and type(at_ms := case.body.get("expires_ms")) is int:
        case.body["expires_ms"] = at_ms if at_ms < 0 else max(at_ms, IN_THE_YEAR_2100_MS)


def said(value: Any, limit: int) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and len(value) <= limit:
        return value.encode(errors="replace")[:limit].decode(errors="ignore")
    if isinstance(value, list):
        return [said(item, limit) for item in value]
    if isinstance(value, dict):
        return {name: said(inner, LIMITS.get(name, limit)) for name, inner in value.items()}
    return value
