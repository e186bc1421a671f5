"""The RateLimit fields of IETF draft-ietf-httpapi-ratelimit-headers (draft 10 and later) of a decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from app.domain.decision import Decision
from app.domain.quota import whole
from app.store.port import Charge


def decision_fields(decision: Decision, charges: Sequence[Charge]) -> list[tuple[bytes, bytes]]:
    """Return what a gateway learns from fields: how long to wait, and the quotas that applied."""
    fields = [(b"x-throttle-ms", b"%d" % decision.throttle_ms), *rate_limits(decision, charges)]
    if wait_s := retry_after_s(decision):
        fields.append((b"retry-after", b"%d" % wait_s))
    return fields


def rate_limits(decision: Decision, charges: Sequence[Charge]) -> list[tuple[bytes, bytes]]:
    """Return ``RateLimit-Policy`` for all quotas that applied, ``RateLimit`` if the rest is known.

    Args:
        decision: with detail.
    """
    verdicts = decision.quotas or ()
    policies, limits = [], []
    names = _names((verdict.quota, verdict.entity) for verdict in verdicts)
    for name, verdict, charge in zip(names, verdicts, charges, strict=True):
        units, span_s = charge.compiled.allowance
        policies.append(f'"{name}";q={units};w={span_s}')
        if verdict.remaining is not None:
            wait_s = retry_after_s(decision) or span_s
            limits.append(f'"{name}";r={left(verdict.remaining)};t={wait_s}')
    fields = ((b"ratelimit-policy", policies), (b"ratelimit", limits))
    return [(name, ", ".join(items).encode()) for name, items in fields if items]


def left(remaining: float) -> int:
    """Return how many whole units are left."""
    return whole(max(remaining, 0))


def retry_after_s(decision: Decision) -> int:
    """Return the seconds after which to retry a throttled request, rounded up; 0 for any other one."""
    return -(-decision.throttle_ms // 1000)


def _names(named: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Return the names of quotas, given by key and entity.

    If two quotas have one key, the second has the type of its entity in its name: ``request_rate_ip``.
    """
    before = ""
    for key, entity in named:
        yield f"{key}_{entity.partition('=')[0]}" if key == before else key
        before = key
