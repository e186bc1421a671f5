"""A foreign history in JSON: one object a line, or an array of objects, also compressed by gzip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from app.domain.digest import INT64
from workers.jobs.backfill.history_files import BEGINNING, GZIP, PARQUET, UTF8_MARK, UTF16_MARKS, HistoryFile
from workers.jobs.backfill.uses import NO_OBJECT, SHOWN, HistoryColumns, Uses, ms_of_text
from workers.jobs.errors import JobError
from workers.jobs.verdicts import Flags

PART: Final = 32_000_000
"""The size of the parts, in bytes, in which the lines of larger files are read."""

BLOCK: Final = 8_000_000
"""How many bytes of lines are in memory at a time."""

BYTES_OF_A_ROW: Final = 60
"""A guess, to choose the number of processes."""

PACKED: Final = 8
"""A guess at how many times smaller a file is when it is compressed."""

TIMES: Final = range(10**18)
"""The numbers that may be milliseconds."""


@dataclass(frozen=True, slots=True)
class JsonTask:
    """An array, or the lines that begin in a part of a file.

    Attributes:
        begin, end: the part in bytes; an end of None is the end of the file.
        rows: about how many uses it has.
    """

    file: HistoryFile
    columns: HistoryColumns
    is_array: bool
    is_packed: bool
    begin: int
    end: int | None
    rows: int

    def uses(self) -> Iterator[Uses]:
        """The uses, some at a time.

        Raises:
            JobError: the file is damaged or gone, or holds something else than objects.
        """
        try:
            for objects in self._arrays() if self.is_array else self._lines():
                yield self._uses(objects)
        except FileNotFoundError:
            raise JobError(f"{self.file.name}: was removed meanwhile; start the job again") from None
        except (OSError, pa.ArrowException) as error:
            raise self.file.unreadable(error) from None

    def _arrays(self) -> Iterator[list[dict[str, Any]]]:
        with self._opened() as stream:
            text = stream.read().removeprefix(UTF8_MARK)
        found = self._decoded(text, list)
        for each in found:
            if not isinstance(each, dict):
                raise self._no_object(msgspec.json.encode(each))
        yield found

    def _lines(self) -> Iterator[list[dict[str, Any]]]:
        for block in self._blocks():
            texts = (line.removeprefix(UTF8_MARK).strip() for line in block.splitlines())
            yield [self._decoded(text, dict) for text in texts if text]

    def _blocks(self) -> Iterator[bytes]:
        """Whole lines, many at a time."""
        with self._opened() as stream:
            at, rest = self.begin, b""
            if self.begin:  # the line that began before this part belongs to the part before
                stream.seek(self.begin - 1)
                at = self._next_line(stream)
            while block := stream.read(BLOCK if self.end is None else max(0, min(BLOCK, self.end - at))):
                at += len(block)
                whole, _, rest = (rest + block).rpartition(b"\n")
                yield whole
            if self.end is not None and at == self.end and rest:  # its last line ends in the next part
                while (block := stream.read(BLOCK)) and b"\n" not in block:
                    rest += block
                rest += block.partition(b"\n")[0]
            yield rest

    def _next_line(self, stream: IO[bytes]) -> int:
        """Move to where the first line of this part begins, or to the end of the file."""
        at = self.begin - 1
        while block := stream.read(BLOCK):
            _, newline, after = block.partition(b"\n")
            if newline:
                at += len(block) - len(after)
                stream.seek(at)
                return at
            at += len(block)
        return at

    def _opened(self) -> Any:
        filesystem = self.file.open()
        if self.is_packed:
            return filesystem.open_input_stream(self.file.path, compression="gzip")
        return filesystem.open_input_file(self.file.path)

    def _decoded(self, text: bytes, kind: type) -> Any:
        try:
            found = msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise self._no_object(text) from None
        if not isinstance(found, kind):
            raise self._no_object(text)
        return found

    def _no_object(self, text: bytes) -> JobError:
        shown = text[: 4 * SHOWN].decode(errors="replace")[:SHOWN]
        return JobError(f"{self.file.name}: {NO_OBJECT}; in {shown}")

    def _uses(self, objects: list[dict[str, Any]]) -> Uses:
        names = asdict(self.columns).values()
        principals, ids, times = ([value_of(each, name) for each in objects] for name in names)
        principal, id_ = [_text(each) for each in principals], [_text(each) for each in ids]
        return Uses(
            pa.array(principal, pa.string()),
            pa.array(id_, pa.string()),
            pa.array([_at_ms(each) for each in times], pa.int64()),
            _unusable(principals, principal),
            _unusable(ids, id_),
            (principals, ids, times),
        )


def json_tasks(file: HistoryFile, columns: HistoryColumns) -> list[JsonTask]:
    """The parts of a file; none if it is empty.

    Raises:
        JobError: the file is something else than JSON.
    """
    begins = file.beginning()
    if why := _why_not_json(begins):
        raise JobError(f"{file.name}: {why}")
    is_packed, is_array = file.path.endswith(".gz"), begins.startswith(b"[")
    if not begins and file.size <= BEGINNING:
        return []
    rows = file.size * (PACKED if is_packed else 1) // BYTES_OF_A_ROW
    if is_packed or is_array or file.size <= PART:
        return [JsonTask(file, columns, is_array, is_packed, 0, None, rows)]
    begin_at = range(0, file.size, PART)
    return [
        JsonTask(file, columns, False, False, begin, min(begin + PART, file.size), PART // BYTES_OF_A_ROW)
        for begin in begin_at
    ]


def value_of(fields: dict[str, Any], name: str) -> Any:
    """The field with exactly this name, else the one that the name's dots lead to; None if it is missing.

    >>> value_of({"a": {"b.c": 5}}, "a.b.c")
    5
    """
    if (value := fields.get(name)) is not None:
        return value
    for dot in (place for place, sign in enumerate(name) if sign == "."):
        below = fields.get(name[:dot])
        if isinstance(below, dict) and (value := value_of(below, name[dot + 1 :])) is not None:
            return value
    return None


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


def _text(value: object) -> str | None:
    """The text of a name or an id: a text, or a whole number of 64 bits; None for others."""
    if isinstance(value, str):
        return value
    return str(value) if type(value) is int and value in INT64 else None


def _unusable(values: Sequence[object], texts: Sequence[str | None]) -> Flags:
    """True for each value that is not null and has no text."""
    pairs = zip(values, texts, strict=True)
    return np.array([text is None and value is not None for value, text in pairs], bool)


def _at_ms(value: object) -> int | None:
    if isinstance(value, str):
        return ms_of_text(value)
    return value if type(value) is int and value in TIMES else None
