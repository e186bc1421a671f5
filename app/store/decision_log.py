"""The decision log on its way through the store: the batches that nodes leave and the writer takes.

A batch is compact: arrays without names, and each quota that its rows speak of stands in it once. Its columns
at rest are in ``workers/decision_log/schema.py``.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from app.store.keys import PREFIX

STREAM: Final = f"{PREFIX}:log"
"""The stream of batches: each entry has ``batch``, msgpack of a ``Batch``, and ``rows``, how many."""

NODES: Final = f"{PREFIX}:log:nodes"
"""The log's heartbeat, a hash: by the name of each node the number of its newest batch in the stream, and
when that came, ``NUMBER:AT_MS``. A node that has left none for ten minutes is taken out."""

VERSION: Final = 1
"""Of the layout of a batch; a writer that meets a newer one leaves it for a newer writer."""

SEEN: Final = 0
CHARGED: Final = 1
REFRESHED: Final = 2
"""What became of an id: neither written, or remembered anew and charged, or written to the open layer."""


class QuotaThen(Struct, array_like=True, frozen=True):
    """A quota as it applied; its limit is the one in force, after a throttle factor.

    Attributes:
        max_debt: of a token bucket, how far its tokens may fall below 0; None if that has no end.
    """

    quota: str
    entity: str
    bucket: str
    limit: float
    algorithm: str
    enforcement: str
    shadow: bool
    scope: str
    samples: int
    sample_ms: int
    burst: float
    window_ms: int
    interval_ms: int
    ttl_ms: int
    epoch: int
    max_debt: float | None = None


class VerdictThen(Struct, array_like=True, frozen=True, gc=False):
    """What one quota said.

    Attributes:
        quota: its place among the batch's quotas.
        enforcement: by which this ask was decided.
        usage: in units of the limit; of producer ids their number.
        ids: of producer ids one byte for each of the row's ids: SEEN, CHARGED or REFRESHED.
    """

    quota: int
    enforcement: str
    usage: float
    outcome: str
    throttle_ms: int
    observed: float | None
    remaining: float | None
    reason: str | None
    correction: int
    ids: bytes


class Row(Struct, array_like=True, frozen=True, gc=False):
    """One decision, or one change of what decisions are made by.

    Attributes:
        kind: ``decision``; ``late``, what the store decided of an ask that had been answered without it by
            then; ``ids``, which carries only ids charged or refreshed by a decision that is not logged
            itself; ``reset``, a bucket emptied; ``load``, a bucket into which a backfill was put; ``quota``,
            an entity's quotas changed; ``factor``, a throttle factor that this node began to apply;
            ``dropped``, how many rows this node had to drop.
        at_ms: the store's time (or the caller's, where that decides); the node's, if the store was not asked.
        order: where the ask stands among all that the store decided, which is how audits sort; None if the
            store was not asked. It grows by at least 128 from call to call, and by 1 within one.
        ids: the ids that count, each as the 8 bytes of its digest, joined.
        plain_ids: the same as they were asked for; None unless the log keeps them so.
        replayed: the answer was a kept one, and charged nothing.
        failure: why it was answered without the store, in one word.
        what, before, after, who, version: of a change: the entity, bucket or ``throttle_factor``, or why rows
            were dropped; JSON.
    """

    kind: str
    at_ms: int
    order: int | None = None
    principal: str | None = None
    client_id: str | None = None
    ip: str | None = None
    broker: str | None = None
    listener: str | None = None
    mode: str | None = None
    deny: bool = False
    recheck: bool = False
    cluster_action: bool = False
    usage: dict[str, float] = {}
    ids: bytes = b""
    plain_ids: list[str] | None = None
    decision: str | None = None
    throttle_ms: int = 0
    charged: bool = False
    applied: int = 0
    source: str | None = None
    replayed: bool = False
    failure: str | None = None
    limited_by: tuple[str, str | None, str | None, str | None] | None = None
    verdicts: list[VerdictThen] = []
    what: str | None = None
    before: str | None = None
    after: str | None = None
    who: str | None = None
    version: int | None = None


def batch_id(node: str, number: int) -> str:
    """The id of a node's batch; numbers begin at 1 and have no gaps, so that a missing one is seen."""
    return f"{node}-{number:012d}"


Sibling = tuple[str, int, int]
"""Another node in the log's heartbeat: its name, the number of its newest batch, and when it left that."""


class Batch(Struct, array_like=True, frozen=True):
    """Rows of one node; ``id`` is unique, so that a row is known by it and its place.

    Attributes:
        id: the node, and a number that grows by one, so that a batch which is missing shows.
        secret: the fingerprint of the secret that made the digests.
        siblings: the other nodes that stand in the log's heartbeat, so that one which is missing as a whole
            shows. An older node says none.
    """

    version: int
    id: str
    node: str
    sent_ms: int
    quotas: list[QuotaThen]
    rows: list[Row]
    secret: str | None = None
    siblings: list[Sibling] = []
