"""The verdicts of the decision log, narrow and by bucket: the rows that jobs move, sort and replay.

``verdicts_of`` makes them of the log's rows, a row group at a time. Each quota, as it applied, is one packed
value of a dictionary column, so a verdict is about 100 bytes. ``VerdictPartition`` sorts the verdicts of a
partition and gives each bucket's rows in the store's order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import mmh3
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import msgpack
from numpy.typing import NDArray

from app.decision_log import columns
from app.domain.decision import BYTE_RATES
from app.domain.quota import PRODUCER_IDS_RATE, Quota

DIGEST_BYTES: Final = 8
ORDERS_PER_MS: Final = 128 * 1_000
"""The order of a call is the store's time in microseconds, or later, times 128 (docs/decisions, 0033)."""

VERDICTS_OF_A_DECISION: Final = 3
"""A guess at the number, to choose the number of partitions."""

_LARGE: Final = 4_096
ROWS_OF_A_CHUNK: Final = 16_384
"""How many verdicts are in memory as Python's values at a time."""

_SHIFT: Final = np.uint64(29)

Orders = dict[tuple[str, str], list[int]]
"""Places in the store's order, by bucket name and quota key."""

Flags = NDArray[np.bool_]

QUOTA_COLUMNS: Final = tuple(name for name in columns.QUOTA if name not in {"entity", "bucket"})
KEY_COLUMNS: Final = ("quota", "bucket", "algorithm", "samples", "sample_ms", "scope", "epoch")
COUNTING: Final = ("unanswered", "answered_late")
"""Values of ``how`` of rows that are no verdicts of the store, but tell how many charges the log may lack:

- unanswered: a decision without the store, whose call may have charged the bucket
- answered_late: the store's answer to such a call
"""


class BucketRow(NamedTuple):
    """One verdict, and the fields of the ask that its bucket needs.

    Attributes:
        key: identifies the bucket; it changes when a change of the quota starts an empty bucket.
        is_refused: the ask was refused, by this quota or another: nothing was charged.
        byte_delay_ms: the largest delay that a byte rate gave to the same ask.
        ids: the ask's producer ids as signed integers; None for other quotas.
        how: ``alone`` if the node decided from known ids, and ``renewal`` if it wrote known ids again;
            ``lease`` if the usage is held, and ``settlement`` if it was spent of a lease; ``undone`` if the
            charge was taken back later, and ``undo`` if this row takes one back; else empty.
        lease, lease_ms: the name of that lease, and how long it lasts.
    """

    key: str
    how: str
    order: int
    at_ms: int
    principal: str | None
    mode: str
    recheck: bool
    is_refused: bool
    byte_delay_ms: int
    lease: str | None
    lease_ms: int | None
    ids: list[int] | None
    quota: str
    bucket: str
    entity: str
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
    max_debt: float | None
    usage: float
    outcome: str
    throttle_ms: int
    observed: float | None
    remaining: float | None
    reason: str | None
    correction: int
    charged_ids: list[int] | None
    refreshed_ids: list[int] | None
    bucket_order: int | None

    @property
    def is_charged(self) -> bool:
        """Whether the usage was charged."""
        return self.mode in {"admit", "record"} and not self.is_refused

    def as_quota(self) -> Quota:
        """The quota as it applied to this ask."""
        return _quota(_quota_values(self))


def digests_of(ids: Sequence[int] | None) -> tuple[bytes, ...]:
    """The digests that the log holds as signed integers."""
    return tuple(each.to_bytes(DIGEST_BYTES, "big", signed=True) for each in ids or ())


APPLIED: Final = BucketRow._fields[BucketRow._fields.index("quota") : BucketRow._fields.index("usage")]
"""The fields of a row that describe its quota as it applied, in the order of a packed quota."""

_quota_values = attrgetter(*QUOTA_COLUMNS)
_of_applied = itemgetter(*(APPLIED.index(name) for name in QUOTA_COLUMNS))


@lru_cache(_LARGE)
def _quota(values: tuple[Any, ...]) -> Quota:
    return columns.as_quota(dict(zip(QUOTA_COLUMNS, values, strict=True)))


def _quota_of(applied: tuple[Any, ...]) -> Quota:
    return _quota(_of_applied(applied))


