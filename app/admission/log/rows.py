"""Rows of the decision log that wait to be sent: a page of them becomes a batch.

A row holds the ask and the store's answer as received (``app.decision_log.batch.AskRow``). It is packed when
it is recorded, behind the others of its page, so it takes little memory while it waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from msgspec import Raw, msgpack, structs

from app.admission.answers import by_policy_in, verdicts_of
from app.admission.plan import PlannedAsk
from app.decision_log.batch import (
    CHARGED_ASK,
    CLUSTER_ACTION,
    DENY,
    KINDS,
    RECHECK,
    REPLAYED,
    SEEN,
    VERSION,
    AskRow,
    FullRow,
    LoggedLimit,
    LoggedQuota,
    LoggedVerdict,
    Sibling,
    batch_id,
)
from app.decision_log.columns import quota_fields
from app.domain.ask import MODES, Ask
from app.domain.decision import OUTCOMES, SOURCES, Verdict
from app.domain.digest import digest, fingerprint
from app.domain.quota import Quota
from app.domain.usage import ids_of
from app.store.compiled_quota import CompiledQuota
from app.store.encoding import packed_results
from app.store.port import Answer, Charge, ChargeResult, IdsResult

QUOTA_BYTES: Final = 500
"""Bytes of memory that a quota takes in a page, in addition to its bucket's name and its packed bytes."""

_KIND: Final = {kind: place for place, kind in enumerate(KINDS)}
_MODE: Final = {mode: place for place, mode in enumerate(MODES)}
_OUTCOME: Final = {outcome: place for place, outcome in enumerate(OUTCOMES)}
_SOURCE: Final = {source: place for place, source in enumerate(SOURCES)}
_UNKNOWN: Final = float("nan")

_ENCODER: Final = msgpack.Encoder()


class DecisionEntry(NamedTuple):
    """A decision and its grounds; ``failure`` is the reason if it was made without the store.

    Attributes:
        kind: ``late`` if the ask had already been answered without the store; ``lease`` if a lease was asked
            for, ``settlement`` if one was settled.
        verdicts: those that made it; there may be none if every quota admits.
        lease: the name of the lease, and how long it lasts in milliseconds.
    """

    kind: Literal["decision", "late", "lease", "settlement"]
    at_ms: int
    planned: PlannedAsk
    answer: Answer | None
    verdicts: Sequence[Verdict]
    failure: str | None
    lease: tuple[bytes, int] | None = None


class IdsEntry(NamedTuple):
    """The outcomes of the ids of an ask that is not logged itself, or of ids that the node wrote again."""

    kind: Literal["ids", "renewal"]
    at_ms: int
    planned: PlannedAsk
    answer: Answer


class ChangeEntry(NamedTuple):
    """A change that affects decisions, a lapse, or dropped rows; ``before`` and ``after`` are JSON values."""

    kind: Literal["quota", "factor", "reset", "lapse", "dropped"]
    at_ms: int
    what: str
    before: object
    after: object
    who: str | None = None
    version: int | None = None
    order: int | None = None


class UndoneEntry(NamedTuple):
    """An undone charge, or its undo, which has the time of the charge.

    Also a hold for a lease in one slot that was freed at once, or its release.
    """

    kind: Literal["undone", "undo", "lease", "settlement"]
    at_ms: int
    ask: Ask
    charge: Charge
    order: int
    units: float
    lease: tuple[bytes, int] | None = None


LogEntry = DecisionEntry | IdsEntry | ChangeEntry | UndoneEntry


