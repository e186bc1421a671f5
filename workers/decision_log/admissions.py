"""Makes rows of the admissions in batches of versions 2 and 3, which keep them apart from other rows.

Such a batch has the common fields of equal asks once, and the store's raw answers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Final, NamedTuple

from msgspec import MsgspecError, Raw, Struct, msgpack
from msgspec.structs import force_setattr, replace

from app.decision_log.batch import Batch, LoggedQuota, LoggedVerdict, Row
from app.store.encoding import BRIEF

ADMISSION: Final = struct.Struct("<HqqH")
"""How an admission begins: the place of its ask, ``at_ms`` of its answer, its place in the store's order
(or ``NOT_ASKED``), and how many ids have an outcome. The answer follows, then a byte for each outcome."""

NOT_ASKED: Final = -1

ASK: Final = struct.Struct("<HI")
"""The head of an ask in ``Admissions.asks``: the place of its quotas, and the ask's length in bytes."""

NEXT_ROW: Final = b"\xff\xff"
"""A marker in ``Admissions.rows``: the next of the batch's other ``rows`` goes here."""

NO_IDS: Final = b""
_TWO: Final = struct.Struct("<dd")
_FULL: Final = struct.Struct("<3x8xdd24x")
"""The observed and remaining amounts in a brief and in a full result (``app/store/lua/call.lua``)."""


class AdmittedQuotas(Struct, array_like=True, frozen=True):
    """The fields that admissions by the same quotas share.

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
    """The charge of an ask to one quota."""

    entity: str
    bucket: str
    usage: float


class AdmittedAsk(Struct, array_like=True, frozen=True):
    """The fields that the rows of equal ordinary asks share.

    Attributes:
        at_ms: the caller's time; None with the store's clock, whose time each admission has.
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
    """The ordinary admissions of a batch, each ask once.

    Attributes:
        more_as_rows: at most how many more bytes the batch would have if each row had its own ask.
        rows: all rows of the batch in order, each an ``ADMISSION`` or ``NEXT_ROW``. An answer is in
            the script's encoding, and empty if no quota applies.
        asks: one after the other, each an ``ASK`` and a packed ``AdmittedAsk``.
    """

    more_as_rows: int
    rows: bytes
    quotas: list[AdmittedQuotas]
    asks: bytes


class OldBatch(Batch, array_like=True, frozen=True):
    """A batch of a version up to 3.

    Attributes:
        admissions: since version 2; None if all rows are ``rows``.
    """

    admissions: Admissions | None = None


_ASKS: Final = msgpack.Decoder(AdmittedAsk)


class InconsistentError(ValueError):
    """The admissions of a batch refer to something that it does not contain, or numbers of parts differ."""


class _Charge(NamedTuple):
    """The fields that the verdicts of one quota on equal asks share."""

    quota: int
    enforcement: str
    usage: float
    counts_ids: bool


class _Equals(NamedTuple):
    """The fields that the rows of equal asks share."""

    row: Row
    at_ms: int | None
    charges: list[_Charge]


def with_rows(batch: OldBatch) -> Batch:
    """Return a batch with rows in place of admissions.

    Raises:
        InconsistentError: the admissions do not fit together.
    """
    admissions = batch.admissions
    if admissions is None:
        return _as_batch(batch, batch.quotas, batch.rows)
    quotas = list(batch.quotas)
    try:
        equals = list(_equals(admissions, quotas))
        rows = list(_rows(batch.rows, admissions, equals))
    except (IndexError, ValueError, MsgspecError, struct.error) as error:
        raise InconsistentError(f"its admissions do not fit together: {error}") from error
    return _as_batch(batch, quotas, rows)


def _as_batch(batch: OldBatch, quotas: list[LoggedQuota], rows: list[Row]) -> Batch:
    """Return a batch that has all rows as rows."""
    head = batch.version, batch.id, batch.node, batch.sent_ms
    return Batch(*head, quotas, rows, batch.secret, batch.siblings)


