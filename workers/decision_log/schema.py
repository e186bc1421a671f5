"""The files of the decision log: their Arrow schema, their names, and how a reader checks them.

    LOG_URL/date=2026-11-21/hour=09/NAME.parquet       rows of that hour (UTC, of ``at_ms``)
    LOG_URL/date=2026-11-21/hour=09/_NAME.parquet      a file being written; readers skip it

Several files may hold the same row: if a writer ends after it wrote rows and before it acknowledged them, the
next one writes them again. Rows with the same ``IDENTITY`` are one row.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa
from pyarrow import fs
from pyarrow import parquet as pq

from app.decision_log import columns

VERSION: Final = columns.VERSION
OLDEST: Final = columns.OLDEST

VERSION_KEY: Final = b"quotagate.schema"
"""The key of a file's metadata that holds the version of its columns."""

SECRETS_KEY: Final = b"quotagate.secrets"
"""The key of the fingerprints of the secrets that made the digests, as JSON; older files have none."""

ADDED: Final = {
    name: column.since for name, column in columns.by_name().items() if column.since > columns.OLDEST
}
"""The version that added each column or struct field (``verdicts.NAME``); all others are from ``OLDEST``."""


def _arrow(type_: columns.Type) -> pa.DataType:
    if isinstance(type_, str):
        return pa.type_for_alias(type_)
    if isinstance(type_, columns.ListOf):
        return pa.list_(_arrow(type_.item))
    if isinstance(type_, columns.MapOf):
        return pa.map_(_arrow(type_.key), _arrow(type_.value))
    return pa.struct(list(map(_field, type_)))


def _field(column: columns.Column) -> pa.Field:
    return pa.field(column.name, _arrow(column.type), nullable=column.nullable)


VERDICT: Final = _arrow(columns.VERDICT)
LIMITED_BY: Final = _arrow(columns.LIMITED_BY)
CHANGE: Final = _arrow(columns.CHANGE)
SIBLING: Final = _arrow(columns.SIBLING)
SCHEMA: Final = pa.schema(list(map(_field, columns.COLUMNS)), metadata={VERSION_KEY: str(VERSION).encode()})

IDENTITY: Final = ("batch", "place")
"""Rows that agree in these columns are one row."""

SUFFIX: Final = ".parquet"
MERGED: Final = "merged-"
"""The beginning of the name of a file that was merged from others."""

HOLDS: Final = b"quotagate.holds"
"""The metadata key under which a merged file lists the names of its sources, as JSON."""

HOUR_MS: Final = 3_600_000
_LAST_HOUR: Final = int(datetime(9999, 12, 31, 23, tzinfo=UTC).timestamp()) * 1000 // HOUR_MS
_PARTITION: Final = re.compile(r"date=(\d{4}-\d\d-\d\d)/hour=(\d\d)")


