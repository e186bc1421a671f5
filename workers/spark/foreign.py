"""A history from another system: each use of a producer id by a principal, in Parquet or JSON.

The content of the producer-id buckets follows from it: a use charges an id that no layer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final, cast
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from app.domain.ask import NO_PRODUCER_ID
from app.domain.assertion import Assertion
from app.domain.digest import as_id, digest
from app.domain.entity import Entity
from app.domain.quota import PRODUCER_IDS_RATE, Layers, Quota
from workers.spark.bucket_state import IdsState
from workers.spark.errors import JobError
from workers.spark.history_files import (
    GZIP,
    NANOSECONDS,
    PARQUET,
    SPARK_TYPES,
    UNSIGNED,
    UTF16_MARKS,
    Columns,
    HistoryFiles,
    find,
    quoted,
    schema,
)
from workers.spark.log import Period

CORRUPT: Final = "_corrupt"
FILE: Final = "_file"
TYPE: Final = "_type"
"""The column with the JSON type of the id; null for Parquet, where a column has one type."""

ID_TYPES: Final = ("BIGINT", "STRING")
"""The types that `POST /v1/decisions` accepts: not 4711.0, whose text differs from "4711"."""

YEARS: Final = (946_684_800_000, 7_258_118_400_000)
"""The years 2000 to 2199: a time in seconds or microseconds is far outside."""

VARIANT: Final = t.VariantType()

ColumnPaths = tuple[tuple[tuple[str, ...], str], ...]
"""The path and the type of the principal, the id and the time."""

CHARGES: Final = 1_000_000
"""The limit of the replayed quota. It decides nothing: every use in a history is accepted."""

PARQUET_TYPES: Final[Mapping[str, Sequence[str]]] = {
    "principal": ("string",),
    "id": ("string", "bigint", "int", UNSIGNED),
    "time": ("timestamp", "timestamp_ntz", NANOSECONDS, "bigint", UNSIGNED, "string"),
}
"""The types that each column may have in Parquet."""

NANOS_PER_MS: Final = 1_000_000
MAX_ID: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class HistoryColumns:
    """The names of the three columns."""

    principal: str = "principal"
    id: str = "id"
    time: str = "time"


def read(spark: SparkSession, url: str, kind: str, columns: HistoryColumns, period: Period) -> DataFrame:
    """The uses in a period, with the columns ``principal``, ``id`` (as text) and ``at_ms``.

    Raises:
        JobError: a file or a value is invalid; the message names it.
    """
    files = HistoryFiles(spark, url)
    uses = (_json if kind == "json" else _parquet)(spark, files, columns)
    _check(uses, files.name, columns)
    return uses.select("principal", "id", "at_ms").where(period.contains(f.col("at_ms")))


def by_principal(uses: DataFrame) -> DataFrame:
    """The uses, grouped by principal and ordered by time."""
    return uses.repartition("principal").sortWithinPartitions("principal", "at_ms", "id")


def replaying(
    at_ms: int, window_ms: int, layers: Layers, max_ids: int, secret: bytes
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[Assertion]]:
    """A function from the rows of ``by_principal`` to the assertions of the producer-id buckets."""
    quota = Quota(PRODUCER_IDS_RATE, CHARGES, "producer_ids", "deny", window_ms=window_ms, layers=layers)

    def replay(batches: Iterable[pa.RecordBatch]) -> Iterator[Assertion]:
        uses = chain.from_iterable(
            zip(*(column.to_pylist() for column in batch.columns), strict=True) for batch in batches
        )
        for principal, group in groupby(uses, key=itemgetter(0)):
            state = IdsState((PRODUCER_IDS_RATE, str(Entity.of(user=principal)), None), max_ids)
            for _, id_, used_ms in group:
                if (number := as_id(id_)) != NO_PRODUCER_ID:
                    state.use(digest(secret, principal, number), used_ms, quota)
            yield from state.assertions(at_ms)

    return replay


def _json(spark: SparkSession, files: HistoryFiles, columns: HistoryColumns) -> DataFrame:
    """JSON lines, or arrays of objects; ``_check`` judges the values later."""
    of_lines: list[str] = []
    of_arrays: list[str] = []
    for file, begins in files.each(files.beginning):
        if why := _why_not_json(begins):
            raise JobError(f"{file.name}: {why}")
        if begins:
            (of_arrays if begins.startswith(b"[") else of_lines).append(files.path(file))
    if not of_lines and not of_arrays:
        raise JobError(f"{files.name}: is empty: a history has at least one use")
    parts: list[DataFrame] = []
    text = f.regexp_replace("value", "^\ufeff", "").alias("value")
    if of_lines:
        parts.append(spark.read.text(of_lines).select(text, f.input_file_name().alias(FILE)))
    if of_arrays:
        whole = spark.read.text(of_arrays, wholetext=True).select(text, f.input_file_name().alias(FILE))
        items = f.coalesce(f.from_json("value", t.ArrayType(t.StringType())), f.array("value"))
        parts.append(whole.select(f.explode(items).alias("value"), FILE))
    rows = reduce(DataFrame.unionAll, parts)
    # The names go into a schema, not into paths or expressions.
    names = tuple(dict.fromkeys(asdict(columns).values()))
    paths: dict[tuple[str, ...], t.DataType] = {(name,): VARIANT for name in names}
    nested: dict[tuple[str, ...], t.DataType] = {
        tuple(name.split(".")): VARIANT for name in names if "." in name
    }
    rows = rows.where(f.trim("value") != "").select(
        "value",
        FILE,
        f.from_json("value", schema(paths)).alias("line"),
        f.try_parse_json("value").alias("whole"),
    )
    if nested:
        rows = rows.withColumn("nested", f.from_json("value", schema(nested)))

    def field(name: str) -> Column:
        exact = f.col("line").getField(name)
        if "." not in name:
            return exact
        return f.coalesce(exact, reduce(Column.getField, name.split("."), f.col("nested")))

    def text_of(name: str) -> Column:
        return f.try_variant_get(field(name), "$", "string")

    is_object = f.coalesce(f.schema_of_variant("whole").startswith("OBJECT"), f.lit(False))
    return rows.select(
        text_of(columns.principal).alias("principal"),
        text_of(columns.id).alias("id"),
        _ms_of_text(text_of(columns.time)).alias("at_ms"),
        text_of(columns.time).alias("time"),
        f.when(~is_object, f.col("value")).alias(CORRUPT),
        FILE,
        f.schema_of_variant(field(columns.id)).alias(TYPE),
    )


def _why_not_json(begins: bytes) -> str | None:
    """The reason why a file with this beginning is not JSON; None if it may be."""
    if begins.startswith(PARQUET):
        return "is Parquet, not JSON: add --format parquet"
    if begins.startswith(GZIP):
        return "is compressed by gzip: its name must end with .gz"
    if begins.startswith(UTF16_MARKS):
        return "is UTF-16: JSON must be UTF-8"
    if begins and begins[:1] not in b"{[":
        return "does not begin with a JSON object or array; a history is JSON or Parquet, so convert CSV"
    return None


def _parquet(spark: SparkSession, files: HistoryFiles, columns: HistoryColumns) -> DataFrame:
    """The rows of all files; files whose columns have the same types are read together."""
    alike: dict[ColumnPaths, list[str]] = {}
    for file, found in files.each(files.columns):
        paths = _column_paths(file.name, {**found, **dict.fromkeys(files.partitions, "string")}, columns)
        alike.setdefault(paths, []).append(files.path(file))
    return reduce(
        DataFrame.unionAll, (_alike(spark, files, paths, some) for paths, some in sorted(alike.items()))
    )


def _column_paths(file: str, found: Columns, columns: HistoryColumns) -> ColumnPaths:
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
        if type_ not in PARQUET_TYPES[role]:
            shown = f"a structure of {', '.join(type_)}" if isinstance(type_, Mapping) else type_
            right = " or ".join(PARQUET_TYPES[role])
            raise JobError(f"{file}: column {name}: is {shown}, must be {right}")
        paths.append((path, type_))
    return tuple(paths)


def _alike(spark: SparkSession, files: HistoryFiles, paths: ColumnPaths, some: Sequence[str]) -> DataFrame:
    """Files whose three columns have the same types. Spark reads no other column, whatever its type."""
    reader = spark.read.schema(schema({path: SPARK_TYPES[type_] for path, type_ in paths}))
    if files.partitions and files.base is not None:
        reader = reader.option("basePath", files.base)
    (principal, _), (id_, id_type), (time, time_type) = paths
    id_column, time_column = _column(id_), _column(time)
    is_too_large = id_column > f.lit(MAX_ID) if id_type == UNSIGNED else f.lit(False)
    return reader.parquet(*some).select(
        _column(principal).alias("principal"),
        id_column.cast("string").alias("id"),
        _at_ms(time_column, time_type).alias("at_ms"),
        time_column.cast("string").alias("time"),
        f.lit(None).cast("string").alias(CORRUPT),
        f.input_file_name().alias(FILE),
        f.when(is_too_large, f.lit(UNSIGNED)).alias(TYPE),
    )


def _column(path: Sequence[str]) -> Column:
    return reduce(Column.getField, path[1:], f.col(quoted(path[0])))


def _at_ms(column: Column, type_: str) -> Column:
    """A time in milliseconds, from a number, a timestamp, or the text of either; null if invalid."""
    if type_ == NANOSECONDS:
        return f.call_function("div", column, f.lit(NANOS_PER_MS))
    if type_ in {"bigint", UNSIGNED}:
        return column.try_cast("bigint")
    return _ms_of_text(column) if type_ == "string" else f.unix_millis(column.cast("timestamp"))


def _ms_of_text(column: Column) -> Column:
    number = f.when(column.rlike("^[0-9]{1,18}$"), column).cast("bigint")
    return f.coalesce(number, f.unix_millis(f.try_to_timestamp(column)))


def _check(uses: DataFrame, url: str, columns: HistoryColumns) -> None:
    """Refuse a history with an unreadable row, or a missing or invalid value.

    Raises:
        JobError: names the file, the field, the expected value, and the row.
    """
    wrong: list[tuple[str, Column, str]] = [
        ("", f.col(CORRUPT).isNotNull(), "a line is not a JSON object"),
        (
            columns.principal,
            f.col("principal").isNull() | (f.col("principal") == ""),
            "is missing or empty; it names who asks",
        ),
        (columns.id, f.col("id").isNull(), "is missing; it names a producer"),
        (
            columns.id,
            f.coalesce(~f.col(TYPE).isin(*ID_TYPES), f.lit(False)),
            "must be a signed 64-bit integer or a text, as an ask has it",
        ),
        (
            columns.time,
            f.col("at_ms").isNull(),
            "must be an instant such as 2026-11-21T10:00:00Z, or milliseconds since 1970",
        ),
        (
            columns.time,
            ~f.col("at_ms").between(*YEARS),
            "must lie in the years 2000 to 2199; a number is milliseconds since 1970",
        ),
    ]
    any_wrong = f.lit(False)
    for _, condition, _ in wrong:
        any_wrong |= f.coalesce(condition, f.lit(False))
    bad = uses.where(any_wrong)
    if not bad.limit(1).collect():
        return
    for name, condition, why in wrong:
        if rows := bad.where(condition).limit(1).collect():
            row = rows[0]
            file = (unquote(row[FILE]) or url).removeprefix("file://")
            text = row[CORRUPT] or f"principal={row['principal']!r} id={row['id']!r} time={row['time']!r}"
            field = f"field {name}: " if name else ""
            raise JobError(f"{file}: {field}{why}; in {text[:200]}")
