"""Makes the rows of plain admissions, which nodes send as the store answered them.

``app.decision_log.batch`` has their layout. The rows are those that a node makes of other decisions
(``app.admission.log_rows``); a test compares them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Final, NamedTuple

from msgspec import MsgspecError, msgpack
from msgspec.structs import force_setattr, replace

from app.decision_log.batch import (
    ADMISSION,
    ASK,
    NEXT_ROW,
    NOT_ASKED,
    Admissions,
    AdmittedAsk,
    AdmittedQuotas,
    Batch,
    LoggedQuota,
    LoggedVerdict,
    Row,
)
from app.store.encoding import admission_end, admission_numbers

NO_IDS: Final = b""
_DECODER: Final = msgpack.Decoder(AdmittedAsk)


class InconsistentError(ValueError):
    """The admissions of a batch refer to something that it does not contain, or to more or less of it."""


class _Charge(NamedTuple):
    """What the verdicts of equal asks by one quota have in common."""

    quota: int
    enforcement: str
    usage: float
    counts_ids: bool


class _Equals(NamedTuple):
    """What the rows of equal asks have in common."""

    row: Row
    at_ms: int | None
    charges: list[_Charge]


def with_rows(batch: Batch) -> Batch:
    """Return a batch with rows in place of admissions.

    Raises:
        InconsistentError: they refer to something that the batch does not contain.
    """
    admissions = batch.admissions
    if admissions is None:
        return batch
    quotas = list(batch.quotas)
    try:
        equals = list(_equals(admissions, quotas))
        rows = list(_rows(batch.rows, admissions, equals))
    except (IndexError, ValueError, MsgspecError, struct.error) as error:
        raise InconsistentError(f"its admissions do not fit together: {error}") from error
    return replace(batch, quotas=quotas, rows=rows, admissions=None)


def _equals(admissions: Admissions, quotas: list[LoggedQuota]) -> Iterator[_Equals]:
    """Yield what the rows of each ask have in common, and add its quotas to those of the batch."""
    known: dict[tuple[int, int, str, str], int] = {}
    for group, ask in _asks(admissions.asks):
        its = admissions.quotas[group]
        charges = []
        for at, (quota, enforcement, charge) in enumerate(
            zip(its.quotas, its.enforcements, ask.charges, strict=True)
        ):
            place = known.setdefault((group, at, charge.entity, charge.bucket), len(quotas))
            if place == len(quotas):
                quotas.append(replace(quota, entity=charge.entity, bucket=charge.bucket))
            charges.append(_Charge(place, enforcement, charge.usage, quota.algorithm == "producer_ids"))
        yield _Equals(_row(ask, its), ask.at_ms, charges)


def _asks(packed: bytes) -> Iterator[tuple[int, AdmittedAsk]]:
    """Yield the place of the quotas of each ask, and the ask."""
    at = 0
    while at < len(packed):
        group, length = ASK.unpack_from(packed, at)
        at += ASK.size
        yield group, _DECODER.decode(packed[at : at + length])
        at += length


def _row(ask: AdmittedAsk, its: AdmittedQuotas) -> Row:
    return Row(
        "decision",
        0,
        principal=ask.principal,
        client_id=ask.client_id,
        ip=ask.ip,
        broker=ask.broker,
        listener=ask.listener,
        mode="admit",
        deny=ask.deny,
        usage=ask.usage,
        ids=ask.ids,
        plain_ids=ask.plain_ids,
        decision="admit",
        charged=its.charged,
        applied=its.applied,
        source=its.source,
    )


def _rows(rows: Sequence[Row], admissions: Admissions, equals: Sequence[_Equals]) -> Iterator[Row]:
    """Yield all rows in order."""
    others, packed = iter(rows), admissions.rows
    at = 0
    while at < len(packed):
        if packed.startswith(NEXT_ROW, at):
            at += len(NEXT_ROW)
            row = next(others, None)
            if row is None:
                raise ValueError("too few rows")
            yield row
            continue
        place, at_ms, order, ids = ADMISSION.unpack_from(packed, at)
        its = equals[place]
        answer_at = at + ADMISSION.size
        quotas = len(its.charges)
        ids_at = admission_end(packed, answer_at, quotas)
        at = ids_at + ids
        numbers = admission_numbers(packed, answer_at, quotas)
        yield _admission(its, at_ms, order, numbers, packed[ids_at:at])
    if at > len(packed) or next(others, None) is not None:
        raise ValueError("too few admissions")


def _admission(its: _Equals, at_ms: int, order: int, numbers: Sequence[float], outcomes: bytes) -> Row:
    row = copy(its.row)
    force_setattr(row, "at_ms", at_ms if its.at_ms is None else its.at_ms)
    force_setattr(row, "order", None if order == NOT_ASKED else order)
    verdicts = []
    for at, (quota, enforcement, usage, counts_ids) in enumerate(its.charges):
        observed, remaining = numbers[2 * at], numbers[2 * at + 1]
        ids = outcomes if counts_ids else NO_IDS
        verdicts.append(
            LoggedVerdict(quota, enforcement, usage, "admit", 0, observed, remaining, None, 0, ids)
        )
    force_setattr(row, "verdicts", verdicts)
    return row
