"""Verdicts, one for each quota that applied, and how they combine into a decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from app.domain.ask import Mode
from app.domain.quota import (
    CONSUMER_BYTE_RATE,
    MAX_THROTTLE_MS,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    REQUEST_RATE,
    Enforcement,
)

Outcome = Literal["admit", "delay", "throttle", "reject"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("admit", "delay", "throttle", "reject")

Reason = Literal["capacity", "too_large", "store_failure", "store_full"]
REASONS: Final[tuple[Reason | None, ...]] = (None, "capacity", "too_large", "store_failure", "store_full")

Source = Literal["store", "local", "fallback"]
SOURCES: Final[tuple[Source, ...]] = ("store", "local", "fallback")

_RANK: Final = {outcome: rank for rank, outcome in enumerate(OUTCOMES)}
"""A worse outcome has a higher rank."""

BYTE_RATES: Final = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE)
REQUEST_RATES: Final = (REQUEST_RATE, REQUEST_PERCENTAGE)


# Final instead of frozen: it is made for every ask (docs/decisions/0051)
@dataclass(slots=True, unsafe_hash=True)
class Verdict:
    """The answer of one quota, as if it were the only one.

    Attributes:
        outcome, throttle_ms: the answer of this quota alone; ``throttle_ms`` is 0 for admit and reject.
        observed, remaining: the bucket after this ask, in the limit's unit; None if unknown.
        largest: with reason ``too_large``, the most that an empty bucket can hold.
    """

    quota: Final[str]
    entity: Final[str]
    bucket: Final[str]
    limit: Final[float]
    enforcement: Final[Enforcement]
    shadow: Final[bool]
    outcome: Final[Outcome]
    throttle_ms: Final[int]
    observed: Final[float | None] = None
    remaining: Final[float | None] = None
    reason: Final[Reason | None] = None
    largest: Final[float | None] = None


# Final instead of frozen: it is made for every ask (docs/decisions/0051)
@dataclass(slots=True, unsafe_hash=True)
class LimitedBy:
    """The quota that decided; ``reason`` says why if it was not the rate itself."""

    quota: Final[str]
    entity: Final[str | None]
    bucket: Final[str | None]
    reason: Final[Reason | None] = None
    largest: Final[float | None] = None


# Final instead of frozen: it is made for every ask (docs/decisions/0051)
@dataclass(slots=True, unsafe_hash=True)
class Decision:
    """The whole answer to an ask; ``quotas`` is None unless the ask requested detail."""

    decision: Final[Outcome]
    throttle_ms: Final[int]
    charged: Final[bool]
    applied: Final[int]
    source: Final[Source]
    limited_by: Final[LimitedBy | None]
    quotas: Final[tuple[Verdict, ...] | None] = None


def combine(
    verdicts: Sequence[Verdict], *, sequential: bool = False
) -> tuple[Outcome, int, LimitedBy | None]:
    """Combine verdicts, given in the order of ``KEYS``, into one outcome.

    A reject goes before a throttle, a throttle before a delay. The longest wait decides (Kafka's rule); a tie
    goes to the earlier verdict. Shadow verdicts are ignored.

    Args:
        sequential: combine delays as KIP-124 says: ``max(B + R, every other delay)``, where B is the byte
            delay and R the request delay, which the caller has measured at now + B.
    """
    worst: Verdict | None = None
    for verdict in verdicts:
        if verdict.outcome != "admit" and not verdict.shadow and (worst is None or _is_worse(verdict, worst)):
            worst = verdict
    if worst is None:
        return "admit", 0, None
    if sequential and worst.outcome == "delay":
        return _summed([verdict for verdict in verdicts if verdict.outcome == "delay" and not verdict.shadow])
    return worst.outcome, worst.throttle_ms, limited_by(worst)


def _is_worse(one: Verdict, other: Verdict) -> bool:
    """Whether a verdict goes before an earlier one."""
    rank, before = _RANK[one.outcome], _RANK[other.outcome]
    return rank > before or (rank == before and one.throttle_ms > other.throttle_ms)


def _summed(delays: Sequence[Verdict]) -> tuple[Outcome, int, LimitedBy]:
    """Combine delays as KIP-124 says."""
    bytes_ = [delay for delay in delays if delay.quota in BYTE_RATES]
    requests = [delay for delay in delays if delay.quota in REQUEST_RATES]
    others = [delay for delay in delays if delay.quota not in BYTE_RATES + REQUEST_RATES]
    summed = sum(_longest(part).throttle_ms for part in (bytes_, requests) if part)
    other = _longest(others) if others else None
    if other is not None and other.throttle_ms > summed:
        return "delay", other.throttle_ms, limited_by(other)
    parts = [delay for delay in delays if delay not in others or delay.throttle_ms == summed]
    return "delay", min(summed, MAX_THROTTLE_MS), limited_by(_longest(parts))


def is_charged(mode: Mode, outcome: Outcome) -> bool:
    """Whether the answer has ``charged: true``: usage was written, or given back."""
    return mode == "refund" or (mode in ("admit", "record") and outcome in ("admit", "delay"))


def limited_by(verdict: Verdict) -> LimitedBy:
    """The quota of a verdict, as the one that decided."""
    return LimitedBy(verdict.quota, verdict.entity, verdict.bucket, verdict.reason, verdict.largest)


def _longest(verdicts: Sequence[Verdict]) -> Verdict:
    return max(verdicts, key=lambda v: v.throttle_ms)  # the first one, in a tie