SCHEMA: Final = pa.schema(
    [
        ("applied", pa.dictionary(pa.int32(), pa.binary())),
        ("how", pa.dictionary(pa.int32(), pa.string())),
        ("order", pa.int64()),
        ("at_ms", pa.int64()),
        ("principal", pa.dictionary(pa.int32(), pa.string())),
        ("node", pa.dictionary(pa.int32(), pa.string())),
        ("mode", pa.dictionary(pa.int32(), pa.string())),
        ("recheck", pa.bool_()),
        ("is_refused", pa.bool_()),
        ("by_store", pa.bool_()),
        ("byte_delay_ms", pa.int64()),
        ("lease", pa.string()),
        ("lease_ms", pa.int64()),
        ("ids", pa.list_(pa.int64())),
        ("usage", pa.float64()),
        ("outcome", pa.dictionary(pa.int32(), pa.string())),
        ("throttle_ms", pa.int64()),
        ("observed", pa.float64()),
        ("remaining", pa.float64()),
        ("reason", pa.dictionary(pa.int32(), pa.string())),
        ("correction", pa.int8()),
        ("charged_ids", pa.list_(pa.int64())),
        ("refreshed_ids", pa.list_(pa.int64())),
        ("bucket_order", pa.int64()),
    ]
)
"""A verdict of the store or of a node, and the fields of its ask that its bucket needs.

``applied`` packs the fields ``APPLIED``; ``by_store`` says that the row is a new decision of the store, whose
limit must have been in force. The other columns are the fields of ``BucketRow``.
"""

TYPES: Final = tuple(zip(SCHEMA.names, SCHEMA.types, strict=True))
OF_ASK: Final = BucketRow._fields[1 : BucketRow._fields.index("quota")]
OF_VERDICT: Final = BucketRow._fields[BucketRow._fields.index("usage") :]
"""The fields of a row before and after the fields of its quota; the first field is the key."""

NAMED: Final = ("renewal", "lease", "settlement", "undone", "undo")
"""The kinds of rows that name how a bucket was written."""

LEASED: Final = ("lease", "settlement")
KINDS: Final = ("decision", "late", "ids", *NAMED)
CHARGING: Final = ("admit", "record")


class LogRows:
    """Rows of the log, and their verdicts, by column; a column that an older file lacks is null."""

    def __init__(self, table: pa.Table) -> None:
        self.count = table.num_rows
        self.table = table
        self._fields: dict[str, pa.Array] = {}

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """How many verdicts each row has."""
        return integers(pc.list_value_length(self.column("verdicts")))

    @cached_property
    def of_row(self) -> NDArray[np.int64]:
        """For each verdict, the place of its row."""
        return np.repeat(np.arange(self.count), self.sizes)

    @cached_property
    def _verdicts(self) -> pa.Array:
        return self.column("verdicts").flatten()

    def where(self, keeps: Flags) -> LogRows:
        """Some of the rows."""
        return self if keeps.all() else LogRows(self.table.filter(pa.array(keeps)))

    def column(self, name: str) -> pa.Array:
        """A column."""
        if name not in self.table.schema.names:
            return pa.nulls(self.count)
        column = self.table.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def verdict(self, name: str) -> pa.Array:
        """A field of the verdicts; texts are dictionaries."""
        if name not in self._fields:
            place = self._verdicts.type.get_field_index(name)
            field = self._verdicts.field(place) if place >= 0 else pa.nulls(len(self._verdicts))
            self._fields[name] = field.dictionary_encode() if pa.types.is_string(field.type) else field
        return self._fields[name]

    @cached_property
    def by_store(self) -> Flags:
        """True for each row with a new decision of the store, which has a place in the store's order."""
        return (
            among(self.column("kind"), "decision")
            & among(self.column("source"), "store")
            & valid(self.column("order"))
            & ~flags(self.column("replayed"))
        )

    @cached_property
    def without_store(self) -> Flags:
        """True for each row with a decision without the store; its failed call may have charged buckets."""
        is_decision = among(self.column("kind"), "decision")
        return is_decision & among(self.column("source"), "fallback") & ~valid(self.column("order"))


