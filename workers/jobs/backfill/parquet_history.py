"""A foreign history in Parquet: the types of its columns, and its uses by row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet as pq

from workers.jobs.backfill.history_files import GONE, GZIP, PARQUET, HistoryFile
from workers.jobs.backfill.uses import HistoryColumns, Uses, ms_of_text
from workers.jobs.errors import JobError
from workers.jobs.files import FEWEST_ROWS

NANOSECONDS: Final = "timestamp_ns"
UNSIGNED: Final = "uint64"
TYPES: Final[Mapping[str, Sequence[str]]] = {
    "principal": ("string",),
    "id": ("string", "bigint", "int", UNSIGNED),
    "time": ("timestamp", "timestamp_ntz", NANOSECONDS, "bigint", UNSIGNED, "string"),
}
"""The types that each column may have, as SQL calls them."""

NAMES: Final[Sequence[tuple[Callable[[pa.DataType], bool], str]]] = (
    (pa.types.is_string, "string"),
    (pa.types.is_large_string, "string"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_uint64, UNSIGNED),
    (pa.types.is_uint32, "bigint"),
    (pa.types.is_integer, "int"),
    (pa.types.is_float64, "double"),
    (pa.types.is_float32, "float"),
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_date, "date"),
    (pa.types.is_map, "map"),
    (pa.types.is_list, "list"),
    (pa.types.is_large_list, "list"),
    (pa.types.is_fixed_size_list, "list"),
)
"""The name of each type; the first one counts."""

TEXTS: Final = frozenset({"ENUM", "JSON"})
"""Kinds of text that pyarrow reads as bytes."""

MAX_INT64: Final = 2**63 - 1
PER_MS: Final = {"us": 1_000, "ns": 1_000_000}

Columns = Mapping[str, "str | Columns"]
"""The type of each column by name; for a column with fields, the types of its fields."""


class ColumnPath(NamedTuple):
    """A column: the names that lead to it, and its type."""

    path: tuple[str, ...]
    type: str


@dataclass(frozen=True, slots=True)
class ParquetTask:
    """Row groups of a file that are read together.

    Attributes:
        paths: principal, id and time.
        rows: how many rows they have.
    """

    file: HistoryFile
    paths: Sequence[ColumnPath]
    groups: tuple[int, ...]
    rows: int

    def uses(self) -> Iterator[Uses]:
        """The uses of each row group.

        Raises:
            JobError: the file is damaged, or gone.
        """
        tops = [column.path[0] for column in self.paths]
        try:
            with _opened(self.file) as file:
                for group in self.groups:
                    rows = file.read_row_group(group, columns=tops, use_threads=False)
                    yield self._uses(rows, file.metadata.row_group(group).num_rows)
        except FileNotFoundError:
            raise JobError(f"{self.file.name}: was removed meanwhile; start the job again") from None
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self.file.unreadable(error) from None

    def _uses(self, rows: pa.Table, count: int) -> Uses:
        principal, id_, time = (self._column(rows, count, column.path) for column in self.paths)
        id_type, time_type = self.paths[1].type, self.paths[2].type
        nothing = np.zeros(count, bool)
        too_large = nothing
        if id_type == UNSIGNED:
            too_large = np.from_dlpack(id_.fill_null(0)) > MAX_INT64
        return Uses(
            _text(principal), _text(id_), _at_ms(time, time_type), nothing, too_large, (principal, id_, time)
        )

    def _column(self, rows: pa.Table, count: int, path: Sequence[str]) -> pa.Array:
        """A column, or a field of it."""
        if len(path) == 1 and path[0] in self.file.partitions:
            return pa.array([self.file.partitions[path[0]]], pa.string()).take(
                pa.array(np.zeros(count, np.int64))
            )
        column = rows.column(rows.schema.get_field_index(path[0])).combine_chunks()
        for name in path[1:]:
            column = pc.struct_field(column, [column.type.get_field_index(name)])
        column.validate(full=True)
        return column


def parquet_tasks(file: HistoryFile, columns: HistoryColumns) -> list[ParquetTask]:
    """Tasks of the row groups of a file; a task has several small ones.

    Raises:
        JobError: the file is no Parquet, or a column is missing or has another type.
    """
    try:
        with _opened(file) as opened:
            about, found = opened.metadata, _columns(file.name, opened)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise JobError(f"{file.name}: {_why_not_parquet(file, error)}") from None
    paths = _column_paths(file.name, {**found, **dict.fromkeys(file.partitions, "string")}, columns)
    tasks: list[ParquetTask] = []
    groups: list[int] = []
    rows = 0
    for group in range(about.num_row_groups):
        groups.append(group)
        rows += about.row_group(group).num_rows
        if rows >= FEWEST_ROWS or (group == about.num_row_groups - 1 and rows):
            tasks.append(ParquetTask(file, paths, tuple(groups), rows))
            groups, rows = [], 0
    return tasks


def find(columns: Columns, name: str) -> tuple[str, ...] | None:
    """The path of the column with exactly this name, else of the field that the name's dots lead to.

    >>> find({"a.b": "int", "a": {"b": "int", "c.d": "int"}}, "a.b")
    ('a.b',)
    >>> find({"a": {"c.d": "int"}}, "a.c.d")
    ('a', 'c.d')
    """
    if name in columns:
        return (name,)
    for dot in (place for place, sign in enumerate(name) if sign == "."):
        fields = columns.get(name[:dot])
        if isinstance(fields, Mapping) and (rest := find(fields, name[dot + 1 :])):
            return (name[:dot], *rest)
    return None


def _opened(file: HistoryFile) -> pq.ParquetFile:
    # microseconds, as INT96 may hold years that nanoseconds do not
    return pq.ParquetFile(file.path, filesystem=file.open(), coerce_int96_timestamp_unit="us")


def _columns(file: str, opened: pq.ParquetFile) -> Columns:
    leaves = (opened.schema.column(place) for place in range(len(opened.schema)))
    texts = {leaf.path for leaf in leaves if leaf.logical_type.type in TEXTS}
    return _of_fields(file, list(opened.schema_arrow), texts, ())


def _of_fields(file: str, fields: Sequence[pa.Field], texts: set[str], above: tuple[str, ...]) -> Columns:
    found: dict[str, str | Columns] = {}
    for field in fields:
        if field.name in found:
            raise JobError(f"{file}: has two columns of the name {field.name}")
        path = (*above, field.name)
        if pa.types.is_struct(field.type):
            found[field.name] = _of_fields(file, list(field.type), texts, path)
        else:
            found[field.name] = "string" if ".".join(path) in texts else _type(field.type)
    return found


def _type(type_: pa.DataType) -> str:
    """The name of a type."""
    if pa.types.is_dictionary(type_):
        return _type(type_.value_type)
    if pa.types.is_timestamp(type_):
        return NANOSECONDS if type_.unit == "ns" else "timestamp" if type_.tz else "timestamp_ntz"
    return next((name for is_type, name in NAMES if is_type(type_)), str(type_))


def _column_paths(file: str, found: Columns, columns: HistoryColumns) -> tuple[ColumnPath, ...]:
    """The path and the type of each of the three columns.

    Raises:
        JobError: a column is missing or has another type; the message lists the existing columns.
    """
    paths = []
    for role, name in asdict(columns).items():
        path = find(found, name)
        if path is None:
            raise JobError(
                f"{file}: column {name}: is missing; name it with --{role}-column"
                f" (there are: {', '.join(found) or 'none'})"
            )
        type_ = reduce(lambda fields, step: cast("Columns", fields)[step], path, cast("Any", found))
        if type_ not in TYPES[role]:
            shown = f"a structure of {', '.join(type_)}" if isinstance(type_, Mapping) else type_
            right = " or ".join(TYPES[role])
            raise JobError(f"{file}: column {name}: is {shown}, must be {right}")
        paths.append(ColumnPath(path, type_))
    return tuple(paths)


def _why_not_parquet(file: HistoryFile, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return GONE
    begins = file.beginning()
    if not begins:
        return "is empty, and no Parquet file"
    if begins.startswith(PARQUET):
        return "is damaged or cut off: its Parquet footer cannot be read"
    if begins.startswith((b"{", b"[")):
        return "is JSON, not Parquet: add --format json"
    if begins.startswith(GZIP):
        return "is compressed by gzip: only JSON may be, in a file whose name ends with .gz"
    return "is not Parquet; a history is Parquet or JSON, so convert CSV and other formats"


def _text(column: pa.Array) -> pa.Array:
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def _at_ms(column: pa.Array, type_: str) -> pa.Array:
    """A time in milliseconds, from a number, a timestamp, or the text of either; null if invalid."""
    if type_ == "string":
        texts = _text(column).dictionary_encode()
        known = [None if text is None else ms_of_text(text) for text in texts.dictionary.to_pylist()]
        return pa.array(known, pa.int64()).take(texts.indices)
    if type_ == UNSIGNED:
        return pc.if_else(pc.less_equal(column, MAX_INT64), column, None).cast(pa.int64())
    if pa.types.is_timestamp(column.type):
        numbers = column.cast(pa.int64())
        if column.type.unit == "s":
            return pc.multiply(numbers, 1_000)
        return pc.divide(numbers, PER_MS[column.type.unit]) if column.type.unit in PER_MS else numbers
    return column
