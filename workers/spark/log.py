"""Reading the decision log with Spark: the files of a period, each file checked, and each row once."""

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
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from app.storage_location import InvalidLocationError, StorageLocation
from workers.decision_log.schema import (
    HOUR_MS,
    IDENTITY,
    SCHEMA,
    SECRETS_KEY,
    BadFileError,
    footer,
    hour_of,
    partition,
    readable,
    secrets_of,
)
from workers.spark.errors import JobError, JobUsageError

READERS: Final = 16
"""How many footers are read at a time: on an object store each is a round trip."""
MANY_BATCHES: Final = 1_000
"""If more batches than this are repeated, the rows of all batches are compared."""
PATTERN: Final = re.compile(r"[\\*?\[\]{}]")
AZURE: Final = ".dfs.core.windows.net"

RETRIES: Final = 3
"""How often the files are listed, as the writer may merge or remove some in the meantime."""

SHOWN_LETTERS: Final = 12
"""How many letters of a fingerprint a message shows."""

FooterCheck = Callable[[str, pq.FileMetaData], None]
"""Checks a file by its name and footer; raises JobError or BadFileError."""


@dataclass(frozen=True, slots=True)
class Period:
    """A span of time in milliseconds, without its end; None is unbounded."""

    from_ms: int | None = None
    to_ms: int | None = None

    @classmethod
    def of(cls, from_: str | None, to: str | None) -> Period:
        """The period between two ISO 8601 instants.

        >>> Period.of("2026-11-21T10:00:00Z", None)
        Period(from_ms=1795255200000, to_ms=None)

        Raises:
            JobUsageError: a text is not an instant, or the end is not after the beginning.
        """
        period = cls(parse_instant("--from", from_), parse_instant("--to", to))
        if period.from_ms is not None and period.to_ms is not None and period.to_ms <= period.from_ms:
            raise JobUsageError(f"--to: {to} is not after --from {from_}")
        return period

    def __str__(self) -> str:
        begin = "the beginning" if self.from_ms is None else format_instant(self.from_ms)
        return f"from {begin} to {'the end' if self.to_ms is None else format_instant(self.to_ms)}"

    def with_lead_in(self, hours: float) -> Period:
        """The period, beginning a number of hours earlier."""
        return self if self.from_ms is None else Period(self.from_ms - round(hours * HOUR_MS), self.to_ms)

    def overlaps_hour(self, hour_ms: int) -> bool:
        """Whether part of an hour is in the period."""
        is_begun = self.to_ms is None or hour_ms < self.to_ms
        return is_begun and (self.from_ms is None or hour_ms + HOUR_MS > self.from_ms)

    def contains(self, at_ms: Column) -> Column:
        """Whether a time is in the period."""
        after = f.lit(True) if self.from_ms is None else at_ms >= self.from_ms
        return after if self.to_ms is None else after & (at_ms < self.to_ms)


def parse_instant(field: str, text: str | None) -> int | None:
    """An ISO 8601 instant in milliseconds; UTC unless it has an offset."""
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise JobUsageError(f"{field}: {text!r} must be an instant such as 2026-11-21T10:00:00Z") from None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def format_instant(at_ms: int) -> str:
    """An instant in ISO form, for people."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}.{at_ms % 1000:03} UTC"


def read(spark: SparkSession, url: str, period: Period, check: FooterCheck | None = None) -> DataFrame:
    """The rows of a period, each once.

    Args:
        check: called with each file's footer.

    Raises:
        JobError: there are no rows, or a file is invalid; the message names the file and the field.
    """
    rows = read_all(spark, url, period, check)
    return without_duplicates(rows, repeated_batches(rows))


def read_all(spark: SparkSession, url: str, period: Period, check: FooterCheck | None = None) -> DataFrame:
    """The rows of a period, including duplicates.

    Raises:
        JobError: as ``read``.
    """
    files = _checked_files(url, period, check)
    rows = spark.read.schema(from_arrow_schema(SCHEMA)).parquet(*(_spark_path(url, file) for file in files))
    return rows if period == Period() else rows.where(period.contains(f.col("at_ms")))


def repeated_batches(rows: DataFrame) -> list[str] | None:
    """The batches with rows that are in the log twice; None if there are too many to list.

    There are few: the writer repeats a batch only after a crash. Only two narrow columns are read.
    """
    batch, place = IDENTITY
    repeated = (
        rows.groupBy(batch)
        .agg(f.count("*").alias("rows"), f.count_distinct(place).alias("places"))
        .where(f.col("rows") > f.col("places"))
        .select(batch)
        .limit(MANY_BATCHES + 1)
        .collect()
    )
    return None if len(repeated) > MANY_BATCHES else [row[0] for row in repeated]


def without_duplicates(rows: DataFrame, repeated: list[str] | None) -> DataFrame:
    """Drop the second copy of rows; only the batches that ``repeated_batches`` found are compared."""
    if repeated is None:
        return rows.dropDuplicates(list(IDENTITY))
    if not repeated:
        return rows
    is_repeated = f.col(IDENTITY[0]).isin(repeated)
    return rows.where(~is_repeated).unionByName(rows.where(is_repeated).dropDuplicates(list(IDENTITY)))


class Fingerprints:
    """Checks the secret of each file of a log.

    Attributes:
        known: the fingerprint that all files must have: the deployment's, else the first one found in a file.
            None until then.
    """

    def __init__(self, known: str | None) -> None:
        self.known = known
        self._owner = "this deployment"

    def check(self, file: str, footer: pq.FileMetaData) -> None:
        """Check one file. Files of older writers name no secret, and pass.

        Raises:
            JobError: the file names another secret.
            BadFileError: the file's fingerprints cannot be read.
        """
        for fingerprint in sorted(secrets_of(file, footer.metadata)):
            if self.known is None:
                self.known, self._owner = fingerprint, file
            elif fingerprint != self.known:
                raise JobError(
                    f"{file}: metadata {SECRETS_KEY.decode()}: its ids were hashed with another secret"
                    f" ({fingerprint[:SHOWN_LETTERS]}) than that of {self._owner}"
                    f" ({self.known[:SHOWN_LETTERS]}), so they would match no id there; leave"
                    " this file out with --from or --at, or set QUOTAGATE_HASH_SECRET to its secret"
                )


def _checked_files(url: str, period: Period, check: FooterCheck | None) -> list[str]:
    """The files of a period, after checking that each has a supported version and every column."""
    location = location_of(url)
    name = location.name
    try:
        filesystem, root = location.open()
    except (InvalidLocationError, OSError) as error:
        raise JobError(f"{name}: {location.redact(error)}") from None
    for attempt in range(RETRIES):
        files, hours = _list_files(filesystem, root, period)
        rows = 0
        try:
            with ThreadPoolExecutor(READERS) as pool:
                footers = pool.map(lambda file: footer(file, filesystem), files)
                for file, about in zip(files, footers, strict=True):
                    _check_hour(file, about)
                    if check is not None:
                        check(file, about)
                    rows += about.num_rows
        except FileNotFoundError as error:
            if attempt == RETRIES - 1:
                raise JobError(f"{name}: files vanish while they are read: {error}") from None
            continue
        except BadFileError as error:
            raise JobError(str(error)) from None
        if not rows:
            raise JobError(_no_rows(name, period, hours))
        return files
    raise AssertionError("the last attempt returns or raises")


def _check_hour(file: str, about: pq.FileMetaData) -> None:
    """Refuse a file with times outside its folder's hour: reading a period would miss those rows."""
    column = about.schema.names.index("at_ms")
    for group in range(about.num_row_groups):
        times = about.row_group(group).column(column).statistics
        if times is None or not times.has_min_max:
            continue
        for at_ms in (times.min, times.max):
            if partition(at_ms) not in file:
                raise JobError(f"{file}: column at_ms: has {at_ms}, which belongs in {partition(at_ms)}")