def among(column: pa.Array, *values: str) -> Flags:
    """Whether each text of a dictionary is among some; null is not."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), bool)
    found = np.zeros(len(column.dictionary) + 1, bool)
    found[:-1] = [each in values for each in column.dictionary.to_pylist()]
    return found[integers(column.indices, -1)]


def valid(column: pa.Array) -> Flags:
    """Whether each value is not null."""
    return flags(column.is_valid())


def integers(column: pa.Array, null: int = 0) -> NDArray[np.int64]:
    """The numbers of a column, with a number in place of null."""
    if column.null_count or pa.types.is_null(column.type):
        column = column.cast(pa.int64()).fill_null(null)
    return np.from_dlpack(column).astype(np.int64, copy=False)


def numbers(column: pa.Array) -> NDArray[np.float64]:
    """The numbers of a column, with 0 in place of null."""
    if column.null_count or pa.types.is_null(column.type):
        column = column.cast(pa.float64()).fill_null(0.0)
    return np.from_dlpack(column).astype(np.float64, copy=False)


def flags(column: pa.Array) -> Flags:
    """The truth of each value of a column; null is not true."""
    return np.from_dlpack(column.cast(pa.uint8()).fill_null(0)).view(np.bool_)


def values(column: pa.Array) -> list[Any]:
    """The values of a column as Python's; much faster than ``to_pylist`` for texts, numbers and lists."""
    if pa.types.is_dictionary(column.type):
        texts = [*column.dictionary.to_pylist(), None]
        return [texts[place] for place in integers(column.indices, -1).tolist()]
    if pa.types.is_list(column.type):
        flat = values(column.flatten())
        sizes = pc.list_value_length(column).to_pylist()
        ends = np.cumsum([size or 0 for size in sizes]).tolist()
        return [
            None if size is None else flat[end - size : end] for size, end in zip(sizes, ends, strict=True)
        ]
    if column.null_count == len(column):
        return [None] * len(column)
    if pa.types.is_string(column.type):
        return list(column.to_pylist())
    found: list[Any] = (
        flags(column) if pa.types.is_boolean(column.type) else _without_nulls(column)
    ).tolist()
    if column.null_count:
        for place in np.flatnonzero(~valid(column)).tolist():
            found[place] = None
    return found


def _without_nulls(column: pa.Array) -> NDArray[Any]:
    return np.from_dlpack(column.fill_null(0) if column.null_count else column)


def verdicts_of(rows: LogRows) -> pa.Table:
    """The verdicts in rows of the log, as ``SCHEMA`` has them.

    They are the verdicts that the store gave: of decisions, ``late`` ones, leases and settlements, charges
    that were taken back, renewals, and the ids of asks that are not logged themselves (kind ``ids``).
    Verdicts that a node gave from known ids are placed by their time. Answers repeated to a retry are left
    out, and so are verdicts that a full store neither decided nor charged. Rows of ``COUNTING`` come last.
    """
    kind, order, at_ms = rows.column("kind"), rows.column("order"), integers(rows.column("at_ms"))
    own_order = rows.verdict("bucket_order")
    full = among(rows.verdict("reason"), "store_full")
    counts_ids = among(rows.verdict("algorithm"), "producer_ids")
    of_row = rows.of_row
    # In several slots of a cluster each verdict has its own place. A verdict without a place was not given by
    # the store, comes from a `look`, or has a row of its own because its charge was taken back.
    has_own = valid(own_order)
    in_part = np.zeros(rows.count, bool)
    in_part[of_row[has_own]] = True
    by_store = among(rows.column("source"), "store") | among(rows.column("failure"), "store_full") | in_part
    decided = valid(order) & by_store & ~flags(rows.column("replayed"))
    written = (among(kind, *KINDS) & decided) | _answered_alone(rows, counts_ids)
    given = written[of_row] & (has_own | ~in_part[of_row]) & ~full
    is_alone = among(kind, "decision", "late")[of_row] & counts_ids & ~valid(rows.verdict("observed"))

    charging = among(rows.column("mode"), *CHARGING)
    groups = {
        **{name: given & among(kind, name)[of_row] for name in NAMED},
        "alone": given & is_alone,
        "": given & ~is_alone & among(kind, "decision", "late", "ids")[of_row],
        "unanswered": (rows.without_store & charging)[of_row],
        "answered_late": (among(kind, "late") & charging)[of_row],
    }
    places = [np.flatnonzero(group) for group in groups.values()]
    chosen = np.concatenate(places)
    row = of_row[chosen]
    # without the store: after everything that the node can have known at that time
    placed = np.where(valid(order), integers(order), (at_ms + 1) * ORDERS_PER_MS - 1)[row]
    hows = np.repeat(np.arange(len(groups), dtype=np.int32), [len(each) for each in places])
    refused = among(rows.column("decision"), "throttle", "reject")
    fields = {
        "applied": _applied(rows, chosen),
        "how": pa.DictionaryArray.from_arrays(hows, list(groups)),
        "order": pa.array(np.where(has_own[chosen], integers(own_order)[chosen], placed)),
        "ids": rows.column("ids").take(pa.array(row, mask=~counts_ids[chosen])),
        **{name: rows.verdict(name).take(pa.array(chosen)) for name in OF_VERDICT},
    }
    of_rows = {
        "mode": rows.column("mode").fill_null("admit"),
        "is_refused": refused | (among(kind, "lease") & among(rows.column("source"), "fallback")),
        "by_store": rows.by_store,
        "byte_delay_ms": _byte_delays(rows, full),
        **{name: pc.struct_field(_leases(rows), name) for name in ("lease", "lease_ms")},
        **{name: rows.column(name) for name in ("at_ms", "principal", "node", "recheck")},
    }
    fields |= {name: pa.array(each).take(pa.array(row)) for name, each in of_rows.items()}
    return pa.Table.from_arrays([fields[name].cast(type_) for name, type_ in TYPES], schema=SCHEMA)