class LogPage:
    """Waiting rows in order, with their quotas, each stored once.

    Args:
        secret: hashes the ids.
        plain_ids: keep ids as they were asked for, in addition to their digests.
    """

    def __init__(self, secret: bytes, *, plain_ids: bool) -> None:
        self._secret = secret
        self._plain_ids = plain_ids
        self._count = 0
        self._rows, self._quotas = bytearray(), bytearray()
        """Packed, one after the other."""
        self._places: dict[tuple[int, str], int] = {}
        self._equals: dict[tuple[Quota, str, str, str], int] = {}
        self._kept_alive: list[CompiledQuota] = []
        """Keeps the quotas of these places alive, so that no other object gets the ``id`` of one."""
        self._keys_bytes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """How many bytes it has in a batch."""
        return len(self._rows) + len(self._quotas)

    @property
    def memory(self) -> int:
        """How many bytes of memory it takes, by estimate: a growing array has room for half as much again."""
        return self.size * 3 // 2 + self._keys_bytes

    def add(self, entry: LogEntry) -> None:
        """Add an entry as a row."""
        if isinstance(entry, DecisionEntry):
            row: AskRow | FullRow = self._asked(entry)
        elif isinstance(entry, ChangeEntry):
            row = _change(entry)
        elif isinstance(entry, IdsEntry):
            row = self._ids_alone(entry)
        else:
            row = self._undone(entry)
        _pack(row, self._rows)
        self._count += 1

    def batch(self, node: str, number: int, sent_ms: int, siblings: Sequence[Sibling] = ()) -> bytes:
        """The batch, with the fields of ``app.decision_log.batch.SentBatch``."""
        name, made_by = batch_id(node, number), fingerprint(self._secret)
        quotas, rows = _array(len(self._equals), self._quotas), _array(self._count, self._rows)
        return _ENCODER.encode((VERSION, name, node, sent_ms, quotas, rows, made_by, siblings))

    def _asked(self, entry: DecisionEntry) -> AskRow:
        planned, answer = entry.planned, entry.answer
        ask, decision, charges = planned.ask, planned.decision, planned.charges
        assert decision is not None
        ids = ids_of(ask)
        flags = CHARGED_ASK * decision.charged
        if ask.deny:
            flags |= DENY
        if ask.recheck:
            flags |= RECHECK
        if ask.cluster_action:
            flags |= CLUSTER_ACTION
        if answer is not None and answer.kept is not None:
            flags |= REPLAYED
            charges = ()
        by = decision.limited_by
        return AskRow(
            _KIND[entry.kind],
            entry.at_ms,
            _order_of(entry),
            ask.principal,
            ask.client_id,
            ask.ip,
            ask.broker,
            ask.listener,
            _MODE[ask.mode],
            flags,
            dict(ask.usage),
            self._digests(ask, ids) if ids else b"",
            id_texts(ids) if self._plain_ids else None,
            _OUTCOME[decision.decision],
            decision.throttle_ms,
            decision.applied,
            _SOURCE[decision.source],
            None if by is None else LoggedLimit(by.quota, by.entity, by.bucket, by.reason),
            entry.failure,
            [self._place(charge.compiled) for charge in charges],
            [charge.bucket for charge in charges],
            _answer(entry) if charges else b"",
            planned.alone if charges else 0,
            b"" if answer is None else answer.id_outcomes,
            [] if answer is None or not answer.orders else list(_bucket_orders(entry)),
            None if planned.known is None else planned.known[1:],
            entry.lease,
        )

    def _ids_alone(self, entry: IdsEntry) -> FullRow:
        planned, outcomes = entry.planned, entry.answer.id_outcomes
        ask, known = planned.ask, planned.known
        ids = [each for each, outcome in zip(ids_of(ask), outcomes, strict=True) if outcome != SEEN]
        verdicts = [
            LoggedVerdict(
                quota=self._place(charge.compiled, charge.bucket),
                enforcement="deny",
                usage=len(ids),
                outcome="admit",
                throttle_ms=0,
                observed=None,
                remaining=None,
                reason=None,
                correction=0,
                ids=bytes(outcome for outcome in outcomes if outcome != SEEN),
                known_until_ms=None if known is None else known.until_ms,
                known_resets=None if known is None else known.resets,
            )
            for charge in planned.charges
            if charge.compiled.counts_ids
        ]
        return FullRow(
            kind=entry.kind,
            at_ms=entry.at_ms,
            order=entry.answer.order,
            principal=ask.principal,
            mode=ask.mode,
            ids=self._digests(ask, ids),
            plain_ids=id_texts(ids) if self._plain_ids else None,
            source="store",
            verdicts=verdicts,
        )

    def _undone(self, entry: UndoneEntry) -> FullRow:
        verdict = LoggedVerdict(
            quota=self._place(entry.charge.compiled, entry.charge.bucket),
            enforcement=entry.charge.enforcement,
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
        return FullRow(
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

    def _place(self, compiled: CompiledQuota, bucket: str = "") -> int:
        """The place of a quota in the batch; a new one is added.

        Args:
            bucket: the bucket, for a row with verdicts; other rows name their buckets themselves.
        """
        key = id(compiled), bucket
        place = self._places.get(key)
        if place is not None:
            return place
        equal = compiled.quota, compiled.entity, compiled.enforcement, bucket
        place = self._equals.get(equal)  # a quota that was scaled is compiled for each ask
        if place is None:
            fields = quota_fields(compiled.quota, compiled.entity, bucket)
            _pack(LoggedQuota(**fields, applied_as=compiled.enforcement), self._quotas)
            place = self._places[key] = self._equals[equal] = len(self._equals)
            self._kept_alive.append(compiled)
            self._keys_bytes += QUOTA_BYTES + len(bucket)
        return place

    def _digests(self, ask: Ask, ids: Sequence[int | str]) -> bytes:
        return b"".join([digest(self._secret, ask.principal or "", one) for one in ids])


def _pack(item: AskRow | FullRow | LoggedQuota, packed: bytearray) -> None:
    """Pack an item behind others."""
    before = len(packed)
    try:
        _ENCODER.encode_into(item, packed, -1)
    except Exception:
        del packed[before:]
        raise


def _array(items: int, packed: bytearray) -> Raw:
    """Packed items as an array of msgpack."""
    return Raw(b"\xdd" + items.to_bytes(4, "big") + packed)


def id_texts(ids: Sequence[int | str]) -> list[str] | None:
    """Return ids as they were asked for; None without ids."""
    return [str(one) for one in ids] if ids else None


def _answer(entry: DecisionEntry) -> bytes:
    """Return the store's answer as received, or one made from verdicts, without the node's own verdict."""
    planned, answer = entry.planned, entry.answer
    if answer is not None and not answer.results:
        answer = None  # only a kept answer was wanted
    if answer is not None and answer.packed and answer.earlier is None and not by_policy_in(answer):
        return answer.packed
    verdicts = (entry.verdicts or verdicts_of(planned, answer))[planned.alone :]
    results = [
        ChargeResult(
            verdict.outcome,
            verdict.reason,
            0,
            verdict.throttle_ms,
            _UNKNOWN if verdict.observed is None else verdict.observed,
            _UNKNOWN if verdict.remaining is None else verdict.remaining,
            verdict.largest or 0.0,
        )
        for verdict in verdicts
    ]
    if answer is not None:
        bucket_results = zip(*(each.results for each in answer.tries if each.kept is None), strict=True)
        results = list(map(_with_clock, results, bucket_results))
    return packed_results(results)


def _with_clock(result: ChargeResult, tries: Sequence[ChargeResult]) -> ChargeResult:
    """Return a result with the largest clock correction of all tries, and with the layers of the newest."""
    result = structs.replace(result, correction=max(each.correction for each in tries))
    newest = tries[0]
    if not isinstance(newest, IdsResult):
        return result
    return IdsResult(**structs.asdict(result) | {"layers": newest.layers})


def _bucket_orders(entry: DecisionEntry) -> Sequence[int | None]:
    """The orders of the store's verdicts; None where a charge was undone or freed: another row has that."""
    answer = entry.answer
    if answer is None or not (answer.undone or answer.released):
        return answer.orders if answer is not None else ()
    elsewhere = {(each.key, each.order) for each in answer.undone}
    elsewhere |= {(each.key, each.order) for each in answer.released}
    charges = entry.planned.charges[len(entry.planned.charges) - len(answer.orders) :]
    return [
        None if (charge.key, order) in elsewhere else order
        for charge, order in zip(charges, answer.orders, strict=True)
    ]


def _order_of(entry: DecisionEntry) -> int | None:
    answer = entry.answer
    if answer is None or not (answer.undone or answer.released):
        return answer.order if answer is not None else None
    return max((order for order in _bucket_orders(entry) if order is not None), default=None)


def _change(entry: ChangeEntry) -> FullRow:
    before, after = (None if value is None else json.dumps(value) for value in (entry.before, entry.after))
    return FullRow(
        kind=entry.kind,
        at_ms=entry.at_ms,
        order=entry.order,
        what=entry.what,
        before=before,
        after=after,
        who=entry.who,
        version=entry.version,
    )
