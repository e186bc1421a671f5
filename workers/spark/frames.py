"""Jobs over a decision log that is a data frame: a table of Iceberg, Delta or Hive in place of files.

    from workers.spark.frames import run

    code = run(spark.table("lake.quotagate_log"), ["audit", "--out", "s3://reports/today"])

The frame has the columns of ``app/decision_log/columns.py`` and gives the same rows in the same partitions
each time that it is read, as a scan of a table does; ``persist`` one that does not.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark import RDD, TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_type

from workers.decision_log.schema import ADDED, SCHEMA, BadFileError, blaming
from workers.jobs import command
from workers.jobs.batches import Task
from workers.jobs.errors import JobError, JobUsageError
from workers.jobs.files import TEXTS, FooterCheck, check_values
from workers.jobs.period import Period
from workers.jobs.progress import Progress
from workers.spark.__main__ import Spark
from workers.spark.runner import SparkRunner

T = TypeVar("T")
R = TypeVar("R")

NEEDED: Final = tuple(name for name in SCHEMA.names if name not in {"plain_ids", *ADDED})

KINDS: Final = (
    *(pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean),
    *(pa.types.is_string, pa.types.is_map),
)
"""The kinds of columns and fields, apart from lists and structs, which are compared by their parts."""

_reading: list[Iterator[pa.RecordBatch]] = []
"""The rows of the partition that an executor is reading."""


@dataclass(frozen=True, slots=True)
class FramePart:
    """A partition of the frame; its rows are there where Spark runs a function over it."""

    number: int
    rows: int

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows in several tables; texts are dictionaries."""
        for batch in _reading.pop():
            held = [name for name in columns if name in batch.schema.names]
            table = pa.Table.from_batches([batch]).select(held)
            try:
                with blaming("the data frame"):
                    check_values("the data frame", table)
            except BadFileError as error:
                raise JobError(str(error)) from None
            for place, name in enumerate(held):
                if name in TEXTS:
                    table = table.set_column(place, name, table.column(name).dictionary_encode())
            yield table


class FrameRunner(SparkRunner):
    """Runs functions over the partitions of a frame; a job's other tasks run as on any Spark."""

    def __init__(self, frame: DataFrame, progress: Progress) -> None:
        super().__init__(frame.sparkSession, progress)
        self._frame = frame

    def mapped(self, function: Callable[[int, T], Iterable[Any]], tasks: Sequence[T]) -> RDD[Any]:
        """The results of a function over each task and its place."""
        wanted = {_part_of(task).number: (place, task) for place, task in enumerate(tasks)}
        found = self._frame.mapInArrow(partial(_read, function, wanted), "content binary")
        return found.rdd.map(_unpickled)


def _part_of(task: Any) -> FramePart:
    """The partition that a task reads."""
    part = task.part if isinstance(task, Task) else task[1]
    assert isinstance(part, FramePart)
    return part


def _read(
    function: Callable[[int, T], Iterable[Any]],
    wanted: Mapping[int, tuple[int, T]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Run a function over the partition in which Spark runs this."""
    context = TaskContext.get()
    assert context is not None
    if (number := context.partitionId()) not in wanted:
        return
    _reading[:] = [batches]
    for result in function(*wanted[number]):
        yield pa.RecordBatch.from_pydict({"content": [pickle.dumps(result)]})


def _unpickled(row: Any) -> Any:
    return pickle.loads(row["content"])  # noqa: S301  this job's own bytes, as Spark moves them


class Frame(Spark):
    """Runs a job over a frame."""

    has_files = False

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame.select(*(name for name in SCHEMA.names if name in frame.columns))

    def row_groups(self, url: str, period: Period, check: FooterCheck | None = None) -> list[FramePart]:  # noqa: ARG002  as another driver's
        """The partitions of the frame.

        Raises:
            JobError: the frame has no rows.
        """
        rows = self._frame.count()
        if not rows:
            raise JobError("the data frame: has no rows")
        count = self._frame.rdd.getNumPartitions()
        return [FramePart(number, rows // count + 1) for number in range(count)]

    @contextmanager
    def runner(
        self, _arguments: argparse.Namespace, progress: Progress, _rows: int, /
    ) -> Iterator[FrameRunner]:
        """A runner in the session of the frame."""
        yield FrameRunner(self._frame, progress)


def wrong_types(name: str, found: pa.DataType, right: pa.DataType) -> Iterator[str]:
    """The columns and fields that are of another kind than the log's; their precision may differ."""
    if pa.types.is_list(right) and pa.types.is_list(found):
        yield from wrong_types(name, found.value_type, right.value_type)
    elif pa.types.is_struct(right) and pa.types.is_struct(found):
        for field in right:
            if (place := found.get_field_index(field.name)) >= 0:
                yield from wrong_types(f"{name}.{field.name}", found.field(place).type, field.type)
    elif not any(is_kind(found) and is_kind(right) for is_kind in KINDS):
        yield f"column {name}: is {found}, must be {right}"


def run(frame: DataFrame, argv: Sequence[str]) -> int:
    """Run a job over a frame; returns the exit code of the command.

    Args:
        argv: the job and its options, as after `quotagate spark`, without ``--log``.

    Raises:
        JobUsageError: the frame lacks a column of the log, or has one of another type.
    """
    if missing := [name for name in NEEDED if name not in frame.columns]:
        raise JobUsageError(f"the data frame: lacks the columns {', '.join(missing)}")
    for field in SCHEMA:
        if field.name in frame.columns:
            found = to_arrow_type(frame.schema[field.name].dataType, timezone="UTC")
            for wrong in wrong_types(field.name, found, field.type):
                raise JobUsageError(f"the data frame: {wrong}")
    return command.main(Frame(frame), [*argv, "--log", "frame"])
