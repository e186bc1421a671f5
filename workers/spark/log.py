"""Reading the decision log with Spark: the files of a period, checked one by one, each row once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa
from pyarrow import fs
from pyarrow import parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from app.place import NoPlace, Place
from workers.decision_log.schema import (
    HOUR_MS,
    IDENTITY,
    SCHEMA,
    BadFile,
    footer,
    hour_of,
    partition,
    readable,
)
from workers.spark.refused import Refused, WrongUse

READERS: Final = 16
"""Footers are read so many at a time: of an object store each is a round trip."""
MANY_BATCHES: Final = 1_000
"""If more batches than this stand twice, all rows are looked through rather than those of each."""
PATTERN: Final = re.compile(r"[\\*?\[\]{}]")
AZURE: Final = ".dfs.core.windows.net"

RETRIES: Final = 3
"""How often the files are listed anew, when some were merged or removed meanwhile."""


Look = Callable[[str, pq.FileMetaData], None]
"""Takes a file and what it says of itself."""


@dataclass(frozen=True, slots=True)
class Period:
    """From when until before when, in milliseconds; None has no end."""

    from_ms: int | None = None
    to_ms: int | None = None

    @classmethod
    def of(cls, from_: str | None, to: str | None) -> Period:
        """The period between two ISO 8601 instants.

        >>> Period.of("2026-11-21T10:00:00Z", None)
        Period(from_ms=1795255200000, to_ms=None)

        Raises:
            WrongUse: one is no instant, or the end is not after the beginning.
        """
        period = cls(instant("--from", from_), instant("--to", to))
        if period.from_ms is not None and period.to_ms is not None and period.to_ms <= period.from_ms:
            raise WrongUse(f"--to: {to} is not after --from {from_}")
        return period

    def __str__(self) -> str:
        begins = "the beginning" if self.from_ms is None else spelled(self.from_ms)
        return f"from {begins} to {'the end' if self.to_ms is None else spelled(self.to_ms)}"

    def begun_earlier(self, hours: float) -> Period:
        """It, and so many hours before."""
        return self if self.from_ms is None else Period(self.from_ms - round(hours * HOUR_MS), self.to_ms)

    def touches(self, hour_ms: int) -> bool:
        """Whether an hour has a part in it."""
        begun = self.to_ms is None or hour_ms < self.to_ms
        return begun and (self.from_ms is None or hour_ms + HOUR_MS > self.from_ms)


def instant(field: str, text: str | None) -> int | None:
    """An ISO 8601 instant in milliseconds; without an offset it is UTC."""
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise WrongUse(f"{field}: {text!r} must be an instant such as 2026-11-21T10:00:00Z") from None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def spelled(at_ms: int) -> str:
    """An instant as a person reads it."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}.{at_ms % 1000:03} UTC"


def read(spark: SparkSession, url: str, period: Period, look: Look | None = None) -> DataFrame:
    """The rows of a period, each once.

    Args:
        look: is shown each file's footer, which is read anyway.

    Raises:
        Refused: there are none, or a file is not what it should be; the message names it, and the field.
    """
    found = rows(spark, url, period, look)
    return each_once(found, standing_twice(found))


def rows(spark: SparkSession, url: str, period: Period, look: Look | None = None) -> DataFrame:
    """The rows of a period as they lie there: at least once.

    Raises:
        Refused: as ``read``.
    """
    files = _checked(url, period, look)
    schema = from_arrow_schema(SCHEMA)
    found = spark.read.schema(schema).parquet(*(_for_spark(url, file) for file in files))
    if period.from_ms is not None:
        found = found.where(f.col("at_ms") >= period.from_ms)
    if period.to_ms is not None:
        found = found.where(f.col("at_ms") < period.to_ms)
    return found


def standing_twice(found: DataFrame) -> list[str] | None:
    """The batches of which rows stand twice; None if they are too many to name.

    The writer writes a batch again only after a crash, so they are few. They are looked for by two narrow
    columns.
    """
    batch, place = IDENTITY
    twice = (
        found.groupBy(batch)
        .agg(f.count("*").alias("rows"), f.count_distinct(place).alias("places"))
        .where(f.col("rows") > f.col("places"))
        .select(batch)
        .limit(MANY_BATCHES + 1)
        .collect()
    )
    return None if len(twice) > MANY_BATCHES else [row[0] for row in twice]


def each_once(found: DataFrame, twice: list[str] | None) -> DataFrame:
    """Drop rows that stand twice; only those of the batches that ``standing_twice`` found are compared."""
    if twice is None:
        return found.dropDuplicates(list(IDENTITY))
    if not twice:
        return found
    among = f.col(IDENTITY[0]).isin(twice)
    return found.where(~among).unionByName(found.where(among).dropDuplicates(list(IDENTITY)))