def _answered_alone(rows: LogRows, counts_ids: Flags) -> Flags:
    """True for each row that a node decided from known producer ids, without asking the store at all.

    The throttle factor also decides asks without the store, but it is no quota of ids.
    """
    limited_by = pc.struct_field(rows.column("limited_by"), "quota").dictionary_encode()
    by_ids: Flags = ~valid(limited_by) | among(limited_by, PRODUCER_IDS_RATE)
    only_ids: Flags = np.zeros(rows.count, bool)
    only_ids[rows.of_row[counts_ids]] = True
    is_local = among(rows.column("kind"), "decision") & among(rows.column("source"), "local")
    alone: Flags = is_local & (rows.sizes == 1) & only_ids & by_ids
    return alone


def _leases(rows: LogRows) -> pa.Array:
    """The name of the lease of each row, and how long it lasts; null in other rows."""
    found: list[dict[str, object] | None] = [None] * rows.count
    change = rows.column("change")
    for place in np.flatnonzero(among(rows.column("kind"), *LEASED)).tolist():
        said = change[place].as_py()
        if said is not None:
            found[place] = {"lease": said["what"], "lease_ms": lease_ms_of(said["after"])}
    return pa.array(found, pa.struct([("lease", pa.string()), ("lease_ms", pa.int64())]))


def lease_ms_of(after: str | None) -> int | None:
    """How long the lease of a row lasts."""
    with suppress(TypeError, ValueError, KeyError, RecursionError):
        lease_ms = json.loads(after or "")["lease_ms"]
        return lease_ms if isinstance(lease_ms, int) and abs(lease_ms) < 2**63 else None
    return None


def named_quotas(text: str | None) -> list[str]:
    """The quota keys that a reset or a load of a bucket names."""
    with suppress(TypeError, ValueError, KeyError, RecursionError):
        return [quota for quota in json.loads(text or "")["quotas"] if isinstance(quota, str)]
    return []


def _byte_delays(rows: LogRows, full: Flags) -> NDArray[np.int64]:
    """The largest delay of the byte rates of each row: KIP-124 measures requests after it."""
    is_delay = among(rows.verdict("quota"), *BYTE_RATES) & among(rows.verdict("outcome"), "delay")
    places = np.flatnonzero(is_delay & ~flags(rows.verdict("shadow")) & ~full)
    largest = np.zeros(rows.count, np.int64)
    np.maximum.at(largest, rows.of_row[places], integers(rows.verdict("throttle_ms"))[places])
    return largest


