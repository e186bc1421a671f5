"""Converts batches to the rows of files, column by column, since row by row would be too slow."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, Final

import msgspec
import pyarrow as pa

from app.decision_log.batch import (
    CHARGED,
    OLDEST,
    REFRESHED,
    VERSION,
    Batch,
    LoggedQuota,
    LoggedVerdict,
    Row,
    SentBatch,
)
from app.domain.quota import PRODUCER_IDS_RATE
from workers.decision_log.admissions import InconsistentError, OldBatch, with_rows
from workers.decision_log.asked import UnclearError, with_verdicts
from workers.decision_log.schema import CHANGE, LIMITED_BY, SCHEMA, SIBLING, VERDICT


class _Versioned(msgspec.Struct, array_like=True, frozen=True):
    """A batch of any layout."""

    version: int


_VERSIONS: Final = msgspec.msgpack.Decoder(_Versioned)
_SENT: Final = msgspec.msgpack.Decoder(SentBatch)
_OLD: Final = msgspec.msgpack.Decoder(OldBatch)
_DIGESTS: Final = pa.list_(pa.int64())
_OF_QUOTA: Final = tuple(
    name for name in LoggedQuota.__struct_fields__ if name not in {"enforcement", "applied_as"}
)
_OF_VERDICT: Final = tuple(name for name in LoggedVerdict.__struct_fields__ if name not in {"quota", "ids"})


class UnreadableError(ValueError):
    """A batch cannot be read; the text says why."""


def decode(packed: bytes) -> Batch:
    """Decode a batch of any version, and make the verdicts of its asks.

    Raises:
        UnreadableError: it is not a batch, or a batch of another version.
    """
    try:
        version = _VERSIONS.decode(packed).version
        if version > VERSION:
            raise UnreadableError(f"its version is {version}, newer than {VERSION}")
        if version == VERSION:
            return with_verdicts(_SENT.decode(packed))
        if version < OLDEST:
            raise UnreadableError(f"its version is {version}, older than {OLDEST}")
        return with_rows(_OLD.decode(packed))
    except msgspec.MsgspecError as error:
        raise UnreadableError(str(error)) from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"a text in it is not UTF-8: {error.reason}") from error
    except (InconsistentError, UnclearError) as error:
        raise UnreadableError(str(error)) from error


def table(batches: Sequence[Batch]) -> pa.Table:
    """The rows of batches, in order.

    Raises:
        UnreadableError: a batch refers to something that it does not contain, or has a number that does not
            fit its column.
    """
    rows = [row for batch in batches for row in batch.rows]
    if not rows:
        return SCHEMA.empty_table()
    try:
        return pa.Table.from_arrays(list(_columns(batches, rows)), schema=SCHEMA)
    except (pa.ArrowException, OverflowError) as error:
        raise UnreadableError(" ".join(str(error).split())) from error


def _columns(batches: Sequence[Batch], rows: Sequence[Row]) -> Iterator[pa.Array]:
    def of_all(name: str) -> list[Any]:
        return list(map(attrgetter(name), rows))

    joined = of_all("ids")
    sizes = [len(batch.rows) for batch in batches]
    digests = _digests(joined)
    change, limit = attrgetter(*CHANGE.names), attrgetter(*LIMITED_BY.names)
    made: dict[str, Any] = {
        "batch": _repeated((batch.id for batch in batches), sizes),
        "node": _repeated((batch.node for batch in batches), sizes),
        "place": pa.array(chain.from_iterable(map(range, sizes)), pa.int32()),
        "batch_rows": pa.array(chain.from_iterable([size] * size for size in sizes), pa.int32()),
        "siblings": _siblings(batches),
        "usage": _usage(of_all("usage")),
        "ids": _ids(joined, digests),
        "limited_by": _struct(LIMITED_BY, [each and limit(each) for each in of_all("limited_by")]),
        "verdicts": _verdicts(batches, digests),
        "change": _struct(CHANGE, [None if row.what is None else change(row) for row in rows]),
    }
    for field in SCHEMA:
        column = made.get(field.name)
        yield pa.array(of_all(field.name), field.type) if column is None else column


def _repeated(values: Iterable[str], sizes: Sequence[int]) -> pa.Array:
    """Repeat each batch's value for each of its rows."""
    places = array("i", chain.from_iterable([place] * size for place, size in enumerate(sizes)))
    return pa.array(values, pa.string()).take(_numbers(places, pa.int32()))


def _siblings(batches: Sequence[Batch]) -> pa.Array:
    """The other nodes that each batch names, in its first row."""
    column: list[list[dict[str, Any]] | None] = []
    for batch in batches:
        siblings = [each._asdict() for each in batch.siblings]
        column += [siblings or None, *(None,) * (len(batch.rows) - 1)] if batch.rows else []
    return pa.array(column, pa.list_(SIBLING))


