"""A folder of assertions as a job left it: looked through before any of it is used, then read in parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs
from pyarrow import parquet as pq

from app.domain.assertion import COLUMNS, KINDS, MANIFEST, NEEDED, VERSION, Assertion
from app.place import NoPlace, Place
from app.run.errors import CannotRun

ROWS_AT_ONCE: Final = 8_192
TYPES: Final = {"string": pa.string(), "bigint": pa.int64(), "double": pa.float64()}


class BadAssertions(CannotRun):
    """The folder is not what a job leaves; names the file, the field, and what would be right."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Assertions as they lie there.

    Attributes:
        name: unique to this run of the job.
        at_ms: the moment that they are of.
        secret: the fingerprint of the secret that ids were hashed with, if the job knew it.
        files: the files in their order, and how many rows each has.
    """

    filesystem: fs.FileSystem
    path: str
    name: str
    at_ms: int
    secret: str | None
    files: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> int:
        """How many assertions there are."""
        return sum(rows for _, rows in self.files)

    @classmethod
    def open(cls, place: str) -> Folder:
        """Read what the folder says of itself, and see that every file is there, and whole.

        Raises:
            BadAssertions: it is not so.
        """
        filesystem, path = _opened(place)
        said = _manifest(filesystem, path)
        try:
            files = tuple((str(file["name"]), int(file["rows"])) for file in said["files"])
            secret = None if said["secret"] is None else str(said["secret"])
            folder = cls(filesystem, path, str(said["name"]), int(said["at_ms"]), secret, files)
        except (KeyError, TypeError, ValueError) as error:
            raise BadAssertions(f"{path}/{MANIFEST}: {error!r}; write the assertions again") from None
        for file, rows in files:
            folder._check(file, rows)
        return folder

    def read(self, skip: int = 0) -> Iterator[list[Assertion]]:
        """The assertions past so many of them, in order, some at a time."""
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
                schema, held = parquet.schema_arrow, parquet.metadata.num_rows
        except (OSError, pa.ArrowException) as error:
            raise BadAssertions(f"{where}: cannot be read as Parquet: {_line(error)}") from None
        for column, (type_, _) in COLUMNS.items():
            place = schema.get_field_index(column)
            if place < 0:
                raise BadAssertions(f"{where}: column {column}: is missing")
            if schema.field(place).type != TYPES[type_]:
                raise BadAssertions(
                    f"{where}: column {column}: is {schema.field(place).type}, must be {TYPES[type_]}"
                )
        if held != rows:
            raise BadAssertions(f"{where}: holds {held} rows, and {MANIFEST} says {rows}: write it again")
        for batch in self._batches(file):
            self._check_rows(where, batch)

    def _check_rows(self, where: str, batch: pa.RecordBatch) -> None:
        for field, found, why in self._wrong(batch):
            if pc.any(found).as_py():
                row = batch.filter(found).slice(0, 1).to_pylist()[0]
                raise BadAssertions(f"{where}: column {field}: {why}, in {row}")

    def _wrong(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.Array, str]]:
        """For each rule the field, the rows that break it, and what is wrong with them."""
        for name, (_, may_be_null) in COLUMNS.items():
            if not may_be_null:
                yield name, pc.is_null(batch.column(name)), "is null"
        kind = batch.column("kind")
        known = pc.is_in(kind, value_set=pa.array(KINDS))
        yield "kind", pc.invert(known), f"must be {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        late = pc.greater(batch.column("at_ms"), self.at_ms)
        yield "at_ms", late, f"is after the moment that {MANIFEST} names"
        for name, fields in NEEDED.items():
            for field in fields:
                missing = pc.and_(pc.equal(kind, name), pc.is_null(batch.column(field)))
                yield field, missing, f"is null, and needed by kind {name}"

    def _batches(self, file: str) -> Iterator[pa.RecordBatch]:
        where = f"{self.path}/{file}"
        try:
            with pq.ParquetFile(where, filesystem=self.filesystem) as parquet:
                yield from parquet.iter_batches(ROWS_AT_ONCE, columns=list(COLUMNS))
        except (OSError, pa.ArrowException) as error:
            raise BadAssertions(f"{where}: cannot be read as Parquet: {_line(error)}") from None


def _manifest(filesystem: fs.FileSystem, path: str) -> dict[str, Any]:
    where = f"{path}/{MANIFEST}"
    try:
        with filesystem.open_input_stream(where) as file:
            said = json.loads(file.read())
    except FileNotFoundError:
        raise BadAssertions(
            f"{where}: is missing: this is no folder of assertions, or its job was cut short; "
            "`quotagate spark backfill` writes one"
        ) from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadAssertions(f"{where}: cannot be read: {_line(error)}") from None
    version = said.get("version") if isinstance(said, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise BadAssertions(f"{where}: version: must be a number")
    if version != VERSION:
        age = "newer; load it with a newer Quotagate" if version > VERSION else "older; write it again"
        raise BadAssertions(f"{where}: version: {version} is {age} (this one reads {VERSION})")
    found: dict[str, Any] = said
    return found


def _opened(place: str) -> tuple[fs.FileSystem, str]:
    try:
        found = Place(place)
    except NoPlace as error:
        raise BadAssertions(f"the folder {error}") from None
    try:
        return found.open()
    except (NoPlace, OSError) as error:
        raise BadAssertions(f"{found.name}: {found.told(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
