"""A folder of assertions that a job wrote: checked as a whole before use, then read in parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs
from pyarrow import parquet as pq

from app.backfill.errors import InvalidAssertionsError
from app.domain.assertion import COLUMNS, KINDS, MANIFEST, NEEDED, VERSION, Assertion
from app.storage_location import InvalidLocationError, StorageLocation

ROWS_AT_ONCE: Final = 8_192
TYPES: Final = {"string": pa.string(), "bigint": pa.int64(), "double": pa.float64()}


@dataclass(frozen=True, slots=True)
class AssertionFolder:
    """A folder of assertions.

    Attributes:
        name: unique to the run of the job.
        at_ms: the time that the assertions are for.
        secret: the fingerprint of the secret that ids were hashed with, if the job knew it.
        files: the files in order, each with its number of rows.
    """

    filesystem: fs.FileSystem
    path: str
    name: str
    at_ms: int
    secret: str | None
    files: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> int:
        """The number of assertions."""
        return sum(rows for _, rows in self.files)

    @classmethod
    def open(cls, url: str) -> AssertionFolder:
        """Read the manifest and check that every file is there, complete and valid.

        Raises:
            InvalidAssertionsError: a file is not.
        """
        filesystem, path = _opened(url)
        manifest = _manifest(filesystem, path)
        try:
            files = tuple((str(file["name"]), int(file["rows"])) for file in manifest["files"])
            secret = None if manifest["secret"] is None else str(manifest["secret"])
            folder = cls(filesystem, path, str(manifest["name"]), int(manifest["at_ms"]), secret, files)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidAssertionsError(
                f"{path}/{MANIFEST}: {error!r}; write the assertions again"
            ) from None
        for file, rows in files:
            folder._check(file, rows)
        return folder

    def read(self, skip: int = 0) -> Iterator[list[Assertion]]:
        """Yield the assertions in order, in parts, without the first ``skip``."""
        for file, rows in self.files:
            if skip >= rows:
                skip -= rows
                continue
            for batch in self._batches(file):
                part = batch.slice(skip)
                skip = max(skip - batch.num_rows, 0)
                if part.num_rows:
                    columns = (part.column(name).to_pylist() for name in Assertion._fields)
                    yield [Assertion._make(row) for row in zip(*columns, strict=True)]

    def _check(self, file: str, rows: int) -> None:
        where = f"{self.path}/{file}"
        try:
            with pq.ParquetFile(where, filesystem=self.filesystem) as parquet:
                schema, rows_held = parquet.schema_arrow, parquet.metadata.num_rows
        except (OSError, pa.ArrowException) as error:
            raise InvalidAssertionsError(f"{where}: cannot be read as Parquet: {_line(error)}") from None
        for column, (type_, _) in COLUMNS.items():
            index = schema.get_field_index(column)
            if index < 0:
                raise InvalidAssertionsError(f"{where}: column {column}: is missing")
            if schema.field(index).type != TYPES[type_]:
                raise InvalidAssertionsError(
                    f"{where}: column {column}: is {schema.field(index).type}, must be {TYPES[type_]}"
                )
        if rows_held != rows:
            raise InvalidAssertionsError(
                f"{where}: holds {rows_held} rows, but {MANIFEST} says {rows}: write it again"
            )
        for batch in self._batches(file):
            self._check_rows(where, batch)

    def _check_rows(self, where: str, batch: pa.RecordBatch) -> None:
        for field, broken, why in self._wrong(batch):
            if pc.any(broken).as_py():
                row = batch.filter(broken).slice(0, 1).to_pylist()[0]
                raise InvalidAssertionsError(f"{where}: column {field}: {why}, in {row}")

    def _wrong(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.Array, str]]:
        """For each rule: the field, the rows that break the rule, and the error message."""
        for name, (_, may_be_null) in COLUMNS.items():
            if not may_be_null:
                yield name, pc.is_null(batch.column(name)), "is null"
        kind = batch.column("kind")
        known = pc.is_in(kind, value_set=pa.array(KINDS))
        yield "kind", pc.invert(known), f"must be {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        late = pc.greater(batch.column("at_ms"), self.at_ms)
        yield "at_ms", late, f"is later than at_ms in {MANIFEST}"
        for name, fields in NEEDED.items():
            for field in fields:
                missing = pc.and_(pc.equal(kind, name), pc.is_null(batch.column(field)))
                yield field, missing, f"is null, but kind {name} needs it"

    def _batches(self, file: str) -> Iterator[pa.RecordBatch]:
        where = f"{self.path}/{file}"
        try:
            with pq.ParquetFile(where, filesystem=self.filesystem) as parquet:
                yield from parquet.iter_batches(ROWS_AT_ONCE, columns=list(COLUMNS))
        except (OSError, pa.ArrowException) as error:
            raise InvalidAssertionsError(f"{where}: cannot be read as Parquet: {_line(error)}") from None


def _manifest(filesystem: fs.FileSystem, path: str) -> dict[str, Any]:
    where = f"{path}/{MANIFEST}"
    try:
        with filesystem.open_input_stream(where) as file:
            manifest: Any = json.loads(file.read())
    except FileNotFoundError:
        raise InvalidAssertionsError(
            f"{where}: is missing: this is not a folder of assertions, or its job did not finish; "
            "`quotagate backfill run` writes one"
        ) from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InvalidAssertionsError(f"{where}: cannot be read: {_line(error)}") from None
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise InvalidAssertionsError(f"{where}: version: must be a number")
    if version != VERSION:
        age = "newer; load it with a newer Quotagate" if version > VERSION else "older; write it again"
        raise InvalidAssertionsError(f"{where}: version: {version} is {age} (this one reads {VERSION})")
    checked: dict[str, Any] = manifest
    return checked


def _opened(url: str) -> tuple[fs.FileSystem, str]:
    try:
        location = StorageLocation(url)
    except InvalidLocationError as error:
        raise InvalidAssertionsError(f"the folder {error}") from None
    try:
        return location.open()
    except (InvalidLocationError, OSError) as error:
        raise InvalidAssertionsError(f"{location.name}: {location.redact(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
