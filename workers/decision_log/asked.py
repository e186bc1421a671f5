"""Makes the verdicts of the asks in a batch from the store's raw answers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from app.decision_log.batch import (
    CHARGED_ASK,
    CLUSTER_ACTION,
    DENY,
    KINDS,
    RECHECK,
    REPLAYED,
    AskRow,
    Batch,
    LoggedQuota,
    LoggedVerdict,
    Row,
    SentBatch,
)
from app.domain.ask import MODES
from app.domain.decision import OUTCOMES, SOURCES
from app.domain.quota import KEYS
from app.store.encoding import BRIEF, FULL, STAMPED, decode_answer
from app.store.port import ChargeResult

_ALONE: Final = ChargeResult("admit")
"""The result for a quota that the node answered without the store."""
_DIGEST_BYTES: Final = 8
_FORMS: Final = (b"", *(bytes([form]) for form in (FULL, BRIEF, STAMPED)))
"""The first byte of a readable answer; an empty answer has no results."""


class UnclearError(ValueError):
    """An ask of a batch refers to something that the batch does not contain, or its parts do not fit."""


def with_verdicts(sent: SentBatch) -> Batch:
    """Return a batch in which all asks have their verdicts.

    Raises:
        UnclearError: an ask refers to something that the batch does not contain, or cannot be read.
    """
    maker = _Maker(sent.quotas)
    try:
        rows = [maker.row(row) if isinstance(row, AskRow) else row for row in sent.rows]
    except (IndexError, KeyError, OverflowError, ValueError, struct.error) as error:
        raise UnclearError(f"its asks do not fit together: {error}") from error
    return Batch(
        sent.version, sent.id, sent.node, sent.sent_ms, maker.quotas, rows, sent.secret, sent.siblings
    )


class _Maker:
    """Makes rows; each pair of a quota and a bucket becomes one of the batch's quotas."""

    def __init__(self, quotas: list[LoggedQuota]) -> None:
        self._sent = quotas
        self.quotas = list(quotas)
        self._places: dict[tuple[int, str], int] = {}

    def row(self, ask: AskRow) -> Row:
        """Return an ask as a row."""
        lease = None if ask.lease is None else ask.lease[0].hex()
        return Row(
            KINDS[ask.kind],
            ask.at_ms,
            ask.order,
            ask.principal,
            ask.client_id,
            ask.ip,
            ask.broker,
            ask.listener,
            MODES[ask.mode],
            ask.flags & DENY > 0,
            ask.flags & RECHECK > 0,
            ask.flags & CLUSTER_ACTION > 0,
            ask.usage,
            ask.ids,
            ask.plain_ids,
            OUTCOMES[ask.decision],
            ask.throttle_ms,
            ask.flags & CHARGED_ASK > 0,
            ask.applied,
            SOURCES[ask.source],
            ask.flags & REPLAYED > 0,
            ask.failure,
            ask.limited_by,
            list(self._verdicts(ask)),
            lease,
            None,
            None if ask.lease is None else f'{{"lease_ms": {ask.lease[1]}}}',
        )

    def _verdicts(self, ask: AskRow) -> Iterator[LoggedVerdict]:
        if ask.answer[:1] not in _FORMS or ask.alone > len(ask.quotas):
            raise ValueError("an answer of another form")
        results = decode_answer(ask.answer).results if ask.answer else ()
        all_results = (*[_ALONE] * ask.alone, *results)
        orders = (*[None] * ask.alone, *ask.orders) if ask.orders else [None] * len(all_results)
        for place, bucket, result, order in zip(ask.quotas, ask.buckets, all_results, orders, strict=True):
            quota = self._sent[place]
            key = KEYS[quota.quota]
            counts_ids = quota.algorithm == "producer_ids"
            usage = len(ask.ids) // _DIGEST_BYTES if counts_ids else ask.usage[key.usage] / key.per_unit
            is_known = result.observed == result.observed
            known = ask.known if counts_ids else None
            yield LoggedVerdict(
                self._place(place, bucket),
                quota.applied_as or quota.enforcement,
                usage,
                result.outcome,
                result.throttle_ms,
                result.observed if is_known else None,
                result.remaining if is_known else None,
                result.reason,
                result.correction,
                ask.outcomes if counts_ids else b"",
                order,
                *(known or (None, None)),
            )

    def _place(self, place: int, bucket: str) -> int:
        """Return the place of a pair of a quota and a bucket among the batch's quotas."""
        found = self._places.get((place, bucket))
        if found is None:
            found = self._places[place, bucket] = len(self.quotas)
            self.quotas.append(replace(self._sent[place], bucket=bucket))
        return found
