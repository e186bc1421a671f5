"""Batches: the decision log on its way from a node to the writer, as msgpack arrays without field names.

A batch holds each quota that its rows name once. ``columns.py`` has the columns of the files that the writer
makes of batches; fields here that have a column's name are that column.

An ask is logged as what was asked, and the store's answer as it came, whatever that is (``AskRow``). The
writer makes verdicts of it (``workers.decision_log.asked``).
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from app.store.keys import PREFIX

STREAM_NAME: Final = "log"
NODES_NAME: Final = "log:nodes"
"""The names of both in ``app.store.client.shared_key_of``."""

STREAM: Final = f"{PREFIX}:{STREAM_NAME}"
"""The stream of batches: each entry has ``batch``, msgpack of a ``Batch``, and ``rows``, how many."""

NODES: Final = f"{PREFIX}:{NODES_NAME}"
"""The heartbeat of the nodes, a hash: by a node's name the number of its newest batch in the stream and when
that came, ``NUMBER:AT_MS``. A node that has sent none for ten minutes is removed."""

VERSION: Final = 4
"""The version of the layout that nodes send; a writer leaves a newer one for a newer writer.

Answers are in the bytes of the script, so another layout of these is another version too.
"""

OLDEST: Final = 1
"""Batches of this version and later are read, and who makes rows with verdicts sends this one: ``Batch``."""

SEEN: Final = 0
CHARGED: Final = 1
REFRESHED: Final = 2
"""The outcome of an id: not written; charged and remembered; or written again, into the open layer."""


class LoggedQuota(Struct, array_like=True, frozen=True):
    """A quota as it applied; its limit is the one in force, after the throttle factor.

    Attributes:
        bucket: empty if each row names its own.
        applied_as: the enforcement that applied to the asks of the rows; since version 4.
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
    applied_as: str | None = None


class LoggedVerdict(Struct, array_like=True, frozen=True, gc=False):
    """The verdict of one quota.

    Attributes:
        quota: its index among the batch's quotas.
        enforcement: as it applied to this ask.
        ids: for producer ids, one byte for each of the row's ids: SEEN, CHARGED or REFRESHED.
        bucket_order: its own place in the order, if the buckets of the row are in several slots of a cluster.
        known_until_ms, known_resets: of a node that knew the ids of the row; see
            ``app.admission.plan.Knowledge``.
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
    known_until_ms: int | None = None
    known_resets: int | None = None


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


KINDS: Final = ("decision", "late", "lease", "settlement")
DENY, RECHECK, CLUSTER_ACTION, CHARGED_ASK, REPLAYED = 1, 2, 4, 8, 16
"""The bits of ``AskRow.flags``."""


Place = Annotated[int, Meta(ge=0)]
"""An index."""


class AskRow(Struct, array_like=True, frozen=True, gc=False, tag=0):
    """An ask and its answer.

    Attributes:
        kind: its place in ``KINDS``.
        mode, decision, source: places in ``MODES``, ``OUTCOMES`` and ``SOURCES`` of ``app.domain``.
        ids: as in ``Row``.
        quotas: the places of the quotas that applied, among the batch's.
        buckets: what each of them charged.
        answer: the store's as it came; else one in the same bytes that the node made of verdicts by policy;
            empty if there are no verdicts. It has no result for the quotas that the node answered for alone.
        alone: how many these are, the first ones.
        outcomes: what became of the ids, a byte each.
        orders: for each result its own place in the order, if the buckets are in several slots of a cluster.
        known: by what the node was certain of ids that it answered for alone: ``until_ms`` and ``resets`` of
            its ``Knowledge``.
        lease: its name, and how long it lasts in milliseconds.
    """

    kind: Place
    at_ms: int
    order: int | None
    principal: str | None
    client_id: str | None
    ip: str | None
    broker: str | None
    listener: str | None
    mode: Place
    flags: int
    usage: dict[str, float]
    ids: bytes
    plain_ids: list[str] | None
    decision: Place
    throttle_ms: int
    applied: int
    source: Place
    limited_by: LoggedLimit | None
    failure: str | None
    quotas: list[Place]
    buckets: list[str]
    answer: bytes
    alone: Place
    outcomes: bytes
    orders: list[int | None]
    known: tuple[int, int] | None = None
    lease: tuple[bytes, int] | None = None


class FullRow(Row, array_like=True, frozen=True, gc=False, tag=1):
    """A row with its verdicts; a change has none."""


class SentBatch(Struct, array_like=True, frozen=True):
    """Rows of one node, as it sends them.

    Attributes:
        id: the node, and a number that grows by one, so that a missing batch is noticed. A row is identified
            by it and the row's place.
        secret: the fingerprint of the secret that made the digests.
        siblings: the other nodes in the heartbeat, so that a node whose batches are all missing is noticed.
    """

    version: int
    id: str
    node: str
    sent_ms: int
    quotas: list[LoggedQuota]
    rows: list[AskRow | FullRow]
    secret: str | None = None
    siblings: list[Sibling] = []


class Batch(Struct, array_like=True, frozen=True):
    """Rows with their verdicts: of version ``OLDEST``, or what the writer makes of a later one.

    Attributes:
        siblings: nodes of older versions send none.
    """

    version: int
    id: str
    node: str
    sent_ms: int
    quotas: list[LoggedQuota]
    rows: list[Row]
    secret: str | None = None
    siblings: list[Sibling] = []