def _list_files(filesystem: fs.FileSystem, root: str, period: Period) -> tuple[list[str], list[int]]:
    """The files of a period, chosen by the names of their folders; and all hours of the log."""
    try:
        entries = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowException) as error:
        raise JobError(f"{root}: cannot be listed: {' '.join(str(error).split())}") from None
    hours = {
        entry.path: hour
        for entry in entries
        if entry.type == fs.FileType.File
        and readable(entry.base_name)
        and (hour := hour_of(entry.path)) is not None
    }
    files = sorted(path for path, hour in hours.items() if period.overlaps_hour(hour))
    return files, sorted(set(hours.values()))


def _no_rows(name: str, period: Period, hours: Sequence[int]) -> str:
    if not hours:
        return f"{name}: has no decision log: no file such as date=2026-11-21/hour=10/....parquet"
    first, last = (format_instant(hour)[:13] for hour in (hours[0], hours[-1]))
    return f"{name}: no row in the period {period}; the log has hours {first} to {last} UTC"


def location_of(url: str) -> StorageLocation:
    """The location of a log.

    Raises:
        JobError: the URL is invalid; the message shows only its scheme, as the rest may contain secrets.
    """
    try:
        return StorageLocation(url)
    except InvalidLocationError as error:
        raise JobError(f"{url.partition(':')[0]}://...: {error}") from None


def escape_pattern(path: str) -> str:
    r"""A path with the characters escaped that Hadoop would take for a pattern.

    >>> print(escape_pattern("/logs/a[1]"))
    /logs/a\[1\]
    """
    return PATTERN.sub(r"\\\g<0>", path)


def _spark_path(url: str, path: str) -> str:
    """A file listed by pyarrow, as a URL for Spark."""
    scheme, _, rest = url.partition("://") if "://" in url else ("file", "", "")
    host, path = rest.partition("/")[0].partition("?")[0], escape_pattern(path)
    if scheme == "file":
        return f"file://{path}"  # not percent-encoded: Spark does not decode %3D to =
    if scheme in {"hdfs", "viewfs"}:
        return f"{scheme}://{host}{path}"
    if scheme in {"abfs", "abfss"}:
        container, _, inside = path.partition("/")
        return f"{scheme}://{container}@{_azure_account(url, host)}{AZURE}/{inside}"
    return f"{ {'s3': 's3a', 'gcs': 'gs'}.get(scheme, scheme) }://{path}"


def _azure_account(url: str, host: str) -> str:
    """The account of an Azure URL: CONTAINER@ACCOUNT.dfs..., ACCOUNT.blob... or ACCOUNT@CONTAINER."""
    user, _, domain = host.rpartition("@")
    if domain.endswith((AZURE, ".blob.core.windows.net")):
        return domain.partition(".")[0]
    if user and "." not in domain:
        return user.partition(":")[0]
    raise JobError(f"{url.partition('://')[0]}://...: must be CONTAINER@ACCOUNT{AZURE}/PATH for Spark")
