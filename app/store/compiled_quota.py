"""Quotas compiled for the store: the text and bytes around the names and numbers of an ask."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple

from msgspec import Struct

from app.domain.decision import BYTE_RATES, REQUEST_RATES
from app.domain.quota import CONNECTION_CREATION_RATE, KEYS, Enforcement, Quota
from app.store.keys import identity_of, key_of

ALGORITHMS: Final = {"sampled_rate": 1, "token_bucket": 2, "producer_ids": 3}
_DENY, _SHADOW, _CONNECTION, _RECHECK, _BYTES, _REQUESTS, _CLOSED = 1, 2, 4, 8, 16, 32, 64
DENY, RECORDS, RECHECK = 1, 2, 4
"""The bits of a manner: the properties of an ask that change the bytes sent for its quotas.

Every quota is decided as deny; the work is done already; it is the second ask for a held connection.
"""
_FIELDS: Final = {key.usage: number for number, key in enumerate(KEYS.values())}
"""The number of each usage field: a lease takes equal units from all buckets of one field."""

BEFORE: Final = struct.Struct("<BB")
BETWEEN: Final = struct.Struct("<Hdd")
AFTER: Final = struct.Struct("<dddd")
"""The parts of a quota in an ask (``lua/call.lua``); ``BETWEEN`` has the number of ids, the limit and the
usage."""


class ShadowPeriod(NamedTuple):
    """A shadow quota under one definition; its verdicts are counted by this.

    Attributes:
        entity: its canonical spelling.
        since_ms: as ``Quota.since_ms``.
    """

    quota: str
    entity: str
    since_ms: int


class CompiledQuota(Struct, frozen=True):
    """A quota, compiled for one manner of asks.

    Attributes:
        entity: the entity that it is set on, spelled.
        enforcement: as it applies to these asks.
        field, per_unit: the usage field that it limits, and the usage in one unit of the limit.
        counts_ids: whether it counts producer ids.
        is_by_broker: whether each broker has buckets of its own.
        shadow: None if it is live.
        is_shown_alone: whether one gauge shows its bucket: it is not in shadow, and counts no ids or
            connections.
        allowance: as ``Quota.allowance``.
        head, middle, tail: the parts of a bucket's key around owner and bucket.
        before, limit, after: its bytes in the argument; the limit is between the number of ids and the usage.
    """

    quota: Quota
    entity: str
    enforcement: Enforcement
    field: str
    per_unit: float
    counts_ids: bool
    is_by_broker: bool
    shadow: ShadowPeriod | None
    is_shown_alone: bool
    allowance: tuple[int, int]
    head: str
    middle: str
    tail: str
    before: bytes
    limit: float
    after: bytes


def compiled(quota: Quota, entity: str, manner: int) -> CompiledQuota:
    """Compile a quota that is set on an entity, for asks of a manner."""
    key = KEYS[quota.key]
    counts_ids = quota.algorithm == "producer_ids"
    enforcement: Enforcement = "deny" if manner & DENY else quota.enforcement
    if manner & RECORDS and not counts_ids:
        enforcement = "delay"  # as app.domain.usage.enforcement_of
    flags = (
        _DENY * (enforcement == "deny")
        | _SHADOW * quota.shadow
        | _CONNECTION * (quota.key == CONNECTION_CREATION_RATE)
        | _RECHECK * (manner & RECHECK > 0)
        | _BYTES * (quota.key in BYTE_RATES)
        | _REQUESTS * (quota.key in REQUEST_RATES)
        | _CLOSED * (quota.on_store_failure == "throttle" and not manner & RECORDS)
    )
    return CompiledQuota(
        quota,
        entity,
        enforcement,
        key.usage,
        key.per_unit,
        counts_ids,
        quota.scope == "broker",
        ShadowPeriod(quota.key, entity, quota.since_ms) if quota.shadow else None,
        not (counts_ids or quota.shadow or key.usage == "connections"),
        quota.allowance,
        *_around(quota.key, identity_of(quota)),
        BEFORE.pack(ALGORITHMS[quota.algorithm], flags),
        quota.limit,
        AFTER.pack(*parameters(quota), quota.longest_delay_ms),
    )


@lru_cache(1_024)
def _around(key: str, identity: str) -> tuple[str, str, str]:
    """The parts of a bucket's key before, between and behind owner and bucket; many quotas share them."""
    head, rest = key_of("~owner", key, "~bucket", identity).split("~owner")
    middle, tail = rest.split("~bucket")
    return head, middle, tail


def parameters(quota: Quota) -> tuple[float, float, float]:
    """The three parameters of a quota's algorithm, in addition to the limit, as in ``lua/call.lua``."""
    if quota.algorithm == "sampled_rate":
        return quota.samples, quota.sample_ms, _FIELDS[KEYS[quota.key].usage]
    if quota.algorithm == "token_bucket":
        return quota.burst, quota.max_debt, _FIELDS[KEYS[quota.key].usage]
    return quota.window_ms, quota.layers.interval_ms, quota.layers.ttl_ms
