"""Decisions and changes as rows of a batch of the decision log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from sys import getsizeof
from typing import Final, Literal, NamedTuple

from msgspec import Raw, msgpack

from app.admission.plan import Match
from app.decision_log.batch import (
    OLDEST,
    SEEN,
    VERSION,
    LoggedLimit,
    LoggedQuota,
    LoggedVerdict,
    Row,
    Sibling,
    batch_id,
)
from app.decision_log.columns import quota_fields
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.digest import digest, fingerprint
from app.domain.quota import Quota
from app.domain.usage import enforcement_of, ids_of, usage_of
from app.store.port import Answer

ROW_BYTES: Final = 1_000
MATCH_BYTES: Final = 700
ID_BYTES: Final = 100
"""Bytes in memory of a waiting decision, each quota of it and each id, without names; see ``tests/bench``."""


_encode: Final = msgpack.Encoder().encode


class DecisionEntry(NamedTuple):
    """A decision and what it was made from; ``failure`` is why it was made without the store.

    Attributes:
        kind: ``late`` if the ask had already been answered without the store; ``lease`` if a lease was asked
            for, ``settlement`` if one was settled.
        lease: the name of the lease, and how long it lasts in milliseconds.
    """

    kind: Literal["decision", "late", "lease", "settlement"]
    at_ms: int
    ask: Ask
    matches: Sequence[Match]
    answer: Answer | None
    decision: Decision
    verdicts: Sequence[Verdict]
    failure: str | None
    lease: tuple[bytes, int] | None = None


class IdsEntry(NamedTuple):
    """The outcomes of the ids of an ask that is not logged itself, or of ids that the node wrote again."""

    kind: Literal["ids", "renewal"]
    at_ms: int
    ask: Ask
    matches: Sequence[Match]
    answer: Answer


class ChangeEntry(NamedTuple):
    """A change of what decisions depend on, or rows dropped; ``before`` and ``after`` are JSON values."""

    kind: Literal["quota", "factor", "reset", "lapse", "dropped"]
    at_ms: int
    what: str
    before: object
    after: object
    who: str | None = None
    version: int | None = None
    order: int | None = None


class UndoneEntry(NamedTuple):
    """A charge that was taken back, or what was given back of it, which has the time of the charge.

    Also what was held for a lease in one slot and freed at once, and that it was freed.
    """

    kind: Literal["undone", "undo", "lease", "settlement"]
    at_ms: int
    ask: Ask
    matches: Sequence[Match]
    order: int
    units: float
    lease: tuple[bytes, int] | None = None


LogEntry = DecisionEntry | IdsEntry | ChangeEntry | UndoneEntry


def size_of(entry: LogEntry) -> int:
    """About how many bytes of memory an entry takes while it waits, with the names that its quotas hold."""
    if isinstance(entry, ChangeEntry):
        return ROW_BYTES
    ask = entry.ask
    names = sum(map(getsizeof, filter(None, (ask.principal, ask.client_id, ask.broker, ask.listener))))
    matches = (MATCH_BYTES + 3 * names) * len(entry.matches)
    ids = ask.producer_ids or ()
    texts = sum(getsizeof(one) for one in ids if isinstance(one, str))
    return ROW_BYTES + names + matches + ID_BYTES * len(ids) + texts


def plain_texts(ids: Sequence[int | str]) -> list[str] | None:
    """Return ids as they were asked for; None without ids."""
    return [str(one) for one in ids] if ids else None


class Packing:
    """Rows as a batch, which holds each quota once.

    Attributes:
        rows: how many there are, without admissions.
        size: the bytes of the rows and their quotas.
    """

    def __init__(self, secret: bytes, *, plain_ids: bool) -> None:
        self.rows = 0
        self.size = 0
        self._secret = secret
        self._plain_ids = plain_ids
        self._packed: list[Raw] = []
        self._quotas: list[Raw] = []
        self._places: dict[tuple[Quota, str, str], int] = {}

    def add(self, entry: LogEntry) -> None:
        """Add an entry as a row."""
        self._packed.append(self._raw(self._row(entry)))
        self.rows += 1

    def batch(
        self,
        node: str,
        number: int,
        sent_ms: int,
        siblings: Sequence[Sibling] = (),
        admissions: tuple[object, ...] | None = None,
    ) -> bytes:
        """The batch; its fields are those of ``app.decision_log.batch.Batch``, and so are its admissions'."""
        name, made_by = batch_id(node, number), fingerprint(self._secret)
        fields = (name, node, sent_ms, self._quotas, self._packed, made_by, siblings)
        if admissions is None:
            return _encode((OLDEST, *fields))
        return _encode((VERSION, *fields, admissions))

    def _raw(self, item: Row | LoggedQuota) -> Raw:
        packed = _encode(item)
        self.size += len(packed)
        return Raw(packed)

    def _row(self, entry: LogEntry) -> Row:
        if isinstance(entry, ChangeEntry):
            return _change(entry)
        if isinstance(entry, IdsEntry):
            return self._ids_alone(entry)
        if isinstance(entry, UndoneEntry):
            return self._undone(entry)
        ask, decision, answer = entry.ask, entry.decision, entry.answer
        replayed = answer is not None and answer.kept is not None
        by = decision.limited_by
        ids = ids_of(ask)
        return Row(
            kind=entry.kind,
            at_ms=entry.at_ms,
            order=_order_of(entry),
            principal=ask.principal,
            client_id=ask.client_id,
            ip=ask.ip,
            broker=ask.broker,
            listener=ask.listener,
            mode=ask.mode,
            deny=ask.deny,
            recheck=ask.recheck,
            cluster_action=ask.cluster_action,
            usage=dict(ask.usage),
            ids=self._digests(ask, ids),
            plain_ids=plain_texts(ids) if self._plain_ids else None,
            decision=decision.decision,
            throttle_ms=decision.throttle_ms,
            charged=decision.charged,
            applied=decision.applied,
            source=decision.source,
            replayed=replayed,
            failure=entry.failure,
            limited_by=LoggedLimit(by.quota, by.entity, by.bucket, by.reason) if by else None,
            verdicts=[] if replayed else self._verdicts(entry),
            what=None if entry.lease is None else entry.lease[0].hex(),
            after=None if entry.lease is None else json.dumps({"lease_ms": entry.lease[1]}),
        )

    def _ids_alone(self, entry: IdsEntry) -> Row:
        ask, answer = entry.ask, entry.answer
        outcomes = answer.id_outcomes
        ids = [each for each, outcome in zip(ids_of(ask), outcomes, strict=True) if outcome != SEEN]
        verdicts = [
            LoggedVerdict(
                quota=self._place(match),
                enforcement="deny",
                usage=len(ids),
                outcome="admit",
                throttle_ms=0,
                observed=None,
                remaining=None,
                reason=None,
                correction=0,
                ids=bytes(outcome for outcome in outcomes if outcome != SEEN),
            )
            for match in entry.matches
            if match.applied.quota.algorithm == "producer_ids"
        ]
        return Row(
            kind=entry.kind,
            at_ms=entry.at_ms,
            order=answer.order,
            principal=ask.principal,
            mode=ask.mode,
            ids=self._digests(ask, ids),
            plain_ids=plain_texts(ids) if self._plain_ids else None,
            source="store",
            verdicts=verdicts,
        )

    def _undone(self, entry: UndoneEntry) -> Row:
        (match,) = entry.matches
        verdict = LoggedVerdict(
            quota=self._place(match),
            enforcement=enforcement_of(entry.ask, match.applied.quota),
            usage=entry.units,
            outcome="admit",
            throttle_ms=0,
            observed=None,
            remaining=None,
            reason=None,
            correction=0,
            ids=b"",
            bucket_order=entry.order,
        )
        return Row(
            kind=entry.kind,
            at_ms=entry.at_ms,
            order=entry.order,
            principal=entry.ask.principal,
            mode=entry.ask.mode,
            source="store",
            verdicts=[verdict],
            what=None if entry.lease is None else entry.lease[0].hex(),
            after=None if entry.lease is None else json.dumps({"lease_ms": entry.lease[1]}),
        )

    def _verdicts(self, entry: DecisionEntry) -> list[LoggedVerdict]:
        ask, answer = entry.ask, entry.answer
        results = answer.results if answer is not None else ()
        corrections = [] if answer is None else _corrections(answer)
        alone = len(entry.matches) - len(results)  # the first verdicts, which this node gave alone; or all
        id_outcomes = answer.id_outcomes if answer is not None else b""
        orders = _bucket_orders(entry)
        return [
            LoggedVerdict(
                quota=self._place(match),
                enforcement=verdict.enforcement,
                usage=usage_of(ask, match.applied.quota),
                outcome=verdict.outcome,
                throttle_ms=verdict.throttle_ms,
                observed=verdict.observed,
                remaining=verdict.remaining,
                reason=verdict.reason,
                correction=corrections[at - alone] if at >= alone else 0,
                ids=id_outcomes if match.applied.quota.algorithm == "producer_ids" else b"",
                bucket_order=orders[at - alone] if orders else None,
            )
            for at, (match, verdict) in enumerate(zip(entry.matches, entry.verdicts, strict=True))
        ]

    def _place(self, match: Match) -> int:
        """The index of a quota among the batch's; a new one is added."""
        applied = match.applied
        place = self._places.setdefault((applied.quota, applied.entity, applied.bucket), len(self._quotas))
        if place == len(self._quotas):
            fields = quota_fields(applied.quota, applied.entity, applied.bucket)
            self._quotas.append(self._raw(LoggedQuota(**fields)))
        return place

    def _digests(self, ask: Ask, ids: Sequence[int | str]) -> bytes:
        return b"".join(digest(self._secret, ask.principal or "", one) for one in ids)


