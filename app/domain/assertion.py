"""Assertions: what buckets should hold at a moment, said by a job and loaded into a store; their columns."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from app.domain.quota import Quota

Kind = Literal["charge", "id", "sample", "tokens"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

VERSION: Final = 1
"""Of the columns; a loader refuses a newer one."""

MANIFEST: Final = "_assertions.json"
"""Written last into a folder of assertions: version, as of when, how many, and the files they lie in."""


class Assertion(NamedTuple):
    """One thing that a bucket should hold; the fields are the columns of the Parquet files, in this order.

    Rows are sorted by bucket, quota, identity, kind and time, so that layers begin as they did.

    Attributes:
        quota: the key of the quota whose bucket it is.
        bucket: as decisions spell it.
        identity: what a change of empties the bucket, as ``identity_of`` has it; None for any.
        kind: ``charge``: so many ids were charged at a time. ``id``: an id was written at a time.
            ``sample``: a sample of a rate began at a time. ``tokens``: a token bucket held so many at a time.
        at_ms: that time.
        digest: of an id, as a signed integer, big-endian.
        layer_ms: when the layer began that an id was written to.
        value: how many charges or tokens, or the sum of a sample.
        last_ms: the last event of a sample.
    """

    quota: str
    bucket: str
    identity: str | None
    kind: Kind
    at_ms: int
    digest: int | None = None
    layer_ms: int | None = None
    value: float | None = None
    last_ms: int | None = None


COLUMNS: Final[dict[str, tuple[str, bool]]] = {
    "quota": ("string", False),
    "bucket": ("string", False),
    "identity": ("string", True),
    "kind": ("string", False),
    "at_ms": ("bigint", False),
    "digest": ("bigint", True),
    "layer_ms": ("bigint", True),
    "value": ("double", True),
    "last_ms": ("bigint", True),
}
"""Each column's type, as SQL calls it, and whether it may be null."""

NEEDED: Final[dict[Kind, tuple[str, ...]]] = {
    "charge": ("value",),
    "id": ("digest", "layer_ms"),
    "sample": ("value", "last_ms"),
    "tokens": ("value",),
}
"""What an assertion of a kind says beside its time."""


def identity_of(quota: Quota) -> str:
    """What a change of starts an empty bucket, and the epoch of the last such change.

    >>> identity_of(Quota("request_rate", 5, "sampled_rate", "delay", epoch=7))
    'sampled_rate.11.1000.cluster.7'
    """
    return ".".join(str(part) for part in (*quota.identity, quota.epoch))
