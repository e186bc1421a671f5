"""The files of a foreign history, as Hadoop's filesystems have them: their names, beginnings and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import types as t

from app.redaction import url_without_secrets
from workers.spark.errors import JobError, translate
from workers.spark.log import READERS, escape_pattern

BEGINNING: Final = 256
"""The number of bytes that are read to recognize a file's format."""

PARQUET: Final = b"PAR1"
GZIP: Final = b"\x1f\x8b"
UTF8_MARK: Final = b"\xef\xbb\xbf"
UTF16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")

NANOSECONDS: Final = "timestamp_ns"
UNSIGNED: Final = "uint64"
SPARK_TYPES: Final[Mapping[str, t.DataType]] = {
    "string": t.StringType(),
    "bigint": t.LongType(),
    "int": t.IntegerType(),
    "timestamp": t.TimestampType(),
    "timestamp_ntz": t.TimestampNTZType(),
    NANOSECONDS: t.LongType(),  # by spark.sql.legacy.parquet.nanosAsLong
    UNSIGNED: t.DecimalType(20, 0),
}
"""The types that a history may have, and how Spark reads them."""

_ANNOTATED: Final = {
    **dict.fromkeys(("STRING", "ENUM", "JSON"), "string"),
    "TIMESTAMP(MILLIS,true)": "timestamp",
    "TIMESTAMP(MICROS,true)": "timestamp",
    "TIMESTAMP(MILLIS,false)": "timestamp_ntz",
    "TIMESTAMP(MICROS,false)": "timestamp_ntz",
    "TIMESTAMP(NANOS,true)": NANOSECONDS,
    "TIMESTAMP(NANOS,false)": NANOSECONDS,
    "INTEGER(64,true)": "bigint",
    "INTEGER(64,false)": UNSIGNED,
    "INTEGER(32,false)": "bigint",
    **{f"INTEGER({bits},true)": "int" for bits in (8, 16, 32)},
    **{f"INTEGER({bits},false)": "int" for bits in (8, 16)},
    "DATE": "date",
}
_PRIMITIVE: Final = {
    "INT64": "bigint",
    "INT32": "int",
    "INT96": "timestamp",
    "DOUBLE": "double",
    "FLOAT": "float",
    "BOOLEAN": "boolean",
    "BINARY": "binary",
}

