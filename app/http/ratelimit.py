"""The RateLimit fields of IETF draft-ietf-httpapi-ratelimit-headers (draft 10 and later) of a decision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from app.domain.decision import Decision
from app.domain.quota import Quota

MAX_WHOLE: Final = 999_999_999_999_999
"""The largest integer of a structured field (RFC 9651)."""

_NEARLY_WHOLE: Final = 0.999999
"""Up to here the fraction of an amount is no rounding error; to round takes longer than to look."""
_ROUNDING: Final = 2**-51
"""The error of a product or a quotient, relative to it."""


def decision_fields(decision: Decision, quotas: Sequence[Quota]) -> list[tuple[bytes, bytes]]:
    """Return what a gateway learns from fields: how long to wait, and the quotas that applied."""
    fields = [(b"x-throttle-ms", b"%d" % decision.throttle_ms), *rate_limits(decision, quotas)]
    if wait_s := retry_after_s(decision):
        fields.append((b"retry-after", b"%d" % wait_s))
    return fields


def rate_limits(decision: Decision, quotas: Sequence[Quota]) -> list[tuple[bytes, bytes]]:
    """Return ``RateLimit-Policy`` for all quotas that applied, ``RateLimit`` if the rest is known."""
    verdicts = decision.quotas or ()
    policies, limits = [], []
    names = _names((verdict.quota, verdict.entity) for verdict in verdicts)
    for name, verdict, quota in zip(names, verdicts, quotas, strict=True):
        units, span_s = policy(quota)
        policies.append(_policy_item(name, units, span_s))
        if verdict.remaining is not None:
            limits.append(_limit_item(name, left(verdict.remaining), retry_after_s(decision) or span_s))
    return _fields(policies, limits)


def admitted_rate_limits(applied: Iterable[tuple[Quota, str]]) -> list[tuple[bytes, bytes]]:
    """Return the fields of an admission, as ``rate_limits`` does, with ``%d`` for what is left of each quota.

    Args:
        applied: the quotas that apply, each with the entity that it is set on.
    """
    its = list(applied)
    policies, limits = [], []
    for name, (quota, _) in zip(_names((quota.key, entity) for quota, entity in its), its, strict=True):
        units, span_s = policy(quota)
        policies.append(_policy_item(name, units, span_s))
        limits.append(_limit_item(name, "%d", span_s))
    return _fields(policies, limits)


def left(remaining: float) -> int:
    """Return how many whole units are left."""
    if 0 <= remaining <= MAX_WHOLE and remaining - (units := int(remaining)) < _NEARLY_WHOLE:
        return units  # nearly always
    return _whole(max(remaining, 0))


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
    """Round down, but correct rounding errors: 0.29 a second over 100 s is 29, not 28.999999999999996.

    >>> _whole(20 / (20 / 31_536_000)), _whole(28.9), _whole(31_535_999.9)
    (31536000, 28, 31535999)
    """
    amount = min(amount, MAX_WHOLE)
    units = math.floor(amount)
    if amount - units < _NEARLY_WHOLE:
        return units
    return math.floor(max(round(amount, 9), amount * (1 + _ROUNDING)))


def _names(named: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Return the names of quotas, given by key and entity.

    If two quotas have one key, the second has the type of its entity in its name: ``request_rate_ip``.
    """
    before = ""
    for key, entity in named:
        yield f"{key}_{entity.partition('=')[0]}" if key == before else key
        before = key


def _policy_item(name: str, units: int, span_s: int) -> str:
    return f'"{name}";q={units};w={span_s}'


def _limit_item(name: str, units: int | str, wait_s: int) -> str:
    return f'"{name}";r={units};t={wait_s}'


def _fields(policies: Sequence[str], limits: Sequence[str]) -> list[tuple[bytes, bytes]]:
    fields = ((b"ratelimit-policy", policies), (b"ratelimit", limits))
    return [(name, ", ".join(items).encode()) for name, items in fields if items]
