"""The columns of the decision log, defined once: the schema of its files and all readers derive from them.

This module is pure, so that jobs over the log can import it. ``docs/architecture.md`` has the steps to add a
column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from app.domain.quota import Layers, Quota

VERSION: Final = 4
OLDEST: Final = 1
"""Files of these versions and of all in between are read. A later column is null in an older file."""


class ListOf(NamedTuple):
    """A list of items of one type."""

    item: Type


class MapOf(NamedTuple):
    """A map from keys of one type to values of one type."""

    key: str
    value: str


class Column(NamedTuple):
    """A column of the log, or a field of a struct in it.

    Attributes:
        type: as Arrow calls it; a tuple of columns is a struct.
        since: the version that added the column. An added column must be nullable.
    """

    name: str
    type: Type
    meaning: str
    nullable: bool = False
    since: int = OLDEST


Type = str | ListOf | MapOf | tuple[Column, ...]

_QUOTA: Final = (
    Column("quota", "string", "The quota's key."),
    Column("entity", "string", "The entity that the quota is set for."),
    Column("bucket", "string", "The entity that the bucket belongs to."),
    Column("limit", "float64", "The limit in force, after the throttle factor."),
    Column("algorithm", "string", "sampled_rate, token_bucket or producer_ids."),
    Column("enforcement", "string", "deny or delay, as it applied to this ask."),
    Column("shadow", "bool", "The quota is only observed: it limits nothing."),
    Column("scope", "string", "Whether the quota counts for the cluster or for one broker."),
    Column("samples", "int32", "Samples of a sampled rate."),
    Column("sample_ms", "int64", "Length of a sample."),
    Column("burst", "float64", "Capacity of a token bucket, in units of the limit."),
    Column("window_ms", "int64", "Window of producer ids."),
    Column("interval_ms", "int64", "How long a layer of producer ids is open."),
    Column("ttl_ms", "int64", "How long a layer of producer ids lives."),
    Column("epoch", "int64", "Version of the catalog that last emptied the bucket; 0 if none did."),
)
_MAX_DEBT: Final = Column(
    "max_debt", "float64", "How far a token bucket may fall below 0; null if without bound.", True, 2
)

VERDICT: Final = (
    *_QUOTA,
    Column("usage", "float64", "In units of the limit; for producer ids their number."),
    Column("outcome", "string", "admit, delay, throttle or reject."),
    Column("throttle_ms", "int64", "How long this quota alone makes the caller wait."),
    Column(
        "observed",
        "float64",
        "What the bucket observed, after the ask's effect; null if the store was not asked.",
        True,
    ),
    Column("remaining", "float64", "What the bucket has left, after the ask's effect.", True),
    Column("reason", "string", "capacity, too_large, store_failure or store_full.", True),
    Column("correction", "int8", "1: the clock was behind the bucket; 2: the bucket was moved back to it."),
    Column("charged_ids", ListOf("int64"), "Digests; null unless the quota counts ids.", True),
    Column("refreshed_ids", ListOf("int64"), "Digests; null unless the quota counts ids.", True),
    _MAX_DEBT,
    Column(
        "bucket_order",
        "int64",
        "The verdict's own place in the order, where the buckets of an ask are in several slots of a cluster;"
        " null where all have the ask's.",
        True,
        3,
    ),
    Column(
        "known_until_ms",
        "int64",
        "When the first layer dies that holds the ids which the node knew: until then it may answer for them,"
        " and write them again; null unless it did.",
        True,
        4,
    ),
    Column(
        "known_resets",
        "int64",
        "The number of the last reset of any bucket of which the node then knew.",
        True,
        4,
    ),
)

QUOTA: Final = tuple(column.name for column in (*_QUOTA, _MAX_DEBT))
"""The columns of a verdict that describe its quota."""

_SAME: Final = (
    "limit",
    "algorithm",
    "enforcement",
    "shadow",
    "scope",
    "samples",
    "sample_ms",
    "burst",
    "window_ms",
    "epoch",
)
"""The columns among these that are attributes of a ``Quota``, with the same names."""

LIMITED_BY: Final = (
    Column("quota", "string", "The quota's key."),
    Column("entity", "string", "The entity that the quota is set for.", True),
    Column("bucket", "string", "The entity that the bucket belongs to.", True),
    Column("reason", "string", "As in the quota's verdict.", True),
)

CHANGE: Final = (
    Column(
        "what", "string", "The entity, the bucket or throttle_factor; why rows were dropped; or the lease."
    ),
    Column("before", "string", "JSON.", True),
    Column("after", "string", "JSON.", True),
    Column("who", "string", "The name of the API key that made the change.", True),
    Column("version", "int64", "The catalog's version after the change.", True),
)

SIBLING: Final = (
    Column("node", "string", "Another node in the heartbeat."),
    Column("number", "int64", "The number of its newest batch in the stream."),
    Column("at_ms", "int64", "When it left that batch."),
)

COLUMNS: Final = (
    Column(
        "kind",
        "string",
        "decision; late: what the store decided of an ask that was already answered without it; ids: only"
        " the ids charged or refreshed by a decision that is not logged itself; renewal: ids that a node knew"
        " and wrote to the store again; lease: a lease was asked for, and its usage was granted unless the"
        " decision is a refusal; settlement: its usage was spent of a lease, and the rest was given back, or"
        " reject if the lease was over; both without a decision: what one slot of a cluster held for a lease"
        " and freed at once; lapse: leases of a bucket ended that nobody had settled, and count as"
        " spent; undone: a charge in one slot of a cluster that was taken back, since"
        " another slot refused the ask; undo: what of it was given back, at_ms being the time of that charge;"
        " reset: a bucket was emptied;"
        " load: a backfill was put into a bucket; quota: an entity's quotas changed; factor: this node began"
        " to apply a throttle factor; dropped: this node dropped rows.",
    ),
    Column("batch", "string", "Id of the batch; rows with the same batch and place are one row."),
    Column("place", "int32", "The row's place in its batch, from 0."),
    Column("node", "string", "The node that decided."),
    Column(
        "at_ms",
        "int64",
        "The store's time, or the caller's where that counts, or the node's without the store.",
    ),
    Column(
        "order",
        "int64",
        "The ask's place among all that the store decided, by which audits sort; null if the store was not"
        " asked. It grows by at least 128 from call to call, and by 1 within one.",
        True,
    ),
    Column("principal", "string", "Of the ask.", True),
    Column("client_id", "string", "Of the ask.", True),
    Column("ip", "string", "Of the ask.", True),
    Column("broker", "string", "Of the ask.", True),
    Column("listener", "string", "Of the ask.", True),
    Column("mode", "string", "admit, peek, record or refund.", True),
    Column("deny", "bool", "The ask had every quota decided as deny."),
    Column("recheck", "bool", "The ask is the second one for a held connection."),
    Column("cluster_action", "bool", "The ask is exempt from request quotas."),
    Column("usage", MapOf("string", "float64"), "What the ask uses, by name."),
    Column("ids", ListOf("int64"), "Digests as signed integers (big-endian); null without ids.", True),
    Column(
        "plain_ids", ListOf("string"), "The ids as they were asked for; null unless the log keeps them.", True
    ),
    Column("decision", "string", "admit, delay, throttle or reject.", True),
    Column("throttle_ms", "int64", "How long the caller has to wait."),
    Column("charged", "bool", "The ask was charged."),
    Column("applied", "int32", "How many quotas applied."),
    Column(
        "source",
        "string",
        "Who decided: store; local, which needed no store; fallback, while the store was away.",
        True,
    ),
    Column("replayed", "bool", "The answer was a kept one, and charged nothing."),
    Column("failure", "string", "Why the node answered without the store, in one word.", True),
    Column("limited_by", LIMITED_BY, "The quota that decided; null on admit.", True),
    Column("verdicts", ListOf(VERDICT), "The verdict of each quota that applied.", True),
    Column("change", CHANGE, "What changed; null in rows of decisions.", True),
    Column("batch_rows", "int32", "How many rows the batch has, so that a missing row is noticed.", True, 2),
    Column("siblings", ListOf(SIBLING), "The other nodes as this one knew them; in place 0 alone.", True, 2),
)


def by_name() -> dict[str, Column]:
    """Every column by its name, and every field of a struct as ``COLUMN.NAME``."""
    named = {column.name: column for column in COLUMNS}
    for column in COLUMNS:
        type_ = column.type.item if isinstance(column.type, ListOf) else column.type
        if isinstance(type_, tuple) and not isinstance(type_, MapOf):
            named |= {f"{column.name}.{field.name}": field for field in type_}
    return named


def quota_fields(quota: Quota, entity: str, bucket: str) -> dict[str, Any]:
    """The values of the columns ``QUOTA`` for a quota as it applies to a bucket."""
    return {
        "quota": quota.key,
        "entity": entity,
        "bucket": bucket,
        "interval_ms": quota.layers.interval_ms,
        "ttl_ms": quota.layers.ttl_ms,
        **{name: getattr(quota, name) for name in _SAME},
        "max_debt": quota.max_debt if math.isfinite(quota.max_debt) else None,
    }


def as_quota(fields: Mapping[str, Any]) -> Quota:
    """The quota that the columns ``QUOTA`` describe: the inverse of ``quota_fields``."""
    debt = fields["max_debt"]
    return Quota(
        fields["quota"],
        layers=Layers(fields["interval_ms"], fields["ttl_ms"]),
        max_debt=math.inf if debt is None else debt,
        **{name: fields[name] for name in _SAME},
    )