def _usage(usages: Sequence[dict[str, float]]) -> pa.Array:
    offsets = pa.array(accumulate(map(len, usages), initial=0), pa.int32())
    names = pa.array(chain.from_iterable(usages), pa.string())
    amounts = pa.array(chain.from_iterable(usage.values() for usage in usages), pa.float64())
    return pa.MapArray.from_arrays(offsets, names, amounts)


def _digests(joined: Iterable[bytes]) -> array[int]:
    """Digests of eight bytes each, as signed integers in big-endian order."""
    digests = array("q")
    try:
        digests.frombytes(b"".join(joined))
    except ValueError:
        raise UnreadableError("its digests are not of eight bytes each") from None
    if sys.byteorder == "little":
        digests.byteswap()
    return digests


def _ids(joined: Sequence[bytes], digests: array[int]) -> pa.Array:
    lengths = [len(ids) for ids in joined]
    if any(length % 8 for length in lengths):
        raise UnreadableError("its digests are not of eight bytes each")
    offsets = pa.array((total // 8 for total in accumulate(lengths, initial=0)), pa.int32())
    without = pa.array([not length for length in lengths], pa.bool_())
    return pa.ListArray.from_arrays(offsets, _numbers(digests, pa.int64()), type=_DIGESTS, mask=without)


def _struct(kind: pa.StructType, values: Sequence[tuple[Any, ...] | None]) -> pa.Array:
    """Tuples as a struct column; the first field is not nullable, so it is empty in a null struct."""
    empty = ("", *(None,) * (kind.num_fields - 1))
    parts = zip(*(value or empty for value in values), strict=True)
    arrays = [pa.array(part, field.type) for part, field in zip(parts, kind, strict=True)]
    without = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=without)


def _verdicts(batches: Sequence[Batch], digests: array[int]) -> pa.Array:
    """The verdicts of each row, with the columns of their quotas copied from the batch's quotas."""
    quotas = [quota for batch in batches for quota in batch.quotas]
    gathered: list[LoggedVerdict] = []
    which = array("i")
    ends = array("i", [0])
    charged, refreshed = _Chosen(), _Chosen()
    before, first = 0, 0
    for batch in batches:
        held = len(batch.quotas)
        counts_ids = [quota.quota == PRODUCER_IDS_RATE for quota in batch.quotas]
        for row in batch.rows:
            ids = len(row.ids) // 8
            for verdict in row.verdicts:
                if not 0 <= verdict.quota < held:
                    raise UnreadableError(f"a verdict names quota {verdict.quota} of {held}")
                which.append(before + verdict.quota)
                marks = verdict.ids if counts_ids[verdict.quota] else None
                if marks and len(marks) != ids:
                    raise UnreadableError(f"a verdict has {len(marks)} marks for {ids} ids")
                charged.choose(CHARGED, marks, digests, first)
                refreshed.choose(REFRESHED, marks, digests, first)
            gathered += row.verdicts
            ends.append(len(gathered))
            first += ids
        before += held

    at = _numbers(which, pa.int32())
    columns = {"charged_ids": charged.column(), "refreshed_ids": refreshed.column()}
    for name in _OF_VERDICT:
        columns[name] = pa.array(map(attrgetter(name), gathered), VERDICT.field(name).type)
    for name in _OF_QUOTA:
        columns[name] = pa.array(map(attrgetter(name), quotas), VERDICT.field(name).type).take(at)
    verdicts = pa.StructArray.from_arrays([columns[field.name] for field in VERDICT], fields=list(VERDICT))
    return pa.ListArray.from_arrays(_numbers(ends, pa.int32()), verdicts)


class _Chosen:
    """For each verdict, the digests with this mark; null for a verdict that counts no ids."""

    def __init__(self) -> None:
        self._digests = array("q")
        self._ends = array("i", [0])
        self._null: list[bool] = []

    def choose(self, mark: int, marks: bytes | None, digests: array[int], first: int) -> None:
        if marks and mark in marks:  # few: an id is charged once, and refreshed once per layer
            self._digests.extend(digests[first + at] for at, found in enumerate(marks) if found == mark)
        self._ends.append(len(self._digests))
        self._null.append(marks is None)

    def column(self) -> pa.Array:
        null = pa.array(self._null, pa.bool_())
        values = _numbers(self._digests, pa.int64())
        return pa.ListArray.from_arrays(_numbers(self._ends, pa.int32()), values, type=_DIGESTS, mask=null)


def _numbers(numbers: array[int], kind: pa.DataType) -> pa.Array:
    """Numbers as a column, without a copy."""
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])
