"""Assertions: the content that buckets should have at a moment, computed by a job and loaded into a store."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from app.domain.quota import Quota

Kind = Literal["charge", "id", "sample", "tokens"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

VERSION: Final = 1
"""The version of the columns; a loader refuses a newer one."""

MANIFEST: Final = "_assertions.json"
"""The file that is written last into a folder of assertions: version, time, number of rows, file names."""


class Assertion(NamedTuple):
    """One thing that a bucket should hold. The fields are the columns of the Parquet files, in this order.

    Rows are sorted by bucket, quota, identity, kind and time, so that layers begin in the original order.

    Attributes:
        quota: the quota key of the bucket.
        bucket: its name, as decisions spell it.
        identity: the fields whose change resets the bucket, from ``identity_of``; None matches any.
        kind: the event at ``at_ms``. ``charge``: ids were charged. ``id``: an id was written.
            ``sample``: a sample of a rate began. ``tokens``: a token bucket held some tokens.
        digest: the digest of an id, as a signed big-endian integer.
        layer_ms: the beginning of the layer that an id was written to.
        value: the number of charges or tokens, or the sum of a sample.
        last_ms: the time of the last event in a sample.
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
"""The columns that an assertion of each kind needs in addition to its time."""


def identity_of(quota: Quota) -> str:
    """The fields whose change resets the bucket, and the epoch of the last such change.

    >>> identity_of(Quota("request_rate", 5, "sampled_rate", "delay", epoch=7))
    'sampled_rate.11.1000.cluster.7'
    """
    return ".".join(str(part) for part in (*quota.identity, quota.epoch))
