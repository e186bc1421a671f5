"""The uses of a foreign history as a table, and the refusal of invalid ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from workers.jobs.errors import JobError
from workers.jobs.period import Period
from workers.jobs.verdicts import Flags, flags, integers

SCHEMA: Final = pa.schema([("principal", pa.string()), ("id", pa.string()), ("at_ms", pa.int64())])
"""A use: who used which id when. An id is the text of a number, or a text."""

YEARS: Final = (946_684_800_000, 7_258_118_400_000)
"""The years 2000 to 2199: a time in seconds or microseconds is far outside."""

NUMBER: Final = re.compile("[0-9]{1,18}")
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND: Final = timedelta(milliseconds=1)
SHOWN: Final = 200
"""How many characters of an invalid row a message shows."""

NO_OBJECT: Final = "a line is not a JSON object"
NO_ID: Final = "must be a signed 64-bit integer or a text, as an ask has it"
NO_PRINCIPAL: Final = "must be a text; it names who asks"


@dataclass(frozen=True, slots=True)
class HistoryColumns:
    """The names of the three columns."""

    principal: str = "principal"
    id: str = "id"
    time: str = "time"


class Uses(NamedTuple):
    """Uses as they were read, before they are checked; invalid values are null.

    Attributes:
        bad_principals, bad_ids: which rows have a value there, but of a type that none may have.
        shown: their values, for messages: principal, id and time.
    """

    principal: pa.Array
    id: pa.Array
    at_ms: pa.Array
    bad_principals: Flags
    bad_ids: Flags
    shown: Sequence[Sequence[object] | pa.Array]

    def table(self, file: str, columns: HistoryColumns, period: Period) -> pa.Table:
        """The uses of a period, as ``SCHEMA``.

        Raises:
            JobError: a value is missing or invalid; the message names the file, the field, what would be
                right, and the row.
        """
        at_ms = integers(self.at_ms, YEARS[0])
        nameless = ~flags(self.principal.is_valid()) | (_lengths(self.principal) == 0)
        for name, wrong, why in (
            (columns.principal, self.bad_principals, NO_PRINCIPAL),
            (columns.principal, nameless, "is missing or empty; it names who asks"),
            (columns.id, ~flags(self.id.is_valid()) & ~self.bad_ids, "is missing; it names a producer"),
            (columns.id, self.bad_ids, NO_ID),
            (
                columns.time,
                ~flags(self.at_ms.is_valid()),
                "must be an instant such as 2026-11-21T10:00:00Z, or milliseconds since 1970",
            ),
            (
                columns.time,
                (at_ms < YEARS[0]) | (at_ms > YEARS[1]),
                "must lie in the years 2000 to 2199; a number is milliseconds since 1970",
            ),
        ):
            if wrong.any():
                raise JobError(f"{file}: field {name}: {why}; in {self._row(int(np.argmax(wrong)))}")
        found = pa.Table.from_arrays([self.principal, self.id, self.at_ms], schema=SCHEMA)
        inside = period.mask(at_ms)
        return found if inside.all() else found.filter(pa.array(inside))

    def _row(self, place: int) -> str:
        """The values of a row, for a message."""
        found = (column[place] for column in self.shown)
        values = (value.as_py() if isinstance(value, pa.Scalar) else value for value in found)
        texts = (None if value is None else str(value) for value in values)
        named = zip(("principal", "id", "time"), texts, strict=True)
        return " ".join(f"{name}={text!r}" for name, text in named)[:SHOWN]


def ms_of_text(text: str) -> int | None:
    """The milliseconds of an instant, or of a number of them; None if the text is neither.

    A time without an offset is UTC. Parts of a millisecond are dropped.

    >>> ms_of_text("1970-01-01T01:00:00.0019+01:00"), ms_of_text(" 5"), ms_of_text("soon")
    (1, None, None)
    """
    if NUMBER.fullmatch(text):
        return int(text)
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - EPOCH) // MILLISECOND


def _lengths(texts: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return integers(pc.binary_length(texts))