Columns = Mapping[str, "str | Columns"]
"""The type of each column by name; for a column with fields, the types of its fields."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HistoryFile:
    """A file: the URI by which Spark lists it, and its name for people."""

    uri: str
    name: str


class HistoryFiles:
    """The files of a URL: a file, a folder, or a pattern of them.

    Attributes:
        name: the URL for people, without its secrets.
        files: the files.
        partitions: columns that are in the names of folders, such as ``user=alice``.

    Raises:
        JobError: no file was found, or the filesystem does not answer; the message names the URL.
    """

    def __init__(self, spark: SparkSession, url: str) -> None:
        context: Any = spark.sparkContext
        self._jvm = context._jvm  # noqa: SLF001  there is no other way to Hadoop's filesystems
        self._configuration = context._jsc.hadoopConfiguration()  # noqa: SLF001
        self.name = url_without_secrets(url)
        try:
            path = self._jvm.org.apache.hadoop.fs.Path(url)
            files = path.getFileSystem(self._configuration)
            is_there = files.exists(path)
            self.base = url if is_there and files.getFileStatus(path).isDirectory() else None
            # A file or folder of exactly this name is no pattern.
            listed = spark.read.format("binaryFile").load(escape_pattern(url) if is_there else url)
            self.files = [HistoryFile(uri, self._name(uri)) for uri in sorted(listed.inputFiles())]
            self.partitions = listed.columns[4:]
        except (AnalysisException, Py4JJavaError) as error:
            raise JobError(f"{self.name}: {translate(error, url)}") from None
        if not self.files:
            raise JobError(f"{self.name}: the folder has no files")

    def each(self, read: Callable[[HistoryFile], T]) -> Iterator[tuple[HistoryFile, T]]:
        """Yield every file with the result of a function, which runs in threads."""
        with ThreadPoolExecutor(READERS) as pool:
            yield from zip(self.files, pool.map(read, self.files), strict=True)

    def path(self, file: HistoryFile) -> str:
        """The path of a file for Spark's readers, which take patterns."""
        return escape_pattern(str(self._path(file.uri).toString()))

    def beginning(self, file: HistoryFile) -> bytes:
        """The first bytes of a file, without leading blanks, decompressed if its name says so."""
        path = self._path(file.uri)
        codec = self._jvm.org.apache.hadoop.io.compress.CompressionCodecFactory(self._configuration).getCodec(
            path
        )
        try:
            stream = path.getFileSystem(self._configuration).open(path)
            try:
                read = stream if codec is None else codec.createInputStream(stream)
                found = bytes(
                    self._jvm.org.apache.commons.io.IOUtils.toByteArray(
                        self._jvm.org.apache.commons.io.input.BoundedInputStream(read, BEGINNING)
                    )
                )
            finally:
                stream.close()
        except Py4JJavaError as error:
            raise JobError(f"{file.name}: {translate(error)}") from None
        return found.removeprefix(UTF8_MARK).lstrip()

    def columns(self, file: HistoryFile) -> Columns:
        """The columns of a Parquet file.

        Raises:
            JobError: the file is damaged or not Parquet; the message names it and its apparent format.
        """
        source = self._jvm.org.apache.parquet.hadoop.util.HadoopInputFile
        try:
            reader = self._jvm.org.apache.parquet.hadoop.ParquetFileReader.open(
                source.fromPath(self._path(file.uri), self._configuration)
            )
        except Py4JJavaError as error:
            raise JobError(f"{file.name}: {self._why_not_parquet(file, error)}") from None
        try:
            return _columns(file.name, reader.getFileMetaData().getSchema())
        finally:
            reader.close()

    def _why_not_parquet(self, file: HistoryFile, error: Py4JJavaError) -> str:
        begins = self.beginning(file)
        if not begins:
            return "is empty, and no Parquet file"
        if begins.startswith(PARQUET):
            return "is damaged or cut off: its Parquet footer cannot be read"
        if begins.startswith((b"{", b"[")):
            return "is JSON, not Parquet: add --format json"
        if begins.startswith(GZIP):
            return "is compressed by gzip: only JSON may be, in a file whose name ends with .gz"
        if "RuntimeException" in (why := translate(error)) or "is not a Parquet file" in why:
            return "is not Parquet; a history is Parquet or JSON, so convert CSV and other formats"
        return why

    def _path(self, uri: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._jvm.java.net.URI(uri))

    def _name(self, uri: str) -> str:
        return (
            url_without_secrets(str(self._path(uri).toString())).removeprefix("file://").removeprefix("file:")
        )


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


def schema(types: Mapping[tuple[str, ...], t.DataType]) -> t.StructType:
    """The schema of columns that are named by their paths.

    >>> schema({("a", "b"): t.LongType(), ("a", "c"): t.StringType()}).simpleString()
    'struct<a:struct<b:bigint,c:string>>'
    """
    fields: list[t.StructField] = []
    for top in dict.fromkeys(path[0] for path in types):
        below = {path[1:]: type_ for path, type_ in types.items() if path[0] == top and path[1:]}
        fields.append(t.StructField(top, schema(below) if below else types[(top,)]))
    return t.StructType(fields)


def _columns(file: str, group: Any) -> Columns:
    found: dict[str, str | Columns] = {}
    for field in group.getFields():
        name = str(field.getName())
        if name in found:
            raise JobError(f"{file}: has two columns of the name {name}")
        found[name] = _type(file, field)
    return found


def _type(file: str, field: Any) -> str | Columns:
    annotation = field.getLogicalTypeAnnotation()
    written = "" if annotation is None else str(annotation.toString())
    if str(field.getRepetition().toString()) == "REPEATED":
        return "list"
    if not field.isPrimitive():
        return written.lower() or _columns(file, field.asGroupType())
    primitive = str(field.asPrimitiveType().getPrimitiveTypeName().toString())
    return (
        _ANNOTATED.get(written, written.lower()) if written else _PRIMITIVE.get(primitive, primitive.lower())
    )


def quoted(name: str) -> str:
    """The name of a column, quoted so that Spark parses nothing in it.

    >>> quoted("a.`b")
    '`a.``b`'
    """
    return f"`{name.replace('`', '``')}`"