def _equals(admissions: Admissions, quotas: list[LoggedQuota]) -> Iterator[_Equals]:
    """Yield the common fields of each ask's rows, and append the ask's quotas to ``quotas``."""
    known: dict[tuple[int, int, str, str], int] = {}
    for group, ask in _asks(admissions.asks):
        admitted_quotas = admissions.quotas[group]
        charges = []
        for at, (quota, enforcement, charge) in enumerate(
            zip(admitted_quotas.quotas, admitted_quotas.enforcements, ask.charges, strict=True)
        ):
            place = known.setdefault((group, at, charge.entity, charge.bucket), len(quotas))
            if place == len(quotas):
                quotas.append(replace(quota, entity=charge.entity, bucket=charge.bucket))
            charges.append(_Charge(place, enforcement, charge.usage, quota.algorithm == "producer_ids"))
        yield _Equals(_row(ask, admitted_quotas), ask.at_ms, charges)


def _asks(packed: bytes) -> Iterator[tuple[int, AdmittedAsk]]:
    """Yield the place of the quotas of each ask, and the ask."""
    at = 0
    while at < len(packed):
        group, length = ASK.unpack_from(packed, at)
        at += ASK.size
        yield group, _ASKS.decode(packed[at : at + length])
        at += length


def _row(ask: AdmittedAsk, admitted_quotas: AdmittedQuotas) -> Row:
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
        charged=admitted_quotas.charged,
        applied=admitted_quotas.applied,
        source=admitted_quotas.source,
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
        common_fields = equals[place]
        answer_at = at + ADMISSION.size
        quotas = len(common_fields.charges)
        ids_at = admission_end(packed, answer_at, quotas)
        at = ids_at + ids
        numbers = admission_numbers(packed, answer_at, quotas)
        yield _admission(common_fields, at_ms, order, numbers, packed[ids_at:at])
    if at > len(packed) or next(others, None) is not None:
        raise ValueError("too few admissions")


def _admission(
    common_fields: _Equals, at_ms: int, order: int, numbers: Sequence[float], outcomes: bytes
) -> Row:
    row = copy(common_fields.row)
    force_setattr(row, "at_ms", at_ms if common_fields.at_ms is None else common_fields.at_ms)
    force_setattr(row, "order", None if order == NOT_ASKED else order)
    verdicts = []
    for at, (quota, enforcement, usage, counts_ids) in enumerate(common_fields.charges):
        observed, remaining = numbers[2 * at], numbers[2 * at + 1]
        ids = outcomes if counts_ids else NO_IDS
        verdicts.append(
            LoggedVerdict(quota, enforcement, usage, "admit", 0, observed, remaining, None, 0, ids)
        )
    force_setattr(row, "verdicts", verdicts)
    return row


def admission_end(packed: bytes | bytearray, at: int, quotas: int) -> int:
    """The end of an admitting answer that begins at ``at``; without quotas there is no answer."""
    if not quotas:
        return at
    return at + 1 + quotas * (_TWO if packed[at] == BRIEF else _FULL).size


def admission_numbers(packed: bytes, at: int, quotas: int) -> list[float]:
    """The observed and remaining amounts of each quota, in order, in an admitting answer."""
    if not quotas:
        return []
    answer = packed[at + 1 : admission_end(packed, at, quotas)]
    return [
        number for result in (_TWO if packed[at] == BRIEF else _FULL).iter_unpack(answer) for number in result
    ]


class _AdmissionsHead(Struct, array_like=True, frozen=True):
    more_as_rows: int


class _BatchHead(Struct, array_like=True, frozen=True):
    """The part of a batch that its size depends on; other fields are not decoded."""

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
    """The bytes that a batch would have if no rows shared an ask; the writer's memory grows with them.

    >>> size_as_rows(b"whatever is not a batch")
    23
    """
    try:
        found = _HEADS.decode(packed).admissions
    except (MsgspecError, UnicodeDecodeError):
        found = None
    return len(packed) if found is None else len(packed) + max(found.more_as_rows, 0)
