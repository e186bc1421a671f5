"""What JSON Schema cannot say of asks: that `1.0` is no integer, and that lengths are in bytes."""

from __future__ import annotations

from typing import Any

import schemathesis

from app.domain.entity import MAX_NAME_BYTES
from app.http.bodies import MAX_ID_BYTES, MAX_PRODUCER_ID_BYTES

LIMITS = {"id": MAX_ID_BYTES, "producer_ids": MAX_PRODUCER_ID_BYTES}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Make whole floats integers, and what is short enough in characters short enough in bytes."""
    if case.operation.path.startswith("/v1/decisions"):
        case.body = said(case.body, MAX_NAME_BYTES)


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
