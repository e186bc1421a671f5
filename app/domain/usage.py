"""What an ask spends of a quota, and how strictly it is decided; the oracle and the plan share it."""

from __future__ import annotations

from app.domain.ask import NO_PRODUCER_ID, Ask
from app.domain.digest import digest, spread
from app.domain.quota import KEYS, Enforcement, Quota


def enforcement_of(ask: Ask, quota: Quota) -> Enforcement:
    """How a quota is decided for this ask: work already done is only ever delayed, except for its ids."""
    if ask.mode == "record" and quota.algorithm != "producer_ids":
        return "delay"
    return "deny" if ask.deny else quota.enforcement


def usage_of(ask: Ask, quota: Quota) -> float:
    """What an ask spends of a quota, in units of its limit; of producer ids, how many it names."""
    key = KEYS[quota.key]
    if quota.algorithm == "producer_ids":
        return len(ids_of(ask))
    return ask.usage[key.usage] / key.per_unit


def ids_of(ask: Ask) -> tuple[int | str, ...]:
    """The ids that count: each once, without Kafka's "no producer id"."""
    return tuple(dict.fromkeys(i for i in ask.producer_ids or () if i != NO_PRODUCER_ID))


def spreads_of(ask: Ask, secret: bytes) -> tuple[bytes, ...]:
    """The ids that count, hashed for the principal and spread over 32 bytes each."""
    return tuple(spread(digest(secret, ask.principal or "", i)) for i in ids_of(ask))