def _checked(url: str, period: Period, look: Look | None = None) -> list[str]:
    """The files of a period, once each is known to be one of this version with every column."""
    place = place_of(url)
    name = place.name
    try:
        filesystem, root = place.open()
    except (NoPlace, OSError) as error:
        raise Refused(f"{name}: {place.told(error)}") from None
    for attempt in range(RETRIES):
        files, hours = _listed(filesystem, root, period)
        if not files:
            raise Refused(_nothing(name, period, hours))
        try:
            held = 0
            with ThreadPoolExecutor(READERS) as pool:
                footers = pool.map(lambda file: footer(file, filesystem), files)
                for file, about in zip(files, footers, strict=True):
                    _of_its_hour(file, about)
                    if look is not None:
                        look(file, about)
                    held += about.num_rows
        except FileNotFoundError as gone:
            if attempt == RETRIES - 1:
                raise Refused(f"{name}: files vanish while they are read: {gone}") from None
            continue
        except BadFile as bad:
            raise Refused(str(bad)) from None
        if not held:
            raise Refused(_nothing(name, period, hours))
        return files
    raise AssertionError("the last attempt returns or raises")


def _of_its_hour(file: str, about: pq.FileMetaData) -> None:
    """Refuse a file with times outside its folder's hour: a period would leave out rows that are its own."""
    column = about.schema.names.index("at_ms")
    for group in range(about.num_row_groups):
        times = about.row_group(group).column(column).statistics
        if times is None or not times.has_min_max:
            continue
        for at_ms in (times.min, times.max):
            if partition(at_ms) not in file:
                raise Refused(f"{file}: column at_ms: has {at_ms}, whose place is {partition(at_ms)}")


def _listed(filesystem: fs.FileSystem, root: str, period: Period) -> tuple[list[str], list[int]]:
    """The files of a period, by the names of their partitions alone; and every hour that there is."""
    try:
        entries = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowException) as error:
        raise Refused(f"{root}: cannot be listed: {' '.join(str(error).split())}") from None
    hours = {
        entry.path: hour
        for entry in entries
        if entry.type == fs.FileType.File
        and readable(entry.base_name)
        and (hour := hour_of(entry.path)) is not None
    }
    files = sorted(path for path, hour in hours.items() if period.touches(hour))
    return files, sorted(set(hours.values()))


def _nothing(name: str, period: Period, hours: Sequence[int]) -> str:
    if not hours:
        return f"{name}: holds no decision log: there is no file such as date=2026-11-21/hour=10/....parquet"
    held = f"it holds hours {spelled(hours[0])[:13]} to {spelled(hours[-1])[:13]} UTC"
    return f"{name}: no row in the period {period}; {held}"


def place_of(url: str) -> Place:
    """The place of a log.

    Raises:
        Refused: it is none; what the URL keeps secret is not told.
    """
    try:
        return Place(url)
    except NoPlace as error:
        raise Refused(f"{url.partition(':')[0]}://...: {error}") from None


def literal(path: str) -> str:
    r"""A path as Hadoop takes it, which looks for patterns in every one.

    >>> print(literal("/logs/a[1]"))
    /logs/a\[1\]
    """
    return PATTERN.sub(r"\\\g<0>", path)


def _for_spark(url: str, path: str) -> str:
    """A file that pyarrow listed, as Spark calls it."""
    scheme, _, rest = url.partition("://") if "://" in url else ("file", "", "")
    host, path = rest.partition("/")[0].partition("?")[0], literal(path)
    if scheme == "file":
        return f"file://{path}"  # as it is: Spark takes %3D for no =
    if scheme in {"hdfs", "viewfs"}:
        return f"{scheme}://{host}{path}"
    if scheme in {"abfs", "abfss"}:
        container, _, inside = path.partition("/")
        return f"{scheme}://{container}@{_account(url, host)}{AZURE}/{inside}"
    return f"{ {'s3': 's3a', 'gcs': 'gs'}.get(scheme, scheme) }://{path}"


def _account(url: str, host: str) -> str:
    """The account of an Azure URL: of CONTAINER@ACCOUNT.dfs..., ACCOUNT.blob... or ACCOUNT@CONTAINER."""
    user, _, place = host.rpartition("@")
    if place.endswith((AZURE, ".blob.core.windows.net")):
        return place.partition(".")[0]
    if user and "." not in place:
        return user.partition(":")[0]
    raise Refused(f"{url.partition('://')[0]}://...: Spark takes CONTAINER@ACCOUNT{AZURE}/PATH alone")
