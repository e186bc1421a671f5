"""The RateLimit fields of IETF draft-ietf-httpapi-ratelimit-headers (draft 10 and later) of a decision."""

from __future__ import annotations

from collections.abc import Sequence

from app.domain.decision import Decision
from app.domain.quota import whole
from app.store.port import Charge


def decision_fields(
    decision: Decision, charges: Sequence[Charge], remaining: Sequence[float | None]
) -> list[tuple[bytes, bytes]]:
    """Return the header fields for a gateway: its time to wait, and the quotas that applied.

    Args:
        remaining: the units left in each bucket; None where they are not known.
    """
    wait_s = -(-decision.throttle_ms // 1000)  # rounded up; 0 unless it is throttled
    fields = [(b"x-throttle-ms", b"%d" % decision.throttle_ms), *rate_limits(charges, remaining, wait_s)]
    if wait_s:
        fields.append((b"retry-after", b"%d" % wait_s))
    return fields


def rate_limits(
    charges: Sequence[Charge], remaining: Sequence[float | None], wait_s: int
) -> list[tuple[bytes, bytes]]:
    """Return ``RateLimit-Policy`` for all quotas that applied, ``RateLimit`` where the units left are known.

    If two quotas have one key, the second has the type of its entity in its name: ``request_rate_ip``.

    Args:
        wait_s: the seconds of ``Retry-After``; if 0, each quota shows its own span.
    """
    policies, limits, before = [], [], ""
    for charge, rest in zip(charges, remaining, strict=True):
        compiled = charge.compiled
        name = compiled.quota.key
        if name == before:
            name = f"{name}_{compiled.entity.partition('=')[0]}"
        before = compiled.quota.key
        units, span_s = compiled.allowance
        policies.append(f'"{name}";q={units};w={span_s}')
        if rest is not None:
            limits.append(f'"{name}";r={left(rest)};t={wait_s or span_s}')
    if not policies:
        return []
    fields = [(b"ratelimit-policy", ", ".join(policies).encode())]
    if limits:
        fields.append((b"ratelimit", ", ".join(limits).encode()))
    return fields


def left(remaining: float) -> int:
    """Return how many whole units are left."""
    return whole(max(remaining, 0))