class BadFileError(ValueError):
    """A file is not valid in the decision log; the text names the file, the field and the expected value."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {' '.join(why.split())}")
        self.path = path


def texts_of(path: str, metadata: Mapping[bytes, bytes] | None, key: bytes, what: str) -> list[str]:
    """The texts under a key of a file's metadata, stored as JSON; empty if there is no such key.

    Raises:
        BadFileError: the key holds something else.
    """
    try:
        said = json.loads((metadata or {}).get(key, b"[]"))
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, list) or not all(isinstance(each, str) for each in said):
        raise BadFileError(path, f"metadata {key.decode()}: must be {what}, as JSON")
    return said


def with_secrets(schema: pa.Schema, secrets: Iterable[str]) -> pa.Schema:
    """A schema with the fingerprints of these secrets in its metadata, if there are any."""
    if not (said := sorted(secrets)):
        return schema
    return schema.with_metadata({**(schema.metadata or {}), SECRETS_KEY: json.dumps(said).encode()})


def secrets_of(path: str, metadata: Mapping[bytes, bytes] | None) -> frozenset[str]:
    """The fingerprints in a file's metadata; empty for a file of an older version.

    Raises:
        BadFileError: the key holds something else.
    """
    return frozenset(texts_of(path, metadata, SECRETS_KEY, "fingerprints of secrets"))


def held_by(path: str, said: pq.FileMetaData) -> set[str]:
    """The names of the files that a file was merged from; empty for any other file.

    Raises:
        BadFileError: its metadata has something other than names there.
    """
    return set(texts_of(path, said.metadata, HOLDS, "the names of files"))


def partition(at_ms: int) -> str:
    """The partition of a row with this time.

    >>> partition(1_763_719_742_123)
    'date=2025-11-21/hour=10'
    """
    hour = min(max(at_ms // HOUR_MS, 0), _LAST_HOUR)
    return f"{datetime.fromtimestamp(hour * HOUR_MS / 1000, UTC):date=%Y-%m-%d/hour=%H}"


def hour_of(path: str) -> int | None:
    """When the hour of a path's partition begins, in milliseconds; None if the path has no partition.

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
    """The metadata of a file, checked to be of a readable version and to have every column.

    Args:
        filesystem: where the path is; by default the local one.

    Raises:
        BadFileError: it is of another version, or lacks a column.
        FileNotFoundError: it is gone: files are merged, and old ones are removed.
    """
    with blaming(path, "cannot be read as Parquet"), pq.ParquetFile(path, filesystem=filesystem) as file:
        check(path, file.schema_arrow)
        return file.metadata


@contextlib.contextmanager
def blaming(path: str, why: str = "cannot be read") -> Iterator[None]:
    """Turn any error within the block into a BadFileError that names the file, unless the file is gone.

    Raises:
        BadFileError: for any of the many types that Arrow raises, among them plain ValueErrors.
    """
    try:
        yield
    except (FileNotFoundError, BadFileError):
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadFileError(path, f"{why}: {error}") from error


def check(path: str, schema: pa.Schema) -> None:
    """Refuse a file of an unsupported version, or without the columns of its version.

    Raises:
        BadFileError: it is too new, too old or without a version, or a column is missing or of another type.
    """
    said = (schema.metadata or {}).get(VERSION_KEY)
    field = f"metadata {VERSION_KEY.decode()}"
    if said is None or not re.fullmatch(rb"[0-9]{1,9}", said):
        raise BadFileError(path, f"{field}: must be the version, so this is no file of the decision log")
    version = int(said)
    if version > VERSION:
        raise BadFileError(
            path, f"{field}: {version} is newer than {VERSION}; read it with a newer Quotagate"
        )
    if version < OLDEST:
        raise BadFileError(path, f"{field}: {version} is older than {OLDEST}, and not read any more")
    for column in SCHEMA:
        place = schema.get_field_index(column.name)
        if place < 0:
            if ADDED.get(column.name, OLDEST) > version:
                continue
            raise BadFileError(path, f"column {column.name}: is missing")
        found = schema.field(place).type
        if not found.equals(_then(column, version)) and not found.equals(column.type):
            raise BadFileError(path, f"column {column.name}: is {found}, must be {column.type}")


def columns_of(schema: pa.Schema) -> list[str]:
    """The columns of the log that a file has, in the log's order; an older file lacks some."""
    return [name for name in SCHEMA.names if name in schema.names]


def as_now(rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """Rows of any supported version with the columns of the newest; missing columns are null."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    for column in SCHEMA:
        if column.name not in table.schema.names:
            table = table.append_column(column, pa.nulls(table.num_rows, column.type))
    return table.select(SCHEMA.names).cast(SCHEMA)


def _then(column: pa.Field, version: int) -> pa.DataType:
    """The type that a column had in a version: a struct, or a list of structs, without fields added later."""
    type_ = column.type
    if pa.types.is_list(type_) and pa.types.is_struct(type_.value_type):
        return pa.list_(_then(column.with_type(type_.value_type), version))
    if not pa.types.is_struct(type_):
        return type_
    return pa.struct([each for each in type_ if ADDED.get(f"{column.name}.{each.name}", OLDEST) <= version])
