"""A folder of results, wherever Spark can write: made aside, and there under its name once it is whole.

An object store renames file by file. There the texts, of which one says what the folder is, come last of all.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Self

from pyspark.sql import DataFrame, SparkSession

from workers.spark.refused import Refused

ASIDE: Final = "_{name}.making"
RENAMES_AT_ONCE: Final = frozenset({"file", "hdfs", "viewfs", "webhdfs"})


class Folder:
    """A folder being made: a context that renames it to its name when it ends well, else removes it.

    Args:
        overwrite: replace what has the name; otherwise that is refused.

    Attributes:
        renames_at_once: whether the filesystem does, or copies one file after the other.
    """

    def __init__(self, spark: SparkSession, url: str, *, overwrite: bool = False) -> None:
        context: Any = spark.sparkContext
        self._jvm = context._jvm  # noqa: SLF001  there is no other way to Hadoop's filesystems
        path = self._path(url)
        self._files = path.getFileSystem(context._jsc.hadoopConfiguration())  # noqa: SLF001
        if url.startswith("file:") or "://" not in url:
            self._files.setWriteChecksum(False)  # a .crc file beside each, which nobody asked for
        self._path_ = self._files.makeQualified(path)
        self.renames_at_once = str(self._path_.toUri().getScheme()) in RENAMES_AT_ONCE
        self._texts: dict[str, str] = {}
        self._aside = self._path(f"{self._path_.getParent()}/{ASIDE.format(name=self._path_.getName())}")
        if self._files.exists(self._path_) and not overwrite:
            raise Refused(f"{url}: is there already; --overwrite replaces it")

    def __enter__(self) -> Self:
        self._files.delete(self._aside, True)
        self._files.mkdirs(self._aside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._files.delete(self._path_, True)
            if not self._files.rename(self._aside, self._path_):
                raise Refused(f"{self._path_}: cannot be made")
            for name, text in self._texts.items():
                self._write(f"{self._path_}/{name}", text)
        else:
            self._files.delete(self._aside, True)

    def inside(self, name: str) -> str:
        """The URL of something in it, while it is made."""
        return f"{self._aside}/{name}"

    def table(self, name: str, rows: DataFrame) -> None:
        """Write a table as Parquet."""
        rows.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(
            self.inside(name)
        )

    def text(self, name: str, text: str) -> None:
        """Write a file of text."""
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
