"""The usage of a quota by an ask, and its enforcement; used by the oracle and by plans."""

from __future__ import annotations

from app.domain.ask import NO_PRODUCER_ID, Ask
from app.domain.digest import digest, spread
from app.domain.quota import KEYS, Enforcement, Quota


def enforcement_of(ask: Ask, quota: Quota) -> Enforcement:
    """The enforcement of a quota for this ask: work that is already done is only delayed, except for ids."""
    if ask.mode == "record" and quota.algorithm != "producer_ids":
        return "delay"
    return "deny" if ask.deny else quota.enforcement


def usage_of(ask: Ask, quota: Quota) -> float:
    """The usage of a quota by an ask, in units of the limit; for producer ids, their number."""
    if quota.algorithm == "producer_ids":
        return len(ids_of(ask))
    field, per_unit = usage_field(quota)
    return ask.usage[field] / per_unit


def usage_field(quota: Quota) -> tuple[str, float]:
    """The field of an ask's usage that a quota limits, and how much of it is one unit of the limit."""
    key = KEYS[quota.key]
    return key.usage, key.per_unit


def ids_of(ask: Ask) -> tuple[int | str, ...]:
    """The distinct ids of an ask, without Kafka's "no producer id"."""
    ids = ask.producer_ids
    if not ids:
        return ()
    if len(ids) == 1:  # as most asks have
        return ids if ids[0] != NO_PRODUCER_ID else ()
    return tuple(dict.fromkeys([i for i in ids if i != NO_PRODUCER_ID]))


def spreads_of(ask: Ask, secret: bytes) -> tuple[bytes, ...]:
    """The distinct ids of an ask, hashed for the principal and each spread over 32 bytes."""
    principal = ask.principal or ""
    return tuple([spread(digest(secret, principal, i)) for i in ids_of(ask)])
