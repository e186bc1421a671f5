"""What was decided, as the rows of a batch of the decision log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from sys import getsizeof
from typing import Final, Literal, NamedTuple

from msgspec import Raw, msgpack

from app.admission.plan import Match
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.digest import digest, fingerprint
from app.domain.quota import Quota
from app.domain.usage import ids_of, usage_of
from app.store.decision_log import SEEN, VERSION, QuotaThen, Row, Sibling, VerdictThen, batch_id
from app.store.port import Answer

ROW_BYTES: Final = 1_000
MATCH_BYTES: Final = 700
ID_BYTES: Final = 100
"""What a decision, a quota of it and an id hold while they wait, names apart; see ``tests/bench``."""


_encode: Final = msgpack.Encoder().encode


class Decided(NamedTuple):
    """A decision, and all that made it; ``failure`` is why it was made without the store.

    Attributes:
        kind: ``late`` if the ask had been answered without the store by then.
    """

    kind: Literal["decision", "late"]
    at_ms: int
    ask: Ask
    matches: Sequence[Match]
    answer: Answer | None
    decision: Decision
    verdicts: Sequence[Verdict]
    failure: str | None


class IdsAlone(NamedTuple):
    """What became of the ids of an ask that is not logged itself."""

    at_ms: int
    ask: Ask
    matches: Sequence[Match]
    answer: Answer


class Changed(NamedTuple):
    """A change of what decisions are made by, or rows dropped; ``before`` and ``after`` are JSON values."""

    kind: Literal["quota", "factor", "reset", "dropped"]
    at_ms: int
    what: str
    before: object
    after: object
    who: str | None = None
    version: int | None = None
    order: int | None = None


Entry = Decided | IdsAlone | Changed


def size_of(entry: Entry) -> int:
    """About how many bytes an entry holds in memory while it waits; long names stand in its quotas too."""
    if isinstance(entry, Changed):
        return ROW_BYTES
    ask = entry.ask
    names = 0
    for name in (ask.principal, ask.client_id, ask.broker, ask.listener):
        if name is not None:
            names += getsizeof(name)
    ids = ask.producer_ids or ()
    size = ROW_BYTES + ID_BYTES * len(ids) + (MATCH_BYTES + 3 * names) * len(entry.matches) + names
    for one in ids:
        if isinstance(one, str):
            size += getsizeof(one)
    return size


class Packing:
    """Rows as a batch, in which each quota stands once.

    Attributes:
        rows: how many there are.
        size: the bytes that they and their quotas have.
    """

    def __init__(self, secret: bytes, *, plain_ids: bool) -> None:
        self.rows = 0
        self.size = 0
        self._secret = secret
        self._plain_ids = plain_ids
        self._packed: list[Raw] = []
        self._quotas: list[Raw] = []
        self._places: dict[tuple[Quota, str, str], int] = {}

    def add(self, entry: Entry) -> None:
        """Put an entry in as a row."""
        self._packed.append(self._raw(self._row(entry)))
        self.rows += 1

    def batch(self, node: str, number: int, sent_ms: int, siblings: Sequence[Sibling] = ()) -> bytes:
        """The batch; its fields are those of ``app.store.decision_log.Batch``."""
        name, made_by = batch_id(node, number), fingerprint(self._secret)
        fields = (VERSION, name, node, sent_ms, self._quotas, self._packed, made_by, siblings)
        return _encode(fields)

    def _raw(self, part: Row | QuotaThen) -> Raw:
        packed = _encode(part)
        self.size += len(packed)
        return Raw(packed)

    def _row(self, entry: Entry) -> Row:
        if isinstance(entry, Changed):
            return _change(entry)
        if isinstance(entry, IdsAlone):
            return self._ids_alone(entry)
        ask, decision, answer = entry.ask, entry.decision, entry.answer
        replayed = answer is not None and answer.kept is not None
        by = decision.limited_by
        ids = ids_of(ask)
        return Row(
            entry.kind,
            entry.at_ms,
            answer.order if answer else None,
            ask.principal,
            ask.client_id,
            ask.ip,
            ask.broker,
            ask.listener,
            ask.mode,
            ask.deny,
            ask.recheck,
            ask.cluster_action,
            dict(ask.usage),
            self._digests(ask, ids),
            self._plain(ids),
            decision.decision,
            decision.throttle_ms,
            decision.charged,
            decision.applied,
            decision.source,
            replayed,
            entry.failure,
            (by.quota, by.entity, by.bucket, by.reason) if by else None,
            [] if replayed else self._verdicts(entry),
        )

    def _ids_alone(self, entry: IdsAlone) -> Row:
        ask, answer = entry.ask, entry.answer
        ids, fates = [], bytearray()
        for one, fate in zip(ids_of(ask), answer.fates, strict=True):
            if fate != SEEN:
                ids.append(one)
                fates.append(fate)
        verdicts = [
            VerdictThen(self._place(match), "deny", len(ids), "admit", 0, None, None, None, 0, bytes(fates))
            for match in entry.matches
            if match.applied.quota.algorithm == "producer_ids"
        ]
        return Row(
            "ids",
            entry.at_ms,
            answer.order,
            ask.principal,
            mode=ask.mode,
            ids=self._digests(ask, ids),
            plain_ids=self._plain(ids),
            source="store",
            verdicts=verdicts,
        )

    def _verdicts(self, entry: Decided) -> list[VerdictThen]:
        ask, answer = entry.ask, entry.answer
        said = answer.said if answer is not None and answer.said else None
        fates = answer.fates if answer is not None else b""
        return [
            VerdictThen(
                self._place(match),
                verdict.enforcement,
                usage_of(ask, match.applied.quota),
                verdict.outcome,
                verdict.throttle_ms,
                verdict.observed,
                verdict.remaining,
                verdict.reason,
                said[place].correction if said else 0,
                fates if match.applied.quota.algorithm == "producer_ids" else b"",
            )
            for place, (match, verdict) in enumerate(zip(entry.matches, entry.verdicts, strict=True))
        ]

    def _place(self, match: Match) -> int:
        found, quota = match.applied, match.applied.quota
        place = self._places.setdefault((quota, found.entity, found.bucket), len(self._quotas))
        if place == len(self._quotas):
            then = QuotaThen(
                quota.key,
                found.entity,
                found.bucket,
                quota.limit,
                quota.algorithm,
                quota.enforcement,
                quota.shadow,
                quota.scope,
                quota.samples,
                quota.sample_ms,
                quota.burst,
                quota.window_ms,
                quota.layers.interval_ms,
                quota.layers.ttl_ms,
                quota.epoch,
                quota.max_debt if isfinite(quota.max_debt) else None,
            )
            self._quotas.append(self._raw(then))
        return place

    def _digests(self, ask: Ask, ids: Sequence[int | str]) -> bytes:
        return b"".join(digest(self._secret, ask.principal or "", one) for one in ids)

    def _plain(self, ids: Sequence[int | str]) -> list[str] | None:
        return [str(one) for one in ids] if self._plain_ids and ids else None


def _change(entry: Changed) -> Row:
    before, after = (None if value is None else json.dumps(value) for value in (entry.before, entry.after))
    return Row(
        entry.kind,
        entry.at_ms,
        entry.order,
        what=entry.what,
        before=before,
        after=after,
        who=entry.who,
        version=entry.version,
    )