def _corrections(answer: Answer) -> list[int]:
    """What was corrected in each bucket, by any try."""
    tries = answer.tries if answer.kept is None else (answer,)
    return [
        max(result.correction for result in its)
        for its in zip(*(each.results for each in tries), strict=True)
    ]


def _bucket_orders(entry: DecisionEntry) -> Sequence[int | None]:
    """The own places of the store's verdicts; a charge that was taken back has its place in another row."""
    answer = entry.answer
    if answer is None or not (answer.undone or answer.released):
        return answer.orders if answer is not None else ()
    elsewhere = {(each.key, each.order) for each in answer.undone}
    elsewhere |= {(each.key, each.order) for each in answer.released}
    matches = entry.matches[len(entry.matches) - len(answer.orders) :]
    return [
        None if (match.key, order) in elsewhere else order
        for match, order in zip(matches, answer.orders, strict=True)
    ]


def _order_of(entry: DecisionEntry) -> int | None:
    answer = entry.answer
    if answer is None or not (answer.undone or answer.released):
        return answer.order if answer is not None else None
    return max((order for order in _bucket_orders(entry) if order is not None), default=None)


def _change(entry: ChangeEntry) -> Row:
    before, after = (None if value is None else json.dumps(value) for value in (entry.before, entry.after))
    return Row(
        kind=entry.kind,
        at_ms=entry.at_ms,
        order=entry.order,
        what=entry.what,
        before=before,
        after=after,
        who=entry.who,
        version=entry.version,
    )
