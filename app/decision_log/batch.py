"""Batches: the decision log on its way from a node to the writer, as msgpack arrays without field names.

A batch holds each quota that its rows name once. ``columns.py`` has the columns of the files that the writer
makes of batches; fields here that have a column's name are that column.

Plain admissions (``app.admission.plain``) are not rows yet: a node appends the store's answer as it came, and
a batch holds what equal asks have in common once. The writer makes the rows
(``workers.decision_log.admissions``).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from msgspec import MsgspecError, Raw, Struct, msgpack

from app.store.keys import PREFIX

STREAM_NAME: Final = "log"
NODES_NAME: Final = "log:nodes"
"""The names of both in ``app.store.client.shared_key_of``."""

STREAM: Final = f"{PREFIX}:{STREAM_NAME}"
"""The stream of batches: each entry has ``batch``, msgpack of a ``Batch``, and ``rows``, how many."""

NODES: Final = f"{PREFIX}:{NODES_NAME}"
"""The heartbeat of the nodes, a hash: by a node's name the number of its newest batch in the stream and when
that came, ``NUMBER:AT_MS``. A node that has sent none for ten minutes is removed."""

VERSION: Final = 3
"""The newest version of the layout of a batch; a writer leaves a newer one for a newer writer.

The answers of admissions are in the bytes of the script, so another layout of these is another version too.
Since version 3 some are brief; the first byte of each says so.
"""

OLDEST: Final = 1
"""Batches of this version and later are read. It has no admissions; a batch without them still has it."""

ADMISSION: Final = struct.Struct("<HqqH")
"""How an admission begins: the place of its ask, ``at_ms`` of its answer, its place in the store's order
(or ``NOT_ASKED``), and how many ids have an outcome. The answer follows, then a byte for each outcome."""

NOT_ASKED: Final = -1

ASK: Final = struct.Struct("<HI")
"""How an ask begins among those of the admissions: the place of its quotas, and its length without this."""

NEXT_ROW: Final = b"\xff\xff"
"""Among the admissions, in place of an ask: the next of a batch's ``rows``."""

SEEN: Final = 0
CHARGED: Final = 1
REFRESHED: Final = 2
"""The outcome of an id: not written; charged and remembered; or written again, into the open layer."""


class LoggedQuota(Struct, array_like=True, frozen=True):
    """A quota as it applied; its limit is the one in force, after the throttle factor."""

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


class LoggedVerdict(Struct, array_like=True, frozen=True, gc=False):
    """The verdict of one quota.

    Attributes:
        quota: its index among the batch's quotas.
        enforcement: as it applied to this ask.
        ids: for producer ids, one byte for each of the row's ids: SEEN, CHARGED or REFRESHED.
        bucket_order: its own place in the order, if the buckets of the row are in several slots of a cluster.
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
    bucket_order: int | None = None


class LoggedLimit(Struct, array_like=True, frozen=True, gc=False):
    """The quota that limited an ask, and why."""

    quota: str
    entity: str | None
    bucket: str | None
    reason: str | None


class Row(Struct, array_like=True, frozen=True, gc=False):
    """One decision, or one change of what decisions depend on.

    Attributes:
        ids: the distinct ids, each as the 8 bytes of its digest, joined.
        what, before, after, who, version: the fields of the column ``change``.
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
    limited_by: LoggedLimit | None = None
    verdicts: list[LoggedVerdict] = []
    what: str | None = None
    before: str | None = None
    after: str | None = None
    who: str | None = None
    version: int | None = None


def batch_id(node: str, number: int) -> str:
    """The id of a node's batch; numbers begin at 1 and have no gaps, so that a missing batch is noticed."""
    return f"{node}-{number:012d}"


class Sibling(NamedTuple):
    """Another node in the heartbeat: its name, the number of its newest batch, and when it sent that."""

    node: str
    number: int
    at_ms: int


class AdmittedQuotas(Struct, array_like=True, frozen=True):
    """What the admissions by the same quotas have in common.

    Attributes:
        quotas: without entity and bucket, which are the ask's.
        enforcements: as they applied, one for each quota.
    """

    charged: bool
    applied: int
    source: str
    quotas: list[LoggedQuota]
    enforcements: list[str]


class AdmittedCharge(Struct, array_like=True, frozen=True):
    """What an ask spends of one quota."""

    entity: str
    bucket: str
    usage: float


class AdmittedAsk(Struct, array_like=True, frozen=True):
    """What the rows of equal plain asks have in common.

    Attributes:
        at_ms: the caller's clock; None if the store's counts, which is in the answer.
    """

    at_ms: int | None
    principal: str | None
    client_id: str | None
    ip: str | None
    broker: str | None
    listener: str | None
    deny: bool
    usage: dict[str, float]
    ids: bytes
    plain_ids: list[str] | None
    charges: list[AdmittedCharge]


class Admissions(Struct, array_like=True, frozen=True):
    """The plain admissions of a batch, each ask once.

    Attributes:
        more_as_rows: how many bytes the batch would have more if each row had its own ask, at most.
        rows: all rows of the batch in order, each an ``ADMISSION`` or ``NEXT_ROW``. Answers are in the bytes
            of the script, and empty if no quota applies.
        asks: one after the other, each an ``ASK`` and a packed ``AdmittedAsk``.
    """

    more_as_rows: int
    rows: bytes
    quotas: list[AdmittedQuotas]
    asks: bytes


class Batch(Struct, array_like=True, frozen=True):
    """Rows of one node.

    Attributes:
        id: the node, and a number that grows by one, so that a missing batch is noticed. A row is identified
            by it and the row's place.
        secret: the fingerprint of the secret that made the digests.
        siblings: the other nodes in the heartbeat, so that a node whose batches are all missing is noticed.
            Nodes of older versions send none.
        admissions: since version 2; None if all rows are ``rows``.
    """

    version: int
    id: str
    node: str
    sent_ms: int
    quotas: list[LoggedQuota]
    rows: list[Row]
    secret: str | None = None
    siblings: list[Sibling] = []
    admissions: Admissions | None = None


class _AdmissionsHead(Struct, array_like=True, frozen=True):
    more_as_rows: int


class _BatchHead(Struct, array_like=True, frozen=True):
    """A batch as far as its size is concerned; the rest is skipped."""

    version: Raw
    id: Raw
    node: Raw
    sent_ms: Raw
    quotas: Raw
    rows: Raw
    secret: Raw
    siblings: Raw
    admissions: _AdmissionsHead | None = None


_HEADS: Final = msgpack.Decoder(_BatchHead)


def size_as_rows(packed: bytes) -> int:
    """How many bytes a batch has if each of its rows has its own ask: the writer's memory follows these.

    >>> size_as_rows(b"whatever is not a batch")
    23
    """
    try:
        found = _HEADS.decode(packed).admissions
    except (MsgspecError, UnicodeDecodeError):
        found = None
    return len(packed) if found is None else len(packed) + max(found.more_as_rows, 0)
