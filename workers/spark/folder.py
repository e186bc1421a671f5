"""A job's output folder, on any filesystem of Spark: written under a temporary name, renamed once complete.

Object stores cannot rename a folder at once, they copy file by file. There the text files are written last:
one of them marks the folder as complete.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Self

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession

from app.redaction import url_without_secrets
from workers.spark.errors import JobError, translate

TEMPORARY: Final = "_{name}.making"
RENAMES_AT_ONCE: Final = frozenset({"file", "hdfs", "viewfs", "webhdfs"})


class OutputFolder:
    """A context for writing a folder, which is renamed to its final name on success, and removed on failure.

    Args:
        overwrite: replace a folder of this name; without it, an existing folder is an error.

    Attributes:
        renames_at_once: whether the filesystem renames a folder in one step.
    """

    def __init__(self, spark: SparkSession, url: str, *, overwrite: bool = False) -> None:
        context: Any = spark.sparkContext
        self._jvm = context._jvm  # noqa: SLF001  there is no other way to Hadoop's filesystems
        name = url_without_secrets(url)
        try:
            path = self._path(url)
            self._files = path.getFileSystem(context._jsc.hadoopConfiguration())  # noqa: SLF001
        except Py4JJavaError as error:  # the filesystem is unknown
            raise JobError(f"{name}: {translate(error, url)}") from None
        if url.startswith("file:") or "://" not in url:
            self._files.setWriteChecksum(False)  # no .crc file next to each file
        self._target = self._files.makeQualified(path)
        self.renames_at_once = str(self._target.toUri().getScheme()) in RENAMES_AT_ONCE
        self._texts: dict[str, str] = {}
        temporary = TEMPORARY.format(name=self._target.getName())
        self._temporary = self._path(f"{self._target.getParent()}/{temporary}")
        if self._files.exists(self._target) and not overwrite:
            raise JobError(f"{name}: exists already; --overwrite replaces it")

    def __enter__(self) -> Self:
        self._files.delete(self._temporary, True)
        self._files.mkdirs(self._temporary)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._files.delete(self._temporary, True)
            return
        self._files.delete(self._target, True)
        if not self._files.rename(self._temporary, self._target):
            raise JobError(f"{self._target}: cannot be created")
        for name, text in self._texts.items():
            self._write(f"{self._target}/{name}", text)

    def inside(self, name: str) -> str:
        """The URL of a file or table in the folder, while it is being written."""
        return f"{self._temporary}/{name}"

    def table(self, name: str, rows: DataFrame) -> None:
        """Write a table as Parquet."""
        rows.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(
            self.inside(name)
        )

    def text(self, name: str, text: str) -> None:
        """Write a text file."""
        if self.renames_at_once:
            self._write(self.inside(name), text)
        else:
            self._texts[name] = text

    def _write(self, url: str, text: str) -> None:
        file = self._files.create(self._path(url))
        file.write(bytearray(text.encode()))
        file.close()

    def _path(self, url: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(url)
