"""A history that is not ours: who used which id when, in Parquet or JSON, and what layers make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from workers.spark.log import Period, literal
from workers.spark.refused import Refused
from workers.spark.standing import Ids

CORRUPT: Final = "_corrupt"
FILE: Final = "_file"
TYPE: Final = "_type"
"""What JSON has as the id; null of Parquet, where a column has one type."""

ID_TYPES: Final = ("BIGINT", "STRING")
"""What `POST /v1/decide` takes as one: 4711.0 is none there, and would be another text than 4711 here."""

YEARS: Final = (946_684_800_000, 7_258_118_400_000)
"""2000 to 2199: a time in seconds or microseconds lies far outside."""

CHARGES: Final = 1_000_000
"""Of a limit that decides nothing here: what a history did is taken as it is."""

PARQUET_TYPES: Final = {
    "principal": (t.StringType,),
    "id": (t.StringType, t.LongType, t.IntegerType),
    "time": (t.TimestampType, t.TimestampNTZType, t.LongType, t.StringType),
}


@dataclass(frozen=True, slots=True)
class Columns:
    """What the three columns are called."""

    principal: str = "principal"
    id: str = "id"
    time: str = "time"

    def named(self) -> dict[str, str]:
        """Each column's name by what it is."""
        return {"principal": self.principal, "id": self.id, "time": self.time}


def read(spark: SparkSession, url: str, kind: str, columns: Columns, period: Period) -> DataFrame:
    """The uses of a period: ``principal``, ``id`` as text, ``at_ms``.

    Raises:
        Refused: a file or a value is not what it should be; the message names it.
    """
    try:
        place = _literal(spark, url)
        found = _json(spark, place, columns) if kind == "json" else _parquet(spark, url, place, columns)
    except AnalysisException as error:
        raise Refused(f"{url}: {str(error).splitlines()[0]}") from None
    except Py4JJavaError as error:  # a filesystem that is none, or away
        raise Refused(f"{url}: {' '.join(str(error.java_exception.getMessage()).split())}") from None
    uses = found.select(
        f.col(columns.principal).alias("principal"),
        f.col(columns.id).cast("string").alias("id"),
        _at_ms(found, columns.time).alias("at_ms"),
        f.col(columns.time).cast("string").alias("time"),
        CORRUPT,
        FILE,
        TYPE,
    )
    _check(uses, url, columns)
    uses = uses.select("principal", "id", "at_ms")
    if period.from_ms is not None:
        uses = uses.where(f.col("at_ms") >= period.from_ms)
    return uses if period.to_ms is None else uses.where(f.col("at_ms") < period.to_ms)


def by_principal(uses: DataFrame, partitions: int | None = None) -> DataFrame:
    """Each principal's uses together, and in order of time."""
    spread = uses.repartition(partitions, "principal") if partitions else uses.repartition("principal")
    return spread.sortWithinPartitions("principal", "at_ms", "id")


def standing(
    at_ms: int, window_ms: int, layers: Layers, max_ids: int, secret: bytes
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[Assertion]]:
    """What the principals' filters and windows should hold, from the rows of ``by_principal``.

    A charge is a use of an id that the layers had forgotten, or had never seen.
    """
    quota = Quota(PRODUCER_IDS_RATE, CHARGES, "producer_ids", "deny", window_ms=window_ms, layers=layers)

    def stand(batches: Iterable[pa.RecordBatch]) -> Iterator[Assertion]:
        of, ids = None, None
        for batch in batches:
            for principal, id_, used_ms in zip(
                *(column.to_pylist() for column in batch.columns), strict=True
            ):
                if ids is None or principal != of:
                    if ids is not None:
                        yield from ids.assertions(at_ms)
                    of = principal
                    ids = Ids(PRODUCER_IDS_RATE, str(Entity.of(user=principal)), None, max_ids)
                known = as_id(id_)
                if known != NO_PRODUCER_ID:
                    ids.use(digest(secret, principal, known), used_ms, quota)
        if ids is not None:
            yield from ids.assertions(at_ms)

    return stand


def _literal(spark: SparkSession, url: str) -> str:
    """A file or folder that has this very name, as Spark takes it; else it is a pattern of names."""
    context: Any = spark.sparkContext
    path = context._jvm.org.apache.hadoop.fs.Path(url)  # noqa: SLF001  there is no other way to Hadoop's
    files = path.getFileSystem(context._jsc.hadoopConfiguration())  # noqa: SLF001
    return literal(url) if files.exists(path) else url


def _json(spark: SparkSession, place: str, columns: Columns) -> DataFrame:
    """JSON lines; what a value was is judged when all are looked at."""
    lines = spark.read.text(place).select(
        "value", f.try_parse_json("value").alias("line"), f.input_file_name().alias(FILE)
    )
    line = f.col("line")

    def field(name: str, type_: str) -> Column:
        return f.try_variant_get(line, f"$['{name}']", type_)

    return lines.where(f.trim("value") != "").select(
        *(field(name, "string").alias(name) for name in columns.named().values()),
        f.when(
            ~f.coalesce(f.schema_of_variant(line).startswith("OBJECT"), f.lit(False)), f.col("value")
        ).alias(CORRUPT),
        FILE,
        f.schema_of_variant(field(columns.id, "variant")).alias(TYPE),
    )


def _parquet(spark: SparkSession, url: str, place: str, columns: Columns) -> DataFrame:
    found = spark.read.parquet(place)
    types = dict(found.dtypes)
    for what, name in columns.named().items():
        if name not in types:
            held = ", ".join(types) or "none"
            raise Refused(
                f"{url}: column {name}: is missing; name it with --{what}-column (there are: {held})"
            )
        if not isinstance(found.schema[name].dataType, PARQUET_TYPES[what]):
            right = " or ".join(each().simpleString() for each in PARQUET_TYPES[what])
            raise Refused(f"{url}: column {name}: is {types[name]}, must be {right}")
    none = f.lit(None).cast("string")
    return found.withColumns({CORRUPT: none, TYPE: none, FILE: f.input_file_name()})


def _at_ms(found: DataFrame, name: str) -> Column:
    """A time in milliseconds: a number of them, an instant, or the text of either; null for what is none."""
    column = f.col(name)
    if isinstance(found.schema[name].dataType, t.LongType):
        return column
    if not isinstance(found.schema[name].dataType, t.StringType):
        return f.unix_millis(column.cast("timestamp"))
    number = f.when(column.rlike("^[0-9]{1,18}$"), column).cast("bigint")
    return f.coalesce(number, f.unix_millis(f.try_to_timestamp(column)))


def _check(uses: DataFrame, url: str, columns: Columns) -> None:
    """Refuse a history in which a row is not readable, or says nothing in one of its three columns."""
    wrong: list[tuple[str, Column, str]] = [
        ("", f.col(CORRUPT).isNotNull(), "a line is no JSON object"),
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
    for _, found, _ in wrong:
        any_wrong |= f.coalesce(found, f.lit(False))
    bad = uses.where(any_wrong).limit(1).collect()
    if not bad:
        return
    for name, found, why in wrong:
        if row := uses.where(any_wrong).where(found).limit(1).collect():
            first = row[0]
            where = (first[FILE] or url).removeprefix("file://")
            said = (
                first[CORRUPT]
                or f"principal={first['principal']!r} id={first['id']!r} time={first['time']!r}"
            )
            field = f"field {name}: " if name else ""
            raise Refused(f"{where}: {field}{why}; in {said[:200]}")