def _applied(rows: LogRows, chosen: NDArray[np.int64]) -> pa.Array:
    """The quota of each of some verdicts, packed."""
    fields = [rows.verdict(name).take(pa.array(chosen)) for name in APPLIED]
    first, which = distinct([_codes(field) for field in fields])
    values = zip(*(field.take(pa.array(first)).to_pylist() for field in fields), strict=True)
    packed = pa.array(map(msgpack.encode, values), pa.binary())
    return pa.DictionaryArray.from_arrays(pa.array(which, pa.int32()), packed)


def _codes(column: pa.Array) -> NDArray[np.int64]:
    """A number for each value of a column; equal values have equal numbers."""
    if pa.types.is_dictionary(column.type):
        return integers(column.indices, -1)
    if pa.types.is_floating(column.type):
        numbers = np.from_dlpack(column.fill_null(np.nan)).astype(np.float64)  # a null is NaN: no limit is
        return numbers.view(np.int64)
    return integers(column.cast(pa.int64()), -1)


def distinct(codes: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct combinations of some numbers: where each occurs first, and which one each row has.

    Combinations are found by a hash of 64 bits, and then compared, so that no two count as one.
    """
    random = np.random.default_rng()
    while True:
        mixed = np.zeros(len(codes[0]), np.uint64)
        for code, factor in zip(codes, random.integers(2**64, size=len(codes), dtype=np.uint64), strict=True):
            mixed = (mixed ^ code.view(np.uint64)) * (factor | np.uint64(1))
            mixed ^= mixed >> _SHIFT
        encoded = pa.array(mixed).dictionary_encode()
        which = integers(encoded.indices)
        first = np.zeros(len(encoded.dictionary), np.int64)
        first[which[::-1]] = np.arange(len(which))[::-1]
        if all((code == code[first][which]).all() for code in codes):
            return first, which


def partitioned(verdicts: pa.Table, partitions: int) -> list[pa.Table]:
    """The verdicts of each partition; all verdicts of one bucket and quota are in one of them."""
    applied = verdicts.column("applied").combine_chunks()
    homes = [_home(packed, partitions) for packed in applied.dictionary.to_pylist()]
    return placed(verdicts, np.array(homes, np.int64)[integers(applied.indices)], partitions)


def placed(rows: pa.Table, home: NDArray[np.int64], partitions: int) -> list[pa.Table]:
    """The rows of each partition, given the partition of each row."""
    order = np.argsort(home, kind="stable")
    ends = np.searchsorted(home[order], np.arange(partitions + 1))
    in_order = rows.take(pa.array(order))
    return [in_order.slice(begin, end - begin) for begin, end in pairwise(ends)]


def quotas_of(applied: pa.DictionaryArray) -> list[dict[str, Any]]:
    """The fields ``APPLIED`` of each quota in the dictionary of a column ``applied``."""
    return [
        dict(zip(APPLIED, msgpack.decode(packed), strict=True)) for packed in applied.dictionary.to_pylist()
    ]


def _home(packed: bytes, partitions: int) -> int:
    quota, bucket, *_ = msgpack.decode(packed)
    return partition_of(quota, bucket, partitions)


def partition_of(quota: str, bucket: str, partitions: int) -> int:
    """The partition of a bucket."""
    return int(mmh3.hash(f"{quota}\t{bucket}", signed=False)) % partitions


class BucketVerdicts(NamedTuple):
    """The verdicts of one bucket, in the store's order.

    Attributes:
        key: identifies it; it changes when a change of the quota starts an empty bucket.
        begin, end: the places of its verdicts in the partition.
    """

    quota: str
    bucket: str
    key: str
    begin: int
    end: int
    partition: VerdictPartition

    def pieces(self, names: Iterable[str]) -> Iterator[dict[str, list[Any]]]:
        """Some columns of its verdicts as lists, a piece at a time; ``applied`` has numbers."""
        at = self.begin
        while at < self.end:
            chunk, inside = divmod(at, ROWS_OF_A_CHUNK)
            end = min(self.end - at + inside, ROWS_OF_A_CHUNK)
            columns = self.partition.chunk(chunk)
            yield {name: columns[name][inside:end] for name in names}
            at += end - inside

    def part(self, begin: int, end: int) -> BucketVerdicts:
        """Some of its verdicts, by their places in the partition."""
        return self._replace(begin=begin, end=end)

    def rows(self) -> Iterator[BucketRow]:
        """The verdicts of the bucket, one after the other."""
        applied = self.partition.applied
        for piece in self.pieces(("applied", *OF_ASK, *OF_VERDICT)):
            asks = zip(*(piece[name] for name in OF_ASK), strict=True)
            verdicts = zip(*(piece[name] for name in OF_VERDICT), strict=True)
            for ask, quota, verdict in zip(asks, piece["applied"], verdicts, strict=True):
                yield BucketRow._make((self.key, *ask, *applied[quota], *verdict))


class Chunk(dict[str, list[Any]]):
    """Verdicts by column. A column becomes a list when it is read; ``applied`` then has numbers of quotas."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    def __missing__(self, name: str) -> list[Any]:
        column = self._rows.column(name).combine_chunks()
        self[name] = found = values(column.indices if name == "applied" else column)
        return found


class VerdictPartition:
    """The buckets of a partition.

    Args:
        pieces: the partition's part of every task's verdicts.

    Attributes:
        applied: the quotas as they applied, by the numbers in the column ``applied`` of a chunk.
        counting: the rows of ``COUNTING``.
    """

    def __init__(self, pieces: Iterable[pa.Table]) -> None:
        table = pa.concat_tables([SCHEMA.empty_table(), *pieces]).unify_dictionaries().combine_chunks()
        column = table.column("applied").combine_chunks()
        self.applied = [tuple(msgpack.decode(packed)) for packed in column.dictionary.to_pylist()]
        keys: dict[tuple[str, str, str], int] = {}
        key_of = np.array([keys.setdefault(_key(each), len(keys)) for each in self.applied], np.int64)
        number = key_of[integers(column.indices)]
        is_counting = among(table.column("how").combine_chunks(), *COUNTING)
        order = np.lexsort((integers(table.column("order").combine_chunks()), number, is_counting))
        verdicts = len(order) - int(is_counting.sum())
        self.counting = table.take(pa.array(order[verdicts:]))
        self._table = table.take(pa.array(order[:verdicts])).combine_chunks()
        self._keys = list(keys)
        self._ends = np.searchsorted(number[order[:verdicts]], np.arange(len(keys) + 1)).tolist()
        self._chunk = -1, Chunk(self._table.slice(0, 0))

    def __iter__(self) -> Iterator[BucketVerdicts]:
        for (quota, bucket, key), begin, end in zip(self._keys, self._ends, self._ends[1:], strict=False):
            if begin < end:
                yield BucketVerdicts(quota, bucket, key, begin, end, self)

    @cached_property
    def quotas(self) -> list[Quota]:
        """The quotas as they applied, by the numbers in the column ``applied`` of a chunk."""
        return [_quota_of(each) for each in self.applied]

    @cached_property
    def at_ms(self) -> NDArray[np.int64]:
        """The time of each verdict."""
        return integers(self._table.column("at_ms").combine_chunks())

    @cached_property
    def charges(self) -> Flags:
        """True for each verdict that charged its usage (``BucketRow.is_charged``)."""
        mode, is_refused = (self._table.column(name).combine_chunks() for name in ("mode", "is_refused"))
        return among(mode, *CHARGING) & ~flags(is_refused)

    def where(self, keeps: Flags) -> pa.Table:
        """Some of the verdicts, as ``SCHEMA``."""
        return self._table.filter(pa.array(keeps))

    def chunk(self, number: int) -> Chunk:
        """Some of the partition's verdicts; the last chunk is kept."""
        if self._chunk[0] != number:
            self._chunk = number, Chunk(self._table.slice(number * ROWS_OF_A_CHUNK, ROWS_OF_A_CHUNK))
        return self._chunk[1]


def _key(applied: tuple[Any, ...]) -> tuple[str, str, str]:
    """Quota key, bucket name, and the key of a bucket: both, and every field whose change resets the bucket.

    ``Quota.identity`` lists these fields: for producer ids they do not include the samples.
    """
    fields = dict(zip(APPLIED, applied, strict=True))
    if fields["algorithm"] == "producer_ids":
        fields |= {"samples": 0, "sample_ms": 0}
    return fields["quota"], fields["bucket"], "\t".join(str(fields[name]) for name in KEY_COLUMNS)
