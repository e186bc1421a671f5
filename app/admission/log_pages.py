"""Rows of the decision log that wait to be sent, in order; a page of them becomes a batch, or a few.

A plain admission waits as bytes: the store's answer, and the place of its ask, which a page has once for
equal asks. So it takes no objects and little memory, and a page is packed without a look at each row.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Final, NamedTuple

from msgspec import Raw, msgpack

from app.admission.log_rows import MATCH_BYTES, LogEntry, plain_texts, size_of
from app.admission.plain import Logged, PlainQuotas, PlannedAsk, keep
from app.decision_log.batch import (
    ADMISSION,
    ASK,
    NEXT_ROW,
    AdmittedAsk,
    AdmittedCharge,
    AdmittedQuotas,
    LoggedQuota,
)
from app.decision_log.columns import quota_fields
from app.domain.digest import digest
from app.domain.usage import enforcement_of, ids_of, usage_of
from app.store.encoding import admission_end

PLAIN_BYTES: Final = 600
"""Bytes in memory of a waiting plain ask without its quotas and names; these are in its bytes."""

ENTRY_ROOM: Final = 64
"""The room that a row takes at least that is no admission; how much it is shows when it is packed."""

_encode: Final = msgpack.Encoder().encode
_PLACE: Final = struct.Struct("<H")
_NEXT: Final = _PLACE.unpack(NEXT_ROW)[0]
_NUMBERS: Final = count(1)


class PackedAdmissions(NamedTuple):
    """The admissions of a batch, as ``app.decision_log.batch.Admissions``."""

    more_as_rows: int
    rows: bytes | bytearray
    quotas: list[Raw]
    asks: bytes | bytearray


class WaitingRow(NamedTuple):
    """A row of a page: where it begins and ends in its bytes; ``place`` is None if it is no admission."""

    place: int | None
    begin: int
    end: int


class LogPage:
    """Rows that wait, in order.

    An admission takes room for its own bytes and half of those of its ask, an ask half of its own once. So
    a batch is bounded in its bytes, and at twice as many in those of its rows when the writer makes them.

    Args:
        size: how much room it has, in bytes of a batch.

    Attributes:
        number: of no other page of this process.
        room: what is left of it; a page without room takes no more rows.
        count: of its rows.
        rows: all rows, as in ``app.decision_log.batch.Admissions``; the log appends admissions itself, as it
            has no time for a call.
        entries: those that are no admissions.
        asks: whose admissions it has.
        counted: how many bytes of memory the log counts for it.
    """

    __slots__ = (
        "_held",
        "_packed",
        "_quotas",
        "_size",
        "asks",
        "count",
        "counted",
        "entries",
        "number",
        "room",
        "rows",
    )

    def __init__(self, size: int) -> None:
        self.number = next(_NUMBERS)
        self.room = size
        self.count = 0
        self.rows = bytearray()
        self.entries: deque[LogEntry] = deque()
        self.asks: list[PlainQuotas] = []
        self.counted = 0
        self._size = size
        self._held = 0
        """Bytes of memory of entries and asks."""
        self._quotas: list[Raw] = []
        self._packed = bytearray()
        """The asks as in ``app.decision_log.batch.Admissions``."""

    @property
    def held(self) -> int:
        """How many bytes of memory it takes, by estimate."""
        return self._held + self._size - self.room

    def add(self, entry: LogEntry, held: int) -> None:
        """Add a row that is no admission, and that takes so many bytes of memory."""
        self.entries.append(entry)
        self.rows += NEXT_ROW
        self.count += 1
        self._held += held
        self.room -= ENTRY_ROOM

    def introduce(self, plain: PlainQuotas, ask: Logged, quotas: Logged) -> None:
        """Make an ask known, so that its admissions can be added.

        Args:
            ask, quotas: what the log made of it and of its quotas, of which this is the page now.
        """
        number = self.number
        if quotas.page != number:
            quotas.page, quotas.place = number, len(self._quotas)
            self._quotas.append(Raw(quotas.packed))
            self._held += quotas.held
            self.room -= quotas.length
        ask.page, ask.place = number, len(self.asks)
        self.asks.append(plain)
        self._packed += ASK.pack(quotas.place, ask.length) + ask.packed
        self._held += ask.held
        self.room -= ask.length // 2

    def walk(self) -> Iterator[WaitingRow]:
        """Yield the rows in order."""
        begin = 0
        while begin < len(self.rows):
            (place,) = _PLACE.unpack_from(self.rows, begin)
            if place == _NEXT:
                end = begin + _PLACE.size
                yield WaitingRow(None, begin, end)
            else:
                *_, outcomes = ADMISSION.unpack_from(self.rows, begin)
                answer_at = begin + ADMISSION.size
                end = admission_end(self.rows, answer_at, len(self.asks[place].places)) + outcomes
                yield WaitingRow(place, begin, end)
            begin = end

    def rest(self, rows: Iterable[WaitingRow]) -> LogPage:
        """Return its last rows as another page, which takes no more; their entries move there."""
        rest = LogPage(0)
        for place, begin, end in rows:
            if place is None:
                entry = self.entries.popleft()
                rest.add(entry, size_of(entry))
                continue
            plain = self.asks[place]
            ask, quotas = made_of(plain)
            if ask.page != rest.number:
                rest.introduce(plain, ask, quotas)
            rest.rows += _PLACE.pack(ask.place) + self.rows[begin + _PLACE.size : end]
            rest.count += 1
            rest.room -= ask.room + end - begin - ADMISSION.size
        return rest

    def packed(self, rows: bytes | bytearray, asks: int | None = None) -> PackedAdmissions:
        """Return admissions as a part of a batch.

        Args:
            rows: all rows of the batch: some of the first ones of this page.
            asks: how many of the asks they name, the first ones; by default all.
        """
        size = sum(ASK.size + made_of(plain)[0].length for plain in self.asks[:asks]) if asks else None
        more_as_rows = 2 * (self._size - self.room - len(self.rows)) - len(self._packed)
        return PackedAdmissions(max(more_as_rows, 0), rows, self._quotas, self._packed[:size])


def made_of(plain: PlainQuotas) -> tuple[Logged, Logged]:
    """Return what the log made of an ask and of its quotas, when it took an admission of it."""
    ask, quotas = plain.logged, plain.shared.logged
    assert ask is not None
    assert quotas is not None
    return ask, quotas


def logged_ask(planned: PlannedAsk, plain: PlainQuotas, secret: bytes, *, plain_ids: bool) -> Logged:
    """Make what the log keeps of a plain ask, once for equal asks.

    Args:
        plain: of the ask.
    """
    ask = planned.ask
    ids = ids_of(ask)
    packed = _encode(
        AdmittedAsk(
            ask.at_ms,
            ask.principal,
            ask.client_id,
            ask.ip,
            ask.broker,
            ask.listener,
            ask.deny,
            dict(ask.usage),
            b"".join([digest(secret, ask.principal or "", one) for one in ids]),
            plain_texts(ids) if plain_ids else None,
            [AdmittedCharge(its.entity, its.bucket, usage_of(ask, its.quota)) for its, _ in planned.matches],
        )
    )
    held = PLAIN_BYTES + MATCH_BYTES * len(planned.matches) + 3 * len(packed)
    # The half of the ask has four bytes for each id, so it covers the outcomes of its ids.
    room = ADMISSION.size + len(packed) // 2
    return keep(plain, Logged(packed, len(packed), held, room))


def logged_quotas(planned: PlannedAsk, plain: PlainQuotas) -> Logged:
    """Make what the log keeps of the quotas of a plain ask, once for all asks that share them."""
    shared = plain.shared
    quotas = [match.applied.quota for match in planned.matches]
    packed = _encode(
        AdmittedQuotas(
            shared.decision.charged,
            shared.decision.applied,
            shared.decision.source,
            [LoggedQuota(**quota_fields(quota, "", "")) for quota in quotas],
            [enforcement_of(planned.ask, quota) for quota in quotas],
        )
    )
    return keep(shared, Logged(packed, len(packed), 3 * len(packed)))
