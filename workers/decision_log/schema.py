"""The columns of the decision log at rest, their version, and the rules of reading: for writer and readers.

    LOG_URL/date=2026-11-21/hour=09/NAME.parquet       rows of that hour (UTC, of ``at_ms``)
    LOG_URL/date=2026-11-21/hour=09/_NAME.parquet      one that is being written: not to be read

A row may stand in several files, as a writer that ended between writing and telling the store so writes it
again: rows with the same ``IDENTITY`` are one row.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa
from pyarrow import fs
from pyarrow import parquet as pq

VERSION: Final = 2
OLDEST: Final = 1
"""Files of these versions and of all between are read; what one lacks that came later is null in it."""

VERSION_KEY: Final = b"quotagate.schema"
"""Under this key of a file's metadata stands the version of its columns."""

ADDED: Final = {"batch_rows": 2, "siblings": 2, "verdicts.max_debt": 2}
"""The version that a column came with, or a field of a struct as ``verdicts.NAME``; all others are as old as
``OLDEST``. What is added can be null."""

VERDICT: Final = pa.struct(
    [
        pa.field("quota", pa.string(), nullable=False),
        pa.field("entity", pa.string(), nullable=False),
        pa.field("bucket", pa.string(), nullable=False),
        pa.field("limit", pa.float64(), nullable=False),
        pa.field("algorithm", pa.string(), nullable=False),
        pa.field("enforcement", pa.string(), nullable=False),  # by which this ask was decided
        pa.field("shadow", pa.bool_(), nullable=False),
        pa.field("scope", pa.string(), nullable=False),
        pa.field("samples", pa.int32(), nullable=False),
        pa.field("sample_ms", pa.int64(), nullable=False),
        pa.field("burst", pa.float64(), nullable=False),
        pa.field("window_ms", pa.int64(), nullable=False),
        pa.field("interval_ms", pa.int64(), nullable=False),
        pa.field("ttl_ms", pa.int64(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("usage", pa.float64(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("throttle_ms", pa.int64(), nullable=False),
        pa.field("observed", pa.float64()),
        pa.field("remaining", pa.float64()),
        pa.field("reason", pa.string()),
        pa.field("correction", pa.int8(), nullable=False),
        pa.field("charged_ids", pa.list_(pa.int64())),  # digests; null unless the quota counts ids
        pa.field("refreshed_ids", pa.list_(pa.int64())),
        pa.field("max_debt", pa.float64()),  # of a token bucket, how far below 0 it may fall; null is no end
    ]
)

LIMITED_BY: Final = pa.struct(
    [
        pa.field("quota", pa.string(), nullable=False),
        pa.field("entity", pa.string()),
        pa.field("bucket", pa.string()),
        pa.field("reason", pa.string()),
    ]
)

CHANGE: Final = pa.struct(
    [
        pa.field("what", pa.string(), nullable=False),
        pa.field("before", pa.string()),  # JSON
        pa.field("after", pa.string()),
        pa.field("who", pa.string()),
        pa.field("version", pa.int64()),
    ]
)

SIBLING: Final = pa.struct(
    [
        pa.field("node", pa.string(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),  # of its newest batch in the stream
        pa.field("at_ms", pa.int64(), nullable=False),  # when it left that one there
    ]
)

SCHEMA: Final = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),  # app/store/decision_log.py says which there are
        pa.field("batch", pa.string(), nullable=False),  # with place: the same row twice is one row
        pa.field("place", pa.int32(), nullable=False),
        pa.field("node", pa.string(), nullable=False),
        pa.field("at_ms", pa.int64(), nullable=False),
        pa.field("order", pa.int64()),  # among all that the store decided; null if it was not asked
        pa.field("principal", pa.string()),
        pa.field("client_id", pa.string()),
        pa.field("ip", pa.string()),
        pa.field("broker", pa.string()),
        pa.field("listener", pa.string()),
        pa.field("mode", pa.string()),
        pa.field("deny", pa.bool_(), nullable=False),
        pa.field("recheck", pa.bool_(), nullable=False),
        pa.field("cluster_action", pa.bool_(), nullable=False),
        pa.field("usage", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("ids", pa.list_(pa.int64())),  # digests as signed integers (big-endian); null without ids
        pa.field("plain_ids", pa.list_(pa.string())),
        pa.field("decision", pa.string()),
        pa.field("throttle_ms", pa.int64(), nullable=False),
        pa.field("charged", pa.bool_(), nullable=False),
        pa.field("applied", pa.int32(), nullable=False),
        pa.field("source", pa.string()),
        pa.field("replayed", pa.bool_(), nullable=False),
        pa.field("failure", pa.string()),
        pa.field("limited_by", LIMITED_BY),
        pa.field("verdicts", pa.list_(VERDICT)),
        pa.field("change", CHANGE),
        pa.field("batch_rows", pa.int32()),  # how many rows the batch has, so that one which is missing shows
        pa.field("siblings", pa.list_(SIBLING)),  # the other nodes, as this one knew them; in place 0 alone
    ],
    metadata={VERSION_KEY: str(VERSION).encode()},
)

IDENTITY: Final = ("batch", "place")
"""The columns by which two rows are one and the same."""

SUFFIX: Final = ".parquet"
HOUR_MS: Final = 3_600_000
_LAST_HOUR: Final = int(datetime(9999, 12, 31, 23, tzinfo=UTC).timestamp()) * 1000 // HOUR_MS
_PARTITION: Final = re.compile(r"date=(\d{4}-\d\d-\d\d)/hour=(\d\d)")


class BadFile(ValueError):
    """A file that is none of the decision log; says which one, the field, and what would be right."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {' '.join(why.split())}")
        self.path = path


def texts_of(path: str, metadata: Mapping[bytes, bytes] | None, key: bytes, what: str) -> list[str]:
    """The texts that a file's metadata has under a key, as JSON; none where it has no such key.

    Raises:
        BadFile: something else stands there.
    """
    try:
        said = json.loads((metadata or {}).get(key, b"[]"))
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, list) or not all(isinstance(each, str) for each in said):
        raise BadFile(path, f"metadata {key.decode()}: must be {what}, as JSON")
    return said


def partition(at_ms: int) -> str:
    """Where the rows of this time lie.

    >>> partition(1_763_719_742_123)
    'date=2025-11-21/hour=10'
    """
    hour = min(max(at_ms // HOUR_MS, 0), _LAST_HOUR)
    return f"{datetime.fromtimestamp(hour * HOUR_MS / 1000, UTC):date=%Y-%m-%d/hour=%H}"


def hour_of(path: str) -> int | None:
    """When the hour begins of whose partition a path tells, in milliseconds; None if it tells of none.

    >>> hour_of("log/date=2025-11-21/hour=10/a.parquet"), hour_of("log/_unreadable/1-0.batch")
    (1763719200000, None)
    """
    found = _PARTITION.search(path)
    if found is None:
        return None
    try:
        return round(datetime.fromisoformat(f"{found[1]}T{found[2]}:00:00+00:00").timestamp() * 1000)
    except ValueError:
        return None


def readable(name: str) -> bool:
    """Whether a file of this name holds rows, and is no longer being written."""
    return name.endswith(SUFFIX) and not name.startswith(("_", "."))


def footer(path: str, filesystem: fs.FileSystem | None = None) -> pq.FileMetaData:
    """What a file says of itself, once it is known to be of this version and to have every column.

    Args:
        filesystem: where the path is; the machine's own, if it is not said.

    Raises:
        BadFile: it is not.
        FileNotFoundError: it is gone: files are merged, and removed once they are too old.
    """
    with blaming(path, "cannot be read as Parquet"), pq.ParquetFile(path, filesystem=filesystem) as file:
        check(path, file.schema_arrow)
        return file.metadata


@contextlib.contextmanager
def blaming(path: str, why: str = "cannot be read") -> Iterator[None]:
    """Let whatever goes wrong be the fault of one file, unless that is gone.

    Raises:
        BadFile: something went wrong; Arrow has many ways to say so, and plain ValueErrors among them.
    """
    try:
        yield
    except (FileNotFoundError, BadFile):
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadFile(path, f"{why}: {error}") from error


def check(path: str, schema: pa.Schema) -> None:
    """Refuse a file whose columns are not those of its version, or whose version is not read.

    Raises:
        BadFile: a newer or too old a version, none, or a column that is missing or of another type.
    """
    said = (schema.metadata or {}).get(VERSION_KEY)
    field = f"metadata {VERSION_KEY.decode()}"
    if said is None or not re.fullmatch(rb"[0-9]{1,9}", said):
        raise BadFile(path, f"{field}: must be the version, so this is no file of the decision log")
    version = int(said)
    if version > VERSION:
        raise BadFile(path, f"{field}: {version} is newer than {VERSION}; read it with a newer Quotagate")
    if version < OLDEST:
        raise BadFile(path, f"{field}: {version} is older than {OLDEST}, and not read any more")
    for column in SCHEMA:
        place = schema.get_field_index(column.name)
        if place < 0:
            if ADDED.get(column.name, OLDEST) > version:
                continue
            raise BadFile(path, f"column {column.name}: is missing")
        found = schema.field(place).type
        if not found.equals(_then(column, version)) and not found.equals(column.type):
            raise BadFile(path, f"column {column.name}: is {found}, must be {column.type}")


def columns_of(schema: pa.Schema) -> list[str]:
    """The columns of ours that a file has, in our order; one of an older version lacks some."""
    return [name for name in SCHEMA.names if name in schema.names]


def as_now(rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """Rows of a version that is read, with the columns of this one: what they lack is null."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    for column in SCHEMA:
        if column.name not in table.schema.names:
            table = table.append_column(column, pa.nulls(table.num_rows, column.type))
    return table.select(SCHEMA.names).cast(SCHEMA)


def _then(column: pa.Field, version: int) -> pa.DataType:
    """The type that a column had in a version: of a struct, or a list of them, what was added is left out."""
    type_ = column.type
    if pa.types.is_list(type_) and pa.types.is_struct(type_.value_type):
        return pa.list_(_then(column.with_type(type_.value_type), version))
    if not pa.types.is_struct(type_):
        return type_
    return pa.struct([each for each in type_ if ADDED.get(f"{column.name}.{each.name}", OLDEST) <= version])
