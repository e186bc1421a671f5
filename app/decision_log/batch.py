"""Batches: the decision log on its way from a node to the writer, as msgpack arrays without field names.

A batch holds each quota of its rows once. The writer turns batches into files with the columns of
``columns.py``; a field here with the name of a column is that column.

An ask is logged with the store's answer in its original bytes (``AskRow``). The writer makes verdicts of it
(``workers.decision_log.asked``).
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from app.store.keys import PREFIX

STREAM_NAME: Final = "log"
NODES_NAME: Final = "log:nodes"
"""The names of the stream and of the heartbeat for ``app.store.client.shared_key_of``."""

STREAM: Final = f"{PREFIX}:{STREAM_NAME}"
"""The stream of batches: each entry has ``batch``, msgpack of a ``Batch``, and ``rows``, their number."""

NODES: Final = f"{PREFIX}:{NODES_NAME}"
"""The heartbeat of the nodes, a hash: by a node's name, the number and the time of its newest batch in the
stream, ``NUMBER:AT_MS``. A node that has sent no batch for ten minutes is removed."""

VERSION: Final = 4
"""The version of the layout that nodes send; a writer leaves newer batches to a newer writer.

Answers are in the bytes of the script, so a new layout of answers is a new version too.
"""

OLDEST: Final = 1
"""Batches of this version and later are read. Senders of rows with verdicts use this version: ``Batch``."""

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
    """One decision, or one change that decisions depend on.

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


Index = Annotated[int, Meta(ge=0)]
"""An index."""


class AskRow(Struct, array_like=True, frozen=True, gc=False, tag=0):
    """An ask and its answer.

    Attributes:
        kind: its place in ``KINDS``.
        mode, decision, source: places in ``MODES``, ``OUTCOMES`` and ``SOURCES`` of ``app.domain``.
        ids: as in ``Row``.
        quotas: the places of the quotas that applied, among the batch's.
        buckets: the bucket that each of them charged.
        answer: the store's answer, unchanged; or verdicts by policy that the node packed in the same layout;
            empty if there are no verdicts. It has no results for the quotas that the node answered alone.
        alone: the number of these quotas, which are the first ones.
        outcomes: the outcomes of the ids, one byte each.
        orders: for each result its own place in the order, if the buckets are in several slots of a cluster.
        known: ``until_ms`` and ``resets`` of the node's ``Knowledge`` of the ids that it answered alone.
        lease: its name, and how long it lasts in milliseconds.
    """

    kind: Index
    at_ms: int
    order: int | None
    principal: str | None
    client_id: str | None
    ip: str | None
    broker: str | None
    listener: str | None
    mode: Index
    flags: int
    usage: dict[str, float]
    ids: bytes
    plain_ids: list[str] | None
    decision: Index
    throttle_ms: int
    applied: int
    source: Index
    limited_by: LoggedLimit | None
    failure: str | None
    quotas: list[Index]
    buckets: list[str]
    answer: bytes
    alone: Index
    outcomes: bytes
    orders: list[int | None]
    known: tuple[int, int] | None = None
    lease: tuple[bytes, int] | None = None


class FullRow(Row, array_like=True, frozen=True, gc=False, tag=1):
    """A row with its verdicts; a change has none."""


class SentBatch(Struct, array_like=True, frozen=True):
    """Rows of one node, as it sends them.

    Attributes:
        id: the node, and a number that grows by one, so that a missing batch is noticed. This id and a
            row's place identify the row.
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
    """Rows with their verdicts: a batch of version ``OLDEST``, or a later one after the writer converted it.

    Attributes:
        siblings: empty from nodes of older versions.
    """

    version: int
    id: str
    node: str
    sent_ms: int
    quotas: list[LoggedQuota]
    rows: list[Row]
    secret: str | None = None
    siblings: list[Sibling] = []
