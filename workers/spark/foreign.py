"""A history from another system: who used which producer id when, in Parquet or JSON lines.

From it follows what the producer-id buckets should hold: a use charges an id that no layer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException
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
from workers.spark.log import Period, escape_pattern

CORRUPT: Final = "_corrupt"
FILE: Final = "_file"
TYPE: Final = "_type"
"""The column with the JSON type of the id; null for Parquet, where a column has one type."""

ID_TYPES: Final = ("BIGINT", "STRING")
"""The types that `POST /v1/decide` accepts: not 4711.0, whose text would differ from that of 4711."""

YEARS: Final = (946_684_800_000, 7_258_118_400_000)
"""The years 2000 to 2199: a time in seconds or microseconds is far outside."""

CHARGES: Final = 1_000_000
"""A limit for the replayed quota, which decides nothing: the history is taken as it is."""

PARQUET_TYPES: Final = {
    "principal": (t.StringType,),
    "id": (t.StringType, t.LongType, t.IntegerType),
    "time": (t.TimestampType, t.TimestampNTZType, t.LongType, t.StringType),
}


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
    try:
        path = _literal(spark, url)
        history = _json(spark, path, columns) if kind == "json" else _parquet(spark, url, path, columns)
    except AnalysisException as error:
        raise JobError(f"{url}: {str(error).splitlines()[0]}") from None
    except Py4JJavaError as error:  # the filesystem is unknown or unreachable
        raise JobError(f"{url}: {' '.join(str(error.java_exception.getMessage()).split())}") from None
    uses = history.select(
        f.col(columns.principal).alias("principal"),
        f.col(columns.id).cast("string").alias("id"),
        _at_ms(history, columns.time).alias("at_ms"),
        f.col(columns.time).cast("string").alias("time"),
        CORRUPT,
        FILE,
        TYPE,
    )
    _check(uses, url, columns)
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


def _literal(spark: SparkSession, url: str) -> str:
    """The path for Spark: escaped if a file or folder has exactly this name, else a pattern."""
    context: Any = spark.sparkContext
    path = context._jvm.org.apache.hadoop.fs.Path(url)  # noqa: SLF001  there is no other way to Hadoop's
    files = path.getFileSystem(context._jsc.hadoopConfiguration())  # noqa: SLF001
    return escape_pattern(url) if files.exists(path) else url


def _json(spark: SparkSession, path: str, columns: HistoryColumns) -> DataFrame:
    """JSON lines; ``_check`` judges the values later."""
    lines = spark.read.text(path).select(
        "value", f.try_parse_json("value").alias("line"), f.input_file_name().alias(FILE)
    )
    line = f.col("line")

    def field(name: str, type_: str) -> Column:
        return f.try_variant_get(line, f"$['{name}']", type_)

    return lines.where(f.trim("value") != "").select(
        *(field(name, "string").alias(name) for name in asdict(columns).values()),
        f.when(
            ~f.coalesce(f.schema_of_variant(line).startswith("OBJECT"), f.lit(False)), f.col("value")
        ).alias(CORRUPT),
        FILE,
        f.schema_of_variant(field(columns.id, "variant")).alias(TYPE),
    )


def _parquet(spark: SparkSession, url: str, path: str, columns: HistoryColumns) -> DataFrame:
    history = spark.read.parquet(path)
    types = dict(history.dtypes)
    for role, name in asdict(columns).items():
        if name not in types:
            present = ", ".join(types) or "none"
            raise JobError(
                f"{url}: column {name}: is missing; name it with --{role}-column (there are: {present})"
            )
        if not isinstance(history.schema[name].dataType, PARQUET_TYPES[role]):
            right = " or ".join(each().simpleString() for each in PARQUET_TYPES[role])
            raise JobError(f"{url}: column {name}: is {types[name]}, must be {right}")
    none = f.lit(None).cast("string")
    return history.withColumns({CORRUPT: none, TYPE: none, FILE: f.input_file_name()})


def _at_ms(history: DataFrame, name: str) -> Column:
    """A time in milliseconds, from a number of them, a timestamp, or the text of either; null if invalid."""
    column = f.col(name)
    if isinstance(history.schema[name].dataType, t.LongType):
        return column
    if not isinstance(history.schema[name].dataType, t.StringType):
        return f.unix_millis(column.cast("timestamp"))
    number = f.when(column.rlike("^[0-9]{1,18}$"), column).cast("bigint")
    return f.coalesce(number, f.unix_millis(f.try_to_timestamp(column)))


def _check(uses: DataFrame, url: str, columns: HistoryColumns) -> None:
    """Refuse a history with an unreadable row, or a missing or invalid value.

    Raises:
        JobError: names the file, the field, what would be right, and the row.
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
            file = (row[FILE] or url).removeprefix("file://")
            text = row[CORRUPT] or f"principal={row['principal']!r} id={row['id']!r} time={row['time']!r}"
            field = f"field {name}: " if name else ""
            raise JobError(f"{file}: {field}{why}; in {text[:200]}")
