"""The RateLimit fields of IETF draft-ietf-httpapi-ratelimit-headers (draft 10 and later) of a decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from app.domain.decision import Decision
from app.domain.quota import Quota

MAX_WHOLE: Final = 999_999_999_999_999
"""The largest integer of a structured field (RFC 9651)."""


def rate_limits(decision: Decision, quotas: Sequence[Quota]) -> list[tuple[bytes, bytes]]:
    """Return ``RateLimit-Policy`` for all quotas that applied, ``RateLimit`` if the remaining usage is known.

    If two quotas have one key, the second has the type of its entity in its name: ``request_rate_ip``.
    """
    policies, limits, before = [], [], ""
    for verdict, quota in zip(decision.quotas or (), quotas, strict=True):
        name = verdict.quota
        if name == before:
            name = f"{name}_{verdict.entity.partition('=')[0]}"
        before = verdict.quota
        units, span_s = policy(quota)
        policies.append(f'"{name}";q={units};w={span_s}')
        if verdict.remaining is not None:
            wait_s = retry_after_s(decision) or span_s
            limits.append(f'"{name}";r={_whole(max(verdict.remaining, 0))};t={wait_s}')
    fields = ((b"ratelimit-policy", policies), (b"ratelimit", limits))
    return [(name, ", ".join(items).encode()) for name, items in fields if items]


def policy(quota: Quota) -> tuple[int, int]:
    """Return how many units a quota admits, and over how many seconds.

    >>> policy(Quota("request_rate", 100, "sampled_rate", "deny", samples=11, sample_ms=1000))
    (1000, 10)
    >>> policy(Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=55))
    (55, 11)
    """
    if quota.algorithm == "token_bucket":
        return _whole(quota.burst), max(_whole(quota.burst / quota.limit) if quota.limit else 0, 1)
    span_s = (max(quota.samples, 2) - 1) * quota.sample_ms / 1000  # one sample is decided as two under deny
    return _whole(quota.limit * span_s), max(_whole(span_s), 1)


def retry_after_s(decision: Decision) -> int:
    """Return the seconds after which to retry a throttled request, rounded up; 0 for any other one."""
    return -(-decision.throttle_ms // 1000)


def _whole(amount: float) -> int:
    """Round down, but correct rounding errors: 0.29 a second over 100 s is 29, not 28.999999999999996."""
    return math.floor(round(min(amount, MAX_WHOLE), 9))
